"""The rules for what may be said of jobs and queues, the same in a declaration, an insert and an operator's call.

Each ``check_…`` returns the value as it is stored or raises ValidationError with ``.path``, ``.value`` and ``.limit``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, TypeVar

from awa.errors import ConfigError, ValidationError
from awa.job import LONGEST_WAIT, as_seconds

__all__ = [
    "check_after",
    "check_after_failed",
    "check_burst",
    "check_by",
    "check_delay",
    "check_expires_at",
    "check_flag",
    "check_job_id",
    "check_job_ids",
    "check_job_key",
    "check_kind",
    "check_limit",
    "check_max_attempts",
    "check_max_running",
    "check_note",
    "check_pool_size",
    "check_priority",
    "check_queue",
    "check_reason",
    "check_run_at",
    "check_runtime",
    "check_tag",
    "check_tags",
    "check_timeout",
    "declared",
    "milliseconds",
    "shown",
]

T = TypeVar("T")

MAX_NAME = 200
MAX_TAGS = 20
MAX_REASON = 1_000
MAX_PARENTS = 100
AFTER_FAILED = ("cancel", "run", "discard")
FIRST_PRIORITY, LAST_PRIORITY = 1, 4
MAX_ATTEMPTS = 1000
MAX_POOL = 1000
MAX_RUNNING = 2**31 - 1
MAX_BURST = 1_000_000
FIRST_YEAR, LAST_YEAR = 1970, 9999
LONGEST_TIMEOUT = 2_147_483.0
"""Seconds, more than 24 days: as many as the database counts in milliseconds."""


def check_kind(value: object, path: str = "kind") -> str:
    """A kind: text of 1 to 200 characters."""
    return _check_name(value, path)


def check_queue(value: object, path: str = "queue") -> str:
    """A queue's name: text of 1 to 200 characters."""
    return _check_name(value, path)


def check_priority(value: object, path: str = "priority") -> int:
    """A priority: 1, which runs first, to 4."""
    return _check_int(value, path, FIRST_PRIORITY, LAST_PRIORITY, "1 runs first")


def check_max_attempts(value: object, path: str = "max_attempts") -> int:
    """How many attempts a job has: 1 to 1000."""
    return _check_int(value, path, 1, MAX_ATTEMPTS, "1 means no retry")


def check_pool_size(value: object, path: str = "pool_size") -> int:
    """How many connections a client may hold: 1 to 1000."""
    return _check_int(value, path, 1, MAX_POOL, "inserts share them; handlers have as many")


def check_max_running(value: object, path: str = "max_running") -> int:
    """How many attempts may be open at once: 1 to 2,147,483,647."""
    return _check_int(value, path, 1, MAX_RUNNING, "to start none pause the queue; None is no limit")


def check_burst(value: object, path: str = "burst") -> int:
    """How many attempts may start at once: 1 to 1,000,000."""
    return _check_int(value, path, 1, MAX_BURST, "None is the count of the limit")


def check_by(value: object, path: str = "by") -> str | None:
    """Who does something: None, or text of 1 to 200 characters."""
    return None if value is None else _check_text(value, path, MAX_NAME, "say who, or leave it out")


def check_note(value: object, path: str, most: int) -> str | None:
    """What is said of something for people: None, or text of up to *most* characters, which may be empty."""
    if value is None or (isinstance(value, str) and not value):
        return None if value is None else ""
    return _check_text(value, path, most, "leave it out")


def check_tags(value: object, path: str = "tags") -> tuple[str, ...]:
    """At most 20 tags of at most 200 characters each."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise _refused(f"{path} must be a list of str, got {type(value).__name__}", path, value, MAX_TAGS)
    tags = tuple(value)
    if len(tags) > MAX_TAGS:
        raise _refused(f"{path} has {len(tags)} tags, the limit is {MAX_TAGS}", path, len(tags), MAX_TAGS)
    return tuple(_check_name(tag, f"{path}[{position}]") for position, tag in enumerate(tags))


def check_job_key(value: object, path: str) -> str:
    """A ``concurrency_key`` or an ``ordering_key``: text of 1 to 200 characters."""
    return _check_text(value, path, MAX_NAME, "leave it out for a job that shares nothing")


def check_tag(value: object, path: str = "tag") -> str:
    """One tag: text of 1 to 200 characters."""
    return _check_name(value, path)


def check_run_at(value: object, path: str = "run_at") -> datetime:
    """An aware datetime within the years 1970 to 9999, in UTC."""
    limit = f"{FIRST_YEAR}-{LAST_YEAR}"
    if not isinstance(value, datetime):
        raise _refused(f"{path} must be a datetime, got {shown(value)}", path, value, limit)
    if value.utcoffset() is None:
        raise _refused(
            f"{path} {value.isoformat()} is naive: say which time zone, for example with "
            ".replace(tzinfo=datetime.UTC) or .astimezone()",
            path,
            value,
            limit,
        )
    try:
        instant = value.astimezone(UTC)
    except OverflowError:
        instant = None
    if instant is None or not FIRST_YEAR <= instant.year <= LAST_YEAR:
        raise _refused(f"{path} {value.isoformat()} is outside the years {limit}", path, value, limit)
    return instant


def check_expires_at(value: object, run_at: datetime | None = None, path: str = "expires_at") -> datetime:
    """An aware datetime within the years 1970 to 9999, in UTC, that comes after *run_at*; it may be in the past."""
    instant = check_run_at(value, path)
    if run_at is not None and instant <= run_at:
        raise _refused(
            f"{path} {instant.isoformat()} must come after run_at {run_at.isoformat()}, or the job never runs: give a "
            "later one",
            path,
            value,
            run_at,
        )
    return instant


def check_delay(value: float | timedelta, path: str = "delay") -> float:
    """Seconds to wait before a job is available: 0 to ten years."""
    return as_seconds(value, path, limit=LONGEST_WAIT)


def check_timeout(value: float | timedelta, path: str = "timeout") -> float:
    """Seconds an attempt may take: 0, which means no limit, to 2,147,483, which is 24 days."""
    return as_seconds(value, path, limit=LONGEST_TIMEOUT)


def milliseconds(timeout: float) -> int:
    """A checked *timeout* as it is stored; at least 1 unless it is 0, which means no limit."""
    return max(round(timeout * 1000), 1) if timeout else 0


def check_job_id(value: object, path: str = "job_id") -> int:
    """The id of a job: 1 to 2^63 - 1, or no job can have it."""
    return _check_int(value, path, 1, 2**63 - 1, "as an insert gave it")


def check_runtime(value: object, path: str = "runtime_id") -> int:
    """The number of a runtime: 1 to 2^63 - 1."""
    return _check_int(value, path, 1, 2**63 - 1, "as list_runtimes gave it")


def check_job_ids(value: object, most: int, path: str = "ids") -> list[int]:
    """The ids of 1 to *most* jobs, each once."""
    limit = (1, most)
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise _refused(f"{path} must be a list of job ids, got {shown(value)}", path, value, limit)
    found = [check_job_id(job, f"{path}[{position}]") for position, job in enumerate(islice(value, most + 1))]
    if not 1 <= len(found) <= most:
        many = f"more than {most:,} ids: ask for some of them at a time" if found else "no ids: leave it out for all"
        raise _refused(f"{path} has {many}", path, len(found), limit)
    return list(dict.fromkeys(found))


def check_after(value: object, path: str = "after") -> tuple[int, ...]:
    """The ids of 1 to 100 jobs, each once: of one, or of several; each as its id, or as what has it as ``.id``."""
    if isinstance(value, (str, bytes, Mapping)):
        raise _refused(
            f"{path} must be a job or a list of jobs, got {type(value).__name__}: give what insert returned, or ids",
            path,
            value,
            MAX_PARENTS,
        )
    if not isinstance(value, Iterable):
        return (_check_parent(value, path),)
    found = [_check_parent(job, f"{path}[{position}]") for position, job in enumerate(islice(value, MAX_PARENTS + 1))]
    if not 1 <= len(found) <= MAX_PARENTS:
        many = f"more than {MAX_PARENTS} jobs: put a job between that runs after some of them" if found else "no jobs"
        raise _refused(
            f"{path} has {many}; give 1 to {MAX_PARENTS}, or leave it out", path, len(found), (1, MAX_PARENTS)
        )
    return tuple(dict.fromkeys(found))


def _check_parent(job: object, path: str) -> int:
    job_id = getattr(job, "id", job)
    if isinstance(job_id, bool) or not isinstance(job_id, int):
        text = f"{path} must be a job or its id, got {shown(job)}: give what insert returned"
        raise _refused(text, path, job, MAX_PARENTS)
    return check_job_id(job_id, path)


def check_after_failed(value: object, path: str = "after_failed") -> str:
    """What becomes of a job when one that it runs after does not complete: ``cancel``, ``run`` or ``discard``."""
    if not isinstance(value, str) or value not in AFTER_FAILED:
        raise _refused(f"{path} must be 'cancel', 'run' or 'discard', got {shown(value)}", path, value, AFTER_FAILED)
    return value


def check_flag(value: object, path: str) -> bool:
    """True or False, and nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise _refused(f"{path} must be True or False, got {shown(value)}", path, value, (False, True))
    return value


def check_reason(value: object, path: str = "reason") -> str | None:
    """Why an operator does something: None, or text of 1 to 1,000 characters."""
    return None if value is None else _check_text(value, path, MAX_REASON, "say why, or leave it out")


def check_limit(value: object, most: int, path: str = "limit") -> int:
    """How many to return: 1 to *most*."""
    return _check_int(value, path, 1, most, "ask for the next page to get more")


def declared(check: Callable[[Any], T], value: object) -> T:
    """*value* after *check*, whose complaint is about a declaration here, not about a job.

    Raises:
        ConfigError: Instead of ValidationError.
    """
    try:
        return check(value)
    except ValidationError as error:
        raise ConfigError(str(error)) from None


def _check_int(value: object, path: str, first: int, last: int, hint: str) -> int:
    # bool is an int to Python, but True is not a priority.
    if isinstance(value, bool) or not isinstance(value, int):
        raise _refused(f"{path} must be an int from {first} to {last}, got {shown(value)}", path, value, (first, last))
    if not first <= value <= last:
        raise _refused(
            f"{path} must be from {first} to {last} ({hint}), got {shown(value)}", path, value, (first, last)
        )
    return int(value)


def _check_name(value: object, path: str) -> str:
    return _check_text(value, path, MAX_NAME, f"give it a name of 1 to {MAX_NAME} characters")


def _check_text(value: object, path: str, most: int, hint: str) -> str:
    """*value* when it is text that PostgreSQL stores: 1 to *most* characters, no NUL, no lone surrogate."""
    if not isinstance(value, str):
        raise _refused(f"{path} must be a str of 1 to {most} characters, got {shown(value)}", path, value, most)
    # The plain text: members of a StrEnum are welcome and stored as what they say.
    text = str.__str__(value)
    if not text:
        raise _refused(f"{path} is empty: {hint}", path, value, most)
    if len(text) > most:
        raise _refused(f"{path} has {len(text):,} characters, the limit is {most:,}: shorten it", path, value, most)
    if "\0" in text:
        raise _refused(f"{path} {text!a} contains NUL, which PostgreSQL cannot store", path, value, most)
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise _refused(f"{path} {text!a} contains a lone surrogate, which is no text", path, value, most)
    return text


def shown(value: object) -> str:
    """What was given, short: of what is no plain value only the type."""
    if type(value) is int and abs(value) >= 10**20:
        return "an int of many digits"
    if value is None or type(value) in (int, float, bool, str):
        text = ascii(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return f"a {type(value).__name__}"


def _refused(message: str, path: str, value: object, limit: object = MAX_NAME) -> ValidationError:
    return ValidationError(message, path=path, value=value, limit=limit)
