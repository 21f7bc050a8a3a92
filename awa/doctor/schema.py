"""Checks of awa's schema: its version, who may use it, whose rows these are, its tables and numbers."""

from __future__ import annotations

from collections.abc import Iterator

from awa.doctor.finding import Finding, Level
from awa.doctor.look import Look
from awa.errors import ConfigError
from awa.storage import examine as sql
from awa.storage.check import PARTITIONS
from awa.storage.grants import find_rights, grants_command, show_missing
from awa.storage.migrate import OLDEST_SUPPORTED, latest_version, status
from awa.storage.trust import read_origin, rebase_command
from awa.version import VERSION
from awa.wording import listed


def check_schema(look: Look) -> Iterator[Finding]:
    with look.transaction() as conn:
        try:
            found = status(conn, look.schema)
        except ConfigError as error:
            yield Finding("schema", "error", str(error), facts={"version": 0})
            return
    name, mend = look.schema.name, look.awa("migrate")
    span = "" if latest_version() == OLDEST_SUPPORTED else f" to {latest_version()}"
    text = f"schema {name} is at version {found.current}; awa {VERSION} works with {OLDEST_SUPPORTED}{span}"
    facts = {"version": found.current, "oldest": found.oldest_supported, "latest": found.latest, "awa": VERSION}
    if not found.current:
        text = f"there is no schema {name} in this database; awa {VERSION} works with version {OLDEST_SUPPORTED}{span}"
        yield Finding("schema", "error", text, mend, facts)
    elif found.current > found.latest:
        yield Finding("schema", "error", f"{text}: this awa is too old", "pip install --upgrade awa-queue", facts)
    elif found.changed:
        text += f", and {listed(one.file_name for one in found.changed)} was applied with another content"
        yield Finding("schema", "error", text, "pip install --force-reinstall awa-queue", facts)
    elif found.pending:
        is_old = found.current < found.oldest_supported
        text += f": {len(found.pending)} migrations are pending" + (", and this awa does not work" if is_old else "")
        yield Finding("schema", "error" if is_old else "warning", text, mend, facts)
    else:
        yield Finding("schema", "ok", text, facts=facts)


def check_grants(look: Look) -> Iterator[Finding]:
    with look.transaction() as conn:
        part, missing = find_rights(conn, look.schema)
    role = look.conn.info.user
    facts = {"role": role, "part": part, "missing": [" ".join(one) for one in missing]}
    if part is None:
        text = f"role {role} has no rights in schema {look.schema.name}"
        yield Finding("grants", "error", text, grants_command(look.schema, "worker", role), facts)
    elif missing:
        assert part != "owner"
        text = f"role {role} has most rights of a {part} and lacks {show_missing(missing)}"
        level: Level = "warning" if part == "reader" else "error"
        yield Finding("grants", level, text, grants_command(look.schema, part, role), facts)
    else:
        may = "owns the schema" if part == "owner" else f"has all rights of a {part}"
        yield Finding("grants", "ok", f"role {role} {may}", facts=facts)


def check_origin(look: Look) -> Iterator[Finding]:
    with look.transaction() as conn:
        here, recorded = read_origin(conn, look.schema)
    facts = {"here": str(here), "recorded": None if recorded is None else str(recorded)}
    if recorded is None:
        yield Finding("origin", "ok", f"this is {here}; no worker has started yet, and noted it", facts=facts)
    elif recorded != here:
        text = (
            f"the rows were made in {recorded}, and this is {here}: the next worker that starts looks closely, and"
            " refuses when it would miss jobs"
        )
        mend = f"{look.worker}  # or, when it refuses, `{rebase_command(look.schema)}`"
        yield Finding("origin", "warning", text, mend, facts)
    else:
        yield Finding("origin", "ok", f"the rows are this server's own ({here})", facts=facts)


def check_partitions(look: Look) -> Iterator[Finding]:
    odd = [(row.name, row.state) for row in look.rows(PARTITIONS)]
    for name, state in odd:
        table = look.schema.sql(f"awa.{name}")
        mend = f"ALTER TABLE {table} SET (autovacuum_enabled = off, toast.autovacuum_enabled = off);"
        facts = {"table": name, "state": state}
        if state == "vacuumed":
            text = f"autovacuum may come to {table}, and keeps its segment from being emptied meanwhile"
            yield Finding("partitions", "warning", text, mend, facts)
        else:
            text = f"table {table} is {state}: jobs of its segment are neither found nor inserted"
            yield Finding("partitions", "error", text, look.awa("storage check"), facts)
    if not odd:
        yield Finding("partitions", "ok", "the tables of all eight slots are there and left alone by autovacuum")


def check_sequences(look: Look) -> Iterator[Finding]:
    for row in look.rows(sql.SEQUENCES):
        part = row.last / row.most
        if part > 0.5:
            name = look.schema.sql(f"awa.{row.name}")
            text = (
                f"{name} has given out {row.last:,} of {row.most:,} numbers: when there is none left, nothing goes on"
            )
            mend = f"SELECT setval('{name}', N);  -- N: the largest number in use"
            facts = {"sequence": row.name, "last": row.last, "most": row.most}
            yield Finding("sequences", "error" if part > 0.9 else "warning", text, mend, facts)
            return
    yield Finding("sequences", "ok", "ids are far from the end of their numbers")
