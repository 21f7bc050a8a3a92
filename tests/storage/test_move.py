"""Moving a job to another queue at every moment of its life, beside claims, promotion and other moves.

Each docstring names the guard of the engine that the test fails without.
"""

from __future__ import annotations

import psycopg
import pytest

from awa.errors import JobBusy, JobNotFound
from awa.job import JobState
from awa.storage import control
from awa.storage.control import Controlled
from tests.storage.engine import (
    ALONE,
    AWA,
    BUSY,
    Background,
    Conn,
    Outcome,
    Pause,
    cancel,
    claim,
    claim_in_steps,
    fall_silent,
    fence,
    insert,
    limit_keys,
    move,
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


def queue_of(conn: Conn, job: int) -> str:
    return str(scalar(conn, "SELECT queue FROM awa.find_job_v1(%s)", job))


def test_an_available_job_comes_last_in_the_other_queue(conn: Conn) -> None:
    """Guard: the entry ends, and its next one is appended to the main lane of the other queue."""
    runtime = register(conn)
    ids = insert(conn, 1, 2, 3)
    insert(conn, 4, 5, queue="b")
    assert move(conn, ids[1], "b") == ("moved", "available")
    assert (state(conn, ids[1]), queue_of(conn, ids[1])) == ("available", "b")
    assert places(conn, ids[1]) == {"entries": 1}
    insert(conn, 6, queue="b")
    assert claim_in_steps(conn, runtime, limit=1) == [1, 3]
    claimed = claim(conn, runtime, queue="b")
    assert claimed.numbers == [4, 5, 2, 6]
    assert claimed.ids[2] == ids[1]
    assert settle(conn, runtime, claimed.members) == []
    assert (state(conn, ids[1]), queue_of(conn, ids[1])) == ("completed", "b")
    assert conn.execute("SELECT claim_id, outcome FROM awa.attempt_ends").fetchall() == [(None, "moved")]


def test_a_job_moves_there_and_back_and_on(conn: Conn) -> None:
    runtime = register(conn)
    [job] = insert(conn, 1)
    for queue in ("b", "q", "b", "c"):
        assert move(conn, job, queue) == ("moved", "available")
        assert (state(conn, job), queue_of(conn, job)) == ("available", queue)
    assert [claim(conn, runtime, queue=queue).ids for queue in ("q", "b", "c")] == [[], [], [job]]


def test_a_moved_job_is_all_that_it_was(conn: Conn) -> None:
    """Guard: every column of a body is copied; the attempt and the history too."""
    runtime = register(conn)
    columns = (
        "id, kind, priority, attempt, max_attempts, timeout_ms, args::text, metadata::text, tags, concurrency_key,"
        " ordering_key, unique_key, expires_at, follow_ups::text, history::text"
    )
    conn.execute(
        "INSERT INTO awa.jobs (queue, kind, lane, priority, max_attempts, timeout_ms, args, metadata, tags,"
        "  concurrency_key, ordering_key, unique_key, expires_at, follow_ups)"
        " VALUES ('q', 'noop', 3, 1, 9, 77, '{\"n\":  1}', '{\"m\": 1}', '{a}', 'c', 'o', 'u', '2100-01-01', '[1]')"
    )
    job = scalar(conn, "SELECT id FROM awa.jobs")
    created_at = scalar(conn, "SELECT available_at FROM awa.jobs")
    settle(conn, runtime, others=[Outcome(claim(conn, runtime).members[0], "retried")])
    newest = f"SELECT {columns}, created_at FROM awa.jobs ORDER BY entry_id DESC LIMIT 1"
    before = conn.execute(newest).fetchone()
    assert before is not None and before[-1] == created_at
    assert move(conn, job, "b") == ("moved", "available")
    assert conn.execute(newest).fetchone() == before
    assert scalar(conn, "SELECT lane FROM awa.jobs WHERE queue = 'b'") == 3
    [member] = claim(conn, runtime, queue="b").members
    assert (member.id, member.attempt, member.priority) == (job, 2, 1)


def test_a_job_that_may_have_killed_its_worker_is_claimed_alone_there_too(conn: Conn) -> None:
    """Guard: it goes to the express lane, the only one in which claims look for such jobs."""
    dead, runtime = register(conn), register(conn)
    [job] = insert(conn, 1)
    insert(conn, 2, 3, queue="b")
    claim(conn, dead)
    fall_silent(conn, dead)
    assert fence(conn, dead)
    assert rescue(conn, dead) == (1, 1, 0)
    assert move(conn, job, "b") == ("moved", "available")
    alone = claim(conn, runtime, queue="b")
    assert (alone.ids, alone.flags & ALONE) == ([job], ALONE)
    assert claim(conn, runtime, queue="b").numbers == [2, 3]


def test_a_job_that_waits_for_a_time_runs_in_the_other_queue_at_that_time(conn: Conn) -> None:
    runtime = register(conn)
    insert(conn, 1, 2)
    for member, outcome in zip(claim(conn, runtime).members, ("snoozed", "retried"), strict=True):
        settle(conn, runtime, others=[Outcome(member, outcome, 60.0)])
        before = scalar(conn, "SELECT run_at FROM awa.waiting_jobs WHERE id = %s", member.id)
        expected = "scheduled" if outcome == "snoozed" else "retryable"
        assert move(conn, member.id, "b") == ("moved", expected)
        assert (state(conn, member.id), queue_of(conn, member.id)) == (expected, "b")
        assert scalar(conn, "SELECT run_at FROM awa.waiting_jobs WHERE id = %s", member.id) == before
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    assert promote(conn) == 2
    assert claim(conn, runtime).members == []
    assert sorted(claim(conn, runtime, queue="b").numbers) == [1, 2]


def test_a_job_that_waits_for_a_kind_is_taken_in_the_other_queue(conn: Conn, other: Conn) -> None:
    """Guard: it comes behind those that wait there, and whoever knows its kind is called, bell or not."""
    runtime = register(conn)
    heard: list[str] = []
    other.execute(f"LISTEN {AWA.channel}")
    other.add_notify_handler(lambda notification: heard.append(notification.payload))
    [job] = insert(conn, 1, kind="new")
    [there] = insert(conn, 2, kind="new", queue="b")
    for queue in ("q", "b"):
        assert claim(conn, runtime, kinds=["noop"], queue=queue).members == []
    other.execute("SELECT 1")
    heard.clear()
    assert move(conn, job, "b") == ("moved", "available")
    other.execute("SELECT 1")
    assert heard == ["\x01b"]
    assert claim(conn, runtime, kinds=["new"]).members == []
    assert claim(conn, runtime, kinds=["new"], queue="b").ids == [there, job]


def test_a_move_rings_for_who_sleeps_in_the_other_queue(conn: Conn, other: Conn) -> None:
    """Guard: the bell of the other queue, not of its own."""
    heard: list[str] = []
    other.add_notify_handler(lambda notification: heard.append(notification.payload))
    other.execute(f"LISTEN {AWA.channel}")
    runtime = register(conn)
    for queue in ("q", "b"):
        claim(other, runtime, queue=queue, bell=True)
    [job] = insert(conn, 1)
    assert move(conn, job, "b") == ("moved", "available")
    other.execute("SELECT 1")
    assert heard == ["b"]


@pytest.mark.parametrize("kind", ["noop", "new"])
def test_the_same_queue_is_no_move(conn: Conn, kind: str) -> None:
    runtime = register(conn)
    [job] = insert(conn, 1, kind=kind)
    if kind == "new":
        claim(conn, runtime, kinds=["noop"])
    assert move(conn, job, "q") == ("nothing", "available")
    assert scalar(conn, "SELECT count(*) FROM awa.jobs") == 1
    assert scalar(conn, "SELECT count(*) FROM awa.attempt_ends WHERE outcome = 'moved'") == 0


@pytest.mark.parametrize("outcome", [None, "completed", "failed", "cancelled"])
@pytest.mark.parametrize("queue", ["q", "b"])
def test_what_runs_or_has_ended_is_not_moved(conn: Conn, outcome: str | None, queue: str) -> None:
    runtime = register(conn)
    [job] = insert(conn, 1)
    [member] = claim(conn, runtime).members
    if outcome == "completed":
        settle(conn, runtime, [member])
    elif outcome is not None:
        settle(conn, runtime, others=[Outcome(member, outcome)])
    assert move(conn, job, queue) == ("refused", outcome or "running")
    assert (state(conn, job), queue_of(conn, job)) == (outcome or "running", "q")
    assert scalar(conn, "SELECT count(*) FROM awa.jobs") == 1


def test_an_unknown_job_is_not_found(conn: Conn) -> None:
    assert move(conn, 4711, "b") == ("not_found", None)


@pytest.mark.parametrize("name", ["", "x" * 201, None])
def test_a_name_that_no_queue_can_have_is_refused(conn: Conn, name: str) -> None:
    [job] = insert(conn, 1)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="1 to 200 characters"):
        move(conn, job, name)
    assert queue_of(conn, job) == "q"
    assert move(conn, job, "ě" * 200) == ("moved", "available")


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_an_old_snapshot_is_refused(conn: Conn, isolation: str) -> None:
    """Guard: AWA02; an older snapshot would not show a claim."""
    [job] = insert(conn, 1)
    with transaction(conn, isolation), pytest.raises(psycopg.Error) as caught:
        move(conn, job, "b")
    assert caught.value.sqlstate == "AWA02"
    assert queue_of(conn, job) == "q"


def test_entries_of_a_segment_that_is_not_current(conn: Conn) -> None:
    """Guard: the end lies in the slot of the entry, the next entry in the current one."""
    [job] = insert(conn, 1)
    conn.execute("SELECT setval('awa.ring_seq', 4)")
    assert move(conn, job, "b") == ("moved", "available")
    assert scalar(conn, "SELECT slot FROM awa.attempt_ends") == 0
    assert conn.execute("SELECT slot, queue FROM awa.jobs ORDER BY entry_id").fetchall() == [(0, "q"), (4, "b")]


# Keys


def granted(conn: Conn) -> list[tuple[str, str, int]]:
    """Who has a key of which queue."""
    query = "SELECT queue, scope, id FROM awa.grants WHERE NOT is_over ORDER BY queue, id"
    return [(row[0], row[1], row[2]) for row in conn.execute(query)]


@pytest.mark.parametrize("is_promoted", [False, True])
def test_a_job_that_leaves_gives_its_order_to_the_next(conn: Conn, is_promoted: bool) -> None:
    """Guard: release_grants, of a job that waits and of one in a lane; in the other queue it begins anew."""
    runtime = register(conn)
    first, second, third = insert(conn, 1, 2, 3, order="o")
    settle(conn, runtime, others=[Outcome(claim(conn, runtime).members[0], "retried", 60.0)])
    if is_promoted:
        conn.execute("UPDATE awa.waiting_jobs SET run_at = now() WHERE waits_for = 'time'")
        assert promote(conn) == 1
    assert granted(conn) == [("q", "order", first)]
    assert move(conn, first, "b")[0] == "moved"
    assert granted(conn) == []
    assert claim_in_steps(conn, runtime, limit=10) == [2]
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now() WHERE waits_for = 'time'")
    promote(conn)
    assert claim(conn, runtime, queue="b").ids == [first]
    assert granted(conn) == [("b", "order", first), ("q", "order", second)]
    assert (state(conn, third), queue_of(conn, third)) == ("available", "q")


@pytest.mark.parametrize("scope", ["order", "key"])
def test_a_job_to_which_a_key_was_handed_over_hands_it_on(conn: Conn, scope: str) -> None:
    """Guard: release_grants; nobody else would ever tell that its turn is over."""
    runtime = register(conn)
    limit_keys(conn, 1)
    _, second, third = insert(conn, 1, 2, 3, **{scope: "k"})
    settle(conn, runtime, claim(conn, runtime).members)
    assert claim(conn, runtime).members == []
    assert granted(conn) == [("q", scope, second)]
    assert move(conn, second, "b") == ("moved", "available")
    assert claim_in_steps(conn, runtime, limit=10) == [3]
    assert granted(conn) == [("q", scope, third)]
    assert claim(conn, runtime, queue="b").ids == [second]


@pytest.mark.parametrize("scope", ["order", "key"])
@pytest.mark.parametrize("is_taken", [False, True])
def test_a_job_that_waits_for_a_key_waits_for_that_of_the_other_queue(conn: Conn, scope: str, is_taken: bool) -> None:
    """Guard: look_at_key; without a row of grants there, nobody would look for it. Others that wait there go first."""
    runtime = register(conn)
    for queue in ("q", "b"):
        limit_keys(conn, 1, queue=queue)
    first, second = insert(conn, 1, 2, **{scope: "k"})
    held = claim(conn, runtime).members
    there = []
    if is_taken:
        insert(conn, 3, 4, queue="b", **{scope: "k"})
        there = claim(conn, runtime, queue="b").members
    assert move(conn, second, "b") == ("moved", "available")
    if is_taken:
        assert claim_in_steps(conn, runtime, limit=10, queue="b") == []
        settle(conn, runtime, there)
        members = [m for _ in range(2) for m in claim(conn, runtime, queue="b").members]
        assert [m.kind for m in members] == ["noop"] and members[0].id != second
        settle(conn, runtime, members)
    assert claim_in_steps(conn, runtime, limit=10, queue="b") == [2]
    settle(conn, runtime, held)
    assert claim_in_steps(conn, runtime, limit=10) == []
    assert (queue_of(conn, second), state(conn, first)) == ("b", "completed")


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
def test_a_move_of_whose_turn_it_is_beside_a_claim(conn: Conn, other: Conn, ending: str) -> None:
    """Guard: the row is locked, the key's row stays; after a rollback it is still its turn."""
    runtime = register(conn)
    _, second, _ = insert(conn, 1, 2, 3, order="o")
    settle(conn, runtime, claim(conn, runtime).members)
    with transaction(other):
        assert move(other, second, "b") == ("moved", "available")
        assert claim(conn, runtime).members == []
        other.execute(ending)
    assert claim_in_steps(conn, runtime, limit=10) == ([3] if ending == "COMMIT" else [2])
    assert queue_of(conn, second) == ("b" if ending == "COMMIT" else "q")


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
def test_a_move_of_a_job_that_holds_an_order_beside_a_claim(conn: Conn, other: Conn, ending: str) -> None:
    """Guard: the key is given back by the commit, not before."""
    runtime = register(conn)
    first, _ = insert(conn, 1, 2, order="o")
    settle(conn, runtime, others=[Outcome(claim(conn, runtime).members[0], "retried", 60.0)])
    with transaction(other):
        assert move(other, first, "b") == ("moved", "retryable")
        assert claim(conn, runtime).members == []
        other.execute(ending)
    assert claim_in_steps(conn, runtime, limit=10) == ([2] if ending == "COMMIT" else [])


def test_a_claim_that_hands_a_key_over_goes_first(conn: Conn, other: Conn) -> None:
    """Guard: the row that waits is only tried; then the job is in a lane, with the key that it gives back."""
    runtime = register(conn)
    _, second, _ = insert(conn, 1, 2, 3, order="o")
    settle(conn, runtime, claim(conn, runtime).members)
    with transaction(other):
        claim(other, runtime)
        assert move(conn, second, "b") == ("busy", "available")
        mover = Background(lambda: move(conn, second, "b"))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("COMMIT")
    assert mover.result() == ("moved", "available")
    assert claim_in_steps(conn, runtime, limit=10) == [3]
    assert claim(conn, runtime, queue="b").ids == [second]


# Beside others


def test_an_entry_in_an_open_claim_is_left_alone(conn: Conn, other: Conn) -> None:
    """Guard (own lock): the claim lock of the queue that it leaves; an open claim is invisible."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    with transaction(other):
        claim(other, runtime)
        assert move(conn, job, "b") == ("busy", "available")
        mover = Background(lambda: move(conn, job, "b"))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("COMMIT")
    assert mover.result() == ("refused", "running")
    assert scalar(conn, "SELECT count(*) FROM awa.jobs") == 1


def test_a_claim_between_the_look_and_the_lock(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard (check after the lock): what was available before the lock may be running under it."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    pause = Pause(third)
    mover = Background(lambda: move(conn, job, "b"))
    wait_for_lock(other, conn)
    assert claim(other, runtime).ids == [job]
    pause.go_on()
    assert mover.result() == ("refused", "running")
    assert scalar(conn, "SELECT count(*) FROM awa.jobs") == 1


def test_two_moves_between_look_and_lock_move_a_job_once_each(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard (check after the lock): an entry that has ended meanwhile is looked for again."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    pause = Pause(third)
    movers = [Background(lambda: move(conn, job, "b")), Background(lambda: move(other, job, "c"))]
    wait_for_lock(third, conn)
    wait_for_lock(third, other)
    pause.go_on()
    assert [mover.result() for mover in movers] == [("moved", "available")] * 2
    assert places(conn, job) == {"entries": 1}
    assert sorted(claim(conn, runtime, queue=queue).ids for queue in ("q", "b", "c")) == [[], [], [job]]


def test_a_move_that_is_not_committed_holds_claims_of_its_queue_off(conn: Conn, other: Conn) -> None:
    """Guard: the claim lock is held until the commit; the other queue goes on."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    insert(conn, 2, queue="b")
    with transaction(other):
        assert move(other, job, "b") == ("moved", "available")
        assert claim(conn, runtime).flags & BUSY
        assert claim(conn, runtime, queue="b").numbers == [2]
        other.execute("COMMIT")
    assert claim(conn, runtime).members == []
    # it was in progress when the page of the other queue was cut, and comes in a later one
    assert claim(conn, runtime, queue="b").ids == [job]


def test_a_job_that_is_being_promoted(conn: Conn, other: Conn) -> None:
    """Guard: the row is only tried (SKIP LOCKED, lock_timeout), and the job is looked for again where it went."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    settle(conn, runtime, others=[Outcome(claim(conn, runtime).members[0], "snoozed", 60.0)])
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    with transaction(other):
        assert promote(other) == 1
        assert move(conn, job, "b") == ("busy", "scheduled")
        mover = Background(lambda: move(conn, job, "b"))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("COMMIT")
    assert mover.result() == ("moved", "available")
    assert claim(conn, runtime, queue="b").ids == [job]
    assert claim(conn, runtime).members == []


def test_a_cancel_and_a_move_at_once(conn: Conn, other: Conn) -> None:
    """Both orders: a moved job is cancelled where it is, a cancelled one is not moved."""
    first, second = insert(conn, 1, 2)
    with transaction(other):
        assert move(other, first, "b") == ("moved", "available")
        canceller = Background(lambda: cancel(conn, first))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("COMMIT")
    assert canceller.result() == ("cancelled", "cancelled")
    assert scalar(conn, "SELECT queue FROM awa.ended_jobs") == "b"
    with transaction(other):
        assert cancel(other, second) == ("cancelled", "cancelled")
        mover = Background(lambda: move(conn, second, "b"))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("COMMIT")
    assert mover.result() == ("refused", "cancelled")
    assert [places(conn, job) for job in (first, second)] == [{"ended": 1}] * 2


# As Python says it


def test_what_happened_comes_as_a_record(conn: Conn, other: Conn) -> None:
    runtime = register(conn)
    first, second = insert(conn, 1, 2)
    assert control.move_job(conn, AWA, first, "b") == Controlled(first, "moved", JobState.AVAILABLE)
    assert control.move_job(conn, AWA, first, "b") == Controlled(first, "nothing", JobState.AVAILABLE)
    with transaction(other):
        claim(other, runtime)
        with pytest.raises(JobBusy, match=f"job {second}, which is available, was held"):
            control.move_job(conn, AWA, second, "b")
        other.execute("COMMIT")
    assert control.move_job(conn, AWA, second, "b") == Controlled(second, "refused", JobState.RUNNING)
    with pytest.raises(JobNotFound):
        control.move_job(conn, AWA, 4711, "b")
