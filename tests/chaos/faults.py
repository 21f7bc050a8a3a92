"""What the run inflicts on workers, producers and server, and how often."""

from __future__ import annotations

import heapq
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import psycopg
from psycopg import Connection

from tests.chaos.cluster import Cluster
from tests.chaos.crew import Crew, Member
from tests.chaos.ledger import Crash
from tests.chaos.server import connect, crash, kill_backend


class Faults:
    """Does one fault after the other, each kind at its own random times.

    Args:
        chance: Decides when, whom and for how long.
        seconds: Of the whole run, which has at least one crash of the server, and one failover if it has a standby.
    """

    def __init__(self, crew: Crew, cluster: Cluster, chance: random.Random, seconds: float) -> None:
        self.done: Counter[str] = Counter()
        """How often each was inflicted."""
        self.crashes: list[Crash] = []
        """When the primary was lost, and when it was back or another took over."""
        self._crew = crew
        self._cluster = cluster
        self._chance = chance
        self._numbers = count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        every: list[tuple[float, Callable[[], None]]] = [
            (7.0, self._kill_worker),
            (4.0, self._freeze_worker),
            (9.0, self._restart_worker),
            (15.0, self._kill_producer),
            (1.5, self._terminate_backend),
            (8.0, self._checkpoint),
            (10.0, self._fence),
            (5.0, self._rotate),
            (45.0, self._kill_backend),
            (60.0, self._kill_pooler),
        ]
        if cluster.has_standby:
            every += [(0.5, self._tend_standby), (20.0, self._freeze_standby), (40.0, self._crash_standby)]
        for interval, fault in every:
            self._repeat(fault, interval)
        self._spread(self._crash, seconds, 60.0)
        if cluster.has_standby:
            self._spread(self._fail_over, seconds, 300.0)

    def step(self) -> float:
        """Do what is due; returns the seconds until the next."""
        while self._agenda and self._agenda[0][0] <= time.monotonic():
            _, _, fault = heapq.heappop(self._agenda)
            try:
                fault()
            except psycopg.Error:
                self.done["(met no server)"] += 1
        return self._agenda[0][0] - time.monotonic() if self._agenda else 1.0

    def _at(self, seconds: float, fault: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time.monotonic() + seconds, next(self._numbers), fault))

    def _spread(self, fault: Callable[[], None], seconds: float, interval: float) -> None:
        """Have it at least once, and about each *interval*."""
        between = min(interval, max(seconds, 1.0))
        at = between * self._chance.uniform(0.4, 0.7)
        while at < seconds:
            self._at(at, fault)
            at += between * self._chance.uniform(0.8, 1.2)

    def _repeat(self, fault: Callable[[], None], interval: float) -> None:
        def again() -> None:
            self._repeat(fault, interval)
            fault()

        self._at(self._chance.uniform(0.2, 1.8) * interval, again)

    # --- processes

    def _anyone(self, members: list[Member]) -> Member | None:
        ups = [member for member in members if member.is_up]
        return self._chance.choice(ups) if ups else None

    def _send(self, members: list[Member], number: signal.Signals, what: str) -> Member | None:
        if (member := self._anyone(members)) is not None:
            member.signal(number)
            self.done[what] += 1
        return member

    def _kill_worker(self) -> None:
        self._send(self._crew.workers, signal.SIGKILL, "worker killed")

    def _restart_worker(self) -> None:
        self._send(self._crew.workers, signal.SIGTERM, "worker restarted")

    def _kill_producer(self) -> None:
        self._send(self._crew.producers, signal.SIGKILL, "producer killed")

    def _kill_pooler(self) -> None:
        self._send(self._crew.poolers, signal.SIGKILL, "pooler killed")

    def _freeze_worker(self) -> None:
        seconds = self._chance.uniform(1.0, 6.0)
        if (member := self._send(self._crew.workers, signal.SIGSTOP, "worker frozen")) is not None:
            self._at(seconds, lambda: member.signal(signal.SIGCONT))

    def end(self) -> None:
        """Let everybody go on, and wait for no standby any longer."""
        for member in self._crew.workers:
            member.signal(signal.SIGCONT)
        self._cluster.dismiss()

    # --- the servers

    def _connect(self) -> Connection[Any]:
        return connect(self._cluster.primary)

    def _some_backend(self) -> int | None:
        with self._connect() as conn:
            found = conn.execute(
                "SELECT pid FROM pg_stat_activity"
                " WHERE backend_type = 'client backend' AND application_name <> 'chaos' ORDER BY pid"
            ).fetchall()
        return self._chance.choice(found)[0] if found else None

    def _terminate_backend(self) -> None:
        if (pid := self._some_backend()) is not None:
            with self._connect() as conn:
                conn.execute("SELECT pg_terminate_backend(%s)", [pid])
            self.done["backend terminated"] += 1

    def _kill_backend(self) -> None:
        began = time.time()
        if (pid := self._some_backend()) is not None and kill_backend(self._cluster.primary, pid):
            self.crashes.append((began, time.time()))
            self.done["backend killed"] += 1

    def _crash(self) -> None:
        began = time.time()
        crash(self._cluster.primary)
        self.crashes.append((began, time.time()))
        self.done["server crashed"] += 1

    def _tend_standby(self) -> None:
        if self._cluster.tend():
            self.done["standby made"] += 1

    def _crash_standby(self) -> None:
        if self._cluster.crash_standby():
            self.done["standby crashed"] += 1

    def _freeze_standby(self) -> None:
        if self._cluster.freeze_standby():
            self.done["standby frozen"] += 1
            self._at(self._chance.uniform(0.5, 4.0), self._cluster.thaw_standby)

    def _fail_over(self) -> None:
        """As soon as the standby has all that was acknowledged."""
        is_planned = self._chance.random() < 0.25
        crash = self._cluster.fail_over("fast" if is_planned else "immediate", self._chance.uniform(0.0, 1.0))
        if crash is None:
            self._at(1.0, self._fail_over)
        else:
            self.crashes.append(crash)
            self.done["failover, planned" if is_planned else "failover"] += 1

    def _checkpoint(self) -> None:
        with self._connect() as conn:
            conn.execute("CHECKPOINT")
        self.done["checkpoint"] += 1

    def _fence(self) -> None:
        """Take a living runtime for dead, as a leader does that cannot hear it."""
        with self._connect() as conn:
            found = conn.execute("SELECT id FROM awa.runtime_instances WHERE ended_at IS NULL ORDER BY id").fetchall()
            if not found:
                return
            runtime = self._chance.choice(found)[0]
            for _ in range(50):  # it is only tried, and may meet a claim
                fenced = conn.execute("SELECT awa.fence_v1(%s, -1)", [runtime]).fetchone()
                if fenced == (True,):
                    self.done["runtime fenced"] += 1
                    return

    def _rotate(self) -> None:
        """Turn the ring beside the leader."""
        with self._connect() as conn:
            conn.execute("SELECT awa.rotate_v1()")
        self.done["ring turned"] += 1
