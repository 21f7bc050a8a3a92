"""The plans of the engine's statements, on empty, large and skewed tables, with good, bad and no statistics.

They are read with auto_explain after ten executions, when every statement has the plan it keeps. No time is measured:
a good plan reads few rows, whatever the tables hold.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from awa.admin import Admin
from awa.job import JobState
from awa.storage import kinds, queues
from awa.storage.jobs import JobRow, insert_jobs
from awa.storage.keys import sweep_keys
from awa.storage.snapshot import one_snapshot
from awa.worker.maintenance.dependents import Dependents
from awa.worker.maintenance.statistics import Statistics
from tests.storage.engine import (
    AWA,
    Conn,
    Outcome,
    cancel,
    claim,
    complete,
    end_unclaimed,
    expire,
    fall_silent,
    fence,
    insert,
    move,
    promote,
    register,
    rescue,
    scalar,
    settle,
)

LARGE = 60_000

SEGMENTED = re.compile(
    r"(jobs|claims|completions|attempt_ends)(_\d)?|waiting_jobs|ended_jobs|job_uniques|grants|queue_meta"
)

CALL = re.compile(r"awa\.\w+_v\d+\(")


@dataclass(frozen=True, slots=True)
class Plan:
    """One statement that ran, with what its nodes did."""

    query: str
    root: dict[str, Any]
    settings: dict[str, str]
    has_jit: bool

    def nodes(self, below: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
        node = self.root if below is None else below
        yield node
        for child in node.get("Plans", ()):
            yield from self.nodes(child)

    def rows_read(self) -> int:
        """Rows that the scans of tables produced or threw away."""
        read = 0.0
        for node in self.nodes():
            if "Relation Name" in node and "Scan" in node["Node Type"]:
                rows = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
                read += (rows + node.get("Rows Removed by Index Recheck", 0)) * node["Actual Loops"]
        return round(read)


class Explained:
    """The plans of what a connection runs."""

    def __init__(self, conn: Conn) -> None:
        self.conn = conn
        self.plans: list[Plan] = []
        conn.execute("LOAD 'auto_explain'")
        for name, value in (
            ("log_min_duration", "0"),
            ("log_nested_statements", "on"),
            ("log_analyze", "on"),
            ("log_timing", "off"),
            ("log_settings", "on"),
            ("log_format", "json"),
            ("log_level", "log"),
        ):
            conn.execute(f"SET auto_explain.{name} = '{value}'")
        # so that a plan which is compiled would show it
        conn.execute("SET jit = on; SET jit_above_cost = 0")
        conn.add_notice_handler(self._note)

    def _note(self, notice: psycopg.errors.Diagnostic) -> None:
        text = notice.message_primary or ""
        if "  plan:\n" in text:
            found = json.loads(text.partition("  plan:\n")[2])
            self.plans.append(Plan(found["Query Text"], found["Plan"], found.get("Settings", {}), "JIT" in found))

    @contextmanager
    def watch(self) -> Iterator[list[Plan]]:
        """The list fills with the plans of the statements that the functions of the schema run inside the block."""
        self.plans.clear()
        found: list[Plan] = []
        self.conn.execute("SET client_min_messages = log")
        yield found
        self.conn.execute("SET client_min_messages = notice")
        found += [
            plan for plan in self.plans if not CALL.search(plan.query) and "client_min_messages" not in plan.query
        ]


@pytest.fixture
def explained(conn: Conn) -> Explained:
    return Explained(conn)


def check(plans: list[Plan], *, most_rows: int) -> None:
    """No statement reads a whole table, none is compiled, and all of them together read few rows."""
    assert plans
    for plan in plans:
        assert not plan.has_jit, plan.query
        for node in plan.nodes():
            name = node.get("Relation Name", "")
            assert not (node["Node Type"] == "Seq Scan" and SEGMENTED.fullmatch(name)), (name, plan.query)
    read = {plan.query: plan.rows_read() for plan in plans}
    assert sum(read.values()) <= most_rows, sorted(read.items(), key=lambda item: -item[1])[0]


ONE_PASS, PASSES = "CTE parts", "CTE sized"
"""How a claim walked over entries: in one pass, or in several because there was more to look at than kinds."""


def walks(plans: list[Plan]) -> list[tuple[str, Plan, dict[str, Any]]]:
    """How, the plan, and the part of it that walks."""
    return [
        (node["Subplan Name"], plan, node)
        for plan in plans
        for node in plan.nodes()
        if node.get("Subplan Name") in (ONE_PASS, PASSES)
    ]


def check_walk(plans: list[Plan], *ways: str) -> None:
    """The walk is a Limit over a nested loop: the ranges outside, index scans of the partitions, merged, inside.

    Args:
        plans: Of one claim.
        ways: How it walked, one time after the other.
    """
    assert [how for how, _, _ in walks(plans)] == list(ways)
    for _, plan, walk in walks(plans):
        limit = next(node for node in plan.nodes(walk) if node["Node Type"] == "Limit")
        assert "Sort" not in {node["Node Type"] for node in plan.nodes(walk)}
        [loop] = limit["Plans"]
        assert loop["Node Type"] == "Nested Loop"
        outer, inner = loop["Plans"]
        assert (outer["Node Type"], outer["Parent Relationship"]) == ("Function Scan", "Outer")
        below = list(plan.nodes(inner))
        [merge] = [node for node in below if node["Node Type"] == "Merge Append"]
        assert {node["Node Type"] for node in merge["Plans"]} <= {"Index Scan", "Result", "Subquery Scan"}
        scans = [node for node in below if "Relation Name" in node]
        assert {node["Relation Name"] for node in scans} == {f"jobs_{slot}" for slot in range(8)}
        for node in scans:
            assert node["Node Type"] == "Index Scan"
            for column in ("queue", "lane", "ROW(xid, entry_id) >", "ROW(xid, entry_id) <"):
                assert column in node["Index Cond"], node["Index Cond"]


def fill(conn: Conn, queues: str) -> None:
    """LARGE jobs in one statement; *queues* is the SQL of the queue of job n."""
    conn.execute(
        f"INSERT INTO awa.jobs (queue, kind, args) SELECT {queues}, 'noop', '{{}}' FROM generate_series(1, {LARGE}) n"
    )


def nothing(conn: Conn, runtime: int) -> None:
    """Few jobs, and no others."""
    insert(conn, *range(400))


def one_queue(conn: Conn, runtime: int) -> None:
    """One queue with LARGE jobs."""
    fill(conn, "'q'")


def one_huge_of_many(conn: Conn, runtime: int) -> None:
    """A thousand queues of ten jobs, one huge one."""
    fill(conn, "CASE WHEN n <= 10000 THEN 'q' || n % 1000 ELSE 'q' END")


def a_thin_one_of_many(conn: Conn, runtime: int) -> None:
    """A huge queue beside the one that is claimed from, which has few jobs."""
    fill(conn, "CASE WHEN n % 400 = 0 THEN 'q' ELSE 'huge' END")


def a_long_history(conn: Conn, runtime: int) -> None:
    """Few jobs, and very many claims with their ends: half of them of the runtime that claims."""
    conn.execute(
        f"""INSERT INTO awa.claims (claim_id, runtime, nonce, slot, lane, queue, frontier, entry_ids, xids)
            SELECT nextval('awa.claim_id_seq'), CASE WHEN n %% 2 = 0 THEN %s ELSE 1000 + n %% 50 END, 0, 0, 5,
                   'other' || n %% 100, '{{}}', '{{1}}', '{{3}}'
              FROM generate_series(1, {LARGE // 4}) n""",
        (runtime,),
    )
    conn.execute(
        f"""INSERT INTO awa.completions (claim_id, flush, slot, idx, elapsed_ms)
            SELECT n, 1000000000, 0, '{{1}}', '{{1}}' FROM generate_series(1, {LARGE // 4}) n"""
    )
    conn.execute(
        f"""INSERT INTO awa.attempt_ends (entry_id, claim_id, flush, id, slot, outcome)
            SELECT 1000000 + n, n, 1000000000, n, 0, 'retried' FROM generate_series(1, {LARGE // 4}) n"""
    )
    conn.execute("UPDATE awa.runtime_instances SET newest_claim = (SELECT max(claim_id) FROM awa.claims)")
    insert(conn, *range(400))


Content = Callable[[Conn, int], None]


def looked_through(contents: Sequence[Content], quick: Collection[tuple[str, Content]]) -> pytest.MarkDecorator:
    """Every content with every kind of statistics; all but the *quick* pairs are left to the slow tests."""
    pairs = itertools.product(("none", "fresh", "stale"), contents)
    marks = [pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow) for pair in pairs]
    return pytest.mark.parametrize("statistics, content", marks)


contents = looked_through(
    [nothing, one_queue, one_huge_of_many, a_thin_one_of_many, a_long_history],
    quick=[
        *(("none", nothing), ("none", one_huge_of_many), ("fresh", a_thin_one_of_many)),
        *(("stale", one_queue), ("stale", a_long_history)),
    ],
)
some_contents = looked_through(
    [one_queue, a_long_history], quick=[("none", a_long_history), ("fresh", one_queue), ("stale", one_queue)]
)
statistics = pytest.mark.parametrize("statistics", ["none", pytest.param("fresh", marks=pytest.mark.slow), "stale"])


def prepare(conn: Conn, statistics: str, content: Content) -> int:
    """Fill the tables; returns a runtime.

    Args:
        statistics: ``none``: the tables were never analyzed; ``fresh``: since they were filled; ``stale``: while they
            held a few rows, and every statement was planned then by the same session.
    """
    runtime = register(conn)
    if statistics == "stale":
        warm(conn, runtime)
        conn.execute("ANALYZE")
        for _ in range(10):
            warm(conn, runtime)
    content(conn, runtime)
    if statistics == "fresh":
        conn.execute("ANALYZE")
    return runtime


def warm(conn: Conn, runtime: int) -> None:
    """Every statement of the engine, once, in a queue of its own."""
    insert(conn, *range(8), queue="warm")
    insert(conn, 8, queue="warm", kind="new")
    members = claim(conn, runtime, queue="warm", kinds=["noop"]).members
    assert len(members) == 8
    complete(conn, members[0])
    others = [Outcome(members[3], "retried", 0.001), Outcome(members[4], "failed"), Outcome(members[5], "snoozed", 9.0)]
    settle(conn, runtime, members[1:3], others)
    settle(conn, runtime, [members[0], *members[6:]], others)
    settle(conn, runtime, claim(conn, runtime, queue="warm", kinds=["new"]).members)
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now() WHERE waits_for = 'time'")
    promote(conn)
    dead = register(conn)
    claim(conn, dead, queue="warm")
    insert(conn, 9, queue="warm", max_attempts=1)
    [open_claim] = claim(conn, dead, queue="warm").batches
    conn.execute(
        "UPDATE awa.runtime_instances SET newest_claim = %s, open_claims = ARRAY[%s::bigint] WHERE id = %s",
        (open_claim, open_claim, dead),
    )
    fall_silent(conn, dead)
    assert fence(conn, dead)
    rescue(conn, dead)
    settle(conn, runtime, claim(conn, runtime, queue="warm").members)
    control(conn, runtime, *insert(conn, 10, 11, 12, 13, queue="warm"), queue="warm")


def control(conn: Conn, runtime: int, to_ask: int, to_force: int, to_cancel: int, to_move: int, *, queue: str) -> None:
    """Cancel two running jobs, the first two of *queue*, and an available one, and move another."""
    members = claim(conn, runtime, queue=queue, limit=2).members
    assert [member.id for member in members] == [to_ask, to_force]
    assert cancel(conn, to_ask) == ("requested", "running")
    assert cancel(conn, to_force, force=True) == ("cancelled", "cancelled")
    assert cancel(conn, to_cancel) == ("cancelled", "cancelled")
    assert move(conn, to_move, "elsewhere") == ("moved", "available")
    settle(conn, runtime, others=[Outcome(members[0], "retried")])


@contents
def test_claim_and_settle_read_few_rows(conn: Conn, explained: Explained, content: Content, statistics: str) -> None:
    """Guard: the order of the walk's joins and its index conditions; rows that are looked up one by one in settle."""
    runtime = prepare(conn, statistics, content)
    for _ in range(10):
        members = claim(conn, runtime, kinds=["noop"], limit=10).members
        assert len(members) == 10
        settle(conn, runtime, members[:5], [Outcome(member, "retried", 60.0) for member in members[5:]])
    with explained.watch() as plans:
        members = claim(conn, runtime, kinds=["noop"], limit=10).members
    assert len(members) == 10
    check(plans, most_rows=60)
    check_walk(plans, ONE_PASS)
    with explained.watch() as plans:
        assert settle(conn, runtime, members[:5], [Outcome(member, "retried") for member in members[5:]]) == []
    check(plans, most_rows=60)
    # a claim with an end is looked at member by member, and one that ended before is refused
    members = claim(conn, runtime, kinds=["noop"], limit=10).members
    settle(conn, runtime, members[:1], [Outcome(member, "snoozed", 60.0) for member in members[1:3]])
    with explained.watch() as plans:
        assert len(settle(conn, runtime, members[2:], [Outcome(members[0], "failed")])) == 2
    check(plans, most_rows=60)


@some_contents
def test_an_empty_claim_reads_almost_nothing(
    conn: Conn, explained: Explained, content: Content, statistics: str
) -> None:
    runtime = prepare(conn, statistics, content)
    for _ in range(10):
        assert claim(conn, runtime, queue="empty", kinds=["noop"]).members == []
    with explained.watch() as plans:
        assert claim(conn, runtime, queue="empty", kinds=["noop"]).members == []
    check(plans, most_rows=10)
    check_walk(plans, ONE_PASS)


@statistics
def test_the_walk_over_ended_jobs_reads_them_twice_at_most(conn: Conn, explained: Explained, statistics: str) -> None:
    """Guard: the ends of the walked entries are looked up one by one, whatever else was cancelled."""

    def cancelled(conn: Conn, runtime: int) -> None:
        one_queue(conn, runtime)
        ids = conn.execute("SELECT id FROM awa.jobs WHERE queue = 'q' ORDER BY entry_id LIMIT 100").fetchall()
        end_unclaimed(conn, [row[0] for row in ids])
        conn.execute(
            f"INSERT INTO awa.attempt_ends (entry_id, id, slot, outcome)"
            f" SELECT n, n, 1, 'cancelled' FROM generate_series(1, {LARGE // 4}) n"
        )

    runtime = prepare(conn, statistics, cancelled)
    for _ in range(10):
        claim(conn, runtime, queue="warm")
    with explained.watch() as plans:
        assert len(claim(conn, runtime, limit=10).members) == 10
    check(plans, most_rows=400)
    how = [way for way, _, _ in walks(plans)]
    assert how == [ONE_PASS] + [PASSES] * 10 + [PASSES] * (len(how) - 11)  # it looks once whether one pass is enough


@statistics
@pytest.mark.parametrize("kinds", [1, 20])
def test_a_direct_claim_reads_few_of_many_set_aside_jobs(
    conn: Conn, explained: Explained, statistics: str, kinds: int
) -> None:
    """Guard: what was set aside is found by kind, one by one, and locked and deleted by arrays of ids."""

    def set_aside(conn: Conn, runtime: int) -> None:
        conn.execute(
            f"""INSERT INTO awa.waiting_jobs (waits_for, wait_key, state, queue, kind)
                SELECT 'kind', 'k' || n % 30, 'available', 'q', 'k' || n % 30 FROM generate_series(1, {LARGE}) n"""
        )

    runtime = prepare(conn, statistics, set_aside)
    known = [f"k{n}" for n in range(kinds)]
    for _ in range(10):
        assert len(claim(conn, runtime, kinds=known, limit=10).members) == 10
    with explained.watch() as plans:
        assert len(claim(conn, runtime, kinds=known, limit=10).members) == 10
    check(plans, most_rows=11 * kinds + 60)  # the first ten of each kind
    check_walk(plans, ONE_PASS, ONE_PASS)


@statistics
def test_setting_aside_reads_each_job_twice(conn: Conn, explained: Explained, statistics: str) -> None:
    """Guard: the bodies of what is set aside are looked up one by one; of those that wait for its kind one is read."""

    def backlog(conn: Conn, runtime: int) -> None:
        one_queue(conn, runtime)
        conn.execute(
            f"""INSERT INTO awa.waiting_jobs (waits_for, wait_key, state, queue, kind)
                SELECT 'kind', 'noop', 'available', 'q', 'noop' FROM generate_series(1, {LARGE})"""
        )

    runtime = prepare(conn, statistics, backlog)
    for n in range(10):
        insert(conn, n, queue="warm", kind="new")
        claim(conn, runtime, queue="warm", kinds=["noop"])
    with explained.watch() as plans:
        assert claim(conn, runtime, kinds=["new"], limit=10).members == []
    check(plans, most_rows=500)  # twenty rounds of ten


@statistics
@pytest.mark.parametrize("scope", ["key", "order"])
def test_a_claim_reads_few_of_many_jobs_that_wait_for_keys(
    conn: Conn, explained: Explained, statistics: str, scope: str
) -> None:
    """Guard: holders are found by claim, those of one key and who waits for it by key; 600 holders at most are read."""

    def wait(conn: Conn, runtime: int) -> None:
        conn.execute("INSERT INTO awa.queue_meta (queue, max_running_per_key, max_running) VALUES ('q', 1, 500)")
        conn.execute("INSERT INTO awa.queue_meta (queue) SELECT 'queue' || n FROM generate_series(1, 5000) n")
        conn.execute(
            f"""INSERT INTO awa.waiting_jobs (waits_for, wait_key, state, queue, kind, concurrency_key, ordering_key)
                SELECT %(scope)s, k, 'available', CASE WHEN n %% 2 = 0 THEN 'q' ELSE 'other' END, 'noop',
                       CASE WHEN %(scope)s = 'key' THEN k END, CASE WHEN %(scope)s = 'order' THEN k END
                  FROM generate_series(1, {LARGE}) n
                 CROSS JOIN LATERAL (SELECT CASE WHEN n %% 10 < 8 THEN 'hot' ELSE 'k' || n / 10 %% 1000 END AS k) k""",
            {"scope": scope},
        )
        conn.execute(
            f"""INSERT INTO awa.grants (queue, scope, key, id, claim_id, entry_id, slot, idx)
                SELECT 'other', 'key', 'k' || n, n, n, n, 0, 1 FROM generate_series(1, {LARGE // 6}) n"""
        )
        conn.execute(
            "INSERT INTO awa.grants (queue, scope, key, id, is_over)"
            " SELECT DISTINCT 'q', waits_for, wait_key, 0, true"
            "   FROM awa.waiting_jobs WHERE queue = 'q' AND wait_key > 'k9'"
        )

    runtime = prepare(conn, statistics, wait)
    column = "concurrency_key" if scope == "key" else "ordering_key"

    def add() -> None:
        conn.execute(
            f"INSERT INTO awa.jobs (queue, kind, {column}) SELECT 'q', 'noop', 'new' || n FROM generate_series(1, 5) n"
        )

    def turn() -> None:
        members = claim(conn, runtime, limit=10).members
        assert members
        settle(conn, runtime, members)

    for _ in range(10):
        add()
        turn()
    add()
    with explained.watch() as plans:
        turn()
    check(plans, most_rows=2000)
    check_walk(plans, PASSES)


@statistics
@pytest.mark.parametrize("due", [0, 30])
def test_promotion_reads_only_what_is_due(conn: Conn, explained: Explained, statistics: str, due: int) -> None:
    """Guard: both bounds of the due time are index conditions."""

    def waiting(conn: Conn, runtime: int) -> None:
        conn.execute(
            f"""INSERT INTO awa.waiting_jobs (run_at, queue, kind)
                SELECT now() + n * interval '1 min', 'q', 'noop' FROM generate_series(1, {LARGE}) n"""
        )
        conn.execute(
            "INSERT INTO awa.waiting_jobs (run_at, queue, kind)"
            " SELECT now() - n * interval '1 s', 'q', 'noop' FROM generate_series(1, %s) n",
            (due,),
        )

    prepare(conn, statistics, waiting)
    for _ in range(10 if due else 0):
        assert promote(conn, limit=1) == 1
    with explained.watch() as plans:
        assert promote(conn, limit=10) == min(due, 10)
    check(plans, most_rows=60)


@some_contents
def test_completion_reads_its_own_rows(conn: Conn, explained: Explained, content: Content, statistics: str) -> None:
    """Guard: complete_v1 finds the claim by (runtime, claim_id) and the entry by its lane."""
    runtime = prepare(conn, statistics, content)
    members = claim(conn, runtime, limit=20).members
    for member in members[:10]:
        complete(conn, member)
    with explained.watch() as plans:
        complete(conn, members[10])
    check(plans, most_rows=4)


@contents
def test_rescue_reads_the_open_claims_of_its_runtime(
    conn: Conn, explained: Explained, content: Content, statistics: str
) -> None:
    """Guard: open claims are looked up one by one, those above the newest by a range; not all that it ever claimed."""
    runtime = prepare(conn, statistics, content)
    opened = [claim(conn, runtime, limit=10) for _ in range(12)]
    settle(conn, runtime, [member for claimed in opened for member in claimed.members[:5]])
    conn.execute(
        "UPDATE awa.runtime_instances SET newest_claim = %s, open_claims = %s WHERE id = %s",
        (opened[5].batches[0], [claimed.batches[0] for claimed in opened[:6]], runtime),
    )
    fall_silent(conn, runtime)
    assert fence(conn, runtime)
    for _ in range(10):
        assert rescue(conn, runtime, limit=2) == (2, 2, 0)
    with explained.watch() as plans:
        assert rescue(conn, runtime, limit=10) == (10, 10, 0)
    # twelve claims with one row of successes for each of their members, and twenty ends
    check(plans, most_rows=400)


@some_contents
def test_control_reads_few_rows(conn: Conn, explained: Explained, content: Content, statistics: str) -> None:
    """Guard: the frontier, the open claims and the entry are found by index, under locks that others wait for.

    The look for a job's newest entry is left out: by BRIN, before any lock, it reads whatever is not summarised.
    """
    runtime = prepare(conn, statistics, content)
    ids = [row[0] for row in conn.execute("SELECT id FROM awa.jobs WHERE queue = 'q' ORDER BY entry_id LIMIT 44")]
    for n in range(0, 40, 4):
        control(conn, runtime, *ids[n : n + 4], queue="q")
    first, second, third, fourth = ids[40:]
    claim(conn, runtime, limit=2)
    with explained.watch() as plans:
        cancel(conn, first)
        cancel(conn, second, force=True)
        cancel(conn, third)
        move(conn, fourth, "elsewhere")
    plans = [plan for plan in plans if "WHERE t.id = p_id ORDER BY t.entry_id DESC" not in plan.query]
    check(plans, most_rows=200)


@contents
def test_a_look_for_overdue_attempts_reads_the_open_claims_of_its_runtime(
    conn: Conn, explained: Explained, content: Content, statistics: str
) -> None:
    """Guard: as for a rescue; and claims that are young are not looked into."""
    runtime = prepare(conn, statistics, content)
    opened = [claim(conn, runtime, limit=10) for _ in range(12)]
    settle(conn, runtime, [member for claimed in opened for member in claimed.members[:5]])
    conn.execute(
        "UPDATE awa.runtime_instances SET newest_claim = %s, open_claims = %s, timeout_ms = 1000 WHERE id = %s",
        (opened[5].batches[0], [claimed.batches[0] for claimed in opened[:6]], runtime),
    )
    for _ in range(10):
        assert expire(conn, runtime, limit=2) == (0, 0)
    with explained.watch() as plans:
        assert expire(conn, runtime, limit=2) == (0, 0)
    check(plans, most_rows=30)
    conn.execute("UPDATE awa.claims SET claimed_at = claimed_at - interval '1 h' WHERE runtime = %s", (runtime,))
    for _ in range(10):
        assert expire(conn, runtime, limit=2) == (2, 0)
    with explained.watch() as plans:
        assert expire(conn, runtime, limit=10) == (10, 0)
    # two looks at twelve claims with their bodies and one row of successes for each of their members, and twenty ends
    check(plans, most_rows=1000)


@statistics
def test_fetching_long_bodies_reads_their_rows(conn: Conn, explained: Explained, statistics: str) -> None:
    runtime = prepare(conn, statistics, one_queue)
    members = claim(conn, runtime, limit=10).members
    with explained.watch() as plans:
        for _ in range(10):
            conn.execute(
                "SELECT * FROM awa.fetch_args_v1(%s::bigint, %s::bigint, %s::smallint, %s::smallint[])",
                (runtime, members[0].claim_id, members[0].slot, [2, 5]),
            )
    check(plans[-1:], most_rows=5)


def many_claims(conn: Conn, runtime: int) -> None:
    """LARGE jobs claimed by tens; most are completed, the newest claims are open, some jobs failed or wait."""
    fill(conn, "'q'")
    conn.execute(
        f"""INSERT INTO awa.claims (claim_id, runtime, nonce, slot, lane, queue, frontier, entry_ids, xids)
            SELECT 1000 + n, %s, 0, 0, 5, 'q',
                   ARRAY[ROW(5, '1:1:', pg_current_snapshot(), j.xid, j.first + n * 10 + 9)::awa.lane_frontier],
                   ARRAY(SELECT j.first + n * 10 + i FROM generate_series(0, 9) i),
                   array_fill(j.xid, ARRAY[10])
              FROM generate_series(0, {LARGE // 10 - 1}) n
             CROSS JOIN (SELECT xid, min(entry_id) AS first FROM awa.jobs WHERE queue = 'q' GROUP BY xid) j""",
        (runtime,),
    )
    conn.execute(
        f"""INSERT INTO awa.completions (claim_id, flush, slot, idx, elapsed_ms)
            SELECT 1000 + n, n, 0, '{{{{1,2,3,4,5,6,7,8}}}}', '{{{{1,1,1,1,1,1,1,1}}}}'
              FROM generate_series(0, {LARGE // 10 - 9}) n""".replace("{{", "{").replace("}}", "}")
    )
    conn.execute(
        f"""INSERT INTO awa.attempt_ends (entry_id, claim_id, id, slot, outcome)
            SELECT c.entry_ids[i], c.claim_id, c.entry_ids[i], 0, CASE i WHEN 9 THEN 'failed' ELSE 'completed' END
              FROM awa.claims c CROSS JOIN generate_series(9, 10) i
             WHERE c.queue = 'q' AND c.claim_id <= {1000 + LARGE // 10 - 9}"""
    )
    conn.execute(
        "INSERT INTO awa.ended_jobs (id, created_at, priority, attempt, max_attempts, state, queue, kind, args)"
        " SELECT id, ended_at, 2, 1, 1, 'failed', 'q', 'noop', '{}' FROM awa.attempt_ends"
        "  WHERE outcome = 'failed' AND claim_id >= 1000"
    )
    conn.execute(
        f"""INSERT INTO awa.waiting_jobs (run_at, state, queue, kind)
            SELECT now() + n * interval '1 s', CASE WHEN n = 7 THEN 'retryable' ELSE 'scheduled' END, 'q', 'noop'
              FROM generate_series(1, {LARGE // 10}) n"""
    )
    conn.execute(
        "UPDATE awa.runtime_instances SET newest_claim = %s, open_claims = %s WHERE id = %s",
        (1000 + LARGE // 10 - 6, [1000 + LARGE // 10 - n for n in (8, 7, 6)], runtime),
    )


looked_at = looked_through(
    [nothing, one_queue, one_huge_of_many, many_claims],
    quick=[("none", one_huge_of_many), ("fresh", many_claims), ("stale", nothing), ("stale", many_claims)],
)


@looked_at
def test_finding_a_job_reads_few_rows(conn: Conn, explained: Explained, content: Content, statistics: str) -> None:
    """Guard: the claim of an entry is found by halving, and the entry by a summarised range of ids."""
    prepare(conn, statistics, content)
    conn.execute(
        "SELECT brin_summarize_new_values(format('awa.jobs_%s_id_idx', n)::regclass) FROM generate_series(0, 7) n"
    )
    ids = [id_ for (id_,) in conn.execute("SELECT id FROM awa.jobs WHERE queue = 'q' ORDER BY id").fetchall()]
    ids = ids[:: len(ids) // 15]
    for id_ in ids:
        conn.execute("SELECT * FROM awa.find_job_v2(%s)", (id_,))
    with explained.watch() as plans:
        for id_ in ids[:5]:
            assert conn.execute("SELECT * FROM awa.find_job_v2(%s)", (id_,)).fetchone()
    by_id = [plan for plan in plans if "awa.jobs t WHERE t.id = p_id" in plan.query]
    assert len(by_id) == 5
    check(by_id, most_rows=5 * 8000)  # a few ranges of 32 pages
    check([plan for plan in plans if plan not in by_id], most_rows=5 * 60)


@pytest.mark.slow
@looked_at
def test_lists_read_little_more_than_they_show(
    conn: Conn, explained: Explained, content: Content, statistics: str
) -> None:
    prepare(conn, statistics, content)
    admin = Admin(AWA, lambda: nullcontext(conn))
    shown = 0
    for state in JobState:
        for queue in ("q", None):
            page = None
            for _ in range(3):
                with explained.watch() as plans:
                    page = admin.list_jobs(state, queue=queue, limit=10, after=page and page.after)
                shown += len(page.jobs)
                # some rows of each lane and range, or a few claims with their members; for all queues, of each
                names = sum("RECURSIVE" in plan.query for plan in plans)
                assert names == (queue is None)
                many = 1 if queue else len(admin.queue_counts()) if content is one_huge_of_many else 2
                check(plans, most_rows=600 + 60 * (many - 1))
                if page.after is None:
                    break
    assert shown >= 60 if content is not many_claims else shown > 150


@looked_at
def test_the_oldest_available_jobs_are_found_by_the_heads_of_their_lanes(
    conn: Conn, explained: Explained, content: Content, statistics: str
) -> None:
    """In the order of the index, not sorted; and as the function finds it that has one queue."""
    prepare(conn, statistics, content)
    with one_snapshot(conn, AWA) as look:
        names = [name for (name,) in look.rows(queues.LIST_QUEUES)] or ["q"]
        with explained.watch() as plans:
            oldest = queues.oldest_available(look, names)
        assert oldest == {name: scalar(conn, "SELECT awa.oldest_available(%s)", name) for name in names}
    assert (oldest["q"] is None) == (content is many_claims)
    check(plans, most_rows=100 + 10 * len(names))


@looked_at
def test_counts_stop_at_their_limit(
    conn: Conn, explained: Explained, content: Content, statistics: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: nothing is counted beyond the limit, and an estimate reads the pages it may."""
    monkeypatch.setattr(queues, "EXACT_LIMIT", 500)
    monkeypatch.setattr(queues, "CLAIM_LIMIT", 100)
    monkeypatch.setattr(queues, "SAMPLE_PAGES", 10)
    monkeypatch.setattr(kinds, "SAMPLE_PAGES", 10)
    prepare(conn, statistics, content)
    admin = Admin(AWA, lambda: nullcontext(conn))
    with explained.watch() as plans:
        counts = admin.queue_counts("q")["q"]
    # up to 500 of each state, twice as many claims and what became of them, a hundred rows on each of some pages
    check(plans, most_rows=8000)
    if content is many_claims:
        assert {state for state in JobState if not counts[state].is_exact} == {"scheduled", "completed", "failed"}
        assert (counts[JobState.RUNNING].value, counts[JobState.RETRYABLE].value) == (80, 1)
    with explained.watch() as plans:
        by_kind = admin.kind_counts(queue="q")
    # each entry is looked up, and its end; the head of each lane is read
    check(plans, most_rows=12000)
    if content is many_claims:
        noop = by_kind["noop"]
        assert {state for state in JobState if not noop[state].is_exact} == {"scheduled", "completed", "failed"}
        assert (noop[JobState.RUNNING].value, noop[JobState.RETRYABLE].value) == (80, 1)


@pytest.mark.parametrize("statistics, content", [("none", nothing), ("none", one_queue), ("stale", one_queue)])
def test_a_key_costs_a_few_rows(conn: Conn, explained: Explained, content: Content, statistics: str) -> None:
    """Guard: keys are found by their index, the holder where the key says, and promotion and sweep by key."""

    def unique(conn: Conn, runtime: int) -> None:
        content(conn, runtime)
        conn.execute(
            """INSERT INTO awa.job_uniques (key, id, slot, lane, xid, entry_id, queue)
               SELECT int8send(0) || int8send(row_number() OVER (ORDER BY j.id)), j.id, j.slot, j.lane, j.xid,
                      j.entry_id, j.queue
                 FROM awa.jobs j LEFT JOIN awa.job_uniques u USING (id) WHERE u.id IS NULL AND j.queue = 'q'"""
        )

    put_keys(conn, -1)
    prepare(conn, statistics, unique)
    for n in range(10):
        put_keys(conn, 3 * n + 2)
        put_keys(conn, *range(n, 90, 10), LARGE + n)
    with explained.watch() as plans:
        assert put_keys(conn, 3) == [False]
        assert put_keys(conn, 2 * LARGE) == [True]
        assert put_keys(conn, 5, 3 * LARGE, 4, 3 * LARGE + 1) == [False, True, False, True]
    check(plans, most_rows=20)
    with explained.watch() as plans:
        assert sweep_keys(conn, AWA, after=b"", limit=50, seconds=1.0)[1] == 0
    check(plans, most_rows=300)  # each row, its place in two scans, and what the two lists throw away
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now() WHERE waits_for = 'time'")
    insert_jobs(conn, AWA, [unique_row(4 * LARGE, 3600.0)], notify=False)
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now() WHERE kind = 'unique'")
    with explained.watch() as plans:
        assert promote(conn, limit=1) == 1
    check(plans, most_rows=10)


def unique_row(n: int, delay: float | None = None) -> JobRow:
    key = (n + 1).to_bytes(16)
    return JobRow("q", "unique", b"{}", 2, 25, delay=delay, unique=key, on_conflict="return")


def put_keys(conn: Conn, *numbers: int) -> list[bool]:
    return [one.is_new for one in insert_jobs(conn, AWA, [unique_row(n) for n in numbers], notify=False)]


def test_a_function_does_not_change_the_callers_settings(conn: Conn) -> None:
    """The planner settings of the engine's functions are theirs alone."""
    names = ("enable_seqscan", "enable_bitmapscan", "enable_sort", "plan_cache_mode", "jit", "lock_timeout")
    before = [scalar(conn, f"SHOW {name}") for name in names]
    runtime = register(conn)
    insert(conn, 1)
    settle(conn, runtime, claim(conn, runtime).members)
    promote(conn)
    cancel(conn, insert(conn, 2)[0])
    move(conn, insert(conn, 3)[0], "b")
    assert [scalar(conn, f"SHOW {name}") for name in names] == before


def beside_many_that_completed(conn: Conn, runtime: int) -> None:
    """Many jobs that were completed with rows of their own, many that failed, many that wait."""
    fill(conn, "'other'")
    conn.execute(
        f"""INSERT INTO awa.attempt_ends (entry_id, claim_id, flush, id, slot, outcome)
            SELECT entry_id, 1, 1000000000, id, slot, 'completed'
              FROM awa.jobs WHERE queue = 'other' LIMIT {LARGE // 4}"""
    )
    conn.execute(
        f"""INSERT INTO awa.ended_jobs (id, created_at, priority, attempt, max_attempts, state, queue, kind, args)
            SELECT 1000000 + n, now(), 2, 1, 1, 'failed', 'other', 'noop', '{{}}'
              FROM generate_series(1, {LARGE // 4}) n"""
    )
    conn.execute(
        f"""INSERT INTO awa.waiting_jobs (id, run_at, queue, kind)
            SELECT 2000000 + n, now() + interval '1 h', 'other', 'noop' FROM generate_series(1, {LARGE // 4}) n"""
    )


@statistics
def test_consequences_and_looks_read_few_rows(conn: Conn, explained: Explained, statistics: str) -> None:
    """Guard: outcome_v1 by three indexes, keys by theirs; what follows is inserted and reads nothing."""
    runtime = prepare(conn, statistics, beside_many_that_completed)
    look = "SELECT * FROM awa.outcome_v1(ARRAY[%s, %s, 1000001, 2000001, 12345678]::bigint[])"

    def make() -> list[int]:
        ids = insert(conn, *range(6), queue="mine")
        conn.execute(
            """INSERT INTO awa.jobs (queue, kind, args, follow_ups, unique_key)
               SELECT 'mine', 'noop', '{"n": 1}', '{"completed": [{"kind": "x"}], "failed": [{"kind": "x"}]}',
                      decode(lpad(to_hex(n), 32, '0'), 'hex') || '\\x1f'
                 FROM generate_series(1, 4) n"""
        )
        conn.execute(
            "INSERT INTO awa.job_uniques (key, id) SELECT substring(unique_key FOR 16), id FROM awa.jobs"
            " WHERE unique_key IS NOT NULL AND queue = 'mine' ON CONFLICT DO NOTHING"
        )
        return ids

    for _ in range(10):
        make()
        members = claim(conn, runtime, queue="mine").members
        settle(conn, runtime, members[:8], [Outcome(member, "failed") for member in members[8:]])
        conn.execute(look, (members[0].id, members[1].id))
    make()
    members = claim(conn, runtime, queue="mine").members
    with explained.watch() as plans:
        assert settle(conn, runtime, members[:8], [Outcome(member, "failed") for member in members[8:]]) == []
    check(plans, most_rows=100)
    with explained.watch() as plans:
        conn.execute(look, (members[7].id, members[9].id)).fetchall()
    check(plans, most_rows=10)


def let_go(conn: Conn, runtime: int) -> None:
    """Twenty jobs that wait for one each are looked at while those are available, running, and completed."""
    parents = insert(conn, *range(20), queue="parents")
    conn.execute(
        "INSERT INTO awa.waiting_jobs (waits_for, queue, kind, parents)"
        " SELECT 'parent', 'children', 'noop', ARRAY[p] FROM unnest(%s::bigint[]) p",
        (parents,),
    )
    dependents = Dependents(AWA)
    places = dependents._places
    dependents._look(conn, dependents._list(conn, 0), float("inf"))
    assert places.keys() == {*parents}
    for end in (False, True):
        members = [] if end else claim(conn, runtime, queue="parents").members
        yielded = dependents._look(conn, dependents._list(conn, 0), float("inf"))
        assert (yielded.has_moved, yielded.is_unclear) == (end, False)
        if not end:
            settle(conn, runtime, members)
    settle(conn, runtime, claim(conn, runtime, queue="children").members)


@some_contents
def test_jobs_that_wait_for_others_are_let_go_by_few_rows(
    conn: Conn, explained: Explained, content: Content, statistics: str
) -> None:
    """Guard: rows are looked up one by one; joined, all that wait or all that was ever claimed may be read.

    But for the search by id, which reads what its index does not summarise.
    """
    runtime = register(conn)
    if statistics == "stale":
        let_go(conn, runtime)
        conn.execute("ANALYZE")
        for _ in range(6):
            let_go(conn, runtime)
    content(conn, runtime)
    conn.execute(
        f"INSERT INTO awa.waiting_jobs (run_at, queue, kind, unique_key)"
        f" SELECT now() + interval '1 h', 'q', 'noop', sha256(n::text::bytea) FROM generate_series(1, {LARGE // 10}) n"
    )
    if statistics == "fresh":
        conn.execute("ANALYZE")
    let_go(conn, runtime)
    with explained.watch() as plans:
        let_go(conn, runtime)
    search = [plan for plan in plans if "DISTINCT ON (j.id)" in plan.query]
    assert search
    ours = ("unnest(p_ids", "frontier AS MATERIALIZED", "held AS MATERIALIZED")
    few = [plan for plan in plans if plan not in search and any(text in plan.query for text in ours)]
    assert len(few) >= 6
    check(few, most_rows=2_000)
    listed = [plan for plan in plans if "w.waits_for = 'parent' AND w.seq >" in plan.query]
    assert len(listed) >= 3
    check(listed, most_rows=200)


@statistics
@pytest.mark.parametrize("function", ["cancel_waiting_v1('q', 'x', %s, 10)", "purge_queue_v1('q', %s, 10)"])
def test_clearing_a_queue_reads_each_job_once(conn: Conn, explained: Explained, statistics: str, function: str) -> None:
    """Guard: a step goes on behind the one before, by an index; what was ended before is not read again."""

    def full(conn: Conn, runtime: int) -> None:
        one_queue(conn, runtime)
        conn.execute(
            f"""INSERT INTO awa.waiting_jobs (run_at, queue, kind)
                SELECT now() + n * interval '1 min', CASE n % 2 WHEN 0 THEN 'q' ELSE 'b' END, 'noop'
                  FROM generate_series(1, {LARGE}) n"""
        )

    prepare(conn, statistics, full)
    go_on: str | None = None

    def step() -> int:
        nonlocal go_on
        row = conn.execute(f"SELECT *, go_on::text FROM awa.{function}", (go_on,)).fetchone()
        assert row is not None
        go_on = row[-1]
        return int(row[1])

    for _ in range(12):
        assert step() == 10
    with explained.watch() as plans:
        assert step() == 10
    check(plans, most_rows=200)
    place = json.loads(go_on or "{}") | {"place": 7, "id": None, "hi": None, "found": 1}
    go_on = json.dumps(place)
    for _ in range(12):
        assert step() == 10
    with explained.watch() as plans:
        assert step() == 10
    check(plans, most_rows=200)


@pytest.mark.parametrize("statistics, content", [("none", a_long_history), ("stale", one_queue)])
def test_gathering_reads_what_is_new(conn: Conn, explained: Explained, content: Content, statistics: str) -> None:
    """Guard: the claims of each queue behind the last that was seen, their ends, and the entries that are looked at."""
    prepare(conn, statistics, content)
    runtime = register(conn)
    for _ in range(8):
        insert(conn, *range(10))
        members = claim(conn, runtime, limit=5).members
        settle(conn, runtime, members[:3], [Outcome(members[3], "failed")])
        for _ in Statistics(AWA).gather(conn):
            pass
    insert(conn, *range(40))
    for _ in range(4):
        settle(conn, runtime, claim(conn, runtime, limit=10).members)
    with explained.watch() as plans:
        for _ in Statistics(AWA).gather(conn):
            pass
    # 40 entries, 4 new and 8 open claims; of each of a hundred queues two rows of each segment
    found = [plan for plan in plans if "awa.claims" in plan.query]
    assert len(found) == 3
    check(found, most_rows=500 + 100 * 2 * 9)
