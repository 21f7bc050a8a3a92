"""What test helpers ask of a test's database and no worker asks: which jobs there are at all, and that time passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psycopg import Connection, Cursor
from psycopg.rows import class_row, scalar_row

from awa.storage.jobs import REFUSED, JobInfo, refusal
from awa.storage.rows import read_anything
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
LIST_QUEUES = "SELECT queue FROM awa.jobs UNION SELECT queue FROM awa.waiting_jobs ORDER BY 1"


def list_queues(conn: Connection[Any], schema: Schema) -> list[str]:
    """Every queue that has, or lately had, a job, by name."""
    with Cursor(conn, row_factory=scalar_row) as cursor:
        return [str(name) for name in cursor.execute(schema.sql(LIST_QUEUES))]


LIST_JOBS = """
    SELECT f.id, f.queue, f.kind, f.state, f.priority, f.attempt, f.max_attempts, f.args, f.metadata,
           coalesce(f.tags, '{}') AS tags, f.created_at, f.run_at, f.claimed_at, f.ended_at, f.elapsed_ms, f.runtime,
           f.hostname, f.pid, f.waits_for, f.error, coalesce(f.history, '[]') AS history
      FROM (SELECT id FROM awa.jobs WHERE %(kinds)s::text[] IS NULL OR kind = ANY (%(kinds)s::text[])
             UNION
            SELECT id FROM awa.waiting_jobs WHERE %(kinds)s::text[] IS NULL OR kind = ANY (%(kinds)s::text[])
             UNION
            SELECT id FROM awa.ended_jobs WHERE %(kinds)s::text[] IS NULL OR kind = ANY (%(kinds)s::text[])
             ORDER BY id DESC LIMIT %(limit)s) j
     CROSS JOIN LATERAL awa.find_job_v2(j.id) f
     ORDER BY j.id
"""


def list_jobs(
    conn: Connection[Any], schema: Schema, *, kinds: Sequence[str] | None = None, limit: int
) -> list[JobInfo]:
    """The newest *limit* jobs of *kinds* (None: of all), in whatever state, as the transaction of *conn* sees them.

    In the order of their inserts. It reads whole tables, as a test's are.
    """
    try:
        with Cursor(conn, row_factory=class_row(JobInfo)) as cursor:
            read_anything(cursor)
            asked = {"kinds": None if kinds is None else list(kinds), "limit": limit}
            return cursor.execute(schema.sql(LIST_JOBS), asked).fetchall()
    except REFUSED as error:
        raise refusal(conn, schema, "reader", error) from error
