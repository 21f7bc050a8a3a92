"""What is wrong with an installation, and what mends it.

Each check asks the database something that costs little however much is stored, says what it found in one sentence with
the values, and names the command or the SQL that mends it. A check that may not look, or that takes too long, is told
as that; only a database that does not answer ends an examination.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import psycopg
from psycopg import Connection, errors

from awa.config import mask
from awa.errors import AwaError, ConfigError
from awa.storage import examine as sql
from awa.storage.check import PARTITIONS
from awa.storage.examine import COUNTED, LISTED, OutOfTime, Probe
from awa.storage.grants import find_rights, grants_command, show_missing, sql_identifier, sql_literal
from awa.storage.migrate import OLDEST_SUPPORTED, latest_version, status
from awa.storage.pooler import is_pooled
from awa.storage.queues import COUNT_AVAILABLE, LIST_QUEUES
from awa.storage.ring import Segment, list_queues, list_segments
from awa.storage.schema import Schema
from awa.storage.status import RUNNING, TRANSACTIONS
from awa.storage.trust import read_origin, rebase_command
from awa.version import VERSION
from awa.wording import age, listed

Level = Literal["ok", "warning", "error"]

CHECK_SECONDS = 2.0
"""What one question may take."""

TOTAL_SECONDS = 20.0
"""What all of them may take."""

LONG = 300.0
"""Seconds after which a transaction is long."""

MOST = 10
"""Findings of one check that are told one by one."""

BLOCKED = "SELECT pid, pg_blocking_pids(pid), query FROM pg_stat_activity WHERE wait_event_type = 'Lock';"

OLDEST_SERVER = 140_000


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    name: str
    """The check."""
    level: Level
    """``ok``; ``warning``: jobs run, but not as they should, or not for long; ``error``: some do not run, or may be
    lost."""
    text: str
    """One sentence, with the values."""
    mend: str | None = None
    """The command for a shell, or the SQL, that mends it; None: nothing is to be done."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The values by name, as JSON knows them."""


class Look(Probe):
    """What the checks share."""

    def __init__(
        self,
        conn: Connection[Any],
        schema: Schema,
        *,
        seconds: float,
        total: float,
        long: float,
        listen_url: str,
    ) -> None:
        super().__init__(conn, schema, seconds=seconds, total=total)
        self.long = long
        self.listen_url = listen_url

    def awa(self, command: str) -> str:
        """A command of ``awa`` for this schema."""
        return self.schema.command(command)

    @property
    def worker(self) -> str:
        """What starts a worker for it."""
        return f"python -m awa.worker MODULE{self.schema.option}"

    @cached_property
    def server(self) -> Any:
        return self.row(sql.SERVER)

    @cached_property
    def runtimes(self) -> list[Any]:
        """Those that have not ended."""
        return self.rows(sql.RUNTIMES)

    @property
    def live(self) -> list[Any]:
        return [one for one in self.runtimes if one.is_live]

    @property
    def served(self) -> set[str]:
        """Queues of which a live runtime claims."""
        return {queue for one in self.live if not one.is_quiet for queue in one.queues}

    @cached_property
    def paused(self) -> list[Any]:
        return self.rows(sql.PAUSED)

    def backlog(self, queues: Iterable[str]) -> dict[str, int]:
        """How many available jobs each of *queues* has, up to one more than are counted; without those that have none.

        It ends when a hundred were found. What is set aside for a kind has a check of its own.
        """
        names, found = list(queues), dict[str, int]()
        while names and len(found) < LISTED:
            rows = self.rows(COUNT_AVAILABLE, queues=names[:LISTED], limit=COUNTED + 1)
            found |= {row[0]: row[2] for row in rows if row[2]}
            names = names[LISTED:]
        return found


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


def worst(findings: Iterable[Finding]) -> Level:
    """The level of the worst of them."""
    levels = {finding.level for finding in findings}
    return "error" if "error" in levels else "warning" if "warning" in levels else "ok"


def section_of(name: str) -> str:
    """Under which head the findings of a check are shown."""
    return next((check.section for check in CHECKS if check.name == name), "rights")


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


def _jobs(count: int) -> str:
    return f"{COUNTED:,} jobs or more" if count > COUNTED else f"{count:,} job{'s' if count > 1 else ''}"


def _end_backend(pid: int) -> str:
    return f"SELECT pg_terminate_backend({pid});"


# --- the schema


def _schema(look: Look) -> Iterator[Finding]:
    with look.transaction() as conn:
        try:
            found = status(conn, look.schema)
        except ConfigError as error:
            yield Finding("schema", "error", str(error), facts={"version": 0})
            return
    name, mend = look.schema.name, look.awa("migrate")
    span = "" if latest_version() == OLDEST_SUPPORTED else f" to {latest_version()}"
    text = f"schema {name} is at version {found.current}; awa {VERSION} works with {OLDEST_SUPPORTED}{span}"
    facts = {"version": found.current, "oldest": found.oldest_supported, "latest": found.latest, "awa": VERSION}
    if not found.current:
        text = f"there is no schema {name} in this database; awa {VERSION} works with version {OLDEST_SUPPORTED}{span}"
        yield Finding("schema", "error", text, mend, facts)
    elif found.current > found.latest:
        yield Finding("schema", "error", f"{text}: this awa is too old", "pip install --upgrade awa-queue", facts)
    elif found.changed:
        text += f", and {listed(one.file_name for one in found.changed)} was applied with another content"
        yield Finding("schema", "error", text, "pip install --force-reinstall awa-queue", facts)
    elif found.pending:
        is_old = found.current < found.oldest_supported
        text += f": {len(found.pending)} migrations are pending" + (", and this awa does not work" if is_old else "")
        yield Finding("schema", "error" if is_old else "warning", text, mend, facts)
    else:
        yield Finding("schema", "ok", text, facts=facts)


def _grants(look: Look) -> Iterator[Finding]:
    with look.transaction() as conn:
        part, missing = find_rights(conn, look.schema)
    role = look.conn.info.user
    facts = {"role": role, "part": part, "missing": [" ".join(one) for one in missing]}
    if part is None:
        text = f"role {role} has no rights in schema {look.schema.name}"
        yield Finding("grants", "error", text, grants_command(look.schema, "worker", role), facts)
    elif missing:
        assert part != "owner"
        text = f"role {role} has most rights of a {part} and lacks {show_missing(missing)}"
        level: Level = "warning" if part == "reader" else "error"
        yield Finding("grants", level, text, grants_command(look.schema, part, role), facts)
    else:
        may = "owns the schema" if part == "owner" else f"has all rights of a {part}"
        yield Finding("grants", "ok", f"role {role} {may}", facts=facts)


def _origin(look: Look) -> Iterator[Finding]:
    with look.transaction() as conn:
        here, recorded = read_origin(conn, look.schema)
    facts = {"here": str(here), "recorded": None if recorded is None else str(recorded)}
    if recorded is None:
        yield Finding("origin", "ok", f"this is {here}; no worker has started yet, and noted it", facts=facts)
    elif recorded != here:
        text = (
            f"the rows were made in {recorded}, and this is {here}: the next worker that starts looks closely, and"
            " refuses when it would miss jobs"
        )
        mend = f"{look.worker}  # or, when it refuses, `{rebase_command(look.schema)}`"
        yield Finding("origin", "warning", text, mend, facts)
    else:
        yield Finding("origin", "ok", f"the rows are this server's own ({here})", facts=facts)


def _partitions(look: Look) -> Iterator[Finding]:
    odd = [(row.name, row.state) for row in look.rows(PARTITIONS)]
    for name, state in odd:
        table = look.schema.sql(f"awa.{name}")
        mend = f"ALTER TABLE {table} SET (autovacuum_enabled = off, toast.autovacuum_enabled = off);"
        facts = {"table": name, "state": state}
        if state == "vacuumed":
            text = f"autovacuum may come to {table}, and keeps its segment from being emptied meanwhile"
            yield Finding("partitions", "warning", text, mend, facts)
        else:
            text = f"table {table} is {state}: jobs of its segment are neither found nor inserted"
            yield Finding("partitions", "error", text, look.awa("storage check"), facts)
    if not odd:
        yield Finding("partitions", "ok", "the tables of all eight slots are there and left alone by autovacuum")


def _sequences(look: Look) -> Iterator[Finding]:
    for row in look.rows(sql.SEQUENCES):
        part = row.last / row.most
        if part > 0.5:
            name = look.schema.sql(f"awa.{row.name}")
            text = (
                f"{name} has given out {row.last:,} of {row.most:,} numbers: when there is none left, nothing goes on"
            )
            mend = f"SELECT setval('{name}', N);  -- N: the largest number in use"
            facts = {"sequence": row.name, "last": row.last, "most": row.most}
            yield Finding("sequences", "error" if part > 0.9 else "warning", text, mend, facts)
            return
    yield Finding("sequences", "ok", "ids are far from the end of their numbers")


def _ring(look: Look) -> Iterator[Finding]:
    with look.transaction() as conn:
        segments = list_segments(conn, look.schema)
    current = next((one for one in segments if one.is_current), None)
    if current is None or len(segments) < 8:
        text = f"no slot of the ring is current, or slots are missing ({len(segments)} of 8): nothing can be inserted"
        yield Finding("ring", "error", text, rebase_command(look.schema), {"slots": len(segments)})
        return
    sealed = sorted(
        (one for one in segments if not one.is_current and not one.is_empty), key=lambda one: -one.sealed_for
    )
    empty = 7 - len(sealed)
    facts: dict[str, Any] = {
        "empty": empty,
        "current": current.slot,
        "size_bytes": sum(one.size_bytes for one in segments),
        "oldest": sealed[0].slot if sealed else None,
    }
    open_for = age(current.open_for.total_seconds())
    text = f"{empty} of 8 slots are empty; slot {current.slot} is current, for {open_for}"
    if not sealed:
        yield Finding("ring", "ok", text, facts=facts)
        return
    oldest = sealed[0]
    pin, mend = _pin_of(look, oldest)
    text += f"; the oldest, slot {oldest.slot}, was sealed {age(oldest.sealed_for.total_seconds())} ago and is kept by "
    text += pin or "the retention of completed jobs, or until the leader comes to it"
    # without a pin it may be full for a moment, until the retention is over
    turns = [one.sealed_at - one.opened_at for one in sealed if one.sealed_at and one.opened_at]
    is_overdue = bool(pin) or current.open_for > max(turns, default=current.open_for)
    if empty == 0 and is_overdue:
        text += "; nothing breaks, the current segment grows"
        yield Finding("ring", "warning", text, mend or look.awa("storage status"), facts | {"pin": pin})
    else:
        yield Finding("ring", "ok", text, facts=facts | {"pin": pin})


def _pin_of(look: Look, segment: Segment) -> tuple[str, str | None]:
    """What keeps a sealed segment, and what lets it go; empty: nothing that can be seen."""
    slot = segment.slot
    for row in look.rows(TRANSACTIONS):
        if row[0] == slot:
            return f"a transaction of {age(row[2])}, process {row[1]}", _end_backend(int(row[1]))
    for row in look.rows(RUNNING):
        if row[0] == slot:
            return f"{_jobs(row[2])} running at runtime {row[1]}", look.awa("job list state:running")
    with look.transaction() as conn:
        queues = list_queues(conn, look.schema, slot)
    for row in look.rows(sql.available_in_slot(slot), queues=queues[:COUNTED], limit=COUNTED + 1):
        if row[2]:
            return f"{_jobs(row[2])} available in queue {row[0]}", _have_run(look, row[0])
    return "", None


def _have_run(look: Look, queue: str) -> str:
    """What gets the jobs of a queue to run."""
    if any(one.queue == queue for one in look.paused):
        return look.awa(f"queue resume {shlex.quote(queue)}")
    return f"{look.worker} --queue {shlex.quote(queue)}" if queue not in look.served else look.awa("storage status")


# --- the server and the way to it


def _server(look: Look) -> Iterator[Finding]:
    found = look.server
    facts = {"version": found.version, "database": found.database, "role": found.role}
    text = f"PostgreSQL {found.version}, database {found.database}, as role {found.role}"
    if found.number < OLDEST_SERVER:
        yield Finding("server", "error", f"{text}: awa needs PostgreSQL 14 or later", "pg_upgrade", facts)
    elif found.is_standby:
        text += " is a standby: nothing can be inserted or claimed here; name the primary, or promote this one"
        yield Finding("server", "error", text, "SELECT pg_promote();", facts)
    elif found.is_read_only:
        text += ": transactions are read-only by default, so no worker starts"
        yield Finding("server", "error", text, "ALTER SYSTEM SET default_transaction_read_only = off;", facts)
    else:
        yield Finding("server", "ok", text, facts=facts)


def _pooler(look: Look) -> Iterator[Finding]:
    pooled = is_pooled(look.conn)
    facts = {"is_pooled": pooled, "has_listen_url": bool(look.listen_url)}
    if pooled and not look.listen_url:
        text = (
            "a connection pooler is in between, where nobody can be woken: idle workers look for work every"
            " poll_interval; AWA_POOLER=off says that it keeps a session for each client"
        )
        mend = "export AWA_LISTEN_URL=postgresql://USER@HOST:5432/DATABASE"
        yield Finding("pooler", "warning", text, mend, facts)
    elif pooled:
        yield Finding("pooler", "ok", "a connection pooler is in between, and listen_url leads past it", facts=facts)
    else:
        yield Finding("pooler", "ok", "no connection pooler is in between", facts=facts)


def _notify(look: Look) -> Iterator[Finding]:
    usage = look.row(sql.QUEUE_USAGE).used
    if usage > 0.5:
        text = f"{usage:.0%} of the server's queue of notifications is in use: when it is full, no insert that notifies"
        text += " commits; a session that listens is in a long transaction"
        mend = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
            " ORDER BY xact_start LIMIT 1;"
        )
        yield Finding("notify", "error" if usage > 0.9 else "warning", text, mend, {"queue_usage": usage})
    if is_pooled(look.conn) and not look.listen_url:
        yield Finding("notify", "ok", "not tried: through a connection pooler nobody can listen")
        return
    listener = (
        psycopg.connect(look.listen_url, autocommit=True) if look.listen_url else sql.second_connection(look.conn)
    )
    with listener:
        took = sql.round_trip(look.conn, listener, f"awa_doctor_{os.urandom(8).hex()}", seconds=look.seconds)
    if took is None:
        text = "a NOTIFY was not heard: idle workers find jobs only by looking, every poll_interval"
        mend = "export AWA_LISTEN_URL=postgresql://USER@HOST:5432/DATABASE"
        yield Finding("notify", "warning", text, mend, {"seconds": None, "queue_usage": usage})
    else:
        text = f"a NOTIFY was heard after {1000 * took:.1f} ms; {usage:.0%} of the queue of notifications is in use"
        yield Finding("notify", "ok", text, facts={"seconds": took, "queue_usage": usage})


CLOCK_APART = 5.0
"""Seconds by which two clocks may differ."""


def _clock(look: Look) -> Iterator[Finding]:
    with look.transaction() as conn:
        here, began = time.time(), time.monotonic()
        row = conn.execute(sql.NOW).fetchone()
        took = time.monotonic() - began
    assert row is not None
    ahead = row[0] - (here + took / 2)
    facts = {"database_ahead_seconds": ahead, "round_trip_seconds": took}
    if abs(ahead) > CLOCK_APART + took / 2:
        which = "ahead of" if ahead > 0 else "behind"
        text = (
            f"the database's clock is {age(abs(ahead))} {which} this machine's: awa goes by the database's, so a"
            " run_at that is made from this one comes too early or too late"
        )
        yield Finding("clock", "warning", text, "timedatectl set-ntp true", facts)
    else:
        text = f"the database's clock agrees with this machine's; a round trip takes {1000 * took:.1f} ms"
        yield Finding("clock", "ok", text, facts=facts)


def _connections(look: Look) -> Iterator[Finding]:
    found = look.row(sql.CONNECTIONS)
    limits = [("of the server (max_connections)", found.used, found.most, "ALTER SYSTEM SET max_connections = {};")]
    if found.datconnlimit > 0:
        database = sql_identifier(look.server.database)
        alter = f"ALTER DATABASE {database} CONNECTION LIMIT {{}};"
        limits.append(("of the database", found.used_here, found.datconnlimit, alter))
    if found.rolconnlimit > 0:
        alter = f"ALTER ROLE {sql_identifier(look.server.role)} CONNECTION LIMIT {{}};"
        limits.append((f"of role {look.server.role}", found.used_by_role, found.rolconnlimit, alter))
    what, used, most, alter = max(limits, key=lambda limit: limit[1] / limit[2])
    text = f"{used} of the {most} connections {what} are in use"
    facts = {"used": used, "most": most}
    if used > 0.8 * most:
        text += ": a worker process takes four beside those of its handlers; lower threads and pool_size, or allow more"
        yield Finding("connections", "error" if used >= most - 1 else "warning", text, alter.format(2 * most), facts)
    else:
        yield Finding("connections", "ok", text, facts=facts)


# --- settings

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


def _settings(name: str, rules: Mapping[str, Rule], well: str) -> Callable[[Look], Iterator[Finding]]:
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


# --- what holds old rows


HORIZON = 10_000_000
"""Transactions that a snapshot may be behind when nobody may see since when it is there."""

SLOT_WAL_BYTES = 10 * 2**30
"""WAL that an unused replication slot may keep."""


def _transactions(look: Look) -> Iterator[Finding]:
    found = look.rows(sql.TRANSACTIONS, seconds=look.long, behind=HORIZON)
    for row in found:
        facts = {"pid": row.pid, "role": row.role, "application": row.application, "seconds": row.seconds}
        if row.is_standby:
            text = (
                f"a standby ({row.application}) holds a snapshot that is {row.behind or 0:,} transactions old, by"
                " hot_standby_feedback: dead rows stay, and claims slow down; end the long queries there"
            )
            mend = "ALTER SYSTEM SET hot_standby_feedback = off; SELECT pg_reload_conf();  -- on the standby"
            yield Finding("transactions", "warning", text, mend, facts)
            continue
        since = f"{age(row.seconds)} old" if row.seconds is not None else f"{row.behind:,} transactions behind"
        who = f"process {row.pid} of role {row.role}" + (f", {row.application}" if row.application else "")
        text = (
            f"a transaction in database {row.database} is {since} ({who}, {row.state or 'state hidden'}): no dead row"
            " goes, and segments that it has touched are not emptied"
        )
        yield Finding("transactions", "warning", text, _end_backend(row.pid), facts)
    hidden = look.row(sql.HIDDEN).sessions
    if hidden:
        role = sql_identifier(look.server.role)
        text = f"{hidden} sessions of other roles do not show since when their transactions are open"
        yield Finding("transactions", "ok", text, f"GRANT pg_read_all_stats TO {role};", {"hidden": hidden})
    elif not found:
        yield Finding("transactions", "ok", f"no transaction is older than {age(look.long)}")


def _prepared(look: Look) -> Iterator[Finding]:
    found = look.rows(sql.PREPARED, seconds=look.long)
    for row in found:
        text = (
            f"transaction {row.gid!r} of role {row.role} in database {row.database} was prepared {age(row.seconds)}"
            " ago and neither committed nor rolled back: it holds its locks, dead rows and segments"
        )
        mend = f"ROLLBACK PREPARED {sql_literal(row.gid)};"
        if not row.is_here:
            mend += f"  -- in database {row.database}"
        yield Finding("prepared", "warning", text, mend, {"gid": row.gid, "seconds": row.seconds})
    if not found:
        yield Finding("prepared", "ok", "no prepared transaction was left behind")


def _slots(look: Look) -> Iterator[Finding]:
    bad = False
    for row in look.rows(sql.SLOTS):
        holds = (row.behind or 0) > HORIZON or (row.holds_rows and not row.is_active)
        keeps = not row.is_active and (row.wal_bytes or 0) > SLOT_WAL_BYTES
        if holds or keeps:
            bad = True
            what = "is used" if row.is_active else "is used by nobody"
            text = (
                f"replication slot {row.name} {what} and keeps dead rows of the last {row.behind or 0:,} transactions,"
                f" and {(row.wal_bytes or 0) / 2**20:,.0f} MB of WAL"
            )
            facts = {"slot": row.name, "is_active": row.is_active, "behind": row.behind, "wal_bytes": row.wal_bytes}
            yield Finding("slots", "warning", text, f"SELECT pg_drop_replication_slot({sql_literal(row.name)});", facts)
    if not bad:
        yield Finding("slots", "ok", "no replication slot holds old rows")


DEAD_ROWS = 10_000
"""Dead rows that a table may have, besides as many as are alive."""


def _dead_rows(look: Look) -> Iterator[Finding]:
    rows = look.rows(sql.DEAD_ROWS)
    bad = [row for row in rows if row.dead > DEAD_ROWS and row.dead > row.live]
    for row in bad:
        table = look.schema.sql(f"awa.{row.table}")
        since = "never" if row.vacuumed_at is None else f"last {row.vacuumed_at:%Y-%m-%d %H:%M:%S %Z}"
        text = f"{table} has about {row.dead:,} dead rows beside {row.live:,}, and was vacuumed {since}"
        yield Finding("dead_rows", "warning", text, f"VACUUM {table};", {"table": row.table, "dead": row.dead})
    if not bad:
        most = max((row.dead for row in rows), default=0)
        yield Finding("dead_rows", "ok", f"no table has many dead rows; the most are about {most:,}")


def _autovacuum(look: Look) -> Iterator[Finding]:
    found = list(_settings("autovacuum", AUTOVACUUM, "autovacuum is on, and fast enough")(look))
    for row in look.rows(sql.NOT_VACUUMED):
        table = look.schema.sql(f"awa.{row.table}")
        text = f"autovacuum is turned off for {table}, which grows with every change"
        mend = f"ALTER TABLE {table} RESET (autovacuum_enabled);"
        found = [one for one in found if one.level != "ok"]
        found.append(Finding("autovacuum", "error", text, mend, {"table": row.table}))
    yield from found


def _wraparound(look: Look) -> Iterator[Finding]:
    row = look.row(sql.AGES)
    oldest = max(row.xids, row.multixacts)
    facts = {"database": row.database, "xids": row.xids, "multixacts": row.multixacts}
    text = (
        f"database {row.database} has unfrozen rows {oldest:,} transactions old, of the 2.1 billion that there can be"
    )
    if oldest > max(2 * row.most, 500_000_000):
        text += ": autovacuum does not get there; look for what holds old rows, above"
        mend = f"vacuumdb --freeze --dbname {shlex.quote(row.database)}"
        yield Finding("wraparound", "error" if oldest > 1_500_000_000 else "warning", text, mend, facts)
    else:
        yield Finding("wraparound", "ok", text, facts=facts)


# --- workers


def _place(row: Any) -> str:
    return f"runtime {row.id} (process {row.pid} on {row.hostname})"


def _workers(look: Look) -> Iterator[Finding]:
    live = look.live
    quiet = [row for row in live if row.is_quiet]
    facts = {"live": len(live), "quiet": len(quiet), "queues": sorted(look.served)}
    if not live:
        yield Finding("workers", "warning", "no worker lives: no job runs", look.worker, facts)
    elif len(quiet) == len(live):
        text = f"all {len(live)} live workers were asked to claim nothing more"
        yield Finding("workers", "warning", text, look.awa(f"runtime resume {quiet[0].id}"), facts)
    else:
        asked = f", {len(quiet)} of them quiet" if quiet else ""
        text = f"{len(live)} live worker{'s' if len(live) > 1 else ''}{asked}, for {listed(sorted(look.served))}"
        yield Finding("workers", "ok", text, facts=facts)


LEADERLESS = 30.0
"""Seconds without a leader after which one should have been found: heartbeats of up to 15 s."""


def _leader(look: Look) -> Iterator[Finding]:
    rows = look.rows(sql.LEADER, name="maintenance")
    row = rows[0] if rows else None
    if row is not None and row.left > 0:
        text = f"runtime {row.runtime} leads, for {age(row.held)}"
        yield Finding("leader", "ok", text, facts={"runtime": row.runtime, "held_seconds": row.held})
        return
    live = look.live
    oldest = max((one.age for one in live), default=0.0)
    seconds = None if row is None else -row.left
    since = "nobody has ever led" if seconds is None else f"nobody has led for {age(seconds)}"
    waits = "nothing that waits for a time becomes available, nothing is rescued, no segment is emptied"
    facts = {"runtime": None, "leaderless_seconds": seconds, "live": len(live)}
    least = max([LEADERLESS, *(4 * one.heartbeat for one in live)])
    if not live:
        yield Finding("leader", "warning", f"{since}, and no worker lives: {waits}", look.worker, facts)
    elif min(oldest if seconds is None else seconds, oldest) > least:
        text = f"{since}, though {len(live)} runtimes live: {waits}; their logs say why maintenance fails"
        yield Finding("leader", "error", text, f"{look.worker}  # restart {listed(map(_place, live), 2)}", facts)
    else:
        yield Finding("leader", "ok", f"{since}; the next one leads in a moment", facts=facts)


def _runtimes(look: Look) -> Iterator[Finding]:
    silent = [row for row in look.runtimes if not row.is_live]
    for row in silent:
        facts = {"runtime": row.id, "hostname": row.hostname, "pid": row.pid, "silent_seconds": row.silent}
        if row.gone is None:
            text = (
                f"{_place(row)} has been silent for {age(row.silent)} and has not left: its jobs count as running"
                " until a leader takes them back"
            )
        elif row.gone < 60.0:
            continue  # its rescue is under way
        else:
            text = (
                f"{_place(row)} was taken for dead {age(row.gone)} ago, and not all that it had is taken back: open"
                " transactions may hold some, or nobody leads"
            )
        yield Finding("runtimes", "warning", text, f"{look.worker}  # one that leads takes them back", facts)
    if not silent:
        yield Finding("runtimes", "ok", "no runtime is silent")


def _health(look: Look) -> Iterator[Finding]:
    is_well = True
    for row in look.live:
        told = row.health if isinstance(row.health, dict) else {}
        unhealthy, unready = (told.get(what) or [] for what in ("unhealthy", "unready"))
        if unhealthy:
            text = f"{_place(row)} says that it is unhealthy: {listed(unhealthy)}"
            facts = {"runtime": row.id, "unhealthy": unhealthy}
            yield Finding("health", "error", text, f"kill {row.pid}  # on {row.hostname}, and start it anew", facts)
        elif unready:
            text = f"{_place(row)} says that it is not ready: {listed(unready)}"
            facts = {"runtime": row.id, "unready": unready}
            yield Finding("health", "warning", text, "awa health --ready --addr HOST:PORT", facts)
        is_well = is_well and not unhealthy and not unready
    if is_well:
        yield Finding("health", "ok", "no live worker complains; `awa health` asks one by itself")


def _versions(look: Look) -> Iterator[Finding]:
    by_version: dict[str, list[int]] = {}
    for row in look.live:
        by_version.setdefault(row.version, []).append(row.id)
    shown = "; ".join(f"{version}: runtimes {listed(ids)}" for version, ids in sorted(by_version.items()))
    facts = {"versions": by_version, "awa": VERSION}
    if len(by_version) > 1:
        text = f"workers of several versions of awa live ({shown}), as during a deployment"
        yield Finding("versions", "warning", text, "pip install --upgrade awa-queue  # then restart the others", facts)
    elif by_version and VERSION not in by_version:
        yield Finding("versions", "ok", f"all workers run awa {next(iter(by_version))}; this is {VERSION}", facts=facts)
    else:
        yield Finding("versions", "ok", f"this is awa {VERSION}, and no worker runs another one", facts=facts)


def _drift(look: Look) -> Iterator[Finding]:
    found = look.rows(sql.DRIFT, listed=LISTED)
    for row in found:
        others = row.others or []
        text = (
            f"{row.what} {row.name} is described in {row.versions} ways by live workers"
            if row.versions > 1
            else f"{row.what} {row.name} is described otherwise by live workers than in the catalogue"
        )
        if others:
            who, verb = ("runtime", "differs") if len(others) == 1 else ("runtimes", "differ")
            text += f": {who} {listed(others)} {verb} from what is stored"
        command = f"{'queue' if row.what == 'queue' else 'kind'} show {shlex.quote(row.name)}"
        mend = f"{look.worker}  # restart the runtimes of old code; `{look.awa(command)}` shows what differs"
        yield Finding("drift", "warning", text, mend, {row.what: row.name, "runtimes": others})
    if not found:
        yield Finding("drift", "ok", "live workers agree on what they say of queues and kinds")


# --- queues


def _paused(look: Look) -> Iterator[Finding]:
    backlog = look.backlog(row.queue for row in look.paused)
    for row in look.paused:
        if row.queue in backlog:
            by = f" by {row.by}" if row.by else ""
            why = f" ({row.reason})" if row.reason else ""
            text = f"queue {row.queue} was paused {age(row.seconds)} ago{by}{why}, and has {_jobs(backlog[row.queue])}"
            mend = look.awa(f"queue resume {shlex.quote(row.queue)}")
            facts = {"queue": row.queue, "paused_by": row.by, "reason": row.reason, "available": backlog[row.queue]}
            yield Finding("paused", "warning", f"{text} available", mend, facts)
    if not backlog:
        idle = f"; {len(look.paused)} are, and have no job available" if look.paused else ""
        yield Finding("paused", "ok", f"no queue is paused that has jobs{idle}")


def _unserved(look: Look) -> Iterator[Finding]:
    known = {row.queue for row in look.rows(LIST_QUEUES)}
    passed = look.served | {row.queue for row in look.paused}
    backlog = look.backlog(sorted(known - passed))
    for queue, count in backlog.items():
        text = f"queue {queue} has {_jobs(count)} available, and no live worker serves it"
        mend = f"{look.worker} --queue {shlex.quote(queue)}"
        yield Finding("unserved", "error", text, mend, {"queue": queue, "available": count})
    if not backlog:
        yield Finding("unserved", "ok", "every queue with available jobs is served or paused")


def _kinds(look: Look) -> Iterator[Finding]:
    is_well = True
    for row in look.rows(sql.SET_ASIDE, listed=LISTED, limit=COUNTED + 1):
        if row.is_handled:
            continue
        is_well = False
        who = (
            "no worker of it is known to handle that kind; some do not tell which kinds they handle"
            if row.is_unknown
            else "no live worker of it handles that kind"
        )
        text = f"{_jobs(row.jobs)} of kind {row.kind} wait{'s' if row.jobs == 1 else ''} in queue {row.queue}: {who}"
        mend = f"{look.worker} --queue {shlex.quote(row.queue)}  # of code that has a task of kind {row.kind}; or "
        mend += (
            "`" + look.awa(f"job cancel {shlex.quote('kind:' + row.kind)} {shlex.quote('queue:' + row.queue)}") + "`"
        )
        facts = {"queue": row.queue, "kind": row.kind, "jobs": row.jobs}
        yield Finding("kinds", "warning" if row.is_unknown else "error", text, mend, facts)
    if is_well:
        yield Finding("kinds", "ok", "no job waits for a worker that knows its kind")


OVERDUE = 60.0
"""Seconds by which a job may be late that waits for its time."""


def _overdue(look: Look) -> Iterator[Finding]:
    row = look.row(sql.OVERDUE, seconds=OVERDUE, limit=COUNTED + 1)
    if row.jobs:
        text = f"{_jobs(row.jobs)} that waited for a time are not available yet, up to {age(row.seconds)} after it"
        mend = f"{look.worker}  # one that leads makes them available"
        yield Finding("overdue", "error", text, mend, {"jobs": row.jobs, "seconds": row.seconds})
    else:
        yield Finding("overdue", "ok", "no job is late that waits for its time")


MANY_KEYS = 10_000_000
"""Unique keys that a database may hold."""

FEW_KEYS = 100
"""So few loose ones say nothing."""


def _unique(look: Look) -> Iterator[Finding]:
    rows = look.row(sql.KEYS).rows
    seen = look.row(sql.LOOSE_KEYS, start=os.urandom(16) if rows > 10_000 else b"")
    facts = {"keys": rows, "seen": seen.keys, "loose": seen.loose}
    if seen.loose > FEW_KEYS and seen.loose > seen.keys / 2:
        text = (
            f"{seen.loose} of {seen.keys} unique keys that were looked at are of jobs that have gone on or are gone:"
            " the leader removes those that nobody holds, and is far behind, or there is none"
        )
        yield Finding("unique", "warning", text, f"{look.worker}  # one that leads removes them", facts)
    elif rows > MANY_KEYS:
        text = (
            f"about {rows:,} unique keys are held: completed jobs hold theirs as long as they are kept; a shorter"
            " completed_retention, or awa.Unique(states=...) without completed, frees them"
        )
        yield Finding("unique", "warning", text, f"{look.worker} --completed-retention 3600", facts)
    else:
        yield Finding("unique", "ok", f"about {max(rows, seen.keys):,} unique keys are held", facts=facts)


# --- all of them


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
    Check("schema", "schema", _schema, False),
    Check("schema", "grants", _grants),
    Check("schema", "origin", _origin),
    Check("schema", "partitions", _partitions),
    Check("schema", "sequences", _sequences),
    Check("schema", "ring", _ring),
    Check("server", "server", _server, False),
    Check("server", "connections", _connections, False),
    Check("server", "pooler", _pooler, False),
    Check("server", "notify", _notify, False),
    Check("server", "clock", _clock, False),
    Check("settings", "durability", _settings("durability", DURABILITY, "what was committed is on disk"), False),
    Check("settings", "timeouts", _settings("timeouts", TIMEOUTS, "no time-out is too short for awa"), False),
    Check("settings", "tracking", _settings("tracking", TRACKING, "the server tells what its sessions do"), False),
    Check("old rows", "transactions", _transactions, False),
    Check("old rows", "prepared", _prepared, False),
    Check("old rows", "slots", _slots, False),
    Check("old rows", "dead_rows", _dead_rows),
    Check("old rows", "autovacuum", _autovacuum),
    Check("old rows", "wraparound", _wraparound, False),
    Check("workers", "workers", _workers),
    Check("workers", "leader", _leader),
    Check("workers", "runtimes", _runtimes),
    Check("workers", "health", _health),
    Check("workers", "versions", _versions),
    Check("workers", "drift", _drift),
    Check("queues", "paused", _paused),
    Check("queues", "unserved", _unserved),
    Check("queues", "kinds", _kinds),
    Check("queues", "overdue", _overdue),
    Check("queues", "unique", _unique),
)
"""In the order in which they are made and shown."""
