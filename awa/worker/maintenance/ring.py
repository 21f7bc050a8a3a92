"""Chore: turn the ring, and empty sealed segments once all they hold has ended and been kept long enough.

A round turns the ring when it is time to, then looks through the sealed segments, oldest first:

    entries not printed yet         -> print them (a segment grows only by stragglers)
    fewer ends than entries         -> carry forward what nobody has claimed, when the segment is due; look again later
    as many                         -> print the ends; equal prints: everything has ended, exactly once
    ... and kept long enough        -> have the statistics catch up; look at the jobs that wait for others, perhaps for
                                       these; then prune

All of it goes in ranges of pages, a few milliseconds each, over as many runs as it takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import datetime, timedelta
from time import monotonic
from typing import TypeVar

from psycopg import Connection

from awa.storage import ring
from awa.storage.ring import Print, Segment
from awa.storage.schema import Schema
from awa.worker.maintenance.dependents import Dependents
from awa.worker.maintenance.statistics import Statistics

log = logging.getLogger("awa.maintenance")

BUDGET = 0.05
"""Seconds after which a run leaves the rest to the next, which comes at once but lets other chores in between."""

RANGE = 0.01
"""Seconds that one range should take."""

SHORTEST_TURN = 60.0
"""Seconds between turns when the retention would have them come faster."""

SEGMENT_BYTES = 1 << 30
"""A larger segment is sealed early, while at least half of the slots are empty: the retention needs the others."""

CARRY_ALWAYS = 10_000
"""Open entries that are carried however few others the segment holds."""

CARRY_PART = 0.25
"""Of a segment's entries: with more of them open it stays, since carrying them costs more than it frees."""

CARRY_BATCH = 5_000
"""Most entries that one statement carries, and the longest express lane that keeps its order."""

LONGEST_PAUSE = 5.0
"""Most seconds between rounds."""

PACE = 20
"""A segment that is not done is looked through again after so many times what the last look cost."""

T = TypeVar("T")

Steps = Generator[None, None, T]
"""Yields after every statement; what it returns comes last."""

Examine = Callable[[Connection], Steps[list[int]]]
"""Looks at the jobs that wait for others; gives those that wait on for what has not ended."""

Reader = Callable[[Connection, Schema, int, int, int], T]
"""Reads a range of pages of a slot."""


@dataclass(slots=True)
class Seen:
    """What earlier rounds found out about a sealed segment."""

    file: int
    """In which they lie. When it is another, somebody else has emptied the slot, and none of this is true any more."""
    pages: int
    """Pages of entries when they were printed."""
    entries: Print
    """Their print."""
    has_ended: bool = False
    """Every entry has an end of its own."""
    last_completed: datetime | None = None
    """When the last was completed."""
    look_at: float = 0.0
    """When to look again, by the monotonic clock."""
    odd: tuple[Print, Print] | None = None
    """Entries and ends of the last look, which did not match."""
    complaint: str = ""
    """What was logged last about why it stays."""


class Ring:
    """Keeps the ring turning.

    Args:
        retention: Seconds that completed jobs stay readable.
        rotate_after: Seconds after which a segment is sealed; 0: a sixth of the retention, so that a slot is empty
            again in time.
        examine: Lets jobs go that wait for others which have ended, before those are forgotten.
        now: For tests: what to take for now.
    """

    name = "ring"
    hears_bell = False

    def __init__(
        self,
        schema: Schema,
        *,
        retention: float,
        rotate_after: float = 0.0,
        examine: Examine | None = None,
        now: Callable[[], datetime | None] = lambda: None,
    ) -> None:
        self._schema = schema
        self._retention = timedelta(seconds=retention)
        self._rotate_after = timedelta(seconds=rotate_after or max(retention / 6, SHORTEST_TURN))
        self._pause = min(max(self._rotate_after.total_seconds() / 10, 0.05), LONGEST_PAUSE)
        self._examine = examine or Dependents(schema).examine
        self._statistics = Statistics(schema)
        self._now = now
        self._seen: dict[int, Seen] = {}
        self._steps: Steps[None] | None = None
        self._conn: Connection
        self._is_stuck = False

    def run(self, conn: Connection, held_seconds: float) -> float:
        """Go on with the round, or begin one."""
        until = monotonic() + BUDGET
        self._conn = conn
        steps = self._steps or self._round()
        self._steps = None  # for good, if it raises
        for _ in steps:
            if monotonic() >= until:
                self._steps = steps
                return 0.0
        return self._pause

    def _round(self) -> Steps[None]:
        segments = ring.list_segments(self._conn, self._schema, now=self._now())
        yield
        if any(segment.is_current != segment.is_open for segment in segments):
            ring.mend(self._conn, self._schema)
            return
        yield from self._turn(segments)
        for segment in sorted(segments, key=lambda segment: -segment.sealed_for):
            if segment.is_current or segment.is_empty:
                self._seen.pop(segment.slot, None)
            else:
                yield from self._look(segment)

    def _turn(self, segments: list[Segment]) -> Steps[None]:
        current = next(segment for segment in segments if segment.is_current)
        empty = sum(segment.is_empty for segment in segments if not segment.is_current)
        is_old = current.open_for >= self._rotate_after
        is_large = current.size_bytes >= SEGMENT_BYTES and empty >= ring.SLOTS // 2
        if not current.job_pages or not (is_old or is_large):
            return
        turned_to = ring.rotate(self._conn, self._schema)
        yield
        if turned_to is not None:
            self._is_stuck = False
            log.debug("the ring turned from slot %d to %d", current.slot, turned_to)
            ring.analyze(self._conn, self._schema, current.slot)
            yield
        elif not empty and not self._is_stuck:
            self._is_stuck = True
            log.warning("no slot of the ring is empty: slot %d grows on; `awa storage status` says why", current.slot)

    def _look(self, segment: Segment) -> Steps[None]:
        slot = segment.slot
        seen = self._seen.get(slot)
        began = monotonic()
        if seen is not None and seen.file != segment.file:
            seen = None
        if seen is not None and segment.job_pages == seen.pages and began < seen.look_at:
            return
        if seen is None or segment.job_pages != seen.pages or seen.odd is not None:
            odd, complaint = (seen.odd, seen.complaint) if seen is not None else (None, "")
            prints = yield from self._read(ring.print_entries, slot, segment.job_pages)
            seen = Seen(segment.file, segment.job_pages, sum(prints, Print()), odd=odd, complaint=complaint)
            self._seen[slot] = seen
        if not seen.has_ended:
            ended = sum((yield from self._read(ring.count_completed, slot, segment.completion_pages)))
            ended += sum((yield from self._read(ring.count_ended, slot, segment.end_pages)))
            if ended < seen.entries.count:
                if segment.sealed_for >= max(self._retention, self._rotate_after):
                    yield from self._carry(segment, seen, ended)
            else:
                yield from self._compare(segment, seen)
        if seen.has_ended and self._is_kept_long_enough(segment, seen):
            yield from self._statistics.catch_up(self._conn)
            examined = yield from self._examine(self._conn)
            outcome = ring.prune(
                self._conn, self._schema, slot, entries=seen.entries.count, file=seen.file, examined=examined
            )
            yield
            if outcome == "pruned":
                log.info("emptied slot %d: %d entries that had ended", slot, seen.entries.count)
            if outcome not in ("busy", "awaited"):
                self._seen.pop(slot)
                return
        seen.look_at = monotonic() + max(PACE * (monotonic() - began), self._pause)

    def _compare(self, segment: Segment, seen: Seen) -> Steps[None]:
        found = yield from self._read(ring.print_completed, segment.slot, segment.claim_pages)
        found += yield from self._read(ring.print_ended, segment.slot, segment.end_pages)
        ends = sum((ended for ended, _ in found), Print())
        if ends == seen.entries:
            seen.has_ended = True
            seen.last_completed = max((at for _, at in found if at is not None), default=None)
        elif seen.odd != (seen.entries, ends):
            # Perhaps some entries were committed after the others were printed, and have ended: print them all again.
            seen.odd = (seen.entries, ends)
        else:
            text = "%d entries of slot %d have %d ends, which are not theirs one for one; see `awa storage check`"
            self._complain(seen, text % (seen.entries.count, segment.slot, ends.count))

    def _carry(self, segment: Segment, seen: Seen, ended: int) -> Steps[None]:
        left = seen.entries.count - ended
        if left > max(CARRY_ALWAYS, CARRY_PART * seen.entries.count):
            self._complain(seen, f"slot {segment.slot} stays: {left} of its {seen.entries.count} entries are open")
            return
        carried = 0
        queues = ring.list_queues(self._conn, self._schema, segment.slot)
        yield
        for queue in queues:
            found: int | None = CARRY_BATCH
            while found == CARRY_BATCH:
                found = ring.carry(self._conn, self._schema, segment.slot, queue, limit=CARRY_BATCH)
                carried += found or 0
                yield
        if carried:
            log.info("carried %d waiting entries out of slot %d", carried, segment.slot)

    def _is_kept_long_enough(self, segment: Segment, seen: Seen) -> bool:
        return seen.last_completed is None or segment.now - seen.last_completed >= self._retention

    def _complain(self, seen: Seen, complaint: str) -> None:
        if seen.complaint != complaint:
            seen.complaint = complaint
            log.warning("%s", complaint)

    def _read(self, read: Reader[T], slot: int, pages: int) -> Steps[list[T]]:
        """What *read* finds on *pages* of a slot and behind, in ranges as long as the time of the last suggests."""
        found = []
        first, size = 0, 64
        while first <= pages:
            began = monotonic()
            found.append(read(self._conn, self._schema, slot, first, first + size))
            took = monotonic() - began
            yield
            first += size
            size = max(8, min(size * 2, round(size * RANGE / max(took, 1e-6))))
        return found
