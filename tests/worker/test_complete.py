"""Completing an attempt inside the handler's own transaction."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel

import awa
from awa import RetryAfter, StaleAttempt
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, count_running, ended, fence, in_state, make_due, rescue
from tests.fixtures.proxy import Loss, Proxy, What

Conn = psycopg.Connection[Any]


@pytest.fixture
def ledger(conn: Conn) -> Conn:
    """A connection to look with, and a table of the application's to write to."""
    conn.execute("CREATE TABLE ledger (job bigint, attempt int)")
    return conn


def rows(ledger: Conn) -> list[tuple[int, int]]:
    return [(job, attempt) for job, attempt in ledger.execute("SELECT * FROM ledger ORDER BY 1, 2").fetchall()]


def note(conn: Conn, job: awa.Job[Any]) -> None:
    conn.execute("INSERT INTO ledger VALUES (%s, %s)", [job.id, job.attempt])


@contextmanager
def own_connection(database: str, level: IsolationLevel | None = None) -> Iterator[Conn]:
    with psycopg.connect(database) as conn:
        conn.isolation_level = level
        yield conn


@pytest.mark.parametrize("level", [None, *IsolationLevel])
def test_effects_and_completion_commit_together_at_any_isolation_level(
    database: str, client: awa.Client, start_worker: StartWorker, ledger: Conn, level: IsolationLevel | None
) -> None:
    @client.task()
    def work() -> None:
        job = awa.current_job()
        with own_connection(database, level) as conn:
            note(conn, job)
            job.complete(conn)

    start_worker(client)
    jobs = client.insert_many([work.bind() for _ in range(5)])
    assert all(ended(client, job).state == "completed" for job in jobs)
    assert rows(ledger) == [(job.id, 1) for job in jobs]
    wait_until(lambda: count_running(ledger) == 0)


def test_it_takes_a_cursor_a_pooled_connection_and_none_without_a_transaction(
    database: str, client: awa.Client, start_worker: StartWorker, ledger: Conn
) -> None:
    """Guard: commits_at_once. Without it the job is completed apart from what its handler has written."""

    @client.task(fail_on=awa.ConfigError)
    def work(how: str) -> None:
        job = awa.current_job()
        if how == "cursor":
            with psycopg.connect(database) as conn, conn.cursor(row_factory=psycopg.rows.dict_row) as cursor:
                job.complete(cursor)
        elif how == "pooled":
            with client.connection() as conn, conn.transaction():
                job.complete(conn)
        else:
            with client.connection() as conn:
                job.complete(conn)
        raise ValueError("only logged")

    start_worker(client)
    jobs = [client.insert(work.bind(how)) for how in ("cursor", "pooled", "autocommit")]
    found = [ended(client, job) for job in jobs]
    assert [job.state for job in found] == ["completed", "completed", "failed"]
    assert found[2].error is not None
    assert "`with conn.transaction():`" in found[2].error["text"]


@pytest.mark.parametrize("then", ["raise", "retry", "return"])
def test_what_the_handler_does_after_the_commit_is_only_logged(
    database: str, client: awa.Client, start_worker: StartWorker, ledger: Conn, then: str
) -> None:
    @client.task()
    def work() -> object:
        job = awa.current_job()
        with own_connection(database) as conn:
            note(conn, job)
            job.complete(conn)
        if then == "raise":
            raise ValueError("afterwards")
        return RetryAfter(0) if then == "retry" else None

    worker = start_worker(client)
    job = client.insert(work.bind())
    assert ended(client, job).state == "completed"
    worker.stop()
    info = client.get(job.id)
    assert (info.state, info.attempt, rows(ledger)) == ("completed", 1, [(job.id, 1)])
    assert count_running(ledger) == 0


@pytest.mark.parametrize(
    ("then", "state", "attempt"), [("raise", "retryable", 2), ("return", "completed", 1), ("snooze", "scheduled", 1)]
)
def test_rolled_back_the_handlers_outcome_counts(
    database: str,
    client: awa.Client,
    start_worker: StartWorker,
    ledger: Conn,
    then: str,
    state: str,
    attempt: int,
) -> None:
    @client.task()
    def work() -> object:
        job = awa.current_job()
        with own_connection(database) as conn:
            note(conn, job)
            job.complete(conn)
            conn.rollback()
        if then == "raise":
            raise ValueError("rolled back")
        return awa.Snooze(60) if then == "snooze" else None

    start_worker(client)
    info = in_state(client, client.insert(work.bind()), state)
    assert (info.attempt, rows(ledger)) == (attempt, [])


OUTCOMES = {"Cancel: no need": awa.Cancel("no need"), "Snooze(60)": awa.Snooze(60), "RetryAfter(60)": RetryAfter(60)}
ERRORS = {"ValueError: late": ValueError("late"), "awa.errors.TerminalError: late": awa.TerminalError("late")}


@pytest.mark.parametrize(
    ("way", "told", "ending"),
    [*(("return", *item) for item in OUTCOMES.items()), *(("raise", *item) for item in (OUTCOMES | ERRORS).items())],
)
def test_what_follows_a_commit_is_told_as_what_it_is(
    database: str,
    client: awa.Client,
    start_worker: StartWorker,
    caplog: pytest.LogCaptureFixture,
    way: str,
    told: str,
    ending: Exception,
) -> None:
    @client.task()
    def work() -> object:
        with own_connection(database) as conn:
            awa.current_job().complete(conn)
        if way == "raise":
            raise ending
        return ending

    caplog.set_level("INFO", "awa.job")
    worker = start_worker(client)
    job = client.insert(work.bind())
    assert ended(client, job).state == "completed"
    worker.stop()
    assert client.get(job.id).state == "completed"
    said = [record.getMessage() for record in caplog.records if record.name == "awa.job"]
    assert len(said) == 1, said
    assert said[0].endswith(
        f": ended with {told} after complete(); this counts only if its transaction was rolled back"
    )


def test_rolled_back_to_a_savepoint_the_handlers_outcome_counts(
    database: str, client: awa.Client, start_worker: StartWorker, ledger: Conn
) -> None:
    @client.task()
    def work() -> None:
        job = awa.current_job()
        with own_connection(database) as conn:
            note(conn, job)
            with conn.transaction(force_rollback=True):
                job.complete(conn)
        if job.attempt == 1:
            raise ValueError("not completed")

    start_worker(client)
    job = client.insert(work.bind())
    in_state(client, job, "retryable")
    make_due(ledger, job.id)
    assert ended(client, job).attempt == 2
    assert rows(ledger) == [(job.id, 1), (job.id, 2)]


def test_an_exception_in_the_transaction_undoes_both_and_the_retry_does_them_once(
    database: str, client: awa.Client, start_worker: StartWorker, ledger: Conn
) -> None:
    @client.task(retry=awa.fixed(0))
    def work() -> None:
        job = awa.current_job()
        with own_connection(database) as conn:
            note(conn, job)
            job.complete(conn)
            if job.attempt < 3:
                raise ValueError("before the commit")

    start_worker(client)
    job = client.insert(work.bind())
    assert ended(client, job).attempt == 3
    assert rows(ledger) == [(job.id, 3)]


def test_after_the_handlers_end_it_is_refused(database: str, client: awa.Client, start_worker: StartWorker) -> None:
    kept: list[awa.Job[Any]] = []

    @client.task()
    def work() -> None:
        kept.append(awa.current_job())

    start_worker(client)
    job = client.insert(work.bind())
    ended(client, job)
    with own_connection(database) as conn, pytest.raises(StaleAttempt) as caught:
        kept[0].complete(conn)
    assert (caught.value.job_id, caught.value.entry_id) == (job.id, kept[0].entry_id)
    assert client.get(job.id).state == "completed"


def test_twice_is_refused_and_the_first_stands(
    database: str, client: awa.Client, start_worker: StartWorker, ledger: Conn
) -> None:
    refused: list[StaleAttempt] = []

    @client.task()
    def work() -> None:
        job = awa.current_job()
        with own_connection(database) as conn:
            note(conn, job)
            job.complete(conn)
        with own_connection(database) as conn:
            note(conn, job)
            try:
                job.complete(conn)
            except StaleAttempt as error:
                refused.append(error)
                conn.rollback()

    start_worker(client)
    job = client.insert(work.bind())
    assert ended(client, job).state == "completed"
    wait_until(lambda: len(refused) == 1)
    assert rows(ledger) == [(job.id, 1)]


@pytest.mark.parametrize("commits", [True, False])
def test_a_transaction_that_outlives_the_handler_decides_when_it_ends(
    database: str, client: awa.Client, start_worker: StartWorker, ledger: Conn, commits: bool
) -> None:
    returned = threading.Event()
    left_open: list[Conn] = []

    @client.task()
    def work() -> None:
        job = awa.current_job()
        conn = psycopg.connect(database)
        left_open.append(conn)
        note(conn, job)
        job.complete(conn)
        returned.set()

    start_worker(client, poll_interval=30)
    job = client.insert(work.bind())
    assert returned.wait(10)
    # the worker asks about it, is put off by the open transaction, and goes on with other jobs
    wait_until(lambda: client.get(job.id).state == "running")
    with left_open[0] as conn:
        if not commits:
            conn.rollback()
    info = ended(client, job, timeout=5)
    assert (info.state, info.attempt) == ("completed", 1)
    assert rows(ledger) == ([(job.id, 1)] if commits else [])
    wait_until(lambda: count_running(ledger) == 0)


@pytest.mark.parametrize("what", ["answer", "request", "connection"])
@pytest.mark.parametrize(("level", "then"), [*((level, "raise") for level in IsolationLevel), (None, "return")])
def test_a_commit_whose_acknowledgement_is_lost_counts_if_it_was_made(
    client: awa.Client,
    start_worker: StartWorker,
    ledger: Conn,
    proxy: Proxy,
    proxied: str,
    level: IsolationLevel | None,
    then: str,
    what: What,
) -> None:
    """Guard: after complete() the worker's record is an end under the same unique key, which asks the database.

    As a completion it stands beside the handler's own, whose transaction is still open: tried.
    """
    losses: list[Loss] = []

    @client.task(retry=awa.fixed(0))
    def work() -> None:
        job = awa.current_job()
        try:
            with own_connection(proxied, level) as conn:
                note(conn, job)
                job.complete(conn)
                if job.attempt == 1:
                    losses.append(proxy.lose(what, b"COMMIT"))
        except psycopg.OperationalError:
            if then == "raise":
                raise

    worker = start_worker(client)
    job = client.insert(work.bind())
    wait_until(lambda: losses)
    losses[0].wait()
    if what == "connection":
        # the transaction is open still, and the worker asks again and again
        wait_until(lambda: worker._claimer._not_before)
        assert client.get(job.id).state == "running"
        losses[0].let_go()
    info = ended(client, job)
    attempt = 2 if (what, then) == ("request", "raise") else 1
    effects = [] if (what, then) == ("request", "return") else [(job.id, attempt)]
    assert (info.state, info.attempt, rows(ledger)) == ("completed", attempt, effects)
    assert len(info.history) == attempt - 1
    wait_until(lambda: count_running(ledger) == 0)
    assert count(ledger, "SELECT count(*) FROM awa.completions") == 0


def test_other_jobs_go_on_while_a_completing_transaction_stays_open(
    database: str, client: awa.Client, start_worker: StartWorker, ledger: Conn
) -> None:
    completed = threading.Event()
    go_on = threading.Event()

    @client.task()
    def slow() -> None:
        with own_connection(database) as conn:
            awa.current_job().complete(conn)
            completed.set()
            assert go_on.wait(10)

    @client.task()
    def work() -> None: ...

    start_worker(client, threads=2, poll_interval=30)
    job = client.insert(slow.bind())
    assert completed.wait(10)
    others = client.insert_many([work.bind() for _ in range(100)])
    assert all(ended(client, other, timeout=5).state == "completed" for other in others)
    go_on.set()
    assert ended(client, job).state == "completed"


def test_after_a_rescue_it_is_stale_and_the_transactions_effects_are_gone(
    database: str, client: awa.Client, start_worker: StartWorker, ledger: Conn
) -> None:
    started = threading.Event()
    go_on = threading.Event()
    raised: list[BaseException] = []

    @client.task()
    def work() -> None:
        job = awa.current_job()
        if job.attempt == 1:
            started.set()
            assert go_on.wait(10)
        try:
            with own_connection(database) as conn:
                note(conn, job)
                job.complete(conn)
        except BaseException as error:
            raised.append(error)
            raise

    worker = start_worker(client)
    job = client.insert(work.bind())
    assert started.wait(10)
    runtime = worker.runtime
    fence(ledger, runtime)
    rescue(ledger, runtime)
    go_on.set()
    info = ended(client, job)
    assert (info.state, info.attempt) == ("completed", 2)
    wait_until(lambda: bool(raised))  # the first attempt's handler may end after the second attempt's
    assert [type(error) for error in raised] == [StaleAttempt]
    assert isinstance(raised[0], StaleAttempt)
    assert raised[0].job_id == job.id
    assert rows(ledger) == [(job.id, 2)]
    assert [h["type"] for h in info.history] == ["WorkerDied"]


def test_a_rescue_waits_for_an_open_completing_transaction(
    database: str, client: awa.Client, start_worker: StartWorker, ledger: Conn
) -> None:
    completing = threading.Event()
    go_on = threading.Event()

    @client.task()
    def work() -> None:
        job = awa.current_job()
        with own_connection(database) as conn:
            note(conn, job)
            job.complete(conn)
            completing.set()
            assert go_on.wait(10)

    worker = start_worker(client)
    job = client.insert(work.bind())
    assert completing.wait(10)
    fence(ledger, worker.runtime)
    wait_until(
        lambda: (
            ledger.execute("SELECT ended, blocked FROM awa.rescue_v1(%s, 10)", [worker.runtime]).fetchone() == (0, 1)
        )
    )
    go_on.set()
    info = ended(client, job)
    assert (info.state, info.attempt, rows(ledger)) == ("completed", 1, [(job.id, 1)])
