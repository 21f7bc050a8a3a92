"""Typed args to JSON text and back.

A codec is made once per type; it holds a chain of converters, one for each field, that either pass a value of the
right type on or turn it into a JSON value and back. What is read back equals what was sent, in value and type:

    str int float bool None         as they are, by exact type (an int is accepted for a float when it is exact)
    list[T]  dict[str, T]           as they are; also Sequence[T] and Mapping[str, T], which take a list and a dict
    datetime                        ISO 8601 with its offset, aware only (the zone's name is not kept)
    date  UUID  Decimal             their text; Decimal finite only
    bytes                           base64
    Enum                            the member's value, which must be a str, int, float, bool or None
    tuple[...]                      a list
    set[T]  frozenset[T]            a list in canonical order, so that equal sets give equal keys
    Literal  Optional  Union  NewType  Any
    dataclasses, attrs classes      an object of their fields
    pydantic models, msgspec Structs  as their library writes them, by its rules

Anything else, and anything undeclared that is no exact JSON value, is refused with its path. A union is accepted when
its members can be told apart in JSON: ``int | str``, not ``str | datetime``.

At load, a key that the type does not know is an error that names it, and a missing one takes its default. So a field
is added in two deploys: first to the workers, with a default, then to the producers; and removed in the other order.
"""

from __future__ import annotations

import base64
import binascii
import collections.abc
import dataclasses
import enum
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Protocol
from uuid import UUID

import orjson

from awa._core import canonical_json, dump_json, path_step
from awa.errors import ConfigError, ValidationError
from awa.job import Outcome

__all__ = ["Codec", "FunctionCodec", "codec_for", "result_dumper"]

_MISSING = object()

_JSON_TYPES: frozenset[type] = frozenset({str, int, float, bool, type(None), list, dict})


class Codec(Protocol):
    """Args of one type to JSON text and back."""

    @property
    def names(self) -> frozenset[str] | None:
        """The names that its objects may have; None for any."""

    def dump(self, value: Any, max_bytes: int) -> bytes:
        """JSON text of *value*, an object.

        Raises:
            ValidationError: The value does not match the declared type, cannot be stored, or its text is longer than
                *max_bytes*; ``.path`` says where.
        """

    def load(self, data: bytes | str) -> Any:
        """The value that :meth:`dump` wrote.

        Raises:
            ValidationError: The text does not fit the declared type; ``.path`` says where.
        """


def codec_for(tp: Any) -> Codec:
    """The codec of a type of args: dict or another mapping, a dataclass, an attrs, pydantic or msgspec class.

    Raises:
        ConfigError: The type cannot be stored as an object and read back, or one of its fields cannot.
    """
    try:
        return _codecs[tp]
    except KeyError:
        pass
    except TypeError:
        raise ConfigError(f"args cannot be of type {_name(tp)}: declare a dataclass") from None
    # Two threads may both make it; either result serves.
    codec = _codecs[tp] = _make_codec(tp)
    return codec


_codecs: dict[Any, Codec] = {}


# --- misfits: a value that does not match, and where -----------------------------------------------------------------


class _Misfit(Exception):
    """A value that does not match its declared type; each level adds its step of the path on the way out."""

    def __init__(self, reason: str, value: object) -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = value
        self.steps: list[str] = []

    def within(self, step: str) -> _Misfit:
        self.steps.append(step)
        return self

    def as_error(self, root: str = "args") -> ValidationError:
        path = root + "".join(reversed(self.steps))
        return ValidationError(f"{path} {self.reason}", path=path, value=self.value)


def _wanted(what: str, value: object) -> _Misfit:
    return _Misfit(f"must be {what}, got {_shown(value)}", value)


def _shown(value: object) -> str:
    kind = type(value)
    if kind in (str, int, float, bool, bytes):
        try:
            text = ascii(value)
        except ValueError:  # an int of more digits than Python prints
            return "a very large int"
        return f"{kind.__name__} {text}" if len(text) <= 60 else f"{kind.__name__} {text[:57]}..."
    return "None" if value is None else _name(kind)


def _name(tp: Any) -> str:
    if isinstance(tp, type) and not typing.get_args(tp):
        return tp.__qualname__ if tp.__module__ == "builtins" else f"{tp.__module__}.{tp.__qualname__}"
    return str(tp)


# --- converters: one per declared type -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Converter:
    """Both ways between a value of a declared type and its JSON value."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    plain: frozenset[type] = frozenset()
    """Exact types whose values both ways pass through unchanged, so that nobody need call."""
    json: frozenset[type] = frozenset()
    """Exact types of the JSON values that *encode* gives; what tells the members of a union apart."""
    names: frozenset[str] | None = None
    """The names of the objects that *encode* gives; None when it gives none, or any name."""


def _same(value: Any) -> Any:
    return value


_ANY = _Converter(_same, _same, _JSON_TYPES, _JSON_TYPES)


def _exactly(kind: type, what: str) -> _Converter:
    def pass_on(value: Any) -> Any:
        if type(value) is not kind:
            raise _wanted(what, value)
        return value

    return _Converter(pass_on, pass_on, frozenset({kind}), frozenset({kind}))


def _float_converter() -> _Converter:
    def to_float(value: Any) -> Any:
        if type(value) is float:
            return value
        # Type checkers let an int stand for a float, and JSON has one kind of number.
        if type(value) is int and -(2**53) <= value <= 2**53:
            return float(value)
        raise _wanted("a float", value)

    return _Converter(to_float, to_float, frozenset({float}), frozenset({float}))


def _text_converter(kind: type, what: str, write: Callable[[Any], str], read: Callable[[str], Any]) -> _Converter:
    def encode(value: Any) -> str:
        if type(value) is not kind:
            raise _wanted(what, value)
        return write(value)

    def decode(value: Any) -> Any:
        if type(value) is not str:
            raise _wanted(f"{what} as text", value)
        try:
            return read(value)
        except (ValueError, InvalidOperation):
            raise _wanted(f"{what} as text", value) from None

    return _Converter(encode, decode, json=frozenset({str}))


def _write_datetime(value: datetime) -> str:
    if value.utcoffset() is None:
        raise _Misfit(
            f"is the naive datetime {value.isoformat()}: say which time zone, for example with "
            ".replace(tzinfo=datetime.UTC) or .astimezone()",
            value,
        )
    return value.isoformat()


def _read_datetime(text: str) -> datetime:
    value = datetime.fromisoformat(text)
    if value.utcoffset() is None:
        raise ValueError("naive")
    return value


def _write_decimal(value: Decimal) -> str:
    if not value.is_finite():
        raise _wanted("a finite Decimal", value)
    return str(value)


def _read_decimal(text: str) -> Decimal:
    value = Decimal(text)
    if not value.is_finite():
        raise ValueError("not finite")
    return value


def _read_bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


_SCALARS: dict[Any, _Converter] = {
    Any: _ANY,
    object: _ANY,
    str: _exactly(str, "a str"),
    int: _exactly(int, "an int"),
    bool: _exactly(bool, "a bool"),
    None: _exactly(type(None), "None"),
    type(None): _exactly(type(None), "None"),
    float: _float_converter(),
    datetime: _text_converter(datetime, "an aware datetime", _write_datetime, _read_datetime),
    date: _text_converter(date, "a date", date.isoformat, date.fromisoformat),
    UUID: _text_converter(UUID, "a UUID", str, UUID),
    Decimal: _text_converter(Decimal, "a Decimal", _write_decimal, _read_decimal),
    bytes: _text_converter(bytes, "bytes", lambda value: base64.b64encode(value).decode(), _read_bytes),
    list: _exactly(list, "a list"),
    dict: _exactly(dict, "a dict"),
}


def _elements(convert: Callable[[Any], Any], values: Any) -> list[Any]:
    out = []
    try:
        for value in values:
            out.append(convert(value))
    except _Misfit as misfit:
        raise misfit.within(f"[{len(out)}]") from None
    return out


def _list_converter(item: _Converter) -> _Converter:
    if item is _ANY:
        return _SCALARS[list]

    def through(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def each(value: Any) -> Any:
            if type(value) is not list:
                raise _wanted("a list", value)
            return _elements(convert, value)

        return each

    return _Converter(through(item.encode), through(item.decode), json=frozenset({list}))


def _dict_converter(item: _Converter) -> _Converter:
    if item is _ANY:
        return _SCALARS[dict]

    def through(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def each(value: Any) -> Any:
            if type(value) is not dict:
                raise _wanted("a dict", value)
            key: Any = None
            out = {}
            try:
                for key, one in value.items():
                    out[key] = convert(one)
            except _Misfit as misfit:
                raise misfit.within(path_step(key)) from None
            return out

        return each

    return _Converter(through(item.encode), through(item.decode), json=frozenset({dict}))


def _set_converter(kind: type[set[Any]] | type[frozenset[Any]], item: _Converter) -> _Converter:
    what = f"a {kind.__name__}"

    def encode(value: Any) -> Any:
        if type(value) is not kind:
            raise _wanted(what, value)
        out = [item.encode(one) for one in value]
        try:
            return sorted(out, key=canonical_json)
        except ValidationError:
            return out  # refused a moment later, with its path

    def decode(value: Any) -> Any:
        if type(value) is not list:
            raise _wanted(f"{what} as a list", value)
        try:
            return kind(_elements(item.decode, value))
        except TypeError:
            raise _wanted(f"{what} of hashable members", value) from None

    return _Converter(encode, decode, json=frozenset({list}))


def _tuple_converter(items: list[_Converter]) -> _Converter:
    size = len(items)
    what = f"a tuple of {size}"

    def each(values: Any, converts: list[Callable[[Any], Any]]) -> list[Any]:
        out: list[Any] = []
        try:
            for value, convert in zip(values, converts, strict=True):
                out.append(convert(value))
        except _Misfit as misfit:
            raise misfit.within(f"[{len(out)}]") from None
        return out

    encodes = [item.encode for item in items]
    decodes = [item.decode for item in items]

    def encode(value: Any) -> Any:
        if type(value) is not tuple or len(value) != size:
            raise _wanted(what, value)
        return each(value, encodes)

    def decode(value: Any) -> Any:
        if type(value) is not list or len(value) != size:
            raise _wanted(f"{what} as a list", value)
        return tuple(each(value, decodes))

    return _Converter(encode, decode, json=frozenset({list}))


def _long_tuple_converter(item: _Converter) -> _Converter:
    def encode(value: Any) -> Any:
        if type(value) is not tuple:
            raise _wanted("a tuple", value)
        return _elements(item.encode, value)

    def decode(value: Any) -> Any:
        if type(value) is not list:
            raise _wanted("a tuple as a list", value)
        return tuple(_elements(item.decode, value))

    return _Converter(encode, decode, json=frozenset({list}))


def _enum_converter(kind: type[enum.Enum]) -> _Converter:
    if issubclass(kind, enum.Flag):

        def encode_flag(value: Any) -> Any:
            if type(value) is not kind:
                raise _wanted(f"a {_name(kind)}", value)
            return int(value.value)

        def decode_flag(value: Any) -> Any:
            try:
                flag = kind(value) if type(value) is int else _refuse(value)
            except ValueError:
                return _refuse(value)
            # Python before 3.11.4 drops the bits that it does not know, unless told otherwise
            return flag if flag.value == value else _refuse(value)

        def _refuse(value: Any) -> Any:
            raise _wanted(f"a value of {_name(kind)}", value)

        return _Converter(encode_flag, decode_flag, json=frozenset({int}))

    by_value: dict[tuple[type, Any], enum.Enum] = {}
    for member in kind:
        if type(member.value) not in (str, int, float, bool, type(None)):
            raise ConfigError(
                f"{_name(kind)}.{member.name} cannot be stored: a member is stored as its value, which must be a str, "
                f"int, float, bool or None, not {_shown(member.value)}"
            )
        # With the type: 1, 1.0 and True are equal, and different values.
        by_value[type(member.value), member.value] = member

    def encode(value: Any) -> Any:
        if type(value) is not kind:
            raise _wanted(f"a {_name(kind)}", value)
        return value.value

    def decode(value: Any) -> Any:
        try:
            return by_value[type(value), value]
        except (KeyError, TypeError):
            raise _wanted(f"a value of {_name(kind)}", value) from None

    return _Converter(encode, decode, json=frozenset(kind for kind, _ in by_value))


def _literal_converter(values: tuple[Any, ...]) -> _Converter:
    allowed = {(type(value), value) for value in values}
    for kind, value in allowed:
        if kind not in (str, int, bool, type(None)):
            raise ConfigError(f"Literal[{value!r}] cannot be stored: use str, int, bool or None, or declare the Enum")
    what = "one of " + ", ".join(map(repr, values))

    def pass_on(value: Any) -> Any:
        try:
            if (type(value), value) in allowed:
                return value
        except TypeError:
            pass
        raise _wanted(what, value)

    return _Converter(pass_on, pass_on, json=frozenset(kind for kind, _ in allowed))


def _union_converter(members: list[_Converter], tp: Any) -> _Converter:
    if any(member is _ANY for member in members):
        return _ANY
    by_json: dict[type, _Converter] = {}
    for member in members:
        for kind in member.json:
            if kind in by_json:
                raise ConfigError(
                    f"{_name(tp)} cannot be stored: two of its members are written as JSON {kind.__name__}, so the "
                    "right one cannot be told when it is read; declare one of them, or a dataclass with two fields"
                )
            by_json[kind] = member
    if float in by_json:
        by_json.setdefault(int, by_json[float])
    plain: frozenset[type] = frozenset().union(*(member.plain for member in members))
    what = _name(tp)
    # A union with None has one other member, whose errors say more than "no member fits".
    rest = [member for member in members if member.json != {type(None)}]
    optional = rest[0] if len(rest) == 1 else None

    def encode(value: Any) -> Any:
        if type(value) in plain:
            return value
        if optional is not None:
            return optional.encode(value)
        for member in members:
            try:
                return member.encode(value)
            except _Misfit:
                continue
        raise _wanted(what, value)

    def decode(value: Any) -> Any:
        if type(value) in plain:
            return value
        member = by_json.get(type(value))
        if member is None:
            raise _wanted(what, value)
        return member.decode(value)

    return _Converter(encode, decode, plain, frozenset(by_json))


def _converter(tp: Any, building: dict[Any, _Converter]) -> _Converter:
    """The converter of a declared type.

    *building* holds the classes on the way here, so that a class may contain itself.
    """
    try:
        known = _SCALARS.get(tp)
    except TypeError:
        raise ConfigError(f"{tp!r} is no type that can be stored") from None
    if known is not None:
        return known
    origin, params = typing.get_origin(tp), typing.get_args(tp)
    if origin is typing.Annotated:
        return _converter(params[0], building)
    if origin is typing.Literal:
        return _literal_converter(params)
    if origin is typing.Union or origin is types.UnionType:
        return _union_converter([_converter(one, building) for one in params], tp)
    if isinstance(tp, typing.NewType):
        return _converter(tp.__supertype__, building)
    if isinstance(tp, typing.TypeVar):
        return _ANY
    if type(tp).__name__ == "TypeAliasType":  # `type X = …` of Python 3.12
        return _converter(tp.__value__, building)
    outer = tp if origin is None else origin
    if outer in (list, collections.abc.Sequence):
        return _list_converter(_converter(params[0], building) if params else _ANY)
    if outer in (dict, collections.abc.Mapping):
        if params and _converter(params[0], building).plain != {str}:
            raise ConfigError(f"{_name(tp)} cannot be stored: the keys of a JSON object are str")
        return _dict_converter(_converter(params[1], building) if params else _ANY)
    if outer in (set, frozenset):
        return _set_converter(outer, _converter(params[0], building) if params else _ANY)
    if outer is tuple:
        if origin is None:
            return _long_tuple_converter(_ANY)
        if len(params) == 2 and params[1] is Ellipsis:
            return _long_tuple_converter(_converter(params[0], building))
        return _tuple_converter([_converter(one, building) for one in params])
    if isinstance(outer, type):
        if issubclass(outer, enum.Enum):
            return _enum_converter(outer)
        if _is_record(outer):
            return building.get(outer) or _Record(outer, building).converter
        foreign = _foreign_converter(outer)
        if foreign is not None:
            return foreign
    raise ConfigError(
        f"{_name(tp)} cannot be stored: args hold str, int, float, bool, None, list, dict, datetime, date, UUID, "
        "Decimal, bytes, Enum, tuple, set, frozenset, and dataclasses of these"
    )


# --- records: dataclasses and attrs classes --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    """Of the attribute, and in the JSON."""
    init_name: str
    """Of the parameter of ``__init__``."""
    converter: _Converter
    is_required: bool


def _is_record(tp: Any) -> bool:
    return isinstance(tp, type) and (dataclasses.is_dataclass(tp) or hasattr(tp, "__attrs_attrs__"))


class _Record:
    """The converter of a dataclass or an attrs class."""

    def __init__(self, tp: type, building: dict[Any, _Converter]) -> None:
        self._type = tp
        self._name = _name(tp)
        self.converter = _Converter(self._encode, self._decode, json=frozenset({dict}))
        building[tp] = self.converter
        self._fields = _record_fields(tp, building)
        del building[tp]
        self._names = frozenset(field.name for field in self._fields)
        object.__setattr__(self.converter, "names", self._names)  # it is known to fields of its own type before them
        self._plain = [(field.name, field.converter.plain) for field in self._fields]
        # Without renamed parameters, an object of plain values is the keyword arguments as it stands.
        self._is_direct = all(field.name == field.init_name for field in self._fields)

    def _encode(self, value: Any) -> dict[str, Any]:
        if type(value) is not self._type:
            raise _wanted(f"a {self._name}", value)
        out = {}
        for name, plain in self._plain:
            try:
                out[name] = one = getattr(value, name)
            except AttributeError:
                raise _Misfit(f"was never set on {self._name}", None).within(path_step(name)) from None
            if type(one) not in plain:
                return self._encode_slowly(value)
        return out

    def _encode_slowly(self, value: Any) -> dict[str, Any]:
        out = {}
        for field in self._fields:
            try:
                out[field.name] = field.converter.encode(getattr(value, field.name))
            except _Misfit as misfit:
                raise misfit.within(path_step(field.name)) from None
            except AttributeError:
                raise _Misfit(f"was never set on {self._name}", None).within(path_step(field.name)) from None
        return out

    def _decode(self, value: Any) -> Any:
        if type(value) is not dict:
            raise _wanted(f"an object with the fields of {self._name}", value)
        if self._is_direct and value.keys() == self._names:
            for name, plain in self._plain:
                if type(value[name]) not in plain:
                    break
            else:
                return self._make(value)
        return self._make(_decode_fields(self._fields, self._names, value, self._name))

    def _make(self, kwargs: dict[str, Any]) -> Any:
        try:
            return self._type(**kwargs)
        # __init__ and __post_init__ are the user's code.
        except Exception as error:
            raise _Misfit(f"is refused by {self._name}: {type(error).__name__}: {error}", kwargs) from error


def _decode_fields(fields: list[_Field], names: frozenset[str], value: dict[str, Any], owner: str) -> dict[str, Any]:
    """Keyword arguments from a JSON object; unknown and missing names are errors."""
    if not value.keys() <= names:
        name = next(name for name in value if name not in names)
        raise _Misfit(
            f"is unknown to {owner}: this worker's code is older or newer than the producer's", value[name]
        ).within(path_step(name))
    out = {}
    for field in fields:
        if field.name in value:
            try:
                out[field.init_name] = field.converter.decode(value[field.name])
            except _Misfit as misfit:
                raise misfit.within(path_step(field.name)) from None
        elif field.is_required:
            raise _Misfit(
                f"is missing, and {owner} has no default for it: this worker's code is older or newer than the "
                "producer's",
                None,
            ).within(path_step(field.name))
    return out


def _record_fields(tp: type, building: dict[Any, _Converter]) -> list[_Field]:
    # A class inside a function can at least name itself.
    hints = _hints(tp, tp, localns={tp.__name__: tp})
    out: list[tuple[str, str, bool]] = []
    if dataclasses.is_dataclass(tp):
        for field in dataclasses.fields(tp):
            if not field.init:
                continue  # computed by the class itself
            is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            out.append((field.name, field.name, is_required))
        stored = {name for name, _, _ in out}
        for name in inspect.signature(tp).parameters:
            if name not in stored:
                raise ConfigError(
                    f"{_name(tp)} cannot be stored: its __init__ takes {name!r}, which is no field that can be read "
                    "back from an instance"
                )
    else:
        for attribute in tp.__attrs_attrs__:  # type: ignore[attr-defined]  # attrs is not imported here
            if attribute.init:
                # attrs says "no default" with its own NOTHING, a member of an Enum.
                is_required = getattr(attribute.default, "name", None) == "NOTHING"
                out.append((attribute.name, attribute.alias, is_required))
    return [
        _Field(name, init_name, _field_converter(_name(tp), name, hints.get(name, Any), building), is_required)
        for name, init_name, is_required in out
    ]


def _field_converter(owner: str, name: str, hint: Any, building: dict[Any, _Converter]) -> _Converter:
    try:
        return _converter(hint, building)
    except ConfigError as error:
        raise ConfigError(f"{owner}.{name}: {error}") from None


def _hints(owner: Any, shown: Any, **scope: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(owner, **scope)
    # An annotation is an expression: it can raise anything.
    except Exception as error:
        raise ConfigError(
            f"the annotations of {getattr(shown, '__qualname__', shown)} cannot be resolved ({error}): import the "
            "types they name at run time (not under TYPE_CHECKING), above this declaration"
        ) from error


# --- mappings and other libraries' classes ---------------------------------------------------------------------------


class _MappingCodec:
    """The codec of a plain mapping: JSON values as they are; the handler gets a dict."""

    names = None

    def dump(self, value: Any, max_bytes: int) -> bytes:
        if type(value) is not dict:
            if not isinstance(value, Mapping):
                raise _wanted("a mapping", value).as_error()
            value = dict(value)
        return dump_json(value, "args", max_bytes)

    def load(self, data: bytes | str) -> Any:
        value = _parse(data)
        if type(value) is not dict:
            raise _wanted("an object", value).as_error()
        return value


class _ConverterCodec:
    """The codec of a declared type that is always written as an object."""

    def __init__(self, converter: _Converter) -> None:
        self._converter = converter
        self.names = converter.names

    def dump(self, value: Any, max_bytes: int) -> bytes:
        return _dump(self._converter.encode, value, max_bytes)

    def load(self, data: bytes | str) -> Any:
        return _load(self._converter.decode, data)


def _foreign_converter(tp: Any) -> _Converter | None:
    """The converter of a pydantic or msgspec class, None for any other.

    Nothing is imported: where there is a class of a library, the library is loaded.
    """
    pydantic: Any = sys.modules.get("pydantic")
    if pydantic is not None and issubclass(tp, pydantic.BaseModel):
        return _library_converter(
            tp,
            # warnings="error": a model whose fields were assigned values of other types is refused.
            lambda value: value.model_dump(mode="json", by_alias=True, round_trip=True, warnings="error"),
            # From text, so that strict models accept a datetime as JSON has it.
            lambda value: tp.model_validate_json(orjson.dumps(value)),
            None
            if tp.model_config.get("extra") == "allow"
            else [field.serialization_alias or field.alias or name for name, field in tp.model_fields.items()],
        )
    msgspec: Any = sys.modules.get("msgspec")
    if msgspec is not None and issubclass(tp, msgspec.Struct):

        def write(value: Any) -> Any:
            written = msgspec.to_builtins(value, order="deterministic")
            # A Struct does not check its fields when it is made: find out here, not in the worker.
            msgspec.convert(written, tp)
            return written

        names = [field.encode_name for field in msgspec.structs.fields(tp)]
        return _library_converter(tp, write, lambda value: msgspec.convert(value, tp), names)
    return None


def _library_converter(
    tp: type, write: Callable[[Any], Any], read: Callable[[Any], Any], names: Iterable[str] | None
) -> _Converter:
    def encode(value: Any) -> Any:
        if type(value) is not tp:
            raise _wanted(f"a {_name(tp)}", value)
        try:
            written = write(value)
        # The library's own classes of errors, and whatever a user's validator raises.
        except Exception as error:
            raise _Misfit(f"cannot be written: {error}", value) from error
        if type(written) is not dict:
            raise _Misfit(f"is a {_name(tp)}, which is not written as an object: wrap it in a dataclass", value)
        return written

    def decode(value: Any) -> Any:
        try:
            return read(value)
        except Exception as error:
            raise _Misfit(f"is refused by {_name(tp)}: {error}", value) from error

    return _Converter(encode, decode, json=frozenset({dict}), names=None if names is None else frozenset(names))


def _make_codec(tp: Any) -> Codec:
    if tp is Any or tp is object or tp is None:
        return _MappingCodec()
    outer = typing.get_origin(tp) or tp
    if isinstance(outer, type) and issubclass(outer, Mapping):
        params = typing.get_args(tp)
        if not params or outer not in (dict, collections.abc.Mapping):
            return _MappingCodec()
    converter = _converter(tp, {})
    if converter.json != {dict}:
        raise ConfigError(
            f"args cannot be of type {_name(tp)}, which is not written as a JSON object: declare a dataclass"
        )
    return _ConverterCodec(converter)


def _dump(encode: Callable[[Any], Any], value: Any, max_bytes: int, path: str = "args") -> bytes:
    try:
        return dump_json(encode(value), path, max_bytes)
    except _Misfit as misfit:
        raise misfit.as_error(path) from misfit.__cause__
    except RecursionError:
        raise _Misfit("is nested too deeply, or contains itself: flatten it", value).as_error(path) from None


def _load(decode: Callable[[Any], Any], data: bytes | str) -> Any:
    value = _parse(data)
    try:
        return decode(value)
    except _Misfit as misfit:
        raise misfit.as_error() from misfit.__cause__
    except RecursionError:
        raise _Misfit("is nested too deeply", None).as_error() from None


def _parse(data: bytes | str) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _Misfit(f"is no JSON that can be read: {error}", data).as_error() from None


# --- functions: their parameters are the args ------------------------------------------------------------------------


class FunctionCodec:
    """The codec of a function's parameters: bound by name, converted by annotation, plain JSON without one.

    Raises:
        ConfigError: A parameter is positional-only, ``*args`` or ``**kwargs``, or its annotation cannot be stored.
    """

    def __init__(self, func: Callable[..., Any]) -> None:
        self._owner = f"{getattr(func, '__qualname__', func)}()"
        self._signature = signature_of(func)
        for parameter in self._signature.parameters.values():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ConfigError(
                    f"{self._owner} cannot be a task: its parameter {parameter.name!r} is "
                    f"{parameter.kind.description}, so args cannot be stored under its name; use parameters that can "
                    "be passed by name"
                )
        hints = parameter_hints(func, self._signature)
        self._fields = [
            _Field(
                name,
                name,
                _field_converter(self._owner, name, hints.get(name, Any), {}),
                parameter.default is parameter.empty,
            )
            for name, parameter in self._signature.parameters.items()
        ]
        self.names = self._names = frozenset(field.name for field in self._fields)
        self._plain = [(field.name, field.converter.plain) for field in self._fields]
        # a call that gives every parameter by position needs no signature: a fifth of the time
        by_position = all(
            parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in self._signature.parameters.values()
        )
        self._positions = tuple(self._signature.parameters) if by_position else None

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The arguments of a call by name, defaults applied.

        Raises:
            ValidationError: The call does not fit the function's signature.
        """
        if not kwargs and self._positions is not None and len(args) == len(self._positions):
            return dict(zip(self._positions, args, strict=True))
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            unknown = next((f"; it has none called {name!r}" for name in kwargs if name not in self._names), "")
            text = str(error) if "unexpected" in str(error) else f"{error}{unknown}"
            raise ValidationError(f"{self._owner} {text}", path="args", value=kwargs or args) from None
        bound.apply_defaults()
        return dict(bound.arguments)

    def dump(self, value: dict[str, Any], max_bytes: int) -> bytes:
        """JSON text of bound arguments; see :meth:`Codec.dump`."""
        if self._is_plain(value):
            return dump_json(value, "args", max_bytes)
        return _dump(self._encode, value, max_bytes)

    def load(self, data: bytes | str) -> dict[str, Any]:
        """Keyword arguments for the function; a missing one that has a default is left out. See :meth:`Codec.load`."""
        kwargs: dict[str, Any] = _load(self._decode, data)
        return kwargs

    def _is_plain(self, value: dict[str, Any]) -> bool:
        """Every parameter is there, with a value that is the same in JSON."""
        if len(value) != len(self._plain):
            return False
        for name, plain in self._plain:  # noqa: SIM110  # all() takes three times as long
            if type(value.get(name, _MISSING)) not in plain:
                return False
        return True

    def _encode(self, value: Any) -> dict[str, Any]:
        if not value.keys() <= self._names:
            name = next(name for name in value if name not in self._names)
            raise _Misfit(f"is no parameter of {self._owner}", value[name]).within(path_step(name))
        out = {}
        for field in self._fields:
            if field.name in value:
                one = value[field.name]
                try:
                    out[field.name] = one if type(one) in field.converter.plain else field.converter.encode(one)
                except _Misfit as misfit:
                    raise misfit.within(path_step(field.name)) from None
        return out

    def _decode(self, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _wanted(f"an object with the parameters of {self._owner}", value)
        if self._is_plain(value):
            return value
        return _decode_fields(self._fields, self._names, value, self._owner)


def signature_of(func: Callable[..., Any]) -> inspect.Signature:
    """The signature of *func*.

    Raises:
        ConfigError: It has none that Python can tell, or (Python 3.14) one of its annotations names what is not there.
    """
    try:
        return inspect.signature(func)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"{getattr(func, '__qualname__', func)} cannot be a task: {error}") from error


def parameter_hints(func: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """The resolved annotations of the parameters; the return annotation may name what is only there for a checker.

    Raises:
        ConfigError: One cannot be resolved now.
    """
    annotations = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if parameter.annotation is not parameter.empty
    }
    scope = getattr(inspect.unwrap(func), "__globals__", {})
    return _hints(types.SimpleNamespace(__annotations__=annotations), func, globalns=scope)


# --- results: what a handler returns ---------------------------------------------------------------------------------


def result_dumper(func: Callable[..., Any]) -> Callable[[Any, int], bytes]:
    """What turns a value that *func* returned into JSON text of at most so many bytes.

    By its return annotation, as fields of args are converted; outcomes in it, as in ``int | awa.Snooze``, do not count.
    Without one, and with one that stands for nothing that can be stored, the value must be JSON as it is. It raises
    ValidationError, whose ``.path`` begins with ``result``, for any other.
    """
    encode = _result_converter(func).encode
    return lambda value, max_bytes: _dump(encode, value, max_bytes, "result")


def _result_converter(func: Callable[..., Any]) -> _Converter:
    try:
        annotation = signature_of(func).return_annotation
        if annotation is inspect.Signature.empty:
            return _ANY
        scope = getattr(inspect.unwrap(func), "__globals__", {})
        hints = _hints(types.SimpleNamespace(__annotations__={"return": annotation}), func, globalns=scope)
        return _converter(_without_outcomes(hints["return"]), {})
    except ConfigError:
        return _ANY


def _without_outcomes(tp: Any) -> Any:
    if typing.get_origin(tp) not in (typing.Union, types.UnionType):
        return tp
    members = tuple(one for one in typing.get_args(tp) if not (isinstance(one, type) and issubclass(one, Outcome)))
    return typing.Union[members] if members else tp  # noqa: UP007  # of members that are only known now
