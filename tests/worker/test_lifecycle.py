"""Starting and stopping a worker."""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import Any

import psycopg
import pytest

import awa
from awa import ConfigError, DatabaseNotFound, SchemaNotMigrated, ShutdownTimeout
from awa.storage.line import Line, Reply
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, claimed_twice, count, count_running, ended

Conn = psycopg.Connection[Any]


def worker_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("awa-") and thread.is_alive()}


class Blocked:
    """A handler that stays until it is let go."""

    def __init__(self, client: awa.Client) -> None:
        self.started = threading.Semaphore(0)
        self.go_on = threading.Event()

        @client.task(kind="block")
        def block() -> None:
            self.started.release()
            assert self.go_on.wait(30)

        self.task = block

    def wait(self, number: int) -> None:
        for _ in range(number):
            assert self.started.acquire(timeout=10)


@pytest.fixture
def blocked(client: awa.Client) -> Any:
    blocked = Blocked(client)
    yield blocked
    blocked.go_on.set()


def test_a_context_manager_runs_jobs_and_leaves_no_thread_connection_or_row(client: awa.Client, conn: Conn) -> None:
    @client.task()
    def work() -> None: ...

    with client.worker(threads=3) as worker:
        assert worker.runtime > 0
        job = client.insert(work.bind())
        assert ended(client, job).state == "completed"
        assert {"awa-1", "awa-2", "awa-3", "awa-heartbeat", "awa-maintenance"} <= worker_threads()
    assert not worker_threads() & {"awa-1", "awa-2", "awa-3", "awa-heartbeat", "awa-maintenance"}
    wait_until(
        lambda: (
            count(
                conn,
                """SELECT count(*) FROM pg_stat_activity
                WHERE datname = current_database() AND application_name LIKE 'awa %%'
                  AND application_name <> 'awa client'""",
            )
            == 0
        )
    )
    row = conn.execute("SELECT ended_at IS NOT NULL, open_claims, pid FROM awa.runtime_instances").fetchone()
    assert row is not None
    assert row[:2] == (True, [])
    assert count_running(conn) == 0


def test_it_uses_four_connections_whatever_the_threads(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    @client.task()
    def work() -> None: ...

    start_worker(client, threads=20)
    ended(client, client.insert(work.bind()))
    names = conn.execute(
        """SELECT application_name, count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND application_name LIKE 'awa %' AND application_name <> 'awa client'
            GROUP BY 1 ORDER BY 1"""
    ).fetchall()
    assert names == [("awa heartbeat", 1), ("awa maintenance", 1), ("awa report", 1), ("awa worker", 1)]


def test_what_has_not_started_is_released_and_another_takes_it_at_once(
    client: awa.Client, start_worker: StartWorker, conn: Conn, blocked: Blocked
) -> None:
    ran: list[int] = []

    @client.task()
    def fast(n: int) -> None:
        ran.append(n)

    # as after many fast jobs: it claims far ahead of what its threads run
    worker = start_worker(client, threads=2, shutdown_timeout=20)
    ended(client, client.insert_many([fast.bind(0) for _ in range(2000)])[-1], timeout=20)
    wait_until(lambda: len(ran) == 2000)
    ran.clear()
    with conn.transaction():
        slow = [client.insert(blocked.task.bind(), conn=conn) for _ in range(2)]
        others = [client.insert(fast.bind(n), conn=conn) for n in range(1, 51)]
    blocked.wait(2)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    start_worker(client, threads=1, poll_interval=30)
    # the first one's handlers are still running
    assert all(ended(client, other, timeout=5).state == "completed" for other in others)
    assert all(client.get(other.id).attempt == 1 and not client.get(other.id).history for other in others)
    assert [client.get(job.id).state for job in slow] == ["running", "running"]
    blocked.go_on.set()
    stopping.join(10)
    assert not stopping.is_alive()
    assert sorted(ran) == list(range(1, 51))
    assert all(client.get(job.id).state == "completed" for job in slow)
    assert count_running(conn) == 0


def test_stop_in_the_gap_between_claim_and_start_releases_at_once(
    client: awa.Client, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    claimed = threading.Event()
    go_on = threading.Event()

    @client.task()
    def work(n: int) -> None:
        ran.append(n)

    exchange = Line.exchange

    def pausing(self: Line, *args: Any) -> Reply:
        reply = exchange(self, *args)
        if any(claim.attempts for claim in reply.claims):
            claimed.set()
            assert go_on.wait(10)
        return reply

    monkeypatch.setattr(Line, "exchange", pausing)
    jobs = client.insert_many([work.bind(n) for n in range(3)])
    worker = client.worker(threads=4, shutdown_timeout=10)
    worker.start()
    assert claimed.wait(10)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    wait_until(lambda: worker._claimer.is_stopping)
    go_on.set()
    stopping.join(10)
    assert not stopping.is_alive()
    assert ran == []
    for job in jobs:
        info = client.get(job.id)
        assert (info.state, info.attempt, info.history) == ("available", 1, [])
    assert count_running(conn) == 0
    assert count(conn, "SELECT count(*) FROM awa.attempt_ends WHERE outcome = 'released'") == 3


def test_handlers_that_outlive_the_grace_time_are_named(client: awa.Client, conn: Conn, blocked: Blocked) -> None:
    worker = client.worker(threads=2, shutdown_timeout=0.2)
    worker.start()
    jobs = [client.insert(blocked.task.bind()) for _ in range(2)]
    blocked.wait(2)
    assert sorted(worker.running) == [job.id for job in jobs]
    with pytest.raises(ShutdownTimeout) as caught:
        worker.stop()
    assert sorted(caught.value.job_ids) == [job.id for job in jobs]
    assert all(str(job.id) in str(caught.value) for job in jobs)
    assert count(conn, "SELECT count(*) FROM awa.runtime_instances WHERE ended_at IS NULL") == 1  # to be rescued
    assert count_running(conn) == 2


def test_handlers_that_end_within_the_grace_time_are_recorded(client: awa.Client, conn: Conn, blocked: Blocked) -> None:
    worker = client.worker(threads=3, shutdown_timeout=20)
    worker.start()
    jobs = [client.insert(blocked.task.bind()) for _ in range(3)]
    blocked.wait(3)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    wait_until(lambda: worker._claimer.is_stopping)
    blocked.go_on.set()
    stopping.join(10)
    assert not stopping.is_alive()
    assert [client.get(job.id).state for job in jobs] == ["completed"] * 3
    assert count_running(conn) == 0


def test_stop_before_start_twice_and_from_many_threads(client: awa.Client) -> None:
    @client.task()
    def work() -> None: ...

    worker = client.worker(threads=2)
    worker.stop()
    assert (worker.runtime, worker.running) == (0, [])
    worker.start()
    ended(client, client.insert(work.bind()))
    stoppers = [threading.Thread(target=worker.stop) for _ in range(5)]
    for stopper in stoppers:
        stopper.start()
    for stopper in stoppers:
        stopper.join(10)
        assert not stopper.is_alive()
    worker.stop()
    with pytest.raises(ConfigError, match="make a new one"):
        worker.start()


def test_a_worker_started_in_another_thread_works_and_touches_no_signal(client: awa.Client) -> None:
    @client.task()
    def work() -> None: ...

    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with client.worker(threads=2):
                assert ended(client, client.insert(work.bind())).state == "completed"
            with pytest.raises(ConfigError, match="main thread"):
                client.worker().run()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert not failed
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


def test_run_stops_at_a_signal_and_restores_the_handlers(client: awa.Client) -> None:
    @client.task()
    def work() -> None: ...

    job = client.insert(work.bind())
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        ended(client, job)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    client.worker(threads=1).run()
    thread.join()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert client.get(job.id).state == "completed"


def test_hooks_run_before_the_first_claim_and_after_the_last_job(client: awa.Client) -> None:
    order: list[str] = []

    @client.task()
    def work() -> None:
        order.append("work")

    @client.on_worker_start
    def first() -> None:
        order.append("start")

    @client.on_worker_stop
    def last() -> None:
        order.append("stop")

    client.insert(work.bind())
    with client.worker() as worker:
        wait_until(lambda: "work" in order)
        worker.stop()
    assert order == ["start", "work", "stop"]
    first()  # the decorator gives the function back
    assert order[-1] == "start"


def test_a_start_hook_that_raises_keeps_the_worker_from_starting(client: awa.Client, conn: Conn) -> None:
    @client.task()
    def work() -> None: ...

    @client.on_worker_start
    def broken() -> None:
        raise RuntimeError("no licence")

    job = client.insert(work.bind())
    worker = client.worker()
    with pytest.raises(RuntimeError, match="no licence"):
        worker.start()
    worker.stop()
    assert not worker_threads() & {"awa-1", "awa-heartbeat"}
    assert client.get(job.id).state == "available"


def test_a_stop_hook_that_raises_is_logged_and_the_next_runs(
    client: awa.Client, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[str] = []

    @client.task()
    def work() -> None: ...

    @client.on_worker_stop
    def broken() -> None:
        raise RuntimeError("cannot say goodbye")

    @client.on_worker_stop
    def after() -> None:
        ran.append("after")

    with client.worker():
        pass
    assert ran == ["after"]
    assert "cannot say goodbye" in caplog.text


def test_what_cannot_start_says_why(database: str, empty_database: str) -> None:
    without_tasks = awa.Client(database)
    with pytest.raises(ConfigError, match=r"@client\.task"):
        without_tasks.worker().start()

    for url, error in [
        (empty_database, SchemaNotMigrated),
        ("host=/nonexistent/socket dbname=x", DatabaseNotFound),
    ]:
        client = awa.Client(url)
        client.task(kind="work")(lambda_like)
        with pytest.raises(error):
            client.worker().start()
    for wrong in ({"threads": 0}, {"heartbeat": 10, "stale_after": 29}, {"queues": []}, {"poll_interval": -1}):
        with pytest.raises(ConfigError):
            without_tasks.worker(**wrong)


def lambda_like() -> None: ...


def test_jobs_that_pour_in_while_workers_come_and_go_all_run_once(
    client: awa.Client, conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    @client.task()
    def work(n: int) -> None:
        ran.append(n)

    inserted = 0
    for _ in range(5):
        with client.worker(threads=3):
            for _ in range(20):
                client.insert_many([work.bind(inserted + n) for n in range(20)])
                inserted += 20
    with client.worker(threads=3):
        wait_until(lambda: len(ran) >= inserted, timeout=20)
    assert sorted(ran) == list(range(inserted))
    assert count_running(conn) == 0
    assert claimed_twice(conn) == []
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
