"""Completing an attempt inside a handler's own transaction, at every isolation level.

Each docstring names the guard of the engine that the test fails without.
"""

from __future__ import annotations

from dataclasses import replace

import psycopg
import pytest

from awa.errors import StaleAttempt
from awa.storage import jobs
from tests.storage.engine import (
    AWA,
    Background,
    Conn,
    Member,
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

every_isolation = pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])


@pytest.fixture
def member(conn: Conn) -> Member:
    """An open attempt."""
    runtime = register(conn)
    insert(conn, 1)
    return claim(conn, runtime).members[0]


def kill(conn: Conn, runtime: int) -> None:
    fall_silent(conn, runtime)
    assert fence(conn, runtime) is True


@every_isolation
def test_the_attempt_completes_with_the_transaction(conn: Conn, other: Conn, member: Member, isolation: str) -> None:
    other.execute("CREATE TABLE effects (id bigint)")
    with transaction(other, isolation):
        other.execute("INSERT INTO effects VALUES (%s)", (member.id,))
        complete(other, member)
        assert state(conn, member.id) == "running"
        other.execute("COMMIT")
    assert state(conn, member.id) == "completed"
    assert scalar(conn, "SELECT count(*) FROM effects") == 1


@every_isolation
def test_the_attempt_is_open_again_when_the_transaction_rolls_back(
    conn: Conn, other: Conn, member: Member, isolation: str
) -> None:
    with transaction(other, isolation):
        complete(other, member)
        other.execute("ROLLBACK")
    assert state(conn, member.id) == "running"
    assert settle(conn, member.runtime, others=[Outcome(member, "completed")]) == []
    assert state(conn, member.id) == "completed"


@every_isolation
def test_a_second_completion_is_refused(conn: Conn, other: Conn, member: Member, isolation: str) -> None:
    """Guard: the unique key of attempt_ends, by a plain INSERT; with ON CONFLICT it is not told so: tried."""
    complete(conn, member)
    with transaction(other, isolation), pytest.raises(psycopg.errors.UniqueViolation) as caught:
        complete(other, member)
    assert caught.value.diag.table_name == f"attempt_ends_{member.slot}"


@every_isolation
def test_a_second_completion_waits_for_the_first_and_is_refused(
    conn: Conn, other: Conn, third: Conn, member: Member, isolation: str
) -> None:
    """Guard: a unique key ignores snapshots, so it fences a transaction that began before the other committed."""
    with transaction(other, isolation), transaction(third, isolation):
        scalar(third, "SELECT count(*) FROM awa.jobs")
        complete(other, member)
        second = Background(lambda: complete(third, member))
        wait_for_lock(conn, third)
        other.execute("COMMIT")
        # at SERIALIZABLE the server may see the conflict of the two transactions first
        expected = (psycopg.errors.UniqueViolation,)
        with pytest.raises(
            (*expected, psycopg.errors.SerializationFailure) if isolation == "SERIALIZABLE" else expected
        ):
            second.result()
    assert scalar(conn, "SELECT count(*) FROM awa.attempt_ends") == 1


@every_isolation
def test_a_completion_after_the_rescue_is_refused(conn: Conn, other: Conn, member: Member, isolation: str) -> None:
    """Guard: the unique key of attempt_ends, which rescue writes too; also under a snapshot from before the rescue."""
    with transaction(other, isolation):
        scalar(other, "SELECT count(*) FROM awa.jobs")
        kill(conn, member.runtime)
        assert rescue(conn, member.runtime) == (1, 1, 0)
        with pytest.raises(psycopg.errors.UniqueViolation):
            complete(other, member)
    [again] = claim(conn, register(conn)).members
    assert (again.id, again.attempt) == (member.id, 2)


@every_isolation
def test_a_rescue_after_the_completion_changes_nothing(conn: Conn, other: Conn, member: Member, isolation: str) -> None:
    """Guard: rescue reads the ends of members."""
    with transaction(other, isolation):
        complete(other, member)
        other.execute("COMMIT")
    kill(conn, member.runtime)
    assert rescue(conn, member.runtime) == (0, 0, 0)
    assert state(conn, member.id) == "completed"


@every_isolation
def test_a_fenced_runtime_completes_what_was_not_taken_back(
    conn: Conn, other: Conn, member: Member, isolation: str
) -> None:
    """A completion takes no advisory lock and asks for no fence: whichever end comes first stands."""
    with transaction(other, isolation):
        complete(other, member)
        kill(conn, member.runtime)
        assert rescue(conn, member.runtime) == (1, 0, 1)
        other.execute("COMMIT")
    assert rescue(conn, member.runtime) == (0, 0, 0)
    assert state(conn, member.id) == "completed"


@every_isolation
def test_an_attempt_of_a_forgotten_claim_is_refused(conn: Conn, other: Conn, member: Member, isolation: str) -> None:
    """Guard: the nonce; the entry of a forgotten claim is claimed again under the same id.

    Without it the old attempt completes the new one: tried, also after a real crash.
    """
    conn.execute("DELETE FROM awa.claims")
    conn.execute("SELECT setval('awa.claim_id_seq', %s, false)", (member.claim_id,))
    [successor] = claim(conn, member.runtime).members
    assert (successor.claim_id, successor.entry_id) == (member.claim_id, member.entry_id)
    with transaction(other, isolation), pytest.raises(psycopg.Error) as caught:
        complete(other, member)
    assert caught.value.sqlstate == "AWA04"
    complete(other, successor)


def test_an_attempt_that_is_not_this_runtimes_is_refused(conn: Conn, member: Member) -> None:
    """Guard: AWA04 for each part of the attempt's name: runtime, claim, slot, position."""
    for wrong in (
        replace(member, runtime=member.runtime + 1),
        replace(member, claim_id=member.claim_id + 1),
        replace(member, slot=member.slot + 1),
        replace(member, idx=2),
        replace(member, idx=0),
    ):
        with pytest.raises(psycopg.Error) as caught:
            complete(conn, wrong)
        assert caught.value.sqlstate == "AWA04"
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="slot 8 does not exist"):
        complete(conn, replace(member, slot=8))
    assert state(conn, member.id) == "running"


def test_a_transaction_that_is_older_than_the_claim_cannot_complete_it(conn: Conn, other: Conn) -> None:
    """Its snapshot does not show the claim; the attempt stays open."""
    runtime = register(conn)
    insert(conn, 1)
    with transaction(other, "REPEATABLE READ"):
        scalar(other, "SELECT count(*) FROM awa.jobs")
        [member] = claim(conn, runtime).members
        with pytest.raises(psycopg.Error) as caught:
            complete(other, member)
    assert caught.value.sqlstate == "AWA04"
    assert settle(conn, runtime, [member]) == []


def test_a_serialization_failure_passes_as_what_it_is(conn: Conn, other: Conn, member: Member) -> None:
    """A conflict of the handler's own rows, on the way to the commit of its completion."""
    conn.execute("CREATE TABLE effects (id bigint, n integer)")
    conn.execute("INSERT INTO effects VALUES (1, 0)")
    with transaction(other, "REPEATABLE READ"):
        scalar(other, "SELECT n FROM effects")
        complete(other, member)
        conn.execute("UPDATE effects SET n = 1")
        with pytest.raises(psycopg.errors.SerializationFailure):
            other.execute("UPDATE effects SET n = 2")
    assert state(conn, member.id) == "running"


def test_serializable_handlers_that_share_nothing_all_complete(conn: Conn, other: Conn, third: Conn) -> None:
    """Completions of one claim in concurrent transactions do not make each other fail at that level."""
    runtime = register(conn)
    ids = insert(conn, 1, 2)
    first, second = claim(conn, runtime).members
    with transaction(other, "SERIALIZABLE"), transaction(third, "SERIALIZABLE"):
        complete(other, first)
        complete(third, second)
        other.execute("COMMIT")
        third.execute("COMMIT")
    assert [state(conn, job) for job in ids] == ["completed", "completed"]


def test_no_advisory_lock_and_no_other_segment_is_locked(conn: Conn, other: Conn) -> None:
    """Guard: complete_v1 names its partition; a plan over all holds them all until the caller commits: tried."""
    runtime = register(conn)
    conn.execute("SELECT setval('awa.ring_seq', 5)")
    insert(conn, *range(10))
    members = claim(conn, runtime).members
    with transaction(other):
        for member in members:  # more often than a plan stays a custom one
            complete(other, member)
        locked = conn.execute(
            "SELECT DISTINCT l.locktype, coalesce(i.indrelid, l.relation)::regclass::text"
            "  FROM pg_locks l LEFT JOIN pg_index i ON i.indexrelid = l.relation"
            " WHERE l.pid = %s AND l.locktype IN ('relation', 'advisory', 'tuple')",
            (other.info.backend_pid,),
        ).fetchall()
        assert {name for _, name in locked} - {"awa.attempt_ends"} == {
            "awa.attempt_ends_5",
            "awa.claims_5",
            "awa.jobs_5",
        }
        assert {kind for kind, _ in locked} == {"relation"}
        # what prune does to a segment that nothing of this transaction lies in
        conn.execute("SET lock_timeout = '1s'")
        for slot in (0, 1, 2, 3, 4, 6, 7):
            conn.execute(
                f"TRUNCATE awa.jobs_{slot}, awa.claims_{slot}, awa.completions_{slot}, awa.attempt_ends_{slot}"
            )
        with pytest.raises(psycopg.errors.LockNotAvailable):
            conn.execute("TRUNCATE awa.jobs_5")
        other.execute("COMMIT")


def test_an_insert_locks_only_the_current_segment(conn: Conn, other: Conn) -> None:
    """Guard: a producer's statement, in a transaction of any length, routes to one partition."""
    with transaction(other):
        for n in range(10):
            insert(other, n)
        conn.execute("SET lock_timeout = '1s'")
        for slot in range(1, 8):
            conn.execute(f"TRUNCATE awa.jobs_{slot}")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            conn.execute("TRUNCATE awa.jobs_0")


# As Python says it


def library_complete(conn: Conn, member: Member) -> None:
    jobs.complete(
        conn,
        AWA,
        runtime=member.runtime,
        claim_id=member.claim_id,
        slot=member.slot,
        nonce=member.nonce,
        idx=member.idx,
        elapsed_ms=3,
        result=None,
        notify=True,
        job_id=member.id,
        entry_id=member.entry_id,
    )


def test_a_stale_attempt_raises_ours(conn: Conn, member: Member) -> None:
    """Guard: 23505 on attempt_ends and AWA04 become StaleAttempt, and nothing else does."""
    with pytest.raises(StaleAttempt) as caught:
        library_complete(conn, replace(member, nonce=member.nonce + 1))
    assert (caught.value.job_id, caught.value.entry_id) == (member.id, member.entry_id)
    library_complete(conn, member)
    assert scalar(conn, "SELECT elapsed_ms FROM awa.attempt_ends") == 3
    with pytest.raises(StaleAttempt):
        library_complete(conn, member)


def test_other_errors_pass_as_what_they_are(conn: Conn, other: Conn, member: Member) -> None:
    with transaction(other):
        with pytest.raises(psycopg.errors.DivisionByZero):
            other.execute("SELECT 1 / 0")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            library_complete(other, member)
    with transaction(other):
        complete(other, member)
        conn.execute("SET lock_timeout = '20ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            library_complete(conn, member)
