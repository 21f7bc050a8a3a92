"""A server that answers late: the connection counts as lost, and what it did meanwhile is found out."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import awa
from awa._core import Attempt, Handler, Outcomes
from awa.errors import RuntimeGone
from awa.storage import line, recovery
from awa.storage.line import Line, Wanted
from awa.storage.schema import Schema
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, claimed_twice, count, count_available, count_running, ended, fence
from tests.fixtures.late import Gate

Conn = psycopg.Connection[Any]

RECORDED_TWICE = """
    SELECT count(*) FROM (SELECT FROM awa.completions x CROSS JOIN LATERAL unnest(x.idx) i
                           GROUP BY x.slot, x.claim_id, i HAVING count(*) > 1) twice
"""


@pytest.fixture
def runtime(conn: Conn) -> int:
    """The number of a runtime without a process."""
    row = conn.execute(
        """INSERT INTO awa.runtime_instances (uuid, hostname, pid, version, heartbeat_ms)
           VALUES (gen_random_uuid(), 'h', 1, 'v', 1000) RETURNING id"""
    ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.fixture
def open_line(database: str) -> Iterator[Callable[[], Line]]:
    """Open lines that know the kind ``work``."""
    lines: list[Line] = []

    def opened() -> Line:
        lines.append(Line(database, Schema(), {"work": Handler("work", lambda: None, lambda text: {}, is_typed=False)}))
        return lines[-1]

    yield opened
    for one in lines:
        one.close()


def claimed(on: Line, runtime: int, limit: int) -> list[Attempt]:
    """Start up to *limit* attempts."""
    (claim,) = on.exchange(runtime, [], [Wanted("default", limit)]).claims
    assert claim.error is None
    return claim.attempts


@pytest.mark.parametrize("what", ["settle_v1", "claim_v2"])
def test_an_answer_that_does_not_come_in_time_costs_the_line(
    client: awa.Client,
    conn: Conn,
    runtime: int,
    open_line: Callable[[], Line],
    late: Gate,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    monkeypatch.setattr(line, "REPLY_TIMEOUT", 0.3)
    for _ in range(3):
        client.insert({}, kind="work")
    talking = open_line()
    outcomes = Outcomes()
    attempts = claimed(talking, runtime, 2)
    outcomes.opened(attempts)
    for attempt in attempts:
        outcomes.add(attempt, "snoozed", delay=3600.0)
    flushes = outcomes.take(runtime)
    late.shut(what)
    # an error of the flush or of the claim would say that nothing happened, and the next answer would be this one's
    with pytest.raises(psycopg.OperationalError, match="has not answered"):
        talking.exchange(runtime, flushes, [Wanted("default", 1)] if what == "claim_v2" else [])
    talking.close()
    late.open()
    again = open_line()

    def settle() -> bool:  # refused while the late transaction has not ended
        (settled,) = again.exchange(runtime, flushes, []).settled
        return settled.error is None and settled.stale == []

    wait_until(settle)
    assert count(conn, "SELECT count(*) FROM awa.waiting_jobs") == 2


@pytest.mark.parametrize("what", ["settle_v1", "claim_v2"])
def test_late_answers_lose_nothing_and_record_nothing_twice(
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    late: Gate,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    monkeypatch.setattr(line, "REPLY_TIMEOUT", 0.3)
    ran: Counter[int] = Counter()
    lock = threading.Lock()

    @client.task()
    def work(n: int) -> None:
        with lock:
            ran[n] += 1

    start_worker(client, threads=2)
    inserted = client.insert_many([work.bind(n) for n in range(50)])
    wait_until(lambda: len(ran) == 50)
    for first in (50, 100):
        told = caplog.text.count("has not answered")
        late.shut(what)
        inserted += client.insert_many([work.bind(n) for n in range(first, first + 50)])
        wait_until(lambda told=told: caplog.text.count("has not answered") > told)
        late.open()
        wait_until(lambda first=first: len(ran) == first + 50, timeout=15)
    assert all(ended(client, job).state == "completed" for job in inserted)
    assert {client.get(job.id).attempt for job in inserted} == {1}
    assert ran == Counter(range(150))
    wait_until(lambda: count_running(conn) + count_available(conn) == 0)
    assert count(conn, RECORDED_TWICE) == 0
    assert claimed_twice(conn) == []


def test_unknown_claims_of_a_runtime_that_is_gone_are_left_to_its_rescuer(
    database: str, client: awa.Client, conn: Conn, runtime: int, open_line: Callable[[], Line]
) -> None:
    client.insert({}, kind="work")
    talking = open_line()
    assert len(claimed(talking, runtime, 1)) == 1
    talking.close()
    fence(conn, runtime)
    with pytest.raises(RuntimeGone) as caught:
        recovery.release_unknown_claims(conn, Schema(), runtime, newest=0)
    assert caught.value.runtime == runtime
    assert count(conn, "SELECT count(*) FROM awa.attempt_ends") == 0
    assert count_running(conn) == 1


def test_args_that_are_not_there_any_more_are_no_error_of_the_line(
    client: awa.Client, conn: Conn, runtime: int, open_line: Callable[[], Line]
) -> None:
    inserted = [client.insert({"text": "x" * 150_000}, kind="work") for _ in range(2)]
    talking = open_line()
    attempts = [attempt for _ in range(2) for attempt in claimed(talking, runtime, 1)]
    assert [attempt.has_args for attempt in attempts] == [False, False]
    conn.execute("DELETE FROM awa.jobs WHERE id = %s", [inserted[0].id])
    talking.fetch_args(runtime, attempts)
    assert [attempt.has_args for attempt in attempts] == [False, True]
    assert len(attempts[1].args_text()) > 150_000
