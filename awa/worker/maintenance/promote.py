"""Chore: make jobs available when their time has come."""

from __future__ import annotations

import time

from psycopg import Connection

from awa.storage import waiting
from awa.storage.schema import Schema

BATCH = 1000
FLOOR = 1.0
"""Seconds behind now that the quick pass looks back. It keeps the scan off dead rows; what commits more than this after
its time waits for the full pass."""

FULL_EVERY = 15.0
"""Seconds between full passes, or twenty times what one costs, whichever is more."""


class Promote:
    """Moves due jobs in batches by due time, and sleeps until the next is due."""

    name = "promote"

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._full_at = 0.0

    def run(self, conn: Connection, held_seconds: float) -> float:
        """Move what is due; return the seconds until the next is."""
        now = time.monotonic()
        is_full = now >= self._full_at
        moved = waiting.promote(conn, self._schema, behind=None if is_full else FLOOR, limit=BATCH)
        if moved == BATCH:
            return 0.0
        if is_full:
            self._full_at = now + min(max(FULL_EVERY, 20 * (time.monotonic() - now)), 60.0)
        ahead = waiting.seconds_to_next(conn, self._schema, behind=FLOOR)
        # overdue and not moved: somebody else has the row for a moment
        return 1.0 if ahead is None else min(max(ahead, 0.005), 1.0)
