"""Canonical JSON, unique keys and kinds: reference values byte for byte, and a plain version on random input."""

from __future__ import annotations

import json
import math
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

import awa.unique
from awa._core import canonical_json, derive_kind, float_text, unique_key
from awa.descriptors import descriptor_hash
from awa.errors import ConfigError, ValidationError

VECTORS = json.loads((Path(__file__).parent.parent / "fixtures" / "vectors.json").read_text())


def plain_float(value: float) -> str:
    if not math.isfinite(value):
        return "null"
    if value == 0:
        return "-0.0" if math.copysign(1, value) < 0 else "0.0"
    sign, digit_tuple, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    digits = "".join(map(str, digit_tuple)).rstrip("0")
    first = exponent + len(digit_tuple) - 1
    if first < -5 or first > 15:
        rest = "." + digits[1:] if len(digits) > 1 else ""
        text = f"{digits[0]}{rest}e{'+' if first > 0 else '-'}{abs(first)}"
    elif first < 0:
        text = "0." + "0" * (-first - 1) + digits
    else:
        digits = digits.ljust(first + 1, "0")
        text = digits[: first + 1] + "." + (digits[first + 1 :] or "0")
    return ("-" if sign else "") + text


def plain_text(text: str) -> str:
    named = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(named.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in text) + '"'


def plain_json(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int):
        return str(value) if -(2**63) <= value < 2**63 else plain_float(float(value))
    if isinstance(value, float):
        return plain_float(value)
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{plain_text(key)}:{plain_json(value[key])}" for key in sorted(value)) + "}"
    return "[" + ",".join(map(plain_json, value)) + "]"


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=5) | st.tuples(inner) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=20,
)


@given(values)
def test_canonical_json_agrees_with_the_plain_version(value: Any) -> None:
    assert canonical_json(value) == plain_json(value).encode()


@given(st.floats() | st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0]))
def test_float_text_agrees_with_the_plain_version(value: float) -> None:
    assert float_text(value) == plain_float(value)
    if math.isfinite(value):
        assert float(float_text(value)) == value


@pytest.mark.parametrize("vector", VECTORS["float_text"], ids=lambda vector: vector["repr"])
def test_float_text_vectors(vector: dict[str, str]) -> None:
    value = float(vector["repr"])
    assert float_text(value) == vector["canonical"]
    assert canonical_json([value]) == f"[{vector['canonical']}]".encode()
    assert descriptor_hash(extra={"f": value}) == vector["descriptor_hash_of_extra_f"]


@pytest.mark.parametrize("vector", VECTORS["unique_key"], ids=lambda vector: f"{vector['id']} {vector['note']}")
@pytest.mark.parametrize("function", [unique_key, awa.unique.unique_key], ids=["core", "public"])
def test_unique_key_vectors(vector: dict[str, Any], function: Any) -> None:
    options = dict(vector["opts"])
    if "by_period" in options:
        options["bucket"] = options.pop("by_period")
    assert function(vector["kind"], vector["args"], queue=vector["queue"], **options).hex() == vector["key"]


@pytest.mark.parametrize("vector", VECTORS["kind_name"], ids=lambda vector: vector["class"])
def test_kind_vectors(vector: dict[str, str]) -> None:
    assert derive_kind(vector["class"]) == vector["kind"]
    assert derive_kind(type(vector["class"], (), {})) == vector["kind"]


@pytest.mark.parametrize("vector", VECTORS["descriptor_hash"], ids=lambda vector: f"{vector['id']} {vector['note']}")
def test_descriptor_hash_vectors(vector: dict[str, Any]) -> None:
    assert descriptor_hash(**vector["in"]) == vector["hash"]


def test_keys_sort_by_code_point_not_by_utf16() -> None:
    assert canonical_json({"\U0001f600": 1, "\uffff": 2, "é": 3, "z": 4}) == '{"z":4,"é":3,"\uffff":2,"😀":1}'.encode()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [b"x"]}, "value.a[0]"),
        ({1: 2}, "value[1]"),
        ({"a": "\ud800"}, "value.a"),
        ({"a": 10**400}, "value.a"),
        ({"a": {1}}, "value.a"),
    ],
)
def test_canonical_json_refuses_what_has_no_json_text(value: Any, path: str) -> None:
    with pytest.raises(ValidationError) as caught:
        canonical_json(value)
    assert caught.value.path == path


def test_canonical_json_of_a_circle_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ValidationError, match="contains itself"):
        canonical_json(circle)
    deep: Any = 1.0e300
    for _ in range(250):
        deep = [deep]
    assert canonical_json(deep) == b"[" * 250 + b"1e+300" + b"]" * 250


def test_unique_key_of_chosen_names_tells_missing_from_null() -> None:
    def key(args: dict[str, Any]) -> bytes:
        return unique_key("k", args, by_args=["a", "b"])

    assert key({"a": 1, "c": 2}) == key({"a": 1, "c": 3}) == unique_key("k", {"a": 1})
    assert key({"a": 1}) != key({"a": 1, "b": None})
    assert unique_key("k", {"a": 1}, by_args=[]) == unique_key("k", {}) != unique_key("k", {}, by_args=False)


def test_unique_key_is_the_documented_hash() -> None:
    expected = blake3(b"k\0q\0" + b'{"a":1e+16}' + b"\0" + struct.pack("<q", -5)).digest()[:16]
    assert unique_key("k", {"a": 10**16 * 1.0}, queue="q", by_queue=True, bucket=-5) == expected


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: unique_key("k", {"a": math.nan}), ValidationError, "args.a"),
        (lambda: unique_key("k", {"a": math.inf}), ValidationError, "args.a"),
        (lambda: unique_key("\ud800", {}), ValidationError, "kind"),
        (lambda: unique_key("k", {}, by_queue=True), ConfigError, "queue="),
        (lambda: unique_key("k", {}, by_queue=True, queue="\ud800"), ValidationError, "queue"),
        (lambda: unique_key("k", {}, bucket=2**63), ValidationError, "bucket"),
        (lambda: unique_key("k", {}, bucket=True), ValidationError, "bucket"),
        (lambda: unique_key("k", {}, by_args="abc"), ConfigError, "by_args"),  # type: ignore[arg-type]
        (lambda: unique_key("k", [1], by_args=["a"]), ValidationError, "args must be a dict"),
        (lambda: derive_kind(3), ConfigError, "kind"),
    ],
)
def test_wrong_input_is_named(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


def test_kinds_of_functions_and_awkward_capitals() -> None:
    assert derive_kind(test_kinds_of_functions_and_awkward_capitals) == "test_kinds_of_functions_and_awkward_capitals"
    assert derive_kind("aİb") == "a_ib"  # lowers to two code points, the first stays
    assert derive_kind("A٣B") == "a٣b"  # an Arabic digit is no ASCII digit
    assert derive_kind("") == ""
