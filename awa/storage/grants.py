"""Rights: what a worker, a producer and a reader need of the database, as a script for psql, a check, and advice.

The owner of the tables migrates and needs no grant. Whatever else needs an owner's rights is a function that has them
(migrations/0016_roles.sql); all other functions act with the rights of their caller.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import orjson
import psycopg
from psycopg import AsyncConnection, Connection, Cursor
from psycopg.rows import tuple_row

from awa.config import mask
from awa.errors import ConfigError, PermissionDenied
from awa.lent import Driver
from awa.storage.schema import Schema
from awa.wording import listed

Part = Literal["worker", "producer", "reader"]

PARTS: tuple[Part, ...] = ("worker", "producer", "reader")
"""Who can be granted rights. ``worker`` may do what the other two may."""

SEGMENTED = ("jobs", "claims", "completions", "attempt_ends")
"""Tables of which there is one more for each of the eight slots."""

OWNERS_FUNCTIONS: Mapping[str, tuple[Part, ...]] = {
    "analyze_v1(smallint)": ("worker",),
    "prune_v1(smallint, bigint, oid)": ("worker",),
    "prune_v2(smallint, bigint, oid, bigint[])": ("worker",),
    "rotate_v1()": ("worker",),
    "summarize_v1(smallint, bigint, integer)": ("worker",),
    "find_job_v2(bigint)": ("worker", "producer", "reader"),
    "find_job_v3(bigint)": ("worker", "producer", "reader"),
    "outcome_v1(bigint[])": ("worker", "producer", "reader"),
    "cancel_v1(bigint, text, boolean)": ("worker", "producer"),
    "retry_v1(bigint)": ("worker", "producer"),
    "enqueue_v1(text, json, text, integer, integer, integer, timestamptz, interval, text[], json, bytea, text[], text,"
    " json, bigint[], text, boolean)": ("worker", "producer"),
    "enqueue_v2(text, json, text, integer, integer, integer, timestamptz, interval, text[], json, bytea, text[], text,"
    " json, bigint[], text, text, text, timestamptz, boolean)": ("worker", "producer"),
    "enqueue_many_v1(text[], smallint[], text[], text[], smallint[], integer[], text[], text[], text[],"
    " double precision[], bytea[], text[], text[], text[], text[], boolean)": ("worker", "producer"),
    "enqueue_many_v2(text[], smallint[], text[], text[], smallint[], integer[], text[], text[], text[],"
    " double precision[], bytea[], text[], text[], text[], text[], text[], text[], text[], boolean)": (
        "worker",
        "producer",
    ),
    "holder_v1(bytea)": ("worker", "producer"),
}
"""The functions that act with the owner's rights, and who may call them."""

_ALL = ("SELECT", "INSERT", "UPDATE", "DELETE")

# Nothing in the ring is ever changed, and prune_v1 alone empties it. A wrong frontier hides jobs, and a fence that is
# taken back lets a stale worker write.
_WORKER_TABLES: Mapping[str, tuple[str, ...]] = dict.fromkeys(SEGMENTED, ("SELECT", "INSERT")) | {
    "gone_runtimes": ("SELECT", "INSERT"),
    "ring": ("SELECT", "UPDATE"),
    "frontiers": ("SELECT",),
    "schema_migrations": ("SELECT",),
}
"""What a worker may do to these; on all other tables it has ``_ALL``."""

_JOB_COLUMNS = (
    *("id", "queue", "priority", "kind", "args", "metadata", "tags", "max_attempts", "timeout_ms"),
    *("concurrency_key", "ordering_key", "unique_key", "expires_at", "follow_ups"),
)

# Not xid, slot, attempt or history: an entry that lies about these stops its queue, or pretends to have run.
_PRODUCER_TABLES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "jobs": {"INSERT": ("entry_id", "lane", *_JOB_COLUMNS), "SELECT": ("id", "queue")},
    "waiting_jobs": {"INSERT": ("run_at", *_JOB_COLUMNS)},
}
"""Table -> privilege -> columns. It reads back the number of what it has inserted, and whom to wake for it."""

_PRODUCER_SEQUENCES: Mapping[str, tuple[str, ...]] = {"entry_id_seq": ("USAGE",), "ring_seq": ("SELECT",)}
"""Of the ring's nobody has USAGE: the slot is read, and only rotate_v1 turns it."""


def parse_grants(texts: Sequence[str]) -> list[tuple[Part, str]]:
    """Read ``PART=ROLE`` pairs, several of them in one text with commas.

    Raises:
        ConfigError: One is no such pair, or names no part or no role.
    """
    found: list[tuple[Part, str]] = []
    for pair in (pair.strip() for text in texts for pair in text.split(",")):
        name, equals, role = pair.partition("=")
        part = next((part for part in PARTS if part == name.strip()), None)
        role = role.strip()
        if name.strip() == "owner":
            raise ConfigError(
                f"--grants has {mask(repr(pair))}: the owner, who runs `awa migrate`, needs no grant; leave it out"
            )
        if part is None or not equals or not role:
            raise ConfigError(
                f"--grants has {mask(repr(pair))}: give pairs such as worker=app_worker; parts: {', '.join(PARTS)}"
            )
        if role == "public" or "\0" in role or not role.isprintable():
            raise ConfigError(
                f"--grants has {mask(repr(pair))}: give the name of a role of its own, in printable characters"
            )
        if (part, role) not in found:
            found.append((part, role))
    if not found:
        raise ConfigError("--grants names nobody: give pairs such as worker=app_worker,producer=app_web")
    return found


def render_grants(schema: Schema, grants: Sequence[tuple[Part, str]]) -> str:
    """A script for psql that gives each role what its part needs, in one transaction; to run it twice does no harm."""
    roles = ", ".join(sql_literal(role) for role in dict.fromkeys(role for _, role in grants))
    text = schema.sql(_HEAD) + _do(schema.sql(_PREPARE).replace("{roles}", roles))
    for part, role in grants:
        statements = schema.sql("".join(f"{statement};\n" for statement in _statements(part)))
        text += f"\n-- {part}\n" + statements.replace("{role}", sql_identifier(role))
    return text + "COMMIT;\n"


_HEAD = """\
-- Rights on the schema "awa". Run it with psql as the owner of the schema's tables, again after every migration: tables
-- and functions that are new have no grants yet. It takes nothing away from a role but what a worker must not have.
\\set ON_ERROR_STOP on
BEGIN;
SET LOCAL standard_conforming_strings = on;
SET LOCAL search_path = pg_catalog;
REVOKE ALL ON SCHEMA "awa" FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA "awa" FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA "awa" FROM PUBLIC;
"""

# An owner that is a worker too would lose rights to the narrowing. What acts with its caller's rights is for everybody;
# that is PostgreSQL's default, which may have been altered.
_PREPARE = """
DECLARE
    v_role text;
    v_function regprocedure;
BEGIN
    FOREACH v_role IN ARRAY ARRAY[{roles}] LOOP
        IF to_regrole(quote_ident(v_role)) IS NULL THEN
            RAISE EXCEPTION 'there is no role %: create it first', quote_ident(v_role);
        END IF;
        IF EXISTS (SELECT FROM pg_class c
                    WHERE c.relnamespace = '"awa"'::regnamespace AND c.relowner = to_regrole(quote_ident(v_role))) THEN
            RAISE EXCEPTION 'role % owns tables of this schema and needs no grant: give the part to another role',
                            quote_ident(v_role);
        END IF;
        FOR v_function IN SELECT p.oid FROM pg_proc p
                           WHERE p.pronamespace = '"awa"'::regnamespace AND NOT p.prosecdef LOOP
            EXECUTE format('GRANT EXECUTE ON ROUTINE %s TO %I', v_function, v_role);
        END LOOP;
    END LOOP;
END """


def _statements(part: Part) -> Iterator[str]:
    """The statements for ``{role}``, written for the schema ``awa``."""
    yield 'GRANT USAGE ON SCHEMA "awa" TO {role}'
    match part:
        case "worker":
            yield f'GRANT {", ".join(_ALL)} ON ALL TABLES IN SCHEMA "awa" TO {{role}}'
            for table, privileges in _WORKER_TABLES.items():
                surplus = ", ".join(privilege for privilege in _ALL if privilege not in privileges)
                yield f"REVOKE {surplus} ON {_with_slots(table)} FROM {{role}}"
            yield 'GRANT USAGE, SELECT ON ALL SEQUENCES IN SCHEMA "awa" TO {role}'
            yield "REVOKE USAGE ON SEQUENCE awa.ring_seq FROM {role}"
        case "producer":
            for table, columns in _PRODUCER_TABLES.items():
                rights = ", ".join(f"{privilege} ({', '.join(names)})" for privilege, names in columns.items())
                yield f"GRANT {rights} ON awa.{table} TO {{role}}"
            for sequence, privileges in _PRODUCER_SEQUENCES.items():
                yield f"GRANT {', '.join(privileges)} ON SEQUENCE awa.{sequence} TO {{role}}"
        case "reader":
            yield 'GRANT SELECT ON ALL TABLES IN SCHEMA "awa" TO {role}'
            yield 'GRANT SELECT ON ALL SEQUENCES IN SCHEMA "awa" TO {role}'
    for function, parts in OWNERS_FUNCTIONS.items():
        if part in parts:
            yield f"GRANT EXECUTE ON FUNCTION awa.{function} TO {{role}}"


def _with_slots(table: str) -> str:
    names = [table] + [f"{table}_{slot}" for slot in range(8) if table in SEGMENTED]
    return ", ".join(f"awa.{name}" for name in names)


def sql_identifier(name: str) -> str:
    """*name* as a script for psql writes it."""
    return '"' + name.replace('"', '""') + '"'


def sql_literal(text: str) -> str:
    """*text* as a script for psql writes it."""
    return "'" + text.replace("'", "''") + "'"


def _do(body: str) -> str:
    # a role's name may hold anything, so the body is quoted by its own rule unless $$ will do
    return f"DO $${body}$$;\n" if "$" not in body else f"DO {sql_literal(body)};\n"


# --- what is missing


# By their oids: without USAGE of the schema no name in it can be looked up.
MISSING = """
    SELECT 'schema', '"awa"', 'USAGE'
     WHERE NOT has_schema_privilege('"awa"'::regnamespace, 'USAGE')
     UNION ALL
    SELECT 'table', c.relname, p.privilege
      FROM pg_class c
     CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS p(privilege)
     WHERE c.relnamespace = '"awa"'::regnamespace
       AND (c.relkind IN ('r', 'p') OR (c.relkind = 'v' AND p.privilege = 'SELECT'))
       AND NOT coalesce(%(surplus)s::jsonb -> regexp_replace(c.relname, '_[0-7]$', '') ? p.privilege, false)
       AND NOT has_table_privilege(c.oid, p.privilege)
     UNION ALL
    SELECT 'sequence', c.relname, p.privilege
      FROM pg_class c
     CROSS JOIN unnest(ARRAY['USAGE', 'SELECT']) AS p(privilege)
     WHERE c.relnamespace = '"awa"'::regnamespace AND c.relkind = 'S'
       AND NOT (c.relname = 'ring_seq' AND p.privilege = 'USAGE')
       AND NOT has_sequence_privilege(c.oid, p.privilege)
     UNION ALL
    SELECT 'function', f.proname, 'EXECUTE'
      FROM pg_proc f
     WHERE f.pronamespace = '"awa"'::regnamespace AND NOT has_function_privilege(f.oid, 'EXECUTE')
     ORDER BY 1, 2, 3
"""


Missing = tuple[str, str, str]
"""A kind of object, its name, and the privilege on it that a role lacks."""


def _missing_to_worker(conn: Connection[Any], schema: Schema) -> list[Missing]:
    surplus = {table: [one for one in _ALL if one not in privileges] for table, privileges in _WORKER_TABLES.items()}
    with Cursor(conn, row_factory=tuple_row) as cursor:
        found = cursor.execute(schema.sql(MISSING), {"surplus": orjson.dumps(surplus).decode()}).fetchall()
    return [(kind, name.strip('"'), privilege) for kind, name, privilege in found]


def check_worker(conn: Connection[Any], schema: Schema) -> None:
    """Return when the role of *conn* has every right that a worker needs. One query.

    Raises:
        PermissionDenied: It lacks some; the message names the first ones.
    """
    missing = _missing_to_worker(conn, schema)
    if not missing:
        return
    kind, name, privilege = missing[0]
    raise PermissionDenied(
        f"role {conn.info.user!r} cannot work in schema {schema.name!r}, it lacks {show_missing(missing)}:"
        f" {_advice(schema, 'worker', conn.info.user)}",
        role=conn.info.user,
        object=f"{kind} {name}",
        privilege=privilege,
    )


def show_missing(missing: Sequence[Missing]) -> str:
    """The first five of them, and how many more there are."""
    return listed((f"{privilege} on {kind} {name}" for kind, name, privilege in missing), 5)


# A role that lacks a few rights of its part still has most of them.
RIGHTS = """
    SELECT coalesce(bool_or(pg_has_role(c.relowner, 'USAGE')), false),
           2 * count(*) FILTER (WHERE has_table_privilege(c.oid, 'INSERT')) > count(*),
           2 * count(*) FILTER (WHERE has_table_privilege(c.oid, 'SELECT')) > count(*),
           coalesce(bool_or(has_any_column_privilege(c.oid, 'INSERT')), false)
      FROM pg_class c
     WHERE c.relnamespace = '"awa"'::regnamespace AND c.relkind IN ('r', 'p')
"""

MISSING_TO_READER = """
    SELECT 'schema', %(schema)s, 'USAGE' WHERE NOT has_schema_privilege('"awa"'::regnamespace, 'USAGE')
     UNION ALL
    SELECT CASE c.relkind WHEN 'S' THEN 'sequence' ELSE 'table' END, c.relname, 'SELECT'
      FROM pg_class c
     WHERE c.relnamespace = '"awa"'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'S')
       AND NOT CASE c.relkind WHEN 'S' THEN has_sequence_privilege(c.oid, 'SELECT')
                    ELSE has_table_privilege(c.oid, 'SELECT') END
     ORDER BY 1, 2
"""

MISSING_TO_PRODUCER = """
    SELECT 'schema', %(schema)s, 'USAGE' WHERE NOT has_schema_privilege('"awa"'::regnamespace, 'USAGE')
     UNION ALL
    SELECT 'table', c.relname, p.privilege || ' (' || a.attname || ')'
      FROM jsonb_to_recordset(%(columns)s::jsonb) AS p("table" text, privilege text, "column" text)
      JOIN pg_class c ON c.relnamespace = '"awa"'::regnamespace AND c.relname = p."table"
      JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = p."column"
     WHERE NOT has_column_privilege(c.oid, a.attnum, p.privilege)
     UNION ALL
    SELECT 'function', f.proname, 'EXECUTE'
      FROM pg_proc f
     WHERE f.pronamespace = '"awa"'::regnamespace AND f.proname = ANY (%(functions)s)
       AND NOT has_function_privilege(f.oid, 'EXECUTE')
     ORDER BY 1, 2, 3
"""


def find_rights(conn: Connection[Any], schema: Schema) -> tuple[Part | Literal["owner"] | None, list[Missing]]:
    """The part that the role of *conn* seems to have, by most of the rights that it has, and what it lacks for that.

    None: it has no right that matters.
    """
    with Cursor(conn, row_factory=tuple_row) as cursor:
        row = cursor.execute(schema.sql(RIGHTS)).fetchone()
        assert row is not None
        is_owner, may_write, may_read, may_insert = row
        if is_owner:
            return "owner", []
        if may_write:
            return "worker", _missing_to_worker(conn, schema)
        if may_read:
            return "reader", cursor.execute(schema.sql(MISSING_TO_READER), {"schema": schema.name}).fetchall()
        if not may_insert:
            return None, []
        columns = [
            {"table": table, "privilege": privilege, "column": name}
            for table, rights in _PRODUCER_TABLES.items()
            for privilege, names in rights.items()
            for name in names
        ]
        functions = [text.partition("(")[0] for text, parts in OWNERS_FUNCTIONS.items() if "producer" in parts]
        params = {"schema": schema.name, "columns": orjson.dumps(columns).decode(), "functions": functions}
        return "producer", cursor.execute(schema.sql(MISSING_TO_PRODUCER), params).fetchall()


def grants_command(schema: Schema, part: Part, role: str) -> str:
    """What the schema's owner types to give *role* the rights of *part*."""
    return f"{schema.command('migrate')} --grants {part}={shlex.quote(role)} | psql ..."


# --- what the server refused

_DENIED = re.compile(r"permission denied for (\w+) (.+)")


def denied(
    conn: Driver | AsyncConnection[Any], schema: Schema, part: Part | None, error: psycopg.Error
) -> PermissionDenied:
    """What *error*, which says that a right is missing, means to who needs the rights of *part*; None: of the owner.

    Sends nothing: the transaction may be broken.
    """
    role = conn.info.user
    said = (error.diag.message_primary or str(error)).strip()
    found = _DENIED.fullmatch(said)  # in English; else the server's sentence says it
    kind, name = (found[1], found[2]) if found else ("", "")
    privilege = "" if part is None else _needed(part, kind, name)
    who = "its owner" if part is None else f"a {part}"
    wants = f"; {who} needs {privilege} on it" if privilege else f"; {who} may do this"
    return PermissionDenied(
        f"role {role!r} lacks a right in schema {schema.name!r} ({said}){wants}: {_advice(schema, part, role)}",
        role=role,
        object=f"{kind} {name}".strip(),
        privilege=privilege,
    )


@contextmanager
def explaining(conn: Connection[Any], schema: Schema, part: Part | None) -> Iterator[None]:
    """Have what the server refuses for want of a right raise :class:`awa.PermissionDenied`, as :func:`denied` does."""
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        raise denied(conn, schema, part, error) from error


def _needed(part: Part, kind: str, name: str) -> str:
    match kind:
        case "schema":
            return "USAGE"
        case "function" | "procedure" | "routine":
            return "EXECUTE"
        case "sequence":
            return ", ".join(_PRODUCER_SEQUENCES.get(name, ())) if part == "producer" else "USAGE, SELECT"
        case "table":
            base = re.sub(r"_[0-7]$", "", name)
            match part:
                case "worker":
                    return ", ".join(_WORKER_TABLES.get(base, _ALL))
                case "producer":
                    return ", ".join(_PRODUCER_TABLES.get(base, ()))
            return "SELECT"
    return ""


def _advice(schema: Schema, part: Part | None, role: str) -> str:
    if part is None:
        return "run it as the role that ran `awa migrate`"
    return (
        f"have the schema's owner run `{grants_command(schema, part, role)}`, which is to be done after every migration"
    )
