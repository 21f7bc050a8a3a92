-- Jobs that wait for other jobs: finding what became of those, and letting the waiting ones go.
--
-- Adds an index to waiting_jobs, which holds off the recording of jobs that wait while it is built, and functions.
-- awa.prune_v1 gets other words for what it does. Works with awa 0.1 and later; a worker of before that leads lets them
-- wait, and empties no segment meanwhile.
--
-- A job with parents is a row of waiting_jobs with waits_for = 'parent'. Nobody locks a parent, and a parent knows
-- nothing of it: the leader walks over these rows and looks at their parents, as often as that costs little. What it
-- sees is final when it acts on it: no job leaves the states completed, failed and cancelled. A row that waits is
-- changed by whoever holds its lock; two leaders, or a leader and who cancels, moves or replaces it, follow each other,
-- and the second finds the row changed or gone.
--
-- A parent that is nowhere to be found has ended, nobody knows how. So a segment is emptied, and a failed or cancelled
-- job deleted, only when no row waits that has not been looked at since everything there had ended.

-- By seq: in the order of their ids they might be looked for in the primary key, among all that waits.
CREATE INDEX waiting_jobs_parent ON awa.waiting_jobs (seq) WHERE waits_for = 'parent';

-- The next jobs that wait for others, after the one whose seq is p_after: up to p_limit, and no more once they have
-- p_parents parents.
CREATE FUNCTION awa.dependents_v1(p_after bigint, p_limit integer, p_parents integer)
RETURNS TABLE (seq bigint, id bigint, parents bigint[])
LANGUAGE sql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET jit = off
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

-- What has become of these jobs, which others wait for. Where the caller knows from its last look, it says in which
-- entry a job was, and in which claim; NULL where it does not. One row per job, with what it may say the next time:
--   waiting, open                  it has not ended; open: in the entry that is returned, whether or not it is running
--   completed, failed, cancelled   for good
--   gone                           there is no such job, or its history was deleted
--   passed                         it is running, or has completed: there was enough to do, look again
--   NULL                           it has moved on since; or, without a row, there was enough to do: likewise
--
-- In a transaction of its own, at READ COMMITTED. The lock, which only keeps segments from being emptied, comes before
-- the first statement, and that one looks for what waits or has ended: whatever is not found there had an entry in the
-- ring then, which stays, or is gone.
CREATE FUNCTION awa.look_at_parents_v1(p_ids bigint[], p_slots smallint[], p_queues text[], p_lanes smallint[],
                                       p_xids xid8[], p_entries bigint[], p_ats timestamptz[], p_claims bigint[],
                                       p_idx smallint[])
RETURNS TABLE (id bigint, state text, slot smallint, queue text, lane smallint, xid xid8, entry_id bigint,
               available_at timestamptz, claim_id bigint, idx smallint)
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
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
            SELECT false AS is_newest, u.id, u.slot, u.queue, u.lane, u.xid, u.entry_id, u.available_at, u.claim_id, u.idx
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
                    WHEN e.outcome IN ('completed', 'failed', 'cancelled') THEN e.outcome
                    -- The rest left the job to a successor, which is in this snapshot too, or has ended and is gone.
                    WHEN e.outcome IS NOT NULL
                    THEN coalesce((SELECT 'waiting' FROM awa.waiting_jobs w WHERE w.id = p.id),
                                  (SELECT t.state FROM awa.ended_jobs t WHERE t.id = p.id),
                                  CASE WHEN p.is_newest THEN 'gone' END)
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
                WHERE p.claim_id IS NULL AND (p.id IN (SELECT s.id FROM passed s WHERE s.is_looked_for)) IS TRUE) c ON true;
    RETURN QUERY
        SELECT u.id, u.state, NULL::smallint, NULL::text, NULL::smallint, NULL::xid8, NULL::bigint, NULL::timestamptz,
               NULL::bigint, NULL::smallint
          FROM unnest(p_ids, v_states) AS u(id, state) WHERE u.state IS NOT NULL;
END $$;

-- Let jobs go whose parents have ended. p_states says how, as a JSON object from the parent's id to its state; only of
-- those which have ended. Of each job in p_ids that still waits for parents:
--   started    when all of them have completed: it is available, or waits for its time if that is still to come
--   cancelled  or deleted (discarded): when one has not, as on_parent_failure says; with 'run' that counts as completed.
--              What follows from a cancellation follows; from a deletion nothing
--   and else the parents that have ended are struck off its list
-- skipped are those whose rows somebody else holds: nothing has happened to them.
CREATE FUNCTION awa.resolve_parents_v1(p_ids bigint[], p_states jsonb, OUT started bigint[], OUT cancelled bigint[],
                                       OUT discarded bigint[], OUT skipped bigint[])
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
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

-- Empty a sealed slot as awa.prune_v1 of 0008_ring.sql does, whose words on p_entries and p_file hold. p_examined are
-- jobs that wait for parents and whose parents were looked at after all entries of the slot had ended. 'awaited' when
-- another waits, perhaps for one that lies here: look at its parents, then come again.
--
-- That question comes under the lock, in a new statement. Who inserts a job after one of this slot looks for it there;
-- what has committed since then is seen here.
CREATE FUNCTION awa.prune_v2(p_slot smallint, p_entries bigint, p_file oid, p_examined bigint[]) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '10ms'
AS $$
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
            'INSERT INTO awa.frontiers AS t (queue, claim_id, frontier)
             WITH RECURSIVE queues AS (
                 (SELECT c.queue FROM awa.claims_%1$s c ORDER BY c.queue LIMIT 1)
                 UNION ALL
                 SELECT n.queue FROM queues q
                  CROSS JOIN LATERAL (SELECT c.queue FROM awa.claims_%1$s c WHERE c.queue > q.queue
                                       ORDER BY c.queue LIMIT 1) n
             )
             SELECT n.queue, n.claim_id, n.frontier
               FROM queues q
              CROSS JOIN LATERAL (SELECT c.queue, c.claim_id, c.frontier FROM awa.claims_%1$s c WHERE c.queue = q.queue
                                   ORDER BY c.claim_id DESC LIMIT 1) n
                 ON CONFLICT (queue) DO UPDATE SET claim_id = excluded.claim_id, frontier = excluded.frontier
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
END $$;

-- For a worker of before that leads: it looks at no parents.
CREATE OR REPLACE FUNCTION awa.prune_v1(p_slot smallint, p_entries bigint, p_file oid) RETURNS text
LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '10ms'
AS $$
DECLARE
    v_outcome text := awa.prune_v2(p_slot, p_entries, p_file, '{}');
BEGIN
    RETURN CASE v_outcome WHEN 'awaited' THEN 'busy' ELSE v_outcome END;
END $$;

REVOKE EXECUTE ON FUNCTION awa.prune_v2(smallint, bigint, oid, bigint[]) FROM PUBLIC;
