"""The application that the measured workers run: ``python -m awa.worker benchmarks.scenarios.tasks``."""

from __future__ import annotations

import os
import time

import awa

STARTS_FILE = "BENCHMARK_STARTS"
"""The environment variable that names the file for what ``stamp`` saw."""

client = awa.Client()

_starts: list[tuple[int, int]] = []


@client.task()
def noop(n: int = 0) -> None:
    """Do nothing."""


@client.task()
def stamp(n: int) -> None:
    """Note when job *n* starts, in nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share."""
    _starts.append((n, time.monotonic_ns()))


@client.on_worker_stop
def write_starts() -> None:
    """Write a line ``n nanoseconds`` for each start; the harness reads it once the worker has ended."""
    if path := os.environ.get(STARTS_FILE):
        with open(path, "w", encoding="ascii") as file:
            file.writelines(f"{n} {at}\n" for n, at in _starts)
