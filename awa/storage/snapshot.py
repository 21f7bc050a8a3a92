"""Several statements that look at the database as it is at one moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from psycopg import Connection, Cursor, Error
from psycopg.rows import tuple_row

from awa.storage.grants import explaining
from awa.storage.rows import read_anything
from awa.storage.schema import Schema

# The locks come before the snapshot, which the first query takes: TRUNCATE ignores snapshots, and a segment that is
# emptied in between would take jobs along that were carried out of it too late to be seen. Prune only tries its locks.
# Planned so, every statement finds its rows by index, whatever the statistics say.
BEGIN = """
    BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;
    LOCK TABLE awa.jobs, awa.claims, awa.completions, awa.attempt_ends IN ACCESS SHARE MODE;
    SET LOCAL enable_seqscan = off;
    SET LOCAL enable_bitmapscan = off;
    SET LOCAL max_parallel_workers_per_gather = 0;
    SET LOCAL jit = off
"""


class Look:
    """Reads rows in one snapshot."""

    def __init__(self, cursor: Cursor[tuple[Any, ...]], schema: Schema) -> None:
        self._cursor = cursor
        self._schema = schema

    def rows(self, query: str, **params: Any) -> list[tuple[Any, ...]]:
        """What *query*, written for the schema ``awa``, finds."""
        # planned for these values: they differ by millions of rows, and nobody looks a thousand times a second
        return self._cursor.execute(self._schema.sql(query), params, prepare=False).fetchall()


@contextmanager
def one_snapshot(conn: Connection[Any], schema: Schema) -> Iterator[Look]:
    """Look at the database in a transaction of its own, which changes nothing and in which nothing changes.

    Args:
        conn: In autocommit mode, with no transaction open.
    """
    with explaining(conn, schema, "reader"), Cursor(conn, row_factory=tuple_row) as cursor:
        read_anything(cursor)
        try:
            cursor.execute(schema.sql(BEGIN))
        except Error:  # a right is missing, say, and the transaction open
            if not conn.closed:
                cursor.execute("ROLLBACK")
            raise
        try:
            yield Look(cursor, schema)
        finally:
            cursor.execute("ROLLBACK")
