"""What one repetition is asked to do, and what it measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


class BenchmarkError(Exception):
    """A repetition has no figure: something did not run, or a job was lost or ran twice."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One repetition."""

    scenario: str
    """Its name."""
    variant: str
    """Which form of it."""
    admin: str
    """Connection string of another database of the same server, where the harness looks without being counted."""
    database: str
    """Connection string of a fresh, empty database."""
    jobs: int
    """How many to insert, where the scenario goes by a number."""
    duration: float
    """Seconds to produce, where it goes by time."""
    threads: int
    """Of the worker process."""
    pgbench: str | None = None
    """The program, where the scenario needs it."""


@dataclass(frozen=True, slots=True)
class Result:
    """One measured rate. None where a figure does not apply."""

    variant: str
    """Which form of the scenario."""
    jobs: int
    """How many the rate is about."""
    jobs_per_s: float
    """The rate."""
    p50_ms: float | None = None
    """Median of what the scenario times: a call, or the way from the call to the handler."""
    p95_ms: float | None = None
    """95 % take at most this."""
    p99_ms: float | None = None
    """99 % take at most this."""
    wal_bytes_per_job: float | None = None
    """Write-ahead log."""
    commits_per_job: float | None = None
    """Transactions of the database, without the harness's."""
    dead_rows_per_job: float | None = None
    """Row versions left for vacuum."""
    ratio: float | None = None
    """Rate divided by the reference's in the same repetition."""
    share_spread: float | None = None
    """Of several worker processes: jobs of the busiest one divided by those of the least busy one."""
    rss_mb: float | None = None
    """Memory of the worker process that is its own, not the system's or a file's, at the end."""
    database_mb: float | None = None
    """Size of the database at the end."""


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99 of *seconds* in milliseconds, under the names that :class:`Result` has for them.

    Each is a value that occurred: the smallest with at least that share at or below it.
    """
    ordered = sorted(seconds)
    return {
        f"p{percent}_ms": round(ordered[math.ceil(len(ordered) * percent / 100) - 1] * 1000, 3)
        for percent in (50, 95, 99)
    }
