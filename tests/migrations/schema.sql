CREATE SCHEMA awa;

CREATE TYPE awa.keyed_entry AS (
	place integer,
	entry_id bigint,
	id bigint,
	key text,
	ordering text
);

CREATE TYPE awa.lane_frontier AS (
	lane smallint,
	page_from pg_snapshot,
	page_to pg_snapshot,
	last_xid xid8,
	last_entry bigint
);

CREATE TYPE awa.limit_state AS (
	open_claims bigint[],
	open_slots smallint[],
	open_sizes smallint[],
	tokens double precision,
	tokens_at timestamp with time zone
);

CREATE FUNCTION awa.add_history(p_history json, p_attempt integer, p_outcome text, p_ended_at timestamp with time zone, p_elapsed_ms integer, p_runtime bigint, p_error json) RETURNS json
    LANGUAGE plpgsql IMMUTABLE
    AS $$
DECLARE
    v_history json := coalesce(p_history, '[]');
    v_error json := p_error;
    v_result json;
BEGIN
    FOR v_try IN 1..4 LOOP
        BEGIN
            WITH entries AS (
                SELECT e, n FROM json_array_elements(v_history) WITH ORDINALITY t(e, n)
                UNION ALL
                SELECT json_build_object('attempt', p_attempt, 'outcome', p_outcome, 'ended_at', p_ended_at,
                                         'elapsed_ms', p_elapsed_ms, 'runtime', p_runtime, 'type', v_error->'type',
                                         'text', v_error->'text', 'traceback', v_error->'traceback'), 1000
            ), newest AS (
                SELECT e, row_number() OVER (ORDER BY n DESC) AS age FROM entries
            )
            SELECT json_agg(CASE WHEN age <= 3 THEN e ELSE (e::jsonb - 'traceback')::json END ORDER BY age DESC)
              INTO v_result FROM newest WHERE age <= 20;
            RETURN v_result;
        EXCEPTION WHEN OTHERS THEN
            NULL;
        END;
        v_history := CASE WHEN v_try = 2 THEN coalesce(p_history, '[]') ELSE '[]' END;
        IF v_try = 2 THEN
            v_error := '{"type": "Unreadable", "text": "its error cannot be read: it is no JSON of text"}';
        END IF;
    END LOOP;
    RETURN NULL;
END $$;

CREATE FUNCTION awa.admit(p_queue text, p_limit integer, p_keyed awa.keyed_entry[]) RETURNS text[]
    LANGUAGE plpgsql STABLE
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v_why text[];
BEGIN
    WITH entry AS MATERIALIZED (
        SELECT e.place, e.id, left(e.key, 201) AS key, left(e.ordering, 201) AS ordering FROM unnest(p_keyed) e
    ), mine AS MATERIALIZED (        -- an attempt has its concurrency key from now on, or from the hand-over
        SELECT g.scope, g.key, g.id FROM entry e JOIN LATERAL (
               SELECT * FROM awa.grants g WHERE g.id = e.id OFFSET 0) g ON true
         WHERE g.queue = p_queue AND NOT g.is_over AND (g.scope = 'order' OR g.claim_id = 0)
    ), ordering AS MATERIALIZED (
        SELECT k.ordering,
               EXISTS (SELECT FROM awa.waiting_jobs w
                        WHERE w.queue = p_queue AND w.waits_for = 'order' AND w.waits_for IN ('key', 'order')
                          AND w.wait_key = k.ordering OFFSET 0)
               OR EXISTS (SELECT FROM awa.grants g
                           WHERE g.queue = p_queue AND g.scope = 'order' AND g.key = k.ordering
                             AND NOT awa.is_over(g, true) OFFSET 0) AS is_taken
          FROM (SELECT DISTINCT e.ordering FROM entry e WHERE e.ordering IS NOT NULL) k
    ), in_order AS MATERIALIZED (
        SELECT e.*, e.ordering IS NULL OR e.has_it
                    OR NOT e.is_taken AND row_number() OVER (PARTITION BY e.ordering, e.has_it ORDER BY e.place) = 1 AS may
          FROM (SELECT e.*, o.is_taken,
                       EXISTS (SELECT FROM mine m WHERE m.scope = 'order' AND m.key = e.ordering AND m.id = e.id) AS has_it
                  FROM entry e LEFT JOIN ordering o ON o.ordering = e.ordering) e
    ), room AS MATERIALIZED (
        SELECT k.key,
               -- with the key in hand: as many as the limit leaves beside those that run, since it may have been lowered
               p_limit - (SELECT count(*) FROM awa.grants g
                           WHERE g.queue = p_queue AND g.scope = 'key' AND g.key = k.key AND g.claim_id > 0
                             AND NOT awa.is_over(g, true)) AS in_hand,
               CASE WHEN EXISTS (SELECT FROM awa.waiting_jobs w
                                  WHERE w.queue = p_queue AND w.waits_for = 'key' AND w.waits_for IN ('key', 'order')
                                    AND w.wait_key = k.key OFFSET 0) THEN 0
                    ELSE p_limit - (SELECT count(*) FROM awa.grants g
                                     WHERE g.queue = p_queue AND g.scope = 'key' AND g.key = k.key
                                       AND NOT awa.is_over(g, true)) END AS free
          FROM (SELECT DISTINCT e.key FROM in_order e WHERE e.key IS NOT NULL AND e.may AND p_limit IS NOT NULL) k
    ), judged AS (
        SELECT e.place, CASE WHEN NOT e.may THEN 'order'
                             WHEN e.key IS NULL OR p_limit IS NULL THEN NULL
                             WHEN row_number() OVER (PARTITION BY e.key, e.may, e.has_key ORDER BY e.place)
                                  > CASE WHEN e.has_key THEN e.in_hand ELSE e.free END
                             THEN 'key' END AS why
          FROM (SELECT e.*, t.free, t.in_hand,
                       EXISTS (SELECT FROM mine m WHERE m.scope = 'key' AND m.key = e.key AND m.id = e.id) AS has_key
                  FROM in_order e LEFT JOIN room t ON t.key = e.key) e
    )
    SELECT array_agg(j.why ORDER BY p.place) INTO v_why
      FROM generate_series(1, (SELECT max(place) FROM entry)) p(place) LEFT JOIN judged j ON j.place = p.place;
    RETURN v_why;
END $$;

CREATE FUNCTION awa.aged_order(p_queue text, p_aging double precision, p_aside smallint, p_since timestamp with time zone) RETURNS smallint[]
    LANGUAGE plpgsql STABLE
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v_order smallint[];
BEGIN
    -- the two lanes of a priority stay together, the express one first: what it has is older than its rows tell
    SELECT array_agg(h.lane ORDER BY h.aged, h.since, h.lane) INTO v_order
      FROM (SELECT l.lane, min(l.available_at) OVER of_priority AS since,
                   l.priority - floor(extract(epoch FROM clock_timestamp() - min(l.available_at) OVER of_priority)
                                      / p_aging) AS aged
              FROM (SELECT r.lane, r.lane / 2 AS priority, min(j.available_at) AS available_at
                      FROM awa.unclaimed_ranges(p_queue) r
                     CROSS JOIN LATERAL (SELECT j.available_at FROM awa.jobs j
                                          WHERE j.queue = p_queue AND j.lane = r.lane
                                            AND (j.xid, j.entry_id) > (r.lo_xid, r.lo_entry)
                                            AND (j.xid, j.entry_id) < (r.hi_xid, r.hi_entry)
                                            AND pg_visible_in_snapshot(j.xid, r.page_to)
                                          ORDER BY j.xid, j.entry_id LIMIT 1) j
                     GROUP BY r.lane
                    UNION ALL
                    SELECT 1, p_aside, p_since WHERE p_aside IS NOT NULL) l
            WINDOW of_priority AS (PARTITION BY l.lane / 2)) h;
    IF v_order IS NULL OR v_order = ARRAY(SELECT l FROM unnest(v_order) l
                                         ORDER BY CASE l WHEN 1 THEN 2 * p_aside - 0.5 ELSE l END) THEN
        RETURN NULL;
    END IF;
    RETURN v_order || ARRAY(SELECT l::smallint FROM generate_series(2, 9) l WHERE l <> ALL (v_order) ORDER BY l);
END $$;

CREATE FUNCTION awa.analyze_v1(p_slot smallint) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET default_statistics_target TO '10'
    AS $_$
BEGIN
    EXECUTE format('ANALYZE awa.jobs_%1$s, awa.claims_%1$s, awa.completions_%1$s, awa.attempt_ends_%1$s', p_slot);
END $_$;

CREATE FUNCTION awa.append_follow_ups(p_ids bigint[], p_jobs json[], p_notify boolean) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    v_bells text[];
BEGIN
    WITH child AS MATERIALIZED (
        SELECT nextval('awa.entry_id_seq') AS id, t.*
          FROM (SELECT p.n AS parent, r.n, coalesce(r.queue, 'default') AS queue, r.kind,
                       coalesce(r.args, '{}') AS args, coalesce(r.priority, 2::smallint) AS priority,
                       coalesce(r.max_attempts, 25::smallint) AS max_attempts, r.timeout_ms, r.tags, r.metadata,
                       r.concurrency_key, r.ordering_key, r.expires_at,
                       coalesce(r.run_at, clock_timestamp() + r.delay * interval '1 s') AS run_at,
                       concat('{"of":', p.id, ',"completed":' || (r.follow_ups->'completed')::text,
                              ',"failed":' || (r.follow_ups->'failed')::text,
                              ',"cancelled":' || (r.follow_ups->'cancelled')::text, '}')::json AS follow_ups
                  FROM unnest(p_ids, p_jobs) WITH ORDINALITY AS p(id, jobs, n)
                 CROSS JOIN LATERAL awa.follow_up_rows_v2(p.jobs) r
                 ORDER BY p.n, r.n) t
    ), sorted AS MATERIALIZED (
        SELECT c.*, coalesce(c.run_at <= clock_timestamp(), true) AS is_due FROM child c
    ), available AS (
        INSERT INTO awa.jobs (entry_id, id, queue, lane, priority, kind, args, max_attempts, timeout_ms, tags, metadata,
                              concurrency_key, ordering_key, expires_at, follow_ups)
        SELECT c.id, c.id, c.queue, 2 * c.priority + 1, c.priority, c.kind, c.args, c.max_attempts, c.timeout_ms,
               c.tags, c.metadata, c.concurrency_key, c.ordering_key, c.expires_at, c.follow_ups
          FROM sorted c WHERE c.is_due ORDER BY c.id
    ), scheduled AS (
        INSERT INTO awa.waiting_jobs (id, run_at, queue, priority, kind, args, max_attempts, timeout_ms, tags, metadata,
                                      concurrency_key, ordering_key, expires_at, follow_ups)
        SELECT c.id, c.run_at, c.queue, c.priority, c.kind, c.args, c.max_attempts, c.timeout_ms, c.tags, c.metadata,
               c.concurrency_key, c.ordering_key, c.expires_at, c.follow_ups
          FROM sorted c WHERE NOT c.is_due
    )
    SELECT array_agg(DISTINCT CASE WHEN c.is_due THEN c.queue ELSE '' END) INTO v_bells
      FROM sorted c WHERE c.is_due OR c.run_at < clock_timestamp() + interval '1.5 s';
    IF p_notify AND v_bells IS NOT NULL THEN
        PERFORM awa.ring(v_bells);
    END IF;
END $$;

CREATE FUNCTION awa.are_many(p_guess double precision, p_pages bigint, p_exact integer) RETURNS boolean
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT p_guess > p_exact AND p_pages * (ln(p_guess / p_exact) - 1 + p_exact / p_guess) > 6
$$;

CREATE FUNCTION awa.call_for_help(p_queue text) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    PERFORM awa.ring(ARRAY[p_queue]);
    PERFORM pg_notify(awa.channel(), chr(1) || p_queue);
END $$;

CREATE FUNCTION awa.cancel_error(p_reason text, p_error json) RETURNS json
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT json_build_object('type', 'Cancelled', 'traceback', coalesce(p_error->>'traceback', ''), 'text',
                             left(coalesce(p_reason, 'cancelled by an operator')
                                  || coalesce(E'\n' || (p_error->>'type') || ': ' || (p_error->>'text'), ''), 4000))
$$;

CREATE FUNCTION awa.cancel_v1(p_id bigint, p_reason text DEFAULT NULL::text, p_force boolean DEFAULT false, OUT happened text, OUT state text) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    SET lock_timeout TO '10ms'
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION awa.cancel_waiting_v1(p_queue text, p_reason text DEFAULT NULL::text, p_from jsonb DEFAULT NULL::jsonb, p_limit integer DEFAULT 500, OUT happened text, OUT cancelled integer, OUT go_on jsonb) RETURNS record
    LANGUAGE sql
    SET jit TO 'off'
    AS $$
    SELECT s.happened, s.waiting, s.go_on FROM awa.clear_step(p_queue, false, p_reason, p_from, p_limit) s
$$;

CREATE FUNCTION awa.carry_v1(p_slot smallint, p_queue text, p_limit integer) RETURNS integer
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v_slots smallint[] := '{}';
    v_lanes smallint[] := '{}';
    v_xids xid8[] := '{}';
    v_entries bigint[] := '{}';
    v_left integer := p_limit;
    v_is_first boolean;
    r record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.carry needs READ COMMITTED: an older snapshot would carry what is claimed'
              USING ERRCODE = 'AWA02';
    END IF;
    IF NOT pg_try_advisory_xact_lock(hashtextextended('awa.queue:' || p_queue, 0)) THEN
        RETURN -1;
    END IF;
    FOR v_lane IN 2..9 LOOP
        CONTINUE WHEN NOT EXISTS (SELECT FROM awa.unclaimed(p_queue, 1, p_slot, v_lane::smallint));
        v_is_first := v_lane % 2 = 0
                      OR (SELECT u.slot FROM awa.unclaimed(p_queue, 1, NULL, v_lane::smallint) u) = p_slot;
        SELECT array_agg(u.slot) AS slots, array_agg(u.lane) AS lanes, array_agg(u.xid) AS xids,
               array_agg(u.entry_id) AS entries, count(*) AS n
          INTO r
          FROM awa.unclaimed(p_queue, v_left, CASE WHEN v_lane % 2 = 1 THEN p_slot END, v_lane::smallint) u
         CROSS JOIN LATERAL (SELECT j.ordering_key FROM awa.jobs j
                              WHERE j.slot = u.slot AND j.queue = p_queue AND j.lane = u.lane AND j.xid = u.xid
                                AND j.entry_id = u.entry_id LIMIT 1) j
         WHERE v_is_first OR j.ordering_key IS NULL;
        CONTINUE WHEN r.n = 0;
        v_slots := v_slots || r.slots;
        v_lanes := v_lanes || r.lanes;
        v_xids := v_xids || r.xids;
        v_entries := v_entries || r.entries;
        v_left := v_left - r.n;
        EXIT WHEN v_left <= 0;
    END LOOP;
    IF cardinality(v_entries) = 0 THEN
        RETURN 0;
    END IF;
    WITH entry AS MATERIALIZED (
        SELECT u.n, j.*
          FROM unnest(v_slots, v_lanes, v_xids, v_entries) WITH ORDINALITY AS u(slot, lane, xid, entry_id, n)
         CROSS JOIN LATERAL (SELECT * FROM awa.jobs j
                              WHERE j.slot = u.slot AND j.queue = p_queue AND j.lane = u.lane AND j.xid = u.xid
                                AND j.entry_id = u.entry_id LIMIT 1) j
    ), ended AS (
        INSERT INTO awa.attempt_ends (entry_id, id, slot, outcome)
        SELECT e.entry_id, e.id, e.slot, 'carried' FROM entry e
    )
    INSERT INTO awa.jobs (id, created_at, lane, priority, attempt, max_attempts, timeout_ms, queue, kind, args, metadata,
                          tags, concurrency_key, ordering_key, unique_key, expires_at, follow_ups, history)
    SELECT e.id, coalesce(e.created_at, e.available_at), 2 * e.priority, e.priority, e.attempt, e.max_attempts,
           e.timeout_ms, e.queue, e.kind, e.args, e.metadata, e.tags, e.concurrency_key, e.ordering_key, e.unique_key,
           e.expires_at, e.follow_ups, e.history
      FROM entry e ORDER BY e.n;
    RETURN cardinality(v_entries);
END $$;

CREATE FUNCTION awa.channel() RETURNS text
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT 'awa_' || left(encode(sha256(convert_to('awa.bell', 'UTF8')), 'hex'), 16)
$$;

CREATE FUNCTION awa.check_queue(p_queue text) RETURNS void
    LANGUAGE plpgsql STABLE
    AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'control of a queue needs READ COMMITTED: an older snapshot would miss a claim'
              USING ERRCODE = 'AWA02';
    END IF;
    IF p_queue IS NULL OR length(p_queue) NOT BETWEEN 1 AND 200 THEN
        RAISE EXCEPTION 'a queue''s name has 1 to 200 characters, not %', coalesce(length(p_queue)::text, 'NULL')
              USING ERRCODE = '22023';
    END IF;
END $$;

CREATE FUNCTION awa.claim_of(p_slot smallint, p_queue text, p_lane smallint, p_xid xid8, p_entry bigint, p_appended_at timestamp with time zone) RETURNS TABLE(claim_id bigint, idx smallint, claimed_at timestamp with time zone, runtime bigint)
    LANGUAGE plpgsql STABLE
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
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

CREATE FUNCTION awa.claim_v1(p_queue text, p_runtime bigint, p_kinds text[], p_limit integer, p_bell boolean DEFAULT false) RETURNS TABLE(flags integer, claim_id bigint, slot smallint, nonce integer, priority smallint, ids bigint[], entry_ids bigint[], attempts smallint[], max_attempts smallint[], kinds text[], lens integer[], args text, created_at timestamp with time zone[], details text[])
    LANGUAGE plpgsql
    AS $$
BEGIN
    RETURN QUERY SELECT * FROM awa.claim_v2(p_queue, p_runtime, p_kinds, p_limit, p_bell);
END $$;

CREATE FUNCTION awa.claim_v2(p_queue text, p_runtime bigint, p_kinds text[], p_limit integer, p_bell boolean DEFAULT false, p_aging double precision DEFAULT 60) RETURNS TABLE(flags integer, claim_id bigint, slot smallint, nonce integer, priority smallint, ids bigint[], entry_ids bigint[], attempts smallint[], max_attempts smallint[], kinds text[], lens integer[], args text, created_at timestamp with time zone[], details text[])
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET jit TO 'off'
    SET lock_timeout TO '20ms'
    SET cursor_tuple_fraction TO '1'
    AS $_$
#variable_conflict use_column
DECLARE
    c_bytes CONSTANT integer := 131072;
    c_long CONSTANT integer := 512;
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
    c_batches refcursor;
    v_take integer;              -- how many entries the walk may pick
    v_is_simple boolean;         -- nothing tells yet that there is more to look at than kinds
    v_is_plain boolean;          -- and so it is: one pass was enough
    v_parts record;              -- the parts of the page from here to now
    v_parts_from text;
    v_usual CONSTANT smallint[] := '{2,3,4,5,6,7,8,9}';
    v_order smallint[];          -- the lanes, first to walk first; 1 stands for what is set aside
    v_is_armed boolean := false;
    v_walked integer;            -- how many of them are walked
    v_place integer;
    v_aside_since timestamptz;
    v_limit integer := p_limit;
    v_handed integer := 0;
    v_is_free boolean := false;  -- keys that are to be handed over
    v_wait integer;              -- milliseconds until the rate allows more
    v_wanted double precision;
    v_state awa.limit_state;
    m awa.queue_meta;
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
                v_is_armed := true;
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
    SELECT * INTO m FROM awa.queue_meta t WHERE t.queue = p_queue;
    IF m.paused_at IS NOT NULL THEN
        v_flags := 16;
        v_limit := 0;
    END IF;

    <<rounds>>
    FOR v_round IN 1..20 LOOP
        EXIT rounds WHEN v_limit < 1;
        SELECT u.frontier, u.claimed_at, u.limits INTO r
          FROM ((SELECT c.claim_id, c.frontier, c.claimed_at, c.limits FROM awa.claims c
                  WHERE c.queue = p_queue ORDER BY c.claim_id DESC LIMIT 1)
                UNION ALL
                SELECT t.claim_id, t.frontier, '-infinity', t.limits FROM awa.frontiers t WHERE t.queue = p_queue) u
         ORDER BY u.claim_id DESC LIMIT 1;
        v_frontier := coalesce(r.frontier, '{}');
        v_claimed_at := coalesce(r.claimed_at, '-infinity');
        IF v_direct IS NULL THEN        -- else the limits allowed what was appended, whatever the clock says by now
            v_state := r.limits;
            IF m.max_running IS NOT NULL THEN
                v_state := awa.still_open(p_queue, v_state, m.max_running, v_limit);
                v_limit := least(v_limit, m.max_running - (SELECT coalesce(sum(s), 0) FROM unnest(v_state.open_sizes) s));
            ELSE
                v_state.open_claims := NULL; v_state.open_slots := NULL; v_state.open_sizes := NULL;
            END IF;
            IF m.rate IS NOT NULL THEN
                -- NULL is as many as may be. So it is after a clock was set back: else nothing would start until it is
                -- where it was.
                v_state.tokens := least(m.burst, CASE WHEN v_state.tokens_at <= clock_timestamp() THEN v_state.tokens
                    + m.rate * extract(epoch FROM clock_timestamp() - v_state.tokens_at) END);
                v_state.tokens_at := clock_timestamp();
                IF v_state.tokens < 1 AND v_limit > 0 THEN
                    -- as many at a time as come in a tenth of a second, or the workers would ask for each by itself
                    v_wanted := least(v_limit, m.burst, greatest(1, ceil(m.rate / 10)));
                    v_wait := least(ceil(1000 * (v_wanted - v_state.tokens) / m.rate), 1e9);
                END IF;
                v_limit := least(v_limit, floor(v_state.tokens));
            ELSE
                v_state.tokens := NULL; v_state.tokens_at := NULL;
            END IF;
            IF v_limit < 1 THEN
                v_flags := 32;
                EXIT rounds;
            END IF;
        END IF;
        IF v_round = 1 THEN
            v_is_simple := NOT EXISTS (SELECT FROM awa.grants t WHERE t.queue = p_queue);
            IF NOT v_is_simple THEN
                v_handed := awa.hand_over(p_queue, m.max_running_per_key);
            END IF;
        END IF;
        v_now := awa.page_end();
        v_parts_from := NULL;
        IF v_direct IS NULL THEN
            v_aside := NULL;
            IF p_kinds IS NOT NULL AND NOT v_held AND EXISTS (SELECT FROM awa.waiting_jobs t
                                                WHERE t.queue = p_queue AND t.waits_for = 'kind') THEN
                SELECT d.priority, d.created_at INTO v_aside, v_aside_since
                  FROM unnest(p_kinds) k CROSS JOIN LATERAL (
                       SELECT t.priority, t.created_at FROM awa.waiting_jobs t
                        WHERE t.queue = p_queue AND t.waits_for = 'kind' AND t.wait_key = k
                        ORDER BY t.priority, t.seq LIMIT 1) d
                 ORDER BY d.priority, d.created_at LIMIT 1;
            END IF;
            -- Once a second, when the last claim left lanes unwalked: what has waited there for long may come first.
            v_order := NULL;
            IF p_aging > 0 AND v_round = 1
               AND floor(extract(epoch FROM v_claimed_at)) < floor(extract(epoch FROM clock_timestamp()))
               AND (v_aside IS NOT NULL OR EXISTS (SELECT FROM unnest(v_frontier) t WHERE t.page_to IS NOT NULL)) THEN
                v_order := awa.aged_order(p_queue, p_aging, v_aside, v_aside_since);
            END IF;
            IF v_order IS NULL THEN
                v_order := CASE WHEN v_aside IS NULL THEN v_usual
                                ELSE v_usual[:2 * v_aside - 2] || 1::smallint || v_usual[2 * v_aside - 1:] END;
            END IF;
        END IF;
        v_walked := 0;

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
            FOREACH v_lane IN ARRAY v_order LOOP
                EXIT WHEN v_lane = 1;
                v_walked := v_walked + 1;
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
        -- Nearly always nothing but its kind decides what becomes of an entry, and all that are walked fit into a message:
        -- then they are plain, and one pass over them is enough. Where they do not fit, as many as may are walked again.
        -- Long bodies are not put together before it is known how many of them fit.
        v_take := v_limit;
        v_is_plain := false;
        IF v_is_simple THEN
            FOR v_try IN 1..2 LOOP
                OPEN c_batches FOR
                    WITH parts AS MATERIALIZED (
                        SELECT k.slot, k.lane, count(*)::integer AS picked, min(k.n) AS first_n, max(k.n) AS last_n,
                               count(*) FILTER (WHERE k.size > c_long) AS n_long,
                               sum(k.size) FILTER (WHERE k.size <= c_long) AS bytes,
                               bool_or(k.rescued IS TRUE OR k.expired IS TRUE OR k.ordering_key IS NOT NULL
                                       OR m.max_running_per_key IS NOT NULL AND k.concurrency_key IS NOT NULL)
                                   AS is_special,
                               array_agg(k.xid) AS all_xids, array_agg(k.entry_id) AS all_entries,
                               array_agg(k.n) FILTER (WHERE NOT k.known) AS alien_ns,
                               array_agg(k.xid) FILTER (WHERE NOT k.known) AS alien_xids,
                               array_agg(k.entry_id) FILTER (WHERE NOT k.known) AS alien_entries,
                               array_agg(k.entry_id) FILTER (WHERE k.known) AS entry_ids,
                               array_agg(k.xid) FILTER (WHERE k.known) AS xids,
                               array_agg(k.id) FILTER (WHERE k.known) AS ids,
                               array_agg(k.attempt) FILTER (WHERE k.known) AS attempts,
                               array_agg(k.max_attempts) FILTER (WHERE k.known) AS max_attempts,
                               array_agg(k.kind) FILTER (WHERE k.known) AS kinds,
                               array_agg(k.created_at) FILTER (WHERE k.known) AS created_at,
                               array_agg(k.details) FILTER (WHERE k.known) AS details,
                               count(k.details) FILTER (WHERE k.known) AS n_details,
                               array_agg(k.entry_id) FILTER (WHERE k.known AND k.single) AS singles,
                               max(k.attempt) FILTER (WHERE k.known) AS top_attempt,
                               min(k.max_attempts) FILTER (WHERE k.known) AS lo_max,
                               max(k.max_attempts) FILTER (WHERE k.known) AS hi_max,
                               string_agg(k.args, '') FILTER (WHERE k.known AND k.size <= c_long) AS args,
                               array_agg(octet_length(k.args)) FILTER (WHERE k.known) AS lens
                          FROM awa.walked(p_queue, p_kinds, v_take, v_started, w_lane, w_to, w_lo_xid, w_lo_entry,
                                          w_hi_xid, w_hi_entry) k
                         GROUP BY k.slot, k.lane
                    ), ordered AS MATERIALIZED (
                        SELECT p.*, p.all_xids[1] AS first_xid, p.all_entries[1] AS first_entry,
                               p.all_xids[p.picked] AS last_xid, p.all_entries[p.picked] AS last_entry FROM parts p
                    ), told AS MATERIALIZED (
                        SELECT sum(p.picked)::bigint AS picked, sum(p.bytes) AS bytes, sum(p.n_long) AS n_long,
                               bit_or(1 << p.lane) AS lanes,
                               bool_or(p.alien_entries IS NOT NULL) AS has_aliens,
                               NOT bool_or(p.is_special) AND bool_and(
                                   awa.ended_among(array_fill(p.slot, ARRAY[p.picked]), p.all_entries) = '{}')
                                   AS is_simple
                          FROM parts p
                    )
                    SELECT t.is_simple, t.is_simple AND t.n_long = 0 AND t.bytes <= c_bytes AS is_plain, t.n_long, t.bytes,
                           t.picked AS ord, l.last_n AS n, l.lane AS last_lane, l.last_xid, l.last_entry, t.picked, t.lanes,
                           a.slots AS alien_slots, a.lanes AS alien_lanes, a.xids AS alien_xids,
                           a.entries AS alien_entries, a.whys AS alien_whys,
                           b.slot, b.lane, b.first_n AS first, b.entry_ids, b.xids, b.ids, b.attempts, b.max_attempts,
                           b.kinds, b.created_at, b.details, b.n_details, b.singles, NULL::awa.keyed_entry[] AS keyed,
                           false AS alone, b.top_attempt, b.lo_max, b.hi_max, b.args, b.lens
                      FROM told t
                     CROSS JOIN (SELECT * FROM ordered o
                                  ORDER BY o.last_n DESC, o.last_xid DESC, o.last_entry DESC LIMIT 1) l
                     CROSS JOIN (
                           SELECT array_agg(e.slot) AS slots, array_agg(e.lane) AS lanes, array_agg(e.xid) AS xids,
                                  array_agg(e.entry_id) AS entries, array_agg('kind'::text) AS whys
                             FROM (SELECT p.slot, p.lane, e.xid, e.entry_id
                                     FROM parts p
                                    CROSS JOIN LATERAL unnest(p.alien_ns, p.alien_xids, p.alien_entries)
                                               e(n, xid, entry_id)
                                    WHERE (SELECT t.has_aliens FROM told t)
                                    ORDER BY e.n, e.xid, e.entry_id) e) a
                      LEFT JOIN ordered b ON t.is_simple AND b.entry_ids IS NOT NULL
                     ORDER BY b.first_n, b.first_xid, b.first_entry;
                FETCH c_batches INTO g;
                v_is_plain := NOT FOUND OR g.is_plain;
                EXIT WHEN v_is_plain;
                CLOSE c_batches;
                v_is_simple := g.is_simple;
                EXIT WHEN NOT v_is_simple OR v_direct IS NOT NULL;
                IF g.n_long > 0 THEN
                    v_take := least(v_take, g.picked - g.n_long + c_bytes / c_long);
                    EXIT;
                END IF;
                v_take := greatest(1, floor(g.picked * c_bytes / g.bytes));
            END LOOP;
        END IF;
        IF NOT v_is_plain THEN
            OPEN c_batches FOR
                WITH sized AS MATERIALIZED (
                    SELECT w.*, row_number() OVER so_far AS ord, sum(w.size) OVER so_far AS bytes
                      FROM awa.walked(p_queue, p_kinds, v_take, v_started, w_lane, w_to, w_lo_xid, w_lo_entry,
                                      w_hi_xid, w_hi_entry) w
                    WINDOW so_far AS (ROWS UNBOUNDED PRECEDING)
                ), whole AS MATERIALIZED (
                    SELECT count(*) AS picked, min(s.ord) FILTER (WHERE s.rescued) AS suspect,
                           awa.ended_among(array_agg(s.slot), array_agg(s.entry_id)) AS ended
                      FROM sized s
                ), kept AS MATERIALIZED (
                    SELECT s.*, s.entry_id = ANY (w.ended) AS ended,
                           s.ordering_key IS NOT NULL
                           OR m.max_running_per_key IS NOT NULL AND s.concurrency_key IS NOT NULL AS keyed
                      FROM whole w CROSS JOIN sized s
                     WHERE s.ord = 1 OR v_direct IS NOT NULL
                        OR s.bytes <= c_bytes AND (s.ord < w.suspect) IS NOT FALSE
                ), told AS MATERIALIZED (
                    SELECT max(k.ord) AS ord, bit_or(1 << k.lane) AS lanes,
                           bool_or((NOT k.known OR k.expired) AND NOT k.ended) AS has_aliens,
                           -- one of an unknown kind takes its place in the order all the same
                           array_agg(ROW(k.ord, k.entry_id, k.id, CASE WHEN k.known THEN k.concurrency_key END,
                                         k.ordering_key)::awa.keyed_entry)
                           FILTER (WHERE k.keyed AND NOT k.ended AND k.expired IS NOT TRUE) AS keyed
                      FROM kept k
                ), verdict AS MATERIALIZED (       -- why an entry must wait, at its place
                    SELECT CASE WHEN t.keyed IS NOT NULL
                                THEN awa.admit(p_queue, m.max_running_per_key, t.keyed) END AS why
                      FROM told t
                ), batches AS (
                    SELECT k.slot, k.lane, min(k.ord) AS first, array_agg(k.entry_id) AS entry_ids,
                           array_agg(k.xid) AS xids, array_agg(k.id) AS ids, array_agg(k.attempt) AS attempts,
                           array_agg(k.max_attempts) AS max_attempts, array_agg(k.kind) AS kinds,
                           array_agg(k.created_at) AS created_at,
                           array_agg(k.details) AS details, count(k.details) AS n_details,
                           array_agg(k.entry_id) FILTER (WHERE k.single) AS singles,
                           array_agg(ROW(k.ord, k.entry_id, k.id, k.concurrency_key,
                                         k.ordering_key)::awa.keyed_entry) FILTER (WHERE k.keyed) AS keyed,
                           v_direct IS NULL AND bool_or(k.rescued) AS alone,
                           max(k.attempt) AS top_attempt, min(k.max_attempts) AS lo_max,
                           max(k.max_attempts) AS hi_max,
                           string_agg(k.args, '') FILTER (WHERE k.bytes <= c_bytes) AS args,
                           array_agg(CASE WHEN k.bytes <= c_bytes THEN octet_length(k.args) END) AS lens
                      FROM kept k
                     WHERE k.known AND NOT k.ended AND k.expired IS NOT TRUE
                       AND (NOT k.keyed OR (SELECT v.why[k.ord] FROM verdict v) IS NULL)
                     GROUP BY k.slot, k.lane
                ), aliens AS (
                    SELECT array_agg(k.slot) AS slots, array_agg(k.lane) AS lanes, array_agg(k.xid) AS xids,
                           array_agg(k.entry_id) AS entries,
                           array_agg(CASE WHEN k.expired THEN 'expired'
                                          WHEN NOT k.known AND k.why IS NULL THEN 'kind' ELSE k.why END) AS whys
                      FROM (SELECT k.*, CASE WHEN k.keyed THEN (SELECT v.why[k.ord] FROM verdict v) END AS why
                              FROM kept k
                             WHERE (SELECT t.has_aliens OR t.keyed IS NOT NULL FROM told t) AND NOT k.ended) k
                     WHERE k.expired OR NOT k.known OR k.why IS NOT NULL
                )
                SELECT l.ord, l.n, l.lane AS last_lane, l.xid AS last_xid,
                       l.entry_id AS last_entry, (SELECT w.picked FROM whole w) AS picked,
                       (SELECT t.lanes FROM told t) AS lanes, a.slots AS alien_slots, a.lanes AS alien_lanes,
                       a.xids AS alien_xids, a.entries AS alien_entries, a.whys AS alien_whys, b.*
                  FROM (SELECT * FROM kept k WHERE k.ord = (SELECT t.ord FROM told t)) l
                 CROSS JOIN aliens a LEFT JOIN batches b ON true
                 ORDER BY b.first;       -- else batches come in the order of a hash
            FETCH c_batches INTO g;
        END IF;
        WHILE g.ord IS NOT NULL LOOP
            IF v_last IS NULL THEN
                v_last := g;
                v_next := '{}';
                IF v_direct IS NOT NULL THEN
                    v_next := v_frontier;
                ELSE
                    FOREACH v_lane IN ARRAY v_usual LOOP
                        f := NULL;
                        FOR v_n IN 1..cardinality(v_frontier) LOOP
                            IF v_frontier[v_n].lane = v_lane THEN
                                f := v_frontier[v_n];
                            END IF;
                        END LOOP;
                        -- cut short in last_lane: the lanes before it are exhausted, those behind it not walked
                        v_place := array_position(v_order, v_lane);
                        IF (g.picked >= v_take OR g.picked > g.ord) AND v_place >= array_position(v_order, g.last_lane) THEN
                            IF v_lane = g.last_lane THEN
                                f := ROW(v_lane, w_from[g.n], w_to[g.n], g.last_xid, g.last_entry)::awa.lane_frontier;
                            END IF;
                        ELSIF g.lanes & (1 << v_lane) <> 0 OR (f.lane IS NOT NULL AND v_place <= v_walked) THEN
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
            IF m.max_running IS NOT NULL THEN
                v_state.open_claims := v_state.open_claims || v_claim;
                v_state.open_slots := v_state.open_slots || g.slot;
                v_state.open_sizes := v_state.open_sizes || cardinality(g.entry_ids)::smallint;
            END IF;
            v_state.tokens := v_state.tokens - cardinality(g.entry_ids);
            INSERT INTO awa.claims (claim_id, runtime, nonce, slot, lane, queue, frontier, entry_ids, xids, singles, limits)
            VALUES (v_claim, p_runtime, v_nonce, g.slot, g.lane, p_queue, v_next, g.entry_ids, g.xids,
                    CASE WHEN g.singles IS NOT NULL THEN awa.positions(g.entry_ids, g.singles) END,
                    CASE WHEN m.max_running IS NOT NULL OR m.rate IS NOT NULL THEN v_state END);
            IF g.keyed IS NOT NULL THEN
                INSERT INTO awa.grants AS t (queue, scope, key, id, claim_id, entry_id, slot, idx)
                SELECT p_queue, s.scope, left(s.key, 201), k.id, v_claim, k.entry_id, g.slot,
                       array_position(g.entry_ids, k.entry_id)
                  FROM unnest(g.keyed) k
                 CROSS JOIN LATERAL (VALUES ('key', CASE WHEN m.max_running_per_key IS NOT NULL THEN k.key END),
                                            ('order', k.ordering)) AS s(scope, key)
                 WHERE s.key IS NOT NULL
                    ON CONFLICT (queue, scope, key, id) DO UPDATE
                   SET claim_id = excluded.claim_id, entry_id = excluded.entry_id, slot = excluded.slot,
                       idx = excluded.idx, is_over = false, granted_at = excluded.granted_at;
            END IF;
            RETURN QUERY SELECT 0, v_claim, g.slot, v_nonce,
                (CASE WHEN g.lane = 0 THEN v_aside ELSE g.lane / 2 END)::smallint, g.ids,
                CASE WHEN g.entry_ids <> g.ids THEN g.entry_ids END, CASE WHEN g.top_attempt > 1 THEN g.attempts END,
                CASE WHEN g.lo_max <> 25 OR g.hi_max <> 25 THEN g.max_attempts END, g.kinds, g.lens, g.args,
                g.created_at, CASE WHEN g.n_details > 0 THEN g.details END;
            FETCH c_batches INTO g;
        END LOOP;
        CLOSE c_batches;

        IF v_last IS NULL THEN
            IF v_direct IS NULL AND v_aside IS NOT NULL AND v_round = 20 THEN
                v_flags := v_flags | 4;      -- no round is left in which to claim what would be appended
                EXIT rounds;
            ELSIF v_direct IS NULL AND v_aside IS NOT NULL THEN
                -- by arrays: joins may be planned as walks over the whole table
                WITH due AS MATERIALIZED (
                    SELECT t.id FROM awa.waiting_jobs t
                     WHERE t.id = ANY (ARRAY(
                           SELECT d.id FROM unnest(p_kinds) k CROSS JOIN LATERAL (
                                  SELECT t.id, t.seq FROM awa.waiting_jobs t
                                   WHERE t.queue = p_queue AND t.waits_for = 'kind' AND t.wait_key = k
                                     AND t.priority = v_aside
                                   ORDER BY t.seq LIMIT v_limit) d
                            ORDER BY d.seq LIMIT v_limit))
                       AND t.queue || '' = p_queue AND t.waits_for || '' = 'kind'       -- as in awa.hand_over
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
                INSERT INTO awa.claims (claim_id, runtime, nonce, slot, lane, queue, frontier, entry_ids, xids, limits)
                VALUES (nextval('awa.claim_id_seq'), p_runtime, 0, pg_sequence_last_value('awa.ring_seq'), 0, p_queue,
                        v_next, '{}', '{}',
                        CASE WHEN m.max_running IS NOT NULL OR m.rate IS NOT NULL THEN v_state END);
            END IF;
            EXIT rounds;
        END IF;
        IF v_last.alien_entries IS NOT NULL THEN
            v_is_free := awa.set_aside(p_queue, v_last.alien_slots, v_last.alien_lanes, v_last.alien_xids,
                                       v_last.alien_entries, v_last.alien_whys) OR v_is_free;
        END IF;
        EXIT rounds WHEN v_some;
        -- Only ended or set-aside entries: remember how far the walk came, or live ones behind them stay hidden.
        INSERT INTO awa.claims (claim_id, runtime, nonce, slot, lane, queue, frontier, entry_ids, xids, limits)
        VALUES (nextval('awa.claim_id_seq'), p_runtime, 0, pg_sequence_last_value('awa.ring_seq'), 0, p_queue, v_next,
                '{}', '{}',
                CASE WHEN m.max_running IS NOT NULL OR m.rate IS NOT NULL THEN v_state END);
        v_direct := NULL;
        IF v_round = 20 OR clock_timestamp() - v_started > interval '500 ms' THEN
            v_flags := v_flags | 4;          -- others wait for the lock, and who holds it for seconds is ended
            EXIT rounds;
        END IF;
    END LOOP;
    IF v_handed > 0 OR v_is_free THEN
        v_flags := v_flags | 4;             -- this transaction's own entries are in no page yet; free keys are handed over
    END IF;
    IF v_flags & 48 <> 0 AND v_is_armed THEN
        -- inserts need wake nobody; without this each would, and NOTIFY lets only one commit at a time
        PERFORM pg_advisory_unlock(hashtextextended('awa.bell:' || p_queue, 0));
    END IF;
    RETURN QUERY SELECT v_flags, NULL::bigint, NULL::smallint, v_wait, NULL::smallint, NULL::bigint[],
                        NULL::bigint[], NULL::smallint[], NULL::smallint[], NULL::text[], NULL::integer[],
                        NULL::text, NULL::timestamptz[], NULL::text[];
END $_$;

CREATE FUNCTION awa.clear_step(p_queue text, p_purge boolean, p_reason text, p_from jsonb, p_limit integer, OUT happened text, OUT waiting integer, OUT ended integer, OUT go_on jsonb) RETURNS record
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET jit TO 'off'
    SET lock_timeout TO '20ms'
    AS $$
DECLARE
    v_error CONSTANT json := CASE WHEN NOT p_purge THEN awa.cancel_error(p_reason, NULL) END;
    v_outcome CONSTANT text := CASE WHEN p_purge THEN 'purged' ELSE 'cancelled' END;
    v_until bigint;              -- the last id that it is about
    v_low xid8;                  -- lanes: transactions before it were looked through by the passes before
    v_now pg_snapshot := pg_current_snapshot();
    v_next_low xid8;
    v_place integer;
    v_found integer;             -- by this pass, so far
    v_held boolean;              -- somebody had a lock on what it met
    v_id bigint;                 -- behind which it goes on, and within a lane or among ended jobs ...
    v_xid xid8;
    v_hi xid8;                   -- before which this pass over a lane ends
    v_at timestamptz;
    v_looked integer := 0;
    v_lane smallint;
    v_frontier awa.lane_frontier;
    r record;
BEGIN
    PERFORM awa.check_queue(p_queue);
    IF (p_limit BETWEEN 1 AND 1000) IS NOT TRUE THEN
        RAISE EXCEPTION 'a step ends 1 to 1000 jobs, not %', p_limit USING ERRCODE = '22023';
    END IF;
    waiting := 0;
    ended := 0;
    IF p_from IS NULL THEN
        p_from := jsonb_build_object('until', (SELECT s.last_value FROM awa.entry_id_seq s), 'low', 0, 'place', 0,
                                     'next_low', pg_snapshot_xmin(v_now)::text, 'found', 0, 'held', false);
    END IF;
    go_on := p_from;
    happened := 'busy';
    IF NOT awa.lock_queue(p_queue, 0.2) THEN
        RETURN;
    END IF;
    v_until := p_from->>'until'; v_low := p_from->>'low'; v_next_low := p_from->>'next_low';
    v_place := p_from->>'place'; v_found := p_from->>'found'; v_held := p_from->>'held';
    v_id := p_from->>'id'; v_xid := p_from->>'xid'; v_hi := p_from->>'hi'; v_at := p_from->>'at';
    BEGIN
        LOOP
            r := NULL;
            IF v_place <= 3 THEN
                WITH place AS MATERIALIZED (
                    SELECT w.id FROM awa.waiting_jobs w
                     WHERE w.queue = p_queue
                       AND w.state = (ARRAY['scheduled', 'available', 'retryable', 'waiting_external'])[v_place + 1]
                       AND w.id > coalesce(v_id, 0) AND w.id <= v_until
                     ORDER BY w.id LIMIT p_limit
                ), held AS MATERIALIZED (
                    SELECT w.id FROM awa.waiting_jobs w
                     WHERE w.id = ANY (ARRAY(SELECT p.id FROM place p))
                       AND (w.queue = p_queue) IS TRUE      -- no index of queues for this
                       FOR UPDATE SKIP LOCKED
                ), taken AS (
                    DELETE FROM awa.waiting_jobs w WHERE w.id = ANY (ARRAY(SELECT h.id FROM held h)) RETURNING w.*
                ), judged AS MATERIALIZED (
                    SELECT t.*, f.jobs, f.flaw
                      FROM taken t
                      LEFT JOIN LATERAL (SELECT f.* FROM awa.follow_ups_after(t.follow_ups, 'cancelled') f
                                          WHERE t.follow_ups IS NOT NULL AND NOT p_purge OFFSET 0) f ON true
                ), final AS (
                    INSERT INTO awa.ended_jobs (id, created_at, state, priority, attempt, max_attempts, timeout_ms, queue,
                                                kind, args, metadata, tags, concurrency_key, ordering_key, unique_key,
                                                follow_ups, history)
                    SELECT j.id, j.created_at, 'cancelled', j.priority, j.attempt, j.max_attempts, j.timeout_ms, j.queue,
                           j.kind, j.args, j.metadata, j.tags, j.concurrency_key, j.ordering_key, j.unique_key,
                           j.follow_ups, awa.add_history(j.history, j.attempt, 'cancelled', clock_timestamp(), NULL, NULL,
                                                         awa.with_flaw(v_error, j.flaw))
                      FROM judged j WHERE NOT p_purge
                )
                SELECT array_agg(j.id) AS ids, array_agg(j.jobs) AS jobs, array_agg(j.unique_key) AS keys,
                       (SELECT count(*) FROM place)::integer AS looked, (SELECT max(p.id) FROM place p) AS last,
                       (SELECT count(*) FROM place) > count(*) AS held
                  INTO r FROM judged j;
                v_held := v_held OR r.held;
                v_id := r.last;
            ELSIF v_place <= 11 THEN
                v_lane := v_place - 2;
                v_frontier := NULL;
                SELECT l.* INTO v_frontier FROM unnest(awa.frontier_of(p_queue)) l WHERE l.lane = v_lane;
                IF v_hi IS NULL THEN
                    v_hi := pg_snapshot_xmax(pg_current_snapshot());
                    v_xid := greatest(v_low, pg_snapshot_xmin(v_frontier.page_from));
                    v_id := -1;
                END IF;
                WITH looked AS MATERIALIZED (
                    SELECT j.* FROM awa.jobs j
                     WHERE j.queue = p_queue AND j.lane = v_lane AND (j.xid, j.entry_id) > (v_xid, v_id) AND j.xid < v_hi
                     ORDER BY j.xid, j.entry_id LIMIT p_limit
                ), entry AS MATERIALIZED (
                    SELECT l.* FROM looked l
                     WHERE l.id <= v_until
                       -- as awa.is_passed has it
                       AND NOT coalesce(pg_visible_in_snapshot(l.xid, v_frontier.page_from)
                                        OR pg_visible_in_snapshot(l.xid, v_frontier.page_to)
                                           AND (l.xid, l.entry_id) <= (v_frontier.last_xid, v_frontier.last_entry),
                                        false)
                       AND NOT EXISTS (SELECT FROM awa.attempt_ends e
                                        WHERE e.slot = l.slot AND e.entry_id = l.entry_id OFFSET 0)
                ), over AS (
                    INSERT INTO awa.attempt_ends (entry_id, id, slot, outcome, error)
                    SELECT e.entry_id, e.id, e.slot, v_outcome, v_error FROM entry e
                ), judged AS MATERIALIZED (
                    SELECT e.*, f.jobs, f.flaw
                      FROM entry e
                      LEFT JOIN LATERAL (SELECT f.* FROM awa.follow_ups_after(e.follow_ups, 'cancelled') f
                                          WHERE e.follow_ups IS NOT NULL AND NOT p_purge OFFSET 0) f ON true
                ), final AS (
                    INSERT INTO awa.ended_jobs (id, created_at, state, priority, attempt, max_attempts, timeout_ms, queue,
                                                kind, args, metadata, tags, concurrency_key, ordering_key, unique_key,
                                                follow_ups, history)
                    SELECT j.id, coalesce(j.created_at, j.available_at), 'cancelled', j.priority, j.attempt,
                           j.max_attempts, j.timeout_ms, j.queue, j.kind, j.args, j.metadata, j.tags, j.concurrency_key,
                           j.ordering_key, j.unique_key, j.follow_ups,
                           awa.add_history(j.history, j.attempt, 'cancelled', clock_timestamp(), NULL, NULL,
                                           awa.with_flaw(v_error, j.flaw))
                      FROM judged j WHERE NOT p_purge
                ), last AS (
                    SELECT count(*)::integer AS looked, max(l.xid::text::bigint) AS xid FROM looked l
                )
                SELECT array_agg(j.id) AS ids, array_agg(j.jobs) AS jobs, array_agg(j.unique_key) AS keys,
                       (SELECT t.looked FROM last t) AS looked, (SELECT t.xid FROM last t)::text::xid8 AS xid,
                       (SELECT max(l.entry_id) FROM looked l, last t WHERE l.xid = t.xid::text::xid8) AS last
                  INTO r FROM judged j;
                v_xid := r.xid;
                v_id := r.last;
            ELSE
                WITH place AS MATERIALIZED (
                    SELECT e.ended_at, e.id, row_number() OVER () AS n FROM awa.ended_jobs e
                     WHERE e.queue = p_queue AND e.state = (ARRAY['failed', 'cancelled'])[v_place - 11]
                       AND (e.ended_at, e.id) > (coalesce(v_at, '-infinity'), coalesce(v_id, 0)) AND e.id <= v_until
                     ORDER BY e.ended_at, e.id LIMIT p_limit
                ), held AS MATERIALIZED (
                    SELECT e.id FROM awa.ended_jobs e
                     WHERE e.id = ANY (ARRAY(SELECT p.id FROM place p)) AND (e.queue = p_queue) IS TRUE
                       FOR UPDATE SKIP LOCKED
                ), taken AS (
                    DELETE FROM awa.ended_jobs e WHERE e.id = ANY (ARRAY(SELECT h.id FROM held h))
                    RETURNING e.id, e.unique_key
                )
                SELECT array_agg(t.id) AS ids, NULL::json[] AS jobs, array_agg(t.unique_key) AS keys,
                       (SELECT count(*) FROM place)::integer AS looked,
                       (SELECT p.ended_at FROM place p ORDER BY p.n DESC LIMIT 1) AS at,
                       (SELECT p.id FROM place p ORDER BY p.n DESC LIMIT 1) AS last,
                       (SELECT count(*) FROM place) > count(*) AS held
                  INTO r FROM taken t;
                v_held := v_held OR r.held;
                v_at := r.at;
                v_id := r.last;
            END IF;
            IF r.ids IS NOT NULL THEN
                IF p_purge THEN
                    PERFORM awa.forget(r.ids, r.keys);
                ELSE
                    PERFORM awa.conclude(r.ids, array_fill(v_outcome, ARRAY[cardinality(r.ids)]), r.jobs, r.keys);
                END IF;
                v_found := v_found + cardinality(r.ids);
                IF v_place <= 11 THEN
                    waiting := cardinality(r.ids);
                ELSE
                    ended := cardinality(r.ids);
                END IF;
            END IF;
            v_looked := v_looked + r.looked;
            happened := 'more';
            IF r.looked < p_limit THEN
                v_place := v_place + 1;
                v_id := NULL; v_xid := NULL; v_hi := NULL; v_at := NULL;
                IF v_place > (CASE WHEN p_purge THEN 13 ELSE 11 END) THEN
                    happened := CASE WHEN v_found > 0 THEN 'more' WHEN v_held THEN 'busy' ELSE 'done' END;
                    v_place := 0; v_low := v_next_low; v_next_low := pg_snapshot_xmin(pg_current_snapshot());
                    v_found := 0; v_held := false;
                    EXIT;
                END IF;
            END IF;
            EXIT WHEN r.ids IS NOT NULL OR v_looked >= 10 * p_limit;
        END LOOP;
        go_on := jsonb_build_object('until', v_until, 'low', v_low::text, 'next_low', v_next_low::text, 'place', v_place,
                                    'found', v_found, 'held', v_held, 'id', v_id, 'xid', v_xid::text, 'hi', v_hi::text,
                                    'at', v_at);
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        happened := 'busy';      -- nothing of this step has happened
        waiting := 0;
        ended := 0;
    END;
END $$;

CREATE FUNCTION awa.complete_v1(p_runtime bigint, p_claim bigint, p_slot smallint, p_nonce integer, p_idx smallint, p_elapsed integer) RETURNS bigint
    LANGUAGE sql
    AS $$
    SELECT awa.complete_v2(p_runtime, p_claim, p_slot, p_nonce, p_idx, p_elapsed)
$$;

CREATE FUNCTION awa.complete_v2(p_runtime bigint, p_claim bigint, p_slot smallint, p_nonce integer, p_idx smallint, p_elapsed integer, p_result json DEFAULT NULL::json, p_notify boolean DEFAULT true) RETURNS bigint
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $_$
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
END $_$;

CREATE FUNCTION awa.completed_entry(p_slot smallint, p_lane smallint, p_xid xid8, p_entry bigint, p_from pg_snapshot, p_to pg_snapshot, p_last_xid xid8, p_last_entry bigint, p_has_ends smallint[], p_open bigint[]) RETURNS TABLE(is_completed boolean)
    LANGUAGE sql STABLE ROWS 1
    AS $$
    SELECT coalesce(CASE WHEN p_slot = ANY (p_has_ends)
                         THEN (SELECT e.outcome = 'completed' FROM awa.attempt_ends e
                                WHERE e.slot = p_slot AND e.entry_id = p_entry) END,
                    (p_lane = 0 OR pg_visible_in_snapshot(p_xid, p_from)
                     OR pg_visible_in_snapshot(p_xid, p_to) AND (p_xid, p_entry) <= (p_last_xid, p_last_entry))
                    AND (p_entry = ANY (p_open)) IS NOT TRUE,
                    false)
$$;

CREATE FUNCTION awa.completed_of_claim(p_slot smallint, p_claim bigint) RETURNS TABLE(n bigint)
    LANGUAGE sql STABLE ROWS 1
    AS $$
    SELECT coalesce(sum(cardinality(x.idx)), 0)
           + (SELECT count(*) FROM awa.attempt_ends e
               WHERE e.slot = p_slot AND e.claim_id = p_claim AND e.outcome = 'completed')
      FROM awa.completions x
     WHERE x.slot = p_slot AND x.claim_id = p_claim
$$;

CREATE FUNCTION awa.conclude(p_ids bigint[], p_outcomes text[], p_jobs json[], p_keys bytea[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
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
    PERFORM awa.release_grants(p_ids);
    PERFORM awa.wake_waiters(p_ids);
END $$;

CREATE FUNCTION awa.cut_wait_key() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    NEW.wait_key := left(NEW.wait_key, 201);
    RETURN NEW;
END $$;

CREATE FUNCTION awa.declare_queue_v1(p_queue text, p_declared json) RETURNS text
    LANGUAGE plpgsql
    SET lock_timeout TO '50ms'
    AS $$
BEGIN
    PERFORM awa.check_queue(p_queue);
    IF p_declared IS NULL THEN
        RAISE EXCEPTION 'say which limits queue % has, {} for none', p_queue USING ERRCODE = '22004';
    END IF;
    IF EXISTS (SELECT FROM awa.queue_meta m WHERE m.queue = p_queue AND m.declared::jsonb = p_declared::jsonb) THEN
        RETURN 'nothing';
    END IF;
    PERFORM awa.limits_of(p_declared, NULL);
    IF NOT awa.lock_queue(p_queue, 1) THEN
        RETURN 'busy';
    END IF;
    INSERT INTO awa.queue_meta (queue) VALUES (p_queue) ON CONFLICT DO NOTHING;
    PERFORM awa.write_limits(p_queue, p_declared, (SELECT m.overrides FROM awa.queue_meta m WHERE m.queue = p_queue));
    UPDATE awa.queue_meta m SET declared_at = clock_timestamp() WHERE m.queue = p_queue;
    RETURN 'declared';
EXCEPTION WHEN lock_not_available THEN
    RETURN 'busy';
END $$;

CREATE FUNCTION awa.dependents_v1(p_after bigint, p_limit integer, p_parents integer) RETURNS TABLE(seq bigint, id bigint, parents bigint[])
    LANGUAGE sql STABLE
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET jit TO 'off'
    AS $$
    SELECT t.seq, t.id, t.parents
      FROM (SELECT w.seq, w.id, w.parents,
                   sum(cardinality(w.parents)) OVER (ORDER BY w.seq) - cardinality(w.parents) AS before
              FROM (SELECT w.seq, w.id, coalesce(w.parents, '{}') AS parents
                      FROM awa.waiting_jobs w
                     WHERE w.waits_for = 'parent' AND w.seq > p_after
                     ORDER BY w.seq LIMIT p_limit) w) t
     WHERE t.before < p_parents
     ORDER BY t.seq
$$;

CREATE FUNCTION awa.end_attempts(p_runtime bigint, p_flush bigint, p_claims bigint[], p_slots smallint[], p_nonces integer[], p_idx smallint[], p_outcomes text[], p_delays double precision[], p_elapsed integer[], p_errors text[]) RETURNS integer[]
    LANGUAGE plpgsql
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

CREATE SEQUENCE awa.entry_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

CREATE SEQUENCE awa.ring_seq
    START WITH 0
    INCREMENT BY 1
    MINVALUE 0
    MAXVALUE 7
    CACHE 1;

CREATE TABLE awa.jobs (
    xid xid8 DEFAULT pg_current_xact_id() NOT NULL,
    entry_id bigint DEFAULT nextval('awa.entry_id_seq'::regclass) NOT NULL,
    id bigint DEFAULT currval('awa.entry_id_seq'::regclass) NOT NULL,
    available_at timestamp with time zone DEFAULT now() NOT NULL,
    created_at timestamp with time zone,
    slot smallint DEFAULT (pg_sequence_last_value('awa.ring_seq'::regclass))::smallint NOT NULL,
    lane smallint DEFAULT 5 NOT NULL,
    priority smallint DEFAULT 2 NOT NULL,
    attempt smallint DEFAULT 1 NOT NULL,
    max_attempts smallint DEFAULT 25 NOT NULL,
    timeout_ms integer,
    queue text DEFAULT 'default'::text NOT NULL COLLATE pg_catalog."C",
    kind text NOT NULL COLLATE pg_catalog."C",
    args json DEFAULT '{}'::json NOT NULL,
    metadata json,
    tags text[] COLLATE pg_catalog."C",
    concurrency_key text COLLATE pg_catalog."C",
    ordering_key text COLLATE pg_catalog."C",
    unique_key bytea,
    expires_at timestamp with time zone,
    follow_ups json,
    history json
)
PARTITION BY LIST (slot);

CREATE FUNCTION awa.end_unclaimed(p_queue text, p_slot smallint, p_lane smallint, p_xid xid8, p_entry bigint, p_outcome text, p_error json) RETURNS SETOF awa.jobs
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
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

CREATE FUNCTION awa.ended_among(p_slots smallint[], p_entries bigint[]) RETURNS bigint[]
    LANGUAGE plpgsql STABLE
    AS $$
DECLARE
    v_left smallint[] := p_slots;
BEGIN
    WHILE cardinality(v_left) > 0 LOOP      -- nearly always once: most claims lie in one slot
        IF EXISTS (SELECT FROM awa.attempt_ends t WHERE t.slot = v_left[1] AND t.claim_id IS NULL) THEN
            RETURN ARRAY(SELECT e.entry_id FROM unnest(p_slots, p_entries) AS e(slot, entry_id)
                          WHERE EXISTS (SELECT FROM awa.attempt_ends t
                                         WHERE t.slot = e.slot AND t.entry_id = e.entry_id OFFSET 0));
        END IF;
        v_left := array_remove(v_left, v_left[1]);
    END LOOP;
    RETURN '{}';
END $$;

CREATE FUNCTION awa.enqueue_many_v1(p_queues text[], p_priorities smallint[], p_kinds text[], p_args text[], p_max_attempts smallint[], p_timeouts integer[], p_tags text[], p_metadata text[], p_run_ats text[], p_delays double precision[], p_keys bytea[], p_on_conflict text[], p_follow_ups text[], p_parents text[], p_on_parent_failure text[], p_notify boolean DEFAULT true) RETURNS TABLE(n integer, id bigint, is_new boolean, problem text)
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    SELECT n, id, is_new, problem
      FROM awa.enqueue_many_v2(p_queues, p_priorities, p_kinds, p_args, p_max_attempts, p_timeouts, p_tags, p_metadata,
                               p_run_ats, p_delays, p_keys, p_on_conflict, p_follow_ups, p_parents,
                               p_on_parent_failure, NULL, NULL, NULL, p_notify)
$$;

CREATE FUNCTION awa.enqueue_many_v2(p_queues text[], p_priorities smallint[], p_kinds text[], p_args text[], p_max_attempts smallint[], p_timeouts integer[], p_tags text[], p_metadata text[], p_run_ats text[], p_delays double precision[], p_keys bytea[], p_on_conflict text[], p_follow_ups text[], p_parents text[], p_on_parent_failure text[], p_concurrency_keys text[], p_ordering_keys text[], p_expires_ats text[], p_notify boolean DEFAULT true) RETURNS TABLE(n integer, id bigint, is_new boolean, problem text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    v_slot smallint := pg_sequence_last_value('awa.ring_seq');
    v_ids bigint[];
    v_run_ats timestamptz[];                -- NULL: now
    v_holders bigint[];                     -- by position; the job's own id when it is written
    v_rows awa.job_uniques[];
    v_bells text[];
    v_parents bigint[];
    v_is_refused boolean;
    t record;
    r record;
BEGIN
    SELECT array_agg(DISTINCT p) INTO v_parents
      FROM unnest(p_parents) WITH ORDINALITY AS i(parents, n) CROSS JOIN LATERAL unnest(i.parents::bigint[]) p;
    IF v_parents IS NOT NULL THEN
        v_parents := awa.unknown_among(v_parents);
        IF cardinality(v_parents) > 0 THEN
            RETURN QUERY SELECT i.n::integer, p, false, 'no_parent'
                           FROM unnest(p_parents) WITH ORDINALITY AS i(parents, n)
                          CROSS JOIN LATERAL unnest(i.parents::bigint[]) p
                          WHERE p = ANY (v_parents) ORDER BY 1, 2;
            RETURN;
        END IF;
    END IF;

    SELECT array_agg(i.id ORDER BY i.n), array_agg(i.run_at ORDER BY i.n) INTO v_ids, v_run_ats
      FROM (SELECT i.n, nextval('awa.entry_id_seq') AS id,
                   CASE WHEN i.run_at > clock_timestamp() THEN i.run_at END AS run_at
              FROM (SELECT i.n, coalesce(i.run_at::timestamptz, clock_timestamp() + i.delay * interval '1 s') AS run_at
                      FROM unnest(p_run_ats, p_delays) WITH ORDINALITY AS i(run_at, delay, n) ORDER BY i.n) i) i;
    v_holders := v_ids;

    SELECT array_agg(ROW(k.key, v_ids[k.n], awa.states_of(p_keys[k.n]), k.slot,
                         CASE WHEN k.slot IS NOT NULL THEN 2 * p_priorities[k.n] + 1 END,
                         CASE WHEN k.slot IS NOT NULL THEN pg_current_xact_id() END,
                         CASE WHEN k.slot IS NOT NULL THEN v_ids[k.n] END,
                         CASE WHEN k.slot IS NOT NULL THEN p_queues[k.n] END)::awa.job_uniques ORDER BY k.key)
      INTO v_rows
      FROM (SELECT DISTINCT ON (1) substr(i.key, 1, 16) AS key, i.n,
                   CASE WHEN v_run_ats[i.n] IS NULL AND p_parents[i.n] IS NULL THEN v_slot END AS slot
              FROM unnest(p_keys) WITH ORDINALITY AS i(key, n) WHERE i.key IS NOT NULL ORDER BY 1, i.n) k;
    IF v_rows IS NOT NULL THEN
        -- per key: whether any job that wants it refuses to find it taken
        t := awa.take_all_keys(v_rows, ARRAY(
                 SELECT coalesce(bool_or(i.mode = 'raise'), false)
                   FROM unnest(p_keys, p_on_conflict) AS i(key, mode)
                  WHERE i.key IS NOT NULL GROUP BY substr(i.key, 1, 16) ORDER BY substr(i.key, 1, 16)));
        SELECT array_agg(coalesce(h.holder, i.id) ORDER BY i.n) INTO v_holders
          FROM unnest(v_ids, p_keys) WITH ORDINALITY AS i(id, key, n)
          LEFT JOIN unnest(v_rows, t.holders) AS h(key, id, states, slot, lane, xid, entry_id, queue, holder)
                 ON h.key = substr(i.key, 1, 16);
    END IF;
    RETURN QUERY SELECT i.n::integer, CASE WHEN i.holder <> ALL (v_ids) THEN i.holder END, false, 'conflict'
                   FROM unnest(v_holders, v_ids, p_on_conflict) WITH ORDINALITY AS i(holder, id, mode, n)
                  WHERE i.holder <> i.id AND i.mode = 'raise' ORDER BY i.n;
    v_is_refused := FOUND;
    IF NOT v_is_refused AND v_parents IS NOT NULL THEN
        RETURN QUERY SELECT i.n::integer, i.holder, false, 'circle'
                       FROM unnest(v_holders, v_ids, p_on_conflict, p_parents) WITH ORDINALITY
                            AS i(holder, id, mode, parents, n)
                      WHERE i.holder <> i.id AND i.mode = 'replace' AND awa.is_circle(i.holder, i.parents::bigint[])
                      ORDER BY i.n;
        v_is_refused := FOUND;
    END IF;
    IF v_is_refused THEN
        IF t.is_taken THEN        -- nothing was given back
            DELETE FROM awa.job_uniques u
             WHERE u.id = ANY (v_ids) AND u.key = ANY (ARRAY(SELECT k.key FROM unnest(v_rows) k));
        END IF;
        RETURN;
    END IF;

    WITH input AS MATERIALIZED (
        SELECT i.n, i.id, i.queue, i.priority, i.kind, i.args::json AS args, i.max_attempts, i.timeout_ms,
               CASE WHEN i.tags IS NOT NULL THEN ARRAY(SELECT json_array_elements_text(i.tags::json)) END AS tags,
               i.metadata::json AS metadata, i.run_at, i.key, i.follow_ups::json AS follow_ups,
               i.parents::bigint[] AS parents, i.on_parent_failure, i.concurrency_key, i.ordering_key,
               i.expires_at::timestamptz AS expires_at, i.run_at IS NULL AND i.parents IS NULL AS is_due
          FROM (SELECT * FROM unnest(v_ids, v_holders, v_run_ats, p_queues, p_priorities, p_kinds, p_args, p_max_attempts,
                                     p_timeouts, p_tags, p_metadata, p_keys, p_follow_ups, p_parents,
                                     p_on_parent_failure, p_concurrency_keys, p_ordering_keys, p_expires_ats)
                              WITH ORDINALITY
                         AS i(id, holder, run_at, queue, priority, kind, args, max_attempts, timeout_ms, tags, metadata,
                              key, follow_ups, parents, on_parent_failure, concurrency_key, ordering_key, expires_at, n)
                 WHERE i.holder = i.id ORDER BY i.n) i
    ), available AS (
        INSERT INTO awa.jobs (entry_id, id, slot, queue, lane, priority, kind, args, max_attempts, timeout_ms, tags,
                              metadata, unique_key, follow_ups, concurrency_key, ordering_key, expires_at)
        SELECT i.id, i.id, v_slot, i.queue, 2 * i.priority + 1, i.priority, i.kind, i.args, i.max_attempts, i.timeout_ms,
               i.tags, i.metadata, i.key, i.follow_ups, i.concurrency_key, i.ordering_key, i.expires_at
          FROM input i WHERE i.is_due ORDER BY i.n
    ), waiting AS (
        INSERT INTO awa.waiting_jobs (id, run_at, waits_for, queue, priority, kind, args, max_attempts, timeout_ms, tags,
                                      metadata, unique_key, follow_ups, parents, on_parent_failure, concurrency_key,
                                      ordering_key, expires_at)
        SELECT i.id, i.run_at, CASE WHEN i.parents IS NULL THEN 'time' ELSE 'parent' END, i.queue, i.priority, i.kind,
               i.args, i.max_attempts, i.timeout_ms, i.tags, i.metadata, i.key, i.follow_ups, i.parents,
               i.on_parent_failure, i.concurrency_key, i.ordering_key, i.expires_at
          FROM input i WHERE NOT i.is_due
    )
    SELECT array_agg(DISTINCT CASE WHEN i.is_due THEN i.queue ELSE '' END) INTO v_bells
      FROM input i WHERE i.is_due OR i.parents IS NOT NULL OR i.run_at < clock_timestamp() + interval '1.5 s';
    IF p_notify AND v_bells IS NOT NULL THEN
        PERFORM awa.ring(v_bells);
    END IF;

    IF 'replace' = ANY (p_on_conflict) THEN
        FOR r IN SELECT i.n FROM unnest(v_ids, v_holders, p_keys, p_on_conflict) WITH ORDINALITY
                                 AS i(id, holder, key, mode, n)
                  WHERE i.mode = 'replace' AND i.holder <> i.id ORDER BY i.key, i.n
        LOOP
            PERFORM awa.replace_waiting_v2(
                v_holders[r.n], p_queues[r.n], p_priorities[r.n], p_kinds[r.n], p_args[r.n]::json, p_max_attempts[r.n],
                p_timeouts[r.n],
                CASE WHEN p_tags[r.n] IS NOT NULL
                     THEN ARRAY(SELECT json_array_elements_text(p_tags[r.n]::json)) END,
                p_metadata[r.n]::json, v_run_ats[r.n], p_follow_ups[r.n]::json, p_parents[r.n]::bigint[],
                p_on_parent_failure[r.n], p_concurrency_keys[r.n], p_ordering_keys[r.n],
                p_expires_ats[r.n]::timestamptz, p_notify);
        END LOOP;
    END IF;
    RETURN QUERY SELECT i.n::integer, i.holder, i.holder = i.id, NULL::text
                   FROM unnest(v_ids, v_holders) WITH ORDINALITY AS i(id, holder, n) ORDER BY i.n;
END $$;

CREATE FUNCTION awa.enqueue_v1(p_kind text, p_args json DEFAULT '{}'::json, p_queue text DEFAULT 'default'::text, p_priority integer DEFAULT 2, p_max_attempts integer DEFAULT 25, p_timeout_ms integer DEFAULT NULL::integer, p_run_at timestamp with time zone DEFAULT NULL::timestamp with time zone, p_delay interval DEFAULT NULL::interval, p_tags text[] DEFAULT NULL::text[], p_metadata json DEFAULT NULL::json, p_unique_key bytea DEFAULT NULL::bytea, p_unique_states text[] DEFAULT NULL::text[], p_on_conflict text DEFAULT 'return'::text, p_follow_ups json DEFAULT NULL::json, p_after bigint[] DEFAULT NULL::bigint[], p_on_parent_failure text DEFAULT NULL::text, p_notify boolean DEFAULT true, OUT id bigint, OUT is_new boolean) RETURNS record
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    SELECT id, is_new
      FROM awa.enqueue_v2(p_kind, p_args, p_queue, p_priority, p_max_attempts, p_timeout_ms, p_run_at, p_delay, p_tags,
                          p_metadata, p_unique_key, p_unique_states, p_on_conflict, p_follow_ups, p_after,
                          p_on_parent_failure, p_notify => p_notify)
$$;

CREATE FUNCTION awa.enqueue_v2(p_kind text, p_args json DEFAULT '{}'::json, p_queue text DEFAULT 'default'::text, p_priority integer DEFAULT 2, p_max_attempts integer DEFAULT 25, p_timeout_ms integer DEFAULT NULL::integer, p_run_at timestamp with time zone DEFAULT NULL::timestamp with time zone, p_delay interval DEFAULT NULL::interval, p_tags text[] DEFAULT NULL::text[], p_metadata json DEFAULT NULL::json, p_unique_key bytea DEFAULT NULL::bytea, p_unique_states text[] DEFAULT NULL::text[], p_on_conflict text DEFAULT 'return'::text, p_follow_ups json DEFAULT NULL::json, p_after bigint[] DEFAULT NULL::bigint[], p_on_parent_failure text DEFAULT NULL::text, p_concurrency_key text DEFAULT NULL::text, p_ordering_key text DEFAULT NULL::text, p_expires_at timestamp with time zone DEFAULT NULL::timestamp with time zone, p_notify boolean DEFAULT true, OUT id bigint, OUT is_new boolean) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    v_id bigint;
    v_states smallint := 63;
    v_key bytea := p_unique_key;
    v_run_at timestamptz := coalesce(p_run_at, clock_timestamp() + p_delay);
    v_slot smallint;
    v_bad text;
    v_unknown bigint[];
    v_bell bigint;
    v_is_still boolean;
BEGIN
    -- the usual case first: to go through all of it takes a tenth of the whole
    IF (length(p_kind) BETWEEN 1 AND 200 AND length(p_queue) BETWEEN 1 AND 200 AND p_args IS NOT NULL
        AND p_priority BETWEEN 1 AND 4 AND p_max_attempts BETWEEN 1 AND 1000
        AND (p_unique_key IS NULL OR octet_length(p_unique_key) = 16) AND p_on_conflict = 'return'
        AND p_timeout_ms IS NULL AND p_run_at IS NULL AND p_delay IS NULL AND p_tags IS NULL AND p_metadata IS NULL
        AND p_unique_states IS NULL AND p_follow_ups IS NULL AND p_after IS NULL
        AND p_on_parent_failure IS NULL AND p_concurrency_key IS NULL AND p_ordering_key IS NULL
        AND p_expires_at IS NULL) IS NOT TRUE THEN
        v_bad := CASE
            WHEN p_kind IS NULL OR length(p_kind) NOT BETWEEN 1 AND 200 THEN
                format('p_kind has 1 to 200 characters, not %s', coalesce(length(p_kind)::text, 'NULL'))
            WHEN p_queue IS NULL OR length(p_queue) NOT BETWEEN 1 AND 200 THEN
                format('p_queue has 1 to 200 characters, not %s', coalesce(length(p_queue)::text, 'NULL'))
            WHEN p_args IS NULL THEN 'p_args is NULL: give a JSON object, ''{}'' when the job has no arguments'
            WHEN p_priority IS NULL OR p_priority NOT BETWEEN 1 AND 4 THEN
                format('p_priority is 1, which runs first, to 4, not %s', coalesce(p_priority::text, 'NULL'))
            WHEN p_max_attempts IS NULL OR p_max_attempts NOT BETWEEN 1 AND 1000 THEN
                format('p_max_attempts is 1 to 1000, not %s', coalesce(p_max_attempts::text, 'NULL'))
            WHEN p_timeout_ms < 0 THEN format('p_timeout_ms is 0, which means no limit, or more, not %s', p_timeout_ms)
            WHEN p_run_at IS NOT NULL AND p_delay IS NOT NULL THEN 'p_run_at and p_delay exclude each other: give one'
            WHEN p_run_at IS NOT NULL
                 AND (NOT isfinite(p_run_at) OR p_run_at < '1970-01-01Z' OR p_run_at >= '10000-01-01Z') THEN
                format('p_run_at is within the years 1970 to 9999, not %s', p_run_at)
            WHEN p_delay IS NOT NULL AND NOT (p_delay >= '0' AND p_delay <= '3650 days') THEN
                format('p_delay is from 0 to 3650 days, not %s', p_delay)
            WHEN cardinality(p_tags) > 20 THEN format('p_tags has at most 20 tags, not %s', cardinality(p_tags))
            WHEN p_metadata IS NOT NULL AND json_typeof(p_metadata) <> 'object' THEN
                format('p_metadata is a JSON object, not a JSON %s', json_typeof(p_metadata))
            WHEN p_follow_ups IS NOT NULL AND json_typeof(p_follow_ups) <> 'object' THEN
                format('p_follow_ups is a JSON object, not a JSON %s', json_typeof(p_follow_ups))
            WHEN octet_length(p_unique_key) <> 16 THEN
                format('p_unique_key has 16 bytes, not %s: take those of a hash', octet_length(p_unique_key))
            WHEN p_on_conflict IS NULL OR p_on_conflict NOT IN ('return', 'raise', 'replace') THEN
                format('p_on_conflict is return, raise or replace, not %s', coalesce(p_on_conflict, 'NULL'))
            WHEN p_unique_states IS NOT NULL AND p_unique_key IS NULL THEN
                'p_unique_states is for jobs with p_unique_key: give both or none'
            WHEN length(p_concurrency_key) NOT BETWEEN 1 AND 200 THEN
                format('p_concurrency_key has 1 to 200 characters, or is NULL for a job that shares nothing, not %s',
                       length(p_concurrency_key))
            WHEN length(p_ordering_key) NOT BETWEEN 1 AND 200 THEN
                format('p_ordering_key has 1 to 200 characters, or is NULL for a job that shares nothing, not %s',
                       length(p_ordering_key))
            WHEN NOT isfinite(p_expires_at) OR p_expires_at < '1970-01-01Z' OR p_expires_at >= '10000-01-01Z' THEN
                format('p_expires_at is within the years 1970 to 9999, not %s', p_expires_at)
            WHEN p_expires_at <= p_run_at THEN
                format('p_expires_at comes after p_run_at, or the job never runs: %s is not after %s', p_expires_at,
                       p_run_at)
            WHEN p_after IS NOT NULL AND (cardinality(p_after) = 0 OR array_position(p_after, NULL) IS NOT NULL) THEN
                'p_after is the ids of one or more jobs: leave it out, or NULL, when the job waits for none'
            WHEN p_on_parent_failure IS NOT NULL AND p_on_parent_failure NOT IN ('cancel', 'run', 'discard') THEN
                format('p_on_parent_failure is cancel, run or discard, not %s', p_on_parent_failure)
            WHEN p_on_parent_failure IS NOT NULL AND p_after IS NULL THEN
                'p_on_parent_failure is for jobs with p_after: give both or none'
        END;
        IF v_bad IS NULL AND p_tags IS NOT NULL
           AND EXISTS (SELECT FROM unnest(p_tags) tag WHERE (length(tag) BETWEEN 1 AND 200) IS NOT TRUE) THEN
            v_bad := 'p_tags has tags of 1 to 200 characters each';
        END IF;
        IF v_bad IS NOT NULL THEN
            RAISE EXCEPTION '%', v_bad USING ERRCODE = '22023';
        END IF;
    END IF;
    IF p_after IS NOT NULL THEN
        v_unknown := awa.unknown_among(p_after);
        IF cardinality(v_unknown) > 0 THEN
            RAISE EXCEPTION 'no job has the id %, or its history is gone: p_after names jobs that exist', v_unknown[1]
                  USING ERRCODE = 'P0002';
        END IF;
    END IF;

    v_id := nextval('awa.entry_id_seq');
    IF v_run_at <= clock_timestamp() THEN
        v_run_at := NULL;
    END IF;
    v_slot := CASE WHEN v_run_at IS NULL AND p_after IS NULL THEN pg_sequence_last_value('awa.ring_seq') END;
    id := v_id;
    IF v_key IS NOT NULL THEN
        IF p_unique_states IS NOT NULL THEN
            SELECT bit_or(awa.state_bit(state)),
                   min(format('p_unique_states has %L, which is no state of a job', state))
                   FILTER (WHERE awa.state_bit(state) IS NULL)
              INTO v_states, v_bad FROM unnest(p_unique_states) state;
            IF v_bad IS NOT NULL OR coalesce(v_states & 2, 0) = 0 THEN
                RAISE EXCEPTION '%', coalesce(v_bad, 'p_unique_states must have available: a key that no waiting job'
                                                     ' holds keeps nobody out') USING ERRCODE = '22023';
            END IF;
            v_key := CASE v_states WHEN 63 THEN v_key ELSE v_key || set_byte('\x00', 0, v_states) END;
        END IF;
        -- it is free, most of the time
        INSERT INTO awa.job_uniques (key, id, states, slot, lane, xid, entry_id, queue)
        VALUES (p_unique_key, v_id, v_states, v_slot, CASE WHEN v_slot IS NOT NULL THEN 2 * p_priority + 1 END,
                CASE WHEN v_slot IS NOT NULL THEN pg_current_xact_id() END,
                CASE WHEN v_slot IS NOT NULL THEN v_id END, CASE WHEN v_slot IS NOT NULL THEN p_queue END)
            ON CONFLICT (key) DO NOTHING;
        IF NOT FOUND THEN
            SELECT holders[1] INTO id
              FROM awa.take_all_keys(ARRAY[ROW(p_unique_key, v_id, v_states, v_slot,
                                               CASE WHEN v_slot IS NOT NULL THEN 2 * p_priority + 1 END,
                                               CASE WHEN v_slot IS NOT NULL THEN pg_current_xact_id() END,
                                               CASE WHEN v_slot IS NOT NULL THEN v_id END,
                                               CASE WHEN v_slot IS NOT NULL THEN p_queue END)::awa.job_uniques],
                                     ARRAY[false]);
        END IF;
    END IF;
    is_new := id = v_id;
    IF NOT is_new THEN
        IF p_on_conflict = 'raise' THEN
            RAISE EXCEPTION 'job % has the unique key %', id, encode(p_unique_key, 'hex')
                  USING ERRCODE = 'AWA05', DETAIL = id::text;
        ELSIF p_on_conflict = 'replace' THEN
            IF p_after IS NOT NULL AND awa.is_circle(id, p_after) THEN
                RAISE EXCEPTION 'job % has the unique key, and would wait for itself: leave it, and what runs after it, '
                                'out of p_after', id USING ERRCODE = '22023';
            END IF;
            PERFORM awa.replace_waiting_v2(id, p_queue, p_priority::smallint, p_kind, p_args, p_max_attempts::smallint,
                                           p_timeout_ms, p_tags, p_metadata, v_run_at, p_follow_ups, p_after,
                                           p_on_parent_failure, p_concurrency_key, p_ordering_key, p_expires_at,
                                           p_notify);
        END IF;
        RETURN;
    END IF;
    IF v_slot IS NOT NULL THEN
        INSERT INTO awa.jobs (entry_id, id, slot, queue, lane, priority, kind, args, max_attempts, timeout_ms, tags,
                              metadata, unique_key, follow_ups, concurrency_key, ordering_key, expires_at)
        VALUES (v_id, v_id, v_slot, p_queue, 2 * p_priority + 1, p_priority, p_kind, p_args, p_max_attempts, p_timeout_ms,
                p_tags, p_metadata, v_key, p_follow_ups, p_concurrency_key, p_ordering_key, p_expires_at);
    ELSE
        INSERT INTO awa.waiting_jobs (id, run_at, waits_for, queue, priority, kind, args, max_attempts, timeout_ms, tags,
                                      metadata, unique_key, follow_ups, parents, on_parent_failure, concurrency_key,
                                      ordering_key, expires_at)
        VALUES (v_id, v_run_at, CASE WHEN p_after IS NULL THEN 'time' ELSE 'parent' END, p_queue, p_priority, p_kind,
                p_args, p_max_attempts, p_timeout_ms, p_tags, p_metadata, v_key, p_follow_ups, p_after,
                p_on_parent_failure, p_concurrency_key, p_ordering_key, p_expires_at);
    END IF;
    IF p_notify AND v_slot IS NOT NULL THEN
        -- as awa.ring does; written out, which is a tenth of the whole
        v_bell := hashtextextended('awa.bell:' || p_queue, 0);
        v_is_still := pg_try_advisory_lock_shared(v_bell);
        IF v_is_still THEN
            v_is_still := pg_advisory_unlock_shared(v_bell);
        ELSE
            PERFORM pg_notify(awa.channel(), p_queue);
        END IF;
    ELSIF p_notify AND (p_after IS NOT NULL OR v_run_at < clock_timestamp() + interval '1.5 s') THEN
        PERFORM awa.ring(ARRAY['']);
    END IF;
END $$;

CREATE FUNCTION awa.error_of(p_ended json) RETURNS json
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT CASE WHEN coalesce(p_ended->>'type', p_ended->>'text') IS NOT NULL
                THEN json_build_object('type', p_ended->'type', 'text', p_ended->'text',
                                       'traceback', p_ended->'traceback') END
$$;

CREATE FUNCTION awa.expire_v1(p_runtime bigint, p_behind double precision, p_limit integer, p_skip integer DEFAULT 0, OUT ended integer, OUT blocked integer) RETURNS record
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    SET lock_timeout TO '20ms'
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

CREATE FUNCTION awa.expire_waiting_v1(p_limit integer) RETURNS integer
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v_now timestamptz := clock_timestamp();    -- a value, which bounds the scan; a call would only filter it
    v_ids bigint[];
    v_outcomes text[];
    v_jobs json[];
    v_keys bytea[];
BEGIN
    WITH expired AS MATERIALIZED (
        SELECT w.id FROM awa.waiting_jobs w
         WHERE w.expires_at <= v_now AND w.state IN ('scheduled', 'retryable', 'available')
         ORDER BY w.expires_at LIMIT p_limit
           FOR UPDATE SKIP LOCKED
    ), taken AS (
        -- by array: as a join it may be planned as a walk over the whole table
        DELETE FROM awa.waiting_jobs w WHERE w.id = ANY (ARRAY(SELECT e.id FROM expired e)) RETURNING w.*
    ), judged AS MATERIALIZED (
        SELECT t.*, f.jobs, f.flaw
          FROM taken t LEFT JOIN LATERAL awa.follow_ups_after(t.follow_ups, 'cancelled') f ON true
    ), ended AS (
        INSERT INTO awa.ended_jobs (id, created_at, state, priority, attempt, max_attempts, timeout_ms, queue, kind,
                                    args, metadata, tags, concurrency_key, ordering_key, unique_key, follow_ups,
                                    history)
        SELECT t.id, t.created_at, 'cancelled', t.priority, t.attempt, t.max_attempts, t.timeout_ms, t.queue, t.kind,
               t.args, t.metadata, t.tags, t.concurrency_key, t.ordering_key, t.unique_key, t.follow_ups,
               awa.add_history(t.history, t.attempt, 'cancelled', v_now, NULL, NULL,
                               awa.expiry_error(t.expires_at, t.flaw))
          FROM judged t
    )
    SELECT array_agg(j.id ORDER BY j.id), array_agg('cancelled'::text ORDER BY j.id), array_agg(j.jobs ORDER BY j.id),
           array_agg(j.unique_key ORDER BY j.id)
      INTO v_ids, v_outcomes, v_jobs, v_keys FROM judged j;
    IF v_ids IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM awa.conclude(v_ids, v_outcomes, v_jobs, v_keys);
    RETURN cardinality(v_ids);
END $$;

CREATE FUNCTION awa.expiry_error(p_expires_at timestamp with time zone, p_flaw text) RETURNS json
    LANGUAGE sql STABLE
    AS $$
    SELECT awa.with_flaw(json_build_object(
        'type', 'Expired', 'traceback', '', 'text',
        format('it expired at %s', to_char(p_expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS"Z"'))), p_flaw)
$$;

CREATE FUNCTION awa.fence_v1(p_runtime bigint, p_silent double precision) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION awa.fetch_args_v1(p_runtime bigint, p_claim bigint, p_slot smallint, p_idx smallint[]) RETURNS TABLE(idx smallint, args text)
    LANGUAGE sql STABLE
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
    SELECT i, j.args::text
      FROM awa.claims c
     CROSS JOIN unnest(p_idx) i
     CROSS JOIN LATERAL (SELECT j.args FROM awa.jobs j
                          WHERE j.slot = c.slot AND j.queue = c.queue AND j.lane = c.lane
                            AND j.xid = c.xids[i] AND j.entry_id = c.entry_ids[i] LIMIT 1) j
     WHERE c.slot = p_slot AND c.runtime = p_runtime AND c.claim_id = p_claim
$$;

CREATE FUNCTION awa.find_job_v1(p_id bigint) RETURNS TABLE(id bigint, queue text, kind text, state text, priority smallint, attempt smallint, max_attempts smallint, args json, metadata json, tags text[], created_at timestamp with time zone, run_at timestamp with time zone, ended_at timestamp with time zone, waits_for text, history json)
    LANGUAGE sql STABLE
    AS $$
    SELECT f.id, f.queue, f.kind, f.state, f.priority, f.attempt, f.max_attempts, f.args, f.metadata, f.tags,
           f.created_at, f.run_at, f.ended_at, f.waits_for, f.history
      FROM awa.find_job_v2(p_id) f
$$;

CREATE FUNCTION awa.find_job_v2(p_id bigint) RETURNS TABLE(id bigint, queue text, kind text, state text, priority smallint, attempt smallint, max_attempts smallint, args json, metadata json, tags text[], created_at timestamp with time zone, run_at timestamp with time zone, claimed_at timestamp with time zone, ended_at timestamp with time zone, elapsed_ms integer, runtime bigint, hostname text, pid integer, waits_for text, error json, history json)
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    RETURN QUERY
        SELECT f.id, f.queue, f.kind, f.state, f.priority, f.attempt, f.max_attempts, f.args, f.metadata, f.tags,
               f.created_at, f.run_at, f.claimed_at, f.ended_at, f.elapsed_ms, f.runtime, f.hostname, f.pid,
               f.waits_for, f.error, f.history
          FROM awa.find_job_v3(p_id) f;
END $$;

CREATE FUNCTION awa.find_job_v3(p_id bigint) RETURNS TABLE(id bigint, queue text, kind text, state text, priority smallint, attempt smallint, max_attempts smallint, args json, metadata json, tags text[], created_at timestamp with time zone, run_at timestamp with time zone, claimed_at timestamp with time zone, ended_at timestamp with time zone, elapsed_ms integer, runtime bigint, hostname text, pid integer, waits_for text, error json, history json, concurrency_key text, ordering_key text, expires_at timestamp with time zone)
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET max_parallel_workers_per_gather TO '0'
    SET jit TO 'off'
    SET search_path TO 'pg_catalog', 'pg_temp'
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
           w.created_at, CASE WHEN isfinite(w.run_at) THEN w.run_at END, w.ended_at, w.waits_for, w.history, w.state,
           w.concurrency_key, w.ordering_key, w.expires_at
      INTO id, queue, kind, state, priority, attempt, max_attempts, args, metadata, tags,
           created_at, run_at, ended_at, waits_for, history, v_state,
           concurrency_key, ordering_key, expires_at
      FROM (SELECT t.id, t.queue, t.kind, t.state, t.priority, t.attempt, t.max_attempts, t.args, t.metadata, t.tags,
                   t.created_at, t.run_at, NULL::timestamptz AS ended_at, t.waits_for, t.history, t.concurrency_key,
                   t.ordering_key, t.expires_at
              FROM awa.waiting_jobs t WHERE t.id = p_id
             UNION ALL
            SELECT t.id, t.queue, t.kind, t.state, t.priority, t.attempt, t.max_attempts, t.args, t.metadata, t.tags,
                   t.created_at, NULL, t.ended_at, NULL, t.history, t.concurrency_key, t.ordering_key, NULL
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
            v_state := CASE WHEN e.outcome = 'completed' THEN e.outcome
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
            concurrency_key := j.concurrency_key; ordering_key := j.ordering_key; expires_at := j.expires_at;
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

CREATE FUNCTION awa.follow_up_rows(p_jobs json) RETURNS TABLE(n bigint, kind text, queue text, args json, priority smallint, max_attempts smallint, timeout_ms integer, tags text[], metadata json, run_at timestamp with time zone, delay double precision, follow_ups json)
    LANGUAGE sql STABLE
    AS $$
    SELECT x.n, x.kind, x.queue, x.args, x.priority, x.max_attempts, x.timeout_ms, x.tags, x.metadata, x.run_at,
           x.delay, x.follow_ups
      FROM ROWS FROM (json_to_recordset(p_jobs)
                      AS (kind text, queue text, args json, priority smallint, max_attempts smallint,
                          timeout_ms integer, tags text[], metadata json, run_at timestamptz,
                          delay double precision, follow_ups json))
           WITH ORDINALITY AS x(kind, queue, args, priority, max_attempts, timeout_ms, tags, metadata, run_at, delay,
                                follow_ups, n)
$$;

CREATE FUNCTION awa.follow_up_rows_v2(p_jobs json) RETURNS TABLE(n bigint, kind text, queue text, args json, priority smallint, max_attempts smallint, timeout_ms integer, tags text[], metadata json, run_at timestamp with time zone, delay double precision, follow_ups json, concurrency_key text, ordering_key text, expires_at timestamp with time zone)
    LANGUAGE sql STABLE
    AS $$
    SELECT x.n, x.kind, x.queue, x.args, x.priority, x.max_attempts, x.timeout_ms, x.tags, x.metadata, x.run_at,
           x.delay, x.follow_ups, x.concurrency_key, x.ordering_key, x.expires_at
      FROM ROWS FROM (json_to_recordset(p_jobs)
                      AS (kind text, queue text, args json, priority smallint, max_attempts smallint,
                          timeout_ms integer, tags text[], metadata json, run_at timestamptz,
                          delay double precision, follow_ups json, concurrency_key text, ordering_key text,
                          expires_at timestamptz))
           WITH ORDINALITY AS x(kind, queue, args, priority, max_attempts, timeout_ms, tags, metadata, run_at, delay,
                                follow_ups, concurrency_key, ordering_key, expires_at, n)
$$;

CREATE FUNCTION awa.follow_ups_after(p_follow_ups json, p_outcome text, OUT jobs json, OUT flaw text) RETURNS record
    LANGUAGE plpgsql STABLE
    AS $$
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
                             WHEN NOT isfinite(t.run_at) THEN 'has a run_at that never comes'
                             WHEN length(t.concurrency_key) NOT BETWEEN 1 AND 200
                             THEN 'has a concurrency_key of not 1 to 200 characters'
                             WHEN length(t.ordering_key) NOT BETWEEN 1 AND 200
                             THEN 'has an ordering_key of not 1 to 200 characters'
                             WHEN NOT isfinite(t.expires_at) THEN 'has an expires_at that never comes' END AS flaw
              FROM awa.follow_up_rows_v2(jobs) t) x
     WHERE x.flaw IS NOT NULL ORDER BY x.n LIMIT 1;
    IF flaw IS NOT NULL THEN
        jobs := NULL;
    END IF;
EXCEPTION WHEN OTHERS THEN
    jobs := NULL;
    flaw := format('%s cannot be read: %s', p_outcome, SQLERRM);
END $$;

CREATE FUNCTION awa.follows(p_follow_ups json) RETURNS bigint
    LANGUAGE plpgsql IMMUTABLE STRICT
    AS $$
BEGIN
    RETURN (p_follow_ups->>'of')::bigint;
EXCEPTION WHEN data_exception THEN
    RETURN NULL;
END $$;

CREATE FUNCTION awa.forget(p_ids bigint[], p_keys bytea[]) RETURNS void
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
BEGIN
    IF num_nonnulls(VARIADIC p_keys) > 0 THEN
        -- what somebody looks at is left to the sweep: a holder that is gone keeps nobody out
        DELETE FROM awa.job_uniques u
         WHERE u.key = ANY (ARRAY(
               SELECT t.key
                 FROM (SELECT p.id, substring(p.key FOR 16) AS key FROM unnest(p_ids, p_keys) AS p(id, key)
                        WHERE p.key IS NOT NULL ORDER BY 2) p
                CROSS JOIN LATERAL (SELECT t.key FROM awa.job_uniques t WHERE t.key = p.key AND t.id = p.id
                                       FOR UPDATE SKIP LOCKED) t));
    END IF;
    PERFORM awa.release_grants(p_ids);
    PERFORM awa.wake_waiters(p_ids);
END $$;

CREATE FUNCTION awa.frontier_of(p_queue text) RETURNS awa.lane_frontier[]
    LANGUAGE sql STABLE
    AS $$
    SELECT u.frontier
      FROM ((SELECT c.claim_id, c.frontier FROM awa.claims c WHERE c.queue = p_queue ORDER BY c.claim_id DESC LIMIT 1)
            UNION ALL
            SELECT t.claim_id, t.frontier FROM awa.frontiers t WHERE t.queue = p_queue) u
     ORDER BY u.claim_id DESC LIMIT 1
$$;

CREATE FUNCTION awa.hand_over(p_queue text, p_limit integer) RETURNS integer
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    c_looked CONSTANT integer := 200;
    c_of_one CONSTANT integer := 100;
    c_handed CONSTANT integer := 500;
    v_from bigint;
    r record;                    -- what is over
    t record;                    -- who comes next
BEGIN
    SELECT (a.lowest + random() * (b.highest - a.lowest))::bigint INTO v_from
      FROM (SELECT g.claim_id AS lowest FROM awa.grants g WHERE g.queue = p_queue ORDER BY g.claim_id LIMIT 1) a,
           (SELECT g.claim_id AS highest FROM awa.grants g WHERE g.queue = p_queue ORDER BY g.claim_id DESC LIMIT 1) b;
    SELECT array_agg(g.scope) AS scopes, array_agg(g.key) AS keys, array_agg(g.id) AS ids INTO r
      FROM ((SELECT * FROM awa.grants g WHERE g.queue = p_queue AND g.claim_id = 0
                AND (g.is_over OR g.scope = 'key' AND p_limit IS NULL) LIMIT c_looked)
            UNION ALL
            (SELECT * FROM awa.grants g WHERE g.queue = p_queue AND g.claim_id > greatest(v_from, 0)
              ORDER BY g.claim_id LIMIT c_looked)
            UNION ALL
            (SELECT * FROM awa.grants g WHERE g.queue = p_queue AND g.claim_id > 0 AND g.claim_id <= v_from
              ORDER BY g.claim_id LIMIT c_looked)) g
     -- as awa.is_over has it; the call costs more than all of this
     WHERE g.claim_id = 0 OR g.is_over
        OR EXISTS (SELECT FROM awa.completions x
                    WHERE x.slot = g.slot AND x.claim_id = g.claim_id AND g.idx = ANY (x.idx) OFFSET 0)
        OR EXISTS (SELECT FROM awa.attempt_ends e
                    WHERE e.slot = g.slot AND e.entry_id = g.entry_id
                      AND (g.scope = 'key' OR e.outcome IN ('completed', 'failed', 'cancelled')) OFFSET 0)
        OR g.granted_at < clock_timestamp() - interval '1 min'
           AND awa.is_over(ROW(g.queue, g.scope, g.key, g.id, g.claim_id, g.entry_id, g.slot, g.idx, g.is_over,
                               g.granted_at)::awa.grants, p_limit IS NOT NULL);
    IF r.ids IS NULL THEN
        RETURN 0;
    END IF;
    -- before the look at who waits: of what has a row, and comes to wait meanwhile, the row is not removed
    SELECT array_agg(g.scope) AS scopes, array_agg(g.key) AS keys, array_agg(g.id) AS ids INTO r
      FROM unnest(r.scopes, r.keys, r.ids) AS o(scope, key, id)
     CROSS JOIN LATERAL (SELECT * FROM awa.grants k
                          WHERE k.queue = p_queue AND k.scope = o.scope AND k.key = o.key AND k.id = o.id
                            FOR UPDATE SKIP LOCKED) g;
    IF r.ids IS NULL THEN
        RETURN 0;
    END IF;
    WITH free AS MATERIALIZED (
        SELECT o.scope, o.key,
               CASE o.scope WHEN 'order' THEN 1 ELSE coalesce(p_limit, 1000000) END + count(*)
               - (SELECT count(*) FROM awa.grants g WHERE g.queue = p_queue AND g.scope = o.scope AND g.key = o.key)
                   AS room
          FROM unnest(r.scopes, r.keys) AS o(scope, key)
         GROUP BY o.scope, o.key
    ), first AS MATERIALIZED (
        SELECT f.scope, f.key, f.room, w.id, w.seq, row_number() OVER () AS n
          FROM free f
         CROSS JOIN LATERAL (SELECT w.id, w.seq FROM awa.waiting_jobs w
                              WHERE w.queue = p_queue AND w.waits_for = f.scope AND w.waits_for IN ('key', 'order')
                                AND w.wait_key = f.key
                              ORDER BY w.seq LIMIT least(greatest(f.room, 0), c_of_one)) w
    ), held AS MATERIALIZED (
        SELECT w.id FROM awa.waiting_jobs w
         WHERE w.id = ANY (ARRAY(SELECT f.id FROM first f WHERE f.n <= c_handed))
           -- no use of an index on these; it may have been moved or replaced just now
           AND w.queue || '' = p_queue AND w.waits_for || '' IN ('key', 'order')
           FOR UPDATE SKIP LOCKED
    ), next AS MATERIALIZED (
        SELECT f.*, f.id IN (SELECT h.id FROM held h) AS is_held FROM first f
    )
    SELECT array_agg(n.scope ORDER BY n.seq) FILTER (WHERE n.is_held) AS scopes,
           array_agg(n.key ORDER BY n.seq) FILTER (WHERE n.is_held) AS keys,
           array_agg(n.id ORDER BY n.seq) FILTER (WHERE n.is_held) AS ids,
           ARRAY(SELECT n.scope || ' ' || n.key FROM next n GROUP BY n.scope, n.key, n.room
                 HAVING NOT bool_and(n.is_held) OR (count(*) = c_of_one AND n.room > c_of_one)) AS unfinished
      INTO t FROM next n;
    DELETE FROM awa.grants g
     USING unnest(r.scopes, r.keys, r.ids) AS o(scope, key, id)
     WHERE g.queue = p_queue AND g.scope = o.scope AND g.key = o.key AND g.id = o.id
       AND o.scope || ' ' || o.key <> ALL (t.unfinished);
    IF t.ids IS NULL THEN
        RETURN 0;
    END IF;
    WITH taken AS (
        DELETE FROM awa.waiting_jobs w WHERE w.id = ANY (t.ids) RETURNING w.*
    )
    INSERT INTO awa.jobs (id, created_at, lane, priority, attempt, max_attempts, timeout_ms, queue, kind, args, metadata,
                          tags, concurrency_key, ordering_key, unique_key, expires_at, follow_ups, history)
    SELECT w.id, w.created_at, 2 * w.priority, w.priority, w.attempt, w.max_attempts, w.timeout_ms, w.queue, w.kind,
           w.args, w.metadata, w.tags, w.concurrency_key, w.ordering_key, w.unique_key, w.expires_at, w.follow_ups,
           w.history
      FROM (SELECT * FROM taken ORDER BY seq) w;
    INSERT INTO awa.grants AS g (queue, scope, key, id)
    SELECT p_queue, o.scope, o.key, o.id FROM unnest(t.scopes, t.keys, t.ids) AS o(scope, key, id)
     WHERE o.scope = 'order' OR p_limit IS NOT NULL
        ON CONFLICT (queue, scope, key, id) DO UPDATE
       SET claim_id = 0, entry_id = NULL, slot = NULL, idx = NULL, is_over = false, granted_at = clock_timestamp();
    PERFORM awa.ring(ARRAY[p_queue]);       -- who claims may have no room for them, and others may sleep
    RETURN cardinality(t.ids);
END $$;

CREATE FUNCTION awa.has_passed(p_frontier awa.lane_frontier[], p_lane smallint, p_xid xid8, p_entry bigint) RETURNS boolean
    LANGUAGE plpgsql IMMUTABLE
    AS $$
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

CREATE FUNCTION awa.holder_v1(p_key bytea) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    r record;
BEGIN
    FOR v_try IN 1..10 LOOP
        SELECT u.id, awa.is_held(u) AS is_held INTO r FROM awa.job_uniques u WHERE u.key = p_key;
        EXIT WHEN NOT FOUND OR r.is_held IS NOT NULL;
    END LOOP;
    RETURN CASE WHEN r.is_held THEN r.id END;
END $$;

CREATE FUNCTION awa.is_circle(p_id bigint, p_parents bigint[]) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    WITH RECURSIVE before(id) AS (
        SELECT unnest(p_parents)
        UNION
        SELECT unnest(w.parents) FROM before b JOIN awa.waiting_jobs w ON w.id = b.id WHERE w.waits_for = 'parent'
    )
    SELECT p_id IN (SELECT b.id FROM before b) AND EXISTS (SELECT FROM awa.waiting_jobs w WHERE w.id = p_id)
$$;

CREATE TABLE awa.job_uniques (
    key bytea NOT NULL,
    id bigint NOT NULL,
    states smallint DEFAULT 63 NOT NULL,
    slot smallint,
    lane smallint,
    xid xid8,
    entry_id bigint,
    queue text COLLATE pg_catalog."C",
    CONSTRAINT job_uniques_key_check CHECK ((octet_length(key) = 16)),
    CONSTRAINT job_uniques_states_check CHECK (((states >= 1) AND (states <= 255)))
)
WITH (fillfactor='85', autovacuum_vacuum_scale_factor='0.01', autovacuum_vacuum_cost_delay='0');

CREATE FUNCTION awa.is_held(u awa.job_uniques) RETURNS boolean
    LANGUAGE plpgsql STABLE
    AS $$
DECLARE
    v_state text;
BEGIN
    SELECT w.state INTO v_state FROM awa.waiting_jobs w WHERE w.id = u.id;
    IF NOT FOUND THEN
        SELECT e.state INTO v_state FROM awa.ended_jobs e WHERE e.id = u.id;
        IF NOT FOUND THEN
            BEGIN
                v_state := awa.state_in_ring(u);
                RAISE EXCEPTION 'seen' USING ERRCODE = 'AWA09';
            EXCEPTION WHEN SQLSTATE 'AWA09' THEN
                NULL;
            END;
            IF v_state = 'unclear' THEN
                RETURN NULL;
            END IF;
        END IF;
    END IF;
    RETURN coalesce(u.states & awa.state_bit(v_state) > 0, false);
END $$;

CREATE FUNCTION awa.is_member(p_entry_ids bigint[], p_entry bigint) RETURNS boolean
    LANGUAGE plpgsql IMMUTABLE COST 1000
    AS $$
BEGIN
    RETURN p_entry = ANY (p_entry_ids);
END $$;

CREATE TABLE awa.grants (
    queue text NOT NULL COLLATE pg_catalog."C",
    scope text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    id bigint NOT NULL,
    claim_id bigint DEFAULT 0 NOT NULL,
    entry_id bigint,
    slot smallint,
    idx smallint,
    is_over boolean DEFAULT false NOT NULL,
    granted_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT grants_scope_check CHECK ((scope = ANY (ARRAY['key'::text, 'order'::text])))
)
WITH (autovacuum_vacuum_scale_factor='0.01', autovacuum_vacuum_cost_delay='0');

CREATE FUNCTION awa.is_over(g awa.grants, p_is_limited boolean) RETURNS boolean
    LANGUAGE plpgsql STABLE
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v_outcome text;
BEGIN
    IF g.is_over OR g.claim_id = 0 THEN
        RETURN g.is_over OR g.scope = 'key' AND NOT p_is_limited;
    END IF;
    IF EXISTS (SELECT FROM awa.completions x
                WHERE x.slot = g.slot AND x.claim_id = g.claim_id AND g.idx = ANY (x.idx) OFFSET 0) THEN
        RETURN true;
    END IF;
    SELECT e.outcome INTO v_outcome FROM awa.attempt_ends e WHERE e.slot = g.slot AND e.entry_id = g.entry_id LIMIT 1;
    IF FOUND THEN
        RETURN g.scope = 'key' OR v_outcome IN ('completed', 'failed', 'cancelled');
    END IF;
    IF g.granted_at > clock_timestamp() - interval '1 min'
       OR EXISTS (SELECT FROM awa.claims c
                   WHERE c.slot = g.slot AND c.queue = g.queue AND c.claim_id = g.claim_id OFFSET 0) THEN
        RETURN false;
    END IF;
    RETURN g.scope = 'key'
           OR NOT EXISTS (SELECT FROM awa.waiting_jobs w WHERE w.id = g.id)
              AND coalesce((SELECT f.state FROM awa.find_job_v2(g.id) f), 'completed')
                  IN ('completed', 'failed', 'cancelled');
END $$;

CREATE FUNCTION awa.is_passed(p_queue text, p_lane smallint, p_xid xid8, p_entry bigint) RETURNS boolean
    LANGUAGE plpgsql STABLE
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET jit TO 'off'
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

CREATE FUNCTION awa.is_suspect(p_history json) RETURNS boolean
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT coalesce(p_history->-1->>'outcome' = 'rescued', false)
$$;

CREATE FUNCTION awa.kind_counts_v1(p_queues text[] DEFAULT NULL::text[], p_kinds text[] DEFAULT NULL::text[], p_exact integer DEFAULT 10000, p_pages integer DEFAULT 100) RETURNS TABLE(queue text, kind text, state text, n bigint, is_exact boolean, oldest_at timestamp with time zone)
    LANGUAGE plpgsql STABLE
    SET plan_cache_mode TO 'force_custom_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET jit TO 'off'
    SET max_parallel_workers_per_gather TO '0'
    AS $_$
#variable_conflict use_column
DECLARE
    v_queues text[] := ARRAY(SELECT DISTINCT q FROM unnest(p_queues) q UNION ALL
                             SELECT q FROM awa.queue_names() q WHERE p_queues IS NULL);
    v_has_ends smallint[] := ARRAY(SELECT s.slot::smallint FROM generate_series(0, 7) s(slot)
                                    WHERE EXISTS (SELECT FROM awa.attempt_ends e WHERE e.slot = s.slot OFFSET 0));
    -- in which anything ended that nobody had claimed
    v_has_own_ends smallint[] := ARRAY(SELECT s.slot FROM unnest(v_has_ends) s(slot)
                                        WHERE EXISTS (SELECT FROM awa.attempt_ends e
                                                       WHERE e.slot = s.slot AND e.claim_id IS NULL OFFSET 0));
    v_slots smallint[];
    v_available smallint[];
    v_open bigint[];
    v_pages bigint;
    v_table text;
BEGIN
    IF (p_exact >= 1 AND p_pages >= 1) IS NOT TRUE THEN
        RAISE EXCEPTION 'awa.kind_counts cannot count up to % jobs and look at % pages: give at least 1 of each',
              coalesce(p_exact::text, 'NULL'), coalesce(p_pages::text, 'NULL') USING ERRCODE = '22023';
    END IF;
    FOREACH v_table IN ARRAY ARRAY['waiting_jobs', 'ended_jobs'] LOOP
        RETURN QUERY EXECUTE replace($q$
            WITH page AS MATERIALIZED (
                SELECT * FROM awa.sample_pages($4, $3) p WHERE p.weight > 1
            ), sampled AS MATERIALIZED (
                SELECT p.first, p.weight, t.queue, t.state, t.kind
                  FROM page p
                 CROSS JOIN LATERAL (SELECT t.queue, t.state, t.kind FROM awa.{table} t
                                      WHERE t.ctid >= p.first AND t.ctid < p.behind OFFSET 0) t
            ), wanted AS MATERIALIZED (
                SELECT q.queue, s.state,
                       CASE WHEN NOT EXISTS (SELECT FROM page) THEN NULL
                            WHEN awa.are_many(t.guess, t.pages, $2) THEN 0
                            ELSE $2 + 1 END AS most
                  FROM unnest($1) q(queue)
                 CROSS JOIN unnest($5) s(state)
                  LEFT JOIN (SELECT t.queue, t.state, sum(t.guess)::float8 AS guess, count(*) AS pages
                               FROM (SELECT t.queue, t.state, count(*) * max(t.weight) AS guess FROM sampled t
                                      GROUP BY t.queue, t.state, t.first) t
                              GROUP BY 1, 2) t ON t.queue = q.queue AND t.state = s.state
            ), counted AS MATERIALIZED (
                SELECT w.queue, w.state, t.kind, count(*) AS n
                  FROM wanted w
                 CROSS JOIN LATERAL (SELECT t.kind FROM awa.{table} t
                                      WHERE t.queue = w.queue AND t.state = w.state LIMIT w.most) t
                 GROUP BY 1, 2, 3
            ), many AS MATERIALIZED (
                SELECT w.queue, w.state
                  FROM wanted w
                  LEFT JOIN (SELECT c.queue, c.state, sum(c.n) AS n FROM counted c GROUP BY 1, 2) c
                         ON c.queue = w.queue AND c.state = w.state
                 WHERE w.most = coalesce(c.n, 0)
            ), told AS (
                SELECT c.queue, c.kind, c.state, c.n FROM counted c
                 UNION ALL
                SELECT t.queue, t.kind, t.state, count(*) * max(t.weight)
                  FROM sampled t JOIN many m ON m.queue = t.queue AND m.state = t.state
                 GROUP BY 1, 2, 3
                 UNION ALL
                SELECT m.queue, NULL, m.state, 0 FROM many m
            )
            SELECT t.queue, t.kind, t.state, max(t.n),
                   NOT EXISTS (SELECT FROM many m WHERE m.queue = t.queue AND m.state = t.state), NULL::timestamptz
              FROM told t
             WHERE $6 IS NULL OR t.kind IS NULL OR t.kind = ANY ($6)
             GROUP BY t.queue, t.kind, t.state
        $q$, '{table}', v_table)
        USING v_queues, p_exact, p_pages, v_table,
              CASE v_table WHEN 'waiting_jobs' THEN ARRAY['scheduled', 'available', 'retryable', 'waiting_external']
                           ELSE ARRAY['failed', 'cancelled'] END,
              p_kinds;
    END LOOP;
    SELECT coalesce(array_agg(s.slot) FILTER (WHERE s.pages > 0), '{}'), sum(s.pages) INTO v_slots, v_pages
      FROM (SELECT n::smallint AS slot,
                   pg_relation_size(to_regclass('awa.jobs_' || n)) / current_setting('block_size')::bigint AS pages
              FROM generate_series(0, 7) n) s;
    -- Only of segments in which anything is available, if any is large: that may be few of them.
    IF v_pages > p_pages THEN
        WITH ranges AS MATERIALIZED (
            SELECT q.queue, r.* FROM unnest(v_queues) q(queue) CROSS JOIN LATERAL awa.unclaimed_ranges(q.queue) r
        )
        SELECT array_agg(u) INTO v_available
          FROM unnest(v_slots) u
         WHERE EXISTS (SELECT FROM ranges r
                        CROSS JOIN LATERAL (SELECT FROM awa.jobs j
                                             WHERE j.slot = u AND j.queue = r.queue AND j.lane = r.lane
                                               AND (j.xid, j.entry_id) > (r.lo_xid, r.lo_entry)
                                               AND (j.xid, j.entry_id) < (r.hi_xid, r.hi_entry)
                                             LIMIT 1) j);
    END IF;
    RETURN QUERY
        WITH page AS MATERIALIZED (
            SELECT * FROM awa.sample_pages('jobs', p_pages, coalesce(v_available, '{}')) p WHERE p.weight > 1
        ), frontier AS MATERIALIZED (
            SELECT q.queue, f.*
              FROM unnest(v_queues) q(queue) CROSS JOIN LATERAL unnest(awa.frontier_of(q.queue)) f
             WHERE EXISTS (SELECT FROM page)
        ), sampled AS MATERIALIZED (
            SELECT j.slot, p.first, p.weight, j.queue, j.kind
              FROM page p
             CROSS JOIN LATERAL (SELECT j.slot, j.queue, j.kind, j.lane, j.xid, j.entry_id FROM awa.jobs j
                                  WHERE j.slot = p.slot AND j.ctid >= p.first AND j.ctid < p.behind AND j.lane > 0
                                 OFFSET 0) j
              LEFT JOIN frontier f ON f.queue = j.queue AND f.lane = j.lane
             WHERE NOT coalesce(pg_visible_in_snapshot(j.xid, f.page_from), false)
               AND NOT coalesce(pg_visible_in_snapshot(j.xid, f.page_to)
                                AND (j.xid, j.entry_id) <= (f.last_xid, f.last_entry), false)
               AND NOT (j.slot = ANY (v_has_own_ends)
                        AND EXISTS (SELECT FROM awa.attempt_ends e
                                     WHERE e.slot = j.slot AND e.entry_id = j.entry_id OFFSET 0))
        ), wanted AS MATERIALIZED (
            SELECT q.queue,
                   CASE WHEN NOT EXISTS (SELECT FROM page) THEN NULL
                        WHEN awa.are_many(t.guess, t.pages, p_exact) THEN 0
                        ELSE p_exact + 1 END AS most
              FROM unnest(v_queues) q(queue)
              LEFT JOIN (SELECT t.queue, sum(t.guess)::float8 AS guess, count(*) AS pages
                           FROM (SELECT t.queue, count(*) * max(t.weight) AS guess FROM sampled t
                                  GROUP BY t.queue, t.slot, t.first) t
                          GROUP BY 1) t ON t.queue = q.queue
        ), head AS MATERIALIZED (
            SELECT q.queue, j.kind, j.available_at, j.nr,
                   j.slot = ANY (v_has_own_ends)
                   AND EXISTS (SELECT FROM awa.attempt_ends e
                                WHERE e.slot = j.slot AND e.entry_id = j.entry_id OFFSET 0) AS has_ended
              FROM unnest(v_queues) q(queue)
             CROSS JOIN LATERAL awa.unclaimed_ranges(q.queue) r
             CROSS JOIN LATERAL (
                   SELECT j.*, row_number() OVER () AS nr
                     FROM (SELECT j.slot, j.entry_id, j.kind, j.available_at FROM awa.jobs j
                            WHERE j.queue = q.queue AND j.lane = r.lane
                              AND (j.xid, j.entry_id) > (r.lo_xid, r.lo_entry)
                              AND (j.xid, j.entry_id) < (r.hi_xid, r.hi_entry)
                              AND pg_visible_in_snapshot(j.xid, r.page_to)
                            ORDER BY j.xid, j.entry_id LIMIT 500) j) j
        ), horizon AS MATERIALIZED (
            SELECT h.queue, min(h.available_at) AS since FROM head h WHERE h.nr = 500 GROUP BY 1
        ), counted AS MATERIALIZED (
            SELECT w.queue, j.kind, count(*) AS seen,
                   count(*) FILTER (WHERE NOT (j.slot = ANY (v_has_own_ends)
                                               AND EXISTS (SELECT FROM awa.attempt_ends e
                                                            WHERE e.slot = j.slot AND e.entry_id = j.entry_id
                                                           OFFSET 0))) AS n
              FROM wanted w
             CROSS JOIN LATERAL (
                   SELECT j.slot, j.entry_id, j.kind
                     FROM awa.unclaimed_ranges(w.queue) r
                    CROSS JOIN LATERAL (
                          SELECT j.slot, j.entry_id, j.kind FROM awa.jobs j
                           WHERE j.queue = w.queue AND j.lane = r.lane
                             AND (j.xid, j.entry_id) > (r.lo_xid, r.lo_entry)
                             AND (j.xid, j.entry_id) < (r.hi_xid, r.hi_entry)
                             AND pg_visible_in_snapshot(j.xid, r.page_to)
                           LIMIT w.most) j
                    LIMIT w.most) j
             GROUP BY 1, 2
        ), many AS MATERIALIZED (
            SELECT w.queue
              FROM wanted w LEFT JOIN (SELECT c.queue, sum(c.seen) AS seen FROM counted c GROUP BY 1) c ON c.queue = w.queue
             WHERE w.most = coalesce(c.seen, 0)
        ), told AS (
            SELECT c.queue, c.kind, c.n, NULL::timestamptz AS oldest_at FROM counted c
             UNION ALL
            SELECT h.queue, h.kind, count(*), min(h.available_at) FROM head h WHERE NOT h.has_ended GROUP BY 1, 2
             UNION ALL
            SELECT t.queue, t.kind, count(*) * max(t.weight), NULL
              FROM sampled t JOIN many m ON m.queue = t.queue
             GROUP BY 1, 2
             UNION ALL
            SELECT m.queue, NULL, 0, NULL FROM many m
        )
        SELECT t.queue, t.kind, 'available', max(t.n),
               NOT EXISTS (SELECT FROM many m WHERE m.queue = t.queue),
               CASE WHEN max(h.since) < min(t.oldest_at) THEN NULL ELSE min(t.oldest_at) END
          FROM told t LEFT JOIN horizon h ON h.queue = t.queue
         WHERE p_kinds IS NULL OR t.kind IS NULL OR t.kind = ANY (p_kinds)
         GROUP BY t.queue, t.kind
        HAVING max(t.n) > 0 OR t.kind IS NULL;
    -- Members of open claims that are not completed; some of them may have ended by themselves.
    v_open := ARRAY(
        SELECT m.entry_id
          FROM awa.open_claims c
         CROSS JOIN LATERAL (SELECT array_agg(i) AS idx FROM awa.completions x CROSS JOIN unnest(x.idx) i
                              WHERE x.slot = c.slot AND x.claim_id = c.claim_id) d
         CROSS JOIN LATERAL unnest(c.entry_ids) WITH ORDINALITY m(entry_id, nr)
         WHERE c.queue = ANY (v_queues) AND (m.nr::smallint = ANY (d.idx)) IS NOT TRUE);
    -- Of more than so many, some are looked at, as chance has it, each standing for some more.
    RETURN QUERY
        WITH member AS MATERIALIZED (
            SELECT c.slot, c.queue, c.lane, m.xid, m.entry_id
              FROM awa.open_claims c CROSS JOIN LATERAL unnest(c.entry_ids, c.xids) m(entry_id, xid)
             WHERE c.queue = ANY (v_queues) AND m.entry_id = ANY (v_open)
        ), told AS (
            SELECT m.queue, j.kind, count(*) * (cardinality(v_open) / (p_exact + 1) + 1) AS n
              FROM member m
              JOIN awa.jobs j ON j.slot = m.slot AND j.queue = m.queue AND j.lane = m.lane AND j.xid = m.xid
                             AND j.entry_id = m.entry_id
             WHERE (hashint8(m.entry_id) & 2147483647) % (cardinality(v_open) / (p_exact + 1) + 1) = 0
               AND NOT EXISTS (SELECT FROM awa.attempt_ends e
                                WHERE e.slot = m.slot AND e.entry_id = m.entry_id OFFSET 0)
             GROUP BY 1, 2
             UNION ALL
            SELECT DISTINCT m.queue, NULL, 0::bigint FROM member m WHERE cardinality(v_open) > p_exact
        )
        SELECT t.queue, t.kind, 'running', t.n, cardinality(v_open) <= p_exact, NULL::timestamptz
          FROM told t
         WHERE p_kinds IS NULL OR t.kind IS NULL OR t.kind = ANY (p_kinds);
    RETURN QUERY
        WITH page AS MATERIALIZED (
            SELECT * FROM awa.sample_pages('jobs', p_pages, v_slots) p
        ), frontier AS MATERIALIZED (
            SELECT q.queue, f.* FROM unnest(v_queues) q(queue) CROSS JOIN LATERAL unnest(awa.frontier_of(q.queue)) f
        ), sampled AS MATERIALIZED (
            SELECT j.slot, p.first, p.weight, j.queue, j.kind, d.is_completed
              FROM page p
             CROSS JOIN LATERAL (SELECT j.slot, j.queue, j.kind, j.lane, j.xid, j.entry_id FROM awa.jobs j
                                  WHERE j.slot = p.slot AND j.ctid >= p.first AND j.ctid < p.behind OFFSET 0) j
              LEFT JOIN frontier f ON f.queue = j.queue AND f.lane = j.lane
             CROSS JOIN LATERAL awa.completed_entry(j.slot, j.lane, j.xid, j.entry_id, f.page_from, f.page_to, f.last_xid,
                                                    f.last_entry, v_has_ends, v_open) d
             WHERE j.queue = ANY (v_queues)
        ), wanted AS MATERIALIZED (
            SELECT q.queue, coalesce(awa.are_many(t.guess, t.pages, p_exact), false)
                            OR p_exact < (SELECT count(*) FROM (SELECT FROM awa.jobs j WHERE j.queue = q.queue
                                                                 LIMIT p_exact + 1) j) AS has_many
              FROM unnest(v_queues) q(queue)
              LEFT JOIN (SELECT t.queue, sum(t.guess)::float8 AS guess, count(*) AS pages
                           FROM (SELECT t.queue, count(*) * max(t.weight) AS guess FROM sampled t
                                  GROUP BY t.queue, t.slot, t.first) t
                          GROUP BY 1) t ON t.queue = q.queue
             WHERE EXISTS (SELECT FROM page p WHERE p.weight > 1)
               AND EXISTS (SELECT FROM awa.claims c WHERE c.queue = q.queue)
        ), told AS (
            SELECT w.queue, j.kind, count(*) FILTER (WHERE d.is_completed) AS n
              FROM wanted w
             CROSS JOIN LATERAL (SELECT j.slot, j.kind, j.lane, j.xid, j.entry_id FROM awa.jobs j
                                  WHERE j.queue = w.queue OFFSET 0) j
              LEFT JOIN frontier f ON f.queue = w.queue AND f.lane = j.lane
             CROSS JOIN LATERAL awa.completed_entry(j.slot, j.lane, j.xid, j.entry_id, f.page_from, f.page_to, f.last_xid,
                                                    f.last_entry, v_has_ends, v_open) d
             WHERE NOT w.has_many
             GROUP BY 1, 2
             UNION ALL
            SELECT t.queue, t.kind, count(*) FILTER (WHERE t.is_completed) * max(t.weight)
              FROM sampled t
             WHERE t.weight = 1 OR t.queue IN (SELECT w.queue FROM wanted w WHERE w.has_many)
             GROUP BY 1, 2
             UNION ALL
            SELECT w.queue, NULL, 0 FROM wanted w WHERE w.has_many
        )
        SELECT t.queue, t.kind, 'completed', t.n, t.queue NOT IN (SELECT w.queue FROM wanted w WHERE w.has_many),
               NULL::timestamptz
          FROM told t
         WHERE (t.n > 0 OR t.kind IS NULL) AND (p_kinds IS NULL OR t.kind IS NULL OR t.kind = ANY (p_kinds));
END $_$;

CREATE FUNCTION awa.lies_ahead(p_from pg_snapshot, p_to pg_snapshot, p_last_xid xid8, p_last_entry bigint, p_xid xid8, p_entry bigint) RETURNS boolean
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT p_from IS NULL
        OR NOT pg_visible_in_snapshot(p_xid, coalesce(p_to, p_from))
        OR (p_to IS NOT NULL AND NOT pg_visible_in_snapshot(p_xid, p_from)
            AND (p_xid, p_entry) > (p_last_xid, p_last_entry))
$$;

CREATE FUNCTION awa.limit_queue_v1(p_queue text, p_overrides json, p_by text DEFAULT NULL::text, p_cleared text[] DEFAULT NULL::text[]) RETURNS text
    LANGUAGE plpgsql
    SET lock_timeout TO '50ms'
    AS $$
DECLARE
    v_old jsonb;
    v_new jsonb;
BEGIN
    PERFORM awa.check_queue(p_queue);
    PERFORM awa.limits_of(NULL, p_overrides);
    PERFORM awa.limits_of(NULL, (SELECT json_object_agg(c, NULL::text) FROM unnest(p_cleared) c));
    IF NOT awa.lock_queue(p_queue, 1) THEN
        RETURN 'busy';
    END IF;
    SELECT coalesce(m.overrides::jsonb, '{}') INTO v_old FROM awa.queue_meta m WHERE m.queue = p_queue;
    v_new := (coalesce(v_old, '{}') || coalesce(p_overrides::jsonb, '{}')) - coalesce(p_cleared, '{}');
    IF v_new = coalesce(v_old, '{}') THEN
        RETURN 'nothing';
    END IF;
    INSERT INTO awa.queue_meta (queue) VALUES (p_queue) ON CONFLICT DO NOTHING;
    PERFORM awa.write_limits(p_queue, (SELECT m.declared FROM awa.queue_meta m WHERE m.queue = p_queue),
                             nullif(v_new, '{}')::json);
    UPDATE awa.queue_meta m SET overrides_by = p_by, overrides_at = clock_timestamp() WHERE m.queue = p_queue;
    RETURN 'limited';
EXCEPTION WHEN lock_not_available THEN
    RETURN 'busy';
END $$;

CREATE FUNCTION awa.limits_changed(p_queue text) RETURNS void
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
BEGIN
    IF (SELECT m.max_running_per_key FROM awa.queue_meta m WHERE m.queue = p_queue) IS NOT NULL THEN
        INSERT INTO awa.grants (queue, scope, key, id, claim_id, entry_id, slot, idx)
        SELECT p_queue, 'key', left(j.concurrency_key, 201), j.id, o.claim_id, j.entry_id, o.slot, m.idx
          FROM awa.open_of_queue(p_queue) o
         CROSS JOIN LATERAL (SELECT * FROM awa.claims c
                              WHERE c.slot = o.slot AND c.queue = p_queue AND c.claim_id = o.claim_id LIMIT 1) c
         CROSS JOIN LATERAL unnest(c.entry_ids, c.xids) WITH ORDINALITY AS m(entry_id, xid, idx)
         CROSS JOIN LATERAL (SELECT * FROM awa.jobs j
                              WHERE j.slot = o.slot AND j.queue = p_queue AND j.lane = c.lane AND j.xid = m.xid
                                AND j.entry_id = m.entry_id LIMIT 1) j
         WHERE j.concurrency_key IS NOT NULL
           AND NOT EXISTS (SELECT FROM awa.completions x
                            WHERE x.slot = o.slot AND x.claim_id = o.claim_id AND m.idx::smallint = ANY (x.idx) OFFSET 0)
           AND NOT EXISTS (SELECT FROM awa.attempt_ends e WHERE e.slot = o.slot AND e.entry_id = m.entry_id OFFSET 0)
            ON CONFLICT (queue, scope, key, id) DO UPDATE
           SET claim_id = excluded.claim_id, entry_id = excluded.entry_id, slot = excluded.slot, idx = excluded.idx,
               is_over = false;
    END IF;
    WITH RECURSIVE waiting AS (
        (SELECT w.wait_key FROM awa.waiting_jobs w
          WHERE w.queue = p_queue AND w.waits_for = 'key' AND w.waits_for IN ('key', 'order')
          ORDER BY w.wait_key LIMIT 1)
        UNION ALL
        SELECT n.wait_key
          FROM waiting t
         CROSS JOIN LATERAL (SELECT w.wait_key FROM awa.waiting_jobs w
                              WHERE w.queue = p_queue AND w.waits_for = 'key' AND w.waits_for IN ('key', 'order')
                                AND w.wait_key > t.wait_key
                              ORDER BY w.wait_key LIMIT 1) n
    )
    INSERT INTO awa.grants (queue, scope, key, id, is_over)
    SELECT p_queue, 'key', t.wait_key, 0, true FROM waiting t
        ON CONFLICT DO NOTHING;
END $$;

CREATE FUNCTION awa.limits_of(p_declared json, p_overrides json, OUT max_running integer, OUT rate double precision, OUT burst double precision, OUT max_running_per_key integer) RETURNS record
    LANGUAGE plpgsql IMMUTABLE
    AS $$
DECLARE
    v_said jsonb := coalesce(p_declared::jsonb, '{}') || coalesce(p_overrides::jsonb, '{}');
    v_rate jsonb;
    v_name text;
BEGIN
    IF jsonb_typeof(v_said) <> 'object' THEN
        RAISE EXCEPTION 'limits are a JSON object, not %', left(v_said::text, 60) USING ERRCODE = '22023';
    END IF;
    SELECT k INTO v_name FROM jsonb_object_keys(v_said) k
     WHERE k NOT IN ('max_running', 'rate_limit', 'max_running_per_key') LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'there is no limit %: limits are max_running, rate_limit, max_running_per_key', left(v_name, 60)
              USING ERRCODE = '22023';
    END IF;
    max_running := v_said->>'max_running';
    max_running_per_key := v_said->>'max_running_per_key';
    IF least(max_running, max_running_per_key) < 1 THEN
        RAISE EXCEPTION 'max_running and max_running_per_key are at least 1, not %: to start nothing pause the queue',
              least(max_running, max_running_per_key) USING ERRCODE = '22023';
    END IF;
    v_rate := v_said->'rate_limit';
    IF jsonb_typeof(v_rate) <> 'null' THEN
        rate := (v_rate->>'count')::double precision / coalesce((v_rate->>'per')::double precision, 1);
        burst := coalesce((v_rate->>'burst')::double precision, ceil((v_rate->>'count')::double precision));
        IF (rate BETWEEN 1e-6 AND 1e6 AND burst BETWEEN 1 AND 1e6) IS NOT TRUE THEN
            RAISE EXCEPTION 'rate_limit is {"count": attempts, "per": seconds, "burst": attempts}, from 0.000001 to'
                            ' 1000000 a second, 1 to 1000000 at once; not %', left(v_rate::text, 200)
                  USING ERRCODE = '22023';
        END IF;
    END IF;
EXCEPTION
    WHEN invalid_text_representation OR numeric_value_out_of_range OR division_by_zero THEN
        RAISE EXCEPTION 'limits cannot be read: % in %', SQLERRM, left(v_said::text, 200) USING ERRCODE = '22023';
END $$;

CREATE FUNCTION awa.locate(p_id bigint, OUT place text, OUT state text, OUT queue text, OUT slot smallint, OUT lane smallint, OUT xid xid8, OUT entry_id bigint, OUT runtime bigint, OUT claim_id bigint, OUT idx smallint) RETURNS record
    LANGUAGE plpgsql STABLE
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
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
    SELECT CASE WHEN e.outcome = 'completed' THEN e.outcome END INTO state
      FROM awa.attempt_ends e WHERE e.slot = j.slot AND e.entry_id = j.entry_id;
    IF FOUND THEN                -- it is completed, or nothing is left of what came after this entry
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

CREATE FUNCTION awa.lock_queue(p_queue text, p_seconds double precision) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
DECLARE
    v_until timestamptz := clock_timestamp() + p_seconds * interval '1 s';
BEGIN
    WHILE NOT pg_try_advisory_xact_lock(hashtextextended('awa.queue:' || p_queue, 0)) LOOP
        IF clock_timestamp() > v_until THEN
            RETURN false;
        END IF;
        PERFORM pg_sleep(0.002 + 0.008 * random());
    END LOOP;
    RETURN true;
END $$;

CREATE FUNCTION awa.look_at_key(p_queue text, p_scope text, p_key text) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    INSERT INTO awa.grants (queue, scope, key, id, is_over) VALUES (p_queue, p_scope, left(p_key, 201), 0, true)
        ON CONFLICT (queue, scope, key, id) DO UPDATE SET is_over = true;
    PERFORM awa.ring(ARRAY[p_queue]);
END $$;

CREATE FUNCTION awa.look_at_parents_v1(p_ids bigint[], p_slots smallint[], p_queues text[], p_lanes smallint[], p_xids xid8[], p_entries bigint[], p_ats timestamp with time zone[], p_claims bigint[], p_idx smallint[]) RETURNS TABLE(id bigint, state text, slot smallint, queue text, lane smallint, xid xid8, entry_id bigint, available_at timestamp with time zone, claim_id bigint, idx smallint)
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    v_states text[];        -- by position
    v_known boolean[];      -- by position: the entry that the caller says is there
    v_searched bigint[];
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.look_at_parents needs READ COMMITTED: an older snapshot would take a job for gone'
              USING ERRCODE = 'AWA02';
    END IF;
    LOCK TABLE awa.jobs IN ACCESS SHARE MODE;
    v_states := ARRAY(
        SELECT coalesce((SELECT 'waiting' FROM awa.waiting_jobs w WHERE w.id = u.id),
                        (SELECT e.state FROM awa.ended_jobs e WHERE e.id = u.id))
          FROM unnest(p_ids) WITH ORDINALITY AS u(id, n) ORDER BY u.n);
    v_known := ARRAY(
        SELECT u.state IS NULL
               AND EXISTS (SELECT FROM awa.jobs j WHERE j.slot = u.slot AND j.queue = u.queue AND j.lane = u.lane
                                                    AND j.xid = u.xid AND j.entry_id = u.entry_id OFFSET 0)
          FROM unnest(v_states, p_slots, p_queues, p_lanes, p_xids, p_entries) WITH ORDINALITY
               AS u(state, slot, queue, lane, xid, entry_id, n) ORDER BY u.n);
    v_searched := ARRAY(SELECT u.id FROM unnest(p_ids, v_states, v_known) AS u(id, state, known)
                         WHERE u.state IS NULL AND NOT u.known);
    RETURN QUERY
        WITH place AS MATERIALIZED (
            SELECT false AS is_newest, u.id, u.slot, u.queue, u.lane, u.xid, u.entry_id, u.available_at, u.claim_id,
                   u.idx
              FROM unnest(p_ids, v_known, p_slots, p_queues, p_lanes, p_xids, p_entries, p_ats, p_claims, p_idx)
                   AS u(id, known, slot, queue, lane, xid, entry_id, available_at, claim_id, idx)
             WHERE u.known
             UNION ALL
            SELECT true, e.id, e.slot, e.queue, e.lane, e.xid, e.entry_id, e.available_at, NULL, NULL
              FROM awa.newest_entries(v_searched, 2) e
        ), frontier AS MATERIALIZED (
            SELECT q.queue, awa.frontier_of(q.queue) AS frontier FROM (SELECT DISTINCT queue FROM place) q
        ), passed AS MATERIALIZED (    -- whose claims are to be looked for, half a millisecond each; most are available
            SELECT p.id, row_number() OVER () <= 50 AS is_looked_for FROM place p
             WHERE p.claim_id IS NULL AND p.entry_id IS NOT NULL
               AND CASE WHEN p.lane = 0 THEN true
                        ELSE awa.has_passed((SELECT f.frontier FROM frontier f WHERE f.queue = p.queue),
                                            p.lane, p.xid, p.entry_id) END
               AND NOT EXISTS (SELECT FROM awa.attempt_ends t
                                WHERE t.slot = p.slot AND t.entry_id = p.entry_id OFFSET 0)
        )
        SELECT p.id,
               CASE WHEN p.entry_id IS NULL THEN 'gone'
                    WHEN e.outcome = 'completed' THEN e.outcome
                    -- The rest left the job to a successor; a retry may have given one to what failed or was cancelled.
                    -- It is in this snapshot too, or has ended and is gone.
                    WHEN e.outcome IS NOT NULL
                    THEN coalesce((SELECT 'waiting' FROM awa.waiting_jobs w WHERE w.id = p.id),
                                  (SELECT t.state FROM awa.ended_jobs t WHERE t.id = p.id),
                                  CASE WHEN NOT p.is_newest THEN NULL
                                       WHEN e.outcome IN ('failed', 'cancelled') THEN e.outcome
                                       ELSE 'gone' END)
                    WHEN EXISTS (SELECT FROM awa.completions x
                                  WHERE x.slot = p.slot AND x.claim_id = c.claim_id AND c.idx = ANY (x.idx) OFFSET 0)
                    THEN 'completed'
                    WHEN (p.id IN (SELECT s.id FROM passed s WHERE NOT s.is_looked_for)) IS TRUE THEN 'passed'
                    ELSE 'open' END,
               p.slot, p.queue, p.lane, p.xid, p.entry_id, p.available_at, c.claim_id, c.idx
          FROM place p
          LEFT JOIN LATERAL (SELECT t.outcome FROM awa.attempt_ends t
                              WHERE t.slot = p.slot AND t.entry_id = p.entry_id LIMIT 1) e ON true
          LEFT JOIN LATERAL (
               SELECT p.claim_id, p.idx WHERE p.claim_id IS NOT NULL
               UNION ALL
               SELECT t.claim_id, t.idx
                 FROM awa.claim_of(p.slot, p.queue, p.lane, p.xid, p.entry_id, p.available_at) t
                WHERE p.claim_id IS NULL
                  AND (p.id IN (SELECT s.id FROM passed s WHERE s.is_looked_for)) IS TRUE) c ON true;
    RETURN QUERY
        SELECT u.id, u.state, NULL::smallint, NULL::text, NULL::smallint, NULL::xid8, NULL::bigint, NULL::timestamptz,
               NULL::bigint, NULL::smallint
          FROM unnest(p_ids, v_states) AS u(id, state) WHERE u.state IS NOT NULL;
END $$;

CREATE FUNCTION awa.move_v1(p_id bigint, p_queue text, OUT happened text, OUT state text) RETURNS record
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    SET lock_timeout TO '10ms'
    AS $$
DECLARE
    v_until timestamptz := clock_timestamp() + interval '1 s';
    v_waits_for text;
    v_key text;
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
                RETURNING w.waits_for, w.wait_key INTO v_waits_for, v_key;
                IF FOUND THEN
                    PERFORM awa.release_grants(ARRAY[p_id]);
                    IF v_waits_for IN ('key', 'order') THEN
                        PERFORM awa.look_at_key(p_queue, v_waits_for, v_key);
                    ELSIF v_waits_for <> 'time' THEN
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
                       2 * j.priority + (NOT awa.is_suspect(j.history))::integer, j.priority, j.attempt, j.max_attempts,
                       j.timeout_ms, p_queue, j.kind, j.args, j.metadata, j.tags, j.concurrency_key, j.ordering_key,
                       j.unique_key, j.expires_at, j.follow_ups, j.history
                  FROM awa.end_unclaimed(p.queue, p.slot, p.lane, p.xid, p.entry_id, 'moved', NULL) j;
                IF FOUND THEN
                    PERFORM awa.release_grants(ARRAY[p_id]);
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

CREATE FUNCTION awa.newest_entries(p_ids bigint[], p_searches integer) RETURNS TABLE(id bigint, slot smallint, queue text, lane smallint, xid xid8, entry_id bigint, available_at timestamp with time zone)
    LANGUAGE plpgsql STABLE
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'on'
    SET jit TO 'off'
    SET max_parallel_workers_per_gather TO '0'
    AS $$
#variable_conflict use_column
DECLARE
    r record;
BEGIN
    FOR r IN
        WITH near AS (
            SELECT u.id, u.id / 10000 AS part, count(*) OVER (PARTITION BY u.id / 10000) >= 5 AS is_dense
              FROM unnest(p_ids) AS u(id)
        )
        SELECT array_agg(n.id) AS ids, min(n.id) AS lo, max(n.id) AS hi, true AS is_dense
          FROM near n WHERE n.is_dense GROUP BY n.part
        UNION ALL
        SELECT array_agg(n.id), NULL, NULL, false
          FROM (SELECT n.id, (row_number() OVER (ORDER BY n.id) - 1) / 32 AS part FROM near n WHERE NOT n.is_dense) n
         GROUP BY n.part
         LIMIT p_searches
    LOOP
        IF r.is_dense THEN
            RETURN QUERY
                SELECT u.id, e.slot, e.queue, e.lane, e.xid, e.entry_id, e.available_at
                  FROM unnest(r.ids) u(id)
                  LEFT JOIN (SELECT DISTINCT ON (j.id) *
                               FROM awa.jobs j
                              WHERE j.id BETWEEN r.lo AND r.hi
                                AND (j.id IN (SELECT t FROM unnest(r.ids) t)) IS TRUE  -- a look into a hash table
                              ORDER BY j.id, j.entry_id DESC) e ON e.id = u.id;
        ELSE
            RETURN QUERY
                SELECT u.id, e.slot, e.queue, e.lane, e.xid, e.entry_id, e.available_at
                  FROM unnest(r.ids) u(id)
                  LEFT JOIN (SELECT DISTINCT ON (j.id) *
                               FROM awa.jobs j WHERE j.id = ANY (r.ids)
                              ORDER BY j.id, j.entry_id DESC) e ON e.id = u.id;
        END IF;
    END LOOP;
END $$;

CREATE FUNCTION awa.newest_entry(p_id bigint) RETURNS SETOF awa.jobs
    LANGUAGE sql STABLE
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'on'
    SET jit TO 'off'
    AS $$
    SELECT * FROM awa.jobs t WHERE t.id = p_id ORDER BY t.entry_id DESC LIMIT 1
$$;

CREATE FUNCTION awa.oldest_available(p_queue text) RETURNS timestamp with time zone
    LANGUAGE sql STABLE
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET jit TO 'off'
    AS $$
    SELECT min(h.available_at)
      FROM awa.unclaimed_ranges(p_queue) r
     CROSS JOIN LATERAL (
           SELECT t.available_at
             FROM (SELECT j.slot, j.entry_id, j.available_at, row_number() OVER () AS nr
                     FROM (SELECT j.slot, j.entry_id, j.available_at FROM awa.jobs j
                            WHERE j.queue = p_queue AND j.lane = r.lane
                              AND (j.xid, j.entry_id) > (r.lo_xid, r.lo_entry)
                              AND (j.xid, j.entry_id) < (r.hi_xid, r.hi_entry)
                              AND pg_visible_in_snapshot(j.xid, r.page_to)
                            ORDER BY j.xid, j.entry_id LIMIT 1000) j) t
            WHERE t.nr = 1000
               OR NOT EXISTS (SELECT FROM awa.attempt_ends e
                               WHERE e.slot = t.slot AND e.entry_id = t.entry_id OFFSET 0)
            LIMIT 1) h
$$;

CREATE FUNCTION awa.oldest_available_v1(p_queues text[]) RETURNS TABLE(queue text, oldest_at timestamp with time zone)
    LANGUAGE sql STABLE
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET jit TO 'off'
    AS $$
    SELECT q.queue, o.available_at
      FROM unnest(p_queues) q(queue)
     CROSS JOIN LATERAL (
           SELECT min(h.available_at) AS available_at
             FROM awa.unclaimed_ranges(q.queue) r
            CROSS JOIN LATERAL (
                  SELECT t.available_at
                    FROM (SELECT j.slot, j.entry_id, j.available_at, row_number() OVER () AS nr
                            FROM (SELECT j.slot, j.entry_id, j.available_at FROM awa.jobs j
                                   WHERE j.queue = q.queue AND j.lane = r.lane
                                     AND (j.xid, j.entry_id) > (r.lo_xid, r.lo_entry)
                                     AND (j.xid, j.entry_id) < (r.hi_xid, r.hi_entry)
                                     AND pg_visible_in_snapshot(j.xid, r.page_to)
                                   ORDER BY j.xid, j.entry_id LIMIT 1000) j) t
                   WHERE t.nr = 1000
                      OR NOT EXISTS (SELECT FROM awa.attempt_ends e
                                      WHERE e.slot = t.slot AND e.entry_id = t.entry_id OFFSET 0)
                   LIMIT 1) h) o
$$;

CREATE FUNCTION awa.open_attempts() RETURNS TABLE(slot smallint, runtime bigint, claim_id bigint, idx smallint, queue text, xid xid8, entry_id bigint)
    LANGUAGE sql STABLE
    AS $$
    WITH completed AS MATERIALIZED (
        SELECT x.slot, x.claim_id, i.idx FROM awa.completions x CROSS JOIN LATERAL unnest(x.idx) AS i(idx)
    )
    SELECT c.slot, c.runtime, c.claim_id, m.idx::smallint, c.queue, m.xid, m.entry_id
      FROM awa.claims c
     CROSS JOIN LATERAL unnest(c.entry_ids, c.xids) WITH ORDINALITY AS m(entry_id, xid, idx)
     WHERE NOT EXISTS (SELECT FROM completed x
                        WHERE x.slot = c.slot AND x.claim_id = c.claim_id AND x.idx = m.idx)
       AND NOT EXISTS (SELECT FROM awa.attempt_ends e WHERE e.slot = c.slot AND e.entry_id = m.entry_id)
$$;

CREATE FUNCTION awa.open_of_queue(p_queue text) RETURNS TABLE(claim_id bigint, slot smallint, size smallint)
    LANGUAGE plpgsql STABLE
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
        SELECT c.claim_id, c.slot, o.n::smallint
          FROM awa.runtime_instances i
         CROSS JOIN LATERAL (
               SELECT t.* FROM awa.claims t WHERE t.runtime = i.id AND t.claim_id > i.newest_claim
               UNION ALL
               SELECT t.* FROM unnest(i.open_claims) o CROSS JOIN LATERAL (
                      SELECT * FROM awa.claims t
                       WHERE t.runtime = i.id AND t.claim_id = o AND o <= i.newest_claim OFFSET 0) t) c
         CROSS JOIN LATERAL (SELECT awa.open_size(c.slot, c.queue, c.claim_id) AS n OFFSET 0) o
         WHERE i.ended_at IS NULL AND c.queue = p_queue AND o.n > 0
         ORDER BY c.claim_id;
END $$;

CREATE FUNCTION awa.open_size(p_slot smallint, p_queue text, p_claim bigint) RETURNS integer
    LANGUAGE sql STABLE
    AS $$
    SELECT coalesce((SELECT cardinality(c.entry_ids) FROM awa.claims c
                      WHERE c.slot = p_slot AND c.queue = p_queue AND c.claim_id = p_claim LIMIT 1)
                    - (SELECT coalesce(sum(cardinality(x.idx)), 0) FROM awa.completions x
                        WHERE x.slot = p_slot AND x.claim_id = p_claim)
                    - (SELECT count(*) FROM awa.attempt_ends e WHERE e.slot = p_slot AND e.claim_id = p_claim),
                    0)::integer
$$;

CREATE FUNCTION awa.outcome_v1(p_ids bigint[]) RETURNS TABLE(id bigint, state text, result json, error json)
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION awa.overdue(p_runtime bigint, p_behind double precision, p_limit integer, p_skip integer) RETURNS TABLE(claim_id bigint, slot smallint, nonce integer, idx smallint, attempt smallint, limit_ms integer)
    LANGUAGE plpgsql STABLE
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
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

CREATE FUNCTION awa.page_end() RETURNS pg_snapshot
    LANGUAGE plpgsql
    AS $$
DECLARE
    v_now pg_snapshot := pg_current_snapshot();
    v_own xid8 := pg_current_xact_id_if_assigned();
BEGIN
    IF v_own IS NULL OR NOT pg_visible_in_snapshot(v_own, v_now) THEN
        RETURN v_now;
    END IF;
    RETURN format('%s:%s:%s', least(pg_snapshot_xmin(v_now), v_own), pg_snapshot_xmax(v_now),
                  array_to_string(ARRAY(SELECT x FROM (SELECT pg_snapshot_xip(v_now) UNION ALL SELECT v_own) t(x)
                                         ORDER BY x), ','))::pg_snapshot;
END $$;

CREATE FUNCTION awa.page_ranges(p_from pg_snapshot, p_to pg_snapshot, p_xid xid8, p_entry bigint, OUT lo_xid xid8[], OUT lo_entry bigint[], OUT hi_xid xid8[], OUT hi_entry bigint[]) RETURNS record
    LANGUAGE plpgsql IMMUTABLE
    AS $$
#variable_conflict use_column
BEGIN
    WITH cuts AS (
        SELECT x
          FROM pg_snapshot_xip(p_to) x
         WHERE x >= pg_snapshot_xmax(p_from)
         ORDER BY x
         LIMIT 4
    ), gaps AS (
        SELECT x AS lo_xid, entry AS lo_entry,
               awa.xid_before(lead(x, 1, pg_snapshot_xmax(p_to)) OVER (ORDER BY x, entry)) AS hi_xid
          FROM (SELECT pg_snapshot_xmax(p_from), -1::bigint
                UNION ALL
                SELECT x, 9223372036854775807 FROM cuts) t(x, entry)
    ), ranges AS (
        SELECT x AS lo_xid, -1::bigint AS lo_entry, x AS hi_xid, 9223372036854775807 AS hi_entry
          FROM pg_snapshot_xip(p_from) x
         WHERE pg_visible_in_snapshot(x, p_to)
        UNION ALL
        SELECT g.lo_xid, g.lo_entry, g.hi_xid, 9223372036854775807 FROM gaps g
    ), clipped AS (
        SELECT CASE WHEN (r.lo_xid, r.lo_entry) < (p_xid, p_entry) THEN p_xid ELSE r.lo_xid END AS lo_xid,
               CASE WHEN (r.lo_xid, r.lo_entry) < (p_xid, p_entry) THEN p_entry ELSE r.lo_entry END AS lo_entry,
               r.hi_xid, r.hi_entry
          FROM ranges r
         WHERE (r.hi_xid, r.hi_entry) > (p_xid, p_entry) AND (r.lo_xid, r.lo_entry) < (r.hi_xid, r.hi_entry)
    )
    SELECT coalesce(array_agg(c.lo_xid), '{}'), coalesce(array_agg(c.lo_entry), '{}'),
           coalesce(array_agg(c.hi_xid), '{}'), coalesce(array_agg(c.hi_entry), '{}')
      INTO lo_xid, lo_entry, hi_xid, hi_entry
      FROM (SELECT * FROM clipped ORDER BY lo_xid, lo_entry) c;
END $$;

CREATE FUNCTION awa.pause_queue_v1(p_queue text, p_by text DEFAULT NULL::text, p_reason text DEFAULT NULL::text, OUT happened text, OUT is_quiet boolean) RETURNS record
    LANGUAGE plpgsql
    SET lock_timeout TO '2s'
    AS $$
BEGIN
    PERFORM awa.check_queue(p_queue);
    is_quiet := awa.lock_queue(p_queue, 1);
    INSERT INTO awa.queue_meta AS m (queue, paused_at, paused_by, pause_reason)
    VALUES (p_queue, clock_timestamp(), p_by, p_reason)
        ON CONFLICT (queue) DO UPDATE
       SET paused_at = coalesce(m.paused_at, excluded.paused_at), paused_by = p_by, pause_reason = p_reason
    RETURNING CASE WHEN m.paused_at < now() THEN 'nothing' ELSE 'paused' END INTO happened;
END $$;

CREATE FUNCTION awa.positions(p_entries bigint[], p_some bigint[]) RETURNS smallint[]
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT array_agg(m.n::smallint)
      FROM unnest(p_entries) WITH ORDINALITY AS m(entry_id, n) WHERE m.entry_id = ANY (p_some)
$$;

CREATE FUNCTION awa.promote_v1(p_floor timestamp with time zone, p_limit integer) RETURNS integer
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v_now timestamptz := clock_timestamp();    -- a value, which bounds the scan; a call would only filter it
    v_count integer;
    v_queues text[];
    v_places awa.job_uniques[];
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
        RETURNING unique_key, id, slot, lane, xid, entry_id, queue
    )
    SELECT count(*), array_agg(DISTINCT a.queue),
           array_agg(ROW(substr(a.unique_key, 1, 16), a.id, 63, a.slot, a.lane, a.xid, a.entry_id,
                         a.queue)::awa.job_uniques)
           FILTER (WHERE octet_length(a.unique_key) BETWEEN 16 AND 17)
      INTO v_count, v_queues, v_places FROM appended a;
    IF v_places IS NOT NULL THEN
        UPDATE awa.job_uniques u
           SET slot = p.slot, lane = p.lane, xid = p.xid, entry_id = p.entry_id, queue = p.queue
          FROM unnest(v_places) p
         WHERE u.key = p.key AND u.id = p.id
           AND u.key = ANY (ARRAY(SELECT t.key FROM awa.job_uniques t
                                   WHERE t.key = ANY (ARRAY(SELECT k.key FROM unnest(v_places) k))
                                   ORDER BY t.key FOR UPDATE SKIP LOCKED));
    END IF;
    IF v_count > 0 THEN
        PERFORM awa.ring(v_queues);
    END IF;
    RETURN v_count;
END $$;

CREATE FUNCTION awa.prune_v1(p_slot smallint, p_entries bigint, p_file oid) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET lock_timeout TO '10ms'
    AS $$
DECLARE
    v_outcome text := awa.prune_v2(p_slot, p_entries, p_file, '{}');
BEGIN
    RETURN CASE v_outcome WHEN 'awaited' THEN 'busy' ELSE v_outcome END;
END $$;

CREATE FUNCTION awa.prune_v2(p_slot smallint, p_entries bigint, p_file oid, p_examined bigint[]) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET lock_timeout TO '10ms'
    AS $_$
DECLARE
    v_found bigint;
    v_lowest bigint;             -- of the jobs that lie here
    v_highest bigint;
    v_parents bigint[];
    v_is_awaited boolean := false;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.prune needs READ COMMITTED: an older snapshot would not see what was written last'
              USING ERRCODE = 'AWA02';
    END IF;
    IF NOT pg_try_advisory_xact_lock(hashtextextended('awa.ring', 0)) THEN
        RETURN 'busy';
    END IF;
    IF p_slot = pg_sequence_last_value('awa.ring_seq') THEN
        RETURN 'current';
    END IF;
    BEGIN
        EXECUTE format('LOCK TABLE ONLY awa.jobs_%1$s, ONLY awa.claims_%1$s, ONLY awa.completions_%1$s,'
                       ' ONLY awa.attempt_ends_%1$s IN SHARE ROW EXCLUSIVE MODE', p_slot);
        EXECUTE format('SELECT count(*), min(id), max(id) FROM awa.jobs_%s', p_slot) INTO v_found, v_lowest, v_highest;
        IF v_found <> p_entries OR pg_relation_filenode(format('awa.jobs_%s', p_slot)::regclass) <> p_file THEN
            RETURN 'changed';
        END IF;
        EXECUTE format(
            'INSERT INTO awa.frontiers AS t (queue, claim_id, frontier, limits)
             WITH RECURSIVE queues AS (
                 (SELECT c.queue FROM awa.claims_%1$s c ORDER BY c.queue LIMIT 1)
                 UNION ALL
                 SELECT n.queue FROM queues q
                  CROSS JOIN LATERAL (SELECT c.queue FROM awa.claims_%1$s c WHERE c.queue > q.queue
                                       ORDER BY c.queue LIMIT 1) n
             )
             SELECT n.queue, n.claim_id, n.frontier, n.limits
               FROM queues q
              CROSS JOIN LATERAL (SELECT c.queue, c.claim_id, c.frontier, c.limits FROM awa.claims_%1$s c
                                   WHERE c.queue = q.queue
                                   ORDER BY c.claim_id DESC LIMIT 1) n
                 ON CONFLICT (queue) DO UPDATE SET claim_id = excluded.claim_id, frontier = excluded.frontier,
                                                limits = excluded.limits
              WHERE t.claim_id < excluded.claim_id', p_slot);
        EXECUTE format('LOCK TABLE ONLY awa.jobs_%1$s, ONLY awa.claims_%1$s, ONLY awa.completions_%1$s,'
                       ' ONLY awa.attempt_ends_%1$s IN ACCESS EXCLUSIVE MODE', p_slot);
        v_parents := ARRAY(SELECT DISTINCT p
                             FROM awa.waiting_jobs w CROSS JOIN LATERAL unnest(w.parents) p
                            WHERE w.waits_for = 'parent' AND p BETWEEN v_lowest AND v_highest
                              AND (w.id IN (SELECT e FROM unnest(p_examined) e)) IS NOT TRUE
                            LIMIT 101);
        IF cardinality(v_parents) > 100 THEN
            v_is_awaited := true;
        ELSIF cardinality(v_parents) > 0 THEN
            EXECUTE format('SELECT EXISTS (SELECT FROM awa.jobs_%s j WHERE j.id = ANY ($1))', p_slot)
               INTO v_is_awaited USING v_parents;
        END IF;
        IF v_is_awaited THEN
            RAISE EXCEPTION 'awaited' USING ERRCODE = 'AWA09';
        END IF;
        EXECUTE format('TRUNCATE ONLY awa.jobs_%1$s, ONLY awa.claims_%1$s, ONLY awa.completions_%1$s,'
                       ' ONLY awa.attempt_ends_%1$s', p_slot);
        UPDATE awa.ring SET opened_at = NULL, sealed_at = NULL WHERE slot = p_slot;
    EXCEPTION
        WHEN lock_not_available OR deadlock_detected THEN
            RETURN 'busy';
        WHEN SQLSTATE 'AWA09' THEN
            RETURN 'awaited';
    END;
    RETURN 'pruned';
END $_$;

CREATE FUNCTION awa.purge_queue_v1(p_queue text, p_from jsonb DEFAULT NULL::jsonb, p_limit integer DEFAULT 500, OUT happened text, OUT waiting integer, OUT ended integer, OUT go_on jsonb) RETURNS record
    LANGUAGE sql
    SET jit TO 'off'
    AS $$
    SELECT s.happened, s.waiting, s.ended, s.go_on FROM awa.clear_step(p_queue, true, NULL, p_from, p_limit) s
$$;

CREATE FUNCTION awa.queue_counts_v1(p_queues text[] DEFAULT NULL::text[], p_exact integer DEFAULT 10000, p_batches integer DEFAULT 1000, p_pages integer DEFAULT 500) RETURNS TABLE(queue text, state text, n bigint, is_exact boolean)
    LANGUAGE plpgsql STABLE
    SET plan_cache_mode TO 'force_custom_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    SET max_parallel_workers_per_gather TO '0'
    AS $_$
#variable_conflict use_column
DECLARE
    v_queues text[] := coalesce(p_queues, ARRAY(SELECT q FROM awa.queue_names() q));
    v_has_ends smallint[] := ARRAY(SELECT s.slot::smallint FROM generate_series(0, 7) s(slot)
                                    WHERE EXISTS (SELECT FROM awa.attempt_ends e
                                                   WHERE e.slot = s.slot AND e.claim_id IS NULL OFFSET 0));
    v_slots smallint[];
    v_table text;
BEGIN
    FOREACH v_table IN ARRAY ARRAY['waiting_jobs', 'ended_jobs'] LOOP
        RETURN QUERY EXECUTE replace($q$
            WITH page AS MATERIALIZED (
                SELECT * FROM awa.sample_pages($4, $3) p WHERE p.weight > 1
            ), sampled AS MATERIALIZED (
                SELECT t.queue, t.state, (sum(t.n) * max(p.weight))::bigint AS guess, count(*) AS pages
                  FROM page p
                 CROSS JOIN LATERAL (SELECT t.queue, t.state, count(*) AS n FROM awa.{table} t
                                      WHERE t.ctid >= p.first AND t.ctid < p.behind GROUP BY 1, 2) t
                 GROUP BY 1, 2
            ), wanted AS (
                SELECT q.queue, s.state, coalesce(t.guess, 0) AS guess,
                       CASE WHEN NOT EXISTS (SELECT FROM page) THEN NULL
                            WHEN t.guess >= 4 * $2 AND t.pages >= 8 THEN 0
                            ELSE $2 + 1 END AS most
                  FROM unnest($1) q(queue)
                 CROSS JOIN unnest($5) s(state)
                  LEFT JOIN sampled t ON t.queue = q.queue AND t.state = s.state
            )
            SELECT w.queue, w.state, CASE WHEN c.n = w.most THEN greatest(w.guess, c.n) ELSE c.n END,
                   (c.n = w.most) IS NOT TRUE
              FROM wanted w
             CROSS JOIN LATERAL (SELECT count(*) AS n
                                   FROM (SELECT FROM awa.{table} t
                                          WHERE t.queue = w.queue AND t.state = w.state LIMIT w.most) t) c
             WHERE c.n > 0 OR w.most = 0
        $q$, '{table}', v_table)
        USING v_queues, p_exact, p_pages, v_table,
              CASE v_table WHEN 'waiting_jobs' THEN ARRAY['scheduled', 'available', 'retryable', 'waiting_external']
                           ELSE ARRAY['failed', 'cancelled'] END;
    END LOOP;
    -- Only of segments in which anything is available, if any is large: that may be few of them.
    SELECT array_agg(s.slot) FILTER (WHERE s.pages > 0) INTO v_slots
      FROM (SELECT n::smallint AS slot,
                   pg_relation_size(to_regclass('awa.jobs_' || n)) / current_setting('block_size')::bigint AS pages
              FROM generate_series(0, 7) n) s
    HAVING sum(s.pages) > p_pages;
    IF v_slots IS NOT NULL THEN
        WITH ranges AS MATERIALIZED (
            SELECT q.queue, r.* FROM unnest(v_queues) q(queue) CROSS JOIN LATERAL awa.unclaimed_ranges(q.queue) r
        )
        SELECT array_agg(u) INTO v_slots
          FROM unnest(v_slots) u
         WHERE EXISTS (SELECT FROM ranges r
                        CROSS JOIN LATERAL (SELECT FROM awa.jobs j
                                             WHERE j.slot = u AND j.queue = r.queue AND j.lane = r.lane
                                               AND (j.xid, j.entry_id) > (r.lo_xid, r.lo_entry)
                                               AND (j.xid, j.entry_id) < (r.hi_xid, r.hi_entry)
                                             LIMIT 1) j);
    END IF;
    -- Past the frontiers. Whether an entry has its own end is looked for only in slots in which anything ended so: it
    -- takes longer than the counting.
    RETURN QUERY
        WITH page AS MATERIALIZED (
            SELECT * FROM awa.sample_pages('jobs', p_pages, coalesce(v_slots, '{}')) p WHERE p.weight > 1
        ), frontier AS MATERIALIZED (
            SELECT q.queue, f.*
              FROM unnest(v_queues) q(queue) CROSS JOIN LATERAL unnest(awa.frontier_of(q.queue)) f
             WHERE EXISTS (SELECT FROM page)
        ), sampled AS MATERIALIZED (
            SELECT t.queue, (sum(t.n) * max(p.weight))::bigint AS guess, count(*) AS pages
              FROM page p
             CROSS JOIN LATERAL (
                   SELECT j.queue, count(*) AS n
                     FROM (SELECT j.slot, j.queue, j.lane, j.xid, j.entry_id FROM awa.jobs j
                            WHERE j.slot = p.slot AND j.ctid >= p.first AND j.ctid < p.behind AND j.lane > 0 OFFSET 0) j
                     LEFT JOIN frontier f ON f.queue = j.queue AND f.lane = j.lane
                    WHERE NOT coalesce(pg_visible_in_snapshot(j.xid, f.page_from), false)
                      AND NOT coalesce(pg_visible_in_snapshot(j.xid, f.page_to)
                                       AND (j.xid, j.entry_id) <= (f.last_xid, f.last_entry), false)
                      AND NOT (j.slot = ANY (v_has_ends)
                               AND EXISTS (SELECT FROM awa.attempt_ends e
                                            WHERE e.slot = j.slot AND e.entry_id = j.entry_id OFFSET 0))
                    GROUP BY 1) t
             GROUP BY 1
        ), wanted AS (
            SELECT q.queue, coalesce(t.guess, 0) AS guess,
                   CASE WHEN NOT EXISTS (SELECT FROM page) THEN NULL
                        WHEN t.guess >= 4 * p_exact AND t.pages >= 8 THEN 0
                        ELSE p_exact + 1 END AS most
              FROM unnest(v_queues) q(queue)
              LEFT JOIN sampled t ON t.queue = q.queue
        )
        SELECT w.queue, 'available', CASE WHEN c.seen = w.most THEN greatest(w.guess, c.n) ELSE c.n END,
               (c.seen = w.most) IS NOT TRUE
          FROM wanted w
         CROSS JOIN LATERAL (
               SELECT count(*) AS seen,
                      count(*) FILTER (WHERE NOT (j.slot = ANY (v_has_ends)
                                                  AND EXISTS (SELECT FROM awa.attempt_ends e
                                                               WHERE e.slot = j.slot AND e.entry_id = j.entry_id
                                                              OFFSET 0))) AS n
                 FROM (SELECT j.slot, j.entry_id
                         FROM awa.unclaimed_ranges(w.queue) r
                        CROSS JOIN LATERAL (
                              SELECT j.slot, j.entry_id FROM awa.jobs j
                               WHERE j.queue = w.queue AND j.lane = r.lane
                                 AND (j.xid, j.entry_id) > (r.lo_xid, r.lo_entry)
                                 AND (j.xid, j.entry_id) < (r.hi_xid, r.hi_entry)
                                 AND pg_visible_in_snapshot(j.xid, r.page_to)
                               LIMIT w.most) j
                        LIMIT w.most) j) c
         WHERE c.n > 0 OR c.seen = w.most;
    -- The members of open claims, without those that are completed or have ended; of as many claims as there may be jobs.
    RETURN QUERY
        WITH open AS MATERIALIZED (
            SELECT c.slot, c.claim_id, c.queue, cardinality(c.entry_ids) AS size FROM awa.open_claims c
             WHERE c.queue = ANY (v_queues)
             LIMIT p_exact + 1
        )
        SELECT o.queue, 'running', sum(o.size - d.n - e.n)::bigint, (SELECT count(*) FROM open) <= p_exact
          FROM open o
         CROSS JOIN LATERAL (SELECT coalesce(sum(cardinality(x.idx)), 0) AS n FROM awa.completions x
                              WHERE x.slot = o.slot AND x.claim_id = o.claim_id) d
         CROSS JOIN LATERAL (SELECT count(*) AS n FROM awa.attempt_ends e
                              WHERE e.slot = o.slot AND e.claim_id = o.claim_id) e
         GROUP BY o.queue;
    -- Claim by claim. Of those on the pages only so many are looked into, each standing for some more: a claim may have
    -- a thousand jobs or one, and a page fifty claims.
    RETURN QUERY
        WITH page AS MATERIALIZED (
            SELECT * FROM awa.sample_pages('claims', p_pages, '{0, 1, 2, 3, 4, 5, 6, 7}')
        ), claim AS MATERIALIZED (
            SELECT t.*, t.total / (2 * p_pages) + 1 AS every
              FROM (SELECT p.first, p.weight, c.slot, c.claim_id, c.queue, row_number() OVER () AS nr,
                           count(*) OVER () AS total
                      FROM page p
                     CROSS JOIN LATERAL (SELECT c.slot, c.claim_id, c.queue FROM awa.claims c
                                          WHERE c.slot = p.slot AND c.ctid >= p.first AND c.ctid < p.behind OFFSET 0) c
                   ) t
        ), sampled AS MATERIALIZED (
            SELECT c.queue, (sum(d.n) * max(c.weight * c.every))::bigint AS guess,
                   count(*) * max(c.weight * c.every) AS claims, count(DISTINCT c.first) AS pages
              FROM claim c
             CROSS JOIN LATERAL awa.completed_of_claim(c.slot, c.claim_id) d(n)
             WHERE c.nr % c.every = 0
             GROUP BY 1
        ), wanted AS (
            SELECT q.queue, coalesce(t.guess, 0) AS guess,
                   CASE WHEN t.claims >= 4 * p_batches AND t.pages >= 8 THEN 0
                        ELSE p_batches + 1 END AS most
              FROM unnest(v_queues) q(queue)
              LEFT JOIN sampled t ON t.queue = q.queue
        )
        SELECT w.queue, 'completed', CASE WHEN c.seen = w.most THEN greatest(w.guess, c.n) ELSE c.n END,
               (c.seen = w.most) IS NOT TRUE
          FROM wanted w
         CROSS JOIN LATERAL (
               SELECT count(*) AS seen, coalesce(sum(d.n), 0)::bigint AS n
                 FROM (SELECT c.slot, c.claim_id FROM awa.claims c
                        WHERE c.queue = w.queue ORDER BY c.claim_id DESC LIMIT w.most) c
                CROSS JOIN LATERAL awa.completed_of_claim(c.slot, c.claim_id) d(n)) c
         WHERE c.n > 0 OR c.seen = w.most;
END $_$;

CREATE FUNCTION awa.queue_names() RETURNS SETOF text
    LANGUAGE sql STABLE ROWS 20
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
    WITH RECURSIVE entries AS (
        (SELECT t.queue FROM awa.jobs t ORDER BY t.queue LIMIT 1)
        UNION ALL
        SELECT n.queue FROM entries q
         CROSS JOIN LATERAL (SELECT t.queue FROM awa.jobs t WHERE t.queue > q.queue ORDER BY t.queue LIMIT 1) n
    ), waiting AS (
        (SELECT t.queue FROM awa.waiting_jobs t ORDER BY t.queue LIMIT 1)
        UNION ALL
        SELECT n.queue FROM waiting q
         CROSS JOIN LATERAL (SELECT t.queue FROM awa.waiting_jobs t WHERE t.queue > q.queue ORDER BY t.queue LIMIT 1) n
    ), ended AS (
        (SELECT t.queue FROM awa.ended_jobs t ORDER BY t.queue LIMIT 1)
        UNION ALL
        SELECT n.queue FROM ended q
         CROSS JOIN LATERAL (SELECT t.queue FROM awa.ended_jobs t WHERE t.queue > q.queue ORDER BY t.queue LIMIT 1) n
    )
    SELECT queue FROM entries UNION SELECT queue FROM waiting UNION SELECT queue FROM ended
$$;

CREATE FUNCTION awa.release_grants(p_ids bigint[]) RETURNS void
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v_queues text[];
BEGIN
    WITH released AS (
        UPDATE awa.grants g SET is_over = true WHERE g.id = ANY (p_ids) AND NOT g.is_over RETURNING g.queue
    )
    SELECT array_agg(DISTINCT r.queue) INTO v_queues FROM released r;
    IF v_queues IS NOT NULL THEN
        PERFORM awa.ring(v_queues);
    END IF;
END $$;

CREATE FUNCTION awa.replace_waiting(p_id bigint, p_queue text, p_priority smallint, p_kind text, p_args json, p_max_attempts smallint, p_timeout_ms integer, p_tags text[], p_metadata json, p_run_at timestamp with time zone, p_follow_ups json, p_parents bigint[], p_on_parent_failure text, p_notify boolean) RETURNS boolean
    LANGUAGE sql
    AS $$
    SELECT awa.replace_waiting_v2(p_id, p_queue, p_priority, p_kind, p_args, p_max_attempts, p_timeout_ms, p_tags,
                                  p_metadata, p_run_at, p_follow_ups, p_parents, p_on_parent_failure, NULL, NULL, NULL,
                                  p_notify)
$$;

CREATE FUNCTION awa.replace_waiting_v2(p_id bigint, p_queue text, p_priority smallint, p_kind text, p_args json, p_max_attempts smallint, p_timeout_ms integer, p_tags text[], p_metadata json, p_run_at timestamp with time zone, p_follow_ups json, p_parents bigint[], p_on_parent_failure text, p_concurrency_key text, p_ordering_key text, p_expires_at timestamp with time zone, p_notify boolean) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
DECLARE
    w awa.waiting_jobs;
    v_waits_for text;
    v_leaves_order boolean;      -- it had an ordering key, and has it no more, or in another queue
BEGIN
    IF p_parents IS NOT NULL AND awa.is_circle(p_id, p_parents) THEN
        RETURN false;
    END IF;
    SELECT * INTO w FROM awa.waiting_jobs t
     WHERE t.id = p_id AND t.state IN ('scheduled', 'retryable', 'available') FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    v_leaves_order := w.ordering_key IS NOT NULL
                      AND (w.queue <> p_queue OR w.ordering_key IS DISTINCT FROM p_ordering_key);
    v_waits_for := CASE
        WHEN p_parents IS NOT NULL OR w.waits_for = 'parent' THEN 'parent'
        WHEN p_run_at IS NOT NULL THEN 'time'
        WHEN w.waits_for = 'kind' THEN 'kind'
        WHEN w.waits_for IN ('key', 'order') AND w.queue = p_queue
             AND w.ordering_key IS NOT DISTINCT FROM p_ordering_key
             AND (w.waits_for = 'order' OR w.concurrency_key = p_concurrency_key) THEN w.waits_for
        ELSE 'time' END;
    UPDATE awa.waiting_jobs t
       SET waits_for = v_waits_for,
           run_at = CASE v_waits_for WHEN 'time' THEN coalesce(p_run_at, clock_timestamp())
                                     WHEN 'parent' THEN p_run_at END,
           wait_key = CASE WHEN v_waits_for = 'kind' THEN p_kind
                           WHEN v_waits_for IN ('key', 'order') THEN t.wait_key END,
           state = CASE WHEN t.state = 'available' AND v_waits_for IN ('time', 'parent') THEN 'scheduled'
                        ELSE t.state END,
           parents = coalesce(p_parents, t.parents),
           on_parent_failure = CASE WHEN p_parents IS NULL THEN t.on_parent_failure ELSE p_on_parent_failure END,
           queue = p_queue, priority = p_priority, kind = p_kind, args = p_args, max_attempts = p_max_attempts,
           timeout_ms = p_timeout_ms, tags = p_tags, metadata = p_metadata, follow_ups = p_follow_ups,
           concurrency_key = p_concurrency_key, ordering_key = p_ordering_key, expires_at = p_expires_at
     WHERE t.id = p_id;
    IF v_leaves_order THEN        -- a job that has begun before keeps others from running while it waits
        -- as awa.release_grants, but without what claims remove: this transaction may stay open for long
        UPDATE awa.grants g SET is_over = true WHERE g.id = p_id AND g.scope = 'order' AND NOT g.is_over;
        IF FOUND AND p_notify THEN
            PERFORM awa.ring(ARRAY[w.queue]);
        END IF;
    END IF;
    IF p_notify AND v_waits_for = 'kind' THEN
        PERFORM pg_notify(awa.channel(), chr(1) || p_queue);     -- as in awa.move_v1
    ELSIF p_notify AND v_waits_for IN ('time', 'parent') THEN
        PERFORM awa.ring(ARRAY['']);
    END IF;
    RETURN true;
END $$;

CREATE FUNCTION awa.rescue_v1(p_runtime bigint, p_limit integer, p_skip integer DEFAULT 0, OUT tried integer, OUT ended integer, OUT blocked integer) RETURNS record
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    SET lock_timeout TO '20ms'
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

CREATE FUNCTION awa.resolve_parents_v1(p_ids bigint[], p_states jsonb, OUT started bigint[], OUT cancelled bigint[], OUT discarded bigint[], OUT skipped bigint[]) RETURNS record
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    v_now timestamptz := clock_timestamp();
    v_queues text[];
    v_is_soon boolean;
    v_places awa.job_uniques[];
    v_ids bigint[];
    v_outcomes text[];
    v_jobs json[];
    v_keys bytea[];
BEGIN
    WITH held AS MATERIALIZED (
        SELECT w.id, w.parents, w.on_parent_failure, w.run_at FROM awa.waiting_jobs w
         WHERE w.id = ANY (p_ids) AND w.waits_for = 'parent'
         ORDER BY w.id
           FOR UPDATE SKIP LOCKED
    ), decided AS MATERIALIZED (
        SELECT h.id, p.open, p.failed,
               CASE WHEN p.failed IS NOT NULL AND h.on_parent_failure IS DISTINCT FROM 'run'
                    THEN CASE h.on_parent_failure WHEN 'discard' THEN 'nowhere' ELSE 'ended' END
                    WHEN p.open IS NOT NULL THEN 'stays'
                    WHEN h.run_at > v_now THEN 'time'
                    ELSE 'main' END AS goes
          FROM held h
         CROSS JOIN LATERAL (
               SELECT array_agg(u.id ORDER BY u.n) FILTER (WHERE NOT p_states ? u.id::text) AS open,
                      min(u.id) FILTER (WHERE p_states->>u.id::text <> 'completed') AS failed
                 FROM unnest(h.parents) WITH ORDINALITY AS u(id, n)) p
    ), taken AS (
        DELETE FROM awa.waiting_jobs w
         WHERE w.id = ANY (ARRAY(SELECT d.id FROM decided d WHERE d.goes IN ('ended', 'nowhere', 'main')))
        RETURNING w.*
    ), left_waiting AS (
        UPDATE awa.waiting_jobs w
           SET (waits_for, parents, on_parent_failure) = (
                   SELECT CASE d.goes WHEN 'time' THEN 'time' ELSE 'parent' END, d.open,
                          CASE d.goes WHEN 'stays' THEN w.on_parent_failure END
                     FROM decided d WHERE d.id = w.id)
         WHERE w.id = ANY (ARRAY(SELECT d.id FROM decided d WHERE d.goes IN ('stays', 'time')))
        RETURNING w.waits_for, w.run_at
    ), appended AS (
        INSERT INTO awa.jobs (id, created_at, lane, priority, attempt, max_attempts, timeout_ms, queue, kind, args,
                              metadata, tags, concurrency_key, ordering_key, unique_key, expires_at, follow_ups, history)
        SELECT t.id, t.created_at, 2 * t.priority + 1, t.priority, t.attempt, t.max_attempts, t.timeout_ms, t.queue,
               t.kind, t.args, t.metadata, t.tags, t.concurrency_key, t.ordering_key, t.unique_key, t.expires_at,
               t.follow_ups, t.history
          FROM (SELECT t.* FROM taken t JOIN decided d USING (id) WHERE d.goes = 'main' ORDER BY t.id) t
        RETURNING unique_key, id, slot, lane, xid, entry_id, queue
    ), judged AS MATERIALIZED (
        SELECT t.*, d.goes, d.failed, f.jobs, f.flaw
          FROM taken t
          JOIN decided d USING (id)
          LEFT JOIN LATERAL awa.follow_ups_after(CASE d.goes WHEN 'ended' THEN t.follow_ups END, 'cancelled') f ON true
         WHERE d.goes IN ('ended', 'nowhere')
    ), ended AS (
        INSERT INTO awa.ended_jobs (id, created_at, state, priority, attempt, max_attempts, timeout_ms, queue, kind, args,
                                    metadata, tags, concurrency_key, ordering_key, unique_key, follow_ups, history)
        SELECT t.id, t.created_at, 'cancelled', t.priority, t.attempt, t.max_attempts, t.timeout_ms, t.queue, t.kind,
               t.args, t.metadata, t.tags, t.concurrency_key, t.ordering_key, t.unique_key, t.follow_ups,
               awa.add_history(t.history, t.attempt, 'cancelled', v_now, NULL, NULL, awa.with_flaw(awa.cancel_error(
                   format('it was to run after job %s, which %s', t.failed,
                          CASE p_states->>t.failed::text WHEN 'failed' THEN 'has failed'
                               WHEN 'cancelled' THEN 'was cancelled' ELSE 'is gone: its history was deleted' END), NULL),
                   t.flaw))
          FROM judged t WHERE t.goes = 'ended'
    ), conclusion AS (
        SELECT array_agg(j.id) AS ids, array_agg('cancelled'::text) AS outcomes, array_agg(j.jobs) AS jobs,
               array_agg(j.unique_key) AS keys
          FROM judged j
    ), destination AS (
        SELECT array_agg(DISTINCT a.queue) AS queues,
               array_agg(ROW(substr(a.unique_key, 1, 16), a.id, 63, a.slot, a.lane, a.xid, a.entry_id,
                             a.queue)::awa.job_uniques)
               FILTER (WHERE octet_length(a.unique_key) BETWEEN 16 AND 17) AS places
          FROM appended a
    )
    SELECT coalesce(array_agg(d.id) FILTER (WHERE d.goes IN ('main', 'time')), '{}'),
           coalesce(array_agg(d.id) FILTER (WHERE d.goes = 'ended'), '{}'),
           coalesce(array_agg(d.id) FILTER (WHERE d.goes = 'nowhere'), '{}'),
           ARRAY(SELECT w.id FROM awa.waiting_jobs w WHERE w.id = ANY (p_ids) AND w.waits_for = 'parent'
                 EXCEPT SELECT h.id FROM held h),
           (SELECT t.queues FROM destination t), (SELECT t.places FROM destination t), (SELECT c.ids FROM conclusion c),
           (SELECT c.outcomes FROM conclusion c), (SELECT c.jobs FROM conclusion c), (SELECT c.keys FROM conclusion c),
           (SELECT bool_or(l.waits_for = 'time' AND l.run_at < v_now + interval '1.5 s') FROM left_waiting l)
      INTO started, cancelled, discarded, skipped, v_queues, v_places, v_ids, v_outcomes, v_jobs, v_keys,
           v_is_soon
      FROM decided d;
    IF cardinality(cancelled) + cardinality(discarded) > 0 THEN
        PERFORM awa.conclude(v_ids, v_outcomes, v_jobs, v_keys);
    END IF;
    IF v_places IS NOT NULL THEN        -- as awa.promote_v1 tells them
        UPDATE awa.job_uniques u
           SET slot = p.slot, lane = p.lane, xid = p.xid, entry_id = p.entry_id, queue = p.queue
          FROM unnest(v_places) p
         WHERE u.key = p.key AND u.id = p.id
           AND u.key = ANY (ARRAY(SELECT t.key FROM awa.job_uniques t
                                   WHERE t.key = ANY (ARRAY(SELECT k.key FROM unnest(v_places) k))
                                   ORDER BY t.key FOR UPDATE SKIP LOCKED));
    END IF;
    IF v_queues IS NOT NULL THEN
        PERFORM awa.ring(v_queues);
    END IF;
    IF v_is_soon THEN
        PERFORM pg_notify(awa.channel(), '');    -- the caller may hold the leader's bell itself, which hides it from ring
    END IF;
END $$;

CREATE FUNCTION awa.result_channel() RETURNS text
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT 'awa_' || left(encode(sha256(convert_to('awa.result', 'UTF8')), 'hex'), 16)
$$;

CREATE FUNCTION awa.resume_queue_v1(p_queue text) RETURNS text
    LANGUAGE plpgsql
    SET lock_timeout TO '2s'
    AS $$
BEGIN
    PERFORM awa.check_queue(p_queue);
    UPDATE awa.queue_meta m SET paused_at = NULL, paused_by = NULL, pause_reason = NULL
     WHERE m.queue = p_queue AND m.paused_at IS NOT NULL;
    IF NOT FOUND THEN
        RETURN 'nothing';
    END IF;
    PERFORM awa.call_for_help(p_queue);
    RETURN 'resumed';
END $$;

CREATE FUNCTION awa.retry_v1(p_id bigint, OUT happened text, OUT state text, OUT existing_id bigint, OUT unique_key bytea) RETURNS record
    LANGUAGE plpgsql SECURITY DEFINER
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    SET lock_timeout TO '10ms'
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
#variable_conflict use_column
DECLARE
    v_until timestamptz := clock_timestamp() + interval '1 s';
    v_entry bigint;
    v_slot smallint;
    v_lane smallint;
    p record;
    j record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.retry needs READ COMMITTED: an older snapshot would not see where a job has gone'
              USING ERRCODE = 'AWA02';
    END IF;
    LOOP
        BEGIN
            LOCK TABLE awa.jobs IN ACCESS SHARE MODE;
            -- in one snapshot; a row that retention has deleted leaves an end in the ring
            SELECT l.place, l.state, w.waits_for, e.id IS NOT NULL AS is_kept INTO p
              FROM awa.locate(p_id) l
              LEFT JOIN awa.waiting_jobs w ON w.id = p_id
              LEFT JOIN awa.ended_jobs e ON e.id = p_id;
            state := p.state;
            IF p.place IS NULL OR (p.state IN ('failed', 'cancelled') AND NOT p.is_kept) THEN
                happened := 'not_found';
                state := NULL;
                RETURN;
            ELSIF p.place = 'available' OR (p.place = 'waiting' AND p.state = 'available') THEN
                happened := 'nothing';
                RETURN;
            ELSIF coalesce(p.state, '') NOT IN ('failed', 'cancelled') AND p.waits_for IS DISTINCT FROM 'time' THEN
                happened := 'refused';
                RETURN;
            END IF;
            IF p.is_kept THEN
                SELECT e.queue, e.priority, e.unique_key, awa.is_suspect(e.history) AS is_suspect INTO j
                  FROM awa.ended_jobs e WHERE e.id = p_id FOR UPDATE SKIP LOCKED;
            ELSE
                SELECT w.queue, w.priority, w.unique_key, awa.is_suspect(w.history) AS is_suspect INTO j
                  FROM awa.waiting_jobs w WHERE w.id = p_id AND w.waits_for = 'time' FOR UPDATE SKIP LOCKED;
            END IF;
            IF FOUND THEN
                v_entry := nextval('awa.entry_id_seq');
                v_slot := pg_sequence_last_value('awa.ring_seq');
                v_lane := 2 * j.priority + (NOT j.is_suspect)::integer;
                IF p.is_kept AND octet_length(j.unique_key) BETWEEN 16 AND 17 THEN
                    -- its own row, which was not removed yet, or is held in that state too
                    UPDATE awa.job_uniques u
                       SET states = awa.states_of(j.unique_key), slot = v_slot, lane = v_lane,
                           xid = pg_current_xact_id(), entry_id = v_entry, queue = j.queue
                     WHERE u.key = substr(j.unique_key, 1, 16) AND u.id = p_id;
                    IF NOT FOUND THEN
                        SELECT t.holders[1] INTO existing_id
                          FROM awa.take_all_keys(ARRAY[ROW(substr(j.unique_key, 1, 16), p_id,
                                                           awa.states_of(j.unique_key), v_slot, v_lane,
                                                           pg_current_xact_id(), v_entry, j.queue)::awa.job_uniques],
                                                 ARRAY[false]) t;
                        IF existing_id <> p_id THEN
                            happened := 'conflict';
                            unique_key := substr(j.unique_key, 1, 16);
                            RETURN;
                        END IF;
                        existing_id := NULL;
                    END IF;
                END IF;
                WITH ended AS (
                    DELETE FROM awa.ended_jobs e WHERE p.is_kept AND e.id = p_id RETURNING e.*
                ), waiting AS (
                    DELETE FROM awa.waiting_jobs w WHERE NOT p.is_kept AND w.id = p_id RETURNING w.*
                ), taken AS (
                    SELECT e.id, e.created_at, e.priority, e.max_attempts, e.timeout_ms, e.queue, e.kind, e.args,
                           e.metadata, e.tags, e.concurrency_key, e.ordering_key, e.unique_key,
                           NULL::timestamptz AS expires_at, e.follow_ups, e.history
                      FROM ended e
                    UNION ALL
                    SELECT w.id, w.created_at, w.priority, w.max_attempts, w.timeout_ms, w.queue, w.kind, w.args,
                           w.metadata, w.tags, w.concurrency_key, w.ordering_key, w.unique_key, w.expires_at,
                           w.follow_ups, w.history
                      FROM waiting w
                )
                INSERT INTO awa.jobs (entry_id, id, slot, created_at, lane, priority, max_attempts, timeout_ms, queue,
                                      kind, args, metadata, tags, concurrency_key, ordering_key, unique_key,
                                      expires_at, follow_ups, history)
                SELECT v_entry, t.id, v_slot, t.created_at, v_lane, t.priority, t.max_attempts, t.timeout_ms, t.queue,
                       t.kind, t.args, t.metadata, t.tags, t.concurrency_key, t.ordering_key, t.unique_key,
                       t.expires_at, t.follow_ups, t.history
                  FROM taken t;
                PERFORM awa.ring(ARRAY[j.queue]);
                happened := 'retried';
                state := 'available';
                RETURN;
            END IF;
            RAISE EXCEPTION 'job % is held, or has moved on', p_id USING ERRCODE = '55P03';
        EXCEPTION WHEN lock_not_available THEN
            existing_id := NULL;        -- the locks are given back
        END;
        IF clock_timestamp() > v_until THEN
            happened := 'busy';
            RETURN;
        END IF;
        PERFORM pg_sleep(0.01 + 0.03 * random());
    END LOOP;
END $$;

CREATE FUNCTION awa.ring(p_queues text[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    v_queue text;
    v_bell bigint;
BEGIN
    FOREACH v_queue IN ARRAY p_queues LOOP
        v_bell := hashtextextended('awa.bell:' || v_queue, 0);
        IF pg_try_advisory_lock_shared(v_bell) THEN
            PERFORM pg_advisory_unlock_shared(v_bell);
        ELSE
            PERFORM pg_notify(awa.channel(), v_queue);
        END IF;
    END LOOP;
END $$;

CREATE FUNCTION awa.rotate_v1() RETURNS smallint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    v_current smallint;
    v_slot smallint;
    v_bytes bigint;
BEGIN
    IF NOT pg_try_advisory_xact_lock(hashtextextended('awa.ring', 0)) THEN
        RETURN NULL;
    END IF;
    v_current := pg_sequence_last_value('awa.ring_seq');
    FOR v_step IN 1..7 LOOP
        v_slot := (v_current + v_step) % 8;
        SELECT sum(pg_relation_size(format('awa.%s_%s', t, v_slot)::regclass)) INTO v_bytes
          FROM unnest(ARRAY['jobs', 'claims', 'completions', 'attempt_ends']) t;
        IF v_bytes = 0 THEN
            PERFORM setval('awa.ring_seq', v_slot);
            UPDATE awa.ring r
               SET opened_at = CASE WHEN r.slot = v_slot THEN clock_timestamp() ELSE r.opened_at END,
                   sealed_at = CASE WHEN r.slot = v_slot THEN NULL
                                    WHEN r.slot = v_current THEN clock_timestamp() ELSE r.sealed_at END
             WHERE r.slot IN (v_slot, v_current);
            RETURN v_slot;
        END IF;
    END LOOP;
    RETURN NULL;
END $$;

CREATE FUNCTION awa.sample_pages(p_table text, p_pages integer, p_slots smallint[] DEFAULT NULL::smallint[]) RETURNS TABLE(slot smallint, first tid, behind tid, weight bigint)
    LANGUAGE plpgsql STABLE
    AS $$
DECLARE
    v_sizes bigint[] := ARRAY(
        SELECT coalesce(pg_relation_size(to_regclass('awa.' || p_table || s.suffix)), 0)
               / current_setting('block_size')::bigint
          FROM (SELECT '' AS suffix WHERE p_slots IS NULL
                 UNION ALL
                SELECT '_' || u FROM unnest(p_slots) u) s);
    v_step bigint := greatest((SELECT sum(u) FROM unnest(v_sizes) u) / p_pages, 1);
BEGIN
    RETURN QUERY
        SELECT p_slots[s.n], format('(%s,0)', b.page - s.before)::tid, format('(%s,0)', b.page - s.before + 1)::tid, v_step
          FROM (SELECT u.size, u.n, (sum(u.size) OVER (ORDER BY u.n))::bigint - u.size AS before
                  FROM unnest(v_sizes) WITH ORDINALITY u(size, n)) s
         CROSS JOIN LATERAL (SELECT v_step * g + (hashint8(g) & 2147483647) % v_step AS page
                               FROM generate_series(s.before / v_step, (s.before + s.size) / v_step) g) b
         WHERE b.page >= s.before AND b.page < s.before + s.size;
END $$;

CREATE FUNCTION awa.set_aside(p_queue text, p_slots smallint[], p_lanes smallint[], p_xids xid8[], p_entries bigint[], p_whys text[]) RETURNS boolean
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
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

CREATE FUNCTION awa.set_priority_v1(p_id bigint, p_priority integer, OUT happened text, OUT state text) RETURNS record
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    SET lock_timeout TO '10ms'
    AS $$
DECLARE
    v_until timestamptz := clock_timestamp() + interval '1 s';
    v_priority smallint;
    p record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.set_priority needs READ COMMITTED: an older snapshot would miss a claim'
              USING ERRCODE = 'AWA02';
    END IF;
    IF p_priority IS NULL OR p_priority NOT BETWEEN 1 AND 4 THEN
        RAISE EXCEPTION 'p_priority is 1, which runs first, to 4, not %', coalesce(p_priority::text, 'NULL')
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
            ELSIF p.place = 'waiting' THEN
                SELECT w.priority INTO v_priority FROM awa.waiting_jobs w WHERE w.id = p_id FOR UPDATE SKIP LOCKED;
                IF FOUND THEN
                    UPDATE awa.waiting_jobs w SET priority = p_priority WHERE w.id = p_id AND w.priority <> p_priority;
                    happened := CASE WHEN FOUND THEN 'reprioritised' ELSE 'nothing' END;
                    RETURN;
                END IF;
            ELSIF pg_try_advisory_xact_lock(hashtextextended('awa.queue:' || p.queue, 0)) THEN
                SELECT e.priority INTO v_priority FROM awa.jobs e
                 WHERE e.slot = p.slot AND e.queue = p.queue AND e.lane = p.lane AND e.xid = p.xid
                   AND e.entry_id = p.entry_id;
                IF v_priority = p_priority AND p.lane / 2 = p_priority THEN
                    happened := 'nothing';
                    RETURN;
                END IF;
                INSERT INTO awa.jobs (id, created_at, lane, priority, attempt, max_attempts, timeout_ms, queue, kind,
                                      args, metadata, tags, concurrency_key, ordering_key, unique_key, expires_at,
                                      follow_ups, history)
                SELECT j.id, coalesce(j.created_at, j.available_at),
                       2 * p_priority
                       + (NOT awa.is_suspect(j.history)
                          -- whose turn has come: others wait for it
                          AND NOT EXISTS (SELECT FROM awa.grants g
                                           WHERE g.id = p_id AND g.queue = j.queue AND g.claim_id = 0
                                             AND NOT g.is_over))::integer,
                       p_priority, j.attempt, j.max_attempts, j.timeout_ms, j.queue, j.kind, j.args, j.metadata, j.tags,
                       j.concurrency_key, j.ordering_key, j.unique_key, j.expires_at, j.follow_ups, j.history
                  FROM awa.end_unclaimed(p.queue, p.slot, p.lane, p.xid, p.entry_id, 'moved', NULL) j;
                IF FOUND THEN
                    PERFORM awa.ring(ARRAY[p.queue]);
                    happened := 'reprioritised';
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

CREATE FUNCTION awa.settle_v1(p_runtime bigint, p_flush bigint, p_claims bigint[], p_slots smallint[], p_nonces integer[], p_lo integer[], p_hi integer[], p_idx smallint[], p_elapsed integer[], o_claims bigint[], o_slots smallint[], o_nonces integer[], o_idx smallint[], o_outcomes text[], o_delays double precision[], o_elapsed integer[], o_errors text[]) RETURNS TABLE(claim_id bigint, idx smallint)
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    SET lock_timeout TO '50ms'
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

CREATE FUNCTION awa.state_bit(p_state text) RETURNS integer
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT 1 << (array_position(ARRAY['scheduled', 'available', 'running', 'retryable', 'waiting_external', 'completed',
                                      'failed', 'cancelled'], p_state) - 1)
$$;

CREATE FUNCTION awa.state_in_ring(u awa.job_uniques) RETURNS text
    LANGUAGE plpgsql STABLE
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'on'
    SET jit TO 'off'
    AS $$
DECLARE
    v_at timestamptz;
    v_state text;
BEGIN
    IF u.slot IS NOT NULL THEN
        SELECT j.available_at INTO v_at FROM awa.jobs j
         WHERE j.slot = u.slot AND j.queue = u.queue AND j.lane = u.lane AND j.xid = u.xid AND j.entry_id = u.entry_id
           AND j.id = u.id;
        IF FOUND THEN
            SELECT e.outcome INTO v_state FROM awa.attempt_ends e WHERE e.slot = u.slot AND e.entry_id = u.entry_id;
            IF v_state IN ('completed', 'failed', 'cancelled') THEN
                RETURN v_state;
            ELSIF v_state IS NULL THEN
                IF u.states & 38 IN (0, 38) THEN
                    RETURN 'available';
                END IF;
                SELECT CASE WHEN EXISTS (SELECT FROM awa.completions x
                                          WHERE x.slot = u.slot AND x.claim_id = c.claim_id AND c.idx = ANY (x.idx)
                                         OFFSET 0)
                            THEN 'completed' ELSE 'running' END
                  INTO v_state FROM awa.claim_of(u.slot, u.queue, u.lane, u.xid, u.entry_id, v_at) c;
                RETURN coalesce(v_state, 'available');
            END IF;
        END IF;
    END IF;
    -- it was retried, carried or moved, or has waited before: a search by its id
    SELECT f.state INTO v_state FROM awa.find_job_v2(u.id) f;
    IF NOT FOUND AND EXISTS (
           SELECT FROM pg_class c
            WHERE c.oid = ANY (ARRAY(SELECT ('awa.jobs_' || n)::regclass FROM generate_series(0, 7) n)::oid[])
              AND c.relfilenode <> pg_relation_filenode(c.oid)) THEN     -- by the snapshot, and as it is now
        RETURN 'unclear';
    END IF;
    RETURN v_state;
END $$;

CREATE FUNCTION awa.states_of(p_unique_key bytea) RETURNS smallint
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT CASE WHEN octet_length(p_unique_key) > 16 THEN get_byte(p_unique_key, 16) ELSE 63 END::smallint
$$;

CREATE FUNCTION awa.still_open(p_queue text, p_state awa.limit_state, p_max_running integer, p_wanted integer) RETURNS awa.limit_state
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    c_step CONSTANT integer := 50;
    v_open integer;
    v_looked integer := 0;
    r record;
BEGIN
    IF p_state.open_claims IS NULL THEN
        SELECT coalesce(array_agg(o.claim_id), '{}') AS claims, coalesce(array_agg(o.slot), '{}') AS slots,
               coalesce(array_agg(o.size), '{}') AS sizes
          INTO r FROM awa.open_of_queue(p_queue) o;
        p_state.open_claims := r.claims;
        p_state.open_slots := r.slots;
        p_state.open_sizes := r.sizes;
        RETURN p_state;
    END IF;
    v_open := (SELECT coalesce(sum(s), 0) FROM unnest(p_state.open_sizes) s);
    WHILE p_max_running - v_open < p_wanted AND v_looked < cardinality(p_state.open_claims) LOOP
        SELECT coalesce(array_agg(o.claim_id) FILTER (WHERE o.size > 0), '{}') AS claims,
               coalesce(array_agg(o.slot) FILTER (WHERE o.size > 0), '{}') AS slots,
               coalesce(array_agg(o.size) FILTER (WHERE o.size > 0), '{}') AS sizes,
               count(*)::integer AS n, (sum(o.was) - sum(o.size))::integer AS ended
          INTO r
          FROM (SELECT u.claim_id, u.slot, u.size AS was, s.size
                  FROM unnest(p_state.open_claims[:c_step], p_state.open_slots[:c_step], p_state.open_sizes[:c_step])
                       AS u(claim_id, slot, size)
                 CROSS JOIN LATERAL (SELECT awa.open_size(u.slot, p_queue, u.claim_id)::smallint AS size OFFSET 0) s) o;
        p_state.open_claims := p_state.open_claims[c_step + 1:] || r.claims;
        p_state.open_slots := p_state.open_slots[c_step + 1:] || r.slots;
        p_state.open_sizes := p_state.open_sizes[c_step + 1:] || r.sizes;
        v_open := v_open - r.ended;
        v_looked := v_looked + cardinality(r.claims);
    END LOOP;
    RETURN p_state;
END $$;

CREATE FUNCTION awa.summarize_v1(p_slot smallint, p_from bigint, p_ranges integer) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    v_index regclass := format('awa.jobs_%s_id_idx', p_slot)::regclass;
    v_pages bigint := pg_relation_size(format('awa.jobs_%s', p_slot)::regclass) / current_setting('block_size')::bigint;
    v_end bigint := (v_pages + 31) / 32 * 32;
    v_page bigint := p_from;
BEGIN
    IF p_from > v_end THEN
        RETURN 0;
    END IF;
    IF p_slot = pg_sequence_last_value('awa.ring_seq') THEN
        v_end := v_pages - 64;
    END IF;
    WHILE v_page + 32 <= v_end AND v_page < p_from + 32 * p_ranges LOOP
        PERFORM brin_summarize_range(v_index, v_page);
        v_page := v_page + 32;
    END LOOP;
    RETURN v_page;
END $$;

CREATE FUNCTION awa.sweep_keys_v1(p_after bytea, p_limit integer, p_seconds double precision, OUT reached bytea, OUT removed integer) RETURNS record
    LANGUAGE plpgsql
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    v_until timestamptz := clock_timestamp() + p_seconds * interval '1 s';
    v_keys bytea[];
    v_ids bigint[];
    v_gone bytea[] := '{}';
    v_gone_ids bigint[] := '{}';
    v_gone_entries bigint[] := '{}';    -- that the row named, or NULL
    v_last bytea;
    r record;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'awa.sweep_keys needs READ COMMITTED: an older snapshot would not see where a job has gone'
              USING ERRCODE = 'AWA02';
    END IF;
    removed := 0;
    -- most are held by what waits, or by what lies where it was appended; the others are looked at one by one
    WITH seen AS MATERIALIZED (
        SELECT u.* FROM awa.job_uniques u WHERE u.key > p_after ORDER BY u.key LIMIT p_limit
    ), doubtful AS (
        SELECT s.key, s.id FROM seen s
         WHERE NOT EXISTS (SELECT FROM awa.waiting_jobs w
                            WHERE w.id = s.id AND s.states & awa.state_bit(w.state) > 0 OFFSET 0)
           AND (s.states & 38 < 38
                OR NOT EXISTS (SELECT FROM awa.jobs j
                                WHERE j.slot = s.slot AND j.queue = s.queue AND j.lane = s.lane AND j.xid = s.xid
                                  AND j.entry_id = s.entry_id AND j.id = s.id
                                  AND NOT EXISTS (SELECT FROM awa.attempt_ends e
                                                   WHERE e.slot = j.slot AND e.entry_id = j.entry_id
                                                     AND e.outcome <> 'completed' OFFSET 0)
                               OFFSET 0))
         ORDER BY s.key
    )
    SELECT (SELECT s.key FROM seen s ORDER BY s.key DESC LIMIT 1), array_agg(d.key), array_agg(d.id)
      INTO reached, v_keys, v_ids FROM doubtful d;
    FOR v_n IN 1..coalesce(cardinality(v_keys), 0) LOOP
        IF v_last IS NOT NULL AND clock_timestamp() > v_until THEN
            reached := v_last;
            EXIT;
        END IF;
        SELECT u.entry_id, awa.is_held(u) AS is_held INTO r
          FROM awa.job_uniques u WHERE u.key = v_keys[v_n] AND u.id = v_ids[v_n];
        IF r.is_held IS FALSE THEN
            v_gone := v_gone || v_keys[v_n];
            v_gone_ids := v_gone_ids || v_ids[v_n];
            v_gone_entries := v_gone_entries || r.entry_id;
        END IF;
        v_last := v_keys[v_n];
    END LOOP;
    IF cardinality(v_gone) > 0 THEN
        DELETE FROM awa.job_uniques u
         WHERE u.key = ANY (ARRAY(SELECT t.key FROM awa.job_uniques t
                                   WHERE t.key = ANY (v_gone)
                                     -- nobody has taken it over, and no retry has written its entry into it
                                     AND t.id = v_gone_ids[array_position(v_gone, t.key)]
                                     AND t.entry_id IS NOT DISTINCT FROM v_gone_entries[array_position(v_gone, t.key)]
                                   ORDER BY t.key FOR UPDATE SKIP LOCKED));
        GET DIAGNOSTICS removed = ROW_COUNT;
    END IF;
END $$;

CREATE FUNCTION awa.take_all_keys(p_rows awa.job_uniques[], p_refuse boolean[], OUT is_taken boolean, OUT holders bigint[]) RETURNS record
    LANGUAGE plpgsql
    AS $$
BEGIN
    LOOP
        IF cardinality(p_rows) = 1 THEN
            holders := awa.take_keys(p_rows);
            is_taken := holders[1] = (p_rows[1]).id OR NOT p_refuse[1];
        ELSE
            BEGIN
                holders := awa.take_keys(p_rows);
                is_taken := (SELECT bool_and(k.holder = k.id OR NOT k.is_refused)
                               FROM unnest(p_rows, holders, p_refuse)
                                    AS k(key, id, states, slot, lane, xid, entry_id, queue, holder, is_refused));
                IF holders IS NULL OR NOT is_taken THEN
                    RAISE EXCEPTION 'given back' USING ERRCODE = 'AWA09';
                END IF;
            EXCEPTION WHEN SQLSTATE 'AWA09' THEN
                NULL;
            END;
        END IF;
        IF holders IS NOT NULL THEN
            RETURN;
        END IF;
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            RAISE EXCEPTION 'could not serialize access: who holds a unique key has changed since this transaction began'
                  USING ERRCODE = '40001';
        END IF;
    END LOOP;
END $$;

CREATE FUNCTION awa.take_keys(p_rows awa.job_uniques[]) RETURNS bigint[]
    LANGUAGE plpgsql
    AS $$
DECLARE
    v_count integer := cardinality(p_rows);
    v_holders bigint[] := array_fill(NULL::bigint, ARRAY[v_count]);
    v_left bigint[] := v_holders;         -- those whose former holder has left it: the former holder, ...
    v_seen bigint[] := v_holders;         -- ... and its entry that the row names
    v_n integer := 1;
    v_end integer;
    r record;
BEGIN
    FOR r IN SELECT k.n::integer AS n, u.id, u.entry_id, u.is_held
               FROM unnest(p_rows) WITH ORDINALITY AS k(key, id, states, slot, lane, xid, entry_id, queue, n)
              CROSS JOIN LATERAL (SELECT u.id, u.entry_id, awa.is_held(u) AS is_held FROM awa.job_uniques u
                                   WHERE u.key = k.key LIMIT 1) u
    LOOP
        IF r.is_held THEN
            v_holders[r.n] := r.id;
        ELSIF r.is_held IS NULL THEN
            RETURN NULL;
        ELSE
            v_left[r.n] := r.id;
            v_seen[r.n] := r.entry_id;
        END IF;
    END LOOP;
    WHILE v_n <= v_count LOOP
        IF v_left[v_n] IS NOT NULL THEN
            UPDATE awa.job_uniques u
               SET id = (p_rows[v_n]).id, states = (p_rows[v_n]).states, slot = (p_rows[v_n]).slot,
                   lane = (p_rows[v_n]).lane, xid = (p_rows[v_n]).xid, entry_id = (p_rows[v_n]).entry_id,
                   queue = (p_rows[v_n]).queue
             WHERE u.key = (p_rows[v_n]).key AND u.id = v_left[v_n] AND u.entry_id IS NOT DISTINCT FROM v_seen[v_n];
            IF NOT FOUND THEN
                RETURN NULL;
            END IF;
            v_holders[v_n] := (p_rows[v_n]).id;
            v_n := v_n + 1;
            CONTINUE;
        END IF;
        v_end := v_n;
        WHILE v_end < v_count AND v_left[v_end + 1] IS NULL LOOP
            v_end := v_end + 1;
        END LOOP;
        FOR r IN WITH taken AS (
                     INSERT INTO awa.job_uniques (key, id, states, slot, lane, xid, entry_id, queue)
                     SELECT k.key, k.id, k.states, k.slot, k.lane, k.xid, k.entry_id, k.queue
                       FROM (SELECT * FROM unnest(p_rows[v_n:v_end], v_holders[v_n:v_end]) WITH ORDINALITY
                                        AS k(key, id, states, slot, lane, xid, entry_id, queue, holder, n)
                              WHERE k.holder IS NULL ORDER BY k.n) k
                         ON CONFLICT (key) DO NOTHING
                     RETURNING id
                 )
                 SELECT k.n::integer + v_n - 1 AS n, t.id FROM unnest(p_rows[v_n:v_end]) WITH ORDINALITY
                        AS k(key, id, states, slot, lane, xid, entry_id, queue, n) JOIN taken t USING (id)
        LOOP
            v_holders[r.n] := r.id;
        END LOOP;
        -- those that somebody else has taken since the look above
        FOR v_at IN v_n..v_end LOOP
            IF v_holders[v_at] IS NULL THEN
                SELECT u.id INTO r FROM awa.job_uniques u WHERE u.key = (p_rows[v_at]).key AND awa.is_held(u);
                IF NOT FOUND THEN
                    RETURN NULL;
                END IF;
                v_holders[v_at] := r.id;
            END IF;
        END LOOP;
        v_n := v_end + 1;
    END LOOP;
    RETURN v_holders;
END $$;

CREATE FUNCTION awa.unclaimed(p_queue text, p_limit integer, p_slot smallint DEFAULT NULL::smallint, p_lane smallint DEFAULT NULL::smallint) RETURNS TABLE(slot smallint, lane smallint, xid xid8, entry_id bigint)
    LANGUAGE plpgsql STABLE
    SET plan_cache_mode TO 'force_generic_plan'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_sort TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    v_frontier awa.lane_frontier[] := awa.frontier_of(p_queue);
    v_now pg_snapshot := awa.page_end();
    v_left integer := p_limit;
    v_count integer;
    f awa.lane_frontier;
    r record;
    w record;
BEGIN
    FOR v_lane IN 2..9 LOOP
        CONTINUE WHEN v_lane <> p_lane;
        f := ROW(v_lane, '1:1:'::pg_snapshot, NULL, NULL, NULL)::awa.lane_frontier;
        FOR v_n IN 1..coalesce(cardinality(v_frontier), 0) LOOP
            IF v_frontier[v_n].lane = v_lane THEN
                f := v_frontier[v_n];
            END IF;
        END LOOP;
        FOR w IN
            SELECT f.page_from AS page_from, f.page_to AS page_to, f.last_xid AS xid, f.last_entry AS entry
             WHERE f.page_to IS NOT NULL
            UNION ALL
            SELECT coalesce(f.page_to, f.page_from), v_now, '0', 0
        LOOP
            r := awa.page_ranges(w.page_from, w.page_to, w.xid, w.entry);
            RETURN QUERY
                SELECT e.slot, e.lane, e.xid, e.entry_id
                  FROM unnest(r.lo_xid, r.lo_entry, r.hi_xid, r.hi_entry) AS u(lo_xid, lo_entry, hi_xid, hi_entry)
                 CROSS JOIN LATERAL (
                       SELECT j.slot, j.lane, j.xid, j.entry_id
                         FROM awa.jobs j
                        WHERE j.queue = p_queue AND j.lane = v_lane
                          AND (j.xid, j.entry_id) > (u.lo_xid, u.lo_entry)
                          AND (j.xid, j.entry_id) < (u.hi_xid, u.hi_entry)
                          AND pg_visible_in_snapshot(j.xid, w.page_to)
                          AND (p_slot IS NULL OR j.slot = p_slot)
                          AND NOT EXISTS (SELECT FROM awa.attempt_ends t
                                           WHERE t.slot = j.slot AND t.entry_id = j.entry_id OFFSET 0)
                        ORDER BY j.xid, j.entry_id
                        LIMIT v_left) e
                 LIMIT v_left;
            GET DIAGNOSTICS v_count = ROW_COUNT;
            v_left := v_left - v_count;
            IF v_left <= 0 THEN
                RETURN;
            END IF;
        END LOOP;
    END LOOP;
END $$;

CREATE FUNCTION awa.unclaimed_entries() RETURNS TABLE(slot smallint, queue text, lane smallint, xid xid8, entry_id bigint, id bigint, place tid)
    LANGUAGE sql STABLE
    AS $$
    WITH member AS MATERIALIZED (
        SELECT c.slot, c.claim_id, m.entry_id, m.xid
          FROM awa.claims c CROSS JOIN LATERAL unnest(c.entry_ids, c.xids) AS m(entry_id, xid)
    ), loose AS MATERIALIZED (
        SELECT e.slot, e.entry_id
          FROM awa.attempt_ends e
         WHERE NOT EXISTS (SELECT FROM member m
                            WHERE m.slot = e.slot AND m.claim_id = e.claim_id AND m.entry_id = e.entry_id)
    )
    SELECT j.slot, j.queue, j.lane, j.xid, j.entry_id, j.id, j.ctid
      FROM awa.jobs j
     WHERE NOT EXISTS (SELECT FROM member m WHERE m.slot = j.slot AND m.entry_id = j.entry_id AND m.xid = j.xid)
       AND NOT EXISTS (SELECT FROM loose l WHERE l.slot = j.slot AND l.entry_id = j.entry_id)
$$;

CREATE FUNCTION awa.unclaimed_ranges(p_queue text) RETURNS TABLE(lane smallint, page_to pg_snapshot, lo_xid xid8, lo_entry bigint, hi_xid xid8, hi_entry bigint)
    LANGUAGE sql STABLE ROWS 10
    AS $$
    WITH walk AS MATERIALIZED (
        SELECT l.lane::smallint AS lane, coalesce(f.page_from, '1:1:'::pg_snapshot) AS page_from, f.page_to,
               f.last_xid, f.last_entry
          FROM (SELECT awa.frontier_of(p_queue) AS frontier OFFSET 0) t
         CROSS JOIN generate_series(2, 9) l(lane)
          LEFT JOIN LATERAL (SELECT f.* FROM unnest(t.frontier) f WHERE f.lane = l.lane) f ON true
    ), page AS MATERIALIZED (
        SELECT p.*,
               pg_snapshot_xmin(p.page_from) = pg_snapshot_xmax(p.page_from)
               AND pg_snapshot_xmin(p.page_to) = pg_snapshot_xmax(p.page_to) AS is_plain
          FROM (SELECT w.lane, w.page_from, w.page_to, w.last_xid, w.last_entry, true AS is_begun
                  FROM walk w WHERE w.page_to IS NOT NULL
                 UNION ALL
                SELECT w.lane, coalesce(w.page_to, w.page_from), pg_current_snapshot(), '0', 0, false FROM walk w) p
    )
    SELECT p.lane, p.page_to,
           CASE WHEN p.is_begun THEN p.last_xid ELSE pg_snapshot_xmax(p.page_from) END,
           CASE WHEN p.is_begun THEN p.last_entry ELSE -1 END,
           awa.xid_before(pg_snapshot_xmax(p.page_to)), 9223372036854775807
      FROM page p WHERE p.is_plain
     UNION ALL
    SELECT p.lane, p.page_to, u.*
      FROM page p
     CROSS JOIN LATERAL awa.page_ranges(p.page_from, p.page_to, p.last_xid, p.last_entry) r
     CROSS JOIN LATERAL unnest(r.lo_xid, r.lo_entry, r.hi_xid, r.hi_entry) u
     WHERE NOT p.is_plain
$$;

CREATE FUNCTION awa.unknown_among(p_ids bigint[]) RETURNS bigint[]
    LANGUAGE plpgsql
    AS $$
DECLARE
    v_unknown bigint[];
BEGIN
    -- twice: what is carried out of a segment that is emptied at this moment is not found at first
    FOR v_try IN 1..2 LOOP
        v_unknown := ARRAY(SELECT DISTINCT p FROM unnest(p_ids) p
                            WHERE NOT EXISTS (SELECT FROM awa.waiting_jobs w WHERE w.id = p)
                              AND NOT EXISTS (SELECT FROM awa.ended_jobs e WHERE e.id = p));
        EXIT WHEN cardinality(v_unknown) = 0;
        BEGIN
            v_unknown := ARRAY(SELECT n.id FROM awa.newest_entries(v_unknown, NULL) n WHERE n.entry_id IS NULL ORDER BY 1);
            RAISE EXCEPTION 'seen' USING ERRCODE = 'AWA09';      -- no lock on the ring is left
        EXCEPTION WHEN SQLSTATE 'AWA09' THEN
            NULL;
        END;
        EXIT WHEN cardinality(v_unknown) = 0;
    END LOOP;
    RETURN v_unknown;
END $$;

CREATE FUNCTION awa.wake_waiters(p_ids bigint[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION awa.walked(p_queue text, p_kinds text[], p_limit integer, p_now timestamp with time zone, p_lanes smallint[], p_to pg_snapshot[], p_lo_xid xid8[], p_lo_entry bigint[], p_hi_xid xid8[], p_hi_entry bigint[]) RETURNS TABLE(n bigint, slot smallint, lane smallint, xid xid8, entry_id bigint, id bigint, kind text, attempt smallint, max_attempts smallint, args text, created_at timestamp with time zone, details text, rescued boolean, concurrency_key text, ordering_key text, expired boolean, single boolean, known boolean, size integer)
    LANGUAGE sql STABLE
    AS $$
    SELECT w.n, e.*,
           octet_length(e.args) + octet_length(e.kind)
           + CASE WHEN e.details IS NULL THEN 0 ELSE octet_length(e.details) END
      FROM unnest(p_lanes, p_to, p_lo_xid, p_lo_entry, p_hi_xid, p_hi_entry) WITH ORDINALITY
           AS w(lane, page_to, lo_xid, lo_entry, hi_xid, hi_entry, n)
     CROSS JOIN LATERAL (
           SELECT j.slot, j.lane, j.xid, j.entry_id, j.id, j.kind, j.attempt, j.max_attempts, j.args::text AS args,
                  coalesce(j.created_at, j.available_at) AS created_at,
                  CASE WHEN j.tags IS NOT NULL OR j.metadata IS NOT NULL OR j.timeout_ms IS NOT NULL
                       THEN json_build_object('tags', j.tags, 'metadata', j.metadata,
                                              'timeout_ms', j.timeout_ms)::text END AS details,
                  CASE WHEN j.history IS NOT NULL AND j.lane % 2 = 0
                       THEN j.history->-1->>'outcome' = 'rescued' END AS rescued,
                  j.concurrency_key, j.ordering_key, j.expires_at <= p_now AS expired,
                  j.follow_ups::text LIKE '%"completed"%'
                  OR octet_length(j.unique_key) > 16 AND get_byte(j.unique_key, 16) & 32 = 0 AS single,
                  (p_kinds IS NULL OR j.kind = ANY (p_kinds)) IS TRUE AS known
             FROM awa.jobs j
            WHERE j.queue = p_queue AND j.lane = w.lane
              AND (j.xid, j.entry_id) > (w.lo_xid, w.lo_entry)
              AND (j.xid, j.entry_id) < (w.hi_xid, w.hi_entry)
              AND pg_visible_in_snapshot(j.xid, w.page_to)
            ORDER BY j.xid, j.entry_id
            LIMIT p_limit) e
     LIMIT p_limit
$$;

CREATE FUNCTION awa.with_flaw(p_error json, p_flaw text) RETURNS json
    LANGUAGE plpgsql IMMUTABLE
    AS $$
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

CREATE FUNCTION awa.write_limits(p_queue text, p_declared json, p_overrides json) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    v_old awa.queue_meta;
    r record;
BEGIN
    r := awa.limits_of(p_declared, p_overrides);
    SELECT * INTO v_old FROM awa.queue_meta m WHERE m.queue = p_queue FOR UPDATE;
    UPDATE awa.queue_meta m
       SET declared = p_declared, overrides = p_overrides, max_running = r.max_running, rate = r.rate, burst = r.burst,
           max_running_per_key = r.max_running_per_key
     WHERE m.queue = p_queue;
    IF v_old.max_running_per_key IS DISTINCT FROM r.max_running_per_key THEN
        PERFORM awa.limits_changed(p_queue);
    END IF;
    IF coalesce(r.max_running, 'infinity'::float8) > coalesce(v_old.max_running, 'infinity'::float8)
       OR coalesce(r.max_running_per_key, 'infinity'::float8) > coalesce(v_old.max_running_per_key, 'infinity'::float8)
       OR coalesce(r.rate, 'infinity') > coalesce(v_old.rate, 'infinity')
       OR coalesce(r.burst, 'infinity') > coalesce(v_old.burst, 'infinity') THEN
        PERFORM awa.call_for_help(p_queue);     -- more may run now
    END IF;
END $$;

CREATE FUNCTION awa.xid_before(p_xid xid8) RETURNS xid8
    LANGUAGE sql IMMUTABLE
    AS $$
    SELECT (p_xid::text::bigint - 1)::text::xid8
$$;

CREATE TABLE awa.attempt_ends (
    entry_id bigint NOT NULL,
    claim_id bigint,
    flush bigint,
    id bigint NOT NULL,
    ended_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    elapsed_ms integer,
    slot smallint NOT NULL,
    outcome text NOT NULL COLLATE pg_catalog."C",
    error json,
    result json
)
PARTITION BY LIST (slot);

CREATE TABLE awa.attempt_ends_0 (
    entry_id bigint NOT NULL,
    claim_id bigint,
    flush bigint,
    id bigint NOT NULL,
    ended_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    elapsed_ms integer,
    slot smallint NOT NULL,
    outcome text NOT NULL COLLATE pg_catalog."C",
    error json,
    result json
)
WITH (autovacuum_enabled=off, toast.autovacuum_enabled=off);

CREATE TABLE awa.cancel_requests (
    entry_id bigint NOT NULL,
    id bigint NOT NULL,
    runtime bigint NOT NULL,
    claim_id bigint NOT NULL,
    idx smallint NOT NULL,
    slot smallint NOT NULL,
    requested_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    reason text
)
WITH (autovacuum_vacuum_scale_factor='0.01');

CREATE SEQUENCE awa.claim_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

CREATE TABLE awa.claims (
    claim_id bigint NOT NULL,
    runtime bigint NOT NULL,
    claimed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    nonce integer NOT NULL,
    slot smallint NOT NULL,
    lane smallint NOT NULL,
    queue text NOT NULL COLLATE pg_catalog."C",
    frontier awa.lane_frontier[] NOT NULL,
    entry_ids bigint[] NOT NULL,
    xids xid8[] NOT NULL,
    singles smallint[],
    limits awa.limit_state
)
PARTITION BY LIST (slot);
ALTER TABLE ONLY awa.claims ALTER COLUMN entry_ids SET STORAGE EXTERNAL;

CREATE TABLE awa.claims_0 (
    claim_id bigint NOT NULL,
    runtime bigint NOT NULL,
    claimed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    nonce integer NOT NULL,
    slot smallint NOT NULL,
    lane smallint NOT NULL,
    queue text NOT NULL COLLATE pg_catalog."C",
    frontier awa.lane_frontier[] NOT NULL,
    entry_ids bigint[] NOT NULL,
    xids xid8[] NOT NULL,
    singles smallint[],
    limits awa.limit_state
)
WITH (autovacuum_enabled=off, toast.autovacuum_enabled=off);
ALTER TABLE ONLY awa.claims_0 ALTER COLUMN entry_ids SET STORAGE EXTERNAL;

CREATE TABLE awa.completions (
    claim_id bigint NOT NULL,
    flush bigint NOT NULL,
    completed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    slot smallint NOT NULL,
    idx smallint[] NOT NULL,
    elapsed_ms integer[] NOT NULL
)
PARTITION BY LIST (slot);

CREATE TABLE awa.completions_0 (
    claim_id bigint NOT NULL,
    flush bigint NOT NULL,
    completed_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    slot smallint NOT NULL,
    idx smallint[] NOT NULL,
    elapsed_ms integer[] NOT NULL
)
WITH (autovacuum_enabled=off, toast.autovacuum_enabled=off);

CREATE TABLE awa.descriptor_versions (
    descriptor_hash text NOT NULL COLLATE pg_catalog."C",
    fields jsonb NOT NULL,
    last_seen_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);

CREATE TABLE awa.ended_jobs (
    id bigint NOT NULL,
    created_at timestamp with time zone NOT NULL,
    ended_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    priority smallint NOT NULL,
    attempt smallint NOT NULL,
    max_attempts smallint NOT NULL,
    timeout_ms integer,
    state text NOT NULL COLLATE pg_catalog."C",
    dead_reason text COLLATE pg_catalog."C",
    queue text NOT NULL COLLATE pg_catalog."C",
    kind text NOT NULL COLLATE pg_catalog."C",
    args json NOT NULL,
    metadata json,
    tags text[] COLLATE pg_catalog."C",
    concurrency_key text COLLATE pg_catalog."C",
    ordering_key text COLLATE pg_catalog."C",
    unique_key bytea,
    follow_ups json,
    history json
);

CREATE TABLE awa.frontiers (
    queue text NOT NULL COLLATE pg_catalog."C",
    claim_id bigint NOT NULL,
    frontier awa.lane_frontier[] NOT NULL,
    limits awa.limit_state
);

CREATE TABLE awa.gone_runtimes (
    runtime bigint NOT NULL,
    gone_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);

CREATE TABLE awa.job_kind_descriptors (
    kind text NOT NULL COLLATE pg_catalog."C",
    display_name text,
    description text,
    owner text,
    docs_url text,
    tags text[] DEFAULT '{}'::text[] NOT NULL,
    extra jsonb DEFAULT '{}'::jsonb NOT NULL,
    descriptor_hash text NOT NULL COLLATE pg_catalog."C",
    sync_interval_ms integer DEFAULT 10000 NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    updated_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    last_seen_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT job_kind_descriptors_kind_check CHECK ((octet_length(kind) <= 800))
)
WITH (fillfactor='50');

CREATE TABLE awa.runtime_instances (
    id bigint NOT NULL,
    uuid uuid NOT NULL,
    hostname text NOT NULL,
    pid integer NOT NULL,
    version text NOT NULL,
    queues json DEFAULT '[]'::json NOT NULL,
    heartbeat_ms integer NOT NULL,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    last_seen_at timestamp with time zone DEFAULT now() NOT NULL,
    newest_claim bigint DEFAULT 0 NOT NULL,
    open_claims bigint[] DEFAULT '{}'::bigint[] NOT NULL,
    ended_at timestamp with time zone,
    timeout_ms integer,
    kind_timeouts json,
    stale_after_ms integer,
    queue_descriptor_hashes json,
    job_kind_descriptor_hashes json,
    queue_descriptor_set text COLLATE pg_catalog."C",
    job_kind_descriptor_set text COLLATE pg_catalog."C",
    snapshot_interval_ms integer,
    snapshot_at timestamp with time zone,
    threads integer,
    busy integer,
    in_flight json,
    health json,
    kinds json,
    quiet_at timestamp with time zone,
    quiet_by text,
    CONSTRAINT runtime_instances_newest_claim_check CHECK ((newest_claim >= 0))
)
WITH (fillfactor='50');

CREATE VIEW awa.open_claims AS
 SELECT c.slot,
    c.runtime,
    c.claim_id,
    c.claimed_at,
    c.queue,
    c.lane,
    c.entry_ids,
    c.xids
   FROM (awa.runtime_instances i
     CROSS JOIN LATERAL (( SELECT t.claim_id,
            t.runtime,
            t.claimed_at,
            t.nonce,
            t.slot,
            t.lane,
            t.queue,
            t.frontier,
            t.entry_ids,
            t.xids,
            t.singles,
            t.limits
           FROM awa.claims t
          WHERE ((t.runtime = i.id) AND (t.claim_id > i.newest_claim))
         OFFSET 0)
        UNION ALL
         SELECT t.claim_id,
            t.runtime,
            t.claimed_at,
            t.nonce,
            t.slot,
            t.lane,
            t.queue,
            t.frontier,
            t.entry_ids,
            t.xids,
            t.singles,
            t.limits
           FROM (unnest(i.open_claims) o(o)
             CROSS JOIN LATERAL ( SELECT t_1.claim_id,
                    t_1.runtime,
                    t_1.claimed_at,
                    t_1.nonce,
                    t_1.slot,
                    t_1.lane,
                    t_1.queue,
                    t_1.frontier,
                    t_1.entry_ids,
                    t_1.xids,
                    t_1.singles,
                    t_1.limits
                   FROM awa.claims t_1
                  WHERE ((t_1.runtime = i.id) AND (t_1.claim_id = o.o) AND (o.o <= i.newest_claim))
                 OFFSET 0) t)) c)
  WHERE (i.ended_at IS NULL);

CREATE TABLE awa.waiting_jobs (
    id bigint DEFAULT nextval('awa.entry_id_seq'::regclass) NOT NULL,
    seq bigint DEFAULT nextval('awa.entry_id_seq'::regclass) NOT NULL,
    run_at timestamp with time zone,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    priority smallint DEFAULT 2 NOT NULL,
    attempt smallint DEFAULT 1 NOT NULL,
    max_attempts smallint DEFAULT 25 NOT NULL,
    timeout_ms integer,
    state text DEFAULT 'scheduled'::text NOT NULL COLLATE pg_catalog."C",
    waits_for text DEFAULT 'time'::text NOT NULL COLLATE pg_catalog."C",
    wait_key text COLLATE pg_catalog."C",
    queue text DEFAULT 'default'::text NOT NULL COLLATE pg_catalog."C",
    kind text NOT NULL COLLATE pg_catalog."C",
    args json DEFAULT '{}'::json NOT NULL,
    metadata json,
    tags text[] COLLATE pg_catalog."C",
    concurrency_key text COLLATE pg_catalog."C",
    ordering_key text COLLATE pg_catalog."C",
    unique_key bytea,
    expires_at timestamp with time zone,
    follow_ups json,
    history json,
    parents bigint[],
    on_parent_failure text COLLATE pg_catalog."C"
)
WITH (autovacuum_vacuum_scale_factor='0.01', autovacuum_vacuum_cost_delay='0');

CREATE VIEW awa.job_overview AS
 SELECT j.id,
    j.queue,
    j.kind,
    j.state,
    j.priority,
    j.attempt,
    j.max_attempts,
    j.created_at,
    j.run_at,
    j.claimed_at,
    j.ended_at,
    j.elapsed_ms,
    j.runtime,
    r.hostname,
    r.pid,
    j.waits_for,
    (j.error ->> 'type'::text) AS error_type,
    (j.error ->> 'text'::text) AS error_text,
    j.expires_at,
    j.tags,
    j.concurrency_key,
    j.ordering_key,
    j.args
   FROM (( SELECT w.id,
            w.queue,
            w.kind,
            w.state,
            w.priority,
            w.attempt,
            w.max_attempts,
            w.created_at,
                CASE
                    WHEN isfinite(w.run_at) THEN w.run_at
                    ELSE NULL::timestamp with time zone
                END AS run_at,
            NULL::timestamp with time zone AS claimed_at,
            NULL::timestamp with time zone AS ended_at,
            (((w.history -> '-1'::integer) ->> 'elapsed_ms'::text))::integer AS elapsed_ms,
            (((w.history -> '-1'::integer) ->> 'runtime'::text))::bigint AS runtime,
            w.waits_for,
            awa.error_of((w.history -> '-1'::integer)) AS error,
                CASE
                    WHEN isfinite(w.expires_at) THEN w.expires_at
                    ELSE NULL::timestamp with time zone
                END AS expires_at,
            COALESCE(w.tags, '{}'::text[]) AS tags,
            w.concurrency_key,
            w.ordering_key,
            w.args
           FROM awa.waiting_jobs w
        UNION ALL
         SELECT e.id,
            e.queue,
            e.kind,
            e.state,
            e.priority,
            e.attempt,
            e.max_attempts,
            e.created_at,
            NULL::timestamp with time zone AS run_at,
            NULL::timestamp with time zone AS claimed_at,
            e.ended_at,
            (((e.history -> '-1'::integer) ->> 'elapsed_ms'::text))::integer AS elapsed_ms,
            (((e.history -> '-1'::integer) ->> 'runtime'::text))::bigint AS runtime,
            NULL::text AS waits_for,
            awa.error_of((e.history -> '-1'::integer)) AS error,
            NULL::timestamp with time zone AS expires_at,
            COALESCE(e.tags, '{}'::text[]) AS tags,
            e.concurrency_key,
            e.ordering_key,
            e.args
           FROM awa.ended_jobs e
        UNION ALL
         SELECT j_1.id,
            j_1.queue,
            j_1.kind,
            'available'::text AS state,
            j_1.priority,
            j_1.attempt,
            j_1.max_attempts,
            COALESCE(j_1.created_at, j_1.available_at) AS created_at,
            NULL::timestamp with time zone AS run_at,
            NULL::timestamp with time zone AS claimed_at,
            NULL::timestamp with time zone AS ended_at,
            (((j_1.history -> '-1'::integer) ->> 'elapsed_ms'::text))::integer AS elapsed_ms,
            (((j_1.history -> '-1'::integer) ->> 'runtime'::text))::bigint AS runtime,
            NULL::text AS waits_for,
            awa.error_of((j_1.history -> '-1'::integer)) AS error,
                CASE
                    WHEN isfinite(j_1.expires_at) THEN j_1.expires_at
                    ELSE NULL::timestamp with time zone
                END AS expires_at,
            COALESCE(j_1.tags, '{}'::text[]) AS tags,
            j_1.concurrency_key,
            j_1.ordering_key,
            j_1.args
           FROM ((awa.queue_names() q(queue)
             CROSS JOIN LATERAL awa.unclaimed_ranges(q.queue) u(lane, page_to, lo_xid, lo_entry, hi_xid, hi_entry))
             JOIN awa.jobs j_1 ON (((j_1.queue = q.queue) AND (j_1.lane = u.lane) AND (ROW(j_1.xid, j_1.entry_id) > ROW(u.lo_xid, u.lo_entry)) AND (ROW(j_1.xid, j_1.entry_id) < ROW(u.hi_xid, u.hi_entry)) AND pg_visible_in_snapshot(j_1.xid, u.page_to))))
          WHERE (NOT (EXISTS ( SELECT
                   FROM awa.attempt_ends e
                  WHERE ((e.slot = j_1.slot) AND (e.entry_id = j_1.entry_id)))))
        UNION ALL
         SELECT j_1.id,
            j_1.queue,
            j_1.kind,
            'running'::text AS state,
            j_1.priority,
            j_1.attempt,
            j_1.max_attempts,
            COALESCE(j_1.created_at, j_1.available_at) AS created_at,
            NULL::timestamp with time zone AS run_at,
            c.claimed_at,
            NULL::timestamp with time zone AS ended_at,
            NULL::integer AS elapsed_ms,
            c.runtime,
            NULL::text AS waits_for,
            awa.error_of((j_1.history -> '-1'::integer)) AS error,
                CASE
                    WHEN isfinite(j_1.expires_at) THEN j_1.expires_at
                    ELSE NULL::timestamp with time zone
                END AS expires_at,
            COALESCE(j_1.tags, '{}'::text[]) AS tags,
            j_1.concurrency_key,
            j_1.ordering_key,
            j_1.args
           FROM ((awa.open_claims c
             CROSS JOIN LATERAL UNNEST(c.entry_ids, c.xids) WITH ORDINALITY m(entry_id, xid, idx))
             JOIN awa.jobs j_1 ON (((j_1.slot = c.slot) AND (j_1.queue = c.queue) AND (j_1.lane = c.lane) AND (j_1.xid = m.xid) AND (j_1.entry_id = m.entry_id))))
          WHERE ((NOT (EXISTS ( SELECT
                   FROM awa.completions x
                  WHERE ((x.slot = c.slot) AND (x.claim_id = c.claim_id) AND ((m.idx)::smallint = ANY (x.idx)))))) AND (NOT (EXISTS ( SELECT
                   FROM awa.attempt_ends e
                  WHERE ((e.slot = c.slot) AND (e.entry_id = m.entry_id))))))
        UNION ALL
         SELECT j_1.id,
            j_1.queue,
            j_1.kind,
            'completed'::text AS state,
            j_1.priority,
            j_1.attempt,
            j_1.max_attempts,
            COALESCE(j_1.created_at, j_1.available_at) AS created_at,
            NULL::timestamp with time zone AS run_at,
            c.claimed_at,
            x.completed_at AS ended_at,
            d.elapsed_ms,
            c.runtime,
            NULL::text AS waits_for,
            NULL::json AS error,
                CASE
                    WHEN isfinite(j_1.expires_at) THEN j_1.expires_at
                    ELSE NULL::timestamp with time zone
                END AS expires_at,
            COALESCE(j_1.tags, '{}'::text[]) AS tags,
            j_1.concurrency_key,
            j_1.ordering_key,
            j_1.args
           FROM (((awa.completions x
             CROSS JOIN LATERAL UNNEST(x.idx, x.elapsed_ms) d(idx, elapsed_ms))
             JOIN awa.claims c ON (((c.slot = x.slot) AND (c.claim_id = x.claim_id) AND (cardinality(c.entry_ids) >= d.idx))))
             JOIN awa.jobs j_1 ON (((j_1.slot = c.slot) AND (j_1.queue = c.queue) AND (j_1.lane = c.lane) AND (j_1.xid = c.xids[d.idx]) AND (j_1.entry_id = c.entry_ids[d.idx]) AND awa.is_member(c.entry_ids, j_1.entry_id))))
        UNION ALL
         SELECT j_1.id,
            j_1.queue,
            j_1.kind,
            'completed'::text AS state,
            j_1.priority,
            j_1.attempt,
            j_1.max_attempts,
            COALESCE(j_1.created_at, j_1.available_at) AS created_at,
            NULL::timestamp with time zone AS run_at,
            c.claimed_at,
            e.ended_at,
            e.elapsed_ms,
            c.runtime,
            NULL::text AS waits_for,
            e.error,
                CASE
                    WHEN isfinite(j_1.expires_at) THEN j_1.expires_at
                    ELSE NULL::timestamp with time zone
                END AS expires_at,
            COALESCE(j_1.tags, '{}'::text[]) AS tags,
            j_1.concurrency_key,
            j_1.ordering_key,
            j_1.args
           FROM ((awa.attempt_ends e
             JOIN awa.claims c ON (((c.slot = e.slot) AND (c.claim_id = e.claim_id) AND (e.entry_id = ANY (c.entry_ids)))))
             JOIN awa.jobs j_1 ON (((j_1.slot = c.slot) AND (j_1.queue = c.queue) AND (j_1.lane = c.lane) AND (j_1.entry_id = e.entry_id) AND (j_1.xid = c.xids[array_position(c.entry_ids, e.entry_id)]))))
          WHERE (e.outcome = 'completed'::text)) j
     LEFT JOIN awa.runtime_instances r ON ((r.id = j.runtime)));

CREATE TABLE awa.jobs_0 (
    xid xid8 DEFAULT pg_current_xact_id() NOT NULL,
    entry_id bigint DEFAULT nextval('awa.entry_id_seq'::regclass) NOT NULL,
    id bigint DEFAULT currval('awa.entry_id_seq'::regclass) NOT NULL,
    available_at timestamp with time zone DEFAULT now() NOT NULL,
    created_at timestamp with time zone,
    slot smallint DEFAULT (pg_sequence_last_value('awa.ring_seq'::regclass))::smallint NOT NULL,
    lane smallint DEFAULT 5 NOT NULL,
    priority smallint DEFAULT 2 NOT NULL,
    attempt smallint DEFAULT 1 NOT NULL,
    max_attempts smallint DEFAULT 25 NOT NULL,
    timeout_ms integer,
    queue text DEFAULT 'default'::text NOT NULL COLLATE pg_catalog."C",
    kind text NOT NULL COLLATE pg_catalog."C",
    args json DEFAULT '{}'::json NOT NULL,
    metadata json,
    tags text[] COLLATE pg_catalog."C",
    concurrency_key text COLLATE pg_catalog."C",
    ordering_key text COLLATE pg_catalog."C",
    unique_key bytea,
    expires_at timestamp with time zone,
    follow_ups json,
    history json
)
WITH (autovacuum_enabled=off, toast.autovacuum_enabled=off);

CREATE TABLE awa.leases (
    name text NOT NULL COLLATE pg_catalog."C",
    runtime bigint NOT NULL,
    epoch bigint DEFAULT 1 NOT NULL,
    acquired_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    expires_at timestamp with time zone NOT NULL
)
WITH (fillfactor='50');

CREATE VIEW awa.live_runtimes AS
 SELECT r.id,
    r.uuid,
    r.hostname,
    r.pid,
    r.version,
    r.queues,
    r.heartbeat_ms,
    r.started_at,
    r.last_seen_at,
    r.newest_claim,
    r.open_claims,
    r.ended_at,
    r.timeout_ms,
    r.kind_timeouts,
    r.stale_after_ms,
    r.queue_descriptor_hashes,
    r.job_kind_descriptor_hashes,
    r.queue_descriptor_set,
    r.job_kind_descriptor_set,
    r.snapshot_interval_ms,
    r.snapshot_at,
    r.threads,
    r.busy,
    r.in_flight,
    r.health,
    r.kinds,
    r.quiet_at,
    r.quiet_by
   FROM (awa.runtime_instances r
     LEFT JOIN awa.gone_runtimes g ON ((g.runtime = r.id)))
  WHERE ((r.ended_at IS NULL) AND (g.runtime IS NULL) AND (r.last_seen_at >= (clock_timestamp() - ((COALESCE(r.stale_after_ms, 30000))::double precision * '00:00:00.001'::interval))));

CREATE TABLE awa.origin (
    is_only boolean DEFAULT true NOT NULL,
    system_identifier bigint NOT NULL,
    database_oid oid NOT NULL,
    recorded_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT origin_is_only_check CHECK (is_only)
);

CREATE TABLE awa.queue_descriptors (
    queue text NOT NULL COLLATE pg_catalog."C",
    display_name text,
    description text,
    owner text,
    docs_url text,
    tags text[] DEFAULT '{}'::text[] NOT NULL,
    extra jsonb DEFAULT '{}'::jsonb NOT NULL,
    descriptor_hash text NOT NULL COLLATE pg_catalog."C",
    sync_interval_ms integer DEFAULT 10000 NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    updated_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    last_seen_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT queue_descriptors_queue_check CHECK ((octet_length(queue) <= 800))
)
WITH (fillfactor='50');

CREATE TABLE awa.queue_meta (
    queue text NOT NULL COLLATE pg_catalog."C",
    max_running integer,
    rate double precision,
    burst double precision,
    max_running_per_key integer,
    declared json,
    declared_at timestamp with time zone,
    overrides json,
    overrides_by text,
    overrides_at timestamp with time zone,
    paused_at timestamp with time zone,
    paused_by text,
    pause_reason text,
    CONSTRAINT queue_meta_burst_check CHECK ((burst >= (1)::double precision)),
    CONSTRAINT queue_meta_check CHECK (((rate IS NULL) = (burst IS NULL))),
    CONSTRAINT queue_meta_max_running_check CHECK ((max_running >= 1)),
    CONSTRAINT queue_meta_max_running_per_key_check CHECK ((max_running_per_key >= 1)),
    CONSTRAINT queue_meta_queue_check CHECK ((octet_length(queue) <= 800)),
    CONSTRAINT queue_meta_rate_check CHECK ((rate > (0)::double precision))
);

CREATE VIEW awa.queue_overview AS
 WITH counted AS (
         SELECT c_1.queue,
            c_1.state,
            (sum(c_1.n))::bigint AS n,
            bool_and(c_1.is_exact) AS is_exact
           FROM awa.queue_counts_v1() c_1(queue, state, n, is_exact)
          GROUP BY c_1.queue, c_1.state
        ), counts AS (
         SELECT c_1.queue,
            array_agg(c_1.state ORDER BY c_1.state) FILTER (WHERE (NOT c_1.is_exact)) AS estimated,
            max(c_1.n) FILTER (WHERE (c_1.state = 'scheduled'::text)) AS scheduled,
            max(c_1.n) FILTER (WHERE (c_1.state = 'available'::text)) AS available,
            max(c_1.n) FILTER (WHERE (c_1.state = 'running'::text)) AS running,
            max(c_1.n) FILTER (WHERE (c_1.state = 'retryable'::text)) AS retryable,
            max(c_1.n) FILTER (WHERE (c_1.state = 'waiting_external'::text)) AS waiting_external,
            max(c_1.n) FILTER (WHERE (c_1.state = 'completed'::text)) AS completed,
            max(c_1.n) FILTER (WHERE (c_1.state = 'failed'::text)) AS failed,
            max(c_1.n) FILTER (WHERE (c_1.state = 'cancelled'::text)) AS cancelled
           FROM counted c_1
          GROUP BY c_1.queue
        ), names AS (
         SELECT q.q AS queue
           FROM awa.queue_names() q(q)
        UNION
         SELECT m_1.queue
           FROM awa.queue_meta m_1
        UNION
         SELECT d_1.queue
           FROM awa.queue_descriptors d_1
        UNION
         SELECT (s.value ->> 'name'::text)
           FROM (awa.runtime_instances i
             CROSS JOIN LATERAL json_array_elements(i.queues) s(value))
          WHERE ((i.ended_at IS NULL) AND ((s.value ->> 'name'::text) IS NOT NULL))
        )
 SELECT n.queue,
    COALESCE(c.available, (0)::bigint) AS available,
    COALESCE(c.running, (0)::bigint) AS running,
    COALESCE(c.scheduled, (0)::bigint) AS scheduled,
    COALESCE(c.retryable, (0)::bigint) AS retryable,
    COALESCE(c.waiting_external, (0)::bigint) AS waiting_external,
    COALESCE(c.failed, (0)::bigint) AS failed,
    COALESCE(c.cancelled, (0)::bigint) AS cancelled,
    COALESCE(c.completed, (0)::bigint) AS completed,
    COALESCE(c.estimated, '{}'::text[]) AS estimated,
    awa.oldest_available(n.queue) AS oldest_at,
    m.paused_at,
    m.paused_by,
    m.pause_reason,
    m.max_running,
    m.rate,
    m.burst,
    m.max_running_per_key,
    d.display_name,
    d.description,
    d.owner,
    d.docs_url,
    d.tags
   FROM (((names n
     LEFT JOIN counts c ON ((c.queue = n.queue)))
     LEFT JOIN awa.queue_meta m ON ((m.queue = n.queue)))
     LEFT JOIN awa.queue_descriptors d ON ((d.queue = n.queue)));

CREATE TABLE awa.ring (
    slot smallint NOT NULL,
    opened_at timestamp with time zone,
    sealed_at timestamp with time zone,
    CONSTRAINT ring_slot_check CHECK (((slot >= 0) AND (slot <= 7)))
);

ALTER TABLE awa.runtime_instances ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME awa.runtime_instances_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE VIEW awa.runtime_overview AS
 SELECT i.id,
    i.hostname,
    i.pid,
    i.version,
        CASE
            WHEN (g.gone_at < COALESCE(i.ended_at, 'infinity'::timestamp with time zone)) THEN 'gone'::text
            WHEN (i.ended_at IS NOT NULL) THEN 'ended'::text
            WHEN (EXISTS ( SELECT
               FROM awa.live_runtimes l
              WHERE (l.id = i.id))) THEN 'live'::text
            ELSE 'stale'::text
        END AS state,
    i.started_at,
    i.last_seen_at,
    i.ended_at,
    i.threads,
    i.busy,
    i.quiet_at,
    i.quiet_by,
    (EXISTS ( SELECT
           FROM awa.leases l
          WHERE ((l.name = 'maintenance'::text) AND (l.runtime = i.id) AND (l.expires_at > clock_timestamp())))) AS is_leader,
    ARRAY( SELECT (s.value ->> 'name'::text)
           FROM json_array_elements(i.queues) s(value)) AS queues,
    i.in_flight,
    i.health,
    i.snapshot_at
   FROM (awa.runtime_instances i
     LEFT JOIN awa.gone_runtimes g ON ((g.runtime = i.id)));

CREATE TABLE awa.schema_migrations (
    version integer NOT NULL,
    name text NOT NULL,
    checksum text NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE awa.statistics (
    step text NOT NULL COLLATE pg_catalog."C",
    subject text NOT NULL COLLATE pg_catalog."C",
    starts_at timestamp with time zone NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    completed double precision NOT NULL,
    retried double precision NOT NULL,
    snoozed double precision NOT NULL,
    failed double precision NOT NULL,
    cancelled double precision NOT NULL,
    rescued double precision NOT NULL,
    is_sampled boolean NOT NULL,
    wait_max_ms double precision,
    run_max_ms double precision,
    wait_buckets smallint[],
    waits double precision[],
    run_buckets smallint[],
    runs double precision[]
)
WITH (fillfactor='50');

CREATE TABLE awa.statistics_claims (
    claim_id bigint NOT NULL,
    slot smallint NOT NULL,
    queue text NOT NULL COLLATE pg_catalog."C",
    left_open integer NOT NULL,
    flushes bigint[] NOT NULL,
    entry_ids bigint[] NOT NULL
)
WITH (fillfactor='50');

CREATE TABLE awa.statistics_progress (
    is_only boolean DEFAULT true NOT NULL,
    began_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    reached_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT statistics_progress_is_only_check CHECK (is_only)
)
WITH (fillfactor='50');

CREATE TABLE awa.statistics_queues (
    queue text NOT NULL COLLATE pg_catalog."C",
    claim_id bigint NOT NULL
)
WITH (fillfactor='50');

ALTER TABLE ONLY awa.attempt_ends ATTACH PARTITION awa.attempt_ends_0 FOR VALUES IN ('0');

ALTER TABLE ONLY awa.claims ATTACH PARTITION awa.claims_0 FOR VALUES IN ('0');

ALTER TABLE ONLY awa.completions ATTACH PARTITION awa.completions_0 FOR VALUES IN ('0');

ALTER TABLE ONLY awa.jobs ATTACH PARTITION awa.jobs_0 FOR VALUES IN ('0');

ALTER TABLE ONLY awa.attempt_ends
    ADD CONSTRAINT attempt_ends_pkey PRIMARY KEY (slot, entry_id);

ALTER TABLE ONLY awa.attempt_ends_0
    ADD CONSTRAINT attempt_ends_0_pkey PRIMARY KEY (slot, entry_id);

ALTER TABLE ONLY awa.cancel_requests
    ADD CONSTRAINT cancel_requests_pkey PRIMARY KEY (entry_id);

ALTER TABLE ONLY awa.completions
    ADD CONSTRAINT completions_pkey PRIMARY KEY (slot, claim_id, flush);

ALTER TABLE ONLY awa.completions_0
    ADD CONSTRAINT completions_0_pkey PRIMARY KEY (slot, claim_id, flush);

ALTER TABLE ONLY awa.descriptor_versions
    ADD CONSTRAINT descriptor_versions_pkey PRIMARY KEY (descriptor_hash);

ALTER TABLE ONLY awa.ended_jobs
    ADD CONSTRAINT ended_jobs_pkey PRIMARY KEY (id);

ALTER TABLE ONLY awa.frontiers
    ADD CONSTRAINT frontiers_pkey PRIMARY KEY (queue);

ALTER TABLE ONLY awa.gone_runtimes
    ADD CONSTRAINT gone_runtimes_pkey PRIMARY KEY (runtime);

ALTER TABLE ONLY awa.grants
    ADD CONSTRAINT grants_pkey PRIMARY KEY (queue, scope, key, id);

ALTER TABLE ONLY awa.job_kind_descriptors
    ADD CONSTRAINT job_kind_descriptors_pkey PRIMARY KEY (kind);

ALTER TABLE ONLY awa.job_uniques
    ADD CONSTRAINT job_uniques_pkey PRIMARY KEY (key);

ALTER TABLE awa.jobs
    ADD CONSTRAINT jobs_history_is_readable CHECK (((history IS NULL) OR ((json_typeof(history) = 'array'::text) AND (((history -> '-1'::integer) ->> 'outcome'::text) <> ''::text)))) NOT VALID;

ALTER TABLE awa.jobs
    ADD CONSTRAINT jobs_priority_is_1_to_4 CHECK (((priority >= 1) AND (priority <= 4))) NOT VALID;

ALTER TABLE ONLY awa.leases
    ADD CONSTRAINT leases_pkey PRIMARY KEY (name);

ALTER TABLE ONLY awa.origin
    ADD CONSTRAINT origin_pkey PRIMARY KEY (is_only);

ALTER TABLE ONLY awa.queue_descriptors
    ADD CONSTRAINT queue_descriptors_pkey PRIMARY KEY (queue);

ALTER TABLE ONLY awa.queue_meta
    ADD CONSTRAINT queue_meta_pkey PRIMARY KEY (queue);

ALTER TABLE ONLY awa.ring
    ADD CONSTRAINT ring_pkey PRIMARY KEY (slot);

ALTER TABLE ONLY awa.runtime_instances
    ADD CONSTRAINT runtime_instances_pkey PRIMARY KEY (id);

ALTER TABLE ONLY awa.runtime_instances
    ADD CONSTRAINT runtime_instances_uuid_key UNIQUE (uuid);

ALTER TABLE ONLY awa.schema_migrations
    ADD CONSTRAINT schema_migrations_pkey PRIMARY KEY (version);

ALTER TABLE ONLY awa.statistics_claims
    ADD CONSTRAINT statistics_claims_pkey PRIMARY KEY (claim_id);

ALTER TABLE ONLY awa.statistics
    ADD CONSTRAINT statistics_pkey PRIMARY KEY (step, subject, starts_at, name);

ALTER TABLE ONLY awa.statistics_progress
    ADD CONSTRAINT statistics_progress_pkey PRIMARY KEY (is_only);

ALTER TABLE ONLY awa.statistics_queues
    ADD CONSTRAINT statistics_queues_pkey PRIMARY KEY (queue);

ALTER TABLE awa.waiting_jobs
    ADD CONSTRAINT waiting_jobs_history_is_readable CHECK (((history IS NULL) OR ((json_typeof(history) = 'array'::text) AND (((history -> '-1'::integer) ->> 'outcome'::text) <> ''::text)))) NOT VALID;

ALTER TABLE ONLY awa.waiting_jobs
    ADD CONSTRAINT waiting_jobs_pkey PRIMARY KEY (id);

ALTER TABLE awa.waiting_jobs
    ADD CONSTRAINT waiting_jobs_priority_is_1_to_4 CHECK (((priority >= 1) AND (priority <= 4))) NOT VALID;

ALTER TABLE awa.waiting_jobs
    ADD CONSTRAINT waiting_jobs_queue_is_short CHECK ((octet_length(queue) <= 800)) NOT VALID;

ALTER TABLE awa.waiting_jobs
    ADD CONSTRAINT waiting_jobs_time_is_known CHECK (((waits_for <> 'time'::text) OR (run_at IS NOT NULL))) NOT VALID;

CREATE INDEX attempt_ends_claim ON ONLY awa.attempt_ends USING btree (claim_id);

CREATE INDEX attempt_ends_0_claim_id_idx ON awa.attempt_ends_0 USING btree (claim_id);

CREATE INDEX attempt_ends_completed ON ONLY awa.attempt_ends USING btree (id) WHERE ("left"(outcome, 9) = 'completed'::text);

CREATE INDEX attempt_ends_0_id_idx ON awa.attempt_ends_0 USING btree (id) WHERE ("left"(outcome, 9) = 'completed'::text);

CREATE INDEX attempt_ends_unclaimed ON ONLY awa.attempt_ends USING btree (slot) WHERE (claim_id IS NULL);

CREATE INDEX attempt_ends_0_slot_idx ON awa.attempt_ends_0 USING btree (slot) WHERE (claim_id IS NULL);

CREATE INDEX cancel_requests_runtime ON awa.cancel_requests USING btree (runtime);

CREATE INDEX claims_queue ON ONLY awa.claims USING btree (queue, claim_id);

CREATE INDEX claims_0_queue_claim_id_idx ON awa.claims_0 USING btree (queue, claim_id);

CREATE INDEX claims_runtime ON ONLY awa.claims USING btree (runtime, claim_id);

CREATE INDEX claims_0_runtime_claim_id_idx ON awa.claims_0 USING btree (runtime, claim_id);

CREATE INDEX ended_jobs_dead ON awa.ended_jobs USING btree (ended_at) WHERE (dead_reason IS NOT NULL);

CREATE INDEX ended_jobs_ended ON awa.ended_jobs USING btree (ended_at) WHERE (dead_reason IS NULL);

CREATE INDEX ended_jobs_follows ON awa.ended_jobs USING btree (awa.follows(follow_ups)) WHERE (follow_ups IS NOT NULL);

CREATE INDEX ended_jobs_state ON awa.ended_jobs USING btree (queue, state, ended_at, id);

CREATE INDEX grants_claim ON awa.grants USING btree (queue, claim_id);

CREATE INDEX grants_job ON awa.grants USING btree (id);

CREATE INDEX jobs_id ON ONLY awa.jobs USING brin (id) WITH (pages_per_range='32');

CREATE INDEX jobs_0_id_idx ON awa.jobs_0 USING brin (id) WITH (pages_per_range='32');

CREATE INDEX jobs_lane ON ONLY awa.jobs USING btree (queue, lane, xid, entry_id);

CREATE INDEX jobs_0_queue_lane_xid_entry_id_idx ON awa.jobs_0 USING btree (queue, lane, xid, entry_id);

CREATE INDEX runtime_instances_living ON awa.runtime_instances USING btree (id) WHERE (ended_at IS NULL);

CREATE INDEX waiting_jobs_due ON awa.waiting_jobs USING btree (run_at) WHERE (waits_for = 'time'::text);

CREATE INDEX waiting_jobs_expires ON awa.waiting_jobs USING btree (expires_at) WHERE (expires_at IS NOT NULL);

CREATE INDEX waiting_jobs_follows ON awa.waiting_jobs USING btree (awa.follows(follow_ups)) WHERE (follow_ups IS NOT NULL);

CREATE INDEX waiting_jobs_key ON awa.waiting_jobs USING btree (queue, waits_for, wait_key, seq) WHERE (waits_for = ANY (ARRAY['key'::text, 'order'::text]));

CREATE INDEX waiting_jobs_kind ON awa.waiting_jobs USING btree (queue, wait_key, priority, seq) WHERE (waits_for = 'kind'::text);

CREATE INDEX waiting_jobs_parent ON awa.waiting_jobs USING btree (seq) WHERE (waits_for = 'parent'::text);

CREATE INDEX waiting_jobs_state ON awa.waiting_jobs USING btree (queue, state, id);

ALTER INDEX awa.attempt_ends_claim ATTACH PARTITION awa.attempt_ends_0_claim_id_idx;

ALTER INDEX awa.attempt_ends_completed ATTACH PARTITION awa.attempt_ends_0_id_idx;

ALTER INDEX awa.attempt_ends_pkey ATTACH PARTITION awa.attempt_ends_0_pkey;

ALTER INDEX awa.attempt_ends_unclaimed ATTACH PARTITION awa.attempt_ends_0_slot_idx;

ALTER INDEX awa.claims_queue ATTACH PARTITION awa.claims_0_queue_claim_id_idx;

ALTER INDEX awa.claims_runtime ATTACH PARTITION awa.claims_0_runtime_claim_id_idx;

ALTER INDEX awa.completions_pkey ATTACH PARTITION awa.completions_0_pkey;

ALTER INDEX awa.jobs_id ATTACH PARTITION awa.jobs_0_id_idx;

ALTER INDEX awa.jobs_lane ATTACH PARTITION awa.jobs_0_queue_lane_xid_entry_id_idx;

CREATE TRIGGER cut_wait_key BEFORE INSERT OR UPDATE ON awa.waiting_jobs FOR EACH ROW WHEN ((octet_length(new.wait_key) > 804)) EXECUTE FUNCTION awa.cut_wait_key();

REVOKE ALL ON FUNCTION awa.analyze_v1(p_slot smallint) FROM PUBLIC;

REVOKE ALL ON FUNCTION awa.cancel_v1(p_id bigint, p_reason text, p_force boolean, OUT happened text, OUT state text) FROM PUBLIC;

REVOKE ALL ON FUNCTION awa.enqueue_many_v1(p_queues text[], p_priorities smallint[], p_kinds text[], p_args text[], p_max_attempts smallint[], p_timeouts integer[], p_tags text[], p_metadata text[], p_run_ats text[], p_delays double precision[], p_keys bytea[], p_on_conflict text[], p_follow_ups text[], p_parents text[], p_on_parent_failure text[], p_notify boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION awa.enqueue_many_v2(p_queues text[], p_priorities smallint[], p_kinds text[], p_args text[], p_max_attempts smallint[], p_timeouts integer[], p_tags text[], p_metadata text[], p_run_ats text[], p_delays double precision[], p_keys bytea[], p_on_conflict text[], p_follow_ups text[], p_parents text[], p_on_parent_failure text[], p_concurrency_keys text[], p_ordering_keys text[], p_expires_ats text[], p_notify boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION awa.enqueue_v1(p_kind text, p_args json, p_queue text, p_priority integer, p_max_attempts integer, p_timeout_ms integer, p_run_at timestamp with time zone, p_delay interval, p_tags text[], p_metadata json, p_unique_key bytea, p_unique_states text[], p_on_conflict text, p_follow_ups json, p_after bigint[], p_on_parent_failure text, p_notify boolean, OUT id bigint, OUT is_new boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION awa.enqueue_v2(p_kind text, p_args json, p_queue text, p_priority integer, p_max_attempts integer, p_timeout_ms integer, p_run_at timestamp with time zone, p_delay interval, p_tags text[], p_metadata json, p_unique_key bytea, p_unique_states text[], p_on_conflict text, p_follow_ups json, p_after bigint[], p_on_parent_failure text, p_concurrency_key text, p_ordering_key text, p_expires_at timestamp with time zone, p_notify boolean, OUT id bigint, OUT is_new boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION awa.find_job_v2(p_id bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION awa.find_job_v3(p_id bigint) FROM PUBLIC;

REVOKE ALL ON FUNCTION awa.holder_v1(p_key bytea) FROM PUBLIC;

REVOKE ALL ON FUNCTION awa.outcome_v1(p_ids bigint[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION awa.prune_v1(p_slot smallint, p_entries bigint, p_file oid) FROM PUBLIC;

REVOKE ALL ON FUNCTION awa.prune_v2(p_slot smallint, p_entries bigint, p_file oid, p_examined bigint[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION awa.retry_v1(p_id bigint, OUT happened text, OUT state text, OUT existing_id bigint, OUT unique_key bytea) FROM PUBLIC;

REVOKE ALL ON FUNCTION awa.rotate_v1() FROM PUBLIC;

REVOKE ALL ON FUNCTION awa.summarize_v1(p_slot smallint, p_from bigint, p_ranges integer) FROM PUBLIC;
