"""Claims whose answer came to nobody: find them, give them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import Connection, Cursor
from psycopg.rows import scalar_row, tuple_row

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
