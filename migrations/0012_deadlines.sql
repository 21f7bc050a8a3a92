-- Deadlines, second line: end attempts that their own worker should have ended long ago.
--
-- A worker ends an attempt whose time is up by itself. When it does not, although it gives signs of life, the leader
-- does: it needs the limits, so a worker writes them into its row when it registers.
--
-- Adds two columns without a default to awa.runtime_instances, which locks that table for a moment and rewrites
-- nothing, and functions. Older workers go on: they write no limits, and their attempts are left alone.

ALTER TABLE awa.runtime_instances
    ADD COLUMN timeout_ms integer,     -- limit of attempts of which neither job nor kind says; 0: none; NULL: not told
    ADD COLUMN kind_timeouts json;     -- kind -> its limit in milliseconds, for kinds that say one

-- Up to p_limit open attempts of a runtime that are p_behind seconds past their limit, beyond the first p_skip, oldest
-- claim first. Their time counts from the claim. Open are the members of the claims that the last heartbeat listed and
-- of every claim above the newest it knew, as for a rescue; claims younger than p_behind are not looked into.
CREATE FUNCTION awa.overdue(p_runtime bigint, p_behind double precision, p_limit integer, p_skip integer)
RETURNS TABLE (claim_id bigint, slot smallint, nonce integer, idx smallint, attempt smallint, limit_ms integer)
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
        WITH old AS MATERIALIZED (
            SELECT c.*, i.timeout_ms, i.kind_timeouts
              FROM awa.runtime_instances i
             CROSS JOIN LATERAL (
                   SELECT t.* FROM awa.claims t WHERE t.runtime = p_runtime AND t.claim_id > i.newest_claim
                   UNION ALL
                   SELECT t.* FROM unnest(i.open_claims) o CROSS JOIN LATERAL (
                          SELECT * FROM awa.claims t
                           WHERE t.runtime = p_runtime AND t.claim_id = o AND o <= i.newest_claim OFFSET 0) t) c
             WHERE i.id = p_runtime AND i.timeout_ms IS NOT NULL
               AND c.claimed_at < clock_timestamp() - p_behind * interval '1 s'
        )
        SELECT c.claim_id, c.slot, c.nonce, m.idx::smallint, j.attempt, l.limit_ms
          FROM old c
         CROSS JOIN LATERAL unnest(c.entry_ids, c.xids) WITH ORDINALITY AS m(entry_id, xid, idx)
         CROSS JOIN LATERAL (SELECT j.kind, j.attempt, j.timeout_ms FROM awa.jobs j
                              WHERE j.slot = c.slot AND j.queue = c.queue AND j.lane = c.lane
                                AND j.xid = m.xid AND j.entry_id = m.entry_id LIMIT 1) j
         CROSS JOIN LATERAL (SELECT coalesce(j.timeout_ms, (c.kind_timeouts->>j.kind)::integer, c.timeout_ms)) l(limit_ms)
         WHERE l.limit_ms > 0
           AND c.claimed_at < clock_timestamp() - p_behind * interval '1 s' - l.limit_ms * interval '1 ms'
           AND NOT EXISTS (SELECT FROM awa.completions x
                            WHERE x.slot = c.slot AND x.claim_id = c.claim_id AND m.idx::smallint = ANY (x.idx) OFFSET 0)
           AND NOT EXISTS (SELECT FROM awa.attempt_ends e
                            WHERE e.slot = c.slot AND e.entry_id = m.entry_id OFFSET 0)
         ORDER BY c.claim_id, m.idx
         LIMIT p_limit OFFSET p_skip;
END $$;

-- End up to p_limit overdue attempts of a living runtime, beyond the first p_skip: each is retried after the default
-- backoff, or has failed when its attempts are used up. Its worker's own outcome for it is refused from then on.
--
-- Looks first without a lock, so that a runtime of which nothing is overdue is not disturbed. Then the runtime's lock,
-- exclusively and only tried, and a second look, in a statement that starts after it: no settle of that runtime is in
-- progress, and those before it are seen. What a handler completes in a transaction of its own holds no lock of ours;
-- the unique key of attempt_ends decides. Such an attempt is counted as blocked, and ends the call: the worker can
-- neither claim nor settle while this function waits. Come again, and skip what was blocked.
CREATE FUNCTION awa.expire_v1(p_runtime bigint, p_behind double precision, p_limit integer, p_skip integer DEFAULT 0,
                              OUT ended integer, OUT blocked integer)
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET lock_timeout = '20ms'
AS $$
DECLARE
    r record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.expire needs READ COMMITTED: an older snapshot would miss what was settled last'
              USING ERRCODE = 'AWA02';
    END IF;
    ended := 0;
    blocked := 0;
    IF NOT EXISTS (SELECT FROM awa.overdue(p_runtime, p_behind, 1, p_skip)) THEN
        RETURN;
    END IF;
    IF NOT pg_try_advisory_xact_lock(hashtextextended('awa.runtime:' || p_runtime, 0)) THEN
        RETURN;                             -- it claims or settles just now; perhaps what is overdue
    END IF;
    IF EXISTS (SELECT FROM awa.gone_runtimes t WHERE t.runtime = p_runtime) THEN
        RETURN;                             -- a rescue's business
    END IF;
    FOR r IN SELECT o.*, least(86400, 2 ^ least(o.attempt, 20) * (1 + 0.25 * random())) AS delay,
                    json_build_object('type', 'awa.errors.DeadlineExceeded', 'text',
                                      format('its time of %s s was up, and its worker, runtime %s, did not end it within '
                                             '%s s more', round(o.limit_ms / 1000.0, 1), p_runtime, p_behind),
                                      'traceback', '')::text AS error
               FROM awa.overdue(p_runtime, p_behind, p_limit, p_skip) o
    LOOP
        BEGIN
            ended := ended + cardinality(awa.end_attempts(
                p_runtime, NULL, ARRAY[r.claim_id], ARRAY[r.slot], ARRAY[r.nonce], ARRAY[r.idx], ARRAY['retried'],
                ARRAY[r.delay], ARRAY[NULL::integer], ARRAY[r.error]));
        EXCEPTION WHEN OTHERS THEN
            blocked := 1;
            RAISE WARNING 'awa: member % of claim % is overdue and cannot be ended now: %', r.idx, r.claim_id, SQLERRM;
            EXIT;
        END;
    END LOOP;
END $$;
