-- Statistics: how many attempts ended how, how long they had waited and how long they ran, by queue and by kind.
--
-- Adds tables only, so it locks nothing that is in use. Works with awa 0.1 and later: while a worker of before leads,
-- nothing is gathered, and the next leader catches up. What was claimed before this migration is not gathered.
--
-- A leader reads claims, completions and attempt_ends, which nobody changes, and adds what it finds here. Claims,
-- settles and inserts neither read nor write any of these tables. What is added and how far that has come is written in
-- one transaction, which holds the row of statistics_progress: whoever gathers, every attempt is added once.

-- Attempts by the time at which they ended, in steps of a minute (kept for three hours) and of an hour (30 days), as UTC
-- cuts them. Each stands in a row of its queue and in one of its kind. Numbers of a queue are exact. Where is_sampled,
-- some attempts were looked at for many: numbers of a kind are estimates and may be fractions, and so are the waits and
-- runs of both.
--
-- waits[i] attempts began so long after they could be claimed as wait_buckets[i] says; likewise what runs took. Bucket
-- 0 has the times below a millisecond, bucket b those from 2^((b-1)/4) milliseconds up to 2^(b/4).
CREATE TABLE awa.statistics (
    step         text COLLATE "C"   NOT NULL,  -- minute hour
    subject      text COLLATE "C"   NOT NULL,  -- queue kind
    starts_at    timestamptz        NOT NULL,
    name         text COLLATE "C"   NOT NULL,
    completed    double precision   NOT NULL,
    retried      double precision   NOT NULL,
    snoozed      double precision   NOT NULL,
    failed       double precision   NOT NULL,
    cancelled    double precision   NOT NULL,  -- while they ran
    rescued      double precision   NOT NULL,
    is_sampled   boolean            NOT NULL,
    wait_max_ms  double precision,             -- of those that were looked at; NULL: of none is known how long
    run_max_ms   double precision,
    wait_buckets smallint[],                   -- ascending
    waits        double precision[],
    run_buckets  smallint[],
    runs         double precision[],
    PRIMARY KEY (step, subject, starts_at, name)
) WITH (fillfactor = 50);

-- Up to which claim of a queue all have been looked at. Within a queue they commit in the order of their numbers, since
-- a number is drawn under the queue's claim lock, which is held until the commit.
CREATE TABLE awa.statistics_queues (
    queue    text COLLATE "C" NOT NULL PRIMARY KEY,
    claim_id bigint NOT NULL
) WITH (fillfactor = 50);

-- Those of them of which members had not ended, and what has been added of the others.
CREATE TABLE awa.statistics_claims (
    claim_id   bigint   NOT NULL PRIMARY KEY,
    slot       smallint NOT NULL,
    queue      text COLLATE "C" NOT NULL,
    left_open  integer  NOT NULL,   -- members that have not been seen to end
    flushes    bigint[] NOT NULL,   -- rows of completions that were added, ...
    entry_ids  bigint[] NOT NULL    -- ... and members with a row of attempt_ends
) WITH (fillfactor = 50);

-- One row: since when is gathered, and until when everything that had ended then has been.
CREATE TABLE awa.statistics_progress (
    is_only    boolean     NOT NULL PRIMARY KEY DEFAULT true CHECK (is_only),
    began_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    reached_at timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 50);
INSERT INTO awa.statistics_progress DEFAULT VALUES;

WITH RECURSIVE queues AS (
    (SELECT c.queue FROM awa.claims c ORDER BY c.queue LIMIT 1)
    UNION ALL
    SELECT n.queue FROM queues q
     CROSS JOIN LATERAL (SELECT c.queue FROM awa.claims c WHERE c.queue > q.queue ORDER BY c.queue LIMIT 1) n
)
INSERT INTO awa.statistics_queues (queue, claim_id)
SELECT q.queue, c.claim_id
  FROM queues q
 CROSS JOIN LATERAL (SELECT c.claim_id FROM awa.claims c WHERE c.queue = q.queue ORDER BY c.claim_id DESC LIMIT 1) c;
