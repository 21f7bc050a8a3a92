"""Two-phase commit, which refuses a transaction that has notified: with ``notify`` off nothing of ours does."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

import awa
from awa.embedded import Binaries, Server
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from tests.fixtures.db import short_directory, wait_until
from tests.fixtures.jobs import StartWorker, count, ended, in_state, worker_processes
from tests.worker.test_wakeups import BELLS

pytestmark = pytest.mark.slow  # a server of its own, since prepared transactions are off by default

Conn = psycopg.Connection[Any]

PATIENCE = 30.0


def wait_for_bells(conn: Conn, *queues: str) -> None:
    """Wait until somebody sleeps at the bell of each of *queues*."""
    wait_until(lambda: count(conn, BELLS, list(queues)) == len(queues), PATIENCE)


@pytest.fixture(scope="module")
def server(binaries: Binaries) -> Iterator[Server]:
    """A server that takes prepared transactions."""
    with short_directory() as directory:
        server = Server(binaries, directory / "pg", settings={"fsync": "off", "max_prepared_transactions": 20})
        try:
            server.start()
            yield server
        finally:
            server.stop("immediate")


@pytest.fixture
def database(server: Server) -> Iterator[str]:
    """Its database, made anew. A prepared transaction outlives whoever prepared it."""
    url = server.url("postgres")
    with psycopg.connect(url, autocommit=True) as conn:
        migrate(conn, Schema())
        yield url
        for (gid,) in conn.execute("SELECT gid FROM pg_prepared_xacts").fetchall():
            conn.execute(f"ROLLBACK PREPARED '{gid}'")
        conn.execute("DROP SCHEMA awa CASCADE")


@pytest.fixture
def client(database: str) -> Iterator[awa.Client]:
    """A client for users of two-phase commit."""
    client = awa.Client(database, notify=False)
    yield client
    client.close()


@pytest.fixture
def sleeping_worker(database: str, start_worker: StartWorker, conn: Conn) -> Iterator[awa.Client]:
    """A worker that sleeps at its bells: whoever notifies has somebody to notify."""
    client = awa.Client(database)

    @client.task()
    def work(n: int = 0) -> None: ...

    start_worker(client, poll_interval=0.3)
    wait_for_bells(conn, "default", "")
    yield client
    client.close()


PATHS: dict[str, Callable[[awa.Client, Conn], object]] = {
    "insert": lambda client, conn: client.insert({"n": 1}, kind="work", conn=conn),
    "a cursor": lambda client, conn: client.insert({"n": 1}, kind="work", conn=conn.cursor()),
    "options": lambda client, conn: client.insert({"n": 1}, kind="work", tags=["a"], metadata={"b": 1}, conn=conn),
    "soon": lambda client, conn: client.insert({"n": 1}, kind="work", delay=0.2, conn=conn),
    "many": lambda client, conn: client.insert_many([awa.NewJob({"n": 1}, kind="work")], conn=conn),
    "mixed": lambda client, conn: client.insert_many(
        [awa.NewJob({"n": 1}, kind="work"), awa.NewJob({"n": 2}, kind="work", delay=0.2)], conn=conn
    ),
    "copy": lambda client, conn: client.insert_many_copy([awa.NewJob({"n": 1}, kind="work")], conn=conn),
    "sql": lambda client, conn: conn.execute("INSERT INTO awa.jobs (kind, args) VALUES ('work', '{\"n\": 1}')"),
}

DONE = "SELECT coalesce(sum(cardinality(idx)), 0) FROM awa.completions"


def test_what_was_inserted_can_be_prepared_and_runs_once_committed(
    client: awa.Client, sleeping_worker: awa.Client, database: str, conn: Conn
) -> None:
    """By every way in. Guard: ``notify`` off; with it on, PREPARE refuses (below), as somebody sleeps at the bell."""
    for number, insert in enumerate(PATHS.values()):
        for decision in ("kept", "dropped"):
            with closing(psycopg.connect(database)) as lent:
                lent.tpc_begin(f"{decision} {number}")
                insert(client, lent)
                lent.tpc_prepare()
    time.sleep(0.5)  # a poll and more
    assert count(conn, DONE) == 0
    for number in range(len(PATHS)):
        conn.execute(f"ROLLBACK PREPARED 'dropped {number}'")
        conn.execute(f"COMMIT PREPARED 'kept {number}'")
    wait_until(lambda: count(conn, DONE) == len(PATHS) + 1, PATIENCE)  # one is two jobs
    assert count(conn, "SELECT count(*) FROM awa.jobs") == len(PATHS) + 1
    assert count(conn, "SELECT count(*) FROM awa.waiting_jobs") == 0


def test_with_notifications_it_is_refused_and_nothing_is_left(
    sleeping_worker: awa.Client, database: str, conn: Conn
) -> None:
    """What ``notify`` off is for. It depends on who sleeps, so an application finds out late."""
    for name, insert in PATHS.items():
        with closing(psycopg.connect(database)) as lent:
            wait_for_bells(conn, "default", "")
            lent.tpc_begin("tried")
            insert(sleeping_worker, lent)
            if name == "sql":  # rings for nobody by itself
                lent.execute("SELECT awa.ring('{default}')")
            with pytest.raises(psycopg.errors.FeatureNotSupported, match="NOTIFY"):
                lent.tpc_prepare()
    assert count(conn, "SELECT count(*) FROM pg_prepared_xacts") == 0
    assert count(conn, "SELECT (SELECT count(*) FROM awa.jobs) + (SELECT count(*) FROM awa.waiting_jobs)") == 0


@pytest.mark.parametrize("decision", ["COMMIT", "ROLLBACK"])
def test_a_handler_completes_and_inserts_in_a_prepared_transaction(
    client: awa.Client, sleeping_worker: awa.Client, start_worker: StartWorker, database: str, conn: Conn, decision: str
) -> None:
    """The handler waits for the decision, and raises when it was no.

    Guard: what the worker records for an attempt that called complete waits for the prepared transaction, and is
    refused when that has committed.
    """
    prepared, decided = threading.Semaphore(0), threading.Event()

    @client.task(queue="two-phase", retry=awa.fixed(0.1))
    def transfer() -> None:
        job = awa.current_job()
        with closing(psycopg.connect(database)) as own:
            own.tpc_begin(f"transfer {job.attempt}")
            client.insert({}, kind="work", conn=own)
            job.complete(own)
            own.tpc_prepare()
        prepared.release()
        assert decided.wait(PATIENCE)
        if decision == "ROLLBACK" and job.attempt == 1:
            raise RuntimeError("it was decided against")

    worker = start_worker(client, queues=["two-phase"], poll_interval=0.2)
    job = client.insert(transfer.bind())
    assert prepared.acquire(timeout=PATIENCE)
    assert client.get(job.id).state == "running"
    conn.execute(f"{decision} PREPARED 'transfer 1'")
    decided.set()
    if decision == "ROLLBACK":
        assert prepared.acquire(timeout=PATIENCE)
        conn.execute("COMMIT PREPARED 'transfer 2'")
    info = ended(client, job, timeout=PATIENCE)
    assert (info.state, info.attempt) == ("completed", 1 if decision == "COMMIT" else 2)
    wait_until(lambda: count(conn, DONE) == 1, PATIENCE)  # the job that it inserted, once
    assert count(conn, "SELECT count(*) FROM awa.jobs WHERE kind = 'work'") == 1
    worker.stop()


def test_a_handler_may_return_before_the_decision(
    client: awa.Client, start_worker: StartWorker, database: str, conn: Conn
) -> None:
    """Its attempt is running until then, and completed whatever is decided: it returned, which is a success."""

    @client.task()
    def transfer() -> None:
        job = awa.current_job()
        with closing(psycopg.connect(database)) as own:
            own.tpc_begin(f"transfer {job.id}")
            job.complete(own)
            own.tpc_prepare()

    start_worker(client, poll_interval=0.2)
    jobs = [client.insert(transfer.bind()) for _ in range(2)]
    wait_until(lambda: count(conn, "SELECT count(*) FROM pg_prepared_xacts") == 2, PATIENCE)
    time.sleep(0.5)  # the worker asks again and again
    assert [client.get(job.id).state for job in jobs] == ["running", "running"]
    for job, decision in zip(jobs, ("COMMIT", "ROLLBACK"), strict=True):
        conn.execute(f"{decision} PREPARED 'transfer {job.id}'")
    assert [ended(client, job, timeout=PATIENCE).state for job in jobs] == ["completed", "completed"]
    assert count(conn, "SELECT count(*) FROM awa.attempt_ends WHERE outcome = 'completed'") == 2


APP = """
    import time
    from contextlib import closing
    import awa, psycopg

    client = awa.Client(notify=False)

    @client.task()
    def transfer(database: str) -> None:
        with closing(psycopg.connect(database)) as own:
            own.tpc_begin(f"transfer {awa.current_job().attempt}")
            awa.current_job().complete(own)
            own.tpc_prepare()
        time.sleep(120)
"""


@pytest.mark.parametrize("decision", ["COMMIT", "ROLLBACK"])
def test_a_worker_that_dies_between_the_phases(
    client: awa.Client,
    start_worker: StartWorker,
    database: str,
    conn: Conn,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    decision: str,
) -> None:
    """Its attempt is taken back once the transaction was decided against, and not when it was committed.

    Guard: rescue inserts the attempt's end, which waits for the prepared one; it must not stand in its way for long,
    nor end what is completed.
    """
    again = threading.Event()
    with worker_processes(tmp_path, database) as processes:
        processes.module(APP)
        process = processes.start("app", "--heartbeat", "0.3", "--stale-after", "1.5")
        job = client.insert({"database": database}, kind="transfer")
        wait_until(lambda: count(conn, "SELECT count(*) FROM pg_prepared_xacts") == 1, PATIENCE)
        process.signal(signal.SIGKILL)
        process.wait()

    @client.task()
    def transfer(database: str) -> None:
        again.set()

    start_worker(client, poll_interval=0.2, heartbeat=0.3, stale_after=1.5)
    wait_until(lambda: "cannot be taken back now" in caplog.text, PATIENCE)
    assert in_state(client, job, "running")
    conn.execute(f"{decision} PREPARED 'transfer 1'")
    info = ended(client, job, timeout=PATIENCE)
    assert info.state == "completed"
    assert (info.attempt, again.is_set()) == ((1, False) if decision == "COMMIT" else (2, True))
