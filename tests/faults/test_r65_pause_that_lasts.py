"""R65: a pause that workers kept in memory was gone when they were restarted, or held for some of them only.

A pause is a row that every claim reads under the queue's claim lock. So it holds for every worker there is and will be,
until somebody resumes the queue; once ``pause_queue`` returns, nothing starts any more.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import psycopg

import awa
from awa.job import JobState
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import WorkerProcess, WorkerProcesses, count, terminate

Conn = psycopg.Connection[Any]

APP = """
import os, time
from pathlib import Path
import awa

client = awa.Client()

@client.task(queue="mail")
def send(n: int = 0) -> None:
    with client.connection() as conn:
        conn.execute("INSERT INTO ledger (n, pid) VALUES (%s, %s)", [n, os.getpid()])

@client.task(queue="mail")
def wait_for(path: str) -> None:
    while not Path(path).exists():
        time.sleep(0.01)

@client.task()
def other() -> None: ...
"""

QUICK = ("--queue", "mail", "--queue", "default", "--heartbeat", "0.5", "--stale-after", "1.5")


def started(process: WorkerProcess) -> WorkerProcess:
    wait_until(lambda: " runs " in process.stderr or process.process.poll() is not None, timeout=30)
    assert process.process.poll() is None, process.stderr
    return process


def sent(conn: Conn) -> int:
    return count(conn, "SELECT count(*) FROM ledger")


def test_a_pause_outlasts_workers_leaders_and_connections(
    processes: WorkerProcesses, client: awa.Client, conn: Conn, tmp_path: Any
) -> None:
    conn.execute("CREATE TABLE ledger (n int, pid int)")
    processes.module(APP)
    first = started(processes.start("app:client", *QUICK, "--threads", "2"))
    go = tmp_path / "go"
    running = client.insert({"path": str(go)}, kind="wait_for", queue="mail")
    client.insert({"n": 1}, kind="send", queue="mail")
    wait_until(lambda: client.get(running.id).state == "running" and sent(conn) == 1, timeout=20)

    # nobody listens when the pause is said
    assert terminate(conn, "awa claims") >= 0
    info = client.admin.pause_queue("mail", by="anna", reason="the relay is down")
    assert (info.is_paused, info.paused_by, info.pause_reason) == (True, "anna", "the relay is down")
    client.insert({"n": 2}, kind="send", queue="mail")
    promoted = client.insert({"n": 3}, kind="send", queue="mail", delay=0.1)
    conn.execute("SELECT awa.enqueue_v1('send', '{\"n\": 4}', 'mail')")

    # what runs ends, and other queues go on
    go.touch()
    wait_until(lambda: client.get(running.id).state == "completed", timeout=20)
    beside = client.insert({}, kind="other")
    wait_until(lambda: client.get(beside.id).state == "completed", timeout=20)

    # one in good order, a new one with other settings; then the leader is killed
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    second = started(processes.start("app:client", *QUICK, "--threads", "1", "--poll-interval", "0.1"))
    third = started(processes.start("app:client", "--queue", "mail:7", "--heartbeat", "0.5", "--stale-after", "1.5"))
    wait_until(
        lambda: conn.execute("SELECT 1 FROM awa.leases WHERE expires_at > clock_timestamp()").fetchone(), timeout=20
    )
    leading = conn.execute(
        "SELECT r.pid FROM awa.leases l JOIN awa.runtime_instances r ON r.id = l.runtime"
        " WHERE l.expires_at > clock_timestamp()"
    ).fetchone()
    assert leading is not None
    killed, left = (second, third) if leading[0] == second.pid else (third, second)
    killed.signal(signal.SIGKILL)
    killed.wait()
    wait_until(lambda: client.get(promoted.id).state == "available", timeout=20)  # somebody else leads
    time.sleep(1.0)
    assert sent(conn) == 1
    info = client.admin.get_queue("mail")
    assert (info.is_paused, info.running) == (True, 0)
    assert info.counts[JobState.AVAILABLE].value == 3
    assert client.admin.count_waiting("mail") == 3

    client.admin.resume_queue("mail")
    wait_until(lambda: sent(conn) == 4, timeout=20)
    left.signal(signal.SIGTERM)
    assert left.wait() == 0
    assert sorted(row[0] for row in conn.execute("SELECT n FROM ledger").fetchall()) == [1, 2, 3, 4]


def test_nothing_starts_once_a_pause_has_returned(client: awa.Client, conn: Conn) -> None:
    """Guard: the pause waits for the claim that is open; its jobs have begun by the database's books."""

    @client.task(queue="busy")
    def work(n: int) -> None: ...

    client.insert_many([work.bind(n) for n in range(3000)])
    with client.worker(queues=["busy"], threads=4):
        wait_until(lambda: count(conn, "SELECT count(*) FROM awa.claims") > 2, timeout=20)
        for _ in range(3):
            client.admin.pause_queue("busy")
            claims = count(conn, "SELECT count(*) FROM awa.claims WHERE cardinality(entry_ids) > 0")
            time.sleep(0.3)
            assert count(conn, "SELECT count(*) FROM awa.claims WHERE cardinality(entry_ids) > 0") == claims
            client.admin.resume_queue("busy")
            time.sleep(0.05)
        wait_until(lambda: client.admin.count_waiting("busy") == 0, timeout=30)
