"""Which jobs a worker takes, and how many at once."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import awa
from awa import NewJob
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, count_running, ended, in_state

Conn = psycopg.Connection[Any]


class Gate:
    """Handlers that stay inside until they are let out; counts those inside."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._opened = 0
        self.inside: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.passed = 0

    def enter(self, name: str) -> None:
        with self._changed:
            self.inside[name] += 1
            self.most[name] = max(self.most[name], self.inside[name])
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._opened > 0, timeout=30)
            self._opened -= 1
            self.inside[name] -= 1
            self.passed += 1
            self._changed.notify_all()

    def let_out(self, number: int = 1) -> None:
        with self._changed:
            self._opened += number
            self._changed.notify_all()

    def wait_for(self, name: str, number: int, timeout: float = 10.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.inside[name] >= number, timeout=timeout), self.inside

    def wait_passed(self, number: int, timeout: float = 20.0) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.passed >= number, timeout=timeout), self.passed


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.let_out(1000)


def test_max_workers_of_a_queue_is_never_exceeded(client: awa.Client, start_worker: StartWorker, gate: Gate) -> None:
    @client.task()
    def work() -> None:
        gate.enter(awa.current_job().queue)

    start_worker(client, threads=6, queues=["narrow:2", "wide"])
    client.insert_many([NewJob(work.bind(), queue=queue) for queue in ("narrow", "wide") for _ in range(20)])
    gate.wait_for("narrow", 2)
    gate.wait_for("wide", 4)
    for passed in range(1, 31):
        gate.let_out()
        gate.wait_passed(passed)
    gate.let_out(20)
    gate.wait_passed(40)
    assert gate.most["narrow"] == 2
    assert gate.most["wide"] >= 4


def test_threads_that_are_kept_for_a_queue_are_free_for_it(
    client: awa.Client, start_worker: StartWorker, gate: Gate
) -> None:
    @client.task()
    def work() -> None:
        gate.enter(awa.current_job().queue)

    start_worker(client, threads=4, queues=["kept:min=2", "other"], poll_interval=30)
    client.insert_many([NewJob(work.bind(), queue="other") for _ in range(9)])
    gate.wait_for("other", 2)
    for passed in range(1, 7):  # however many of the others end meanwhile
        gate.let_out()
        gate.wait_passed(passed)
        gate.wait_for("other", 2)
    client.insert_many([NewJob(work.bind(), queue="kept") for _ in range(2)])
    gate.wait_for("kept", 2)
    assert gate.most["other"] == 2


def test_busy_queues_have_threads_by_weight_and_one_alone_has_all(
    client: awa.Client, start_worker: StartWorker, gate: Gate
) -> None:
    @client.task()
    def work() -> None:
        gate.enter(awa.current_job().queue)

    client.insert_many([NewJob(work.bind(), queue=queue) for queue in ("a", "b") for _ in range(30)])
    worker = start_worker(client, threads=8, queues=["a:weight=3", "b", "c:weight=50"])
    gate.wait_for("a", 5)  # 6, when the threads start at once: the shares are of those that are there
    gate.wait_for("b", 2)
    wait_until(lambda: len(worker.running) == 8)
    for passed in range(1, 17):
        gate.let_out()
        gate.wait_passed(passed)
    wait_until(lambda: len(worker.running) == 8)
    assert 4 <= gate.inside["a"] <= 8
    gate.let_out(100)
    gate.wait_passed(60)
    gate.let_out(-(100 - 44))
    client.insert_many([NewJob(work.bind(), queue="b") for _ in range(8)])
    gate.wait_for("b", 8)


def test_a_narrow_queue_leaves_its_other_jobs_to_another_worker(
    client: awa.Client, start_worker: StartWorker, gate: Gate
) -> None:
    @client.task()
    def work() -> None:
        gate.enter("all")

    start_worker(client, threads=4, queues=["q:1"])
    client.insert_many([NewJob(work.bind(), queue="q") for _ in range(2)])
    gate.wait_for("all", 1)
    start_worker(client, threads=4, queues=["q:1"])
    gate.wait_for("all", 2)


def test_unknown_kinds_are_left_for_a_worker_that_knows_them(
    database: str, client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    other = awa.Client(database)
    ran: list[int] = []

    @client.task(kind="known")
    def known() -> None: ...

    @other.task(kind="unknown")
    def unknown(n: int) -> None:
        ran.append(n)

    jobs = [client.insert(known.bind()) if n % 2 else other.insert(unknown.bind(n)) for n in range(20)]
    start_worker(client, threads=1)
    assert all(ended(client, job).state == "completed" for job in jobs[1::2])
    for job in jobs[::2]:
        info = in_state(client, job, "available")
        assert (info.attempt, info.history) == (1, [])
    assert client.get(jobs[0].id).waits_for == "kind"
    start_worker(other, threads=1, poll_interval=0.2)
    assert all(ended(client, job).state == "completed" for job in jobs[::2])
    assert ran == list(range(0, 20, 2))
    assert client.get(jobs[0].id).attempt == 1
    other.close()


def test_a_worker_of_another_queue_takes_nothing(client: awa.Client, start_worker: StartWorker, conn: Conn) -> None:
    @client.task()
    def work() -> None: ...

    theirs = client.insert(work.bind(), queue="theirs")
    start_worker(client, queues=["ours"])
    assert ended(client, client.insert(work.bind(), queue="ours")).state == "completed"
    assert client.get(theirs.id).state == "available"


def test_priority_goes_first_and_then_the_order_of_insertion(client: awa.Client, start_worker: StartWorker) -> None:
    ran: list[tuple[int, int]] = []

    @client.task()
    def work(n: int) -> None:
        ran.append((awa.current_job().priority, n))

    jobs = client.insert_many([NewJob(work.bind(n), priority=4 - n % 4) for n in range(40)])
    jobs += [client.insert(work.bind(n), priority=4 - n % 4) for n in range(40, 60)]
    start_worker(client, threads=1)
    assert all(ended(client, job).state == "completed" for job in jobs)
    assert ran == sorted(ran)


def test_slow_jobs_are_claimed_one_by_one(
    client: awa.Client, start_worker: StartWorker, conn: Conn, gate: Gate
) -> None:
    @client.task()
    def work() -> None:
        gate.enter("all")

    start_worker(client, threads=1)
    client.insert_many([work.bind() for _ in range(6)])
    gate.wait_for("all", 1)
    assert count_running(conn) == 1
    start_worker(client, threads=2)
    gate.wait_for("all", 3)
    assert count_running(conn) == 3
    gate.let_out(6)
    gate.wait_passed(6)


def test_work_flows_through_many_threads_and_workers_once(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    ran: Counter[int] = Counter()
    lock = threading.Lock()

    @client.task()
    def work(n: int) -> None:
        with lock:
            ran[n] += 1

    for _ in range(3):
        start_worker(client, threads=3)
    client.insert_many_copy(work.bind(n) for n in range(3000))
    wait_until(lambda: len(ran) == 3000, timeout=20)
    wait_until(lambda: count_running(conn) == 0)
    assert set(ran.values()) == {1}
    assert count(conn, "SELECT count(*) FROM awa.attempt_ends") == 0


def test_slow_jobs_behind_many_fast_ones_are_shared(
    client: awa.Client, start_worker: StartWorker, conn: Conn, gate: Gate
) -> None:
    @client.task()
    def fast() -> None: ...

    @client.task()
    def slow() -> None:
        gate.enter("slow")

    start_worker(client, threads=2)
    for job in client.insert_many([fast.bind() for _ in range(2000)])[-10:]:
        ended(client, job)
    client.insert_many([slow.bind() for _ in range(4)])
    gate.wait_for("slow", 2)
    start_worker(client, threads=2)
    gate.wait_for("slow", 4, timeout=5)


def test_a_worker_says_whose_queues_it_does_not_serve(
    client: awa.Client, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards who gives a task a queue and starts a worker without naming it: nothing would ever run, and silently."""

    @client.task(queue="mail")
    def send() -> None: ...

    @client.task()
    def other() -> None: ...

    with caplog.at_level(logging.INFO, "awa.worker"):
        start_worker(client, queues=["default"])
    assert "leaves to others the queues of some of its tasks: mail;" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "awa.worker"):
        start_worker(client, queues=["default", "mail"])
    assert "leaves to others" not in caplog.text
