"""All checks, in the order in which they are made and shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from awa.doctor import old_rows, queues, ring, schema, server, settings, workers
from awa.doctor.finding import Finding
from awa.doctor.look import Look


@dataclass(frozen=True, slots=True)
class Check:
    """One of the checks."""

    section: str
    """Under which head its findings are shown."""
    name: str
    """The name of its findings."""
    find: Callable[[Look], Iterator[Finding]]
    """Finds at least one thing."""
    needs_schema: bool = True
    """Whether there is nothing to look at without awa's tables."""


CHECKS = (
    Check("schema", "schema", schema.check_schema, False),
    Check("schema", "grants", schema.check_grants),
    Check("schema", "origin", schema.check_origin),
    Check("schema", "partitions", schema.check_partitions),
    Check("schema", "sequences", schema.check_sequences),
    Check("schema", "ring", ring.check_ring),
    Check("server", "server", server.check_server, False),
    Check("server", "connections", server.check_connections, False),
    Check("server", "pooler", server.check_pooler, False),
    Check("server", "notify", server.check_notify, False),
    Check("server", "clock", server.check_clock, False),
    Check("settings", "durability", settings.check_durability, False),
    Check("settings", "timeouts", settings.check_timeouts, False),
    Check("settings", "tracking", settings.check_tracking, False),
    Check("old rows", "transactions", old_rows.check_transactions, False),
    Check("old rows", "prepared", old_rows.check_prepared, False),
    Check("old rows", "slots", old_rows.check_slots, False),
    Check("old rows", "dead_rows", old_rows.check_dead_rows),
    Check("old rows", "autovacuum", old_rows.check_autovacuum),
    Check("old rows", "wraparound", old_rows.check_wraparound, False),
    Check("workers", "workers", workers.check_workers),
    Check("workers", "leader", workers.check_leader),
    Check("workers", "runtimes", workers.check_runtimes),
    Check("workers", "health", workers.check_health),
    Check("workers", "versions", workers.check_versions),
    Check("workers", "drift", workers.check_drift),
    Check("queues", "paused", queues.check_paused),
    Check("queues", "unserved", queues.check_unserved),
    Check("queues", "kinds", queues.check_kinds),
    Check("queues", "overdue", queues.check_overdue),
    Check("queues", "unique", queues.check_unique),
)
"""In the order in which they are made and shown."""


def section_of(name: str) -> str:
    """Under which head the findings of a check are shown."""
    return next((check.section for check in CHECKS if check.name == name), "rights")
