"""R34: large args, long names and big batches broke notifications of 8,000 bytes and statements of many parameters.

Now a notification carries a queue's name at most, batches travel as arrays, and long args are fetched after the claim.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, ended


def test_a_megabyte_of_args_runs(database: str, start_worker: StartWorker) -> None:
    client = awa.Client(database, max_args_bytes=4 * 1024 * 1024)
    seen: list[int] = []

    @client.task()
    def work(text: str) -> None:
        seen.append(len(text))

    start_worker(client, poll_interval=30)
    jobs = [client.insert(work.bind("ä" * 1_000_000))]
    jobs += client.insert_many([work.bind("ä" * 500_000) for _ in range(3)])
    assert all(ended(client, job).state == "completed" for job in jobs)
    assert sorted(seen) == [500_000] * 3 + [1_000_000]
    client.close()


def test_a_batch_of_thousands_in_hundreds_of_queues_with_the_longest_names(
    client: awa.Client, start_worker: StartWorker, conn: psycopg.Connection[Any]
) -> None:
    names = [f"{n:03}" + "😀" * 197 for n in range(200)]
    done = threading.Semaphore(0)

    @client.task()
    def work(n: int) -> None:
        done.release()

    start_worker(client, queues=names[:3], poll_interval=30)
    jobs = client.insert_many([awa.NewJob(work.bind(n), queue=names[n % 200]) for n in range(5000)])
    assert len({job.id for job in jobs}) == 5000
    for _ in range(75):
        assert done.acquire(timeout=10)
    wait_until(lambda: client.get(jobs[4802].id).state == "completed")
    assert client.get(jobs[4999].id).state == "available"
    assert client.insert_many_copy(awa.NewJob(work.bind(n), queue=names[n % 3]) for n in range(300)) == 300
    for _ in range(300):
        assert done.acquire(timeout=10)
    assert count(conn, "SELECT count(*) FROM awa.jobs WHERE queue = %s", names[199]) == 25


def test_notifications_stay_short_whatever_is_inserted(client: awa.Client, database: str) -> None:
    queue = "😀" * 200
    with psycopg.connect(database, autocommit=True) as sleeper:
        row = sleeper.execute("SELECT awa.channel()").fetchone()
        assert row is not None
        sleeper.execute(f"LISTEN {row[0]}")
        sleeper.execute("SELECT pg_advisory_lock(hashtextextended('awa.bell:' || %s, 0))", [queue])
        for args in ({"a": "x" * 200_000}, {}):
            client.insert(args, kind="k" * 200, queue=queue, tags=["t" * 200] * 20)
            client.insert_many([awa.NewJob(args, kind="k", queue=queue)] * 3)
            client.insert_many([awa.NewJob(args, kind="k", queue=queue, tags=["x"])] * 3)
            client.insert_many_copy([awa.NewJob(args, kind="k", queue=queue)] * 3)
        heard = list(sleeper.notifies(timeout=5, stop_after=8))
    assert len(heard) == 8
    assert {len(one.payload.encode()) for one in heard} <= set(range(801))
    assert all(len(one.channel) < 64 for one in heard)


def test_two_thousand_jobs_with_ids_of_19_digits_are_cancelled(
    client: awa.Client, conn: psycopg.Connection[Any]
) -> None:
    """Guard: ids are numbers of 64 bits in every statement, and nothing of a cancel grows with their number."""
    conn.execute("SELECT setval('awa.entry_id_seq', %s)", [9 * 10**18])
    jobs = client.insert_many([awa.NewJob({}, kind="k", delay=n % 2 * 3600) for n in range(2000)])
    assert {len(str(job.id)) for job in jobs} == {19}
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda job: client.cancel(job.id, reason="x" * 1000), jobs))
    assert {one.happened for one in done} == {"cancelled"}
    assert count(conn, "SELECT count(*) FROM awa.ended_jobs WHERE state = 'cancelled'") == 2000
    assert client.get(jobs[-1].id).state == "cancelled"
    page = client.admin.list_jobs("cancelled", limit=1000)
    rest = client.admin.list_jobs("cancelled", limit=1000, after=page.after)
    assert {job.id for job in (*page.jobs, *rest.jobs)} == {job.id for job in jobs}
