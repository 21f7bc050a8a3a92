"""R49: with millions of jobs waiting, most of them in queues that nobody serves, claims and promotion read them all.

Now both read by index what they take, whatever waits beside it, by the plans that sessions keep after their first
calls. Plans and rows are looked at, on a moderately large table; ``python -m benchmarks.run backlog`` measures the time
with ten million. What one claim, settle or promotion reads is in tests/storage/test_plans.py; here is what a busy
leader and a worker of many queues do again and again.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import psycopg

from awa.storage import waiting
from tests.storage import engine
from tests.storage.engine import AWA
from tests.storage.test_plans import LARGE, Explained, Plan, check

Conn = psycopg.Connection[Any]

QUEUES = 400


def fill_waiting(conn: Conn) -> None:
    """LARGE jobs wait for a time; nothing was analyzed since the tables were empty."""
    conn.execute("ANALYZE")
    conn.execute(
        f"""INSERT INTO awa.waiting_jobs (run_at, queue, kind)
            SELECT now() + interval '1 h' + n * interval '10 ms', 'q' || n % {QUEUES}, 'noop'
              FROM generate_series(1, {LARGE}) n"""
    )


def fill_queues(conn: Conn) -> None:
    """LARGE jobs are available in queues that nobody serves, likewise."""
    conn.execute("ANALYZE")
    conn.execute(
        f"""INSERT INTO awa.jobs (queue, kind) SELECT 'unserved' || n % {QUEUES}, 'noop'
              FROM generate_series(1, {LARGE}) n"""
    )


def due(conn: Conn, number: int, *, queues: int = 3) -> None:
    """*number* jobs whose time comes now, a millisecond after each other."""
    conn.execute(
        """INSERT INTO awa.waiting_jobs (run_at, queue, kind)
           SELECT clock_timestamp() - n * interval '1 ms', 'due' || n %% %s, 'noop' FROM generate_series(1, %s) n""",
        (queues, number),
    )


def test_a_thousand_due_jobs_a_second_are_promoted_by_index(conn: Conn) -> None:
    """Guard: both bounds of the due time are index conditions, what is due is deleted by an array of ids, and the time
    of the next is the first entry of the index that is alive."""
    fill_waiting(conn)
    explained = Explained(conn)
    plans: list[Plan] = []
    for second in range(12):  # sessions keep their plans after five executions
        due(conn, 1000)
        with explained.watch() as found:
            assert waiting.promote(conn, AWA, behind=2.0, limit=2000) == 1000
            ahead = waiting.seconds_to_next(conn, AWA, behind=2.0)
        assert ahead is not None and ahead > 3000
        if second >= 10:
            plans += found
    next_due = [plan for plan in plans if "ORDER BY run_at" in plan.query and "SKIP LOCKED" not in plan.query]
    assert len(next_due) == 2
    # a job is read where it is due, locked, and deleted
    check([plan for plan in plans if plan not in next_due], most_rows=2 * 3000)
    for plan in next_due:
        names = [node.get("Index Name") for node in plan.nodes() if "Index" in node["Node Type"]]
        assert names == ["waiting_jobs_due"]
        assert plan.rows_read() == 1
    scans = Counter(
        node["Node Type"] for plan in plans for node in plan.nodes() if node.get("Relation Name") == "waiting_jobs"
    )
    assert "Seq Scan" not in scans and scans["Index Scan"] >= 4, scans
    assert engine.scalar(conn, "SELECT count(*) FROM awa.jobs WHERE queue LIKE 'due%%'") == 12_000


def test_a_worker_of_many_queues_most_of_them_empty_reads_what_it_takes(conn: Conn) -> None:
    """Guard: the queue comes first in every index that a claim reads, so others' backlogs are not met on the way; the
    walk stops at its limit."""
    fill_queues(conn)
    runtime = engine.register(conn)
    served = [f"served{n}" for n in range(50)]
    for number in range(10):
        engine.insert(conn, *range(20), queue=served[number % 2])
        for queue in served[:5]:
            members = engine.claim(conn, runtime, queue=queue, kinds=["noop"], limit=10).members
            engine.settle(conn, runtime, members)
    engine.insert(conn, *range(10), queue=served[49])
    explained = Explained(conn)
    brought = 0
    with explained.watch() as plans:
        for queue in served[5:]:
            brought += len(engine.claim(conn, runtime, queue=queue, kinds=["noop"], limit=10).members)
    assert brought == 10
    check(plans, most_rows=100)  # 44 empty queues, and ten jobs that are read more than once
    # and who comes to serve what nobody has served: the first claim of a queue has no cursor to go on from
    with explained.watch() as plans:
        for number in range(20):
            claimed = engine.claim(conn, runtime, queue=f"unserved{number}", kinds=["noop"], limit=10)
            assert len(claimed.members) == 10
    check(plans, most_rows=20 * 60)
