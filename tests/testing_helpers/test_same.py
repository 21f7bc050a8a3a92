"""Inline and on a database, the same program comes to the same: one story, told both ways, and compared."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pytest

import awa
from awa import NewJob
from awa.testing import Ran, advance, inline, list_jobs, run_all, run_one
from tests.worker.test_validation import REFUSED, Typed


@dataclass
class Order:
    n: int
    price: Decimal
    at: datetime


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


Story = Callable[[awa.Client, psycopg.Connection[Any]], list[Any]]


def endings(client: awa.Client, conn: psycopg.Connection[Any]) -> list[Any]:
    """Every way in which an attempt can end."""

    @client.task(retry=awa.fixed(100))
    def end(how: str) -> object:
        match how:
            case "raise":
                raise KeyError(how)
            case "odd":
                raise Odd
            case "exit":
                raise SystemExit(3)
            case "terminal":
                raise awa.TerminalError("for good")
            case "retry at once":
                return awa.RetryAfter(0)
            case "retry later":
                raise awa.RetryAfter(200)
            case "snooze":
                return awa.Snooze(timedelta(seconds=300))
            case "snooze at once":
                snoozed.append(1)
                return awa.Snooze(0) if len(snoozed) == 1 else None
            case "cancel":
                return awa.Cancel()
            case "cancel why":
                raise awa.Cancel("not needed")
        return how

    @client.task(fail_on=ValueError)
    def picky(number: int) -> None:
        int("x" if number else "y", 10)

    snoozed: list[int] = []
    ways = [
        "raise",
        "odd",
        "exit",
        "terminal",
        "retry at once",
        "retry later",
        "snooze",
        "snooze at once",
        "cancel",
        "cancel why",
        "ok",
    ]
    for how in ways:
        client.insert(end.bind(how), max_attempts=2)
    client.insert_many([NewJob(end.bind("raise"), max_attempts=1), NewJob(end.bind("retry at once"), max_attempts=1)])
    client.insert(picky.bind(1))
    ran = run_all(client, raises=False)
    ran += run_all(client, raises=False, with_scheduled=True)
    return [told(client, ran), run_all(client)]


def rich(client: awa.Client, conn: psycopg.Connection[Any]) -> list[Any]:
    """Args, options, and what a handler sees of its job."""
    seen: list[Any] = []

    @client.task(queue="orders", priority=3)
    def handle(job: awa.Job[Order]) -> None:
        assert awa.current_job().id == job.id
        seen.append(
            [job.args, job.kind, job.queue, job.priority, job.attempt, job.max_attempts, job.tags, job.metadata]
        )
        seen.append([job.cancelled, (datetime.now(UTC) - job.created_at) < timedelta(minutes=5), repr(job)[-25:]])

    @client.task()
    def plain(at: datetime, key: bytes = b"\0") -> None:
        seen.append([at, key, awa.current_job().args])

    order = Order(1, Decimal("1.10"), datetime(2024, 10, 27, 2, 30, 0, 1, UTC))
    client.insert(order, tags=["a", "ä"], metadata={"m": [1, None, {"k": 1.5}]}, max_attempts=7, timeout=5)
    client.insert(order, priority=1, queue="b")
    client.insert(plain.bind(order.at))
    client.insert_many_copy([NewJob(order, tags=["x\\\t"], metadata={"\n": "\\"}), plain.bind(order.at, b"\xff")])
    client.insert({"any": ["thing"]}, kind="unknown")
    client.insert({"n": "x"}, kind="late")
    client.insert({"n": 1, "new": 2}, kind="late")

    @client.task(kind="late", retry=awa.fixed(50))
    def late(n: int) -> None:
        seen.append(n)

    return [told(client, run_all(client, raises=False)), seen]


def order_of_things(client: awa.Client, conn: psycopg.Connection[Any]) -> list[Any]:
    """Queues by name, priorities, insertion, nested inserts, what waits, and filters."""

    @client.task(aliases=["old"])
    def step(name: str, then: list[str], delay: float = 0) -> None:
        for child in then:
            client.insert(step.bind(child, []), delay=delay or None)

    @client.task(queue="a")
    def other(n: int) -> None: ...

    client.insert_many(
        [
            NewJob(step.bind("p4", []), priority=4),
            step.bind("first", ["child 1", "child 2"]),
            NewJob(step.bind("p1", ["later"], 600), priority=1),
            NewJob(step.bind("z", []), queue="z"),
            NewJob(step.bind("b", ["from b"]), queue="b"),
            other.bind(1),
            NewJob(step.bind("in 20 s", []), delay=20),
            NewJob(step.bind("in 10 s", []), delay=10),
            NewJob(step.bind("in 2 h", []), delay=7200),
            NewJob(step.bind("in 1 h", []), delay=3600),
            NewJob(step.bind("past", []), run_at=datetime.now(UTC) - timedelta(days=1)),
            NewJob({"name": "alias", "then": []}, kind="old"),
        ]
    )
    told_of = [
        [run_one(client, queue="z").args, run_one(client, kind=other).args, run_one(client, kind="old").args],
        [one.args["name"] for one in run_all(client, limit=2)],
        [one.args["name"] for one in run_all(client)],
        advance(client, seconds=15),
        [one.args["name"] for one in run_all(client)],
        [one.args["name"] for one in run_all(client, with_scheduled=True)],
        advance(client, days=1),
    ]
    return [*told_of, told(client, [])]


def control(client: awa.Client, conn: psycopg.Connection[Any]) -> list[Any]:
    """Cancelling what waits, what is available, what runs, and what has ended."""
    said: list[Any] = []

    @client.task()
    def victim(how: str) -> None:
        job = awa.current_job()
        asked = client.cancel(job.id, reason="stop", force=how == "force")
        said.append([asked.happened, asked.state, client.get(job.id).state])
        if how != "succeed":
            raise KeyError(how)

    waits = client.insert(victim.bind("never"), delay=100)
    here = client.insert(victim.bind("never"))
    said.append([client.cancel(waits.id).happened, client.cancel(here.id, reason="why").happened])
    said.append(client.cancel(here.id).happened)
    for how in ("ask", "force", "succeed"):
        client.insert(victim.bind(how))
    return [said, told(client, run_all(client, raises=False)), said]


def completing(client: awa.Client, conn: psycopg.Connection[Any]) -> list[Any]:
    """A handler that completes its job itself."""
    refused: list[Any] = []
    jobs: list[awa.Job[Any]] = []

    @client.task(retry=awa.fixed(10))
    def work(how: str) -> object:
        job = awa.current_job()
        jobs.append(job)
        with conn.transaction():
            job.complete(conn)
            if how == "roll back":
                raise KeyError(how)
        return awa.Snooze(5) if how == "snooze" else None

    for how in ("plain", "snooze", "roll back"):
        client.insert(work.bind(how))
    ran = told(client, run_all(client, raises=False))
    with pytest.raises(awa.StaleAttempt) as late:
        jobs[0].complete(conn)
    refused.append(str(late.value).partition(":")[2])
    return [ran, refused]


def told(client: awa.Client, ran: list[Ran]) -> list[Any]:
    """What can be compared: everything but ids, times and processes."""
    first = {job.id: position for position, job in enumerate(list_jobs(client))}
    runs = [
        [first[one.id], one.kind, one.queue, one.args, one.attempt, one.state, one.outcome, type(one.error)]
        for one in ran
    ]
    jobs = []
    for job in list_jobs(client):
        assert job == client.get(job.id)
        ahead = None if job.run_at is None else round((job.run_at - job.created_at).total_seconds() / 10)
        times = [job.claimed_at is None, job.ended_at is None, job.elapsed_ms is None, ahead]
        history = [{k: v for k, v in one.items() if k not in _VARIES} for one in job.history]
        assert all(datetime.fromisoformat(one["ended_at"]) > job.created_at for one in job.history)
        jobs.append(
            [
                *(job.kind, job.queue, job.state, job.priority, job.attempt, job.max_attempts, job.args, job.metadata),
                *(job.tags, job.waits_for, job.error, history, times),
            ]
        )
    return [runs, jobs]


_VARIES = {"ended_at", "elapsed_ms", "runtime"}


@pytest.mark.parametrize(
    "story", [endings, rich, order_of_things, control, completing], ids=lambda story: story.__name__
)
def test_inline_and_on_a_database(story: Story, database: str, caplog: pytest.LogCaptureFixture) -> None:
    """Guards every rule that the book of inline mode repeats: a rule of the database that it lacks shows here."""
    caplog.set_level(logging.CRITICAL, "awa.job")
    with psycopg.connect(database, autocommit=True) as conn:
        alone = awa.Client("host=/nonexistent/socket dbname=nowhere")
        with inline(alone, run=False):
            in_memory = story(alone, conn)
        client = awa.Client(database)
        try:
            stored = story(client, conn)
        finally:
            client.close()
    assert in_memory == stored


@pytest.mark.parametrize(("bad", "path"), REFUSED, ids=[f"{path}-{n}" for n, (_, path) in enumerate(REFUSED)])
def test_the_same_is_refused_in_the_same_words(bad: dict[str, Any], path: str) -> None:
    """Guards that inline mode validates as a producer does, singly and in batches, and books nothing then."""
    client = awa.Client("host=/nonexistent/socket dbname=nowhere", max_args_bytes=1000)

    @client.task()
    def handle(job: awa.Job[Typed]) -> None: ...

    job = NewJob(**({"args": {}, "kind": "k"} | bad))
    attempts: list[Callable[[], object]] = [
        lambda: client.insert(job),
        lambda: client.insert_many([NewJob({}, kind="k"), job]),
        lambda: client.insert_many_copy([NewJob({}, kind="k"), job]),
        lambda: client.insert(Typed(1, [2])),  # type: ignore[list-item]
        lambda: client.insert_many_copy([NewJob({}, kind="k", delay=5)]),
    ]
    for insert in attempts:
        with pytest.raises(awa.ValidationError) as stored:
            insert()
        with inline(client) as book, pytest.raises(awa.ValidationError) as booked:
            insert()
        assert book.jobs == []
        assert str(booked.value) == str(stored.value)
        assert (booked.value.path, booked.value.limit) == (stored.value.path, stored.value.limit)
