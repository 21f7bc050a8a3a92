"""The engine against a model of it, in random order of steps through several sessions of one database.

``AWA_PROPERTY_STEPS`` is how many steps a run makes in all. Runs are alike, unless ``AWA_PROPERTY_SEED`` gives a
number, or ``random``.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, ClassVar

import psycopg
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from psycopg.pq import TransactionStatus

from awa.storage import jobs, runtimes
from awa.storage.jobs import JobRow
from tests.storage.engine import (
    ALONE,
    AWA,
    COME_AGAIN,
    Conn,
    Member,
    Outcome,
    claim,
    complete,
    fall_silent,
    fence,
    promote,
    register,
    rescue,
    settle,
)

# Read here: the fixtures take every setting of the developer's out of the environment.
STEPS = int(os.environ.get("AWA_PROPERTY_STEPS", "9000"))
SEED = os.environ.get("AWA_PROPERTY_SEED")
STEPS_PER_EXAMPLE = 60

LATER = 3600.0
KINDS: tuple[tuple[str, ...] | None, ...] = (("x", "y"), ("x",), None)
"""What each of the three workers knows; None: all, without naming them."""

_examples = count(1)
_flushes = count(1_000_000)

ENDED = ("completed", "failed", "cancelled")


@dataclass(eq=False)
class ModelJob:
    """What the database should know of a job whose insert has committed."""

    id: int
    queue: str
    kind: str
    priority: int
    max_attempts: int
    state: str
    attempt: int = 1
    member: Member | None = None
    lent_to: Lender | None = None
    was_rescued: bool = False
    """Its last attempt that counted ended so."""
    is_express: bool = False

    @property
    def is_suspect(self) -> bool:
        """It comes alone, unless it was set aside."""
        return self.was_rescued and self.is_express


@dataclass(eq=False)
class Producer:
    """A session that inserts."""

    conn: Conn
    jobs: list[ModelJob] = field(default_factory=list)
    savepoints: list[int] = field(default_factory=list)
    xid: int | None = None

    @property
    def is_open(self) -> bool:
        return self.conn.info.transaction_status != TransactionStatus.IDLE


@dataclass(eq=False)
class Lender:
    """A session in which handlers complete their attempts."""

    conn: Conn
    isolation: str = ""
    snapshot_at: int | None = None
    lent: list[ModelJob] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return self.conn.info.transaction_status != TransactionStatus.IDLE


@dataclass(eq=False)
class Runtime:
    """One start of a worker."""

    number: int
    kinds: tuple[str, ...] | None
    newest: int = 0
    claims: dict[int, list[Member]] = field(default_factory=dict)
    last_flush: tuple[int, list[Member], list[Outcome]] | None = None

    def knows(self, kind: str) -> bool:
        return self.kinds is None or kind in self.kinds


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of jobs, with how often it was claimed and ended."""

    id: int
    entry_id: int
    slot: int
    lane: int
    xid: int
    attempt: int
    claims: int
    ends: tuple[str, ...]


class Sessions:
    """The connections of a test run, which all examples use in turn."""

    def __init__(self, stack: ExitStack, database: str) -> None:
        def connection() -> Conn:
            return stack.enter_context(psycopg.connect(database, autocommit=True))

        self.main = connection()
        self.claimer = connection()
        self.producers = [connection() for _ in range(3)]
        self.lenders = [connection() for _ in range(2)]

    def reset(self) -> None:
        for conn in (self.main, self.claimer, *self.producers, *self.lenders):
            if conn.info.transaction_status != TransactionStatus.IDLE:
                conn.execute("ROLLBACK")


class Engine(RuleBasedStateMachine):
    sessions: ClassVar[Sessions]
    totals: ClassVar[Counter[str]]

    @initialize()
    def start(self) -> None:
        self.sessions.reset()
        number = next(_examples)
        self.queues = (f"a{number}", f"b{number}")
        self.main, self.claimer = self.sessions.main, self.sessions.claimer
        self.producers = [Producer(conn) for conn in self.sessions.producers]
        self.lenders = [Lender(conn) for conn in self.sessions.lenders]
        self.runtimes = [Runtime(register(self.main), kinds) for kinds in KINDS]
        self.dead: list[Runtime] = []
        self.jobs: dict[int, ModelJob] = {}
        self.rolled_back: set[int] = set()
        self.entries: dict[int, Entry] = {}
        self.step = 0
        self.began: dict[int, int] = {}
        self.committed: dict[int, int] = {}
        self.claimed_at: dict[int, int] = {}

    # Producers

    @rule(
        n=st.integers(0, 2),
        rows=st.lists(
            st.tuples(st.integers(0, 1), st.sampled_from("xxxy"), st.integers(1, 4), st.integers(1, 3), st.booleans()),
            min_size=1,
            max_size=6,
        ),
        plain=st.booleans(),
        commits=st.booleans(),
    )
    def insert(self, n: int, rows: list[tuple[int, str, int, int, bool]], plain: bool, commits: bool) -> None:
        producer = self.producers[n]
        if not producer.is_open:
            producer.conn.execute("BEGIN")
            producer.xid = None
        if plain:
            rows = [(*row[:4], False) for row in rows]
        written = [
            JobRow(self.queues[q], kind, b"{}", priority, limit, delay=LATER if later else None)
            for q, kind, priority, limit, later in rows
        ]
        ids = jobs.insert_jobs(producer.conn, AWA, written, notify=True)
        for id_, row in zip(ids, written, strict=True):
            producer.jobs.append(
                ModelJob(
                    id_, row.queue, row.kind, row.priority, row.max_attempts, "waiting" if row.delay else "available"
                )
            )
        if producer.xid is None:
            found = producer.conn.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
            assert found is not None
            producer.xid = found[0]
            self.began[found[0]] = self.step
        if commits:
            self._end_insert(producer, commits=True)

    @precondition(lambda self: any(producer.is_open for producer in self.producers))
    @rule(pick=st.randoms(use_true_random=False), what=st.sampled_from(("savepoint", "rollback to", "release")))
    def nest(self, pick: random.Random, what: str) -> None:
        producer = pick.choice([producer for producer in self.producers if producer.is_open])
        if what == "savepoint":
            producer.savepoints.append(len(producer.jobs))
            producer.conn.execute(f"SAVEPOINT s{len(producer.savepoints)}")
        elif producer.savepoints:
            level = pick.randint(1, len(producer.savepoints))
            if what == "release":
                producer.conn.execute(f"RELEASE s{level}")
                del producer.savepoints[level - 1 :]
            else:
                producer.conn.execute(f"ROLLBACK TO s{level}")
                kept = producer.savepoints[level - 1]
                self.rolled_back |= {job.id for job in producer.jobs[kept:]}
                del producer.jobs[kept:]
                del producer.savepoints[level:]

    @precondition(lambda self: any(producer.is_open for producer in self.producers))
    @rule(pick=st.randoms(use_true_random=False), commits=st.sampled_from((True, True, False)))
    def end_insert(self, pick: random.Random, commits: bool) -> None:
        self._end_insert(pick.choice([producer for producer in self.producers if producer.is_open]), commits=commits)

    def _end_insert(self, producer: Producer, *, commits: bool) -> None:
        producer.conn.execute("COMMIT" if commits else "ROLLBACK")
        if commits:
            self.jobs |= {job.id: job for job in producer.jobs}
        else:
            self.rolled_back |= {job.id for job in producer.jobs}
        assert producer.xid is not None
        self.committed[producer.xid] = self.step
        producer.jobs, producer.savepoints = [], []

    # Workers

    @rule(n=st.integers(0, 2), q=st.integers(0, 1), limit=st.sampled_from((1, 2, 3, 5, 50)))
    def claim(self, n: int, q: int, limit: int) -> None:
        self._claim(self.runtimes[n], self.queues[q], limit)

    @rule(n=st.integers(0, 2))
    def claim_all(self, n: int) -> None:
        for queue in self.queues:
            self._claim(self.runtimes[n], queue, 50)

    def _claim(self, runtime: Runtime, queue: str, limit: int) -> int:
        waits = {
            job.id: job
            for job in self.jobs.values()
            if job.queue == queue
            and (
                (job.state == "available" and runtime.knows(job.kind))
                or (job.state == "aside" and runtime.kinds is not None and job.kind in runtime.kinds)
            )
        }
        unknown = {
            job.id
            for job in self.jobs.values()
            if job.queue == queue and job.state == "available" and not runtime.knows(job.kind)
        }
        aside = {job.id for job in self.jobs.values() if job.queue == queue and job.state == "aside"}
        claimed = claim(self.claimer, runtime.number, queue=queue, kinds=runtime.kinds, limit=limit)
        assert claimed.flags in (0, COME_AGAIN, ALONE)
        assert len(claimed.members) <= limit
        if claimed.members:
            first = self.jobs[claimed.members[0].id]
            assert claimed.flags == (ALONE if first.is_suspect and first.id not in aside else 0)
            assert claimed.flags == 0 or len(claimed.members) == 1
            assert claimed.members[0].priority == min(job.priority for job in waits.values())
        elif not claimed.flags:
            assert not waits, "the queue seems empty and is not"
        priorities = [member.priority for member in claimed.members]
        assert priorities == sorted(priorities)
        for member in claimed.members:
            job = waits.pop(member.id)  # each once, and only what was there
            assert (member.kind, member.priority, member.attempt, member.max_attempts) == (
                job.kind,
                job.priority,
                job.attempt,
                job.max_attempts,
            )
            job.state, job.member = "running", member
            runtime.claims.setdefault(member.claim_id, []).append(member)
            runtime.newest = max(runtime.newest, member.claim_id)
            self.claimed_at[member.claim_id] = self.step
        self._check_order(claimed.members, [job.id for job in waits.values() if job.state == "available"])
        now_aside = {
            row[0]
            for row in self.main.execute(
                "SELECT id FROM awa.waiting_jobs WHERE queue = %s AND waits_for = 'kind'", (queue,)
            )
        }
        assert now_aside - unknown == aside - set(claimed.ids)
        for id_ in now_aside:
            self.jobs[id_].state = "aside"
        self.totals["claimed"] += len(claimed.members)
        self.totals["set aside"] += len(now_aside - aside)
        return len(claimed.members)

    def _check_order(self, members: list[Member], left: list[int]) -> None:
        """Within a lane: what was written first in a transaction, or committed before another began, comes first.

        Those that one claim starts come segment by segment.
        """
        entries = [self.entries[member.entry_id] for member in members if member.entry_id in self.entries]
        live = {entry.id: entry for entry in self.entries.values() if not entry.ends}
        for i, entry in enumerate(entries):
            behind = [live[id_] for id_ in left if id_ in live]
            behind += [other for other in entries[i + 1 :] if other.slot == entry.slot]
            assert not [other for other in behind if self._precedes(other, entry)]

    def _precedes(self, first: Entry, second: Entry) -> bool:
        if first.lane != second.lane:
            return False
        if first.xid == second.xid:
            return first.entry_id < second.entry_id
        return self.committed[first.xid] < self.began[second.xid]

    def _running(self, runtime: Runtime) -> list[ModelJob]:
        return [
            job
            for job in self.jobs.values()
            if job.state == "running"
            and job.member is not None
            and job.member.runtime == runtime.number
            and job.lent_to is None
        ]

    @precondition(lambda self: any(self._running(runtime) for runtime in self.runtimes))
    @rule(pick=st.randoms(use_true_random=False), most=st.sampled_from((1, 3, 50)))
    def settle(self, pick: random.Random, most: int) -> None:
        runtime = pick.choice([runtime for runtime in self.runtimes if self._running(runtime)])
        running = self._running(runtime)
        chosen = pick.sample(running, min(len(running), pick.randint(1, most)))
        done, others, ends = [], [], []
        for job in chosen:
            assert job.member is not None
            outcome = pick.choice(("completed", "completed", "retried", "snoozed", "released", "cancelled", "failed"))
            delay = LATER if outcome in ("retried", "snoozed") and pick.random() < 0.5 else 0.0
            ends.append((job, outcome, delay))
            if outcome == "completed":
                done.append(job.member)
            else:
                others.append(Outcome(job.member, outcome, delay, {"type": "E", "text": "t"}))
        flush = next(_flushes)
        assert settle(self.claimer, runtime.number, done, others, flush=flush) == []
        runtime.last_flush = flush, done, others
        for job, outcome, delay in ends:
            self._end(job, outcome, delay)

    def _end(self, job: ModelJob, outcome: str, delay: float = 0.0) -> None:
        job.member = None
        self.totals[outcome] += 1
        job.is_express = outcome in ("released", "rescued")
        if outcome in ("retried", "rescued"):
            job.was_rescued = outcome == "rescued"
            if job.attempt >= job.max_attempts:
                job.state = "failed"
                return
            job.attempt += 1
        job.state = outcome if outcome in ENDED else "waiting" if delay else "available"

    @precondition(lambda self: any(runtime.last_flush for runtime in self.runtimes))
    @rule(pick=st.randoms(use_true_random=False))
    def settle_the_same_flush_again(self, pick: random.Random) -> None:
        runtime = pick.choice([runtime for runtime in self.runtimes if runtime.last_flush])
        assert runtime.last_flush is not None
        flush, done, others = runtime.last_flush
        if done:
            self._refused(runtime, done, others, flush=flush, sqlstate="23505")
        else:
            assert settle(self.claimer, runtime.number, done, others, flush=flush) == []
        self.totals["repeated flush"] += 1

    @precondition(lambda self: any(runtime.last_flush for runtime in self.runtimes))
    @rule(pick=st.randoms(use_true_random=False))
    def settle_what_has_ended(self, pick: random.Random) -> None:
        runtime = pick.choice([runtime for runtime in self.runtimes if runtime.last_flush])
        assert runtime.last_flush is not None
        _, done, others = runtime.last_flush
        late = [Outcome(member, "retried") for member in done] + [replace(other, outcome="failed") for other in others]
        places = sorted(outcome.member.place for outcome in late)
        assert settle(self.claimer, runtime.number, (), late) == places
        assert settle(self.claimer, runtime.number, [other.member for other in others]) == sorted(
            other.member.place for other in others
        )

    @precondition(lambda self: any(self._running(runtime) for runtime in self.runtimes))
    @rule(pick=st.randoms(use_true_random=False), how=st.sampled_from(("nonce", "runtime")))
    def settle_what_is_not_ones_own(self, pick: random.Random, how: str) -> None:
        runtime = pick.choice([runtime for runtime in self.runtimes if self._running(runtime)])
        member = pick.choice(self._running(runtime)).member
        assert member is not None
        number = runtime.number
        if how == "nonce":
            member = replace(member, nonce=member.nonce ^ 1)
        else:
            number = next(other.number for other in self.runtimes if other is not runtime)
        assert settle(self.claimer, number, [member]) == [member.place]
        assert settle(self.claimer, number, (), [Outcome(member, "retried")]) == [member.place]

    @rule(n=st.integers(0, 2))
    def heartbeat(self, n: int) -> None:
        runtime = self.runtimes[n]
        running = {job.member.claim_id for job in self.jobs.values() if job.state == "running" and job.member}
        opened = sorted(running & set(runtime.claims))
        assert runtimes.heartbeat(self.main, AWA, runtime.number, newest_claim=runtime.newest, open_claims=opened)

    # Death and rescue

    @rule(n=st.integers(0, 2))
    def crash(self, n: int) -> None:
        runtime = self.runtimes[n]
        assert fence(self.main, runtime.number) is False
        fall_silent(self.main, runtime.number)
        assert fence(self.main, runtime.number) is True
        self.dead.append(runtime)
        self.runtimes[n] = Runtime(register(self.main), runtime.kinds)

    @precondition(lambda self: self.dead)
    @rule(pick=st.randoms(use_true_random=False), limit=st.sampled_from((1, 2, 100)))
    def rescue(self, pick: random.Random, limit: int) -> None:
        self._rescue(pick.choice(self.dead), limit)

    def _rescue(self, runtime: Runtime, limit: int) -> None:
        open_jobs = self._running(runtime)
        lent = [
            job for job in self.jobs.values() if job.lent_to and job.member and job.member.runtime == runtime.number
        ]
        blocked = rescued = 0
        while True:
            found, ended, held = rescue(self.main, runtime.number, limit=limit, skip=blocked)
            assert found == ended + held
            if not found:
                break
            blocked += held
            rescued += ended
        assert (rescued, blocked) == (len(open_jobs), len(lent))
        for job in open_jobs:
            self._end(job, "rescued")
        if not lent:
            self.dead.remove(runtime)

    @precondition(lambda self: self.dead)
    @rule(pick=st.randoms(use_true_random=False), what=st.sampled_from(("settle", "end", "claim", "heartbeat")))
    def a_dead_runtime_speaks(self, pick: random.Random, what: str) -> None:
        runtime = pick.choice(self.dead)
        members = [member for members in runtime.claims.values() for member in members]
        match what:
            case "settle" if members:
                self._refused(runtime, [pick.choice(members)], (), sqlstate="AWA01")
            case "end" if members:
                self._refused(runtime, (), [Outcome(pick.choice(members), "retried")], sqlstate="AWA01")
            case "claim":
                try:
                    claim(self.claimer, runtime.number, queue=self.queues[0])
                except psycopg.Error as error:
                    assert error.sqlstate == "AWA01"
                else:
                    raise AssertionError("a fenced runtime claimed")
            case _:
                assert not runtimes.heartbeat(
                    self.main, AWA, runtime.number, newest_claim=runtime.newest, open_claims=[]
                )
        self.totals["late words"] += 1

    def _refused(self, runtime: Runtime, done: Any, others: Any, *, sqlstate: str, flush: int | None = None) -> None:
        try:
            settle(self.claimer, runtime.number, done, others, flush=flush)
        except psycopg.Error as error:
            assert error.sqlstate == sqlstate
        else:
            raise AssertionError(f"not refused with {sqlstate}")

    # Completion in a handler's transaction

    @precondition(lambda self: any(job.state == "running" and job.lent_to is None for job in self.jobs.values()))
    @rule(
        n=st.integers(0, 1),
        isolation=st.sampled_from(("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")),
        pick=st.randoms(use_true_random=False),
    )
    def complete(self, n: int, isolation: str, pick: random.Random) -> None:
        lender = self.lenders[n]
        job = pick.choice([job for job in self.jobs.values() if job.state == "running" and job.lent_to is None])
        assert job.member is not None
        if not lender.is_open:
            self._lend(lender, isolation)
        assert lender.snapshot_at is not None
        is_older = lender.isolation != "READ COMMITTED" and lender.snapshot_at < self.claimed_at[job.member.claim_id]
        try:
            complete(lender.conn, job.member)
        except psycopg.errors.SerializationFailure:
            assert lender.isolation == "SERIALIZABLE"
            self._end_lent(lender, commits=False)
        except psycopg.Error as error:
            assert error.sqlstate == "AWA04"
            assert is_older
            self._end_lent(lender, commits=False)
        else:
            assert not is_older
            job.lent_to = lender
            lender.lent.append(job)

    @rule(n=st.integers(0, 1), isolation=st.sampled_from(("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")))
    def lend(self, n: int, isolation: str) -> None:
        if not self.lenders[n].is_open:
            self._lend(self.lenders[n], isolation)

    def _lend(self, lender: Lender, isolation: str) -> None:
        lender.conn.execute(f"BEGIN ISOLATION LEVEL {isolation}")
        lender.conn.execute("SELECT 1 FROM awa.leases")
        lender.isolation, lender.snapshot_at = isolation, self.step

    @precondition(lambda self: any(runtime.claims for runtime in (*self.runtimes, *self.dead)))
    @rule(n=st.integers(0, 1), pick=st.randoms(use_true_random=False))
    def complete_what_has_ended_otherwise(self, n: int, pick: random.Random) -> None:
        lender = self.lenders[n]
        ended = [
            member
            for runtime in (*self.runtimes, *self.dead)
            for members in runtime.claims.values()
            for member in members
            if any(end != "success" for end in self.entries[member.entry_id].ends)
        ]
        if not ended:
            return
        if not lender.is_open:
            self._lend(lender, pick.choice(("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")))
        try:
            complete(lender.conn, pick.choice(ended))
        except psycopg.Error as error:
            # AWA04: the transaction is older than the claim; 40001: it conflicts with another one at this level
            allowed = ("23505",) if lender.isolation == "READ COMMITTED" else ("23505", "AWA04", "40001")
            assert error.sqlstate in allowed
            self._end_lent(lender, commits=False)
        else:
            raise AssertionError("an attempt ended twice")
        self.totals["late completion"] += 1

    @precondition(lambda self: any(lender.is_open for lender in self.lenders))
    @rule(pick=st.randoms(use_true_random=False), commits=st.booleans())
    def end_lent(self, pick: random.Random, commits: bool) -> None:
        self._end_lent(pick.choice([lender for lender in self.lenders if lender.is_open]), commits=commits)

    def _end_lent(self, lender: Lender, *, commits: bool) -> None:
        if commits:
            try:
                lender.conn.execute("COMMIT")
            except psycopg.errors.SerializationFailure:
                assert lender.isolation == "SERIALIZABLE"
                commits = False
        else:
            lender.conn.execute("ROLLBACK")
        for job in lender.lent:
            job.lent_to = None
            if commits:
                self._end(job, "completed")
                self.totals["completed inside"] += 1
        lender.lent = []

    # Time

    @rule()
    def time_passes(self) -> None:
        self.main.execute(
            "UPDATE awa.waiting_jobs SET run_at = clock_timestamp() - interval '1 s'"
            " WHERE queue = ANY (%s) AND waits_for = 'time'",
            (list(self.queues),),
        )
        promote(self.main)
        for job in self.jobs.values():
            if job.state == "waiting":
                job.state = "available"

    @rule()
    def promote_too_early(self) -> None:
        promote(self.main)

    @rule(slot=st.integers(0, 7))
    def rotate(self, slot: int) -> None:
        self.main.execute("SELECT setval('awa.ring_seq', %s)", (slot,))

    # What must hold after every step

    @invariant()
    def the_database_agrees(self) -> None:
        if not hasattr(self, "queues"):
            return
        self.entries = {entry.entry_id: entry for entry in self._read_entries()}
        for entry in self.entries.values():
            self.committed.setdefault(entry.xid, self.step)
            self.began.setdefault(entry.xid, self.step)
        self.step += 1
        rows = self._rows("SELECT id, waits_for, attempt FROM awa.waiting_jobs WHERE queue = ANY (%s)")
        places: dict[int, list[tuple[str, int]]] = {id_: [] for id_ in self.jobs}
        for id_, waits_for, attempt in rows:
            places.setdefault(id_, []).append(("aside" if waits_for == "kind" else "waiting", attempt))
        for id_, state, attempt in self._rows("SELECT id, state, attempt FROM awa.ended_jobs WHERE queue = ANY (%s)"):
            places.setdefault(id_, []).append((state, attempt))
        for entry in self.entries.values():
            assert entry.claims <= 1, f"claimed twice: {entry}"
            assert len(entry.ends) <= 1, f"ended twice: {entry}"
            place = places.setdefault(entry.id, [])
            if not entry.ends:
                place.append(("running" if entry.claims else "available", entry.attempt))
            elif entry.ends[0] in ("success", "completed"):
                place.append(("completed", entry.attempt))
        assert not places.keys() & self.rolled_back
        assert places == {job.id: [(job.state, job.attempt)] for job in self.jobs.values()}

    def _read_entries(self) -> Iterator[Entry]:
        members: dict[tuple[int, int], int] = {}
        claims: Counter[int] = Counter()
        for claim_id, entry_ids in self._rows("SELECT claim_id, entry_ids FROM awa.claims WHERE queue = ANY (%s)"):
            for idx, entry_id in enumerate(entry_ids, 1):
                members[claim_id, idx] = entry_id
                claims[entry_id] += 1
        ends: dict[int, tuple[str, ...]] = {}
        for claim_id, idx in self._rows(
            "SELECT c.claim_id, x.idx FROM awa.claims c"
            "  JOIN awa.completions x ON x.slot = c.slot AND x.claim_id = c.claim_id WHERE c.queue = ANY (%s)"
        ):
            for one in idx:
                ends[members[claim_id, one]] = (*ends.get(members[claim_id, one], ()), "success")
        for entry_id, outcome in self._rows(
            "SELECT e.entry_id, e.outcome FROM awa.jobs j"
            "  JOIN awa.attempt_ends e ON e.slot = j.slot AND e.entry_id = j.entry_id WHERE j.queue = ANY (%s)"
        ):
            ends[entry_id] = (*ends.get(entry_id, ()), outcome)
        for id_, entry_id, slot, lane, xid, attempt in self._rows(
            "SELECT id, entry_id, slot, lane, xid::text::bigint, attempt FROM awa.jobs WHERE queue = ANY (%s)"
        ):
            yield Entry(id_, entry_id, slot, lane, xid, attempt, claims.pop(entry_id, 0), ends.get(entry_id, ()))
        assert not claims, "claimed what is not there"

    def _rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.main.execute(query, (list(self.queues),)).fetchall()

    def teardown(self) -> None:
        """Let everything end: every committed job ends in the state that its history leads to."""
        if not hasattr(self, "queues"):
            return
        for producer in self.producers:
            if producer.is_open:
                self._end_insert(producer, commits=True)
        for lender in self.lenders:
            if lender.is_open:
                self._end_lent(lender, commits=True)
        self.the_database_agrees()
        for runtime in [*self.dead]:
            self._rescue(runtime, 100)
        assert not self.dead
        last = self.runtimes[0]
        self.the_database_agrees()
        for runtime in self.runtimes:
            running = self._running(runtime)
            assert settle(self.claimer, runtime.number, [job.member for job in running if job.member]) == []
            for job in running:
                self._end(job, "completed")
        while any(job.state not in ENDED for job in self.jobs.values()):
            self.time_passes()
            self.the_database_agrees()
            for queue in self.queues:
                while self._claim(last, queue, 20):
                    running = self._running(last)
                    assert settle(self.claimer, last.number, [job.member for job in running if job.member]) == []
                    for job in running:
                        self._end(job, "completed")
                    self.the_database_agrees()
        self.the_database_agrees()
        self.totals["jobs"] += len(self.jobs)


def test_the_engine_does_what_its_model_does(database: str) -> None:
    """Every committed job ends exactly once, no job has two live attempts, no rolled-back job ever runs."""
    totals: Counter[str] = Counter()
    with ExitStack() as stack:
        machine: Any = type("Machine", (Engine,), {"sessions": Sessions(stack, database), "totals": totals})
        if SEED not in (None, "random"):
            machine = seed(int(SEED))(machine)
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=max(1, STEPS // STEPS_PER_EXAMPLE),
                stateful_step_count=STEPS_PER_EXAMPLE,
                derandomize=SEED is None,
                database=None,
                deadline=None,
                phases=(Phase.generate, Phase.shrink),
                suppress_health_check=list(HealthCheck),
            ),
        )
    # a run that does not reach these proves little
    for what in ("claimed", "completed", "retried", "rescued", "set aside", "completed inside", "late words"):
        assert totals[what] > 0, totals
