"""The model: what every step knows and shares, what must hold after each, and how a run ends."""

from __future__ import annotations

import random
from collections import Counter
from typing import ClassVar

from awa.storage import recovery, ring, runtimes
from awa.worker.maintenance.ring import Ring
from tests.storage.engine import AWA, Conn, register, rescue, scalar, settle, state
from tests.storage.model import reading
from tests.storage.model.records import (
    ENDED,
    End,
    Entry,
    Flush,
    Found,
    Lender,
    ModelJob,
    Producer,
    Runtime,
    Session,
    Slow,
)
from tests.storage.model.sessions import Sessions

KINDS: tuple[tuple[str, ...] | None, ...] = (("x", "y"), ("x",), None)
"""What each of the three workers knows."""


class Machine:
    """The model of one example. Its steps are in the classes that grow from it, by what they are about."""

    sessions: ClassVar[Sessions]
    totals: ClassVar[Counter[str]]

    def begin(self) -> None:
        """An empty database, and workers that have nothing to do yet."""
        self.sessions.reset()
        self.queues = ("a", "b")
        self.main, self.claimer = self.sessions.main, self.sessions.claimer
        self.producers = [Producer(conn) for conn in self.sessions.producers]
        self.lenders = [Lender(conn) for conn in self.sessions.lenders]
        self.runtimes = [self.make_runtime(kinds) for kinds in KINDS]
        self.dead: list[Runtime] = []
        self.slow: list[Slow] = []
        self.jobs: dict[int, ModelJob] = {}
        self.rolled_back: set[int] = set()
        self.entries: dict[int, Entry] = {}
        self.slot = 0
        self.found: dict[int, Found] = {}
        self.leaders = [Ring(AWA, retention=0.0, rotate_after=1e9) for _ in range(2)]
        self.carries_part = False
        self.step = 0
        self.began: dict[int, int] = {}
        self.committed: dict[int, int] = {}
        self.claimed_at: dict[int, int] = {}

    def make_runtime(self, kinds: tuple[str, ...] | None) -> Runtime:
        return Runtime(register(self.main), kinds)

    # Who holds what

    def is_held(self, queue: str) -> bool:
        """A claim of it has not committed."""
        return any(slow.queue == queue for slow in self.slow)

    def is_busy(self, runtime: Runtime) -> bool:
        """A transaction of it has not committed."""
        return any(slow.runtime is runtime for slow in self.slow)

    def open_jobs(self, runtime: Runtime) -> list[ModelJob]:
        """Jobs of which it has an open attempt, in the order of its claims."""
        found = [
            job
            for job in self.jobs.values()
            if job.state == "running" and job.member is not None and job.member.runtime == runtime.number
        ]
        return sorted(found, key=lambda job: job.member.place if job.member else (0, 0))

    def known(self, runtime: Runtime) -> list[ModelJob]:
        """Those whose attempts its process can end: it has heard of them, and has no end of them on its way."""
        unheard = {member.entry_id for member in runtime.unheard}
        return [
            job
            for job in self.open_jobs(runtime)
            if not job.lent_to and not job.flush and job.member and job.member.entry_id not in unheard
        ]

    def choose(self, pick: random.Random) -> ModelJob:
        """A job of one of the states that there are: the rare ones as often as the others."""
        state = pick.choice(sorted({job.state for job in self.jobs.values()}))
        return pick.choice([job for job in self.jobs.values() if job.state == state])

    # Ends of attempts

    def end(self, job: ModelJob, outcome: str, delay: float = 0.0) -> None:
        """What follows from the end of the open attempt of *job*."""
        assert job.member is not None
        job.last_entry = job.member.entry_id
        if job.is_asked and outcome != "completed":
            outcome = "cancelled"
        job.member, job.flush, job.is_asked = None, None, False
        self.totals[outcome] += 1
        job.is_express = outcome in ("released", "rescued")
        if outcome in ("failed", "cancelled"):
            job.was_rescued = False
        if outcome in ("retried", "rescued"):
            job.was_rescued = outcome == "rescued"
            if job.attempt >= job.max_attempts:
                job.state = "failed"
                self.note_end(job, "failed")
                return
            job.attempt += 1
        self.note_end(job, outcome)
        job.state = outcome if outcome in ENDED else "waiting" if delay else "available"

    def note_end(self, job: ModelJob, outcome: str) -> None:
        """An attempt has ended so."""

    def send(self, conn: Conn, runtime: Runtime, flush: Flush) -> list[End]:
        """Send a flush that the database has not taken; returns the ends that it takes."""
        taken = [end for end in flush.ends if end.is_open]
        refused = [end.member.place for end in flush.ends if not end.is_open]
        assert settle(conn, runtime.number, flush.done, flush.others, flush=flush.number) == sorted(refused)
        self.totals["refused"] += len(refused)
        return taken

    def note_taken(self, runtime: Runtime, flush: Flush, taken: list[End]) -> None:
        """The flush has committed."""
        flush.recorded = taken
        for end in taken:
            self.end(end.job, end.outcome, end.delay)

    def note_answered(self, runtime: Runtime, flush: Flush) -> None:
        """The worker knows that its flush stands."""
        runtime.last_flush = flush
        if runtime.pending is flush:
            runtime.pending = None
        for end in flush.ends:
            if end.job.flush is flush:
                end.job.flush = None
            runtime.stale = [stale for stale in runtime.stale if stale.member != end.member]

    # What must hold after every step

    def the_database_agrees(self) -> None:
        """Every committed job is in the one place that its history leads to, and in no other."""
        picture = reading.read(self.main)
        self.step += 1
        for entry in picture.entries.values():
            self.committed.setdefault(entry.xid, self.step)
            self.began.setdefault(entry.xid, self.step)
        self._follow_the_emptied(picture.entries)
        self._follow_the_carried(picture.entries)
        self.entries = picture.entries
        assert picture.places.keys() <= self.jobs.keys(), "there is a job that nobody has committed"
        for job in self.jobs.values():
            picture.places.setdefault(job.id, [])
        expected = {job.id: [] if job.state == "gone" else [(job.state, job.attempt)] for job in self.jobs.values()}
        odd = [(id_, places, self.jobs.get(id_)) for id_, places in picture.places.items() if places != expected[id_]]
        assert not odd, odd

    def _follow_the_emptied(self, now: dict[int, Entry]) -> None:
        """Entries vanish with all others of their slot, never from the current one."""
        lost = self.entries.keys() - now.keys()
        for slot in {self.entries[entry_id].slot for entry_id in lost}:
            assert slot != self.slot
            assert not [entry for entry in now.values() if entry.slot == slot]
            self.totals["emptied"] += 1
        for job in self.jobs.values():
            if job.state == "completed" and job.last_entry in lost:
                job.state = "gone"

    def _follow_the_carried(self, now: dict[int, Entry]) -> None:
        """What was available is in an express lane then, and nothing that was behind it is before it."""
        carried = [
            entry
            for entry in self.entries.values()
            if entry.is_unclaimed and (entry.entry_id not in now or "carried" in now[entry.entry_id].ends)
        ]
        live = {entry.id: entry for entry in now.values() if entry.is_unclaimed}
        for entry in carried:
            job = self.jobs[entry.id]
            assert job.state == "available"
            assert live[job.id].lane == 2 * job.priority
            job.is_express = True
        if carried and not self.carries_part:
            was_express = [entry for entry in self.entries.values() if entry.is_unclaimed and entry.lane % 2 == 0]
            for entry in carried:
                for other in (*carried, *was_express):
                    if other.queue == entry.queue and other.id in live:
                        first = other.lane == entry.lane - 1 or self.precedes(other, entry)
                        assert not (first and self.precedes(live[entry.id], live[other.id])), "order is lost"
        self.totals["carried"] += len(carried)
        self.carries_part = False

    def precedes(self, first: Entry, second: Entry) -> bool:
        """Within a lane: what was written first in a transaction, or committed before another began, comes first."""
        if first.lane != second.lane or first.queue != second.queue:
            return False
        if first.xid == second.xid:
            return first.entry_id < second.entry_id
        return self.committed[first.xid] < self.began[second.xid]

    # The end

    def end_all(self) -> None:
        """Let everything end: every job ends in the state that its history leads to, and every segment is emptied."""
        self.end_what_is_open()
        self.the_database_agrees()
        for runtime in [*self.dead]:
            self.rescue_all(runtime)
        assert not self.dead
        for runtime in self.runtimes:
            self.settle_all(runtime)
        last = self.runtimes[0]
        self.the_database_agrees()
        while any(job.state not in ENDED for job in self.jobs.values()):
            self.let_time_pass()
            self.the_database_agrees()
            for queue in self.queues:
                while self.claim_from(last, queue, 20):
                    self.settle_all(last)
                    self.the_database_agrees()
        self._empty_the_ring()
        for job in self.jobs.values():
            self.check_state(job)
        self.totals["jobs"] += len(self.jobs)
        self.totals["examples"] += 1

    def end_what_is_open(self) -> None:
        raise NotImplementedError

    def let_time_pass(self) -> None:
        raise NotImplementedError

    def claim_from(self, runtime: Runtime, queue: str, limit: int) -> int:
        raise NotImplementedError

    def settle_all(self, runtime: Runtime) -> None:
        """Complete what it has open."""
        jobs = self.known(runtime)
        assert jobs == self.open_jobs(runtime)
        assert settle(self.claimer, runtime.number, [job.member for job in jobs if job.member]) == []
        for job in jobs:
            self.end(job, "completed")

    def rescue_all(self, runtime: Runtime, limit: int = 100) -> None:
        """Take back what a dead worker has open, but for what an open transaction completes."""
        jobs = self.open_jobs(runtime)
        lent = [job for job in jobs if job.lent_to]
        blocked = rescued = 0
        while True:
            found, ended, held = rescue(self.main, runtime.number, limit=limit, skip=blocked)
            assert found == ended + held
            if not found:
                break
            blocked += held
            rescued += ended
        assert (rescued, blocked) == (len(jobs) - len(lent), len(lent))
        for job in jobs:
            if not job.lent_to:
                self.end(job, "rescued")
        if not lent:
            runtimes.finish(self.main, AWA, runtime.number)
            self.dead.remove(runtime)

    def release_unheard(self, runtime: Runtime) -> bool:
        """What a worker does after a lost connection; False: it must wait."""
        released = recovery.release_unknown_claims(self.main, AWA, runtime.number, newest=runtime.newest)
        if self.is_busy(runtime):
            assert released is None
            self.totals["doubts that last"] += 1
            return False
        unheard = [member for member in runtime.unheard if member.claim_id > runtime.newest]
        assert released == len([member for member in unheard if member.entry_id in self.entries])
        for job in self.open_jobs(runtime):
            if job.member in runtime.unheard:
                self.end(job, "released")
        runtime.is_in_doubt = False
        self.totals["unheard claims released"] += released
        return True

    def check_state(self, job: ModelJob) -> None:
        """What is said of a job is what it is. Of one that is gone other entries may be left, which say nothing."""
        said = {"aside": ("available",), "waiting": ("scheduled", "retryable"), "gone": (self.left_of(job),)}
        assert state(self.main, job.id) in said.get(job.state, (job.state,))

    def left_of(self, job: ModelJob) -> str | None:
        """How a job that is gone had ended before it came back, when the entry that tells it is left."""
        entries = [entry for entry in self.entries.values() if entry.id == job.id]
        ends = max(entries, key=lambda entry: entry.entry_id).ends if entries else ()
        return ends[0] if ends and ends[0] in ("failed", "cancelled") else None

    def _empty_the_ring(self) -> None:
        ring.rotate(self.main, AWA)
        self.slot = scalar(self.main, "SELECT pg_sequence_last_value('awa.ring_seq')")
        for _ in range(3):
            self.look(self.leaders[0])
            self.the_database_agrees()
        left = {entry.slot for entry in self.entries.values()} - {self.slot}
        assert not left, "nothing is open, and segments stay"

    def look(self, leader: Ring) -> None:
        """One round of the chore, at all segments at once."""
        for seen in leader._seen.values():
            seen.look_at = 0.0
        while leader.run(self.main, 0.0) == 0.0:
            pass

    def replace(self, session: Session) -> None:
        """A new connection for one that is lost."""
        session.conn = self.sessions.replace(session.conn)
