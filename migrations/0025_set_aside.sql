-- Setting aside calls for help once for what waits, not with every claim that meets a kind it does not know.
--
-- Replaces a function, in place, by one that does the same. Waits for no table. Works with awa 0.1 and later.
--
-- A call wakes every worker of the installation, which then claims, and polls faster for a while. Beside ten workers that
-- rested, each claim that set something aside had cost them 40 ms of CPU; now the first does, and the others 2 ms.

-- As in 0021_limits.sql; and it calls only for kinds of which no job waits in the queue yet. Why nobody sleeps on a job
-- that he could run: a worker that rests has made a claim, under the queue's claim lock, that found nothing of his kinds
-- waiting. Jobs are set aside under that lock, so the first one of such a kind that is set aside afterwards finds none
-- waiting either, and calls. Those behind it find the worker awake: he comes again until a claim finds nothing. What he
-- did find, but somebody held who then let go of it, he takes at his next poll; so he does those that came meanwhile.
CREATE OR REPLACE FUNCTION awa.set_aside(p_queue text, p_slots smallint[], p_lanes smallint[], p_xids xid8[],
                                         p_entries bigint[], p_whys text[]) RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
DECLARE
    v_claim bigint := nextval('awa.claim_id_seq');
    v_now timestamptz := clock_timestamp();
    v_is_free boolean := false;
    v_is_new boolean;            -- of a kind of theirs no job waited yet
    r record;
BEGIN
    IF p_whys && ARRAY['kind', 'order']
       AND (SELECT m.max_running_per_key FROM awa.queue_meta m WHERE m.queue = p_queue) IS NOT NULL THEN
        UPDATE awa.grants g SET is_over = true
          FROM unnest(p_slots, p_lanes, p_xids, p_entries, p_whys) AS a(slot, lane, xid, entry_id, why)
         CROSS JOIN LATERAL (SELECT j.id FROM awa.jobs j
                              WHERE j.slot = a.slot AND j.queue = p_queue AND j.lane = a.lane AND j.xid = a.xid
                                AND j.entry_id = a.entry_id LIMIT 1) j
         WHERE a.why IN ('kind', 'order') AND g.id = j.id AND g.queue = p_queue AND g.scope = 'key' AND g.claim_id = 0
           AND NOT g.is_over;
        v_is_free := FOUND;
    END IF;
    WITH lost AS (            -- of a key that more had in hand than may by now: they come first again
        DELETE FROM awa.grants g
         USING unnest(p_slots, p_lanes, p_xids, p_entries, p_whys) AS a(slot, lane, xid, entry_id, why)
         CROSS JOIN LATERAL (SELECT j.id FROM awa.jobs j
                              WHERE j.slot = a.slot AND j.queue = p_queue AND j.lane = a.lane AND j.xid = a.xid
                                AND j.entry_id = a.entry_id LIMIT 1) j
         WHERE a.why = 'key' AND g.id = j.id AND g.queue = p_queue AND g.scope = 'key' AND g.claim_id = 0
        RETURNING g.id
    ), entry AS MATERIALIZED (
        SELECT a.n, a.why, left(CASE a.why WHEN 'kind' THEN j.kind WHEN 'key' THEN j.concurrency_key
                                           WHEN 'order' THEN j.ordering_key END, 201) AS wait_key,
               j.*
          FROM unnest(p_slots, p_lanes, p_xids, p_entries, p_whys) WITH ORDINALITY AS a(slot, lane, xid, entry_id, why, n)
         CROSS JOIN LATERAL (SELECT * FROM awa.jobs j
                              WHERE j.slot = a.slot AND j.queue = p_queue AND j.lane = a.lane AND j.xid = a.xid
                                AND j.entry_id = a.entry_id LIMIT 1) j
         WHERE a.why <> 'expired'
    ), ended AS (
        INSERT INTO awa.attempt_ends (entry_id, claim_id, id, slot, outcome)
        SELECT e.entry_id, v_claim, e.id, e.slot, 'set_aside' FROM entry e
    ), granted AS (
        INSERT INTO awa.grants AS t (queue, scope, key, id)
        SELECT p_queue, 'order', left(e.ordering_key, 201), e.id FROM entry e
         WHERE e.why IN ('key', 'kind') AND e.ordering_key IS NOT NULL
            ON CONFLICT (queue, scope, key, id) DO UPDATE        -- of an earlier attempt, which may have failed
           SET claim_id = 0, entry_id = NULL, slot = NULL, idx = NULL, is_over = false
    ), waiting AS (
        INSERT INTO awa.waiting_jobs (id, seq, created_at, priority, attempt, max_attempts, timeout_ms, state, waits_for,
                                      wait_key, queue, kind, args, metadata, tags, concurrency_key, ordering_key,
                                      unique_key, expires_at, follow_ups, history)
        SELECT e.id, CASE WHEN e.id IN (SELECT l.id FROM lost l) THEN e.id ELSE nextval('awa.entry_id_seq') END,
               coalesce(e.created_at, e.available_at), e.priority, e.attempt, e.max_attempts, e.timeout_ms,
               'available', e.why, e.wait_key, e.queue, e.kind, e.args, e.metadata, e.tags, e.concurrency_key,
               e.ordering_key, e.unique_key, e.expires_at, e.follow_ups, e.history
          FROM (SELECT * FROM entry ORDER BY n) e
    )
    -- the newest, since the oldest are taken first, and leave dead rows behind
    SELECT bool_or(NOT EXISTS (SELECT FROM (SELECT FROM awa.waiting_jobs w
                                             WHERE w.queue = p_queue AND w.waits_for = 'kind' AND w.wait_key = k.wait_key
                                             ORDER BY w.priority DESC, w.seq DESC LIMIT 1) w))
      INTO v_is_new
      FROM (SELECT DISTINCT e.wait_key FROM entry e WHERE e.why = 'kind') k;
    IF v_is_new THEN
        -- a call for help, which everybody hears, not a bell: whoever knows these kinds may hold none
        PERFORM pg_notify(awa.channel(), chr(1) || p_queue);
    END IF;
    IF 'expired' = ANY (p_whys) THEN
        WITH entry AS MATERIALIZED (
            SELECT a.n, j.*, f.jobs, f.flaw
              FROM unnest(p_slots, p_lanes, p_xids, p_entries, p_whys) WITH ORDINALITY AS a(slot, lane, xid, entry_id, why, n)
             CROSS JOIN LATERAL (SELECT * FROM awa.jobs j
                                  WHERE j.slot = a.slot AND j.queue = p_queue AND j.lane = a.lane AND j.xid = a.xid
                                    AND j.entry_id = a.entry_id LIMIT 1) j
              LEFT JOIN LATERAL awa.follow_ups_after(j.follow_ups, 'cancelled') f ON true
             WHERE a.why = 'expired'
        ), ended AS (
            INSERT INTO awa.attempt_ends (entry_id, id, slot, outcome, ended_at, error)
            SELECT e.entry_id, e.id, e.slot, 'cancelled', v_now, awa.expiry_error(e.expires_at, e.flaw) FROM entry e
        ), final AS (
            INSERT INTO awa.ended_jobs (id, created_at, ended_at, state, priority, attempt, max_attempts, timeout_ms,
                                        queue, kind, args, metadata, tags, concurrency_key, ordering_key, unique_key,
                                        follow_ups, history)
            SELECT e.id, coalesce(e.created_at, e.available_at), v_now, 'cancelled', e.priority, e.attempt,
                   e.max_attempts, e.timeout_ms, e.queue, e.kind, e.args, e.metadata, e.tags, e.concurrency_key,
                   e.ordering_key, e.unique_key, e.follow_ups,
                   awa.add_history(e.history, e.attempt, 'cancelled', v_now, NULL, NULL,
                                   awa.expiry_error(e.expires_at, e.flaw))
              FROM entry e
        )
        SELECT array_agg(e.id ORDER BY e.n) AS ids, array_agg('cancelled'::text) AS outcomes,
               array_agg(e.jobs ORDER BY e.n) AS jobs, array_agg(e.unique_key ORDER BY e.n) AS keys
          INTO r FROM entry e;
        PERFORM awa.conclude(r.ids, r.outcomes, r.jobs, r.keys);
        v_is_free := v_is_free OR EXISTS (SELECT FROM awa.grants g WHERE g.id = ANY (r.ids));
    END IF;
    RETURN v_is_free;
END $$;
