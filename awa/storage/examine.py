"""What ``awa doctor`` reads: small questions, each in a short transaction of its own that may not take long.

None of them counts a large table: what can be many is counted by index up to a limit, and sizes are the server's own
estimates.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import Connection
from psycopg.rows import namedtuple_row

from awa.errors import AwaError
from awa.storage.connection import OwnConnection
from awa.storage.queues import COUNT_AVAILABLE
from awa.storage.schema import Schema

COUNTED = 1_000
"""Most jobs that are counted of a queue."""

LISTED = 100
"""Most queues, kinds or names that are told."""

# Nothing here may write, wait for long, or be planned as if the tables were small: nobody may have analyzed them.
BEGIN = """
    BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY;
    SET LOCAL statement_timeout = {timeout};
    SET LOCAL lock_timeout = {timeout};
    SET LOCAL enable_seqscan = off;
    SET LOCAL enable_bitmapscan = off;
    SET LOCAL max_parallel_workers_per_gather = 0;
    SET LOCAL jit = off
"""

BEGIN_BARE = "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY"


class OutOfTime(AwaError):
    """All questions together have taken as long as they may."""


class Probe:
    """Asks one question after another.

    Args:
        conn: In autocommit mode, with no transaction open.
        seconds: What one question may take.
        total: What all of them may take.
    """

    def __init__(self, conn: Connection[Any], schema: Schema, *, seconds: float, total: float) -> None:
        self.conn = conn
        self.schema = schema
        self._seconds = seconds
        self._until = time.monotonic() + total

    @property
    def seconds(self) -> float:
        """What the next question may take.

        Raises:
            OutOfTime: There is no time left.
        """
        left = min(self._seconds, self._until - time.monotonic())
        if left < 0.01:
            raise OutOfTime("there is no time left")
        return left

    @contextmanager
    def transaction(self, *, is_bare: bool = False) -> Iterator[Connection[Any]]:
        """The connection in a transaction that changes nothing and is undone.

        Args:
            is_bare: Leave the session's settings as they are, to look at them; for what cannot take long.
        """
        seconds = self.seconds
        before = self.conn.answer_within if isinstance(self.conn, OwnConnection) else None
        if isinstance(self.conn, OwnConnection):
            self.conn.answer_within = seconds + 3.0  # of a server that does not answer at all
        try:
            self.conn.execute(BEGIN_BARE if is_bare else BEGIN.format(timeout=max(round(seconds * 1000), 1)))
            yield self.conn
        finally:
            if not self.conn.closed:
                self.conn.execute("ROLLBACK")
            if isinstance(self.conn, OwnConnection):
                self.conn.answer_within = before

    def rows(self, query: str, *, is_bare: bool = False, **params: Any) -> list[Any]:
        """What *query*, written for the schema ``awa``, finds: rows whose columns are attributes."""
        with self.transaction(is_bare=is_bare) as conn, conn.cursor(row_factory=namedtuple_row) as cursor:
            return cursor.execute(self.schema.sql(query), params, prepare=False).fetchall()

    def row(self, query: str, **params: Any) -> Any:
        """The one row that *query* gives."""
        [found] = self.rows(query, **params)
        return found


# --- the server

SERVER = """
    SELECT current_setting('server_version') AS version, current_setting('server_version_num')::integer AS number,
           pg_is_in_recovery() AS is_standby, current_setting('default_transaction_read_only') = 'on' AS is_read_only,
           current_user AS role, current_database() AS database
"""

CONNECTIONS = """
    SELECT (SELECT sum(s.numbackends) FROM pg_stat_database s)::integer AS used,
           current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer
               AS most,
           (SELECT s.numbackends FROM pg_stat_database s WHERE s.datname = d.datname) AS used_here, d.datconnlimit,
           (SELECT r.rolconnlimit FROM pg_roles r WHERE r.rolname = current_user) AS rolconnlimit,
           (SELECT count(*) FROM pg_stat_activity a WHERE a.usename = current_user)::integer AS used_by_role
      FROM pg_database d WHERE d.datname = current_database()
"""

NOW = "SELECT extract(epoch FROM clock_timestamp())::double precision AS now"

SETTINGS = """
    SELECT s.name, current_setting(s.name) AS value, s.boot_val, s.source
      FROM pg_settings s WHERE s.name = ANY (%(names)s)
"""

# What roles and databases say beside the server: a worker's role may have other values than the one that asks.
ROLE_SETTINGS = """
    SELECT d.datname AS database, r.rolname AS role, split_part(c, '=', 1) AS name,
           substr(c, strpos(c, '=') + 1) AS value
      FROM pg_db_role_setting s
      LEFT JOIN pg_database d ON d.oid = s.setdatabase
      LEFT JOIN pg_roles r ON r.oid = s.setrole
     CROSS JOIN LATERAL unnest(s.setconfig) c
     WHERE (s.setdatabase = 0 OR d.datname = current_database()) AND split_part(c, '=', 1) = ANY (%(names)s)
     ORDER BY 1 NULLS FIRST, 2 NULLS FIRST, 3
"""

QUEUE_USAGE = "SELECT pg_notification_queue_usage() AS used"

NOTIFY = "SELECT pg_notify(%(channel)s, %(payload)s)"


def round_trip(conn: Connection[Any], listener: Connection[Any], channel: str, *, seconds: float) -> float | None:
    """Seconds from a NOTIFY on *conn* until *listener* hears it; None when it does not in time.

    Args:
        channel: One that nobody else uses, of letters, digits and ``_``.
    """
    listener.execute(f"LISTEN {channel}")
    began = time.monotonic()
    with conn.transaction():  # the time-out holds for its commit too, where a NOTIFY waits for all others
        conn.execute(f"SET LOCAL statement_timeout = {max(round(seconds * 1000), 1)}")
        conn.execute(NOTIFY, {"channel": channel, "payload": ""}, prepare=False)
    for _ in listener.notifies(timeout=seconds, stop_after=1):
        return time.monotonic() - began
    return None


# --- what holds old rows and segments

# A transaction that writes holds back the snapshots of every database, one that reads those of its own. Of sessions of
# others a role without pg_read_all_stats sees the snapshot, and not since when.
TRANSACTIONS = """
    SELECT a.pid, a.usename AS role, a.datname AS database, a.application_name AS application, a.state,
           extract(epoch FROM clock_timestamp() - a.xact_start)::double precision AS seconds,
           greatest(age(a.backend_xmin), age(a.backend_xid)) AS behind, a.backend_type = 'walsender' AS is_standby
      FROM pg_stat_activity a
     WHERE a.pid <> pg_backend_pid() AND coalesce(a.backend_type, '') <> 'autovacuum worker'
       AND (a.datname = current_database() OR a.backend_xid IS NOT NULL OR a.backend_type = 'walsender')
       AND (a.xact_start < clock_timestamp() - %(seconds)s * interval '1 s'
            OR (a.xact_start IS NULL AND greatest(age(a.backend_xmin), age(a.backend_xid)) > %(behind)s))
     ORDER BY a.xact_start NULLS LAST, behind DESC
     LIMIT 20
"""

HIDDEN = """
    SELECT count(*)::integer AS sessions
      FROM pg_stat_activity a WHERE a.datname = current_database() AND a.query = '<insufficient privilege>'
"""

PREPARED = """
    SELECT p.gid, p.owner AS role, p.database, p.database = current_database() AS is_here,
           extract(epoch FROM clock_timestamp() - p.prepared)::double precision AS seconds
      FROM pg_prepared_xacts p
     WHERE p.prepared < clock_timestamp() - %(seconds)s * interval '1 s'
     ORDER BY p.prepared
     LIMIT 20
"""

SLOTS = """
    SELECT s.slot_name AS name, s.active AS is_active, greatest(age(s.xmin), age(s.catalog_xmin)) AS behind,
           s.xmin IS NOT NULL AS holds_rows,
           CASE WHEN NOT pg_is_in_recovery()
                THEN pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn)::bigint END AS wal_bytes
      FROM pg_replication_slots s ORDER BY s.slot_name
"""

_RING_TABLE = "c.relname ~ '^(jobs|claims|completions|attempt_ends)(_[0-7])?$'"

DEAD_ROWS = f"""
    SELECT c.relname AS table, s.n_dead_tup AS dead, s.n_live_tup AS live,
           greatest(s.last_autovacuum, s.last_vacuum) AS vacuumed_at
      FROM pg_class c JOIN pg_stat_all_tables s ON s.relid = c.oid
     WHERE c.relnamespace = '"awa"'::regnamespace AND c.relkind = 'r' AND NOT {_RING_TABLE}
     ORDER BY s.n_dead_tup DESC
"""

NOT_VACUUMED = f"""
    SELECT c.relname AS table
      FROM pg_class c
     WHERE c.relnamespace = '"awa"'::regnamespace AND c.relkind = 'r' AND NOT {_RING_TABLE}
       AND coalesce(c.reloptions, '{{}}') && '{{autovacuum_enabled=off,autovacuum_enabled=false}}'
     ORDER BY 1
"""

AGES = """
    SELECT d.datname AS database, age(d.datfrozenxid) AS xids, mxid_age(d.datminmxid) AS multixacts,
           current_setting('autovacuum_freeze_max_age')::bigint AS most
      FROM pg_database d ORDER BY greatest(age(d.datfrozenxid), mxid_age(d.datminmxid)) DESC LIMIT 1
"""

SEQUENCES = """
    SELECT c.relname AS name, coalesce(pg_sequence_last_value(c.oid), 0) AS last, s.seqmax AS most
      FROM pg_class c JOIN pg_sequence s ON s.seqrelid = c.oid
     WHERE c.relnamespace = '"awa"'::regnamespace AND c.relname <> 'ring_seq'
     ORDER BY pg_sequence_last_value(c.oid)::numeric / s.seqmax DESC NULLS LAST
"""


def available_in_slot(slot: int) -> str:
    """The statement that counts, for ``queues`` up to ``limit``, what is available of them in one slot."""
    return COUNT_AVAILABLE.replace("FROM awa.jobs j", f"FROM awa.jobs_{slot} j")


# --- workers

RUNTIMES = """
    SELECT r.id, r.hostname, r.pid, r.version, r.heartbeat_ms / 1000.0::double precision AS heartbeat,
           greatest(extract(epoch FROM clock_timestamp() - r.last_seen_at), 0)::double precision AS silent,
           extract(epoch FROM clock_timestamp() - r.started_at)::double precision AS age,
           extract(epoch FROM clock_timestamp() - g.gone_at)::double precision AS gone,
           EXISTS (SELECT FROM awa.live_runtimes l WHERE l.id = r.id) AS is_live,
           r.quiet_at IS NOT NULL AS is_quiet, r.health,
           ARRAY(SELECT q->>'name'
                   FROM json_array_elements(CASE WHEN json_typeof(r.queues) = 'array' THEN r.queues END) q
                  WHERE q->>'name' IS NOT NULL) AS queues
      FROM awa.runtime_instances r
      LEFT JOIN awa.gone_runtimes g ON g.runtime = r.id
     WHERE r.ended_at IS NULL
     ORDER BY r.id
"""

LEADER = """
    SELECT l.runtime, extract(epoch FROM l.expires_at - clock_timestamp())::double precision AS left,
           extract(epoch FROM clock_timestamp() - l.acquired_at)::double precision AS held
      FROM awa.leases l WHERE l.name = %(name)s
"""

# --- queues

PAUSED = """
    SELECT m.queue, m.paused_by AS by, m.pause_reason AS reason,
           extract(epoch FROM clock_timestamp() - m.paused_at)::double precision AS seconds
      FROM awa.queue_meta m WHERE m.paused_at IS NOT NULL ORDER BY m.queue
"""

# Kind by kind through the index, whatever waits of each.
SET_ASIDE = """
    WITH RECURSIVE kinds AS (
        (SELECT w.queue, w.wait_key FROM awa.waiting_jobs w
          WHERE w.waits_for = 'kind' ORDER BY w.queue, w.wait_key LIMIT 1)
        UNION ALL
        SELECT n.queue, n.wait_key
          FROM kinds k
         CROSS JOIN LATERAL (SELECT w.queue, w.wait_key FROM awa.waiting_jobs w
                              WHERE w.waits_for = 'kind' AND (w.queue, w.wait_key) > (k.queue, k.wait_key)
                              ORDER BY w.queue, w.wait_key LIMIT 1) n
    ), serving AS MATERIALIZED (
        SELECT l.id, q->>'name' AS queue, l.kinds
          FROM awa.live_runtimes l CROSS JOIN LATERAL json_array_elements(l.queues) q
         WHERE l.quiet_at IS NULL
    )
    SELECT k.queue, k.wait_key AS kind, c.jobs,
           EXISTS (SELECT FROM serving s CROSS JOIN LATERAL json_array_elements_text(s.kinds) e(kind)
                    WHERE s.queue = k.queue AND e.kind = k.wait_key) AS is_handled,
           EXISTS (SELECT FROM serving s WHERE s.queue = k.queue AND s.kinds IS NULL) AS is_unknown
      FROM (SELECT * FROM kinds LIMIT %(listed)s) k
     CROSS JOIN LATERAL (SELECT count(*)::integer AS jobs
                           FROM (SELECT FROM awa.waiting_jobs w
                                  WHERE w.waits_for = 'kind' AND w.queue = k.queue AND w.wait_key = k.wait_key
                                  LIMIT %(limit)s) t) c
"""

OVERDUE = """
    SELECT count(*)::integer AS jobs, max(t.seconds) AS seconds
      FROM (SELECT extract(epoch FROM clock_timestamp() - w.run_at)::double precision AS seconds
              FROM awa.waiting_jobs w
             WHERE w.waits_for = 'time' AND w.run_at > '-infinity'
               AND w.run_at < (SELECT clock_timestamp() - %(seconds)s * interval '1 s')
             ORDER BY w.run_at LIMIT %(limit)s) t
"""

KEYS = "SELECT greatest(c.reltuples, 0)::bigint AS rows FROM pg_class c WHERE c.oid = 'awa.job_uniques'::regclass"

# Keys are hashes, so those that follow any one are a fair sample. A key is loose whose job is neither where its row
# says nor waits nor has ended in a state that holds it; a job that was carried on counts as loose here, so it is the
# share that matters.
LOOSE_KEYS = """
    SELECT count(*)::integer AS keys,
           (count(*) FILTER (WHERE NOT EXISTS (SELECT FROM awa.waiting_jobs w WHERE w.id = u.id OFFSET 0)
                               AND NOT EXISTS (SELECT FROM awa.ended_jobs e
                                                WHERE e.id = u.id AND u.states & awa.state_bit(e.state) > 0 OFFSET 0)
                               AND NOT EXISTS (SELECT FROM awa.jobs j
                                                WHERE j.slot = u.slot AND j.queue = u.queue AND j.lane = u.lane
                                                  AND j.xid = u.xid AND j.entry_id = u.entry_id OFFSET 0)))::integer
               AS loose
      FROM (SELECT * FROM awa.job_uniques u WHERE u.key > %(start)s ORDER BY u.key LIMIT 1000) u
"""


def second_connection(conn: Connection[Any]) -> Connection[Any]:
    """Another connection to where *conn* leads, in autocommit mode."""
    return psycopg.connect(
        conn.info.dsn,
        password=conn.info.password or None,
        autocommit=True,
        connect_timeout=5,
        fallback_application_name="awa doctor",
    )
