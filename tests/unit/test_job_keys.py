"""concurrency_key, ordering_key and expires_at: what a job has, by its insert or by its task, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from operator import itemgetter
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import awa
from awa import ConfigError, NewJob, ValidationError
from awa.insert import prepare
from awa.options import check_job_key
from awa.storage.jobs import JobRow

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=200)


@dataclass
class Mail:
    to: str
    account: int = 7


@pytest.fixture
def client() -> awa.Client:
    """Nothing listens where it would look for a database."""
    return awa.Client("host=/nowhere")


def prepared(client: awa.Client, item: object) -> JobRow:
    return prepare(item, client.registry, client._defaults)


def keys(client: awa.Client, item: object) -> tuple[str | None, str | None]:
    row = prepared(client, item)
    return row.concurrency_key, row.ordering_key


@given(TEXT)
def test_any_text_that_the_database_stores_is_a_key(text: str) -> None:
    assert check_job_key(text, "ordering_key") == text


@pytest.mark.parametrize("name", ["concurrency_key", "ordering_key"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "is empty: leave it out"),
        ("x" * 201, "has 201 characters, the limit is 200"),
        ("a\0b", "NUL"),
        ("\ud800", "lone surrogate"),
        (7, "must be a str of 1 to 200 characters, got 7"),
        (b"k", "must be a str of 1 to 200 characters, got a bytes"),
        (False, "got False"),
    ],
)
def test_what_is_no_key_is_refused_by_insert_batch_follow_up_and_declaration(
    client: awa.Client, name: str, value: Any, words: str
) -> None:
    new = NewJob({}, kind="k", **{name: value})
    for insert, path in (
        (lambda: client.insert(new), name),
        (lambda: client.insert({}, kind="k", **{name: value}), name),
        (lambda: client.insert_many([NewJob({}, kind="k"), new]), f"items[1].{name}"),
        (lambda: client.insert_many_copy([new]), f"items[0].{name}"),
        (lambda: client.insert({}, kind="k", on_failed=new), f"on_failed[0].{name}"),
    ):
        with pytest.raises(ValidationError, match=name) as caught:
            insert()
        assert words in str(caught.value)
        assert caught.value.path == path
    with pytest.raises(ConfigError, match=name):
        client.task(**{name: value})


def test_a_task_says_the_keys_of_its_jobs_and_an_insert_goes_before_it(client: awa.Client) -> None:
    @client.task(concurrency_key="c", ordering_key=lambda path: f"o {path}")
    def resize(path: str, width: int = 800) -> None: ...

    assert keys(client, resize.bind("p")) == ("c", "o p")
    assert keys(client, NewJob({"path": "q"}, kind="resize")) == ("c", "o q")
    assert keys(client, NewJob(resize.bind("p"), concurrency_key="mine")) == ("mine", "o p")
    assert keys(client, NewJob(resize.bind("p"), ordering_key="mine", priority=1)) == ("c", "mine")


def test_a_function_gets_the_args_as_the_handler_does(client: awa.Client) -> None:
    seen: list[object] = []

    def account(mail: Mail) -> str | None:
        seen.append(mail)
        return f"account {mail.account}" if mail.account else None

    def everything(**args: Any) -> str:
        seen.append(args)
        return "all"

    def with_defaults(at: datetime, more: int = 5) -> str:
        return f"{at:%Y} {more}"

    @client.task(concurrency_key=account)
    def send(job: awa.Job[Mail]) -> None: ...

    @client.task(ordering_key=everything, concurrency_key=with_defaults)
    def plan(at: datetime, note: str = "n") -> None: ...

    @client.task(ordering_key=itemgetter("x"))
    def loose(job: awa.Job) -> None: ...  # type: ignore[type-arg]

    mail, at = Mail("a@b.c"), datetime(2031, 2, 3, tzinfo=UTC)
    assert keys(client, mail) == ("account 7", None)
    assert keys(client, Mail("a@b.c", 0)) == (None, None)
    assert keys(client, plan.bind(at)) == ("2031 5", "all")
    assert keys(client, NewJob({"x": "X"}, kind="loose")) == (None, "X")
    assert seen[0] is mail
    assert seen[2] == {"at": at, "note": "n"}


def fails(**args: Any) -> str:
    raise KeyError("nobody")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (fails, "the ordering_key of task 'resize' cannot be told: tests.unit.test_job_keys.fails raised KeyError"),
        (lambda path: 7, "ordering_key must be a str of 1 to 200 characters, got 7 ("),
        (lambda path: "", "ordering_key is empty"),
        (lambda path: path * 300, "ordering_key has 300 characters"),
    ],
)
def test_a_function_that_gives_no_key_refuses_the_insert_and_names_its_task(
    client: awa.Client, function: Callable[..., Any], words: str
) -> None:
    @client.task(ordering_key=function)
    def resize(path: str) -> None: ...

    for insert in (
        lambda: client.insert(resize.bind("p")),
        lambda: client.insert(resize.bind("p"), priority=1),
        lambda: client.insert_many([resize.bind("p")]),
        lambda: client.insert_many_copy([resize.bind("p")]),
    ):
        with pytest.raises(ValidationError, match="'resize'") as caught:
            insert()
        assert words in str(caught.value)
        assert caught.value.path in ("ordering_key", "items[0].ordering_key")


async def later(path: str) -> str:
    return path


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (7, "concurrency_key must be a str of 1 to 200 characters, or a function"),
        (Mail, "or a function that gives it"),
        (later, "takes a plain function"),
        (lambda args: "k", "'args' is none that can be given so: name some of path, width"),
        (lambda path, /: "k", "'path' is none that can be given so"),
    ],
)
def test_what_cannot_give_a_key_is_refused_when_it_is_declared(client: awa.Client, given: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:

        @client.task(concurrency_key=given)
        def resize(path: str, width: int = 800) -> None: ...

    assert words in str(caught.value)
    assert client.registry.find("resize") is None


def test_a_function_for_typed_args_takes_them_alone(client: awa.Client) -> None:
    def two(mail: Mail, more: int) -> str:
        return ""

    with pytest.raises(ConfigError, match="is called with the args alone"):

        @client.task(ordering_key=two)
        def send(job: awa.Job[Mail]) -> None: ...


def test_expires_at_is_stored_in_utc_and_may_be_in_the_past(client: awa.Client) -> None:
    east = datetime(2030, 1, 1, 12, tzinfo=timezone(timedelta(hours=3)))
    assert prepared(client, NewJob({}, kind="k", expires_at=east)).expires_at == datetime(2030, 1, 1, 9, tzinfo=UTC)
    past = datetime(1970, 1, 1, tzinfo=UTC)
    assert prepared(client, NewJob({}, kind="k", expires_at=past)).expires_at == past
    assert prepared(client, NewJob({}, kind="k", expires_at=past, delay=60)).expires_at == past


RUN_AT = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (datetime(2030, 1, 1), "is naive: say which time zone"),
        (60, "must be a datetime, got 60"),
        (datetime.min.replace(tzinfo=UTC), "outside the years 1970-9999"),
        (RUN_AT, "must come after run_at 2030-01-01T00:00:00+00:00"),
        (RUN_AT - timedelta(seconds=1), "expires_at 2029-12-31T23:59:59+00:00 must come after run_at"),
    ],
)
def test_an_expires_at_that_cannot_be_meant_is_refused(client: awa.Client, value: Any, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        client.insert({}, kind="k", run_at=RUN_AT, expires_at=value)
    assert words in str(caught.value)
    assert caught.value.path == "expires_at"


def test_follow_ups_carry_them(client: awa.Client) -> None:
    @client.task(ordering_key=lambda path: path)
    def resize(path: str) -> None: ...

    after = NewJob(resize.bind("é"), concurrency_key="c", expires_at=RUN_AT)
    row = prepared(client, NewJob({}, kind="k", on_completed=[after, resize.bind("z")]))
    first, second = orjson.loads(row.follow_ups or b"")["completed"]
    assert first["concurrency_key"] == "c"
    assert first["ordering_key"] == "é"
    assert first["expires_at"] == "2030-01-01T00:00:00+00:00"
    assert (second["ordering_key"], "concurrency_key" in second, "expires_at" in second) == ("z", False, False)


@dataclass
class Charge:
    account: int


@pytest.mark.parametrize("name", ["concurrency_key", "ordering_key"])
def test_a_text_that_is_the_name_of_an_arg_is_refused_since_its_value_is_meant(client: awa.Client, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"write {name}=lambda account: account"):

        @client.task(**{name: "account"})
        def plain(account: int) -> None: ...

    with pytest.raises(ConfigError, match=rf"write {name}=lambda args: args\.account"):

        @client.task(**{name: "account"})
        def typed(job: awa.Job[Charge]) -> None: ...

    @client.task(**{name: "accounts"})
    def shared(account: int) -> None: ...
