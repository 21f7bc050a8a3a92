"""``awa migrate``: its answers, its exit codes, and the script that it prints."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg.conninfo import make_conninfo

from awa.cli import main
from awa.storage.migrate import Migration, latest_version, load_migrations, migrate, render_sql
from awa.storage.schema import Schema
from tests.migrations.dump import dump_schema, pg_program


@pytest.fixture
def conn(empty_database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(empty_database, autocommit=True) as conn:
        yield conn


def run(*arguments: str, **environment: str) -> Result:
    unset = dict.fromkeys(("AWA_SCHEMA", "AWA_DATABASE_URL", "DATABASE_URL"))
    return CliRunner(env={**unset, **environment}).invoke(main, ["migrate", *arguments])


def psql(database: str, script: str) -> subprocess.CompletedProcess[str]:
    command = [pg_program("psql"), "--no-psqlrc", "--quiet", "--dbname", database, "--file", "-"]
    return subprocess.run(command, input=script, capture_output=True, text=True, timeout=60)


def test_it_migrates_and_says_what_it_applied(empty_database: str) -> None:
    first = run("--database", empty_database)
    assert first.exit_code == 0, first.output
    assert first.stdout.splitlines() == [
        *(f"applied {migration.file_name}" for migration in load_migrations()),
        f"schema awa is at version {latest_version()}",
    ]
    second = run("--database", empty_database)
    assert second.stdout == f"schema awa is at version {latest_version()}: nothing to do\n"


def test_json_and_the_environment(empty_database: str) -> None:
    environment = {"AWA_DATABASE_URL": empty_database, "AWA_SCHEMA": "Jobs-2"}
    names = [{"version": migration.number, "name": migration.name} for migration in load_migrations()]
    assert json.loads(run("--json", **environment).stdout) == {
        "schema": "Jobs-2",
        "version": latest_version(),
        "applied": names,
    }
    found = json.loads(run("--status", "--json", **environment).stdout)
    assert [{"version": row["version"], "name": row["name"]} for row in found["applied"]] == names
    assert (found["is_current"], found["pending"], found["changed"]) == (True, [], [])
    assert json.loads(run("--json", "--schema", "other", **environment).stdout)["schema"] == "other"


def test_status_changes_nothing_and_tells_by_its_exit_code(conn: psycopg.Connection[Any], empty_database: str) -> None:
    before = run("--status", "--database", empty_database)
    assert before.exit_code == 4
    assert "schema awa is at version 0" in before.stdout and "0001 initial: pending" in before.stdout
    assert conn.execute("SELECT FROM pg_namespace WHERE nspname = 'awa'").fetchall() == []

    migrate(conn, Schema())
    after = run("--status", "--database", empty_database)
    assert after.exit_code == 0
    assert "0001 initial: applied 20" in after.stdout and "pending" not in after.stdout

    conn.execute("UPDATE awa.schema_migrations SET checksum = 'x' WHERE version = 1")
    changed = run("--status", "--database", empty_database)
    assert changed.exit_code == 4
    assert "but its file was changed" in changed.stdout
    refused = run("--database", empty_database)
    assert refused.exit_code == 4 and "put the released file back" in refused.stderr


def test_a_newer_schema_is_refused(conn: psycopg.Connection[Any], empty_database: str) -> None:
    migrate(conn, Schema())
    conn.execute("INSERT INTO awa.schema_migrations (version, name, checksum) VALUES (9999, 'later', 'x')")
    refused = run("--database", empty_database)
    assert refused.exit_code == 4
    assert "is at version 9999, this awa supports version" in refused.stderr
    shown = run("--status", "--database", empty_database)
    assert shown.exit_code == 4 and "upgrade awa-queue here" in shown.stdout


def test_missing_rights_are_one_sentence(conn: psycopg.Connection[Any], empty_database: str) -> None:
    role = f"awa_test_{uuid4().hex}"
    conn.execute(f"CREATE ROLE {role} LOGIN")
    try:
        refused = run("--database", make_conninfo(empty_database, user=role))
    finally:
        conn.execute(f"DROP ROLE {role}")
    assert refused.exit_code == 1
    assert refused.stderr.startswith(f"awa: {role} may not migrate schema 'awa' (permission denied")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--schema", "pg_jobs"], 78, "1 to 63 bytes"),
        (["--database", "host=/nowhere"], 69, "/nowhere"),
        (["--status", "--sql"], 2, "exclude each other"),
        (["--from", "1"], 2, "--from goes with --sql"),
        (["--sql", "--from", "-1"], 78, "--from is -1: give"),
        (["--sql", "--from", "9999"], 78, "--from is 9999: give"),
    ],
)
def test_what_cannot_work_is_refused(arguments: list[str], code: int, words: str) -> None:
    refused = run(*arguments)
    assert refused.exit_code == code
    assert words in refused.stderr


@pytest.mark.parametrize("name", ["awa", "Jobs-2", "select"])
def test_the_script_builds_what_the_runner_builds(
    conn: psycopg.Connection[Any], empty_database: str, name: str
) -> None:
    schema = Schema(name)
    migrate(conn, schema)
    expected = dump_schema(empty_database, schema)
    books = schema.sql("SELECT version, name, checksum FROM awa.schema_migrations ORDER BY version")
    recorded = conn.execute(books).fetchall()
    conn.execute(schema.sql('DROP SCHEMA "awa" CASCADE'))

    script = run("--sql", "--schema", name, AWA_DATABASE_URL="host=/nowhere").stdout
    assert json.loads(run("--sql", "--schema", name, "--json").stdout)["sql"] == script
    applied = psql(empty_database, script)
    assert (applied.returncode, applied.stderr) == (0, "")
    assert dump_schema(empty_database, schema) == expected
    assert conn.execute(books).fetchall() == recorded
    assert migrate(conn, schema) == []


def test_a_script_goes_on_from_a_version_and_only_from_there(
    conn: psycopg.Connection[Any], empty_database: str
) -> None:
    schema = Schema("Jobs-2")
    migrations = [
        Migration.from_file("0001_one.sql", "CREATE TABLE awa.one (n int);"),
        Migration.from_file("0002_two.sql", "ALTER TABLE awa.one ADD m int;\n"),
        Migration.from_file(
            "0003_index.sql", "-- awa: no transaction\nCREATE INDEX CONCURRENTLY one_n ON awa.one (n);\n"
        ),
    ]
    migrate(conn, schema, migrations=migrations[:1])
    script = render_sql(schema, 1, migrations=migrations)
    applied = psql(empty_database, script)
    assert (applied.returncode, applied.stderr) == (0, "")
    assert migrate(conn, schema, migrations=migrations) == []
    before = dump_schema(empty_database, schema)
    for wrong_start in (0, 1):
        refused = psql(empty_database, render_sql(schema, wrong_start, migrations=migrations))
        assert refused.returncode == 3
        assert f"the schema is not at version {wrong_start}" in refused.stderr
    assert dump_schema(empty_database, schema) == before


def test_a_script_stands_back_while_another_starter_is_at_work(
    conn: psycopg.Connection[Any], empty_database: str
) -> None:
    with conn.transaction():
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('awa.migrate', 0))")
        refused = psql(empty_database, render_sql(Schema()))
    assert refused.returncode == 3
    assert "another starter is migrating this schema" in refused.stderr
    assert conn.execute("SELECT FROM pg_namespace WHERE nspname = 'awa'").fetchall() == []
