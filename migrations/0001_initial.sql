-- The storage of awa: one ring of segments, the jobs that wait, the runtimes that work.
--
-- Creates everything in an empty schema, so it locks nothing that is in use. Works with awa 0.1 and later.
--
-- An *entry* (a row of jobs) is one chance to run a job. It is claimed at most once and ends exactly once: in
-- completions, or by one row of attempt_ends. Whatever decides an entry's fate lies in the entry's own slot, so
-- that a slot can be emptied as a whole.

-- Ids of entries. A job is known by the id of its first entry.
CREATE SEQUENCE awa.entry_id_seq;
CREATE SEQUENCE awa.claim_id_seq;

-- The current slot. A sequence, since its value is current even under an old snapshot. Set at once: its last value
-- is NULL before the first use, and a slot is never guessed.
CREATE SEQUENCE awa.ring_seq MINVALUE 0 MAXVALUE 7 START 0;
SELECT setval('awa.ring_seq', 0);

-- How far a lane has been claimed. Everything visible in page_from has been; of what page_to sees beyond that,
-- everything up to (last_xid, last_entry). page_to is NULL when no page is being walked.
CREATE TYPE awa.lane_frontier AS (
    lane       smallint,
    page_from  pg_snapshot,
    page_to    pg_snapshot,
    last_xid   xid8,
    last_entry bigint
);

-- Entries. Lanes of a queue: 2 * priority is express (released, rescued and carried-forward entries), 2 * priority
-- + 1 is the main one, and nobody walks lane 0, which holds entries that are claimed as they are appended.
CREATE TABLE awa.jobs (
    xid             xid8        NOT NULL DEFAULT pg_current_xact_id(),
    entry_id        bigint      NOT NULL DEFAULT nextval('awa.entry_id_seq'),
    -- after entry_id: a job's first entry takes the number that was just drawn
    id              bigint      NOT NULL DEFAULT currval('awa.entry_id_seq'),
    available_at    timestamptz NOT NULL DEFAULT now(),
    created_at      timestamptz,           -- of the job; NULL: this is its first entry, see available_at
    slot            smallint    NOT NULL DEFAULT pg_sequence_last_value('awa.ring_seq')::smallint,
    lane            smallint    NOT NULL DEFAULT 5,
    priority        smallint    NOT NULL DEFAULT 2,
    attempt         smallint    NOT NULL DEFAULT 1,
    max_attempts    smallint    NOT NULL DEFAULT 25,
    timeout_ms      integer,
    queue           text COLLATE "C" NOT NULL DEFAULT 'default',
    kind            text COLLATE "C" NOT NULL,
    args            json        NOT NULL DEFAULT '{}',
    metadata        json,
    tags            text[] COLLATE "C",
    concurrency_key text COLLATE "C",
    ordering_key    text COLLATE "C",
    unique_key      bytea,
    expires_at      timestamptz,
    follow_ups      json,
    history         json                   -- the last 20 ended attempts, oldest first; tracebacks of the last 3
) PARTITION BY LIST (slot);
CREATE INDEX jobs_lane ON awa.jobs (queue, lane, xid, entry_id);
-- costs nothing at insert; a job is looked up by id only when somebody asks for it
CREATE INDEX jobs_id ON awa.jobs USING brin (id) WITH (pages_per_range = 32);

-- One row per claim batch, slot and lane. The newest row of a queue is the queue's cursor.
CREATE TABLE awa.claims (
    claim_id   bigint      NOT NULL,
    runtime    bigint      NOT NULL,
    claimed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    nonce      integer     NOT NULL,
    slot       smallint    NOT NULL,
    lane       smallint    NOT NULL,
    queue      text COLLATE "C" NOT NULL,
    frontier   awa.lane_frontier[] NOT NULL,  -- lanes that are not listed were never claimed from
    entry_ids  bigint[]    NOT NULL,          -- its members; a member is quoted by its position, from 1
    xids       xid8[]      NOT NULL           -- theirs: (queue, lane, xid, entry_id) finds the entry
) PARTITION BY LIST (slot);
CREATE INDEX claims_queue ON awa.claims (queue, claim_id);
CREATE INDEX claims_runtime ON awa.claims (runtime, claim_id);

-- Successes, one row per flush and claim.
CREATE TABLE awa.completions (
    claim_id     bigint      NOT NULL,
    flush        bigint      NOT NULL,        -- the worker's number of the flush: a repeated flush is refused
    completed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    slot         smallint    NOT NULL,
    idx          smallint[]  NOT NULL,        -- positions in the claim
    elapsed_ms   integer[]   NOT NULL,
    PRIMARY KEY (slot, claim_id, flush)
) PARTITION BY LIST (slot);

-- Entries that ended any other way, and those completed inside a handler's own transaction.
CREATE TABLE awa.attempt_ends (
    entry_id   bigint      NOT NULL,
    claim_id   bigint,                        -- NULL: ended before any claim met it
    flush      bigint,
    id         bigint      NOT NULL,
    ended_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    elapsed_ms integer,
    slot       smallint    NOT NULL,
    outcome    text COLLATE "C" NOT NULL,     -- completed retried snoozed cancelled failed released rescued set_aside
    error      json,
    PRIMARY KEY (slot, entry_id)
) PARTITION BY LIST (slot);
CREATE INDEX attempt_ends_claim ON awa.attempt_ends (claim_id);

-- Autovacuum stays away: segments are never updated, and a vacuum of a sealed one would defeat every short lock.
DO $$
DECLARE
    v_table text;
BEGIN
    FOREACH v_table IN ARRAY ARRAY['jobs', 'claims', 'completions', 'attempt_ends'] LOOP
        FOR v_slot IN 0..7 LOOP
            EXECUTE format('CREATE TABLE awa.%1$s_%2$s PARTITION OF awa.%1$s FOR VALUES IN (%2$s)'
                           ' WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off)', v_table, v_slot);
        END LOOP;
    END LOOP;
END $$;

-- Everything that waits: for a time, or set aside for a worker that knows its kind.
CREATE TABLE awa.waiting_jobs (
    id              bigint      NOT NULL PRIMARY KEY DEFAULT nextval('awa.entry_id_seq'),
    seq             bigint      NOT NULL DEFAULT nextval('awa.entry_id_seq'),  -- order among those set aside
    run_at          timestamptz,
    created_at      timestamptz NOT NULL DEFAULT now(),
    priority        smallint    NOT NULL DEFAULT 2,
    attempt         smallint    NOT NULL DEFAULT 1,
    max_attempts    smallint    NOT NULL DEFAULT 25,
    timeout_ms      integer,
    state           text COLLATE "C" NOT NULL DEFAULT 'scheduled',
    waits_for       text COLLATE "C" NOT NULL DEFAULT 'time',
    wait_key        text COLLATE "C",        -- the kind, when it waits for one
    queue           text COLLATE "C" NOT NULL DEFAULT 'default',
    kind            text COLLATE "C" NOT NULL,
    args            json        NOT NULL DEFAULT '{}',
    metadata        json,
    tags            text[] COLLATE "C",
    concurrency_key text COLLATE "C",
    ordering_key    text COLLATE "C",
    unique_key      bytea,
    expires_at      timestamptz,
    follow_ups      json,
    history         json,
    CHECK ((waits_for = 'time') = (run_at IS NOT NULL))
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX waiting_jobs_due ON awa.waiting_jobs (run_at) WHERE waits_for = 'time';
CREATE INDEX waiting_jobs_kind ON awa.waiting_jobs (queue, wait_key, priority, seq) WHERE waits_for = 'kind';

-- Failed and cancelled jobs, kept for a retention of their own.
CREATE TABLE awa.ended_jobs (
    id              bigint      NOT NULL PRIMARY KEY,
    created_at      timestamptz NOT NULL,
    ended_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    priority        smallint    NOT NULL,
    attempt         smallint    NOT NULL,
    max_attempts    smallint    NOT NULL,
    timeout_ms      integer,
    state           text COLLATE "C" NOT NULL,
    dead_reason     text COLLATE "C",
    queue           text COLLATE "C" NOT NULL,
    kind            text COLLATE "C" NOT NULL,
    args            json        NOT NULL,
    metadata        json,
    tags            text[] COLLATE "C",
    concurrency_key text COLLATE "C",
    ordering_key    text COLLATE "C",
    unique_key      bytea,
    follow_ups      json,
    history         json
);

-- One row per start of a worker process.
CREATE TABLE awa.runtime_instances (
    id           bigint      NOT NULL PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    uuid         uuid        NOT NULL UNIQUE,
    hostname     text        NOT NULL,
    pid          integer     NOT NULL,
    version      text        NOT NULL,
    queues       json        NOT NULL DEFAULT '[]',
    heartbeat_ms integer     NOT NULL,
    started_at   timestamptz NOT NULL DEFAULT now(),
    last_seen_at timestamptz NOT NULL DEFAULT now(),
    newest_claim bigint      NOT NULL DEFAULT 0,     -- the newest claim it has received ...
    open_claims  bigint[]    NOT NULL DEFAULT '{}',  -- ... and the older ones of which some member is open
    ended_at     timestamptz,                        -- it left in good order, or nothing of it is left to rescue
    CHECK (newest_claim >= 0)
) WITH (fillfactor = 50);
CREATE INDEX runtime_instances_living ON awa.runtime_instances (id) WHERE ended_at IS NULL;

-- Fences, written once: no write of a runtime that stands here is accepted.
CREATE TABLE awa.gone_runtimes (
    runtime bigint      NOT NULL PRIMARY KEY,
    gone_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Checkpoints of the queues' cursors, taken when the segment that held them is emptied.
CREATE TABLE awa.frontiers (
    queue    text COLLATE "C" NOT NULL PRIMARY KEY,
    claim_id bigint NOT NULL,
    frontier awa.lane_frontier[] NOT NULL
);

-- Who runs maintenance. The epoch counts changes of hands.
CREATE TABLE awa.leases (
    name        text COLLATE "C" NOT NULL PRIMARY KEY,
    runtime     bigint      NOT NULL,
    epoch       bigint      NOT NULL DEFAULT 1,
    acquired_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at  timestamptz NOT NULL
) WITH (fillfactor = 50);
