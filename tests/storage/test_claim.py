"""Claiming: pages cut by snapshot, walked in order, with nothing skipped and nobody waited for.

Each docstring names the guard of the engine that the test fails without.
"""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import pytest

from tests.storage.engine import (
    AWA,
    BUSY,
    COME_AGAIN,
    Conn,
    Outcome,
    claim,
    claim_in_steps,
    end_unclaimed,
    insert,
    register,
    scalar,
    settle,
    state,
    transaction,
)


def frontier(conn: Conn, lane: int = 5, queue: str = "q") -> dict[str, str | None]:
    """The newest frontier of one lane, as text."""
    row = conn.execute(
        "SELECT page_from::text, page_to::text, last_xid::text, last_entry"
        "  FROM unnest((SELECT frontier FROM awa.claims WHERE queue = %s ORDER BY claim_id DESC LIMIT 1))"
        " WHERE lane = %s",
        (queue, lane),
    ).fetchone()
    assert row is not None
    return dict(zip(("page_from", "page_to", "last_xid", "last_entry"), row, strict=True))


# Open transactions of producers


def test_an_open_producer_delays_nobody_and_its_jobs_come_after_its_commit(
    conn: Conn, other: Conn, third: Conn
) -> None:
    """Guard: the page's snapshots; a frontier of the last xid alone loses the early xid that commits late: tried."""
    runtime = register(conn)
    with transaction(other):
        insert(other, 1)
        third.execute("SET lock_timeout = '1s'")
        insert(third, 2)
        assert claim(conn, runtime).numbers == [2]
        insert(third, 3)
        assert claim(conn, runtime).numbers == [3]
        assert claim(conn, runtime).numbers == []
        other.execute("COMMIT")
    assert claim(conn, runtime).numbers == [1]
    assert claim(conn, runtime).numbers == []


def test_late_commits_come_in_their_turn_within_a_page(conn: Conn, open_connection: Callable[[], Conn]) -> None:
    """Guard: late transactions of a page are ranges of their own, by xid, before the range between its snapshots."""
    runtime = register(conn)
    producers = [open_connection() for _ in range(3)]
    for n, producer in enumerate(producers):
        producer.execute("BEGIN")
        insert(producer, n)
    insert(conn, 10)
    assert claim(conn, runtime).numbers == [10]
    for producer in reversed(producers):
        producer.execute("COMMIT")
    insert(conn, 11)
    assert claim(conn, runtime).numbers == [0, 1, 2, 11]


def test_a_page_with_late_commits_is_walked_in_small_steps(conn: Conn, open_connection: Callable[[], Conn]) -> None:
    """Guard: the position within a page is (xid, entry), and clips the late ranges as well as the last one."""
    runtime = register(conn)
    producers = [open_connection() for _ in range(3)]
    for n, producer in enumerate(producers):
        producer.execute("BEGIN")
        insert(producer, 2 * n, 2 * n + 1)
    insert(conn, 10)
    assert claim(conn, runtime).numbers == [10]
    for producer in producers:
        producer.execute("COMMIT")
    insert(conn, 11, 12)
    assert claim_in_steps(conn, runtime, limit=1) == [0, 1, 2, 3, 4, 5, 11, 12]


def test_a_commit_behind_the_position_of_a_page_in_progress_is_not_lost(conn: Conn, other: Conn) -> None:
    """Guard: a page goes on to the snapshot that cut it; what commits meanwhile belongs to the next page."""
    runtime = register(conn)
    with transaction(other):
        insert(other, 1)
        insert(conn, 2)
        insert(conn, 3)
        assert claim(conn, runtime, limit=1).numbers == [2]
        assert frontier(conn)["page_to"] is not None
        other.execute("COMMIT")
    insert(conn, 4)
    assert claim(conn, runtime, limit=1).numbers == [3]
    assert claim(conn, runtime).numbers == [1, 4]
    assert claim(conn, runtime).numbers == []


def test_commit_order_decides_between_pages(conn: Conn, open_connection: Callable[[], Conn]) -> None:
    """Guard: the page's snapshots. Every commit is followed by a claim, in the reverse order of the xids."""
    runtime = register(conn)
    producers = [open_connection() for _ in range(5)]
    for n, producer in enumerate(producers):
        producer.execute("BEGIN")
        insert(producer, n)
    for n in reversed(range(5)):
        producers[n].execute("COMMIT")
        assert claim(conn, runtime).numbers == [n]


def test_jobs_of_savepoints_belong_to_their_transaction(conn: Conn, other: Conn) -> None:
    """Guard: jobs.xid is the top-level transaction's; a subtransaction's own id is in no snapshot's list.

    Without the list of open transactions in the page's end all of them are lost: tried.
    """
    runtime = register(conn)
    with transaction(other):
        other.execute("SAVEPOINT a")
        insert(other, 1)
        other.execute("SAVEPOINT b")
        insert(other, 2)
        other.execute("ROLLBACK TO b")
        insert(other, 3)
        other.execute("RELEASE a")
        insert(conn, 10)
        assert claim(conn, runtime).numbers == [10]
        insert(other, 4)
        other.execute("COMMIT")
    insert(conn, 11)
    assert claim(conn, runtime).numbers == [1, 3, 4, 11]


def test_a_job_inserted_in_a_plpgsql_exception_block_is_found(conn: Conn, other: Conn) -> None:
    """Guard: as for savepoints; the block is a subtransaction that the caller did not ask for."""
    runtime = register(conn)
    with transaction(other):
        other.execute(
            "DO $$ BEGIN INSERT INTO awa.jobs (queue, kind, args) VALUES ('q', 'noop', '{\"n\": 1}');"
            " EXCEPTION WHEN OTHERS THEN RAISE; END $$"
        )
        insert(conn, 10)
        assert claim(conn, runtime).numbers == [10]
        other.execute("COMMIT")
    assert claim(conn, runtime).numbers == [1]


def test_a_rolled_back_job_never_runs(conn: Conn, other: Conn) -> None:
    """Guard: rows are read with an ordinary snapshot besides the page's, which takes an aborted xid for finished."""
    runtime = register(conn)
    with transaction(other):
        insert(other, 1)
        insert(conn, 2)
        assert claim(conn, runtime).numbers == [2]
        other.execute("ROLLBACK")
    insert(conn, 3)
    assert claim(conn, runtime).numbers == [3]


def test_jobs_of_many_open_writers_all_come(conn: Conn, open_connection: Callable[[], Conn]) -> None:
    """Guard: late transactions come by xid, those that did not cut a page like those that did.

    Without the ranges of late transactions none of the forty comes: tried.
    """
    runtime = register(conn)
    producers = [open_connection() for _ in range(40)]
    for n, producer in enumerate(producers):
        producer.execute("BEGIN")
        insert(producer, n)
    insert(conn, 100)
    assert claim(conn, runtime).numbers == [100]
    # the committed and the open ones are mixed in one range
    for n in range(0, 40, 2):
        producers[n].execute("COMMIT")
    assert claim(conn, runtime).numbers == list(range(0, 40, 2))
    for n in range(1, 40, 2):
        producers[n].execute("COMMIT")
    insert(conn, 101)
    assert claim(conn, runtime, limit=7).numbers == list(range(1, 15, 2))
    assert claim(conn, runtime).numbers == [*range(15, 40, 2), 101]


def test_a_commit_between_two_walks_of_a_page_is_started_once(conn: Conn, open_connection: Callable[[], Conn]) -> None:
    """Guard: visibility in the page's own snapshot, which hides what the cuts do not.

    Without it the job of the fifth open writer is started in this page and in the next: tried.
    """
    runtime = register(conn)
    insert(conn, 100, 101)
    producers = [open_connection() for _ in range(6)]
    for n, producer in enumerate(producers):
        producer.execute("BEGIN")
        insert(producer, n)
    insert(conn, 102)
    assert claim(conn, runtime, limit=1).numbers == [100]
    producers[5].execute("COMMIT")
    assert claim(conn, runtime).numbers == [101, 102, 5]
    assert claim(conn, runtime).numbers == []


def test_idle_claims_beside_open_writers_store_an_advanced_frontier_once_a_second(
    conn: Conn, open_connection: Callable[[], Conn]
) -> None:
    """Guard: the empty claim row after an empty walk of more than 32 ranges, and its limit of one a second.

    Without the one nothing is stored, without the other every poll stores a row: both tried.
    """
    runtime = register(conn)
    insert(conn, -1)
    assert claim(conn, runtime).numbers == [-1]
    writers = []
    for ago, expected in (("1 h", 1), ("-1 h", 0)):
        conn.execute("UPDATE awa.claims SET claimed_at = clock_timestamp() - %s::interval", (ago,))
        for _ in range(6):  # they cut each lane's walk into five ranges
            writers.append(open_connection())
            writers[-1].execute("BEGIN")
            insert(writers[-1], len(writers))
            insert(conn, 0, queue="other")  # between two of them: where there is nothing, there is no range
        before = scalar(conn, "SELECT count(*) FROM awa.claims")
        assert claim(conn, runtime).members == []
        assert scalar(conn, "SELECT count(*) FROM awa.claims") - before == expected
    for writer in writers:
        writer.execute("COMMIT")
    assert claim(conn, runtime).numbers == list(range(1, 13))


def test_a_claim_does_not_read_uncommitted_rows(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: the cuts of a page at open transactions; as a filter, each poll reads every uncommitted row: tried."""
    runtime = register(conn)
    third.execute("SET stats_fetch_consistency = none")
    insert(conn, 1)
    assert claim(conn, runtime).numbers == [1]
    with transaction(other):
        other.execute("INSERT INTO awa.jobs (queue, kind) SELECT 'q', 'noop' FROM generate_series(1, 50000)")
        insert(conn, 2)
        for expected in ([2], [], []):
            before = index_entries_read(conn, third)
            assert claim(conn, runtime).numbers == expected
            assert index_entries_read(conn, third) - before < 50


def index_entries_read(conn: Conn, observer: Conn) -> int:
    conn.execute("SELECT pg_stat_force_next_flush()")
    conn.execute("SELECT 1")
    read = "SELECT sum(idx_tup_read)::bigint FROM pg_stat_user_indexes WHERE relname LIKE 'jobs%%'"
    return int(scalar(observer, read))


# The claiming transaction itself


def test_jobs_that_the_claiming_transaction_appends_later_are_not_skipped(conn: Conn, other: Conn) -> None:
    """Guard: awa.page_end lists the own transaction; its snapshot does not list it as running.

    Without the own transaction id in the page's end the job is hidden for ever: tried.
    """
    runtime = register(conn)
    with transaction(conn):
        scalar(conn, "SELECT pg_current_xact_id()::text")
        insert(other, 1)  # a later transaction: the snapshot now reaches beyond the own id
        assert claim(conn, runtime).numbers == [1]
        insert(conn, 2)
        conn.execute("COMMIT")
    assert claim(conn, runtime).numbers == [2]


def test_a_second_claim_in_one_transaction_goes_on_where_the_first_stopped(conn: Conn, other: Conn) -> None:
    """Guard: awa.page_end, with the own rows before and behind a claim row of the same transaction.

    Without the own transaction id the first of them is started before it is committed: tried.
    """
    runtime = register(conn)
    with transaction(conn):
        insert(conn, 1)
        insert(other, 2)
        assert claim(conn, runtime).numbers == [2]
        insert(other, 3)
        insert(conn, 4)
        assert claim(conn, runtime).numbers == [3]
        conn.execute("COMMIT")
    insert(conn, 5)
    assert claim(conn, runtime).numbers == [1, 4, 5]


def test_a_page_between_two_equal_snapshots_is_empty(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: awa.page_ranges gives empty arrays, not NULL, where a page has no range at all."""
    runtime = register(conn)
    with transaction(third):
        insert(third, 1)  # so that the snapshots list a transaction
        with transaction(conn):
            insert(conn, 2)
            insert(other, 3)
            assert claim(conn, runtime).numbers == [3]
            assert claim(conn, runtime).numbers == []
            conn.execute("COMMIT")
        [ended] = insert(other, 4)
        end_unclaimed(other, [ended])
        assert claim(conn, runtime, limit=1).numbers == [2]
        assert claim(conn, runtime).numbers == []  # its second round has the snapshot of the first
        third.execute("COMMIT")
    assert claim(conn, runtime).numbers == [1]


def test_a_claim_that_is_rolled_back_started_nothing(conn: Conn) -> None:
    """Guard: the frontier lives in the claim row and nowhere else."""
    runtime = register(conn)
    insert(conn, 1)
    with transaction(conn):
        assert claim(conn, runtime).numbers == [1]
        conn.execute("ROLLBACK")
    assert claim(conn, runtime).numbers == [1]


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_claim_under_an_old_snapshot_is_refused(conn: Conn, other: Conn, isolation: str) -> None:
    """Guard: AWA02; an older snapshot reads an old frontier, and starts again what others have: tried."""
    runtime = register(conn)
    insert(conn, 1, 2)
    with transaction(conn, isolation):
        scalar(conn, "SELECT count(*) FROM awa.claims")
        assert claim(other, register(other), limit=1).numbers == [1]
        with pytest.raises(psycopg.Error) as caught:
            claim(conn, runtime)
    assert caught.value.sqlstate == "AWA02"
    assert claim(conn, runtime).numbers == [2]


def test_a_claim_commits_asynchronously_and_leaves_the_callers_commit_alone(conn: Conn) -> None:
    """Guard: the setting is local, and left alone once the transaction has written."""
    runtime = register(conn)
    with transaction(conn):
        claim(conn, runtime)
        assert scalar(conn, "SHOW synchronous_commit") == "off"
        conn.execute("COMMIT")
    assert scalar(conn, "SHOW synchronous_commit") == "on"
    with transaction(conn):
        insert(conn, 1)
        claim(conn, runtime)
        assert scalar(conn, "SHOW synchronous_commit") == "on"
        conn.execute("COMMIT")


def test_a_frontier_from_beyond_this_servers_transactions_is_refused(conn: Conn) -> None:
    """Guard: AWA03; with the rows of another cluster new jobs hide behind the frontier: tried."""
    runtime = register(conn)
    insert(conn, 1)
    claim(conn, runtime)
    conn.execute(
        "UPDATE awa.claims SET frontier = ARRAY[ROW(5, '900000000:900000000:', NULL, NULL, NULL)::awa.lane_frontier]"
    )
    insert(conn, 2)
    with pytest.raises(psycopg.Error, match="lies beyond the transactions of this server") as caught:
        claim(conn, runtime)
    assert caught.value.sqlstate == "AWA03"


def test_the_newer_of_claim_row_and_checkpoint_is_the_cursor(conn: Conn) -> None:
    """Guard: the frontier is read from both in one statement, newest claim id first.

    With the older of the two the second job is started twice: tried.
    """
    runtime = register(conn)
    insert(conn, 1, 2)
    assert claim(conn, runtime, limit=1).numbers == [1]
    conn.execute("INSERT INTO awa.frontiers SELECT queue, claim_id, frontier FROM awa.claims")
    assert claim(conn, runtime, limit=1).numbers == [2]  # the row is newer than the checkpoint
    assert claim(conn, runtime).numbers == []
    conn.execute(
        "INSERT INTO awa.frontiers SELECT queue, claim_id, frontier FROM awa.claims ORDER BY claim_id DESC LIMIT 1"
        " ON CONFLICT (queue) DO UPDATE SET claim_id = excluded.claim_id, frontier = excluded.frontier"
    )
    conn.execute("TRUNCATE awa.claims")
    assert claim(conn, runtime).numbers == []  # the checkpoint is all there is
    insert(conn, 3)
    assert claim(conn, runtime).numbers == [3]


# Walking over what has ended


@pytest.mark.parametrize("limit", [1, 3, 10, 100])
def test_live_jobs_behind_ended_ones_are_found(conn: Conn, limit: int) -> None:
    """Guard: a walk that met only ended entries stores how far it came and goes on; else it never ends: tried."""
    runtime = register(conn)
    ids = insert(conn, *range(40))
    end_unclaimed(conn, [*ids[:18], *ids[20:38]])
    assert claim_in_steps(conn, runtime, limit=limit) == [18, 19, 38, 39]


def test_more_ended_jobs_than_one_claim_walks_over_are_not_taken_for_an_empty_queue(conn: Conn) -> None:
    """Guard: the flag COME_AGAIN after the last round; without it a worker sleeps on a full queue: tried."""
    runtime = register(conn)
    ids = insert(conn, *range(50))
    end_unclaimed(conn, ids[:45])
    first = claim(conn, runtime, limit=1)
    assert (first.members, first.flags) == ([], COME_AGAIN)
    assert claim_in_steps(conn, runtime, limit=1) == [45, 46, 47, 48, 49]


def test_an_ended_entry_is_not_started(conn: Conn) -> None:
    """Guard: entries with an end of their own are left out of the batch, also in the middle of it: tried."""
    runtime = register(conn)
    ids = insert(conn, *range(6))
    end_unclaimed(conn, [ids[0], ids[2], ids[5]])
    assert claim(conn, runtime).numbers == [1, 3, 4]
    insert(conn, 6)
    assert claim(conn, runtime).numbers == [6]


# Kinds that a worker does not know


def test_a_job_of_an_unknown_kind_is_set_aside_and_claimed_by_a_worker_that_knows_it(conn: Conn, other: Conn) -> None:
    """Guard: aliens end as set_aside and wait for their kind; a direct claim appends them to the lane nobody walks."""
    old, new = register(conn), register(conn)
    [a, b] = insert(conn, 1, 2, kind="new")
    insert(conn, 3)
    assert claim(conn, old, kinds=["noop"]).numbers == [3]
    assert (state(conn, a), state(conn, b)) == ("available", "available")
    assert scalar(conn, "SELECT waits_for FROM awa.find_job_v1(%s)", a) == "kind"
    assert claim(conn, old, kinds=["noop"]).members == []
    found = claim(other, new, kinds=["noop", "new"])
    assert (found.ids, found.numbers) == ([a, b], [1, 2])
    assert (state(conn, a), state(conn, b)) == ("running", "running")
    assert claim(conn, old, kinds=["noop"]).members == []
    assert claim(other, new, kinds=["noop", "new"]).members == []
    assert settle(other, new, found.members) == []
    assert (state(conn, a), state(conn, b)) == ("completed", "completed")
    assert scalar(conn, "SELECT count(*) FROM awa.waiting_jobs") == 0


def test_a_batch_of_unknown_kinds_only_is_not_an_empty_queue(conn: Conn) -> None:
    """Guard: the claim goes on after a batch that it set aside whole; else the queue looks empty: tried."""
    runtime = register(conn)
    insert(conn, *range(10), kind="new")
    insert(conn, 10)
    assert claim_in_steps(conn, runtime, kinds=["noop"], limit=4) == [10]


def test_more_unknown_kinds_than_one_claim_sets_aside_say_come_again(conn: Conn) -> None:
    """Guard: COME_AGAIN after the last round; nothing that was set aside is met again."""
    runtime = register(conn)
    insert(conn, *range(50), kind="new")
    insert(conn, 50)
    assert claim(conn, runtime, kinds=["noop"], limit=2).flags == COME_AGAIN
    assert claim_in_steps(conn, runtime, kinds=["noop"], limit=2) == [50]
    assert scalar(conn, "SELECT count(*) FROM awa.waiting_jobs WHERE wait_key = 'new'") == 50


def test_the_first_job_that_is_set_aside_for_a_kind_calls_for_help(conn: Conn, other: Conn) -> None:
    """A call wakes everybody: once, until a claim has left none of the kind in that queue; then with the next one."""

    def calls() -> list[str]:
        heard: list[str] = []
        other.add_notify_handler(note := lambda notify: heard.append(notify.payload))
        other.execute("SELECT")  # its answer comes behind what was called before
        other.remove_notify_handler(note)
        return heard

    old, new = register(conn), register(conn)
    other.execute(f"LISTEN {AWA.channel}")
    for numbers, kinds, heard in (
        (range(50), ["new"], ["\x01q"]),  # several rounds of one claim
        ([50], ["new"], []),
        ([51, 52], ["new", "newer"], ["\x01q"]),  # one of a kind that nobody waits for
        ([53], ["noop"], []),
    ):
        for n, number in enumerate(numbers):
            insert(conn, number, kind=kinds[n % len(kinds)])
        claim_in_steps(conn, old, kinds=["noop"], limit=5)
        assert calls() == heard
    insert(conn, 54, queue="other", kind="new")
    claim(conn, old, queue="other", kinds=["noop"])
    assert calls() == ["\x01other"]
    assert len(claim_in_steps(conn, new, kinds=["new"], limit=51)) == 52
    insert(conn, 55, kind="newer")
    claim(conn, old, kinds=["noop"])
    assert calls() == []
    insert(conn, 56, kind="new")
    claim(conn, old, kinds=["noop"])
    assert calls() == ["\x01q"]


def test_jobs_that_were_set_aside_come_in_their_order_and_in_their_prioritys_turn(conn: Conn) -> None:
    """Guard: the walk stops before the first priority that has jobs set aside; those are taken by seq."""
    old, new = register(conn), register(conn)
    insert(conn, 20, 21, kind="new", priority=2)
    insert(conn, 40, kind="new", priority=4)
    assert claim(conn, old, kinds=["noop"]).members == []
    insert(conn, 30, priority=3)
    insert(conn, 22, priority=2)
    insert(conn, 10, priority=1)
    assert claim_in_steps(conn, new, kinds=["new", "noop"], limit=100) == [10, 20, 21, 22, 30, 40]


def test_set_aside_jobs_that_another_transaction_holds_stop_nobody(conn: Conn, other: Conn) -> None:
    """Guard: after a direct claim that got no row the walk covers every lane; else weaker lanes starve meanwhile."""
    old, new = register(conn), register(conn)
    [a] = insert(conn, 1, kind="new")
    claim(conn, old, kinds=["noop"])
    insert(conn, 2)
    with transaction(other):
        other.execute("SELECT FROM awa.waiting_jobs WHERE id = %s FOR UPDATE", (a,))
        claimed = claim(conn, new, kinds=["new", "noop"])
        assert (claimed.numbers, claimed.flags) == ([2], 0)
        claimed = claim(conn, new, kinds=["new", "noop"])
        assert (claimed.numbers, claimed.flags) == ([], 0)
        other.execute("ROLLBACK")
    assert claim(conn, new, kinds=["new", "noop"]).numbers == [1]


@pytest.mark.parametrize("ended", [18, 19, 20])
def test_what_was_set_aside_is_not_taken_when_no_round_is_left_in_which_to_start_it(conn: Conn, ended: int) -> None:
    """Guard: it would lie in the lane that nobody walks, for ever. A claim goes 20 rounds over what has ended."""
    runtime = register(conn)
    insert(conn, 1, kind="x")
    claim(conn, runtime, kinds=["y"])
    end_unclaimed(conn, insert(conn, *range(ended), priority=1))
    assert claim_in_steps(conn, runtime, kinds=["x"], limit=1) == [1]


def test_a_worker_that_names_no_kinds_walks_past_what_was_set_aside(conn: Conn) -> None:
    """A claim with kinds NULL takes every job of the lanes and leaves alone what waits for a kind."""
    old = register(conn)
    insert(conn, 1, kind="new")
    claim(conn, old, kinds=["noop"])
    insert(conn, 2, kind="other")
    assert claim(conn, old, kinds=None).numbers == [2]


# Limits


def test_a_limit_at_the_very_end_of_a_page_loses_and_repeats_nothing(conn: Conn) -> None:
    """Guard: a batch that is full keeps the page, even when it happened to be its last one.

    With the page replaced after a full batch what is left of it never starts: tried.
    """
    runtime = register(conn)
    insert(conn, 1, 2, 3)
    assert claim(conn, runtime, limit=3).numbers == [1, 2, 3]
    insert(conn, 4)
    insert(conn, 5)
    assert claim(conn, runtime, limit=2).numbers == [4, 5]
    assert claim(conn, runtime, limit=2).numbers == []
    insert(conn, 6)
    assert claim(conn, runtime, limit=1).numbers == [6]
    assert claim(conn, runtime, limit=1).numbers == []


def test_a_limit_that_cuts_between_lanes_keeps_the_rest_of_each(conn: Conn) -> None:
    """Guard: lanes behind the cut keep their frontier, lanes before it are exhausted up to the snapshot."""
    runtime = register(conn)
    for priority in (4, 3, 2, 1):
        insert(conn, *(10 * priority + n for n in range(3)), priority=priority)
    found = []
    for _ in range(3):
        found += claim(conn, runtime, limit=4).numbers
    assert found == [10, 11, 12, 20, 21, 22, 30, 31, 32, 40, 41, 42]
    assert claim(conn, runtime).numbers == []
    insert(conn, 5, 6, priority=1)
    insert(conn, 9, priority=4)
    assert claim(conn, runtime, limit=1).numbers == [5]
    assert claim(conn, runtime).numbers == [6, 9]


def test_a_batch_is_cut_at_128_kib_of_bodies(conn: Conn) -> None:
    """Guard: the byte limit, which moves the position to the last job that was taken."""
    runtime = register(conn)
    conn.execute(
        "INSERT INTO awa.jobs (queue, kind, args)"
        " SELECT 'q', 'noop', json_build_object('n', n, 'body', repeat('x', 40000)) FROM generate_series(1, 7) n"
    )
    assert claim(conn, runtime).numbers == [1, 2, 3]
    assert claim(conn, runtime).numbers == [4, 5, 6]
    assert claim(conn, runtime).numbers == [7]
    assert claim(conn, runtime).numbers == []


def test_a_single_larger_body_is_fetched_after_the_commit(conn: Conn) -> None:
    """Guard: the first job of a batch is taken whatever its size, without its body."""
    runtime = register(conn)
    body = '{"body": "' + "é" * 100_000 + '"}'
    conn.execute("INSERT INTO awa.jobs (queue, kind, args) VALUES ('q', 'noop', %s)", (body,))
    insert(conn, 2)
    [large] = claim(conn, runtime).members
    assert large.args is None
    fetch = "SELECT idx, args FROM awa.fetch_args_v1(%s::bigint, %s::bigint, %s::smallint, %s::smallint[])"
    assert conn.execute(fetch, (runtime, large.claim_id, large.slot, [large.idx])).fetchall() == [(1, body)]
    assert conn.execute(fetch, (runtime + 1, large.claim_id, large.slot, [large.idx])).fetchall() == []
    assert conn.execute(fetch, (runtime, large.claim_id, large.slot, [2, 0])).fetchall() == []
    assert claim(conn, runtime).numbers == [2]


@pytest.mark.parametrize("limit", [0, -1, None])
def test_a_limit_under_one_is_refused(conn: Conn, limit: int) -> None:
    """Guard: the check of p_limit; a walk that reads nothing would take every page for exhausted."""
    runtime = register(conn)
    insert(conn, 1)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="give at least 1"):
        claim(conn, runtime, limit=limit)
    assert claim(conn, runtime).numbers == [1]


# Claimers at the same time


def test_two_claimers_of_one_queue_do_not_wait_for_each_other(conn: Conn, other: Conn) -> None:
    """Guard: the queue's claim lock, which is only tried.

    Without it both start the same attempts; with a lock that waits the second one stands there: both tried.
    """
    first, second = register(conn), register(conn)
    insert(conn, 1, 2)
    with transaction(conn):
        assert claim(conn, first, limit=1).numbers == [1]
        busy = claim(other, second)
        assert (busy.members, busy.flags) == ([], BUSY)
        conn.execute("COMMIT")
    assert claim(other, second).numbers == [2]


def test_two_claimers_of_two_queues_do_not_meet(conn: Conn, other: Conn) -> None:
    """Guard: the claim lock's key is the queue's."""
    first, second = register(conn), register(conn)
    insert(conn, 1, queue="a")
    insert(conn, 2, queue="b")
    with transaction(conn):
        assert claim(conn, first, queue="a").numbers == [1]
        assert claim(other, second, queue="b").numbers == [2]
        conn.execute("COMMIT")


def test_a_claim_of_a_runtime_that_is_being_rescued_is_busy(conn: Conn, other: Conn) -> None:
    """Guard: the runtime's lock, shared and only tried, before the fence is read; else it claims meanwhile: tried."""
    runtime = register(conn)
    insert(conn, 1)
    with transaction(other):
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('awa.runtime:' || %s::text, 0))", (runtime,))
        assert claim(conn, runtime).flags == BUSY
        other.execute("ROLLBACK")
    assert claim(conn, runtime).numbers == [1]


def test_a_fenced_runtime_claims_nothing(conn: Conn) -> None:
    """Guard: AWA01; its attempts would never be rescued again."""
    runtime = register(conn)
    insert(conn, 1)
    conn.execute("INSERT INTO awa.gone_runtimes (runtime) VALUES (%s)", (runtime,))
    with pytest.raises(psycopg.Error) as caught:
        claim(conn, runtime)
    assert caught.value.sqlstate == "AWA01"
    assert claim(conn, register(conn)).numbers == [1]


# Order


def test_priorities_and_express_lanes_are_served_in_order(conn: Conn) -> None:
    """Guard: the order of the ranges, which is that of the lanes, and of the batches, which follow it."""
    runtime = register(conn)
    for priority in (4, 2, 3, 1):
        insert(conn, 10 * priority, 10 * priority + 1, priority=priority)
    every = claim(conn, runtime).members
    assert [member.priority for member in every] == [1, 1, 2, 2, 3, 3, 4, 4]
    for priority in (4, 2, 3, 1):
        insert(conn, 10 * priority + 5, priority=priority)
    settle(conn, runtime, others=[Outcome(member, "released") for member in every])
    assert claim(conn, runtime).numbers == [10, 11, 15, 20, 21, 25, 30, 31, 35, 40, 41, 45]


def test_released_jobs_keep_their_attempt_and_go_before_those_of_their_priority(conn: Conn) -> None:
    """Guard: released and rescued entries go to the express lane."""
    runtime = register(conn)
    insert(conn, 1, 2, 3)
    first = claim(conn, runtime, limit=1)
    settle(conn, runtime, others=[Outcome(first.members[0], "released")])
    again = claim(conn, runtime)
    assert again.numbers == [1, 2, 3]
    assert [member.attempt for member in again.members] == [1, 1, 1]
    assert again.members[0].id == first.members[0].id != again.members[0].entry_id


def test_entries_of_two_segments_are_claimed_in_one_call(conn: Conn) -> None:
    """Guard: a batch has one claim row for each slot, in the slot of its entries."""
    runtime = register(conn)
    insert(conn, 1)
    conn.execute("SELECT setval('awa.ring_seq', 3)")
    insert(conn, 2)
    claimed = claim(conn, runtime)
    assert [(member.slot, member.args) for member in claimed.members] == [(0, '{"n" : 1}'), (3, '{"n" : 2}')]
    assert settle(conn, runtime, claimed.members) == []
    assert conn.execute("SELECT slot, idx FROM awa.completions ORDER BY slot").fetchall() == [(0, [1]), (3, [1])]


def test_what_a_claim_returns_of_tags_metadata_and_attempts(conn: Conn) -> None:
    """Details and the rarer numbers come where some member has them, and are NULL where none has."""
    runtime = register(conn)
    insert(conn, 1)
    conn.execute(
        "INSERT INTO awa.jobs (queue, kind, args, tags, metadata, timeout_ms, max_attempts)"
        " VALUES ('q', 'noop', '{\"n\": 2}', '{a,b}', '{\"m\": 1}', 500, 3)"
    )
    row = conn.execute(
        "SELECT details, max_attempts, attempts, entry_ids FROM awa.claim_v1('q', %s, NULL, 9)", (runtime,)
    )
    details, max_attempts, attempts, entry_ids = row.fetchall()[0]
    assert details[0] is None
    assert details[1] == '{"tags" : ["a","b"], "metadata" : {"m": 1}, "timeout_ms" : 500}'
    assert (max_attempts, attempts, entry_ids) == ([25, 3], None, None)


def test_long_details_and_kinds_count_like_bodies(conn: Conn) -> None:
    """A thousand jobs with a kilobyte of metadata each do not fit a socket's buffer: the server would wait for a frozen
    client while it holds the queue. Counting args alone, one claim brings all of them: tried."""
    runtime = register(conn)
    conn.execute(
        "INSERT INTO awa.jobs (queue, kind, args, metadata)"
        " SELECT 'q', repeat('k', 150), json_build_object('n', n), json_build_object('m', repeat('x', 1000))"
        "   FROM generate_series(1, 300) n"
    )
    first = claim(conn, runtime, limit=300)
    assert 50 < len(first.members) < 131072 // 1150
    assert first.numbers + claim_in_steps(conn, runtime, limit=300) == list(range(1, 301))
