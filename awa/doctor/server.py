"""Checks of the server, and of the way to it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import psycopg

from awa.doctor.finding import Finding
from awa.doctor.look import Look
from awa.storage import examine as sql
from awa.storage.grants import sql_identifier
from awa.storage.pooler import is_pooled
from awa.wording import age

OLDEST_SERVER = 140_000


def check_server(look: Look) -> Iterator[Finding]:
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


def check_pooler(look: Look) -> Iterator[Finding]:
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


def check_notify(look: Look) -> Iterator[Finding]:
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


def check_clock(look: Look) -> Iterator[Finding]:
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


def check_connections(look: Look) -> Iterator[Finding]:
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
