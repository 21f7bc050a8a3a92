-- What is declared of queues and kinds, and what runtimes tell of themselves: tables, columns, a view.
--
-- Adds tables, a view, and columns to runtime_instances, for which it is locked a moment. Works with awa 0.1 and later:
-- a runtime of before tells nothing, and has NULL there.
--
-- Nothing here is read or written where jobs are inserted, claimed, recorded or rescued, nor by a sign of life: each
-- worker writes it when it registers and on a tick of its own. Whether a runtime is to be quiet it looks up besides.

-- One row for each queue, and each kind, that code has described. The worker that started last decides what stands here.
CREATE TABLE awa.queue_descriptors (
    queue            text COLLATE "C" NOT NULL PRIMARY KEY,
    display_name     text,
    description      text,
    owner            text,
    docs_url         text,
    tags             text[]      NOT NULL DEFAULT '{}',
    extra            jsonb       NOT NULL DEFAULT '{}',
    descriptor_hash  text COLLATE "C" NOT NULL,
    sync_interval_ms integer     NOT NULL DEFAULT 10000,
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at       timestamptz NOT NULL DEFAULT clock_timestamp(),  -- moves when the hash does
    last_seen_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK (octet_length(queue) <= 800)
) WITH (fillfactor = 50);
CREATE TABLE awa.job_kind_descriptors (
    kind             text COLLATE "C" NOT NULL PRIMARY KEY,
    display_name     text,
    description      text,
    owner            text,
    docs_url         text,
    tags             text[]      NOT NULL DEFAULT '{}',
    extra            jsonb       NOT NULL DEFAULT '{}',
    descriptor_hash  text COLLATE "C" NOT NULL,
    sync_interval_ms integer     NOT NULL DEFAULT 10000,
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_seen_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK (octet_length(kind) <= 800)
) WITH (fillfactor = 50);

-- What the hashes stand for, so that it can be told on which fields two runtimes disagree.
CREATE TABLE awa.descriptor_versions (
    descriptor_hash text COLLATE "C" NOT NULL PRIMARY KEY,
    fields          jsonb       NOT NULL,  -- the six that are hashed
    last_seen_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);

ALTER TABLE awa.runtime_instances
    ADD COLUMN stale_after_ms             integer,      -- after so long a silence it counts as dead
    ADD COLUMN queue_descriptor_hashes    json,         -- what it declares: name -> hash ...
    ADD COLUMN job_kind_descriptor_hashes json,
    ADD COLUMN queue_descriptor_set       text COLLATE "C",  -- ... and a hash of each object, equal for equal ones
    ADD COLUMN job_kind_descriptor_set    text COLLATE "C",
    ADD COLUMN snapshot_interval_ms       integer,      -- between two ticks, on which the following are written
    ADD COLUMN snapshot_at                timestamptz,
    ADD COLUMN threads                    integer,      -- handlers that can run at once
    ADD COLUMN busy                       integer,      -- handlers that run
    ADD COLUMN in_flight                  json,         -- queue -> attempts it holds, running and buffered
    ADD COLUMN health                     json,         -- {"unhealthy": [reasons], "unready": [reasons], "loops": {name: state}}
    ADD COLUMN kinds                      json,         -- those it handles, sorted
    ADD COLUMN quiet_at                   timestamptz,  -- asked to claim nothing more; NULL: it claims
    ADD COLUMN quiet_by                   text;

-- The runtimes that live: neither taken for dead nor left, and heard within the time after which they would be.
CREATE VIEW awa.live_runtimes AS
SELECT r.*
  FROM awa.runtime_instances r
  LEFT JOIN awa.gone_runtimes g ON g.runtime = r.id
 WHERE r.ended_at IS NULL AND g.runtime IS NULL
   AND r.last_seen_at >= clock_timestamp() - coalesce(r.stale_after_ms, 30000) * interval '1 ms';
