-- concurrency_key, ordering_key and expires_at on every way in; and what waits is cancelled when it has expired.
--
-- Adds an index on waiting_jobs, which holds off what is set aside while it is built, and functions. Replaces functions
-- in place, with the same meaning for who knows nothing of this. Works with awa 0.1 and later.
--
-- A job does not begin after its expires_at. Claims cancel what they meet too late (0021_limits.sql); what waits is met
-- by nobody, and is cancelled by awa.expire_waiting_v1. In the past is allowed: such a job is written, and cancelled.

CREATE INDEX waiting_jobs_expires ON awa.waiting_jobs (expires_at) WHERE expires_at IS NOT NULL;

-- As awa.replace_waiting of 0017_unique.sql, with the options that are new here. A job that is set aside for a key, and
-- keeps it, stays where it is unless it gets a time. With another key, or in another queue, it is available again: a
-- claim that meets it sees what it has to wait for now.
CREATE FUNCTION awa.replace_waiting_v2(p_id bigint, p_queue text, p_priority smallint, p_kind text, p_args json,
                                       p_max_attempts smallint, p_timeout_ms integer, p_tags text[], p_metadata json,
                                       p_run_at timestamptz, p_follow_ups json, p_parents bigint[],
                                       p_on_parent_failure text, p_concurrency_key text, p_ordering_key text,
                                       p_expires_at timestamptz, p_notify boolean) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
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

-- For a call of awa.enqueue_v1 that began before this file.
CREATE OR REPLACE FUNCTION awa.replace_waiting(p_id bigint, p_queue text, p_priority smallint, p_kind text, p_args json,
                                    p_max_attempts smallint, p_timeout_ms integer, p_tags text[], p_metadata json,
                                    p_run_at timestamptz, p_follow_ups json, p_parents bigint[],
                                    p_on_parent_failure text, p_notify boolean) RETURNS boolean
LANGUAGE sql VOLATILE AS $$
    SELECT awa.replace_waiting_v2(p_id, p_queue, p_priority, p_kind, p_args, p_max_attempts, p_timeout_ms, p_tags,
                                  p_metadata, p_run_at, p_follow_ups, p_parents, p_on_parent_failure, NULL, NULL, NULL,
                                  p_notify)
$$;

-- As awa.enqueue_many_v1 of 0017_unique.sql, whose words hold; and p_expires_ats are texts of times.
CREATE FUNCTION awa.enqueue_many_v2(p_queues text[], p_priorities smallint[], p_kinds text[], p_args text[],
                                    p_max_attempts smallint[], p_timeouts integer[], p_tags text[], p_metadata text[],
                                    p_run_ats text[], p_delays double precision[], p_keys bytea[],
                                    p_on_conflict text[], p_follow_ups text[], p_parents text[],
                                    p_on_parent_failure text[], p_concurrency_keys text[],
                                    p_ordering_keys text[], p_expires_ats text[], p_notify boolean DEFAULT true)
RETURNS TABLE (n integer, id bigint, is_new boolean, problem text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
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

-- For clients of before.
CREATE OR REPLACE FUNCTION awa.enqueue_many_v1(p_queues text[], p_priorities smallint[], p_kinds text[], p_args text[],
                                    p_max_attempts smallint[], p_timeouts integer[], p_tags text[], p_metadata text[],
                                    p_run_ats text[], p_delays double precision[], p_keys bytea[],
                                    p_on_conflict text[], p_follow_ups text[], p_parents text[],
                                    p_on_parent_failure text[], p_notify boolean DEFAULT true)
RETURNS TABLE (n integer, id bigint, is_new boolean, problem text)
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT n, id, is_new, problem
      FROM awa.enqueue_many_v2(p_queues, p_priorities, p_kinds, p_args, p_max_attempts, p_timeouts, p_tags, p_metadata,
                               p_run_ats, p_delays, p_keys, p_on_conflict, p_follow_ups, p_parents,
                               p_on_parent_failure, NULL, NULL, NULL, p_notify)
$$;

-- Enqueue one job from SQL: a trigger, psql, any language. Give the arguments by name:
--
--     SELECT id, is_new FROM awa.enqueue_v2('send_email', '{"to": "a@b.c"}', p_queue => 'email', p_delay => '1 min');
--
-- It joins the caller's transaction. With p_unique_key (16 bytes) an equal job that exists is returned, with is_new
-- false; p_on_conflict 'replace' gives it these args and options while it waits, 'raise' raises AWA05 with its id in
-- DETAIL. What cannot be stored raises 22023, a job in p_after that does not exist P0002.
CREATE FUNCTION awa.enqueue_v2(p_kind text, p_args json DEFAULT '{}', p_queue text DEFAULT 'default',
                               p_priority integer DEFAULT 2, p_max_attempts integer DEFAULT 25,
                               p_timeout_ms integer DEFAULT NULL, p_run_at timestamptz DEFAULT NULL,
                               p_delay interval DEFAULT NULL, p_tags text[] DEFAULT NULL, p_metadata json DEFAULT NULL,
                               p_unique_key bytea DEFAULT NULL, p_unique_states text[] DEFAULT NULL,
                               p_on_conflict text DEFAULT 'return', p_follow_ups json DEFAULT NULL,
                               p_after bigint[] DEFAULT NULL, p_on_parent_failure text DEFAULT NULL,
                               p_concurrency_key text DEFAULT NULL, p_ordering_key text DEFAULT NULL,
                               p_expires_at timestamptz DEFAULT NULL, p_notify boolean DEFAULT true,
                               OUT id bigint, OUT is_new boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
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

-- For clients of before.
CREATE OR REPLACE FUNCTION awa.enqueue_v1(p_kind text, p_args json DEFAULT '{}', p_queue text DEFAULT 'default',
                               p_priority integer DEFAULT 2, p_max_attempts integer DEFAULT 25,
                               p_timeout_ms integer DEFAULT NULL, p_run_at timestamptz DEFAULT NULL,
                               p_delay interval DEFAULT NULL, p_tags text[] DEFAULT NULL, p_metadata json DEFAULT NULL,
                               p_unique_key bytea DEFAULT NULL, p_unique_states text[] DEFAULT NULL,
                               p_on_conflict text DEFAULT 'return', p_follow_ups json DEFAULT NULL,
                               p_after bigint[] DEFAULT NULL, p_on_parent_failure text DEFAULT NULL,
                               p_notify boolean DEFAULT true, OUT id bigint, OUT is_new boolean)
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT id, is_new
      FROM awa.enqueue_v2(p_kind, p_args, p_queue, p_priority, p_max_attempts, p_timeout_ms, p_run_at, p_delay, p_tags,
                          p_metadata, p_unique_key, p_unique_states, p_on_conflict, p_follow_ups, p_after,
                          p_on_parent_failure, p_notify => p_notify)
$$;

-- An array of follow-ups as rows, as awa.follow_up_rows of 0018_outcomes.sql gives them; and a job there may have
-- concurrency_key, ordering_key and expires_at.
CREATE FUNCTION awa.follow_up_rows_v2(p_jobs json)
RETURNS TABLE (n bigint, kind text, queue text, args json, priority smallint, max_attempts smallint, timeout_ms integer,
               tags text[], metadata json, run_at timestamptz, delay double precision, follow_ups json,
               concurrency_key text, ordering_key text, expires_at timestamptz)
LANGUAGE sql STABLE AS $$
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

-- As in 0018_outcomes.sql.
CREATE OR REPLACE FUNCTION awa.follow_ups_after(p_follow_ups json, p_outcome text, OUT jobs json, OUT flaw text)
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

-- As in 0018_outcomes.sql.
CREATE OR REPLACE FUNCTION awa.append_follow_ups(p_ids bigint[], p_jobs json[], p_notify boolean) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
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

-- Cancel up to p_limit jobs that wait and have expired, first those that did so first, with what follows from it.
-- Returns how many. Rows that somebody else holds are left for another time.
CREATE FUNCTION awa.expire_waiting_v1(p_limit integer) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
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

REVOKE EXECUTE ON FUNCTION
    awa.enqueue_many_v2(text[], smallint[], text[], text[], smallint[], integer[], text[], text[], text[],
                        double precision[], bytea[], text[], text[], text[], text[], text[], text[], text[], boolean),
    awa.enqueue_v2(text, json, text, integer, integer, integer, timestamptz, interval, text[], json, bytea, text[], text,
                   json, bigint[], text, text, text, timestamptz, boolean)
  FROM PUBLIC;
