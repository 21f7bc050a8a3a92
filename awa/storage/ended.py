"""Failed and cancelled jobs, which are kept for a time of their own."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from psycopg import Connection

from awa.storage.schema import Schema

# By arrays: as a join it may be planned as a walk over the whole table. Who waits for one of these is told first.
DELETE_OLD = """
    WITH awaited AS MATERIALIZED (
        SELECT unnest(w.parents) AS id FROM awa.waiting_jobs w WHERE w.waits_for = 'parent'
    )
    DELETE FROM awa.ended_jobs e
     WHERE e.id = ANY (ARRAY(
           SELECT o.id
             FROM awa.ended_jobs o
            WHERE o.dead_reason IS NULL AND o.ended_at < coalesce(%(now)s, now()) - %(failed)s * interval '1 s'
              AND (o.id IN (SELECT a.id FROM awaited a)) IS NOT TRUE
            ORDER BY o.ended_at
            LIMIT %(limit)s))
        OR e.id = ANY (ARRAY(
           SELECT o.id
             FROM awa.ended_jobs o
            WHERE o.dead_reason IS NOT NULL AND o.ended_at < coalesce(%(now)s, now()) - %(dead)s * interval '1 s'
              AND (o.id IN (SELECT a.id FROM awaited a)) IS NOT TRUE
            ORDER BY o.ended_at
            LIMIT %(limit)s))
"""


def delete_old(
    conn: Connection[Any], schema: Schema, *, failed: float, dead: float, limit: int, now: datetime | None = None
) -> int:
    """Delete up to *limit* jobs of each kind that ended longer ago than they are kept, oldest first.

    Those that other jobs still wait for stay.

    Args:
        failed: Seconds that failed and cancelled jobs are kept.
        dead: Seconds that dead letters are kept.
        now: What to take for now; None: the database's clock.

    Returns:
        How many were deleted.
    """
    found = conn.execute(schema.sql(DELETE_OLD), {"failed": failed, "dead": dead, "limit": limit, "now": now})
    return found.rowcount
