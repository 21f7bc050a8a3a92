"""One odd job harms no other: rows that anybody wrote with plain SQL, and handlers that leave anything behind.

Rows that no worker could handle are refused where they are written (see migrations, *contain*); whatever else is odd
about a row, its args, its history or its error stays with its job: others of its batch run, are recorded, are listed.
"""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest

import awa
from awa.storage.check import check_storage
from awa.storage.rows import EARLIEST, LATEST
from tests.fixtures.jobs import StartWorker, count, count_running, ended, in_state
from tests.storage import engine

Conn = psycopg.Connection[Any]

LONG_KIND = "SELECT string_agg(md5(n::text), '') FROM generate_series(1, 150) n"  # 4,800 bytes, hardly compressible
DEEP = '{"n": ' + "[" * 5000 + "]" * 5000 + "}"
DIGITS = '{"n": ' + "7" * 5000 + "}"


# --- rows of plain SQL


def test_a_kind_longer_than_any_name_is_set_aside_and_the_queue_goes_on(conn: Conn) -> None:
    """Guard: the trigger cut_wait_key. Without it every claim fails: the kind does not fit an index of waiting_jobs."""
    runtime = engine.register(conn)
    conn.execute(f"INSERT INTO awa.jobs (queue, kind) VALUES ('q', ({LONG_KIND}))")
    engine.insert(conn, 1, 2)
    assert engine.claim(conn, runtime, kinds=["noop"]).numbers == [1, 2]
    aside = conn.execute("SELECT kind = (" + LONG_KIND + "), length(wait_key) FROM awa.waiting_jobs").fetchall()
    assert aside == [(True, 201)]
    # nor does the longest name that begins alike take it
    longest = engine.scalar(conn, f"SELECT left(({LONG_KIND}), 200)")
    assert engine.claim(conn, runtime, kinds=["noop", longest]).members == []


def test_a_row_that_no_worker_could_handle_is_refused(conn: Conn) -> None:
    """Guard: the constraints of jobs and waiting_jobs. Without them such a job is lost, or fails what others need:
    each claim that meets a history which cannot be read in an express lane, or the promotion of all that are due."""
    refused = [("priority", value, "priority_is_1_to_4") for value in (0, 5, 20_000)]
    refused += [("history", value, "history_is_readable") for value in ("{}", '"x"')]
    for table, when in (("jobs", "available_at"), ("waiting_jobs", "run_at")):
        statement = f"INSERT INTO awa.{table} (kind, {when}, %s) VALUES ('noop', now(), %%s)"
        for column, value, constraint in refused:
            with pytest.raises(psycopg.errors.CheckViolation) as caught:
                conn.execute(statement % column, [value])
            assert caught.value.diag.constraint_name == f"{table}_{constraint}"
        for text in (r"\u0000", r"\ud800"):
            with pytest.raises(psycopg.errors.DataError):
                conn.execute(statement % "history", [f'[{{"outcome": "rescued", "text": "{text}"}}]'])


def test_a_due_row_in_a_queue_of_endless_name_is_refused_and_promotion_goes_on(conn: Conn) -> None:
    """Guard: waiting_jobs_queue_is_short. Without it no due job is promoted: the name does not fit an index of jobs."""
    queue = engine.scalar(conn, LONG_KIND)
    with pytest.raises(psycopg.errors.CheckViolation):
        conn.execute("INSERT INTO awa.waiting_jobs (run_at, kind, queue) VALUES (now(), 'noop', %s)", [queue])
    conn.execute("INSERT INTO awa.waiting_jobs (run_at, kind, queue) VALUES (now(), 'noop', 'q')")
    assert engine.promote(conn) == 1


ODD_HISTORIES = [
    '[5, "text", null, [], {}]',
    '[{"outcome": "retried", "error": ' + "[" * 3000 + "]" * 3000 + "}]",
    '[{"outcome": "retried", "attempt": ' + "7" * 5000 + "}]",
    '[{"outcome": 5}]',
    "[" + ", ".join(['{"outcome": "retried", "text": "x"}'] * 300) + "]",
]


def test_attempts_with_odd_histories_end_and_the_others_of_their_flush_are_recorded(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    """Guard: add_history answers whatever it is given. Without it such an outcome is refused for ever: the job stays
    running, and whoever rescues it later fails likewise."""

    @client.task(retry=awa.fixed(0))
    def work(fails: bool) -> None:
        if fails and awa.current_job().attempt < 4:
            raise ValueError("again")

    @client.task(retry=awa.fixed(0))
    def fail() -> None:
        raise awa.TerminalError("no")

    rows = []
    for history in [None, *ODD_HISTORIES]:
        rows += [("work", '{"fails": true}', history), ("fail", "{}", history), ("work", '{"fails": false}', None)]
    with conn.transaction():
        conn.cursor().executemany(
            "INSERT INTO awa.jobs (kind, args, attempt, max_attempts, history) VALUES (%s, %s, 2, 25, %s)", rows
        )
    ids = [row[0] for row in conn.execute("SELECT id FROM awa.jobs ORDER BY entry_id")]
    start_worker(client, threads=2)
    infos = [ended(client, awa.Inserted(job_id)) for job_id in ids]
    assert [info.state for info in infos] == ["completed", "failed", "completed"] * (1 + len(ODD_HISTORIES))
    assert [info.attempt for info in infos] == [4, 2, 2] * (1 + len(ODD_HISTORIES))
    for info in infos[1::3]:
        assert info.error is not None and info.error["text"] == "no"
    last = conn.execute("SELECT history->-1->>'outcome', history->-1->>'text' FROM awa.ended_jobs").fetchall()
    assert last == [("failed", "no")] * (1 + len(ODD_HISTORIES))
    assert count_running(conn) == 0
    assert check_storage(conn, engine.AWA).is_sound


ODD_ERRORS = [r'{"text": "\u0000"}', r'{"text": "\ud800"}', '"x"', "[]", "5", "{}", None]

SETTLE = """
    SELECT claim_id, idx
      FROM awa.settle_v1(%s, %s, '{}', '{}', '{}', '{}', '{}', '{}', '{}', %s::bigint[], %s::smallint[], %s::integer[],
                         %s::smallint[], %s::text[], '{0,0,0}', '{1,1,1}', %s::text[])
"""


def test_an_error_that_is_no_text_is_told_as_such(conn: Conn) -> None:
    """Guard: as above; a client in another language sends its errors itself. Those of its flush are recorded too."""
    runtime, other = engine.register(conn), engine.register(conn)
    outcomes = ["retried", "failed", "cancelled"]
    for number, error in enumerate(ODD_ERRORS):
        queue = f"q{number}"
        engine.insert(conn, 1, 2, 3, 4, queue=queue)
        *odd, good = engine.claim(conn, runtime, queue=queue).members
        quoted = [[getattr(member, name) for member in odd] for name in ("claim_id", "slot", "nonce", "idx")]
        assert conn.execute(SETTLE, [runtime, 1000 + number, *quoted, outcomes, [error] * 3]).fetchall() == []
        assert engine.settle(conn, runtime, [good]) == []
        states = [engine.state(conn, member.id) for member in (*odd, good)]
        assert states == ["available", "failed", "cancelled", "completed"]
        # it can be claimed, and taken back, and claimed again: each looks into the history
        assert engine.claim(conn, runtime, queue=queue).ids == [odd[0].id]
    histories = conn.execute("SELECT DISTINCT state, history->-1->>'outcome' FROM awa.ended_jobs ORDER BY 1").fetchall()
    assert histories == [("cancelled", "cancelled"), ("failed", "failed")]
    engine.fall_silent(conn, runtime)
    assert engine.fence(conn, runtime)
    assert engine.rescue(conn, runtime) == (len(ODD_ERRORS), len(ODD_ERRORS), 0)
    assert [len(engine.claim(conn, other, queue=f"q{number}").ids) for number in range(len(ODD_ERRORS))] == [1] * 7


def test_a_job_whose_metadata_cannot_be_read_keeps_no_other_from_its_deadline(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    """Guard: Watch.limit. Without it the look at what runs fails for as long as this job runs: nobody's time is up."""
    begun, go_on = threading.Semaphore(0), threading.Event()

    @client.task(max_attempts=1)
    def hold() -> None:
        begun.release()
        assert go_on.wait(30)

    @client.task(max_attempts=1, timeout=0.3)
    def late() -> None:
        threading.Event().wait(0.01)
        while not go_on.wait(0.01):
            pass

    @client.task(max_attempts=1)
    def look() -> None:
        _ = awa.current_job().metadata

    with conn.transaction():
        for kind, metadata in (("hold", DEEP), ("hold", DIGITS), ("look", DEEP), ("late", None)):
            conn.execute("INSERT INTO awa.jobs (kind, metadata, max_attempts) VALUES (%s, %s, 1)", [kind, metadata])
    ids = [awa.Inserted(row[0]) for row in conn.execute("SELECT id FROM awa.jobs ORDER BY entry_id")]
    start_worker(client, threads=4)
    for _ in range(2):
        assert begun.acquire(timeout=10)
    assert ended(client, ids[2]).error["type"].endswith("JSONDecodeError")  # type: ignore[index]
    overdue = ended(client, ids[3])
    assert (overdue.state, overdue.error["type"]) == ("failed", "awa.errors.DeadlineExceeded")  # type: ignore[index]
    assert client.get(ids[0].id).state == "running"
    go_on.set()
    assert ended(client, ids[0]).state == ended(client, ids[1]).state == "completed"


def test_rows_that_python_cannot_hold_are_shown_and_hide_no_others(client: awa.Client, conn: Conn) -> None:
    """Guard: read_anything. Without it a page of the list fails with each of these, and none of it can be looked at."""
    good = client.insert({"n": 1}, kind="k")
    later = client.insert({"n": 2}, kind="k", delay=100)
    odd = {}
    for name, args, at in (
        ("deep", DEEP, "2020-01-01"),
        ("digits", DIGITS, "2020-01-01"),
        ("nul", r'{"n": "\u0000"}', "2020-01-01"),
        ("never", "{}", "infinity"),
        ("always", "{}", "-infinity"),
        ("far", "{}", "20000-01-01"),
        ("long ago", "{}", "4000-01-01 BC"),
    ):
        odd[name] = engine.scalar(
            conn,
            "INSERT INTO awa.jobs (kind, args, metadata, available_at) VALUES ('k', %s, %s, %s) RETURNING id",
            args,
            args,
            at,
        )
        conn.execute(
            "INSERT INTO awa.waiting_jobs (kind, args, run_at, created_at) VALUES ('k', %s, %s, %s)", [args, at, at]
        )
    page = client.admin.list_jobs("available")
    assert {job.id for job in page.jobs} == {good.id, *odd.values()}
    shown = {job.id: job for job in page.jobs}
    assert shown[odd["deep"]].args == shown[odd["deep"]].metadata == DEEP
    assert shown[odd["digits"]].args == DIGITS
    assert shown[odd["nul"]].args == {"n": "\0"}
    assert [shown[odd[name]].created_at for name in ("never", "always", "far", "long ago")] == [
        LATEST, EARLIEST, LATEST, EARLIEST,
    ]  # fmt: skip
    waiting = client.admin.list_jobs("scheduled").jobs
    assert len(waiting) == 8
    assert later.id in {job.id for job in waiting}
    for job in (*page.jobs, *waiting):
        assert client.get(job.id).state == job.state
    counts = client.admin.queue_counts()["default"]
    assert (counts[awa.JobState.AVAILABLE].value, counts[awa.JobState.SCHEDULED].value) == (8, 8)
    assert count(conn, "SELECT awa.promote_v1('-infinity', 1000)") == 5


# --- what handlers leave behind


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NoText(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class NoTraceback(Exception):
    @property
    def __traceback__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no traceback")


class NoNotes(Exception):
    @property
    def __notes__(self) -> Any:
        raise RuntimeError("no notes")


def circle() -> BaseException:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first


def chain() -> BaseException:
    last: BaseException = ValueError("first")
    for number in range(20_000):
        following = ValueError(f"number {number}")
        following.__cause__ = last
        last = following
    return last


MAKERS = {
    "mute": lambda: Mute("x"),
    "no text": lambda: NoText("x"),
    "ten megabytes": lambda: ValueError("ä" * 10_000_000),
    "unstorable": lambda: ValueError("a\0b\ud800c"),
    "no traceback": lambda: NoTraceback("x"),
    "no notes": lambda: NoNotes("x"),
    "circle": circle,
    "chain": chain,
    "group": lambda: ExceptionGroup("g\0", [Mute("x"), ExceptionGroup("h", [ValueError("\udfff")] * 50)]),
    "nameless": lambda: type("E\0" * 300, (Exception,), {"__module__": "m\ud800"})("x"),
    "key": lambda: KeyError("\0"),
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff" * 1_000_000, 0, 1, "bad\0"),
    "exit": lambda: SystemExit("\ud800"),
}


def test_whatever_a_handler_raises_is_recorded_and_the_others_of_its_batch_complete(
    client: awa.Client, start_worker: StartWorker, conn: Conn, caplog: pytest.LogCaptureFixture
) -> None:
    """Guard: failure.describe, and the split of a flush that the database refuses. All of these come in one batch."""

    @client.task(max_attempts=1)
    def work(what: str) -> None:
        if what:
            raise MAKERS[what]()

    items = [work.bind(what) for name in MAKERS for what in (name, "")]
    jobs = client.insert_many(items)
    worker = start_worker(client, threads=3)
    infos = [ended(client, job, timeout=20) for job in jobs]
    assert [info.state for info in infos] == ["failed", "completed"] * len(MAKERS)
    assert {info.attempt for info in infos} == {1}
    for info in infos[::2]:
        assert info.error is not None
        assert info.error["type"]
        assert len(info.error["text"]) <= 4_000
        assert len(info.error["traceback"]) <= 16_000
    assert count(conn, "SELECT count(*) FROM awa.ended_jobs WHERE history::text::jsonb IS NOT NULL") == len(MAKERS)
    assert count(conn, "SELECT count(DISTINCT runtime) FROM awa.claims WHERE nonce <> 0") == 1
    assert count_running(conn) == 0
    assert "recording" not in caplog.text
    worker.stop()
    assert worker.running == []


def test_args_that_cannot_be_stored_or_read_harm_no_others(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    """Guard: args are checked before any SQL, and decoded one by one after the claim."""

    @client.task(max_attempts=1)
    def work(n: int) -> None: ...

    for bad in ({"n": "\0"}, {"n": "\ud800"}, {"n": 2**70}, {"n": float("nan")}, {"\0": 1}):
        with pytest.raises(awa.ValidationError) as caught:
            client.insert_many([awa.NewJob({"n": 1}, kind="work"), awa.NewJob(bad, kind="work")])
        assert caught.value.path.startswith("[1].args") or "args" in caught.value.path
    assert count(conn, "SELECT count(*) FROM awa.jobs") == 0
    texts = ["{}", "[]", "null", '"x"', DEEP, DIGITS, '{"n": 1, "n": "two"}', '{"n": 1e400}', r'{"n": 1, "\u0000": 2}']
    with conn.transaction():
        for text in texts:
            for args in (text, '{"n": 1}'):
                conn.execute("INSERT INTO awa.jobs (kind, args, max_attempts) VALUES ('work', %s, 1)", [args])
    ids = [awa.Inserted(row[0]) for row in conn.execute("SELECT id FROM awa.jobs ORDER BY entry_id")]
    start_worker(client, threads=2)
    infos = [ended(client, job) for job in ids]
    assert [info.state for info in infos] == ["failed", "completed"] * len(texts)
    assert {info.attempt for info in infos} == {1}
    for info in infos[::2]:
        assert info.error is not None and info.error["text"]
    assert in_state(client, client.insert(work.bind(2)), "completed").attempt == 1
