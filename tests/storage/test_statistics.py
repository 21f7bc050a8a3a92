"""Statistics: every attempt is counted once, whoever gathers, and what is read is what there was.

Random histories are in ``model/gathering.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from awa.admin import Admin
from awa.errors import PermissionDenied
from awa.storage import ring, statistics
from awa.storage.migrate import load_migrations, migrate
from awa.storage.snapshot import one_snapshot
from awa.storage.statistics import Percentiles, Window
from awa.worker.maintenance.ring import Ring
from awa.worker.maintenance.statistics import Statistics
from tests.storage.engine import (
    AWA,
    Conn,
    Outcome,
    claim,
    complete,
    end_unclaimed,
    insert,
    register,
    scalar,
    settle,
    transaction,
)

WITHIN = 2 ** (1 / 8) - 1 + 1e-9
"""How far a time may be from the exact one, relatively."""

Open = Callable[[], Conn]


def gather(conn: Conn) -> None:
    for _ in Statistics(AWA).gather(conn):
        pass


def finish(steps: Generator[None, None, None]) -> None:
    for _ in steps:
        pass


def run(conn: Conn, runtime: int, jobs: int, *, queue: str = "q", kind: str = "noop", limit: int = 100) -> None:
    """Insert jobs and complete them, in claims of *limit*."""
    insert(conn, *range(jobs), queue=queue, kind=kind)
    while members := claim(conn, runtime, queue=queue, limit=limit).members:
        settle(conn, runtime, members)


def completed(admin: Admin, name: str = "q", by: statistics.Subject = "queue") -> int:
    """In the last hour."""
    [found] = admin.statistics(by, name=name)
    assert found.name == name
    return found.windows["1h"].completed


def test_every_way_to_end_counts_once_and_what_never_began_does_not(conn: Conn, other: Conn, admin: Admin) -> None:
    runtime = register(conn)
    insert(conn, *range(12), kind="a")
    insert(conn, *range(4), kind="b")
    end_unclaimed(conn, insert(conn, 99))
    members = claim(conn, runtime).members
    assert len(members) == 16
    gather(conn)
    assert (completed(admin), scalar(conn, "SELECT left_open FROM awa.statistics_claims")) == (0, 16)
    settle(conn, runtime, members[:2])
    gather(conn)
    outcomes = ("retried", "retried", "snoozed", "failed", "cancelled", "rescued", "released", "set_aside")
    with transaction(other):
        complete(other, members[2])
        gather(conn)
        assert completed(admin) == 2
        other.execute("COMMIT")
    settle(conn, runtime, [members[11]], [Outcome(m, o) for m, o in zip(members[3:], outcomes, strict=False)])
    settle(conn, runtime, members[12:])
    for _ in range(2):
        gather(conn)
    expected = {"started": 14, "completed": 8, "retried": 2, "snoozed": 1, "failed": 1, "cancelled": 1, "rescued": 1}
    [found] = admin.statistics()
    for window in found.windows.values():
        assert {name: getattr(window, name) for name in expected} == expected
        assert not window.is_sampled
        assert window.run_ms == Percentiles(1.0, 1.0, 1.0, 1.0)
        assert window.wait_ms is not None
        assert 0 < window.wait_ms.p50 <= window.wait_ms.p99 <= window.wait_ms.max
    assert [(one.name, one.windows["15m"].completed) for one in admin.statistics("kind")] == [("a", 4), ("b", 4)]
    assert scalar(conn, "SELECT left_open FROM awa.statistics_claims") == 1  # the last of a is open
    settle(conn, runtime, [members[10], members[9]] if False else [m for m in members if m.idx == 12])
    gather(conn)
    assert conn.execute("SELECT FROM awa.statistics_claims").fetchall() == []
