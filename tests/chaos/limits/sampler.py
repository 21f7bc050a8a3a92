"""Counts open attempts several times a second, each time in one snapshot, and compares them with what was allowed.

Now and then it has the whole storage checked: at no moment may anything be found.

An attempt that began before its limit was lowered may go on, so more may be open than the limit says. But when the
newest of those that are open was claimed, the others were open too: they were never more than was allowed then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
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
    WITH attempt AS MATERIALIZED (
        SELECT o.queue, j.concurrency_key, j.ordering_key, c.at
          FROM awa.open_attempts() o
          JOIN awa.jobs j USING (slot, entry_id)
          JOIN ledger.claims c USING (slot, claim_id)
    ), held AS (
        SELECT a.queue, s.scope, s.key, count(*)::integer AS number, max(a.at) AS newest
          FROM attempt a
         CROSS JOIN LATERAL (VALUES ('queue', a.queue), ('key', a.concurrency_key), ('order', a.ordering_key))
                            AS s(scope, key)
         WHERE s.key IS NOT NULL
         GROUP BY 1, 2, 3
    )
    SELECT h.queue, h.scope, h.key, h.number,
           CASE h.scope WHEN 'queue' THEN l.max_running WHEN 'key' THEN l.max_running_per_key ELSE 1 END
      FROM held h
      LEFT JOIN LATERAL (SELECT * FROM ledger.limits l
                          WHERE l.queue = h.queue AND l.at < h.newest ORDER BY l.at DESC LIMIT 1) l ON true
"""

Sample = tuple[str, str, str, int, int | None]
"""Queue, scope, key, how many are open, how many were allowed when the newest of them was claimed; None: anything."""


def take_sample(conn: psycopg.Connection[Any]) -> list[Sample]:
    """What is open now."""
    return conn.execute(OPEN).fetchall()


def too_many(samples: Iterable[Sample]) -> Iterator[str]:
    """What of it is more than was allowed."""
    for queue, scope, key, number, allowed in samples:
        if allowed is not None and number > allowed:
            yield f"{number} are open of {scope} {key!r} in queue {queue!r}, allowed were {allowed}"


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
        try:
            with psycopg.connect(self._database, autocommit=True, application_name="chaos") as conn:
                checks_at = time.monotonic()
                while not self._stop.wait(EVERY):
                    if time.monotonic() > checks_at:
                        checks_at = time.monotonic() + CHECKED_EVERY
                        self._findings += (
                            f"{f.where}: {f.text} {f.sample}" for f in check_storage(conn, Schema()).findings
                        )
                    sample = take_sample(conn)
                    self.samples += 1
                    self.most_open = max(self.most_open, sum(row[3] for row in sample if row[1] == "queue"))
                    said = list(too_many(sample))
                    self.violations += len(said)
                    self._shown += said[: SHOWN - len(self._shown)]
        except BaseException as error:
            self.error = error
