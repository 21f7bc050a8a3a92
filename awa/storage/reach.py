"""What claims will never reach: the frontiers compared with all that is there, by anti-join.

A frontier is trusted by every claim, so it cannot show what lies behind it. Here the open entries are found without it,
and each is held against the frontier of its lane.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from psycopg import Connection
from psycopg.rows import class_row

from awa.storage.connection import patiently
from awa.storage.schema import Schema

# A segment that is emptied after the snapshot would look empty in it too; the lock comes first, and truncates wait.
KEEP_SEGMENTS = "LOCK TABLE awa.jobs, awa.claims, awa.completions, awa.attempt_ends IN ACCESS SHARE MODE"

# Nested loops over what nobody has analyzed are quadratic; hash joins of it spill at worst.
PLAN_BY_HASH = """
    SET LOCAL enable_nestloop = off; SET LOCAL enable_mergejoin = off; SET LOCAL jit = off;
    SET LOCAL statement_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0
"""


@contextmanager
def whole_storage(conn: Connection[Any], schema: Schema, *, mode: str = "READ COMMITTED") -> Iterator[None]:
    """A transaction in which no segment is emptied, and which may read all of them.

    Args:
        mode: Its isolation level, as ``SET TRANSACTION ISOLATION LEVEL`` takes it.
    """
    with patiently(conn), conn.transaction():
        conn.execute(f"SET TRANSACTION ISOLATION LEVEL {mode}")
        conn.execute(PLAN_BY_HASH)
        conn.execute(schema.sql(KEEP_SEGMENTS))
        yield


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Something that keeps jobs of one queue from being claimed."""

    what: str
    """``hidden``: open entries behind the frontier. ``foreign``: open entries of transactions that this server has not
    had. ``frontier``: the frontier itself counts transactions as over that this server has not had, or has open."""
    queue: str
    """Whose."""
    count: int
    """How many entries; of a frontier, how many lanes."""
    sample: list[int]
    """The numbers of up to five of the entries."""

    def __str__(self) -> str:
        match self.what:
            case "hidden":
                return f"{self.count} open jobs of queue {self.queue} lie behind its frontier, where no claim comes"
            case "foreign":
                return (
                    f"{self.count} open jobs of queue {self.queue} are of transactions that this server has not had yet"
                )
        return f"the frontier of queue {self.queue} lies beyond the transactions of this server"


# Of this server's own rows: what a snapshot shows is of transactions that it counts as over. And a frontier was a
# snapshot once, so whatever is open now was open then, or had not begun.
UNREACHABLE = """
    WITH server AS MATERIALIZED (
        SELECT pg_current_snapshot() AS now
    ), lane AS MATERIALIZED (
        SELECT q.queue, f.lane, f.page_from, f.page_to, f.last_xid, f.last_entry,
               coalesce(f.page_to, f.page_from) AS seen
          FROM (SELECT c.queue FROM awa.claims c UNION SELECT t.queue FROM awa.frontiers t) q
         CROSS JOIN LATERAL unnest(awa.frontier_of(q.queue)) AS f
    ), lost AS (
        SELECT e.queue, e.entry_id,
               CASE WHEN pg_visible_in_snapshot(e.xid, s.now) THEN 'hidden' ELSE 'foreign' END AS what
          FROM awa.unclaimed_entries() e
         CROSS JOIN server s
          LEFT JOIN lane l ON l.queue = e.queue AND l.lane = e.lane
         WHERE NOT pg_visible_in_snapshot(e.xid, s.now)
            OR e.lane NOT BETWEEN 2 AND 9
            OR NOT awa.lies_ahead(l.page_from, l.page_to, l.last_xid, l.last_entry, e.xid, e.entry_id)
    )
    SELECT what, queue, count(*) AS count, (array_agg(entry_id ORDER BY entry_id))[1:5] AS sample
      FROM lost GROUP BY what, queue
     UNION ALL
    SELECT 'frontier', l.queue, count(*), '{}'
      FROM lane l CROSS JOIN server s
     WHERE pg_snapshot_xmax(l.seen) > pg_snapshot_xmax(s.now)
        OR EXISTS (SELECT FROM pg_snapshot_xip(s.now) x WHERE pg_visible_in_snapshot(x, l.seen))
     GROUP BY l.queue
     ORDER BY what, queue
"""


def find_unreachable(conn: Connection[Any], schema: Schema) -> list[Unreachable]:
    """Whatever keeps open jobs from being claimed, ever or for long; reads everything.

    Call it within :func:`whole_storage`, before that transaction writes. One statement, so one snapshot.
    """
    with conn.cursor(row_factory=class_row(Unreachable)) as cursor:
        return cursor.execute(schema.sql(UNREACHABLE), prepare=False).fetchall()
