"""Queues from which nothing can be started now, and when to ask them again.

    paused     until somebody resumes it, and calls for help: asked every poll_interval, should the call be lost
    full       as many run as may: asked more and more slowly up to poll_interval, and at once when an attempt of this
               process has ended. Nobody rings when one of another process has: whoever records it claims next, and
               polls find what it leaves
    rationed   its rate allows the next start later: asked then

Nobody holds the bell of such a queue: a job that is inserted could not start anyway, and each insert would notify.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

from awa.storage.line import Claimed

log = logging.getLogger("awa.worker")

FIRST_PAUSE = 0.002
"""Seconds until a full queue is asked for the first time again, and the least for any."""

GROWTH = 1.5
"""So much longer is each pause of a full queue than the one before."""


@dataclass(slots=True)
class _State:
    ask_at: float
    pause: float = 0.0
    is_full: bool = False


class ClosedQueues:
    """What one process knows of the queues that it serves. It reads no clock.

    Args:
        poll_interval: Longest pause in seconds.
    """

    def __init__(self, poll_interval: float) -> None:
        self._poll_interval = poll_interval
        self.states: dict[str, _State] = {}
        """Closed queues; a queue that is not here is open."""
        self._paused: set[str] = set()  # as the log says
        self._were_full: set[str] = set()

    def saw(self, claimed: Claimed, now: float) -> None:
        """Take note of what a claim found."""
        if claimed.error is not None or claimed.is_busy:  # then it did not come so far
            return
        queue = claimed.queue
        if claimed.is_paused:
            if queue not in self._paused:
                self._paused.add(queue)
                log.info("queue %s is paused: nothing of it starts until it is resumed", queue)
            self.states[queue] = _State(now + self._poll_interval)
            return
        if queue in self._paused:
            self._paused.remove(queue)
            log.info("queue %s is not paused any more", queue)
        if not claimed.is_full:
            self.states.pop(queue, None)
        elif claimed.ask_after is not None:
            # no longer than poll_interval: its limits may change, and the call that says so may be lost
            self.states[queue] = _State(now + min(max(claimed.ask_after, FIRST_PAUSE), self._poll_interval))
        else:
            self._were_full.add(queue)
            before = self.states.get(queue)
            pause = 0.0 if before is None else before.pause * GROWTH
            pause = min(max(pause, FIRST_PAUSE), self._poll_interval)
            self.states[queue] = _State(now + pause, pause, is_full=True)

    def may_ask(self, queue: str, now: float) -> bool:
        """Whether *queue* is open, or it is time to ask it."""
        state = self.states.get(queue)
        return state is None or now >= state.ask_at

    def next_at(self, queues: Iterable[str]) -> float:
        """When to ask the first of those among *queues* that are closed; infinity when none is."""
        return min((self.states[queue].ask_at for queue in queues if queue in self.states), default=math.inf)

    def reopen(self, queue: str) -> None:
        """Somebody calls for help: ask *queue* now, whatever it was."""
        self.states.pop(queue, None)

    @property
    def has_full(self) -> bool:
        """Whether a queue is full, so that the end of an attempt may let another start."""
        return bool(self.states) and any(state.is_full for state in self.states.values())

    def ended(self, queues: Iterable[str]) -> None:
        """Attempts of *queues* have ended here: ask those which were full."""
        for queue in queues:
            state = self.states.get(queue)
            if state is not None and state.is_full:
                state.ask_at = state.pause = 0.0

    def were_full(self, queues: Iterable[str]) -> set[str]:
        """Those among *queues* that were full before, so that others may wait for an end that is recorded here."""
        return self._were_full.intersection(queues)
