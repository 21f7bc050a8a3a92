"""Traps of settling: two transactions in one round trip, and locks of a runtime that are never waited for.

Each docstring names the guard and what was seen without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest

from awa._core import Attempt, Handler, Outcomes
from awa.storage import recovery
from awa.storage.line import Line, Wanted
from tests.fixtures.late import Gate
from tests.storage.engine import AWA, Conn, claim, fall_silent, fence, insert, register, rescue, scalar, settle, state

Alone = Callable[[Conn, int], object]


@pytest.fixture
def line(database: str) -> Iterator[Line]:
    """A worker's claim connection."""
    line = Line(database, AWA, {"noop": Handler("noop", lambda: None, lambda text: {}, is_typed=False)})
    yield line
    line.close()


def started(line: Line, runtime: int, outcomes: Outcomes) -> list[Attempt]:
    [claimed] = line.exchange(runtime, [], [Wanted("q", 1)]).claims
    for batch in claimed.batches:
        outcomes.opened(batch)
    return claimed.attempts


def test_settle_and_claim_in_one_round_trip_are_two_transactions(conn: Conn, line: Line, late: Gate) -> None:
    """Guard: a Sync behind every statement; without it the pipeline is one transaction.

    Then the two have one transaction id, and a claim that fails takes the outcomes along: tried.
    """
    runtime, outcomes = register(conn), Outcomes()
    ids = insert(conn, *range(3))
    for attempt in started(line, runtime, outcomes):
        outcomes.add(attempt, "failed")
    reply = line.exchange(runtime, outcomes.take(runtime), [Wanted("q", 1)])
    assert [settled.error for settled in reply.settled] == [None]
    [attempt] = reply.claims[0].attempts
    ends, claims = "SELECT xmin::text FROM awa.attempt_ends", "SELECT max(xmin::text::bigint)::text FROM awa.claims"
    assert scalar(conn, ends) != scalar(conn, claims)

    outcomes.opened([attempt])
    outcomes.add(attempt, "failed")
    late.fail_once("claim_v2", "true")
    reply = line.exchange(runtime, outcomes.take(runtime), [Wanted("q", 1)])
    assert late.has_failed
    assert (reply.settled[0].error, reply.claims[0].error is None) == (None, False)
    assert [state(conn, job) for job in ids] == ["failed", "failed", "available"]


@pytest.mark.parametrize(
    "alone",
    [
        fence,
        rescue,
        lambda conn, runtime: recovery.release_unknown_claims(conn, AWA, runtime, newest=0),
    ],
    ids=["fence", "rescue", "recovery"],
)
def test_who_wants_a_runtime_alone_never_stands_in_its_queue(
    conn: Conn, other: Conn, third: Conn, alone: Alone
) -> None:
    """Guard: exclusive locks of a runtime are only tried; one that waits keeps every later settle behind it.

    With a lock that waits, it stands there until its time is over: tried.
    """
    runtime = register(conn)
    insert(conn, 1, 2)
    first, second = claim(conn, runtime).members
    if alone is rescue:
        conn.execute("INSERT INTO awa.gone_runtimes (runtime) VALUES (%s)", (runtime,))
    else:
        fall_silent(conn, runtime)
    # as any transaction of the runtime that goes on
    conn.execute("BEGIN")
    conn.execute("SELECT pg_advisory_xact_lock_shared(hashtextextended('awa.runtime:' || %s::text, 0))", (runtime,))
    other.execute("SET statement_timeout = '2s'")
    assert alone(other, runtime) in (False, (0, 0, 1), None)
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    assert scalar(third, waiting) == 0
    if alone is not rescue:
        assert settle(third, runtime, [first]) == []
        assert settle(third, runtime, [second]) == []
    conn.execute("ROLLBACK")


def test_a_rescuer_that_works_refuses_a_settle_at_once(conn: Conn, other: Conn) -> None:
    """Guard: the settle's own lock is tried too, so that a worker is told to come again instead of standing there.

    With a lock that waits, it stands behind the rescuer until its lock_timeout: tried, with that out of the way.
    """
    runtime = register(conn)
    insert(conn, 1)
    members = claim(conn, runtime).members
    conn.execute("ALTER FUNCTION awa.settle_v1 SET lock_timeout = 0")
    other.execute("BEGIN")
    other.execute("SELECT pg_advisory_xact_lock(hashtextextended('awa.runtime:' || %s::text, 0))", (runtime,))
    conn.execute("SET statement_timeout = '2s'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        settle(conn, runtime, members)
    other.execute("ROLLBACK")
    assert settle(conn, runtime, members) == []
