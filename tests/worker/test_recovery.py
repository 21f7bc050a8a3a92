"""A worker that is taken for dead, or loses its connections or its server, goes on; nothing is lost or run at once."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import awa
from awa.embedded import Server
from awa.storage.line import Line
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import (
    StartWorker,
    claimed_twice,
    count,
    count_available,
    count_running,
    ended,
    fence,
    in_state,
    rescue,
    terminate,
)
from tests.fixtures.proxy import Proxy, What

Conn = psycopg.Connection[Any]


class Ledger:
    """What ran, by number, and whether any ran twice at one time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: set[int] = set()
        self.ran: Counter[int] = Counter()
        self.overlaps: list[int] = []

    def run(self, n: int, pause: threading.Event | None = None, seconds: float = 0.0) -> None:
        with self._lock:
            if n in self._inside:
                self.overlaps.append(n)
            self._inside.add(n)
        if pause is not None:
            pause.wait(seconds)
        with self._lock:
            self._inside.discard(n)
            self.ran[n] += 1


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """Set at the end of the test, so that no handler outlives it."""
    event = threading.Event()
    yield event
    event.set()


def test_a_fenced_worker_registers_anew_drops_its_results_and_goes_on(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    started = threading.Semaphore(0)
    go_on = threading.Event()
    attempts: list[int] = []

    @client.task()
    def work() -> None:
        attempts.append(awa.current_job().attempt)
        started.release()
        assert go_on.wait(10)

    worker = start_worker(client, threads=1, poll_interval=30)  # nobody looks while the handler runs
    job = client.insert(work.bind())
    assert started.acquire(timeout=10)
    first = worker.runtime
    fence(conn, first)
    rescue(conn, first)
    assert client.get(job.id).state == "available"
    go_on.set()
    info = ended(client, job, timeout=5)
    assert (info.state, info.attempt, attempts) == ("completed", 2, [1, 2])
    assert [h["outcome"] for h in info.history] == ["rescued"]
    assert worker.runtime > first
    assert count_running(conn) == 0
    assert ended(client, client.insert(work.bind()), timeout=5).state == "completed"


def test_the_handler_of_a_fenced_worker_is_told(client: awa.Client, start_worker: StartWorker, conn: Conn) -> None:
    started = threading.Event()
    never = threading.Event()
    told = threading.Event()

    @client.task()
    def work() -> None:
        job = awa.current_job()
        started.set()
        if job.attempt == 1:
            wait_until(lambda: job.cancelled)
            told.set()

    worker = start_worker(client, poll_interval=30, heartbeat=0.1, stale_after=30)
    job = client.insert(work.bind())
    assert started.wait(10)
    fence(conn, worker.runtime)
    assert told.wait(5)
    never.set()
    rescue(conn, min(row[0] for row in conn.execute("SELECT id FROM awa.runtime_instances").fetchall()))
    assert ended(client, job).attempt == 2


@pytest.mark.parametrize("fails", [True, False])
def test_an_outcome_that_comes_after_the_rescue_changes_nothing(
    client: awa.Client, start_worker: StartWorker, conn: Conn, fails: bool
) -> None:
    started = threading.Event()
    go_on = threading.Event()

    @client.task(max_attempts=1)
    def work() -> None:
        started.set()
        assert go_on.wait(10)
        if fails:
            raise ValueError("late")

    worker = start_worker(client)
    job = client.insert(work.bind())
    assert started.wait(10)
    runtime = worker.runtime
    fence(conn, runtime)
    rescue(conn, runtime)
    go_on.set()
    wait_until(lambda: worker.runtime != runtime)
    worker.stop()
    info = client.get(job.id)
    assert (info.state, info.attempt) == ("failed", 1)
    assert [h["type"] for h in info.history] == ["WorkerDied"]
    assert "its worker died" in info.history[0]["text"]


def test_a_fence_under_load_loses_nothing(
    client: awa.Client, start_worker: StartWorker, conn: Conn, ledger: Ledger, never: threading.Event
) -> None:
    @client.task()
    def work(n: int) -> None:
        ledger.run(n, never, 0.001)

    worker = start_worker(client, threads=4)
    client.insert_many_copy(work.bind(n) for n in range(2000))
    for _ in range(4):
        runtime = worker.runtime
        before = sum(ledger.ran.values())
        wait_until(lambda before=before: sum(ledger.ran.values()) >= min(before + 100, 2000))
        fence(conn, runtime)
        wait_until(lambda runtime=runtime: worker.runtime != runtime)
        rescue(conn, runtime)
    wait_until(lambda: len(ledger.ran) == 2000 and count_running(conn) + count_available(conn) == 0, timeout=20)
    assert claimed_twice(conn) == []


def test_killing_the_claim_connection_at_random_loses_nothing_and_runs_nothing_twice_at_once(
    client: awa.Client, start_worker: StartWorker, conn: Conn, ledger: Ledger, never: threading.Event
) -> None:
    @client.task()
    def work(n: int) -> None:
        ledger.run(n, never, 0.001)

    start_worker(client, threads=4, poll_interval=0.2)
    start_worker(client, threads=4, poll_interval=0.2)
    dice = random.Random(7)
    killed = 0
    for burst in range(40):
        client.insert_many([work.bind(burst * 50 + n) for n in range(50)])
        target = dice.randrange(burst * 50, burst * 50 + 50)
        wait_until(lambda target=target: len(ledger.ran) > min(target, 1990) - 200, timeout=20)
        killed += terminate(conn, "worker")
    wait_until(lambda: len(ledger.ran) == 2000, timeout=30)
    wait_until(lambda: count_running(conn) + count_available(conn) == 0)
    assert killed >= 5
    assert ledger.overlaps == []
    # the connection dies, not the worker: it knows the outcome of every handler it ran
    assert {n: times for n, times in ledger.ran.items() if times != 1} == {}
    assert claimed_twice(conn) == []
    assert conn.execute("SELECT count(*) FROM awa.gone_runtimes").fetchone() == (0,)


CLAIM, SETTLE = b"\0awa_claim\0", b"\0awa_settle\0"
"""In the message that runs the prepared statement, and in no other."""

losses = pytest.mark.parametrize("what", ["answer", "request", "connection"])


@pytest.fixture
def far(proxied: str) -> Iterator[awa.Client]:
    """A client whose connections, and those of its workers, can be cut."""
    client = awa.Client(proxied)
    yield client
    client.close()


@losses
def test_a_claim_that_is_lost_on_its_way_is_given_back_and_runs_once(
    far: awa.Client, proxy: Proxy, start_worker: StartWorker, conn: Conn, ledger: Ledger, what: What
) -> None:
    """Guard: the doubt after a lost connection: end its backend, lock the runtime, give back what nobody knows of.

    Without it the jobs stay open until their worker ends; without the end of the backend, the claim that comes late is
    made for nobody. Both tried.
    """

    @far.task()
    def work(n: int) -> None:
        ledger.run(n)

    jobs = far.insert_many([work.bind(n) for n in range(4)])
    loss = proxy.lose(what, CLAIM)
    worker = start_worker(far, threads=4)
    loss.wait()
    for job in jobs:
        info = ended(far, job)
        assert (info.state, info.attempt, info.history) == ("completed", 1, [])
    assert dict(ledger.ran) == dict.fromkeys(range(4), 1)
    released = count(conn, "SELECT count(*) FROM awa.attempt_ends WHERE outcome = 'released'")
    assert (released > 0) == (what == "answer")
    worker.stop()
    far.insert(work.bind(4))
    loss.let_go()
    assert (count_running(conn), count_available(conn)) == (0, 1)
    assert claimed_twice(conn) == []


@losses
def test_a_flush_that_is_lost_on_its_way_is_recorded_once(
    far: awa.Client, proxy: Proxy, start_worker: StartWorker, conn: Conn, ledger: Ledger, what: What
) -> None:
    """Guard: a flush in doubt is sent again with its number, which is unique with its claim.

    With a new number each time the outcomes whose first sending was recorded come twice: tried.
    """

    @far.task(retry=awa.fixed(3600))
    def work(n: int) -> None:
        ledger.run(n)
        if n % 2:
            raise ValueError("odd")

    start_worker(far, threads=2)
    for n in range(6):
        loss = proxy.lose(what, SETTLE)
        job = far.insert(work.bind(n))
        loss.wait()
        info = in_state(far, job, "retryable" if n % 2 else "completed")
        loss.let_go()
        assert (info.attempt, len(info.history)) == ((2, 1) if n % 2 else (1, 0))
    assert dict(ledger.ran) == dict.fromkeys(range(6), 1)
    wait_until(lambda: count_running(conn) + count_available(conn) == 0)
    assert count(conn, "SELECT count(*) FROM awa.completions") == 3
    assert count(conn, "SELECT count(*) FROM awa.attempt_ends WHERE outcome = 'retried'") == 3


def test_long_args_that_cannot_be_fetched_are_not_lost(
    client: awa.Client, start_worker: StartWorker, conn: Conn, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    failures: list[BaseException] = []
    fetch = Line.fetch_args

    def failing(self: Line, *args: Any) -> None:
        if not failures:
            terminate(conn, "worker")
            try:
                fetch(self, *args)
            except psycopg.OperationalError as error:
                failures.append(error)
                raise
        fetch(self, *args)

    monkeypatch.setattr(Line, "fetch_args", failing)

    @client.task()
    def work(n: int, text: str) -> None:
        ledger.run(n)

    jobs = client.insert_many([work.bind(n, "x" * 150_000) for n in range(3)])
    start_worker(client, threads=3)
    for job in jobs:
        info = ended(client, job)
        assert (info.state, info.attempt) == ("completed", 1)
    assert failures
    assert dict(ledger.ran) == dict.fromkeys(range(3), 1)
    wait_until(lambda: count_running(conn) == 0)


@pytest.mark.parametrize("name", ["heartbeat", "maintenance", "worker"])
def test_each_connection_is_opened_again(client: awa.Client, start_worker: StartWorker, conn: Conn, name: str) -> None:
    @client.task()
    def work() -> None: ...

    def backends() -> set[int]:
        query = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = %s"
        return {pid for (pid,) in conn.execute(query, [f"awa {name}"]).fetchall()}

    start_worker(client, heartbeat=0.2, stale_after=30, poll_interval=30)
    for _ in range(3):
        before = wait_until(backends)
        terminate(conn, name)
        wait_until(lambda before=before: backends() - before)
        wait_until(lambda before=before: not backends() & before)
    seen = conn.execute("SELECT last_seen_at FROM awa.runtime_instances").fetchone()
    wait_until(lambda: conn.execute("SELECT last_seen_at FROM awa.runtime_instances").fetchone() != seen)
    soon = client.insert(work.bind(), delay=0.3)
    now = client.insert(work.bind())
    assert ended(client, now, timeout=5).state == "completed"
    assert ended(client, soon, timeout=5).state == "completed"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_server_that_restarts_under_load_loses_nothing(
    own_server: Server, start_worker: StartWorker, ledger: Ledger, never: threading.Event, mode: Any
) -> None:
    database = own_server.url("awa")
    migrate(database, Schema())
    client = awa.Client(database)

    @client.task()
    def work(n: int) -> None:
        ledger.run(n, never, 0.002)

    workers = [start_worker(client, threads=3, poll_interval=0.2) for _ in range(2)]
    with psycopg.connect(database) as conn:
        client.insert_many([work.bind(n) for n in range(3000)], conn=conn)
    for target in (300, 1200):
        wait_until(lambda target=target: len(ledger.ran) >= target, timeout=20)
        own_server.stop(mode)
        assert all(worker.runtime for worker in workers)
        own_server.start()
    wait_until(lambda: len(ledger.ran) == 3000, timeout=40)
    client.close()
    with psycopg.connect(database, autocommit=True) as conn:
        wait_until(lambda: count_running(conn) + count_available(conn) == 0, timeout=20)
        assert claimed_twice(conn) == []
    if mode == "fast":
        assert {n: times for n, times in ledger.ran.items() if times != 1} == {}
