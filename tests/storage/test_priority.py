"""Giving a job another priority at every moment of its life, beside claims and other operators.

Each docstring names the guard of the engine that the test fails without.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from awa.errors import JobBusy, JobNotFound
from awa.job import JobState
from awa.storage import control
from awa.storage.check import check_storage
from awa.storage.control import Controlled
from awa.storage.trust import check_origin
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
    set_priority,
    settle,
    state,
    transaction,
    wait_for_lock,
)
from tests.storage.lives import ENDED, RUNNING, UNSTARTED, Make, make_scheduled

NEW = ("reprioritised", "available")


@pytest.fixture(autouse=True)
def sound(conn: Conn) -> Iterator[None]:
    """Whatever was done, no job is lost and none is there twice."""
    check_origin(conn, AWA)
    yield
    assert check_storage(conn, AWA).findings == []


def priority_of(conn: Conn, job: int) -> int:
    return int(scalar(conn, "SELECT priority FROM awa.find_job_v2(%s)", job))


def test_an_available_job_comes_last_in_its_new_priority(conn: Conn) -> None:
    """Guard: its entry ends, and the next is appended to the main lane of the other priority."""
    runtime = register(conn)
    ids = insert(conn, 1, 2, 3)
    insert(conn, 4, priority=1)
    insert(conn, 5, priority=3)
    assert set_priority(conn, ids[2], 1) == NEW
    assert set_priority(conn, ids[0], 3) == NEW
    insert(conn, 6, priority=1)
    assert [places(conn, job) for job in ids] == [{"entries": 1}] * 3
    assert claim_in_steps(conn, runtime, limit=1) == [4, 3, 6, 2, 5, 1]
    assert conn.execute("SELECT claim_id, outcome FROM awa.attempt_ends").fetchall() == [(None, "moved")] * 2


@pytest.mark.parametrize("make", UNSTARTED)
def test_whatever_has_not_started_runs_in_its_new_priority(conn: Conn, make: Make) -> None:
    """Guard: a row that waits is changed in its place; an entry is appended anew."""
    job, before = make(conn, register(conn))
    for priority in (4, 1, 3):
        assert set_priority(conn, job, priority) == ("reprioritised", before)
        assert (state(conn, job), priority_of(conn, job)) == (before, priority)
        assert set_priority(conn, job, priority) == ("nothing", before)
        assert sum(places(conn, job).values()) == 1


@pytest.mark.parametrize("make", [*RUNNING, *ENDED])
@pytest.mark.parametrize("priority", [1, 2])
def test_what_runs_or_has_ended_is_refused(conn: Conn, make: Make, priority: int) -> None:
    job, before = make(conn, register(conn))
    entries = scalar(conn, "SELECT count(*) FROM awa.jobs")
    assert set_priority(conn, job, priority) == ("refused", before)
    assert (priority_of(conn, job), scalar(conn, "SELECT count(*) FROM awa.jobs")) == (2, entries)


def test_a_job_of_new_priority_is_all_that_it_was(conn: Conn) -> None:
    """Guard: every column of a body is copied; the attempt and the history too."""
    runtime = register(conn)
    conn.execute(
        "INSERT INTO awa.jobs (queue, kind, lane, priority, max_attempts, timeout_ms, args, metadata, tags,"
        "  concurrency_key, ordering_key, unique_key, expires_at, follow_ups)"
        " VALUES ('q', 'noop', 3, 1, 9, 77, '{\"n\":  1}', '{\"m\": 1}', '{a}', 'c', 'o', 'u', '2100-01-01', '[1]')"
    )
    settle(conn, runtime, others=[Outcome(claim(conn, runtime).members[0], "retried")])
    newest = (
        "SELECT id, queue, kind, attempt, max_attempts, timeout_ms, args::text, metadata::text, tags, concurrency_key,"
        " ordering_key, unique_key, expires_at, follow_ups::text, history::text, created_at"
        " FROM awa.jobs ORDER BY entry_id DESC LIMIT 1"
    )
    before = conn.execute(newest).fetchone()
    assert before is not None
    assert set_priority(conn, before[0], 4) == NEW
    assert conn.execute(newest).fetchone() == before
    assert conn.execute("SELECT priority, lane FROM awa.jobs ORDER BY entry_id DESC LIMIT 1").fetchone() == (4, 9)
    [member] = claim(conn, runtime).members
    assert (member.id, member.attempt, member.priority) == (before[0], 2, 4)


def test_a_row_of_plain_sql_that_lies_in_the_lane_of_another_priority(conn: Conn) -> None:
    """Guard: the lane counts too; it is where the claim looks."""
    job = scalar(conn, "INSERT INTO awa.jobs (queue, kind, priority) VALUES ('q', 'noop', 1) RETURNING id")
    assert set_priority(conn, job, 1) == NEW
    assert set_priority(conn, job, 1) == ("nothing", "available")
    assert scalar(conn, "SELECT lane FROM awa.jobs ORDER BY entry_id DESC LIMIT 1") == 3


def test_a_job_that_may_have_killed_its_worker_is_claimed_alone_there_too(conn: Conn) -> None:
    """Guard: it goes to the express lane."""
    dead, runtime = register(conn), register(conn)
    [job] = insert(conn, 1)
    insert(conn, 2, priority=1)
    claim(conn, dead, limit=2)
    fall_silent(conn, dead)
    assert fence(conn, dead)
    assert rescue(conn, dead) == (2, 2, 0)
    assert set_priority(conn, job, 1) == NEW
    for _ in range(2):
        alone = claim(conn, runtime)
        assert (len(alone.members), alone.flags & ALONE) == (1, ALONE)


def test_a_job_that_waits_for_a_time_keeps_it(conn: Conn) -> None:
    runtime = register(conn)
    job, _ = make_scheduled(conn, runtime)
    insert(conn, 2, priority=1)
    assert set_priority(conn, job, 1) == ("reprioritised", "scheduled")
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    assert promote(conn) == 1
    insert(conn, 3, priority=1)
    assert claim(conn, runtime).numbers == [2, 1, 3]


def test_jobs_set_aside_are_taken_by_their_new_priority(conn: Conn) -> None:
    """Guard: they are taken by priority and seq; the order of arrival stays."""
    runtime = register(conn)
    ids = insert(conn, 1, 2, 3, 4, kind="new")
    assert claim(conn, runtime, kinds=["noop"]).members == []
    for job in (ids[3], ids[1]):
        assert set_priority(conn, job, 1) == NEW
    assert claim_in_steps(conn, runtime, limit=1, kinds=["new"]) == [2, 4, 1, 3]


@pytest.mark.parametrize("scope", ["order", "key"])
def test_a_job_to_which_a_key_was_handed_over_keeps_it(conn: Conn, scope: str) -> None:
    """Guard: express, with its grant; behind the others of its priority, its key would wait as long as they."""
    runtime = register(conn)
    limit_keys(conn, 1)
    first, second, third = insert(conn, 1, 2, 3, **{scope: "k"})
    [member] = claim(conn, runtime).members
    settle(conn, runtime, [member])
    assert claim(conn, runtime).members == []  # the key is handed over
    assert set_priority(conn, second, 1) == NEW
    insert(conn, 4, priority=1)
    found = claim(conn, runtime, limit=1).members
    assert [member.id for member in found] == [second]
    assert claim(conn, runtime).numbers == [4]
    settle(conn, runtime, found)
    assert claim_in_steps(conn, runtime, limit=1) == [3]
    assert (first, third) == (member.id, scalar(conn, "SELECT max(id) FROM awa.jobs WHERE priority = 2"))


def test_a_retryable_job_of_new_priority_still_comes_before_those_behind_it(conn: Conn) -> None:
    """Guard: the ordering key is the job's until it ends."""
    runtime = register(conn)
    first, _ = insert(conn, 1, 2, order="o")
    settle(conn, runtime, others=[Outcome(claim(conn, runtime).members[0], "retried", 60.0)])
    assert set_priority(conn, first, 4) == ("reprioritised", "retryable")
    assert claim(conn, runtime).members == []
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now() WHERE waits_for = 'time'")
    assert promote(conn) == 1
    assert set_priority(conn, first, 3) == NEW
    members = claim(conn, runtime).members
    assert [member.id for member in members] == [first]
    settle(conn, runtime, members)
    assert claim_in_steps(conn, runtime, limit=1) == [2]


def test_it_rings_for_who_sleeps(conn: Conn, other: Conn) -> None:
    heard: list[str] = []
    other.add_notify_handler(lambda notification: heard.append(notification.payload))
    other.execute(f"LISTEN {AWA.channel}")
    claim(other, register(conn), bell=True)
    [job] = insert(conn, 1)
    assert set_priority(conn, job, 1) == NEW
    other.execute("SELECT 1")
    assert heard == ["q"]


def test_an_unknown_job_is_not_found(conn: Conn) -> None:
    assert set_priority(conn, 4711, 1) == ("not_found", None)


@pytest.mark.parametrize("priority", [0, 5, -1, None])
def test_what_is_no_priority_is_refused(conn: Conn, priority: int | None) -> None:
    [job] = insert(conn, 1)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="p_priority is 1, which runs first, to 4"):
        set_priority(conn, job, priority)
    assert priority_of(conn, job) == 2


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_an_old_snapshot_is_refused(conn: Conn, isolation: str) -> None:
    """Guard: AWA02; an older snapshot would not show a claim."""
    [job] = insert(conn, 1)
    with transaction(conn, isolation), pytest.raises(psycopg.Error) as caught:
        set_priority(conn, job, 1)
    assert caught.value.sqlstate == "AWA02"


def test_entries_of_a_segment_that_is_not_current(conn: Conn) -> None:
    """Guard: the end lies in the slot of the entry, the next entry in the current one."""
    [job] = insert(conn, 1)
    conn.execute("SELECT setval('awa.ring_seq', 4)")
    assert set_priority(conn, job, 1) == NEW
    assert scalar(conn, "SELECT slot FROM awa.attempt_ends") == 0
    assert conn.execute("SELECT slot, priority FROM awa.jobs ORDER BY entry_id").fetchall() == [(0, 2), (4, 1)]


# Beside others


def test_an_entry_in_an_open_claim_is_left_alone(conn: Conn, other: Conn) -> None:
    """Guard (own lock): the queue's claim lock; an open claim is invisible."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    with transaction(other):
        claim(other, runtime)
        assert set_priority(conn, job, 1) == ("busy", "available")
        setting = Background(lambda: set_priority(conn, job, 1))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("COMMIT")
    assert setting.result() == ("refused", "running")
    assert scalar(conn, "SELECT count(*) FROM awa.jobs") == 1


def test_a_claim_between_the_look_and_the_lock(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard (check after the lock): what was available before the lock may be running under it."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    pause = Pause(third)
    setting = Background(lambda: set_priority(conn, job, 1))
    wait_for_lock(other, conn)
    assert claim(other, runtime).ids == [job]
    pause.go_on()
    assert setting.result() == ("refused", "running")
    assert scalar(conn, "SELECT count(*) FROM awa.jobs") == 1


def test_two_at_once_each_have_their_way(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard (check after the lock): an entry that has ended meanwhile is looked for again."""
    [job] = insert(conn, 1)
    pause = Pause(third)
    both = [Background(lambda: set_priority(conn, job, 1)), Background(lambda: move(other, job, "b"))]
    wait_for_lock(third, conn)
    wait_for_lock(third, other)
    pause.go_on()
    assert [one.result() for one in both] == [NEW, ("moved", "available")]
    assert (places(conn, job), priority_of(conn, job)) == ({"entries": 1}, 1)
    assert claim(conn, register(conn), queue="b").ids == [job]


def test_one_that_is_not_committed_holds_claims_off(conn: Conn, other: Conn) -> None:
    """Guard: the claim lock is held until the commit."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    with transaction(other):
        assert set_priority(other, job, 1) == NEW
        assert claim(conn, runtime).flags & BUSY
        other.execute("COMMIT")
    assert claim(conn, runtime).ids == [job]


def test_a_job_that_is_being_promoted(conn: Conn, other: Conn) -> None:
    """Guard: the row is only tried, and the job is looked for again where it went."""
    job, _ = make_scheduled(conn, register(conn))
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    with transaction(other):
        assert promote(other) == 1
        assert set_priority(conn, job, 1) == ("busy", "scheduled")
        setting = Background(lambda: set_priority(conn, job, 1))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("COMMIT")
    assert setting.result() == NEW
    assert places(conn, job) == {"entries": 1}


def test_a_job_whose_turn_comes_meanwhile(conn: Conn, other: Conn) -> None:
    """Guard: the row is locked; the key is handed over when the operator is done, and nobody is passed over."""
    runtime = register(conn)
    _, second, _ = insert(conn, 1, 2, 3, order="o")
    settle(conn, runtime, claim(conn, runtime).members)
    with transaction(other):
        assert set_priority(other, second, 1) == NEW
        assert claim(conn, runtime).members == []
        other.execute("COMMIT")
    assert claim_in_steps(conn, runtime, limit=10) == [2]
    assert priority_of(conn, second) == 1


def test_a_cancel_goes_first(conn: Conn, other: Conn) -> None:
    [job] = insert(conn, 1)
    with transaction(other):
        assert cancel(other, job) == ("cancelled", "cancelled")
        setting = Background(lambda: set_priority(conn, job, 1))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("COMMIT")
    assert setting.result() == ("refused", "cancelled")


# As Python says it


def test_what_happened_comes_as_a_record(conn: Conn, other: Conn) -> None:
    runtime = register(conn)
    [job] = insert(conn, 1)
    assert control.set_priority(conn, AWA, job, 1) == Controlled(job, "reprioritised", JobState.AVAILABLE)
    assert control.set_priority(conn, AWA, job, 1) == Controlled(job, "nothing", JobState.AVAILABLE)
    with transaction(other):
        claim(other, runtime)
        with pytest.raises(JobBusy, match=f"job {job}, which is available, was held"):
            control.set_priority(conn, AWA, job, 2)
        other.execute("COMMIT")
    assert control.set_priority(conn, AWA, job, 2) == Controlled(job, "refused", JobState.RUNNING)
    with pytest.raises(JobNotFound):
        control.set_priority(conn, AWA, 4711, 1)
