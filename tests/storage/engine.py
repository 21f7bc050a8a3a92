"""The engine's functions as a worker calls them, with what they return as records."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from typing import Any

import psycopg
from psycopg.rows import dict_row

from awa.storage.schema import Schema
from tests.fixtures.db import wait_until

Conn = psycopg.Connection[Any]

AWA = Schema()
ARMED, BUSY, COME_AGAIN, ALONE, PAUSED, FULL = 1, 2, 4, 8, 16, 32

_flushes = count(1)


@dataclass(frozen=True, slots=True)
class Member:
    """One started attempt, with all that a settle quotes of it."""

    runtime: int
    claim_id: int
    slot: int
    nonce: int
    idx: int
    id: int
    entry_id: int
    attempt: int
    max_attempts: int
    kind: str
    priority: int
    args: str | None = field(compare=False)
    """None: the claim left it out because it is long."""

    @property
    def place(self) -> tuple[int, int]:
        """How a settle names it when it refuses it."""
        return self.claim_id, self.idx


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one attempt, other than plain success."""

    member: Member
    outcome: str
    delay: float = 0.0
    error: dict[str, str] | None = None


@dataclass(slots=True)
class Claimed:
    """What one claim brought."""

    members: list[Member] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    flags: int = 0
    wait_ms: int | None = None

    @property
    def ids(self) -> list[int]:
        return [member.id for member in self.members]

    @property
    def numbers(self) -> list[int]:
        """The ``n`` of each job's args, as ``insert`` writes them."""
        return [json.loads(member.args or "")["n"] for member in self.members]


def register(conn: Conn, *, host: str = "host", pid: int = 1) -> int:
    """A new runtime's number."""
    row = conn.execute(
        "INSERT INTO awa.runtime_instances (uuid, hostname, pid, version, heartbeat_ms)"
        " VALUES (gen_random_uuid(), %s, %s, '0', 5000) RETURNING id",
        (host, pid),
    ).fetchone()
    assert row is not None
    return int(row[0])


def insert(
    conn: Conn,
    *numbers: int,
    queue: str = "q",
    kind: str = "noop",
    priority: int = 2,
    max_attempts: int = 25,
    key: str | None = None,
    order: str | None = None,
    expires_at: datetime | None = None,
) -> list[int]:
    """The ids of new jobs, written in one statement; each number is the ``n`` of a job's args."""
    rows = conn.execute(
        "INSERT INTO awa.jobs (queue, kind, lane, priority, max_attempts, concurrency_key, ordering_key, expires_at,"
        " args)"
        " SELECT %s, %s, 2 * %s + 1, %s, %s, %s, %s, %s, json_build_object('n', n)"
        "   FROM unnest(%s::integer[]) WITH ORDINALITY u(n, o) ORDER BY o"
        " RETURNING id",
        (queue, kind, priority, priority, max_attempts, key, order, expires_at, list(numbers)),
    ).fetchall()
    return [row[0] for row in rows]


def claim(
    conn: Conn,
    runtime: int,
    *,
    queue: str = "q",
    kinds: Sequence[str] | None = None,
    limit: int = 100,
    bell: bool = False,
    aging: float = 60.0,
) -> Claimed:
    claimed = Claimed()
    with conn.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(
            "SELECT * FROM awa.claim_v2(%s, %s::bigint, %s::text[], %s, %s, %s)",
            (queue, runtime, None if kinds is None else list(kinds), limit, bell, aging),
        ).fetchall()
    for row in rows[:-1]:
        body = (row["args"] or "").encode()
        at = 0
        claimed.batches.append(row["claim_id"])
        for i, job_id in enumerate(row["ids"]):
            length = row["lens"][i]
            claimed.members.append(
                Member(
                    runtime,
                    row["claim_id"],
                    row["slot"],
                    row["nonce"],
                    i + 1,
                    job_id,
                    row["entry_ids"][i] if row["entry_ids"] else job_id,
                    row["attempts"][i] if row["attempts"] else 1,
                    row["max_attempts"][i] if row["max_attempts"] else 25,
                    row["kinds"][i],
                    row["priority"],
                    None if length is None else body[at : at + length].decode(),
                )
            )
            at += length or 0
        assert at == len(body)
    assert rows[-1]["claim_id"] is None
    claimed.flags = rows[-1]["flags"]
    claimed.wait_ms = rows[-1]["nonce"]
    return claimed


def claim_in_steps(
    conn: Conn, runtime: int, *, limit: int, queue: str = "q", kinds: Sequence[str] | None = None
) -> list[int]:
    """The numbers that claims of *limit* jobs bring, until one brings none; fails when there is no end to it."""
    found: list[int] = []
    for _ in range(500):
        claimed = claim(conn, runtime, queue=queue, kinds=kinds, limit=limit)
        if not claimed.members and not claimed.flags & COME_AGAIN:
            return found
        found += claimed.numbers
    raise AssertionError("claims go on for ever")


def settle(
    conn: Conn,
    runtime: int,
    done: Sequence[Member] = (),
    others: Sequence[Outcome] = (),
    *,
    flush: int | None = None,
) -> list[tuple[int, int]]:
    """Record successes and other outcomes in one flush; returns the places that were refused, sorted."""
    groups: dict[tuple[int, int, int], list[Member]] = {}
    for member in done:
        groups.setdefault((member.claim_id, member.slot, member.nonce), []).append(member)
    claims: list[int] = []
    slots: list[int] = []
    nonces: list[int] = []
    lo: list[int] = []
    hi: list[int] = []
    idx: list[int] = []
    for (claim_id, slot, nonce), members in groups.items():
        claims.append(claim_id)
        slots.append(slot)
        nonces.append(nonce)
        lo.append(len(idx) + 1)
        idx += [member.idx for member in members]
        hi.append(len(idx))
    rows = conn.execute(
        "SELECT claim_id, idx FROM awa.settle_v1(%s::bigint, %s::bigint, %s::bigint[], %s::smallint[], %s::integer[],"
        " %s::integer[], %s::integer[], %s::smallint[], %s::integer[], %s::bigint[], %s::smallint[], %s::integer[],"
        " %s::smallint[], %s::text[], %s::double precision[], %s::integer[], %s::text[])",
        (
            runtime,
            next(_flushes) if flush is None else flush,
            claims,
            slots,
            nonces,
            lo,
            hi,
            idx,
            [1] * len(idx),
            [o.member.claim_id for o in others],
            [o.member.slot for o in others],
            [o.member.nonce for o in others],
            [o.member.idx for o in others],
            [o.outcome for o in others],
            [o.delay for o in others],
            [1] * len(others),
            [None if o.error is None else json.dumps(o.error) for o in others],
        ),
    ).fetchall()
    return sorted((row[0], row[1]) for row in rows)


def complete(conn: Conn, member: Member) -> None:
    """Complete one attempt in the transaction of *conn*."""
    conn.execute(
        "SELECT awa.complete_v1(%s::bigint, %s::bigint, %s::smallint, %s::integer, %s::smallint, 1)",
        (member.runtime, member.claim_id, member.slot, member.nonce, member.idx),
    )


def fall_silent(conn: Conn, runtime: int) -> None:
    """Make *runtime* look as if nothing had been heard of it for an hour."""
    conn.execute(
        "UPDATE awa.runtime_instances SET last_seen_at = clock_timestamp() - interval '1 h' WHERE id = %s", (runtime,)
    )


def fence(conn: Conn, runtime: int, *, silent: float = 30.0) -> bool:
    row = conn.execute("SELECT awa.fence_v1(%s::bigint, %s)", (runtime, silent)).fetchone()
    assert row is not None
    return bool(row[0])


def rescue(conn: Conn, runtime: int, *, limit: int = 100, skip: int = 0) -> tuple[int, int, int]:
    """Found, ended and blocked."""
    row = conn.execute("SELECT * FROM awa.rescue_v1(%s::bigint, %s, %s)", (runtime, limit, skip)).fetchone()
    assert row is not None
    return row[0], row[1], row[2]


def expire(conn: Conn, runtime: int, *, behind: float = 30.0, limit: int = 50, skip: int = 0) -> tuple[int, int]:
    """Ended and blocked."""
    row = conn.execute("SELECT * FROM awa.expire_v1(%s::bigint, %s, %s, %s)", (runtime, behind, limit, skip)).fetchone()
    assert row is not None
    return row[0], row[1]


def promote(conn: Conn, *, floor: str = "-infinity", limit: int = 1000) -> int:
    row = conn.execute("SELECT awa.promote_v1(%s::timestamptz, %s)", (floor, limit)).fetchone()
    assert row is not None
    return int(row[0])


def state(conn: Conn, job_id: int) -> str | None:
    """The job's state, as find_job_v2 derives it; None when there is no such job."""
    row = conn.execute("SELECT state FROM awa.find_job_v2(%s)", (job_id,)).fetchone()
    return None if row is None else str(row[0])


def scalar(conn: Conn, query: str, *params: Any) -> Any:
    row = conn.execute(query, params).fetchone()
    assert row is not None
    return row[0]


def end_unclaimed(conn: Conn, ids: Sequence[int]) -> None:
    """End entries that nobody has claimed, as a cancel does."""
    conn.execute(
        "INSERT INTO awa.attempt_ends (entry_id, id, slot, outcome)"
        " SELECT entry_id, id, slot, 'cancelled' FROM awa.jobs WHERE id = ANY (%s)",
        (list(ids),),
    )


class Background:
    """A call in a thread of its own, for statements that wait for a lock."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.value: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.value = self._call()
        except BaseException as error:
            self.error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(20.0)
        assert not self._thread.is_alive(), "still waiting after 20 s"
        if self.error is not None:
            raise self.error
        return self.value


def wait_for_lock(observer: Conn, waiting: Conn) -> None:
    """Return once the session of *waiting* stands behind another one."""
    pid = waiting.info.backend_pid
    wait_until(lambda: scalar(observer, "SELECT cardinality(pg_blocking_pids(%s)) > 0", pid), timeout=10.0)


@contextmanager
def transaction(conn: Conn, isolation: str = "READ COMMITTED") -> Iterator[Conn]:
    """An explicit transaction on an autocommit connection, which the block ends itself; else it is rolled back."""
    conn.execute(f"BEGIN ISOLATION LEVEL {isolation}")
    try:
        yield conn
    finally:
        if conn.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            conn.execute("ROLLBACK")


def cancel(conn: Conn, job_id: int, reason: str | None = None, *, force: bool = False) -> tuple[str, str | None]:
    """What happened, and the state of the job."""
    row = conn.execute("SELECT * FROM awa.cancel_v1(%s, %s, %s)", (job_id, reason, force)).fetchone()
    assert row is not None
    return row[0], row[1]


def move(conn: Conn, job_id: int, queue: str) -> tuple[str, str | None]:
    """What happened, and the state of the job."""
    row = conn.execute("SELECT * FROM awa.move_v1(%s, %s)", (job_id, queue)).fetchone()
    assert row is not None
    return row[0], row[1]


def retry(conn: Conn, job_id: int) -> tuple[str, str | None]:
    """What happened, and the state of the job."""
    row = conn.execute("SELECT happened, state FROM awa.retry_v1(%s)", (job_id,)).fetchone()
    assert row is not None
    return row[0], row[1]


def set_priority(conn: Conn, job_id: int, priority: int | None) -> tuple[str, str | None]:
    """What happened, and the state of the job."""
    row = conn.execute("SELECT * FROM awa.set_priority_v1(%s, %s)", (job_id, priority)).fetchone()
    assert row is not None
    return row[0], row[1]


def limit_keys(conn: Conn, most: int, *, queue: str = "q") -> None:
    """From now on at most so many attempts of a concurrency key run at once."""
    conn.execute("INSERT INTO awa.queue_meta (queue, max_running_per_key) VALUES (%s, %s)", (queue, most))
    conn.execute("SELECT awa.limits_changed(%s)", (queue,))


def places(conn: Conn, job_id: int) -> dict[str, int]:
    """In how many places a job is alive or ended: it must be one, whatever happened to it."""
    row = conn.execute(
        """SELECT (SELECT count(*) FROM awa.waiting_jobs WHERE id = %(id)s),
                  (SELECT count(*) FROM awa.ended_jobs WHERE id = %(id)s),
                  (SELECT count(*) FROM awa.jobs j
                    WHERE j.id = %(id)s
                      AND NOT EXISTS (SELECT FROM awa.attempt_ends e
                                       WHERE e.slot = j.slot AND e.entry_id = j.entry_id AND e.outcome <> 'completed'))
        """,
        {"id": job_id},
    ).fetchone()
    assert row is not None
    return {name: n for name, n in zip(("waiting", "ended", "entries"), row, strict=True) if n}


class Pause:
    """Cancels, retries and moves stop between their look at a job and what they do about it.

    Args:
        inside: Whether they stop in the middle of the look.
    """

    _LOCK = 7_404_008

    def __init__(self, holder: Conn, *, inside: bool = False) -> None:
        self._holder = holder
        before, after = f"PERFORM pg_advisory_lock_shared({self._LOCK}), pg_advisory_unlock_shared({self._LOCK});", ""
        name, returns, volatility = "newest_entry", "SETOF awa.jobs", "STABLE"
        if not inside:
            before, after = after, before
            name, volatility = "locate", "VOLATILE"
            returns = """TABLE (place text, state text, queue text, slot smallint, lane smallint, xid xid8,
                                entry_id bigint, runtime bigint, claim_id bigint, idx smallint)"""
        holder.execute(f"ALTER FUNCTION awa.{name} RENAME TO {name}_at_once")
        holder.execute(
            f"""CREATE FUNCTION awa.{name}(p_id bigint) RETURNS {returns} LANGUAGE plpgsql {volatility}
                SET lock_timeout = 0 AS $$
                BEGIN
                    {before}
                    RETURN QUERY SELECT * FROM awa.{name}_at_once(p_id);
                    {after}
                END $$"""
        )
        holder.execute("SELECT pg_advisory_lock(%s)", [self._LOCK])

    def go_on(self) -> None:
        """Let them act, now and from now on."""
        self._holder.execute("SELECT pg_advisory_unlock(%s)", [self._LOCK])
