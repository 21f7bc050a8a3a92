"""Cancelling by public names, while real worker processes run and die."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psycopg
import pytest

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import WorkerProcesses, count

Conn = psycopg.Connection[Any]

APP = """
import time
import awa

client = awa.Client()

@client.task()
def work(listens: bool) -> None:
    job = awa.current_job()
    with client.connection() as conn:
        conn.execute("INSERT INTO runs (job) VALUES (%s)", [job.id])
    while not (listens and job.cancelled):
        time.sleep(0.01)
    raise InterruptedError("asked to stop")
"""

QUICK = ("--heartbeat", "0.5", "--stale-after", "1.5", "--poll-interval", "0.5", "--shutdown-timeout", "0.1")


@pytest.fixture
def app(processes: WorkerProcesses, conn: Conn) -> WorkerProcesses:
    processes.module(APP)
    conn.execute("CREATE TABLE runs (job bigint)")
    return processes


def running(client: awa.Client, conn: Conn, *, listens: bool) -> awa.Inserted:
    job = client.insert({"listens": listens}, kind="work")
    wait_until(lambda: count(conn, "SELECT count(*) FROM runs WHERE job = %s", job.id) == 1, timeout=15)
    return job


def test_a_job_ends_when_its_handler_hears_of_it(app: WorkerProcesses, client: awa.Client, conn: Conn) -> None:
    worker = app.start("app:client", *QUICK)
    job = running(client, conn, listens=True)
    assert client.cancel(job.id, reason="no longer wanted").happened == "requested"
    wait_until(lambda: job.get().state is awa.JobState.CANCELLED)
    assert job.get().history[0]["text"] == "no longer wanted\nInterruptedError: asked to stop"
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_a_job_that_was_asked_to_end_does_not_outlive_its_worker(
    app: WorkerProcesses, client: awa.Client, conn: Conn
) -> None:
    """The worker is killed; whoever rescues its jobs runs the neighbour again, and the cancelled one never."""
    first = app.start("app:client", *QUICK)
    asked, beside = running(client, conn, listens=False), running(client, conn, listens=True)
    assert client.cancel(asked.id).happened == "requested"
    first.signal(signal.SIGKILL)
    app.start("app:client", *QUICK)
    wait_until(lambda: asked.get().state is awa.JobState.CANCELLED, timeout=20)
    wait_until(lambda: count(conn, "SELECT count(*) FROM runs WHERE job = %s", beside.id) == 2, timeout=20)
    assert count(conn, "SELECT count(*) FROM runs WHERE job = %s", asked.id) == 1
    assert client.cancel(beside.id, force=True).state is awa.JobState.CANCELLED
    assert count(conn, "SELECT count(*) FROM awa.cancel_requests WHERE id = %s", asked.id) == 0


def test_force_takes_a_job_from_a_frozen_worker(
    app: WorkerProcesses, client: awa.Client, conn: Conn, tmp_path: Path
) -> None:
    worker = app.start("app:client", *QUICK)
    job = running(client, conn, listens=False)
    worker.signal(signal.SIGSTOP)
    done = client.cancel(job.id, force=True)
    assert (done.happened, done.state) == ("cancelled", "cancelled")
    worker.signal(signal.SIGCONT)
    assert job.get().state is awa.JobState.CANCELLED


@pytest.mark.parametrize("delay", [None, 3600])
def test_a_job_that_has_not_started_never_does(
    app: WorkerProcesses, client: awa.Client, conn: Conn, delay: float | None
) -> None:
    job = client.insert({"listens": True}, kind="work", delay=delay)
    beside = client.insert({"listens": True}, kind="work")
    done = client.cancel(job.id, reason="too late")
    assert (done.happened, done.state) == ("cancelled", "cancelled")
    app.start("app:client", *QUICK)
    wait_until(lambda: count(conn, "SELECT count(*) FROM runs WHERE job = %s", beside.id) == 1, timeout=15)
    assert count(conn, "SELECT count(*) FROM runs WHERE job = %s", job.id) == 0
    assert (job.get().state, job.get().history[-1]["text"]) == ("cancelled", "too late")
    with pytest.raises(awa.JobNotFound):
        client.cancel(4711)
    client.cancel(beside.id)
