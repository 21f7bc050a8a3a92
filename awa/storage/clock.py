"""The database's time, as it is known without asking each time."""

from __future__ import annotations

import time
from typing import Any

from psycopg import Connection, Cursor
from psycopg.rows import tuple_row

LASTS = 60.0
"""Seconds after which the database is asked again."""

NOW = "SELECT extract(epoch FROM clock_timestamp())::double precision"


class DatabaseClock:
    """Tells the database's time from when it was last asked, and a clock that nobody sets."""

    def __init__(self) -> None:
        self._asked: tuple[float, float] | None = None  # monotonic time, the database's; replaced as a whole

    def read(self, conn: Connection[Any]) -> float:
        """Seconds since 1970, by the database; it is asked over *conn*, at most once a minute."""
        now = time.monotonic()
        asked = self._asked
        if asked is None or now - asked[0] > LASTS:
            with Cursor(conn, row_factory=tuple_row) as cursor:
                found = cursor.execute(NOW).fetchone()
            assert found is not None
            answered = time.monotonic()
            self._asked = asked = (now + answered) / 2, float(found[0])
            now = answered
        return asked[1] + (now - asked[0])
