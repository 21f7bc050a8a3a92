"""What may be stored as JSON, checked against a plain walker."""

from __future__ import annotations

import enum
import math
from collections import OrderedDict
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from awa._core import check_json, dump_json, path_step
from awa.errors import ValidationError


class Number(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    A = "a"


def bad_paths(value: Any, path: str, depth: int = 0) -> Iterator[str]:
    """The path of every flaw, by the rules written down once more."""

    def bad_text(text: str) -> bool:
        return "\0" in text or any(0xD800 <= ord(letter) <= 0xDFFF for letter in text)

    if value is None or type(value) is bool:
        return
    if type(value) is str:
        if bad_text(value):
            yield path
    elif type(value) is int:
        if not -(2**63) <= value <= 2**63 - 1:
            yield path
    elif type(value) is float:
        if not math.isfinite(value):
            yield path
    elif type(value) is dict:
        if depth == 64:
            yield path
            return
        for key, item in value.items():
            where = path + path_step(key)
            if type(key) is not str or bad_text(key):
                yield where
            else:
                yield from bad_paths(item, where, depth + 1)
    elif type(value) is list:
        if depth == 64:
            yield path
            return
        for position, item in enumerate(value):
            yield from bad_paths(item, f"{path}[{position}]", depth + 1)
    else:
        yield path


any_text = st.text(st.characters(codec=None, categories=None) | st.sampled_from("\0\ud800\udfff"), max_size=8)
good_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.sampled_from([2**63, 2**63 - 1, -(2**63), -(2**63) - 1])
    | st.floats()
    | any_text
    | st.sampled_from([Number.ONE, Word.A, b"x", (1,), {1}, OrderedDict(), Decimal(1), object()])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(any_text | st.sampled_from([1, None, True, 1.5]), inner, max_size=4)
    ),
    max_leaves=12,
)
good_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | good_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(good_text, inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_the_first_flaw_is_found_with_its_path(value: Any) -> None:
    expected = next(bad_paths(value, "args"), None)
    try:
        check_json(value, "args")
        found = None
    except ValidationError as error:
        found = error.path
        assert str(error).isprintable() or "\n" in str(error) or not found.isprintable()
    assert found == expected


@given(good_values)
def test_what_is_accepted_comes_back_exactly(value: Any) -> None:
    back = orjson.loads(dump_json(value, "args", 10**9))
    assert back == value
    assert repr(back) == repr(value)  # 1, 1.0 and True are equal and differ; so do 0.0 and -0.0


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"items": [0, 1, 2, {"price": math.nan}]}, "args.items[3].price"),
        ({"a": math.inf}, "args.a"),
        ({"a": -math.inf}, "args.a"),
        ({"a b": "x\0"}, "args['a b']"),
        ({"a\0": 1}, "args['a\\x00']"),
        ({"a": "\ud800"}, "args.a"),
        ({"a": "é\ud800"}, "args.a"),
        ({"a": "😀\0"}, "args.a"),
        ({"\udfff": 1}, "args['\\udfff']"),
        ({"a": 2**63}, "args.a"),
        ({"a": -(2**63) - 1}, "args.a"),
        ({"a": 10**5000}, "args.a"),
        ({1: "a", "1": "b"}, "args[1]"),
        ({True: 1}, "args[True]"),
        ({None: 1}, "args[None]"),
        ({1.5: 1}, "args[1.5]"),
        ({Word.A: 1}, "args[a tests.core.test_json_values.Word]"),
        ({"a": Number.ONE}, "args.a"),
        ({"a": Word.A}, "args.a"),
        ({"a": OrderedDict(b=1)}, "args.a"),
        ({"a": (1, 2)}, "args.a"),
        ({"a": {1, 2}}, "args.a"),
        ({"a": b"x"}, "args.a"),
        ({"a": datetime(2026, 1, 1, tzinfo=UTC)}, "args.a"),
        ({"a": datetime(2026, 1, 1)}, "args.a"),
        ({"a": UUID(int=1)}, "args.a"),
        ({"a": Decimal("1.5")}, "args.a"),
        ({"a": object()}, "args.a"),
        ({"a": int}, "args.a"),
    ],
)
def test_unstorable_values_are_refused_by_path(value: Any, path: str) -> None:
    with pytest.raises(ValidationError) as caught:
        dump_json(value, "args", 10**6)
    assert caught.value.path == path
    assert str(caught.value).startswith(path)
    str(caught.value).encode()  # the message itself can be logged


def nested(levels: int, kind: type) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if kind is list else {"k": value}
    return value


@pytest.mark.parametrize("kind", [list, dict])
def test_nesting_is_limited_at_any_depth(kind: type) -> None:
    check_json(nested(64, kind), "args")
    for levels in (65, 100_000):
        deep = nested(levels, kind)
        with pytest.raises(ValidationError, match="nested too deeply") as caught:
            check_json(deep, "args")
        assert caught.value.limit == 64
        while not isinstance(deep, int):  # freed level by level
            deep = deep[0] if kind is list else deep["k"]


def test_a_value_that_contains_itself_is_refused() -> None:
    circle: list[Any] = []
    circle.append({"again": circle})
    with pytest.raises(ValidationError, match="contains itself"):
        dump_json(circle, "args", 100)
    with pytest.raises(ValidationError, match="nested too deeply") as caught:
        check_json([[[]]], "metadata", 2)
    assert (caught.value.path, caught.value.limit) == ("metadata[0][0]", 2)


def test_the_size_limit_is_exact_and_named() -> None:
    assert dump_json({"a": "é"}, "args", 10) == '{"a":"é"}'.encode()
    with pytest.raises(ValidationError, match="takes 10 bytes as JSON, the limit is 9") as caught:
        dump_json({"a": "é"}, "args", 9)
    assert (caught.value.path, caught.value.value, caught.value.limit) == ("args", 10, 9)


def test_a_long_path_is_whole_in_the_attribute_and_short_in_the_message() -> None:
    with pytest.raises(ValidationError) as caught:
        check_json({"k" * 100_000: {"z": math.nan}}, "args")
    assert caught.value.path == "args." + "k" * 100_000 + ".z"
    assert len(str(caught.value)) < 400
