"""Looking at the attempts that run: whose time is up, and what waits behind handlers that turned out to be slow.

What happens to an attempt whose time is up, each step to within a quarter of a second:

    told         DeadlineExceeded is raised in the handler's own thread, as soon as that thread runs Python again
    abandoned    it has not ended within the grace, since it sits in a C call or goes on all the same: the attempt ends
                 as if it had raised, another thread takes the place, and what the handler comes to is only logged

A thread cannot be ended from outside. So a process holds a bounded number of such threads, and beyond that asks to be
started anew.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from awa._core import Attempt, Crew
from awa.errors import AwaError, DeadlineExceeded
from awa.worker.service import Service

log = logging.getLogger("awa.job")

LOOK_EVERY = 0.25
"""Seconds between looks; a deadline is kept to within that."""

STUCK_AFTER = 0.25
"""Seconds after which a handler counts as slow, whatever the run time of those before it promised."""

GRACE = 5.0
"""Seconds that a handler gets to end after it was told that its time is up; less when its time was shorter, ..."""

LEAST_GRACE = 1.0
"""... but not less than this."""

LEAST_ABANDONED = 10
"""A process may have so many abandoned threads, or as many as it has threads if that is more."""


HUNG_AFTER = 30.0
"""Seconds that a look, which waits for nothing, may take before the thread counts as hung."""


class Watch(Service):
    """Looks at the attempts that run.

    Args:
        timeout: Seconds for attempts of which neither the job nor its kind says; 0 for no limit.
        is_loaded: Whether anything waits for a thread: attempts that have not started, outcomes to record.
        relieve: Releases the former and records the latter. It asks the database, so it runs in a thread of its own:
            a server that hangs must not delay deadlines.
        replace: Abandons an attempt, for which it notes an error, and has a new thread take the place of its own.
        on_fatal: Called once, with what only a new process mends.
    """

    def __init__(
        self,
        crew: Crew,
        *,
        timeout: float,
        is_loaded: Callable[[], bool],
        relieve: Callable[[], None],
        replace: Callable[[Attempt, DeadlineExceeded], None],
        on_fatal: Callable[[Exception], None],
    ) -> None:
        super().__init__("watch", patience=HUNG_AFTER)
        self._crew = crew
        self._timeout = timeout
        self._is_loaded = is_loaded
        self._relieve = relieve
        self._replace = replace
        self._on_fatal = on_fatal
        self._most_abandoned = max(LEAST_ABANDONED, len(crew.running))
        self._has_given_up = False
        self._relief: threading.Thread | None = None

    def step(self) -> float:
        """Look once."""
        now = time.monotonic()
        running = [attempt for attempt in self._crew.running if attempt is not None]
        overdue: list[tuple[Attempt, float]] = []
        for attempt in running:
            limit = self.limit(attempt)
            if not limit or now - attempt.started <= limit:
                continue
            # expire() looks itself whether the handler has ended: the attempt, not its thread, has a deadline
            if not attempt.expired:
                if attempt.expire(DeadlineExceeded):
                    log.warning("job %d %s: its time of %.1f s is up", attempt.id, attempt.handler.kind, limit)
            elif now - attempt.expired > grace_of(limit):
                overdue.append((attempt, limit))
        if overdue:
            self._abandon(overdue)
        is_stuck = len(running) == len(self._crew.running) and all(
            now - attempt.started > STUCK_AFTER for attempt in running
        )
        if is_stuck and self._is_loaded() and not (self._relief is not None and self._relief.is_alive()):
            self._relief = threading.Thread(target=self._relieve, name="awa-relief", daemon=True)
            self._relief.start()
        return LOOK_EVERY

    def _abandon(self, overdue: list[tuple[Attempt, float]]) -> None:
        room = self._most_abandoned - len(self._crew.abandoned)
        for attempt, limit in overdue[: max(room, 0)]:
            error = DeadlineExceeded(
                f"its time of {limit:.1f} s was up, and its handler did not end within {grace_of(limit):.1f} s of "
                "being told: give calls that may block a time-out of their own"
            )
            self._replace(attempt, error.with_traceback(_where(attempt.thread)))
        if len(overdue) > room and not self._has_given_up:
            self._has_given_up = True
            stuck = ", ".join(str(attempt.id) for attempt in self._crew.abandoned[:20])
            self._on_fatal(
                AwaError(
                    f"{self._most_abandoned} handlers whose time was up have not ended (jobs {stuck}), and no thread "
                    "can be ended from outside: start this worker anew, and give calls that may block a time-out of "
                    "their own"
                )
            )

    def stop(self, timeout: float) -> bool:
        """End, and wait for a relief that is under way."""
        has_ended = super().stop(timeout)
        if self._relief is not None:
            self._relief.join(timeout)
        return has_ended

    def limit(self, attempt: Attempt) -> float:
        """Seconds that *attempt* may take: what the job says, else its kind, else the worker; 0 for no limit."""
        try:
            timeout_ms = attempt.details.get("timeout_ms")
        except ValueError:
            timeout_ms = None  # metadata that cannot be read: the handler may stumble over it, not who watches others
        if timeout_ms is not None:
            return float(timeout_ms) / 1000
        options = attempt.handler.options
        said = None if options is None else options.timeout
        return self._timeout if said is None else float(said)


def grace_of(limit: float) -> float:
    """Seconds that a handler gets to end after its time of *limit* seconds was up."""
    return max(min(GRACE, limit), LEAST_GRACE)


def _where(thread: int) -> TracebackType | None:
    """Where *thread* is now, as the traceback of an exception that it raised there."""
    found: TracebackType | None = None
    frames: list[FrameType] = []
    frame = sys._current_frames().get(thread)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    while frames and frames[-1].f_globals.get("__name__") == "threading":
        frames.pop()  # how the thread was started
    for frame in frames:
        found = TracebackType(found, frame, frame.f_lasti, frame.f_lineno or 0)
    return found
