"""Whether this server is the one whose transaction numbers the rows carry.

Asked whenever a worker connects: one row says in which cluster and database they hold. When it is another one, all that
is open is held against the frontiers. A physical copy passes and is recorded: its rows brought their transactions
along. A logical copy in which claims would miss jobs does not.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from psycopg import Connection
from psycopg.rows import tuple_row

from awa.errors import ConfigError, StorageNotTrusted
from awa.storage.connection import ANSWER_WITHIN, OwnConnection, connect
from awa.storage.reach import find_unreachable, whole_storage
from awa.storage.schema import Schema

log = logging.getLogger("awa.storage")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where transaction numbers mean something."""

    system_identifier: int
    """The cluster's, as ``pg_controldata`` shows it."""
    database_oid: int
    """The database's in it."""

    def __str__(self) -> str:
        return f"cluster {self.system_identifier}, database {self.database_oid}"


ORIGIN = """
    SELECT s.system_identifier, d.oid::bigint, o.system_identifier, o.database_oid::bigint
      FROM pg_control_system() s
      JOIN pg_database d ON d.datname = current_database()
      LEFT JOIN awa.origin o ON true
"""


def read_origin(conn: Connection[Any], schema: Schema) -> tuple[Origin, Origin | None]:
    """Where this is, and where the rows belong; None when nobody has recorded that yet."""
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(schema.sql(ORIGIN)).fetchone()
    assert row is not None
    return Origin(row[0], row[1]), None if row[2] is None else Origin(row[2], row[3])


# To the microsecond, no two servers start at once; a standby of this one has its own.
SERVER = "SELECT current_database(), pg_postmaster_start_time()"


def check_same_server(conn: Connection[Any], listen_url: str) -> None:
    """Return when *listen_url* leads to the database of *conn*, in the same running server.

    Raises:
        ConfigError: It leads elsewhere: to another database, or to a copy.
        DatabaseNotFound: It leads nowhere.
    """
    with connect(listen_url, name="start") as direct:
        found = [one.cursor(row_factory=tuple_row).execute(SERVER).fetchone() for one in (conn, direct)]
    if found[0] != found[1]:
        raise ConfigError(
            "listen_url leads to another database, or to another server, than the database's address: give the direct"
            " address of the same one"
        )


def connect_trusted(
    conninfo: str, schema: Schema, *, name: str, answer_within: float | None = ANSWER_WITHIN
) -> OwnConnection:
    """As :func:`awa.storage.connection.connect`, to a server whose rows are its own.

    Raises:
        StorageNotTrusted: As :func:`check_origin` does.
    """
    connection = connect(conninfo, name=name, answer_within=answer_within)
    try:
        check_origin(connection, schema)
    except BaseException:
        connection.close()
        raise
    return connection


def check_origin(conn: Connection[Any], schema: Schema) -> None:
    """Return when claims can rely on the rows; record where they are when that is new.

    One short query, unless the cluster or the database is another one than recorded: then everything is read, by one
    worker at a time.

    Raises:
        StorageNotTrusted: Claims would miss open jobs here. Nothing was changed.
    """
    here, recorded = read_origin(conn, schema)
    if here != recorded:
        _look_closely(conn, schema)


# Waited for: whoever comes second finds the answer of the first. No claim, settle or heartbeat takes it.
TAKE_TURN = "SELECT pg_advisory_xact_lock(hashtextextended('awa.origin', 0))"


def _look_closely(conn: Connection[Any], schema: Schema) -> None:
    with whole_storage(conn, schema):
        conn.execute(schema.sql(TAKE_TURN))
        here, recorded = read_origin(conn, schema)
        if here == recorded:
            return
        found = find_unreachable(conn, schema)
        if found:
            raise StorageNotTrusted(
                f"schema {schema.name!r} holds rows of another cluster, by a restore or by replication"
                f" ({_where(recorded)}; this is {here}): {'; '.join(map(str, found))}: stop every worker here and run"
                f" `{rebase_command(schema)}`",
                expected=str(recorded),
                found=str(here),
            )
        record_origin(conn, schema)
    if recorded is None:
        log.info("schema %r belongs to %s: recorded, all its open jobs are within reach", schema.name, here)
    elif recorded.system_identifier == here.system_identifier:
        log.debug("schema %r is a copy of database %d in its own cluster", schema.name, recorded.database_oid)
    else:
        log.warning(
            "schema %r came from %s to %s; all its open jobs are within reach, so work goes on",
            schema.name,
            recorded,
            here,
        )


def _where(recorded: Origin | None) -> str:
    return "nobody has recorded which" if recorded is None else f"they were made in {recorded}"


def rebase_command(schema: Schema) -> str:
    """What an operator types to mend it."""
    return schema.command("storage rebase")


RECORD_ORIGIN = """
    INSERT INTO awa.origin AS o (system_identifier, database_oid)
    SELECT s.system_identifier, d.oid
      FROM pg_control_system() s
      JOIN pg_database d ON d.datname = current_database()
        ON CONFLICT (is_only) DO UPDATE
       SET system_identifier = excluded.system_identifier, database_oid = excluded.database_oid,
           recorded_at = excluded.recorded_at
"""


def record_origin(conn: Connection[Any], schema: Schema) -> None:
    """Write down that the rows' transaction numbers are those of this cluster and database."""
    conn.execute(schema.sql(RECORD_ORIGIN))
