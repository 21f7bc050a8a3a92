-- Settling: record what became of attempts, in a flush or in a handler's own transaction, and append what is next.
--
-- Adds functions only. Works with awa 0.1 and later.
--
-- Every function here quotes the attempt: its claim, that claim's nonce, the member's position and the runtime. A
-- crash can forget a claim and hand its number out again; the nonce tells the two apart.
--
-- Rows are looked up one by one, in LATERAL (... LIMIT 1) and EXISTS (... OFFSET 0): as plain joins they are planned as
-- hash joins over all that a runtime ever claimed, when the tables are small at first, and sessions keep their plans.

-- A history with one more ended attempt: the last 20 are kept, and the tracebacks of the last 3.
CREATE FUNCTION awa.add_history(p_history json, p_attempt integer, p_outcome text, p_ended_at timestamptz,
                                p_elapsed_ms integer, p_runtime bigint, p_error json) RETURNS json
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN (WITH entries AS (
        SELECT e, n FROM json_array_elements(coalesce(p_history, '[]')) WITH ORDINALITY t(e, n)
        UNION ALL
        SELECT json_build_object('attempt', p_attempt, 'outcome', p_outcome, 'ended_at', p_ended_at,
                                 'elapsed_ms', p_elapsed_ms, 'runtime', p_runtime, 'type', p_error->'type',
                                 'text', p_error->'text', 'traceback', p_error->'traceback'), 1000
    ), newest AS (
        SELECT e, row_number() OVER (ORDER BY n DESC) AS age FROM entries
    )
    SELECT json_agg(CASE WHEN age <= 3 THEN e ELSE (e::jsonb - 'traceback')::json END ORDER BY age DESC)
      FROM newest WHERE age <= 20);
END $$;

-- Write the ends of attempts and what follows from each: the next entry, a waiting job, or an ended job. For the
-- functions of this schema, which have checked who asks; members that ended before are left out.
--
-- One element per attempt in each array; a NULL nonce is not compared. p_delays are seconds, p_errors JSON objects
-- with type, text and traceback. Rings for what became available. Returns the ordinals that were written.
CREATE FUNCTION awa.end_attempts(p_runtime bigint, p_flush bigint, p_claims bigint[], p_slots smallint[],
                                 p_nonces integer[], p_idx smallint[], p_outcomes text[], p_delays double precision[],
                                 p_elapsed integer[], p_errors text[]) RETURNS integer[]
LANGUAGE plpgsql VOLATILE
AS $$
DECLARE
    v_done integer[];
    v_bells text[];
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
    ), body AS MATERIALIZED (
        SELECT DISTINCT ON (m.slot, m.entry_id)        -- an attempt that is quoted twice ends once
               m.n, m.claim_id, m.elapsed, m.error, greatest(m.delay, 0) AS delay, clock_timestamp() AS at,
               -- the limit of attempts is kept here too, whoever asks
               CASE WHEN m.outcome IN ('retried', 'rescued') AND j.attempt >= j.max_attempts THEN 'failed'
                    ELSE m.outcome END AS outcome,
               m.outcome AS asked, j.*
          FROM member m
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
           || CASE WHEN bool_or(d.goes = 'waiting' AND d.delay < 1.5) THEN '{""}'::text[] END
      INTO v_done, v_bells
      FROM done d;
    IF v_bells IS NOT NULL THEN
        PERFORM awa.ring(v_bells);
    END IF;
    RETURN v_done;
END $$;

-- Record one flush of outcomes, all or nothing.
--
-- Successes come grouped: claim i owns p_idx[p_lo[i]:p_hi[i]]. Other outcomes (retried, snoozed, cancelled, failed,
-- released, completed) come one by one; o_delays are seconds, o_errors JSON objects with type, text and traceback.
-- 'completed' among them is for an attempt whose handler called complete in a transaction of its own.
--
-- Returns the members that were refused, since their attempts ended before or were never this runtime's. The same
-- flush number twice raises unique_violation: the first one was recorded. Commits synchronously, as the session does.
CREATE FUNCTION awa.settle_v1(p_runtime bigint, p_flush bigint, p_claims bigint[], p_slots smallint[], p_nonces integer[],
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
                                    AND c.nonce = u.nonce LIMIT 1) c
             WHERE NOT EXISTS (SELECT FROM awa.attempt_ends e WHERE e.slot = u.slot AND e.claim_id = u.claim OFFSET 0)
        ), recorded AS (
            INSERT INTO awa.completions (claim_id, flush, slot, idx, elapsed_ms)
            SELECT g.claim, p_flush, g.slot, p_idx[g.lo:g.hi], p_elapsed[g.lo:g.hi] FROM good g
        )
        SELECT array_agg(g.n) INTO v_done FROM good g;
        IF coalesce(cardinality(v_done), 0) < cardinality(p_claims) THEN
            -- some member of these claims has ended otherwise, or the claim is not ours: look at each
            FOR r IN SELECT u.*, c.entry_ids, c.claim_id IS NOT NULL AS ours
                       FROM unnest(p_claims, p_slots, p_nonces, p_lo, p_hi) WITH ORDINALITY
                            AS u(claim, slot, nonce, lo, hi, n)
                       LEFT JOIN LATERAL (SELECT * FROM awa.claims c
                                           WHERE c.slot = u.slot AND c.runtime = p_runtime AND c.claim_id = u.claim
                                             AND c.nonce = u.nonce LIMIT 1) c ON true
                      WHERE u.n <> ALL (coalesce(v_done, '{}'))
            LOOP
                v_idx := p_idx[r.lo:r.hi];
                v_elapsed := p_elapsed[r.lo:r.hi];
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
    END IF;
END $$;

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
