"""Unique keys: removing the rows of those that nobody holds any more."""

from __future__ import annotations

from typing import Any

from psycopg import Connection
from psycopg.rows import tuple_row

from awa.storage.pooler import read_committed
from awa.storage.schema import Schema

SWEEP = "SELECT reached, removed FROM awa.sweep_keys_v1(%(after)s::bytea, %(limit)s, %(seconds)s)"


def sweep_keys(
    conn: Connection[Any], schema: Schema, *, after: bytes, limit: int, seconds: float
) -> tuple[bytes | None, int]:
    """Look at up to *limit* keys that come after *after*, for about *seconds*, and remove what nobody holds.

    Returns:
        The last key that was looked at, None when there are no more; and how many were removed.

    Source: migrations/0017_unique.sql.
    """
    with conn.cursor(row_factory=tuple_row) as cursor:
        read_committed(cursor, schema.sql(SWEEP), {"after": after, "limit": limit, "seconds": seconds})
        found = cursor.fetchone()
    assert found is not None
    return found[0], int(found[1])
