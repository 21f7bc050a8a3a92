-- Claiming: fewer passes over what a claim picks.
--
-- Replaces two functions, in place, by ones that do the same. Works with awa 0.1 and later.

-- Those of some unclaimed entries that have ended already (cancelled, moved, carried). Looks for each only in slots in
-- which anything ended so: what is carried forward leaves such ends behind in sealed slots, for as long as these are kept.
CREATE OR REPLACE FUNCTION awa.ended_among(p_slots smallint[], p_entries bigint[]) RETURNS bigint[]
LANGUAGE plpgsql STABLE AS $$
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

-- Start attempts on up to p_limit available entries of a queue. In a transaction of its own; it commits
-- asynchronously, since a claim that a crash forgets is merely claimed again.
--
-- p_kinds: the kinds this worker knows (NULL: all). An entry of another kind is set aside: it waits, outside the
-- lane, for a worker that knows it, which takes it directly in its priority's turn. p_bell tries to take the queue's
-- bell before looking.
--
-- One row per batch (an index in the arrays is a member's position), and a last row that has flags only:
--   1 the bell was taken, 2 another claimer holds the queue or the runtime is being rescued,
--   4 nothing was started yet the queue is not empty: come again at once,
--   8 the one job of this claim comes alone: its last attempt was rescued, so it may have killed its worker.
-- attempts, max_attempts and entry_ids are NULL where they are all 1, all 25, the same as ids. The bodies lie in
-- args one behind the other, as long as lens says; a NULL length: fetch it with awa.fetch_args_v1 after the commit.
-- At most 128 KiB of bodies, kinds and details are returned: they fit the socket's buffer, so the server never waits
-- for a frozen client while it holds the lock. Only what is claimed directly, or alone, may have longer details.
CREATE OR REPLACE FUNCTION awa.claim_v1(p_queue text, p_runtime bigint, p_kinds text[], p_limit integer, p_bell boolean DEFAULT false)
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

    <<rounds>>
    FOR v_round IN 1..20 LOOP
        SELECT u.frontier, u.claimed_at INTO v_frontier, v_claimed_at
          FROM ((SELECT c.claim_id, c.frontier, c.claimed_at FROM awa.claims c
                  WHERE c.queue = p_queue ORDER BY c.claim_id DESC LIMIT 1)
                UNION ALL
                SELECT t.claim_id, t.frontier, '-infinity' FROM awa.frontiers t WHERE t.queue = p_queue) u
         ORDER BY u.claim_id DESC LIMIT 1;
        v_frontier := coalesce(v_frontier, '{}');
        v_claimed_at := coalesce(v_claimed_at, '-infinity');
        v_now := awa.page_end();
        v_parts_from := NULL;
        IF v_direct IS NULL THEN
            v_aside := NULL;
            IF p_kinds IS NOT NULL AND NOT v_held AND EXISTS (SELECT FROM awa.waiting_jobs t
                                                WHERE t.queue = p_queue AND t.waits_for = 'kind') THEN
                SELECT min(d.priority) INTO v_aside
                  FROM unnest(p_kinds) k CROSS JOIN LATERAL (
                       SELECT t.priority FROM awa.waiting_jobs t
                        WHERE t.queue = p_queue AND t.waits_for = 'kind' AND t.wait_key = k
                        ORDER BY t.priority LIMIT 1) d;
            END IF;
        END IF;

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
            FOR v_lane IN 2..9 LOOP
                EXIT WHEN v_lane >= 2 * v_aside;
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
                                      CASE WHEN j.attempt > 1 AND j.lane % 2 = 0
                                           THEN j.history->-1->>'outcome' = 'rescued' END AS rescued
                                 FROM awa.jobs j
                                WHERE j.queue = p_queue AND j.lane = w.lane
                                  AND (j.xid, j.entry_id) > (w.lo_xid, w.lo_entry)
                                  AND (j.xid, j.entry_id) < (w.hi_xid, w.hi_entry)
                                  AND pg_visible_in_snapshot(j.xid, w.page_to)
                                ORDER BY j.xid, j.entry_id
                                LIMIT p_limit) e
                         LIMIT p_limit) w
                WINDOW so_far AS (ROWS UNBOUNDED PRECEDING)
            ), whole AS MATERIALIZED (
                SELECT count(*) AS picked, min(s.ord) FILTER (WHERE s.rescued) AS suspect,
                       awa.ended_among(array_agg(s.slot), array_agg(s.entry_id)) AS ended
                  FROM sized s
            ), kept AS MATERIALIZED (
                SELECT s.*, p_kinds IS NULL OR s.kind = ANY (p_kinds) AS known, s.entry_id = ANY (w.ended) AS ended
                  FROM whole w CROSS JOIN sized s
                 WHERE s.ord = 1 OR v_direct IS NOT NULL OR (s.bytes <= c_bytes AND (s.ord < w.suspect) IS NOT FALSE)
            ), told AS MATERIALIZED (
                SELECT max(k.ord) AS ord, bit_or(1 << k.lane) AS lanes,
                       bool_or(NOT k.known AND NOT k.ended) AS has_aliens
                  FROM kept k
            ), batches AS (
                SELECT k.slot, k.lane, min(k.ord) AS first, array_agg(k.entry_id) AS entry_ids,
                       array_agg(k.xid) AS xids, array_agg(k.id) AS ids, array_agg(k.attempt) AS attempts,
                       array_agg(k.max_attempts) AS max_attempts, array_agg(k.kind) AS kinds,
                       array_agg(k.created_at) AS created_at,
                       array_agg(k.details) AS details, count(k.details) AS n_details,
                       v_direct IS NULL AND bool_or(k.rescued) AS alone,
                       max(k.attempt) AS top_attempt, min(k.max_attempts) AS lo_max, max(k.max_attempts) AS hi_max,
                       string_agg(k.args, '') FILTER (WHERE k.bytes <= c_bytes) AS args,
                       array_agg(CASE WHEN k.bytes <= c_bytes THEN octet_length(k.args) END) AS lens
                  FROM kept k
                 WHERE k.known AND NOT k.ended
                 GROUP BY k.slot, k.lane
            ), aliens AS (
                SELECT array_agg(k.slot) AS slots, array_agg(k.lane) AS lanes, array_agg(k.xid) AS xids,
                       array_agg(k.entry_id) AS entries
                  FROM kept k
                 WHERE (SELECT t.has_aliens FROM told t) AND NOT k.known AND NOT k.ended
            )
            SELECT l.ord, l.n, l.lane AS last_lane, l.xid AS last_xid, l.entry_id AS last_entry,
                   (SELECT w.picked FROM whole w) AS picked, (SELECT t.lanes FROM told t) AS lanes,
                   a.slots AS alien_slots, a.lanes AS alien_lanes, a.xids AS alien_xids, a.entries AS alien_entries,
                   b.*
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
                    FOR v_lane IN 2..9 LOOP
                        f := NULL;
                        FOR v_n IN 1..cardinality(v_frontier) LOOP
                            IF v_frontier[v_n].lane = v_lane THEN
                                f := v_frontier[v_n];
                            END IF;
                        END LOOP;
                        -- cut short in last_lane: the lanes before it are exhausted, those behind it not walked
                        IF (g.picked >= p_limit OR g.picked > g.ord) AND v_lane >= g.last_lane THEN
                            IF v_lane = g.last_lane THEN
                                f := ROW(v_lane, w_from[g.n], w_to[g.n], g.last_xid, g.last_entry)::awa.lane_frontier;
                            END IF;
                        ELSIF g.lanes & (1 << v_lane) <> 0 OR (f.lane IS NOT NULL AND v_lane < coalesce(2 * v_aside, 10)) THEN
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
            INSERT INTO awa.claims (claim_id, runtime, nonce, slot, lane, queue, frontier, entry_ids, xids)
            VALUES (v_claim, p_runtime, v_nonce, g.slot, g.lane, p_queue, v_next, g.entry_ids, g.xids);
            RETURN QUERY SELECT 0, v_claim, g.slot, v_nonce,
                (CASE WHEN g.lane = 0 THEN v_aside ELSE g.lane / 2 END)::smallint, g.ids,
                CASE WHEN g.entry_ids <> g.ids THEN g.entry_ids END, CASE WHEN g.top_attempt > 1 THEN g.attempts END,
                CASE WHEN g.lo_max <> 25 OR g.hi_max <> 25 THEN g.max_attempts END, g.kinds, g.lens, g.args,
                g.created_at, CASE WHEN g.n_details > 0 THEN g.details END;
        END LOOP;

        IF v_last IS NULL THEN
            IF v_direct IS NULL AND v_aside IS NOT NULL THEN
                -- by arrays: joins may be planned as walks over the whole table
                WITH due AS MATERIALIZED (
                    SELECT t.id FROM awa.waiting_jobs t
                     WHERE t.id = ANY (ARRAY(
                           SELECT d.id FROM unnest(p_kinds) k CROSS JOIN LATERAL (
                                  SELECT t.id, t.seq FROM awa.waiting_jobs t
                                   WHERE t.queue = p_queue AND t.waits_for = 'kind' AND t.wait_key = k
                                     AND t.priority = v_aside
                                   ORDER BY t.seq LIMIT p_limit) d
                            ORDER BY d.seq LIMIT p_limit))
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
                INSERT INTO awa.claims (claim_id, runtime, nonce, slot, lane, queue, frontier, entry_ids, xids)
                VALUES (nextval('awa.claim_id_seq'), p_runtime, 0, pg_sequence_last_value('awa.ring_seq'), 0, p_queue,
                        v_next, '{}', '{}');
            END IF;
            EXIT rounds;
        END IF;
        IF v_last.alien_entries IS NOT NULL THEN
            v_claim := nextval('awa.claim_id_seq');
            WITH alien AS MATERIALIZED (
                SELECT a.n, j.*
                  FROM unnest(v_last.alien_slots, v_last.alien_lanes, v_last.alien_xids, v_last.alien_entries)
                       WITH ORDINALITY AS a(slot, lane, xid, entry_id, n)
                 CROSS JOIN LATERAL (SELECT * FROM awa.jobs j
                                      WHERE j.slot = a.slot AND j.queue = p_queue AND j.lane = a.lane AND j.xid = a.xid
                                        AND j.entry_id = a.entry_id LIMIT 1) j
                 ORDER BY a.n
            ), ended AS (
                INSERT INTO awa.attempt_ends (entry_id, claim_id, id, slot, outcome)
                SELECT a.entry_id, v_claim, a.id, a.slot, 'set_aside' FROM alien a
            )
            INSERT INTO awa.waiting_jobs (id, created_at, priority, attempt, max_attempts, timeout_ms, state, waits_for,
                                          wait_key, queue, kind, args, metadata, tags, concurrency_key, ordering_key,
                                          unique_key, expires_at, follow_ups, history)
            SELECT a.id, coalesce(a.created_at, a.available_at), a.priority, a.attempt, a.max_attempts, a.timeout_ms,
                   'available', 'kind', a.kind, a.queue, a.kind, a.args, a.metadata, a.tags, a.concurrency_key,
                   a.ordering_key, a.unique_key, a.expires_at, a.follow_ups, a.history
              FROM alien a ORDER BY a.n;
            -- a call for help, which everybody hears, not a bell: whoever knows these kinds may hold none
            PERFORM pg_notify(awa.channel(), chr(1) || p_queue);
        END IF;
        EXIT rounds WHEN v_some;
        -- Only ended or set-aside entries: remember how far the walk came, or live ones behind them stay hidden.
        INSERT INTO awa.claims (claim_id, runtime, nonce, slot, lane, queue, frontier, entry_ids, xids)
        VALUES (nextval('awa.claim_id_seq'), p_runtime, 0, pg_sequence_last_value('awa.ring_seq'), 0, p_queue, v_next,
                '{}', '{}');
        IF v_round = 20 THEN
            v_flags := v_flags | 4;
        END IF;
    END LOOP;
    RETURN QUERY SELECT v_flags, NULL::bigint, NULL::smallint, NULL::integer, NULL::smallint, NULL::bigint[],
                        NULL::bigint[], NULL::smallint[], NULL::smallint[], NULL::text[], NULL::integer[],
                        NULL::text, NULL::timestamptz[], NULL::text[];
END $$;
