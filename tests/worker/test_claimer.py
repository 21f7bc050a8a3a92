"""What a leader does with what goes wrong around a claim, and for those who wait meanwhile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import awa
from awa.storage import runtimes
from awa.storage.line import Line, Reply, Settled
from awa.worker import bell, claimer
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, count_running, ended, fence, in_state, rescue, terminate
from tests.fixtures.late import Gate

Conn = psycopg.Connection[Any]

BELLS = """
    SELECT count(*)
      FROM pg_locks l
      JOIN unnest(%s::text[]) q ON l.classid::bigint << 32 | l.objid::bigint = hashtextextended('awa.bell:' || q, 0)
     WHERE l.locktype = 'advisory' AND l.mode = 'ExclusiveLock' AND l.granted
       AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""

IDLE = """
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND application_name = 'awa worker' AND state = 'idle'
"""


def wait_for_bells(conn: Conn, *queues: str) -> None:
    """Wait until somebody sleeps at the bell of each of *queues*."""
    wait_until(lambda: count(conn, BELLS, list(queues)) == len(queues))


class Slow:
    """A task whose handlers stay inside until the end of the test."""

    def __init__(self, client: awa.Client) -> None:
        self.started = threading.Semaphore(0)
        self.go_on = threading.Event()

        @client.task(kind="slow")
        def slow() -> None:
            self.started.release()
            assert self.go_on.wait(30)

        self.task = slow

    def wait(self, number: int = 1) -> None:
        for _ in range(number):
            assert self.started.acquire(timeout=5)


@pytest.fixture
def work(client: awa.Client) -> awa.Task[[], None]:
    """A job that does nothing."""

    @client.task()
    def work() -> None: ...

    return work


@pytest.fixture
def slow(client: awa.Client) -> Iterator[Slow]:
    slow = Slow(client)
    yield slow
    slow.go_on.set()


@pytest.fixture
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody finds anything by polling soon."""
    monkeypatch.setattr(bell, "FIRST_POLL", 30.0)


@pytest.fixture
def no_early_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outcome does not travel with the next claim; something must see to it."""
    monkeypatch.setattr(claimer, "FLUSH_AFTER", 30.0)


def test_what_was_claimed_runs_though_a_bell_cannot_be_given_up(
    client: awa.Client, start_worker: StartWorker, conn: Conn, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: list[psycopg.Error] = []
    give_up = Line.give_up_bell

    def losing(self: Line, queue: str, *, ask_for_help: bool) -> None:
        if not failed:
            terminate(conn, "worker")
            try:
                give_up(self, queue, ask_for_help=ask_for_help)
            except psycopg.Error as error:
                failed.append(error)
                raise
        give_up(self, queue, ask_for_help=ask_for_help)

    monkeypatch.setattr(Line, "give_up_bell", losing)
    start_worker(client, threads=1, poll_interval=30)
    wait_for_bells(conn, "default")
    job = client.insert(work.bind())
    info = ended(client, job, timeout=5)
    assert (info.state, info.attempt, info.history) == ("completed", 1, [])
    assert failed
    assert ended(client, client.insert(work.bind()), timeout=5).state == "completed"


def test_the_outcome_of_a_quick_job_does_not_wait_for_slow_ones(
    client: awa.Client, start_worker: StartWorker, work: Any, slow: Slow, no_early_flush: None
) -> None:
    quick, *_ = client.insert_many([work.bind(), slow.task.bind(), slow.task.bind()])
    start_worker(client, threads=2, poll_interval=30)
    slow.wait(2)
    assert ended(client, quick, timeout=5).state == "completed"
    assert not slow.go_on.is_set()


def test_deadlines_are_kept_while_the_server_does_not_answer(
    client: awa.Client, start_worker: StartWorker, work: Any, late: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    told = threading.Semaphore(0)

    @client.task(timeout=1.5, max_attempts=1)
    def endless() -> None:
        try:
            while not over.wait(0.01):
                pass
        except awa.DeadlineExceeded:
            told.release()
            raise

    late.shut("settle_v1")
    monkeypatch.setattr(claimer, "FLUSH_AFTER", 30.0)
    inserted = client.insert_many([work.bind(), endless.bind(), endless.bind()])
    start_worker(client, threads=2, poll_interval=30)
    try:
        late.wait()  # the outcome of the quick one is on its way, though every thread is busy
        for _ in range(2):
            assert told.acquire(timeout=5)
        assert late.waiting
    finally:
        monkeypatch.undo()
        late.open()
        over.set()
    assert [ended(client, job).state for job in inserted] == ["completed", "failed", "failed"]


def test_one_thread_answers_for_many_queues(
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    work: Any,
    no_polls: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claimer, "WORK_AHEAD", 0.0)  # as with jobs that take long: never more than a thread can run
    queues = ["a", "b", "c", "d", "e"]
    start_worker(client, threads=1, queues=queues, poll_interval=30)
    for queue in ["d", "a", "e", "b", "c"]:
        wait_for_bells(conn, *queues)
        assert ended(client, client.insert(work.bind(), queue=queue), timeout=5).state == "completed"


def test_handlers_of_a_fenced_worker_are_told_though_no_thread_is_free(
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.WARNING)
    started = threading.Event()
    told = threading.Event()
    go_on = threading.Event()
    refused = threading.Semaphore(0)
    heartbeat = runtimes.heartbeat

    def counting(*args: Any, **more: Any) -> bool:
        is_known = heartbeat(*args, **more)
        if not is_known:
            refused.release()
        return is_known

    monkeypatch.setattr(runtimes, "heartbeat", counting)

    @client.task()
    def work() -> None:
        job = awa.current_job()
        if job.attempt == 1:
            started.set()
            wait_until(lambda: job.cancelled)
            told.set()
            assert go_on.wait(20)

    worker = start_worker(client, threads=1, poll_interval=30, heartbeat=0.1, stale_after=30)
    job = client.insert(work.bind())
    assert started.wait(5)
    runtime = worker.runtime
    fence(conn, runtime)
    assert told.wait(5)
    for _ in range(4):
        assert refused.acquire(timeout=5)
    assert worker.runtime == runtime  # nobody leads
    go_on.set()
    wait_until(lambda: worker.runtime != runtime)
    rescue(conn, runtime)
    assert ended(client, job).attempt == 2
    assert caplog.text.count(f"runtime {runtime} was taken for dead") == 1


def test_a_refused_flush_is_split_and_forgotten(
    client: awa.Client, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claimer, "FLUSH_AFTER", 0.1)  # the five end up in one
    refusals: list[psycopg.Error] = [psycopg.errors.LockNotAvailable("busy"), psycopg.errors.DiskFull("no room")]
    sizes: list[int] = []
    exchanged = threading.Semaphore(0)
    exchange = Line.exchange

    def refusing(self: Line, runtime: int, flushes: Any, wanted: Any) -> Reply:
        exchanged.release()
        if not (flushes and refusals):
            return exchange(self, runtime, flushes, wanted)
        error = refusals.pop(0)
        sizes.extend(flush.count for flush in flushes)
        reply = exchange(self, runtime, [], wanted)
        reply.settled = [Settled(flush, error=error) for flush in flushes]
        return reply

    monkeypatch.setattr(Line, "exchange", refusing)

    @client.task()
    def work(n: int) -> None: ...

    inserted = client.insert_many([work.bind(n) for n in range(5)])
    worker = start_worker(client, threads=2, poll_interval=30)
    assert all(ended(client, job, timeout=5).state == "completed" for job in inserted)
    assert (refusals, sizes) == ([], [5, 5])
    wait_until(lambda: not worker._outcomes.open_claims())
    assert worker._claimer._not_before == {}
    while exchanged.acquire(blocking=False):
        pass
    # idle, it asks less and less often
    asked = sum(exchanged.acquire(timeout=0.02) for _ in range(25))
    assert asked < 20


def test_a_queue_at_its_limit_calls_for_help(
    client: awa.Client, start_worker: StartWorker, conn: Conn, slow: Slow, no_polls: None
) -> None:
    start_worker(client, threads=4, queues=["q:1"], poll_interval=30)
    wait_for_bells(conn, "q")
    start_worker(client, threads=4, queues=["q"], poll_interval=30)
    wait_until(lambda: count(conn, IDLE) == 2)
    for _ in range(3):
        client.insert(slow.task.bind(), queue="q")
        slow.wait()


def test_the_bell_of_a_queue_is_heard_though_another_cannot_be_claimed_from(
    client: awa.Client, start_worker: StartWorker, conn: Conn, work: Any, slow: Slow, no_polls: None, late: Gate
) -> None:
    late.fail_once("claim_v2", "p_bell AND p_queue = 'bad'")
    start_worker(client, threads=2, queues=["good", "bad"], poll_interval=30)
    wait_until(lambda: late.has_failed)
    wait_for_bells(conn, "good")
    assert ended(client, client.insert(work.bind(), queue="good"), timeout=5).state == "completed"
    wait_for_bells(conn, "good", "bad")
    # a bell that was taken twice would be held still
    for _ in range(2):
        client.insert(slow.task.bind(), queue="good")
    slow.wait(2)
    wait_until(lambda: count(conn, BELLS, ["good", "bad"]) == 0)


def test_jobs_whose_args_are_not_found_are_put_off(
    client: awa.Client, start_worker: StartWorker, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = Line.fetch_args
    left_out: list[int] = []
    ran: list[int] = []

    def forgetful(self: Line, runtime: int, attempts: Any) -> None:
        if not left_out:
            left_out.extend(attempt.id for attempt in attempts)
            return
        fetch(self, runtime, attempts)

    monkeypatch.setattr(Line, "fetch_args", forgetful)
    monkeypatch.setattr(claimer, "FETCH_PAUSE", 0.05)

    @client.task()
    def work(n: int, text: str) -> None:
        ran.append(n)

    inserted = client.insert_many([work.bind(n, "x" * (150_000 if n else 1)) for n in range(3)])
    start_worker(client, threads=3, poll_interval=30)
    for job in inserted:
        info = ended(client, job, timeout=5)
        assert (info.state, info.attempt, info.history) == ("completed", 1, [])
    assert sorted(ran) == [0, 1, 2]
    assert left_out
    put_off = "SELECT count(*) FROM awa.attempt_ends WHERE outcome = 'snoozed'"
    assert count(conn, put_off) == len(left_out)
    wait_until(lambda: count_running(conn) == 0)


def test_a_job_whose_row_is_gone_costs_nothing_but_itself(
    client: awa.Client, start_worker: StartWorker, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = Line.fetch_args
    gone: list[int] = []

    def deleting(self: Line, runtime: int, attempts: Any) -> None:
        if not gone:
            gone.append(attempts[0].id)
            conn.execute("DELETE FROM awa.jobs WHERE id = %s", gone)
        fetch(self, runtime, attempts)

    monkeypatch.setattr(Line, "fetch_args", deleting)

    @client.task()
    def work(text: str) -> None: ...

    inserted = client.insert_many([work.bind("x" * 150_000) for _ in range(3)])
    worker = start_worker(client, threads=3, poll_interval=30)
    wait_until(lambda: gone)
    assert all(ended(client, job, timeout=5).state == "completed" for job in inserted if job.id not in gone)
    assert in_state(client, client.insert(work.bind("short")), "completed", timeout=5).attempt == 1
    wait_until(lambda: not worker._outcomes.open_claims())
