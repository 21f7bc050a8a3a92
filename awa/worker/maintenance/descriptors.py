"""Chore: delete from the catalogue what no worker has declared for long."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime

from psycopg import Connection
from psycopg.errors import LockNotAvailable

from awa.storage.descriptors import forget
from awa.storage.schema import Schema

log = logging.getLogger("awa.maintenance")

BATCH = 500

PAUSE = 60.0
"""Most seconds between looks."""


class Descriptors:
    """Deletes rows in batches.

    Args:
        retention: Seconds that a row stays unseen; 0: for ever.
        now: For tests: what to take for now.
    """

    name = "descriptors"
    hears_bell = False

    def __init__(self, schema: Schema, *, retention: float, now: Callable[[], datetime | None] = lambda: None) -> None:
        self._schema = schema
        self._retention = retention
        self._now = now
        self._pause = min(max(retention / 10, 0.2), PAUSE)

    def run(self, conn: Connection, held_seconds: float) -> float:
        """Delete one batch."""
        if not self._retention:
            return PAUSE
        try:
            deleted = forget(conn, self._schema, after=self._retention, limit=BATCH, now=self._now())
        except LockNotAvailable:
            log.warning("somebody has a table of the catalogue to himself: again in %.0f s", PAUSE)
            return PAUSE
        return 0.0 if deleted >= BATCH else self._pause
