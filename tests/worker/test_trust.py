"""A worker on a schema whose rows are another cluster's: it leaves with exit code 4 and has touched nothing."""

from __future__ import annotations

import logging
from typing import Any

import psycopg
import pytest

import awa
from awa.errors import StorageNotTrusted
from awa.storage.schema import Schema
from awa.storage.trust import check_origin
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, WorkerProcesses, count, ended, terminate

Conn = psycopg.Connection[Any]

APP = """
    import time

    import awa

    client = awa.Client()


    @client.task()
    def work(seconds: float) -> None:
        time.sleep(seconds)


    @client.on_worker_start
    def say() -> None:
        print("the hook ran", flush=True)
"""

HIDE_A_JOB = (
    "INSERT INTO awa.jobs (xid, kind, queue, args) VALUES ('9000000000', 'work', 'default', '{\"seconds\": 0}')"
)


OURS = """
    SELECT pid FROM pg_stat_activity
     WHERE datname = current_database()
       AND application_name IN ('awa worker', 'awa maintenance', 'awa heartbeat', 'awa report')
"""

TABLES = ("claims", "completions", "attempt_ends", "waiting_jobs", "runtime_instances", "leases")


def books(conn: Conn) -> list[object]:
    """All that a worker writes."""
    return [conn.execute(f"SELECT t::text FROM awa.{table} t ORDER BY 1").fetchall() for table in TABLES]


def disconnect(conn: Conn) -> list[object]:
    """End every connection of a worker; what was written when the last was gone."""
    gone = {row[0] for row in conn.execute(OURS).fetchall()}
    for name in ("worker", "maintenance", "heartbeat", "report"):
        assert terminate(conn, name) == 1
    wait_until(lambda: not gone & {row[0] for row in conn.execute(OURS).fetchall()})
    return books(conn)


def become_a_copy(conn: Conn) -> None:
    """As if the rows had been restored here from another cluster, with one that claims would not come to."""
    conn.execute(HIDE_A_JOB)
    conn.execute("UPDATE awa.origin SET system_identifier = 4711")


def test_it_does_not_start_on_an_untrusted_copy(processes: WorkerProcesses, conn: Conn) -> None:
    become_a_copy(conn)
    processes.module(APP)
    process = processes.start("app:client", "--threads", "2")
    assert process.wait(30.0) == 4, process.stderr
    told = [line for line in process.stderr.splitlines() if line.startswith("awa: ")]
    assert told == process.stderr.splitlines()[-1:]
    assert "1 open jobs of queue default are of transactions that this server has not had yet" in told[0]
    assert "run `awa storage rebase`" in told[0]
    assert "Traceback" not in process.stderr
    for table in ("runtime_instances", "claims", "leases", "attempt_ends"):
        assert count(conn, f"SELECT count(*) FROM awa.{table}") == 0


def test_start_raises_before_any_hook_has_run(client: awa.Client, conn: Conn, start_worker: StartWorker) -> None:
    hooked: list[str] = []

    @client.task()
    def work() -> None: ...

    client.on_worker_start(lambda: hooked.append("start"))
    become_a_copy(conn)
    with pytest.raises(StorageNotTrusted):
        start_worker(client)
    assert hooked == []


@pytest.mark.parametrize("is_in_doubt", [False, True], ids=["at rest", "with a job at hand"])
def test_it_ends_when_it_reconnects_to_an_untrusted_copy(
    processes: WorkerProcesses, conn: Conn, is_in_doubt: bool
) -> None:
    """After a failover by name, the address leads to another server."""
    check_origin(conn, Schema())
    processes.module(APP)
    process = processes.start("app:client", "--threads", "2", "--shutdown-timeout", "3")
    wait_until(lambda: "runs default" in process.stderr, timeout=30.0)
    if is_in_doubt:
        conn.execute("INSERT INTO awa.jobs (kind, args) VALUES ('work', '{\"seconds\": 1.0}')")
        wait_until(lambda: count(conn, "SELECT count(*) FROM awa.claims WHERE entry_ids <> '{}'"), timeout=15.0)
    wait_until(lambda: len(conn.execute(OURS).fetchall()) == 4, timeout=15.0)
    become_a_copy(conn)
    before = disconnect(conn)
    assert process.wait(30.0) == 4, process.stderr
    assert process.stderr.count("gives up") == 1
    assert "run `awa storage rebase`" in process.stderr.splitlines()[-1]
    assert books(conn) == before


def test_registering_anew_on_an_untrusted_copy_ends_it(processes: WorkerProcesses, conn: Conn) -> None:
    processes.module(APP)
    process = processes.start("app:client", "--threads", "2")
    wait_until(lambda: "runs default" in process.stderr, timeout=30.0)
    become_a_copy(conn)
    conn.execute("INSERT INTO awa.gone_runtimes (runtime) SELECT id FROM awa.runtime_instances")
    assert process.wait(30.0) == 4, process.stderr
    assert count(conn, "SELECT count(*) FROM awa.runtime_instances") == 1


def test_a_trusted_copy_is_worked_on(
    client: awa.Client, conn: Conn, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    @client.task()
    def work() -> None: ...

    job = client.insert(work.bind())
    conn.execute("UPDATE awa.origin SET system_identifier = 4711")
    with caplog.at_level(logging.WARNING):
        start_worker(client)
        assert ended(client, job).state == "completed"
    assert [record.name for record in caplog.records] == ["awa.storage"]
