"""Listing jobs, state by state and newest first, page by page.

Each state has a source or two, and each source two statements. *Places* tells where the next jobs may be, by an index:
ids, positions in a lane, or claims. *Jobs* reads what is there and leaves out what does not fit. A place has a key of
two numbers that never changes and by which the source is ordered, so a page goes on behind a key:

    scheduled, retryable, waiting_external    rows of waiting_jobs       (id, 0)
    available                                 entries past the frontier  (xid, entry_id)
                                              then what is set aside     (id, 0)
    running                                   open claims of runtimes    (claim_id, position in it)
    completed                                 claims of the queues       (claim_id, position in it)
    failed, cancelled                         rows of ended_jobs         (ended_at in microseconds, id)

A job that changes its state meanwhile gets a new key, ahead of all others, or the one it had: no page of a state shows
it twice. Where only some jobs are wanted, their places come from a search for their ids; the rest is the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from awa.job import JobState
from awa.storage.jobs import JobInfo
from awa.storage.queues import LIST_QUEUES
from awa.storage.snapshot import Look

MOST_LOOKED_AT = 2_000
"""Places after which a page ends, however few jobs of the wanted kind it has."""

GROUP = 500
"""Places that the first statement reads the jobs of. Where few are wanted each further one reads four times as many."""

Key = tuple[int, int]

_END = (2**63 - 1, 2**63 - 1)  # ahead of every key


@dataclass(frozen=True, slots=True)
class JobPage:
    """Some jobs of a list, newest first, and where it goes on."""

    jobs: list[JobInfo]
    """At most as many as were asked for. There may be fewer, even none, though the list goes on."""
    after: str | None
    """Give this to get the next page; None: the list ends here."""


ORDER = (
    *(JobState.RUNNING, JobState.AVAILABLE, JobState.SCHEDULED, JobState.RETRYABLE, JobState.WAITING_EXTERNAL),
    *(JobState.FAILED, JobState.CANCELLED, JobState.COMPLETED),
)
"""The states as a list of all jobs has them."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a list was read: behind *key* in one of the sources of *state*."""

    state: JobState
    source: int
    key: Key

    def cursor(self) -> str:
        """As text."""
        return f"{self.state}.{self.source}.{self.key[0]}.{self.key[1]}"

    @classmethod
    def read(cls, cursor: str) -> Position | None:
        """The position that *cursor* stands for; None when it is none."""
        found = re.fullmatch(r"([a-z_]+)\.(\d)\.(\d{1,19})\.(\d{1,19})", cursor, re.ASCII)
        if found is None or found[1] not in list(JobState) or int(found[2]) >= len(SOURCES[JobState(found[1])]):
            return None
        key = int(found[3]), int(found[4])
        return cls(JobState(found[1]), int(found[2]), key) if max(key) < 2**63 else None


# The columns of JobInfo, in its order; what differs between the sources is put in.
_COLUMNS = """
           {t}.id, {t}.queue, {t}.kind, {state}, {t}.priority, {t}.attempt, {t}.max_attempts, {t}.args, {t}.metadata,
           coalesce({t}.tags, '{{}}'), {t}.concurrency_key, {t}.ordering_key, {expires_at}, {created_at}, {run_at},
           {claimed_at}, {ended_at}, {elapsed_ms}, {runtime},
           r.hostname, r.pid, {waits_for}, {error}, coalesce({t}.history, '[]')
"""


def _columns(table: str, **given: str) -> str:
    """*given* is the SQL of what is not a column of *table* or NULL; the history tells of the last attempt."""
    parts = {
        "expires_at": f"CASE WHEN isfinite({table}.expires_at) THEN {table}.expires_at END",
        "created_at": f"{table}.created_at",
        "run_at": "NULL::timestamptz",
        "claimed_at": "NULL::timestamptz",
        "ended_at": "NULL::timestamptz",
        "elapsed_ms": f"({table}.history->-1->>'elapsed_ms')::integer",
        "runtime": f"({table}.history->-1->>'runtime')::bigint",
        "waits_for": "NULL::text",
        "error": f"awa.error_of({table}.history->-1)",
    }
    return _COLUMNS.format(t=table, **parts | given)


_LAST_RUNTIME = "LEFT JOIN awa.runtime_instances r ON r.id = ({t}.history->-1->>'runtime')::bigint"

_WANTED = """(%(kind)s::text IS NULL OR {t}.kind = %(kind)s)
       AND (%(tag)s::text IS NULL OR %(tag)s = ANY ({t}.tags))"""

WAITING_PLACES = """
    SELECT w.id, 0, 1, NULL, NULL, NULL
      FROM unnest(%(queues)s::text[]) q(queue)
     CROSS JOIN LATERAL (SELECT w.id FROM awa.waiting_jobs w
                          WHERE w.queue = q.queue AND w.state = %(state)s AND w.id < %(key1)s::bigint
                          ORDER BY w.id DESC LIMIT %(limit)s) w
     ORDER BY 1 DESC LIMIT %(limit)s
"""

WAITING_JOBS = f"""
    SELECT w.id, 0, {
    _columns("w", state="w.state", run_at="CASE WHEN isfinite(w.run_at) THEN w.run_at END", waits_for="w.waits_for")
}
      FROM unnest(%(keys1)s::bigint[]) p(id)
     CROSS JOIN LATERAL (SELECT * FROM awa.waiting_jobs w WHERE w.id = p.id LIMIT 1) w
      {_LAST_RUNTIME.format(t="w")}
     WHERE {_WANTED.format(t="w")}
     ORDER BY 1 DESC LIMIT %(limit)s
"""

ENDED_PLACES = """
    SELECT (extract(epoch FROM e.ended_at) * 1000000)::bigint, e.id, 1, NULL, NULL, NULL
      FROM unnest(%(queues)s::text[]) q(queue)
     CROSS JOIN LATERAL (
           SELECT e.ended_at, e.id FROM awa.ended_jobs e
            WHERE e.queue = q.queue AND e.state = %(state)s
              AND (e.ended_at, e.id) < (timestamptz 'epoch' + %(key1)s::bigint * interval '1 microsecond',
                                        %(key2)s::bigint)
            ORDER BY e.ended_at DESC, e.id DESC LIMIT %(limit)s) e
     ORDER BY e.ended_at DESC, e.id DESC LIMIT %(limit)s
"""

ENDED_JOBS = f"""
    SELECT (extract(epoch FROM e.ended_at) * 1000000)::bigint, e.id, {
    _columns("e", state="e.state", ended_at="e.ended_at", expires_at="NULL::timestamptz")
}
      FROM unnest(%(keys2)s::bigint[]) p(id)
     CROSS JOIN LATERAL (SELECT * FROM awa.ended_jobs e WHERE e.id = p.id LIMIT 1) e
      {_LAST_RUNTIME.format(t="e")}
     WHERE {_WANTED.format(t="e")}
     ORDER BY 1 DESC, 2 DESC LIMIT %(limit)s
"""

AVAILABLE_PLACES = """
    SELECT j.xid::text::bigint, j.entry_id, 1, j.slot, q.queue, r.lane
      FROM unnest(%(queues)s::text[]) q(queue)
     CROSS JOIN (SELECT (%(key1)s::bigint)::text::xid8 AS xid, %(key2)s::bigint AS entry_id) k
     CROSS JOIN LATERAL awa.unclaimed_ranges(q.queue) r
     CROSS JOIN LATERAL (SELECT CASE WHEN (r.hi_xid, r.hi_entry) < (k.xid, k.entry_id) THEN r.hi_xid ELSE k.xid END,
                                CASE WHEN (r.hi_xid, r.hi_entry) < (k.xid, k.entry_id) THEN r.hi_entry
                                     ELSE k.entry_id END) c(xid, entry_id)
     CROSS JOIN LATERAL (
           SELECT j.slot, j.xid, j.entry_id FROM awa.jobs j
            WHERE j.queue = q.queue AND j.lane = r.lane
              AND (j.xid, j.entry_id) > (r.lo_xid, r.lo_entry) AND (j.xid, j.entry_id) < (c.xid, c.entry_id)
              AND pg_visible_in_snapshot(j.xid, r.page_to)
            ORDER BY j.xid DESC, j.entry_id DESC LIMIT %(limit)s) j
     ORDER BY j.xid DESC, j.entry_id DESC LIMIT %(limit)s
"""

_ENTRY = """(SELECT * FROM awa.jobs j
              WHERE j.slot = {m}.slot AND j.queue = {m}.queue AND j.lane = {m}.lane AND j.xid = {m}.xid
                AND j.entry_id = {m}.entry_id LIMIT 1) j"""

AVAILABLE_JOBS = f"""
    SELECT p.key1, p.entry_id, {_columns("j", state="'available'", created_at="coalesce(j.created_at, j.available_at)")}
      FROM (SELECT u.key1, u.key1::text::xid8 AS xid, u.entry_id, u.slot, u.queue, u.lane
              FROM unnest(%(keys1)s::bigint[], %(keys2)s::bigint[], %(slots)s::smallint[], %(names)s::text[],
                          %(lanes)s::smallint[]) u(key1, entry_id, slot, queue, lane)) p
     CROSS JOIN LATERAL {_ENTRY.format(m="p")}
      {_LAST_RUNTIME.format(t="j")}
     WHERE {_WANTED.format(t="j")}
       AND NOT EXISTS (SELECT FROM awa.attempt_ends e WHERE e.slot = p.slot AND e.entry_id = p.entry_id OFFSET 0)
     ORDER BY 1 DESC, 2 DESC LIMIT %(limit)s
"""

RUNNING_PLACES = """
    SELECT o.claim_id, 0, o.size, o.slot, o.queue, o.lane
      FROM (SELECT c.claim_id, c.slot, c.queue, c.lane, cardinality(c.entry_ids) AS size FROM awa.open_claims c
             WHERE (%(queue)s::text IS NULL OR c.queue = %(queue)s)
               AND c.claim_id <= %(key1)s::bigint AND (c.claim_id, 1) < (%(key1)s::bigint, %(key2)s::bigint)) o
     WHERE o.size > (SELECT coalesce(sum(cardinality(x.idx)), 0) FROM awa.completions x
                      WHERE x.slot = o.slot AND x.claim_id = o.claim_id)
                  + (SELECT count(*) FROM awa.attempt_ends e WHERE e.slot = o.slot AND e.claim_id = o.claim_id)
     ORDER BY 1 DESC LIMIT %(limit)s
"""

_CLAIMS = """(SELECT c.*
                FROM unnest(%(keys1)s::bigint[], %(slots)s::smallint[], %(names)s::text[]) p(claim_id, slot, queue)
               CROSS JOIN LATERAL (SELECT * FROM awa.claims c
                                    WHERE c.slot = p.slot AND c.queue = p.queue AND c.claim_id = p.claim_id LIMIT 1) c
             ) c"""

_MEMBERS = f"""
      FROM {_CLAIMS}
     CROSS JOIN LATERAL ({{members}}) m
     CROSS JOIN LATERAL (SELECT * FROM awa.jobs j
                          WHERE j.slot = c.slot AND j.queue = c.queue AND j.lane = c.lane AND j.xid = m.xid
                            AND j.entry_id = m.entry_id LIMIT 1) j
      LEFT JOIN awa.runtime_instances r ON r.id = c.runtime
     WHERE {_WANTED.format(t="j")}
       AND (%(entries)s::bigint[] IS NULL OR m.entry_id = ANY (%(entries)s))
       AND (c.claim_id, m.idx) < (%(key1)s::bigint, %(key2)s::bigint)
     ORDER BY 1 DESC, 2 DESC LIMIT %(limit)s
"""

RUNNING_JOBS = f"""
    SELECT c.claim_id, m.idx, {
    _columns(
        "j",
        state="'running'",
        created_at="coalesce(j.created_at, j.available_at)",
        claimed_at="c.claimed_at",
        elapsed_ms="NULL::integer",
        runtime="c.runtime",
    )
}{
    _MEMBERS.format(
        members='''
           SELECT m.entry_id, m.xid, m.idx
             FROM unnest(c.entry_ids, c.xids) WITH ORDINALITY m(entry_id, xid, idx)
             LEFT JOIN (SELECT unnest(x.idx) AS idx FROM awa.completions x
                         WHERE x.slot = c.slot AND x.claim_id = c.claim_id) d ON d.idx = m.idx
            WHERE d.idx IS NULL
              AND NOT EXISTS (SELECT FROM awa.attempt_ends e
                               WHERE e.slot = c.slot AND e.entry_id = m.entry_id OFFSET 0)'''
    )
}"""

COMPLETED_PLACES = """
    SELECT c.claim_id, 0, c.size, c.slot, c.queue, c.lane
      FROM unnest(%(queues)s::text[]) q(queue)
     CROSS JOIN LATERAL (SELECT c.claim_id, cardinality(c.entry_ids) AS size, c.slot, c.queue, c.lane
                           FROM awa.claims c
                          WHERE c.queue = q.queue AND c.claim_id <= %(key1)s::bigint
                            AND (c.claim_id, 1) < (%(key1)s::bigint, %(key2)s::bigint)
                          ORDER BY c.claim_id DESC LIMIT %(limit)s) c
     ORDER BY 1 DESC LIMIT %(limit)s
"""

COMPLETED_JOBS = f"""
    SELECT c.claim_id, m.idx, {
    _columns(
        "j",
        state="'completed'",
        created_at="coalesce(j.created_at, j.available_at)",
        claimed_at="c.claimed_at",
        ended_at="m.ended_at",
        elapsed_ms="m.elapsed_ms",
        runtime="c.runtime",
        error="NULL::json",
    )
}{
    _MEMBERS.format(
        members='''
           SELECT m.entry_id, m.xid, m.idx, d.ended_at, d.elapsed_ms
             FROM (SELECT u.idx, x.completed_at AS ended_at, u.elapsed_ms
                     FROM awa.completions x CROSS JOIN LATERAL unnest(x.idx, x.elapsed_ms) u(idx, elapsed_ms)
                    WHERE x.slot = c.slot AND x.claim_id = c.claim_id
                    UNION ALL
                   SELECT array_position(c.entry_ids, e.entry_id), e.ended_at, e.elapsed_ms
                     FROM awa.attempt_ends e
                    WHERE e.slot = c.slot AND e.claim_id = c.claim_id AND e.outcome = 'completed') d
             JOIN unnest(c.entry_ids, c.xids) WITH ORDINALITY m(entry_id, xid, idx) ON m.idx = d.idx'''
    )
}"""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the jobs of a state are."""

    places: str
    """Rows of key, key, number of jobs, slot, queue, lane, behind a key."""
    jobs: str
    """The jobs at some places: key, key, the columns of JobInfo."""
    start: Key = _END
    """Ahead of every place."""


# 2^57 microseconds: in the year 6536, and what an interval can hold
_WAITING, _ENDED = Source(WAITING_PLACES, WAITING_JOBS), Source(ENDED_PLACES, ENDED_JOBS, (2**57, 0))

SOURCES: dict[JobState, tuple[Source, ...]] = {
    JobState.SCHEDULED: (_WAITING,),
    JobState.AVAILABLE: (Source(AVAILABLE_PLACES, AVAILABLE_JOBS), _WAITING),
    JobState.RUNNING: (Source(RUNNING_PLACES, RUNNING_JOBS),),
    JobState.RETRYABLE: (_WAITING,),
    JobState.WAITING_EXTERNAL: (_WAITING,),
    JobState.COMPLETED: (Source(COMPLETED_PLACES, COMPLETED_JOBS),),
    JobState.FAILED: (_ENDED,),
    JobState.CANCELLED: (_ENDED,),
}


# Where some jobs are: state, source, key, key, 1, slot, queue, lane, entry. What runs and what has completed is told
# apart as find_job_v3 does it; a job whose row of ended_jobs was deleted is in no list.
LOCATE = """
    SELECT w.state, CASE w.state WHEN 'available' THEN 1 ELSE 0 END, w.id, 0::bigint, 1, NULL::smallint, w.queue,
           NULL::smallint, NULL::bigint
      FROM unnest(%(ids)s::bigint[]) p(id)
     CROSS JOIN LATERAL (SELECT * FROM awa.waiting_jobs w WHERE w.id = p.id LIMIT 1) w
     UNION ALL
    SELECT e.state, 0, (extract(epoch FROM e.ended_at) * 1000000)::bigint, e.id, 1, NULL, e.queue, NULL, NULL
      FROM unnest(%(ids)s::bigint[]) p(id)
     CROSS JOIN LATERAL (SELECT * FROM awa.ended_jobs e WHERE e.id = p.id LIMIT 1) e
     UNION ALL
    SELECT CASE WHEN c.claim_id IS NULL THEN 'available'
                WHEN e.outcome IS NOT NULL
                     OR EXISTS (SELECT FROM awa.completions x
                                 WHERE x.slot = n.slot AND x.claim_id = c.claim_id AND c.idx = ANY (x.idx) OFFSET 0)
                THEN 'completed' ELSE 'running' END,
           0, coalesce(c.claim_id, n.xid::text::bigint), CASE WHEN c.claim_id IS NULL THEN n.entry_id ELSE 0 END, 1,
           n.slot, n.queue, n.lane, n.entry_id
      FROM awa.newest_entries(ARRAY(SELECT p FROM unnest(%(ids)s::bigint[]) p
                                     WHERE NOT EXISTS (SELECT FROM awa.waiting_jobs w WHERE w.id = p)
                                       AND NOT EXISTS (SELECT FROM awa.ended_jobs e WHERE e.id = p)), NULL) n
      LEFT JOIN LATERAL (SELECT e.outcome, e.claim_id FROM awa.attempt_ends e
                          WHERE e.slot = n.slot AND e.entry_id = n.entry_id LIMIT 1) e ON true
      LEFT JOIN LATERAL (
           SELECT e.claim_id, NULL::smallint AS idx WHERE e.outcome IS NOT NULL
           UNION ALL
           SELECT t.claim_id, t.idx
             FROM awa.claim_of(n.slot, n.queue, n.lane, n.xid, n.entry_id, n.available_at) t
            WHERE e.outcome IS NULL) c ON true
     WHERE n.entry_id IS NOT NULL AND (e.outcome IS NULL OR e.outcome = 'completed')
"""


class _Some:
    """The places of some jobs, as the sources would give them."""

    def __init__(self, look: Look, ids: Sequence[int], queue: str | None) -> None:
        self._places: dict[tuple[JobState, int, Key], tuple[Any, ...]] = {}
        self.entries: list[int] = []
        """Those in the ring; of a claim, only these are wanted."""
        for state, source, *place, entry in look.rows(LOCATE, ids=list(ids)):
            if queue is None or place[4] == queue:
                key = place[0], place[1]
                self._places[JobState(state), source, key] = tuple(place)
                self.entries += [] if entry is None else [entry]

    def of(self, state: JobState, source: int, behind: Key) -> list[tuple[Any, ...]]:
        """Those of a source behind a key, newest first; a claim once."""
        keys = [key for found, number, key in self._places if (found, number) == (state, source) and key < behind]
        return [self._places[state, source, key] for key in sorted(keys, reverse=True)]


def list_jobs(
    look: Look,
    states: Sequence[JobState],
    *,
    queue: str | None = None,
    kind: str | None = None,
    tag: str | None = None,
    ids: Sequence[int] | None = None,
    limit: int,
    position: Position | None = None,
) -> JobPage:
    """One page of the jobs in *states*, one state after the other.

    Args:
        queue, kind, tag: Only of these; None: of all.
        ids: Only these jobs; None: all.
        limit: Most jobs to return.
        position: Where the last page ended; None: the first page.
    """
    some = None if ids is None else _Some(look, ids, queue)
    queues = [queue] if queue is not None else [] if some else [name for (name,) in look.rows(LIST_QUEUES)]
    filters = {"queue": queue, "queues": queues}
    wanted = {"kind": kind, "tag": tag, "entries": None if some is None else some.entries}
    found: list[tuple[Position, JobInfo]] = []
    looked_at = 0
    for state in states if position is None else states[states.index(position.state) :]:
        begun = position if position is not None and position.state == state else None
        for number, source in enumerate(SOURCES[state]):
            if begun is not None and number < begun.source:
                continue
            behind = begun.key if begun is not None and number == begun.source else source.start
            size = GROUP
            most = limit + 1 if kind is None and tag is None else size
            while places := (
                look.rows(source.places, key1=behind[0], key2=behind[1], limit=most, state=state.value, **filters)
                if some is None
                else some.of(state, number, behind)
            ):
                for group in _groups(places, size):
                    keys = {"key1": behind[0], "key2": behind[1], "limit": limit + 1 - len(found)}
                    rows = look.rows(source.jobs, **_arrays(group), **keys, **wanted)
                    found += [(Position(state, number, (row[0], row[1])), JobInfo(*row[2:])) for row in rows]
                    if len(found) > limit:
                        return JobPage([job for _, job in found[:limit]], found[limit - 1][0].cursor())
                    behind = group[-1][0], group[-1][1]
                    looked_at += sum(max(place[2], 1) for place in group)
                    if looked_at >= MOST_LOOKED_AT:
                        return JobPage([job for _, job in found], Position(state, number, behind).cursor())
                if some is not None or len(places) < most:
                    break
                if kind is not None or tag is not None:
                    most = size = min(4 * size, MOST_LOOKED_AT)
    return JobPage([job for _, job in found], None)


def _groups(places: Sequence[tuple[Any, ...]], most: int) -> Iterator[list[tuple[Any, ...]]]:
    """*places* in groups of about *most* jobs."""
    group: list[tuple[Any, ...]] = []
    size = 0
    for place in places:
        if group and size + place[2] > most:
            yield group
            group, size = [], 0
        group.append(place)
        size += place[2]
    yield group


def _arrays(places: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    keys1, keys2, _, slots, names, lanes = (list(column) for column in zip(*places, strict=True))
    return {"keys1": keys1, "keys2": keys2, "slots": slots, "names": names, "lanes": lanes}
