"""Ending from outside what its own worker should have ended.

Each docstring names the guard of the engine that the test fails without.
"""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from awa.storage import runtimes
from tests.storage.engine import (
    AWA,
    Background,
    Conn,
    Member,
    Outcome,
    claim,
    complete,
    expire,
    fall_silent,
    fence,
    insert,
    register,
    scalar,
    settle,
    state,
    transaction,
    wait_for_lock,
)


def limits(conn: Conn, runtime: int, timeout_ms: int | None = 300_000, **kinds: int) -> None:
    """What a worker tells of its limits when it registers."""
    conn.execute(
        "UPDATE awa.runtime_instances SET timeout_ms = %s, kind_timeouts = %s WHERE id = %s",
        (timeout_ms, json.dumps(kinds), runtime),
    )


def age(conn: Conn, seconds: float) -> None:
    """Let every claim be older than it is."""
    conn.execute("UPDATE awa.claims SET claimed_at = claimed_at - %s * interval '1 s'", (seconds,))


def heard(conn: Conn, runtime: int, newest: int, opened: list[int]) -> None:
    assert runtimes.heartbeat(conn, AWA, runtime, newest_claim=newest, open_claims=opened)


def history(conn: Conn, job: int) -> list[dict[str, Any]]:
    return scalar(conn, "SELECT coalesce(history, '[]') FROM awa.find_job_v1(%s)", job)


@pytest.fixture
def runtime(conn: Conn) -> int:
    runtime = register(conn)
    limits(conn, runtime)
    return runtime


def test_an_overdue_attempt_is_retried_later_and_its_worker_refused(conn: Conn, runtime: int) -> None:
    """Guard: the age of the claim, limit and margin together; settle leaves out what stands in attempt_ends."""
    [job] = insert(conn, 1)
    [member] = claim(conn, runtime).members
    age(conn, 325)  # its 300 s are up, the margin is not
    assert expire(conn, runtime) == (0, 0)
    age(conn, 10)
    assert expire(conn, runtime) == (1, 0)
    assert expire(conn, runtime) == (0, 0)
    assert state(conn, job) == "retryable"
    waits = scalar(
        conn, "SELECT extract(epoch FROM run_at - clock_timestamp())::float FROM awa.waiting_jobs WHERE id = %s", job
    )
    assert 1.0 < waits <= 2.5  # 2 ** 1 and up to a quarter
    [entry] = history(conn, job)
    assert (entry["outcome"], entry["type"]) == ("retried", "awa.errors.DeadlineExceeded")
    assert (
        entry["text"]
        == f"its time of 300.0 s was up, and its worker, runtime {runtime}, did not end it within 30 s more"
    )
    assert settle(conn, runtime, [member]) == [member.place]
    assert settle(conn, runtime, [], [Outcome(member, "failed")]) == [member.place]
    with pytest.raises(psycopg.errors.UniqueViolation):
        complete(conn, member)
    assert history(conn, job) == [entry]


def test_the_last_attempt_fails(conn: Conn, runtime: int) -> None:
    """Guard: end_attempts keeps the limit of attempts, whoever asks."""
    [job] = insert(conn, 1, max_attempts=1)
    claim(conn, runtime)
    age(conn, 331)
    assert expire(conn, runtime) == (1, 0)
    assert state(conn, job) == "failed"


def test_the_limit_is_the_jobs_then_its_kinds_then_the_workers(conn: Conn, runtime: int) -> None:
    """Guard: the order in coalesce, and 0 as no limit at each step."""
    limits(conn, runtime, 300_000, short=1_000, endless=0)
    own, kinds, workers, long, never, endless = insert(conn, *range(6))
    for job, kind, own_ms in (
        (own, "endless", 1_000),
        (kinds, "short", None),
        (workers, "other", None),
        (long, "short", 400_000),
        (never, "short", 0),
        (endless, "endless", None),
    ):
        conn.execute("UPDATE awa.jobs SET kind = %s, timeout_ms = %s WHERE id = %s", (kind, own_ms, job))
    claim(conn, runtime)
    ended = []
    for seconds in (32, 300, 100, 1_000_000):
        age(conn, seconds)
        expire(conn, runtime)
        ended.append([job for job in (own, kinds, workers, long, never, endless) if state(conn, job) == "retryable"])
    assert ended == [[own, kinds], [own, kinds, workers], [own, kinds, workers, long], [own, kinds, workers, long]]


def test_a_worker_that_told_no_limits_is_left_alone(conn: Conn) -> None:
    """Guard: timeout_ms IS NOT NULL; workers of older versions write none."""
    runtime = register(conn)
    insert(conn, 1, 2)
    conn.execute("UPDATE awa.jobs SET timeout_ms = 1000 WHERE args->>'n' = '1'")
    claim(conn, runtime)
    age(conn, 1e7)
    assert runtimes.list_with_limits(conn, AWA) == []
    assert expire(conn, runtime) == (0, 0)


def test_a_fenced_one_is_a_rescuers_business(conn: Conn, runtime: int) -> None:
    """Guard: the look at gone_runtimes, in the list and under the lock."""
    [job] = insert(conn, 1)
    claim(conn, runtime)
    age(conn, 1e7)
    assert runtimes.list_with_limits(conn, AWA) == [runtime]
    fall_silent(conn, runtime)
    assert fence(conn, runtime) is True
    assert runtimes.list_with_limits(conn, AWA) == []
    assert expire(conn, runtime) == (0, 0)
    assert state(conn, job) == "running"


def test_what_the_heartbeat_listed_and_what_came_since_is_looked_at(conn: Conn, runtime: int) -> None:
    """Guard: open_claims, and the claims above the newest of the last heartbeat; those that have ended are not open."""
    jobs = insert(conn, *range(5))
    claims = [claim(conn, runtime, limit=1) for _ in range(3)]
    settle(conn, runtime, claims[1].members)
    heard(conn, runtime, claims[2].batches[0], [claims[0].batches[0], claims[2].batches[0]])
    last = claim(conn, runtime, limit=2)
    settle(conn, runtime, [], [Outcome(last.members[1], "failed")])
    age(conn, 331)
    assert expire(conn, runtime, limit=2) == (2, 0)
    assert expire(conn, runtime, limit=2) == (1, 0)
    assert [state(conn, job) for job in jobs] == ["retryable", "completed", "retryable", "retryable", "failed"]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_an_old_snapshot_is_refused(conn: Conn, runtime: int, isolation: str) -> None:
    """Guard: AWA02; an older snapshot would miss what was settled last."""
    with transaction(conn, isolation), pytest.raises(psycopg.Error) as caught:
        expire(conn, runtime)
    assert caught.value.sqlstate == "AWA02"


# Beside its worker


def test_an_attempt_that_is_being_settled_is_left_and_nobody_waits(conn: Conn, other: Conn, runtime: int) -> None:
    """Guard: the runtime's lock, exclusively and only tried."""
    [job] = insert(conn, 1)
    [member] = claim(conn, runtime).members
    age(conn, 331)
    with transaction(conn):
        assert settle(conn, runtime, [member]) == []
        assert expire(other, runtime) == (0, 0)  # at once, and it held nothing up
        conn.execute("COMMIT")
    assert expire(other, runtime) == (0, 0)
    assert state(conn, job) == "completed"


def test_what_was_completed_between_the_two_looks_is_not_ended(
    conn: Conn, other: Conn, third: Conn, runtime: int
) -> None:
    """Guard: the second look, which starts after the lock, and behind it the unique key of attempt_ends."""
    [job] = insert(conn, 1)
    [member] = claim(conn, runtime).members
    age(conn, 331)
    # between the two stands the look at gone_runtimes; hold it there
    third.execute("BEGIN")
    third.execute("LOCK TABLE awa.gone_runtimes IN ACCESS EXCLUSIVE MODE")
    other.execute("SET lock_timeout = 0")
    other.execute("ALTER FUNCTION awa.expire_v1 RESET lock_timeout")
    waiting = Background(lambda: expire(other, runtime))
    wait_for_lock(conn, other)
    # a settle would be refused now, for the lock; what ends it without that lock is a completion of the handler's own
    complete(conn, member)
    third.execute("ROLLBACK")
    assert waiting.result() == (0, 0)
    assert state(conn, job) == "completed"
    assert history(conn, job) == []


def test_a_settle_that_comes_while_it_works_tries_again_and_is_refused(conn: Conn, other: Conn, runtime: int) -> None:
    """Guard: settle holds the lock shared; else both would write an end."""
    [job] = insert(conn, 1)
    [member] = claim(conn, runtime).members
    age(conn, 331)
    with transaction(other):
        assert expire(other, runtime) == (1, 0)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            settle(conn, runtime, [member])
        other.execute("COMMIT")
    assert settle(conn, runtime, [member]) == [member.place]
    assert state(conn, job) == "retryable"
    assert scalar(conn, "SELECT count(*) FROM awa.completions") == 0


@pytest.mark.parametrize("commits", [True, False])
def test_what_an_open_transaction_completes_is_passed_over(
    conn: Conn, other: Conn, runtime: int, commits: bool
) -> None:
    """Guard: lock_timeout, and the end of the call at what is blocked: its worker can do nothing meanwhile."""
    jobs = insert(conn, 1, 2, 3)
    members: list[Member] = claim(conn, runtime).members
    age(conn, 331)
    with transaction(other):
        complete(other, members[0])
        assert expire(conn, runtime) == (0, 1)
        assert expire(conn, runtime, skip=1) == (2, 0)
        assert [state(conn, job) for job in jobs] == ["running", "retryable", "retryable"]
        other.execute("COMMIT" if commits else "ROLLBACK")
    assert expire(conn, runtime) == ((0, 0) if commits else (1, 0))
    assert state(conn, jobs[0]) == ("completed" if commits else "retryable")


def test_two_leaders_end_an_attempt_once(conn: Conn, other: Conn, third: Conn, runtime: int) -> None:
    """Guard: the unique key, and the exclusive lock that only one of them has."""
    [job] = insert(conn, 1)
    claim(conn, runtime)
    age(conn, 331)
    with transaction(other):
        assert expire(other, runtime) == (1, 0)
        assert expire(third, runtime) == (0, 0)
        other.execute("COMMIT")
    assert expire(third, runtime) == (0, 0)
    assert len(history(conn, job)) == 1
