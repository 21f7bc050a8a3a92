"""Chore: let jobs go that wait for other jobs, when those have ended.

A pass walks over the jobs that wait, in windows. Of each window's parents it asks what has become of them, then lets go
who waited for nothing else. Where a parent was found is kept for the next pass: to search for a job by its id costs
much more than to look at its entry again. A parent that waits for others itself is not asked for; most of a chain does.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from time import monotonic
from typing import NamedTuple

from psycopg import Connection

from awa.storage import dependents
from awa.storage.dependents import Dependent, Place
from awa.storage.schema import Schema

WINDOW = 1_000
"""Most jobs of a window."""

PARENTS = 1_000
"""Of how many parents a window is full."""

ASKED = 250
"""Of how many parents one statement asks what has become of them."""

BUDGET = 0.05
"""Seconds after which a run leaves the rest to the next, so that other chores come in between."""

PACE = 10
"""Looking that finds nothing to do is followed by a pause of so many times what it cost."""

SEARCHING = 0.3
"""Which part of a search for parents counts as such looking: it is done once, and somebody may wait for it."""

SHORTEST_PAUSE = 0.02
"""Seconds to the next pass when this one found something: in a chain of short jobs the next is ready then. As long as
nothing happens the pauses double, up to ..."""

LONGEST_PAUSE = 0.1
"""... so many seconds."""

IDLE = 1.0
"""Seconds between looks whether any job waits at all, for when nobody could ring."""

KEPT = 100_000
"""Places that are kept; more than these are forgotten all at once."""


class Looked(NamedTuple):
    """What came of looking at a window."""

    has_moved: bool = False
    """Somebody was let go, or waits for less."""
    is_unclear: bool = False
    """Some parents have not been found yet."""
    waiting: Sequence[int] = ()
    """Who waits on for jobs that were all seen not to have ended."""


class Dependents:
    """Walks over the jobs that wait for others, again and again."""

    name = "dependents"
    hears_bell = True

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._places: dict[int, Place] = {}
        self._known: set[int] = set()
        """Jobs that waited for others in this pass, ..."""
        self._known_before: set[int] = set()
        """... and in the one before; whoever has been let go since is in neither."""
        self._reached = 0
        """The ``seq`` of the last job that this pass has looked at; 0 at its beginning."""
        self._has_moved = False
        """Something has happened in this pass."""
        self._pause = LONGEST_PAUSE
        self._not_before = 0.0

    def run(self, conn: Connection, held_seconds: float) -> float:
        """Go on with the pass, or begin one; return the seconds until there is more to do."""
        began = monotonic()
        if began < self._not_before:  # rung for
            return self._not_before - began
        idle = 0.0
        while monotonic() - began < BUDGET:
            window_began = monotonic()
            window = self._list(conn, self._reached)
            if not window and not self._reached:
                self._places.clear()
                self._known_before = set()
                return IDLE
            looked = self._look(conn, window, began + BUDGET) if window else Looked()
            self._has_moved |= looked.has_moved or looked.is_unclear
            if not looked.has_moved:
                idle += (monotonic() - window_began) * (SEARCHING if looked.is_unclear else 1.0)
            self._reached = window[-1].seq if window else 0
            if len(window) < WINDOW and sum(len(job.parents) for job in window) < PARENTS:
                self._reached = 0
            if not self._reached:
                self._known, self._known_before = set(), self._known
                self._pause = SHORTEST_PAUSE if self._has_moved else min(2 * self._pause, LONGEST_PAUSE)
                self._has_moved = False
                self._not_before = monotonic() + PACE * idle
                return max(self._pause, PACE * idle)
        self._not_before = monotonic() + PACE * idle
        return PACE * idle

    def examine(self, conn: Connection) -> Generator[None, None, list[int]]:
        """Look at all of them, now; yields after every statement.

        Returns:
            Those that still wait, and whose parents have not ended. Whatever had ended before this began, they do not
            wait for it.
        """
        examined: list[int] = []
        reached = 0
        self._known, self._known_before = set(), set()  # somebody else may have cancelled one since
        while window := self._list(conn, reached):
            yield
            examined += self._look(conn, window, float("inf")).waiting
            yield
            reached = window[-1].seq
        return examined

    def _list(self, conn: Connection, after: int) -> list[Dependent]:
        return dependents.list_dependents(conn, self._schema, after=after, limit=WINDOW, parents=PARENTS)

    def _look(self, conn: Connection, window: list[Dependent], until: float) -> Looked:
        """See what has become of the parents of *window*, and let go who can."""
        self._known.update(job.id for job in window)
        unclear = {parent for job in window for parent in job.parents} - self._known - self._known_before
        parents = sorted(unclear)
        states: dict[int, str] = {}
        for some in (parents[at : at + ASKED] for at in range(0, len(parents), ASKED)):
            for parent, state, place in dependents.look_at_parents(conn, self._schema, some, self._places):
                if place is None:
                    self._places.pop(parent, None)
                else:
                    self._places[parent] = place
                if state is not None and state != "passed":
                    unclear.discard(parent)
                    if state not in ("waiting", "open"):
                        states[parent] = state
        if len(self._places) > KEPT:
            self._places.clear()
        waiting = {job.id: job.parents for job in window}
        has_moved = False
        skipped: set[int] = set()
        ready = [job.id for job in window if not job.parents or not states.keys().isdisjoint(job.parents)]
        while ready:
            done = dependents.resolve(conn, self._schema, ready, states)
            has_moved |= len(done.skipped) < len(ready)
            skipped.update(done.skipped)
            # who waits for one that has just been cancelled need not be searched for
            states = dict.fromkeys(done.cancelled, "cancelled") | dict.fromkeys(done.discarded, "gone")
            for job in (*done.started, *done.cancelled, *done.discarded):
                waiting.pop(job, None)
                self._known.discard(job)
                self._known_before.discard(job)
            if monotonic() > until:
                break
            ready = [job for job, parents in waiting.items() if not states.keys().isdisjoint(parents)]
        left = [job for job, parents in waiting.items() if job not in skipped and unclear.isdisjoint(parents)]
        return Looked(has_moved, bool(unclear), left)
