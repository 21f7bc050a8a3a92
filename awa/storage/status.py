"""What the ring of segments holds, and what keeps a sealed segment from being emptied."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg import Connection
from psycopg.rows import tuple_row

from awa.storage.schema import Schema

COUNTED = 1000
"""Most available entries of a queue that are counted in one slot."""


@dataclass(frozen=True, slots=True)
class Pin:
    """Something that keeps a segment."""

    what: str
    """``available``: entries wait to be claimed. ``running``: attempts are open. ``transaction``: an open transaction
    holds a lock on the segment."""
    name: str
    """The queue, the worker's number, or the process id of the server's backend."""
    count: int
    """How many; of a transaction, for how many seconds it has been open."""
    is_more: bool = False
    """There are more than *count*, which were not counted."""

    def __str__(self) -> str:
        match self.what:
            case "available":
                return f"{self.count}{' or more' if self.is_more else ''} available in queue {self.name}"
            case "running":
                return f"{self.count} running at worker {self.name}"
        return f"a transaction of {self.count} s, process {self.name}"


@dataclass(frozen=True, slots=True)
class SlotStatus:
    """One slot of the ring."""

    slot: int
    """Its number, 0 to 7."""
    is_current: bool
    """New entries are written here."""
    opened_at: datetime | None
    """When the ring turned to it; None: it is empty."""
    sealed_at: datetime | None
    """When the ring turned away; None: it is current, or empty."""
    newest_end_at: datetime | None
    """When the last of its entries has ended, so far."""
    entries: int
    """Rows of ``awa.jobs``."""
    size_bytes: int
    """Of its four tables with their indexes."""
    is_empty: bool
    """The ring can turn to it."""
    pins: list[Pin]
    """What keeps it."""


SLOTS = """
    SELECT r.slot, r.slot = pg_sequence_last_value('awa.ring_seq') IS TRUE AS is_current, r.opened_at, r.sealed_at,
           greatest(x.at, e.at) AS newest_end_at, coalesce(j.n, 0) AS entries, s.size_bytes,
           s.heap_bytes = 0 AS is_empty
      FROM awa.ring r
      LEFT JOIN (SELECT slot, count(*) AS n FROM awa.jobs GROUP BY slot) j USING (slot)
      LEFT JOIN (SELECT slot, max(completed_at) AS at FROM awa.completions GROUP BY slot) x USING (slot)
      LEFT JOIN (SELECT slot, max(ended_at) AS at FROM awa.attempt_ends GROUP BY slot) e USING (slot)
     CROSS JOIN LATERAL (
           SELECT sum(pg_total_relation_size(t.name))::bigint AS size_bytes, sum(pg_relation_size(t.name)) AS heap_bytes
             FROM (SELECT to_regclass('awa.' || u.name || '_' || r.slot) AS name
                     FROM unnest(ARRAY['jobs', 'claims', 'completions', 'attempt_ends']) AS u(name)) t) s
     ORDER BY r.slot
"""

AVAILABLE = """
    SELECT u.slot, q.queue, least(count(*), %(counted)s), count(*) > %(counted)s
      FROM (SELECT c.queue FROM awa.claims c UNION SELECT t.queue FROM awa.frontiers t
             UNION SELECT j.queue FROM awa.jobs j) q
     CROSS JOIN generate_series(0, 7) AS s(slot)
     CROSS JOIN LATERAL awa.unclaimed(q.queue, %(counted)s + 1, s.slot::smallint) u
     GROUP BY u.slot, q.queue
     ORDER BY u.slot, q.queue
"""

# As a rescue would find them: the claims that the last heartbeat listed, and all that came later.
RUNNING = """
    SELECT c.slot, r.id::text, count(*)
      FROM awa.runtime_instances r
     CROSS JOIN LATERAL (
           SELECT t.slot, t.claim_id, t.entry_ids FROM awa.claims t
            WHERE t.runtime = r.id AND (t.claim_id > r.newest_claim OR t.claim_id = ANY (r.open_claims))) c
     CROSS JOIN LATERAL unnest(c.entry_ids) WITH ORDINALITY AS m(entry_id, idx)
     WHERE r.ended_at IS NULL
       AND NOT EXISTS (SELECT FROM awa.completions x
                        WHERE x.slot = c.slot AND x.claim_id = c.claim_id AND m.idx::smallint = ANY (x.idx))
       AND NOT EXISTS (SELECT FROM awa.attempt_ends e WHERE e.slot = c.slot AND e.entry_id = m.entry_id)
     GROUP BY c.slot, r.id
     ORDER BY c.slot, r.id
"""

# Any lock on a table of the slot is in the way of a prune, which waits for none. What is over in a second is not told.
TRANSACTIONS = """
    SELECT s.slot, a.pid::text, max(extract(epoch FROM clock_timestamp() - a.xact_start))::bigint
      FROM generate_series(0, 7) AS s(slot)
     CROSS JOIN unnest(ARRAY['jobs', 'claims', 'completions', 'attempt_ends']) AS t(name)
      JOIN pg_locks l ON l.locktype = 'relation' AND l.relation = to_regclass('awa.' || t.name || '_' || s.slot)
                     AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
      JOIN pg_stat_activity a ON a.pid = l.pid
     WHERE a.pid <> pg_backend_pid() AND a.xact_start < clock_timestamp() - interval '1 s'
     GROUP BY s.slot, a.pid
     ORDER BY s.slot, 3 DESC
"""


def read_status(conn: Connection[Any], schema: Schema) -> list[SlotStatus]:
    """Every slot by number. Statements of their own, each in a snapshot of its own: it holds nothing for long."""
    pins: dict[int, list[Pin]] = {slot: [] for slot in range(8)}
    with conn.cursor(row_factory=tuple_row) as cursor:
        for slot, queue, count, is_more in cursor.execute(schema.sql(AVAILABLE), {"counted": COUNTED}).fetchall():
            pins[slot].append(Pin("available", queue, count, is_more))
        for slot, runtime, count in cursor.execute(schema.sql(RUNNING)).fetchall():
            pins[slot].append(Pin("running", runtime, count))
        for slot, pid, seconds in cursor.execute(schema.sql(TRANSACTIONS)).fetchall():
            pins[slot].append(Pin("transaction", pid, seconds))
        rows = cursor.execute(schema.sql(SLOTS)).fetchall()
    return [SlotStatus(*(*row, pins[row[0]])) for row in rows]
