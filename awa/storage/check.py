"""Whether the storage is what it promises to be: every sum and every anti-join over all of it, in one snapshot.

Nothing here is needed to run jobs. It is what an operator asks after a restore, and what every other page relies on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from psycopg import Connection
from psycopg.rows import class_row, scalar_row, tuple_row

from awa.storage.holders import MISMATCHES, count_over_limits, find_mismatches
from awa.storage.reach import find_unreachable, whole_storage
from awa.storage.schema import Schema
from awa.storage.trust import read_origin, rebase_command


@dataclass(frozen=True, slots=True)
class Sums:
    """The books of one slot: ``entries = completed + ended + available + running``."""

    slot: int
    """Its number, 0 to 7."""
    entries: int = 0
    """Rows of ``awa.jobs``."""
    completed: int = 0
    """Members that its completions name."""
    ended: int = 0
    """Rows of ``awa.attempt_ends``."""
    available: int = 0
    """Entries that nobody has claimed or ended."""
    running: int = 0
    """Members of claims that have not ended."""

    @property
    def is_even(self) -> bool:
        """The sum comes out."""
        return self.entries == self.completed + self.ended + self.available + self.running


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it must be."""

    name: str
    """Which check found it; a word that stays."""
    where: str
    """``slot 3``, ``queue email``, the name of a table or sequence; empty for the whole."""
    count: int
    """How many of them."""
    sample: list[int]
    """The numbers of up to five of them: entries, or what the text says."""
    text: str
    """What it is, and what mends it."""


@dataclass(slots=True)
class Report:
    """What one check found."""

    sums: list[Sums] = field(default_factory=list)
    """Per slot."""
    findings: list[Finding] = field(default_factory=list)
    """None, when all is well."""
    loose_keys: int = 0
    """Unique keys whose job has failed, was cancelled or is gone: nobody is kept out, and the leader removes them."""
    over_limits: int = 0
    """Running attempts beyond a limit of their queue or key: it was lowered while they ran, and they may end."""
    seconds: float = 0.0
    """How long it took."""

    @property
    def is_sound(self) -> bool:
        """Nothing was found."""
        return not self.findings


def check_storage(conn: Connection[Any], schema: Schema) -> Report:
    """Read everything, in one read-only snapshot beside whoever works, and report what does not fit.

    No segment is emptied meanwhile; nobody else waits.
    """
    began = time.monotonic()
    report = Report()
    with whole_storage(conn, schema, mode="REPEATABLE READ, READ ONLY"):
        report.findings += _check_origin(conn, schema)
        report.sums, found = _read_books(conn, schema)
        report.findings += [_uneven(sums) for sums in report.sums if not sums.is_even]
        report.findings += found
        for check in (_check_reach, _check_holders, _check_sequences, _check_ring, _check_partitions):
            report.findings += check(conn, schema)
        report.loose_keys = _count_loose_keys(conn, schema)
        report.over_limits = count_over_limits(conn, schema)
    report.seconds = time.monotonic() - began
    return report


LOOSE_KEYS = """
    SELECT count(*)
      FROM awa.job_uniques u
     WHERE NOT EXISTS (SELECT FROM awa.waiting_jobs w WHERE w.id = u.id)
       AND (EXISTS (SELECT FROM awa.ended_jobs e WHERE e.id = u.id AND u.states & awa.state_bit(e.state) = 0)
            OR NOT EXISTS (SELECT FROM awa.ended_jobs e WHERE e.id = u.id)
               AND NOT EXISTS (SELECT FROM awa.jobs j WHERE j.id = u.id))
"""


def _count_loose_keys(conn: Connection[Any], schema: Schema) -> int:
    with conn.cursor(row_factory=scalar_row) as cursor:
        return int(cursor.execute(schema.sql(LOOSE_KEYS), prepare=False).fetchone() or 0)


def _check_origin(conn: Connection[Any], schema: Schema) -> Iterator[Finding]:
    here, recorded = read_origin(conn, schema)
    if recorded is not None and recorded != here:
        text = (
            f"the rows were made in {recorded}, this is {here}: the next worker that starts records it when nothing"
            f" below says `{rebase_command(schema)}`"
        )
        yield Finding("origin", "", 1, [], text)


# One statement, so that each list is made once: what is counted, under the names of Sums, and what does not fit. Ends
# are told apart by the claim they quote, since what comes from elsewhere may bring numbers that are in use here.
BOOKS = """
    WITH member AS MATERIALIZED (
        SELECT c.slot, c.runtime, c.claim_id, c.queue, c.lane, m.entry_id, m.xid, m.idx::smallint AS idx
          FROM awa.claims c
         CROSS JOIN LATERAL unnest(c.entry_ids, c.xids) WITH ORDINALITY AS m(entry_id, xid, idx)
    ), completed AS MATERIALIZED (
        SELECT x.slot, x.claim_id, i.idx FROM awa.completions x CROSS JOIN LATERAL unnest(x.idx) AS i(idx)
    ), ended AS MATERIALIZED (
        SELECT e.slot, e.entry_id, e.outcome, e.claim_id, m.xid, m.claim_id IS NOT NULL AS is_member
          FROM awa.attempt_ends e
          LEFT JOIN member m ON m.slot = e.slot AND m.claim_id = e.claim_id AND m.entry_id = e.entry_id
    ), unclaimed AS MATERIALIZED (
        SELECT u.slot, u.entry_id, u.id FROM awa.unclaimed_entries() u
    ), running AS MATERIALIZED (
        SELECT o.slot, o.runtime, o.claim_id, o.entry_id, o.xid FROM awa.open_attempts() o
    ), live AS (
        SELECT u.id, u.slot, u.entry_id FROM unclaimed u
         UNION ALL
        SELECT DISTINCT j.id, j.slot, j.entry_id FROM running o JOIN awa.jobs j USING (slot, entry_id, xid)
         UNION ALL
        SELECT w.id, NULL, NULL FROM awa.waiting_jobs w
    ), finding(name, slot, number) AS (
        SELECT 'claimed_twice', m.slot, m.entry_id FROM member m GROUP BY m.slot, m.entry_id, m.xid HAVING count(*) > 1
         UNION ALL
        SELECT 'ended_twice', t.slot, t.entry_id
          FROM (SELECT m.slot, m.entry_id, m.xid FROM completed x JOIN member m USING (slot, claim_id, idx)
                 UNION ALL
                SELECT e.slot, e.entry_id, e.xid FROM ended e WHERE e.is_member) t
         GROUP BY t.slot, t.entry_id, t.xid HAVING count(*) > 1
         UNION ALL
        SELECT 'completed_unclaimed', x.slot, x.claim_id
          FROM completed x
         WHERE NOT EXISTS (SELECT FROM member m
                            WHERE m.slot = x.slot AND m.claim_id = x.claim_id AND m.idx = x.idx)
         UNION ALL
        -- what a claim sets aside it ends at once, without a row in claims
        SELECT 'ended_unclaimed', e.slot, e.entry_id
          FROM ended e WHERE NOT e.is_member AND e.claim_id IS NOT NULL AND e.outcome <> 'set_aside'
         UNION ALL
        SELECT 'ended_and_claimed', e.slot, e.entry_id
          FROM ended e
         WHERE NOT e.is_member AND (e.claim_id IS NULL OR e.outcome = 'set_aside')
           AND EXISTS (SELECT FROM member m WHERE m.slot = e.slot AND m.entry_id = e.entry_id)
         UNION ALL
        SELECT 'end_of_nothing', e.slot, e.entry_id
          FROM ended e WHERE NOT EXISTS (SELECT FROM awa.jobs j WHERE j.slot = e.slot AND j.entry_id = e.entry_id)
         UNION ALL
        SELECT 'claim_of_nothing', m.slot, m.entry_id
          FROM member m
         WHERE NOT EXISTS (SELECT FROM awa.jobs j
                            WHERE j.slot = m.slot AND j.queue = m.queue AND j.lane = m.lane AND j.xid = m.xid
                              AND j.entry_id = m.entry_id)
         UNION ALL
        SELECT 'shared_number', u.slot, u.entry_id
          FROM unclaimed u JOIN (SELECT j.entry_id FROM awa.jobs j GROUP BY j.entry_id HAVING count(*) > 1) t
         USING (entry_id)
         UNION ALL
        SELECT 'live_twice', NULL, l.id FROM live l GROUP BY l.id HAVING count(*) > 1
         UNION ALL
        -- rescue looks at what the last heartbeat listed and at every later claim
        SELECT 'forgotten', o.slot, o.entry_id
          FROM running o LEFT JOIN awa.runtime_instances r ON r.id = o.runtime
         WHERE r.id IS NULL OR r.ended_at IS NOT NULL
            OR (o.claim_id <= r.newest_claim AND o.claim_id <> ALL (r.open_claims))
    )
    SELECT 'entries', j.slot, count(*), NULL::bigint[] FROM awa.jobs j GROUP BY j.slot
     UNION ALL
    SELECT 'completed', x.slot, count(*), NULL FROM completed x GROUP BY x.slot
     UNION ALL
    SELECT 'ended', e.slot, count(*), NULL FROM awa.attempt_ends e GROUP BY e.slot
     UNION ALL
    SELECT 'available', u.slot, count(*), NULL FROM unclaimed u GROUP BY u.slot
     UNION ALL
    SELECT 'running', o.slot, count(*), NULL FROM running o GROUP BY o.slot
     UNION ALL
    SELECT f.name, f.slot, count(*), (array_agg(f.number ORDER BY f.number))[1:5] FROM finding f GROUP BY f.name, f.slot
     ORDER BY 1, 2
"""

_BOOKS = {
    "claimed_twice": "entries stand in two claims: each may have run twice",
    "ended_twice": "attempts have two ends: each was recorded twice",
    "completed_unclaimed": "completions are of no claim (the numbers are those of the claims)",
    "ended_unclaimed": "ends quote a claim that does not hold the entry",
    "ended_and_claimed": "entries were ended as if unclaimed, and are in a claim",
    "end_of_nothing": "ends are of entries that are not there",
    "claim_of_nothing": "members of claims are no entries: they were never there, or were lost",
    "shared_number": "open entries have a number that another entry has too: `{rebase}` gives them new ones",
    "live_twice": "jobs are to run twice: two open entries, or one and a place among the waiting (numbers of jobs)",
    "forgotten": "attempts are open at a worker that has left or forgot them; no rescue finds them: `{rebase}`",
}


def _read_books(conn: Connection[Any], schema: Schema) -> tuple[list[Sums], list[Finding]]:
    sums: list[dict[str, int]] = [{} for _ in range(8)]
    findings = []
    with conn.cursor(row_factory=tuple_row) as cursor:
        for name, slot, count, sample in cursor.execute(schema.sql(BOOKS), prepare=False).fetchall():
            if sample is None:
                sums[slot][name] = count
                continue
            text = f"{count} {_BOOKS[name].format(rebase=rebase_command(schema))}"
            findings.append(Finding(name, "" if slot is None else f"slot {slot}", count, sample, text))
    return [Sums(slot, **counts) for slot, counts in enumerate(sums)], findings


def _uneven(sums: Sums) -> Finding:
    ends = sums.completed + sums.ended
    text = (
        f"{sums.entries} entries, of which {ends} have ended and {sums.available + sums.running} have not, by their own"
        " counts: the findings below name the entries; the slot is never emptied"
    )
    return Finding("sums", f"slot {sums.slot}", abs(sums.entries - ends - sums.available - sums.running), [], text)


def _check_reach(conn: Connection[Any], schema: Schema) -> Iterator[Finding]:
    for found in find_unreachable(conn, schema):
        text = f"{found}: stop the workers and run `{rebase_command(schema)}`"
        yield Finding(found.what, f"queue {found.queue}", found.count, found.sample, text)


def _check_holders(conn: Connection[Any], schema: Schema) -> Iterator[Finding]:
    for found in find_mismatches(conn, schema):
        text = f"{found.count} {MISMATCHES[found.name]} (numbers of jobs)"
        yield Finding(found.name, f"queue {found.queue}", found.count, found.sample, text)


# A sequence is read as it is now, and the rest as the snapshot shows it: it may only be further on. A checkpoint that
# is newer than every claim to come would hide their frontiers, so it counts among the claims.
SEQUENCES = """
    SELECT s.name, s.sequence::oid::bigint AS sequence, pg_sequence_last_value(s.sequence) AS last, s.largest
      FROM (SELECT 'entry_id_seq' AS name, 'awa.entry_id_seq'::regclass AS sequence,
                   greatest((SELECT max(greatest(entry_id, id)) FROM awa.jobs),
                            (SELECT max(greatest(id, seq)) FROM awa.waiting_jobs),
                            (SELECT max(id) FROM awa.ended_jobs)) AS largest
             UNION ALL
            SELECT 'claim_id_seq', 'awa.claim_id_seq',
                   greatest((SELECT max(claim_id) FROM awa.claims), (SELECT max(claim_id) FROM awa.completions),
                            (SELECT max(claim_id) FROM awa.attempt_ends), (SELECT max(claim_id) FROM awa.frontiers))
             UNION ALL
            SELECT 'runtime_instances_id_seq', pg_get_serial_sequence('awa.runtime_instances', 'id')::regclass,
                   greatest((SELECT max(id) FROM awa.runtime_instances), (SELECT max(runtime) FROM awa.claims),
                            (SELECT max(runtime) FROM awa.gone_runtimes))) s
"""


@dataclass(frozen=True, slots=True)
class SequenceState:
    """How far one of the sequences is."""

    name: str
    """Which."""
    sequence: int
    """Its oid."""
    last: int | None
    """Its last value; None: never used."""
    largest: int | None
    """The largest number that stands in a row; None: in none."""

    @property
    def is_behind(self) -> bool:
        """It is about to give out a number that is in use."""
        return self.largest is not None and (self.last or 0) < self.largest


def read_sequences(conn: Connection[Any], schema: Schema) -> list[SequenceState]:
    """The sequences of entries, claims and runtimes, and the largest number each must have passed."""
    with conn.cursor(row_factory=class_row(SequenceState)) as cursor:
        return cursor.execute(schema.sql(SEQUENCES), prepare=False).fetchall()


def _check_sequences(conn: Connection[Any], schema: Schema) -> Iterator[Finding]:
    for state in read_sequences(conn, schema):
        if state.is_behind:
            text = (
                f"{state.name} is at {state.last or 0}, and {state.largest} is in use: the next numbers are taken;"
                f" `{rebase_command(schema)}` puts it right"
            )
            yield Finding("sequence", state.name, 1, [state.largest or 0], text)


RING = """
    SELECT pg_sequence_last_value('awa.ring_seq'),
           (SELECT count(*) FROM awa.ring r WHERE r.slot BETWEEN 0 AND 7)
"""


def _check_ring(conn: Connection[Any], schema: Schema) -> Iterator[Finding]:
    with conn.cursor(row_factory=tuple_row) as cursor:
        row = cursor.execute(schema.sql(RING), prepare=False).fetchone()
    assert row is not None
    current, slots = row
    if current is None:
        text = f"no slot is current (ring_seq has no value), so nothing can be inserted: `{rebase_command(schema)}`"
        yield Finding("ring", "ring_seq", 1, [], text)
    elif not 0 <= current <= 7:
        yield Finding("ring", "ring_seq", 1, [current], f"the current slot is {current}, and there are 0 to 7")
    if slots != 8:
        yield Finding("ring", "ring", 8 - slots, [], f"awa.ring has {slots} of the 8 slots")


PARTITIONS = """
    SELECT t.name || '_' || s.slot AS name,
           CASE WHEN c.oid IS NULL THEN 'missing'
                WHEN i.inhparent IS DISTINCT FROM p.oid OR i.inhdetachpending
                     OR pg_get_expr(c.relpartbound, c.oid) IS DISTINCT FROM 'FOR VALUES IN (''' || s.slot || ''')'
                     THEN 'detached'
                ELSE 'vacuumed' END AS state
      FROM unnest(ARRAY['jobs', 'claims', 'completions', 'attempt_ends']) AS t(name)
     CROSS JOIN generate_series(0, 7) AS s(slot)
      LEFT JOIN pg_class p ON p.oid = to_regclass('awa.' || t.name)
      LEFT JOIN pg_class c ON c.oid = to_regclass('awa.' || t.name || '_' || s.slot)
      LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
      LEFT JOIN pg_class o ON o.oid = c.reltoastrelid
     WHERE c.oid IS NULL
        OR i.inhparent IS DISTINCT FROM p.oid OR i.inhdetachpending
        OR pg_get_expr(c.relpartbound, c.oid) IS DISTINCT FROM 'FOR VALUES IN (''' || s.slot || ''')'
        OR NOT coalesce(c.reloptions, '{}') && '{autovacuum_enabled=off,autovacuum_enabled=false}'
        OR (o.oid IS NOT NULL
            AND NOT coalesce(o.reloptions, '{}') && '{autovacuum_enabled=off,autovacuum_enabled=false}')
     ORDER BY 1
"""

_PARTITIONS = {
    "missing": "partition {name} is missing: what belongs in it can be neither written nor read; restore it",
    "detached": "table {name} is not the partition for its slot: attach it again",
    "vacuumed": "partition {name} is open to autovacuum, which holds prune off: ALTER TABLE awa.{name} SET"
    " (autovacuum_enabled = off, toast.autovacuum_enabled = off)",
}


def _check_partitions(conn: Connection[Any], schema: Schema) -> Iterator[Finding]:
    with conn.cursor(row_factory=tuple_row) as cursor:
        for name, state in cursor.execute(schema.sql(PARTITIONS), prepare=False).fetchall():
            yield Finding(f"partition_{state}", name, 1, [], schema.sql(_PARTITIONS[state].format(name=name)))
