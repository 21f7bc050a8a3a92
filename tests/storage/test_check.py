"""``awa storage check``: it finds each thing that can be wrong, and nothing when nothing is."""

from __future__ import annotations

import json
from collections.abc import Iterator

import psycopg
import pytest
from click.testing import CliRunner, Result

from awa.cli import main
from awa.storage.check import Report, check_storage
from awa.storage.reach import whole_storage
from awa.storage.trust import check_origin
from tests.fixtures.db import wait_until
from tests.storage.engine import (
    AWA,
    Background,
    Conn,
    Outcome,
    claim,
    end_unclaimed,
    fall_silent,
    fence,
    insert,
    register,
    rescue,
    scalar,
    settle,
    transaction,
    wait_for_lock,
)


@pytest.fixture
def conn(database: str) -> Iterator[Conn]:
    """A connection to a database that a worker has been at."""
    with psycopg.connect(database, autocommit=True) as conn:
        check_origin(conn, AWA)
        yield conn


def work(conn: Conn) -> int:
    """Leave behind something in each state, in two slots; returns the runtime, which has attempts open."""
    runtime = register(conn)
    insert(conn, *range(20), max_attempts=2)
    ends = ["retried", "snoozed", "cancelled", "failed", "released"]
    members = claim(conn, runtime, limit=10).members
    others = [
        Outcome(member, outcome, delay=0.0 if outcome == "retried" else 60.0)
        for member, outcome in zip(members, ends, strict=False)
    ]
    assert settle(conn, runtime, members[5:8], others) == []
    conn.execute("SELECT awa.rotate_v1()")
    unknown = insert(conn, 100, kind="unknown")
    insert(conn, *range(101, 120), queue="other")
    end_unclaimed(conn, insert(conn, 200, 201, queue="other"))
    claim(conn, runtime, kinds=["noop"], limit=100)
    claim(conn, runtime, queue="other", limit=5)
    gone = register(conn)
    claim(conn, gone, queue="other", limit=3)
    fall_silent(conn, gone)
    assert fence(conn, gone)
    assert rescue(conn, gone) == (3, 3, 0)
    conn.execute("UPDATE awa.runtime_instances SET ended_at = now() WHERE id = %s", (gone,))
    assert scalar(conn, "SELECT count(*) FROM awa.waiting_jobs WHERE id = %s", unknown[0]) == 1
    return runtime


def names(report: Report) -> set[str]:
    return {finding.name for finding in report.findings}


def test_nothing_is_found_when_nothing_is_wrong(conn: Conn) -> None:
    assert check_storage(conn, AWA).findings == []
    work(conn)
    report = check_storage(conn, AWA)
    assert report.findings == []
    assert report.is_sound
    first, second = report.sums[:2]
    assert (first.entries, first.completed) == (22, 3), "20 jobs, one retried, one released"
    assert (second.available, second.running) == (14, 5), "21 inserted, 2 ended, 8 claimed of which 3 were rescued"
    assert all(sums.is_even for sums in report.sums)
    assert sum(sums.entries for sums in report.sums[2:]) == 0


def running(conn: Conn) -> str:
    """SQL for one open attempt of the current slot: its slot, claim and entry."""
    return "(SELECT o.* FROM awa.open_attempts() o WHERE o.slot = pg_sequence_last_value('awa.ring_seq') LIMIT 1) o"


FAULTS = {
    "claimed_twice": """
        INSERT INTO awa.claims (claim_id, runtime, nonce, slot, lane, queue, frontier, entry_ids, xids)
        SELECT nextval('awa.claim_id_seq'), o.runtime, 1, o.slot, j.lane, o.queue, awa.frontier_of(o.queue),
               ARRAY[o.entry_id], ARRAY[o.xid]
          FROM {running} JOIN awa.jobs j USING (slot, entry_id)""",
    "ended_twice": """
        INSERT INTO awa.completions (claim_id, flush, slot, idx, elapsed_ms)
        SELECT o.claim_id, f, o.slot, ARRAY[o.idx], '{{1}}' FROM {running} CROSS JOIN generate_series(901, 902) f""",
    "completed_unclaimed": """
        INSERT INTO awa.completions (claim_id, flush, slot, idx, elapsed_ms)
        SELECT o.claim_id, 901, o.slot, '{{999}}', '{{1}}' FROM {running}""",
    "ended_unclaimed": """
        INSERT INTO awa.attempt_ends (entry_id, claim_id, id, slot, outcome)
        SELECT o.entry_id, 1, o.entry_id, o.slot, 'released' FROM {running}""",
    "ended_and_claimed": """
        INSERT INTO awa.attempt_ends (entry_id, id, slot, outcome)
        SELECT o.entry_id, o.entry_id, o.slot, 'cancelled' FROM {running}""",
    "end_of_nothing": "INSERT INTO awa.attempt_ends (entry_id, id, slot, outcome) VALUES (1, 1, 5, 'cancelled')",
    "claim_of_nothing": """
        DELETE FROM awa.jobs j USING {running} WHERE j.slot = o.slot AND j.entry_id = o.entry_id""",
    "shared_number": """
        INSERT INTO awa.jobs (entry_id, id, queue, kind)
        SELECT o.entry_id, nextval('awa.entry_id_seq'), 'q', 'noop' FROM {running}""",
    "live_twice": """
        INSERT INTO awa.jobs (id, queue, kind)
        SELECT j.id, 'q', 'noop' FROM {running} JOIN awa.jobs j USING (slot, entry_id)""",
    "forgotten": "UPDATE awa.runtime_instances SET newest_claim = 1000000, open_claims = '{{}}'",
    "hidden": "INSERT INTO awa.jobs (xid, queue, kind) VALUES ('3', 'q', 'noop')",
    "foreign": "INSERT INTO awa.jobs (xid, queue, kind) VALUES ('9000000000', 'q', 'noop')",
    "frontier": """
        INSERT INTO awa.frontiers (queue, claim_id, frontier)
        VALUES ('third', nextval('awa.claim_id_seq'),
                ARRAY[ROW(5, '9000000000:9000000000:', NULL, NULL, NULL)::awa.lane_frontier])""",
    "sequence": "SELECT setval('awa.entry_id_seq', 1)",
    "ring": "ALTER SEQUENCE awa.ring_seq RESTART",
    "origin": "UPDATE awa.origin SET database_oid = 1",
    "partition_missing": "ALTER TABLE awa.jobs DETACH PARTITION awa.jobs_7; ALTER TABLE awa.jobs_7 RENAME TO jobs_x",
    "partition_detached": "ALTER TABLE awa.claims DETACH PARTITION awa.claims_7",
    "partition_vacuumed": "ALTER TABLE awa.completions_3 RESET (autovacuum_enabled)",
}
ALSO = {
    "claimed_twice": {"sums"},
    "ended_twice": {"sums"},
    "completed_unclaimed": {"sums"},
    "ended_unclaimed": set(),
    "ended_and_claimed": set(),
    "end_of_nothing": {"sums"},
    "claim_of_nothing": {"sums"},
}
"""What else is seen of the same fault."""


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found_and_nothing_else(conn: Conn, name: str) -> None:
    work(conn)
    conn.execute(FAULTS[name].format(running=running(conn)))
    report = check_storage(conn, AWA)
    assert names(report) == {name} | ALSO.get(name, set()), report.findings
    assert not report.is_sound
    for finding in report.findings:
        assert finding.count > 0
        assert len(finding.sample) <= 5
        assert finding.text and "{" not in finding.text


@pytest.mark.parametrize(
    ("sequence", "spoil"),
    [
        ("entry_id_seq", "INSERT INTO awa.waiting_jobs (id, kind, run_at) VALUES (1000000, 'noop', 'infinity')"),
        ("claim_id_seq", "INSERT INTO awa.frontiers (queue, claim_id, frontier) VALUES ('third', 1000000, '{}')"),
        ("runtime_instances_id_seq", "INSERT INTO awa.gone_runtimes (runtime) VALUES (1000000)"),
    ],
)
def test_a_sequence_that_would_give_out_a_number_in_use_is_found(conn: Conn, sequence: str, spoil: str) -> None:
    work(conn)
    conn.execute(spoil)
    assert [(f.name, f.where, f.sample) for f in check_storage(conn, AWA).findings] == [
        ("sequence", sequence, [1_000_000])
    ]


@pytest.mark.parametrize("spoil", ["runtime = 999", "runtime = (SELECT max(id) FROM awa.runtime_instances)"])
def test_an_attempt_that_no_rescue_would_find_is_found(conn: Conn, spoil: str) -> None:
    """Of a worker that is not registered, or has left."""
    work(conn)
    conn.execute(f"UPDATE awa.claims SET {spoil} WHERE claim_id IN (SELECT claim_id FROM awa.open_attempts())")
    conn.execute("SELECT setval(pg_get_serial_sequence('awa.runtime_instances', 'id'), 1000)")
    assert names(check_storage(conn, AWA)) == {"forgotten"}


def test_a_segment_is_not_emptied_while_it_is_read(conn: Conn, other: Conn) -> None:
    """Else its claims would be missing beside entries that were read before."""
    runtime = register(conn)
    insert(conn, 1)
    settle(conn, runtime, claim(conn, runtime).members)
    conn.execute("SELECT awa.rotate_v1()")
    with whole_storage(conn, AWA, mode="REPEATABLE READ, READ ONLY"):
        assert scalar(other, "SELECT awa.prune_v1(0::smallint, 1, pg_relation_filenode('awa.jobs_0'))") == "busy"
    assert scalar(other, "SELECT awa.prune_v1(0::smallint, 1, pg_relation_filenode('awa.jobs_0'))") == "pruned"
    assert check_storage(conn, AWA).findings == []


def test_a_segment_that_is_just_being_emptied_is_read_afterwards(conn: Conn, other: Conn, third: Conn) -> None:
    """The lock comes before the snapshot: an older one would show neither the claims nor the checkpoint of the queue,
    as if it had never been claimed from, and the job behind its frontier would seem to lie ahead."""
    runtime = register(conn)
    insert(conn, 1)
    settle(conn, runtime, claim(conn, runtime).members)
    conn.execute("SELECT awa.rotate_v1()")
    conn.execute(FAULTS["hidden"])
    with transaction(other):
        assert scalar(other, "SELECT awa.prune_v1(0::smallint, 1, pg_relation_filenode('awa.jobs_0'))") == "pruned"
        checking = Background(lambda: check_storage(conn, AWA))
        wait_for_lock(third, conn)
        other.execute("COMMIT")
    assert names(checking.result()) == {"hidden"}


def test_it_changes_nothing_and_holds_up_nobody_at_work(conn: Conn, other: Conn) -> None:
    runtime = work(conn)
    with whole_storage(conn, AWA, mode="REPEATABLE READ, READ ONLY"):
        conn.execute("SELECT count(*) FROM awa.jobs")
        insert(other, 300)
        members = claim(other, runtime, limit=1000).members
        assert members and settle(other, runtime, members) == []
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction), conn.transaction():
            conn.execute("DELETE FROM awa.gone_runtimes")


def run(database: str, *arguments: str) -> Result:
    return CliRunner(env={"AWA_SCHEMA": None}).invoke(main, ["storage", *arguments, "--database", database])


def test_the_command_tells_by_its_exit_code(conn: Conn, database: str) -> None:
    work(conn)
    sound = run(database, "check")
    assert sound.exit_code == 0, sound.output
    assert sound.stdout.splitlines()[-1].startswith("schema awa: all is well; read in ")
    conn.execute(FAULTS["hidden"])
    hidden = scalar(conn, "SELECT max(entry_id) FROM awa.jobs")
    found = run(database, "check")
    assert found.exit_code == 1
    told = "hidden (queue q): 1 open jobs of queue q lie behind its frontier, where no claim comes: stop the workers"
    assert told in found.stdout
    assert found.stdout.splitlines()[-1].startswith("schema awa: 1 findings; read in ")
    facts = json.loads(run(database, "check", "--json").stdout)
    assert (facts["schema"], facts["is_sound"]) == ("awa", False)
    assert [(f["name"], f["count"], f["sample"]) for f in facts["findings"]] == [("hidden", 1, [hidden])]
    assert len(facts["slots"]) == 8 and facts["seconds"] >= 0


def test_a_schema_of_another_name_is_checked_as_well(empty_database: str) -> None:
    named = {"AWA_SCHEMA": "Jobs-2"}
    migrated = CliRunner(env=named).invoke(main, ["migrate", "--database", empty_database])
    assert migrated.exit_code == 0, migrated.output
    for command in (["check"], ["status"], ["rebase", "--yes"]):
        done = CliRunner(env=named).invoke(main, ["storage", *command, "--database", empty_database])
        assert done.exit_code == 0, done.output
        assert "schema Jobs-2" in done.stdout


def test_status_says_what_holds_each_slot(conn: Conn, other: Conn, database: str) -> None:
    runtime = work(conn)
    facts = json.loads(run(database, "status", "--json").stdout)
    assert (facts["empty"], facts["oldest"]) == (6, 0)
    first, second, *rest = facts["slots"]
    assert second["is_current"] and not first["is_current"]
    assert second["sealed_at"] is None and first["opened_at"] < first["sealed_at"]
    assert first["entries"] == 22 and first["newest_end_at"] is not None and first["size_bytes"] > 0
    pins = {(pin["what"], pin["name"]): pin["count"] for pin in second["pins"]}
    assert pins == {("available", "other"): 14, ("running", str(runtime)): 5}
    assert [slot["is_empty"] for slot in rest] == [True] * 6
    with transaction(other):
        other.execute("SELECT count(*) FROM awa.jobs")
        pid = other.info.backend_pid
        wait_until(lambda: f"process {pid}" in run(database, "status").stdout, timeout=10.0)
    assert f"process {pid}" not in run(database, "status").stdout


def test_status_does_not_count_a_long_queue_to_its_end(conn: Conn, database: str) -> None:
    insert(conn, *range(1500))
    assert "1000 or more available in queue q" in run(database, "status").stdout
