"""The pool of connections that an application's process shares; a forked child begins with an empty one of its own."""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import Connection, IsolationLevel
from psycopg.pq import ConnStatus
from psycopg.rows import tuple_row

from awa.errors import DatabaseNotFound
from awa.storage.connection import (
    ANSWER_WITHIN,
    OwnConnection,
    begin,
    connect,
    has_several_hosts,
    is_read_only,
    read_only,
    with_defaults,
)
from awa.storage.pooler import is_pooled

if TYPE_CHECKING:
    from psycopg_pool import ConnectionPool


class Pool:
    """Connections for one process's inserts and handlers, opened when first used.

    A process that was forked starts with an empty pool of its own; it never touches the sockets of its parent.

    Args:
        find_conninfo: Gives the database, when the first connection is wanted.
        size: Most connections that are open at once.
        kept: How many stay open though nobody uses them.
    """

    def __init__(self, find_conninfo: Callable[[], str], *, size: int = 10, kept: int = 1) -> None:
        self._find_conninfo = find_conninfo
        self._size = size
        self._kept = kept
        self._lock = threading.Lock()
        self._pool: ConnectionPool[OwnConnection] | None = None  # guarded by _lock; read without it
        self._conninfo = ""  # set with it
        self._pid = os.getpid()  # guarded by _lock; read without it
        _pools.add(self)

    def _mine(self) -> ConnectionPool[OwnConnection]:
        if self._pid != os.getpid():
            self.forget()  # forked by what calls none of Python's hooks
        pool = self._pool
        if pool is not None:
            return pool
        # psycopg_pool costs some milliseconds to import; a program that only declares tasks does not pay them.
        from psycopg_pool import ConnectionPool

        with self._lock:
            if self._pool is None:
                self._conninfo = self._find_conninfo()
                self._say_what_is_wrong()  # at once; the pool itself would try for half a minute
                self._pool = ConnectionPool(
                    self._conninfo,
                    connection_class=OwnConnection,
                    min_size=self._kept,
                    max_size=self._size,
                    kwargs={"autocommit": True} | with_defaults(self._conninfo, "client"),
                    configure=lambda connection: _configure(connection, self._conninfo),
                    open=True,
                    name=f"awa-{os.getpid()}",
                    # Its pauses double for as long as it tries. Given up, it tries again as soon as somebody asks.
                    reconnect_timeout=RECONNECT_TIMEOUT,
                    reconnect_failed=_go_on,
                )
            return self._pool

    def _say_what_is_wrong(self) -> None:
        connect(self._conninfo, name="client", writes=False).close()

    def forget(self) -> None:
        """In a forked child: leave what was inherited to the parent, and begin with nothing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            # It would tell its threads to end, which are not here, under locks that they may have held at the fork.
            pool._closed = True
        self._lock = threading.Lock()  # whoever held it is not here either
        self._pid = os.getpid()

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Borrow a connection in autocommit mode; a transaction that was left open is rolled back on return.

        Raises:
            DatabaseNotFound: No server lets us in, or all connections stayed in use for 30 s.
        """
        pool, connection = self._borrow()
        pid = self._pid
        try:
            yield connection
        finally:
            if pid == os.getpid():  # else forked in between: it is the parent's to give back
                _restore(connection)  # not the pool's reset, which has it returned by another thread, and later
                pool.putconn(connection)

    @contextmanager
    def own(self) -> Iterator[Connection]:
        """The same for statements of the library's own, which are answered within :data:`ANSWER_WITHIN` seconds.

        Raises:
            DatabaseNotFound: As :meth:`connection` does; or the server is read-only.
        """
        pool, connection = self._borrow()
        pid = self._pid
        connection.answer_within = ANSWER_WITHIN
        try:
            yield connection
        except psycopg.errors.ReadOnlySqlTransaction as error:
            pool.drain()  # the next may lead to another server
            raise read_only(connection) from error
        except psycopg.OperationalError:
            if connection.is_deaf:
                pool.drain()  # each of the others would cost somebody as long
            raise
        finally:
            connection.answer_within = None
            if pid == os.getpid():
                pool.putconn(connection)

    def _borrow(self) -> tuple[ConnectionPool[OwnConnection], OwnConnection]:
        from psycopg_pool import PoolTimeout

        pool = self._mine()
        until = time.monotonic() + pool.timeout
        while True:
            try:
                connection = pool.getconn(until - time.monotonic())
            except PoolTimeout as error:
                self._say_what_is_wrong()
                raise DatabaseNotFound(
                    f"no connection came free within {pool.timeout:.0f} s: all {self._size} of this process are in use;"
                    " see pool_size of awa.Client"
                ) from error
            if not self._is_lost(connection):
                return pool, connection
            connection.close()
            pool.putconn(connection)  # it opens another in its place

    def _is_lost(self, connection: OwnConnection) -> bool:
        """Whether a connection that lay in the pool has ended meanwhile, as far as its server has told.

        One look at its socket, without asking: after a restart of the server every connection of the pool has ended,
        and each would cost somebody a failed statement.
        """
        pgconn = connection.pgconn
        poll = select.poll()
        try:
            poll.register(pgconn.socket, select.POLLIN)
            while poll.poll(0):
                pgconn.consume_input()
                pgconn.is_busy()  # reads what came: a change of a setting, or why the server ended it
                if pgconn.status != ConnStatus.OK:
                    return True
        except psycopg.OperationalError:
            return True
        return is_read_only(connection) and has_several_hosts(self._conninfo)

    def close(self) -> None:
        """Close every connection of this process. The pool opens again when it is used again."""
        if self._pid != os.getpid():
            self.forget()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


RECONNECT_TIMEOUT = 1.0
"""Seconds after which the pool gives up an attempt to connect, and begins anew for whoever waits."""


def _configure(connection: OwnConnection, conninfo: str) -> None:
    connection.answer_within = ANSWER_WITHIN
    begin(connection, conninfo)
    connection.answer_within = None


def _restore(connection: OwnConnection) -> None:
    """Undo what a borrower changed: the next one's insert would not be committed, or be read as something else."""
    connection.row_factory = tuple_row
    connection.cursor_factory = psycopg.Cursor
    isolation = IsolationLevel.READ_COMMITTED if is_pooled(connection) else None
    is_changed = (connection.isolation_level, connection.read_only, connection.deferrable) != (isolation, None, None)
    if connection.autocommit and not is_changed:
        return
    try:
        connection.rollback()
        connection.autocommit = True
        connection.isolation_level = isolation
        connection.read_only = connection.deferrable = None
    except psycopg.Error:
        connection.close()  # the pool opens another in its place


def _go_on(pool: ConnectionPool[Any]) -> None:
    if pool.get_stats().get("requests_waiting"):
        pool.check()  # it grows again


# --- forks

_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _forget_inherited() -> None:
    """In a forked child, when the sockets are not its parent's any more."""
    for pool in list(_pools):
        pool.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_inherited)  # hooks run in the order of their registration
