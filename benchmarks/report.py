"""Results as JSON lines for machines, and as a table of medians for people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from benchmarks.record import Result

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


def make_line(scenario: str, repetition: int, result: Result, facts: Mapping[str, Any]) -> dict[str, Any]:
    """One repetition's line: its figures, then what they depend on."""
    fields = asdict(result) | {"jobs_per_s": round(result.jobs_per_s, 1)}
    return {"scenario": scenario, **fields, "repetition": repetition, **facts}


def dump_line(line: Line) -> str:
    """*line* as one line of JSON."""
    return json.dumps(line, ensure_ascii=False, separators=(", ", ": "))


def make_table(lines: Sequence[Line]) -> str:
    """The median of each figure over the repetitions of each variant, the range of the rates, and the ratios."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line["scenario"], line["variant"]), []).append(line)
    rows = [["scenario", "variant", *COLUMNS, "lowest-highest jobs_per_s"]]
    for (scenario, variant), group in groups.items():
        rates = [line["jobs_per_s"] for line in group]
        figures = [_median(group, name, form) for name, form in COLUMNS.items()]
        rows.append([scenario, variant, *figures, f"{min(rates):,.0f}-{max(rates):,.0f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*table, *_ratios(groups)])


def _median(group: Iterable[Line], name: str, form: str) -> str:
    known = [line[name] for line in group if line[name] is not None]
    return format(median(known), form) if known else "-"


def _ratios(groups: Mapping[tuple[str, str], Sequence[Line]]) -> Iterable[str]:
    if known := [line["ratio"] for line in groups.get(("insert", "single"), ()) if line["ratio"] is not None]:
        yield f"insert: single runs at {median(known):.1%} of bare (median of the ratios within each repetition)"
    for (scenario, variant), group in groups.items():
        reference = variant.removesuffix("-on") + "-off"
        without = groups.get((scenario, reference))
        if scenario == "producers" and variant.endswith("-on") and without:
            share = median(x["jobs_per_s"] for x in group) / median(x["jobs_per_s"] for x in without)
            yield f"producers: {variant} runs at {share:.1%} of {reference} (ratio of the medians)"


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
