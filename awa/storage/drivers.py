"""Sending the statements of producers through the drivers of others: psycopg, blocking or asynchronous, and psycopg2.

Statements are written for psycopg. Whatever a connection was given (row and cursor factories, adapters, a client
encoding) concerns neither what is sent nor what comes back, and nothing of it is changed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from functools import lru_cache
from typing import Any

from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor, postgres
from psycopg.abc import Buffer
from psycopg.adapt import AdaptersMap, Dumper
from psycopg.pq import Format, TransactionStatus
from psycopg.rows import tuple_row

from awa.lent import Driver, Psycopg2Connection

Row = tuple[Any, ...]
Params = Mapping[str, Any] | Sequence[Any]


class Array(bytes):
    """A ``text[]`` in PostgreSQL's binary form; see ``awa._core.text_array``."""


class Int2s(Array):
    """A ``smallint[]`` likewise; see ``awa._core.int2_array``."""


class _ArrayDumper(Dumper):
    format = Format.BINARY
    oid = postgres.types["text"].array_oid

    def dump(self, obj: Any) -> Buffer:
        return bytes(obj)


class _Int2sDumper(_ArrayDumper):
    oid = postgres.types["int2"].array_oid


@lru_cache(maxsize=1)
def own_adapters() -> AdaptersMap:
    """psycopg's adapters as it comes with them, and ours: its global ones may be somebody's."""
    adapters = AdaptersMap(types=postgres.types)
    postgres.register_default_adapters(adapters)
    adapters.register_dumper(Array, _ArrayDumper)
    adapters.register_dumper(Int2s, _Int2sDumper)
    return adapters


class OwnCursor(Cursor[Row]):
    """A cursor that knows no adapters but ours."""

    def __init__(self, conn: Connection[Any]) -> None:
        super().__init__(conn, row_factory=tuple_row)

    @property
    def adapters(self) -> AdaptersMap:
        """What converts its parameters and results."""
        return own_adapters()


class OwnAsyncCursor(AsyncCursor[Row]):
    """Likewise."""

    def __init__(self, conn: AsyncConnection[Any]) -> None:
        super().__init__(conn, row_factory=tuple_row)

    @property
    def adapters(self) -> AdaptersMap:
        """What converts its parameters and results."""
        return own_adapters()


def sqlstate(error: BaseException) -> str | None:
    """The server's code for *error*, whichever driver raised it."""
    return getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


def commits_at_once(conn: Driver) -> bool:
    """Whether a statement that is sent now is a transaction of its own."""
    return bool(conn.autocommit) and conn.info.transaction_status == TransactionStatus.IDLE


# --- rows


def rows(conn: Driver, statement: str, params: Params) -> list[Row]:
    """What *statement* gives, sent in the transaction of *conn*."""
    if isinstance(conn, Connection):
        with OwnCursor(conn) as cursor:
            return cursor.execute(*_asked(conn, statement, params)).fetchall()
    with closing(_psycopg2_cursor(conn)) as cursor2:
        cursor2.execute(*_asked_of_psycopg2(conn, statement, params))
        found: list[Row] = cursor2.fetchall()
        return found


async def rows_async(conn: AsyncConnection[Any], statement: str, params: Params) -> list[Row]:
    """What *statement* gives, sent in the transaction of *conn*."""
    async with OwnAsyncCursor(conn) as cursor:
        await cursor.execute(*_asked(conn, statement, params))
        return await cursor.fetchall()


def _asked(conn: Connection[Any] | AsyncConnection[Any], statement: str, params: Params) -> tuple[str, Params]:
    if speaks_utf8(conn):
        return statement, params
    return _portable(statement), _each(params, as_text)


# --- COPY


def copy(conn: Driver, statement: str, chunks: Iterator[bytes]) -> None:
    """Send *chunks* by the COPY that *statement* is, in the transaction of *conn*.

    All or nothing: what goes wrong half-way, *chunks* included, leaves the transaction as it was before.
    """
    if not isinstance(conn, Connection):
        _copy_by_psycopg2(conn, statement, chunks)
        return
    with OwnCursor(conn) as cursor:
        if _wants_a_statement(conn):
            cursor.execute("SELECT 1")
        with conn.transaction(), cursor.copy(statement) as copying:
            for chunk in chunks:
                copying.write(chunk)


async def copy_async(conn: AsyncConnection[Any], statement: str, chunks: Iterator[bytes]) -> None:
    """As :func:`copy`."""
    async with OwnAsyncCursor(conn) as cursor:
        if _wants_a_statement(conn):
            await cursor.execute("SELECT 1")
        async with conn.transaction(), cursor.copy(statement) as copying:
            for chunk in chunks:
                await copying.write(chunk)


def _wants_a_statement(conn: Connection[Any] | AsyncConnection[Any]) -> bool:
    """Whether one goes before ``conn.transaction()``.

    It begins the caller's transaction, which the block would begin, and commit, by itself. In an aborted one it raises;
    some psycopg 3.2 would allow no rollback after the block has failed to begin.
    """
    status = conn.info.transaction_status
    return status == TransactionStatus.INERROR or (status == TransactionStatus.IDLE and not conn.autocommit)


# --- values as text


def speaks_utf8(conn: Driver | AsyncConnection[Any]) -> bool:
    """Whether the client encoding of *conn* is UTF-8 now; it may be changed at any time."""
    if isinstance(conn, (Connection, AsyncConnection)):
        return conn.pgconn.parameter_status(b"client_encoding") in (b"UTF8", None)
    return conn.info.parameter_status("client_encoding") in ("UTF8", None)


_PLACEHOLDER = re.compile(r"%%|%(\(\w+\))?[sbt]")


@lru_cache(maxsize=256)
def _portable(statement: str, style: str = "b") -> str:
    """*statement* for a connection that does not speak UTF-8: its values come as bytes, whatever they are."""

    def put(found: re.Match[str]) -> str:
        return found[0] if found[0] == "%%" else f"convert_from(%{found[1] or ''}{style}::bytea, 'UTF8')"

    return _PLACEHOLDER.sub(put, statement)


def _each(params: Params, convert: Any) -> Params:
    if isinstance(params, Mapping):
        return {name: convert(value) for name, value in params.items()}
    return tuple(convert(value) for value in params)


def as_text(value: object) -> bytes | None:
    """A parameter as PostgreSQL spells it, in UTF-8; None for NULL."""
    if value is None:
        return None
    if isinstance(value, Array):
        return _array_text(_elements(value))
    if isinstance(value, (list, tuple)):
        return _array_text(as_text(one) for one in value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return b"\\x" + bytes(value).hex().encode()
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, (int, float)):
        return repr(value).encode()
    if isinstance(value, datetime):
        return value.isoformat().encode()
    if isinstance(value, str):
        return value.encode()
    raise TypeError(f"no parameter of a statement is a {type(value).__name__}")


def _array_text(elements: Iterable[bytes | None]) -> bytes:
    return b"{" + b",".join(b"NULL" if one is None else _element_text(one) for one in elements) + b"}"


def _element_text(text: bytes) -> bytes:
    return b'"' + text.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'


def _elements(array: Array) -> Iterator[bytes | None]:
    """The elements of an array in binary form, as text."""
    is_number = isinstance(array, Int2s)
    if array[:4] == b"\0\0\0\0":  # it has no dimension: it is empty
        return
    at = 20
    while at < len(array):
        size = int.from_bytes(array[at : at + 4], signed=True)
        at += 4
        if size < 0:
            yield None
            continue
        one = array[at : at + size]
        yield b"%d" % int.from_bytes(one, signed=True) if is_number else bytes(one)
        at += size


# --- psycopg2


@lru_cache(maxsize=256)
def _in_its_style(statement: str) -> str:
    return _PLACEHOLDER.sub(lambda found: found[0] if found[0] == "%%" else f"%{found[1] or ''}s", statement)


def _asked_of_psycopg2(conn: Psycopg2Connection, statement: str, params: Params) -> tuple[str, Params]:
    if speaks_utf8(conn):
        return _in_its_style(statement), _each(params, lambda value: _Literal(as_text(value)))
    return _portable(statement, "s"), _each(params, lambda value: _Literal(_as_bytea(as_text(value))))


def _as_bytea(text: bytes | None) -> bytes | None:
    return None if text is None else as_text(text)


class _Literal:
    """A value as psycopg2 puts it into a statement, whatever adapters it was given."""

    __slots__ = ("_text",)

    def __init__(self, text: bytes | None) -> None:
        if text is not None and b"\0" in text:
            raise ValueError("no parameter of a statement can hold a NUL")
        self._text = text

    def __conform__(self, protocol: object) -> _Literal:
        return self

    def getquoted(self) -> bytes:
        """It, in UTF-8; the server reads E'' alike whatever its settings."""
        if self._text is None:
            return b"NULL"
        return b"E'" + self._text.replace(b"\\", b"\\\\").replace(b"'", b"''") + b"'"


def _psycopg2_cursor(conn: Psycopg2Connection) -> Any:
    """A cursor of psycopg2's own class that gives tuples of plain values, whatever the connection was given."""
    extensions = sys.modules["psycopg2.extensions"]
    cursor = extensions.cursor(conn)
    for caster in _casters(extensions):
        extensions.register_type(caster, cursor)
    return cursor


@lru_cache(maxsize=1)
def _casters(extensions: Any) -> list[Any]:
    kinds = {
        "int": (("int2", "int4", "int8"), int),
        "bool": (("bool",), "t".__eq__),
        "text": (("text",), str),
    }
    return [
        extensions.new_type(
            tuple(postgres.types[name].oid for name in names),
            f"awa {kind}",
            lambda text, cursor, convert=convert: None if text is None else convert(text),
        )
        for kind, (names, convert) in kinds.items()
    ]


def _copy_by_psycopg2(conn: Psycopg2Connection, statement: str, chunks: Iterator[bytes]) -> None:
    reader = _Reader(chunks)
    with closing(_psycopg2_cursor(conn)) as cursor:
        if commits_at_once(conn):
            reader.copy(cursor, statement)
            return
        cursor.execute("SAVEPOINT awa_copy")
        try:
            reader.copy(cursor, statement)
        except BaseException:
            if conn.info.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
                cursor.execute("ROLLBACK TO SAVEPOINT awa_copy")
                cursor.execute("RELEASE SAVEPOINT awa_copy")
            raise
        cursor.execute("RELEASE SAVEPOINT awa_copy")


class _Reader:
    """Chunks as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._error: BaseException | None = None

    def read(self, size: int) -> bytes:
        """The next chunk, of whatever size; nothing at the end."""
        try:
            return next((chunk for chunk in self._chunks if chunk), b"")
        except BaseException as error:
            self._error = error  # which psycopg2 reports as an error of the server's
            raise

    def copy(self, cursor: Any, statement: str) -> None:
        """Send all of them; raises what the chunks raised."""
        try:
            cursor.copy_expert(statement, self)
        except BaseException:
            if self._error is not None:
                raise self._error from None
            raise
