-- Promotion: what waits for a time becomes available.
--
-- Adds functions only. Works with awa 0.1 and later.

-- Make up to p_limit waiting jobs available whose time has come after p_floor, by due time. The floor, a little behind
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
