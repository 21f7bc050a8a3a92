"""Many starters at once, and some that die half-way."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from awa.storage.migrate import latest_version, migrate, status
from awa.storage.schema import Schema
from tests.migrations.dump import dump_schema
from tests.migrations.waiting import ADVISORY_LOCKS, wait_for_rows

FILES = {
    "0001_one.sql": "CREATE TABLE awa.one (n int);\n",
    # the brake stands in public: while it has a row, the step sleeps with its work done and not committed
    "0002_two.sql": "CREATE TABLE awa.two (n int);\nSELECT pg_sleep(60) FROM public.brake;\n",
    "0003_index.sql": "-- awa: no transaction\nCREATE INDEX CONCURRENTLY one_n ON awa.one (n);\n",
    "0004_more.sql": "ALTER TABLE awa.two ADD m int;\n",
}
ASLEEP = "FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep' AND query ~ 'brake'"

Starter = subprocess.Popen[str]


class Starters:
    """Processes that migrate one database when told to."""

    def __init__(self, database: str, count: int) -> None:
        self._database = database
        self.processes: list[Starter] = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.migrations.starter"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(count)
        ]

    def begin(self, starter: Starter, schema: str, files: dict[str, str] | None) -> None:
        assert starter.stdin is not None
        request = {"database": self._database, "schema": schema, "files": files}
        starter.stdin.write(json.dumps(request) + "\n")
        starter.stdin.flush()

    def answer(self, starter: Starter) -> list[int]:
        """The versions that *starter* applied."""
        assert starter.stdout is not None
        assert select.select([starter.stdout], [], [], 30.0)[0], "no answer after 30 s"
        found: list[int] = json.loads(starter.stdout.readline())
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate(timeout=20)


@pytest.fixture
def starters(empty_database: str) -> Iterator[Starters]:
    found = Starters(empty_database, 8)
    yield found
    found.close()


@pytest.fixture
def conn(empty_database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute("CREATE TABLE public.brake (n int)")
        yield conn


def test_eight_processes_at_once_apply_each_version_once(
    conn: psycopg.Connection[Any], empty_database: str, starters: Starters
) -> None:
    migrate(conn, Schema())
    expected = dump_schema(empty_database)
    for round_number, files in enumerate([None, FILES, None, FILES]):
        schema = Schema(f"Round {round_number}")
        for starter in starters.processes:
            starters.begin(starter, schema.name, files)
        applied = [version for starter in starters.processes for version in starters.answer(starter)]
        assert sorted(applied) == list(range(1, (latest_version() if files is None else len(FILES)) + 1))
        assert [row.version for row in status(conn, schema).applied] == sorted(applied)
        if files is None:
            found = dump_schema(empty_database, schema)
            assert found.replace(f"{schema.identifier}.", "awa.").replace(f"{schema.identifier};", "awa;") == expected
    wait_for_rows(conn, ADVISORY_LOCKS, count=0)


def test_a_killed_starter_leaves_the_work_to_the_others(conn: psycopg.Connection[Any], starters: Starters) -> None:
    conn.execute("INSERT INTO public.brake VALUES (1)")
    killed, *others = starters.processes[:4]
    starters.begin(killed, "jobs", FILES)
    wait_for_rows(conn, ASLEEP)
    for starter in others:
        starters.begin(starter, "jobs", FILES)
    # They look for the lock and come back: nobody stands in a queue, nobody else holds anything.
    wait_for_rows(
        conn, "FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'awa migrate'", count=4
    )
    assert conn.execute("SELECT FROM pg_locks WHERE NOT granted").fetchall() == []
    assert len(conn.execute(f"SELECT {ADVISORY_LOCKS}").fetchall()) == 1
    assert conn.execute("SELECT version FROM jobs.schema_migrations").fetchall() == [(1,)]

    conn.execute("DELETE FROM public.brake")
    killed.send_signal(signal.SIGKILL)
    killed.wait(timeout=20)

    assert sorted(version for starter in others for version in starters.answer(starter)) == [2, 3, 4]
    assert [row.version for row in status(conn, Schema("jobs")).applied] == [1, 2, 3, 4]
    assert conn.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = 'jobs.one_n'::regclass").fetchall() == [
        (True,)
    ]
    wait_for_rows(conn, ASLEEP, count=0)
    wait_for_rows(conn, ADVISORY_LOCKS, count=0)


def test_an_interrupted_starter_undoes_its_step(conn: psycopg.Connection[Any], starters: Starters) -> None:
    conn.execute("INSERT INTO public.brake VALUES (1)")
    starter = starters.processes[0]
    starters.begin(starter, "jobs", FILES)
    wait_for_rows(conn, ASLEEP)
    starter.send_signal(signal.SIGINT)
    assert starter.wait(timeout=20) != 0
    wait_for_rows(conn, ADVISORY_LOCKS, count=0)
    assert [row.version for row in status(conn, Schema("jobs")).applied] == [1]
    assert conn.execute("SELECT to_regclass('jobs.two')").fetchall() == [(None,)]
