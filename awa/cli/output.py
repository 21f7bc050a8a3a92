"""What commands print: tables, facts, JSON; and no character of what is stored that a terminal would obey."""

from __future__ import annotations

import json
import os
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from datetime import UTC, datetime
from enum import Enum
from importlib.util import find_spec
from typing import Any
from uuid import UUID

import click

GAP = 2
"""Spaces between two columns."""

Cell = str | tuple[str, str]
"""What stands in a table: text, or text and what rich calls its style."""

STYLES = {
    "running": "cyan",
    "available": "green",
    "completed": "dim",
    "failed": "red",
    "retryable": "yellow",
    "cancelled": "magenta",
    "paused": "yellow",
    "live": "green",
    "stale": "yellow",
    "gone": "red",
    "ended": "dim",
    "drift": "yellow",
}


def safe(text: object) -> str:
    """*text* in characters that a terminal shows and does not obey: ``\\x1b`` for an escape, ``\\n`` for a new line.

    Marks that turn the direction of writing, and what nobody can see, are told likewise.
    """
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in shown
    )


def short(text: object, most: int) -> str:
    """*text*, safe, in at most so many characters."""
    shown = safe(str(text)[: most + 1])
    return shown if len(shown) <= most and len(str(text)) <= most else shown[: most - 1] + "…"


def local_time(at: datetime | None) -> str:
    """*at* in this machine's time zone, with its offset."""
    if at is None:
        return "-"
    with suppress(OverflowError, ValueError, OSError):  # the first and the last day that there are, or no zone for it
        at = at.astimezone()
    return at.isoformat(" ", "seconds")


def compact(value: object) -> str:
    """*value* as JSON on one line, in the characters it has."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def facts(record: Any) -> dict[str, Any]:
    """The fields of a record by name, as JSON knows them: times in UTC."""
    return {field.name: plain(getattr(record, field.name)) for field in fields(record)}


def plain(value: Any) -> Any:
    """*value* as JSON knows it."""
    match value:
        case datetime():
            return value.astimezone(UTC).isoformat()
        case Enum():
            return value.value
        case UUID():
            return str(value)
        case Mapping():
            return {str(plain(key)): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    return plain(asdict(value)) if is_dataclass(value) and not isinstance(value, type) else value


def as_json(document: object) -> str:
    """*document* as JSON, in ASCII: nothing in it means anything to a terminal."""
    return json.dumps(document).replace("\x7f", "\\u007f")


def print_json(document: object) -> None:
    """Print one JSON document."""
    echo(as_json(document))


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print *text*; what the encoding of the output does not have is told by its number."""
    with suppress(AttributeError, OSError, ValueError):
        (sys.stderr if err else sys.stdout).reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    click.echo(text, err=err, nl=nl)


# --- tables


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    """Its head."""
    is_number: bool = False
    """Whether it stands to the right."""
    is_flexible: bool = False
    """Whether its cells may be cut when the terminal is too narrow."""
    needs_width: int = 0
    """It is left out of terminals that have fewer columns."""


class Table:
    """Rows under a head, printed in one go or piece by piece.

    On a terminal cells are cut so that a row takes one line, and with rich there are colours, unless ``NO_COLOR`` is
    set. Anywhere else nothing is cut, and there is one row a line.
    """

    def __init__(self, columns: Sequence[Column], *, err: bool = False) -> None:
        self._err = err
        self._room = terminal_width(err)
        self._shown = [number for number, column in enumerate(columns) if self._has_room_for(column)]
        self._columns = [columns[number] for number in self._shown]
        self._widths = [width_of(column.title) for column in self._columns]
        self._has_head = False

    def _has_room_for(self, column: Column) -> bool:
        return self._room is None or self._room >= column.needs_width

    def print(self, rows: Iterable[Sequence[Cell]]) -> None:
        """Print *rows*, under the head if there was none yet. The cells are made safe here."""
        cells = [[_cell(row[number]) for number in self._shown] for row in rows]
        for row in cells:
            self._widths = [max(width, width_of(text)) for width, (text, _) in zip(self._widths, row, strict=True)]
        widths = self._widths if self._room is None else self._fitted(self._room)
        if self._room is not None and has_colours():
            self._print_rich(cells, widths)
        else:
            self._print_plain(cells, widths)
        self._has_head = True

    def _fitted(self, room: int) -> list[int]:
        widths = list(self._widths)
        flexible = [number for number, column in enumerate(self._columns) if column.is_flexible]
        least = {number: max(width_of(self._columns[number].title), 5) for number in flexible}
        while sum(widths) + GAP * (len(widths) - 1) > room:
            number = max(flexible, key=lambda number: widths[number] - least[number], default=None)
            if number is None or widths[number] <= least[number]:
                break
            widths[number] -= 1
        return widths

    def _print_plain(self, cells: list[list[tuple[str, str]]], widths: list[int]) -> None:
        lines = [] if self._has_head else [self._padded([column.title for column in self._columns], widths)]
        lines += [self._padded([text for text, _ in row], widths) for row in cells]
        if lines:
            echo("\n".join((" " * GAP).join(line).rstrip() for line in lines), err=self._err)

    def _padded(self, texts: Sequence[str], widths: Sequence[int]) -> list[str]:
        return [
            pad(cut(text, width), width, to_the_right=column.is_number)
            for text, width, column in zip(texts, widths, self._columns, strict=True)
        ]

    def _print_rich(self, cells: list[list[tuple[str, str]]], widths: list[int]) -> None:
        from rich.console import Console
        from rich.text import Text

        # one text with few styles: a table of rich's own takes a millisecond a row
        text = Text()
        if not self._has_head:
            titles = self._padded([column.title for column in self._columns], widths)
            text.append((" " * GAP).join(titles).rstrip() + "\n", "bold")
            width = sum(widths) + GAP * (len(widths) - 1)
            text.append("─" * min(width, self._room or width) + "\n", "dim")
        for row in cells:
            padded = self._padded([cell for cell, _ in row], widths)
            for number, (shown, (_, style)) in enumerate(zip(padded, row, strict=True)):
                text.append(" " * GAP if number else "")
                text.append(shown.rstrip() if number == len(row) - 1 else shown, style or None)
            text.append("\n")
        Console(stderr=self._err, highlight=False).print(text, soft_wrap=True, end="")


def _cell(cell: Cell) -> tuple[str, str]:
    text, style = (cell, "") if isinstance(cell, str) else cell
    return safe(text), style


def styled(word: str) -> tuple[str, str]:
    """A state, or what begins with one, in its colour."""
    return word, STYLES.get(word.partition(" ")[0], "")


def print_facts(rows: Iterable[tuple[str, str]]) -> None:
    """Names and what they are, one a line; further lines of a value stand below its first. The values are safe."""
    rows = list(rows)
    room = max((len(name) for name, _ in rows), default=0) + GAP
    for name, value in rows:
        first, *others = value.split("\n")
        echo("\n".join([f"{name:<{room}}{first}", *(" " * room + line for line in others)]).rstrip())


def terminal_width(err: bool = False) -> int | None:
    """How many columns the terminal has; None when it is none."""
    stream = sys.stderr if err else sys.stdout
    return shutil.get_terminal_size().columns if stream is not None and stream.isatty() else None


def has_colours() -> bool:
    """Whether rich is there to colour, and nobody asks it not to."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb" and find_spec("rich") is not None


def width_of(text: str) -> int:
    """The columns of a terminal that safe *text* takes."""
    return len(text) if text.isascii() else sum(map(_width, text))


def _width(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def cut(text: str, most: int) -> str:
    """Safe *text* in at most so many columns of a terminal."""
    if width_of(text) <= most:
        return text
    kept, taken = [], 1  # the ellipsis
    for char in text:
        taken += _width(char)
        if taken > most:
            break
        kept.append(char)
    return "".join(kept) + "…"


def pad(text: str, width: int, *, to_the_right: bool = False) -> str:
    """Safe *text* with spaces, so that it takes *width* columns of a terminal."""
    spaces = " " * (width - width_of(text))
    return spaces + text if to_the_right else text + spaces
