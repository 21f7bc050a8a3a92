"""Promotion: jobs that wait for a time become available when it has come.

Each docstring names the guard of the engine that the test fails without.
"""

from __future__ import annotations

from awa.storage import waiting
from tests.storage.engine import (
    AWA,
    Conn,
    Outcome,
    claim,
    insert,
    promote,
    register,
    scalar,
    settle,
    state,
    transaction,
)


def wait_for_time(
    conn: Conn, n: int, seconds: float, *, queue: str = "q", priority: int = 2, kind: str = "noop"
) -> int:
    """A job that is due *seconds* from now."""
    return int(
        scalar(
            conn,
            "INSERT INTO awa.waiting_jobs (run_at, queue, kind, priority, args)"
            " VALUES (clock_timestamp() + %s * interval '1 s', %s, %s, %s, json_build_object('n', %s::integer))"
            " RETURNING id",
            seconds,
            queue,
            kind,
            priority,
            n,
        )
    )


def test_due_jobs_come_by_due_time_and_the_others_wait(conn: Conn) -> None:
    """Guard: the order of the pass, and its upper bound."""
    runtime = register(conn)
    for n, seconds in ((3, -1.0), (1, -3.0), (2, -2.0), (4, 3600.0)):
        wait_for_time(conn, n, seconds)
    assert promote(conn) == 3
    assert claim(conn, runtime).numbers == [1, 2, 3]
    assert scalar(conn, "SELECT args->>'n' FROM awa.waiting_jobs") == "4"
    assert promote(conn) == 0


def test_a_pass_takes_the_first_due_when_there_are_more(conn: Conn) -> None:
    """Guard: the limit applies behind the order."""
    runtime = register(conn)
    for n, seconds in ((3, -1.0), (1, -3.0), (2, -2.0)):
        wait_for_time(conn, n, seconds)
    assert [promote(conn, limit=2) for _ in range(3)] == [2, 1, 0]
    assert claim(conn, runtime).numbers == [1, 2, 3]


def test_a_floor_leaves_older_jobs_to_a_full_pass(conn: Conn) -> None:
    """Guard: the floor bounds the scan; a job whose insert committed late is found by the pass without one."""
    old = wait_for_time(conn, 1, -60.0)
    new = wait_for_time(conn, 2, -0.5)
    assert waiting.promote(conn, AWA, behind=5.0, limit=10) == 1
    assert (state(conn, old), state(conn, new)) == ("scheduled", "available")
    assert waiting.promote(conn, AWA, behind=None, limit=10) == 1
    assert state(conn, old) == "available"


def test_a_job_that_somebody_holds_is_passed_over(conn: Conn, other: Conn) -> None:
    """Guard: SKIP LOCKED; a waiting pass would hold up every scheduled job."""
    held, free = wait_for_time(conn, 1, -2.0), wait_for_time(conn, 2, -1.0)
    conn.execute("SET lock_timeout = '1s'")
    with transaction(other):
        other.execute("SELECT FROM awa.waiting_jobs WHERE id = %s FOR UPDATE", (held,))
        assert promote(conn) == 1
        assert (state(conn, held), state(conn, free)) == ("scheduled", "available")
        other.execute("DELETE FROM awa.waiting_jobs WHERE id = %s", (held,))
        other.execute("COMMIT")
    assert promote(conn) == 0
    assert state(conn, held) is None


def test_two_passes_at_once_promote_each_job_once(conn: Conn, other: Conn) -> None:
    """Guard: rows are locked and then deleted by whoever locked them."""
    runtime = register(conn)
    conn.execute("SET lock_timeout = '1s'")
    for n in range(6):
        wait_for_time(conn, n, -10.0 + n)
    with transaction(other):
        assert promote(other, limit=3) == 3
        assert promote(conn) == 3
        other.execute("COMMIT")
    assert sorted(claim(conn, runtime).numbers) == list(range(6))
    assert claim(conn, runtime).numbers == []


def test_a_pass_that_is_rolled_back_promoted_nothing(conn: Conn) -> None:
    job = wait_for_time(conn, 1, -1.0)
    with transaction(conn):
        assert promote(conn) == 1
        conn.execute("ROLLBACK")
    assert state(conn, job) == "scheduled"
    assert promote(conn) == 1


def test_jobs_that_wait_for_a_kind_are_left_alone(conn: Conn) -> None:
    """Guard: only what waits for a time is promoted."""
    runtime = register(conn)
    insert(conn, 1, kind="new")
    claim(conn, runtime, kinds=["noop"])
    assert promote(conn) == 0
    assert claim(conn, runtime, kinds=["new"]).numbers == [1]


def test_a_promoted_job_keeps_its_id_priority_queue_and_attempt(conn: Conn) -> None:
    runtime = register(conn)
    [job] = insert(conn, 1, priority=1, queue="a")
    [member] = claim(conn, runtime, queue="a").members
    settle(conn, runtime, others=[Outcome(member, "retried", 0.01)])
    conn.execute("UPDATE awa.waiting_jobs SET run_at = clock_timestamp()")
    assert promote(conn) == 1
    insert(conn, 2, priority=2, queue="a")
    [first, second] = claim(conn, runtime, queue="a").members
    assert (first.id, first.attempt, first.priority, second.priority) == (job, 2, 1, 2)
    assert scalar(conn, "SELECT lane FROM awa.jobs WHERE id = %s AND attempt = 2", job) == 3


def test_the_time_to_the_next_due_job(conn: Conn) -> None:
    assert waiting.seconds_to_next(conn, AWA, behind=1.0) is None
    wait_for_time(conn, 1, 50.0)
    wait_for_time(conn, 2, 100.0)
    found = waiting.seconds_to_next(conn, AWA, behind=1.0)
    assert found is not None and 0.0 < found <= 50.0
    wait_for_time(conn, 3, -0.5)
    found = waiting.seconds_to_next(conn, AWA, behind=30.0)
    assert found is not None and found < 0.0
