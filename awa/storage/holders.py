"""Who holds places and keys of limited queues, beside who runs and who waits, for ``awa storage check``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from psycopg import Connection
from psycopg.rows import class_row, scalar_row

from awa.storage.schema import Schema


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Something that one of the two says and the other does not."""

    name: str
    """One of :data:`MISMATCHES`."""
    queue: str
    """Where."""
    count: int
    """How many."""
    sample: list[int]
    """The ids of the jobs of up to five of them."""


MISMATCHES = {
    "order_shared": "jobs run or are next though another job has their ordering_key",
    "unheld": "running attempts do not hold their key: others may start beside them",
    "stray_holder": "jobs hold a key and are nowhere in the queue: nobody else gets it",
    "unheard": "jobs wait for a key that no claim will look at: they wait for ever, until a job of the same key ends",
    "uncounted": "running attempts are not counted: more may start than max_running allows",
}
"""What each means."""

# A key that is free is handed over by the next claim, so a row of grants whose job has ended is no mismatch. One that
# says so itself (is_over, or id 0) is of nobody.
FIND = """
    WITH attempt AS MATERIALIZED (
        SELECT o.queue, o.claim_id, o.slot, o.idx, j.id, left(j.concurrency_key, 201) AS key,
               left(j.ordering_key, 201) AS ordering
          FROM awa.open_attempts() o JOIN awa.jobs j USING (slot, entry_id, xid)
    ), live AS MATERIALIZED (
        SELECT a.queue, a.id FROM attempt a
         UNION ALL
        SELECT u.queue, u.id FROM awa.unclaimed_entries() u
         UNION ALL
        SELECT w.queue, w.id FROM awa.waiting_jobs w
    ), holder AS MATERIALIZED (
        SELECT g.*, m.max_running_per_key IS NOT NULL AS is_limited
          FROM awa.grants g LEFT JOIN awa.queue_meta m USING (queue)
         WHERE NOT g.is_over AND g.id <> 0
    ), newest AS (
        SELECT DISTINCT ON (t.queue) t.queue, t.limits
          FROM (SELECT c.queue, c.claim_id, c.limits FROM awa.claims c
                 UNION ALL
                SELECT f.queue, f.claim_id, f.limits FROM awa.frontiers f) t
         ORDER BY t.queue, t.claim_id DESC
    ), counted AS (
        SELECT n.queue, u.claim_id, u.slot, u.size
          FROM newest n
         CROSS JOIN LATERAL unnest((n.limits).open_claims, (n.limits).open_slots, (n.limits).open_sizes)
               AS u(claim_id, slot, size)
    ), mismatch(name, queue, id) AS (
        SELECT 'order_shared', t.queue, t.id
          FROM (SELECT h.queue, h.id, count(*) OVER (PARTITION BY h.queue, h.key) AS holders
                  FROM holder h
                 WHERE h.scope = 'order' AND NOT awa.is_over(ROW(h.queue, h.scope, h.key, h.id, h.claim_id, h.entry_id,
                                                                 h.slot, h.idx, h.is_over, h.granted_at)::awa.grants,
                                                             true)
                 UNION ALL
                SELECT a.queue, a.id, count(*) OVER (PARTITION BY a.queue, a.ordering)
                  FROM attempt a WHERE a.ordering IS NOT NULL) t
         WHERE t.holders > 1
         GROUP BY t.queue, t.id
         UNION ALL
        SELECT 'unheld', a.queue, a.id
          FROM attempt a LEFT JOIN awa.queue_meta m USING (queue)
         WHERE a.ordering IS NOT NULL
               AND NOT EXISTS (SELECT FROM holder h
                                WHERE h.queue = a.queue AND h.scope = 'order' AND h.key = a.ordering AND h.id = a.id
                                  AND h.claim_id = a.claim_id AND h.idx = a.idx)
            OR a.key IS NOT NULL AND m.max_running_per_key IS NOT NULL
               AND NOT EXISTS (SELECT FROM holder h
                                WHERE h.queue = a.queue AND h.scope = 'key' AND h.key = a.key AND h.id = a.id
                                  AND h.claim_id = a.claim_id AND h.idx = a.idx)
         UNION ALL
        SELECT 'stray_holder', h.queue, h.id
          FROM holder h
         WHERE (h.scope = 'order' OR h.is_limited)
           AND (h.claim_id = 0
                OR h.scope = 'order'
                   AND EXISTS (SELECT FROM awa.attempt_ends e
                                WHERE e.slot = h.slot AND e.entry_id = h.entry_id
                                  AND e.outcome NOT IN ('completed', 'failed', 'cancelled')))
           AND NOT EXISTS (SELECT FROM live l WHERE l.queue = h.queue AND l.id = h.id)
         UNION ALL
        SELECT 'unheard', w.queue, w.id
          FROM awa.waiting_jobs w
         WHERE w.waits_for IN ('key', 'order')
           AND NOT EXISTS (SELECT FROM awa.grants g
                            WHERE g.queue = w.queue AND g.scope = w.waits_for AND g.key = w.wait_key)
         UNION ALL
        SELECT 'uncounted', a.queue, a.id
          FROM attempt a
          JOIN awa.queue_meta m USING (queue)
          JOIN newest n USING (queue)
         WHERE m.max_running IS NOT NULL AND (n.limits).open_claims IS NOT NULL
           AND (SELECT count(*) FROM attempt b
                 WHERE b.queue = a.queue AND b.claim_id = a.claim_id AND b.slot = a.slot)
               > coalesce((SELECT c.size FROM counted c
                            WHERE c.queue = a.queue AND c.claim_id = a.claim_id AND c.slot = a.slot), 0)
    )
    SELECT x.name, x.queue, count(*)::integer AS count, (array_agg(x.id ORDER BY x.id))[1:5] AS sample
      FROM mismatch x GROUP BY x.name, x.queue ORDER BY x.name, x.queue
"""


def find_mismatches(conn: Connection[Any], schema: Schema) -> list[Mismatch]:
    """Compare holders with attempts and with who waits; empty when they agree."""
    with conn.cursor(row_factory=class_row(Mismatch)) as cursor:
        return cursor.execute(schema.sql(FIND), prepare=False).fetchall()


OVER = """
    WITH attempt AS (
        SELECT o.queue, left(j.concurrency_key, 201) AS key
          FROM awa.open_attempts() o JOIN awa.jobs j USING (slot, entry_id, xid)
    )
    SELECT coalesce(sum(t.many), 0)::bigint
      FROM (SELECT greatest(count(*) - m.max_running, 0) AS many
              FROM attempt a JOIN awa.queue_meta m USING (queue) GROUP BY m.queue
             UNION ALL
            SELECT greatest(count(*) - m.max_running_per_key, 0)
              FROM attempt a JOIN awa.queue_meta m USING (queue) WHERE a.key IS NOT NULL GROUP BY m.queue, a.key) t
"""


def count_over_limits(conn: Connection[Any], schema: Schema) -> int:
    """How many running attempts are more than ``max_running`` and ``max_running_per_key`` of their queues allow.

    A limit that is lowered ends nothing that runs, so this is no fault as long as it falls.
    """
    with conn.cursor(row_factory=scalar_row) as cursor:
        return int(cursor.execute(schema.sql(OVER), prepare=False).fetchone() or 0)
