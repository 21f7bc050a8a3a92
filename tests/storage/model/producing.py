"""Steps: insert jobs in transactions that stay open, nest and roll back; let time pass."""

from __future__ import annotations

import random

from awa.storage import jobs
from awa.storage.jobs import JobRow
from tests.storage.engine import AWA, promote
from tests.storage.model.machine import Machine
from tests.storage.model.records import LATER, ModelJob, Producer
from tests.storage.model.steps import PICK, among, step

Row = tuple[int, str, int, int, bool]
"""Queue, kind, priority, most attempts, and whether it waits for a time."""


def rows(pick: random.Random) -> list[Row]:
    """One to six."""
    return [
        (pick.randrange(2), pick.choice("xxxy"), pick.randint(1, 4), pick.randint(1, 3), pick.random() < 0.2)
        for _ in range(pick.randint(1, 6))
    ]


class Producing(Machine):
    @step(weight=8, n=among(0, 1, 2), rows=rows, plain=among(False, True), commits=among(False, True))
    def insert(self, n: int, rows: list[Row], plain: bool, commits: bool) -> None:
        producer = self.producers[n]
        if not producer.is_open:
            producer.conn.execute("BEGIN")
            producer.xid = None
        if plain:
            rows = [(*row[:4], False) for row in rows]
        written = [
            JobRow(self.queues[q], kind, b"{}", priority, limit, delay=LATER if later else None)
            for q, kind, priority, limit, later in rows
        ]
        ids = [one.id for one in jobs.insert_jobs(producer.conn, AWA, written, notify=True)]
        self.rolled_back -= set(ids)  # a crash may give out again the numbers of what never committed
        for id_, row in zip(ids, written, strict=True):
            state = "waiting" if row.delay else "available"
            producer.jobs.append(ModelJob(id_, row.queue, row.kind, row.priority, row.max_attempts, state))
        producer.slots.add(self.slot)
        if producer.xid is None:
            found = producer.conn.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
            assert found is not None
            producer.xid = found[0]
            self.began[found[0]] = self.step
        if commits:
            self.end_insert(producer, commits=True)

    @step(
        weight=2,
        when=lambda self: any(producer.is_open for producer in self.producers),
        pick=PICK,
        what=among("savepoint", "rollback to", "release"),
    )
    def nest(self, pick: random.Random, what: str) -> None:
        producer = pick.choice([producer for producer in self.producers if producer.is_open])
        if what == "savepoint":
            producer.savepoints.append(len(producer.jobs))
            producer.conn.execute(f"SAVEPOINT s{len(producer.savepoints)}")
        elif producer.savepoints:
            level = pick.randint(1, len(producer.savepoints))
            if what == "release":
                producer.conn.execute(f"RELEASE s{level}")
                del producer.savepoints[level - 1 :]
            else:
                producer.conn.execute(f"ROLLBACK TO s{level}")
                kept = producer.savepoints[level - 1]
                self.rolled_back |= {job.id for job in producer.jobs[kept:]}
                del producer.jobs[kept:]
                del producer.savepoints[level:]

    @step(
        weight=4,
        when=lambda self: any(producer.is_open for producer in self.producers),
        pick=PICK,
        commits=among(True, True, False),
    )
    def commit_insert(self, pick: random.Random, commits: bool) -> None:
        self.end_insert(pick.choice([producer for producer in self.producers if producer.is_open]), commits=commits)

    def end_insert(self, producer: Producer, *, commits: bool) -> None:
        producer.conn.execute("COMMIT" if commits else "ROLLBACK")
        if commits:
            self.jobs |= {job.id: job for job in producer.jobs}
        else:
            self.rolled_back |= {job.id for job in producer.jobs}
        assert producer.xid is not None
        self.committed[producer.xid] = self.step
        producer.jobs, producer.savepoints, producer.slots = [], [], set()

    @step()
    def time_passes(self) -> None:
        self.let_time_pass()

    def let_time_pass(self) -> None:
        self.main.execute(
            "UPDATE awa.waiting_jobs SET run_at = clock_timestamp() - interval '1 s' WHERE waits_for = 'time'"
        )
        promote(self.main)
        for job in self.jobs.values():
            if job.state == "waiting":
                job.state, job.is_express = "available", False

    @step(weight=1)
    def promote_too_early(self) -> None:
        promote(self.main)
