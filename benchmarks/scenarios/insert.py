"""How fast jobs get in: by COPY, in batches, and one at a time beside a bare INSERT of the same row.

``single`` and its reference ``bare`` are measured in one repetition, in turn and in short rounds, so that whatever else
happens on the machine meets both; so is ``unique``, single jobs with a key of their own, whose reference is ``single``.
The times are those of a call: of 1,000 jobs for ``many``, of one for the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count

import psycopg

import awa
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from benchmarks.compare import Medians
from benchmarks.observer import Observer
from benchmarks.processes import WorkerProcess
from benchmarks.record import Plan, Result, percentiles
from benchmarks.scenarios.tasks import noop

VARIANTS = ("copy", "many", "single")

BATCH = 1000
"""Jobs of one ``insert_many``."""

ROUND = 100
"""Single inserts before it is the other's turn."""

SHARE_OF_SINGLES = 20
"""Single inserts are so many times fewer than the jobs asked for."""

REFERENCES = {"single": "bare", "unique": "single"}
"""What single inserts are compared with."""

WARM_UP = 1000
"""Jobs before the measurement, a single round of each for ``single``."""

UNIQUE = awa.Unique()

BARE = """
    INSERT INTO awa.jobs (queue, lane, priority, kind, args, max_attempts)
    VALUES (%(queue)s, %(lane)s, %(priority)s, %(kind)s, %(args)s, %(max_attempts)s)
    RETURNING id
"""

ROW = {"queue": "default", "lane": 5, "priority": 2, "kind": noop.kind, "max_attempts": 25}
"""What ``client.insert(noop.bind(n))`` writes, beside the args."""


def run(plan: Plan) -> list[Result]:
    """Insert, then have a worker run everything and check that it did."""
    migrate(plan.database, Schema())
    client = awa.Client(plan.database)
    measure = {"copy": _copy, "many": _many, "single": _single}[plan.variant]
    with Observer(plan.admin, plan.database) as observer:
        try:
            inserted, results = measure(plan, client, observer)
        finally:
            client.close()
        with WorkerProcess(plan) as worker:
            observer.wait_completed(inserted, check=worker.check)
            worker.stop()
        observer.check_every_job_ran(inserted)
    return results


def conclude(medians: Medians) -> Iterator[str]:
    """What the client costs beside the bare statement."""
    for name, reference in REFERENCES.items():
        if (ratio := medians.get(name, {}).get("ratio")) is not None:
            yield f"{name} runs at {ratio:.1%} of {reference} (median of the ratios within each repetition)"


def _copy(plan: Plan, client: awa.Client, observer: Observer) -> tuple[int, list[Result]]:
    client.insert_many_copy(_jobs(WARM_UP))
    client.close()
    before = observer.counters()
    started = time.perf_counter()
    client.insert_many_copy(_jobs(plan.jobs))
    seconds = time.perf_counter() - started
    client.close()
    costs = before.per_job(observer.counters(), plan.jobs)
    return WARM_UP + plan.jobs, [Result("copy", plan.jobs, plan.jobs / seconds, **costs)]


def _many(plan: Plan, client: awa.Client, observer: Observer) -> tuple[int, list[Result]]:
    client.insert_many(_jobs(WARM_UP))
    client.close()
    before = observer.counters()
    times = []
    for first in range(0, plan.jobs, BATCH):
        size = min(BATCH, plan.jobs - first)
        started = time.perf_counter()
        client.insert_many(_jobs(size))
        times.append(time.perf_counter() - started)
    client.close()
    costs = before.per_job(observer.counters(), plan.jobs)
    return WARM_UP + plan.jobs, [Result("many", plan.jobs, plan.jobs / sum(times), **percentiles(times), **costs)]


def _single(plan: Plan, client: awa.Client, observer: Observer) -> tuple[int, list[Result]]:
    rounds = max(plan.jobs // SHARE_OF_SINGLES // ROUND, 1)
    before = observer.counters()
    # one connection for both: on which core its server process sits is worth 70 us a round trip on some machines
    with psycopg.connect(plan.database, autocommit=True) as lent, lent.cursor() as cursor:

        def single(n: int) -> None:
            client.insert(noop.bind(n), conn=lent)

        def bare(n: int) -> None:
            cursor.execute(BARE, ROW | {"args": f'{{"n":{n}}}'}, prepare=True).fetchone()

        numbers = count()

        def unique(n: int) -> None:
            client.insert(noop.bind(next(numbers)), unique=UNIQUE, conn=lent)

        turns: list[tuple[str, Callable[[int], None]]] = [("single", single), ("bare", bare), ("unique", unique)]
        times: dict[str, list[float]] = {name: [] for name, _ in turns}
        wal = dict.fromkeys(times, 0)
        for _, insert in turns:
            _timed(insert)
        for _ in range(rounds):
            for name, insert in turns:
                wal_before = observer.wal()
                times[name] += _timed(insert)
                wal[name] += observer.wal() - wal_before
            turns.reverse()  # going first neither helps nor hurts in the end
    inserted = len(turns) * ROUND * (rounds + 1)
    costs = before.per_job(observer.counters(), inserted)  # commits and dead rows: of all, warm-up included
    rates = {name: len(taken) / sum(taken) for name, taken in times.items()}
    return inserted, [
        Result(
            name,
            len(taken),
            rates[name],
            **percentiles(taken),
            **costs | {"wal_bytes_per_job": round(wal[name] / len(taken), 2)},
            ratio=round(rates[name] / rates[REFERENCES[name]], 4) if name in REFERENCES else None,
        )
        for name, taken in times.items()
    ]


def _timed(insert: Callable[[int], None]) -> list[float]:
    times = []
    for n in range(ROUND):
        started = time.perf_counter()
        insert(n)
        times.append(time.perf_counter() - started)
    return times


def _jobs(count: int) -> Iterator[object]:
    return (noop.bind(n) for n in range(count))
