"""Roles and databases with a stricter isolation by default; deadlocks and serialization failures of our own statements.

The library's own connections are at READ COMMITTED whatever the default says, since each claim, settle and fence must
see what was committed before it. A connection that is lent keeps what its owner chose.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import (
    StartWorker,
    WorkerProcesses,
    claimed_twice,
    count,
    count_running,
    ended,
    in_state,
)

Conn = psycopg.Connection[Any]


@pytest.fixture(params=["serializable", "repeatable read"])
def strict(request: pytest.FixtureRequest, database: str, conn: Conn) -> Iterator[str]:
    """The address of a database whose sessions are *strict* unless they say otherwise."""
    role = f"strict_{conn.info.dbname}"
    conn.execute(f"CREATE ROLE {role} LOGIN SUPERUSER")
    conn.execute(f"ALTER ROLE {role} SET default_transaction_isolation = '{request.param}'")
    address = make_conninfo(database, user=role)
    with psycopg.connect(address) as theirs:
        assert theirs.execute("SHOW transaction_isolation").fetchone() == (request.param,)
    yield address
    conn.execute(f"REASSIGN OWNED BY {role} TO CURRENT_USER; DROP OWNED BY {role}; DROP ROLE {role}")


def run(database: str, *command: str) -> Any:
    env = os.environ | {"AWA_DATABASE_URL": database}
    done = subprocess.run([sys.executable, "-m", "awa", *command], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_all_of_it_works_for_a_role_that_is_strict_by_default(
    strict: str, conn: Conn, start_worker: StartWorker, processes: WorkerProcesses
) -> None:
    """Guard: the isolation that pool.py sets. Without it nothing can be claimed: tried."""
    client = awa.Client(strict)
    go_on = threading.Event()
    tries: list[int] = []

    @client.task()
    def work() -> None: ...

    @client.task(retry=awa.fixed(0.05))
    def again() -> awa.Snooze | None:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("once")
        return awa.Snooze(0.05) if len(tries) == 2 else None

    @client.task()
    def wait() -> None:
        job = awa.current_job()
        while not job.cancelled:
            assert not go_on.wait(0.01)
        raise RuntimeError("cancelled")

    @client.task()
    def completing() -> None:
        job = awa.current_job()
        with client.connection() as borrowed, borrowed.transaction():
            assert borrowed.execute("SHOW transaction_isolation").fetchone() == ("read committed",)
            client.insert(work.bind(), conn=borrowed)
            job.complete(borrowed)

    worker = start_worker(client, threads=6, heartbeat=0.3, stale_after=1.0, rotate_after=0.5)
    soon = datetime.now(UTC) + timedelta(milliseconds=200)
    fine = [
        client.insert(work.bind()),
        *client.insert_many([awa.NewJob({}, kind="work", tags=["t"]) for _ in range(20)]),
        client.insert(work.bind(), delay=0.1),
        client.insert(work.bind(), run_at=soon, metadata={"a": 1}),
        client.insert(again.bind()),
        client.insert(completing.bind()),
    ]
    assert client.insert_many_copy([work.bind() for _ in range(600)]) == 600
    with psycopg.connect(strict) as lent:
        level = lent.execute("SHOW transaction_isolation").fetchone()
        fine += [client.insert(work.bind(), conn=lent), *client.insert_many([work.bind()] * 3, conn=lent)]
        client.insert_many_copy([work.bind()] * 3, conn=lent)
        assert lent.execute("SHOW transaction_isolation").fetchone() == level != ("read committed",)
    for job in fine:
        assert ended(client, job, timeout=20).state == "completed"
    assert len(tries) == 3

    asked, forced = client.insert(wait.bind()), client.insert(wait.bind())
    for job in (asked, forced):
        in_state(client, job, "running")
    assert client.cancel(asked.id).happened == "requested"
    assert client.cancel(forced.id, force=True).happened == "cancelled"
    assert {ended(client, job).state for job in (asked, forced)} == {"cancelled"}
    waiting, elsewhere = client.insert(work.bind(), delay=600), client.insert(work.bind(), queue="elsewhere")
    assert client.cancel(waiting.id).happened == "cancelled"
    assert client.admin.move(elsewhere.id, "default").happened == "moved"
    assert ended(client, elsewhere).state == "completed"
    assert client.admin.queue_counts("default")["default"]["completed"].value > 600
    assert len(client.admin.list_jobs("completed", limit=50).jobs) == 50

    processes.module("import awa, time\nclient = awa.Client()\n@client.task()\ndef sleep(): time.sleep(60)\n")
    victim = processes.start("app:client", "--queue", "victims", "--heartbeat", "0.3", AWA_DATABASE_URL=strict)
    rescued = client.insert({}, kind="sleep", queue="victims")
    in_state(client, rescued, "running", timeout=20)
    victim.signal(signal.SIGKILL)
    assert in_state(client, rescued, "available", timeout=20).attempt == 2
    wait_until(lambda: count(conn, "SELECT count(*) FROM awa.ring WHERE sealed_at IS NOT NULL") > 0, timeout=20)
    worker.stop()

    assert run(strict, "storage", "check", "--json")["is_sound"]
    assert len(run(strict, "storage", "status", "--json")["slots"]) == 8
    assert run(strict, "migrate", "--status", "--json")["is_current"]
    assert run(strict, "migrate", "--schema", "second", "--json")["applied"]
    client.close()


@pytest.mark.parametrize("how", ["one", "many"])
def test_a_deadlock_of_an_insert_with_somebody_elses_locks_is_tried_again(how: str, database: str, conn: Conn) -> None:
    """Guard: ``repeated``. Without it DeadlockDetected reaches the caller: tried.

    The insert holds ROW EXCLUSIVE on awa.jobs and waits for the partition, which the other holds; the other waits for
    awa.jobs. The insert looks for deadlocks first, and is the victim; nothing of it is left.
    """
    client = awa.Client(make_conninfo(database, options="-c deadlock_timeout=3s"))
    client.insert({}, kind="x")
    landed: list[int] = []

    def insert() -> None:
        if how == "one":
            landed.append(client.insert({}, kind="x").id)
        else:
            landed.extend(job.id for job in client.insert_many([awa.NewJob({}, kind="x")] * 2))

    with psycopg.connect(database, options="-c deadlock_timeout=60s") as other:
        slot = count(other, "SELECT pg_sequence_last_value('awa.ring_seq')")
        other.execute(f"LOCK TABLE awa.jobs_{slot} IN SHARE ROW EXCLUSIVE MODE")
        thread = threading.Thread(target=insert)
        thread.start()
        blocked = "SELECT count(*) FROM pg_locks WHERE relation = %s::regclass AND NOT granted"
        wait_until(lambda: count(conn, blocked, f"awa.jobs_{slot}") == 1, timeout=20)
        other.execute("LOCK TABLE awa.jobs IN SHARE ROW EXCLUSIVE MODE")  # had once the insert was undone
        assert not landed
        other.rollback()
        thread.join(30)
    assert len(landed) == (1 if how == "one" else 2)
    assert count(conn, "SELECT count(*) FROM awa.jobs") == 1 + len(landed)
    client.close()


FAILING = """
    CREATE SEQUENCE failures_{table};
    CREATE FUNCTION fail_{table}() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF nextval('failures_{table}') <= 3 THEN
            RAISE 'it cannot be' USING ERRCODE = '{state}';
        END IF;
        RETURN NEW;
    END $$;
    CREATE TRIGGER fail BEFORE INSERT OR UPDATE ON awa.{table} FOR EACH ROW EXECUTE FUNCTION fail_{table}();
"""

TABLES = ("jobs", "claims", "completions", "attempt_ends", "waiting_jobs", "leases", "runtime_instances")


@pytest.mark.parametrize("state", ["40001", "40P01"])
def test_failures_that_pass_reach_no_handler_and_end_no_thread(
    state: str, client: awa.Client, conn: Conn, start_worker: StartWorker
) -> None:
    """The server refuses the first writes to every table, as after a conflict: each is made again, and nothing is lost,
    counted or run twice. Guards: ``repeated``; PASSING in the claimer; backoff in the services."""
    for table in TABLES:
        conn.execute(FAILING.format(table=table, state=state))
    raised: list[BaseException] = []
    runs: list[int] = []

    @client.task()
    def child() -> None:
        runs.append(awa.current_job().id)

    @client.task(max_attempts=1)
    def parent() -> None:
        runs.append(awa.current_job().id)
        try:
            client.insert(child.bind())
            client.insert_many([child.bind(), child.bind()])
            client.insert(child.bind(), delay=0.05)
        except BaseException as error:
            raised.append(error)
            raise

    snoozed: list[int] = []

    @client.task(max_attempts=1)
    def snooze() -> awa.Snooze | None:
        snoozed.append(1)
        return awa.Snooze(0.01) if len(snoozed) == 1 else None

    worker = start_worker(client, threads=3, heartbeat=0.2, stale_after=20)
    runtime = worker.runtime
    parents = [client.insert(parent.bind()) for _ in range(3)]
    jobs = [*parents, client.insert(snooze.bind())]
    for job in jobs:
        info = ended(client, job, timeout=30)
        assert (info.state, info.attempt) == ("completed", 1)
    wait_until(lambda: len(runs) == 3 + 3 * 4 and count_running(conn) == 0, timeout=30)
    wait_until(lambda: all(count(conn, f"SELECT last_value FROM failures_{table}") > 3 for table in TABLES), timeout=30)
    assert raised == []
    assert len(runs) == len(set(runs))
    assert claimed_twice(conn) == []
    assert all(thread.is_alive() for thread in worker._threads)
    assert all(service.is_alive for service in worker._services)
    assert worker.runtime == runtime
    assert count(conn, "SELECT count(*) FROM awa.gone_runtimes") == 0
