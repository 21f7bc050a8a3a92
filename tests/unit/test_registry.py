"""What becomes a task, under which kind, and where it is found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Generic, TypeVar

import pytest

from awa.args import FunctionCodec
from awa.errors import ConfigError, DuplicateKind, UnknownKind, ValidationError
from awa.job import Job
from awa.registry import Registry, Task, TaskOptions
from awa.retry import exponential

T = TypeVar("T")


@dataclass
class SendEmail:
    to: str


@dataclass
class Box(Generic[T]):
    content: T


def handle(job: Job[SendEmail]) -> str:
    return job.args.to


def resize(path: str, width: int = 800) -> tuple[str, int]:
    """Make it smaller."""
    return path, width


def bare(job: Job) -> None: ...  # type: ignore[type-arg]


def of_dict(job: Job[dict[str, int]]) -> None: ...


def of_anything(job: Job[Any]) -> None: ...


def of_box(job: Job[Box[int]]) -> None: ...


def test_a_typed_handler_takes_its_kind_from_its_args() -> None:
    task = Task(handle)
    assert (task.kind, task.is_typed, task.args_type) == ("send_email", True, SendEmail)
    assert task.codec.load('{"to": "a"}') == SendEmail("a")
    assert Task(of_box).kind == "box"
    assert Task(handle, kind="mail").kind == "mail"
    with pytest.raises(ConfigError, match="SendEmail"):
        task.bind(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("func", [bare, of_dict, of_anything])
def test_a_handler_of_mappings_takes_its_kind_from_its_name(func: Any) -> None:
    task = Task(func)
    assert (task.kind, task.is_typed) == (func.__name__, True)
    assert task.codec.load('{"a": 1}') == {"a": 1}


def test_a_plain_function_stays_itself() -> None:
    task = Task(resize, aliases=["shrink"], options=TaskOptions(queue="images"))
    assert task("a", width=3) == resize("a", 3)
    assert (task.__name__, task.__doc__, task.__wrapped__) == ("resize", "Make it smaller.", resize)  # type: ignore[attr-defined]
    assert (task.kind, task.aliases, task.is_typed, task.options.queue) == ("resize", ("shrink",), False, "images")
    assert isinstance(task.codec, FunctionCodec)
    bound = task.bind("x.png")
    assert (bound.kind, bound.task, bound.args) == ("resize", task, {"path": "x.png", "width": 800})
    assert bound.dump(100) == b'{"path":"x.png","width":800}'
    with pytest.raises(ValidationError):
        task.bind()  # type: ignore[call-arg]


def test_a_function_inside_another_is_a_function() -> None:
    def inner(a: int) -> None: ...

    assert Task(inner).kind == "inner"


class Holder:
    def method(self, a: int) -> None: ...

    @staticmethod
    def static(a: int) -> None: ...

    @classmethod
    def of_class(cls, a: int) -> None: ...


class Callable_:
    def __call__(self, a: int) -> None: ...


async def coroutine(a: int) -> None: ...


async def async_generator(a: int) -> Any:
    yield a


def generator(a: int) -> Iterator[int]:
    yield a


def two(job: Job[SendEmail], more: int) -> None: ...


def by_keyword(*, job: Job[SendEmail]) -> None: ...


def of_int(job: Job[int]) -> None: ...


def unresolved(job: Job[Missing]) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("func", "said"),
    [
        (Holder.method, "is a method"),
        (Holder().method, "is a method"),
        (Holder.static, "is a method"),
        (Holder.of_class, "is a method"),
        (vars(Holder)["static"], "is a method"),
        (vars(Holder)["of_class"], "is a method"),
        (lambda a: None, "is a lambda"),
        (coroutine, "is a coroutine function"),
        (async_generator, "is a coroutine function"),
        (generator, "is a generator function"),
        (Holder, "is a class"),
        (Callable_(), "no function with a name"),
        (partial(resize, "a"), "no function with a name"),
        ("resize", "no function with a name"),
        (Task(resize), "is a task already"),
        (two, "takes the job alone"),
        (by_keyword, "positional"),
        (of_int, "declare a dataclass"),
        (unresolved, "Missing"),
    ],
)
def test_what_cannot_be_a_handler_is_refused_with_the_reason(func: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Task(func)


@pytest.mark.parametrize(
    "options",
    [
        {"queue": ""},
        {"queue": 5},
        {"priority": 0},
        {"priority": True},
        {"max_attempts": 0},
        {"timeout": -1},
        {"retry": 5},
        {"retry_on": "ValueError"},
        {"fail_on": (int,)},
    ],
)
def test_an_option_that_cannot_work_is_refused_at_the_declaration(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        TaskOptions.declare(**options)


def test_options_are_kept_as_they_are_used() -> None:
    policy = exponential(1)
    options = TaskOptions.declare(timeout=timedelta(minutes=1), retry=policy, retry_on=OSError, fail_on=[ValueError])
    assert options == TaskOptions(timeout=60.0, retry=policy, retry_on=(OSError,), fail_on=(ValueError,))
    assert TaskOptions.declare() == TaskOptions()


@pytest.mark.parametrize("kind", ["", "x" * 201, "a\0", 5])
def test_a_kind_that_cannot_be_stored_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match="kind"):
        Task(resize, kind=kind)
    with pytest.raises(ConfigError, match="aliases"):
        Task(resize, aliases=[kind])


def test_aliases_are_a_list() -> None:
    with pytest.raises(ConfigError, match="aliases must be a list"):
        Task(resize, aliases="old")


def test_tasks_are_found_by_kind_alias_and_type() -> None:
    registry = Registry()
    mail, images, anything = Task(handle, aliases=("mail", "send_email")), Task(resize), Task(bare)
    for task in (mail, images, anything):
        registry.add(task)
    assert registry.kinds == ("bare", "mail", "resize", "send_email")
    assert registry.find("mail") is registry.get("send_email") is registry.for_type(SendEmail) is mail
    assert registry.find("nope") is None
    assert registry.for_type(dict) is None
    with pytest.raises(UnknownKind, match="bare, mail, resize, send_email") as caught:
        registry.get("nope")
    assert caught.value.kind == "nope"


@pytest.mark.parametrize(
    ("kind", "aliases", "clash"), [("send_email", (), "send_email"), ("new", ("mail",), "mail"), ("mail", (), "mail")]
)
def test_a_second_handler_for_a_kind_is_refused_and_both_are_named(
    kind: str, aliases: tuple[str, ...], clash: str
) -> None:
    registry = Registry()
    registry.add(Task(handle, aliases=["mail"]))
    with pytest.raises(DuplicateKind, match=r"handle.*resize") as caught:
        registry.add(Task(resize, kind=kind, aliases=aliases))
    assert caught.value.kind == clash
    assert registry.kinds == ("mail", "send_email")


def test_args_of_two_kinds_must_say_which() -> None:
    registry = Registry()
    registry.add(Task(handle))
    registry.add(Task(handle, kind="urgent"))
    with pytest.raises(ConfigError, match="send_email, urgent"):
        registry.for_type(SendEmail)
