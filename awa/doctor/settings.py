"""Checks of settings: of the server, and as roles and the database say them for their own sessions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from awa.doctor.finding import Finding, Level
from awa.doctor.look import Look
from awa.storage import examine as sql
from awa.storage.grants import sql_identifier

Rule = Callable[[str], "tuple[Level, str] | None"]
"""What is wrong with a value of a setting."""


def _must_be(wanted: str, level: Level, why: str) -> Rule:
    return lambda value: None if _is_on(value) == _is_on(wanted) else (level, why)


def _is_on(value: str) -> bool:
    return value.lower() not in ("off", "false", "no", "0", "f", "n")


def _no_shorter_than(seconds: float, why: str) -> Rule:
    def judge(value: str) -> tuple[Level, str] | None:
        given = _milliseconds(value)
        return ("warning", why) if 0 < given < 1000 * seconds else None

    return judge


def _no_longer_than(milliseconds: float, why: str) -> Rule:
    return lambda value: ("warning", why) if _milliseconds(value) > milliseconds else None


_UNITS = {"us": 0.001, "": 1.0, "ms": 1.0, "s": 1e3, "min": 60e3, "h": 3600e3, "d": 86_400e3}


def _milliseconds(value: str) -> float:
    found = re.fullmatch(r"\s*'?(-?[0-9.]+)\s*([a-z]*)'?\s*", value)
    return float(found[1]) * _UNITS.get(found[2], 1.0) if found else 0.0


DURABILITY: Mapping[str, Rule] = {
    "fsync": _must_be("on", "error", "a crash of the machine can destroy the database"),
    "full_page_writes": _must_be("on", "error", "a crash of the machine can destroy the database"),
    "synchronous_commit": _must_be(
        "on", "warning", "a crash of the server forgets the last jobs that were inserted, and runs again what has ended"
    ),
}

TIMEOUTS: Mapping[str, Rule] = {
    "statement_timeout": _no_shorter_than(10, "maintenance and claims of a busy database may be broken off"),
    "lock_timeout": _no_shorter_than(1, "inserts that wait for an equal job's transaction are broken off"),
    "idle_in_transaction_session_timeout": _no_shorter_than(
        60, "a handler's job.transaction() is ended while it computes"
    ),
    "idle_session_timeout": _no_shorter_than(60, "connections of idle workers and clients are ended"),
    "transaction_timeout": _no_shorter_than(60, "a handler's job.transaction() is ended while it runs"),
}

TRACKING: Mapping[str, Rule] = {
    "track_activities": _must_be("on", "warning", "connections of frozen workers are not recognised, and not ended"),
    "track_counts": _must_be("on", "error", "autovacuum does not know what to do, and tables and indexes grow"),
}

AUTOVACUUM: Mapping[str, Rule] = {
    "autovacuum": _must_be("on", "error", "tables of waiting jobs and unique keys grow, and claims slow down"),
    "autovacuum_vacuum_cost_delay": _no_longer_than(20, "autovacuum sleeps longer than it works, and falls behind"),
    "autovacuum_naptime": _no_longer_than(600_000, "autovacuum looks too rarely, and dead rows pile up"),
}


def check_settings(name: str, rules: Mapping[str, Rule], well: str) -> Callable[[Look], Iterator[Finding]]:
    """A check of some settings: of the server, and as roles and the database say them for their own sessions."""

    def check(look: Look) -> Iterator[Finding]:
        is_well = True
        for setting, place, value, mend in _values(look, rules):
            judged = rules[setting](value)
            if judged is not None:
                is_well = False
                facts = {"setting": setting, "value": value, "where": place}
                yield Finding(name, judged[0], f"{setting} is {value} {place}: {judged[1]}", mend, facts)
        if is_well:
            yield Finding(name, "ok", well)

    return check


def _values(look: Look, rules: Mapping[str, Rule]) -> Iterator[tuple[str, str, str, str]]:
    """Setting, where it is said, its value, and what takes it back."""
    for row in look.rows(sql.SETTINGS, is_bare=True, names=list(rules)):
        if row.source in ("database", "user", "database user"):
            continue  # told below
        plain = f"'{row.boot_val}'"
        match row.source:
            case "client" | "environment variable":
                place, mend = (
                    "for this connection",
                    f"unset PGOPTIONS  # or take {row.name} out of the address's options",
                )
            case "command line":
                place, mend = "on the server's command line", f"restart the server without -c {row.name}"
            case _:
                place, mend = "for the server", f"ALTER SYSTEM SET {row.name} = {plain}; SELECT pg_reload_conf();"
        yield row.name, place, row.value, mend
    for row in look.rows(sql.ROLE_SETTINGS, names=list(rules)):
        if row.role is not None:
            within = "" if row.database is None else f" IN DATABASE {sql_identifier(row.database)}"
            place = f"for role {row.role}" + ("" if row.database is None else f" in database {row.database}")
            mend = f"ALTER ROLE {sql_identifier(row.role)}{within} RESET {row.name};"
        elif row.database is not None:
            place, mend = (
                f"for database {row.database}",
                f"ALTER DATABASE {sql_identifier(row.database)} RESET {row.name};",
            )
        else:
            place, mend = "for all roles", f"ALTER ROLE ALL RESET {row.name};"
        yield row.name, place, row.value, mend


check_durability = check_settings("durability", DURABILITY, "what was committed is on disk")
check_timeouts = check_settings("timeouts", TIMEOUTS, "no time-out is too short for awa")
check_tracking = check_settings("tracking", TRACKING, "the server tells what its sessions do")
check_autovacuum = check_settings("autovacuum", AUTOVACUUM, "autovacuum is on, and fast enough")
