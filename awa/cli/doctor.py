"""``awa doctor``: what is wrong with an installation, and what mends it."""

from __future__ import annotations

import textwrap
from itertools import groupby
from typing import Any

import click

from awa.cli.output import echo, facts, has_colours, print_json, safe, terminal_width
from awa.cli.target import Target, describe, with_target
from awa.config import load_settings
from awa.doctor import Finding, examine, section_of, worst
from awa.embedded import find_or_start_database
from awa.storage.connection import connect
from awa.storage.pooler import declare_as
from awa.storage.schema import Schema

EXIT_CODES = {"ok": 0, "warning": 1, "error": 2}

ANSWER_WITHIN = 10.0
"""Seconds that the server may take to let us in and to answer."""

_COLOURS = {"ok": "green", "warning": "yellow", "error": "red"}

_INDENT = 24


@click.command()
@click.option("--listen-url", metavar="URL", help="The database past the pooler; else AWA_LISTEN_URL.")
@click.option("--all/--problems", "shows_all", default=True, help="Show also what is well, or only what is not.")
@with_target
@click.pass_context
def doctor(context: click.Context, target: Target, listen_url: str | None, shows_all: bool) -> None:
    """Find what is wrong with the installation, and say what mends it.

    Looks at the schema, the server, its settings, what holds old rows, workers and queues. Changes nothing, counts no
    large table, and takes twenty seconds at most. Any role may ask; what it may not look at is told.

    Exit code 0: all is well. 1: there are warnings. 2: there are errors. 69: the database does not answer.
    """
    settings = load_settings(flags={"schema": target.schema_name, "listen_url": listen_url})
    schema, conninfo = Schema(settings.schema), find_or_start_database(target.database).conninfo
    declare_as(conninfo, settings.pooler)
    with connect(conninfo, name="doctor", answer_within=ANSWER_WITHIN, writes=False) as conn:
        if not target.is_quiet:
            echo(describe(conn.info, schema.name), err=True)
        found = examine(conn, schema, listen_url=settings.listen_url)
    level = worst(found)
    shown = found if shows_all else [finding for finding in found if finding.level != "ok"]
    if target.as_json:
        print_json({"schema": schema.name, "status": level, "findings": [_facts(finding) for finding in shown]})
    else:
        _print(shown, found)
    context.exit(EXIT_CODES[level])


def _facts(finding: Finding) -> dict[str, Any]:
    return {"section": section_of(finding.name), **facts(finding)}


def _print(shown: list[Finding], found: list[Finding]) -> None:
    room = max(terminal_width() or 120, 60)
    for section, findings in groupby(shown, key=lambda finding: section_of(finding.name)):
        echo(section)
        for finding in findings:
            lines = textwrap.wrap(safe(finding.text), room - _INDENT, break_on_hyphens=False, break_long_words=False)
            for number, line in enumerate(lines or [""]):
                echo((_head(finding) if number == 0 else " " * _INDENT) + line)
            if finding.mend is not None:
                echo(" " * _INDENT + f"-> {safe(finding.mend)}")  # on one line, to be copied
    errors, warnings = (sum(one.level == level for one in found) for level in ("error", "warning"))
    told = [f"{count} {word}{'' if count == 1 else 's'}" for count, word in ((errors, "error"), (warnings, "warning"))]
    echo(f"{', '.join(told)}, {len(found) - errors - warnings} checks well")


def _head(finding: Finding) -> str:
    level = f"  {finding.level:<8}"
    if terminal_width() is not None and has_colours():
        level = click.style(level, fg=_COLOURS[finding.level])
    return f"{level}{finding.name:<{_INDENT - 10}}"
