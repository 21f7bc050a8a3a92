-- What is said of queues, and what limits need: tables and columns.
--
-- Adds two tables, an index on waiting_jobs, which holds off what is set aside while it is built, and a column without
-- a default to claims and to frontiers, for which these are locked a moment. Works with awa 0.1 and later.
--
-- Three kinds of limits, and where each has its state:
-- - max_running and the rate of a queue: in the queue's newest claim row, as its frontier is. Every claim works the next
--   state out from that one, under the queue's claim lock, and appends it with the attempts that it starts. What has
--   ended since is looked up, so nothing has to be given back, and nothing can leak.
-- - max_running_per_key, and the order of an ordering_key: rows of awa.grants, which say which jobs have the key.

-- open_claims, open_slots and open_sizes: the claims of which attempts were open, with as many as were. NULL: nobody
-- has counted, since there was no max_running. tokens: what the rate allowed at tokens_at; NULL: there was no rate.
CREATE TYPE awa.limit_state AS (
    open_claims bigint[],
    open_slots  smallint[],
    open_sizes  smallint[],
    tokens      double precision,
    tokens_at   timestamptz
);
ALTER TABLE awa.claims ADD COLUMN limits awa.limit_state;       -- after this claim; NULL: the queue has none
ALTER TABLE awa.frontiers ADD COLUMN limits awa.limit_state;

-- Queues of which something was said; one without a row has no limits and is not paused. What holds is in the columns
-- of its own; declared and overrides tell where it comes from: {"max_running": 3, "max_running_per_key": 1,
-- "rate_limit": {"count": 50, "per": 1.0, "burst": 50}}, with null for: no such limit. What an operator said (overrides)
-- goes before what code declared.
CREATE TABLE awa.queue_meta (
    queue               text COLLATE "C" NOT NULL PRIMARY KEY CHECK (octet_length(queue) <= 800),
    max_running         integer          CHECK (max_running >= 1),          -- attempts at once, of all workers
    rate                double precision CHECK (rate > 0),                  -- attempts a second, in the long run ...
    burst               double precision CHECK (burst >= 1),                -- ... and at once, after a rest
    max_running_per_key integer          CHECK (max_running_per_key >= 1),  -- attempts at once of one concurrency_key
    declared            json,
    declared_at         timestamptz,
    overrides           json,
    overrides_by        text,
    overrides_at        timestamptz,
    paused_at           timestamptz,
    paused_by           text,
    pause_reason        text,
    CHECK ((rate IS NULL) = (burst IS NULL))
);

-- Who has a key. scope 'key': a concurrency_key, as long as an attempt runs, or from the hand-over on. 'order': an
-- ordering_key, until the job has ended. A row whose attempt has ended stays until a claim finds it, which hands the key
-- over to the first that waits for it (waiting_jobs: waits_for is the scope, wait_key the key). While somebody waits
-- there is a row; id 0 stands for no job, and asks a claim to look.
CREATE TABLE awa.grants (
    queue      text COLLATE "C" NOT NULL,
    scope      text COLLATE "C" NOT NULL CHECK (scope IN ('key', 'order')),
    key        text COLLATE "C" NOT NULL,
    id         bigint      NOT NULL,                 -- the job
    claim_id   bigint      NOT NULL DEFAULT 0,       -- of its attempt; 0: none is claimed
    entry_id   bigint,
    slot       smallint,
    idx        smallint,
    is_over    boolean     NOT NULL DEFAULT false,   -- the job ended, or left the queue, without an attempt that tells
    granted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (queue, scope, key, id)
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX grants_claim ON awa.grants (queue, claim_id);
CREATE INDEX grants_job ON awa.grants (id);

CREATE INDEX waiting_jobs_key ON awa.waiting_jobs (queue, waits_for, wait_key, seq) WHERE waits_for IN ('key', 'order');
