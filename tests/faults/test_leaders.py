"""A leader that freezes, one that is killed, and two that lead at once.

Who leads is a lease by the database's clock. It is no lock: a leader that was frozen in the middle of a step finishes
that step when it thaws, whoever leads by then. So each chore is safe beside itself, step by step.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import psycopg
import pytest

import awa
from awa.storage import ring as storage_ring
from awa.storage import runtimes
from awa.storage.check import check_storage
from awa.storage.trust import record_origin
from awa.worker.leader import LEASE, Leadership
from awa.worker.maintenance import deadlines, keys, promote, rescue, retention, ring, summarize
from awa.worker.maintenance.loop import Chore, Maintenance
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import WorkerProcess, WorkerProcesses, claimed_twice, count
from tests.storage import engine
from tests.storage.engine import AWA

Conn = psycopg.Connection[Any]

APP = """
import awa

client = awa.Client()

@client.task()
def work(n: int) -> None: ...
"""

LEADER = """
    SELECT r.pid, l.runtime, extract(epoch FROM l.acquired_at)::float, extract(epoch FROM l.expires_at)::float
      FROM awa.leases l JOIN awa.runtime_instances r ON r.id = l.runtime
     WHERE l.expires_at > clock_timestamp()
"""


def leader(conn: Conn) -> tuple[int, int, float, float] | None:
    """Process and runtime of who leads, since when and until when by the database's clock."""
    return conn.execute(LEADER).fetchone()


def two_workers(conn: Conn, processes: WorkerProcesses, *settings: str) -> tuple[WorkerProcess, WorkerProcess]:
    """Who leads, and who does not, once both have been seen."""
    processes.module(APP)
    both = [processes.start("app:client", *settings) for _ in range(2)]
    wait_until(lambda: count(conn, "SELECT count(*) FROM awa.runtime_instances") == 2, timeout=30)
    pid = wait_until(lambda: leader(conn), timeout=30)[0]
    first, second = sorted(both, key=lambda process: process.pid != pid)
    return first, second


def test_a_frozen_leader_is_replaced_and_steps_down_when_it_thaws(
    client: awa.Client, conn: Conn, processes: WorkerProcesses
) -> None:
    """Guard: the lease ends by the database's clock, and whoever leads asks it before each round of chores.

    The frozen one holds neither rows nor locks, but the bell of the leader: who leads hears its rings all the same.
    """
    first, second = two_workers(conn, processes, "--heartbeat", "0.5", "--stale-after", "60", "--poll-interval", "0.2")
    found = wait_until(lambda: leader(conn), timeout=20)
    first.signal(signal.SIGSTOP)
    try:
        wait_until(lambda: (now := leader(conn)) and now[1] != found[1], timeout=20)
        jobs = [client.insert({"n": n}, kind="work", delay=0.1 + n / 20) for n in range(20)]
        wait_until(lambda: all(client.get(job.id).state == "completed" for job in jobs), timeout=20)
        last = wait_until(lambda: leader(conn), timeout=20)
    finally:
        first.signal(signal.SIGCONT)
    jobs += [client.insert({"n": n}, kind="work", delay=0.1 + n / 20) for n in range(20)]
    wait_until(lambda: "no longer leads maintenance" in first.stderr, timeout=20)
    wait_until(lambda: all(client.get(job.id).state == "completed" for job in jobs), timeout=20)
    now = wait_until(lambda: leader(conn), timeout=20)
    assert now[:3] == last[:3] and now[0] == second.pid, "the lease never changed hands again"
    # it goes on as the worker that it was
    assert first.process.poll() is None
    seen = "SELECT count(*) FROM awa.runtime_instances WHERE id = %s AND last_seen_at > now() - interval '5 s'"
    wait_until(lambda: count(conn, seen, found[1]) == 1, timeout=10)
    assert count(conn, "SELECT count(*) FROM awa.gone_runtimes") == 0
    assert claimed_twice(conn) == []
    assert [client.get(job.id).attempt for job in jobs] == [1] * 40
    assert check_storage(conn, AWA).is_sound


@pytest.mark.slow
def test_a_killed_leader_is_replaced_within_ten_seconds_by_the_default_settings(
    conn: Conn, processes: WorkerProcesses, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guard: the lease lasts 1.75 heartbeats, and who does not lead looks again when it ends, not at its own next turn.

    It is killed just after a renewal, which is the worst moment.
    """
    first, _ = two_workers(conn, processes)
    found = wait_until(lambda: leader(conn), timeout=20)
    renewed = wait_until(lambda: (now := leader(conn)) and now[3] != found[3] and now, timeout=20)
    first.signal(signal.SIGKILL)
    begun = time.monotonic()
    left = renewed[3] - engine.scalar(conn, "SELECT extract(epoch FROM clock_timestamp())::float")
    new = wait_until(lambda: (now := leader(conn)) and now[1] != found[1] and now, timeout=30)
    with capsys.disabled():
        print(f"\na new leader {time.monotonic() - begun:.1f} s after the old one was killed (default settings)")
    assert left < 9.0, "the lease lasts 8.75 seconds"
    assert new[2] >= renewed[3], "nobody takes it before"


class Doing:
    """A chore of the test's own."""

    hears_bell = False

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self.name = name
        self.heard: list[float] = []
        self._act = act

    def run(self, conn: Conn, held_seconds: float) -> float:
        self.heard.append(held_seconds)
        self._act()
        return 0.0


def test_a_leader_that_was_frozen_between_two_chores_asks_before_the_next(conn: Conn, database: str) -> None:
    """Guard: Leadership.is_valid between chores. Without it rescue would run on the word of a lease that is long over,
    and after an outage take everybody for dead who has not been heard yet."""
    step_aside = [True]

    def freeze() -> None:
        if step_aside.pop():  # the second call fails: it must not come
            time.sleep(0.4)
            assert runtimes.hold_lease(conn, AWA, LEASE, 2, seconds=60.0).held_seconds is not None

    first, second = Doing("first", freeze), Doing("second", lambda: None)
    chores: list[Chore] = [first, second]
    maintenance = Maintenance(conninfo=database, schema=AWA, heartbeat=0.2, identity=lambda: 1, chores=chores)
    try:
        assert maintenance.step() == 0.0
        assert maintenance.step() > 0.0
        assert (len(first.heard), len(second.heard)) == (1, 0)
    finally:
        maintenance.stop(5.0)
        maintenance.close()


def test_only_one_of_many_takes_a_lease_that_has_ended(conn: Conn, database: str) -> None:
    """Guard: the condition of ON CONFLICT DO UPDATE, which is looked at again under the lock of the row.

    All of them see in their snapshots that it has ended. The first locks the row and updates it; each other waits for
    that lock, then sees the new row in its WHERE, whatever its snapshot shows, and changes nothing.
    """
    for round_number in range(10):
        runtimes.hold_lease(conn, AWA, LEASE, 99, seconds=0.0)
        conn.execute("UPDATE awa.leases SET expires_at = clock_timestamp()")
        taken: list[int] = []
        barrier = threading.Barrier(6)

        def take(runtime: int, barrier: threading.Barrier = barrier, taken: list[int] = taken) -> None:
            with psycopg.connect(database, autocommit=True) as own:
                leadership = Leadership(AWA, heartbeat=60.0, identity=lambda: runtime)
                barrier.wait(20)
                if leadership.renew(own):
                    taken.append(runtime)

        threads = [threading.Thread(target=take, args=(10 * round_number + n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(taken) == 1


# --- two at once


@pytest.fixture
def other(database: str) -> Iterator[Conn]:
    """The connection of the second leader."""
    with psycopg.connect(database, autocommit=True) as other:
        yield other


class Scene:
    """Work for every chore, and what must have become of it."""

    def __init__(self, conn: Conn) -> None:
        self.conn = conn
        record_origin(conn, AWA)
        self.living = engine.register(conn)
        conn.execute("UPDATE awa.runtime_instances SET timeout_ms = 1000 WHERE id = %s", [self.living])
        # three sealed segments in which everything has ended, and one whose last few wait
        for _ in range(3):
            engine.insert(conn, *range(50), queue="old")
            engine.settle(conn, self.living, engine.claim(conn, self.living, queue="old").members)
            self.turn()
        self.left = engine.insert(conn, *range(10), queue="left")
        engine.insert(conn, *range(40), queue="old")
        engine.settle(conn, self.living, engine.claim(conn, self.living, queue="old").members)
        self.turn()
        # attempts of two silent runtimes, and of a living one that lets their time pass
        self.lost: list[int] = []
        for _ in range(2):
            dead = engine.register(conn)
            engine.insert(conn, *range(10))
            self.lost += engine.claim(conn, dead).ids
            engine.fall_silent(conn, dead)
        engine.insert(conn, *range(10))
        self.overdue = engine.claim(conn, self.living).ids
        conn.execute("UPDATE awa.claims SET claimed_at = claimed_at - interval '1 h' WHERE runtime = %s", [self.living])
        self.due = self.wait_for_time(30, "now()")
        self.later = self.wait_for_time(5, "now() + interval '1 h'")
        # failed long ago, and just now
        engine.insert(conn, *range(20), queue="failing")
        members = engine.claim(conn, self.living, queue="failing").members
        engine.settle(conn, self.living, others=[engine.Outcome(member, "failed") for member in members])
        self.failed = [member.id for member in members]
        conn.execute("UPDATE awa.ended_jobs SET ended_at = ended_at - interval '9 d' WHERE id % 2 = 0")

    def turn(self) -> None:
        self.conn.execute("SELECT awa.rotate_v1()")
        self.conn.execute("UPDATE awa.ring SET opened_at = now() - interval '2 h' WHERE opened_at IS NOT NULL")
        self.conn.execute("UPDATE awa.ring SET sealed_at = now() - interval '1 h' WHERE sealed_at IS NOT NULL")

    def wait_for_time(self, number: int, when: str) -> list[int]:
        rows = self.conn.execute(
            f"INSERT INTO awa.waiting_jobs (run_at, queue, kind) SELECT {when}, 'q', 'noop'"
            " FROM generate_series(1, %s) RETURNING id",
            [number],
        )
        return [row[0] for row in rows.fetchall()]

    def check(self) -> None:
        """Everything was done, and once."""
        conn = self.conn
        for job in self.overdue:  # it waits for its next attempt, or was promoted by now
            assert sum(engine.places(conn, job).values()) == 1
        conn.execute("UPDATE awa.waiting_jobs SET run_at = now() WHERE state = 'retryable'")
        engine.promote(conn)
        for job in (*self.lost, *self.due, *self.left, *self.overdue):
            assert engine.places(conn, job) == {"entries": 1}
            assert engine.state(conn, job) == "available"
        for job in self.later:
            assert engine.state(conn, job) == "scheduled"
        histories = "SELECT json_array_length(history), attempt FROM awa.find_job_v2(%s)"
        for job in (*self.lost, *self.overdue):
            assert conn.execute(histories, [job]).fetchone() == (1, 2)
        kept = {row[0] for row in conn.execute("SELECT id FROM awa.ended_jobs")}
        assert kept == {job for job in self.failed if job % 2}
        assert count(conn, "SELECT count(*) FROM awa.gone_runtimes") == 2
        assert count(conn, "SELECT count(*) FROM awa.jobs WHERE queue = 'old'") == 0
        assert count(conn, "SELECT count(*) FROM awa.ring WHERE opened_at IS NOT NULL AND sealed_at IS NULL") == 1
        assert check_storage(conn, AWA).is_sound
        # and all of it can be run, each once
        for queue, jobs in (("q", self.lost + self.due + self.overdue), ("left", self.left)):
            ran: list[int] = []
            while members := engine.claim(conn, self.living, queue=queue).members:
                assert engine.settle(conn, self.living, members) == []
                ran += [member.id for member in members]
            assert sorted(ran) == sorted(jobs)
        assert claimed_twice(conn) == []


@pytest.fixture
def in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a chore is little more than one statement about one or two things."""
    for module in (promote, rescue, deadlines, retention):
        monkeypatch.setattr(module, "BATCH", 2)
    monkeypatch.setattr(ring, "CARRY_BATCH", 2)
    monkeypatch.setattr(summarize, "RANGES", 1)
    for module in (rescue, deadlines):
        monkeypatch.setattr(module, "BUDGET", 0.001)
    for module in (ring, summarize):
        monkeypatch.setattr(module, "BUDGET", 0.0)


def make_chores() -> list[Chore]:
    """All of a leader's chores, as it has them."""
    return [
        promote.Promote(AWA),
        rescue.Rescue(AWA, heartbeat=1.0, stale_after=30.0),
        deadlines.Deadlines(AWA, heartbeat=1.0, stale_after=30.0),
        ring.Ring(AWA, retention=0.0, rotate_after=3600.0),
        retention.Retention(AWA, completed=86_400.0, failed=86_400.0, dead=86_400.0),
        summarize.Summarize(AWA),
        keys.Keys(AWA),
    ]


def look_again(chores: list[Chore]) -> None:
    """The ring paces its looks at a segment by the clock."""
    for chore in chores:
        if isinstance(chore, ring.Ring):
            for seen in chore._seen.values():
                seen.look_at = 0.0


@pytest.mark.usefixtures("in_small_steps")
@pytest.mark.parametrize("seed", [1, 2])
def test_two_leaders_that_take_turns_within_every_chore_do_nothing_twice(conn: Conn, other: Conn, seed: int) -> None:
    """Guard, chore by chore, for a second leader whose snapshot or knowledge is that of before the first one's step:

    promote: rows are locked, SKIP LOCKED, and deleted where they are read. rescue, deadlines: the runtime's lock is
    tried exclusively, ends are unique. ring: turning and emptying under the lock of the ring, which is tried; emptying
    counts again under the lock of the tables, and asks whether the file is still the one that was counted; carrying
    under the claim lock of the queue, after which it looks again. retention, summarize: twice is as good as once.
    """
    scene = Scene(conn)
    leaders = [(conn, make_chores()), (other, make_chores())]
    order = random.Random(seed)
    steps = [(own, chore) for own, chores in leaders for chore in chores]
    for number in range(1500):
        own, chore = order.choice(steps)
        chore.run(own, 3600.0)
        if number % 50 == 0:
            for _, chores in leaders:
                look_again(chores)
    scene.check()


@pytest.mark.usefixtures("in_small_steps")
def test_two_leaders_that_run_at_the_same_time_do_nothing_twice(conn: Conn, database: str) -> None:
    """Guard: as above, with statements that really run beside each other."""
    scene = Scene(conn)
    failures: list[BaseException] = []

    def lead(seed: int) -> None:
        order = random.Random(seed)
        chores = make_chores()
        try:
            with psycopg.connect(database, autocommit=True) as own:
                for number in range(700):
                    # what meets the other's short lock is tried again, as by the maintenance thread
                    with suppress(psycopg.errors.LockNotAvailable):
                        order.choice(chores).run(own, 3600.0)
                    if number % 50 == 0:
                        look_again(chores)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=lead, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    scene.check()


def test_two_leaders_turn_the_ring_twice_at_worst_and_lose_nothing(conn: Conn, other: Conn) -> None:
    """Guard: a turn away from an empty slot costs nothing, since any empty slot is as good as another.

    Both have seen that the segment is old; each turns, one after the other.
    """
    record_origin(conn, AWA)
    runtime = engine.register(conn)
    engine.insert(conn, 1)
    conn.execute("UPDATE awa.ring SET opened_at = opened_at - interval '2 h'")
    rounds = []
    for own in (conn, other):
        chore = ring.Ring(AWA, retention=3600.0, rotate_after=3600.0)
        chore._conn = own
        rounds.append(chore._round())
        next(rounds[-1])  # it has listed the segments
    for steps in rounds:
        for _ in steps:
            pass
    engine.insert(conn, 2)
    assert engine.claim(conn, runtime).numbers == [1, 2]
    sealed = conn.execute("SELECT slot FROM awa.ring WHERE sealed_at IS NOT NULL ORDER BY slot").fetchall()
    assert (0,) in sealed and len(sealed) <= 2
    # once round the ring: the slot that was turned away from while empty takes its turn as any other
    turned = [engine.scalar(conn, "SELECT awa.rotate_v1()") for _ in range(9)]
    assert None not in turned and all(one != two for one, two in pairwise(turned))
    assert check_storage(conn, AWA).is_sound


def test_a_leader_that_freezes_while_it_analyzes_keeps_no_segment(conn: Conn, database: str) -> None:
    """Guard: the statistics of a sealed segment are made in one message. As a transaction of several, frozen between
    two of them, it would hold the segment's lock, and nobody could empty it until it thaws."""
    runtime = engine.register(conn)
    engine.insert(conn, *range(20))
    engine.settle(conn, runtime, engine.claim(conn, runtime).members)
    sent: list[str] = []
    with psycopg.connect(database, autocommit=True) as own:
        execute = own.execute

        def record(query: Any, *args: Any, **options: Any) -> Any:
            sent.append(own.info.transaction_status.name)
            answer = execute(query, *args, **options)
            sent.append(own.info.transaction_status.name)
            return answer

        own.execute = record  # type: ignore[method-assign]
        storage_ring.analyze(own, AWA, 0)
    assert set(sent) == {"IDLE"}, "no transaction is open between two messages"
    assert engine.scalar(conn, "SELECT reltuples FROM pg_class WHERE oid = 'awa.jobs_0'::regclass") == 20
