"""How soon an idle worker picks a job up, with a poll interval that cannot be what found it."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

import awa
from awa.storage.line import Line, Wanted
from awa.storage.schema import Schema
from awa.worker import bell
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, ended

Conn = psycopg.Connection[Any]

BELLS = """
    SELECT count(*)
      FROM pg_locks l
      JOIN unnest(%s::text[]) q ON l.classid::bigint << 32 | l.objid::bigint = hashtextextended('awa.bell:' || q, 0)
     WHERE l.locktype = 'advisory' AND l.mode = 'ExclusiveLock' AND l.granted
       AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


LINES = """
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND application_name = 'awa worker' AND state = 'idle'
"""


def wait_for_bells(conn: Conn, *queues: str) -> None:
    """Wait until somebody sleeps at the bell of each of *queues*."""
    wait_until(lambda: count(conn, BELLS, list(queues)) == len(queues))


@pytest.fixture
def work(client: awa.Client) -> awa.Task[[], None]:
    """A job that does nothing."""

    @client.task()
    def work() -> None: ...

    return work


PATHS = {
    "insert": lambda client, item: client.insert(item),
    "insert_many": lambda client, item: client.insert_many([item])[0],
    "mixed": lambda client, item: client.insert_many([item, awa.NewJob(item, delay=3600)])[0],
    "soon": lambda client, item: client.insert(item, delay=0.2),
    "later": lambda client, item: client.insert(item, delay=1.7),
}


@pytest.mark.parametrize("path", PATHS)
def test_a_sleeping_worker_is_woken_by_an_insert(
    client: awa.Client, start_worker: StartWorker, conn: Conn, work: Any, path: str
) -> None:
    start_worker(client, poll_interval=30)
    wait_for_bells(conn, "default")
    for _ in range(1 if path == "later" else 3):
        assert ended(client, PATHS[path](client, work.bind()), timeout=5).state == "completed"


def test_it_is_woken_by_copy_by_psql_and_at_commit(
    client: awa.Client, start_worker: StartWorker, database: str, conn: Conn
) -> None:
    ran = threading.Semaphore(0)

    @client.task()
    def work() -> None:
        ran.release()

    start_worker(client, poll_interval=30)
    wait_for_bells(conn, "default")
    client.insert_many_copy([work.bind()])
    assert ran.acquire(timeout=5)
    wait_for_bells(conn, "default")
    conn.execute("INSERT INTO awa.jobs (kind) VALUES ('work')")
    conn.execute("SELECT awa.ring('{default}')")
    assert ran.acquire(timeout=5)
    wait_for_bells(conn, "default")
    with psycopg.connect(database) as lent:
        client.insert(work.bind(), conn=lent)
        assert not ran.acquire(timeout=0.1)
    assert ran.acquire(timeout=5)


def test_a_transaction_that_began_before_the_worker_slept_is_found(
    client: awa.Client, start_worker: StartWorker, database: str, conn: Conn, work: Any
) -> None:
    with psycopg.connect(database) as lent:
        job = client.insert(work.bind(), conn=lent)  # nobody waits yet, so this rings for nobody
        start_worker(client, poll_interval=30)
        wait_for_bells(conn, "default")
    assert ended(client, job, timeout=5).state == "completed"


def test_one_of_two_sleeping_workers_takes_it(
    client: awa.Client, start_worker: StartWorker, conn: Conn, work: Any
) -> None:
    start_worker(client, poll_interval=30)
    start_worker(client, poll_interval=30)
    wait_for_bells(conn, "default")
    for _ in range(3):
        assert ended(client, client.insert(work.bind()), timeout=5).state == "completed"


def test_when_the_holder_of_the_bell_leaves_the_next_takes_over(
    client: awa.Client, start_worker: StartWorker, conn: Conn, work: Any
) -> None:
    first = start_worker(client, poll_interval=0.5)
    wait_for_bells(conn, "default")
    start_worker(client, poll_interval=0.5)
    first.stop()
    wait_for_bells(conn, "default")
    assert ended(client, client.insert(work.bind()), timeout=5).state == "completed"


def test_a_worker_of_several_queues_is_woken_for_each(
    client: awa.Client, start_worker: StartWorker, conn: Conn, work: Any
) -> None:
    queues = ["default", "b", "ä'\"%s"]
    start_worker(client, queues=queues, poll_interval=30)
    wait_for_bells(conn, *queues)
    for queue in [*queues, *queues]:
        assert ended(client, client.insert(work.bind(), queue=queue), timeout=5).state == "completed"
        wait_for_bells(conn, *queues)


def test_without_notifications_it_polls(database: str, start_worker: StartWorker, conn: Conn) -> None:
    client = awa.Client(database, notify=False)

    @client.task()
    def work() -> None: ...

    start_worker(client, poll_interval=0.1)
    assert ended(client, client.insert(work.bind()), timeout=5).state == "completed"
    assert count(conn, BELLS, ["default"]) == 0
    client.close()


def test_a_worker_that_becomes_busy_hands_the_bell_on(
    client: awa.Client, start_worker: StartWorker, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Semaphore(0)
    go_on = threading.Event()

    @client.task()
    def block() -> None:
        started.release()
        assert go_on.wait(20)

    monkeypatch.setattr(bell, "FIRST_POLL", 30.0)  # nobody finds anything by polling
    start_worker(client, threads=1, poll_interval=30)
    wait_for_bells(conn, "default")
    start_worker(client, threads=1, poll_interval=30)
    wait_until(lambda: count(conn, LINES) == 2)
    try:
        for _ in range(2):
            client.insert(block.bind())
            assert started.acquire(timeout=5)
    finally:
        go_on.set()


def test_giving_a_bell_up_wakes_who_listens(database: str) -> None:
    holder, other = Line(database, Schema(), {}), Line(database, Schema(), {})
    with psycopg.connect(database, autocommit=True) as conn:
        row = conn.execute(
            """INSERT INTO awa.runtime_instances (uuid, hostname, pid, version, heartbeat_ms)
               VALUES (gen_random_uuid(), 'h', 1, 'v', 1000) RETURNING id"""
        ).fetchone()
    assert row is not None
    runtime: int = row[0]
    try:
        assert holder.exchange(runtime, [], [Wanted("q", 1, arm=True)]).claims[0].is_armed
        assert not other.exchange(runtime, [], [Wanted("q", 1, arm=True)]).claims[0].is_armed
        holder.give_up_bell("q", ask_for_help=True)
        heard: list[str] = []
        wait_until(lambda: heard.extend(other.notifications()) or heard)
        assert heard[0].endswith("q")
        assert other.exchange(runtime, [], [Wanted("q", 1, arm=True)]).claims[0].is_armed
    finally:
        holder.close()
        other.close()


def test_scheduled_jobs_start_near_their_time(client: awa.Client, start_worker: StartWorker, conn: Conn) -> None:
    late: list[float] = []
    done = threading.Semaphore(0)

    @client.task()
    def work(n: int) -> None:
        job = awa.current_job()
        with client.connection() as own:
            row = own.execute("SELECT extract(epoch FROM clock_timestamp() - %s)", [job.created_at]).fetchone()
        assert row is not None
        late.append(float(row[0]) - n / 10)
        done.release()

    start_worker(client, poll_interval=30)
    client.insert_many([awa.NewJob(work.bind(n), delay=n / 10) for n in range(2, 17)])
    for _ in range(15):
        assert done.acquire(timeout=10)
    assert min(late) >= -0.01
    assert sorted(late)[7] < 1.0
