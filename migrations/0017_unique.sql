-- Unique keys: who holds which; and the functions that enqueue jobs which are not plain, for every client.
--
-- Adds a table, functions, and two columns to waiting_jobs, whose CHECK becomes weaker: it is locked for a moment. Works
-- with awa 0.1 and later; workers of before carry unique_key along and neither look at it nor at the new columns.
--
-- A key is *held* when it has a row here and the state of the job it names is among the key's states. That is looked at
-- when somebody else wants the key: a holder that has ended otherwise, or is gone, does not hold it, whether or not its
-- row was removed. Removing rows is for tidiness, and may be left to a sweep.
--
-- Who waits for whom, and why there is no deadlock:
--   * INSERT ... ON CONFLICT DO NOTHING waits for a transaction that has inserted the key and is open. Keys of one call
--     are taken in ascending order, so two calls that want the same ones cannot each hold what the other waits for. The
--     order of several calls in one transaction is the caller's.
--   * A key whose holder has left it is taken over by UPDATE ... WHERE id = the old one, in its turn. It waits for
--     another taker. When that one was faster nothing is updated, and the whole call begins anew: a key that was passed
--     by must not be waited for while later ones are held, so these are given back first.
--   * Nobody waits for a key that a committed job holds, and no lock is left on it.
--   * Whoever removes rows (the end of a job, the sweep) skips those that are locked.

CREATE TABLE awa.job_uniques (
    key      bytea    NOT NULL PRIMARY KEY CHECK (octet_length(key) = 16),
    id       bigint   NOT NULL,        -- the job that holds it, or did
    -- in which states it does; a bit for each: scheduled 1, available 2, running 4, retryable 8, waiting_external 16,
    -- completed 32, failed 64, cancelled 128
    states   smallint NOT NULL DEFAULT 63 CHECK (states BETWEEN 1 AND 255),
    -- where the job was first appended or last promoted to, so that it is found without a search; NULL: not yet
    slot     smallint,
    lane     smallint,
    xid      xid8,
    entry_id bigint,
    queue    text COLLATE "C"
) WITH (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);

-- The column unique_key of jobs, waiting_jobs and ended_jobs is the key; where its states are not the usual ones (63), a
-- 17th byte has them, so that they go wherever the job goes.

-- A job that runs after others: waits_for is 'parent', run_at is when it may run at the earliest, or NULL.
ALTER TABLE awa.waiting_jobs
    ADD COLUMN parents bigint[],
    ADD COLUMN on_parent_failure text COLLATE "C",    -- NULL, which is cancel; or cancel, run, discard
    DROP CONSTRAINT waiting_jobs_check,
    ADD CONSTRAINT waiting_jobs_time_is_known CHECK (waits_for <> 'time' OR run_at IS NOT NULL) NOT VALID;

-- A state's bit; NULL for what is none.
CREATE FUNCTION awa.state_bit(p_state text) RETURNS integer LANGUAGE sql IMMUTABLE AS $$
    SELECT 1 << (array_position(ARRAY['scheduled', 'available', 'running', 'retryable', 'waiting_external', 'completed',
                                      'failed', 'cancelled'], p_state) - 1)
$$;

-- The states of a key as the column unique_key has it.
CREATE FUNCTION awa.states_of(p_unique_key bytea) RETURNS smallint LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN octet_length(p_unique_key) > 16 THEN get_byte(p_unique_key, 16) ELSE 63 END::smallint
$$;

-- The state of a holder that neither waits nor has failed or was cancelled, as the snapshot of the calling statement
-- sees it. 'available' may stand for running and completed, when the key's states have all of these or none. NULL when
-- it is gone. 'unclear' when it is nowhere to be seen, and a segment was emptied since that snapshot: what was carried
-- out of it before is out of sight then. The caller's lock on the segments, from this function on, keeps more from
-- being emptied.
--
-- Bitmap scans are on, whatever the caller set: the search by id, whose plan the session keeps, has no other way.
CREATE FUNCTION awa.state_in_ring(u awa.job_uniques) RETURNS text
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = on SET jit = off
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

-- Whether a key is held, in the snapshot of the calling statement; NULL when that cannot tell: ask in a newer one.
--
-- It leaves no lock on the ring, though the caller's transaction may stay open for long: the look is in a subtransaction
-- that is rolled back. Else nothing could be emptied meanwhile.
CREATE FUNCTION awa.is_held(u awa.job_uniques) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
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

-- Take keys for jobs that are about to be written, one for each, distinct and in ascending order. Returns who has each
-- from now on: the job itself, or another that holds it. NULL when somebody was faster and the call must be made anew,
-- after what it has taken was given back (when it was more than one).
CREATE FUNCTION awa.take_keys(p_rows awa.job_uniques[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_count integer := cardinality(p_rows);
    v_holders bigint[] := array_fill(NULL::bigint, ARRAY[v_count]);
    v_left bigint[] := v_holders;         -- those whose former holder has left it: the former holder
    v_n integer := 1;
    v_end integer;
    r record;
BEGIN
    FOR r IN SELECT k.n::integer AS n, u.id, u.is_held
               FROM unnest(p_rows) WITH ORDINALITY AS k(key, id, states, slot, lane, xid, entry_id, queue, n)
              CROSS JOIN LATERAL (SELECT u.id, awa.is_held(u) AS is_held FROM awa.job_uniques u
                                   WHERE u.key = k.key LIMIT 1) u
    LOOP
        IF r.is_held THEN
            v_holders[r.n] := r.id;
        ELSIF r.is_held IS NULL THEN
            RETURN NULL;
        ELSE
            v_left[r.n] := r.id;
        END IF;
    END LOOP;
    WHILE v_n <= v_count LOOP
        IF v_left[v_n] IS NOT NULL THEN
            UPDATE awa.job_uniques u
               SET id = (p_rows[v_n]).id, states = (p_rows[v_n]).states, slot = (p_rows[v_n]).slot,
                   lane = (p_rows[v_n]).lane, xid = (p_rows[v_n]).xid, entry_id = (p_rows[v_n]).entry_id,
                   queue = (p_rows[v_n]).queue
             WHERE u.key = (p_rows[v_n]).key AND u.id = v_left[v_n];
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

-- Take keys as awa.take_keys does, as often as it takes. p_refuse: whose conflicts undo everything; then NULL is
-- returned, and p_holders has who was in the way.
CREATE FUNCTION awa.take_all_keys(p_rows awa.job_uniques[], p_refuse boolean[], OUT is_taken boolean, OUT holders bigint[])
LANGUAGE plpgsql VOLATILE AS $$
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

-- The newest entry of each of these jobs in the ring; a row of NULLs, but for the id, when there is none. A search by id
-- reads summaries of all segments and a few pages, or many where they are not summarised yet; so near ids are searched
-- for together, far ones by 32. Ids that are left after p_searches searches get no row; NULL: none are.
CREATE FUNCTION awa.newest_entries(p_ids bigint[], p_searches integer)
RETURNS TABLE (id bigint, slot smallint, queue text, lane smallint, xid xid8, entry_id bigint, available_at timestamptz)
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = on SET jit = off
SET max_parallel_workers_per_gather = 0
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

-- The ids among these of which there is no job, or none any more.
CREATE FUNCTION awa.unknown_among(p_ids bigint[]) RETURNS bigint[]
LANGUAGE plpgsql VOLATILE AS $$
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

-- Whether a job that waits would wait for itself, were these its parents; a job that does would never run. Two calls at
-- the same moment may pass each other by.
CREATE FUNCTION awa.is_circle(p_id bigint, p_parents bigint[]) RETURNS boolean
LANGUAGE sql STABLE AS $$
    WITH RECURSIVE before(id) AS (
        SELECT unnest(p_parents)
        UNION
        SELECT unnest(w.parents) FROM before b JOIN awa.waiting_jobs w ON w.id = b.id WHERE w.waits_for = 'parent'
    )
    SELECT p_id IN (SELECT b.id FROM before b) AND EXISTS (SELECT FROM awa.waiting_jobs w WHERE w.id = p_id)
$$;

-- Give a job that waits other args, options and time. False when it does not wait, or not any more; nothing changes
-- then. Waits for whoever is promoting, claiming or cancelling it. It keeps its id, key, attempts and history; parents
-- only when p_parents is NULL. Nothing changes either when it would wait for itself, as it may by two replacements of one
-- batch; the caller has looked before. One that is set aside for its kind stays so, unless it gets a time.
CREATE FUNCTION awa.replace_waiting(p_id bigint, p_queue text, p_priority smallint, p_kind text, p_args json,
                                    p_max_attempts smallint, p_timeout_ms integer, p_tags text[], p_metadata json,
                                    p_run_at timestamptz, p_follow_ups json, p_parents bigint[],
                                    p_on_parent_failure text, p_notify boolean) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    r record;
BEGIN
    IF p_parents IS NOT NULL AND awa.is_circle(p_id, p_parents) THEN
        RETURN false;
    END IF;
    UPDATE awa.waiting_jobs w
       SET (waits_for, run_at, wait_key, state) = (
               SELECT g.waits_for,
                      CASE WHEN g.waits_for = 'time' THEN coalesce(p_run_at, clock_timestamp())
                           WHEN g.waits_for = 'parent' THEN p_run_at END,
                      CASE WHEN g.waits_for = 'kind' THEN p_kind END,
                      CASE WHEN w.state = 'available' AND g.waits_for <> 'kind' THEN 'scheduled' ELSE w.state END
                 FROM (SELECT CASE WHEN p_parents IS NOT NULL OR w.waits_for = 'parent' THEN 'parent'
                                   WHEN p_run_at IS NOT NULL OR w.waits_for <> 'kind' THEN 'time'
                                   ELSE 'kind' END AS waits_for) g),
           parents = coalesce(p_parents, w.parents),
           on_parent_failure = CASE WHEN p_parents IS NULL THEN w.on_parent_failure ELSE p_on_parent_failure END,
           queue = p_queue, priority = p_priority, kind = p_kind, args = p_args, max_attempts = p_max_attempts,
           timeout_ms = p_timeout_ms, tags = p_tags, metadata = p_metadata, follow_ups = p_follow_ups
     WHERE w.id = p_id AND w.state IN ('scheduled', 'retryable', 'available')
    RETURNING w.waits_for INTO r;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    IF p_notify AND r.waits_for = 'kind' THEN
        PERFORM pg_notify(awa.channel(), chr(1) || p_queue);     -- as in awa.move_v1
    ELSIF p_notify THEN
        PERFORM awa.ring(ARRAY['']);
    END IF;
    RETURN true;
END $$;

-- Enqueue a batch, all or nothing, one element per job in each array; for clients that have validated what they send.
--
-- p_args, p_metadata and p_follow_ups are JSON texts, p_tags JSON texts of arrays, p_run_ats texts of times, p_delays
-- seconds, p_keys 16 bytes or 17 (with the states), p_on_conflict 'return', 'raise' or 'replace', p_parents texts of
-- bigint arrays.
--
-- Returns a row per job in the caller's order: its id, or that of the job which has its key, with is_new false. Of equal
-- keys in one batch the first is the job. When anything stands against the batch nothing is written, and what is
-- returned is the problems alone: 'conflict' for a job of mode raise, id is who has the key, NULL when it is a job of
-- the same batch; 'no_parent', id is the parent that does not exist. No exception for these, so that the caller's
-- transaction stays usable.
CREATE FUNCTION awa.enqueue_many_v1(p_queues text[], p_priorities smallint[], p_kinds text[], p_args text[],
                                    p_max_attempts smallint[], p_timeouts integer[], p_tags text[], p_metadata text[],
                                    p_run_ats text[], p_delays double precision[], p_keys bytea[],
                                    p_on_conflict text[], p_follow_ups text[], p_parents text[],
                                    p_on_parent_failure text[], p_notify boolean DEFAULT true)
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
               i.parents::bigint[] AS parents, i.on_parent_failure, i.run_at IS NULL AND i.parents IS NULL AS is_due
          FROM (SELECT * FROM unnest(v_ids, v_holders, v_run_ats, p_queues, p_priorities, p_kinds, p_args, p_max_attempts,
                                     p_timeouts, p_tags, p_metadata, p_keys, p_follow_ups, p_parents,
                                     p_on_parent_failure) WITH ORDINALITY
                         AS i(id, holder, run_at, queue, priority, kind, args, max_attempts, timeout_ms, tags, metadata,
                              key, follow_ups, parents, on_parent_failure, n)
                 WHERE i.holder = i.id ORDER BY i.n) i
    ), available AS (
        INSERT INTO awa.jobs (entry_id, id, slot, queue, lane, priority, kind, args, max_attempts, timeout_ms, tags,
                              metadata, unique_key, follow_ups)
        SELECT i.id, i.id, v_slot, i.queue, 2 * i.priority + 1, i.priority, i.kind, i.args, i.max_attempts, i.timeout_ms,
               i.tags, i.metadata, i.key, i.follow_ups
          FROM input i WHERE i.is_due ORDER BY i.n
    ), waiting AS (
        INSERT INTO awa.waiting_jobs (id, run_at, waits_for, queue, priority, kind, args, max_attempts, timeout_ms, tags,
                                      metadata, unique_key, follow_ups, parents, on_parent_failure)
        SELECT i.id, i.run_at, CASE WHEN i.parents IS NULL THEN 'time' ELSE 'parent' END, i.queue, i.priority, i.kind,
               i.args, i.max_attempts, i.timeout_ms, i.tags, i.metadata, i.key, i.follow_ups, i.parents,
               i.on_parent_failure
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
            PERFORM awa.replace_waiting(v_holders[r.n], p_queues[r.n], p_priorities[r.n], p_kinds[r.n], p_args[r.n]::json,
                                        p_max_attempts[r.n], p_timeouts[r.n],
                                        CASE WHEN p_tags[r.n] IS NOT NULL
                                             THEN ARRAY(SELECT json_array_elements_text(p_tags[r.n]::json)) END,
                                        p_metadata[r.n]::json, v_run_ats[r.n], p_follow_ups[r.n]::json,
                                        p_parents[r.n]::bigint[], p_on_parent_failure[r.n], p_notify);
        END LOOP;
    END IF;
    RETURN QUERY SELECT i.n::integer, i.holder, i.holder = i.id, NULL::text
                   FROM unnest(v_ids, v_holders) WITH ORDINALITY AS i(id, holder, n) ORDER BY i.n;
END $$;

-- Enqueue one job from SQL: a trigger, psql, any language. Give the arguments by name:
--
--     SELECT id, is_new FROM awa.enqueue_v1('send_email', '{"to": "a@b.c"}', p_queue => 'email', p_delay => '1 minute');
--
-- It joins the caller's transaction. With p_unique_key (16 bytes) an equal job that exists is returned, with is_new
-- false; p_on_conflict 'replace' gives it these args and options while it waits, 'raise' raises AWA05 with its id in
-- DETAIL. What cannot be stored raises 22023, a job in p_after that does not exist P0002.
CREATE FUNCTION awa.enqueue_v1(p_kind text, p_args json DEFAULT '{}', p_queue text DEFAULT 'default',
                               p_priority integer DEFAULT 2, p_max_attempts integer DEFAULT 25,
                               p_timeout_ms integer DEFAULT NULL, p_run_at timestamptz DEFAULT NULL,
                               p_delay interval DEFAULT NULL, p_tags text[] DEFAULT NULL, p_metadata json DEFAULT NULL,
                               p_unique_key bytea DEFAULT NULL, p_unique_states text[] DEFAULT NULL,
                               p_on_conflict text DEFAULT 'return', p_follow_ups json DEFAULT NULL,
                               p_after bigint[] DEFAULT NULL, p_on_parent_failure text DEFAULT NULL,
                               p_notify boolean DEFAULT true, OUT id bigint, OUT is_new boolean)
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
        AND p_on_parent_failure IS NULL) IS NOT TRUE THEN
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
            PERFORM awa.replace_waiting(id, p_queue, p_priority::smallint, p_kind, p_args, p_max_attempts::smallint,
                                        p_timeout_ms, p_tags, p_metadata, v_run_at, p_follow_ups, p_after,
                                        p_on_parent_failure, p_notify);
        END IF;
        RETURN;
    END IF;
    IF v_slot IS NOT NULL THEN
        INSERT INTO awa.jobs (entry_id, id, slot, queue, lane, priority, kind, args, max_attempts, timeout_ms, tags,
                              metadata, unique_key, follow_ups)
        VALUES (v_id, v_id, v_slot, p_queue, 2 * p_priority + 1, p_priority, p_kind, p_args, p_max_attempts, p_timeout_ms,
                p_tags, p_metadata, v_key, p_follow_ups);
    ELSE
        INSERT INTO awa.waiting_jobs (id, run_at, waits_for, queue, priority, kind, args, max_attempts, timeout_ms, tags,
                                      metadata, unique_key, follow_ups, parents, on_parent_failure)
        VALUES (v_id, v_run_at, CASE WHEN p_after IS NULL THEN 'time' ELSE 'parent' END, p_queue, p_priority, p_kind,
                p_args, p_max_attempts, p_timeout_ms, p_tags, p_metadata, v_key, p_follow_ups, p_after,
                p_on_parent_failure);
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

-- The job that holds a key; NULL when nobody does. At READ COMMITTED.
CREATE FUNCTION awa.holder_v1(p_key bytea) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
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

-- As in 0006_promote.sql; and keys learn where their jobs have gone, unless somebody else holds their rows.
CREATE OR REPLACE FUNCTION awa.promote_v1(p_floor timestamptz, p_limit integer) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
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

-- Remove the rows of keys that nobody holds any more, of up to p_limit keys that come after p_after, and of fewer once
-- p_seconds are over. Returns the last key that was looked at (NULL: there are no more) and how many rows were removed.
-- Rows that somebody else has locked are left for another time. At READ COMMITTED, in a transaction of its own.
CREATE FUNCTION awa.sweep_keys_v1(p_after bytea, p_limit integer, p_seconds double precision,
                                  OUT reached bytea, OUT removed integer)
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off
AS $$
DECLARE
    v_until timestamptz := clock_timestamp() + p_seconds * interval '1 s';
    v_keys bytea[];
    v_ids bigint[];
    v_gone bytea[] := '{}';
    v_last bytea;
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
        IF (SELECT awa.is_held(u) FROM awa.job_uniques u WHERE u.key = v_keys[v_n] AND u.id = v_ids[v_n]) IS FALSE THEN
            v_gone := v_gone || v_keys[v_n];
        END IF;
        v_last := v_keys[v_n];
    END LOOP;
    IF cardinality(v_gone) > 0 THEN
        DELETE FROM awa.job_uniques u
         WHERE u.key = ANY (ARRAY(SELECT t.key FROM awa.job_uniques t
                                   WHERE t.key = ANY (v_gone) AND t.id = ANY (v_ids)    -- nobody has taken it over
                                   ORDER BY t.key FOR UPDATE SKIP LOCKED));
        GET DIAGNOSTICS removed = ROW_COUNT;
    END IF;
END $$;

REVOKE EXECUTE ON FUNCTION
    awa.enqueue_many_v1(text[], smallint[], text[], text[], smallint[], integer[], text[], text[], text[],
                        double precision[], bytea[], text[], text[], text[], text[], boolean),
    awa.enqueue_v1(text, json, text, integer, integer, integer, timestamptz, interval, text[], json, bytea, text[], text,
                   json, bigint[], text, boolean),
    awa.holder_v1(bytea)
  FROM PUBLIC;
