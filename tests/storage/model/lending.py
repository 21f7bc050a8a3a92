"""Steps: handlers complete their attempts inside transactions of their own, at every isolation level."""

from __future__ import annotations

import random

import psycopg

from awa.storage import backends
from tests.storage.engine import Outcome, complete, settle
from tests.storage.model.machine import Machine
from tests.storage.model.records import Lender, ModelJob, Runtime
from tests.storage.model.steps import PICK, among, step

LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


class Lending(Machine):
    @step(
        when=lambda self: any(self.known(runtime) for runtime in self.runtimes),
        n=among(0, 1),
        isolation=among(*LEVELS),
        pick=PICK,
    )
    def complete(self, n: int, isolation: str, pick: random.Random) -> None:
        lender = self.lenders[n]
        job = pick.choice([job for runtime in self.runtimes for job in self.known(runtime)])
        assert job.member is not None
        if not lender.is_open:
            self._lend(lender, isolation)
        assert lender.snapshot_at is not None
        is_older = lender.isolation != "READ COMMITTED" and lender.snapshot_at < self.claimed_at[job.member.claim_id]
        try:
            complete(lender.conn, job.member)
        except psycopg.errors.SerializationFailure:
            assert lender.isolation == "SERIALIZABLE"
            self.end_lent(lender, commits=False)
        except psycopg.Error as error:
            assert error.sqlstate == "AWA04"
            assert is_older
            self.end_lent(lender, commits=False)
        else:
            assert not is_older
            job.lent_to = lender
            lender.lent.append(job)

    @step(weight=1, n=among(0, 1), isolation=among(*LEVELS))
    def lend(self, n: int, isolation: str) -> None:
        if not self.lenders[n].is_open:
            self._lend(self.lenders[n], isolation)

    def _lend(self, lender: Lender, isolation: str) -> None:
        lender.conn.execute(f"BEGIN ISOLATION LEVEL {isolation}")
        lender.conn.execute("SELECT 1 FROM awa.leases")
        lender.isolation, lender.snapshot_at = isolation, self.step

    @step(
        when=lambda self: any(runtime.claims for runtime in (*self.runtimes, *self.dead)),
        n=among(0, 1),
        pick=PICK,
    )
    def complete_what_has_ended_otherwise(self, n: int, pick: random.Random) -> None:
        lender = self.lenders[n]
        ended = [
            member
            for runtime in (*self.runtimes, *self.dead)
            for members in runtime.claims.values()
            for member in members
            if member.entry_id not in self.entries or self._ends(member.entry_id) - {"success"}
        ]
        if not ended:
            return
        if not lender.is_open:
            self._lend(lender, pick.choice(LEVELS))
        member = pick.choice(ended)
        try:
            complete(lender.conn, member)
        except psycopg.Error as error:
            # AWA04: the transaction is older than the claim, or the segment was emptied since;
            # 40001: it conflicts with another one at this level
            allowed = ("AWA04",) if member.entry_id not in self.entries else ("23505",)
            if lender.isolation != "READ COMMITTED":
                allowed = ("23505", "AWA04", "40001")
            assert error.sqlstate in allowed
            self.end_lent(lender, commits=False)
        else:
            raise AssertionError("an attempt ended twice")
        self.totals["late completion"] += 1

    def _ends(self, entry_id: int) -> set[str]:
        return set(self.entries[entry_id].ends)

    @step(
        when=lambda self: any(lender.is_open for lender in self.lenders),
        pick=PICK,
        commits=among(False, True),
    )
    def commit_lent(self, pick: random.Random, commits: bool) -> None:
        self.end_lent(pick.choice([lender for lender in self.lenders if lender.is_open]), commits=commits)

    def end_lent(self, lender: Lender, *, commits: bool) -> None:
        if commits:
            try:
                lender.conn.execute("COMMIT")
            except psycopg.errors.SerializationFailure:
                assert lender.isolation == "SERIALIZABLE"
                commits = False
        else:
            lender.conn.execute("ROLLBACK")
        self._note_lent(lender, commits=commits)

    def _note_lent(self, lender: Lender, *, commits: bool) -> list[ModelJob]:
        lent, lender.lent = lender.lent, []
        for job in lent:
            job.lent_to = None
            if commits:
                self.end(job, "completed")
                self.totals["completed inside"] += 1
        return lent

    @step(
        when=lambda self: any(lender.lent for lender in self.lenders),
        pick=PICK,
        commits=among(False, True),
    )
    def lose_the_commit_of_a_handler(self, pick: random.Random, commits: bool) -> None:
        """Its worker asks what became of it by recording the completion once more, as an end of its own."""
        lender = pick.choice([lender for lender in self.lenders if lender.lent])
        asked = {job.id: (job, job.member, self._worker_of(job)) for job in lender.lent}
        for _, member, runtime in asked.values():
            if runtime is not None and member is not None:
                try:
                    settle(self.claimer, runtime.number, (), [Outcome(member, "completed")])
                except psycopg.errors.LockNotAvailable:
                    break  # the transaction is still open: the worker asks again
                raise AssertionError("it cannot be known yet")
        if commits:
            try:
                lender.conn.execute("COMMIT")
            except psycopg.errors.SerializationFailure:
                commits = False
        else:
            backend = backends.backend_of(lender.conn)
            assert backend is not None
            assert backends.end_backend(self.main, backend)
        self.replace(lender)
        self._note_lent(lender, commits=commits)
        for job, member, runtime in asked.values():
            if runtime is None or member is None:
                continue
            refused = settle(self.claimer, runtime.number, (), [Outcome(member, "completed")])
            assert refused == ([member.place] if commits else [])
            if not commits:
                self.end(job, "completed")
        self.totals["commits in doubt"] += 1

    def _worker_of(self, job: ModelJob) -> Runtime | None:
        """If it lives."""
        assert job.member is not None
        return next((runtime for runtime in self.runtimes if runtime.number == job.member.runtime), None)
