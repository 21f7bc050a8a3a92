"""Inserting jobs in each way, and finding them again in each state."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from psycopg.rows import dict_row

from awa.errors import JobNotFound
from awa.job import JobState
from awa.storage import jobs
from awa.storage.jobs import JobInfo, JobRow
from tests.storage.engine import (
    AWA,
    Conn,
    Outcome,
    cancel,
    claim,
    complete,
    fall_silent,
    fence,
    insert,
    promote,
    register,
    rescue,
    scalar,
    settle,
    transaction,
)

ODD = (
    "plain",
    "",
    " ",
    "a\tb",
    "line\nbreak\r\n",
    "back\\slash",
    "\\N",
    "\\.",
    "\\t",
    'double "quoted"',
    "single 'quoted'",
    "{a,b}",
    "a,b",
    "NULL",
    "null",
    "%s %(x)s {bell} $1 :x",
    "awa.jobs",
    "ěšč ß 漢字 🐘",
    "\u2028\u2029\x7f\x01\x1f",
    "\ud7ff\ue000\U0010ffff",
)


def row(
    args: Any = None,
    *,
    queue: str = "q",
    kind: str = "noop",
    priority: int = 2,
    max_attempts: int = 25,
    timeout_ms: int | None = None,
    tags: Sequence[str] | None = None,
    metadata: Any = None,
    run_at: datetime | None = None,
    delay: float | None = None,
) -> JobRow:
    return JobRow(
        queue=queue,
        kind=kind,
        args=json.dumps({} if args is None else args).encode(),
        priority=priority,
        max_attempts=max_attempts,
        timeout_ms=timeout_ms,
        tags=None if tags is None else tuple(tags),
        metadata=None if metadata is None else json.dumps(metadata).encode(),
        run_at=run_at,
        delay=delay,
    )


def insert_one(conn: Conn, rows: Sequence[JobRow]) -> None:
    for each in rows:
        jobs.insert_job(conn, AWA, each, notify=True)


def insert_many(conn: Conn, rows: Sequence[JobRow]) -> None:
    jobs.insert_jobs(conn, AWA, rows, notify=True)


def insert_copy(conn: Conn, rows: Sequence[JobRow]) -> None:
    assert jobs.copy_jobs(conn, AWA, rows, notify=True) == len(rows)


ways = pytest.mark.parametrize("way", [insert_one, insert_many, insert_copy])


def stored(conn: Conn) -> list[JobInfo]:
    """Every job, by id."""
    ids = conn.execute("SELECT id FROM awa.jobs UNION SELECT id FROM awa.waiting_jobs ORDER BY id").fetchall()
    return [jobs.get_job(conn, AWA, id_) for (id_,) in ids]


@ways
def test_odd_characters_come_back_exactly(conn: Conn, way: Any) -> None:
    rows = [
        row({"text": text, text: [text]}, queue=f"q{text}", kind=f"k{text}", tags=[text, "x"], metadata={text: text})
        for text in ODD
    ]
    way(conn, rows)
    found = stored(conn)
    assert len(found) == len(ODD)
    for job, text in zip(found, ODD, strict=True):
        assert (job.queue, job.kind) == (f"q{text}", f"k{text}")
        assert job.args == {"text": text, text: [text]}
        assert job.tags == [text, "x"]
        assert job.metadata == {text: text}


@ways
def test_the_text_of_args_is_stored_as_it_is(conn: Conn, way: Any) -> None:
    """Args are json and not jsonb: order, spacing, repeated keys and long numbers survive."""
    text = b'{"b":1, "a" :  12345678901234567890.10,"b":"\\u0041\\\\","c":"\xc3\xa9"}'
    way(conn, [JobRow(queue="q", kind="noop", args=text, priority=2, max_attempts=25)])
    assert scalar(conn, "SELECT args::text FROM awa.jobs").encode() == text
    [member] = claim(conn, register(conn)).members
    assert (member.args or "").encode() == text


@ways
def test_every_column_is_what_was_asked_for(conn: Conn, way: Any) -> None:
    way(conn, [row({"n": 1}, queue="a", kind="k", priority=1, max_attempts=3, timeout_ms=1500), row(priority=4)])
    with conn.cursor(row_factory=dict_row) as cursor:
        first, second = cursor.execute("SELECT * FROM awa.jobs ORDER BY id").fetchall()
    assert first["id"] == first["entry_id"]
    names = ("queue", "kind", "priority", "lane", "max_attempts", "timeout_ms", "attempt", "slot", "tags", "metadata")
    assert [first[name] for name in names] == ["a", "k", 1, 3, 3, 1500, 1, 0, None, None]
    assert [second[name] for name in names] == ["q", "noop", 4, 9, 25, None, 1, 0, None, None]
    assert first["created_at"] is None and first["available_at"] is not None
    assert claim(conn, register(conn), queue="a").members[0].max_attempts == 3


@ways
def test_no_tags_and_empty_tags_are_kept_apart_in_the_table_and_alike_outside(conn: Conn, way: Any) -> None:
    way(conn, [row(tags=[]), row()])
    assert [job.tags for job in stored(conn)] == [[], []]
    assert conn.execute("SELECT tags FROM awa.jobs ORDER BY id").fetchall() == [([],), (None,)]


@ways
def test_jobs_belong_to_the_callers_transaction(conn: Conn, other: Conn, way: Any) -> None:
    with transaction(conn):
        way(conn, [row(), row()])
        assert scalar(other, "SELECT count(*) FROM awa.jobs") == 0
        conn.execute("ROLLBACK")
    assert scalar(conn, "SELECT count(*) FROM awa.jobs") == 0


@pytest.mark.parametrize("size", [1, 2, 500, 1000, 1001])
def test_ids_come_in_the_order_of_the_rows(conn: Conn, size: int) -> None:
    rows = [row({"n": n}, queue="ab"[n % 2]) for n in range(size)]
    ids = [one.id for one in jobs.insert_jobs(conn, AWA, rows, notify=True)]
    assert ids == sorted(ids)
    found = dict(conn.execute("SELECT id, (args->>'n')::integer FROM awa.jobs").fetchall())
    assert [found[id_] for id_ in ids] == list(range(size))


def test_ids_come_in_the_order_of_the_rows_when_some_are_scheduled(conn: Conn) -> None:
    """Guard: ids are drawn before the rows part ways."""
    rows = [row({"n": n}, delay=60.0 if n % 3 == 0 else None, tags=["t"] if n % 2 else None) for n in range(100)]
    ids = [one.id for one in jobs.insert_jobs(conn, AWA, rows, notify=True)]
    found = [jobs.get_job(conn, AWA, id_) for id_ in ids]
    assert [job.args["n"] for job in found] == list(range(100))
    assert [job.state for job in found] == [
        JobState.SCHEDULED if n % 3 == 0 else JobState.AVAILABLE for n in range(100)
    ]
    assert [job.tags for job in found] == [["t"] if n % 2 else [] for n in range(100)]
    assert claim(conn, register(conn)).ids == [id_ for n, id_ in enumerate(ids) if n % 3]


@pytest.mark.parametrize("size", [0, 1, 499, 500, 501, 1000])
def test_copy_writes_all_rows_of_any_iterable_in_order(conn: Conn, size: int) -> None:
    """Guard: the last, smaller block of lines."""
    assert jobs.copy_jobs(conn, AWA, (row({"n": n}) for n in range(size)), notify=True) == size
    found = conn.execute("SELECT (args->>'n')::integer FROM awa.jobs ORDER BY id").fetchall()
    assert [n for (n,) in found] == list(range(size))


def test_no_rows_send_nothing(conn: Conn) -> None:
    assert jobs.insert_jobs(conn, AWA, [], notify=True) == []


# Delays


@pytest.mark.parametrize("single", [True, False])
def test_a_delay_counts_from_the_databases_now(conn: Conn, single: bool) -> None:
    before = scalar(conn, "SELECT clock_timestamp()")
    if single:
        id_, _ = jobs.insert_job(conn, AWA, row(delay=90.0), notify=True)
    else:
        id_, _ = jobs.insert_jobs(conn, AWA, [row(delay=90.0), row()], notify=True)[0]
    after = scalar(conn, "SELECT clock_timestamp()")
    job = jobs.get_job(conn, AWA, id_)
    assert (job.state, job.waits_for) == (JobState.SCHEDULED, "time")
    assert job.run_at is not None
    assert before <= job.run_at - timedelta(seconds=90.0) <= after


def test_a_run_at_in_the_future_waits_and_one_in_the_past_is_available_now(conn: Conn) -> None:
    runtime = register(conn)
    future = datetime.now(UTC) + timedelta(days=400)
    past = datetime(1970, 1, 2, tzinfo=UTC)
    rows = [
        row({"n": 1}, run_at=future),
        row({"n": 2}, run_at=past),
        row({"n": 3}, run_at=None),
        row({"n": 4}, delay=0),
    ]
    ids = [one.id for one in jobs.insert_jobs(conn, AWA, rows, notify=True)]
    ids += [jobs.insert_job(conn, AWA, each, notify=True).id for each in rows]
    found = [jobs.get_job(conn, AWA, id_) for id_ in ids]
    assert [job.state for job in found] == [JobState.SCHEDULED, *[JobState.AVAILABLE] * 3] * 2
    assert [job.run_at for job in found] == [future, None, None, None] * 2
    assert claim(conn, runtime).ids == [ids[n] for n in (1, 2, 3, 5, 6, 7)]
    assert promote(conn) == 0


def test_a_run_at_in_another_time_zone_is_the_same_instant(conn: Conn) -> None:
    instant = datetime(2099, 7, 1, 12, 30, 15, 123456, tzinfo=timezone(timedelta(hours=-7, minutes=-30)))
    conn.execute("SET timezone = 'Asia/Kathmandu'")
    conn.execute("SET datestyle = 'SQL, DMY'")
    id_, _ = jobs.insert_job(conn, AWA, row(run_at=instant), notify=True)
    conn.execute("RESET datestyle")
    assert jobs.get_job(conn, AWA, id_).run_at == instant


def test_a_scheduled_job_keeps_all_it_was_given(conn: Conn) -> None:
    given = row({"n": 1}, kind="k", priority=3, max_attempts=4, timeout_ms=9, tags=["t"], metadata=[1], delay=60.0)
    id_, _ = jobs.insert_job(conn, AWA, given, notify=True)
    conn.execute("UPDATE awa.waiting_jobs SET run_at = clock_timestamp()")
    assert promote(conn) == 1
    job = jobs.get_job(conn, AWA, id_)
    assert (job.state, job.kind, job.priority, job.max_attempts) == (JobState.AVAILABLE, "k", 3, 4)
    assert (job.args, job.tags, job.metadata) == ({"n": 1}, ["t"], [1])
    assert scalar(conn, "SELECT timeout_ms FROM awa.jobs") == 9


# What the caller's connection is like


@ways
def test_the_callers_row_factory_and_settings_do_not_matter(conn: Conn, way: Any) -> None:
    conn.row_factory = dict_row
    conn.execute("SET search_path = pg_catalog; SET standard_conforming_strings = on; SET timezone = 'Asia/Kathmandu'")
    way(conn, [row({"n": 1}, tags=["a\\b"]), row({"n": 2}, tags=["c"])])
    ids = [each["id"] for each in conn.execute("SELECT id FROM awa.jobs ORDER BY id").fetchall()]
    assert [jobs.get_job(conn, AWA, id_).tags for id_ in ids] == [["a\\b"], ["c"]]


@ways
def test_inserts_work_in_pipelines_of_statements_at_every_isolation_level(conn: Conn, way: Any) -> None:
    for isolation in ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"):
        with transaction(conn, isolation):
            way(conn, [row(), row()])
            way(conn, [row(), row()])
            conn.execute("COMMIT")
    assert scalar(conn, "SELECT count(*) FROM awa.jobs") == 12


# Finding a job again


def test_an_unknown_id_is_not_found(conn: Conn) -> None:
    for id_ in (0, 1, -1, 2**62):
        with pytest.raises(JobNotFound) as caught:
            jobs.get_job(conn, AWA, id_)
        assert caught.value.job_id == id_


def test_a_job_is_found_in_every_state(conn: Conn) -> None:
    """One job goes through all states; another one beside it does not disturb."""
    runtime = register(conn)
    [id_] = insert(conn, 1, max_attempts=3)
    insert(conn, 2, queue="beside")
    created_at = jobs.get_job(conn, AWA, id_).created_at

    def check(state: JobState, attempt: int, **other: Any) -> None:
        job = jobs.get_job(conn, AWA, id_)
        assert (job.id, job.queue, job.kind, job.args) == (id_, "q", "noop", {"n": 1})
        assert (job.state, job.attempt, job.max_attempts) == (state, attempt, 3)
        assert job.created_at == created_at
        assert (job.run_at is not None) == (state in (JobState.SCHEDULED, JobState.RETRYABLE))
        assert (job.ended_at is not None) == (state in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED))
        assert {name: getattr(job, name) for name in other} == other

    check(JobState.AVAILABLE, 1, waits_for=None, history=[])
    claim(conn, runtime, kinds=["other"])
    check(JobState.AVAILABLE, 1, waits_for="kind")
    [member] = claim(conn, runtime, kinds=["noop"]).members
    check(JobState.RUNNING, 1, waits_for=None)
    settle(conn, runtime, others=[Outcome(member, "snoozed", 60.0)])
    check(JobState.SCHEDULED, 1, waits_for="time")
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    promote(conn)
    check(JobState.AVAILABLE, 1)
    [member] = claim(conn, runtime).members
    settle(conn, runtime, others=[Outcome(member, "retried", 60.0, {"type": "E", "text": "t"})])
    check(JobState.RETRYABLE, 2, waits_for="time")
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now()")
    promote(conn)
    [member] = claim(conn, runtime).members
    check(JobState.RUNNING, 2)
    fall_silent(conn, runtime)
    fence(conn, runtime)
    rescue(conn, runtime)
    check(JobState.AVAILABLE, 3)
    runtime = register(conn)
    [member] = claim(conn, runtime).members
    settle(conn, runtime, [member])
    check(JobState.COMPLETED, 3, waits_for=None)
    assert [item["outcome"] for item in jobs.get_job(conn, AWA, id_).history] == ["retried", "rescued"]


@pytest.mark.parametrize("outcome", [JobState.FAILED, JobState.CANCELLED])
def test_a_job_that_ended_badly_is_found(conn: Conn, outcome: JobState) -> None:
    runtime = register(conn)
    [id_] = insert(conn, 1)
    [member] = claim(conn, runtime).members
    settle(conn, runtime, others=[Outcome(member, outcome.value, 0.0, {"type": "E", "text": "why"})])
    job = jobs.get_job(conn, AWA, id_)
    assert (job.state, job.attempt) == (outcome, 1)
    assert job.ended_at is not None
    assert [(item["outcome"], item["text"]) for item in job.history] == [(outcome.value, "why")]


def test_a_job_that_its_handler_completed_is_found(conn: Conn, other: Conn) -> None:
    runtime = register(conn)
    [id_] = insert(conn, 1)
    [member] = claim(conn, runtime).members
    with transaction(other):
        complete(other, member)
        assert jobs.get_job(conn, AWA, id_).state == JobState.RUNNING
        other.execute("COMMIT")
    assert jobs.get_job(conn, AWA, id_).state == JobState.COMPLETED


def test_a_job_that_was_ended_before_any_claim_is_found(conn: Conn) -> None:
    [id_] = insert(conn, 1)
    cancel(conn, id_)
    job = jobs.get_job(conn, AWA, id_)
    assert job.state == JobState.CANCELLED
    assert job.ended_at is not None


def test_a_job_is_found_among_many_in_every_segment(conn: Conn) -> None:
    runtime = register(conn)
    ids = []
    for slot in range(8):
        conn.execute("SELECT setval('awa.ring_seq', %s)", (slot,))
        ids += insert(conn, *range(300))
    members = claim(conn, runtime, limit=10_000).members
    settle(conn, runtime, members[::2])
    for n in range(0, 2400, 199):
        assert jobs.get_job(conn, AWA, ids[n]).state == (JobState.COMPLETED if n % 2 == 0 else JobState.RUNNING)
