"""Chore: make jobs available when their time has come."""

from __future__ import annotations

from time import monotonic

from psycopg import Connection

from awa.storage import waiting
from awa.storage.schema import Schema

BATCH = 1000

LONGEST_SLEEP = 1.0
"""Seconds: a job that is inserted further ahead of its time than this, and then some, rings nobody."""

FLOOR = 2.0
"""Seconds that a quick pass looks back, on top of the time since the last pass that left nothing behind. Looking back
no further keeps the scan off dead rows. Two of the longest sleeps: what commits less than that after its time is found
at once, whenever the passes were; what commits later waits for a full pass."""

FULL_EVERY = 15.0
"""Seconds between full passes, or twenty times what one costs, whichever is more."""

FULL_AT_LEAST_EVERY = 60.0
"""Seconds between full passes, whatever they cost."""

SHORTEST_SLEEP = 0.005
"""Seconds between passes. For a job that is due and that somebody else holds, they come ever further apart."""


class Promote:
    """Moves due jobs in batches by due time, and sleeps until the next is due.

    However long the passes were away (the server was, or another worker led), the next looks back to the last.
    """

    name = "promote"
    hears_bell = True

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._full_at = 0.0
        self._caught_up_at: float | None = None
        """When the last pass began that left nothing behind."""

    def run(self, conn: Connection, held_seconds: float) -> float:
        """Move what is due; return the seconds until the next is."""
        now = monotonic()
        is_full = self._caught_up_at is None or now >= self._full_at
        behind = FLOOR if self._caught_up_at is None else FLOOR + now - self._caught_up_at
        moved = waiting.promote(conn, self._schema, behind=None if is_full else behind, limit=BATCH)
        if moved == BATCH:
            return 0.0
        if is_full:
            self._full_at = now + min(max(FULL_EVERY, 20 * (monotonic() - now)), FULL_AT_LEAST_EVERY)
        sleep = LONGEST_SLEEP
        ahead = waiting.seconds_to_next(conn, self._schema, behind=behind)
        is_held = ahead is not None and -ahead > monotonic() - now  # due before this pass, and not moved
        if ahead is not None and is_held:
            sleep = min(sleep, -ahead / 4)
            ahead = waiting.seconds_to_next(conn, self._schema, behind=0.0)
        if is_full or not is_held:
            # who holds a row past a full pass has it wait for the next: there is an end to how far quick ones look back
            self._caught_up_at = now
        return max(sleep if ahead is None else min(sleep, ahead), SHORTEST_SLEEP)
