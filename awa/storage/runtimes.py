"""Starts of worker processes: registration, signs of life, snapshots, fences, and who leads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from psycopg import Connection
from psycopg.rows import class_row, scalar_row

from awa.options import milliseconds
from awa.storage.pooler import read_committed
from awa.storage.schema import Schema

REGISTER = """
    INSERT INTO awa.runtime_instances (uuid, hostname, pid, version, queues, heartbeat_ms, timeout_ms, kind_timeouts,
                                       stale_after_ms, snapshot_interval_ms, threads, kinds, quiet_at, quiet_by)
    SELECT %(uuid)s, %(hostname)s, %(pid)s, %(version)s, %(queues)s::json, %(heartbeat_ms)s, %(timeout_ms)s,
           %(kind_timeouts)s::json, %(stale_after_ms)s, %(snapshot_interval_ms)s, %(threads)s, %(kinds)s::json,
           b.quiet_at, b.quiet_by
      FROM (VALUES (true)) one
      LEFT JOIN awa.runtime_instances b ON b.id = %(before)s
    RETURNING id
"""


def register(
    conn: Connection,
    schema: Schema,
    *,
    uuid: UUID,
    hostname: str,
    pid: int,
    version: str,
    queues: str,
    heartbeat: float,
    stale_after: float,
    timeout: float,
    kind_timeouts: str,
    snapshot_interval: float,
    threads: int,
    kinds: str,
    before: int = 0,
) -> int:
    """Write the row of a worker that starts, and return its number.

    Args:
        queues: What it serves, as JSON.
        heartbeat: Seconds between its signs of life.
        stale_after: Seconds of silence after which it is to be taken for dead.
        timeout: Seconds that its attempts may take when neither job nor kind says; 0 for no limit.
        kind_timeouts: Kind -> limit in milliseconds, for the kinds that say one, as JSON.
        snapshot_interval: Seconds between its snapshots.
        threads: Handlers that can run at once.
        kinds: Those it handles, sorted, as JSON.
        before: The number that this process had before: an order to be quiet goes along. 0: it had none.
    """
    params = {
        "uuid": uuid,
        "hostname": hostname,
        "pid": pid,
        "version": version,
        "queues": queues,
        "heartbeat_ms": milliseconds(heartbeat),
        "stale_after_ms": milliseconds(stale_after),
        "timeout_ms": milliseconds(timeout),
        "kind_timeouts": kind_timeouts,
        "snapshot_interval_ms": milliseconds(snapshot_interval),
        "threads": threads,
        "kinds": kinds,
        "before": before,
    }
    with conn.cursor(row_factory=scalar_row) as cursor:
        cursor.execute(schema.sql(REGISTER), params)
        found = cursor.fetchone()
    assert isinstance(found, int)
    return found


# The row's lock is had until the commit, for which a sign of life then waits. So it waits for no disk and no standby.
SNAPSHOT = """
    UPDATE awa.runtime_instances r
       SET snapshot_at = clock_timestamp(), busy = %(busy)s, in_flight = %(in_flight)s::json,
           health = %(health)s::json
     WHERE r.id = %(runtime)s AND r.ended_at IS NULL
    RETURNING set_config('synchronous_commit', 'off', true)
"""


def write_snapshot(
    conn: Connection[Any], schema: Schema, runtime: int, *, busy: int, in_flight: str, health: str
) -> None:
    """Tell how a runtime is, in a transaction of its own.

    Args:
        busy: Handlers that run.
        in_flight: Queue -> attempts that it holds, as JSON.
        health: As ``awa.worker.vitals.Health`` gives it, as JSON.
    """
    params = {"runtime": runtime, "busy": busy, "in_flight": in_flight, "health": health}
    with conn.cursor() as cursor:
        read_committed(cursor, schema.sql(SNAPSHOT), params)


HEARTBEAT = """
    UPDATE awa.runtime_instances r
       SET last_seen_at = clock_timestamp(), newest_claim = %(newest_claim)s, open_claims = %(open_claims)s
     WHERE r.id = %(runtime)s
       AND NOT EXISTS (SELECT FROM awa.gone_runtimes g WHERE g.runtime = r.id)
    RETURNING true
"""


def heartbeat(conn: Connection, schema: Schema, runtime: int, *, newest_claim: int, open_claims: Sequence[int]) -> bool:
    """Give a sign of life; False when this runtime is gone.

    Args:
        newest_claim: Up to this one it knows all its claims. A rescuer takes every claim above it for open.
        open_claims: The older claims of which a member is open.
    """
    with conn.cursor(row_factory=scalar_row) as cursor:
        read_committed(
            cursor,
            schema.sql(HEARTBEAT),
            {"runtime": runtime, "newest_claim": newest_claim, "open_claims": list(open_claims)},
        )
        return cursor.fetchone() is not None


BURY = """
    WITH forgotten AS (
        INSERT INTO awa.runtime_instances (id, uuid, hostname, pid, version, heartbeat_ms)
        OVERRIDING SYSTEM VALUE
        VALUES (%(runtime)s, gen_random_uuid(), %(hostname)s, %(pid)s, '', 0)
            ON CONFLICT DO NOTHING
        RETURNING id
    )
    INSERT INTO awa.gone_runtimes (runtime) SELECT id FROM forgotten ON CONFLICT DO NOTHING
"""


def bury(conn: Connection, schema: Schema, runtime: int, *, hostname: str, pid: int) -> None:
    """Write down as gone a runtime that this server does not know; nothing, when it does.

    A server that has lost acknowledged commits may have lost its registration. Nobody would refuse its claims then, nor
    take them back. From here on they are refused, and all that it has claimed is taken back.
    """
    conn.execute(schema.sql(BURY), {"runtime": runtime, "hostname": hostname, "pid": pid})


LEAVE = """
    WITH ended AS (
        UPDATE awa.runtime_instances
           SET last_seen_at = clock_timestamp(), ended_at = clock_timestamp(), newest_claim = %(newest_claim)s,
               open_claims = '{}'
         WHERE id = %(runtime)s
           AND NOT EXISTS (SELECT FROM awa.gone_runtimes g WHERE g.runtime = %(runtime)s)
        RETURNING id
    ), gone AS (
        INSERT INTO awa.gone_runtimes (runtime) SELECT id FROM ended
    )
    DELETE FROM awa.cancel_requests r WHERE r.runtime = (SELECT id FROM ended)
"""


def leave(conn: Connection, schema: Schema, runtime: int, *, newest_claim: int) -> None:
    """Say that this runtime has ended and that nothing of it is open, and refuse every later claim for it.

    Call it under the runtime's lock. A fenced one stays for its rescuer to look at.
    """
    conn.execute(schema.sql(LEAVE), {"runtime": runtime, "newest_claim": newest_claim})


@dataclass(frozen=True, slots=True)
class Silent:
    """A runtime that has not been heard for too long, or whose rescue is not finished."""

    runtime: int
    """Its number."""
    hostname: str
    """Where it ran."""
    pid: int
    """Its process there."""
    silent_seconds: float
    """Since its last sign of life."""
    is_gone: bool
    """It is fenced already."""


LIST_SILENT = """
    SELECT r.id AS runtime, r.hostname, r.pid,
           extract(epoch FROM clock_timestamp() - r.last_seen_at)::double precision AS silent_seconds,
           g.runtime IS NOT NULL AS is_gone
      FROM awa.runtime_instances r
      LEFT JOIN awa.gone_runtimes g ON g.runtime = r.id
     WHERE r.ended_at IS NULL
       AND (g.runtime IS NOT NULL OR r.last_seen_at < clock_timestamp() - %(stale_after)s * interval '1 s')
     ORDER BY r.id
"""


def list_silent(conn: Connection, schema: Schema, *, stale_after: float) -> list[Silent]:
    """Runtimes to fence and rescue: silent for *stale_after* seconds, or fenced with attempts that are still open."""
    with conn.cursor(row_factory=class_row(Silent)) as cursor:
        return cursor.execute(schema.sql(LIST_SILENT), {"stale_after": stale_after}).fetchall()


FENCE = "SELECT awa.fence_v1(%(runtime)s, %(stale_after)s)"


def fence(conn: Connection, schema: Schema, runtime: int, *, stale_after: float) -> bool:
    """Refuse every later write of a silent runtime. False: it was heard, or is writing just now; try again later.

    Source: migrations/0005_rescue.sql.
    """
    with conn.cursor(row_factory=scalar_row) as cursor:
        read_committed(cursor, schema.sql(FENCE), {"runtime": runtime, "stale_after": stale_after})
        return bool(cursor.fetchone())


@dataclass(frozen=True, slots=True)
class Rescued:
    """What one call of :func:`rescue` did."""

    tried: int
    """Open attempts it looked at."""
    ended: int
    """Attempts it took back."""
    blocked: int
    """Attempts that could not be taken now."""


RESCUE = "SELECT tried, ended, blocked FROM awa.rescue_v1(%(runtime)s, %(limit)s, %(skip)s)"


def rescue(conn: Connection, schema: Schema, runtime: int, *, limit: int, skip: int = 0) -> Rescued:
    """Take back up to *limit* open attempts of a fenced runtime, beyond the first *skip*.

    Source: migrations/0005_rescue.sql.
    """
    with conn.cursor(row_factory=class_row(Rescued)) as cursor:
        read_committed(cursor, schema.sql(RESCUE), {"runtime": runtime, "limit": limit, "skip": skip})
        found = cursor.fetchone()
    assert found is not None
    return found


FINISH = """
    WITH ended AS (
        UPDATE awa.runtime_instances SET ended_at = clock_timestamp() WHERE id = %(runtime)s AND ended_at IS NULL
        RETURNING id
    )
    DELETE FROM awa.cancel_requests r WHERE r.runtime = (SELECT id FROM ended)
"""


def finish(conn: Connection, schema: Schema, runtime: int) -> None:
    """Note that nothing of a fenced runtime is left to rescue."""
    conn.execute(schema.sql(FINISH), {"runtime": runtime})


# Claims tell where an attempt ran, so who made them stays as long as they do. Fences are another table's, and stay.
DELETE_ENDED = """
    WITH old AS MATERIALIZED (
        SELECT r.id
          FROM awa.runtime_instances r
         WHERE r.id > %(after)s AND r.ended_at < clock_timestamp() - %(kept)s * interval '1 s'
         ORDER BY r.id
         LIMIT %(limit)s
    ), deleted AS (
        DELETE FROM awa.runtime_instances r
         WHERE r.id = ANY (ARRAY(SELECT o.id FROM old o))
           AND NOT EXISTS (SELECT FROM awa.claims c WHERE c.runtime = r.id OFFSET 0)
    )
    SELECT CASE WHEN count(*) >= %(limit)s THEN max(o.id) ELSE 0 END FROM old o
"""


def delete_ended(conn: Connection[Any], schema: Schema, *, kept: float, limit: int, after: int = 0) -> int:
    """Look at up to *limit* runtimes that ended more than *kept* seconds ago, and delete those without claims.

    One that wakes after that, and had been taken for dead, is refused as before, and told by its sign of life.

    Args:
        after: Look at those with a higher number.

    Returns:
        The *after* of the next call; 0: it has seen them all.
    """
    with conn.cursor(row_factory=scalar_row) as cursor:
        read_committed(cursor, schema.sql(DELETE_ENDED), {"kept": kept, "limit": limit, "after": after})
        return int(cursor.fetchone() or 0)


@dataclass(frozen=True, slots=True)
class Seen:
    """A runtime that has not ended, as far as the database knows."""

    runtime: int
    """Its number."""
    hostname: str
    """Where it runs."""
    pid: int
    """Its process there."""
    heartbeat_seconds: float
    """Between its signs of life."""
    silent_seconds: float
    """Since the last."""
    is_gone: bool
    """It was taken for dead."""

    @property
    def is_heard(self) -> bool:
        """It gives its signs of life: at most two in a row are missing."""
        return not self.is_gone and self.silent_seconds <= 3 * self.heartbeat_seconds + 1.0


LIST_SEEN = """
    SELECT r.id AS runtime, r.hostname, r.pid, r.heartbeat_ms / 1000.0::double precision AS heartbeat_seconds,
           greatest(extract(epoch FROM clock_timestamp() - r.last_seen_at), 0)::double precision AS silent_seconds,
           g.runtime IS NOT NULL AS is_gone
      FROM awa.runtime_instances r
      LEFT JOIN awa.gone_runtimes g ON g.runtime = r.id
     WHERE r.ended_at IS NULL
     ORDER BY r.id
"""


def list_seen(conn: Connection, schema: Schema) -> list[Seen]:
    """The runtimes that have neither left nor been rescued, by number."""
    with conn.cursor(row_factory=class_row(Seen)) as cursor:
        return cursor.execute(schema.sql(LIST_SEEN)).fetchall()


LIST_WITH_LIMITS = """
    SELECT r.id
      FROM awa.runtime_instances r
     WHERE r.ended_at IS NULL AND r.timeout_ms IS NOT NULL
       AND NOT EXISTS (SELECT FROM awa.gone_runtimes g WHERE g.runtime = r.id)
     ORDER BY r.id
"""


def list_with_limits(conn: Connection, schema: Schema) -> list[int]:
    """Living runtimes that have told what their attempts may take."""
    with conn.cursor(row_factory=scalar_row) as cursor:
        return cursor.execute(schema.sql(LIST_WITH_LIMITS)).fetchall()


@dataclass(frozen=True, slots=True)
class Expired:
    """What one call of :func:`expire` did."""

    ended: int
    """Attempts it ended."""
    blocked: int
    """1 when it stopped at an attempt that could not be taken now: an open transaction completes it."""


EXPIRE = "SELECT ended, blocked FROM awa.expire_v1(%(runtime)s, %(behind)s, %(limit)s, %(skip)s)"


def expire(conn: Connection, schema: Schema, runtime: int, *, behind: float, limit: int, skip: int = 0) -> Expired:
    """End up to *limit* attempts of a living runtime that are long past their limit, beyond the first *skip*.

    Args:
        behind: Seconds that an attempt has beyond its limit.

    Source: migrations/0012_deadlines.sql.
    """
    with conn.cursor(row_factory=class_row(Expired)) as cursor:
        params = {"runtime": runtime, "behind": behind, "limit": limit, "skip": skip}
        read_committed(cursor, schema.sql(EXPIRE), params)
        found = cursor.fetchone()
    assert found is not None
    return found


@dataclass(frozen=True, slots=True)
class Lease:
    """What one call of :func:`hold_lease` found."""

    held_seconds: float | None
    """For how long this runtime has held it without a gap; None when another holds it."""
    left_seconds: float
    """Until it expires, unless its holder renews it."""


# Looks before it writes: a conflict locks the row, and all that do not lead would queue for it with who does.
HOLD_LEASE = """
    WITH held AS (
        INSERT INTO awa.leases AS l (name, runtime, expires_at)
        SELECT %(name)s, %(runtime)s, clock_timestamp() + %(seconds)s * interval '1 s'
         WHERE NOT EXISTS (SELECT FROM awa.leases o
                            WHERE o.name = %(name)s AND o.runtime <> %(runtime)s AND o.expires_at > clock_timestamp())
            ON CONFLICT (name) DO UPDATE
           SET runtime = excluded.runtime, expires_at = excluded.expires_at,
               epoch = CASE WHEN l.runtime = excluded.runtime AND l.expires_at > clock_timestamp() THEN l.epoch
                            ELSE l.epoch + 1 END,
               acquired_at = CASE WHEN l.runtime = excluded.runtime AND l.expires_at > clock_timestamp()
                                  THEN l.acquired_at ELSE clock_timestamp() END
         WHERE l.runtime = excluded.runtime OR l.expires_at <= clock_timestamp()
        RETURNING acquired_at
    )
    SELECT greatest(extract(epoch FROM clock_timestamp() - h.acquired_at), 0)::double precision AS held_seconds,
           %(seconds)s::double precision AS left_seconds
      FROM held h
     UNION ALL
    SELECT NULL, greatest(extract(epoch FROM l.expires_at - clock_timestamp()), 0)::double precision
      FROM awa.leases l
     WHERE l.name = %(name)s AND NOT EXISTS (SELECT FROM held)
"""


def hold_lease(conn: Connection, schema: Schema, name: str, runtime: int, *, seconds: float) -> Lease:
    """Take or renew the lease *name* for *seconds*, unless another holds it."""
    with conn.cursor(row_factory=class_row(Lease)) as cursor:
        read_committed(cursor, schema.sql(HOLD_LEASE), {"name": name, "runtime": runtime, "seconds": seconds})
        # no row: another took it first, ever, at this very moment
        return cursor.fetchone() or Lease(None, 0.0)


DROP_LEASE = "UPDATE awa.leases SET expires_at = clock_timestamp() WHERE name = %(name)s AND runtime = %(runtime)s"


def drop_lease(conn: Connection, schema: Schema, name: str, runtime: int) -> None:
    """Let another runtime take the lease at once."""
    conn.execute(schema.sql(DROP_LEASE), {"name": name, "runtime": runtime})
