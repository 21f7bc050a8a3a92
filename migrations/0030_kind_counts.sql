-- Counts of jobs by kind: what awa.admin tells of a kind, and of the kinds of a queue, as a function.
--
-- Adds functions, so it locks nothing that is in use. Works with awa 0.1 and later.
--
-- Looking is bounded, as in 0028_overviews.sql, and locks nothing but against the emptying of a segment.

-- Whether an entry is of a completed attempt: it ended so by itself; or it did not, is claimed, and is none of the open
-- ones. Its claim is not looked for, which would take longer. Inlined where it is used.
CREATE FUNCTION awa.completed_entry(p_slot smallint, p_lane smallint, p_xid xid8, p_entry bigint, p_from pg_snapshot,
                                    p_to pg_snapshot, p_last_xid xid8, p_last_entry bigint, p_has_ends smallint[],
                                    p_open bigint[]) RETURNS TABLE (is_completed boolean)
LANGUAGE sql STABLE ROWS 1 AS $$
    SELECT coalesce(CASE WHEN p_slot = ANY (p_has_ends)
                         THEN (SELECT e.outcome = 'completed' FROM awa.attempt_ends e
                                WHERE e.slot = p_slot AND e.entry_id = p_entry) END,
                    (p_lane = 0 OR pg_visible_in_snapshot(p_xid, p_from)
                     OR pg_visible_in_snapshot(p_xid, p_to) AND (p_xid, p_entry) <= (p_last_xid, p_last_entry))
                    AND (p_entry = ANY (p_open)) IS NOT TRUE,
                    false)
$$;

-- Whether jobs that were met on so many pages of a sample are surely more than p_exact, even if each of their pages holds
-- nothing else: a Poisson variable reaches that many with a chance of e^-6 at most, by Chernoff's bound. Inlined.
CREATE FUNCTION awa.are_many(p_guess double precision, p_pages bigint, p_exact integer) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT p_guess > p_exact AND p_pages * (ln(p_guess / p_exact) - 1 + p_exact / p_guess) > 6
$$;

-- How many jobs of each kind queues have in each state, no row where there are none; and, where the state is available,
-- since when the oldest has been. NULL: all queues that have jobs, all kinds. What is available lies in two tables, and
-- may have two rows.
--
-- is_exact: they were counted one by one. That is done where a queue has up to p_exact jobs in a state, whatever their
-- kinds, and of a table with less than twice p_pages pages; of completed jobs where a queue has up to p_exact entries, of
-- running ones where no more than p_exact run in all these queues.
-- Beyond, n is an estimate from p_pages pages, or how many were met where that is more. No index knows kinds: a rare one
-- may not be on those pages. So there is a row with kind NULL for each state of a queue that was not counted: of a kind
-- that has no row in that state it is not known whether it has jobs there.
--
-- oldest_at: of those in line, as awa.oldest_available tells it: what is set aside is left out. Looked for among the first
-- 500 of each lane; told when it is at least as old as the last of these wherever a lane has more.
CREATE FUNCTION awa.kind_counts_v1(p_queues text[] DEFAULT NULL, p_kinds text[] DEFAULT NULL,
                                   p_exact integer DEFAULT 10000, p_pages integer DEFAULT 100)
RETURNS TABLE (queue text, kind text, state text, n bigint, is_exact boolean, oldest_at timestamptz)
LANGUAGE plpgsql STABLE
SET plan_cache_mode = force_custom_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET jit = off SET max_parallel_workers_per_gather = 0
AS $$
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
END $$;
