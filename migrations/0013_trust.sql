-- Trust: which cluster the rows belong to, and which entries are open whatever the frontiers say.
--
-- Adds a table of one row, which a worker reads when it connects, and functions that only read. Locks nothing that is
-- in use. Works with awa 0.1 and later; older workers do not look.
--
-- An entry carries the number of the transaction that wrote it, and a frontier is made of such numbers. In another
-- cluster they mean nothing: entries may lie behind the frontier, where no claim comes, or beyond what this server has
-- numbered so far. So the cluster and the database in which the numbers hold are written down. A physical copy (standby,
-- base backup, pg_upgrade, CREATE DATABASE ... TEMPLATE) keeps the numbers; a logical one (dump and restore,
-- replication) does not.

CREATE TABLE awa.origin (
    is_only           boolean     NOT NULL PRIMARY KEY DEFAULT true CHECK (is_only),
    system_identifier bigint      NOT NULL,    -- of the cluster, as pg_controldata shows it
    database_oid      oid         NOT NULL,
    recorded_at       timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Rows that are there already may have come from anywhere: then nothing is recorded, and the next worker looks.
INSERT INTO awa.origin (system_identifier, database_oid)
SELECT s.system_identifier, d.oid
  FROM pg_control_system() s
  JOIN pg_database d ON d.datname = current_database()
 WHERE NOT EXISTS (SELECT FROM awa.jobs) AND NOT EXISTS (SELECT FROM awa.claims)
   AND NOT EXISTS (SELECT FROM awa.frontiers);

-- The functions below read everything, so that what the frontiers say can be compared with what is there. They are
-- inlined, so the caller plans: with hash joins, since nobody analyzes the segments that are being filled; and in a
-- transaction that has locked the segments in ACCESS SHARE MODE before its snapshot, since a segment that is emptied
-- behind an old snapshot looks as if its claims were missing.

-- Whether a claim will still come to an entry, by the frontier of its lane (p_from NULL: never claimed from).
CREATE FUNCTION awa.lies_ahead(p_from pg_snapshot, p_to pg_snapshot, p_last_xid xid8, p_last_entry bigint, p_xid xid8,
                               p_entry bigint) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT p_from IS NULL
        OR NOT pg_visible_in_snapshot(p_xid, coalesce(p_to, p_from))
        OR (p_to IS NOT NULL AND NOT pg_visible_in_snapshot(p_xid, p_from)
            AND (p_xid, p_entry) > (p_last_xid, p_last_entry))
$$;

-- The entries that have neither been claimed nor ended, by anti-join. An end that quotes a claim ends that claim's
-- member; any other ends the entry of its number. The place is the row's ctid in its slot's partition.
CREATE FUNCTION awa.unclaimed_entries()
RETURNS TABLE (slot smallint, queue text, lane smallint, xid xid8, entry_id bigint, id bigint, place tid)
LANGUAGE sql STABLE AS $$
    WITH member AS MATERIALIZED (
        SELECT c.slot, c.claim_id, m.entry_id, m.xid
          FROM awa.claims c CROSS JOIN LATERAL unnest(c.entry_ids, c.xids) AS m(entry_id, xid)
    ), loose AS MATERIALIZED (
        SELECT e.slot, e.entry_id
          FROM awa.attempt_ends e
         WHERE NOT EXISTS (SELECT FROM member m
                            WHERE m.slot = e.slot AND m.claim_id = e.claim_id AND m.entry_id = e.entry_id)
    )
    SELECT j.slot, j.queue, j.lane, j.xid, j.entry_id, j.id, j.ctid
      FROM awa.jobs j
     WHERE NOT EXISTS (SELECT FROM member m WHERE m.slot = j.slot AND m.entry_id = j.entry_id AND m.xid = j.xid)
       AND NOT EXISTS (SELECT FROM loose l WHERE l.slot = j.slot AND l.entry_id = j.entry_id)
$$;

-- The attempts that are open: members of claims that have not ended.
CREATE FUNCTION awa.open_attempts()
RETURNS TABLE (slot smallint, runtime bigint, claim_id bigint, idx smallint, queue text, xid xid8, entry_id bigint)
LANGUAGE sql STABLE AS $$
    WITH completed AS MATERIALIZED (
        SELECT x.slot, x.claim_id, i.idx FROM awa.completions x CROSS JOIN LATERAL unnest(x.idx) AS i(idx)
    )
    SELECT c.slot, c.runtime, c.claim_id, m.idx::smallint, c.queue, m.xid, m.entry_id
      FROM awa.claims c
     CROSS JOIN LATERAL unnest(c.entry_ids, c.xids) WITH ORDINALITY AS m(entry_id, xid, idx)
     WHERE NOT EXISTS (SELECT FROM completed x
                        WHERE x.slot = c.slot AND x.claim_id = c.claim_id AND x.idx = m.idx)
       AND NOT EXISTS (SELECT FROM awa.attempt_ends e WHERE e.slot = c.slot AND e.entry_id = m.entry_id)
$$;
