"""Unique keys, ``after=``, follow-ups, results and lent transactions, where they meet."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

import awa
from awa import ValidationError
from tests.fixtures.jobs import StartWorker, count, ended

Conn = psycopg.Connection[Any]

LATEST = awa.Unique(by_args=False, on_conflict="replace")


def test_a_job_that_is_replaced_does_not_come_to_wait_for_itself(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    """Guards: awa.is_circle, in enqueue_many_v1 before anything is written, and in enqueue_v1.

    Without it the job waits for ever, and keeps everybody else out.
    """

    @client.task()
    def work(n: int) -> int:
        return n

    @client.task()
    def other() -> None: ...

    first = client.insert(work.bind(1), unique=LATEST, delay=3600)
    second = client.insert(other.bind(), after=first)
    third = client.insert(other.bind(), after=second)
    for parents in (first, [third, first], third):
        with conn.transaction():
            with pytest.raises(
                ValidationError, match=rf"^after would have job {first.id}, .* wait for itself"
            ) as caught:
                client.insert(work.bind(2), unique=LATEST, after=parents, conn=conn)
            assert caught.value.path == "after"
            conn.execute("SELECT 1")  # what was lent is as it was
    batch = [awa.NewJob(other.bind()), awa.NewJob(work.bind(2), unique=LATEST, after=second)]
    with pytest.raises(ValidationError, match=r"^items\[1\]: after") as caught:
        client.insert_many(batch)
    assert caught.value.path == "items[1].after"
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="wait for itself"):
        conn.execute(
            "SELECT awa.enqueue_v1('x', p_unique_key => (SELECT key FROM awa.job_uniques), p_on_conflict => 'replace',"
            " p_after => %s)",
            [[third.id]],
        )
    assert count(conn, "SELECT count(*) FROM awa.waiting_jobs") == 3
    assert count(conn, "SELECT count(*) FROM awa.jobs") == 0
    # one that has nothing to do with it will do
    before = client.insert(other.bind())
    assert not client.insert(work.bind(2), unique=LATEST, after=before).is_new
    start_worker(client)
    assert ended(client, third, timeout=30).state == "completed"
    assert client.get(first.id).args == {"n": 2}


def test_of_two_that_are_replaced_at_once_and_would_wait_for_each_other_one_stays_as_it_is(
    client: awa.Client, conn: Conn
) -> None:
    """Guard: replace_waiting looks again. Each of the two would do alone; both would wait for ever."""

    @client.task()
    def work(n: int) -> None: ...

    @client.task()
    def other() -> None: ...

    first = client.insert(work.bind(1), unique=LATEST, delay=3600)
    second = client.insert(other.bind(), unique=LATEST, delay=3600)
    both = [
        awa.NewJob(work.bind(2), unique=LATEST, after=second),
        awa.NewJob(other.bind(), unique=LATEST, after=first),
    ]
    assert [job.id for job in client.insert_many(both)] == [first.id, second.id]
    assert count(conn, "SELECT count(*) FROM awa.waiting_jobs WHERE waits_for = 'parent'") == 1
    assert count(conn, "SELECT count(*) FROM awa.waiting_jobs WHERE waits_for = 'time'") == 1


def test_handlers_in_their_transactions_insert_without_them(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    """Guard: what is lent comes from a pool of its own.

    With one pool, as many handlers as it has connections wait for each other until all of them fail.
    """
    together = threading.Barrier(10)

    @client.task()
    def other() -> None: ...

    @client.task()
    def work() -> None:
        with awa.current_job().transaction():
            together.wait(30)
            client.insert(other.bind())

    jobs = client.insert_many([work.bind() for _ in range(10)])
    start_worker(client, threads=10)
    assert {ended(client, job, timeout=25).state for job in jobs} == {"completed"}
    assert {client.get(job.id).attempt for job in jobs} == {1}


def test_a_value_that_is_returned_after_the_own_transaction_is_told_of(
    client: awa.Client, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: the warning, and what the error says where None is no result.

    Without them who asks gets None, or the job fails again and again, and nobody knows why.
    """

    @client.task(keep_result=True)
    def work(is_given: bool):  # type: ignore[no-untyped-def]
        job = awa.current_job()
        with job.transaction() as conn:
            if is_given:
                job.complete(conn, result=7)
        return 8

    @client.task(keep_result=True, max_attempts=1)
    def declared() -> int:
        with awa.current_job().transaction():
            return 8

    refused = client.insert(declared.bind())
    lost, kept = client.insert_many([work.bind(False), work.bind(True)])
    worker = start_worker(client)
    assert (lost.result(timeout=20), kept.result(timeout=20)) == (None, 7)
    with pytest.raises(awa.JobFailed, match=r"got None: .* give it to job.complete\(conn, result=...\)"):
        refused.result(timeout=20)
    worker.stop()
    told = [record.getMessage() for record in caplog.records if "what it returned is kept only if" in record.message]
    assert len(told) == 1
    assert told[0].startswith(f"job {lost.id} ")
