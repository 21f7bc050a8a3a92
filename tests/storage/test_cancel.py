"""Cancelling a job at every moment of its life, beside everybody else who may end it.

Each docstring names the guard of the engine that the test fails without.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import psycopg
import pytest

from awa.errors import JobBusy, JobNotFound
from awa.job import JobState
from awa.storage import control, recovery, runtimes
from awa.storage.control import Controlled
from tests.storage.engine import (
    AWA,
    BUSY,
    Background,
    Conn,
    Member,
    Outcome,
    Pause,
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
    wait_for_lock,
)

DONE = ("cancelled", "cancelled")
ASKED = ("requested", "running")
REQUESTS = "SELECT count(*) FROM awa.cancel_requests"

Prepared = tuple[int, str]


def history(conn: Conn, job: int) -> list[tuple[int, str, str | None, str | None]]:
    """Attempt, outcome, type and text of each ended attempt."""
    found = scalar(conn, "SELECT history FROM awa.find_job_v1(%s)", job)
    return [(item["attempt"], item["outcome"], item["type"], item["text"]) for item in found]


def one(conn: Conn, runtime: int, n: int = 1) -> Member:
    """A new job's open attempt."""
    insert(conn, n)
    [member] = claim(conn, runtime).members
    return member


def make_scheduled(conn: Conn, runtime: int) -> Prepared:
    member = one(conn, runtime)
    settle(conn, runtime, others=[Outcome(member, "snoozed", 60.0)])
    return member.id, "scheduled"


def make_retryable(conn: Conn, runtime: int) -> Prepared:
    member = one(conn, runtime)
    settle(conn, runtime, others=[Outcome(member, "retried", 60.0)])
    return member.id, "retryable"


def make_set_aside(conn: Conn, runtime: int) -> Prepared:
    [job] = insert(conn, 1, kind="new")
    assert claim(conn, runtime, kinds=["noop"]).members == []
    return job, "available"


def make_available(conn: Conn, runtime: int) -> Prepared:
    [job] = insert(conn, 1)
    return job, "available"


def make_express(conn: Conn, runtime: int) -> Prepared:
    member = one(conn, runtime)
    settle(conn, runtime, others=[Outcome(member, "released")])
    return member.id, "available"


def make_behind_the_frontier_of_others(conn: Conn, runtime: int) -> Prepared:
    insert(conn, 1, 2)
    claim(conn, runtime, limit=1)  # its page was cut, and is not exhausted
    return scalar(conn, "SELECT max(id) FROM awa.jobs"), "available"


def make_running(conn: Conn, runtime: int) -> Prepared:
    return one(conn, runtime).id, "running"


def make_running_from_aside(conn: Conn, runtime: int) -> Prepared:
    job, _ = make_set_aside(conn, runtime)
    assert claim(conn, runtime, kinds=["new"]).ids == [job]
    return job, "running"


def make_completed(conn: Conn, runtime: int) -> Prepared:
    member = one(conn, runtime)
    settle(conn, runtime, [member])
    return member.id, "completed"


def make_completed_by_its_handler(conn: Conn, runtime: int) -> Prepared:
    member = one(conn, runtime)
    complete(conn, member)
    return member.id, "completed"


def make_failed(conn: Conn, runtime: int) -> Prepared:
    member = one(conn, runtime)
    settle(conn, runtime, others=[Outcome(member, "failed")])
    return member.id, "failed"


def make_cancelled(conn: Conn, runtime: int) -> Prepared:
    member = one(conn, runtime)
    settle(conn, runtime, others=[Outcome(member, "cancelled")])
    return member.id, "cancelled"


UNSTARTED = (
    make_scheduled,
    make_retryable,
    make_set_aside,
    make_available,
    make_express,
    make_behind_the_frontier_of_others,
)
RUNNING = (make_running, make_running_from_aside)
ENDED = (make_completed, make_completed_by_its_handler, make_failed, make_cancelled)

Make = Callable[[Conn, int], Prepared]


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
    assert control.list_requests(conn, AWA, runtime) == {untold.entry_id, by_itself.entry_id}
    control.forget_requests(conn, AWA, runtime, [untold.entry_id, by_itself.entry_id])
    assert scalar(conn, REQUESTS) == 2, "an open attempt's request must be found by whatever ends it"
    assert settle(conn, runtime, [untold]) == []
    complete(conn, by_itself)
    assert [state(conn, job) for job in ids] == ["completed"] * 3
    control.forget_requests(conn, AWA, runtime + 1, [untold.entry_id, by_itself.entry_id])
    assert scalar(conn, REQUESTS) == 2
    control.forget_requests(conn, AWA, runtime, [untold.entry_id])
    assert control.list_requests(conn, AWA, runtime) == {by_itself.entry_id}
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
