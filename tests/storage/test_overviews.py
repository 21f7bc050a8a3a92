"""The views for psql and dashboards: what they tell is what the library tells."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

import psycopg
from psycopg.rows import dict_row

from awa.admin import Admin
from awa.job import JobState
from awa.limits import RateLimit
from awa.storage.jobs import JobInfo
from awa.storage.runtimes import leave
from awa.storage.schema import Schema
from tests.storage import lives
from tests.storage.engine import (
    Conn,
    Outcome,
    claim,
    end_unclaimed,
    fall_silent,
    fence,
    insert,
    register,
    scalar,
    settle,
)

NOT_THERE = {"metadata", "history", "error"}
"""What a job has in a list and not in the view; of an error the view has two columns."""


def rows(conn: Conn, query: str, *params: object) -> list[dict[str, Any]]:
    with conn.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query, params).fetchall()


def as_listed(admin: Admin, **filters: Any) -> list[dict[str, Any]]:
    """All jobs of a list, as rows of the view."""
    found = []
    for page in lives.pages(admin, None, limit=1000, **filters):
        for job in page:
            error = job.error or {}
            row = {field.name: getattr(job, field.name) for field in fields(JobInfo) if field.name not in NOT_THERE}
            found.append(row | {"error_type": error.get("type"), "error_text": error.get("text")})
    return sorted(found, key=lambda row: row["id"])


def live(conn: Conn) -> int:
    """Jobs at every moment of their lives, in several queues; returns the number of a runtime that has some."""
    runtime = register(conn, host="here", pid=7)
    for make in lives.TOGETHER:
        make(conn, runtime)
    why = {"type": "ValueError", "text": "why", "traceback": "line 1"}
    for slot in (3, 5):
        conn.execute("SELECT setval('awa.ring_seq', %s)", (slot,))
        insert(conn, *range(20), queue="mail", priority=1, expires_at=datetime(2199, 1, 1, tzinfo=UTC))
        members = claim(conn, runtime, queue="mail", limit=12).members
        others = [
            Outcome(member, outcome, 60.0, why)
            for member, outcome in zip(members[:2], ("failed", "retried"), strict=True)
        ]
        others += [Outcome(members[2], "retried", 0.0, why), Outcome(members[3], "completed")]
        settle(conn, runtime, members[4:8], others)
    end_unclaimed(conn, insert(conn, 1, 2, queue="mail"))  # these are no jobs any more
    conn.execute("UPDATE awa.jobs SET tags = '{eu}' WHERE id %% 3 = 0", ())
    return runtime


def test_jobs_are_as_they_are_in_lists(conn: Conn, admin: Admin) -> None:
    live(conn)
    expected = as_listed(admin)
    assert {row["state"] for row in expected} == set(JobState) - {JobState.WAITING_EXTERNAL}
    columns = [*expected[0]]
    assert rows(conn, f"SELECT {', '.join(columns)} FROM awa.job_overview ORDER BY id") == expected
    for state in JobState:
        found = rows(conn, "SELECT id FROM awa.job_overview WHERE state = %s ORDER BY id", state.value)
        assert [row["id"] for row in found] == [row["id"] for row in expected if row["state"] == state]
    found = rows(conn, f"SELECT {', '.join(columns)} FROM awa.job_overview WHERE queue = 'mail' ORDER BY id")
    assert found == as_listed(admin, queue="mail")
    for row in expected[:: max(1, len(expected) // 12)]:
        assert rows(conn, f"SELECT {', '.join(columns)} FROM awa.job_overview WHERE id = %s", row["id"]) == [row]


def test_queues_are_as_the_library_counts_them(conn: Conn, admin: Admin) -> None:
    live(conn)
    admin.pause_queue("paused", by="ada", reason="why")
    admin.set_limits("mail", max_running=7, rate_limit=RateLimit(100, per=10.0, burst=20), by="ada")
    conn.execute('UPDATE awa.runtime_instances SET queues = \'[{"name": "served"}]\'')
    found = {row["queue"]: row for row in rows(conn, "SELECT * FROM awa.queue_overview")}
    expected = {info.name: info for info in admin.list_queues()}
    assert set(found) == set(expected) == {"q", "mail", "paused", "served"}
    for name, info in expected.items():
        row = found[name]
        assert {state: row[state] for state in JobState} == {state: count.value for state, count in info.counts.items()}
        assert row["estimated"] == []
        assert (row["oldest_at"], row["paused_at"], row["paused_by"], row["pause_reason"]) == (
            info.oldest_at,
            info.paused_at,
            info.paused_by,
            info.pause_reason,
        )
        assert (row["max_running"], row["max_running_per_key"]) == (
            info.limits.max_running,
            info.limits.max_running_per_key,
        )
    assert (found["mail"]["rate"], found["mail"]["burst"]) == (10.0, 20.0)
    # what is estimated is told, and is the same estimate
    conn.execute("INSERT INTO awa.jobs (queue, kind) SELECT 'many', 'x' FROM generate_series(1, 90000)")
    [row] = rows(conn, "SELECT available, estimated FROM awa.queue_overview WHERE queue = 'many'")
    count = admin.queue_counts()["many"][JobState.AVAILABLE]
    assert (row["available"], row["estimated"], count.is_exact) == (count.value, ["available"], False)


def test_the_oldest_available_job_is_the_first_that_has_not_ended(conn: Conn, admin: Admin) -> None:
    """Guard: what was cancelled at the head of a lane is passed over, and every lane is looked at."""
    runtime = register(conn)

    def oldest() -> datetime | None:
        return admin.get_queue("q").oldest_at

    def since(job: int) -> datetime:
        at = scalar(conn, "SELECT max(available_at) FROM awa.jobs WHERE id = %s", job)
        assert isinstance(at, datetime)
        return at

    ids = [insert(conn, n)[0] for n in range(3)]
    [urgent] = insert(conn, 3, priority=1)
    assert oldest() == since(ids[0]) < since(urgent)
    end_unclaimed(conn, ids[:1])
    assert oldest() == since(ids[1])
    assert claim(conn, runtime, limit=1).ids == [urgent]
    members = claim(conn, runtime, limit=1).members
    assert oldest() == since(ids[2])
    settle(conn, runtime, others=[Outcome(members[0], "released")])
    assert oldest() == since(ids[2]) < since(ids[1])
    claim(conn, runtime)
    assert oldest() is None
    insert(conn, 4, kind="new")
    claim(conn, runtime, kinds=["old"])  # set aside, it waits for a worker that knows it and not in line
    assert (oldest(), admin.get_queue("q").counts[JobState.AVAILABLE].value) == (None, 1)


def test_runtimes_are_live_stale_gone_or_ended(conn: Conn) -> None:
    alive, silent, fenced, left = (register(conn, pid=pid) for pid in range(1, 5))
    conn.execute(
        "UPDATE awa.runtime_instances SET stale_after_ms = 60000, threads = 4, busy = 3 WHERE id = %s", (alive,)
    )
    conn.execute(
        "UPDATE awa.runtime_instances SET last_seen_at = now() - interval '50 s' WHERE id IN (%s, %s)", (alive, silent)
    )
    fall_silent(conn, fenced)
    fence(conn, fenced)
    leave(conn, Schema(), left, newest_claim=0)
    conn.execute(
        "INSERT INTO awa.leases (name, runtime, expires_at) VALUES ('maintenance', %s, now() + interval '1 h')",
        (alive,),
    )
    conn.execute('UPDATE awa.runtime_instances SET queues = \'[{"name": "b"}, {"name": "a"}]\' WHERE id = %s', (alive,))
    found = rows(conn, "SELECT * FROM awa.runtime_overview ORDER BY id")
    assert [row["state"] for row in found] == ["live", "stale", "gone", "ended"]
    assert [one.state for one in Admin(Schema(), lambda: nullcontext(conn)).list_runtimes(include_ended=True)] == [
        row["state"] for row in found
    ]
    assert [row["is_leader"] for row in found] == [True, False, False, False]
    assert (found[0]["threads"], found[0]["busy"], found[0]["queues"], found[1]["queues"]) == (4, 3, ["b", "a"], [])
    conn.execute("UPDATE awa.leases SET expires_at = now() - interval '1 s'")
    assert not any(row["is_leader"] for row in rows(conn, "SELECT is_leader FROM awa.runtime_overview"))


def test_a_reader_may_look(conn: Conn, roles: Callable[[str], str]) -> None:
    live(conn)
    with psycopg.connect(roles("reader"), autocommit=True) as reader:
        for view in ("job_overview", "queue_overview", "runtime_overview"):
            assert rows(reader, f"SELECT count(*) AS n FROM awa.{view}")[0]["n"] > 0
        job = scalar(conn, "SELECT max(id) FROM awa.ended_jobs")
        looking = Admin(Schema(), lambda: nullcontext(reader))
        assert looking.job_details(job).id == job
        assert looking.get_queue("mail").oldest_at is not None
