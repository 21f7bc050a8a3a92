"""Deadlines: tell a handler whose time is up, in its own thread.

The exception arrives as soon as that thread runs Python again; a handler that sits in a C call is reached when the call
returns.
"""

from __future__ import annotations

import logging
import time

from awa._core import Attempt, Crew
from awa.errors import DeadlineExceeded
from awa.worker.service import Service

log = logging.getLogger("awa.job")

LOOK_EVERY = 0.25
"""Seconds between looks; a deadline is kept to within that."""


class Deadlines(Service):
    """Looks at the attempts that run, and raises DeadlineExceeded in those whose time is up.

    Args:
        timeout: Seconds for attempts of which neither the job nor its kind says; 0 for no limit.
    """

    def __init__(self, crew: Crew, *, timeout: float) -> None:
        super().__init__("deadlines")
        self._crew = crew
        self._timeout = timeout

    def step(self) -> float:
        """Look once."""
        now = time.monotonic()
        for attempt in self._crew.running:
            # read before the look at is_over inside expire(): the attempt, not its thread, is what has a deadline
            if attempt is None or attempt.is_expired:
                continue
            limit = self.limit(attempt)
            if limit and now - attempt.started > limit and attempt.expire(DeadlineExceeded):
                log.warning("job %d %s: its time of %.1f s is up", attempt.id, attempt.handler.kind, limit)
        return LOOK_EVERY

    def limit(self, attempt: Attempt) -> float:
        """Seconds that *attempt* may take: what the job says, else its kind, else the worker; 0 for no limit."""
        timeout_ms = attempt.details.get("timeout_ms")
        if timeout_ms is not None:
            return float(timeout_ms) / 1000
        options = attempt.handler.options
        said = None if options is None else options.timeout
        return self._timeout if said is None else float(said)
