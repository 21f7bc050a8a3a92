"""The producer's side: validate jobs, then write them, in the caller's transaction when there is one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import chain, islice
from sys import modules
from typing import Any, Literal, Protocol, TypedDict

import orjson
from psycopg import AsyncConnection, Connection

from awa import options, trace
from awa._core import dump_json
from awa.args import codec_for
from awa.errors import ConfigError, ValidationError
from awa.job import JobId
from awa.lent import AsyncLent, Driver, Lent
from awa.registry import BoundArgs, Registry, Task, TaskOptions
from awa.storage import jobs
from awa.storage.clock import DatabaseClock
from awa.storage.connection import repeated
from awa.storage.jobs import AT_ONCE, JobInfo, JobRow, KeyAt, Written
from awa.storage.lent import lent, lent_async
from awa.storage.schema import Schema
from awa.unique import Unique, check_unique

FIRST_LOOK = 500
"""Jobs of a COPY that are validated before anything is sent."""

NOT_BY_COPY = {"run_at": "run_at", "delay": "delay", "unique": "unique", "follow_ups": "follow-ups", "parents": "after"}
"""Fields of a row, and the option that fills each."""


class HasId(Protocol):
    """A job, as an insert returned it, or as it was looked up."""

    @property
    def id(self) -> JobId:
        """Its id."""


Parents = int | HasId | Iterable[int | HasId]
"""What ``after=`` takes."""


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to insert: its args, and options that override what its task and the client say."""

    args: Any
    """An instance of a task's args type, what ``task.bind(...)`` gave, or a mapping together with *kind*."""
    kind: str | None = field(default=None, kw_only=True)
    """Needed with a mapping; else the args know it."""
    queue: str | None = field(default=None, kw_only=True)
    """Where it waits."""
    priority: int | None = field(default=None, kw_only=True)
    """1, which runs first, to 4."""
    max_attempts: int | None = field(default=None, kw_only=True)
    """1 to 1000."""
    timeout: float | timedelta | None = field(default=None, kw_only=True)
    """Seconds that an attempt may take, at most 24 days; 0 for no limit."""
    run_at: datetime | None = field(default=None, kw_only=True)
    """Not before this instant; in the past means now."""
    delay: float | timedelta | None = field(default=None, kw_only=True)
    """Not before so many seconds from now, by the database's clock."""
    tags: Iterable[str] | None = field(default=None, kw_only=True)
    """At most 20, for finding it again."""
    metadata: dict[str, Any] | None = field(default=None, kw_only=True)
    """JSON that travels with the job and is not given to the handler as args."""
    concurrency_key: str | None = field(default=None, kw_only=True)
    """1 to 200 characters that it shares with others, of which a queue runs ``max_running_per_key`` at once."""
    ordering_key: str | None = field(default=None, kw_only=True)
    """1 to 200 characters that it shares with others, of which a queue runs one after the other has ended for good, in
    the order in which they arrived."""
    expires_at: datetime | None = field(default=None, kw_only=True)
    """No attempt begins after this instant; the job is cancelled instead."""
    unique: Unique | Literal[False] | None = field(default=None, kw_only=True)
    """What makes it equal to others, of which there is one at most; False: nothing, whatever its task says."""
    after: Parents | None = field(default=None, kw_only=True)
    """Runs when these jobs, 1 to 100, have completed: what an insert returned, or ids. With *run_at* or *delay*, not
    before that either."""
    after_failed: str | None = field(default=None, kw_only=True)
    """When one of them has not completed but failed, was cancelled, or is gone: ``cancel`` (the default) this job too,
    ``run`` it all the same, or ``discard`` it, of which no trace is left."""
    on_completed: Any = field(default=None, kw_only=True)
    """A job to enqueue when this one has completed, in the transaction that records it: args, a NewJob, or a list of
    these. A delay counts from then. What is unique, or runs after others, cannot follow."""
    on_failed: Any = field(default=None, kw_only=True)
    """Likewise, when it has failed for good."""
    on_cancelled: Any = field(default=None, kw_only=True)
    """Likewise, when it is cancelled."""


class Options(TypedDict, total=False):
    """The options of a job by name, as :class:`NewJob` describes them."""

    kind: str | None
    queue: str | None
    priority: int | None
    max_attempts: int | None
    timeout: float | timedelta | None
    run_at: datetime | None
    delay: float | timedelta | None
    tags: Iterable[str] | None
    metadata: dict[str, Any] | None
    concurrency_key: str | None
    ordering_key: str | None
    expires_at: datetime | None
    unique: Unique | Literal[False] | None
    after: Parents | None
    after_failed: str | None
    on_completed: Any
    on_failed: Any
    on_cancelled: Any


class Reader(Protocol):
    """Finds jobs again; the client is one."""

    def get(self, job_id: int) -> JobInfo:
        """The job as the database knows it."""

    def result(self, job_id: int, timeout: float | timedelta | None = None) -> Any:
        """What its handler returned, once it has."""


@dataclass(frozen=True, slots=True)
class Inserted:
    """A job that was written."""

    id: JobId
    """The job."""
    is_new: bool = True
    """False when an equal job existed and this is its id."""
    _reader: Reader | None = field(default=None, repr=False, compare=False)

    def get(self) -> JobInfo:
        """The job as the database knows it now; after the transaction of the insert has committed.

        Raises:
            JobNotFound: The insert was rolled back, is not committed yet, or the job's history is gone.
        """
        assert self._reader is not None
        return self._reader.get(self.id)

    def result(self, timeout: float | timedelta | None = None) -> Any:
        """What the job's handler returned, once it has ended; see :meth:`awa.Client.result`."""
        assert self._reader is not None
        return self._reader.result(self.id, timeout)


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the client says about jobs when neither the call nor the task does."""

    queue: str = "default"
    """Where they wait."""
    priority: int = 2
    """1 to 4."""
    max_attempts: int = 25
    """1 to 1000."""
    max_args_bytes: int = 256 * 1024
    """Most bytes of a job's args, and of its metadata."""


def prepare(item: object, registry: Registry, defaults: Defaults, depth: int = 0) -> JobRow:
    """Validate a job and settle its options: the call, the task, the client, the default.

    Args:
        item: A NewJob, or args with no options.
        depth: How many jobs it follows, one after the other.

    Raises:
        ValidationError: Its args or an option cannot be stored; nothing was sent to the database.
        ConfigError: Nothing says which kind it is.
    """
    if not isinstance(item, NewJob):
        if type(item) is BoundArgs:  # the same as _body does, without the way there
            task: Task[..., Any] | None = item.task
            args: Any = item.args
            kind, body = item.task.kind, item.task.codec.dump(args, defaults.max_args_bytes)
        else:
            kind, body, task, args = _body(item, None, registry, defaults)
        said = _NOTHING if task is None else task.options
        row = JobRow(
            said.queue or defaults.queue,
            kind,
            body,
            said.priority or defaults.priority,
            said.max_attempts or defaults.max_attempts,
        )
        if said.has_keys:
            assert task is not None
            row = row._replace(concurrency_key=task.concurrency_key_of(args), ordering_key=task.ordering_key_of(args))
        if said.unique is not None:
            row = _with_key(row, said.unique)
    else:
        row = _settled(item, registry, defaults, depth)
    return _traced(row) if trace.API in modules else row


def _traced(row: JobRow) -> JobRow:
    """*row* with the trace context of now in its metadata, unless that has one."""
    context = trace.trace_context()
    if not context:
        return row
    given = {} if row.metadata is None else orjson.loads(row.metadata)
    return row if "traceparent" in given else row._replace(metadata=orjson.dumps(given | context))


def _settled(new: NewJob, registry: Registry, defaults: Defaults, depth: int) -> JobRow:
    """*new* validated, with what it, its task, the client and the defaults say."""
    given_kind = None if new.kind is None else options.check_kind(new.kind)
    kind, body, task, args = _body(new.args, given_kind, registry, defaults)
    said = _NOTHING if task is None else task.options
    timeout = None if new.timeout is None else options.check_timeout(new.timeout)
    delay = None if new.delay is None else options.check_delay(new.delay)
    run_at = None if new.run_at is None else options.check_run_at(new.run_at)
    if run_at is not None and delay is not None:
        raise ValidationError("run_at and delay exclude each other: give one", path="delay", value=new.delay)
    concurrency_key, ordering_key, expires_at = new.concurrency_key, new.ordering_key, new.expires_at
    if concurrency_key is not None:
        concurrency_key = options.check_job_key(concurrency_key, "concurrency_key")
    if ordering_key is not None:
        ordering_key = options.check_job_key(ordering_key, "ordering_key")
    if said.has_keys:
        assert task is not None
        concurrency_key = task.concurrency_key_of(args) if concurrency_key is None else concurrency_key
        ordering_key = task.ordering_key_of(args) if ordering_key is None else ordering_key
    if expires_at is not None:
        expires_at = options.check_expires_at(expires_at, run_at)
    parents = None if new.after is None else options.check_after(new.after)
    after_failed = None if new.after_failed is None else options.check_after_failed(new.after_failed)
    if after_failed is not None and parents is None:
        raise ValidationError(
            f"after_failed={after_failed!r} says what happens when a job of after= fails: give after, too",
            path="after_failed",
            value=after_failed,
        )
    row = JobRow(
        (said.queue or defaults.queue) if new.queue is None else options.check_queue(new.queue),
        kind,
        body,
        (said.priority or defaults.priority) if new.priority is None else options.check_priority(new.priority),
        (said.max_attempts or defaults.max_attempts)
        if new.max_attempts is None
        else options.check_max_attempts(new.max_attempts),
        None if timeout is None else options.milliseconds(timeout),
        None if new.tags is None else options.check_tags(new.tags),
        None if new.metadata is None else _metadata(new.metadata, defaults.max_args_bytes),
        concurrency_key,
        ordering_key,
        expires_at,
        run_at,
        delay or None,
        parents=parents,
        on_parent_failure=after_failed,
        follow_ups=_follow_ups(new, registry, defaults, depth),
    )
    if new.unique is None:
        return row if said.unique is None else _with_key(row, said.unique)
    if new.unique is False:
        return row
    unique = check_unique(new.unique)
    assert unique is not None
    unique.check_names((codec_for(type(new.args)) if task is None else task.codec).names, kind)
    return _with_key(row, unique)


MOST_FOLLOWING = 20
"""How many jobs may follow one another."""


def _follow_ups(new: NewJob, registry: Registry, defaults: Defaults, depth: int) -> bytes | None:
    """JSON text of what is to follow *new*; see migrations/0018_outcomes.sql."""
    if new.on_completed is None and new.on_failed is None and new.on_cancelled is None:
        return None
    if depth == MOST_FOLLOWING:
        raise ValidationError(
            f"more than {MOST_FOLLOWING} jobs follow one another: let a handler insert what comes later",
            path="follow_ups",
            value=new,
            limit=MOST_FOLLOWING,
        )
    found: dict[str, list[dict[str, Any]]] = {}
    for name in ("on_completed", "on_failed", "on_cancelled"):
        given = getattr(new, name)
        items = () if given is None else given if isinstance(given, (list, tuple)) else (given,)
        rows = [
            _follow_up(f"{name}[{position}]", item, registry, defaults, depth + 1)
            for position, item in enumerate(items)
        ]
        if rows:
            found[name.removeprefix("on_")] = rows
    text = orjson.dumps(found)
    limit = defaults.max_args_bytes
    if len(text) > limit:
        raise ValidationError(
            f"the follow-ups take {len(text):,} bytes as JSON, the limit is {limit:,}: store the data elsewhere and "
            "send a reference, or raise max_args_bytes",
            path="follow_ups",
            value=len(text),
            limit=limit,
        )
    return text if found else None


def _follow_up(path: str, item: object, registry: Registry, defaults: Defaults, depth: int) -> dict[str, Any]:
    try:
        row = prepare(item, registry, defaults, depth)
    except ValidationError as error:
        raise _within(path, error) from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    for name, value, advice in (
        ("unique", row.unique, "say unique=False"),
        ("after", row.parents, "leave after out"),
    ):
        if value is not None:
            raise ValidationError(
                f"{path} has {name}, but a follow-up must not wait for other jobs, since a worker inserts it as it "
                f"records the outcome: {advice}, or have a handler insert the job",
                path=f"{path}.{name}",
                value=value,
            )
    stored: dict[str, Any] = {
        "kind": row.kind,
        "queue": row.queue,
        "args": orjson.Fragment(row.args),
        "priority": row.priority,
        "max_attempts": row.max_attempts,
        "timeout_ms": row.timeout_ms,
        "tags": row.tags,
        "metadata": None if row.metadata is None else orjson.Fragment(row.metadata),
        "concurrency_key": row.concurrency_key,
        "ordering_key": row.ordering_key,
        "expires_at": None if row.expires_at is None else row.expires_at.isoformat(),
        "run_at": None if row.run_at is None else row.run_at.isoformat(),
        "delay": row.delay,
        "follow_ups": None if row.follow_ups is None else orjson.Fragment(row.follow_ups),
    }
    return {name: value for name, value in stored.items() if value is not None}


def _within(path: str, error: ValidationError) -> ValidationError:
    """*error* of a job that is part of something, told with its place there."""
    return ValidationError(f"{path}: {error}", path=f"{path}.{error.path}", value=error.value, limit=error.limit)


_NOTHING = TaskOptions()


def _with_key(row: JobRow, unique: Unique) -> JobRow:
    """*row* with its key; with what gives the key from the database's time, when that is part of it."""
    if unique.period is not None and row.run_at is None:
        delay = row.delay or 0.0
        key: bytes | KeyAt = lambda now: unique.key(row.kind, row.args, row.queue, now + delay)  # noqa: E731
    else:
        key = unique.key(row.kind, row.args, row.queue, None if row.run_at is None else row.run_at.timestamp())
    return row._replace(unique=key, on_conflict=unique.on_conflict)


def _body(
    args: Any, kind: str | None, registry: Registry, defaults: Defaults
) -> tuple[str, bytes, Task[..., Any] | None, Any]:
    """The kind of a job, the JSON text of its args, the task that will run it, when this process knows it, and the args
    as that task takes them."""
    limit = defaults.max_args_bytes
    if type(args) is BoundArgs:
        return kind or args.task.kind, args.dump(limit), args.task, args.args
    if isinstance(args, NewJob):
        raise ConfigError("args is a NewJob already: insert it as it is, its options belong inside it")
    task = registry.for_type(type(args)) if kind is None else registry.find(kind)
    if task is None:
        if kind is None:
            raise ConfigError(f"no task takes {type(args).__name__}: {_advice(args)}")
        return kind, codec_for(type(args)).dump(args, limit), None, args
    if not task.is_typed and isinstance(args, dict):
        args = _bound(task, args)
    return kind or task.kind, task.codec.dump(args, limit), task, args


def _advice(args: object) -> str:
    """What to insert instead of *args*, which no task takes."""
    if isinstance(args, Task):
        return f"insert what the bind(...) of the task {args.kind} gives, with its arguments"
    if args is None:
        return "insert task.bind(...), which does not call the function, as task(...) does"
    if callable(args) and not isinstance(args, type):
        return "insert task.bind(...), with the arguments of a function that has @client.task()"
    if isinstance(args, (Inserted, JobInfo)):
        return "that is a job which was inserted already; after= takes it"
    return "declare one with @client.task() for a job of that type, use task.bind(...), or give kind="


def _bound(task: Task[..., Any], args: dict[str, Any]) -> dict[str, Any]:
    """The args of a plain function, given by name as a mapping with ``kind=``."""
    if not all(isinstance(name, str) for name in args):
        raise ValidationError("args must have names as keys", path="args", value=args)
    return task.bind(**args).args


def keyed(rows: list[JobRow], now: float) -> list[JobRow]:
    """*rows* with the keys that depend on the database's time, which is *now*, in seconds since 1970."""
    return [row._replace(unique=row.unique(now)) if callable(row.unique) else row for row in rows]


def _metadata(value: object, limit: int) -> bytes:
    if not isinstance(value, dict):
        raise ValidationError(
            f"metadata must be a dict, got {type(value).__name__}", path="metadata", value=value, limit=limit
        )
    return dump_json(value, "metadata", limit)


def override(args: object, given: Mapping[str, object]) -> NewJob:
    """*args*, which may be a NewJob, with the options of *given* that are not None."""
    new = args if isinstance(args, NewJob) else NewJob(args)
    return replace(new, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _several(items: Any) -> Iterable[object]:
    """*items* when they are several.

    Raises:
        ValidationError: They are one job, or nothing that holds jobs.
    """
    if isinstance(items, (str, bytes, bytearray, Mapping)) or not isinstance(items, Iterable):
        raise ValidationError(
            f"items must be a list or another iterable of jobs, got a {type(items).__name__}: "
            "put a single one into a list, or use insert",
            path="items",
            value=items,
        )
    return items


@dataclass(frozen=True, slots=True)
class Producer:
    """Writes the jobs of one client."""

    registry: Registry
    """The tasks that were declared."""
    defaults: Defaults
    """Options that neither the call nor the task gives."""
    schema: Schema
    """Where the tables are."""
    notify: bool
    """Whether to wake idle workers."""
    own: Callable[[], AbstractContextManager[Connection]]
    """Lends a connection of the library's own, in autocommit mode."""
    clock: DatabaseClock = field(default_factory=DatabaseClock)
    """For keys with a period."""

    def insert(self, item: object, conn: Lent | None) -> Written:
        """Write one job, in the transaction of *conn* or in one of its own."""
        row = prepare(item, self.registry, self.defaults)
        if isinstance(conn, Connection):
            return self._write_one(row, conn)
        if conn is not None:
            with lent(conn) as driver:
                return self._write_one(row, driver)
        with self.own() as borrowed:
            return repeated(lambda: self._write_one(row, borrowed))

    def _write_one(self, row: JobRow, conn: Driver) -> Written:
        if callable(row.unique):
            [row] = self._timed([row], conn)
        return jobs.insert_job(conn, self.schema, row, notify=self.notify)

    def insert_many(self, items: Iterable[object], conn: Lent | None) -> list[Written]:
        """Write a batch by one statement, all or nothing; what became of each, in the order of *items*."""
        rows = self._batch(items)
        if not rows:
            return []
        if conn is not None:
            with lent(conn) as driver:
                return jobs.insert_jobs(driver, self.schema, self._timed(rows, driver), notify=self.notify)
        with self.own() as borrowed:
            return repeated(
                lambda: jobs.insert_jobs(borrowed, self.schema, self._timed(rows, borrowed), notify=self.notify)
            )

    def insert_many_copy(self, items: Iterable[object], conn: Lent | None) -> int:
        """Write jobs by COPY, all or nothing; they are validated as they stream."""
        rows = self._stream(items)
        first = list(islice(rows, FIRST_LOOK))  # what is refused at the beginning needs no database
        with self.own() if conn is None else lent(conn) as driver:
            return jobs.copy_jobs(driver, self.schema, chain(first, rows), notify=self.notify)

    async def insert_async(self, item: object, conn: AsyncLent | None) -> Written:
        """As :meth:`insert`; without *conn* in a thread."""
        if conn is None:
            return await asyncio.to_thread(self.insert, item, None)
        row = prepare(item, self.registry, self.defaults)
        driver = lent_async(conn)
        rows = await self._timed_async([row], driver)
        [written] = await jobs.insert_jobs_async(driver, self.schema, rows, notify=self.notify)
        return written

    async def insert_many_async(self, items: Iterable[object], conn: AsyncLent | None) -> list[Written]:
        """As :meth:`insert_many`; without *conn* in a thread."""
        if conn is None:
            return await asyncio.to_thread(self.insert_many, items, None)
        driver = lent_async(conn)
        rows = await self._timed_async(self._batch(items), driver)
        return await jobs.insert_jobs_async(driver, self.schema, rows, notify=self.notify)

    async def insert_many_copy_async(self, items: Iterable[object], conn: AsyncLent | None) -> int:
        """As :meth:`insert_many_copy`; without *conn* in a thread, which also walks through *items*."""
        if conn is None:
            return await asyncio.to_thread(self.insert_many_copy, items, None)
        rows = self._stream(items)
        first = list(islice(rows, FIRST_LOOK))
        return await jobs.copy_jobs_async(lent_async(conn), self.schema, chain(first, rows), notify=self.notify)

    def _timed(self, rows: list[JobRow], conn: Driver) -> list[JobRow]:
        """*rows* with the keys that depend on the database's time."""
        return keyed(rows, self.clock.read(conn)) if any(callable(row.unique) for row in rows) else rows

    async def _timed_async(self, rows: list[JobRow], conn: AsyncConnection[Any]) -> list[JobRow]:
        return keyed(rows, await self.clock.read_async(conn)) if any(callable(row.unique) for row in rows) else rows

    def _batch(self, items: Iterable[object]) -> list[JobRow]:
        return [self._at(position, item) for position, item in enumerate(_several(items))]

    def _stream(self, items: Iterable[object]) -> Iterator[JobRow]:
        for position, item in enumerate(_several(items)):
            row = self._at(position, item)
            if row[11:] != AT_ONCE:
                given = next(name for name in NOT_BY_COPY if getattr(row, name) is not None)
                raise ValidationError(
                    f"items[{position}] has {NOT_BY_COPY[given]}, but insert_many_copy takes jobs that are available "
                    "at once and have nothing to do with others: use insert_many for it",
                    path=f"items[{position}].{NOT_BY_COPY[given]}",
                    value=getattr(row, given),
                )
            yield row

    def _at(self, position: int, item: object) -> JobRow:
        try:
            return prepare(item, self.registry, self.defaults)
        except ValidationError as error:
            raise _within(f"items[{position}]", error) from error
