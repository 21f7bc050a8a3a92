"""Kinds of jobs: which there are, how many jobs each has, by queue and state, and since when the oldest of them waits.

No index knows the kind of a job: what is many is estimated from some pages of a table, which may have none of a
rare kind.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime

from awa.errors import KindNotFound
from awa.job import JobState
from awa.storage import queues
from awa.storage.descriptors import DescriptorInfo, read_descriptors
from awa.storage.queues import Count
from awa.storage.snapshot import Look
from awa.wording import listed

SAMPLE_PAGES = 100
"""Pages of a table that an estimate reads; a table that has less than twice as many is counted.

Fewer than for queues: it takes longer to read the kind of each row than to count the rows.
"""


@dataclass(frozen=True, slots=True)
class Depth:
    """Jobs of a kind in a queue."""

    counts: dict[JobState, Count]
    """How many there are in each state; every state is there."""
    oldest_at: datetime | None = None
    """Since when the oldest available one has been available; None: none waits in line, or it is not known."""


@dataclass(frozen=True, slots=True)
class KindInfo:
    """A kind of jobs."""

    name: str
    """The kind."""
    descriptor: DescriptorInfo | None
    """How code describes it; None: not at all."""
    live_runtimes: int
    """How many live runtimes say that they handle it."""
    counts: dict[JobState, Count]
    """How many jobs it has in each state, as ``client.admin.kind_counts`` counts them."""
    oldest_at: datetime | None = None
    """Since when the oldest of its available jobs has been available, as far as it is known; None: of none is known."""
    queues: dict[str, Depth] = field(default_factory=dict)
    """What each queue has of it; a queue in which none was met is left out."""


COUNT = """
    SELECT queue, kind, state, n, is_exact, oldest_at
      FROM awa.kind_counts_v1(%(queues)s::text[], %(kinds)s::text[], %(exact)s, %(pages)s)
"""


def count_jobs(
    look: Look, *, kind: str | None = None, queue: str | None = None
) -> tuple[dict[str, dict[str, Depth]], set[JobState]]:
    """How many jobs of each kind each queue has, by kind and queue.

    Returns:
        What was met; and the states in which some queue has more jobs than were looked at: of a kind that was not met
        there, it is not known that it has none.

    Source: migrations/0030_kind_counts.sql.
    """
    rows = look.rows(
        COUNT,
        queues=None if queue is None else [queue],
        kinds=None if kind is None else [kind],
        exact=queues.EXACT_LIMIT,
        pages=SAMPLE_PAGES,
    )
    unsure = {(where, JobState(state)) for where, name, state, *_ in rows if name is None}
    found: dict[str, dict[str, Depth]] = {}
    for where, name, state, number, is_exact, oldest_at in rows:
        if name is None:
            continue
        nothing = Depth({one: Count(0, (where, one) not in unsure) for one in JobState})
        depth = found.setdefault(name, {}).setdefault(where, nothing)
        before = depth.counts[JobState(state)]  # what is available lies in two tables
        depth.counts[JobState(state)] = Count(before.value + number, before.is_exact and is_exact)
        if oldest_at is not None:
            found[name][where] = replace(depth, oldest_at=oldest_at)
    by_name = {name: dict(sorted(depths.items())) for name, depths in sorted(found.items())}
    return by_name, {state for _, state in unsure}


def summed(depths: Iterable[Depth], unsure: Collection[JobState]) -> dict[JobState, Count]:
    """What a kind has in all queues, by state, as :func:`count_jobs` has found it."""
    depths = list(depths)
    return {
        state: Count(
            sum(depth.counts[state].value for depth in depths),
            state not in unsure and all(depth.counts[state].is_exact for depth in depths),
        )
        for state in JobState
    }


# The kinds of a thousand runtimes are few different lists.
HANDLED = """
    SELECT t.kind, sum(s.n)
      FROM (SELECT i.kinds::text AS kinds, count(*) AS n
              FROM awa.live_runtimes i
             WHERE json_typeof(i.kinds) = 'array'
             GROUP BY 1) s
     CROSS JOIN LATERAL json_array_elements_text(s.kinds::json) t(kind)
     WHERE %(name)s::text IS NULL OR t.kind = %(name)s
     GROUP BY t.kind
"""

# A rare kind may be met nowhere, though it has run. Hours begin on the hour.
ATTEMPTED = """
    SELECT DISTINCT s.name
      FROM awa.statistics s
     WHERE s.step = 'hour' AND s.subject = 'kind' AND s.starts_at > now() - interval '25 h'
       AND (%(name)s::text IS NULL OR s.name = %(name)s)
"""


def list_kinds(look: Look) -> list[KindInfo]:
    """Every kind that has jobs or has had attempts today, that is described, or that a live runtime handles; by name.

    As far as they were met: see :func:`count_jobs`.
    """
    return _read(look, None)[0]


def get_kind(look: Look, kind: str) -> KindInfo:
    """One kind.

    Raises:
        KindNotFound: It is none of those that :func:`list_kinds` has.
    """
    found, unsure = _read(look, kind)
    if not found:
        shown = listed([ascii(one.name) for one in list_kinds(look)]) or "none"
        met = "not all jobs were looked at, and none of these is of it" if unsure else "it has no jobs"
        text = (
            f"no kind {kind!a} is known: {met}, none had an attempt in the last 24 hours, nothing describes it, no live"
            f" worker handles it; known are {shown}"
        )
        if unsure:
            text += f"; `awa job list {shlex.quote('kind:' + kind)}` looks at every job"
        raise KindNotFound(text, kind=kind)
    return found[0]


def _read(look: Look, kind: str | None) -> tuple[list[KindInfo], set[JobState]]:
    described = read_descriptors(look, "kind", kind)
    handled = {name: int(runtimes) for name, runtimes in look.rows(HANDLED, name=kind)}
    met, unsure = count_jobs(look, kind=kind)
    attempted = {name for (name,) in look.rows(ATTEMPTED, name=kind)}
    found = []
    for name in sorted(described.keys() | handled.keys() | met.keys() | attempted):
        depths = met.get(name, {})
        known = [depth.oldest_at for depth in depths.values() if depth.oldest_at is not None]
        counts, oldest_at = summed(depths.values(), unsure), min(known, default=None)
        found.append(KindInfo(name, described.get(name), handled.get(name, 0), counts, oldest_at, depths))
    return found, unsure
