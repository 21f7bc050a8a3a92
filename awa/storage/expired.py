"""Jobs that wait and have expired: cancelling them. What is in a lane when it expires, a claim cancels."""

from __future__ import annotations

from psycopg import Connection
from psycopg.rows import scalar_row

from awa.storage.pooler import read_committed
from awa.storage.schema import Schema

EXPIRE = "SELECT awa.expire_waiting_v1(%(limit)s)"


def expire_waiting(conn: Connection, schema: Schema, *, limit: int) -> int:
    """Cancel up to *limit* jobs that wait and whose ``expires_at`` has passed, with what follows from it.

    Rows that somebody else holds are left for another time.

    Returns:
        How many were cancelled; *limit* means that there may be more.

    Source: migrations/0024_insert_options.sql.
    """
    with conn.cursor(row_factory=scalar_row) as cursor:
        read_committed(cursor, schema.sql(EXPIRE), {"limit": limit})
        return int(cursor.fetchone() or 0)
