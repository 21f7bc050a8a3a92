"""Whether claiming and inserting cost more when more waits: nothing, and three backlogs, each ten times the last.

Every backlog lies in a database of its own on one server, all at the same time, and they are measured in turns of a few
steps, so that a slow moment of the machine meets each of them. A step inserts a batch, claims one and completes it:
what waits stays level. ``beside`` is a queue that is kept empty in the tables of the largest backlog. The connections
are older than the backlogs, so that they come with the plans that they made when there was nothing.

The times are those of one claim of 100 jobs, and of one single insert. What was claimed must be exactly the oldest jobs
of each queue, in order and each once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from benchmarks.compare import Medians, compare
from benchmarks.observer import Observer
from benchmarks.record import Plan, Result
from benchmarks.scenarios.claiming import Claiming
from benchmarks.server import Place

VARIANTS = ("levels",)

SIZES = (0.5, 5, 50)
"""The backlogs, as multiples of the jobs asked for: a hundred thousand, a million, ten million."""

TURN = 10
"""Steps before it is the next backlog's turn."""

QUEUE, BESIDE = "waiting", "beside"


def run(plan: Plan) -> list[Result]:
    """Measure all backlogs in turns; check what was claimed from each."""
    sizes = [0, *(round(plan.jobs * size) for size in SIZES)]
    place = Place(plan.admin, None, None)
    with ExitStack() as stack:
        databases = [plan.database, *(stack.enter_context(place.database()) for _ in sizes[1:])]
        for database in databases:
            migrate(database, Schema())
        levels = {
            str(size): stack.enter_context(Claiming(database, QUEUE))
            for size, database in zip(sizes, databases, strict=True)
        }
        levels[f"beside-{sizes[-1]}"] = stack.enter_context(Claiming(databases[-1], BESIDE))
        for size in sizes:
            levels[str(size)].load(size)
        with Observer(plan.admin, plan.database) as observer:
            observer.checkpoint()
        for claiming in levels.values():
            claiming.warm_up()
        _take_turns(levels.values(), plan.duration)
        for claiming in levels.values():
            claiming.check()
        return [result for name, claiming in levels.items() for result in claiming.results(name)]


def _take_turns(levels: Iterable[Claiming], seconds: float) -> None:
    turns = deque(levels)
    until = time.monotonic() + seconds
    while True:
        for claiming in turns:
            for _ in range(TURN):
                claiming.step()
        turns.rotate()  # nobody always follows the same one
        if time.monotonic() >= until:
            return


def conclude(medians: Medians) -> Iterator[str]:
    """The largest backlog beside the smallest, and an empty queue beside a full one."""
    sizes = sorted(int(name) for variant in medians if (name := variant.removeprefix("claim-")).isdecimal())
    if len(sizes) < 2:
        return
    smallest, largest = f"{sizes[1]}", f"{sizes[-1]}"
    yield from compare(medians, f"claim-{largest}", f"claim-{smallest}", "p50_ms", goal="at most 120%")
    yield from compare(medians, f"claim-{largest}", f"claim-{smallest}", "p99_ms", goal="at most 150%")
    yield from compare(medians, f"claim-beside-{largest}", "claim-0", "p50_ms")
    yield from compare(medians, f"claim-beside-{largest}", "claim-0", "p99_ms")
    for figure in ("p50_ms", "p99_ms"):
        yield from compare(medians, f"insert-{largest}", f"insert-{smallest}", figure)
