-- Beside the ledger: which keys a job was given, and what an operator said at what time. An operator writes down what
-- was said in the transaction that says it, holding the queue's claim lock, so that every claim was before or after.

CREATE TABLE ledger.keyed (mark bigint PRIMARY KEY, queue text, concurrency_key text, ordering_key text);
CREATE TABLE ledger.limits (
    queue               text,
    max_running         integer,
    max_running_per_key integer,
    at                  timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE ledger.pauses (queue text, is_paused boolean, at timestamptz NOT NULL DEFAULT clock_timestamp());
