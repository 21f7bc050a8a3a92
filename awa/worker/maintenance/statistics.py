"""Chore: gather statistics of the attempts that have ended, from what workers have recorded anyway.

A round first looks again at the claims that it knows to be open, then at those that are new, queue by queue. A look is
one statement over so many claims that it takes some tens of milliseconds. All it needs to know is in the database, so
another leader goes on where this one is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from datetime import datetime
from time import monotonic

from psycopg import Connection
from psycopg.errors import LockNotAvailable

from awa.storage import gathering
from awa.storage.schema import Schema

log = logging.getLogger("awa.maintenance")

BUDGET = 0.05
"""Seconds after which a run leaves the rest to the next, which lets other chores in between."""

PAUSE = 5.0
"""Seconds between rounds."""

PACE = 4
"""A run is followed by a pause of at least so many times what it took: it takes a fifth of a core at most."""

CLAIMS = 200
"""Claims of one look."""

QUEUES = 50
"""Queues of one look at new claims."""

NAMES = 500
"""Queues that are asked at once whether they have new claims."""

KEEPING = 60.0
"""Seconds between two deletions of what is old."""

PATIENCE = 5.0
"""Most seconds of work that a segment is kept for which is to be emptied."""


LOCKED = 10.0
"""Seconds until the next try when somebody locks a table."""


class Statistics:
    """Adds to the statistics what has ended since.

    Args:
        now: For tests: what to take for now, for what is deleted.
    """

    name = "statistics"
    hears_bell = False

    def __init__(self, schema: Schema, *, now: Callable[[], datetime | None] = lambda: None) -> None:
        self._schema = schema
        self._now = now
        self._conn: Connection | None = None
        self._steps: Generator[None, None, None] | None = None
        self._keep_at = 0.0

    def run(self, conn: Connection, held_seconds: float) -> float:
        """Go on with the round, or begin one; return the seconds until there is more to do."""
        began = monotonic()
        if conn is not self._conn:
            self._conn, self._steps = conn, None
        steps = self._steps or self.gather(conn)
        self._steps = None  # for good, if it raises
        try:
            for _ in steps:
                if monotonic() - began >= BUDGET:
                    self._steps = steps
                    return (monotonic() - began) * PACE
            if began >= self._keep_at:
                gathering.delete_old(conn, self._schema, now=self._now())
                self._keep_at = began + KEEPING
        except LockNotAvailable:
            log.warning("somebody has a table of the statistics to himself: again in %.0f s", LOCKED)
            return LOCKED
        return max(PAUSE, (monotonic() - began) * PACE)

    def catch_up(self, conn: Connection) -> Generator[None, None, None]:
        """Add all that has ended by now, for a segment that is to be emptied; yields after every statement.

        When that fails, or takes too long, the segment goes all the same, and what was not gathered is not counted.
        """
        worked, began = 0.0, monotonic()
        try:
            for _ in self.gather(conn):
                worked += monotonic() - began
                if worked >= PATIENCE:
                    log.warning("statistics lag behind: some attempts of a segment that goes may not be counted")
                    return
                yield
                began = monotonic()
        except Exception:
            if conn.closed:
                raise
            log.exception("maintenance: %s failed", self.name)

    def gather(self, conn: Connection) -> Generator[None, None, None]:
        """One round; yields after every statement. It ends early when somebody else is adding at that moment."""
        began, newest = gathering.begin_round(conn, self._schema)
        yield
        after, count = 0, CLAIMS
        while count == CLAIMS:
            if (found := gathering.add_open(conn, self._schema, after=after, limit=CLAIMS)) is None:
                return
            count, after = found
            yield
        name, asked = "", NAMES
        while asked == NAMES:
            queues = gathering.list_news(conn, self._schema, after=name, limit=NAMES)
            yield
            asked, name = len(queues), queues[-1][0] if queues else ""
            having_news = [queue for queue, is_new in queues if is_new]
            for some in (having_news[at : at + QUEUES] for at in range(0, len(having_news), QUEUES)):
                while some:
                    limit = CLAIMS // len(some)
                    added = gathering.add_new(conn, self._schema, some, upto=newest, limit=limit)
                    if added is None:
                        return
                    some = [queue for queue in some if added.get(queue) == limit]
                    yield
        gathering.end_round(conn, self._schema, began)
