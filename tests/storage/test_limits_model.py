"""Random histories of a queue with limits: whatever happens, in whatever order, the limits hold and nobody is stuck.

The steps are those of workers, operators and time, some of them in transactions that stay open while others act. After
each step the database is asked how many attempts are open; at the end everything must run to its end.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.storage.engine import (
    COME_AGAIN,
    Conn,
    Member,
    Outcome,
    cancel,
    claim,
    complete,
    fall_silent,
    fence,
    promote,
    register,
    rescue,
    scalar,
    settle,
)
from tests.storage.test_limits import limit

KINDS = (["x", "y"], ["x"], None)
SEEDS = 6
STEPS = int(os.environ.get("AWA_PROPERTY_STEPS") or 1200) // SEEDS

# One snapshot: the attempts that are open, with their keys.
OPEN = """
    SELECT j.concurrency_key, j.ordering_key, count(*)
      FROM awa.open_attempts() o JOIN awa.jobs j USING (slot, entry_id, xid) GROUP BY 1, 2
"""

# Of jobs that nobody retries or sets aside for their kind, a later one must not have started before an earlier one.
STARTED = """
    SELECT j.ordering_key, array_agg(j.id ORDER BY c.claim_id, m.n)
      FROM awa.claims c
     CROSS JOIN LATERAL unnest(c.entry_ids) WITH ORDINALITY AS m(entry_id, n)
      JOIN awa.jobs j ON j.slot = c.slot AND j.entry_id = m.entry_id
     WHERE j.ordering_key IS NOT NULL AND j.attempt = 1 AND j.history IS NULL
     GROUP BY 1
"""


class History:
    def __init__(self, conn: Conn, open_connection: Callable[[], Conn], seed: str) -> None:
        self.pick = random.Random(seed)
        self.conn = conn
        self.slow = open_connection()
        self.lender = open_connection()
        self.is_slow = False
        self.runtimes = {register(conn): kinds for kinds in KINDS}
        self.running: list[Member] = []
        self.lent: Member | None = None
        self.per_key: int | None = 2
        self.most_per_key = 2
        self.max_running: int | None = None
        self.most: int | None = None
        self.totals: Counter[str] = Counter()
        self.now()

    def now(self) -> None:
        """What holds from now on; what runs already may stay above it."""
        limit(self.conn, max_running=self.max_running, max_running_per_key=self.per_key)

    def insert(self) -> None:
        pick = self.pick
        for _ in range(pick.randint(1, 4)):
            self.conn.execute(
                "INSERT INTO awa.jobs (queue, lane, kind, priority, concurrency_key, ordering_key)"
                " VALUES ('q', 2 * %(p)s + 1, %(kind)s, %(p)s, %(key)s, %(order)s)",
                {
                    "kind": pick.choice("xxxy"),
                    "p": 2,
                    "key": pick.choice((None, "a", "a", "b")),
                    "order": pick.choice((None, None, "o", "p")),
                },
            )

    def claim(self) -> None:
        runtime, kinds = self.pick.choice(list(self.runtimes.items()))
        claimed = claim(self.conn, runtime, kinds=kinds, limit=self.pick.choice((1, 2, 20)))
        self.running += claimed.members
        self.totals["claimed"] += len(claimed.members)

    def claim_slowly(self) -> None:
        """A claim whose transaction stays open."""
        if self.is_slow:
            self.slow.execute(self.pick.choice(("COMMIT", "ROLLBACK")))
            self.is_slow = False
            self._read_back()
            return
        runtime, kinds = self.pick.choice(list(self.runtimes.items()))
        self.slow.execute("BEGIN")
        claim(self.slow, runtime, kinds=kinds, limit=self.pick.choice((1, 5)))
        self.is_slow = True

    def _read_back(self) -> None:
        """What was committed by the slow claim is known to its worker."""
        known = {(member.claim_id, member.idx) for member in self.running}
        for claim_id, slot, nonce, runtime, idx, entry_id, job_id, attempt, most, kind in self.conn.execute(
            "SELECT o.claim_id, o.slot, c.nonce, o.runtime, o.idx, o.entry_id, j.id, j.attempt, j.max_attempts, j.kind"
            "  FROM awa.open_attempts() o"
            "  JOIN awa.claims c ON c.slot = o.slot AND c.claim_id = o.claim_id"
            "  JOIN awa.jobs j ON j.slot = o.slot AND j.entry_id = o.entry_id"
        ).fetchall():
            if (claim_id, idx) not in known and runtime in self.runtimes:
                member = Member(runtime, claim_id, slot, nonce, idx, job_id, entry_id, attempt, most, kind, 2, None)
                self.running.append(member)

    def settle(self) -> None:
        if not self.running:
            return
        some = self.pick.sample(self.running, self.pick.randint(1, min(len(self.running), 4)))
        for member in some:
            if member is self.lent:
                continue
            outcome = self.pick.choice(
                ("completed", "completed", "completed", "failed", "retried", "snoozed", "released")
            )
            try:
                if outcome == "completed":
                    settle(self.conn, member.runtime, [member])
                else:
                    delay = 0.0 if outcome == "released" else self.pick.choice((0.0, 60.0))
                    settle(self.conn, member.runtime, others=[Outcome(member, outcome, delay)])
            except psycopg.errors.LockNotAvailable:
                continue
            self.running.remove(member)
            self.totals[outcome] += 1

    def lend(self) -> None:
        """A handler completes in a transaction of its own."""
        if self.lent is not None:
            self.lender.execute("COMMIT")
            self.running.remove(self.lent)
            self.lent = None
        elif self.running:
            self.lent = self.pick.choice(self.running)
            self.lender.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            try:
                complete(self.lender, self.lent)
            except psycopg.Error:  # ended from outside
                self.lender.execute("ROLLBACK")
                self.lent = None

    def die(self) -> None:
        if self.pick.random() < 0.5 or self.is_slow or self.lent is not None:
            return
        runtime = self.pick.choice(list(self.runtimes))
        fall_silent(self.conn, runtime)
        if fence(self.conn, runtime):
            rescue(self.conn, runtime)
            self.running = [member for member in self.running if member.runtime != runtime]
            self.runtimes[register(self.conn)] = self.runtimes.pop(runtime)
            self.totals["died"] += 1

    def cancel(self) -> None:
        ids = [
            row[0]
            for row in self.conn.execute("SELECT DISTINCT id FROM awa.jobs UNION SELECT id FROM awa.waiting_jobs")
        ]
        if not ids or self.is_slow or self.lent is not None:
            return
        job_id, force = self.pick.choice(sorted(ids)), self.pick.random() < 0.5
        happened, _ = cancel(self.conn, job_id, force=force)
        if happened == "cancelled":
            self.running = [member for member in self.running if member.id != job_id]
        self.totals[f"cancel: {happened}"] += 1

    def change(self) -> None:
        if self.is_slow:
            return
        self.per_key = self.pick.choice((1, 1, 2, 3, None))
        self.max_running = self.pick.choice((None, 2, 3, 5))
        self.now()

    def time_passes(self) -> None:
        self.conn.execute("UPDATE awa.waiting_jobs SET run_at = now() - interval '1 s' WHERE waits_for = 'time'")
        promote(self.conn)

    def turn(self) -> None:
        scalar(self.conn, "SELECT awa.rotate_v1()")

    def check(self, before: dict[Any, int], limits: tuple[int | None, int | None]) -> dict[Any, int]:
        """No count may grow while it is at its limit or above."""
        found = self.conn.execute(OPEN).fetchall()
        now: dict[Any, int] = Counter()
        for key, order, n in found:
            now["all"] += n
            if key is not None:
                now["key", key] += n
            if order is not None:
                now["order", order] += n
        for what, n in now.items():
            most = {"all": limits[0], "key": limits[1], "order": 1}["all" if what == "all" else what[0]]
            assert most is None or n <= max(most, before.get(what, 0)), f"{n} attempts of {what}, the limit is {most}"
        return now

    def run(self) -> None:
        steps: dict[Callable[[], None], int] = {
            self.insert: 6, self.claim: 14, self.claim_slowly: 4, self.settle: 10, self.lend: 3, self.die: 2,
            self.cancel: 2, self.change: 1, self.time_passes: 2, self.turn: 1,
        }  # fmt: skip
        counts: dict[Any, int] = {}
        for _ in range(STEPS):
            [step] = self.pick.choices(list(steps), list(steps.values()))
            limits = self.max_running, self.per_key
            step()
            if step != self.change:
                counts = self.check(counts, limits)
        self.finish()

    def finish(self) -> None:
        if self.is_slow:
            self.claim_slowly()
        if self.lent is not None:
            self.lend()
        for _ in range(3000):
            self._read_back()
            for member in [*self.running]:
                settle(self.conn, member.runtime, [member])
            self.running.clear()
            self.time_passes()
            is_quiet = True
            for runtime, kinds in self.runtimes.items():
                claimed = claim(self.conn, runtime, kinds=kinds)
                self.running += claimed.members
                is_quiet &= not claimed.members and not claimed.flags & COME_AGAIN
            if is_quiet and not self.running:
                break
        assert not self.conn.execute("SELECT id, waits_for, wait_key FROM awa.waiting_jobs").fetchall(), "stuck"
        assert not self.conn.execute("SELECT * FROM awa.grants").fetchall(), "keys that nobody gave back"
        for key, ids in self.conn.execute(STARTED).fetchall():
            assert ids == sorted(ids), f"{key}: started in the order {ids}"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_limits_hold_and_nobody_is_stuck_whatever_happens(
    conn: Conn, open_connection: Callable[[], Conn], seed: int
) -> None:
    """Guard: awa.admit, awa.hand_over and awa.still_open together; without any of them it fails: tried."""
    history = History(conn, open_connection, str(seed))
    history.run()
    assert history.totals["claimed"] > STEPS / 20
