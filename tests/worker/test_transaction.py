"""``job.transaction()``: what a handler writes there happens exactly once, with the completion of its job."""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel

import awa
from awa import ConfigError, StaleAttempt
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, count_running, ended, fence, in_state, rescue
from tests.fixtures.proxy import Loss, Proxy, What

Conn = psycopg.Connection[Any]


@pytest.fixture
def ledger(conn: Conn) -> Conn:
    """A connection to look with, and a table of the application's to write to."""
    conn.execute("CREATE TABLE ledger (job bigint, attempt int, level text)")
    return conn


def note(conn: Conn, job: awa.Job[Any]) -> None:
    conn.execute("INSERT INTO ledger VALUES (%s, %s, current_setting('transaction_isolation'))", [job.id, job.attempt])


def rows(ledger: Conn) -> list[tuple[int, int]]:
    return [(job, attempt) for job, attempt, _ in ledger.execute("SELECT * FROM ledger ORDER BY 1, 2").fetchall()]


LEVELS: dict[IsolationLevel | str | None, str] = {
    None: "read committed",
    "READ COMMITTED": "read committed",
    "repeatable read": "repeatable read",
    "Repeatable_Read": "repeatable read",
    IsolationLevel.SERIALIZABLE: "serializable",
}


def test_effects_and_completion_commit_together_at_any_isolation_level(
    client: awa.Client, start_worker: StartWorker, ledger: Conn
) -> None:
    """Guards: the attempt is completed on the block's connection, before its commit; its level is the block's alone."""
    levels = list(LEVELS)
    seen: list[int] = []

    @client.task()
    def work(which: int) -> None:
        job = awa.current_job()
        with job.transaction(levels[which]) as conn:
            note(conn, job)
            seen.append(count(ledger, "SELECT count(*) FROM ledger WHERE job = %s", job.id))
        seen.append(count(ledger, "SELECT count(*) FROM awa.attempt_ends WHERE entry_id = %s", job.entry_id))

    start_worker(client, threads=1)
    jobs = client.insert_many(work.bind(which) for which in range(len(levels)))
    assert all(ended(client, job).state == "completed" for job in jobs)
    wait_until(lambda: count_running(ledger) == 0)
    assert seen == [0, 1] * len(levels)
    found = ledger.execute("SELECT level FROM ledger ORDER BY job").fetchall()
    assert [level for (level,) in found] == list(LEVELS.values())
    with client.connection() as conn:
        assert conn.autocommit
        assert conn.isolation_level is None


def test_rolled_back_the_handlers_outcome_counts_and_nothing_of_the_block_stays(
    client: awa.Client, start_worker: StartWorker, ledger: Conn
) -> None:
    """Guard: what leaves the block by an exception rolls back and is the handler's own."""

    @client.task(retry=awa.fixed(0))
    def raises() -> None:
        job = awa.current_job()
        with job.transaction() as conn:
            note(conn, job)
            if job.attempt < 3:
                raise ValueError("before the commit")
        raise ValueError("after the commit, which is only logged")

    @client.task()
    def put_off() -> None:
        job = awa.current_job()
        with job.transaction() as conn:
            note(conn, job)
            raise awa.Snooze(60)

    @client.task()
    def returned() -> awa.Snooze:
        job = awa.current_job()
        with job.transaction() as conn:
            note(conn, job)
            return awa.Snooze(60)

    @client.task(retry=awa.fixed(0))
    def rolls_back() -> None:
        job = awa.current_job()
        with job.transaction() as conn:
            note(conn, job)
            raise psycopg.Rollback
        with job.transaction() as conn:  # nothing was completed yet
            note(conn, job)
            with pytest.raises(psycopg.errors.DivisionByZero):
                conn.execute("SELECT 1/0")
            if job.attempt == 2:
                raise awa.Cancel("seen enough")

    @client.task(timeout=0.4, retry=awa.fixed(0))
    def too_slow() -> None:
        job = awa.current_job()
        with job.transaction() as conn:
            note(conn, job)
            until = time.monotonic() + 20
            while job.attempt == 1 and time.monotonic() < until:
                time.sleep(0.01)

    start_worker(client)
    jobs = client.insert_many(
        [raises.bind(), put_off.bind(), returned.bind(), rolls_back.bind(), awa.NewJob(too_slow.bind(), max_attempts=2)]
    )
    a, b, c, d, e = jobs
    found = [ended(client, job, timeout=20) for job in (a, c, d, e)]
    assert [(info.state, info.attempt) for info in found] == [
        ("completed", 3),
        ("completed", 1),
        ("cancelled", 2),
        ("completed", 2),
    ]
    assert [h["type"] for h in found[2].history] == ["psycopg.errors.InFailedSqlTransaction", "Cancel"]
    assert [h["type"] for h in found[3].history] == ["awa.errors.DeadlineExceeded"]
    assert in_state(client, b, "scheduled").attempt == 1
    assert rows(ledger) == sorted([(a.id, 3), (c.id, 1), (e.id, 2)])


def test_a_serialization_failure_comes_as_what_it_is_and_the_handler_may_begin_again(
    client: awa.Client, start_worker: StartWorker, ledger: Conn
) -> None:
    """Guard: begin() looks at what is open, not at what was begun once; 40001 is not turned into anything.

    Both handlers read before either writes, at SERIALIZABLE, so one of the two cannot commit.
    """
    ledger.execute("CREATE TABLE balance AS SELECT 100 AS amount")
    both_have_read = threading.Barrier(2)
    failures: list[psycopg.errors.SerializationFailure] = []

    @client.task()
    def take(amount: int) -> None:
        job = awa.current_job()
        for once in (True, False):
            try:
                with job.transaction("serializable") as conn:
                    row = conn.execute("SELECT amount FROM balance").fetchone()
                    assert row is not None
                    if once:
                        both_have_read.wait(20)
                    conn.execute("UPDATE balance SET amount = %s", [row[0] - amount])
                return
            except psycopg.errors.SerializationFailure as error:
                failures.append(error)
        raise AssertionError("failed twice")

    start_worker(client, threads=2)
    jobs = client.insert_many([take.bind(1), take.bind(10)])
    assert [(ended(client, job).state, client.get(job.id).attempt) for job in jobs] == [("completed", 1)] * 2
    assert len(failures) == 1
    assert count(ledger, "SELECT amount FROM balance") == 89


def test_wrong_use_is_refused_and_says_what_to_do(
    database: str, client: awa.Client, start_worker: StartWorker, ledger: Conn
) -> None:
    """Guards: each look of Transactions.begin and .completes, before anything is sent."""
    kept: list[awa.Job[Any]] = []
    told: list[str] = []

    def refused(error: type[Exception], call: Any) -> None:
        with pytest.raises(error) as caught:
            call()
        told.append(str(caught.value))

    def begin(job: awa.Job[Any], level: Any = None) -> None:
        with job.transaction(level) as conn:
            note(conn, job)

    @client.task()
    def work() -> None:
        job = awa.current_job()
        kept.append(job)
        refused(ConfigError, lambda: begin(job, "chaos"))
        refused(ConfigError, lambda: begin(job, 1))
        with job.transaction() as conn:
            note(conn, job)
            refused(ConfigError, lambda: begin(awa.current_job()))
            thread = threading.Thread(target=lambda: refused(ConfigError, lambda: begin(job)))
            thread.start()
            thread.join()
            with psycopg.connect(database) as other:
                refused(ConfigError, lambda: job.complete(other))
            job.complete(conn)  # at the end
            assert count(ledger, "SELECT count(*) FROM ledger") == 0
        refused(StaleAttempt, lambda: begin(job))

    start_worker(client)
    job = client.insert(work.bind())
    assert ended(client, job).state == "completed"
    wait_until(lambda: len(told) == 6 and not count_running(ledger))
    refused(StaleAttempt, lambda: begin(kept[0]))
    expected = ["'chaos'", "isolation_level is 1", "open already", "the thread of its handler", "open, and completes"]
    expected += ["has ended already", "has ended: complete it before"]
    assert [part in text for part, text in zip(expected, told, strict=True)] == [True] * 7, told
    assert rows(ledger) == [(job.id, 1)]
    assert client.get(job.id).history == []


def test_after_a_rescue_it_is_stale_and_the_transactions_effects_are_gone(
    client: awa.Client, start_worker: StartWorker, ledger: Conn
) -> None:
    """Guard: the unique key of attempt_ends, at REPEATABLE READ too, whose snapshot is older than the rescue."""
    started, go_on = threading.Event(), threading.Event()
    raised: list[BaseException] = []

    @client.task()
    def work() -> None:
        job = awa.current_job()
        try:
            with job.transaction("repeatable read") as conn:
                note(conn, job)
                if job.attempt == 1:
                    started.set()
                    assert go_on.wait(20)
        except BaseException as error:
            raised.append(error)
            raise

    worker = start_worker(client)
    job = client.insert(work.bind())
    assert started.wait(20)
    runtime = worker.runtime
    fence(ledger, runtime)
    rescue(ledger, runtime)
    go_on.set()
    info = ended(client, job, timeout=20)
    assert (info.state, info.attempt) == ("completed", 2)
    wait_until(lambda: bool(raised), timeout=20)  # the first attempt's handler may end after the second attempt's
    assert [type(error) for error in raised] == [StaleAttempt]
    assert rows(ledger) == [(job.id, 2)]


@pytest.mark.parametrize(
    ("what", "level"),
    [("answer", "serializable"), ("answer", None), ("request", "repeatable read"), ("connection", None)],
)
def test_a_commit_whose_acknowledgement_is_lost_counts_if_it_was_made(
    start_worker: StartWorker, ledger: Conn, proxy: Proxy, proxied: str, what: What, level: str | None
) -> None:
    """Guard: once complete() began, the worker's record is an end under the same unique key, which asks the database.

    As a completion it would stand beside the handler's own.
    """
    losses: list[Loss] = []
    client = awa.Client(proxied)

    @client.task(retry=awa.fixed(0))
    def work() -> None:
        job = awa.current_job()
        with job.transaction(level) as conn:
            note(conn, job)
            if job.attempt == 1:
                losses.append(proxy.lose(what, b"COMMIT"))

    worker = start_worker(client)
    job = client.insert(work.bind())
    wait_until(lambda: losses, timeout=20)
    losses[0].wait()
    if what == "connection":
        # the transaction is open still, and the worker asks again and again
        wait_until(lambda: worker._claimer._not_before, timeout=20)
        assert client.get(job.id).state == "running"
        losses[0].let_go()
    info = ended(client, job, timeout=20)
    attempt = 2 if what == "request" else 1
    assert (info.state, info.attempt, rows(ledger)) == ("completed", attempt, [(job.id, attempt)])
    assert len(info.history) == attempt - 1
    wait_until(lambda: count_running(ledger) == 0, timeout=20)
    assert count(ledger, "SELECT count(*) FROM awa.completions") == 0
    worker.stop()
    client.close()
