"""Running what is available in the calling thread: claimed, run and recorded as by a worker, until nothing is left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import psycopg

from awa import options
from awa._core import Attempt, Handler, Outcomes
from awa.client import Client
from awa.config import Settings
from awa.errors import AwaError, ConfigError, UnknownKind
from awa.job import JobId, JobState, Outcome
from awa.registry import Task
from awa.storage import expired, recovery, runtimes, trial, waiting
from awa.storage.jobs import JobInfo
from awa.storage.line import Line, Wanted
from awa.storage.migrate import check_schema
from awa.testing.book import Book
from awa.testing.here import Ending, handlers_of, passes_on, run_here
from awa.testing.inline import book_of, check_client, run_booked
from awa.version import VERSION
from awa.worker.claimer import PASSING
from awa.worker.identity import Identity
from awa.worker.maintenance.dependents import Dependents

MOST = 10_000
"""Most attempts of a run_all without a limit; one that comes so far has jobs that insert jobs for ever."""

PATIENCE = 5.0
"""Seconds to wait for what another holds: a worker that claims from the queue, or a transaction that is open."""


@dataclass(frozen=True, slots=True)
class Ran:
    """An attempt that was run."""

    id: JobId
    """The job."""
    kind: str
    """Which handler ran."""
    queue: str
    """Where it waited."""
    args: Any
    """As JSON gives them."""
    attempt: int
    """Its number, 1 the first time."""
    state: JobState
    """The job's state after it: ``completed``, ``retryable``, ``scheduled`` (a snooze), ``cancelled``, ``failed``; or
    ``available``, when it may run again at once."""
    outcome: Outcome | None = None
    """The Snooze, RetryAfter or Cancel that the handler chose."""
    error: BaseException | None = None
    """What the handler raised instead."""


def run_all(
    client: Client,
    *,
    queue: str | None = None,
    kind: str | Task[..., Any] | None = None,
    with_scheduled: bool = False,
    limit: int | None = None,
    raises: bool = True,
) -> list[Ran]:
    """Run available jobs in the calling thread until there are none, jobs that they insert included.

    Queue by queue in the order of their names; in a queue by priority, then as they became available. On a database the
    jobs must be committed. Each is claimed and recorded by the statements of a worker, one at a time, for a runtime
    that is registered and says goodbye. No time limit is kept, and the hooks of workers are not called.

    Args:
        queue: Only this one; None: all.
        kind: Only jobs of this kind, or task; None: of all that have a handler.
        with_scheduled: Whether jobs that wait for a time when this begins are due at once.
        limit: Most attempts to run, at least 1. None: as many as there are, up to 10,000.
        raises: Whether what a handler raises ends the run and leaves it, once it is recorded as the attempt's failure.
            Not so TerminalError, which is something that a handler says to the queue.

    Returns:
        The attempts that were run, in that order.

    Raises:
        AwaError: 10,000 attempts were run, and there was more to do; or another process holds a queue, or a handler
            completed its job in a transaction that is still open.
        ConfigError: *client* is none.
        ValidationError: *queue*, *kind* or *limit* can be none.
        UnknownKind: *kind* has no handler.
        SchemaNotMigrated: The database has no awa tables.
    """
    check_client(client)
    if limit is not None:
        limit = options.check_limit(limit, MOST)
    if queue is not None:
        queue = options.check_queue(queue)
    ran: list[Ran] = []
    with _desk(client, kind) as desk:
        if desk is None:
            return ran
        if with_scheduled:
            desk.make_due(queue)
        while True:
            desk.promote()
            before, ended = len(ran), desk.count_ended()
            for name in desk.queues() if queue is None else [queue]:
                while (limit is None or len(ran) < limit) and (one := desk.run_next(name)) is not None:
                    ran.append(one[0])
                    if raises and one[1].is_surprise and one[1].error is not None:
                        raise one[1].error
                    if limit is None and len(ran) >= MOST:
                        raise AwaError(
                            f"{MOST:,} attempts were run and there are more, the last of a job of kind "
                            f"{one[0].kind!r}: jobs that insert jobs for ever? Give a limit"
                        )
            # a claim cancels what has expired, and others may follow that, or have waited for it
            if (len(ran) == before and desk.count_ended() == ended) or len(ran) == limit:
                return ran


def run_one(
    client: Client,
    *,
    queue: str | None = None,
    kind: str | Task[..., Any] | None = None,
    with_scheduled: bool = False,
    raises: bool = True,
) -> Ran:
    """Run the first available job; as :func:`run_all` does, with its arguments.

    Raises:
        AssertionError: No job is available; it lists those that there are.
    """
    ran = run_all(client, queue=queue, kind=kind, with_scheduled=with_scheduled, limit=1, raises=raises)
    if not ran:
        from awa.testing.asserting import list_jobs, shown

        kinds = "" if kind is None else f" of kind {kind.kind if isinstance(kind, Task) else kind!r}"
        queues = "" if queue is None else f" in queue {queue!r}"
        raise AssertionError(f"no job{kinds}{queues} is available to run; {shown(list_jobs(client))}")
    return ran[0]


def advance(
    client: Client,
    step: timedelta | None = None,
    *,
    days: float = 0,
    hours: float = 0,
    minutes: float = 0,
    seconds: float = 0,
) -> int:
    """Let time pass for the jobs of *client* that wait for it, and make available what is due then.

    No clock is moved, neither the database's nor Python's. Instead everything that waits is moved: each ``run_at`` and
    ``expires_at`` comes closer by the step. What was inserted, claimed or ended keeps its time, and so does the
    ``expires_at`` of an available job.

    Args:
        step: How much; or as days, hours, minutes and seconds, which are added.

    Returns:
        How many jobs became available; :func:`run_all` runs them.

    Raises:
        ConfigError: No time would pass, or it would go back; or *client* is none.
    """
    check_client(client)
    if step is not None and not isinstance(step, timedelta):
        raise ConfigError(f"step must be a timedelta, got {step!r}: or say its unit, for example hours=2")
    try:
        by = (step or timedelta()) + timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"advance cannot tell how far to go ({error}): give numbers, for example hours=2") from None
    if by <= timedelta():
        seconds = by.total_seconds()
        raise ConfigError(f"advance by {seconds:g} s is no step forward: give more than 0, for example hours=2")
    book = book_of(client)
    if book is not None:
        return book.advance(by)
    with client._own() as conn:
        check_schema(conn, client._schema)
        trial.advance(conn, client._schema, by.total_seconds())
        _expire(conn, client)
        return _promote(conn, client)


class _Desk(Protocol):
    """Where attempts come from, and where their outcomes go."""

    def make_due(self, queue: str | None) -> None: ...
    def promote(self) -> None: ...
    def count_ended(self) -> int: ...
    def queues(self) -> list[str]: ...
    def run_next(self, queue: str) -> tuple[Ran, Ending] | None: ...


@contextmanager
def _desk(client: Client, kind: str | Task[..., Any] | None) -> Iterator[_Desk | None]:
    handlers = handlers_of(client)
    if kind is not None:
        task = kind if isinstance(kind, Task) else client.registry.get(options.check_kind(kind))
        kinds = [task.kind, *task.aliases] if isinstance(kind, Task) else [kind]
        if client.registry.find(task.kind) is not task:
            raise UnknownKind(f"the task {task!r} belongs to another client", kind=task.kind)
        handlers = {name: one for name, one in handlers.items() if name in kinds}
    book = book_of(client)
    if not handlers:
        yield None
    elif book is not None:
        yield _Inline(book, client, handlers)
    else:
        desk = _Database(client, handlers)
        try:
            yield desk
        finally:
            desk.leave()


def _ran(info: JobInfo, attempt: Attempt, ending: Ending) -> tuple[Ran, Ending]:
    ran = Ran(
        id=info.id,
        kind=info.kind,
        queue=attempt.batch.queue,
        args=info.args,
        attempt=attempt.attempt,
        state=info.state,
        outcome=ending.chosen,
        error=ending.error,
    )
    return ran, ending


class _Inline:
    """The jobs of a book."""

    def __init__(self, book: Book, client: Client, handlers: dict[str, Handler]) -> None:
        self._book = book
        self._client = client
        self._handlers = handlers

    def make_due(self, queue: str | None) -> None:
        self._book.make_due(queue=queue, kinds=self._handlers)

    def promote(self) -> None:
        self._book.resolve()
        self._book.promote()

    def count_ended(self) -> int:
        return self._book.count_ended()

    def queues(self) -> list[str]:
        return self._book.queues()

    def run_next(self, queue: str) -> tuple[Ran, Ending] | None:
        attempt = self._book.claim(queue, self._handlers)
        if attempt is None:
            return None
        ending = run_booked(self._book, attempt, self._client)
        return _ran(self._book.get(attempt.id), attempt, ending)


class _Database:
    """The jobs of a database, for a runtime that has this thread and no other."""

    def __init__(self, client: Client, handlers: Mapping[str, Handler]) -> None:
        self._client = client
        self._schema = client._schema
        self._handlers = handlers
        self._outcomes = Outcomes()
        self._dependents = Dependents(self._schema)
        with client._own() as conn:
            check_schema(conn, self._schema)
        conninfo, settings = client._conninfo(), _settings(client)
        self._identity = Identity(conninfo, self._schema, settings, VERSION, handlers)
        self._identity.register()
        self._line = Line(conninfo, self._schema, handlers)

    def leave(self) -> None:
        """Close the connection, and say that the runtime has ended."""
        self._line.close()
        if self._outcomes.open_claims():
            return  # nobody knows what became of it: whoever rescues shall look
        runtime = self._identity()
        with self._client._own() as conn, conn.transaction():
            if recovery.try_runtime_lock(conn, self._schema, runtime):
                runtimes.leave(conn, self._schema, runtime, newest_claim=self._outcomes.newest_claim)

    def make_due(self, queue: str | None) -> None:
        with self._client._own() as conn:
            trial.make_due(conn, self._schema, queue=queue, kinds=sorted(self._handlers))

    def promote(self) -> None:
        with self._client._own() as conn:
            _expire(conn, self._client)
            _resolve(conn, self._dependents)
            _promote(conn, self._client)

    def count_ended(self) -> int:
        with self._client._own() as conn:
            return trial.count_ended(conn, self._schema)

    def queues(self) -> list[str]:
        with self._client._own() as conn:
            return trial.list_queues(conn, self._schema)

    def run_next(self, queue: str) -> tuple[Ran, Ending] | None:
        attempt = self._claim(queue)
        if attempt is None:
            return None
        ending = run_here(attempt, self._client, self._outcomes)
        self._settle(attempt)
        if passes_on(ending.error) and ending.error is not None:
            raise ending.error
        return _ran(self._client.get(attempt.id), attempt, ending)

    def _claim(self, queue: str) -> Attempt | None:
        until = time.monotonic() + PATIENCE
        while True:
            [claimed] = self._line.exchange(self._identity(), (), [Wanted(queue, 1)]).claims
            for batch in claimed.batches:
                self._outcomes.opened(batch)
            if claimed.attempts:
                [attempt] = claimed.attempts
                if not attempt.has_args:
                    self._line.fetch_args(self._identity(), [attempt])
                return attempt
            is_passing = claimed.error is not None and claimed.error.sqlstate in PASSING
            if claimed.error is not None and not is_passing:
                raise claimed.error
            if not (is_passing or claimed.is_busy or claimed.come_again):
                return None
            if time.monotonic() > until:
                raise AwaError(
                    f"queue {queue!r} was held by another process for {PATIENCE:g} s: does a worker claim from it?"
                )
            time.sleep(0.0 if claimed.come_again else 0.005)

    def _settle(self, attempt: Attempt) -> None:
        until = time.monotonic() + PATIENCE
        for flush in self._outcomes.take(self._identity()):
            while True:
                [settled] = self._line.exchange(self._identity(), [flush], ()).settled
                if settled.error is None:
                    self._outcomes.acknowledged(flush)
                    break
                if settled.error.sqlstate not in PASSING:
                    raise settled.error
                if time.monotonic() > until:
                    raise AwaError(
                        f"the outcome of job {attempt.id} cannot be recorded: another transaction holds it; one in "
                        "which its handler called complete() must end before the handler returns"
                    ) from settled.error
                time.sleep(0.01)


def _settings(client: Client) -> Settings:
    return client._settings(client._arguments | {"queues": ["default"], "threads": 1})


def _resolve(conn: psycopg.Connection[Any], dependents: Dependents) -> None:
    """Let go who waited for jobs that have ended, and who waited for those that were cancelled by this."""
    before = -1
    while True:
        examining = dependents.examine(conn)
        try:
            while True:
                next(examining)
        except StopIteration as end:
            waiting = len(end.value)
        if waiting in (0, before):
            return
        before = waiting


def _expire(conn: psycopg.Connection[Any], client: Client) -> None:
    while expired.expire_waiting(conn, client._schema, limit=1000) > 0:
        pass


def _promote(conn: psycopg.Connection[Any], client: Client) -> int:
    moved = 0
    while (some := waiting.promote(conn, client._schema, behind=None, limit=1000)) > 0:
        moved += some
    return moved
