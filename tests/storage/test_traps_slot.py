"""Traps of the current slot: where it is not known, nothing is written, and nothing is guessed.

A guessed slot may be sealed and full. Each docstring names the guard and what was seen without it.
"""

from __future__ import annotations

import psycopg
import pytest
from psycopg import sql

from tests.storage.engine import Conn, insert, register, scalar, transaction

SLOTS = "SELECT slot, count(*) FROM awa.jobs GROUP BY slot ORDER BY slot"

REFUSED = (psycopg.errors.CheckViolation, psycopg.errors.NotNullViolation)
"""By the choice of the partition, or by the partition."""


def test_a_slot_that_was_never_set_is_refused(conn: Conn) -> None:
    """Guard: NOT NULL and no default partition; pg_sequence_last_value is NULL before the first use.

    With coalesce(…, 0) the jobs go to slot 0, whatever lies there: tried.
    """
    assert scalar(conn, "SELECT pg_sequence_last_value('awa.ring_seq')") == 0  # the migration has set it
    conn.execute("ALTER SEQUENCE awa.ring_seq RESTART")
    with pytest.raises(REFUSED, match="slot"):
        insert(conn, 1)
    copy = "COPY awa.jobs (kind) FROM STDIN"
    with pytest.raises(REFUSED, match="slot"), conn.cursor() as cursor, cursor.copy(copy) as rows:
        rows.write_row(["noop"])
    conn.execute("SELECT setval('awa.ring_seq', 3)")
    insert(conn, 1)
    assert conn.execute(SLOTS).fetchall() == [(3, 1)]


def test_a_producer_that_may_not_read_the_slot_is_refused(conn: Conn) -> None:
    """Guard: as before; on PostgreSQL 18 a role without USAGE reads NULL, on older ones it is told so."""
    role = sql.Identifier(f"producer_{register(conn)}_{scalar(conn, 'SELECT current_database()')}")
    conn.execute(sql.SQL("CREATE ROLE {}").format(role))
    try:
        conn.execute(sql.SQL("GRANT USAGE ON SCHEMA awa TO {}").format(role))
        conn.execute(sql.SQL("GRANT SELECT, INSERT ON awa.jobs TO {}").format(role))
        conn.execute(sql.SQL("GRANT USAGE ON SEQUENCE awa.entry_id_seq TO {}").format(role))
        conn.execute(sql.SQL("SET ROLE {}").format(role))
        with pytest.raises((*REFUSED, psycopg.errors.InsufficientPrivilege)):
            insert(conn, 1)
        conn.execute("RESET ROLE")
        assert conn.execute(SLOTS).fetchall() == []
        conn.execute(sql.SQL("GRANT USAGE ON SEQUENCE awa.ring_seq TO {}").format(role))
        conn.execute(sql.SQL("SET ROLE {}").format(role))
        insert(conn, 1)
        conn.execute("RESET ROLE")
        assert conn.execute(SLOTS).fetchall() == [(0, 1)]
    finally:
        conn.execute("RESET ROLE")
        conn.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(role))


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_producer_with_an_old_snapshot_writes_to_the_slot_of_now(conn: Conn, other: Conn, isolation: str) -> None:
    """Guard: the slot is a sequence; a row of a table would still name the slot that was sealed meanwhile."""
    with transaction(other, isolation):
        insert(other, 1)
        conn.execute("SELECT setval('awa.ring_seq', 5)")
        insert(other, 2)
        other.execute("COMMIT")
    assert conn.execute(SLOTS).fetchall() == [(0, 1), (5, 1)]
