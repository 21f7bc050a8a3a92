"""The chaos run's own checks: silent about a clean ledger, and not about one in which a promise is broken."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.chaos import ledger
from tests.chaos.checks import CHECKS, check, find_leftovers
from tests.chaos.journal import Journal
from tests.fixtures.jobs import fence, rescue
from tests.storage import engine
from tests.storage.engine import Member, Outcome

Conn = psycopg.Connection[Any]


class Scene:
    """A small run with one producer and one worker, which a test plays."""

    def __init__(self, conn: Conn, directory: Path) -> None:
        ledger.install(conn)
        self.conn = conn
        self.crashes: list[ledger.Crash] = []
        self._directory = directory
        self._produced = Journal(directory / "producer-1.journal")
        self._worked = Journal(directory / "worker-1.journal")
        self._deeds = count(1)
        self._runs = count(1)
        self.runtime = engine.register(conn)

    def note(self, *marks: int, fate: str | None = "committed", is_meant: bool = True, has_row: bool = False) -> None:
        """A producer's deed; without a fate, of a producer that was killed."""
        deed = next(self._deeds)
        meant, undone = (list(marks), []) if is_meant else ([], list(marks))
        self._produced.note(who="p", deed=deed, way="test", meant=meant, undone=undone, has_row=has_row)
        if fate is not None:
            self._produced.note(who="p", deed=deed, fate=fate)

    def insert(self, *marks: int, kind: str = "nothing") -> None:
        self.conn.execute(
            "INSERT INTO awa.jobs (kind, args) SELECT %s, json_build_object('mark', m) FROM unnest(%s::bigint[]) m",
            [kind, list(marks)],
        )

    def claim(self, runtime: int | None = None) -> list[Member]:
        return engine.claim(self.conn, runtime or self.runtime, queue="default").members

    def run(self, *members: Member, lasts: float = 0.001, at: float | None = None) -> None:
        """Have handlers begin and end."""
        for member in members:
            begun = time.time() if at is None else at
            found = self.conn.execute(
                "SELECT mark FROM ledger.entries WHERE entry_id = %s", [member.entry_id]
            ).fetchone()
            assert found is not None
            self.note_run(member.id, member.entry_id, found[0], begun, begun + lasts)

    def note_run(self, job: int, entry: int, mark: int, begun: float, ended: float) -> None:
        number = next(self._runs)
        self._worked.note(run="begun", number=number, job=job, entry=entry, mark=mark, at=begun)
        self._worked.note(run="ended", number=number, at=ended)

    def note_commit(self, member: Member, mark: int) -> None:
        """A handler's own transaction was acknowledged."""
        self._worked.note(run="committed", mark=mark, entry=member.entry_id)

    def control(self, job: int, what: str, happened: str) -> None:
        """An operator's deed, and the answer."""
        self._produced.note(who="p", control=what, job=job, happened=happened, at=time.time())

    def settle(self, done: list[Member], others: list[Outcome] | None = None) -> None:
        assert engine.settle(self.conn, self.runtime, done, others or []) == []

    def work(self) -> list[Member]:
        """Claim, run and complete everything."""
        members = self.claim()
        self.run(*members)
        self.settle(members)
        return members

    def findings(self) -> dict[str, int]:
        """The checks that found something, and how much."""
        ledger.load(self.conn, self._directory, self.crashes)
        return {verdict.name: verdict.count for verdict in check(self.conn) if verdict.count}


@pytest.fixture
def scene(conn: Conn, tmp_path: Path) -> Scene:
    return Scene(conn, tmp_path)


def test_a_clean_ledger_has_no_violation(scene: Scene) -> None:
    scene.note(1, 2, 3, 4, 5, 6)
    scene.insert(1, 2, 3, 4, 5, 6)
    members = scene.claim()
    scene.run(*members)
    retried, snoozed, released, cancelled, failed, completed = members
    outcomes = [
        Outcome(retried, "retried"),
        Outcome(snoozed, "snoozed"),
        Outcome(released, "released"),
        Outcome(cancelled, "cancelled"),
        Outcome(failed, "failed"),
    ]
    scene.control(cancelled.id, "cancel", "asked")  # by somebody who was killed before the answer
    scene.settle([completed], outcomes)
    assert len(scene.work()) == 3
    # taken back, and in doubt: either way is fine
    scene.note(11, is_meant=False)
    scene.note(12, fate="rolled back")
    scene.note(13, 14, fate=None)
    scene.insert(13)
    # rescued from a handler that goes on for an hour
    (silent,) = scene.claim()
    scene.run(silent, lasts=3600)
    fence(scene.conn, scene.runtime)
    rescue(scene.conn, scene.runtime)
    scene.runtime = engine.register(scene.conn)
    assert len(scene.work()) == 1
    assert scene.findings() == {}


def test_a_handler_that_a_crash_let_begin_twice_is_no_violation(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1)
    now = time.time()
    (member,) = scene.claim()
    scene.run(member, at=now - 10, lasts=60)
    scene.crashes.append((now - 6, now - 5))
    scene.run(member, at=now)
    scene.settle([member])
    assert scene.findings() == {}


def test_a_fenced_worker_that_begins_late_is_no_violation(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1)
    (late,) = scene.claim()
    fence(scene.conn, scene.runtime)
    rescue(scene.conn, scene.runtime)
    scene.runtime = engine.register(scene.conn)
    (member,) = scene.claim()
    scene.run(member, lasts=60)
    scene.settle([member])
    scene.run(late)
    assert scene.findings() == {}


def test_a_rescue_that_cancels_what_an_operator_wants_cancelled_is_no_violation(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1)
    (member,) = scene.claim()
    scene.run(member)
    assert engine.cancel(scene.conn, member.id)[0] == "requested"
    scene.control(member.id, "cancel", "requested")
    fence(scene.conn, scene.runtime)
    rescue(scene.conn, scene.runtime)
    assert scene.findings() == {}


def test_an_effect_that_was_acknowledged_and_is_there_is_no_violation(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1, kind="effect")
    (member,) = scene.work()
    scene.conn.execute("INSERT INTO app.effects VALUES (1, %s)", [member.entry_id])
    scene.note_commit(member, 1)
    assert scene.findings() == {}


def test_what_is_followed_as_it_ended_is_no_violation(scene: Scene) -> None:
    _parent(scene, -71)
    scene.note(8, 9)
    scene.insert(8, 9, kind="parent")
    failed, cancelled = scene.claim()
    scene.run(failed, cancelled)
    scene.settle([], [Outcome(failed, "failed"), Outcome(cancelled, "cancelled")])
    scene.insert(-82, -93, kind="child")
    scene.work()
    assert scene.findings() == {}


def test_what_a_session_holds_that_nobody_works_in_is_found(database: str, conn: Conn) -> None:
    """Guard: a pooler's sessions outlive their clients, so that a lock or a transaction can stay behind in them."""
    with psycopg.connect(database) as left:
        left.execute("SELECT pg_advisory_lock(7)")
        left.commit()
        (lock,) = find_leftovers(conn, timeout=0.0)
        assert "advisory lock" in lock and str(left.info.backend_pid) in lock
        left.execute("SELECT pg_advisory_unlock(7)")
        (transaction,) = find_leftovers(conn, timeout=0.0)
        assert "has a transaction open" in transaction
        left.rollback()
        assert find_leftovers(conn, timeout=0.0) == []


def _lost(scene: Scene) -> None:
    scene.note(1)


def _unclaimed(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1)


def _waiting(scene: Scene) -> None:
    scene.note(1)
    scene.conn.execute("INSERT INTO awa.waiting_jobs (run_at, kind, args) VALUES (now(), 'nothing', '{\"mark\": 1}')")


def _ended_twice(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1)
    (member,) = scene.work()
    scene.conn.execute(
        "INSERT INTO awa.attempt_ends (entry_id, claim_id, id, slot, outcome) VALUES (%s, %s, %s, %s, 'completed')",
        [member.entry_id, member.claim_id, member.id, member.slot],
    )


def _completed_and_failed(scene: Scene) -> None:
    """One entry has completed, and another failed."""
    scene.note(1)
    scene.insert(1)
    (member,) = scene.work()
    scene.conn.execute(
        "INSERT INTO awa.ended_jobs (id, created_at, priority, attempt, max_attempts, state, queue, kind, args)"
        " VALUES (%s, now(), 2, 1, 1, 'failed', 'default', 'nothing', '{}')",
        [member.id],
    )


def _claimed_twice(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1)
    (member,) = scene.work()
    scene.conn.execute(
        "INSERT INTO awa.claims SELECT (jsonb_populate_record(c, '{\"claim_id\": 99}')).* FROM awa.claims c"
        " WHERE claim_id = %s",
        [member.claim_id],
    )


def _stale(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1)
    (member,) = scene.claim()
    scene.run(member)
    fence(scene.conn, scene.runtime)
    scene.conn.execute(
        "INSERT INTO awa.completions (claim_id, flush, slot, idx, elapsed_ms) VALUES (%s, 1, %s, '{1}', '{1}')",
        [member.claim_id, member.slot],
    )


def _stale_cancelled(scene: Scene) -> None:
    """Nobody asked for it."""
    scene.note(1)
    scene.insert(1, kind="changeable")
    (member,) = scene.claim()
    scene.run(member)
    fence(scene.conn, scene.runtime)
    scene.conn.execute(
        "INSERT INTO awa.attempt_ends (entry_id, claim_id, id, slot, outcome) VALUES (%s, %s, %s, %s, 'cancelled')",
        [member.entry_id, member.claim_id, member.id, member.slot],
    )
    scene.conn.execute(
        "INSERT INTO awa.ended_jobs (id, created_at, priority, attempt, max_attempts, state, queue, kind, args)"
        " VALUES (%s, now(), 2, 1, 1, 'cancelled', 'default', 'changeable', '{}')",
        [member.id],
    )


def _end_of_an_unknown_claim(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1)
    (member,) = scene.claim()
    scene.run(member)
    scene.conn.execute(
        "INSERT INTO awa.attempt_ends (entry_id, claim_id, id, slot, outcome) VALUES (%s, 99, %s, %s, 'completed')",
        [member.entry_id, member.id, member.slot],
    )


def _taken_back_and_run(scene: Scene) -> None:
    scene.note(1, is_meant=False)
    scene.note(2, fate="rolled back")
    scene.insert(1, 2)
    scene.work()


def _run_and_taken_back(scene: Scene) -> None:
    """What ran is in no table."""
    scene.note(1, fate="rolled back")
    scene.note_run(999, 999, 1, time.time(), time.time())


def _inserted_twice(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1, 1)
    scene.work()


def _row_without_job(scene: Scene) -> None:
    scene.note(1, fate=None, has_row=True)
    scene.conn.execute("INSERT INTO app.orders VALUES (1)")


def _job_without_row(scene: Scene) -> None:
    scene.note(1, has_row=True)
    scene.insert(1)
    scene.work()


def _two_effects(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1, kind="effect")
    (member,) = scene.work()
    scene.conn.execute("INSERT INTO app.effects VALUES (1, %(entry)s), (1, %(entry)s)", {"entry": member.entry_id})


def _no_effect(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1, kind="effect")
    scene.work()


def _effect_lost(scene: Scene) -> None:
    """The handler was told that its transaction is committed; then its job ran again, and had its effect."""
    scene.note(1)
    scene.insert(1, kind="effect")
    (first,) = scene.claim()
    scene.run(first)
    scene.note_commit(first, 1)
    scene.settle([], [Outcome(first, "retried")])
    (member,) = scene.work()
    scene.conn.execute("INSERT INTO app.effects VALUES (1, %s)", [member.entry_id])


def _not_counted(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1, kind="count")
    scene.work()


def _too_early(scene: Scene) -> None:
    scene.note(1, 2)
    scene.insert(1, 2)
    first, second = scene.work()
    scene.conn.execute("INSERT INTO ledger.parents VALUES (%s, %s, NULL)", [second.id, first.id])


def _never_run(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1)
    scene.settle(scene.claim())


def _miscounted(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1)
    (member,) = scene.claim()
    scene.run(member)
    scene.settle([], [Outcome(member, "retried")])
    scene.conn.execute("UPDATE ledger.entries SET attempt = 1")
    scene.work()


def _run_twice(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1)
    scene.run(*scene.work())


def _run_at_the_same_time(scene: Scene) -> None:
    """The first handler still runs when its job's next entry begins, and nobody was taken for dead."""
    scene.note(1)
    scene.insert(1)
    (member,) = scene.claim()
    scene.run(member, lasts=60)
    scene.settle([], [Outcome(member, "retried")])
    scene.work()


def _told_cancelled(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1)
    (member,) = scene.work()
    scene.control(member.id, "cancel", "cancelled")


def _tried_again(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1)
    (member,) = scene.claim()
    scene.run(member)
    scene.control(member.id, "cancel", "requested")
    scene.settle([], [Outcome(member, "retried")])
    scene.work()


def _cancelled_by_nobody(scene: Scene) -> None:
    scene.note(1)
    scene.insert(1)
    (member,) = scene.claim()
    scene.run(member)
    scene.settle([], [Outcome(member, "cancelled")])


def _parent(scene: Scene, *children: int, mark: int = 7, result: dict[str, str] | None = None) -> None:
    scene.note(mark)
    scene.insert(mark, kind="parent")
    (member,) = scene.claim()
    scene.run(member)
    kept = {"mark": str(mark), "entry": str(member.entry_id)}
    scene.settle([], [Outcome(member, "completed", error=result or kept)])
    scene.insert(*children, kind="child")
    scene.work()


def _unfollowed(scene: Scene) -> None:
    _parent(scene)


def _followed_by_two(scene: Scene) -> None:
    _parent(scene, -71, -72)


def _followed_by_another(scene: Scene) -> None:
    _parent(scene, -72)


def _following_nothing(scene: Scene) -> None:
    scene.insert(-71, kind="child")
    scene.work()


def _another_result(scene: Scene) -> None:
    _parent(scene, -71, result={"mark": "7", "entry": "0"})


PLANTS: dict[Callable[[Scene], None], set[str]] = {
    _lost: {"acknowledged and lost"},
    _unclaimed: {"never ended", "attempts never ended"},
    _waiting: {"never ended"},
    _ended_twice: {"ended twice", "attempts ended twice"},
    _completed_and_failed: {"ended twice"},
    _claimed_twice: {"attempts claimed twice"},
    _stale: {"stale writes accepted"},
    _stale_cancelled: {"stale writes accepted"},
    _end_of_an_unknown_claim: {"ends of nothing"},
    _taken_back_and_run: {"rolled back and there", "rolled back and run"},
    _run_and_taken_back: {"rolled back and run", "run and never inserted"},
    _inserted_twice: {"inserted twice"},
    _row_without_job: {"without the row beside it, or the other way round"},
    _job_without_row: {"without the row beside it, or the other way round"},
    _two_effects: {"effects not exactly once"},
    _no_effect: {"effects not exactly once"},
    _effect_lost: {"effects acknowledged and lost"},
    _not_counted: {"counted otherwise than completed"},
    _too_early: {"run before those that it was to run after"},
    _never_run: {"completed without a run"},
    _told_cancelled: {"told cancelled and not so"},
    _tried_again: {"asked to be cancelled and tried again"},
    _cancelled_by_nobody: {"cancelled by nobody"},
    _unfollowed: {"not followed by exactly one"},
    _followed_by_two: {"not followed by exactly one"},
    _followed_by_another: {"not followed by exactly one"},
    _following_nothing: {"not followed by exactly one"},
    _another_result: {"not the result of the attempt that completed"},
    _miscounted: {"attempts miscounted"},
    _run_twice: {"attempts run twice without a crash between"},
    _run_at_the_same_time: {"jobs run twice at a time, in two living runtimes"},
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__.strip("_"))
def test_a_planted_violation_is_found(scene: Scene, plant: Callable[[Scene], None]) -> None:
    scene.note(100, 101)
    scene.insert(100, 101)
    scene.work()
    plant(scene)
    assert set(scene.findings()) == PLANTS[plant]


def test_every_check_has_been_seen_to_fail() -> None:
    assert {check.name for check in CHECKS} == set().union(*PLANTS.values())
