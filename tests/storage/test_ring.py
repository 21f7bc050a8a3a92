"""The ring turns, sealed segments are emptied, and what waits in them is carried forward."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from awa.embedded import Server
from awa.storage import ended, ring
from awa.storage.migrate import migrate
from awa.worker.maintenance.ring import Ring
from tests.fixtures.db import wait_until
from tests.storage.engine import (
    AWA,
    BUSY,
    Background,
    Conn,
    Outcome,
    claim,
    claim_in_steps,
    complete,
    insert,
    register,
    scalar,
    settle,
    state,
    transaction,
    wait_for_lock,
)

DAY = 86_400.0


@pytest.fixture
def other(database: str) -> Iterator[Conn]:
    with psycopg.connect(database, autocommit=True) as conn:
        yield conn


def current(conn: Conn) -> int:
    return int(scalar(conn, "SELECT pg_sequence_last_value('awa.ring_seq')"))


def turn(conn: Conn) -> int:
    slot = ring.rotate(conn, AWA)
    assert slot is not None
    return slot


def count(conn: Conn, slot: int) -> int:
    return int(scalar(conn, f"SELECT count(*) FROM awa.jobs_{slot}"))


def prune(conn: Conn, slot: int, entries: int) -> str:
    """As somebody who has counted them just now."""
    file = scalar(conn, f"SELECT pg_relation_filenode('awa.jobs_{slot}')")
    return ring.prune(conn, AWA, slot, entries=entries, file=file)


def run_through(conn: Conn, runtime: int, queue: str = "q") -> list[int]:
    """Claim and complete everything; the numbers, first to run first."""
    found: list[int] = []
    while (claimed := claim(conn, runtime, queue=queue)).members:
        assert settle(conn, runtime, claimed.members) == []
        found += claimed.numbers
    return found


def empty_slots(conn: Conn) -> set[int]:
    return {segment.slot for segment in ring.list_segments(conn, AWA) if segment.is_empty}


def look(conn: Conn, chore: Ring, rounds: int = 1) -> None:
    """Whole rounds of *chore*, each looking at every segment."""
    for _ in range(rounds):
        for seen in chore._seen.values():
            seen.look_at = 0.0
        while chore.run(conn, 0.0) == 0.0:
            pass


def make_chore(*, retention: float = 0.0, rotate_after: float = 1e9, **options: Any) -> Ring:
    return Ring(AWA, retention=retention, rotate_after=rotate_after, **options)


# --- turning


def test_the_ring_turns_to_an_empty_slot_and_seals_the_old_one(conn: Conn) -> None:
    insert(conn, 1)
    assert turn(conn) == 1
    old, new = ring.list_segments(conn, AWA)[:2]
    assert (old.is_current, old.is_open, old.sealed_at is not None) == (False, False, True)
    assert (new.is_current, new.is_open, new.sealed_at) == (True, True, None)
    insert(conn, 2)
    assert (count(conn, 0), count(conn, 1)) == (1, 1)


def test_it_turns_to_any_empty_slot_and_to_none_when_all_are_full(conn: Conn) -> None:
    for slot in (1, 2, 4, 5, 6, 7):
        conn.execute(f"INSERT INTO awa.jobs_{slot} (slot, kind) VALUES ({slot}, 'k')")
    insert(conn, 1)
    assert turn(conn) == 3
    insert(conn, 2)
    assert ring.rotate(conn, AWA) is None
    assert current(conn) == 3
    insert(conn, 3)
    assert count(conn, 3) == 2


def test_a_producer_under_an_old_snapshot_writes_to_the_new_slot(conn: Conn, other: Conn) -> None:
    """The slot is read from a sequence, which is current under every snapshot."""
    with transaction(other, "REPEATABLE READ"):
        other.execute("SELECT count(*) FROM awa.jobs")
        turn(conn)
        insert(other, 1)
        other.execute("COMMIT")
    assert count(conn, 1) == 1


@pytest.mark.slow
def test_a_crash_does_not_move_the_ring(own_server: Server) -> None:
    """The sequence is set, never advanced: with nextval in rotate_v1 the ring stands elsewhere afterwards: tried."""
    with psycopg.connect(own_server.url("postgres"), autocommit=True) as conn:
        migrate(conn, AWA)
        insert(conn, 1)
        assert turn(conn) == 1
        insert(conn, 2)
    own_server.stop("immediate")
    own_server.start()
    with psycopg.connect(own_server.url("postgres"), autocommit=True) as conn:
        assert current(conn) == 1
        insert(conn, 3)
        assert (count(conn, 0), count(conn, 1)) == (1, 2)
        assert turn(conn) == 2


def test_what_the_ring_says_is_mended_after_a_crash_in_the_middle_of_a_turn(conn: Conn) -> None:
    conn.execute("SELECT setval('awa.ring_seq', 5)")
    look(conn, make_chore())
    opened = {segment.slot for segment in ring.list_segments(conn, AWA) if segment.is_open}
    assert opened == {5}


def test_the_chore_turns_by_age_and_not_while_the_segment_is_empty(conn: Conn) -> None:
    chore = make_chore(rotate_after=3600.0)
    look(conn, chore)
    assert current(conn) == 0
    insert(conn, 1)
    look(conn, chore)
    assert current(conn) == 0
    conn.execute("UPDATE awa.ring SET opened_at = opened_at - interval '61 min'")
    look(conn, chore)
    assert current(conn) == 1
    conn.execute("UPDATE awa.ring SET opened_at = opened_at - interval '61 min' WHERE slot = 1")
    look(conn, chore)
    assert current(conn) == 1


def test_sealed_segments_have_statistics(conn: Conn) -> None:
    """Autovacuum, which would analyze them, stays away."""
    insert(conn, *range(500))
    conn.execute("UPDATE awa.ring SET opened_at = opened_at - interval '1 h'")
    look(conn, make_chore(rotate_after=60.0))
    assert scalar(conn, "SELECT reltuples FROM pg_class WHERE oid = 'awa.jobs_0'::regclass") == 500
    off = scalar(
        conn,
        "SELECT count(*) FROM pg_class WHERE relispartition AND relkind = 'r'"
        " AND reloptions @> '{autovacuum_enabled=off}' AND relnamespace = 'awa'::regnamespace",
    )
    assert off == 32


# --- emptying


def test_a_segment_is_emptied_once_everything_in_it_has_ended(conn: Conn) -> None:
    runtime = register(conn)
    insert(conn, *range(20))
    claimed = claim(conn, runtime, limit=20)
    turn(conn)
    chore = make_chore()
    members = claimed.members
    settle(conn, runtime, members[:10], [Outcome(m, "retried") for m in members[10:15]])
    complete(conn, members[15])
    look(conn, chore)
    assert count(conn, 0) == 20
    settle(conn, runtime, members[16:])
    look(conn, chore)
    assert 0 in empty_slots(conn)
    assert sorted(run_through(conn, runtime)) == list(range(10, 15))


def test_queues_go_on_from_where_they_were_when_their_cursor_is_emptied(conn: Conn) -> None:
    """The frontiers are written down before the slot that holds them is emptied: without it everything else of the
    queue's pages would be claimed again: tried."""
    runtime = register(conn)
    for queue in ("a", "b"):
        insert(conn, 1, 2, queue=queue)
        insert(conn, 3, queue=queue, priority=1)
    first = claim(conn, runtime, queue="a", limit=2)  # stops in the middle of a page
    settle(conn, runtime, first.members)
    assert sorted(run_through(conn, runtime, "b")) == [1, 2, 3]
    kept = conn.execute("SELECT lane, page_from, page_to, last_xid FROM unnest(awa.frontier_of('a'))").fetchall()
    turn(conn)
    insert(conn, 9, queue="a")
    settle(conn, runtime, claim(conn, runtime, queue="a", limit=1).members)
    assert run_through(conn, runtime, "a") == [9]
    look(conn, make_chore())
    assert 0 in empty_slots(conn)
    turn(conn)
    look(conn, make_chore(), rounds=2)
    assert empty_slots(conn) >= {0, 1}
    assert scalar(conn, "SELECT count(*) FROM awa.claims") == 0
    assert kept and scalar(conn, "SELECT count(*) FROM awa.frontiers") == 2
    insert(conn, 10, queue="a")
    assert run_through(conn, runtime, "a") == [10]
    assert run_through(conn, runtime, "b") == []


def test_a_checkpoint_never_goes_back(conn: Conn) -> None:
    runtime = register(conn)
    insert(conn, 1)
    settle(conn, runtime, claim(conn, runtime).members)
    turn(conn)
    conn.execute("INSERT INTO awa.frontiers VALUES ('q', 1000000, '{}')")
    look(conn, make_chore())
    assert 0 in empty_slots(conn)
    assert scalar(conn, "SELECT claim_id FROM awa.frontiers") == 1_000_000


def test_equal_counts_alone_do_not_empty_a_segment(conn: Conn) -> None:
    """Something recorded twice stands for a live job in the counts; the prints tell them apart. With counts alone the
    live job is lost: tried."""
    runtime = register(conn)
    insert(conn, 1, 2)
    one, two = claim(conn, runtime, limit=2).members
    settle(conn, runtime, [one])
    conn.execute(
        "INSERT INTO awa.completions (claim_id, flush, slot, idx, elapsed_ms)"
        " SELECT claim_id, flush + 1000000, slot, idx, elapsed_ms FROM awa.completions"
    )
    turn(conn)
    look(conn, make_chore(), rounds=2)
    assert count(conn, 0) == 2
    assert settle(conn, runtime, [two]) == []


def test_a_straggler_that_commits_after_the_look_is_not_lost(conn: Conn) -> None:
    """Under the lock the entries are counted again: without it the straggler is lost: tried."""
    runtime = register(conn)
    insert(conn, 1)
    settle(conn, runtime, claim(conn, runtime).members)
    turn(conn)
    conn.execute("INSERT INTO awa.jobs (slot, queue, kind, args) VALUES (0, 'q', 'noop', '{\"n\": 2}')")
    assert prune(conn, 0, 1) == "changed"
    look(conn, make_chore(), rounds=2)
    assert run_through(conn, runtime) == [2]
    look(conn, make_chore(), rounds=2)
    assert 0 in empty_slots(conn)


def test_who_led_long_ago_empties_nothing_that_came_since(conn: Conn) -> None:
    """It found that one entry has ended; another leader emptied the slot, and one that is open lies there now. By
    numbers and pages alone they are the same, and the open one is lost: tried."""
    runtime = register(conn)
    now: list[datetime | None] = [None]
    first = make_chore(retention=DAY, now=lambda: now[0])
    insert(conn, 1)
    run_through(conn, runtime)
    turn(conn)
    file = scalar(conn, "SELECT pg_relation_filenode('awa.jobs_0')")
    look(conn, first)  # all have ended, and are to be kept for a day
    look(conn, make_chore())
    assert 0 in empty_slots(conn)
    conn.execute("INSERT INTO awa.jobs (slot, queue, kind, args) VALUES (0, 'q', 'noop', '{\"n\": 2}')")
    now[0] = scalar(conn, "SELECT now() + interval '2 days'")
    look(conn, first, rounds=3)
    assert ring.prune(conn, AWA, 0, entries=1, file=file) == "changed"
    assert run_through(conn, runtime) == [2]


def test_entries_that_were_committed_behind_the_look_do_not_hold_a_segment(conn: Conn, other: Conn) -> None:
    """They lie on pages that were printed without them: what was printed once is not believed for ever."""
    runtime = register(conn)
    [waiting] = insert(conn, 1)
    chore = make_chore()
    with transaction(other):
        insert(other, 2)
        turn(conn)
        look(conn, chore)
        other.execute("COMMIT")
    assert sorted(run_through(conn, runtime)) == [1, 2]
    look(conn, chore, rounds=2)
    assert 0 in empty_slots(conn)
    assert state(conn, waiting) is None


def test_a_straggler_in_an_open_transaction_holds_prune_off(conn: Conn, other: Conn) -> None:
    """Size and last page see nothing of it. It may commit while prune waits for its lock: counted before that lock is
    had, it is lost: tried."""
    runtime = register(conn)
    with transaction(other):
        insert(other, 2)  # its slot is chosen, and its lock taken
        insert(conn, 1)
        settle(conn, runtime, claim(conn, runtime).members)
        turn(conn)
        assert prune(conn, 0, 1) == "busy"
        conn.execute("ALTER FUNCTION awa.prune_v2 SET lock_timeout = '20s'")  # the moment, drawn out
        waiting = Background(lambda: prune(conn, 0, 1))
        wait_for_lock(other, conn)
        other.execute("COMMIT")
    assert waiting.result() == "changed"
    assert run_through(conn, runtime) == [2]


def test_a_straggler_into_an_emptied_slot_is_an_entry_like_any_other(conn: Conn, other: Conn) -> None:
    """Its producer read the old slot, stood behind prune, and wrote when the segment was empty."""
    runtime = register(conn)
    insert(conn, 1)
    settle(conn, runtime, claim(conn, runtime).members)
    turn(conn)
    with transaction(conn):
        assert prune(conn, 0, 1) == "pruned"
        late = Background(
            lambda: other.execute(
                "INSERT INTO awa.jobs (slot, queue, kind, args) VALUES (0, 'q', 'noop', '{\"n\": 2}')"
            )
        )
        wait_until(lambda: late.is_running)
        conn.execute("COMMIT")
    late.result()
    insert(conn, 3)
    assert sorted(run_through(conn, runtime)) == [2, 3]


def test_a_reader_holds_prune_off_and_loses_nothing(conn: Conn, other: Conn) -> None:
    runtime = register(conn)
    insert(conn, 1)
    settle(conn, runtime, claim(conn, runtime).members)
    turn(conn)
    with transaction(other, "REPEATABLE READ"):
        assert scalar(other, "SELECT count(*) FROM awa.jobs") == 1
        assert prune(conn, 0, 1) == "busy"
        assert scalar(other, "SELECT count(*) FROM awa.jobs") == 1
    assert prune(conn, 0, 1) == "pruned"


def test_the_current_slot_is_never_emptied(conn: Conn) -> None:
    assert prune(conn, 0, 0) == "current"


def test_a_claim_that_stood_behind_prune_sees_the_checkpoint(conn: Conn, other: Conn) -> None:
    """A statement takes its locks before its snapshot. With an older snapshot the claim would find neither the claim
    rows nor the checkpoint, and begin at the beginning; so a row that it must not claim is put there for it."""
    runtime = register(conn)
    insert(conn, 1)
    settle(conn, runtime, claim(conn, runtime).members)
    xid = scalar(conn, "SELECT xid::text FROM awa.jobs")
    turn(conn)
    other.execute("SET lock_timeout = 0")
    # every claim sets its own time limit for locks; this one has time to stand there
    other.execute("ALTER FUNCTION awa.claim_v2 SET lock_timeout = '20s'")
    assert claim(other, runtime).members == []  # its plans are made
    with transaction(conn):
        assert prune(conn, 0, 1) == "pruned"
        standing = Background(lambda: claim(other, runtime))
        with psycopg.connect(conn.info.dsn, autocommit=True) as observer:
            wait_for_lock(observer, other)
        conn.execute(
            "INSERT INTO awa.jobs (slot, xid, queue, kind, args) VALUES (1, %s, 'q', 'noop', '{\"n\": 1}')", (xid,)
        )
        conn.execute("COMMIT")
    assert standing.result().members == []


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_prune_and_carry_need_read_committed(conn: Conn, isolation: str) -> None:
    """With an older snapshot they would not see what was written or claimed last."""
    turn(conn)
    for call in ("awa.prune_v1(0::smallint, 0, 0)", "awa.carry_v1(0::smallint, 'q', 10)"):
        with transaction(conn, isolation), pytest.raises(psycopg.Error) as refused:
            conn.execute(f"SELECT {call}")
        assert refused.value.sqlstate == "AWA02"


def test_open_transactions_hold_no_segment_but_their_own(conn: Conn, other: Conn) -> None:
    """A transaction that enqueued or completed something locks that slot's tables and no others, with the generic plan
    in use: with a plan over all partitions nothing could be emptied until it ends."""
    runtime = register(conn)
    insert(conn, *range(30))
    members = claim(conn, runtime, limit=30).members
    turn(conn)
    with transaction(other):
        for member in members[:12]:
            complete(other, member)
        for n in range(12):
            insert(other, 100 + n)
        locked = {
            row[0]
            for row in other.execute(
                "SELECT c.relname FROM pg_locks l JOIN pg_class c ON c.oid = l.relation"
                " WHERE l.pid = pg_backend_pid() AND c.relkind = 'r' AND c.relispartition"
            )
        }
    assert locked <= {"jobs_0", "claims_0", "attempt_ends_0", "jobs_1"}


# --- keeping


def test_completed_jobs_stay_readable_for_a_day_and_are_emptied_after(conn: Conn) -> None:
    runtime = register(conn)
    (job,) = insert(conn, 1)
    settle(conn, runtime, claim(conn, runtime).members)
    turn(conn)
    began = scalar(conn, "SELECT clock_timestamp()")
    now = began
    chore = make_chore(retention=DAY, now=lambda: now)
    for hours in (0, 1, 23):
        now = began + timedelta(hours=hours)
        look(conn, chore)
        assert state(conn, job) == "completed"
    now = began + timedelta(hours=24, minutes=1)
    look(conn, chore)
    assert state(conn, job) is None
    assert 0 in empty_slots(conn)


def test_what_was_completed_inside_a_transaction_is_kept_as_long(conn: Conn) -> None:
    runtime = register(conn)
    (job,) = insert(conn, 1)
    complete(conn, claim(conn, runtime).members[0])
    turn(conn)
    look(conn, make_chore(retention=DAY), rounds=2)
    assert state(conn, job) == "completed"


def test_failed_and_cancelled_jobs_and_dead_letters_go_in_their_own_time(conn: Conn) -> None:
    runtime = register(conn)
    ids = insert(conn, *range(4))
    claimed = claim(conn, runtime)
    settle(
        conn, runtime, (), [Outcome(m, o) for m, o in zip(claimed.members, ("failed", "cancelled") * 2, strict=True)]
    )
    conn.execute("UPDATE awa.ended_jobs SET dead_reason = 'poison' WHERE id = ANY (%s)", (ids[2:],))
    at: datetime = scalar(conn, "SELECT clock_timestamp()")

    def delete(hours: float) -> int:
        now = at + timedelta(hours=hours)
        return ended.delete_old(conn, AWA, failed=3 * DAY, dead=30 * DAY, limit=1, now=now)

    assert delete(71) == 0
    assert [delete(73), delete(73), delete(73)] == [1, 1, 0]
    assert [row[0] for row in conn.execute("SELECT id FROM awa.ended_jobs ORDER BY id")] == ids[2:]
    assert delete(30 * 24 - 1) == 0
    assert [delete(30 * 24 + 1) for _ in range(3)] == [1, 1, 0]


# --- carrying


def numbers_left(conn: Conn, queue: str = "q") -> list[int]:
    """What a claim would bring, in its order."""
    rows = conn.execute(
        "SELECT j.args FROM awa.unclaimed(%s, 1000) WITH ORDINALITY u(slot, lane, xid, entry_id, n)"
        "  JOIN awa.jobs j USING (slot, entry_id) ORDER BY u.n",
        (queue,),
    )
    return [row[0]["n"] for row in rows]


def test_unclaimed_entries_are_listed_as_claims_would_bring_them(conn: Conn, other: Conn) -> None:
    runtime = register(conn)
    with transaction(other):
        insert(other, 50)
        insert(conn, 5, 6, 7, priority=3)
        insert(conn, 1, 2, 3, 4, priority=1)
        claim(conn, runtime, limit=2)
        turn(conn)
        insert(conn, 8, priority=3)
        conn.execute(
            "INSERT INTO awa.attempt_ends (entry_id, id, slot, outcome)"
            " SELECT entry_id, id, slot, 'cancelled' FROM awa.jobs WHERE args->>'n' = '6'"
        )
        assert numbers_left(conn) == [3, 4, 5, 7, 8]
        other.execute("COMMIT")
    assert numbers_left(conn) == [3, 4, 50, 5, 7, 8]
    assert claim_in_steps(conn, runtime, limit=2) == [3, 4, 50, 5, 7, 8]
    assert numbers_left(conn) == []


def test_a_few_waiting_jobs_do_not_hold_a_slot(conn: Conn) -> None:
    """24 turns with a queue that nobody serves: no slot is held, nothing is lost, the order stays."""
    runtime = register(conn)
    expected: dict[int, list[int]] = {1: [], 2: []}
    now: datetime = scalar(conn, "SELECT clock_timestamp()")
    chore = make_chore(retention=5 * 3600.0, rotate_after=3600.0, now=lambda: now)
    for n in range(24):
        for priority in (2, 1):
            insert(conn, n, queue="paused", priority=priority)
            expected[priority].append(n)
        insert(conn, n)
        assert run_through(conn, runtime) == [n]
        old = current(conn)
        now += timedelta(hours=1)
        turn(conn)
        conn.execute("UPDATE awa.ring SET sealed_at = %s WHERE slot = %s", (now, old))
        look(conn, chore, rounds=2)
        assert len(empty_slots(conn)) >= 1
    assert numbers_left(conn, "paused") == expected[1] + expected[2]
    assert run_through(conn, runtime, "paused") == expected[1] + expected[2]


def test_an_express_lane_is_carried_whole_or_its_order_would_change(conn: Conn) -> None:
    """Carrying only what lies in the slot puts it behind what lies in later ones: tried."""
    runtime = register(conn)
    insert(conn, 1, 2, 3)
    one, two, three = claim(conn, runtime).members
    settle(conn, runtime, (), [Outcome(one, "released")])
    turn(conn)
    settle(conn, runtime, (), [Outcome(two, "released")])
    turn(conn)
    settle(conn, runtime, (), [Outcome(three, "released")])
    insert(conn, 4)
    turn(conn)
    assert numbers_left(conn) == [1, 2, 3, 4]
    assert ring.carry(conn, AWA, 0, "q", limit=100) == 3
    assert (count(conn, 3), numbers_left(conn)) == (3, [1, 2, 3, 4])
    assert claim(conn, runtime).numbers == [1, 2, 3, 4]


def test_carried_jobs_keep_what_they_are(conn: Conn) -> None:
    conn.execute(
        "INSERT INTO awa.jobs (queue, kind, lane, priority, attempt, max_attempts, timeout_ms, args, metadata, tags,"
        " expires_at, history, available_at) VALUES"
        " ('q', 'k', 7, 3, 4, 9, 50, '{\"a\": 1.0}', '{}', '{x}', '2100-01-01Z', '[1]', '2026-01-01Z')"
    )
    turn(conn)
    assert ring.carry(conn, AWA, 0, "q", limit=10) == 1
    query = (
        "SELECT id, queue, kind, priority, attempt, max_attempts, timeout_ms, args::text, metadata::text, tags,"
        " expires_at, history::text, coalesce(created_at, available_at), {} FROM awa.jobs WHERE slot = %s"
    )
    old = conn.execute(query.format("lane, entry_id <> id") % 0).fetchone()  # type: ignore[arg-type]
    new = conn.execute(query.format("lane, entry_id <> id") % 1).fetchone()  # type: ignore[arg-type]
    assert old is not None and new is not None
    assert old[:13] == new[:13]
    assert (old[13:], new[13:]) == ((7, False), (6, True))


def test_carrying_gives_way_to_a_claim_and_sees_what_it_claimed(conn: Conn, other: Conn) -> None:
    """The claim lock is only tried, and the look at what is unclaimed comes after it: a look before would not see the
    open claim, and its jobs would run twice: tried."""
    runtime = register(conn)
    insert(conn, 1, 2)
    turn(conn)
    with transaction(other):
        claimed = claim(other, runtime, limit=1)
        assert ring.carry(conn, AWA, 0, "q", limit=10) is None
        other.execute("COMMIT")
    assert ring.carry(conn, AWA, 0, "q", limit=10) == 1
    assert claim(conn, runtime).numbers == [2]
    assert settle(conn, runtime, claimed.members) == []


def test_a_claim_gives_way_to_carrying(conn: Conn, other: Conn) -> None:
    runtime = register(conn)
    insert(conn, 1)
    turn(conn)
    with transaction(other):
        assert ring.carry(other, AWA, 0, "q", limit=10) == 1
        assert claim(conn, runtime).flags & BUSY
        other.execute("COMMIT")
    assert run_through(conn, runtime) == [1]


def test_what_an_open_transaction_wrote_is_carried_after_it_has_committed(conn: Conn, other: Conn) -> None:
    runtime = register(conn)
    with transaction(other):
        insert(other, 1)
        turn(conn)
        assert ring.carry(conn, AWA, 0, "q", limit=10) == 0
        other.execute("COMMIT")
    assert ring.carry(conn, AWA, 0, "q", limit=10) == 1
    assert ring.carry(conn, AWA, 0, "q", limit=10) == 0
    assert run_through(conn, runtime) == [1]


def test_a_segment_with_many_open_entries_stays_and_says_so(
    conn: Conn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("awa.worker.maintenance.ring.CARRY_ALWAYS", 3)
    runtime = register(conn)
    insert(conn, *range(8))
    settle(conn, runtime, claim(conn, runtime, limit=4).members)
    turn(conn)
    conn.execute("UPDATE awa.ring SET sealed_at = sealed_at - interval '1000 years'")
    look(conn, make_chore(), rounds=2)
    assert count(conn, 0) == 8
    assert [record.getMessage() for record in caplog.records] == ["slot 0 stays: 4 of its 8 entries are open"]
    settle(conn, runtime, claim(conn, runtime, limit=1).members)
    look(conn, make_chore(), rounds=2)
    assert 0 in empty_slots(conn)
    assert run_through(conn, runtime) == [5, 6, 7]


def test_a_full_ring_is_told_once(conn: Conn, caplog: pytest.LogCaptureFixture) -> None:
    for slot in range(8):
        conn.execute("INSERT INTO awa.jobs (slot, kind) VALUES (%s, 'k')", (slot,))
    conn.execute("UPDATE awa.ring SET opened_at = opened_at - interval '1 h'")
    look(conn, make_chore(retention=DAY, rotate_after=60.0), rounds=3)
    assert [r.getMessage() for r in caplog.records if "no slot of the ring is empty" in r.getMessage()] != []
    assert len([r for r in caplog.records if "no slot of the ring is empty" in r.getMessage()]) == 1


def test_args_are_carried_byte_for_byte(conn: Conn) -> None:
    text = json.dumps({"n": 1, "s": "a\u00e4\n", "f": 1.0}, indent=1)
    conn.execute("INSERT INTO awa.jobs (queue, kind, args) VALUES ('q', 'k', %s)", (text,))
    turn(conn)
    assert ring.carry(conn, AWA, 0, "q", limit=10) == 1
    assert scalar(conn, "SELECT args::text FROM awa.jobs WHERE slot = 1") == text
