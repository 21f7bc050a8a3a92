"""Reading rows that anybody may have written: one value that Python cannot hold does not hide the others."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from itertools import chain
from typing import Any

from psycopg import Cursor, DataError
from psycopg.abc import AdaptContext, Buffer
from psycopg.adapt import Loader
from psycopg.pq import Format
from psycopg.types.json import set_json_loads

from awa.storage.drivers import own_adapters

EARLIEST = datetime.min.replace(tzinfo=UTC)
LATEST = datetime.max.replace(tzinfo=UTC)


DEEPEST = 200
"""Most arrays and objects within each other that are read as such: awa stores 64, and who shows a value calls itself
for each."""


def load_json(text: str | bytes) -> Any:
    """The value of *text*; its text when it is nested too deeply for Python, or has a number of too many digits."""
    shown = text if isinstance(text, str) else bytes(text).decode()
    try:
        value = json.loads(shown)
    except (ValueError, RecursionError):
        return shown
    return shown if shown.count("[") + shown.count("{") > DEEPEST and _is_deep(value) else value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        within = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))]
        if not within:
            return False
        level = list(chain.from_iterable(within))
    return True


class _InstantLoader(Loader):
    def __init__(self, oid: int, context: AdaptContext | None = None) -> None:
        super().__init__(oid, context)
        # psycopg's, which is compiled: what derives from that is not asked, and its Python is five times slower
        psycopgs = own_adapters().get_loader(oid, Format.TEXT)
        assert psycopgs is not None
        self._psycopgs = psycopgs(oid, context)

    def load(self, data: Buffer) -> Any:
        try:
            return self._psycopgs.load(data)
        except DataError:
            shown = bytes(data)
            return EARLIEST if shown.startswith(b"-") or shown.endswith(b"BC") else LATEST


def read_anything(cursor: Cursor[Any]) -> None:
    """Have *cursor* give the text of JSON that Python cannot read, and the nearest ``datetime`` for any instant."""
    set_json_loads(load_json, cursor)
    cursor.adapters.register_loader("timestamptz", _InstantLoader)
