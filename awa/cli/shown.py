"""How jobs are shown: as rows of a list, each by itself, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from awa.cli.output import Cell, Column, Table, compact, facts, local_time, print_facts, safe, short, styled
from awa.job import JobState
from awa.storage.details import AttemptInfo, JobDetails, RelatedJob
from awa.storage.jobs import JobInfo

ARGS_SHOWN = 60
"""Characters of a job's args in a list."""

_COLUMNS = (
    Column("id", is_number=True),
    Column("state"),
    Column("queue", is_flexible=True),
    Column("kind", is_flexible=True),
    Column("prio", is_number=True, needs_width=110),
    Column("try", is_number=True, needs_width=110),
    Column("when"),
    Column("args", is_flexible=True, needs_width=100),
)


class JobTable:
    """Jobs as rows, printed page by page."""

    def __init__(self, *, err: bool = False) -> None:
        self._table = Table(_COLUMNS, err=err)

    def print(self, jobs: Iterable[JobInfo]) -> None:
        """Print more of them."""
        self._table.print([_row(job) for job in jobs])


def _row(job: JobInfo) -> list[Cell]:
    return [
        str(job.id),
        styled(_state(job)),
        job.queue,
        job.kind,
        str(job.priority),
        f"{job.attempt}/{job.max_attempts}",
        local_time(_when(job)),
        short(compact(job.args), ARGS_SHOWN),
    ]


def _state(job: JobInfo) -> str:
    # that one waits for a time is what scheduled and retryable mean
    return f"{job.state} ({job.waits_for})" if job.waits_for not in (None, "time") else job.state.value


def _when(job: JobInfo) -> datetime | None:
    """The time that matters in the job's state: due, taken, ended; or when it was inserted."""
    if job.state is JobState.RUNNING:
        return job.claimed_at or job.created_at
    return (job.ended_at if job.state.is_terminal else job.run_at) or job.created_at


def job_facts(job: JobInfo) -> dict[str, Any]:
    """A job in JSON: the fields of ``awa.JobInfo``, or of ``JobDetails`` where it is one."""
    return facts(job)


def print_job(job: JobInfo) -> None:
    """One job, with its attempts or its history."""
    rows = [
        ("id", str(job.id)),
        ("kind", safe(job.kind)),
        ("queue", safe(job.queue)),
        ("state", safe(_state(job))),
        ("priority", str(job.priority)),
        ("attempt", f"{job.attempt} of {job.max_attempts}"),
        ("args", safe(compact(job.args))),
    ]
    if job.metadata is not None:
        rows.append(("metadata", safe(compact(job.metadata))))
    if job.tags:
        rows.append(("tags", ", ".join(map(safe, job.tags))))
    keys = [("concurrency key", job.concurrency_key), ("ordering key", job.ordering_key)]
    rows += [(name, safe(key)) for name, key in keys if key is not None]
    times = [("created", job.created_at), ("run at", job.run_at), ("expires", job.expires_at)]
    times += [("claimed", job.claimed_at), ("ended", job.ended_at)]
    rows += [(name, local_time(at)) for name, at in times if at is not None]
    if job.elapsed_ms is not None:
        rows.append(("ran", f"{job.elapsed_ms:,} ms"))
    if job.runtime is not None:
        rows.append(("worker", _worker_text(job)))
    if job.error is not None:
        rows.append(("error", _error_text(job.error)))
    if isinstance(job, JobDetails):
        rows += _around(job)
    elif job.history:
        rows.append(("history", "\n".join(map(_ended_text, job.history))))
    print_facts(rows)


def _around(job: JobDetails) -> Iterator[tuple[str, str]]:
    """Its attempts, and the jobs that have to do with it."""
    if job.attempts:
        yield "attempts", "\n".join(map(_attempt_text, job.attempts))
    if job.parents:
        yield "waits for", "\n".join(map(_related_text, job.parents))
        yield "when one fails", safe(job.on_parent_failure)
    if job.dependents:
        yield "waited for by", "\n".join(map(_related_text, job.dependents))
    if job.follows is not None:
        yield "follows", f"job {job.follows}"
    if job.follow_ups:
        told = [
            f"when {outcome}: {', '.join(safe(one.get('kind')) for one in jobs)}"
            for outcome, jobs in job.follow_ups.items()
        ]
        yield "follow-ups", "\n".join(told)
    if job.followed_by:
        yield "followed by", "\n".join(map(_related_text, job.followed_by))


def _attempt_text(one: AttemptInfo) -> str:
    lines = [f"{one.attempt}: {safe(one.outcome or 'running')}"]
    if one.ended_at is not None:
        lines[0] += f" {local_time(one.ended_at)}"
    if one.elapsed_ms is not None:
        lines[0] += f" after {one.elapsed_ms:,} ms"
    if one.claimed_at is not None:
        lines.append(f"taken {local_time(one.claimed_at)}")
    if one.runtime is not None:
        lines.append(f"by worker {_worker_text(one)}")
    lines += _lines(_said(one.error or {})).splitlines()
    return "\n   ".join(lines)


def _worker_text(where: JobInfo | AttemptInfo) -> str:
    place = "" if where.hostname is None else f", process {where.pid} on {safe(where.hostname)}"
    return f"{where.runtime}{place}"


def _related_text(other: RelatedJob) -> str:
    if other.state is None:
        return f"job {other.id}: gone"
    return f"job {other.id}: {other.state}, {safe(other.kind)} in queue {safe(other.queue)}"


def _lines(text: object) -> str:
    """Text of several lines, each safe."""
    return "\n".join(map(safe, str(text).expandtabs().splitlines()))


def _error_text(error: dict[str, Any]) -> str:
    head, trace = _said(error), error.get("traceback")
    return "\n".join(part for part in (_lines(head), _lines(trace) if trace else "") if part) or "-"


def _said(error: dict[str, Any]) -> str:
    # what is stored may be anything, also by other programs
    return ": ".join(str(error[name]) for name in ("type", "text") if error.get(name))


def _ended_text(one: object) -> str:
    if not isinstance(one, dict):
        return safe(compact(one))
    told = [f"attempt {one.get('attempt')}", str(one.get("outcome"))]
    if one.get("ended_at"):
        told.append(_stored_time(one["ended_at"]))
    said = _said(one)
    return safe(", ".join(told)) + (f": {_lines(said)}" if said else "")


def _stored_time(text: object) -> str:
    try:
        return local_time(datetime.fromisoformat(str(text)))
    except ValueError:
        return str(text)
