"""Limits: how many attempts run at once, how many start in a while, and who waits for whose key.

Each docstring names the rule that the test fails without.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.storage.engine import (
    ARMED,
    BUSY,
    COME_AGAIN,
    FULL,
    PAUSED,
    Claimed,
    Conn,
    Member,
    Outcome,
    cancel,
    claim,
    complete,
    fall_silent,
    fence,
    insert,
    promote,
    register,
    rescue,
    scalar,
    settle,
    state,
    transaction,
)


def limit(conn: Conn, queue: str = "q", **limits: Any) -> None:
    """What holds for *queue* from now on, as an operator's word makes it."""
    columns = ["max_running", "rate", "burst", "max_running_per_key"]
    values = [limits.get(column) for column in columns]
    with transaction(conn):
        conn.execute("SELECT pg_advisory_xact_lock(hashtextextended('awa.queue:' || %s, 0))", (queue,))
        conn.execute(
            "INSERT INTO awa.queue_meta (queue, max_running, rate, burst, max_running_per_key)"
            " VALUES (%s, %s, %s, %s, %s)"
            " ON CONFLICT (queue) DO UPDATE SET max_running = excluded.max_running, rate = excluded.rate,"
            " burst = excluded.burst, max_running_per_key = excluded.max_running_per_key",
            (queue, *values),
        )
        conn.execute("SELECT awa.limits_changed(%s)", (queue,))
        conn.execute("COMMIT")


def take(conn: Conn, runtime: int, *, limit: int = 100, kinds: list[str] | None = None, queue: str = "q") -> Claimed:
    """Claim, and again at once while the claims say so."""
    found = Claimed()
    for _ in range(50):
        claimed = claim(conn, runtime, limit=limit - len(found.members), kinds=kinds, queue=queue)
        found.members += claimed.members
        if not claimed.flags & COME_AGAIN or len(found.members) >= limit:
            return found
    raise AssertionError("claims say 'come again' for ever")


def waits(conn: Conn) -> list[tuple[str, str, int]]:
    """What each job that is set aside waits for, first come first."""
    return [
        (row[0], row[1], row[2])
        for row in conn.execute(
            "SELECT waits_for, wait_key, (args->>'n')::integer FROM awa.waiting_jobs"
            " WHERE waits_for IN ('key', 'order') ORDER BY seq"
        )
    ]


def grants(conn: Conn) -> Counter[tuple[str, str]]:
    """How many rows each key has."""
    return Counter((row[0], row[1]) for row in conn.execute("SELECT scope, key FROM awa.grants"))


def one(conn: Conn, runtime: int, **options: Any) -> Member:
    claimed = take(conn, runtime, limit=1, **options)
    (member,) = claimed.members
    return member


# --- max_running


def test_no_more_attempts_are_open_than_max_running_whoever_claims(conn: Conn) -> None:
    """Rule: the claim subtracts what is open at all workers."""
    limit(conn, max_running=3)
    first, second = register(conn), register(conn)
    insert(conn, *range(10))
    a = claim(conn, first, limit=2)
    assert a.numbers == [0, 1]
    b = claim(conn, second, limit=5)
    assert b.numbers == [2]
    full = claim(conn, first)
    assert (full.members, full.flags, full.wait_ms) == ([], FULL, None)
    settle(conn, first, a.members[:1])
    settle(conn, second, others=[Outcome(b.members[0], "retried", 60.0)])
    assert claim(conn, second).numbers == [3, 4]
    assert claim(conn, second).flags == FULL


def test_what_ends_in_any_way_makes_room(conn: Conn, other: Conn) -> None:
    """Rule: the number of open attempts is derived from how they ended, so no way of ending one can be forgotten."""
    limit(conn, max_running=6)
    runtime, dead = register(conn), register(conn)
    insert(conn, *range(40))
    members = claim(conn, runtime, limit=4).members
    lost = claim(conn, dead).members
    assert len(lost) == 2
    assert claim(conn, runtime).flags == FULL
    settle(conn, runtime, [members[0]], [Outcome(members[1], "failed")])
    cancel(conn, members[2].id, force=True)
    with transaction(other):
        complete(other, members[3])
        other.execute("COMMIT")
    assert len(claim(conn, runtime).members) == 4
    fall_silent(conn, dead)
    assert fence(conn, dead)
    assert rescue(conn, dead)[1] == 2
    assert [len(claim(conn, runtime).members) for _ in range(2)] == [1, 1], "one at a time after a rescue"
    assert claim(conn, runtime).flags == FULL


def test_a_first_limit_counts_what_is_running_already(conn: Conn) -> None:
    """Rule: without a list of open claims they are looked up."""
    runtime, other = register(conn), register(conn)
    insert(conn, *range(10))
    running = claim(conn, runtime, limit=3).members
    settle(conn, runtime, running[:1])
    limit(conn, max_running=4)
    assert len(claim(conn, other).members) == 2
    limit(conn)
    more = claim(conn, other, limit=2).members
    limit(conn, max_running=5)
    assert claim(conn, other).flags == FULL
    settle(conn, other, more)
    assert len(claim(conn, other).members) == 1


def test_a_lower_limit_waits_until_enough_have_ended(conn: Conn) -> None:
    """Rule: less room than none is none."""
    runtime = register(conn)
    limit(conn, max_running=5)
    insert(conn, *range(10))
    running = claim(conn, runtime).members
    limit(conn, max_running=2)
    assert claim(conn, runtime).flags == FULL
    settle(conn, runtime, running[:3])
    assert claim(conn, runtime).flags == FULL
    settle(conn, runtime, running[3:4])
    assert len(claim(conn, runtime).members) == 1


def test_many_claims_of_one_attempt_are_counted_right(conn: Conn) -> None:
    """Rule: a list that is longer than one look is walked in turns, and nothing of it is dropped."""
    runtime = register(conn)
    limit(conn, max_running=160)
    insert(conn, *range(400))
    running = [claim(conn, runtime, limit=1).members[0] for _ in range(160)]
    assert claim(conn, runtime).flags == FULL
    settle(conn, runtime, running[155:])
    assert len(claim(conn, runtime, limit=10).members) == 5
    settle(conn, runtime, running[:60])
    assert len(claim(conn, runtime, limit=100).members) == 60
    assert claim(conn, runtime).flags == FULL


def test_the_limit_survives_the_emptying_of_the_segment_with_its_state(conn: Conn) -> None:
    """Rule: the checkpoint of a frontier carries the limits."""
    runtime = register(conn)
    limit(conn, max_running=2, rate=1000.0, burst=1000)
    insert(conn, 1, 2, 3)
    settle(conn, runtime, claim(conn, runtime, limit=1).members)
    scalar(conn, "SELECT awa.rotate_v1()")
    insert(conn, 4, 5, 6, 7)
    running = claim(conn, runtime).members
    assert len(running) == 2
    scalar(conn, "SELECT awa.rotate_v1()")
    settle(conn, runtime, running)
    settle(conn, runtime, claim(conn, runtime).members)
    before = scalar(conn, "SELECT limits::text FROM awa.claims ORDER BY claim_id DESC LIMIT 1")
    for slot in (0, 1):
        entries = scalar(conn, f"SELECT count(*) FROM awa.jobs_{slot}")
        file = scalar(conn, f"SELECT pg_relation_filenode('awa.jobs_{slot}')::bigint")
        scalar(conn, "SELECT awa.carry_v1(%s::smallint, 'q', 100)", slot)
        entries = scalar(conn, f"SELECT count(*) FROM awa.jobs_{slot}")
        assert scalar(conn, "SELECT awa.prune_v2(%s::smallint, %s, %s, '{}')", slot, entries, file) == "pruned"
    assert scalar(conn, "SELECT limits::text FROM awa.frontiers WHERE queue = 'q'") == before
    assert len(claim(conn, runtime).members) == 2


# --- pause


def test_a_paused_queue_gives_nothing_and_leaves_the_bell(conn: Conn, other: Conn) -> None:
    """Rule: a pause stands before all else, and inserts into a paused queue wake nobody."""
    runtime = register(conn)
    insert(conn, 1)
    conn.execute("INSERT INTO awa.queue_meta (queue, paused_at) VALUES ('q', now())")
    claimed = claim(conn, runtime, bell=True)
    assert (claimed.members, claimed.flags) == ([], PAUSED)
    assert scalar(other, "SELECT pg_try_advisory_lock(hashtextextended('awa.bell:q', 0))")
    other.execute("SELECT pg_advisory_unlock_all()")
    conn.execute("UPDATE awa.queue_meta SET paused_at = NULL")
    claimed = claim(conn, runtime, bell=True)
    assert (claimed.numbers, claimed.flags) == ([1], ARMED)


# --- rates


def test_a_rate_gives_its_burst_and_then_tells_when_to_come_again(conn: Conn) -> None:
    """Rule: tokens ride in the newest claim row, whoever claims."""
    first, second = register(conn), register(conn)
    limit(conn, rate=2.0, burst=5)
    insert(conn, *range(20))
    assert len(claim(conn, first, limit=3).members) == 3
    assert len(claim(conn, second).members) == 2
    empty = claim(conn, first)
    assert (empty.members, empty.flags) == ([], FULL)
    assert empty.wait_ms is not None
    assert 0 < empty.wait_ms <= 500


def test_tokens_come_back_with_time_and_no_more_than_the_burst(conn: Conn) -> None:
    """Rule: refilled by the time since the newest claim, up to the burst."""
    runtime = register(conn)
    limit(conn, rate=0.01, burst=4)
    insert(conn, *range(40))
    assert len(claim(conn, runtime).members) == 4

    def pass_time(seconds: float) -> None:
        conn.execute(
            "UPDATE awa.claims SET limits.tokens_at = (limits).tokens_at - %s * interval '1 s'"
            " WHERE claim_id = (SELECT max(claim_id) FROM awa.claims)",
            (seconds,),
        )

    pass_time(250.0)
    assert len(claim(conn, runtime).members) == 2
    pass_time(3.6e6)
    assert len(claim(conn, runtime).members) == 4
    limit(conn, rate=0.01, burst=2)
    pass_time(3.6e6)
    assert len(claim(conn, runtime).members) == 2
    assert claim(conn, runtime).flags == FULL
    pass_time(-3600.0)  # the clock was set back by an hour
    assert len(claim(conn, runtime).members) == 2


def test_a_rate_of_nearly_nothing_is_asked_again_in_days(conn: Conn) -> None:
    """Rule: the milliseconds fit the column, whatever plain SQL has set; else no claim came through any more."""
    runtime = register(conn)
    limit(conn, rate=1e-200, burst=1)
    insert(conn, 1, 2)
    assert claim(conn, runtime).numbers == [1]
    empty = claim(conn, runtime)
    assert (empty.flags, empty.wait_ms) == (FULL, 1_000_000_000)


def test_rate_and_max_running_hold_together(conn: Conn) -> None:
    """Rule: the smaller of the two."""
    runtime = register(conn)
    limit(conn, rate=1.0, burst=10, max_running=3)
    insert(conn, *range(40))
    running = claim(conn, runtime).members
    assert len(running) == 3
    settle(conn, runtime, running)
    assert len(claim(conn, runtime).members) == 3


# --- concurrency keys


def test_a_full_key_is_set_aside_and_handed_over_in_order(conn: Conn) -> None:
    """Rule: who cannot get the key waits behind all that wait for it, and the next claim after an end hands it over."""
    runtime = register(conn)
    limit(conn, max_running_per_key=1)
    insert(conn, 1, 2, 3, key="a")
    insert(conn, 4, key="b")
    insert(conn, 5)
    running = take(conn, runtime).members
    assert [member.args for member in running] == ['{"n" : 1}', '{"n" : 4}', '{"n" : 5}']
    assert waits(conn) == [("key", "a", 2), ("key", "a", 3)]
    assert take(conn, runtime).members == []
    settle(conn, runtime, running[:1])
    insert(conn, 6, key="a")
    second = take(conn, runtime)
    assert second.numbers == [2]
    assert waits(conn) == [("key", "a", 3), ("key", "a", 6)]
    settle(conn, runtime, others=[Outcome(second.members[0], "retried", 0.0)])
    third = take(conn, runtime)
    assert third.numbers == [3]
    settle(conn, runtime, third.members)
    fourth = take(conn, runtime)
    assert fourth.numbers == [6], "the retried one came after those that waited"
    settle(conn, runtime, fourth.members)
    last = take(conn, runtime)
    assert last.numbers == [2]
    settle(conn, runtime, [*last.members, *running[1:]])
    assert take(conn, runtime).members == []
    assert not grants(conn)


def test_a_key_has_as_many_attempts_as_its_limit(conn: Conn) -> None:
    """Rule: room is the limit without those that have the key, counted once within a claim and over claims."""
    first, second = register(conn), register(conn)
    limit(conn, max_running_per_key=3)
    insert(conn, *range(10), key="a")
    a = take(conn, first, limit=2)
    b = take(conn, second, limit=5)
    assert a.numbers + b.numbers == [0, 1, 2]
    assert take(conn, first).members == []
    settle(conn, first, a.members)
    c = take(conn, second)
    assert c.numbers == [3, 4]
    settle(conn, second, b.members + c.members)
    assert take(conn, first).numbers == [5, 6, 7]


def test_keys_that_nobody_wants_again_leave_no_rows(conn: Conn) -> None:
    """Rule: a claim removes the rows of ended attempts, waited for or not."""
    runtime = register(conn)
    limit(conn, max_running_per_key=1)
    for n in range(30):
        insert(conn, n, key=f"k{n}")
    settle(conn, runtime, take(conn, runtime).members)
    assert sum(grants(conn).values()) == 30
    take(conn, runtime)
    assert not grants(conn)


@pytest.mark.parametrize("how", ["complete", "fail", "force", "rescue", "release", "snooze"])
def test_a_key_is_free_however_the_attempt_ended(conn: Conn, other: Conn, how: str) -> None:
    """Rule: whether a holder has the key still is derived from its attempt."""
    runtime, dead = register(conn), register(conn)
    limit(conn, max_running_per_key=1)
    insert(conn, 1, 2, key="a")
    member = one(conn, dead)
    assert take(conn, runtime).members == []
    match how:
        case "complete":
            with transaction(other, "REPEATABLE READ"):
                complete(other, member)
                other.execute("COMMIT")
        case "fail":
            settle(conn, dead, others=[Outcome(member, "failed")])
        case "force":
            cancel(conn, member.id, force=True)
        case "rescue":
            fall_silent(conn, dead)
            assert fence(conn, dead)
            rescue(conn, dead)
        case "release":
            settle(conn, dead, others=[Outcome(member, "released")])
        case "snooze":
            settle(conn, dead, others=[Outcome(member, "snoozed", 60.0)])
    assert take(conn, runtime, limit=1).numbers == [2]


def test_a_job_that_is_cancelled_with_the_key_in_hand_passes_it_on(conn: Conn) -> None:
    """Rule: what ends without an attempt tells that its keys are free."""
    runtime = register(conn)
    limit(conn, max_running_per_key=1)
    ids = insert(conn, 1, 2, 3, key="a")
    running = take(conn, runtime).members
    settle(conn, runtime, running)
    assert claim(conn, runtime).flags == COME_AGAIN, "it is handed over, and starts with the next claim"
    assert state(conn, ids[1]) == "available"
    assert cancel(conn, ids[1]) == ("cancelled", "cancelled")
    assert take(conn, runtime).numbers == [3]


def test_a_limit_that_is_raised_lowered_or_taken_away_holds_at_once(conn: Conn) -> None:
    """Rule: a change counts what runs and has the waiting keys looked at."""
    runtime = register(conn)
    insert(conn, *range(8), key="a")
    running = take(conn, runtime, limit=2).members
    limit(conn, max_running_per_key=2)
    assert take(conn, runtime).members == []
    assert len(waits(conn)) == 6
    limit(conn, max_running_per_key=3)
    third = take(conn, runtime)
    assert third.numbers == [2]
    limit(conn, max_running_per_key=1)
    settle(conn, runtime, running)
    assert take(conn, runtime).members == []
    limit(conn)
    assert take(conn, runtime).numbers == [3, 4, 5, 6, 7]
    assert waits(conn) == []
    settle(conn, runtime, third.members)
    take(conn, runtime)
    assert not grants(conn)


def test_hundreds_of_waiting_jobs_are_handed_over_when_the_limit_goes(conn: Conn) -> None:
    """Rule: a key of which more wait than one claim hands over is looked at again."""
    runtime = register(conn)
    limit(conn, max_running_per_key=1)
    insert(conn, *range(1300), key="a")
    assert [take(conn, runtime, limit=1000).numbers for _ in range(2)] == [[0], []]
    assert len(waits(conn)) == 1299
    limit(conn)
    found: list[int] = []
    for _ in range(40):
        claimed = claim(conn, runtime, limit=1000)
        found += claimed.numbers
        if not claimed.members and not claimed.flags & COME_AGAIN:
            break
    assert found == list(range(1, 1300))


# --- ordering keys


def test_an_ordering_key_is_strictly_serial_and_kept_through_retries(conn: Conn) -> None:
    """Rule: the job has the key until it has ended, whatever becomes of its attempts."""
    runtime, dead = register(conn), register(conn)
    insert(conn, 1, 2, order="o")
    insert(conn, 3)
    running = take(conn, dead).members
    assert [member.args for member in running] == ['{"n" : 1}', '{"n" : 3}']
    settle(conn, dead, running[1:], [Outcome(running[0], "retried", 0.01)])
    assert take(conn, runtime).members == []
    scalar(conn, "SELECT pg_sleep(0.02)")
    promote(conn)
    again = one(conn, dead)
    assert again.attempt == 2
    settle(conn, dead, others=[Outcome(again, "snoozed", 0.0)])
    again = one(conn, dead)
    settle(conn, dead, others=[Outcome(again, "released")])
    again = one(conn, dead)
    fall_silent(conn, dead)
    assert fence(conn, dead)
    rescue(conn, dead)
    again = one(conn, runtime)
    assert (again.id, again.attempt) == (running[0].id, 3)
    assert waits(conn) == [("order", "o", 2)]
    settle(conn, runtime, others=[Outcome(again, "failed")])
    assert take(conn, runtime).numbers == [2]


def test_ordered_jobs_run_in_the_order_of_the_walk_over_many_claims(conn: Conn) -> None:
    """Rule: nobody overtakes who waits."""
    runtimes = [register(conn), register(conn)]
    insert(conn, *range(6), order="o")
    ran: list[int] = []
    for turn in range(40):
        claimed = take(conn, runtimes[turn % 2], limit=3)
        assert len(claimed.members) <= 1
        ran += claimed.numbers
        settle(conn, runtimes[turn % 2], claimed.members)
        if turn == 3:
            insert(conn, *range(6, 9), order="o")
    assert ran == list(range(9))
    assert not grants(conn)


def test_a_cancelled_holder_of_an_ordering_key_lets_the_next_one_run(conn: Conn) -> None:
    """Rule: the end of a job that waits for its retry frees its ordering key."""
    runtime = register(conn)
    ids = insert(conn, 1, 2, order="o")
    settle(conn, runtime, others=[Outcome(one(conn, runtime), "retried", 600.0)])
    assert take(conn, runtime).members == []
    assert cancel(conn, ids[0]) == ("cancelled", "cancelled")
    assert take(conn, runtime).numbers == [2]


def test_a_job_with_both_keys_waits_for_one_after_the_other(conn: Conn) -> None:
    """Rule: the ordering key first, which is kept while the job waits for the other one."""
    runtime = register(conn)
    limit(conn, max_running_per_key=1)
    insert(conn, 1, key="k")
    insert(conn, 2, 3, key="k", order="o")
    insert(conn, 4, order="o")
    first = take(conn, runtime)
    assert first.numbers == [1]
    assert waits(conn) == [("key", "k", 2), ("order", "o", 3), ("order", "o", 4)]
    settle(conn, runtime, first.members)
    second = take(conn, runtime)
    assert second.numbers == [2]
    settle(conn, runtime, second.members)
    third = take(conn, runtime)
    assert third.numbers == [3]
    settle(conn, runtime, third.members)
    fourth = take(conn, runtime)
    assert fourth.numbers == [4]
    settle(conn, runtime, fourth.members)
    take(conn, runtime)
    assert not grants(conn)


def test_a_key_is_handed_over_to_a_job_of_a_kind_that_the_claimer_does_not_know(conn: Conn) -> None:
    """Rule: who comes first has the key, and waits with it for a worker that knows the kind."""
    old, new = register(conn), register(conn)
    insert(conn, 1, order="o", kind="known")
    insert(conn, 2, order="o", kind="new")
    insert(conn, 3, order="o", kind="known")
    settle(conn, old, take(conn, old, kinds=["known"]).members)
    assert take(conn, old, kinds=["known"]).members == []
    member = one(conn, new, kinds=["known", "new"])
    assert member.kind == "new"
    assert take(conn, old, kinds=["known"]).members == []
    settle(conn, new, [member])
    assert take(conn, old, kinds=["known"]).numbers == [3]


def test_a_job_that_waited_for_its_kind_waits_for_its_key_too(conn: Conn) -> None:
    """Rule: a direct claim keeps the limits; what it may not start is set aside again."""
    old, new = register(conn), register(conn)
    limit(conn, max_running_per_key=1)
    insert(conn, 1, 2, key="a", kind="new")
    insert(conn, 3, kind="known")
    assert take(conn, old, kinds=["known"]).numbers == [3]
    first = take(conn, new, kinds=["new"])
    assert first.numbers == [1]
    assert waits(conn) == [("key", "a", 2)]
    settle(conn, new, first.members)
    assert take(conn, new, kinds=["new"]).numbers == [2]


def test_who_waits_keeps_its_turn_while_somebody_holds_its_row(conn: Conn, other: Conn) -> None:
    """Rule: a hand-over takes nobody in the place of a row that is locked."""
    runtime = register(conn)
    ids = insert(conn, 1, 2, 3, order="o")
    settle(conn, runtime, take(conn, runtime).members)
    with transaction(other):
        other.execute("SELECT FROM awa.waiting_jobs WHERE id = %s FOR UPDATE", (ids[1],))
        assert take(conn, runtime).members == []
    second = take(conn, runtime)
    assert second.numbers == [2]
    settle(conn, runtime, second.members)
    assert take(conn, runtime).numbers == [3]


def test_an_end_between_the_look_and_the_setting_aside_leaves_nothing_stuck(conn: Conn, other: Conn) -> None:
    """Rule: the row of the key stays until a claim has handed it over."""
    runtime = register(conn)
    insert(conn, 1, 2, order="o")
    first = take(conn, runtime, limit=1)
    with transaction(other):
        assert claim(other, runtime).members == []  # sets 2 aside, and is open
        settle(conn, runtime, first.members)
        assert claim(conn, runtime).flags & BUSY
        other.execute("COMMIT")
    assert take(conn, runtime).numbers == [2]
    insert(conn, 3, order="o")
    with transaction(other):
        settle(other, runtime, take(conn, runtime).members)
        assert take(conn, runtime).members == []
        other.execute("COMMIT")
    member = scalar(conn, "SELECT id FROM awa.grants")
    assert member


# --- expiry


def test_what_has_expired_is_cancelled_and_not_started(conn: Conn) -> None:
    """Rule: a claim ends what it meets too late, and goes on."""
    runtime = register(conn)
    now = datetime.now(UTC)
    (late,) = insert(conn, 1, expires_at=now - timedelta(seconds=1))
    insert(conn, 2, expires_at=now + timedelta(hours=1))
    assert take(conn, runtime, limit=1).numbers == [2]
    assert state(conn, late) == "cancelled"
    error = scalar(conn, "SELECT history->-1 FROM awa.ended_jobs WHERE id = %s", late)
    assert (error["type"], error["outcome"]) == ("Expired", "cancelled")
    assert error["text"].startswith("it expired at ")


# --- aging


def test_a_low_job_that_has_waited_goes_first_for_once(conn: Conn) -> None:
    """Rule: once a second a claim goes by the age of what comes first in each lane."""
    runtime = register(conn)
    insert(conn, *range(10, 30), priority=1)
    (low,) = insert(conn, 1, priority=4)
    assert claim(conn, runtime, limit=2).numbers == [10, 11]
    conn.execute("UPDATE awa.jobs SET available_at = available_at - interval '179 s' WHERE id = %s", (low,))
    conn.execute("UPDATE awa.claims SET claimed_at = claimed_at - interval '2 s'")
    assert claim(conn, runtime, limit=1).numbers == [12]
    conn.execute("UPDATE awa.jobs SET available_at = available_at - interval '2 s' WHERE id = %s", (low,))
    conn.execute("UPDATE awa.claims SET claimed_at = claimed_at - interval '2 s'")
    assert claim(conn, runtime, limit=1, aging=0).numbers == [13]
    conn.execute("UPDATE awa.claims SET claimed_at = claimed_at - interval '2 s'")
    assert claim(conn, runtime, limit=2).numbers == [1, 14]
    assert claim(conn, runtime, limit=100).numbers == list(range(15, 30))
    assert claim(conn, runtime).members == []


def test_express_comes_before_main_within_a_priority_however_old_the_rows_are(conn: Conn) -> None:
    """Rule: the lanes of a priority age together; what was carried has young rows and comes first all the same."""
    runtime = register(conn)
    insert(conn, 0)
    insert(conn, 1, order="o")
    scalar(conn, "SELECT awa.rotate_v1()")
    insert(conn, 2, order="o")
    conn.execute("UPDATE awa.jobs SET available_at = available_at - interval '1 h'")
    settle(conn, runtime, claim(conn, runtime, limit=1).members)
    assert scalar(conn, "SELECT awa.carry_v1(0::smallint, 'q', 100)") == 1
    conn.execute("UPDATE awa.claims SET claimed_at = claimed_at - interval '5 s'")
    assert take(conn, runtime).numbers == [1]
    assert waits(conn) == [("order", "o", 2)]


def test_what_has_an_ordering_key_is_not_carried_past_what_comes_before(conn: Conn) -> None:
    """Rule: it holds its slot until the lane's first entry lies there."""
    runtime = register(conn)
    insert(conn, 1, order="o")
    scalar(conn, "SELECT awa.rotate_v1()")
    insert(conn, 2, order="o")
    insert(conn, 3)
    scalar(conn, "SELECT awa.rotate_v1()")
    assert scalar(conn, "SELECT awa.carry_v1(1::smallint, 'q', 100)") == 1
    assert take(conn, runtime, limit=1).numbers == [3]
    first = take(conn, runtime, limit=1)
    assert first.numbers == [1]
    assert scalar(conn, "SELECT awa.carry_v1(1::smallint, 'q', 100)") == 1
    settle(conn, runtime, first.members)
    assert take(conn, runtime).numbers == [2]


def test_a_claim_that_sets_much_aside_ends_after_a_while_and_says_come_again(conn: Conn) -> None:
    """Rule: nobody holds the queue for long; what was set aside stays so."""
    runtime = register(conn)
    limit(conn, max_running_per_key=1)
    insert(conn, *range(101), key="a")
    assert take(conn, runtime, limit=1).numbers == [0]
    arguments = "p_queue text, p_slots smallint[], p_lanes smallint[], p_xids xid8[], p_entries bigint[], p_whys text[]"
    conn.execute("ALTER FUNCTION awa.set_aside RENAME TO set_aside_at_once")
    conn.execute(
        f"CREATE FUNCTION awa.set_aside({arguments}) RETURNS boolean LANGUAGE sql"
        " AS $$ SELECT awa.set_aside_at_once($1, $2, $3, $4, $5, $6) FROM pg_sleep(0.3) $$"
    )
    claimed = claim(conn, runtime, limit=10)
    assert (claimed.members, claimed.flags) == ([], COME_AGAIN)
    assert 10 <= len(waits(conn)) <= 20
    conn.execute("DROP FUNCTION awa.set_aside")
    conn.execute("ALTER FUNCTION awa.set_aside_at_once RENAME TO set_aside")
    assert take(conn, runtime, limit=10).members == []
    assert len(waits(conn)) == 100
