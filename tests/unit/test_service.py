"""The base of background threads."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from awa.worker.service import Service
from tests.fixtures.db import wait_until


class Counting(Service):
    """Counts its rounds; the test says what each does."""

    def __init__(self, act: Callable[[int], float] = lambda n: 60.0) -> None:
        super().__init__("counting")
        self.rounds = 0
        self.closed = 0
        self._act = act
        self.changed = threading.Semaphore(0)

    def step(self) -> float:
        self.rounds += 1
        self.changed.release()
        return self._act(self.rounds)

    def close(self) -> None:
        self.closed += 1


def test_it_steps_until_stopped_and_its_thread_has_a_name() -> None:
    service = Counting(lambda n: 0.0 if n < 10 else 60.0)
    service.start()
    for _ in range(10):
        assert service.changed.acquire(timeout=5)
    assert service.is_alive
    assert "awa-counting" in {thread.name for thread in threading.enumerate()}
    assert service.stop(5.0)
    assert not service.is_alive
    assert (service.rounds, service.closed) == (10, 1)


def test_wake_does_the_next_round_now() -> None:
    service = Counting()
    service.start()
    for _ in range(5):
        assert service.changed.acquire(timeout=5)
        service.wake()
    assert service.changed.acquire(timeout=5)
    assert service.stop(5.0)


def test_stop_is_fine_before_start_twice_and_from_its_own_thread() -> None:
    service = Counting()
    assert service.stop(0.0)
    assert not service.is_alive

    def stop_myself(n: int) -> float:
        own.stop(5.0)
        return 60.0

    own = Counting(stop_myself)
    own.start()
    wait_until(lambda: not own.is_alive)
    assert own.stop(5.0)
    assert own.stop(5.0)
    assert own.rounds == 1


def test_stop_tells_when_the_thread_has_not_ended() -> None:
    go_on = threading.Event()

    def hang(n: int) -> float:
        go_on.wait(10)
        return 0.0

    service = Counting(hang)
    service.start()
    assert service.changed.acquire(timeout=5)
    assert not service.stop(0.01)
    go_on.set()
    assert service.stop(5.0)


@pytest.mark.parametrize("error", [ValueError("no"), OSError("gone"), MemoryError()])
def test_a_failing_step_is_logged_counted_and_tried_again(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def fail_twice(n: int) -> float:
        if n <= 2:
            raise error
        return 60.0

    caplog.set_level(logging.WARNING)
    service = Counting(fail_twice)
    service.start()
    for _ in range(3):
        assert service.changed.acquire(timeout=5)
    assert service.closed == 2  # what it held may be broken
    assert service.stop(5.0)
    assert caplog.text.count("counting failed, again in") == 2
    assert type(error).__name__ in caplog.text


def test_a_close_that_fails_and_a_wait_that_fails_end_no_thread() -> None:
    class Rough(Counting):
        def close(self) -> None:
            super().close()
            raise OSError("close")

        def wait(self, seconds: float) -> None:
            if self.rounds == 2:
                raise OSError("wait")
            super().wait(seconds)

    def act(n: int) -> float:
        if n == 1:
            raise ValueError("step")
        return 0.01

    service = Rough(act)
    service.start()
    for _ in range(5):
        assert service.changed.acquire(timeout=5)
    assert service.is_alive
    assert service.stop(5.0)


def test_an_error_that_cannot_be_printed_ends_no_thread() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def act(n: int) -> float:
        if n == 1:
            raise Mute
        return 60.0

    service = Counting(act)
    service.start()
    for _ in range(2):
        assert service.changed.acquire(timeout=5)
    assert service.stop(5.0)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
@pytest.mark.parametrize("where", ["step", "close"])
def test_what_is_no_exception_ends_the_thread_and_is_logged(
    error: BaseException, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Fatal(Counting):
        def step(self) -> float:
            if where == "step":
                raise error
            raise ValueError("the step fails")

        def close(self) -> None:
            if where == "close":
                raise error

    caplog.set_level(logging.CRITICAL)
    service = Fatal()
    service.start()
    wait_until(lambda: not service.is_alive)
    [record] = caplog.records
    assert (record.levelno, record.getMessage()) == (logging.CRITICAL, "counting has ended")
    assert record.exc_info is not None and record.exc_info[1] is error
    assert service.stop(0.0)
