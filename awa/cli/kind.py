"""``awa kind``: look at kinds of jobs."""

from __future__ import annotations

from typing import Any

import click

from awa.cli.counts import counted_columns, counted_lines, counted_row, print_depths
from awa.cli.descriptors import described_columns, described_facts, described_lines, described_row
from awa.cli.output import Cell, Column, Table, echo, facts, print_facts, print_json, safe
from awa.cli.target import Target, refuse_address, with_target
from awa.storage.kinds import KindInfo

_COLUMNS = (
    Column("kind", is_flexible=True),
    Column("runtimes", is_number=True),
    *counted_columns(oldest_needs_width=90),
    *described_columns(),
)


@click.group()
def kind() -> None:
    """Look at kinds of jobs: how many there are, how code describes them, and who handles them."""


@kind.command("list", short_help="Show every kind, with its jobs by state and how many workers handle it.")
@with_target
def list_(target: Target) -> None:
    """Show every kind that has jobs or has had attempts today, that code describes, or that a live worker handles.

    Up to 10,000 jobs of a queue in a state are counted, beyond that numbers may be estimates: ~1,234,567. A kind may
    then have jobs though none was met: ~0. The column `oldest` tells for how long the first of the available ones has
    been.

    The column declared says live, stale when no live worker describes it any more, or drift when some of them describe
    it otherwise.
    """
    with target.client() as client:
        found = client.admin.list_kinds()
    if target.as_json:
        print_json({"kinds": [kind_facts(one) for one in found]})
    elif found:
        Table(_COLUMNS).print([_row(one) for one in found])
    else:
        echo("no kind is known: there are no jobs, no worker runs, and none has described one", err=True)


def _row(info: KindInfo) -> list[Cell]:
    counted = counted_row(info.counts, info.oldest_at)
    return [info.name, f"{info.live_runtimes:,}", *counted, *described_row(info.descriptor)]


@kind.command(short_help="Show all that is known of a kind.")
@click.argument("name", callback=refuse_address)
@with_target
def show(target: Target, name: str) -> None:
    """Show all that is known of a kind, and what each queue has of it; exit code 3 when nothing is known."""
    with target.client() as client:
        info = client.admin.get_kind(name)
    if target.as_json:
        print_json(kind_facts(info))
    else:
        rows = [("kind", safe(info.name)), ("handled by", _runtimes(info.live_runtimes))]
        print_facts(rows + counted_lines(info.counts, info.oldest_at) + described_lines(info.descriptor))
        print_depths("queue", info.queues)


def _runtimes(count: int) -> str:
    return f"{count:,} live {'runtime' if count == 1 else 'runtimes'}"


def kind_facts(info: KindInfo) -> dict[str, Any]:
    """A kind in JSON: the fields of ``KindInfo``."""
    return facts(info) | {"descriptor": described_facts(info.descriptor)}
