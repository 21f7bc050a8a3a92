"""What the ledger says of limits, order and pauses when everything has ended.

Two witnesses say what ran at once: the database's rows, from claim to end, and the handlers, from their first line to
their last. What a runtime does that was taken for dead counts no more from its fence on, nor what a handler does after
a transaction in which it has completed its own attempt.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from psycopg import Connection
from psycopg.rows import class_row

from tests.chaos import ledger
from tests.chaos.checks import SHOWN, Check, Verdict


def install(conn: Connection[Any]) -> None:
    """Make the ledger, and beside it the tables of keys, limits and pauses."""
    ledger.install(conn)
    conn.execute(Path(__file__).with_name("evidence.sql").read_bytes())


@dataclass(frozen=True, slots=True)
class Attempt:
    """One claimed entry."""

    queue: str
    concurrency_key: str | None
    ordering_key: str | None
    mark: int
    entry_id: int
    claim_id: int
    claimed_at: datetime
    ended_at: datetime | None
    begun_at: datetime | None
    """When its handler began; None: it never did, or only after its runtime had been fenced."""
    left_at: datetime | None
    """When its handler ended or completed it, or its runtime was fenced."""


ATTEMPTS = """
    SELECT k.queue, k.concurrency_key, k.ordering_key, k.mark, e.entry_id, c.claim_id, c.at AS claimed_at,
           (SELECT min(x.at) FROM ledger.ends x WHERE x.entry_id = e.entry_id) AS ended_at,
           CASE WHEN (r.started_at < g.gone_at) IS NOT FALSE THEN r.started_at END AS begun_at,
           least(r.ended_at, g.gone_at,
                 (SELECT min(x.at) FROM ledger.ends x
                   WHERE x.entry_id = e.entry_id AND x.outcome = 'completed' AND x.flush IS NULL)) AS left_at
      FROM ledger.claims c
     CROSS JOIN LATERAL unnest(c.entry_ids) m
      JOIN ledger.entries e ON e.entry_id = m
      JOIN ledger.keyed k USING (mark)
      LEFT JOIN ledger.runs r ON r.entry_id = e.entry_id
      LEFT JOIN awa.gone_runtimes g ON g.runtime = c.runtime
     ORDER BY c.claim_id, e.entry_id
"""

Bound = Callable[[datetime], int | None]
"""How many were allowed at that time; None: any number."""

Span = tuple[datetime, datetime | None, datetime]
"""When it began, when it ended, when it was claimed."""


def overlaps(spans: Iterable[Span], bound: Bound) -> Iterator[tuple[datetime, int, int]]:
    """When more went on at once than was allowed as the newest of them was claimed: then, how many, and the bound."""
    events = []
    for number, (begin, end, claimed) in enumerate(spans):
        events.append((begin, 1, number, claimed))
        if end is not None and end > begin:
            events.append((end, 0, number, claimed))
    live: dict[int, datetime] = {}
    for at, begins, number, claimed in sorted(events):
        if not begins:
            live.pop(number, None)
            continue
        live[number] = claimed
        allowed = bound(max(live.values()))
        if allowed is not None and len(live) > allowed:
            yield at, len(live), allowed


def bounds(said: Sequence[tuple[datetime, int | None]]) -> Bound:
    """What was last said before a time; *said* is in order."""
    times = [at for at, _ in said]

    def bound(at: datetime) -> int | None:
        place = bisect_right(times, at)
        return said[place - 1][1] if place else None

    return bound


def _one(at: datetime) -> int:
    return 1


def _grouped(attempts: Iterable[Attempt], key: Callable[[Attempt], Hashable]) -> Mapping[Hashable, list[Attempt]]:
    groups: dict[Hashable, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        if (place := key(attempt)) is not None:
            groups[place].append(attempt)
    return groups


def _too_many(attempts: Sequence[Attempt], scope: str, bound_of: Callable[[str], Bound]) -> Iterator[Verdict]:
    def key(a: Attempt) -> Hashable:
        value = {"queue": "", "concurrency_key": a.concurrency_key, "ordering_key": a.ordering_key}[scope]
        return None if value is None else (a.queue, value)

    witnesses: dict[str, Callable[[Attempt], Span | None]] = {
        "claimed": lambda a: (a.claimed_at, a.ended_at, a.claimed_at),
        "running, by the handlers": lambda a: a.begun_at and (a.begun_at, a.left_at, a.claimed_at),
    }
    groups = _grouped(attempts, key)
    for witness, span in witnesses.items():
        found = [
            f"{name}: {count} at {at}, allowed are {allowed}"
            for name, members in groups.items()
            for at, count, allowed in overlaps(filter(None, map(span, members)), bound_of(members[0].queue))
        ]
        yield Verdict(f"too many of one {scope}, {witness}", len(found), found[:SHOWN])


CHECKS = (
    Check(
        "ran before an earlier job of its ordering key had ended",
        """
        SELECT format('queue %s, key %s: mark %s claimed at %s, mark %s before it ended at %s',
                      queue, ordering_key, mark, claimed_at, before, ended_at)
          FROM (SELECT k.queue, k.ordering_key, k.mark,
                       (SELECT min(c.at) FROM a_claimed c WHERE c.mark = k.mark) AS claimed_at,
                       lag(k.mark) OVER w AS before,
                       lag((SELECT max(f.at) FROM a_final f JOIN a_job j USING (job) WHERE j.mark = k.mark)) OVER w
                           AS ended_at
                  FROM ledger.keyed k
                 WHERE k.ordering_key IS NOT NULL
                WINDOW w AS (PARTITION BY k.queue, k.ordering_key ORDER BY k.mark)) t
         WHERE claimed_at IS NOT NULL AND before IS NOT NULL AND coalesce(ended_at > claimed_at, true)
        """,
    ),
    Check(
        # Where one may run at a time; a job's first turn, since later ones come after a delay. What was carried forward
        # has left its place: segments are not always carried in the order in which they were filled.
        "overtook an earlier job of its concurrency key",
        """
        SELECT format('queue %s, key %s: mark %s in claim %s, a later one in claim %s',
                      queue, concurrency_key, mark, claim_id, earliest)
          FROM (SELECT k.queue, k.concurrency_key, k.mark, c.claim_id,
                       min(c.claim_id) OVER (PARTITION BY k.queue, k.concurrency_key ORDER BY k.mark DESC
                                             ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS earliest
                  FROM ledger.keyed k
                  JOIN (SELECT mark, min(claim_id) AS claim_id FROM a_claimed GROUP BY mark) c USING (mark)
                 WHERE k.concurrency_key IS NOT NULL AND k.ordering_key IS NULL
                   AND NOT EXISTS (SELECT FROM ledger.entries e JOIN ledger.ends x USING (entry_id)
                                    WHERE e.mark = k.mark AND x.outcome = 'carried')
                   AND 1 = ALL (SELECT l.max_running_per_key FROM ledger.limits l WHERE l.queue = k.queue)) t
         WHERE earliest < claim_id
        """,
    ),
    Check(
        "claimed while paused",
        """
        SELECT format('queue %s: mark %s at %s, paused from %s to %s', k.queue, k.mark, c.at, p.at, p.until)
          FROM (SELECT queue, is_paused, at, lead(at) OVER (PARTITION BY queue ORDER BY at) AS until
                  FROM ledger.pauses) p
          JOIN ledger.keyed k USING (queue)
          JOIN a_claimed c USING (mark)
         WHERE p.is_paused AND c.at > p.at AND c.at < coalesce(p.until, 'infinity')
        """,
    ),
    Check(
        "set aside at the end",
        "SELECT format('job %s waits for %s %s, is %s', id, waits_for, wait_key, state) FROM awa.waiting_jobs",
    ),
    Check(
        "keys that are kept at the end",
        """
        SELECT format('queue %s, %s %s: job %s', g.queue, g.scope, g.key, g.id)
          FROM awa.grants g
         WHERE NOT g.is_over AND g.id <> 0
           AND (g.claim_id = 0 OR EXISTS (SELECT FROM awa.open_attempts() o WHERE o.entry_id = g.entry_id)
                OR NOT EXISTS (SELECT FROM a_final f WHERE f.job = g.id))
        """,
    ),
)

PREPARE = """
    CREATE TEMP TABLE a_claimed AS
        SELECT e.mark, c.claim_id, c.at
          FROM ledger.claims c CROSS JOIN LATERAL unnest(c.entry_ids) m JOIN ledger.entries e ON e.entry_id = m;
    CREATE INDEX ON a_claimed (mark);
    ANALYZE a_claimed;
"""


def check(conn: Connection[Any]) -> Iterator[Verdict]:
    """Check limits, order and pauses; after :func:`tests.chaos.checks.check`, whose tables it reads."""
    conn.execute(PREPARE)
    with conn.cursor(row_factory=class_row(Attempt)) as cursor:
        attempts = cursor.execute(ATTEMPTS).fetchall()
    said = conn.execute("SELECT queue, at, max_running, max_running_per_key FROM ledger.limits ORDER BY at").fetchall()

    def of_queue(queue: str) -> Bound:
        return bounds([(at, most) for name, at, most, _ in said if name == queue])

    def of_key(queue: str) -> Bound:
        return bounds([(at, most) for name, at, _, most in said if name == queue])

    yield from _too_many(attempts, "queue", of_queue)
    yield from _too_many(attempts, "concurrency_key", of_key)
    yield from _too_many(attempts, "ordering_key", lambda queue: _one)
    for each in CHECKS:
        found = conn.execute(f"SELECT what, count(*) OVER () FROM ({each.query}) t(what) LIMIT {SHOWN}").fetchall()
        yield Verdict(each.name, found[0][1] if found else 0, [row[0] for row in found])
