-- Overviews: what awa.admin counts, as functions, and views for psql and dashboards that say the same.
--
-- Adds functions, views, and two indexes, which hold off the recording of jobs that wait, failed or were cancelled while
-- they are built; they hold jobs with follow-ups, and follow-ups, only. Replaces a function in place. Works with awa 0.1 and later.
--
-- Looking is bounded: what is many is estimated from some pages of its table. Nothing here locks anything but against the
-- emptying of a segment, and that no longer than the statement that asks. A view sees what its statement's snapshot sees;
-- a segment that is emptied meanwhile is empty, whatever the snapshot says, so a job that was carried out of it in that
-- moment may be left out once.

-- The job whose follow-up one is, by its follow_ups; NULL when it is none's, or rows of plain SQL hold nonsense there,
-- which must keep no attempt from ending. Not called for NULL, which nearly all jobs have.
CREATE FUNCTION awa.follows(p_follow_ups json) RETURNS bigint LANGUAGE plpgsql IMMUTABLE STRICT AS $$
BEGIN
    RETURN (p_follow_ups->>'of')::bigint;
EXCEPTION WHEN data_exception THEN
    RETURN NULL;
END $$;

-- The follow-ups of a job.
CREATE INDEX waiting_jobs_follows ON awa.waiting_jobs (awa.follows(follow_ups)) WHERE follow_ups IS NOT NULL;
CREATE INDEX ended_jobs_follows ON awa.ended_jobs (awa.follows(follow_ups)) WHERE follow_ups IS NOT NULL;

-- As in 0011_inspect.sql, but up to 512 KiB from the end of the current slot: what is left out is read whole by each look
-- for a job, and 8 MiB of it took several milliseconds.
CREATE OR REPLACE FUNCTION awa.summarize_v1(p_slot smallint, p_from bigint, p_ranges integer) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    v_index regclass := format('awa.jobs_%s_id_idx', p_slot)::regclass;
    v_end bigint := pg_relation_size(format('awa.jobs_%s', p_slot)::regclass) / current_setting('block_size')::bigint;
    v_page bigint := p_from;
BEGIN
    IF p_from > v_end THEN
        RETURN 0;
    END IF;
    IF p_slot = pg_sequence_last_value('awa.ring_seq') THEN
        v_end := v_end - 64;
    END IF;
    WHILE v_page + 32 <= v_end AND v_page < p_from + 32 * p_ranges LOOP
        PERFORM brin_summarize_range(v_index, v_page);
        v_page := v_page + 32;
    END LOOP;
    RETURN v_page;
END $$;

-- Where the entries of a queue lie that nobody has claimed: the ranges that awa.unclaimed walks, each with the snapshot
-- that sees what belongs to it. Snapshots without open transactions make one range, which is written down here: a call
-- for each lane would take longer than all the rest. Inlined where it is used.
CREATE FUNCTION awa.unclaimed_ranges(p_queue text)
RETURNS TABLE (lane smallint, page_to pg_snapshot, lo_xid xid8, lo_entry bigint, hi_xid xid8, hi_entry bigint)
LANGUAGE sql STABLE ROWS 10 AS $$
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
           pg_snapshot_xmax(p.page_to), -1::bigint
      FROM page p WHERE p.is_plain
     UNION ALL
    SELECT p.lane, p.page_to, u.*
      FROM page p
     CROSS JOIN LATERAL awa.page_ranges(p.page_from, p.page_to, p.last_xid, p.last_entry) r
     CROSS JOIN LATERAL unnest(r.lo_xid, r.lo_entry, r.hi_xid, r.hi_entry) u
     WHERE NOT p.is_plain
$$;

-- Claims whose attempts may be open, as awa.rescue_v1 reads them: what the last heartbeat listed, and every claim above
-- the newest it knew. OFFSET keeps a filter by queue from coming first: it would find all that the queue has.
CREATE VIEW awa.open_claims AS
    SELECT c.slot, c.runtime, c.claim_id, c.claimed_at, c.queue, c.lane, c.entry_ids, c.xids
      FROM awa.runtime_instances i
     CROSS JOIN LATERAL (
           (SELECT t.* FROM awa.claims t WHERE t.runtime = i.id AND t.claim_id > i.newest_claim OFFSET 0)
           UNION ALL
           SELECT t.* FROM unnest(i.open_claims) o CROSS JOIN LATERAL (
                  SELECT * FROM awa.claims t
                   WHERE t.runtime = i.id AND t.claim_id = o AND o <= i.newest_claim OFFSET 0) t) c
     WHERE i.ended_at IS NULL;

-- The queues that have jobs. The next is the first entry of an index behind the last: a look for each queue, not for
-- each job.
CREATE FUNCTION awa.queue_names() RETURNS SETOF text
LANGUAGE sql STABLE ROWS 20
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
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

-- About p_pages pages of a table, or of these segments of one. Evenly spread: one from each of as many equal parts, since
-- the jobs of a queue often lie side by side, at a place in it that chance has decided once and for all.
--
-- weight: how many pages each stands for; 1 when these are all there are.
CREATE FUNCTION awa.sample_pages(p_table text, p_pages integer, p_slots smallint[] DEFAULT NULL)
RETURNS TABLE (slot smallint, first tid, behind tid, weight bigint)
LANGUAGE plpgsql STABLE ROWS 1000 AS $$
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

-- How many jobs queues have in each state; no row where there are none. NULL: all queues that have jobs.
--
-- is_exact: they were counted one by one. That is done up to p_exact of a queue in a state, and of a table with up to
-- p_pages pages whatever it holds; of completed jobs up to p_batches claims of a queue. Beyond, n is an estimate from
-- p_pages pages of the table; what those show to be many by far is not counted at all.
CREATE FUNCTION awa.queue_counts_v1(p_queues text[] DEFAULT NULL, p_exact integer DEFAULT 10000,
                                    p_batches integer DEFAULT 1000, p_pages integer DEFAULT 500)
RETURNS TABLE (queue text, state text, n bigint, is_exact boolean)
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_custom_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET max_parallel_workers_per_gather = 0
AS $$
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
END $$;

-- How many of a claim's attempts have completed. Inlined where it is used.
CREATE FUNCTION awa.completed_of_claim(p_slot smallint, p_claim bigint) RETURNS TABLE (n bigint)
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT coalesce(sum(cardinality(x.idx)), 0)
           + (SELECT count(*) FROM awa.attempt_ends e
               WHERE e.slot = p_slot AND e.claim_id = p_claim AND e.outcome = 'completed')
      FROM awa.completions x
     WHERE x.slot = p_slot AND x.claim_id = p_claim
$$;

-- Since when the oldest available job of a queue has been available: the first of each lane that has not ended, of the
-- first thousand. What is set aside for a kind or a key is left out; NULL: nobody waits in line.
CREATE FUNCTION awa.oldest_available(p_queue text) RETURNS timestamptz
LANGUAGE sql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
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

-- Whether an entry is of a claim. Its price keeps the planner from trying every entry of a queue with every claim: of
-- the ways to join them, only that from one entry is to begin with it.
CREATE FUNCTION awa.is_member(p_entry_ids bigint[], p_entry bigint) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE COST 1000 AS $$
BEGIN
    RETURN p_entry = ANY (p_entry_ids);
END $$;

-- Every job, in its one place: one row for each that waits, is available, runs or has ended, as awa.find_job_v3 and the
-- lists of awa.admin tell of it; the last attempt's error is error_type and error_text.
--
-- What a query costs follows from what it says of state and queue. With either, what is in no such state is not looked at,
-- and the rest is found by index: rows of a queue, of a state, or of both cost as much as there are of them. By id it
-- takes some milliseconds, and up to some tenths of a second for a completed job whose queue runs in claims of one;
-- awa.find_job_v3 is faster. Without any of these, or over all completed jobs, everything is read.
CREATE VIEW awa.job_overview AS
    SELECT j.id, j.queue, j.kind, j.state, j.priority, j.attempt, j.max_attempts, j.created_at, j.run_at, j.claimed_at,
           j.ended_at, j.elapsed_ms, j.runtime, r.hostname, r.pid, j.waits_for, j.error->>'type' AS error_type,
           j.error->>'text' AS error_text, j.expires_at, j.tags, j.concurrency_key, j.ordering_key, j.args
      FROM (
    SELECT w.id, w.queue, w.kind, w.state AS state, w.priority, w.attempt, w.max_attempts,
           w.created_at AS created_at, CASE WHEN isfinite(w.run_at) THEN w.run_at END AS run_at,
           NULL::timestamptz AS claimed_at, NULL::timestamptz AS ended_at,
           (w.history->-1->>'elapsed_ms')::integer AS elapsed_ms, (w.history->-1->>'runtime')::bigint AS runtime,
           w.waits_for AS waits_for, awa.error_of(w.history->-1) AS error,
           CASE WHEN isfinite(w.expires_at) THEN w.expires_at END AS expires_at, coalesce(w.tags, '{}') AS tags,
           w.concurrency_key, w.ordering_key, w.args
      FROM awa.waiting_jobs w
     UNION ALL
    SELECT e.id, e.queue, e.kind, e.state AS state, e.priority, e.attempt, e.max_attempts,
           e.created_at AS created_at, NULL::timestamptz AS run_at,
           NULL::timestamptz AS claimed_at, e.ended_at AS ended_at,
           (e.history->-1->>'elapsed_ms')::integer AS elapsed_ms, (e.history->-1->>'runtime')::bigint AS runtime,
           NULL::text AS waits_for, awa.error_of(e.history->-1) AS error,
           NULL::timestamptz AS expires_at, coalesce(e.tags, '{}') AS tags,
           e.concurrency_key, e.ordering_key, e.args
      FROM awa.ended_jobs e
     UNION ALL
    SELECT j.id, j.queue, j.kind, 'available' AS state, j.priority, j.attempt, j.max_attempts,
           coalesce(j.created_at, j.available_at) AS created_at, NULL::timestamptz AS run_at,
           NULL::timestamptz AS claimed_at, NULL::timestamptz AS ended_at,
           (j.history->-1->>'elapsed_ms')::integer AS elapsed_ms, (j.history->-1->>'runtime')::bigint AS runtime,
           NULL::text AS waits_for, awa.error_of(j.history->-1) AS error,
           CASE WHEN isfinite(j.expires_at) THEN j.expires_at END AS expires_at, coalesce(j.tags, '{}') AS tags,
           j.concurrency_key, j.ordering_key, j.args
      FROM awa.queue_names() q(queue)
     CROSS JOIN LATERAL awa.unclaimed_ranges(q.queue) u
      JOIN awa.jobs j ON j.queue = q.queue AND j.lane = u.lane AND (j.xid, j.entry_id) > (u.lo_xid, u.lo_entry)
                     AND (j.xid, j.entry_id) < (u.hi_xid, u.hi_entry) AND pg_visible_in_snapshot(j.xid, u.page_to)
     WHERE NOT EXISTS (SELECT FROM awa.attempt_ends e WHERE e.slot = j.slot AND e.entry_id = j.entry_id)
     UNION ALL
    SELECT j.id, j.queue, j.kind, 'running' AS state, j.priority, j.attempt, j.max_attempts,
           coalesce(j.created_at, j.available_at) AS created_at, NULL::timestamptz AS run_at,
           c.claimed_at AS claimed_at, NULL::timestamptz AS ended_at,
           NULL::integer AS elapsed_ms, c.runtime AS runtime,
           NULL::text AS waits_for, awa.error_of(j.history->-1) AS error,
           CASE WHEN isfinite(j.expires_at) THEN j.expires_at END AS expires_at, coalesce(j.tags, '{}') AS tags,
           j.concurrency_key, j.ordering_key, j.args
      FROM awa.open_claims c
     CROSS JOIN LATERAL unnest(c.entry_ids, c.xids) WITH ORDINALITY m(entry_id, xid, idx)
      JOIN awa.jobs j ON j.slot = c.slot AND j.queue = c.queue AND j.lane = c.lane AND j.xid = m.xid
                     AND j.entry_id = m.entry_id
     WHERE NOT EXISTS (SELECT FROM awa.completions x
                        WHERE x.slot = c.slot AND x.claim_id = c.claim_id AND m.idx::smallint = ANY (x.idx))
       AND NOT EXISTS (SELECT FROM awa.attempt_ends e WHERE e.slot = c.slot AND e.entry_id = m.entry_id)
     UNION ALL
    SELECT j.id, j.queue, j.kind, 'completed' AS state, j.priority, j.attempt, j.max_attempts,
           coalesce(j.created_at, j.available_at) AS created_at, NULL::timestamptz AS run_at,
           c.claimed_at AS claimed_at, x.completed_at AS ended_at,
           d.elapsed_ms AS elapsed_ms, c.runtime AS runtime,
           NULL::text AS waits_for, NULL::json AS error,
           CASE WHEN isfinite(j.expires_at) THEN j.expires_at END AS expires_at, coalesce(j.tags, '{}') AS tags,
           j.concurrency_key, j.ordering_key, j.args
      FROM awa.completions x
     CROSS JOIN LATERAL unnest(x.idx, x.elapsed_ms) d(idx, elapsed_ms)
      JOIN awa.claims c ON c.slot = x.slot AND c.claim_id = x.claim_id AND cardinality(c.entry_ids) >= d.idx
      JOIN awa.jobs j ON j.slot = c.slot AND j.queue = c.queue AND j.lane = c.lane AND j.xid = c.xids[d.idx]
                     AND j.entry_id = c.entry_ids[d.idx] AND awa.is_member(c.entry_ids, j.entry_id)
     UNION ALL
    SELECT j.id, j.queue, j.kind, 'completed' AS state, j.priority, j.attempt, j.max_attempts,
           coalesce(j.created_at, j.available_at) AS created_at, NULL::timestamptz AS run_at,
           c.claimed_at AS claimed_at, e.ended_at AS ended_at,
           e.elapsed_ms AS elapsed_ms, c.runtime AS runtime,
           NULL::text AS waits_for, e.error AS error,
           CASE WHEN isfinite(j.expires_at) THEN j.expires_at END AS expires_at, coalesce(j.tags, '{}') AS tags,
           j.concurrency_key, j.ordering_key, j.args
      FROM awa.attempt_ends e
      JOIN awa.claims c ON c.slot = e.slot AND c.claim_id = e.claim_id AND e.entry_id = ANY (c.entry_ids)
      JOIN awa.jobs j ON j.slot = c.slot AND j.queue = c.queue AND j.lane = c.lane AND j.entry_id = e.entry_id
                     AND j.xid = c.xids[array_position(c.entry_ids, e.entry_id)]
     WHERE e.outcome = 'completed') j
      LEFT JOIN awa.runtime_instances r ON r.id = j.runtime;

-- Every queue that has jobs, that code describes, of which something was said, or that a worker serves: as
-- awa.admin.list_queues tells of it. The numbers are those of awa.queue_counts_v1; estimated names the states of which
-- they are estimates. All of it costs about as much as one of its rows.
CREATE VIEW awa.queue_overview AS
    WITH counted AS (
        SELECT c.queue, c.state, sum(c.n)::bigint AS n, bool_and(c.is_exact) AS is_exact
          FROM awa.queue_counts_v1() c
         GROUP BY c.queue, c.state
    ), counts AS (
        SELECT c.queue, array_agg(c.state ORDER BY c.state) FILTER (WHERE NOT c.is_exact) AS estimated,
               max(c.n) FILTER (WHERE c.state = 'scheduled') AS scheduled,
               max(c.n) FILTER (WHERE c.state = 'available') AS available,
               max(c.n) FILTER (WHERE c.state = 'running') AS running,
               max(c.n) FILTER (WHERE c.state = 'retryable') AS retryable,
               max(c.n) FILTER (WHERE c.state = 'waiting_external') AS waiting_external,
               max(c.n) FILTER (WHERE c.state = 'completed') AS completed,
               max(c.n) FILTER (WHERE c.state = 'failed') AS failed,
               max(c.n) FILTER (WHERE c.state = 'cancelled') AS cancelled
          FROM counted c
         GROUP BY c.queue
    ), names AS (
        SELECT q AS queue FROM awa.queue_names() q
         UNION
        SELECT m.queue FROM awa.queue_meta m
         UNION
        SELECT d.queue FROM awa.queue_descriptors d
         UNION
        SELECT s->>'name'
          FROM awa.runtime_instances i CROSS JOIN LATERAL json_array_elements(i.queues) s
         WHERE i.ended_at IS NULL AND s->>'name' IS NOT NULL
    )
    SELECT n.queue, coalesce(c.available, 0) AS available, coalesce(c.running, 0) AS running,
           coalesce(c.scheduled, 0) AS scheduled, coalesce(c.retryable, 0) AS retryable,
           coalesce(c.waiting_external, 0) AS waiting_external, coalesce(c.failed, 0) AS failed,
           coalesce(c.cancelled, 0) AS cancelled, coalesce(c.completed, 0) AS completed,
           coalesce(c.estimated, '{}') AS estimated, awa.oldest_available(n.queue) AS oldest_at, m.paused_at, m.paused_by,
           m.pause_reason, m.max_running, m.rate, m.burst, m.max_running_per_key, d.display_name, d.description, d.owner,
           d.docs_url, d.tags
      FROM names n
      LEFT JOIN counts c ON c.queue = n.queue
      LEFT JOIN awa.queue_meta m ON m.queue = n.queue
      LEFT JOIN awa.queue_descriptors d ON d.queue = n.queue;

-- Every runtime that is remembered, which is one start of a worker process. state: ended, it has left; gone, it was taken
-- for dead, and what it had was given back; stale, it has been silent for as long as that takes; else live.
-- Whoever leaves ends before it is fenced, in one statement; whoever is taken for dead is fenced before.
-- threads and busy are as of snapshot_at; NULL where a worker does not tell.
CREATE VIEW awa.runtime_overview AS
    SELECT i.id, i.hostname, i.pid, i.version,
           CASE WHEN g.gone_at < coalesce(i.ended_at, 'infinity') THEN 'gone'  -- who leaves is fenced afterwards
                WHEN i.ended_at IS NOT NULL THEN 'ended'
                WHEN EXISTS (SELECT FROM awa.live_runtimes l WHERE l.id = i.id) THEN 'live'
                ELSE 'stale' END AS state,
           i.started_at, i.last_seen_at, i.ended_at, i.threads, i.busy, i.quiet_at, i.quiet_by,
           EXISTS (SELECT FROM awa.leases l
                    WHERE l.name = 'maintenance' AND l.runtime = i.id AND l.expires_at > clock_timestamp()) AS is_leader,
           ARRAY(SELECT s->>'name' FROM json_array_elements(i.queues) s) AS queues, i.in_flight, i.health, i.snapshot_at
      FROM awa.runtime_instances i
      LEFT JOIN awa.gone_runtimes g ON g.runtime = i.id;
