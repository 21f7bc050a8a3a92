-- Containment: a row that no worker could handle is refused where it is written, and what is odd about one job's
-- history or error stays with that job.
--
-- Adds constraints to jobs and waiting_jobs without reading what is there, and a trigger to the latter: each is locked
-- for a moment. Replaces a function in place. Works with awa 0.1 and later.
--
-- Rows come from plain SQL and from clients in other languages too. What awa's own client sends passes all of these.
-- Without them one row held up others: a history that cannot be read failed every claim that met it, a priority without
-- a lane lost its job, or failed the promotion of all that were due with it. What can be dealt with later is not looked
-- at here, since every insert pays for it: args, metadata and times that no client can read fail alone.
ALTER TABLE awa.jobs
    ADD CONSTRAINT jobs_priority_is_1_to_4 CHECK (priority BETWEEN 1 AND 4) NOT VALID,
    -- ->> reads all of it: an escape that stands for no text raises
    ADD CONSTRAINT jobs_history_is_readable
        CHECK (history IS NULL OR json_typeof(history) = 'array' AND history->-1->>'outcome' <> '') NOT VALID;
ALTER TABLE awa.waiting_jobs
    ADD CONSTRAINT waiting_jobs_queue_is_short CHECK (octet_length(queue) <= 800) NOT VALID,
    ADD CONSTRAINT waiting_jobs_priority_is_1_to_4 CHECK (priority BETWEEN 1 AND 4) NOT VALID,
    ADD CONSTRAINT waiting_jobs_history_is_readable
        CHECK (history IS NULL OR json_typeof(history) = 'array' AND history->-1->>'outcome' <> '') NOT VALID;

-- A kind that no handler can have, since it is longer than any name, would not fit the index of what is set aside, and
-- fail every claim that meets it. Cut, it still differs from every name, so the job waits for ever as others of an unknown
-- kind do.
CREATE FUNCTION awa.cut_wait_key() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.wait_key := left(NEW.wait_key, 201);
    RETURN NEW;
END $$;
CREATE TRIGGER cut_wait_key BEFORE INSERT OR UPDATE ON awa.waiting_jobs
    FOR EACH ROW WHEN (octet_length(NEW.wait_key) > 804) EXECUTE FUNCTION awa.cut_wait_key();

-- A history with one more ended attempt: the last 20 are kept, and the tracebacks of the last 3. Whatever it is given,
-- it answers with a history: what came before begins anew when it is odd, an error that cannot be read is told as such.
-- Else the attempt could never end.
CREATE OR REPLACE FUNCTION awa.add_history(p_history json, p_attempt integer, p_outcome text, p_ended_at timestamptz,
                                           p_elapsed_ms integer, p_runtime bigint, p_error json) RETURNS json
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_history json := coalesce(p_history, '[]');
    v_error json := p_error;
    v_result json;
BEGIN
    FOR v_try IN 1..4 LOOP
        BEGIN
            WITH entries AS (
                SELECT e, n FROM json_array_elements(v_history) WITH ORDINALITY t(e, n)
                UNION ALL
                SELECT json_build_object('attempt', p_attempt, 'outcome', p_outcome, 'ended_at', p_ended_at,
                                         'elapsed_ms', p_elapsed_ms, 'runtime', p_runtime, 'type', v_error->'type',
                                         'text', v_error->'text', 'traceback', v_error->'traceback'), 1000
            ), newest AS (
                SELECT e, row_number() OVER (ORDER BY n DESC) AS age FROM entries
            )
            SELECT json_agg(CASE WHEN age <= 3 THEN e ELSE (e::jsonb - 'traceback')::json END ORDER BY age DESC)
              INTO v_result FROM newest WHERE age <= 20;
            RETURN v_result;
        EXCEPTION WHEN OTHERS THEN
            NULL;
        END;
        v_history := CASE WHEN v_try = 2 THEN coalesce(p_history, '[]') ELSE '[]' END;
        IF v_try = 2 THEN
            v_error := '{"type": "Unreadable", "text": "its error cannot be read: it is no JSON of text"}';
        END IF;
    END LOOP;
    RETURN NULL;
END $$;
