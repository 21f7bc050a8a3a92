"""The database goes away and comes back: what has ended meanwhile is held, and recorded once it is back.

Nothing here depends on how long it is away. Of a living fleet nobody is taken for dead, since a leader fences only
after it has led for two heartbeats, and every heartbeat is tried again within half of one.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psycopg
import pytest

import awa
from awa.embedded import Server, StopMode
from awa.errors import DatabaseNotFound
from awa.storage.line import Line, Reply
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from tests.fixtures.batches import successes
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import (
    StartWorker,
    WorkerProcess,
    WorkerProcesses,
    claimed_twice,
    count,
    count_available,
    count_running,
    terminate,
    worker_processes,
)
from tests.fixtures.wire import Wire, wired

Conn = psycopg.Connection[Any]

APP = """
import os, time
import awa

client = awa.Client()

def note(what):
    job = awa.current_job()
    with open("ran", "a") as ran:
        ran.write(f"{what} {job.id} {job.attempt}\\n")

@client.task()
def nap(seconds: float) -> None:
    note("begin")
    time.sleep(seconds)
    note("end")
"""

QUICK = ("--heartbeat", "0.5", "--stale-after", "2", "--poll-interval", "30")


@dataclass
class Fleet:
    """Worker processes of a server that can be stopped, which they reach over a wire."""

    server: Server
    wire: Wire
    processes: WorkerProcesses
    client: awa.Client
    workers: list[WorkerProcess] = field(default_factory=list)

    def start(self, number: int, *options: str) -> None:
        for _ in range(number):
            self.workers.append(self.processes.start("app:client", "--threads", "4", *QUICK, *options))
        wait_until(lambda: all(" runs " in worker.stderr for worker in self.workers), timeout=30)

    def ran(self, what: str) -> list[str]:
        path = self.processes.directory / "ran"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.removeprefix(what + " ") for line in lines if line.startswith(what + " ")]

    def connect(self) -> Conn:
        return psycopg.connect(self.server.url(), autocommit=True)

    def states(self, jobs: list[awa.Inserted]) -> list[str]:
        return [str(self.client.get(job.id).state) for job in jobs]


@pytest.fixture
def fleet(own_server: Server, tmp_path: Path) -> Iterator[Fleet]:
    migrate(own_server.url(), Schema())
    client = awa.Client(own_server.url())
    with wired(own_server.url()) as wire, worker_processes(tmp_path, wire.address) as processes:
        processes.module(APP)
        yield Fleet(own_server, wire, processes, client)
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "seconds"), [("fast", 5.0), ("immediate", 2.5)])
def test_what_ends_during_an_outage_is_recorded_after_it_and_nobody_is_rescued(
    mode: StopMode, seconds: float, fleet: Fleet
) -> None:
    """Guards: outcomes are kept until they are acknowledged; the heartbeat's pauses are half an interval at most.

    With pauses of five seconds both were fenced and every job ran twice: tried."""
    fleet.start(2)
    running = fleet.client.insert_many([awa.NewJob({"seconds": 1.0}, kind="nap") for _ in range(8)])
    wait_until(lambda: len(fleet.ran("begin")) == 8, timeout=20)
    waiting = fleet.client.insert_many([awa.NewJob({"seconds": 0.01}, kind="nap") for _ in range(20)])
    fleet.server.stop(mode)
    began = time.monotonic()
    wait_until(lambda: len(fleet.ran("end")) >= 8, timeout=20)
    time.sleep(max(began + seconds - time.monotonic(), 0.0))
    # three connections of each are tried again: one or two a second, the heartbeat about twice an interval
    rate = fleet.wire.accepted(began) / (time.monotonic() - began) / 2
    assert 0.5 < rate < 15, "connections a second of each worker"
    assert all(worker.process.poll() is None for worker in fleet.workers)
    fleet.server.start()
    jobs = running + waiting
    wait_until(lambda: set(fleet.states(jobs)) == {"completed"}, timeout=30)
    assert {fleet.client.get(job.id).attempt for job in jobs} == {1}
    assert sorted(fleet.ran("end")) == sorted(f"{job.id} 1" for job in jobs)
    later = fleet.client.insert({"seconds": 0}, kind="nap")  # they listen again: the next poll is half a minute away
    wait_until(lambda: fleet.states([later]) == ["completed"], timeout=20)
    time.sleep(2.5)  # longer than stale_after, and than a leader needs to fence
    with fleet.connect() as conn:
        assert count(conn, "SELECT count(*) FROM awa.gone_runtimes") == 0
        assert count(conn, "SELECT count(*) FROM awa.runtime_instances") == 2
        assert count(conn, "SELECT count(*) FROM awa.attempt_ends WHERE outcome <> 'released'") == 0
    for worker in fleet.workers:
        worker.signal(signal.SIGTERM)
    assert [worker.wait(30) for worker in fleet.workers] == [0, 0]


@pytest.mark.slow
def test_sigterm_during_an_outage_waits_for_the_database_as_long_as_the_grace_time(fleet: Fleet) -> None:
    """Exit code 0 says that nothing is left open, so it is 75 when the database stayed away."""
    fleet.start(1, "--shutdown-timeout", "30")
    jobs = fleet.client.insert_many([awa.NewJob({"seconds": 0.5}, kind="nap") for _ in range(3)])
    wait_until(lambda: len(fleet.ran("begin")) == 3, timeout=20)
    fleet.server.stop("fast")
    wait_until(lambda: len(fleet.ran("end")) == 3, timeout=20)
    fleet.workers[0].signal(signal.SIGTERM)
    time.sleep(1.0)
    assert fleet.workers[0].process.poll() is None
    fleet.server.start()
    assert fleet.workers[0].wait(30) == 0, fleet.workers[0].stderr
    assert fleet.states(jobs) == ["completed"] * 3
    assert {fleet.client.get(job.id).attempt for job in jobs} == {1}
    with fleet.connect() as conn:
        assert count(conn, "SELECT count(*) FROM awa.runtime_instances WHERE ended_at IS NULL") == 0

    fleet.start(2, "--shutdown-timeout", "1")
    [_, busy, idle] = fleet.workers
    kept = fleet.client.insert({"seconds": 1.0}, kind="nap")
    wait_until(lambda: len(fleet.ran("begin")) == 4, timeout=20)
    fleet.server.stop("fast")  # a crash might forget the claim, and the attempt with it
    wait_until(lambda: len(fleet.ran("end")) == 4, timeout=20)
    for worker in (busy, idle):
        worker.signal(signal.SIGTERM)
    codes = sorted(worker.wait(30) for worker in (busy, idle))
    assert codes[-1] == 75
    assert any("the database was away" in worker.stderr for worker in (busy, idle))
    assert all("Traceback" not in worker.stderr for worker in (busy, idle))
    fleet.server.start()
    fleet.start(1)
    wait_until(lambda: fleet.states([kept]) == ["completed"], timeout=30)
    assert fleet.client.get(kept.id).attempt == 2  # its outcome was lost: at least once


@pytest.mark.slow
def test_a_crash_loses_no_job_and_nothing_that_was_acknowledged(
    own_server: Server, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: completions commit synchronously, whatever the claim before them does. fsync is on.

    An outcome that is acknowledged as refused is not recorded: a crash may have forgotten its claim, and its job is
    claimed again. Nobody inserts at the second crash: that would flush what others commit asynchronously.
    """
    migrate(own_server.url(), Schema())
    client = awa.Client(own_server.url())
    lock = threading.Lock()
    inserted: set[int] = set()
    told: dict[tuple[int, int], bool] = {}
    """Claim and position of what was acknowledged -> whether it was recorded."""
    is_over = threading.Event()
    may_insert = threading.Event()

    @client.task()
    def work() -> None:
        time.sleep(0.001)

    exchange = Line.exchange

    def noting(self: Line, runtime: int, *args: Any) -> Reply:
        reply = exchange(self, runtime, *args)
        with lock:
            for settled in reply.settled:
                if settled.error is None:
                    told.update((member, member not in settled.stale) for member in successes(settled.flush))
        return reply

    monkeypatch.setattr(Line, "exchange", noting)

    def insert(number: int) -> None:
        jobs = client.insert_many([work.bind() for _ in range(number)])
        with lock:
            inserted.update(job.id for job in jobs)

    def produce() -> None:
        while not is_over.is_set():
            may_insert.wait()
            with suppress(psycopg.Error, DatabaseNotFound):
                insert(5)

    def check(conn: Conn, told: dict[tuple[int, int], bool]) -> None:
        there = set(conn.execute("SELECT claim_id, i FROM awa.completions CROSS JOIN unnest(idx) i").fetchall())
        assert {member for member, is_recorded in told.items() if is_recorded} <= there
        claims = {row[0] for row in conn.execute("SELECT claim_id FROM awa.claims").fetchall()}
        assert claims.isdisjoint(claim for (claim, _), is_recorded in told.items() if not is_recorded)

    start_worker(client, threads=4, heartbeat=0.5, stale_after=5)
    producers = [threading.Thread(target=produce, daemon=True) for _ in range(2)]
    for producer in producers:
        producer.start()
    for is_quiet in (False, True):
        may_insert.set()
        before = len(told)
        wait_until(lambda before=before: len(told) > before + 500, timeout=30)
        if is_quiet:
            may_insert.clear()
            insert(2000)
            before = len(told)
            wait_until(lambda before=before: len(told) > before + 300, timeout=30)
        own_server.stop("immediate")
        with lock:
            acknowledged, committed = dict(told), set(inserted)
        own_server.start()
        with psycopg.connect(own_server.url(), autocommit=True) as conn:
            check(conn, acknowledged)
            stored = {row[0] for row in conn.execute("SELECT id FROM awa.jobs").fetchall()}
            assert committed <= stored
    is_over.set()
    may_insert.set()
    for producer in producers:
        producer.join(60)
        assert not producer.is_alive()
    with psycopg.connect(own_server.url(), autocommit=True) as conn:
        wait_until(lambda: count_available(conn) == count_running(conn) == 0, timeout=30)
        assert count(conn, "SELECT count(*) FROM awa.attempt_ends WHERE outcome <> 'released'") == 0
        check(conn, told)
        assert claimed_twice(conn) == []
        assert count(conn, "SELECT count(*) FROM awa.gone_runtimes") == 0
    client.close()


def test_backends_that_are_ended_at_random_cost_nothing(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    """Guards: a flush is sent again under its number, a claim whose answer was lost is released, and nothing of it
    counts as an attempt."""
    lock = threading.Lock()
    runs: dict[int, int] = {}

    @client.task()
    def work() -> None:
        job = awa.current_job()
        with lock:
            runs[job.id] = runs.get(job.id, 0) + 1

    worker = start_worker(client, threads=4, heartbeat=0.2, stale_after=20)
    runtime = worker.runtime
    jobs: list[awa.Inserted] = []
    chance = random.Random(7)
    ended = dict.fromkeys(("worker", "heartbeat", "maintenance", "recovery"), 0)
    until = time.monotonic() + 4
    while time.monotonic() < until:
        jobs += client.insert_many([work.bind() for _ in range(20)])
        name = chance.choice(list(ended))
        ended[name] += terminate(conn, name)
        time.sleep(chance.uniform(0.0, 0.05))
    assert min(ended[name] for name in ("worker", "heartbeat", "maintenance")) > 0
    completed = "SELECT coalesce(sum(cardinality(idx)), 0) FROM awa.completions"
    wait_until(lambda: count(conn, completed) >= len(jobs) and count_running(conn) == 0, timeout=30)
    assert count(conn, completed) == len(jobs)
    assert runs == dict.fromkeys((job.id for job in jobs), 1)
    assert worker.runtime == runtime
    assert claimed_twice(conn) == []
    assert count(conn, "SELECT count(*) FROM awa.gone_runtimes") == 0


@pytest.mark.slow
def test_a_lock_that_keeps_the_heartbeat_waiting_does_not_pile_up_connections(
    client: awa.Client, start_worker: StartWorker, conn: Conn, database: str
) -> None:
    """Guard: GivenUp. Without it a process of the server waits on for every try: five of them after six seconds.

    The other holds ACCESS EXCLUSIVE on the table, for which each heartbeat's UPDATE waits; it is given up after two
    intervals, and the next connection ends it. Nobody can be fenced meanwhile: a fence reads that table.
    """

    @client.task()
    def work() -> None: ...

    worker = start_worker(client, threads=2, heartbeat=0.5, stale_after=20)
    runtime = worker.runtime
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s"
    wait_until(lambda: count(conn, query, "awa heartbeat") == 1, timeout=20)
    most = 0
    with psycopg.connect(database) as other:
        other.execute("LOCK TABLE awa.runtime_instances IN ACCESS EXCLUSIVE MODE")
        until = time.monotonic() + 6
        while time.monotonic() < until:
            most = max(most, count(conn, query, "awa heartbeat"))
            time.sleep(0.05)
    assert 1 <= most <= 2
    seen = conn.execute("SELECT last_seen_at FROM awa.runtime_instances").fetchone()
    wait_until(lambda: conn.execute("SELECT last_seen_at FROM awa.runtime_instances").fetchone() != seen, timeout=20)
    assert worker.runtime == runtime


@pytest.mark.slow
def test_a_client_rides_over_a_restart(own_server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Guards: the look at a pooled connection before it is lent: without it an insert failed for each. And the pool's
    attempts to connect begin anew for whoever waits, so their pauses stay short however long the server is away."""
    migrate(own_server.url(), Schema())
    client = awa.Client(own_server.url(), pool_size=5)
    barrier = threading.Barrier(5)

    def borrow() -> None:
        with client.connection():
            barrier.wait(20)

    threads = [threading.Thread(target=borrow) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    own_server.stop("fast")
    own_server.start()
    ids = [client.insert({}, kind="x").id for _ in range(10)]

    own_server.stop("immediate")
    landed: list[int] = []
    late = [threading.Thread(target=lambda: landed.append(client.insert({}, kind="x").id)) for _ in range(3)]
    for thread in late:
        thread.start()  # during the outage: it waits
    time.sleep(8.0)
    assert not landed
    tries = [record.created for record in caplog.records if "error connecting" in record.getMessage()]
    # ten connections at most, each tried twice a second at most; psycopg_pool's own pauses would be 1, 2 and 4 s by now
    assert 5 < len(tries) < 160
    assert max(later - earlier for earlier, later in pairwise(tries)) < 3.0
    own_server.start()
    for thread in late:
        thread.join(20)
    assert len(landed) == 3
    assert {client.get(job_id).state for job_id in ids + landed} == {"available"}
    client.close()


@pytest.mark.slow
def test_a_client_says_why_when_the_server_stays_away(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate(own_server.url(), Schema())
    client = awa.Client(own_server.url(), pool_size=1)
    client.insert({}, kind="x")
    monkeypatch.setattr(client._pool._mine(), "timeout", 1.0)
    with client._own(), pytest.raises(DatabaseNotFound, match=r"all 1 of this process are in use"):
        client.insert({}, kind="x")
    own_server.stop("fast")
    with pytest.raises(DatabaseNotFound, match="start the server"):
        client.insert({}, kind="x")
    client.close()


def test_what_a_handler_changed_on_a_borrowed_connection_does_not_stay(database: str) -> None:
    """Guard: what is returned is put right. Without it the next insert was rolled back, and nobody was told."""
    client = awa.Client(database, pool_size=1)
    with client.connection() as conn:
        conn.autocommit = False
        conn.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        conn.row_factory = psycopg.rows.dict_row  # type: ignore[assignment]
        conn.execute("SELECT 1")
    job = client.insert({}, kind="x")
    assert client.get(job.id).state == "available"
    with client.connection() as conn:
        assert conn.autocommit
        assert conn.execute("SHOW transaction_isolation").fetchone() == ("read committed",)
    client.close()
