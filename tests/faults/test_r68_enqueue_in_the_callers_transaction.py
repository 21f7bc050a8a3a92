"""R68: an insert on the application's connection committed it, changed its settings, or ran before the commit.

Now a job and its wake-up are part of the caller's transaction: both appear at its commit or never, also in a savepoint,
and nothing else of the connection changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count

Insert = Callable[[awa.Client, Any, psycopg.Connection[Any]], object]

INSERTS: dict[str, Insert] = {
    "insert": lambda client, item, conn: client.insert(item, conn=conn),
    "insert_many": lambda client, item, conn: client.insert_many([item], conn=conn),
    "insert_many_copy": lambda client, item, conn: client.insert_many_copy([item], conn=conn),
}


@pytest.mark.parametrize("path", INSERTS)
def test_invisible_before_gone_after_a_rollback_prompt_after_a_commit(
    client: awa.Client, start_worker: StartWorker, database: str, conn: psycopg.Connection[Any], path: str
) -> None:
    ran = threading.Semaphore(0)
    seen: list[str] = []
    insert = INSERTS[path]
    conn.execute("CREATE TABLE orders (n int)")

    @client.task()
    def work(what: str) -> None:
        seen.append(what)
        ran.release()

    start_worker(client, poll_interval=30)
    client.insert(work.bind("warm"))
    assert ran.acquire(timeout=5)
    with psycopg.connect(database) as lent:
        lent.execute("INSERT INTO orders VALUES (1)")
        insert(client, work.bind("committed"), lent)
        assert not ran.acquire(timeout=0.5)  # the transaction is open
        assert count(conn, "SELECT count(*) FROM awa.jobs WHERE args ->> 'what' <> 'warm'") == 0
        assert lent.info.transaction_status is TransactionStatus.INTRANS
        lent.commit()
        assert ran.acquire(timeout=5)

        lent.execute("INSERT INTO orders VALUES (2)")
        insert(client, work.bind("rolled back"), lent)
        lent.rollback()

        lent.execute("INSERT INTO orders VALUES (3)")
        with lent.transaction(force_rollback=True):
            lent.execute("INSERT INTO orders VALUES (4)")
            insert(client, work.bind("savepoint"), lent)
        insert(client, work.bind("around it"), lent)
        assert (lent.autocommit, lent.isolation_level) == (False, None)
        lent.commit()
        assert ran.acquire(timeout=5)
    assert seen == ["warm", "committed", "around it"]
    assert conn.execute("SELECT n FROM orders ORDER BY n").fetchall() == [(1,), (3,)]


def test_an_open_transaction_delays_only_its_own_jobs(
    client: awa.Client, start_worker: StartWorker, database: str
) -> None:
    seen: list[int] = []

    @client.task()
    def work(n: int) -> None:
        seen.append(n)

    start_worker(client, poll_interval=30)
    with psycopg.connect(database) as lent:
        client.insert(work.bind(-1), conn=lent)
        begun = time.monotonic()
        for n in range(20):
            client.insert(work.bind(n))
            client.insert_many([work.bind(100 + n)])
        wait_until(lambda: len(seen) == 40)
        assert time.monotonic() - begun < 5
        assert -1 not in seen
    wait_until(lambda: -1 in seen)
