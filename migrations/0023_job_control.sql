-- Control of jobs: bring one back that has ended or waits, give it another priority, move it; and what was true as long
-- as no job came back.
--
-- Adds functions, and replaces some in place; locks nothing that is in use. Works with awa 0.1 and later: what is
-- replaced has the same meaning for workers and producers of before.
--
-- A failed or cancelled job that is retried has a new entry, under its old id. So an end for good is the end of its
-- entry, and no longer that of the job for ever:
--   * of a job whose old entry failed or was cancelled, the row of ended_jobs tells whether it still is; it is written
--     in the transaction of that end, and removed in that of the retry.
--   * who saw that a key's holder has ended, and takes the key over or removes its row in a later statement, looks
--     whether the row is still the one that was seen: a retry writes its new entry into it.

-- As in 0017_unique.sql; and a key is not taken over from a holder that came back since it was looked at.
CREATE OR REPLACE FUNCTION awa.take_keys(p_rows awa.job_uniques[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_count integer := cardinality(p_rows);
    v_holders bigint[] := array_fill(NULL::bigint, ARRAY[v_count]);
    v_left bigint[] := v_holders;         -- those whose former holder has left it: the former holder, ...
    v_seen bigint[] := v_holders;         -- ... and its entry that the row names
    v_n integer := 1;
    v_end integer;
    r record;
BEGIN
    FOR r IN SELECT k.n::integer AS n, u.id, u.entry_id, u.is_held
               FROM unnest(p_rows) WITH ORDINALITY AS k(key, id, states, slot, lane, xid, entry_id, queue, n)
              CROSS JOIN LATERAL (SELECT u.id, u.entry_id, awa.is_held(u) AS is_held FROM awa.job_uniques u
                                   WHERE u.key = k.key LIMIT 1) u
    LOOP
        IF r.is_held THEN
            v_holders[r.n] := r.id;
        ELSIF r.is_held IS NULL THEN
            RETURN NULL;
        ELSE
            v_left[r.n] := r.id;
            v_seen[r.n] := r.entry_id;
        END IF;
    END LOOP;
    WHILE v_n <= v_count LOOP
        IF v_left[v_n] IS NOT NULL THEN
            UPDATE awa.job_uniques u
               SET id = (p_rows[v_n]).id, states = (p_rows[v_n]).states, slot = (p_rows[v_n]).slot,
                   lane = (p_rows[v_n]).lane, xid = (p_rows[v_n]).xid, entry_id = (p_rows[v_n]).entry_id,
                   queue = (p_rows[v_n]).queue
             WHERE u.key = (p_rows[v_n]).key AND u.id = v_left[v_n] AND u.entry_id IS NOT DISTINCT FROM v_seen[v_n];
            IF NOT FOUND THEN
                RETURN NULL;
            END IF;
            v_holders[v_n] := (p_rows[v_n]).id;
            v_n := v_n + 1;
            CONTINUE;
        END IF;
        v_end := v_n;
        WHILE v_end < v_count AND v_left[v_end + 1] IS NULL LOOP
            v_end := v_end + 1;
        END LOOP;
        FOR r IN WITH taken AS (
                     INSERT INTO awa.job_uniques (key, id, states, slot, lane, xid, entry_id, queue)
                     SELECT k.key, k.id, k.states, k.slot, k.lane, k.xid, k.entry_id, k.queue
                       FROM (SELECT * FROM unnest(p_rows[v_n:v_end], v_holders[v_n:v_end]) WITH ORDINALITY
                                        AS k(key, id, states, slot, lane, xid, entry_id, queue, holder, n)
                              WHERE k.holder IS NULL ORDER BY k.n) k
                         ON CONFLICT (key) DO NOTHING
                     RETURNING id
                 )
                 SELECT k.n::integer + v_n - 1 AS n, t.id FROM unnest(p_rows[v_n:v_end]) WITH ORDINALITY
                        AS k(key, id, states, slot, lane, xid, entry_id, queue, n) JOIN taken t USING (id)
        LOOP
            v_holders[r.n] := r.id;
        END LOOP;
        -- those that somebody else has taken since the look above
        FOR v_at IN v_n..v_end LOOP
            IF v_holders[v_at] IS NULL THEN
                SELECT u.id INTO r FROM awa.job_uniques u WHERE u.key = (p_rows[v_at]).key AND awa.is_held(u);
                IF NOT FOUND THEN
                    RETURN NULL;
                END IF;
                v_holders[v_at] := r.id;
            END IF;
        END LOOP;
        v_n := v_end + 1;
    END LOOP;
    RETURN v_holders;
END $$;

-- As in 0017_unique.sql; and a row stays whose job came back since it was looked at.
CREATE OR REPLACE FUNCTION awa.sweep_keys_v1(p_after bytea, p_limit integer, p_seconds double precision,
                                             OUT reached bytea, OUT removed integer)
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off
AS $$
DECLARE
    v_until timestamptz := clock_timestamp() + p_seconds * interval '1 s';
    v_keys bytea[];
    v_ids bigint[];
    v_gone bytea[] := '{}';
    v_gone_ids bigint[] := '{}';
    v_gone_entries bigint[] := '{}';    -- that the row named, or NULL
    v_last bytea;
    r record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.sweep_keys needs READ COMMITTED: an older snapshot would not see where a job has gone'
              USING ERRCODE = 'AWA02';
    END IF;
    removed := 0;
    -- most are held by what waits, or by what lies where it was appended; the others are looked at one by one
    WITH seen AS MATERIALIZED (
        SELECT u.* FROM awa.job_uniques u WHERE u.key > p_after ORDER BY u.key LIMIT p_limit
    ), doubtful AS (
        SELECT s.key, s.id FROM seen s
         WHERE NOT EXISTS (SELECT FROM awa.waiting_jobs w
                            WHERE w.id = s.id AND s.states & awa.state_bit(w.state) > 0 OFFSET 0)
           AND (s.states & 38 < 38
                OR NOT EXISTS (SELECT FROM awa.jobs j
                                WHERE j.slot = s.slot AND j.queue = s.queue AND j.lane = s.lane AND j.xid = s.xid
                                  AND j.entry_id = s.entry_id AND j.id = s.id
                                  AND NOT EXISTS (SELECT FROM awa.attempt_ends e
                                                   WHERE e.slot = j.slot AND e.entry_id = j.entry_id
                                                     AND e.outcome <> 'completed' OFFSET 0)
                               OFFSET 0))
         ORDER BY s.key
    )
    SELECT (SELECT s.key FROM seen s ORDER BY s.key DESC LIMIT 1), array_agg(d.key), array_agg(d.id)
      INTO reached, v_keys, v_ids FROM doubtful d;
    FOR v_n IN 1..coalesce(cardinality(v_keys), 0) LOOP
        IF v_last IS NOT NULL AND clock_timestamp() > v_until THEN
            reached := v_last;
            EXIT;
        END IF;
        SELECT u.entry_id, awa.is_held(u) AS is_held INTO r
          FROM awa.job_uniques u WHERE u.key = v_keys[v_n] AND u.id = v_ids[v_n];
        IF r.is_held IS FALSE THEN
            v_gone := v_gone || v_keys[v_n];
            v_gone_ids := v_gone_ids || v_ids[v_n];
            v_gone_entries := v_gone_entries || r.entry_id;
        END IF;
        v_last := v_keys[v_n];
    END LOOP;
    IF cardinality(v_gone) > 0 THEN
        DELETE FROM awa.job_uniques u
         WHERE u.key = ANY (ARRAY(SELECT t.key FROM awa.job_uniques t
                                   WHERE t.key = ANY (v_gone)
                                     -- nobody has taken it over, and no retry has written its entry into it
                                     AND t.id = v_gone_ids[array_position(v_gone, t.key)]
                                     AND t.entry_id IS NOT DISTINCT FROM v_gone_entries[array_position(v_gone, t.key)]
                                   ORDER BY t.key FOR UPDATE SKIP LOCKED));
        GET DIAGNOSTICS removed = ROW_COUNT;
    END IF;
END $$;

-- As in 0019_dependencies.sql; and of a job whose known entry failed or was cancelled, the row of ended_jobs tells.
CREATE OR REPLACE FUNCTION awa.look_at_parents_v1(p_ids bigint[], p_slots smallint[], p_queues text[],
                                                  p_lanes smallint[], p_xids xid8[], p_entries bigint[],
                                                  p_ats timestamptz[], p_claims bigint[], p_idx smallint[])
RETURNS TABLE (id bigint, state text, slot smallint, queue text, lane smallint, xid xid8, entry_id bigint,
               available_at timestamptz, claim_id bigint, idx smallint)
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_states text[];        -- by position
    v_known boolean[];      -- by position: the entry that the caller says is there
    v_searched bigint[];
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.look_at_parents needs READ COMMITTED: an older snapshot would take a job for gone'
              USING ERRCODE = 'AWA02';
    END IF;
    LOCK TABLE awa.jobs IN ACCESS SHARE MODE;
    v_states := ARRAY(
        SELECT coalesce((SELECT 'waiting' FROM awa.waiting_jobs w WHERE w.id = u.id),
                        (SELECT e.state FROM awa.ended_jobs e WHERE e.id = u.id))
          FROM unnest(p_ids) WITH ORDINALITY AS u(id, n) ORDER BY u.n);
    v_known := ARRAY(
        SELECT u.state IS NULL
               AND EXISTS (SELECT FROM awa.jobs j WHERE j.slot = u.slot AND j.queue = u.queue AND j.lane = u.lane
                                                    AND j.xid = u.xid AND j.entry_id = u.entry_id OFFSET 0)
          FROM unnest(v_states, p_slots, p_queues, p_lanes, p_xids, p_entries) WITH ORDINALITY
               AS u(state, slot, queue, lane, xid, entry_id, n) ORDER BY u.n);
    v_searched := ARRAY(SELECT u.id FROM unnest(p_ids, v_states, v_known) AS u(id, state, known)
                         WHERE u.state IS NULL AND NOT u.known);
    RETURN QUERY
        WITH place AS MATERIALIZED (
            SELECT false AS is_newest, u.id, u.slot, u.queue, u.lane, u.xid, u.entry_id, u.available_at, u.claim_id,
                   u.idx
              FROM unnest(p_ids, v_known, p_slots, p_queues, p_lanes, p_xids, p_entries, p_ats, p_claims, p_idx)
                   AS u(id, known, slot, queue, lane, xid, entry_id, available_at, claim_id, idx)
             WHERE u.known
             UNION ALL
            SELECT true, e.id, e.slot, e.queue, e.lane, e.xid, e.entry_id, e.available_at, NULL, NULL
              FROM awa.newest_entries(v_searched, 2) e
        ), frontier AS MATERIALIZED (
            SELECT q.queue, awa.frontier_of(q.queue) AS frontier FROM (SELECT DISTINCT queue FROM place) q
        ), passed AS MATERIALIZED (    -- whose claims are to be looked for, half a millisecond each; most are available
            SELECT p.id, row_number() OVER () <= 50 AS is_looked_for FROM place p
             WHERE p.claim_id IS NULL AND p.entry_id IS NOT NULL
               AND CASE WHEN p.lane = 0 THEN true
                        ELSE awa.has_passed((SELECT f.frontier FROM frontier f WHERE f.queue = p.queue),
                                            p.lane, p.xid, p.entry_id) END
               AND NOT EXISTS (SELECT FROM awa.attempt_ends t
                                WHERE t.slot = p.slot AND t.entry_id = p.entry_id OFFSET 0)
        )
        SELECT p.id,
               CASE WHEN p.entry_id IS NULL THEN 'gone'
                    WHEN e.outcome = 'completed' THEN e.outcome
                    -- The rest left the job to a successor; a retry may have given one to what failed or was cancelled.
                    -- It is in this snapshot too, or has ended and is gone.
                    WHEN e.outcome IS NOT NULL
                    THEN coalesce((SELECT 'waiting' FROM awa.waiting_jobs w WHERE w.id = p.id),
                                  (SELECT t.state FROM awa.ended_jobs t WHERE t.id = p.id),
                                  CASE WHEN NOT p.is_newest THEN NULL
                                       WHEN e.outcome IN ('failed', 'cancelled') THEN e.outcome
                                       ELSE 'gone' END)
                    WHEN EXISTS (SELECT FROM awa.completions x
                                  WHERE x.slot = p.slot AND x.claim_id = c.claim_id AND c.idx = ANY (x.idx) OFFSET 0)
                    THEN 'completed'
                    WHEN (p.id IN (SELECT s.id FROM passed s WHERE NOT s.is_looked_for)) IS TRUE THEN 'passed'
                    ELSE 'open' END,
               p.slot, p.queue, p.lane, p.xid, p.entry_id, p.available_at, c.claim_id, c.idx
          FROM place p
          LEFT JOIN LATERAL (SELECT t.outcome FROM awa.attempt_ends t
                              WHERE t.slot = p.slot AND t.entry_id = p.entry_id LIMIT 1) e ON true
          LEFT JOIN LATERAL (
               SELECT p.claim_id, p.idx WHERE p.claim_id IS NOT NULL
               UNION ALL
               SELECT t.claim_id, t.idx
                 FROM awa.claim_of(p.slot, p.queue, p.lane, p.xid, p.entry_id, p.available_at) t
                WHERE p.claim_id IS NULL
                  AND (p.id IN (SELECT s.id FROM passed s WHERE s.is_looked_for)) IS TRUE) c ON true;
    RETURN QUERY
        SELECT u.id, u.state, NULL::smallint, NULL::text, NULL::smallint, NULL::xid8, NULL::bigint, NULL::timestamptz,
               NULL::bigint, NULL::smallint
          FROM unnest(p_ids, v_states) AS u(id, state) WHERE u.state IS NOT NULL;
END $$;

-- Whether a job with this history may have killed its worker. It is claimed alone then, which express lanes see to.
CREATE FUNCTION awa.is_suspect(p_history json) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(p_history->-1->>'outcome' = 'rescued', false)
$$;

-- Make a job available, with all its attempts before it: one that has failed or was cancelled, or waits for a time.
-- In a transaction of its own, at READ COMMITTED.
--   retried    it is available, at the end of its queue; its history is kept
--   nothing    it is available already, or set aside until it can run
--   refused    it is running, has completed, or waits for something else than a time; state says which
--   conflict   it has ended, and another job holds its unique key: existing_id. Nothing is changed
--   busy       somebody else held what belongs to it, for a second; nothing is changed, try again
--   not_found  there is no such job, or its history is gone
-- state is what it is now; unique_key the key of 16 bytes, with a conflict.
--
-- Nothing is held but the row that the job leaves: anybody may append an entry at any time. Of two retries, or of one
-- and a retention that deletes the row, one has it; the other looks for the job again.
CREATE FUNCTION awa.retry_v1(p_id bigint, OUT happened text, OUT state text, OUT existing_id bigint,
                             OUT unique_key bytea)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET lock_timeout = '10ms' SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_until timestamptz := clock_timestamp() + interval '1 s';
    v_entry bigint;
    v_slot smallint;
    v_lane smallint;
    p record;
    j record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.retry needs READ COMMITTED: an older snapshot would not see where a job has gone'
              USING ERRCODE = 'AWA02';
    END IF;
    LOOP
        BEGIN
            LOCK TABLE awa.jobs IN ACCESS SHARE MODE;
            -- in one snapshot; a row that retention has deleted leaves an end in the ring
            SELECT l.place, l.state, w.waits_for, e.id IS NOT NULL AS is_kept INTO p
              FROM awa.locate(p_id) l
              LEFT JOIN awa.waiting_jobs w ON w.id = p_id
              LEFT JOIN awa.ended_jobs e ON e.id = p_id;
            state := p.state;
            IF p.place IS NULL OR (p.state IN ('failed', 'cancelled') AND NOT p.is_kept) THEN
                happened := 'not_found';
                state := NULL;
                RETURN;
            ELSIF p.place = 'available' OR (p.place = 'waiting' AND p.state = 'available') THEN
                happened := 'nothing';
                RETURN;
            ELSIF coalesce(p.state, '') NOT IN ('failed', 'cancelled') AND p.waits_for IS DISTINCT FROM 'time' THEN
                happened := 'refused';
                RETURN;
            END IF;
            IF p.is_kept THEN
                SELECT e.queue, e.priority, e.unique_key, awa.is_suspect(e.history) AS is_suspect INTO j
                  FROM awa.ended_jobs e WHERE e.id = p_id FOR UPDATE SKIP LOCKED;
            ELSE
                SELECT w.queue, w.priority, w.unique_key, awa.is_suspect(w.history) AS is_suspect INTO j
                  FROM awa.waiting_jobs w WHERE w.id = p_id AND w.waits_for = 'time' FOR UPDATE SKIP LOCKED;
            END IF;
            IF FOUND THEN
                v_entry := nextval('awa.entry_id_seq');
                v_slot := pg_sequence_last_value('awa.ring_seq');
                v_lane := 2 * j.priority + (NOT j.is_suspect)::integer;
                IF p.is_kept AND octet_length(j.unique_key) BETWEEN 16 AND 17 THEN
                    -- its own row, which was not removed yet, or is held in that state too
                    UPDATE awa.job_uniques u
                       SET states = awa.states_of(j.unique_key), slot = v_slot, lane = v_lane,
                           xid = pg_current_xact_id(), entry_id = v_entry, queue = j.queue
                     WHERE u.key = substr(j.unique_key, 1, 16) AND u.id = p_id;
                    IF NOT FOUND THEN
                        SELECT t.holders[1] INTO existing_id
                          FROM awa.take_all_keys(ARRAY[ROW(substr(j.unique_key, 1, 16), p_id,
                                                           awa.states_of(j.unique_key), v_slot, v_lane,
                                                           pg_current_xact_id(), v_entry, j.queue)::awa.job_uniques],
                                                 ARRAY[false]) t;
                        IF existing_id <> p_id THEN
                            happened := 'conflict';
                            unique_key := substr(j.unique_key, 1, 16);
                            RETURN;
                        END IF;
                        existing_id := NULL;
                    END IF;
                END IF;
                WITH ended AS (
                    DELETE FROM awa.ended_jobs e WHERE p.is_kept AND e.id = p_id RETURNING e.*
                ), waiting AS (
                    DELETE FROM awa.waiting_jobs w WHERE NOT p.is_kept AND w.id = p_id RETURNING w.*
                ), taken AS (
                    SELECT e.id, e.created_at, e.priority, e.max_attempts, e.timeout_ms, e.queue, e.kind, e.args,
                           e.metadata, e.tags, e.concurrency_key, e.ordering_key, e.unique_key,
                           NULL::timestamptz AS expires_at, e.follow_ups, e.history
                      FROM ended e
                    UNION ALL
                    SELECT w.id, w.created_at, w.priority, w.max_attempts, w.timeout_ms, w.queue, w.kind, w.args,
                           w.metadata, w.tags, w.concurrency_key, w.ordering_key, w.unique_key, w.expires_at,
                           w.follow_ups, w.history
                      FROM waiting w
                )
                INSERT INTO awa.jobs (entry_id, id, slot, created_at, lane, priority, max_attempts, timeout_ms, queue,
                                      kind, args, metadata, tags, concurrency_key, ordering_key, unique_key,
                                      expires_at, follow_ups, history)
                SELECT v_entry, t.id, v_slot, t.created_at, v_lane, t.priority, t.max_attempts, t.timeout_ms, t.queue,
                       t.kind, t.args, t.metadata, t.tags, t.concurrency_key, t.ordering_key, t.unique_key,
                       t.expires_at, t.follow_ups, t.history
                  FROM taken t;
                PERFORM awa.ring(ARRAY[j.queue]);
                happened := 'retried';
                state := 'available';
                RETURN;
            END IF;
            RAISE EXCEPTION 'job % is held, or has moved on', p_id USING ERRCODE = '55P03';
        EXCEPTION WHEN lock_not_available THEN
            existing_id := NULL;        -- the locks are given back
        END;
        IF clock_timestamp() > v_until THEN
            happened := 'busy';
            RETURN;
        END IF;
        PERFORM pg_sleep(0.01 + 0.03 * random());
    END LOOP;
END $$;
REVOKE EXECUTE ON FUNCTION awa.retry_v1(bigint) FROM PUBLIC;

-- Give a job that waits or is available another priority: 1, which runs first, to 4. One that is available comes last
-- there, unless it was rescued, or a key was handed over to it. In a transaction of its own, at READ COMMITTED.
--   reprioritised  it has it
--   nothing        it had it before
--   refused        it is running or has ended; state says which
--   busy           somebody else held what belongs to it, for a second; nothing is changed, try again
--   not_found      there is no such job, or its history is gone
--
-- Whatever it holds of a key, it keeps.
CREATE FUNCTION awa.set_priority_v1(p_id bigint, p_priority integer, OUT happened text, OUT state text)
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET lock_timeout = '10ms'
AS $$
DECLARE
    v_until timestamptz := clock_timestamp() + interval '1 s';
    v_priority smallint;
    p record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.set_priority needs READ COMMITTED: an older snapshot would miss a claim'
              USING ERRCODE = 'AWA02';
    END IF;
    IF p_priority IS NULL OR p_priority NOT BETWEEN 1 AND 4 THEN
        RAISE EXCEPTION 'p_priority is 1, which runs first, to 4, not %', coalesce(p_priority::text, 'NULL')
              USING ERRCODE = '22023';
    END IF;
    LOOP
        BEGIN
            LOCK TABLE awa.jobs IN ACCESS SHARE MODE;
            SELECT * INTO p FROM awa.locate(p_id);
            state := p.state;
            IF p.place IS NULL THEN
                happened := 'not_found';
                RETURN;
            ELSIF p.place NOT IN ('waiting', 'available') THEN
                happened := 'refused';
                RETURN;
            ELSIF p.place = 'waiting' THEN
                SELECT w.priority INTO v_priority FROM awa.waiting_jobs w WHERE w.id = p_id FOR UPDATE SKIP LOCKED;
                IF FOUND THEN
                    UPDATE awa.waiting_jobs w SET priority = p_priority WHERE w.id = p_id AND w.priority <> p_priority;
                    happened := CASE WHEN FOUND THEN 'reprioritised' ELSE 'nothing' END;
                    RETURN;
                END IF;
            ELSIF pg_try_advisory_xact_lock(hashtextextended('awa.queue:' || p.queue, 0)) THEN
                SELECT e.priority INTO v_priority FROM awa.jobs e
                 WHERE e.slot = p.slot AND e.queue = p.queue AND e.lane = p.lane AND e.xid = p.xid
                   AND e.entry_id = p.entry_id;
                IF v_priority = p_priority AND p.lane / 2 = p_priority THEN
                    happened := 'nothing';
                    RETURN;
                END IF;
                INSERT INTO awa.jobs (id, created_at, lane, priority, attempt, max_attempts, timeout_ms, queue, kind,
                                      args, metadata, tags, concurrency_key, ordering_key, unique_key, expires_at,
                                      follow_ups, history)
                SELECT j.id, coalesce(j.created_at, j.available_at),
                       2 * p_priority
                       + (NOT awa.is_suspect(j.history)
                          -- whose turn has come: others wait for it
                          AND NOT EXISTS (SELECT FROM awa.grants g
                                           WHERE g.id = p_id AND g.queue = j.queue AND g.claim_id = 0
                                             AND NOT g.is_over))::integer,
                       p_priority, j.attempt, j.max_attempts, j.timeout_ms, j.queue, j.kind, j.args, j.metadata, j.tags,
                       j.concurrency_key, j.ordering_key, j.unique_key, j.expires_at, j.follow_ups, j.history
                  FROM awa.end_unclaimed(p.queue, p.slot, p.lane, p.xid, p.entry_id, 'moved', NULL) j;
                IF FOUND THEN
                    PERFORM awa.ring(ARRAY[p.queue]);
                    happened := 'reprioritised';
                    RETURN;
                END IF;
            END IF;
            RAISE EXCEPTION 'job % is held, or has moved on', p_id USING ERRCODE = '55P03';
        EXCEPTION WHEN lock_not_available THEN
            NULL;               -- the locks are given back
        END;
        IF clock_timestamp() > v_until THEN
            happened := 'busy';
            RETURN;
        END IF;
        PERFORM pg_sleep(0.01 + 0.03 * random());
    END LOOP;
END $$;

-- As in 0010_control.sql; and it gives back what it held of keys in the queue that it leaves. One that waits for a key
-- waits for that of the other queue, behind those that do.
CREATE OR REPLACE FUNCTION awa.move_v1(p_id bigint, p_queue text, OUT happened text, OUT state text)
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET lock_timeout = '10ms'
AS $$
DECLARE
    v_until timestamptz := clock_timestamp() + interval '1 s';
    v_waits_for text;
    v_key text;
    p record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.move needs READ COMMITTED: an older snapshot would miss a claim' USING ERRCODE = 'AWA02';
    END IF;
    IF p_queue IS NULL OR length(p_queue) NOT BETWEEN 1 AND 200 THEN
        RAISE EXCEPTION 'a queue''s name has 1 to 200 characters, not %', coalesce(length(p_queue)::text, 'NULL')
              USING ERRCODE = '22023';
    END IF;
    LOOP
        BEGIN
            LOCK TABLE awa.jobs IN ACCESS SHARE MODE;
            SELECT * INTO p FROM awa.locate(p_id);
            state := p.state;
            IF p.place IS NULL THEN
                happened := 'not_found';
                RETURN;
            ELSIF p.place NOT IN ('waiting', 'available') THEN
                happened := 'refused';
                RETURN;
            ELSIF p.queue = p_queue THEN
                happened := 'nothing';
                RETURN;
            ELSIF p.place = 'waiting' THEN
                UPDATE awa.waiting_jobs w SET queue = p_queue, seq = nextval('awa.entry_id_seq')
                 WHERE w.id = (SELECT t.id FROM awa.waiting_jobs t WHERE t.id = p_id FOR UPDATE SKIP LOCKED)
                RETURNING w.waits_for, w.wait_key INTO v_waits_for, v_key;
                IF FOUND THEN
                    PERFORM awa.release_grants(ARRAY[p_id]);
                    IF v_waits_for IN ('key', 'order') THEN
                        PERFORM awa.look_at_key(p_queue, v_waits_for, v_key);
                    ELSIF v_waits_for <> 'time' THEN
                        -- everybody hears it, as in a claim that sets aside: whoever knows its kind may hold no bell
                        PERFORM pg_notify(awa.channel(), chr(1) || p_queue);
                    END IF;
                    happened := 'moved';
                    RETURN;
                END IF;
            ELSIF pg_try_advisory_xact_lock(hashtextextended('awa.queue:' || p.queue, 0)) THEN
                INSERT INTO awa.jobs (id, created_at, lane, priority, attempt, max_attempts, timeout_ms, queue, kind,
                                      args, metadata, tags, concurrency_key, ordering_key, unique_key, expires_at,
                                      follow_ups, history)
                SELECT j.id, coalesce(j.created_at, j.available_at),
                       2 * j.priority + (NOT awa.is_suspect(j.history))::integer, j.priority, j.attempt, j.max_attempts,
                       j.timeout_ms, p_queue, j.kind, j.args, j.metadata, j.tags, j.concurrency_key, j.ordering_key,
                       j.unique_key, j.expires_at, j.follow_ups, j.history
                  FROM awa.end_unclaimed(p.queue, p.slot, p.lane, p.xid, p.entry_id, 'moved', NULL) j;
                IF FOUND THEN
                    PERFORM awa.release_grants(ARRAY[p_id]);
                    PERFORM awa.ring(ARRAY[p_queue]);
                    happened := 'moved';
                    RETURN;
                END IF;
            END IF;
            RAISE EXCEPTION 'job % is held, or has moved on', p_id USING ERRCODE = '55P03';
        EXCEPTION WHEN lock_not_available THEN
            NULL;               -- the locks are given back
        END;
        IF clock_timestamp() > v_until THEN
            happened := 'busy';
            RETURN;
        END IF;
        PERFORM pg_sleep(0.01 + 0.03 * random());
    END LOOP;
END $$;
