"""Claims of this runtime that its process does not know, and those that it is about to know."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import awa
from awa.storage import recovery
from awa.storage.line import Line, Reply
from awa.worker.claimer import Claimer
from awa.worker.heartbeat import Heartbeat
from awa.worker.supervisor import Worker
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, count_running, ended
from tests.storage import engine

Conn = psycopg.Connection[Any]

RELEASED = "SELECT count(*) FROM awa.attempt_ends WHERE outcome = 'released'"


class Looks:
    """The heartbeats' looks for unknown claims."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[list[int]] = []
        look = recovery.list_claims

        def counting(*args: Any, **options: Any) -> list[int]:
            self.found.append(look(*args, **options))
            return self.found[-1]

        monkeypatch.setattr(recovery, "list_claims", counting)

    def wait(self, number: int) -> None:
        seen = len(self.found)
        wait_until(lambda: len(self.found) >= seen + number)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    return Looks(monkeypatch)


@pytest.fixture
def work(client: awa.Client) -> awa.Task[[], None]:
    """A job that does nothing."""

    @client.task()
    def work() -> None: ...

    return work


@pytest.fixture
def worker(client: awa.Client, start_worker: StartWorker, work: Any) -> Iterator[Worker]:
    yield start_worker(client, threads=2, heartbeat=0.1, stale_after=30)


def claim_behind_its_back(conn: Conn, client: awa.Client, worker: Worker) -> int:
    """A claim of *worker* whose answer goes elsewhere; returns the job, of a queue that it does not serve."""
    job = client.insert({}, kind="work", queue="elsewhere")
    wait_until(lambda: engine.claim(conn, worker.runtime, queue="elsewhere").ids == [job.id])
    return job.id


def test_a_claim_that_nobody_knows_is_released(
    conn: Conn, client: awa.Client, worker: Worker, work: Any, looks: Looks
) -> None:
    job = claim_behind_its_back(conn, client, worker)
    wait_until(lambda: client.get(job).state == "available")
    assert ended(client, client.insert(work.bind())).state == "completed"
    looks.wait(5)
    assert count(conn, RELEASED) == 1


class Beats:
    """A worker whose signs of life come when the test says so, after the first."""

    def __init__(self, worker: Worker) -> None:
        [self._heartbeat] = [service for service in worker._services if isinstance(service, Heartbeat)]
        wait_until(lambda: self._heartbeat._due)  # the first is over

    def beat(self) -> None:
        assert self._heartbeat._connection is not None
        self._heartbeat._beat(self._heartbeat._connection)


def test_the_claims_that_come_after_it_do_not_hide_it(
    conn: Conn, client: awa.Client, start_worker: StartWorker, work: Any
) -> None:
    """Guard: the looks begin behind the last that counted, not behind the newest claim that was received."""
    worker = start_worker(client, threads=2, heartbeat=30, stale_after=120)
    heartbeat = Beats(worker)
    job = claim_behind_its_back(conn, client, worker)
    for _ in range(3):
        assert ended(client, client.insert(work.bind())).state == "completed"
    assert client.get(job).state == "running"
    release_with(heartbeat, conn)
    assert client.get(job).state == "available"


def test_a_claim_that_commits_after_newer_ones_were_received_is_found(
    conn: Conn, client: awa.Client, start_worker: StartWorker, work: Any, database: str
) -> None:
    """Guard: a look counts only when nobody but the worker's own connection claims for its runtime."""
    worker = start_worker(client, threads=2, heartbeat=30, stale_after=120)
    heartbeat = Beats(worker)
    job = client.insert({}, kind="work", queue="elsewhere")
    with psycopg.connect(database) as slow:
        wait_until(lambda: engine.claim(slow, worker.runtime, queue="elsewhere").ids == [job.id])
        assert ended(client, client.insert(work.bind())).state == "completed"  # a newer claim
        wait_until(lambda: worker._claimer.is_certain)
        heartbeat.beat()
        slow.commit()
    release_with(heartbeat, conn)
    assert client.get(job.id).state == "available"


def test_a_claim_that_commits_after_newer_ones_is_rescued_when_its_worker_dies(
    conn: Conn, client: awa.Client, start_worker: StartWorker, work: Any, database: str
) -> None:
    """Guard: a sign of life gives no newer number than the last look that counts. With the newest one that was
    received, the claim is neither listed nor above it: the job runs for ever."""
    worker = start_worker(client, threads=2, heartbeat=30, stale_after=120)
    heartbeat = Beats(worker)
    job = client.insert({}, kind="work", queue="elsewhere")
    with psycopg.connect(database) as slow:
        wait_until(lambda: engine.claim(slow, worker.runtime, queue="elsewhere").ids == [job.id])
        assert ended(client, client.insert(work.bind())).state == "completed"  # a newer claim
        wait_until(lambda: worker._claimer.is_certain)
        heartbeat.beat()
        slow.commit()
    engine.fall_silent(conn, worker.runtime)
    assert engine.fence(conn, worker.runtime)
    assert engine.rescue(conn, worker.runtime)[1] == 1
    assert client.get(job.id).state == "available"


def test_what_was_answered_to_nobody_is_released_when_a_worker_leaves(
    conn: Conn, client: awa.Client, start_worker: StartWorker, work: Any
) -> None:
    """Guard: the look under the runtime's lock before goodbye. Nobody rescues a runtime that has said it."""
    worker = start_worker(client, threads=2, heartbeat=30, stale_after=120)
    Beats(worker)
    job = claim_behind_its_back(conn, client, worker)
    assert ended(client, client.insert(work.bind())).state == "completed"
    worker.stop(5)
    assert client.get(job).state == "available"


def test_nobody_claims_for_a_worker_that_has_left(
    conn: Conn, client: awa.Client, start_worker: StartWorker, work: Any
) -> None:
    """Guard: leaving fences. A claim that a proxy delivers later would be open for ever."""
    worker = start_worker(client, threads=2)
    worker.stop(5)
    client.insert(work.bind())
    with pytest.raises(psycopg.Error, match="is gone"):
        engine.claim(conn, worker.runtime)


def test_a_worker_waits_with_its_goodbye_for_a_claim_that_is_under_way(
    conn: Conn, client: awa.Client, start_worker: StartWorker, work: Any, database: str
) -> None:
    """Guard: goodbye needs the runtime's lock."""
    worker = start_worker(client, threads=2, heartbeat=30, stale_after=120)
    job = client.insert({}, kind="work", queue="elsewhere")
    with psycopg.connect(database) as slow:
        wait_until(lambda: engine.claim(slow, worker.runtime, queue="elsewhere").ids == [job.id])
        stopping = threading.Thread(target=worker.stop, args=(5,))
        stopping.start()
        stopping.join(0.5)
        assert stopping.is_alive()
        slow.commit()
        stopping.join(10)
    assert client.get(job.id).state == "available"
    assert count(conn, "SELECT count(*) FROM awa.runtime_instances WHERE ended_at IS NULL") == 0


def release_with(heartbeat: Beats, conn: Conn) -> None:
    """One look that finds something; it counts for none while a claim is on its way or the runtime's lock is held."""

    def has_released() -> bool:
        heartbeat.beat()
        return count(conn, RELEASED) == 1

    wait_until(has_released)


def test_a_claim_whose_answer_is_on_its_way_is_none_of_them(
    conn: Conn,
    client: awa.Client,
    start_worker: StartWorker,
    work: Any,
    looks: Looks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guard: is_certain, looked at after the database. The answer has been sent and not been read."""
    arrived = threading.Event()
    go_on = threading.Event()
    exchange = Line.exchange

    def late(self: Line, *args: Any) -> Reply:
        reply = exchange(self, *args)
        if any(claimed.attempts for claimed in reply.claims):
            arrived.set()
            assert go_on.wait(20)
        return reply

    monkeypatch.setattr(Line, "exchange", late)
    start_worker(client, threads=2, heartbeat=0.1, stale_after=30)
    job = client.insert(work.bind())
    assert arrived.wait(5)
    looks.wait(5)
    assert looks.found[-1]  # it stood there ...
    assert count(conn, RELEASED) == 0  # ... and was left
    go_on.set()
    info = ended(client, job)
    assert (info.state, info.attempt) == ("completed", 1)
    looks.wait(3)
    assert count(conn, RELEASED) == 0


def test_it_is_released_when_the_runtime_can_be_had(
    conn: Conn, client: awa.Client, start_worker: StartWorker, work: Any, database: str
) -> None:
    """Guard: the runtime's lock, exclusively and only tried; a look that could not have it counts for none."""
    worker = start_worker(client, threads=2, heartbeat=30, stale_after=120)
    heartbeat = Beats(worker)
    with psycopg.connect(database) as holder:
        # shared, as its own claims and settles hold it
        holder.execute(
            "SELECT pg_advisory_xact_lock_shared(hashtextextended('awa.runtime:' || %s::text, 0))", [worker.runtime]
        )
        job = claim_behind_its_back(conn, client, worker)
        for _ in range(3):  # newer claims, which hide it from a look that begins behind them
            assert ended(client, client.insert(work.bind())).state == "completed"
            wait_until(lambda: worker._claimer.is_certain)
            heartbeat.beat()
        assert client.get(job).state == "running"
        holder.rollback()
    release_with(heartbeat, conn)
    assert client.get(job).state == "available"


def test_claims_of_a_busy_worker_are_never_taken_for_unknown(
    conn: Conn, client: awa.Client, worker: Worker, work: Any, looks: Looks
) -> None:
    for _ in range(20):
        client.insert_many([work.bind() for _ in range(100)])
        looks.wait(1)
    wait_until(lambda: count_running(conn) == 0)
    assert sum(map(len, looks.found)) > 0
    assert count(conn, RELEASED) == 0
    assert max(len(found) for found in looks.found[-2:]) <= 100  # and it does not remember for ever
    looks.wait(3)
    assert looks.found[-1] == []


def test_what_had_arrived_when_the_rest_failed_is_released(
    conn: Conn, client: awa.Client, start_worker: StartWorker, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its attempts are known as open, and nobody runs them."""
    failures: list[int] = []
    fetch = Claimer._fetch_long

    def failing(self: Claimer, line: Line, runtime: int, reply: Reply) -> None:
        if not failures and any(claimed.attempts for claimed in reply.claims):
            failures.append(sum(len(claimed.attempts) for claimed in reply.claims))
            raise MemoryError
        fetch(self, line, runtime, reply)

    monkeypatch.setattr(Claimer, "_fetch_long", failing)
    jobs = client.insert_many([work.bind() for _ in range(3)])
    worker = start_worker(client, threads=3)
    for job in jobs:
        info = ended(client, job)
        assert (info.state, info.attempt, info.history) == ("completed", 1, [])
    assert count(conn, RELEASED) == failures[0] > 0
    wait_until(lambda: not worker._outcomes.open_claims())
