-- Limits: how many attempts may run at once, how many may start in a while, and which jobs have to wait for each other.
--
-- A type and functions; it replaces awa.claim_v1, awa.carry_v1, awa.prune_v2 and awa.conclude, with the same meaning for
-- who knows nothing of this. Waits for no table. Works with awa 0.1 and later: workers of before keep the limits too, since they claim by
-- these functions; they merely ask more often than need be when a queue is paused or full.
--
-- All of it happens in the claim, under the queue's claim lock. Whatever ends an attempt writes the end and nothing
-- else, so that it waits for no lock and forgets nothing: the claim looks whether the attempts that it knows of have
-- ended. That look costs an index probe or three for each open attempt of a limited queue, a few hundred at most.
--
-- A job that cannot get its key is set aside: it waits in waiting_jobs for 'order' (its ordering_key is taken) or for
-- 'key' (as many attempts of its concurrency_key are running as may), behind all that wait for the key already. A claim
-- that finds the key free hands it over to the first of them: it appends the job, express, with the key in its name, so
-- that whoever meets the entry may run it. Why nothing is stuck: while a job waits there is a row in grants for its key.
-- Only claims of the queue remove such rows, and not before they have handed the key over or seen, under the lock under
-- which jobs are set aside, that nobody waits.

-- A job that has to do with keys, as a claim meets it. place: its order among those of the claim.
CREATE TYPE awa.keyed_entry AS (place integer, entry_id bigint, id bigint, key text, ordering text);

-- Whether the holder of a key has it no more: its attempt has ended, or, for an ordering key, the job. p_is_limited:
-- whether concurrency keys are limited still. The rows of an attempt whose segment was emptied are gone, which is looked
-- for only when it is old; then an ordering key is free unless the job is alive elsewhere.
CREATE FUNCTION awa.is_over(g awa.grants, p_is_limited boolean) RETURNS boolean
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
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

-- Have the next claim of a queue look who waits for a key. A claim that is removing such a row is waited for: it may have
-- looked already.
CREATE FUNCTION awa.look_at_key(p_queue text, p_scope text, p_key text) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    INSERT INTO awa.grants (queue, scope, key, id, is_over) VALUES (p_queue, p_scope, left(p_key, 201), 0, true)
        ON CONFLICT (queue, scope, key, id) DO UPDATE SET is_over = true;
    PERFORM awa.ring(ARRAY[p_queue]);
END $$;

-- Tell that these jobs have no use for their keys any more: they have ended without an attempt, are deleted, or leave
-- their queue. In the transaction that does it; a claim hands the keys over.
CREATE FUNCTION awa.release_grants(p_ids bigint[]) RETURNS void
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off
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

-- As in 0018_outcomes.sql; and a job that has ended has no use for its keys.
CREATE OR REPLACE FUNCTION awa.conclude(p_ids bigint[], p_outcomes text[], p_jobs json[], p_keys bytea[]) RETURNS void
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
    PERFORM awa.release_grants(p_ids);
    PERFORM awa.wake_waiters(p_ids);
END $$;

-- The claims of a queue that have open attempts, and how many. The caller holds the queue's claim lock. Found as rescue
-- finds them: what the heartbeats list, and every claim above.
CREATE FUNCTION awa.open_of_queue(p_queue text)
RETURNS TABLE (claim_id bigint, slot smallint, size smallint)
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
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

-- How many attempts of a claim are open.
CREATE FUNCTION awa.open_size(p_slot smallint, p_queue text, p_claim bigint) RETURNS integer
LANGUAGE sql STABLE AS $$
    SELECT coalesce((SELECT cardinality(c.entry_ids) FROM awa.claims c
                      WHERE c.slot = p_slot AND c.queue = p_queue AND c.claim_id = p_claim LIMIT 1)
                    - (SELECT coalesce(sum(cardinality(x.idx)), 0) FROM awa.completions x
                        WHERE x.slot = p_slot AND x.claim_id = p_claim)
                    - (SELECT count(*) FROM awa.attempt_ends e WHERE e.slot = p_slot AND e.claim_id = p_claim),
                    0)::integer
$$;

-- The state of a queue's max_running as it is now: p_state without what has ended since. It looks at as many claims as
-- show that p_wanted more attempts may start, the oldest first; those it has looked at come last.
CREATE FUNCTION awa.still_open(p_queue text, p_state awa.limit_state, p_max_running integer, p_wanted integer)
RETURNS awa.limit_state
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
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

-- Hand free keys over to the first jobs that wait for them, each express, with the key. Returns how many. The caller holds
-- the queue's claim lock. p_limit: attempts of one concurrency key, NULL: no limit.
--
-- Looks at 600 holders at most; where there are more, at those behind a random one, so that all have their turn. Hands
-- over to 500 jobs at most. A waiting job that somebody else holds (who cancels or moves it) keeps its turn: nobody is
-- taken in its place, and the row of the key stays for the next claim. So do rows that somebody else holds.
CREATE FUNCTION awa.hand_over(p_queue text, p_limit integer) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
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

-- Which of the jobs that a claim has met may run: NULL, or what each has to wait for, 'order' or 'key', at its place. In
-- the order of the walk: first its ordering key, then its concurrency key. The caller holds the queue's claim lock.
CREATE FUNCTION awa.admit(p_queue text, p_limit integer, p_keyed awa.keyed_entry[]) RETURNS text[]
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
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

-- After max_running_per_key has changed: attempts that are open have their keys from now on, and who waits for a key is
-- looked at. In the transaction that changes it, under the queue's claim lock.
CREATE FUNCTION awa.limits_changed(p_queue text) RETURNS void
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
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

-- The order in which to walk the lanes of a queue, by the age of what comes first in each: a job gains one priority for
-- every p_aging seconds that it is available; of equals the one that waits longer comes first. Lane 1 stands for what
-- is set aside for a kind, whose first job has p_aside as its priority and p_since as its time. NULL: the usual order.
CREATE FUNCTION awa.aged_order(p_queue text, p_aging double precision, p_aside smallint, p_since timestamptz)
RETURNS smallint[]
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
DECLARE
    v_order smallint[];
BEGIN
    -- the two lanes of a priority stay together, the express one first: what it has is older than its rows tell
    SELECT array_agg(h.lane ORDER BY h.aged, h.since, h.lane) INTO v_order
      FROM (SELECT l.lane, min(l.available_at) OVER of_priority AS since,
                   l.priority - floor(extract(epoch FROM clock_timestamp() - min(l.available_at) OVER of_priority)
                                      / p_aging) AS aged
              FROM (SELECT u.lane::smallint AS lane, u.lane / 2 AS priority, j.available_at
                      FROM generate_series(2, 9) u(lane)
                     CROSS JOIN LATERAL awa.unclaimed(p_queue, 1, NULL, u.lane::smallint) e
                     CROSS JOIN LATERAL (SELECT j.available_at FROM awa.jobs j
                                          WHERE j.slot = e.slot AND j.queue = p_queue AND j.lane = e.lane
                                            AND j.xid = e.xid AND j.entry_id = e.entry_id LIMIT 1) j
                    UNION ALL
                    SELECT 1, p_aside, p_since WHERE p_aside IS NOT NULL) l
            WINDOW of_priority AS (PARTITION BY l.lane / 2)) h;
    IF v_order IS NULL OR v_order = ARRAY(SELECT l FROM unnest(v_order) l
                                         ORDER BY CASE l WHEN 1 THEN 2 * p_aside - 0.5 ELSE l END) THEN
        RETURN NULL;
    END IF;
    RETURN v_order || ARRAY(SELECT l::smallint FROM generate_series(2, 9) l WHERE l <> ALL (v_order) ORDER BY l);
END $$;

-- Take entries out of their lanes that a claim has met and that cannot run, for each the reason. Those with 'kind', 'key'
-- and 'order' wait for that: with their ordering key, unless it is what they wait for, and without a concurrency key that
-- was handed over to them, since others can run with it. Those with 'expired' are cancelled, with what follows. Returns
-- whether keys are free now that somebody may wait for. The caller holds the queue's claim lock.
CREATE FUNCTION awa.set_aside(p_queue text, p_slots smallint[], p_lanes smallint[], p_xids xid8[], p_entries bigint[],
                              p_whys text[]) RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
DECLARE
    v_claim bigint := nextval('awa.claim_id_seq');
    v_now timestamptz := clock_timestamp();
    v_is_free boolean := false;
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
    )
    INSERT INTO awa.waiting_jobs (id, seq, created_at, priority, attempt, max_attempts, timeout_ms, state, waits_for,
                                  wait_key, queue, kind, args, metadata, tags, concurrency_key, ordering_key, unique_key,
                                  expires_at, follow_ups, history)
    SELECT e.id, CASE WHEN e.id IN (SELECT l.id FROM lost l) THEN e.id ELSE nextval('awa.entry_id_seq') END,
           coalesce(e.created_at, e.available_at), e.priority, e.attempt, e.max_attempts, e.timeout_ms,
           'available', e.why, e.wait_key, e.queue, e.kind, e.args, e.metadata, e.tags, e.concurrency_key,
           e.ordering_key, e.unique_key, e.expires_at, e.follow_ups, e.history
      FROM (SELECT * FROM entry ORDER BY n) e;
    IF 'kind' = ANY (p_whys) THEN
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

-- Why a job was cancelled that nobody started in time.
CREATE FUNCTION awa.expiry_error(p_expires_at timestamptz, p_flaw text) RETURNS json LANGUAGE sql STABLE AS $$
    SELECT awa.with_flaw(json_build_object(
        'type', 'Expired', 'traceback', '', 'text',
        format('it expired at %s', to_char(p_expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS"Z"'))), p_flaw)
$$;

-- As claim_v1 of 0018_outcomes.sql; and it keeps the limits, cancels what has expired, and lets what has waited for long
-- go first. In the last row nonce has the milliseconds after which to ask again, when the rate tells. flags of that row:
--   1 the bell is taken   2 somebody else claims   4 come again   8 run nothing beside the job that came
--   16 the queue is paused   32 its limits let nothing start; in both cases the bell is not taken
CREATE FUNCTION awa.claim_v2(p_queue text, p_runtime bigint, p_kinds text[], p_limit integer,
                             p_bell boolean DEFAULT false, p_aging double precision DEFAULT 60)
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
        IF v_round = 1 AND EXISTS (SELECT FROM awa.grants t WHERE t.queue = p_queue) THEN
            v_handed := awa.hand_over(p_queue, m.max_running_per_key);
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
                                      CASE WHEN j.history IS NOT NULL AND j.lane % 2 = 0
                                           THEN j.history->-1->>'outcome' = 'rescued' END AS rescued,
                                      j.concurrency_key, j.ordering_key, j.expires_at <= v_started AS expired,
                                      j.follow_ups::text LIKE '%"completed"%'
                                      OR octet_length(j.unique_key) > 16 AND get_byte(j.unique_key, 16) & 32 = 0
                                          AS single
                                 FROM awa.jobs j
                                WHERE j.queue = p_queue AND j.lane = w.lane
                                  AND (j.xid, j.entry_id) > (w.lo_xid, w.lo_entry)
                                  AND (j.xid, j.entry_id) < (w.hi_xid, w.hi_entry)
                                  AND pg_visible_in_snapshot(j.xid, w.page_to)
                                ORDER BY j.xid, j.entry_id
                                LIMIT v_limit) e
                         LIMIT v_limit) w
                WINDOW so_far AS (ROWS UNBOUNDED PRECEDING)
            ), whole AS MATERIALIZED (
                SELECT count(*) AS picked, min(s.ord) FILTER (WHERE s.rescued) AS suspect,
                       awa.ended_among(array_agg(s.slot), array_agg(s.entry_id)) AS ended
                  FROM sized s
            ), kept AS MATERIALIZED (
                SELECT s.*, p_kinds IS NULL OR s.kind = ANY (p_kinds) AS known, s.entry_id = ANY (w.ended) AS ended,
                       s.ordering_key IS NOT NULL
                       OR m.max_running_per_key IS NOT NULL AND s.concurrency_key IS NOT NULL AS keyed
                  FROM whole w CROSS JOIN sized s
                 WHERE s.ord = 1 OR v_direct IS NOT NULL OR (s.bytes <= c_bytes AND (s.ord < w.suspect) IS NOT FALSE)
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
                       array_agg(ROW(k.ord, k.entry_id, k.id, k.concurrency_key, k.ordering_key)::awa.keyed_entry)
                       FILTER (WHERE k.keyed) AS keyed,
                       v_direct IS NULL AND bool_or(k.rescued) AS alone,
                       max(k.attempt) AS top_attempt, min(k.max_attempts) AS lo_max, max(k.max_attempts) AS hi_max,
                       string_agg(k.args, '') FILTER (WHERE k.bytes <= c_bytes) AS args,
                       array_agg(CASE WHEN k.bytes <= c_bytes THEN octet_length(k.args) END) AS lens
                  FROM kept k
                 WHERE k.known AND NOT k.ended AND k.expired IS NOT TRUE
                   AND (NOT k.keyed OR (SELECT v.why[k.ord] FROM verdict v) IS NULL)
                 GROUP BY k.slot, k.lane
            ), aliens AS (
                SELECT array_agg(k.slot) AS slots, array_agg(k.lane) AS lanes, array_agg(k.xid) AS xids,
                       array_agg(k.entry_id) AS entries,
                       array_agg(CASE WHEN k.expired THEN 'expired' WHEN NOT k.known AND k.why IS NULL THEN 'kind'
                                      ELSE k.why END) AS whys
                  FROM (SELECT k.*, CASE WHEN k.keyed THEN (SELECT v.why[k.ord] FROM verdict v) END AS why FROM kept k
                         WHERE (SELECT t.has_aliens OR t.keyed IS NOT NULL FROM told t) AND NOT k.ended) k
                 WHERE k.expired OR NOT k.known OR k.why IS NOT NULL
            )
            SELECT l.ord, l.n, l.lane AS last_lane, l.xid AS last_xid, l.entry_id AS last_entry,
                   (SELECT w.picked FROM whole w) AS picked, (SELECT t.lanes FROM told t) AS lanes,
                   a.slots AS alien_slots, a.lanes AS alien_lanes, a.xids AS alien_xids, a.entries AS alien_entries,
                   a.whys AS alien_whys, b.*
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
                    FOREACH v_lane IN ARRAY v_usual LOOP
                        f := NULL;
                        FOR v_n IN 1..cardinality(v_frontier) LOOP
                            IF v_frontier[v_n].lane = v_lane THEN
                                f := v_frontier[v_n];
                            END IF;
                        END LOOP;
                        -- cut short in last_lane: the lanes before it are exhausted, those behind it not walked
                        v_place := array_position(v_order, v_lane);
                        IF (g.picked >= v_limit OR g.picked > g.ord) AND v_place >= array_position(v_order, g.last_lane) THEN
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
        END LOOP;

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
END $$;

-- For workers of before.
CREATE OR REPLACE FUNCTION awa.claim_v1(p_queue text, p_runtime bigint, p_kinds text[], p_limit integer,
                                        p_bell boolean DEFAULT false)
RETURNS TABLE (flags integer, claim_id bigint, slot smallint, nonce integer, priority smallint, ids bigint[],
               entry_ids bigint[], attempts smallint[], max_attempts smallint[], kinds text[], lens integer[],
               args text, created_at timestamptz[], details text[])
LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    RETURN QUERY SELECT * FROM awa.claim_v2(p_queue, p_runtime, p_kinds, p_limit, p_bell);
END $$;

-- As in 0008_ring.sql; and what has an ordering key stays where it is, and holds its slot, while something of its lane that
-- comes before lies in another slot: carried, it would go first.
CREATE OR REPLACE FUNCTION awa.carry_v1(p_slot smallint, p_queue text, p_limit integer) RETURNS integer
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
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

-- As in 0019_dependencies.sql; and the state of the limits is written down with the frontiers.
CREATE OR REPLACE FUNCTION awa.prune_v2(p_slot smallint, p_entries bigint, p_file oid, p_examined bigint[]) RETURNS text
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
END $$;
