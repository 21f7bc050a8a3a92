"""Pausing, limiting, cancelling and purging queues, beside claims and others who control them.

Each docstring names the guard of the engine that the test fails without.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
import pytest

from awa import JobNotFound, JobState, Limits, QueueBusy, QueueNotFound, RateLimit
from awa.admin import Admin, Purged
from awa.storage import queue_control
from awa.storage.check import check_storage
from awa.storage.dependents import look_at_parents, resolve
from awa.storage.jobs import get_job
from tests.fixtures.db import wait_until
from tests.storage.engine import (
    AWA,
    Background,
    Conn,
    Outcome,
    cancel,
    claim,
    claim_in_steps,
    insert,
    places,
    promote,
    register,
    scalar,
    settle,
    state,
    transaction,
)

PAUSED, FULL = 16, 32


def pause(conn: Conn, queue: str = "q", by: str | None = None, reason: str | None = None) -> tuple[str, bool]:
    row = conn.execute("SELECT * FROM awa.pause_queue_v1(%s, %s, %s)", (queue, by, reason)).fetchone()
    assert row is not None
    return row[0], row[1]


def resume(conn: Conn, queue: str = "q") -> str:
    return str(scalar(conn, "SELECT awa.resume_queue_v1(%s)", queue))


def limit(conn: Conn, queue: str = "q", cleared: Sequence[str] = (), **overrides: Any) -> str:
    text = "SELECT awa.limit_queue_v1(%s, %s::json, 'me', %s)"
    return str(scalar(conn, text, queue, json.dumps(overrides), list(cleared)))


def declare(conn: Conn, queue: str = "q", **declared: Any) -> str:
    return str(scalar(conn, "SELECT awa.declare_queue_v1(%s, %s::json)", queue, json.dumps(declared)))


def hear(conn: Conn) -> set[str]:
    """What was notified since the last call to those who sleep for queues; *conn* listens from the first one on."""
    conn.execute(f"LISTEN {scalar(conn, 'SELECT awa.channel()')}")
    return {notify.payload for notify in conn.notifies(timeout=0.2)}


def make_waiting(conn: Conn) -> dict[str, int]:
    """A job of queue q in each of the places in which it waits, by its name."""
    runtime = register(conn)
    found: dict[str, int] = {}
    [found["retryable"]] = insert(conn, 1)
    [found["express"]] = insert(conn, 2)
    members = claim(conn, runtime).members
    settle(conn, runtime, [], [Outcome(members[0], "retried", 60.0), Outcome(members[1], "released")])
    [found["aside"]] = insert(conn, 3, kind="unknown")
    claim(conn, runtime, kinds=["none"], limit=1)  # meets the express one, too
    found["scheduled"] = scalar(
        conn, "INSERT INTO awa.waiting_jobs (queue, kind, run_at) VALUES ('q', 'noop', now() + '1 h') RETURNING id"
    )
    found["parent"] = scalar(
        conn,
        "INSERT INTO awa.waiting_jobs (queue, kind, waits_for, parents)"
        " VALUES ('q', 'noop', 'parent', %s) RETURNING id",
        [found["scheduled"]],
    )
    for priority in (1, 2, 3, 4):
        [found[f"priority {priority}"]] = insert(conn, 4, priority=priority)
    return found


# Pausing


def test_a_paused_queue_starts_nothing_until_it_is_resumed(conn: Conn, admin: Admin) -> None:
    runtime = register(conn)
    ids = insert(conn, 1, 2)
    [member] = claim(conn, runtime, limit=1).members
    info = admin.pause_queue("q", by="anna", reason="the bank is closed")
    assert (info.is_paused, info.paused_by, info.pause_reason) == (True, "anna", "the bank is closed")
    assert (info.running, info.counts[JobState.AVAILABLE].value) == (1, 1)
    for _ in range(2):
        claimed = claim(conn, runtime, bell=True)
        assert (claimed.members, claimed.flags & PAUSED) == ([], PAUSED)
    assert settle(conn, runtime, [member]) == []
    insert(conn, 3)
    assert admin.get_queue("q").counts[JobState.AVAILABLE].value == 2
    info = admin.resume_queue("q")
    assert (info.is_paused, info.paused_at, info.paused_by, info.pause_reason) == (False, None, None, None)
    assert claim(conn, runtime).ids[0] == ids[1]


def test_a_second_pause_keeps_the_time_and_says_who_and_why_anew(conn: Conn, admin: Admin) -> None:
    first = admin.pause_queue("q", by="anna", reason="first")
    assert pause(conn, "q", "ben") == ("nothing", True)
    second = admin.get_queue("q")
    assert (second.paused_at, second.paused_by, second.pause_reason) == (first.paused_at, "ben", None)
    assert resume(conn) == "resumed"
    assert resume(conn) == "nothing"
    assert pause(conn)[0] == "paused"
    assert admin.get_queue("q").paused_at > first.paused_at  # type: ignore[operator]


def test_a_pause_waits_for_a_claim_that_is_open(conn: Conn, other: Conn, admin: Admin) -> None:
    """Guard (claim lock): a claim that is not committed has read that the queue goes on, and starts its jobs yet."""
    runtime = register(conn)
    insert(conn, 1, 2)
    with transaction(other):
        [member] = claim(other, runtime, limit=1).members
        pausing = Background(lambda: admin.pause_queue("q"))
        wait_until(lambda: scalar(conn, "SELECT count(*) FROM awa.queue_meta WHERE paused_at IS NOT NULL") == 1)
        conn.execute("SELECT pg_sleep(0.2)")
        assert pausing.is_running
        other.execute("COMMIT")
    assert pausing.result().running == 1
    assert settle(other, runtime, [member]) == []
    assert claim(conn, runtime).members == []


def test_a_pause_is_stored_though_a_claim_does_not_end(
    conn: Conn, other: Conn, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: a pause may be an emergency; it does not fail because a worker is frozen in the middle of a claim."""
    monkeypatch.setattr(queue_control, "QUIET_WITHIN", 0.5)
    runtime = register(conn)
    insert(conn, 1)
    with transaction(other):
        claim(other, runtime)
        with pytest.raises(QueueBusy, match="'q' is paused, but a claim") as caught:
            admin.pause_queue("q", reason="flood")
        assert caught.value.queue == "q"
        assert admin.get_queue("q").pause_reason == "flood"
    assert claim(conn, runtime).flags & PAUSED


def test_resuming_wakes_everybody(conn: Conn, other: Conn) -> None:
    """Guard (help): nobody holds the bell of a queue that was paused."""
    pause(conn)
    assert hear(other) == set()
    resume(conn)
    assert hear(other) == {"\x01q"}
    other.execute("SELECT pg_advisory_lock(hashtextextended('awa.bell:q', 0))")
    pause(conn)
    resume(conn)
    assert hear(other) == {"q", "\x01q"}


# Limits


def test_what_an_operator_says_goes_before_what_code_declares(conn: Conn, admin: Admin) -> None:
    assert declare(conn, max_running=5, rate_limit={"count": 50}) == "declared"
    info = admin.get_queue("q")
    declared = Limits(max_running=5, rate_limit=RateLimit(50))
    assert (info.limits, info.declared, info.overrides) == (declared, declared, {})
    info = admin.set_limits("q", by="anna", max_running=2, rate_limit=None)
    assert (info.limits, info.declared) == (Limits(max_running=2), declared)
    assert (info.overrides, info.overrides_by) == ({"max_running": 2, "rate_limit": None}, "anna")
    info = admin.set_limits("q", max_running_per_key=1)
    assert info.overrides == {"max_running": 2, "rate_limit": None, "max_running_per_key": 1}
    columns = "SELECT max_running, rate, burst, max_running_per_key FROM awa.queue_meta"
    assert conn.execute(columns).fetchall() == [(2, None, None, 1)]
    assert declare(conn, max_running=7) == "declared"
    assert admin.get_queue("q").limits == Limits(max_running=2, max_running_per_key=1)
    assert admin.clear_limits("q", "max_running").limits == Limits(max_running=7, max_running_per_key=1)
    info = admin.clear_limits("q", by="ben")
    assert (info.limits, info.overrides, info.overrides_by) == (Limits(max_running=7), {}, "ben")
    assert declare(conn) == "declared"
    assert admin.get_queue("q").declared == Limits()
    assert conn.execute(columns).fetchall() == [(None, None, None, None)]


def test_a_rate_is_stored_as_attempts_a_second(conn: Conn, admin: Admin) -> None:
    info = admin.set_limits("q", rate_limit=RateLimit(90, per=60))
    assert info.limits.rate_limit == RateLimit(90, per=60, burst=90)
    assert conn.execute("SELECT rate, burst FROM awa.queue_meta").fetchall() == [(1.5, 90)]
    admin.set_limits("q", rate_limit=RateLimit(0.5, burst=3))
    assert conn.execute("SELECT rate, burst FROM awa.queue_meta").fetchall() == [(0.5, 3)]


def test_a_declaration_that_is_no_news_is_one_look(conn: Conn, other: Conn) -> None:
    """Guard: every worker declares at its start; a thousand of them do not stand in the way of claims."""
    runtime = register(conn)
    declare(conn, max_running=3, rate_limit={"count": 5.0, "per": 1.0, "burst": 5})
    with transaction(other):
        claim(other, runtime)
        assert queue_control.declare_queue(conn, AWA, "q", Limits(max_running=3, rate_limit=RateLimit(5))) is False
        with pytest.raises(QueueBusy, match="held by claims") as caught:
            queue_control.declare_queue(conn, AWA, "q", Limits(max_running=4))
        assert caught.value.queue == "q"
    assert scalar(conn, "SELECT max_running FROM awa.queue_meta") == 3
    assert queue_control.declare_queue(conn, AWA, "q", Limits(max_running=4)) is True


def test_a_limit_waits_for_another_who_says_something_of_the_queue(
    conn: Conn, other: Conn, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: the database waits 50 ms for the row, so that claims are not held up; whoever says it asks it again."""
    monkeypatch.setattr(queue_control, "HELD_WITHIN", 60.0)
    asked: list[object] = []
    ask = queue_control._ask

    def counting(*args: Any) -> Any:
        asked.append(answer := ask(*args))
        return answer

    monkeypatch.setattr(queue_control, "_ask", counting)
    pause(conn)
    with transaction(other):
        resume(other)
        limiting = Background(lambda: admin.set_limits("q", max_running=2))
        wait_until(lambda: len(asked) >= 2)
        other.execute("COMMIT")
    assert limiting.result().limits == Limits(max_running=2)
    assert asked[:2] == ["busy", "busy"] and asked[-1] == "limited"


def test_a_limit_waits_for_a_claim_that_is_open(conn: Conn, other: Conn, admin: Admin) -> None:
    """Guard (claim lock): without it the claim's attempts were counted by nobody."""
    runtime = register(conn)
    insert(conn, 1, 2, 3)
    with transaction(other):
        members = claim(other, runtime, limit=2).members
        limiting = Background(lambda: admin.set_limits("q", max_running=2))
        conn.execute("SELECT pg_sleep(0.2)")
        assert limiting.is_running
        other.execute("COMMIT")
    assert limiting.result().limits == Limits(max_running=2)
    claimed = claim(conn, runtime)
    assert (claimed.members, claimed.flags & FULL) == ([], FULL)
    settle(conn, runtime, members[:1])
    assert claim(conn, runtime).numbers == [3]


def test_a_limit_of_keys_counts_what_runs_already(conn: Conn, admin: Admin) -> None:
    """Guard (awa.limits_changed): attempts that are open get their grants with the first limit."""
    runtime = register(conn)
    insert_keyed(conn, "a", "a", "a", "b")
    members = claim(conn, runtime, limit=1).members
    admin.set_limits("q", max_running_per_key=1)
    assert [json.loads(m.args or "")["key"] for m in claim(conn, runtime).members] == ["b"]
    settle(conn, runtime, members)
    assert claim_in_steps(conn, runtime, limit=10) == [1]
    admin.set_limits("q", max_running_per_key=None)
    assert claim_in_steps(conn, runtime, limit=10) == [2]


def insert_keyed(conn: Conn, *keys: str) -> list[int]:
    rows = conn.execute(
        "INSERT INTO awa.jobs (queue, kind, concurrency_key, args)"
        " SELECT 'q', 'noop', k, json_build_object('key', k, 'n', o - 1)"
        "   FROM unnest(%s::text[]) WITH ORDINALITY u(k, o) ORDER BY o"
        " RETURNING id",
        (list(keys),),
    ).fetchall()
    return [row[0] for row in rows]


@pytest.mark.parametrize(
    ("before", "after", "calls"),
    [
        ({"max_running": 1}, {"max_running": 2}, True),
        ({"max_running": 2}, {"max_running": 1}, False),
        ({"max_running": 1}, {"max_running": None}, True),
        ({"max_running_per_key": 1}, {"max_running_per_key": 2}, True),
        ({"rate_limit": {"count": 1}}, {"rate_limit": {"count": 2}}, True),
        ({"rate_limit": {"count": 2}}, {"rate_limit": {"count": 1}}, False),
        ({"rate_limit": {"count": 1}}, {"max_running": 2}, False),
    ],
)
def test_workers_are_called_when_more_may_run(
    conn: Conn, other: Conn, before: dict[str, Any], after: dict[str, Any], calls: bool
) -> None:
    limit(conn, **before)
    hear(other)
    assert limit(conn, **after) == "limited"
    assert hear(other) == ({"\x01q"} if calls else set())


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"max_runing": 3}, "there is no limit max_runing"),
        ({"max_running": 0}, "at least 1, not 0"),
        ({"max_running_per_key": -1}, "at least 1, not -1"),
        ({"max_running": 2**31}, "cannot be read"),
        ({"max_running": "x"}, "cannot be read"),
        ({"max_running": True}, "cannot be read"),
        ({"rate_limit": 5}, "not 5"),
        ({"rate_limit": {"count": 0}}, 'not {"count": 0}'),
        ({"rate_limit": {"count": 1, "per": 0}}, "cannot be read"),
        ({"rate_limit": {"count": "NaN"}}, "NaN"),
        ({"rate_limit": {"count": 1, "burst": 0}}, '"burst": 0'),
    ],
)
def test_sql_that_cannot_be_meant_is_refused(conn: Conn, said: dict[str, Any], named: str) -> None:
    for call in (limit, declare):
        with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
            call(conn, **said)
        assert named in str(caught.value)
    assert scalar(conn, "SELECT count(*) FROM awa.queue_meta") == 0


def test_to_clear_what_is_no_limit_is_refused(conn: Conn) -> None:
    limit(conn, max_running=3)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="there is no limit max_runing"):
        limit(conn, cleared=["rate_limit", "max_runing"])
    assert limit(conn, cleared=["rate_limit"]) == "nothing"
    assert limit(conn, cleared=["max_running"]) == "limited"


def test_an_old_snapshot_is_refused(conn: Conn) -> None:
    """Guard: it would not see the claim that the lock has waited for."""
    for call in (lambda: pause(conn), lambda: limit(conn, max_running=1), lambda: declare(conn, max_running=1)):
        with transaction(conn, "REPEATABLE READ"), pytest.raises(psycopg.Error) as caught:
            call()
        assert caught.value.sqlstate == "AWA02"


# Looking


def test_queues_are_listed_that_have_jobs_or_of_which_something_was_said(conn: Conn, admin: Admin) -> None:
    insert(conn, 1, queue="jobs")
    pause(conn, "paused")
    declare(conn, "declared", max_running=1)
    conn.execute(
        "INSERT INTO awa.runtime_instances (uuid, hostname, pid, version, heartbeat_ms, queues) VALUES"
        """ (gen_random_uuid(), 'h', 1, '0', 5000, '[{"name": "served", "max_workers": null}]')"""
    )
    found = admin.list_queues()
    assert [info.name for info in found] == ["declared", "jobs", "paused", "served"]
    assert [info.is_paused for info in found] == [False, False, True, False]
    for info in found:
        assert admin.get_queue(info.name, by_kind=False) == info
    with pytest.raises(QueueNotFound, match=r"no queue 'jbos' .* known are 'declared', 'jobs', 'paused', 'served'"):
        admin.get_queue("jbos")
    assert admin.count_waiting("jbos") == 0


def test_a_queue_that_is_listed_is_found(conn: Conn, admin: Admin) -> None:
    """Guard: one whose jobs were purged, and whose entries are stored still, was listed and unknown."""
    insert(conn, 1, queue="jobs")
    assert admin.purge_queue("jobs").waiting == 1
    [info] = admin.list_queues()
    assert admin.get_queue("jobs", by_kind=False) == info and not any(count.value for count in info.counts.values())


# Cancelling what waits


def test_whatever_waits_is_cancelled(conn: Conn, admin: Admin) -> None:
    jobs = make_waiting(conn)
    runtime = register(conn)
    [elsewhere] = insert(conn, 1, queue="elsewhere")
    assert {name: state(conn, job) for name, job in jobs.items()} == {
        "retryable": "retryable", "express": "available", "aside": "available", "scheduled": "scheduled",
        "parent": "scheduled", **{f"priority {n}": "available" for n in (1, 2, 3, 4)},
    }  # fmt: skip
    assert admin.count_waiting("q") == len(jobs)
    assert admin.cancel_waiting("q", reason="the shop is closed") == len(jobs)
    assert {state(conn, job) for job in jobs.values()} == {"cancelled"}
    for job in jobs.values():
        assert places(conn, job) == {"ended": 1}
        assert get_job(conn, AWA, job).history[-1]["text"] == "the shop is closed"
    assert claim(conn, runtime).members == []
    assert (admin.count_waiting("q"), admin.cancel_waiting("q")) == (0, 0)
    assert state(conn, elsewhere) == "available"


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_steps_find_each_job_once(conn: Conn, open_connection: Callable[[], Conn], step: int) -> None:
    """Guard: a step goes on behind the last, also between ranges that claims have passed and jobs that stay."""
    runtime = register(conn)
    make_waiting(conn)
    with transaction(open_connection()) as late:
        [uncommitted] = insert(late, 0)
        insert(conn, *range(10))
        running = claim(conn, runtime, limit=4).members
        cancel(conn, insert(conn, 10)[0])
        late.execute("COMMIT")
    waiting = scalar(conn, "SELECT count(*) FROM awa.waiting_jobs WHERE queue = 'q'")
    total, go_on, happened = 0, None, "more"
    for _ in range(400):
        row = conn.execute("SELECT * FROM awa.cancel_waiting_v1('q', 'x', %s, %s)", (go_on, step)).fetchone()
        assert row is not None
        happened, cancelled, after = row
        go_on = json.dumps(after)
        assert cancelled <= step
        total += cancelled
        if happened == "done":
            break
    assert happened == "done"
    assert scalar(conn, "SELECT count(*) FROM awa.waiting_jobs WHERE queue = 'q'") == 0 < waiting
    assert claim(conn, runtime).members == []
    ids = [row[0] for row in conn.execute("SELECT DISTINCT id FROM awa.jobs UNION SELECT id FROM awa.ended_jobs")]
    alive = {member.id for member in running}
    assert {job: state(conn, job) for job in ids} == {job: "running" if job in alive else "cancelled" for job in ids}
    assert total == len(ids) - len(alive) - 1
    assert uncommitted in ids


def test_running_jobs_are_left_alone(conn: Conn, admin: Admin) -> None:
    runtime = register(conn)
    insert(conn, 1, 2)
    [member] = claim(conn, runtime, limit=1).members
    assert admin.cancel_waiting("q") == 1
    assert state(conn, member.id) == "running"
    assert settle(conn, runtime, [member]) == []
    assert state(conn, member.id) == "completed"


def test_what_is_inserted_meanwhile_stays(conn: Conn) -> None:
    """Guard: it is about the jobs that were there when it began."""
    runtime = register(conn)
    old = insert(conn, 1, 2)
    row = conn.execute("SELECT happened, go_on FROM awa.cancel_waiting_v1('q', NULL, NULL, 1)").fetchone()
    assert row is not None
    new = insert(conn, 3)
    later = scalar(
        conn, "INSERT INTO awa.waiting_jobs (queue, kind, run_at) VALUES ('q', 'noop', now() + '1 h') RETURNING id"
    )
    while row[0] != "done":
        row = conn.execute(
            "SELECT happened, go_on FROM awa.cancel_waiting_v1('q', NULL, %s, 1)", (json.dumps(row[1]),)
        ).fetchone()
        assert row is not None
    assert [state(conn, job) for job in old] == ["cancelled", "cancelled"]
    assert (state(conn, new[0]), state(conn, later)) == ("available", "scheduled")
    assert claim(conn, runtime).numbers == [3]


def test_a_job_that_moves_meanwhile_is_found_at_its_new_place(conn: Conn) -> None:
    """Guard: passes follow each other until one finds nothing."""
    runtime = register(conn)
    [first, aside] = [*insert(conn, 1, priority=1), *insert(conn, 2, kind="unknown", priority=4)]
    due = scalar(
        conn, "INSERT INTO awa.waiting_jobs (queue, kind, run_at) VALUES ('q', 'noop', now() + '1 h') RETURNING id"
    )
    go_on: str | None = None

    def step() -> str:
        nonlocal go_on
        row = conn.execute("SELECT happened, go_on FROM awa.cancel_waiting_v1('q', NULL, %s, 1)", (go_on,)).fetchone()
        assert row is not None
        go_on = json.dumps(row[1])
        return str(row[0])

    conn.execute("UPDATE awa.waiting_jobs SET queue = 'hidden' WHERE id = %s", (due,))
    step()
    assert state(conn, first) == "cancelled"
    # the states of what waits are behind it now, and the lane of priority 4 is ahead
    conn.execute("UPDATE awa.waiting_jobs SET queue = 'q', run_at = now() WHERE id = %s", (due,))
    assert promote(conn) == 1
    assert claim(conn, runtime, kinds=["other"]).members == []
    assert scalar(conn, "SELECT count(*) FROM awa.waiting_jobs WHERE waits_for = 'kind'") == 2
    for _ in range(50):
        if step() == "done":
            break
    assert [state(conn, job) for job in (first, aside, due)] == ["cancelled"] * 3


def test_what_an_open_claim_takes_is_not_cancelled(conn: Conn, other: Conn, admin: Admin) -> None:
    """Guard (claim lock, look after it): an open claim is invisible before."""
    runtime = register(conn)
    insert(conn, 1, 2, 3)
    with transaction(other):
        members = claim(other, runtime, limit=2).members
        cancelling = Background(lambda: admin.cancel_waiting("q"))
        conn.execute("SELECT pg_sleep(0.3)")
        assert cancelling.is_running
        other.execute("COMMIT")
    assert cancelling.result() == 1
    assert [state(conn, member.id) for member in members] == ["running", "running"]
    assert settle(conn, runtime, members) == []


def test_claims_go_on_beside_it(conn: Conn, other: Conn, admin: Admin) -> None:
    """Guard: between steps the lock is free; each job either runs or is cancelled."""
    runtime = register(conn)
    ids = insert(conn, *range(3000))
    cancelling = Background(lambda: admin.cancel_waiting("q"))
    taken: list[int] = []
    while cancelling.is_running:
        claimed = claim(other, runtime, limit=10)
        taken += claimed.ids
        assert settle(other, runtime, claimed.members) == []
    assert cancelling.result() + len(taken) == len(ids)
    assert len(set(taken)) == len(taken)
    ended = conn.execute("SELECT id FROM awa.ended_jobs WHERE state = 'cancelled'").fetchall()
    assert {row[0] for row in ended} == set(ids) - set(taken)


def test_jobs_that_others_hold_are_told(conn: Conn, other: Conn, admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: rows are skipped, not waited for; and whoever asked learns that some are left."""
    monkeypatch.setattr(queue_control, "PATIENCE", 0.4)
    jobs = make_waiting(conn)
    with transaction(other):
        other.execute("SELECT FROM awa.waiting_jobs WHERE id = %s FOR UPDATE", (jobs["scheduled"],))
        with pytest.raises(QueueBusy, match="8 jobs of queue 'q' were cancelled; then") as caught:
            admin.cancel_waiting("q")
        assert caught.value.done == len(jobs) - 1
    assert state(conn, jobs["scheduled"]) == "scheduled"
    assert admin.cancel_waiting("q") == 1


def test_what_follows_from_a_cancellation_follows(conn: Conn, other: Conn, admin: Admin) -> None:
    """Guard (awa.conclude): follow-ups, unique keys, grants and waiters."""
    follow = json.dumps({"cancelled": [{"kind": "after", "queue": "q"}]})
    row = conn.execute(
        "INSERT INTO awa.jobs (queue, kind, follow_ups, unique_key, ordering_key)"
        " VALUES ('q', 'noop', %s, %s, 'o') RETURNING id",
        (follow, b"k" * 16),
    ).fetchone()
    assert row is not None
    conn.execute("INSERT INTO awa.job_uniques (key, id) VALUES (%s, %s)", (b"k" * 16, row[0]))
    conn.execute("INSERT INTO awa.grants (queue, scope, key, id) VALUES ('q', 'order', 'o', %s)", (row[0],))
    other.execute(f"LISTEN {scalar(other, 'SELECT awa.result_channel()')}")
    other.execute("SELECT pg_advisory_lock_shared(hashtextextended('awa.result:' || %s, 0))", (row[0],))
    # a waiter's lock is its own session's
    assert admin.cancel_waiting("q") == 1
    assert [notify.payload for notify in other.notifies(timeout=0.5, stop_after=1)] == [str(row[0])]
    assert scalar(conn, "SELECT count(*) FROM awa.job_uniques") == 0
    assert scalar(conn, "SELECT is_over FROM awa.grants WHERE id = %s", row[0]) is True
    runtime = register(conn)
    assert [member.kind for member in claim(conn, runtime).members] == ["after"]


def test_the_next_in_order_runs_when_the_first_is_cancelled(conn: Conn, admin: Admin) -> None:
    """Guard: a retryable job holds its ordering key; in another queue nothing waits for it any more."""
    runtime = register(conn)
    conn.execute("INSERT INTO awa.jobs (queue, kind, ordering_key, args) VALUES ('q', 'noop', 'o', '{\"n\": 1}')")
    [member] = claim(conn, runtime).members
    settle(conn, runtime, [], [Outcome(member, "retried", 3600.0)])
    conn.execute("INSERT INTO awa.jobs (queue, kind, ordering_key, args) VALUES ('q', 'noop', 'o', '{\"n\": 2}')")
    assert claim(conn, runtime).members == []
    waiting = scalar(conn, "SELECT id FROM awa.waiting_jobs WHERE waits_for = 'order'")
    conn.execute("UPDATE awa.waiting_jobs SET queue = 'hidden' WHERE id = %s", (waiting,))
    assert admin.cancel_waiting("q") == 1
    conn.execute("UPDATE awa.waiting_jobs SET queue = 'q' WHERE id = %s", (waiting,))
    assert claim_in_steps(conn, runtime, limit=10) == [2]


# Purging


def test_whatever_waits_or_has_ended_is_deleted(conn: Conn, admin: Admin) -> None:
    jobs = make_waiting(conn)
    runtime = register(conn)
    ids = insert(conn, 1, 2, 3, 4, priority=1)
    members = claim(conn, runtime, limit=3).members
    assert [member.id for member in members][:2] == [jobs["priority 1"], ids[0]]
    completed, failed, running = members
    settle(conn, runtime, [completed], [Outcome(failed, "failed")])
    cancel(conn, ids[2])
    conn.execute(
        "INSERT INTO awa.ended_jobs (id, created_at, state, dead_reason, priority, attempt, max_attempts, queue, kind,"
        " args) VALUES (nextval('awa.entry_id_seq'), now(), 'failed', 'poison', 2, 1, 1, 'q', 'noop', '{}')"
    )
    waiting = admin.count_waiting("q")
    assert admin.purge_queue("q") == Purged(waiting=waiting, ended=3)
    for job in {*jobs.values(), *ids} - {completed.id, running.id}:
        assert state(conn, job) is None
        assert cancel(conn, job) == ("not_found", None)
        with pytest.raises(JobNotFound):
            admin.move(job, "elsewhere")
    assert (state(conn, completed.id), state(conn, running.id)) == ("completed", "running")
    assert settle(conn, runtime, [running]) == []
    counts = {state: count.value for state, count in admin.get_queue("q").counts.items() if count.value}
    assert counts == {JobState.COMPLETED: 2}
    assert claim(conn, runtime).members == []
    for listed in JobState:
        if listed is not JobState.COMPLETED:
            assert admin.list_jobs(listed).jobs == []
    assert admin.purge_queue("q") == Purged(0, 0)


def test_unique_keys_of_purged_jobs_are_free(conn: Conn, admin: Admin) -> None:
    """Guard: whatever states a key is held in; cancelled and failed ones, too."""
    keys = [bytes([n]) * 16 for n in range(3)]
    ids = [
        scalar(
            conn,
            "SELECT id FROM awa.enqueue_v1('noop', p_queue => 'q', p_run_at => %s::timestamptz, p_unique_key => %s,"
            " p_unique_states => '{scheduled,available,cancelled,failed}')",
            when,
            key,
        )
        for key, when in zip(keys, [None, "2100-01-01", None], strict=True)
    ]
    assert cancel(conn, ids[2]) == ("cancelled", "cancelled")
    assert scalar(conn, "SELECT count(*) FROM awa.job_uniques") == 3
    assert admin.purge_queue("q") == Purged(waiting=2, ended=1)
    assert scalar(conn, "SELECT count(*) FROM awa.job_uniques") == 0


def test_who_runs_after_a_purged_job_finds_it_gone(conn: Conn, admin: Admin) -> None:
    [parent] = insert(conn, 1)
    child = scalar(
        conn,
        "INSERT INTO awa.waiting_jobs (queue, kind, waits_for, parents)"
        " VALUES ('b', 'noop', 'parent', %s) RETURNING id",
        [parent],
    )
    assert admin.purge_queue("q") == Purged(1, 0)
    assert look_at_parents(conn, AWA, [parent], {}) == [(parent, "gone", None)]
    assert resolve(conn, AWA, [child], {parent: "gone"}).cancelled == [child]
    assert "its history was deleted" in get_job(conn, AWA, child).history[-1]["text"]


def test_a_purged_queue_can_be_emptied(conn: Conn, admin: Admin) -> None:
    """Guard: a purged entry has an end of its own, so it pins no segment."""
    insert(conn, *range(20))
    admin.purge_queue("q")
    unended = scalar(
        conn,
        "SELECT count(*) FROM awa.jobs j WHERE NOT EXISTS"
        " (SELECT FROM awa.attempt_ends e WHERE e.slot = j.slot AND e.entry_id = j.entry_id)",
    )
    assert unended == 0
    assert conn.execute("SELECT DISTINCT outcome FROM awa.attempt_ends").fetchall() == [("purged",)]
    assert [found for found in check_storage(conn, AWA).findings if found.name != "origin"] == []


def test_purging_beside_an_open_claim(conn: Conn, other: Conn, admin: Admin) -> None:
    runtime = register(conn)
    insert(conn, 1, 2, 3)
    with transaction(other):
        members = claim(other, runtime, limit=2).members
        purging = Background(lambda: admin.purge_queue("q"))
        conn.execute("SELECT pg_sleep(0.3)")
        assert purging.is_running
        other.execute("COMMIT")
    assert purging.result() == Purged(1, 0)
    assert settle(conn, runtime, members) == []
