"""The tick on which a worker tells how it is: what it says, to whom, and that it is in nobody's way."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

import awa
from awa.storage.runtime_control import ServedQueue
from awa.storage.schema import Schema
from awa.worker import report
from awa.worker.report import Report, Snapshot
from awa.worker.vitals import Health
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, ended, fence
from tests.storage.test_runtimes import register

Conn = psycopg.Connection[Any]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks come fast."""
    monkeypatch.setattr(report, "FIRST_AFTER", 0.0)
    monkeypatch.setattr(report, "SNAPSHOT_INTERVAL", 0.05)


@pytest.mark.usefixtures("often")
def test_a_worker_tells_how_it_is(client: awa.Client, start_worker: StartWorker) -> None:
    started, go_on = threading.Semaphore(0), threading.Event()

    @client.task(kind="b")
    def stays() -> None:
        started.release()
        assert go_on.wait(30)

    @client.task(kind="a")
    def quick() -> None: ...

    try:
        worker = start_worker(client, queues=["default", "mail:3"], threads=3, heartbeat=0.5, stale_after=7)
        told = client.admin.get_runtime(worker.runtime)
        assert (told.state, told.threads, told.kinds, told.stale_after) == ("live", 3, ["a", "b"], 7.0)
        jobs = [client.insert(stays.bind()) for _ in range(2)]
        for _ in jobs:
            assert started.acquire(timeout=5)
        wait_until(lambda: (now := client.admin.get_runtime(worker.runtime)).busy == 2 and now.is_leader)
        told = client.admin.get_runtime(worker.runtime)
        assert told.queues == [ServedQueue("default", in_flight=2), ServedQueue("mail", 3, in_flight=0)]
        assert told.health is not None and told.health.unhealthy == []
        assert set(told.health.loops) == {"claimer", "heartbeat", "maintenance", "report", "watch"}
        go_on.set()
        for job in jobs:
            ended(client, job)
        wait_until(lambda: (now := client.admin.get_runtime(worker.runtime)).busy == 0 and now.queues[0].in_flight == 0)
        wait_until(lambda: (now := client.admin.get_runtime(worker.runtime).health) is not None and not now.unready)
    finally:
        go_on.set()
    worker.stop()
    told = client.admin.get_runtime(worker.runtime)
    assert (told.state, told.is_leader) == ("ended", False)


def test_a_worker_that_registers_anew_tells_at_once(
    client: awa.Client, start_worker: StartWorker, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "FIRST_AFTER", 0.0)  # and the next tick would come in ten seconds

    @client.task()
    def work() -> None: ...

    worker = start_worker(client, threads=1, heartbeat=0.1)
    before = worker.runtime
    wait_until(lambda: client.admin.get_runtime(before).snapshot_at is not None)
    fence(conn, before)
    wait_until(lambda: worker.runtime != before)
    wait_until(lambda: client.admin.get_runtime(worker.runtime).snapshot_at is not None)
    assert (client.admin.get_runtime(worker.runtime).kinds, client.admin.get_runtime(before).state) == (
        ["work"],
        "gone",
    )


def test_what_else_is_told_hears_of_each_new_number_until_it_has_succeeded(
    database: str, conn: Conn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guard: a failure neither keeps a worker from starting nor the snapshot from being written."""
    heard: list[tuple[str, int, bool]] = []
    fails = True
    numbers = [register(conn), register(conn)]
    now = numbers[0]

    def first(connection: Conn, runtime: int, is_new: bool) -> None:
        heard.append(("first", runtime, is_new))

    def second(connection: Conn, runtime: int, is_new: bool) -> None:
        heard.append(("second", runtime, is_new))
        if fails:
            connection.execute("SELECT 1 / 0")

    one = Report(
        database,
        Schema(),
        identity=lambda: now,
        declared={"q": awa.Limits(max_running=2)},
        snapshot=lambda: Snapshot(1, {"q": 1}, Health(now)),
        tellers=[first, second],
    )
    monkeypatch.setattr(report, "FIRST_AFTER", 0.0)
    try:
        one.begin()
        assert "not all could be told of this worker: DivisionByZero" in caplog.text
        assert count(conn, "SELECT count(*) FROM awa.queue_meta WHERE declared IS NOT NULL") == 1
        with pytest.raises(psycopg.errors.DivisionByZero):
            one.step()
        assert count(conn, "SELECT busy FROM awa.runtime_instances WHERE id = %s", numbers[0]) == 1
        fails = False
        assert one.step() > 5
        assert one.step() > 5  # not due
        now = numbers[1]
        one.hurry()
        one.step()
        one._due = 0.0
        one.step()
    finally:
        one.close()
    expected = [(numbers[0], True)] * 3 + [(numbers[1], True), (numbers[1], False)]
    assert [(runtime, is_new) for name, runtime, is_new in heard if name == "second"] == expected
    assert [(runtime, is_new) for name, runtime, is_new in heard if name == "first"] == expected


SLOW = """
    CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(60); RETURN NULL; END $$;
    CREATE TRIGGER slow BEFORE UPDATE OF snapshot_at ON awa.runtime_instances FOR EACH STATEMENT EXECUTE FUNCTION slow()
"""
SLEEPING = """
    SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'
"""


@pytest.mark.usefixtures("often")
def test_a_tick_that_hangs_is_in_nobodys_way(client: awa.Client, start_worker: StartWorker, conn: Conn) -> None:
    @client.task()
    def work() -> None: ...

    conn.execute(SLOW)
    worker = start_worker(client, threads=1, heartbeat=0.2, stale_after=0.6)
    beats = "SELECT last_seen_at FROM awa.runtime_instances WHERE id = %s"
    try:
        wait_until(lambda: count(conn, SLEEPING) == 1)
        for _ in range(5):
            before = conn.execute(beats, [worker.runtime]).fetchone()
            wait_until(lambda before=before: conn.execute(beats, [worker.runtime]).fetchone() != before)  # type: ignore[misc]
            assert ended(client, client.insert(work.bind())).state == "completed"
        assert (worker.health().unhealthy, client.admin.get_runtime(worker.runtime).state) == ([], "live")
        worker.stop()
        assert count(conn, SLEEPING) == 1, "the stop has waited for it"
        assert client.admin.get_runtime(worker.runtime).state == "ended"
    finally:
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event = 'PgSleep'"
        )
    wait_until(lambda: not any(thread.name == "awa-report" for thread in threading.enumerate()))
