"""What limits cost: draining a queue with each kind of them, beside the same queue with none.

A worker process drains a backlog of no-op jobs, as in ``drain``. The limits are such that they seldom stop anything,
but for those of keys that many jobs share: then most jobs are set aside and handed over one after another. ``old-``
does it beside an old snapshot: from then on no vacuum may remove what dies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import psycopg

from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from benchmarks.compare import Medians
from benchmarks.observer import Observer
from benchmarks.processes import WorkerProcess
from benchmarks.record import BenchmarkError, Plan, Result
from benchmarks.scenarios.drain import SPAN, WARM_UP
from benchmarks.scenarios.snapshot import HELD, OLD
from benchmarks.scenarios.tasks import noop


@dataclass(frozen=True, slots=True)
class Limited:
    """A queue and its jobs."""

    limits: str = ""
    """Columns of ``awa.queue_meta`` and their values; empty: nothing is said of the queue."""
    key: str = "NULL"
    """SQL for the ``concurrency_key`` of job *n*."""
    ordering: str = "NULL"
    """SQL for its ``ordering_key``."""


NONE = "none"

QUEUES = {
    NONE: Limited(),
    "max-running": Limited("max_running = 4000"),
    "rate": Limited("rate = 1000000, burst = 1000000"),
    "own-key": Limited("max_running_per_key = 1", key="n::text"),
    "50-keys": Limited("max_running_per_key = 3", key="(n %% 50)::text"),
    "hot-key": Limited("max_running_per_key = 100", key="'hot'"),
    "ordering": Limited(ordering="(n %% 1000)::text"),
}

BESIDE = "old-"
"""Before the name of what is done beside an old snapshot."""

VARIANTS = (*QUEUES, *(BESIDE + name for name in QUEUES))

INSERT = """
    INSERT INTO awa.jobs (kind, args, concurrency_key, ordering_key)
    SELECT %(kind)s, json_build_object('n', n), {key}, {ordering} FROM generate_series(1, %(jobs)s) n
"""

RAN = """
    WITH done AS (
        SELECT j.id
          FROM awa.completions d
          JOIN awa.claims c USING (slot, claim_id)
         CROSS JOIN LATERAL unnest(d.idx) AS i(idx)
          JOIN awa.jobs j ON j.slot = c.slot AND j.entry_id = c.entry_ids[i.idx]
    )
    SELECT (SELECT count(DISTINCT id) FROM awa.jobs), (SELECT count(*) FROM done),
           (SELECT count(DISTINCT id) FROM done),
           (SELECT count(*) FROM awa.waiting_jobs),
           (SELECT count(*) FROM awa.attempt_ends WHERE outcome <> 'set_aside')
"""


def run(plan: Plan) -> list[Result]:
    """Drain a fresh database; check that every job was completed once."""
    migrate(plan.database, Schema())
    queue = QUEUES[plan.variant.removeprefix(BESIDE)]
    warm_up = min(WARM_UP, plan.jobs)
    with ExitStack() as stack:
        guests = 1
        other = stack.enter_context(closing(psycopg.connect(plan.database, autocommit=True)))
        if queue.limits:
            other.execute("INSERT INTO awa.queue_meta (queue) VALUES ('default')")
            other.execute(f"UPDATE awa.queue_meta SET {queue.limits}".encode())
        if plan.variant.startswith(BESIDE):
            guests = 2
            held = stack.enter_context(closing(psycopg.connect(plan.database, autocommit=True)))
            for statement in HELD[OLD]:
                held.execute(statement)
        observer = stack.enter_context(Observer(plan.admin, plan.database, guests=guests))
        insert = INSERT.format(key=queue.key, ordering=queue.ordering).encode()
        other.execute(insert, {"kind": noop.kind, "jobs": warm_up})
        with WorkerProcess(plan) as worker:
            observer.wait_completed(warm_up, check=worker.check)
            worker.stop()
        other.execute(insert, {"kind": noop.kind, "jobs": plan.jobs})
        observer.checkpoint()
        before = observer.counters()
        with WorkerProcess(plan) as worker:
            observer.wait_completed(warm_up + plan.jobs, check=worker.check)
            worker.stop()
        costs = before.per_job(observer.counters(), plan.jobs)
        found = observer.ask(RAN)
        jobs = warm_up + plan.jobs
        if found != (jobs, jobs, jobs, 0, 0):
            raise BenchmarkError(
                f"{jobs} jobs should have run once each, but (jobs, completions, completed, waiting, ended otherwise)"
                f" are {found}"
            )
        seconds, measured = observer.ask(SPAN)
    if measured != plan.jobs:
        raise BenchmarkError(f"the measured worker completed {measured} of {plan.jobs} jobs, the warm-up the others")
    return [Result(plan.variant, plan.jobs, plan.jobs / seconds, **costs)]


def conclude(medians: Medians) -> Iterator[str]:
    """Microseconds and bytes of WAL for a job, and how many more than without limits, beside the same snapshot."""
    for beside in ("", BESIDE):
        reference = medians.get(beside + NONE)
        for name in QUEUES:
            if reference is None or (figures := medians.get(beside + name)) is None:
                continue
            took, without = (1e6 / each["jobs_per_s"] for each in (figures, reference))
            wal, plain = (each["wal_bytes_per_job"] for each in (figures, reference))
            more = f"{took:7.1f} us ({took - without:+6.1f}) {wal:8.1f} B ({wal - plain:+7.1f}) a job"
            yield f"{beside + name:<15} {more}"
