"""Unique options: what can work, what is refused, and which key comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import pydantic
import pytest

import awa
from awa import ConfigError, JobState, Unique, ValidationError
from awa.unique import check_key


@dataclass
class SendEmail:
    to: str
    subject: str = ""


class Model(pydantic.BaseModel):
    to: str = pydantic.Field(alias="To")
    n: int = 0


class Open(pydantic.BaseModel, extra="allow"):
    to: str


class Struct(msgspec.Struct, rename="camel"):
    send_to: str


def test_what_it_says_is_settled_when_it_is_made() -> None:
    unique = Unique(by_args=["b", "a", "b"], period=timedelta(hours=1), states=["available", "running"])
    assert unique.by_args == ("b", "a")
    assert unique.period == 3600.0
    assert unique.states == {JobState.AVAILABLE, JobState.RUNNING}
    assert Unique() == Unique(by_args=True, by_queue=False, period=None, on_conflict="return")
    assert {"failed", "cancelled"} == {str(state) for state in JobState} - {str(state) for state in Unique().states}


@pytest.mark.parametrize(
    "options, text",
    [
        ({"by_args": "to"}, "by_args must be True, False or a list of names of args, got 'to'"),
        ({"by_args": []}, "write False when args do not matter"),
        ({"by_args": [1]}, "by_args must be"),
        ({"by_args": None}, "by_args must be"),
        ({"by_queue": 1}, "by_queue must be True or False, got 1"),
        ({"period": 0}, "period must be at least 0.001 seconds, got 0"),
        ({"period": -1}, "period must be from 0"),
        ({"period": float("nan")}, "period must be from 0"),
        ({"period": "1h"}, "period must be seconds or a timedelta, got str"),
        ({"period": True}, "period must be seconds or a timedelta, got bool"),
        ({"states": "available"}, "states must be a list of states, got 'available'"),
        ({"states": ["available", "done"]}, "states has 'done': write some of scheduled"),
        ({"states": ["running"]}, "states must have 'available'"),
        ({"states": []}, "states must have 'available'"),
        ({"on_conflict": "ignore"}, "on_conflict must be one of return, raise, replace, got 'ignore'"),
        ({"on_conflict": None}, "on_conflict must be one of"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_made(options: dict[str, Any], text: str) -> None:
    """Guard: the checks of each option; the message names it, its value and what would do."""
    with pytest.raises(ConfigError) as refused:
        Unique(**options)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    "args_type, known, unknown",
    [(SendEmail, ["to", "subject"], "cc"), (Model, ["To", "n"], "to"), (Struct, ["sendTo"], "send_to")],
)
def test_names_that_the_args_cannot_have_are_refused_at_the_declaration(
    args_type: type, known: list[str], unknown: str
) -> None:
    """Guard: Codec.names, the names as the JSON has them; such a name would never be in the key."""
    client = awa.Client("host=/nonexistent")

    def handle(job: Any) -> None: ...

    handle.__annotations__["job"] = awa.Job[args_type]  # type: ignore[valid-type]
    client.task(kind="a", unique=Unique(by_args=known))(handle)
    with pytest.raises(
        ConfigError, match=f"by_args names '{unknown}', which args of kind 'b' do not have: name some of"
    ):
        client.task(kind="b", unique=Unique(by_args=[known[0], unknown]))(handle)


def test_names_of_a_plain_function_are_its_parameters_and_a_mapping_has_any() -> None:
    client = awa.Client("host=/nonexistent")

    @client.task(unique=Unique(by_args=["path"]))
    def resize(path: str, width: int = 800) -> None: ...

    with pytest.raises(ConfigError, match="by_args names 'height'"):
        client.insert(resize.bind("x"), unique=Unique(by_args=["height"]))

    @client.task(unique=Unique(by_args=["whatever"]))
    def free(job: awa.Job[dict[str, Any]]) -> None: ...

    @client.task(unique=Unique(by_args=["whatever"]))
    def open_model(job: awa.Job[Open]) -> None: ...


def test_bad_options_of_an_insert_are_refused_before_any_sql() -> None:
    """Guard: they are looked at before the database, which does not exist here."""
    client = awa.Client("host=/nonexistent")

    @client.task(unique=Unique())
    def work(n: int) -> None: ...

    for wrong in (True, "return", 3600):
        with pytest.raises(ConfigError, match=r"unique must be awa.Unique\(\.\.\.\)"):
            client.insert(work.bind(1), unique=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"unique must be awa.Unique"):
        client.task(unique=3600)  # type: ignore[arg-type]
    with pytest.raises(ValidationError) as refused:
        client.insert_many_copy([work.bind(1)])
    assert refused.value.path == "items[0].unique" and "insert_many" in str(refused.value)
    for key in (b"short", "0" * 16, None, bytes(17)):
        with pytest.raises(ValidationError) as refused:
            client.cancel_by_unique_key(key)  # type: ignore[arg-type]
        assert refused.value.path == "key" and "must be 16 bytes" in str(refused.value)
    assert check_key(bytearray(16)) == bytes(16)
