"""What looking costs beside a large history: every list, every count, the views, and one job by its id.

5 million completed, a million available, 200,000 failed and 500 running jobs (for 200,000 asked for), of five queues,
the largest with half of them and the smallest with a fiftieth, and of twenty kinds. They are written by SQL, as workers
would have left them: claims of a hundred with their frontiers, completions, ends. What is measured is ``client.admin``
on the server's machine, the decoding of what comes included, and queries of the views as a dashboard sends them.

Each look is made some times; the first, which may have to read its pages from the disk, counts too.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg

import awa
from awa.admin import Admin, JobPage
from awa.job import JobState
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from benchmarks.compare import Medians, with_goal
from benchmarks.record import BenchmarkError, Plan, Result, percentiles

VARIANTS = ("all",)

SHARES = {"mail": 25, "images": 13, "reports": 7, "sync": 4, "rare": 1}
"""Parts of fifty that each queue has of all jobs."""

KINDS = 20
"""Kinds of jobs, each with as many."""

COMPLETED, AVAILABLE, FAILED = 25, 5, 1
"""How many of each there are, as multiples of the jobs asked for."""

CHUNK = 50_000
"""Most jobs of a queue that one transaction writes."""

BATCH = 100
"""Attempts of one claim."""

FULL_SLOTS = 3
"""Segments that hold only what has ended; the next one holds what is available."""

RUNNING = 500
"""Jobs of the largest queue that run."""

TIMES = 5
"""Each look is made so often."""

DEEP = 20
"""Pages of a thousand jobs that lie before a deep one."""

GOAL_MS, GOAL_MS_OF_ONE = 100.0, 10.0
"""What a look is hoped to take, and that for one job."""

# One chunk of a queue: entries, and, when they have ended, what workers have written about them. Of those that failed
# every entry has its own end and a row of ended_jobs.
FILL = """
    WITH entry AS MATERIALIZED (
        INSERT INTO awa.jobs (slot, queue, kind, priority, lane, args, tags, available_at)
        SELECT %(slot)s, %(queue)s, 'kind_' || (n * 7919 %% %(kinds)s), 2, 5,
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
        INSERT INTO awa.attempt_ends (entry_id, claim_id, flush, id, slot, outcome, ended_at, elapsed_ms, error)
        SELECT m, c.claim_id, c.claim_id, m, %(slot)s, 'failed', now(), 5,
               '{"type": "ValueError", "text": "no such order"}'
          FROM claim c CROSS JOIN LATERAL unnest(c.entry_ids) m
         WHERE %(outcome)s = 'failed'
    )
    INSERT INTO awa.ended_jobs (id, created_at, ended_at, priority, attempt, max_attempts, state, queue, kind, args,
                                tags, history)
    SELECT e.id, e.available_at, now(), e.priority, 1, 1, 'failed', e.queue, e.kind, e.args, e.tags,
           json_build_array(json_build_object('attempt', 1, 'outcome', 'failed', 'ended_at', now(), 'elapsed_ms', 5,
                                              'runtime', %(runtime)s, 'type', 'ValueError', 'text', 'no such order'))
      FROM entry e
     WHERE %(outcome)s = 'failed'
"""


# As dashboards ask.
QUERIES = {
    "view-queues": "SELECT * FROM awa.queue_overview",
    "view-runtimes": "SELECT * FROM awa.runtime_overview",
    "view-failed": "SELECT * FROM awa.job_overview WHERE queue = 'mail' AND state = 'failed'"
    " ORDER BY ended_at DESC LIMIT 50",
    "view-running": "SELECT * FROM awa.job_overview WHERE state = 'running' LIMIT 50",
    "view-available": "SELECT * FROM awa.job_overview WHERE queue = 'rare' AND state = 'available' LIMIT 50",
    "view-kinds": "SELECT kind, error_type, count(*) FROM awa.job_overview WHERE queue = 'rare' AND state = 'failed'"
    " GROUP BY 1, 2",
    "view-id": "SELECT * FROM awa.job_overview WHERE id = %(id)s",
}

Look = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timed:
    """A look, and the number of jobs or rows that it is about."""

    look: Look
    """Looks."""
    count: Callable[[Any], int]
    """How many it found."""


def run(plan: Plan) -> list[Result]:
    """Write the jobs, look at them in every way, and check that what was seen is what was written.

    Raises:
        BenchmarkError: A count is off by more than a fifth, or a list that goes on is empty.
    """
    migrate(plan.database, Schema())
    fill(plan.database, plan.jobs)
    client = awa.Client(plan.database, pool_size=1)
    try:
        with psycopg.connect(plan.database, autocommit=True) as conn:
            _check_counts(client.admin, plan.jobs)
            return [_measure(name, timed) for name, timed in _looks(client, conn)]
    finally:
        client.close()


def _looks(client: awa.Client, conn: psycopg.Connection) -> Iterator[tuple[str, Timed]]:
    admin = client.admin
    yield "counts", Timed(admin.queue_counts, len)
    yield "counts-one", Timed(lambda: admin.queue_counts("mail"), len)
    yield "counts-kinds", Timed(admin.kind_counts, len)
    yield "counts-one-kind", Timed(lambda: admin.kind_counts("kind_3"), len)
    yield "counts-kinds-of-queue", Timed(lambda: admin.kind_counts(queue="mail"), len)
    yield "kinds", Timed(admin.list_kinds, len)
    yield "kind", Timed(lambda: admin.get_kind("kind_3"), lambda info: 1)
    yield "queues", Timed(admin.list_queues, len)
    yield "queue", Timed(lambda: admin.get_queue("mail"), lambda info: 1)
    filters: dict[str, dict[str, Any]] = {
        "": {},
        "-queue": {"queue": "mail"},
        "-rare-queue": {"queue": "rare"},
        "-kind": {"kind": "kind_3"},
        "-tag": {"tag": "eu"},
        "-rare-tag": {"tag": "rare"},
        "-thousand": {"limit": 1000},
    }
    for state in (None, JobState.RUNNING, JobState.AVAILABLE, JobState.COMPLETED, JobState.FAILED):
        for suffix, given in filters.items():
            yield f"list-{state or 'all'}{suffix}", _listing(admin, state, **given)
        if state not in (None, JobState.RUNNING):
            after = _after_many(admin, state)
            yield f"list-{state}-deep", _listing(admin, state, after=after)
    chance = random.Random(1)
    [newest] = conn.execute("SELECT last_value FROM awa.entry_id_seq").fetchone() or (1,)
    ids = [chance.randint(1, newest) for _ in range(100)]
    yield "list-id", _listing(admin, None, ids=ids[:1])
    yield "list-10-ids", _listing(admin, None, ids=ids[:10])
    each = iter(ids * TIMES)
    yield "job", Timed(lambda: client.get(next(each)), lambda job: 1)
    yield "job-details", Timed(lambda: admin.job_details(next(each)), lambda job: 1)
    for name, query in QUERIES.items():
        yield name, Timed(partial(_ask, conn, query, ids[0]), len)


def _ask(conn: psycopg.Connection, query: str, job_id: int) -> list[Any]:
    return conn.execute(query, {"id": job_id}).fetchall()


def _listing(admin: Admin, state: JobState | None, **given: Any) -> Timed:
    return Timed(lambda: admin.list_jobs(state, **given), _count_page)


def _count_page(page: JobPage) -> int:
    return len(page.jobs)


def _after_many(admin: Admin, state: JobState) -> str | None:
    after: str | None = None
    for _ in range(DEEP):
        after = admin.list_jobs(state, limit=1000, after=after).after or after
    return after


def _measure(name: str, timed: Timed) -> Result:
    times = []
    found: object = None
    for _ in range(TIMES):
        started = time.perf_counter()
        found = timed.look()
        times.append(time.perf_counter() - started)
    return Result(name, timed.count(found), TIMES / sum(times), **percentiles(times))


def _check_counts(admin: Admin, jobs: int) -> None:
    counts = admin.queue_counts()
    written = {JobState.COMPLETED: COMPLETED, JobState.AVAILABLE: AVAILABLE, JobState.FAILED: FAILED}
    for queue, share in SHARES.items():
        for state, parts in written.items():
            expected, count = jobs * parts * share / 50, counts[queue][state]
            if abs(count.value - expected) > RUNNING + expected / 5:
                raise BenchmarkError(f"queue {queue} has about {expected:,.0f} {state} jobs, and {count} were counted")
    by_kind = admin.kind_counts()
    for state, parts in written.items():
        expected, count = jobs * parts / KINDS, by_kind["kind_3"][state]
        if abs(count.value - expected) > RUNNING + expected / 5:
            raise BenchmarkError(f"kind_3 has about {expected:,.0f} {state} jobs, and {count} were counted")


def conclude(medians: Medians) -> Iterator[str]:
    """The looks that take longer than hoped for, by their medians."""
    slow = {
        name: figures["p50_ms"]
        for name, figures in medians.items()
        if figures.get("p50_ms", 0) > (GOAL_MS_OF_ONE if name in ("job", "job-details") else GOAL_MS)
    }
    told = ", ".join(f"{name} {took:.0f} ms" for name, took in sorted(slow.items(), key=lambda item: -item[1]))
    goal = with_goal(f"{GOAL_MS:g} ms, {GOAL_MS_OF_ONE:g} for one job")
    yield f"{len(medians) - len(slow)} of {len(medians)} looks take less than hoped for{goal}" + (
        f"; more take {told}" if told else ""
    )


def fill(database: str, jobs: int) -> None:
    """Write the jobs; *jobs* are as many as have failed."""
    with psycopg.connect(database, autocommit=True) as conn:
        runtime = _runtime(conn)
        for outcome, parts in (("failed", FAILED), ("completed", COMPLETED), ("available", AVAILABLE)):
            slots = {"failed": [0], "completed": list(range(FULL_SLOTS)), "available": [FULL_SLOTS]}[outcome]
            for slot in slots:
                conn.execute("SELECT setval('awa.ring_seq', %s)", (slot,))
                for queue, share in SHARES.items():
                    count = jobs * parts * share // 50 // len(slots)
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
                                "kinds": KINDS,
                                "runtime": runtime,
                            },
                        )
        conn.execute("UPDATE awa.runtime_instances SET newest_claim = (SELECT max(claim_id) FROM awa.claims)")
        conn.execute("SELECT FROM awa.claim_v2('mail', %s::bigint, NULL, %s, false, 60)", (runtime, RUNNING))
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
