"""Fencing a silent runtime and taking back its attempts.

Each docstring names the guard of the engine that the test fails without.
"""

from __future__ import annotations

import psycopg
import pytest

from awa.storage import runtimes
from tests.storage.engine import (
    AWA,
    Background,
    Claimed,
    Conn,
    Member,
    Outcome,
    claim,
    claim_in_steps,
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


def kill(conn: Conn, runtime: int) -> None:
    fall_silent(conn, runtime)
    assert fence(conn, runtime) is True


def heartbeat(conn: Conn, runtime: int, *, newest: int, opened: list[int]) -> bool:
    return runtimes.heartbeat(conn, AWA, runtime, newest_claim=newest, open_claims=opened)


# The fence


def test_a_runtime_that_was_heard_is_not_fenced(conn: Conn) -> None:
    """Guard: the fence reads last_seen_at itself; the caller's list may be old."""
    runtime = register(conn)
    assert fence(conn, runtime) is False
    assert scalar(conn, "SELECT count(*) FROM awa.gone_runtimes") == 0
    fall_silent(conn, runtime)
    assert heartbeat(conn, runtime, newest=0, opened=[]) is True
    assert fence(conn, runtime) is False
    fall_silent(conn, runtime)
    assert fence(conn, runtime) is True
    assert fence(conn, runtime) is True


def test_the_heartbeat_of_a_fenced_runtime_says_so_and_does_not_lift_the_fence(conn: Conn) -> None:
    """Guard: the heartbeat reads gone_runtimes, and writes nothing there."""
    runtime = register(conn)
    kill(conn, runtime)
    assert heartbeat(conn, runtime, newest=9, opened=[1]) is False
    assert scalar(conn, "SELECT newest_claim FROM awa.runtime_instances") == 0
    assert scalar(conn, "SELECT count(*) FROM awa.gone_runtimes") == 1


def test_only_a_fenced_runtime_is_rescued(conn: Conn) -> None:
    """Guard: rescue reads the fence; without it a living worker's attempts would run twice."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    claim(conn, runtime)
    fall_silent(conn, runtime)
    with pytest.raises(psycopg.Error, match=r"is not fenced: call awa\.fence_v1 first"):
        rescue(conn, runtime)
    assert state(conn, job) == "running"


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_fence_and_rescue_under_an_old_snapshot_are_refused(conn: Conn, isolation: str) -> None:
    """Guard: AWA02 in both; an older snapshot would not see what the runtime settled last."""
    runtime = register(conn)
    with transaction(conn, isolation), pytest.raises(psycopg.Error) as caught:
        fence(conn, runtime)
    assert caught.value.sqlstate == "AWA02"
    kill(conn, runtime)
    with transaction(conn, isolation), pytest.raises(psycopg.Error) as caught:
        rescue(conn, runtime)
    assert caught.value.sqlstate == "AWA02"


def test_a_fence_does_not_wait_and_holds_nobody_up(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: the exclusive lock is only tried; a waiting one blocks every settle behind it: tried."""
    runtime = register(conn)
    insert(conn, 1, 2)
    other.execute("SET statement_timeout = '5s'")  # so that it does not stand here for ever if it waits
    first, second = claim(conn, runtime).members
    fall_silent(conn, runtime)
    with transaction(conn):
        settle(conn, runtime, [first])
        assert fence(other, runtime) is False
        assert rescue_is_blocked(other, runtime)
        assert settle(third, runtime, [second]) == []
        conn.execute("COMMIT")


def rescue_is_blocked(conn: Conn, runtime: int) -> bool:
    # as if it had been fenced in another life: the lock counts, not the row
    with transaction(conn):
        conn.execute("INSERT INTO awa.gone_runtimes (runtime) VALUES (%s)", (runtime,))
        return rescue(conn, runtime) == (0, 0, 1)


def test_a_claim_of_a_runtime_is_not_overtaken_by_its_fence(conn: Conn, other: Conn) -> None:
    """Guard: a claim holds the runtime's lock shared; else its attempts would be in no rescuer's sight."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    fall_silent(conn, runtime)
    with transaction(conn):
        claim(conn, runtime)
        assert fence(other, runtime) is False
        conn.execute("COMMIT")
    assert fence(other, runtime) is True
    assert rescue(other, runtime) == (1, 1, 0)
    assert state(conn, job) == "available"


# Which attempts are open


def test_claims_above_the_newest_that_the_heartbeat_knew_are_found(conn: Conn) -> None:
    """Guard: every claim above the newest that the heartbeat knew; those made since are in no list, and lost: tried."""
    runtime = register(conn)
    ids = insert(conn, 1, 2, 3)
    first = claim(conn, runtime, limit=1)
    settle(conn, runtime, first.members)
    heartbeat(conn, runtime, newest=first.batches[-1], opened=[])
    claim(conn, runtime, limit=1)
    claim(conn, runtime, limit=1)
    kill(conn, runtime)
    assert rescue(conn, runtime) == (2, 2, 0)
    assert [state(conn, job) for job in ids] == ["completed", "available", "available"]


def test_older_claims_that_the_heartbeat_listed_are_found(conn: Conn) -> None:
    """Guard: open_claims, the list of the last heartbeat; without it their attempts are lost: tried."""
    runtime = register(conn)
    ids = insert(conn, *range(4))
    claims = [claim(conn, runtime, limit=1) for _ in range(4)]
    settle(conn, runtime, [claims[1].members[0], claims[3].members[0]])
    opened = [claims[0].batches[0], claims[2].batches[0]]
    heartbeat(conn, runtime, newest=claims[3].batches[0], opened=opened)
    kill(conn, runtime)
    assert rescue(conn, runtime) == (2, 2, 0)
    assert [state(conn, job) for job in ids] == ["available", "completed", "available", "completed"]


def test_claims_that_are_closed_are_not_even_looked_at(conn: Conn) -> None:
    """Guard: the rescuer believes the heartbeat, or it would read all that a runtime ever claimed."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    claimed = claim(conn, runtime)
    heartbeat(conn, runtime, newest=claimed.batches[0], opened=[])
    kill(conn, runtime)
    assert rescue(conn, runtime) == (0, 0, 0)
    assert state(conn, job) == "running"


def test_members_that_ended_in_any_way_are_left_alone(conn: Conn) -> None:
    """Guard: rescue reads completions and ends of the members; else it finds what has ended: tried."""
    runtime = register(conn)
    ids = insert(conn, *range(5))
    members = claim(conn, runtime).members
    settle(conn, runtime, [members[0]], [Outcome(members[1], "cancelled"), Outcome(members[2], "retried", 60.0)])
    complete(conn, members[3])
    kill(conn, runtime)
    assert rescue(conn, runtime) == (1, 1, 0)
    assert [state(conn, job) for job in ids] == ["completed", "cancelled", "retryable", "completed", "available"]
    assert rescue(conn, runtime) == (0, 0, 0)


def test_another_runtimes_attempts_are_left_alone(conn: Conn) -> None:
    """Guard: claims are found by runtime."""
    dead, living = register(conn), register(conn)
    ids = insert(conn, 1, 2)
    claim(conn, dead, limit=1)
    claim(conn, living, limit=1)
    kill(conn, dead)
    assert rescue(conn, dead) == (1, 1, 0)
    assert [state(conn, job) for job in ids] == ["available", "running"]


def test_claims_in_sealed_segments_are_found(conn: Conn) -> None:
    """Guard: rescue looks through every slot, and the next entry goes to the current one."""
    runtime = register(conn)
    ids = insert(conn, 1)
    claim(conn, runtime)
    conn.execute("SELECT setval('awa.ring_seq', 4)")
    ids += insert(conn, 2)
    claim(conn, runtime)
    kill(conn, runtime)
    assert rescue(conn, runtime) == (2, 2, 0)
    assert [state(conn, job) for job in ids] == ["available", "available"]
    assert conn.execute("SELECT slot, outcome FROM awa.attempt_ends ORDER BY slot").fetchall() == [
        (0, "rescued"),
        (4, "rescued"),
    ]
    assert conn.execute("SELECT DISTINCT slot FROM awa.jobs WHERE attempt = 2").fetchall() == [(4,)]


# What becomes of them


def test_a_rescued_job_comes_first_with_its_next_attempt(conn: Conn) -> None:
    """Guard: rescued entries go to the express lane; an attempt counts when it is claimed."""
    dead, living = register(conn), register(conn)
    insert(conn, 1, 2)
    claim(conn, dead, limit=1)
    kill(conn, dead)
    rescue(conn, dead)
    first, second = claim(conn, living), claim(conn, living)  # a rescued one comes alone
    assert (first.numbers, first.members[0].attempt) == ([1], 2)
    assert (second.numbers, second.members[0].attempt) == ([2], 1)


def test_a_job_whose_attempts_are_used_up_fails_and_says_that_its_worker_died(conn: Conn) -> None:
    """Guard: the limit of attempts in end_attempts; without it such a job kills workers for ever."""
    [job, beside] = [*insert(conn, 1, max_attempts=2), *insert(conn, 2)]
    for pid in (41, 42):
        runtime = register(conn, host="alpha", pid=pid)
        claim(conn, runtime), claim(conn, runtime)
        kill(conn, runtime)
        assert rescue(conn, runtime) == (2, 2, 0)
    assert (state(conn, job), state(conn, beside)) == ("failed", "available")
    history = scalar(conn, "SELECT history FROM awa.find_job_v1(%s)", job)
    assert [(item["attempt"], item["outcome"], item["type"]) for item in history] == [
        (1, "rescued", "WorkerDied"),
        (2, "rescued", "WorkerDied"),
    ]
    assert history[1]["text"].startswith("its worker died: host alpha, process 42, last seen ")
    assert scalar(conn, "SELECT count(*) FROM awa.ended_jobs") == 1


def test_a_late_outcome_is_rejected_after_rescue_and_the_new_attempt_counts(conn: Conn) -> None:
    """Guard: AWA01 for the old runtime; the new attempt is another entry under another claim."""
    dead, living = register(conn), register(conn)
    [job] = insert(conn, 1)
    late = claim(conn, dead).members
    kill(conn, dead)
    rescue(conn, dead)
    with pytest.raises(psycopg.Error) as caught:
        settle(conn, dead, late)
    assert caught.value.sqlstate == "AWA01"
    again = claim(conn, living).members
    assert settle(conn, living, again) == []
    assert state(conn, job) == "completed"
    assert scalar(conn, "SELECT count(*) FROM awa.completions") == 1


def test_many_open_attempts_are_taken_in_steps(conn: Conn) -> None:
    runtime = register(conn)
    insert(conn, *range(10))
    claim(conn, runtime, limit=4)
    claim(conn, runtime, limit=6)
    kill(conn, runtime)
    assert [rescue(conn, runtime, limit=4) for _ in range(4)] == [(4, 4, 0), (4, 4, 0), (2, 2, 0), (0, 0, 0)]


# Attempts that an open transaction is completing


def three_of_a_dead_runtime(conn: Conn) -> tuple[int, list[int], list[Member]]:
    runtime = register(conn)
    ids = insert(conn, 1, 2, 3)
    claimed: Claimed = claim(conn, runtime)
    return runtime, ids, claimed.members


def test_an_attempt_that_an_open_transaction_completes_is_skipped_and_the_others_proceed(
    conn: Conn, other: Conn
) -> None:
    """Guard: lock_timeout, then each member by itself; blocked ones are counted and left for a later call."""
    runtime, ids, members = three_of_a_dead_runtime(conn)
    warnings: list[str] = []
    conn.add_notice_handler(lambda notice: warnings.append(notice.message_primary or ""))
    with transaction(other):
        complete(other, members[1])
        kill(conn, runtime)
        assert rescue(conn, runtime) == (3, 2, 1)
        assert [text.partition(" now")[0] for text in warnings] == [
            f"awa: member 2 of claim {members[1].claim_id} cannot be rescued"
        ]
        assert [state(conn, job) for job in ids] == ["available", "running", "available"]
        assert rescue(conn, runtime) == (1, 0, 1)
        assert rescue(conn, runtime, skip=1) == (0, 0, 0)
        other.execute("COMMIT")
    assert rescue(conn, runtime) == (0, 0, 0)
    assert state(conn, ids[1]) == "completed"


def test_an_attempt_whose_completing_transaction_rolls_back_is_rescued_after_all(conn: Conn, other: Conn) -> None:
    """Guard: what was blocked is found again by the next call."""
    runtime, ids, members = three_of_a_dead_runtime(conn)
    with transaction(other):
        complete(other, members[0])
        kill(conn, runtime)
        assert rescue(conn, runtime) == (3, 2, 1)
        other.execute("ROLLBACK")
    assert rescue(conn, runtime) == (1, 1, 0)
    assert [state(conn, job) for job in ids] == ["available"] * 3
    with pytest.raises(psycopg.errors.UniqueViolation):
        complete(other, members[0])


def test_blocked_attempts_do_not_hide_those_behind_them(conn: Conn, other: Conn) -> None:
    """Guard: p_skip; with a limit alone the blocked ones would be looked at for ever."""
    runtime, ids, members = three_of_a_dead_runtime(conn)
    with transaction(other):
        complete(other, members[0])
        complete(other, members[1])
        kill(conn, runtime)
        assert rescue(conn, runtime, limit=2) == (2, 0, 2)
        assert rescue(conn, runtime, limit=2, skip=2) == (1, 1, 0)
        assert [state(conn, job) for job in ids] == ["running", "running", "available"]
        other.execute("ROLLBACK")


def test_a_completion_that_commits_while_the_rescuer_waits_wins(conn: Conn, other: Conn) -> None:
    """Guard: the end is written with ON CONFLICT DO NOTHING, and only written ends are followed by an entry."""
    runtime, ids, members = three_of_a_dead_runtime(conn)
    kill(conn, runtime)
    conn.execute("ALTER FUNCTION awa.rescue_v1 SET lock_timeout = '15s'")
    with transaction(other):
        complete(other, members[1])
        rescuer = Background(lambda: rescue(conn, runtime))
        wait_for_lock(other, conn)
        other.execute("COMMIT")
    assert rescuer.result() == (3, 2, 0)
    assert [state(other, job) for job in ids] == ["available", "completed", "available"]


def test_two_rescuers_do_not_wait_for_each_other(conn: Conn, other: Conn) -> None:
    """Guard: rescue tries the runtime's lock exclusively; the second one is told that it is blocked."""
    runtime, _, _ = three_of_a_dead_runtime(conn)
    kill(conn, runtime)
    with transaction(conn):
        assert rescue(conn, runtime, limit=1) == (1, 1, 0)
        assert rescue(other, runtime) == (0, 0, 1)
        conn.execute("COMMIT")
    assert rescue(other, runtime) == (2, 2, 0)
    assert claim_in_steps(conn, register(conn), limit=10) == [1, 2, 3]
