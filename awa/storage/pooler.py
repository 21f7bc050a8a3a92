"""A transaction pooler between us and the server, such as pgbouncer: noticing it, and what to do without a session.

Behind one, each transaction may run in another backend. So a connection that leads through it

- sets nothing for its session and holds no session lock: both would be left to whoever gets the backend next;
- prepares nothing: the statement would be missing in another backend;
- does not LISTEN, and is not told which backend it has: the number is another's by the time it is used.

A connection is looked at when it is opened. A pooler answers the client itself, with a number for the backend that it
made up (what it takes requests to cancel by), and a statement knows the number of the backend that it runs in. Where
the two agree there is none. A pooler that keeps a backend for each client looks the same as others; then ``pooler``
says ``off``, or everything is a little slower than it could be. One that passes the number on cannot be told so; it is
found out by the first prepared statement that is missing, or ``pooler`` says ``on``.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import psycopg
from psycopg import Connection, Cursor, IsolationLevel
from psycopg.conninfo import conninfo_to_dict

log = logging.getLogger("awa.storage")

MISSING_STATEMENT = frozenset({"26000", "42P05"})
"""SQLSTATEs of a prepared statement that is not there, or is there already: it was prepared in another backend."""

_POOLED = "_awa_is_pooled"

_declared: dict[tuple[str, ...], bool] = {}  # what a setting says of an address; a dict's items are set at once


def declare(conninfo: str, *, is_pooler: bool) -> None:
    """Say what answers at an address, for every connection that this process opens to it from now on."""
    _declared[_place(conninfo)] = is_pooler


def declare_as(conninfo: str, pooler: str) -> None:
    """The same by the setting ``pooler``: ``on``, ``off``, or ``auto``, which says nothing."""
    if pooler != "auto":
        declare(conninfo, is_pooler=pooler == "on")


def _place(conninfo: str) -> tuple[str, ...]:
    given = conninfo_to_dict(conninfo)
    return tuple(str(given.get(key, "")) for key in ("service", "host", "hostaddr", "port", "dbname"))


# Claims, settles and fences read what was committed before each statement, whatever the role's default says. One
# statement asks and acts, so that nothing is ever set in the session of a backend that is not ours alone.
SETTLE_IN = """
    SELECT CASE WHEN %(is_ours)s OR pg_backend_pid() = %(pid)s
                THEN set_config('default_transaction_isolation', 'read committed', false) END
"""


def settle_in(conn: Connection[Any], conninfo: str) -> None:
    """Look whether *conn*, new and in autocommit mode, leads through a pooler, and make it READ COMMITTED either way.

    It is so by a setting of the session when the backend is its own. Else it prepares nothing, its transactions name
    their isolation, and single statements go through :func:`read_committed`.
    """
    declared = _declared.get(_place(conninfo))
    is_pooled = declared is True
    if not is_pooled:
        params = {"is_ours": declared is False, "pid": conn.pgconn.backend_pid}
        found = Cursor(conn).execute(SETTLE_IN, params, prepare=False).fetchone()
        is_pooled = found is None or found[0] is None
    if is_pooled:
        conn.prepare_threshold = None
        conn.isolation_level = IsolationLevel.READ_COMMITTED
    conn.__dict__[_POOLED] = is_pooled


def is_pooled(conn: Connection[Any]) -> bool:
    """Whether *conn*, which went through :func:`settle_in`, leads through a pooler."""
    return bool(conn.__dict__.get(_POOLED, False))


# Of this transaction only, whatever it looks like: each transaction begins with the session's default.
SET_READ_COMMITTED = "SET transaction_isolation = 'read committed'"


def read_committed(cursor: Cursor[Any], query: str, params: dict[str, Any]) -> None:
    """Execute *query* at READ COMMITTED, in a transaction of its own, on a connection in autocommit mode.

    Through a pooler it goes in one message with what sets its isolation, so that no transaction waits for the client.
    """
    conn = cursor.connection
    if not is_pooled(conn) or conn.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
        cursor.execute(query, params)
        return
    with conn.pipeline():
        conn.execute(SET_READ_COMMITTED)
        cursor.execute(query, params)


_telling = threading.Lock()
_has_told = False  # guarded by _telling


def tell_once(poll_interval: float) -> None:
    """Say, once in a process, what workers do without behind a pooler, and what would change it."""
    global _has_told
    with _telling:
        is_first, _has_told = not _has_told, True
    if is_first:
        log.warning(
            "workers reach the database through a connection pooler, where nobody can be woken: an idle one looks for"
            " work every %g s; set AWA_LISTEN_URL to an address that leads past the pooler, or AWA_POOLER=off if it"
            " keeps a backend for each client",
            poll_interval,
        )
