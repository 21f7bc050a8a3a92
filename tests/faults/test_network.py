"""A network that goes wrong: whatever it does to whichever connection, it is noticed in bounded time, and work goes on.

Each of the faults leaves the server's side and the client's side with a different belief. What is in doubt is asked of
the database afterwards, on a new connection; see tests/worker/test_doubt.py for the single races.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import awa
from awa.errors import DatabaseNotFound
from awa.storage import line, pool
from awa.storage.connection import connect
from awa.worker import heartbeat as heartbeats
from awa.worker.maintenance import loop
from tests.faults.test_outage import APP
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, WorkerProcesses, claimed_twice, count, count_running, ended
from tests.fixtures.wire import FAULTS, Fault, Wire

Conn = psycopg.Connection[Any]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second instead of a minute, so that the tests are short. Without any bound they hang: tried, each."""
    monkeypatch.setattr(line, "REPLY_TIMEOUT", 1.0)
    monkeypatch.setattr(pool, "ANSWER_WITHIN", 1.0)
    monkeypatch.setattr(loop, "connect_trusted", partial(loop.connect_trusted, answer_within=1.0))


class Tally:
    """How often each job ran."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.runs: dict[int, int] = {}

    def note(self) -> None:
        job = awa.current_job()
        with self._lock:
            self.runs[job.id] = self.runs.get(job.id, 0) + 1


@pytest.fixture
def tally() -> Tally:
    return Tally()


@pytest.fixture
def remote(wire: Wire, tally: Tally) -> Any:
    """A client that goes over the wire, with a task that counts its runs."""
    client = awa.Client(make_conninfo(wire.address, connect_timeout=2))

    @client.task()
    def work() -> None:
        tally.note()

    yield client
    client.close()


def settled(conn: Conn, number: int) -> bool:
    return count(
        conn, "SELECT coalesce(sum(cardinality(idx)), 0) FROM awa.completions"
    ) == number and not count_running(conn)


@pytest.mark.parametrize("name", ["worker", "heartbeat", "maintenance"])
def test_each_connection_of_a_worker_is_replaced_whatever_becomes_of_it(
    name: str,
    wire: Wire,
    remote: awa.Client,
    client: awa.Client,
    conn: Conn,
    start_worker: StartWorker,
    tally: Tally,
    impatient: None,
) -> None:
    """Guard: every wait for an answer has an end: line.py's own, and OwnConnection's. TCP sees nothing wrong, since
    what is swallowed was acknowledged."""
    worker = start_worker(remote, threads=2, heartbeat=0.5, stale_after=20)
    runtime = worker.runtime
    jobs = 0
    for fault in FAULTS:
        wait_until(lambda: [link for link in wire.links(f"awa {name}") if link.fault is None], timeout=20)
        began = time.monotonic()
        broken = wire.break_off(fault, f"awa {name}")
        client.insert_many([awa.NewJob({}, kind="work") for _ in range(10)])
        client.insert({}, kind="work", delay=0.1)
        jobs += 11
        wait_until(lambda began=began: [x for x in wire.links(f"awa {name}") if x.accepted_at > began], timeout=20)
        wait_until(lambda jobs=jobs: settled(conn, jobs), timeout=20)
        assert broken, fault
    seen = conn.execute("SELECT last_seen_at FROM awa.runtime_instances").fetchone()
    wait_until(lambda: conn.execute("SELECT last_seen_at FROM awa.runtime_instances").fetchone() != seen, timeout=20)
    assert worker.runtime == runtime
    assert count(conn, "SELECT count(*) FROM awa.gone_runtimes") == 0
    # a claim whose answer was lost was released, and a flush whose answer was lost was recorded once
    assert set(tally.runs.values()) == {1}
    assert len(tally.runs) == jobs
    assert claimed_twice(conn) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_clients_insert_ends_whatever_becomes_of_its_connection(
    fault: Fault, wire: Wire, remote: awa.Client, conn: Conn, impatient: None
) -> None:
    """Guard: OwnConnection's bound on answers. What was written when no answer came is unknown, and said so; the next
    insert has another connection."""
    for insert in (
        lambda: remote.insert({}, kind="other"),
        lambda: remote.insert_many([awa.NewJob({}, kind="other")] * 3),
        lambda: remote.insert_many_copy([awa.NewJob({}, kind="other")] * 3),
    ):
        before = remote.insert({}, kind="other")
        assert wire.break_off(fault, "awa client")
        if fault in ("no answers", "no requests", "nothing"):
            with pytest.raises(psycopg.OperationalError, match="has not answered for 1 s"):
                insert()
        else:
            insert()  # the server has told, or its socket: another connection is taken
        assert remote.get(before.id).state == "available"


def test_an_answer_may_take_long_on_a_connection_that_a_handler_borrows(remote: awa.Client, impatient: None) -> None:
    """The bound is for statements of the library's own: it does not know how long a handler's take."""
    remote.insert({}, kind="other")  # the same connection, which was bounded a moment ago
    with remote.connection() as conn:
        assert conn.execute("SELECT pg_sleep(1.5)").fetchone() is not None


@pytest.mark.parametrize("name", ["worker", "heartbeat", "client"])
def test_a_server_that_accepts_and_never_answers_is_given_up_after_connect_timeout(
    name: str, wire: Wire, client: awa.Client, conn: Conn, start_worker: StartWorker, tally: Tally, impatient: None
) -> None:
    """Guard: connect_timeout, which bounds all of the beginning of a connection, not only TCP's."""
    remote = awa.Client(make_conninfo(wire.address, connect_timeout=2))

    @remote.task()
    def work() -> None:
        tally.note()

    if name == "client":
        wire.fail_new("nothing", "awa client")
        with pytest.raises(DatabaseNotFound, match="timeout"):
            remote.insert(work.bind())
        wire.mend()
        remote.insert(work.bind())
        remote.close()
        return
    start_worker(remote, threads=2, heartbeat=0.5, stale_after=20)
    wait_until(lambda: wire.links("awa heartbeat") and wire.links("awa worker"), timeout=20)
    wire.fail_new("nothing", f"awa {name}")
    began = time.monotonic()
    wire.break_off("reset", f"awa {name}")
    job = client.insert({}, kind="work")
    wait_until(lambda: len([x for x in wire.links(f"awa {name}") if x.accepted_at > began]) >= 2, timeout=20)
    wire.mend()
    assert ended(client, job, timeout=20).attempt == 1
    wait_until(lambda: [x for x in wire.links(f"awa {name}") if x.fault is None], timeout=20)
    assert count(conn, "SELECT count(*) FROM awa.gone_runtimes") == 0
    remote.close()


@pytest.mark.slow
def test_a_worker_whose_network_swallows_everything_can_be_stopped(
    wire: Wire, client: awa.Client, conn: Conn, processes: WorkerProcesses
) -> None:
    """Guard: a worker that stops waits ten seconds for an answer, where it would wait a minute. What it could not
    record is rescued, and the exit code says so."""
    processes.module(APP)
    address = make_conninfo(wire.address, connect_timeout=2)
    worker = processes.start("app:client", "--shutdown-timeout", "6", "--poll-interval", "60", AWA_DATABASE_URL=address)
    wait_until(lambda: len(wire.links("awa worker")) == 1, timeout=30)
    job = client.insert({"seconds": 5.0}, kind="nap")
    ran = processes.directory / "ran"
    wait_until(lambda: ran.exists() and "begin" in ran.read_text(), timeout=20)
    time.sleep(3.0)  # its polls are rare by now: none is under way
    for name in ("worker", "recovery", "heartbeat", "maintenance", "leave"):
        wire.fail_new("nothing", f"awa {name}")
    wire.break_off("nothing")
    worker.signal(signal.SIGTERM)  # whoever led has left, and stop() itself records what the handler comes to
    assert worker.wait(45) == 75, worker.stderr
    assert "end" in ran.read_text()
    assert client.get(job.id).state == "running"


def test_a_slow_network_only_slows(
    wire: Wire, remote: awa.Client, conn: Conn, start_worker: StartWorker, tally: Tally
) -> None:
    """50 ms each way: nothing counts as lost, and nothing is fenced, released or run twice."""
    start_worker(remote, threads=4, heartbeat=0.5, stale_after=5)
    wire.delay = 0.05
    remote.insert_many([awa.NewJob({}, kind="work") for _ in range(200)])
    for _ in range(5):
        remote.insert({}, kind="work")
    wait_until(lambda: settled(conn, 205), timeout=30)
    wire.delay = 0.0
    assert set(tally.runs.values()) == {1}
    assert count(conn, "SELECT count(*) FROM awa.attempt_ends") == 0
    assert count(conn, "SELECT count(*) FROM awa.gone_runtimes") == 0


def options(connection: Conn) -> tuple[int, ...]:
    with socket.socket(fileno=socket.dup(connection.fileno())) as found:
        asked = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE)] + [
            (socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        ]
        return tuple(found.getsockopt(*option) for option in asked)


def test_the_kernel_watches_every_connection(wire: Wire, remote: awa.Client) -> None:
    """A peer that has vanished acknowledges nothing: the kernel notices within half a minute, if it is told to look.

    Guard: the defaults of connection.py, as the kernel has them; the connection string goes before them."""
    with connect(wire.address, name="worker") as own, remote.connection() as lent:
        assert options(own) == options(lent) == (1, 15, 5, 3, 30000)
    told = make_conninfo(
        wire.address, keepalives_idle=7, keepalives_interval=2, keepalives_count=4, tcp_user_timeout=9000
    )
    with connect(told, name="worker") as own:
        assert options(own) == (1, 7, 2, 4, 9000)


def test_the_heartbeat_notices_first(wire: Wire, remote: awa.Client, start_worker: StartWorker) -> None:
    """Guard: its own haste. Were it as patient as the others, its runtime would be taken for dead."""
    worker = start_worker(remote, heartbeat=2.0, stale_after=6.0)
    [beat] = [service for service in worker._services if isinstance(service, heartbeats.Heartbeat)]
    wait_until(lambda: beat._connection, timeout=20)
    assert beat._connection is not None
    assert options(beat._connection)[-1] == 4000
    assert beat._connection.info.get_parameters()["connect_timeout"] == "2"
