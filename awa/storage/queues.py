"""Queues: which there are, how many jobs each has in each state, and since when the oldest of them waits.

What can be many is counted up to a limit, by index, and estimated beyond: from the rows on some pages of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from awa.job import JobState
from awa.storage.snapshot import Look

EXACT_LIMIT = 10_000
"""Jobs of a queue in one state that are counted one by one, however large the table is."""

CLAIM_LIMIT = 1_000
"""Claims of a queue whose completed jobs are counted."""

SAMPLE_PAGES = 500
"""Pages of a table that an estimate reads; a table that has no more is counted."""

LIST_QUEUES = "SELECT queue FROM awa.queue_names() queue ORDER BY 1"


@dataclass(frozen=True, slots=True)
class Count:
    """How many jobs there are."""

    value: int
    """The number, or an estimate of it."""
    is_exact: bool
    """Whether they were counted one by one."""

    def __str__(self) -> str:
        return f"{self.value:,}" if self.is_exact else f"about {self.value:,}"


COUNT_WAITING = """
    SELECT q.queue, s.state, c.n
      FROM unnest(%(queues)s::text[]) q(queue)
     CROSS JOIN unnest(%(states)s::text[]) s(state)
     CROSS JOIN LATERAL (SELECT count(*) AS n
                           FROM (SELECT FROM awa.waiting_jobs w
                                  WHERE w.queue = q.queue AND w.state = s.state) w) c
"""

# Up to a limit; None: all. What has ended before it was claimed is looked for only in slots in which anything has: that
# takes longer than counting.
COUNT_AVAILABLE = """
    SELECT q.queue, 'available', c.n
      FROM unnest(%(queues)s::text[]) q(queue)
     CROSS JOIN LATERAL (
           SELECT count(*) AS n
             FROM (SELECT
                     FROM awa.unclaimed_ranges(q.queue) r
                    CROSS JOIN LATERAL (
                          SELECT FROM awa.jobs j
                           WHERE j.queue = q.queue AND j.lane = r.lane
                             AND (j.xid, j.entry_id) > (r.lo_xid, r.lo_entry)
                             AND (j.xid, j.entry_id) < (r.hi_xid, r.hi_entry)
                             AND pg_visible_in_snapshot(j.xid, r.page_to)
                             AND NOT (j.slot = ANY (ARRAY(SELECT s.slot::smallint FROM generate_series(0, 7) s(slot)
                                                           WHERE EXISTS (SELECT FROM awa.attempt_ends e
                                                                          WHERE e.slot = s.slot AND e.claim_id IS NULL
                                                                         OFFSET 0)))
                                      AND EXISTS (SELECT FROM awa.attempt_ends e
                                                   WHERE e.slot = j.slot AND e.entry_id = j.entry_id OFFSET 0))
                           LIMIT %(limit)s) j
                    LIMIT %(limit)s) t) c
"""

COUNT = """
    SELECT queue, state, n, is_exact
      FROM awa.queue_counts_v1(%(queues)s::text[], %(exact)s, %(claims)s, %(pages)s)
"""

OLDEST = "SELECT queue, oldest_at FROM awa.oldest_available_v1(%(queues)s::text[])"

WAITING_STATES = ("scheduled", "available", "retryable", "waiting_external")
"""States of the rows of waiting_jobs."""


def count_jobs(look: Look, queue: str | None) -> dict[str, dict[JobState, Count]]:
    """How many jobs each queue has in each state.

    Args:
        queue: Only this one, whether it has jobs or not; None: all that have any.

    Source: migrations/0028_overviews.sql.
    """
    queues = [name for (name,) in look.rows(LIST_QUEUES)] if queue is None else [queue]
    found = {name: {state: Count(0, True) for state in JobState} for name in sorted(queues)}
    limits = {"exact": EXACT_LIMIT, "claims": CLAIM_LIMIT, "pages": SAMPLE_PAGES}
    for name, state, number, is_exact in look.rows(COUNT, queues=queues, **limits):
        before = found[name][JobState(state)]  # what is available lies in two tables
        found[name][JobState(state)] = Count(before.value + number, before.is_exact and is_exact)
    return found


def oldest_available(look: Look, queues: Sequence[str]) -> dict[str, datetime | None]:
    """Since when the oldest available job of each queue has been available.

    Source: migrations/0029_shorter_looks.sql.
    """
    return dict(look.rows(OLDEST, queues=list(queues)))
