"""R58: a schema of another name was forgotten in one statement or another, and two installations met.

Now one rule rewrites every statement, migrations included; channels and advisory locks carry the schema's name, and
nothing needs or uses public.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg import sql

import awa
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from tests.fixtures.jobs import StartWorker, ended, in_state


@pytest.fixture
def bare(empty_database: str) -> str:
    """A database whose public schema nobody can use, and a role without a search path."""
    with psycopg.connect(empty_database, autocommit=True) as conn:
        conn.execute("REVOKE ALL ON SCHEMA public FROM PUBLIC")
        row = conn.execute("SELECT current_database()").fetchone()
        assert row is not None
        conn.execute(sql.SQL("ALTER DATABASE {} SET search_path = ''").format(sql.Identifier(row[0])))
    return empty_database


class Installation:
    """A client of one schema, and what its jobs did."""

    def __init__(self, database: str, schema: str) -> None:
        migrate(database, Schema(schema))
        self.schema = schema
        self.database = database
        self.client = awa.Client(database, schema=schema, max_args_bytes=1_000_000)
        self.ran: list[str] = []

        @self.client.task(retry=awa.fixed(0))
        def work(what: str) -> Any:
            job = awa.current_job()
            self.ran.append(what[:20])
            match what:
                case "retry" if job.attempt == 1:
                    raise ValueError("again")
                case "complete":
                    with psycopg.connect(database) as own:
                        job.complete(own)
                case "cancel":
                    return awa.Cancel()
            return None

        self.work = work

    def insert_all(self) -> list[awa.Inserted]:
        work, client = self.work, self.client
        jobs = [client.insert(work.bind(what)) for what in ("plain", "retry", "complete", "cancel", "x" * 200_000)]
        jobs += client.insert_many([work.bind("many"), awa.NewJob(work.bind("soon"), delay=0.1)])
        with psycopg.connect(self.database) as lent:
            jobs.append(client.insert(work.bind("lent"), conn=lent))
            client.insert_many_copy([work.bind("copied")], conn=lent)
        client.insert({}, kind="unknown")
        return jobs


@pytest.mark.parametrize("schema", ["jobs", "Jobs-2", "select", "user", "žluťoučký kůň"])
def test_the_whole_surface_works_in_any_schema(bare: str, start_worker: StartWorker, schema: str) -> None:
    one = Installation(bare, schema)
    start_worker(one.client, poll_interval=30)
    jobs = one.insert_all()
    states = [ended(one.client, job).state for job in jobs]
    assert states == ["completed"] * 3 + ["cancelled"] + ["completed"] * 4
    assert sorted(set(one.ran)) == sorted(
        {"plain", "retry", "complete", "cancel", "x" * 20, "many", "soon", "lent"} | {"copied"}
    )
    one.client.close()
    with psycopg.connect(bare) as conn:
        found = conn.execute(
            """SELECT DISTINCT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                WHERE n.nspname !~ '^(pg_|information_schema)'"""
        ).fetchall()
        assert found == [(schema,)]


def test_two_in_one_database_never_meet(bare: str, start_worker: StartWorker) -> None:
    one, two = Installation(bare, "jobs"), Installation(bare, "Jobs-2")
    channels = {Schema(name).channel for name in ("jobs", "Jobs-2", "awa")}
    assert len(channels) == 3
    ours = one.insert_all()
    start_worker(one.client, poll_interval=30)
    assert all(ended(one.client, job).state in ("completed", "cancelled") for job in ours)
    theirs = two.client.insert(two.work.bind("theirs"))
    assert in_state(two.client, theirs, "available").attempt == 1
    assert two.ran == []
    # both have workers now, with equal queues, kinds and numbers of runtimes
    start_worker(two.client, poll_interval=30)
    assert ended(two.client, theirs, timeout=5).state == "completed"
    jobs = [(one, one.client.insert(one.work.bind("one"))), (two, two.client.insert(two.work.bind("two")))]
    for installation, job in jobs:
        assert ended(installation.client, job, timeout=5).state == "completed"
    assert two.ran == ["theirs", "two"]
    assert "two" not in one.ran
    for installation in (one, two):
        installation.client.close()
