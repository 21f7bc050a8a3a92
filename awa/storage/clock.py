"""The database's time, as it is known without asking each time."""

from __future__ import annotations

import time
from typing import Any

from psycopg import AsyncConnection

from awa.lent import Driver
from awa.storage import drivers

LASTS = 60.0
"""Seconds after which the database is asked again."""

NOW = "SELECT extract(epoch FROM clock_timestamp())::text"


class DatabaseClock:
    """Tells the database's time from when it was last asked, and a clock that nobody sets."""

    def __init__(self) -> None:
        self._asked: tuple[float, float] | None = None  # monotonic time, the database's; replaced as a whole

    def read(self, conn: Driver) -> float:
        """Seconds since 1970, by the database; it is asked over *conn*, at most once a minute."""
        now = time.monotonic()
        known = self._known(now)
        return self._answered(now, drivers.rows(conn, NOW, ())) if known is None else known

    async def read_async(self, conn: AsyncConnection[Any]) -> float:
        """As :meth:`read`."""
        now = time.monotonic()
        known = self._known(now)
        return self._answered(now, await drivers.rows_async(conn, NOW, ())) if known is None else known

    def _known(self, now: float) -> float | None:
        asked = self._asked
        return None if asked is None or now - asked[0] > LASTS else asked[1] + (now - asked[0])

    def _answered(self, asked_at: float, found: list[tuple[Any, ...]]) -> float:
        now = time.monotonic()
        self._asked = asked = (asked_at + now) / 2, float(found[0][0])
        return asked[1] + (now - asked[0])
