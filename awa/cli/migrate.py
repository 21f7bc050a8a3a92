"""``awa migrate``: bring the schema to this awa's version, say where it stands, or print the SQL or the grants."""

from __future__ import annotations

import json
from typing import Any

import click
import psycopg

from awa.cli import EXIT_SCHEMA
from awa.config import load_settings
from awa.embedded import find_or_start_database
from awa.errors import AwaError
from awa.storage import migrate as migrations
from awa.storage.connection import connect
from awa.storage.grants import explaining, parse_grants, render_grants
from awa.storage.schema import Schema


@click.command()
@click.option("--database", metavar="URL", help="The database; else AWA_DATABASE_URL, DATABASE_URL or PG*.")
@click.option("--schema", "schema_name", metavar="NAME", help="The schema; else AWA_SCHEMA, else awa.")
@click.option("--status", "show_status", is_flag=True, help="Show what is applied and what is pending; change nothing.")
@click.option("--sql", "print_sql", is_flag=True, help="Print the script for psql; needs no database.")
@click.option("--from", "from_version", type=int, metavar="VERSION", help="With --sql: where the schema stands now.")
@click.option(
    "--grants",
    metavar="PART=ROLE,...",
    multiple=True,
    help="Print the script for psql that gives roles what a worker, producer or reader needs; needs no database.",
)
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
@click.pass_context
def migrate(
    context: click.Context,
    database: str | None,
    schema_name: str | None,
    show_status: bool,
    print_sql: bool,
    from_version: int | None,
    grants: tuple[str, ...],
    as_json: bool,
) -> None:
    """Create the schema or bring it up to date.

    Any number of starters may do this at once, beside running workers. With --status the exit code is 4 unless the
    schema is exactly at this awa's version.

    With --grants, as in `awa migrate --grants worker=app_worker,producer=app_web,reader=metabase | psql URL`, the
    script is to be run by the schema's owner, again after every migration.
    """
    if show_status + print_sql + bool(grants) > 1:
        raise click.UsageError("--status, --sql and --grants exclude each other")
    if from_version is not None and not print_sql:
        raise click.UsageError("--from goes with --sql")
    schema = Schema(load_settings(flags={"schema": schema_name}).schema)

    if grants:
        pairs = parse_grants(grants)
        script = render_grants(schema, pairs)
        named = [{"part": part, "role": role} for part, role in pairs]
        answer = json.dumps({"schema": schema.name, "grants": named, "sql": script}) if as_json else script
        click.echo(answer, nl=as_json)
        return

    if print_sql:
        script = migrations.render_sql(schema, from_version or 0)
        facts = {"schema": schema.name, "from": from_version or 0, "to": migrations.latest_version(), "sql": script}
        click.echo(json.dumps(facts) if as_json else script, nl=as_json)
        return

    address = find_or_start_database(database).conninfo
    with connect(address, name="migrate", answer_within=None, writes=not show_status) as conn:
        if show_status:
            with explaining(conn, schema, "reader"):
                status = migrations.status(conn, schema)
            click.echo(json.dumps(_status_facts(schema, status)) if as_json else _status_text(schema, status))
            context.exit(0 if status.is_current else EXIT_SCHEMA)
        try:
            applied = migrations.migrate(conn, schema)
        except psycopg.errors.InsufficientPrivilege as error:
            raise AwaError(
                f"{conn.info.user} may not migrate schema {schema.name!r} ({error.diag.message_primary}):"
                " migrate as the schema's owner, or create the schema for this role first"
            ) from error
    if as_json:
        names = [{"version": migration.number, "name": migration.name} for migration in applied]
        click.echo(json.dumps({"schema": schema.name, "version": migrations.latest_version(), "applied": names}))
        return
    for migration in applied:
        click.echo(f"applied {migration.file_name}")
    end = "" if applied else ": nothing to do"
    click.echo(f"schema {schema.name} is at version {migrations.latest_version()}{end}")


def _status_facts(schema: Schema, status: migrations.Status) -> dict[str, Any]:
    return {
        "schema": schema.name,
        "version": status.current,
        "latest": status.latest,
        "oldest_supported": status.oldest_supported,
        "is_current": status.is_current,
        "applied": [
            {"version": row.version, "name": row.name, "applied_at": row.applied_at.isoformat()}
            for row in status.applied
        ],
        "pending": [{"version": migration.number, "name": migration.name} for migration in status.pending],
        "changed": [{"version": migration.number, "name": migration.name} for migration in status.changed],
    }


def _status_text(schema: Schema, status: migrations.Status) -> str:
    changed = {migration.number for migration in status.changed}
    lines = [
        f"schema {schema.name} is at version {status.current}; this awa ships {status.latest}"
        f" and runs on {status.oldest_supported} to {status.latest}"
    ]
    for row in status.applied:
        note = ", but its file was changed since" if row.version in changed else ""
        lines.append(f"  {row.version:04} {row.name}: applied {row.applied_at:%Y-%m-%d %H:%M:%S %Z}{note}")
    lines += [f"  {migration.number:04} {migration.name}: pending" for migration in status.pending]
    if status.current > status.latest:
        lines.append("The schema is newer than this awa: upgrade awa-queue here.")
    elif status.pending:
        lines.append("Run `awa migrate`.")
    return "\n".join(lines)
