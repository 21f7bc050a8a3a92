"""Counts open attempts several times a second, each time in one snapshot, and compares them with what was allowed.

Now and then it has the whole storage checked: at no moment may anything be found.

An attempt that began before its limit was lowered may go on. So more may be open than the limit says, but never more
than were open a moment ago.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg

from awa.storage.check import check_storage
from awa.storage.schema import Schema
from tests.chaos.checks import SHOWN, Verdict

EVERY = 0.15
"""Seconds between two samples."""

CHECKED_EVERY = 2.0
"""Seconds between two checks of the storage."""

OPEN = """
    WITH said AS (
        SELECT DISTINCT ON (l.queue) l.queue, l.max_running, l.max_running_per_key
          FROM ledger.limits l ORDER BY l.queue, l.at DESC
    ), attempt AS MATERIALIZED (
        SELECT o.queue, j.concurrency_key, j.ordering_key
          FROM awa.open_attempts() o JOIN awa.jobs j USING (slot, entry_id)
    )
    SELECT a.queue, 'queue', '', s.max_running, count(*)::integer
      FROM attempt a JOIN said s USING (queue) GROUP BY 1, 3, 4
     UNION ALL
    SELECT a.queue, 'key', a.concurrency_key, s.max_running_per_key, count(*)::integer
      FROM attempt a JOIN said s USING (queue) WHERE a.concurrency_key IS NOT NULL GROUP BY 1, 3, 4
     UNION ALL
    SELECT a.queue, 'order', a.ordering_key, 1, count(*)::integer
      FROM attempt a WHERE a.ordering_key IS NOT NULL GROUP BY 1, 3
"""

Sample = tuple[str, str, str, int | None, int]
"""Queue, scope, key, what is allowed (None: anything), how many are open."""


class Ceilings:
    """How many may be open, by queue, scope and key: the limit, or what was open before it was lowered."""

    def __init__(self) -> None:
        self._ceilings: dict[tuple[str, str, str], int] = {}

    def look(self, sample: list[Sample]) -> Iterator[str]:
        """What is too many in one sample."""
        before, self._ceilings = self._ceilings, {}
        for queue, scope, key, limit, count in sample:
            if limit is None:
                continue
            place = (queue, scope, key)
            ceiling = max(limit, before.get(place, 0))
            if count > ceiling:
                yield f"{count} are open of {scope} {key or queue!r} in queue {queue!r}, allowed are {ceiling}"
            self._ceilings[place] = max(limit, min(ceiling, count))


class Sampler:
    """Samples in a thread of its own, between entering and leaving."""

    def __init__(self, database: str) -> None:
        self._database = database
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._shown: list[str] = []
        self._findings: list[str] = []
        self.samples = 0
        """How many were taken."""
        self.violations = 0
        """How often something was too many."""
        self.most_open = 0
        """Most attempts that were open at once, in all queues."""
        self.error: BaseException | None = None

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join(10.0)

    def verdicts(self) -> list[Verdict]:
        """What was found, once it has ended."""
        if self.error is not None:
            raise self.error
        return [
            Verdict("more open than allowed, in a sample", self.violations, self._shown),
            Verdict("found by `awa storage check`, meanwhile", len(self._findings), self._findings[:SHOWN]),
        ]

    def _run(self) -> None:
        ceilings = Ceilings()
        try:
            with psycopg.connect(self._database, autocommit=True, application_name="chaos") as conn:
                checks_at = time.monotonic()
                while not self._stop.wait(EVERY):
                    if time.monotonic() > checks_at:
                        checks_at = time.monotonic() + CHECKED_EVERY
                        self._findings += (
                            f"{f.where}: {f.text} {f.sample}" for f in check_storage(conn, Schema()).findings
                        )
                    sample: list[Sample] = conn.execute(OPEN).fetchall()
                    self.samples += 1
                    self.most_open = max(self.most_open, sum(row[4] for row in sample if row[1] == "queue"))
                    said = list(ceilings.look(sample))
                    self.violations += len(said)
                    self._shown += said[: SHOWN - len(self._shown)]
        except BaseException as error:
            self.error = error
