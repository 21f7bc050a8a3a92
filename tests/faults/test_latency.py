"""A server as far away as in a cloud: 1 ms on the wire each way, 2 ms more at each flush of the WAL."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import awa
from awa.embedded import Binaries, Server
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from benchmarks.wire import longer_way
from tests.fixtures.db import short_directory, wait_until
from tests.fixtures.jobs import claimed_twice, count, count_available, count_running, worker_processes

pytestmark = pytest.mark.slow  # a server of its own, which syncs

Conn = psycopg.Connection[Any]

PATIENCE = 60.0

COMMIT_DELAY_US = 2000


@pytest.fixture
def database(binaries: Binaries) -> Iterator[str]:
    """A database whose server sleeps before each flush."""
    slow = {"commit_delay": COMMIT_DELAY_US, "commit_siblings": 0}
    with short_directory() as directory:
        server = Server(binaries, directory / "pg", settings=slow)
        try:
            server.start()
            migrate(server.url("postgres"), Schema())
            yield server.url("postgres")
        finally:
            server.stop("immediate")


@pytest.fixture
def far(database: str) -> Iterator[str]:
    """The address of ``database`` over a wire of 1 ms, which is a process of its own."""
    with short_directory() as directory, longer_way(database, directory, 1.0) as address:
        yield address


APP = """
    import time
    import awa

    client = awa.Client()

    @client.task()
    def quick(n: int) -> None: ...

    @client.task()
    def slow(n: int) -> None:
        time.sleep(0.02)

    @client.task()
    def writes(n: int) -> None:
        with client.connection() as conn, conn.transaction():
            conn.execute("INSERT INTO written VALUES (%s)", (n,))
            awa.current_job().complete(conn)

    @client.task(retry=awa.fixed(0.05))
    def again(n: int) -> None:
        if awa.current_job().attempt == 1:
            raise RuntimeError("once")
"""

KINDS = ("quick", "slow", "writes", "again")


def test_producers_and_workers_far_away_do_not_stall(tmp_path: Path, far: str, database: str, conn: Conn) -> None:
    """Two worker processes, four producers, signs of life that may hardly be late: everything runs, once.

    Guard: no step gives up what a round trip and a slow commit explain. With an answer waited for less than that
    (``REPLY_TIMEOUT`` of 3 ms) nothing is recorded in time; with a runtime taken for dead after 15 ms its attempts are
    rescued: both tried.
    """
    conn.execute("CREATE TABLE written (n integer)")
    _check_that_it_is_far(far)
    with worker_processes(tmp_path, far) as processes:
        processes.module(APP)
        command = ["app", "--threads", "4", "--heartbeat", "1", "--stale-after", "10", "--poll-interval", "0.5"]
        workers = [processes.start(*command) for _ in range(2)]
        inserted = _produce(far)
        wait_until(lambda: count(conn, "SELECT count(DISTINCT id) FROM awa.jobs") == inserted, PATIENCE)
        wait_until(lambda: _is_done(conn), PATIENCE)
        for worker in workers:
            worker.signal(signal.SIGTERM)
        assert [worker.wait(30) for worker in workers] == [0, 0], [worker.stderr for worker in workers]
        said = "\n".join(worker.stderr for worker in workers)
    assert claimed_twice(conn) == []
    outcomes = dict(conn.execute("SELECT outcome, count(*) FROM awa.attempt_ends GROUP BY 1").fetchall())
    assert outcomes.pop("released", 0) <= 2 * 4  # what had been claimed as the worker stopped, or behind a slow job
    assert outcomes == {"completed": inserted // 4, "retried": inserted // 4}
    assert count(conn, "SELECT count(*) FROM written") == inserted // 4
    for complaint in ("taken for dead", "were refused", "failed, again", "answered to nobody", "took back"):
        assert complaint not in said, said


def _is_done(conn: Conn) -> bool:
    waiting = count(conn, "SELECT count(*) FROM awa.waiting_jobs")
    return waiting + count_running(conn) + count_available(conn) == 0


def _check_that_it_is_far(far: str) -> None:
    """Least times, which no machine can undercut: of a round trip, and of one with a commit."""
    with psycopg.connect(far, autocommit=True) as conn:
        for statement, least in (("SELECT 1", 0.002), ("INSERT INTO written VALUES (0)", 0.004)):
            began = time.perf_counter()
            for _ in range(20):
                conn.execute(statement)
            assert (time.perf_counter() - began) / 20 >= least
        conn.execute("TRUNCATE written")


def _produce(far: str) -> int:
    """Four producers at once, each with jobs of every kind, in its own way; returns how many they insert."""
    client = awa.Client(far)
    each = 100

    def jobs() -> list[awa.NewJob]:
        return [awa.NewJob({"n": n}, kind=KINDS[n % 4]) for n in range(each)]

    def singles() -> None:
        for job in jobs():
            client.insert(job)

    def batches() -> None:
        for first in range(0, each, 10):
            client.insert_many(jobs()[first : first + 10])

    def copy() -> None:
        client.insert_many_copy(jobs())

    def lent() -> None:
        with psycopg.connect(far) as own:
            for number, job in enumerate(jobs()):
                client.insert(job, conn=own)
                if number % 7 == 6:
                    own.commit()

    producers: list[Callable[[], None]] = [singles, batches, copy, lent]
    failed: list[BaseException] = []

    def run(produce: Callable[[], None]) -> None:
        try:
            produce()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(produce,)) for produce in producers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    client.close()
    assert failed == []
    return each * len(producers)
