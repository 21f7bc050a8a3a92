"""How soon a job starts while the worker is mostly idle: 100 single inserts a second, evenly paced.

Timed from before ``client.insert`` is called to the first line of the handler in the worker's process, by the clock
that both share. WAL, commits and dead rows are those of producer and worker together, warm-up included.
"""

from __future__ import annotations

import os
import tempfile
import time

import awa
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from benchmarks.observer import Observer
from benchmarks.processes import WorkerProcess
from benchmarks.record import BenchmarkError, Plan, Result, percentiles
from benchmarks.scenarios.tasks import STARTS_FILE, stamp

VARIANTS = ("paced",)

RATE = 100
"""Inserts a second."""

WARM_UP = 1.0
"""Seconds at that rate before the measurement."""


def run(plan: Plan) -> list[Result]:
    """Insert at a steady pace beside a waiting worker; check that every job ran."""
    migrate(plan.database, Schema())
    warm_up, jobs = round(RATE * WARM_UP), max(round(RATE * plan.duration), 1)
    client = awa.Client(plan.database)
    with tempfile.TemporaryDirectory() as directory, Observer(plan.admin, plan.database) as observer:
        starts_file = os.path.join(directory, "starts")
        before = observer.counters()
        with WorkerProcess(plan, {STARTS_FILE: starts_file}) as worker:
            client.insert(stamp.bind(0))
            observer.wait_completed(1, check=worker.check)  # it is up
            _insert_paced(client, 1, warm_up)
            called = _insert_paced(client, 1 + warm_up, jobs)
            client.close()
            inserted = 1 + warm_up + jobs
            observer.wait_completed(inserted, check=worker.check)
            worker.stop()
        costs = before.per_job(observer.counters(), inserted)
        observer.check_every_job_ran(inserted)
        started = _read_starts(starts_file, inserted)
    took = [(started[1 + warm_up + n] - called[n]) / 1e9 for n in range(jobs)]
    span = (called[-1] - called[0]) / 1e9
    return [Result("paced", jobs, (jobs - 1) / span if span else 0.0, **percentiles(took), **costs)]


def _insert_paced(client: awa.Client, first: int, count: int) -> list[int]:
    """Insert *count* jobs; the nanoseconds before each call. Late ones follow at once, and the pace is kept."""
    called = []
    begin = time.monotonic()
    for n in range(count):
        if (early := begin + n / RATE - time.monotonic()) > 0:
            time.sleep(early)
        called.append(time.monotonic_ns())
        client.insert(stamp.bind(first + n))
    return called


def _read_starts(path: str, jobs: int) -> list[int]:
    """When each job's handler started, in nanoseconds.

    Raises:
        BenchmarkError: A handler did not start, or started twice.
    """
    with open(path, encoding="ascii") as file:
        starts = sorted((int(n), int(at)) for n, at in (line.split() for line in file))
    if [n for n, _ in starts] != list(range(jobs)):
        raise BenchmarkError(f"{jobs} handlers should have started once each, but {len(starts)} starts were noted")
    return [at for _, at in starts]
