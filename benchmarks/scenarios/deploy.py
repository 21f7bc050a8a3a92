"""A rolling deploy at its beginning: ten workers of before share a queue with one that knows a kind more.

In ``before`` the ten have a queue of jobs that they know, and the new one is not there; in ``alone`` it is. ``aliens``
has in between, one for every ten, jobs of a kind that only the new worker knows; ``more`` has as many more that
everybody knows. The rate is that of the jobs that ``before`` has: until the last of them is completed, from the first
claim. Each alien is set aside at most once, however many workers meet it.

All jobs are there before the first is claimed, and handlers do nothing, so that all of it is the queue's own work; or,
in the variants ``-20ms``, they wait twenty milliseconds. In the variants ``-steady`` the known jobs arrive at 30,000 a
second, and the percentiles are those of their ways from the insert to the recorded end.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack

import awa
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from benchmarks.compare import Medians, compare
from benchmarks.observer import Observer
from benchmarks.processes import WorkerProcess
from benchmarks.record import BenchmarkError, Plan, Result, percentiles
from benchmarks.scenarios.fleet import wait_until_up
from benchmarks.scenarios.newer import novel
from benchmarks.scenarios.tasks import nap, noop

BEFORE, ALONE, ALIENS, MORE = "before", "alone", "aliens", "more"

WAITING, STEADY = "-20ms", "-steady"

VARIANTS = tuple(kind + pace for pace in ("", WAITING, STEADY) for kind in (BEFORE, ALONE, ALIENS, MORE))

ARRIVING = 30_000
"""Known jobs a second, of the variants in which they arrive."""

TICK = 0.01
"""Seconds between two inserts of these."""

OLD_WORKERS = 10

PART = 2
"""Of the jobs asked for, one in so many is inserted, and a tenth of these in addition: aliens, or more of them."""

EVERY = 10
"""Known jobs for an additional one."""

DONE = """
    WITH done AS MATERIALIZED (
        SELECT j.id, j.kind, j.available_at, d.completed_at, c.runtime
          FROM awa.completions d
          JOIN awa.claims c USING (slot, claim_id)
         CROSS JOIN LATERAL unnest(d.idx) AS i(idx)
          JOIN awa.jobs j ON j.slot = c.slot AND j.entry_id = c.entry_ids[i.idx]
    )
    SELECT count(*) FILTER (WHERE kind <> 'novel'), count(*) FILTER (WHERE kind = 'novel'), count(DISTINCT id),
           (SELECT count(*) FROM awa.attempt_ends WHERE outcome <> 'set_aside'),
           count(DISTINCT runtime) FILTER (WHERE kind = 'novel'),
           (SELECT coalesce(max(n), 0)
              FROM (SELECT count(*) AS n FROM awa.attempt_ends WHERE outcome = 'set_aside' GROUP BY id) t),
           extract(epoch FROM max(completed_at) FILTER (WHERE kind <> 'novel')
                              - (SELECT min(claimed_at) FROM awa.claims WHERE entry_ids <> '{}'))::float8,
           array_agg(extract(epoch FROM completed_at - available_at)::float8) FILTER (WHERE kind <> 'novel')
      FROM done
"""


def run(plan: Plan) -> list[Result]:
    """Have all workers share one backlog; check that every job ran, and how often it was set aside."""
    migrate(plan.database, Schema())
    known = plan.jobs // PART
    variant = plan.variant.partition("-")[0]
    is_waiting, is_steady = (plan.variant.endswith(pace) for pace in (WAITING, STEADY))
    aliens, more = (known // EVERY if variant == one else 0 for one in (ALIENS, MORE))
    jobs = known + aliens + more
    with ExitStack() as stack:
        observer = stack.enter_context(Observer(plan.admin, plan.database))
        before = observer.counters()
        workers = [stack.enter_context(WorkerProcess(plan)) for _ in range(OLD_WORKERS)]
        if variant != BEFORE:
            workers.append(stack.enter_context(WorkerProcess(plan, application="benchmarks.scenarios.newer:client")))

        def check() -> None:
            for worker in workers:
                worker.check()

        wait_until_up(observer, len(workers), check)
        client = awa.Client(plan.database)
        usual = nap if is_waiting else noop
        additional = {ALIENS: novel.bind(0, seconds=0.02 if is_waiting else 0.0), MORE: usual.bind()}.get(variant)
        jobs_of_all = _jobs(known, usual.bind(), additional)
        if is_steady:
            _insert_steadily(client, jobs_of_all, ARRIVING * jobs / known)
        else:
            client.insert_many_copy(jobs_of_all)
        client.close()
        observer.wait_completed(jobs, check=check)
        for worker in workers:
            worker.stop()
        costs = before.per_job(observer.counters(), jobs)
        *counts, strangers, most_aside, seconds, ways = observer.ask(DONE)
    if counts != [known + more, aliens, jobs, 0]:
        raise BenchmarkError(
            f"{known + more} known jobs and {aliens} others should have run once each, but (known, others, jobs, ended"
            f" otherwise) are {counts}"
        )
    if strangers > 1:
        raise BenchmarkError(f"{strangers} workers ran jobs that one alone should know")
    if most_aside > 1:
        raise BenchmarkError(f"a job was set aside {most_aside} times, should be once at most")
    if is_steady:
        costs |= percentiles(ways)
    return [Result(plan.variant, known, known / seconds, **costs)]


def _jobs(known: int, usual: awa.BoundArgs, additional: awa.BoundArgs | None) -> Iterator[awa.NewJob]:
    for n in range(known):
        yield awa.NewJob(usual)
        if additional is not None and n % EVERY == 0:
            yield awa.NewJob(additional)


def _insert_steadily(client: awa.Client, jobs: Iterator[awa.NewJob], per_second: float) -> None:
    begun, inserted = time.monotonic(), 0
    while True:
        due = int((time.monotonic() - begun) * per_second) - inserted
        some = list(itertools.islice(jobs, due))
        if due and not some:
            return
        client.insert_many_copy(some)
        inserted += len(some)
        time.sleep(TICK)


def conclude(medians: Medians) -> Iterator[str]:
    """In percent of before: with the aliens, with the new worker alone, with as many more known jobs."""
    for pace in ("", WAITING, STEADY):
        yield from compare(medians, ALIENS + pace, BEFORE + pace, "jobs_per_s", goal="at least 90%")
        for other in (ALONE, MORE):
            yield from compare(medians, other + pace, BEFORE + pace, "jobs_per_s")
