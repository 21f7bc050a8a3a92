"""Statistics of attempts that have ended, as they are read. ``gathering`` fills them; see
migrations/0027_statistics.sql.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from awa.storage.snapshot import Look

KEPT = {"minute": timedelta(hours=3), "hour": timedelta(days=30)}
"""For how long the rows of a step are kept."""

LENGTHS = {"15m": timedelta(minutes=15), "1h": timedelta(hours=1), "24h": timedelta(hours=24)}
"""The windows that are read, from which to now."""

BUCKETS = 4
"""Buckets of times in which they double; see the migration."""

Step = Literal["minute", "hour"]
Subject = Literal["queue", "kind"]

STEPS: tuple[Step, ...] = ("minute", "hour")
SUBJECTS: tuple[Subject, ...] = ("queue", "kind")

OUTCOMES = ("completed", "retried", "snoozed", "failed", "cancelled", "rescued")
"""Of attempts that had begun. One that was released, or set aside, had not."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Times in milliseconds, as exact as their buckets: within 9.1 %, and what is below a millisecond within one."""

    p50: float
    """Half of the attempts took at most this."""
    p95: float
    """95 of a hundred."""
    p99: float
    """99 of a hundred."""
    max: float
    """The longest, exactly; where ``is_sampled``, of those that were looked at."""


@dataclass(frozen=True, slots=True)
class Window:
    """Attempts that ended in a span of time. One that was handed back before it began is none."""

    since: datetime
    """Its begin: that of a minute or an hour, by UTC."""
    until: datetime
    """Up to which everything was gathered; *since* when nothing was."""
    started: int
    """Attempts that had begun, and ended in this time: the sum of the following."""
    completed: int
    """Of these, as many completed their job."""
    retried: int
    """Failed, and their job is tried again."""
    snoozed: int
    """Asked to run later."""
    failed: int
    """Failed, and their job with them."""
    cancelled: int
    """Ended their job as cancelled; one that is cancelled before it starts has no attempt."""
    rescued: int
    """Lost their worker, and their job is tried again."""
    per_second: float
    """Completed jobs a second, from *since*, or from when gathering began if that was later, to *until*."""
    is_sampled: bool
    """Whether some attempts stand for others: then the numbers of a kind are estimates, and all times are."""
    wait_ms: Percentiles | None
    """From when they could be claimed until they were; None when there were none."""
    run_ms: Percentiles | None
    """What they took; a rescued attempt tells nothing. None when there were none."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What was going on in a queue, or with the jobs of a kind."""

    name: str
    """Of the queue or the kind."""
    windows: dict[str, Window]
    """``15m``, ``1h`` and ``24h``: the last whole minutes, or hours, of so long, and what has begun."""


# A span that begins within a step begins with the next one. Lengths are seconds: an interval of 24 hours would come as
# one of a day, which is another when the clocks of the session's zone change.
_WINDOWS = """
    SELECT w.n::integer AS n, w.step,
           date_trunc(w.step, t.now - interval '1 s' * w.length, 'UTC') + ('1 ' || w.step)::interval AS since,
           t.now AS until
      FROM (SELECT coalesce(%(now)s::timestamptz, clock_timestamp()) AS now OFFSET 0) t
     CROSS JOIN unnest(%(steps)s::text[], %(lengths)s::float8[]) WITH ORDINALITY w(step, length, n)
"""

_POINTS = """
    SELECT g.n::integer AS n, %(step)s::text AS step, g.at AS since,
           least(g.at + ('1 ' || %(step)s)::interval, t.now) AS until
      FROM (SELECT coalesce(%(now)s::timestamptz, clock_timestamp()) AS now OFFSET 0) t
     CROSS JOIN LATERAL (SELECT t.now - interval '1 s' * %(kept)s::float8 AS first) k
     CROSS JOIN generate_series(date_trunc(%(step)s, greatest(%(since)s::timestamptz, k.first), 'UTC'), t.now,
                                ('1 ' || %(step)s)::interval) WITH ORDINALITY g(at, n)
"""

# The seconds are those of which something is known.
LIST_SPANS = """
    SELECT s.n, s.since, greatest(s.since, least(s.until, p.reached_at)),
           greatest(extract(epoch FROM least(s.until, p.reached_at) - greatest(s.since, p.began_at))::float8, 0)
      FROM ({spans}) s CROSS JOIN awa.statistics_progress p
     WHERE {which}
     ORDER BY s.n
"""

_FOUND = """
    SELECT s.n AS span, t.*
      FROM ({spans}) s
     CROSS JOIN LATERAL (SELECT * FROM awa.statistics t
                          WHERE t.step = s.step AND t.subject = %(by)s AND t.starts_at {when} {name} OFFSET 0) t
"""

READ_NUMBERS = f"""
    SELECT f.name, f.span, {", ".join(f"sum(f.{one})" for one in OUTCOMES)}, bool_or(f.is_sampled),
           max(f.wait_max_ms), max(f.run_max_ms)
      FROM ({_FOUND}) f
     GROUP BY 1, 2
"""

# Hundreds of thousands of buckets may have to be added up: they are unpacked where columns are listed, since a function
# in FROM keeps what it gives, and hashed by one number, not by a name, a span and a bucket, nor sorted.
HASHED = "SELECT set_config('enable_sort', 'off', true), set_config('work_mem', '32MB', true)"

READ_TIMES = f"""
    WITH found AS MATERIALIZED ({_FOUND}
    ), names AS MATERIALIZED (
        SELECT d.name, row_number() OVER () AS n FROM (SELECT DISTINCT f.name FROM found f) d
    ), numbered AS NOT MATERIALIZED (
        SELECT (m.n * 1024 + f.span) * 512 AS cell, f.wait_buckets, f.waits, f.run_buckets, f.runs
          FROM found f JOIN names m USING (name)
    ), cells AS (
        SELECT c.cell, sum(c.n) AS n
          FROM (SELECT f.cell + unnest(f.wait_buckets) AS cell, unnest(f.waits) AS n FROM numbered f
                 UNION ALL
                SELECT f.cell + 256 + unnest(f.run_buckets), unnest(f.runs) FROM numbered f) c
         GROUP BY 1
    ), ranked AS (
        SELECT c.cell >> 8 AS row, c.cell & 255 AS bucket, sum(c.n) OVER (PARTITION BY c.cell >> 8) AS total,
               sum(c.n) OVER (PARTITION BY c.cell >> 8 ORDER BY c.cell) AS upto
          FROM cells c
    )
    SELECT m.name, (r.row >> 1 & 1023)::integer, r.row & 1 = 0, r.p50::integer, r.p95::integer, r.p99::integer
      FROM (SELECT r.row, min(r.bucket) FILTER (WHERE r.upto >= r.total * 0.5) AS p50,
                   min(r.bucket) FILTER (WHERE r.upto >= r.total * 0.95) AS p95,
                   min(r.bucket) FILTER (WHERE r.upto >= r.total * 0.99) AS p99
              FROM ranked r
             GROUP BY 1) r
      JOIN names m ON m.n = r.row >> 11
"""


def read_windows(look: Look, by: Subject, name: str | None = None, *, now: datetime | None = None) -> list[Statistics]:
    """The windows of every name with attempts that ended in one, by name; or of *name* alone, whatever it has.

    Args:
        now: What to take for now; None: the database's clock.
    """
    params: dict[str, Any] = {
        "by": by,
        "name": name,
        "now": now,
        "steps": ["hour" if length > KEPT["minute"] else "minute" for length in LENGTHS.values()],
        "lengths": [length.total_seconds() for length in LENGTHS.values()],
    }
    found = _read(look, _WINDOWS, ">= s.since", "true", params)
    names = found.names if name is None else {name: found.names.get(name, {})}
    return [
        Statistics(one, dict(zip(LENGTHS, (spans.get(n, none) for n, none in found.empty.items()), strict=True)))
        for one, spans in sorted(names.items())
    ]


def read_history(
    look: Look, by: Subject, name: str, *, step: Step, since: datetime | None = None, now: datetime | None = None
) -> list[Window]:
    """One window for each step from the one with *since* on, oldest first; None: from as long ago as there can be any.

    Args:
        now: What to take for now; None: the database's clock.
    """
    params: dict[str, Any] = {"by": by, "name": name, "now": now, "step": step, "since": since}
    params["kept"] = KEPT[step].total_seconds()
    # not those that were over when gathering began
    found = _read(look, _POINTS, "= s.since", "s.until > p.began_at", params)
    points = found.names.get(name, {})
    return [points.get(n, none) for n, none in found.empty.items()]


@dataclass(frozen=True, slots=True)
class _Found:
    empty: dict[int, Window]
    """Each span by its number, in order, with nothing in it."""
    names: dict[str, dict[int, Window]]
    """Name -> span -> what there is."""


def _read(look: Look, spans: str, when: str, which: str, params: dict[str, Any]) -> _Found:
    name = "" if params["name"] is None else "AND t.name = %(name)s"
    parts = {"spans": spans, "when": when, "which": which, "name": name}
    bounds = {span: bound for span, *bound in look.rows(LIST_SPANS.format(**parts), **params)}
    look.rows(HASHED)
    times: dict[tuple[str, int, bool], list[int]] = {}
    for name, span, is_wait, *buckets in look.rows(READ_TIMES.format(**parts), **params):
        times[name, span, is_wait] = buckets
    names: dict[str, dict[int, Window]] = {}
    for name, span, *numbers, is_sampled, wait_max, run_max in look.rows(READ_NUMBERS.format(**parts), **params):
        if span not in bounds:
            continue  # the server's clock was set back, or another server goes by another one
        names.setdefault(name, {})[span] = _window(
            bounds[span],
            numbers,
            is_sampled,
            _percentiles(times.get((name, span, True)), wait_max),
            _percentiles(times.get((name, span, False)), run_max),
        )
    empty = {span: _window(bound, [0.0] * len(OUTCOMES), False, None, None) for span, bound in bounds.items()}
    return _Found(empty, names)


def _window(
    bounds: list[Any],
    numbers: Sequence[float],
    is_sampled: bool,
    wait_ms: Percentiles | None,
    run_ms: Percentiles | None,
) -> Window:
    since, until, seconds = bounds
    counts = dict(zip(OUTCOMES, map(round, numbers), strict=True))
    return Window(
        since=since.astimezone(UTC),
        until=until.astimezone(UTC),
        started=sum(counts.values()),
        **counts,
        per_second=counts["completed"] / seconds if seconds else 0.0,
        is_sampled=is_sampled,
        wait_ms=wait_ms,
        run_ms=run_ms,
    )


def _percentiles(buckets: list[int] | None, most: float | None) -> Percentiles | None:
    if buckets is None or most is None:
        return None
    # the middle of a bucket on the scale by which they are cut, so that it is as far from either end
    p50, p95, p99 = (min(2 ** ((bucket - 0.5) / BUCKETS) if bucket else 0.5, most) for bucket in buckets)
    return Percentiles(p50, p95, p99, most)
