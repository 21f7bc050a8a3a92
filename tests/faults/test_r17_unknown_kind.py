"""R17: a row of an unknown kind, or one that could not be decoded, stranded the whole batch that it was claimed with.

Now a claim names the kinds that its worker knows and sets the others aside untouched, and args are decoded job by job
after the claim, so that what cannot be decoded is a failed attempt of that one job.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count_running, ended

BAD = [
    "{}",
    '{"n": "text"}',
    '{"n": 1, "extra": 2}',
    '{"n": ' + "[" * 5000 + "]" * 5000 + "}",
    '{"n": ' + "7" * 5000 + "}",
    "[]",
]


def test_two_workers_with_different_kinds_and_rows_that_nobody_can_read(
    database: str, start_worker: StartWorker, conn: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[tuple[str, int]] = []
    clients = {name: awa.Client(database) for name in "xy"}

    @clients["x"].task(kind="x")
    def x(n: int) -> None:
        ran.append(("x", n))

    @clients["y"].task(kind="y")
    def y(n: int) -> None:
        ran.append(("y", n))

    rows = []
    for n in range(20):
        rows += [("x", f'{{"n": {n}}}'), ("y", f'{{"n": {n}}}'), ("z", f'{{"n": {n}}}')]
        rows.append(("xy"[n % 2], BAD[n % len(BAD)]))
    with conn.transaction():
        conn.cursor().executemany("INSERT INTO awa.jobs (kind, args) VALUES (%s, %s)", rows)
        infinite = """INSERT INTO awa.waiting_jobs (kind, args, run_at) VALUES ('x', '{"n": 99}', %s) RETURNING id"""
        never = conn.execute(infinite, ["infinity"]).fetchone()
        long_ago = conn.execute(infinite, ["-infinity"]).fetchone()
    assert never is not None
    assert long_ago is not None
    ids = conn.execute("SELECT id, kind, args::text FROM awa.jobs ORDER BY id").fetchall()

    for client in clients.values():
        start_worker(client, threads=2, poll_interval=0.2, heartbeat=0.3, stale_after=1)
    good = [job_id for job_id, kind, args in ids if kind != "z" and args not in BAD]
    for job_id in good:
        info = ended(clients["x"], awa.Inserted(job_id))
        assert (info.state, info.attempt, info.history) == ("completed", 1, [])
    wait_until(lambda: len(ran) == 41)
    assert sorted(ran) == sorted([(kind, n) for kind in "xy" for n in range(20)] + [("x", 99)])
    waiting = conn.execute("SELECT kind, state, waits_for, attempt FROM awa.waiting_jobs ORDER BY 1, 2").fetchall()
    assert waiting.count(("z", "available", "kind", 1)) == 20
    assert sum(row[1] == "retryable" and row[3] == 2 for row in waiting) == 20
    assert count_running(conn) == 0
    soon = clients["x"].insert(x.bind(100), delay=0.1)
    assert ended(clients["x"], soon).state == "completed"
    assert "promote failed" not in caplog.text
    for client in clients.values():
        client.close()
