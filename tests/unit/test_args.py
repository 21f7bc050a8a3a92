"""Typed args come back exactly, or are refused with their path."""

from __future__ import annotations

import enum
import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import Annotated, Any, Generic, Literal, NewType, Optional, TypeVar, Union
from uuid import UUID
from zoneinfo import ZoneInfo

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from awa.args import FunctionCodec, codec_for
from awa.errors import ConfigError, ValidationError
from awa.unique import unique_key

BIG = 10**6
UserId = NewType("UserId", int)
T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    ONE = 1
    YES = True
    NOTHING = None


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    A = "a"


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@dataclass
class Item:
    name: str
    price: Decimal
    at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    text: str
    number: int
    ratio: float
    flag: bool
    nothing: None
    whatever: Any
    when: datetime
    day: date
    uid: UUID
    cost: Decimal
    blob: bytes
    color: Color
    level: Level
    word: Word
    access: Access
    pair: tuple[int, datetime]
    empty: tuple[()]
    many: tuple[UUID, ...]
    loose: tuple  # type: ignore[type-arg]
    tags: set[str]
    days: frozenset[date]
    items: list[Item]
    by_name: dict[str, Item]
    seq: Sequence[int]
    table: Mapping[str, Decimal]
    bare_list: list  # type: ignore[type-arg]
    bare_dict: dict  # type: ignore[type-arg]
    maybe: Optional[Item]  # noqa: UP045
    either: int | str | list[bytes] | None
    number_or: Union[int, float]  # noqa: UP007
    mode: Literal["fast", "slow", 1, None]
    user: UserId
    noted: Annotated[date, "meta"]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("aé😀 '", max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=3), inner, max_size=3),
    max_leaves=5,
)
ints = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)
offsets = st.integers(-86_399, 86_399).map(lambda seconds: timezone(timedelta(seconds=seconds)))
# fold means nothing at a fixed offset, and is not kept.
moments = st.datetimes(timezones=st.just(UTC) | offsets).map(lambda moment: moment.replace(fold=0))
costs = st.decimals(allow_nan=False, allow_infinity=False)
items = st.builds(Item, name=texts, price=costs, at=st.none() | moments)
everything = st.builds(
    Everything,
    text=texts, number=ints, ratio=floats, flag=st.booleans(), nothing=st.none(), whatever=json_values,
    when=moments, day=st.dates(), uid=st.uuids(), cost=costs, blob=st.binary(max_size=9),
    color=st.sampled_from(list(Color)), level=st.just(Level.LOW), word=st.just(Word.A),
    access=st.sampled_from([Access(0), Access.READ, Access.READ | Access.WRITE]),
    pair=st.tuples(ints, moments), empty=st.just(()), many=st.lists(st.uuids(), max_size=3).map(tuple),
    loose=st.lists(json_values, max_size=3).map(tuple), tags=st.sets(texts, max_size=3),
    days=st.frozensets(st.dates(), max_size=3), items=st.lists(items, max_size=2),
    by_name=st.dictionaries(texts, items, max_size=2), seq=st.lists(ints, max_size=2),
    table=st.dictionaries(texts, costs, max_size=2), bare_list=st.lists(json_values, max_size=2),
    bare_dict=st.dictionaries(texts, json_values, max_size=2), maybe=st.none() | items,
    either=st.none() | ints | texts | st.lists(st.binary(max_size=3), max_size=2), number_or=ints | floats,
    mode=st.sampled_from(["fast", "slow", 1, None]), user=ints, noted=st.dates(),
)  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])  # of the machine, not of the strategy
@given(everything)
def test_every_kind_of_field_comes_back_with_its_value_and_type(value: Everything) -> None:
    codec = codec_for(Everything)
    back = codec.load(codec.dump(value, BIG))
    assert back == value
    # Sets may list their members in another order; everything else looks exactly the same.
    assert repr_without_sets(back) == repr_without_sets(value)
    assert codec.dump(back, BIG) == codec.dump(value, BIG)


def repr_without_sets(value: Everything) -> str:
    return repr([getattr(value, name) for name in Everything.__slots__ if name not in ("tags", "days")])


def test_the_stored_text_is_what_the_docs_say() -> None:
    value = Item("x", Decimal("1.10"), datetime(2026, 3, 1, 12, tzinfo=ZoneInfo("Europe/Prague")))
    assert codec_for(Item).dump(value, BIG) == b'{"name":"x","price":"1.10","at":"2026-03-01T12:00:00+01:00"}'
    back = codec_for(Item).load('{"name":"x","price":"1.10","at":"2026-03-01T11:00:00Z"}')
    assert back == value


def one_field(tp: Any) -> Any:
    return dataclass(type("Holder", (), {"__annotations__": {"x": tp}, "__module__": __name__}))


class Text(str):
    pass


@pytest.mark.parametrize(
    ("tp", "value", "path"),
    [
        (str, 1, "args.x"),
        (str, Text("a"), "args.x"),
        (str, Word.A, "args.x"),
        (str, None, "args.x"),
        (str, "a\0", "args.x"),
        (str, "\ud800", "args.x"),
        (int, True, "args.x"),
        (int, 1.0, "args.x"),
        (int, Level.LOW, "args.x"),
        (int, 2**63, "args.x"),
        (float, "1", "args.x"),
        (float, True, "args.x"),
        (float, 2**53 + 1, "args.x"),
        (float, math.nan, "args.x"),
        (float, math.inf, "args.x"),
        (bool, 1, "args.x"),
        (datetime, datetime(2026, 1, 1), "args.x"),
        (datetime, date(2026, 1, 1), "args.x"),
        (datetime | None, datetime(2026, 1, 1), "args.x"),
        (date, datetime(2026, 1, 1, tzinfo=UTC), "args.x"),
        (UUID, "00000000-0000-0000-0000-000000000001", "args.x"),
        (Decimal, 1.5, "args.x"),
        (Decimal, Decimal("nan"), "args.x"),
        (Decimal, Decimal("-inf"), "args.x"),
        (bytes, bytearray(b"x"), "args.x"),
        (Color, "red", "args.x"),
        (Color, Level.LOW, "args.x"),
        (Literal["a"], "b", "args.x"),
        (Literal[1], True, "args.x"),
        (Literal["a"], [], "args.x"),
        (list[int], (1, 2), "args.x"),
        (list[int], [1, "2"], "args.x[1]"),
        (list[Item], [Item("a", Decimal(1)), Item("b", 2)], "args.x[1].price"),  # type: ignore[arg-type]
        (dict[str, int], {"a b": "c"}, "args.x['a b']"),
        (dict[str, int], {1: 1}, "args.x[1]"),
        (dict[str, int], OrderedDict(a=1), "args.x"),
        (dict[str, list[date]], {"a": [date(2026, 1, 1), None]}, "args.x.a[1]"),
        (tuple[int, str], (1,), "args.x"),
        (tuple[int, str], (1, 2), "args.x[1]"),
        (tuple[int, ...], (1, "2"), "args.x[1]"),
        (tuple[int, ...], [1], "args.x"),
        (set[str], ["a"], "args.x"),
        (set[str], frozenset("a"), "args.x"),
        (set[str], {"\0"}, "args.x[0]"),
        (int | str, 1.5, "args.x"),
        (Item | None, Item(1, Decimal(1)), "args.x.name"),  # type: ignore[arg-type]
        (Item, {"name": "a"}, "args.x"),
        (Any, {"a": {1, 2}}, "args.x.a"),
        (Any, datetime(2026, 1, 1, tzinfo=UTC), "args.x"),
        (dict, {"a": {1: 2}}, "args.x.a[1]"),
    ],
    ids=repr,
)
def test_a_value_of_another_type_is_refused_at_dump(tp: Any, value: Any, path: str) -> None:
    holder = one_field(tp)
    with pytest.raises(ValidationError) as caught:
        codec_for(holder).dump(holder(value), BIG)
    assert caught.value.path == path
    str(caught.value).encode()


@pytest.mark.parametrize(
    ("tp", "text", "path"),
    [
        (str, '{"x": 1}', "args.x"),
        (str, "{}", "args.x"),
        (str, '{"x": "a", "y": 1}', "args.y"),
        (str, '["x"]', "args"),
        (str, "{", "args"),
        (int, '{"x": 1.0}', "args.x"),
        (float, '{"x": true}', "args.x"),
        (datetime, '{"x": "2026-01-01T00:00:00"}', "args.x"),
        (datetime, '{"x": "soon"}', "args.x"),
        (datetime, '{"x": 5}', "args.x"),
        (date, '{"x": "2026-13-01"}', "args.x"),
        (UUID, '{"x": "no"}', "args.x"),
        (Decimal, '{"x": 1.5}', "args.x"),
        (Decimal, '{"x": "NaN"}', "args.x"),
        (Decimal, '{"x": "one"}', "args.x"),
        (bytes, '{"x": "*"}', "args.x"),
        (Color, '{"x": "blue"}', "args.x"),
        (Color, '{"x": []}', "args.x"),
        (Color, '{"x": 1.0}', "args.x"),
        (Access, '{"x": 99}', "args.x"),
        (Access, '{"x": "READ"}', "args.x"),
        (list[date], '{"x": ["2026-01-01", 1]}', "args.x[1]"),
        (tuple[int, int], '{"x": [1]}', "args.x"),
        (tuple[int, int], '{"x": [1, "2"]}', "args.x[1]"),
        (set[Any], '{"x": [[]]}', "args.x"),
        (dict[str, UUID], '{"x": {"k": 1}}', "args.x.k"),
        (Item, '{"x": {"name": "n"}}', "args.x.price"),
        (Item, '{"x": {"name": "n", "price": "1", "old": 1}}', "args.x.old"),
        (int | str, '{"x": null}', "args.x"),
    ],
    ids=repr,
)
def test_text_that_does_not_fit_is_refused_at_load(tp: Any, text: str, path: str) -> None:
    with pytest.raises(ValidationError) as caught:
        codec_for(one_field(tp)).load(text)
    assert caught.value.path == path


def test_an_int_stands_for_a_float() -> None:
    holder = one_field(float)
    codec = codec_for(holder)
    assert codec.dump(holder(5), BIG) == b'{"x":5.0}'
    assert repr(codec.load('{"x": 5}').x) == "5.0"


def test_a_missing_field_takes_its_default() -> None:
    @dataclass
    class Grown:
        a: int
        _: KW_ONLY
        b: str = "b"
        c: list[int] = field(default_factory=list)
        computed: int = field(init=False, default=3)

    codec = codec_for(Grown)
    assert codec.load('{"a": 1}') == Grown(1)
    assert codec.dump(Grown(1), BIG) == b'{"a":1,"b":"b","c":[]}'


def test_a_class_may_contain_itself_but_a_value_may_not() -> None:
    codec = codec_for(Tree)
    tree = Tree([Tree([]), Tree([Tree([])])])
    assert codec.load(codec.dump(tree, BIG)) == tree
    tree.children.append(tree)
    with pytest.raises(ValidationError, match="nested too deeply"):
        codec.dump(tree, BIG)
    with pytest.raises(ValidationError, match="nested too deeply"):
        codec.load('{"children":[' * 500 + "]}" * 500)


@dataclass
class Tree:
    children: list[Tree]


@dataclass
class Box(Generic[T]):
    content: T


def test_generic_and_parametrised_types() -> None:
    assert codec_for(Box[int]).load('{"content": [1]}') == Box([1])
    codec = codec_for(dict[str, date])
    assert codec.load(codec.dump({"a": date(2026, 1, 1)}, BIG)) == {"a": date(2026, 1, 1)}


def test_a_rejecting_constructor_is_a_validation_error() -> None:
    @dataclass
    class Picky:
        x: int

        def __post_init__(self) -> None:
            if self.x < 0:
                raise ValueError("negative")

    with pytest.raises(ValidationError, match="ValueError: negative") as caught:
        codec_for(Picky).load('{"x": -1}')
    assert isinstance(caught.value.__cause__, ValueError)


@dataclass
class WithInitVar:
    x: InitVar[int]


@pytest.mark.parametrize(
    ("tp", "said"),
    [
        (one_field(str | datetime), "two of its members"),
        (one_field(list[int] | set[int]), "two of its members"),
        (one_field(dict[int, str]), "keys of a JSON object are str"),
        (one_field(object()), "x: "),
        (one_field(deque), "x: collections.deque"),
        (one_field(complex), "complex"),
        (one_field(Literal[b"x"]), "Literal"),
        (one_field(enum.Enum("Odd", {"A": (1, 2)})), "Odd.A"),
        (one_field("Unheard"), "Unheard"),
        (WithInitVar, "'x'"),
        (int, "declare a dataclass"),
        (list[int], "declare a dataclass"),
        (Item | None, "declare a dataclass"),
        pytest.param(object(), "object", id="no type"),
    ],
    ids=str,
)
def test_a_type_that_cannot_be_stored_is_a_config_error(tp: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        codec_for(tp)


@pytest.mark.parametrize("value", [{"a": 1}, OrderedDict(a=1), MappingProxyType({"a": 1})])
def test_mappings_are_stored_as_they_are(value: Mapping[str, int]) -> None:
    codec = codec_for(type(value))
    assert codec.load(codec.dump(value, BIG)) == {"a": 1}
    with pytest.raises(ValidationError) as caught:
        codec.load("[1]")
    assert caught.value.path == "args"


def test_a_mapping_codec_takes_nothing_else() -> None:
    with pytest.raises(ValidationError, match="must be a mapping"):
        codec_for(dict).dump([("a", 1)], BIG)
    with pytest.raises(ValidationError) as caught:
        codec_for(dict).dump({1: "a", "1": "b"}, BIG)
    assert caught.value.path == "args[1]"


def test_args_over_the_limit_are_refused() -> None:
    with pytest.raises(ValidationError, match="the limit is 20") as caught:
        codec_for(Item).dump(Item("x" * 20, Decimal(1)), 20)
    assert caught.value.limit == 20


def test_equal_sets_give_equal_keys_whatever_their_order() -> None:
    holder = one_field(set[str])
    first = holder({f"n{number}" for number in range(50)})
    second = holder({f"n{number}" for number in reversed(range(50))} | {"n0"})
    assert unique_key("k", first) == unique_key("k", second)
    assert orjson.loads(codec_for(holder).dump(first, BIG))["x"] == sorted(first.x)


# --- functions


def resize(path: str, width: int = 800, *, at: datetime | None = None, extra=None): ...  # type: ignore[no-untyped-def]


def test_a_call_is_bound_by_name_with_defaults() -> None:
    codec = FunctionCodec(resize)
    bound = codec.bind("x.png", at=datetime(2026, 1, 1, tzinfo=UTC))
    assert bound == {"path": "x.png", "width": 800, "at": datetime(2026, 1, 1, tzinfo=UTC), "extra": None}
    assert codec.load(codec.dump(bound, BIG)) == bound
    assert codec.load('{"path": "y", "extra": [1]}') == {"path": "y", "extra": [1]}


@pytest.mark.parametrize("call", [(), ("a", 1, 2), ("a", "b", "c", "d")])
def test_a_call_that_does_not_fit_is_a_validation_error(call: tuple[Any, ...]) -> None:
    with pytest.raises(ValidationError, match=r"resize\(\)"):
        FunctionCodec(resize).bind(*call)


def test_arguments_are_checked_by_annotation() -> None:
    codec = FunctionCodec(resize)
    for wrong, path in (
        (codec.bind(1), "args.path"),
        (codec.bind("a", True), "args.width"),
        (codec.bind("a", extra={1}), "args.extra"),
        ({"other": 1}, "args.other"),
    ):
        with pytest.raises(ValidationError) as caught:
            codec.dump(wrong, BIG)
        assert caught.value.path == path
    for text, path in (
        ("{}", "args.path"),
        ('{"path": 1}', "args.path"),
        ('{"path": "a", "b": 1}', "args.b"),
        ("1", "args"),
    ):
        with pytest.raises(ValidationError) as caught:
            codec.load(text)
        assert caught.value.path == path


def test_parameters_without_a_name_of_their_own_are_refused() -> None:
    def positional(a: int, /) -> None: ...
    def starred(*a: int) -> None: ...
    def keywords(**a: int) -> None: ...
    def unresolved(a: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821
    def unstorable(a: complex) -> None: ...

    for func, said in (
        (positional, "'a' is positional-only"),
        (starred, "'a' is variadic positional"),
        (keywords, "'a' is variadic keyword"),
        (unresolved, "Missing"),
        (unstorable, "complex"),
    ):
        with pytest.raises(ConfigError, match=said):
            FunctionCodec(func)


def test_a_return_annotation_need_not_exist() -> None:
    def handler(a: int) -> OnlyForCheckers: ...  # type: ignore[name-defined]  # noqa: F821

    assert FunctionCodec(handler).load('{"a": 1}') == {"a": 1}
