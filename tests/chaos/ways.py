"""The ways of inserting, and which producer uses which: ``python -m tests.chaos.ways NAME`` is one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import psycopg
from psycopg import IsolationLevel
from psycopg.types.json import Json

from tests.chaos.plan import Network, Plan
from tests.chaos.producer import Producer, Undone

Way = Callable[[Producer], None]


def single(p: Producer) -> None:
    """In a transaction of the library's own."""
    marks = p.marks(1)
    with p.deed(marks, has_row=False) as deed:
        deed.fate = "unknown"
        p.client.insert(p.job(marks[0]))


def single_lent(p: Producer) -> None:
    """Beside a row of the application."""
    marks = p.marks(1)
    with p.deed(marks, has_row=True) as deed, p.lent(deed) as conn:
        p.add_rows(conn, marks)
        p.client.insert(p.job(marks[0]), conn=conn)


def many(p: Producer) -> None:
    marks = p.marks(40)
    with p.deed(marks, has_row=False) as deed:
        deed.fate = "unknown"
        p.client.insert_many(p.jobs(marks))


def many_lent(p: Producer) -> None:
    marks = p.marks(40)
    with p.deed(marks, has_row=True) as deed, p.lent(deed) as conn:
        p.client.insert_many(p.jobs(marks), conn=conn)
        p.add_rows(conn, marks)


def copy(p: Producer) -> None:
    marks = p.marks(400)
    with p.deed(marks, has_row=False) as deed:
        deed.fate = "unknown"
        p.client.insert_many_copy(p.jobs(marks))


def copy_lent(p: Producer) -> None:
    marks = p.marks(400)
    with p.deed(marks, has_row=True) as deed, p.lent(deed) as conn:
        p.add_rows(conn, marks)
        p.client.insert_many_copy(p.jobs(marks), conn=conn)


def rolled_back(p: Producer) -> None:
    marks = p.marks(30)
    with p.deed([], marks, has_row=True) as deed, p.lent(deed) as conn:
        p.add_rows(conn, marks)
        p.client.insert_many(p.jobs(marks[1:]), conn=conn)
        p.client.insert(p.job(marks[0]), conn=conn)
        p.pause(0.02)
        raise Undone


def savepoint(p: Producer) -> None:
    """Some are inserted in savepoints that are rolled back to, some in savepoints that are released."""
    kept, undone, after = p.marks(5), p.marks(5), p.marks(5)
    with p.deed(kept + after, undone, has_row=True) as deed, p.lent(deed) as conn:
        with conn.transaction():
            p.client.insert_many(p.jobs(kept), conn=conn)
            p.add_rows(conn, kept)
        try:
            with conn.transaction():
                p.client.insert_many(p.jobs(undone), conn=conn)
                p.add_rows(conn, undone)
                raise Undone
        except Undone:
            pass
        p.client.insert_many(p.jobs(after), conn=conn)
        p.add_rows(conn, after)


def held(p: Producer) -> None:
    """A transaction that stays open for seconds and inserts now and then."""
    marks = p.marks(8)
    with p.deed(marks, has_row=True) as deed, p.lent(deed) as conn:
        for mark in marks:
            p.add_rows(conn, [mark])
            p.client.insert(p.job(mark), conn=conn)
            p.pause(0.5)


def with_old_snapshot(p: Producer) -> None:
    """A transaction that looks, waits, and inserts with what it saw."""
    marks = p.marks(8)
    conn = p.connection()
    conn.isolation_level = p.random.choice([IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE])
    try:
        with p.deed(marks, has_row=True) as deed, p.lent(deed) as conn:
            conn.execute("SELECT count(*) FROM app.orders WHERE mark = 0")
            p.pause(1.0)
            p.client.insert_many(p.jobs(marks), conn=conn)
            p.add_rows(conn, marks)
    finally:
        if not conn.closed:
            conn.isolation_level = None


def delayed(p: Producer) -> None:
    marks = p.marks(10)
    with p.deed(marks, has_row=True) as deed, p.lent(deed) as conn:
        p.client.insert_many([p.job(mark, delay=p.random.uniform(0, 3)) for mark in marks], conn=conn)
        p.add_rows(conn, marks)


def dependents(p: Producer) -> None:
    """Some jobs, and others that run after one or a few of all that are there by then."""
    marks = p.marks(12)
    with p.deed(marks, has_row=True) as deed, p.lent(deed) as conn:
        jobs = [p.client.insert(p.job(marks[0]), conn=conn)]
        for mark in marks[1:]:
            after = p.random.sample(jobs, p.random.randint(1, min(3, len(jobs))))
            failed = p.random.choice([None, "cancel", "run"])
            later = p.random.choice([None, None, p.random.uniform(0, 3)])
            jobs.append(p.client.insert(p.job(mark, after=after, after_failed=failed, delay=later), conn=conn))
        p.add_rows(conn, marks)


def followed(p: Producer) -> None:
    """With a job for each way to end."""
    marks = p.marks(10)
    with p.deed(marks, has_row=True) as deed, p.lent(deed) as conn:
        p.client.insert_many([p.parent(mark) for mark in marks], conn=conn)
        p.add_rows(conn, marks)


PLAIN = "INSERT INTO awa.jobs (kind, args) VALUES ('nothing', %s)"


def plain_sql(p: Producer) -> None:
    """As somebody types it into psql: two columns, no bell."""
    marks = p.marks(1)
    with p.deed(marks, has_row=True) as deed, p.lent(deed) as conn:
        conn.execute(PLAIN, [Json({"mark": marks[0]})])
        p.add_rows(conn, marks)


def two_phase(p: Producer) -> None:
    """Prepared, left for a while, then committed or rolled back."""
    marks = p.marks(10)
    is_meant = p.random.random() < 0.7
    conn = p.connection()
    conn.autocommit = False  # psycopg wants it so
    with p.deed(marks if is_meant else [], [] if is_meant else marks, has_row=True) as deed:
        conn.tpc_begin(conn.xid(0, f"{p.who}-{marks[0]}", "chaos"))
        try:
            p.add_rows(conn, marks)
            p.client.insert_many(p.jobs(marks), conn=conn)
            conn.tpc_prepare()
            p.pause(0.7)
            if is_meant:
                deed.fate = "unknown"
                conn.tpc_commit()
            else:
                conn.tpc_rollback()
        except psycopg.Error:
            # what is left prepared is decided as meant, but perhaps it never was prepared
            deed.fate = "unknown" if is_meant else deed.fate
            conn.close()
            finish_prepared(p)
            raise


def finish_prepared(p: Producer) -> None:
    """Roll back what this producer, or one before it that was killed, left prepared."""
    try:
        conn = p.connection()
        for xid in conn.tpc_recover():
            if xid.bqual == "chaos":
                conn.tpc_rollback(xid)
    except psycopg.Error as error:
        p.tell(str(error))


def hold_snapshot(p: Producer) -> None:
    """Read under one snapshot for seconds, like a report or a dump."""
    with p.deed([], has_row=False) as deed, p.lent(deed) as conn:
        conn.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        # the first keeps segments from being emptied
        conn.execute(f"SELECT count(*) FROM awa.{p.random.choice(['jobs', 'waiting_jobs', 'waiting_jobs'])}")
        time.sleep(p.random.uniform(0.5, 4.0))
        conn.execute("SELECT count(*) FROM app.orders WHERE mark = 0")


KNOWN = """
    SELECT job
      FROM (SELECT job, at, EXISTS (SELECT FROM ledger.ends x WHERE x.entry_id = e.entry_id) AS has_ended
              FROM ledger.entries e
             UNION ALL
            SELECT job, at, false FROM ledger.waits) t
     WHERE at > clock_timestamp() - interval '20 s'
     ORDER BY has_ended AND random() < 0.9, random()
     LIMIT 1
"""

"""Any job of late, mostly one that has not ended."""

RUNNING = """
    SELECT e.job
      FROM ledger.claims c CROSS JOIN LATERAL unnest(c.entry_ids) m JOIN ledger.entries e ON e.entry_id = m
     WHERE c.at > clock_timestamp() - interval '4 s'
       AND NOT EXISTS (SELECT FROM ledger.ends x WHERE x.entry_id = m)
     ORDER BY random()
     LIMIT 1
"""


def operate(p: Producer) -> None:
    """Cancel a job, whatever it does just now, or move it."""
    row = p.connection().execute(p.random.choice([KNOWN, RUNNING])).fetchone()
    if row is None:
        return
    job = int(row[0])
    is_forced = p.random.random() < 0.4
    with p.deed([], has_row=False):
        if p.random.random() < 0.5:
            p.control(job, "move", lambda: p.client.admin.move(job, p.random.choice(["default", "bulk"])))
        else:
            p.control(job, "cancel", lambda: p.client.cancel(job, reason="chaos", force=is_forced))


@dataclass(frozen=True, slots=True)
class Mode:
    """What one producer does."""

    ways: list[tuple[Way, float]]
    """Each with how often, in parts of their sum."""
    rest: float
    """Mean seconds between two deeds."""
    network: Network = "direct"
    """What is between it and the servers."""
    notify: bool = True
    """Whether its inserts ring."""
    prepare: Way | None = None
    """Done first."""


PRODUCERS = {
    "single": Mode([(single, 1), (single_lent, 1), (plain_sql, 0.3)], 0.015),
    "batch": Mode([(many, 2), (many_lent, 2), (copy, 0.3), (copy_lent, 0.3)], 0.4, "cut"),
    "undone": Mode([(rolled_back, 1), (savepoint, 1)], 0.1, "pooled"),
    "held": Mode([(held, 1)], 0.3, "cut"),
    "old": Mode([(with_old_snapshot, 1)], 0.3),
    "delayed": Mode([(delayed, 1), (followed, 1)], 0.2, "pooled"),
    "dependents": Mode([(dependents, 1)], 0.2),
    "two-phase": Mode([(two_phase, 1)], 0.3, "cut", notify=False, prepare=finish_prepared),
    "operator": Mode([(operate, 1)], 0.3, "cut"),
    "reader": Mode([(hold_snapshot, 1)], 3.0),
}


def main(name: str) -> None:
    mode = PRODUCERS[name]
    producer = Producer(Plan.of_this_process(), name, notify=mode.notify)
    if mode.prepare is not None:
        mode.prepare(producer)
    producer.work(mode.ways, mode.rest)


if __name__ == "__main__":
    main(sys.argv[1])
