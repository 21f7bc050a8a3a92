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
from awa.insert import keyed
from awa.job import JobId, JobState
from awa.storage.control import Controlled
from awa.storage.jobs import JobInfo, JobRow, Written, enqueued
from awa.storage.results import Ended
from awa.testing.here import Ending
from awa.unique import BITS, KEY_BYTES, USUAL_STATES, check_key

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
    expires_at: datetime | None = None
    claimed_at: datetime | None = None
    ended_at: datetime | None = None
    elapsed_ms: int | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    waits_for: str | None = None
    open: Attempt | None = None
    """While it runs."""
    cancel_reason: str | None = None
    """Why somebody asked to cancel it, while it runs."""
    parents: tuple[int, ...] = ()
    """Whose ends it waits for."""
    is_kept: bool = False
    """Whether its handler's result is kept."""
    result: Any = None
    """As JSON gives it."""

    @property
    def key(self) -> bytes | None:
        """What equal jobs share."""
        return self.row.unique if isinstance(self.row.unique, bytes) else None

    @property
    def holds_key(self) -> bool:
        """Whether its state keeps equal jobs out."""
        key = self.key
        if key is None or len(key) == KEY_BYTES:
            return self.state in USUAL_STATES
        return bool(key[KEY_BYTES] & BITS[self.state])


class Book:
    """What was inserted inline: a list of jobs, in the order of their inserts."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # guards all of this
        self._entries: dict[int, Entry] = {}
        self._holders: dict[bytes, Entry] = {}  # key -> who had it last
        self._followed: list[JobId] = []  # inserted by an outcome, since the last call of freed()
        self._ids = itertools.count(1)
        self._orders = itertools.count(1)

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
            self._holders.clear()
            self._followed.clear()

    def cancel_by_unique_key(self, key: bytes, *, reason: str | None = None, force: bool = False) -> Controlled:
        """Cancel the job that holds a unique key; see :meth:`awa.Client.cancel_by_unique_key`."""
        with self._lock:
            holder = self._holder(check_key(key))
            if holder is None:
                raise JobNotFound(f"no job holds the unique key {bytes(key).hex()}", job_id=0)
            return self.cancel(holder.id, reason=reason, force=force)

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
            self._tell(entry, "cancelled", None, _cancelled(reason or "cancelled by an operator"))
            self._end(entry, JobState.CANCELLED)
            return Controlled(entry.id, "cancelled", entry.state)

    # --- for the rest of this package

    def advance(self, step: timedelta) -> int:
        """Bring the times of everything that waits closer; returns how many jobs became available."""
        with self._lock:
            for entry in self._entries.values():
                if entry.run_at is not None:
                    entry.run_at -= step
                if entry.expires_at is not None and entry.waits_for is not None:
                    entry.expires_at -= step
            return self.promote()

    def add(self, rows: Sequence[JobRow]) -> list[Written]:
        """Write jobs, all or nothing; what became of them, in the order of *rows*.

        Raises:
            UniqueConflict: A key of a row that refuses it is held.
            JobNotFound: A parent does not exist.
            ValidationError: A job that would be replaced would wait for itself.
        """
        with self._lock:
            now = datetime.now(UTC)
            rows = keyed(list(rows), now.timestamp())
            for n, row in enumerate(rows, start=1):
                for parent in row.parents or ():
                    if parent not in self._entries:
                        enqueued(rows, [(n, parent, False, "no_parent")])
            ids = [JobId(next(self._ids)) for _ in rows]
            wanted: dict[bytes, JobId] = {}  # key -> whose it is now
            for job_id, row in zip(ids, rows, strict=True):
                if isinstance(row.unique, bytes):
                    key = row.unique[:KEY_BYTES]
                    holder = self._holder(key)
                    wanted.setdefault(key, job_id if holder is None else holder.id)
            owners = [
                wanted[row.unique[:KEY_BYTES]] if isinstance(row.unique, bytes) else job_id
                for job_id, row in zip(ids, rows, strict=True)
            ]
            for n, (job_id, owner, row) in enumerate(zip(ids, owners, rows, strict=True), start=1):
                if owner != job_id and row.on_conflict == "raise":
                    enqueued(rows, [(n, None if owner in ids else owner, False, "conflict")])
                if owner != job_id and row.on_conflict == "replace" and self._is_circle(owner, row.parents or ()):
                    enqueued(rows, [(n, owner, False, "circle")])
            for job_id, owner, row in zip(ids, owners, rows, strict=True):
                if owner == job_id:
                    self._write(job_id, row, now)
            for job_id, owner, row in zip(ids, owners, rows, strict=True):
                if owner != job_id and row.on_conflict == "replace":
                    self._replace(self._entries[owner], row, now)
            return [Written(owner, owner == job_id) for job_id, owner in zip(ids, owners, strict=True)]

    def _write(self, job_id: JobId, row: JobRow, now: datetime) -> None:
        entry = Entry(job_id, row, created_at=now, expires_at=row.expires_at, parents=row.parents or ())
        self._entries[job_id] = entry
        if entry.key is not None:
            self._holders[entry.key[:KEY_BYTES]] = entry
        run_at = _due(row, now)
        if entry.parents:
            entry.state, entry.run_at, entry.waits_for = JobState.SCHEDULED, run_at, "parent"
        elif run_at is None:
            entry.order = next(self._orders)
        else:
            self._wait(entry, JobState.SCHEDULED, run_at)

    def _is_circle(self, job_id: int, parents: Iterable[int]) -> bool:
        """Whether a job that waits would wait for itself, were these its parents."""
        before: set[int] = set()
        unseen = set(parents)
        while unseen:
            before |= unseen
            found = [self._entries[one] for one in unseen if one in self._entries]
            unseen = {parent for one in found if one.waits_for == "parent" for parent in one.parents} - before
        return job_id in before and self._entries[job_id].waits_for is not None

    def _replace(self, entry: Entry, row: JobRow, now: datetime) -> None:
        """What a job that waits is about; its id, key, attempts and history stay."""
        if entry.waits_for is None or self._is_circle(entry.id, row.parents or ()):
            return
        failed = entry.row.on_parent_failure if row.parents is None else row.on_parent_failure
        entry.row = row._replace(unique=entry.row.unique, on_parent_failure=failed)
        entry.expires_at = row.expires_at
        run_at = _due(row, now)
        if row.parents is not None:
            entry.parents = row.parents
        if row.parents is not None or entry.waits_for == "parent":
            entry.waits_for, entry.run_at = "parent", run_at
        elif run_at is not None or entry.waits_for != "kind":
            entry.waits_for, entry.run_at = "time", run_at or now
        if entry.state is JobState.AVAILABLE and entry.waits_for != "kind":
            entry.state = JobState.SCHEDULED

    def _holder(self, key: bytes) -> Entry | None:
        found = self._holders.get(key)
        if found is None or self._entries.get(found.id) is not found or not found.holds_key:
            return None
        return found

    def remove(self, job_ids: Iterable[int]) -> None:
        """Forget jobs whose transaction was rolled back."""
        with self._lock:
            for job_id in job_ids:
                self._entries.pop(job_id, None)

    def promote(self) -> int:
        """Cancel what has expired while it waits, make available what is due; returns how many those are."""
        with self._lock:
            self._expire([entry for entry in self._entries.values() if entry.waits_for is not None])
            now = datetime.now(UTC)
            due = [entry for entry in self._entries.values() if _waits_until(entry) <= now]
            for entry in sorted(due, key=lambda entry: (entry.run_at, entry.id)):
                self._make_available(entry)
            return len(due)

    def _expire(self, entries: Iterable[Entry]) -> None:
        """Cancel those that may not begin any more."""
        now = datetime.now(UTC)
        for entry in entries:
            if entry.expires_at is None or entry.expires_at > now or entry.open is not None or entry.state.is_terminal:
                continue
            text = f"it expired at {entry.expires_at.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"
            self._tell(entry, "cancelled", None, {"type": "Expired", "text": text, "traceback": ""})
            self._end(entry, JobState.CANCELLED)

    def resolve(self) -> list[JobId]:
        """Let go who waited for jobs that have ended; returns those that are available now."""
        with self._lock:
            started: list[JobId] = []
            waiting = -1
            while len(left := [entry for entry in self._entries.values() if entry.waits_for == "parent"]) != waiting:
                waiting = len(left)
                lost = {entry.id: self._lost_parent(entry) for entry in left}
                for entry in left:  # first those that can go, as the database does
                    if lost[entry.id] is None and not self._has_open_parent(entry):
                        if entry.run_at is not None and entry.run_at > datetime.now(UTC):
                            entry.waits_for = "time"
                        else:
                            self._make_available(entry)
                            started.append(entry.id)
                for entry in left:
                    reason = lost[entry.id]
                    if reason is None:
                        continue
                    if entry.row.on_parent_failure == "discard":
                        del self._entries[entry.id]
                    else:
                        self._tell(entry, "cancelled", None, _cancelled(reason))
                        self._end(entry, JobState.CANCELLED)
            return started

    def _has_open_parent(self, entry: Entry) -> bool:
        found = [self._entries.get(parent) for parent in entry.parents]
        return any(parent is not None and not parent.state.is_terminal for parent in found)

    def _lost_parent(self, entry: Entry) -> str | None:
        """Why a job need not run: a parent has not completed, and never will."""
        if entry.row.on_parent_failure == "run":
            return None
        for parent in sorted(entry.parents):
            found = self._entries.get(parent)
            if found is None:
                return f"it was to run after job {parent}, which is gone: its history was deleted"
            if found.state in (JobState.FAILED, JobState.CANCELLED):
                how = "has failed" if found.state is JobState.FAILED else "was cancelled"
                return f"it was to run after job {parent}, which {how}"
        return None

    def freed(self) -> list[JobId]:
        """The jobs that outcomes have inserted or let go since the last call."""
        with self._lock:
            followed, self._followed = self._followed, []
            return followed + self.resolve()

    def make_due(self, *, queue: str | None, kinds: Iterable[str]) -> None:
        """Let the time come for everything of *queue* and *kinds* that waits for it."""
        with self._lock:
            now, known = datetime.now(UTC), set(kinds)
            due = [
                (entry.run_at, entry.id, entry)
                for entry in self._entries.values()
                if entry.waits_for == "time"
                and entry.run_at is not None
                and entry.run_at > now
                and entry.row.kind in known
                and queue in (None, entry.row.queue)
            ]
            # a microsecond apart, in the order in which they would have become due
            for back, (_, _, entry) in enumerate(sorted(due, reverse=True)):
                entry.run_at = now - timedelta(microseconds=back)

    def count_ended(self) -> int:
        """How many jobs have ended without completing."""
        with self._lock:
            return sum(entry.state in (JobState.FAILED, JobState.CANCELLED) for entry in self._entries.values())

    def queues(self) -> list[str]:
        """Every queue that has, or had, a job, by name."""
        with self._lock:
            return sorted({entry.row.queue for entry in self._entries.values()})

    def can_begin(self, job_id: int, handlers: dict[str, Handler]) -> bool:
        """Whether the job is available and has a handler."""
        with self._lock:
            found = self._entries.get(job_id)
            if found is not None:
                self._expire([found])
            return found is not None and found.state is JobState.AVAILABLE and found.row.kind in handlers

    def claim(self, queue: str, handlers: dict[str, Handler]) -> Attempt | None:
        """Begin an attempt on the first available job of *queue*."""
        with self._lock:
            waiting = [e for e in self._entries.values() if e.state is JobState.AVAILABLE and e.row.queue == queue]
            for entry in sorted(waiting, key=lambda entry: (entry.row.priority, entry.order)):
                if entry.row.kind not in handlers:
                    entry.waits_for = "kind"
                elif (attempt := self.begin(entry.id, handlers)) is not None:
                    return attempt  # else it has expired
            return None

    def begin(self, job_id: int, handlers: dict[str, Handler]) -> Attempt | None:
        """Begin an attempt on a job; None when it is not available, or has no handler."""
        with self._lock:
            if not self.can_begin(job_id, handlers):
                return None
            entry = self._entries[job_id]
            entry.state, entry.claimed_at, entry.waits_for = JobState.RUNNING, datetime.now(UTC), None
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
            told = None if ending.told is None else orjson.loads(ending.told)
            outcome = ending.outcome
            if outcome == "completed" and ending.told is not None:
                entry.is_kept, entry.result = True, told
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
                self._wait(entry, state, datetime.now(UTC) + timedelta(seconds=ending.delay))
            else:
                self._make_available(entry)

    def wait(self, job_id: int, timeout: float | None) -> Ended:
        """How a job has ended, as :meth:`awa.storage.results.Results.wait` tells it; nothing is waited for."""
        info = self.get(job_id)
        if not info.state.is_terminal:
            raise TimeoutError(
                f"job {job_id} has not ended: it is {info.state}, and inline nothing runs while somebody waits; "
                "run_all(client) runs what is available"
            )
        entry = self._entries[job_id]
        return Ended(info.state, is_kept=entry.is_kept, result=entry.result, error=info.error)

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
        now = datetime.now(UTC)
        entry.state, entry.run_at, entry.waits_for, entry.ended_at = state, None, None, now
        follow_ups = {} if entry.row.follow_ups is None else orjson.loads(entry.row.follow_ups)
        for said in follow_ups.get(state, ()):
            job_id = JobId(next(self._ids))
            self._write(job_id, _row_of(said), now)
            self._followed.append(job_id)

    def _tell(self, entry: Entry, outcome: str, elapsed_ms: int | None, told: dict[str, Any]) -> None:
        entry.history.append(
            {
                "attempt": entry.number,
                "outcome": outcome,
                "ended_at": datetime.now(UTC).isoformat(),
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
            concurrency_key=row.concurrency_key,
            ordering_key=row.ordering_key,
            expires_at=None if entry.state in (JobState.FAILED, JobState.CANCELLED) else entry.expires_at,
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


def _due(row: JobRow, now: datetime) -> datetime | None:
    """When a job that is written *now* is due; None: at once."""
    run_at = now + timedelta(seconds=row.delay) if row.delay else row.run_at
    return None if run_at is None or run_at <= now else run_at


def _waits_until(entry: Entry) -> datetime:
    return entry.run_at if entry.waits_for == "time" and entry.run_at is not None else _NEVER


_NEVER = datetime.max.replace(tzinfo=UTC)


def _row_of(said: dict[str, Any]) -> JobRow:
    """A follow-up, as it is stored with the job that it follows; see :mod:`awa.insert`."""
    return JobRow(
        queue=said["queue"],
        kind=said["kind"],
        args=orjson.dumps(said["args"]),
        priority=said["priority"],
        max_attempts=said["max_attempts"],
        timeout_ms=said.get("timeout_ms"),
        tags=tuple(said["tags"]) if "tags" in said else None,
        metadata=orjson.dumps(said["metadata"]) if "metadata" in said else None,
        concurrency_key=said.get("concurrency_key"),
        ordering_key=said.get("ordering_key"),
        expires_at=datetime.fromisoformat(said["expires_at"]) if "expires_at" in said else None,
        run_at=datetime.fromisoformat(said["run_at"]) if "run_at" in said else None,
        delay=said.get("delay"),
        follow_ups=orjson.dumps(said["follow_ups"]) if "follow_ups" in said else None,
    )


def _cancelled(reason: str, told: dict[str, Any] | None = None) -> dict[str, Any]:
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
