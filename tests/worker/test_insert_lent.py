"""Inserting on a connection of the caller's: it joins the transaction and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import ClientCursor, IsolationLevel
from psycopg.adapt import AdaptersMap, Dumper, Loader
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row, namedtuple_row, scalar_row

import awa
from awa import ConfigError, NewJob, ValidationError
from tests.fixtures.jobs import StartWorker, count, ended

Conn = psycopg.Connection[Any]
Insert = Callable[[Any], list[int]]

PATHS = ["insert", "insert_delayed", "insert_many", "insert_many_mixed", "insert_many_copy"]


@pytest.fixture
def lent(database: str) -> Iterator[Conn]:
    """A connection of the application's."""
    with psycopg.connect(database) as conn:
        yield conn


def write(client: awa.Client, path: str, conn: Any) -> int:
    """Insert by *path*; returns how many."""
    match path:
        case "insert":
            client.insert({"n": 0}, kind="k", conn=conn)
            return 1
        case "insert_delayed":
            client.insert({"n": 0}, kind="k", delay=60, conn=conn)
            return 1
        case "insert_many":
            return len(client.insert_many([NewJob({"n": n}, kind="k") for n in range(3)], conn=conn))
        case "insert_many_mixed":
            items = [NewJob({"n": n}, kind="k", delay=n and 60, tags=["t"]) for n in range(3)]
            return len(client.insert_many(items, conn=conn))
    return client.insert_many_copy([NewJob({"n": n}, kind="k") for n in range(3)], conn=conn)


def written(conn: Conn) -> int:
    return count(conn, "SELECT (SELECT count(*) FROM awa.jobs) + (SELECT count(*) FROM awa.waiting_jobs)")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("as_cursor", [False, True], ids=["connection", "cursor"])
def test_it_commits_and_rolls_back_with_the_callers_transaction(
    client: awa.Client, conn: Conn, lent: Conn, path: str, as_cursor: bool
) -> None:
    given = lent.cursor() if as_cursor else lent
    lent.execute("CREATE TABLE mine (n int)")
    lent.commit()

    lent.execute("INSERT INTO mine VALUES (1)")
    n = write(client, path, given)
    assert lent.info.transaction_status is TransactionStatus.INTRANS
    assert written(conn) == 0
    lent.rollback()
    assert (written(conn), count(conn, "SELECT count(*) FROM mine")) == (0, 0)

    lent.execute("INSERT INTO mine VALUES (1)")
    write(client, path, given)
    lent.commit()
    assert (written(conn), count(conn, "SELECT count(*) FROM mine")) == (n, 1)


@pytest.mark.parametrize("path", PATHS)
def test_it_goes_with_a_savepoint_that_is_rolled_back(client: awa.Client, conn: Conn, lent: Conn, path: str) -> None:
    client.insert({"before": True}, kind="k", conn=lent)
    with lent.transaction(force_rollback=True):
        write(client, path, lent)
    with lent.transaction():
        client.insert({"after": True}, kind="k", conn=lent)
    lent.commit()
    rows = conn.execute("SELECT args::text FROM awa.jobs ORDER BY id").fetchall()
    assert rows == [('{"before":true}',), ('{"after":true}',)]


@pytest.mark.parametrize("level", list(IsolationLevel))
def test_any_isolation_level(client: awa.Client, conn: Conn, lent: Conn, level: IsolationLevel) -> None:
    lent.isolation_level = level
    for path in PATHS:
        before = written(conn)
        lent.execute("SELECT count(*) FROM awa.jobs")
        n = write(client, path, lent)
        assert lent.isolation_level is level
        lent.commit()
        assert written(conn) == before + n


@pytest.mark.parametrize("row_factory", [dict_row, namedtuple_row, scalar_row])
def test_the_callers_row_and_cursor_factories_do_not_matter(
    client: awa.Client, database: str, conn: Conn, row_factory: Any
) -> None:
    class Cursor(ClientCursor[Any]):
        def execute(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("the caller's cursor is not ours to use")

    with psycopg.connect(database, row_factory=row_factory) as lent:
        lent.cursor_factory = Cursor
        n = sum(write(client, path, lent) + write(client, path, Cursor(lent)) for path in PATHS)
    assert written(conn) == n


class ShoutingDumper(Dumper):
    """What an application might have psycopg do with its own values, and never with ours."""

    def dump(self, obj: Any) -> bytes:
        return b"SHOUTED"


class OddLoader(Loader):
    def load(self, data: Any) -> Any:
        return "odd"


@pytest.mark.parametrize("threshold", [0, None])
@pytest.mark.parametrize("everywhere", [False, True], ids=["of-the-connection", "global"])
def test_the_callers_adapters_do_not_matter(
    client: awa.Client, database: str, conn: Conn, threshold: int | None, everywhere: bool
) -> None:
    """Guard: ``OwnCursor.adapters``."""
    copied = AdaptersMap(psycopg.adapters)
    kept = psycopg.adapters.__dict__.copy()
    lent = psycopg.connect(database, prepare_threshold=threshold)
    try:
        adapters = psycopg.adapters if everywhere else lent.adapters
        for adapted in (str, int, float, list, bytes, bool, dict):
            adapters.register_dumper(adapted, ShoutingDumper)
        for name in ("int8", "int4", "bool", "text", "json"):
            adapters.register_loader(name, OddLoader)
        if everywhere:
            lent.close()
            lent = psycopg.connect(database, prepare_threshold=threshold)
        n = 0
        for path in PATHS:
            n += write(client, path, lent)
            n += write(client, path, lent.cursor(binary=True))
        job = client.insert({"a": [1, "b"]}, kind="k", tags=["t"], conn=lent)
        lent.commit()
    finally:
        psycopg.adapters.__dict__.update(AdaptersMap(copied).__dict__)
        lent.close()
    assert kept.keys() == psycopg.adapters.__dict__.keys()
    assert written(conn) == n + 1
    assert type(job.id) is int
    assert (job.get().args, job.get().tags) == ({"a": [1, "b"]}, ["t"])


@pytest.mark.parametrize("path", PATHS)
def test_an_autocommit_connection_commits_at_once(client: awa.Client, conn: Conn, lent: Conn, path: str) -> None:
    lent.autocommit = True
    n = write(client, path, lent)
    assert lent.info.transaction_status is TransactionStatus.IDLE
    assert written(conn) == n
    with lent.transaction(force_rollback=True):
        write(client, path, lent)
    assert written(conn) == n


@pytest.mark.parametrize("path", PATHS[:-1])  # COPY has no place in a pipeline
def test_in_pipeline_mode(client: awa.Client, conn: Conn, lent: Conn, path: str) -> None:
    with lent.pipeline():
        lent.execute("CREATE TABLE mine (n int)")
        n = write(client, path, lent)
        lent.execute("INSERT INTO mine VALUES (1)")
        assert written(conn) == 0
    lent.commit()
    assert written(conn) == n
    with lent.pipeline(), lent.transaction(force_rollback=True):
        write(client, path, lent)
    lent.commit()
    assert written(conn) == n


SETTINGS = """
    SELECT name, setting FROM pg_settings
     WHERE name NOT IN ('transaction_read_only', 'transaction_isolation', 'transaction_deferrable')
    UNION ALL
    SELECT 'locks', count(*)::text FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'
    UNION ALL
    SELECT 'channels', count(*)::text FROM pg_listening_channels()
"""


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sleeps", [False, True], ids=["nobody-waits", "somebody-waits"])
def test_nothing_of_a_lent_connection_changes(
    client: awa.Client, conn: Conn, lent: Conn, path: str, sleeps: bool
) -> None:
    if sleeps:
        conn.execute("SELECT pg_advisory_lock(hashtextextended('awa.bell:default', 0))")
        conn.execute("SELECT pg_advisory_lock(hashtextextended('awa.bell:', 0))")
    lent.execute("LOAD 'plpgsql'")  # which has settings of its own
    lent.execute("SET statement_timeout = '77s'")
    lent.commit()
    lent.isolation_level = IsolationLevel.REPEATABLE_READ
    lent.row_factory = dict_row
    lent.prepare_threshold = 3
    attributes = ("autocommit", "isolation_level", "read_only", "deferrable", "row_factory", "cursor_factory")
    before = lent.execute(SETTINGS).fetchall(), [getattr(lent, name) for name in attributes], lent.prepare_threshold
    write(client, path, lent)
    after = lent.execute(SETTINGS).fetchall(), [getattr(lent, name) for name in attributes], lent.prepare_threshold
    assert after == before
    assert lent.info.transaction_status is TransactionStatus.INTRANS


REFUSED: list[dict[str, Any]] = [
    {"args": {"a": "\0"}},
    {"args": {"\0": 1}},
    {"args": {"a": float("nan")}},
    {"args": {"a": object()}},
    {"priority": 9},
    {"queue": ""},
    {"metadata": {"a": "\ud800"}},
]


@pytest.mark.parametrize("path", ["insert", "insert_many", "insert_many_copy"])
@pytest.mark.parametrize("bad", REFUSED)
def test_a_refused_job_leaves_the_transaction_usable_and_writes_nothing(
    client: awa.Client, conn: Conn, lent: Conn, path: str, bad: dict[str, Any]
) -> None:
    lent.execute("CREATE TABLE mine (n int)")
    good = NewJob({"a": 1}, kind="k")
    wrong = NewJob(**({"args": {"a": 1}, "kind": "k"} | bad))
    with pytest.raises(ValidationError) as caught:
        if path == "insert":
            client.insert(wrong, conn=lent)
        elif path == "insert_many":
            client.insert_many([good] * 99 + [wrong], conn=lent)
        else:
            client.insert_many_copy(iter([good] * 99 + [wrong]), conn=lent)
    assert caught.value.path.startswith("" if path == "insert" else "items[99].")
    assert lent.info.transaction_status is TransactionStatus.INTRANS
    lent.execute("INSERT INTO mine VALUES (1)")
    lent.commit()
    assert count(conn, "SELECT count(*) FROM mine") == 1
    assert written(conn) == 0


def test_what_is_no_connection_is_refused(client: awa.Client) -> None:
    for wrong in (object(), "dbname=x", 5, client):
        with pytest.raises(ConfigError, match="psycopg"):
            client.insert({}, kind="k", conn=wrong)  # type: ignore[arg-type]


def test_an_aborted_transaction_stays_the_callers(client: awa.Client, conn: Conn, lent: Conn) -> None:
    with pytest.raises(psycopg.errors.UndefinedTable):
        lent.execute("SELECT * FROM nothing")
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        client.insert({}, kind="k", conn=lent)
    lent.rollback()
    client.insert({}, kind="k", conn=lent)
    lent.commit()
    assert written(conn) == 1


def test_a_job_is_found_once_committed_and_runs(client: awa.Client, start_worker: StartWorker, lent: Conn) -> None:
    ran: list[int] = []

    @client.task()
    def work(n: int) -> None:
        ran.append(n)

    start_worker(client, poll_interval=30)
    gone = client.insert(work.bind(1), conn=lent)
    lent.rollback()
    kept = client.insert(work.bind(2), conn=lent)
    with pytest.raises(awa.JobNotFound):
        kept.get()
    lent.commit()
    assert ended(client, kept, timeout=5).state == "completed"
    with pytest.raises(awa.JobNotFound):
        gone.get()
    assert ran == [2]
