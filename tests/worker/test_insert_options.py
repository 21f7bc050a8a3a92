"""concurrency_key, ordering_key and expires_at, from an insert of any kind to what a worker makes of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import awa
from awa import NewJob
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, ended
from tests.fixtures.lenders import KINDS

Conn = psycopg.Connection[Any]

LATER = datetime(2099, 1, 2, 3, 4, 5, 678, UTC)
OPTIONS: dict[str, Any] = {"concurrency_key": "c\t\\N", "ordering_key": "ö {}", "expires_at": LATER}
STORED = ("c\t\\N", "ö {}", LATER)
BY_TASK = ("account 7", "order 7", None)


@dataclass
class Charge:
    account: int


@pytest.fixture
def charging(client: awa.Client) -> awa.Client:
    """A client whose task has keys by its args."""

    @client.task(
        concurrency_key=lambda charge: f"account {charge.account}",
        ordering_key=lambda charge: f"order {charge.account}",
    )
    def charge(job: awa.Job[Charge]) -> None: ...

    return client


def stored(conn: Conn) -> list[tuple[Any, ...]]:
    columns = "id, concurrency_key, ordering_key, expires_at"
    return [
        found[1:]
        for found in conn.execute(
            f"SELECT {columns} FROM awa.jobs UNION ALL SELECT {columns} FROM awa.waiting_jobs ORDER BY id"
        )
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_in_on_every_connection(charging: awa.Client, conn: Conn, database: str, kind: str) -> None:
    """The task's keys, and the insert's in their place: one, a batch, plain or bound to others, and COPY."""
    mine = NewJob(Charge(7), **OPTIONS)
    equal = awa.Unique(on_conflict="replace")
    with KINDS[kind](database) as lender:
        charging.insert(Charge(7), conn=lender.conn)
        charging.insert(Charge(7), conn=lender.conn, **OPTIONS)
        charging.insert(Charge(8), conn=lender.conn, delay=60, unique=equal, **OPTIONS)
        charging.insert_many([Charge(7), mine], conn=lender.conn)
        charging.insert_many([NewJob(Charge(9), unique=equal, **OPTIONS), Charge(7)], conn=lender.conn)
        assert charging.insert_many_copy([Charge(7), mine], conn=lender.conn) == 2
        lender.commit()
    assert stored(conn) == [BY_TASK, STORED, STORED, BY_TASK, STORED, STORED, BY_TASK, BY_TASK, STORED]


def test_every_way_in_from_asynchronous_code(charging: awa.Client, conn: Conn, database: str) -> None:
    mine = NewJob(Charge(7), **OPTIONS)

    async def insert() -> None:
        async with await psycopg.AsyncConnection.connect(database) as lent:
            for each in (lent, None):
                await charging.insert_async(Charge(7), conn=each)
                await charging.insert_async(Charge(7), conn=each, **OPTIONS)
                await charging.insert_many_async([mine, Charge(7)], conn=each)
                await charging.insert_many_copy_async([mine, Charge(7)], conn=each)
                await lent.commit()

    asyncio.run(insert())
    assert stored(conn) == [BY_TASK, STORED, STORED, BY_TASK, STORED, BY_TASK] * 2


def test_a_worker_starts_nothing_too_late(client: awa.Client, start_worker: StartWorker, conn: Conn) -> None:
    """What is available by the claim, what waits by the leader's chore; the rest runs, follow-ups with their own."""
    ran: list[str] = []

    @client.task()
    def work(name: str) -> None:
        ran.append(name)

    past = datetime.now(UTC) - timedelta(seconds=1)
    available, intime = client.insert_many(
        [
            NewJob(work.bind("late"), expires_at=past, on_cancelled=work.bind("instead")),
            NewJob(
                work.bind("in time"),
                expires_at=LATER,
                on_completed=[
                    NewJob(work.bind("followed"), ordering_key="o", expires_at=LATER),
                    NewJob(work.bind("followed too late"), expires_at=past),
                ],
            ),
        ]
    )
    waits = client.insert(work.bind("never"), delay=3600, expires_at=datetime.now(UTC) + timedelta(seconds=1))
    start_worker(client)
    for job in (available, waits):
        info = ended(client, job, timeout=20)
        assert info.state == "cancelled"
        assert info.error is not None and info.error["text"].startswith("it expired at 20")
        assert info.claimed_at is None
    assert ended(client, intime).state == "completed"
    wait_until(lambda: count(conn, "SELECT count(*) FROM awa.ended_jobs") == 3, timeout=20)
    wait_until(lambda: sorted(ran) == ["followed", "in time", "instead"], timeout=20)
