"""Cancelling a job at every moment of its life, beside everybody else who may end it.

Each docstring names the guard of the engine that the test fails without.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import psycopg
import pytest

from awa.storage import control, recovery, runtimes
from tests.storage.engine import (
    AWA,
    Conn,
    Outcome,
    cancel,
    claim,
    claim_in_steps,
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
)
from tests.storage.lives import (
    ASKED,
    DONE,
    ENDED,
    REQUESTS,
    RUNNING,
    UNSTARTED,
    Make,
    history,
    make_handed_over,
    make_retryable_with_its_key,
    make_running,
    make_waiting_for_key,
    make_waiting_for_order,
    one,
)

# Every moment of a job's life


@pytest.mark.parametrize("make", UNSTARTED)
@pytest.mark.parametrize("force", [False, True])
def test_what_has_not_started_is_cancelled_at_once(conn: Conn, make: Make, force: bool) -> None:
    runtime = register(conn)
    job, before = make(conn, runtime)
    told = scalar(conn, "SELECT coalesce(json_array_length(history), 0) FROM awa.find_job_v1(%s)", job)
    assert state(conn, job) == before
    assert cancel(conn, job, "not needed", force=force) == DONE
    assert state(conn, job) == "cancelled"
    assert places(conn, job) == {"ended": 1}
    assert len(history(conn, job)) == told + 1
    assert history(conn, job)[-1][1:] == ("cancelled", "Cancelled", "not needed")
    # nobody runs it, whatever time passes
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now() WHERE waits_for = 'time'")
    assert promote(conn) == 0
    assert job not in claim(conn, runtime).ids
    assert cancel(conn, job, force=force) == ("nothing", "cancelled")


@pytest.mark.parametrize("make", [make_handed_over, make_retryable_with_its_key])
def test_the_next_of_its_key_runs_when_a_job_that_has_it_is_cancelled(conn: Conn, make: Make) -> None:
    """Guard: conclude gives the key back; nothing else tells, since no attempt ends."""
    runtime = register(conn)
    job, _ = make(conn, runtime)
    [third] = insert(conn, 3, order="o")
    assert third not in claim(conn, runtime, limit=1, kinds=["other"]).ids
    assert cancel(conn, job) == DONE
    started: list[int] = []
    for _ in range(5):
        members = claim(conn, runtime, kinds=["noop"]).members
        assert len(members) <= 1
        started += [member.id for member in members]
        settle(conn, runtime, members)
    assert started[-1] == third and job not in started
    assert scalar(conn, "SELECT count(*) FROM awa.waiting_jobs") == 0


@pytest.mark.parametrize("make", [make_waiting_for_key, make_waiting_for_order])
def test_who_waits_for_a_key_can_leave_the_line(conn: Conn, make: Make) -> None:
    """Guard: the next is looked for among those that wait when the key is free."""
    runtime = register(conn)
    job, _ = make(conn, runtime)
    options = {"key": "k"} if make is make_waiting_for_key else {"order": "o"}
    [third] = insert(conn, 3, **options)
    assert claim(conn, runtime).members == []
    assert cancel(conn, job) == DONE
    assert claim(conn, runtime).members == []
    running = scalar(conn, "SELECT min(id) FROM awa.jobs")
    assert cancel(conn, running, force=True) == DONE
    assert [member.id for _ in range(3) for member in claim(conn, runtime).members] == [third]


@pytest.mark.parametrize("make", RUNNING)
def test_a_running_job_is_asked_to_end(conn: Conn, make: Make) -> None:
    runtime = register(conn)
    job, _ = make(conn, runtime)
    assert cancel(conn, job, "not needed") == ASKED
    assert state(conn, job) == "running"
    assert conn.execute("SELECT id, runtime, reason FROM awa.cancel_requests").fetchall() == [
        (job, runtime, "not needed")
    ]
    # the first reason stays unless there is another
    assert cancel(conn, job) == ASKED
    assert scalar(conn, "SELECT reason FROM awa.cancel_requests") == "not needed"
    assert cancel(conn, job, "really") == ASKED
    assert scalar(conn, "SELECT reason FROM awa.cancel_requests") == "really"
    assert scalar(conn, "SELECT count(*) FROM awa.attempt_ends WHERE outcome = 'cancelled'") == 0


@pytest.mark.parametrize("make", RUNNING)
def test_force_ends_a_running_job_at_once(conn: Conn, make: Make) -> None:
    """What its worker says later is refused; its handler is told that it need not go on."""
    runtime = register(conn)
    job, _ = make(conn, runtime)
    assert cancel(conn, job, "now", force=True) == DONE
    assert state(conn, job) == "cancelled"
    assert places(conn, job) == {"ended": 1}
    assert history(conn, job) == [(1, "cancelled", "Cancelled", "now")]
    assert scalar(conn, "SELECT count(*) FROM awa.cancel_requests WHERE id = %s", job) == 1
    assert cancel(conn, job, force=True) == ("nothing", "cancelled")


def test_what_comes_after_force_is_refused(conn: Conn) -> None:
    """Guard: the attempt has its end, which settle and complete look for."""
    runtime = register(conn)
    ids = insert(conn, *range(4))
    members = claim(conn, runtime).members
    for job in ids:
        assert cancel(conn, job, force=True) == DONE
    assert settle(conn, runtime, members[:1], [Outcome(members[1], "retried")]) == [m.place for m in members[:2]]
    with pytest.raises(psycopg.errors.UniqueViolation):
        complete(conn, members[2])
    fall_silent(conn, runtime)
    assert fence(conn, runtime)
    assert rescue(conn, runtime) == (0, 0, 0)
    assert [state(conn, job) for job in ids] == ["cancelled"] * 4
    assert [places(conn, job) for job in ids] == [{"ended": 1}] * 4


@pytest.mark.parametrize("make", ENDED)
@pytest.mark.parametrize("force", [False, True])
def test_what_has_ended_stays_as_it_is(conn: Conn, make: Make, force: bool) -> None:
    runtime = register(conn)
    job, before = make(conn, runtime)
    for is_closed in (False, True):
        if is_closed:  # its claim stands in no list of open ones any more
            runtimes.heartbeat(conn, AWA, runtime, newest_claim=2**40, open_claims=[])
        assert cancel(conn, job, force=force) == ("nothing", before)
        assert state(conn, job) == before
    assert scalar(conn, REQUESTS) == 0


def test_a_claim_that_no_heartbeat_lists_is_not_taken_for_completed(conn: Conn) -> None:
    """Guard: only a recorded completion says so; a worker may have lost sight of a claim."""
    runtime = register(conn)
    job, _ = make_running(conn, runtime)
    runtimes.heartbeat(conn, AWA, runtime, newest_claim=2**40, open_claims=[])
    assert cancel(conn, job) == ("busy", "running")


def test_an_unknown_job_is_not_found(conn: Conn, other: Conn) -> None:
    assert cancel(conn, 4711) == ("not_found", None)
    with transaction(other):
        [job] = insert(other, 1)
        assert cancel(conn, job) == ("not_found", None)
        other.execute("ROLLBACK")
    assert cancel(conn, job) == ("not_found", None)


def test_a_job_of_which_only_an_older_entry_is_left_is_not_found(conn: Conn) -> None:
    """Guard: what ends an entry and not its job is no state; the next entry's segment was emptied."""
    runtime = register(conn)
    member = one(conn, runtime)
    conn.execute("SELECT setval('awa.ring_seq', 1)")
    settle(conn, runtime, others=[Outcome(member, "retried")])
    settle(conn, runtime, claim(conn, runtime).members)
    conn.execute("TRUNCATE awa.jobs_1, awa.claims_1, awa.completions_1, awa.attempt_ends_1")
    assert cancel(conn, member.id) == ("not_found", None)


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_an_old_snapshot_is_refused(conn: Conn, isolation: str) -> None:
    """Guard: AWA02; an older snapshot would not show a claim."""
    [job] = insert(conn, 1)
    with transaction(conn, isolation), pytest.raises(psycopg.Error) as caught:
        cancel(conn, job)
    assert caught.value.sqlstate == "AWA02"
    assert state(conn, job) == "available"


def test_an_ended_job_keeps_all_that_was_said_of_it(conn: Conn) -> None:
    """Guard: every column of a body is copied, from an entry and from a waiting job alike."""
    columns = (
        "id, queue, kind, priority, max_attempts, timeout_ms, args::text, metadata::text, tags, concurrency_key,"
        " ordering_key, unique_key, follow_ups::text"
    )
    values = "('q', 'noop', 1, 9, 77, '{\"n\":  1}', '{\"m\": 1}', '{a}', 'c', 'o', 'u', '[1]', 5{more})".replace(
        "{more}", "%s"
    )
    names = (
        "queue, kind, priority, max_attempts, timeout_ms, args, metadata, tags, concurrency_key, ordering_key,"
        " unique_key, follow_ups, attempt"
    )
    conn.execute(f"INSERT INTO awa.jobs ({names}, lane) VALUES " + values % ", 3")
    conn.execute(f"INSERT INTO awa.waiting_jobs ({names}, run_at) VALUES " + values % ", '2100-01-01'")
    for table, created in (("jobs", "available_at"), ("waiting_jobs", "created_at")):
        before = conn.execute(f"SELECT {columns}, attempt, {created} FROM awa.{table}").fetchone()
        assert before is not None
        assert cancel(conn, before[0]) == DONE
        after = conn.execute(
            f"SELECT {columns}, attempt, created_at FROM awa.ended_jobs WHERE id = %s", (before[0],)
        ).fetchone()
        assert after == before


def test_a_job_that_nobody_gives_a_reason_for_says_so(conn: Conn) -> None:
    [job] = insert(conn, 1)
    cancel(conn, job)
    assert history(conn, job) == [(1, "cancelled", "Cancelled", "cancelled by an operator")]


# Whatever the attempt comes to


@pytest.mark.parametrize(
    ("outcome", "delay"),
    [
        ("retried", 0.0),
        ("retried", 60.0),
        ("snoozed", 0.0),
        ("snoozed", 60.0),
        ("released", 0.0),
        ("failed", 0.0),
        ("cancelled", 0.0),
    ],
)
def test_an_attempt_that_was_asked_to_end_has_no_next(conn: Conn, outcome: str, delay: float) -> None:
    """Guard: end_attempts looks for a request."""
    runtime = register(conn)
    ids = insert(conn, 1, 2)
    asked, beside = claim(conn, runtime).members
    assert cancel(conn, asked.id, "not needed") == ASKED
    error = {"type": "E", "text": "so", "traceback": "line"}
    assert settle(conn, runtime, others=[Outcome(m, outcome, delay, error) for m in (asked, beside)]) == []
    assert state(conn, asked.id) == "cancelled"
    assert places(conn, asked.id) == {"ended": 1}
    assert history(conn, asked.id) == [(1, "cancelled", "Cancelled", "not needed\nE: so")]
    assert scalar(conn, "SELECT history->0->>'traceback' FROM awa.ended_jobs WHERE id = %s", asked.id) == "line"
    assert scalar(conn, "SELECT outcome FROM awa.attempt_ends WHERE id = %s", asked.id) == "cancelled"
    assert scalar(conn, REQUESTS) == 0
    # its neighbour fares as ever
    expected = {"retried": ("available", "retryable"), "snoozed": ("available", "scheduled")}
    assert state(conn, ids[1]) == {**dict.fromkeys(("failed", "cancelled"), outcome), "released": "available"}.get(
        outcome, expected.get(outcome, ("", ""))[delay > 0]
    )


def test_the_last_attempt_is_cancelled_and_has_not_failed(conn: Conn) -> None:
    """Guard: the request goes before the limit of attempts."""
    runtime = register(conn)
    [job] = insert(conn, 1, max_attempts=1)
    [member] = claim(conn, runtime).members
    cancel(conn, job)
    settle(conn, runtime, others=[Outcome(member, "retried")])
    assert state(conn, job) == "cancelled"


def test_a_success_is_a_success(conn: Conn) -> None:
    """Whichever way it is recorded. The request that is left over is removed once it is known that it is one."""
    runtime = register(conn)
    ids = insert(conn, 1, 2, 3)
    told, untold, by_itself = claim(conn, runtime).members
    for job in ids:
        assert cancel(conn, job) == ASKED
    assert settle(conn, runtime, others=[Outcome(told, "completed")]) == []
    assert set(control.read_requests(conn, AWA, runtime).to_cancel) == {untold.entry_id, by_itself.entry_id}
    control.forget_requests(conn, AWA, runtime, [untold.entry_id, by_itself.entry_id])
    assert scalar(conn, REQUESTS) == 2, "an open attempt's request must be found by whatever ends it"
    assert settle(conn, runtime, [untold]) == []
    complete(conn, by_itself)
    assert [state(conn, job) for job in ids] == ["completed"] * 3
    control.forget_requests(conn, AWA, runtime + 1, [untold.entry_id, by_itself.entry_id])
    assert scalar(conn, REQUESTS) == 2
    control.forget_requests(conn, AWA, runtime, [untold.entry_id])
    assert set(control.read_requests(conn, AWA, runtime).to_cancel) == {by_itself.entry_id}
    control.forget_requests(conn, AWA, runtime, [by_itself.entry_id])
    assert scalar(conn, REQUESTS) == 0


def test_a_rescued_attempt_that_was_asked_to_end_is_cancelled(conn: Conn) -> None:
    """Guard: end_attempts looks for a request, whoever calls it; finishing removes what is left."""
    dead, living = register(conn, host="alpha"), register(conn)
    ids = insert(conn, 1, 2, 3)
    first, second, _ = claim(conn, dead).members
    assert cancel(conn, first.id, "not needed") == ASKED
    assert cancel(conn, second.id) == ASKED
    complete(conn, second)
    fall_silent(conn, dead)
    assert fence(conn, dead)
    assert rescue(conn, dead) == (2, 2, 0)
    assert [state(conn, job) for job in ids] == ["cancelled", "completed", "available"]
    [(attempt, outcome, kind, text)] = history(conn, first.id)
    assert (attempt, outcome, kind) == (1, "cancelled", "Cancelled")
    assert text is not None and text.startswith("not needed\nWorkerDied: its worker died: host alpha")
    assert claim(conn, living).ids == [ids[2]]
    assert scalar(conn, REQUESTS) == 1
    runtimes.finish(conn, AWA, dead)
    assert scalar(conn, REQUESTS) == 0


def test_a_claim_that_was_answered_to_nobody_gives_back_no_cancelled_job(conn: Conn) -> None:
    runtime = register(conn)
    job, _ = make_running(conn, runtime)
    assert cancel(conn, job) == ASKED
    assert recovery.release_unknown_claims(conn, AWA, runtime, newest=0) == 1
    assert state(conn, job) == "cancelled"


def test_a_runtime_that_leaves_takes_its_requests_along(conn: Conn) -> None:
    gone, leaving = register(conn), register(conn)
    for runtime in (gone, leaving):
        member = one(conn, runtime)
        assert cancel(conn, member.id) == ASKED
        settle(conn, runtime, [member])
    fall_silent(conn, gone)
    assert fence(conn, gone)
    for runtime in (gone, leaving):
        runtimes.leave(conn, AWA, runtime, newest_claim=9)
    assert conn.execute("SELECT runtime FROM awa.cancel_requests").fetchall() == [(gone,)]


# In a lane


def test_cancelled_entries_are_skipped_and_hide_nothing(conn: Conn) -> None:
    """At the head, in the middle and at the end, before a page is cut and after."""
    runtime = register(conn)
    ids = insert(conn, *range(12))
    for n in (0, 1, 4):
        assert cancel(conn, ids[n]) == DONE
    assert claim(conn, runtime, limit=2).numbers == [2, 3]
    for n in (5, 8, 11):
        assert cancel(conn, ids[n]) == DONE
    assert claim_in_steps(conn, runtime, limit=1) == [6, 7, 9, 10]
    insert(conn, 12)
    assert claim(conn, runtime).numbers == [12]


def test_entries_of_a_segment_that_is_not_current(conn: Conn) -> None:
    """Guard: an end lies in the slot of its entry."""
    runtime = register(conn)
    ids = insert(conn, 1, 2, 3)
    claim(conn, runtime, limit=1)
    conn.execute("SELECT setval('awa.ring_seq', 4)")
    insert(conn, 4)
    assert cancel(conn, ids[0], force=True) == DONE
    assert cancel(conn, ids[1]) == DONE
    assert conn.execute("SELECT slot, outcome FROM awa.attempt_ends").fetchall() == [(0, "cancelled")] * 2
    assert claim(conn, runtime).numbers == [3, 4]


def test_entries_of_a_transaction_that_a_page_did_not_see(conn: Conn, other: Conn) -> None:
    """Guard: is_passed asks the snapshots; by position alone the late entry would count as claimed."""
    runtime = register(conn)
    with transaction(other):
        [late, later] = insert(other, 1, 2)
        insert(conn, 3)
        assert claim(conn, runtime).numbers == [3]
        other.execute("COMMIT")
    assert cancel(conn, late) == DONE
    assert claim(conn, runtime).ids == [later]


@pytest.mark.parametrize("seed", range(6))
def test_passed_is_what_was_claimed(conn: Conn, open_connection: Callable[[], Conn], seed: int) -> None:
    """The frontier says of each entry what the claims say, whatever the order of commits and rollbacks."""
    chance = random.Random(seed)
    runtime = register(conn)
    writers = [open_connection() for _ in range(4)]
    wrong = """
        SELECT count(*) FROM awa.jobs j
         WHERE awa.is_passed(j.queue, j.lane, j.xid, j.entry_id)
               IS DISTINCT FROM EXISTS (SELECT FROM awa.claims c WHERE j.entry_id = ANY (c.entry_ids))
    """
    for _ in range(120):
        writer = chance.choice(writers)
        match chance.choice(["insert", "insert", "end", "claim", "claim"]):
            case "insert":
                if writer.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                    writer.execute("BEGIN")
                insert(writer, *range(chance.randint(1, 4)), priority=chance.choice([1, 2]))
            case "end":
                writer.execute(chance.choice(["COMMIT", "COMMIT", "ROLLBACK"]))
            case _:
                claim(conn, runtime, limit=chance.randint(1, 5))
        assert scalar(conn, wrong) == 0
    assert scalar(conn, "SELECT count(*) FROM awa.claims") > 5
