"""Counts of queues: exact where that is cheap, marked as estimates where not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from awa.admin import Admin
from awa.job import JobState
from awa.storage import queues
from awa.storage.queues import Count
from tests.storage.engine import (
    COME_AGAIN,
    Conn,
    claim,
    complete,
    end_unclaimed,
    fall_silent,
    fence,
    insert,
    register,
    rescue,
    transaction,
)
from tests.storage.lives import listed


def available(conn: Conn, n: int) -> None:
    conn.execute("INSERT INTO awa.jobs (queue, kind) SELECT 'q', 'noop' FROM generate_series(1, %s)", (n,))


def scheduled(conn: Conn, n: int) -> None:
    conn.execute(
        "INSERT INTO awa.waiting_jobs (run_at, queue, kind)"
        " SELECT now() + interval '1 h', 'q', 'noop' FROM generate_series(1, %s)",
        (n,),
    )


def failed(conn: Conn, n: int) -> None:
    conn.execute(
        "INSERT INTO awa.ended_jobs (id, created_at, priority, attempt, max_attempts, state, queue, kind, args)"
        " SELECT n, now(), 2, 1, 1, 'failed', 'q', 'noop', '{}' FROM generate_series(1, %s) n",
        (n,),
    )


def completed(conn: Conn, n: int, *, size: int = 1000) -> None:
    """Claims of *size* jobs and one of the rest; the last of each ended in its handler's transaction."""
    runtime = register(conn)
    conn.execute("TRUNCATE awa.claims, awa.completions, awa.attempt_ends")
    conn.execute(
        "INSERT INTO awa.claims (claim_id, runtime, nonce, slot, lane, queue, frontier, entry_ids, xids)"
        " SELECT nextval('awa.claim_id_seq'), %(runtime)s, 0, g %% 8, 5, 'q', '{}',"
        "        ARRAY(SELECT generate_series(g * %(size)s + 1, least((g + 1) * %(size)s, %(n)s))),"
        "        ARRAY(SELECT '3'::xid8 FROM generate_series(g * %(size)s + 1, least((g + 1) * %(size)s, %(n)s)))"
        "   FROM generate_series(0, (%(n)s - 1) / %(size)s) g",
        {"runtime": runtime, "size": size, "n": n},
    )
    conn.execute(
        "INSERT INTO awa.completions (claim_id, flush, slot, idx, elapsed_ms)"
        " SELECT claim_id, 1, slot, ARRAY(SELECT i::smallint FROM generate_series(1, cardinality(entry_ids) - 1) i),"
        "        ARRAY(SELECT 1 FROM generate_series(1, cardinality(entry_ids) - 1)) FROM awa.claims"
    )
    conn.execute(
        "INSERT INTO awa.attempt_ends (entry_id, claim_id, id, slot, outcome)"
        " SELECT entry_ids[cardinality(entry_ids)], claim_id, 1, slot, 'completed' FROM awa.claims"
    )
    # the newest heartbeat knows of none that is open
    conn.execute("UPDATE awa.runtime_instances SET newest_claim = (SELECT max(claim_id) FROM awa.claims)")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that little is beyond."""
    monkeypatch.setattr(queues, "EXACT_LIMIT", 1000)
    monkeypatch.setattr(queues, "CLAIM_LIMIT", 200)
    monkeypatch.setattr(queues, "SAMPLE_PAGES", 5)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("fill", [available, scheduled, failed])
def test_counts_are_exact_up_to_the_limit(conn: Conn, admin: Admin, fill: Callable[[Conn, int], None]) -> None:
    for more, expected in ((999, 999), (1, 1000), (1, 1001)):
        if fill is failed and expected > 999:
            conn.execute("UPDATE awa.ended_jobs SET id = id + %s", (10_000 * expected,))
        fill(conn, more)
        count = admin.queue_counts()["q"][JobState(fill.__name__)]
        assert count.is_exact == (expected <= 1000)
        assert count == Count(expected, True) if expected <= 1000 else count.value >= 1001


@pytest.mark.usefixtures("small")
def test_completed_jobs_are_counted_up_to_so_many_claims(conn: Conn, admin: Admin) -> None:
    # no entries stand behind these, only their claims
    conn.execute("INSERT INTO awa.waiting_jobs (run_at, queue, kind) VALUES (now(), 'q', 'noop')")
    for n, size in ((199, 1), (200, 1), (2000, 10), (2010, 10)):
        completed(conn, n, size=size)
        count = admin.queue_counts()["q"][JobState.COMPLETED]
        assert count == Count(n, True) if n < 2010 else not count.is_exact and count.value >= 2000


def test_what_a_small_table_holds_is_counted(conn: Conn, admin: Admin) -> None:
    """However much more than the limit that is."""
    for fill in (available, scheduled, failed):
        fill(conn, queues.EXACT_LIMIT + 2)
    counts = admin.queue_counts()["q"]
    for state in (JobState.AVAILABLE, JobState.SCHEDULED, JobState.FAILED):
        assert counts[state] == Count(queues.EXACT_LIMIT + 2, True)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("fill", [available, scheduled, failed])
def test_estimates_come_from_some_pages_and_leave_out_what_does_not_count(
    conn: Conn, admin: Admin, monkeypatch: pytest.MonkeyPatch, fill: Callable[[Conn, int], None]
) -> None:
    """Also of a queue that has a fiftieth of the table, side by side or strewn in."""
    monkeypatch.setattr(queues, "SAMPLE_PAGES", 100)
    fill(conn, 60_000)
    expected, others = 60_000, {}
    if fill is available:
        runtime = register(conn)
        for _ in range(10):
            claim(conn, runtime, limit=1000)
        conn.execute(
            "INSERT INTO awa.attempt_ends (entry_id, id, slot, outcome)"
            " SELECT entry_id, id, slot, 'moved' FROM awa.jobs WHERE entry_id > 40000 AND entry_id <= 60000"
        )
        conn.execute(
            "INSERT INTO awa.jobs (queue, kind)"
            " SELECT CASE WHEN n > 28800 THEN 'beside' WHEN n %% 20 = 0 THEN 'strewn' ELSE 'most' END, 'x'"
            "   FROM generate_series(1, 30000) n",
            (),
        )
        expected, others = 30_000, {"most": 27_360, "beside": 1_200, "strewn": 1_440}
    counts = admin.queue_counts()
    for name, true in {"q": expected, **others}.items():
        count = counts[name][JobState(fill.__name__)]
        assert not count.is_exact
        margin = 0.1 if true > 10_000 else 0.5
        assert (1 - margin) * true < count.value < (1 + margin) * true, (name, count)


@pytest.mark.usefixtures("small")
def test_estimates_of_completed_jobs_follow_their_claims(
    conn: Conn, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "SAMPLE_PAGES", 50)
    completed(conn, 40_000, size=10)
    count = admin.queue_counts("q")["q"][JobState.COMPLETED]
    assert not count.is_exact
    assert 36_000 < count.value < 44_000


@pytest.mark.usefixtures("small")
def test_what_was_cancelled_is_not_looked_through_for_ever(conn: Conn, admin: Admin) -> None:
    available(conn, 3000)
    conn.execute(
        "INSERT INTO awa.attempt_ends (entry_id, id, slot, outcome) SELECT entry_id, id, slot, 'moved' FROM awa.jobs"
    )
    count = admin.queue_counts("q")["q"][JobState.AVAILABLE]
    assert (count.value, count.is_exact) == (0, False)


@pytest.mark.usefixtures("small")
def test_claims_without_successes_are_not_looked_through_for_ever(conn: Conn, admin: Admin) -> None:
    runtime = register(conn)
    conn.execute(
        "INSERT INTO awa.claims (claim_id, runtime, nonce, slot, lane, queue, frontier, entry_ids, xids)"
        " SELECT nextval('awa.claim_id_seq'), %s, 0, 0, 5, 'q', '{}', '{}', '{}' FROM generate_series(1, 1000)",
        (runtime,),
    )
    count = admin.queue_counts("q")["q"][JobState.COMPLETED]
    assert not count.is_exact


def test_a_claim_that_starts_nothing_says_come_again_and_hides_no_count(conn: Conn, admin: Admin) -> None:
    runtime = register(conn)
    ids = insert(conn, *range(50))
    end_unclaimed(conn, ids[:45])
    assert admin.queue_counts()["q"][JobState.AVAILABLE] == Count(5, True)
    assert claim(conn, runtime, limit=2).flags & COME_AGAIN
    assert admin.queue_counts()["q"][JobState.AVAILABLE] == Count(5, True)
    assert listed(admin, JobState.AVAILABLE) == ids[:44:-1]


def test_an_open_transaction_that_completes_leaves_the_job_running(conn: Conn, other: Conn, admin: Admin) -> None:
    runtime = register(conn)
    [id_] = insert(conn, 1)
    [member] = claim(conn, runtime).members
    with transaction(other):
        complete(other, member)
        assert listed(admin, JobState.RUNNING) == [id_]
        other.execute("COMMIT")
    assert listed(admin, JobState.COMPLETED) == [id_]
    assert listed(admin, JobState.RUNNING) == []


def test_a_runtime_that_has_left_has_nothing_running(conn: Conn, admin: Admin) -> None:
    runtime = register(conn)
    [id_] = insert(conn, 1)
    claim(conn, runtime)
    assert listed(admin, JobState.RUNNING) == [id_]
    fall_silent(conn, runtime)
    fence(conn, runtime)
    assert listed(admin, JobState.RUNNING) == [id_]  # until it is rescued
    rescue(conn, runtime)
    assert listed(admin, JobState.RUNNING) == []
    assert listed(admin, JobState.AVAILABLE) == [id_]
