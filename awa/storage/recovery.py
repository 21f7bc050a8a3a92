"""Backends whose client is lost or frozen: find them, end them, and give back what they claimed without an answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import Connection, Cursor
from psycopg.rows import scalar_row, tuple_row

from awa.errors import RuntimeGone
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


END = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %(pid)s AND backend_start = %(started_at)s"


def end_backend(conn: Connection[Any], backend: Backend) -> bool:
    """End *backend*, which belongs to a lost or frozen client of this role; whether it is gone.

    A backend does not notice that its client is gone before it has answered. One that was about to claim would do so
    after everybody has looked.

    Raises:
        psycopg.errors.InsufficientPrivilege: It belongs to another role.
    """
    until = time.monotonic() + END_TIMEOUT
    with Cursor(conn, row_factory=tuple_row) as cursor:
        while cursor.execute(END, {"pid": backend.pid, "started_at": backend.started_at}).fetchone() is not None:
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


# A claim that only moves the cursor has nonce 0: asking the arrays would read them in whole.
LIST_CLAIMS = """
    SELECT c.claim_id
      FROM awa.claims c
     WHERE c.runtime = %(runtime)s AND c.claim_id > %(after)s AND c.nonce <> 0
"""


def list_claims(conn: Connection[Any], schema: Schema, runtime: int, *, after: int) -> list[int]:
    """The claims of *runtime* above claim *after* that took anything, in no order."""
    with Cursor(conn, row_factory=scalar_row) as cursor:
        return cursor.execute(schema.sql(LIST_CLAIMS), {"runtime": runtime, "after": after}).fetchall()


UNKNOWN_CLAIMS = """
    SELECT c.claim_id, c.slot, c.nonce, cardinality(c.entry_ids)
      FROM awa.claims c
     WHERE c.runtime = %(runtime)s AND c.claim_id > %(newest)s AND cardinality(c.entry_ids) > 0
       AND (%(only)s::bigint[] IS NULL OR c.claim_id = ANY (%(only)s::bigint[]))
     ORDER BY c.claim_id
"""

TRY_RUNTIME_LOCK = "SELECT pg_try_advisory_xact_lock(hashtextextended('awa.runtime:' || %(runtime)s::text, 0))"

IS_GONE = "SELECT FROM awa.gone_runtimes WHERE runtime = %(runtime)s"

# Not set, which could take it back, but drawn, so that whoever claims just now gets another number.
PASS_NUMBERS = """
    SELECT count(nextval('awa.claim_id_seq'))
      FROM generate_series(1, %(newest)s - coalesce(pg_sequence_last_value('awa.claim_id_seq'), 0))
"""

RELEASE = """
    SELECT awa.end_attempts(%(runtime)s, NULL, %(claims)s::bigint[], %(slots)s::smallint[], %(nonces)s::integer[],
                            %(idx)s::smallint[], array_fill('released'::text, ARRAY[%(n)s::integer]),
                            array_fill(0::double precision, ARRAY[%(n)s::integer]),
                            array_fill(NULL::integer, ARRAY[%(n)s::integer]),
                            array_fill(NULL::text, ARRAY[%(n)s::integer]))
"""


def release_unknown_claims(
    conn: Connection[Any], schema: Schema, runtime: int, *, newest: int, only: Sequence[int] | None = None
) -> int | None:
    """Give back what this runtime claimed above claim *newest* without ever receiving the reply.

    Takes the runtime's lock exclusively first: it is had only when the transaction whose reply was lost has ended.

    A crash of the server can forget a claim that was answered, with its number: then numbers come again that are not
    above *newest*. They are passed over, since whoever rescues, or looks here the next time, takes them for known.

    Args:
        only: Of these claims; None for all, when no answer can be on its way.

    Returns:
        How many attempts were released; None when the lock could not be had, so that the caller tries again.

    Raises:
        RuntimeGone: The runtime is fenced: its attempts are not its own any more.
    """
    with conn.transaction(), Cursor(conn, row_factory=tuple_row) as cursor:
        locked = cursor.execute(schema.sql(TRY_RUNTIME_LOCK), {"runtime": runtime}).fetchone()
        if locked is None or not locked[0]:
            return None
        if cursor.execute(schema.sql(IS_GONE), {"runtime": runtime}).fetchone() is not None:
            raise RuntimeGone(f"runtime {runtime} was silent for too long and was taken for dead", runtime=runtime)
        cursor.execute(schema.sql(PASS_NUMBERS), {"newest": newest})
        asked = {"runtime": runtime, "newest": newest, "only": None if only is None else list(only)}
        found = cursor.execute(schema.sql(UNKNOWN_CLAIMS), asked).fetchall()
        members = [(claim_id, slot, nonce, idx) for claim_id, slot, nonce, size in found for idx in range(1, size + 1)]
        if members:
            claims, slots, nonces, idx = (list(column) for column in zip(*members, strict=True))
            params = {"runtime": runtime, "claims": claims, "slots": slots, "nonces": nonces, "idx": idx}
            cursor.execute(schema.sql(RELEASE), params | {"n": len(members)})
        return len(members)
