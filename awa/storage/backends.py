"""Backends whose client is lost or frozen: find them, end them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import Connection, Cursor
from psycopg.rows import tuple_row

from awa.storage.schema import Schema

END_TIMEOUT = 5.0
"""Seconds to wait for a backend that was told to end."""


@dataclass(frozen=True, slots=True)
class Backend:
    """The server's process behind a connection."""

    pid: int
    """Its number; another may have it later."""
    started_at: datetime
    """When it started, which tells the two apart."""


BACKEND = "SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()"


def backend_of(conn: Connection[Any]) -> Backend | None:
    """The process behind *conn*; None when the server does not tell."""
    with Cursor(conn, row_factory=tuple_row) as cursor:
        found = cursor.execute(BACKEND).fetchone()
    return None if found is None or found[1] is None else Backend(*found)


# Its last statement tells whose it is, should a pooler that nobody noticed have lent it to another client. It is empty
# where the server does not track it.
END = """
    SELECT pg_terminate_backend(pid)
      FROM pg_stat_activity
     WHERE pid = %(pid)s AND backend_start = %(started_at)s
       AND (%(last)s::text[] IS NULL OR query = '' OR left(query, 40) = ANY (%(last)s))
"""


def end_backend(conn: Connection[Any], backend: Backend, *, last: Sequence[str] | None = None) -> bool:
    """End *backend*, which belongs to a lost or frozen client of this role; whether it is gone.

    A backend does not notice that its client is gone before it has answered. One that was about to claim would do so
    after everybody has looked.

    Args:
        last: Only if its last statement is one of these, which are at least 40 characters long; None: whatever it is.

    Raises:
        psycopg.errors.InsufficientPrivilege: It belongs to another role.
    """
    heads = None if last is None else [text[:40] for text in last]
    return _end(conn, END, {"pid": backend.pid, "started_at": backend.started_at, "last": heads})


def _end(conn: Connection[Any], query: str, params: dict[str, Any]) -> bool:
    until = time.monotonic() + END_TIMEOUT
    with Cursor(conn, row_factory=tuple_row) as cursor:
        while cursor.execute(query, params).fetchone() is not None:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
    return True


@dataclass(frozen=True, slots=True)
class Holder:
    """A session that holds a lock, as far as this role may see it."""

    pid: int
    """The server's process."""
    role: str | None
    """Whose."""
    backend: Backend | None
    """The same process, to be ended; None when this role may not see when it started."""
    client_wait: float | None
    """Seconds for which it has waited for its client, in one statement or between two; None when it does not."""


# Waiting for the client, not merely old: a claim that the disk holds up would be no faster the next time.
HOLDERS = """
    SELECT a.pid, a.usename, a.backend_start,
           CASE WHEN a.wait_event_type = 'Client'
                THEN extract(epoch FROM clock_timestamp() - a.state_change)::double precision END
      FROM pg_locks l
      JOIN pg_stat_activity a ON a.pid = l.pid
     WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
       AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
       AND l.classid::bigint << 32 | l.objid::bigint = hashtextextended('awa.' || %(lock)s, 0)
     ORDER BY a.pid
"""


def list_holders(conn: Connection[Any], schema: Schema, lock: str) -> list[Holder]:
    """Who holds an advisory lock just now.

    Args:
        lock: ``queue:NAME`` is a queue's claim lock, ``runtime:NUMBER`` a runtime's.
    """
    with Cursor(conn, row_factory=tuple_row) as cursor:
        found = cursor.execute(schema.sql(HOLDERS), {"lock": lock}).fetchall()
    return [
        Holder(pid, role, None if started_at is None else Backend(pid, started_at), wait)
        for pid, role, started_at, wait in found
    ]


# Looked at again in the statement that ends it: through a pooler another client may have got the backend since.
END_HOLDER = """
    SELECT pg_terminate_backend(a.pid)
      FROM pg_stat_activity a
     WHERE a.pid = %(pid)s AND a.backend_start = %(started_at)s AND a.wait_event_type = 'Client'
       AND EXISTS (SELECT FROM pg_locks l
                    WHERE l.pid = a.pid AND l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
                      AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
                      AND l.classid::bigint << 32 | l.objid::bigint = hashtextextended('awa.' || %(lock)s, 0))
"""


def end_holder(conn: Connection[Any], schema: Schema, backend: Backend, lock: str) -> bool:
    """End *backend* if it holds *lock* and waits for its client now; whether it does not hold it so any more.

    Raises:
        psycopg.errors.InsufficientPrivilege: It belongs to another role.
    """
    params = {"pid": backend.pid, "started_at": backend.started_at, "lock": lock}
    return _end(conn, schema.sql(END_HOLDER), params)
