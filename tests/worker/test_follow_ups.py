"""Jobs that follow others, from the insert to their own end."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import awa
from awa import NewJob
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, WorkerProcesses, count, ended

Conn = psycopg.Connection[Any]

JOBS = "SELECT id, kind, args::text, follow_ups->>'of' FROM awa.jobs ORDER BY id"


def test_a_chain_runs_link_by_link(client: awa.Client, start_worker: StartWorker, conn: Conn) -> None:
    """Through every insert path; each outcome has its own, and a job that is told of none has none."""
    seen: list[str] = []

    @client.task(max_attempts=1)
    def step(name: str) -> None:
        seen.append(name)
        if name.startswith("bad"):
            raise ValueError(name)
        if name.startswith("cancel"):
            raise awa.Cancel(name)

    third = NewJob(step.bind("3 ✓"), on_failed=step.bind("never"))
    second = NewJob(step.bind("bad 2"), on_completed=step.bind("never"), on_failed=third)
    job = client.insert(step.bind("cancel 1"), on_cancelled=second, on_failed=step.bind("never"))
    with psycopg.connect(conn.info.dsn) as own:
        many = client.insert_many(
            [step.bind("alone"), NewJob(step.bind("a"), on_completed=[step.bind("b"), step.bind("c")])], conn=own
        )
        own.rollback()
        client.insert(step.bind("d"), on_completed=NewJob(step.bind("e"), delay=0.2), conn=own)
    assert count(conn, "SELECT count(*) FROM awa.jobs WHERE id = ANY (%s)", [one.id for one in many]) == 0
    start_worker(client)
    wait_until(lambda: len(seen) == 5, timeout=20)
    assert [name for name in seen if name not in "de"] == ["cancel 1", "bad 2", "3 ✓"]
    assert [name for name in seen if name in "de"] == ["d", "e"]
    rows = {args: (job_id, parent) for job_id, _, args, parent in conn.execute(JOBS).fetchall()}
    assert rows['{"name":"bad 2"}'][1] == str(job.id)
    assert rows['{"name":"3 ✓"}'][1] == str(rows['{"name":"bad 2"}'][0])
    wait_until(lambda: all(client.get(job_id).state.is_terminal for job_id, _ in rows.values()))
    assert len(seen) == 5


def test_a_worker_that_dies_on_its_last_attempt_fails_the_job_with_what_follows(
    processes: WorkerProcesses, client: awa.Client, conn: Conn
) -> None:
    """Guard: rescue ends attempts by the same function as every other end, consequences included."""
    processes.module("""
        import os, signal
        import awa

        client = awa.Client()

        @client.task(max_attempts=1, keep_result=True)
        def die() -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        @client.task(keep_result=True)
        def clean_up(what: str) -> str:
            return what
    """)
    job = client.insert({}, kind="die", max_attempts=1, on_failed=NewJob({"what": "it"}, kind="clean_up"))
    processes.start("app:client", "--heartbeat", "0.2", "--stale-after", "0.6").wait(30)
    processes.start("app:client", "--heartbeat", "0.2", "--stale-after", "0.6")
    with pytest.raises(awa.JobFailed, match="WorkerDied: its worker died"):
        job.result(timeout=30)
    [follower] = [job_id for job_id, kind, *_ in conn.execute(JOBS).fetchall() if kind == "clean_up"]
    assert client.result(follower, timeout=30) == "it"
    assert ended(client, job).state == "failed"
