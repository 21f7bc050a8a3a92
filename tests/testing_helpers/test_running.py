"""run_all and run_one on a real database: claimed, run and recorded by a worker's statements, in the calling thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import awa
from awa.testing import advance, assert_inserted, client_fixture, connected, inline, run_all, run_one
from awa.testing import running as running_module
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, count_available, count_running

Conn = psycopg.Connection[Any]

OTHERS = """
    SELECT application_name FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
"""


def test_it_runs_here_and_leaves_nothing(client: awa.Client, conn: Conn) -> None:
    """Guards the thread that handlers run in, the goodbye of the runtime, and that connections and threads end."""
    threads: list[threading.Thread] = []
    args: list[str] = []

    @client.task(queue="elsewhere")
    def work(text: str) -> None:
        threads.append(threading.current_thread())
        args.append(text)

    client.insert_many([work.bind("x" * 200_000), work.bind("y")])  # the first is fetched after its claim
    before = set(threading.enumerate())
    ran = run_all(client)
    assert [(one.kind, one.queue, one.attempt, one.state, one.error) for one in ran] == [
        ("work", "elsewhere", 1, "completed", None)
    ] * 2
    assert threads == [threading.current_thread()] * 2 and [len(text) for text in args] == [200_000, 1]
    assert set(threading.enumerate()) == before
    assert count(conn, "SELECT count(*) FROM awa.runtime_instances WHERE ended_at IS NULL") == 0
    assert count(conn, "SELECT count(*) FROM awa.gone_runtimes") == 1
    wait_until(lambda: set(conn.execute(OTHERS).fetchall()) <= {("awa client",)}, timeout=10)
    assert run_all(client) == []
    assert count_running(conn) == count_available(conn) == 0


def test_a_failure_is_recorded_and_leaves_the_run(client: awa.Client) -> None:
    """Guards ``raises``: the exception itself, after it is recorded, and the rest of the jobs left as they were."""

    class Odd(Exception):
        pass

    raised: list[Odd] = []

    @client.task()
    def work(n: int) -> None:
        if n == 1:
            raised.append(Odd(n))
            raise raised[-1]
        if n == 2:
            raise awa.TerminalError("meant")

    jobs = client.insert_many([work.bind(n) for n in range(4)])
    with pytest.raises(Odd) as caught:
        run_all(client)
    assert caught.value is raised[0]
    assert [job.get().state for job in jobs] == ["completed", "retryable", "available", "available"]
    assert [(one.state, type(one.error)) for one in run_all(client)] == [
        ("failed", awa.TerminalError),
        ("completed", type(None)),
    ]
    assert run_one(client, with_scheduled=True, raises=False).error is raised[1]


@pytest.mark.parametrize("is_inline", [True, False], ids=["inline", "database"])
def test_interrupts_are_not_a_jobs_failure_alone(client: awa.Client, is_inline: bool) -> None:
    """Guards that Ctrl-C, and pytest's own exceptions, end the test, though a worker would swallow them."""

    @client.task()
    def work() -> None:
        raise KeyboardInterrupt

    def story() -> None:
        job = client.insert(work.bind())
        with pytest.raises(KeyboardInterrupt):
            run_all(client, raises=False)
        assert job.get().state == "retryable"

    if is_inline:
        with inline(client, run=False):
            story()
    else:
        story()


def test_what_never_ends_is_told(client: awa.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the bound of a run in which every job inserts the next."""

    @client.task()
    def again() -> None:
        client.insert(again.bind())

    monkeypatch.setattr(running_module, "MOST", 5)
    with inline(client, run=False) as book:
        client.insert(again.bind())
        with pytest.raises(awa.AwaError, match="kind 'again'"):
            run_all(client)
        assert len(book.jobs) == 6
        assert len(run_all(client, limit=3)) == 3


def test_what_cannot_be_meant_is_refused(client: awa.Client, database: str) -> None:
    """Guards the words of errors: each names what was given."""

    @client.task()
    def work() -> None: ...

    other = awa.Client(database)

    @other.task()
    def elsewhere() -> None: ...

    helpers: list[Callable[[Any], Any]] = [run_all, run_one, client_fixture, lambda it: advance(it, hours=1)]
    helpers += [lambda it: inline(it).__enter__(), lambda it: connected(it, database).__enter__()]
    for helper in helpers:
        with pytest.raises(awa.ConfigError, match=r"must be an awa\.Client, got a str"):
            helper("app:client")
    with pytest.raises(awa.UnknownKind, match="'nobody'"):
        run_all(client, kind="nobody")
    with pytest.raises(awa.UnknownKind, match="elsewhere"):
        run_all(client, kind=elsewhere)
    for wrong in (0, 10_001, True, "5"):
        with pytest.raises(awa.ValidationError, match="limit"):
            run_all(client, limit=wrong)  # type: ignore[arg-type]
    with pytest.raises(awa.ValidationError, match="queue"):
        run_all(client, queue="")
    for step in ({}, {"hours": -1}):
        with pytest.raises(awa.ConfigError, match="hours=2"):
            advance(client, **step)  # type: ignore[arg-type]
    client.insert(work.bind(), delay=60, queue="q")
    with pytest.raises(
        AssertionError, match=r"(?s)no job of kind 'work' is available.*1 work \{\} scheduled queue='q'"
    ):
        run_one(client, kind=work)
    other.close()


def test_a_schema_that_is_not_there_is_told(empty_database: str) -> None:
    """Guards that a forgotten migration is named before anything is registered."""
    client = awa.Client(empty_database)

    @client.task()
    def work() -> None: ...

    for call in (lambda: run_all(client), lambda: advance(client, hours=1), lambda: assert_inserted(client, work)):
        with pytest.raises(awa.SchemaNotMigrated, match="awa migrate"):
            call()
    client.close()


def test_another_schema(empty_database: str) -> None:
    """Guards that every statement of the helpers is written for the client's schema."""
    from awa.storage.migrate import migrate
    from awa.storage.schema import Schema

    with psycopg.connect(empty_database, autocommit=True) as conn:
        migrate(conn, Schema("my jobs"))
        client = awa.Client(empty_database, schema="my jobs")

        @client.task()
        def work(n: int) -> None: ...

        client.insert(work.bind(1), delay=60)
        assert advance(client, minutes=1) == 1
        client.insert(work.bind(2), delay=60)
        assert [one.args["n"] for one in run_all(client, with_scheduled=True)] == [1, 2]
        assert_inserted(client, work.bind(1))
        assert_inserted(conn, "work", count=2, schema="my jobs")
        with pytest.raises(awa.SchemaNotMigrated):
            assert_inserted(conn, "work")
        client.close()


def test_beside_a_worker_each_job_runs_once(client: awa.Client, conn: Conn, start_worker: StartWorker) -> None:
    """Guards the claims: they are those of a worker, so the two never share a job."""
    seen: list[int] = []

    @client.task()
    def work(n: int) -> None:
        seen.append(n)

    start_worker(client, threads=2)
    client.insert_many([work.bind(n) for n in range(200)])
    while count_available(conn) or count_running(conn):
        run_all(client, limit=20)
    assert sorted(seen) == list(range(200))


def test_a_completion_in_a_transaction_that_stays_open_is_told(
    client: awa.Client, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the wait for such a transaction: in one thread it would never end."""
    monkeypatch.setattr(running_module, "PATIENCE", 0.5)
    with psycopg.connect(database) as mine:

        @client.task()
        def work() -> None:
            awa.current_job().complete(mine)

        job = client.insert(work.bind())
        with pytest.raises(awa.AwaError, match=f"job {job.id} .*must end before the handler returns"):
            run_all(client)
        mine.commit()
    assert job.get().state == "completed"
