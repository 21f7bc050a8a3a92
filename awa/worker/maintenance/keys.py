"""Chore: remove unique keys whose jobs have ended, or are gone, and that nobody removed when they did.

It is for tidiness alone: whoever wants such a key takes it.
"""

from __future__ import annotations

import os
from time import monotonic

from psycopg import Connection

from awa.storage.keys import sweep_keys
from awa.storage.schema import Schema

BATCH = 300
"""Keys of one run."""

BUDGET = 0.02
"""Seconds after which a run looks at no more keys that need a search."""

SHARE = 30
"""A run rests so many times as long as it took."""

PAUSE = 30.0
"""Seconds between two walks over all keys."""


class Keys:
    """Walks over all keys in their order, a few at a time; it begins anywhere, since leaders may change often.

    Args:
        pause: Seconds between two walks.
    """

    name = "keys"
    hears_bell = False

    def __init__(self, schema: Schema, *, pause: float = PAUSE) -> None:
        self._schema = schema
        self._pause = pause
        self._after = os.urandom(16)

    def run(self, conn: Connection, held_seconds: float) -> float:
        """Go on where the last run ended."""
        started = monotonic()
        reached, _ = sweep_keys(conn, self._schema, after=self._after, limit=BATCH, seconds=BUDGET)
        self._after = b"" if reached is None else reached
        return self._pause if reached is None else (monotonic() - started) * SHARE
