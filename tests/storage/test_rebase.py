"""``awa storage rebase``: whatever is open runs again by this server's numbers, once, and nothing is lost."""

from __future__ import annotations

import json

import psycopg
import pytest
from click.testing import CliRunner

from awa.cli import main
from awa.errors import AwaError
from awa.storage.check import check_storage
from awa.storage.rebase import Rebased, rebase, survey
from awa.storage.trust import read_origin
from tests.storage.engine import (
    AWA,
    BUSY,
    COME_AGAIN,
    Background,
    Conn,
    Outcome,
    claim,
    complete,
    end_unclaimed,
    fall_silent,
    insert,
    promote,
    register,
    scalar,
    settle,
    state,
    transaction,
    wait_for_lock,
)

SHIFTED = """
    CREATE FUNCTION shifted(p_snapshot pg_snapshot, p_by bigint) RETURNS pg_snapshot LANGUAGE sql STRICT AS $$
        SELECT format('%s:%s:%s', pg_snapshot_xmin(p_snapshot)::text::bigint + p_by,
                      pg_snapshot_xmax(p_snapshot)::text::bigint + p_by,
                      (SELECT string_agg((x::text::bigint + p_by)::text, ',' ORDER BY x)
                         FROM pg_snapshot_xip(p_snapshot) x))::pg_snapshot $$
"""

SHIFT_CLAIMS = """
    UPDATE awa.claims c
       SET xids = ARRAY(SELECT (x::text::bigint + %(by)s)::text::xid8 FROM unnest(c.xids) WITH ORDINALITY u(x, n)
                         ORDER BY n),
           frontier = ARRAY(SELECT ROW(f.lane, shifted(f.page_from, %(by)s), shifted(f.page_to, %(by)s),
                                       (f.last_xid::text::bigint + %(by)s)::text::xid8, f.last_entry)::awa.lane_frontier
                              FROM unnest(c.frontier) f)
"""


def move_to_another_cluster(conn: Conn, by: int) -> None:
    """Make the rows and the frontiers those of a cluster that has had *by* transactions more than this."""
    conn.execute("UPDATE awa.origin SET system_identifier = 4711")
    conn.execute(SHIFTED)
    conn.execute(SHIFT_CLAIMS, {"by": by})
    conn.execute("UPDATE awa.jobs SET xid = (xid::text::bigint + %s)::text::xid8", (by,))
    conn.execute("DROP FUNCTION shifted")


def insert_foreign(conn: Conn, xid: int, n: int, *, entry_id: int | None = None) -> None:
    """A job as another cluster's transaction *xid* would have written it."""
    conn.execute(
        "INSERT INTO awa.jobs (xid, entry_id, id, queue, kind, args)"
        " SELECT %s::text::xid8, e, e, 'q', 'noop', json_build_object('n', %s::integer)"
        "   FROM (SELECT coalesce(%s, nextval('awa.entry_id_seq')) AS e) u",
        (str(xid), n, entry_id),
    )


def work_off(conn: Conn, queue: str = "q") -> list[int]:
    """The numbers of the jobs that a new worker gets to run, in order; it completes them."""
    runtime = register(conn)
    found: list[int] = []
    while True:
        claimed = claim(conn, runtime, queue=queue, kinds=["noop", "unknown"], limit=3)
        if not claimed.members and not claimed.flags & COME_AGAIN:
            return found
        assert settle(conn, runtime, claimed.members) == []
        found += claimed.numbers


@pytest.mark.parametrize("by", [-500, 100_000_000], ids=["larger numbers here", "smaller numbers here"])
def test_everything_that_was_open_runs_once_and_in_order(conn: Conn, other: Conn, by: int) -> None:
    runtime = register(conn)
    first = insert(conn, 1, 2, 3)
    with transaction(other):
        insert(other, 4)  # late: the frontier lists its transaction as open
        insert(conn, 5, 6, 7, 8)
        members = claim(conn, runtime, limit=5).members
        other.execute("COMMIT")
    assert settle(conn, runtime, members[:1], [Outcome(members[1], "snoozed", delay=3600.0)]) == []
    insert(conn, 12, kind="unknown", priority=1)
    insert(conn, 9, priority=1)
    assert claim(conn, runtime, kinds=["noop"], limit=1).numbers == [9], "and 12 is set aside"
    last = insert(conn, 10, queue="other")
    end_unclaimed(conn, insert(conn, 11))
    move_to_another_cluster(conn, by)
    fall_silent(conn, runtime)

    found = survey(conn, AWA)
    assert (found.available, found.running) == ({"other": 1, "q": 3}, {runtime: 4})
    assert rebase(conn, AWA) == Rebased(
        carried=4, rescued=4, renumbered=0, queues=["other", "q"], fenced=[runtime], sequences=[]
    )

    assert check_storage(conn, AWA).findings == []
    here, recorded = read_origin(conn, AWA)
    assert here == recorded
    assert state(conn, first[0]) == "completed"
    # what was running had its turn; then the lane in its old order, in which the late one is of the oldest transaction
    assert work_off(conn) == [12, 9, 3, 5, 6, 4, 7, 8]
    assert work_off(conn, "other") == [10]
    assert state(conn, last[0]) == "completed"
    assert state(conn, first[1]) == "scheduled"
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    assert promote(conn) == 1
    assert work_off(conn) == [2]
    assert check_storage(conn, AWA).findings == []


def test_jobs_that_were_hidden_or_too_new_run(conn: Conn) -> None:
    runtime = register(conn)
    insert(conn, 1)
    assert claim(conn, runtime).numbers == [1]
    insert_foreign(conn, 100, 2)
    insert_foreign(conn, 9_000_000_000, 3)
    assert claim(conn, runtime).numbers == []
    fall_silent(conn, runtime)
    rebase(conn, AWA)
    assert check_storage(conn, AWA).findings == []
    assert work_off(conn) == [1, 2, 3]


def test_it_may_be_done_where_nothing_is_wrong_and_again(conn: Conn) -> None:
    insert(conn, 1, 2)
    assert rebase(conn, AWA).carried == 2
    assert rebase(conn, AWA).carried == 2
    assert check_storage(conn, AWA).findings == []
    assert work_off(conn) == [1, 2]
    fall_silent(conn, scalar(conn, "SELECT max(id) FROM awa.runtime_instances"))
    assert rebase(conn, AWA).carried == 0


def test_what_a_job_has_been_through_goes_along(conn: Conn) -> None:
    """Every column but those that place the entry, whatever later migrations add."""
    row = """SELECT id, priority, attempt, max_attempts, timeout_ms, kind, args::text, metadata::text, tags,
                    concurrency_key, ordering_key, unique_key, expires_at, follow_ups::text, history::text,
                    available_at, coalesce(created_at, available_at)
               FROM awa.jobs ORDER BY entry_id DESC LIMIT 1"""
    conn.execute(
        """INSERT INTO awa.jobs (queue, kind, priority, lane, attempt, max_attempts, timeout_ms, args, metadata, tags,
                                 concurrency_key, ordering_key, unique_key, expires_at, follow_ups, history,
                                 available_at)
           VALUES ('q', 'noop', 3, 7, 4, 9, 77, '{"n": 1}', '{"m": 1}', '{a,b}', 'ck', 'ok', '\\x01',
                   '2100-01-01 00:00+00', '[1]', '[{"attempt": 3}]', '2020-01-01 00:00+00')"""
    )
    before = conn.execute(row).fetchone()
    rebase(conn, AWA)
    assert conn.execute(row).fetchone() == before
    assert scalar(conn, "SELECT lane FROM awa.jobs ORDER BY entry_id DESC LIMIT 1") == 6, "the express lane"


def test_an_attempt_that_was_the_last_fails_the_job(conn: Conn) -> None:
    runtime = register(conn)
    job = insert(conn, 1, max_attempts=1)[0]
    claim(conn, runtime)
    fall_silent(conn, runtime)
    assert rebase(conn, AWA).rescued == 1
    assert state(conn, job) == "failed"
    assert "rebased" in scalar(conn, "SELECT history::text FROM awa.ended_jobs WHERE id = %s", job)


def test_a_living_worker_is_refused_and_nothing_changes(conn: Conn) -> None:
    runtime = register(conn, host="alpha", pid=77)
    insert(conn, 1)
    with pytest.raises(AwaError, match=rf"worker {runtime} \(host alpha, process 77\) gave a sign of life 0 s ago"):
        rebase(conn, AWA)
    assert scalar(conn, "SELECT count(*) FROM awa.jobs") == 1
    assert scalar(conn, "SELECT count(*) FROM awa.gone_runtimes") == 0
    conn.execute("UPDATE awa.runtime_instances SET heartbeat_ms = 60000, last_seen_at = now() - interval '100 s'")
    with pytest.raises(AwaError, match="counts as stopped after 180 s of silence"):
        rebase(conn, AWA)
    conn.execute("UPDATE awa.runtime_instances SET last_seen_at = now() - interval '200 s'")
    assert rebase(conn, AWA).fenced == [runtime]


def test_a_worker_that_was_only_silent_can_write_nothing_more(conn: Conn) -> None:
    runtime = register(conn)
    insert(conn, 1)
    members = claim(conn, runtime).members
    fall_silent(conn, runtime)
    rebase(conn, AWA)
    for call in (lambda: settle(conn, runtime, members), lambda: claim(conn, runtime)):
        with pytest.raises(psycopg.Error) as caught:
            call()
        assert caught.value.sqlstate == "AWA01"
    assert work_off(conn) == [1]


def test_attempts_of_a_worker_that_nobody_knows_are_taken_back(conn: Conn) -> None:
    runtime = register(conn)
    insert(conn, 1)
    claim(conn, runtime)
    conn.execute("DELETE FROM awa.runtime_instances")
    assert rebase(conn, AWA).rescued == 1
    assert work_off(conn) == [1]
    assert check_storage(conn, AWA).findings == []


HELD = {
    "the ring is being turned": "SELECT pg_advisory_xact_lock(hashtextextended('awa.ring', 0))",
    "somebody claims from or works on queue q": "SELECT pg_advisory_xact_lock(hashtextextended('awa.queue:q', 0))",
    "is recording something": """
        SELECT pg_advisory_xact_lock_shared(hashtextextended('awa.runtime:' || id, 0)) FROM awa.runtime_instances""",
}


@pytest.mark.parametrize("reason", HELD)
def test_it_waits_for_who_holds_a_lock_and_says_who_it_was(conn: Conn, other: Conn, reason: str) -> None:
    runtime = register(conn)
    insert(conn, 1, 2)
    claim(conn, runtime, limit=1)
    fall_silent(conn, runtime)
    with transaction(other):
        other.execute(HELD[reason])
        with pytest.raises(AwaError, match=reason):
            rebase(conn, AWA, patience=0.3)
        assert scalar(conn, "SELECT count(*) FROM awa.jobs") == 2
        assert scalar(conn, "SELECT count(*) FROM awa.gone_runtimes") == 0
        waiting = Background(lambda: rebase(conn, AWA))
        other.execute("COMMIT")
    assert waiting.result().carried == 1
    assert work_off(conn) == [1, 2]


def test_a_crash_in_the_middle_loses_nothing(conn: Conn, other: Conn, third: Conn, database: str) -> None:
    """It is ended when all but the last is written."""
    runtime = register(conn)
    insert(conn, *range(1, 11))
    claim(conn, runtime, limit=4)
    move_to_another_cluster(conn, 100_000_000)
    fall_silent(conn, runtime)
    tables = ("jobs", "claims", "attempt_ends", "frontiers", "gone_runtimes", "origin", "runtime_instances")

    def everything() -> list[object]:
        return [conn.execute(f"SELECT t::text FROM awa.{table} t ORDER BY 1").fetchall() for table in tables]

    before = everything()
    with psycopg.connect(database, autocommit=True) as doomed, transaction(other):
        other.execute("UPDATE awa.origin SET recorded_at = recorded_at")
        rebasing = Background(lambda: rebase(doomed, AWA))
        wait_for_lock(third, doomed)
        assert everything() == before
        third.execute("SELECT pg_terminate_backend(%s)", (doomed.info.backend_pid,))
        with pytest.raises(psycopg.OperationalError):
            rebasing.result()
    assert everything() == before
    assert rebase(conn, AWA).carried == 6
    assert work_off(conn) == list(range(1, 11))
    assert check_storage(conn, AWA).findings == []


def test_what_producers_commit_meanwhile_runs_once(conn: Conn, other: Conn, third: Conn, database: str) -> None:
    """Before the frontier's snapshot, between it and the reading, and after all of it."""
    runtime = register(conn)
    insert(conn, 1, 2)
    member = claim(conn, runtime, limit=1).members[0]
    fall_silent(conn, runtime)
    with psycopg.connect(database, autocommit=True) as late, transaction(late):
        insert(late, 4)  # open all the time
        with transaction(other):
            complete(other, member)  # the rebase waits for what becomes of it, behind the snapshot, before the reading
            rebasing = Background(lambda: rebase(conn, AWA))
            wait_for_lock(third, conn)
            insert(third, 3)
            insert(third, 5, queue="new")
            other.execute("ROLLBACK")
        done = rebasing.result()
        assert (done.carried, done.rescued, done.queues) == (2, 1, ["q"])
        late.execute("COMMIT")
    assert check_storage(conn, AWA).findings == []
    assert work_off(conn) == [1, 2, 3, 4]
    assert work_off(conn, "new") == [5]


def test_what_producers_commit_behind_the_reading_runs(conn: Conn, other: Conn, third: Conn) -> None:
    """The frontier's snapshot is older than the reading, so what the reading has not seen lies ahead of it."""
    job = insert(conn, 1)[0]
    with transaction(other):
        end_unclaimed(other, [job])  # the carrying, which has read everything, waits for what becomes of it
        rebasing = Background(lambda: rebase(conn, AWA))
        wait_for_lock(third, conn)
        insert(third, 2)
        other.execute("ROLLBACK")
    assert rebasing.result().carried == 1
    assert work_off(conn) == [1, 2]


def test_what_it_appends_lies_ahead_though_later_transactions_have_ended(conn: Conn, other: Conn, third: Conn) -> None:
    """A snapshot does not list its own transaction as open; one that has a number above it counts it as over."""
    first, second = register(conn), register(conn)
    insert(conn, 1)
    fall_silent(conn, first)
    fall_silent(conn, second)
    with transaction(other):
        other.execute("INSERT INTO awa.gone_runtimes (runtime) VALUES (%s)", (second,))
        rebasing = Background(lambda: rebase(conn, AWA))
        wait_for_lock(third, conn)  # it has fenced the first runtime, so it has its number
        insert(third, 2)
        other.execute("ROLLBACK")
    assert rebasing.result().fenced == [first, second]
    assert work_off(conn) == [1, 2]


def test_nobody_claims_while_it_works(conn: Conn, other: Conn, third: Conn) -> None:
    runtime = register(conn)
    insert(conn, 1)
    fall_silent(conn, runtime)
    with transaction(other):
        other.execute("UPDATE awa.origin SET recorded_at = recorded_at")
        rebasing = Background(lambda: rebase(conn, AWA))
        wait_for_lock(third, conn)
        newcomer = register(third)
        claimed = claim(third, newcomer)
        assert (claimed.members, claimed.flags) == ([], BUSY)
        other.execute("COMMIT")
    rebasing.result()
    assert claim(third, newcomer).numbers == [1]


def test_an_open_transaction_that_completes_an_attempt_is_waited_for(conn: Conn, other: Conn, third: Conn) -> None:
    runtime = register(conn)
    insert(conn, 1)
    member = claim(conn, runtime).members[0]
    fall_silent(conn, runtime)
    with transaction(other):
        complete(other, member)
        with pytest.raises(AwaError, match="an open transaction holds what must be written"):
            rebase(conn, AWA, patience=0.0)
        rebasing = Background(lambda: rebase(conn, AWA))
        wait_for_lock(third, conn)
        other.execute("COMMIT")
    assert rebasing.result().rescued == 0
    assert work_off(conn) == []


def test_entries_that_share_a_number_part_and_each_runs_once(conn: Conn) -> None:
    """Two live clusters have drawn the same numbers; an end names an entry by its number alone."""
    runtime = register(conn)
    done, retried, waiting, mine = insert(conn, 1, 2, 3, 4)
    members = claim(conn, runtime, limit=2).members
    assert settle(conn, runtime, members[:1], [Outcome(members[1], "retried")]) == []
    for xid, (entry, n) in enumerate([(done, 101), (retried, 102), (waiting, 103)], start=100):
        insert_foreign(conn, xid, n, entry_id=entry)
    assert {finding.name for finding in check_storage(conn, AWA).findings} >= {"shared_number", "hidden"}
    fall_silent(conn, runtime)
    result = rebase(conn, AWA)
    assert (result.carried, result.renumbered) == (6, 3)
    assert check_storage(conn, AWA).findings == []
    assert state(conn, done) == "completed"
    assert sorted(work_off(conn)) == [2, 3, 4, 101, 102, 103]
    assert {state(conn, job) for job in (done, retried, waiting, mine)} == {"completed"}
    assert scalar(conn, "SELECT count(DISTINCT id) FROM awa.jobs") == 7
    assert check_storage(conn, AWA).findings == []


def test_a_row_that_was_restored_twice_runs_once(conn: Conn) -> None:
    insert(conn, 1)
    conn.execute("INSERT INTO awa.jobs SELECT * FROM awa.jobs")
    rebase(conn, AWA)
    assert work_off(conn) == [1]
    assert check_storage(conn, AWA).findings == []


def test_sequences_and_the_ring_are_put_right(conn: Conn) -> None:
    """Replication brings rows, and no values of sequences."""
    runtime = register(conn)
    insert(conn, 1)
    claim(conn, runtime)
    insert(conn, 2)
    conn.execute("SELECT awa.rotate_v1()")
    fall_silent(conn, runtime)
    conn.execute("ALTER SEQUENCE awa.entry_id_seq RESTART")
    conn.execute("ALTER SEQUENCE awa.claim_id_seq RESTART")
    conn.execute("ALTER SEQUENCE awa.runtime_instances_id_seq RESTART")
    conn.execute("ALTER SEQUENCE awa.ring_seq RESTART")
    with pytest.raises(psycopg.errors.CheckViolation):
        insert(conn, 3)
    assert rebase(conn, AWA).sequences == ["entry_id_seq", "claim_id_seq", "runtime_instances_id_seq"]
    assert scalar(conn, "SELECT pg_sequence_last_value('awa.ring_seq')") == 1, "the slot that awa.ring says is open"
    assert check_storage(conn, AWA).findings == []
    insert(conn, 3)
    assert work_off(conn) == [1, 2, 3]
    assert check_storage(conn, AWA).findings == []


def test_what_is_carried_lets_old_slots_be_emptied(conn: Conn) -> None:
    insert(conn, 1, 2)
    conn.execute("SELECT awa.rotate_v1()")
    rebase(conn, AWA)
    assert scalar(conn, "SELECT awa.prune_v1(0::smallint, 2, pg_relation_filenode('awa.jobs_0'))") == "pruned"
    assert check_storage(conn, AWA).findings == []
    assert work_off(conn) == [1, 2]


def test_the_command_asks_first(conn: Conn, database: str) -> None:
    insert(conn, 1, 2)
    command = ["storage", "rebase", "--database", database]
    runner = CliRunner(env={"AWA_SCHEMA": None})
    refused = runner.invoke(main, command, input="n\n")
    assert refused.exit_code == 1
    assert "2 entries are to be appended again\n          2 available in queue q\n" in refused.stdout
    assert scalar(conn, "SELECT count(*) FROM awa.jobs") == 2
    assert runner.invoke(main, command, input="").exit_code == 1
    assert "appended 2 entries again" in runner.invoke(main, command, input="y\n").stdout
    done = runner.invoke(main, [*command, "--yes", "--json"])
    assert json.loads(done.stdout) == {
        "schema": "awa",
        "carried": 2,
        "rescued": 0,
        "renumbered": 0,
        "queues": ["q"],
        "fenced": [],
        "sequences": [],
    }
    runtime = register(conn)
    living = runner.invoke(main, [*command, "--yes"])
    assert living.exit_code == 1
    assert f"awa: worker {runtime} " in living.stderr


@pytest.mark.parametrize("by", [300, 40])
def test_what_has_ended_does_not_run_again_when_this_server_comes_to_its_numbers(conn: Conn, by: int) -> None:
    """Completions stand in no list that a claim looks at: such entries must lie behind every frontier. Without that a
    claim brings them again once this server has numbered so far: tried."""
    runtime = register(conn)
    insert(conn, *range(1, 8))
    ids = insert(conn, 8, priority=1)
    members = claim(conn, runtime, limit=6).members
    settle(conn, runtime, members[:4], [Outcome(members[4], "failed")])
    move_to_another_cluster(conn, by)
    fall_silent(conn, runtime)
    done = rebase(conn, AWA)
    assert (done.carried, done.rescued) == (2, 1)
    ran = work_off(conn)
    for _ in range(10):
        for _ in range(50):
            conn.execute("SELECT pg_current_xact_id()")
        insert(conn, 100)
        ran += work_off(conn)
    assert [n for n in ran if n != 100] == [5, 6, 7]
    assert [state(conn, id_) for id_ in ids] == ["completed"]
    assert check_storage(conn, AWA).findings == []
