"""Chore: delete what has been kept long enough: failed and cancelled jobs, dead letters, runtimes that have ended."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from psycopg import Connection

from awa.storage import ended, runtimes
from awa.storage.schema import Schema

BATCH = 500

PAUSE = 30.0
"""Most seconds between looks."""


class Retention:
    """Deletes them in batches, oldest first. Completed jobs go with their segment, see :class:`Ring`.

    Runtimes stay for as long as jobs may tell that they ran there; dead letters, which are kept for long, forget it: a
    worker that ends again and again leaves a row each time.

    Args:
        completed: Seconds that completed jobs stay.
        failed: Seconds that failed and cancelled jobs stay.
        dead: Seconds that dead letters stay.
        now: For tests: what to take for now.
    """

    name = "retention"
    hears_bell = False

    def __init__(
        self,
        schema: Schema,
        *,
        completed: float,
        failed: float,
        dead: float,
        now: Callable[[], datetime | None] = lambda: None,
    ) -> None:
        self._schema = schema
        self._failed = failed
        self._dead = dead
        self._kept = max(completed, failed)
        self._now = now
        self._runtimes_after = 0  # those with a higher number have not been looked at in this pass
        self._pause = min(max(min(failed, dead) / 10, 0.2), PAUSE)

    def run(self, conn: Connection, held_seconds: float) -> float:
        """Delete one batch of each."""
        deleted = ended.delete_old(
            conn, self._schema, failed=self._failed, dead=self._dead, limit=BATCH, now=self._now()
        )
        self._runtimes_after = runtimes.delete_ended(
            conn, self._schema, kept=self._kept, limit=BATCH, after=self._runtimes_after
        )
        return 0.0 if deleted >= BATCH else self._pause
