"""Whether claiming and inserting cost more beside a hundred open transactions that have written something else.

Every open transaction stands in the snapshots that claims are cut by. Half of them have an uncommitted job in a queue
of their own, half a row in a table of the application. ``100`` stay open as they are; of ``100-moving`` one ends and
another begins before each step, so that the next claim meets what committed late. Each level has a queue of its own in
one database, in turns of a few steps, and the transactions end before it is the turn of ``0`` again. A step inserts a
batch, claims one and completes it.

The times are those of one claim of 100 jobs, and of one single insert. What was claimed must be exactly the oldest jobs
of each queue, in order and each once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import psycopg

from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from benchmarks.compare import Medians, compare
from benchmarks.record import Plan, Result
from benchmarks.scenarios.claiming import Claiming

VARIANTS = ("levels",)

OPEN = 100
"""Transactions."""

TURN = 20
"""Steps before it is the next level's turn."""

SETTLING_IN = 2
"""Steps of each turn that do not count: the first claim meets all that ended since the turn before, or began."""

NOBODY, STILL, MOVING = "0", f"{OPEN}", f"{OPEN}-moving"

TABLE = "CREATE TABLE public.orders (n integer NOT NULL)"

WRITES = (
    "INSERT INTO awa.jobs (queue, kind) VALUES ('other-' || %(n)s, 'noop')",
    "INSERT INTO public.orders (n) VALUES (%(n)s)",
)
"""What the open transactions have done, in turn."""


class Others:
    """Connections of an application, each of which can have a transaction open."""

    def __init__(self, database: str) -> None:
        self._conns: list[psycopg.Connection[Any]] = []
        self._database = database
        self._next = 0

    def __enter__(self) -> Others:
        for _ in range(OPEN):
            self._conns.append(psycopg.connect(self._database, autocommit=True, prepare_threshold=None))
        return self

    def __exit__(self, *error: object) -> None:
        for conn in self._conns:
            conn.close()

    def begin(self) -> None:
        """Open them all."""
        for n in range(OPEN):
            self._begin(n)

    def move(self) -> None:
        """End the oldest, and open it anew."""
        self._conns[self._next].execute("COMMIT")
        self._begin(self._next)
        self._next = (self._next + 1) % OPEN

    def end(self) -> None:
        """Commit them all."""
        for conn in self._conns:
            conn.execute("COMMIT")

    def _begin(self, n: int) -> None:
        self._conns[n].execute("BEGIN")
        self._conns[n].execute("SET LOCAL synchronous_commit = off")  # it is not their commits that are measured
        self._conns[n].execute(WRITES[n % len(WRITES)], {"n": n})


def run(plan: Plan) -> list[Result]:
    """Measure all levels in turns; check what was claimed at each."""
    migrate(plan.database, Schema())
    with psycopg.connect(plan.database, autocommit=True) as conn:
        conn.execute(TABLE)
    with ExitStack() as stack:
        levels = {name: stack.enter_context(Claiming(plan.database, name)) for name in (NOBODY, STILL, MOVING)}
        others = stack.enter_context(Others(plan.database))
        until = time.monotonic() + plan.duration
        while True:
            _take_turn(levels[NOBODY])
            others.begin()
            _take_turn(levels[STILL])
            _take_turn(levels[MOVING], others)
            others.end()
            if time.monotonic() >= until:
                break
        for claiming in levels.values():
            claiming.check()
        return [result for name, claiming in levels.items() for result in claiming.results(name)]


def _take_turn(claiming: Claiming, moving: Others | None = None) -> None:
    for n in range(SETTLING_IN + TURN):
        if moving is not None:
            moving.move()
        claiming.step(is_counted=n >= SETTLING_IN)


def conclude(medians: Medians) -> Iterator[str]:
    """Beside open transactions, in percent of without."""
    for what in ("claim", "insert"):
        for level in (STILL, MOVING):
            for figure in ("p50_ms", "p99_ms"):
                yield from compare(medians, f"{what}-{level}", f"{what}-{NOBODY}", figure)
