"""What follows from an outcome, in the transaction that records it: follow-ups, free keys, waiters that are woken.

Each docstring names the guard of the engine that the test fails without.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from tests.storage.engine import (
    Background,
    Conn,
    Member,
    Outcome,
    cancel,
    claim,
    complete,
    expire,
    fall_silent,
    fence,
    register,
    rescue,
    scalar,
    settle,
    state,
    transaction,
)

KEY = bytes(range(16))

FOLLOWING = {
    outcome: [{"kind": f"after_{outcome}", "queue": "next", "args": {"n": 1}}]
    for outcome in ("completed", "failed", "cancelled")
}
"""One job after each outcome."""

WAITING_AND_RUNNING, FAILED = 31, 64


def bound(
    conn: Conn,
    follow_ups: dict[str, Any] | str | None = None,
    *,
    key: bytes | None = None,
    max_attempts: int = 25,
    queue: str = "q",
) -> int:
    """A new job, by plain SQL, with what is to follow it and a unique key."""
    text = json.dumps(follow_ups) if isinstance(follow_ups, dict) else follow_ups
    job = scalar(
        conn,
        "INSERT INTO awa.jobs (queue, kind, max_attempts, follow_ups, unique_key)"
        " VALUES (%s, 'noop', %s, %s, %s) RETURNING id",
        queue,
        max_attempts,
        text,
        key,
    )
    if key is not None:
        conn.execute("INSERT INTO awa.job_uniques (key, id) VALUES (%s, %s)", (key[:16], job))
    return int(job)


def followed(conn: Conn) -> list[tuple[str, Any]]:
    """Kind and parent of what was appended to the queue ``next``."""
    rows = conn.execute(
        "SELECT kind, follow_ups->>'of' FROM (SELECT id, kind, follow_ups, queue FROM awa.jobs"
        " UNION ALL SELECT id, kind, follow_ups, queue FROM awa.waiting_jobs) t WHERE queue = 'next' ORDER BY id"
    ).fetchall()
    return [(kind, int(parent)) for kind, parent in rows]


def holders(conn: Conn) -> list[int]:
    return [row[0] for row in conn.execute("SELECT id FROM awa.job_uniques ORDER BY id").fetchall()]


def the_only(conn: Conn, runtime: int) -> Member:
    [member] = claim(conn, runtime).members
    return member


# Every way to end


def by_success(conn: Conn, runtime: int, job: int) -> None:
    """Grouped with others, as every worker of every version sends it."""
    assert settle(conn, runtime, [the_only(conn, runtime)]) == []


def by_its_own_row(conn: Conn, runtime: int, job: int) -> None:
    assert settle(conn, runtime, others=[Outcome(the_only(conn, runtime), "completed")]) == []


def by_its_handler(conn: Conn, runtime: int, job: int) -> None:
    complete(conn, the_only(conn, runtime))


def by_failing(conn: Conn, runtime: int, job: int) -> None:
    assert settle(conn, runtime, others=[Outcome(the_only(conn, runtime), "failed")]) == []


def by_its_last_attempt(conn: Conn, runtime: int, job: int) -> None:
    assert settle(conn, runtime, others=[Outcome(the_only(conn, runtime), "retried")]) == []
    assert settle(conn, runtime, others=[Outcome(the_only(conn, runtime), "retried")]) == []


def by_cancelling_itself(conn: Conn, runtime: int, job: int) -> None:
    assert settle(conn, runtime, others=[Outcome(the_only(conn, runtime), "cancelled")]) == []


def by_rescue(conn: Conn, runtime: int, job: int) -> None:
    settle(conn, runtime, others=[Outcome(the_only(conn, runtime), "retried")])
    the_only(conn, runtime)
    fall_silent(conn, runtime)
    assert fence(conn, runtime)
    assert rescue(conn, runtime) == (1, 1, 0)
    assert rescue(conn, runtime) == (0, 0, 0)


def by_deadline(conn: Conn, runtime: int, job: int) -> None:
    settle(conn, runtime, others=[Outcome(the_only(conn, runtime), "retried")])
    the_only(conn, runtime)
    conn.execute("UPDATE awa.runtime_instances SET timeout_ms = 1")
    conn.execute("UPDATE awa.claims SET claimed_at = claimed_at - interval '1 min'")
    assert expire(conn, runtime) == (1, 0)


def by_force(conn: Conn, runtime: int, job: int) -> None:
    the_only(conn, runtime)
    assert cancel(conn, job, force=True) == ("cancelled", "cancelled")


def by_request(conn: Conn, runtime: int, job: int) -> None:
    member = the_only(conn, runtime)
    assert cancel(conn, job) == ("requested", "running")
    assert settle(conn, runtime, others=[Outcome(member, "retried")]) == []


def while_it_waits(conn: Conn, runtime: int, job: int) -> None:
    settle(conn, runtime, others=[Outcome(the_only(conn, runtime), "snoozed", 60.0)])
    assert cancel(conn, job) == ("cancelled", "cancelled")


def while_it_is_available(conn: Conn, runtime: int, job: int) -> None:
    assert cancel(conn, job) == ("cancelled", "cancelled")


Way = Callable[[Conn, int, int], None]

WAYS: list[tuple[Way, str]] = [
    (by_success, "completed"),
    (by_its_own_row, "completed"),
    (by_its_handler, "completed"),
    (by_failing, "failed"),
    (by_its_last_attempt, "failed"),
    (by_rescue, "failed"),
    (by_deadline, "failed"),
    (by_cancelling_itself, "cancelled"),
    (by_force, "cancelled"),
    (by_request, "cancelled"),
    (while_it_waits, "cancelled"),
    (while_it_is_available, "cancelled"),
]


@pytest.mark.parametrize(("way", "outcome"), WAYS, ids=lambda value: getattr(value, "__name__", value))
def test_an_end_has_its_consequences_once(conn: Conn, third: Conn, way: Way, outcome: str) -> None:
    """Guard: awa.conclude in end_attempts and in cancel_v1, awa.append_follow_ups in complete_v2.

    Follow-ups of that outcome alone, and none of an attempt that is followed by another; the key is free when the state
    is none of its; who waits is told, except by a handler's own transaction, which takes no lock and leaves keys alone.
    """
    runtime = register(conn)
    job = bound(conn, FOLLOWING, key=KEY + bytes([WAITING_AND_RUNNING]), max_attempts=2)
    third.execute(f"LISTEN {scalar(third, 'SELECT awa.result_channel()')}")
    third.execute("SELECT pg_advisory_lock_shared(hashtextextended('awa.result:' || %s, 0))", (job,))
    way(conn, runtime, job)
    assert state(conn, job) == outcome
    assert followed(conn) == [(f"after_{outcome}", job)]
    is_lent = way is by_its_handler
    assert holders(conn) == ([job] if is_lent else [])
    assert [n.payload for n in third.notifies(timeout=0.2, stop_after=1)] == ([] if is_lent else [str(job)])
    [child] = claim(conn, register(conn), queue="next").members
    assert (child.kind, child.args, child.attempt) == (f"after_{outcome}", '{"n": 1}', 1)


@pytest.mark.parametrize(
    ("key", "held"),
    [(KEY, {"completed"}), (KEY + bytes([WAITING_AND_RUNNING | FAILED]), {"failed"}), (KEY + b"\xff", {*FOLLOWING})],
)
@pytest.mark.parametrize(("way", "outcome"), [WAYS[0], WAYS[3], WAYS[8]])
def test_a_key_is_kept_in_its_states(conn: Conn, key: bytes, held: set[str], way: Way, outcome: str) -> None:
    """Guard: the mask in conclude; without a 17th byte all but failed and cancelled jobs hold a key."""
    job = bound(conn, key=key)
    conn.execute("INSERT INTO awa.job_uniques (key, id) VALUES (%s, 1000)", (bytes(16),))
    way(conn, register(conn), job)
    assert holders(conn) == ([job, 1000] if outcome in held else [1000])


def test_a_key_that_somebody_looks_at_is_left_and_one_that_was_taken_over_stays(conn: Conn, other: Conn) -> None:
    """Guard: SKIP LOCKED, or the worker would wait for who inserts, for as long as that one likes; and id = job."""
    runtime = register(conn)
    bound(conn, key=KEY)
    taken = bound(conn, key=bytes(16))
    conn.execute("UPDATE awa.job_uniques SET id = 1000 WHERE id = %s", (taken,))
    with transaction(other):
        other.execute("SELECT FROM awa.job_uniques WHERE key = %s FOR UPDATE", (KEY,))
        members = claim(conn, runtime).members
        assert settle(conn, runtime, others=[Outcome(member, "failed") for member in members]) == []
    assert len(holders(conn)) == 2


# Plain successes and others in one claim


def test_a_claim_of_plain_jobs_and_others_is_settled_as_one_flush(conn: Conn) -> None:
    """Guard: the claim's singles; grouped as they come, those with consequences would have none: tried.

    A worker of before sends successes grouped. A repeated flush is refused when it completed plain jobs, and silent
    when it did not: either way nothing follows twice.
    """
    runtime = register(conn)
    plain = [bound(conn) for _ in range(3)]
    parents = [bound(conn, FOLLOWING), bound(conn, {"failed": FOLLOWING["failed"]}), bound(conn, {"of": 1})]
    keyed = bound(conn, key=KEY + bytes([WAITING_AND_RUNNING]))
    held = bound(conn, key=bytes(16))
    members = claim(conn, runtime).members
    assert scalar(conn, "SELECT singles FROM awa.claims") == [4, 7]
    assert settle(conn, runtime, members, flush=1) == []
    assert {state(conn, job) for job in [*plain, *parents, keyed, held]} == {"completed"}
    assert scalar(conn, "SELECT idx FROM awa.completions") == [1, 2, 3, 5, 6, 8]
    with pytest.raises(psycopg.errors.UniqueViolation):
        settle(conn, runtime, members, flush=1)
    assert settle(conn, runtime, [members[3]], flush=1) == []
    assert settle(conn, runtime, [members[3]], flush=2) == [members[3].place]
    assert settle(conn, runtime, others=[Outcome(members[3], "completed")], flush=2) == [members[3].place]
    assert followed(conn) == [("after_completed", parents[0])]
    assert holders(conn) == [held]
    # a success that comes when the job is somebody else's
    bound(conn, FOLLOWING)
    member = the_only(conn, runtime)
    fall_silent(conn, runtime)
    assert fence(conn, runtime)
    assert rescue(conn, runtime) == (1, 1, 0)
    with pytest.raises(psycopg.Error, match="is gone"):
        settle(conn, runtime, [member])
    assert len(followed(conn)) == 1


def test_a_rescue_and_a_late_settle_follow_once(conn: Conn, other: Conn) -> None:
    """Guard: only who writes the end appends what follows, by the unique key of attempt_ends.

    The handler's transaction holds its end uncommitted. The worker's record waits for it, on the key; after the commit
    it finds it there in a later snapshot and inserts nothing, so `done` has no row and nothing follows twice.
    """
    runtime = register(conn)
    job = bound(conn, FOLLOWING)
    member = the_only(conn, runtime)
    with transaction(other):
        complete(other, member)
        late = Background(lambda: settle(conn, runtime, others=[Outcome(member, "failed")]))
        with pytest.raises(psycopg.errors.LockNotAvailable):
            late.result()
        other.execute("COMMIT")
    assert settle(conn, runtime, others=[Outcome(member, "failed")]) == [member.place]
    assert followed(conn) == [("after_completed", job)]
    assert state(conn, job) == "completed"


# In a handler's own transaction

every_isolation = pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])


@every_isolation
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_handlers_transaction_carries_follow_ups_and_result(
    conn: Conn, other: Conn, isolation: str, version: str
) -> None:
    """Guard: complete_v2 appends them itself, and workers of before, which call complete_v1, reach it."""
    runtime = register(conn)
    job = bound(conn, FOLLOWING)
    member = the_only(conn, runtime)

    def finish() -> None:
        if version == "v1":
            complete(other, member)
            return
        other.execute(
            "SELECT awa.complete_v2(%s::bigint, %s::bigint, %s::smallint, %s::integer, %s::smallint, 1, '[1]')",
            (member.runtime, member.claim_id, member.slot, member.nonce, member.idx),
        )

    with transaction(other, isolation):
        finish()
        other.execute("ROLLBACK")
    assert (followed(conn), state(conn, job)) == ([], "running")
    with transaction(other, isolation):
        finish()
        assert followed(conn) == []
        other.execute("COMMIT")
    assert (followed(conn), state(conn, job)) == ([("after_completed", job)], "completed")
    assert scalar(conn, "SELECT result FROM awa.outcome_v1(ARRAY[%s::bigint])", job) == (
        None if version == "v1" else [1]
    )


def test_follow_ups_of_a_lent_transaction_lock_the_current_segment_only(conn: Conn, other: Conn) -> None:
    """Guard: they are inserted, which goes to one partition; nothing is read through the partitioned tables."""
    runtime = register(conn)
    for _ in range(7):
        bound(conn, FOLLOWING)
    members = claim(conn, runtime).members
    conn.execute("SELECT setval('awa.ring_seq', 3)")
    with transaction(other):
        for member in members:
            complete(other, member)
        conn.execute("SET lock_timeout = '1s'")
        for slot in (1, 2, 4, 5, 6, 7):
            conn.execute(
                f"TRUNCATE awa.jobs_{slot}, awa.claims_{slot}, awa.completions_{slot}, awa.attempt_ends_{slot}"
            )
        other.execute("COMMIT")
    assert len(followed(conn)) == 7


def test_a_lent_transaction_notifies_nobody_when_it_must_not(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: p_notify; a transaction that has notified cannot be prepared."""
    runtime = register(conn)
    bound(conn, FOLLOWING)
    member = the_only(conn, runtime)
    third.execute(f"LISTEN {scalar(third, 'SELECT awa.channel()')}")
    third.execute("SELECT pg_advisory_lock(hashtextextended('awa.bell:next', 0))")
    other.execute(
        "SELECT awa.complete_v2(%s::bigint, %s::bigint, %s::smallint, %s::integer, %s::smallint, 1, NULL, false)",
        (member.runtime, member.claim_id, member.slot, member.nonce, member.idx),
    )
    bound(conn, FOLLOWING)
    assert [n.payload for n in third.notifies(timeout=0.1, stop_after=1)] == []
    complete(conn, the_only(conn, runtime))
    assert [n.payload for n in third.notifies(timeout=5, stop_after=1)] == ["next"]


# What follows


def test_a_follow_up_is_stored_as_an_insert_would(conn: Conn) -> None:
    """Guard: json all the way, which keeps the text of args; clock_timestamp in append_follow_ups for a delay."""
    args = '{"b":1.10,"a":"\\u00e9 \\"x\\"","b":[1, 2 ],"c":12345678901234567890}'
    follow_ups = (
        '{"completed":[{"kind":"one","queue":"next","args":'
        + args
        + ',"priority":1,"max_attempts":3,"timeout_ms":1500,'
        '"tags":["a","b\\"c"],"metadata":{"x": 1.0},"follow_ups":{"failed":[{"kind":"two","queue":"next"}]}},'
        '{"kind":"later","queue":"next","delay":60},'
        '{"kind":"then","queue":"next","run_at":"2100-01-01T00:00:00+00:00"},'
        '{"kind":"past","queue":"next","run_at":"2000-01-01T00:00:00+00:00"}]}'
    )
    runtime = register(conn)
    parent = bound(conn, follow_ups)
    assert settle(conn, runtime, [the_only(conn, runtime)]) == []
    assert followed(conn) == [("one", parent), ("later", parent), ("then", parent), ("past", parent)]
    row = conn.execute(
        "SELECT id, args::text, lane, priority, max_attempts, timeout_ms, tags, metadata::text, created_at, attempt,"
        "       id = entry_id FROM awa.jobs WHERE kind = 'one'"
    ).fetchone()
    assert row is not None
    assert row[1:] == (args, 3, 1, 3, 1500, ["a", 'b"c'], '{"x": 1.0}', None, 1, True)
    waits = conn.execute(
        "SELECT kind, run_at - now() < interval '61 s', state FROM awa.waiting_jobs ORDER BY id"
    ).fetchall()
    assert waits == [("later", True, "scheduled"), ("then", False, "scheduled")]
    members = claim(conn, runtime, queue="next").members
    assert [member.kind for member in members] == ["one", "past"]
    assert settle(conn, runtime, others=[Outcome(members[0], "failed")]) == []
    assert followed(conn)[-1] == ("two", row[0])


NONSENSE = [
    '{"completed": 1}',
    '{"completed": {"kind": "x"}}',
    '{"completed": [1]}',
    '{"completed": ["x"]}',
    '{"completed": [{}]}',
    '{"completed": [{"kind": "x", "priority": 5}]}',
    '{"completed": [{"kind": "x", "priority": "high"}]}',
    '{"completed": [{"kind": "x", "queue": ""}]}',
    '{"completed": [{"kind": "x", "max_attempts": 0}]}',
    '{"completed": [{"kind": "x", "timeout_ms": 99999999999}]}',
    '{"completed": [{"kind": "x", "delay": 1e300}]}',
    '{"completed": [{"kind": "x", "run_at": "infinity"}]}',
    '{"completed": [{"kind": "x", "run_at": "noon"}]}',
    '{"completed": [{"kind": "x", "tags": "a"}]}',
    '{"completed": [{"kind": "x", "args": {"a": "\\u0000"}}]}',
    '{"completed": [{"kind": "\\ud800"}]}',
    '"completed"',
    '["completed"]',
]


@pytest.mark.parametrize("outcome", ["completed", "failed", "cancelled"])
def test_nonsense_keeps_no_attempt_from_ending(conn: Conn, outcome: str) -> None:
    """Guard: follow_ups_after, which never raises; without it the whole flush fails, and its jobs are never done.

    The claim meets such rows too: it looks at the text only.
    """
    runtime = register(conn)
    odd = [bound(conn, text.replace('"completed"', f'"{outcome}"')) for text in NONSENSE]
    good = bound(conn, FOLLOWING)
    members = claim(conn, runtime).members
    assert len(members) == len(odd) + 1
    if outcome == "completed":
        assert settle(conn, runtime, members) == []
    elif outcome == "failed":
        error = {"type": "E", "text": "broken", "traceback": "tb"}
        assert settle(conn, runtime, others=[Outcome(member, "failed", error=error) for member in members]) == []
    else:
        settle(conn, runtime, others=[Outcome(member, "released") for member in members])
        assert {cancel(conn, job) for job in [*odd, good]} == {("cancelled", "cancelled")}
    assert {state(conn, job) for job in odd} == {outcome}
    assert followed(conn) == [(f"after_{outcome}", good)]
    errors = [scalar(conn, "SELECT error FROM awa.find_job_v2(%s)", job) for job in odd]
    lost = [error["text"] for error in errors if error and "its follow-ups were not inserted: " in error["text"]]
    # the last two name the outcome, yet hold nothing that is to follow it
    assert len(lost) == len(NONSENSE) - 2
    assert f"{outcome}[0] has a priority that is not 1 to 4" in "\n".join(lost)
    if outcome == "failed":
        assert all(error["type"] == "E" and error["text"].startswith("broken") for error in errors)
        assert errors[0]["traceback"] == "tb"


# Waiting


def test_an_end_that_comes_between_the_lock_and_the_look_is_found_by_a_later_look(
    conn: Conn, other: Conn, third: Conn
) -> None:
    """The race of a notification, step by step.

    The ender finds the lock free, since nobody waits yet, and has not committed. The waiter locks and looks: its
    snapshot does not show the end. So the commit tells nobody, and the waiter must look again. Had the waiter locked
    first, the ender would find the lock taken: that end is notified, when it is committed and not before.
    """
    runtime = register(conn)
    first, second = bound(conn, FOLLOWING), bound(conn, FOLLOWING)
    members = claim(conn, runtime).members
    look = "SELECT state FROM awa.outcome_v1(ARRAY[%s::bigint])"
    third.execute("SET lock_timeout = '5s'")  # who ends a job holds its lock for a moment only
    third.execute(f"LISTEN {scalar(third, 'SELECT awa.result_channel()')}")
    with transaction(other):
        settle(other, runtime, [members[0]])
        third.execute("SELECT pg_advisory_lock_shared(hashtextextended('awa.result:' || %s, 0))", (first,))
        assert third.execute(look, (first,)).fetchone() is None
        other.execute("COMMIT")
    assert list(third.notifies(timeout=0.1)) == []
    assert scalar(third, look, first) == "completed"
    third.execute("SELECT pg_advisory_lock_shared(hashtextextended('awa.result:' || %s, 0))", (second,))
    with transaction(other):
        settle(other, runtime, [members[1]])
        assert list(third.notifies(timeout=0.1)) == []
        other.execute("COMMIT")
    assert [n.payload for n in third.notifies(timeout=5, stop_after=1)] == [str(second)]
    assert scalar(third, look, second) == "completed"
    # nobody holds a lock for it but the waiter
    assert scalar(conn, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 2


def test_what_a_handler_completed_itself_is_told_with_the_workers_record(conn: Conn, third: Conn) -> None:
    """Guard: settle_v1 wakes for a refused outcome of a completed attempt."""
    runtime = register(conn)
    job = bound(conn)
    member = the_only(conn, runtime)
    third.execute(f"LISTEN {scalar(third, 'SELECT awa.result_channel()')}")
    third.execute("SELECT pg_advisory_lock_shared(hashtextextended('awa.result:' || %s, 0))", (job,))
    complete(conn, member)
    assert settle(conn, runtime, others=[Outcome(member, "completed")]) == [member.place]
    assert [n.payload for n in third.notifies(timeout=5, stop_after=1)] == [str(job)]


def test_a_look_tells_what_waits_and_what_ended_with_a_row_of_its_own(conn: Conn) -> None:
    runtime = register(conn)
    kept, failed, later, running, grouped = (bound(conn) for _ in range(5))
    members = claim(conn, runtime).members
    [*_, available] = kept, bound(conn)
    settle(
        conn,
        runtime,
        [members[4]],
        [
            Outcome(members[0], "completed", error={"value": "x"}),
            Outcome(members[1], "failed", error={"type": "T", "text": "t", "traceback": ""}),
            Outcome(members[2], "snoozed", 60.0),
        ],
    )
    ids = [kept, failed, later, running, grouped, available, 10**12]
    found = conn.execute("SELECT * FROM awa.outcome_v1(%s::bigint[])", (ids,)).fetchall()
    assert found == [
        (kept, "completed", {"value": "x"}, None),
        (failed, "failed", None, {"type": "T", "text": "t", "traceback": ""}),
        (later, "scheduled", None, None),
    ]
