"""Jobs that wait for other jobs: which do, what has become of their parents, and letting them go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import orjson
from psycopg import Connection, Cursor
from psycopg.rows import class_row, tuple_row

from awa.storage.pooler import read_committed
from awa.storage.schema import Schema


class Dependent(NamedTuple):
    """A job that waits for others."""

    seq: int
    """Its place in the order in which they are listed."""
    id: int
    """The job."""
    parents: list[int]
    """What it waits for."""


LIST = "SELECT seq, id, parents FROM awa.dependents_v1(%(after)s, %(limit)s, %(parents)s)"


def list_dependents(conn: Connection, schema: Schema, *, after: int, limit: int, parents: int) -> list[Dependent]:
    """The next jobs that wait for others, about in the order in which they were inserted.

    Args:
        after: The ``seq`` of the last one that was seen.
        limit: Most jobs.
        parents: Their parents are no more than this, but for those of the last job.

    Source: migrations/0019_dependencies.sql.
    """
    with Cursor(conn, row_factory=class_row(Dependent)) as cursor:
        cursor.execute(schema.sql(LIST), {"after": after, "limit": limit, "parents": parents})
        return cursor.fetchall()


class Place(NamedTuple):
    """Where a job was found."""

    slot: int
    """The slot of its newest entry; together with ..."""
    queue: str
    lane: int
    xid: str
    entry_id: int
    """... this it leads to the entry by one step through an index."""
    available_at: datetime
    """When the entry was appended."""
    claim_id: int | None
    """Who has claimed it; None: nobody."""
    idx: int | None
    """Its position in that claim."""


_NOWHERE = (None,) * len(Place._fields)

LOOK = """
    SELECT id, state, slot, queue, lane, xid::text, entry_id, available_at, claim_id, idx
      FROM awa.look_at_parents_v1(%(ids)s::bigint[], %(slots)s::smallint[], %(queues)s::text[], %(lanes)s::smallint[],
                                  %(xids)s::text[]::xid8[], %(entries)s::bigint[], %(ats)s::timestamptz[],
                                  %(claims)s::bigint[], %(idx)s::smallint[])
"""


def look_at_parents(
    conn: Connection, schema: Schema, parents: Sequence[int], places: Mapping[int, Place]
) -> list[tuple[int, str | None, Place | None]]:
    """What has become of some jobs.

    Args:
        places: Where some of them were found before, which spares a search.

    Returns:
        Per job: its id; ``waiting``, ``open``, ``completed``, ``failed``, ``cancelled``, ``gone``, or, when that takes
        another look, ``passed`` or None; and where it is, when it is open or passed. What is left out takes another
        look, too.

    Source: migrations/0019_dependencies.sql.
    """
    known = [places.get(parent, _NOWHERE) for parent in parents]
    names = ("slots", "queues", "lanes", "xids", "entries", "ats", "claims", "idx")
    params: dict[str, Any] = dict(zip(names, map(list, zip(*known, strict=True)), strict=True))
    with Cursor(conn, row_factory=tuple_row) as cursor:
        read_committed(cursor, schema.sql(LOOK), params | {"ids": list(parents)})
        return [
            (row[0], row[1], Place(*row[2:]) if row[1] in ("open", "passed") else None) for row in cursor.fetchall()
        ]


@dataclass(frozen=True, slots=True)
class Resolved:
    """What has happened to jobs that waited for others, by id."""

    started: list[int]
    """Available, or waiting for their time."""
    cancelled: list[int]
    """Since a parent has not completed."""
    discarded: list[int]
    """Deleted, for the same reason."""
    skipped: list[int]
    """Nothing: somebody else holds them."""


RESOLVE = "SELECT * FROM awa.resolve_parents_v1(%(ids)s::bigint[], %(states)s::jsonb)"


def resolve(conn: Connection, schema: Schema, ids: Sequence[int], states: Mapping[int, str]) -> Resolved:
    """Let jobs go whose parents have ended, and strike off the lists of the others those that have.

    Args:
        ids: The jobs.
        states: How parents have ended: ``completed``, ``failed``, ``cancelled`` or ``gone``.

    Source: migrations/0019_dependencies.sql.
    """
    said = orjson.dumps({str(parent): state for parent, state in states.items()}).decode()
    with Cursor(conn, row_factory=class_row(Resolved)) as cursor:
        read_committed(cursor, schema.sql(RESOLVE), {"ids": list(ids), "states": said})
        found = cursor.fetchone()
    assert found is not None
    return found
