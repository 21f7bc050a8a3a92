"""Threads whose handlers do not end: their attempts get one end, their places another thread."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from awa._core import Attempt, Crew, Handler, Outcomes
from awa.errors import DeadlineExceeded
from tests.fixtures.batches import RUNTIME, make_batch
from tests.fixtures.db import wait_until


class Staff:
    """A crew without a database, its threads, and what it was told."""

    def __init__(self, size: int, function: Callable[[], object]) -> None:
        self.outcomes = Outcomes()
        self.concluded: list[tuple[Attempt, BaseException | None]] = []
        self.late: list[tuple[Attempt, object, BaseException | None]] = []
        self.handler = Handler("work", function, lambda text: {}, is_typed=False)
        self.crew = Crew(
            size,
            self.outcomes,
            job=lambda attempt, args: None,
            conclude=self._conclude,
            late=lambda attempt, result, error, elapsed_ms: self.late.append((attempt, result, error)),
            lead=lambda: self.crew.rest(),
            chosen=Exception,
            flush_after=1e9,
        )
        self.threads: list[threading.Thread] = []
        for index in range(size):
            self.start(self.crew.work, index)

    def _conclude(self, attempt: Attempt, result: object, error: BaseException | None, elapsed_ms: int) -> None:
        self.concluded.append((attempt, error))
        self.outcomes.add(attempt, "retried", elapsed_ms=elapsed_ms)

    def start(self, target: Callable[..., object], *args: Any) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self.threads.append(thread)
        thread.start()
        return thread

    def claim(self, claim_id: int, size: int) -> list[Attempt]:
        attempts = make_batch(claim_id, size, self.handler)
        self.outcomes.opened(attempts)
        self.crew.refill(attempts, size)
        return attempts

    def replace(self, attempt: Attempt) -> threading.Thread | None:
        index = self.crew.abandon(attempt)
        return None if index is None else self.start(self.crew.take_over, index, attempt, DeadlineExceeded("too long"))

    def end(self) -> None:
        self.crew.dismiss()
        for thread in self.threads:
            thread.join(10)
        assert not any(thread.is_alive() for thread in self.threads)


class Stuck:
    """A handler that stays inside until it is let go, whatever is raised in it."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.ending: Callable[[], object] = lambda: None

    def __call__(self) -> object:
        self.started.release()
        while not self.go_on.is_set():
            with contextlib.suppress(DeadlineExceeded):
                self.go_on.wait(10)
        return self.ending()


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    stuck = Stuck()
    yield stuck
    stuck.go_on.set()


def test_another_thread_takes_the_place_of_one_that_does_not_end(stuck: Stuck) -> None:
    staff = Staff(1, lambda: stuck())
    first, second = staff.claim(1, 2)
    assert stuck.started.acquire(timeout=5)
    old = staff.threads[0]
    assert staff.replace(first) is not None
    assert stuck.started.acquire(timeout=5)  # the second runs, in the same place
    assert staff.crew.running == [second]
    assert staff.crew.abandoned == [first]
    assert (first.is_over, first.is_abandoned, second.is_over) == (True, True, False)
    assert [(attempt, type(error)) for attempt, error in staff.concluded] == [(first, DeadlineExceeded)]
    assert staff.outcomes.unfinished("q") == 1
    stuck.go_on.set()
    old.join(5)
    assert not old.is_alive()  # it leaves by itself ...
    assert staff.late == [(first, None, None)]  # ... and what it came to is only told
    assert staff.crew.abandoned == []
    staff.end()
    assert sum(flush.count for flush in staff.outcomes.take(RUNTIME)) == 2
    assert len(staff.concluded) == 1


@pytest.mark.parametrize("has_completed", [True, False])
def test_an_attempt_that_is_over_is_not_abandoned_and_an_abandoned_one_not_completed(
    stuck: Stuck, has_completed: bool
) -> None:
    staff = Staff(1, lambda: stuck())
    [attempt] = staff.claim(1, 1)
    assert staff.crew.abandon(make_batch(2, 1, staff.handler)[0]) is None  # runs nowhere
    assert stuck.started.acquire(timeout=5)
    if has_completed:
        assert attempt.begin_complete() is True
    assert staff.replace(attempt) is not None
    assert staff.crew.abandon(attempt) is None
    assert attempt.begin_complete() is False
    assert attempt.expire(DeadlineExceeded) is False
    stuck.go_on.set()
    staff.end()
    [flush] = staff.outcomes.take(RUNTIME)
    assert (flush.count, flush.is_doubtful) == (1, has_completed)


def test_what_an_abandoned_handler_leaves_behind_does_no_harm(stuck: Stuck) -> None:
    def raise_it() -> None:
        raise SystemExit("and telling of it fails too")

    stuck.ending = raise_it
    staff = Staff(1, lambda: stuck())
    del staff.late
    [attempt] = staff.claim(1, 1)
    assert stuck.started.acquire(timeout=5)
    assert attempt.expire(DeadlineExceeded) is True
    staff.replace(attempt)
    stuck.go_on.set()
    staff.end()
    assert staff.crew.abandoned == []
    assert [type(error) for _, error in staff.concluded] == [DeadlineExceeded]


# what Thread.start() tidies up the new thread may miss, and say so
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_deadline_hits_the_handler_and_no_thread_that_it_is_just_starting() -> None:
    """Guard: nobody is told while a new thread still has the number of the one that starts it, as in Python 3.11. The
    exception would end the new thread before it says that it runs, and the handler would wait for that for ever."""

    def work() -> None:
        while True:
            threading.Thread(target=lambda: None).start()

    staff = Staff(1, work)
    for attempt in staff.claim(1, 100):
        wait_until(lambda attempt=attempt: staff.crew.running == [attempt])
        wait_until(lambda attempt=attempt: attempt.expire(DeadlineExceeded))
        wait_until(lambda attempt=attempt: attempt.is_over)
    staff.end()
    # Thread.start() tidies up what it was in, and may fail at that
    errors = [error for _, error in staff.concluded if error is not None]
    assert len(errors) == 100
    assert all(isinstance(one, DeadlineExceeded) or isinstance(one.__context__, DeadlineExceeded) for one in errors)


def test_handlers_that_end_just_when_they_are_abandoned_have_one_end_each() -> None:
    """Abandoned at random, hundreds of times; who is first decides, and nobody is second."""
    dice = random.Random(3)
    moments = [dice.uniform(0, 0.0008) for _ in range(2000)]
    ran: list[int] = []

    def work() -> None:
        ran.append(1)
        until = time.monotonic() + moments[len(ran) % len(moments)]
        while time.monotonic() < until:
            pass

    staff = Staff(3, work)
    attempts = [attempt for claim_id in range(1, 5) for attempt in staff.claim(claim_id, 100)]
    abandoned = 0
    deadline = time.monotonic() + 60
    while any(staff.crew.running) or not all(attempt.is_over for attempt in attempts):  # some never reach a line
        assert time.monotonic() < deadline
        for attempt in list(staff.crew.running):
            if attempt is not None and dice.random() < 0.5:
                attempt.expire(DeadlineExceeded)
                abandoned += staff.replace(attempt) is not None
        time.sleep(dice.uniform(0, 0.002))
    wait_until(lambda: not staff.crew.abandoned)
    staff.end()
    told = Counter(id(attempt) for attempt, *_ in staff.late)
    ended = Counter(id(attempt) for attempt, _ in staff.concluded)
    flushes = staff.outcomes.take(RUNTIME)
    assert abandoned > 0
    assert sum(flush.count for flush in flushes) == len(attempts)
    assert max(ended.values()) == 1
    assert len(told) == sum(told.values()) == abandoned
    assert all(attempt.is_over for attempt in attempts)
    for flush in flushes:
        staff.outcomes.acknowledged(flush)
    assert staff.outcomes.open_claims() == []
    assert staff.outcomes.unfinished("q") == 0


def test_the_claims_that_were_received_are_remembered_until_they_are_accounted_for() -> None:
    staff = Staff(1, lambda: None)
    for claim_id in (3, 5, 8):
        staff.claim(claim_id, 1)
    wait_until(lambda: staff.outcomes.count == 3)
    for flush in staff.outcomes.take(RUNTIME):
        staff.outcomes.acknowledged(flush)
    assert staff.outcomes.open_claims() == []
    assert sorted(staff.outcomes.received_since(0)) == [3, 5, 8]
    assert sorted(staff.outcomes.received_since(5)) == [8]
    assert staff.outcomes.received_since(0) == [8]
    staff.end()
    staff.outcomes.clear()
    assert staff.outcomes.received_since(0) == []
