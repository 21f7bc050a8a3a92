"""Statistics: every attempt is counted once, whoever gathers, and what is read is what there was.

Random histories are in ``model/gathering.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from awa.admin import Admin
from awa.errors import PermissionDenied
from awa.storage import gathering, ring, statistics
from awa.storage.migrate import load_migrations, migrate
from awa.storage.snapshot import one_snapshot
from awa.storage.statistics import Percentiles
from awa.worker.maintenance.ring import Ring
from awa.worker.maintenance.statistics import PAUSE, Statistics
from tests.storage.engine import (
    AWA,
    Conn,
    Outcome,
    claim,
    complete,
    end_unclaimed,
    insert,
    register,
    scalar,
    settle,
    transaction,
)

WITHIN = 2 ** (1 / 8) - 1 + 1e-9
"""How far a time may be from the exact one, relatively."""

Open = Callable[[], Conn]


def gather(conn: Conn) -> None:
    for _ in Statistics(AWA).gather(conn):
        pass


def finish(steps: Generator[None, None, None]) -> None:
    for _ in steps:
        pass


def run(conn: Conn, runtime: int, jobs: int, *, queue: str = "q", kind: str = "noop", limit: int = 100) -> None:
    """Insert jobs and complete them, in claims of *limit*."""
    insert(conn, *range(jobs), queue=queue, kind=kind)
    while members := claim(conn, runtime, queue=queue, limit=limit).members:
        settle(conn, runtime, members)


def completed(admin: Admin, name: str = "q", by: statistics.Subject = "queue") -> int:
    """In the last hour."""
    [found] = admin.statistics(by, name=name)
    assert found.name == name
    return found.windows["1h"].completed


def test_every_way_to_end_counts_once_and_what_never_began_does_not(conn: Conn, other: Conn, admin: Admin) -> None:
    runtime = register(conn)
    insert(conn, *range(12), kind="a")
    insert(conn, *range(4), kind="b")
    members = claim(conn, runtime).members
    end_unclaimed(conn, insert(conn, 99))
    gather(conn)
    assert (len(members), scalar(conn, "SELECT left_open FROM awa.statistics_claims")) == (16, 16)
    assert completed(admin) == 0
    settle(conn, runtime, members[:2])
    with transaction(other):
        complete(other, members[2])
        gather(conn)
        assert completed(admin) == 2
        other.execute("COMMIT")
    outcomes = ("retried", "retried", "snoozed", "failed", "cancelled", "rescued", "released")
    settle(conn, runtime, members[12:], [Outcome(m, o) for m, o in zip(members[3:10], outcomes, strict=True)])
    for _ in range(2):
        gather(conn)
    expected = {"started": 13, "completed": 7, "retried": 2, "snoozed": 1, "failed": 1, "cancelled": 1, "rescued": 1}
    [found] = admin.statistics()
    assert list(found.windows) == ["15m", "1h", "24h"]
    for window in found.windows.values():
        assert {name: getattr(window, name) for name in expected} == expected
        assert not window.is_sampled
        assert window.run_ms == Percentiles(1.0, 1.0, 1.0, 1.0)
        assert window.wait_ms is not None
        assert 0 < window.wait_ms.p50 <= window.wait_ms.p99 <= window.wait_ms.max
    assert [(one.name, one.windows["15m"].completed) for one in admin.statistics("kind")] == [("a", 3), ("b", 4)]
    assert scalar(conn, "SELECT left_open FROM awa.statistics_claims") == 2
    settle(conn, runtime, members[10:12])
    gather(conn)
    assert completed(admin) == 9
    assert completed(admin, "nobody") == 0
    assert conn.execute("SELECT FROM awa.statistics_claims").fetchall() == []


def test_a_claim_that_commits_late_is_counted(conn: Conn, other: Conn, admin: Admin) -> None:
    """Its number is lower than that of others which were counted before."""
    runtime = register(conn)
    insert(conn, 1, 2, queue="late")
    with transaction(other):
        late = claim(other, runtime, queue="late").members
        run(conn, runtime, 3)
        gather(conn)
        assert (completed(admin), completed(admin, "late")) == (3, 0)
        other.execute("COMMIT")
    settle(conn, runtime, late)
    run(conn, runtime, 4)
    gather(conn)
    assert (completed(admin), completed(admin, "late")) == (7, 2)


def test_a_leader_that_comes_back_late_adds_nothing_twice(conn: Conn, other: Conn, third: Conn, admin: Admin) -> None:
    runtime = register(conn)
    [first, second, third_] = [insert(conn, *range(5), queue=queue) for queue in ("a", "b", "c")]
    assert first and second and third_
    members = {queue: claim(conn, runtime, queue=queue).members for queue in ("a", "b", "c")}
    gather(conn)
    for step in range(6):  # the old leader stops behind so many statements, as frozen processes do
        stale = Statistics(AWA).gather(other)
        for _ in range(step):
            next(stale, None)
        for some in members.values():
            if step < 5:
                settle(conn, runtime, [some[step]])
        gather(conn)
        run(conn, runtime, 1, queue="b")
        finish(stale)
    gather(conn)
    assert [completed(admin, queue) for queue in ("a", "b", "c")] == [5, 11, 5]
    # while one adds, another that comes in between leaves it to that one
    run(conn, runtime, 2)
    before = scalar(conn, "SELECT reached_at FROM awa.statistics_progress")
    with transaction(third):
        third.execute(gathering.HOLD)
        gather(conn)
        assert completed(admin) == 0
    assert scalar(conn, "SELECT reached_at FROM awa.statistics_progress") == before
    gather(conn)
    assert completed(admin) == 2
    assert scalar(conn, "SELECT reached_at FROM awa.statistics_progress") > before


def exact(times: list[float]) -> tuple[float, float, float]:
    """Percentiles by nearest rank."""
    times = sorted(times)
    p50, p95, p99 = (times[-(-len(times) * q // 100) - 1] for q in (50, 95, 99))
    return p50, p95, p99


def near(found: Percentiles | None, times: list[float], within: float) -> bool:
    assert found is not None
    pairs = zip((found.p50, found.p95, found.p99), exact(times), strict=True)
    return all(abs(told - true) <= within * true for told, true in pairs)


def test_percentiles_are_as_exact_as_their_buckets_and_samples_stand_for_all(conn: Conn, admin: Admin) -> None:
    runtime = register(conn)
    conn.execute("SELECT setseed(0.5)")

    def run_times(queue: str, jobs: int, limit: int) -> tuple[list[float], list[float]]:
        """Waits and runs of new jobs, of all magnitudes."""
        insert(conn, *range(0, jobs, 2), queue=queue, kind=f"{queue} even")
        insert(conn, *range(1, jobs, 2), queue=queue, kind=f"{queue} odd")
        while members := claim(conn, runtime, queue=queue, limit=limit).members:
            settle(conn, runtime, members)
        conn.execute(
            "UPDATE awa.completions x SET elapsed_ms = ARRAY(SELECT exp(random() * 12)::integer FROM unnest(x.idx) i)"
            " FROM awa.claims c WHERE c.slot = x.slot AND c.claim_id = x.claim_id AND c.queue = %s",
            [queue],
        )
        members = "(SELECT c.claimed_at, unnest(c.entry_ids) AS entry_id FROM awa.claims c WHERE c.queue = %s) m"
        waits = conn.execute(
            "UPDATE awa.jobs j SET available_at = m.claimed_at - interval '1 ms' * exp(random() * 18)"
            f" FROM {members} WHERE j.entry_id = m.entry_id"
            " RETURNING extract(epoch FROM m.claimed_at - j.available_at)::float8 * 1000",
            [queue],
        ).fetchall()
        runs = conn.execute(
            "SELECT unnest(x.elapsed_ms)::float8 FROM awa.completions x JOIN awa.claims c USING (slot, claim_id)"
            " WHERE c.queue = %s",
            [queue],
        ).fetchall()
        gather(conn)
        return [wait for (wait,) in waits], [run for (run,) in runs]

    waits, runs = run_times("few", 1000, 100)
    [few] = [one.windows["1h"] for one in admin.statistics(name="few")]
    assert (few.completed, few.is_sampled) == (1000, False)
    assert near(few.wait_ms, waits, WITHIN)
    assert near(few.run_ms, runs, WITHIN)
    assert few.wait_ms is not None and few.run_ms is not None
    assert few.run_ms.max == max(runs)
    assert few.wait_ms.max == pytest.approx(max(waits))

    waits, runs = run_times("many", 9_000, 900)
    [many] = [one.windows["1h"] for one in admin.statistics(name="many")]
    assert (many.completed, many.is_sampled) == (9_000, True)
    assert near(many.wait_ms, waits, 0.5)
    assert near(many.run_ms, runs, 0.5)
    kinds = [one.windows["1h"] for one in admin.statistics("kind") if one.name.startswith("many")]
    assert [kind.is_sampled for kind in kinds] == [True, True]
    assert abs(sum(kind.completed for kind in kinds) - 9_000) <= 1
    assert kinds[0].completed == pytest.approx(4_500, rel=0.05)


def at(conn: Conn, when: datetime, admin: Admin, jobs: int = 1) -> None:
    """Jobs of the queue at that have ended at a time, of a claim of its own."""
    runtime = register(conn)
    run(conn, runtime, jobs, queue="at")
    conn.execute(
        "UPDATE awa.completions SET completed_at = %s WHERE claim_id = (SELECT max(claim_id) FROM awa.claims)", [when]
    )
    gather(conn)


def test_steps_are_utc_and_are_deleted_in_time(conn: Conn, admin: Admin) -> None:
    """In zones whose hours are others, and over a change of the clocks."""
    hour = timedelta(hours=1)
    now = datetime(2026, 3, 29, 3, 20, 30, tzinfo=UTC)  # in Prague an hour has been left out at 1:00 UTC
    conn.execute("UPDATE awa.statistics_progress SET began_at = %s", [now - timedelta(days=40)])
    ages = (
        timedelta(minutes=3),
        timedelta(minutes=50),
        2 * hour,
        3 * hour,
        4 * hour,
        22 * hour,
        timedelta(days=29, hours=20),
    )
    for n, age in enumerate(ages):
        conn.execute("SELECT set_config('TimeZone', %s, false)", [("Asia/Kathmandu", "Europe/Prague")[n % 2]])
        at(conn, now - age, admin, jobs=n + 1)
    conn.execute("SET timezone = 'Europe/Prague'")
    for step, seconds in (("minute", 60), ("hour", 3600)):
        odd = "SELECT count(*) FROM awa.statistics WHERE step = %s AND extract(epoch FROM starts_at)::bigint %% %s <> 0"
        assert scalar(conn, odd, step, seconds) == 0
    with one_snapshot(conn, AWA) as look:
        [found] = statistics.read_windows(look, "queue", now=now)
        since = now - 6 * hour
        hours = statistics.read_history(look, "queue", "at", step="hour", since=since, now=now)
        minutes = statistics.read_history(look, "queue", "at", step="minute", now=now)
        all_hours = statistics.read_history(look, "queue", "at", step="hour", now=now)
    assert [window.completed for window in found.windows.values()] == [1, 3, 1 + 2 + 3 + 4 + 5 + 6]
    assert found.windows["15m"].since == datetime(2026, 3, 29, 3, 6, tzinfo=UTC)
    assert found.windows["24h"].since == datetime(2026, 3, 28, 4, 0, tzinfo=UTC)
    assert found.windows["1h"].until == now
    assert found.windows["1h"].per_second == pytest.approx(3 / (59 * 60 + 30))
    assert [window.since for window in hours] == [datetime(2026, 3, 28, 21, tzinfo=UTC) + n * hour for n in range(7)]
    assert [window.completed for window in hours] == [0, 0, 5, 4, 3, 2, 1]
    assert (len(minutes), sum(window.completed for window in minutes)) == (181, 1 + 2 + 3 + 4)
    assert (len(all_hours), sum(window.completed for window in all_hours)) == (721, 28)

    gathering.delete_old(conn, AWA, now=now + 2 * timedelta(days=1) + hour)
    assert scalar(conn, "SELECT count(*) FROM awa.statistics WHERE step = 'minute'") == 0
    assert scalar(conn, "SELECT sum(completed) FROM awa.statistics WHERE step = 'hour' AND subject = 'kind'") == 21
    gathering.delete_old(conn, AWA, now=now + timedelta(days=31))
    assert scalar(conn, "SELECT count(*) FROM awa.statistics") == 0


def test_minutes_stay_for_three_hours(conn: Conn, admin: Admin) -> None:
    now = datetime(2026, 3, 29, 3, 20, 30, tzinfo=UTC)
    for minutes in (179, 180, 181):
        at(conn, now - timedelta(minutes=minutes), admin)
    gathering.delete_old(conn, AWA, now=now)
    kept = conn.execute("SELECT starts_at FROM awa.statistics WHERE step = 'minute' AND subject = 'queue' ORDER BY 1")
    assert [row[0].minute for row in kept] == [20, 21]


def test_history_begins_when_gathering_did(conn: Conn, admin: Admin) -> None:
    conn.execute("UPDATE awa.statistics_progress SET began_at = clock_timestamp()")  # not that of the template
    run(conn, register(conn), 4)
    gather(conn)
    history = admin.statistics_history("kind", "noop", step="minute")
    assert 1 <= len(history) <= 3
    assert sum(window.completed for window in history) == 4
    # the rate of the first day is that of the time since, not of the whole day
    assert admin.statistics()[0].windows["24h"].per_second > 0.01


def test_a_segment_is_counted_before_it_is_emptied_and_goes_when_it_cannot_be(
    conn: Conn, admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = register(conn)
    leader = Ring(AWA, retention=0.0, rotate_after=1e9)

    def empty() -> None:
        ring.rotate(conn, AWA)
        for _ in range(3):
            for seen in leader._seen.values():
                seen.look_at = 0.0
            while leader.run(conn, 0.0) == 0.0:
                pass
        assert scalar(conn, "SELECT count(*) FROM awa.jobs") == 0

    run(conn, runtime, 7)
    empty()
    assert completed(admin) == 7
    # emptied by somebody who does not gather: what was open then is not waited for any longer
    insert(conn, 1, 2)
    members = claim(conn, runtime).members
    gather(conn)
    slot = scalar(conn, "SELECT pg_sequence_last_value('awa.ring_seq')")
    settle(conn, runtime, members)
    ring.rotate(conn, AWA)
    [segment] = [segment for segment in ring.list_segments(conn, AWA) if segment.slot == slot]
    assert ring.prune(conn, AWA, slot, entries=2, file=segment.file) == "pruned"
    gather(conn)
    assert completed(admin) == 7
    assert conn.execute("SELECT FROM awa.statistics_claims").fetchall() == []
    run(conn, runtime, 3)
    conn.execute("ALTER TABLE awa.statistics RENAME TO away")
    empty()
    assert "statistics failed" in caplog.text
    conn.execute("ALTER TABLE awa.away RENAME TO statistics")
    run(conn, runtime, 4)
    gather(conn)
    assert completed(admin) == 11


def test_a_clock_that_is_set_back_hides_nothing_for_good(conn: Conn, admin: Admin) -> None:
    """After a failover, say, the server's clock may be behind the time at which gathering began."""
    run(conn, register(conn), 2)
    gather(conn)
    conn.execute("UPDATE awa.statistics_progress SET began_at = began_at + interval '5 h'")
    conn.execute("UPDATE awa.statistics_progress SET reached_at = began_at")
    assert (completed(admin), completed(admin, "unknown")) == (2, 0)
    assert admin.statistics()[0].windows["1h"].per_second == 0.0
    assert admin.statistics_history("queue", "q", step="minute") == []
    conn.execute("UPDATE awa.statistics_progress SET began_at = began_at - interval '5 h'")
    assert completed(admin) == 2


def test_nobody_waits_for_one_who_locks_the_tables(
    conn: Conn, other: Conn, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rescue and promotion go over the same connection."""
    monkeypatch.setattr("awa.worker.maintenance.statistics.BUDGET", float("inf"))  # a round is one run
    run(conn, register(conn), 2)
    conn.execute("SET statement_timeout = '10s'")
    chore = Statistics(AWA)
    for table in ("statistics", "statistics_progress", "statistics_claims"):
        with transaction(other):
            other.execute(f"LOCK TABLE awa.{table} IN ACCESS EXCLUSIVE MODE")
            assert chore.run(conn, 0.0) >= PAUSE
    chore.run(conn, 0.0)
    assert completed(admin) == 2


def test_workers_gather_and_readers_read(
    conn: Conn, admin: Admin, roles: Callable[[str], str], open_connection: Open
) -> None:
    run(conn, register(conn), 2)
    with psycopg.connect(roles("worker"), autocommit=True) as worker:
        gather(worker)
        gathering.delete_old(worker, AWA)
    with psycopg.connect(roles("reader"), autocommit=True) as reader:
        assert completed(Admin(AWA, lambda: nullcontext(reader))) == 2
    with psycopg.connect(roles("producer"), autocommit=True) as producer, pytest.raises(PermissionDenied):
        Admin(AWA, lambda: nullcontext(producer)).statistics()


def test_what_was_claimed_before_the_migration_is_left_out(empty_database: str) -> None:
    """A day of history would keep a leader busy for long; what is claimed from then on is counted."""
    with psycopg.connect(empty_database, autocommit=True) as conn:
        shipped = load_migrations()
        migrate(conn, AWA, migrations=[one for one in shipped if one.number < 27])
        runtime = register(conn)
        for queue in ("a", "b"):
            run(conn, runtime, 5, queue=queue, limit=2)
        migrate(conn, AWA)
        run(conn, runtime, 3, queue="b")
        gather(conn)
        looking = Admin(AWA, lambda: nullcontext(conn))
        assert (completed(looking, "a"), completed(looking, "b")) == (0, 3)
