"""R59: names with quotes, percent signs or braces broke statements, or became part of them.

Now every value is a parameter and every identifier composed, and one rule refuses what no name can be.
"""

from __future__ import annotations

import json
import signal
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

import awa
from awa.cli import main
from awa.config import QueueSpec
from tests.fixtures.jobs import StartWorker, WorkerProcesses, count, ended

NAMES = [
    "a'; drop table x; --",
    'a"b',
    "%s",
    "%(queue)s",
    "{0}",
    "{bell}",
    "$1",
    "q-1",
    "ÄÖ",
    "a\nb\tc",
    "\\",
    "x" * 200,
]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_plain_data_on_every_path(
    client: awa.Client, start_worker: StartWorker, conn: psycopg.Connection[Any], name: str
) -> None:
    seen: list[Any] = []
    conn.execute("CREATE TABLE x (n int)")

    @client.task(kind=name, queue=name)
    def work(value: str) -> None:
        job = awa.current_job()
        seen.append((job.kind, job.queue, job.tags, job.metadata, value))

    start_worker(client, queues=[QueueSpec(name)], poll_interval=30)
    item = awa.NewJob(work.bind(name), tags=[name], metadata={name: name})
    jobs = [client.insert(item), *client.insert_many([item, work.bind(name)])]
    client.insert_many_copy([item])
    with psycopg.connect(conn.info.dsn) as lent:
        jobs.append(client.insert(item, conn=lent))
    for job in jobs:
        info = ended(client, job, timeout=5)
        assert (info.state, info.kind, info.queue) == ("completed", name, name)
    tagged = (name, name, (name,), {name: name}, name)
    assert seen.count(tagged) + seen.count((name, name, (), {}, name)) == len(seen)
    assert count(conn, "SELECT count(*) FROM x") == 0


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 201, "\ud800"])
def test_what_no_name_can_be_is_refused_before_any_sql(name: str) -> None:
    nowhere = awa.Client("host=/nonexistent dbname=x")
    for option in ("kind", "queue"):
        with pytest.raises(awa.ValidationError) as caught:
            nowhere.insert({}, **({"kind": "k"} | {option: name}))  # type: ignore[arg-type]
        assert caught.value.path == option
    for schema in ("a'b", 'a"b', "a$b", "a%b", "pg_x", "", "x" * 64, "a;b"):
        with pytest.raises(awa.ConfigError):
            awa.Client("dbname=x", schema=schema)


APP = """
import awa

client = awa.Client()

def declare(name: str) -> None:
    @client.task(kind=name, queue=name)
    def work(value: str) -> None:
        if awa.current_job().queue != value:
            raise awa.TerminalError("not as it was inserted")

for name in {names!r}:
    declare(name)
"""

MORE = [*NAMES, " padded\t", "a,b", "a:b", "\u202e", "e\u0301", "-x", "--help"]


def test_any_name_is_plain_data_on_the_command_line_and_to_operators(
    client: awa.Client, processes: WorkerProcesses, conn: psycopg.Connection[Any]
) -> None:
    """Guard: a name on the command line is taken as it is; without it one that begins or ends with a blank served the
    queue of another name. What operators give is bound, never put into a statement."""
    conn.execute("CREATE TABLE x (n int)")
    processes.module(APP.format(names=MORE))
    jobs = {name: client.insert({"value": name}, kind=name, queue=name, tags=[name]) for name in MORE}
    waiting = {name: client.insert({"value": name}, kind=name, queue="nobody " + name[:100]) for name in MORE}
    for name, job in waiting.items():
        assert client.admin.move(job.id, name).happened == "moved"
        page = client.admin.list_jobs("available", queue=name, kind=name)
        assert {one.id for one in page.jobs} == {job.id, jobs[name].id}
        assert client.admin.queue_counts(name)[name][awa.JobState.AVAILABLE].value == 2
        assert client.cancel(job.id, reason=name).happened == "cancelled"
        error = client.get(job.id).error
        assert error is not None and error["text"] == name
    process = processes.start("app:client", *[f"--queue={name}" for name in MORE])
    for name, job in jobs.items():
        info = ended(client, job, timeout=30)
        assert (info.state, info.kind, info.queue, info.tags) == ("completed", name, name, [name])
    checked = CliRunner().invoke(main, ["storage", "status", "--json", "--database", conn.info.dsn])
    assert checked.exit_code == 0 and len(json.loads(checked.stdout)["slots"]) == 8
    process.signal(signal.SIGTERM)
    assert process.wait(30) == 0, process.stderr
    assert count(conn, "SELECT count(*) FROM x") == 0


def test_commands_refuse_what_no_name_can_be_before_they_look_for_a_database(processes: WorkerProcesses) -> None:
    """Guard: settings are checked before anything is imported or connected to. No server is at this address."""
    nowhere = "host=/nonexistent dbname=x"
    for schema in ("a'b", 'a"b', "a;b", "pg_x", "x" * 64):
        for command in (["migrate"], ["storage", "check"], ["storage", "status"]):
            done = CliRunner().invoke(main, [*command, "--schema", schema, "--database", nowhere])
            assert done.exit_code == 78, done.output
            assert "schema is" in done.stderr and "give a name of 1 to 63 bytes" in done.stderr
    processes.module("raise SystemExit('imported')")
    for option in (["--queue", "x" * 201], ["--queue", ""], ["--schema", "a'b"]):
        process = processes.start("app:client", *option, "--database", nowhere)
        assert process.wait(30) == 78, process.stderr
        assert "imported" not in process.stderr and "give" in process.stderr
