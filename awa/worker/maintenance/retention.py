"""Chore: delete failed and cancelled jobs, and dead letters, once they have been kept long enough."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from psycopg import Connection

from awa.storage import ended
from awa.storage.schema import Schema

BATCH = 500

PAUSE = 30.0
"""Most seconds between looks."""


class Retention:
    """Deletes them in batches, oldest first. Completed jobs go with their segment, see :class:`Ring`.

    Args:
        failed: Seconds that failed and cancelled jobs stay.
        dead: Seconds that dead letters stay.
        now: For tests: what to take for now.
    """

    name = "retention"
    hears_bell = False

    def __init__(
        self, schema: Schema, *, failed: float, dead: float, now: Callable[[], datetime | None] = lambda: None
    ) -> None:
        self._schema = schema
        self._failed = failed
        self._dead = dead
        self._now = now
        self._pause = min(max(min(failed, dead) / 10, 0.2), PAUSE)

    def run(self, conn: Connection, held_seconds: float) -> float:
        """Delete one batch."""
        deleted = ended.delete_old(
            conn, self._schema, failed=self._failed, dead=self._dead, limit=BATCH, now=self._now()
        )
        return 0.0 if deleted >= BATCH else self._pause
