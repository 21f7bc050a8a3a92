"""Follow-ups of an insert: what is stored of them, and what is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import orjson
import pytest

import awa
from awa import ConfigError, NewJob, ValidationError
from awa.insert import MOST_FOLLOWING, prepare
from awa.storage.jobs import JobRow


@dataclass
class Mail:
    to: str


@pytest.fixture
def client() -> awa.Client:
    """Nothing listens where it would look for a database."""
    client = awa.Client("host=/nowhere")

    @client.task(queue="mail", priority=1)
    def send(job: awa.Job[Mail]) -> None: ...

    @client.task()
    def resize(path: str, width: int = 800) -> None: ...

    return client


def bind(client: awa.Client, *args: Any, **kwargs: Any) -> Any:
    return client.registry.get("resize").bind(*args, **kwargs)


def prepared(client: awa.Client, item: object) -> JobRow:
    return prepare(item, client.registry, client._defaults)


def test_each_is_stored_with_its_options_and_its_own_follow_ups(client: awa.Client) -> None:
    later = NewJob(
        {"a": 1},
        kind="elsewhere",
        queue="other",
        delay=60,
        timeout=1.5,
        tags=["t"],
        metadata={"m": "é"},
        max_attempts=1,
        on_failed=bind(client, "p"),
    )
    row = prepared(
        client,
        NewJob(
            Mail("a@b.c"),
            on_completed=[bind(client, "x.png"), later],
            on_failed=Mail("ops"),
            on_cancelled=NewJob(Mail("ops"), run_at=datetime(2027, 1, 1, tzinfo=UTC)),
        ),
    )
    assert row.is_bound
    assert row.follow_ups is not None
    resize = {"kind": "resize", "queue": "default", "priority": 2, "max_attempts": 25}
    mail = {"kind": "mail", "queue": "mail", "args": {"to": "ops"}, "priority": 1, "max_attempts": 25}
    assert orjson.loads(row.follow_ups) == {
        "completed": [
            resize | {"args": {"path": "x.png", "width": 800}},
            {
                "kind": "elsewhere",
                "queue": "other",
                "args": {"a": 1},
                "priority": 2,
                "max_attempts": 1,
                "timeout_ms": 1500,
                "tags": ["t"],
                "metadata": {"m": "é"},
                "delay": 60.0,
                "follow_ups": {"failed": [resize | {"args": {"path": "p", "width": 800}}]},
            },
        ],
        "failed": [mail],
        "cancelled": [mail | {"run_at": "2027-01-01T00:00:00+00:00"}],
    }


def test_no_follow_up_is_as_none_given(client: awa.Client) -> None:
    for item in (NewJob(Mail("a")), NewJob(Mail("a"), on_completed=[], on_failed=())):
        assert prepared(client, item).is_plain


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda c: {"on_completed": NewJob({"n": 2**64}, kind="k")}, "on_completed[0].args.n"),
        (lambda c: {"on_failed": [Mail("a"), NewJob(Mail("a"), priority=9)]}, "on_failed[1].priority"),
        (lambda c: {"on_cancelled": NewJob(Mail("a"), delay=-1)}, "on_cancelled[0].delay"),
        (
            lambda c: {"on_completed": NewJob(Mail("a"), on_completed=[NewJob(Mail("a"), queue="")])},
            "on_completed[0].on_completed[0].queue",
        ),
        (lambda c: {"on_completed": [bind(c, "x" * 100_000)] * 3}, "follow_ups"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(
    client: awa.Client, make: Callable[[awa.Client], dict[str, Any]], path: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        client.insert(Mail("a"), **make(client))
    assert caught.value.path == path
    assert path.partition(".")[0] in str(caught.value) or path == "follow_ups"
    with pytest.raises(ValidationError) as caught:
        client.insert_many([Mail("a"), NewJob(Mail("a"), **make(client))])
    assert caught.value.path == f"items[1].{path}"


def test_args_of_an_unknown_kind_are_refused_with_the_place(client: awa.Client) -> None:
    with pytest.raises(ConfigError, match=r"on_completed\[1\]: no task takes dict"):
        client.insert(Mail("a"), on_completed=[Mail("b"), {"a": 1}])


def test_a_chain_has_an_end(client: awa.Client) -> None:
    def chain(length: int) -> NewJob:
        job = NewJob(Mail("last"))
        for _ in range(length):
            job = NewJob(Mail("a"), on_completed=job)
        return job

    assert prepared(client, chain(MOST_FOLLOWING)).follow_ups is not None
    with pytest.raises(ValidationError, match="more than 20 jobs follow one another") as caught:
        prepared(client, chain(MOST_FOLLOWING + 1))
    assert caught.value.limit == MOST_FOLLOWING
    items: list[Any] = []
    items.append(NewJob(Mail("a"), on_completed=items))
    with pytest.raises(ValidationError, match="follow one another"):
        prepared(client, NewJob(Mail("a"), on_completed=items))


def test_what_would_wait_for_others_cannot_follow(client: awa.Client) -> None:
    """It would wait while its worker holds locks. A task may be unique as long as the follow-up says that it is not."""
    client.task(kind="once", unique=awa.Unique())(do_once)
    once = client.registry.get("once").bind()
    for item in (once, NewJob(Mail("b"), unique=awa.Unique(period=60))):
        with pytest.raises(ValidationError, match="unique=False") as caught:
            client.insert(Mail("a"), on_completed=[Mail("b"), item])
        assert caught.value.path == "on_completed[1].unique"
    assert prepared(client, NewJob(Mail("a"), on_completed=NewJob(once, unique=False))).follow_ups is not None


def do_once() -> None: ...


def test_copy_takes_none(client: awa.Client) -> None:
    with pytest.raises(ValidationError) as caught:
        client.insert_many_copy([NewJob(Mail("a"), on_completed=Mail("b"))])
    assert str(caught.value).startswith("items[0] has follow-ups, but insert_many_copy takes")
