"""Making all checks, and telling of those that may not look or take too long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import Connection, errors

from awa.config import mask
from awa.doctor.checks import CHECKS
from awa.doctor.finding import Finding, worst
from awa.doctor.look import Look
from awa.errors import AwaError
from awa.storage.examine import OutOfTime
from awa.storage.grants import grants_command
from awa.storage.schema import Schema
from awa.wording import listed

CHECK_SECONDS = 2.0
"""What one question may take."""

TOTAL_SECONDS = 20.0
"""What all of them may take."""

LONG = 300.0
"""Seconds after which a transaction is long."""

MOST = 10
"""Findings of one check that are told one by one."""

BLOCKED = "SELECT pid, pg_blocking_pids(pid), query FROM pg_stat_activity WHERE wait_event_type = 'Lock';"


def examine(
    conn: Connection[Any],
    schema: Schema,
    *,
    listen_url: str = "",
    long: float = LONG,
    check_seconds: float = CHECK_SECONDS,
    total_seconds: float = TOTAL_SECONDS,
) -> list[Finding]:
    """Everything that :data:`CHECKS` find, in their order. Changes nothing.

    Args:
        conn: In autocommit mode, with no transaction open; of any role.
        listen_url: Where workers listen, if that is another address than the one of *conn*.
        long: Seconds after which a transaction is long.
        check_seconds: What one question to the database may take.
        total_seconds: What all of them may take.

    Raises:
        psycopg.OperationalError: The connection was lost.
    """
    look = Look(conn, schema, seconds=check_seconds, total=total_seconds, long=long, listen_url=listen_url)
    found: list[Finding] = []
    refused: dict[str, str] = {}
    has_schema = True
    for check in CHECKS:
        if check.needs_schema and not has_schema:
            continue
        told: list[Finding] = []  # what was found before something failed counts
        try:
            for one in check.find(look):
                told.append(one)
        except errors.InsufficientPrivilege as error:
            refused[check.name] = _said(error)
        except OutOfTime:
            text = f"not looked at: the checks before it took the {total_seconds:g} s that all of them have"
            told.append(Finding(check.name, "warning", text))
        except (errors.QueryCanceled, errors.LockNotAvailable):
            text = f"could not be looked at within {check_seconds:g} s: the server is busy, or somebody holds a lock"
            told.append(Finding(check.name, "warning", text, BLOCKED))
        except (psycopg.Error, AwaError) as error:
            if conn.closed:
                raise
            told.append(Finding(check.name, "warning", f"could not be looked at: {_said(error)}"))
        found += _shortened(told)
        if check.name == "schema":
            has_schema = all(one.facts.get("version") != 0 for one in found)
    return found + _refused(look, refused)


def _shortened(findings: list[Finding]) -> list[Finding]:
    """The first of them, and how many more there are: a fleet that is away leaves hundreds of queues to nobody."""
    more = len(findings) - MOST
    if more <= 0:
        return findings
    name, level = findings[0].name, worst(findings[MOST:])
    return [*findings[:MOST], Finding(name, level, f"and {more} more of the kind", facts={"more": more})]


def _refused(look: Look, refused: Mapping[str, str]) -> list[Finding]:
    if not refused:
        return []
    role = look.conn.info.user
    text = f"role {role} may not look at {listed(refused)} ({next(iter(refused.values()))})"
    return [
        Finding(
            "not_permitted", "warning", text, grants_command(look.schema, "reader", role), {"checks": list(refused)}
        )
    ]


def _said(error: Exception) -> str:
    said = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    return mask(" ".join((said or str(error) or type(error).__name__).split()))
