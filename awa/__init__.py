"""awa: a job queue that lives inside PostgreSQL, for synchronous Python."""

from awa._core import canonical_json, derive_kind
from awa.client import Client
from awa.config import Settings
from awa.descriptors import descriptor_hash
from awa.errors import (
    AwaError,
    ConfigError,
    DatabaseNotFound,
    DeadlineExceeded,
    DuplicateKind,
    JobBusy,
    JobFailed,
    JobNotFound,
    KindNotFound,
    PermissionDenied,
    QueueBusy,
    QueueNotFound,
    ResultNotKept,
    RuntimeGone,
    RuntimeNotFound,
    RuntimeTooOld,
    SchemaNotMigrated,
    SchemaTooNew,
    ShutdownTimeout,
    StaleAttempt,
    StorageNotTrusted,
    TerminalError,
    UniqueConflict,
    UnknownKind,
    ValidationError,
)
from awa.insert import Inserted, NewJob
from awa.job import Cancel, EntryId, Job, JobId, JobState, Outcome, RetryAfter, Snooze, current_job
from awa.limits import Limits, RateLimit
from awa.registry import BoundArgs, Task
from awa.retry import exponential, fixed, linear
from awa.storage.control import Controlled
from awa.storage.jobs import JobInfo
from awa.unique import Unique, unique_key
from awa.version import VERSION as __version__

__all__ = [
    "AwaError",
    "BoundArgs",
    "Cancel",
    "Client",
    "ConfigError",
    "Controlled",
    "DatabaseNotFound",
    "DeadlineExceeded",
    "DuplicateKind",
    "EntryId",
    "Inserted",
    "Job",
    "JobBusy",
    "JobFailed",
    "JobId",
    "JobInfo",
    "JobNotFound",
    "JobState",
    "KindNotFound",
    "Limits",
    "NewJob",
    "Outcome",
    "PermissionDenied",
    "QueueBusy",
    "QueueNotFound",
    "RateLimit",
    "ResultNotKept",
    "RetryAfter",
    "RuntimeGone",
    "RuntimeNotFound",
    "RuntimeTooOld",
    "SchemaNotMigrated",
    "SchemaTooNew",
    "Settings",
    "ShutdownTimeout",
    "Snooze",
    "StaleAttempt",
    "StorageNotTrusted",
    "Task",
    "TerminalError",
    "Unique",
    "UniqueConflict",
    "UnknownKind",
    "ValidationError",
    "__version__",
    "canonical_json",
    "current_job",
    "derive_kind",
    "descriptor_hash",
    "exponential",
    "fixed",
    "linear",
    "unique_key",
]
