"""Queues that are paused or at a limit: who starts the next job and when, and that nobody else is slowed."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import psycopg
import pytest

import awa
from awa.storage.line import Line, Reply, Wanted
from awa.worker import closed, report
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, ended
from tests.worker.test_claimer import BELLS, wait_for_bells
from tests.worker.test_queues import Gate, gate  # noqa: F401

Conn = psycopg.Connection[Any]


@pytest.fixture
def work(client: awa.Client) -> awa.Task[[], None]:
    """A job that does nothing."""

    @client.task(kind="work")
    def work() -> None: ...

    return work


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Wanted]:
    """What every line asks for, as it does."""
    asked: list[Wanted] = []
    exchange = Line.exchange

    def counting(self: Line, runtime: int, flushes: Any, wanted: Any) -> Reply:
        asked.extend(wanted)
        return exchange(self, runtime, flushes, wanted)

    monkeypatch.setattr(Line, "exchange", counting)
    return asked


@pytest.fixture
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue is asked again after a poll interval, unless something happens."""
    monkeypatch.setattr(closed, "GROWTH", 1e6)


def test_a_paused_queue_has_no_bell_and_starts_at_once_when_it_is_resumed(
    client: awa.Client, start_worker: StartWorker, conn: Conn, work: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "awa.worker")
    worker = start_worker(client, queues=["a", "b"], poll_interval=30)
    wait_for_bells(conn, "a", "b")
    client.admin.pause_queue("a")
    wait_until(lambda: count(conn, BELLS, ["a"]) == 0)
    job = client.insert(work.bind(), queue="a")
    # the other one is served as before, with its bell
    wait_for_bells(conn, "b")
    assert ended(client, client.insert(work.bind(), queue="b"), timeout=5).state == "completed"
    wait_for_bells(conn, "b")
    assert client.get(job.id).state == "available"
    assert worker.health().answer("/readyz")[0] == 200  # type: ignore[index]
    client.admin.resume_queue("a")
    assert ended(client, job, timeout=5).state == "completed"
    wait_for_bells(conn, "a", "b")
    said = [one.message for one in caplog.records if one.message.startswith("queue a")]
    assert said == ["queue a is paused: nothing of it starts until it is resumed", "queue a is not paused any more"]


def test_a_queue_that_was_paused_before_the_start_is_asked_once_a_poll_interval(
    client: awa.Client, start_worker: StartWorker, conn: Conn, work: Any, asked: list[Wanted]
) -> None:
    client.admin.pause_queue("a")
    job = client.insert(work.bind(), queue="a")
    start_worker(client, queues=["a", "b"], poll_interval=0.4)
    wait_for_bells(conn, "b")
    asked.clear()
    began = time.monotonic()
    time.sleep(2.0)
    seconds = time.monotonic() - began
    assert 1 <= sum(want.queue == "a" for want in asked) <= seconds / 0.4 + 2
    assert not any(want.arm for want in asked if want.queue == "a")
    # the call for help is lost
    conn.execute("UPDATE awa.queue_meta SET paused_at = NULL, paused_by = NULL, pause_reason = NULL")
    assert ended(client, job, timeout=5).state == "completed"
    wait_for_bells(conn, "a", "b")


def test_the_process_that_records_an_end_starts_the_next_without_delay(
    client: awa.Client, start_worker: StartWorker, no_polls: None
) -> None:
    client.admin.set_limits("q", max_running=1)
    most, inside, ran = [0], [0], []
    lock = threading.Lock()

    @client.task()
    def one(n: int) -> None:
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.001)
        with lock:
            inside[0] -= 1
            ran.append(n)

    jobs = client.insert_many([awa.NewJob(one.bind(n), queue="q") for n in range(60)])
    start_worker(client, threads=4, queues=["other", "q"], poll_interval=30)
    assert all(ended(client, job, timeout=30).state == "completed" for job in jobs)  # it would take half an hour
    assert most == [1]
    assert ran == sorted(ran)


def test_nobody_holds_the_bell_of_a_full_queue(
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    gate: Gate,  # noqa: F811
    asked: list[Wanted],
) -> None:
    @client.task()
    def slow() -> None:
        gate.enter("slow")

    client.admin.set_limits("q", max_running=1)
    for _ in range(2):
        start_worker(client, threads=2, queues=["q"], poll_interval=0.5)
    wait_for_bells(conn, "q")
    jobs = [client.insert(slow.bind(), queue="q") for _ in range(4)]
    gate.wait_for("slow", 1)
    wait_until(lambda: count(conn, BELLS, ["q"]) == 0)
    time.sleep(1.0)  # both ask more and more slowly
    asked.clear()
    began = time.monotonic()
    time.sleep(1.5)
    assert len(asked) <= 2 * ((time.monotonic() - began) / 0.5 + 2)
    assert count(conn, BELLS, ["q"]) == 0
    gate.let_out(4)
    assert all(ended(client, job, timeout=10).state == "completed" for job in jobs)
    assert gate.most["slow"] == 1
    wait_for_bells(conn, "q")


def test_the_next_starts_elsewhere_when_the_worker_that_ran_the_last_one_stops(
    client: awa.Client,
    start_worker: StartWorker,
    no_polls: None,
    gate: Gate,  # noqa: F811
) -> None:
    @client.task()
    def slow() -> None:
        gate.enter("slow")

    client.admin.set_limits("q", max_running=1)
    first = start_worker(client, threads=2, queues=["q"], poll_interval=30)
    job = client.insert(slow.bind(), queue="q")
    gate.wait_for("slow", 1)
    after = client.insert(slow.bind(), queue="q")
    wait_until(lambda: "q" in first._claimer._closed.states)
    second = start_worker(client, threads=2, queues=["q"], poll_interval=30)
    wait_until(lambda: "q" in second._claimer._closed.states)
    time.sleep(0.2)
    stopper = threading.Thread(target=first.stop)
    stopper.start()
    wait_until(lambda: first.health().unready)
    gate.let_out(2)
    assert ended(client, after, timeout=10).state == "completed"
    stopper.join()
    assert client.get(job.id).state == "completed"
    assert gate.most["slow"] == 1


def test_a_rate_is_kept_with_one_claim_for_each_wait(
    client: awa.Client, start_worker: StartWorker, conn: Conn, work: Any, asked: list[Wanted]
) -> None:
    client.admin.set_limits("q", rate_limit=awa.RateLimit(10, burst=1))
    started: list[float] = []

    @client.task()
    def note() -> None:
        started.append(time.monotonic())

    start_worker(client, threads=4, queues=["q", "other"], poll_interval=30)
    wait_for_bells(conn, "q", "other")
    asked.clear()
    jobs = client.insert_many([awa.NewJob(note.bind(), queue="q") for _ in range(15)])
    for _ in range(3):  # the other queue goes on as before
        wait_for_bells(conn, "other")
        assert ended(client, client.insert(work.bind(), queue="other"), timeout=5).state == "completed"
    assert all(ended(client, job, timeout=20).state == "completed" for job in jobs)
    assert started[-1] - started[0] >= 1.35  # fourteen tenths of a second, less what the clocks' steps take away
    # each start is followed by a look that finds nothing, and an end that is recorded may cost one
    assert sum(want.queue == "q" for want in asked) <= 8 * 15


def test_limits_that_are_lifted_are_noticed_at_once(
    client: awa.Client,
    start_worker: StartWorker,
    no_polls: None,
    gate: Gate,  # noqa: F811
) -> None:
    @client.task()
    def slow() -> None:
        gate.enter("slow")

    client.admin.set_limits("q", max_running=1)
    start_worker(client, threads=4, queues=["q"], poll_interval=30)
    client.insert_many([awa.NewJob(slow.bind(), queue="q") for _ in range(3)])
    gate.wait_for("slow", 1)
    time.sleep(0.5)
    assert gate.inside["slow"] == 1
    client.admin.set_limits("q", max_running=2)
    gate.wait_for("slow", 2, timeout=5)
    client.admin.clear_limits("q")
    gate.wait_for("slow", 3, timeout=5)


def test_what_code_declares_holds_before_the_first_claim(
    client: awa.Client,
    start_worker: StartWorker,
    gate: Gate,  # noqa: F811
) -> None:
    @client.task()
    def slow() -> None:
        gate.enter("slow")

    @client.task(queue="elsewhere")
    def other() -> None: ...

    client.queue("q", max_running=2)
    client.queue("elsewhere", rate_limit=awa.RateLimit(5))
    client.insert_many([awa.NewJob(slow.bind(), queue="q") for _ in range(5)])
    start_worker(client, threads=4, queues=["q"])
    gate.wait_for("slow", 2)
    time.sleep(0.3)
    assert gate.most["slow"] == 2
    assert client.admin.get_queue("q").declared == awa.Limits(max_running=2)
    assert client.admin.get_queue("elsewhere").limits.rate_limit == awa.RateLimit(5)


def test_what_cannot_be_stored_at_the_start_is_stored_later(
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(report, "AGAIN", 0.05)
    lock = "pg_advisory_{}(hashtextextended('awa.queue:q', 0))"

    @client.task(queue="q")
    def work() -> None: ...

    client.queue("q", max_running=2)
    conn.execute(f"SELECT {lock.format('lock')}")
    start_worker(client, queues=["other"])
    assert "what is declared of queue q is not stored yet" in caplog.text
    conn.execute(f"SELECT {lock.format('unlock')}")
    wait_until(lambda: client.admin.get_queue("q").limits.max_running == 2)
