"""A job whose last attempt died with its process runs alone in the next, until it has ended or survived."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import awa
from awa.worker import bell, claimer
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, ended
from tests.storage import engine
from tests.worker.test_claimer import IDLE, wait_for_bells

Conn = psycopg.Connection[Any]

CLAIMED = """
    SELECT count(*) FROM awa.claims c CROSS JOIN LATERAL unnest(c.entry_ids) WHERE c.runtime = %s
"""

INSERT = "INSERT INTO awa.jobs (queue, kind) VALUES (%s, 'suspect') RETURNING id"

RELEASED = "SELECT count(*) FROM awa.attempt_ends WHERE outcome = 'released'"


class Suspect:
    """A task whose handlers stay inside until they are let go, and note when they began."""

    def __init__(self, client: awa.Client) -> None:
        self.started = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.began: list[float] = []

        @client.task(kind="suspect")
        def suspect() -> None:
            self.began.append(time.monotonic())
            self.started.release()
            assert self.go_on.wait(30)

        self.task = suspect

    def wait(self) -> None:
        assert self.started.acquire(timeout=10)


@pytest.fixture
def suspect(client: awa.Client) -> Iterator[Suspect]:
    suspect = Suspect(client)
    yield suspect
    suspect.go_on.set()


@pytest.fixture
def ran(client: awa.Client) -> list[float]:
    """When the jobs of the kind ``work`` ran."""
    ran: list[float] = []

    @client.task(kind="work")
    def work() -> None:
        ran.append(time.monotonic())

    return ran


def begun(conn: Conn, *queues: str) -> tuple[int, list[int]]:
    """Another worker's runtime and the suspects that it has begun; their inserts have rung no bell."""
    other = engine.register(conn)
    jobs = []
    for queue in queues:
        jobs.append(engine.scalar(conn, INSERT, queue))
        # a worker may claim there just now, in vain, and hold the queue
        wait_until(lambda queue=queue: engine.claim(conn, other, queue=queue).ids == jobs[-1:])
    return other, jobs


def rescue(conn: Conn, dead: int, jobs: list[int]) -> None:
    """Let the suspects' worker be dead; this rings the bells."""
    engine.fall_silent(conn, dead)
    assert engine.fence(conn, dead)
    assert engine.rescue(conn, dead) == (len(jobs), len(jobs), 0)


def rescued(conn: Conn, *queues: str) -> list[int]:
    """Suspects whose first attempts died with their worker."""
    dead, jobs = begun(conn, *queues)
    rescue(conn, dead, jobs)
    return jobs


def insert_work(client: awa.Client, *queues: str) -> list[awa.Inserted]:
    return [client.insert({}, kind="work", queue=queue) for queue in queues]


def test_nothing_is_claimed_beside_it_until_it_has_ended(
    client: awa.Client, start_worker: StartWorker, conn: Conn, suspect: Suspect, ran: list[float]
) -> None:
    [job] = rescued(conn, "default")
    worker = start_worker(client, threads=4, queues=["default", "other"], poll_interval=0.02)
    suspect.wait()
    others = insert_work(client, "default", "other", "default", "other")
    time.sleep(0.3)
    assert count(conn, CLAIMED, worker.runtime) == 1
    assert ran == []
    suspect.go_on.set()
    assert all(ended(client, other, timeout=1.5).state == "completed" for other in others)
    wait_until(lambda: client.get(job).state == "completed")
    assert client.get(job).attempt == 2
    assert count(conn, RELEASED) == 0


def test_it_has_survived_after_a_while(
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    suspect: Suspect,
    ran: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claimer, "SURVIVES_AFTER", 0.7)
    rescued(conn, "default")
    others = insert_work(client, "default", "other")
    start_worker(client, threads=4, queues=["default", "other"], poll_interval=30)
    assert all(ended(client, other).state == "completed" for other in others)
    assert min(ran) - suspect.began[0] >= 0.7
    assert not suspect.go_on.is_set()


def test_two_suspects_run_one_after_the_other(
    client: awa.Client, start_worker: StartWorker, conn: Conn, suspect: Suspect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claimer, "SURVIVES_AFTER", 0.5)
    jobs = rescued(conn, "default", "default", "other")
    start_worker(client, threads=4, queues=["default", "other"], poll_interval=30)
    for _ in jobs:
        suspect.wait()
    first, second, third = sorted(suspect.began)
    assert second - first >= 0.5
    assert third - second >= 0.5
    suspect.go_on.set()
    wait_until(lambda: all(client.get(job).state == "completed" for job in jobs))
    assert {client.get(job).attempt for job in jobs} == {2}  # to be released costs none


def test_what_came_with_it_is_released(
    client: awa.Client, start_worker: StartWorker, conn: Conn, suspect: Suspect, ran: list[float]
) -> None:
    [job] = rescued(conn, "other")
    others = insert_work(client, "default", "default")
    start_worker(client, threads=4, queues=["default", "other"], poll_interval=0.02)  # one round trip asks both
    suspect.wait()
    wait_until(lambda: count(conn, RELEASED) == 2)
    assert ran == []
    suspect.go_on.set()
    for other in others:
        info = ended(client, other)
        assert (info.state, info.attempt, info.history) == ("completed", 1, [])
    wait_until(lambda: client.get(job).state == "completed")
    assert client.get(job).attempt == 2


def test_another_worker_answers_for_the_queue_meanwhile(
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    suspect: Suspect,
    ran: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claimer, "SURVIVES_AFTER", 30.0)
    monkeypatch.setattr(bell, "FIRST_POLL", 30.0)  # who is not woken does not look
    start_worker(client, threads=2, poll_interval=30)
    wait_for_bells(conn, "default")
    wait_until(lambda: count(conn, IDLE) == 1)  # it has looked, and sleeps
    rescued(conn, "default")
    suspect.wait()
    start_worker(client, threads=2, poll_interval=30)
    for _ in range(3):
        assert ended(client, insert_work(client, "default")[0], timeout=5).state == "completed"
    assert not suspect.go_on.is_set()


def test_a_full_queue_beside_it_keeps_no_thread_awake(
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    suspect: Suspect,
    ran: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claimer, "SURVIVES_AFTER", 1.0)
    looks: list[int] = []
    exchange = claimer.Claimer._exchange

    def counting(self: claimer.Claimer, flushes: Any, wanted: Any) -> Any:
        looks.append(len(wanted))
        return exchange(self, flushes, wanted)

    monkeypatch.setattr(claimer.Claimer, "_exchange", counting)
    engine.scalar(conn, "SELECT awa.limit_queue_v1('full', '{\"max_running\": 1}')")
    other = engine.register(conn)
    insert_work(client, "full", "full")
    assert len(engine.claim(conn, other, queue="full").members) == 1
    dead, jobs = begun(conn, "default")  # before the worker, whose polls would take it
    start_worker(client, threads=2, queues=["default", "full"], poll_interval=0.2)
    wait_until(lambda: len(looks) > 5)
    rescue(conn, dead, jobs)
    suspect.wait()
    looks.clear()
    time.sleep(0.8)
    assert len(looks) < 100, "for it is not asked meanwhile"
