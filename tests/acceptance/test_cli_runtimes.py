"""``awa runtime``: what it shows of a real worker process, and what that does when it is told to be quiet."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

import awa
from awa.cli import main
from awa.cli.target import this_user
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import WorkerProcesses, ended
from tests.storage.test_runtimes import OF_BEFORE, fence, register, silent_for

Conn = psycopg.Connection[Any]
Run = Callable[..., Result]

JOBS = """
    import awa

    client = awa.Client()

    @client.task()
    def work(n: int) -> None: ...
"""


@pytest.fixture
def run(database: str) -> Run:
    """``awa runtime ...`` away from a terminal."""

    def invoke(*arguments: object) -> Result:
        return CliRunner(env={"AWA_DATABASE_URL": database}).invoke(main, ["runtime", *map(str, arguments)])

    return invoke


def answer(done: Result, code: int = 0) -> Any:
    """The document of a command with ``--json``."""
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def told(done: Result) -> dict[str, str]:
    """The lines of ``show``."""
    assert done.exit_code == 0, done.output
    return dict(re.findall(r"^(\w[\w ]*?)  +(.*)$", done.stdout, re.MULTILINE))


def test_nothing_is_known(run: Run) -> None:
    done = run("list")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "no worker is known" in done.stderr
    assert answer(run("list", "--json")) == {"runtimes": []}
    for command in ("show", "quiet", "resume"):
        done = run(command, "7")
        assert (done.exit_code, done.stdout) == (3, "") and "no runtime 7 is known" in done.stderr
        done = run(command, "web-1:12")
        assert (done.exit_code, done.stdout) == (3, "") and "no worker runs as process 12 on web-1" in done.stderr


def test_a_worker_is_shown_quieted_and_resumed(run: Run, client: awa.Client, processes: WorkerProcesses) -> None:
    processes.module(JOBS)
    worker = processes.start("app", "--queue", "default:3", "--threads", "4")
    place = f"{socket.gethostname()}:{worker.pid}"
    wait_until(lambda: run("show", place).exit_code == 0, timeout=20)
    wait_until(lambda: (one := answer(run("show", place, "--json")))["is_leader"] and one["health"], timeout=20)

    found = answer(run("show", place, "--json"))
    assert (found["pid"], found["state"], found["threads"], found["kinds"]) == (worker.pid, "live", 4, ["work"])
    assert found["queues"] == [{"name": "default", "max_workers": 3, "min_workers": 0, "weight": 1, "in_flight": 0}]
    assert answer(run("list", "--json"))["runtimes"][0]["uuid"] == found["uuid"]
    lines = [line.split("  ") for line in run("list").stdout.splitlines()]
    assert len(lines) == 2
    assert [cell.strip() for cell in lines[1] if cell][:2] == [str(found["id"]), "live (leader)"]
    shown = told(run("show", found["id"]))
    assert (shown["busy"], shown["queues"], shown["kinds"]) == ("0/4 threads", "default:3 has 0 in flight", "work")

    done = run("quiet", place)
    assert done.exit_code == 0 and f"worker {found['id']} is quiet since" in done.stdout
    assert answer(run("show", place, "--json"))["quiet_by"] == this_user()
    wait_until(lambda: "live (leader, quiet, drained)" in run("list").stdout)
    wait_until(lambda: "somebody asked this worker to claim nothing more" in worker.stderr)
    job = client.insert({"n": 1}, kind="work")
    assert answer(run("quiet", found["id"], "--by", "ada", "--json"))["quiet_by"] == "ada"
    assert told(run("show", place))["quiet"].endswith(" by ada")
    assert client.get(job.id).state == "available"

    assert run("resume", place).stdout == f"worker {found['id']} may claim\n"
    assert ended(client, job).runtime == found["id"]
    assert not answer(run("resume", found["id"], "--json"))["is_quiet"]

    worker.process.terminate()
    assert worker.wait() == 0
    assert answer(run("list", "--json")) == {"runtimes": []}
    assert [one["state"] for one in answer(run("list", "--all", "--json"))["runtimes"]] == ["ended"]
    assert told(run("show", found["id"]))["state"] == "ended"
    for command in ("quiet", "resume"):
        done = run(command, found["id"])
        assert done.exit_code == 3 and "has ended" in done.stderr


def test_what_is_wrong_with_a_worker_is_seen(run: Run, conn: Conn) -> None:
    late, gone = register(conn, hostname="web\x1b[31m"), register(conn)
    silent_for(conn, late, 150)
    fence(conn, gone)
    again = register(conn)
    health = (
        '{"unhealthy": ["the loop watch is hung"], "unready": ["claims do not succeed"], "loops": {"watch": "hung"}}'
    )
    conn.execute("UPDATE awa.runtime_instances SET busy = 1, health = %s WHERE id = %s", [health, again])
    lines = run("list").stdout.splitlines()
    assert lines[1].split()[:6] == [str(late), "stale", "web\\x1b[31m", "4711", "-/4", "q"]
    assert re.fullmatch(rf" *{gone}  gone   web-1 .*", lines[2])
    assert "the loop watch is hung; claims do not succeed" in lines[3]
    shown = told(run("show", again))
    assert (shown["health"], shown["loops"]) == ("the loop watch is hung", "watch hung")
    done = run("quiet", late)
    assert done.exit_code == 0 and f"worker {late} has been silent for 2 min: it hears this only if" in done.stderr
    [(old,)] = conn.execute(OF_BEFORE).fetchall()
    done = run("quiet", old)
    assert (done.exit_code, done.stdout) == (1, "") and f"runtime {old} is of awa 0" in done.stderr
    # the one that lives, of two starts of one process
    assert answer(run("show", "web-1:4711", "--json"))["id"] == again
    other = register(conn)
    done = run("quiet", "web-1:4711")
    assert done.exit_code == 3 and f"give one of the numbers {again}, {other}" in done.stderr
