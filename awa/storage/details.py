"""All that is kept of one job: its attempts one by one, what it waits for, what waits for it, what follows it.

Attempts come from two places, which overlap. The segments have every attempt, until they are emptied; the history,
which travels with the job, has the last twenty that ended without success.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any

from awa.errors import ValidationError
from awa.job import JobId, JobState
from awa.options import check_queue
from awa.storage.jobs import GET, JobInfo, not_found
from awa.storage.listing import ORDER, list_jobs
from awa.storage.snapshot import Look

MOST_RELATED = 100
"""Parents, dependents and follow-ups that are looked up."""

MOST_WAITING = 5_000
"""Jobs that wait for others, of those inserted after a job and of those before it, among which its dependents are
looked for."""

SAME = timedelta(seconds=1)
"""Most that the two records of an attempt's end are apart; they are told by the same transaction."""

# A search by id needs it.
WITH_BITMAPS = "SELECT set_config('enable_bitmapscan', 'on', true)"

ENTRIES = """
    SELECT j.attempt, CASE WHEN x.completed_at IS NOT NULL THEN 'completed' ELSE e.outcome END, c.claimed_at,
           coalesce(x.completed_at, e.ended_at), coalesce(x.elapsed_ms, e.elapsed_ms), c.runtime, r.hostname, r.pid,
           e.error, c.claim_id IS NOT NULL AND coalesce(e.outcome NOT IN ('released', 'set_aside'), true), j.follow_ups
      FROM awa.jobs j
      LEFT JOIN LATERAL (SELECT e.* FROM awa.attempt_ends e
                          WHERE e.slot = j.slot AND e.entry_id = j.entry_id LIMIT 1) e ON true
      LEFT JOIN LATERAL (
           SELECT c.claim_id, array_position(c.entry_ids, j.entry_id)::smallint AS idx, c.claimed_at, c.runtime
             FROM awa.claims c
            WHERE c.slot = j.slot AND c.queue = j.queue AND c.claim_id = e.claim_id AND e.outcome IS NOT NULL
            UNION ALL
           SELECT c.claim_id, c.idx, c.claimed_at, c.runtime
             FROM awa.claim_of(j.slot, j.queue, j.lane, j.xid, j.entry_id, j.available_at) c
            WHERE e.outcome IS NULL
            LIMIT 1) c ON true
      LEFT JOIN LATERAL (SELECT x.completed_at, x.elapsed_ms[array_position(x.idx, c.idx)] AS elapsed_ms
                           FROM awa.completions x
                          WHERE x.slot = j.slot AND x.claim_id = c.claim_id AND c.idx = ANY (x.idx) LIMIT 1) x ON true
      LEFT JOIN awa.runtime_instances r ON r.id = c.runtime
     WHERE j.id = %(id)s::bigint
     ORDER BY j.entry_id
"""

RUNTIMES = "SELECT id, hostname, pid FROM awa.runtime_instances WHERE id = ANY (%(ids)s::bigint[])"

# What stands only in the row of one that waits or has ended.
ROW = """
    SELECT follow_ups, CASE WHEN waits_for = 'parent' THEN parents END,
           CASE WHEN waits_for = 'parent' THEN coalesce(on_parent_failure, 'cancel') END
      FROM awa.waiting_jobs WHERE id = %(id)s::bigint
     UNION ALL
    SELECT follow_ups, NULL, NULL FROM awa.ended_jobs WHERE id = %(id)s::bigint
"""

DEPENDENTS = """
    SELECT w.id
      FROM ((SELECT w.id, w.parents FROM awa.waiting_jobs w
              WHERE w.waits_for = 'parent' AND w.seq > %(id)s::bigint ORDER BY w.seq LIMIT %(most)s)
             UNION ALL
            (SELECT w.id, w.parents FROM awa.waiting_jobs w
              WHERE w.waits_for = 'parent' AND w.seq < %(id)s::bigint ORDER BY w.seq DESC LIMIT %(most)s)) w
     WHERE %(id)s::bigint = ANY (w.parents)
     ORDER BY w.id LIMIT %(limit)s
"""

# A follow-up that can run at once is appended by the transaction that records the outcome, to the lane that its
# declaration says. The record's number may be that of a part of the transaction, which comes after the transaction's.
FOLLOWED_BY = """
    SELECT w.id FROM awa.waiting_jobs w WHERE w.follow_ups IS NOT NULL AND awa.follows(w.follow_ups) = %(id)s::bigint
     UNION
    SELECT e.id FROM awa.ended_jobs e WHERE e.follow_ups IS NOT NULL AND awa.follows(e.follow_ups) = %(id)s::bigint
     UNION
    SELECT j.id
      FROM (SELECT CASE WHEN t.number > now.number THEN t.number - (1::bigint << 32) ELSE t.number END AS number
              FROM (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS number) now
             CROSS JOIN LATERAL (
                   SELECT ((now.number >> 32) << 32) + u.xmin::text::bigint AS number
                     FROM (SELECT e.xmin FROM awa.jobs j
                            CROSS JOIN LATERAL (SELECT e.xmin FROM awa.attempt_ends e
                                                 WHERE e.slot = j.slot AND e.entry_id = j.entry_id
                                                   AND e.outcome IN ('completed', 'failed', 'cancelled') LIMIT 1) e
                            WHERE j.id = %(id)s::bigint
                            UNION ALL
                           SELECT e.xmin FROM awa.ended_jobs e WHERE e.id = %(id)s::bigint) u) t) ended
     CROSS JOIN unnest(%(queues)s::text[], %(lanes)s::smallint[]) d(queue, lane)
     CROSS JOIN LATERAL (
           SELECT j.id, j.follow_ups FROM awa.jobs j
            WHERE j.queue = d.queue AND j.lane = d.lane AND j.xid <= ended.number::text::xid8
              AND j.xid >= greatest(ended.number - 1000, 3)::text::xid8
            ORDER BY j.xid DESC, j.entry_id DESC LIMIT 5000) j
     WHERE awa.follows(j.follow_ups) = %(id)s::bigint
     ORDER BY 1 LIMIT %(limit)s
"""


@dataclass(frozen=True, slots=True)
class AttemptInfo:
    """One attempt of a job: that a worker took it, and what came of it."""

    attempt: int
    """Its number; one that was snoozed is followed by one of the same number."""
    outcome: str | None
    """``completed``, ``retried``, ``snoozed``, ``failed``, ``cancelled`` or ``rescued``; None: it is open."""
    claimed_at: datetime | None
    """When a worker took it; None when that is no longer known, or the job was cancelled before any did."""
    ended_at: datetime | None
    """When its outcome was recorded."""
    elapsed_ms: int | None
    """How long the handler ran."""
    runtime: int | None
    """The worker, which is one start of a process."""
    hostname: str | None
    """Where that runs or ran."""
    pid: int | None
    """Its process there."""
    error: dict[str, Any] | None
    """``type``, ``text``, ``traceback``; of older attempts no traceback."""

    @property
    def started_at(self) -> datetime | None:
        """When its handler began, to within the milliseconds that an outcome waits to be recorded; None: unknown."""
        if self.ended_at is None or self.elapsed_ms is None:
            return None
        try:
            began = self.ended_at - timedelta(milliseconds=self.elapsed_ms)
        except OverflowError:  # what is stored may be anything
            return None
        return began if self.claimed_at is None else max(began, self.claimed_at)


@dataclass(frozen=True, slots=True)
class RelatedJob:
    """A job that another one waits for, that waits for it, or that follows it."""

    id: JobId
    """The job."""
    kind: str | None
    """Its kind, None when it is gone."""
    queue: str | None
    """Its queue, likewise."""
    state: JobState | None
    """What it is doing, likewise."""


@dataclass(frozen=True, slots=True)
class JobDetails(JobInfo):
    """A job as the database knows it, with its attempts and the jobs around it."""

    attempts: list[AttemptInfo]
    """Those that are known, oldest first: of the last day all, before that the last twenty without success."""
    parents: list[RelatedJob]
    """What it still waits for; those that have completed are struck off."""
    on_parent_failure: str | None
    """What becomes of it when one of these does not complete; None: it waits for none."""
    dependents: list[RelatedJob]
    """Jobs that wait for it, at most a hundred."""
    follow_ups: dict[str, list[dict[str, Any]]]
    """What is to follow, by outcome: ``completed``, ``failed``, ``cancelled``; as it is stored."""
    followed_by: list[RelatedJob]
    """Follow-ups that were inserted, as long as the record of that is kept, at most a hundred. One with a delay is
    known until it is due, and again if it fails."""
    follows: JobId | None
    """The job that it follows itself."""


def job_details(look: Look, job_id: int) -> JobDetails:
    """All that is known of a job, at one moment.

    Raises:
        JobNotFound: There is none, or its history is gone.
    """
    look.rows(WITH_BITMAPS)
    rows = look.rows(GET, id=job_id)
    if not rows:
        raise not_found(job_id)
    job = JobInfo(*rows[0])
    entries = look.rows(ENTRIES, id=job_id)
    stored = [_attempt(*row) for *row, was_taken, _ in entries if was_taken]
    attempts = _merged(stored, _remembered(look, job.history))
    row = look.rows(ROW, id=job_id)
    said, parents, on_parent_failure = row[0] if row else (entries[-1][-1] if entries else None, None, None)
    follow_ups, follows = _follow_ups(said)
    dependents = look.rows(DEPENDENTS, id=job_id, most=MOST_WAITING, limit=MOST_RELATED)
    children: list[tuple[Any, ...]] = []
    if job.state.is_terminal and follow_ups.get(job.state):
        places = list(dict.fromkeys(place for one in follow_ups[job.state] if (place := _place(one))))[:MOST_RELATED]
        queues, lanes = [queue for queue, _ in places], [lane for _, lane in places]
        children = look.rows(FOLLOWED_BY, id=job_id, queues=queues, lanes=lanes, limit=MOST_RELATED)
    return JobDetails(
        **{field.name: getattr(job, field.name) for field in fields(JobInfo)},
        attempts=attempts,
        parents=_related(look, parents or ()),
        on_parent_failure=on_parent_failure,
        dependents=_related(look, [id for (id,) in dependents]),
        follow_ups=follow_ups,
        followed_by=_related(look, [id for (id,) in children]),
        follows=follows,
    )


def _attempt(
    attempt: int,
    outcome: str | None,
    claimed_at: datetime | None,
    ended_at: datetime | None,
    elapsed_ms: int | None,
    runtime: int | None,
    hostname: str | None,
    pid: int | None,
    error: object,
) -> AttemptInfo:
    told = error if isinstance(error, dict) else None  # what is stored may be anything
    return AttemptInfo(attempt, outcome, claimed_at, ended_at, elapsed_ms, runtime, hostname, pid, told)


def _remembered(look: Look, history: object) -> list[AttemptInfo]:
    """The attempts of a history, as far as they can be read."""
    items = [item for item in history if isinstance(item, dict)] if isinstance(history, list) else []
    ids = sorted({runtime for item in items if (runtime := _number(item.get("runtime"), 2**63 - 1))})
    places = {id: (hostname, pid) for id, hostname, pid in (look.rows(RUNTIMES, ids=ids) if ids else ())}
    found = []
    for item in items:
        runtime = _number(item.get("runtime"), 2**63 - 1)
        error = {name: item.get(name) for name in ("type", "text", "traceback")}
        found.append(
            AttemptInfo(
                _number(item.get("attempt"), 32_767) or 0,
                str(item.get("outcome")),
                None,
                _instant(item.get("ended_at")),
                _number(item.get("elapsed_ms"), 2**31 - 1, least=0),
                runtime,
                *places.get(runtime, (None, None)),
                error if any(error.values()) else None,
            )
        )
    return found


def _instant(text: object) -> datetime | None:
    try:
        at = datetime.fromisoformat(text) if isinstance(text, str) else None
        return at if at is None else at.astimezone(UTC) if at.tzinfo is not None else at.replace(tzinfo=UTC)
    except (ValueError, OverflowError):  # the first hours of the year 1, elsewhere
        return None


def _merged(stored: Sequence[AttemptInfo], remembered: Iterable[AttemptInfo]) -> list[AttemptInfo]:
    """Both, each attempt once, in order of time; one that is open comes last."""
    only = [one for one in remembered if not any(_is_same(one, other) for other in stored)]
    last = datetime.max.replace(tzinfo=UTC)
    # what cannot be dated stays in front of what can
    first = datetime.min.replace(tzinfo=UTC)
    return sorted([*only, *stored], key=lambda one: one.ended_at or (last if one.outcome is None else first))


def _is_same(one: AttemptInfo, other: AttemptInfo) -> bool:
    if one.ended_at is None or other.ended_at is None:
        return False
    is_numbered_alike = (one.attempt, one.runtime) == (other.attempt, other.runtime)
    return is_numbered_alike and abs(one.ended_at - other.ended_at) <= SAME


def _follow_ups(said: object) -> tuple[dict[str, list[dict[str, Any]]], JobId | None]:
    if not isinstance(said, dict):
        return {}, None
    found = {}
    for outcome in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED):
        declared = said.get(outcome)
        jobs = [one for one in declared if isinstance(one, dict)] if isinstance(declared, list) else []
        if jobs:
            found[outcome.value] = jobs
    of = _number(said.get("of"), 2**63 - 1)
    return found, None if of is None else JobId(of)


def _place(declared: dict[str, Any]) -> tuple[str, int] | None:
    """Queue and lane that a follow-up is inserted into; None: it cannot have been."""
    queue = declared.get("queue")
    try:
        name = "default" if queue is None else check_queue(str(queue))
    except ValidationError:
        return None
    return name, 2 * (_number(declared.get("priority"), 4) or 2) + 1


def _number(said: object, most: int, *, least: int = 1) -> int | None:
    """*said* when it is a number from *least* to *most*."""
    return said if type(said) is int and least <= said <= most else None


def _related(look: Look, ids: Sequence[int]) -> list[RelatedJob]:
    some = list(dict.fromkeys(ids))[:MOST_RELATED]
    if not some:
        return []
    page = list_jobs(look, ORDER, ids=some, limit=len(some))
    known = {job.id: job for job in page.jobs}
    found = []
    for job_id in map(JobId, some):
        job = known.get(job_id)
        found.append(
            RelatedJob(job_id, None, None, None) if job is None else RelatedJob(job_id, job.kind, job.queue, job.state)
        )
    return found
