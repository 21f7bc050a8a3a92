"""How fast one worker process gets through a backlog of no-op jobs.

The rate is the number of jobs by the time from the first claim to the last completion, both as the database's own rows
have them. A completion is written down just before its commit, whose flush comes on top once; that it was committed,
another connection sees.
"""

from __future__ import annotations

import awa
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from benchmarks.observer import Observer
from benchmarks.processes import WorkerProcess
from benchmarks.record import BenchmarkError, Plan, Result
from benchmarks.scenarios.tasks import noop

VARIANTS = ("noop",)

WARM_UP = 5000
"""Jobs that another worker process runs first, so that the server is warm; the measured process starts cold."""

SPAN = """
    SELECT extract(epoch FROM max(d.completed_at) - min(c.claimed_at))::float8, sum(cardinality(d.idx))::bigint
      FROM awa.claims c
      JOIN awa.completions d USING (slot, claim_id)
     WHERE c.runtime = (SELECT max(id) FROM awa.runtime_instances)
"""


def run(plan: Plan) -> list[Result]:
    """Drain a fresh database."""
    migrate(plan.database, Schema())
    return [drain(plan)]


def drain(plan: Plan, *, guests: int = 0) -> Result:
    """Insert, then have one worker process run everything; check that it did.

    Args:
        guests: How many connections to the database the caller keeps open meanwhile.
    """
    warm_up = min(WARM_UP, plan.jobs)
    client = awa.Client(plan.database)
    with Observer(plan.admin, plan.database, guests=guests) as observer:
        client.insert_many_copy(noop.bind(n) for n in range(warm_up))
        with WorkerProcess(plan) as worker:
            observer.wait_completed(warm_up, check=worker.check)
            worker.stop()
        client.insert_many_copy(noop.bind(n) for n in range(plan.jobs))
        client.close()
        observer.checkpoint()
        before = observer.counters()
        with WorkerProcess(plan) as worker:
            observer.wait_completed(warm_up + plan.jobs, check=worker.check)
            worker.stop()
        costs = before.per_job(observer.counters(), plan.jobs)
        observer.check_every_job_ran(warm_up + plan.jobs)
        seconds, measured = observer.ask(SPAN)
    if measured != plan.jobs:
        raise BenchmarkError(f"the measured worker completed {measured} of {plan.jobs} jobs, the warm-up the others")
    return Result(plan.variant, plan.jobs, plan.jobs / seconds, **costs)
