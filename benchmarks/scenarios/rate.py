"""Whether a rate limit holds over many worker processes: how many jobs start in each ten seconds.

A queue may start 50 jobs a second, 50 at once. Four worker processes share a backlog that is longer than it can start
in the time; each handler notes when it starts. ``window-NN`` are ten seconds after one another, ``most`` and ``least``
the busiest and the idlest ten seconds wherever they begin.
"""

from __future__ import annotations

import bisect
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg

import awa
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from benchmarks.compare import Medians, with_goal
from benchmarks.observer import Observer
from benchmarks.processes import WorkerProcess
from benchmarks.record import BenchmarkError, Plan, Result
from benchmarks.scenarios.fleet import wait_until_up
from benchmarks.scenarios.tasks import STARTS_FILE, stamp

VARIANTS = ("50",)

BURST = 50
"""Jobs that may start at once after a rest."""

WINDOW = 10.0
"""Seconds."""

PROCESSES = 4


def run(plan: Plan) -> list[Result]:
    """Have the processes work through the time; check that no job started twice."""
    migrate(plan.database, Schema())
    rate = int(plan.variant)
    with psycopg.connect(plan.database, autocommit=True) as conn:
        conn.execute("INSERT INTO awa.queue_meta (queue, rate, burst) VALUES ('default', %s, %s)", [rate, BURST])
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory, str(n)) for n in range(PROCESSES)]
        _work(plan, rate, files)
        starts = [line.split() for file in files for line in file.read_text(encoding="ascii").splitlines()]
    if len({n for n, _ in starts}) != len(starts):
        raise BenchmarkError(f"{len(starts)} starts were of {len({n for n, _ in starts})} jobs")
    times = sorted(int(at) / 1e9 for _, at in starts)
    begins, ends = times[0], times[0] + plan.duration
    if times[-1] < ends - 1.0:
        raise BenchmarkError(
            f"the last job started {times[-1] - begins:.1f} s after the first, not {plan.duration:g} s"
        )
    window = min(WINDOW, plan.duration)
    windows = int(plan.duration / window)
    results = [
        _result(f"window-{number + 1:02}", count_starts(times, begins + number * window, window), window)
        for number in range(windows)
    ]
    sliding = [count_starts(times, at, window) for at in times if at + window <= ends]
    idle = [count_starts(times, at, window, is_open=True) for at in times if at + window <= ends]
    return [*results, _result("most", max(sliding), window), _result("least", min(idle), window)]


def _work(plan: Plan, rate: int, files: list[Path]) -> None:
    with ExitStack() as stack:
        observer = stack.enter_context(Observer(plan.admin, plan.database))
        workers = [stack.enter_context(WorkerProcess(plan, {STARTS_FILE: str(file)})) for file in files]

        def check() -> None:
            for worker in workers:
                worker.check()

        wait_until_up(observer, len(workers), check)
        client = awa.Client(plan.database)
        client.insert_many_copy(stamp.bind(n) for n in range(int(rate * (plan.duration + 10) + BURST)))
        client.close()
        until = time.monotonic() + plan.duration + 2.0
        while time.monotonic() < until:
            check()
            time.sleep(0.1)
        for worker in workers:
            worker.stop()


def count_starts(times: list[float], begin: float, seconds: float, *, is_open: bool = False) -> int:
    """How many starts lie in the *seconds* from *begin*, which belongs to them unless *is_open*; their end does not."""
    side = bisect.bisect_right if is_open else bisect.bisect_left
    return bisect.bisect_left(times, begin + seconds) - side(times, begin)


def _result(variant: str, jobs: int, seconds: float) -> Result:
    return Result(variant, jobs, jobs / seconds)


def conclude(medians: Medians) -> Iterator[str]:
    """How many started in each window, beside what may and should."""
    for variant, figures in medians.items():
        goal = "at least 490" if variant == "least" else "at most 550" if variant == "most" else "490 to 550"
        yield f"{variant}: {figures['jobs']:.0f} started{with_goal(goal)}"
