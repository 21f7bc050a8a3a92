"""Steps: the server crashes and starts again."""

from __future__ import annotations

import random
from typing import ClassVar

from awa.embedded import Server
from tests.storage.engine import Member, scalar
from tests.storage.model import reading
from tests.storage.model.machine import Machine
from tests.storage.model.records import End, Entry, Lender, ModelJob, Producer, Runtime
from tests.storage.model.steps import PICK, among, step

MOST = 2
"""Crashes of one example."""

Claim = tuple[int, int]
"""Its number, which may be given out again after a crash, and its nonce."""


class Crashing(Machine):
    """Claims commit asynchronously, so a crash may forget the last of them, and nothing else."""

    server: ClassVar[Server]

    def begin(self) -> None:
        super().begin()
        self.crashes = 0
        self.written: dict[Claim, int] = {}
        """How far the log reached when the claim had committed."""

    def note_claim(self, runtime: Runtime, members: list[Member]) -> None:
        super().note_claim(runtime, members)
        end = int(scalar(self.main, "SELECT pg_current_wal_insert_lsn() - '0/0'"))
        for member in members:
            self.written[member.claim_id, member.nonce] = end

    @step(when=lambda self: self.crashes < MOST, pick=PICK, checkpoints=among(False, True), claims=among(0, 1, 3))
    def crash_the_server(self, pick: random.Random, checkpoints: bool, claims: int) -> None:
        """Often just behind some claims, and these behind a checkpoint: then their numbers may be forgotten too."""
        if checkpoints:
            self.main.execute("CHECKPOINT")
        for runtime in pick.sample(self.runtimes, claims):
            self.claim_from(runtime, pick.choice(self.queues), 3)
        self.crashes += 1
        self.totals["crashes of the server"] += 1
        flushed = int(scalar(self.main, "SELECT pg_current_wal_flush_lsn() - '0/0'"))
        self.server.stop("immediate")
        self.server.start()
        self.sessions.reopen()
        self.main, self.claimer = self.sessions.main, self.sessions.claimer
        self._lose_sessions()
        self._forget_claims(flushed)
        self.slot = scalar(self.main, "SELECT pg_sequence_last_value('awa.ring_seq')")

    def _lose_sessions(self) -> None:
        for producer in self.producers:
            self.rolled_back |= {job.id for job in producer.jobs}
        for lender in self.lenders:
            for job in lender.lent:
                job.lent_to = None
        self.producers = [Producer(conn) for conn in self.sessions.producers]
        self.lenders = [Lender(conn) for conn in self.sessions.lenders]
        self.slow = []
        for runtime in self.runtimes:
            runtime.is_in_doubt = True

    def _forget_claims(self, flushed: int) -> None:
        now = reading.read(self.main)
        there = set(self.main.execute("SELECT claim_id, nonce FROM awa.claims").fetchall())
        forgotten = []
        for job in self.jobs.values():
            member = job.member
            if job.state == "running" and member and (member.claim_id, member.nonce) not in there:
                forgotten.append((member.claim_id, member.nonce))
                self._forget(job, member, now)
            elif job.state == "aside" and now.places[job.id][0][0] == "available":
                job.state = "available"
        self.totals["forgotten claims"] += len(set(forgotten))
        if forgotten:
            first = min(self.written[claim] for claim in forgotten)
            assert first > flushed, "forgotten, although it had been written"
            later = {claim for claim, end in self.written.items() if end > first}
            assert not later & there, "a crash forgets the last ones"
        lost = [self.entries[entry_id] for entry_id in self.entries.keys() - now.entries.keys()]
        assert all(entry.lane == 0 and not entry.ends for entry in lost), "only what was appended by a forgotten claim"
        self.entries = now.entries
        self._forget_transactions(now.entries)

    def _forget(self, job: ModelJob, member: Member, now: reading.Picture) -> None:
        """It waits where it did before that claim; its worker goes on as if nothing had happened."""
        [(job.state, _)] = now.places[job.id]
        assert job.state in ("available", "aside")
        job.member, job.flush = None, None
        for runtime in (*self.runtimes, *self.dead):
            if member in runtime.unheard:
                runtime.unheard.remove(member)
            elif runtime.number == member.runtime:
                runtime.claims[member.claim_id].remove(member)
                runtime.stale.append(End(job, member, "completed"))

    def _forget_transactions(self, entries: dict[int, Entry]) -> None:
        """Their numbers may be given out again."""
        known = {entry.xid for entry in entries.values()}
        self.began = {xid: step for xid, step in self.began.items() if xid in known}
        self.committed = {xid: step for xid, step in self.committed.items() if xid in known}
