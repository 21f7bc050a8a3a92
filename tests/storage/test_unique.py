"""Unique keys: who holds one, who waits for whom, and what becomes of a key in its job's life.

In the interleavings, *holder* is the transaction that has the key, *taker* the one that wants it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from awa.errors import JobNotFound, UniqueConflict
from awa.job import JobState
from awa.storage import control, jobs
from awa.storage.check import check_storage
from awa.storage.jobs import JobRow, Written
from awa.storage.keys import sweep_keys
from awa.storage.trust import check_origin
from awa.worker.maintenance import keys as chore
from tests.fixtures.db import wait_until
from tests.storage.engine import (
    AWA,
    Background,
    Conn,
    Outcome,
    cancel,
    claim,
    complete,
    fall_silent,
    fence,
    move,
    promote,
    register,
    rescue,
    scalar,
    settle,
    state,
    transaction,
    wait_for_lock,
)

KEY = bytes(range(16))
HELD_WHILE_WAITING = bytes([1 | 2 | 8])
"""The 17th byte of a key that running and ended jobs do not hold."""

Open = Callable[[], Conn]


def row(key: bytes | None = KEY, *, n: int = 0, mode: str = "return", queue: str = "q", **options: Any) -> JobRow:
    return JobRow(queue, "noop", b'{"n":%d}' % n, 2, 25, unique=key, on_conflict=mode, **options)


def put(conn: Conn, key: bytes | None = KEY, **options: Any) -> Written:
    """Insert one job."""
    return jobs.insert_job(conn, AWA, row(key, **options), notify=True)


def put_many(conn: Conn, *rows: JobRow) -> list[Written]:
    return jobs.insert_jobs(conn, AWA, rows, notify=True)


def holder(conn: Conn, key: bytes = KEY) -> int | None:
    """The job that holds *key*."""
    found: int | None = scalar(conn, "SELECT awa.holder_v1(%s)", key)
    return found


def rows_of(conn: Conn, key: bytes = KEY) -> int:
    return int(scalar(conn, "SELECT count(*) FROM awa.job_uniques WHERE key = %s", key))


def count_jobs(conn: Conn) -> int:
    return int(
        scalar(conn, "SELECT (SELECT count(DISTINCT id) FROM awa.jobs) + (SELECT count(*) FROM awa.waiting_jobs)")
    )


def keys(count: int) -> list[bytes]:
    return [number.to_bytes(16) for number in range(1, count + 1)]


# --- one after the other


@pytest.mark.parametrize("as_batch", [False, True], ids=["one", "batch"])
def test_the_first_is_the_job_and_the_others_return_it(conn: Conn, as_batch: bool) -> None:
    """Guard: INSERT ... ON CONFLICT DO NOTHING on the key, whichever function writes it."""
    first = put(conn)
    assert first.is_new
    again = put_many(conn, row(), row(os.urandom(16)))[0] if as_batch else put(conn)
    assert again == (first.id, False)
    assert state(conn, first.id) == "available"
    assert scalar(conn, "SELECT count(*) FROM awa.jobs WHERE unique_key = %s", KEY) == 1


def test_a_batch_answers_in_the_callers_order_though_keys_are_taken_in_theirs(conn: Conn) -> None:
    """Guard: results are joined to the jobs by key, not by position; of equal keys the first in the caller's order."""
    high, low, third = keys(3)[::-1]
    held = put(conn, third)
    plain = JobRow("q", "noop", b'{"n":9}', 2, 25)
    found = put_many(conn, row(high, n=1), plain, row(low, n=2), row(third, n=3), row(high, n=4), row(low, n=5))
    assert [one.is_new for one in found] == [True, True, True, False, False, False]
    assert found[3].id == held.id and found[4].id == found[0].id and found[5].id == found[2].id
    assert found[0].id < found[1].id < found[2].id
    written = conn.execute("SELECT id, args->>'n' FROM awa.jobs ORDER BY id").fetchall()
    assert written[1:] == [(found[0].id, "1"), (found[1].id, "9"), (found[2].id, "2")]


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_raise_undoes_the_whole_batch_and_leaves_a_lent_transaction_usable(
    conn: Conn, other: Conn, isolation: str
) -> None:
    """Guard: the keys of a batch are taken in a subtransaction that is rolled back; no exception reaches the caller."""
    first, second, third = keys(3)
    held = put(conn, second)
    with transaction(other, isolation):
        other.execute("CREATE TEMPORARY TABLE mine AS SELECT 1 AS n")
        with pytest.raises(UniqueConflict) as refused:
            put_many(other, row(first), row(third), row(second, mode="raise"), row(None))
        assert (refused.value.existing_id, refused.value.key) == (held.id, second)
        assert "items[2]" in str(refused.value)
        with pytest.raises(UniqueConflict) as refused:
            put(other, second, mode="raise")
        assert refused.value.existing_id == held.id
        # equal keys in one batch, of which the later refuses
        with pytest.raises(UniqueConflict) as refused:
            put_many(other, row(first), row(third), row(first, mode="raise"))
        assert refused.value.existing_id is None
        with pytest.raises(JobNotFound, match="999999"):
            put_many(other, row(first), row(None, parents=(held.id, 999_999)))
        assert count_jobs(other) == 1
        assert [one.is_new for one in put_many(other, row(first), row(third))] == [True, True]
        other.execute("COMMIT")
    assert count_jobs(conn) == 3


def test_a_key_of_other_states_is_free_while_its_job_runs(conn: Conn) -> None:
    """Guard: the 17th byte, the states in which the key is held; looked at for a single job and for a batch."""
    runtime = register(conn)
    first = put(conn, KEY + HELD_WHILE_WAITING)
    assert put(conn, KEY + HELD_WHILE_WAITING) == (first.id, False)
    [member] = claim(conn, runtime).members
    assert holder(conn) is None
    second = put(conn, KEY + HELD_WHILE_WAITING)
    assert second.is_new
    settle(conn, runtime, [member])
    # it is the second's now, whatever becomes of the first
    assert put_many(conn, row(KEY + HELD_WHILE_WAITING), row(os.urandom(16)))[0] == (second.id, False)
    assert scalar(conn, "SELECT states FROM awa.job_uniques WHERE key = %s", KEY) == 11


# --- what becomes of a key in its job's life


def end_completed(conn: Conn, runtime: int) -> None:
    settle(conn, runtime, claim(conn, runtime).members)


def end_completed_by_its_handler(conn: Conn, runtime: int) -> None:
    [member] = claim(conn, runtime).members
    complete(conn, member)


def go_retryable(conn: Conn, runtime: int) -> None:
    settle(conn, runtime, others=[Outcome(member, "retried", 60.0) for member in claim(conn, runtime).members])


def go_retried_at_once(conn: Conn, runtime: int) -> None:
    settle(conn, runtime, others=[Outcome(member, "retried") for member in claim(conn, runtime).members])


def go_retried_and_promoted(conn: Conn, runtime: int) -> None:
    go_retryable(conn, runtime)
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    assert promote(conn) == 1


def go_released(conn: Conn, runtime: int) -> None:
    settle(conn, runtime, others=[Outcome(member, "released") for member in claim(conn, runtime).members])


def go_snoozed(conn: Conn, runtime: int) -> None:
    settle(conn, runtime, others=[Outcome(member, "snoozed", 60.0) for member in claim(conn, runtime).members])


def go_rescued(conn: Conn, runtime: int) -> None:
    dead = register(conn)
    assert claim(conn, dead).members
    fall_silent(conn, dead)
    assert fence(conn, dead)
    assert rescue(conn, dead)[1] == 1


def go_set_aside(conn: Conn, runtime: int) -> None:
    assert claim(conn, runtime, kinds=["unknown"]).members == []


def go_moved(conn: Conn, runtime: int) -> None:
    assert move(conn, holder(conn) or 0, "elsewhere")[0] == "moved"


def go_carried(conn: Conn, runtime: int) -> None:
    slot = scalar(conn, "SELECT pg_sequence_last_value('awa.ring_seq')")
    conn.execute("SELECT awa.rotate_v1()")
    assert scalar(conn, "SELECT awa.carry_v1(%s::smallint, 'q', 100)", slot) == 1
    conn.execute(f"TRUNCATE awa.jobs_{slot}, awa.attempt_ends_{slot}")


def end_failed(conn: Conn, runtime: int) -> None:
    settle(conn, runtime, others=[Outcome(member, "failed") for member in claim(conn, runtime).members])


def end_cancelled(conn: Conn, runtime: int) -> None:
    assert cancel(conn, scalar(conn, "SELECT id FROM awa.jobs"))[0] == "cancelled"


def end_and_be_forgotten(conn: Conn, runtime: int) -> None:
    """Completed, and its segment emptied."""
    end_completed(conn, runtime)
    conn.execute("TRUNCATE awa.jobs, awa.claims, awa.completions, awa.attempt_ends")


KEEPS = [
    *(end_completed, end_completed_by_its_handler, go_retryable, go_retried_at_once, go_retried_and_promoted),
    *(go_released, go_snoozed, go_rescued, go_set_aside, go_moved, go_carried),
]
LEAVES = [end_failed, end_cancelled, end_and_be_forgotten]
Live = Callable[[Conn, int], None]


@pytest.mark.parametrize("live", KEEPS, ids=lambda live: live.__name__)
def test_a_job_keeps_its_key_wherever_it_goes(conn: Conn, live: Live) -> None:
    """Guard: the search by id, behind the look at the first entry; unique_key travels with the job; and the sweep sees
    the same as the insert."""
    first = put(conn)
    live(conn, register(conn))
    assert put(conn) == (first.id, False)
    assert holder(conn) == first.id
    assert sweep_keys(conn, AWA, after=b"", limit=10, seconds=1.0) == (KEY, 0)
    assert rows_of(conn) == 1
    found = scalar(
        conn,
        "SELECT array_agg(DISTINCT unique_key) FROM (SELECT unique_key FROM awa.jobs"
        " UNION ALL SELECT unique_key FROM awa.waiting_jobs) u",
    )
    assert found == [KEY]


@pytest.mark.parametrize("live", LEAVES, ids=lambda live: live.__name__)
@pytest.mark.parametrize("by", ["one", "batch", "sweep"])
def test_a_job_that_failed_was_cancelled_or_is_gone_holds_no_key(conn: Conn, live: Live, by: str) -> None:
    """Guard: UPDATE ... WHERE id = the old one, though the row of the old holder is still there."""
    first = put(conn)
    live(conn, register(conn))
    # as if nobody had removed it when the job ended
    conn.execute(
        "INSERT INTO awa.job_uniques (key, id, slot, lane, xid, entry_id, queue)"
        " VALUES (%s, %s, 0, 5, '3', %s, 'q') ON CONFLICT DO NOTHING",
        (KEY, first.id, first.id),
    )
    assert holder(conn) is None
    if by == "sweep":
        assert sweep_keys(conn, AWA, after=b"", limit=10, seconds=1.0) == (KEY, 1)
        assert rows_of(conn) == 0
    second = put(conn) if by != "batch" else put_many(conn, row(keys(1)[0]), row(), row(b"\xff" * 16))[1]
    assert second.is_new and second.id > first.id
    assert holder(conn) == second.id
    assert rows_of(conn) == 1


def test_a_scheduled_job_is_found_where_it_was_promoted_to(conn: Conn) -> None:
    """Guard: promote_v1 tells the key where the job has gone; without it each conflict is a search by id."""
    first = put(conn, delay=60.0)
    assert scalar(conn, "SELECT slot FROM awa.job_uniques") is None
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    assert promote(conn) == 1
    found = conn.execute("SELECT slot, lane, xid, entry_id, queue FROM awa.job_uniques").fetchone()
    assert found == conn.execute("SELECT slot, lane, xid, entry_id, queue FROM awa.jobs").fetchone()
    assert put(conn) == (first.id, False)


def test_the_sweep_walks_in_steps_and_leaves_what_is_locked(conn: Conn, other: Conn) -> None:
    """Guard: key > p_after, LIMIT, and FOR UPDATE SKIP LOCKED: a row that a taker has locked is left to it."""
    runtime = register(conn)
    all_keys = keys(5)
    put_many(conn, *(row(key) for key in all_keys))
    settle(conn, runtime, others=[Outcome(m, "failed") for m in claim(conn, runtime, limit=4).members])
    conn.execute("DELETE FROM awa.job_uniques WHERE key = ANY (%s)", (all_keys[:4],))
    conn.execute("INSERT INTO awa.job_uniques (key, id) SELECT k, 1 FROM unnest(%s::bytea[]) k", (all_keys[:4],))
    with transaction(other):
        other.execute("SELECT FROM awa.job_uniques WHERE key = %s FOR UPDATE", (all_keys[1],))
        assert sweep_keys(conn, AWA, after=b"", limit=3, seconds=1.0) == (all_keys[2], 2)
        assert sweep_keys(conn, AWA, after=all_keys[2], limit=3, seconds=1.0) == (all_keys[4], 1)
        assert sweep_keys(conn, AWA, after=all_keys[4], limit=3, seconds=1.0) == (None, 0)
        assert [rows_of(conn, key) for key in all_keys] == [0, 1, 0, 0, 1]


def test_the_leader_walks_over_all_keys_from_anywhere(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: the chore goes on where it stopped, begins again after the last key, and rests as its cost says."""
    monkeypatch.setattr(chore, "BATCH", 3)
    sweep = chore.Keys(AWA, pause=1234.0)
    for key in keys(10) + [b"\xff" * 15 + bytes([n]) for n in range(10)]:
        left_by(conn, key)
    rests = [sweep.run(conn, 0.0) for _ in range(20)]
    assert scalar(conn, "SELECT count(*) FROM awa.job_uniques") == 0
    assert 1234.0 in rests and 0.0 < min(rests) < 1234.0


def test_storage_check_counts_what_is_left_over(conn: Conn) -> None:
    """Guard: a key is loose when its job is in none of the three places, or ended out of the key's states."""
    check_origin(conn, AWA)
    runtime = register(conn)
    waits, runs, fails, done = keys(4)
    put(conn, waits, delay=60.0)
    put_many(conn, row(fails), row(runs), row(done))
    members = claim(conn, runtime).members
    settle(conn, runtime, [members[2]], [Outcome(members[0], "failed")])
    conn.execute("DELETE FROM awa.job_uniques WHERE key = %s", (fails,))
    report = check_storage(conn, AWA)
    assert (report.loose_keys, report.is_sound) == (0, True)
    conn.execute("INSERT INTO awa.job_uniques (key, id) VALUES (%s, %s)", (fails, members[0].id))
    left_by(conn)
    report = check_storage(conn, AWA)
    assert (report.loose_keys, report.is_sound) == (2, True)


# --- replace


def waiting(conn: Conn, job_id: int) -> tuple[Any, ...]:
    found = conn.execute(
        "SELECT args->>'n', state, waits_for, priority, queue, tags, run_at <= clock_timestamp(), attempt, wait_key"
        "  FROM awa.waiting_jobs WHERE id = %s",
        (job_id,),
    ).fetchone()
    assert found is not None
    return found


def test_replace_changes_what_waits_and_returns_what_does_not(conn: Conn) -> None:
    """Guard: the UPDATE of waiting_jobs, by id and state; the key, id and attempts stay."""
    runtime = register(conn)
    new = row(n=2, mode="replace", queue="p", tags=("t",))._replace(priority=1)
    first = put(conn, n=1, delay=60.0)
    for _ in range(2):
        assert jobs.insert_job(conn, AWA, new._replace(delay=90.0), notify=True) == (first.id, False)
        assert waiting(conn, first.id) == ("2", "scheduled", "time", 1, "p", ["t"], False, 1, None)
    assert jobs.insert_jobs(conn, AWA, [new._replace(args=b'{"n":3}'), row(os.urandom(16))], notify=True)[0] == (
        first.id,
        False,
    )
    assert waiting(conn, first.id) == ("3", "scheduled", "time", 1, "p", ["t"], True, 1, None)
    assert promote(conn) == 1
    assert put(conn, n=4, mode="replace") == (first.id, False)
    assert scalar(conn, "SELECT args->>'n' FROM awa.jobs WHERE id = %s", first.id) == "3"
    [member] = claim(conn, runtime, queue="p").members
    settle(conn, runtime, others=[Outcome(member, "retried", 60.0)])
    assert put(conn, n=5, mode="replace", delay=30.0) == (first.id, False)
    assert waiting(conn, first.id) == ("5", "retryable", "time", 2, "q", None, False, 2, None)
    assert holder(conn) == first.id
    assert scalar(conn, "SELECT unique_key FROM awa.waiting_jobs") == KEY


def test_in_one_batch_a_later_job_replaces_an_earlier_one_that_waits(conn: Conn) -> None:
    """Guard: replacements come after what the batch itself has written, in the caller's order within a key."""
    later = row(n=2, mode="replace", delay=60.0)
    first, second, third = put_many(conn, row(n=1, delay=60.0), later, later._replace(args=b'{"n":3}'))
    assert (first.is_new, second, third) == (True, (first.id, False), (first.id, False))
    assert waiting(conn, first.id)[0] == "3"


def test_replace_of_a_job_that_is_set_aside(conn: Conn) -> None:
    """Guard: it keeps waiting for its kind unless it gets a time; a worker that knows the kind gets the new args."""
    runtime = register(conn)
    first = put(conn, n=1)
    assert claim(conn, runtime, kinds=["unknown"]).members == []
    assert put(conn, n=2, mode="replace") == (first.id, False)
    assert waiting(conn, first.id) == ("2", "available", "kind", 2, "q", None, None, 1, "noop")
    assert put(conn, n=3, mode="replace", delay=60.0) == (first.id, False)
    assert waiting(conn, first.id) == ("3", "scheduled", "time", 2, "q", None, False, 1, None)


def test_replace_of_a_dependent_keeps_what_it_waits_for(conn: Conn) -> None:
    """Guard: parents are replaced by parents alone."""
    parent = put(conn, os.urandom(16))
    first = jobs.insert_job(conn, AWA, row(n=1, parents=(parent.id,), on_parent_failure="run"), notify=True)
    assert put(conn, n=2, mode="replace") == (first.id, False)
    found = "SELECT args->>'n', waits_for, run_at, parents, on_parent_failure FROM awa.waiting_jobs"
    assert conn.execute(found).fetchone() == ("2", "parent", None, [parent.id], "run")


# --- two at once: an open holder


def test_a_taker_waits_for_an_open_holder_and_returns_its_job(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: INSERT ... ON CONFLICT waits for the transaction that inserted the key (a look first would see nothing),
    and the holder is read in a statement that starts after that.

    Locks: the holder has its transaction's lock and the key's index entry. The taker's first look sees no row; its
    insert meets the entry and waits on the transaction's lock; its next statement's snapshot sees the committed job.
    """
    with transaction(other):
        first = put(other)
        taker = Background(lambda: put_many(third, row(keys(1)[0]), row(), row(b"\xff" * 16)))
        wait_for_lock(conn, third)
        other.execute("COMMIT")
        assert taker.result()[1] == (first.id, False)
    assert count_jobs(conn) == 3


def test_a_taker_becomes_the_job_when_the_holder_rolls_back(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: the wait, not an answer given while the holder is open, which would be a job that never was."""
    with transaction(other):
        first = put(other)
        taker = Background(lambda: put(third))
        wait_for_lock(conn, third)
        other.execute("ROLLBACK")
        assert taker.result().is_new and taker.result().id != first.id
    assert holder(conn) == taker.result().id


def test_a_savepoint_that_is_rolled_back_gives_its_keys_back(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: the taker waits for the subtransaction, which ends with the savepoint, though the transaction goes on."""
    with transaction(other):
        other.execute("SAVEPOINT before")
        put(other)
        taker = Background(lambda: put(third))
        wait_for_lock(conn, third)
        other.execute("ROLLBACK TO before")
        second = taker.result()
        assert second.is_new
        assert put(other) == (second.id, False)
        other.execute("COMMIT")


def test_a_job_that_was_held_is_returned_without_waiting_for_whoever_took_part(conn: Conn, other: Conn) -> None:
    """Guard: no lock on the row of a live holder: an open transaction that got it returned keeps nobody out.

    With ON CONFLICT DO UPDATE the first taker would hold the row's lock until it commits, and this test would wait.
    """
    first = put(conn)
    with transaction(other):
        assert put(other) == (first.id, False)
        assert put_many(other, row(), row(os.urandom(16)))[0] == (first.id, False)
        conn.execute("SET lock_timeout = '10s'")
        assert put(conn) == (first.id, False)
        conn.execute("SELECT FROM awa.job_uniques WHERE key = %s FOR UPDATE NOWAIT", (KEY,))


def test_no_lock_on_the_ring_is_left_in_a_lent_transaction(conn: Conn, other: Conn) -> None:
    """Guard: the look into the ring is in a subtransaction that is rolled back; else no segment could be emptied until
    the caller commits."""
    runtime = register(conn)
    usual, odd, moved = keys(3)
    put(conn, usual)
    put(conn, odd + bytes([2 | 32]))
    put(conn, moved)
    end_completed(conn, runtime)
    conn.execute("UPDATE awa.job_uniques SET slot = NULL WHERE key = %s", (moved,))
    left = (
        "SELECT count(*) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation"
        " WHERE l.pid = pg_backend_pid() AND c.relname ~ '^(jobs|claims|completions|attempt_ends)_\\d$'"
    )
    with transaction(other):
        for key in (usual, odd + bytes([2 | 32]), moved):
            assert not put(other, key).is_new
        with pytest.raises(JobNotFound):
            put_many(other, row(None, parents=(10**9,)))
        assert scalar(other, left) == 0


# --- two at once: a key that was left


def left_by(conn: Conn, key: bytes = KEY) -> None:
    """Make a row of a holder that is gone."""
    conn.execute("INSERT INTO awa.job_uniques (key, id) VALUES (%s, 10 ^ 9)", (key,))


def test_a_holder_that_ends_while_a_taker_waits_is_taken_over(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: who holds is decided in a new statement after the wait, and when it is nobody, everything begins anew.

    The holder inserts its job, and a second transaction cannot see it until it commits; it is cancelled in that same
    transaction here, by writing its end beside it. The taker waits on the transaction's lock, then sees the row and a
    holder that is cancelled.
    """
    with transaction(other):
        first = put(other)
        taker = Background(lambda: put_many(third, row(keys(1)[0]), row(), row(b"\xff" * 16))[1])
        wait_for_lock(conn, third)
        other.execute(
            "INSERT INTO awa.attempt_ends (entry_id, id, slot, outcome)"
            " SELECT entry_id, id, slot, 'cancelled' FROM awa.jobs WHERE id = %s",
            (first.id,),
        )
        other.execute("COMMIT")
        assert taker.result().is_new
    assert holder(conn) == taker.result().id


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
@pytest.mark.parametrize("as_batch", [False, True], ids=["one", "batch"])
def test_two_takers_of_a_key_that_was_left(conn: Conn, other: Conn, third: Conn, ending: str, as_batch: bool) -> None:
    """Guard: WHERE id = the old one: the second taker's UPDATE waits for the first's row lock, then finds it changed
    (the call begins anew, and returns the first's job) or as it was (it takes the key)."""
    left_by(conn)
    with transaction(other):
        first = put(other)
        assert first.is_new
        taker = Background(
            (lambda: put_many(third, row(b"\xff" * 16), row(), row(keys(1)[0]))[1]) if as_batch else lambda: put(third)
        )
        wait_for_lock(conn, third)
        other.execute(ending)
        second = taker.result()
    assert second.is_new == (ending == "ROLLBACK")
    assert holder(conn) == second.id
    if ending == "COMMIT":
        assert second.id == first.id


def test_a_batch_gives_its_keys_back_before_it_begins_anew(
    conn: Conn, other: Conn, third: Conn, open_connection: Open
) -> None:
    """Guard: a batch of several keys takes them in a subtransaction, which is rolled back when somebody was faster.

    The batch wants 1 and 2. Its insert waits for 1, whose open holder commits a job that is cancelled; so it goes on
    and has 2 when it finds that 1 was left. Meanwhile a second taker has taken 1 over and waits for 2. Were the batch
    to want 1 now with 2 in its hands, neither could go on.
    """
    one, two = keys(2)
    lasting = put(conn, None).id
    holding, stopping, taking = other, open_connection(), open_connection()
    with transaction(holding), transaction(stopping), transaction(taking):
        first = put(holding, one)
        batch = Background(lambda: put_many(third, row(one), row(two)))
        wait_for_lock(conn, third)
        holding.execute(
            "INSERT INTO awa.attempt_ends (entry_id, id, slot, outcome)"
            " SELECT entry_id, id, slot, 'cancelled' FROM awa.jobs WHERE id = %s",
            (first.id,),
        )
        stopping.execute("LOCK TABLE awa.ended_jobs")  # where the batch looks for the holder of 1, when it has 2
        holding.execute("COMMIT")
        wait_until(lambda: scalar(conn, "SELECT pg_blocking_pids(%s)", third.info.backend_pid) == [pid_of(stopping)])
        taking.execute("UPDATE awa.job_uniques SET id = %s, slot = NULL WHERE key = %s", (lasting, one))
        second = Background(
            lambda: taking.execute("INSERT INTO awa.job_uniques (key, id) VALUES (%s, %s)", (two, lasting))
        )
        wait_for_lock(conn, taking)
        stopping.execute("COMMIT")
        second.result()
        taking.execute("COMMIT")
        assert batch.result() == [(lasting, False), (lasting, False)]


def pid_of(conn: Conn) -> int:
    return conn.info.backend_pid


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_above_read_committed_a_conflict_beyond_the_snapshot_is_a_serialization_failure(
    conn: Conn, other: Conn, isolation: str
) -> None:
    """Guard: an older snapshot cannot see the holder; an answer from it would be a guess. What it sees, it returns."""
    known, fresh, gone = keys(3)
    first = put(conn, known)
    left_by(conn, gone)
    with transaction(other, isolation):
        assert put(other, known) == (first.id, False)
        put(conn, fresh)
        with pytest.raises(psycopg.errors.SerializationFailure):
            put(other, fresh)
        other.execute("ROLLBACK")
    with transaction(other, isolation):
        other.execute("SELECT count(*) FROM awa.job_uniques")
        put(conn, gone)
        with pytest.raises(psycopg.errors.SerializationFailure):
            put_many(other, row(gone), row(os.urandom(16)))
        other.execute("ROLLBACK")


def test_a_holder_out_of_an_old_snapshots_sight_is_not_taken_for_gone(conn: Conn, other: Conn) -> None:
    """Guard: 'unclear' when a segment was emptied since the snapshot.

    The taker's snapshot is of before the holder is carried forward into the current segment and the old one emptied,
    which ignores snapshots: it sees neither the old entry nor the new one, and the key's row unchanged.
    """
    first = put(conn)
    with transaction(other, "REPEATABLE READ"):
        other.execute("SELECT count(*) FROM awa.ring")
        go_carried(conn, 0)
        with pytest.raises(psycopg.errors.SerializationFailure):
            put(other)
        other.execute("ROLLBACK")
    assert put(other) == (first.id, False)


# --- two at once: replace


def test_replace_beside_a_promotion(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: the UPDATE waits for the promotion's row lock, and finds no row after it; and a promotion skips a row that
    is being replaced. Neither loses the job or runs it with half of the options."""
    first = put(conn, n=1, delay=60.0)
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    with transaction(other):
        assert promote(other) == 1
        replacing = Background(lambda: put(third, n=2, mode="replace"))
        wait_for_lock(conn, third)
        other.execute("COMMIT")
        assert replacing.result() == (first.id, False)
    assert scalar(conn, "SELECT args->>'n' FROM awa.jobs") == "1"
    second = put(conn, keys(1)[0], n=3, delay=60.0)
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    with transaction(other):
        assert put(other, keys(1)[0], n=4, mode="replace") == (second.id, False)
        assert promote(third) == 0
        other.execute("COMMIT")
    assert promote(third) == 1
    assert scalar(conn, "SELECT args->>'n' FROM awa.jobs WHERE id = %s", second.id) == "4"


def test_replace_beside_a_claim_of_a_job_that_is_set_aside(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: as with a promotion; the claim skips a row that is being replaced, and a replacement waits for a claim."""
    runtime = register(conn)
    first = put(conn, n=1)
    assert claim(conn, runtime, kinds=["unknown"]).members == []
    with transaction(other):
        assert put(other, n=2, mode="replace") == (first.id, False)
        assert claim(third, runtime, kinds=["noop"]).members == []
        other.execute("COMMIT")
    with transaction(other):
        assert claim(other, runtime, kinds=["noop"]).numbers == [2]
        replacing = Background(lambda: put(third, n=3, mode="replace"))
        wait_for_lock(conn, third)
        other.execute("COMMIT")
        assert replacing.result() == (first.id, False)
    assert state(conn, first.id) == "running"


# --- the sweep beside a taker


def test_the_sweep_leaves_a_key_that_is_taken_over_meanwhile(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: what is removed is looked at again under the row's lock: it must still be the holder's that has left."""
    left_by(conn)
    with transaction(other):
        other.execute("LOCK TABLE awa.ended_jobs")  # the sweep stops between its first look and its removal
        sweeping = Background(lambda: sweep_keys(third, AWA, after=b"", limit=10, seconds=1.0))
        wait_for_lock(conn, third)
        other.execute("UPDATE awa.job_uniques SET id = 10 ^ 9 + 1 WHERE key = %s", (KEY,))
        other.execute("COMMIT")
        assert sweeping.result() == (KEY, 0)
    assert rows_of(conn) == 1


# --- cancelling the holder


def test_cancel_by_key(conn: Conn) -> None:
    """Guard: the holder is looked for by state, not by the row alone."""
    with pytest.raises(JobNotFound):
        control.cancel_holder(conn, AWA, KEY)
    first = put(conn)
    assert control.cancel_holder(conn, AWA, KEY).id == first.id
    assert state(conn, first.id) == JobState.CANCELLED
    with pytest.raises(JobNotFound):
        control.cancel_holder(conn, AWA, KEY)
    assert put(conn).is_new


# --- the SQL contract


@pytest.fixture
def enqueue(conn: Conn) -> Iterator[Callable[..., tuple[int, bool]]]:
    """``awa.enqueue_v1`` as psql calls it."""

    def call(**options: Any) -> tuple[int, bool]:
        named = ", ".join(f"p_{name} => %({name})s" for name in options)
        found = conn.execute(f"SELECT id, is_new FROM awa.enqueue_v1({named})", options).fetchone()
        assert found is not None
        return found[0], found[1]

    yield call


def test_a_job_from_sql_has_what_it_was_given(conn: Conn, enqueue: Callable[..., tuple[int, bool]]) -> None:
    """Guard: each argument reaches its column; args keep their text."""
    parent, _ = enqueue(kind="k")
    assert conn.execute("SELECT queue, priority, max_attempts, args::text FROM awa.jobs").fetchone() == (
        *("default", 2, 25),
        "{}",
    )
    text = '{"b":1.0,  "a":"\\u00e9"}'
    given = {
        "kind": "k",
        "args": text,
        "queue": "q",
        "priority": 1,
        "max_attempts": 3,
        "timeout_ms": 5000,
        "tags": ["t"],
        "metadata": "{}",
    }
    job, is_new = enqueue(**given, unique_key=KEY, unique_states=["scheduled", "available"], delay="1 hour")
    assert is_new
    found = conn.execute(
        "SELECT args::text, queue, priority, max_attempts, timeout_ms, tags, metadata::text, unique_key,"
        " run_at > now() + interval '59 min' FROM awa.waiting_jobs WHERE id = %s",
        (job,),
    ).fetchone()
    assert found == (text, "q", 1, 3, 5000, ["t"], "{}", KEY + b"\x03", True)
    assert enqueue(kind="k", unique_key=KEY) == (job, False)
    with pytest.raises(psycopg.Error) as refused:
        enqueue(kind="k", unique_key=KEY, on_conflict="raise")
    assert (refused.value.sqlstate, refused.value.diag.message_detail) == ("AWA05", str(job))
    assert enqueue(kind="k", args='{"n":2}', unique_key=KEY, on_conflict="replace") == (job, False)
    assert waiting(conn, job)[0] == "2"
    child, _ = enqueue(kind="k", after=[parent, job], on_parent_failure="run", follow_ups='{"completed": []}')
    found = conn.execute(
        "SELECT waits_for, parents, on_parent_failure, follow_ups::text, run_at FROM awa.waiting_jobs WHERE id = %s",
        (child,),
    ).fetchone()
    assert found == ("parent", [parent, job], "run", '{"completed": []}', None)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"kind": None}, "p_kind has 1 to 200 characters, not NULL"),
    ({"kind": "k" * 201}, "p_kind has 1 to 200 characters, not 201"),
    ({"queue": ""}, "p_queue has 1 to 200 characters, not 0"),
    ({"args": None}, "p_args is NULL"),
    ({"priority": 5}, "p_priority is 1, which runs first, to 4, not 5"),
    ({"max_attempts": 0}, "p_max_attempts is 1 to 1000, not 0"),
    ({"timeout_ms": -1}, "p_timeout_ms"),
    ({"run_at": "infinity"}, "p_run_at is within the years 1970 to 9999"),
    ({"run_at": "2030-01-01", "delay": "1 s"}, "exclude each other"),
    ({"delay": "-1 s"}, "p_delay is from 0 to 3650 days"),
    ({"tags": ["a", ""]}, "p_tags"),
    ({"tags": ["a"] * 21}, "p_tags has at most 20 tags, not 21"),
    ({"metadata": "[]"}, "p_metadata is a JSON object, not a JSON array"),
    ({"follow_ups": "1"}, "p_follow_ups is a JSON object"),
    ({"unique_key": b"short"}, "p_unique_key has 16 bytes, not 5"),
    ({"unique_states": ["available"]}, "p_unique_states is for jobs with p_unique_key"),
    ({"unique_key": KEY, "unique_states": ["done", "available"]}, "'done', which is no state of a job"),
    ({"unique_key": KEY, "unique_states": ["running"]}, "must have available"),
    ({"unique_key": KEY, "on_conflict": "ignore"}, "p_on_conflict is return, raise or replace, not ignore"),
    ({"after": []}, "p_after is the ids of one or more jobs"),
    ({"after": [1], "on_parent_failure": "no"}, "p_on_parent_failure is cancel, run or discard, not no"),
    ({"on_parent_failure": "run"}, "p_on_parent_failure is for jobs with p_after"),
    ({"after": [10**9]}, "no job has the id 1000000000"),
]


def test_what_sql_gets_wrong_is_told(conn: Conn, enqueue: Callable[..., tuple[int, bool]]) -> None:
    """Guard: awa.enqueue_v1 looks at every argument; a NULL passes no CHECK."""
    for options, text in WRONG:
        with pytest.raises(psycopg.Error) as refused:
            enqueue(**{"kind": "k"} | options)
        assert refused.value.sqlstate == ("P0002" if text.startswith("no job") else "22023"), options
        assert text in str(refused.value), options
    assert count_jobs(conn) == 0
