"""Settling: each flush all or nothing, each attempt ended once, and nobody's attempt but one's own.

Each docstring names the guard of the engine that the test fails without.
"""

from __future__ import annotations

from dataclasses import replace

import psycopg
import pytest

from tests.storage.engine import (
    Background,
    Conn,
    Outcome,
    claim,
    complete,
    fall_silent,
    fence,
    insert,
    register,
    rescue,
    scalar,
    settle,
    state,
    transaction,
    wait_for_lock,
)

COMPLETED = "SELECT coalesce(sum(cardinality(idx)), 0) FROM awa.completions"


def test_successes_of_several_claims_are_recorded_in_one_flush(conn: Conn) -> None:
    runtime = register(conn)
    ids = insert(conn, *range(6))
    first, second = claim(conn, runtime, limit=3).members, claim(conn, runtime, limit=3).members
    assert settle(conn, runtime, [first[0], first[2], *second]) == []
    assert [state(conn, id_) for id_ in ids] == ["completed", "running", *["completed"] * 4]


@pytest.mark.parametrize(
    ("outcome", "delay", "expected", "attempt"),
    [
        ("retried", 0.0, "available", 2),
        ("retried", 60.0, "retryable", 2),
        ("snoozed", 0.0, "available", 1),
        ("snoozed", 60.0, "scheduled", 1),
        ("released", 0.0, "available", 1),
        ("cancelled", 0.0, "cancelled", 1),
        ("failed", 0.0, "failed", 1),
        ("completed", 0.0, "completed", 1),
    ],
)
def test_each_outcome_leads_to_its_state(conn: Conn, outcome: str, delay: float, expected: str, attempt: int) -> None:
    runtime = register(conn)
    [job] = insert(conn, 1, max_attempts=3)
    [member] = claim(conn, runtime).members
    assert settle(conn, runtime, others=[Outcome(member, outcome, delay)]) == []
    row = conn.execute("SELECT state, attempt, max_attempts FROM awa.find_job_v1(%s)", (job,)).fetchone()
    assert row == (expected, attempt, 3)
    # it is in one place only
    assert scalar(
        conn,
        "SELECT (SELECT count(*) FROM awa.waiting_jobs) + (SELECT count(*) FROM awa.ended_jobs)"
        " + (SELECT count(*) FROM awa.jobs) - (SELECT count(*) FROM awa.attempt_ends)",
    ) == (0 if outcome == "completed" else 1)


def test_what_is_appended_carries_the_whole_job(conn: Conn) -> None:
    """Guard: every column of a body is copied, through a retry, a wait, a promotion and a failure alike."""
    runtime = register(conn)
    conn.execute(
        "INSERT INTO awa.jobs (queue, kind, lane, priority, max_attempts, timeout_ms, args, metadata, tags,"
        "  concurrency_key, ordering_key, unique_key, expires_at, follow_ups)"
        " VALUES ('q', 'noop', 3, 1, 9, 77, '{\"n\":  1}', '{\"m\": 1}', '{a}', 'c', 'o', 'u', '2100-01-01', '[1]')"
    )
    columns = (
        "id, queue, kind, priority, max_attempts, timeout_ms, args::text, metadata::text, tags, concurrency_key,"
        " ordering_key, unique_key, follow_ups::text"
    )
    before = conn.execute(f"SELECT {columns}, available_at, expires_at FROM awa.jobs").fetchone()
    assert before is not None
    [member] = claim(conn, runtime).members
    settle(conn, runtime, others=[Outcome(member, "retried")])
    [member] = claim(conn, runtime).members
    settle(conn, runtime, others=[Outcome(member, "released")])
    [member] = claim(conn, runtime).members
    settle(conn, runtime, others=[Outcome(member, "retried", 60.0)])
    waiting = f"SELECT {columns}, created_at, expires_at FROM awa.waiting_jobs"
    assert conn.execute(waiting).fetchone() == before
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    conn.execute("SELECT awa.promote_v1('-infinity', 10)")
    assert claim(conn, runtime, kinds=["none"]).members == []
    assert conn.execute(waiting).fetchone() == before
    [member] = claim(conn, runtime, kinds=["noop"]).members
    assert member.attempt == 3
    settle(conn, runtime, others=[Outcome(member, "failed")])
    assert conn.execute(f"SELECT {columns}, created_at FROM awa.ended_jobs").fetchone() == before[:-1]


def test_the_limit_of_attempts_fails_the_last_one(conn: Conn) -> None:
    """Guard: end_attempts turns retried into failed when attempt = max_attempts; a snooze does not count."""
    runtime = register(conn)
    [job] = insert(conn, 1, max_attempts=2)
    for outcome in ("snoozed", "retried", "snoozed", "released"):
        [member] = claim(conn, runtime).members
        settle(conn, runtime, others=[Outcome(member, outcome)])
        assert state(conn, job) == "available"
    [member] = claim(conn, runtime).members
    assert member.attempt == 2
    settle(conn, runtime, others=[Outcome(member, "retried", 60.0, {"type": "E", "text": "last"})])
    assert state(conn, job) == "failed"
    history = scalar(conn, "SELECT history FROM awa.find_job_v1(%s)", job)
    assert [(item["attempt"], item["outcome"], item["text"]) for item in history] == [
        (1, "retried", None),
        (2, "retried", "last"),
    ]
    assert claim(conn, runtime).members == []


def test_history_keeps_the_last_twenty_attempts_and_three_tracebacks(conn: Conn) -> None:
    """Guard: the two limits of add_history."""
    runtime = register(conn)
    [job] = insert(conn, 1, max_attempts=30)
    for n in range(25):
        [member] = claim(conn, runtime).members
        error = {"type": "E", "text": f"text {n}", "traceback": f"trace {n}"}
        settle(conn, runtime, others=[Outcome(member, "retried", 0.0, error)])
    history = scalar(conn, "SELECT history FROM awa.find_job_v1(%s)", job)
    assert [item["attempt"] for item in history] == list(range(6, 26))
    assert [item["text"] for item in history] == [f"text {n}" for n in range(5, 25)]
    assert [item.get("traceback") for item in history] == [None] * 17 + ["trace 22", "trace 23", "trace 24"]
    assert {item["runtime"] for item in history} == {runtime}


# Whose attempt it is


def test_a_claim_that_a_crash_forgot_is_not_taken_for_its_successor(conn: Conn, other: Conn) -> None:
    """Guard: the nonce; the number of a forgotten claim is handed out again, to the same runtime even.

    Without it, for either kind of outcome, the old attempt ends the new one: tried, also after a real crash.
    """
    runtime = register(conn)
    [job] = insert(conn, 1)
    [forgotten] = claim(conn, runtime).members
    conn.execute("DELETE FROM awa.claims")
    conn.execute("SELECT setval('awa.claim_id_seq', %s, false)", (forgotten.claim_id,))
    [member] = claim(conn, runtime).members
    assert (member.claim_id, member.entry_id) == (forgotten.claim_id, forgotten.entry_id)
    assert settle(conn, runtime, [forgotten]) == [forgotten.place]
    assert settle(conn, runtime, others=[Outcome(forgotten, "failed")]) == [forgotten.place]
    assert state(conn, job) == "running"
    assert settle(conn, runtime, [member]) == []
    assert state(conn, job) == "completed"


def test_outcomes_of_a_claim_that_does_not_exist_are_stale(conn: Conn) -> None:
    """Guard: each claim row that is quoted is read."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    [member] = claim(conn, runtime).members
    conn.execute("DELETE FROM awa.claims")
    assert settle(conn, runtime, [member]) == [member.place]
    assert settle(conn, runtime, others=[Outcome(member, "retried")]) == [member.place]
    assert state(conn, job) == "available"


def test_outcomes_of_another_runtimes_attempt_are_stale(conn: Conn) -> None:
    """Guard: the claim row's runtime is compared."""
    runtime, thief = register(conn), register(conn)
    [job] = insert(conn, 1)
    [member] = claim(conn, runtime).members
    assert settle(conn, thief, [member]) == [member.place]
    assert settle(conn, thief, others=[Outcome(member, "failed")]) == [member.place]
    assert state(conn, job) == "running"


@pytest.mark.parametrize("idx", [0, 3, -1])
def test_positions_outside_the_claim_are_stale(conn: Conn, idx: int) -> None:
    """Guard: the check of the position."""
    runtime = register(conn)
    insert(conn, 1, 2)
    first, second = claim(conn, runtime).members
    beyond = replace(first, idx=idx)
    assert settle(conn, runtime, others=[Outcome(beyond, "retried")]) == [beyond.place]
    # a claim of which a member ended otherwise is looked at member by member
    assert settle(conn, runtime, others=[Outcome(first, "cancelled")]) == []
    assert settle(conn, runtime, [beyond, second]) == [beyond.place]
    assert scalar(conn, COMPLETED) == 1


# What ended before


def test_members_that_ended_otherwise_are_left_out_and_reported(conn: Conn) -> None:
    """Guard: a claim with any end is looked at member by member; else what was cancelled completes too: tried."""
    runtime = register(conn)
    ids = insert(conn, 1, 2, 3)
    members = claim(conn, runtime).members
    assert settle(conn, runtime, others=[Outcome(members[1], "cancelled")]) == []
    assert settle(conn, runtime, members) == [members[1].place]
    assert [state(conn, job) for job in ids] == ["completed", "cancelled", "completed"]
    assert scalar(conn, COMPLETED) == 2


def test_a_completed_attempt_cannot_end_otherwise(conn: Conn) -> None:
    """Guard: end_attempts reads the completions of the claim; else a completed job runs again: tried."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    members = claim(conn, runtime).members
    settle(conn, runtime, members)
    for outcome in ("retried", "failed", "released", "completed"):
        assert settle(conn, runtime, others=[Outcome(members[0], outcome)]) == [members[0].place]
    assert state(conn, job) == "completed"
    assert claim(conn, runtime).members == []


def test_an_attempt_that_ended_otherwise_cannot_end_again(conn: Conn) -> None:
    """Guard: the unique key of attempt_ends; a second end would append a second live entry."""
    runtime = register(conn)
    insert(conn, 1)
    [member] = claim(conn, runtime).members
    assert settle(conn, runtime, others=[Outcome(member, "retried")]) == []
    assert settle(conn, runtime, others=[Outcome(member, "retried")]) == [member.place]
    assert len(claim(conn, runtime).members) == 1


def test_one_attempt_twice_in_a_flush_ends_once(conn: Conn) -> None:
    """Guard: only what the insert into attempt_ends returned is appended."""
    runtime = register(conn)
    insert(conn, 1)
    [member] = claim(conn, runtime).members
    settle(conn, runtime, others=[Outcome(member, "retried"), Outcome(member, "retried")])
    assert len(claim(conn, runtime).members) == 1


def test_an_attempt_that_its_handler_completed_is_stale_for_other_outcomes(conn: Conn, other: Conn) -> None:
    """Guard: the unique key of attempt_ends, which complete_v1 writes too."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    [member] = claim(conn, runtime).members
    complete(other, member)
    assert settle(conn, runtime, others=[Outcome(member, "completed")]) == [member.place]
    assert settle(conn, runtime, [member]) == [member.place]
    assert state(conn, job) == "completed"
    assert scalar(conn, COMPLETED) == 0


def test_an_attempt_that_an_open_transaction_completes_makes_the_flush_wait_briefly(conn: Conn, other: Conn) -> None:
    """Guard: lock_timeout, and that a flush is all or nothing."""
    runtime = register(conn)
    insert(conn, 1, 2)
    first, second = claim(conn, runtime).members
    with transaction(other):
        complete(other, first)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            settle(conn, runtime, [second], [Outcome(first, "completed")])
        assert scalar(conn, COMPLETED) == 0
        other.execute("ROLLBACK")
    assert settle(conn, runtime, [second], [Outcome(first, "completed")]) == []
    assert scalar(conn, "SELECT outcome FROM awa.attempt_ends") == "completed"


# The same flush again


def test_a_repeated_flush_of_successes_is_refused(conn: Conn) -> None:
    """Guard: completions are unique by claim and flush; a flush in doubt may arrive twice."""
    runtime = register(conn)
    insert(conn, 1, 2)
    members = claim(conn, runtime).members
    assert settle(conn, runtime, members[:1], flush=7) == []
    with pytest.raises(psycopg.errors.UniqueViolation) as caught:
        settle(conn, runtime, members[:1], [Outcome(members[1], "retried")], flush=7)
    assert (caught.value.diag.table_name or "").startswith("completions")
    assert scalar(conn, COMPLETED) == 1
    assert scalar(conn, "SELECT count(*) FROM awa.attempt_ends") == 0
    assert settle(conn, runtime, members[1:], flush=8) == []


def test_a_repeated_flush_is_refused_when_members_have_ended_otherwise(conn: Conn) -> None:
    """Guard: the slow way writes completions under the same key."""
    runtime = register(conn)
    insert(conn, 1, 2)
    first, second = claim(conn, runtime).members
    settle(conn, runtime, others=[Outcome(first, "cancelled")], flush=6)
    assert settle(conn, runtime, [second], flush=7) == []
    with pytest.raises(psycopg.errors.UniqueViolation):
        settle(conn, runtime, [second], flush=7)
    assert scalar(conn, COMPLETED) == 1


def test_a_repeated_flush_of_other_outcomes_is_silent_and_changes_nothing(conn: Conn) -> None:
    """Guard: ends that carry the same flush number are not reported as stale."""
    runtime = register(conn)
    insert(conn, 1, 2, 3)
    first, second, third = claim(conn, runtime).members
    settle(conn, runtime, others=[Outcome(third, "cancelled")], flush=6)
    outcomes = [Outcome(first, "retried"), Outcome(second, "failed"), Outcome(third, "failed")]
    assert settle(conn, runtime, others=outcomes, flush=7) == [third.place]
    assert settle(conn, runtime, others=outcomes, flush=7) == [third.place]
    assert scalar(conn, "SELECT count(*) FROM awa.attempt_ends") == 3
    assert len(claim(conn, runtime).members) == 1


def test_a_flush_that_arrives_while_its_first_sending_is_in_progress_waits_for_it(conn: Conn, other: Conn) -> None:
    """Guard: a unique key ignores snapshots and waits for a row that is not yet committed."""
    runtime = register(conn)
    insert(conn, 1)
    members = claim(conn, runtime).members
    with transaction(conn):
        settle(conn, runtime, members, flush=7)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            settle(other, runtime, members, flush=7)
        conn.execute("COMMIT")
    with pytest.raises(psycopg.errors.UniqueViolation):
        settle(other, runtime, members, flush=7)
    assert scalar(conn, COMPLETED) == 1


# Fences


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_settle_under_an_old_snapshot_is_refused(conn: Conn, other: Conn, isolation: str) -> None:
    """Guard: AWA02; an older snapshot does not see the fence, and a late outcome is recorded: tried."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    members = claim(conn, runtime).members
    fall_silent(conn, runtime)
    with transaction(conn, isolation):
        scalar(conn, COMPLETED)
        assert fence(other, runtime) is True
        with pytest.raises(psycopg.Error) as caught:
            settle(conn, runtime, members)
    assert caught.value.sqlstate == "AWA02"
    assert state(conn, job) == "running"


def test_a_settle_while_the_runtime_is_looked_at_writes_nothing(conn: Conn, other: Conn) -> None:
    """Guard: the runtime's lock, shared and only tried; without it the settle goes on meanwhile: tried."""
    runtime = register(conn)
    insert(conn, 1)
    members = claim(conn, runtime).members
    with transaction(other):
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('awa.runtime:' || %s::text, 0))", (runtime,))
        with pytest.raises(psycopg.errors.LockNotAvailable):
            settle(conn, runtime, members)
        assert scalar(conn, COMPLETED) == 0
        other.execute("ROLLBACK")
    assert settle(conn, runtime, members) == []


def test_a_fence_does_not_overtake_a_settle_in_progress(conn: Conn, other: Conn) -> None:
    """Guard: the runtime's lock, held to the commit; the fence is refused and not made to wait.

    Without the lock the fence stands while the outcomes are not yet visible to the rescuer: tried.
    """
    runtime = register(conn)
    [job] = insert(conn, 1)
    members = claim(conn, runtime).members
    fall_silent(conn, runtime)
    with transaction(conn):
        settle(conn, runtime, members)
        assert fence(other, runtime) is False
        conn.execute("COMMIT")
    assert fence(other, runtime) is True
    assert rescue(other, runtime) == (0, 0, 0)
    assert state(conn, job) == "completed"


def test_a_late_settle_is_rejected_after_the_fence(conn: Conn, other: Conn) -> None:
    """Guard: AWA01; while the fence is not committed the lock refuses, and from the commit on the fence itself.

    Without either of the two a late outcome is recorded: both tried.
    """
    runtime = register(conn)
    [job] = insert(conn, 1)
    members = claim(conn, runtime).members
    fall_silent(conn, runtime)
    with transaction(other):
        assert fence(other, runtime) is True
        with pytest.raises(psycopg.errors.LockNotAvailable):
            settle(conn, runtime, members)
        other.execute("COMMIT")
    for done, others in ((members, []), ([], [Outcome(members[0], "failed")])):
        with pytest.raises(psycopg.Error) as caught:
            settle(conn, runtime, done, others)
        assert caught.value.sqlstate == "AWA01"
    assert state(conn, job) == "running"
    assert rescue(other, runtime) == (1, 1, 0)
    assert state(conn, job) == "available"


def test_two_settles_of_one_runtime_do_not_wait_for_each_other(conn: Conn, other: Conn) -> None:
    """Guard: the runtime's lock is shared; an exclusive one refuses the second: tried."""
    runtime = register(conn)
    insert(conn, 1, 2)
    first, second = claim(conn, runtime).members
    with transaction(conn):
        settle(conn, runtime, [first])
        assert settle(other, runtime, others=[Outcome(second, "retried")]) == []
        conn.execute("COMMIT")


def test_settles_that_end_the_same_attempts_in_opposite_order_do_not_deadlock(
    conn: Conn, other: Conn, third: Conn
) -> None:
    """Guard: ends are written in key order; the second flush waits, and finds the first one's ends."""
    runtime = register(conn)
    insert(conn, *range(20))
    members = claim(conn, runtime).members
    outcomes = [Outcome(member, "released") for member in members]
    conn.execute("ALTER FUNCTION awa.settle_v1 SET lock_timeout = '15s'")
    with transaction(third):
        complete(third, members[10])  # so that both stop half-way
        first = Background(lambda: settle(conn, runtime, others=outcomes))
        wait_for_lock(third, conn)
        second = Background(lambda: settle(other, runtime, others=outcomes[::-1]))
        wait_for_lock(third, other)
        third.execute("ROLLBACK")
    assert first.result() == []
    assert second.result() == [member.place for member in members]
    assert len(claim(conn, runtime).members) == 20
