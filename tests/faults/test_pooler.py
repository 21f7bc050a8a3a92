"""R31: a pooler in transaction mode, with two connections to the server for all clients."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import awa
from awa._core import Handler, Outcomes
from awa.embedded import Server
from awa.errors import ConfigError, DatabaseNotFound
from awa.storage import backends
from awa.storage import pooler as poolers
from awa.storage.connection import connect
from awa.storage.line import CLAIM, Line, Wanted, statements
from awa.storage.schema import Schema
from awa.worker import known
from tests.fixtures.db import short_directory, wait_until
from tests.fixtures.jobs import (
    StartWorker,
    claimed_twice,
    count,
    count_available,
    count_running,
    ended,
    in_state,
    worker_processes,
)
from tests.fixtures.pooler import SERVER_CONNECTIONS, Pooler, left_behind, running_pooler
from tests.fixtures.proxy import Proxy
from tests.worker.test_wakeups import BELLS

Conn = psycopg.Connection[Any]

PATIENCE = 60.0
"""Seconds that a wait may take; all processes share two connections of a server that others use too."""

COMPLETED = "SELECT coalesce(sum(cardinality(idx)), 0) FROM awa.completions"


def wait_for_bells(conn: Conn, *queues: str) -> None:
    """Wait until somebody sleeps at the bell of each of *queues*."""
    wait_until(lambda: count(conn, BELLS, list(queues)) == len(queues), PATIENCE)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a process of its own as far as poolers go."""
    monkeypatch.setattr(poolers, "_declared", {})
    monkeypatch.setattr(poolers, "_has_told", False)


@pytest.fixture
def client(pooled: str) -> Iterator[awa.Client]:
    """A client that reaches its database through the pooler."""
    client = awa.Client(pooled)
    yield client
    client.close()


@pytest.fixture
def old_snapshots(conn: Conn) -> None:
    """Sessions of the database are REPEATABLE READ, unless somebody says otherwise."""
    conn.execute(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = %L',"
        " current_database(), 'repeatable read'); END $$"
    )


APP = """
    import os, time
    import awa

    client = awa.Client()

    def note(conn, n, how):
        conn.execute("INSERT INTO ran (n, how, job) VALUES (%s, %s, %s)", (n, how, awa.current_job().id))

    @client.task()
    def plain(n: int) -> None:
        with client.connection() as conn:
            note(conn, n, "plain")

    @client.task()
    def completes(n: int) -> None:
        with client.connection() as conn, conn.transaction():
            note(conn, n, "completes")
            awa.current_job().complete(conn)
            client.insert(plain.bind(n + 100_000), conn=conn)

    @client.task(retry=awa.fixed(0.1), max_attempts=3)
    def fails_once(n: int) -> None:
        if awa.current_job().attempt == 1:
            with client.connection() as conn:
                conn.execute("BEGIN")           # left open by a handler that fails
                conn.execute("SELECT 1 / 0")
        with client.connection() as conn:
            note(conn, n, "fails_once")

    @client.task()
    def snoozes(n: int) -> object:
        with client.connection() as conn:
            if conn.execute("SELECT count(*) FROM ran WHERE n = %s", (n,)).fetchone()[0] == 0:
                note(conn, n, "snoozes")
                return awa.Snooze(0.2)

    @client.task()
    def holds(n: int) -> None:
        with client.connection() as conn:
            note(conn, n, "holds")
        while not awa.current_job().cancelled:
            time.sleep(0.02)
        raise RuntimeError("it was asked to end")

    @client.task()
    def sleeps(n: int) -> None:
        with client.connection() as conn:
            note(conn, n, f"sleeps {os.getpid()}")
        if awa.current_job().attempt == 1:
            time.sleep(120)
"""


def test_everything_works_through_two_server_connections(
    tmp_path: Path, pooled: str, conn: Conn, client: awa.Client, old_snapshots: None
) -> None:
    """Three worker processes, four producers and an operator; a worker is killed; nothing stays in a session.

    Guards: without the isolation that each transaction names every claim is refused, since the database's default is
    another; with prepared statements, bells or LISTEN through the pooler (``AWA_POOLER=off``) the first claim in the
    other backend fails, or what is left behind is found at the end. Tried.
    """
    conn.execute("CREATE TABLE ran (n integer, how text, job bigint)")
    with worker_processes(tmp_path, pooled) as processes:
        processes.module(APP)
        fast = ["app", "--threads", "3", "--heartbeat", "0.5", "--stale-after", "3", "--poll-interval", "0.2"]
        workers = [processes.start(*fast) for _ in range(3)]
        inserted = _produce(client, pooled)
        held = client.insert({"n": 1}, kind="holds")
        wait_until(lambda: count(conn, "SELECT count(*) FROM ran WHERE how = 'holds'") == 1, PATIENCE)
        assert client.cancel(held.id, reason="no longer wanted").happened == "requested"
        stuck = client.insert({"n": 2}, kind="sleeps")
        wait_until(lambda: count(conn, "SELECT count(*) FROM ran WHERE how LIKE 'sleeps%%'") == 1, PATIENCE)
        [pid] = [int(how.split()[1]) for (how,) in conn.execute("SELECT how FROM ran WHERE how LIKE 'sleeps%'")]
        next(worker for worker in workers if worker.pid == pid).signal(signal.SIGKILL)

        later = client.insert({"n": 3}, kind="plain", delay=3600)
        moved = client.insert({"n": 4}, kind="plain", queue="elsewhere")
        assert client.cancel(later.id).happened == "cancelled"
        assert client.admin.move(moved.id, "default").happened == "moved"
        assert len(client.admin.list_jobs("cancelled").jobs) >= 1
        assert client.admin.queue_counts("default")["default"]

        assert in_state(client, held, "cancelled", timeout=PATIENCE)
        assert ended(client, moved, timeout=PATIENCE).state == "completed"
        rescued = ended(client, stuck, timeout=PATIENCE)
        assert (rescued.state, rescued.attempt) == ("completed", 2)
        wait_until(lambda: count(conn, "SELECT count(DISTINCT n) FROM ran") >= inserted + 3, PATIENCE)
        wait_until(lambda: count_running(conn) + count_available(conn) == 0, PATIENCE)
        assert count(conn, "SELECT count(*) FROM awa.waiting_jobs") == 0
        assert claimed_twice(conn) == []
        for (job,) in conn.execute("SELECT job FROM ran GROUP BY job HAVING count(*) > 1").fetchall():
            assert "rescued" in [
                attempt["outcome"] for attempt in client.get(job).history
            ]  # of the one that was killed
        alive = [worker for worker in workers if worker.pid != pid]
        for worker in alive:
            worker.signal(signal.SIGTERM)
        assert [worker.wait(30) for worker in alive] == [0, 0], [worker.stderr for worker in alive]
        for worker in workers:
            assert worker.stderr.count("AWA_LISTEN_URL") == 1, worker.stderr
    client.close()
    assert left_behind(pooled) == []
    states = conn.execute(
        "SELECT state FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    ).fetchall()
    assert len(states) <= 2
    assert set(states) == {("idle",)}


def _produce(client: awa.Client, pooled: str) -> int:
    """Insert by every way at once, each from a connection of its own; returns how many numbers will be noted."""

    def single() -> None:
        for n in range(1000, 1100):
            client.insert({"n": n}, kind="plain")

    def many() -> None:
        for first in range(2000, 2200, 50):
            client.insert_many([awa.NewJob({"n": n}, kind="snoozes", delay=0.1) for n in range(first, first + 20)])
            client.insert_many([awa.NewJob({"n": n}, kind="completes") for n in range(first + 20, first + 50)])

    def copy() -> None:
        for first in (3000, 3100):
            client.insert_many_copy(awa.NewJob({"n": n}, kind="plain") for n in range(first, first + 100))

    def lent() -> None:
        with psycopg.connect(pooled, prepare_threshold=None) as own:
            for n in range(4000, 4050):
                client.insert({"n": n}, kind="fails_once" if n % 5 == 0 else "plain", conn=own)
                if n % 10 == 9:
                    own.commit()
            client.insert({"n": 5000}, kind="plain", conn=own)
            client.insert_many_copy([awa.NewJob({"n": 5001}, kind="plain")], conn=own)
            own.rollback()

    failed: list[BaseException] = []

    def run(produce: Any) -> None:
        try:
            produce()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(produce,)) for produce in (single, many, copy, lent)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert failed == []
    return 100 + 4 * 20 + 4 * 30 * 2 + 200 + 50


def test_migrations_and_the_command_line_work_through_it(pooler: Pooler, empty_database: str) -> None:
    """Guard: the migration lock and settings belong to the transaction; a session's would be left behind."""
    pooled = pooler.address(empty_database)
    environ = os.environ | {"AWA_DATABASE_URL": pooled, "AWA_EMBEDDED": "0"}

    def awa_command(*words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "awa", *words],
            env=environ,
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def check(*commands: subprocess.Popen[str]) -> str:
        said = [(command.communicate(timeout=PATIENCE)[0], command.returncode) for command in commands]
        assert all(code == 0 for _, code in said), said
        return "".join(text for text, _ in said)

    assert check(*(awa_command("migrate") for _ in range(3))).count("applied 0001") == 1
    check(awa_command("migrate", "--status"), awa_command("storage", "status"))
    client = awa.Client(pooled)
    client.insert({}, kind="work")
    client.close()
    check(awa_command("storage", "check"), awa_command("storage", "rebase", "--yes"))
    assert "all is well" in check(awa_command("storage", "check"))
    demo = awa_command("demo")
    assert "pooler" in demo.communicate(timeout=PATIENCE)[0]
    assert demo.returncode == 1
    assert left_behind(pooled) == []


def test_a_pooler_is_noticed_and_nothing_else_is_taken_for_one(
    database: str, pooled: str, proxied: str, conn: Conn, old_snapshots: None
) -> None:
    """Guard: the backend's number. A way that passes all bytes on, such as a tunnel, leaves the session ours."""
    for address in (database, proxied):
        with connect(address, name="test") as direct:
            assert not poolers.is_pooled(direct)
            assert direct.execute("SHOW transaction_isolation").fetchone() == ("read committed",)
    for _ in range(2):
        with connect(pooled, name="test") as through:
            assert poolers.is_pooled(through)
            assert through.execute("SHOW default_transaction_isolation").fetchone() == ("repeatable read",)
            with through.transaction():
                assert through.execute("SHOW transaction_isolation").fetchone() == ("read committed",)
    poolers.declare(database, is_pooler=True)
    with connect(database, name="test") as declared:
        assert poolers.is_pooled(declared)
    assert left_behind(pooled) == []


def test_one_warning_in_a_process_says_what_to_do(
    client: awa.Client, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """Guard: it is told once, though two workers open a connection each, and one of them a second one."""

    @client.task()
    def work() -> None: ...

    for _ in range(2):
        start_worker(client, poll_interval=0.2)
    assert ended(client, client.insert(work.bind()), timeout=20).state == "completed"
    told = [record for record in caplog.records if "AWA_LISTEN_URL" in record.getMessage()]
    assert [record.levelno for record in told] == [logging.WARNING]
    assert "every 0.2 s" in told[0].getMessage()


def test_without_wake_ups_by_choice_nothing_is_told(
    pooled: str, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    client = awa.Client(pooled, notify=False)

    @client.task()
    def work() -> None: ...

    start_worker(client, poll_interval=0.2)
    assert ended(client, client.insert(work.bind()), timeout=20).state == "completed"
    assert "AWA_LISTEN_URL" not in caplog.text
    client.close()


def test_with_a_direct_address_idle_workers_are_woken(
    client: awa.Client,
    database: str,
    pooled: str,
    conn: Conn,
    start_worker: StartWorker,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guard: without ``listen_url`` nobody ever holds the bell, and half a minute passes between polls."""

    @client.task()
    def work() -> None: ...

    start_worker(client, poll_interval=30, listen_url=database)
    wait_for_bells(conn, "default", "")
    for delay in (None, 0.2, None):
        assert ended(client, client.insert(work.bind(), delay=delay), timeout=20).state == "completed"
        wait_for_bells(conn, "default")
    assert "AWA_LISTEN_URL" not in caplog.text
    assert left_behind(pooled) == []


def test_a_direct_address_of_something_else_is_refused(
    client: awa.Client, database: str, empty_database: str, own_server: Server, start_worker: StartWorker
) -> None:
    """Guard: claims would be made in one database, and signs of life given in the other."""

    @client.task()
    def work() -> None: ...

    for elsewhere in (empty_database, own_server.url("postgres")):
        with pytest.raises(ConfigError, match="listen_url leads to another database"):
            client.worker(listen_url=elsewhere).start()
    with pytest.raises(DatabaseNotFound):
        client.worker(listen_url=make_conninfo(database, port=1)).start()
    with pytest.raises(ConfigError, match="no PostgreSQL connection string") as caught:
        client.worker(listen_url="mysql://u:SECRET@h/d")
    assert "SECRET" not in str(caught.value)
    assert "SECRET" not in repr(client.worker(listen_url="postgresql://u:SECRET@h/d")._settings)


def test_a_pooler_of_sessions_can_be_declared(
    server: Server, database: str, conn: Conn, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """Guard: ``pooler=off``; its backend has another number than it says too."""
    with running_pooler(server, "session") as sessions:
        address = sessions.address(database)
        with connect(address, name="test") as looked_at:
            assert poolers.is_pooled(looked_at)
        client = awa.Client(database, pooler="off")

        @client.task()
        def work() -> None: ...

        # one connection of a worker each: there are two
        poolers.declare_as(address, "off")
        worker = start_worker(client, poll_interval=30, listen_url=address)
        wait_for_bells(conn, "default")
        assert ended(client, client.insert(work.bind()), timeout=20).state == "completed"
        assert "AWA_LISTEN_URL" not in caplog.text
        worker.stop()
        client.close()


def register(conn: Conn) -> int:
    """The number of a runtime without a process."""
    return count(
        conn,
        """INSERT INTO awa.runtime_instances (uuid, hostname, pid, version, heartbeat_ms)
           VALUES (gen_random_uuid(), 'h', 1, 'v', 1000) RETURNING id""",
    )


def claim_elsewhere(conn: Conn, other: Conn) -> None:
    """Have another client claim, as a worker does, in a transaction that stays open."""
    text = CLAIM
    for place, value in (
        ("$1", "'elsewhere'"),
        ("$2", str(register(conn))),
        ("$3", "NULL"),
        ("$4", "1"),
        ("$5", "false"),
        ("$6", "60"),
    ):
        text = text.replace(place, value)
    other.execute(text.encode())


def test_one_that_is_not_noticed_is_found_out(
    pooled: str, conn: Conn, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """What happens when the looking was wrong, as ``off`` says here: prepared statements get lost.

    Guard: the SQLSTATEs of a statement that is not there; without them claims fail for ever. And then the backend that
    the worker saw is not its own; without forgetting it, the other's transaction is ended: both tried.
    """
    client = awa.Client(pooled, pooler="off")

    @client.task()
    def work() -> None: ...

    start_worker(client, poll_interval=0.2)
    held: set[int] = set()
    while len(held) < SERVER_CONNECTIONS:  # each of them once, and the worker has the other
        with psycopg.connect(pooled, prepare_threshold=None) as other:
            held.add(count(other, "SELECT pg_backend_pid()"))
            claim_elsewhere(conn, other)
            before = count(conn, COMPLETED)
            conn.execute("INSERT INTO awa.jobs (kind) VALUES ('work')")
            wait_until(lambda before=before: count(conn, COMPLETED) > before, PATIENCE)
    assert "a transaction pooler is in between" in caplog.text
    client.close()


def test_a_lost_connection_ends_nobody_elses_backend(
    database: str, pooler: Pooler, pooled: str, conn: Conn, start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker whose claim is answered to nobody ends the backend that it had, when it has one of its own.

    Guard: through a pooler it has none. With the number that it saw at first (``backend_of``) it ends the transaction
    of another client, which has got that backend since: tried.
    """
    with short_directory() as directory:
        proxy = Proxy(directory, pooler.socket)
        client = awa.Client(make_conninfo(pooled, host=str(directory)))

        @client.task()
        def work() -> None: ...

        try:
            worker = start_worker(client, threads=1, poll_interval=0.1, heartbeat=0.5)
            with ExitStack() as stack:
                others = [stack.enter_context(psycopg.connect(pooled, prepare_threshold=None)) for _ in range(4)]
                pids = set()
                for turn, other in enumerate(others):
                    pids.add(count(other, "SELECT pg_backend_pid()"))  # beside it one server connection is left
                    claim_elsewhere(conn, other)
                    loss = proxy.lose("answer", b"claim_v2")
                    job = client.insert(work.bind())
                    loss.wait()
                    wait_until(lambda turn=turn: count(conn, COMPLETED) > turn, PATIENCE)
                    assert other.execute("SELECT 2").fetchone() == (2,)
                    other.commit()
                assert client.get(job.id).state == "completed"
            assert len(pids) == SERVER_CONNECTIONS  # so the worker's first one was among them
            worker.stop()
        finally:
            client.close()
            proxy.close()
    assert left_behind(pooled) == []


def test_signs_of_life_get_on_while_their_own_worker_claims(
    database: str, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through a pooler nobody can tell whether it is this worker or a lost connection of it that claims just now.

    So a moment is looked for at which nobody does. Guard: it is looked for more than once; else the number up to which
    all claims are known may stand still for as long as there is much to do, and ever more is read for it.
    """
    monkeypatch.setattr(known, "PAUSE", 0.5)
    runtime = register(conn)
    conn.execute("INSERT INTO awa.jobs (kind) VALUES ('work')")
    line, outcomes = Line(database, Schema(), {"work": Handler("work", print, print, is_typed=False)}), Outcomes()
    outcomes.opened(line.exchange(runtime, [], [Wanted("default", 1)]).claims[0].attempts)
    looking = known.KnownClaims(schema=Schema(), outcomes=outcomes, line=lambda: None, is_certain=lambda: True)
    with psycopg.connect(database) as claiming:
        claiming.execute(
            "SELECT pg_advisory_xact_lock_shared(hashtextextended('awa.runtime:' || %s, 0))", [str(runtime)]
        )
        over = threading.Timer(0.2, claiming.commit)
        over.start()
        assert looking.look(conn, runtime) == outcomes.newest_claim > 0
        over.join()
    line.close()


def test_only_a_backend_that_claimed_last_is_ended(database: str, conn: Conn) -> None:
    """The number of a backend may be wrong where a pooler was not noticed.

    Guard: the last statement is looked at by the statement that ends it; without that the other's session is ended.
    """
    line = Line(database, Schema(), {})
    with psycopg.connect(database) as other:
        other.execute("SELECT 1")
        somebody_elses, own = backends.backend_of(other), line.backend
        assert somebody_elses is not None
        assert own is not None
        assert backends.end_backend(conn, somebody_elses, last=statements(Schema()))
        assert other.execute("SELECT 2").fetchone() == (2,)
    assert backends.end_backend(conn, own, last=statements(Schema()))
    with pytest.raises(psycopg.OperationalError):  # it has not claimed yet, only prepared to
        line.exchange(1, [], [Wanted("default", 1)])
    line.close()


def test_a_frozen_holder_that_let_go_is_not_ended(database: str, conn: Conn) -> None:
    """Whoever looks who holds a lock, and then ends him, must not meet the next client of that backend.

    Guard: the lock is looked at again by the statement that ends its holder. By number and start alone it ends the
    session, whatever it does by now: tried.
    """
    schema, lock = Schema(), "queue:default"
    with psycopg.connect(database) as other:
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('awa.queue:default', 0))")
        [holder] = backends.list_holders(conn, schema, lock)
        assert holder.backend is not None
        other.commit()
        other.execute("SELECT 1")  # it is the next client's, and waits for it
        assert backends.end_holder(conn, schema, holder.backend, lock)
        assert other.execute("SELECT 2").fetchone() == (2,)
        other.execute("SELECT pg_advisory_xact_lock(hashtextextended('awa.queue:default', 0))")
        assert backends.end_holder(conn, schema, holder.backend, lock)
        gone = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = %s)"
        wait_until(lambda: conn.execute(gone, [other.info.backend_pid]).fetchone() == (True,))
        with pytest.raises(psycopg.errors.AdminShutdown):
            other.execute("SELECT 3")


def test_a_claim_that_fails_leaves_no_transaction_open(pooled: str, conn: Conn) -> None:
    """Guard: what sets the isolation and the claim are one transaction up to their Sync; with a BEGIN it stays."""
    runtime = register(conn)
    line = Line(pooled, Schema(), {})
    conn.execute("ALTER TABLE awa.claims RENAME TO elsewhere")
    try:
        assert line.is_pooled
        assert line.backend is None
        for _ in range(3):
            reply = line.exchange(runtime, [], [Wanted("default", 1), Wanted("other", 1)])
            assert [type(claimed.error) for claimed in reply.claims] == [psycopg.errors.UndefinedTable] * 2
            assert left_behind(pooled) == []
    finally:
        line.close()


def test_what_a_pooler_refuses_at_the_start_is_explained(pooled: str) -> None:
    with pytest.raises(DatabaseNotFound, match="ignore_startup_parameters"):
        connect(make_conninfo(pooled, options="-c statement_timeout=1000"), name="test")
    assert conninfo_to_dict(pooled)["port"] == "6432"
