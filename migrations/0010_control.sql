-- Control: what an operator does to one job: cancel it, or move it to another queue.
--
-- Adds a table and functions; attempt_ends gets the outcome 'moved', and 'cancelled' with claim_id NULL. Replaces
-- awa.end_attempts under its old signature by one that heeds requests. Locks nothing that is in use. Workers of before
-- run on; they tell no handler that somebody asked, yet what its attempt comes to is cancelled all the same.
--
-- Who may end what, and why nothing is ended twice:
--   * an entry that no claim has passed: whoever holds its queue's claim lock exclusively. Claims hold it too, until
--     they have committed; so a statement that starts after the lock sees every claim there was, and none is made
--     before the end is committed. A statement that started before might not see a claim that was open then.
--   * an open attempt: whoever holds its runtime's lock exclusively. Settles and claims hold it shared, rescuers
--     exclusively, all until they have committed; so a statement that starts after the lock sees how the attempt ended,
--     if it did, and nobody ends it before this is committed. Except awa.complete_v1, which takes no lock; the unique
--     key of attempt_ends decides between the two.
--   * a row of waiting_jobs: whoever holds the row's lock.
-- These locks are only tried, one kind at a time, and given back (a subtransaction is rolled back) before a pause. The
-- functions belong into transactions of their own: in a lent one, the queue would stand still until it ends.
--
-- While a job is looked for, no segment may be emptied: its rows would vanish whatever the snapshot says, which does not
-- show yet what was carried out of it.

-- Requests to running attempts: end soon, and do not run again. A row says nothing about later attempts, there are
-- none. It is removed by whatever ends the attempt (awa.end_attempts), by the worker's look at its requests when the
-- attempt was completed, at the latest when nothing of its runtime is left.
CREATE TABLE awa.cancel_requests (
    entry_id     bigint      NOT NULL PRIMARY KEY,
    id           bigint      NOT NULL,
    runtime      bigint      NOT NULL,
    claim_id     bigint      NOT NULL,
    idx          smallint    NOT NULL,
    slot         smallint    NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    reason       text
) WITH (autovacuum_vacuum_scale_factor = 0.01);
CREATE INDEX cancel_requests_runtime ON awa.cancel_requests (runtime);

-- Why a job was cancelled, as its history tells it; behind the reason, what its attempt had come to by itself.
CREATE FUNCTION awa.cancel_error(p_reason text, p_error json) RETURNS json LANGUAGE sql IMMUTABLE AS $$
    SELECT json_build_object('type', 'Cancelled', 'traceback', coalesce(p_error->>'traceback', ''), 'text',
                             left(coalesce(p_reason, 'cancelled by an operator')
                                  || coalesce(E'\n' || (p_error->>'type') || ': ' || (p_error->>'text'), ''), 4000))
$$;

-- As in 0004_settle.sql; and an attempt that somebody asked to cancel ends as cancelled, unless it is completed. Its
-- callers hold the runtime's lock, and so does who asks: a request is seen here, or finds the attempt ended.
CREATE OR REPLACE FUNCTION awa.end_attempts(p_runtime bigint, p_flush bigint, p_claims bigint[], p_slots smallint[],
                                            p_nonces integer[], p_idx smallint[], p_outcomes text[],
                                            p_delays double precision[], p_elapsed integer[], p_errors text[])
RETURNS integer[]
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    v_done integer[];
    v_bells text[];
    v_requests bigint[];
BEGIN
    WITH member AS MATERIALIZED (
        SELECT o.n::integer AS n, c.slot, c.queue, c.lane, c.claim_id, o.outcome, o.delay, o.elapsed, o.error,
               c.entry_ids[o.idx] AS entry_id, c.xids[o.idx] AS xid
          FROM unnest(p_claims, p_slots, p_nonces, p_idx, p_outcomes, p_delays, p_elapsed, p_errors::json[])
               WITH ORDINALITY AS o(claim_id, slot, nonce, idx, outcome, delay, elapsed, error, n)
         CROSS JOIN LATERAL (SELECT * FROM awa.claims c
                              WHERE c.slot = o.slot AND c.runtime = p_runtime AND c.claim_id = o.claim_id LIMIT 1) c
         WHERE (o.nonce IS NULL OR c.nonce = o.nonce) AND o.idx BETWEEN 1 AND cardinality(c.entry_ids)
           AND NOT EXISTS (SELECT FROM awa.completions x
                            WHERE x.slot = o.slot AND x.claim_id = o.claim_id AND o.idx = ANY (x.idx) OFFSET 0)
    ), asked AS MATERIALIZED (
        SELECT m.*, r.entry_id IS NOT NULL AS has_request, r.reason,
               r.entry_id IS NOT NULL AND m.outcome <> 'completed' AS is_cancelled
          FROM member m
          LEFT JOIN LATERAL (SELECT * FROM awa.cancel_requests r WHERE r.entry_id = m.entry_id LIMIT 1) r ON true
    ), body AS MATERIALIZED (
        SELECT DISTINCT ON (m.slot, m.entry_id)        -- an attempt that is quoted twice ends once
               m.n, m.claim_id, m.elapsed, greatest(m.delay, 0) AS delay, clock_timestamp() AS at, m.has_request,
               -- the limit of attempts is kept here too, whoever asks
               CASE WHEN m.is_cancelled THEN 'cancelled'
                    WHEN m.outcome IN ('retried', 'rescued') AND j.attempt >= j.max_attempts THEN 'failed'
                    ELSE m.outcome END AS outcome,
               CASE WHEN m.is_cancelled THEN 'cancelled' ELSE m.outcome END AS asked,
               CASE WHEN m.is_cancelled THEN awa.cancel_error(m.reason, m.error) ELSE m.error END AS error, j.*
          FROM asked m
         CROSS JOIN LATERAL (SELECT * FROM awa.jobs j
                              WHERE j.slot = m.slot AND j.queue = m.queue AND j.lane = m.lane AND j.xid = m.xid
                                AND j.entry_id = m.entry_id LIMIT 1) j
         ORDER BY m.slot, m.entry_id, m.n
    ), ended AS (
        INSERT INTO awa.attempt_ends (entry_id, claim_id, flush, id, slot, outcome, ended_at, elapsed_ms, error)
        SELECT b.entry_id, b.claim_id, p_flush, b.id, b.slot, b.outcome, b.at, b.elapsed, b.error
          FROM body b ORDER BY b.slot, b.entry_id
            ON CONFLICT DO NOTHING
        RETURNING slot, entry_id
    ), done AS MATERIALIZED (
        SELECT b.*, CASE WHEN b.outcome IN ('retried', 'rescued') THEN b.attempt + 1 ELSE b.attempt END AS next_attempt,
               CASE WHEN b.outcome IN ('retried', 'rescued', 'failed', 'cancelled')
                    THEN awa.add_history(b.history, b.attempt, b.asked, b.at, b.elapsed, p_runtime, b.error)
                    ELSE b.history END AS next_history,
               CASE WHEN b.outcome IN ('released', 'rescued') THEN 'express'
                    WHEN b.outcome IN ('retried', 'snoozed') AND b.delay = 0 THEN 'main'
                    WHEN b.outcome IN ('retried', 'snoozed') THEN 'waiting'
                    WHEN b.outcome IN ('failed', 'cancelled') THEN 'ended' END AS goes
          FROM body b JOIN ended USING (slot, entry_id)
    ), appended AS (
        INSERT INTO awa.jobs (id, created_at, lane, priority, attempt, max_attempts, timeout_ms, queue, kind, args,
                              metadata, tags, concurrency_key, ordering_key, unique_key, expires_at, follow_ups, history)
        SELECT d.id, coalesce(d.created_at, d.available_at), 2 * d.priority + (d.goes = 'main')::integer, d.priority,
               d.next_attempt, d.max_attempts, d.timeout_ms, d.queue, d.kind, d.args, d.metadata, d.tags,
               d.concurrency_key, d.ordering_key, d.unique_key, d.expires_at, d.follow_ups, d.next_history
          FROM (SELECT * FROM done WHERE goes IN ('express', 'main') ORDER BY n) d
    ), waiting AS (
        INSERT INTO awa.waiting_jobs (id, created_at, run_at, state, priority, attempt, max_attempts, timeout_ms, queue,
                                      kind, args, metadata, tags, concurrency_key, ordering_key, unique_key, expires_at,
                                      follow_ups, history)
        SELECT d.id, coalesce(d.created_at, d.available_at), d.at + d.delay * interval '1 s',
               CASE d.outcome WHEN 'retried' THEN 'retryable' ELSE 'scheduled' END, d.priority, d.next_attempt,
               d.max_attempts, d.timeout_ms, d.queue, d.kind, d.args, d.metadata, d.tags, d.concurrency_key,
               d.ordering_key, d.unique_key, d.expires_at, d.follow_ups, d.next_history
          FROM done d WHERE d.goes = 'waiting'
    ), final AS (
        INSERT INTO awa.ended_jobs (id, created_at, ended_at, state, priority, attempt, max_attempts, timeout_ms, queue,
                                    kind, args, metadata, tags, concurrency_key, ordering_key, unique_key, follow_ups,
                                    history)
        SELECT d.id, coalesce(d.created_at, d.available_at), d.at, d.outcome, d.priority, d.attempt, d.max_attempts,
               d.timeout_ms, d.queue, d.kind, d.args, d.metadata, d.tags, d.concurrency_key, d.ordering_key,
               d.unique_key, d.follow_ups, d.next_history
          FROM done d WHERE d.goes = 'ended'
    )
    SELECT coalesce(array_agg(d.n), '{}'),
           array_agg(DISTINCT d.queue) FILTER (WHERE d.goes IN ('express', 'main'))
           || CASE WHEN bool_or(d.goes = 'waiting' AND d.delay < 1.5) THEN '{""}'::text[] END,
           array_agg(d.entry_id) FILTER (WHERE d.has_request)
      INTO v_done, v_bells, v_requests
      FROM done d;
    IF v_bells IS NOT NULL THEN
        PERFORM awa.ring(v_bells);
    END IF;
    IF v_requests IS NOT NULL THEN
        DELETE FROM awa.cancel_requests r WHERE r.entry_id = ANY (v_requests);
    END IF;
    RETURN v_done;
END $$;

-- Whether the claims of a queue have passed an entry: it was claimed or set aside then, or had ended before. One that
-- they have not passed is available, unless it has ended; under the queue's claim lock it stays so.
CREATE FUNCTION awa.is_passed(p_queue text, p_lane smallint, p_xid xid8, p_entry bigint) RETURNS boolean
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET jit = off
AS $$
DECLARE
    f awa.lane_frontier;
BEGIN
    IF p_lane = 0 THEN
        RETURN true;
    END IF;
    SELECT l.* INTO f FROM unnest(awa.frontier_of(p_queue)) l WHERE l.lane = p_lane;
    -- a lane that is not listed was never claimed from; f is NULL then
    RETURN coalesce(pg_visible_in_snapshot(p_xid, f.page_from)
                    OR pg_visible_in_snapshot(p_xid, f.page_to) AND (p_xid, p_entry) <= (f.last_xid, f.last_entry), false);
END $$;

-- End an entry that no claim has passed, unless one did or it ended in the meantime; returns its row then, for what
-- follows. The caller holds the claim lock of its queue.
CREATE FUNCTION awa.end_unclaimed(p_queue text, p_slot smallint, p_lane smallint, p_xid xid8, p_entry bigint,
                                  p_outcome text, p_error json) RETURNS SETOF awa.jobs
LANGUAGE plpgsql VOLATILE        -- so that its statement sees what was committed before it starts
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
        WITH entry AS MATERIALIZED (
            SELECT * FROM awa.jobs j
             WHERE j.slot = p_slot AND j.queue = p_queue AND j.lane = p_lane AND j.xid = p_xid AND j.entry_id = p_entry
               AND NOT awa.is_passed(p_queue, p_lane, p_xid, p_entry)
               AND NOT EXISTS (SELECT FROM awa.attempt_ends e WHERE e.slot = p_slot AND e.entry_id = p_entry OFFSET 0)
        ), ended AS (
            INSERT INTO awa.attempt_ends (entry_id, id, slot, outcome, error)
            SELECT j.entry_id, j.id, j.slot, p_outcome, p_error FROM entry j
        )
        SELECT * FROM entry;
END $$;

-- The newest entry of a job.
CREATE FUNCTION awa.newest_entry(p_id bigint) RETURNS SETOF awa.jobs
LANGUAGE sql STABLE
SET enable_seqscan = off SET enable_bitmapscan = on SET jit = off
AS $$
    SELECT * FROM awa.jobs t WHERE t.id = p_id ORDER BY t.entry_id DESC LIMIT 1
$$;

-- Where a job is, and its state. All of it is read in the snapshot of the calling statement, in which the job is in one
-- place, although jobs move from table to table. The caller holds a lock on awa.jobs from before that.
--   waiting    it has a row in waiting_jobs
--   available  its newest entry was neither passed by the claims of its queue nor ended
--   running    its newest entry is a member of the open claim that runtime, claim_id and idx name
--   ended      for good
--   unclear    running, but no heartbeat tells the claim yet that a worker lost sight of: look again later
-- Everything is NULL when there is no such job, or its history is gone.
CREATE FUNCTION awa.locate(p_id bigint, OUT place text, OUT state text, OUT queue text, OUT slot smallint,
                           OUT lane smallint, OUT xid xid8, OUT entry_id bigint, OUT runtime bigint,
                           OUT claim_id bigint, OUT idx smallint)
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    j awa.jobs;
    r record;
BEGIN
    SELECT 'waiting', w.state, w.queue INTO place, state, queue FROM awa.waiting_jobs w WHERE w.id = p_id;
    IF FOUND THEN
        RETURN;
    END IF;
    SELECT 'ended', e.state, e.queue INTO place, state, queue FROM awa.ended_jobs e WHERE e.id = p_id;
    IF FOUND THEN
        RETURN;
    END IF;
    SELECT * INTO j FROM awa.newest_entry(p_id);
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT CASE WHEN e.outcome IN ('completed', 'failed', 'cancelled') THEN e.outcome END INTO state
      FROM awa.attempt_ends e WHERE e.slot = j.slot AND e.entry_id = j.entry_id;
    IF FOUND THEN                -- else its next entry lay in a segment that was emptied since, and nothing is left
        place := CASE WHEN state IS NOT NULL THEN 'ended' END;
        queue := CASE WHEN state IS NOT NULL THEN j.queue END;
        RETURN;
    END IF;
    queue := j.queue; slot := j.slot; lane := j.lane; xid := j.xid; entry_id := j.entry_id;
    IF NOT awa.is_passed(j.queue, j.lane, j.xid, j.entry_id) THEN
        place := 'available'; state := 'available';
        RETURN;
    END IF;
    -- the open claims of each runtime, as rescue reads them: few, whatever has been claimed ever
    SELECT c.runtime, c.claim_id, array_position(c.entry_ids, j.entry_id)::smallint AS idx INTO r
      FROM awa.runtime_instances i
     CROSS JOIN LATERAL (
           SELECT * FROM awa.claims t
            WHERE t.slot = j.slot AND t.runtime = i.id AND t.claim_id > i.newest_claim
           UNION ALL
           SELECT t.* FROM unnest(i.open_claims) o CROSS JOIN LATERAL (
                  SELECT * FROM awa.claims t
                   WHERE t.slot = j.slot AND t.runtime = i.id AND t.claim_id = o AND o <= i.newest_claim OFFSET 0) t) c
     WHERE i.ended_at IS NULL AND j.entry_id = ANY (c.entry_ids)
     LIMIT 1;
    IF NOT FOUND THEN
        SELECT f.state INTO state FROM awa.find_job_v1(p_id) f;
        place := CASE state WHEN 'completed' THEN 'ended' ELSE 'unclear' END;
    ELSIF EXISTS (SELECT FROM awa.completions x
                   WHERE x.slot = j.slot AND x.claim_id = r.claim_id AND r.idx = ANY (x.idx) OFFSET 0) THEN
        place := 'ended'; state := 'completed';
    ELSE
        place := 'running'; state := 'running';
        runtime := r.runtime; claim_id := r.claim_id; idx := r.idx;
    END IF;
END $$;

-- Cancel a job. In a transaction of its own, at READ COMMITTED.
--   cancelled  it is, at once: it was waiting or available; or p_force ended its running attempt
--   requested  its handler is told to end, within a second; whatever it comes to then is cancelled, except a success
--   nothing    it had ended before; state says how
--   busy       somebody else held what belongs to it, for a second; nothing is changed, try again
--   not_found  there is no such job, or its history is gone
-- state is what it is now.
CREATE FUNCTION awa.cancel_v1(p_id bigint, p_reason text DEFAULT NULL, p_force boolean DEFAULT false,
                              OUT happened text, OUT state text)
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET lock_timeout = '10ms'
AS $$
DECLARE
    v_until timestamptz := clock_timestamp() + interval '1 s';
    v_error json := awa.cancel_error(p_reason, NULL);
    v_is_ours boolean;
    p record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.cancel needs READ COMMITTED: an older snapshot would miss a claim' USING ERRCODE = 'AWA02';
    END IF;
    LOOP
        BEGIN
            LOCK TABLE awa.jobs IN ACCESS SHARE MODE;
            SELECT * INTO p FROM awa.locate(p_id);
            state := p.state;
            IF p.place IS NULL THEN
                happened := 'not_found';
                RETURN;
            ELSIF p.place = 'ended' THEN
                happened := 'nothing';
                RETURN;
            ELSIF p.place = 'waiting' THEN
                WITH taken AS (
                    DELETE FROM awa.waiting_jobs w
                     WHERE w.id = (SELECT t.id FROM awa.waiting_jobs t WHERE t.id = p_id FOR UPDATE SKIP LOCKED)
                    RETURNING w.*
                )
                INSERT INTO awa.ended_jobs (id, created_at, state, priority, attempt, max_attempts, timeout_ms, queue,
                                            kind, args, metadata, tags, concurrency_key, ordering_key, unique_key,
                                            follow_ups, history)
                SELECT t.id, t.created_at, 'cancelled', t.priority, t.attempt, t.max_attempts, t.timeout_ms, t.queue,
                       t.kind, t.args, t.metadata, t.tags, t.concurrency_key, t.ordering_key, t.unique_key,
                       t.follow_ups,
                       awa.add_history(t.history, t.attempt, 'cancelled', clock_timestamp(), NULL, NULL, v_error)
                  FROM taken t;
                IF FOUND THEN
                    happened := 'cancelled';
                    state := 'cancelled';
                    RETURN;
                END IF;
            ELSIF p.place = 'available'
                  AND pg_try_advisory_xact_lock(hashtextextended('awa.queue:' || p.queue, 0)) THEN
                INSERT INTO awa.ended_jobs (id, created_at, state, priority, attempt, max_attempts, timeout_ms, queue,
                                            kind, args, metadata, tags, concurrency_key, ordering_key, unique_key,
                                            follow_ups, history)
                SELECT j.id, coalesce(j.created_at, j.available_at), 'cancelled', j.priority, j.attempt, j.max_attempts,
                       j.timeout_ms, j.queue, j.kind, j.args, j.metadata, j.tags, j.concurrency_key, j.ordering_key,
                       j.unique_key, j.follow_ups,
                       awa.add_history(j.history, j.attempt, 'cancelled', clock_timestamp(), NULL, NULL, v_error)
                  FROM awa.end_unclaimed(p.queue, p.slot, p.lane, p.xid, p.entry_id, 'cancelled', v_error) j;
                IF FOUND THEN
                    happened := 'cancelled';
                    state := 'cancelled';
                    RETURN;
                END IF;
            ELSIF p.place = 'running'
                  AND pg_try_advisory_xact_lock(hashtextextended('awa.runtime:' || p.runtime, 0)) THEN
                IF p_force THEN
                    v_is_ours := cardinality(awa.end_attempts(
                        p.runtime, NULL, ARRAY[p.claim_id], ARRAY[p.slot], ARRAY[NULL::integer], ARRAY[p.idx],
                        ARRAY['cancelled'], ARRAY[0::double precision], ARRAY[NULL::integer],
                        ARRAY[v_error::text])) = 1;
                ELSE
                    v_is_ours := NOT EXISTS (SELECT FROM awa.attempt_ends e
                                              WHERE e.slot = p.slot AND e.entry_id = p.entry_id OFFSET 0)
                                 AND NOT EXISTS (SELECT FROM awa.completions x
                                                  WHERE x.slot = p.slot AND x.claim_id = p.claim_id
                                                    AND p.idx = ANY (x.idx) OFFSET 0);
                END IF;
                IF v_is_ours THEN
                    -- by force too: the handler still runs, and is told that it need not
                    INSERT INTO awa.cancel_requests AS r (entry_id, id, runtime, claim_id, idx, slot, reason)
                    VALUES (p.entry_id, p_id, p.runtime, p.claim_id, p.idx, p.slot, left(p_reason, 4000))
                        ON CONFLICT (entry_id) DO UPDATE SET reason = coalesce(excluded.reason, r.reason);
                    happened := CASE WHEN p_force THEN 'cancelled' ELSE 'requested' END;
                    state := CASE WHEN p_force THEN 'cancelled' ELSE 'running' END;
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

-- Move a job that waits or is available to another queue; there it comes last, unless it was rescued. In a transaction of its own, at READ
-- COMMITTED.
--   moved      it is
--   nothing    it was there already
--   refused    it is running or has ended; state says which
--   busy       somebody else held what belongs to it, for a second; nothing is changed, try again
--   not_found  there is no such job, or its history is gone
CREATE FUNCTION awa.move_v1(p_id bigint, p_queue text, OUT happened text, OUT state text)
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET lock_timeout = '10ms'
AS $$
DECLARE
    v_until timestamptz := clock_timestamp() + interval '1 s';
    v_waits_for text;
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
                RETURNING w.waits_for INTO v_waits_for;
                IF FOUND THEN
                    IF v_waits_for <> 'time' THEN
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
                       -- one that may have killed its worker is claimed alone, which only express lanes see to
                       2 * j.priority + (j.history->-1->>'outcome' IS DISTINCT FROM 'rescued')::integer, j.priority,
                       j.attempt, j.max_attempts, j.timeout_ms, p_queue, j.kind, j.args, j.metadata, j.tags,
                       j.concurrency_key, j.ordering_key, j.unique_key, j.expires_at, j.follow_ups, j.history
                  FROM awa.end_unclaimed(p.queue, p.slot, p.lane, p.xid, p.entry_id, 'moved', NULL) j;
                IF FOUND THEN
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
