"""Args of other libraries' classes; each test runs where the library is installed."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest

from awa.args import codec_for
from awa.errors import ValidationError

BIG = 10**6
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def test_no_library_is_imported_for_the_sake_of_its_classes() -> None:
    check = (
        "import sys, dataclasses, awa.args; T = dataclasses.make_dataclass('T', [('x', int)]);"
        "awa.args.codec_for(T).load('{\"x\": 1}');"
        "assert not {'pydantic', 'msgspec', 'attr', 'attrs'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", check], check=True, timeout=60)


def test_pydantic_models() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Inner(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        at: datetime

    class Outer(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        model_config = pydantic.ConfigDict(strict=True)
        uid: UUID
        inner: list[Inner]
        ratio: float = pydantic.Field(default=1.0, alias="theRatio")

    Outer.model_rebuild(_types_namespace={"Inner": Inner, "UUID": UUID})
    codec = codec_for(Outer)
    value = Outer(uid=UUID(int=7), inner=[Inner(at=NOON)], theRatio=0.5)
    text = codec.dump(value, BIG)
    assert b'"theRatio":0.5' in text
    assert codec.load(text) == value
    value.inner = "no"
    with pytest.raises(ValidationError, match="cannot be written"):
        codec.dump(value, BIG)
    with pytest.raises(ValidationError, match="is refused by"):
        codec.load('{"uid": 1}')
    with pytest.raises(ValidationError) as caught:
        codec.dump(Outer(uid=UUID(int=7), inner=[], theRatio=float("nan")), BIG)
    assert caught.value.path == "args.theRatio"


def test_msgspec_structs() -> None:
    msgspec = pytest.importorskip("msgspec")
    struct: Any = msgspec.defstruct("S", [("uid", UUID), ("at", datetime), ("tags", set[str]), ("n", int, 1)])
    codec = codec_for(struct)
    value = struct(UUID(int=7), NOON, {"b", "a"})
    text = codec.dump(value, BIG)
    assert b'"tags":["a","b"]' in text
    assert codec.load(text) == value
    with pytest.raises(ValidationError, match="cannot be written"):
        codec.dump(struct("no", NOON, set()), BIG)
    with pytest.raises(ValidationError, match="is refused by"):
        codec.load("{}")
    row: Any = msgspec.defstruct("Row", [("n", int)], array_like=True)
    with pytest.raises(ValidationError, match="not written as an object"):
        codec_for(row).dump(row(1), BIG)


def test_attrs_classes() -> None:
    attrs = pytest.importorskip("attrs")
    plain: Any = attrs.make_class(
        "Plain", {"x": attrs.field(type=int), "_hidden": attrs.field(type=datetime, default=NOON)}
    )
    codec = codec_for(plain)
    value = plain(3, hidden=NOON)
    assert codec.dump(value, BIG) == b'{"x":3,"_hidden":"2026-01-01T12:00:00+00:00"}'
    assert codec.load(codec.dump(value, BIG)) == value
    assert codec.load('{"x": 4}') == plain(4)
    renamed: Any = attrs.make_class("Renamed", {"_n": attrs.field(type=int)})
    assert codec_for(renamed).load('{"_n": 4}') == renamed(4)
    with pytest.raises(ValidationError) as caught:
        codec.load("{}")
    assert caught.value.path == "args.x"
    with pytest.raises(ValidationError) as caught:
        codec.dump(plain("3"), BIG)
    assert caught.value.path == "args.x"
