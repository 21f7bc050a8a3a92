"""``awa storage``: is it sound, is it this server's own, what does it hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click
from psycopg import Connection

from awa.cli import EXIT_FAILED
from awa.cli.target import database_options
from awa.config import load_settings
from awa.embedded import find_or_start_database
from awa.storage import rebase as rebasing
from awa.storage.check import Report, check_storage
from awa.storage.connection import connect
from awa.storage.grants import Part, explaining
from awa.storage.migrate import check_schema
from awa.storage.pooler import declare_as
from awa.storage.rebase import Rebased, Survey, survey
from awa.storage.schema import Schema
from awa.storage.status import SlotStatus, read_status


@click.group()
def storage() -> None:
    """Check the stored jobs, mend a copy that was restored, and see what the ring of segments holds."""


@contextmanager
def _connected(
    database: str | None, schema_name: str | None, part: Part | None = "reader"
) -> Iterator[tuple[Connection, Schema]]:
    settings = load_settings(flags={"schema": schema_name})
    schema, conninfo = Schema(settings.schema), find_or_start_database(database).conninfo
    declare_as(conninfo, settings.pooler)
    with (
        connect(conninfo, name="storage", answer_within=None, writes=False) as conn,
        explaining(conn, schema, part),
    ):
        check_schema(conn, schema)
        yield conn, schema


@storage.command()
@database_options
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
        facts["loose_keys"] = report.loose_keys
        facts["over_limits"] = report.over_limits
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
    if report.loose_keys:
        lines.append(f"{report.loose_keys} unique keys of jobs that have ended or are gone: the leader removes them")
    if report.over_limits:
        lines.append(f"{report.over_limits} more attempts run than limits allow now: they were lowered meanwhile")
    found = f"{len(report.findings)} findings" if report.findings else "all is well"
    lines.append(f"schema {schema.name}: {found}; read in {report.seconds:.1f} s")
    return "\n".join(lines)


@storage.command()
@database_options
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask.")
def rebase(database: str | None, schema_name: str | None, as_json: bool, is_sure: bool) -> None:
    """Make a restored or replicated copy this server's own: everything that is open is appended again.

    Stop the workers and the replication first. Attempts that were running in the copy are taken back as those of dead
    workers are; jobs that wait for a time, failed and cancelled ones stay. One transaction: it is done wholly or not.
    Only the schema's owner may do it.
    """
    with _connected(database, schema_name, part=None) as (conn, schema):
        if not is_sure:
            click.echo(_survey_text(schema, survey(conn, schema)), err=as_json)
            click.confirm("Rebase?", abort=True, err=as_json)
        done = rebasing.rebase(conn, schema)
    click.echo(json.dumps({"schema": schema.name, **asdict(done)}) if as_json else _rebased_text(schema, done))


def _survey_text(schema: Schema, found: Survey) -> str:
    lines = [f"schema {schema.name}: {sum(found.available.values())} entries are to be appended again"]
    lines += [f"  {count:>9} available in queue {queue}" for queue, count in found.available.items()]
    lines.append(
        f"{sum(found.running.values())} attempts are to be taken back, and run again unless they were the last"
    )
    lines += [f"  {count:>9} running at worker {runtime}" for runtime, count in found.running.items()]
    return "\n".join(lines)


def _rebased_text(schema: Schema, done: Rebased) -> str:
    lines = [f"appended {done.carried} entries again, took {done.rescued} attempts back"]
    if done.renumbered:
        lines.append(f"gave {done.renumbered} entries a number of their own; a job that had only that one has a new id")
    if done.sequences:
        lines.append(f"put {', '.join(done.sequences)} right")
    if done.fenced:
        lines.append(f"cut off workers {', '.join(map(str, done.fenced))}")
    lines.append(f"schema {schema.name} is this server's own: start the workers")
    return "\n".join(lines)


@storage.command()
@database_options
def status(database: str | None, schema_name: str | None, as_json: bool) -> None:
    """Show each slot of the ring: how full it is, since when, and what keeps it from being emptied."""
    with _connected(database, schema_name) as (conn, schema):
        slots = read_status(conn, schema)
    empty = sum(slot.is_empty and not slot.is_current for slot in slots)
    oldest = min((slot for slot in slots if slot.opened_at), key=lambda slot: slot.opened_at or 0, default=None)
    if as_json:
        facts: dict[str, Any] = {"schema": schema.name, "empty": empty, "oldest": oldest and oldest.slot}
        facts["slots"] = [_slot_facts(slot) for slot in slots]
        click.echo(json.dumps(facts))
    else:
        click.echo(_status_text(schema, slots, empty, oldest))


def _slot_facts(slot: SlotStatus) -> dict[str, Any]:
    facts = asdict(slot)
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in facts.items()}


def _status_text(schema: Schema, slots: list[SlotStatus], empty: int, oldest: SlotStatus | None) -> str:
    lines = [f"{'slot':<12}{'entries':>9}{'MB':>9}  {'opened':<20}{'sealed':<20}{'newest end':<20}held by"]
    for slot in slots:
        name = f"{slot.slot}{' current' if slot.is_current else ' empty' if slot.is_empty else ''}"
        times = "".join(f"{_time(at):<20}" for at in (slot.opened_at, slot.sealed_at, slot.newest_end_at))
        held = "; ".join(map(str, slot.pins)) or "-"
        lines.append(f"{name:<12}{slot.entries:>9}{slot.size_bytes / 1e6:>9.1f}  {times}{held}")
    since = f"; the oldest is slot {oldest.slot}, of {_time(oldest.opened_at)}" if oldest else ""
    lines.append(f"schema {schema.name}: {empty} slots are empty{since}")
    return "\n".join(lines)


def _time(at: datetime | None) -> str:
    return "-" if at is None else f"{at:%Y-%m-%d %H:%M:%S}"
