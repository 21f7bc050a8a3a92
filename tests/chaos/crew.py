"""The processes of a run: started, watched, started again when they end, and never left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.chaos import cutter, pooler
from tests.chaos.plan import QUEUES, ROOT, Network, Plan

WORKER = {
    "AWA_QUEUES": QUEUES,
    "AWA_THREADS": "4",
    "AWA_HEARTBEAT": "0.5",
    "AWA_STALE_AFTER": "1.5",
    "AWA_POLL_INTERVAL": "0.5",
    "AWA_SHUTDOWN_TIMEOUT": "2",
    "AWA_ROTATE_AFTER": "1",
    "AWA_COMPLETED_RETENTION": "3",
    "AWA_FAILED_RETENTION": "5",
}
"""What a worker of a run is set to."""

STOPPING = 20.0
"""Seconds that a process gets to end in good order."""


class Member:
    """One place in the crew, and the process that fills it at present.

    Args:
        name: Of its logs.
        started: What its log says once it works; None: it need not say anything.
    """

    def __init__(self, plan: Plan, name: str, command: list[str], env: dict[str, str], *, started: str | None) -> None:
        self.name = name
        self.is_frozen = False
        self._plan = plan
        self._command = [sys.executable, "-m", *command]
        self._env = env
        self._started = started
        self._starts = 0
        self._not_before = 0.0
        self._asked_at = 0.0  # when it was told to end; 0.0 when it was not
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path()

    @property
    def is_running(self) -> bool:
        """Its process has not been seen to end."""
        return self._process is not None

    @property
    def is_up(self) -> bool:
        """It runs, was not told to end and is not frozen."""
        return self.is_running and not self._asked_at and not self.is_frozen

    @property
    def works(self) -> bool:
        """Its log says so."""
        return self._started is None or self._started in self._log.read_text(errors="replace")

    def start(self) -> None:
        if self._process is not None or time.monotonic() < self._not_before:
            return
        self._starts += 1
        self._asked_at, self.is_frozen = 0.0, False
        self._log = self._plan.directory / f"{self.name}-{self._starts}.log"
        env = self._plan.environment(**self._env, CHAOS_INCARNATION=str(self._starts))
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def signal(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        if number in (signal.SIGTERM, signal.SIGKILL):
            self._asked_at = time.monotonic()
        self.is_frozen = number == signal.SIGSTOP or (self.is_frozen and number != signal.SIGCONT)
        self._process.send_signal(number)

    def poll(self) -> str | None:
        """Notice an end; say so when nobody asked for it, or when it takes too long."""
        if self._process is None:
            return None
        code = self._process.poll()
        if code is None:
            if self._asked_at and not self.is_frozen and time.monotonic() > self._asked_at + STOPPING:
                self._process.kill()
                self._process.wait()
                self._process = None
                return f"{self.name} did not end within {STOPPING:.0f} s of SIGTERM: {self._log}"
            return None
        self._process, asked = None, self._asked_at
        self._not_before = time.monotonic() + 0.5
        # a worker may die of a deadly job; one that found no server at its start has not begun
        if asked or code == -signal.SIGKILL or (self._started is not None and not self.works):
            return None
        return f"{self.name} ended by itself with exit code {code}: {self._log}"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Crew:
    """Members by name, and what went wrong with them."""

    def __init__(self) -> None:
        self.workers: list[Member] = []
        self.producers: list[Member] = []
        self.network: list[Member] = []
        self.complaints: list[str] = []

    @property
    def poolers(self) -> list[Member]:
        """One or none."""
        return [member for member in self.network if member.name == "pooler"]

    def keep_up(self, *, with_producers: bool) -> None:
        """Start again whatever has ended."""
        for member in self._everybody:
            self._note(member.poll())
        for member in self.network + self.workers + (self.producers if with_producers else []):
            member.start()

    def stop(self, members: list[Member], timeout: float) -> None:
        """End *members* in good order; those that take too long are killed and complained about."""
        for member in members:
            member.signal(signal.SIGCONT)
            member.signal(signal.SIGTERM)
        until = time.monotonic() + timeout
        while any(member.is_running for member in members) and time.monotonic() < until:
            for member in members:
                self._note(member.poll())
            time.sleep(0.05)
        for member in members:
            if member.is_running:
                self.complaints.append(f"{member.name} had to be killed at the end")
                member.kill()

    def kill(self) -> None:
        """End everybody now."""
        for member in self._everybody:
            member.kill()

    @property
    def _everybody(self) -> list[Member]:
        return self.network + self.workers + self.producers

    def _note(self, complaint: str | None) -> None:
        if complaint is not None:
            self.complaints.append(complaint)


def make_crew(plan: Plan, *, workers: int, producers: Mapping[str, Network], has_pooler: bool) -> Crew:
    """The crew of a run; nobody has started yet.

    Args:
        workers: How many; every other one is behind the cutter, every fourth behind the pooler.
        producers: Their names, and what is between them and the servers.
        has_pooler: Whether there is one; those meant for it are before the servers otherwise.
    """
    crew = Crew()
    crew.network.append(Member(plan, "cutter", ["tests.chaos.cutter"], {}, started=None))
    if has_pooler:
        crew.network.append(Member(plan, "pooler", ["tests.chaos.pooler"], {}, started=None))
    addresses: dict[Network, str] = {
        "direct": plan.database,
        "cut": cutter.address(plan),
        "pooled": pooler.address(plan) if has_pooler else plan.database,
    }
    around: list[Network] = ["direct", "cut", "pooled", "cut"]
    for number in range(workers):
        command = ["awa.worker", "tests.chaos.app:client"]
        env = WORKER | {"CHAOS_WORKER": str(number), "AWA_DATABASE_URL": addresses[around[number % 4]]}
        crew.workers.append(Member(plan, f"worker-{number}", command, env, started="awa.worker: worker "))
    for number, (name, network) in enumerate(producers.items(), 1):
        command = ["tests.chaos.ways", name]
        env = {"CHAOS_PRODUCER": str(number), "AWA_DATABASE_URL": addresses[network]}
        crew.producers.append(Member(plan, f"producer-{name}", command, env, started=None))
    return crew
