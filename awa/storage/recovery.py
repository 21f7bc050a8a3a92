"""Claims that nobody works on, since their answer or their end was lost: find them, give them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import Connection, Cursor
from psycopg.rows import class_row, scalar_row, tuple_row

from awa.errors import RuntimeGone
from awa.storage.schema import Schema

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


@dataclass(frozen=True, slots=True)
class Books:
    """What a server has of the last sign of life of a runtime, and which server that is."""

    started_at: datetime
    """When the server was started; one that took over has a time of its own."""
    connected_at: datetime
    """When its backend was: after its last crash."""
    seen_at: datetime
    """Now, by its clock."""
    newest_claim: int | None
    """What the sign of life said; None: the server does not know the runtime."""
    open_claims: list[int] | None
    """The same."""

    def may_have_lost(self, before: Books) -> bool:
        """Whether what was acknowledged since *before* may be forgotten: by a crash, or by a failover."""
        return self.started_at != before.started_at or self.connected_at > before.seen_at

    @property
    def floor(self) -> int:
        """Every claim that this sign of life did not call done is above it."""
        return min([self.newest_claim or 0, *(claim - 1 for claim in self.open_claims or ())])


READ_BOOKS = """
    SELECT pg_postmaster_start_time() AS started_at, clock_timestamp() AS seen_at,
           coalesce(a.backend_start, pg_postmaster_start_time()) AS connected_at, i.newest_claim, i.open_claims
      FROM pg_stat_get_activity(pg_backend_pid()) a
      LEFT JOIN awa.runtime_instances i ON i.id = %(runtime)s
"""


def read_books(conn: Connection[Any], schema: Schema, runtime: int) -> Books:
    """What the server that *conn* leads to has of *runtime*."""
    with Cursor(conn, row_factory=class_row(Books)) as cursor:
        found = cursor.execute(schema.sql(READ_BOOKS), {"runtime": runtime}).fetchone()
    assert found is not None
    return found


LIST_OPEN = """
    SELECT c.claim_id
      FROM (SELECT t.claim_id, t.slot, t.entry_ids FROM awa.claims t
             WHERE t.runtime = %(runtime)s AND t.claim_id > %(above)s AND t.claim_id <= %(upto)s AND t.nonce <> 0
            UNION ALL
            SELECT t.claim_id, t.slot, t.entry_ids
              FROM unnest(%(others)s::bigint[]) o
             CROSS JOIN LATERAL (SELECT * FROM awa.claims t WHERE t.runtime = %(runtime)s AND t.claim_id = o) t) c
     WHERE EXISTS (SELECT FROM unnest(c.entry_ids) WITH ORDINALITY AS m(entry_id, idx)
                    WHERE NOT EXISTS (SELECT FROM awa.completions x
                                       WHERE x.slot = c.slot AND x.claim_id = c.claim_id AND m.idx = ANY (x.idx))
                      AND NOT EXISTS (SELECT FROM awa.attempt_ends e
                                       WHERE e.slot = c.slot AND e.entry_id = m.entry_id))
"""


def list_open_claims(
    conn: Connection[Any], schema: Schema, runtime: int, *, above: int = 0, upto: int = 0, others: Sequence[int]
) -> set[int]:
    """The claims of *runtime* above claim *above* up to claim *upto*, and *others*, of which a member has not ended."""
    asked = {"runtime": runtime, "above": above, "upto": upto, "others": list(others)}
    with Cursor(conn, row_factory=scalar_row) as cursor:
        return set(cursor.execute(schema.sql(LIST_OPEN), asked).fetchall())


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


def try_runtime_lock(conn: Connection[Any], schema: Schema, runtime: int) -> bool:
    """Take the lock of *runtime* for the rest of the transaction, if nobody claims, settles or rescues for it."""
    with Cursor(conn, row_factory=scalar_row) as cursor:
        return bool(cursor.execute(schema.sql(TRY_RUNTIME_LOCK), {"runtime": runtime}).fetchone())


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
        if not try_runtime_lock(conn, schema, runtime):
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
