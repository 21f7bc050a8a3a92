"""``awa stats``: throughput, waits and run times of queues and kinds."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import click

from awa.cli.output import Cell, Column, Table, echo, facts, local_time, print_json, safe
from awa.cli.target import Target, refuse_address, with_target
from awa.client import Client
from awa.errors import KindNotFound, QueueNotFound
from awa.storage.statistics import LENGTHS, SUBJECTS, Percentiles, Statistics, Subject, Window

LATE = timedelta(minutes=1)
"""A busy leader may be some seconds behind; this means that nobody gathers."""

_COLUMNS = (
    Column("completed", is_number=True),
    Column("/s", is_number=True),
    Column("retried", is_number=True, needs_width=90),
    Column("failed", is_number=True),
    Column("cancelled", is_number=True, needs_width=120),
    Column("rescued", is_number=True, needs_width=120),
    Column("snoozed", is_number=True, needs_width=120),
    Column("wait p50", is_number=True),
    Column("p95", is_number=True, needs_width=100),
    Column("p99", is_number=True),
    Column("max", is_number=True, needs_width=140),
    Column("run p50", is_number=True),
    Column("p95", is_number=True, needs_width=100),
    Column("p99", is_number=True),
    Column("max", is_number=True, needs_width=140),
)


@click.command(short_help="Show throughput, waits and run times.")
@click.argument("name", required=False, callback=refuse_address)
@click.option("--by", type=click.Choice(SUBJECTS), default="queue", show_default=True, help="Of queues, or of kinds.")
@click.option("--window", type=click.Choice(list(LENGTHS)), help="How far back; else 1h, and all three with a NAME.")
@with_target
def stats(target: Target, name: str | None, by: Subject, window: str | None) -> None:
    """Show how many attempts ended how, how long they waited and how long they ran; of one queue or kind, or of all.

    Times are within 9 % of the exact ones. A ~ tells that some attempts were looked at for many.
    """
    with target.client() as client:
        found = client.admin.statistics(by, name=name)
        if name is not None and not any(window.started for window in found[0].windows.values()):
            _doubt_name(client, name, by)
    if window is not None:
        found = [Statistics(one.name, {window: one.windows[window]}) for one in found]
    if target.as_json:
        print_json({"by": by, "statistics": [facts(one) for one in found]})
    elif name is not None:
        for one in found:
            print_statistics(one, by)
    elif found:
        label = window or "1h"
        Table([Column(by, is_flexible=True), *_COLUMNS]).print(
            [[one.name, *_cells(one.windows[label], by)] for one in found]
        )
        _warn(one.windows[label] for one in found)
    else:
        echo("no attempt has ended in the last 24 hours, as far as was gathered", err=True)


def _doubt_name(client: Client, name: str, by: Subject) -> None:
    """Tell who is shown noughts of a name that it is none; no error, since they are true."""
    try:
        client.admin.get_queue(name, by_kind=False) if by == "queue" else client.admin.get_kind(name)
    except (QueueNotFound, KindNotFound) as error:
        echo(f"awa: {safe(error)}", err=True)


def print_statistics(statistics: Statistics, by: Subject = "queue") -> None:
    """Print one queue or kind as a table with a row for each window."""
    Table([Column("last"), *_COLUMNS]).print(
        [[label, *_cells(window, by)] for label, window in statistics.windows.items()]
    )
    _warn(statistics.windows.values())


def _cells(window: Window, by: Subject) -> list[Cell]:
    guessed = "~" if window.is_sampled else ""
    about = guessed if by == "kind" else ""
    counts = [window.retried, window.failed, window.cancelled, window.rescued, window.snoozed]
    return [
        f"{about}{window.completed:,}",
        f"{about}{window.per_second:,.{0 if window.per_second >= 100 else 1 if window.per_second >= 1 else 3}f}",
        *(f"{about if count else ''}{count:,}" for count in counts),
        *_times(window.wait_ms, guessed),
        *_times(window.run_ms, guessed),
    ]


def _times(times: Percentiles | None, guessed: str) -> list[str]:
    if times is None:
        return ["-"] * 4
    return [guessed + _time_text(ms) for ms in (times.p50, times.p95, times.p99, times.max)]


def _time_text(ms: float) -> str:
    if ms < 1:
        return "<1 ms"
    if ms < 1_000:
        return f"{ms:.1f} ms" if ms < 10 else f"{ms:.0f} ms"
    seconds = ms / 1_000
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:,.0f} min"


def _warn(windows: Iterable[Window]) -> None:
    reached = max(window.until for window in windows)
    if datetime.now(UTC) - reached > LATE:
        echo(f"nothing was gathered since {local_time(reached)}: no worker is at work, or it lags behind", err=True)
