"""Looking at the attempts that run: whose time is up, and what waits behind handlers that turned out to be slow.

DeadlineExceeded is raised in the handler's own thread. It arrives as soon as that thread runs Python again; a handler
that sits in a C call is reached when the call returns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from awa._core import Attempt, Crew
from awa.errors import DeadlineExceeded
from awa.worker.service import Service

log = logging.getLogger("awa.job")

LOOK_EVERY = 0.25
"""Seconds between looks; a deadline is kept to within that."""

STUCK_AFTER = 0.25
"""Seconds after which a handler counts as slow, whatever the run time of those before it promised."""


class Watch(Service):
    """Looks at the attempts that run.

    Args:
        timeout: Seconds for attempts of which neither the job nor its kind says; 0 for no limit.
        is_loaded: Whether anything waits for a thread: attempts that have not started, outcomes to record.
        relieve: Releases the former and records the latter. It asks the database, so it runs in a thread of its own:
            a server that hangs must not delay deadlines.
    """

    def __init__(
        self, crew: Crew, *, timeout: float, is_loaded: Callable[[], bool], relieve: Callable[[], None]
    ) -> None:
        super().__init__("watch")
        self._crew = crew
        self._timeout = timeout
        self._is_loaded = is_loaded
        self._relieve = relieve
        self._relief: threading.Thread | None = None

    def step(self) -> float:
        """Look once."""
        now = time.monotonic()
        running = [attempt for attempt in self._crew.running if attempt is not None]
        for attempt in running:
            # expire() looks itself whether the handler has ended: the attempt, not its thread, has a deadline
            limit = 0.0 if attempt.is_expired else self.limit(attempt)
            if limit and now - attempt.started > limit and attempt.expire(DeadlineExceeded):
                log.warning("job %d %s: its time of %.1f s is up", attempt.id, attempt.handler.kind, limit)
        is_stuck = len(running) == len(self._crew.running) and all(
            now - attempt.started > STUCK_AFTER for attempt in running
        )
        if is_stuck and self._is_loaded() and not (self._relief is not None and self._relief.is_alive()):
            self._relief = threading.Thread(target=self._relieve, name="awa-relief", daemon=True)
            self._relief.start()
        return LOOK_EVERY

    def stop(self, timeout: float) -> bool:
        """End, and wait for a relief that is under way."""
        has_ended = super().stop(timeout)
        if self._relief is not None:
            self._relief.join(timeout)
        return has_ended

    def limit(self, attempt: Attempt) -> float:
        """Seconds that *attempt* may take: what the job says, else its kind, else the worker; 0 for no limit."""
        timeout_ms = attempt.details.get("timeout_ms")
        if timeout_ms is not None:
            return float(timeout_ms) / 1000
        options = attempt.handler.options
        said = None if options is None else options.timeout
        return self._timeout if said is None else float(said)
