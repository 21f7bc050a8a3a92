"""Steps: the ring turns, segments are emptied, what waits in them is carried forward."""

from __future__ import annotations

import random
from dataclasses import replace

from awa.storage import ring
from tests.storage.engine import AWA, scalar
from tests.storage.model.gathering import Gathering
from tests.storage.model.records import Found
from tests.storage.model.steps import PICK, among, step
from tests.storage.model.working import Working


class Turning(Working, Gathering):
    @step(weight=5, slot=among(*[None] * 5, *range(8)))
    def turn(self, slot: int | None) -> None:
        """To an empty slot, if there is one; or, as a crash or an operator could, to any."""
        if slot is not None:
            self.main.execute("SELECT setval('awa.ring_seq', %s)", (slot,))
            self.slot = slot
            return
        slot = ring.rotate(self.main, AWA)
        if slot is None:
            assert all(segment.is_current or not segment.is_empty for segment in ring.list_segments(self.main, AWA))
            self.totals["no empty slot"] += 1
            return
        assert slot != self.slot
        assert not [entry for entry in self.entries.values() if entry.slot == slot]
        self.slot = slot
        self.totals["turned"] += 1

    @step(weight=5, when=lambda self: self.entries, pick=PICK, what=among("count", "prune", "both"))
    def prune(self, pick: random.Random, what: str) -> None:
        """Somebody counts what has ended, and empties the segment at once or much later."""
        has_open = {entry.slot for entry in self.entries.values() if not entry.ends}
        has_ended = {entry.slot for entry in self.entries.values()} - has_open
        if not has_ended and not self.found:
            return
        slot = pick.choice(self._slots_like_those_found() or sorted(has_ended | self.found.keys()))
        there = self._there(slot)
        if what != "prune" and slot in has_ended:
            self.found[slot] = there
        if slot not in self.found or what == "count":
            return
        found = self.found[slot]
        is_as_found = found == there
        if slot == self.slot:
            allowed = {"current"}
        elif self.slow:
            allowed = {"busy", "changed"}
        elif self._is_written_to(slot):
            allowed = {"busy", "changed", "pruned"}  # a savepoint that is rolled back gives its locks back
        else:
            allowed = {"changed", "pruned"}
        allowed.discard("changed" if is_as_found else "pruned")
        self.gather_all()  # as the leader does
        done = ring.prune(self.main, AWA, slot, entries=found.entries, file=found.file)
        assert done in allowed
        self.totals[f"prune: {done}"] += 1
        if done == "pruned":
            assert scalar(self.main, f"SELECT pg_relation_size('awa.jobs_{slot}')") == 0
        elif done == "changed":
            del self.found[slot]

    def _slots_like_those_found(self) -> list[int]:
        """Slots that were emptied since somebody counted, and hold as many others now."""
        there = {slot: self._there(slot) for slot in self.found if slot != self.slot}
        return [
            slot
            for slot, now in there.items()
            if now.entries and replace(now, file=self.found[slot].file) == self.found[slot] != now
        ]

    def _there(self, slot: int) -> Found:
        return Found(len([entry for entry in self.entries.values() if entry.slot == slot]), self._file(slot))

    def _is_written_to(self, slot: int) -> bool:
        """By a transaction of somebody else's, which has not ended."""
        lent = [job.member for lender in self.lenders for job in lender.lent]
        return any(slot in producer.slots for producer in self.producers) or any(
            member is not None and member.slot == slot for member in lent
        )

    def _file(self, slot: int) -> int:
        return int(scalar(self.main, f"SELECT pg_relation_filenode('awa.jobs_{slot}')"))

    @step(
        weight=4,
        when=lambda self: any(entry.is_unclaimed for entry in self.entries.values()),
        pick=PICK,
        limit=among(1, 3, 5000, 5000),
    )
    def carry(self, pick: random.Random, limit: int) -> None:
        entry = pick.choice([entry for entry in self.entries.values() if entry.is_unclaimed])
        slot, queue = entry.slot, pick.choice((entry.queue, *self.queues))
        if self.is_held(queue):
            assert ring.carry(self.main, AWA, slot, queue, limit=limit) is None
            self.totals["busy carries"] += 1
            return
        expected = 0
        for lane in range(2, 10):
            entries = [
                entry
                for entry in self.entries.values()
                if entry.is_unclaimed and entry.queue == queue and entry.lane == lane
            ]
            there = [entry for entry in entries if entry.slot == slot]
            if there:
                expected += len(there if lane % 2 else entries)
        self.carries_part = expected > limit
        assert ring.carry(self.main, AWA, slot, queue, limit=limit) == min(expected, limit)

    @step(n=among(0, 1))
    def maintain(self, n: int) -> None:
        """One of two workers leads at a time."""
        self.look(self.leaders[n])
        self.totals["maintained"] += 1

    @step(n=among(0, 1, 2), q=among(0, 1))
    def empty_a_cursor(self, n: int, q: int) -> None:
        """A segment that holds little but a claim is emptied at once: the frontier of its queue lies nowhere else."""
        self.turn(None)
        self.claim_from(self.runtimes[n], self.queues[q], 50)
        self.the_database_agrees()
        self.turn(None)
        self.maintain(0)
