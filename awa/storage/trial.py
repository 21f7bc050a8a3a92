"""What test helpers ask of a test's database and no worker asks: which jobs there are at all, and that time passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from psycopg import Connection, Cursor
from psycopg.rows import scalar_row

from awa.lent import Driver
from awa.storage import drivers
from awa.storage.jobs import REFUSED, JobInfo, refusal
from awa.storage.rows import EARLIEST, LATEST, load_json
from awa.storage.schema import Schema

ADVANCE = """
    UPDATE awa.waiting_jobs
       SET run_at = run_at - %(seconds)s * interval '1 s', expires_at = expires_at - %(seconds)s * interval '1 s'
     WHERE isfinite(run_at) OR expires_at IS NOT NULL
"""


def advance(conn: Connection[Any], schema: Schema, seconds: float) -> None:
    """Bring the times of everything that waits closer by *seconds*."""
    conn.execute(schema.sql(ADVANCE), {"seconds": seconds})


# A microsecond apart, in the order in which they would have become due.
MAKE_DUE = """
    UPDATE awa.waiting_jobs w
       SET run_at = d.run_at
      FROM (SELECT t.id, clock.now - (count(*) OVER () - row_number() OVER (ORDER BY t.run_at, t.id))
                                     * interval '1 microsecond' AS run_at
              FROM awa.waiting_jobs t CROSS JOIN (SELECT clock_timestamp() AS now OFFSET 0) clock
             WHERE t.waits_for = 'time' AND t.run_at > clock.now AND t.kind = ANY (%(kinds)s::text[])
               AND (%(queue)s::text IS NULL OR t.queue = %(queue)s::text)) d
     WHERE w.id = d.id
"""


def make_due(conn: Connection[Any], schema: Schema, *, queue: str | None, kinds: Sequence[str]) -> None:
    """Let the time come for everything of *queue* (None: of all) and *kinds* that waits for it."""
    conn.execute(schema.sql(MAKE_DUE), {"queue": queue, "kinds": list(kinds)})


# Also queues whose jobs have all ended: a claim of one is soon told that it is empty.
LIST_QUEUES = """
    SELECT queue FROM awa.jobs UNION SELECT queue FROM awa.waiting_jobs UNION SELECT queue FROM awa.ended_jobs
     ORDER BY 1
"""


def list_queues(conn: Connection[Any], schema: Schema) -> list[str]:
    """Every queue that has, or had, a job, by name."""
    with Cursor(conn, row_factory=scalar_row) as cursor:
        return [str(name) for name in cursor.execute(schema.sql(LIST_QUEUES))]


COUNT_ENDED = "SELECT count(*) FROM awa.ended_jobs"


def count_ended(conn: Connection[Any], schema: Schema) -> int:
    """How many jobs have ended without completing."""
    with Cursor(conn, row_factory=scalar_row) as cursor:
        return int(cursor.execute(schema.sql(COUNT_ENDED)).fetchone() or 0)


# As text: a lent connection may be of any driver, with types of its owner's.
LIST_JOBS = """
    SELECT row_to_json(f)::text
      FROM (SELECT id FROM awa.jobs UNION SELECT id FROM awa.waiting_jobs UNION SELECT id FROM awa.ended_jobs
             ORDER BY id DESC LIMIT %(limit)s::integer) j
     CROSS JOIN LATERAL awa.find_job_v3(j.id) f
     ORDER BY j.id
"""

_REFUSED = {error.sqlstate for error in REFUSED}
_FIELDS = tuple(one.name for one in fields(JobInfo))


def list_jobs(conn: Driver, schema: Schema, *, limit: int) -> list[JobInfo]:
    """The newest *limit* jobs, in whatever state, as the transaction of *conn* sees them, oldest first.

    It reads whole tables, as a test's are.
    """
    try:
        found = drivers.rows(conn, schema.sql(LIST_JOBS), {"limit": limit})
    except Exception as error:  # of whichever driver
        if drivers.sqlstate(error) in _REFUSED:
            raise refusal(conn, schema, "reader", error) from error
        raise
    return [_job(text) for (text,) in found]


def _job(text: str) -> JobInfo:
    told = load_json(text)
    row = {name: told.get(name) for name in _FIELDS}
    for name in ("expires_at", "created_at", "run_at", "claimed_at", "ended_at"):
        row[name] = None if row[name] is None else _instant(row[name])
    return JobInfo(**row | {"tags": row["tags"] or [], "history": row["history"] or []})


def _instant(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        return EARLIEST if text.startswith("-") or text.endswith("BC") else LATEST
