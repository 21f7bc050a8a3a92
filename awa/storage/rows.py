"""Reading rows that anybody may have written: one value that Python cannot hold does not hide the others."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from psycopg import Cursor, DataError
from psycopg.abc import Buffer
from psycopg.types.datetime import TimestamptzLoader
from psycopg.types.json import set_json_loads

EARLIEST = datetime.min.replace(tzinfo=UTC)
LATEST = datetime.max.replace(tzinfo=UTC)


def load_json(text: str | bytes) -> Any:
    """The value of *text*; its text when it is nested too deeply for Python, or has a number of too many digits."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text if isinstance(text, str) else bytes(text).decode()


class _InstantLoader(TimestamptzLoader):
    def load(self, data: Buffer) -> datetime:
        try:
            return super().load(data)
        except DataError:
            shown = bytes(data)
            return EARLIEST if shown.startswith(b"-") or shown.endswith(b"BC") else LATEST


def read_anything(cursor: Cursor[Any]) -> None:
    """Have *cursor* give the text of JSON that Python cannot read, and the nearest ``datetime`` for any instant."""
    set_json_loads(load_json, cursor)
    cursor.adapters.register_loader("timestamptz", _InstantLoader)
