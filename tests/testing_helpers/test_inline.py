"""Inline mode: an insert runs its job at once, from the text that would be stored."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import awa
from awa import NewJob
from awa.testing import Book, advance, inline, run_all

inline_module = importlib.import_module("awa.testing.inline")  # whose function hides it


@pytest.fixture
def nowhere() -> awa.Client:
    """A client whose database does not exist: whatever reaches it fails."""
    return awa.Client("host=/nonexistent/socket dbname=nowhere")


@dataclass
class Mail:
    to: str


def test_a_job_runs_at_once_and_knows_itself(nowhere: awa.Client) -> None:
    """Guards the order (run before the insert returns), and what a handler sees of its job, nested ones included."""
    seen: list[tuple[Any, ...]] = []

    @nowhere.task(queue="mail", max_attempts=3)
    def send(job: awa.Job[Mail]) -> None:
        inner = nowhere.insert(count.bind(1))
        assert inner.get().state == "completed"
        assert awa.current_job().id == job.id
        seen.append(
            (job.args, job.metadata, job.tags, job.queue, job.priority, job.attempt, job.max_attempts, job.kind)
        )

    @nowhere.task()
    def count(n: int) -> None:
        job = awa.current_job()
        seen.append((job.id, job.args, n))

    with inline(nowhere) as book:
        inserted = nowhere.insert(Mail("ada"), metadata={"m": [1]}, tags=["a"], priority=1)
        assert [job.state for job in book.jobs] == ["completed", "completed"]
        assert seen == [(2, {"n": 1}, 1), (Mail("ada"), {"m": [1]}, ("a",), "mail", 1, 1, 3, "mail")]
        assert nowhere.get(inserted.id) == inserted.get() == book.jobs[0]
        with pytest.raises(awa.JobNotFound):
            nowhere.get(99)
    with pytest.raises(LookupError):
        awa.current_job()
    with pytest.raises(awa.DatabaseNotFound):  # and the client is as it was
        nowhere.get(inserted.id)


def test_what_a_handler_raises_reaches_the_test_from_the_outermost_insert(
    nowhere: awa.Client, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards that a failure is seen by the test, is booked, and does not end the handler that inserted the job."""
    went_on: list[str] = []

    @nowhere.task()
    def outer() -> None:
        nowhere.insert_many([bad.bind(), bad.bind()])
        went_on.append("outer")

    @nowhere.task()
    def bad() -> None:
        raise KeyError("bad")

    caplog.set_level(logging.CRITICAL, "awa.job")
    with inline(nowhere) as book, pytest.raises(KeyError, match="bad"):
        nowhere.insert(outer.bind())
    assert went_on == ["outer"]
    assert [job.state for job in book.jobs] == ["completed", "retryable", "retryable"]
    assert book.jobs[1].error is not None and "raise KeyError" in book.jobs[1].error["traceback"]
    with inline(nowhere, raises=False) as book:
        nowhere.insert(bad.bind(), max_attempts=1)
        assert [(job.state, len(job.history)) for job in book.jobs] == [("failed", 1)]


def test_handlers_that_insert_themselves_for_ever_are_told(nowhere: awa.Client) -> None:
    """Guards the bound of the recursion, also when the handler swallows the error."""

    @nowhere.task(retry_on=())
    def endless() -> None:
        with contextlib.suppress(awa.AwaError):
            nowhere.insert(endless.bind())

    with inline(nowhere) as book, pytest.raises(awa.AwaError, match="kind 'endless'"):
        nowhere.insert(endless.bind())
    assert len(book.jobs) == 31


def test_jobs_that_follow_for_ever_are_told(nowhere: awa.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the bound of jobs that wait for each other: each runs after the one before, at no depth."""
    monkeypatch.setattr(inline_module, "MOST", 5)

    @nowhere.task()
    def endless() -> None:
        nowhere.insert(endless.bind(), after=awa.current_job().id)

    with inline(nowhere) as book, pytest.raises(awa.AwaError, match=r"more than 5 jobs .* kind 'endless'"):
        nowhere.insert(endless.bind())
    assert len(book.jobs) == 6


def test_threads_that_insert_at_once_run_each_job_once(nowhere: awa.Client) -> None:
    """Guards the book's lock."""
    seen: list[int] = []

    @nowhere.task()
    def work(n: int) -> None:
        seen.append(n)

    with inline(nowhere) as book, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: nowhere.insert_many([work.bind(n), work.bind(n + 1000)]), range(200)))
    assert sorted(seen) == [*range(200), *range(1000, 1200)]
    assert {job.state for job in book.jobs} == {"completed"} and len({job.id for job in book.jobs}) == 400


def test_what_needs_a_database_says_so(nowhere: awa.Client, database: str) -> None:
    """Guards that nothing is ignored silently, and that a lent connection is checked and left alone."""

    @nowhere.task()
    def work(n: int) -> None: ...

    with inline(nowhere) as book:
        for refused in (nowhere.worker, lambda: nowhere.admin.queue_counts()):
            with pytest.raises(awa.ConfigError, match="inline mode"):
                refused()
        with pytest.raises(awa.ConfigError, match="psycopg"):
            nowhere.insert(work.bind(1), conn="session")  # type: ignore[arg-type]
        with pytest.raises(awa.ValidationError, match=r"items\[1\]"):
            nowhere.insert_many([work.bind(1), NewJob(work.bind(1), priority=9)])
        assert book.jobs == []
        with psycopg.connect(database) as conn:
            nowhere.insert(work.bind(1), conn=conn)
            nowhere.insert_many([work.bind(2)], conn=conn.cursor())
            nowhere.insert_many_copy([work.bind(3)], conn=conn)
            assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        assert [(job.args["n"], job.state) for job in book.jobs] == [(n, "completed") for n in (1, 2, 3)]


def test_what_follows_runs_at_once_too(nowhere: awa.Client) -> None:
    """Guards follow-ups, jobs that waited for others, and results, where the job they depend on has just run."""
    ran: list[str] = []

    @nowhere.task(keep_result=True)
    def work(name: str, how: str = "") -> Any:
        ran.append(name)
        if how == "cancel":
            return awa.Cancel()
        return {"name": name}

    with inline(nowhere):
        late = nowhere.insert(work.bind("late"), delay=60)
        nowhere.insert(work.bind("after late"), after=late, on_completed=work.bind("last"))
        nowhere.insert(work.bind("first"), on_completed=NewJob(work.bind("second"), on_completed=work.bind("third")))
        assert ran == ["first", "second", "third"]
        cancelled = nowhere.insert(work.bind("no", "cancel"), on_cancelled=work.bind("shrug"))
        nowhere.insert(work.bind("all the same"), after=cancelled, after_failed="run")
        assert ran[3:] == ["no", "shrug", "all the same"]
        with pytest.raises(awa.JobFailed):
            cancelled.result()
        with pytest.raises(TimeoutError, match="run_all"):
            late.result(timeout=60)
        nowhere.cancel(nowhere.insert(work.bind("never"), delay=5, on_cancelled=work.bind("told")).id)
        assert ran[6:] == ["told"]
        assert advance(nowhere, minutes=1) == 1
        assert [one.args["name"] for one in run_all(nowhere)] == ["late", "after late", "last"]
        assert late.result() == {"name": "late"}


def test_what_is_replaced_does_not_come_to_wait_for_itself(nowhere: awa.Client) -> None:
    """Guards that a circle is refused here as a database refuses it, and nothing is booked."""

    @nowhere.task()
    def work(n: int) -> None: ...

    latest = awa.Unique(by_args=False, on_conflict="replace")
    with inline(nowhere) as book:
        first = nowhere.insert(work.bind(1), unique=latest, delay=60)
        second = nowhere.insert(work.bind(2), after=first)
        with pytest.raises(awa.ValidationError, match=r"^items\[1\]: after .* wait for itself"):
            nowhere.insert_many([work.bind(3), NewJob(work.bind(4), unique=latest, after=second)])
        assert [(job.args["n"], job.state) for job in book.jobs] == [(1, "scheduled"), (2, "scheduled")]


def test_a_unique_job_runs_once(nowhere: awa.Client) -> None:
    """Guards that an equal job does not run again, and that one that replaced what a job is about does."""
    ran: list[str] = []

    @nowhere.task(unique=awa.Unique(by_args=["n"]))
    def work(n: int, text: str) -> None:
        ran.append(text)

    with inline(nowhere) as book:
        first = nowhere.insert(work.bind(1, "a"))
        again = nowhere.insert(work.bind(1, "b"))
        assert (again.id, first.is_new, again.is_new, ran) == (first.id, True, False, ["a"])
        replacing = awa.Unique(by_args=["n"], on_conflict="replace")
        waits = nowhere.insert(work.bind(2, "c"), delay=60)
        assert nowhere.insert(work.bind(2, "d"), unique=replacing).id == waits.id
        assert ran == ["a", "d"]
        with pytest.raises(awa.UniqueConflict) as refused:
            nowhere.insert_many(
                [work.bind(3, "x"), NewJob(work.bind(1, "y"), unique=awa.Unique(by_args=["n"], on_conflict="raise"))]
            )
        assert refused.value.existing_id == first.id and len(book.jobs) == 2


def test_asynchronous_inserts_run_in_their_thread(nowhere: awa.Client) -> None:
    """Guards the methods for asyncio: the job has run when the await is over."""
    threads: list[int] = []

    @nowhere.task()
    def work() -> None:
        threads.append(threading.get_ident())

    async def insert() -> None:
        await nowhere.insert_async(work.bind())
        await nowhere.insert_many_async([work.bind()])
        assert await nowhere.insert_many_copy_async([work.bind()]) == 1
        with pytest.raises(awa.ConfigError, match="async"):
            await nowhere.insert_async(work.bind(), conn="no connection")  # type: ignore[arg-type]

    with inline(nowhere) as book:
        asyncio.run(insert())
    assert [job.state for job in book.jobs] == ["completed"] * 3
    assert threads == [threading.get_ident()] * 3


def test_a_handlers_transaction_is_of_the_clients_own_database(database: str) -> None:
    """Guards job.transaction(): what it writes is committed, or rolled back with the attempt's failure."""
    client = awa.Client(database)

    @client.task(keep_result=True)
    def work(n: int) -> int:
        job = awa.current_job()
        with job.transaction() as conn:
            conn.execute("INSERT INTO done VALUES (%s)", [n])
            job.complete(conn, result=n + 1)
            if n == 2:
                raise KeyError(n)
        return 0

    with client.connection() as conn:
        conn.execute("CREATE TABLE done (n int)")
    with inline(client, raises=False) as book:
        inserted = client.insert_many([work.bind(1), work.bind(2)])
        assert [job.state for job in book.jobs] == ["completed", "retryable"]
        assert inserted[0].result() == 2
    with client.connection() as conn:
        assert conn.execute("SELECT n FROM done").fetchall() == [(1,)]
        assert conn.execute("SELECT count(*) FROM awa.jobs").fetchall() == [(0,)]
    client.close()


def test_running_can_wait(nowhere: awa.Client) -> None:
    """Guards ``run=False``: jobs are booked, and no handler is called."""

    @nowhere.task()
    def work() -> None:
        raise AssertionError

    book: Book
    with inline(nowhere, run=False) as book:
        nowhere.insert(work.bind())
        nowhere.insert({}, kind="unknown")
    assert [(job.kind, job.state) for job in book.jobs] == [("work", "available"), ("unknown", "available")]


def test_a_job_that_has_expired_is_cancelled_and_keys_make_no_difference(nowhere: awa.Client) -> None:
    """Guards expiry where a job would begin, and as it is inserted; what follows runs at once."""
    ran: list[str] = []

    @nowhere.task(ordering_key=lambda name: "all", concurrency_key="c")
    def work(name: str) -> None:
        ran.append(name)

    past = datetime(2020, 1, 2, 3, 4, 5, tzinfo=UTC)
    with inline(nowhere):
        late = nowhere.insert(work.bind("late"), expires_at=past, on_cancelled=work.bind("instead"))
        assert ran == ["instead"]
        info = late.get()
        assert (info.state, info.error and info.error["text"]) == ("cancelled", "it expired at 2020-01-02 03:04:05Z")
        waits = nowhere.insert(work.bind("waits"), delay=3600, expires_at=datetime.now(UTC) + timedelta(hours=2))
        nowhere.insert_many_copy([work.bind("copied")])
        assert advance(nowhere, hours=3) == 0
        assert waits.get().state == "cancelled"
    assert ran == ["instead", "copied"]
    with inline(nowhere, run=False):
        available = nowhere.insert(work.bind("booked"), expires_at=past, on_cancelled=work.bind("after all"))
        assert available.get().state == "available"
        assert [one.args for one in run_all(nowhere)] == [{"name": "after all"}]
