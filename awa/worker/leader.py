"""Who runs maintenance: one runtime at a time, by a lease that it renews."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from psycopg import Connection

from awa.storage import runtimes
from awa.storage.schema import Schema

log = logging.getLogger("awa.maintenance")

LEASE = "maintenance"

LASTS = 1.75
"""Heartbeats that the lease lasts: two renewals may fail, and a dead leader is replaced in less than two heartbeats."""

RENEW_EVERY = 0.5
"""Heartbeats between renewals, and between looks of those that do not lead: a leader that stops gives the lease up."""

JITTER = 0.05
"""Most heartbeats behind the end of another's lease: not all try to take it at once."""


class Leadership:
    """The lease of maintenance, as this runtime sees it. It ends by the database's clock.

    What must not happen twice is unique in the database, so a leader that does not know yet that it has been
    replaced does no harm.
    """

    def __init__(self, schema: Schema, *, heartbeat: float, identity: Callable[[], int]) -> None:
        self._schema = schema
        self._heartbeat = heartbeat
        self._identity = identity
        self._renew_at = 0.0
        self._valid_until = 0.0
        self._runtime = 0
        self.held_seconds: float | None = None
        """For how long this runtime has led without a gap, as of the last renewal; None when another leads."""

    def renew(self, conn: Connection) -> bool:
        """Take or renew the lease when it is time to; whether this runtime leads."""
        now = time.monotonic()
        if self._runtime != self._identity():
            self.drop(conn)  # the number that this process had before; it would keep the new one waiting
            self._runtime = self._identity()
            self._renew_at = 0.0
        if now >= self._renew_at:
            was_leading = self.held_seconds is not None
            lease = runtimes.hold_lease(conn, self._schema, LEASE, self._runtime, seconds=LASTS * self._heartbeat)
            self.held_seconds = lease.held_seconds
            pause = RENEW_EVERY * self._heartbeat
            if lease.held_seconds is None:
                pause = min(pause, lease.left_seconds + random.uniform(0.0, JITTER * self._heartbeat))
            self._renew_at = now + pause
            self._valid_until = now + LASTS * self._heartbeat
            if (self.held_seconds is not None) != was_leading:
                log.info("this worker %s maintenance", "leads" if self.held_seconds is not None else "no longer leads")
        return self.held_seconds is not None

    @property
    def is_valid(self) -> bool:
        """Whether the lease cannot have ended since the last renewal: this process may have been frozen meanwhile."""
        return self.held_seconds is not None and time.monotonic() < self._valid_until

    @property
    def seconds_to_renewal(self) -> float:
        """Until the lease wants to be renewed, or to be tried again."""
        return max(self._renew_at - time.monotonic(), 0.0)

    def drop(self, conn: Connection) -> None:
        """Let another take over at once."""
        if self.held_seconds is not None:
            runtimes.drop_lease(conn, self._schema, LEASE, self._runtime)
            self.held_seconds = None
