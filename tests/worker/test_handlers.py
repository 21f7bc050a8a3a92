"""What handlers are given, and args that do not fit them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

import psycopg
import pytest

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count_running, ended, in_state, make_due

Conn = psycopg.Connection[Any]


class Colour(Enum):
    RED = "red"


@dataclass
class Address:
    street: str
    number: int | None = None


@dataclass
class SendEmail:
    to: str
    address: Address
    at: datetime
    day: date
    key: UUID
    price: Decimal
    colour: Colour
    data: bytes
    pair: tuple[int, str]
    names: set[str]
    extra: dict[str, Any] = field(default_factory=dict)


def make_email() -> SendEmail:
    return SendEmail(
        to="ä\n\t😀'\"\\",
        address=Address("Dlouhá", 5),
        at=datetime(2024, 2, 29, 12, 0, 0, 123456, UTC),
        day=date(2024, 2, 29),
        key=UUID(int=7),
        price=Decimal("12.300"),
        colour=Colour.RED,
        data=bytes(range(256)),
        pair=(2**63 - 1, ""),
        names={"a", "b"},
        extra={"float": 0.1, "deep": [[{"": None}]], "flag": False},
    )


def test_a_typed_handler_gets_its_job_with_args_of_the_declared_type(
    client: awa.Client, start_worker: StartWorker
) -> None:
    seen: list[awa.Job[SendEmail]] = []

    @client.task(queue="email", priority=3, max_attempts=7)
    def handle(job: awa.Job[SendEmail]) -> None:
        seen.append(job)
        assert awa.current_job().id == job.id

    start_worker(client, queues=["email"])
    sent = make_email()
    before = datetime.now(UTC)
    inserted = client.insert(sent, tags=["a", "ä'\"{},\\"], metadata={"trace": [1, None]})
    assert ended(client, inserted).state == "completed"
    [job] = seen
    assert job.args == sent
    assert type(job.args.address) is Address
    assert (job.id, job.kind, job.queue, job.priority) == (inserted.id, "send_email", "email", 3)
    assert (job.attempt, job.max_attempts) == (1, 7)
    assert (job.tags, job.metadata) == (("a", "ä'\"{},\\"), {"trace": [1, None]})
    assert abs((job.created_at - before).total_seconds()) < 60
    assert job.created_at.utcoffset() is not None
    assert "send_email" in repr(job)


def test_a_plain_function_gets_its_args_and_reaches_its_job(client: awa.Client, start_worker: StartWorker) -> None:
    seen: list[Any] = []

    @client.task()
    def resize(path: str, width: int = 800, *, keep: bool = True) -> None:
        job = awa.current_job()
        seen.append((path, width, keep, job.kind, job.args, threading.current_thread().name))

    start_worker(client)
    jobs = [client.insert(resize.bind("x.png")), client.insert({"path": "y.png", "width": 3}, kind="resize")]
    assert all(ended(client, job).state == "completed" for job in jobs)
    assert sorted(s[:4] for s in seen) == [("x.png", 800, True, "resize"), ("y.png", 3, True, "resize")]
    assert all(s[4]["path"] == s[0] and s[5].startswith("awa-") for s in seen)
    with pytest.raises(LookupError):
        resize("called")  # still a function; outside of a worker there is no job


def test_a_mapping_handler_and_a_bare_job(client: awa.Client, start_worker: StartWorker) -> None:
    seen: list[Any] = []

    @client.task(kind="anything")
    def handle(job: awa.Job[dict[str, Any]]) -> None:
        seen.append(job.args)

    start_worker(client)
    for args in ({}, {"a": 1}, {"a": {"b": [None, True, -0.5]}}):
        ended(client, client.insert(args, kind="anything"))
    assert seen == [{}, {"a": 1}, {"a": {"b": [None, True, -0.5]}}]


def test_an_alias_runs_jobs_of_the_older_name(client: awa.Client, start_worker: StartWorker) -> None:
    seen: list[tuple[str, int]] = []

    @client.task(kind="new", aliases=["old", "older"])
    def work(n: int) -> None:
        seen.append((awa.current_job().kind, n))

    start_worker(client)
    for n, kind in enumerate(("new", "old", "older")):
        ended(client, client.insert({"n": n}, kind=kind))
    assert seen == [("new", 0), ("old", 1), ("older", 2)]


def test_current_job_is_the_threads_own(client: awa.Client, start_worker: StartWorker) -> None:
    together = threading.Barrier(4, timeout=10)
    seen: list[tuple[int, int]] = []

    @client.task()
    def work(n: int) -> None:
        together.wait()
        seen.append((n, awa.current_job().args["n"]))
        together.wait()

    start_worker(client, threads=4)
    jobs = client.insert_many([work.bind(n) for n in range(4)])
    assert all(ended(client, job).state == "completed" for job in jobs)
    assert sorted(seen) == [(n, n) for n in range(4)]
    with pytest.raises(LookupError, match="no job runs in this thread"):
        awa.current_job()


def test_long_args_arrive_whole(database: str, start_worker: StartWorker) -> None:
    client = awa.Client(database, max_args_bytes=8 * 1024 * 1024)
    seen: list[tuple[int, bool]] = []

    @client.task()
    def work(n: int, text: str) -> None:
        seen.append((n, text == chr(0xE4 + n) * 200_000))

    start_worker(client, threads=2)
    jobs = client.insert_many([work.bind(n, chr(0xE4 + n) * 200_000) for n in range(6)])
    assert all(ended(client, job).state == "completed" for job in jobs)
    assert sorted(seen) == [(n, True) for n in range(6)]
    client.close()


DEEP = '{"n": ' + "[" * 5000 + "]" * 5000 + "}"
BAD = {
    "missing": "{}",
    "extra": '{"n": 1, "m": 2}',
    "mistyped": '{"n": "one"}',
    "null": '{"n": null}',
    "list": "[1]",
    "scalar": "1",
    "json-null": "null",
    "deep": DEEP,
    "digits": '{"n": ' + "9" * 5000 + "}",
    "surrogate": '{"n": "\\ud800"}',
    "nul": '{"n": "\\u0000"}',
    "twice": '{"n": 1, "n": "x"}',
    "float": '{"n": 1.5}',
    "huge-float": '{"n": 1e999}',
}


@dataclass
class Numbered:
    n: int


@pytest.mark.parametrize("is_typed", [True, False], ids=["typed", "plain"])
def test_args_that_do_not_fit_fail_that_one_job_and_the_batch_runs_at_once(
    client: awa.Client, start_worker: StartWorker, conn: Conn, is_typed: bool
) -> None:
    ran: list[int] = []
    if is_typed:

        @client.task(kind="work")
        def handle(job: awa.Job[Numbered]) -> None:
            ran.append(job.args.n)
    else:

        @client.task(kind="work")
        def work(n: int) -> None:
            ran.append(n)

    bodies = [body for bad in BAD.values() for body in ('{"n": 7}', bad)] + ['{"n": 7}']
    with conn.transaction():  # one transaction: they are claimed together
        conn.cursor().executemany("INSERT INTO awa.jobs (kind, args) VALUES ('work', %s)", [(b,) for b in bodies])
    ids = [row[0] for row in conn.execute("SELECT id FROM awa.jobs ORDER BY id").fetchall()]
    bad_ids, good_ids = ids[1::2], ids[0::2]

    start_worker(client, threads=2, poll_interval=30)
    for job_id in good_ids:
        assert ended(client, awa.Inserted(job_id), timeout=5).state == "completed"
    assert ran == [7] * len(good_ids)
    waiting = """SELECT history -> 0 ->> 'type', history -> 0 ->> 'text', attempt FROM awa.waiting_jobs
                  WHERE id = %s AND state = 'retryable'"""
    for name, job_id in zip(BAD, bad_ids, strict=True):
        row = conn.execute(waiting, [job_id]).fetchone()
        assert row is not None, f"{name}: {state_of(conn, job_id)}"
        assert row[1], name
        assert row[2] == 2, name
    assert count_running(conn) == 0


def state_of(conn: Conn, job_id: int) -> Any:
    return conn.execute("SELECT state, history FROM awa.find_job_v1(%s)", [job_id]).fetchone()


def test_a_job_whose_args_do_not_fit_runs_once_the_code_fits_again(
    database: str, client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    ran: list[str] = []

    @client.task(kind="work")
    def work(n: int) -> None: ...

    fixed = awa.Client(database)

    @fixed.task(kind="work")
    def work_again(n: str) -> None:
        ran.append(n)

    row = conn.execute("""INSERT INTO awa.jobs (kind, args) VALUES ('work', '{"n": "x"}') RETURNING id""").fetchone()
    assert row is not None
    job = awa.Inserted(row[0])
    worker = start_worker(client)
    info = in_state(client, job, "retryable")
    assert "n" in info.history[0]["text"]
    worker.stop()
    make_due(conn, job.id)
    start_worker(fixed)
    info = ended(fixed, job)
    assert (info.state, info.attempt, ran) == ("completed", 2, ["x"])
    fixed.close()


def test_the_app_can_insert_from_a_handler_and_use_its_connections(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    conn.execute("CREATE TABLE seen (n int)")

    @client.task()
    def work(n: int) -> None:
        with client.connection() as own, own.transaction():
            own.execute("INSERT INTO seen VALUES (%s)", [n])
            if n:
                client.insert(work.bind(n - 1), conn=own)

    start_worker(client, threads=2)
    client.insert(work.bind(20))
    wait_until(lambda: conn.execute("SELECT count(*) FROM seen").fetchone() == (21,))
