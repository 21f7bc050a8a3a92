"""R43: values that PostgreSQL cannot store were replaced silently, or aborted the caller's transaction.

Now they are refused before any SQL with their path, a batch is all or nothing, and the transaction stays usable.
"""

from __future__ import annotations

import math
from typing import Any

import psycopg
import pytest

import awa
from awa import NewJob, ValidationError
from awa.testing import inline
from tests.fixtures.jobs import count

BAD: list[tuple[Any, str]] = [
    ({"a": {"b": ["ok", "x\0y"]}}, "args.a.b[1]"),
    ({"a": {"x\0y": 1}}, "args.a"),
    ({"a": math.nan}, "args.a"),
    ({"a": [math.inf]}, "args.a[0]"),
    ({"a": -math.inf}, "args.a"),
    ({"a": "\ud800"}, "args.a"),
    ({"\udc00": 1}, "args"),
]


@pytest.mark.parametrize(("args", "path"), BAD)
def test_alone_in_a_batch_and_in_the_callers_transaction(
    client: awa.Client, database: str, conn: psycopg.Connection[Any], args: Any, path: str
) -> None:
    good = [NewJob({"n": n}, kind="k") for n in range(99)]
    with pytest.raises(ValidationError) as alone:
        client.insert(args, kind="k")
    assert alone.value.path.startswith(path)
    for insert in (client.insert_many, client.insert_many_copy):
        with pytest.raises(ValidationError) as batch:
            insert([*good[:50], NewJob(args, kind="k"), *good[50:]])
        assert batch.value.path.startswith(f"items[50].{path}")
    with psycopg.connect(database) as lent:
        lent.execute("CREATE TABLE work (n int)")
        for insert in (client.insert_many, client.insert_many_copy):
            with pytest.raises(ValidationError):
                insert([*good, NewJob(args, kind="k")], conn=lent)
            lent.execute("INSERT INTO work VALUES (1)")
        with pytest.raises(ValidationError):
            client.insert(args, kind="k", conn=lent)
        lent.execute("INSERT INTO work VALUES (1)")
    assert count(conn, "SELECT count(*) FROM work") == 3
    assert count(conn, "SELECT count(*) FROM awa.jobs") == 0


@pytest.mark.parametrize(("args", "path"), BAD)
def test_inline_mode_refuses_the_same_in_the_same_words(client: awa.Client, args: Any, path: str) -> None:
    """Guards tests of users: what passes inline can be stored. Removed when inline mode hands args on as they are."""
    ran: list[object] = []

    @client.task(kind="k")
    def handle(job: awa.Job[dict[str, Any]]) -> None:
        ran.append(job.args)

    attempts = [
        lambda: client.insert(args, kind="k"),
        lambda: client.insert_many([NewJob({"n": 1}, kind="k"), NewJob(args, kind="k")]),
        lambda: client.insert_many_copy([NewJob({"n": 1}, kind="k"), NewJob(args, kind="k")]),
        lambda: client.insert({"n": 1}, kind="k", metadata=args),
    ]
    for insert in attempts:
        with pytest.raises(ValidationError) as stored:
            insert()
        with inline(client) as book, pytest.raises(ValidationError) as booked:
            insert()
        assert (str(booked.value), booked.value.path) == (str(stored.value), stored.value.path)
        assert book.jobs == ran == []
