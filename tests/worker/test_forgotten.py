"""A database that forgets what it had acknowledged: asynchronous commits before a crash, or before a failover."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import awa
from awa.embedded import Server
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from awa.worker.heartbeat import Heartbeat
from awa.worker.supervisor import Worker
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, ended
from tests.storage import engine

FLUSHING = "SELECT pid FROM pg_stat_activity WHERE backend_type IN ('walwriter', 'checkpointer', 'background writer')"


class Forgetful:
    """A server on which commits are asynchronous, unless asked not to be, and that crashes before they are on disk."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.url = server.url()
        with psycopg.connect(self.url, autocommit=True) as conn:
            conn.execute("ALTER ROLE postgres SET synchronous_commit = off")
            conn.execute("ALTER SYSTEM SET autovacuum = off")
            migrate(conn, Schema())

    def remember(self) -> None:
        """Have all that was committed on disk, and from now on nothing more."""
        with psycopg.connect(self.url, autocommit=True, options="-c synchronous_commit=on") as conn:
            for (pid,) in conn.execute(FLUSHING).fetchall():
                os.kill(pid, signal.SIGSTOP)
            conn.execute("CREATE TABLE IF NOT EXISTS flushed ()")
            conn.execute("DROP TABLE flushed")

    def crash(self) -> None:
        self._server.stop("immediate")
        self._server.start()


@pytest.fixture
def forgetful(own_server: Server) -> Iterator[Forgetful]:
    yield Forgetful(own_server)


def look(client: awa.Client, job: awa.Inserted) -> Any:
    """The job, when the database answers."""
    try:
        return client.get(job.id)
    except (awa.AwaError, psycopg.Error):
        return None


def wait_until_acknowledged(worker: Worker) -> None:
    """Else the worker would rightly record again, after the crash, what nobody had told it is recorded."""
    wait_until(lambda: not worker._claimer.has_something_to_record, 15)


class Forgotten:
    """A worker, and a job of its that was completed, as its client was told, and is not any more."""

    def __init__(self, forgetful: Forgetful, start_worker: StartWorker, *, has_heartbeat: bool) -> None:
        self.client = awa.Client(forgetful.url)
        self._begun, goes_on = threading.Semaphore(0), threading.Event()

        @self.client.task()
        def work() -> None:
            self._begun.release()
            goes_on.wait(30)

        self.worker = start_worker(self.client, threads=2, heartbeat=0.2, stale_after=60, poll_interval=0.5)
        self._job = self.client.insert(work.bind())
        assert self._begun.acquire(timeout=15)
        if not has_heartbeat:
            [heartbeat] = [service for service in self.worker._services if isinstance(service, Heartbeat)]
            assert heartbeat.stop(10)
        forgetful.remember()  # the claim too
        goes_on.set()
        assert ended(self.client, self._job).state == "completed"
        wait_until_acknowledged(self.worker)
        forgetful.crash()
        assert wait_until(self.look, 30).state != "completed", "it was not forgotten"

    def look(self) -> Any:
        """The job, when the database answers."""
        return look(self.client, self._job)

    def is_completed_again(self) -> None:
        assert self._begun.acquire(timeout=30), f"it was not begun again: {self.look()}"
        assert ended(self.client, self._job).state == "completed"
        with self.client.connection() as conn:
            assert count(conn, "SELECT count(*) FROM awa.attempt_ends WHERE outcome = 'released'") == 1
        self.client.close()


def test_an_attempt_whose_recorded_end_was_forgotten_is_released(
    forgetful: Forgetful, start_worker: StartWorker
) -> None:
    """Guard: after the server was restarted or replaced, the worker looks for claims that the database calls open and
    that are done here. Without it they run for ever: no sign of life lists them, so that nobody rescues them."""
    Forgotten(forgetful, start_worker, has_heartbeat=True).is_completed_again()


def test_a_worker_that_stops_releases_what_was_forgotten(forgetful: Forgetful, start_worker: StartWorker) -> None:
    """Guard: before it says that it has ended, it looks too; no sign of life came between."""
    forgotten = Forgotten(forgetful, start_worker, has_heartbeat=False)
    forgotten.worker.stop()
    assert forgotten.look().state == "available"
    start_worker(forgotten.client, threads=2)
    forgotten.is_completed_again()


def test_a_forgotten_end_of_a_claim_that_is_not_done_is_released(
    forgetful: Forgetful, start_worker: StartWorker
) -> None:
    """Guard: a claim that is open here is looked at again once it is not. Without it the sign of life after its last
    end calls it done, with the end before that forgotten."""
    client = awa.Client(forgetful.url)
    begun = {0: threading.Semaphore(0), 1: threading.Semaphore(0)}
    goes_on = {0: threading.Event(), 1: threading.Event()}

    @client.task()
    def work(number: int) -> None:
        begun[number].release()
        goes_on[number].wait(60)

    worker = start_worker(client, threads=2, heartbeat=0.2, stale_after=60, poll_interval=0.5)
    [heartbeat] = [service for service in worker._services if isinstance(service, Heartbeat)]
    forgotten, running = client.insert_many([work.bind(0), work.bind(1)])
    assert all(one.acquire(timeout=15) for one in begun.values())
    forgetful.remember()
    goes_on[0].set()
    assert ended(client, forgotten).state == "completed"
    with client.connection() as conn:
        assert count(conn, "SELECT count(*) FROM awa.claims WHERE nonce <> 0") == 1
    wait_until_acknowledged(worker)
    forgetful.crash()
    assert wait_until(lambda: look(client, forgotten), 30).state != "completed", "it was not forgotten"
    wait_until(lambda: heartbeat._known.suspects, 30)
    goes_on[1].set()
    assert begun[0].acquire(timeout=30), "it was not begun again"
    assert ended(client, forgotten).state == ended(client, running).state == "completed"
    wait_until(lambda: not heartbeat._known.suspects, 30)
    client.close()


def test_a_worker_whose_registration_was_forgotten_registers_anew(
    conn: psycopg.Connection[Any], client: awa.Client, start_worker: StartWorker
) -> None:
    """Guard: a sign of life that finds no row writes the runtime down as gone. Without it the worker goes on to claim
    for a runtime that nobody refuses and nobody rescues."""

    @client.task()
    def work() -> None: ...

    worker = start_worker(client, threads=2, heartbeat=0.2, stale_after=60)
    assert ended(client, client.insert(work.bind())).state == "completed"
    forgotten = worker.runtime
    claimed = client.insert({}, kind="work", queue="elsewhere")  # by nobody else, so that only a rescue takes it back
    with conn.transaction():
        conn.execute("DELETE FROM awa.runtime_instances WHERE id = %s", [forgotten])
        assert wait_until(lambda: engine.claim(conn, forgotten, queue="elsewhere").ids) == [claimed.id]
    wait_until(lambda: worker.runtime != forgotten, 20)
    wait_until(lambda: client.get(claimed.id).state == "available", 20)
    assert ended(client, client.insert(work.bind())).state == "completed"
    assert count(conn, "SELECT count(*) FROM awa.runtime_instances WHERE id = %s", worker.runtime) == 1
