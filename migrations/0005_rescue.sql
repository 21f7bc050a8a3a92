-- Rescue: fence runtimes that are silent, and take their attempts back.
--
-- Adds functions only. Works with awa 0.1 and later.

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
