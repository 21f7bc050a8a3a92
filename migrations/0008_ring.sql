-- The ring turns: segments are sealed, looked through and emptied as a whole; what still waits is carried forward.
--
-- Adds a small table, functions, and indexes on ended_jobs, which hold off the recording of failed and cancelled jobs
-- while they are built. Works with awa 0.1 and later.
--
-- Who may be in the way of whom:
-- - A producer or a worker that read the old slot just before a turn writes into a sealed segment. That is no harm:
--   such an entry is found through the same index as any other, and holds prune off until it has ended.
-- - Rotate and prune take the ring's lock, which is only tried.
-- - Prune locks the four tables of one slot against writers, counts, then against readers. All of it is tried for
--   some milliseconds. Claims read every slot, so they stand behind the last step, for as long as the tries last. A
--   statement takes its locks before its snapshot, so a claim that stood there sees the checkpoint of the frontier.

CREATE TABLE awa.ring (
    slot      smallint    NOT NULL PRIMARY KEY CHECK (slot BETWEEN 0 AND 7),
    opened_at timestamptz,  -- when the ring turned to it; NULL: it is empty, but for what was written late
    sealed_at timestamptz   -- when the ring turned away from it; NULL: it is the current one, or empty
);
INSERT INTO awa.ring (slot, opened_at)
SELECT n, CASE WHEN n = pg_sequence_last_value('awa.ring_seq') THEN now() END FROM generate_series(0, 7) n;

CREATE INDEX ended_jobs_ended ON awa.ended_jobs (ended_at) WHERE dead_reason IS NULL;
CREATE INDEX ended_jobs_dead ON awa.ended_jobs (ended_at) WHERE dead_reason IS NOT NULL;

-- Turn the ring to an empty slot, if there is one, and seal the current one. Returns the new slot; NULL when no slot
-- is empty or somebody else is at it, and nothing changes.
--
-- The sequence is set, never advanced: a crash or a failover moves an advanced one up to 32 values ahead, into a slot
-- that may be full. What awa.ring says comes second; maintenance puts it right after a crash in between.
CREATE FUNCTION awa.rotate_v1() RETURNS smallint LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_current smallint;
    v_slot smallint;
    v_bytes bigint;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('awa.ring', 0)) THEN
        RETURN NULL;
    END IF;
    v_current := pg_sequence_last_value('awa.ring_seq');
    FOR v_step IN 1..7 LOOP
        v_slot := (v_current + v_step) % 8;
        SELECT sum(pg_relation_size(format('awa.%s_%s', t, v_slot)::regclass)) INTO v_bytes
          FROM unnest(ARRAY['jobs', 'claims', 'completions', 'attempt_ends']) t;
        IF v_bytes = 0 THEN
            PERFORM setval('awa.ring_seq', v_slot);
            UPDATE awa.ring r
               SET opened_at = CASE WHEN r.slot = v_slot THEN clock_timestamp() ELSE r.opened_at END,
                   sealed_at = CASE WHEN r.slot = v_slot THEN NULL
                                    WHEN r.slot = v_current THEN clock_timestamp() ELSE r.sealed_at END
             WHERE r.slot IN (v_slot, v_current);
            RETURN v_slot;
        END IF;
    END LOOP;
    RETURN NULL;
END $$;

-- How far a queue has been claimed: the newer of its newest claim row and its checkpoint.
CREATE FUNCTION awa.frontier_of(p_queue text) RETURNS awa.lane_frontier[] LANGUAGE sql STABLE AS $$
    SELECT u.frontier
      FROM ((SELECT c.claim_id, c.frontier FROM awa.claims c WHERE c.queue = p_queue ORDER BY c.claim_id DESC LIMIT 1)
            UNION ALL
            SELECT t.claim_id, t.frontier FROM awa.frontiers t WHERE t.queue = p_queue) u
     ORDER BY u.claim_id DESC LIMIT 1
$$;

-- Up to p_limit entries of a queue that nobody has claimed and that have not ended, in walk order; of one slot or lane
-- only, when these are given. Committed ones: what an open transaction is writing is not listed, nor what the calling
-- one has written. Unless the caller holds the queue's claim lock, some may be claimed at this moment.
CREATE FUNCTION awa.unclaimed(p_queue text, p_limit integer, p_slot smallint DEFAULT NULL, p_lane smallint DEFAULT NULL)
RETURNS TABLE (slot smallint, lane smallint, xid xid8, entry_id bigint)
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_frontier awa.lane_frontier[] := awa.frontier_of(p_queue);
    v_now pg_snapshot := awa.page_end();
    v_left integer := p_limit;
    v_count integer;
    f awa.lane_frontier;
    r record;
    w record;
BEGIN
    FOR v_lane IN 2..9 LOOP
        CONTINUE WHEN v_lane <> p_lane;
        f := ROW(v_lane, '1:1:'::pg_snapshot, NULL, NULL, NULL)::awa.lane_frontier;
        FOR v_n IN 1..coalesce(cardinality(v_frontier), 0) LOOP
            IF v_frontier[v_n].lane = v_lane THEN
                f := v_frontier[v_n];
            END IF;
        END LOOP;
        FOR w IN
            SELECT f.page_from AS page_from, f.page_to AS page_to, f.last_xid AS xid, f.last_entry AS entry
             WHERE f.page_to IS NOT NULL
            UNION ALL
            SELECT coalesce(f.page_to, f.page_from), v_now, '0', 0
        LOOP
            r := awa.page_ranges(w.page_from, w.page_to, w.xid, w.entry);
            RETURN QUERY
                SELECT e.slot, e.lane, e.xid, e.entry_id
                  FROM unnest(r.lo_xid, r.lo_entry, r.hi_xid, r.hi_entry) AS u(lo_xid, lo_entry, hi_xid, hi_entry)
                 CROSS JOIN LATERAL (
                       SELECT j.slot, j.lane, j.xid, j.entry_id
                         FROM awa.jobs j
                        WHERE j.queue = p_queue AND j.lane = v_lane
                          AND (j.xid, j.entry_id) > (u.lo_xid, u.lo_entry)
                          AND (j.xid, j.entry_id) < (u.hi_xid, u.hi_entry)
                          AND pg_visible_in_snapshot(j.xid, w.page_to)
                          AND (p_slot IS NULL OR j.slot = p_slot)
                          AND NOT EXISTS (SELECT FROM awa.attempt_ends t
                                           WHERE t.slot = j.slot AND t.entry_id = j.entry_id OFFSET 0)
                        ORDER BY j.xid, j.entry_id
                        LIMIT v_left) e
                 LIMIT v_left;
            GET DIAGNOSTICS v_count = ROW_COUNT;
            v_left := v_left - v_count;
            IF v_left <= 0 THEN
                RETURN;
            END IF;
        END LOOP;
    END LOOP;
END $$;

-- Append the unclaimed entries that a queue has in a sealed slot again, to the express lanes of the current slot, so
-- that they do not hold the old slot. Each ends as 'carried'. Up to p_limit in walk order; an express lane is carried
-- whole, also what it has in other slots, or its order would change: what is appended comes behind what lies there.
-- (A lane of more than p_limit loses its order.) Returns how many were carried, -1 when a claim was in the way.
--
-- The look comes after the claim lock, in a statement of its own: before, an open claim is invisible.
CREATE FUNCTION awa.carry_v1(p_slot smallint, p_queue text, p_limit integer) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
DECLARE
    v_slots smallint[] := '{}';
    v_lanes smallint[] := '{}';
    v_xids xid8[] := '{}';
    v_entries bigint[] := '{}';
    v_left integer := p_limit;
    r record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.carry needs READ COMMITTED: an older snapshot would carry what is claimed'
              USING ERRCODE = 'AWA02';
    END IF;
    IF NOT pg_try_advisory_xact_lock(hashtextextended('awa.queue:' || p_queue, 0)) THEN
        RETURN -1;
    END IF;
    FOR v_lane IN 2..9 LOOP
        CONTINUE WHEN NOT EXISTS (SELECT FROM awa.unclaimed(p_queue, 1, p_slot, v_lane::smallint));
        SELECT array_agg(u.slot) AS slots, array_agg(u.lane) AS lanes, array_agg(u.xid) AS xids,
               array_agg(u.entry_id) AS entries, count(*) AS n
          INTO r
          FROM awa.unclaimed(p_queue, v_left, CASE WHEN v_lane % 2 = 1 THEN p_slot END, v_lane::smallint) u;
        v_slots := v_slots || r.slots;
        v_lanes := v_lanes || r.lanes;
        v_xids := v_xids || r.xids;
        v_entries := v_entries || r.entries;
        v_left := v_left - r.n;
        EXIT WHEN v_left <= 0;
    END LOOP;
    IF cardinality(v_entries) = 0 THEN
        RETURN 0;
    END IF;
    WITH entry AS MATERIALIZED (
        SELECT u.n, j.*
          FROM unnest(v_slots, v_lanes, v_xids, v_entries) WITH ORDINALITY AS u(slot, lane, xid, entry_id, n)
         CROSS JOIN LATERAL (SELECT * FROM awa.jobs j
                              WHERE j.slot = u.slot AND j.queue = p_queue AND j.lane = u.lane AND j.xid = u.xid
                                AND j.entry_id = u.entry_id LIMIT 1) j
    ), ended AS (
        INSERT INTO awa.attempt_ends (entry_id, id, slot, outcome)
        SELECT e.entry_id, e.id, e.slot, 'carried' FROM entry e
    )
    INSERT INTO awa.jobs (id, created_at, lane, priority, attempt, max_attempts, timeout_ms, queue, kind, args, metadata,
                          tags, concurrency_key, ordering_key, unique_key, expires_at, follow_ups, history)
    SELECT e.id, coalesce(e.created_at, e.available_at), 2 * e.priority, e.priority, e.attempt, e.max_attempts,
           e.timeout_ms, e.queue, e.kind, e.args, e.metadata, e.tags, e.concurrency_key, e.ordering_key, e.unique_key,
           e.expires_at, e.follow_ups, e.history
      FROM entry e ORDER BY e.n;
    RETURN cardinality(v_entries);
END $$;

-- Empty a sealed slot of which the caller has found p_entries entries, each with an end of its own, and no others, in
-- the file p_file (pg_relation_filenode of the slot's jobs, read before). Returns 'pruned'; 'current' when the ring is
-- there; 'changed' when there are more entries now, or others; 'busy' when somebody writes or reads there longer than a
-- few milliseconds. Nothing changes but with 'pruned'.
--
-- Ends are only ever added, so the entries found with an end have one still; as many entries under the lock as were
-- found before are the same ones, unless somebody else has emptied the slot since: then it has another file. Before the
-- readers are locked out the frontiers that lie here are written down.
CREATE FUNCTION awa.prune_v1(p_slot smallint, p_entries bigint, p_file oid) RETURNS text
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '10ms'
AS $$
DECLARE
    v_found bigint;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.prune needs READ COMMITTED: an older snapshot would not see what was written last'
              USING ERRCODE = 'AWA02';
    END IF;
    IF NOT pg_try_advisory_xact_lock(hashtextextended('awa.ring', 0)) THEN
        RETURN 'busy';
    END IF;
    IF p_slot = pg_sequence_last_value('awa.ring_seq') THEN
        RETURN 'current';
    END IF;
    BEGIN
        EXECUTE format('LOCK TABLE ONLY awa.jobs_%1$s, ONLY awa.claims_%1$s, ONLY awa.completions_%1$s,'
                       ' ONLY awa.attempt_ends_%1$s IN SHARE ROW EXCLUSIVE MODE', p_slot);
        EXECUTE format('SELECT count(*) FROM awa.jobs_%s', p_slot) INTO v_found;
        IF v_found <> p_entries OR pg_relation_filenode(format('awa.jobs_%s', p_slot)::regclass) <> p_file THEN
            RETURN 'changed';
        END IF;
        EXECUTE format(
            'INSERT INTO awa.frontiers AS t (queue, claim_id, frontier)
             WITH RECURSIVE queues AS (
                 (SELECT c.queue FROM awa.claims_%1$s c ORDER BY c.queue LIMIT 1)
                 UNION ALL
                 SELECT n.queue FROM queues q
                  CROSS JOIN LATERAL (SELECT c.queue FROM awa.claims_%1$s c WHERE c.queue > q.queue
                                       ORDER BY c.queue LIMIT 1) n
             )
             SELECT n.queue, n.claim_id, n.frontier
               FROM queues q
              CROSS JOIN LATERAL (SELECT c.queue, c.claim_id, c.frontier FROM awa.claims_%1$s c WHERE c.queue = q.queue
                                   ORDER BY c.claim_id DESC LIMIT 1) n
                 ON CONFLICT (queue) DO UPDATE SET claim_id = excluded.claim_id, frontier = excluded.frontier
              WHERE t.claim_id < excluded.claim_id', p_slot);
        EXECUTE format('LOCK TABLE ONLY awa.jobs_%1$s, ONLY awa.claims_%1$s, ONLY awa.completions_%1$s,'
                       ' ONLY awa.attempt_ends_%1$s IN ACCESS EXCLUSIVE MODE', p_slot);
        EXECUTE format('TRUNCATE ONLY awa.jobs_%1$s, ONLY awa.claims_%1$s, ONLY awa.completions_%1$s,'
                       ' ONLY awa.attempt_ends_%1$s', p_slot);
        UPDATE awa.ring SET opened_at = NULL, sealed_at = NULL WHERE slot = p_slot;
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        RETURN 'busy';
    END;
    RETURN 'pruned';
END $$;
