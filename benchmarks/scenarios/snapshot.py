"""Whether somebody else's old transaction slows a worker down: an old snapshot, or an open transaction with writes.

A worker process drains a backlog, as in ``drain``. ``snapshot`` is a REPEATABLE READ transaction that has read before
anything was inserted and stays open until the end: from then on no vacuum may remove what dies. ``writing`` is one that
has inserted a row into a table of its own and stays open: it stands in every snapshot that claims are cut by.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg

from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from benchmarks.compare import Medians, compare
from benchmarks.record import Plan, Result
from benchmarks.scenarios.drain import drain

ALONE, OLD, WRITING = "alone", "snapshot", "writing"

VARIANTS = (ALONE, OLD, WRITING)

HELD = {
    ALONE: (),
    OLD: ("BEGIN ISOLATION LEVEL REPEATABLE READ", "SELECT count(*) FROM awa.jobs"),
    WRITING: ("CREATE TABLE public.orders ()", "BEGIN", "INSERT INTO public.orders DEFAULT VALUES"),
}
"""What the other connection does first."""


def run(plan: Plan) -> list[Result]:
    """Have the other connection do its part, then drain; check that every job ran."""
    migrate(plan.database, Schema())
    with closing(psycopg.connect(plan.database, autocommit=True)) as other:
        for statement in HELD[plan.variant]:
            other.execute(statement)
        return [drain(plan, guests=1)]


def conclude(medians: Medians) -> Iterator[str]:
    """Beside the other transactions, in percent of without."""
    for variant in (OLD, WRITING):
        yield from compare(medians, variant, ALONE, "jobs_per_s", goal="at least 95%")
