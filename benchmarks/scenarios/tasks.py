"""The application that the measured workers run: ``python -m awa.worker benchmarks.scenarios.tasks``."""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import BinaryIO

import awa

STARTS_FILE = "BENCHMARK_STARTS"
"""The environment variable that names the file for what ``stamp`` saw."""

MARKS_FILE = "BENCHMARK_MARKS"
"""The one that names the file in which ``mark`` counts: byte *n* is how often job *n* ran."""

WAITS_FILE = "BENCHMARK_WAITS"
"""The one that names the file for the waits that ``mark`` saw, as records of ``WAIT``."""

WAIT = struct.Struct("=qq")
"""Nanoseconds of CLOCK_MONOTONIC before the insert and at the start of the handler."""

client = awa.Client()

_starts: list[tuple[int, int]] = []
_marks: mmap.mmap
_waits: BinaryIO


@client.task()
def noop(n: int = 0) -> None:
    """Do nothing."""


@client.task()
def nap(n: int = 0, seconds: float = 0.02) -> None:
    """Wait, as a handler does that asks somebody something."""
    time.sleep(seconds)


@client.task()
def stamp(n: int) -> None:
    """Note when job *n* starts, in nanoseconds of CLOCK_MONOTONIC, which all processes of a machine share."""
    _starts.append((n, time.monotonic_ns()))


@client.task()
def mark(n: int, at: int = 0) -> None:
    """Count that job *n* has run, and note how long it waited when *at* says since when; needs no memory of its own."""
    _marks[n] += 1
    if at:
        _waits.write(WAIT.pack(at, time.monotonic_ns()))


@client.on_worker_start
def open_files() -> None:
    """Open what ``mark`` writes to."""
    global _marks, _waits
    if path := os.environ.get(MARKS_FILE):
        with open(path, "r+b") as file:
            _marks = mmap.mmap(file.fileno(), 0)
        _waits = open(os.environ[WAITS_FILE], "ab")  # noqa: SIM115  # until the worker stops


@client.on_worker_stop
def close_files() -> None:
    """Write out what is left of the waits."""
    if MARKS_FILE in os.environ:
        _waits.close()


@client.on_worker_stop
def write_starts() -> None:
    """Write a line ``n nanoseconds`` for each start; the harness reads it once the worker has ended."""
    if path := os.environ.get(STARTS_FILE):
        with open(path, "w", encoding="ascii") as file:
            file.writelines(f"{n} {at}\n" for n, at in _starts)
