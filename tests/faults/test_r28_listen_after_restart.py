"""R28: a worker whose listening connection was lost went on deaf, and found jobs only by its poll.

Now the connection that listens is the one that claims: it is opened again with growing pauses, looks at once, and
takes its bells again.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import psycopg
import pytest

import awa
from awa.embedded import Server
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, ended, terminate


def test_ending_its_backend_costs_no_wake_up(
    client: awa.Client, start_worker: StartWorker, conn: psycopg.Connection[Any]
) -> None:
    @client.task()
    def work() -> None: ...

    start_worker(client, poll_interval=30)
    ended(client, client.insert(work.bind()))
    for _ in range(3):
        wait_until(lambda: terminate(conn, "worker"))
        in_the_gap = client.insert(work.bind())
        assert ended(client, in_the_gap, timeout=5).state == "completed"
        assert ended(client, client.insert(work.bind()), timeout=5).state == "completed"


@pytest.mark.slow
def test_after_a_restart_and_a_longer_outage_jobs_are_picked_up_soon(
    own_server: Server, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    database = own_server.url("awa")
    migrate(database, Schema())
    client = awa.Client(database)

    @client.task()
    def work() -> None: ...

    def connected() -> bool:
        with psycopg.connect(database, autocommit=True) as conn:
            found = conn.execute("SELECT 1 FROM pg_stat_activity WHERE application_name = 'awa worker'").fetchall()
            return bool(found)

    def insert_and_run() -> None:
        with psycopg.connect(database) as conn:
            job = client.insert(work.bind(), conn=conn)
        with psycopg.connect(database, autocommit=True) as conn:
            query = "SELECT state FROM awa.find_job_v1(%s)"
            wait_until(lambda: conn.execute(query, [job.id]).fetchone() == ("completed",), timeout=10)

    start_worker(client, poll_interval=30, heartbeat=0.5, stale_after=60)
    insert_and_run()
    own_server.stop("fast")
    own_server.start()
    insert_and_run()
    own_server.stop("immediate")
    caplog.clear()
    wait_until(lambda: sum("claiming failed" in record.getMessage() for record in caplog.records) >= 4, timeout=20)
    tries = [record.created for record in caplog.records if "claiming failed" in record.getMessage()]
    assert all(later - earlier >= 0.02 for earlier, later in pairwise(tries))
    own_server.start()
    insert_and_run()
    wait_until(connected)
    insert_and_run()
    assert not [record for record in caplog.records if record.levelno > logging.ERROR]
    client.close()
