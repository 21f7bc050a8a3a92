"""What a job's options and args may be, as an insert tells it before any SQL."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

import awa
from awa import NewJob, ValidationError


@pytest.fixture
def nowhere() -> awa.Client:
    """A client whose database does not exist: whatever reaches it fails otherwise."""
    return awa.Client("host=/nonexistent/socket dbname=nowhere", max_args_bytes=1000)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


NOW = datetime.now(UTC)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"priority": 0}, "priority"),
    ({"priority": 5}, "priority"),
    ({"priority": True}, "priority"),
    ({"priority": 1.0}, "priority"),
    ({"max_attempts": 0}, "max_attempts"),
    ({"max_attempts": 1001}, "max_attempts"),
    ({"kind": ""}, "kind"),
    ({"kind": "x" * 201}, "kind"),
    ({"kind": "a\0b"}, "kind"),
    ({"queue": ""}, "queue"),
    ({"queue": "ä" * 201}, "queue"),
    ({"queue": "a\0"}, "queue"),
    ({"queue": "\ud800"}, "queue"),
    ({"queue": 5}, "queue"),
    ({"tags": ["t"] * 21}, "tags"),
    ({"tags": ["t", "x" * 201]}, "tags[1]"),
    ({"tags": ["a", "b\0"]}, "tags[1]"),
    ({"tags": "text"}, "tags"),
    ({"metadata": {"m": math.nan}}, "metadata.m"),
    ({"metadata": {"m": "x" * 1000}}, "metadata"),
    ({"metadata": [1]}, "metadata"),
    ({"timeout": -1}, "timeout"),
    ({"timeout": math.nan}, "timeout"),
    ({"timeout": timedelta(days=25)}, "timeout"),
    ({"delay": -0.001}, "delay"),
    ({"delay": math.inf}, "delay"),
    ({"delay": timedelta(days=4000)}, "delay"),
    ({"delay": "5"}, "delay"),
    ({"run_at": NOW.replace(tzinfo=None)}, "run_at"),
    ({"run_at": datetime(1969, 12, 31, tzinfo=UTC)}, "run_at"),
    ({"run_at": "2024-01-01"}, "run_at"),
    ({"run_at": NOW, "delay": 1}, "delay"),
    ({"args": {"a": {"b": ["x", math.nan]}}}, "args.a.b[1]"),
    ({"args": {"a": -math.inf}}, "args.a"),
    ({"args": {"a": "x\0"}}, "args.a"),
    ({"args": {"a": ["\udfff"]}}, "args.a[0]"),
    ({"args": {"a": 2**63}}, "args.a"),
    ({"args": {"a": -(2**63) - 1}}, "args.a"),
    ({"args": {"a": nested(64)}}, "args.a"),
    ({"args": {"a": "x" * 1000}}, "args"),
    ({"args": {"a": {1: 2}}}, "args.a"),
    ({"args": {"a": {1, 2}}}, "args.a"),
    ({"args": {"a": b"x"}}, "args.a"),
    ({"args": {"a": NOW}}, "args.a"),
    ({"args": {"a": Decimal(1)}}, "args.a"),
    ({"args": {None: 1}}, "args"),
]


@pytest.mark.parametrize(("bad", "path"), REFUSED, ids=[f"{path}-{n}" for n, (_, path) in enumerate(REFUSED)])
def test_it_is_refused_before_any_sql_with_path_and_value(nowhere: awa.Client, bad: dict[str, Any], path: str) -> None:
    job = NewJob(**({"args": {}, "kind": "k"} | bad))
    with pytest.raises(ValidationError) as caught:
        nowhere.insert(job)
    assert caught.value.path.startswith(path)
    assert caught.value.path.split(".")[0].split("[")[0] in str(caught.value)
    options = {name: value for name, value in ({"kind": "k"} | bad).items() if name != "args"}
    with pytest.raises(ValidationError) as again:
        nowhere.insert(bad.get("args", {}), **options)
    assert again.value.path == caught.value.path
    with pytest.raises(ValidationError) as inside:
        nowhere.insert_many([NewJob({}, kind="k"), job])
    assert inside.value.path == f"items[1].{caught.value.path}"


def test_copy_refuses_a_first_item_before_it_looks_for_a_database(nowhere: awa.Client) -> None:
    with pytest.raises(ValidationError) as caught:
        nowhere.insert_many_copy([NewJob({}, kind="k"), NewJob({}, kind="k", priority=9)])
    assert caught.value.path == "items[1].priority"


@pytest.mark.parametrize("option", ["priority", "max_attempts", "queue", "kind", "delay", "timeout"])
def test_the_limit_is_told(nowhere: awa.Client, option: str) -> None:
    wrong: Any = {"queue": "x" * 201, "kind": "x" * 201}.get(option, 10**9)
    with pytest.raises(ValidationError) as caught:
        nowhere.insert(NewJob(**({"args": {}, "kind": "k"} | {option: wrong})))
    assert caught.value.limit is not None
    assert caught.value.value == wrong


@dataclass
class Typed:
    n: int
    names: list[str]


@pytest.mark.parametrize(
    ("args", "path"),
    [(Typed("x", []), "args.n"), (Typed(1, ["a", 2]), "args.names[1]"), (Typed(True, []), "args.n")],  # type: ignore[arg-type, list-item]
)
def test_fields_that_lie_about_their_type_are_refused(nowhere: awa.Client, args: Typed, path: str) -> None:
    @nowhere.task()
    def handle(job: awa.Job[Typed]) -> None: ...

    with pytest.raises(ValidationError) as caught:
        nowhere.insert(args)
    assert caught.value.path == path


def test_a_call_that_does_not_fit_the_function_is_refused(nowhere: awa.Client) -> None:
    @nowhere.task()
    def work(n: int, text: str = "") -> None: ...

    for call in (lambda: work.bind(), lambda: work.bind(1, "a", 2), lambda: work.bind(1, other=2)):  # type: ignore[call-arg]
        with pytest.raises(ValidationError):
            call()
    with pytest.raises(ValidationError) as caught:
        nowhere.insert(work.bind("x"))  # type: ignore[arg-type]
    assert caught.value.path == "args.n"


def test_copy_refuses_what_waits(client: awa.Client) -> None:
    for wrong in (NewJob({}, kind="k", delay=1), NewJob({}, kind="k", run_at=NOW + timedelta(1))):
        with pytest.raises(ValidationError, match="insert_many"):
            client.insert_many_copy([wrong])


def test_what_is_just_within_the_limits_is_stored(database: str) -> None:
    client = awa.Client(database, max_args_bytes=1000)
    args = {"deep": nested(62), "most": 2**63 - 1, "least": -(2**63), "zero": -0.0, "tiny": 5e-324, "": {"": []}}
    job = client.insert(
        args,
        kind="k" * 200,
        queue="😀" * 200,
        priority=4,
        max_attempts=1000,
        tags=["ä" * 200] * 20,
        metadata={"m": "x" * 980},
        timeout=2_147_483,
        run_at=datetime(9999, 12, 31, tzinfo=UTC),
    )
    info = job.get()
    assert info.args == args
    assert math.copysign(1, info.args["zero"]) == -1
    assert (info.queue, info.kind, len(info.tags)) == ("😀" * 200, "k" * 200, 20)
    assert client.insert({"a": "x" * 992}, kind="k").get().args == {"a": "x" * 992}  # 1,000 bytes
    with pytest.raises(ValidationError):
        client.insert({"a": "x" * 993}, kind="k")
    client.close()
