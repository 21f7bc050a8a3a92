"""concurrency_key, ordering_key and expires_at in the rows, by every way in; what is replaced; what has expired."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from awa.job import JobState
from awa.storage import jobs
from awa.storage.expired import expire_waiting
from awa.storage.jobs import JobRow
from awa.worker.maintenance import expire as chore
from tests.storage.engine import AWA, Conn, Outcome, claim, promote, register, scalar, settle, state, transaction
from tests.storage.test_jobs import ODD, insert_copy, insert_many, insert_one, ways

SOON = timedelta(hours=1)
KEY = bytes(range(16))
COLUMNS = "concurrency_key, ordering_key, expires_at"


def row(n: int = 0, *, queue: str = "q", **options: Any) -> JobRow:
    return JobRow(queue, "noop", b'{"n":%d}' % n, 2, 25, **options)


def stored(conn: Conn) -> list[tuple[Any, ...]]:
    """The three columns of every job, wherever it is, by id."""
    return conn.execute(
        f"SELECT {COLUMNS} FROM (SELECT id, {COLUMNS} FROM awa.jobs UNION ALL"
        f" SELECT id, {COLUMNS} FROM awa.waiting_jobs) j ORDER BY id"
    ).fetchall()


def at(seconds: float = 0.0) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


OPTIONS: Sequence[dict[str, Any]] = (
    {"concurrency_key": "c"},
    {"ordering_key": "o"},
    {"expires_at": datetime(2099, 12, 31, 23, 59, 59, 999999, UTC)},
    {"concurrency_key": "c", "ordering_key": "o", "expires_at": datetime(1970, 1, 1, tzinfo=UTC)},
)


def wanted(options: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(options.get(name) for name in ("concurrency_key", "ordering_key", "expires_at"))


@ways
@pytest.mark.parametrize("options", OPTIONS)
def test_each_option_is_stored_and_its_neighbours_have_none(conn: Conn, way: Any, options: dict[str, Any]) -> None:
    way(conn, [row(1), row(2, **options), row(3, tags=("t",))])
    assert stored(conn) == [(None, None, None), wanted(options), (None, None, None)]


@pytest.mark.parametrize("way", [insert_one, insert_many])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "more",
    [
        {"delay": 60.0},
        {"unique": KEY, "on_conflict": "return"},
        {"unique": KEY + bytes([3]), "on_conflict": "return", "delay": 60.0},
        {"follow_ups": b'{"failed":[{"kind":"k"}]}'},
        {"timeout_ms": 5, "metadata": b"{}", "tags": ("t",)},
    ],
    ids=["delay", "unique", "unique with states", "follow-ups", "rare"],
)
def test_each_option_goes_with_the_others(conn: Conn, way: Any, options: dict[str, Any], more: dict[str, Any]) -> None:
    way(conn, [row(1, **options, **more), row(2)])
    assert stored(conn) == [wanted(options), (None, None, None)]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_job_that_runs_after_others_has_them(conn: Conn, options: dict[str, Any]) -> None:
    parent = jobs.insert_job(conn, AWA, row(), notify=True).id
    insert_one(conn, [row(1, parents=(parent,), **options)])
    assert stored(conn)[1] == wanted(options)


@ways
def test_odd_text_comes_back_exactly(conn: Conn, way: Any) -> None:
    texts = [text for text in ODD if text]
    way(conn, [row(concurrency_key=text, ordering_key=text * 2) for text in texts])
    assert [found[:2] for found in stored(conn)] == [(text, text * 2) for text in texts]


def test_a_job_keeps_them_through_waiting_and_retries(conn: Conn) -> None:
    runtime, expires_at = register(conn), at(3600)
    insert_one(conn, [row(concurrency_key="c", ordering_key="o", expires_at=expires_at, delay=0.001)])
    scalar(conn, "SELECT 1 FROM pg_sleep(0.01)")
    assert promote(conn) == 1
    [member] = claim(conn, runtime).members
    settle(conn, runtime, others=[Outcome(member, "retried", delay=60.0)])
    assert stored(conn)[-1] == ("c", "o", expires_at)
    assert scalar(conn, "SELECT ordering_key FROM awa.waiting_jobs") == "o"


# --- the SQL contract


def enqueue(conn: Conn, arguments: str, *params: Any) -> tuple[int, bool]:
    found = conn.execute(f"SELECT id, is_new FROM awa.enqueue_v2('noop', {arguments})", params).fetchone()
    assert found is not None
    return found[0], found[1]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_sql_contract_takes_them(conn: Conn, options: dict[str, Any]) -> None:
    arguments = ", ".join(f"p_{name} => %s" for name in options)
    for more in ("", ", p_delay => '1 min'", ", p_unique_key => decode(md5('x'), 'hex')"):
        enqueue(conn, arguments + more, *options.values())
    enqueue(conn, "'{}'")
    assert stored(conn) == [*[wanted(options)] * 3, (None, None, None)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("p_concurrency_key => ''", "p_concurrency_key has 1 to 200 characters, or is NULL .*, not 0"),
        ("p_ordering_key => repeat('x', 201)", "p_ordering_key has 1 to 200 characters, .*, not 201"),
        ("p_expires_at => 'infinity'", "p_expires_at is within the years 1970 to 9999, not infinity"),
        ("p_expires_at => '1969-01-01Z'", "p_expires_at is within the years"),
        ("p_run_at => '2030-01-02Z', p_expires_at => '2030-01-01Z'", "p_expires_at comes after p_run_at"),
        ("p_run_at => '2030-01-02Z', p_expires_at => '2030-01-02Z'", "p_expires_at comes after p_run_at"),
    ],
)
def test_the_sql_contract_refuses_what_cannot_be_meant(conn: Conn, arguments: str, words: str) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match=words):
        enqueue(conn, arguments)
    assert stored(conn) == []


def test_clients_of_before_go_on(conn: Conn) -> None:
    """Guard: the functions of before mean what they meant; a job that they replace has what they know."""
    [(first, is_new)] = conn.execute(
        "SELECT id, is_new FROM awa.enqueue_v1(p_kind => 'k', p_args => '{\"a\": 1}', p_delay => '1 h',"
        " p_tags => '{t}', p_unique_key => %s, p_notify => false)",
        (KEY,),
    ).fetchall()
    assert is_new
    conn.execute("UPDATE awa.waiting_jobs SET ordering_key = 'o', expires_at = '2099-01-01Z'")
    many = (
        "SELECT * FROM awa.enqueue_many_v1('{q,q}', '{1,2}', '{k,l}', ARRAY['{\"a\": 2}', '{}'], '{3,4}', '{NULL,5}',"
        " '{NULL,NULL}', '{NULL,NULL}', '{NULL,NULL}', '{60,NULL}', ARRAY[%s, NULL]::bytea[], '{replace,NULL}',"
        " '{NULL,NULL}', '{NULL,NULL}', '{NULL,NULL}', true)"
    )
    (n, job_id, is_new, problem), second = conn.execute(many, (KEY,)).fetchall()
    assert (n, job_id, is_new, problem) == (1, first, False, None)
    assert second[0] == 2 and second[2:] == (True, None)
    assert stored(conn) == [(None, None, None)] * 2
    assert scalar(conn, "SELECT args::text FROM awa.waiting_jobs WHERE id = %s", first) == '{"a": 2}'


def test_follow_ups_get_them_and_flaws_are_told(conn: Conn) -> None:
    runtime = register(conn)
    text = (
        b'{"completed":[{"kind":"k","concurrency_key":"c","ordering_key":"o","expires_at":"2099-01-01T00:00:00+00:00"},'
        b'{"kind":"k","ordering_key":"p","delay":60}],"failed":[{"kind":"k","ordering_key":""}]}'
    )
    insert_one(conn, [row(1, follow_ups=text), row(2, follow_ups=text)])
    done, failed = claim(conn, runtime).members
    settle(conn, runtime, [done], [Outcome(failed, "failed", error={"type": "E", "text": "t", "traceback": ""})])
    assert stored(conn)[2:] == [("c", "o", datetime(2099, 1, 1, tzinfo=UTC)), (None, "p", None)]
    told = jobs.get_job(conn, AWA, failed.id).error
    assert told is not None and "has an ordering_key of not 1 to 200 characters" in told["text"]


# --- replacing


def put(conn: Conn, n: int, *, notify: bool = True, **options: Any) -> int:
    """Insert the job of KEY, or replace it."""
    return int(jobs.insert_job(conn, AWA, row(n, unique=KEY, on_conflict="replace", **options), notify=notify).id)


def waiting(conn: Conn, job_id: int) -> tuple[Any, ...]:
    found = conn.execute(
        "SELECT waits_for, wait_key, state, queue, args->>'n' FROM awa.waiting_jobs WHERE id = %s", (job_id,)
    ).fetchone()
    assert found is not None
    return found


def test_a_replaced_job_has_the_new_ones(conn: Conn) -> None:
    job_id = put(conn, 1, delay=60.0, concurrency_key="c", ordering_key="o", expires_at=at(3600))
    later = at(7200)
    assert put(conn, 2, delay=60.0, concurrency_key="d", expires_at=later) == job_id
    assert stored(conn) == [("d", None, later)]
    assert jobs.insert_jobs(conn, AWA, [row(3, unique=KEY, on_conflict="replace", delay=60.0), row(4)], notify=True)[
        0
    ] == (job_id, False)
    assert stored(conn)[0] == (None, None, None)


@pytest.fixture
def behind(conn: Conn) -> tuple[int, int]:
    """A runtime, and the job of KEY, set aside for its order behind one that runs."""
    runtime = register(conn)
    insert_one(conn, [row(0, ordering_key="o")])
    assert claim(conn, runtime).numbers == [0]
    job_id = put(conn, 1, ordering_key="o")
    insert_one(conn, [row(2, ordering_key="o")])
    assert claim(conn, runtime).numbers == []
    assert waiting(conn, job_id) == ("order", "o", "available", "q", "1")
    return runtime, job_id


def test_one_that_waits_for_its_order_keeps_its_place(conn: Conn, behind: tuple[int, int]) -> None:
    _, job_id = behind
    assert put(conn, 7, ordering_key="o", concurrency_key="c") == job_id
    assert waiting(conn, job_id) == ("order", "o", "available", "q", "7")
    first = scalar(conn, "SELECT id FROM awa.waiting_jobs WHERE waits_for = 'order' ORDER BY seq LIMIT 1")
    assert first == job_id


@pytest.mark.parametrize("change", [{"ordering_key": "p"}, {"ordering_key": None}, {"queue": "r", "ordering_key": "o"}])
def test_with_another_order_it_waits_for_the_old_one_no_more(
    conn: Conn, behind: tuple[int, int], change: dict[str, Any]
) -> None:
    runtime, job_id = behind
    assert put(conn, 7, **change) == job_id
    queue = change.get("queue", "q")
    assert waiting(conn, job_id) == ("time", None, "scheduled", queue, "7")
    assert promote(conn) == 1
    assert claim(conn, runtime, queue=queue).numbers == [7]


def test_a_time_takes_it_out_of_the_order(conn: Conn, behind: tuple[int, int]) -> None:
    _, job_id = behind
    put(conn, 7, ordering_key="o", delay=60.0)
    assert waiting(conn, job_id)[:3] == ("time", None, "scheduled")


@pytest.mark.parametrize("notify", [True, False])
def test_a_retryable_job_that_leaves_its_order_lets_the_next_go(conn: Conn, notify: bool) -> None:
    """Guard: the grant that it keeps while it waits for its next attempt is given back."""
    runtime = register(conn)
    job_id = put(conn, 1, ordering_key="o")
    insert_one(conn, [row(2, ordering_key="o")])
    [member] = claim(conn, runtime).members
    assert member.id == job_id
    settle(conn, runtime, others=[Outcome(member, "retried", delay=60.0)])
    for _ in range(3):
        assert claim(conn, runtime).members == []
    put(conn, 7, notify=notify, ordering_key="p", delay=60.0)
    found = [number for _ in range(3) for number in claim(conn, runtime).numbers]
    assert found == [2]


def test_one_that_waits_for_a_full_key_stays_or_goes(conn: Conn) -> None:
    runtime = register(conn)
    conn.execute("INSERT INTO awa.queue_meta (queue, max_running_per_key) VALUES ('q', 1)")
    insert_one(conn, [row(0, concurrency_key="c")])
    assert claim(conn, runtime).numbers == [0]
    job_id = put(conn, 1, concurrency_key="c")
    assert claim(conn, runtime).numbers == []
    assert waiting(conn, job_id)[:2] == ("key", "c")
    put(conn, 2, concurrency_key="c")
    assert waiting(conn, job_id) == ("key", "c", "available", "q", "2")
    put(conn, 3, concurrency_key="c", ordering_key="o")
    assert waiting(conn, job_id)[:2] == ("time", None)
    promote(conn)
    assert claim(conn, runtime).numbers == []
    assert waiting(conn, job_id)[:2] == ("key", "c")
    put(conn, 4, concurrency_key="d")
    promote(conn)
    assert claim(conn, runtime).numbers == [4]


def test_one_that_waits_for_a_worker_that_knows_its_kind_stays_there(conn: Conn) -> None:
    runtime = register(conn)
    job_id = put(conn, 1, ordering_key="o")
    claim(conn, runtime, kinds=["other"])
    put(conn, 2, ordering_key="p")
    assert waiting(conn, job_id)[:2] == ("kind", "noop")
    assert claim(conn, runtime, kinds=["noop"]).numbers == [2]


# --- what has expired


def error_of(conn: Conn, job_id: int) -> str:
    info = jobs.get_job(conn, AWA, job_id)
    assert info.state == JobState.CANCELLED
    assert info.error is not None and info.error["type"] == "Expired"
    return str(info.error["text"])


Wait = Callable[[Conn, JobRow], int]


def for_time(conn: Conn, job: JobRow) -> int:
    return jobs.insert_job(conn, AWA, job._replace(delay=3600.0), notify=True).id


def for_parent(conn: Conn, job: JobRow) -> int:
    parent = jobs.insert_job(conn, AWA, row(9), notify=True).id
    return jobs.insert_job(conn, AWA, job._replace(parents=(parent,)), notify=True).id


def for_kind(conn: Conn, job: JobRow) -> int:
    job_id = jobs.insert_job(conn, AWA, job._replace(expires_at=None), notify=True).id
    claim(conn, register(conn), kinds=["other"])
    return job_id


def for_order(conn: Conn, job: JobRow) -> int:
    first = jobs.insert_job(conn, AWA, row(9, ordering_key="o"), notify=True).id
    job_id = jobs.insert_job(conn, AWA, job._replace(ordering_key="o", expires_at=None), notify=True).id
    runtime = register(conn)
    assert claim(conn, runtime).ids == [first]
    return job_id


def for_retry(conn: Conn, job: JobRow) -> int:
    runtime, job_id = register(conn), jobs.insert_job(conn, AWA, job._replace(expires_at=None), notify=True).id
    [member] = claim(conn, runtime).members
    settle(conn, runtime, others=[Outcome(member, "retried", delay=3600.0)])
    return job_id


@pytest.mark.parametrize("wait", [for_time, for_parent, for_kind, for_order, for_retry])
def test_whatever_a_job_waits_for_it_is_cancelled_with_what_follows(conn: Conn, wait: Wait) -> None:
    past = at(-5).replace(microsecond=0)
    job_id = wait(
        conn,
        row(
            1,
            expires_at=past,
            unique=KEY,
            on_conflict="return",
            follow_ups=b'{"cancelled":[{"kind":"after"}],"failed":[{"kind":"never"}]}',
        ),
    )
    if scalar(conn, "SELECT expires_at FROM awa.waiting_jobs WHERE id = %s", job_id) is None:
        conn.execute("UPDATE awa.waiting_jobs SET expires_at = %s WHERE id = %s", (past, job_id))
    assert expire_waiting(conn, AWA, limit=10) == 1
    assert error_of(conn, job_id) == f"it expired at {past:%Y-%m-%d %H:%M:%S}Z"
    assert conn.execute("SELECT kind FROM awa.jobs WHERE id > %s AND kind <> 'noop'", (job_id,)).fetchall() == [
        ("after",)
    ]
    assert scalar(conn, "SELECT count(*) FROM awa.job_uniques") == 0
    assert expire_waiting(conn, AWA, limit=10) == 0


def test_one_that_leaves_its_order_by_expiring_lets_the_next_go(conn: Conn) -> None:
    """Guard: awa.conclude() gives back what a retryable job keeps."""
    job_id = for_retry(conn, row(1, ordering_key="o"))
    runtime = register(conn)
    insert_one(conn, [row(2, ordering_key="o")])
    for _ in range(2):
        assert claim(conn, runtime).numbers == []
    conn.execute("UPDATE awa.waiting_jobs SET expires_at = '2020-01-01Z' WHERE id = %s", (job_id,))
    assert expire_waiting(conn, AWA, limit=10) == 1
    assert [number for _ in range(3) for number in claim(conn, runtime).numbers] == [2]


def test_what_has_not_expired_stays_and_a_pass_takes_the_longest_expired(conn: Conn) -> None:
    ages = {seconds: for_time(conn, row(1, expires_at=at(seconds))) for seconds in (-1, 3600, -3, -2)}
    for_time(conn, row(2))
    assert expire_waiting(conn, AWA, limit=2) == 2
    assert [state(conn, ages[seconds]) for seconds in (-3, -2, -1, 3600)] == ["cancelled"] * 2 + ["scheduled"] * 2
    assert expire_waiting(conn, AWA, limit=2) == 1
    assert expire_waiting(conn, AWA, limit=2) == 0


def test_rows_that_somebody_holds_are_left_for_another_time(conn: Conn, other: Conn) -> None:
    """Guard: SKIP LOCKED."""
    held, free = (for_time(conn, row(n, expires_at=at(-n))) for n in (5, 1))
    with transaction(other):
        other.execute("SELECT FROM awa.waiting_jobs WHERE id = %s FOR UPDATE", (held,))
        assert expire_waiting(conn, AWA, limit=1) == 1
        assert (state(conn, held), state(conn, free)) == ("scheduled", "cancelled")
    assert expire_waiting(conn, AWA, limit=1) == 1


def test_an_available_job_is_cancelled_by_the_claim_that_meets_it(conn: Conn) -> None:
    insert_copy(conn, [row(1, expires_at=at(-1)), row(2, expires_at=at(3600)), row(3, expires_at=at(-1))])
    first = scalar(conn, "SELECT min(id) FROM awa.jobs")
    assert expire_waiting(conn, AWA, limit=10) == 0
    assert claim(conn, register(conn)).numbers == [2]
    assert error_of(conn, first).startswith("it expired at ")


def test_the_chore_comes_at_once_while_there_is_more(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chore, "BATCH", 2)
    for n in range(3):
        for_time(conn, row(n, expires_at=at(-1)))
    expire = chore.Expire(AWA)
    assert expire.run(conn, 0.0) < chore.PAUSE
    assert expire.run(conn, 0.0) >= chore.PAUSE
    assert scalar(conn, "SELECT count(*) FROM awa.ended_jobs") == 3


def test_a_pass_reads_the_index_among_many_that_do_not_expire(conn: Conn) -> None:
    """Guard: the partial index; what waits for years is not read each second."""
    conn.execute(
        "INSERT INTO awa.waiting_jobs (run_at, queue, kind, expires_at) SELECT '2099-01-01Z', 'q', 'k',"
        " CASE WHEN n % 2 = 0 THEN timestamptz '2100-01-01Z' END FROM generate_series(1, 20000) n"
    )
    plan = conn.execute(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT awa.expire_waiting_v1(100)", prepare=False
    ).fetchone()
    assert plan is not None
    read = plan[0][0]["Plan"]["Shared Hit Blocks"] + plan[0][0]["Plan"]["Shared Read Blocks"]
    assert read < 2000  # the table and its index have some thousand pages; the first call also reads the catalogue
    again = conn.execute("EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT awa.expire_waiting_v1(100)").fetchone()
    assert again is not None
    assert again[0][0]["Plan"]["Shared Hit Blocks"] < 20
