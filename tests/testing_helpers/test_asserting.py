"""What a test says about inserted jobs, and what it reads when that is not so."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import awa
from awa import NewJob
from awa.testing import assert_inserted, assert_not_inserted, inline, list_jobs
from tests.fixtures.lenders import KINDS

AT = datetime(2030, 1, 1, tzinfo=UTC)


class Size(enum.Enum):
    BIG = 1


@dataclass
class Mail:
    to: str
    at: datetime
    size: Size = Size.BIG
    more: dict[str, Any] | None = None


def filled(client: awa.Client) -> tuple[Any, Any]:
    """Declare two tasks, and insert jobs of them."""

    @client.task(queue="mail", aliases=["post"])
    def send(job: awa.Job[Mail]) -> None: ...

    @client.task()
    def plain(n: int, flag: bool = True, at: datetime | None = None) -> None: ...

    client.insert(
        Mail("ada", AT, more={"a": [1, {"b": None}]}), tags=["x", "y"], metadata={"m": 1, "k": "v"}, priority=1
    )
    client.insert(Mail("bob", AT), run_at=AT, max_attempts=3)
    client.insert(plain.bind(1, at=AT), delay=3600)
    client.insert(plain.bind(2, False))
    client.insert({"to": "old", "at": AT.isoformat()}, kind="elsewhere")
    return send, plain


@pytest.fixture(params=["inline", "database"])
def either(request: pytest.FixtureRequest, database: str) -> Iterator[awa.Client]:
    """A client whose jobs are in a book, and one whose jobs are in a database."""
    client = awa.Client(database)
    with inline(client, run=False) if request.param == "inline" else nullcontext():
        yield client
    client.close()


def test_what_is_there_is_found(either: awa.Client) -> None:
    """Guards every argument: each alone finds its job, and one that differs finds none."""
    client = either
    send, plain = filled(client)
    here: list[tuple[object, dict[str, Any], int]] = [
        ("mail", {}, 2),
        (send, {}, 2),
        (Mail, {}, 2),
        (Mail("bob", AT), {}, 1),
        (plain.bind(2, False), {}, 1),
        ("mail", {"args": {"to": "ada"}}, 1),
        ("mail", {"args": {"at": AT, "size": Size.BIG}}, 2),
        ("mail", {"args": {"at": AT.isoformat(), "size": 1}}, 2),
        ("mail", {"args": {"more": {"a": [1, {"b": None}]}}}, 1),
        ("mail", {"args": Mail("bob", AT)}, 1),
        ("mail", {"queue": "mail", "tags": ["y"], "metadata": {"m": 1}, "priority": 1}, 1),
        ("mail", {"max_attempts": 3, "state": "scheduled", "run_at": AT}, 1),
        ("mail", {"run_at": AT + timedelta(seconds=50), "within": timedelta(minutes=1)}, 1),
        (plain, {"delay": 3600}, 1),
        (plain, {"delay": timedelta(hours=1, seconds=20), "within": 30}, 1),
        (plain, {"args": {"at": AT}}, 1),
        (plain, {"delay": 0}, 1),
        ("elsewhere", {"args": {"to": "old"}}, 1),
    ]
    for what, options, many in here:
        found = assert_inserted(client, what, count=many, **options)
        assert found == assert_inserted(client, what, **options) and len(found) == many
        with pytest.raises(AssertionError):
            assert_not_inserted(client, what, **options)
        with pytest.raises(AssertionError):
            assert_inserted(client, what, count=many + 1, **options)
    not_here: list[tuple[object, dict[str, Any]]] = [
        ("other", {}),
        (Mail("ada", AT), {}),
        (plain.bind(3), {}),
        (plain, {"args": {"n": True}}),
        (plain, {"args": {"flag": 1}}),
        (plain, {"args": {"at": AT + timedelta(seconds=1)}}),
        ("mail", {"args": {"nothing": 1}}),
        ("mail", {"args": {"more": {"a": [True, {"b": None}]}}}),
        ("mail", {"tags": ["x", "z"]}),
        ("mail", {"metadata": {"m": 2}}),
        ("mail", {"queue": "default"}),
        ("mail", {"priority": 2, "state": "available"}),
        ("mail", {"run_at": AT + timedelta(seconds=2)}),
        (plain, {"delay": 60}),
        ("elsewhere", {"args": {"at": AT}}),  # nobody knows of a type
    ]
    for what, options in not_here:
        assert_not_inserted(client, what, **options)
        assert assert_inserted(client, what, count=0, **options) == []
        with pytest.raises(AssertionError):
            assert_inserted(client, what, **options)


def test_a_failure_tells_what_was_asked_and_what_is_there(either: awa.Client) -> None:
    """Guards the text that a user reads when a test fails."""
    client = either
    with pytest.raises(AssertionError, match=r"^no job mail was inserted; there are none at all$"):
        assert_inserted(client, "mail")
    _, plain = filled(client)
    with pytest.raises(AssertionError) as failed:
        assert_inserted(client, plain, args={"n": 5}, queue="default", tags=["t"])
    lines = str(failed.value).splitlines()
    first = list_jobs(client)[0].id
    assert lines[0] == "no job plain with args {'n': 5} queue='default' tags=['t'] was inserted; there are 5 jobs:"
    assert lines[1].startswith(f'  {first} mail {{"to":"ada","at":"2030-01-01T00:00:00+00:00","size":1,"more":')
    assert lines[1].endswith("} available queue='mail' priority=1 tags=['x', 'y'] metadata={\"m\":1,\"k\":\"v\"}")
    assert "run_at=2030-01-01T00:00:00+00:00" in lines[2] and len(lines) == 6
    with pytest.raises(AssertionError, match=r"^1 job, not 2, plain with exactly the args \{\"n\":2,.* was inserted"):
        assert_inserted(client, plain.bind(2, False), count=2)
    with pytest.raises(AssertionError, match=r"^a job mail state=scheduled was inserted; there is 1 job:\n"):
        assert_not_inserted(client, "mail", state=awa.JobState.SCHEDULED)
    client.insert_many([NewJob({"text": "x" * 500}, kind="k") for _ in range(30)])
    with pytest.raises(AssertionError) as failed:
        assert_inserted(client, "mail", priority=4)
    assert "there are 35 jobs, the last 20 are:" in str(failed.value)
    assert len(str(failed.value).splitlines()) == 21 and "(511 characters)" in str(failed.value)


def test_a_transaction_sees_its_own_jobs(client: awa.Client, database: str) -> None:
    """Guards that a lent connection is asked, in its transaction, which stays as it was."""
    _, plain = filled(client)
    with psycopg.connect(database, row_factory=psycopg.rows.dict_row) as conn:
        client.insert(plain.bind(7), conn=conn)
        assert_inserted(conn, plain.bind(7), count=1)
        assert_inserted(conn.cursor(), "plain", args={"n": 7}, state="available", count=1)
        assert_not_inserted(client, plain.bind(7))
        with pytest.raises(awa.ConfigError, match="Mail is known to a client"):
            assert_inserted(conn, Mail)
        assert conn.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        conn.rollback()
        assert_not_inserted(conn, plain.bind(7))


@pytest.mark.parametrize("kind", KINDS)
def test_the_transaction_of_whatever_can_be_lent_is_asked(client: awa.Client, database: str, kind: str) -> None:
    """Guards reading through a Session, Django's connection or psycopg2, with types and rows of its owner's."""
    with KINDS[kind](database) as lender:
        lender.execute("SET timezone = 'Asia/Kathmandu'")
        job = client.insert(
            {"n": 2**60, "ä": "€"}, kind="k", conn=lender.conn, run_at=AT, tags=["x"], metadata={"m": [1.5]}
        )
        [found] = assert_inserted(lender.conn, "k", args={"ä": "€"}, run_at=AT, tags=["x"], metadata={"m": [1.5]})
        assert (found.id, found.args, found.state) == (job.id, {"n": 2**60, "ä": "€"}, "scheduled")
        assert_not_inserted(client, "k")
        lender.commit()
    assert list_jobs(client) == [found] == [job.get()]


def test_what_cannot_be_meant_is_refused(either: awa.Client) -> None:
    """Guards that a typing error in a test is no passing assert_not_inserted."""
    client = either
    _, plain = filled(client)
    refused: list[tuple[object, dict[str, Any], str]] = [
        (plain.bind(2), {"args": {"n": 2}}, "what has args already"),
        (5, {}, "no task takes int"),
        (int, {}, "no task takes int"),
        ("", {}, "kind is empty"),
        ("k", {"state": "done"}, "state must be one of"),
        ("k", {"priority": 9}, "priority"),
        ("k", {"tags": "x"}, "tags"),
        ("k", {"run_at": AT.replace(tzinfo=None)}, "naive"),
        ("k", {"within": -1}, "within"),
        ("k", {"delay": "1"}, "delay"),
        (plain, {"args": 5}, "args"),
    ]
    for what, options, text in refused:
        with pytest.raises((awa.ConfigError, awa.ValidationError), match=text):
            assert_inserted(client, what, **options)
        with pytest.raises((awa.ConfigError, awa.ValidationError), match=text):
            assert_not_inserted(client, what, **options)
    for wrong in (-1, True, 1.0):
        with pytest.raises(awa.ConfigError, match="count"):
            assert_inserted(client, plain, count=wrong)  # type: ignore[arg-type]
    with pytest.raises(awa.ConfigError, match="psycopg"):
        assert_inserted("postgresql://", plain)  # type: ignore[arg-type]
