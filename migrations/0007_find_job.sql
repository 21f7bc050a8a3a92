-- Finding one job by its id, with its state, wherever it is.
--
-- Adds a function only. Works with awa 0.1 and later.
--
-- The state of an entry is derived: not in any claim, it is available; claimed and not ended, running; in completions
-- or ended as completed, completed. What waits and what failed or was cancelled has a row that says so. All statements
-- see one snapshot. On a replica a job may be shown in an older state than its primary shows.
CREATE FUNCTION awa.find_job_v1(p_id bigint)
RETURNS TABLE (id bigint, queue text, kind text, state text, priority smallint, attempt smallint,
               max_attempts smallint, args json, metadata json, tags text[], created_at timestamptz,
               run_at timestamptz, ended_at timestamptz, waits_for text, history json)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    j awa.jobs;
    v_state text;
    v_ended_at timestamptz;
    r record;
BEGIN
    RETURN QUERY
        SELECT w.id, w.queue, w.kind, w.state, w.priority, w.attempt, w.max_attempts, w.args, w.metadata, w.tags,
               w.created_at, CASE WHEN isfinite(w.run_at) THEN w.run_at END, NULL::timestamptz, w.waits_for, w.history
          FROM awa.waiting_jobs w WHERE w.id = p_id
        UNION ALL
        SELECT e.id, e.queue, e.kind, e.state, e.priority, e.attempt, e.max_attempts, e.args, e.metadata, e.tags,
               e.created_at, NULL, e.ended_at, NULL, e.history
          FROM awa.ended_jobs e WHERE e.id = p_id;
    IF FOUND THEN
        RETURN;
    END IF;
    SELECT * INTO j FROM awa.jobs t WHERE t.id = p_id ORDER BY t.entry_id DESC LIMIT 1;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT e.outcome, e.ended_at INTO v_state, v_ended_at FROM awa.attempt_ends e
     WHERE e.slot = j.slot AND e.entry_id = j.entry_id;
    IF NOT FOUND THEN
        v_state := 'available';
        SELECT c.claim_id, array_position(c.entry_ids, j.entry_id)::smallint AS idx INTO r FROM awa.claims c
         WHERE c.slot = j.slot AND c.queue = j.queue AND c.lane = j.lane AND j.entry_id = ANY (c.entry_ids)
         LIMIT 1;
        IF FOUND THEN
            v_state := 'running';
            SELECT 'completed', x.completed_at INTO v_state, v_ended_at FROM awa.completions x
             WHERE x.slot = j.slot AND x.claim_id = r.claim_id AND r.idx = ANY (x.idx);
            v_state := coalesce(v_state, 'running');
        END IF;
    END IF;
    RETURN QUERY SELECT j.id, j.queue, j.kind, v_state, j.priority, j.attempt, j.max_attempts, j.args, j.metadata,
                        j.tags, coalesce(j.created_at, j.available_at), NULL::timestamptz, v_ended_at, NULL::text,
                        j.history;
END $$;
