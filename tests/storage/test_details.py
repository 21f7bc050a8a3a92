"""One job with all that is kept of it: attempts from the segments and the history, and the jobs around it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from typing import Any

import psycopg
import pytest

from awa.admin import Admin
from awa.cli.shown import job_facts, print_job
from awa.errors import JobNotFound, ValidationError
from awa.job import JobState
from awa.storage import details, jobs
from awa.storage.details import AttemptInfo, JobDetails
from awa.storage.jobs import JobInfo
from tests.storage import lives
from tests.storage.engine import (
    AWA,
    Conn,
    Outcome,
    cancel,
    claim,
    complete,
    fall_silent,
    fence,
    insert,
    promote,
    register,
    rescue,
    retry,
    settle,
)

WHY = {"type": "ValueError", "text": "why", "traceback": "line 1"}


def plain(job: JobDetails) -> JobInfo:
    return JobInfo(**{field.name: getattr(job, field.name) for field in fields(JobInfo)})


def told(attempts: list[AttemptInfo]) -> list[tuple[int, str | None, int | None]]:
    return [(one.attempt, one.outcome, one.runtime) for one in attempts]


def test_every_attempt_is_told_once_and_in_order(conn: Conn, admin: Admin) -> None:
    """Guard: what the segments and the history both have is one attempt; what was handed back unstarted is none."""
    here, there = register(conn, host="here", pid=1), register(conn, host="there", pid=2)
    [id_] = insert(conn, 1, max_attempts=5)

    def take(runtime: int) -> Any:
        [member] = claim(conn, runtime).members
        return member

    settle(conn, here, others=[Outcome(take(here), "retried", 0.0, WHY)])
    settle(conn, there, others=[Outcome(take(there), "released")])
    settle(conn, there, others=[Outcome(take(there), "snoozed", 60.0)])
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    promote(conn)
    take(there)
    fall_silent(conn, there)
    fence(conn, there)
    assert rescue(conn, there) == (1, 1, 0)
    last = take(here)
    expected = [(1, "retried", here), (2, "snoozed", there), (2, "rescued", there), (3, None, here)]
    job = admin.job_details(id_)
    assert told(job.attempts) == expected
    first, snoozed, lost, running = job.attempts
    assert (first.hostname, first.pid, first.error) == ("here", 1, WHY)
    assert lost.error is not None and lost.error["type"] == "WorkerDied"
    assert (snoozed.error, running.error, running.ended_at, running.started_at) == (None, None, None, None)
    for one in job.attempts:
        assert one.claimed_at is not None and (one.ended_at is None or one.claimed_at <= one.ended_at)
    assert first.started_at is not None and first.claimed_at is not None and first.started_at >= first.claimed_at
    settle(conn, here, [last])
    assert told(admin.job_details(id_).attempts) == [*expected[:3], (3, "completed", here)]
    # what the history has outlives the segments
    [id_] = insert(conn, 2, max_attempts=2)
    for _ in range(2):
        settle(conn, here, others=[Outcome(take(here), "retried", 0.0, WHY)])
    assert told(admin.job_details(id_).attempts) == [(1, "retried", here), (2, "failed", here)]
    conn.execute("TRUNCATE awa.jobs, awa.claims, awa.completions, awa.attempt_ends")
    old = admin.job_details(id_)
    assert told(old.attempts) == [(1, "retried", here), (2, "retried", here)]
    assert [(one.claimed_at, one.hostname, one.error) for one in old.attempts] == [(None, "here", WHY)] * 2


def test_a_job_is_told_of_as_get_tells_of_it(conn: Conn, admin: Admin) -> None:
    """At every moment of its life; and whatever its history holds is no error."""
    runtime = register(conn)
    ids = [make(conn, runtime)[0] for make in lives.TOGETHER]
    for id_ in ids:
        job = admin.job_details(id_)
        assert plain(job) == jobs.get_job(conn, AWA, id_)
        assert (job.state == JobState.RUNNING) == any(one.outcome is None for one in job.attempts)
    conn.execute(
        """UPDATE awa.ended_jobs SET follow_ups = '["x"]',
           history = '[7, {"attempt": "x", "ended_at": "yesterday", "runtime": {}, "text": 5}, {}]'"""
    )
    [failed] = [id_ for id_ in ids if jobs.get_job(conn, AWA, id_).state == JobState.FAILED]
    odd = admin.job_details(failed)
    assert len(odd.attempts) == 3 and odd.follow_ups == {}
    with pytest.raises(JobNotFound):
        admin.job_details(987_654)
    with pytest.raises(ValidationError):
        admin.job_details(0)


def wait_for(conn: Conn, child: int, *parents: int) -> None:
    conn.execute(
        "UPDATE awa.waiting_jobs SET waits_for = 'parent', run_at = NULL, parents = %s, on_parent_failure = 'cancel'"
        " WHERE id = %s",
        (list(parents), child),
    )


def test_parents_and_dependents_are_told_with_their_states(
    conn: Conn, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: a dependent that was there before its parent, and was replaced since, is found too."""
    before = lives.make_scheduled(conn, register(conn))[0]
    after = lives.make_scheduled(conn, register(conn))[0]
    [running, waiting] = insert(conn, 1, 2)
    claim(conn, register(conn), limit=1)
    conn.execute("UPDATE awa.waiting_jobs SET seq = nextval('awa.entry_id_seq') WHERE id = %s", (after,))
    wait_for(conn, before, running, waiting)
    wait_for(conn, after, waiting, 987_654)
    job = admin.job_details(before)
    assert job.on_parent_failure == "cancel"
    assert [(one.id, one.state, one.kind, one.queue) for one in job.parents] == [
        (running, JobState.RUNNING, "noop", "q"),
        (waiting, JobState.AVAILABLE, "noop", "q"),
    ]
    assert [(one.id, one.state) for one in admin.job_details(after).parents][1] == (987_654, None)
    assert [one.id for one in admin.job_details(waiting).dependents] == sorted([before, after])
    assert [one.state for one in admin.job_details(running).dependents] == [JobState.SCHEDULED]
    assert admin.job_details(after).dependents == []
    monkeypatch.setattr(details, "MOST_RELATED", 1)
    assert len(admin.job_details(waiting).dependents) == len(admin.job_details(before).parents) == 1


FOLLOW_UPS = """{"completed": [{"kind": "ship", "queue": "mail", "priority": 1}, {"kind": "bill"}],
                 "failed": [{"kind": "later", "delay": 3600}, {"kind": "sorry"}], "cancelled": [{"kind": "sorry"}]}"""


def by_settle(conn: Conn, runtime: int, id_: int, outcome: str) -> None:
    [member] = [m for m in claim(conn, runtime).members if m.id == id_]
    settle(conn, runtime, others=[Outcome(member, outcome, 0.0, WHY)])


def by_handler(conn: Conn, runtime: int, id_: int, outcome: str) -> None:
    [member] = [m for m in claim(conn, runtime).members if m.id == id_]
    complete(conn, member)


def by_cancel(conn: Conn, runtime: int, id_: int, outcome: str) -> None:
    assert cancel(conn, id_) == ("cancelled", "cancelled")


@pytest.mark.parametrize(
    ("end", "outcome", "kinds"),
    [
        (by_handler, "completed", ["bill", "ship"]),
        (by_settle, "completed", ["bill", "ship"]),
        (by_settle, "failed", ["later", "sorry"]),
        (by_cancel, "cancelled", ["sorry"]),
    ],
)
def test_what_is_to_follow_and_what_has_followed_are_told(
    conn: Conn, admin: Admin, end: Callable[..., None], outcome: str, kinds: list[str]
) -> None:
    runtime = register(conn)
    [id_] = insert(conn, 1)
    conn.execute("UPDATE awa.jobs SET follow_ups = %s WHERE id = %s", (FOLLOW_UPS, id_))
    declared = admin.job_details(id_)
    assert {name: [one["kind"] for one in told] for name, told in declared.follow_ups.items()} == {
        "completed": ["ship", "bill"],
        "failed": ["later", "sorry"],
        "cancelled": ["sorry"],
    }
    assert (declared.followed_by, declared.follows) == ([], None)
    end(conn, runtime, id_, outcome)
    job = admin.job_details(id_)
    assert (job.state, sorted(str(one.kind) for one in job.followed_by)) == (outcome, kinds)
    for child in job.followed_by:
        assert child.state == ("scheduled" if child.kind == "later" else "available")
        assert admin.job_details(child.id).follows == id_
    if outcome == "failed":
        assert retry(conn, id_) == ("retried", "available")
        assert admin.job_details(id_).followed_by == []


DEEP, LONG = "[" * 5000 + "]" * 5000, "9" * 4999
NONSENSE = [
    "null",
    "true",
    "-1",
    "7",
    "1.5",
    "1e999",
    "9" * 40,
    LONG,
    '"x"',
    r'"\u0000"',
    r'"\ud800"',
    "[]",
    "{}",
    DEEP,
]
NONSENSE += ["[" * 900 + "]" * 900, '"' + "x" * 10_000 + '"', '[[], "x", 7, {}]']
FOLLOWED = [
    *NONSENSE,
    *(f'{{"failed": {odd}, "of": {odd}}}' for odd in NONSENSE),
    *(f'{{"failed": [{{"queue": {odd}, "priority": {odd}, "kind": {odd}}}]}}' for odd in NONSENSE),
    '{"failed": [' + ", ".join(f'{{"queue": "q{n}"}}' for n in range(20_000)) + "]}",
]
TIMES = ['"0001-01-01"', '"0001-01-01T00:00:00+23:59"', '"9999-12-31T23:59:59-23:59"']
NAMES = ("attempt", "outcome", "ended_at", "elapsed_ms", "runtime", "type", "text", "traceback")
# the last one is read by the look for a job, in SQL; so are escapes that stand for no text
READABLE = [odd for odd in NONSENSE if "\\u" not in odd]
REMEMBERED = [
    "true", '"x"', "{}", "[]",
    *(f'[{odd}, {{"attempt": 1}}]' for odd in READABLE),
    *("[{" + ", ".join(f'"{name}": {odd}' for name in NAMES) + "}, {}]" for odd in READABLE + TIMES),
    *(f'[{{"elapsed_ms": 2147483647, "ended_at": {at}}}, {{}}]' for at in TIMES),
]  # fmt: skip


@pytest.mark.parametrize("column", ["follow_ups", "history"])
def test_whatever_stands_in_a_row_hides_nothing_else_of_the_job(conn: Conn, admin: Admin, column: str) -> None:
    """Guard: plain SQL may have written it."""
    runtime = register(conn)
    waits = lives.make_scheduled(conn, runtime)[0]
    [ended, available] = insert(conn, 1, 2)
    [first] = claim(conn, runtime, limit=1).members
    settle(conn, runtime, others=[Outcome(first, "failed", 0.0, WHY)])
    stored = 0
    for odd in FOLLOWED if column == "follow_ups" else REMEMBERED:
        for id_, table in ((waits, "waiting_jobs"), (ended, "ended_jobs"), (available, "jobs")):
            with suppress(psycopg.errors.CheckViolation, psycopg.DataError):  # what cannot stand there
                conn.execute(f"UPDATE awa.{table} SET {column} = %s WHERE id = %s", (odd, id_))
                stored += 1
            job = admin.job_details(id_)
            assert (job.id, job.kind, job.followed_by) == (id_, "noop", [])
            assert [one.outcome for one in job.attempts if one.claimed_at] == (
                ["snoozed"] if id_ == waits else ["failed"] if id_ == ended else []
            )
            assert all(one.started_at is None or one.started_at <= one.ended_at for one in job.attempts if one.ended_at)
            assert job_facts(job)["id"] == id_
            print_job(job)
    assert stored > 80
