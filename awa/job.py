"""A job as its handler knows it: its states, its ids, and the outcomes a handler may choose."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Generic, NewType, Protocol, TypeVar

from awa import _core
from awa.errors import ValidationError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from psycopg import Connection, IsolationLevel

    from awa.lent import Lent

JobId = NewType("JobId", int)
"""The job, the same through all its attempts."""

EntryId = NewType("EntryId", int)
"""One row of ``awa.jobs``, one chance to run; once claimed it is the attempt."""

LONGEST_WAIT = 3650 * 86_400.0
"""Most seconds that an outcome may postpone a job: ten years."""


class JobState(StrEnum):
    """What a job is doing; spelled alike in SQL, JSON, Python, the UI and logs."""

    SCHEDULED = "scheduled"
    """Waits for its ``run_at``."""
    AVAILABLE = "available"
    """Can be claimed, or is set aside for a kind or a key."""
    RUNNING = "running"
    """An attempt is open."""
    RETRYABLE = "retryable"
    """Failed, waits for its backoff."""
    WAITING_EXTERNAL = "waiting_external"
    """Parked until a callback."""
    COMPLETED = "completed"
    """The handler returned."""
    FAILED = "failed"
    """Attempts are used up, or the error was terminal."""
    CANCELLED = "cancelled"
    """Ended by its handler or an operator."""

    @property
    def is_terminal(self) -> bool:
        """Whether a job in this state has ended for good."""
        return self in _TERMINAL


_TERMINAL = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED})


def as_seconds(value: float | timedelta, path: str, *, limit: float = LONGEST_WAIT) -> float:
    """*value* as seconds, between zero and *limit*.

    Raises:
        ValidationError: It is no number or ``timedelta``, not finite, negative, or beyond *limit*; *path* names it.
    """
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.inf
    else:
        raise ValidationError(
            f"{path} must be seconds or a timedelta, got {type(value).__name__}", path=path, value=value, limit=limit
        )
    if not 0 <= seconds <= limit:
        raise ValidationError(
            f"{path} must be from 0 to {limit:,.0f} seconds, got {seconds}", path=path, value=value, limit=limit
        )
    return seconds


class Outcome(Exception):
    """An ordinary ending that a handler chooses; returned or raised, it means the same."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.args == self.args

    def __hash__(self) -> int:
        return hash((type(self), self.args))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.args))})"


class _Later(Outcome):
    def __init__(self, seconds: float | timedelta) -> None:
        self.seconds = as_seconds(seconds, f"{type(self).__name__}.seconds")
        super().__init__(self.seconds)


class RetryAfter(_Later):
    """The attempt failed; try again after *seconds* instead of the backoff. Counts, and exhausts on the last attempt.

    Args:
        seconds: 0 to ten years, as a number or a ``timedelta``.
    """


class Snooze(_Later):
    """Not now: run again after *seconds*. The attempt is not counted, however often.

    Args:
        seconds: 0 to ten years, as a number or a ``timedelta``.
    """


class Cancel(Outcome):
    """The job need not run any more; this is no failure.

    Args:
        reason: Why, for whoever looks at the job later.
    """

    def __init__(self, reason: str | None = None) -> None:
        if reason is not None and not isinstance(reason, str):
            raise ValidationError(
                f"Cancel.reason must be a str or None, got {type(reason).__name__}", path="Cancel.reason", value=reason
            )
        self.reason = reason
        super().__init__(reason)


A = TypeVar("A")


class OpenAttempt(Protocol):
    """What a job knows about its attempt; ``awa._core.Attempt`` is one."""

    @property
    def id(self) -> int:
        """The job."""

    @property
    def entry_id(self) -> int:
        """The entry that is this attempt."""

    @property
    def attempt(self) -> int:
        """Its number."""

    @property
    def max_attempts(self) -> int:
        """How many there are."""

    @property
    def created_at(self) -> datetime:
        """When the job was inserted."""

    @property
    def details(self) -> dict[str, Any]:
        """tags, metadata and timeout_ms, as far as set."""

    @property
    def batch(self) -> Any:
        """The claim it belongs to."""

    @property
    def handler(self) -> Any:
        """How its kind is run."""

    is_cancelled: bool


class Controls(Protocol):
    """What a job can do to its attempt; the worker is one."""

    def complete(self, attempt: Any, conn: Lent, result: object = None) -> None:
        """See :meth:`Job.complete`."""

    def transaction(
        self, attempt: Any, isolation_level: IsolationLevel | str | None
    ) -> AbstractContextManager[Connection[Any]]:
        """See :meth:`Job.transaction`."""


class Job(Generic[A]):
    """One attempt of a job, as its handler sees it."""

    __slots__ = ("_attempt", "_controls", "args")

    args: A
    """What the job is about, as its declared type."""

    def __init__(self, attempt: OpenAttempt, args: A, controls: Controls) -> None:
        self._attempt = attempt
        self._controls = controls
        self.args = args

    @property
    def id(self) -> JobId:
        """The job, the same through all its attempts."""
        return JobId(self._attempt.id)

    @property
    def entry_id(self) -> EntryId:
        """This attempt."""
        return EntryId(self._attempt.entry_id)

    @property
    def kind(self) -> str:
        """The kind it was stored as; with an alias, that of the older name."""
        return str(self._attempt.handler.kind)

    @property
    def queue(self) -> str:
        """Where it waited."""
        return str(self._attempt.batch.queue)

    @property
    def priority(self) -> int:
        """1, which runs first, to 4."""
        return int(self._attempt.batch.priority)

    @property
    def attempt(self) -> int:
        """Counted attempts, this one included: 1 the first time."""
        return self._attempt.attempt

    @property
    def max_attempts(self) -> int:
        """How many it has."""
        return self._attempt.max_attempts

    @property
    def created_at(self) -> datetime:
        """When it was inserted."""
        return self._attempt.created_at

    @property
    def tags(self) -> tuple[str, ...]:
        """What the insert gave to find it again."""
        return tuple(self._attempt.details.get("tags") or ())

    @property
    def metadata(self) -> dict[str, Any]:
        """What the insert sent along beside the args."""
        return self._attempt.details.get("metadata") or {}

    @property
    def cancelled(self) -> bool:
        """Whether the attempt need not go on: somebody asked to cancel it, it was taken over, or its time is up."""
        return self._attempt.is_cancelled

    def complete(self, conn: Lent, *, result: object = None) -> None:
        """Complete this attempt inside the transaction of *conn*, so that both commit or neither does.

        *conn* is what ``conn=`` of an insert takes: a driver's connection, a SQLAlchemy Session, Django's connection.
        The transaction must have begun in this handler. What the handler returns or raises after the commit is only
        logged; when the transaction is rolled back, it counts. In a :meth:`transaction` it is completed at the end.

        Args:
            result: What is kept for who asks for it, of a task that says ``keep_result=True``.

        Raises:
            StaleAttempt: The attempt was taken over. The transaction cannot commit any more.
            ValidationError: *result* cannot be kept; nothing was sent.
            ConfigError: There is a *result*, and jobs of this kind keep none; or *conn* commits by itself.
        """
        self._controls.complete(self._attempt, conn, result)

    def transaction(
        self, isolation_level: IsolationLevel | str | None = None
    ) -> AbstractContextManager[Connection[Any]]:
        """A transaction that completes this attempt at its end: what the block writes happens exactly once.

        Gives a pooled connection of the client. When the block ends, the attempt is completed there and all of it is
        committed; an exception rolls everything back and counts as the handler's own, unless it is caught. What the
        handler returns after the commit is only logged. ``raise awa.Snooze(60)`` in the block, not ``return``, to put
        the job off. After a rollback, but not after a commit, the handler may begin another.

        Args:
            isolation_level: ``read committed`` (the default), ``repeatable read``, ``serializable``, or psycopg's own.

        Raises:
            StaleAttempt: The attempt was taken over or its handler has ended; nothing of the block is committed.
            ConfigError: There is no such level; or another thread runs the handler, or one is open already.
            psycopg.Error: Serialization failures and deadlocks come as what they are, at the latest with the commit.
        """
        return self._controls.transaction(self._attempt, isolation_level)

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.kind!r} attempt {self.attempt}/{self.max_attempts}>"


def current_job() -> Job[Any]:
    """The job that the calling handler runs; its ``args`` are the arguments by name.

    For handlers that take their args as parameters.

    Raises:
        LookupError: This thread runs no job.
    """
    job: Job[Any] | None = _core.current_job()
    if job is None:
        raise LookupError("no job runs in this thread: current_job() works inside a handler, in the handler's thread")
    return job
