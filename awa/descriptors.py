"""The hash of what code declares about a queue or a kind."""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from awa._core import canonical_json


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
    declared = {
        "description": description,
        "display_name": display_name,
        "docs_url": docs_url,
        "extra": {} if extra is None else extra,
        "owner": owner,
        "tags": list(tags),
    }
    return blake3(canonical_json(declared)).hexdigest()
