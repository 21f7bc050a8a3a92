"""The primary dies and its standby takes over; or the server that everybody is connected to refuses to write.

A promoted standby has the system identifier of its primary, so its rows are trusted. With synchronous replication
nothing that was acknowledged is lost; what was claimed and not acknowledged may run again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import awa
from awa.embedded import Binaries, Server, _create_directory
from awa.errors import DatabaseNotFound
from awa.storage import line, pool
from awa.storage.connection import connect
from awa.storage.migrate import migrate
from awa.storage.pool import Pool
from awa.storage.schema import Schema
from tests.faults.test_outage import APP, QUICK
from tests.fixtures.db import short_directory, wait_until
from tests.fixtures.jobs import StartWorker, WorkerProcesses, claimed_twice, count, worker_processes

Conn = psycopg.Connection[Any]


@dataclass
class Pair:
    """A primary and its standby, which commits wait for."""

    primary: Server
    standby: Server

    @property
    def address(self) -> str:
        """Of both, the standby first, and not a word of which is meant."""
        hosts = ",".join(str(server.socket_directory) for server in (self.standby, self.primary))
        return make_conninfo(self.primary.url(), host=hosts, port="5432,5432")


def open_directly(server: Server) -> Conn:
    return psycopg.connect(server.url(), autocommit=True)


def copy_server(primary: Server, directory: Path) -> Server:
    """Start a streaming standby of *primary* in *directory*."""
    backup = primary.binaries.bin_dir / "pg_basebackup"
    if not backup.exists():
        pytest.skip(f"no {backup}")
    user = primary._user()
    directory.mkdir(0o755)
    standby = Server(primary.binaries, directory, settings={"hot_standby": "on"})
    _create_directory(standby.data, user)
    source = make_conninfo("", host=str(primary.socket_directory), user="postgres")
    done = primary._run([backup, "-d", source, "-D", standby.data, "-R", "-X", "stream", "-c", "fast"], user)
    assert done.returncode == 0, done.stdout
    standby.start()
    return standby


@pytest.fixture
def pair(binaries: Binaries) -> Iterator[Pair]:
    """Both servers, with the schema, and synchronous."""
    with short_directory() as directory:
        primary = Server(binaries, directory / "a")
        standby: Server | None = None
        try:
            primary.start()
            migrate(primary.url(), Schema())
            standby = copy_server(primary, directory / "b")
            with open_directly(primary) as conn:
                conn.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
                conn.execute("SELECT pg_reload_conf()")
                state = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
                wait_until(lambda: conn.execute(state).fetchone(), timeout=20)
            yield Pair(primary, standby)
        finally:
            primary.stop("immediate")
            if standby is not None:
                standby.stop("immediate")


COMPLETED = """
    SELECT j.id FROM awa.jobs j JOIN awa.claims c ON c.slot = j.slot AND j.entry_id = ANY (c.entry_ids)
      JOIN awa.completions x ON x.slot = c.slot AND x.claim_id = c.claim_id
       AND array_position(c.entry_ids, j.entry_id) = ANY (x.idx)
"""


def completed(conn: Conn) -> list[int]:
    return [row[0] for row in conn.execute(COMPLETED).fetchall()]


@pytest.mark.slow
def test_worker_and_client_go_on_at_the_promoted_standby_and_nothing_acknowledged_is_lost(
    pair: Pair, tmp_path: Path
) -> None:
    """Guards: of several hosts the one that can be written to is meant; an outcome is kept until it is acknowledged.

    Without the first, worker and client connect to the standby, which is named first: tried."""
    client = awa.Client(pair.address)
    lock = threading.Lock()
    inserted: list[int] = []
    is_over = threading.Event()

    def produce() -> None:
        while not is_over.is_set():
            try:
                job = client.insert({"seconds": 0.0}, kind="nap")
            except (psycopg.Error, DatabaseNotFound):
                continue
            with lock:
                inserted.append(job.id)
            time.sleep(0.005)

    with worker_processes(tmp_path, pair.address) as processes:
        processes.module(APP)
        worker = processes.start("app:client", "--threads", "4", *QUICK)
        wait_until(lambda: " runs " in worker.stderr, timeout=30)
        producer = threading.Thread(target=produce)
        producer.start()
        try:
            with open_directly(pair.primary) as conn:
                wait_until(lambda: len(completed(conn)) > 50, timeout=30)
                before = set(completed(conn))  # visible, so the standby has them
            pair.primary.stop("immediate")
            with lock:
                acknowledged = list(inserted)
            with open_directly(pair.standby) as conn:
                conn.execute("SELECT pg_promote()")
            wait_until(lambda: len(inserted) > len(acknowledged) + 20, timeout=40)
        finally:
            is_over.set()
            producer.join(60)
        assert not producer.is_alive()
        with open_directly(pair.standby) as conn:
            assert before <= set(completed(conn))
            wait_until(lambda: set(inserted) <= set(completed(conn)), timeout=40)
            found = completed(conn)
            assert len(found) == len(set(found))
            assert claimed_twice(conn) == []
        ran = [line.split()[1] for line in (tmp_path / "ran").read_text().splitlines() if line.startswith("end")]
        assert {job_id for job_id in before if ran.count(str(job_id)) > 1} == set()
        worker.signal(signal.SIGTERM)
        assert worker.wait(30) == 0, worker.stderr
        assert "another cluster" not in worker.stderr
        assert "came from" not in worker.stderr
    client.close()


@pytest.mark.slow
def test_a_synchronous_standby_that_is_away_holds_up_and_costs_nothing(
    pair: Pair, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every commit waits for it, the heartbeat's too. Guards: what was given up is ended, so that connections do not
    add up; a flush is sent again under its number; nobody is fenced, since a fence would have to commit."""
    monkeypatch.setattr(line, "REPLY_TIMEOUT", 1.0)
    monkeypatch.setattr(pool, "ANSWER_WITHIN", 1.0)
    client = awa.Client(pair.primary.url())
    runs: list[int] = []

    @client.task()
    def work() -> None:
        runs.append(awa.current_job().id)

    worker = start_worker(client, threads=4, heartbeat=0.5, stale_after=2.0)
    runtime = worker.runtime
    jobs = client.insert_many([work.bind() for _ in range(20)])
    with open_directly(pair.primary) as conn:
        conn.execute("SET synchronous_commit = local")
        wait_until(lambda: len(completed(conn)) == len(jobs), timeout=20)
        pair.standby.stop("immediate")
        with pytest.raises(psycopg.OperationalError, match="has not answered"):
            client.insert(work.bind())
        until = time.monotonic() + 5
        most = 0
        while time.monotonic() < until:
            most = max(most, count(conn, "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'awa %'"))
            time.sleep(0.05)
        assert most < 9  # six were seen; ten without the guard
        pair.standby.start()
        jobs += client.insert_many([work.bind() for _ in range(20)])
        wait_until(lambda: {job.id for job in jobs} <= set(completed(conn)), timeout=30)
        assert len(runs) == len(set(runs))
        time.sleep(2.5)  # longer than stale_after
        assert count(conn, "SELECT count(*) FROM awa.gone_runtimes") == 0
    assert worker.runtime == runtime
    client.close()


@pytest.mark.slow
def test_a_server_that_refuses_to_write_is_not_usable_until_it_writes_again(
    own_server: Server, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """Guard: 25006 counts as a lost connection. Taken for an error of the flush, its outcomes were recorded one by one,
    five seconds after the server wrote again."""
    migrate(own_server.url(), Schema())
    client = awa.Client(own_server.url())
    go_on = threading.Event()
    begun = threading.Semaphore(0)

    @client.task()
    def work() -> None:
        begun.release()
        assert go_on.wait(60)

    worker = start_worker(client, threads=4, heartbeat=0.5, stale_after=2, poll_interval=0.5)
    runtime = worker.runtime
    jobs = client.insert_many([work.bind() for _ in range(3)])
    assert all(begun.acquire(timeout=20) for _ in jobs)
    waiting = client.insert(work.bind(), queue="elsewhere")
    with psycopg.connect(own_server.url(), autocommit=True, options="-c default_transaction_read_only=off") as conn:

        def turn(value: str) -> None:
            conn.execute(f"ALTER SYSTEM SET default_transaction_read_only = {value}")
            conn.execute("SELECT pg_reload_conf()")

        turn("on")
        caplog.clear()
        go_on.set()
        with pytest.raises(DatabaseNotFound, match=r"refuses to write \(it is read-only\): name the primary"):
            while True:  # the reload reaches a connection between two statements
                client.insert(work.bind(), queue="elsewhere")
        for insert in (
            lambda: client.insert_many([work.bind()] * 2),
            lambda: client.insert_many_copy([work.bind()] * 2),
            lambda: client.cancel(waiting.id),
            lambda: client.admin.move(waiting.id, "other"),
        ):
            with pytest.raises(DatabaseNotFound, match="read-only"):
                insert()
        assert client.get(jobs[0].id).state == "running"
        client.admin.queue_counts()
        time.sleep(4.0)  # twice stale_after
        tried = [record for record in caplog.records if "claiming failed" in record.getMessage()]
        assert 1 <= len(tried) < 20
        assert any("read-only" in record.getMessage() for record in tried)
        assert not any(record.exc_info for record in caplog.records if record.name.startswith("awa"))
        with pytest.raises(DatabaseNotFound, match="read-only"):
            connect(own_server.url(), name="start")
        turn("off")
        wait_until(lambda: {client.get(job.id).state for job in jobs} == {"completed"}, timeout=20)
        assert {client.get(job.id).attempt for job in jobs} == {1}
        later = client.insert(work.bind())
        wait_until(lambda: client.get(later.id).state == "completed", timeout=20)
        assert worker.runtime == runtime
        assert count(conn, "SELECT count(*) FROM awa.gone_runtimes") == 0
    client.close()


def test_a_worker_does_not_start_where_it_cannot_write(processes: WorkerProcesses, database: str) -> None:
    """One sentence and the exit code for no database; and what only looks, works."""
    processes.module(APP)
    read_only = make_conninfo(database, options="-c default_transaction_read_only=on")
    worker = processes.start("app:client", AWA_DATABASE_URL=read_only)
    assert worker.wait(30) == 69
    assert worker.stderr.count("\n") == 1
    assert "refuses to write (it is read-only)" in worker.stderr
    with connect(read_only, name="storage", writes=False) as conn:
        assert conn.execute("SHOW transaction_read_only").fetchone() == ("on",)


@contextmanager
def parameters(conninfo: str) -> Iterator[list[str | None]]:
    pool = Pool(lambda: conninfo)
    with connect(conninfo, name="worker") as own, pool.connection() as lent:
        yield [conn.info.get_parameters().get("target_session_attrs") for conn in (own, lent)]
    pool.close()


def test_of_several_hosts_the_one_that_can_be_written_to_is_meant_unless_somebody_says_otherwise(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: the default of target_session_attrs, which goes behind the connection string and the environment."""
    host = psycopg.conninfo.conninfo_to_dict(database)["host"]
    two = make_conninfo(database, host=f"/nonexistent/socket,{host}", port="5432,5432")
    with parameters(two) as found:
        assert found == ["read-write"] * 2
    with parameters(make_conninfo(two, target_session_attrs="primary")) as found:
        assert found == ["primary"] * 2
    with parameters(database) as found:
        assert found == [None] * 2
    with monkeypatch.context() as patch:
        patch.setenv("PGTARGETSESSIONATTRS", "primary")
        with parameters(two) as found:
            assert "read-write" not in found
    with monkeypatch.context() as patch:
        patch.setenv("PGHOST", f"/nonexistent/socket,{host}")
        with parameters(make_conninfo("", user="postgres", dbname=make_dbname(database))) as found:
            assert found == ["read-write"] * 2
    with pytest.raises(DatabaseNotFound, match="none of the hosts can be written to: promote one"):
        connect(make_conninfo(two, options="-c default_transaction_read_only=on"), name="worker")


def make_dbname(database: str) -> str:
    return str(psycopg.conninfo.conninfo_to_dict(database)["dbname"])
