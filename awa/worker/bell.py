"""When an idle worker waits, for how long, and whether it asks to be woken.

The bell of a queue is an advisory lock. Its holder is notified of inserts; a producer that can have the lock knows that
nobody waits and notifies nobody. States of one worker process:

    hot       jobs arrive faster than notifications pay: no bell, a claim every 2 ms
    probing   hot for a moment, to learn the rate of arrivals when nobody notifies
    armed     it holds the bells of its queues and sleeps; polls find what was inserted before the arming and
              committed after it, each after a quarter of the time since
    unarmed   another process holds a bell, or bells are off: it polls, more and more slowly, and tries to arm

A queue that is paused or full has no bell for that time, and is left out of all this; see :mod:`awa.worker.closed`.

Disarming goes by the rate of arrivals: above 500 a second, a claim every 2 ms costs less than one per notification.
But that rate is not to be believed while producers notify. NOTIFY takes a lock of the whole cluster until its commit
is on disk, so however many the producers are, no more arrive than one per commit; with a slow disk or a distant standby
that is fewer than any threshold, and nobody would ever disarm. (Seen: 64 connections at 700 inserts a second, and at
14,000 without the bell.) So a holder that is rung often gives the bell up now and then for a moment, and looks.
"""

from __future__ import annotations

import math
from collections.abc import Collection

FIRST_POLL = 0.002
"""Seconds from the last job, or from the arming, to the first poll."""

PACE = 0.002
"""Seconds between claims while hot."""

RATE_MEMORY = 0.03
"""Seconds over which the rate of arrivals is forgotten."""

HOT_RATE = 500.0
"""Jobs a second above which the bell is given up; below half of it, it is taken again."""

PROBE_RATE = 50.0
"""Jobs a second above which a holder of the bell probes."""

PROBE_SECONDS = 0.03
"""How long a probe lasts."""

PROBE_EVERY = 0.5
"""Seconds between probes."""


class Bell:
    """The policy; it sends nothing and reads no clock.

    Args:
        queues: What the process serves.
        poll_interval: Longest wait in seconds.
        use_bells: False polls only; it may change while no bell is held.
    """

    def __init__(self, queues: tuple[str, ...], *, poll_interval: float, use_bells: bool) -> None:
        self._queues = queues
        self._poll_interval = poll_interval
        self.use_bells = use_bells
        """Whether it asks to be woken."""
        self._rate = 0.0
        self._rate_at = 0.0
        self._gap = FIRST_POLL
        self._armed_at = 0.0
        self._next_try = 0.0
        self._probed_at = 0.0
        self.armed: set[str] = set()
        """Queues whose bell this process holds."""
        self.closed: Collection[str] = ()
        """Queues whose bell is not to be held: nothing of theirs can start now."""
        self.is_hot = False
        """Jobs arrive faster than notifications pay."""

    def lost(self) -> None:
        """The connection is gone, and the bells with it."""
        self.armed.clear()
        self._gap = FIRST_POLL
        self._next_try = 0.0

    def arrived(self, count: int, now: float) -> None:
        """Note that a claim brought *count* jobs."""
        self._rate = self._rate * math.exp(-(now - self._rate_at) / RATE_MEMORY) + count / RATE_MEMORY
        self._rate_at = now
        if self.armed and self._rate > PROBE_RATE and now - self._probed_at >= PROBE_EVERY:
            self._probed_at = now
        is_probing = now - self._probed_at < PROBE_SECONDS
        self.is_hot = is_probing or self._rate > (HOT_RATE / 2 if self.is_hot else HOT_RATE)
        if count:
            self._gap = FIRST_POLL
            self._next_try = 0.0

    def took(self, queue: str, now: float) -> None:
        """Note that the bell of *queue* was taken."""
        if not self.armed:
            self._armed_at = now
        self.armed.add(queue)

    def gave_up(self, queue: str) -> None:
        """Note that the bell of *queue* was given up."""
        self.armed.discard(queue)
        self._gap = FIRST_POLL
        self._next_try = 0.0

    def asked_to_help(self) -> None:
        """Another process gave a bell up, since no thread of it is free: try to take it with the next claim."""
        self._gap = FIRST_POLL
        self._next_try = 0.0

    @property
    def is_armed(self) -> bool:
        """Whether it holds the bells of all its queues but the closed ones."""
        return len(self.armed) + len(self.closed) >= len(self._queues)  # it holds no bell of a closed one

    def next_wait(self, now: float) -> tuple[float, bool]:
        """After a claim that found nothing: seconds to wait, and whether the next claim should try the bells."""
        if self.is_hot:
            return PACE, False
        if self.is_armed:
            return min(self._poll_interval, max(FIRST_POLL, (now - self._armed_at) * 0.25)), False
        if not self.use_bells:
            wait, self._gap = self._gap, min(self._gap * 1.25, self._poll_interval)
            return wait, False
        if now >= self._next_try:
            self._next_try = now + self._gap
            self._gap = min(self._gap * 1.5, self._poll_interval)
            return 0.0, True
        return self._next_try - now, True
