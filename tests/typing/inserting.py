"""Inserting and reading jobs as users do; checked, never run."""

from datetime import UTC, datetime, timedelta
from typing import Any, assert_type

import psycopg
import psycopg2  # type: ignore[import-untyped]
import sqlalchemy
from django.db import connection as django_connection  # type: ignore[import-untyped]
from psycopg.rows import DictRow, dict_row
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import awa

client = awa.Client("postgresql://localhost/app", schema="jobs", max_args_bytes=1024, pool_size=4)


@client.task()
def resize(path: str, width: int = 800) -> None: ...


inserted = client.insert(resize.bind("a.png"), delay=timedelta(minutes=1), tags=["a"], metadata={"by": {"id": 1}})
assert_type(inserted, awa.Inserted)
assert_type(inserted.id, awa.JobId)
assert_type(inserted.is_new, bool)
assert_type(client.insert({"path": "a.png"}, kind="resize", run_at=datetime.now(UTC)), awa.Inserted)

jobs = client.insert_many([resize.bind("a.png"), awa.NewJob(resize.bind("b.png"), priority=1, tags={"b"})])
assert_type(jobs, list[awa.Inserted])
assert_type(client.insert_many_copy(resize.bind(f"{n}.png") for n in range(3)), int)

found = inserted.get()
assert_type(found, awa.JobInfo)
assert_type(found.state, awa.JobState)
assert_type(found.state.is_terminal, bool)
assert_type(found.run_at, datetime | None)
assert_type(found.history, list[dict[str, Any]])
assert_type(client.get(inserted.id), awa.JobInfo)

assert_type(
    client.insert(resize.bind("a.png"), concurrency_key="c", ordering_key="o", expires_at=datetime.now(UTC)),
    awa.Inserted,
)
awa.NewJob(resize.bind("a.png"), concurrency_key="c", ordering_key="o", expires_at=datetime.now(UTC))
client.insert(resize.bind("a.png"), ordering_key=7)  # type: ignore[arg-type]
client.insert(resize.bind("a.png"), expires_at="tomorrow")  # type: ignore[arg-type]

unique = awa.Unique(by_args=["path"], period=timedelta(hours=1), states=["available", awa.JobState.RUNNING])
assert_type(client.insert(resize.bind("a.png"), unique=unique), awa.Inserted)
client.insert(resize.bind("a.png"), unique=False)
awa.NewJob(resize.bind("a.png"), unique=awa.Unique(on_conflict="replace"))
assert_type(client.cancel_by_unique_key(awa.unique_key("resize", {"path": "a.png"})), awa.Controlled)
try:
    client.insert(resize.bind("a.png"), unique=unique)
except awa.UniqueConflict as conflict:
    assert_type(conflict.existing_id, int | None)
    assert_type(conflict.key, bytes)


@client.task(unique=unique)
def crop(path: str) -> None: ...


@client.task(keep_result=True)
def measure(path: str) -> int:
    return len(path)


followed = client.insert(measure.bind("a.png"), on_completed=crop.bind("a.png"), on_failed=[awa.NewJob(crop.bind("b"))])
assert_type(followed.result(timeout=timedelta(seconds=1)), Any)
try:
    client.result(followed.id, timeout=1.5)
except awa.JobFailed as failed:
    assert_type((failed.job_id, failed.state, failed.error), tuple[int, str, dict[str, Any] | None])
except awa.ResultNotKept as unkept:
    assert_type(unkept.job_id, int)
assert_type(client.insert(resize.bind("b.png"), after=inserted), awa.Inserted)
client.insert(resize.bind("b.png"), after=[inserted, inserted.id, 7, found], after_failed="run")
awa.NewJob(resize.bind("b.png"), after=jobs, delay=60)
client.insert(resize.bind("b.png"), after="a.png")  # type: ignore[arg-type]
client.insert(resize.bind("b.png"), after=[None])  # type: ignore[list-item]
client.insert(resize.bind("a.png"), unique=True)  # type: ignore[arg-type]
awa.Unique(on_conflict="ignore")  # type: ignore[arg-type]
awa.Unique(True)  # type: ignore[call-arg]
client.insert(resize.bind("a.png"), delay="1 minute")  # type: ignore[arg-type]
client.insert(resize.bind("a.png"), run_at="tomorrow")  # type: ignore[arg-type]
client.insert(resize.bind("a.png"), "email")  # type: ignore[call-arg]
client.insert(resize.bind("a.png"), prio=1)  # type: ignore[call-arg]
client.insert(resize.bind("a.png"), metadata=["by"])  # type: ignore[arg-type]
client.insert_many(resize.bind("a.png"))  # type: ignore[arg-type]
awa.NewJob(resize.bind("a.png"), "email")  # type: ignore[call-arg]
inserted.id = awa.JobId(3)  # type: ignore[misc]
client.get("3")  # type: ignore[arg-type]


def in_a_transaction(conn: psycopg.Connection[DictRow]) -> None:
    """Whatever a connection's rows are."""
    with conn.transaction(), conn.cursor(row_factory=dict_row) as cursor:
        assert_type(client.insert(resize.bind("a.png"), conn=conn), awa.Inserted)
        client.insert(resize.bind("a.png"), conn=cursor)
        client.insert_many([resize.bind("a.png")], conn=conn)
        client.insert_many_copy([resize.bind("a.png")], conn=cursor)


def in_sqlalchemys(session: Session, scoped: scoped_session[Session], conn: sqlalchemy.Connection) -> None:
    client.insert(resize.bind("a.png"), conn=session)
    client.insert_many([resize.bind("a.png")], conn=scoped)
    client.insert_many_copy([resize.bind("a.png")], conn=conn)
    client.insert(resize.bind("a.png"), conn=conn.engine)  # type: ignore[arg-type]
    client.insert(resize.bind("a.png"), conn=sessionmaker(conn.engine))  # type: ignore[arg-type]


def in_those_of_libraries_without_types(job: awa.Job[object]) -> None:
    client.insert(resize.bind("a.png"), conn=django_connection)
    with psycopg2.connect("") as conn:
        client.insert(resize.bind("a.png"), conn=conn)
        job.complete(conn)


async def asynchronously(conn: psycopg.AsyncConnection[DictRow], blocking: psycopg.Connection) -> None:
    assert_type(await client.insert_async(resize.bind("a.png"), conn=conn, priority=1), awa.Inserted)
    assert_type(await client.insert_async({"path": "a.png"}, kind="resize"), awa.Inserted)
    assert_type(await client.insert_many_async([resize.bind("a.png")], conn=conn.cursor()), list[awa.Inserted])
    assert_type(await client.insert_many_copy_async([resize.bind("a.png")], conn=conn), int)
    await client.insert_async(resize.bind("a.png"), prio=1)  # type: ignore[call-arg]
    await client.insert_async(resize.bind("a.png"), conn=blocking)  # type: ignore[arg-type]
    client.insert(resize.bind("a.png"), conn=conn)  # type: ignore[arg-type]
    client.insert(resize.bind("a.png"), conn="postgresql://localhost/app")  # type: ignore[arg-type]


try:
    client.insert(resize.bind("a.png"), priority=9)
except awa.ValidationError as error:
    assert_type(error.path, str)
except awa.JobNotFound as error:
    assert_type(error.job_id, int | None)
