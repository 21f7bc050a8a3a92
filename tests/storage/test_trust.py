"""Whether the rows' transaction numbers are this server's: what a worker asks when it connects."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from awa.errors import StorageNotTrusted
from awa.storage.check import check_storage
from awa.storage.migrate import load_migrations, migrate
from awa.storage.reach import Unreachable, find_unreachable, whole_storage
from awa.storage.trust import check_origin, read_origin
from tests.storage.engine import (
    AWA,
    Background,
    Conn,
    Outcome,
    claim,
    claim_in_steps,
    insert,
    register,
    scalar,
    settle,
    transaction,
    wait_for_lock,
)

FOREIGN = "UPDATE awa.origin SET system_identifier = 4711"


def insert_foreign(conn: Conn, xid: int, n: int, *, queue: str = "q") -> None:
    """A job as another cluster's transaction *xid* would have written it."""
    conn.execute(
        "INSERT INTO awa.jobs (xid, queue, kind, args)"
        " VALUES (%s::text::xid8, %s, 'noop', json_build_object('n', %s::integer))",
        (str(xid), queue, n),
    )


def unreachable(conn: Conn) -> list[Unreachable]:
    with whole_storage(conn, AWA):
        return find_unreachable(conn, AWA)


def set_frontier(conn: Conn, snapshot: str, *, queue: str = "q") -> None:
    """A checkpoint of lane 5, newer than every claim."""
    conn.execute(
        """INSERT INTO awa.frontiers (queue, claim_id, frontier)
           VALUES (%s, nextval('awa.claim_id_seq'), ARRAY[ROW(5, %s, NULL, NULL, NULL)::awa.lane_frontier])""",
        (queue, snapshot),
    )


def test_the_migration_records_where_it_runs(server: Any, template: str) -> None:
    with psycopg.connect(server.url(template), autocommit=True) as conn:
        here, recorded = read_origin(conn, AWA)
    assert here == recorded


def test_a_clone_of_a_database_passes_and_is_recorded_without_a_word(
    conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    here, recorded = read_origin(conn, AWA)
    assert recorded is not None
    assert (here.system_identifier, here.database_oid) != (recorded.system_identifier, recorded.database_oid)
    with caplog.at_level(logging.INFO):
        check_origin(conn, AWA)
    assert read_origin(conn, AWA) == (here, here)
    assert caplog.records == []


def test_a_physical_copy_passes_with_one_warning(conn: Conn, caplog: pytest.LogCaptureFixture) -> None:
    """pg_upgrade changes the identifier and keeps the transactions."""
    runtime = register(conn)
    insert(conn, *range(5))
    claim(conn, runtime, limit=2)
    conn.execute(FOREIGN)
    check_origin(conn, AWA)
    check_origin(conn, AWA)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cluster 4711" in caplog.records[0].getMessage()
    assert claim_in_steps(conn, runtime, limit=2) == [2, 3, 4]


def test_nothing_recorded_is_recorded_when_all_is_in_reach(conn: Conn) -> None:
    insert(conn, 1)
    conn.execute("DELETE FROM awa.origin")
    check_origin(conn, AWA)
    here, recorded = read_origin(conn, AWA)
    assert here == recorded


@pytest.mark.parametrize("has_jobs", [True, False])
def test_a_schema_that_holds_jobs_already_is_looked_at_first(empty_database: str, has_jobs: bool) -> None:
    """What is migrated may have been restored or replicated into just before."""
    with psycopg.connect(empty_database, autocommit=True) as conn:
        migrate(conn, AWA, migrations=[file for file in load_migrations() if file.number < 13])
        if has_jobs:
            insert(conn, 1)
        migrate(conn, AWA)
        assert scalar(conn, "SELECT count(*) FROM awa.origin") == (0 if has_jobs else 1)


def test_jobs_behind_the_frontier_are_not_trusted(conn: Conn) -> None:
    runtime = register(conn)
    insert(conn, 1)
    assert claim(conn, runtime).numbers == [1]
    insert_foreign(conn, 100, 2)
    assert claim(conn, runtime).numbers == [], "the test wants one that is hidden"
    conn.execute(FOREIGN)
    with pytest.raises(StorageNotTrusted, match="1 open jobs of queue q lie behind its frontier") as caught:
        check_origin(conn, AWA)
    assert "awa storage rebase" in str(caught.value)
    assert caught.value.expected == str(read_origin(conn, AWA)[1])
    assert caught.value.found == str(read_origin(conn, AWA)[0])
    assert scalar(conn, "SELECT system_identifier FROM awa.origin") == 4711


def test_jobs_of_transactions_to_come_are_not_trusted(conn: Conn) -> None:
    insert_foreign(conn, 9_000_000_000, 1)
    conn.execute(FOREIGN)
    with pytest.raises(StorageNotTrusted, match="1 open jobs of queue q are of transactions that this server"):
        check_origin(conn, AWA)


def test_a_job_with_the_number_of_an_open_transaction_is_not_trusted(conn: Conn, other: Conn) -> None:
    with transaction(other):
        xid = scalar(other, "SELECT pg_current_xact_id()::text::bigint")
        insert_foreign(conn, xid, 1)
        assert [(found.what, found.count) for found in unreachable(conn)] == [("foreign", 1)]


def test_a_frontier_beyond_this_servers_transactions_is_not_trusted(conn: Conn) -> None:
    set_frontier(conn, "9000000000:9000000000:")
    conn.execute(FOREIGN)
    with pytest.raises(StorageNotTrusted, match="the frontier of queue q lies beyond"):
        check_origin(conn, AWA)


def test_a_frontier_that_takes_an_open_transaction_for_over_is_not_trusted(conn: Conn, other: Conn) -> None:
    """It lies within this server's transactions, and would hide what that one commits."""
    with transaction(other):
        insert(other, 1)
        xid = scalar(other, "SELECT pg_current_xact_id()::text::bigint")
        conn.execute("SELECT pg_current_xact_id()")  # one that is over, so that the open one is below xmax
        set_frontier(conn, f"{xid + 1}:{xid + 1}:")
        assert [(found.what, found.queue) for found in unreachable(conn)] == [("frontier", "q")]
        other.execute("COMMIT")
    assert [(found.what, found.count) for found in unreachable(conn)] == [("hidden", 1)]


def test_a_frontier_that_knows_the_open_transaction_is_trusted(conn: Conn, other: Conn) -> None:
    runtime = register(conn)
    with transaction(other):
        insert(other, 1)
        insert(conn, 2)
        assert claim(conn, runtime).numbers == [2]
        assert unreachable(conn) == []
        other.execute("COMMIT")
    assert unreachable(conn) == []
    assert claim(conn, runtime).numbers == [1]


def test_an_entry_in_a_lane_that_nobody_walks_is_hidden(conn: Conn) -> None:
    conn.execute("INSERT INTO awa.jobs (queue, kind, lane) VALUES ('q', 'noop', 0), ('q', 'noop', 10)")
    assert [(found.what, found.count) for found in unreachable(conn)] == [("hidden", 2)]


def test_who_comes_second_waits_and_takes_the_first_ones_answer(conn: Conn, other: Conn, third: Conn) -> None:
    conn.execute(FOREIGN)
    with transaction(other):
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('awa.origin', 0))")
        second = Background(lambda: check_origin(conn, AWA))
        wait_for_lock(third, conn)
        other.execute(
            "UPDATE awa.origin SET system_identifier = (SELECT system_identifier FROM pg_control_system()),"
            " database_oid = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        recorded_at = scalar(other, "SELECT recorded_at FROM awa.origin")
        other.execute("COMMIT")
    second.result()
    assert scalar(conn, "SELECT recorded_at FROM awa.origin") == recorded_at


def test_a_plain_role_may_ask(conn: Conn) -> None:
    role = "awa_plain"
    conn.execute(f"CREATE ROLE {role}")
    try:
        conn.execute(f"GRANT USAGE ON SCHEMA awa TO {role}")
        conn.execute(f"GRANT SELECT ON awa.origin TO {role}")
        check_origin(conn, AWA)
        with transaction(conn):
            conn.execute(f"SET LOCAL ROLE {role}")
            here, recorded = read_origin(conn, AWA)
        assert here == recorded
    finally:
        conn.execute(f"DROP OWNED BY {role}")
        conn.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize("seed", range(4))
def test_what_this_server_wrote_is_always_in_reach(conn: Conn, open_connection: Callable[[], Conn], seed: int) -> None:
    """Late transactions, half-walked pages, retries and cancelled jobs: no false alarm, and all of them are claimed."""
    chance = random.Random(seed)
    runtime = register(conn)
    producers = [open_connection() for _ in range(3)]
    is_open = [False] * 3
    committed: set[int] = set()
    written: list[set[int]] = [set(), set(), set()]
    claimed: list[int] = []
    number = 0
    for _ in range(60):
        step = chance.randrange(6)
        i = chance.randrange(3)
        if step < 3:
            if not is_open[i]:
                producers[i].execute("BEGIN")
                is_open[i] = True
            number += 1
            insert(producers[i], number, priority=chance.randint(1, 4))
            written[i].add(number)
        elif step == 3 and is_open[i]:
            if chance.random() < 0.3:
                producers[i].execute("ROLLBACK")
            else:
                producers[i].execute("COMMIT")
                committed |= written[i]
            is_open[i] = False
            written[i] = set()
        elif step >= 4:
            found = claim(conn, runtime, limit=chance.randint(1, 4))
            again = [member for member in found.members if chance.random() < 0.2]
            rest = [member for member in found.members if member not in again]
            settle(conn, runtime, rest, [Outcome(member, "released") for member in again])
            claimed += [n for member, n in zip(found.members, found.numbers, strict=True) if member in rest]
        assert unreachable(conn) == []
    for i, producer in enumerate(producers):
        if is_open[i]:
            producer.execute("COMMIT")
            committed |= written[i]
    assert unreachable(conn) == []
    assert check_storage(conn, AWA).findings[1:] == []  # the first: a clone's origin is not recorded yet
    claimed += claim_in_steps(conn, runtime, limit=3)
    assert sorted(claimed) == sorted(committed)
