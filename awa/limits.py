"""Limits of a queue that hold for all workers together: how many attempts run at once, how many start in a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from awa.errors import ValidationError
from awa.job import as_seconds
from awa.options import check_burst, check_max_running, shown

MOST_STARTS: Final = 1_000_000.0
"""Most attempts of a RateLimit, and most that it may come to in a second."""

LONGEST_PER: Final = 86_400.0
"""Most seconds that a RateLimit may speak of: a day."""

SLOWEST: Final = 1e-6
"""Least attempts that it may come to in a second: one in eleven days."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """So many attempts may start in so long, in the long run; and up to *burst* at once, after a rest.

    ``RateLimit(50)`` is fifty a second; ``RateLimit(10, per=60, burst=1)`` one every six seconds.

    Raises:
        ValidationError: A number cannot be meant; ``.path`` says which.
    """

    count: float
    """Attempts: above 0, up to 1,000,000."""
    per: float = 1.0
    """Seconds, above 0, up to a day; a ``timedelta`` may be given."""
    burst: int | None = None
    """Attempts that may start at once: 1 to 1,000,000. None becomes *count*, rounded up."""

    def __post_init__(self) -> None:
        count = _check_count(self.count)
        per = as_seconds(self.per, "per", limit=LONGEST_PER)
        if per == 0:
            raise ValidationError(
                "per must be above 0 seconds: say in what time so many attempts may start",
                path="per",
                value=self.per,
                limit=LONGEST_PER,
            )
        if not SLOWEST <= count / per <= MOST_STARTS:
            raise ValidationError(
                f"count {self.count!r} per {per:g} s comes to {count / per:.3g} attempts a second, which must be from"
                f" {SLOWEST:g} to {MOST_STARTS:,.0f}: pause the queue to start none, give no rate_limit for no limit",
                path="count",
                value=self.count,
                limit=(SLOWEST, MOST_STARTS),
            )
        burst = math.ceil(count) if self.burst is None else check_burst(self.burst)
        for name, value in (("count", count), ("per", per), ("burst", burst)):
            object.__setattr__(self, name, value)

    @property
    def rate(self) -> float:
        """Attempts a second, in the long run."""
        return self.count / self.per

    def to_json(self) -> dict[str, Any]:
        """As it is stored."""
        return {"count": self.count, "per": self.per, "burst": self.burst}

    def __str__(self) -> str:
        per = "a second" if self.per == 1 else f"in {self.per:g} s"
        return f"{self.count:g} {per}, {self.burst} at once"


def _check_count(value: object) -> float:
    limit = (0, MOST_STARTS)
    # bool is an int to Python, but True is no number of attempts.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        text = f"count must be a number above 0, up to {MOST_STARTS:,.0f}, got {shown(value)}"
        raise ValidationError(text, path="count", value=value, limit=limit)
    if not 0 < value <= MOST_STARTS:  # NaN is not either
        text = (
            f"count must be above 0, up to {MOST_STARTS:,.0f}, got {shown(value)}: to start no attempts pause the queue"
        )
        raise ValidationError(text, path="count", value=value, limit=limit)
    return float(value)


def check_rate_limit(value: object, path: str = "rate_limit") -> RateLimit:
    """A :class:`RateLimit`."""
    if not isinstance(value, RateLimit):
        text = f"{path} must be an awa.RateLimit, such as awa.RateLimit(50, per=1.0), got {shown(value)}"
        raise ValidationError(text, path=path, value=value)
    return value


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a queue; None: there is no such limit.

    Raises:
        ValidationError: One of them cannot be meant; ``.path`` says which.
    """

    max_running: int | None = None
    """Most attempts of the queue that are open at once: 1 to 2,147,483,647."""
    rate_limit: RateLimit | None = None
    """How many of its attempts may start in a time."""
    max_running_per_key: int | None = None
    """Most attempts at once of jobs with the same ``concurrency_key``: 1 to 2,147,483,647."""

    def __post_init__(self) -> None:
        for name in LIMITS:
            if getattr(self, name) is not None:
                check_limit_of(name, getattr(self, name))

    def to_json(self) -> dict[str, Any]:
        """The limits there are, as they are stored."""
        return limits_to_json({name: getattr(self, name) for name in LIMITS if getattr(self, name) is not None})


LIMITS: Final = tuple(field.name for field in fields(Limits))
"""The names of the limits."""

NO_LIMITS: Final = Limits()
"""What holds for a queue of which nothing was said."""


def check_limit_of(name: str, value: object) -> int | RateLimit:
    """*value* as the limit *name*."""
    return check_rate_limit(value, name) if name == "rate_limit" else check_max_running(value, name)


def limits_to_json(given: Mapping[str, int | RateLimit | None]) -> dict[str, Any]:
    """Some limits by name as they are stored; None there stands for: no such limit."""
    return {name: value.to_json() if isinstance(value, RateLimit) else value for name, value in given.items()}


def limits_from_json(stored: Mapping[str, Any]) -> dict[str, int | RateLimit | None]:
    """The limits by name that :func:`limits_to_json` has stored; what this version does not know is left out."""
    return {name: _read(name, stored[name]) for name in LIMITS if name in stored}


def _read(name: str, value: Any) -> int | RateLimit | None:
    if value is None:
        return None
    if name == "rate_limit":
        return RateLimit(**{field.name: value[field.name] for field in fields(RateLimit) if field.name in value})
    return int(value)
