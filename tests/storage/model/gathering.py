"""Steps: statistics are gathered of the attempts that have ended, by two leaders, each of which may stop halfway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

from awa.worker.maintenance.statistics import Statistics
from tests.storage.engine import AWA, Conn
from tests.storage.model.machine import Machine
from tests.storage.model.records import ModelJob
from tests.storage.model.steps import among, step

COUNTED = ("completed", "retried", "snoozed", "failed", "cancelled", "rescued")

SUMS = """
    SELECT subject, name, sum(completed), sum(retried), sum(snoozed), sum(failed), sum(cancelled), sum(rescued)
      FROM awa.statistics WHERE step = %s GROUP BY 1, 2
"""


class Gathering(Machine):
    def begin(self) -> None:
        super().begin()
        self.rounds: list[tuple[Conn, Generator[None, None, None]] | None] = [None, None]
        self.attempts: Counter[tuple[str, str, str]] = Counter()

    def note_end(self, job: ModelJob, outcome: str) -> None:
        if outcome in COUNTED:
            self.attempts["queue", job.queue, outcome] += 1
            self.attempts["kind", job.kind, outcome] += 1

    @step(weight=2, n=among(0, 1), most=among(1, 2, 3, 100))
    def gather(self, n: int, most: int) -> None:
        """One goes on with its round, whatever the other has added since."""
        under_way = self.rounds[n]
        if under_way is None or under_way[0] is not self.main:  # lost in a crash
            under_way = self.main, Statistics(AWA).gather(self.main)
        self.rounds[n] = under_way
        for _ in range(most):
            try:
                next(under_way[1])
            except StopIteration:
                self.rounds[n] = None
                self.totals["gathered"] += 1
                return

    def gather_all(self) -> None:
        for _ in Statistics(AWA).gather(self.main):
            pass

    def end_all(self) -> None:
        """Every attempt that had begun was counted once: what is emptied was counted before."""
        super().end_all()
        self.gather_all()
        for step_ in ("minute", "hour"):
            found = {
                (subject, name, outcome): number
                for subject, name, *numbers in self.main.execute(SUMS, [step_])
                for outcome, number in zip(COUNTED, numbers, strict=True)
                if number
            }
            assert found == self.attempts
        assert self.main.execute("SELECT FROM awa.statistics_claims").fetchall() == []
