"""R68: an insert on the application's connection committed it, changed its settings, or ran before the commit.

Now a job and its wake-up are part of the caller's transaction: both appear at its commit or never, also in a savepoint,
and nothing else of the connection changes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count
from tests.fixtures.lenders import KINDS

Insert = Callable[[awa.Client, Any, Any], object]

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


def test_so_it_is_on_each_kind_of_connection(
    client: awa.Client, start_worker: StartWorker, database: str, conn: psycopg.Connection[Any]
) -> None:
    """Guard: every insert goes through the connection that was lent. All kinds are open at once while the worker
    sleeps: nothing of theirs is seen or heard before they commit, one after the other, and what each commits runs."""
    ran = threading.Semaphore(0)
    seen: list[str] = []
    conn.execute("CREATE TABLE orders (kind text, what text)")

    @client.task()
    def work(kind: str, what: str) -> None:
        seen.append(f"{kind} {what}")
        ran.release()

    class Undone(Exception):
        pass

    async def asynchronously(end: str, wait: Callable[[], None]) -> None:
        async with await psycopg.AsyncConnection.connect(database) as lent:
            await lent.execute("INSERT INTO orders VALUES ('async', %s)", [end])
            await client.insert_async(work.bind("async", end), conn=lent)
            await client.insert_many_async([work.bind("async", end)], conn=lent)
            await client.insert_many_copy_async([work.bind("async", end)], conn=lent)
            wait()
            await (lent.commit() if end == "committed" else lent.rollback())

    start_worker(client, poll_interval=60)
    client.insert(work.bind("warm", "up"))
    assert ran.acquire(timeout=30)
    # it sleeps once it has the lock of its bell
    wait_until(lambda: count(conn, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"), timeout=30)
    with ExitStack() as stack:
        listening = stack.enter_context(psycopg.connect(database, autocommit=True))
        listening.execute(f"LISTEN {client._schema.channel}")
        lenders = {kind: stack.enter_context(opened(database)) for kind, opened in KINDS.items()}
        for kind, lender in lenders.items():
            lender.execute(f"INSERT INTO orders VALUES ('{kind}', 'rolled back')")
            for insert in INSERTS.values():
                insert(client, work.bind(kind, "rolled back"), lender.conn)
            lender.rollback()
            with suppress(Undone), lender.savepoint():
                lender.execute(f"INSERT INTO orders VALUES ('{kind}', 'savepoint')")
                for insert in INSERTS.values():
                    insert(client, work.bind(kind, "savepoint"), lender.conn)
                raise Undone
            lender.execute(f"INSERT INTO orders VALUES ('{kind}', 'committed')")
            for insert in INSERTS.values():
                insert(client, work.bind(kind, "committed"), lender.conn)
        asyncio.run(asynchronously("rolled back", lambda: None))

        def is_quiet() -> None:
            assert not ran.acquire(timeout=0.5)  # every transaction is open
            assert count(conn, "SELECT count(*) FROM awa.jobs WHERE args ->> 'what' <> 'up'") == 0
            assert [*listening.notifies(timeout=0)] == []

        asyncio.run(asynchronously("committed", is_quiet))
        kinds = ["async", *lenders]
        for kind in kinds:
            if kind != "async":
                lenders[kind].commit()
            for _ in INSERTS:
                assert ran.acquire(timeout=30), kind
    assert Counter(seen) == {"warm up": 1} | {f"{kind} committed": 3 for kind in kinds}
    assert sorted(conn.execute("SELECT * FROM orders").fetchall()) == sorted((kind, "committed") for kind in kinds)


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
