"""R14: a handler that runs for several times the stale limit was taken for dead and run twice.

Now the signs of life come from a thread and a connection of their own, whatever the handlers do, and an interval that
is not well under the limit is refused.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg
import pytest

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, ended

AGE = "SELECT max(extract(epoch FROM clock_timestamp() - last_seen_at)) FROM awa.runtime_instances"


@pytest.mark.parametrize("running", [1, 8])
def test_a_handler_that_outlasts_the_stale_limit_runs_once(
    client: awa.Client, start_worker: StartWorker, conn: psycopg.Connection[Any], running: int
) -> None:
    stale_after = 1.2
    started: list[int] = []
    go_on = threading.Event()

    @client.task()
    def work(n: int) -> None:
        started.append(n)
        assert go_on.wait(30)

    for _ in range(2):
        start_worker(client, threads=running, heartbeat=stale_after / 6, stale_after=stale_after)
    jobs = client.insert_many([work.bind(n) for n in range(running)])
    wait_until(lambda: len(started) == running)
    begun = conn.execute("SELECT clock_timestamp()").fetchone()
    assert begun is not None
    ages: list[float] = []

    def has_outlasted() -> bool:
        row = conn.execute(f"SELECT clock_timestamp() - %s, ({AGE})", [begun[0]]).fetchone()
        assert row is not None
        ages.append(float(row[1]))
        return float(row[0].total_seconds()) > 3 * stale_after

    wait_until(has_outlasted, timeout=10)
    go_on.set()
    for job in jobs:
        assert ended(client, job).attempt == 1
    assert sorted(started) == list(range(running))
    assert max(ages) < stale_after / 2


@pytest.mark.slow
@pytest.mark.timing
def test_handlers_that_hold_the_interpreter_in_bursts_do_not_delay_the_signs_of_life_for_long(
    client: awa.Client, start_worker: StartWorker, conn: psycopg.Connection[Any]
) -> None:
    """Guard: a sign of life takes few round trips on a connection of its own, so it waits for few bursts.

    Sorting keeps every other thread waiting until it is done, so each round trip costs some bursts. With a hundred
    round trips to a sign of life its age passed the limit of 6 s: tried.
    """
    stale_after = 6.0
    stop = threading.Event()
    longest: list[float] = []
    numbers = [((n * 7919) % 100_003) for n in range(60_000)]

    @client.task()
    def work() -> None:
        while not stop.is_set():
            begun = time.monotonic()
            sorted(numbers)  # in C, without letting go
            longest.append(time.monotonic() - begun)

    start_worker(client, threads=4, heartbeat=1.0, stale_after=stale_after)
    client.insert_many([work.bind() for _ in range(4)])
    wait_until(lambda: len(longest) > 20, timeout=30)
    ages: list[float] = []
    give_up_at = time.monotonic() + 6
    try:
        with psycopg.connect(conn.info.dsn, autocommit=True) as watcher:
            while time.monotonic() < give_up_at:
                row = watcher.execute(AGE).fetchone()
                assert row is not None
                ages.append(float(row[0]))
    finally:
        stop.set()
    assert len(ages) > 3
    print(f"oldest sign of life {max(ages):.2f} s, longest burst {max(longest):.3f} s, {len(longest)} bursts")
    assert max(ages) < stale_after / 2
    assert conn.execute("SELECT count(*) FROM awa.attempt_ends WHERE outcome = 'rescued'").fetchone() == (0,)


@pytest.mark.parametrize(("heartbeat", "stale_after"), [(5, 14.9), (0.5, 1.4), (30, 30)])
def test_an_interval_that_is_not_well_under_the_limit_is_refused(heartbeat: float, stale_after: float) -> None:
    with pytest.raises(awa.ConfigError, match="three heartbeats"):
        awa.Client("").worker(heartbeat=heartbeat, stale_after=stale_after)
