"""The ring of segments: turning it, looking through a sealed segment, emptying it.

What is read here is read in ranges of pages, so that no statement takes long. Statements name the partition they read:
the number of a slot is put into their text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from psycopg import Connection
from psycopg.rows import class_row, scalar_row, tuple_row

from awa.storage.pooler import read_committed
from awa.storage.schema import Schema

SLOTS = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """What is known of a slot without looking into it."""

    slot: int
    """Its number, 0 to 7."""
    is_current: bool
    """New entries are written here."""
    opened_at: datetime | None
    """When the ring turned to it."""
    sealed_at: datetime | None
    """When the ring turned away."""
    now: datetime
    """By the database's clock, or what a test said."""
    file: int
    """Of its entries: another one each time the slot has been emptied."""
    job_pages: int
    """Pages of its entries."""
    claim_pages: int
    """Of its claims."""
    completion_pages: int
    """Of its completions."""
    end_pages: int
    """Of its other ends."""
    size_bytes: int
    """Of all four tables, without their indexes."""

    @property
    def is_empty(self) -> bool:
        """Nothing was written since it was emptied, not even what was rolled back."""
        return self.size_bytes == 0

    @property
    def is_open(self) -> bool:
        """The ring has turned to it, and not away: what the sequence says too, unless a crash came in between."""
        return self.opened_at is not None and self.sealed_at is None

    @property
    def open_for(self) -> timedelta:
        """For how long the ring has stood here."""
        return self.now - self.opened_at if self.opened_at is not None else timedelta(0)

    @property
    def sealed_for(self) -> timedelta:
        """For how long nobody has been meant to write here; ever, when nobody was."""
        return self.now - self.sealed_at if self.sealed_at is not None else timedelta(days=365_000)


LIST_SEGMENTS = """
    SELECT r.slot, r.slot = pg_sequence_last_value('awa.ring_seq') AS is_current, r.opened_at, r.sealed_at,
           coalesce(%(now)s, clock_timestamp()) AS now,
           pg_relation_filenode(format('awa.jobs_%%s', r.slot)::regclass)::bigint AS file,
           (s.jobs / b.size)::integer AS job_pages, (s.claims / b.size)::integer AS claim_pages,
           (s.completions / b.size)::integer AS completion_pages, (s.ends / b.size)::integer AS end_pages,
           s.jobs + s.claims + s.completions + s.ends AS size_bytes
      FROM awa.ring r
     CROSS JOIN (SELECT current_setting('block_size')::integer AS size) b
     CROSS JOIN LATERAL (SELECT pg_relation_size(format('awa.jobs_%%s', r.slot)::regclass) AS jobs,
                                pg_relation_size(format('awa.claims_%%s', r.slot)::regclass) AS claims,
                                pg_relation_size(format('awa.completions_%%s', r.slot)::regclass) AS completions,
                                pg_relation_size(format('awa.attempt_ends_%%s', r.slot)::regclass) AS ends) s
     ORDER BY r.slot
"""


def list_segments(conn: Connection[Any], schema: Schema, *, now: datetime | None = None) -> list[Segment]:
    """All slots by number, with their ages and sizes.

    Args:
        now: What to take for now; None: the database's clock.
    """
    with conn.cursor(row_factory=class_row(Segment)) as cursor:
        return cursor.execute(schema.sql(LIST_SEGMENTS), {"now": now}).fetchall()


ROTATE = "SELECT awa.rotate_v1()"


def rotate(conn: Connection[Any], schema: Schema) -> int | None:
    """Seal the current segment and turn to an empty one; None when there is none.

    Source: migrations/0008_ring.sql.
    """
    with conn.cursor(row_factory=scalar_row) as cursor:
        read_committed(cursor, schema.sql(ROTATE), {})
        return cursor.fetchone()


# A crash between setting the sequence and committing what the ring says of it.
MEND = """
    UPDATE awa.ring r
       SET opened_at = CASE WHEN r.slot = c.slot THEN clock_timestamp() ELSE r.opened_at END,
           sealed_at = CASE WHEN r.slot = c.slot THEN NULL ELSE clock_timestamp() END
      FROM (SELECT pg_sequence_last_value('awa.ring_seq') AS slot) c
     WHERE CASE WHEN r.slot = c.slot THEN r.opened_at IS NULL OR r.sealed_at IS NOT NULL
                ELSE r.opened_at IS NOT NULL AND r.sealed_at IS NULL END
"""


def mend(conn: Connection[Any], schema: Schema) -> None:
    """Make what ``awa.ring`` says agree with the sequence, which decides."""
    conn.execute(schema.sql(MEND))


ANALYZE = "SELECT awa.analyze_v1(%(slot)s::smallint)"


def analyze(conn: Connection[Any], schema: Schema, slot: int) -> None:
    """Give the planner a small sample of a sealed segment: autovacuum stays away from these tables.

    Source: migrations/0016_roles.sql.
    """
    conn.execute(schema.sql(ANALYZE), {"slot": slot})


@dataclass(frozen=True, slots=True)
class Print:
    """A set of entry ids in short: how many, and two sums of hashes of them.

    Two sets with equal prints are equal, but for a chance of 2 to the power of -128; a set in which an id stands twice
    has another print than any in which it stands once.

    Source: D. Clarke and others, Incremental Multiset Hash Functions and Their Application to Memory Integrity
    Checking (2003), the additive variant.
    """

    count: int = 0
    """Ids."""
    first: int = 0
    """Sum of their hashes with one seed, ..."""
    second: int = 0
    """... and with another."""

    def __add__(self, other: Print) -> Print:
        return Print(self.count + other.count, self.first + other.first, self.second + other.second)


ENTRIES = """
    SELECT count(*), sum(hashint8extended(j.entry_id, 1)), sum(hashint8extended(j.entry_id, 2))
      FROM awa.jobs_{slot} j
     WHERE j.ctid >= format('(%%s,0)', %(first)s::bigint)::tid AND j.ctid < format('(%%s,0)', %(behind)s::bigint)::tid
"""


def print_entries(conn: Connection[Any], schema: Schema, slot: int, first: int, behind: int) -> Print:
    """The print of the entries on some pages of a slot, from page *first* up to *behind*."""
    return _print(_row(conn, schema.sql(ENTRIES).format(slot=slot), first, behind))


# entry_ids is unpacked once a row: every subscript of a compressed array would unpack it
COMPLETED = """
    SELECT count(*), sum(hashint8extended(m.entry_id, 1)), sum(hashint8extended(m.entry_id, 2)), max(m.completed_at)
      FROM (SELECT c.claim_id, c.entry_ids || '{{}}'::bigint[] AS entry_ids
              FROM awa.claims_{slot} c
             WHERE c.ctid >= format('(%%s,0)', %(first)s::bigint)::tid
               AND c.ctid < format('(%%s,0)', %(behind)s::bigint)::tid
            OFFSET 0) c
     CROSS JOIN LATERAL (SELECT c.entry_ids[i] AS entry_id, x.completed_at
                           FROM awa.completions_{slot} x CROSS JOIN LATERAL unnest(x.idx) i
                          WHERE x.slot = {slot} AND x.claim_id = c.claim_id OFFSET 0) m
"""


def print_completed(
    conn: Connection[Any], schema: Schema, slot: int, first: int, behind: int
) -> tuple[Print, datetime | None]:
    """The print of what was completed of the claims on some pages of a slot, and when the last was."""
    row = _row(conn, schema.sql(COMPLETED).format(slot=slot), first, behind)
    return _print(row), row[3]


ENDED = """
    SELECT count(*), sum(hashint8extended(e.entry_id, 1)), sum(hashint8extended(e.entry_id, 2)),
           max(e.ended_at) FILTER (WHERE e.outcome = 'completed')
      FROM awa.attempt_ends_{slot} e
     WHERE e.ctid >= format('(%%s,0)', %(first)s::bigint)::tid AND e.ctid < format('(%%s,0)', %(behind)s::bigint)::tid
"""


def print_ended(
    conn: Connection[Any], schema: Schema, slot: int, first: int, behind: int
) -> tuple[Print, datetime | None]:
    """The print of what ended otherwise, as far as some pages of a slot say, and when the last was completed so."""
    row = _row(conn, schema.sql(ENDED).format(slot=slot), first, behind)
    return _print(row), row[3]


COUNT_COMPLETED = """
    SELECT coalesce(sum(cardinality(x.idx)), 0)::bigint
      FROM awa.completions_{slot} x
     WHERE x.ctid >= format('(%%s,0)', %(first)s::bigint)::tid AND x.ctid < format('(%%s,0)', %(behind)s::bigint)::tid
"""


def count_completed(conn: Connection[Any], schema: Schema, slot: int, first: int, behind: int) -> int:
    """How many completions some pages of a slot hold: the cheap question, before the dear one is worth asking."""
    return int(_row(conn, schema.sql(COUNT_COMPLETED).format(slot=slot), first, behind)[0])


COUNT_ENDED = """
    SELECT count(*)
      FROM awa.attempt_ends_{slot} e
     WHERE e.ctid >= format('(%%s,0)', %(first)s::bigint)::tid AND e.ctid < format('(%%s,0)', %(behind)s::bigint)::tid
"""


def count_ended(conn: Connection[Any], schema: Schema, slot: int, first: int, behind: int) -> int:
    """How many other ends some pages of a slot hold."""
    return int(_row(conn, schema.sql(COUNT_ENDED).format(slot=slot), first, behind)[0])


def _row(conn: Connection[Any], query: str, first: int, behind: int) -> tuple[Any, ...]:
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(query, {"first": first, "behind": behind}).fetchone()
    assert row is not None
    return row


def _print(row: Sequence[Any]) -> Print:
    return Print(row[0], int(row[1] or 0), int(row[2] or 0))


LIST_QUEUES = """
    WITH RECURSIVE queues AS (
        (SELECT j.queue FROM awa.jobs_{slot} j ORDER BY j.queue LIMIT 1)
        UNION ALL
        SELECT n.queue FROM queues q
         CROSS JOIN LATERAL (SELECT j.queue FROM awa.jobs_{slot} j WHERE j.queue > q.queue ORDER BY j.queue LIMIT 1) n
    )
    SELECT queue FROM queues
"""


def list_queues(conn: Connection[Any], schema: Schema, slot: int) -> list[str]:
    """The queues that have entries in a slot, by name."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        return cursor.execute(schema.sql(LIST_QUEUES).format(slot=slot)).fetchall()


CARRY = "SELECT awa.carry_v1(%(slot)s::smallint, %(queue)s, %(limit)s)"


def carry(conn: Connection[Any], schema: Schema, slot: int, queue: str, *, limit: int) -> int | None:
    """Append what nobody has claimed of a queue's entries in a slot to the current one.

    Returns:
        How many were carried; None when a claim was in the way: try again.

    Source: migrations/0008_ring.sql.
    """
    with conn.cursor(row_factory=scalar_row) as cursor:
        read_committed(cursor, schema.sql(CARRY), {"slot": slot, "queue": queue, "limit": limit})
        found = cursor.fetchone()
    assert found is not None
    return None if found < 0 else int(found)


PRUNE = "SELECT awa.prune_v2(%(slot)s::smallint, %(entries)s, %(file)s::bigint::oid, %(examined)s::bigint[])"


def prune(
    conn: Connection[Any], schema: Schema, slot: int, *, entries: int, file: int, examined: Sequence[int] = ()
) -> str:
    """Empty a sealed slot, all of whose *entries* have been found to have ended.

    Args:
        file: In which file they were found. A slot that was emptied since may hold as many others.
        examined: Jobs that wait for others, which were looked at after all these entries had ended.

    Returns:
        ``pruned``; or, and nothing has changed, ``busy``, ``changed`` (there are more entries now, or others),
        ``current``, or ``awaited`` (another job may wait for one of these).

    Source: migrations/0019_dependencies.sql.
    """
    with conn.cursor(row_factory=scalar_row) as cursor:
        params = {"slot": slot, "entries": entries, "file": file, "examined": list(examined)}
        read_committed(cursor, schema.sql(PRUNE), params)
        return str(cursor.fetchone())
