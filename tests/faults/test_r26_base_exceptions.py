"""R26: SystemExit or KeyboardInterrupt in a handler ended the worker's thread, and its job stayed running.

Now whatever a handler raises is a failed attempt with its name, and threads and heartbeat go on.
"""

from __future__ import annotations

import threading
from typing import Any

import psycopg

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count_running, ended, in_state


class Custom(BaseException):
    pass


def test_each_is_a_failed_attempt_and_a_good_job_runs_on_the_same_threads(
    client: awa.Client, start_worker: StartWorker, conn: psycopg.Connection[Any]
) -> None:
    raised = [SystemExit(0), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Custom("own")]

    @client.task()
    def work(n: int) -> None:
        raise raised[n]

    @client.task()
    def good() -> None: ...

    worker = start_worker(client, threads=1, heartbeat=0.2, stale_after=30)
    wait_until(lambda: len([t for t in threading.enumerate() if t.name.startswith("awa-")]) >= 3)
    before = {thread.ident for thread in threading.enumerate() if thread.name in ("awa-1", "awa-heartbeat")}
    for n, error in enumerate(raised):
        info = in_state(client, client.insert(work.bind(n)), "retryable")
        assert info.history[0]["type"].endswith(type(error).__name__)
        assert info.history[0]["outcome"] == "retried"
        assert ended(client, client.insert(good.bind())).state == "completed"
    assert {t.ident for t in threading.enumerate() if t.name in ("awa-1", "awa-heartbeat")} == before
    seen = conn.execute("SELECT last_seen_at FROM awa.runtime_instances").fetchone()
    wait_until(lambda: conn.execute("SELECT last_seen_at FROM awa.runtime_instances").fetchone() != seen)
    assert worker.running == []
    assert count_running(conn) == 0
