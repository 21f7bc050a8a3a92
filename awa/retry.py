"""When a failed attempt is tried again, and whether."""

from __future__ import annotations

import math
import random as _random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from awa.errors import ConfigError, TerminalError
from awa.job import as_seconds

MAX_DELAY = 86_400.0
"""Most seconds between an attempt and the next, whatever a policy says: 24 hours."""

RetryPolicy = Callable[[int], "float | timedelta"]
"""Attempt number, 1 for the first failure -> seconds or timedelta until the next."""

ExceptionTypes = tuple[type[BaseException], ...]


@dataclass(frozen=True, slots=True)
class Backoff:
    """A delay that grows with the attempts; made by :func:`exponential`, :func:`linear` and :func:`fixed`."""

    base: float
    """Seconds after the first failure."""
    factor: float = 1.0
    """What each further failure multiplies *base* with."""
    step: float = 0.0
    """Seconds that each further failure adds."""
    cap: float = MAX_DELAY
    """Most seconds, jitter included."""
    jitter: float = 0.25
    """Up to this share of the delay is added at random, so that jobs that failed together do not return together."""

    def __post_init__(self) -> None:
        for name, least, most in (
            ("base", 0.0, MAX_DELAY),
            ("factor", 1.0, 1e6),
            ("step", 0.0, MAX_DELAY),
            ("cap", 0.0, MAX_DELAY),
            ("jitter", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
                raise ConfigError(f"{name} of a backoff must be from {least:g} to {most:g}, got {value!r}")

    def __call__(self, attempt: int) -> float:
        """Seconds after failure number *attempt*, before jitter."""
        steps = max(attempt, 1) - 1
        try:
            grown = self.base * self.factor**steps
        except OverflowError:
            grown = math.inf if self.base else 0.0
        return min(grown + self.step * steps, self.cap)

    def jittered(self, attempt: int, share: float) -> float:
        """Seconds after failure number *attempt*; *share*, from 0 to 1, of the jitter is added."""
        return min(self(attempt) * (1.0 + self.jitter * share), self.cap)


def exponential(
    base: float | timedelta = 2.0, factor: float = 2.0, *, cap: float | timedelta = MAX_DELAY, jitter: float = 0.25
) -> Backoff:
    """``base * factor ** (attempt - 1)`` seconds: 2, 4, 8, … by default."""
    return Backoff(base=_seconds(base, "base"), factor=factor, cap=_seconds(cap, "cap"), jitter=jitter)


def linear(
    base: float | timedelta,
    step: float | timedelta | None = None,
    *,
    cap: float | timedelta = MAX_DELAY,
    jitter: float = 0.25,
) -> Backoff:
    """*base* seconds after the first failure and *step* (*base* when not given) more after each further one."""
    first = _seconds(base, "base")
    return Backoff(
        base=first, step=first if step is None else _seconds(step, "step"), cap=_seconds(cap, "cap"), jitter=jitter
    )


def fixed(seconds: float | timedelta, *, jitter: float = 0.0) -> Backoff:
    """Always *seconds*."""
    return Backoff(base=_seconds(seconds, "seconds"), jitter=jitter)


DEFAULT_BACKOFF = Backoff(base=2.0, factor=2.0)
"""``2 ** attempt`` seconds plus up to a quarter, at most 24 hours."""


@dataclass(frozen=True, slots=True)
class Delay:
    """How long to wait before the next attempt."""

    seconds: float
    """From 0 to :data:`MAX_DELAY`."""
    complaint: str | None = None
    """What was wrong with the policy, whose answer the default replaced; None when it behaved."""


def delay_after(policy: RetryPolicy | None, attempt: int, *, random: Callable[[], float] = _random.random) -> Delay:
    """The delay after failure number *attempt*, whatever *policy* does.

    A larger answer than :data:`MAX_DELAY` is cut to it. An answer that is no delay (negative, NaN, infinite, no
    number), and a policy that raises, give the default backoff and a complaint.

    Args:
        policy: A :class:`Backoff` or any function of the attempt; None for the default.
        attempt: 1 for the first failure.
        random: Gives a share from 0 to 1 of the jitter.
    """
    if policy is None:
        return Delay(DEFAULT_BACKOFF.jittered(attempt, random()))
    if isinstance(policy, Backoff):
        return Delay(policy.jittered(attempt, random()))
    try:
        answer = policy(attempt)
    # A policy is the user's code, run where a job must not be lost.
    except BaseException as error:
        complaint = f"retry policy raised {type(error).__name__} at attempt {attempt}"
    else:
        seconds = _plain_seconds(answer)
        if seconds is not None:
            return Delay(min(seconds, MAX_DELAY))
        complaint = f"retry policy gave no delay at attempt {attempt} but {_shown(answer)}"
    return Delay(DEFAULT_BACKOFF.jittered(attempt, random()), f"{complaint}; the default backoff is used instead")


def verdict(
    exc: BaseException,
    *,
    attempt: int,
    max_attempts: int,
    retry_on: ExceptionTypes | None = None,
    fail_on: ExceptionTypes | None = None,
) -> Literal["retry", "fail"]:
    """What becomes of a job whose handler raised *exc*.

    The last attempt, TerminalError and what is listed in *fail_on* fail; when *retry_on* is given, what it does not
    list fails too; the rest is retried, whether or not it is an Exception.
    """
    # type(exc): an exception may lie about its __class__.
    kind = type(exc)
    if attempt >= max_attempts or issubclass(kind, TerminalError):
        return "fail"
    if fail_on is not None and issubclass(kind, fail_on):
        return "fail"
    if retry_on is not None and not issubclass(kind, retry_on):
        return "fail"
    return "retry"


def check_exception_types(value: object, name: str) -> ExceptionTypes:
    """*value* as a tuple of exception classes.

    Raises:
        ConfigError: It is neither a class of exceptions nor a tuple or list of them.
    """
    types = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    for one in types:
        if not (isinstance(one, type) and issubclass(one, BaseException)):
            raise ConfigError(f"{name} must list exception classes, got {_shown(one)}")
    return types


def check_policy(value: object) -> RetryPolicy:
    """*value* when it can be a retry policy.

    Raises:
        ConfigError: It cannot be called.
    """
    if not callable(value) or isinstance(value, type):
        raise ConfigError(
            f"retry must be a backoff such as exponential(), or a function (attempt) -> seconds, got {_shown(value)}"
        )
    return value


def _seconds(value: float | timedelta, name: str) -> float:
    try:
        return as_seconds(value, name, limit=MAX_DELAY)
    except ValueError as error:
        raise ConfigError(f"a backoff's {error}") from None


def _plain_seconds(answer: object) -> float | None:
    if isinstance(answer, timedelta):
        answer = answer.total_seconds()
    if isinstance(answer, bool) or not isinstance(answer, (int, float)) or not 0 <= answer < math.inf:
        return None
    # Cut before float(): 2**2000 is a valid answer and no double.
    return float(min(answer, MAX_DELAY))


def _shown(value: object) -> str:
    if type(value) in (int, float, bool, type(None)) and (type(value) is not int or abs(value) < 10**40):
        return repr(value)
    return f"a {type(value).__name__}" if not isinstance(value, type) else f"the class {value.__name__}"
