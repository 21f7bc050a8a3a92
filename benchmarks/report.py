"""Results as JSON lines for machines, and as a table of medians for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from statistics import median
from typing import Any

from benchmarks.record import Result
from benchmarks.scenarios import SCENARIOS

FIGURES = tuple(field.name for field in fields(Result) if field.name != "variant")
"""What a line has of a result."""

Line = Mapping[str, Any]
"""What one line of JSON holds."""

COLUMNS = {
    "jobs": ",.0f",
    "jobs_per_s": ",.0f",
    "p50_ms": ".2f",
    "p95_ms": ".2f",
    "p99_ms": ".2f",
    "wal_bytes_per_job": ".1f",
    "commits_per_job": ".4f",
    "dead_rows_per_job": ".4f",
}
"""The figures of the table, and how they are written."""

RARE_COLUMNS = {"share_spread": ".2f", "rss_mb": ",.1f", "database_mb": ",.1f"}
"""Those that have a column only when some line has one."""


def make_line(scenario: str, repetition: int, result: Result, facts: Mapping[str, Any]) -> dict[str, Any]:
    """One repetition's line: its figures, then what they depend on."""
    figures = asdict(result) | {"jobs_per_s": round(result.jobs_per_s, 1)}
    return {"scenario": scenario, **figures, "repetition": repetition, **facts}


def dump_line(line: Line) -> str:
    """*line* as one line of JSON."""
    return json.dumps(line, ensure_ascii=False, separators=(", ", ": "))


def make_table(lines: Sequence[Line]) -> str:
    """The median of each figure over the repetitions of each variant, the range of the rates, and what follows."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line["scenario"], line["variant"]), []).append(line)
    columns = COLUMNS | {
        name: form for name, form in RARE_COLUMNS.items() if any(line[name] is not None for line in lines)
    }
    medians = {place: _medians(group) for place, group in groups.items()}
    rows = [["scenario", "variant", *columns, "lowest-highest jobs_per_s"]]
    for (scenario, variant), group in groups.items():
        rates = [line["jobs_per_s"] for line in group]
        found = medians[scenario, variant]
        figures = [format(found[name], form) if name in found else "-" for name, form in columns.items()]
        rows.append([scenario, variant, *figures, f"{min(rates):,.0f}-{max(rates):,.0f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*table, *_sentences(medians)])


def _medians(group: Sequence[Line]) -> dict[str, float]:
    known = {name: [line[name] for line in group if line[name] is not None] for name in FIGURES}
    return {name: median(values) for name, values in known.items() if values}


def _sentences(medians: Mapping[tuple[str, str], Mapping[str, float]]) -> Iterator[str]:
    for scenario in dict.fromkeys(scenario for scenario, _ in medians):
        own = {variant: figures for (name, variant), figures in medians.items() if name == scenario}
        yield from (f"{scenario}: {sentence}" for sentence in SCENARIOS[scenario].conclude(own))


def describe(facts: Mapping[str, Any]) -> str:
    """The line above a table; says so when the server does not promise durability."""
    settings = facts["settings"]
    text = (
        f"awa {facts['awa']} at {facts['commit'] or 'no commit'}, Python {facts['python']},"
        f" PostgreSQL {facts['server']}, {facts['cpus']} x {facts['cpu']}"
    )
    if facts["filesystem"]:
        text += f", {facts['filesystem']}"
    unsafe = [name for name in ("fsync", "synchronous_commit", "full_page_writes") if settings.get(name) == "off"]
    if unsafe:
        text += f"\nNOT DURABLE, not to be compared with other figures: {', '.join(unsafe)} off"
    return text
