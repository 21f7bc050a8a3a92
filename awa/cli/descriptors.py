"""How the description of a queue or a kind is shown: beside others, by itself, and as JSON."""

from __future__ import annotations

from typing import Any

from awa.cli.output import Cell, Column, compact, facts, local_time, safe, styled
from awa.storage.descriptors import DescriptorInfo, Drift
from awa.wording import listed

NEEDS_WIDTH = 160
"""Characters of a terminal on which the columns stand beside the counts."""


def described_columns() -> tuple[Column, ...]:
    """Columns for :func:`described_row`, on terminals that are wide enough."""
    names = ("display name", "owner", "tags")
    return (
        *(Column(name, is_flexible=True, needs_width=NEEDS_WIDTH) for name in names),
        Column("declared", needs_width=NEEDS_WIDTH),
    )


def described_row(info: DescriptorInfo | None) -> list[Cell]:
    """The cells of these columns."""
    if info is None:
        return ["-"] * 4
    return [info.display_name or "-", info.owner or "-", ", ".join(info.tags) or "-", styled(standing(info))]


def standing(info: DescriptorInfo) -> str:
    """``stale``, ``drift`` or ``live``: whether live runtimes declare it, and all of them the same."""
    return "stale" if info.is_stale else "drift" if info.drift else "live"


def described_lines(info: DescriptorInfo | None) -> list[tuple[str, str]]:
    """Names and what they are, for ``print_facts``; what was not declared is left out."""
    if info is None:
        return [("declared", "not described in code")]
    told = [("display name", info.display_name), ("description", info.description), ("owner", info.owner)]
    told += [("docs", info.docs_url), ("tags", ", ".join(info.tags))]
    told += [("extra", compact(info.extra) if info.extra != {} else None)]
    lines = [(name, "\n".join(map(safe, text.splitlines()))) for name, text in told if text]
    lines.append(("declared", _declared(info)))
    lines += [("drift", _drift(one)) for one in info.drift]
    return [*lines, ("changed", local_time(info.updated_at)), ("last seen", local_time(info.last_seen_at))]


def _declared(info: DescriptorInfo) -> str:
    many = f"{info.live_runtimes:,} live {'runtime' if info.live_runtimes == 1 else 'runtimes'}"
    return "stale: by no live runtime" if info.is_stale else f"{standing(info)}: by {many}"


def _drift(one: Drift) -> str:
    who = f"{'runtime' if len(one.runtimes) == 1 else 'runtimes'} {listed(one.runtimes)}"
    what = f"another {', '.join(one.fields)}" if one.fields else "something else"
    return f"{who} with {what} ({one.descriptor_hash[:12]})"


def described_facts(info: DescriptorInfo | None) -> dict[str, Any] | None:
    """A description in JSON: the fields of ``DescriptorInfo``, and what it derives."""
    return None if info is None else facts(info) | {"is_stale": info.is_stale}
