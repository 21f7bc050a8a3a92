"""What is stored of an exception: text that PostgreSQL accepts, of bounded size, whatever the exception does."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import orjson

MAX_TYPE = 200
MAX_TEXT = 4_000
MAX_TRACEBACK = 16_000
MAX_FRAMES = 100
MAX_CHAIN = 8
MAX_GROUP = 10

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
_CONTEXT = "\nDuring handling of the above exception, another exception occurred:\n\n"
_OURS = "awa."


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as an attempt's history keeps it."""

    type: str
    """Qualified name of the class, without ``builtins``."""
    text: str
    """``str()`` of it, at most 4,000 characters."""
    traceback: str
    """Formatted with its causes, at most 16,000 characters: the head and the tail are kept."""

    def as_json(self) -> bytes:
        """An object of the three texts, valid as ``json`` and as ``jsonb``."""
        return orjson.dumps({"type": self.type, "text": self.text, "traceback": self.traceback})


def describe(exc: BaseException) -> Failure:
    """What to store of *exc*; never raises, whatever *exc* does when it is looked at.

    NUL and lone surrogates, which PostgreSQL refuses, become visible escapes. The frames of the worker that called the
    handler are left out.
    """
    try:
        formatted = "".join(_chain(exc))
    # Whatever was not foreseen: a failure that cannot be told must still be recorded.
    except BaseException as error:
        formatted = f"(the traceback cannot be formatted: {type(error).__name__})\n"
    return Failure(_type_name(exc), _cut(_text(exc), MAX_TEXT), _cut(formatted, MAX_TRACEBACK))


def told(kind: str, text: str) -> Failure:
    """An ending that no exception tells: what *kind* of ending, and why; cleaned and cut as those of exceptions."""
    return Failure(_cut(kind, MAX_TYPE), _cut(str.__str__(text), MAX_TEXT), "")


def _chain(exc: BaseException, depth: int = 0) -> list[str]:
    """The text of *exc* after those of its causes, oldest first, as Python prints them."""
    parts: list[str] = []
    seen: set[int] = set()
    link: BaseException | None = exc
    while link is not None:
        seen.add(id(link))
        block = _block(link, depth)
        cause, context = _slot(link, "__cause__"), _slot(link, "__context__")
        follows = _CAUSE
        if cause is None and not _slot(link, "__suppress_context__"):
            cause, follows = context, _CONTEXT
        parts.append(block)
        if cause is None or id(cause) in seen:
            break
        parts.append(follows)
        if len(seen) == MAX_CHAIN:
            parts.append("(earlier exceptions are left out)\n")
            break
        link = cause
    return parts[::-1]


def _block(exc: BaseException, depth: int) -> str:
    """The frames of one exception, its last line, notes, and the members of a group."""
    frames = _frames(exc)
    lines = ["Traceback (most recent call last):\n", *frames] if frames else []
    lines.append(f"{_type_name(exc)}: {_cut(_text(exc), MAX_TEXT)}\n")
    notes = _attribute(exc, "__notes__")
    if type(notes) is list:
        lines += [f"{_cut(_guarded(partial(str, note)), MAX_TEXT)}\n" for note in notes[:MAX_GROUP]]
    if issubclass(type(exc), BaseExceptionGroup) and depth < 3:
        members = _slot(exc, "exceptions", BaseExceptionGroup)
        for position, member in enumerate(members[:MAX_GROUP], start=1):
            inner = "".join(_chain(member, depth + 1))
            lines.append(f"  -- {position} of {len(members)} --\n" + re.sub("(?m)^", "  ", inner).rstrip(" "))
    return "".join(lines)


def _frames(exc: BaseException) -> list[str]:
    tb = start = _slot(exc, "__traceback__")
    while tb is not None and _is_ours(tb):
        tb = tb.tb_next
    # An error of our own, such as args that do not fit, has no frame of the handler's.
    shown = start if tb is None else tb
    # Negative: the innermost frames; a recursion is told by its end.
    try:
        return traceback.format_tb(shown, limit=-MAX_FRAMES)
    # The loader of the user's module is asked for the source lines.
    except BaseException:
        where = [(frame.f_code, line) for frame, line in traceback.walk_tb(shown)][-MAX_FRAMES:]
        return [f'  File "{code.co_filename}", line {line}, in {code.co_name}\n' for code, line in where]


def _is_ours(tb: TracebackType) -> bool:
    module = tb.tb_frame.f_globals.get("__name__")
    return type(module) is str and module.startswith(_OURS)


def _type_name(exc: BaseException) -> str:
    kind = type(exc)
    module, name = _attribute(kind, "__module__"), _attribute(kind, "__qualname__")
    name = str.__str__(name) if isinstance(name, str) else "an exception without a name"
    if isinstance(module, str) and module != "builtins":
        name = f"{str.__str__(module)}.{name}"
    return _cut(name, MAX_TYPE)


def _text(exc: BaseException) -> str:
    return _guarded(partial(str, exc))


def _guarded(make: Callable[[], Any]) -> str:
    try:
        # str.__str__: a subclass could answer everything else differently.
        return str.__str__(make())
    # BaseException: a __str__ that calls sys.exit() is no reason to stop a worker.
    except BaseException as error:
        return f"(no text: __str__ raised {type(error).__name__})"


def _attribute(owner: object, name: str) -> Any:
    try:
        return getattr(owner, name, None)
    except BaseException:
        return None


def _slot(exc: BaseException, name: str, owner: type = BaseException) -> Any:
    # Read past whatever the class defines under that name.
    return owner.__dict__[name].__get__(exc)


def _escaped(match: re.Match[str]) -> str:
    return r"\x00" if match[0] == "\0" else f"\\u{ord(match[0]):04x}"


def _cut(text: str, limit: int) -> str:
    """*text* without what PostgreSQL refuses; of more than *limit* characters, head and tail."""
    whole = len(text)
    if whole > limit:
        # Cut before cleaning: the text may be huge.
        text = text[: limit // 2] + text[-limit // 2 :]
    text = _UNSTORABLE.sub(_escaped, text)
    if whole > limit or len(text) > limit:
        keep = (limit - 60) // 2
        text = f"{text[:keep]}\n... (the middle of {whole:,} characters is left out) ...\n{text[-keep:]}"
    return text
