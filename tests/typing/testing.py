"""Tests as users write them; checked, never run."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_type

import psycopg

import awa
from awa.testing import (
    Book,
    Ran,
    advance,
    assert_inserted,
    assert_not_inserted,
    client_fixture,
    connected,
    database,
    inline,
    list_jobs,
    run_all,
    run_one,
)

client = awa.Client()


@dataclass
class Mail:
    to: str


@client.task()
def send(job: awa.Job[Mail]) -> None: ...


@client.task()
def greet(name: str) -> None: ...


queue = client_fixture(client)
assert_type(queue, Callable[..., Any])
client_fixture("app:client")  # type: ignore[arg-type]

with database() as url, connected(client, url) as same:
    assert_type(url, str)
    assert_type(same, awa.Client)
    assert_type(run_one(client, kind=greet), Ran)
    assert_type(run_all(client, kind="mail", queue="q", with_scheduled=True, limit=5, raises=False), list[Ran])
    assert_type(run_one(client).error, BaseException | None)
    assert_type(run_one(client).outcome, awa.Outcome | None)
    assert_type(advance(client, hours=2), int)
    assert_type(advance(client, timedelta(days=1)), int)
    advance(client, 3600)  # type: ignore[arg-type]
    run_all("app:client")  # type: ignore[arg-type]

with database(setup=lambda address: print(address), schema="jobs"):
    pass
with database(setup="tables.sql"):  # type: ignore[arg-type]
    pass

with inline(client, raises=False) as book, psycopg.connect() as conn:
    assert_type(book, Book)
    assert_type(book.jobs, list[awa.JobInfo])
    assert_type(assert_inserted(client, greet, args={"name": "x"}), list[awa.JobInfo])
    assert_inserted(conn, "mail", tags=["a"], delay=timedelta(hours=1), within=5, count=1)
    assert_inserted(conn.cursor(), Mail("x"))
    assert_inserted(book, send, state=awa.JobState.COMPLETED)
    assert_type(assert_not_inserted(client, Mail), None)
    assert_type(list_jobs(conn), list[awa.JobInfo])
    assert_inserted(client, greet, arg={"name": "x"})  # type: ignore[call-arg]
