"""R41: batches with the same keys in different orders deadlocked, and answers came in the order of the keys.

Now keys are taken in their own order, whatever the caller's is, and what is released is never waited for.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg

import awa
from awa import NewJob, Unique
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count

THREADS, ROUNDS, POOL, BATCH = 8, 14, 40, 30

REPLACE = Unique(by_args=["n"], on_conflict="replace")

LIVING = """
    SELECT u.n, count(*)
      FROM (SELECT DISTINCT (j.args->>'n')::integer AS n, j.id FROM awa.jobs j
             UNION
            SELECT (w.args->>'n')::integer, w.id FROM awa.waiting_jobs w) u
     CROSS JOIN LATERAL awa.find_job_v2(u.id) f
     WHERE f.state NOT IN ('failed', 'cancelled')
     GROUP BY u.n HAVING count(*) > 1
"""
"""Keys of which more than one job is alive or kept."""


def test_shuffled_batches_of_the_same_keys_beside_workers_and_prune(
    database: str, conn: psycopg.Connection[Any], start_worker: StartWorker
) -> None:
    """Guard: keys of a batch are taken in ascending order, those that were left included, and given back before a call
    begins anew. Without the order two batches each hold what the other wants: 40P01, after a second.

    Half of the batches go through the caller's transaction, of which a third is rolled back; half of the jobs replace
    what waits, which are row locks in another table, taken in the order of the keys too. Meanwhile jobs fail,
    complete and are forgotten, so that keys are taken over, and others' rows removed, all the time.
    """
    client = awa.Client(database, pool_size=THREADS)
    running: Counter[int] = Counter()
    together: list[int] = []
    lock = threading.Lock()

    @client.task(unique=Unique(by_args=["n"]), max_attempts=1)
    def work(n: int, by: int) -> None:
        with lock:
            running[n] += 1
            if running[n] > 1:
                together.append(n)
        try:
            if n % 3 == 0:
                raise RuntimeError("failed")
        finally:
            with lock:
                running[n] -= 1

    start_worker(client, threads=3, completed_retention=0.3, failed_retention=0.5, rotate_after=0.2)
    committed: dict[int, int] = {}  # job -> n
    answers: list[tuple[int, int]] = []

    def insert(number: int) -> None:
        rng = random.Random(number)
        for turn in range(ROUNDS):
            numbers = rng.sample(range(POOL), BATCH)
            items: list[Any] = [
                NewJob(work.bind(n, number), delay=rng.choice([None, None, 0.05]), unique=rng.choice([None, REPLACE]))
                for n in numbers
            ]
            is_kept = True
            if turn % 2:
                with psycopg.connect(database) as lent:
                    found = client.insert_many(items, conn=lent)
                    assert lent.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
                    is_kept = rng.random() > 0.33
                    lent.commit() if is_kept else lent.rollback()
            else:
                found = client.insert_many(items)
            with lock:
                for n, one in zip(numbers, found, strict=True):
                    if not one.is_new:
                        answers.append((one.id, n))
                    elif is_kept:
                        committed[one.id] = n

    with ThreadPoolExecutor(THREADS) as pool:
        for result in [pool.submit(insert, number) for number in range(THREADS)]:
            result.result(120.0)  # raises what reached the caller
    assert together == []
    assert [(job, n) for job, n in answers if committed.get(job) != n] == []  # in the caller's order, and of real jobs
    assert conn.execute(LIVING).fetchall() == []
    assert len(committed) > POOL  # keys were free again now and then
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    assert count(conn, deadlocks) == 0
    # what is left ends too, and then each key is free
    wait_until(lambda: count(conn, "SELECT count(*) FROM awa.waiting_jobs") == 0, timeout=30.0)
    client.close()
