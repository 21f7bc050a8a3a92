"""Keeping jobs easy to find by their ids."""

from __future__ import annotations

from typing import Any

from psycopg import Connection
from psycopg.rows import scalar_row

from awa.storage.schema import Schema

SUMMARIZE = "SELECT awa.summarize_v1(%(slot)s::smallint, %(first)s::bigint, %(ranges)s)"


def summarize(conn: Connection[Any], schema: Schema, slot: int, first: int, *, ranges: int) -> int:
    """Note in the index of job ids which ids some pages of a slot hold, so that a search skips them.

    Args:
        first: The page to begin with, a multiple of 32.
        ranges: Most ranges of 32 pages.

    Returns:
        The page to go on from; *first* when nothing is left to do, 0 when the slot was emptied.

    Source: migrations/0011_inspect.sql.
    """
    with conn.cursor(row_factory=scalar_row) as cursor:
        found = cursor.execute(schema.sql(SUMMARIZE), {"slot": slot, "first": first, "ranges": ranges}).fetchone()
    assert isinstance(found, int)
    return found
