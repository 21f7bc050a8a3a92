"""R48: a backoff that overflowed, or a policy that misbehaved, lost the job or hid it for centuries.

Now the delay is from zero to 24 hours whatever a policy says, a bad answer is replaced by the default, and the job is
always there to be read.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import awa
from awa.retry import MAX_DELAY
from tests.fixtures.jobs import StartWorker, ended, in_state, make_due


@pytest.mark.parametrize(
    ("policy", "attempt", "least", "most"),
    [
        (awa.exponential(5, 5), 100, MAX_DELAY - 5, MAX_DELAY + 1),
        (None, 999, MAX_DELAY - 5, MAX_DELAY + 1),
        (lambda n: 2**n, 999, MAX_DELAY - 5, MAX_DELAY + 1),
        (lambda n: 10**400, 1, MAX_DELAY - 5, MAX_DELAY + 1),
        (lambda n: 1e300, 1, MAX_DELAY - 5, MAX_DELAY + 1),
        (lambda n: timedelta.max, 1, MAX_DELAY - 5, MAX_DELAY + 1),
        (lambda n: 1e308 * 10, 1, 1, 3),
        (lambda n: -1, 1, 1, 3),
        (lambda n: math.nan, 1, 1, 3),
        (lambda n: None, 1, 1, 3),
        (lambda n: [], 1, 1, 3),
        (lambda n: 1 // 0, 1, 1, 3),
        (lambda n: exit(), 1, 1, 3),
    ],
)
def test_the_delay_has_bounds_and_no_job_disappears(
    client: awa.Client,
    start_worker: StartWorker,
    conn: psycopg.Connection[Any],
    policy: Any,
    attempt: int,
    least: float,
    most: float,
) -> None:
    @client.task(retry=policy, max_attempts=1000)
    def work() -> None:
        raise ValueError("again")

    row = conn.execute(
        "INSERT INTO awa.jobs (kind, attempt, max_attempts) VALUES ('work', %s, 1000) RETURNING id", [attempt]
    ).fetchone()
    assert row is not None
    job = awa.Inserted(row[0])
    start_worker(client)
    info = in_state(client, job, "retryable")
    assert info.run_at is not None
    assert least - 1 < (info.run_at - datetime.now(UTC)).total_seconds() <= most
    assert info.attempt == attempt + 1
    make_due(conn, job.id)
    if attempt == 999:
        assert ended(client, job).state == "failed"
