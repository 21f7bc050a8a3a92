"""R58: a schema of another name was forgotten in one statement or another, and two installations met.

Now one rule rewrites every statement, migrations included; channels and advisory locks carry the schema's name, and
nothing needs or uses public.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import sql

import awa
from awa.cli import main
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, ended, in_state, worker_processes


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


APP = """
import os, signal, time
import awa

client = awa.Client()

@client.task(retry=awa.fixed(0))
def work(what: str) -> None:
    if what == "die" and awa.current_job().attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "fail":
        raise awa.TerminalError("no")
    if what == "hold":
        while not awa.current_job().cancelled:
            time.sleep(0.01)
        raise ValueError("told")
"""

SETTINGS = ("--heartbeat", "0.3", "--stale-after", "1", "--poll-interval", "5", "--completed-retention", "4")

ELSEWHERE = """
    SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname !~ '^(pg_|information_schema)' AND n.nspname <> %(schema)s
     UNION ALL
    SELECT n.nspname, p.proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
     WHERE n.nspname !~ '^(pg_|information_schema)' AND n.nspname <> %(schema)s
"""


@pytest.mark.parametrize("schema", ["Jobs-2", "select"])
def test_commands_operators_and_maintenance_work_in_any_schema(bare: str, tmp_path: Path, schema: str) -> None:
    """Guard: Schema.sql around every statement. One that is sent as it is written finds no schema awa here."""

    def command(*arguments: str) -> Any:
        done = CliRunner(env={"AWA_SCHEMA": None}).invoke(main, [*arguments, "--database", bare, "--schema", schema])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    assert command("migrate", "--json")["schema"] == schema
    assert command("migrate", "--status", "--json")["is_current"]
    client = awa.Client(bare, schema=schema)
    mentioned = Schema(schema).sql
    with worker_processes(tmp_path, bare) as processes, psycopg.connect(bare, autocommit=True) as conn:
        processes.module(APP)
        start = ("app:client", "--schema", schema, *SETTINGS, "--rotate-after", "1")
        first = processes.start(*start)
        later = client.insert({"what": "ok"}, kind="work", delay=3600)
        other = client.insert({"what": "ok"}, kind="work", queue="elsewhere")
        failed = client.insert({"what": "fail"}, kind="work")
        held = client.insert({"what": "hold"}, kind="work")
        assert ended(client, failed, timeout=30).state == "failed"
        in_state(client, held, "running")
        assert client.cancel(held.id).happened == "requested"
        assert ended(client, held).state == "cancelled"
        assert client.cancel(later.id, reason="no").happened == "cancelled"
        assert client.admin.move(other.id, "default").happened == "moved"
        in_state(client, other, "completed")
        assert {job.id for job in client.admin.list_jobs("cancelled").jobs} == {held.id, later.id}
        assert client.admin.queue_counts("default")["default"][awa.JobState.FAILED].value == 1
        # a segment is sealed, emptied, and another begun
        gone = mentioned("SELECT count(*) FROM awa.jobs WHERE id = %s")
        wait_until(lambda: count(conn, gone, other.id) == 0, timeout=30)
        # a worker dies; the next one leads, and takes its job back
        died = client.insert({"what": "die"}, kind="work")
        assert first.wait(30) == -signal.SIGKILL
        second = processes.start(*start)
        wait_until(lambda: client.get(died.id).attempt == 2, timeout=30)
        wait_until(lambda: count(conn, mentioned("SELECT count(*) FROM awa.completions")) > 0, timeout=30)
        second.signal(signal.SIGTERM)
        assert second.wait(30) == 0, second.stderr
        assert command("storage", "check", "--json")["is_sound"]
        assert len(command("storage", "status", "--json")["slots"]) == 8
        assert command("storage", "rebase", "--yes", "--json")["schema"] == schema
        assert command("storage", "check", "--json")["is_sound"]
        assert conn.execute(ELSEWHERE, {"schema": schema}).fetchall() == []
    client.close()


def test_locks_and_notifications_of_one_are_nothing_to_the_other(bare: str, start_worker: StartWorker) -> None:
    """Guard: the schema's name in the keys of advisory locks and in the channel. Every lock that the library knows is
    held for one installation, and somebody listens to its channel, while the other does all that it does."""
    one, two = Installation(bare, "jobs"), Installation(bare, "Jobs-2")
    names = ["queue:default", "queue:other", "bell:default", "bell:other", "bell:", "ring", "migrate", "origin"]
    names += [f"runtime:{number}" for number in range(1, 10)]
    with psycopg.connect(bare, autocommit=True) as holder, psycopg.connect(bare, autocommit=True) as listener:
        for name in names:
            key = one.client._schema.sql(f"SELECT pg_advisory_lock(hashtextextended('awa.{name}', 0))")
            holder.execute(key)
        listener.execute(f"LISTEN {one.client._schema.channel}")
        assert migrate(bare, Schema("Jobs-2")) == []
        start_worker(two.client, poll_interval=30, rotate_after=0.2, completed_retention=5)
        jobs = two.insert_all()
        assert all(ended(two.client, job).state in ("completed", "cancelled") for job in jobs)
        soon = two.client.insert(two.work.bind("soon"), delay=0.1)
        assert ended(two.client, soon).state == "completed"
        later = two.client.insert(two.work.bind("later"), delay=3600)
        assert two.client.cancel(later.id).happened == "cancelled"
        turned = two.client._schema.sql("SELECT count(*) FROM awa.ring WHERE opened_at IS NOT NULL")
        wait_until(lambda: count(holder, turned) > 1, timeout=20)
        assert list(listener.notifies(timeout=0.2)) == []
        # they are the locks that the first one would take, and that is its channel
        mine = one.client.insert(one.work.bind("mine"))
        assert [note.payload for note in listener.notifies(timeout=5, stop_after=1)] == ["default"]
        claim = one.client._schema.sql("SELECT flags, claim_id FROM awa.claim_v1('default', 1, NULL, 10)")
        assert listener.execute(claim).fetchall() == [(2, None)]
        assert listener.execute(one.client._schema.sql("SELECT awa.rotate_v1()")).fetchone() == (None,)
        assert one.client.get(mine.id).state == "available"
    for installation in (one, two):
        installation.client.close()
