"""Chore: keep the index of job ids up to date, which inserts leave alone since they are faster so."""

from __future__ import annotations

from time import monotonic

from psycopg import Connection

from awa.storage import lookup
from awa.storage.ring import SLOTS
from awa.storage.schema import Schema

BUDGET = 0.03
"""Seconds after which a run leaves the rest to the next, which comes at once but lets other chores in between."""

RANGES = 8
"""Ranges of pages that one statement reads, a few milliseconds."""

PAUSE = 5.0
"""Seconds between looks for new pages."""


class Summarize:
    """Goes through the pages of every slot, once each."""

    name = "summarize"
    hears_bell = False

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._reached = [0] * SLOTS
        self._ran_at = 0.0

    def run(self, conn: Connection, held_seconds: float) -> float:
        """Go on where the last run ended."""
        now = monotonic()
        if held_seconds < now - self._ran_at:
            # another led meanwhile and may have emptied a slot, which is full again; what is noted costs little
            self._reached = [0] * SLOTS
        self._ran_at = now
        for slot in range(SLOTS):
            first = self._reached[slot]
            while (reached := lookup.summarize(conn, self._schema, slot, first, ranges=RANGES)) != first:
                self._reached[slot] = first = reached
                if monotonic() - now >= BUDGET:
                    return 0.0
        return PAUSE
