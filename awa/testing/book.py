"""The jobs of inline mode: in memory, with the rules of the database."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson

from awa import options
from awa._core import Attempt, Handler, decode_batch, int2_array, text_array
from awa.errors import JobNotFound
from awa.job import JobId, JobState
from awa.storage.control import Controlled
from awa.storage.jobs import JobInfo, JobRow
from awa.testing.here import Ending

_MOST_TOLD = 20  # ended attempts in a history
_TRACEBACKS = 3
_POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
_INT4, _INT8, _TIMESTAMPTZ = 23, 20, 1184


@dataclass(slots=True, eq=False)
class Entry:
    """One job."""

    id: JobId
    row: JobRow
    created_at: datetime
    state: JobState = JobState.AVAILABLE
    order: int = 0
    """Its place among the available."""
    number: int = 1
    """Of the attempt that runs, or comes next."""
    run_at: datetime | None = None
    claimed_at: datetime | None = None
    ended_at: datetime | None = None
    elapsed_ms: int | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    waits_for: str | None = None
    open: Attempt | None = None
    """While it runs."""
    cancel_reason: str | None = None
    """Why somebody asked to cancel it, while it runs."""


class Book:
    """What was inserted inline: a list of jobs, in the order of their inserts.

    Its clock is the computer's, plus what :func:`awa.testing.advance` added.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards all of this
        self._entries: dict[int, Entry] = {}
        self._ids = itertools.count(1)
        self._orders = itertools.count(1)
        self._ahead = timedelta()

    @property
    def jobs(self) -> list[JobInfo]:
        """Every job, in the order of the inserts, as it is now."""
        with self._lock:
            return [self._info(entry) for entry in self._entries.values()]

    def get(self, job_id: int) -> JobInfo:
        """The job as it is now.

        Raises:
            JobNotFound: It was not inserted inline, or the book was cleared since.
            ValidationError: *job_id* can be no job's id.
        """
        with self._lock:
            return self._info(self._find(options.check_job_id(job_id)))

    def clear(self) -> None:
        """Forget every job; ids go on rising."""
        with self._lock:
            self._entries.clear()

    def cancel(self, job_id: int, *, reason: str | None = None, force: bool = False) -> Controlled:
        """Cancel a job; see :meth:`awa.Client.cancel`."""
        job_id, reason = options.check_job_id(job_id), options.check_reason(reason)
        force = options.check_flag(force, "force")
        with self._lock:
            entry = self._find(job_id)
            if entry.state.is_terminal:
                return Controlled(entry.id, "nothing", entry.state)
            if entry.open is not None:
                entry.open.is_cancelled = entry.open.is_asked_to_cancel = True
                entry.cancel_reason = reason or "cancelled by an operator"
                if not force:
                    return Controlled(entry.id, "requested", entry.state)
                entry.open = None  # what its handler comes to is refused
            self._end(entry, JobState.CANCELLED)
            self._tell(entry, "cancelled", None, _cancelled(reason or "cancelled by an operator", None))
            return Controlled(entry.id, "cancelled", entry.state)

    # --- for the rest of this package

    @property
    def now(self) -> datetime:
        """The time, by the book's clock."""
        return datetime.now(UTC) + self._ahead

    def advance(self, step: timedelta) -> int:
        """Put the clock forward; returns how many jobs became available."""
        with self._lock:
            self._ahead += step
            return self.promote()

    def add(self, rows: Sequence[JobRow]) -> list[JobId]:
        """Write jobs."""
        with self._lock:
            added = []
            for row in rows:
                entry = Entry(JobId(next(self._ids)), row, created_at=self.now)
                run_at = entry.created_at + timedelta(seconds=row.delay) if row.delay else row.run_at
                if run_at is None or run_at <= entry.created_at:
                    entry.order = next(self._orders)
                else:
                    self._wait(entry, JobState.SCHEDULED, run_at)
                self._entries[entry.id] = entry
                added.append(entry.id)
            return added

    def remove(self, job_ids: Iterable[int]) -> None:
        """Forget jobs whose transaction was rolled back."""
        with self._lock:
            for job_id in job_ids:
                self._entries.pop(job_id, None)

    def promote(self) -> int:
        """Make available what is due; returns how many."""
        with self._lock:
            now = self.now
            due = [entry for entry in self._entries.values() if entry.run_at is not None and entry.run_at <= now]
            for entry in sorted(due, key=lambda entry: (entry.run_at, entry.id)):
                self._make_available(entry)
            return len(due)

    def make_due(self, *, queue: str | None, kinds: Iterable[str]) -> None:
        """Let the time come for everything of *queue* and *kinds* that waits for it."""
        with self._lock:
            now, known = self.now, set(kinds)
            due = [
                (entry.run_at, entry.id, entry)
                for entry in self._entries.values()
                if entry.run_at is not None
                and entry.run_at > now
                and entry.row.kind in known
                and queue in (None, entry.row.queue)
            ]
            # a microsecond apart, in the order in which they would have become due
            for back, (_, _, entry) in enumerate(sorted(due, reverse=True)):
                entry.run_at = now - timedelta(microseconds=back)

    def queues(self) -> list[str]:
        """Every queue with an available job, by name."""
        with self._lock:
            return sorted({e.row.queue for e in self._entries.values() if e.state is JobState.AVAILABLE})

    def is_available(self, job_id: int) -> bool:
        """Whether the job can be claimed."""
        with self._lock:
            found = self._entries.get(job_id)
            return found is not None and found.state is JobState.AVAILABLE

    def claim(self, queue: str, handlers: dict[str, Handler]) -> Attempt | None:
        """Begin an attempt on the first available job of *queue*."""
        with self._lock:
            waiting = [e for e in self._entries.values() if e.state is JobState.AVAILABLE and e.row.queue == queue]
            for entry in sorted(waiting, key=lambda entry: (entry.row.priority, entry.order)):
                if entry.row.kind in handlers:
                    return self.begin(entry.id, handlers)
                entry.waits_for = "kind"
            return None

    def begin(self, job_id: int, handlers: dict[str, Handler]) -> Attempt:
        """Begin an attempt on an available job."""
        with self._lock:
            entry = self._entries[job_id]
            entry.state, entry.claimed_at, entry.waits_for = JobState.RUNNING, self.now, None
            entry.elapsed_ms = None
            entry.open = _attempt_of(entry, handlers)
            return entry.open

    def settle(self, attempt: Attempt, ending: Ending) -> None:
        """Record what an attempt came to, if it has not ended before."""
        with self._lock:
            entry = self._entries.get(attempt.id)
            if entry is None or entry.open is not attempt:
                return
            entry.open, entry.elapsed_ms = None, ending.elapsed_ms
            asked, entry.cancel_reason = entry.cancel_reason, None
            told = None if ending.told is None or ending.outcome == "completed" else orjson.loads(ending.told)
            outcome = ending.outcome
            if asked is not None and outcome != "completed":
                outcome, told = "cancelled", _cancelled(asked, told)
            if outcome in ("retried", "failed", "cancelled"):
                self._tell(entry, outcome, ending.elapsed_ms, told or {})
            if outcome == "retried" and entry.number >= entry.row.max_attempts:
                outcome = "failed"
            if outcome in ("completed", "failed", "cancelled"):
                self._end(entry, JobState(outcome))
                return
            if outcome == "retried":
                entry.number += 1
            if ending.delay:
                state = JobState.RETRYABLE if outcome == "retried" else JobState.SCHEDULED
                self._wait(entry, state, self.now + timedelta(seconds=ending.delay))
            else:
                self._make_available(entry)

    def _find(self, job_id: int) -> Entry:
        try:
            return self._entries[job_id]
        except KeyError:
            raise JobNotFound(f"no job has the id {job_id}: it was not inserted inline", job_id=job_id) from None

    def _wait(self, entry: Entry, state: JobState, run_at: datetime) -> None:
        entry.state, entry.run_at, entry.waits_for = state, run_at, "time"

    def _make_available(self, entry: Entry) -> None:
        entry.state, entry.run_at, entry.waits_for = JobState.AVAILABLE, None, None
        entry.order = next(self._orders)

    def _end(self, entry: Entry, state: JobState) -> None:
        entry.state, entry.run_at, entry.waits_for, entry.ended_at = state, None, None, self.now

    def _tell(self, entry: Entry, outcome: str, elapsed_ms: int | None, told: dict[str, Any]) -> None:
        entry.history.append(
            {
                "attempt": entry.number,
                "outcome": outcome,
                "ended_at": self.now.isoformat(),
                "elapsed_ms": elapsed_ms,
                "runtime": None,
                **{name: told.get(name) for name in ("type", "text", "traceback")},
            }
        )
        del entry.history[:-_MOST_TOLD]
        for older in entry.history[:-_TRACEBACKS]:
            older.pop("traceback", None)

    def _info(self, entry: Entry) -> JobInfo:
        row, last = entry.row, entry.history[-1] if entry.history else None
        has_run = entry.claimed_at is not None
        return JobInfo(
            id=entry.id,
            queue=row.queue,
            kind=row.kind,
            state=entry.state,
            priority=row.priority,
            attempt=entry.number,
            max_attempts=row.max_attempts,
            args=orjson.loads(row.args),
            metadata=None if row.metadata is None else orjson.loads(row.metadata),
            tags=list(row.tags or ()),
            created_at=entry.created_at,
            run_at=entry.run_at,
            claimed_at=entry.claimed_at,
            ended_at=entry.ended_at,
            elapsed_ms=entry.elapsed_ms,
            runtime=None,
            hostname=socket.gethostname() if has_run else None,
            pid=os.getpid() if has_run else None,
            waits_for=entry.waits_for,
            error=None
            if last is None or entry.state is JobState.COMPLETED
            else {name: last.get(name) for name in ("type", "text", "traceback")},
            history=[dict(ended) for ended in entry.history],
        )


def _cancelled(reason: str, told: dict[str, Any] | None) -> dict[str, Any]:
    text = reason if told is None else f"{reason}\n{told.get('type')}: {told.get('text')}"
    return {"type": "Cancelled", "text": text, "traceback": (told or {}).get("traceback") or ""}


def _attempt_of(entry: Entry, handlers: dict[str, Handler]) -> Attempt:
    """The attempt as a worker would have read it from a claim."""
    row = entry.row
    details = {
        "tags": row.tags,
        "metadata": None if row.metadata is None else orjson.Fragment(row.metadata),
        "timeout_ms": row.timeout_ms,
    }
    since = entry.created_at - _POSTGRES_EPOCH
    claimed: list[bytes | None] = [
        b"\0",
        struct.pack(">q", entry.id),
        struct.pack(">h", 0),
        struct.pack(">i", 0),
        struct.pack(">h", row.priority),
        _array(_INT8, ">q", entry.id),
        None,
        int2_array([entry.number]),
        int2_array([row.max_attempts]),
        text_array([row.kind]),
        _array(_INT4, ">i", len(row.args)),
        row.args,
        _array(_TIMESTAMPTZ, ">q", since // timedelta(microseconds=1)),
        text_array([orjson.dumps({name: value for name, value in details.items() if value is not None})]),
    ]
    [attempt] = decode_batch(claimed, 0, row.queue, {kind.encode(): one for kind, one in handlers.items()})
    return attempt


def _array(oid: int, form: str, element: int) -> bytes:
    """An array of one integer in PostgreSQL's binary form."""
    data = struct.pack(form, element)
    return struct.pack(">iiiiii", 1, 0, oid, 1, 1, len(data)) + data
