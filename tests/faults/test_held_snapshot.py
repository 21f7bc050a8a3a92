"""R52: another session held an old snapshot for half an hour, dead rows piled up, and claims waded through them.

Now what happens to every job only appends, so there is nothing to wade through; what keeps ordinary rows (jobs that
wait for a time, signs of life, the lease) is looked at from a little behind now. And the library holds no transaction
open while a handler runs. Scaled to seconds; what is compared is pages read, not time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import awa
from awa.embedded import Binaries, Server
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from tests.fixtures.db import short_directory, wait_until
from tests.fixtures.jobs import StartWorker, count, ended
from tests.storage import engine

Conn = psycopg.Connection[Any]

SEGMENTED = r"^(jobs|claims|completions|attempt_ends)_\d$"


@pytest.fixture
def vacuuming(binaries: Binaries) -> Iterator[str]:
    """A migrated database whose server looks every second for what wants to be vacuumed."""
    with short_directory() as directory:
        server = Server(binaries, directory / "pg", settings={"autovacuum_naptime": "1s", "fsync": "off"})
        try:
            server.start()
            migrate(server.url("postgres"), Schema())
            yield server.url("postgres")
        finally:
            server.stop("immediate")


def pages(conn: Conn, query: str, *params: object) -> int:
    """How many pages *query* reads, the statements of the functions that it calls included."""
    with conn.transaction(force_rollback=True):
        plan = engine.scalar(conn, "EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) " + query, *params)
    found = plan if isinstance(plan, list) else json.loads(plan)
    return int(found[0]["Plan"]["Shared Hit Blocks"] + found[0]["Plan"]["Shared Read Blocks"])


def costs(conn: Conn, runtime: int) -> dict[str, int]:
    """Pages that the next claim of ten jobs reads, a claim that finds nothing, and a quick pass of promotion."""
    claim = "SELECT * FROM awa.claim_v1(%s, %s::bigint, '{noop}', 10, false)"
    engine.insert(conn, *range(10), queue="probe")
    engine.claim(conn, runtime, queue="warm")
    found = {
        "claim": pages(conn, claim, "probe", runtime),
        "empty claim": pages(conn, claim, "default", runtime),
        "promotion": pages(conn, "SELECT awa.promote_v1(clock_timestamp() - interval '2 s', 1000)"),
    }
    engine.settle(conn, runtime, engine.claim(conn, runtime, queue="probe").members)
    return found


@pytest.mark.slow
def test_claims_and_promotion_cost_the_same_under_an_old_snapshot_and_vacuum_comes_by_itself(
    vacuuming: str, start_worker: StartWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guard: no row of the ring is ever updated or deleted; promotion looks back no further than its floor."""
    client = awa.Client(vacuuming)

    @client.task(retry=awa.fixed(0.1))
    def work(fails: bool) -> None:
        if fails and awa.current_job().attempt == 1:
            raise ValueError("again")

    with psycopg.connect(vacuuming, autocommit=True) as conn, psycopg.connect(vacuuming) as holder:
        runtime = engine.register(conn)
        start_worker(client, threads=4, heartbeat=0.3, stale_after=60)
        for _ in range(20):  # what a session reads once to know the tables is no cost of a claim
            before = costs(conn, runtime)
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("SELECT count(*) FROM awa.jobs")
        begun = time.monotonic()
        jobs: list[awa.Inserted] = []
        for number in range(100):  # 5,000 jobs at 500 a second or less, a fifth of which waits for a time
            items = [awa.NewJob(work.bind(n == 0), delay=0.2 if n % 5 == 1 else None) for n in range(50)]
            jobs += client.insert_many(items)
            time.sleep(max(begun + number * 0.1 - time.monotonic(), 0.0))
        done = "SELECT coalesce(sum(cardinality(idx)), 0) FROM awa.completions"
        wait_until(lambda: count(conn, done) >= len(jobs), timeout=60)
        time.sleep(2.5)  # beyond the floor of promotion
        after = costs(conn, runtime)

        def read_tuples() -> dict[str, tuple[int, int]]:
            conn.execute("SELECT pg_stat_clear_snapshot()")
            rows = conn.execute(
                "SELECT relname, n_dead_tup, n_tup_upd + n_tup_del FROM pg_stat_user_tables WHERE schemaname = 'awa'"
            )
            return {name: (dead, changed) for name, dead, changed in rows.fetchall()}

        waited = 1000 + 100
        wait_until(lambda: read_tuples()["waiting_jobs"][1] >= waited, timeout=20)
        tuples = read_tuples()
        with capsys.disabled():
            dead = {name: found for name, (found, _) in tuples.items() if found and name != "claims_0"}
            print(f"\nunder a snapshot held for {time.monotonic() - begun:.0f} s: dead rows {dead}; pages read by")
            print("; ".join(f"{name}: {before[name]} before, {after[name]} after" for name in before))
        segmented = "SELECT relname FROM pg_stat_user_tables WHERE schemaname = 'awa' AND relname ~ %s"
        for (name,) in conn.execute(segmented, [SEGMENTED]).fetchall():
            dead_rows, changed = tuples[name]
            assert changed == 0, f"{name}: rows were updated or deleted"
            assert dead_rows <= 21, f"{name}: more dead rows than the claims of this test that were rolled back"
        assert tuples["waiting_jobs"][0] >= waited, "they cannot be vacuumed while the snapshot is held"
        for name, read in after.items():
            assert read <= 2 * before[name] + 60, f"{name}: {before[name]} pages before, {read} after"
        full = pages(conn, "SELECT awa.promote_v1('-infinity', 1000)")
        assert full > 5 * after["promotion"], "a pass over everything does read them"
        holder.rollback()
        # nobody calls VACUUM: what autovacuum does by the settings of the table is enough
        wait_until(lambda: read_tuples()["waiting_jobs"][0] < 100, timeout=60)
        assert ended(client, client.insert(work.bind(False))).state == "completed"
    client.close()


OPEN = """
    SELECT pid, xact_start, state
      FROM pg_stat_activity
     WHERE datname = current_database() AND application_name LIKE 'awa %' AND xact_start IS NOT NULL
       AND pid <> pg_backend_pid()
"""


def test_no_transaction_of_the_library_is_open_while_a_handler_runs(
    client: awa.Client, start_worker: StartWorker, database: str, conn: Conn
) -> None:
    """Guard: claim, settle, signs of life and maintenance are each one statement that commits by itself."""
    seen: list[tuple[set[Any], set[Any]]] = []
    idle: list[Any] = []

    @client.task()
    def look(n: int) -> None:
        with psycopg.connect(database, autocommit=True) as own:
            begin = own.execute(OPEN).fetchall()
            time.sleep(0.25)
            end = own.execute(OPEN).fetchall()
        seen.append(({row[:2] for row in begin}, {row[:2] for row in end}))
        idle.extend(row for row in (*begin, *end) if row[2].startswith("idle in transaction"))

    @client.task()
    def busy(n: int) -> None:
        with client.connection() as borrowed:
            borrowed.execute("SELECT 1")

    start_worker(client, threads=4, heartbeat=0.1, stale_after=60, rotate_after=0.2, completed_retention=1)
    for n in range(12):
        client.insert_many([busy.bind(n)] * 20)
        client.insert(look.bind(n), delay=0.05 * (n % 3))
    wait_until(lambda: len(seen) == 12, timeout=30)
    assert idle == []
    for begin, end in seen:
        assert not begin & end, "a transaction was open from the handler's begin to its end"
