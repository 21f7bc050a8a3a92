"""The bell: who inserts notifies only when somebody sleeps.

Each docstring names the guard of the engine that the test fails without.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from awa.storage import jobs, waiting
from awa.storage.jobs import JobRow
from tests.fixtures.db import wait_until
from tests.migrations.waiting import ADVISORY_LOCKS
from tests.storage.engine import (
    ARMED,
    AWA,
    BUSY,
    Conn,
    Outcome,
    claim,
    fall_silent,
    fence,
    insert,
    register,
    rescue,
    scalar,
    settle,
    transaction,
)


@pytest.fixture
def sleeper(open_connection: Callable[[], Conn]) -> Conn:
    """A connection that listens."""
    sleeper = open_connection()
    sleeper.execute(f"LISTEN {AWA.channel}")
    return sleeper


def rung(sleeper: Conn, conn: Conn) -> list[str]:
    """The queues that *sleeper* was told of so far.

    Notifications arrive in commit order, so all of them are there once one of our own is.
    """
    conn.execute("SELECT pg_notify(%s, 'the end')", (AWA.channel,))
    found: list[str] = []
    for notification in sleeper.notifies(timeout=10.0):
        if notification.payload == "the end":
            return found
        found.append(notification.payload)
    raise AssertionError("no notification arrives")


def row(queue: str = "q", *, delay: float | None = None) -> JobRow:
    return JobRow(queue=queue, kind="noop", args=b"{}", priority=2, max_attempts=25, delay=delay)


def test_the_channel_is_what_the_library_listens_to(conn: Conn) -> None:
    assert scalar(conn, "SELECT awa.channel()") == AWA.channel


def test_nothing_is_notified_while_nobody_sleeps(conn: Conn, sleeper: Conn) -> None:
    """Guard: the bell is tried before pg_notify, which takes a lock of the whole cluster at commit."""
    jobs.insert_job(conn, AWA, row(), notify=True)
    jobs.insert_jobs(conn, AWA, [row(), row("other")], notify=True)
    jobs.insert_jobs(conn, AWA, [row(), row(delay=0.1)], notify=True)
    jobs.copy_jobs(conn, AWA, [row()], notify=True)
    assert rung(sleeper, conn) == []
    assert scalar(conn, f"SELECT count(*) {ADVISORY_LOCKS}") == 0


def test_every_way_to_insert_rings_for_a_sleeper(conn: Conn, sleeper: Conn) -> None:
    """Guard: the bell in each statement; it names the queue and rings when the transaction commits."""
    runtime = register(conn)
    assert claim(sleeper, runtime, bell=True).flags == ARMED
    ways: list[Callable[[], object]] = [
        lambda: jobs.insert_job(conn, AWA, row(), notify=True),
        lambda: jobs.insert_jobs(conn, AWA, [row(), row(), row("other")], notify=True),
        lambda: jobs.insert_jobs(conn, AWA, [row(), row(delay=1000.0)], notify=True),
        lambda: jobs.copy_jobs(conn, AWA, [row(), row("other")], notify=True),
    ]
    for way in ways:
        with transaction(conn):
            way()
            conn.execute("COMMIT")
        assert rung(sleeper, conn) == ["q"]
        with transaction(conn):
            way()
            conn.execute("ROLLBACK")
        assert rung(sleeper, conn) == []


def test_a_producer_that_wants_no_notifications_sends_none(conn: Conn, sleeper: Conn) -> None:
    claim(sleeper, register(conn), bell=True)
    jobs.insert_job(conn, AWA, row(), notify=False)
    jobs.insert_jobs(conn, AWA, [row(), row("other")], notify=False)
    jobs.insert_jobs(conn, AWA, [row(), row(delay=0.0)], notify=False)
    jobs.copy_jobs(conn, AWA, [row()], notify=False)
    assert rung(sleeper, conn) == []


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_producer_with_an_old_snapshot_sees_the_bell(conn: Conn, sleeper: Conn, isolation: str) -> None:
    """Guard: the bell is an advisory lock; a row in a table would be invisible to such a producer."""
    runtime = register(conn)
    with transaction(conn, isolation):
        scalar(conn, "SELECT count(*) FROM awa.jobs")
        claim(sleeper, runtime, bell=True)
        jobs.insert_job(conn, AWA, row(), notify=True)
        conn.execute("COMMIT")
    assert rung(sleeper, conn) == ["q"]


def test_a_claim_arms_before_it_looks(conn: Conn, sleeper: Conn) -> None:
    """Guard: the bell is taken before the frontier is read, and by one session only."""
    runtime = register(conn)
    insert(conn, 1)
    claimed = claim(sleeper, runtime, bell=True)
    assert (claimed.numbers, claimed.flags) == ([1], ARMED)
    assert claim(conn, runtime, bell=True).flags == 0
    assert claim(sleeper, runtime, bell=False).flags == 0


def test_a_busy_claim_still_arms(conn: Conn, other: Conn, sleeper: Conn) -> None:
    """Guard: arming comes before the locks are tried; the caller learns of both."""
    first, second = register(conn), register(conn)
    with transaction(other):
        claim(other, first)
        assert claim(sleeper, second, bell=True).flags == ARMED | BUSY
        other.execute("ROLLBACK")


def test_the_bell_of_a_lost_session_is_free(conn: Conn, open_connection: Callable[[], Conn]) -> None:
    """Guard: the lock is the session's, so a killed worker leaves no bell behind that nobody answers."""
    runtime = register(conn)
    dying = open_connection()
    claim(dying, runtime, bell=True)
    dying.close()
    wait_until(lambda: claim(conn, runtime, bell=True).flags == ARMED)


def test_what_settle_makes_available_rings(conn: Conn, sleeper: Conn) -> None:
    """Guard: end_attempts rings for retries without delay and for releases, and for the leader when one is due soon."""
    runtime = register(conn)
    waiting.take_leader_bell(sleeper, AWA)
    insert(conn, 1, 2, 3, 4, 5)
    members = claim(conn, runtime).members
    claim(sleeper, runtime, bell=True)
    for outcome, expected in (
        (Outcome(members[0], "retried"), ["q"]),
        (Outcome(members[1], "released"), ["q"]),
        (Outcome(members[2], "retried", 1.0), [""]),
        (Outcome(members[3], "snoozed", 100.0), []),
        (Outcome(members[4], "failed"), []),
    ):
        settle(conn, runtime, others=[outcome])
        assert rung(sleeper, conn) == expected


def test_rescue_and_promotion_ring(conn: Conn, sleeper: Conn) -> None:
    """Guard: both append entries, and both ring."""
    runtime, living = register(conn), register(conn)
    insert(conn, 1)
    claim(conn, runtime)
    claim(sleeper, living, bell=True)
    fall_silent(conn, runtime)
    fence(conn, runtime)
    assert rescue(conn, runtime) == (1, 1, 0)
    assert rung(sleeper, conn) == ["q"]
    conn.execute("INSERT INTO awa.waiting_jobs (run_at, queue, kind) VALUES (now(), 'q', 'noop'), (now(), 'z', 'noop')")
    assert waiting.promote(conn, AWA, behind=None, limit=10) == 2
    assert rung(sleeper, conn) == ["q"]
    assert waiting.promote(conn, AWA, behind=None, limit=10) == 0
    assert rung(sleeper, conn) == []


def test_the_leader_is_woken_for_what_is_due_soon(conn: Conn, sleeper: Conn) -> None:
    """Guard: an insert into waiting_jobs rings for the empty name when it is due within 1.5 s."""
    assert waiting.take_leader_bell(sleeper, AWA) is True
    assert waiting.take_leader_bell(conn, AWA) is False
    jobs.insert_job(conn, AWA, row(delay=60.0), notify=True)
    assert rung(sleeper, conn) == []
    jobs.insert_job(conn, AWA, row(delay=1.0), notify=True)
    assert rung(sleeper, conn) == [""]
