"""Chore: cancel jobs that wait and whose ``expires_at`` has passed.

Nothing begins too late without it: claims see to that. It is for those that no claim meets, since they wait for a
time, another job, a key or a worker that knows their kind. Available jobs are left to the claims, in a paused queue
until that is resumed.
"""

from __future__ import annotations

from time import monotonic

from psycopg import Connection

from awa.storage.expired import expire_waiting
from awa.storage.schema import Schema

BATCH = 200
"""Jobs of one run."""

PAUSE = 1.0
"""Seconds between runs, when none is left."""

SHARE = 10
"""A run rests at least so many times as long as it took: under an old snapshot each wades through dead rows."""


class Expire:
    """Cancels a batch at a time, the longest expired first."""

    name = "expire"
    hears_bell = False

    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def run(self, conn: Connection, held_seconds: float) -> float:
        """Cancel a batch; return the seconds until the next."""
        started = monotonic()
        cancelled = expire_waiting(conn, self._schema, limit=BATCH)
        took = monotonic() - started
        return took if cancelled == BATCH else max(PAUSE, took * SHARE)
