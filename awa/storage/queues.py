"""Queues: which there are, and how many jobs each has in each state.

What can be many is counted up to a limit, by index, and estimated beyond: from the rows on some pages of the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from awa.job import JobState
from awa.storage.snapshot import Look

EXACT_LIMIT = 100_000
"""Jobs of a queue in one state that are counted one by one."""

SAMPLE_PAGES = 4_000
"""Pages that an estimate reads of a table."""

CLAIM_PAGES = 1_000
"""Pages of claims that it reads; for each claim on them the completions are looked up."""

# The next queue is the first entry of the index behind the last: a look for each queue, not for each job.
_NAMES = """{name} AS (
        (SELECT t.queue FROM {table} t ORDER BY t.queue LIMIT 1)
        UNION ALL
        SELECT n.queue FROM {name} q
         CROSS JOIN LATERAL (SELECT t.queue FROM {table} t WHERE t.queue > q.queue ORDER BY t.queue LIMIT 1) n
    )"""

LIST_QUEUES = f"""
    WITH RECURSIVE {_NAMES.format(name="entries", table="awa.jobs")},
    {_NAMES.format(name="waiting", table="awa.waiting_jobs")},
    {_NAMES.format(name="ended", table="awa.ended_jobs")}
    SELECT queue FROM entries UNION SELECT queue FROM waiting UNION SELECT queue FROM ended ORDER BY 1
"""


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
                                  WHERE w.queue = q.queue AND w.state = s.state LIMIT %(limit)s) w) c
"""

COUNT_ENDED = COUNT_WAITING.replace("awa.waiting_jobs", "awa.ended_jobs")

# Where the entries of q.queue lie that nobody has claimed: the ranges that awa.unclaimed walks, each with the snapshot
# that sees what belongs to it. Snapshots without open transactions make one range, which is written down here: a call
# for each lane of each queue would take longer than all the rest.
UNCLAIMED_RANGES = """
    WITH walk AS MATERIALIZED (
        SELECT l.lane::smallint AS lane, coalesce(f.page_from, '1:1:'::pg_snapshot) AS page_from, f.page_to,
               f.last_xid, f.last_entry
          FROM (SELECT awa.frontier_of(q.queue) AS frontier OFFSET 0) t
         CROSS JOIN generate_series(2, 9) l(lane)
          LEFT JOIN LATERAL (SELECT f.* FROM unnest(t.frontier) f WHERE f.lane = l.lane) f ON true
    ), page AS MATERIALIZED (
        SELECT p.*,
               pg_snapshot_xmin(p.page_from) = pg_snapshot_xmax(p.page_from)
               AND pg_snapshot_xmin(p.page_to) = pg_snapshot_xmax(p.page_to) AS is_plain
          FROM (SELECT w.lane, w.page_from, w.page_to, w.last_xid, w.last_entry, true AS is_begun
                  FROM walk w WHERE w.page_to IS NOT NULL
                 UNION ALL
                SELECT w.lane, coalesce(w.page_to, w.page_from), pg_current_snapshot(), '0', 0, false FROM walk w) p
    )
    SELECT p.lane, p.page_to,
           CASE WHEN p.is_begun THEN p.last_xid ELSE pg_snapshot_xmax(p.page_from) END AS lo_xid,
           CASE WHEN p.is_begun THEN p.last_entry ELSE -1 END AS lo_entry,
           pg_snapshot_xmax(p.page_to) AS hi_xid, -1::bigint AS hi_entry
      FROM page p WHERE p.is_plain
     UNION ALL
    SELECT p.lane, p.page_to, u.*
      FROM page p
     CROSS JOIN LATERAL awa.page_ranges(p.page_from, p.page_to, p.last_xid, p.last_entry) r
     CROSS JOIN LATERAL unnest(r.lo_xid, r.lo_entry, r.hi_xid, r.hi_entry) u
     WHERE NOT p.is_plain
"""

# Looked for only in slots in which anything ended so: it takes longer than the counting.
_HAS_ENDED = """(j.slot = ANY (ARRAY(SELECT s.slot::smallint FROM generate_series(0, 7) s(slot)
                                    WHERE EXISTS (SELECT FROM awa.attempt_ends e
                                                   WHERE e.slot = s.slot AND e.claim_id IS NULL OFFSET 0)))
                 AND EXISTS (SELECT FROM awa.attempt_ends e
                              WHERE e.slot = j.slot AND e.entry_id = j.entry_id OFFSET 0))"""

COUNT_AVAILABLE = f"""
    SELECT q.queue, 'available', c.n
      FROM unnest(%(queues)s::text[]) q(queue)
     CROSS JOIN LATERAL (
           SELECT count(*) AS n
             FROM (SELECT
                     FROM ({UNCLAIMED_RANGES}) r
                    CROSS JOIN LATERAL (
                          SELECT FROM awa.jobs j
                           WHERE j.queue = q.queue AND j.lane = r.lane
                             AND (j.xid, j.entry_id) > (r.lo_xid, r.lo_entry)
                             AND (j.xid, j.entry_id) < (r.hi_xid, r.hi_entry)
                             AND pg_visible_in_snapshot(j.xid, r.page_to)
                             AND NOT {_HAS_ENDED}
                           LIMIT %(limit)s) j
                    LIMIT %(limit)s) t) c
"""

# As awa.rescue_v1 reads them: what the last heartbeat listed, and every claim above the newest it knew. OFFSET keeps a
# filter by queue from coming first: it would find all that the queue has.
OPEN_CLAIMS = """
    SELECT c.slot, c.runtime, c.claim_id, c.claimed_at, c.queue, c.lane, c.entry_ids, c.xids
      FROM awa.runtime_instances i
     CROSS JOIN LATERAL (
           (SELECT t.* FROM awa.claims t WHERE t.runtime = i.id AND t.claim_id > i.newest_claim OFFSET 0)
           UNION ALL
           SELECT t.* FROM unnest(i.open_claims) o CROSS JOIN LATERAL (
                  SELECT * FROM awa.claims t
                   WHERE t.runtime = i.id AND t.claim_id = o AND o <= i.newest_claim OFFSET 0) t) c
     WHERE i.ended_at IS NULL
"""

# The members of open claims, without those that are completed or have ended; of as many claims as there may be jobs.
COUNT_RUNNING = f"""
    SELECT o.queue, 'running', sum(o.size - d.n - e.n)::bigint, count(*)
      FROM (SELECT c.slot, c.claim_id, c.queue, cardinality(c.entry_ids) AS size FROM ({OPEN_CLAIMS}) c
             WHERE c.queue = ANY (%(queues)s::text[])
             LIMIT %(limit)s) o
     CROSS JOIN LATERAL (SELECT coalesce(sum(cardinality(x.idx)), 0) AS n FROM awa.completions x
                          WHERE x.slot = o.slot AND x.claim_id = o.claim_id) d
     CROSS JOIN LATERAL (SELECT count(*) AS n FROM awa.attempt_ends e
                          WHERE e.slot = o.slot AND e.claim_id = o.claim_id) e
     GROUP BY o.queue
"""

_COMPLETED_OF_CLAIM = """
    (SELECT coalesce(sum(cardinality(x.idx)), 0)
            + (SELECT count(*) FROM awa.attempt_ends e
                WHERE e.slot = c.slot AND e.claim_id = c.claim_id AND e.outcome = 'completed') AS n
       FROM awa.completions x
      WHERE x.slot = c.slot AND x.claim_id = c.claim_id)
"""

# Of some claims of each queue, newest first, behind the one that was last looked at.
COUNT_COMPLETED = f"""
    SELECT q.queue, coalesce(sum(d.n), 0)::bigint, count(*), min(c.claim_id)
      FROM unnest(%(queues)s::text[], %(behind)s::bigint[]) q(queue, behind)
     CROSS JOIN LATERAL (SELECT c.slot, c.claim_id FROM awa.claims c
                          WHERE c.queue = q.queue AND c.claim_id < q.behind
                          ORDER BY c.claim_id DESC LIMIT %(limit)s) c
     CROSS JOIN LATERAL {_COMPLETED_OF_CLAIM} d
     GROUP BY q.queue
"""

SAMPLE_WAITING = """
    SELECT w.queue, w.state, count(*)
      FROM awa.waiting_jobs w TABLESAMPLE SYSTEM (%(percent)s) REPEATABLE (0)
     WHERE w.queue = ANY (%(queues)s::text[])
     GROUP BY 1, 2
"""

SAMPLE_ENDED = SAMPLE_WAITING.replace("awa.waiting_jobs", "awa.ended_jobs")

SAMPLE_AVAILABLE = f"""
    WITH frontier AS MATERIALIZED (
        SELECT q.queue, f.* FROM unnest(%(queues)s::text[]) q(queue) CROSS JOIN LATERAL awa.frontier_of(q.queue) t(f)
         CROSS JOIN LATERAL unnest(t.f) f
    )
    SELECT j.queue, 'available', count(*)
      FROM awa.jobs j TABLESAMPLE SYSTEM (%(percent)s) REPEATABLE (0)
      LEFT JOIN frontier f ON f.queue = j.queue AND f.lane = j.lane
     WHERE j.queue = ANY (%(queues)s::text[]) AND j.lane > 0
       AND NOT coalesce(pg_visible_in_snapshot(j.xid, f.page_from), false)
       AND NOT coalesce(pg_visible_in_snapshot(j.xid, f.page_to)
                        AND (j.xid, j.entry_id) <= (f.last_xid, f.last_entry), false)
       AND NOT {_HAS_ENDED}
     GROUP BY 1
"""

SAMPLE_COMPLETED = f"""
    SELECT c.queue, 'completed', sum(d.n)::bigint
      FROM awa.claims c TABLESAMPLE SYSTEM (%(percent)s) REPEATABLE (0)
     CROSS JOIN LATERAL {_COMPLETED_OF_CLAIM} d
     WHERE c.queue = ANY (%(queues)s::text[])
     GROUP BY 1
"""

# Of a table and of its partitions, if it has any.
COUNT_PAGES = """
    SELECT sum(pg_relation_size(p.relid))::bigint / current_setting('block_size')::bigint
      FROM (SELECT t.relid FROM pg_partition_tree('{table}') t UNION SELECT '{table}'::regclass) p
"""

Counts = dict[tuple[str, str], int]
"""By queue and state."""

WAITING_STATES = ("scheduled", "available", "retryable", "waiting_external")
"""States of the rows of waiting_jobs."""

_ENDED = ("failed", "cancelled")


def count_jobs(look: Look, queue: str | None) -> dict[str, dict[JobState, Count]]:
    """How many jobs each queue has in each state.

    Args:
        queue: Only this one, whether it has jobs or not; None: all that have any.
    """
    queues = [name for (name,) in look.rows(LIST_QUEUES)] if queue is None else [queue]
    limit = EXACT_LIMIT + 1
    waiting = _counts(look.rows(COUNT_WAITING, queues=queues, states=list(WAITING_STATES), limit=limit))
    ended = _counts(look.rows(COUNT_ENDED, queues=queues, states=list(_ENDED), limit=limit))
    available = _counts(look.rows(COUNT_AVAILABLE, queues=queues, limit=limit))
    open_claims = look.rows(COUNT_RUNNING, queues=queues, limit=limit)
    completed = _count_completed(look, queues)

    found: dict[str, dict[JobState, Count]] = {
        name: {state: Count(0, True) for state in JobState} for name in sorted(queues)
    }

    def add(counts: Counts, *, table: str, sample: str, pages: int) -> None:
        many = sorted({name for (name, _), value in counts.items() if value > EXACT_LIMIT})
        guessed = _estimate(look, table, sample, many, pages) if many else {}
        for (name, state), value in counts.items():
            before = found[name][JobState(state)]
            is_exact = value <= EXACT_LIMIT
            number = value if is_exact else max(guessed.get((name, state), 0), value)
            found[name][JobState(state)] = Count(before.value + number, before.is_exact and is_exact)

    add(waiting, table="awa.waiting_jobs", sample=SAMPLE_WAITING, pages=SAMPLE_PAGES)
    add(ended, table="awa.ended_jobs", sample=SAMPLE_ENDED, pages=SAMPLE_PAGES)
    add(available, table="awa.jobs", sample=SAMPLE_AVAILABLE, pages=SAMPLE_PAGES)
    add(completed, table="awa.claims", sample=SAMPLE_COMPLETED, pages=CLAIM_PAGES)
    are_all = sum(row[3] for row in open_claims) <= EXACT_LIMIT
    for name, state, value, _ in open_claims:
        found[name][JobState(state)] = Count(value, are_all)
    return found


def _counts(rows: Iterable[tuple[str, str, int]]) -> Counts:
    return {(name, state): value for name, state, value in rows}


def _count_completed(look: Look, queues: Sequence[str]) -> Counts:
    """Completed jobs of each queue; more than EXACT_LIMIT means at least that many, or that nobody knows."""
    found = {(name, "completed"): 0 for name in queues}
    seen = dict.fromkeys(queues, 0)
    behind = dict.fromkeys(queues, 2**63 - 1)
    step = 100  # claims of each queue; a claim has up to a thousand jobs, or one
    while behind:
        rows = look.rows(COUNT_COMPLETED, queues=list(behind), behind=list(behind.values()), limit=step)
        left = {}
        for name, completed, claims, last in rows:
            found[name, "completed"] += completed
            seen[name] += claims
            if seen[name] > EXACT_LIMIT:  # claims without successes would be looked through for ever
                found[name, "completed"] = max(found[name, "completed"], EXACT_LIMIT + 1)
            elif claims == step and found[name, "completed"] <= EXACT_LIMIT:
                left[name] = last
        behind = left
        step *= 4
    return found


def _estimate(look: Look, table: str, query: str, queues: Sequence[str], pages: int) -> Counts:
    """What *query* counts on so many random pages of *table*, times as much as the table is larger."""
    [(size,)] = look.rows(COUNT_PAGES.format(table=table))
    percent = min(100.0, 100.0 * pages / max(size, 1))
    rows = look.rows(query, queues=queues, percent=percent)
    return {(name, state): round(float(value) * 100.0 / percent) for name, state, value in rows}
