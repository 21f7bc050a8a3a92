"""Checks of what holds old rows, and of what should take them away."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from awa.doctor import settings
from awa.doctor.finding import Finding
from awa.doctor.look import Look, end_backend
from awa.storage import examine as sql
from awa.storage.grants import sql_identifier, sql_literal
from awa.wording import age

HORIZON = 10_000_000
"""Transactions that a snapshot may be behind when nobody may see since when it is there."""

SLOT_WAL_BYTES = 10 * 2**30
"""WAL that an unused replication slot may keep."""


def check_transactions(look: Look) -> Iterator[Finding]:
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
        yield Finding("transactions", "warning", text, end_backend(row.pid), facts)
    hidden = look.row(sql.HIDDEN).sessions
    if hidden:
        role = sql_identifier(look.server.role)
        text = f"{hidden} sessions of other roles do not show since when their transactions are open"
        yield Finding("transactions", "ok", text, f"GRANT pg_read_all_stats TO {role};", {"hidden": hidden})
    elif not found:
        yield Finding("transactions", "ok", f"no transaction is older than {age(look.long)}")


def check_prepared(look: Look) -> Iterator[Finding]:
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


def check_slots(look: Look) -> Iterator[Finding]:
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


def check_dead_rows(look: Look) -> Iterator[Finding]:
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


def check_autovacuum(look: Look) -> Iterator[Finding]:
    found = list(settings.check_autovacuum(look))
    for row in look.rows(sql.NOT_VACUUMED):
        table = look.schema.sql(f"awa.{row.table}")
        text = f"autovacuum is turned off for {table}, which grows with every change"
        mend = f"ALTER TABLE {table} RESET (autovacuum_enabled);"
        found = [one for one in found if one.level != "ok"]
        found.append(Finding("autovacuum", "error", text, mend, {"table": row.table}))
    yield from found


def check_wraparound(look: Look) -> Iterator[Finding]:
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
