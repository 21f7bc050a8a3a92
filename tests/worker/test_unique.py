"""Unique jobs through the client: which key is written, on every path, and who gets the job."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import class_row, dict_row, scalar_row

import awa
from awa import NewJob, Unique, UniqueConflict
from awa.storage import clock
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, ended

Conn = psycopg.Connection[Any]

VECTORS = json.loads((Path(__file__).parents[1] / "fixtures/vectors.json").read_text(encoding="utf-8"))["unique_key"]

PERIOD = 3600


def written_key(conn: Conn, job_id: int) -> bytes:
    found = conn.execute("SELECT key FROM awa.job_uniques WHERE id = %s", [job_id]).fetchone()
    assert found is not None
    return bytes(found[0])


@pytest.fixture
def wide(database: str) -> Iterator[awa.Client]:
    """A client whose inserts need not wait for each other's connections."""
    client = awa.Client(database, pool_size=25)
    yield client
    client.close()


@pytest.mark.parametrize("path", ["insert", "insert_many", "lent"])
def test_the_key_that_is_stored_is_the_one_of_the_vectors(client: awa.Client, conn: Conn, path: str) -> None:
    """Guard: which parts the client puts into the key, and that the bytes reach the table as they are."""
    for vector in VECTORS:
        options = dict(vector["opts"])
        bucket = options.pop("by_period", None)
        if bucket is not None:
            options["period"] = PERIOD
        new = NewJob(
            vector["args"],
            kind=vector["kind"],
            queue=vector["queue"],
            run_at=None if bucket is None else datetime.fromtimestamp((bucket + 0.5) * PERIOD, UTC),
            unique=Unique(**options),
        )
        conn.execute("TRUNCATE awa.job_uniques")
        match path:
            case "insert":
                inserted = client.insert(new)
            case "insert_many":
                inserted = client.insert_many([new, NewJob({}, kind="plain")])[0]
            case _:
                inserted = client.insert(new, conn=conn)
        assert inserted.is_new
        assert written_key(conn, inserted.id).hex() == vector["key"], vector["id"]
        assert client.insert(new) == awa.Inserted(inserted.id, False)


def test_the_task_says_what_is_unique_and_an_insert_may_say_otherwise(client: awa.Client, conn: Conn) -> None:
    """Guard: the options' order: the call, then the task; False switches the task's off."""

    @client.task(unique=Unique(by_args=["to"]))
    def send(to: str, subject: str = "") -> None: ...

    first = client.insert(send.bind("a", "x"))
    assert client.insert(send.bind("a", "y")) == awa.Inserted(first.id, False)
    assert client.insert_many([send.bind("a", "z"), NewJob(send.bind("a"), priority=1)])[1].id == first.id
    assert client.insert({"to": "a"}, kind="send").id == first.id
    assert client.insert(send.bind("a", "y"), unique=Unique()).is_new
    assert client.insert(send.bind("a", "y"), unique=False).is_new
    assert client.insert(NewJob(send.bind("a", "y"), unique=False)).is_new
    with pytest.raises(UniqueConflict) as refused:
        client.insert(send.bind("a"), unique=Unique(by_args=["to"], on_conflict="raise"))
    assert refused.value.existing_id == first.id
    assert refused.value.key == awa.unique_key("send", {"to": "a"}) == written_key(conn, first.id)
    assert client.cancel_by_unique_key(refused.value.key, reason="enough").id == first.id
    assert client.get(first.id).state == "cancelled"
    assert client.insert(send.bind("a", "x")).is_new


def test_a_single_job_keeps_every_option_beside_its_key(client: awa.Client, conn: Conn) -> None:
    """Guard: the statement for one job with a key has all parameters, and another way to write than the batch."""
    run_at = datetime.now(UTC) + timedelta(hours=1)
    for extra in ([], [NewJob({}, kind="plain")]):
        options: dict[str, Any] = {"queue": "q", "priority": 1, "max_attempts": 3, "timeout": 5.0, "run_at": run_at}
        options |= {"tags": ["a", 'b"'], "metadata": {"m": 1.0}, "kind": "k"}
        states = ["available", "scheduled", "completed"]
        new = NewJob({"n": len(extra)}, **options, unique=Unique(states=states))
        inserted = client.insert_many([new, *extra])[0] if extra else client.insert(new)
        found = conn.execute(
            "SELECT queue, priority, max_attempts, timeout_ms, run_at, tags, metadata::text, get_byte(unique_key, 16)"
            "  FROM awa.waiting_jobs WHERE id = %s",
            [inserted.id],
        ).fetchone()
        assert found == ("q", 1, 3, 5000, run_at, ["a", 'b"'], '{"m":1.0}', 1 | 2 | 32)
        assert not client.insert(new).is_new


# --- periods


def test_jobs_of_different_periods_differ(client: awa.Client) -> None:
    """Guard: the bucket is that of the time when the job is due."""
    start = datetime(2031, 5, 4, 10, tzinfo=UTC)

    def insert(seconds: float, **options: Any) -> awa.Inserted:
        return client.insert({}, kind="k", run_at=start + timedelta(seconds=seconds), unique=Unique(period=PERIOD))

    first = insert(0)
    assert insert(PERIOD - 0.001).id == first.id
    assert insert(-0.001).is_new
    assert insert(PERIOD).is_new
    assert client.insert({}, kind="k", unique=Unique(period=timedelta(hours=1)), run_at=start).id == first.id


@pytest.mark.parametrize("is_lent", [False, True], ids=["own", "lent"])
def test_the_bucket_is_of_the_databases_time(
    client: awa.Client, conn: Conn, is_lent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: the time comes from the database, asked on the connection that is used; not from this machine's clock.

    The database's time is made to be far ahead, so that no other clock agrees with it.
    """
    ahead = 10**8
    monkeypatch.setattr(clock, "NOW", f"SELECT (extract(epoch FROM clock_timestamp()) + {ahead})::double precision")
    asked: list[Conn] = []
    read = clock.DatabaseClock.read
    monkeypatch.setattr(clock.DatabaseClock, "read", lambda self, conn: (asked.append(conn), read(self, conn))[1])
    given: dict[str, Any] = {"conn": conn} if is_lent else {}
    unique = Unique(period=PERIOD)
    jobs = [
        client.insert({}, kind="now", unique=unique, **given),
        client.insert({}, kind="later", unique=unique, delay=2 * PERIOD, **given),
        client.insert_many([NewJob({}, kind="many", unique=unique), NewJob({}, kind="p")], **given)[0],
    ]
    for kind, job, delay in zip(("now", "later", "many"), jobs, (0, 2 * PERIOD, 0), strict=True):
        around = [math.floor((time.time() + ahead + delay + off) / PERIOD) for off in (-60, 0, 60)]
        assert written_key(conn, job.id) in [awa.unique_key(kind, {}, bucket=bucket) for bucket in around]
    assert len(asked) == 3 and all((one is conn) == is_lent for one in asked)


def test_the_database_is_asked_for_its_time_once_a_minute(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: LASTS; and between two questions a clock runs that nobody sets."""
    database = clock.DatabaseClock()
    first = database.read(conn)
    assert abs(first - time.time()) < 30
    monkeypatch.setattr(clock, "NOW", "SELECT 0::double precision")
    assert first <= database.read(conn) < first + 30
    monkeypatch.setattr(clock, "LASTS", -1.0)
    assert 0 <= database.read(conn) < 30


# --- many at once


@pytest.mark.parametrize("first_ends", ["commits", "rolls back", "is one of them"])
def test_of_twenty_threads_with_one_key_one_writes_the_job(
    wide: awa.Client, database: str, conn: Conn, first_ends: str
) -> None:
    """Guard: INSERT ... ON CONFLICT DO NOTHING, which waits for the open one; the holder is read after the wait.

    All twenty stand behind the open transaction's lock at once; when it is gone one of them writes the key's row, the
    others wait for that one, and see its committed row in their next statement.
    """
    unique = Unique()
    gate = threading.Barrier(20)

    def insert(n: int) -> awa.Inserted:
        gate.wait(20.0)
        if n % 2:
            return wide.insert({"x": 1}, kind="k", unique=unique)
        with psycopg.connect(database) as lent:
            return wide.insert({"x": 1}, kind="k", unique=unique, conn=lent)

    with ThreadPoolExecutor(20) as pool, psycopg.connect(database) as holder:
        first = None
        if first_ends != "is one of them":
            first = wide.insert({"x": 1}, kind="k", unique=unique, conn=holder)
        results = [pool.submit(insert, n) for n in range(20)]
        if first is not None:
            waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"
            wait_until(lambda: count(conn, waiting) == 20, timeout=30.0)
            holder.commit() if first_ends == "commits" else holder.rollback()
        found = [result.result(30.0) for result in results]
    assert sum(one.is_new for one in found) == (0 if first_ends == "commits" else 1)
    [job_id] = {one.id for one in found}
    assert (first is not None and job_id == first.id) == (first_ends == "commits")
    assert conn.execute("SELECT id FROM awa.jobs").fetchall() == [(job_id,)]


# --- a lent connection


ODD: list[Callable[[Conn], object]] = [
    lambda conn: setattr(conn, "row_factory", dict_row),
    lambda conn: setattr(conn, "row_factory", scalar_row),
    lambda conn: setattr(conn, "row_factory", class_row(datetime)),
    lambda conn: setattr(conn, "prepare_threshold", 0),
    lambda conn: setattr(conn, "cursor_factory", psycopg.ClientCursor),
    lambda conn: conn.execute("SET search_path = pg_temp"),
    lambda conn: conn.execute("SET bytea_output = 'escape'"),
]


@pytest.mark.parametrize("make_odd", ODD, ids=range(len(ODD)))
def test_it_joins_a_lent_transaction_whatever_its_connection_is_like(
    client: awa.Client, database: str, conn: Conn, make_odd: Callable[[Conn], object]
) -> None:
    """Guard: a cursor and row factory of our own; no exception reaches the transaction, which stays usable."""
    held = client.insert({"n": 1}, kind="k", unique=Unique())
    with psycopg.connect(database) as lent:
        make_odd(lent)
        first = client.insert({"n": 2}, kind="k", unique=Unique(), conn=lent)
        many = client.insert_many([NewJob({"n": n}, kind="k", unique=Unique()) for n in (3, 2, 1)], conn=lent)
        assert [(one.id == first.id, one.is_new) for one in many] == [(False, True), (True, False), (False, False)]
        assert many[2].id == held.id
        with pytest.raises(UniqueConflict):
            client.insert({"n": 1}, kind="k", unique=Unique(on_conflict="raise"), conn=lent)
        with pytest.raises(UniqueConflict):
            raising = NewJob({"n": 1}, kind="k", unique=Unique(on_conflict="raise"))
            client.insert_many([NewJob({"n": 9}, kind="k", unique=Unique()), raising], conn=lent)
        assert lent.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        assert count(conn, "SELECT count(*) FROM awa.jobs") == 1
    assert count(conn, "SELECT count(*) FROM awa.jobs") == 3


# --- with a worker


def test_a_debounced_job_runs_once_with_what_came_last(client: awa.Client, start_worker: StartWorker) -> None:
    """Guard: replace keeps the id and takes the args while the job waits."""
    seen: list[int] = []

    @client.task(unique=Unique(by_args=["doc"], on_conflict="replace"))
    def index(doc: str, version: int) -> None:
        seen.append(version)

    first = client.insert(index.bind("a", 1), delay=60)
    for version in (2, 3):
        assert client.insert(index.bind("a", version), delay=60) == awa.Inserted(first.id, False)
    start_worker(client)
    assert client.insert(index.bind("a", 4)).id == first.id  # no delay: due now, and the leader is told
    assert ended(client, first).state == "completed"
    assert seen == [4]
    assert client.insert(index.bind("a", 5)) == awa.Inserted(first.id, False)
    assert seen == [4]


def test_keys_are_free_again_when_their_jobs_have_gone(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    """Guard: the holder is looked for: a failed job does not hold its key, nor one whose segment was emptied."""

    @client.task(unique=Unique(), max_attempts=1)
    def work(n: int) -> None:
        if n < 0:
            raise RuntimeError("no")

    start_worker(client, completed_retention=0.5, rotate_after=0.2)
    failing = client.insert(work.bind(-1))
    assert ended(client, failing).state == "failed"
    assert client.insert(work.bind(-1)).is_new
    done = client.insert(work.bind(1))
    wait_until(lambda: client.insert(work.bind(1)).is_new, timeout=30.0)
    assert client.insert(work.bind(1)).id > done.id
