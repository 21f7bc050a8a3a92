"""Connections: what they are called, what they say of the network, and what is said when there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from awa.errors import DatabaseNotFound
from awa.storage.connection import connect
from awa.storage.pool import Pool


@contextmanager
def pooled(conninfo: str) -> Iterator[psycopg.Connection]:
    pool = Pool(lambda: conninfo)
    try:
        with pool.connection() as conn:
            yield conn
    finally:
        pool.close()


def name_of(conn: psycopg.Connection) -> str | None:
    return conn.info.parameter_status("application_name")


def test_connections_are_called_after_what_they_are_for(database: str) -> None:
    with connect(database, name="worker") as conn:
        assert name_of(conn) == "awa worker"
    with pooled(database) as conn:
        assert name_of(conn) == "awa client"


def test_a_name_of_the_users_own_stays(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named = make_conninfo(database, application_name="shop")
    with connect(named, name="worker") as first, pooled(named) as second:
        assert (name_of(first), name_of(second)) == ("shop", "shop")
    monkeypatch.setenv("PGAPPNAME", "from-the-environment")
    with connect(database, name="worker") as first, pooled(database) as second:
        assert (name_of(first), name_of(second)) == ("from-the-environment",) * 2


def test_both_kinds_notice_a_vanished_server_and_leave_that_to_the_user(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("connect_timeout", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout")

    def parameters(conn: psycopg.Connection) -> list[str]:
        return [str(conn.info.get_parameters().get(name)) for name in asked]

    with connect(database, name="worker") as first, pooled(database) as second:
        assert parameters(first) == parameters(second) == ["10", "15", "5", "3", "30000"]
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "7")
    own = make_conninfo(database, keepalives_idle=99)
    with connect(own, name="worker") as first, pooled(own) as second:
        assert parameters(first) == parameters(second) == ["7", "99", "5", "3", "30000"]


@pytest.mark.parametrize("default", ["repeatable read", "serializable"])
def test_the_librarys_connections_are_read_committed_whatever_the_default(database: str, default: str) -> None:
    """Guard: the isolation is set for each session, and in a pool before the first use.

    Without it a role or database with a stricter default can neither claim nor settle: tried.
    """
    strict = make_conninfo(database, options="-c default_transaction_isolation=" + default.replace(" ", "\\ "))

    def isolation(conn: psycopg.Connection) -> str:
        row = conn.execute("SHOW transaction_isolation").fetchone()
        assert row is not None
        return str(row[0])

    with psycopg.connect(strict) as theirs, connect(strict, name="worker") as first, pooled(strict) as second:
        assert [isolation(conn) for conn in (theirs, first, second)] == [default, "read committed", "read committed"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"dbname": "no_such_database"}, ["no_such_database", "does not exist", "createdb"]),
        ({"user": "no_such_user"}, ["no_such_user", "check the user"]),
        ({"host": "/nonexistent/socket", "hostaddr": None}, ["/nonexistent/socket", "start the server"]),
        ({"host": "127.0.0.1", "port": 1}, ["127.0.0.1", "port 1", "see that the server runs there"]),
    ],
    ids=["database", "user", "socket", "port"],
)
def test_an_error_says_what_is_wrong_and_the_next_step_but_no_password(
    database: str, change: dict[str, object], told: list[str]
) -> None:
    conninfo = make_conninfo(database, password="s3cret!word", **change)
    for attempt in (lambda: connect(conninfo, name="worker"), lambda: pooled(conninfo).__enter__()):
        with pytest.raises(DatabaseNotFound) as caught:
            attempt()
        message = str(caught.value)
        assert all(part in message for part in told), message
        assert "s3cret" not in message
        assert "\n" not in message
        assert isinstance(caught.value.__cause__, psycopg.OperationalError)
