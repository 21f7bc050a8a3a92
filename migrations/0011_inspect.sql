-- Looking at jobs: where one is and what its last attempt came to; what the lists and counts of awa.admin read.
--
-- Adds functions, and two indexes, which hold off the recording of jobs that wait, failed or were cancelled while they
-- are built. Replaces awa.find_job_v1 in place. Works with awa 0.1 and later.
--
-- The functions are STABLE, so all their statements see the snapshot of the statement that calls them. A job moves
-- from table to table within one transaction, which that snapshot sees as a whole or not at all: the job is always in
-- one place. A segment that is emptied is the exception, since TRUNCATE ignores snapshots: when it is emptied between
-- the snapshot and the first look into it, a job that was carried forward out of it shortly before is found nowhere.
-- That look locks the segment, so nothing vanishes behind it. Whoever finds nothing looks again, in a new snapshot.

CREATE INDEX waiting_jobs_state ON awa.waiting_jobs (queue, state, id);
CREATE INDEX ended_jobs_state ON awa.ended_jobs (queue, state, ended_at, id);

-- The claim that took an entry; no row when none has.
--
-- The frontiers of a queue's claim rows only advance, so the first row whose frontier has passed the entry belongs to
-- the claim that took it, and is found by halving: a dozen rows are read, however many the queue has. One claim writes
-- a row for each slot and lane, with one frontier. Nobody walks lane 0; what is claimed as it is appended is claimed
-- at that time, by the same clock. Whatever is not where it should be (that clock was set back) is looked for in all
-- rows of the slot and queue.
CREATE FUNCTION awa.claim_of(p_slot smallint, p_queue text, p_lane smallint, p_xid xid8, p_entry bigint,
                             p_appended_at timestamptz)
RETURNS TABLE (claim_id bigint, idx smallint, claimed_at timestamptz, runtime bigint)
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    v_lo bigint;
    v_hi bigint;
    r record;
BEGIN
    -- a number that is still to come here is another cluster's: no frontier knows it, its claim row may
    IF p_lane <> 0 AND p_xid < pg_snapshot_xmax(pg_current_snapshot())
       AND NOT awa.has_passed(awa.frontier_of(p_queue), p_lane, p_xid, p_entry) THEN
        RETURN;
    END IF;
    SELECT c.claim_id INTO v_lo FROM awa.claims c WHERE c.queue = p_queue ORDER BY c.claim_id LIMIT 1;
    SELECT c.claim_id INTO v_hi FROM awa.claims c WHERE c.queue = p_queue ORDER BY c.claim_id DESC LIMIT 1;
    WHILE v_lo < v_hi LOOP
        SELECT c.claim_id, c.claimed_at, c.frontier INTO r FROM awa.claims c
         WHERE c.queue = p_queue AND c.claim_id <= (v_lo + v_hi) / 2
         ORDER BY c.claim_id DESC LIMIT 1;
        IF (CASE WHEN p_lane = 0 THEN r.claimed_at >= p_appended_at
                 ELSE awa.has_passed(r.frontier, p_lane, p_xid, p_entry) END) THEN
            v_hi := r.claim_id;
        ELSE
            v_lo := (v_lo + v_hi) / 2 + 1;
        END IF;
    END LOOP;
    -- a few rows of the slot: one for each lane, and of lane 0 those of claims that were made at the same moment
    RETURN QUERY
        SELECT c.claim_id, array_position(c.entry_ids, p_entry)::smallint, c.claimed_at, c.runtime
          FROM (SELECT * FROM awa.claims c
                 WHERE c.slot = p_slot AND c.queue = p_queue AND c.claim_id >= v_hi
                 ORDER BY c.claim_id LIMIT 20) c
         WHERE c.lane = p_lane AND p_entry = ANY (c.entry_ids)
         LIMIT 1;
    IF NOT FOUND THEN
        RETURN QUERY
            SELECT c.claim_id, array_position(c.entry_ids, p_entry)::smallint, c.claimed_at, c.runtime
              FROM awa.claims c
             WHERE c.slot = p_slot AND c.queue = p_queue AND c.lane = p_lane AND p_entry = ANY (c.entry_ids)
             LIMIT 1;
    END IF;
END $$;

-- Whether a frontier has passed a position of a lane.
CREATE FUNCTION awa.has_passed(p_frontier awa.lane_frontier[], p_lane smallint, p_xid xid8, p_entry bigint)
RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    f awa.lane_frontier;
BEGIN
    FOR v_n IN 1..coalesce(cardinality(p_frontier), 0) LOOP
        f := p_frontier[v_n];
        IF f.lane = p_lane THEN
            RETURN pg_visible_in_snapshot(p_xid, f.page_from)
                OR coalesce(pg_visible_in_snapshot(p_xid, f.page_to)
                            AND (p_xid, p_entry) <= (f.last_xid, f.last_entry), false);
        END IF;
    END LOOP;
    RETURN false;
END $$;

-- One job by its id, wherever it is, with its state and the times and place of its last attempt.
--
-- The state: a job that waits, failed or was cancelled has a row that says so. Else its newest entry decides: not
-- claimed, it is available; claimed and not ended, running; in completions, completed; ended for good, what its end
-- says. An entry that ended otherwise (retried, snoozed, released, rescued, set_aside, moved, carried) left the job to
-- a successor, so as the newest one it is of a job that is gone: no row.
--
-- The last attempt is the newest entry that was claimed, unless it was handed back unstarted (released, set_aside). When
-- its segment is gone, the history tells of it, without claimed_at. runtime, hostname and pid say who runs or ran it.
-- error has type, text and traceback of the last attempt that failed or was cancelled; NULL when none was, or the job is
-- completed.
-- run_at is NULL when the job does not wait for a time. On a replica an older state than the primary's may be shown.
CREATE FUNCTION awa.find_job_v2(p_id bigint)
RETURNS TABLE (id bigint, queue text, kind text, state text, priority smallint, attempt smallint,
               max_attempts smallint, args json, metadata json, tags text[], created_at timestamptz,
               run_at timestamptz, claimed_at timestamptz, ended_at timestamptz, elapsed_ms integer, runtime bigint,
               hostname text, pid integer, waits_for text, error json, history json)
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET max_parallel_workers_per_gather = 0 SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    j awa.jobs;
    e awa.attempt_ends;
    v_state text;          -- NULL until the job is found
    v_is_newest boolean := true;
    v_error json;
    v_last json;           -- the last ended attempt in the history
    v_claim bigint;
    v_idx smallint;
    v_claimed_at timestamptz;
    v_runtime bigint;
    v_ended_at timestamptz;
    v_elapsed_ms integer;
BEGIN
    SELECT w.id, w.queue, w.kind, w.state, w.priority, w.attempt, w.max_attempts, w.args, w.metadata, w.tags,
           w.created_at, CASE WHEN isfinite(w.run_at) THEN w.run_at END, w.ended_at, w.waits_for, w.history, w.state
      INTO id, queue, kind, state, priority, attempt, max_attempts, args, metadata, tags,
           created_at, run_at, ended_at, waits_for, history, v_state
      FROM (SELECT t.id, t.queue, t.kind, t.state, t.priority, t.attempt, t.max_attempts, t.args, t.metadata, t.tags,
                   t.created_at, t.run_at, NULL::timestamptz AS ended_at, t.waits_for, t.history
              FROM awa.waiting_jobs t WHERE t.id = p_id
             UNION ALL
            SELECT t.id, t.queue, t.kind, t.state, t.priority, t.attempt, t.max_attempts, t.args, t.metadata, t.tags,
                   t.created_at, NULL, t.ended_at, NULL, t.history
              FROM awa.ended_jobs t WHERE t.id = p_id) w;
    FOR j IN SELECT * FROM awa.jobs t WHERE t.id = p_id ORDER BY t.entry_id DESC LOOP
        SELECT * INTO e FROM awa.attempt_ends t WHERE t.slot = j.slot AND t.entry_id = j.entry_id;
        IF e.entry_id IS NULL THEN
            SELECT c.claim_id, c.idx, c.claimed_at, c.runtime INTO v_claim, v_idx, v_claimed_at, v_runtime
              FROM awa.claim_of(j.slot, j.queue, j.lane, j.xid, j.entry_id, j.available_at) c;
            SELECT t.completed_at, t.elapsed_ms[array_position(t.idx, v_idx)] INTO v_ended_at, v_elapsed_ms
              FROM awa.completions t
             WHERE t.slot = j.slot AND t.claim_id = v_claim AND v_idx = ANY (t.idx) LIMIT 1;
        ELSE
            SELECT t.claim_id, t.claimed_at, t.runtime INTO v_claim, v_claimed_at, v_runtime
              FROM awa.claims t
             WHERE t.slot = j.slot AND t.queue = j.queue AND t.claim_id = e.claim_id LIMIT 1;
            v_ended_at := e.ended_at;
            v_elapsed_ms := e.elapsed_ms;
        END IF;
        IF v_is_newest AND v_state IS NULL THEN
            v_state := CASE WHEN e.outcome IN ('completed', 'failed', 'cancelled') THEN e.outcome
                            WHEN e.entry_id IS NOT NULL THEN NULL
                            WHEN v_ended_at IS NOT NULL THEN 'completed'
                            WHEN v_claim IS NOT NULL THEN 'running'
                            ELSE 'available' END;
            IF v_state IS NULL THEN
                RETURN;
            END IF;
            id := j.id; queue := j.queue; kind := j.kind; state := v_state; priority := j.priority;
            attempt := j.attempt; max_attempts := j.max_attempts; args := j.args; metadata := j.metadata;
            tags := j.tags; created_at := coalesce(j.created_at, j.available_at); history := j.history;
            ended_at := v_ended_at;
            v_error := e.error;
        END IF;
        v_is_newest := false;
        CONTINUE WHEN v_claim IS NULL OR e.outcome IN ('released', 'set_aside');
        claimed_at := v_claimed_at;
        runtime := v_runtime;
        elapsed_ms := v_elapsed_ms;
        EXIT;
    END LOOP;
    IF v_state IS NULL THEN
        RETURN;
    END IF;
    v_last := history->-1;
    IF runtime IS NULL AND v_last IS NOT NULL THEN
        runtime := (v_last->>'runtime')::bigint;
        elapsed_ms := (v_last->>'elapsed_ms')::integer;
    END IF;
    SELECT t.hostname, t.pid INTO hostname, pid FROM awa.runtime_instances t WHERE t.id = runtime;
    IF v_state <> 'completed' THEN
        error := coalesce(v_error, awa.error_of(v_last));
    END IF;
    RETURN NEXT;
END $$;

-- What an ended attempt in a history says about its error; NULL when it says nothing.
CREATE FUNCTION awa.error_of(p_ended json) RETURNS json LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN coalesce(p_ended->>'type', p_ended->>'text') IS NOT NULL
                THEN json_build_object('type', p_ended->'type', 'text', p_ended->'text',
                                       'traceback', p_ended->'traceback') END
$$;

-- As before, by the way of the newer one: awa.cancel_v1 and programs of before call it.
CREATE OR REPLACE FUNCTION awa.find_job_v1(p_id bigint)
RETURNS TABLE (id bigint, queue text, kind text, state text, priority smallint, attempt smallint,
               max_attempts smallint, args json, metadata json, tags text[], created_at timestamptz,
               run_at timestamptz, ended_at timestamptz, waits_for text, history json)
LANGUAGE sql STABLE
AS $$
    SELECT f.id, f.queue, f.kind, f.state, f.priority, f.attempt, f.max_attempts, f.args, f.metadata, f.tags,
           f.created_at, f.run_at, f.ended_at, f.waits_for, f.history
      FROM awa.find_job_v2(p_id) f
$$;

-- Summarise the index of job ids for up to p_ranges ranges of 32 pages of a slot, from page p_from on. What is not
-- summarised is read whole whenever a job is looked up. The last 8 MiB of the current slot are left out: an insert
-- into a summarised range costs a write to the index. Returns the page to go on from: p_from when nothing is left to
-- do, 0 when the slot was emptied.
--
-- As the owner of the index, whom PostgreSQL wants here; it has no effect but on speed.
CREATE FUNCTION awa.summarize_v1(p_slot smallint, p_from bigint, p_ranges integer) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog
AS $$
DECLARE
    v_index regclass := format('awa.jobs_%s_id_idx', p_slot)::regclass;
    v_end bigint := pg_relation_size(format('awa.jobs_%s', p_slot)::regclass) / current_setting('block_size')::bigint;
    v_page bigint := p_from;
BEGIN
    IF p_from > v_end THEN
        RETURN 0;
    END IF;
    IF p_slot = pg_sequence_last_value('awa.ring_seq') THEN
        v_end := v_end - 1024;
    END IF;
    WHILE v_page + 32 <= v_end AND v_page < p_from + 32 * p_ranges LOOP
        PERFORM brin_summarize_range(v_index, v_page);
        v_page := v_page + 32;
    END LOOP;
    RETURN v_page;
END $$;
