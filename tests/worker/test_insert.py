"""Inserting: what is stored, in which order, with which options."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest

import awa
from awa import ConfigError, JobNotFound, NewJob
from tests.fixtures.jobs import count

Conn = psycopg.Connection[Any]


@dataclass
class Numbered:
    n: int


def stored(conn: Conn) -> list[tuple[Any, ...]]:
    """What waits in the lanes, in the order of insertion."""
    return conn.execute(
        """SELECT id, queue, kind, priority, lane, attempt, max_attempts, timeout_ms, args::text, metadata::text, tags
             FROM awa.jobs ORDER BY id"""
    ).fetchall()


@pytest.fixture
def numbered(client: awa.Client) -> awa.Client:
    """A client that knows Numbered."""

    @client.task(queue="numbers", priority=3, max_attempts=4)
    def handle(job: awa.Job[Numbered]) -> None: ...

    return client


def test_options_are_what_the_call_says_else_the_task_else_the_client_else_the_default(
    database: str, conn: Conn
) -> None:
    client = awa.Client(database, queue="client", priority=4, max_attempts=9)

    @client.task()
    def plain() -> None: ...

    @client.task(queue="task", priority=3, max_attempts=5)
    def said() -> None: ...

    client.insert(plain.bind())
    client.insert(said.bind())
    client.insert(said.bind(), queue="call", priority=1, max_attempts=1)
    client.insert(NewJob(said.bind(), queue="new", priority=2), priority=4)
    awa.Client(database).insert({"a": 1}, kind="untyped")
    assert [(row[1], row[3], row[6]) for row in stored(conn)] == [
        ("client", 4, 9),
        ("task", 3, 5),
        ("call", 1, 1),
        ("new", 4, 5),
        ("default", 2, 25),
    ]
    client.close()


def test_every_option_is_stored_on_every_path(numbered: awa.Client, conn: Conn) -> None:
    tags = ["a", "ä'\"{},\\ \t\n\r", "NULL", ""]
    options: dict[str, Any] = {
        "queue": "q\t\\N\n'",
        "priority": 1,
        "max_attempts": 1000,
        "timeout": timedelta(seconds=1.5),
        "tags": tags[:3],
        "metadata": {"k\t\\\n": ["\\N", None]},
    }
    item = NewJob(Numbered(5), **options)
    numbered.insert(Numbered(5), **options)
    numbered.insert_many([item])
    assert numbered.insert_many_copy([item]) == 1
    rows = stored(conn)
    assert len(rows) == 3
    for row in rows:
        assert row[1:8] == ("q\t\\N\n'", "numbered", 1, 3, 1, 1000, 1500)
        assert row[8] == '{"n":5}'
        assert row[10] == tags[:3]
    assert len({row[9] for row in rows}) == 1
    info = numbered.get(rows[0][0])
    assert (info.args, info.metadata, info.tags) == ({"n": 5}, {"k\t\\\n": ["\\N", None]}, tags[:3])


@pytest.mark.parametrize(
    ("timeout", "stored_ms"),
    [(0, 0), (0.0004, 1), (1e-9, 1), (timedelta(microseconds=1), 1), (2_147_483, 2_147_483_000)],
)
def test_a_timeout_above_0_is_never_stored_as_no_limit(
    numbered: awa.Client, conn: Conn, timeout: float | timedelta, stored_ms: int
) -> None:
    item = NewJob(Numbered(5), timeout=timeout)
    numbered.insert(item)
    numbered.insert_many([item])
    numbered.insert_many_copy([item])
    assert [row[7] for row in stored(conn)] == [stored_ms] * 3


def test_an_item_that_copy_refuses_leaves_the_callers_transaction_as_it_was(
    numbered: awa.Client, database: str, conn: Conn
) -> None:
    items = [*(Numbered(n) for n in range(2000)), NewJob(Numbered(0), priority=9)]
    with psycopg.connect(database) as lent:
        numbered.insert(Numbered(-1), conn=lent)
        with pytest.raises(awa.ValidationError, match="priority"):
            numbered.insert_many_copy(iter(items), conn=lent)
        numbered.insert(Numbered(-2), conn=lent)
    assert [row[8] for row in stored(conn)] == ['{"n":-1}', '{"n":-2}']


def test_inserted_says_its_id_and_finds_the_job(numbered: awa.Client) -> None:
    inserted = numbered.insert(Numbered(1))
    assert (inserted.is_new, type(inserted.id)) == (True, int)
    info = inserted.get()
    assert (info.id, info.state, info.attempt, info.kind) == (inserted.id, "available", 1, "numbered")
    assert info.created_at.utcoffset() is not None
    with pytest.raises(JobNotFound) as caught:
        numbered.get(inserted.id + 1)
    assert caught.value.job_id == inserted.id + 1


def test_a_batch_comes_back_in_the_callers_order(numbered: awa.Client) -> None:
    far = datetime.now(UTC) + timedelta(days=1)
    items = [
        NewJob(Numbered(n), queue=f"q{n % 3}", priority=1 + n % 4, run_at=far if n % 5 == 0 else None)
        for n in range(200)
    ]
    inserted = numbered.insert_many(iter(items))
    assert [one.get().args for one in inserted] == [{"n": n} for n in range(200)]
    assert [one.get().state for one in inserted[:6]] == ["scheduled", *["available"] * 4, "scheduled"]
    plain = numbered.insert_many([Numbered(n) for n in range(200)])
    assert [one.get().args for one in plain] == [{"n": n} for n in range(200)]
    assert len({one.id for one in inserted + plain}) == 400
    assert numbered.insert_many([]) == []
    assert numbered.insert_many_copy([]) == 0


def test_copy_takes_an_iterator_and_is_all_or_nothing(numbered: awa.Client, conn: Conn) -> None:
    assert numbered.insert_many_copy(Numbered(n) for n in range(1501)) == 1501
    assert count(conn, "SELECT count(*) FROM awa.jobs WHERE queue = 'numbers' AND lane = 7") == 1501

    def breaks() -> Any:
        yield from (Numbered(n) for n in range(1000))
        raise RuntimeError("the iterator broke")

    with pytest.raises(RuntimeError, match="the iterator broke"):
        numbered.insert_many_copy(breaks())
    assert count(conn, "SELECT count(*) FROM awa.jobs") == 1501


def test_delay_and_run_at_go_by_the_databases_clock(numbered: awa.Client, conn: Conn) -> None:
    zone = timezone(timedelta(hours=-7))
    at = datetime(2999, 12, 31, 23, 59, 59, 999999, zone)
    jobs = numbered.insert_many(
        [
            NewJob(Numbered(0), delay=3600),
            NewJob(Numbered(1), delay=timedelta(hours=1)),
            NewJob(Numbered(2), run_at=at),
            NewJob(Numbered(3), run_at=datetime(1970, 1, 1, tzinfo=UTC)),
            NewJob(Numbered(4), delay=0),
        ]
    )
    single = numbered.insert(Numbered(5), delay=3600, tags=["x"])
    states = [job.get().state for job in [*jobs, single]]
    assert states == ["scheduled", "scheduled", "scheduled", "available", "available", "scheduled"]
    assert jobs[2].get().run_at == at
    off = conn.execute(
        "SELECT id FROM awa.waiting_jobs WHERE abs(extract(epoch FROM run_at - now()) - 3600) < 30 ORDER BY id"
    ).fetchall()
    assert [row[0] for row in off] == [jobs[0].id, jobs[1].id, single.id]
    with pytest.raises(JobNotFound):
        numbered.get(2**62)


def test_who_says_no_kind_is_told_so(numbered: awa.Client) -> None:
    for args in ({"n": 1}, object(), 5, None, NewJob({"n": 1})):
        with pytest.raises(ConfigError):
            numbered.insert(args)
    with pytest.raises(ConfigError):
        numbered.insert(NewJob(NewJob(Numbered(1))))


def test_two_threads_at_first_use_share_one_pool(database: str, conn: Conn) -> None:
    client = awa.Client(database, pool_size=3)
    together = threading.Barrier(8, timeout=10)

    def insert(n: int) -> int:
        together.wait()
        return int(client.insert({"n": n}, kind="k").id)

    with ThreadPoolExecutor(8) as executor:
        ids = list(executor.map(insert, range(8)))
    assert len(set(ids)) == 8
    assert count(conn, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'awa client'") <= 3
    client.close()


def test_a_closed_client_opens_again(numbered: awa.Client) -> None:
    first = numbered.insert(Numbered(1))
    numbered.close()
    numbered.close()
    assert numbered.insert(Numbered(2)).id > first.id


def test_an_own_insert_is_committed_when_it_returns(numbered: awa.Client, conn: Conn) -> None:
    numbered.insert(Numbered(1))
    numbered.insert_many([Numbered(2)])
    numbered.insert_many_copy([Numbered(3)])
    assert [row[8] for row in stored(conn)] == ['{"n":1}', '{"n":2}', '{"n":3}']
