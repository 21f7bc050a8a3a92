"""Asking a worker to be quiet: what it runs ends, nothing new starts, others take what it had not started."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import awa
from awa.storage.line import Line, Reply
from awa.worker.supervisor import Worker
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import (
    StartWorker,
    claimed_twice,
    count,
    count_available,
    count_running,
    ended,
    fence,
    rescue,
    terminate,
)
from tests.worker.test_claimer import BELLS, Slow, wait_for_bells

Conn = psycopg.Connection[Any]


@pytest.fixture
def slow(client: awa.Client) -> Iterator[Slow]:
    """A task whose handlers stay inside until they may go on."""
    slow = Slow(client)
    yield slow
    slow.go_on.set()


@pytest.fixture
def ran() -> list[int]:
    """The numbers of the jobs that ran."""
    return []


@pytest.fixture
def fast(client: awa.Client, ran: list[int]) -> Any:
    """A job that takes no time."""

    @client.task(kind="fast")
    def fast(n: int) -> None:
        ran.append(n)

    return fast


def quieten(client: awa.Client, worker: Worker) -> None:
    """Ask it, and wait until it has heard."""
    client.admin.quiet_runtime(worker.runtime)
    wait_until(lambda: worker._claimer.is_quiet)


def resume(client: awa.Client, worker: Worker) -> None:
    client.admin.resume_runtime(worker.runtime)
    wait_until(lambda: not worker._claimer.is_quiet)


def ignore_orders(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test says to its claimer holds, though the database says something else."""
    monkeypatch.setattr(worker._heartbeat._requests, "look", lambda conn, runtime: None)


def run_many(client: awa.Client, fast: Any, ran: list[int]) -> None:
    """As after these, a worker claims far ahead of what its threads run."""
    ended(client, client.insert_many([fast.bind(-1) for _ in range(2000)])[-1], timeout=20)
    wait_until(lambda: len(ran) == 2000)
    ran.clear()


def test_a_quiet_worker_ends_what_it_runs_and_leaves_the_rest_to_others(
    client: awa.Client, start_worker: StartWorker, conn: Conn, slow: Slow, fast: Any, ran: list[int]
) -> None:
    """Guard: it has claimed what it has not started, and producers ring for it."""
    worker = start_worker(client, threads=3, poll_interval=30)
    run_many(client, fast, ran)
    wait_for_bells(conn, "default")
    with conn.transaction():
        blocked = [client.insert(slow.task.bind(), conn=conn) for _ in range(2)]
    slow.wait(2)
    wait_for_bells(conn, "default")
    quieten(client, worker)
    wait_until(lambda: count(conn, BELLS, ["default"]) == 0)
    others = client.insert_many([fast.bind(n) for n in range(50)])
    assert worker.health().unhealthy == worker.health().unready == []

    helper = start_worker(client, threads=1, poll_interval=30)
    assert all(ended(client, job, timeout=5).runtime == helper.runtime for job in others)
    wait_until(lambda: (now := client.admin.get_runtime(worker.runtime)).health is not None and now.health.is_quiet)
    assert (now := client.admin.get_runtime(worker.runtime)).busy == 2 and not now.is_drained
    slow.go_on.set()  # it goes on to record, and tells sooner than the next tick would
    wait_until(lambda: client.admin.get_runtime(worker.runtime).is_drained)
    assert all(ended(client, job, timeout=5).runtime == worker.runtime for job in blocked)
    assert ended(client, client.insert(fast.bind(50))).runtime == helper.runtime
    quieten(client, helper)
    alone = client.insert(fast.bind(51))
    assert client.get(alone.id).state == "available"
    resume(client, worker)
    assert ended(client, alone).runtime == worker.runtime
    wait_for_bells(conn, "default")
    assert ended(client, client.insert(fast.bind(52))).runtime == worker.runtime
    assert (sorted(ran), claimed_twice(conn)) == (list(range(53)), [])


def test_with_every_thread_busy_it_claims_nothing_when_one_is_free(
    client: awa.Client, start_worker: StartWorker, slow: Slow, fast: Any
) -> None:
    """Guard: nobody leads there who could be told."""
    worker = start_worker(client, threads=1, poll_interval=30)
    job = client.insert(slow.task.bind())
    slow.wait()
    quieten(client, worker)
    waits = client.insert(fast.bind(1))
    slow.go_on.set()
    assert ended(client, job).state == "completed"
    assert client.get(waits.id).state == "available"
    resume(client, worker)
    assert ended(client, waits).state == "completed"


def test_an_order_that_meets_a_claim_releases_all_that_it_brings(
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    monkeypatch: pytest.MonkeyPatch,
    fast: Any,
    ran: list[int],
) -> None:
    """Guard: the look behind the claim."""
    is_asked = threading.Event()
    exchange = Line.exchange

    def interrupted(self: Line, *args: Any) -> Reply:
        reply = exchange(self, *args)
        if is_asked.is_set() and any(claimed.attempts for claimed in reply.claims):
            is_asked.clear()
            worker._claimer.be_quiet(True)
        return reply

    worker = start_worker(client, threads=2)
    ignore_orders(worker, monkeypatch)
    run_many(client, fast, ran)
    monkeypatch.setattr(Line, "exchange", interrupted)
    is_asked.set()
    jobs = client.insert_many([fast.bind(n) for n in range(8)])
    wait_until(lambda: not is_asked.is_set() and count_running(conn) == 0)
    assert (ran, count_available(conn)) == ([], 8)
    worker._claimer.be_quiet(False)
    assert all((job := ended(client, one)).attempt == 1 and not job.history for one in jobs)
    assert sorted(ran) == list(range(8))


class Interrupted:
    """A crew that is asked to be quiet when its leader hands out what it has claimed."""

    def __init__(self, worker: Worker) -> None:
        self.__dict__.update(crew=worker._crew, worker=worker, is_done=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.crew, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.crew, name, value)

    def refill(self, attempts: list[Any], token_after: int) -> None:
        if attempts and not self.is_done:
            self.__dict__["is_done"] = True
            self.worker._claimer.be_quiet(True)
        self.crew.refill(attempts, token_after)


def test_an_order_that_meets_the_handing_out_leaves_what_no_thread_has_begun(
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    monkeypatch: pytest.MonkeyPatch,
    fast: Any,
    ran: list[int],
) -> None:
    """Guard: the look behind the handing out; without it the threads run until one of them leads again."""

    @client.task(kind="nap")
    def nap(n: int) -> None:
        ran.append(n)
        time.sleep(0.05)

    worker = start_worker(client, threads=2)
    ignore_orders(worker, monkeypatch)
    run_many(client, fast, ran)
    worker._claimer.crew = Interrupted(worker)  # type: ignore[assignment]
    jobs = client.insert_many([nap.bind(n) for n in range(8)])
    wait_until(lambda: worker._claimer.is_quiet)
    wait_until(lambda: count_running(conn) == 0)
    assert len(ran) <= 2
    assert count_available(conn) == 8 - len(ran)
    worker._claimer.be_quiet(False)
    assert all(ended(client, job).attempt == 1 for job in jobs)
    assert sorted(ran) == list(range(8))


def test_quiet_and_resumed_all_the_time_it_loses_nothing(
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    monkeypatch: pytest.MonkeyPatch,
    fast: Any,
    ran: list[int],
) -> None:
    """Guard: a resume at once after a quiet; a token that is taken out of the inbox and not put back; a lost call."""
    workers = [start_worker(client, threads=3) for _ in range(2)]
    for worker in workers:
        ignore_orders(worker, monkeypatch)
    is_over = threading.Event()

    def turn(worker: Worker) -> None:
        while not is_over.is_set():
            worker._claimer.be_quiet(True)
            worker._claimer.be_quiet(True)
            worker._claimer.be_quiet(False)
            time.sleep(0.0005)

    turning = [threading.Thread(target=turn, args=(worker,)) for worker in workers]
    for thread in turning:
        thread.start()
    try:
        for batch in range(20):
            client.insert_many([fast.bind(batch * 100 + n) for n in range(100)])
            time.sleep(0.02)
    finally:
        is_over.set()
        for thread in turning:
            thread.join()
    wait_until(lambda: len(ran) >= 2000 and count_running(conn) == count_available(conn) == 0, timeout=20)
    assert [n for n, times in Counter(ran).items() if times != 1] == []
    assert [worker.health().unhealthy for worker in workers] == [[], []]


@pytest.mark.parametrize("is_first", [True, False], ids=["quiet before", "quiet meanwhile"])
def test_a_quiet_worker_stops_as_any(
    client: awa.Client, start_worker: StartWorker, conn: Conn, slow: Slow, fast: Any, is_first: bool
) -> None:
    """Guard: what empties the inbox for either must not take what tells threads to leave."""
    worker = start_worker(client, threads=3, shutdown_timeout=20)
    job = client.insert(slow.task.bind())
    slow.wait()
    if is_first:
        quieten(client, worker)
        waits = client.insert(fast.bind(1))
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    for _ in range(200):
        worker._claimer.be_quiet(True)
        time.sleep(0.001)
    slow.go_on.set()
    stopping.join(15)
    assert not stopping.is_alive()
    assert client.get(job.id).state == "completed"
    if is_first:
        assert client.get(waits.id).state == "available"
    assert client.admin.get_runtime(worker.runtime).state == "ended"
    assert count_running(conn) == 0


def test_it_stays_quiet_through_lost_connections_and_when_it_was_taken_for_dead(
    client: awa.Client, start_worker: StartWorker, conn: Conn, slow: Slow, fast: Any, ran: list[int]
) -> None:
    """Guard: a quiet worker claims nothing, so no claim tells it that it is gone."""
    worker = start_worker(client, threads=2, heartbeat=0.1, stale_after=30)
    blocked = client.insert(slow.task.bind())
    slow.wait()
    order = client.admin.quiet_runtime(worker.runtime, by="ada")
    wait_until(lambda: worker._claimer.is_quiet)
    waits = client.insert(fast.bind(1))
    for name in ("heartbeat", "worker", "maintenance", "report"):
        terminate(conn, name)
    at = conn.execute("SELECT clock_timestamp()").fetchall()[0][0]
    beaten = "SELECT count(*) FROM awa.runtime_instances WHERE last_seen_at > %s::timestamptz"
    wait_until(lambda: count(conn, beaten, at) == 1)

    before = worker.runtime
    fence(conn, before)
    wait_until(lambda: worker.runtime != before)
    rescue(conn, before)
    anew = client.admin.get_runtime(worker.runtime)
    assert (anew.quiet_at, anew.quiet_by) == (order.quiet_at, "ada")
    slow.go_on.set()
    time.sleep(1.0)  # a look is over
    assert (ran, client.get(waits.id).state, client.get(blocked.id).state) == ([], "available", "available")
    resume(client, worker)
    assert ended(client, waits).runtime == worker.runtime
    assert ended(client, blocked).attempt == 2
