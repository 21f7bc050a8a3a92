"""What looking costs beside a large history: every list, every count, the views, and one job by its id.

5 million completed, a million available and 200,000 failed jobs (for 200,000 asked for), of five queues, the largest
with half of them and the smallest with a fiftieth, and of twenty kinds. They are written by SQL, as workers would have
left them: claims of a hundred with their frontiers, completions, ends. What is measured is ``client.admin`` on the
machine of the server, the connection and the decoding of what comes included.

Each look is timed some times; the first time, with the pages that it needs still to be read, counts too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psycopg

import awa
from awa.job import JobState
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from benchmarks.compare import Medians, with_goal
from benchmarks.record import BenchmarkError, Plan, Result, percentiles

VARIANTS = ("all",)

SHARES = {"mail": 25, "images": 13, "reports": 7, "sync": 4, "rare": 1}
"""Parts of fifty that each queue has of all jobs."""

COMPLETED, AVAILABLE, FAILED = 25, 5, 1
"""How many of each there are, as multiples of the jobs asked for."""

CHUNK = 50_000
"""Most jobs of a queue that one transaction writes."""

BATCH = 100
"""Attempts of one claim."""

FULL_SLOTS = 3
"""Segments that hold only what has ended; the next one holds the rest."""

MOST_MS, MOST_MS_OF_ONE = 100.0, 10.0
"""What a look is hoped to take, and that for one job."""

# One chunk of a queue: entries, and, when they have ended, what workers have written about them. Of those that failed
# every entry has its own end and a row of ended_jobs.
FILL = """
    WITH entry AS MATERIALIZED (
        INSERT INTO awa.jobs (slot, queue, kind, priority, lane, args, tags, available_at)
        SELECT %(slot)s, %(queue)s, 'kind_' || (n * 7919 %% 20), 2, 5,
               json_build_object('n', n, 'address', 'somebody@example.org'),
               CASE WHEN n %% 1000 = 0 THEN ARRAY['rare'] WHEN n %% 4 = 0 THEN ARRAY['eu', 'monthly'] END,
               clock_timestamp() - interval '1 h'
          FROM generate_series(%(first)s::bigint, %(first)s::bigint + %(count)s - 1) n
        RETURNING xid, entry_id, id, slot, queue, kind, args, tags, available_at, priority
    ), claim AS MATERIALIZED (
        SELECT nextval('awa.claim_id_seq') AS claim_id, t.*
          FROM (SELECT array_agg(e.entry_id ORDER BY e.entry_id) AS entry_ids,
                       array_agg(e.xid ORDER BY e.entry_id) AS xids, max(e.entry_id) AS last, min(e.xid) AS xid
                  FROM (SELECT e.*, row_number() OVER (ORDER BY e.entry_id) - 1 AS n FROM entry e) e
                 WHERE %(outcome)s <> 'available'
                 GROUP BY e.n / %(batch)s ORDER BY e.n / %(batch)s) t
    ), claimed AS (
        INSERT INTO awa.claims (claim_id, runtime, nonce, slot, lane, queue, frontier, entry_ids, xids)
        SELECT c.claim_id, %(runtime)s, 1, %(slot)s, 5, %(queue)s,
               ARRAY[ROW(5, (c.xid || ':' || c.xid || ':')::pg_snapshot,
                         ((c.xid::text::bigint + 1) || ':' || (c.xid::text::bigint + 1) || ':')::pg_snapshot,
                         c.xid, c.last)::awa.lane_frontier],
               c.entry_ids, c.xids
          FROM claim c
    ), completed AS (
        INSERT INTO awa.completions (claim_id, flush, slot, idx, elapsed_ms)
        SELECT c.claim_id, c.claim_id, %(slot)s, i.idx, i.idx::integer[] FROM claim c
         CROSS JOIN LATERAL (SELECT array_agg(n::smallint ORDER BY n) AS idx
                               FROM generate_series(1, cardinality(c.entry_ids)) n) i
         WHERE %(outcome)s = 'completed'
    ), ended AS (
        INSERT INTO awa.attempt_ends (entry_id, claim_id, flush, id, slot, outcome, elapsed_ms, error)
        SELECT m, c.claim_id, c.claim_id, m, %(slot)s, 'failed', 5, '{"type": "ValueError", "text": "no such order"}'
          FROM claim c CROSS JOIN LATERAL unnest(c.entry_ids) m
         WHERE %(outcome)s = 'failed'
    )
    INSERT INTO awa.ended_jobs (id, created_at, ended_at, priority, attempt, max_attempts, state, queue, kind, args, tags,
                                history)
    SELECT e.id, e.available_at, clock_timestamp(), e.priority, 1, 1, 'failed', e.queue, e.kind, e.args, e.tags,
           '[{"attempt": 1, "outcome": "failed", "type": "ValueError", "text": "no such order"}]'
      FROM entry e
     WHERE %(outcome)s = 'failed'
"""


@dataclass(frozen=True, slots=True)
class Look:
    """Something to look at."""

    name: str
    """What the result is called."""
    call: Callable[[], object]
    """Looks."""
    goal: float = MOST_MS
    """Milliseconds that it is hoped to take at most."""


def fill(database: str, jobs: int) -> None:
    """Write the jobs; *jobs* are as many as have failed."""
    with psycopg.connect(database, autocommit=True) as conn:
        runtime = _runtime(conn)
        for outcome, parts in (("completed", COMPLETED), ("failed", FAILED), ("available", AVAILABLE)):
            for slot in range(FULL_SLOTS) if outcome == "completed" else [FULL_SLOTS]:
                conn.execute("SELECT setval('awa.ring_seq', %s)", (slot,))
                for queue, share in SHARES.items():
                    count = jobs * parts * share // 50 // (FULL_SLOTS if outcome == "completed" else 1)
                    for first in range(0, count, CHUNK):
                        conn.execute(
                            FILL,
                            {
                                "slot": slot,
                                "queue": queue,
                                "first": first,
                                "count": min(CHUNK, count - first),
                                "outcome": outcome,
                                "batch": BATCH,
                                "runtime": runtime,
                            },
                        )
        conn.execute("UPDATE awa.runtime_instances SET newest_claim = (SELECT max(claim_id) FROM awa.claims)")
        # what maintenance has done by then
        for slot in range(FULL_SLOTS + 1):
            conn.execute("SELECT awa.analyze_v1(%s::smallint)", (slot,))
            conn.execute("SELECT awa.summarize_v1(%s::smallint, 0, 1000000)", (slot,))
        conn.execute("VACUUM ANALYZE awa.ended_jobs")
        conn.execute("CHECKPOINT")


def _runtime(conn: psycopg.Connection) -> int:
    row = conn.execute(
        "INSERT INTO awa.runtime_instances (uuid, hostname, pid, version, heartbeat_ms)"
        " VALUES (gen_random_uuid(), 'host', 1, '0', 5000) RETURNING id"
    ).fetchone()
    assert row is not None
    return int(row[0])
