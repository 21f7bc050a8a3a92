"""Cancelling beside everything else that may happen to the job at that moment."""

from __future__ import annotations

import psycopg
import pytest

from awa.errors import JobBusy, JobNotFound
from awa.job import JobState
from awa.storage import control
from awa.storage.control import Controlled
from tests.storage.engine import (
    AWA,
    BUSY,
    Background,
    Conn,
    Outcome,
    Pause,
    cancel,
    claim,
    complete,
    fall_silent,
    fence,
    insert,
    places,
    promote,
    register,
    rescue,
    scalar,
    settle,
    state,
    transaction,
    wait_for_lock,
)
from tests.storage.lives import (
    ASKED,
    DONE,
    REQUESTS,
    Make,
    history,
    make_available,
    make_express,
    make_running,
    make_scheduled,
    make_set_aside,
    one,
)

# Beside an open claim


def test_an_entry_in_an_open_claim_is_left_alone(conn: Conn, other: Conn) -> None:
    """Guard (own lock): ending an unclaimed entry needs the claim lock; an open claim is invisible."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    with transaction(other):
        claim(other, runtime)
        assert state(conn, job) == "available"
        assert cancel(conn, job) == ("busy", "available")
        other.execute("COMMIT")
    assert places(conn, job) == {"entries": 1}
    assert cancel(conn, job) == ASKED


def test_a_claim_that_commits_while_a_cancel_tries(conn: Conn, other: Conn) -> None:
    runtime = register(conn)
    [job] = insert(conn, 1)
    with transaction(other):
        claim(other, runtime)
        canceller = Background(lambda: cancel(conn, job))
        other.execute("SELECT pg_sleep(0.1)")
        assert canceller.is_running
        other.execute("COMMIT")
    assert canceller.result() == ASKED


def test_a_claim_between_the_look_and_the_lock(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard (check after the lock): what was available before the lock may be running under it."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    pause = Pause(third)
    canceller = Background(lambda: cancel(conn, job))
    wait_for_lock(other, conn)
    [member] = claim(other, runtime).members
    pause.go_on()
    assert canceller.result() == ASKED
    assert settle(other, runtime, [member]) == []
    assert state(conn, job) == "completed"
    assert places(conn, job) == {"entries": 1}


def test_another_cancel_between_the_look_and_the_lock(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard (check after the lock): an entry that has ended meanwhile is not ended again."""
    [job] = insert(conn, 1)
    pause = Pause(third)
    canceller = Background(lambda: cancel(conn, job, "first"))
    wait_for_lock(other, conn)
    other.execute("CREATE TEMPORARY TABLE x ()")
    second = Background(lambda: cancel(other, job, "second"))
    wait_for_lock(third, other)
    pause.go_on()
    assert sorted([canceller.result(), second.result()]) == [DONE, ("nothing", "cancelled")]
    assert len(history(conn, job)) == 1


def test_a_cancel_that_is_not_committed_holds_claims_off(conn: Conn, other: Conn) -> None:
    """Guard: the claim lock is held until the commit; a claim before it would start a cancelled job."""
    runtime = register(conn)
    first, second = insert(conn, 1, 2)
    for ending, brought in (("ROLLBACK", [first, second]), ("COMMIT", [])):
        with transaction(other):
            assert cancel(other, first) == DONE
            busy = claim(conn, runtime)
            assert (busy.members, busy.flags & BUSY) == ([], BUSY)
            if ending == "COMMIT":
                other.execute(ending)
            else:
                other.execute("ROLLBACK")
                claimed = claim(conn, runtime)
                assert claimed.ids == brought
                settle(conn, runtime, others=[Outcome(member, "released") for member in claimed.members])
    assert claim(conn, runtime).ids == [second]


# Beside settle


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("outcome", "delay", "then"),
    [
        ("retried", 60.0, DONE),
        ("released", 0.0, DONE),
        ("failed", 0.0, ("nothing", "failed")),
        ("completed", 0.0, ("nothing", "completed")),
        ("plain", 0.0, ("nothing", "completed")),
    ],
)
def test_a_settle_that_is_open_goes_first(
    conn: Conn, other: Conn, force: bool, outcome: str, delay: float, then: tuple[str, str]
) -> None:
    """Guard (own lock): a request, or an end, beside an open settle would be lost, or a second one."""
    runtime = register(conn)
    member = one(conn, runtime)
    with transaction(other):
        if outcome == "plain":
            settle(other, runtime, [member])
        else:
            settle(other, runtime, others=[Outcome(member, outcome, delay)])
        assert cancel(conn, member.id, force=force) == ("busy", "running")
        assert scalar(conn, REQUESTS) == 0
        canceller = Background(lambda: cancel(conn, member.id, force=force))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("COMMIT")
    assert canceller.result() == then
    assert scalar(conn, REQUESTS) == 0
    assert state(conn, member.id) == then[1]
    assert sum(places(conn, member.id).values()) == 1


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(("outcome", "then"), [("retried", DONE), ("plain", ("nothing", "completed"))])
def test_a_settle_between_the_look_and_the_lock(
    conn: Conn, other: Conn, third: Conn, force: bool, outcome: str, then: tuple[str, str]
) -> None:
    """Guard (check after the lock): completions and ends are read in a statement that starts after it."""
    runtime = register(conn)
    member = one(conn, runtime)
    pause = Pause(third)
    canceller = Background(lambda: cancel(conn, member.id, force=force))
    wait_for_lock(other, conn)
    if outcome == "plain":
        settle(other, runtime, [member])
    else:
        settle(other, runtime, others=[Outcome(member, outcome)])
    pause.go_on()
    assert canceller.result() == then
    assert scalar(conn, REQUESTS) == 0
    assert sum(places(conn, member.id).values()) == 1


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("outcome", ["retried", "plain"])
def test_a_cancel_that_is_open_goes_first(conn: Conn, other: Conn, force: bool, outcome: str) -> None:
    """Guard: the runtime's lock is held until the commit; settle is told to come again."""
    runtime = register(conn)
    member = one(conn, runtime)

    def report() -> list[tuple[int, int]]:
        if outcome == "plain":
            return settle(conn, runtime, [member])
        return settle(conn, runtime, others=[Outcome(member, outcome)])

    with transaction(other):
        assert cancel(other, member.id, force=force) == (DONE if force else ASKED)
        with pytest.raises(psycopg.errors.LockNotAvailable):
            report()
        other.execute("COMMIT")
    assert report() == ([member.place] if force else [])
    assert state(conn, member.id) == ("completed" if outcome == "plain" and not force else "cancelled")
    assert sum(places(conn, member.id).values()) == 1


# Beside rescue, promotion, and claims of what was set aside


@pytest.mark.parametrize("force", [False, True])
def test_a_rescue_that_is_open_goes_first(conn: Conn, other: Conn, force: bool) -> None:
    """Guard (own lock): rescue holds the runtime's lock; the job's next entry is then cancelled."""
    runtime = register(conn)
    job, _ = make_running(conn, runtime)
    fall_silent(conn, runtime)
    assert fence(conn, runtime)
    with transaction(other):
        assert rescue(other, runtime) == (1, 1, 0)
        assert cancel(conn, job, force=force) == ("busy", "running")
        canceller = Background(lambda: cancel(conn, job, force=force))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("COMMIT")
    assert canceller.result() == DONE
    assert places(conn, job) == {"ended": 1}
    assert [item[:2] for item in history(conn, job)] == [(1, "rescued"), (2, "cancelled")]


@pytest.mark.parametrize("force", [False, True])
def test_a_rescue_beside_an_open_cancel_is_blocked(conn: Conn, other: Conn, force: bool) -> None:
    runtime = register(conn)
    job, _ = make_running(conn, runtime)
    fall_silent(conn, runtime)
    assert fence(conn, runtime)
    with transaction(other):
        assert cancel(other, job, force=force) == (DONE if force else ASKED)
        assert rescue(conn, runtime) == (0, 0, 1)
        other.execute("COMMIT")
    assert rescue(conn, runtime) == ((0, 0, 0) if force else (1, 1, 0))
    assert places(conn, job) == {"ended": 1}
    assert state(conn, job) == "cancelled"


def test_a_job_that_is_being_promoted(conn: Conn, other: Conn) -> None:
    """Guard: the row is only tried (SKIP LOCKED, lock_timeout), and the job is looked for again where it went."""
    runtime = register(conn)
    job, _ = make_scheduled(conn, runtime)
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    with transaction(other):
        assert promote(other) == 1
        assert cancel(conn, job) == ("busy", "scheduled")
        canceller = Background(lambda: cancel(conn, job))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("COMMIT")
    assert canceller.result() == DONE
    assert places(conn, job) == {"ended": 1}
    assert claim(conn, runtime).members == []


def test_a_promotion_beside_an_open_cancel_passes_the_job_over(conn: Conn, other: Conn) -> None:
    runtime = register(conn)
    job, _ = make_scheduled(conn, runtime)
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    with transaction(other):
        assert cancel(other, job) == DONE
        assert promote(conn) == 0
        other.execute("COMMIT")
    assert promote(conn) == 0
    assert places(conn, job) == {"ended": 1}


def test_a_promotion_between_the_look_and_the_row(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: a row that is gone is no success; the job is looked for again."""
    runtime = register(conn)
    job, _ = make_scheduled(conn, runtime)
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    pause = Pause(third)
    canceller = Background(lambda: cancel(conn, job))
    wait_for_lock(other, conn)
    assert promote(other) == 1
    [member] = claim(other, runtime).members
    pause.go_on()
    assert canceller.result() == ASKED
    settle(conn, runtime, others=[Outcome(member, "retried")])
    assert places(conn, job) == {"ended": 1}


def test_a_job_that_is_being_taken_from_aside(conn: Conn, other: Conn) -> None:
    runtime = register(conn)
    job, _ = make_set_aside(conn, runtime)
    with transaction(other):
        assert claim(other, runtime, kinds=["new"]).ids == [job]
        assert cancel(conn, job) == ("busy", "available")
        canceller = Background(lambda: cancel(conn, job))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("COMMIT")
    assert canceller.result() == ASKED
    assert places(conn, job) == {"entries": 1}


# Beside the ring


def test_no_segment_is_emptied_while_a_job_is_looked_for(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: the lock on awa.jobs. What was carried out is younger than the look, which finds nothing."""
    [job] = insert(conn, 1)
    conn.execute("SELECT awa.rotate_v1()")
    pause = Pause(third, inside=True)
    canceller = Background(lambda: cancel(conn, job))
    wait_for_lock(other, conn)
    assert scalar(other, "SELECT awa.carry_v1(0::smallint, 'q', 10)") == 1
    assert scalar(other, "SELECT awa.prune_v1(0::smallint, 1, pg_relation_filenode('awa.jobs_0'))") == "busy"
    pause.go_on()
    assert canceller.result() == DONE
    assert scalar(other, "SELECT awa.prune_v1(0::smallint, 1, pg_relation_filenode('awa.jobs_0'))") == "pruned"
    assert (state(conn, job), places(conn, job)) == ("cancelled", {"ended": 1})


# Beside a completion in a handler's own transaction


def test_force_beside_an_open_completion_is_told_to_come_again(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: lock_timeout; the unique key waits for the other transaction, which may stay open for hours.

    In between the worker's other attempts are settled: the runtime's lock is given back before each pause.
    """
    runtime = register(conn)
    insert(conn, 1, 2)
    first, second = claim(conn, runtime).members
    with transaction(other):
        complete(other, first)
        assert cancel(conn, first.id, force=True) == ("busy", "running")
        canceller = Background(lambda: cancel(conn, first.id, force=True))
        wait_for_lock(third, conn)
        for _ in range(50):
            try:
                assert settle(third, runtime, [second]) == []
                break
            except psycopg.errors.LockNotAvailable:
                third.execute("SELECT pg_sleep(0.01)")
        assert state(third, second.id) == "completed"
        assert canceller.result() == ("busy", "running")
        other.execute("COMMIT")
    assert cancel(conn, first.id, force=True) == ("nothing", "completed")
    assert scalar(conn, REQUESTS) == 0


def test_force_after_a_completion_that_was_rolled_back(conn: Conn, other: Conn) -> None:
    runtime = register(conn)
    member = one(conn, runtime)
    with transaction(other):
        complete(other, member)
        canceller = Background(lambda: cancel(conn, member.id, force=True))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("ROLLBACK")
    assert canceller.result() == DONE
    assert places(conn, member.id) == {"ended": 1}


@pytest.mark.parametrize(("ending", "then"), [("COMMIT", "completed"), ("ROLLBACK", "cancelled")])
def test_a_request_beside_an_open_completion(conn: Conn, other: Conn, ending: str, then: str) -> None:
    """A request waits for nobody; a completion that commits is a success."""
    runtime = register(conn)
    member = one(conn, runtime)
    with transaction(other):
        complete(other, member)
        assert cancel(conn, member.id) == ASKED
        other.execute("COMMIT" if ending == "COMMIT" else "ROLLBACK")
    settle(conn, runtime, others=[Outcome(member, "retried")])
    assert state(conn, member.id) == then
    control.forget_requests(conn, AWA, runtime, [member.entry_id])
    assert scalar(conn, REQUESTS) == 0


# Twice at once


@pytest.mark.parametrize("make", [make_scheduled, make_set_aside, make_available, make_express])
def test_two_cancels_at_once_end_a_job_once(conn: Conn, other: Conn, make: Make) -> None:
    job, _ = make(conn, register(conn))
    with transaction(other):
        assert cancel(other, job, "first") == DONE
        canceller = Background(lambda: cancel(conn, job, "second"))
        other.execute("SELECT pg_sleep(0.05)")
        assert canceller.is_running
        other.execute("COMMIT")
    assert canceller.result() == ("nothing", "cancelled")
    assert places(conn, job) == {"ended": 1}
    assert history(conn, job)[-1][3] == "first"


@pytest.mark.parametrize(
    ("first", "second", "then"),
    [
        (False, False, ASKED),
        (True, True, ("nothing", "cancelled")),
        (True, False, ("nothing", "cancelled")),
        (False, True, DONE),
    ],
)
def test_two_cancels_of_a_running_job_at_once(
    conn: Conn, other: Conn, first: bool, second: bool, then: tuple[str, str]
) -> None:
    job, _ = make_running(conn, register(conn))
    with transaction(other):
        assert cancel(other, job, "first", force=first) == (DONE if first else ASKED)
        canceller = Background(lambda: cancel(conn, job, "second", force=second))
        other.execute("SELECT pg_sleep(0.05)")
        assert canceller.is_running
        other.execute("COMMIT")
    assert canceller.result() == then
    assert scalar(conn, REQUESTS) == 1
    if not first and second:
        assert history(conn, job) == [(1, "cancelled", "Cancelled", "first\nCancelled: second")]


def test_what_is_given_up_holds_no_lock(conn: Conn, other: Conn) -> None:
    """Guard: each try is a subtransaction, which gives its locks back."""
    runtime = register(conn)
    member = one(conn, runtime)
    with transaction(other):
        complete(other, member)
        conn.execute("BEGIN")
        assert cancel(conn, member.id, force=True) == ("busy", "running")
        held = scalar(
            conn, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = %s", conn.info.backend_pid
        )
        conn.execute("ROLLBACK")
        assert held == 0


# As Python says it


def test_what_happened_comes_as_a_record(conn: Conn, other: Conn) -> None:
    runtime = register(conn)
    insert(conn, 1, 2)
    [member] = claim(conn, runtime, limit=1).members
    available = scalar(conn, "SELECT max(id) FROM awa.jobs")
    assert control.cancel_job(conn, AWA, available) == Controlled(available, "cancelled", JobState.CANCELLED)
    assert control.cancel_job(conn, AWA, available) == Controlled(available, "nothing", JobState.CANCELLED)
    asked = control.cancel_job(conn, AWA, member.id, reason="x")
    assert asked == Controlled(member.id, "requested", JobState.RUNNING)
    assert type(asked.state) is JobState
    with pytest.raises(JobNotFound) as missing:
        control.cancel_job(conn, AWA, 4711)
    assert missing.value.job_id == 4711
    with transaction(other):
        settle(other, runtime, [member])
        with pytest.raises(JobBusy, match=f"job {member.id}, which is running, was held") as caught:
            control.cancel_job(conn, AWA, member.id)
    assert caught.value.job_id == member.id
