"""R53: ids beyond 32 bits broke a column, a cast or a client.

Now every id is 64 bits wide on its whole way: rows, arrays, statements and Python.
"""

from __future__ import annotations

import threading
from typing import Any

import psycopg

import awa
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
