"""What is left of the rate when many worker processes serve one queue, and whether they share the work.

All processes are up and wait at an empty queue; then a backlog of no-op jobs is committed at once. Measured is the time
in which all of them have work: from the moment when the last process has made its first claim to the last claim of
all. ``share_spread`` is what the busiest process completed in that time, divided by what the least busy one did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import awa
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from benchmarks.compare import Medians, compare, with_goal
from benchmarks.observer import STALLED, Observer
from benchmarks.processes import WorkerProcess
from benchmarks.record import BenchmarkError, Plan, Result
from benchmarks.scenarios.tasks import noop

VARIANTS = ("1", "4", "16")

JOBS = 2
"""How many jobs, as a multiple of those asked for."""

UP = "SELECT count(*) FROM awa.runtime_instances"

SHARES = """
    WITH claimed AS (
        SELECT c.runtime, min(c.claimed_at) AS first, max(c.claimed_at) AS last
          FROM awa.claims c
         WHERE cardinality(c.entry_ids) > 0
         GROUP BY c.runtime
    ), plateau AS (
        SELECT max(first) AS begins, max(last) AS ends FROM claimed
    ), shares AS (
        SELECT c.runtime, coalesce(sum(cardinality(d.idx)) FILTER (
                   WHERE d.completed_at > p.begins AND d.completed_at <= p.ends), 0)::bigint AS jobs
          FROM awa.claims c
          LEFT JOIN awa.completions d USING (slot, claim_id)
         CROSS JOIN plateau p
         WHERE cardinality(c.entry_ids) > 0
         GROUP BY c.runtime
    )
    SELECT (SELECT extract(epoch FROM ends - begins)::float8 FROM plateau), array_agg(s.jobs ORDER BY s.jobs)
      FROM shares s
"""


def run(plan: Plan) -> list[Result]:
    """Have all processes share one backlog; check that every job ran."""
    migrate(plan.database, Schema())
    processes, jobs = int(plan.variant), JOBS * plan.jobs
    with ExitStack() as stack:
        observer = stack.enter_context(Observer(plan.admin, plan.database))
        before = observer.counters()
        workers = [stack.enter_context(WorkerProcess(plan)) for _ in range(processes)]

        def check() -> None:
            for worker in workers:
                worker.check()

        wait_until_up(observer, processes, check)
        client = awa.Client(plan.database)
        client.insert_many_copy(noop.bind(n) for n in range(jobs))
        client.close()
        observer.wait_completed(jobs, check=check)
        for worker in workers:
            worker.stop()
        costs = before.per_job(observer.counters(), jobs)
        observer.check_every_job_ran(jobs)
        seconds, shares = observer.ask(SHARES)
    if len(shares) < processes or not shares[0] or not seconds:
        raise BenchmarkError(
            f"the backlog of {jobs} jobs was through before {processes} processes had their share of it"
            f" ({shares}): give more --jobs"
        )
    spread = round(shares[-1] / shares[0], 3) if processes > 1 else None
    return [Result(plan.variant, sum(shares), sum(shares) / seconds, **costs, share_spread=spread)]


def wait_until_up(observer: Observer, processes: int, check: Callable[[], None]) -> None:
    """Return once so many workers are registered; *check* raises when one has died."""
    deadline = time.monotonic() + STALLED
    while (up := observer.ask(UP)[0]) < processes:
        check()
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{up} of {processes} workers are up after {STALLED:g} s")
        time.sleep(0.05)


def conclude(medians: Medians) -> Iterator[str]:
    """The rate beside that of one process, and how unevenly the work was shared."""
    for variant in VARIANTS[1:]:
        goal = "at least 60%" if variant == VARIANTS[-1] else ""
        yield from compare(medians, variant, VARIANTS[0], "jobs_per_s", goal=goal)
    for variant in VARIANTS[1:]:
        if (spread := medians.get(variant, {}).get("share_spread")) is not None:
            yield f"{variant}: the largest share is {spread:.2f} times the smallest{with_goal('at most 2')}"
