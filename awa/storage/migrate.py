"""Applies the files of ``migrations/`` to a schema and reports which version it is at.

Each migration is one transaction: take the schema's migration lock, read what is applied, run the next file, record
its number and checksum. The lock is advisory, belongs to that transaction and is only ever *tried*, so any number of
starters may race, through a transaction pooler too; one that is killed leaves nothing behind, and one that waits
holds nothing. Table locks are waited for briefly, then the whole step stands back and tries again later, because
whoever queues behind a waiting ``ALTER TABLE`` waits as well.

A file that refuses transactions (``-- awa: no transaction`` on line one) runs on a second connection while the first
holds the lock. If its starter is killed the statement may run on in the server, and it is run again later.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from importlib import resources
from typing import Any

import psycopg
from blake3 import blake3
from psycopg import errors
from psycopg.rows import class_row, tuple_row

from awa.errors import AwaError, ConfigError, SchemaNotMigrated, SchemaTooNew, StorageNotTrusted
from awa.storage.connection import connect
from awa.storage.schema import Schema

OLDEST_SUPPORTED = 30
"""The oldest schema version this code runs on. Raise it together with the first statement that needs a newer one."""

LOCK_TIMEOUT = 0.5
"""Seconds that one try waits for a table lock, which is also the longest that a busy queue stands behind it."""

_PATIENCE = 300.0
_LOOK_AGAIN = 0.05
_FILE_NAME = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
_NO_TRANSACTION = "-- awa: no transaction"


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of ``migrations/``."""

    number: int
    """The schema's version once it is applied; counts from 1."""
    name: str
    """What it does, as the file's name says: ``add_queue_pause``."""
    sql: str
    """The text of the file, written for a schema called ``awa``."""
    checksum: str
    """BLAKE3 of that text in UTF-8, 64 lower-case hex digits."""
    transactional: bool
    """Whether it runs in a transaction; if not, the file holds a single statement."""

    @classmethod
    def from_file(cls, file_name: str, text: str) -> Migration:
        """The migration that a file called *file_name* with the content *text* describes.

        Raises:
            ConfigError: The name is not ``NNNN_name.sql``.
        """
        match = _FILE_NAME.fullmatch(file_name)
        if match is None:
            raise ConfigError(f"migration file {file_name!r}: name it NNNN_what_it_does.sql, in lower case")
        first_line = text.partition("\n")[0].rstrip()
        return cls(int(match[1]), match[2], text, blake3(text.encode()).hexdigest(), first_line != _NO_TRANSACTION)

    @property
    def file_name(self) -> str:
        return f"{self.number:04}_{self.name}.sql"


@dataclass(frozen=True, slots=True)
class Applied:
    """One row of ``awa.schema_migrations``."""

    version: int
    """The migration's number."""
    name: str
    """Its name when it was applied."""
    checksum: str
    """Its checksum when it was applied."""
    applied_at: datetime
    """When its transaction began."""


@dataclass(frozen=True, slots=True)
class Status:
    """Where a schema stands, beside what this awa ships."""

    current: int
    """The highest number applied; 0 before the first."""
    latest: int
    """The highest number this awa ships."""
    oldest_supported: int
    """The lowest version this awa runs on."""
    applied: tuple[Applied, ...]
    """What is recorded, in order."""
    pending: tuple[Migration, ...]
    """What ``migrate`` would apply, in order."""
    changed: tuple[Migration, ...]
    """What is recorded with a checksum other than its file's; never so for released files."""

    @property
    def is_current(self) -> bool:
        """Nothing is pending, changed, or newer than this awa."""
        return self.current == self.latest and not self.pending and not self.changed


@cache
def load_migrations() -> tuple[Migration, ...]:
    """The migrations this awa ships, in order.

    Raises:
        AwaError: The installation is damaged: files are missing or two share a number.
    """
    folder = resources.files("awa._migrations")
    files = [file for file in folder.iterdir() if file.name.endswith(".sql")]
    migrations = sorted(
        (Migration.from_file(file.name, file.read_text(encoding="utf-8")) for file in files),
        key=lambda migration: migration.number,
    )
    numbers = [migration.number for migration in migrations]
    if not numbers or numbers != list(range(1, len(numbers) + 1)):
        raise AwaError(f"this installation of awa is damaged (its migrations are {numbers}): reinstall awa-queue")
    return tuple(migrations)


def latest_version() -> int:
    """The schema version that the shipped migrations lead to."""
    return load_migrations()[-1].number


def migrate(
    database: psycopg.Connection[Any] | str,
    schema: Schema,
    *,
    migrations: Sequence[Migration] | None = None,
    lock_timeout: float = LOCK_TIMEOUT,
    patience: float = _PATIENCE,
) -> list[Migration]:
    """Bring *schema* to the newest version; create it when it is missing.

    Safe from any number of processes at once. A step that fails leaves the steps before it applied and itself undone.

    Args:
        database: A connection outside a transaction, or the address to open one.
        migrations: What to apply instead of the shipped files, in order of their numbers.
        lock_timeout: Seconds that one try waits for a table lock before it stands back.
        patience: Seconds to go on trying while others hold the tables or the migration lock.

    Returns:
        The migrations that this call applied, in order; none when another starter was faster or all was done.

    Raises:
        SchemaTooNew: Versions are recorded that *migrations* does not have. Nothing was changed.
        StorageNotTrusted: A migration is recorded with another checksum. Nothing was changed.
        AwaError: *patience* ran out.
        ConfigError: *lock_timeout* is under a millisecond, or the connection is inside a transaction.
    """
    if not lock_timeout >= 0.001:
        raise ConfigError(f"lock_timeout is {lock_timeout!r}: give seconds, at least 0.001")
    if isinstance(database, str):
        with connect(database, name="migrate", answer_within=None) as conn:
            return migrate(conn, schema, migrations=migrations, lock_timeout=lock_timeout, patience=patience)
    if database.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
        raise ConfigError("migrate commits each step by itself: give it a connection that is not in a transaction")

    shipped = load_migrations() if migrations is None else tuple(migrations)
    done: list[Migration] = []
    give_up_at = time.monotonic() + patience
    while True:
        try:
            migration = _apply_next(database, schema, shipped, lock_timeout)
        except (_AnotherStarter, errors.LockNotAvailable, errors.DeadlockDetected) as error:
            if time.monotonic() >= give_up_at:
                raise AwaError(
                    f"schema {schema.name!r} was not migrated within {patience:g} s, others hold its locks ({error}):"
                    " find them in pg_stat_activity and pg_locks, then run `awa migrate` again"
                ) from error
            pause = _LOOK_AGAIN if isinstance(error, _AnotherStarter) else lock_timeout
            time.sleep(pause * random.uniform(1.0, 2.0))
            continue
        if migration is None:
            return done
        done.append(migration)


def status(conn: psycopg.Connection[Any], schema: Schema, *, migrations: Sequence[Migration] | None = None) -> Status:
    """What is applied to *schema* and what is pending. Changes nothing, raises for no version."""
    shipped = load_migrations() if migrations is None else tuple(migrations)
    applied = _read_applied(conn, schema)
    return Status(
        current=max(applied, default=0),
        latest=shipped[-1].number,
        oldest_supported=OLDEST_SUPPORTED,
        applied=tuple(applied.values()),
        pending=tuple(migration for migration in shipped if migration.number not in applied),
        changed=tuple(migration for migration in shipped if _is_changed(migration, applied)),
    )


def check_schema(
    conn: psycopg.Connection[Any],
    schema: Schema,
    *,
    oldest: int = OLDEST_SUPPORTED,
    latest: int | None = None,
) -> int:
    """The version of *schema*, once it is known that this awa can work with it. Changes nothing.

    Raises:
        SchemaNotMigrated: It is missing or older than *oldest*.
        SchemaTooNew: It is newer than *latest*, by default the newest shipped.
    """
    if latest is None:
        latest = latest_version()
    found = max(_read_applied(conn, schema), default=0)
    if found < oldest:
        state = f"is at version {found}" if found else "is not migrated"
        raise SchemaNotMigrated(
            f"schema {schema.name!r} {state}, this awa supports {_range(oldest, latest)}: run"
            f" `{schema.command('migrate')}`",
            expected=latest,
            found=found,
        )
    if found > latest:
        raise _too_new(schema, found, oldest, latest)
    return found


def render_sql(schema: Schema, from_version: int = 0, *, migrations: Sequence[Migration] | None = None) -> str:
    """A script for psql that does what ``migrate`` does to a schema at *from_version*.

    Every step checks that the one before it is recorded, so a script that is run twice, or after a failure, stops
    without harm.

    Raises:
        ConfigError: *from_version* is below 0 or above the newest.
    """
    shipped = load_migrations() if migrations is None else tuple(migrations)
    latest = shipped[-1].number
    if not 0 <= from_version <= latest:
        raise ConfigError(f"--from is {from_version}: give the schema's version, {_range(0, latest)}")
    steps = [_render_step(migration) for migration in shipped if migration.number > from_version]
    return schema.sql(_SCRIPT_HEAD.format(first=from_version, last=latest) + "".join(steps))


class _AnotherStarter(Exception):
    def __init__(self) -> None:
        super().__init__("another starter is migrating")


def _apply_next(
    conn: psycopg.Connection[Any], schema: Schema, migrations: Sequence[Migration], lock_timeout: float
) -> Migration | None:
    """Apply the first pending migration in a transaction of its own; None when there is none."""
    with conn.transaction(), conn.cursor(row_factory=tuple_row) as cursor:
        cursor.execute(_settings(lock_timeout), prepare=False)
        if not _pending(schema, migrations, _read_applied(conn, schema)):
            return None  # an up-to-date schema needs no lock, and no right to change it
        cursor.execute(schema.sql(TRY_LOCK), prepare=False)
        if cursor.fetchone() != (True,):
            raise _AnotherStarter
        # Read again: what was pending before the lock may be applied by now.
        pending = _pending(schema, migrations, _read_applied(conn, schema))
        if not pending:
            return None
        migration = pending[0]
        cursor.execute(schema.sql(CREATE_BOOKS), prepare=False)
        try:
            _run(conn, schema, migration)
        except psycopg.Error as error:
            error.add_note(f"while applying {migration.file_name} to schema {schema.name!r}")
            raise
        cursor.execute(
            schema.sql(RECORD),
            {"version": migration.number, "name": migration.name, "checksum": migration.checksum},
            prepare=False,
        )
    return migration


def _run(conn: psycopg.Connection[Any], schema: Schema, migration: Migration) -> None:
    # Without parameters the whole file is one message; its % signs mean nothing.
    sql = schema.sql(migration.sql)
    if migration.transactional:
        conn.execute(sql, prepare=False)
        return
    # No lock_timeout here: an interrupted CREATE INDEX CONCURRENTLY leaves an invalid index, and it blocks no writer.
    with psycopg.connect(conn.info.dsn, password=conn.info.password, autocommit=True) as second:
        second.execute(sql, prepare=False)


def _pending(schema: Schema, migrations: Sequence[Migration], applied: Mapping[int, Applied]) -> list[Migration]:
    latest = migrations[-1].number
    if (found := max(applied, default=0)) > latest:
        raise _too_new(schema, found, OLDEST_SUPPORTED, latest)
    for migration in migrations:
        if _is_changed(migration, applied):
            recorded = applied[migration.number].checksum
            raise StorageNotTrusted(
                f"{migration.file_name} was applied to schema {schema.name!r} with checksum {recorded[:12]}, the file"
                f" has {migration.checksum[:12]}: put the released file back (reinstall awa-queue) and make the change"
                " in a new migration",
                expected=migration.checksum,
                found=recorded,
            )
    return [migration for migration in migrations if migration.number not in applied]


def _is_changed(migration: Migration, applied: Mapping[int, Applied]) -> bool:
    row = applied.get(migration.number)
    return row is not None and row.checksum != migration.checksum


def _too_new(schema: Schema, found: int, oldest: int, latest: int) -> SchemaTooNew:
    return SchemaTooNew(
        f"schema {schema.name!r} is at version {found}, this awa supports {_range(oldest, latest)}:"
        " upgrade awa-queue here to the release that migrated it",
        expected=latest,
        found=found,
    )


def _range(first: int, last: int) -> str:
    return f"version {last}" if first == last else f"versions {first} to {last}"


# Not to_regclass: once it has found nothing, it may go on to within the transaction, although another starter has made
# the table by now and the lock was got.
HAS_BOOKS = """
    SELECT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                    WHERE n.nspname = %(schema)s AND c.relname = 'schema_migrations')
"""

APPLIED = """
    SELECT version, name, checksum, applied_at
      FROM awa.schema_migrations
     ORDER BY version
"""


def _read_applied(conn: psycopg.Connection[Any], schema: Schema) -> dict[int, Applied]:
    with conn.cursor(row_factory=tuple_row) as cursor:
        cursor.execute(HAS_BOOKS, {"schema": schema.name}, prepare=False)
        if cursor.fetchone() != (True,):
            return {}
    with conn.cursor(row_factory=class_row(Applied)) as rows:
        try:
            rows.execute(schema.sql(APPLIED), prepare=False)
        except errors.UndefinedColumn as error:
            raise ConfigError(
                f"schema {schema.name!r} holds a table schema_migrations that is not awa's:"
                " set --schema or AWA_SCHEMA to a schema of awa's own"
            ) from error
        return {row.version: row for row in rows}


TRY_LOCK = "SELECT pg_try_advisory_xact_lock(hashtextextended('awa.migrate', 0))"

# Looks before it creates: IF NOT EXISTS asks for the right to create even when there is nothing to do.
CREATE_BOOKS = """\
DO $$ BEGIN
    IF to_regnamespace('"awa"') IS NULL THEN
        CREATE SCHEMA "awa";
    END IF;
    IF to_regclass('awa.schema_migrations') IS NULL THEN
        CREATE TABLE awa.schema_migrations (
            version integer PRIMARY KEY,
            name text NOT NULL,
            checksum text NOT NULL,
            applied_at timestamptz NOT NULL DEFAULT now()
        );
    END IF;
END $$;
"""

RECORD = """
    INSERT INTO awa.schema_migrations (version, name, checksum)
    VALUES (%(version)s, %(name)s, %(checksum)s)
"""


def _settings(lock_timeout: float) -> str:
    """What every step sets for its own transaction, whatever the role's defaults are."""
    # search_path: a name without a schema fails (pg_catalog refuses it) rather than land in public.
    # client_connection_check_interval: the server notices within a second that a starter was killed, also in the
    # middle of a statement. Some platforms and versions do not have it.
    return f"""\
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET LOCAL search_path = pg_catalog;
SET LOCAL lock_timeout = {round(lock_timeout * 1000)};
SET LOCAL statement_timeout = 0;
SET LOCAL idle_in_transaction_session_timeout = 0;
DO $$ BEGIN
    PERFORM set_config('client_connection_check_interval', '1s', true);
EXCEPTION WHEN OTHERS THEN
    NULL;
END $$;
"""


_SCRIPT_HEAD = """\
-- Takes the schema "awa" from version {first} to version {last}. Run it with psql.
\\set ON_ERROR_STOP on
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
"""

# Only the script needs this: the runner reads what is applied.
_CHECK_PREVIOUS = """\
DO $$ BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('awa.migrate', 0)) THEN
        RAISE EXCEPTION 'another starter is migrating this schema: run the script again later';
    END IF;
    IF (SELECT coalesce(max(version), 0) FROM awa.schema_migrations) <> {previous} THEN
        RAISE EXCEPTION 'the schema is not at version {previous}: print the steps it needs with --sql --from VERSION';
    END IF;
END $$;
"""


def _render_step(migration: Migration) -> str:
    previous = migration.number - 1
    check = _CHECK_PREVIOUS.format(previous=previous)
    if previous == 0:
        check = CREATE_BOOKS + check
    sql = migration.sql.rstrip() + "\n"
    begin = "BEGIN;\n" + _settings(LOCK_TIMEOUT) + check
    record = (
        "INSERT INTO awa.schema_migrations (version, name, checksum)\n"
        f"VALUES ({migration.number}, '{migration.name}', '{migration.checksum}');\nCOMMIT;\n"
    )
    title = f"\n-- {migration.file_name}\n"
    return title + (begin + sql + record if migration.transactional else check + sql + begin + record)
