"""What code declares about a queue or a kind for those who look at it, and the hash of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from blake3 import blake3

from awa._core import canonical_json, check_json
from awa.errors import ValidationError
from awa.options import check_note, check_tags

FIELDS: Final = ("display_name", "description", "owner", "docs_url", "tags", "extra")
"""What is declared, in the order in which it is shown."""

LONGEST: Final = {"display_name": 200, "description": 2_000, "owner": 200, "docs_url": 2_048}
"""Most characters of the texts."""

MAX_EXTRA_BYTES: Final = 64 * 1024
"""Most bytes of ``extra`` as JSON."""


def descriptor_hash(
    *,
    display_name: str | None = None,
    description: str | None = None,
    owner: str | None = None,
    docs_url: str | None = None,
    tags: Iterable[str] = (),
    extra: object = None,
) -> str:
    """64 lower-case hex digits that are equal when two programs declare the same, whatever the name.

    The BLAKE3 of the canonical JSON of all six fields: a missing text is null, missing tags ``[]``, a missing *extra*
    ``{}``. The order of tags counts.

    Raises:
        ValidationError: *extra* or another field is no JSON value.
    """
    return _hash(
        canonical_json(
            {
                "description": description,
                "display_name": display_name,
                "docs_url": docs_url,
                "extra": {} if extra is None else extra,
                "owner": owner,
                "tags": list(tags),
            }
        )
    )


def _hash(text: bytes) -> str:
    return blake3(text).hexdigest()


def hash_of_set(hashes: Mapping[str, str]) -> str:
    """64 hex digits that are equal for two programs that declare the same of the same names: name -> hash."""
    return _hash(canonical_json(dict(hashes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """What is declared about one queue or kind.

    Raises:
        ValidationError: A field cannot be stored; ``.path`` says which.
    """

    display_name: str | None = None
    """What people call it: up to 200 characters."""
    description: str | None = None
    """What it is for: up to 2,000 characters."""
    owner: str | None = None
    """Who answers for it: up to 200 characters."""
    docs_url: str | None = None
    """Where more is written: up to 2,048 characters."""
    tags: tuple[str, ...] = ()
    """Up to 20, of 1 to 200 characters each; their order counts."""
    extra: Any = None
    """Any JSON value, up to 64 KiB; None becomes ``{}``."""
    text: str = field(init=False, repr=False, compare=False)
    """The canonical JSON of the six fields."""
    hash: str = field(init=False)
    """As :func:`descriptor_hash` gives it."""

    def __post_init__(self) -> None:
        fields: dict[str, Any] = {name: check_note(getattr(self, name), name, most) for name, most in LONGEST.items()}
        fields["tags"] = check_tags(self.tags)
        fields["extra"] = _check_extra(self.extra)
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        text = canonical_json(fields)
        object.__setattr__(self, "text", text.decode())
        object.__setattr__(self, "hash", _hash(text))


def _check_extra(value: object) -> Any:
    """A copy of *value* as its canonical JSON says it, which is what is hashed and stored."""
    if value is None:
        return {}
    try:
        text = canonical_json(value)
    except ValidationError as error:
        told = str(error).removeprefix("value")
        raise ValidationError(f"extra{told}", path=f"extra{error.path.removeprefix('value')}", value=value) from None
    if len(text) > MAX_EXTRA_BYTES:
        raise ValidationError(
            f"extra has {len(text):,} bytes as JSON, the limit is {MAX_EXTRA_BYTES:,}: keep there what people look up,"
            " and link to the rest with docs_url",
            path="extra",
            value=len(text),
            limit=MAX_EXTRA_BYTES,
        )
    copy = orjson.loads(text)
    check_json(copy, "extra")  # no NUL, which jsonb cannot hold, and not too deep
    return copy
