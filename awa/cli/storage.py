"""``awa storage``: is it sound."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import click
from psycopg import Connection

from awa.cli import EXIT_FAILED
from awa.config import load_settings
from awa.embedded import find_or_start_database
from awa.storage.check import Report, check_storage
from awa.storage.migrate import check_schema
from awa.storage.pool import connect
from awa.storage.schema import Schema

Command = Callable[..., None]


@click.group()
def storage() -> None:
    """Check the stored jobs."""


def _options(command: Command) -> Command:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Answer in JSON."),
        click.option("--schema", "schema_name", metavar="NAME", help="The schema; else AWA_SCHEMA, else awa."),
        click.option("--database", metavar="URL", help="The database; else AWA_DATABASE_URL, DATABASE_URL or PG*."),
    ):
        command = option(command)
    return command


@contextmanager
def _connected(database: str | None, schema_name: str | None) -> Iterator[tuple[Connection, Schema]]:
    schema = Schema(load_settings(flags={"schema": schema_name}).schema)
    with connect(find_or_start_database(database).conninfo, name="storage") as conn:
        check_schema(conn, schema)
        yield conn, schema


@storage.command()
@_options
@click.pass_context
def check(context: click.Context, database: str | None, schema_name: str | None, as_json: bool) -> None:
    """Recompute every sum, and report what does not fit; exit code 1 when something was found.

    Reads everything in one snapshot, beside running workers. Until it is done no old segment is emptied.
    """
    with _connected(database, schema_name) as (conn, schema):
        report = check_storage(conn, schema)
    if as_json:
        facts = {"schema": schema.name, "is_sound": report.is_sound, "seconds": round(report.seconds, 3)}
        facts["slots"] = [asdict(sums) for sums in report.sums]
        facts["findings"] = [asdict(finding) for finding in report.findings]
        click.echo(json.dumps(facts))
    else:
        click.echo(_report_text(schema, report))
    context.exit(0 if report.is_sound else EXIT_FAILED)


def _report_text(schema: Schema, report: Report) -> str:
    lines = ["slot   entries  completed      ended  available    running"]
    lines += [
        f"{sums.slot:>4}{sums.entries:>10}{sums.completed:>11}{sums.ended:>11}{sums.available:>11}{sums.running:>11}"
        for sums in report.sums
        if sums.entries or sums.completed or sums.ended
    ]
    for finding in report.findings:
        place = f" ({finding.where})" if finding.where else ""
        shown = f" [{', '.join(map(str, finding.sample))}{', ...' if finding.count > len(finding.sample) else ''}]"
        lines.append(f"{finding.name}{place}: {finding.text}{shown if finding.sample else ''}")
    found = f"{len(report.findings)} findings" if report.findings else "all is well"
    lines.append(f"schema {schema.name}: {found}; read in {report.seconds:.1f} s")
    return "\n".join(lines)
