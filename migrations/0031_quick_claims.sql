-- Claims read what they walk over once.
--
-- Adds a function, replaces one in place by one that does the same, and has the entries of claims stored as they are: for
-- that awa.claims and its partitions are locked a moment, and who claims or records waits. Works with awa 0.1 and later.

-- To compress eight kilobytes for each claim of a thousand took an eighth of its time, with the queue's claim lock held,
-- and saved five bytes of WAL a job.
ALTER TABLE awa.claims ALTER entry_ids SET STORAGE EXTERNAL;

-- The entries that a claim walks over: p_limit at most, in the order of the ranges, and within a range that of the index:
-- a nested loop whose outer side is the ranges, stopped by the limit. tests/storage/test_plans.py looks. It is planned as
-- a part of the statement that calls it, so it has no settings and is not VOLATILE. expired is as of p_now.
CREATE FUNCTION awa.walked(p_queue text, p_kinds text[], p_limit integer, p_now timestamptz, p_lanes smallint[],
                           p_to pg_snapshot[], p_lo_xid xid8[], p_lo_entry bigint[], p_hi_xid xid8[],
                           p_hi_entry bigint[])
RETURNS TABLE (n bigint, slot smallint, lane smallint, xid xid8, entry_id bigint, id bigint, kind text,
               attempt smallint, max_attempts smallint, args text, created_at timestamptz, details text,
               rescued boolean, concurrency_key text, ordering_key text, expired boolean, single boolean, known boolean,
               size integer)
LANGUAGE sql STABLE AS $$
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

-- As in 0021_limits.sql; but what is walked goes through the passes that look at keys, expiry, size and ends only when
-- one pass has told that there is something to look at.
CREATE OR REPLACE FUNCTION awa.claim_v2(p_queue text, p_runtime bigint, p_kinds text[], p_limit integer,
                                        p_bell boolean DEFAULT false, p_aging double precision DEFAULT 60)
RETURNS TABLE (flags integer, claim_id bigint, slot smallint, nonce integer, priority smallint, ids bigint[],
               entry_ids bigint[], attempts smallint[], max_attempts smallint[], kinds text[], lens integer[],
               args text, created_at timestamptz[], details text[])
LANGUAGE plpgsql VOLATILE
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET jit = off SET lock_timeout = '20ms' SET cursor_tuple_fraction = 1
AS $$
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
END $$;
