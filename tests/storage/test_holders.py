"""``awa storage check`` of limits: holders of places and keys beside who runs and who waits."""

from __future__ import annotations

import json
from collections.abc import Iterator

import psycopg
import pytest
from click.testing import CliRunner

from awa.cli import main
from awa.storage.check import Report, check_storage
from awa.storage.trust import check_origin
from tests.storage.engine import AWA, Conn, Member, Outcome, claim, insert, register, scalar, settle
from tests.storage.test_limits import limit


@pytest.fixture
def conn(database: str) -> Iterator[Conn]:
    """A connection to a database that a worker has been at."""
    with psycopg.connect(database, autocommit=True) as conn:
        check_origin(conn, AWA)
        yield conn


def take(conn: Conn, runtime: int, *, queue: str = "q", most: int = 100) -> list[Member]:
    """What claims bring until one after another brings nothing, or *most*."""
    found: list[Member] = []
    idle = 0
    while idle < 3 and len(found) < most:
        claimed = claim(conn, runtime, queue=queue, limit=most - len(found))
        found += claimed.members
        idle = 0 if claimed.members else idle + 1
    return found


def work(conn: Conn) -> int:
    """Have jobs run, wait for keys, retry and be done, in two limited queues; returns the runtime."""
    limit(conn, max_running=6, max_running_per_key=2)
    limit(conn, "ordered", max_running_per_key=1)
    runtime = register(conn)
    insert(conn, *range(8), key="a")
    insert(conn, *range(8, 12))
    insert(conn, *range(4), queue="ordered", order="o", key="k")
    insert(conn, *range(4, 6), queue="ordered", order="p", key="k")
    members = take(conn, runtime)
    assert len(members) == 6
    [first] = take(conn, runtime, queue="ordered")
    assert settle(conn, runtime, members[:1], [Outcome(members[1], "retried", 60.0)]) == []
    assert settle(conn, runtime, (), [Outcome(first, "snoozed", 0.0)]) == []
    assert len(take(conn, runtime, most=1)) == 1
    assert len(take(conn, runtime, queue="ordered")) == 1, "the key has gone to the next one, the order has not"
    return runtime


def names(report: Report) -> dict[str, int]:
    return {finding.name: finding.count for finding in report.findings}


def test_nothing_is_found_where_everything_is_limited_and_well(conn: Conn) -> None:
    runtime = work(conn)
    assert {row[0] for row in conn.execute("SELECT DISTINCT waits_for FROM awa.waiting_jobs")} == {
        "key",
        "order",
        "time",
    }
    for _ in range(20):
        report = check_storage(conn, AWA)
        assert (report.findings, report.over_limits) == ([], 0)
        members = [m for queue in ("q", "ordered") for m in take(conn, runtime, queue=queue, most=3)]
        settle(conn, runtime, members)
        assert check_storage(conn, AWA).findings == []


FAULTS = {
    "order_shared": """
        INSERT INTO awa.grants (queue, scope, key, id)
        SELECT queue, 'order', 'o', id FROM awa.waiting_jobs WHERE waits_for = 'order' AND wait_key = 'o' LIMIT 1""",
    "unheld": "DELETE FROM awa.grants WHERE queue = 'q' AND scope = 'key' AND claim_id > 0",
    "stray_holder": "INSERT INTO awa.grants (queue, scope, key, id) VALUES ('q', 'key', 'z', 1000000)",
    "unheard": """
        UPDATE awa.waiting_jobs SET wait_key = 'elsewhere'
         WHERE id = (SELECT min(id) FROM awa.waiting_jobs WHERE waits_for = 'key')""",
    "uncounted": """
        UPDATE awa.claims SET limits.open_sizes = array_fill(0::smallint, ARRAY[cardinality((limits).open_sizes)])
         WHERE queue = 'q' AND claim_id = (SELECT max(claim_id) FROM awa.claims WHERE queue = 'q')""",
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_and_nothing_else(conn: Conn, name: str) -> None:
    work(conn)
    conn.execute(FAULTS[name])
    report = check_storage(conn, AWA)
    assert set(names(report)) == {name}, report.findings
    for finding in report.findings:
        assert finding.where in ("queue q", "queue ordered")
        assert 0 < len(finding.sample) <= finding.count
        assert "{" not in finding.text


def test_two_attempts_of_one_ordering_key_are_found(conn: Conn) -> None:
    """Guard: whoever holds it by the rows of grants, what runs at once is seen by the attempts."""
    work(conn)
    conn.execute("UPDATE awa.jobs SET ordering_key = 'both' WHERE queue = 'q'")
    report = check_storage(conn, AWA)
    running = scalar(conn, "SELECT count(*) FROM awa.open_attempts() WHERE queue = 'q'")
    assert names(report) == {"order_shared": running, "unheld": running}


def test_an_ordering_key_of_a_job_that_was_deleted_is_found(conn: Conn) -> None:
    """Guard: a key is kept over a retry by a job that must be somewhere."""
    runtime = work(conn)
    insert(conn, 50, queue="ordered", order="x")
    [member] = take(conn, runtime, queue="ordered")
    settle(conn, runtime, (), [Outcome(member, "retried", 60.0)])
    assert check_storage(conn, AWA).findings == []
    conn.execute("DELETE FROM awa.waiting_jobs WHERE id = %s", (member.id,))
    [finding] = check_storage(conn, AWA).findings
    assert (finding.name, finding.where, finding.sample) == ("stray_holder", "queue ordered", [member.id])


def test_what_ran_before_a_limit_was_lowered_is_told_and_no_fault(conn: Conn, database: str) -> None:
    runtime = work(conn)
    running = scalar(conn, "SELECT count(*) FROM awa.open_attempts() WHERE queue = 'q'")
    assert running == 5
    limit(conn, max_running=3, max_running_per_key=1)
    report = check_storage(conn, AWA)
    of_key = scalar(
        conn,
        "SELECT count(*) FROM awa.open_attempts() o JOIN awa.jobs j USING (slot, entry_id) WHERE concurrency_key = 'a'",
    )
    assert (report.findings, report.over_limits) == ([], running - 3 + of_key - 1)
    said = CliRunner().invoke(main, ["storage", "check", "--database", database])
    assert said.exit_code == 0
    assert f"{report.over_limits} more attempts run than limits allow now" in said.output
    said = CliRunner().invoke(main, ["storage", "check", "--json", "--database", database])
    assert json.loads(said.output)["over_limits"] == report.over_limits
    assert claim(conn, runtime).members == []
