"""Connections: how they are opened, and the pool that an application's process shares."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import Connection
from psycopg.pq import Conninfo

from awa.errors import DatabaseNotFound
from awa.storage.pooler import settle_in

if TYPE_CHECKING:
    from psycopg_pool import ConnectionPool

# What the network does not tell: a server that vanished is noticed within about half a minute.
_DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


def connect(conninfo: str, *, name: str) -> Connection:
    """A connection of the library's own: autocommit, READ COMMITTED; see :mod:`awa.storage.pooler` for the latter.

    Args:
        name: What it is for, as ``pg_stat_activity`` shows it after ``awa``, unless the user has a name of his own.

    Raises:
        DatabaseNotFound: The server does not answer or does not let us in; the cause is psycopg's error.
    """
    try:
        connection: Connection = psycopg.connect(conninfo, autocommit=True, **_unless_given(conninfo, name))
    except psycopg.OperationalError as error:
        said = " ".join(str(error).split())
        raise DatabaseNotFound(f"no connection to the database{_where(conninfo)}: {said}: {_advice(said)}") from error
    try:
        settle_in(connection, conninfo)
    except BaseException:
        connection.close()
        raise
    return connection


def _unless_given(conninfo: str, name: str) -> dict[str, Any]:
    """Our defaults, as far as neither *conninfo* nor libpq's environment says something else."""
    given = set(psycopg.conninfo.conninfo_to_dict(conninfo))
    given |= {option.keyword.decode() for option in Conninfo.get_defaults() if option.val is not None}
    ours = _DEFAULTS | {"fallback_application_name": f"awa {name}"}
    return {key: value for key, value in ours.items() if key not in given}


def _where(conninfo: str) -> str:
    shown = psycopg.conninfo.conninfo_to_dict(conninfo)
    parts = [f"{key} {shown[key]}" for key in ("dbname", "host", "hostaddr", "port", "user", "service") if key in shown]
    return f" ({', '.join(parts)})" if parts else ""


def _advice(said: str) -> str:
    """The next step after what libpq said; the server's own sentences come in its language, then it is the last."""
    for words, advice in _ADVICE:
        if words in said:
            return advice
    return "see that the server runs there and lets this user in"


_ADVICE = (
    ("starting up", "try again in a moment"),
    ("shutting down", "start the server again"),
    ("too many clients", "raise max_connections of the server, or lower threads and pool_size"),
    ("remaining connection slots", "raise max_connections of the server, or lower threads and pool_size"),
    ("no pg_hba.conf entry", "let the server's pg_hba.conf admit this user from here"),
    (
        "unsupported startup parameter",
        "leave it out, or name it in ignore_startup_parameters of pgbouncer",
    ),
    ("password", "check the user and the password; it can also be in PGPASSWORD or ~/.pgpass"),
    ('role "', "check the user, or create it with createuser"),
    ('database "', "check the database's name, or create it with createdb"),
    ("could not translate host name", "check the host's name"),
    ("Name or service not known", "check the host's name"),
)


class Pool:
    """Connections for one process's inserts and handlers, opened when first used.

    A process that was forked starts with an empty pool of its own; it never touches the sockets of its parent.

    Args:
        size: Most connections that are open at once.
    """

    def __init__(self, conninfo: str, *, size: int = 10) -> None:
        self._conninfo = conninfo
        self._size = size
        self._lock = threading.Lock()
        self._pool: ConnectionPool | None = None  # guarded by _lock
        self._pid = 0  # guarded by _lock

    def _mine(self) -> ConnectionPool:
        pool = self._pool
        if pool is not None and self._pid == os.getpid():
            return pool
        # psycopg_pool costs some milliseconds to import; a program that only declares tasks does not pay them.
        from psycopg_pool import ConnectionPool

        with self._lock:
            if self._pool is None or self._pid != os.getpid():
                # says at once, and why, when there is no server; the pool itself would try for half a minute
                connect(self._conninfo, name="client").close()
                self._pool = ConnectionPool(
                    self._conninfo,
                    min_size=1,
                    max_size=self._size,
                    kwargs={"autocommit": True} | _unless_given(self._conninfo, "client"),
                    configure=lambda connection: settle_in(connection, self._conninfo),
                    open=True,
                    name=f"awa-{os.getpid()}",
                )
                self._pid = os.getpid()
            return self._pool

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Borrow a connection in autocommit mode; a transaction that was left open is rolled back on return.

        Raises:
            DatabaseNotFound: No server lets us in, or all connections stayed in use for 30 s.
        """
        from psycopg_pool import PoolTimeout

        pool = self._mine()
        try:
            connection = pool.getconn()
        except PoolTimeout as error:
            raise DatabaseNotFound(
                f"no connection came free within {pool.timeout:.0f} s: all {self._size} of this process are in use, or "
                "the server does not answer; see pool_size of awa.Client"
            ) from error
        try:
            yield connection
        finally:
            pool.putconn(connection)

    def close(self) -> None:
        """Close every connection of this process. The pool opens again when it is used again."""
        with self._lock:
            pool, self._pool = self._pool, None
            mine = self._pid == os.getpid()
        if pool is not None and mine:
            pool.close()
