-- The evidence: a copy of whatever decides a job's fate, taken by triggers in the same transaction, so that it
-- outlives the emptied segments. Nothing is unique here: what must not happen twice has to be seen when it does.

CREATE SCHEMA app;
CREATE SCHEMA ledger;

-- Rows of the application: written beside a job by its producer, and by a handler that completes its own attempt.
CREATE TABLE app.orders (mark bigint NOT NULL);
CREATE TABLE app.effects (mark bigint NOT NULL, entry_id bigint NOT NULL);
-- Each job of the kind "count" adds one to one of them.
CREATE TABLE app.counters (n integer PRIMARY KEY, total bigint NOT NULL);
INSERT INTO app.counters SELECT n, 0 FROM generate_series(0, 7) n;

-- A mark is the number that its producer gave a job before it was inserted; it travels in the args.
CREATE TABLE ledger.entries (
    entry_id bigint, job bigint, mark bigint, slot smallint, attempt smallint, kind text, at timestamptz
);
CREATE TABLE ledger.waits (job bigint, mark bigint, waits_for text, at timestamptz);
CREATE TABLE ledger.parents (child bigint, parent bigint, on_failure text);      -- of jobs that run after others
CREATE TABLE ledger.claims (claim_id bigint, slot smallint, runtime bigint, entry_ids bigint[], at timestamptz);
CREATE TABLE ledger.ends (
    entry_id bigint,
    outcome  text,
    claim_id bigint,
    runtime  bigint,       -- of the claim; NULL when no claim is quoted or there is none
    flush    bigint,       -- NULL: not by the runtime's own settle
    was_gone boolean,      -- the runtime was fenced when this was written
    at       timestamptz,
    result   json          -- what was kept of a completed attempt
);
CREATE TABLE ledger.dead (job bigint, state text, at timestamptz);
CREATE TABLE ledger.requests (job bigint, at timestamptz);     -- to cancel what runs
CREATE TABLE ledger.prunes (slot text, at timestamptz);
CREATE INDEX ON ledger.entries (entry_id);
CREATE INDEX ON ledger.claims (claim_id);
CREATE INDEX ON ledger.ends (entry_id);

-- What the journals say, loaded at the end.
CREATE TABLE ledger.intents (mark bigint, way text, is_meant boolean, fate text, has_row boolean);
CREATE TABLE ledger.runs (
    run bigint GENERATED ALWAYS AS IDENTITY, entry_id bigint, job bigint, mark bigint, started_at timestamptz,
    ended_at timestamptz
);
CREATE TABLE ledger.commits (mark bigint, entry_id bigint);     -- acknowledged to a handler that has its own transaction
CREATE TABLE ledger.controls (job bigint, what text, happened text, at timestamptz);      -- at: of the answer
CREATE TABLE ledger.crashes (began_at timestamptz, ended_at timestamptz);

CREATE FUNCTION ledger.note_entry() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ledger.entries
    VALUES (NEW.entry_id, NEW.id, (NEW.args->>'mark')::bigint, NEW.slot, NEW.attempt, NEW.kind, clock_timestamp());
    RETURN NULL;
END $$;
CREATE TRIGGER chaos AFTER INSERT ON awa.jobs FOR EACH ROW EXECUTE FUNCTION ledger.note_entry();

CREATE FUNCTION ledger.note_wait() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ledger.waits VALUES (NEW.id, (NEW.args->>'mark')::bigint, NEW.waits_for, clock_timestamp());
    INSERT INTO ledger.parents SELECT NEW.id, p, NEW.on_parent_failure FROM unnest(NEW.parents) p;
    RETURN NULL;
END $$;
CREATE TRIGGER chaos AFTER INSERT ON awa.waiting_jobs FOR EACH ROW EXECUTE FUNCTION ledger.note_wait();

CREATE FUNCTION ledger.note_claim() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ledger.claims VALUES (NEW.claim_id, NEW.slot, NEW.runtime, NEW.entry_ids, clock_timestamp());
    RETURN NULL;
END $$;
CREATE TRIGGER chaos AFTER INSERT ON awa.claims FOR EACH ROW EXECUTE FUNCTION ledger.note_claim();

CREATE FUNCTION ledger.note_end(p_entries bigint[], p_outcome text, p_slot smallint, p_claim bigint, p_flush bigint,
                                p_result json)
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    v_runtime bigint := (SELECT c.runtime FROM ledger.claims c
                          WHERE c.claim_id = p_claim AND c.slot = p_slot LIMIT 1);
BEGIN
    INSERT INTO ledger.ends
    SELECT e, p_outcome, p_claim, v_runtime, p_flush,
           EXISTS (SELECT FROM awa.gone_runtimes g WHERE g.runtime = v_runtime), clock_timestamp(), p_result
      FROM unnest(p_entries) e;
END $$;

CREATE FUNCTION ledger.note_completion() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM ledger.note_end(
        ARRAY(SELECT c.entry_ids[i]
                FROM unnest(NEW.idx) i
                LEFT JOIN LATERAL (SELECT t.entry_ids FROM ledger.claims t
                                    WHERE t.claim_id = NEW.claim_id AND t.slot = NEW.slot LIMIT 1) c ON true),
        'completed', NEW.slot, NEW.claim_id, NEW.flush, NULL);
    RETURN NULL;
END $$;
CREATE TRIGGER chaos AFTER INSERT ON awa.completions FOR EACH ROW EXECUTE FUNCTION ledger.note_completion();

CREATE FUNCTION ledger.note_attempt_end() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM ledger.note_end(ARRAY[NEW.entry_id], NEW.outcome, NEW.slot, NEW.claim_id, NEW.flush, NEW.result);
    RETURN NULL;
END $$;
CREATE TRIGGER chaos AFTER INSERT ON awa.attempt_ends FOR EACH ROW EXECUTE FUNCTION ledger.note_attempt_end();

CREATE FUNCTION ledger.note_dead() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ledger.dead VALUES (NEW.id, NEW.state, clock_timestamp());
    RETURN NULL;
END $$;
CREATE TRIGGER chaos AFTER INSERT ON awa.ended_jobs FOR EACH ROW EXECUTE FUNCTION ledger.note_dead();

CREATE FUNCTION ledger.note_request() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ledger.requests VALUES (NEW.id, clock_timestamp());
    RETURN NULL;
END $$;
CREATE TRIGGER chaos AFTER INSERT ON awa.cancel_requests FOR EACH ROW EXECUTE FUNCTION ledger.note_request();

CREATE FUNCTION ledger.note_prune() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO ledger.prunes VALUES (TG_TABLE_NAME, clock_timestamp());
    RETURN NULL;
END $$;
DO $$
BEGIN
    FOR v_slot IN 0..7 LOOP
        EXECUTE format('CREATE TRIGGER chaos_prune AFTER TRUNCATE ON awa.jobs_%s'
                       ' FOR EACH STATEMENT EXECUTE FUNCTION ledger.note_prune()', v_slot);
    END LOOP;
END $$;

-- Every job that a committed transaction inserted, whoever says so.
CREATE VIEW ledger.jobs AS
    SELECT job, min(mark) AS mark, count(DISTINCT mark) AS marks, min(at) AS at
      FROM (SELECT job, mark, at FROM ledger.entries UNION ALL SELECT job, mark, at FROM ledger.waits) t
     GROUP BY job;

-- Ends of jobs: one row per end, so two for a job that ended twice.
CREATE VIEW ledger.finals AS
    SELECT e.job, 'completed'::text AS state, x.at
      FROM (SELECT DISTINCT entry_id, job FROM ledger.entries) e
      JOIN ledger.ends x USING (entry_id)
     WHERE x.outcome = 'completed'
    UNION ALL
    SELECT job, state, at FROM ledger.dead;
