"""What is said of queues: their limits, that they are paused; and what is done to all that waits in one.

The rules are in migrations/0022_queue_control.sql.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import orjson
import psycopg
from psycopg import Connection, Cursor
from psycopg.rows import dict_row, scalar_row

from awa.errors import QueueBusy, QueueNotFound
from awa.job import JobState
from awa.limits import NO_LIMITS, Limits, RateLimit, limits_from_json, limits_to_json
from awa.storage import kinds
from awa.storage.connection import repeated
from awa.storage.descriptors import DescriptorInfo, read_descriptors
from awa.storage.jobs import REFUSED, refusal
from awa.storage.kinds import Depth
from awa.storage.pooler import read_committed
from awa.storage.queues import (
    COUNT_AVAILABLE,
    COUNT_WAITING,
    LIST_QUEUES,
    WAITING_STATES,
    Count,
    count_jobs,
    oldest_available,
)
from awa.storage.schema import Schema
from awa.storage.snapshot import Look
from awa.wording import listed

Said = int | RateLimit | None
"""One limit; None: there is no such limit."""

QUIET_WITHIN = 10.0
"""Seconds that a pause waits for a claim that began before it. Maintenance ends a claim that takes longer."""

HELD_WITHIN = 1.0
"""Seconds for which limits are said again when claims, or another who says something of the queue, are in the way."""

PATIENCE = 5.0
"""Seconds without progress after which cancelling or purging gives up."""

STEP = 500
"""Most jobs of a step: its transaction keeps claims of the queue off, for some hundredths of a second."""

# --- looking

META = """
    SELECT m.queue, m.declared, m.declared_at, m.overrides, m.overrides_by, m.overrides_at, m.paused_at, m.paused_by,
           m.pause_reason
      FROM awa.queue_meta m
     WHERE %(queue)s::text IS NULL OR m.queue = %(queue)s
"""

SERVED = """
    SELECT DISTINCT q->>'name'
      FROM awa.runtime_instances i
     CROSS JOIN LATERAL json_array_elements(CASE WHEN json_typeof(i.queues) = 'array' THEN i.queues END) q
     WHERE i.ended_at IS NULL AND q->>'name' IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A queue: what it holds, and what was said of it."""

    name: str
    """Its name."""
    counts: dict[JobState, Count]
    """How many jobs it has in each state, as ``client.admin.queue_counts`` counts them."""
    paused_at: datetime | None = None
    """When it was paused; None: it is not."""
    paused_by: str | None = None
    """Who said so last, if that was told."""
    pause_reason: str | None = None
    """Why."""
    limits: Limits = NO_LIMITS
    """The limits that hold."""
    declared: Limits | None = None
    """What the code of the worker that started last declares; None: none ever has."""
    declared_at: datetime | None = None
    """When that changed last."""
    overrides: dict[str, Said] = field(default_factory=dict)
    """The limits that an operator has set, by name, which go before the declared ones; None: no such limit."""
    overrides_by: str | None = None
    """Who set or cleared one last, if that was told."""
    overrides_at: datetime | None = None
    """When."""
    descriptor: DescriptorInfo | None = None
    """How code describes it; None: no worker that serves it has declared it."""
    oldest_at: datetime | None = None
    """Since when its oldest available job has been available; None: nobody waits in line for a worker."""
    kinds: dict[str, Depth] | None = None
    """What it has of each kind, of which jobs were met; None: that was not counted, as in a list or after a change."""

    @property
    def is_paused(self) -> bool:
        """Whether no attempt of it may start."""
        return self.paused_at is not None

    @property
    def running(self) -> int:
        """How many of its jobs are running."""
        return self.counts[JobState.RUNNING].value


def list_queues(look: Look) -> list[QueueInfo]:
    """Every queue that has jobs, of which something was said, or that a worker serves; by name."""
    return _read(look, None)


def get_queue(look: Look, queue: str, *, by_kind: bool = False) -> QueueInfo:
    """One queue, with what it has of each kind when *by_kind*.

    Raises:
        QueueNotFound: It has no jobs, nothing was said of it, and no worker serves it.
    """
    [found] = _read(look, queue)
    is_said = found.descriptor is not None or bool(look.rows(META, queue=queue))
    if not is_said and not any(count.value for count in found.counts.values()):
        # those of list_queues: one whose jobs were deleted is there until its entries are
        names = {name for text in (SERVED, LIST_QUEUES) for (name,) in look.rows(text)}
        if queue not in names:
            known = sorted(
                names | {name for (name, *_) in look.rows(META, queue=None)} | set(read_descriptors(look, "queue"))
            )
            shown = listed(map(ascii, known)) or "none"
            text = f"no queue {queue!a} is known: it has no jobs, and nobody serves it; known are {shown}"
            raise QueueNotFound(text, queue=queue)
    if not by_kind:
        return found
    depths, _ = kinds.count_jobs(look, queue=queue)
    return replace(found, kinds={kind: of_kind[queue] for kind, of_kind in depths.items()})


def _read(look: Look, queue: str | None) -> list[QueueInfo]:
    said = {name: rest for name, *rest in look.rows(META, queue=queue)}
    counts = count_jobs(look, queue)
    described = read_descriptors(look, "queue", queue)
    nothing = {state: Count(0, True) for state in JobState}
    names = set(counts) | set(said) | set(described)
    if queue is None:
        names |= {name for (name,) in look.rows(SERVED)}
    available = {name: of_queue[JobState.AVAILABLE] for name, of_queue in counts.items()}
    oldest = oldest_available(look, [name for name, count in available.items() if count.value or not count.is_exact])
    return [
        replace(
            _info(name, counts.get(name, nothing), said.get(name)),
            oldest_at=oldest.get(name),
            descriptor=described.get(name),
        )
        for name in sorted(names)
    ]


def _info(name: str, counts: dict[JobState, Count], row: list[Any] | None) -> QueueInfo:
    if row is None:
        return QueueInfo(name, counts)
    declared, declared_at, overrides, overrides_by, overrides_at, paused_at, paused_by, pause_reason = row
    in_code = None if declared is None else limits_from_json(declared)
    by_operator = limits_from_json(overrides or {})
    return QueueInfo(
        name=name,
        counts=counts,
        paused_at=paused_at,
        paused_by=paused_by,
        pause_reason=pause_reason,
        limits=_limits({**(in_code or {}), **by_operator}),
        declared=None if in_code is None else _limits(in_code),
        declared_at=declared_at,
        overrides=by_operator,
        overrides_by=overrides_by,
        overrides_at=overrides_at,
    )


def _limits(by_name: Mapping[str, Any]) -> Limits:
    return Limits(**by_name)


def count_waiting(look: Look, queue: str) -> int:
    """How many jobs of a queue are neither running nor ended, one by one."""
    waiting = look.rows(COUNT_WAITING, queues=[queue], states=list(WAITING_STATES))
    available = look.rows(COUNT_AVAILABLE, queues=[queue], limit=None)
    return sum(count for _, _, count in [*waiting, *available])


# --- saying

DECLARE = "SELECT awa.declare_queue_v1(%(queue)s, %(declared)s::json)"


def declare_queue(conn: Connection[Any], schema: Schema, queue: str, limits: Limits) -> bool:
    """Store what code declares about a queue, in a transaction of its own; returns whether that is news.

    One look, without a lock, when it is not.

    Raises:
        QueueBusy: Claims, or another who says something of it, were in the way for a second; nothing was changed.

    Source: migrations/0022_queue_control.sql.
    """
    params = {"queue": queue, "declared": orjson.dumps(limits.to_json()).decode()}
    return _said(conn, schema, queue, DECLARE, params) == "declared"


LIMIT = "SELECT awa.limit_queue_v1(%(queue)s, %(overrides)s::json, %(by)s::text, %(cleared)s::text[])"


def limit_queue(
    conn: Connection[Any],
    schema: Schema,
    queue: str,
    overrides: Mapping[str, Said],
    *,
    cleared: Collection[str] = (),
    by: str | None = None,
) -> None:
    """Say as an operator what limits a queue has, in a transaction of its own.

    Args:
        overrides: By name; None: no such limit. What was said of others stays.
        cleared: Limits of which nothing is said any more.

    Raises:
        QueueBusy: Claims, or another who says something of it, were in the way for a second; nothing was changed.

    Source: migrations/0022_queue_control.sql.
    """
    said = orjson.dumps(limits_to_json(overrides)).decode()
    _said(conn, schema, queue, LIMIT, {"queue": queue, "overrides": said, "by": by, "cleared": list(cleared)})


PAUSE = "SELECT is_quiet FROM awa.pause_queue_v1(%(queue)s, %(by)s::text, %(reason)s::text)"

LOCK = "SELECT awa.lock_queue(%(queue)s, 1)"


def pause_queue(
    conn: Connection[Any], schema: Schema, queue: str, *, by: str | None = None, reason: str | None = None
) -> None:
    """Have no attempt of a queue start until it is resumed; once it returns, none is about to, either.

    Raises:
        QueueBusy: A claim that began before is open still; or somebody held what is said of the queue, and nothing was
            changed. The message says which.

    Source: migrations/0022_queue_control.sql.
    """
    until = time.monotonic() + QUIET_WITHIN
    is_quiet = _ask(conn, schema, queue, PAUSE, {"queue": queue, "by": by, "reason": reason})
    while not is_quiet:
        if time.monotonic() > until:
            raise QueueBusy(
                f"queue {queue!a} is paused, but a claim that began before has held it for {QUIET_WITHIN:g} s and may"
                " start jobs yet: pause it again to see whether it is over",
                queue=queue,
            )
        is_quiet = _ask(conn, schema, queue, LOCK, {"queue": queue})  # had, and given back


RESUME = "SELECT awa.resume_queue_v1(%(queue)s)"


def resume_queue(conn: Connection[Any], schema: Schema, queue: str) -> None:
    """Let a queue go on, and wake its workers.

    Raises:
        QueueBusy: Somebody held what is said of the queue; nothing was changed.

    Source: migrations/0022_queue_control.sql.
    """
    _ask(conn, schema, queue, RESUME, {"queue": queue})


def _said(conn: Connection[Any], schema: Schema, queue: str, text: str, params: dict[str, Any]) -> str:
    """What happened, once it is something else than ``busy``."""
    until = time.monotonic() + HELD_WITHIN
    while (happened := str(_ask(conn, schema, queue, text, params))) == "busy":
        if time.monotonic() > until:
            raise _busy(queue)
    return happened


def _busy(queue: str) -> QueueBusy:
    return QueueBusy(
        f"queue {queue!a} was held by claims, or by another operator, for a second or two: nothing was changed,"
        " try again",
        queue=queue,
    )


def _ask(conn: Connection[Any], schema: Schema, queue: str, text: str, params: dict[str, Any]) -> Any:
    try:
        with Cursor(conn, row_factory=scalar_row) as cursor:
            read_committed(cursor, schema.sql(text), params)
            return cursor.fetchone()
    except psycopg.errors.LockNotAvailable as error:
        raise _busy(queue) from error
    except REFUSED as error:
        raise refusal(conn, schema, "worker", error) from error


# --- doing


@dataclass(frozen=True, slots=True)
class Purged:
    """How many jobs a purge has deleted."""

    waiting: int = 0
    """They waited, or were available."""
    ended: int = 0
    """They had failed, or were cancelled."""


CANCEL_WAITING = """
    SELECT happened, cancelled AS waiting, 0 AS ended, go_on::text
      FROM awa.cancel_waiting_v1(%(queue)s, %(reason)s::text, %(go_on)s::jsonb, %(limit)s)
"""

PURGE = """
    SELECT happened, waiting, ended, go_on::text FROM awa.purge_queue_v1(%(queue)s, %(go_on)s::jsonb, %(limit)s)
"""


def cancel_waiting(conn: Connection[Any], schema: Schema, queue: str, *, reason: str | None = None) -> int:
    """Cancel whatever of a queue is neither running nor ended, step by step; returns how many jobs.

    Raises:
        QueueBusy: Nothing could be done for some seconds; ``.done`` jobs were cancelled before.

    Source: migrations/0022_queue_control.sql.
    """
    return _clear(conn, schema, queue, CANCEL_WAITING, {"reason": reason}, "cancelled").waiting


def purge_queue(conn: Connection[Any], schema: Schema, queue: str) -> Purged:
    """Delete whatever of a queue is neither running nor completed, step by step.

    Raises:
        QueueBusy: Nothing could be done for some seconds; ``.done`` jobs were deleted before.

    Source: migrations/0022_queue_control.sql.
    """
    return _clear(conn, schema, queue, PURGE, {}, "deleted")


def _clear(conn: Connection[Any], schema: Schema, queue: str, text: str, params: dict[str, Any], done: str) -> Purged:
    waiting = ended = 0
    go_on = None
    last = time.monotonic()  # when a step has done something
    while True:
        began = time.monotonic()
        step = repeated(_step(conn, schema, text, params | {"queue": queue, "go_on": go_on, "limit": STEP}))
        now = time.monotonic()
        go_on = step["go_on"]
        waiting += step["waiting"]
        ended += step["ended"]
        if step["happened"] == "done":
            return Purged(waiting, ended)
        if step["happened"] == "more":
            last = now
            time.sleep(min(now - began, 0.02) / 2)  # the claims of the queue have their turn
            continue
        if now - last > PATIENCE:
            raise QueueBusy(
                f"{waiting + ended:,} jobs of queue {queue!a} were {done}; then claims held the queue, or another"
                f" transaction some of its jobs, for {PATIENCE:g} s: try again for the rest",
                queue=queue,
                done=waiting + ended,
            )
        time.sleep(0.02)


def _step(conn: Connection[Any], schema: Schema, text: str, params: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    def send() -> dict[str, Any]:
        try:
            with Cursor(conn, row_factory=dict_row) as cursor:
                read_committed(cursor, schema.sql(text), params)
                found = cursor.fetchone()
        except REFUSED as error:
            raise refusal(conn, schema, "worker", error) from error
        assert found is not None
        return found

    return send
