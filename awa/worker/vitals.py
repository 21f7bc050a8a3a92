"""What loops tell of themselves: when the last round succeeded, whether it fails, how long it has been in one round.

All of a worker's together are its health.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from awa.version import VERSION

State = Literal["starting", "ok", "failing", "hung", "dead", "stopped"]


@dataclass(frozen=True, slots=True)
class Pulse:
    """A loop at one moment."""

    name: str
    """Which."""
    state: State
    """``failing``: its rounds raise, and it tries again. ``hung``: it has been in one round, or asleep, for too long.
    ``dead``: its thread is gone, and nobody asked it to end."""
    last_success_age: float | None
    """Seconds since a round succeeded; None: none has."""
    failures: int
    """Rounds that failed since."""
    error: str | None
    """The type of the last one's exception. Not its text: who may see this is not asked for a password."""

    @property
    def is_alive(self) -> bool:
        """A new start would be no better."""
        return self.state not in ("hung", "dead")


class Vitals:
    """Written by the loop's own thread, read by any: each field is one assignment.

    Args:
        name: The loop's.
        patience: Seconds that a round may take, or be late, before the loop counts as hung. Above every time-out of
            what it does, so that a database which is away, or does not answer, makes it fail and not hang.
    """

    def __init__(self, name: str, *, patience: float) -> None:
        self.name = name
        self.patience = patience
        self.failures = 0
        self._error: str | None = None
        self._succeeded_at: float | None = None
        self._until = time.monotonic()  # asleep till then; a round that is under way was due when it began

    def begin(self) -> None:
        """A round begins."""
        self._until = time.monotonic()

    def succeed(self, wait: float = 0.0) -> None:
        """It did what it should; the next begins in *wait* seconds."""
        now = self._succeeded_at = time.monotonic()
        self._until = now + wait

    def fail(self, error: BaseException, wait: float) -> None:
        """It raised *error*; the next begins in *wait* seconds."""
        self.failures += 1
        self._error = type(error).__name__
        self._until = time.monotonic() + wait

    def recover(self) -> None:
        """What failed before is over."""
        self.failures = 0
        self._error = None

    def pulse(self, *, is_alive: bool = True, is_needed: bool = True, is_stopping: bool = False) -> Pulse:
        """How it is now.

        Args:
            is_alive: Its thread runs.
            is_needed: It has something to do; else it is not late, whatever the time.
            is_stopping: It was asked to end.
        """
        now, succeeded_at, failures = time.monotonic(), self._succeeded_at, self.failures
        state: State
        if not is_alive:
            state = "stopped" if is_stopping else "dead"
        elif is_needed and now > self._until + self.patience:
            state = "hung"
        elif failures:
            state = "failing"
        else:
            state = "starting" if succeeded_at is None else "ok"
        age = None if succeeded_at is None else max(now - succeeded_at, 0.0)
        return Pulse(self.name, state, age, failures, self._error)


@dataclass(slots=True)
class Health:
    """A worker process at one moment."""

    runtime: int
    """Its number in ``awa.runtime_instances``; 0 before it has one."""
    unhealthy: list[str] = field(default_factory=list)
    """Why a new start would be better; none: it is healthy."""
    unready: list[str] = field(default_factory=list)
    """Why it cannot work just now; none: it is ready, if it is healthy."""
    loops: list[Pulse] = field(default_factory=list)
    """Its loops."""
    threads: dict[str, int] = field(default_factory=dict)
    """How many of its worker threads there are, by what they do."""
    is_quiet: bool = False
    """It has heard that it is to claim nothing more."""

    def note(self, pulse: Pulse) -> None:
        """Add a loop."""
        self.loops.append(pulse)
        if not pulse.is_alive:
            self.unhealthy.append(f"the loop {pulse.name} is {pulse.state}")

    def summary(self) -> dict[str, Any]:
        """What the database is told of it."""
        return {
            "unhealthy": self.unhealthy,
            "unready": self.unready,
            "loops": {pulse.name: pulse.state for pulse in self.loops},
            "is_quiet": self.is_quiet,
        }

    def answer(self, path: str) -> tuple[int, bytes] | None:
        """Status and body for a path; None when there is no such page."""
        match path:
            case "/healthz":
                reasons = self.unhealthy
            case "/readyz":
                reasons = [*self.unhealthy, *self.unready]
            case _:
                return None
        said: dict[str, Any] = {
            "status": "not ok" if reasons else "ok",
            "reasons": reasons,
            "runtime": self.runtime,
            "pid": os.getpid(),
            "version": VERSION,
            "loops": {
                pulse.name: {
                    "state": pulse.state,
                    "last_success_age": None if pulse.last_success_age is None else round(pulse.last_success_age, 3),
                    "failures": pulse.failures,
                    "error": pulse.error,
                }
                for pulse in self.loops
            },
            "threads": self.threads,
            "is_quiet": self.is_quiet,
        }
        return 503 if reasons else 200, orjson.dumps(said, option=orjson.OPT_APPEND_NEWLINE)
