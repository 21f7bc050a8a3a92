"""What must hold when everything has ended: each check lists what breaks it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from psycopg import Connection

SHOWN = 10
"""Most violations of a check that are shown."""


@dataclass(frozen=True, slots=True)
class Check:
    """One promise."""

    name: str
    """What is counted; it must be none."""
    query: str
    """Gives one column of text per violation."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found."""

    name: str
    """Of the check."""
    count: int
    """Violations."""
    shown: list[str]
    """The first of them."""


CHECKS = (
    Check(
        "acknowledged and lost",
        """
        SELECT format('mark %s (%s)', i.mark, i.way)
          FROM ledger.intents i
         WHERE i.is_meant AND i.fate = 'committed' AND NOT EXISTS (SELECT FROM a_job j WHERE j.mark = i.mark)
        """,
    ),
    Check(
        "never ended",
        """
        SELECT format('job %s, mark %s', j.job, j.mark)
          FROM a_job j
         WHERE NOT EXISTS (SELECT FROM a_final f WHERE f.job = j.job)
        """,
    ),
    Check(
        "ended twice",
        "SELECT format('job %s: %s', job, string_agg(state, ', ')) FROM a_final GROUP BY job HAVING count(*) > 1",
    ),
    Check(
        "attempts never ended",
        """
        SELECT format('entry %s of job %s, kind %s, slot %s, attempt %s: %s',
                      e.entry_id, e.job, e.kind, e.slot, e.attempt,
                      coalesce((SELECT string_agg(format('claim %s of runtime %s, ended %s, newest %s, open %s',
                                                         m.claim_id, m.runtime, i.ended_at, i.newest_claim,
                                                         i.open_claims), '; ')
                                  FROM a_member m LEFT JOIN awa.runtime_instances i ON i.id = m.runtime
                                 WHERE m.entry_id = e.entry_id), 'unclaimed'))
          FROM ledger.entries e
         WHERE NOT EXISTS (SELECT FROM ledger.ends x WHERE x.entry_id = e.entry_id)
        """,
    ),
    Check(
        "attempts ended twice",
        """
        SELECT format('entry %s: %s', entry_id, string_agg(format('%s of claim %s', outcome, claim_id), ', '))
          FROM ledger.ends GROUP BY entry_id HAVING count(*) > 1
        """,
    ),
    Check(
        "attempts claimed twice",
        """
        SELECT format('entry %s in claims %s', m, string_agg(claim_id::text, ', '))
          FROM ledger.claims CROSS JOIN LATERAL unnest(entry_ids) m GROUP BY m HAVING count(*) > 1
        """,
    ),
    Check(
        "ends of nothing",
        """
        SELECT format('%s of entry %s, claim %s', x.outcome, x.entry_id, x.claim_id)
          FROM ledger.ends x
         WHERE NOT EXISTS (SELECT FROM ledger.entries e WHERE e.entry_id = x.entry_id)
            OR (x.claim_id IS NOT NULL AND x.outcome <> 'set_aside'
                AND NOT EXISTS (SELECT FROM ledger.claims c
                                 WHERE c.claim_id = x.claim_id AND x.entry_id = ANY (c.entry_ids)))
        """,
    ),
    Check(
        "rolled back and there",
        """
        SELECT format('mark %s (%s), job %s', i.mark, i.way, j.job)
          FROM ledger.intents i JOIN a_job j USING (mark)
         WHERE NOT i.is_meant OR i.fate = 'rolled back'
        """,
    ),
    Check(
        "rolled back and run",
        """
        SELECT format('mark %s (%s), job %s', i.mark, i.way, r.job)
          FROM ledger.intents i JOIN ledger.runs r USING (mark)
         WHERE NOT i.is_meant OR i.fate = 'rolled back'
        """,
    ),
    Check(
        "run and never inserted",
        """
        SELECT format('job %s, mark %s', r.job, r.mark)
          FROM ledger.runs r
         WHERE NOT EXISTS (SELECT FROM a_job j WHERE j.job = r.job AND j.mark = r.mark)
        """,
    ),
    Check(
        "inserted twice",
        """
        SELECT format('mark %s: jobs %s', mark, string_agg(job::text, ', '))
          FROM a_job GROUP BY mark HAVING count(*) > 1
        UNION ALL
        SELECT format('job %s has %s marks', job, marks) FROM a_job WHERE marks <> 1
        """,
    ),
    Check(
        "without the row beside it, or the other way round",
        """
        SELECT format('mark %s (%s): %s', i.mark, i.way, CASE WHEN o.mark IS NULL THEN 'no row' ELSE 'no job' END)
          FROM ledger.intents i
          LEFT JOIN a_job j USING (mark)
          LEFT JOIN app.orders o USING (mark)
         WHERE i.has_row AND (j.mark IS NULL) <> (o.mark IS NULL)
        """,
    ),
    Check(
        # A rescue, and a handler's own transaction that comes before it, write no flush; the attempt's unique end
        # decides between these two. What an operator wants cancelled, a rescue cancels, or the operator's own call.
        "stale writes accepted",
        """
        SELECT format('%s of entry %s, claim %s, runtime %s', outcome, entry_id, claim_id, runtime)
          FROM ledger.ends x
         WHERE was_gone AND (flush IS NOT NULL OR outcome NOT IN ('rescued', 'failed', 'completed'))
           AND NOT (flush IS NULL AND outcome = 'cancelled'
                    AND EXISTS (SELECT FROM ledger.controls c JOIN ledger.entries e USING (job)
                                 WHERE e.entry_id = x.entry_id AND c.what = 'cancel'))
        """,
    ),
    Check(
        "effects not exactly once",
        """
        SELECT format('mark %s: %s effects of %s completed', mark, coalesce(f.n, 0), coalesce(d.n, 0))
          FROM (SELECT mark, count(*) AS n FROM app.effects GROUP BY mark) f
          FULL JOIN (SELECT j.mark, count(*) AS n
                       FROM a_job j JOIN a_final t USING (job)
                      WHERE t.state = 'completed'
                        AND EXISTS (SELECT FROM ledger.entries e WHERE e.job = j.job AND e.kind IN ('effect', 'hasty'))
                      GROUP BY j.mark) d USING (mark)
         WHERE coalesce(f.n, 0) <> coalesce(d.n, 0)
        """,
    ),
    Check(
        "counted otherwise than completed",
        """
        SELECT format('counted %s, completed %s', c.total, d.n)
          FROM (SELECT sum(total) AS total FROM app.counters) c
         CROSS JOIN (SELECT count(*) AS n
                       FROM a_final f
                      WHERE f.state = 'completed'
                        AND EXISTS (SELECT FROM ledger.entries e WHERE e.job = f.job AND e.kind = 'count')) d
         WHERE c.total <> d.n
        """,
    ),
    Check(
        "effects acknowledged and lost",
        """
        SELECT format('mark %s, entry %s', c.mark, c.entry_id)
          FROM ledger.commits c
         WHERE NOT EXISTS (SELECT FROM app.effects f WHERE f.mark = c.mark AND f.entry_id = c.entry_id)
        """,
    ),
    Check(
        # By how it ended; whoever ended it, and however often that was recorded.
        "not followed by exactly one",
        """
        SELECT format('job %s, mark %s, is %s, followed by the jobs with marks %s', p.job, p.mark, f.state, c.marks)
          FROM (SELECT DISTINCT job, mark FROM ledger.entries WHERE kind = 'parent') p
          JOIN a_final f USING (job)
          LEFT JOIN (SELECT -mark / 10 AS parent, array_agg(mark ORDER BY mark) AS marks
                       FROM a_child GROUP BY 1) c ON c.parent = p.mark
         WHERE c.marks IS DISTINCT FROM
               ARRAY[-(10 * p.mark + CASE f.state WHEN 'completed' THEN 1 WHEN 'failed' THEN 2 ELSE 3 END)]
        UNION ALL
        SELECT format('mark %s follows nothing', mark)
          FROM a_child j
         WHERE NOT EXISTS (SELECT FROM ledger.entries e WHERE e.kind = 'parent' AND e.mark = -j.mark / 10)
        """,
    ),
    Check(
        "not the result of the attempt that completed",
        """
        SELECT format('entry %s, mark %s: %s', e.entry_id, e.mark, x.result)
          FROM ledger.entries e JOIN ledger.ends x USING (entry_id)
         WHERE e.kind = 'parent' AND x.outcome = 'completed'
           AND (x.result->>'entry' IS DISTINCT FROM e.entry_id::text OR x.result->>'mark' IS DISTINCT FROM e.mark::text)
        """,
    ),
    Check(
        # By its own worker, that is; what maintenance ends from outside may not have begun.
        "completed without a run",
        """
        SELECT format('entry %s, claim %s', x.entry_id, x.claim_id)
          FROM ledger.ends x
         WHERE (x.outcome = 'completed' OR (x.flush IS NOT NULL AND x.outcome IN ('retried', 'snoozed', 'cancelled')))
           AND NOT EXISTS (SELECT FROM ledger.runs r WHERE r.entry_id = x.entry_id)
           AND NOT (x.outcome = 'cancelled'     -- asked for, and given back before it began
                    AND EXISTS (SELECT FROM ledger.requests q JOIN ledger.entries e USING (job)
                                 WHERE e.entry_id = x.entry_id))
        """,
    ),
    Check(
        "told cancelled and not so",
        """
        SELECT format('job %s: %s', c.job, f.state)
          FROM ledger.controls c LEFT JOIN a_final f USING (job)
         WHERE c.what = 'cancel' AND c.happened = 'cancelled' AND f.state IS DISTINCT FROM 'cancelled'
        """,
    ),
    Check(
        # A crash may forget the claim, and what was asked of it.
        "asked to be cancelled and tried again",
        """
        SELECT format('job %s: entry %s of attempt %s', c.job, e.entry_id, e.attempt)
          FROM ledger.controls c JOIN ledger.entries e USING (job)
         WHERE c.what = 'cancel' AND c.happened = 'requested' AND e.at > c.at
           AND NOT EXISTS (SELECT FROM ledger.crashes r WHERE r.ended_at > c.at - interval '5 s'
                                                          AND r.began_at < e.at)
        """,
    ),
    Check(
        "cancelled by nobody",
        """
        SELECT format('job %s', f.job)
          FROM a_final f
         WHERE f.state = 'cancelled'
           AND NOT EXISTS (SELECT FROM ledger.entries e WHERE e.job = f.job AND e.kind IN ('changeable', 'parent'))
           AND NOT EXISTS (SELECT FROM ledger.controls c WHERE c.job = f.job AND c.what = 'cancel')
           AND NOT EXISTS (SELECT FROM ledger.parents p JOIN a_final t ON t.job = p.parent
                            WHERE p.child = f.job AND p.on_failure IS DISTINCT FROM 'run' AND t.state <> 'completed')
        """,
    ),
    Check(
        "run before those that it was to run after",
        """
        SELECT format('job %s at %s, after job %s: %s at %s', p.child, r.started_at, p.parent, t.state, t.at)
          FROM ledger.parents p
          JOIN ledger.runs r ON r.job = p.child
          LEFT JOIN a_final t ON t.job = p.parent
         WHERE coalesce(t.at > r.started_at, true)
            OR (p.on_failure IS DISTINCT FROM 'run' AND t.state <> 'completed')
        """,
    ),
    Check(
        "attempts miscounted",
        """
        SELECT format('job %s: attempt %s %s, then %s', job, attempt, outcome, next)
          FROM (SELECT e.job, e.attempt, x.outcome,
                       lead(e.attempt) OVER (PARTITION BY e.job ORDER BY e.entry_id) AS next
                  FROM ledger.entries e
                 CROSS JOIN LATERAL (SELECT outcome FROM ledger.ends x WHERE x.entry_id = e.entry_id LIMIT 1) x) t
         WHERE next <> attempt + (outcome IN ('retried', 'rescued'))::integer
            OR (next IS NOT NULL AND outcome IN ('completed', 'failed', 'cancelled'))
        """,
    ),
    Check(
        # A crash may forget a claim; its jobs are claimed again while the first handler still runs.
        "attempts run twice without a crash between",
        """
        SELECT format('entry %s of job %s at %s and %s', a.entry_id, a.job, a.started_at, b.started_at)
          FROM ledger.runs a JOIN ledger.runs b ON b.entry_id = a.entry_id
           AND (b.started_at, b.run) > (a.started_at, a.run)
         WHERE NOT EXISTS (SELECT FROM ledger.crashes c
                            WHERE c.ended_at + interval '1 s' > a.started_at AND c.began_at < b.started_at)
        """,
    ),
    Check(
        # A fenced runtime may not have noticed: it still begins what it had claimed, and is refused at its end. A
        # handler whose time is up may go on in a thread that was given up.
        "jobs run twice at a time, in two living runtimes",
        """
        SELECT format('job %s: entry %s at %s, entry %s at %s',
                      a.job, a.entry_id, a.started_at, b.entry_id, b.started_at)
          FROM ledger.runs a
          JOIN ledger.runs b ON b.job = a.job AND b.entry_id <> a.entry_id AND b.started_at > a.started_at
           AND b.started_at < coalesce(a.ended_at, 'infinity')
         WHERE NOT EXISTS (SELECT FROM a_member m JOIN awa.gone_runtimes g USING (runtime)
                            WHERE m.entry_id IN (a.entry_id, b.entry_id) AND g.gone_at < b.started_at)
           AND NOT EXISTS (SELECT FROM ledger.entries e
                            WHERE e.entry_id = a.entry_id AND e.kind IN ('hasty', 'overdue'))
           AND NOT EXISTS (SELECT FROM ledger.crashes c
                            WHERE c.ended_at + interval '1 s' > a.started_at AND c.began_at < b.started_at)
        """,
    ),
)

LEFTOVERS = (
    """
    SELECT format('%s of backend %s (%s) is still held', locktype || ' lock', pid, application_name)
      FROM pg_locks JOIN pg_stat_activity USING (pid)
     WHERE locktype = 'advisory' AND pid <> pg_backend_pid()
    """,
    """
    SELECT format('backend %s (%s) has a transaction open', pid, application_name)
      FROM pg_stat_activity
     WHERE backend_type = 'client backend' AND xact_start IS NOT NULL AND pid <> pg_backend_pid()
    """,
)


def find_leftovers(conn: Connection[Any], *, timeout: float = 15.0) -> list[str]:
    """What sessions still hold when nobody works any more, above all those of a pooler.

    Args:
        timeout: Seconds within which whoever was cut off must have been noticed.
    """
    until = time.monotonic() + timeout
    while True:
        found = [row[0] for query in LEFTOVERS for row in conn.execute(query).fetchall()]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.1)


PREPARE = """
    CREATE TEMP TABLE a_job AS SELECT * FROM ledger.jobs;
    -- below zero are what follows others, and what --count inserts
    CREATE TEMP TABLE a_child AS
        SELECT * FROM a_job j
         WHERE mark < 0 AND NOT EXISTS (SELECT FROM ledger.entries e WHERE e.job = j.job AND e.kind = 'count');
    CREATE TEMP TABLE a_final AS SELECT * FROM ledger.finals;
    CREATE TEMP TABLE a_member AS
        SELECT c.runtime, c.claim_id, m AS entry_id FROM ledger.claims c CROSS JOIN LATERAL unnest(c.entry_ids) m;
    CREATE INDEX ON a_job (job);
    CREATE INDEX ON a_job (mark);
    CREATE INDEX ON a_final (job);
    CREATE INDEX ON a_member (entry_id);
    CREATE INDEX ON ledger.runs (entry_id);
    CREATE INDEX ON ledger.runs (job);
    ANALYZE;
"""
"""Tables of what the views of the ledger say, so that every check finds its rows by index or by one pass."""


def check(conn: Connection[Any]) -> Iterator[Verdict]:
    """Check everything; once per ledger."""
    conn.execute(PREPARE)
    for each in CHECKS:
        found = conn.execute(f"SELECT what, count(*) OVER () FROM ({each.query}) t(what) LIMIT {SHOWN}").fetchall()
        yield Verdict(each.name, found[0][1] if found else 0, [row[0] for row in found])
