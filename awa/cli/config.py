"""``awa config``: the settings that hold here, and where each is from."""

from __future__ import annotations

from typing import Any

import click
from psycopg.conninfo import make_conninfo
from psycopg.pq import Conninfo

from awa.cli.output import Column, Table, print_json
from awa.cli.target import database_options, refuse_address
from awa.config import Found, embedded_allowed, find_database, load_settings, redact

_COLUMNS = (Column("setting"), Column("from"), Column("value"))
"""What may be long comes last, and is never cut: who looks at a setting wants all of it."""


@click.group()
def config() -> None:
    """Show the settings."""


@config.command()
@database_options
@click.argument("module", metavar="[MODULE[:NAME]]", required=False, callback=refuse_address)
def show(database: str | None, schema_name: str | None, as_json: bool, module: str | None) -> None:
    """Show every setting, its value and where that is from; the database likewise, without its password.

    From here only the environment is seen. With MODULE, which is imported, also what its awa.Client says in code.
    Nothing is connected to.
    """
    flags: dict[str, object] = {"schema": schema_name}
    if module is None:
        settings, found = load_settings(flags=flags), find_database(database, source="--database")
    else:
        from awa.worker.__main__ import find_client

        client = find_client(module)
        settings = client._settings(flags=flags)
        said = client._database
        found = find_database(database if said is None else said, source="--database" if said is None else "argument")
    where = _database(found)
    values = {name: (getattr(settings, name), source) for name, source in settings.sources.items()}
    if as_json:
        told = {name: {"value": _plain(name, value), "from": source} for name, (value, source) in values.items()}
        print_json({"database": where, "settings": told})
        return
    rows = [("database", where["from"], where["address"] or "-")]
    rows += [(name, source, _text(name, value)) for name, (value, source) in values.items()]
    Table(_COLUMNS).print(rows)


def _database(found: Found | None) -> dict[str, str]:
    if found is None and embedded_allowed():
        return {"address": "", "from": "nowhere: a private PostgreSQL is started when one is needed"}
    if found is None:
        return {"address": "", "from": "nowhere: and no private PostgreSQL is started here by itself"}
    return {"address": redact(found.conninfo) if found.conninfo else _libpqs_own(), "from": found.source}


def _libpqs_own() -> str:
    options = {option.keyword.decode(): option.val for option in Conninfo.get_defaults() if option.val}
    names = ("service", "host", "hostaddr", "port", "user", "dbname")
    return make_conninfo("", **{name: options[name].decode() for name in names if name in options})


def _plain(name: str, value: Any) -> Any:
    if name == "listen_url":
        return redact(value) if value else value
    return [str(spec) for spec in value] if name == "queues" else value


def _text(name: str, value: Any) -> str:
    match _plain(name, value):
        case bool(is_on):
            return "on" if is_on else "off"
        case float(seconds):
            return f"{seconds:.10g}"
        case list(queues):
            return ", ".join(queues)
        case "":
            return "-"
        case other:
            return str(other)
