"""``awa kind``: look at kinds of jobs."""

from __future__ import annotations

from typing import Any

import click

from awa.cli.descriptors import described_columns, described_facts, described_lines, described_row
from awa.cli.output import Column, Table, echo, facts, print_facts, print_json, safe
from awa.cli.target import Target, refuse_address, with_target
from awa.storage.descriptors import KindInfo

_COLUMNS = (Column("kind", is_flexible=True), Column("runtimes", is_number=True), *described_columns())


@click.group()
def kind() -> None:
    """Look at kinds of jobs: how code describes them, and who handles them."""


@kind.command("list", short_help="Show every kind, with its owner and how many workers handle it.")
@with_target
def list_(target: Target) -> None:
    """Show every kind that code describes or that a live worker handles.

    The column declared says live, stale when no live worker describes it any more, or drift when some of them describe
    it otherwise.
    """
    with target.client() as client:
        found = client.admin.list_kinds()
    if target.as_json:
        print_json({"kinds": [kind_facts(one) for one in found]})
    elif found:
        Table(_COLUMNS).print([[one.name, f"{one.live_runtimes:,}", *described_row(one.descriptor)] for one in found])
    else:
        echo("no kind is known: no worker runs, and none has described one", err=True)


@kind.command(short_help="Show all that is known of a kind.")
@click.argument("name", callback=refuse_address)
@with_target
def show(target: Target, name: str) -> None:
    """Show all that is known of a kind; exit code 3 when nothing is."""
    with target.client() as client:
        info = client.admin.get_kind(name)
    if target.as_json:
        print_json(kind_facts(info))
    else:
        rows = [("kind", safe(info.name)), ("handled by", _runtimes(info.live_runtimes))]
        print_facts(rows + described_lines(info.descriptor))


def _runtimes(count: int) -> str:
    return f"{count:,} live {'runtime' if count == 1 else 'runtimes'}"


def kind_facts(info: KindInfo) -> dict[str, Any]:
    """A kind in JSON: the fields of ``KindInfo``."""
    return facts(info) | {"descriptor": described_facts(info.descriptor)}
