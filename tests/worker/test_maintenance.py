"""The maintenance thread: who leads, what wakes it, and that no chore holds another up or loses its way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import psycopg
import pytest

import awa
from awa.storage import runtimes, waiting
from awa.storage.runtimes import Rescued
from awa.storage.schema import Schema
from awa.worker import leader
from awa.worker.leader import LEASE, Leadership
from awa.worker.maintenance import loop, promote, rescue
from awa.worker.maintenance.loop import Chore, Maintenance
from awa.worker.maintenance.promote import Promote
from awa.worker.maintenance.rescue import Rescue
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, ended
from tests.storage import engine

Conn = psycopg.Connection[Any]

AWA = Schema()


class Doing:
    """A chore of the test's own."""

    name = "doing"

    def __init__(self, act: Callable[[Conn], float], *, hears_bell: bool = True) -> None:
        self.hears_bell = hears_bell
        self.runs = threading.Semaphore(0)
        self._act = act

    def run(self, conn: Conn, held_seconds: float) -> float:
        again = self._act(conn)
        self.runs.release()
        return again


@pytest.fixture
def maintain(database: str) -> Iterator[Callable[..., Maintenance]]:
    """Make the maintenance of a runtime: ``maintain(1, [chore], heartbeat=5.0)``. It is stopped at the end."""
    made: list[Maintenance] = []

    def make(runtime: int, chores: list[Chore], *, heartbeat: float = 60.0) -> Maintenance:
        made.append(
            Maintenance(conninfo=database, schema=AWA, heartbeat=heartbeat, identity=lambda: runtime, chores=chores)
        )
        return made[-1]

    yield make
    for maintenance in made:
        assert maintenance.stop(5.0)
        maintenance.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[Conn]:
    """Every connection that maintenance opens."""
    connections: list[Conn] = []
    connect = loop.connect_trusted

    def record(*args: Any, **options: Any) -> Conn:
        connections.append(connect(*args, **options))
        return connections[-1]

    monkeypatch.setattr(loop, "connect_trusted", record)
    return connections


def channels(conn: Conn) -> list[str]:
    return [channel for (channel,) in conn.execute("SELECT pg_listening_channels()").fetchall()]


def ring(conn: Conn, payload: str = "") -> None:
    conn.execute("SELECT pg_notify(awa.channel(), %s)", [payload])


# Who leads


def test_one_leads_until_it_gives_the_lease_up(conn: Conn) -> None:
    first = Leadership(AWA, heartbeat=60.0, identity=lambda: 1)
    assert first.renew(conn)
    assert not Leadership(AWA, heartbeat=60.0, identity=lambda: 2).renew(conn)
    first.drop(conn)
    assert Leadership(AWA, heartbeat=60.0, identity=lambda: 2).renew(conn)
    first.drop(conn)  # what it does not hold any more
    assert not Leadership(AWA, heartbeat=60.0, identity=lambda: 3).renew(conn)


def test_a_follower_looks_again_when_the_lease_expires(conn: Conn) -> None:
    runtimes.hold_lease(conn, AWA, LEASE, 1, seconds=7.0)
    follower = Leadership(AWA, heartbeat=60.0, identity=lambda: 2)
    assert not follower.renew(conn)
    assert follower.seconds_to_renewal <= 7.0 + leader.JITTER * 60.0
    runtimes.hold_lease(conn, AWA, LEASE, 1, seconds=7000.0)
    follower = Leadership(AWA, heartbeat=60.0, identity=lambda: 2)
    assert not follower.renew(conn)
    assert follower.seconds_to_renewal <= 30.0  # it may be given up before


def test_a_follower_takes_over_when_the_lease_of_a_dead_leader_expires(
    conn: Conn, maintain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for its own next renewal, which is an hour away."""
    runtimes.hold_lease(conn, AWA, LEASE, 1, seconds=0.5)
    chore = Doing(lambda conn: 60.0)
    monkeypatch.setattr(leader, "JITTER", 0.0)
    maintain(2, [chore], heartbeat=7200.0).start()
    assert chore.runs.acquire(timeout=5)
    assert engine.scalar(conn, "SELECT runtime FROM awa.leases") == 2


def test_a_lease_is_not_locked_by_those_who_only_look(conn: Conn, database: str) -> None:
    runtimes.hold_lease(conn, AWA, LEASE, 1, seconds=60.0)
    with psycopg.connect(database) as other:
        found = runtimes.hold_lease(other, AWA, LEASE, 2, seconds=60.0)
        assert found.held_seconds is None
        assert 0 < found.left_seconds <= 60.0
        conn.execute("SET lock_timeout = '1s'")
        assert runtimes.hold_lease(conn, AWA, LEASE, 1, seconds=60.0).held_seconds is not None


def test_a_leader_that_registers_anew_goes_on_leading(conn: Conn) -> None:
    runtime = 1
    leadership = Leadership(AWA, heartbeat=60.0, identity=lambda: runtime)
    assert leadership.renew(conn)
    runtime = 2
    assert leadership.renew(conn)
    assert engine.scalar(conn, "SELECT runtime FROM awa.leases") == 2


def test_a_lost_lease_starts_anew_when_it_is_regained(conn: Conn) -> None:
    assert runtimes.hold_lease(conn, AWA, LEASE, 1, seconds=60.0).held_seconds == pytest.approx(0.0, abs=5.0)
    conn.execute("UPDATE awa.leases SET acquired_at = acquired_at - interval '1 h'")
    held = runtimes.hold_lease(conn, AWA, LEASE, 1, seconds=60.0).held_seconds
    assert held is not None and held >= 3600
    runtimes.drop_lease(conn, AWA, LEASE, 1)
    held = runtimes.hold_lease(conn, AWA, LEASE, 1, seconds=60.0).held_seconds
    assert held is not None and held < 3600
    assert engine.scalar(conn, "SELECT epoch FROM awa.leases") == 2


# What it hears


def test_only_who_leads_listens(maintain: Any, opened: list[Conn]) -> None:
    for runtime in (1, 2):
        maintain(runtime, []).step()
    assert [channels(connection) for connection in opened] == [[AWA.channel], []]


def test_who_leads_no_more_hears_nothing_and_leaves_the_bell(conn: Conn, maintain: Any, opened: list[Conn]) -> None:
    maintenance = maintain(1, [], heartbeat=0.01)
    maintenance.step()
    assert not waiting.take_leader_bell(conn, AWA)
    conn.execute("UPDATE awa.leases SET runtime = 2, expires_at = clock_timestamp() + interval '1 h'")

    def has_let_go() -> bool:
        maintenance.step()
        return waiting.take_leader_bell(conn, AWA)

    wait_until(has_let_go)
    maintenance.step()
    assert [channels(connection) for connection in opened if not connection.closed] == [[]]


def test_a_ring_that_arrives_with_an_answer_is_heard(maintain: Any) -> None:
    """It comes in the same package, so the socket has nothing left to wake anybody with."""
    rings = 3

    def act(conn: Conn) -> float:
        nonlocal rings
        if rings:
            rings -= 1
            ring(conn)
        return 3600.0

    chore = Doing(act)
    maintain(1, [chore]).start()
    for _ in range(4):
        assert chore.runs.acquire(timeout=5)
    assert not chore.runs.acquire(blocking=False)


def test_a_ring_wakes_it_from_its_sleep_and_calls_only_for_who_hears_it(conn: Conn, maintain: Any) -> None:
    hearing, deaf = Doing(lambda conn: 3600.0), Doing(lambda conn: 3600.0, hears_bell=False)
    deaf.name = "deaf"
    maintain(1, [deaf, hearing]).start()
    assert hearing.runs.acquire(timeout=5)
    assert deaf.runs.acquire(timeout=5)
    for _ in range(3):
        ring(conn, "default")
        ring(conn)
        assert hearing.runs.acquire(timeout=5)
    assert not deaf.runs.acquire(blocking=False)


def test_what_rings_for_others_is_not_kept(maintain: Any, opened: list[Conn]) -> None:
    chore = Doing(lambda conn: 3600.0)
    maintenance = maintain(1, [chore])
    maintenance.step()
    [connection] = opened
    for _ in range(10):
        ring(connection, "default")
    assert not connection._notifies_backlog  # psycopg's own, which nothing would ever empty
    maintenance.step()
    assert chore.runs.acquire(blocking=False)
    assert not chore.runs.acquire(blocking=False)


def test_a_chore_that_fails_delays_no_other_and_is_tried_again(
    maintain: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "RETRY_AFTER", 0.01)
    failures = 2

    def fail(conn: Conn) -> float:
        nonlocal failures
        if failures:
            failures -= 1
            conn.execute("SELECT 1 / 0")
        return 3600.0

    failing, other = Doing(fail, hears_bell=False), Doing(lambda conn: 3600.0)
    failing.name = "failing"
    with caplog.at_level(logging.ERROR):
        maintain(1, [failing, other]).start()
        assert other.runs.acquire(timeout=5)
        assert failing.runs.acquire(timeout=5)
    assert caplog.text.count("maintenance: failing failed") == 2


# Promotion


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(promote, "monotonic", clock)
    return clock


def wait_for_time(conn: Conn, seconds: float) -> int:
    """A job that is due *seconds* from now."""
    return int(
        engine.scalar(
            conn,
            "INSERT INTO awa.waiting_jobs (run_at, queue, kind)"
            " VALUES (clock_timestamp() + %s * interval '1 s', 'q', 'noop') RETURNING id",
            seconds,
        )
    )


@pytest.mark.parametrize("away", [3.0, 14.0, 50.0, 5000.0])
def test_what_fell_due_while_promotion_was_away_is_found_at_once(conn: Conn, clock: Clock, away: float) -> None:
    chore = Promote(AWA)
    chore.run(conn, 99.0)
    job = wait_for_time(conn, -away)
    clock.now += away
    chore.run(conn, 0.0)
    assert engine.state(conn, job) == "available"


def test_more_than_a_batch_is_promoted_however_long_it_takes(
    conn: Conn, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promote, "BATCH", 2)
    chore = Promote(AWA)
    assert chore.run(conn, 99.0) > 0
    jobs = [wait_for_time(conn, -0.1 - n / 10) for n in range(5)]
    for _ in range(2):
        assert chore.run(conn, 99.0) == 0.0
        clock.now += 4.0  # all that is left is older than the floor by then
        conn.execute("UPDATE awa.waiting_jobs SET run_at = run_at - interval '4 s'")
    assert chore.run(conn, 99.0) > 0
    assert {engine.state(conn, job) for job in jobs} == {"available"}


def test_it_sleeps_until_the_next_is_due(conn: Conn) -> None:
    chore = Promote(AWA)
    assert chore.run(conn, 99.0) == promote.LONGEST_SLEEP
    wait_for_time(conn, 3600.0)
    assert chore.run(conn, 99.0) == promote.LONGEST_SLEEP
    wait_for_time(conn, 0.6)
    assert 0 < chore.run(conn, 99.0) <= 0.6


def test_a_job_that_somebody_holds_is_promoted_when_it_is_let_go_and_delays_no_other(
    conn: Conn, clock: Clock, database: str
) -> None:
    chore = Promote(AWA)
    chore.run(conn, 99.0)
    held = wait_for_time(conn, -1.0)
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM awa.waiting_jobs WHERE id = %s FOR UPDATE", [held])
        assert chore.run(conn, 99.0) <= promote.LONGEST_SLEEP
        wait_for_time(conn, 0.1)
        clock.now += 5.0
        conn.execute("SET lock_timeout = '1s'")
        assert chore.run(conn, 99.0) <= 0.1
    conn.execute("UPDATE awa.waiting_jobs SET run_at = run_at - interval '5 s' WHERE id = %s", [held])
    chore.run(conn, 99.0)
    assert engine.state(conn, held) == "available"


@pytest.mark.parametrize(("cost", "pause"), [(0.001, 15.0), (2.0, 40.0), (30.0, 60.0)])
def test_full_passes_are_paced_by_their_cost_and_come_once_a_minute(
    conn: Conn, clock: Clock, monkeypatch: pytest.MonkeyPatch, cost: float, pause: float
) -> None:
    full: list[float] = []

    def pass_over(conn: Conn, schema: Schema, *, behind: float | None, limit: int) -> int:
        if behind is None:
            full.append(clock.now)
            clock.now += cost
        return 0

    monkeypatch.setattr(waiting, "promote", pass_over)
    chore = Promote(AWA)
    while len(full) < 3:
        clock.now += chore.run(conn, 99.0)
    for earlier, later in pairwise(full):
        assert pause <= later - earlier <= pause + promote.LONGEST_SLEEP


def test_a_scheduled_job_starts_after_the_leader_was_stalled(
    client: awa.Client, start_worker: StartWorker, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled = threading.Event()
    go_on = threading.Event()
    heard = waiting.promote

    def stall(*args: Any, **options: Any) -> int:
        if stalled.is_set():
            assert go_on.wait(20)
        return heard(*args, **options)

    monkeypatch.setattr(waiting, "promote", stall)

    @client.task()
    def work() -> None: ...

    start_worker(client)
    wait_until(lambda: count(conn, "SELECT count(*) FROM awa.leases") == 1)
    stalled.set()
    job = client.insert(work.bind(), delay=0.1)
    overdue = "SELECT count(*) FROM awa.waiting_jobs WHERE run_at < clock_timestamp() - interval '2.5 s'"
    wait_until(lambda: count(conn, overdue) == 1)
    go_on.set()
    assert ended(client, job, timeout=5).state == "completed"


# Rescue


def silent_runtime(conn: Conn, *numbers: int) -> tuple[int, engine.Claimed]:
    """A runtime with open attempts of which nothing has been heard for long."""
    runtime = engine.register(conn)
    engine.insert(conn, *numbers)
    claimed = engine.claim(conn, runtime)
    engine.fall_silent(conn, runtime)
    return runtime, claimed


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The runtimes that rescue was called for; after 1,000 it fails."""
    called: list[int] = []
    call = runtimes.rescue

    def record(conn: Conn, schema: Schema, runtime: int, *, limit: int, skip: int = 0) -> Rescued:
        called.append(runtime)
        assert len(called) < 1000, "it goes round in circles"
        return call(conn, schema, runtime, limit=limit, skip=skip)

    monkeypatch.setattr(runtimes, "rescue", record)
    return called


def run_a_round(chore: Rescue, conn: Conn) -> int:
    """Until it wants to sleep; the number of runs."""
    runs = 1
    while chore.run(conn, 3600.0) == 0.0:
        runs += 1
    return runs


def is_finished(conn: Conn, runtime: int) -> bool:
    return bool(engine.scalar(conn, "SELECT ended_at IS NOT NULL FROM awa.runtime_instances WHERE id = %s", runtime))


@pytest.mark.parametrize("batch", [1, 2, 3, 200])
def test_an_attempt_whose_entry_is_lost_is_passed_over(
    conn: Conn, calls: list[int], monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(rescue, "BATCH", batch)
    runtime, claimed = silent_runtime(conn, *range(6))
    lost = [claimed.members[n].id for n in (0, 1, 4)]
    conn.execute("DELETE FROM awa.jobs WHERE id = ANY (%s)", [lost])
    other, _ = silent_runtime(conn, 10, 11)
    chore = Rescue(AWA, heartbeat=1.0, stale_after=30.0)
    for _ in range(3):
        run_a_round(chore, conn)
    assert [engine.state(conn, member.id) for member in claimed.members if member.id not in lost] == ["available"] * 3
    assert not is_finished(conn, runtime)
    assert is_finished(conn, other)


def test_what_a_transaction_completes_is_passed_over_and_taken_back_later(
    conn: Conn, database: str, calls: list[int]
) -> None:
    runtime, claimed = silent_runtime(conn, *range(4))
    chore = Rescue(AWA, heartbeat=1.0, stale_after=30.0)
    with psycopg.connect(database) as other:
        for member in claimed.members[1:3]:
            engine.complete(other, member)
        for _ in range(2):
            run_a_round(chore, conn)
        assert [engine.state(conn, member.id) for member in claimed.members] == [
            "available",
            "running",
            "running",
            "available",
        ]
        assert not is_finished(conn, runtime)
        other.rollback()
    run_a_round(chore, conn)
    assert {engine.state(conn, member.id) for member in claimed.members} == {"available"}
    assert is_finished(conn, runtime)


def test_a_long_rescue_is_done_in_runs_and_every_runtime_gets_its_turn(
    conn: Conn, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescue, "BATCH", 2)
    stuck, claimed = silent_runtime(conn, *range(4))
    conn.execute("DELETE FROM awa.jobs WHERE id = ANY (%s)", [[member.id for member in claimed.members]])
    others = [silent_runtime(conn, 10 * n, 10 * n + 1)[0] for n in range(1, 4)]
    ticks = iter(range(100_000))
    # every look at the clock is a whole budget later than the last but one
    monkeypatch.setattr(rescue, "monotonic", lambda: next(ticks) * rescue.BUDGET * 0.6)
    chore = Rescue(AWA, heartbeat=1.0, stale_after=30.0)
    per_run: list[int] = []
    again = 0.0
    while again == 0.0:
        before = len(calls)
        again = chore.run(conn, 3600.0)
        per_run.append(len(calls) - before)
    assert max(per_run) == 1
    assert set(calls) == {stuck, *others}
    assert all(is_finished(conn, runtime) for runtime in others)


def test_nobody_is_fenced_before_this_runtime_has_led_for_two_heartbeats(conn: Conn) -> None:
    runtime, _ = silent_runtime(conn, 1)
    chore = Rescue(AWA, heartbeat=5.0, stale_after=30.0)
    assert chore.run(conn, 9.0) > 0
    assert engine.scalar(conn, "SELECT count(*) FROM awa.gone_runtimes") == 0
    assert chore.run(conn, 10.0) > 0
    assert is_finished(conn, runtime)


def test_a_rescue_that_fails_for_one_runtime_goes_on_with_the_others(
    conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, _ = silent_runtime(conn, 1)
    good, _ = silent_runtime(conn, 2)
    call = runtimes.rescue

    def fail(conn: Conn, schema: Schema, runtime: int, *, limit: int, skip: int = 0) -> Rescued:
        if runtime == bad:
            raise psycopg.DataError("no")
        return call(conn, schema, runtime, limit=limit, skip=skip)

    monkeypatch.setattr(runtimes, "rescue", fail)
    chore = Rescue(AWA, heartbeat=1.0, stale_after=30.0)
    with pytest.raises(psycopg.DataError):
        chore.run(conn, 3600.0)
    chore.run(conn, 3600.0)
    assert is_finished(conn, good)
