"""What the database shows of other sessions, and waiting for it."""

from __future__ import annotations

from typing import Any

import psycopg

from tests.fixtures.db import wait_until

ADVISORY_LOCKS = """
    FROM pg_locks
    WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
"""The advisory locks held or wanted in this database."""


def wait_for_rows(conn: psycopg.Connection[Any], rest: str, *, count: int = 1) -> None:
    """Return once ``SELECT`` *rest* yields *count* rows; *conn* commits by itself."""
    wait_until(lambda: len(conn.execute(f"SELECT {rest}").fetchall()) == count, timeout=20.0)
