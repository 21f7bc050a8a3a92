"""An attempt whose time is up is told so, in its own thread and in no other."""

from __future__ import annotations

import threading
import time

import awa
from tests.fixtures.db import wait_until


def test_a_handler_whose_time_is_up_is_interrupted_and_retried(database: str) -> None:
    client = awa.Client(database)
    caught: list[tuple[int, bool]] = []

    @client.task(timeout=0.3, retry=awa.fixed(0.01))
    def endless() -> None:
        job = awa.current_job()
        if job.attempt > 1:
            return
        try:
            while True:
                time.sleep(0.01)
        except awa.DeadlineExceeded:
            caught.append((job.attempt, job.cancelled))
            raise

    with client.worker(threads=2):
        inserted = client.insert(endless.bind())
        wait_until(lambda: inserted.get().state is awa.JobState.COMPLETED, timeout=20)
    found = inserted.get()
    client.close()
    assert caught == [(1, True)]
    assert found.attempt == 2
    assert found.history[0]["type"] == "awa.errors.DeadlineExceeded"


def test_what_the_job_says_goes_before_what_its_kind_says(database: str) -> None:
    client = awa.Client(database)
    interrupted = threading.Event()

    @client.task(timeout=0)
    def waits(seconds: float) -> None:
        until = time.monotonic() + seconds
        try:
            while time.monotonic() < until:
                time.sleep(0.01)
        except awa.DeadlineExceeded:
            interrupted.set()
            raise awa.TerminalError("too late") from None

    with client.worker(threads=2, timeout=0.2):
        unlimited = client.insert(waits.bind(1.0))
        limited = client.insert(waits.bind(60.0), timeout=0.2)
        wait_until(lambda: limited.get().state is awa.JobState.FAILED, timeout=20)
        wait_until(lambda: unlimited.get().state.is_terminal, timeout=20)
    assert unlimited.get().state is awa.JobState.COMPLETED  # timeout=0 of its kind beats the worker's 0.2
    assert interrupted.is_set()
    client.close()


def test_a_deadline_never_hits_the_next_job_of_the_thread(database: str) -> None:
    """Handlers that end just when their time is up: the order to raise is taken back with the attempt."""
    client = awa.Client(database)
    ended: list[int] = []

    @client.task(timeout=0.25, max_attempts=1)
    def ends_about_then(n: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass

    @client.task(timeout=0)
    def follows(n: int) -> None:
        for _ in range(2000):
            pass
        ended.append(n)

    with client.worker(threads=1):
        jobs = []
        for n in range(12):
            client.insert(ends_about_then.bind(n, 0.25 + (n % 5) * 0.05))
            jobs.append(client.insert(follows.bind(n)))
        wait_until(lambda: all(job.get().state.is_terminal for job in jobs), timeout=60)
    states = {job.get().state for job in jobs}
    client.close()
    assert states == {awa.JobState.COMPLETED}
    assert sorted(ended) == list(range(12))
