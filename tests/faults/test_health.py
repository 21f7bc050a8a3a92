"""Probes: workers that looked alive with half of their threads dead, were restarted because the database was away, or
took jobs while they could not work.

The loops die and hang for real here; the database goes away and comes back.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

import awa
from awa.cli import main
from awa.config import load_settings, split_address
from awa.embedded import Server
from awa.errors import ConfigError, SchemaNotMigrated
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from awa.worker import health
from awa.worker.supervisor import Worker
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, WorkerProcesses, count, in_state

Conn = psycopg.Connection[Any]

LOOPS = ("claimer", "heartbeat", "maintenance", "watch", "report")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def ask(port: int, page: str, *, method: str = "GET") -> tuple[int, dict[str, Any]]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, page)
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    return response.status, json.loads(body) if body.startswith(b"{") else {}


class Probed:
    """A worker of this process and its port."""

    def __init__(self, worker: Worker, port: int) -> None:
        self.worker = worker
        self.port = port

    @property
    def health(self) -> int:
        return ask(self.port, "/healthz")[0]

    @property
    def readiness(self) -> int:
        return ask(self.port, "/readyz")[0]

    def reasons(self, page: str) -> str:
        return "; ".join(ask(self.port, page)[1]["reasons"])

    def becomes(self, *, health: int, readiness: int, timeout: float = 30.0) -> None:
        wait_until(lambda: (self.health, self.readiness) == (health, readiness), timeout=timeout)


StartProbed = Callable[..., Probed]


@pytest.fixture
def start_probed(start_worker: StartWorker) -> StartProbed:
    def start(client: awa.Client, **settings: Any) -> Probed:
        if not client.registry.kinds:
            client.task(kind="work")(work)
        port = free_port()
        quick = {"threads": 2, "heartbeat": 0.5, "stale_after": 5, "poll_interval": 0.2}
        return Probed(start_worker(client, **quick | {"health_addr": f"127.0.0.1:{port}"} | settings), port)

    return start


def work() -> None: ...


def test_a_worker_that_works_is_healthy_and_ready_and_tells_of_its_loops(
    client: awa.Client, start_probed: StartProbed
) -> None:
    probed = start_probed(client)
    probed.becomes(health=200, readiness=200)
    wait_until(
        lambda: {loop["state"] for loop in ask(probed.port, "/healthz")[1]["loops"].values()} == {"ok"}, timeout=30
    )
    for page in ("/healthz", "/readyz?verbose=1"):
        status, said = ask(probed.port, page)
        assert (status, said["status"], said["reasons"]) == (200, "ok", [])
        assert (said["runtime"], said["pid"]) == (probed.worker.runtime, os.getpid())
        assert set(said["loops"]) == set(LOOPS)
        for name, loop in said["loops"].items():
            assert (loop["state"], loop["failures"], loop["error"]) == ("ok", 0, None), name
            assert 0 <= loop["last_success_age"] < 30
        assert said["threads"] == {"wanted": 2, "alive": 2, "busy": 0, "abandoned": 0}
    assert ask(probed.port, "/healthz", method="HEAD") == (200, {})
    assert ask(probed.port, "/")[0] == 404
    assert ask(probed.port, "/healthz", method="POST")[0] == 501
    probed.worker.stop()
    with pytest.raises(OSError):
        ask(probed.port, "/healthz")
    assert "awa-health" not in {thread.name for thread in threading.enumerate()}


# --- the database


def test_a_database_that_is_away_makes_a_worker_unready_but_not_unhealthy(
    own_server: Server, start_probed: StartProbed
) -> None:
    """Guard: /healthz asks for the loops alone. With it asking for successes a fleet is restarted in every outage."""
    migrate(own_server.url(), Schema())
    client = awa.Client(own_server.url())
    probed = start_probed(client)
    probed.becomes(health=200, readiness=200)
    own_server.stop("fast")
    probed.becomes(health=200, readiness=503)
    until = time.monotonic() + 4
    while time.monotonic() < until:
        assert (probed.health, probed.readiness) == (200, 503), probed.reasons("/healthz")
        time.sleep(0.2)
    said = ask(probed.port, "/healthz")[1]
    assert said["loops"]["claimer"]["state"] == said["loops"]["heartbeat"]["state"] == "failing"
    assert said["loops"]["heartbeat"]["failures"] > 0
    # the type of an error says enough to who may not see where the database is
    assert said["loops"]["heartbeat"]["error"] == "DatabaseNotFound"
    assert "socket" not in json.dumps(said)
    own_server.start()
    probed.becomes(health=200, readiness=200)
    client.close()


def test_a_database_that_does_not_answer_is_noticed_within_two_heartbeats(
    client: awa.Client, start_probed: StartProbed, conn: Conn
) -> None:
    """Guard: readiness counts signs of life that were taken, not failures, which come only after time-outs."""
    probed = start_probed(client)
    probed.becomes(health=200, readiness=200)
    query = "SELECT pid FROM pg_stat_activity WHERE application_name = 'awa heartbeat' AND datname = current_database()"
    backend = count(conn, query)
    os.kill(backend, signal.SIGSTOP)
    try:
        probed.becomes(health=200, readiness=503)
        assert "no sign of life" in probed.reasons("/readyz")
    finally:
        os.kill(backend, signal.SIGCONT)
    probed.becomes(health=200, readiness=200)


def test_storage_that_is_not_trusted_is_told(client: awa.Client, start_probed: StartProbed, conn: Conn) -> None:
    probed = start_probed(client)
    probed.becomes(health=200, readiness=200)
    conn.execute(
        """INSERT INTO awa.claims (claim_id, runtime, nonce, slot, lane, queue, frontier, entry_ids, xids)
           VALUES (nextval('awa.claim_id_seq'), 0, 1, 0, 5, 'default',
                   ARRAY[ROW(5, '9000000000:9000000000:', NULL, NULL, NULL)::awa.lane_frontier], '{}', '{}')"""
    )
    probed.becomes(health=503, readiness=503)
    assert "gives up" in probed.reasons("/healthz")


# --- loops that die

DYING = """
import os, threading, time
import awa
from awa.worker import claimer, heartbeat, watch
from awa.worker.maintenance import loop

client = awa.Client()

@client.task()
def work() -> None:
    time.sleep(60)

class Died(BaseException):
    pass

def arm(cls, name):
    original = getattr(cls, name)
    def dying(self, *args, **kwargs):
        if os.path.exists("die"):
            raise Died("injected")
        return original(self, *args, **kwargs)
    setattr(cls, name, dying)

arm({part})
"""


@pytest.mark.parametrize(
    ("part", "thread"),
    [
        ('heartbeat.Heartbeat, "step"', "heartbeat"),
        ('loop.Maintenance, "step"', "maintenance"),
        ('watch.Watch, "step"', "watch"),
        ('claimer.Claimer, "_exchange"', "awa-"),
    ],
)
def test_a_loop_that_dies_turns_the_process_red_and_ends_it(
    processes: WorkerProcesses, client: awa.Client, part: str, thread: str
) -> None:
    """Half a worker would look alive: its leases expire, or nothing is promoted, and nobody starts it anew.

    A handler that still runs has its grace time, in which /healthz says what has happened.
    """
    processes.module(DYING.replace("{part}", part))
    port = free_port()
    process = processes.start(
        *("app:client", "--threads", "2", "--shutdown-timeout", "2", "--heartbeat", "0.3", "--stale-after", "2"),
        *("--health-addr", f"127.0.0.1:{port}"),
    )

    def is_(page: str, status: int) -> bool:
        try:
            return ask(port, page)[0] == status
        except (OSError, HTTPException):
            return False

    wait_until(lambda: is_("/readyz", 200), timeout=30)
    job = client.insert({}, kind="work")
    in_state(client, job, "running", timeout=30)
    (processes.directory / "die").touch()
    wait_until(lambda: is_("/healthz", 503), timeout=30)
    assert process.wait(30) == 1, process.stderr
    assert "injected" in process.stderr or thread == "awa-"
    last = process.stderr.splitlines()[-1]
    assert last.startswith(f"awa: the worker's thread {thread}"), process.stderr
    assert "died" in last


def test_in_a_program_of_its_own_a_dead_loop_stays_red(client: awa.Client, start_probed: StartProbed) -> None:
    """Nobody ends that process, so the probe is all that tells."""
    probed = start_probed(client)
    probed.becomes(health=200, readiness=200)
    service = next(service for service in probed.worker._services if service.name == "maintenance")

    def die() -> float:
        raise SystemExit(0)

    service.step = die  # type: ignore[method-assign]
    service.wake()
    probed.becomes(health=503, readiness=503)
    assert probed.reasons("/healthz") == "the loop maintenance is dead"


# --- loops that hang


@pytest.fixture
def forever() -> Iterator[threading.Event]:
    """What a call waits for that never returns, until the test is over."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("name", ["heartbeat", "maintenance", "watch"])
def test_a_loop_that_hangs_turns_red(
    client: awa.Client, start_probed: StartProbed, forever: threading.Event, name: str
) -> None:
    """Guard: a round has a longest time. (Shortened here: 30 to 120 s by default.)"""
    probed = start_probed(client)
    probed.becomes(health=200, readiness=200)
    service = next(service for service in probed.worker._services if service.name == name)
    service.vitals.patience = 1.0

    def hang() -> float:
        forever.wait()
        return 0.0

    original, service.step = service.step, hang  # type: ignore[method-assign]
    service.wake()
    probed.becomes(health=503, readiness=503)
    assert probed.reasons("/healthz") == f"the loop {name} is hung"
    service.step = original  # type: ignore[method-assign]
    forever.set()
    probed.becomes(health=200, readiness=200)


@pytest.mark.parametrize("method", ["_exchange", "_rest"])
def test_a_claimer_that_hangs_turns_red(
    client: awa.Client, start_probed: StartProbed, forever: threading.Event, method: str
) -> None:
    """In a round trip, or asleep where nothing wakes it."""
    probed = start_probed(client)
    probed.becomes(health=200, readiness=200)
    claimer = probed.worker._claimer
    claimer.vitals.patience = 1.0
    original = getattr(claimer, method)

    def hang(*args: Any, **kwargs: Any) -> Any:
        forever.wait()
        return original(*args, **kwargs)

    setattr(claimer, method, hang)
    claimer.poke()
    probed.becomes(health=503, readiness=503)
    assert probed.reasons("/healthz") == "the loop claimer is hung"
    forever.set()
    probed.becomes(health=200, readiness=200)


def test_handlers_that_take_all_threads_for_long_are_no_hung_claimer(
    client: awa.Client, start_probed: StartProbed, forever: threading.Event
) -> None:
    """Guard: nobody leads then, and nobody needs to. Seen red without it."""

    @client.task()
    def long() -> None:
        forever.wait(60)

    probed = start_probed(client, threads=2)
    probed.worker._claimer.vitals.patience = 0.2
    jobs = [client.insert(long.bind()) for _ in range(2)]
    for job in jobs:
        in_state(client, job, "running", timeout=30)
    wait_until(lambda: ask(probed.port, "/healthz")[1]["threads"]["busy"] == 2, timeout=30)
    until = time.monotonic() + 2
    while time.monotonic() < until:
        assert probed.health == 200, probed.reasons("/healthz")
        time.sleep(0.1)
    forever.set()
    for job in jobs:
        in_state(client, job, "completed", timeout=30)
    probed.becomes(health=200, readiness=200)


# --- starting and stopping


def test_a_worker_that_stops_is_unready_and_one_that_starts_too(
    client: awa.Client, start_probed: StartProbed, forever: threading.Event
) -> None:
    @client.task()
    def long() -> None:
        forever.wait(60)

    begun = threading.Event()

    @client.on_worker_start
    def slow() -> None:
        begun.set()
        assert forever.wait(30)

    port = free_port()
    started: list[Probed] = []
    starter = threading.Thread(
        target=lambda: started.append(start_probed(client, health_addr=f"127.0.0.1:{port}", shutdown_timeout=30))
    )
    starter.start()
    assert begun.wait(10)
    assert [ask(port, page)[0] for page in ("/healthz", "/readyz")] == [200, 503]
    forever.set()
    starter.join(30)
    wait_until(lambda: ask(port, "/readyz")[0] == 200, timeout=30)
    forever.clear()
    job = client.insert(long.bind())
    in_state(client, job, "running", timeout=30)
    stopper = threading.Thread(target=started[0].worker.stop)
    stopper.start()
    wait_until(lambda: ask(port, "/readyz")[0] == 503, timeout=30)
    status, said = ask(port, "/readyz")
    assert (status, said["reasons"]) == (503, ["the worker stops"])
    assert ask(port, "/healthz")[0] == 200
    forever.set()
    stopper.join(30)


def test_an_address_that_is_taken_is_a_clear_error_before_anything_starts(
    client: awa.Client, conn: Conn, processes: WorkerProcesses, empty_database: str
) -> None:
    client.task(kind="work")(work)
    ran: list[int] = []
    client.on_worker_start(lambda: ran.append(1))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"health_addr is '127\.0\.0\.1:{port}'.*give each worker process"):
            client.worker(health_addr=f"127.0.0.1:{port}").start()
        processes.module("import awa\nclient = awa.Client()\n@client.task()\ndef work() -> None: ...\n")
        process = processes.start("app:client", AWA_HEALTH_ADDR=f"127.0.0.1:{port}")
        assert process.wait(30) == 78
        assert process.stderr.splitlines()[-1].startswith("awa: health_addr is '127.0.0.1:")
        assert "Traceback" not in process.stderr
    assert ran == []
    assert count(conn, "SELECT count(*) FROM awa.runtime_instances") == 0
    with pytest.raises(ConfigError, match=r"health_addr is 'no\.such\.host\.invalid:1'"):
        client.worker(health_addr="no.such.host.invalid:1").start()
    # a start that fails later gives the address back
    other = awa.Client(empty_database)
    other.task(kind="work")(work)
    for _ in range(2):
        with pytest.raises(SchemaNotMigrated):
            other.worker(health_addr=f"127.0.0.1:{port}").start()


@pytest.mark.parametrize(
    "wrong", ["8080", "localhost", "host:", "host:port", ":65536", "::1:80", "a b:1", "http://x:1"]
)
def test_an_address_that_can_be_none_is_refused(wrong: str) -> None:
    for source in ({"arguments": {"health_addr": wrong}}, {"environ": {"AWA_HEALTH_ADDR": wrong}}):
        with pytest.raises(ConfigError, match=r"health_addr is .*HOST:PORT"):
            load_settings(**{"environ": {}} | source)  # type: ignore[arg-type]


def test_addresses_that_can_be() -> None:
    assert load_settings(environ={}).health_addr == ""
    assert load_settings({"health_addr": " "}, environ={}).health_addr == ""
    for given, found in (
        (":8080", ("", 8080)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:80", ("::1", 80)),
        (" my-host.example:65535 ", ("my-host.example", 65535)),
    ):
        assert split_address(load_settings({"health_addr": given}, environ={}).health_addr) == found


# --- who asks


def test_clients_that_say_nothing_or_trickle_hold_a_few_threads_for_a_few_seconds(
    client: awa.Client, start_probed: StartProbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a most of requests at once, and an end to each. Without the first there is a thread for each client, and
    without the second those that trickle keep the probes out for good."""
    monkeypatch.setattr(health, "REQUEST_TIMEOUT", 2.0)
    probed = start_probed(client)
    probed.becomes(health=200, readiness=200)

    def serving() -> int:
        return sum("process_request_thread" in thread.name for thread in threading.enumerate())

    most = 0
    sockets = []
    for _ in range(30):
        sockets.append(socket.create_connection(("127.0.0.1", probed.port)))
        most = max(most, serving())
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.1):
            for one in sockets:
                with contextlib.suppress(OSError):
                    one.send(b"G")

    trickler = threading.Thread(target=trickle)
    trickler.start()
    try:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            most = max(most, serving())
            time.sleep(0.01)
        # one that has closed its socket is about to end
        assert 0 < most <= health.MOST_REQUESTS + 2

        def answers() -> bool:
            try:
                return probed.health == 200
            except (OSError, HTTPException):
                return False

        wait_until(answers, timeout=20)
    finally:
        stop.set()
        trickler.join()
        for one in sockets:
            one.close()


# --- awa health


def run(*arguments: str, **environment: str) -> Result:
    unset = dict.fromkeys(("AWA_SCHEMA", "AWA_DATABASE_URL", "DATABASE_URL", "AWA_HEALTH_ADDR"))
    return CliRunner(env={**unset, **environment}).invoke(main, ["health", *arguments])


def test_the_command_asks_a_worker(client: awa.Client, start_probed: StartProbed) -> None:
    probed = start_probed(client)
    probed.becomes(health=200, readiness=200)
    address = f"127.0.0.1:{probed.port}"
    for arguments, environment in (
        (["--addr", address], {}),
        (["--addr", f":{probed.port}", "--ready"], {}),
        ([], {"AWA_HEALTH_ADDR": address}),
    ):
        found = run(*arguments, **environment)
        assert found.exit_code == 0, found.output
        assert found.stdout.startswith(f"worker {probed.worker.runtime}, process {os.getpid()}: ok\n")
        assert all(name in found.stdout for name in LOOPS)
    assert json.loads(run("--addr", address, "--json").stdout)["status"] == "ok"
    service = probed.worker._services[1]
    service.vitals.patience = -1000.0
    red = run("--addr", address)
    assert red.exit_code == 1
    assert "the loop maintenance is hung" in red.stdout
    service.vitals.patience = 1000.0


def test_the_command_says_when_it_cannot_tell(database: str) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    with socket.socket() as odd:
        odd.bind(("127.0.0.1", 0))
        odd.listen()

        def answer() -> None:
            there, _ = odd.accept()
            with there:
                there.recv(1000)
                there.sendall(b"HTTP/1.0 200 OK\r\n\r\nhello")

        thread = threading.Thread(target=answer)
        thread.start()
        other = run("--addr", f"127.0.0.1:{odd.getsockname()[1]}")
        thread.join()
    for found, said in (
        (run("--addr", nowhere), "no worker answers at"),
        (other, "is no awa worker"),
        (run("--addr", "nonsense"), "HOST:PORT"),
        (run("--database", "host=/nonexistent dbname=x"), "no connection to the database"),
        (run("--database", database, "--schema", "other"), "is not migrated"),
        (run("--database", database, "--ready"), "--ready asks a worker"),
        (run(), "--addr"),
    ):
        assert found.exit_code == 2, found.output
        assert said in found.stderr
        assert len(found.stderr.splitlines()) == 1


def test_the_command_asks_the_database_for_signs_of_life(
    client: awa.Client, database: str, processes: WorkerProcesses
) -> None:
    none = run("--database", database)
    assert (none.exit_code, none.stdout) == (1, "schema awa: not ok, 0 workers\n")
    processes.module("import awa\nclient = awa.Client()\n@client.task()\ndef work() -> None: ...\n")
    process = processes.start("app:client", "--heartbeat", "0.2", "--stale-after", "60")
    wait_until(lambda: run("--database", database).exit_code == 0, timeout=30)
    said = json.loads(run("--database", database, "--json").stdout)
    assert [(worker["pid"], worker["is_heard"]) for worker in said["workers"]] == [(process.pid, True)]
    process.signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: run("--database", database).exit_code == 1, timeout=30)
    assert f"process {process.pid}: silent" in run("--database", database).stdout
