"""The whole exception tree of awa, on one page.

    AwaError
      ConfigError (ValueError)       a setting or declaration cannot work
      ValidationError (ValueError)   a job's option or args cannot be stored
      UnknownKind, DuplicateKind     no handler is registered for the kind; two are
      JobNotFound (LookupError)      no job has that id
      JobBusy                        another transaction held the job: nothing was changed, try again
      QueueNotFound (LookupError)    nothing is known of a queue of that name
      KindNotFound (LookupError)     nothing is known of a kind of that name
      QueueBusy                      others held the queue, or some of its jobs: try again
      RuntimeNotFound (LookupError)  no worker has that number, or it has ended
      RuntimeTooOld                  the worker's awa does not know what it was to be told
      UniqueConflict                 an equal job exists
      JobFailed, ResultNotKept       a job that was waited for has no result to give
      StaleAttempt                   the attempt was taken over
      RuntimeGone                    this worker was taken for dead and rescued
      SchemaNotMigrated, SchemaTooNew, StorageNotTrusted
      DatabaseNotFound               there is no server to talk to, or it refuses to write
      PermissionDenied               the database role lacks a right
      ShutdownTimeout                handlers, or an outage, outlived the grace period
      TerminalError                  raised by a handler: fail now, without retry
      DeadlineExceeded               raised in a handler whose time is up

Facts are attributes; the message is a sentence with the values and the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class AwaError(Exception):
    """Every error that awa raises on purpose."""


class ConfigError(AwaError, ValueError):
    """A setting or a declaration cannot work; raised before any SQL."""


class ValidationError(AwaError, ValueError):
    """A job's option or args cannot be stored; raised before any SQL.

    Attributes:
        path: Where the value stands, for example ``args.items[3].price`` or ``priority``.
        value: The refused value, or the offending size.
        limit: What would have been accepted, as text, number or ``None``.
    """

    def __init__(self, message: str, *, path: str, value: object = None, limit: object = None) -> None:
        super().__init__(message)
        self.path = path
        self.value = value
        self.limit = limit


class UnknownKind(AwaError):
    """No handler is registered for the kind."""

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class DuplicateKind(AwaError):
    """Two handlers claim one kind."""

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class JobNotFound(AwaError, LookupError):
    """No job has that id, or its history is gone; or none holds the unique key, then ``job_id`` is None."""

    def __init__(self, message: str, *, job_id: int | None) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobBusy(AwaError):
    """Another transaction held what belongs to the job for too long; nothing was changed, try again."""

    def __init__(self, message: str, *, job_id: int) -> None:
        super().__init__(message)
        self.job_id = job_id


class QueueNotFound(AwaError, LookupError):
    """Nothing is known of the queue: it has no jobs, nothing was said of it, and no worker serves it.

    Attributes:
        queue: The name that was asked for.
    """

    def __init__(self, message: str, *, queue: str) -> None:
        super().__init__(message)
        self.queue = queue


class KindNotFound(AwaError, LookupError):
    """Nothing is known of the kind: nothing describes it, and no live worker handles it.

    Attributes:
        kind: The name that was asked for.
    """

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class QueueBusy(AwaError):
    """Others held the queue, or some of its jobs, for too long; the message says what was done, try again.

    Attributes:
        queue: Which.
        done: How many jobs were cancelled or deleted before.
    """

    def __init__(self, message: str, *, queue: str, done: int = 0) -> None:
        super().__init__(message)
        self.queue = queue
        self.done = done


class RuntimeNotFound(AwaError, LookupError):
    """No runtime has that number, or it has ended and can be told nothing.

    Attributes:
        runtime: The number that was asked for; None when it was asked for by its place.
    """

    def __init__(self, message: str, *, runtime: int | None) -> None:
        super().__init__(message)
        self.runtime = runtime


class RuntimeTooOld(AwaError):
    """A worker runs an awa that does not hear what it was to be told; nothing was changed.

    Attributes:
        runtime: Its number.
        version: Of its awa.
    """

    def __init__(self, message: str, *, runtime: int, version: str) -> None:
        super().__init__(message)
        self.runtime = runtime
        self.version = version


class UniqueConflict(AwaError):
    """An equal job exists, and the insert said ``on_conflict="raise"``, or an ended job was to be retried.

    Nothing was changed.

    Attributes:
        existing_id: The job that has the key; None when it is another job of the same batch.
        key: The 16 bytes.
    """

    def __init__(self, message: str, *, existing_id: int | None, key: bytes) -> None:
        super().__init__(message)
        self.existing_id = existing_id
        self.key = key


class JobFailed(AwaError):
    """A job that somebody waits for ended without a result.

    Attributes:
        job_id: The job.
        state: ``failed`` or ``cancelled``.
        error: ``type``, ``text`` and ``traceback`` of its last attempt; None when nothing is known.
    """

    def __init__(self, message: str, *, job_id: int, state: str, error: dict[str, Any] | None) -> None:
        super().__init__(message)
        self.job_id = job_id
        self.state = state
        self.error = error


class ResultNotKept(AwaError):
    """The job completed, and nothing of it was kept: its task does not say ``keep_result=True``."""

    def __init__(self, message: str, *, job_id: int) -> None:
        super().__init__(message)
        self.job_id = job_id


class StaleAttempt(AwaError):
    """The attempt was taken over; whatever was about to be written is refused."""

    def __init__(self, message: str, *, job_id: int, entry_id: int) -> None:
        super().__init__(message)
        self.job_id = job_id
        self.entry_id = entry_id


class RuntimeGone(AwaError):
    """This worker was taken for dead and its attempts were rescued."""

    def __init__(self, message: str, *, runtime: int) -> None:
        super().__init__(message)
        self.runtime = runtime


class _SchemaMismatch(AwaError):
    def __init__(self, message: str, *, expected: object, found: object) -> None:
        super().__init__(message)
        self.expected = expected
        self.found = found


class SchemaNotMigrated(_SchemaMismatch):
    """The schema is missing or older than this awa needs; ``awa migrate`` mends it."""


class SchemaTooNew(_SchemaMismatch):
    """The schema is newer than this awa supports; upgrade the program."""


class StorageNotTrusted(_SchemaMismatch):
    """The rows come from another cluster, and claims would miss jobs; ``awa storage rebase`` mends it."""


class DatabaseNotFound(AwaError):
    """There is no database to talk to, or none that can be written to; the message names where it was looked for."""


class PermissionDenied(AwaError):
    """The database role lacks a right; `awa migrate --grants` prints what gives it.

    Attributes:
        role: Who lacks it.
        object: On what: ``table jobs``; empty when the server named it in another language.
        privilege: What is needed on it, ``INSERT`` or several with commas; empty when only an owner has it.
    """

    def __init__(self, message: str, *, role: str, object: str, privilege: str) -> None:
        super().__init__(message)
        self.role = role
        self.object = object
        self.privilege = privilege


class ShutdownTimeout(AwaError):
    """Handlers outlived the grace period, or the database was away until it was over.

    Attributes:
        job_ids: The jobs that were still running; they will be rescued.
    """

    def __init__(self, message: str, *, job_ids: Sequence[int]) -> None:
        super().__init__(message)
        self.job_ids = tuple(job_ids)


class TerminalError(AwaError):
    """Raised by a handler: fail this job now, without retry."""


class DeadlineExceeded(AwaError):
    """Raised in a handler whose time is up."""
