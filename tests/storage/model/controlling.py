"""Steps: operators cancel, retry, reprioritise and move jobs, maintenance ends attempts whose time is up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import psycopg

from awa.storage import control, runtimes
from tests.storage.engine import AWA, cancel, move, retry, set_priority
from tests.storage.model.machine import Machine
from tests.storage.model.records import ENDED, LATER, End, ModelJob, Runtime
from tests.storage.model.steps import PICK, among, step


class Controlling(Machine):
    def make_runtime(self, kinds: tuple[str, ...] | None) -> Runtime:
        """One whose attempts are overdue at once, for who looks."""
        runtime = super().make_runtime(kinds)
        self.main.execute("UPDATE awa.runtime_instances SET timeout_ms = 1 WHERE id = %s", (runtime.number,))
        return runtime

    @step(weight=4, when=lambda self: self.jobs, pick=PICK, force=among(False, True))
    def cancel(self, pick: random.Random, force: bool) -> None:
        job = self.choose(pick)
        if self._is_taken(job) or (force and job.lent_to):
            self._must_wait(lambda: cancel(self.main, job.id, force=force))
            return
        said = cancel(self.main, job.id, force=force)
        self.totals[f"cancel: {said[0]}"] += 1
        if job.state == "gone":
            left = self.left_of(job)
            assert said == (("nothing", left) if left else ("not_found", None))
        elif job.state in ENDED:
            assert said == ("nothing", job.state)
        elif job.state == "running" and not force:
            assert said == ("requested", "running")
            job.is_asked = True
        else:
            assert said == ("cancelled", "cancelled")
            if job.state == "running":
                self._end_from_outside(job, "cancelled")
            job.state = "cancelled"
            job.was_rescued = False

    @step(weight=4, when=lambda self: self.jobs, pick=PICK)
    def retry(self, pick: random.Random) -> None:
        job = self.choose(pick)
        said = retry(self.main, job.id)
        self.totals[f"retry: {said[0]}"] += 1
        if job.state == "gone":
            assert said == ("not_found", None)
        elif job.state in ("available", "aside"):
            assert said == ("nothing", "available")
        elif job.state in ("running", "completed"):
            assert said == ("refused", job.state)
        else:
            assert said == ("retried", "available")
            job.state, job.attempt, job.is_express = "available", 1, job.was_rescued

    @step(weight=4, when=lambda self: self.jobs, pick=PICK, priority=among(1, 2, 3, 4))
    def set_priority(self, pick: random.Random, priority: int) -> None:
        job = self.choose(pick)
        if job.state in ("available", "aside") and self._is_taken(job):
            self._must_wait(lambda: set_priority(self.main, job.id, priority))
            return
        said = set_priority(self.main, job.id, priority)
        self.totals[f"priority: {said[0]}"] += 1
        if job.state == "gone":
            left = self.left_of(job)
            assert said == (("refused", left) if left else ("not_found", None))
        elif job.state in (*ENDED, "running"):
            assert said == ("refused", job.state)
        elif job.priority == priority:
            assert said[0] == "nothing"
        else:
            assert said[0] == "reprioritised"
            job.priority = priority
            if job.state == "available":
                job.is_express = job.was_rescued

    @step(weight=4, when=lambda self: self.jobs, pick=PICK, q=among(0, 1))
    def move(self, pick: random.Random, q: int) -> None:
        job, queue = self.choose(pick), self.queues[q]
        if job.state in ("available", "aside") and job.queue != queue and self._is_taken(job):
            self._must_wait(lambda: move(self.main, job.id, queue))
            return
        said = move(self.main, job.id, queue)
        self.totals[f"move: {said[0]}"] += 1
        if job.state == "gone":
            left = self.left_of(job)
            assert said == (("refused", left) if left else ("not_found", None))
        elif job.state in (*ENDED, "running"):
            assert said == ("refused", job.state)
        elif job.queue == queue:
            assert said[0] == "nothing"
        else:
            assert said[0] == "moved"
            job.queue = queue
            if job.state == "available":
                job.is_express = job.was_rescued

    @step(weight=1, when=lambda self: self.rolled_back, pick=PICK)
    def cancel_what_was_rolled_back(self, pick: random.Random) -> None:
        assert cancel(self.main, pick.choice(sorted(self.rolled_back)))[0] == "not_found"

    @step(weight=1, n=among(0, 1, 2))
    def hear_requests(self, n: int) -> None:
        """A worker reads whom somebody asked to cancel, and forgets those that have ended."""
        runtime = self.runtimes[n]
        asked = {job.member.entry_id for job in self.open_jobs(runtime) if job.is_asked and job.member}
        found = set(control.read_requests(self.main, AWA, runtime.number).to_cancel)
        assert asked <= found
        control.forget_requests(self.main, AWA, runtime.number, found)
        assert set(control.read_requests(self.main, AWA, runtime.number).to_cancel) == asked

    @step(weight=2, n=among(0, 1, 2), limit=among(1, 2, 50), skip=among(0, 0, 0, 1))
    def time_is_up(self, n: int, limit: int, skip: int) -> None:
        runtime = self.runtimes[n]
        time.sleep(0.002)  # their limit is a millisecond
        over = self.open_jobs(runtime)[skip:][:limit]
        blocked = next((i for i, job in enumerate(over) if job.lent_to), None)
        if self.is_busy(runtime):
            over, blocked = [], None
        done = runtimes.expire(self.main, AWA, runtime.number, behind=0.0, limit=limit, skip=skip)
        assert (done.ended, done.blocked) == (len(over[:blocked]), int(blocked is not None))
        for job in over[:blocked]:
            self._end_from_outside(job, "retried", LATER)
        # they wait for some seconds by themselves; a run may take longer
        self.main.execute("UPDATE awa.waiting_jobs SET run_at = run_at + interval '1 h' WHERE waits_for = 'time'")
        self.totals["overdue"] += done.ended

    def _is_taken(self, job: ModelJob) -> bool:
        """A transaction of a worker, which has not committed, has the lock on it."""
        if job.state == "running":
            return any(job.member and slow.runtime.number == job.member.runtime for slow in self.slow)
        if job.state == "available":
            return self.is_held(job.queue)
        return job.state == "aside" and any(job.id in slow.taken for slow in self.slow)

    def _must_wait(self, call: Callable[[], tuple[str, str | None]]) -> None:
        """It says so after a second; the model does not wait for that."""
        self.main.execute("SET statement_timeout = '60ms'")
        try:
            happened, _ = call()
        except psycopg.errors.QueryCanceled:
            happened = "busy"
        finally:
            self.main.execute("RESET statement_timeout")
        assert happened == "busy", "it did something about what another transaction holds"
        self.totals["busy operators"] += 1

    def _end_from_outside(self, job: ModelJob, outcome: str, delay: float = 0.0) -> None:
        """Its worker learns of it when it settles the attempt, unless it is dead or never heard of it."""
        member = job.member
        assert member is not None
        for runtime in self.runtimes:
            if runtime.number == member.runtime and member not in runtime.unheard:
                runtime.stale.append(End(job, member, outcome))
        self.end(job, outcome, delay)
