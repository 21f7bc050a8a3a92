"""Unique options, and the key that equal jobs share."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args

import orjson

from awa import _core
from awa.args import codec_for
from awa.errors import ConfigError, ValidationError
from awa.job import JobState, as_seconds

__all__ = ["Conflict", "Unique", "check_key", "check_unique", "unique_key"]

KEY_BYTES = 16

SHORTEST_PERIOD = 0.001
"""Seconds."""

BITS = {state: 1 << bit for bit, state in enumerate(JobState)}
"""A bit for each state, as the database keeps them."""

USUAL_STATES = frozenset(JobState) - {JobState.FAILED, JobState.CANCELLED}
"""In which a job holds its key unless it is told otherwise: while it waits or runs, and completed, while it is kept."""

Conflict = Literal["return", "raise", "replace"]
"""What an insert does when an equal job holds the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unique:
    """At most one job of its kind with the same key; the key is made of what is chosen here.

    Raises:
        ConfigError: An option cannot work; the message names it.
    """

    by_args: bool | Collection[str] = True
    """True: equal args. Names: equal values under these top-level names; a missing one differs from None. False: any
    two jobs of the kind are equal."""
    by_queue: bool = False
    """Whether jobs in different queues differ."""
    period: float | timedelta | None = None
    """Seconds: jobs due in different periods differ. Periods are counted from 1970, in UTC. None: for good."""
    states: Collection[JobState | str] = USUAL_STATES
    """In which states a job keeps others out; ``available`` is one of them."""
    on_conflict: Conflict = "return"
    """``return`` the equal job, ``raise`` UniqueConflict, or ``replace`` what the equal job is about while it waits."""

    def __post_init__(self) -> None:
        for name, value in (
            ("by_args", _check_by_args(self.by_args)),
            ("by_queue", _check_bool(self.by_queue)),
            ("period", None if self.period is None else _check_period(self.period)),
            ("states", _check_states(self.states)),
            ("on_conflict", _check_conflict(self.on_conflict)),
        ):
            object.__setattr__(self, name, value)

    def check_names(self, names: frozenset[str] | None, kind: str) -> None:
        """Return when all of *by_args* are among the *names* that args of *kind* may have; None: any.

        Raises:
            ConfigError: One is not, and would never be in the key.
        """
        if names is None or isinstance(self.by_args, bool):
            return
        unknown = [name for name in self.by_args if name not in names]
        if unknown:
            raise ConfigError(
                f"by_args names {unknown[0]!r}, which args of kind {kind!r} do not have: name some of "
                f"{', '.join(sorted(names))}"
            )

    def key(self, kind: str, args: bytes, queue: str, at: float | None) -> bytes:
        """The key of a job as it is stored.

        Args:
            args: JSON text.
            at: When it is due, in seconds since 1970; needed with a period.
        """
        bucket = None
        if self.period is not None:
            assert at is not None and isinstance(self.period, float)
            bucket = math.floor(at / self.period)
        value = orjson.loads(args) if self.by_args is not False else None
        key = _core.unique_key(kind, value, queue=queue, by_args=self.by_args, by_queue=self.by_queue, bucket=bucket)
        return (
            key if self.states == USUAL_STATES else key + bytes([sum(BITS[JobState(state)] for state in self.states)])
        )


def _check_by_args(value: object) -> bool | tuple[str, ...]:
    if isinstance(value, bool):
        return value
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ConfigError(f"by_args must be True, False or a list of names of args, got {value!r}")
    names = tuple(dict.fromkeys(value))
    if not names or not all(type(name) is str for name in names):
        raise ConfigError(
            f"by_args must be True, False or a list of names of args, got {value!r}"
            + ("" if names else ": write False when args do not matter")
        )
    return names


def _check_bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"by_queue must be True or False, got {value!r}")
    return value


def _check_period(value: Any) -> float:
    try:
        seconds = as_seconds(value, "period")
    except ValidationError as error:
        raise ConfigError(str(error)) from None
    if seconds < SHORTEST_PERIOD:
        raise ConfigError(f"period must be at least {SHORTEST_PERIOD} seconds, got {seconds:g}: leave it out for none")
    return seconds


def _check_states(value: object) -> frozenset[JobState]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise ConfigError(f"states must be a list of states, got {value!r}")
    states = []
    for state in value:
        try:
            states.append(JobState(state))
        except ValueError:
            raise ConfigError(f"states has {state!r}: write some of {', '.join(JobState)}") from None
    if JobState.AVAILABLE not in states:
        raise ConfigError("states must have 'available': a key that no waiting job holds keeps nobody out")
    return frozenset(states)


def _check_conflict(value: object) -> str:
    if not isinstance(value, str) or value not in get_args(Conflict):
        raise ConfigError(f"on_conflict must be one of {', '.join(get_args(Conflict))}, got {value!r}")
    return value


def check_unique(value: object) -> Unique | None:
    """What a declaration says about uniqueness.

    Raises:
        ConfigError: It is neither a Unique nor None.
    """
    if value is not None and not isinstance(value, Unique):
        raise ConfigError(f"unique must be awa.Unique(...), got {value!r}")
    return value


def check_key(value: object, path: str = "key") -> bytes:
    """A unique key: 16 bytes.

    Raises:
        ValidationError: It is something else.
    """
    if not isinstance(value, (bytes, bytearray, memoryview)) or len(bytes(value)) != KEY_BYTES:
        shown = f"{len(bytes(value))} bytes" if isinstance(value, (bytes, bytearray, memoryview)) else repr(value)[:60]
        raise ValidationError(
            f"{path} must be {KEY_BYTES} bytes, as awa.unique_key gives them, got {shown}",
            path=path,
            value=value,
            limit=KEY_BYTES,
        )
    return bytes(value)


def unique_key(
    kind: str,
    args: object,
    *,
    queue: str | None = None,
    by_args: bool | Collection[str] = True,
    by_queue: bool = False,
    bucket: int | None = None,
) -> bytes:
    """The 16 bytes under which an equal job is found, as every client of the queue computes them.

    Args:
        kind: The job's kind.
        args: The args: a dict, or a value of the type that a handler declares.
        queue: Where the job waits; needed with *by_queue*.
        by_args: True for all args, False for none, or top-level names: the object of those that are present, so that
            a missing name differs from null.
        by_queue: Whether equal jobs in different queues differ.
        bucket: Number of the period, ``floor(epoch / period)``; None without a period.

    Raises:
        ValidationError: The kind, queue, bucket or args are no values of a job.
        ConfigError: *by_queue* without a queue, or *by_args* that is neither a bool nor names.
    """
    if not isinstance(args, dict):
        args = orjson.loads(codec_for(type(args)).dump(args, sys.maxsize))
    return _core.unique_key(kind, args, queue=queue, by_args=by_args, by_queue=by_queue, bucket=bucket)
