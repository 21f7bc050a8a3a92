-- Looks pass over what is not there: the order of lanes by age is found without walking over jobs that have ended, counts
-- do not walk over what an open transaction writes, and a look for a job reads no segment's last pages for nothing.
--
-- Replaces functions in place. awa.aged_order takes a lane to be as old as its first entries, whether these have ended or
-- not; the others mean the same. Waits for no table. Works with awa 0.1 and later.

-- As in 0028_overviews.sql; but of a slot that is not written to any more the last range too, though it is not full.
CREATE OR REPLACE FUNCTION awa.summarize_v1(p_slot smallint, p_from bigint, p_ranges integer) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
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

-- As in 0028_overviews.sql; but what a transaction writes that began after the snapshot is not walked over: see
-- awa.xid_before.
CREATE OR REPLACE FUNCTION awa.unclaimed_ranges(p_queue text)
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
           awa.xid_before(pg_snapshot_xmax(p.page_to)), 9223372036854775807
      FROM page p WHERE p.is_plain
     UNION ALL
    SELECT p.lane, p.page_to, u.*
      FROM page p
     CROSS JOIN LATERAL awa.page_ranges(p.page_from, p.page_to, p.last_xid, p.last_entry) r
     CROSS JOIN LATERAL unnest(r.lo_xid, r.lo_entry, r.hi_xid, r.hi_entry) u
     WHERE NOT p.is_plain
$$;

-- awa.oldest_available of each queue. A call of that costs as much as what it reads.
CREATE FUNCTION awa.oldest_available_v1(p_queues text[]) RETURNS TABLE (queue text, oldest_at timestamptz)
LANGUAGE sql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off
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

-- As in 0021_limits.sql; but a lane is as old as its first entries are, be they ended. To find the first that has not may
-- be to read a million that were cancelled, again every second, while all others wait for the claim lock. A lane that
-- comes first only for such entries is walked first by one round of one claim, which leaves a thousand of them behind.
CREATE OR REPLACE FUNCTION awa.aged_order(p_queue text, p_aging double precision, p_aside smallint,
                                          p_since timestamptz) RETURNS smallint[]
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
