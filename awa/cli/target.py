"""Which database a command talks to: its options, the line that tells, and the client."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import click
import psycopg

from awa.cli.output import echo, safe
from awa.client import Client
from awa.config import find_database, load_settings
from awa.embedded import find_or_start_database
from awa.storage.migrate import check_schema

C = TypeVar("C", bound=Callable[..., Any])

database_option = click.option(
    "--database", metavar="URL", help="The database; else AWA_DATABASE_URL, DATABASE_URL or PG*."
)
schema_option = click.option("--schema", "schema_name", metavar="NAME", help="The schema; else AWA_SCHEMA, else awa.")
json_option = click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")


def database_options(command: C) -> C:
    """Give *command* ``--database``, ``--schema`` and ``--json``."""
    for option in (json_option, schema_option, database_option):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Target:
    """What was typed about where to go and how to answer."""

    database: str | None
    """The database, or None to look for it."""
    schema_name: str | None
    """The schema, likewise."""
    is_quiet: bool
    """Whether the line that tells of the database is left out."""
    as_json: bool
    """Whether the answer is JSON."""

    @contextmanager
    def client(self, make: Callable[..., Client] = Client) -> Iterator[Client]:
        """A client of that database, once it is known that its schema fits. Tells which database it is.

        Args:
            make: Makes the client.

        Raises:
            ConfigError, DatabaseNotFound: There is no such database, or it does not answer.
            SchemaNotMigrated, SchemaTooNew: This awa cannot work with it.
        """
        schema = load_settings(flags={"schema": self.schema_name}).schema
        # where libpq's own variables say everything, the client finds them too
        address = find_or_start_database(self.database).conninfo or None
        client = make(address, schema=schema, pool_size=1)
        try:
            self._look(client)
            yield client
        finally:
            client.close()

    @contextmanager
    def client_of(self, module: str) -> Iterator[Client]:
        """The client of the application *module*, where it says which database that is; likewise."""
        from awa.worker.__main__ import find_client

        # a client reads its settings when it is made, while its module is imported: so they travel as its environment
        schema = load_settings(flags={"schema": self.schema_name}).schema
        if self.schema_name is not None:
            os.environ["AWA_SCHEMA"] = schema
        if self.database is not None and self.database.strip():
            find_database(self.database)
            os.environ["AWA_DATABASE_URL"] = self.database
        client = find_client(module)
        typed = {"database": self.database, "schema": self.schema_name}
        for name in sorted(client.said & {name for name, value in typed.items() if value is not None}):
            echo(f"awa: --{name} is not used: {safe(module)} says it to awa.Client itself", err=True)
        try:
            self._look(client)
            yield client
        finally:
            client.close()

    def _look(self, client: Client) -> None:
        with client._own() as conn:
            if not self.is_quiet:
                echo(describe(conn.info, client._schema.name), err=True)
            # a producer may not read what is applied; what it calls tells
            with suppress(psycopg.errors.InsufficientPrivilege):
                check_schema(conn, client._schema)


def describe(info: psycopg.ConnectionInfo, schema: str) -> str:
    """The line that tells which database this is; no password is in it."""
    host = info.host or info.hostaddr or "this machine"
    return safe(f"database: {info.dbname} at {host}:{info.port}, schema {schema}")


def with_target(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give *command* the options of a :class:`Target`, which becomes its first argument."""

    @wraps(command)
    def call(*, database: str | None, schema_name: str | None, is_quiet: bool, as_json: bool, **options: Any) -> Any:
        return command(Target(database, schema_name, is_quiet, as_json), **options)

    quiet = click.option("-q", "--quiet", "is_quiet", is_flag=True, help="Do not tell which database it is.")
    return database_options(quiet(call))


def this_user() -> str:
    """Who asks, as ``user@host``."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no such user here, as in a container
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:200]


def refuse_address(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """For a name: a database's address with a password is none, and errors would repeat it."""
    for text in value if isinstance(value, tuple) else (value,):
        if isinstance(text, str) and re.search(r"://[^/]*:[^/]*@|\bpassword\s*=", text, re.IGNORECASE):
            raise click.UsageError("that looks like a database's address: give it with --database", context)
    return value
