"""``awa db``: the private PostgreSQL of this user."""

from __future__ import annotations

import json

import click

from awa.cli import EXIT_NO_DATABASE
from awa.embedded import Server, Status, StopMode, default_server
from awa.errors import DatabaseNotFound

_as_json = click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")


@click.group()
def db() -> None:
    """Start, stop and inspect the private PostgreSQL.

    It is used when no database is named by AWA_DATABASE_URL, DATABASE_URL or PG* variables, and goes on running until
    it is stopped. AWA_PG_BIN chooses its programs, AWA_STATE_DIR where it keeps its data.
    """


@db.command()
@click.option("--timeout", default=60.0, show_default=True, help="Longest wait in seconds.")
@_as_json
def start(timeout: float, is_json: bool) -> None:
    """Have it running, and print its address."""
    server = default_server()
    is_started = server.start(timeout=timeout)
    status = server.status()
    if is_json:
        click.echo(json.dumps({"is_started": is_started, **_describe(server, status)}))
    else:
        word = "started" if is_started else "already running"
        click.echo(f"{word}: PostgreSQL {status.version} in {status.directory}", err=True)
        click.echo(server.url())


@db.command()
@click.option(
    "--mode",
    type=click.Choice(["smart", "fast", "immediate"]),
    default="fast",
    show_default=True,
    help="Wait until nobody is connected, end connections, or crash.",
)
@click.option("--timeout", default=60.0, show_default=True, help="Longest wait in seconds.")
def stop(mode: StopMode, timeout: float) -> None:
    """End it; its data stays."""
    server = default_server()
    is_stopped = server.stop(mode, timeout=timeout)
    click.echo(f"{'stopped' if is_stopped else 'was not running'}: PostgreSQL in {server.directory}", err=True)


@db.command()
@_as_json
@click.pass_context
def status(ctx: click.Context, is_json: bool) -> None:
    """Tell whether it runs, and where; exit code 69 when it does not."""
    server = default_server()
    found = server.status()
    described = _describe(server, found)
    if is_json:
        click.echo(json.dumps(described))
    else:
        for name, value in described.items():
            click.echo(f"{name:<17} {'-' if value is None else value}")
    if not found.is_running:
        ctx.exit(EXIT_NO_DATABASE)


@db.command()
def url() -> None:
    """Print the address of its database, as in `psql "$(awa db url)"`."""
    server = default_server()
    if not server.status().is_running:
        raise DatabaseNotFound(f"the private PostgreSQL in {server.directory} is not running: run `awa db start`")
    click.echo(server.url())


def _describe(server: Server, status: Status) -> dict[str, str | int | bool | None]:
    return {
        "is_running": status.is_running,
        "pid": status.pid,
        "version": status.version,
        "programs": status.source,
        "directory": str(status.directory),
        "socket_directory": str(status.socket_directory),
        "log": str(server.log),
        "url": server.url(),
    }
