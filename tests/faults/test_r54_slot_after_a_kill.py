"""R54: a worker that was killed kept the slot of its key for a long time, or its successor ran beside what it had.

Now the slot is the attempt's: the next job starts when the dead attempt is rescued, by the claim that follows, and
there is no other expiry.
"""

from __future__ import annotations

import signal
from typing import Any

import psycopg
import pytest

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import WorkerProcess, WorkerProcesses, count, ended

Conn = psycopg.Connection[Any]

APP = """
    import os, time
    import psycopg
    import awa

    client = awa.Client()

    @client.task(kind="serial")
    def serial(n: int) -> None:
        job = awa.current_job()
        with psycopg.connect(os.environ["AWA_DATABASE_URL"], autocommit=True) as conn:
            # a lock of this session, which ends with the process: only one handler at a time can have it
            (is_alone,) = conn.execute("SELECT pg_try_advisory_lock(54)").fetchone()
            conn.execute("INSERT INTO ran (n, attempt, is_alone) VALUES (%s, %s, %s)", [n, job.attempt, is_alone])
            if n == 0 and job.attempt == 1:
                until = time.monotonic() + 60
                while time.monotonic() < until:
                    time.sleep(0.05)
            time.sleep(0.05)
"""

SETTINGS = ("--heartbeat", "0.4", "--stale-after", "1.6", "--shutdown-timeout", "0.5", "--threads", "4")


def kill(process: WorkerProcess) -> None:
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def outlive(process: WorkerProcess) -> None:
    """Have it stop while its handler outlives the grace time."""
    process.signal(signal.SIGTERM)
    assert process.wait() == 75


@pytest.mark.parametrize("end", [kill, outlive])
def test_the_next_starts_once_the_dead_one_is_rescued(
    client: awa.Client, processes: WorkerProcesses, conn: Conn, end: Any
) -> None:
    conn.execute("CREATE TABLE ran (n int, attempt int, is_alone bool, at timestamptz DEFAULT clock_timestamp())")
    client.admin.set_limits("default", max_running_per_key=1)
    processes.module(APP)
    ids = [
        conn.execute(
            "INSERT INTO awa.jobs (kind, args, concurrency_key)"
            " VALUES ('serial', json_build_object('n', %s::int), 'account:7') RETURNING id",
            [n],
        ).fetchone()[0]  # type: ignore[index]
        for n in range(6)
    ]
    process = processes.start("app", *SETTINGS)
    wait_until(lambda: count(conn, "SELECT count(*) FROM ran") == 1, timeout=15)
    wait_until(lambda: count(conn, "SELECT count(*) FROM awa.waiting_jobs WHERE waits_for = 'key'") == 5)
    end(process)
    processes.start("app", *SETTINGS)
    for job_id in ids:
        assert ended(client, awa.Inserted(job_id, True, None), timeout=30).state == "completed"
    ran = conn.execute("SELECT n, attempt, is_alone, at FROM ran ORDER BY at").fetchall()
    assert all(is_alone for _, _, is_alone, _ in ran)
    assert sorted((n, attempt) for n, attempt, *_ in ran) == [(0, 1), (0, 2), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]
    rescued = conn.execute("SELECT ended_at FROM awa.attempt_ends WHERE outcome = 'rescued'").fetchall()
    assert len(rescued) == 1
    assert ran[1][3] >= rescued[0][0]
    assert (ran[1][3] - rescued[0][0]).total_seconds() < 5
    assert count(conn, "SELECT count(*) FROM awa.waiting_jobs") == 0
