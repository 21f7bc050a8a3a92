"""Jobs that wait for other jobs: what is found of the parents, who is let go, and what is not forgotten before.

Who holds what: the look at parents holds ACCESS SHARE on the segments, taken before its first snapshot, so that none is
emptied under it, and locks no job. Letting go holds the rows of the jobs that wait, and skips those that others hold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import nullcontext
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Json

from awa.admin import Admin
from awa.job import JobState
from awa.storage import dependents, ended, ring
from awa.worker.maintenance import dependents as chore
from awa.worker.maintenance.dependents import Dependents
from awa.worker.maintenance.ring import Ring
from tests.storage.engine import (
    AWA,
    Background,
    Conn,
    Outcome,
    cancel,
    claim,
    complete,
    insert,
    move,
    promote,
    register,
    scalar,
    settle,
    state,
    transaction,
    wait_for_lock,
)


def after(
    conn: Conn, parents: Sequence[int], failed: str | None = None, *, queue: str = "q", run_at: str | None = None
) -> int:
    """A job that waits for *parents*."""
    return int(
        scalar(
            conn,
            "SELECT id FROM awa.enqueue_v1('noop', '{}', %s, p_after => %s, p_on_parent_failure => %s,"
            " p_run_at => now() + %s::interval)",
            queue,
            list(parents),
            failed,
            run_at,
        )
    )


def parents_of(conn: Conn, job_id: int) -> Any:
    return scalar(conn, "SELECT parents FROM awa.waiting_jobs WHERE id = %s", job_id)


def run_passes(conn: Conn, worker: Dependents, passes: int = 1) -> None:
    """Whole passes, without the pauses between."""
    for _ in range(passes):
        worker._not_before = 0.0
        worker.run(conn, 0.0)
        while worker._reached:
            worker._not_before = 0.0
            worker.run(conn, 0.0)


@pytest.fixture
def worker() -> Dependents:
    return Dependents(AWA)


def test_a_job_starts_when_all_its_parents_have_completed_whatever_they_went_through(
    conn: Conn, worker: Dependents
) -> None:
    """Guards: every way in which a job goes on (retry, snooze, release, move, carry, a time that comes) is no end.

    Without the look for a successor in the same snapshot, a retried parent is taken for gone; with places that are not
    checked, a parent that went on is taken for open for ever.
    """
    runtime = register(conn)
    parents = insert(conn, 1, 2, 3, 4, 5)
    a, b, c, _, e = parents
    waiting = after(conn, [*parents, a])
    run_passes(conn, worker)
    assert state(conn, waiting) == "scheduled"
    members = claim(conn, runtime, limit=4).members
    run_passes(conn, worker)
    others = [
        Outcome(m, o, d)
        for m, o, d in zip(members, ["retried", "snoozed", "released", "completed"], [60, 0, 0, 0], strict=True)
    ]
    assert settle(conn, runtime, [], others) == []
    assert move(conn, e, "other")[0] == "moved"
    run_passes(conn, worker, 2)
    assert parents_of(conn, waiting) == [a, b, c, e, a]
    with transaction(conn):
        (member,) = claim(conn, runtime, limit=1).members
        complete(conn, member)
        conn.execute("COMMIT")
    left = [job for job in (b, c) if job != member.id]
    run_passes(conn, worker)
    assert parents_of(conn, waiting) == [a, *left, e, a]
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now() WHERE id = %s", (a,))
    assert promote(conn) == 1
    for queue in ("q", "other"):
        run_passes(conn, worker)
        assert state(conn, waiting) == "scheduled"
        members = claim(conn, runtime, queue=queue).members
        run_passes(conn, worker)
        assert waiting not in [m.id for m in members]
        assert settle(conn, runtime, members) == []
    run_passes(conn, worker, 2)
    assert state(conn, waiting) == "available"
    assert claim(conn, runtime).ids == [waiting]
    assert worker._places.keys() <= {*parents}
    run_passes(conn, worker)
    assert not worker._places


@pytest.mark.parametrize("how", ["failed", "cancelled", "cancelled while it waits", "gone"])
def test_when_a_parent_has_not_completed_its_dependents_are_cancelled_run_or_discarded(
    conn: Conn, worker: Dependents, how: str
) -> None:
    """Guard: any end but completion is told from it, and each job's on_parent_failure decides."""
    runtime = register(conn)
    good, bad = insert(conn, 1, 2)
    if how == "cancelled while it waits":
        bad = after(conn, [good])
    jobs = [after(conn, [good, bad], failed) for failed in (None, "cancel", "run", "discard")]
    below = [after(conn, [job]) for job in jobs]
    run_passes(conn, worker)
    members = {member.id: member for member in claim(conn, runtime).members}
    if how == "failed":
        assert settle(conn, runtime, [], [Outcome(members[bad], "failed")]) == []
    elif how == "cancelled":
        assert settle(conn, runtime, [], [Outcome(members[bad], "cancelled")]) == []
    elif how == "gone":
        assert settle(conn, runtime, [], [Outcome(members[bad], "failed")]) == []
        conn.execute("DELETE FROM awa.ended_jobs")
        conn.execute("TRUNCATE awa.jobs_0, awa.attempt_ends_0")
    else:
        assert cancel(conn, bad) == ("cancelled", "cancelled")
    run_passes(conn, worker, 2)
    if how == "gone":  # so is the good one
        assert [state(conn, job) for job in jobs] == ["cancelled", "cancelled", "available", None]
    else:
        assert [state(conn, job) for job in jobs] == ["cancelled", "cancelled", "scheduled", None]
        assert parents_of(conn, jobs[2]) == [good]
        assert settle(conn, runtime, [members[good]]) == []
        run_passes(conn, worker)
        assert state(conn, jobs[2]) == "available"
    assert [state(conn, job) for job in below] == ["cancelled", "cancelled", "scheduled", "cancelled"]
    told = {"gone": "is gone: its history was deleted", "failed": "has failed"}.get(how, "was cancelled")
    first = min(good, bad) if how == "gone" else bad
    texts = conn.execute("SELECT id, history->-1->>'text' FROM awa.ended_jobs WHERE id = ANY (%s)", ([*jobs, *below],))
    assert dict(texts.fetchall()) == {
        jobs[0]: f"it was to run after job {first}, which {told}",
        jobs[1]: f"it was to run after job {first}, which {told}",
        below[0]: f"it was to run after job {jobs[0]}, which was cancelled",
        below[1]: f"it was to run after job {jobs[1]}, which was cancelled",
        below[3]: f"it was to run after job {jobs[3]}, which is gone: its history was deleted",
    }


def test_with_a_time_it_waits_for_both(conn: Conn, other: Conn, worker: Dependents) -> None:
    """Guards: run_at is heeded when the parents are done; what is due soon calls for promotion, by pg_notify.

    awa.ring rings for nobody when the session holds the leader's bell itself.
    """
    runtime = register(conn)
    conn.execute("SELECT pg_advisory_lock(hashtextextended('awa.bell:', 0))")
    conn.execute(f"LISTEN {AWA.channel}")
    (parent,) = insert(conn, 1)
    late, soon, past = (after(conn, [parent], run_at=run_at) for run_at in ("1 h", "1 s", "-1 h"))
    assert [found.id for found in _listed(conn)] == [past, soon, late]
    assert [found.waits_for for found in _listed(conn)] == ["parent"] * 3
    assert promote(conn, limit=10) == 0
    settle(conn, runtime, claim(conn, runtime).members)
    run_passes(conn, worker)
    assert state(conn, past) == "available"
    assert [(found.id, found.waits_for) for found in _listed(conn)] == [(soon, "time"), (late, "time")]
    assert parents_of(conn, late) is None
    assert [n.payload for n in conn.notifies(timeout=10, stop_after=1)] == [""]


def _listed(conn: Conn) -> list[Any]:
    return Admin(AWA, lambda: nullcontext(conn)).list_jobs(JobState.SCHEDULED).jobs


def test_who_holds_the_row_of_a_job_that_waits_decides_first(conn: Conn, other: Conn, third: Conn) -> None:
    """Guards: SKIP LOCKED, and the list of parents is read from the locked row.

    Without the first the leader stands still behind a caller's open transaction, without the second what another has
    struck off or put there is undone.
    """
    for waits in (conn, third):
        waits.execute("SET lock_timeout = '10s'")  # it ends without the guard, too
    runtime = register(conn)
    one, two, three = insert(conn, 1, 2, 3)
    job, moved, cancelled = (after(conn, [one, two]) for _ in range(3))
    settle(conn, runtime, claim(conn, runtime, limit=1).members)
    with transaction(other):
        other.execute("UPDATE awa.waiting_jobs SET parents = ARRAY[%s, %s]::bigint[] WHERE id = %s", (two, three, job))
        done = dependents.resolve(conn, AWA, [job, moved, cancelled], {one: "completed"})
        assert (done.skipped, done.started) == ([job], [])
        other.execute("COMMIT")
    assert [parents_of(conn, waits) for waits in (job, moved, cancelled)] == [[two, three], [two], [two]]
    # while the second leader waits for the statement of the first, both have found the parents completed
    assert move(conn, moved, "other")[0] == "moved"
    assert cancel(conn, cancelled)[0] == "cancelled"
    settle(conn, runtime, claim(conn, runtime).members)
    with transaction(other):
        states = {one: "completed", two: "completed", three: "completed"}
        assert dependents.resolve(other, AWA, [job, moved, cancelled], states).started == [job, moved]
        assert dependents.resolve(third, AWA, [job, moved, cancelled], states).started == []
        other.execute("COMMIT")
    assert dependents.resolve(third, AWA, [job, moved, cancelled], states).started == []
    assert claim(conn, runtime).ids == [job]
    assert claim(conn, runtime, queue="other").ids == [moved]
    assert [state(conn, waits) for waits in (job, moved, cancelled)] == ["running", "running", "cancelled"]


def test_a_look_keeps_segments_and_refuses_an_old_snapshot(conn: Conn, other: Conn) -> None:
    """Guards: the lock before the first statement, and READ COMMITTED.

    Without either a parent that leaves a segment which is emptied then is found nowhere.
    """
    (parent,) = insert(conn, 1)
    with transaction(other):
        other.execute("LOCK TABLE awa.jobs_0 IN ACCESS EXCLUSIVE MODE")
        looking = Background(lambda: dependents.look_at_parents(conn, AWA, [parent], {}))
        wait_for_lock(other, conn)
        other.execute("INSERT INTO awa.waiting_jobs (id, run_at, kind) VALUES (%s, now(), 'noop')", (parent,))
        other.execute("TRUNCATE awa.jobs_0")
        other.execute("COMMIT")
    assert looking.result() == [(parent, "waiting", None)]
    with transaction(conn, "REPEATABLE READ"), pytest.raises(psycopg.Error, match="READ COMMITTED"):
        dependents.look_at_parents(conn, AWA, [parent], {})


def test_no_segment_is_emptied_and_no_failure_deleted_before_who_waits_for_it_was_told(
    conn: Conn, other: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: Ring lets jobs go before it prunes, prune_v2 asks again under its lock, DELETE_OLD skips what is awaited.

    Without any of them a job finds its parent gone, and is cancelled though that has completed.
    """
    runtime = register(conn)
    good, bad = insert(conn, 1, 2)
    below, above = after(conn, [good]), after(conn, [bad])
    members = {member.id: member for member in claim(conn, runtime).members}
    assert settle(conn, runtime, [members[good]], [Outcome(members[bad], "failed")]) == []
    assert ended.delete_old(conn, AWA, failed=0.0, dead=0.0, limit=10) == 0
    file = scalar(conn, "SELECT pg_relation_filenode('awa.jobs_0')")
    assert ring.rotate(conn, AWA) == 1
    assert ring.prune(conn, AWA, 0, entries=2, file=file) == "awaited"
    assert ring.prune(conn, AWA, 0, entries=2, file=file, examined=[below]) == "awaited"
    assert scalar(conn, "SELECT awa.prune_v1(0::smallint, 2, %s)", file) == "busy"

    worker = Dependents(AWA)
    keeper = Ring(AWA, retention=0.0, rotate_after=1e9, examine=worker.examine)
    late: list[int] = []

    def arrives() -> Any:
        late.append(after(other, [good]))

    examine = worker.examine

    def examine_slowly(conn: Conn) -> Any:
        found = yield from examine(conn)
        if not late:  # between the look at those that wait and the prune
            arrives()
        return found

    monkeypatch.setattr(keeper, "_examine", examine_slowly)
    while keeper.run(conn, 0.0) == 0.0:
        pass
    assert state(conn, good) == "completed"  # kept for the late one
    assert [state(conn, job) for job in (below, above, late[0])] == ["available", "cancelled", "scheduled"]
    assert ended.delete_old(conn, AWA, failed=0.0, dead=0.0, limit=10) == 2
    for seen in keeper._seen.values():
        seen.look_at = 0.0
    unrelated = after(conn, insert(conn, 3))  # waits for one in another segment, which is no hindrance
    while keeper.run(conn, 0.0) == 0.0:
        pass
    assert state(conn, good) is None
    assert state(conn, late[0]) == "available"
    assert state(conn, unrelated) == "scheduled"


def test_a_segment_is_emptied_however_many_jobs_begin_to_wait_for_younger_ones(conn: Conn) -> None:
    """Guard: prune_v2 asks only for parents whose ids lie among those of the segment.

    Without it a steady stream of more than 100 new dependents between look and prune keeps every segment for ever.
    """
    runtime = register(conn)
    (old,) = insert(conn, 0)
    assert settle(conn, runtime, claim(conn, runtime).members) == []
    file = scalar(conn, "SELECT pg_relation_filenode('awa.jobs_0')")
    assert ring.rotate(conn, AWA) == 1
    for parent in insert(conn, *range(150)):
        after(conn, [parent])
    assert ring.prune(conn, AWA, 0, entries=1, file=file) == "pruned"
    assert state(conn, old) is None


def test_one_pass_handles_many_and_asks_for_each_parent_once(
    conn: Conn, worker: Dependents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: windows go on behind the last job; what is known is not searched for; far ids wait for a later search.

    Without the last, those that were left out are taken for gone.
    """
    monkeypatch.setattr(chore, "WINDOW", 50)
    monkeypatch.setattr(chore, "PARENTS", 60)
    runtime = register(conn)
    parents = insert(conn, *range(200))
    far = []
    for _ in range(300):  # ten searches of 32
        conn.execute("SELECT setval('awa.entry_id_seq', nextval('awa.entry_id_seq') + 20000)")
        far += insert(conn, 0)
    fan_in = after(conn, far[:100])
    jobs = [after(conn, [parent]) for parent in parents]
    wide = after(conn, far[100:200])
    wider = after(conn, far[200:])
    run_passes(conn, worker, 3)
    assert worker._places.keys() == {*parents, *far}
    searched: list[int] = []
    look = dependents.look_at_parents

    def spy(conn: Conn, schema: Any, ids: Sequence[int], places: Any) -> Any:
        searched.extend(set(ids) - places.keys())
        return look(conn, schema, ids, places)

    monkeypatch.setattr(dependents, "look_at_parents", spy)
    members = claim(conn, runtime, limit=500).members
    run_passes(conn, worker)
    settle(conn, runtime, members[:150])
    run_passes(conn, worker)
    assert not searched
    assert [state(conn, job) for job in jobs[:150]] == ["available"] * 150
    assert [state(conn, job) for job in (*jobs[150:], fan_in, wide, wider)] == ["scheduled"] * 53
    settle(conn, runtime, members[150:])
    run_passes(conn, worker, 2)
    assert [state(conn, job) for job in (*jobs[150:], fan_in, wide, wider)] == ["available"] * 53
    assert claim(conn, runtime, limit=500).ids == [*jobs[:150], *sorted([*jobs[150:], fan_in, wide, wider])]


def test_a_parent_that_waits_itself_is_not_asked_for_and_its_end_is_seen_all_the_same(
    conn: Conn, worker: Dependents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: who is let go is known no longer, and who was known is not known for more than a pass.

    Without either, what runs after a job that was cancelled, or has run, waits for ever.
    """
    runtime = register(conn)
    (root,) = insert(conn, 1)
    chain = [root]
    for _ in range(6):
        chain.append(after(conn, chain[-1:]))
    asked: list[int] = []
    look = dependents.look_at_parents

    def spy(conn: Conn, schema: Any, ids: Sequence[int], places: Any) -> Any:
        asked.extend(ids)
        return look(conn, schema, ids, places)

    monkeypatch.setattr(dependents, "look_at_parents", spy)
    run_passes(conn, worker, 3)
    assert asked == [root] * 3
    for job in chain[:3]:
        members = claim(conn, runtime).members
        assert [member.id for member in members] == [job]
        settle(conn, runtime, members)
        run_passes(conn, worker)
    assert cancel(conn, chain[5])[0] == "cancelled"
    run_passes(conn, worker, 2)
    assert [state(conn, job) for job in chain[3:]] == ["available", "scheduled", "cancelled", "cancelled"]
    # somebody else cancels one between a pass and the look before a segment is emptied
    last = after(conn, [chain[4]])
    run_passes(conn, worker)
    assert cancel(conn, chain[4])[0] == "cancelled"
    assert result_of(worker.examine(conn)) == []
    assert state(conn, last) == "cancelled"


def test_what_may_have_ended_is_not_taken_for_looked_at(conn: Conn, worker: Dependents) -> None:
    """Guard: a parent that was claimed, and whose claim was not looked for yet, is 'passed' and not 'open'.

    Else a segment is emptied of completed parents that somebody still waits for.
    """
    runtime = register(conn)
    parents = insert(conn, *range(120))
    jobs = [after(conn, [parent]) for parent in parents]
    assert settle(conn, runtime, claim(conn, runtime, limit=200).members) == []
    found = dependents.look_at_parents(conn, AWA, parents, {})
    assert Counter(state for _, state, _ in found) == {"completed": 50, "passed": 70}
    assert result_of(worker.examine(conn)) == []
    run_passes(conn, worker, 2)
    assert [state(conn, job) for job in jobs] == ["available"] * 120


def result_of(steps: Generator[None, None, list[int]]) -> list[int]:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return list(end.value)


def test_a_worker_of_another_language_may_leave_nonsense_behind(conn: Conn, worker: Dependents) -> None:
    """Guard: a row that names no parents, or itself, keeps nobody else waiting."""
    runtime = register(conn)
    add = "INSERT INTO awa.waiting_jobs (waits_for, queue, kind, args, parents) VALUES ('parent', 'q', 'noop', %s, %s)"
    conn.execute(add, (Json({}), None))
    conn.execute(add, (Json({}), []))
    conn.execute(add.replace("%s)", "ARRAY[currval('awa.entry_id_seq')])"), (Json({}),))
    (parent,) = insert(conn, 1)
    job = after(conn, [parent])
    settle(conn, runtime, claim(conn, runtime).members)
    run_passes(conn, worker)
    assert state(conn, job) == "available"
    assert len(claim(conn, runtime).members) == 3
