"""Chore: end attempts that are long past their limit although their worker lives.

A worker ends them itself (:mod:`awa.worker.watch`). This is the second line, for a worker whose watch does not work.
"""

from __future__ import annotations

import logging
from collections import deque
from time import monotonic

from psycopg import Connection

from awa.storage import runtimes
from awa.storage.schema import Schema

log = logging.getLogger("awa.maintenance")

BATCH = 50

BUDGET = 0.05
"""Seconds after which a run leaves the rest to the next, which comes at once but lets other chores in between."""


class Deadlines:
    """Looks once per heartbeat at what every living runtime has open.

    Beyond its limit an attempt has ``stale_after`` seconds more. And nothing is ended before this runtime has led for
    that long without a gap: after an outage the workers have outcomes to record that are no fault of theirs.
    """

    name = "deadlines"
    hears_bell = False

    def __init__(self, schema: Schema, *, heartbeat: float, stale_after: float) -> None:
        self._schema = schema
        self._heartbeat = heartbeat
        self._stale_after = stale_after
        self._round: deque[int] = deque()
        self._skip = 0
        """Blocked attempts of the first runtime of the round."""

    def run(self, conn: Connection, held_seconds: float) -> float:
        """Look at every living runtime once, in as many runs as it takes."""
        if held_seconds < self._stale_after:
            return self._stale_after - held_seconds
        until = monotonic() + BUDGET
        if not self._round:
            self._round.extend(runtimes.list_with_limits(conn, self._schema))
        while self._round and monotonic() < until:
            runtime = self._round.popleft()  # for good, if it raises: the others get their turn
            skip, self._skip = self._skip, 0
            done = runtimes.expire(conn, self._schema, runtime, behind=self._stale_after, limit=BATCH, skip=skip)
            if done.ended:
                log.error("ended %d attempts of runtime %d, whose worker let their time pass", done.ended, runtime)
            if done.ended == BATCH or done.blocked:
                self._round.appendleft(runtime)
                self._skip = skip + done.blocked
        return 0.0 if self._round else self._heartbeat
