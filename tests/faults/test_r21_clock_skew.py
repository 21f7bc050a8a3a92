"""R21: hosts whose clocks were minutes off ran jobs early or late, and rescued healthy workers.

Now every stored time comes from the database's clock and is compared with it: a producer sends how long to wait, not
until when, and a worker's own clock decides nothing. Here the processes' wall clock is ten minutes ahead, then behind.
"""

from __future__ import annotations

import datetime as dt
import time
from typing import Any

import psycopg
import pytest

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, WorkerProcesses, ended

APP = """
import datetime, sys, time

# before anything else is imported: this process's wall clock is off
SKEW = {skew}
real_time, real_datetime = time.time, datetime.datetime
time.time = lambda: real_time() + SKEW

class Skewed(real_datetime):
    @classmethod
    def now(cls, tz=None):
        return real_datetime.now(tz) + datetime.timedelta(seconds=SKEW)
datetime.datetime = Skewed

import awa
client = awa.Client()

@client.task()
def work() -> None: ...

@client.task(retry=awa.fixed(0.5))
def again() -> None:
    if awa.current_job().attempt == 1:
        raise ValueError("once")

@client.on_worker_start
def produce() -> None:
    client.insert(work.bind(), tags=["now"])
    client.insert(work.bind(), delay=0.6, tags=["soon"])
    client.insert(again.bind(), tags=["again"])
"""


@pytest.mark.parametrize("skew", [600, -600])
def test_a_process_with_a_wrong_clock_is_on_time(
    client: awa.Client,
    start_worker: StartWorker,
    processes: WorkerProcesses,
    conn: psycopg.Connection[Any],
    skew: int,
) -> None:
    @client.task()
    def other() -> None: ...

    settings = {"heartbeat": 0.3, "stale_after": 1.0}
    start_worker(client, **settings)
    processes.module(APP.format(skew=skew))
    process = processes.start("app:client", "--heartbeat", "0.3", "--stale-after", "1", "--poll-interval", "0.2")
    ends = """
        SELECT array_agg(DISTINCT j.tags[1] ORDER BY j.tags[1])
          FROM awa.jobs j JOIN awa.claims c ON c.slot = j.slot AND j.entry_id = ANY (c.entry_ids)
          JOIN awa.completions x ON x.slot = c.slot AND x.claim_id = c.claim_id
           AND array_position(c.entry_ids, j.entry_id) = ANY (x.idx)
    """
    wait_until(lambda: conn.execute(ends).fetchone() == (["again", "now", "soon"],), timeout=10)
    row = conn.execute(
        """SELECT max(abs(extract(epoch FROM available_at - clock_timestamp()))),
                  max(extract(epoch FROM available_at - created_at)) FILTER (WHERE tags = '{soon}')
             FROM awa.jobs"""
    ).fetchone()
    assert row is not None
    assert row[0] < 30
    assert 0.59 < row[1] < 5
    # both have been heard for longer than the limit, and nobody was taken for dead
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() - begun > 1.5, timeout=3)
    assert conn.execute("SELECT count(*) FROM awa.gone_runtimes").fetchone() == (0,)
    assert ended(client, client.insert(other.bind())).state == "completed"
    assert process.process.poll() is None


def test_a_delay_is_counted_by_the_database(client: awa.Client, conn: psycopg.Connection[Any]) -> None:
    client.insert({}, kind="k", delay=100)
    row = conn.execute("SELECT run_at - clock_timestamp() FROM awa.waiting_jobs").fetchone()
    assert row is not None
    assert dt.timedelta(seconds=90) < row[0] <= dt.timedelta(seconds=100)
