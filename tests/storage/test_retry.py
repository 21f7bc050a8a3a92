"""Bringing a job back at every moment of its life, beside everybody else who may have it or its key.

Each docstring names the guard of the engine that the test fails without.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from awa.errors import JobBusy, JobNotFound, UniqueConflict
from awa.job import JobState
from awa.storage import control, dependents, ended, jobs
from awa.storage.check import check_storage
from awa.storage.control import Controlled
from awa.storage.jobs import JobRow, Written
from awa.storage.keys import sweep_keys
from awa.storage.trust import check_origin
from tests.storage.engine import (
    AWA,
    Background,
    Conn,
    Member,
    Outcome,
    Pause,
    cancel,
    claim,
    fall_silent,
    fence,
    insert,
    places,
    promote,
    register,
    rescue,
    retry,
    scalar,
    settle,
    state,
    transaction,
    wait_for_lock,
)
from tests.storage.lives import (
    Make,
    history,
    make_available,
    make_cancelled,
    make_completed,
    make_completed_by_its_handler,
    make_express,
    make_failed,
    make_handed_over,
    make_retryable,
    make_retryable_with_its_key,
    make_running,
    make_running_from_aside,
    make_scheduled,
    make_set_aside,
    make_waiting_for_key,
    make_waiting_for_order,
)

BACK = ("retried", "available")
KEY = bytes(range(16))


@pytest.fixture(autouse=True)
def sound(conn: Conn) -> Iterator[None]:
    """Whatever was done, no job is lost and none is there twice."""
    check_origin(conn, AWA)
    yield
    report = check_storage(conn, AWA)
    assert report.findings == []
    twice = "SELECT count(*) FROM awa.ended_jobs e JOIN awa.waiting_jobs w USING (id)"
    assert scalar(conn, twice) == 0


def put(conn: Conn, key: bytes = KEY, *, mode: str = "return") -> Written:
    """Insert a job with a unique key."""
    return jobs.insert_job(conn, AWA, JobRow("q", "noop", b"{}", 2, 25, unique=key, on_conflict=mode), notify=True)


def fail(conn: Conn, runtime: int) -> list[int]:
    """Claim whatever is available, and have it fail; the ids."""
    members = claim(conn, runtime).members
    assert settle(conn, runtime, others=[Outcome(member, "failed") for member in members]) == []
    return [member.id for member in members]


def holder(conn: Conn) -> int | None:
    found: int | None = scalar(conn, "SELECT awa.holder_v1(%s)", KEY)
    return found


def leave_row(conn: Conn, job: int) -> None:
    """As if the key's row had been locked when its job ended: nobody has removed it."""
    conn.execute(
        "INSERT INTO awa.job_uniques (key, id, slot, lane, xid, entry_id, queue)"
        " SELECT %s, id, slot, lane, xid, entry_id, queue FROM awa.jobs WHERE id = %s ORDER BY entry_id DESC LIMIT 1",
        (KEY, job),
    )


# At every moment of a job's life


@pytest.mark.parametrize("make", [make_failed, make_cancelled])
def test_what_has_ended_comes_last_with_all_attempts_before_it(conn: Conn, make: Make) -> None:
    """Guard: the row of ended_jobs goes, an entry comes; attempt is 1, the history stays."""
    runtime = register(conn)
    job, _ = make(conn, runtime)
    insert(conn, 2)
    told = history(conn, job)
    assert told
    conn.execute("UPDATE awa.ended_jobs SET dead_reason = 'poison', attempt = 7")
    assert retry(conn, job) == BACK
    assert (state(conn, job), places(conn, job)) == ("available", {"entries": 1})
    assert history(conn, job) == told
    insert(conn, 3)
    assert claim(conn, runtime, limit=1).numbers == [2]
    [member] = claim(conn, runtime, limit=1).members
    assert (member.id, member.attempt) == (job, 1)
    assert settle(conn, runtime, others=[Outcome(member, "failed")]) == []
    assert (state(conn, job), len(history(conn, job))) == ("failed", len(told) + 1)
    assert scalar(conn, "SELECT dead_reason FROM awa.ended_jobs WHERE id = %s", job) is None
    assert retry(conn, job) == BACK
    assert settle(conn, runtime, claim(conn, runtime).members) == []
    assert state(conn, job) == "completed"


def test_what_was_cancelled_before_its_first_attempt_has_all_of_them(conn: Conn) -> None:
    runtime = register(conn)
    available, waiting = insert(conn, 1, 2)
    settle(conn, runtime, others=[Outcome(m, "snoozed", 60.0) for m in claim(conn, runtime).members])
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now() WHERE id = %s", (available,))
    assert promote(conn) == 1
    for job in (available, waiting):
        assert cancel(conn, job, "not needed") == ("cancelled", "cancelled")
        assert retry(conn, job) == BACK
    assert claim(conn, runtime).ids == [available, waiting]


@pytest.mark.parametrize("make", [make_scheduled, make_retryable, make_retryable_with_its_key])
def test_what_waits_for_a_time_is_available_now(conn: Conn, make: Make) -> None:
    """Guard: the row of waiting_jobs goes; the time does not come again. A key that it holds stays its own."""
    runtime = register(conn)
    job, _ = make(conn, runtime)
    conn.execute("UPDATE awa.waiting_jobs SET attempt = 5")
    assert retry(conn, job) == BACK
    assert places(conn, job) == {"entries": 1}
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now() WHERE waits_for = 'time'")
    assert promote(conn) == 0
    [member] = [member for member in claim(conn, runtime).members if member.id == job]
    assert member.attempt == 1


@pytest.mark.parametrize(
    "make",
    [make_available, make_express, make_set_aside, make_waiting_for_order, make_waiting_for_key, make_handed_over],
)
def test_what_is_available_stays_where_it_is(conn: Conn, make: Make) -> None:
    job, _ = make(conn, register(conn))
    entries = scalar(conn, "SELECT count(*) FROM awa.jobs")
    assert retry(conn, job) == ("nothing", "available")
    assert scalar(conn, "SELECT count(*) FROM awa.jobs") == entries


@pytest.mark.parametrize("make", [make_running, make_running_from_aside, make_completed, make_completed_by_its_handler])
def test_what_runs_or_has_completed_is_refused(conn: Conn, make: Make) -> None:
    job, before = make(conn, register(conn))
    entries = scalar(conn, "SELECT count(*) FROM awa.jobs")
    assert retry(conn, job) == ("refused", before)
    assert (state(conn, job), scalar(conn, "SELECT count(*) FROM awa.jobs")) == (before, entries)


def test_what_waits_for_others_is_refused(conn: Conn) -> None:
    """Guard: only 'time' is waited for in vain; a job runs neither before its parents nor before a callback."""
    [parent] = insert(conn, 1)
    row = JobRow("q", "noop", b"{}", 2, 25, parents=(parent,))
    child = jobs.insert_job(conn, AWA, row, notify=True).id
    assert retry(conn, child) == ("refused", "scheduled")
    called = scalar(
        conn,
        "INSERT INTO awa.waiting_jobs (queue, kind, state, waits_for)"
        " VALUES ('q', 'noop', 'waiting_external', 'callback') RETURNING id",
    )
    assert retry(conn, called) == ("refused", "waiting_external")
    assert [places(conn, job) for job in (child, called)] == [{"waiting": 1}] * 2


def test_what_is_unknown_or_forgotten_is_not_found(conn: Conn) -> None:
    """Guard: the end in the ring is no row of ended_jobs; there is nothing to bring back."""
    assert retry(conn, 4711) == ("not_found", None)
    job, _ = make_failed(conn, register(conn))
    assert ended.delete_old(conn, AWA, failed=-1.0, dead=0.0, limit=10) == 1
    assert retry(conn, job) == ("not_found", None)


def test_a_retried_job_is_all_that_it_was(conn: Conn) -> None:
    """Guard: every column of a body is copied, of ended and of waiting jobs; of the former no expiry is known."""
    columns = (
        "id, queue, kind, priority, max_attempts, timeout_ms, args::text, metadata::text, tags, concurrency_key,"
        " ordering_key, unique_key, follow_ups::text, history::text, created_at"
    )
    names = (
        "queue, kind, priority, attempt, max_attempts, timeout_ms, args, metadata, tags, concurrency_key, ordering_key,"
        " unique_key, follow_ups, history, created_at, state, id"
    )
    values = (
        "'q', 'noop', 1, 3, 9, 77, '{\"n\":  1}', '{\"m\": 1}', '{a}', 'c', 'o', 'u', '{}', '[{}]', '2020-01-01'"
        ", 'failed', nextval('awa.entry_id_seq')"
    )
    conn.execute(f"INSERT INTO awa.ended_jobs ({names}) VALUES ({values})")
    conn.execute(
        f"INSERT INTO awa.waiting_jobs ({names}, run_at, expires_at)"
        f" VALUES ({values.replace('failed', 'retryable')}, '2100-01-01', '2101-01-01')"
    )
    for table, expiry in (("ended_jobs", None), ("waiting_jobs", datetime(2101, 1, 1, tzinfo=UTC))):
        before = conn.execute(f"SELECT {columns} FROM awa.{table}").fetchone()
        assert before is not None
        assert retry(conn, before[0]) == BACK
        newest = "FROM awa.jobs WHERE id = %s ORDER BY entry_id DESC LIMIT 1"
        assert conn.execute(f"SELECT {columns} {newest}", (before[0],)).fetchone() == before
        assert conn.execute(f"SELECT attempt, lane, expires_at {newest}", (before[0],)).fetchone() == (1, 3, expiry)


def test_a_job_that_may_have_killed_its_worker_goes_to_an_express_lane(conn: Conn) -> None:
    """Guard: is_suspect; only there is a job claimed alone."""
    dead = register(conn)
    [job] = insert(conn, 1, max_attempts=1)
    claim(conn, dead)
    fall_silent(conn, dead)
    assert fence(conn, dead)
    assert rescue(conn, dead) == (1, 1, 0)
    assert state(conn, job) == "failed"
    assert retry(conn, job) == BACK
    assert scalar(conn, "SELECT lane FROM awa.jobs ORDER BY entry_id DESC LIMIT 1") == 4


@pytest.mark.parametrize("make", [make_failed, make_scheduled])
def test_a_retry_wakes_who_sleeps(conn: Conn, other: Conn, make: Make) -> None:
    runtime = register(conn)
    heard: list[str] = []
    other.add_notify_handler(lambda notification: heard.append(notification.payload))
    other.execute(f"LISTEN {AWA.channel}")
    job, _ = make(conn, runtime)
    claim(other, runtime, bell=True)
    assert retry(conn, job) == BACK
    other.execute("SELECT 1")
    assert heard == ["q"]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_an_old_snapshot_is_refused(conn: Conn, isolation: str) -> None:
    """Guard: AWA02."""
    job, _ = make_failed(conn, register(conn))
    with transaction(conn, isolation), pytest.raises(psycopg.Error) as caught:
        retry(conn, job)
    assert caught.value.sqlstate == "AWA02"
    assert state(conn, job) == "failed"


def test_from_a_segment_that_is_not_current(conn: Conn) -> None:
    """Guard: the new entry lies in the current slot, and decides; the old one keeps its end."""
    runtime = register(conn)
    job, _ = make_failed(conn, runtime)
    conn.execute("SELECT setval('awa.ring_seq', 4)")
    assert retry(conn, job) == BACK
    assert conn.execute("SELECT slot FROM awa.jobs ORDER BY entry_id").fetchall() == [(0,), (4,)]
    conn.execute("TRUNCATE awa.jobs_0, awa.claims_0, awa.completions_0, awa.attempt_ends_0")
    assert claim(conn, runtime).ids == [job]


# What follows


def test_follow_ups_come_at_every_end(conn: Conn) -> None:
    """Guard: follow_ups go along."""
    runtime = register(conn)
    follow_ups = b'{"failed": [{"kind": "sorry"}], "completed": [{"kind": "done"}]}'
    row = JobRow("q", "noop", b"{}", 2, 25, follow_ups=follow_ups)
    job = jobs.insert_job(conn, AWA, row, notify=True).id
    for _ in range(2):
        assert fail(conn, runtime) == [job]
        assert retry(conn, job) == BACK
    settle(conn, runtime, claim(conn, runtime).members)
    children = conn.execute("SELECT kind FROM awa.jobs WHERE queue = 'default' ORDER BY id").fetchall()
    assert children == [("sorry",), ("sorry",), ("done",)]


def look(conn: Conn, parent: int, known: dict[int, dependents.Place]) -> str | None:
    """What the leader sees of a parent, which it keeps in mind."""
    for job, seen, place in dependents.look_at_parents(conn, AWA, [parent], known):
        assert job == parent
        if place is None:
            known.pop(parent, None)
        else:
            known[parent] = place
        return seen
    return None


def test_a_parent_that_came_back_is_waited_for(conn: Conn) -> None:
    """Guard: look_at_parents believes a failed entry that it knows of only as long as ended_jobs has the job."""
    runtime = register(conn)
    [parent] = insert(conn, 1)
    known: dict[int, dependents.Place] = {}
    assert look(conn, parent, known) == "open"
    [member] = claim(conn, runtime).members
    assert look(conn, parent, known) == "open"
    settle(conn, runtime, others=[Outcome(member, "failed")])
    assert retry(conn, parent) == BACK
    assert look(conn, parent, known) is None
    assert look(conn, parent, known) == "open"
    fail(conn, runtime)
    assert look(conn, parent, known) == "failed"
    assert retry(conn, parent) == BACK
    assert look(conn, parent, known) == "open"
    settle(conn, runtime, claim(conn, runtime).members)
    assert look(conn, parent, known) == "completed"


@pytest.mark.parametrize("is_known", [False, True])
def test_the_end_in_the_ring_tells_of_a_parent_whose_row_was_deleted(conn: Conn, is_known: bool) -> None:
    """Guard: the newest entry is believed; a known one is looked for again, since it may not be the newest."""
    runtime = register(conn)
    [parent] = insert(conn, 1)
    known: dict[int, dependents.Place] = {}
    if is_known:
        assert look(conn, parent, known) == "open"
    fail(conn, runtime)
    conn.execute("DELETE FROM awa.ended_jobs")
    if is_known:
        assert look(conn, parent, known) is None
    assert look(conn, parent, known) == "failed"


def test_dependents_that_were_cancelled_stay_cancelled(conn: Conn) -> None:
    runtime = register(conn)
    [parent] = insert(conn, 1)
    row = JobRow("q", "noop", b"{}", 2, 25, parents=(parent,))
    early, late = (jobs.insert_job(conn, AWA, row, notify=True).id for _ in range(2))
    fail(conn, runtime)
    assert dependents.resolve(conn, AWA, [early], {parent: "failed"}).cancelled == [early]
    assert retry(conn, parent) == BACK
    assert (state(conn, early), state(conn, late)) == ("cancelled", "scheduled")
    settle(conn, runtime, claim(conn, runtime).members)
    assert dependents.resolve(conn, AWA, [late], {parent: "completed"}).started == [late]
    # on its own it runs at once, whatever it waited for
    assert retry(conn, early) == BACK


def test_an_order_goes_on_and_a_retried_job_comes_behind_it(conn: Conn) -> None:
    """Guard: what has ended holds no key; coming back, it waits as any other."""
    runtime = register(conn)
    first, second = insert(conn, 1, 2, order="o")
    [member] = claim(conn, runtime).members
    settle(conn, runtime, others=[Outcome(member, "failed")])
    assert retry(conn, first) == BACK
    started: list[int] = []
    for _ in range(6):
        members = claim(conn, runtime).members
        assert len(members) <= 1
        started += [member.id for member in members]
        settle(conn, runtime, members)
    assert started == [second, first]


# Unique keys


@pytest.mark.parametrize("is_left", [False, True])
def test_an_ended_job_has_its_key_again(conn: Conn, is_left: bool) -> None:
    """Guard: take_all_keys, or its own row that nobody removed; and the row names the new entry."""
    runtime = register(conn)
    job = put(conn).id
    assert fail(conn, runtime) == [job]
    if is_left:
        leave_row(conn, job)
    assert holder(conn) is None
    assert retry(conn, job) == BACK
    assert holder(conn) == job
    assert put(conn) == (job, False)
    assert scalar(conn, "SELECT entry_id FROM awa.job_uniques") == scalar(conn, "SELECT max(entry_id) FROM awa.jobs")
    assert sweep_keys(conn, AWA, after=b"", limit=10, seconds=1.0) == (KEY, 0)
    fail(conn, runtime)
    assert put(conn).is_new


def test_a_key_that_another_job_holds_is_a_conflict(conn: Conn) -> None:
    """Guard: nothing is changed, the job is as it was."""
    runtime = register(conn)
    job = put(conn).id
    assert fail(conn, runtime) == [job]
    before = conn.execute("SELECT e::text FROM awa.ended_jobs e").fetchall()
    existing = put(conn).id
    row = conn.execute("SELECT happened, state, existing_id, unique_key FROM awa.retry_v1(%s)", (job,)).fetchone()
    assert row == ("conflict", "failed", existing, KEY)
    assert conn.execute("SELECT e::text FROM awa.ended_jobs e").fetchall() == before
    assert (holder(conn), scalar(conn, "SELECT count(*) FROM awa.jobs")) == (existing, 2)
    with pytest.raises(UniqueConflict, match=f"job {job}, which is failed, .* job {existing} holds now") as caught:
        control.retry_job(conn, AWA, job)
    assert (caught.value.existing_id, caught.value.key) == (existing, KEY)
    # it has ended too: the key is free
    assert cancel(conn, existing)[0] == "cancelled"
    assert retry(conn, job) == BACK
    assert holder(conn) == job
    assert scalar(conn, "SELECT happened FROM awa.retry_v1(%s)", existing) == "conflict"


def test_the_states_of_a_key_come_along(conn: Conn) -> None:
    """Guard: states_of; a key that failed jobs hold too is its own all the time."""
    runtime = register(conn)
    states = bytes([2 | 64])
    job = put(conn, KEY + states).id
    fail(conn, runtime)
    assert (holder(conn), put(conn, KEY + states)) == (job, (job, False))
    assert retry(conn, job) == BACK
    assert conn.execute("SELECT id, states FROM awa.job_uniques").fetchall() == [(job, 66)]
    claim(conn, runtime)
    assert holder(conn) is None


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
def test_an_insert_that_is_open_has_the_key(conn: Conn, other: Conn, ending: str) -> None:
    """Guard: lock_timeout; the retry waits for the insert only so long, and then knows."""
    runtime = register(conn)
    job = put(conn).id
    fail(conn, runtime)
    with transaction(other):
        inserted = put(other).id
        assert retry(conn, job) == ("busy", "failed")
        retrying = Background(lambda: retry(conn, job))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("COMMIT" if ending == "COMMIT" else "ROLLBACK")
    assert retrying.result() == (("conflict", "failed") if ending == "COMMIT" else BACK)
    assert holder(conn) == (inserted if ending == "COMMIT" else job)


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("as_batch", [False, True])
@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
def test_a_retry_that_is_open_has_the_key(conn: Conn, other: Conn, is_left: bool, as_batch: bool, ending: str) -> None:
    """Guard: take_keys takes over the row that it has seen, not what a retry has made of it."""
    runtime = register(conn)
    job = put(conn).id
    fail(conn, runtime)
    if is_left:
        leave_row(conn, job)
    rows = [JobRow("q", "noop", b"{}", 2, 25, unique=key, on_conflict="return") for key in (KEY, os.urandom(16))]
    with transaction(other):
        assert retry(other, job) == BACK
        inserting = Background(lambda: jobs.insert_jobs(conn, AWA, rows, notify=True)[0] if as_batch else put(conn))
        wait_for_lock(other, conn)
        other.execute("COMMIT" if ending == "COMMIT" else "ROLLBACK")
    inserted = inserting.result()
    assert inserted.is_new == (ending == "ROLLBACK")
    assert (inserted.id == job) == (ending == "COMMIT")
    assert holder(conn) == inserted.id
    assert state(conn, job) == ("available" if ending == "COMMIT" else "failed")


class Held:
    """Whoever asks whether a key is held stops behind the answer."""

    def __init__(self, conn: Conn) -> None:
        self._conn = conn
        conn.execute("ALTER FUNCTION awa.is_held RENAME TO is_held_at_once")
        conn.execute(
            """CREATE FUNCTION awa.is_held(u awa.job_uniques) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
               DECLARE
                   v_is_held boolean := awa.is_held_at_once(u);
               BEGIN
                   PERFORM pg_advisory_lock_shared(42), pg_advisory_unlock_shared(42);
                   RETURN v_is_held;
               END $$"""
        )
        conn.execute("SELECT pg_advisory_lock(42)")

    def go_on(self) -> None:
        self._conn.execute("SELECT pg_advisory_unlock(42)")


def test_a_retry_between_the_look_and_the_taking_over(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: take_keys compares the entry; the id of the holder is the same again."""
    runtime = register(conn)
    job = put(conn).id
    fail(conn, runtime)
    leave_row(conn, job)
    held = Held(third)
    inserting = Background(lambda: put(conn))
    wait_for_lock(third, conn)
    assert retry(other, job) == BACK
    held.go_on()
    assert inserting.result() == (job, False)
    assert claim(conn, runtime).ids == [job]


def test_a_retry_between_the_look_of_the_sweep_and_its_removing(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: sweep_keys compares the entry."""
    runtime = register(conn)
    job = put(conn).id
    fail(conn, runtime)
    leave_row(conn, job)
    held = Held(third)
    sweeping = Background(lambda: sweep_keys(conn, AWA, after=b"", limit=10, seconds=5.0))
    wait_for_lock(third, conn)
    assert retry(other, job) == BACK
    held.go_on()
    assert sweeping.result() == (KEY, 0)
    assert holder(conn) == job


# Beside others


@pytest.mark.parametrize("make", [make_failed, make_cancelled, make_scheduled])
def test_two_retries_at_once_bring_a_job_back_once(conn: Conn, other: Conn, make: Make) -> None:
    """Guard: the row that it leaves is locked; the second finds it gone, and looks for the job again."""
    job, before = make(conn, register(conn))
    with transaction(other):
        assert retry(other, job) == BACK
        assert retry(conn, job) == ("busy", before)
        second = Background(lambda: retry(conn, job))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("COMMIT")
    assert second.result() == ("nothing", "available")
    assert places(conn, job) == {"entries": 1}


@pytest.mark.parametrize("make", [make_failed, make_scheduled])
def test_two_retries_between_look_and_lock(conn: Conn, other: Conn, third: Conn, make: Make) -> None:
    """Guard: a row that is gone is no success."""
    job, _ = make(conn, register(conn))
    pause = Pause(third)
    both = [Background(lambda: retry(conn, job)), Background(lambda: retry(other, job))]
    wait_for_lock(third, conn)
    wait_for_lock(third, other)
    pause.go_on()
    assert sorted(one.result() for one in both) == [("nothing", "available"), BACK]
    assert places(conn, job) == {"entries": 1}


def test_a_retention_that_is_open(conn: Conn, other: Conn) -> None:
    """Guard: SKIP LOCKED; what is gone then is not found, though the ring knows how it ended."""
    runtime = register(conn)
    for ending, then in (("ROLLBACK", BACK), ("COMMIT", ("not_found", None))):
        job, before = make_failed(conn, runtime)
        with transaction(other):
            assert ended.delete_old(other, AWA, failed=-1.0, dead=0.0, limit=10) == 1
            assert retry(conn, job) == ("busy", before)
            retrying = Background(lambda job=job: retry(conn, job))  # type: ignore[misc]
            other.execute("SELECT pg_sleep(0.05)")
            other.execute("COMMIT" if ending == "COMMIT" else "ROLLBACK")
        assert retrying.result() == then
        settle(conn, runtime, claim(conn, runtime).members)


def test_a_retry_that_is_open_keeps_retention_off(conn: Conn, other: Conn) -> None:
    """Guard: the row is locked, and gone after the commit; retention finds nothing to delete."""
    job, _ = make_failed(conn, register(conn))
    with transaction(other):
        assert retry(other, job) == BACK
        deleting = Background(lambda: ended.delete_old(conn, AWA, failed=-1.0, dead=0.0, limit=10))
        wait_for_lock(other, conn)
        other.execute("COMMIT")
    assert deleting.result() == 0
    assert places(conn, job) == {"entries": 1}


def test_a_job_that_is_being_promoted(conn: Conn, other: Conn) -> None:
    """Guard: the row is only tried."""
    job, _ = make_scheduled(conn, register(conn))
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    with transaction(other):
        assert promote(other) == 1
        assert retry(conn, job) == ("busy", "scheduled")
        retrying = Background(lambda: retry(conn, job))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("COMMIT")
    assert retrying.result() == ("nothing", "available")
    assert places(conn, job) == {"entries": 1}


def test_a_promotion_beside_an_open_retry_passes_the_job_over(conn: Conn, other: Conn) -> None:
    job, _ = make_scheduled(conn, register(conn))
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    with transaction(other):
        assert retry(other, job) == BACK
        assert promote(conn) == 0
        other.execute("COMMIT")
    assert promote(conn) == 0


def test_a_retry_and_a_cancel_at_once(conn: Conn, other: Conn) -> None:
    """Both orders, of a job that waits."""
    runtime = register(conn)
    first, second = (make_scheduled(conn, runtime)[0] for _ in range(2))
    with transaction(other):
        assert retry(other, first) == BACK
        canceller = Background(lambda: cancel(conn, first))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("COMMIT")
    assert canceller.result() == ("cancelled", "cancelled")
    with transaction(other):
        assert cancel(other, second) == ("cancelled", "cancelled")
        retrying = Background(lambda: retry(conn, second))
        other.execute("SELECT pg_sleep(0.05)")
        other.execute("COMMIT")
    assert retrying.result() == BACK
    assert (state(conn, first), state(conn, second)) == ("cancelled", "available")


def test_no_segment_is_emptied_while_a_job_is_looked_for(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: the lock on awa.jobs."""
    [job] = insert(conn, 1)
    conn.execute("SELECT awa.rotate_v1()")
    pause = Pause(third, inside=True)
    retrying = Background(lambda: retry(conn, job))
    wait_for_lock(other, conn)
    assert scalar(other, "SELECT awa.carry_v1(0::smallint, 'q', 10)") == 1
    assert scalar(other, "SELECT awa.prune_v1(0::smallint, 1, pg_relation_filenode('awa.jobs_0'))") == "busy"
    pause.go_on()
    assert retrying.result() == ("nothing", "available")


def test_a_worker_that_still_runs_what_was_ended_by_force_is_refused(conn: Conn) -> None:
    """Guard: the attempt that it quotes has its end; the new one is another's."""
    runtime = register(conn)
    insert(conn, 1)
    [old] = claim(conn, runtime).members
    assert cancel(conn, old.id, force=True)[0] == "cancelled"
    assert retry(conn, old.id) == BACK
    [new] = claim(conn, runtime).members
    assert settle(conn, runtime, others=[Outcome(old, "failed")]) == [old.place]
    assert settle(conn, runtime, [old]) == [old.place]
    assert state(conn, new.id) == "running"
    assert set(control.read_requests(conn, AWA, runtime).to_cancel) == {old.entry_id}
    assert settle(conn, runtime, [new]) == []
    assert state(conn, new.id) == "completed"


def test_retention_deletes_a_job_by_its_last_end(conn: Conn) -> None:
    """Guard: ended_at is that of the new row."""
    runtime = register(conn)
    job, _ = make_failed(conn, runtime)
    later = datetime.now(UTC) + timedelta(hours=1)
    conn.execute("UPDATE awa.ended_jobs SET ended_at = ended_at - interval '1 day'")
    assert retry(conn, job) == BACK
    fail(conn, runtime)
    assert ended.delete_old(conn, AWA, failed=7200.0, dead=0.0, limit=10, now=later) == 0
    assert ended.delete_old(conn, AWA, failed=1800.0, dead=0.0, limit=10, now=later) == 1


# As Python says it


def test_what_happened_comes_as_a_record(conn: Conn, other: Conn) -> None:
    runtime = register(conn)
    job, _ = make_failed(conn, runtime)
    with transaction(other):
        retry(other, job)
        with pytest.raises(JobBusy, match=f"job {job}, which is failed, was held") as busy:
            control.retry_job(conn, AWA, job)
        assert busy.value.job_id == job
        other.execute("ROLLBACK")
    assert control.retry_job(conn, AWA, job) == Controlled(job, "retried", JobState.AVAILABLE)
    assert control.retry_job(conn, AWA, job) == Controlled(job, "nothing", JobState.AVAILABLE)
    member: Member = claim(conn, runtime).members[0]
    assert control.retry_job(conn, AWA, job) == Controlled(job, "refused", JobState.RUNNING)
    settle(conn, runtime, [member])
    assert control.retry_job(conn, AWA, job) == Controlled(job, "refused", JobState.COMPLETED)
    with pytest.raises(JobNotFound) as missing:
        control.retry_job(conn, AWA, 4711)
    assert missing.value.job_id == 4711
