"""A worker keeps the ring turning while jobs pour through it."""

from __future__ import annotations

import itertools
import threading

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker
from tests.storage.engine import Conn, scalar


def test_jobs_run_once_each_while_segments_are_sealed_and_emptied(
    client: awa.Client, conn: Conn, start_worker: StartWorker
) -> None:
    lock = threading.Lock()
    ran: dict[int, int] = {}  # guarded by lock
    slots: set[int] = set()

    @client.task()
    def work(n: int) -> object:
        with lock:
            ran[n] = ran.get(n, 0) + 1
            times = ran[n]
        if n % 7 == 0 and times == 1:
            return awa.Snooze(0.2)
        if n % 11 == 0 and times == 1:
            return awa.RetryAfter(0.1)
        return None

    waiting = client.insert(work.bind(-1), queue="nobody")
    start_worker(client, rotate_after=0.05, completed_retention=0.2, heartbeat=0.5, stale_after=2.0)
    numbers = itertools.count()

    def has_turned() -> bool:
        client.insert_many([work.bind(next(numbers)) for _ in range(20)])
        slots.add(scalar(conn, "SELECT pg_sequence_last_value('awa.ring_seq')"))
        return len(slots) == 8

    wait_until(has_turned, timeout=30.0)
    total = next(numbers)
    expected = {n: 2 if n % 7 == 0 or n % 11 == 0 else 1 for n in range(total)}
    wait_until(lambda: len(ran) == total and ran == expected, timeout=20.0)
    wait_until(lambda: scalar(conn, "SELECT count(*) FROM awa.completions") == 0, timeout=20.0)
    assert client.get(waiting.id).state == "available"
    assert ran == expected


def test_failed_jobs_are_deleted_in_time(client: awa.Client, conn: Conn, start_worker: StartWorker) -> None:
    @client.task()
    def fails() -> None:
        raise awa.TerminalError("no")

    client.insert_many([fails.bind() for _ in range(3)])
    start_worker(client, failed_retention=1.0)
    wait_until(lambda: scalar(conn, "SELECT count(*) FROM awa.ended_jobs") == 3)
    wait_until(lambda: scalar(conn, "SELECT count(*) FROM awa.ended_jobs") == 0, timeout=10.0)
