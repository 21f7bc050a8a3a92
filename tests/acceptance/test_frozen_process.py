"""Worker processes that are stopped in the middle and go on later, as paused containers and sleeping machines do."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import WorkerProcess, WorkerProcesses, claimed_twice, count, count_available, count_running

Conn = psycopg.Connection[Any]

pytestmark = pytest.mark.slow

APP = """
import os, signal, time
from pathlib import Path
import awa
from awa.storage.line import Line

client = awa.Client()

@client.task()
def work(text: str, seconds: float = 0.0) -> None:
    job = awa.current_job()
    time.sleep(seconds)
    with client.connection() as conn:
        conn.execute("INSERT INTO ledger (job, pid) VALUES (%s, %s)", [job.id, os.getpid()])

# a hook behind the sending of the claims of several queues, where the process may stop
flush_out, exchange = Line._flush_out, Line.exchange

def sending(self):
    flush_out(self)
    if self.claims > 2 and Path("stop-here").exists():
        Path("stop-here").unlink()
        os.kill(os.getpid(), signal.SIGSTOP)

def exchanging(self, runtime, flushes, wanted):
    self.claims = len(wanted)
    return exchange(self, runtime, flushes, wanted)

Line._flush_out, Line.exchange, Line.claims = sending, exchanging, 0
"""

QUEUES = ("--queue", "a", "--queue", "b", "--queue", "c", "--threads", "4", "--heartbeat", "0.5")

LONG = "x" * 120_000
"""A claim brings one such body, and the socket has room for the answer to one claim and a half."""


@pytest.fixture
def app(processes: WorkerProcesses, conn: Conn) -> WorkerProcesses:
    conn.execute("CREATE TABLE ledger (job bigint, pid int, at timestamptz DEFAULT clock_timestamp())")
    processes.module(APP)
    return processes


def insert(client: awa.Client, number: int, **args: object) -> list[awa.Inserted]:
    return client.insert_many(
        awa.NewJob({"text": LONG, **args}, kind="work", queue=queue) for _ in range(number) for queue in ("a", "b", "c")
    )


def is_stopped(process: WorkerProcess) -> bool:
    status = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    return status == "T"


def done_by(conn: Conn, process: WorkerProcess) -> int:
    return count(conn, "SELECT count(*) FROM ledger WHERE pid = %s", process.pid)


HELD = """
    SELECT count(*)
      FROM pg_locks l
      JOIN pg_stat_activity a ON a.pid = l.pid
      JOIN unnest('{a,b,c}'::text[]) q
        ON l.classid::bigint << 32 | l.objid::bigint = hashtextextended('awa.queue:' || q, 0)
     WHERE l.locktype = 'advisory' AND a.wait_event = 'ClientWrite' AND a.datname = current_database()
"""


@pytest.mark.parametrize("stale_after", [1.5, 60.0], ids=["taken for dead", "in time"])
def test_a_worker_that_freezes_while_its_claims_are_answered_holds_nobody_up(
    app: WorkerProcesses, client: awa.Client, conn: Conn, stale_after: float
) -> None:
    """Guard: every worker ends the backend of a frozen claimer; without it the queue waits until the other wakes."""
    settings = (*QUEUES, "--stale-after", str(stale_after))
    jobs = insert(client, 5)
    (app.directory / "stop-here").touch()
    sleeper = app.start("app:client", *settings)
    wait_until(lambda: is_stopped(sleeper), timeout=15)
    wait_until(lambda: count(conn, HELD) == 1)
    claimed = {row[0] for row in conn.execute("SELECT unnest(entry_ids) FROM awa.claims").fetchall()}
    assert 0 < len(claimed) < 15
    other = app.start("app:client", *settings)
    free = [job for job in jobs if job.id not in claimed]
    wait_until(lambda: done_by(conn, other) > 0, timeout=15)
    wait_until(lambda: {client.get(job.id).state for job in free} == {"completed"}, timeout=5)
    assert count(conn, HELD) == 0
    assert "which held the lock of" in other.stderr  # the queue's, or by the rescuer the runtime's
    if stale_after < 60:
        wait_until(lambda: {client.get(job.id).state for job in jobs} == {"completed"}, timeout=15)
        assert {client.get(job_id).attempt for job_id in claimed} == {2}
    else:
        assert {client.get(job_id).state for job_id in claimed} == {"running"}
    sleeper.signal(signal.SIGCONT)
    wait_until(lambda: {client.get(job.id).state for job in jobs} == {"completed"}, timeout=15)
    if stale_after == 60:
        assert {client.get(job_id).attempt for job_id in claimed} == {1}
        assert "whose claim was answered to nobody" in sleeper.stderr
    other.signal(signal.SIGTERM)
    assert other.wait() == 0
    later = insert(client, 1)
    wait_until(lambda: {client.get(job.id).state for job in later} == {"completed"}, timeout=15)
    sleeper.signal(signal.SIGTERM)
    assert sleeper.wait() == 0, sleeper.stderr
    assert claimed_twice(conn) == []
    assert count_running(conn) + count_available(conn) == 0


def test_workers_that_freeze_at_any_moment_lose_nothing(app: WorkerProcesses, client: awa.Client, conn: Conn) -> None:
    """Two workers under load are stopped in turn, at random moments, for longer or shorter than stale_after."""
    dice = random.Random(11)
    settings = (*QUEUES, "--stale-after", "2")
    workers = [app.start("app:client", *settings) for _ in range(2)]
    jobs: list[awa.Inserted] = []
    for turn in range(6):
        stopped, other = workers[turn % 2], workers[1 - turn % 2]
        before, give_up_at = done_by(conn, stopped), time.monotonic() + 20
        while done_by(conn, stopped) == before:  # the other may take all of them
            assert time.monotonic() < give_up_at
            jobs += insert(client, 20, seconds=0.002)
            time.sleep(0.2)
        time.sleep(dice.uniform(0.0, 0.05))
        stopped.signal(signal.SIGSTOP)
        before = done_by(conn, other)
        jobs += insert(client, 10)
        wait_until(lambda other=other, before=before: done_by(conn, other) >= before + 5, timeout=5)
        time.sleep(dice.choice([0.0, 4.0]))
        stopped.signal(signal.SIGCONT)
    wait_until(lambda: count_running(conn) + count_available(conn) == 0, timeout=30)
    assert {client.get(job.id).state for job in jobs} == {"completed"}
    assert count(conn, "SELECT count(DISTINCT job) FROM ledger") == len(jobs)
    assert claimed_twice(conn) == []
    for worker in workers:
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0, worker.stderr
