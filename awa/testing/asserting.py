"""What a test says about the jobs that were inserted, and what it reads when that is not so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import orjson

from awa import options
from awa.args import Codec, FunctionCodec, codec_for
from awa.client import Client
from awa.errors import AwaError, ConfigError
from awa.job import JobState, as_seconds
from awa.lent import Lent
from awa.registry import BoundArgs, Task
from awa.storage import trial
from awa.storage.jobs import JobInfo
from awa.storage.lent import lent
from awa.storage.schema import Schema
from awa.testing.book import Book
from awa.testing.inline import book_of

MOST_READ = 10_000
"""Most jobs that are looked at, the newest."""

MOST_SHOWN = 20
"""Most jobs in the text of a failure."""

_ANY_SIZE = 2**31

Where = Client | Book | Lent
"""Where jobs are looked for: a client, inline or on its database; a book; a lent connection, in its transaction."""

What = str | type | Task[..., Any] | BoundArgs | object


def assert_inserted(
    where: Where,
    what: What,
    *,
    args: Mapping[str, Any] | object | None = None,
    queue: str | None = None,
    priority: int | None = None,
    max_attempts: int | None = None,
    tags: Iterable[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    state: JobState | str | None = None,
    run_at: datetime | None = None,
    delay: float | timedelta | None = None,
    within: float | timedelta = 1.0,
    count: int | None = None,
    schema: str | None = None,
) -> list[JobInfo]:
    """Assert that there are such jobs, in whatever state they are by now; returns them in the order of their inserts.

    Args:
        where: A client; or the connection or cursor of a transaction, which sees what it has not committed too; or the
            book of :func:`awa.testing.inline`.
        what: A kind; a task; a type of args; or ``task.bind(...)`` or an instance of a type of args, and then the args
            must be these.
        args: A mapping of some of the args, with values as JSON or as the handler gets them, or all of them as an
            instance of their type.
        queue, priority, max_attempts, state: As the job has it.
        tags: All of these, perhaps among others.
        metadata: All of these, perhaps among others.
        run_at: When it is due, give or take *within*.
        delay: Seconds from its insert until it is due, give or take *within*.
        within: Seconds.
        count: How many there are, exactly; None: at least one.
        schema: Where the tables are, when *where* is a connection; None: ``awa``.

    Raises:
        AssertionError: There are none, or not so many; it lists the jobs that there are.
        ConfigError: *what* or *where* can be none, or an option cannot be meant.
        ValidationError: The same.
    """
    __tracebackhide__ = True
    asked = _Asked(
        where, what, args=args, queue=queue, priority=priority, max_attempts=max_attempts, tags=tags, metadata=metadata,
        state=state, run_at=run_at, delay=delay, within=within,
    )  # fmt: skip
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
        raise ConfigError(f"count must be how many jobs there are, 0 or more, got {count!r}")
    jobs = list_jobs(where, schema=schema)
    found = [job for job in jobs if asked.is_met_by(job)]
    if found if count is None else len(found) == count:
        return found
    said = "no job" if count is None else "1 job" if len(found) == 1 else f"{len(found)} jobs"
    wanted = "" if count is None else f", not {count},"
    raise AssertionError(f"{said}{wanted} {asked} was inserted; {shown(jobs)}")


def assert_not_inserted(
    where: Where,
    what: What,
    *,
    args: Mapping[str, Any] | object | None = None,
    queue: str | None = None,
    priority: int | None = None,
    max_attempts: int | None = None,
    tags: Iterable[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    state: JobState | str | None = None,
    run_at: datetime | None = None,
    delay: float | timedelta | None = None,
    within: float | timedelta = 1.0,
    schema: str | None = None,
) -> None:
    """Assert that there is no such job; the arguments are those of :func:`assert_inserted`.

    Raises:
        AssertionError: There is one; it lists those that there are.
        ConfigError, ValidationError: As for :func:`assert_inserted`.
    """
    __tracebackhide__ = True
    asked = _Asked(
        where, what, args=args, queue=queue, priority=priority, max_attempts=max_attempts, tags=tags, metadata=metadata,
        state=state, run_at=run_at, delay=delay, within=within,
    )  # fmt: skip
    found = [job for job in list_jobs(where, schema=schema) if asked.is_met_by(job)]
    if found:
        raise AssertionError(f"a job {asked} was inserted; {shown(found)}")


def list_jobs(where: Where, *, schema: str | None = None) -> list[JobInfo]:
    """Every job, in whatever state, in the order of the inserts: the newest 10,000.

    Raises:
        ConfigError: *where* is neither a client nor a book nor a connection that can be lent.
    """
    if isinstance(where, Client):
        book = book_of(where)
        if book is not None:
            return book.jobs
        with where._own() as conn:
            return trial.list_jobs(conn, where._schema, limit=MOST_READ)
    if isinstance(where, Book):
        return where.jobs
    with lent(where) as conn:
        return trial.list_jobs(conn, Schema(schema or "awa"), limit=MOST_READ)


def shown(jobs: Sequence[JobInfo]) -> str:
    """*jobs* as the end of a sentence, one a line, the newest of many."""
    if not jobs:
        return "there are none at all"
    many = f"there are {len(jobs)} jobs" if len(jobs) > 1 else "there is 1 job"
    left_out = f", the last {MOST_SHOWN} are" if len(jobs) > MOST_SHOWN else ""
    return f"{many}{left_out}:\n" + "\n".join(f"  {_line(job)}" for job in jobs[-MOST_SHOWN:])


def _line(job: JobInfo) -> str:
    parts = [f"{job.id} {job.kind} {_cut(_json(job.args))} {job.state}", f"queue={job.queue!r}"]
    if job.priority != 2:
        parts.append(f"priority={job.priority}")
    if job.run_at is not None:
        parts.append(f"run_at={job.run_at.isoformat()}")
    if job.tags:
        parts.append(f"tags={job.tags}")
    if job.metadata:
        parts.append(f"metadata={_cut(_json(job.metadata))}")
    if job.error is not None:
        parts.append(_cut(f"error={job.error.get('type')}: {job.error.get('text')}"))
    return " ".join(parts)


def _json(value: object) -> str:
    return orjson.dumps(value).decode()


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:190]}... ({len(text):,} characters)"


class _Asked:
    """Which jobs are meant."""

    def __init__(
        self,
        where: Where,
        what: What,
        *,
        args: Mapping[str, Any] | object | None,
        queue: str | None,
        priority: int | None,
        max_attempts: int | None,
        tags: Iterable[str] | None,
        metadata: Mapping[str, Any] | None,
        state: JobState | str | None,
        run_at: datetime | None,
        delay: float | timedelta | None,
        within: float | timedelta,
    ) -> None:
        self._kinds, self._codec, whole = _meaning(where, what)
        if whole is not None and args is not None:
            raise ConfigError("what has args already: leave args= out, or give the task or the type instead")
        self._whole: Any = None
        """All of the args, as JSON."""
        self._some: dict[str, Any] = {}
        if whole is None and args is not None and not isinstance(args, Mapping):
            if isinstance(self._codec, FunctionCodec):
                raise ConfigError(f"args must be a mapping: some of the args by name, got {type(args).__name__}")
            whole = args
        if whole is not None:
            codec = self._codec or codec_for(type(whole))
            self._whole = orjson.loads(codec.dump(whole, _ANY_SIZE))
        elif args is not None:
            self._some = dict(args)  # type: ignore[call-overload]  # a mapping
        self._equal: dict[str, Any] = {
            name: value
            for name, value in {
                "queue": None if queue is None else options.check_queue(queue),
                "priority": None if priority is None else options.check_priority(priority),
                "max_attempts": None if max_attempts is None else options.check_max_attempts(max_attempts),
                "state": None if state is None else _check_state(state),
            }.items()
            if value is not None
        }
        self._tags = () if tags is None else options.check_tags(tags)
        self._metadata = dict(metadata or {})
        self._run_at = None if run_at is None else options.check_run_at(run_at)
        self._delay = None if delay is None else options.check_delay(delay)
        self._within = as_seconds(within, "within")

    def is_met_by(self, job: JobInfo) -> bool:
        if job.kind not in self._kinds:
            return False
        if any(getattr(job, name) != value for name, value in self._equal.items()):
            return False
        if self._whole is not None and not _same(job.args, self._whole):
            return False
        if self._some and not self._has_some(job):
            return False
        if not set(self._tags) <= set(job.tags):
            return False
        metadata = job.metadata if isinstance(job.metadata, dict) else {}
        if not all(name in metadata and _same(metadata[name], value) for name, value in self._metadata.items()):
            return False
        if self._run_at is not None and (
            job.run_at is None or abs((job.run_at - self._run_at).total_seconds()) > self._within
        ):
            return False
        if self._delay is None:
            return True
        due = 0.0 if job.run_at is None else (job.run_at - job.created_at).total_seconds()
        return abs(due - self._delay) <= self._within

    def _has_some(self, job: JobInfo) -> bool:
        stored = job.args if isinstance(job.args, dict) else {}
        loaded: Any = None
        for name, value in self._some.items():
            if name not in stored:
                return False
            if _same(stored[name], value):
                continue
            if loaded is None and self._codec is not None:
                try:
                    loaded = self._codec.load(orjson.dumps(stored))
                except AwaError:
                    return False  # not what a handler could get
            given = loaded.get(name) if isinstance(loaded, dict) else getattr(loaded, str(name), None)
            if loaded is None or type(given) is not type(value) or not _same(given, value):
                return False
        return True

    def __str__(self) -> str:
        parts = [" or ".join(self._kinds)]
        if self._whole is not None:
            parts.append(f"with exactly the args {_cut(_json(self._whole))}")
        if self._some:
            parts.append(f"with args {_cut(repr(self._some))}")
        parts += [f"{name}={str(value) if name == 'state' else repr(value)}" for name, value in self._equal.items()]
        if self._tags:
            parts.append(f"tags={list(self._tags)}")
        if self._metadata:
            parts.append(f"metadata={_cut(repr(self._metadata))}")
        if self._run_at is not None:
            parts.append(f"run_at={self._run_at.isoformat()} within {self._within:g} s")
        if self._delay is not None:
            parts.append(f"delay={self._delay:g} within {self._within:g} s")
        return " ".join(parts)


def _meaning(where: Where, what: What) -> tuple[list[str], Codec | None, object]:
    """The kinds that are meant, how their args are written if that is known, and all of the args if *what* has them."""
    if isinstance(what, Task):
        return [what.kind, *what.aliases], what.codec, None
    if isinstance(what, BoundArgs):
        return [what.task.kind, *what.task.aliases], what.task.codec, what.args
    registry = where.registry if isinstance(where, Client) else None
    if isinstance(what, str):
        kind = options.check_kind(what)
        task = None if registry is None else registry.find(kind)
        return [kind], None if task is None else task.codec, None
    args_type = what if isinstance(what, type) else type(what)
    if registry is None:
        raise ConfigError(
            f"which kind has args of type {args_type.__name__} is known to a client: give the kind or the task"
        )
    task = registry.for_type(args_type)
    if task is None:
        raise ConfigError(f"no task takes {args_type.__name__}: give a kind, a task, or the type of a task's args")
    return [task.kind, *task.aliases], task.codec, None if isinstance(what, type) else what


def _check_state(state: JobState | str) -> JobState:
    try:
        return JobState(state)
    except ValueError:
        raise ConfigError(f"state must be one of {', '.join(JobState)}, got {state!r}") from None


def _same(stored: object, value: object) -> bool:
    """Whether two values are equal, and True is not 1, which Python takes for equal."""
    if isinstance(stored, bool) or isinstance(value, bool):
        return stored is value
    if isinstance(stored, dict) and isinstance(value, Mapping):
        return stored.keys() == value.keys() and all(_same(one, value[name]) for name, one in stored.items())
    if isinstance(stored, list) and isinstance(value, list):
        return len(stored) == len(value) and all(map(_same, stored, value))
    return bool(stored == value)
