"""R57: urgent jobs waited behind a pile of old ones, and ties came in any order.

Now priority 1 goes first unless another has waited for minutes, equal jobs run in the order of their transactions and
then of their ids, and what is out of range is refused.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg
import pytest

import awa
from awa import NewJob
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker


def test_high_jobs_go_before_thousands_of_overdue_low_ones(
    client: awa.Client, start_worker: StartWorker, conn: psycopg.Connection[Any]
) -> None:
    ran: list[tuple[int, int]] = []

    @client.task()
    def work(n: int) -> None:
        ran.append((awa.current_job().priority, n))

    client.insert_many_copy(NewJob(work.bind(n), priority=4) for n in range(3000))
    conn.execute("UPDATE awa.jobs SET available_at = now() - interval '1 day'")
    client.insert_many([NewJob(work.bind(n), priority=1) for n in range(10)])
    client.insert_many([NewJob(work.bind(n), priority=2) for n in range(10)])
    start_worker(client, threads=1, priority_aging=0)
    wait_until(lambda: len(ran) == 3020, timeout=20)
    assert ran[:20] == [(1, n) for n in range(10)] + [(2, n) for n in range(10)]
    assert ran[20:] == [(4, n) for n in range(3000)]


def test_a_high_job_overtakes_while_low_ones_run(client: awa.Client, start_worker: StartWorker) -> None:
    ran: list[int] = []
    started = threading.Event()
    go_on = threading.Event()

    @client.task()
    def work(n: int) -> None:
        started.set()
        assert go_on.wait(10)
        ran.append(n)

    start_worker(client, threads=1)
    client.insert_many([NewJob(work.bind(n), priority=3) for n in range(5)])
    assert started.wait(10)
    client.insert(work.bind(100), priority=1)
    go_on.set()
    wait_until(lambda: len(ran) == 6)
    assert ran == [0, 100, 1, 2, 3, 4]


def test_ties_go_by_the_inserting_transaction_and_then_by_id(
    client: awa.Client, database: str, start_worker: StartWorker
) -> None:
    ran: list[str] = []

    @client.task()
    def work(name: str) -> None:
        ran.append(name)

    with psycopg.connect(database) as first, psycopg.connect(database) as second:
        client.insert(work.bind("first 1"), conn=first)
        client.insert(work.bind("second 1"), conn=second)
        client.insert(work.bind("second 2"), conn=second)
        client.insert(work.bind("first 2"), conn=first)
        second.commit()
        first.commit()
    client.insert(work.bind("third"))
    start_worker(client, threads=1)
    wait_until(lambda: len(ran) == 5)
    assert ran == ["first 1", "first 2", "second 1", "second 2", "third"]


@pytest.mark.parametrize("priority", [0, 5, -1, 32768, "1", 1.0, True])
def test_what_is_out_of_range_is_refused(client: awa.Client, priority: Any) -> None:
    with pytest.raises(awa.ValidationError) as caught:
        client.insert({}, kind="k", priority=priority)
    assert (caught.value.path, caught.value.limit) == ("priority", (1, 4))
    with pytest.raises(awa.ConfigError):
        client.task(priority=priority)


def test_with_aging_a_low_job_runs_within_its_bound_under_steady_high_load(
    client: awa.Client, start_worker: StartWorker, conn: psycopg.Connection[Any]
) -> None:
    """A job gains one priority a minute by default, so one of priority 4 goes before younger ones of 1 after three."""
    ran: list[tuple[str, float]] = []

    @client.task()
    def work(name: str) -> None:
        ran.append((name, time.monotonic()))
        time.sleep(0.01)

    overdue = client.insert(work.bind("low"), priority=4)
    client.insert(work.bind("young"), priority=4)
    client.insert_many([NewJob(work.bind("high"), priority=1) for _ in range(100)])
    start_worker(client, threads=1)
    stop = threading.Event()

    def go_on() -> None:
        while not stop.wait(0.1):
            client.insert_many([NewJob(work.bind("high"), priority=1) for _ in range(15)])

    producer = threading.Thread(target=go_on)
    producer.start()
    try:
        wait_until(lambda: len(ran) >= 150, timeout=20)
        assert {name for name, _ in ran} == {"high"}, "younger than three minutes, however many others come"
        age = "UPDATE awa.jobs SET available_at = now() - interval '181 s' WHERE id = %s"
        conn.execute(age, [overdue.id])
        due = time.monotonic()
        wait_until(lambda: any(name == "low" for name, _ in ran), timeout=20)
    finally:
        stop.set()
        producer.join()
    names = [name for name, _ in ran]
    at = next(at for name, at in ran if name == "low")
    assert [name for name, began in ran if due < began < at].count("high") <= 250, "a second, and what was claimed"
    assert "young" not in names[: names.index("low") + 1]
    wait_until(lambda: any(name == "young" for name, _ in ran), timeout=30)
