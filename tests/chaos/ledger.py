"""The ledger: installed before the run, completed with the journals after it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from psycopg import Connection

from tests.chaos import journal

Crash = tuple[float, float]
"""When a crash of the server began and when the server answered again, in seconds since the epoch."""


def install(conn: Connection[Any]) -> None:
    """Make the tables of ledger and application, and the triggers that fill them."""
    conn.execute(Path(__file__).with_name("ledger.sql").read_bytes())


OPEN = "SELECT count(*) FROM (SELECT job FROM ledger.jobs EXCEPT SELECT job FROM ledger.finals) t"


def count_open(conn: Connection[Any]) -> int:
    """Jobs that have not ended for good."""
    conn.execute("SET enable_nestloop = off")  # what was crashed has no statistics, and one by one it takes minutes
    found = conn.execute(OPEN).fetchone()
    assert found is not None
    return int(found[0])


def load(conn: Connection[Any], directory: Path, crashes: Iterable[Crash]) -> None:
    """Put what the journals in *directory* say, and the server's crashes, beside the evidence."""
    with conn.cursor().copy("COPY ledger.intents FROM STDIN") as copy:
        for row in _intents(directory):
            copy.write_row(row)
    with conn.cursor().copy("COPY ledger.runs (entry_id, job, mark, started_at, ended_at) FROM STDIN") as copy:
        for row in _runs(directory):
            copy.write_row(row)
    with conn.cursor().copy("COPY ledger.commits FROM STDIN") as copy:
        for line in journal.read(directory, "worker-*.journal"):
            if line["run"] == "committed":
                copy.write_row((line["mark"], line["entry"]))
    with conn.cursor().copy("COPY ledger.controls FROM STDIN") as copy:
        for line in _lines(directory, "control"):
            copy.write_row((line["job"], line["control"], line["happened"], _time(line["at"])))
    with conn.cursor().copy("COPY ledger.crashes FROM STDIN") as copy:
        for began, ended in crashes:
            copy.write_row((_time(began), _time(ended)))
    conn.execute("ANALYZE")


def _lines(directory: Path, about: str) -> Iterable[dict[str, Any]]:
    """What producers noted: deeds, or controls."""
    return (line for line in journal.read(directory, "producer-*.journal") if about in line)


def _intents(directory: Path) -> Iterable[tuple[Any, ...]]:
    """One row per mark. A deed whose fate was not noted is unknown: its process was killed."""
    deeds: dict[tuple[str, int], dict[str, Any]] = {}
    for line in _lines(directory, "deed"):
        deeds.setdefault((line["who"], line["deed"]), {"fate": "unknown"}).update(line)
    for deed in deeds.values():
        for mark in deed["meant"]:
            yield mark, deed["way"], True, deed["fate"], deed["has_row"]
        for mark in deed["undone"]:
            yield mark, deed["way"], False, deed["fate"], deed["has_row"]


def _runs(directory: Path) -> Iterable[tuple[Any, ...]]:
    """One row per start of a handler; without an end when its process was killed."""
    for path in sorted(directory.glob("worker-*.journal")):
        open_runs: dict[int, dict[str, Any]] = {}
        for line in journal.read(directory, path.name):
            if line["run"] == "begun":
                open_runs[line["number"]] = line
            elif line["run"] == "ended":
                begun = open_runs.pop(line["number"])
                yield begun["entry"], begun["job"], begun["mark"], _time(begun["at"]), _time(line["at"])
        for begun in open_runs.values():
            yield begun["entry"], begun["job"], begun["mark"], _time(begun["at"]), None


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
