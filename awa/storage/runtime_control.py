"""Runtimes as operators see them, and the order to be quiet."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from psycopg import Connection, Cursor
from psycopg.rows import dict_row, scalar_row

from awa.errors import RuntimeNotFound, RuntimeTooOld
from awa.storage.grants import explaining
from awa.storage.pooler import read_committed
from awa.storage.rows import read_anything
from awa.storage.schema import Schema

MOST_ENDED = 100
"""Most runtimes that have ended which a list shows."""


@dataclass(frozen=True, slots=True)
class ServedQueue:
    """A queue that a runtime serves."""

    name: str
    """Which."""
    max_workers: int | None = None
    """Most of its threads that may run the queue's jobs at once; None: all of them."""
    min_workers: int = 0
    """Threads that are kept for them."""
    weight: int = 1
    """Its share of the other threads."""
    in_flight: int | None = None
    """Attempts that the runtime held, running or not started yet, at its last snapshot; None: there is none."""


@dataclass(frozen=True, slots=True)
class RuntimeHealth:
    """How a runtime was at its last snapshot."""

    unhealthy: list[str] = field(default_factory=list)
    """Why a new start would be better; none: it is healthy."""
    unready: list[str] = field(default_factory=list)
    """Why it cannot work just now; none: it is ready, if it is healthy."""
    loops: dict[str, str] = field(default_factory=dict)
    """Its loops, and the state of each."""
    is_quiet: bool = False
    """It had heard that it is to claim nothing more."""


@dataclass(frozen=True, slots=True)
class RuntimeInfo:
    """One start of a worker process, as the database knows it."""

    id: int
    """Its number."""
    uuid: UUID
    """The same for other systems: no two databases have it."""
    hostname: str
    """Where it runs."""
    pid: int
    """Its process there."""
    version: str
    """Of awa."""
    state: Literal["live", "stale", "gone", "ended"]
    """``stale``: silent for longer than ``stale_after``, and not taken for dead yet. ``gone``: taken for dead; its
    process has a new number if it lives. ``ended``: it left in good order."""
    started_at: datetime
    """When it registered."""
    last_seen_at: datetime
    """When it gave its last sign of life."""
    silent_seconds: float
    """How long that was ago, by the database's clock."""
    ended_at: datetime | None
    """When it left, or when nothing of it was left to take back; None: neither has happened."""
    is_leader: bool
    """It runs maintenance."""
    quiet_at: datetime | None
    """When it was asked to claim nothing more; None: it was not."""
    quiet_by: str | None
    """Who asked, if that was told."""
    heartbeat: float
    """Seconds between its signs of life."""
    stale_after: float
    """Seconds of silence after which it is taken for dead."""
    queues: list[ServedQueue]
    """What it serves."""
    kinds: list[str]
    """What it handles, sorted."""
    threads: int | None
    """Handlers that it can run at once; None: it does not tell."""
    snapshot_at: datetime | None
    """When it last told of itself what follows; None: never."""
    busy: int | None
    """Handlers that ran then."""
    health: RuntimeHealth | None
    """How its loops were then."""

    @property
    def is_quiet(self) -> bool:
        """Whether it was asked to claim nothing more."""
        return self.quiet_at is not None

    @property
    def is_drained(self) -> bool:
        """Whether it has heard that and holds nothing any more: until it is resumed nothing runs there."""
        return (
            self.quiet_at is not None
            and self.snapshot_at is not None
            and self.snapshot_at >= self.quiet_at
            and (self.health is not None and self.health.is_quiet)
            and not self.busy
            and not any(queue.in_flight for queue in self.queues)
        )


READ = """
    SELECT r.id, r.uuid, r.hostname, r.pid, r.version, r.started_at, r.last_seen_at, r.ended_at, r.quiet_at, r.quiet_by,
           o.state, o.is_leader,
           greatest(extract(epoch FROM clock_timestamp() - r.last_seen_at), 0)::double precision AS silent_seconds,
           r.heartbeat_ms, coalesce(r.stale_after_ms, 30000) AS stale_after_ms, r.queues, r.kinds, r.threads,
           r.snapshot_at, r.busy, r.in_flight, r.health
      FROM awa.runtime_instances r
      JOIN awa.runtime_overview o ON o.id = r.id
"""

LIST = (
    READ
    + """
     WHERE r.ended_at IS NULL
        OR r.id = ANY (ARRAY(SELECT o.id FROM awa.runtime_instances o
                              WHERE o.ended_at IS NOT NULL
                              ORDER BY o.id DESC
                              LIMIT %(ended)s))
     ORDER BY r.id
"""
)

GET = READ + "     WHERE r.id = %(runtime)s"


def list_runtimes(conn: Connection[Any], schema: Schema, *, include_ended: bool = False) -> list[RuntimeInfo]:
    """The runtimes that have not ended, or the last hundred that have too, by number."""
    return _read(conn, schema, LIST, {"ended": MOST_ENDED if include_ended else 0})


def get_runtime(conn: Connection[Any], schema: Schema, runtime: int) -> RuntimeInfo:
    """One runtime.

    Raises:
        RuntimeNotFound: There is none of that number.
    """
    found = _read(conn, schema, GET, {"runtime": runtime})
    if not found:
        raise RuntimeNotFound(
            f"no runtime {runtime} is known: there was none, or it ended long ago; `awa runtime list --all` shows which"
            " there are",
            runtime=runtime,
        )
    return found[0]


def _read(conn: Connection[Any], schema: Schema, query: str, params: dict[str, Any]) -> list[RuntimeInfo]:
    with explaining(conn, schema, "reader"), Cursor(conn, row_factory=dict_row) as cursor:
        read_anything(cursor)
        read_committed(cursor, schema.sql(query), params)
        return [_info(row) for row in cursor.fetchall()]


def _info(row: dict[str, Any]) -> RuntimeInfo:
    # workers in other languages write these too
    served, kinds, in_flight, health = (row.pop(name) for name in ("queues", "kinds", "in_flight", "health"))
    held = in_flight if isinstance(in_flight, dict) else {}
    return RuntimeInfo(
        heartbeat=row.pop("heartbeat_ms") / 1000,
        stale_after=row.pop("stale_after_ms") / 1000,
        queues=[
            ServedQueue(
                name=str(one["name"]),
                max_workers=one.get("max_workers"),
                min_workers=one.get("min_workers") or 0,
                weight=one.get("weight") or 1,
                in_flight=held.get(one["name"]),
            )
            for one in (served if isinstance(served, list) else [])
            if isinstance(one, dict) and one.get("name") is not None
        ],
        kinds=[str(kind) for kind in kinds] if isinstance(kinds, list) else [],
        health=_health(health) if isinstance(health, dict) else None,
        **row,
    )


def _health(said: dict[str, Any]) -> RuntimeHealth:
    reasons = {
        name: [str(reason) for reason in said[name]] if isinstance(said.get(name), list) else []
        for name in ("unhealthy", "unready")
    }
    loops = said.get("loops")
    loops = {name: str(state) for name, state in loops.items()} if isinstance(loops, dict) else {}
    return RuntimeHealth(reasons["unhealthy"], reasons["unready"], loops, is_quiet=said.get("is_quiet") is True)


# One that tells nothing of itself is of before such orders: it would claim on, and nobody could see that it does.
QUIET = """
    UPDATE awa.runtime_instances r
       SET quiet_at = CASE WHEN %(is_quiet)s THEN coalesce(r.quiet_at, clock_timestamp()) END,
           quiet_by = %(by)s::text
     WHERE r.id = %(runtime)s AND r.ended_at IS NULL
       AND CASE WHEN %(is_quiet)s THEN r.snapshot_interval_ms IS NOT NULL ELSE r.quiet_at IS NOT NULL END
       AND NOT EXISTS (SELECT FROM awa.gone_runtimes g WHERE g.runtime = r.id)
    RETURNING r.id
"""


def order_quiet(
    conn: Connection[Any], schema: Schema, runtime: int, *, is_quiet: bool, by: str | None = None
) -> RuntimeInfo:
    """Have a runtime claim nothing more, or claim again; it hears of it within a second. In a transaction of its own.

    The order is the row's, so it outlives connections, and a process that was taken for dead and registers anew takes
    it along. One that was fenced only after the look at the end, when the order stood, reads it there.

    Raises:
        RuntimeNotFound: There is none of that number, or it claims nothing ever more.
        RuntimeTooOld: It would not hear that it is to be quiet; nothing was changed.
    """
    with explaining(conn, schema, "worker"), Cursor(conn, row_factory=scalar_row) as cursor:
        read_committed(cursor, schema.sql(QUIET), {"runtime": runtime, "is_quiet": is_quiet, "by": by})
        stands = cursor.fetchone() is not None
    found = get_runtime(conn, schema, runtime)
    if found.state == "gone":
        text = (
            f"runtime {runtime} was taken for dead: if its process lives it has another number, see `awa runtime list`"
        )
        raise RuntimeNotFound(text, runtime=runtime)
    if found.state == "ended":
        raise RuntimeNotFound(
            f"runtime {runtime} has ended and claims nothing any more: `awa runtime list` shows which have not",
            runtime=runtime,
        )
    if is_quiet and not stands:
        raise RuntimeTooOld(
            f"runtime {runtime} is of awa {found.version}, which hears no order to be quiet: nothing was changed; end"
            f" process {found.pid} on {found.hostname}, or pause its queues with `awa queue pause`",
            runtime=runtime,
            version=found.version,
        )
    return found
