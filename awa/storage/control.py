"""What operators do to one job: cancel, retry, reprioritise, move; and the requests that a cancel leaves behind."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from psycopg import Connection, Cursor
from psycopg.rows import class_row, dict_row, scalar_row

from awa.errors import JobBusy, JobNotFound, UniqueConflict
from awa.job import JobId, JobState
from awa.storage.jobs import REFUSED, not_found, refusal
from awa.storage.pooler import read_committed
from awa.storage.schema import Schema

if TYPE_CHECKING:
    from awa.storage.grants import Part


@dataclass(frozen=True, slots=True)
class Controlled:
    """What became of an operator's action on one job."""

    id: JobId
    """The job."""
    happened: Literal["cancelled", "requested", "retried", "reprioritised", "moved", "refused", "nothing"]
    """``cancelled``, ``retried``, ``reprioritised`` or ``moved``: it is. ``requested``: its running handler is told.
    ``refused``: not in this state. ``nothing``: there was nothing to do."""
    state: JobState
    """Its state now."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", JobState(self.state))


CANCEL = "SELECT happened, state FROM awa.cancel_v1(%(id)s::bigint, %(reason)s::text, %(force)s::boolean)"


def cancel_job(
    conn: Connection[Any], schema: Schema, job_id: int, *, reason: str | None = None, force: bool = False
) -> Controlled:
    """Cancel a job, in a transaction of its own at READ COMMITTED.

    Args:
        reason: Why, for its history.
        force: Whether to end a running attempt at once, instead of telling its handler.

    Raises:
        JobNotFound: There is none, or its history is gone.
        JobBusy: Somebody held it for a second; nothing was changed.

    Source: migrations/0010_control.sql.
    """
    return _control(conn, schema, job_id, CANCEL, {"reason": reason, "force": force}, part="producer")


HOLDER = "SELECT awa.holder_v1(%(key)s::bytea)"


def cancel_holder(
    conn: Connection[Any], schema: Schema, key: bytes, *, reason: str | None = None, force: bool = False
) -> Controlled:
    """Cancel the job that holds a unique key, as :func:`cancel_job` does.

    Raises:
        JobNotFound: No job holds it.
        JobBusy: Somebody held the job for a second; nothing was changed.

    Source: migrations/0017_unique.sql.
    """
    try:
        with Cursor(conn, row_factory=scalar_row) as cursor:
            read_committed(cursor, schema.sql(HOLDER), {"key": key})
            job_id = cursor.fetchone()
    except REFUSED as error:
        raise refusal(conn, schema, "producer", error) from error
    if job_id is None:
        raise JobNotFound(f"no job holds the unique key {key.hex()}", job_id=None)
    return cancel_job(conn, schema, job_id, reason=reason, force=force)


RETRY = "SELECT happened, state, existing_id, unique_key FROM awa.retry_v1(%(id)s::bigint)"


def retry_job(conn: Connection[Any], schema: Schema, job_id: int) -> Controlled:
    """Make a job available that has failed, was cancelled or waits for a time, in a transaction of its own.

    Returns:
        ``retried``; ``nothing`` when it is available already, or set aside; ``refused`` when it is running, has
        completed, or waits for something else than a time.

    Raises:
        UniqueConflict: It has ended, and another job holds its unique key; nothing was changed.
        JobNotFound: There is none, or its history is gone.
        JobBusy: Somebody held it for a second; nothing was changed.

    Source: migrations/0023_job_control.sql.
    """
    return _control(conn, schema, job_id, RETRY, {}, part="producer")


SET_PRIORITY = "SELECT happened, state FROM awa.set_priority_v1(%(id)s::bigint, %(priority)s::integer)"


def set_priority(conn: Connection[Any], schema: Schema, job_id: int, priority: int) -> Controlled:
    """Give a job that waits or is available another priority, in a transaction of its own at READ COMMITTED.

    Returns:
        ``reprioritised``; ``nothing`` when it had it before; ``refused`` when it is running or has ended.

    Raises:
        JobNotFound: There is none, or its history is gone.
        JobBusy: Somebody held it for a second; nothing was changed.

    Source: migrations/0023_job_control.sql.
    """
    return _control(conn, schema, job_id, SET_PRIORITY, {"priority": priority}, part="worker")


MOVE = "SELECT happened, state FROM awa.move_v1(%(id)s::bigint, %(queue)s::text)"


def move_job(conn: Connection[Any], schema: Schema, job_id: int, queue: str) -> Controlled:
    """Move a job that waits or is available to the end of *queue*, in a transaction of its own at READ COMMITTED.

    Returns:
        ``moved``; ``nothing`` when it was there already; ``refused`` when it is running or has ended.

    Raises:
        JobNotFound: There is none, or its history is gone.
        JobBusy: Somebody held it for a second; nothing was changed.

    Source: migrations/0023_job_control.sql.
    """
    return _control(conn, schema, job_id, MOVE, {"queue": queue}, part="worker")


def _control(
    conn: Connection[Any], schema: Schema, job_id: int, text: str, params: dict[str, Any], *, part: Part
) -> Controlled:
    try:
        with Cursor(conn, row_factory=dict_row) as cursor:
            read_committed(cursor, schema.sql(text), {"id": job_id} | params)
            found = cursor.fetchone()
    except REFUSED as error:
        raise refusal(conn, schema, part, error) from error
    assert found is not None
    if found["happened"] == "not_found":
        raise not_found(job_id)
    if found["happened"] == "busy":
        raise JobBusy(
            f"job {job_id}, which is {found['state']}, was held by another transaction for a second: nothing was "
            "changed, try again",
            job_id=job_id,
        )
    if found["happened"] == "conflict":
        key, existing = bytes(found["unique_key"]), found["existing_id"]
        raise UniqueConflict(
            f"job {job_id}, which is {found['state']}, has a unique key that job {existing} holds now ({key.hex()}): "
            "nothing was changed; cancel that one first, or leave this one as it is",
            existing_id=existing,
            key=key,
        )
    return Controlled(id=JobId(job_id), happened=found["happened"], state=found["state"])


@dataclass(frozen=True, slots=True)
class Requested:
    """What is asked of a runtime at one moment."""

    is_quiet: bool
    """To claim nothing."""
    to_cancel: list[int]
    """The entries whose attempts are to end."""


REQUESTS = """
    SELECT coalesce((SELECT r.quiet_at IS NOT NULL FROM awa.runtime_instances r WHERE r.id = %(runtime)s),
                    false) AS is_quiet,
           ARRAY(SELECT c.entry_id FROM awa.cancel_requests c WHERE c.runtime = %(runtime)s) AS to_cancel
"""


def read_requests(conn: Connection[Any], schema: Schema, runtime: int) -> Requested:
    """What somebody asked of *runtime*. Two looks by index, and no lock."""
    with Cursor(conn, row_factory=class_row(Requested)) as cursor:
        found = cursor.execute(schema.sql(REQUESTS), {"runtime": runtime}).fetchone()
    assert found is not None
    return found


# One whose attempt is open stays: whatever ends it must find the request.
FORGET = """
    DELETE FROM awa.cancel_requests r
     WHERE r.runtime = %(runtime)s AND r.entry_id = ANY (%(entries)s::bigint[])
       AND (EXISTS (SELECT FROM awa.completions x
                     WHERE x.slot = r.slot AND x.claim_id = r.claim_id AND r.idx = ANY (x.idx) OFFSET 0)
            OR EXISTS (SELECT FROM awa.attempt_ends e WHERE e.slot = r.slot AND e.entry_id = r.entry_id OFFSET 0)
            OR NOT EXISTS (SELECT FROM awa.claims c
                            WHERE c.slot = r.slot AND c.runtime = r.runtime AND c.claim_id = r.claim_id OFFSET 0))
"""


def forget_requests(conn: Connection[Any], schema: Schema, runtime: int, entries: Collection[int]) -> None:
    """Remove the requests for *entries*, as far as their attempts have ended.

    They ended before they were told, as completed; or were ended by force, and have been told.
    """
    conn.execute(schema.sql(FORGET), {"runtime": runtime, "entries": list(entries)})
