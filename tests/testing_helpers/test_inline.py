"""Inline mode: an insert runs its job at once, from the text that would be stored."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

import awa
from awa import NewJob
from awa.testing import Book, inline


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
