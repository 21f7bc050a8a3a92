"""Inserting from asynchronous code, on psycopg's asynchronous connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from psycopg import AsyncClientCursor, AsyncConnection
from psycopg.pq import TransactionStatus
from psycopg.rows import dict_row

import awa
from awa import ConfigError, NewJob, PermissionDenied, SchemaNotMigrated, ValidationError
from awa.insert import Options
from tests.fixtures.jobs import count
from tests.worker.test_insert_lent import PATHS, written

Conn = psycopg.Connection[Any]


async def write(client: awa.Client, path: str, conn: Any) -> int:
    """Insert by *path*; returns how many."""
    match path:
        case "insert":
            await client.insert_async({"n": 0}, kind="k", conn=conn)
            return 1
        case "insert_delayed":
            await client.insert_async(NewJob({"n": 0}, kind="k"), delay=60, conn=conn)
            return 1
        case "insert_many":
            return len(await client.insert_many_async([NewJob({"n": n}, kind="k") for n in range(3)], conn=conn))
        case "insert_many_mixed":
            items = [NewJob({"n": n}, kind="k", delay=n and 60, tags=["t"]) for n in range(3)]
            return len(await client.insert_many_async(items, conn=conn))
    return await client.insert_many_copy_async((NewJob({"n": n}, kind="k") for n in range(1100)), conn=conn)


class Undone(Exception):
    """Raised to have a block undone."""


def run(test: Callable[[Any], Coroutine[Any, Any, None]], database: str, **options: Any) -> None:
    async def connected() -> None:
        async with await AsyncConnection.connect(database, **options) as lent:
            await test(lent)

    asyncio.run(connected())


def test_jobs_belong_to_the_transaction_that_was_lent(client: awa.Client, conn: Conn, database: str) -> None:
    """Guard: the statement goes through the connection that was lent; a COPY's savepoint is closed again."""

    async def test(lent: AsyncConnection[Any]) -> None:
        jobs = 0
        for path in PATHS:
            for given in (lent, lent.cursor(row_factory=dict_row)):
                await write(client, path, given)
                assert lent.info.transaction_status is TransactionStatus.INTRANS
                assert written(conn) == jobs
                await lent.rollback()
                with suppress(Undone):
                    async with lent.transaction():
                        await write(client, path, given)
                        raise Undone
                jobs += await write(client, path, given)
                with suppress(Undone):
                    async with lent.transaction():
                        await write(client, path, given)
                        raise Undone
                await lent.commit()
                assert written(conn) == jobs

    run(test, database)


def test_odd_settings_change_nothing_and_are_not_changed(client: awa.Client, conn: Conn, database: str) -> None:
    """Guard: a cursor of our own class, rows and adapters; UTF-8 where the connection does not speak it."""

    class Cursor(AsyncClientCursor[Any]):
        async def execute(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("the caller's cursor is not ours to use")

    async def test(lent: AsyncConnection[Any]) -> None:
        lent.cursor_factory = Cursor
        lent.adapters.register_loader("int8", psycopg.types.string.TextLoader)
        jobs = 0
        for path in PATHS:
            jobs += await write(client, path, lent)
            assert written(conn) == jobs
        await AsyncClientCursor(lent).execute("SET client_encoding = 'LATIN1'")
        text = "漢字"
        inserted = await client.insert_async({text: text}, kind="k", conn=lent)
        assert type(inserted.id) is int
        assert inserted.get().args == {text: text}
        assert (lent.autocommit, lent.row_factory, lent.cursor_factory) == (True, dict_row, Cursor)
        await AsyncClientCursor(lent).execute("SET client_encoding = 'UTF8'")
        jobs += 1
        async with lent.pipeline():
            jobs += await write(client, "insert", lent)
            jobs += await write(client, "insert_many", lent)
        assert written(conn) == jobs

    run(test, database, autocommit=True, row_factory=dict_row, prepare_threshold=0)


def test_what_is_refused_leaves_the_transaction_usable(client: awa.Client, conn: Conn, database: str) -> None:
    """Guard: checked before anything is sent; a COPY is undone to its savepoint; the server's refusals are told."""

    async def test(lent: AsyncConnection[Any]) -> None:
        bad = NewJob({"n": "\0"}, kind="k")
        good = NewJob({"n": 1}, kind="k")
        calls: list[Awaitable[Any]] = [
            client.insert_async(bad, conn=lent),
            client.insert_many_async([good, bad], conn=lent),
            client.insert_many_copy_async([good] * 1200 + [bad], conn=lent),
        ]
        for call in calls:
            with pytest.raises(ValidationError):
                await call
        await lent.execute("CREATE TABLE mine (n int)")
        await lent.commit()
        for path in PATHS:
            with pytest.raises(SchemaNotMigrated):
                await write(awa.Client(database, schema="elsewhere"), path, lent)
            await lent.rollback()
        await lent.execute("CREATE ROLE nobody_asynchronous")
        await lent.execute("SET LOCAL ROLE nobody_asynchronous")
        with pytest.raises(PermissionDenied, match="--grants producer"):
            await write(client, "insert", lent)
        await lent.rollback()

    run(test, database)
    assert (written(conn), count(conn, "SELECT count(*) FROM mine")) == (0, 0)


def test_unique_jobs(client: awa.Client, conn: Conn, database: str) -> None:
    """Guard: the database's time is asked for over the connection that was lent, and conflicts are told alike."""
    unique = awa.Unique(period=3600)

    async def test(lent: AsyncConnection[Any]) -> None:
        first = await client.insert_async({}, kind="k", unique=unique, conn=lent)
        [second] = await client.insert_many_async([NewJob({}, kind="k", unique=unique)], conn=lent)
        assert (first.is_new, second.is_new, first.id) == (True, False, second.id)
        with pytest.raises(awa.UniqueConflict):
            await client.insert_async({}, kind="k", unique=awa.Unique(period=3600, on_conflict="raise"), conn=lent)
        assert lent.info.transaction_status is TransactionStatus.INTRANS

    run(test, database)
    assert written(conn) == 1


def test_without_a_connection_it_commits_at_once_and_the_loop_goes_on(
    client: awa.Client, conn: Conn, database: str
) -> None:
    """Guard: the wait is in a thread. The table is locked; the loop notices the waiting insert and lets it go on."""

    async def test(lent: AsyncConnection[Any]) -> None:
        await lent.execute("LOCK TABLE awa.jobs")
        waiting = asyncio.ensure_future(write(client, "insert", None))
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        while not count(conn, waits):
            await asyncio.sleep(0.01)
        assert not waiting.done()
        await lent.rollback()
        jobs = await asyncio.wait_for(waiting, 30)
        assert written(conn) == jobs
        for path in PATHS:
            jobs += await write(client, path, None)
            assert written(conn) == jobs

    run(test, database)


def test_the_wrong_kind_of_connection_is_refused_either_way(client: awa.Client, conn: Conn, database: str) -> None:
    """Guard: a blocking connection would hold the loop, an asynchronous one cannot be used without it."""

    async def test(lent: AsyncConnection[Any]) -> None:
        for wrong in (conn, conn.cursor(), object()):
            for path in PATHS:
                with pytest.raises(ConfigError, match=r"take a psycopg\.AsyncConnection"):
                    await write(client, path, wrong)
        for given in (lent, lent.cursor()):
            with pytest.raises(ConfigError, match="end in _async"):
                client.insert({}, kind="k", conn=given)  # type: ignore[arg-type]

    run(test, database)
    assert written(conn) == 0


def test_every_option_of_a_job_can_be_given_by_name() -> None:
    """Guard: an option that is added to NewJob is one of the asynchronous insert, too."""
    assert Options.__annotations__.keys() == NewJob.__dataclass_fields__.keys() - {"args"}
