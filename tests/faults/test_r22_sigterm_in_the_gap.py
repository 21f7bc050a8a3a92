"""R22: a worker that was stopped between a claim and the start of its handlers left the rows running.

Now what has not started is released before the worker leaves, costs no attempt, and is taken by another at once.
"""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

import awa
from awa.storage.line import Line, Reply
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count_running, ended


@pytest.mark.parametrize("threads", [1, 4])
def test_what_was_claimed_and_not_started_is_available_at_once(
    client: awa.Client,
    start_worker: StartWorker,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
) -> None:
    ran: list[int] = []
    in_gap = threading.Event()
    go_on = threading.Event()
    exchange = Line.exchange

    @client.task()
    def work(n: int) -> None:
        ran.append(n)

    def pausing(self: Line, *args: Any) -> Reply:
        reply = exchange(self, *args)
        if not in_gap.is_set() and any(claim.attempts for claim in reply.claims):
            in_gap.set()
            assert go_on.wait(10)
        return reply

    monkeypatch.setattr(Line, "exchange", pausing)
    jobs = client.insert_many([work.bind(n) for n in range(10)])
    worker = client.worker(threads=threads, shutdown_timeout=10)
    worker.start()
    assert in_gap.wait(10)
    assert count_running(conn) == min(threads, 10)
    stopping = threading.Thread(target=worker.stop)
    stopping.start()
    wait_until(lambda: worker._claimer.is_stopping)
    go_on.set()
    stopping.join(10)
    assert not stopping.is_alive()
    assert (ran, count_running(conn)) == ([], 0)
    start_worker(client, threads=1, poll_interval=30)
    assert [ended(client, job, timeout=5).attempt for job in jobs] == [1] * 10
    assert sorted(ran) == list(range(10))
