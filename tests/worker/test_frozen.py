"""Clients that stop reading while the server holds a lock for them: others go on within seconds."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import count as counting
from typing import Any

import psycopg
import pytest
from psycopg import pq, sql
from psycopg.conninfo import make_conninfo

import awa
from awa.worker import frozen
from awa.worker.maintenance.rescue import Rescue
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, claimed_twice, count, count_available, count_running, ended
from tests.storage.engine import AWA, COME_AGAIN, fall_silent, register

Conn = psycopg.Connection[Any]

FULL = 131_072 // 1000
"""How many bodies of a thousand bytes one claim takes."""

_roles = counting(1)


class FrozenClient:
    """Sends the claims of one round trip, as a worker's line does, and never reads an answer."""

    def __init__(self, database: str, runtime: int, *queues: str) -> None:
        self._pg = pq.PGconn.connect(database.encode())
        self.pid = self._pg.backend_pid
        self._pg.nonblocking = 1
        self._pg.enter_pipeline_mode()
        for queue in queues:
            self._pg.send_query_params(
                b"SELECT * FROM awa.claim_v1($1, $2::bigint, NULL, 1000)", [queue.encode(), b"%d" % runtime]
            )
            self._pg.pipeline_sync()
        while self._pg.flush():
            pass

    def close(self) -> None:
        self._pg.finish()


@contextmanager
def frozen_client(database: str, runtime: int, *queues: str) -> Iterator[FrozenClient]:
    client = FrozenClient(database, runtime, *queues)
    try:
        yield client
    finally:
        client.close()


STATE = "SELECT state, wait_event FROM pg_stat_activity WHERE pid = %s"


def is_alive(conn: Conn, pid: int) -> bool:
    return conn.execute(STATE, [pid]).fetchone() is not None


def wait_for_state(conn: Conn, pid: int, state: str, event: str) -> None:
    wait_until(lambda: conn.execute(STATE, [pid]).fetchone() == (state, event))


@pytest.fixture
def work(client: awa.Client) -> awa.Task[[str], None]:
    """A job that does nothing with a long text."""

    @client.task()
    def work(text: str = "") -> None: ...

    return work


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds a lock is looked at soon."""
    monkeypatch.setattr(frozen, "HELD_FOR", 0.1)


def fill(client: awa.Client, work: Any, *queues: str) -> list[awa.Inserted]:
    """More jobs for each queue than one claim takes, by their bytes."""
    return [
        job
        for queue in queues
        for job in client.insert_many(awa.NewJob(work.bind("x" * 1000), queue=queue) for _ in range(FULL + 20))
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="the sizes of socket buffers are Linux's")
def test_one_claim_fits_the_buffer_of_a_client_that_never_reads(
    database: str, client: awa.Client, conn: Conn, work: Any
) -> None:
    """Guard: the limit of 128 KiB of bodies in claim_v1; with ten times that the claim stands and holds the queue."""
    fill(client, work, "a", "a", "a")
    with frozen_client(database, register(conn), "a") as stopped:
        claimed = "SELECT coalesce(sum(cardinality(entry_ids)), 0) FROM awa.claims"
        wait_until(lambda: count(conn, claimed) > 100)  # it was idle before, too
        wait_for_state(conn, stopped.pid, "idle", "ClientRead")
        flags = conn.execute("SELECT flags FROM awa.claim_v1('a', %s::bigint, NULL, 1)", [register(conn)]).fetchall()
        assert flags[-1][0] & ~COME_AGAIN == 0  # not held


@pytest.mark.parametrize("how", ["in the middle of an answer", "within a transaction"])
def test_the_queue_of_a_frozen_claimer_is_free_again_within_seconds(
    database: str,
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    work: Any,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    """Guard: HeldQueues, called by every claimer; without it the jobs wait for ever."""
    jobs = fill(client, work, "b")
    with ExitStack() as stack:
        if how == "in the middle of an answer":
            fill(client, work, "a")
            pid = stack.enter_context(frozen_client(database, register(conn), "a", "b")).pid
            wait_for_state(conn, pid, "active", "ClientWrite")
        else:
            stopped = stack.enter_context(closing(psycopg.connect(database)))
            pid = stopped.info.backend_pid
            stopped.execute("SELECT count(*) FROM awa.claim_v1('b', %s::bigint, NULL, 10)", [register(conn)])
            wait_for_state(conn, pid, "idle in transaction", "ClientRead")
        start_worker(client, threads=2, queues=["b", "c"], heartbeat=60, stale_after=600)  # whatever the leader does
        assert ended(client, jobs[-1], timeout=5).state == "completed"
        assert not is_alive(conn, pid)
        assert caplog.text.count(f"backend {pid}, which held the lock of queue:b, had waited") == 1
        assert ended(client, client.insert(work.bind(), queue="c"), timeout=5).state == "completed"
    wait_until(lambda: states(client, jobs) == {"completed"})
    assert claimed_twice(conn) == []


def states(client: awa.Client, jobs: list[awa.Inserted]) -> set[str]:
    return {str(client.get(job.id).state) for job in jobs}


@pytest.mark.parametrize("holds", ["one long claim", "claims that follow each other", "one that talks"])
def test_claimers_that_are_busy_are_left_alone(
    database: str,
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    work: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    holds: str,
) -> None:
    """Guard: how long the holder has waited for its client; ending a claim that the disk holds up would mend nothing.

    With the age of the transaction instead, or without the length of the wait, they are ended: both tried.
    """
    monkeypatch.setattr(frozen, "HELD_FOR", 0.7)
    job = client.insert(work.bind())
    key = "hashtextextended('awa.queue:default', 0)"
    held = threading.Semaphore(0)
    is_over = threading.Event()
    errors: list[BaseException] = []

    def hold() -> None:
        try:
            with psycopg.connect(database, autocommit=True) as other:
                while not is_over.is_set():
                    other.execute("BEGIN")
                    other.execute(f"SELECT pg_advisory_xact_lock({key})")
                    held.release()
                    if holds == "one that talks":
                        while not is_over.wait(0.01):
                            other.execute("SELECT 1")
                    # pg_advisory_lock: a lock of the session, so that none is let go between two claims
                    other.execute(f"SELECT pg_advisory_lock({key})")
                    other.execute("SELECT pg_sleep(%s)", [3.0 if holds == "one long claim" else 0.01])
                    other.execute("COMMIT")
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.acquire(timeout=5)
    looks = threading.Semaphore(0)
    list_holders = frozen.backends.list_holders

    def counted(*args: Any) -> Any:
        found = list_holders(*args)
        looks.release()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frozen.backends, "list_holders", counted)
        start_worker(client, threads=1, heartbeat=60, stale_after=600)
        for _ in range(3):
            assert looks.acquire(timeout=10)
    is_over.set()
    thread.join(10)
    assert errors == []
    assert "held the lock" not in caplog.text
    assert ended(client, job, timeout=5).state == "completed"


@pytest.mark.parametrize("sees", [True, False])
def test_a_holder_that_may_not_be_ended_is_told_of_once(
    database: str,
    conn: Conn,
    start_worker: StartWorker,
    caplog: pytest.LogCaptureFixture,
    quickly: None,
    sees: bool,
) -> None:
    """Guard: 42501, and what pg_stat_activity hides of other roles; neither stops the worker or fills its log."""
    role = sql.Identifier(name := f"worker_{next(_roles)}_{sees}")
    conn.execute(sql.SQL("CREATE ROLE {} LOGIN").format(role))
    looks = threading.Semaphore(0)
    list_holders = frozen.backends.list_holders

    def counted(*args: Any) -> Any:
        looks.release()
        return list_holders(*args)

    try:
        for grant in (
            "USAGE ON SCHEMA awa",
            "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA awa",
            "USAGE, SELECT ON ALL SEQUENCES IN SCHEMA awa",
            "EXECUTE ON ALL FUNCTIONS IN SCHEMA awa",
            *(["pg_read_all_stats"] if sees else []),
        ):
            conn.execute(sql.SQL("GRANT {} TO {}").format(sql.SQL(grant), role))  # type: ignore[arg-type]
        client = awa.Client(make_conninfo(database, user=name))

        @client.task()
        def work() -> None: ...

        with psycopg.connect(database) as other, pytest.MonkeyPatch.context() as patch:
            patch.setattr(frozen.backends, "list_holders", counted)
            other.execute("SELECT pg_advisory_xact_lock(hashtextextended('awa.queue:held', 0))")
            worker = start_worker(client, threads=1, queues=["held", "free"], heartbeat=60, stale_after=600)
            job = client.insert(work.bind(), queue="held")
            for _ in range(6):
                assert looks.acquire(timeout=5)
            assert ended(client, client.insert(work.bind(), queue="free"), timeout=5).state == "completed"
            told = [record for record in caplog.records if "holds the lock of queue:held" in record.getMessage()]
            assert len(told) == 1
            assert f"pg_terminate_backend({other.info.backend_pid})" in told[0].getMessage()
            assert told[0].levelno == logging.WARNING
            other.rollback()
        assert ended(client, job, timeout=5).state == "completed"
        worker.stop()
        client.close()
    finally:
        conn.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(role))


def test_the_attempts_of_a_frozen_runtime_are_taken_back(
    database: str, client: awa.Client, conn: Conn, work: Any, quickly: None
) -> None:
    """Guard: FrozenHolders in the rescue; the runtime's lock, held by its frozen claim, keeps the fence away."""
    fill(client, work, "a", "b")
    runtime = register(conn)
    with frozen_client(database, runtime, "a", "b") as stopped:
        wait_for_state(conn, stopped.pid, "active", "ClientWrite")
        fall_silent(conn, runtime)
        assert conn.execute("SELECT awa.fence_v1(%s::bigint, 30)", [runtime]).fetchone() == (False,)
        assert count_running(conn) > 100
        chore = Rescue(AWA, heartbeat=1.0, stale_after=30.0)

        def is_finished() -> bool:
            chore.run(conn, 3600.0)
            query = "SELECT count(*) FROM awa.runtime_instances WHERE id = %s AND ended_at IS NOT NULL"
            return count(conn, query, runtime) == 1

        wait_until(is_finished)
        assert not is_alive(conn, stopped.pid)
    assert count_running(conn) == 0
    assert count_available(conn) == 2 * (FULL + 20)


def test_a_runtime_that_froze_while_it_looked_is_rescued(
    database: str, client: awa.Client, conn: Conn, work: Any, quickly: None
) -> None:
    """Guard: the same when the fence stands already; the lock alone keeps every rescuer away."""
    client.insert(work.bind())
    runtime = register(conn)
    conn.execute("SELECT count(*) FROM awa.claim_v1('default', %s::bigint, NULL, 10)", [runtime])
    fall_silent(conn, runtime)
    assert conn.execute("SELECT awa.fence_v1(%s::bigint, 30)", [runtime]).fetchone() == (True,)
    with closing(psycopg.connect(database)) as stopped:
        stopped.execute("SELECT pg_advisory_xact_lock(hashtextextended('awa.runtime:' || %s::text, 0))", [runtime])
        chore = Rescue(AWA, heartbeat=1.0, stale_after=30.0)

        def is_taken_back() -> bool:
            chore.run(conn, 3600.0)
            return count_available(conn) == 1

        wait_until(is_taken_back)
        assert not is_alive(conn, stopped.info.backend_pid)
