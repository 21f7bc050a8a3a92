"""One starter: fresh, again, step by step, refused versions, any schema, any role default."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import errors

from awa.errors import AwaError, ConfigError, SchemaNotMigrated, SchemaTooNew, StorageNotTrusted
from awa.storage.migrate import (
    OLDEST_SUPPORTED,
    Migration,
    check_schema,
    latest_version,
    load_migrations,
    migrate,
    status,
)
from awa.storage.schema import Schema
from tests.migrations.dump import dump_schema
from tests.migrations.waiting import ADVISORY_LOCKS, wait_for_rows

AWA = Schema()
FIRST = Migration.from_file("0001_one.sql", "CREATE TABLE awa.one (n int);\nINSERT INTO awa.one VALUES (1);\n")
SECOND = Migration.from_file("0002_two.sql", "ALTER TABLE awa.one ADD m int;\n")


def rows(conn: psycopg.Connection[Any], query: str) -> list[tuple[Any, ...]]:
    return conn.execute(query).fetchall()


@pytest.fixture
def conn(empty_database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(empty_database, autocommit=True) as conn:
        yield conn


@pytest.fixture
def role(conn: psycopg.Connection[Any]) -> Iterator[str]:
    """An ordinary role that may create nothing."""
    name = f"awa_test_{uuid4().hex}"
    conn.execute(f"CREATE ROLE {name}")
    yield name
    conn.execute(f"RESET ROLE; DROP OWNED BY {name} CASCADE; DROP ROLE {name}")


def test_shipped_files_are_numbered_from_one_and_plain_ascii() -> None:
    migrations = load_migrations()
    assert [migration.number for migration in migrations] == list(range(1, latest_version() + 1))
    assert OLDEST_SUPPORTED in range(1, latest_version() + 1)
    # ASCII: they must pass through any client encoding.
    assert [migration.file_name for migration in migrations if not migration.sql.isascii()] == []


def test_a_fresh_database_gets_every_migration_and_a_second_call_none(empty_database: str) -> None:
    shipped = list(load_migrations())
    assert migrate(empty_database, AWA) == shipped
    assert migrate(empty_database, AWA) == []
    with psycopg.connect(empty_database) as conn:
        assert check_schema(conn, AWA) == latest_version()
        found = status(conn, AWA)
    assert [(row.version, row.name, row.checksum) for row in found.applied] == [
        (migration.number, migration.name, migration.checksum) for migration in shipped
    ]
    assert found.is_current and found.pending == () and found.changed == ()


def test_existing_rows_survive_every_later_step(conn: psycopg.Connection[Any]) -> None:
    shipped = load_migrations()
    for last in range(1, len(shipped) + 1):
        assert migrate(conn, AWA, migrations=shipped[:last]) == [shipped[last - 1]]
        conn.execute("INSERT INTO awa.jobs (kind, args) VALUES (%s, '{\"n\": 1}')", [f"kind {last}"])
        conn.execute("INSERT INTO awa.waiting_jobs (kind, run_at) VALUES (%s, now())", [f"kind {last}"])
    expected = [(f"kind {last}",) for last in range(1, len(shipped) + 1)]
    assert rows(conn, "SELECT kind FROM awa.jobs ORDER BY entry_id") == expected
    assert rows(conn, "SELECT kind FROM awa.waiting_jobs ORDER BY id") == expected


def test_step_by_step_ends_where_one_run_ends(conn: psycopg.Connection[Any], empty_database: str) -> None:
    shipped = load_migrations()
    for last in range(1, len(shipped) + 1):
        migrate(conn, AWA, migrations=shipped[:last])
    stepwise = dump_schema(empty_database)
    conn.execute("DROP SCHEMA awa CASCADE")
    migrate(conn, AWA)
    assert dump_schema(empty_database) == stepwise


def test_a_failing_step_is_undone_and_those_before_it_stay(conn: psycopg.Connection[Any]) -> None:
    broken = Migration.from_file("0002_two.sql", "CREATE TABLE awa.two ();\nSELECT 1 / 0;\n")
    with pytest.raises(errors.DivisionByZero) as caught:
        migrate(conn, AWA, migrations=[FIRST, broken])
    assert caught.value.__notes__ == ["while applying 0002_two.sql to schema 'awa'"]
    assert rows(conn, "SELECT to_regclass('awa.two'), array_agg(version) FROM awa.schema_migrations") == [(None, [1])]
    assert migrate(conn, AWA, migrations=[FIRST, SECOND]) == [SECOND]


def test_per_cent_signs_reach_the_server_as_they_are(conn: psycopg.Connection[Any]) -> None:
    text = "DO $$ BEGIN EXECUTE format('CREATE TABLE awa.%I (n int)', '100 %(x)s %'); END $$;\n"
    migrate(conn, AWA, migrations=[Migration.from_file("0001_one.sql", text)])
    assert rows(conn, "SELECT relname FROM pg_class WHERE relnamespace = 'awa'::regnamespace AND relname ~ '100'") == [
        ("100 %(x)s %",)
    ]


def test_not_migrated_is_refused_and_nothing_is_created(conn: psycopg.Connection[Any]) -> None:
    with pytest.raises(SchemaNotMigrated, match="run `awa migrate --schema 'Jobs-2'`") as caught:
        check_schema(conn, Schema("Jobs-2"))
    assert (caught.value.expected, caught.value.found) == (latest_version(), 0)
    with pytest.raises(SchemaNotMigrated, match=r"run `awa migrate`$"):
        check_schema(conn, AWA)
    assert rows(conn, "SELECT FROM pg_namespace WHERE nspname IN ('awa', 'Jobs-2')") == []


def test_older_than_supported_is_refused_with_the_range(conn: psycopg.Connection[Any]) -> None:
    migrate(conn, AWA, migrations=[FIRST])
    assert check_schema(conn, AWA, oldest=1, latest=3) == 1
    with pytest.raises(SchemaNotMigrated, match="is at version 1, this awa supports versions 2 to 3: run") as caught:
        check_schema(conn, AWA, oldest=2, latest=3)
    assert (caught.value.expected, caught.value.found) == (3, 1)


def test_newer_than_supported_is_refused_and_nothing_changes(
    conn: psycopg.Connection[Any], empty_database: str
) -> None:
    migrate(conn, AWA, migrations=[FIRST, SECOND])
    before = dump_schema(empty_database)
    with pytest.raises(SchemaTooNew, match="is at version 2, this awa supports version 1: upgrade") as caught:
        check_schema(conn, AWA, oldest=1, latest=1)
    assert (caught.value.expected, caught.value.found) == (1, 2)
    with pytest.raises(SchemaTooNew):
        migrate(conn, AWA, migrations=[FIRST])
    assert dump_schema(empty_database) == before
    assert [row.version for row in status(conn, AWA).applied] == [1, 2]


def test_a_changed_file_is_refused_before_anything_is_applied(conn: psycopg.Connection[Any]) -> None:
    migrate(conn, AWA, migrations=[FIRST])
    changed = Migration.from_file(FIRST.file_name, FIRST.sql + "-- a word\n")
    with pytest.raises(StorageNotTrusted, match=r"0001_one\.sql .* put the released file back") as caught:
        migrate(conn, AWA, migrations=[changed, SECOND])
    assert (caught.value.expected, caught.value.found) == (changed.checksum, FIRST.checksum)
    found = status(conn, AWA, migrations=[changed, SECOND])
    assert (found.current, found.changed, found.pending, found.is_current) == (1, (changed,), (SECOND,), False)


def test_another_programs_table_of_that_name_is_refused(conn: psycopg.Connection[Any]) -> None:
    conn.execute("CREATE TABLE public.schema_migrations (version varchar PRIMARY KEY)")
    with pytest.raises(ConfigError, match="'public' holds a table schema_migrations that is not awa's"):
        migrate(conn, Schema("public"))


def test_schemas_share_a_database_and_nothing_lands_elsewhere(
    conn: psycopg.Connection[Any], empty_database: str, role: str
) -> None:
    conn.execute("REVOKE ALL ON SCHEMA public FROM public")
    conn.execute(f"GRANT CREATE ON DATABASE {conn.info.dbname} TO {role}")
    conn.execute("SET search_path = nowhere")
    conn.execute(f"SET ROLE {role}")
    schemas = [AWA, Schema("jobs"), Schema("Jobs-2"), Schema("select"), Schema("values")]
    for schema in schemas:
        migrate(conn, schema)
    conn.execute("RESET ROLE")
    dumps = {schema: dump_schema(empty_database, schema) for schema in schemas}
    for schema in set(schemas) - {Schema("jobs")}:  # that word means the table, too
        as_awa = dumps[schema].replace(schema.identifier + ".", "awa.").replace(schema.identifier + ";", "awa;")
        assert as_awa == dumps[AWA]
    assert dumps[Schema("jobs")].count("\n") == dumps[AWA].count("\n")
    elsewhere = """
        SELECT c.oid::regclass::text FROM pg_class c WHERE c.relnamespace <> ALL (%(known)s::regnamespace[]) UNION ALL
        SELECT p.oid::regprocedure::text FROM pg_proc p WHERE p.pronamespace <> ALL (%(known)s::regnamespace[])
    """
    known = [schema.identifier for schema in schemas] + ["pg_catalog", "information_schema", "pg_toast"]
    assert conn.execute(elsewhere, {"known": known}).fetchall() == []


def test_a_name_without_a_schema_fails_rather_than_land_in_public(conn: psycopg.Connection[Any]) -> None:
    careless = Migration.from_file("0001_one.sql", "CREATE TABLE lost (n int);\n")
    with pytest.raises(errors.InsufficientPrivilege):
        migrate(conn, AWA, migrations=[careless])


def test_an_existing_schema_needs_no_right_to_create_one(conn: psycopg.Connection[Any], role: str) -> None:
    conn.execute(f"CREATE SCHEMA jobs AUTHORIZATION {role}")
    conn.execute(f"SET ROLE {role}")
    assert migrate(conn, Schema("jobs")) == list(load_migrations())
    with pytest.raises(errors.InsufficientPrivilege):
        migrate(conn, Schema("other"))


@pytest.mark.parametrize("default", ["serializable", "repeatable read"])
def test_steps_run_at_read_committed_whatever_the_default_is(
    conn: psycopg.Connection[Any], empty_database: str, default: str
) -> None:
    conn.execute(f"ALTER DATABASE {conn.info.dbname} SET default_transaction_isolation = '{default}'")
    text = "CREATE TABLE awa.seen AS SELECT current_setting('transaction_isolation') AS level;\n"
    with psycopg.connect(empty_database) as other:
        other.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        migrate(other, AWA, migrations=[Migration.from_file("0001_one.sql", text)])
    assert rows(conn, "SELECT level FROM awa.seen") == [("read committed",)]
    migrate(empty_database, Schema("jobs"))


@pytest.mark.parametrize("name", ["awa", "jobs", "Jobs-2"])
def test_python_and_the_database_mean_the_same_channel(conn: psycopg.Connection[Any], name: str) -> None:
    schema = Schema(name)
    migrate(conn, schema)
    assert rows(conn, schema.sql("SELECT awa.channel()")) == [(schema.channel,)]


def test_the_settings_of_the_callers_connection_stay(conn: psycopg.Connection[Any]) -> None:
    names = "search_path", "lock_timeout", "statement_timeout", "client_connection_check_interval"
    conn.execute("SET search_path = public; SET lock_timeout = '7s'; SET statement_timeout = '70s'")
    query = "SELECT " + ", ".join(f"current_setting('{name}')" for name in names)
    before = rows(conn, query)
    migrate(conn, AWA)
    assert rows(conn, query) == before


def test_a_connection_inside_a_transaction_is_refused(conn: psycopg.Connection[Any]) -> None:
    with conn.transaction(), pytest.raises(ConfigError, match="not in a transaction"):
        migrate(conn, AWA)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_an_endless_lock_timeout_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="lock_timeout is"):
        migrate("host=/nowhere", AWA, lock_timeout=seconds)


def test_a_step_without_transaction_runs_and_is_recorded(conn: psycopg.Connection[Any]) -> None:
    text = "-- awa: no transaction\nCREATE INDEX CONCURRENTLY one_n ON awa.one (n);\n"
    index = Migration.from_file("0002_index.sql", text)
    assert not index.transactional
    assert migrate(conn, AWA, migrations=[FIRST, index]) == [FIRST, index]
    assert rows(conn, "SELECT indisvalid FROM pg_index WHERE indexrelid = 'awa.one_n'::regclass") == [(True,)]
    assert [row.version for row in status(conn, AWA, migrations=[FIRST, index]).applied] == [1, 2]


def test_a_busy_table_is_never_blocked_for_long(conn: psycopg.Connection[Any], empty_database: str) -> None:
    migrate(conn, AWA, migrations=[FIRST])
    with ThreadPoolExecutor(1) as pool, psycopg.connect(empty_database) as reader:
        reader.execute("SELECT FROM awa.one")  # holds its lock until the end of the transaction
        running = pool.submit(migrate, empty_database, AWA, migrations=[FIRST, SECOND], lock_timeout=0.1)
        conn.execute("SET statement_timeout = '20s'")
        for _ in range(2):  # ALTER TABLE waits, others read the table all the same, and it comes back
            wait_for_rows(conn, "FROM pg_locks WHERE relation = 'awa.one'::regclass AND NOT granted")
            conn.execute("SELECT FROM awa.one")
        assert not running.done()
        reader.rollback()
        assert running.result(timeout=20) == [SECOND]


def test_patience_ends_with_a_clear_error(conn: psycopg.Connection[Any], empty_database: str) -> None:
    migrate(conn, AWA, migrations=[FIRST])
    with psycopg.connect(empty_database) as reader:
        reader.execute("SELECT FROM awa.one")
        with pytest.raises(AwaError, match=r"not migrated within 0\.1 s, others hold its locks .* pg_locks"):
            migrate(conn, AWA, migrations=[FIRST, SECOND], lock_timeout=0.02, patience=0.1)
    assert migrate(conn, AWA, migrations=[FIRST, SECOND]) == [SECOND]


def test_a_cancelled_step_leaves_nothing(conn: psycopg.Connection[Any], empty_database: str) -> None:
    slow = Migration.from_file("0002_slow.sql", "CREATE TABLE awa.two ();\nSELECT pg_sleep(60);\n")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(migrate, empty_database, AWA, migrations=[FIRST, slow])
        sleeping = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
        wait_for_rows(conn, sleeping)
        conn.execute("SELECT pg_cancel_backend(pid) " + sleeping)
        with pytest.raises(errors.QueryCanceled):
            running.result(timeout=20)
    assert rows(conn, "SELECT to_regclass('awa.two'), array_agg(version) FROM awa.schema_migrations") == [(None, [1])]
    assert rows(conn, f"SELECT {ADVISORY_LOCKS}") == []
