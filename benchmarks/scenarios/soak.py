"""Whether everything stays as it is for minutes at a busy rate, while segments are filled, emptied and filled again.

One producer inserts small batches and one worker process runs them. How many a second both can do together is measured
first; then the producer keeps 70 % of that, with a rotation every ten seconds and completed jobs kept no longer than
that takes. Each minute has a line: waits from before the ``insert_many`` to the start of the handler (of one job of
each batch, every position in turn), WAL, the worker's memory and the size of the database at its end.

Segments are emptied, so the database cannot tell what has run: each handler counts its job in a file of one byte per
job. Every byte must be 1 in the end, and all that is left in the tables must have ended.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import awa
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from benchmarks.compare import Medians, compare
from benchmarks.observer import STALLED, Observer
from benchmarks.processes import WorkerProcess
from benchmarks.record import BenchmarkError, Plan, Result, percentiles
from benchmarks.scenarios.tasks import MARKS_FILE, WAIT, WAITS_FILE, mark

VARIANTS = ("70",)

SHARE = 0.7
"""Of the measured peak."""

BATCH = 100
"""Jobs of one ``insert_many``."""

PEAK_SECONDS = 10.0
"""Most that the peak is measured, and a fifth of that before it does not count."""

ROTATE_AFTER = 10
"""Seconds until the next segment is begun."""

SETTINGS = {"AWA_ROTATE_AFTER": f"{ROTATE_AFTER}", "AWA_COMPLETED_RETENTION": "0"}
"""The worker's."""

MOST_JOBS = 1 << 30
"""Bytes of the file of counts, which is as large as what is written to it."""

SIZE = "SELECT pg_database_size(current_database()) / 1048576.0"

SLOT = "SELECT last_value FROM awa.ring_seq"

LEFT = """
    SELECT (SELECT count(*) FROM awa.jobs),
           (SELECT coalesce(sum(cardinality(idx)), 0)::bigint FROM awa.completions)
           + (SELECT count(*) FROM awa.attempt_ends),
           (SELECT count(*) FROM awa.waiting_jobs) + (SELECT count(*) FROM awa.ended_jobs)
"""


@dataclass(frozen=True, slots=True)
class Moment:
    """What is read at the end of each minute."""

    at: int
    """Nanoseconds of CLOCK_MONOTONIC."""
    jobs: int
    """Inserted so far."""
    wal: int
    """Bytes, of the whole server."""
    slot: int
    """The segment that is being filled."""
    database_mb: float
    """Size of the database."""
    rss_mb: float | None
    """The worker's memory."""


class Soak:
    """One producer and one worker, and what is known of both."""

    def __init__(self, observer: Observer, worker: WorkerProcess, client: awa.Client, marks: mmap.mmap) -> None:
        self._observer = observer
        self._worker = worker
        self._client = client
        self._marks = marks
        self._batches = 0

    @property
    def jobs(self) -> int:
        """How many were inserted."""
        return BATCH * self._batches

    def produce(self, seconds: float, *, rate: float | None = None) -> None:
        """Insert batches for some time, *rate* jobs a second, or as fast as it goes. Late ones follow at once."""
        begin, first = time.monotonic(), self._batches
        while (now := time.monotonic()) < begin + seconds:
            if rate is not None and (early := begin + (self._batches - first) * BATCH / rate - now) > 0:
                time.sleep(early)
            numbers = range(self.jobs, self.jobs + BATCH)
            timed = self.jobs + self._batches % BATCH
            at = time.monotonic_ns()
            self._client.insert_many(mark.bind(n, at) if n == timed else mark.bind(n) for n in numbers)
            self._batches += 1

    def wait(self) -> None:
        """Return once every inserted job has run.

        Raises:
            BenchmarkError: For a long time none did.
        """
        ran, since = -1, time.monotonic()
        while (now_ran := self.jobs - self._marks[: self.jobs].count(0)) < self.jobs:
            self._worker.check()
            if now_ran > ran:
                ran, since = now_ran, time.monotonic()
            elif time.monotonic() - since > STALLED:
                raise BenchmarkError(f"{ran} of {self.jobs} jobs have run, and none for {STALLED:g} s")
            time.sleep(0.01)

    def peak(self, seconds: float) -> Result:
        """What producer and worker can do: from the first insert until all that was inserted in *seconds* has run."""
        self.produce(seconds / 5)
        self.wait()
        before, begin = self.jobs, time.monotonic()
        self.produce(seconds)
        self.wait()
        jobs = self.jobs - before
        return Result("peak", jobs, jobs / (time.monotonic() - begin))

    def look(self) -> Moment:
        """How things stand."""
        self._worker.check()
        return Moment(
            at=time.monotonic_ns(),
            jobs=self.jobs,
            wal=self._observer.wal(),
            slot=self._observer.ask(SLOT)[0],
            database_mb=float(self._observer.ask(SIZE)[0]),
            rss_mb=self._worker.rss_mb(),
        )

    def check(self) -> None:
        """Check that every job ran exactly once, and that all entries which are left have ended.

        Raises:
            BenchmarkError: One did not.
        """
        marks = self._marks[: self.jobs]
        entries, ended, elsewhere = self._observer.ask(LEFT)
        if marks.count(1) != self.jobs or entries != ended or elsewhere:
            raise BenchmarkError(
                f"{self.jobs} jobs should have run once each, but {marks.count(0)} never ran and"
                f" {self.jobs - marks.count(0) - marks.count(1)} several times; {entries} entries are left with {ended}"
                f" ends, and {elsewhere} jobs wait or failed"
            )


def run(plan: Plan) -> list[Result]:
    """Measure the peak, then stay below it for *duration*; check that every job ran."""
    migrate(plan.database, Schema())
    with tempfile.TemporaryDirectory() as directory, Observer(plan.admin, plan.database) as observer:
        files = {MARKS_FILE: os.path.join(directory, "marks"), WAITS_FILE: os.path.join(directory, "waits")}
        with open(files[MARKS_FILE], "w+b") as file:
            file.truncate(MOST_JOBS)
            marks = mmap.mmap(file.fileno(), 0)
        client = awa.Client(plan.database)
        with marks, WorkerProcess(plan, SETTINGS | files) as worker:
            soak = Soak(observer, worker, client, marks)
            peak = soak.peak(min(PEAK_SECONDS, plan.duration / 5))
            minutes = max(int(plan.duration // 60), 1)
            moments = [soak.look()]
            for _ in range(minutes):
                soak.produce(plan.duration / minutes, rate=SHARE * peak.jobs_per_s)
                moments.append(soak.look())
            client.close()
            soak.wait()
            worker.stop()
            soak.check()
        with open(files[WAITS_FILE], "rb") as waits:
            found = sorted(WAIT.iter_unpack(waits.read()))
    if plan.duration > 3 * ROTATE_AFTER and len({moment.slot for moment in moments}) == 1:
        raise BenchmarkError(
            f"the ring did not turn within {plan.duration:g} s, though it should every {ROTATE_AFTER} s"
        )
    return [peak, *_results(moments, found)]


def _results(moments: Sequence[Moment], waits: Sequence[tuple[int, int]]) -> Iterator[Result]:
    for number, (begin, end) in enumerate(pairwise(moments), start=1):
        jobs = end.jobs - begin.jobs
        yield Result(
            f"minute-{number:02}",
            jobs,
            jobs / (end.at - begin.at) * 1e9,
            **percentiles([(started - at) / 1e9 for at, started in waits if begin.at <= at < end.at]),
            wal_bytes_per_job=round((end.wal - begin.wal) / jobs, 2),
            rss_mb=end.rss_mb,
            database_mb=round(end.database_mb, 1),
        )


def conclude(medians: Medians) -> Iterator[str]:
    """The last minute beside the second; the first one begins with an empty ring."""
    minutes = sorted(variant for variant in medians if variant.startswith("minute-"))
    if len(minutes) > 2:
        for figure in ("p50_ms", "p99_ms", "wal_bytes_per_job", "rss_mb", "database_mb"):
            yield from compare(medians, minutes[-1], minutes[1], figure)
