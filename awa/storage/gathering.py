"""Gathering the statistics of attempts that have ended, from claims and their ends.

What is gathered is told in migrations/0027_statistics.sql. Up to :data:`LOOKED_AT` attempts of one statement are all
looked at. Of more, one in so many is, from every row that records some, at a random offset, and counts for its
neighbours in that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from psycopg import Connection, Cursor
from psycopg.errors import LockNotAvailable
from psycopg.rows import tuple_row

from awa.storage.schema import Schema
from awa.storage.statistics import BUCKETS, KEPT, OUTCOMES

LOOKED_AT = 2_000
"""Attempts that one statement looks at for their kind and their times, some more when they are in many small claims."""

# One look for a queue that has nothing new.
LIST_NEWS = """
    WITH RECURSIVE queues AS (
        (SELECT c.queue, 1 AS n FROM awa.claims c WHERE c.queue > %(after)s ORDER BY c.queue LIMIT 1)
        UNION ALL
        SELECT n.queue, q.n + 1
          FROM queues q
         CROSS JOIN LATERAL (SELECT c.queue FROM awa.claims c WHERE c.queue > q.queue ORDER BY c.queue LIMIT 1) n
         WHERE q.n < %(limit)s
    )
    SELECT q.queue, EXISTS (SELECT FROM awa.claims c
                             WHERE c.queue = q.queue
                               AND c.claim_id > coalesce((SELECT t.claim_id FROM awa.statistics_queues t
                                                           WHERE t.queue = q.queue), 0) OFFSET 0)
      FROM queues q
     ORDER BY q.queue
"""

_NEW_CLAIMS = """
        SELECT c.slot, c.claim_id, c.queue, c.lane, c.claimed_at, c.entry_ids, c.xids,
               cardinality(c.entry_ids) AS left_open, ARRAY[]::bigint[] AS flushes, ARRAY[]::bigint[] AS ended
          FROM unnest(%(queues)s::text[]) q(queue)
         CROSS JOIN LATERAL (SELECT coalesce((SELECT t.claim_id FROM awa.statistics_queues t
                                               WHERE t.queue = q.queue), 0) AS claim_id OFFSET 0) t
         CROSS JOIN LATERAL (SELECT * FROM awa.claims c
                              WHERE c.queue = q.queue AND c.claim_id > t.claim_id AND c.claim_id <= %(upto)s
                              ORDER BY c.claim_id LIMIT %(limit)s) c"""

# One whose row is gone lay in a segment that was emptied: all of it had ended.
_OPEN_CLAIMS = """
        SELECT o.slot, o.claim_id, o.queue, c.lane, c.claimed_at, c.entry_ids, c.xids,
               CASE WHEN c.claim_id IS NOT NULL THEN o.left_open ELSE 0 END AS left_open, o.flushes,
               o.entry_ids AS ended
          FROM (SELECT * FROM awa.statistics_claims t
                 WHERE t.claim_id > %(after)s ORDER BY t.claim_id LIMIT %(limit)s) o
          LEFT JOIN LATERAL (SELECT * FROM awa.claims c
                              WHERE c.slot = o.slot AND c.queue = o.queue AND c.claim_id = o.claim_id OFFSET 0) c
                 ON true"""


def _bucket(ms: str) -> str:
    # a little more, so that no power of two is rounded below itself
    bucket = f"least(1 + floor(ln({ms}) * {BUCKETS} / ln(2::float8) + 1e-9), 255)"
    return f"(CASE WHEN {ms} < 1 THEN 0 ELSE {bucket} END)::smallint"


def _sum(buckets: str, numbers: str) -> str:
    return f"""(
               SELECT array_agg(m.bucket ORDER BY m.bucket), array_agg(m.n ORDER BY m.bucket)
                 FROM (SELECT u.bucket, sum(u.n) AS n
                         FROM (SELECT * FROM unnest(s.{buckets}, s.{numbers})
                               UNION ALL
                               SELECT * FROM unnest(excluded.{buckets}, excluded.{numbers})) u(bucket, n)
                        GROUP BY u.bucket) m)"""


# ends: what has ended of the claims that are picked, and was not added before; one row for each row of completions, and
# for each claim, outcome and minute of attempt_ends. members: those that are looked at; each counts for as many as its
# row of ends has for each that is looked at. Arrays are unpacked once a row: every subscript of a compressed one would
# unpack it.
def _add(picked: str) -> str:
    return f"""
    WITH picked AS MATERIALIZED ({picked}
    ), ends AS MATERIALIZED (
        SELECT p.claim_id, p.slot, p.queue, p.lane, p.claimed_at, p.entry_ids, p.xids, x.flush,
               NULL::bigint[] AS ended, x.idx, x.elapsed_ms, 'completed' AS outcome,
               date_trunc('minute', x.completed_at, 'UTC') AS minute, cardinality(x.idx) AS n
          FROM picked p
         CROSS JOIN LATERAL (SELECT * FROM awa.completions x
                              WHERE x.slot = p.slot AND x.claim_id = p.claim_id OFFSET 0) x
         WHERE x.flush <> ALL (p.flushes)
        UNION ALL
        SELECT p.claim_id, p.slot, p.queue, p.lane, p.claimed_at, p.entry_ids, p.xids, NULL, e.ended, NULL,
               e.elapsed_ms, e.outcome, e.minute, e.n
          FROM picked p
         CROSS JOIN LATERAL (
               SELECT e.outcome, date_trunc('minute', e.ended_at, 'UTC') AS minute, array_agg(e.entry_id) AS ended,
                      array_agg(e.elapsed_ms) AS elapsed_ms, count(*)::integer AS n
                 FROM (SELECT * FROM awa.attempt_ends e
                        WHERE e.slot = p.slot AND e.claim_id = p.claim_id OFFSET 0) e
                WHERE e.entry_id <> ALL (p.ended)
                GROUP BY 1, 2) e
    ), counted AS MATERIALIZED (
        SELECT e.*, greatest(ceil(sum(e.n) OVER () / {LOOKED_AT}.0), 1)::integer AS stride
          FROM ends e
         WHERE e.outcome = ANY (%(outcomes)s)
    ), members AS MATERIALIZED (
        SELECT m.queue, m.kind, m.minute, m.outcome, {_bucket("m.wait_ms")} AS wait_bucket,
               {_bucket("m.run_ms")} AS run_bucket, sum(m.weight) AS n, bool_or(m.is_sampled) AS is_sampled,
               max(m.wait_ms) AS wait_max_ms, max(m.run_ms) AS run_max_ms
          FROM (SELECT c.queue, j.kind, c.minute, c.outcome, a.elapsed_ms[i]::float8 AS run_ms,
                       greatest(extract(epoch FROM c.claimed_at - j.available_at)::float8 * 1000, 0) AS wait_ms,
                       c.n::float8 / ((c.n - k.first) / k.stride + 1) AS weight, k.stride > 1 AS is_sampled
                  FROM counted c
                 CROSS JOIN LATERAL (SELECT least(c.stride, c.n) AS stride,
                                            1 + floor(random() * least(c.stride, c.n))::integer AS first OFFSET 0) k
                 CROSS JOIN LATERAL (SELECT c.entry_ids || ARRAY[]::bigint[] AS entry_ids,
                                            c.xids || ARRAY[]::xid8[] AS xids, c.idx || ARRAY[]::smallint[] AS idx,
                                            c.elapsed_ms || ARRAY[]::integer[] AS elapsed_ms OFFSET 0) a
                 CROSS JOIN LATERAL generate_series(k.first, c.n, k.stride) i
                 CROSS JOIN LATERAL (SELECT CASE WHEN c.ended IS NULL THEN a.idx[i]
                                                 ELSE array_position(a.entry_ids, c.ended[i]) END AS place OFFSET 0) p
                 CROSS JOIN LATERAL (SELECT a.xids[p.place] AS xid, a.entry_ids[p.place] AS entry_id OFFSET 0) e
                 CROSS JOIN LATERAL (SELECT j.kind, j.available_at FROM awa.jobs j
                                      WHERE j.slot = c.slot AND j.queue = c.queue AND j.lane = c.lane
                                        AND j.xid = e.xid AND j.entry_id = e.entry_id LIMIT 1) j) m
         GROUP BY 1, 2, 3, 4, 5, 6
    ), numbers AS (
        SELECT t.step, s.subject, date_trunc(t.step, s.minute, 'UTC') AS starts_at, s.name,
               {", ".join(f"coalesce(sum(s.n) FILTER (WHERE s.outcome = '{one}'), 0) AS {one}" for one in OUTCOMES)},
               bool_or(s.is_sampled) AS is_sampled
          FROM (SELECT 'queue' AS subject, c.queue AS name, c.minute, c.outcome, sum(c.n)::float8 AS n,
                       bool_or(c.stride > 1 AND c.n > 1) AS is_sampled
                  FROM counted c
                 GROUP BY 2, 3, 4
                UNION ALL
                SELECT 'kind', m.kind, m.minute, m.outcome, sum(m.n), bool_or(m.is_sampled)
                  FROM members m
                 GROUP BY 2, 3, 4) s
         CROSS JOIN (VALUES ('minute'), ('hour')) t(step)
         GROUP BY 1, 2, 3, 4
    ), times AS (
        SELECT b.step, b.subject, b.starts_at, b.name,
               max(b.most) FILTER (WHERE b.is_wait) AS wait_max_ms,
               max(b.most) FILTER (WHERE NOT b.is_wait) AS run_max_ms,
               array_agg(b.bucket ORDER BY b.bucket) FILTER (WHERE b.is_wait) AS wait_buckets,
               array_agg(b.n ORDER BY b.bucket) FILTER (WHERE b.is_wait) AS waits,
               array_agg(b.bucket ORDER BY b.bucket) FILTER (WHERE NOT b.is_wait) AS run_buckets,
               array_agg(b.n ORDER BY b.bucket) FILTER (WHERE NOT b.is_wait) AS runs
          FROM (SELECT t.step, s.subject, date_trunc(t.step, m.minute, 'UTC') AS starts_at, s.name, v.is_wait, v.bucket,
                       sum(m.n) AS n, max(v.most) AS most
                  FROM members m
                 CROSS JOIN (VALUES ('minute'), ('hour')) t(step)
                 CROSS JOIN LATERAL (VALUES ('queue', m.queue), ('kind', m.kind)) s(subject, name)
                 CROSS JOIN LATERAL (VALUES (true, m.wait_bucket, m.wait_max_ms),
                                            (false, m.run_bucket, m.run_max_ms)) v(is_wait, bucket, most)
                 WHERE v.bucket IS NOT NULL
                 GROUP BY 1, 2, 3, 4, 5, 6) b
         GROUP BY 1, 2, 3, 4
    ), added AS (
        INSERT INTO awa.statistics AS s (step, subject, starts_at, name, {", ".join(OUTCOMES)}, is_sampled,
                                         wait_max_ms, run_max_ms, wait_buckets, waits, run_buckets, runs)
        SELECT step, subject, starts_at, name, {", ".join(f"n.{one}" for one in OUTCOMES)}, n.is_sampled,
               t.wait_max_ms, t.run_max_ms, t.wait_buckets, t.waits, t.run_buckets, t.runs
          FROM numbers n
          LEFT JOIN times t USING (step, subject, starts_at, name)
            ON CONFLICT (step, subject, starts_at, name) DO UPDATE
           SET {", ".join(f"{one} = s.{one} + excluded.{one}" for one in OUTCOMES)},
               is_sampled = s.is_sampled OR excluded.is_sampled,
               wait_max_ms = greatest(s.wait_max_ms, excluded.wait_max_ms),
               run_max_ms = greatest(s.run_max_ms, excluded.run_max_ms),
               (wait_buckets, waits) = {_sum("wait_buckets", "waits")},
               (run_buckets, runs) = {_sum("run_buckets", "runs")}
    ), looked AS MATERIALIZED (
        SELECT p.claim_id, p.slot, p.queue, p.left_open - coalesce(e.n, 0) AS left_open, e.n IS NOT NULL AS has_news,
               coalesce(e.flushes, ARRAY[]::bigint[]) AS flushes, coalesce(m.ended, ARRAY[]::bigint[]) AS ended
          FROM picked p
          LEFT JOIN (SELECT e.claim_id, sum(e.n)::integer AS n,
                            array_agg(e.flush) FILTER (WHERE e.flush IS NOT NULL) AS flushes
                       FROM ends e
                      GROUP BY 1) e USING (claim_id)
          LEFT JOIN (SELECT e.claim_id, array_agg(m) AS ended
                       FROM ends e CROSS JOIN LATERAL unnest(e.ended) m
                      GROUP BY 1) m USING (claim_id)
    )"""


ADD_NEW = f"""{_add(_NEW_CLAIMS)}, remembered AS (
        INSERT INTO awa.statistics_claims (claim_id, slot, queue, left_open, flushes, entry_ids)
        SELECT l.claim_id, l.slot, l.queue, l.left_open, l.flushes, l.ended FROM looked l WHERE l.left_open > 0
    ), reached AS (
        INSERT INTO awa.statistics_queues AS t (queue, claim_id)
        SELECT l.queue, max(l.claim_id) FROM looked l GROUP BY l.queue
            ON CONFLICT (queue) DO UPDATE SET claim_id = excluded.claim_id
    )
    SELECT l.queue, count(*) FROM looked l GROUP BY l.queue
"""

ADD_OPEN = f"""{_add(_OPEN_CLAIMS)}, forgotten AS (
        DELETE FROM awa.statistics_claims t USING looked l WHERE t.claim_id = l.claim_id AND l.left_open <= 0
    ), remembered AS (
        UPDATE awa.statistics_claims t
           SET left_open = l.left_open, flushes = t.flushes || l.flushes, entry_ids = t.entry_ids || l.ended
          FROM looked l
         WHERE t.claim_id = l.claim_id AND l.left_open > 0 AND l.has_news
    )
    SELECT count(*), max(l.claim_id) FROM looked l
"""

# Whoever has it is the only one that adds; what it then reads, in statements of its own, says what was added before.
HOLD = "SELECT FROM awa.statistics_progress t FOR UPDATE NOWAIT"

# Planned so, every statement finds its rows by index, whatever the statistics say. Who has these tables to himself, as
# a VACUUM FULL, is not waited for: what else the leader does would wait too.
PLANNED = """
    SELECT set_config('lock_timeout', '200ms', true),
           set_config('plan_cache_mode', 'force_generic_plan', true), set_config('enable_seqscan', 'off', true),
           set_config('enable_bitmapscan', 'off', true), set_config('enable_memoize', 'off', true),
           set_config('max_parallel_workers_per_gather', '0', true), set_config('jit', 'off', true)
"""

BEGIN_ROUND = "SELECT clock_timestamp(), coalesce(pg_sequence_last_value('awa.claim_id_seq'), 0)"

END_ROUND = "UPDATE awa.statistics_progress t SET reached_at = greatest(t.reached_at, %(began)s)"

DELETE_OLD = """
    DELETE FROM awa.statistics t
     WHERE t.step = %(step)s AND t.subject = ANY (ARRAY['queue', 'kind'])
       AND t.starts_at < date_trunc(%(step)s, coalesce(%(now)s, clock_timestamp()) - interval '1 s' * %(kept)s::float8,
                                    'UTC')
"""


def begin_round(conn: Connection[Any], schema: Schema) -> tuple[datetime, int]:
    """The time, and the newest claim that anybody has begun."""
    [(now, newest)] = _rows(conn, schema, BEGIN_ROUND)
    return now, newest


def list_news(conn: Connection[Any], schema: Schema, *, after: str, limit: int) -> list[tuple[str, bool]]:
    """The next queues by name that have claims, and whether any of these is new."""
    return [(queue, is_new) for queue, is_new in _at_once(conn, schema, LIST_NEWS, after=after, limit=limit)]


def add_new(
    conn: Connection[Any], schema: Schema, queues: Sequence[str], *, upto: int, limit: int
) -> dict[str, int] | None:
    """Add what has ended of new claims, and remember them where some member has not.

    Args:
        upto: The newest claim to look at.
        limit: Most claims of each queue.

    Returns:
        How many claims of each queue; None when somebody else is adding, or has one of the tables to himself.
    """
    params = {"queues": list(queues), "upto": upto, "limit": limit, "outcomes": list(OUTCOMES)}
    try:
        return dict(_at_once(conn, schema, HOLD, ADD_NEW, **params))
    except LockNotAvailable:
        return None


def add_open(conn: Connection[Any], schema: Schema, *, after: int, limit: int) -> tuple[int, int] | None:
    """Add what has ended since of the next claims that are remembered.

    Returns:
        How many claims these were, and the last; None when somebody else is adding, or has a table to himself.
    """
    try:
        [(count, last)] = _at_once(conn, schema, HOLD, ADD_OPEN, after=after, limit=limit, outcomes=list(OUTCOMES))
    except LockNotAvailable:
        return None
    return count, last or 0


def end_round(conn: Connection[Any], schema: Schema, began: datetime) -> None:
    """Note that everything that had ended when the round *began* has been added."""
    _at_once(conn, schema, END_ROUND, began=began)


def delete_old(conn: Connection[Any], schema: Schema, *, now: datetime | None = None) -> None:
    """Delete what is older than its step is kept.

    Args:
        now: What to take for now; None: the database's clock.
    """
    for step, kept in KEPT.items():
        _at_once(conn, schema, DELETE_OLD, step=step, kept=kept.total_seconds(), now=now)


def _at_once(conn: Connection[Any], schema: Schema, *queries: str, **params: Any) -> list[tuple[Any, ...]]:
    """The rows of the last of *queries*, which has the *params*; all of them are one transaction, to autocommit.

    All of it is on its way before anything is answered, and commits at its end: a process that freezes leaves no
    transaction open.
    """
    with Cursor(conn, row_factory=tuple_row) as cursor:
        with conn.pipeline():
            conn.execute(PLANNED)
            for query in queries[:-1]:
                conn.execute(schema.sql(query))
            cursor.execute(schema.sql(queries[-1]), params)
        return cursor.fetchall() if cursor.description else []


def _rows(conn: Connection[Any], schema: Schema, query: str, **params: Any) -> list[tuple[Any, ...]]:
    with Cursor(conn, row_factory=tuple_row) as cursor:
        return cursor.execute(schema.sql(query), params).fetchall()
