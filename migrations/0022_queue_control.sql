-- What is said of a queue as a whole: its limits, that it is paused; and what is done to all its jobs at once.
--
-- Adds functions; replaces awa.find_job_v2 and awa.locate under their old signatures. Waits for no table. Works with awa
-- 0.1 and later: workers of before keep the limits and pauses, which the claim looks at.
--
-- Who may be in the way of whom:
-- - A claim reads awa.queue_meta under the queue's claim lock, in a statement that starts after the lock. So whoever
--   writes there under that lock knows, when it has committed, that no claim is open which read what was there before.
--   Limits are only changed so. A pause is told in any case, since it may be an emergency: it tries for the lock, and
--   says whether it had it.
-- - The lock comes before the row; it is only tried, with pauses. Nobody waits for a row for longer than it takes to
--   commit, for all who write rows have done whatever they wait for.
-- - Cancelling or purging takes the claim lock for each step: entries that no claim has passed are ended under it, as in
--   0010_control.sql, and no claim hands over or takes what waits meanwhile. What waits and is held by somebody else
--   (who promotes, moves or cancels it) is left for the next pass.

-- The queue's claim lock, until the end of the transaction; false when it could not be had within so many seconds.
CREATE FUNCTION awa.lock_queue(p_queue text, p_seconds double precision) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
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

-- Refuse what can be no queue's name, and an isolation in which a claim might be missed.
CREATE FUNCTION awa.check_queue(p_queue text) RETURNS void LANGUAGE plpgsql STABLE AS $$
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

-- Wake whoever sleeps for a queue, and everybody who may help: none holds the bell of a queue that was paused or full.
CREATE FUNCTION awa.call_for_help(p_queue text) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM awa.ring(ARRAY[p_queue]);
    PERFORM pg_notify(awa.channel(), chr(1) || p_queue);
END $$;

-- What holds, of what code declares and an operator says: limit by limit, the operator goes first.
CREATE FUNCTION awa.limits_of(p_declared json, p_overrides json, OUT max_running integer, OUT rate double precision,
                              OUT burst double precision, OUT max_running_per_key integer)
LANGUAGE plpgsql IMMUTABLE AS $$
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

-- Write what is said of a queue, and what follows. The caller holds the claim lock.
CREATE FUNCTION awa.write_limits(p_queue text, p_declared json, p_overrides json) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
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

-- Store what code declares about a queue, {} when it has no limits; as 0020_queues.sql writes it. The last worker that
-- starts decides. In a transaction of its own, at READ COMMITTED.
--   declared  it is
--   nothing   it was declared so before: one look, no lock
--   busy      claims were in the way for a second; nothing is changed, try again
CREATE FUNCTION awa.declare_queue_v1(p_queue text, p_declared json) RETURNS text
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '50ms'
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

-- Say as an operator what limits a queue has, whatever code declares: those that p_overrides names, with null for: no
-- such limit. What was said before stays; p_cleared are limits of which nothing is said any more. In a transaction of its
-- own, at READ COMMITTED. Returns 'limited', 'nothing' when all of it was said before, or 'busy' as awa.declare_queue_v1.
CREATE FUNCTION awa.limit_queue_v1(p_queue text, p_overrides json, p_by text DEFAULT NULL, p_cleared text[] DEFAULT NULL)
RETURNS text
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '50ms'
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

-- Pause a queue: no attempt of it starts any more, of whichever worker, until it is resumed. Jobs go on being inserted,
-- and running ones end. In a transaction of its own, at READ COMMITTED. happened: 'paused'; 'nothing' when it was paused
-- before: that time stays, who and why are written anew. is_quiet: once this has committed, no claim is open that began
-- before. Else there may be one; whoever gets the claim lock afterwards (awa.lock_queue) knows that it is over.
CREATE FUNCTION awa.pause_queue_v1(p_queue text, p_by text DEFAULT NULL, p_reason text DEFAULT NULL, OUT happened text,
                                   OUT is_quiet boolean)
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
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

-- Let a queue go on. Returns 'resumed', or 'nothing' when it was not paused.
CREATE FUNCTION awa.resume_queue_v1(p_queue text) RETURNS text
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
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

-- One step of cancelling what waits in a queue, or of purging it: up to p_limit jobs. In a transaction of its own, at READ
-- COMMITTED. p_from is what the last step gave as go_on; NULL: begin.
--
-- The steps walk over places: 0 to 3, a state of waiting_jobs each, by id; 4 to 11, a lane each, in its order; and, when
-- it is a purge, 12 and 13, failed and cancelled jobs, as they ended. It is about the jobs whose ids are not above the
-- last that was given out when it began. A walk goes on behind where the last step was, so that it costs the same
-- however much was ended before it. Jobs move meanwhile, from place to place: promoted, set aside, retried. So there is
-- a pass after each that found any; its lanes begin where transactions may have been open when the last pass began.
--   more  there may be others: come again with go_on
--   busy  a claim, or somebody who holds one of the jobs, was in the way: likewise, after a pause
--   done  none is left
CREATE FUNCTION awa.clear_step(p_queue text, p_purge boolean, p_reason text, p_from jsonb, p_limit integer,
                               OUT happened text, OUT waiting integer, OUT ended integer, OUT go_on jsonb)
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET jit = off SET lock_timeout = '20ms'
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

-- What follows when jobs are deleted: their unique keys are free, whatever their states were, and their other keys; who
-- waits for their results looks again. Nothing else runs because of it.
CREATE FUNCTION awa.forget(p_ids bigint[], p_keys bytea[]) RETURNS void
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
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

-- Cancel whatever waits in a queue or is available there, with all that follows from it, in steps of up to p_limit jobs:
-- call it again with go_on, in another transaction, until happened is 'done'. Running jobs are left alone, and what is
-- inserted after the first step. As awa.clear_step says.
CREATE FUNCTION awa.cancel_waiting_v1(p_queue text, p_reason text DEFAULT NULL, p_from jsonb DEFAULT NULL,
                                      p_limit integer DEFAULT 500, OUT happened text, OUT cancelled integer,
                                      OUT go_on jsonb)
LANGUAGE sql VOLATILE
SET jit = off
AS $$
    SELECT s.happened, s.waiting, s.go_on FROM awa.clear_step(p_queue, false, p_reason, p_from, p_limit) s
$$;

-- Delete whatever waits in a queue, is available, has failed or was cancelled, in steps as awa.cancel_waiting_v1.
CREATE FUNCTION awa.purge_queue_v1(p_queue text, p_from jsonb DEFAULT NULL, p_limit integer DEFAULT 500,
                                   OUT happened text, OUT waiting integer, OUT ended integer, OUT go_on jsonb)
LANGUAGE sql VOLATILE
SET jit = off
AS $$
    SELECT s.happened, s.waiting, s.ended, s.go_on FROM awa.clear_step(p_queue, true, NULL, p_from, p_limit) s
$$;

-- As find_job_v2 of 0018_outcomes.sql; it tells of keys and expiry, too, and a job that has failed or was cancelled is gone when its row of ended_jobs is: it was purged,
-- or kept for as long as such jobs are, though its entries may lie in a segment that was not emptied yet.
CREATE FUNCTION awa.find_job_v3(p_id bigint)
RETURNS TABLE (id bigint, queue text, kind text, state text, priority smallint, attempt smallint,
               max_attempts smallint, args json, metadata json, tags text[], created_at timestamptz,
               run_at timestamptz, claimed_at timestamptz, ended_at timestamptz, elapsed_ms integer, runtime bigint,
               hostname text, pid integer, waits_for text, error json, history json, concurrency_key text,
               ordering_key text, expires_at timestamptz)
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
REVOKE EXECUTE ON FUNCTION awa.find_job_v3(bigint) FROM PUBLIC;

-- For clients of before.
CREATE OR REPLACE FUNCTION awa.find_job_v2(p_id bigint)
RETURNS TABLE (id bigint, queue text, kind text, state text, priority smallint, attempt smallint,
               max_attempts smallint, args json, metadata json, tags text[], created_at timestamptz,
               run_at timestamptz, claimed_at timestamptz, ended_at timestamptz, elapsed_ms integer, runtime bigint,
               hostname text, pid integer, waits_for text, error json, history json)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    RETURN QUERY
        SELECT f.id, f.queue, f.kind, f.state, f.priority, f.attempt, f.max_attempts, f.args, f.metadata, f.tags,
               f.created_at, f.run_at, f.claimed_at, f.ended_at, f.elapsed_ms, f.runtime, f.hostname, f.pid,
               f.waits_for, f.error, f.history
          FROM awa.find_job_v3(p_id) f;
END $$;

-- As in 0010_control.sql; likewise.
CREATE OR REPLACE FUNCTION awa.locate(p_id bigint, OUT place text, OUT state text, OUT queue text, OUT slot smallint,
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
