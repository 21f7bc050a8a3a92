-- What follows from an outcome: jobs that are to run then, keys that are free then, a value that somebody waits for.
--
-- Adds two columns without a default, for which the segments are locked a moment, and an index on the ends of attempts,
-- which holds off the recording of outcomes while those of the segments are read. Replaces functions in place, with
-- the same meaning for who knows nothing of this. Works with awa 0.1 and later.
--
-- A success of which nothing follows stays a position in a row of completions. One with consequences is recorded by
-- itself, in attempt_ends; the database decides which it is, so that it does not matter which worker settles: the claim
-- notes the positions, and awa.settle_v1 takes them out of what is grouped. Whatever writes the end of an attempt or of
-- a waiting job applies the consequences in the same transaction, so they happen exactly once, whoever records the
-- outcome.
--
-- A job's follow_ups: {"completed": [job, ...], "failed": [...], "cancelled": [...], "of": id}. A job there has kind
-- and, as wanted, queue, args, priority, max_attempts, timeout_ms, tags, metadata, run_at or delay (seconds from the
-- outcome), and follow_ups of its own. "of" is the job whose follow-up it is. Rows of plain SQL may hold anything: what
-- cannot be inserted keeps no attempt from ending, and the error of the ended job tells why.

-- A completed job by its id, when it is recorded by itself. Before the columns: reading goes on beside it. Written so
-- that it serves that look-up alone: of an index for outcome = 'completed' the planner thinks, without statistics, that
-- it holds nearly nothing, and reads all of it where claim_id would find two rows.
CREATE INDEX attempt_ends_completed ON awa.attempt_ends (id) WHERE left(outcome, 9) = 'completed';

ALTER TABLE awa.claims ADD COLUMN singles smallint[];      -- positions of members whose success has consequences
ALTER TABLE awa.attempt_ends ADD COLUMN result json;       -- of a completed attempt; NULL: nothing is kept

-- The positions of some entries among the members of a claim.
CREATE FUNCTION awa.positions(p_entries bigint[], p_some bigint[]) RETURNS smallint[] LANGUAGE sql IMMUTABLE AS $$
    SELECT array_agg(m.n::smallint)
      FROM unnest(p_entries) WITH ORDINALITY AS m(entry_id, n) WHERE m.entry_id = ANY (p_some)
$$;

-- The jobs that are to follow an outcome, NULL when there are none; or why they cannot be inserted. Never raises.
CREATE FUNCTION awa.follow_ups_after(p_follow_ups json, p_outcome text, OUT jobs json, OUT flaw text)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF p_outcome NOT IN ('completed', 'failed', 'cancelled')
       OR p_follow_ups::text LIKE '%"' || p_outcome || '"%' IS NOT TRUE THEN
        RETURN;
    END IF;
    jobs := p_follow_ups->p_outcome;
    SELECT format('%s[%s] %s', p_outcome, x.n - 1, x.flaw) INTO flaw
      FROM (SELECT t.n, CASE WHEN coalesce(length(t.kind), 0) NOT BETWEEN 1 AND 200
                             THEN 'needs a kind of 1 to 200 characters'
                             WHEN length(t.queue) NOT BETWEEN 1 AND 200 THEN 'has a queue of not 1 to 200 characters'
                             WHEN t.priority NOT BETWEEN 1 AND 4 THEN 'has a priority that is not 1 to 4'
                             WHEN t.max_attempts NOT BETWEEN 1 AND 1000 THEN 'has max_attempts that are not 1 to 1000'
                             WHEN t.timeout_ms < 0 THEN 'has a timeout below 0'
                             WHEN t.delay NOT BETWEEN 0 AND 315360000 THEN 'has a delay that is not 0 s to ten years'
                             WHEN NOT isfinite(t.run_at) THEN 'has a run_at that never comes' END AS flaw
              FROM awa.follow_up_rows(jobs) t) x
     WHERE x.flaw IS NOT NULL ORDER BY x.n LIMIT 1;
    IF flaw IS NOT NULL THEN
        jobs := NULL;
    END IF;
EXCEPTION WHEN OTHERS THEN
    jobs := NULL;
    flaw := format('%s cannot be read: %s', p_outcome, SQLERRM);
END $$;

-- An array of follow-ups as rows. json, which keeps the text of args as it was sent; jsonb would not.
CREATE FUNCTION awa.follow_up_rows(p_jobs json)
RETURNS TABLE (n bigint, kind text, queue text, args json, priority smallint, max_attempts smallint, timeout_ms integer,
               tags text[], metadata json, run_at timestamptz, delay double precision, follow_ups json)
LANGUAGE sql STABLE AS $$
    SELECT x.n, x.kind, x.queue, x.args, x.priority, x.max_attempts, x.timeout_ms, x.tags, x.metadata, x.run_at,
           x.delay, x.follow_ups
      FROM ROWS FROM (json_to_recordset(p_jobs)
                      AS (kind text, queue text, args json, priority smallint, max_attempts smallint,
                          timeout_ms integer, tags text[], metadata json, run_at timestamptz,
                          delay double precision, follow_ups json))
           WITH ORDINALITY AS x(kind, queue, args, priority, max_attempts, timeout_ms, tags, metadata, run_at, delay,
                                follow_ups, n)
$$;

-- An error that tells of follow-ups which could not be inserted, too.
CREATE FUNCTION awa.with_flaw(p_error json, p_flaw text) RETURNS json LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF p_flaw IS NULL THEN
        RETURN p_error;
    END IF;
    RETURN json_build_object('type', coalesce(p_error->>'type', 'FollowUpsLost'),
                             'traceback', coalesce(p_error->>'traceback', ''), 'text',
                             left(coalesce((p_error->>'text') || E'\n', '')
                                  || 'its follow-ups were not inserted: ' || p_flaw, 4000));
EXCEPTION WHEN OTHERS THEN
    RETURN p_error;
END $$;

-- Insert what follows: element i of p_jobs is an array of jobs that awa.follow_ups_after gave for job p_ids[i]. Rings
-- for them unless the transaction must notify nobody. In the caller's transaction, at any isolation level; it touches
-- the current segment only.
CREATE FUNCTION awa.append_follow_ups(p_ids bigint[], p_jobs json[], p_notify boolean) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_bells text[];
BEGIN
    WITH child AS MATERIALIZED (
        SELECT nextval('awa.entry_id_seq') AS id, t.*
          FROM (SELECT p.n AS parent, r.n, coalesce(r.queue, 'default') AS queue, r.kind,
                       coalesce(r.args, '{}') AS args, coalesce(r.priority, 2::smallint) AS priority,
                       coalesce(r.max_attempts, 25::smallint) AS max_attempts, r.timeout_ms, r.tags, r.metadata,
                       coalesce(r.run_at, clock_timestamp() + r.delay * interval '1 s') AS run_at,
                       concat('{"of":', p.id, ',"completed":' || (r.follow_ups->'completed')::text,
                              ',"failed":' || (r.follow_ups->'failed')::text,
                              ',"cancelled":' || (r.follow_ups->'cancelled')::text, '}')::json AS follow_ups
                  FROM unnest(p_ids, p_jobs) WITH ORDINALITY AS p(id, jobs, n)
                 CROSS JOIN LATERAL awa.follow_up_rows(p.jobs) r
                 ORDER BY p.n, r.n) t
    ), sorted AS MATERIALIZED (
        SELECT c.*, coalesce(c.run_at <= clock_timestamp(), true) AS is_due FROM child c
    ), available AS (
        INSERT INTO awa.jobs (entry_id, id, queue, lane, priority, kind, args, max_attempts, timeout_ms, tags, metadata,
                              follow_ups)
        SELECT c.id, c.id, c.queue, 2 * c.priority + 1, c.priority, c.kind, c.args, c.max_attempts, c.timeout_ms,
               c.tags, c.metadata, c.follow_ups
          FROM sorted c WHERE c.is_due ORDER BY c.id
    ), scheduled AS (
        INSERT INTO awa.waiting_jobs (id, run_at, queue, priority, kind, args, max_attempts, timeout_ms, tags, metadata,
                                      follow_ups)
        SELECT c.id, c.run_at, c.queue, c.priority, c.kind, c.args, c.max_attempts, c.timeout_ms, c.tags, c.metadata,
               c.follow_ups
          FROM sorted c WHERE NOT c.is_due
    )
    SELECT array_agg(DISTINCT CASE WHEN c.is_due THEN c.queue ELSE '' END) INTO v_bells
      FROM sorted c WHERE c.is_due OR c.run_at < clock_timestamp() + interval '1.5 s';
    IF p_notify AND v_bells IS NOT NULL THEN
        PERFORM awa.ring(v_bells);
    END IF;
END $$;

-- Where those listen who wait for results: each holds an advisory lock for the job that it waits for, shared.
CREATE FUNCTION awa.result_channel() RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT 'awa_' || left(encode(sha256(convert_to('awa.result', 'UTF8')), 'hex'), 16)
$$;

-- Wake who waits for the results of these jobs, and nobody else: a lock that can be had is nobody's.
CREATE FUNCTION awa.wake_waiters(p_ids bigint[]) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_id bigint;
    v_bell bigint;
BEGIN
    FOREACH v_id IN ARRAY p_ids LOOP
        v_bell := hashtextextended('awa.result:' || v_id, 0);
        IF pg_try_advisory_lock(v_bell) THEN
            PERFORM pg_advisory_unlock(v_bell);
        ELSE
            PERFORM pg_notify(awa.result_channel(), v_id::text);
        END IF;
    END LOOP;
END $$;

-- The consequences of final outcomes, in the transaction that records them: insert what follows (NULL: nothing), free
-- the unique keys that are not held in that state, wake who waits. The bit of a state in a key's 17th byte is that of
-- awa.JobState; without the byte a key is held by all but failed and cancelled jobs. Rows of job_uniques that somebody
-- looks at are left to the sweep: nobody waits here.
CREATE FUNCTION awa.conclude(p_ids bigint[], p_outcomes text[], p_jobs json[], p_keys bytea[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    IF num_nonnulls(VARIADIC p_jobs) > 0 THEN
        PERFORM awa.append_follow_ups(p_ids, p_jobs, true);
    END IF;
    IF num_nonnulls(VARIADIC p_keys) > 0 THEN
        DELETE FROM awa.job_uniques u
         WHERE u.key = ANY (ARRAY(
               SELECT t.key
                 FROM (SELECT p.id, substring(p.key FOR 16) AS key
                         FROM unnest(p_ids, p_outcomes, p_keys) AS p(id, outcome, key)
                        WHERE CASE WHEN octet_length(p.key) > 16 THEN get_byte(p.key, 16) ELSE 63 END
                              & CASE p.outcome WHEN 'completed' THEN 32 WHEN 'failed' THEN 64 ELSE 128 END = 0
                        ORDER BY 2) p
                CROSS JOIN LATERAL (SELECT t.key FROM awa.job_uniques t WHERE t.key = p.key AND t.id = p.id
                                       FOR UPDATE SKIP LOCKED) t));
    END IF;
    PERFORM awa.wake_waiters(p_ids);
END $$;

-- As in 0010_control.sql; and final outcomes have consequences. The text of a completed member's error is its result,
-- as JSON.
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
    v_final bigint[];
    v_outcomes text[];
    v_jobs json[];
    v_keys bytea[];
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
    ), judged AS MATERIALIZED (
        SELECT b.*, f.jobs, f.flaw
          FROM body b
          LEFT JOIN LATERAL (SELECT f.* FROM awa.follow_ups_after(b.follow_ups, b.outcome) f
                              WHERE b.follow_ups IS NOT NULL OFFSET 0) f ON true
    ), ended AS (
        INSERT INTO awa.attempt_ends (entry_id, claim_id, flush, id, slot, outcome, ended_at, elapsed_ms, error, result)
        SELECT b.entry_id, b.claim_id, p_flush, b.id, b.slot, b.outcome, b.at, b.elapsed,
               awa.with_flaw(CASE WHEN b.outcome <> 'completed' THEN b.error END, b.flaw),
               CASE WHEN b.outcome = 'completed' THEN b.error END
          FROM judged b ORDER BY b.slot, b.entry_id
            ON CONFLICT DO NOTHING
        RETURNING slot, entry_id
    ), done AS MATERIALIZED (
        SELECT b.*, CASE WHEN b.outcome IN ('retried', 'rescued') THEN b.attempt + 1 ELSE b.attempt END AS next_attempt,
               CASE WHEN b.outcome IN ('retried', 'rescued', 'failed', 'cancelled')
                    THEN awa.add_history(b.history, b.attempt, b.asked, b.at, b.elapsed, p_runtime,
                                         awa.with_flaw(b.error, b.flaw))
                    ELSE b.history END AS next_history,
               CASE WHEN b.outcome IN ('released', 'rescued') THEN 'express'
                    WHEN b.outcome IN ('retried', 'snoozed') AND b.delay = 0 THEN 'main'
                    WHEN b.outcome IN ('retried', 'snoozed') THEN 'waiting'
                    WHEN b.outcome IN ('failed', 'cancelled') THEN 'ended' END AS goes
          FROM judged b JOIN ended USING (slot, entry_id)
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
           array_agg(d.entry_id) FILTER (WHERE d.has_request),
           array_agg(d.id ORDER BY d.n) FILTER (WHERE d.outcome IN ('completed', 'failed', 'cancelled')),
           array_agg(d.outcome ORDER BY d.n) FILTER (WHERE d.outcome IN ('completed', 'failed', 'cancelled')),
           array_agg(d.jobs ORDER BY d.n) FILTER (WHERE d.outcome IN ('completed', 'failed', 'cancelled')),
           array_agg(d.unique_key ORDER BY d.n) FILTER (WHERE d.outcome IN ('completed', 'failed', 'cancelled'))
      INTO v_done, v_bells, v_requests, v_final, v_outcomes, v_jobs, v_keys
      FROM done d;
    IF v_bells IS NOT NULL THEN
        PERFORM awa.ring(v_bells);
    END IF;
    IF v_requests IS NOT NULL THEN
        DELETE FROM awa.cancel_requests r WHERE r.entry_id = ANY (v_requests);
    END IF;
    IF v_final IS NOT NULL THEN
        PERFORM awa.conclude(v_final, v_outcomes, v_jobs, v_keys);
    END IF;
    RETURN v_done;
END $$;

-- As in 0004_settle.sql; and successes of which something follows are recorded one by one, with it. What o_errors has
-- for a completed member is its result, as JSON.
CREATE OR REPLACE FUNCTION awa.settle_v1(p_runtime bigint, p_flush bigint, p_claims bigint[], p_slots smallint[], p_nonces integer[],
                              p_lo integer[], p_hi integer[], p_idx smallint[], p_elapsed integer[],
                              o_claims bigint[], o_slots smallint[], o_nonces integer[], o_idx smallint[],
                              o_outcomes text[], o_delays double precision[], o_elapsed integer[], o_errors text[])
RETURNS TABLE (claim_id bigint, idx smallint)
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET lock_timeout = '50ms'
AS $$
#variable_conflict use_column
DECLARE
    v_done integer[];
    v_entries bigint[];
    v_idx smallint[];
    v_elapsed integer[];
    r record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.settle needs READ COMMITTED: an older snapshot would miss a fence' USING ERRCODE = 'AWA02';
    END IF;
    IF NOT pg_try_advisory_xact_lock_shared(hashtextextended('awa.runtime:' || p_runtime, 0)) THEN
        RAISE EXCEPTION 'runtime % is being looked at', p_runtime USING ERRCODE = '55P03';
    END IF;
    IF EXISTS (SELECT FROM awa.gone_runtimes t WHERE t.runtime = p_runtime) THEN
        RAISE EXCEPTION 'runtime % is gone: its attempts were rescued', p_runtime USING ERRCODE = 'AWA01';
    END IF;

    IF cardinality(p_claims) > 0 THEN
        WITH good AS MATERIALIZED (
            SELECT u.n::integer AS n, u.claim, u.slot, u.lo, u.hi
              FROM unnest(p_claims, p_slots, p_nonces, p_lo, p_hi) WITH ORDINALITY AS u(claim, slot, nonce, lo, hi, n)
             CROSS JOIN LATERAL (SELECT FROM awa.claims c
                                  WHERE c.slot = u.slot AND c.runtime = p_runtime AND c.claim_id = u.claim
                                    AND c.nonce = u.nonce AND c.singles IS NULL LIMIT 1) c
             WHERE NOT EXISTS (SELECT FROM awa.attempt_ends e WHERE e.slot = u.slot AND e.claim_id = u.claim OFFSET 0)
        ), recorded AS (
            INSERT INTO awa.completions (claim_id, flush, slot, idx, elapsed_ms)
            SELECT g.claim, p_flush, g.slot, p_idx[g.lo:g.hi], p_elapsed[g.lo:g.hi] FROM good g
        )
        SELECT array_agg(g.n) INTO v_done FROM good g;
        IF coalesce(cardinality(v_done), 0) < cardinality(p_claims) THEN
            -- some member of these claims has ended otherwise, or something follows from its success, or the claim is
            -- not ours: look at each
            FOR r IN SELECT u.*, c.entry_ids, c.claim_id IS NOT NULL AS ours, c.singles
                       FROM unnest(p_claims, p_slots, p_nonces, p_lo, p_hi) WITH ORDINALITY
                            AS u(claim, slot, nonce, lo, hi, n)
                       LEFT JOIN LATERAL (SELECT * FROM awa.claims c
                                           WHERE c.slot = u.slot AND c.runtime = p_runtime AND c.claim_id = u.claim
                                             AND c.nonce = u.nonce LIMIT 1) c ON true
                      WHERE u.n <> ALL (coalesce(v_done, '{}'))
            LOOP
                v_idx := p_idx[r.lo:r.hi];
                v_elapsed := p_elapsed[r.lo:r.hi];
                IF r.ours AND r.singles && v_idx THEN
                    SELECT array_agg(m.i) FILTER (WHERE NOT m.single), array_agg(m.ms) FILTER (WHERE NOT m.single),
                           o_claims || array_agg(r.claim) FILTER (WHERE m.single),
                           o_slots || array_agg(r.slot) FILTER (WHERE m.single),
                           o_nonces || array_agg(r.nonce) FILTER (WHERE m.single),
                           o_idx || array_agg(m.i) FILTER (WHERE m.single),
                           o_outcomes || array_agg('completed'::text) FILTER (WHERE m.single),
                           o_delays || array_agg(0::double precision) FILTER (WHERE m.single),
                           o_elapsed || array_agg(m.ms) FILTER (WHERE m.single),
                           o_errors || array_agg(NULL::text) FILTER (WHERE m.single)
                      INTO v_idx, v_elapsed, o_claims, o_slots, o_nonces, o_idx, o_outcomes, o_delays, o_elapsed,
                           o_errors
                      FROM (SELECT t.i, t.ms, t.i = ANY (r.singles) AS single
                              FROM unnest(v_idx, v_elapsed) AS t(i, ms)) m;
                END IF;
                v_entries := CASE WHEN r.ours THEN ARRAY(SELECT e.entry_id FROM awa.attempt_ends e
                                                          WHERE e.slot = r.slot AND e.claim_id = r.claim) END;
                RETURN QUERY SELECT r.claim, i FROM unnest(v_idx) i
                              WHERE NOT r.ours OR r.entry_ids[i] IS NULL OR r.entry_ids[i] = ANY (v_entries);
                IF r.ours THEN
                    SELECT array_agg(i), array_agg(ms) INTO v_idx, v_elapsed
                      FROM unnest(v_idx, v_elapsed) AS m(i, ms)
                     WHERE r.entry_ids[i] IS NOT NULL AND r.entry_ids[i] <> ALL (v_entries);
                    IF v_idx IS NOT NULL THEN
                        INSERT INTO awa.completions (claim_id, flush, slot, idx, elapsed_ms)
                        VALUES (r.claim, p_flush, r.slot, v_idx, v_elapsed);
                    END IF;
                END IF;
            END LOOP;
        END IF;
    END IF;

    IF cardinality(o_claims) > 0 THEN
        v_done := awa.end_attempts(p_runtime, p_flush, o_claims, o_slots, o_nonces, o_idx, o_outcomes, o_delays,
                                   o_elapsed, o_errors);
        IF cardinality(v_done) < cardinality(o_claims) THEN
            -- a repeated flush finds its own ends and is silent about them
            RETURN QUERY
                SELECT u.claim, u.idx
                  FROM unnest(o_claims, o_slots, o_idx) WITH ORDINALITY AS u(claim, slot, idx, n)
                 WHERE u.n <> ALL (v_done)
                   AND NOT EXISTS (SELECT FROM awa.attempt_ends e
                                    WHERE e.slot = u.slot AND e.claim_id = u.claim AND e.flush = p_flush
                                      AND e.entry_id = (SELECT c.entry_ids[u.idx] FROM awa.claims c
                                                         WHERE c.slot = u.slot AND c.runtime = p_runtime
                                                           AND c.claim_id = u.claim LIMIT 1)
                                   OFFSET 0);
            -- what a handler completed in its own transaction told nobody who waits for the result
            PERFORM awa.wake_waiters(ARRAY(
                SELECT e.id
                  FROM unnest(o_claims, o_slots, o_idx) WITH ORDINALITY AS u(claim, slot, idx, n)
                 CROSS JOIN LATERAL (SELECT c.entry_ids[u.idx] AS entry_id FROM awa.claims c
                                      WHERE c.slot = u.slot AND c.runtime = p_runtime AND c.claim_id = u.claim
                                      LIMIT 1) c
                 CROSS JOIN LATERAL (SELECT e.id FROM awa.attempt_ends e
                                      WHERE e.slot = u.slot AND e.entry_id = c.entry_id AND e.outcome = 'completed'
                                      LIMIT 1) e
                 WHERE u.n <> ALL (v_done)));
        END IF;
    END IF;
END $$;

-- As in 0014_claim_passes.sql; and the claim notes which successes have consequences: follow-ups, or a unique key that
-- a completed job does not hold. A look at the text, which costs nothing where there is none and never fails.
CREATE OR REPLACE FUNCTION awa.claim_v1(p_queue text, p_runtime bigint, p_kinds text[], p_limit integer, p_bell boolean DEFAULT false)
RETURNS TABLE (flags integer, claim_id bigint, slot smallint, nonce integer, priority smallint, ids bigint[],
               entry_ids bigint[], attempts smallint[], max_attempts smallint[], kinds text[], lens integer[],
               args text, created_at timestamptz[], details text[])
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET jit = off SET lock_timeout = '20ms'
AS $$
#variable_conflict use_column
DECLARE
    c_bytes CONSTANT integer := 131072;
    v_flags integer := 0;
    v_started timestamptz := clock_timestamp();
    v_now pg_snapshot;
    v_frontier awa.lane_frontier[];
    v_claimed_at timestamptz;
    v_next awa.lane_frontier[];
    v_lane smallint;
    v_aside smallint;            -- the first priority that has jobs set aside which this worker can run
    v_direct bigint;             -- the entry before those that were appended to be claimed at once
    v_held boolean := false;     -- others hold the rows of what was set aside: leave it for another claim
    v_claim bigint;
    v_nonce integer;
    v_last record;
    v_some boolean;
    f awa.lane_frontier;
    r record;
    g record;
    v_parts record;              -- the parts of the page from here to now
    v_parts_from text;
    w_lane smallint[];           -- the walk: one element per range, in walk order
    w_from pg_snapshot[];
    w_to pg_snapshot[];
    w_lo_xid xid8[];
    w_lo_entry bigint[];
    w_hi_xid xid8[];
    w_hi_entry bigint[];
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.claim needs READ COMMITTED: an older snapshot would read an old frontier'
              USING ERRCODE = 'AWA02';
    END IF;
    IF p_limit IS NULL OR p_limit < 1 THEN               -- else every page would look exhausted
        RAISE EXCEPTION 'awa.claim cannot start % attempts: give at least 1', p_limit USING ERRCODE = '22023';
    END IF;
    IF pg_current_xact_id_if_assigned() IS NULL THEN     -- else the caller's own commit would be weakened
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
    IF p_bell THEN      -- arm, then look: whoever commits after this look saw the bell, or is found by a poll
        FOR v_try IN 1..3 LOOP
            IF pg_try_advisory_lock(hashtextextended('awa.bell:' || p_queue, 0)) THEN
                v_flags := 1;
                EXIT;
            END IF;
        END LOOP;
    END IF;
    IF NOT pg_try_advisory_xact_lock_shared(hashtextextended('awa.runtime:' || p_runtime, 0))
       OR NOT pg_try_advisory_xact_lock(hashtextextended('awa.queue:' || p_queue, 0)) THEN
        RETURN QUERY SELECT v_flags | 2, NULL::bigint, NULL::smallint, NULL::integer, NULL::smallint, NULL::bigint[],
                            NULL::bigint[], NULL::smallint[], NULL::smallint[], NULL::text[], NULL::integer[],
                            NULL::text, NULL::timestamptz[], NULL::text[];
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM awa.gone_runtimes t WHERE t.runtime = p_runtime) THEN
        RAISE EXCEPTION 'runtime % is gone: its attempts were rescued', p_runtime USING ERRCODE = 'AWA01';
    END IF;

    <<rounds>>
    FOR v_round IN 1..20 LOOP
        SELECT u.frontier, u.claimed_at INTO v_frontier, v_claimed_at
          FROM ((SELECT c.claim_id, c.frontier, c.claimed_at FROM awa.claims c
                  WHERE c.queue = p_queue ORDER BY c.claim_id DESC LIMIT 1)
                UNION ALL
                SELECT t.claim_id, t.frontier, '-infinity' FROM awa.frontiers t WHERE t.queue = p_queue) u
         ORDER BY u.claim_id DESC LIMIT 1;
        v_frontier := coalesce(v_frontier, '{}');
        v_claimed_at := coalesce(v_claimed_at, '-infinity');
        v_now := awa.page_end();
        v_parts_from := NULL;
        IF v_direct IS NULL THEN
            v_aside := NULL;
            IF p_kinds IS NOT NULL AND NOT v_held AND EXISTS (SELECT FROM awa.waiting_jobs t
                                                WHERE t.queue = p_queue AND t.waits_for = 'kind') THEN
                SELECT min(d.priority) INTO v_aside
                  FROM unnest(p_kinds) k CROSS JOIN LATERAL (
                       SELECT t.priority FROM awa.waiting_jobs t
                        WHERE t.queue = p_queue AND t.waits_for = 'kind' AND t.wait_key = k
                        ORDER BY t.priority LIMIT 1) d;
            END IF;
        END IF;

        w_lane := '{}'; w_from := '{}'; w_to := '{}';
        w_lo_xid := '{}'; w_lo_entry := '{}'; w_hi_xid := '{}'; w_hi_entry := '{}';
        IF v_direct IS NOT NULL THEN
            -- what was appended just now, in the lane that nobody walks; as if this transaction had ended
            w_lane := ARRAY[0::smallint];
            w_from := ARRAY['1:1:'::pg_snapshot];
            w_to := ARRAY[format('%1$s:%1$s:', pg_current_xact_id()::text::bigint + 1)::pg_snapshot];
            w_lo_xid := ARRAY[pg_current_xact_id()];
            w_lo_entry := ARRAY[v_direct];
            w_hi_xid := ARRAY[pg_current_xact_id()];
            w_hi_entry := ARRAY[9223372036854775807];
        ELSE
            FOR v_lane IN 2..9 LOOP
                EXIT WHEN v_lane >= 2 * v_aside;
                f := ROW(v_lane, '1:1:'::pg_snapshot, NULL, NULL, NULL)::awa.lane_frontier;
                FOR v_n IN 1..cardinality(v_frontier) LOOP
                    IF v_frontier[v_n].lane = v_lane THEN
                        f := v_frontier[v_n];
                    END IF;
                END LOOP;
                IF pg_snapshot_xmax(coalesce(f.page_to, f.page_from)) > pg_snapshot_xmax(v_now) THEN
                    RAISE EXCEPTION 'the frontier of queue % lies beyond the transactions of this server', p_queue
                          USING ERRCODE = 'AWA03';
                END IF;
                IF f.page_to IS NOT NULL THEN
                    IF pg_snapshot_xmin(f.page_to) = pg_snapshot_xmax(f.page_to)
                       AND pg_snapshot_xmin(f.page_from) = pg_snapshot_xmax(f.page_from) THEN
                        w_lane := w_lane || v_lane; w_from := w_from || f.page_from; w_to := w_to || f.page_to;
                        w_lo_xid := w_lo_xid || f.last_xid; w_lo_entry := w_lo_entry || f.last_entry;
                        w_hi_xid := w_hi_xid || awa.xid_before(pg_snapshot_xmax(f.page_to));
                        w_hi_entry := w_hi_entry || 9223372036854775807;
                    ELSE
                        r := awa.page_ranges(f.page_from, f.page_to, f.last_xid, f.last_entry);
                        w_lane := w_lane || array_fill(v_lane, ARRAY[cardinality(r.lo_xid)]);
                        w_from := w_from || array_fill(f.page_from, ARRAY[cardinality(r.lo_xid)]);
                        w_to := w_to || array_fill(f.page_to, ARRAY[cardinality(r.lo_xid)]);
                        w_lo_xid := w_lo_xid || r.lo_xid; w_lo_entry := w_lo_entry || r.lo_entry;
                        w_hi_xid := w_hi_xid || r.hi_xid; w_hi_entry := w_hi_entry || r.hi_entry;
                    END IF;
                    f.page_from := f.page_to;
                END IF;
                IF pg_snapshot_xmin(v_now) = pg_snapshot_xmax(v_now)
                   AND pg_snapshot_xmin(f.page_from) = pg_snapshot_xmax(f.page_from) THEN
                    w_lane := w_lane || v_lane; w_from := w_from || f.page_from; w_to := w_to || v_now;
                    w_lo_xid := w_lo_xid || pg_snapshot_xmax(f.page_from); w_lo_entry := w_lo_entry || -1::bigint;
                    w_hi_xid := w_hi_xid || awa.xid_before(pg_snapshot_xmax(v_now));
                    w_hi_entry := w_hi_entry || 9223372036854775807;
                ELSE
                    -- most lanes were last looked at together: the parts of their pages are the same
                    IF v_parts_from IS DISTINCT FROM f.page_from::text THEN
                        v_parts := awa.page_ranges(f.page_from, v_now, '0', 0);
                        v_parts_from := f.page_from::text;
                    END IF;
                    r := v_parts;
                    w_lane := w_lane || array_fill(v_lane, ARRAY[cardinality(r.lo_xid)]);
                    w_from := w_from || array_fill(f.page_from, ARRAY[cardinality(r.lo_xid)]);
                    w_to := w_to || array_fill(v_now, ARRAY[cardinality(r.lo_xid)]);
                    w_lo_xid := w_lo_xid || r.lo_xid; w_lo_entry := w_lo_entry || r.lo_entry;
                    w_hi_xid := w_hi_xid || r.hi_xid; w_hi_entry := w_hi_entry || r.hi_entry;
                END IF;
            END LOOP;
        END IF;

        v_last := NULL;
        v_some := false;
        FOR g IN
            -- The order of the walk is that of the ranges, and within a range that of the index: a nested loop whose
            -- outer side is the function scan, stopped by the limit. tests/storage/test_plans.py looks.
            WITH sized AS MATERIALIZED (
                SELECT w.*, row_number() OVER so_far AS ord, sum(w.size) OVER so_far AS bytes
                  FROM (SELECT w.n, e.*, octet_length(e.args) + octet_length(e.kind)
                                         + CASE WHEN e.details IS NULL THEN 0 ELSE octet_length(e.details) END AS size
                          FROM unnest(w_lane, w_to, w_lo_xid, w_lo_entry, w_hi_xid, w_hi_entry) WITH ORDINALITY
                               AS w(lane, page_to, lo_xid, lo_entry, hi_xid, hi_entry, n)
                         CROSS JOIN LATERAL (
                               SELECT j.slot, j.lane, j.xid, j.entry_id, j.id, j.kind, j.attempt, j.max_attempts,
                                      j.args::text AS args, coalesce(j.created_at, j.available_at) AS created_at,
                                      CASE WHEN j.tags IS NOT NULL OR j.metadata IS NOT NULL OR j.timeout_ms IS NOT NULL
                                           THEN json_build_object('tags', j.tags, 'metadata', j.metadata,
                                                                  'timeout_ms', j.timeout_ms)::text END AS details,
                                      CASE WHEN j.attempt > 1 AND j.lane % 2 = 0
                                           THEN j.history->-1->>'outcome' = 'rescued' END AS rescued,
                                      j.follow_ups::text LIKE '%"completed"%'
                                      OR octet_length(j.unique_key) > 16 AND get_byte(j.unique_key, 16) & 32 = 0
                                          AS single
                                 FROM awa.jobs j
                                WHERE j.queue = p_queue AND j.lane = w.lane
                                  AND (j.xid, j.entry_id) > (w.lo_xid, w.lo_entry)
                                  AND (j.xid, j.entry_id) < (w.hi_xid, w.hi_entry)
                                  AND pg_visible_in_snapshot(j.xid, w.page_to)
                                ORDER BY j.xid, j.entry_id
                                LIMIT p_limit) e
                         LIMIT p_limit) w
                WINDOW so_far AS (ROWS UNBOUNDED PRECEDING)
            ), whole AS MATERIALIZED (
                SELECT count(*) AS picked, min(s.ord) FILTER (WHERE s.rescued) AS suspect,
                       awa.ended_among(array_agg(s.slot), array_agg(s.entry_id)) AS ended
                  FROM sized s
            ), kept AS MATERIALIZED (
                SELECT s.*, p_kinds IS NULL OR s.kind = ANY (p_kinds) AS known, s.entry_id = ANY (w.ended) AS ended
                  FROM whole w CROSS JOIN sized s
                 WHERE s.ord = 1 OR v_direct IS NOT NULL OR (s.bytes <= c_bytes AND (s.ord < w.suspect) IS NOT FALSE)
            ), told AS MATERIALIZED (
                SELECT max(k.ord) AS ord, bit_or(1 << k.lane) AS lanes,
                       bool_or(NOT k.known AND NOT k.ended) AS has_aliens
                  FROM kept k
            ), batches AS (
                SELECT k.slot, k.lane, min(k.ord) AS first, array_agg(k.entry_id) AS entry_ids,
                       array_agg(k.xid) AS xids, array_agg(k.id) AS ids, array_agg(k.attempt) AS attempts,
                       array_agg(k.max_attempts) AS max_attempts, array_agg(k.kind) AS kinds,
                       array_agg(k.created_at) AS created_at,
                       array_agg(k.details) AS details, count(k.details) AS n_details,
                       array_agg(k.entry_id) FILTER (WHERE k.single) AS singles,
                       v_direct IS NULL AND bool_or(k.rescued) AS alone,
                       max(k.attempt) AS top_attempt, min(k.max_attempts) AS lo_max, max(k.max_attempts) AS hi_max,
                       string_agg(k.args, '') FILTER (WHERE k.bytes <= c_bytes) AS args,
                       array_agg(CASE WHEN k.bytes <= c_bytes THEN octet_length(k.args) END) AS lens
                  FROM kept k
                 WHERE k.known AND NOT k.ended
                 GROUP BY k.slot, k.lane
            ), aliens AS (
                SELECT array_agg(k.slot) AS slots, array_agg(k.lane) AS lanes, array_agg(k.xid) AS xids,
                       array_agg(k.entry_id) AS entries
                  FROM kept k
                 WHERE (SELECT t.has_aliens FROM told t) AND NOT k.known AND NOT k.ended
            )
            SELECT l.ord, l.n, l.lane AS last_lane, l.xid AS last_xid, l.entry_id AS last_entry,
                   (SELECT w.picked FROM whole w) AS picked, (SELECT t.lanes FROM told t) AS lanes,
                   a.slots AS alien_slots, a.lanes AS alien_lanes, a.xids AS alien_xids, a.entries AS alien_entries,
                   b.*
              FROM (SELECT * FROM kept k WHERE k.ord = (SELECT t.ord FROM told t)) l
             CROSS JOIN aliens a LEFT JOIN batches b ON true
             ORDER BY b.first        -- else batches come in the order of a hash
        LOOP
            IF v_last IS NULL THEN
                v_last := g;
                v_next := '{}';
                IF v_direct IS NOT NULL THEN
                    v_next := v_frontier;
                ELSE
                    FOR v_lane IN 2..9 LOOP
                        f := NULL;
                        FOR v_n IN 1..cardinality(v_frontier) LOOP
                            IF v_frontier[v_n].lane = v_lane THEN
                                f := v_frontier[v_n];
                            END IF;
                        END LOOP;
                        -- cut short in last_lane: the lanes before it are exhausted, those behind it not walked
                        IF (g.picked >= p_limit OR g.picked > g.ord) AND v_lane >= g.last_lane THEN
                            IF v_lane = g.last_lane THEN
                                f := ROW(v_lane, w_from[g.n], w_to[g.n], g.last_xid, g.last_entry)::awa.lane_frontier;
                            END IF;
                        ELSIF g.lanes & (1 << v_lane) <> 0 OR (f.lane IS NOT NULL AND v_lane < coalesce(2 * v_aside, 10)) THEN
                            f := ROW(v_lane, v_now, NULL, NULL, NULL)::awa.lane_frontier;
                        END IF;
                        IF f.lane IS NOT NULL THEN
                            v_next := v_next || f;
                        END IF;
                    END LOOP;
                END IF;
            END IF;
            EXIT WHEN g.slot IS NULL;
            v_some := true;
            v_flags := v_flags | CASE WHEN g.alone THEN 8 ELSE 0 END;
            v_claim := nextval('awa.claim_id_seq');
            v_nonce := (random() * 2147483647)::integer;
            INSERT INTO awa.claims (claim_id, runtime, nonce, slot, lane, queue, frontier, entry_ids, xids, singles)
            VALUES (v_claim, p_runtime, v_nonce, g.slot, g.lane, p_queue, v_next, g.entry_ids, g.xids,
                    CASE WHEN g.singles IS NOT NULL THEN awa.positions(g.entry_ids, g.singles) END);
            RETURN QUERY SELECT 0, v_claim, g.slot, v_nonce,
                (CASE WHEN g.lane = 0 THEN v_aside ELSE g.lane / 2 END)::smallint, g.ids,
                CASE WHEN g.entry_ids <> g.ids THEN g.entry_ids END, CASE WHEN g.top_attempt > 1 THEN g.attempts END,
                CASE WHEN g.lo_max <> 25 OR g.hi_max <> 25 THEN g.max_attempts END, g.kinds, g.lens, g.args,
                g.created_at, CASE WHEN g.n_details > 0 THEN g.details END;
        END LOOP;

        IF v_last IS NULL THEN
            IF v_direct IS NULL AND v_aside IS NOT NULL THEN
                -- by arrays: joins may be planned as walks over the whole table
                WITH due AS MATERIALIZED (
                    SELECT t.id FROM awa.waiting_jobs t
                     WHERE t.id = ANY (ARRAY(
                           SELECT d.id FROM unnest(p_kinds) k CROSS JOIN LATERAL (
                                  SELECT t.id, t.seq FROM awa.waiting_jobs t
                                   WHERE t.queue = p_queue AND t.waits_for = 'kind' AND t.wait_key = k
                                     AND t.priority = v_aside
                                   ORDER BY t.seq LIMIT p_limit) d
                            ORDER BY d.seq LIMIT p_limit))
                       FOR UPDATE SKIP LOCKED
                ), taken AS (
                    DELETE FROM awa.waiting_jobs t WHERE t.id = ANY (ARRAY(SELECT due.id FROM due)) RETURNING t.*
                ), appended AS (
                    INSERT INTO awa.jobs (id, created_at, lane, priority, attempt, max_attempts, timeout_ms, queue, kind,
                                          args, metadata, tags, concurrency_key, ordering_key, unique_key, expires_at,
                                          follow_ups, history)
                    SELECT t.id, t.created_at, 0, t.priority, t.attempt, t.max_attempts, t.timeout_ms, t.queue, t.kind,
                           t.args, t.metadata, t.tags, t.concurrency_key, t.ordering_key, t.unique_key, t.expires_at,
                           t.follow_ups, t.history
                      FROM (SELECT * FROM taken ORDER BY seq) t
                    RETURNING entry_id
                )
                SELECT min(entry_id) - 1 INTO v_direct FROM appended;
                v_held := v_direct IS NULL;
                CONTINUE rounds;
            ELSIF v_direct IS NULL AND v_claimed_at < clock_timestamp() - interval '1 s'
                  AND (cardinality(w_lane) > 32 OR clock_timestamp() - v_started > interval '2 ms') THEN
                -- an empty walk that was not cheap (late transactions, rolled-back or ended rows): do not repeat it
                v_next := '{}';
                FOR v_lane IN 2..9 LOOP
                    v_next := v_next || ROW(v_lane, v_now, NULL, NULL, NULL)::awa.lane_frontier;
                END LOOP;
                INSERT INTO awa.claims (claim_id, runtime, nonce, slot, lane, queue, frontier, entry_ids, xids)
                VALUES (nextval('awa.claim_id_seq'), p_runtime, 0, pg_sequence_last_value('awa.ring_seq'), 0, p_queue,
                        v_next, '{}', '{}');
            END IF;
            EXIT rounds;
        END IF;
        IF v_last.alien_entries IS NOT NULL THEN
            v_claim := nextval('awa.claim_id_seq');
            WITH alien AS MATERIALIZED (
                SELECT a.n, j.*
                  FROM unnest(v_last.alien_slots, v_last.alien_lanes, v_last.alien_xids, v_last.alien_entries)
                       WITH ORDINALITY AS a(slot, lane, xid, entry_id, n)
                 CROSS JOIN LATERAL (SELECT * FROM awa.jobs j
                                      WHERE j.slot = a.slot AND j.queue = p_queue AND j.lane = a.lane AND j.xid = a.xid
                                        AND j.entry_id = a.entry_id LIMIT 1) j
                 ORDER BY a.n
            ), ended AS (
                INSERT INTO awa.attempt_ends (entry_id, claim_id, id, slot, outcome)
                SELECT a.entry_id, v_claim, a.id, a.slot, 'set_aside' FROM alien a
            )
            INSERT INTO awa.waiting_jobs (id, created_at, priority, attempt, max_attempts, timeout_ms, state, waits_for,
                                          wait_key, queue, kind, args, metadata, tags, concurrency_key, ordering_key,
                                          unique_key, expires_at, follow_ups, history)
            SELECT a.id, coalesce(a.created_at, a.available_at), a.priority, a.attempt, a.max_attempts, a.timeout_ms,
                   'available', 'kind', a.kind, a.queue, a.kind, a.args, a.metadata, a.tags, a.concurrency_key,
                   a.ordering_key, a.unique_key, a.expires_at, a.follow_ups, a.history
              FROM alien a ORDER BY a.n;
            -- a call for help, which everybody hears, not a bell: whoever knows these kinds may hold none
            PERFORM pg_notify(awa.channel(), chr(1) || p_queue);
        END IF;
        EXIT rounds WHEN v_some;
        -- Only ended or set-aside entries: remember how far the walk came, or live ones behind them stay hidden.
        INSERT INTO awa.claims (claim_id, runtime, nonce, slot, lane, queue, frontier, entry_ids, xids)
        VALUES (nextval('awa.claim_id_seq'), p_runtime, 0, pg_sequence_last_value('awa.ring_seq'), 0, p_queue, v_next,
                '{}', '{}');
        IF v_round = 20 THEN
            v_flags := v_flags | 4;
        END IF;
    END LOOP;
    RETURN QUERY SELECT v_flags, NULL::bigint, NULL::smallint, NULL::integer, NULL::smallint, NULL::bigint[],
                        NULL::bigint[], NULL::smallint[], NULL::smallint[], NULL::text[], NULL::integer[],
                        NULL::text, NULL::timestamptz[], NULL::text[];
END $$;

-- As in 0010_control.sql; and what follows from it happens with it.
CREATE OR REPLACE FUNCTION awa.cancel_v1(p_id bigint, p_reason text DEFAULT NULL, p_force boolean DEFAULT false,
                              OUT happened text, OUT state text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET lock_timeout = '10ms' SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_until timestamptz := clock_timestamp() + interval '1 s';
    v_error json := awa.cancel_error(p_reason, NULL);
    v_is_ours boolean;
    p record;
    a record;               -- what follows from its end
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
                ), judged AS MATERIALIZED (
                    SELECT t.*, f.jobs, f.flaw
                      FROM taken t LEFT JOIN LATERAL awa.follow_ups_after(t.follow_ups, 'cancelled') f ON true
                ), ended AS (
                    INSERT INTO awa.ended_jobs (id, created_at, state, priority, attempt, max_attempts, timeout_ms,
                                                queue, kind, args, metadata, tags, concurrency_key, ordering_key,
                                                unique_key, follow_ups, history)
                    SELECT t.id, t.created_at, 'cancelled', t.priority, t.attempt, t.max_attempts, t.timeout_ms,
                           t.queue, t.kind, t.args, t.metadata, t.tags, t.concurrency_key, t.ordering_key, t.unique_key,
                           t.follow_ups,
                           awa.add_history(t.history, t.attempt, 'cancelled', clock_timestamp(), NULL, NULL,
                                           awa.with_flaw(v_error, t.flaw))
                      FROM judged t
                )
                SELECT t.jobs, t.unique_key INTO a FROM judged t;
                IF FOUND THEN
                    PERFORM awa.conclude(ARRAY[p_id], ARRAY['cancelled'], ARRAY[a.jobs], ARRAY[a.unique_key]);
                    happened := 'cancelled';
                    state := 'cancelled';
                    RETURN;
                END IF;
            ELSIF p.place = 'available'
                  AND pg_try_advisory_xact_lock(hashtextextended('awa.queue:' || p.queue, 0)) THEN
                WITH taken AS MATERIALIZED (
                    SELECT * FROM awa.end_unclaimed(p.queue, p.slot, p.lane, p.xid, p.entry_id, 'cancelled', v_error)
                ), judged AS MATERIALIZED (
                    SELECT t.*, f.jobs, f.flaw
                      FROM taken t LEFT JOIN LATERAL awa.follow_ups_after(t.follow_ups, 'cancelled') f ON true
                ), ended AS (
                    INSERT INTO awa.ended_jobs (id, created_at, state, priority, attempt, max_attempts, timeout_ms,
                                                queue, kind, args, metadata, tags, concurrency_key, ordering_key,
                                                unique_key, follow_ups, history)
                    SELECT j.id, coalesce(j.created_at, j.available_at), 'cancelled', j.priority, j.attempt,
                           j.max_attempts, j.timeout_ms, j.queue, j.kind, j.args, j.metadata, j.tags, j.concurrency_key,
                           j.ordering_key, j.unique_key, j.follow_ups,
                           awa.add_history(j.history, j.attempt, 'cancelled', clock_timestamp(), NULL, NULL,
                                           awa.with_flaw(v_error, j.flaw))
                      FROM judged j
                )
                SELECT j.jobs, j.unique_key INTO a FROM judged j;
                IF FOUND THEN
                    PERFORM awa.conclude(ARRAY[p_id], ARRAY['cancelled'], ARRAY[a.jobs], ARRAY[a.unique_key]);
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

-- As in 0011_inspect.sql; and a completed job has an error when its follow-ups could not be inserted.
CREATE OR REPLACE FUNCTION awa.find_job_v2(p_id bigint)
RETURNS TABLE (id bigint, queue text, kind text, state text, priority smallint, attempt smallint,
               max_attempts smallint, args json, metadata json, tags text[], created_at timestamptz,
               run_at timestamptz, claimed_at timestamptz, ended_at timestamptz, elapsed_ms integer, runtime bigint,
               hostname text, pid integer, waits_for text, error json, history json)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET max_parallel_workers_per_gather = 0 SET jit = off
SET search_path = pg_catalog, pg_temp
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
    error := CASE WHEN v_state = 'completed' THEN v_error ELSE coalesce(v_error, awa.error_of(v_last)) END;
    RETURN NEXT;
END $$;

-- Complete one attempt inside the caller's transaction, at any isolation level, with what follows from it. The row's
-- unique key fences it: a second end of the attempt raises unique_violation (23505), an attempt that is not this
-- runtime's AWA04. The caller's transaction must be younger than the claim. Names the one partition it reads: a plan
-- over all of them would lock them until the caller commits; follow-ups go to the current one.
--
-- p_result is kept for who asks for it. p_notify: whether sleeping workers may be woken for follow-ups, which a
-- transaction that is prepared must not do. Nobody who waits for the result is woken, and a unique key that is free now
-- is swept up later: the caller's transaction may stay open for long, and take no lock but its row's. The worker wakes
-- them when it records what its handler came to.
CREATE FUNCTION awa.complete_v2(p_runtime bigint, p_claim bigint, p_slot smallint, p_nonce integer, p_idx smallint,
                                p_elapsed integer, p_result json DEFAULT NULL, p_notify boolean DEFAULT true)
RETURNS bigint
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET jit = off
AS $$
DECLARE
    v_entry bigint;
    v_id bigint;
    v_jobs json;
BEGIN
    IF p_slot NOT BETWEEN 0 AND 7 THEN
        RAISE EXCEPTION 'slot % does not exist', p_slot USING ERRCODE = '22023';
    END IF;
    EXECUTE format(
        'WITH found AS MATERIALIZED (
             SELECT j.entry_id, c.claim_id, j.id, f.jobs, f.flaw
               FROM awa.claims_%1$s c
               JOIN awa.jobs_%1$s j ON j.queue = c.queue AND j.lane = c.lane AND j.xid = c.xids[$4]
                                   AND j.entry_id = c.entry_ids[$4]
               LEFT JOIN LATERAL (SELECT f.* FROM awa.follow_ups_after(j.follow_ups, ''completed'') f
                                   WHERE j.follow_ups IS NOT NULL OFFSET 0) f ON true
              WHERE c.runtime = $1 AND c.claim_id = $2 AND c.nonce = $3
         ), ended AS (
             INSERT INTO awa.attempt_ends_%1$s (entry_id, claim_id, id, slot, outcome, elapsed_ms, error, result)
             SELECT f.entry_id, f.claim_id, f.id, %1$s, ''completed'', $5, awa.with_flaw(NULL, f.flaw), $6 FROM found f
             RETURNING entry_id
         )
         SELECT e.entry_id, f.id, f.jobs FROM ended e JOIN found f USING (entry_id)', p_slot)
       INTO v_entry, v_id, v_jobs USING p_runtime, p_claim, p_nonce, p_idx, p_elapsed, p_result;
    IF v_entry IS NULL THEN
        RAISE EXCEPTION 'this attempt is not open: claim % of runtime % is unknown', p_claim, p_runtime
              USING ERRCODE = 'AWA04';
    END IF;
    IF v_jobs IS NOT NULL THEN
        PERFORM awa.append_follow_ups(ARRAY[v_id], ARRAY[v_jobs], p_notify);
    END IF;
    RETURN v_entry;
END $$;

-- As before, by the way of the newer one: workers of before call it.
CREATE OR REPLACE FUNCTION awa.complete_v1(p_runtime bigint, p_claim bigint, p_slot smallint, p_nonce integer,
                                           p_idx smallint, p_elapsed integer) RETURNS bigint
LANGUAGE sql VOLATILE
AS $$
    SELECT awa.complete_v2(p_runtime, p_claim, p_slot, p_nonce, p_idx, p_elapsed)
$$;

-- What has become of some jobs, for who waits for them: some index look-ups each, which find what waits, failed or was
-- cancelled, and what was completed with a row of its own; result is NULL when none is kept. No row for a job that is
-- available or running, one that was completed without consequences, and one that is gone: awa.find_job_v2 tells them
-- apart, at a higher price.
CREATE FUNCTION awa.outcome_v1(p_ids bigint[])
RETURNS TABLE (id bigint, state text, result json, error json)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
        SELECT p.id, o.state, o.result, o.error
          FROM unnest(p_ids) AS p(id)
         CROSS JOIN LATERAL (
               SELECT w.state, NULL::json AS result, NULL::json AS error FROM awa.waiting_jobs w WHERE w.id = p.id
               UNION ALL
               SELECT t.state, NULL, awa.error_of(t.history->-1) FROM awa.ended_jobs t WHERE t.id = p.id
               UNION ALL
               (SELECT t.outcome, t.result, t.error FROM awa.attempt_ends t
                 WHERE t.id = p.id AND left(t.outcome, 9) = 'completed' LIMIT 1)) o;
END $$;
REVOKE EXECUTE ON FUNCTION awa.outcome_v1(bigint[]) FROM PUBLIC;
