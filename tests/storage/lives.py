"""Jobs at every moment of their lives, to be cancelled, moved or looked at; and lists of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from awa.admin import Admin
from awa.job import JobState
from awa.storage.jobs import JobInfo
from tests.storage.engine import (
    Conn,
    Member,
    Outcome,
    claim,
    complete,
    insert,
    limit_keys,
    scalar,
    settle,
)

DONE = ("cancelled", "cancelled")
ASKED = ("requested", "running")
REQUESTS = "SELECT count(*) FROM awa.cancel_requests"

Prepared = tuple[int, str]


def history(conn: Conn, job: int) -> list[tuple[int, str, str | None, str | None]]:
    """Attempt, outcome, type and text of each ended attempt."""
    found = scalar(conn, "SELECT history FROM awa.find_job_v1(%s)", job)
    return [(item["attempt"], item["outcome"], item["type"], item["text"]) for item in found]


def one(conn: Conn, runtime: int, n: int = 1) -> Member:
    """A new job's open attempt."""
    insert(conn, n)
    [member] = claim(conn, runtime).members
    return member


def make_scheduled(conn: Conn, runtime: int) -> Prepared:
    member = one(conn, runtime)
    settle(conn, runtime, others=[Outcome(member, "snoozed", 60.0)])
    return member.id, "scheduled"


def make_retryable(conn: Conn, runtime: int) -> Prepared:
    member = one(conn, runtime)
    settle(conn, runtime, others=[Outcome(member, "retried", 60.0)])
    return member.id, "retryable"


def make_set_aside(conn: Conn, runtime: int) -> Prepared:
    [job] = insert(conn, 1, kind="new")
    assert claim(conn, runtime, kinds=["noop"]).members == []
    return job, "available"


def make_waiting_for_order(conn: Conn, runtime: int) -> Prepared:
    _, job = insert(conn, 1, 2, order="o")
    claim(conn, runtime)
    return job, "available"


def make_waiting_for_key(conn: Conn, runtime: int) -> Prepared:
    limit_keys(conn, 1)
    _, job = insert(conn, 1, 2, key="k")
    claim(conn, runtime)
    return job, "available"


def make_handed_over(conn: Conn, runtime: int) -> Prepared:
    """Its turn has come, and nobody has taken it."""
    _, job = insert(conn, 1, 2, order="o")
    settle(conn, runtime, claim(conn, runtime).members)
    assert claim(conn, runtime).members == []
    assert scalar(conn, "SELECT claim_id FROM awa.grants WHERE id = %s", job) == 0
    return job, "available"


def make_retryable_with_its_key(conn: Conn, runtime: int) -> Prepared:
    """Nobody else of its order runs until it has ended."""
    job, _ = insert(conn, 1, 2, order="o")
    settle(conn, runtime, others=[Outcome(claim(conn, runtime).members[0], "retried", 60.0)])
    return job, "retryable"


def make_available(conn: Conn, runtime: int) -> Prepared:
    [job] = insert(conn, 1)
    return job, "available"


def make_express(conn: Conn, runtime: int) -> Prepared:
    member = one(conn, runtime)
    settle(conn, runtime, others=[Outcome(member, "released")])
    return member.id, "available"


def make_behind_the_frontier_of_others(conn: Conn, runtime: int) -> Prepared:
    insert(conn, 1, 2)
    claim(conn, runtime, limit=1)  # its page was cut, and is not exhausted
    return scalar(conn, "SELECT max(id) FROM awa.jobs"), "available"


def make_running(conn: Conn, runtime: int) -> Prepared:
    return one(conn, runtime).id, "running"


def make_running_from_aside(conn: Conn, runtime: int) -> Prepared:
    job, _ = make_set_aside(conn, runtime)
    assert claim(conn, runtime, kinds=["new"]).ids == [job]
    return job, "running"


def make_completed(conn: Conn, runtime: int) -> Prepared:
    member = one(conn, runtime)
    settle(conn, runtime, [member])
    return member.id, "completed"


def make_completed_by_its_handler(conn: Conn, runtime: int) -> Prepared:
    member = one(conn, runtime)
    complete(conn, member)
    return member.id, "completed"


def make_failed(conn: Conn, runtime: int) -> Prepared:
    member = one(conn, runtime)
    settle(conn, runtime, others=[Outcome(member, "failed")])
    return member.id, "failed"


def make_cancelled(conn: Conn, runtime: int) -> Prepared:
    member = one(conn, runtime)
    settle(conn, runtime, others=[Outcome(member, "cancelled")])
    return member.id, "cancelled"


UNSTARTED = (
    make_scheduled,
    make_retryable,
    make_retryable_with_its_key,
    make_set_aside,
    make_waiting_for_order,
    make_waiting_for_key,
    make_handed_over,
    make_available,
    make_express,
    make_behind_the_frontier_of_others,
)
RUNNING = (make_running, make_running_from_aside)
ENDED = (make_completed, make_completed_by_its_handler, make_failed, make_cancelled)

TOGETHER = (
    *ENDED,
    *(make_scheduled, make_retryable, make_running_from_aside, make_running, make_waiting_for_order, make_set_aside),
    make_express,
)
"""Those that can be made one after the other in one database: none claims what another has left."""

Make = Callable[[Conn, int], Prepared]


def pages(admin: Admin, wanted: JobState | None, *, limit: int, **filters: Any) -> list[list[JobInfo]]:
    """Every page of a list."""
    found: list[list[JobInfo]] = []
    after: str | None = None
    while True:
        page = admin.list_jobs(wanted, limit=limit, after=after, **filters)
        assert len(page.jobs) <= limit
        found.append(page.jobs)
        if page.after is None:
            return found
        assert page.after != after
        after = page.after


def listed(admin: Admin, wanted: JobState | None, *, limit: int = 1000, **filters: Any) -> list[int]:
    """The ids in a list."""
    return [job.id for page in pages(admin, wanted, limit=limit, **filters) for job in page]
