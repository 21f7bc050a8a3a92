"""Rebase: make this server's transactions the ones that the rows are numbered by.

For a schema that came by a logical way (dump and restore, replication), or whose frontiers are wrong for any reason.
Every open attempt is taken back, every unclaimed entry is appended again, and each queue's frontier begins anew before
what was appended. The old numbers stay in rows that have ended, unless this server has yet to come to them: a claim
would take these entries for new when it does.

It is one transaction. Nothing of it is seen before all of it is: a crash in the middle leaves the storage as it was,
and it is simply begun again. Batches would need a frontier that is true of each half-way state, and that is just what
is missing. The price is that a backlog is written at once; nobody waits for it but workers, and they are not to run.

Locks, all of them tried, all kept to the end: the ring's (no turn, no prune), every queue's claim lock (no claim,
cancel or move), the lock of every runtime that has something open (no settle). What is read is read in statements that
start after the locks, at READ COMMITTED. Producers go on. The frontier's snapshot comes first, the entries are read
after it: what was committed before the snapshot is carried; what is committed after the reading lies ahead of the
frontier; what was committed in between is both, and the claim that meets the old entry finds it ended.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import Connection, errors, sql
from psycopg.rows import scalar_row, tuple_row

from awa.errors import AwaError
from awa.storage import ring
from awa.storage.check import SequenceState, read_sequences
from awa.storage.reach import PLAN_BY_HASH, whole_storage
from awa.storage.schema import Schema
from awa.storage.trust import record_origin

SILENT = 30.0
"""Seconds without a sign of life after which a worker counts as stopped; three of its heartbeats, if that is more."""

PATIENCE = 30.0
"""Seconds to go on trying while others hold a lock."""

BATCH = 1000
"""Attempts that one statement takes back."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a rebase would do."""

    available: dict[str, int]
    """Queue -> entries to append again."""
    running: dict[int, int]
    """Runtime -> open attempts to take back."""


SURVEY_AVAILABLE = "SELECT queue, count(*) FROM awa.unclaimed_entries() GROUP BY queue ORDER BY queue"

SURVEY_RUNNING = "SELECT runtime, count(*) FROM awa.open_attempts() GROUP BY runtime ORDER BY runtime"


def survey(conn: Connection[Any], schema: Schema) -> Survey:
    """Count what is open, and change nothing."""
    with (
        whole_storage(conn, schema, mode="REPEATABLE READ, READ ONLY"),
        conn.cursor(row_factory=tuple_row) as cursor,
    ):
        available = cursor.execute(schema.sql(SURVEY_AVAILABLE), prepare=False).fetchall()
        running = cursor.execute(schema.sql(SURVEY_RUNNING), prepare=False).fetchall()
    return Survey(dict(available), dict(running))


@dataclass(frozen=True, slots=True)
class Rebased:
    """What a rebase has done."""

    carried: int
    """Entries that were appended again."""
    rescued: int
    """Attempts that were taken back: their next attempts wait now, or the jobs have failed."""
    renumbered: int
    """Entries that got a number of their own, since another entry had theirs."""
    queues: list[str]
    """Whose frontiers begin anew."""
    fenced: list[int]
    """Runtimes that are cut off."""
    sequences: list[str]
    """Sequences that were behind the rows."""


def rebase(conn: Connection[Any], schema: Schema, *, silent: float = SILENT, patience: float = PATIENCE) -> Rebased:
    """Number everything that is open by this server's transactions, in one transaction.

    Args:
        silent: Seconds without a sign of life after which a worker counts as stopped.
        patience: Seconds to go on trying while others hold a lock.

    Raises:
        AwaError: A worker lives, or somebody held a lock for too long. Nothing was changed.
    """
    give_up_at = time.monotonic() + patience
    while True:
        try:
            with conn.transaction():
                return _Rebase(conn, schema, silent).run()
        except _Held as held:
            reason = str(held)
        except errors.LockNotAvailable as error:
            reason = f"an open transaction holds what must be written ({error.diag.message_primary})"
        if time.monotonic() > give_up_at:
            raise AwaError(
                f"schema {schema.name!r} was not rebased within {patience:g} s: {reason}: find who it is in"
                " pg_stat_activity and pg_locks, then run it again; nothing was changed"
            )
        time.sleep(0.1)


class _Held(Exception):
    """Somebody else holds a lock."""


# Numbers that were drawn while this statement ran are passed as well, by the margin.
SET_SEQUENCE = "SELECT setval(%(sequence)s::oid::regclass, %(largest)s + 1000000)"

TRY_RING = "SELECT pg_try_advisory_xact_lock(hashtextextended('awa.ring', 0))"

# OFFSET 0: the lock of each name is tried once.
TRY_QUEUES = """
    SELECT q.queue, pg_try_advisory_xact_lock(hashtextextended('awa.queue:' || q.queue, 0))
      FROM (SELECT j.queue FROM awa.jobs j
             UNION SELECT c.queue FROM awa.claims c
             UNION SELECT t.queue FROM awa.frontiers t
             ORDER BY queue OFFSET 0) q
"""

LIVING = """
    SELECT r.id, r.hostname, r.pid, extract(epoch FROM clock_timestamp() - r.last_seen_at)::double precision,
           greatest(%(silent)s, 0.003 * r.heartbeat_ms)::double precision
      FROM awa.runtime_instances r
     WHERE r.ended_at IS NULL
       AND r.last_seen_at > clock_timestamp() - greatest(%(silent)s, 0.003 * r.heartbeat_ms) * interval '1 s'
       AND NOT EXISTS (SELECT FROM awa.gone_runtimes g WHERE g.runtime = r.id)
     ORDER BY r.last_seen_at DESC
     LIMIT 1
"""

OPEN_ATTEMPTS = """
    SELECT o.runtime, o.claim_id, o.slot, o.idx
      FROM awa.open_attempts() o
     WHERE o.queue = ANY (%(queues)s)
     ORDER BY o.runtime, o.claim_id, o.idx
"""

# Whoever is silent, and whoever left something open; not a worker that registers now: it is still kept from claiming.
SILENT_RUNTIMES = """
    SELECT r.id
      FROM awa.runtime_instances r
     WHERE r.ended_at IS NULL
       AND (r.last_seen_at <= clock_timestamp() - greatest(%(silent)s, 0.003 * r.heartbeat_ms) * interval '1 s'
            OR EXISTS (SELECT FROM awa.gone_runtimes g WHERE g.runtime = r.id))
"""

TRY_RUNTIME = "SELECT pg_try_advisory_xact_lock(hashtextextended('awa.runtime:' || %(runtime)s::text, 0))"

FENCE = "INSERT INTO awa.gone_runtimes (runtime) SELECT unnest(%(runtimes)s::bigint[]) ON CONFLICT DO NOTHING"

FILL_RING = "INSERT INTO awa.ring (slot) SELECT n FROM generate_series(0, 7) n ON CONFLICT DO NOTHING"

# The slot that awa.ring says is open; else the first, whatever it holds.
SET_RING = """
    SELECT setval('awa.ring_seq', coalesce((SELECT min(r.slot) FROM awa.ring r
                                             WHERE r.opened_at IS NOT NULL AND r.sealed_at IS NULL), 0))
     WHERE pg_sequence_last_value('awa.ring_seq') IS NULL
"""

SEEN = "SELECT awa.page_end()"

# As rescue ends attempts, which reads by index whatever the planner believes.
PLAN_BY_INDEX = "SET LOCAL enable_nestloop = on; SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off"

PLAN_BY_SCAN = "SET LOCAL enable_seqscan = on; SET LOCAL enable_bitmapscan = on"

RESCUE = """
    SELECT cardinality(awa.end_attempts(
               %(runtime)s, NULL, %(claims)s::bigint[], %(slots)s::smallint[],
               array_fill(NULL::integer, ARRAY[%(n)s::integer]), %(idx)s::smallint[],
               array_fill('rescued'::text, ARRAY[%(n)s::integer]),
               array_fill(0::double precision, ARRAY[%(n)s::integer]),
               array_fill(NULL::integer, ARRAY[%(n)s::integer]), array_fill(%(error)s::text, ARRAY[%(n)s::integer])))
"""

RESCUE_ERROR = '{"type": "WorkerDied", "text": "its worker was cut off: the storage was rebased"}'

# An end names an entry by its number alone, so each open entry needs one of its own. Of those that share one, the
# first keeps it if all are open; a job whose first entry loses its number is known by the new one. The same row twice,
# as when a dump is restored over what is there, is one entry.
HAS_TWINS = """
    SELECT EXISTS (SELECT FROM awa.unclaimed_entries() u
                     JOIN (SELECT j.entry_id FROM awa.jobs j GROUP BY j.entry_id HAVING count(*) > 1) t USING (entry_id)
                    WHERE u.queue = ANY (%(queues)s))
"""

PART_TWINS = """
    WITH shared AS MATERIALIZED (
        SELECT j.entry_id, count(*) AS n FROM awa.jobs j GROUP BY j.entry_id HAVING count(*) > 1
    ), twin AS MATERIALIZED (
        SELECT u.slot, u.place,
               row_number() OVER (PARTITION BY u.entry_id ORDER BY u.slot, u.xid, u.place) = 1
                   AND count(*) OVER (PARTITION BY u.entry_id) = s.n AS keeps_number,
               row_number() OVER (PARTITION BY u.slot, u.queue, u.lane, u.xid, u.entry_id ORDER BY u.place) > 1
                   AS is_copy
          FROM awa.unclaimed_entries() u JOIN shared s USING (entry_id)
         WHERE u.queue = ANY (%(queues)s)
    ), removed AS (
        DELETE FROM awa.jobs j USING twin t WHERE t.is_copy AND j.slot = t.slot AND j.ctid = t.place
    ), parted AS (
        UPDATE awa.jobs j
           SET entry_id = t.number, id = CASE WHEN j.id = j.entry_id THEN t.number ELSE j.id END
          FROM (SELECT nextval('awa.entry_id_seq') AS number, t.slot, t.place
                  FROM twin t WHERE NOT t.is_copy AND NOT t.keeps_number OFFSET 0) t
         WHERE j.slot = t.slot AND j.ctid = t.place
        RETURNING 1
    )
    SELECT count(*) FROM parted
"""

COLUMNS = """
    SELECT a.attname
      FROM pg_attribute a
     WHERE a.attrelid = 'awa.jobs'::regclass AND a.attnum > 0 AND NOT a.attisdropped
       AND a.attname <> ALL ('{xid,entry_id,id,slot,lane,created_at}')
     ORDER BY a.attnum
"""

# Numbers are drawn in walk order, and all these entries are of one transaction: so the order stays. The next attempts
# of what was taken back are of this transaction too, so they come first.
CARRY = """
    WITH entry AS MATERIALIZED (
        SELECT nextval('awa.entry_id_seq') AS number, o.*
          FROM (SELECT j.*
                  FROM awa.unclaimed_entries() u JOIN awa.jobs j ON j.slot = u.slot AND j.ctid = u.place
                 WHERE u.queue = ANY (%(queues)s) AND u.xid <> pg_current_xact_id()
                 ORDER BY u.queue, u.lane, u.xid, u.entry_id) o
    ), ended AS (
        INSERT INTO awa.attempt_ends (entry_id, id, slot, outcome)
        SELECT e.entry_id, e.id, e.slot, 'carried' FROM entry e
    )
    INSERT INTO awa.jobs (entry_id, id, created_at, lane, {columns})
    SELECT e.number, e.id, coalesce(e.created_at, e.available_at), 2 * e.priority, {values}
      FROM entry e
"""

# All that was claimed has ended by now. What of it a claim would still come to gets the oldest number of all.
SINK = """
    WITH ahead AS MATERIALIZED (
        SELECT c.slot, c.queue, c.lane, m.xid, m.entry_id
          FROM awa.claims c CROSS JOIN LATERAL unnest(c.xids, c.entry_ids) AS m(xid, entry_id)
         WHERE c.queue = ANY (%(queues)s) AND NOT pg_visible_in_snapshot(m.xid, %(seen)s::pg_snapshot)
    ), sunk AS (
        UPDATE awa.claims c
           SET xids = ARRAY(SELECT CASE WHEN pg_visible_in_snapshot(u.xid, %(seen)s::pg_snapshot) THEN u.xid
                                        ELSE '3' END
                              FROM unnest(c.xids) WITH ORDINALITY AS u(xid, n) ORDER BY u.n)
         WHERE c.queue = ANY (%(queues)s)
           AND EXISTS (SELECT FROM unnest(c.xids) x WHERE NOT pg_visible_in_snapshot(x, %(seen)s::pg_snapshot))
    )
    UPDATE awa.jobs j
       SET xid = '3'
      FROM ahead a
     WHERE j.slot = a.slot AND j.queue = a.queue AND j.lane = a.lane AND j.xid = a.xid AND j.entry_id = a.entry_id
"""

# What limits went by named attempts that are over: the next claim counts anew.
BEGIN_ANEW = """
    INSERT INTO awa.frontiers AS t (queue, claim_id, frontier)
    SELECT q.queue, nextval('awa.claim_id_seq'),
           ARRAY(SELECT ROW(lane, %(seen)s::pg_snapshot, NULL, NULL, NULL)::awa.lane_frontier
                   FROM generate_series(2, 9) lane)
      FROM unnest(%(queues)s::text[]) AS q(queue)
        ON CONFLICT (queue) DO UPDATE
       SET claim_id = excluded.claim_id, frontier = excluded.frontier, limits = NULL
"""

# Whatever became of the rows that say who has a key: whoever waits for one is looked at by the next claim.
LOOK_AT_KEYS = """
    INSERT INTO awa.grants (queue, scope, key, id, is_over)
    SELECT DISTINCT w.queue, w.waits_for, w.wait_key, 0, true
      FROM awa.waiting_jobs w WHERE w.waits_for IN ('key', 'order')
        ON CONFLICT DO NOTHING
"""

FINISH = """
    UPDATE awa.runtime_instances
       SET ended_at = clock_timestamp()
     WHERE id = ANY (%(runtimes)s) AND ended_at IS NULL
"""

RING_FOR = "SELECT awa.ring(%(queues)s::text[])"


class _Rebase:
    """One try, inside a transaction."""

    def __init__(self, conn: Connection[Any], schema: Schema, silent: float) -> None:
        self._conn = conn
        self._schema = schema
        self._silent = silent

    def run(self) -> Rebased:
        self._conn.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE; SET LOCAL lock_timeout = '5s'")
        self._conn.execute(PLAN_BY_HASH)
        if not self._one(TRY_RING):
            raise _Held("the ring is being turned or a segment emptied")
        tried = self._all(TRY_QUEUES)
        if held := [queue for queue, is_mine in tried if not is_mine]:
            raise _Held(f"somebody claims from or works on queue {held[0]}")
        queues = [queue for queue, _ in tried]
        self._refuse_the_living()
        attempts = self._all(OPEN_ATTEMPTS, queues=queues)
        fenced = self._fence({attempt[0] for attempt in attempts})
        sequences = self._set_sequences()
        self._execute(FILL_RING)
        self._one(SET_RING)
        ring.mend(self._conn, self._schema)
        # Before what is carried is read: in doubt an entry is carried and ahead of the frontier, never neither.
        seen = self._one(SEEN)
        self._conn.execute(PLAN_BY_INDEX)
        rescued = self._rescue(attempts)
        self._conn.execute(PLAN_BY_SCAN)
        self._conn.execute(PLAN_BY_HASH)
        renumbered = self._one(PART_TWINS, queues=queues) if self._one(HAS_TWINS, queues=queues) else 0
        carried = self._carry(queues)
        self._execute(SINK, seen=seen, queues=queues)
        self._execute(BEGIN_ANEW, seen=seen, queues=queues)
        self._execute(LOOK_AT_KEYS)
        self._execute(FINISH, runtimes=fenced)
        record_origin(self._conn, self._schema)
        self._execute(RING_FOR, queues=queues)
        return Rebased(carried, rescued, renumbered, queues, fenced, sequences)

    def _refuse_the_living(self) -> None:
        for runtime, host, pid, silent, needed in self._all(LIVING, silent=self._silent):
            raise AwaError(
                f"worker {runtime} (host {host}, process {pid}) gave a sign of life {silent:.0f} s ago: stop every"
                f" worker of this schema first; one that was killed counts as stopped after {needed:.0f} s of silence"
            )

    def _fence(self, owners: set[int]) -> list[int]:
        runtimes = sorted(owners | {runtime for (runtime,) in self._all(SILENT_RUNTIMES, silent=self._silent)})
        for runtime in runtimes:
            if not self._one(TRY_RUNTIME, runtime=runtime):
                raise _Held(f"worker {runtime} is recording something")
        self._execute(FENCE, runtimes=runtimes)
        return runtimes

    def _set_sequences(self) -> list[str]:
        behind: list[SequenceState] = [state for state in read_sequences(self._conn, self._schema) if state.is_behind]
        for state in behind:
            self._one(SET_SEQUENCE, sequence=state.sequence, largest=state.largest)
        return [state.name for state in behind]

    def _rescue(self, attempts: Sequence[tuple[int, int, int, int]]) -> int:
        by_runtime: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for runtime, claim, slot, idx in attempts:
            by_runtime[runtime].append((claim, slot, idx))
        ended = 0
        for runtime, members in by_runtime.items():
            for first in range(0, len(members), BATCH):
                claims, slots, idx_ = (list(column) for column in zip(*members[first : first + BATCH], strict=True))
                ended += self._one(
                    RESCUE, runtime=runtime, claims=claims, slots=slots, idx=idx_, n=len(claims), error=RESCUE_ERROR
                )
        return ended

    def _carry(self, queues: list[str]) -> int:
        names = [name for (name,) in self._all(COLUMNS)]
        query = sql.SQL(self._schema.sql(CARRY)).format(
            columns=sql.SQL(", ").join(map(sql.Identifier, names)),
            values=sql.SQL(", ").join(sql.Identifier("e", name) for name in names),
        )
        return self._conn.execute(query, {"queues": queues}, prepare=False).rowcount

    def _execute(self, query: str, **params: Any) -> None:
        self._conn.execute(self._schema.sql(query), params, prepare=False)

    def _one(self, query: str, **params: Any) -> Any:
        with self._conn.cursor(row_factory=scalar_row) as cursor:
            return cursor.execute(self._schema.sql(query), params, prepare=False).fetchone()

    def _all(self, query: str, **params: Any) -> list[tuple[Any, ...]]:
        with self._conn.cursor(row_factory=tuple_row) as cursor:
            return cursor.execute(self._schema.sql(query), params, prepare=False).fetchall()
