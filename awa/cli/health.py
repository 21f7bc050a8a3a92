"""``awa health``: is a worker well, by its own answer, or by what the database heard of all of them."""

from __future__ import annotations

import json
from http.client import HTTPConnection, HTTPException
from typing import Any

import click
import psycopg

from awa.config import find_database, load_settings, split_address
from awa.errors import AwaError, ConfigError
from awa.storage import runtimes
from awa.storage.connection import connect
from awa.storage.grants import explaining
from awa.storage.migrate import check_schema
from awa.storage.schema import Schema

HEALTHY, UNHEALTHY, UNKNOWN = 0, 1, 2

TIMEOUT = 5.0
"""Seconds that a worker has to answer; it needs some milliseconds."""


@click.command()
@click.option("--addr", "address", metavar="HOST:PORT", help="Where a worker answers; else AWA_HEALTH_ADDR.")
@click.option(
    "--ready", is_flag=True, help="Ask for /readyz: can it work just now? Else for /healthz: do its loops run?"
)
@click.option("--database", metavar="URL", help="Without an address: AWA_DATABASE_URL, DATABASE_URL or PG* otherwise.")
@click.option(
    "--schema", "schema_name", metavar="NAME", help="Without an address: the schema; else AWA_SCHEMA, else awa."
)
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
@click.pass_context
def health(
    context: click.Context,
    address: str | None,
    ready: bool,
    database: str | None,
    schema_name: str | None,
    as_json: bool,
) -> None:
    """Ask a worker how it is, at the address given to its --health-addr.

    Without an address, ask the database for signs of life: it is well when there is a worker and all of them are heard.

    Exit code 0: healthy. 1: not. 2: cannot tell, since nobody answers.
    """
    try:
        settings = load_settings(flags={"health_addr": address, "schema": schema_name})
        if settings.health_addr:
            is_well, facts, lines = _ask_worker(settings.health_addr, "/readyz" if ready else "/healthz")
        elif ready:
            raise ConfigError("--ready asks a worker: give its address with --addr or AWA_HEALTH_ADDR")
        else:
            is_well, facts, lines = _ask_database(database, Schema(settings.schema))
    except (AwaError, psycopg.Error, OSError, HTTPException, ValueError) as error:
        click.echo(f"awa: cannot tell: {' '.join(str(error).split()) or type(error).__name__}", err=True)
        context.exit(UNKNOWN)
    click.echo(json.dumps(facts) if as_json else "\n".join(lines))
    context.exit(HEALTHY if is_well else UNHEALTHY)


Answer = tuple[bool, dict[str, Any], list[str]]


def _ask_worker(address: str, page: str) -> Answer:
    host, port = split_address(address)
    # where everybody is listened for, this machine is too
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = HTTPConnection(host, port, timeout=TIMEOUT)
    try:
        connection.request("GET", page)
        with connection.getresponse() as response:  # an answer without a length keeps the socket otherwise
            body = response.read(1_000_000)
    except (OSError, HTTPException) as error:
        text = str(error) or type(error).__name__
        raise AwaError(f"no worker answers at {address} ({text}): see that it runs with --health-addr") from error
    finally:
        connection.close()
    try:
        facts = json.loads(body)
        lines = [f"worker {facts['runtime']}, process {facts['pid']}: {facts['status']}"]
        lines += [f"  {reason}" for reason in facts["reasons"]]
        lines += [f"  {name:<12} {_loop_text(loop)}" for name, loop in facts["loops"].items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise AwaError(f"what answers at {address} is no awa worker: status {response.status}") from error
    return response.status == 200, facts, lines


def _loop_text(loop: dict[str, Any]) -> str:
    age = loop["last_success_age"]
    text = f"{loop['state']:<8} " + ("never succeeded" if age is None else f"succeeded {age:.1f} s ago")
    return text + (f", failed {loop['failures']} times: {loop['error']}" if loop["failures"] else "")


def _ask_database(database: str | None, schema: Schema) -> Answer:
    found = find_database(database)
    if found is None:
        raise ConfigError("neither a worker's address nor a database is named: give --addr, or --database")
    with connect(found.conninfo, name="health") as conn, explaining(conn, schema, "reader"):
        check_schema(conn, schema)
        workers = runtimes.list_seen(conn, schema)
    is_well = bool(workers) and all(worker.is_heard for worker in workers)
    facts = {
        "status": "ok" if is_well else "not ok",
        "schema": schema.name,
        "workers": [
            {
                "runtime": worker.runtime,
                "hostname": worker.hostname,
                "pid": worker.pid,
                "silent_seconds": round(worker.silent_seconds, 3),
                "is_heard": worker.is_heard,
            }
            for worker in workers
        ],
    }
    lines = [f"schema {schema.name}: {facts['status']}, {len(workers)} worker{'' if len(workers) == 1 else 's'}"]
    for worker in workers:
        state = "heard" if worker.is_heard else "taken for dead" if worker.is_gone else "silent"
        place = f"host {worker.hostname}, process {worker.pid}"
        lines.append(
            f"  worker {worker.runtime}, {place}: {state}, last sign of life {worker.silent_seconds:.1f} s ago"
        )
    return is_well, facts, lines
