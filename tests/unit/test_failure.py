"""What is stored of an exception is bounded text that PostgreSQL accepts, whatever the exception does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from awa.args import codec_for
from awa.failure import Failure, describe


def caught(action: Callable[[], object]) -> BaseException:
    try:
        action()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def check_storable(failure: Failure) -> None:
    assert len(failure.type) <= 200
    assert len(failure.text) <= 4_000
    assert len(failure.traceback) <= 16_000
    for text in (failure.type, failure.text, failure.traceback):
        assert type(text) is str
        assert "\0" not in text
        text.encode()
    assert b"\\u0000" not in failure.as_json().replace(b"\\\\", b"")  # jsonb refuses the escape too
    assert orjson.loads(failure.as_json()) == {
        "type": failure.type,
        "text": failure.text,
        "traceback": failure.traceback,
    }


def fail() -> None:
    raise ValueError("no such path: ä")


def test_type_text_and_traceback() -> None:
    failure = describe(caught(fail))
    assert failure.type == "ValueError"
    assert failure.text == "no such path: ä"
    assert failure.traceback.startswith("Traceback (most recent call last):\n")
    assert 'raise ValueError("no such path: ä")' in failure.traceback
    assert failure.traceback.endswith("\nValueError: no such path: ä\n")
    check_storable(failure)


def test_an_exception_of_a_module_has_its_qualified_name() -> None:
    class Mine(Exception):
        pass

    assert describe(Mine("x")).type == f"{__name__}.{Mine.__qualname__}"


def test_causes_and_contexts_are_told_as_python_tells_them() -> None:
    def with_cause() -> None:
        try:
            fail()
        except ValueError as error:
            raise OSError("outer") from error

    def with_context() -> None:
        try:
            with_cause()
        except OSError:
            raise KeyError("last")  # noqa: B904

    text = describe(caught(with_context)).traceback
    order = ["ValueError: no such", "direct cause", "OSError: outer", "During handling", "KeyError: 'last'"]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)

    def suppressed() -> None:
        try:
            fail()
        except ValueError:
            raise OSError("alone") from None

    assert "ValueError" not in describe(caught(suppressed)).traceback


def test_notes_and_the_members_of_a_group_are_told() -> None:
    inner = ExceptionGroup("inner", [caught(fail), TypeError("second")])  # type: ignore[list-item]
    group = ExceptionGroup("outer", [inner])
    group.add_note("seen at \0 night")
    text = describe(group).traceback
    for part in ("outer (1 sub-exception)", "seen at \\x00 night", "inner (2", "no such path", "TypeError: second"):
        assert part in text
    check_storable(describe(group))


def test_frames_of_the_worker_are_left_out() -> None:
    # A module of ours calls the handler, as the worker's loop does.
    loop = ModuleType("awa._loop_of_a_test")
    exec(compile("def run(handler):\n    handler()\n", "loop.py", "exec"), vars(loop))
    text = describe(caught(lambda: vars(loop)["run"](fail))).traceback
    assert "in fail" in text
    hidden = caught(lambda: vars(loop)["run"](fail)).with_traceback(None)
    try:
        vars(loop)["run"](fail)
    except ValueError as error:
        assert error.__traceback__ is not None
        hidden = error.with_traceback(error.__traceback__.tb_next)  # without this test's own frame
    text = describe(hidden).traceback
    assert "loop.py" not in text
    assert "in fail" in text


def test_an_error_of_our_own_keeps_its_frames() -> None:
    error = caught(lambda: codec_for(dict).load("["))
    assert error.__traceback__ is not None
    assert error.__traceback__.tb_next is not None
    ours = error.with_traceback(error.__traceback__.tb_next.tb_next)
    assert "args.py" in describe(ours).traceback


def recurse() -> None:
    recurse()


def test_a_recursion_keeps_its_end() -> None:
    failure = describe(caught(recurse))
    assert failure.type == "RecursionError"
    assert "in recurse" in failure.traceback
    check_storable(failure)


def test_long_text_keeps_head_and_tail() -> None:
    failure = describe(ValueError("HEAD" + "x" * 10**6 + "TAIL"))
    assert failure.text.startswith("HEAD")
    assert failure.text.endswith("TAIL")
    assert "1,000,008 characters" in failure.text
    check_storable(failure)
    check_storable(describe(ValueError("\0" * 3_999)))
    assert describe(ValueError("x" * 4_000)).text == "x" * 4_000


def test_what_postgresql_refuses_becomes_visible() -> None:
    failure = describe(ValueError("a\0b\ud800c\n\t"))
    assert failure.text == "a\\x00b\\ud800c\n\t"
    check_storable(failure)


class Text(str):
    def __str__(self) -> str:
        return self

    def encode(self, *_: Any) -> bytes:
        raise RuntimeError("encode")


def hostile(**members: Any) -> BaseException:
    kind = type("Hostile", (Exception,), members)
    return caught(lambda: raise_it(kind("x")))


def raise_it(exc: BaseException) -> None:
    raise exc


def refuse(*_: Any) -> Any:
    raise RuntimeError("hostile")


def leave(*_: Any) -> Any:
    sys.exit(3)


def chain(length: int) -> BaseException:
    exc = ValueError("first")
    for number in range(length):
        following = ValueError(f"number {number}")
        following.__cause__ = exc
        exc = following
    return exc


def circle() -> BaseException:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first


def wide_group(depth: int) -> BaseException:
    members: list[Exception] = [ValueError("x") for _ in range(100)]
    for _ in range(depth):
        members = [ExceptionGroup("g", members), ValueError("y")]
    return ExceptionGroup("top", members)


@pytest.mark.parametrize(
    "make",
    [
        lambda: hostile(__str__=refuse, __repr__=refuse),
        lambda: hostile(__str__=leave),
        lambda: hostile(__str__=lambda self: 5),
        lambda: hostile(__str__=lambda self: None),
        lambda: hostile(__str__=lambda self: Text("fine")),
        lambda: hostile(__str__=lambda self: str(self)),
        lambda: hostile(__class__=property(refuse)),
        lambda: hostile(__cause__=property(refuse), __context__=property(refuse), __traceback__=property(refuse)),
        lambda: hostile(__notes__=property(refuse)),
        lambda: hostile(__notes__=[type("N", (), {"__str__": refuse})()]),
        lambda: hostile(__getattribute__=refuse),
        lambda: hostile(__module__=5),
        lambda: hostile(__module__="m\0" * 500),
        lambda: type("E" * 500, (Exception,), {})("x"),
        lambda: hostile(__module__="m\ud800"),
        lambda: ExceptionGroup("g", [hostile(__str__=refuse)]),  # type: ignore[list-item]
        lambda: wide_group(50),
        lambda: chain(100_000),
        circle,
        lambda: KeyboardInterrupt(),
        lambda: SystemExit(3),
        lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        lambda: caught(lambda: compile("a b\0", "x\ud800", "exec")),
        lambda: caught(lambda: exec("def f(:", {})),
    ],
)
def test_no_exception_escapes_its_description(make: Callable[[], BaseException]) -> None:
    exc = make()
    failure = describe(exc)
    check_storable(failure)
    assert failure.type
    assert "cannot be formatted" not in failure.traceback


def test_a_module_without_source_has_a_traceback() -> None:
    class Loader:
        def get_source(self, name: str) -> str:
            raise RuntimeError("no source")

    scope: dict[str, Any] = {"__name__": "elsewhere", "__loader__": Loader()}
    exec(compile("def boom():\n    raise ValueError('x')\n", "<elsewhere>", "exec"), scope)
    failure = describe(caught(scope["boom"]))
    assert 'File "<elsewhere>", line 2, in boom' in failure.traceback
    check_storable(failure)


@given(st.text(st.characters(categories=None) | st.sampled_from("\0\ud800\udfff"), max_size=200), st.integers(1, 60))
def test_any_text_becomes_storable(text: str, times: int) -> None:
    check_storable(describe(ValueError(text * times)))
