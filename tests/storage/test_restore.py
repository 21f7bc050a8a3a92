"""Copies in another cluster: dumped and restored, or replicated. Nothing is claimed wrongly, and nothing is lost."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg import sql

from awa.cli import main
from awa.embedded import Binaries, Server
from awa.storage.migrate import latest_version, migrate
from tests.fixtures.db import short_directory, wait_until
from tests.fixtures.jobs import WorkerProcesses, worker_processes
from tests.storage.engine import AWA, Conn, Outcome, claim, fall_silent, insert, register, scalar, settle, transaction

pytestmark = pytest.mark.slow

APP = """
    import awa

    client = awa.Client()


    @client.task(queue="q")
    def noop(n: int) -> None:
        with client.connection() as conn:
            conn.execute("INSERT INTO public.ran VALUES (%s)", [n])
"""

FAST = ("app:client", "--queue", "q", "--threads", "2", "--heartbeat", "0.3", "--stale-after", "0.9")


@pytest.fixture(scope="module")
def second_server(binaries: Binaries) -> Iterator[Server]:
    """Another cluster, whose rows can be replicated."""
    with short_directory() as directory:
        settings = {"fsync": "off", "full_page_writes": "off", "wal_level": "logical"}
        server = Server(binaries, directory / "pg", settings=settings)
        try:
            server.start()
            yield server
        finally:
            server.stop("immediate")


@contextmanager
def new_database(server: Server) -> Iterator[str]:
    """The address of an empty database there."""
    with psycopg.connect(server.url("postgres"), autocommit=True) as conn:
        conn.execute("CREATE DATABASE copy TEMPLATE template0")
        try:
            yield server.url("copy")
        finally:
            conn.execute("DROP DATABASE copy WITH (FORCE)")


@pytest.fixture
def target(second_server: Server) -> Iterator[str]:
    """The address of an empty database in the other cluster."""
    with new_database(second_server) as url:
        yield url


@pytest.fixture
def copy(target: str) -> Iterator[Conn]:
    """A connection to it."""
    with psycopg.connect(target, autocommit=True) as conn:
        yield conn


@pytest.fixture
def workers(tmp_path: Path, target: str) -> Iterator[WorkerProcesses]:
    """Worker processes on the copy."""
    with worker_processes(tmp_path, target) as found:
        found.module(APP)
        yield found


def next_xid(conn: Conn) -> int:
    return int(scalar(conn, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"))


def pass_transactions(conn: Conn, up_to: int) -> None:
    """Let transactions go by until the next has a number of *up_to* or more."""
    count = up_to - next_xid(conn)
    if count > 0:
        conn.execute(f"DO $$ BEGIN FOR i IN 1..{count} LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$")
    assert next_xid(conn) >= up_to


def program(binaries: Binaries, name: str) -> Path:
    path = binaries.bin_dir / name
    if not path.exists():
        pytest.skip(f"{binaries.source} has no {name}")
    return path


def dump_and_restore(binaries: Binaries, source: str, target: str, directory: Path, form: str = "plain") -> None:
    file = directory / "dump"
    dump = [program(binaries, "pg_dump"), f"--format={form}", "--file", file, "--dbname", source]
    subprocess.run(dump, check=True, timeout=120)
    restore: list[str | Path]
    if form == "plain":
        restore = [program(binaries, "psql"), "-qX", "-v", "ON_ERROR_STOP=1", "-d", target, "-f", file]
    else:
        restore = [program(binaries, "pg_restore"), "--exit-on-error", "--dbname", target, file]
    subprocess.run(restore, check=True, timeout=120, stdout=subprocess.DEVNULL)


def leave_some_of_everything(conn: Conn, late: Conn) -> int:
    """Jobs 1 to 12: 1 completed, 2 to 5 running, 6 waits; 11 was late, 12 is being written. Returns the runtime."""
    conn.execute("CREATE TABLE public.ran (n integer)")
    runtime = register(conn)
    with transaction(late):
        insert(late, 11)
        insert(conn, *range(1, 11))
        members = claim(conn, runtime, limit=6).members
        late.execute("COMMIT")
    assert settle(conn, runtime, members[:1], [Outcome(members[5], "snoozed", delay=3600.0)]) == []
    conn.execute("UPDATE awa.runtime_instances SET newest_claim = %s", (members[0].claim_id,))
    conn.execute("UPDATE awa.runtime_instances SET open_claims = ARRAY[newest_claim]")
    return runtime


EVERYTHING = list(range(2, 12))


def storage(database: str, *arguments: str) -> Result:
    return CliRunner(env={"AWA_SCHEMA": None}).invoke(main, ["storage", *arguments, "--database", database])


def check(database: str) -> set[str]:
    """The names of what a check finds."""
    done = storage(database, "check", "--json")
    facts = json.loads(done.stdout)
    assert done.exit_code == (0 if facts["is_sound"] else 1)
    return {finding["name"] for finding in facts["findings"]}


def books(conn: Conn) -> list[tuple[Any, ...]]:
    tables = ("jobs", "claims", "completions", "attempt_ends", "waiting_jobs", "runtime_instances", "leases", "origin")
    return [
        (table, *(row[0] for row in conn.execute(f"SELECT t::text FROM awa.{table} t ORDER BY 1"))) for table in tables
    ]


def make_the_waiting_due(conn: Conn) -> None:
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")


def ran(conn: Conn) -> list[int]:
    return [row[0] for row in conn.execute("SELECT n FROM public.ran ORDER BY n").fetchall()]


def run_all(workers: WorkerProcesses, conn: Conn, expected: list[int]) -> None:
    """A worker runs just these, and the storage is sound afterwards."""
    make_the_waiting_due(conn)
    process = workers.start(*FAST)
    wait_until(lambda: len(ran(conn)) >= len(expected) or process.process.poll() is not None, timeout=60.0)
    process.process.terminate()
    assert process.wait(30.0) == 0, process.stderr
    assert ran(conn) == sorted(expected), process.stderr


@pytest.mark.parametrize("form", ["plain", "custom"])
def test_restored_where_fewer_transactions_went_by(
    form: str,
    binaries: Binaries,
    database: str,
    conn: Conn,
    other: Conn,
    target: str,
    copy: Conn,
    workers: WorkerProcesses,
    tmp_path: Path,
) -> None:
    pass_transactions(conn, next_xid(copy) + 10_000)
    runtime = leave_some_of_everything(conn, other)
    with transaction(other):
        insert(other, 12)
        dump_and_restore(binaries, database, target, tmp_path, form)
    assert next_xid(copy) < scalar(copy, "SELECT max(xid::text::bigint) FROM awa.jobs")
    before = books(copy)

    process = workers.start(*FAST)
    assert process.wait(30.0) == 4, process.stderr
    assert "the frontier of queue q lies beyond the transactions of this server" in process.stderr
    assert "run `awa storage rebase`" in process.stderr
    assert "Traceback" not in process.stderr
    assert books(copy) == before

    assert check(target) == {"origin", "foreign", "frontier"}
    living = storage(target, "rebase", "--yes")
    assert living.exit_code == 1 and f"worker {runtime} (host host, process 1)" in living.stderr
    assert books(copy) == before
    fall_silent(copy, runtime)
    rebased = storage(target, "rebase", "--yes")
    assert rebased.exit_code == 0, rebased.output
    assert "appended 5 entries again, took 4 attempts back" in rebased.stdout
    assert check(target) == set()
    insert(copy, 13)
    run_all(workers, copy, [*EVERYTHING, 13])
    assert check(target) == set()
    assert ran(conn) == [], "the original is as it was"


def test_restored_where_more_transactions_went_by_work_goes_on(
    binaries: Binaries,
    database: str,
    conn: Conn,
    other: Conn,
    target: str,
    copy: Conn,
    workers: WorkerProcesses,
    tmp_path: Path,
) -> None:
    """Everything lies ahead of the frontier, so nothing needs to be done but to say so."""
    runtime = leave_some_of_everything(conn, other)
    pass_transactions(copy, next_xid(conn) + 1000)
    dump_and_restore(binaries, database, target, tmp_path)
    fall_silent(copy, runtime)
    run_all(workers, copy, EVERYTHING)
    said = next(tmp_path.glob("stderr-*")).read_text()
    assert said.count("all its open jobs are within reach, so work goes on") == 1
    assert check(target) == set()


def test_jobs_that_were_inserted_into_a_copy_before_it_was_looked_at_are_not_lost(
    binaries: Binaries,
    database: str,
    conn: Conn,
    other: Conn,
    target: str,
    copy: Conn,
    workers: WorkerProcesses,
    tmp_path: Path,
) -> None:
    """Their transactions are those that the frontier takes for over; by the time a worker comes, all is within it."""
    pass_transactions(conn, next_xid(copy) + 10_000)
    runtime = leave_some_of_everything(conn, other)
    dump_and_restore(binaries, database, target, tmp_path)
    insert(copy, 21, 22)
    pass_transactions(copy, next_xid(conn) + 1000)
    fall_silent(copy, runtime)

    process = workers.start(*FAST)
    assert process.wait(30.0) == 4, process.stderr
    assert "2 open jobs of queue q lie behind its frontier" in process.stderr
    assert check(target) == {"origin", "hidden"}
    assert storage(target, "rebase", "--yes").exit_code == 0
    run_all(workers, copy, [*EVERYTHING, 21, 22])
    assert check(target) == set()


def test_a_schema_restored_without_its_data_begins_anew(
    binaries: Binaries, database: str, target: str, copy: Conn, workers: WorkerProcesses, tmp_path: Path
) -> None:
    """No value of a sequence comes along, nor the slots of the ring."""
    file = tmp_path / "schema"
    dump = [program(binaries, "pg_dump"), "--schema-only", "--file", file, "--dbname", database]
    subprocess.run(dump, check=True, timeout=120)
    psql = [program(binaries, "psql"), "-qX", "-v", "ON_ERROR_STOP=1", "-d", target, "-f", file]
    subprocess.run(psql, check=True, timeout=120, stdout=subprocess.DEVNULL)
    copy.execute("CREATE TABLE public.ran (n integer)")
    copy.execute("INSERT INTO awa.schema_migrations VALUES (%s, 'restored', 'x', now())", (latest_version(),))
    assert check(target) == {"ring"}
    assert storage(target, "rebase", "--yes").exit_code == 0
    assert check(target) == set()
    insert(copy, 1)
    run_all(workers, copy, [1])


@contextmanager
def replicated(source: str, target: Conn) -> Iterator[None]:
    """The jobs that are inserted in one database are inserted in the other, for as long as the block runs."""
    with psycopg.connect(source, autocommit=True) as publisher:
        publisher.execute(
            "CREATE PUBLICATION awa_jobs FOR TABLE awa.jobs"
            " WITH (publish = 'insert', publish_via_partition_root = true)"
        )
        publisher.execute("SELECT pg_create_logical_replication_slot('awa_jobs', 'pgoutput')")
        target.execute(
            sql.SQL(
                "CREATE SUBSCRIPTION awa_jobs CONNECTION {} PUBLICATION awa_jobs WITH (create_slot = false)"
            ).format(sql.Literal(source))
        )
        try:
            yield
        finally:
            target.execute("ALTER SUBSCRIPTION awa_jobs DISABLE")
            target.execute("ALTER SUBSCRIPTION awa_jobs SET (slot_name = NONE)")
            target.execute("DROP SUBSCRIPTION awa_jobs")
            wait_until(lambda: scalar(publisher, "SELECT NOT bool_or(active) FROM pg_replication_slots"), timeout=20.0)
            publisher.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")


@pytest.mark.parametrize("are_hidden", [True, False], ids=["hidden", "too new"])
def test_jobs_that_are_replicated_into_a_live_queue(
    are_hidden: bool, database: str, conn: Conn, target: str, copy: Conn, tmp_path: Path
) -> None:
    """Both have drawn the same numbers, and the queue's frontier is of the subscriber's transactions."""
    migrate(target, AWA)  # the other cluster is the publisher here
    conn.execute("CREATE TABLE public.ran (n integer)")
    if are_hidden:
        pass_transactions(conn, next_xid(copy) + 1000)
    else:
        pass_transactions(copy, next_xid(conn) + 1000)
    runtime = register(conn)
    insert(conn, *range(1, 7))
    members = claim(conn, runtime, limit=4).members
    assert settle(conn, runtime, members[:2]) == []
    insert(copy, 101, 102)
    with replicated(target, conn):
        wait_until(lambda: scalar(conn, "SELECT count(*) FROM awa.jobs") == 8, timeout=60.0)
        insert(copy, 103, 104, 105)
        wait_until(lambda: scalar(conn, "SELECT count(*) FROM awa.jobs") == 11, timeout=60.0)
        assert {"shared_number", "hidden" if are_hidden else "foreign"} <= check(database)
    assert claim(conn, runtime, limit=100).numbers == [5, 6], "a worker would go past the others"
    fall_silent(conn, runtime)
    rebased = storage(database, "rebase", "--yes")
    assert rebased.exit_code == 0, rebased.output
    assert check(database) == set()
    with worker_processes(tmp_path, database) as workers:
        workers.module(APP)
        run_all(workers, conn, [3, 4, 5, 6, 101, 102, 103, 104, 105])
    assert check(database) == set()
