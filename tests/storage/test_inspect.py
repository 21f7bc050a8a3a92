"""Looking at jobs: one by its id with its last attempt, lists by state, counts of queues; against what is stored."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from awa.admin import Admin
from awa.errors import JobNotFound
from awa.job import JobState
from awa.storage import jobs, kinds, listing, lookup, queues
from awa.storage.jobs import JobInfo
from awa.storage.listing import JobPage
from awa.storage.migrate import migrate
from awa.storage.queues import Count
from awa.storage.schema import Schema
from awa.storage.snapshot import one_snapshot
from awa.worker.maintenance.summarize import Summarize
from tests.storage.engine import (
    AWA,
    Background,
    Conn,
    Member,
    Outcome,
    cancel,
    claim,
    end_unclaimed,
    fall_silent,
    fence,
    insert,
    promote,
    register,
    rescue,
    retry,
    scalar,
    settle,
    state,
    transaction,
    wait_for_lock,
)
from tests.storage.lives import (
    Make,
    listed,
    make_handed_over,
    make_set_aside,
    make_waiting_for_key,
    make_waiting_for_order,
    pages,
)

WHY = {"type": "ValueError", "text": "why", "traceback": "line 1"}

LEFT_TO_A_SUCCESSOR = ("retried", "snoozed", "released", "rescued", "set_aside", "moved", "carried")


def find(conn: Conn, job_id: int) -> JobInfo:
    return jobs.get_job(conn, AWA, job_id)


def turn_to(conn: Conn, slot: int) -> None:
    """Write to another slot from now on."""
    conn.execute("SELECT setval('awa.ring_seq', %s)", (slot,))


def append_again(conn: Conn, job_id: int, outcome: str, *, slot: int, queue: str = "q", lane: int = 4) -> None:
    """End the newest entry of a job before any claim, and append the next in another slot, as a move does."""
    conn.execute(
        "INSERT INTO awa.attempt_ends (entry_id, id, slot, outcome)"
        " SELECT entry_id, id, slot, %s FROM awa.jobs WHERE id = %s ORDER BY entry_id DESC LIMIT 1",
        (outcome, job_id),
    )
    conn.execute(
        "INSERT INTO awa.jobs (id, created_at, slot, lane, queue, kind, args)"
        " SELECT id, coalesce(created_at, available_at), %s, %s, %s, kind, args FROM awa.jobs WHERE id = %s LIMIT 1",
        (slot, lane, queue, job_id),
    )


def last_attempt(job: JobInfo) -> tuple[bool, int | None, int | None, str | None, int | None]:
    return job.claimed_at is not None, job.elapsed_ms, job.runtime, job.hostname, job.pid


NO_ATTEMPT = (False, None, None, None, None)


# One job


def test_a_job_tells_of_its_last_attempt_all_its_life(conn: Conn) -> None:
    runtime = register(conn, host="here", pid=7)
    [id_] = insert(conn, 1, max_attempts=3)

    def check(state: JobState, attempt: tuple[Any, ...], error: str | None) -> JobInfo:
        job = find(conn, id_)
        assert (job.state, last_attempt(job)) == (state, attempt)
        assert (job.error and job.error["text"]) == error
        return job

    def at(job: JobInfo) -> Any:
        assert job.claimed_at is not None
        return job.claimed_at

    running, ended = (True, None, runtime, "here", 7), (True, 1, runtime, "here", 7)
    check(JobState.AVAILABLE, NO_ATTEMPT, None)
    before = scalar(conn, "SELECT clock_timestamp()")
    [member] = claim(conn, runtime).members
    first = at(check(JobState.RUNNING, running, None))
    assert before <= first <= scalar(conn, "SELECT clock_timestamp()")
    settle(conn, runtime, others=[Outcome(member, "retried", 60.0, WHY)])
    assert at(check(JobState.RETRYABLE, ended, "why")) == first
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    promote(conn)
    assert at(check(JobState.AVAILABLE, ended, "why")) == first
    [member] = claim(conn, runtime).members
    second = at(check(JobState.RUNNING, running, "why"))
    assert second > first
    settle(conn, runtime, others=[Outcome(member, "released")])
    assert at(check(JobState.AVAILABLE, ended, "why")) == first  # handed back, it was no attempt
    [member] = claim(conn, runtime).members
    settle(conn, runtime, [member])
    job = check(JobState.COMPLETED, ended, None)
    assert job.ended_at is not None and job.ended_at >= at(job) > second
    assert [past["text"] for past in job.history] == ["why"]


@pytest.mark.parametrize(
    ("outcome", "delay", "expected", "is_attempt", "error"),
    [
        ("retried", 0.0, "available", True, "why"),
        ("retried", 60.0, "retryable", True, "why"),
        ("snoozed", 0.0, "available", True, None),
        ("snoozed", 60.0, "scheduled", True, None),
        ("released", 0.0, "available", False, None),
        ("failed", 0.0, "failed", True, "why"),
        ("cancelled", 0.0, "cancelled", True, "why"),
        ("completed", 0.0, "completed", True, None),
    ],
)
@pytest.mark.parametrize("slot", [0, 5])
def test_every_outcome_of_an_attempt_gives_its_state(
    conn: Conn, outcome: str, delay: float, expected: str, is_attempt: bool, error: str | None, slot: int
) -> None:
    runtime = register(conn)
    [id_] = insert(conn, 1)
    [member] = claim(conn, runtime).members
    turn_to(conn, slot)
    settle(conn, runtime, others=[Outcome(member, outcome, delay, WHY if error else None)])
    job = find(conn, id_)
    assert job.state == expected
    assert last_attempt(job) == ((True, 1, runtime, "host", 1) if is_attempt else NO_ATTEMPT)
    assert job.error == (WHY if error else None)
    assert (job.ended_at is not None) == job.state.is_terminal


def test_a_rescued_job_is_available_and_names_the_worker_that_died(conn: Conn) -> None:
    dead = register(conn, host="gone", pid=3)
    [id_] = insert(conn, 1)
    claim(conn, dead)
    fall_silent(conn, dead)
    fence(conn, dead)
    assert rescue(conn, dead) == (1, 1, 0)
    job = find(conn, id_)
    assert (job.state, job.attempt, last_attempt(job)) == (JobState.AVAILABLE, 2, (True, None, dead, "gone", 3))
    assert job.error is not None and job.error["type"] == "WorkerDied"


def test_a_job_set_aside_has_had_no_attempt_and_one_claimed_directly_has(conn: Conn) -> None:
    runtime = register(conn)
    [id_] = insert(conn, 1, kind="new")
    claim(conn, runtime, kinds=["old"])
    assert (find(conn, id_).state, last_attempt(find(conn, id_))) == (JobState.AVAILABLE, NO_ATTEMPT)
    for _ in range(40):  # claims of other jobs before and after, so that it is not merely the first row
        insert(conn, 2)
        claim(conn, runtime)
    [member] = claim(conn, runtime, kinds=["new"]).members
    assert (find(conn, id_).state, last_attempt(find(conn, id_))) == (JobState.RUNNING, (True, None, 1, "host", 1))
    for _ in range(40):
        insert(conn, 3)
        claim(conn, runtime)
    settle(conn, runtime, [member])
    assert (find(conn, id_).state, last_attempt(find(conn, id_))) == (JobState.COMPLETED, (True, 1, 1, "host", 1))


@pytest.mark.parametrize("outcome", ["moved", "carried"])
def test_the_newest_entry_decides_for_a_job_that_was_appended_again(conn: Conn, outcome: str) -> None:
    runtime = register(conn)
    [id_] = insert(conn, 1)
    for slot in (3, 1, 6):
        append_again(conn, id_, outcome, slot=slot, queue="q2")
        assert (find(conn, id_).state, find(conn, id_).queue) == (JobState.AVAILABLE, "q2")
        assert last_attempt(find(conn, id_)) == NO_ATTEMPT
    [member] = claim(conn, runtime, queue="q2").members
    assert find(conn, id_).state == JobState.RUNNING
    settle(conn, runtime, [member])
    assert find(conn, id_).state == JobState.COMPLETED


@pytest.mark.parametrize("outcome", [*LEFT_TO_A_SUCCESSOR, "failed", "cancelled", "purged"])
def test_an_entry_without_its_successor_belongs_to_no_job(conn: Conn, outcome: str) -> None:
    """No word for what became of an entry is ever shown as the state of a job: failed ones have a row that says so."""
    [id_] = insert(conn, 1)
    end_unclaimed(conn, [id_])
    conn.execute("UPDATE awa.attempt_ends SET outcome = %s", (outcome,))
    with pytest.raises(JobNotFound):
        find(conn, id_)


def test_a_job_whose_entries_are_gone_tells_what_its_history_knows(conn: Conn) -> None:
    runtime = register(conn)
    [id_] = insert(conn, 1, max_attempts=1)
    [member] = claim(conn, runtime).members
    settle(conn, runtime, others=[Outcome(member, "retried", 0.0, WHY)])
    conn.execute("TRUNCATE awa.jobs, awa.claims, awa.completions, awa.attempt_ends")
    job = find(conn, id_)
    assert (job.state, last_attempt(job)) == (JobState.FAILED, (False, 1, runtime, "host", 1))
    assert job.error == WHY


def test_a_job_completed_long_ago_is_found_with_its_times_and_attempt(conn: Conn) -> None:
    runtime = register(conn)
    [id_] = insert(conn, 1)
    [member] = claim(conn, runtime).members
    settle(conn, runtime, others=[Outcome(member, "retried")])
    [member] = claim(conn, runtime).members
    settle(conn, runtime, [member])
    was = find(conn, id_)
    for table, column in (
        ("jobs", "available_at"),
        ("jobs", "created_at"),
        ("claims", "claimed_at"),
        ("completions", "completed_at"),
        ("attempt_ends", "ended_at"),
        ("runtime_instances", "last_seen_at"),
    ):
        conn.execute(f"UPDATE awa.{table} SET {column} = {column} - interval '23 h'")
    conn.execute("UPDATE awa.runtime_instances SET ended_at = last_seen_at")
    for slot in (1, 2, 3):  # and much has been done since
        turn_to(conn, slot)
        insert(conn, *range(50))
        other = register(conn)
        settle(conn, other, claim(conn, other).members)
    job = find(conn, id_)
    assert (job.state, job.attempt, last_attempt(job)) == (JobState.COMPLETED, 2, (True, 1, runtime, "host", 1))
    day = timedelta(hours=23)
    assert was.claimed_at is not None and was.ended_at is not None
    assert (job.created_at, job.claimed_at, job.ended_at) == (
        was.created_at - day,
        was.claimed_at - day,
        was.ended_at - day,
    )


def test_a_job_with_the_numbers_of_another_cluster_is_in_the_state_that_its_rows_say(conn: Conn, admin: Admin) -> None:
    """Guard: the frontier of this cluster's numbers says nothing of an entry whose number is still to come."""
    runtime = register(conn)
    ids = insert(conn, *range(4))
    members = claim(conn, runtime, limit=3).members
    settle(conn, runtime, members[:2])
    conn.execute("UPDATE awa.jobs SET xid = (xid::text::bigint + 5000)::text::xid8")
    conn.execute("UPDATE awa.claims SET xids = ARRAY(SELECT (x::text::bigint + 5000)::text::xid8 FROM unnest(xids) x)")
    conn.execute("INSERT INTO awa.frontiers (queue, claim_id, frontier) VALUES ('q', 4711, '{}')")
    assert [find(conn, id_).state for id_ in ids] == ["completed", "completed", "running", "available"]
    assert listed(admin, JobState.COMPLETED) == ids[1::-1]
    assert listed(admin, JobState.RUNNING) == [ids[2]]


def test_what_is_not_committed_is_not_seen(conn: Conn, other: Conn) -> None:
    runtime = register(conn)
    with transaction(other):
        [unseen] = insert(other, 1)
        with pytest.raises(JobNotFound):
            find(conn, unseen)
        other.execute("ROLLBACK")
    with pytest.raises(JobNotFound):
        find(conn, unseen)
    [id_] = insert(conn, 2)
    with transaction(other):
        [member] = claim(other, runtime).members
        assert find(conn, id_).state == JobState.AVAILABLE
        other.execute("COMMIT")
    with transaction(other):
        settle(other, runtime, [member])
        assert find(conn, id_).state == JobState.RUNNING
        other.execute("COMMIT")
    assert find(conn, id_).state == JobState.COMPLETED


def test_all_is_looked_up_in_one_snapshot(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: the functions are STABLE. A job that moves from the entries to what waits, while it is looked for, is in
    one place: as a volatile function's statements see them it could be in none."""
    runtime = register(conn)
    [id_] = insert(conn, 1)
    [member] = claim(conn, runtime).members
    with transaction(other):
        other.execute("SELECT pg_advisory_xact_lock(77)")
        looking = Background(
            lambda: scalar(
                third,
                "WITH w AS MATERIALIZED (SELECT pg_advisory_xact_lock(77))"
                " SELECT f.state FROM w CROSS JOIN LATERAL awa.find_job_v2(%s) f",
                id_,
            )
        )
        wait_for_lock(conn, third)
        settle(conn, runtime, others=[Outcome(member, "snoozed", 60.0)])
        other.execute("COMMIT")
    assert looking.result() == "running"
    assert state(conn, id_) == "scheduled"


def test_a_job_is_found_while_its_segment_is_emptied(conn: Conn, other: Conn, third: Conn) -> None:
    """Guard: get_job looks again. Its first snapshot is older than the entry that the job was carried to, and the one
    it was carried from is truncated, whatever snapshots see."""
    [id_] = insert(conn, 1)
    with transaction(other):
        other.execute("LOCK TABLE awa.jobs_0 IN ACCESS EXCLUSIVE MODE")
        looking = Background(lambda: find(third, id_))
        wait_for_lock(conn, third)
        conn.execute(
            "INSERT INTO awa.jobs (id, created_at, slot, lane, queue, kind) VALUES (%s, now(), 1, 4, 'q', 'noop')",
            (id_,),
        )
        other.execute("TRUNCATE awa.jobs_0")
        other.execute("COMMIT")
    assert looking.result().state == JobState.AVAILABLE


def test_lists_and_counts_hold_their_moment_against_truncation(conn: Conn, other: Conn) -> None:
    """Guard: the segments are locked before the snapshot is taken."""
    insert(conn, 1)
    with one_snapshot(conn, AWA) as look, transaction(other):
        other.execute("SET LOCAL lock_timeout = '50ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute("TRUNCATE awa.jobs_0")
        assert queues.count_jobs(look, None)["q"][JobState.AVAILABLE] == Count(1, True)


# Finding it fast


def test_the_index_of_ids_is_kept_up_to_date_but_where_jobs_are_being_inserted(
    conn: Conn,
) -> None:
    """Guard: the tail of the current slot is left out; inserts into a summarised range write to the index."""
    chore = Summarize(AWA)

    def finish(held_seconds: float = 60.0) -> None:
        chore.run(conn, held_seconds)
        while not chore.run(conn, 60.0):
            pass

    def left(slot: int) -> int:
        """Ranges of pages that a search for an id would read whole; none is, once this was asked."""
        return int(scalar(conn, "SELECT brin_summarize_new_values(%s::regclass)", f"awa.jobs_{slot}_id_idx"))

    def fill(slot: int, n: int) -> None:
        conn.execute(
            "INSERT INTO awa.jobs (queue, kind, slot) SELECT 'q', 'x', %s FROM generate_series(1, %s)", (slot, n)
        )

    for _ in range(2):
        fill(0, 80_000)
        finish()
    assert scalar(conn, "SELECT pg_relation_size('awa.jobs_0') / 8192") > 1200
    assert left(0) == pytest.approx(64 / 32, abs=1)
    fill(2, 15_000)
    finish()
    assert left(2) == 0  # nothing is written to it any more: the last range too
    # emptied and filled again, and the chore saw it empty; or did not, since another led then
    conn.execute("TRUNCATE awa.jobs_2")
    finish()
    fill(2, 15_000)
    finish()
    assert left(2) == 0
    conn.execute("TRUNCATE awa.jobs_2")
    fill(2, 20_000)
    finish(held_seconds=0.0)
    assert left(2) == 0
    ids = [id_ for (id_,) in conn.execute("SELECT id FROM awa.jobs WHERE id %% 10000 = 0", ()).fetchall()]
    assert ids and all(find(conn, id_).id == id_ for id_ in ids)


def test_whoever_may_call_it_may_summarize(conn: Conn) -> None:
    """Guard: it runs as the owner of the index; a worker's role need not be."""
    conn.execute("CREATE ROLE awa_only_works")
    try:
        conn.execute("GRANT USAGE ON SCHEMA awa TO awa_only_works")
        conn.execute("GRANT EXECUTE ON FUNCTION awa.summarize_v1 TO awa_only_works")
        conn.execute("INSERT INTO awa.jobs (queue, kind) SELECT 'q', 'noop' FROM generate_series(1, 5000)")
        turn_to(conn, 1)
        with transaction(conn):
            conn.execute("SET LOCAL ROLE awa_only_works")
            assert lookup.summarize(conn, AWA, 0, 0, ranges=1) == 32
    finally:
        conn.execute("DROP OWNED BY awa_only_works; DROP ROLE awa_only_works")


# A workload of every kind, and what each look says of it

BRUTE_CLAIM = """
    SELECT j.entry_id, (SELECT (c.claim_id, array_position(c.entry_ids, j.entry_id))::text FROM awa.claims c
                         WHERE c.slot = j.slot AND j.entry_id = ANY (c.entry_ids)),
           (SELECT (c.claim_id, c.idx)::text
              FROM awa.claim_of(j.slot, j.queue, j.lane, j.xid, j.entry_id, j.available_at) c)
      FROM awa.jobs j
"""


BRUTE_OLDEST = """
    SELECT j.queue, j.kind, min(j.available_at)
      FROM awa.jobs j
     WHERE j.lane > 0 AND NOT EXISTS (SELECT FROM awa.attempt_ends e WHERE e.entry_id = j.entry_id)
       AND NOT EXISTS (SELECT FROM awa.claims c WHERE j.entry_id = ANY (c.entry_ids))
     GROUP BY 1, 2
"""


class Workload:
    """Does at random what producers, workers and operators do, with transactions that stay open meanwhile."""

    def __init__(self, conn: Conn, open_connection: Callable[[], Conn], seed: int) -> None:
        self.conn = conn
        self.random = random.Random(seed)
        self.writers = [open_connection() for _ in range(3)]
        self.runtimes = [register(conn) for _ in range(3)]
        self.open: list[Member] = []
        self.number = 0

    def step(self) -> None:
        pick = self.random
        queue = pick.choice(["a", "b", "c"])
        action = pick.random()
        if action < 0.35:
            writer = pick.choice([self.conn, *self.writers])
            if writer is not self.conn and writer.info.transaction_status == psycopg.pq.TransactionStatus.IDLE:
                writer.execute("BEGIN")
            self.insert(writer, queue)
        elif action < 0.45:
            writer = pick.choice(self.writers)
            writer.execute(pick.choice(["COMMIT", "COMMIT", "ROLLBACK"]))
        elif action < 0.65:
            kinds = pick.choice([None, ["noop"], ["noop", "new"]])
            self.open += claim(
                self.conn, pick.choice(self.runtimes), queue=queue, kinds=kinds, limit=pick.randint(1, 9)
            ).members
        elif action < 0.9:
            self.settle()
        elif action < 0.93:
            self.conn.execute("UPDATE awa.waiting_jobs SET run_at = now() WHERE waits_for = 'time' AND random() < 0.5")
            promote(self.conn)
        elif action < 0.96:
            turn_to(self.conn, pick.randrange(8))
        else:
            found = self.conn.execute("SELECT slot, entry_id FROM awa.unclaimed(%s, 3)", (queue,)).fetchall()
            for slot, entry_id in found[1:]:
                self.conn.execute(
                    "WITH e AS (SELECT * FROM awa.jobs WHERE slot = %s AND entry_id = %s), ended AS ("
                    " INSERT INTO awa.attempt_ends (entry_id, id, slot, outcome) SELECT entry_id, id, slot, 'carried'"
                    " FROM e) INSERT INTO awa.jobs (id, created_at, lane, priority, queue, kind, attempt, history)"
                    " SELECT id, coalesce(created_at, available_at), 2 * priority, priority, queue, kind, attempt,"
                    " history FROM e",
                    (slot, entry_id),
                )

    def insert(self, writer: Conn, queue: str) -> None:
        pick = self.random
        numbers = range(self.number, self.number + pick.randint(1, 8))
        self.number = numbers.stop
        insert(
            writer,
            *numbers,
            queue=queue,
            kind=pick.choice(["noop", "noop", "noop", "new"]),
            priority=pick.choice([2, 2, 1, 4]),
            max_attempts=pick.choice([1, 3]),
        )

    def settle(self) -> None:
        pick = self.random
        pick.shuffle(self.open)
        done, self.open = self.open[:6], self.open[6:]
        for runtime in self.runtimes:
            mine = [member for member in done if member.runtime == runtime]
            others = [
                Outcome(member, pick.choice(("retried", "snoozed", "released", "failed", "cancelled", "completed")),
                        pick.choice([0.0, 60.0]))
                for member in mine[::2]
            ]  # fmt: skip
            assert settle(self.conn, runtime, mine[1::2], others) == []

    def end(self) -> None:
        """Let some runtimes tell what is open, as a heartbeat does, and every writer end."""
        runtime = self.runtimes[0]
        mine = sorted({member.claim_id for member in self.open if member.runtime == runtime})
        middle = mine[len(mine) // 2] if mine else 0
        self.conn.execute(
            "UPDATE awa.runtime_instances SET newest_claim = %s, open_claims = %s WHERE id = %s",
            (middle, [claim_id for claim_id in mine if claim_id <= middle], runtime),
        )
        for writer in self.writers[:2]:
            writer.execute("COMMIT")


@pytest.mark.parametrize("seed", range(2))
def test_every_look_agrees_with_what_is_stored(
    conn: Conn, open_connection: Callable[[], Conn], admin: Admin, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever was done, each job is in one list, counted once, found by its id in the same state, by its own claim."""
    workload = Workload(conn, open_connection, seed)
    for _ in range(250):
        workload.step()
    workload.end()
    for entry_id, expected, found in conn.execute(BRUTE_CLAIM).fetchall():
        assert found == expected, entry_id
    known = conn.execute(
        "SELECT id FROM awa.jobs UNION SELECT id FROM awa.waiting_jobs UNION SELECT id FROM awa.ended_jobs"
    )
    stored = {id_: find(conn, id_) for (id_,) in known.fetchall()}
    assert Counter(job.state for job in stored.values())[JobState.AVAILABLE]
    counts = admin.queue_counts()
    everything = [id_ for wanted in listing.ORDER for id_ in listed(admin, wanted)]
    some = workload.random.sample(everything, len(everything) // 3)
    for limit in (7, 1000):
        assert listed(admin, None, limit=limit) == everything
        assert listed(admin, None, limit=limit, ids=[*some, 987_654]) == [id_ for id_ in everything if id_ in some]
    for wanted in JobState:
        expected_ids = {id_ for id_, job in stored.items() if job.state == wanted}
        listed_jobs = [job for page in pages(admin, wanted, limit=1000) for job in page]
        whole = [job.id for job in listed_jobs]
        assert len(whole) == len(set(whole))
        assert set(whole) == expected_ids
        assert listed(admin, wanted, limit=11) == whole  # pages of few are those of all states, above
        mine_in_order = [id_ for id_ in whole if id_ in some]
        assert listed(admin, wanted, ids=some) == mine_in_order
        for name in counts:
            assert listed(admin, wanted, ids=some, queue=name, kind="new") == [
                id_ for id_ in mine_in_order if (stored[id_].queue, stored[id_].kind) == (name, "new")
            ]
            mine = {id_ for id_ in expected_ids if stored[id_].queue == name}
            assert set(listed(admin, wanted, queue=name)) == mine
            assert counts[name][wanted] == Count(len(mine), True)
        for kind in ("noop", "new"):
            assert set(listed(admin, wanted, kind=kind)) == {id_ for id_ in expected_ids if stored[id_].kind == kind}
        for job in listed_jobs:
            same = stored[job.id]
            for name in ("queue", "kind", "state", "priority", "attempt", "max_attempts", "args", "tags"):
                assert getattr(job, name) == getattr(same, name), (name, job)
            for name in ("created_at", "run_at", "ended_at", "waits_for", "history", "expires_at"):
                assert getattr(job, name) == getattr(same, name), (name, job)
            if wanted in (JobState.RUNNING, JobState.COMPLETED):
                for name in ("claimed_at", "elapsed_ms", "runtime", "hostname", "pid", "error"):
                    assert getattr(job, name) == getattr(same, name), (name, job)
    assert all(admin.queue_counts(name)[name] == counts[name] for name in counts)
    in_line: defaultdict[str, dict[str, datetime]] = defaultdict(dict)
    for name, kind, since in conn.execute(BRUTE_OLDEST).fetchall():
        in_line[kind][name] = since
    by_kind = Counter((job.kind, job.queue, job.state) for job in stored.values())
    for number in (kinds.SAMPLE_PAGES, 1):  # every page is read; or, beside a few, all that a queue has
        monkeypatch.setattr(kinds, "SAMPLE_PAGES", number)
        infos = {info.name: info for info in admin.list_kinds()}
        assert infos.keys() == {"noop", "new"}
        for kind, info in infos.items():
            assert info == admin.get_kind(kind)
            assert info.counts == admin.kind_counts(kind)[kind] == admin.kind_counts()[kind]
            for name in counts:
                expected = {wanted: Count(by_kind[kind, name, wanted], True) for wanted in JobState}
                assert admin.kind_counts(kind, queue=name)[kind] == expected
                assert name not in info.queues or info.queues[name].counts == expected
                assert admin.get_queue(name).kinds.get(kind) == info.queues.get(name)
            assert {name: one.oldest_at for name, one in info.queues.items() if one.oldest_at} == in_line[kind]
            assert info.oldest_at == min(in_line[kind].values(), default=None)
            for wanted in JobState:
                together = sum(by_kind[kind, name, wanted] for name in counts)
                assert info.counts[wanted] == Count(together, True)
    for id_ in workload.random.sample(sorted(stored), 20):
        details = admin.job_details(id_)
        assert all(getattr(details, field.name) == getattr(stored[id_], field.name) for field in fields(JobInfo))
        assert len([one for one in details.attempts if one.outcome is None]) == (details.state == JobState.RUNNING)
    viewed = conn.execute("SELECT id, state, queue, attempt, ended_at FROM awa.job_overview").fetchall()
    assert sorted(viewed) == sorted(
        (job.id, job.state, job.queue, job.attempt, job.ended_at) for job in stored.values()
    )


# Lists


def test_lists_begin_with_the_newest(conn: Conn, admin: Admin) -> None:
    runtime = register(conn)
    ids = insert(conn, *range(4))
    assert listed(admin, JobState.AVAILABLE) == ids[::-1]
    members = [claim(conn, runtime, limit=1).members[0] for _ in ids]
    assert listed(admin, JobState.RUNNING) == ids[::-1]
    settle(conn, runtime, others=[Outcome(members[n], "failed") for n in (2, 0)])
    settle(conn, runtime, [members[3]])
    settle(conn, runtime, [members[1]])
    assert listed(admin, JobState.FAILED) in ([ids[2], ids[0]], [ids[0], ids[2]])
    assert listed(admin, JobState.COMPLETED) == [ids[3], ids[1]]  # by when they were claimed


def test_jobs_that_end_meanwhile_make_no_page_skip_or_repeat_others(conn: Conn, admin: Admin) -> None:
    runtime = register(conn)
    ids = insert(conn, *range(30))
    seen: list[int] = []
    page = admin.list_jobs(JobState.AVAILABLE, limit=4)
    while True:
        seen += [job.id for job in page.jobs]
        if page.after is None:
            break
        members = claim(conn, runtime, limit=2).members  # the oldest: they leave the end of the list
        settle(conn, runtime, members[:1], [Outcome(member, "retried") for member in members[1:]])
        insert(conn, 99)
        page = admin.list_jobs(JobState.AVAILABLE, limit=4, after=page.after)
    assert len(seen) == len(set(seen))
    remaining = [job.id for job in admin.list_jobs(JobState.AVAILABLE, limit=1000).jobs if job.attempt == 1]
    assert set(remaining) & set(ids) <= set(seen)
    assert len(seen) < 30


def test_jobs_that_complete_meanwhile_leave_the_running_ones_whole(conn: Conn, admin: Admin) -> None:
    runtime = register(conn)
    insert(conn, *range(40))
    members = [member for _ in range(4) for member in claim(conn, runtime, limit=10).members]
    page = admin.list_jobs(JobState.RUNNING, limit=7)
    seen = [job.id for job in page.jobs]
    ended = set()
    while page.after is not None:
        last = members.index(next(member for member in members if member.id == seen[-1]))
        done = [members[last - 1], members[last]] if last else [members[0]]
        ended |= {member.id for member in done}
        assert settle(conn, runtime, done) == []
        page = admin.list_jobs(JobState.RUNNING, limit=7, after=page.after)
        seen += [job.id for job in page.jobs]
    assert len(seen) == len(set(seen))
    assert {member.id for member in members} - ended <= set(seen)


def test_a_transaction_that_commits_late_is_listed_and_one_that_rolls_back_is_not(
    conn: Conn, other: Conn, third: Conn, admin: Admin
) -> None:
    runtime = register(conn)
    other.execute("BEGIN")
    [late] = insert(other, 1)
    third.execute("BEGIN")
    insert(third, 2)
    ids = insert(conn, 3, 4)
    assert [member.id for member in claim(conn, runtime, limit=1).members] == ids[:1]
    assert listed(admin, JobState.AVAILABLE) == ids[1:]
    assert claim(conn, runtime).ids == ids[1:]
    other.execute("COMMIT")
    third.execute("ROLLBACK")
    assert listed(admin, JobState.AVAILABLE) == [late]
    assert admin.queue_counts()["q"][JobState.AVAILABLE] == Count(1, True)
    assert find(conn, late).state == JobState.AVAILABLE
    assert claim(conn, runtime).ids == [late]
    assert listed(admin, JobState.AVAILABLE) == []


def test_a_rare_kind_is_found_over_pages_that_end_early(
    conn: Conn, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: a page looks at so many jobs and no more; its ``after`` goes on where the look ended."""
    monkeypatch.setattr(listing, "MOST_LOOKED_AT", 20)
    monkeypatch.setattr(listing, "GROUP", 8)
    runtime = register(conn)
    rare = insert(conn, 0, kind="rare")
    for n in range(10):
        insert(conn, *range(10))
        if n == 5:
            rare += insert(conn, 0, kind="rare")
    rare.reverse()

    def check(wanted: JobState, **filters: Any) -> None:
        found = pages(admin, wanted, limit=5, kind="rare", **filters)
        assert [job.id for page in found for job in page] == rare
        assert len(found) > 3
        assert listed(admin, wanted, limit=5, **filters) == listed(admin, wanted)

    check(JobState.AVAILABLE, queue="q")
    members = [member for _ in range(11) for member in claim(conn, runtime, limit=10).members]
    check(JobState.RUNNING)
    settle(conn, runtime, members[:60])
    settle(conn, runtime, others=[Outcome(member, "completed") for member in members[60:]])
    check(JobState.COMPLETED, queue="q")


def test_all_states_come_one_after_another(conn: Conn, admin: Admin) -> None:
    """Guard: the cursor tells the state; pages go on across states, and begin none anew."""
    runtime = register(conn)
    expected = {JobState.WAITING_EXTERNAL: [], **{wanted: [] for wanted in JobState}}
    ends = ("failed", "cancelled", "completed")
    for outcome, delay in [("snoozed", 60.0), ("retried", 60.0), *((end, 0.0) for end in ends)]:
        ids = insert(conn, 1, 2, 3)
        settle(conn, runtime, others=[Outcome(m, outcome, delay) for m in claim(conn, runtime).members])
        expected[find(conn, ids[0]).state] = ids
    expected[JobState.RUNNING] = insert(conn, 1, 2)
    claim(conn, runtime)
    expected[JobState.AVAILABLE] = insert(conn, 1, 2, 3, 4)
    newest = [id_ for wanted in listing.ORDER for id_ in expected[wanted][::-1]]
    assert len(newest) == 21 and set(listing.ORDER) == set(JobState)
    by_end = {id_ for wanted in ends for id_ in expected[JobState(wanted)]}
    for limit in (1, 2, 5, 20, 21, 22):
        found = listed(admin, None, limit=limit)
        assert [id_ for id_ in found if id_ not in by_end] == [id_ for id_ in newest if id_ not in by_end]
        assert [find(conn, id_).state for id_ in found] == [find(conn, id_).state for id_ in newest]
        assert sorted(found) == sorted(newest)
        assert listed(admin, None, limit=limit, queue="other") == []
    # what changes its state meanwhile is shown as what it has become, or as both
    page = admin.list_jobs(limit=2)
    assert [job.state for job in page.jobs] == [JobState.RUNNING] * 2
    for job in page.jobs:
        assert cancel(conn, job.id, force=True) == ("cancelled", "cancelled")
    rest = admin.list_jobs(limit=1000, after=page.after).jobs
    assert {job.id for job in rest if job.state == JobState.CANCELLED} >= {job.id for job in page.jobs}


def test_jobs_with_a_tag_are_found_in_every_state(conn: Conn, admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: the tag is looked for in every source, and a page that finds none goes on."""
    runtime = register(conn)
    tagged: dict[JobState, list[int]] = {}
    odd = 'b"l,\\u%e'

    def add(n: int = 3) -> list[int]:
        ids = insert(conn, *range(n))
        conn.execute("UPDATE awa.jobs SET tags = %s WHERE id = %s", (["red", odd], ids[1]))
        conn.execute("UPDATE awa.jobs SET tags = '{redder}' WHERE id = %s", (ids[0],))
        return ids

    for outcome, delay in [("snoozed", 60.0), ("retried", 60.0), ("failed", 0.0), ("completed", 0.0)]:
        ids = add()
        settle(conn, runtime, others=[Outcome(m, outcome, delay) for m in claim(conn, runtime).members])
        tagged[find(conn, ids[1]).state] = [ids[1]]
    ids = add()
    claim(conn, runtime)
    tagged[JobState.RUNNING] = [ids[1]]
    tagged[JobState.AVAILABLE] = [add()[1]]
    every = [id_ for wanted in listing.ORDER for id_ in tagged.get(wanted, [])]
    monkeypatch.setattr(listing, "MOST_LOOKED_AT", 4)
    for tag in ("red", odd):
        assert listed(admin, None, tag=tag) == every
        for wanted in JobState:
            assert listed(admin, wanted, limit=1, tag=tag) == tagged.get(wanted, [])
    assert listed(admin, None, tag="re") == listed(admin, None, tag="green") == []
    assert listed(admin, None, tag="red", ids=every[2:]) == every[2:]


def test_a_thousand_ids_are_looked_for_together(conn: Conn, admin: Admin) -> None:
    """Guard: near ids are searched for at once; each is in one place, wherever its entry lies."""
    runtime = register(conn)
    ids = []
    for slot in range(4):
        turn_to(conn, slot)
        ids += insert(conn, *range(400))
        members = claim(conn, runtime, limit=300).members
        settle(conn, runtime, members[:150], [Outcome(m, "retried") for m in members[150:200]])
    wanted = [*ids[::2], 10**9, 2**63 - 1]
    states = Counter(job.state for page in pages(admin, None, limit=100, ids=wanted) for job in page)
    assert states == Counter(find(conn, id_).state for id_ in wanted[:-2])
    assert listed(admin, None, ids=[10**9]) == []


def test_what_was_retried_and_what_retention_has_deleted_is_listed_as_it_is(conn: Conn, admin: Admin) -> None:
    """Guard: the newest entry tells; an end for good in the ring is shown only with its row."""
    runtime = register(conn)
    back, deleted = insert(conn, 1, 2)
    settle(conn, runtime, others=[Outcome(m, "failed") for m in claim(conn, runtime).members])
    assert retry(conn, back) == ("retried", "available")
    conn.execute("DELETE FROM awa.ended_jobs WHERE id = %s", (deleted,))
    for wanted in (None, JobState.AVAILABLE):
        assert listed(admin, wanted) == listed(admin, wanted, ids=[back, deleted]) == [back]
    assert listed(admin, JobState.FAILED) == listed(admin, JobState.FAILED, ids=[back, deleted]) == []
    assert admin.queue_counts()["q"][JobState.AVAILABLE] == Count(1, True)


@pytest.mark.parametrize("make", [make_set_aside, make_waiting_for_key, make_waiting_for_order, make_handed_over])
def test_whoever_waits_for_a_key_or_a_kind_counts_as_available(conn: Conn, admin: Admin, make: Make) -> None:
    job, _ = make(conn, register(conn))
    assert listed(admin, JobState.AVAILABLE) == [job]
    assert admin.queue_counts()["q"][JobState.AVAILABLE] == Count(1, True)


def test_what_was_set_aside_follows_the_other_available_jobs(conn: Conn, admin: Admin) -> None:
    runtime = register(conn)
    aside = insert(conn, *range(5), kind="new")
    claim(conn, runtime, kinds=["old"])
    ids = insert(conn, *range(5))
    expected = ids[::-1] + aside[::-1]
    for limit in (1, 2, 3, 5, 9, 10, 11):
        assert listed(admin, JobState.AVAILABLE, limit=limit) == expected
    found = admin.list_jobs("available").jobs
    assert [job.waits_for for job in found] == [None] * 5 + ["kind"] * 5
    assert admin.queue_counts()["q"][JobState.AVAILABLE] == Count(10, True)


def test_failed_jobs_come_by_the_time_they_ended_to_the_microsecond(conn: Conn, admin: Admin) -> None:
    times = [
        "2026-01-01 00:00:00.000001+00",
        "2026-01-01 00:00:00.000002+00",
        "1970-01-01 00:00:00+00",
        "2900-01-01 00:00:00+00",
    ]
    for n, at in enumerate([*times, times[1], times[0]], 1):
        conn.execute(
            "INSERT INTO awa.ended_jobs (id, created_at, ended_at, priority, attempt, max_attempts, state, queue, kind,"
            " args) VALUES (%s, now(), %s, 2, 1, 1, 'failed', 'q', 'noop', '{}')",
            (n, at),
        )
    for limit in (1, 2, 100):
        assert listed(admin, JobState.FAILED, limit=limit) == [4, 5, 2, 6, 1, 3]


def test_an_empty_list_has_one_empty_page(admin: Admin) -> None:
    for wanted in JobState:
        assert admin.list_jobs(wanted) == JobPage([], None)
        assert admin.list_jobs(wanted, queue="q", kind="k") == JobPage([], None)
    assert admin.queue_counts() == {}
    assert admin.queue_counts("q") == {"q": {wanted: Count(0, True) for wanted in JobState}}


def test_another_schema_is_looked_at_alike(empty_database: str) -> None:
    schema = Schema("My jobs")
    with psycopg.connect(empty_database, autocommit=True) as conn:
        migrate(conn, schema)
        conn.execute("INSERT INTO \"My jobs\".jobs (queue, kind) VALUES ('q', 'noop')")
        assert jobs.get_job(conn, schema, 1).state == JobState.AVAILABLE
    admin = Admin(schema, lambda: psycopg.connect(empty_database, autocommit=True))
    assert {wanted: len(admin.list_jobs(wanted).jobs) for wanted in JobState}[JobState.AVAILABLE] == 1
    assert admin.kind_counts()["noop"][JobState.AVAILABLE] == Count(1, True)
    assert admin.get_kind("noop").oldest_at is not None
    assert admin.queue_counts()["q"][JobState.AVAILABLE] == Count(1, True)


def test_keys_and_expiry_are_told_of_every_job(conn: Conn, admin: Admin) -> None:
    """By its id and in lists, wherever it is; an expiry that no datetime holds is told as none."""
    at = datetime(2199, 1, 1, tzinfo=UTC)
    insert(conn, 1, 2, 3, key="k", order="o", expires_at=at)
    conn.execute("INSERT INTO awa.jobs (queue, kind, expires_at) VALUES ('q', 'noop', 'infinity')")
    claim(conn, register(conn), limit=2)
    found = sorted(
        (job for state in ("running", "available") for job in admin.list_jobs(state).jobs), key=lambda job: job.id
    )
    assert [(job.waits_for, job.concurrency_key, job.ordering_key, job.expires_at) for job in found] == [
        (None, "k", "o", at),
        ("order", "k", "o", at),
        (None, "k", "o", at),
        (None, None, None, None),
    ]
    assert [jobs.get_job(conn, Schema(), job.id) for job in found] == found
