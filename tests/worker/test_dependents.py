"""``after=``: jobs run when others have completed."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

import awa
from awa import JobNotFound, ValidationError
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, ended, fence, in_state, rescue

Conn = psycopg.Connection[Any]


def test_chains_and_diamonds_run_in_order(client: awa.Client, start_worker: StartWorker, conn: Conn) -> None:
    """Guard: the leader's pass, which no bell of a parent's end calls for.

    A root, 100 after it, one after these, then a chain; inserted in one transaction, where nobody sees them yet.
    """
    began: list[int] = []
    done: set[int] = set()
    early: list[int] = []
    parents: dict[int, list[int]] = {}

    @client.task()
    def work() -> None:
        job = awa.current_job().id
        if not done.issuperset(parents[job]):
            early.append(job)
        began.append(job)
        done.add(job)

    def add(*after: int, lent: Conn) -> int:
        job = client.insert(work.bind(), after=after or None, conn=lent).id
        parents[job] = list(after)
        return job

    start_worker(client)
    with conn.transaction():
        root = add(lent=conn)
        middle = [add(root, lent=conn) for _ in range(100)]
        last = add(*middle, lent=conn)
        for _ in range(20):
            last = add(last, root, lent=conn)
    wait_until(lambda: len(began) >= 122, timeout=30)
    assert early == []
    assert sorted(began) == sorted(parents)
    assert client.get(last).state == "completed" or wait_until(lambda: client.get(last).state == "completed")
    assert count(conn, "SELECT count(*) FROM awa.waiting_jobs") == 0


def test_a_dependent_is_listed_moved_and_cancelled_while_it_waits_and_a_rescue_is_no_end(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    """Guards: what waits for a parent is a waiting job like others; only the last state of a parent counts."""
    go_on = threading.Event()
    attempts: list[int] = []

    @client.task(retry=awa.fixed(0))
    def parent() -> None:
        attempts.append(awa.current_job().attempt)
        if len(attempts) == 1:
            raise ValueError("once")
        assert go_on.wait(30)

    @client.task()
    def child() -> None:
        assert go_on.is_set()

    runtime = start_worker(client).runtime
    first = client.insert(parent.bind())
    stays, moved, cancelled, put_off = (client.insert(child.bind(), after=first) for _ in range(4))
    follows = client.insert(child.bind(), after=[cancelled.get(), stays.id], after_failed="run")
    gone = client.insert(child.bind(), after=[cancelled], after_failed="discard")
    wait_until(lambda: len(attempts) == 2)
    info = stays.get()
    assert (info.state, info.waits_for, info.run_at, info.attempt) == ("scheduled", "parent", None, 1)
    listed = client.admin.list_jobs("scheduled").jobs
    assert {job.id: job.waits_for for job in listed} == dict.fromkeys(
        [stays.id, moved.id, cancelled.id, put_off.id, follows.id, gone.id], "parent"
    )
    assert client.admin.queue_counts()["default"][awa.JobState.SCHEDULED].value == 6
    assert client.admin.move(moved.id, "elsewhere").happened == "moved"
    assert client.cancel(cancelled.id).happened == "cancelled"
    fence(conn, runtime)  # its worker is taken for dead
    rescue(conn, runtime)
    wait_until(lambda: len(attempts) == 3, timeout=30)
    assert stays.get().state == "scheduled"
    go_on.set()
    assert ended(client, first, timeout=30).attempt == 3
    assert [ended(client, job, timeout=30).state for job in (stays, put_off, follows)] == ["completed"] * 3
    assert in_state(client, moved, "available").queue == "elsewhere"
    with pytest.raises(JobNotFound):
        gone.get()


def test_what_cannot_be_waited_for_is_refused_and_the_callers_transaction_goes_on(
    database: str, client: awa.Client, conn: Conn
) -> None:
    """Guards: options.check_after before any SQL; and a parent that does not exist is told without an error in SQL."""

    @client.task()
    def work() -> None: ...

    for options, path in [
        ({"after": 0}, "after"),
        ({"after": True}, "after"),
        ({"after": "12"}, "after"),
        ({"after": 1.5}, "after"),
        ({"after": {}}, "after"),
        ({"after": []}, "after"),
        ({"after": range(1, 102)}, "after"),
        ({"after": [1, None]}, "after[1]"),
        ({"after": [1, [2]]}, "after[1]"),
        ({"after": 1, "after_failed": "explode"}, "after_failed"),
        ({"after_failed": "run"}, "after_failed"),
    ]:
        with pytest.raises(ValidationError) as refused:
            client.insert(work.bind(), **options)  # type: ignore[arg-type]
        assert refused.value.path == path
        with pytest.raises(ValidationError) as refused:
            client.insert_many([work.bind(), awa.NewJob(work.bind(), **options)])  # type: ignore[arg-type]
        assert refused.value.path == f"items[1].{path}"
    with pytest.raises(ValidationError, match="use insert_many for it"):
        client.insert_many_copy([awa.NewJob(work.bind(), after=1)])

    elsewhere = awa.Client(database)
    known = elsewhere.insert({}, kind="theirs")
    with conn.transaction():
        uncommitted = client.insert(work.bind(), conn=conn)
        with pytest.raises(JobNotFound) as unknown:
            client.insert(work.bind(), after=[known, 10**9], conn=conn)
        assert unknown.value.job_id == 10**9
        with pytest.raises(JobNotFound, match=r"items\[1\]"):
            client.insert_many([work.bind(), awa.NewJob(work.bind(), after=10**9)], conn=conn)
        with pytest.raises(JobNotFound):  # nobody else sees it yet
            client.insert(work.bind(), after=uncommitted)
        job, plain = client.insert_many(
            [awa.NewJob(work.bind(), after=(job for job in (known, uncommitted, known.id))), work.bind()], conn=conn
        )
    assert (job.get().waits_for, plain.get().state) == ("parent", "available")
    row = conn.execute("SELECT parents FROM awa.waiting_jobs").fetchone()
    assert row == ([known.id, uncommitted.id],)
    assert count(conn, "SELECT count(*) FROM awa.jobs") == 3
    elsewhere.close()
