"""A worker that is told to stop while something is going on: requests to cancel, a slow database, a limited queue."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psycopg

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, WorkerProcesses, count, count_running, ended
from tests.fixtures.late import Gate

Conn = psycopg.Connection[Any]


class Stopping:
    """A call of ``stop()`` in a thread of its own."""

    def __init__(self, worker: Any) -> None:
        self.raised: BaseException | None = None
        self._thread = threading.Thread(target=self._stop, args=(worker,))
        self._thread.start()
        wait_until(lambda: worker._claimer.is_stopping, timeout=20)

    def _stop(self, worker: Any) -> None:
        try:
            worker.stop()
        except BaseException as error:
            self.raised = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(40)
        assert self.is_over
        assert self.raised is None


def test_a_request_to_cancel_is_seen_in_the_grace_time(client: awa.Client, conn: Conn) -> None:
    """Guard: the heartbeat, which looks for requests, stops last.

    Stopped first, the handler hears of nothing and the grace time passes: tried.
    """
    begun = threading.Event()

    @client.task()
    def work() -> None:
        begun.set()
        job = awa.current_job()
        assert job is not None
        for _ in range(3000):
            if job.cancelled:
                return
            threading.Event().wait(0.01)
        raise AssertionError("nobody told the handler")

    worker = client.worker(threads=1, shutdown_timeout=25)
    worker.start()
    job = client.insert(work.bind(), max_attempts=1)
    assert begun.wait(20)
    stopping = Stopping(worker)
    assert not stopping.is_over
    asked = client.cancel(job.id, reason="no longer wanted")
    assert asked.happened == "requested"
    stopping.join()
    assert client.get(job.id).state == "completed"  # it returned, so it succeeded
    assert count_running(conn) == 0


def test_the_time_of_an_attempt_is_kept_in_the_grace_time(client: awa.Client, conn: Conn) -> None:
    """Guard: who looks at deadlines stops after the handlers have ended, not before.

    Stopped first, the handler goes on until the grace time is over: tried.
    """
    begun = threading.Event()

    @client.task(timeout=1.0)
    def work() -> None:
        begun.set()
        for _ in range(3000):
            threading.Event().wait(0.01)

    worker = client.worker(threads=1, shutdown_timeout=25)
    worker.start()
    job = client.insert(work.bind(), max_attempts=1)
    assert begun.wait(20)
    Stopping(worker).join()
    info = client.get(job.id)
    assert (info.state, info.history[0]["type"]) == ("failed", "awa.errors.DeadlineExceeded")


def test_a_claim_that_is_answered_late_is_released_at_once(
    client: awa.Client, start_worker: StartWorker, conn: Conn, late: Gate
) -> None:
    """Guard: who claims looks, when the answer comes, whether the worker stops, and then releases what it brings.

    Who holds what: the claim's transaction holds the queue's claim lock and its runtime's, shared, and waits behind the
    gate; the stop has no lock, and waits for the LEAD token, which the claiming thread puts back when the answer comes.
    Its release is a settle of the same connection, so its snapshot is later than the claim's commit.

    Without it the attempts stay running until the runtime is taken for dead: tried.
    """
    ran: list[int] = []

    @client.task()
    def work(n: int) -> None:
        ran.append(n)

    late.shut("claim_v2")
    jobs = client.insert_many([work.bind(n) for n in range(6)])
    worker = client.worker(threads=3, shutdown_timeout=20)
    worker.start()
    late.wait()
    stopping = Stopping(worker)
    late.open()
    stopping.join()
    assert (ran, count_running(conn)) == ([], 0)
    assert {str(client.get(job.id).state) for job in jobs} == {"available"}
    assert count(conn, "SELECT count(*) FROM awa.runtime_instances WHERE ended_at IS NULL") == 0
    start_worker(client, threads=1, poll_interval=30)
    assert [(ended(client, job).attempt, client.get(job.id).history) for job in jobs] == [(1, [])] * 6


def test_an_outcome_that_is_acknowledged_late_is_waited_for(client: awa.Client, conn: Conn, late: Gate) -> None:
    """Guard: the stop waits for who records as for who runs a handler, so that exit code 0 means that nothing is open.

    The settle's transaction holds its runtime's lock, shared, behind the gate; the goodbye asks for that lock alone,
    and is only given it after the settle's commit. Without waiting the worker leaves without a goodbye: tried.
    """
    begun, go_on = threading.Event(), threading.Event()

    @client.task()
    def work() -> None:
        begun.set()
        assert go_on.wait(20)

    worker = client.worker(threads=1, shutdown_timeout=20)
    worker.start()
    job = client.insert(work.bind())
    assert begun.wait(20)
    late.shut("settle_v1")
    go_on.set()
    late.wait()
    stopping = Stopping(worker)
    assert not stopping.is_over
    late.open()
    stopping.join()
    assert client.get(job.id).state == "completed"
    assert count(conn, "SELECT count(*) FROM awa.runtime_instances WHERE ended_at IS NULL") == 0


def test_what_comes_while_a_worker_drains_wakes_another_at_once(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    """Guard: who stops gives its queues' bells up, and asks others to take them.

    A bell is a session's lock on the claim connection, which stays open for what is still to be recorded. Kept until
    then, producers ring for a worker that claims no more, and the others wait for their next poll, here 30 s: tried.
    """
    begun, go_on = threading.Event(), threading.Event()

    @client.task(queue="limited")
    def work(n: int) -> None:
        begun.set()
        assert n > 0 or go_on.wait(60)

    worker = client.worker(threads=2, queues=["limited:2"], shutdown_timeout=60, poll_interval=30)
    worker.start()
    blocked = client.insert(work.bind(0))
    assert begun.wait(20)
    wait_until(lambda: worker._claimer._bell.armed, timeout=20)  # its other thread waits for more
    start_worker(client, threads=1, queues=["limited:1"], poll_interval=30)
    stopping = Stopping(worker)
    wait_until(lambda: not worker._claimer._bell.armed or stopping.is_over, timeout=20)
    for n in range(1, 4):
        job = client.insert(work.bind(n))
        assert ended(client, job, timeout=15).attempt == 1
    assert not stopping.is_over
    assert client.get(blocked.id).state == "running"
    go_on.set()
    stopping.join()
    assert client.get(blocked.id).state == "completed"
    assert count_running(conn) == 0


APP = """
import time
from pathlib import Path
import awa

client = awa.Client()

@client.task(kind="stays")
def stays() -> None:
    job = awa.current_job()
    Path("begun").touch()
    while not job.cancelled:
        time.sleep(0.01)
    Path("told").touch()
    raise RuntimeError("as somebody asked")
"""


def test_a_process_that_drains_hears_of_requests_and_ends_well(
    processes: WorkerProcesses, client: awa.Client, conn: Conn
) -> None:
    """Guard: as for a worker in a thread; the job ends cancelled, and exit code 0 says that nothing is left."""
    processes.module(APP)
    process = processes.start("app:client", "--threads", "1", "--shutdown-timeout", "60")
    job = client.insert({}, kind="stays")
    directory: Path = processes.directory
    wait_until((directory / "begun").exists, timeout=30)
    process.process.terminate()
    wait_until(lambda: count(conn, "SELECT count(*) FROM awa.runtime_instances WHERE ended_at IS NULL") == 1)
    client.cancel(job.id)
    assert process.wait(40) == 0, process.stderr
    assert (directory / "told").exists()
    assert client.get(job.id).state == "cancelled"
    assert count_running(conn) == 0
    assert "somebody asked to cancel it" in process.stderr
