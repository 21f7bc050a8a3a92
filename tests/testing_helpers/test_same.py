"""Inline and on a database, the same program comes to the same: one story, told both ways, and compared."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Any

import psycopg
import pytest

import awa
from awa import NewJob, Unique
from awa.testing import Ran, advance, inline, list_jobs, run_all, run_one
from awa.unique import USUAL_STATES
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
    with pytest.raises(awa.StaleAttempt) as late, conn.transaction():
        jobs[0].complete(conn)
    with pytest.raises(awa.ConfigError, match="autocommit"):
        jobs[0].complete(conn)
    refused.append(str(late.value).partition(":")[2])
    return [ran, refused]


def uniqueness(client: awa.Client, conn: psycopg.Connection[Any]) -> list[Any]:
    """Unique jobs: each way to meet an equal one, in every state that counts."""
    said: list[Any] = []

    @client.task(unique=Unique(by_args=["n"]), retry=awa.fixed(100))
    def work(n: int, text: str = "") -> None:
        if text == "fail":
            raise awa.TerminalError
        if text == "retry":
            raise KeyError

    here: list[Any] = []

    def insert(*items: Any, **options: Any) -> None:
        try:
            written = client.insert_many(items) if len(items) > 1 else [client.insert(items[0], **options)]
        except awa.UniqueConflict as error:
            others = [job.id for job in list_jobs(client)]
            who = None if error.existing_id is None else others.index(error.existing_id)
            said.append([who, error.key, str(error).partition("job ")[2][-60:]])
            return
        here[:] = [job.id for job in list_jobs(client)]
        said.append([(here.index(one.id), one.is_new) for one in written])

    strict = Unique(by_args=["n"], on_conflict="raise")
    replace = Unique(by_args=["n"], on_conflict="replace")
    loose = Unique(by_args=False, states=["available", "running"], on_conflict="raise")
    insert(work.bind(1))
    insert(work.bind(1, "other"))
    insert(work.bind(1), unique=False)
    insert(work.bind(1), unique=strict)
    insert(work.bind(2), NewJob(work.bind(2), priority=1), work.bind(3), work.bind(1))
    insert(work.bind(4), NewJob(work.bind(1), unique=strict))
    insert(work.bind(5), NewJob(work.bind(5), unique=strict))
    insert(work.bind(1, "new"), unique=replace)
    insert(work.bind(6), delay=500, tags=["old"])
    insert(work.bind(6, "new"), unique=replace, delay=50, priority=4, metadata={"m": 1})
    insert(work.bind(7), delay=500)
    insert(work.bind(7, "at once"), unique=replace)
    insert(work.bind(8, "fail"))
    insert(work.bind(9, "retry"))
    said.append(told(client, run_all(client, raises=False)))
    for n in (1, 8, 9):  # completed, failed, waits for its next attempt
        insert(work.bind(n), unique=strict)
    insert(work.bind(9, "replaced"), unique=replace)
    insert(work.bind(0), unique=loose)
    insert(work.bind(0), unique=loose)
    said.append(client.cancel_by_unique_key(awa.unique_key("work", {"n": 6}, by_args=["n"])).happened)
    with pytest.raises(awa.JobNotFound):
        client.cancel_by_unique_key(b"0123456789abcdef")
    insert(work.bind(6))
    said.append(told(client, run_all(client, raises=False)))
    insert(work.bind(0), unique=loose)
    period = Unique(by_args=False, period=3600)
    insert(work.bind(0), unique=period, run_at=datetime(2030, 1, 1, tzinfo=UTC))
    insert(work.bind(0), unique=period, run_at=datetime(2030, 1, 1, 0, 59, tzinfo=UTC))
    insert(work.bind(0), unique=period, run_at=datetime(2030, 1, 1, 1, tzinfo=UTC))
    return [said, told(client, [])]


def following(client: awa.Client, conn: psycopg.Connection[Any]) -> list[Any]:
    """Jobs that follow from an outcome, and those that run after others."""

    @client.task(retry=awa.fixed(100))
    def work(name: str, how: str = "") -> object:
        match how:
            case "fail":
                raise awa.TerminalError(name)
            case "retry":
                raise KeyError(name)
            case "cancel":
                return awa.Cancel(name)
        return None

    def follow(name: str, **options: Any) -> Any:
        return NewJob(work.bind(name, options.pop("how", "")), **options)

    chain = follow("then", priority=1, tags=["t"], metadata={"m": 1.5}, on_completed=follow("and then", delay=30))
    for how in ("", "fail", "cancel", "retry"):
        client.insert(
            work.bind("first", how),
            max_attempts=1 + (how == "retry"),
            on_completed=[chain, follow("also", queue="q", max_attempts=3)],
            on_failed=follow("mourn", on_completed=follow("done")),
            on_cancelled=work.bind("shrug"),
        )
    waits = client.insert(work.bind("never"), delay=1000, on_cancelled=[work.bind("after a cancel")])
    client.cancel(waits.id)
    ran = told(client, run_all(client, raises=False))
    ran += told(client, run_all(client, raises=False, with_scheduled=True))

    one, two = client.insert_many([work.bind("parent"), work.bind("other parent")])
    bad, lost = client.insert_many([follow("bad", how="fail"), NewJob(work.bind("lost", "cancel"), delay=20)])
    child = client.insert(work.bind("child"), after=[one, two], priority=1)
    client.insert(work.bind("grandchild"), after=child, delay=50)
    client.insert(work.bind("cancelled with it"), after=[one, bad.id], on_cancelled=work.bind("told"))
    client.insert(work.bind("all the same"), after=bad, after_failed="run")
    client.insert(work.bind("discarded"), after=[bad, lost], after_failed="discard")
    client.insert(work.bind("not yet"), after=lost)
    unknown = []
    for items in ([follow("x", after=10**9)], [follow("y"), follow("x", after=[one, 10**9])]):
        with pytest.raises(awa.JobNotFound) as caught:
            client.insert_many(items) if len(items) > 1 else client.insert(items[0])
        unknown.append(str(caught.value))
    ran += told(client, run_all(client, raises=False))
    ran += told(client, run_all(client, raises=False, with_scheduled=True))
    ran += told(client, run_all(client, raises=False, with_scheduled=True))
    return [ran, unknown]


def results(client: awa.Client, conn: psycopg.Connection[Any]) -> list[Any]:
    """What handlers return and somebody asks for."""

    @client.task(keep_result=True, retry=awa.fixed(100))
    def add(a: int, b: int) -> Any:
        if b == 0:
            raise awa.TerminalError("no sum")
        if b == 1:
            return object()
        if b == 2:
            return awa.Cancel("not needed")
        if b == 3:
            with conn.transaction():
                awa.current_job().complete(conn, result={"by": "hand"})
        return {"sum": [a + b, None]}

    @client.task()
    def plain() -> int:
        return 5

    jobs = client.insert_many([*(NewJob(add.bind(1, b), max_attempts=1) for b in range(5)), plain.bind()])
    with pytest.raises(TimeoutError):
        jobs[0].result(timeout=0)
    ran = told(client, run_all(client, raises=False))
    said: list[Any] = []
    for job in jobs:
        try:
            said.append(job.result(timeout=30))
        except awa.JobFailed as error:
            said.append([error.state, error.error and error.error["type"], str(error).partition(" ")[2][2:]])
        except awa.ResultNotKept as error:
            said.append(str(error).partition(" ")[2][2:])
    return [ran, said, client.result(jobs[4].id)]


def expiring(client: awa.Client, conn: psycopg.Connection[Any]) -> list[Any]:
    """Jobs that are too late: available, waiting for a time, for another job; and what follows."""
    past = datetime(2020, 1, 2, 3, 4, 5, 678, UTC)
    seen: list[str] = []

    @client.task(concurrency_key="c", ordering_key=lambda name: name[:1])
    def work(name: str) -> None:
        seen.append(name)

    late = client.insert(work.bind("late"), expires_at=past, on_cancelled=[work.bind("a"), work.bind("b")])
    client.insert(work.bind("after it"), after=late)
    client.insert(work.bind("later"), expires_at=past, delay=500, unique=Unique(), queue="z")
    client.insert_many_copy([NewJob(work.bind("copied"), expires_at=past), work.bind("in time")])
    client.insert(NewJob(work.bind("c"), on_completed=NewJob(work.bind("d"), expires_at=past)), queue="a")
    first = told(client, run_all(client))
    assert client.insert(work.bind("later"), unique=Unique(), expires_at=past, delay=1).is_new
    again = told(client, run_all(client))
    jobs = [
        client.insert(work.bind(f"in {hours} h"), delay=1800, expires_at=datetime.now(UTC) + timedelta(hours=hours))
        for hours in (1, 3)
    ]
    made = advance(client, hours=2)
    states = [job.get().state for job in jobs]
    return [first, again, seen, made, states, len(run_all(client)), jobs[1].get().state]


def at_random(seed: int) -> Story:
    """A story of random inserts, runs, cancels and steps of time; the same each time for a seed."""

    def story(client: awa.Client, conn: psycopg.Connection[Any]) -> list[Any]:
        random = Random(seed)
        said: list[Any] = []

        @client.task(retry=awa.fixed(100))
        def work(n: int, how: str, inner: int) -> object:
            for child in range(inner):
                client.insert(work.bind(100 * n + child, "ok", 0), priority=1 + child % 4)
            match how:
                case "fail":
                    raise awa.TerminalError(how)
                case "raise":
                    raise KeyError(how)
                case "retry":
                    return awa.RetryAfter(50)
                case "snooze":
                    return awa.Snooze(70) if awa.current_job().attempt == 1 and not n % 2 else None
                case "cancel":
                    return awa.Cancel()
            return None

        def new(depth: int = 0) -> NewJob:
            how = random.choice(["ok", "ok", "ok", "fail", "raise", "retry", "snooze", "cancel"])
            options: dict[str, Any] = {
                "queue": random.choice([None, None, "a", "z"]),
                "priority": random.choice([None, None, 1, 4]),
                "max_attempts": random.choice([1, 2, 3]),
                "delay": random.choice([None, None, None, 30, 90, 200]),
            }
            for name in ("on_completed", "on_failed", "on_cancelled"):
                if depth < 2 and random.random() < 0.15:
                    options[name] = [new(depth + 1) for _ in range(random.randint(1, 2))]
            if depth == 0 and random.random() < 0.3:
                mode = random.choice(["return", "replace", "raise"])
                states = random.choice([USUAL_STATES, ["available", "running", "retryable"]])
                options["unique"] = Unique(
                    by_args=["n"], by_queue=random.random() < 0.5, states=states, on_conflict=mode
                )
            return NewJob(work.bind(random.randrange(12), how, random.choice([0, 0, 0, 2])), **options)

        for _ in range(40):
            jobs = list_jobs(client)
            match random.choice(
                ["one", "one", "one", "many", "after", "after", "run", "limit", "advance", "cancel", "due"]
            ):
                case "one" | "many" | "after" as way:
                    items = [new() for _ in range(1 if way != "many" else 4)]
                    if way == "after" and jobs:
                        parents = random.sample([job.id for job in jobs], min(len(jobs), random.randint(1, 2)))
                        failed = random.choice([None, "run", "discard"])
                        items = [replace(item, after=parents, after_failed=failed) for item in items]
                    try:
                        written = client.insert_many(items)
                    except awa.UniqueConflict as error:
                        said.append(error.key)
                        continue
                    places = {job.id: place for place, job in enumerate(list_jobs(client))}
                    said.append([(places.get(one.id), one.is_new) for one in written])
                case "run":
                    said.append(told(client, run_all(client, raises=False, kind=work)))
                case "limit":
                    said.append([one.args for one in run_all(client, raises=False, limit=3)])
                case "due":
                    said.append([one.args for one in run_all(client, raises=False, with_scheduled=True)])
                case "advance":
                    said.append(advance(client, seconds=60))
                case "cancel" if jobs:
                    said.append(client.cancel(random.choice(jobs).id, reason="at random").happened)
        said.append(told(client, run_all(client, raises=False)))
        return said

    story.__name__ = f"at random {seed}"
    return story


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
        ahead = None if job.run_at is None else _ahead(job.run_at, job.claimed_at or job.created_at)
        times = [job.claimed_at is None, job.ended_at is None, job.elapsed_ms is None, ahead]
        history = [numbered({k: v for k, v in one.items() if k not in _VARIES}, first) for one in job.history]
        assert all(datetime.fromisoformat(one["ended_at"]) > job.created_at for one in job.history)
        jobs.append(
            [
                *(job.kind, job.queue, job.state, job.priority, job.attempt, job.max_attempts, job.args, job.metadata),
                *(job.tags, job.waits_for, numbered(job.error, first), history, times),
            ]
        )
    return [runs, jobs]


def _ahead(run_at: datetime, since: datetime) -> object:
    """How far off a time is, in steps of ten seconds; a date that a story names is what it is, whenever it was told.

    Stories name times in whole steps. A job that is replaced later than it was inserted may be a moment further off.
    """
    seconds = (run_at - since).total_seconds()
    return run_at if seconds > 100_000 else (seconds + 1) // 10


def numbered(told: dict[str, Any] | None, first: dict[int, int]) -> dict[str, Any] | None:
    """*told*, with the jobs that its text names by their place instead of their id."""
    if told is None or not told.get("text"):
        return told
    return told | {"text": re.sub(r"job (\d+)", lambda found: f"job #{first.get(int(found[1]))}", told["text"])}


_VARIES = {"ended_at", "elapsed_ms", "runtime"}


@pytest.mark.parametrize(
    "story",
    [
        endings,
        rich,
        order_of_things,
        control,
        completing,
        uniqueness,
        following,
        results,
        expiring,
        *map(at_random, (17, 31, 41)),
    ],
    ids=lambda story: story.__name__,
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
