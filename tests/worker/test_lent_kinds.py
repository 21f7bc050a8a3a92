"""What ``conn=`` takes: the connections of others, their transactions and savepoints, and what cannot be lent."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

import awa
from awa import ConfigError, NewJob, PermissionDenied, SchemaNotMigrated, ValidationError
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, ended
from tests.fixtures.lenders import KINDS, django_connection, engine_of
from tests.worker.test_insert_lent import PATHS, SETTINGS, write, written

Conn = psycopg.Connection[Any]

kinds = pytest.mark.parametrize("kind", KINDS)


class Undone(Exception):
    """Raised to have a block undone."""


def mine(conn: Conn) -> int:
    return count(conn, "SELECT count(*) FROM mine")


# --- each kind in each way


@kinds
def test_jobs_belong_to_the_transaction_that_was_lent(client: awa.Client, conn: Conn, database: str, kind: str) -> None:
    """Guard: the statement goes through the connection of the transaction, which has begun (``_begin``, or a Session's
    ``connection()``): without it commit() does nothing, and what was only enqueued is lost."""
    conn.execute("CREATE TABLE mine (n int)")
    jobs, rows = 0, 0
    with KINDS[kind](database) as lender:
        for path in PATHS:
            write(client, path, lender.conn)
            assert written(conn) == jobs
            lender.execute("INSERT INTO mine VALUES (1)")
            lender.rollback()
            assert (written(conn), mine(conn)) == (jobs, rows)

            jobs += write(client, path, lender.conn)  # nothing but this is in the transaction
            lender.commit()
            assert written(conn) == jobs

            lender.execute("INSERT INTO mine VALUES (1)")
            jobs += write(client, path, lender.conn)
            lender.commit()
            rows += 1
            assert (written(conn), mine(conn)) == (jobs, rows)


@kinds
def test_jobs_go_with_a_savepoint(client: awa.Client, conn: Conn, database: str, kind: str) -> None:
    """Guard: the savepoint of a COPY is closed again, and no statement of ours ends one of the application's."""
    conn.execute("CREATE TABLE mine (n int)")
    with KINDS[kind](database) as lender:
        jobs = 0
        for path in PATHS:
            jobs += write(client, path, lender.conn)
            with suppress(Undone), lender.savepoint():
                write(client, path, lender.conn)
                lender.execute("INSERT INTO mine VALUES (1)")
                raise Undone
            with lender.savepoint():
                jobs += write(client, path, lender.conn)
                lender.execute("INSERT INTO mine VALUES (2)")
        lender.commit()
    assert written(conn) == jobs
    assert conn.execute("SELECT DISTINCT n FROM mine").fetchall() == [(2,)]


@kinds
def test_nothing_of_the_session_changes(client: awa.Client, conn: Conn, database: str, kind: str) -> None:
    """Guard: no SET, no lock that stays, no LISTEN, no savepoint that stays open: what comes next has the number of the
    transaction itself. Somebody sleeps at the bell, so that it rings."""
    conn.execute("CREATE TABLE mine (n int)")
    conn.execute("SELECT pg_advisory_lock(hashtextextended('awa.bell:default', 0))")
    note = f"CREATE TEMP TABLE IF NOT EXISTS before AS {SETTINGS}"
    changed = f"SELECT name, setting FROM ({SETTINGS}) s EXCEPT SELECT name, setting FROM before"
    with KINDS[kind](database) as lender:
        lender.execute("LOAD 'plpgsql'")
        lender.execute("SET statement_timeout = '77s'")
        lender.execute("SET search_path = nowhere, public")
        lender.execute(note)
        for path in PATHS:
            write(client, path, lender.conn)
        lender.execute(f"CREATE TABLE changed AS {changed}")
        lender.execute("INSERT INTO mine VALUES (1)")
        lender.execute(
            "CREATE TABLE outermost AS SELECT mine.xmin::text AS a, pg_current_xact_id()::text AS b FROM mine"
        )
        lender.commit()
    assert conn.execute("TABLE changed").fetchall() == []
    [numbers] = conn.execute("TABLE outermost").fetchall()
    assert numbers[0] == numbers[1]


@kinds
def test_a_job_that_is_refused_half_way_leaves_the_transaction_usable(
    client: awa.Client, conn: Conn, database: str, kind: str
) -> None:
    """Guard: a COPY is undone to a savepoint of its own, and what was refused is raised, not what the driver makes."""
    conn.execute("CREATE TABLE mine (n int)")
    items = [NewJob({"n": n}, kind="k") for n in range(1200)]
    items.append(NewJob({"n": "\0"}, kind="k"))
    with KINDS[kind](database) as lender:
        for is_first in (True, False):
            if not is_first:
                lender.execute("INSERT INTO mine VALUES (1)")
            with pytest.raises(ValidationError) as caught:
                client.insert_many_copy(iter(items), conn=lender.conn)
            assert caught.value.path == "items[1200].args.n"
            lender.execute("INSERT INTO mine VALUES (1)")
        assert client.insert_many_copy(items[:-1], conn=lender.conn) == 1200
        lender.commit()
    assert (written(conn), mine(conn)) == (1200, 3)


@kinds
def test_the_drivers_own_errors_pass(client: awa.Client, conn: Conn, database: str, kind: str) -> None:
    """Guard: what was broken before is neither hidden nor mended here: an aborted and a read-only transaction."""
    with KINDS[kind](database) as lender:
        for path in PATHS:
            with suppress(Exception):
                lender.execute("SELECT * FROM nothing")
            with pytest.raises(Exception, match="transaction is aborted"):
                write(client, path, lender.conn)
            lender.rollback()
            lender.execute("SET TRANSACTION READ ONLY")
            with pytest.raises(Exception, match="read-only transaction"):
                write(client, path, lender.conn)
            lender.rollback()
        write(client, "insert", lender.conn)
        lender.commit()
    assert written(conn) == 1


@kinds
def test_a_schema_that_is_missing_or_forbidden_is_told(
    client: awa.Client, conn: Conn, database: str, kind: str
) -> None:
    """Guard: the server's code decides, whichever driver's exception carries it."""
    elsewhere = awa.Client(database, schema="elsewhere")
    conn.execute("DROP ROLE IF EXISTS nobody_of_note")
    conn.execute("CREATE ROLE nobody_of_note")
    try:
        with KINDS[kind](database) as lender:
            for path in PATHS:
                with pytest.raises(SchemaNotMigrated, match="awa migrate"):
                    write(elsewhere, path, lender.conn)
                lender.rollback()
                lender.execute("SET LOCAL ROLE nobody_of_note")
                with pytest.raises(PermissionDenied, match="--grants producer"):
                    write(client, path, lender.conn)
                lender.rollback()
    finally:
        conn.execute("DROP ROLE nobody_of_note")


ODD = "ěšč ß 漢字 🐘 \\ ' \" %s %(x)s {a,b} NULL \t \n \x01 \u2028"


@kinds
def test_text_is_right_at_any_client_encoding(client: awa.Client, conn: Conn, database: str, kind: str) -> None:
    """Guard: what is sent is UTF-8 when the connection speaks that, and else bytes that the server is told are UTF-8.
    SJIS has letters that end in a backslash."""
    plain = NewJob({ODD: ODD}, kind="druh-ž", queue="fronta-ž")
    job = NewJob({ODD: ODD}, kind="druh-ž", queue="fronta-ž", metadata={"m": ODD})
    with KINDS[kind](database) as lender:
        for encoding in ("UTF8", "LATIN1", "SQL_ASCII", "SJIS"):
            lender.execute(f"SET client_encoding = '{encoding}'")
            client.insert(plain, conn=lender.conn)
            client.insert(job, tags=[ODD], conn=lender.conn)
            client.insert_many([plain] * 2, conn=lender.conn)
            client.insert_many([job] * 2, conn=lender.conn)
            client.insert_many_copy([job], conn=lender.conn)
            lender.commit()
            rows = conn.execute(
                "SELECT queue, kind, args, coalesce(metadata->>'m', %s) FROM awa.jobs", [ODD]
            ).fetchall()
            assert rows == [("fronta-ž", "druh-ž", {ODD: ODD}, ODD)] * 7, encoding
            conn.execute("TRUNCATE awa.jobs")


UNIQUE = [
    awa.Unique(),
    awa.Unique(by_args=["n"], by_queue=True, period=3600),
    awa.Unique(states=["available", "running"], on_conflict="replace"),
]


@kinds
def test_unique_jobs_and_their_conflicts(client: awa.Client, conn: Conn, database: str, kind: str) -> None:
    """Guard: every parameter has a cast, bytes among them, and what comes back is read alike, ids and truth values."""
    with KINDS[kind](database) as lender:
        for encoding in ("UTF8", "LATIN1"):
            lender.execute(f"SET client_encoding = '{encoding}'")
            for n, unique in enumerate(UNIQUE):
                one = NewJob({"n": f"ž{n}"}, kind="k", unique=unique)
                more = NewJob({"n": f"ž{n}"}, kind="k", unique=unique, tags=["ž"], metadata={"ž": 1}, timeout=5)
                first = client.insert(one, conn=lender.conn)
                second = client.insert(more, conn=lender.conn)
                third, other = client.insert_many([more, NewJob({}, kind="k")], conn=lender.conn)
                found = {one.id for one in (first, second, third)}
                assert (first.is_new, other.is_new) == (True, True)
                assert len(found) == 1, unique
                assert (second.is_new, third.is_new) == (False, False)
                raising = NewJob({"n": f"ž{n}"}, kind="k", unique=replace(unique, on_conflict="raise"))
                with pytest.raises(awa.UniqueConflict) as caught:
                    client.insert(raising, conn=lender.conn)
                assert caught.value.existing_id == third.id
                with pytest.raises(awa.UniqueConflict):
                    client.insert_many([raising, raising], conn=lender.conn)
            lender.rollback()  # as far as here
        assert client.insert({}, kind="k", unique=UNIQUE[0], conn=lender.conn).is_new
        lender.commit()
    assert written(conn) == 1


@kinds
def test_jobs_that_have_to_do_with_others(client: awa.Client, conn: Conn, database: str, kind: str) -> None:
    """Guard: as before, for what follows a job and what it waits for; a parent of the same transaction is found."""
    with KINDS[kind](database) as lender:
        for encoding in ("UTF8", "LATIN1"):
            lender.execute(f"SET client_encoding = '{encoding}'")
            follow = NewJob({"ž": 1}, kind="next", tags=["ž"])
            parent = client.insert(
                {"n": 1}, kind="k", on_completed=follow, on_failed=[follow, follow], conn=lender.conn
            )
            unique = client.insert({}, kind="u", unique=UNIQUE[0], on_cancelled=follow, conn=lender.conn)
            child = client.insert({}, kind="k", after=parent, after_failed="run", conn=lender.conn)
            after = [NewJob({}, kind="k", after=[parent, unique]), NewJob({}, kind="k", on_failed=follow)]
            found = client.insert_many(after, conn=lender.conn)
            assert all(one.is_new for one in (parent, unique, child, *found))
            with pytest.raises(awa.JobNotFound, match=r"items\[1\]"):
                client.insert_many([NewJob({}, kind="k"), NewJob({}, kind="k", after=10**15)], conn=lender.conn)
            lender.commit()
            assert [client.get(one.id).state for one in (parent, child)] == ["available", "scheduled"]
            client.cancel(unique.id)
            stored = conn.execute("SELECT args, tags FROM awa.jobs WHERE kind = 'next'").fetchall()
            assert stored == [({"ž": 1}, ["ž"])], encoding
            conn.execute("DELETE FROM awa.jobs WHERE kind = 'next'")


# --- what the libraries have of their own


def test_a_sqlalchemy_transaction_that_is_over_takes_nothing_more(
    client: awa.Client, conn: Conn, database: str
) -> None:
    """Guard: ``_begin``. SQLAlchemy refuses statements in a block whose transaction has ended; so does an insert."""
    from sqlalchemy.exc import InvalidRequestError, PendingRollbackError, ResourceClosedError
    from sqlalchemy.orm import Session

    with engine_of(database) as engine:
        with engine.connect() as lent:
            with lent.begin() as block:
                block.rollback()
                with pytest.raises(InvalidRequestError, match="closed transaction inside context manager"):
                    write(client, "insert", lent)
            with lent.begin():
                with lent.begin_nested() as savepoint:
                    savepoint.rollback()
                    with pytest.raises(InvalidRequestError, match="closed transaction inside context manager"):
                        write(client, "insert", lent)
                write(client, "insert", lent)
            assert written(conn) == 1
        with pytest.raises(ResourceClosedError):
            write(client, "insert", lent)
        with Session(engine) as session, session.begin() as block:
            block.rollback()
            with pytest.raises(InvalidRequestError, match="closed transaction inside context manager"):
                write(client, "insert", session)
        with Session(engine) as session:
            with suppress(Undone), session.begin_nested():
                write(client, "insert", session)
                raise Undone
            conn.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state = 'idle in transaction'")
            with pytest.raises(psycopg.OperationalError):
                write(client, "insert", session)
            with pytest.raises(PendingRollbackError):
                write(client, "insert", session)
            session.rollback()
            write(client, "insert", session)  # on a new connection
            session.commit()
    assert written(conn) == 2


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_sqlalchemy_in_autocommit_mode_and_within_a_transaction_from_outside(
    client: awa.Client, conn: Conn, database: str, driver: str
) -> None:
    """Guard: nothing about isolation is set here; a Session that is bound to a connection joins its transaction."""
    from sqlalchemy.orm import Session

    jobs = 0
    with engine_of(database, driver) as engine:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as lent:
            for path in PATHS:
                jobs += write(client, path, lent)
                assert written(conn) == jobs
            lent.rollback()
            assert lent.connection.driver_connection.autocommit
        with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
            jobs += write(client, "insert_many_copy", session)
            assert written(conn) == jobs
        with engine.connect() as lent, lent.begin():
            with Session(lent, join_transaction_mode="create_savepoint") as session:
                jobs += write(client, "insert_many", session)
                session.commit()
            assert written(conn) < jobs
        assert written(conn) == jobs
        raw = engine.raw_connection()
        write(client, "insert", raw)
        raw.rollback()
        jobs += write(client, "insert", raw)
        raw.commit()
        raw.close()
        with engine.begin() as lent:  # the pool gives it out again as if nothing had been
            jobs += write(client, "insert", lent)
    assert written(conn) == jobs


def test_flask_sqlalchemys_session(client: awa.Client, conn: Conn, database: str) -> None:
    """Guard: a request whose only write is a job commits it, and one that fails leaves none."""
    import flask
    from flask_sqlalchemy import SQLAlchemy

    app = flask.Flask("shop")
    with engine_of(database) as engine:
        app.config["SQLALCHEMY_DATABASE_URI"] = engine.url
    db = SQLAlchemy(app)

    @app.post("/orders/<int:n>")
    def order(n: int) -> str:
        job = client.insert({"n": n}, kind="k", conn=db.session)
        if n == 1:
            raise ValueError("no")
        if n == 2:
            db.session.commit()
        return str(job.id)

    for n in range(3):
        app.test_client().post(f"/orders/{n}")
    assert conn.execute("SELECT args->>'n' FROM awa.jobs").fetchall() == [("2",)]
    with app.app_context():
        with pytest.raises(ConfigError, match=r"conn=db\.session"):
            write(client, "insert", db)
        db.session.remove()
        db.engine.dispose()


def test_django_in_and_out_of_atomic_blocks(client: awa.Client, conn: Conn, database: str) -> None:
    """Guard: an atomic block that is to be rolled back refuses an insert as Django refuses a query; outside of one it
    commits at once."""
    from django.db import connections, transaction
    from django.db.transaction import TransactionManagementError

    with django_connection(database) as connection:
        jobs = sum(write(client, path, connection) for path in PATHS)
        assert written(conn) == jobs
        assert connection.get_autocommit()
        jobs += write(client, "insert", connections["default"])
        with suppress(Undone), transaction.atomic():
            write(client, "insert_many", connection)
            raise Undone
        with transaction.atomic():
            with suppress(Undone), transaction.atomic(savepoint=False):
                raise Undone
            with pytest.raises(TransactionManagementError, match="until the end of the 'atomic' block"):
                write(client, "insert", connection)
        assert written(conn) == jobs
        connection.set_autocommit(False)
        jobs += write(client, "insert_many_copy", connection)
        assert written(conn) < jobs
        connection.commit()
        connection.set_autocommit(True)
        assert written(conn) == jobs


def test_django_learns_of_a_connection_that_was_lost(client: awa.Client, conn: Conn, database: str) -> None:
    """Guard: ``wrap_database_errors``. A process that only inserts would keep the dead connection for ever."""
    from django.db import OperationalError, close_old_connections

    with django_connection(database) as connection:
        write(client, "insert", connection)
        pid = connection.connection.info.backend_pid
        conn.execute("SELECT pg_terminate_backend(%s)", [pid])
        with pytest.raises(OperationalError):
            write(client, "insert", connection)
        close_old_connections()  # as Django does at the end of a request
        write(client, "insert", connection)
    assert written(conn) == 2


WITH_PSYCOPG2 = """
import sys
import psycopg
import awa

hidden, sys.modules["psycopg"] = sys.modules["psycopg"], None
import django.db.backends.postgresql.base as base
sys.modules["psycopg"] = hidden
assert base.Database.__name__ == "psycopg2"

from tests.worker import test_lent_kinds as tests
database, client = sys.argv[1], awa.Client(sys.argv[1])
with psycopg.connect(database, autocommit=True) as conn:
    for test in (
        tests.test_jobs_belong_to_the_transaction_that_was_lent,
        tests.test_jobs_go_with_a_savepoint,
        tests.test_a_job_that_is_refused_half_way_leaves_the_transaction_usable,
        tests.test_a_schema_that_is_missing_or_forbidden_is_told,
    ):
        test(client, conn, database, "django")
        conn.execute("DROP TABLE IF EXISTS mine")
        conn.execute("TRUNCATE awa.jobs, awa.waiting_jobs")
    tests.test_django_in_and_out_of_atomic_blocks(client, conn, database)
    conn.execute("TRUNCATE awa.jobs, awa.waiting_jobs")
    tests.test_django_learns_of_a_connection_that_was_lost(client, conn, database)
client.close()
print("all well")
"""


def test_django_over_psycopg2(database: str) -> None:
    """Django takes psycopg 3 where there is one, so this is in a process of its own where it finds none."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITH_PSYCOPG2, database],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stdout) == (0, "all well\n"), ran.stderr


def test_psycopg2_with_everything_changed(client: awa.Client, conn: Conn, database: str) -> None:
    """Guard: own cursor, own typecasters, own literals. Adapters and typecasters of others, global ones too, and
    settings that change how literals are read, have no say."""
    import psycopg2
    from psycopg2 import extensions
    from psycopg2.extras import LoggingConnection, NamedTupleCursor

    class Shouting:
        def __init__(self, text: Any) -> None: ...

        def getquoted(self) -> bytes:
            return b"'SHOUTED'"

    odd = extensions.new_type((20, 23, 16, 25), "odd", lambda value, cursor: f"<{value}>")
    before = dict(extensions.adapters)
    lent = psycopg2.connect(database, connection_factory=LoggingConnection, cursor_factory=NamedTupleCursor)
    try:
        lent.initialize(__import__("logging").getLogger("psycopg2"))
        for adapted in (str, int, bytes, list, tuple):
            extensions.register_adapter(adapted, Shouting)
        extensions.register_type(odd, lent)
        with lent, lent.cursor() as cursor:
            cursor.execute("SET standard_conforming_strings = off")
            cursor.execute("SET backslash_quote = off")
            cursor.execute("SET escape_string_warning = on")
            ids = [client.insert({"n": "a'b\\"}, kind="k", tags=["t"], conn=lent).id for _ in range(2)]
            ids += [one.id for one in client.insert_many([NewJob({"n": "a'b\\"}, kind="k")] * 2, conn=cursor)]
        assert all(type(one) is int for one in ids)
        assert conn.execute("SELECT id, args FROM awa.jobs ORDER BY id").fetchall() == [
            (one, {"n": "a'b\\"}) for one in ids
        ]
        lent.autocommit = True
        assert client.insert_many_copy([NewJob({}, kind="k")] * 1200, conn=lent) == 1200
        with pytest.raises(ValidationError):
            client.insert_many_copy([NewJob({}, kind="k")] * 1200 + [NewJob({"a": "\0"}, kind="k")], conn=lent)
        assert written(conn) == 1204
        assert not lent.notices
    finally:
        extensions.adapters.clear()
        extensions.adapters.update(before)
        lent.close()
    with pytest.raises(psycopg2.InterfaceError, match="closed"):
        write(client, "insert", lent)


# --- what cannot be lent


def test_what_cannot_be_lent_says_what_can(client: awa.Client, database: str, conn: Conn, tmp_path: Any) -> None:
    """Guard: the list of mistakes, and the look at dialect, vendor and driver, all before any SQL."""
    import psycopg2
    import sqlalchemy
    from django.core.cache import cache
    from django.db import connections
    from psycopg2.pool import SimpleConnectionPool
    from psycopg_pool import ConnectionPool
    from sqlalchemy.orm import Session, scoped_session, sessionmaker

    sqlite = sqlalchemy.create_engine("sqlite://")
    asynchronous = psycopg2.connect(database, async_=True)
    with engine_of(database) as engine, django_connection(database), sqlite.connect() as other:
        pool = ConnectionPool(database, open=False)
        wrong = [
            (engine, "with engine.begin"),
            (sessionmaker(engine), "Session that it makes"),
            (engine.pool, "a connection of it"),
            (Session(sqlite), "to sqlite"),
            (scoped_session(sessionmaker(sqlite)), "to sqlite"),
            (other, "to sqlite"),
            (other.connection, "over a sqlite3.Connection"),
            (pool, "with pool.connection"),
            (SimpleConnectionPool(0, 1, database), "getconn"),
            (asynchronous, "asynchronous connection of psycopg2"),
            (connections, "django.db.connection"),
            (cache, "SQLAlchemy"),
            (__import__("sqlite3").connect(":memory:"), "psycopg or psycopg2"),
        ]
        for conn_given, words in wrong:
            for path in PATHS:
                with pytest.raises(ConfigError, match=words):
                    write(client, path, conn_given)
        pool.close()
        asynchronous.close()
        with (
            django_connection(database, ENGINE="django.db.backends.sqlite3", NAME=":memory:") as connection,
            pytest.raises(ConfigError, match=r"'default' to sqlite.*django\.db\.connections"),
        ):
            write(client, "insert", connection)
    assert written(conn) == 0


# --- completing


@pytest.mark.parametrize("kind", ["psycopg2-cursor", "session", "sqlalchemy-psycopg2", "django"])
def test_a_handler_completes_its_job_in_any_of_them(
    client: awa.Client, start_worker: StartWorker, conn: Conn, database: str, kind: str
) -> None:
    """Guard: ``complete`` goes the same way; the second call is refused by the database, whichever driver tells it."""
    conn.execute("CREATE TABLE mine (n int)")
    refused: list[BaseException] = []

    @client.task(keep_result=True, max_attempts=1)
    def work() -> dict[str, str]:
        job = awa.current_job()
        with KINDS[kind](database) as lender:
            lender.execute("SET client_encoding = 'LATIN1'")
            lender.execute("INSERT INTO mine VALUES (1)")
            job.complete(lender.conn, result={"ž": "漢字"})
            lender.commit()
            try:
                job.complete(lender.conn, result={})
            except awa.StaleAttempt as error:
                refused.append(error)
            lender.rollback()
        raise ValueError("after the commit this is only logged")

    start_worker(client)
    job = client.insert(work.bind())
    assert client.result(job.id, timeout=30) == {"ž": "漢字"}
    assert ended(client, job, timeout=30).state == "completed"
    wait_until(lambda: len(refused) == 1, timeout=15)
    assert mine(conn) == 1
