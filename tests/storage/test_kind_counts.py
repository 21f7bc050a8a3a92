"""Counts of kinds: what a sample tells and what it cannot, since when the oldest waits, and which kinds there are."""

from __future__ import annotations

import psycopg
import pytest

from awa.admin import Admin
from awa.errors import KindNotFound
from awa.job import JobState
from awa.storage import kinds, queues
from awa.storage.queues import Count
from tests.storage.engine import Conn, Outcome, claim, complete, insert, register, settle

NOTHING = {state: Count(0, True) for state in JobState}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that little is beyond."""
    monkeypatch.setattr(queues, "EXACT_LIMIT", 1000)
    monkeypatch.setattr(kinds, "SAMPLE_PAGES", 100)


def fill(conn: Conn, count: int, *, queue: str = "q", of: int = 1) -> None:
    """Jobs of so many kinds in turn; one in a thousand has a kind of its own."""
    conn.execute(
        "INSERT INTO awa.jobs (queue, kind)"
        " SELECT %(queue)s, CASE WHEN n %% 1000 = 500 THEN 'rare_' || n ELSE 'kind_' || n %% %(of)s END"
        "   FROM generate_series(1, %(count)s) n",
        {"queue": queue, "of": of, "count": count},
    )


def be_complete(conn: Conn, queue: str = "q") -> None:
    """Claim all that a queue has, and complete it: one in fifty by itself."""
    runtime = register(conn)
    while members := claim(conn, runtime, queue=queue, limit=1000).members:
        for member in members[::50]:
            complete(conn, member)
        settle(conn, runtime, [member for number, member in enumerate(members) if number % 50])
    # the newest heartbeat knows of none that is open
    conn.execute("UPDATE awa.runtime_instances SET newest_claim = (SELECT max(claim_id) FROM awa.claims)")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("state", ["available", "scheduled", "failed", "completed"])
def test_many_jobs_are_estimated_and_a_rare_kind_is_not_said_to_have_none(
    conn: Conn, admin: Admin, state: JobState
) -> None:
    fill(conn, 60_000, of=4)
    if state == "scheduled":
        conn.execute(
            "INSERT INTO awa.waiting_jobs (run_at, queue, kind)"
            " SELECT now() + interval '1 h', queue, kind FROM awa.jobs"
        )
    if state == "failed":
        conn.execute(
            "INSERT INTO awa.ended_jobs (id, created_at, priority, attempt, max_attempts, state, queue, kind, args)"
            " SELECT id, now(), 2, 1, 1, 'failed', queue, kind, '{}' FROM awa.jobs"
        )
    if state == "completed":
        be_complete(conn)
    elif state != "available":
        conn.execute("TRUNCATE awa.jobs")
    counts = admin.kind_counts()
    for name in ("kind_0", "kind_1", "kind_2", "kind_3"):
        count = counts[name][JobState(state)]
        assert not count.is_exact
        assert 12_000 < count.value < 18_000, count
        assert all(counts[name][other] == Count(0, True) for other in JobState if other != state)
    met = {name for name in counts if name.startswith("rare_")}
    everything = {f"rare_{n}" for n in range(500, 60_000, 1000)}
    assert met < everything
    rare = min(everything - met)
    expected = NOTHING | {JobState(state): Count(0, False)}
    assert admin.kind_counts(rare) == {rare: expected}
    with pytest.raises(KindNotFound, match="not all jobs were looked at, and none of these is of it"):
        admin.get_kind(rare)
    # an attempt of it was gathered since
    conn.execute(
        "INSERT INTO awa.statistics (step, subject, starts_at, name, completed, retried, snoozed, failed, cancelled,"
        " rescued, is_sampled) VALUES ('hour', 'kind', date_trunc('hour', now()), %s, 1, 0, 0, 0, 0, 0, false)",
        (rare,),
    )
    info = admin.get_kind(rare)
    assert (info.counts, info.oldest_at, info.queues) == (expected, None, {})
    assert {one.name for one in admin.list_kinds()} == counts.keys() | {rare}


@pytest.mark.usefixtures("small")
def test_a_small_queue_is_counted_beside_a_large_one(conn: Conn, admin: Admin) -> None:
    fill(conn, 30_000, of=2)
    insert(conn, *range(5), kind="kind_0", queue="little")
    insert(conn, *range(7), kind="other", queue="little")
    runtime = register(conn)
    members = claim(conn, runtime, queue="little", limit=8).members
    settle(conn, runtime, members[:5], [Outcome(members[5], "failed")])
    found = admin.get_queue("little").kinds
    assert found is not None
    assert {name: depth.counts for name, depth in found.items()} == {
        "kind_0": NOTHING | {JobState.COMPLETED: Count(5, True)},
        "other": NOTHING
        | {
            JobState.FAILED: Count(1, True),
            JobState.RUNNING: Count(2, True),
            JobState.AVAILABLE: Count(4, True),
        },
    }
    # all queues together are as sure as the least sure of them
    info = admin.get_kind("other")
    assert info.counts[JobState.AVAILABLE] == Count(4, False)
    assert info.counts[JobState.RUNNING] == Count(2, True)
    assert list(info.queues) == ["little"] and info.queues["little"] == found["other"]


@pytest.mark.usefixtures("small")
def test_many_that_run_are_estimated_from_some(conn: Conn, admin: Admin) -> None:
    conn.execute("INSERT INTO awa.jobs (queue, kind) SELECT 'q', 'kind_' || n % 2 FROM generate_series(1, 4000) n")
    runtime = register(conn)
    members = [member for _ in range(4) for member in claim(conn, runtime, limit=1000).members]
    assert len(members) == 4000
    counts = admin.kind_counts()
    for name in ("kind_0", "kind_1"):
        assert 1000 < counts[name][JobState.RUNNING].value < 3000
        assert not counts[name][JobState.RUNNING].is_exact
        assert counts[name][JobState.COMPLETED] == Count(0, True)
    assert admin.kind_counts("rare")["rare"] == NOTHING | {JobState.RUNNING: Count(0, False)}
    settle(conn, runtime, members[:3500])
    counts = admin.kind_counts()
    assert sum(counts[name][JobState.RUNNING].value for name in counts) == 500
    assert sum(counts[name][JobState.COMPLETED].value for name in counts) == 3500


def test_the_oldest_is_told_when_it_is_known(conn: Conn, admin: Admin) -> None:
    """Guard: behind the first 500 of a lane there may be an older one than in the head of another."""

    def since(kind: str) -> str | None:
        oldest_at = admin.get_kind(kind).oldest_at
        return None if oldest_at is None else oldest_at.strftime("%H:%M:%S")

    def put(kind: str, count: int, at: str, lane: int) -> None:
        conn.execute(
            "INSERT INTO awa.jobs (queue, kind, lane, priority, available_at)"
            " SELECT 'q', %s, %s, %s, %s::timestamptz FROM generate_series(1, %s)",
            (kind, lane, lane // 2, f"2026-01-01 {at}+00", count),
        )

    put("many", 400, "10:00:00", 5)
    put("late", 1, "10:00:01", 5)
    assert (since("many"), since("late")) == ("10:00:00", "10:00:01")
    put("many", 400, "10:00:02", 5)
    put("hidden", 1, "10:00:03", 5)
    assert (since("many"), since("late"), since("hidden")) == ("10:00:00", "10:00:01", None)
    assert admin.get_kind("hidden").counts[JobState.AVAILABLE] == Count(1, True)
    put("hidden", 1, "10:00:04", 3)  # in the head of another lane, and younger than what may lie behind
    assert since("hidden") is None
    put("old", 1, "09:59:59", 3)
    assert since("old") == "09:59:59"
    members = claim(conn, register(conn), limit=500).members
    assert {member.kind for member in members} == {"many", "late", "hidden", "old"}
    assert (since("many"), since("late"), since("hidden")) == ("10:00:02", None, "10:00:03")


def test_a_queue_that_is_named_twice_is_counted_once(conn: Conn) -> None:
    insert(conn, 1, 2)
    counted = conn.execute("SELECT n, is_exact FROM awa.kind_counts_v1(ARRAY['q', 'q'])").fetchall()
    assert counted == [(2, True)]


@pytest.mark.parametrize("limits", ["0, 1", "1, 0", "-5, 10", "NULL, 10", "10, NULL"])
def test_limits_that_are_none_are_refused(conn: Conn, limits: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="give at least 1 of each"):
        conn.execute(f"SELECT * FROM awa.kind_counts_v1(NULL, NULL, {limits})")


def test_running_jobs_of_a_claim_that_is_half_done_are_counted_by_kind(conn: Conn, admin: Admin) -> None:
    fill(conn, 300, of=3)
    runtime = register(conn)
    settle(conn, runtime, claim(conn, runtime, limit=300).members[:150])
    counts = admin.kind_counts()
    assert {name: of_kind[JobState.RUNNING] for name, of_kind in counts.items() if name.startswith("kind")} == {
        f"kind_{n}": Count(50, True) for n in range(3)
    }


def test_a_kind_that_nobody_describes_or_handles_is_there_while_it_has_jobs(conn: Conn, admin: Admin) -> None:
    with pytest.raises(
        KindNotFound, match="no kind 'new' is known: it has no jobs, none had an attempt in the last 24 hours, nothing"
    ):
        admin.get_kind("new")
    insert(conn, 1, 2, kind="new")
    [info] = admin.list_kinds()
    assert (info.name, info.descriptor, info.live_runtimes) == ("new", None, 0)
    assert info.oldest_at is not None
    claim(conn, register(conn), kinds=["old"])  # which sets them aside
    [info] = admin.list_kinds()
    assert info.counts == NOTHING | {JobState.AVAILABLE: Count(2, True)}
    assert info.oldest_at is None  # nobody waits in line
    assert admin.list_queues()[0].kinds is None  # which costs as much again
    assert admin.kind_counts(queue="other") == {}
    assert admin.kind_counts("new", queue="other") == {"new": NOTHING}
