"""R53: ids beyond 32 bits broke a column, a cast or a client.

Now every id is 64 bits wide on its whole way: rows, arrays, statements and Python.
"""

from __future__ import annotations

import threading
from typing import Any

import psycopg

import awa
from awa.storage.check import check_storage
from awa.storage.schema import Schema
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, ended, fence, in_state, rescue

START = 2**31 - 2

SEQUENCES = """
    SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname)
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.relkind = 'S' AND n.nspname = 'awa' AND c.relname NOT LIKE 'ring%'
"""


def test_everything_passes_beyond_2_to_the_31(
    client: awa.Client, database: str, start_worker: StartWorker, conn: psycopg.Connection[Any]
) -> None:
    sequences = [row[0] for row in conn.execute(SEQUENCES).fetchall()]
    assert len(sequences) >= 3
    for sequence in sequences:
        conn.execute("SELECT setval(%s::regclass, %s)", [sequence, START])
    started = threading.Event()
    go_on = threading.Event()

    @client.task(retry=awa.fixed(0))
    def work(what: str) -> Any:
        job = awa.current_job()
        match what:
            case "complete":
                with psycopg.connect(database) as own:
                    job.complete(own)
            case "retry" if job.attempt < 3:
                raise ValueError("again")
            case "fail":
                raise awa.TerminalError("no")
            case "cancel":
                return awa.Cancel("no")
            case "snooze" if job.metadata == {} and not started.is_set():
                return awa.Snooze(60)
            case "rescue" if job.attempt == 1:
                started.set()
                assert go_on.wait(10)
        return None

    @client.task()
    def long(text: str) -> None: ...

    worker = start_worker(client, heartbeat=0.1, stale_after=30)
    assert worker.runtime > START
    jobs = [client.insert(work.bind(what)) for what in ("ok", "complete", "retry", "fail", "cancel")]
    jobs += client.insert_many([work.bind("ok") for _ in range(50)])
    jobs.append(client.insert(long.bind("x" * 200_000)))
    states = [ended(client, job).state for job in jobs]
    assert states == ["completed"] * 3 + ["failed", "cancelled"] + ["completed"] * 51
    assert all(job.id > START for job in jobs)
    assert client.get(jobs[2].id).attempt == 3
    assert in_state(client, client.insert(work.bind("snooze")), "scheduled").id > 2**31
    assert client.insert(work.bind("ok"), delay=3600).id > 2**31
    rescued = client.insert(work.bind("rescue"))
    assert started.wait(10)
    runtime = worker.runtime
    fence(conn, runtime)
    rescue(conn, runtime)
    go_on.set()
    assert ended(client, rescued).attempt == 2
    unknown = client.insert({}, kind="nobody")
    in_state(client, unknown, "available")
    worker.stop()
    assert count(conn, "SELECT min(claim_id) FROM awa.claims WHERE cardinality(entry_ids) > 0") > START
    assert worker.runtime > runtime > START


def test_operators_and_maintenance_pass_beyond_2_to_the_31(
    client: awa.Client, start_worker: StartWorker, conn: psycopg.Connection[Any]
) -> None:
    """Guard: as above, for what looks at jobs, cancels, moves, promotes, carries, summarizes, deletes and empties."""
    for (sequence,) in conn.execute(SEQUENCES).fetchall():
        conn.execute("SELECT setval(%s::regclass, %s)", [sequence, START])
    begun, go_on = threading.Semaphore(0), threading.Event()

    @client.task(max_attempts=1, timeout=60)
    def work(what: str) -> None:
        if what == "fail":
            raise ValueError("no")
        if what == "hold":
            begun.release()
            while not awa.current_job().cancelled and not go_on.wait(0.01):
                pass
            raise ValueError("told")

    assert client.insert_many_copy([work.bind("copied")] * 100) == 100
    fails = client.insert_many([work.bind("fail")] * 3)
    soon = client.insert(work.bind("soon"), delay=0.2)
    other = client.insert(work.bind("moved"), queue="elsewhere")
    later = client.insert(work.bind("later"), delay=3600)
    asked, forced = (client.insert(work.bind("hold"), priority=4) for _ in range(2))
    settings = {"completed_retention": 3.0, "failed_retention": 3.0, "rotate_after": 0.5}
    worker = start_worker(client, heartbeat=0.1, stale_after=30, **settings)
    for _ in range(2):
        assert begun.acquire(timeout=20)
    assert client.admin.move(other.id, "default").happened == "moved"
    assert client.cancel(later.id).happened == "cancelled"
    assert client.cancel(asked.id).happened == "requested"
    assert client.cancel(forced.id, force=True).happened == "cancelled"
    for job, state in ((soon, "completed"), (other, "completed"), (asked, "cancelled"), (forced, "cancelled")):
        assert ended(client, job).state == state
    go_on.set()
    seen = {job.id for state in awa.JobState for job in client.admin.list_jobs(state, limit=1000).jobs}
    assert seen and min(seen) > START
    # failed and cancelled ones are deleted, the segment is emptied, and what is left of it is carried
    wait_until(lambda: count(conn, "SELECT count(*) FROM awa.ended_jobs") == 0, timeout=20)
    assert {job.id for job in fails}.isdisjoint(job.id for job in client.admin.list_jobs("failed").jobs)
    waiting = client.insert(work.bind("carried"), queue="nobody")
    carried = "SELECT count(*) FROM awa.jobs WHERE id = %s AND entry_id <> id"
    wait_until(lambda: count(conn, carried, waiting.id) > 0, timeout=30)
    assert client.get(waiting.id).state == "available"
    wait_until(lambda: count(conn, "SELECT count(*) FROM awa.jobs WHERE id = %s", soon.id) == 0, timeout=30)
    assert check_storage(conn, Schema()).is_sound
    worker.stop()


NARROW_ARGUMENTS = """
    SELECT p.proname, a.name, a.type::regtype::text
      FROM pg_proc p
      JOIN pg_namespace n ON n.oid = p.pronamespace
     CROSS JOIN LATERAL unnest(p.proargnames, coalesce(p.proallargtypes, p.proargtypes::oid[])) AS a(name, type)
     WHERE n.nspname = 'awa'
       AND (a.name ~ '(^|_)(id|ids|runtime|claim|claims|entry|entries|flush|seq)$')
       AND a.type::regtype::text NOT IN ('bigint', 'bigint[]')
"""

DECLARED = r"""
    SELECT p.proname, d[1], d[2]
      FROM pg_proc p
      JOIN pg_namespace n ON n.oid = p.pronamespace
     CROSS JOIN LATERAL regexp_matches(
           p.prosrc, '^\s+(\w*(?:id|ids|runtime|claim|claims|entry|entries|flush))\s+(\w+)', 'gn') d
     WHERE n.nspname = 'awa' AND d[2] IN ('integer', 'int', 'int4', 'smallint')
"""

CASTS = r"""
    SELECT p.proname, c[1]
      FROM pg_proc p
      JOIN pg_namespace n ON n.oid = p.pronamespace
     CROSS JOIN LATERAL regexp_matches(
           p.prosrc, '(\w*(?:_id|_ids|runtime|claim|entry))(?:::|\s+AS\s+)(?:integer|int)\M', 'g') c
     WHERE n.nspname = 'awa'
"""


def test_every_argument_variable_and_cast_of_an_id_is_64_bits_wide(conn: psycopg.Connection[Any]) -> None:
    """Guard: the types in migrations/; one that is narrower fails only after two thousand million jobs."""
    # the claims' "entry" arrays of a walk are named so too, and are bigint[]; runtimes are told by number everywhere
    assert conn.execute(NARROW_ARGUMENTS).fetchall() == []
    assert conn.execute(DECLARED).fetchall() == []
    assert conn.execute(CASTS).fetchall() == []
    found = conn.execute(NARROW_ARGUMENTS.replace("NOT IN", "IN")).fetchall()
    assert len(found) > 20, "the query finds what it is about"
    assert conn.execute(DECLARED.replace("('integer', 'int', 'int4', 'smallint')", "('bigint')")).fetchall()


NARROW = """
    SELECT c.relname, a.attname
      FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname = 'awa' AND c.relkind IN ('r', 'p') AND a.attnum > 0
       AND a.attname <> 'pid'  -- the operating system's number, not ours
       AND (a.attname ~ '(^|_)ids?$'
            OR a.attname IN ('runtime', 'newest_claim', 'open_claims', 'seq', 'flush', 'epoch'))
       AND a.atttypid::regtype::text NOT IN ('bigint', 'bigint[]', 'uuid', 'xid8', 'xid8[]')
"""


def test_every_id_column_and_sequence_is_64_bits_wide(conn: psycopg.Connection[Any]) -> None:
    assert conn.execute(NARROW).fetchall() == []
    assert (
        conn.execute(
            """SELECT sequencename, data_type::text FROM pg_sequences
            WHERE schemaname = 'awa' AND data_type <> 'bigint'::regtype"""
        ).fetchall()
        == []
    )
