"""What a client refuses when it is made, declared with and called, before it looks for a database."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import awa
from awa import ConfigError, ValidationError
from awa.insert import Options


@dataclass
class SendEmail:
    to: str


@pytest.fixture
def nowhere() -> awa.Client:
    """A client whose database does not exist: whatever reaches it fails otherwise."""
    return awa.Client("host=/nonexistent/socket dbname=nowhere")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"priority": 9}, ["priority", "from 1 to 4", "got 9"]),
        ({"priority": "high"}, ["priority", "from 1 to 4", "got 'high'"]),
        ({"max_attempts": 0}, ["max_attempts", "from 1 to 1000", "got 0"]),
        ({"max_attempts": None}, ["max_attempts", "from 1 to 1000", "got None"]),
        ({"pool_size": 0}, ["pool_size", "from 1 to 1000", "got 0"]),
        ({"pool_size": "x"}, ["pool_size", "from 1 to 1000", "got 'x'"]),
        ({"pool_size": True}, ["pool_size", "from 1 to 1000", "got True"]),
        ({"queue": ""}, ["queue", "empty", "1 to 200 characters"]),
        ({"queue": 5}, ["queue", "1 to 200 characters", "got 5"]),
        ({"queue": "a\ud800"}, ["queue", "surrogate"]),
        ({"database": 5}, ["database", "connection string or URL", "got 5"]),
        ({"schema": "pg_x"}, ["schema", "'pg_x'"]),
        ({"notify": "maybe"}, ["notify", "'maybe'", "on or off"]),
        ({"max_args_bytes": 0}, ["max_args_bytes", "is 0", "from 1"]),
    ],
)
def test_an_argument_that_cannot_work_is_refused_with_its_name_value_and_what_is_accepted(
    arguments: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        awa.Client(**arguments)
    assert str(caught.value).startswith(named[0])
    assert all(part in str(caught.value) for part in named)


def test_the_first_argument_is_the_database() -> None:
    with pytest.raises(ConfigError, match="got 5"):
        awa.Client(5)  # type: ignore[arg-type]


def test_task_needs_its_parentheses(nowhere: awa.Client) -> None:
    with pytest.raises(ConfigError, match=r"@client\.task\(\)"):

        @nowhere.task  # type: ignore[arg-type]
        def work() -> None: ...

    assert nowhere.registry.kinds == ()


async def coroutine() -> None: ...


@pytest.mark.parametrize("hook", [5, None, "f", int, coroutine])
def test_a_hook_is_a_function(nowhere: awa.Client, hook: Any) -> None:
    with pytest.raises(ConfigError, match="on_worker_start"):
        nowhere.on_worker_start(hook)
    with pytest.raises(ConfigError, match="on_worker_stop"):
        nowhere.on_worker_stop(hook)


@pytest.mark.parametrize(
    "job_id", [0, -1, 2**63, 2**70, 10**5000, "x", "5", 1.0, True, None], ids=lambda value: type(value).__name__
)
def test_what_can_be_no_jobs_id_is_refused(nowhere: awa.Client, job_id: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        nowhere.get(job_id)
    assert (caught.value.path, caught.value.value, caught.value.limit) == ("job_id", job_id, (1, 2**63 - 1))
    assert "9223372036854775807" in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["insert_many", "insert_many_copy"])
def test_items_are_several(nowhere: awa.Client, name: str) -> None:
    @nowhere.task()
    def work(n: int) -> None: ...

    insert: Callable[[Any], object] = getattr(nowhere, name)
    one = work.bind(1)
    for wrong in (5, None, one, awa.NewJob(one), SendEmail("ada"), "abc", b"abc", {"n": 1}, {}):
        with pytest.raises(ValidationError) as caught:
            insert(wrong)
        assert (caught.value.path, caught.value.value) == ("items", wrong)
        assert type(wrong).__name__ in str(caught.value)
        assert "into a list" in str(caught.value)


def test_the_public_unique_key_takes_typed_args() -> None:
    assert awa.unique_key("send_email", SendEmail("ada")) == awa.unique_key("send_email", {"to": "ada"})


def test_a_client_knows_which_settings_code_gave() -> None:
    assert awa.Client().said == frozenset()
    assert awa.Client("dbname=x", schema="s", notify=False).said == {"database", "schema", "notify"}


def test_clients_can_have_the_same_tasks_and_hooks() -> None:
    """Guard: the registry and the hooks are those of the other, not copies: what is declared later is known too."""
    first = awa.Client("dbname=x")
    second = awa.Client("dbname=y", tasks_of=first, queue="other")

    @first.task()
    def work() -> None: ...

    @second.on_worker_stop
    def stop() -> None: ...

    assert second.registry.get("work") is work
    assert first._on_stop == [stop]
    with pytest.raises(awa.DuplicateKind, match="work"):
        second.task(kind="work")(lambda_like)
    with pytest.raises(awa.ConfigError, match=r"tasks_of must be an awa\.Client, got 'x'"):
        awa.Client(tasks_of="x")  # type: ignore[arg-type]


def lambda_like() -> None: ...


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"job_id": 0}, "job_id"),
        ({"job_id": "7"}, "job_id"),
        ({"reason": ""}, "reason"),
        ({"reason": "a\0"}, "reason"),
        ({"reason": "x" * 1001}, "reason"),
        ({"force": 1}, "force"),
    ],
)
def test_a_cancel_that_cannot_be_meant_is_refused(nowhere: awa.Client, arguments: dict[str, Any], path: str) -> None:
    with pytest.raises(ValidationError) as caught:
        nowhere.cancel(**{"job_id": 1} | arguments)
    assert (caught.value.path, caught.value.value) == (path, arguments[path])
    assert str(caught.value).startswith(path)


@pytest.mark.parametrize("name", Options.__annotations__)
def test_each_option_of_an_insert_is_taken_for_itself(nowhere: awa.Client, name: str) -> None:
    """Guards the order in which insert hands its options on: one that is wrong is told by its own name.

    With two of them exchanged in the tuple of ``Client.insert``, both cases fail.
    """

    @nowhere.task()
    def work() -> None: ...

    wrong: dict[str, Any] = {name: object()}
    with pytest.raises((ValidationError, ConfigError), match=rf"\A{name}\b"):
        nowhere.insert(work.bind(), **wrong)


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda task: task, "no task takes Task: insert what the bind(...) of the task ship gives"),
        (lambda task: task(1), "no task takes NoneType: insert task.bind(...), which does not call the function"),
        (lambda task: task.func, "no task takes function: insert task.bind(...)"),
        (lambda task: task.bind, "no task takes method: insert task.bind(...)"),
        (lambda task: {"order": 1}, "no task takes dict: declare one with @client.task()"),
    ],
)
def test_what_is_no_job_is_refused_with_what_to_insert(
    nowhere: awa.Client, make: Callable[[Any], Any], advice: str
) -> None:
    """Guards the first mistakes of who comes from another queue."""

    @nowhere.task()
    def ship(order: int) -> None: ...

    with pytest.raises(ConfigError) as caught:
        nowhere.insert(make(ship))
    assert str(caught.value).startswith(advice)


def test_a_misspelt_argument_is_named_beside_the_one_that_is_missing(nowhere: awa.Client) -> None:
    @nowhere.task()
    def ship(order: int) -> None: ...

    with pytest.raises(ValidationError, match=r"missing a required argument: 'order'; it has none called 'ordre'$"):
        ship.bind(ordre=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(("after", "said"), [({"a": 1}, "got dict"), (object(), "after must be"), ([None], "got None")])
def test_what_is_no_job_to_run_after_is_refused(nowhere: awa.Client, after: Any, said: str) -> None:
    with pytest.raises(ValidationError, match="give what insert returned") as caught:
        nowhere.insert({}, kind="k", after=after)
    assert said in str(caught.value)
