"""Cancelling jobs from outside while workers run them: handlers are told, and nothing runs again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import awa
from awa import Cancel, RetryAfter, Snooze, TerminalError
from awa.worker.requests import Requests
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, count_running, ended, fence, in_state, rescue

Conn = psycopg.Connection[Any]

REQUESTS = "SELECT count(*) FROM awa.cancel_requests"


class Handlers:
    """A task whose handlers wait, until they are told or let go, and then end as asked."""

    def __init__(self, client: awa.Client, **options: Any) -> None:
        self.started = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.told: list[int] = []
        self.runs: list[int] = []
        self.ending: Callable[[], object] = lambda: None

        @client.task(retry=awa.fixed(0.0), **options)
        def work(listens: bool = True) -> object:
            job = awa.current_job()
            self.runs.append(job.id)
            self.started.release()
            while not self.go_on.is_set():
                if job.cancelled and job.id not in self.told:
                    self.told.append(job.id)
                    if listens:
                        break
                time.sleep(0.005)
            return self.ending()

        self.task = work

    def start(self, client: awa.Client, *, listens: bool = True) -> awa.Inserted:
        """A job whose handler runs."""
        job = client.insert(self.task.bind(listens))
        assert self.started.acquire(timeout=10)
        return job


@pytest.fixture
def handlers(client: awa.Client) -> Iterator[Handlers]:
    handlers = Handlers(client)
    yield handlers
    handlers.go_on.set()


def raising(error: BaseException) -> Callable[[], object]:
    def end() -> object:
        raise error

    return end


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (raising(KeyError("x")), "not needed\nKeyError: 'x'"),
        (raising(SystemExit(3)), "not needed\nSystemExit: 3"),
        (raising(TerminalError("x")), "not needed\nawa.errors.TerminalError: x"),
        (lambda: Cancel("as you wish"), "not needed\nCancel: as you wish"),
        (raising(Cancel()), "not needed\nCancel: cancelled by its handler"),
        (lambda: Snooze(0), "not needed"),
        (lambda: RetryAfter(0), "not needed"),
    ],
    ids=["raises", "exits", "terminal", "Cancel", "raises Cancel", "Snooze", "RetryAfter"],
)
def test_a_handler_that_is_told_and_does_not_succeed_is_cancelled(
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    handlers: Handlers,
    caplog: pytest.LogCaptureFixture,
    ending: Callable[[], object],
    text: str,
) -> None:
    handlers.ending = ending
    caplog.set_level(logging.INFO, "awa.job")
    start_worker(client)
    job = handlers.start(client)
    asked = client.cancel(job.id, reason="not needed")
    assert (asked.id, asked.happened, asked.state) == (job.id, "requested", "running")
    info = ended(client, job)
    assert (info.state, info.attempt) == ("cancelled", 1)
    assert [(h["outcome"], h["type"], h["text"]) for h in info.history] == [("cancelled", "Cancelled", text)]
    assert handlers.told == handlers.runs == [job.id]
    assert count(conn, REQUESTS) == 0
    assert count_running(conn) == 0
    said = [record.getMessage() for record in caplog.records if record.name == "awa.job"]
    assert said[0].endswith("somebody asked to cancel it")
    assert "cancelled as somebody asked; it ended with " in said[1]
    assert len(said) == 2


def test_a_handler_that_is_told_and_returns_has_completed_its_job(
    client: awa.Client, start_worker: StartWorker, conn: Conn, handlers: Handlers
) -> None:
    start_worker(client)
    job = handlers.start(client)
    assert client.cancel(job.id).happened == "requested"
    info = ended(client, job)
    assert (info.state, info.history, handlers.told) == ("completed", [], [job.id])
    assert count(conn, REQUESTS) == 0
    again = client.cancel(job.id, force=True)
    assert (again.happened, again.state) == ("nothing", "completed")


@pytest.mark.parametrize(("ending", "state"), [(raising(KeyError()), "cancelled"), (lambda: None, "completed")])
def test_a_worker_that_does_not_look_for_requests_runs_nothing_again(
    client: awa.Client,
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    handlers: Handlers,
    ending: Callable[[], object],
    state: str,
) -> None:
    """One of before, or one that has not looked yet: the database decides."""
    monkeypatch.setattr(Requests, "look", lambda *_: None)
    handlers.ending = ending
    start_worker(client)
    job = handlers.start(client)
    assert client.cancel(job.id).happened == "requested"
    handlers.go_on.set()
    assert ended(client, job).state == state
    assert (handlers.told, handlers.runs) == ([], [job.id])


def test_only_the_handler_that_is_meant_is_told(
    client: awa.Client, start_worker: StartWorker, handlers: Handlers
) -> None:
    handlers.ending = raising(KeyError("x"))
    start_worker(client)
    beside, meant = handlers.start(client), handlers.start(client)
    client.cancel(meant.id)
    assert ended(client, meant).state == "cancelled"
    assert handlers.told == [meant.id]
    assert client.get(beside.id).state == "running"
    handlers.ending = lambda: None
    handlers.go_on.set()
    assert ended(client, beside).state == "completed"


def test_a_handler_is_told_within_a_second(client: awa.Client, start_worker: StartWorker, handlers: Handlers) -> None:
    """By the worker's own look, whatever its heartbeat is; the bound here only ends a wait."""
    start_worker(client, heartbeat=60, stale_after=600)
    for _ in range(3):
        job = handlers.start(client)
        client.cancel(job.id)
        wait_until(lambda job=job: job.id in handlers.told, timeout=5)


def test_force_ends_the_job_and_tells_the_handler_whose_outcome_is_refused(
    client: awa.Client, start_worker: StartWorker, conn: Conn, handlers: Handlers, caplog: pytest.LogCaptureFixture
) -> None:
    handlers.ending = raising(KeyError("x"))
    start_worker(client, threads=1)
    job = handlers.start(client, listens=False)
    done = client.cancel(job.id, reason="now", force=True)
    assert (done.happened, done.state) == ("cancelled", "cancelled")
    info = client.get(job.id)
    assert (info.state, info.history[0]["text"]) == ("cancelled", "now")
    assert info.ended_at is not None
    wait_until(lambda: handlers.told == [job.id])
    assert count(conn, REQUESTS) == 1
    handlers.go_on.set()
    wait_until(lambda: "1 outcomes were refused" in caplog.text)
    assert client.get(job.id) == info
    # the thread and the claim are free again, and what told the handler is gone once another one runs
    handlers.ending = lambda: None
    assert ended(client, client.insert(handlers.task.bind())).state == "completed"
    handlers.go_on.clear()
    handlers.start(client)
    wait_until(lambda: count(conn, REQUESTS) == 0)
    assert handlers.runs.count(job.id) == 1
    assert count_running(conn) == 1


@pytest.mark.parametrize("ending", ["running", "stopped"])
def test_a_request_that_came_too_late_is_removed(
    client: awa.Client, start_worker: StartWorker, conn: Conn, handlers: Handlers, ending: str
) -> None:
    """Its attempt had succeeded before the worker looked: by a later look, or when the worker leaves."""
    worker = start_worker(client, heartbeat=60, stale_after=600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Requests, "look", lambda *_: None)
        job = handlers.start(client)
        assert client.cancel(job.id).happened == "requested"
        handlers.go_on.set()
        assert ended(client, job).state == "completed"
        assert count(conn, REQUESTS) == 1
        if ending == "stopped":
            worker.stop()
    if ending == "running":
        handlers.go_on.clear()
        handlers.start(client)
        wait_until(lambda: count(conn, REQUESTS) == 0)
    assert count(conn, REQUESTS) == 0


def test_a_handler_whose_time_is_up_after_it_was_asked_is_cancelled(
    client: awa.Client, start_worker: StartWorker
) -> None:
    """A deadline by itself means a retry; the request goes before it."""
    handlers = Handlers(client, timeout=1.5)
    start_worker(client)
    asked, beside = handlers.start(client, listens=False), handlers.start(client)
    client.cancel(asked.id)
    info = ended(client, asked)
    assert info.state == "cancelled"
    assert "DeadlineExceeded" in info.history[0]["text"]
    wait_until(lambda: handlers.runs.count(beside.id) > 1)  # its time was up too
    handlers.go_on.set()
    assert ended(client, beside).state == "completed"
    assert handlers.runs.count(asked.id) == 1


def test_a_handler_that_completed_in_its_own_transaction_is_not_cancelled(
    client: awa.Client, start_worker: StartWorker
) -> None:
    """Whatever it is told, and raises, afterwards; when the transaction is rolled back, the request counts."""
    completed = threading.Semaphore(0)

    @client.task(retry=awa.fixed(0.0))
    def work(commits: bool) -> None:
        job = awa.current_job()
        with client.connection() as conn, conn.transaction(force_rollback=not commits):
            job.complete(conn)
            completed.release()
            wait_until(lambda: job.cancelled)
        raise KeyError("x")

    start_worker(client)
    for commits, state in ((True, "completed"), (False, "cancelled")):
        job = client.insert(work.bind(commits))
        assert completed.acquire(timeout=10)
        assert client.cancel(job.id).happened == "requested"
        assert ended(client, job).state == state


def test_a_job_whose_worker_is_gone_is_cancelled_instead_of_rescued(
    client: awa.Client, start_worker: StartWorker, conn: Conn, handlers: Handlers
) -> None:
    worker = start_worker(client, poll_interval=30)
    job = handlers.start(client, listens=False)
    first = worker.runtime
    client.cancel(job.id, reason="not needed")
    fence(conn, first)
    rescue(conn, first)
    info = client.get(job.id)
    assert (info.state, info.history[0]["text"].partition(":")[0]) == ("cancelled", "not needed\nWorkerDied")
    handlers.go_on.set()
    assert ended(client, client.insert(handlers.task.bind())).state == "completed"
    assert handlers.runs.count(job.id) == 1


def test_a_shutdown_does_not_release_what_somebody_asked_to_cancel(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    """Attempts that have not started: claimed behind a handler that turned out to be slow, then given back."""
    blocked, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    @client.task()
    def work(n: int, blocks: bool = False) -> None:
        ran.append(n)
        if blocks:
            blocked.set()
            assert go_on.wait(10)

    worker = start_worker(client, threads=1)
    for job in client.insert_many([work.bind(n) for n in range(50)]):  # its handlers are known to be fast
        ended(client, job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(worker._claimer), "relieve", lambda self: None)
        jobs = client.insert_many([work.bind(n, n == 50) for n in range(50, 60)])
        assert blocked.wait(10)
        behind = [job for job in jobs if client.get(job.id).state == "running"][1:]
        assert len(behind) >= 2
        assert [client.cancel(job.id).happened for job in behind[:1]] == ["requested"]
        stopper = threading.Thread(target=worker.stop)
        stopper.start()
        assert in_state(client, behind[0], "cancelled").attempt == 1
        assert in_state(client, behind[1], "available").attempt == 1
        go_on.set()
        stopper.join()
    assert behind[0].id not in ran
    assert count(conn, REQUESTS) == 0
