"""Traps of the walk: what hides live jobs, starts them twice, or makes every poll read what the last one read.

Bounds are counts of what is read, never times. Each docstring names the guard and what was seen without it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.storage.engine import (
    COME_AGAIN,
    Claimed,
    Conn,
    claim,
    claim_in_steps,
    end_unclaimed,
    insert,
    register,
    scalar,
    transaction,
)
from tests.storage.test_claim import index_entries_read
from tests.storage.test_plans import Explained, Plan, check

THOUSANDS = 4_000

BLOCKS = 1_500
"""Most that a claim touches: some for each partition of each lane's walk, and every block of rows it looks at."""


class Reads:
    """Counts what claims read of ``awa.jobs``, in index entries and blocks."""

    def __init__(self, conn: Conn) -> None:
        self._explained = Explained(conn)
        conn.execute("SET auto_explain.log_buffers = on")
        conn.execute("SET jit = off")
        self.conn = conn
        self.plans: list[Plan] = []
        """Of the last claim."""

    def claim(self, runtime: int, *, limit: int = 100) -> Claimed:
        """A claim that is watched."""
        with self._explained.watch() as self.plans:
            return claim(self.conn, runtime, limit=limit)

    @property
    def rows(self) -> int:
        """Rows that the scans of the last claim produced or threw away."""
        return sum(plan.rows_read() for plan in self.plans)

    @property
    def blocks(self) -> int:
        """Blocks that the last claim's statements touched; also those of rows that nobody may see yet."""
        return sum(plan.root["Shared Hit Blocks"] + plan.root["Shared Read Blocks"] for plan in self.plans)

    def check(self, *, rows: int, blocks: int) -> None:
        check(self.plans, most_rows=rows)
        assert self.blocks <= blocks


@pytest.fixture
def reads(conn: Conn) -> Reads:
    return Reads(conn)


def many(conn: Conn, number: int) -> list[int]:
    """The ids of many jobs with n = 0, in one statement."""
    rows = conn.execute(
        "INSERT INTO awa.jobs (queue, kind, args) SELECT 'q', 'noop', '{\"n\": 0}' FROM generate_series(1, %s)"
        " RETURNING id",
        (number,),
    ).fetchall()
    return [row[0] for row in rows]


# Entries that ended before anybody claimed them


def test_thousands_of_ended_jobs_at_the_head_and_in_the_middle_are_walked_over_once(conn: Conn, reads: Reads) -> None:
    """Guard: a round that met only ended entries writes a claim row with its position, and the next goes on from there.

    Without that row every round begins at the head again, and the claims go on for ever: tried.
    """
    runtime = register(conn)
    head = many(conn, THOUSANDS)
    insert(conn, 1)
    middle = many(conn, THOUSANDS)
    insert(conn, 2)
    end_unclaimed(conn, head)
    end_unclaimed(conn, middle)
    found: list[int] = []
    rows = claims = 0
    while found != [1, 2]:
        claimed = reads.claim(runtime, limit=100)
        found += claimed.numbers
        assert claimed.members or claimed.flags == COME_AGAIN
        rows, claims = rows + reads.rows, claims + 1
        assert claims < 20
    assert rows < 2.5 * 2 * THOUSANDS  # each entry and its end, and a little for each round
    assert reads.claim(runtime).flags == 0
    reads.check(rows=20, blocks=BLOCKS)


def test_the_order_of_lanes_by_age_is_found_without_walking_over_ended_jobs(conn: Conn, reads: Reads) -> None:
    """Guard: a lane is as old as its first entries are. Without it a claim a second reads all ended ones, each time."""
    runtime = register(conn)
    ended = many(conn, THOUSANDS)
    insert(conn, 1)
    assert len(claim(conn, runtime, limit=10).members) == 10  # and many are left: the lane is cut short
    end_unclaimed(conn, ended[10:])
    conn.execute("SELECT pg_sleep(1.01)")  # ages are looked at in the first claim of a second
    reads.claim(runtime, limit=10)
    assert any("h.aged" in plan.query for plan in reads.plans)
    assert reads.rows <= 20 * 2 * 10 + 100  # twenty rounds of ended entries and their ends, and a little for each


def test_late_transactions_with_thousands_of_ended_jobs_are_walked_over_once(
    conn: Conn, other: Conn, third: Conn, reads: Reads
) -> None:
    """Guard: the position clips the ranges of late transactions as it clips the last one.

    Without the clip every claim walks the late transactions from their beginning, for ever: tried.
    """
    runtime = register(conn)
    with transaction(other), transaction(third):
        ids = many(other, THOUSANDS)
        insert(other, 1)
        more = many(third, THOUSANDS)
        insert(third, 2)
        insert(conn, 0)
        assert claim(conn, runtime).numbers == [0]
        third.execute("COMMIT")
        other.execute("COMMIT")
    end_unclaimed(conn, ids)
    end_unclaimed(conn, more)
    insert(conn, 3)
    found: list[int] = []
    rows = claims = 0
    while found != [1, 2, 3]:
        found += reads.claim(runtime, limit=100).numbers
        rows, claims = rows + reads.rows, claims + 1
        assert claims < 20
    assert rows < 2.5 * 2 * THOUSANDS
    assert claim_in_steps(conn, runtime, limit=100) == []


def test_a_batch_that_is_full_of_ended_jobs_keeps_its_page(conn: Conn, other: Conn) -> None:
    """Guard: only a walk that was exhausted replaces the page; a full one goes on in it, whatever its entries were.

    With the page replaced after a full batch of ended jobs, the live ones behind them never start: tried.
    """
    runtime = register(conn)
    with transaction(other):
        insert(other, 9)  # so that the page has a writer in it
        ids = insert(conn, *range(6))
        end_unclaimed(conn, ids[:3])
        assert claim(conn, runtime, limit=3).numbers == [3, 4, 5]
        other.execute("COMMIT")
    assert claim(conn, runtime, limit=3).numbers == [9]


# Open transactions


@pytest.mark.slow
def test_a_million_uncommitted_jobs_at_the_head_are_not_read(conn: Conn, other: Conn, reads: Reads) -> None:
    """Guard: the walk goes in the gaps between the open transactions.

    With visibility as a filter alone, each poll touches every block of theirs, 16,400 instead of some hundreds: tried.
    With gaps that end at (x, -1), a claim in front of them touches 5,120 before PostgreSQL 18: tried.
    """
    runtime = register(conn)
    insert(conn, 1)
    assert claim(conn, runtime).numbers == [1]
    with transaction(other):
        other.execute("INSERT INTO awa.jobs (queue, kind) SELECT 'q', 'noop' FROM generate_series(1, 1000000)")
        insert(conn, 2, 3)
        for expected in ([2], [3], [], []):
            assert reads.claim(runtime, limit=1).numbers == expected
            reads.check(rows=20, blocks=BLOCKS)
        other.execute("ROLLBACK")
    assert claim(conn, runtime).numbers == []


def test_what_is_between_open_writers_is_found_without_reading_theirs(
    conn: Conn, third: Conn, open_connection: Callable[[], Conn]
) -> None:
    """Guard: the first four open transactions cut the page; what the others wrote is read once, on the way.

    Without the cuts the way to each job leads through what its neighbour has written: tried.
    """
    runtime = register(conn)
    third.execute("SET stats_fetch_consistency = none")
    writers = [open_connection() for _ in range(6)]
    for n, writer in enumerate(writers):
        writer.execute("BEGIN")
        many(writer, THOUSANDS)
        insert(writer, 100 + n)
        insert(conn, n)

    def read(limit: int) -> tuple[list[int], int]:
        before = index_entries_read(conn, third)
        found = claim(conn, runtime, limit=limit).numbers
        return found, index_entries_read(conn, third) - before

    for n in range(4):
        found, entries = read(1)
        assert found == [n]
        assert entries < 50
    for n in range(4, 6):
        found, entries = read(1)
        assert found == [n]
        assert entries < THOUSANDS + 50
    insert(conn, 6)
    assert read(10)[0] == [6]  # ends the page
    for _ in range(3):
        found, entries = read(10)
        assert found == []
        assert entries < 50
    for writer in writers:
        writer.execute("COMMIT")
    late = claim_in_steps(conn, runtime, limit=1000)
    assert [n for n in late if n] == [100 + n for n in range(6)]
    assert len(late) == 6 * (THOUSANDS + 1)


@pytest.mark.slow
def test_150_writers_that_come_to_nothing_are_looked_for_once(
    conn: Conn, open_connection: Callable[[], Conn], reads: Reads
) -> None:
    """Guard: an empty walk that was not cheap stores its end, at most once a second.

    Without that every idle poll looks for the jobs of each of the 150 transactions again, in every lane: tried.
    """
    runtime = register(conn)
    writers = [open_connection() for _ in range(150)]
    for n, writer in enumerate(writers):
        writer.execute("BEGIN")
        insert(writer, n)
    insert(conn, 1000)
    assert claim(conn, runtime).numbers == [1000]
    for writer in writers[:149]:
        writer.execute("ROLLBACK")
    insert(conn, 0, queue="other")
    blocks = []
    rows = []
    for ago in ("-1 h", "1 h", "-1 h", "-1 h"):
        conn.execute("UPDATE awa.claims SET claimed_at = clock_timestamp() - %s::interval", (ago,))
        before = scalar(conn, "SELECT count(*) FROM awa.claims")
        assert reads.claim(runtime).members == []
        rows.append(scalar(conn, "SELECT count(*) FROM awa.claims") - before)
        blocks.append(reads.blocks)
    assert rows == [0, 1, 0, 0]  # within a second of the last claim it looks again, then it has stored that it did
    assert min(blocks[:2]) > 5 * max(blocks[2:])
    writers[149].execute("COMMIT")
    assert claim(conn, runtime).numbers == [149]
