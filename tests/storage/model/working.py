"""Steps: claim, settle, give signs of life, die, and be rescued."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import psycopg

from awa.storage import runtimes
from tests.storage.engine import (
    ALONE,
    AWA,
    BUSY,
    COME_AGAIN,
    Conn,
    Member,
    Outcome,
    claim,
    complete,
    fall_silent,
    fence,
    settle,
)
from tests.storage.model.machine import Machine
from tests.storage.model.records import LATER, End, Flush, Runtime
from tests.storage.model.steps import PICK, among, step

OUTCOMES = ("completed", "completed", "retried", "snoozed", "released", "released", "cancelled", "failed")

_flushes = count(1_000_000)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a claim has brought, once it commits."""

    members: list[Member]
    note: Callable[[bool], None]
    """Takes note of it; called with whether the worker gets the answer."""
    taken: frozenset[int]
    """Jobs among them that had been set aside."""


class Working(Machine):
    # Claims

    @step(weight=5, n=among(0, 1, 2), q=among(0, 1), limit=among(1, 2, 3, 5, 50))
    def claim(self, n: int, q: int, limit: int) -> None:
        self.claim_from(self.runtimes[n], self.queues[q], limit)

    @step(weight=5, n=among(0, 1, 2), first=among(2, 5, 50), then=among(1, 50))
    def claim_from_both(self, n: int, first: int, then: int) -> None:
        self.claim_from(self.runtimes[n], self.queues[0], first)
        self.claim_from(self.runtimes[n], self.queues[1], then)

    def claim_from(self, runtime: Runtime, queue: str, limit: int) -> int:
        if runtime.is_in_doubt or self.is_busy(runtime):
            return 0  # it has one claim at a time, and looks first what became of the last
        seen = self.claim_through(self.claimer, runtime, queue, limit)
        if seen is None:
            return 0
        seen.note(True)
        return len(seen.members)

    def claim_through(self, conn: Conn, runtime: Runtime, queue: str, limit: int) -> Seen | None:
        """Claim on *conn*, and check what it brings; None: another claim of this queue has not committed."""
        in_queue = [job for job in self.jobs.values() if job.queue == queue]
        aside = {job.id for job in in_queue if job.state == "aside"}
        waits = {
            job.id: job
            for job in in_queue
            if (job.state == "available" and runtime.knows(job.kind))
            or (job.state == "aside" and runtime.kinds is not None and job.kind in runtime.kinds)
        }
        unknown = {job.id for job in in_queue if job.state == "available" and not runtime.knows(job.kind)}
        claimed = claim(conn, runtime.number, queue=queue, kinds=runtime.kinds, limit=limit)
        if self.is_held(queue):
            assert (claimed.flags, claimed.members) == (BUSY, [])
            self.totals["busy claims"] += 1
            return None
        members = claimed.members
        assert claimed.flags in (0, COME_AGAIN, ALONE)
        assert len(members) <= limit
        if members:
            first = self.jobs[members[0].id]
            assert claimed.flags == (ALONE if first.is_suspect and first.id not in aside else 0)
            assert claimed.flags == 0 or len(members) == 1
            assert members[0].priority == min(job.priority for job in waits.values())
        elif not claimed.flags:
            assert not waits, "the queue seems empty and is not"
        priorities = [member.priority for member in members]
        assert priorities == sorted(priorities)
        jobs = [waits.pop(member.id) for member in members]  # each once, and only what was there
        for member, job in zip(members, jobs, strict=True):
            told = (member.kind, member.priority, member.attempt, member.max_attempts)
            assert told == (job.kind, job.priority, job.attempt, job.max_attempts)
        self._check_order(members, [job.id for job in waits.values() if job.state == "available"])
        rows = conn.execute("SELECT id FROM awa.waiting_jobs WHERE queue = %s AND waits_for = 'kind'", (queue,))
        now_aside = {row[0] for row in rows}
        assert now_aside - unknown == aside - set(claimed.ids)

        def note(is_answered: bool) -> None:
            for job, member in zip(jobs, members, strict=True):
                job.state, job.member = "running", member
                if is_answered:
                    runtime.claims.setdefault(member.claim_id, []).append(member)
                    runtime.newest = max(runtime.newest, member.claim_id)
                else:
                    runtime.unheard.append(member)
                self.claimed_at[member.claim_id] = self.step
            for id_ in now_aside - aside:
                self.jobs[id_].state = "aside"
            self.totals["claimed"] += len(members)
            self.totals["set aside"] += len(now_aside - aside)
            self.totals["alone"] += claimed.flags == ALONE
            self.note_claim(runtime, members)

        return Seen(members, note, frozenset(aside & set(claimed.ids)))

    def note_claim(self, runtime: Runtime, members: list[Member]) -> None:
        """A claim has committed."""

    def _check_order(self, members: list[Member], left: list[int]) -> None:
        """Those that one claim starts come segment by segment, and within one in the order of the lane."""
        entries = [self.entries[member.entry_id] for member in members if member.entry_id in self.entries]
        live = {entry.id: entry for entry in self.entries.values() if not entry.ends}
        for i, entry in enumerate(entries):
            behind = [live[id_] for id_ in left if id_ in live]
            behind += [other for other in entries[i + 1 :] if other.slot == entry.slot]
            assert not [other for other in behind if self.precedes(other, entry)]

    # Outcomes

    @step(
        weight=7,
        when=lambda self: any(self.known(runtime) or runtime.stale for runtime in self.runtimes),
        pick=PICK,
        most=among(1, 3, 50),
    )
    def settle(self, pick: random.Random, most: int) -> None:
        runtime = pick.choice([runtime for runtime in self.runtimes if self.known(runtime) or runtime.stale])
        flush = self.make_flush(runtime, pick, most)
        self.note_taken(runtime, flush, self.send(self.claimer, runtime, flush))
        self.note_answered(runtime, flush)

    @step(weight=2)
    def work_off(self) -> None:
        """Workers come to the end of their queues, else hardly a segment has ended."""
        for queue in self.queues:
            self.claim_from(self.runtimes[2], queue, 50)
        for runtime in self.runtimes:
            jobs = self.known(runtime)
            flush = Flush(next(_flushes), [End(job, job.member, "completed") for job in jobs if job.member])
            self.note_taken(runtime, flush, self.send(self.claimer, runtime, flush))
            self.note_answered(runtime, flush)

    def make_flush(self, runtime: Runtime, pick: random.Random, most: int) -> Flush:
        """Outcomes of some attempts that it believes to be open."""
        found = [(job, job.member) for job in self.known(runtime)] + [(end.job, end.member) for end in runtime.stale]
        ends = []
        for job, member in pick.sample(found, min(len(found), pick.randint(1, most))):
            assert member is not None
            outcome = pick.choice(OUTCOMES)
            delay = LATER if outcome in ("retried", "snoozed") and pick.random() < 0.5 else 0.0
            ends.append(End(job, member, outcome, delay))
        return Flush(next(_flushes), ends)

    @step(when=lambda self: any(runtime.last_flush for runtime in self.runtimes), pick=PICK)
    def a_flush_comes_again(self, pick: random.Random) -> None:
        """Late out of a proxy, for example, when the worker has repeated it long ago."""
        runtime = pick.choice([runtime for runtime in self.runtimes if runtime.last_flush])
        assert runtime.last_flush is not None
        self.send_again(runtime, runtime.last_flush)

    def send_again(self, runtime: Runtime, flush: Flush) -> None:
        """What stands is not recorded twice; where the segment was emptied since, it is refused."""
        stands = {end.member.place for end in flush.recorded or () if end.member.entry_id in self.entries}
        others = {end.member.place for end in flush.ends if end.outcome != "completed"}
        try:
            refused = settle(self.claimer, runtime.number, flush.done, flush.others, flush=flush.number)
        except psycopg.errors.UniqueViolation:
            assert stands - others
        else:
            assert not stands - others
            assert refused == sorted(end.member.place for end in flush.ends if end.member.place not in stands)
        self.totals["flushes again"] += 1

    @step(when=lambda self: any(runtime.last_flush for runtime in self.runtimes), pick=PICK)
    def settle_what_has_ended(self, pick: random.Random) -> None:
        """In a flush of another number, and with another outcome."""
        runtime = pick.choice([runtime for runtime in self.runtimes if runtime.last_flush])
        assert runtime.last_flush is not None
        ended = [end for end in runtime.last_flush.ends if not end.is_open]
        others = [Outcome(end.member, "retried" if end.outcome == "completed" else "failed") for end in ended]
        assert settle(self.claimer, runtime.number, (), others) == sorted(end.member.place for end in ended)
        members = [end.member for end in ended if end.outcome != "completed"]
        assert settle(self.claimer, runtime.number, members) == sorted(member.place for member in members)

    @step(
        when=lambda self: any(self.known(runtime) for runtime in self.runtimes),
        pick=PICK,
        how=among("nonce", "runtime"),
    )
    def settle_what_is_not_ones_own(self, pick: random.Random, how: str) -> None:
        runtime = pick.choice([runtime for runtime in self.runtimes if self.known(runtime)])
        member = pick.choice(self.known(runtime)).member
        assert member is not None
        number = runtime.number
        if how == "nonce":
            member = replace(member, nonce=member.nonce ^ 1)
        else:
            number = next(other.number for other in self.runtimes if other is not runtime)
            member = replace(member, runtime=number)
        assert settle(self.claimer, number, [member]) == [member.place]
        assert settle(self.claimer, number, (), [Outcome(member, "retried")]) == [member.place]
        try:
            complete(self.claimer, member)
        except psycopg.Error as error:
            assert error.sqlstate == "AWA04"
        else:
            raise AssertionError("somebody else's attempt is completed")

    # Life, death and rescue

    @step(n=among(0, 1, 2))
    def heartbeat(self, n: int) -> None:
        runtime = self.runtimes[n]
        open_claims = {job.member.claim_id for job in self.open_jobs(runtime) if job.member}
        opened = sorted(open_claims & runtime.claims.keys())
        assert runtimes.heartbeat(self.main, AWA, runtime.number, newest_claim=runtime.newest, open_claims=opened)

    @step(weight=3, n=among(0, 1, 2))
    def crash(self, n: int) -> None:
        runtime = self.runtimes[n]
        assert fence(self.main, runtime.number) is False
        if self.is_busy(runtime):
            assert fence(self.main, runtime.number, silent=-1.0) is False, "one of its transactions is in progress"
            return
        fall_silent(self.main, runtime.number)
        assert fence(self.main, runtime.number) is True
        for job in self.open_jobs(runtime):
            job.flush = None
        runtime.pending = None
        self.dead.append(runtime)
        self.runtimes[n] = self.make_runtime(runtime.kinds)
        self.totals["unheard claims of the dead"] += len(runtime.unheard)

    @step(when=lambda self: self.dead, pick=PICK, limit=among(1, 2, 100))
    def rescue(self, pick: random.Random, limit: int) -> None:
        self.rescue_all(pick.choice(self.dead), limit)

    @step(
        when=lambda self: self.dead,
        pick=PICK,
        what=among("settle", "end", "claim", "heartbeat"),
    )
    def a_dead_runtime_speaks(self, pick: random.Random, what: str) -> None:
        runtime = pick.choice(self.dead)
        members = [member for members in runtime.claims.values() for member in members]
        match what:
            case "settle" if members:
                self._is_gone(lambda: settle(self.claimer, runtime.number, [pick.choice(members)]))
            case "end" if members:
                late = Outcome(pick.choice(members), "retried")
                self._is_gone(lambda: settle(self.claimer, runtime.number, (), [late]))
            case "claim" if self.is_held(self.queues[0]):
                assert claim(self.claimer, runtime.number, queue=self.queues[0]).flags == BUSY
            case "claim":
                self._is_gone(lambda: claim(self.claimer, runtime.number, queue=self.queues[0]))
            case _:
                assert not runtimes.heartbeat(
                    self.main, AWA, runtime.number, newest_claim=runtime.newest, open_claims=[]
                )
        self.totals["late words"] += 1

    def _is_gone(self, call: Callable[[], object]) -> None:
        try:
            call()
        except psycopg.Error as error:
            assert error.sqlstate == "AWA01"
        else:
            raise AssertionError("a fenced runtime is heard")
