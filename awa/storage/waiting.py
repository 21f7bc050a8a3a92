"""Jobs that wait for a time: when the next is due, and moving what is due."""

from __future__ import annotations

from psycopg import Connection
from psycopg.rows import scalar_row

from awa.storage.pooler import is_pooled, read_committed
from awa.storage.schema import Schema

PROMOTE = "SELECT awa.promote_v1(coalesce(clock_timestamp() - %(behind)s * interval '1 s', '-infinity'), %(limit)s)"


def promote(conn: Connection, schema: Schema, *, behind: float | None, limit: int) -> int:
    """Make up to *limit* jobs available whose time has come, by due time.

    Args:
        behind: How many seconds back to look for due times, which keeps the scan off dead rows; None looks at all.

    Returns:
        How many were moved; *limit* means that there may be more.
    """
    with conn.cursor(row_factory=scalar_row) as cursor:
        read_committed(cursor, schema.sql(PROMOTE), {"behind": behind, "limit": limit})
        return int(cursor.fetchone() or 0)


SECONDS_TO_NEXT = """
    SELECT extract(epoch FROM run_at - clock_timestamp())::double precision
      FROM awa.waiting_jobs
     WHERE waits_for = 'time' AND isfinite(run_at)
       AND run_at > (SELECT clock_timestamp() - %(behind)s * interval '1 s')  -- once: a volatile bound uses no index
     ORDER BY run_at
     LIMIT 1
"""


def seconds_to_next(conn: Connection, schema: Schema, *, behind: float) -> float | None:
    """Seconds until the next waiting job is due, negative when one is overdue; None when none waits.

    Args:
        behind: How many seconds back to look, as in :func:`promote`.
    """
    with conn.cursor(row_factory=scalar_row) as cursor:
        found = cursor.execute(schema.sql(SECONDS_TO_NEXT), {"behind": behind}).fetchone()
    return None if found is None else float(found)


TAKE_LEADER_BELL = "SELECT pg_try_advisory_lock(hashtextextended('awa.bell:', 0))"


def take_leader_bell(conn: Connection, schema: Schema) -> bool:
    """Have jobs that are due soon ring for this connection, until it closes; False while another holds the bell.

    Through a pooler nobody can be rung for: True, so that nobody tries again.

    A ring is a notification with an empty payload. It is heard even without the bell, as long as somebody holds it: a
    leader that vanished with its host does for a while. Look for due jobs afterwards; what was inserted before rang
    for nobody.
    """
    if is_pooled(conn):
        return True
    conn.execute(f"LISTEN {schema.channel}")
    with conn.cursor(row_factory=scalar_row) as cursor:
        return bool(cursor.execute(schema.sql(TAKE_LEADER_BELL)).fetchone())
