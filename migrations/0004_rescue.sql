-- Completion inside a handler's own transaction, promotion, fencing and rescue.
--
-- Adds functions only. Works with awa 0.1 and later.

-- Complete one attempt inside the caller's transaction, at any isolation level. The row's unique key fences it: a
-- second end of the attempt raises unique_violation (23505), an attempt that is not this runtime's AWA04. The caller's
-- transaction must be younger than the claim. Names the one partition it touches: a plan over all of them would lock
-- them until the caller commits.
CREATE FUNCTION awa.complete_v1(p_runtime bigint, p_claim bigint, p_slot smallint, p_nonce integer, p_idx smallint,
                                p_elapsed integer) RETURNS bigint
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET jit = off
AS $$
DECLARE
    v_entry bigint;
BEGIN
    IF p_slot NOT BETWEEN 0 AND 7 THEN
        RAISE EXCEPTION 'slot % does not exist', p_slot USING ERRCODE = '22023';
    END IF;
    EXECUTE format(
        'INSERT INTO awa.attempt_ends_%1$s (entry_id, claim_id, id, slot, outcome, elapsed_ms)
         SELECT j.entry_id, c.claim_id, j.id, %1$s, ''completed'', $5
           FROM awa.claims_%1$s c
           JOIN awa.jobs_%1$s j ON j.queue = c.queue AND j.lane = c.lane AND j.xid = c.xids[$4]
                               AND j.entry_id = c.entry_ids[$4]
          WHERE c.runtime = $1 AND c.claim_id = $2 AND c.nonce = $3
         RETURNING entry_id', p_slot)
       INTO v_entry USING p_runtime, p_claim, p_nonce, p_idx, p_elapsed;
    IF v_entry IS NULL THEN
        RAISE EXCEPTION 'this attempt is not open: claim % of runtime % is unknown', p_claim, p_runtime
              USING ERRCODE = 'AWA04';
    END IF;
    RETURN v_entry;
END $$;

-- Make up to p_limit waiting jobs available whose time has come after p_floor, by due time. The floor, a second behind
-- now, keeps the scan from wading through dead rows; a pass from '-infinity' finds what committed late.
CREATE FUNCTION awa.promote_v1(p_floor timestamptz, p_limit integer) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
DECLARE
    v_now timestamptz := clock_timestamp();    -- a value, which bounds the scan; a call would only filter it
    v_count integer;
    v_queues text[];
BEGIN
    WITH due AS MATERIALIZED (
        SELECT w.id FROM awa.waiting_jobs w
         WHERE w.waits_for = 'time' AND w.run_at >= p_floor AND w.run_at <= v_now
         ORDER BY w.run_at LIMIT p_limit
           FOR UPDATE SKIP LOCKED
    ), taken AS (
        -- by array: as a join it may be planned as a walk over the whole table
        DELETE FROM awa.waiting_jobs w WHERE w.id = ANY (ARRAY(SELECT due.id FROM due)) RETURNING w.*
    ), appended AS (
        INSERT INTO awa.jobs (id, created_at, lane, priority, attempt, max_attempts, timeout_ms, queue, kind, args,
                              metadata, tags, concurrency_key, ordering_key, unique_key, expires_at, follow_ups, history)
        SELECT t.id, t.created_at, 2 * t.priority + 1, t.priority, t.attempt, t.max_attempts, t.timeout_ms, t.queue,
               t.kind, t.args, t.metadata, t.tags, t.concurrency_key, t.ordering_key, t.unique_key, t.expires_at,
               t.follow_ups, t.history
          FROM (SELECT * FROM taken ORDER BY run_at, id) t
    )
    SELECT count(*), array_agg(DISTINCT t.queue) INTO v_count, v_queues FROM taken t;
    IF v_count > 0 THEN
        PERFORM awa.ring(v_queues);
    END IF;
    RETURN v_count;
END $$;

-- Fence a runtime that has been silent for p_silent seconds: from the commit on, no write of it is accepted. False
-- when it has been heard, or one of its own transactions is in progress (try again). The lock is only tried: waiting
-- in its queue would block every settle of a living runtime.
CREATE FUNCTION awa.fence_v1(p_runtime bigint, p_silent double precision) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.fence needs READ COMMITTED' USING ERRCODE = 'AWA02';
    END IF;
    IF NOT pg_try_advisory_xact_lock(hashtextextended('awa.runtime:' || p_runtime, 0)) THEN
        RETURN false;
    END IF;
    INSERT INTO awa.gone_runtimes (runtime)
    SELECT r.id FROM awa.runtime_instances r
     WHERE r.id = p_runtime AND r.last_seen_at < clock_timestamp() - p_silent * interval '1 s'
        ON CONFLICT DO NOTHING;
    RETURN EXISTS (SELECT FROM awa.gone_runtimes t WHERE t.runtime = p_runtime);
END $$;

-- Take back up to p_limit open attempts of a fenced runtime, beyond the first p_skip: each ends as rescued and its next
-- entry is appended, or the job has failed when its attempts are used up. Open are the members of the claims that the
-- last heartbeat listed and of every claim above the newest it knew: claims made since are in no list.
--
-- When a batch cannot be written, each member is tried by itself; those that an open transaction is completing are
-- left for a later call and counted as blocked.
CREATE FUNCTION awa.rescue_v1(p_runtime bigint, p_limit integer, p_skip integer DEFAULT 0,
                              OUT tried integer, OUT ended integer, OUT blocked integer)
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET lock_timeout = '20ms'
AS $$
DECLARE
    v_error text;
    r record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.rescue needs READ COMMITTED' USING ERRCODE = 'AWA02';
    END IF;
    IF NOT EXISTS (SELECT FROM awa.gone_runtimes t WHERE t.runtime = p_runtime) THEN
        RAISE EXCEPTION 'runtime % is not fenced: call awa.fence_v1 first', p_runtime USING ERRCODE = '55000';
    END IF;
    tried := 0;
    ended := 0;
    blocked := 0;
    IF NOT pg_try_advisory_xact_lock(hashtextextended('awa.runtime:' || p_runtime, 0)) THEN
        blocked := 1;
        RETURN;
    END IF;
    SELECT json_build_object('type', 'WorkerDied', 'text',
                             format('its worker died: host %s, process %s, last seen %s', i.hostname, i.pid,
                                    to_char(i.last_seen_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS"Z"')))::text
      INTO v_error FROM awa.runtime_instances i WHERE i.id = p_runtime;
    SELECT array_agg(o.claim_id) AS claims, array_agg(o.slot) AS slots, array_agg(o.idx) AS idx,
           count(*)::integer AS n
      INTO r
      FROM (SELECT c.claim_id, c.slot, m.idx::smallint AS idx
              FROM awa.runtime_instances i
             CROSS JOIN LATERAL (
                   SELECT t.* FROM awa.claims t WHERE t.runtime = p_runtime AND t.claim_id > i.newest_claim
                   UNION ALL
                   SELECT t.* FROM unnest(i.open_claims) o CROSS JOIN LATERAL (
                          SELECT * FROM awa.claims t
                           WHERE t.runtime = p_runtime AND t.claim_id = o AND o <= i.newest_claim OFFSET 0) t) c
             CROSS JOIN LATERAL unnest(c.entry_ids) WITH ORDINALITY AS m(entry_id, idx)
             WHERE i.id = p_runtime
               AND NOT EXISTS (SELECT FROM awa.completions x
                                WHERE x.slot = c.slot AND x.claim_id = c.claim_id AND m.idx::smallint = ANY (x.idx)
                               OFFSET 0)
               AND NOT EXISTS (SELECT FROM awa.attempt_ends e
                                WHERE e.slot = c.slot AND e.entry_id = m.entry_id OFFSET 0)
             ORDER BY c.claim_id, m.idx
             LIMIT p_limit OFFSET p_skip) o;
    tried := r.n;
    IF tried = 0 THEN
        RETURN;
    END IF;
    BEGIN
        ended := cardinality(awa.end_attempts(
            p_runtime, NULL, r.claims, r.slots, array_fill(NULL::integer, ARRAY[tried]), r.idx,
            array_fill('rescued'::text, ARRAY[tried]), array_fill(0::double precision, ARRAY[tried]),
            array_fill(NULL::integer, ARRAY[tried]), array_fill(v_error, ARRAY[tried])));
    EXCEPTION WHEN OTHERS THEN
        ended := 0;
        FOR v_n IN 1..tried LOOP
            BEGIN
                ended := ended + cardinality(awa.end_attempts(
                    p_runtime, NULL, r.claims[v_n:v_n], r.slots[v_n:v_n], ARRAY[NULL::integer], r.idx[v_n:v_n],
                    ARRAY['rescued'], ARRAY[0::double precision], ARRAY[NULL::integer], ARRAY[v_error]));
            EXCEPTION WHEN OTHERS THEN
                blocked := blocked + 1;
                RAISE WARNING 'awa: member % of claim % cannot be rescued now: %', r.idx[v_n], r.claims[v_n], SQLERRM;
            END;
        END LOOP;
    END;
END $$;
