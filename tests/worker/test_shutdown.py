"""What a worker that stops, or dies in part, leaves behind."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import awa
from awa import ConfigError, ShutdownTimeout
from awa.storage import backends, line
from awa.worker.supervisor import Worker
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, WorkerProcesses, count, count_running, ended
from tests.fixtures.late import Gate

Conn = psycopg.Connection[Any]

OPEN_RUNTIMES = "SELECT count(*) FROM awa.runtime_instances WHERE ended_at IS NULL"

RUNTIME_LOCK = "SELECT pg_advisory_lock(hashtextextended('awa.runtime:' || %s::text, 0))"


class Blocked:
    """A handler that stays until it is let go."""

    def __init__(self, client: awa.Client) -> None:
        self.started = threading.Semaphore(0)
        self.go_on = threading.Event()

        @client.task(kind="block")
        def block() -> None:
            self.started.release()
            assert self.go_on.wait(30)

        self.task = block

    def wait(self) -> None:
        assert self.started.acquire(timeout=10)


@pytest.fixture
def blocked(client: awa.Client) -> Iterator[Blocked]:
    blocked = Blocked(client)
    yield blocked
    blocked.go_on.set()


class Stopping:
    """A call of ``stop()`` in a thread of its own."""

    def __init__(self, worker: Worker, timeout: float | None = None) -> None:
        self.raised: BaseException | None = None
        self._thread = threading.Thread(target=self._stop, args=(worker, timeout))
        self._thread.start()

    def _stop(self, worker: Worker, timeout: float | None) -> None:
        try:
            worker.stop(timeout)
        except BaseException as error:
            self.raised = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(15)
        assert self.is_over


@pytest.fixture
def work(client: awa.Client) -> awa.Task[[], None]:
    """A job that does nothing."""

    @client.task()
    def work() -> None: ...

    return work


def lose_a_claim(
    client: awa.Client, conn: Conn, work: Any, late: Gate, caplog: pytest.LogCaptureFixture, **settings: Any
) -> tuple[Worker, awa.Inserted]:
    """A worker that knows nothing of its claim, whose transaction goes on, and the job that was claimed."""
    late.shut("claim_v2")
    job = client.insert(work.bind())
    worker = client.worker(threads=1, poll_interval=30, **settings)
    worker.start()
    late.wait()
    wait_until(lambda: "has not answered" in caplog.text)
    return worker, job


def test_one_that_may_have_an_open_claim_does_not_say_goodbye(
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    work: Any,
    late: Gate,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the role may not end the backend of its lost connection, or does not see it."""
    monkeypatch.setattr(line, "REPLY_TIMEOUT", 0.3)
    monkeypatch.setattr(backends, "end_backend", lambda conn, backend, last: False)
    worker, job = lose_a_claim(client, conn, work, late, caplog)
    runtime = worker.runtime
    worker.stop(0.0)
    assert conn.execute("SELECT ended_at FROM awa.runtime_instances WHERE id = %s", [runtime]).fetchone() == (None,)
    late.open()  # the claim commits after its worker has gone
    wait_until(lambda: client.get(job.id).state == "running")
    start_worker(client, threads=1, heartbeat=0.2, stale_after=0.6)
    info = ended(client, job)
    assert (info.state, info.attempt) == ("completed", 2)
    assert [h["outcome"] for h in info.history] == ["rescued"]
    ends = "SELECT count(*) FROM awa.runtime_instances WHERE id = %s AND ended_at IS NOT NULL"
    wait_until(lambda: count(conn, ends, runtime) == 1)


def test_the_backend_of_a_lost_claim_is_ended_so_that_it_claims_nothing_later(
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    work: Any,
    late: Gate,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line, "REPLY_TIMEOUT", 0.3)
    worker, job = lose_a_claim(client, conn, work, late, caplog)
    worker.stop(5.0)
    late.open()
    assert count(conn, OPEN_RUNTIMES) == 0
    start_worker(client, threads=1)
    info = ended(client, job)
    assert (info.state, info.attempt, info.history) == ("completed", 1, [])


def test_one_whose_open_claim_turns_up_in_time_releases_it_and_says_goodbye(
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    work: Any,
    late: Gate,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(line, "REPLY_TIMEOUT", 0.3)
    worker, job = lose_a_claim(client, conn, work, late, caplog)
    stopping = Stopping(worker, 10.0)
    wait_until(lambda: worker._claimer.is_stopping)
    late.open()
    stopping.join()
    assert stopping.raised is None
    assert count(conn, OPEN_RUNTIMES) == 0
    assert count_running(conn) == 0
    start_worker(client, threads=1, poll_interval=30)
    info = ended(client, job, timeout=5)
    assert (info.state, info.attempt, info.history) == ("completed", 1, [])


def test_outcomes_that_cannot_be_recorded_are_told_of(
    client: awa.Client, database: str, conn: Conn, blocked: Blocked, caplog: pytest.LogCaptureFixture
) -> None:
    worker = client.worker(threads=1, poll_interval=30)
    worker.start()
    client.insert(blocked.task.bind())
    blocked.wait()
    with psycopg.connect(database, autocommit=True) as rescuer:  # it looks at the runtime, and takes its time
        rescuer.execute(RUNTIME_LOCK, [worker.runtime])
        blocked.go_on.set()
        wait_until(lambda: worker._claimer._pending)
        worker.stop(0.0)
    assert "not everything could be recorded" in caplog.text
    assert count(conn, OPEN_RUNTIMES) == 1
    assert count_running(conn) == 1


def test_a_start_hook_that_raises_leaves_no_runtime_behind(client: awa.Client, conn: Conn, work: Any) -> None:
    @client.on_worker_start
    def broken() -> None:
        raise RuntimeError("no licence")

    worker = client.worker()
    with pytest.raises(RuntimeError, match="no licence"):
        worker.start()
    worker.stop()
    assert count(conn, OPEN_RUNTIMES) == 0


def test_a_second_stop_waits_for_the_first_and_ends_like_it(client: awa.Client, blocked: Blocked) -> None:
    worker = client.worker(threads=1)
    worker.start()
    job = client.insert(blocked.task.bind())
    blocked.wait()
    first = Stopping(worker, 0.5)
    wait_until(lambda: worker._claimer.is_stopping)
    others = [Stopping(worker), Stopping(worker, 0.0)]
    with pytest.raises(ShutdownTimeout) as caught:
        worker.stop()
    assert list(caught.value.job_ids) == [job.id]
    first.join()
    for stopping in (first, *others):
        stopping.join()
        assert isinstance(stopping.raised, ShutdownTimeout)
        assert list(stopping.raised.job_ids) == [job.id]
    with pytest.raises(ShutdownTimeout):
        worker.stop()


def test_a_handler_cannot_stop_its_worker(client: awa.Client, start_worker: StartWorker, work: Any) -> None:
    raised: list[BaseException] = []

    @client.task()
    def stopper() -> None:
        try:
            worker.stop(0.0)
        except ConfigError as error:
            raised.append(error)

    worker = start_worker(client, threads=2)
    assert ended(client, client.insert(stopper.bind())).state == "completed"
    assert "handler" in str(raised[0])
    assert ended(client, client.insert(work.bind())).state == "completed"


DYING = """
import awa
from awa.worker.claimer import Claimer
from awa.worker.heartbeat import Heartbeat

client = awa.Client()

@client.task()
def work() -> None: ...

def die(self):
    raise SystemExit(0)

{part} = die
"""


def test_a_worker_that_is_half_dead_ends(processes: WorkerProcesses, conn: Conn) -> None:
    started = {}
    for part in ("Claimer.lead", "Heartbeat.step"):
        name = part.split(".")[0].lower()
        processes.module(DYING.replace("{part}", part), name=name)
        started[name] = processes.start(f"{name}:client", "--threads", "2", "--shutdown-timeout", "0.2")
    for name, process in started.items():
        assert process.wait() == 1, process.stderr
        dead = r"heartbeat" if name == "heartbeat" else r"awa-\d"
        assert re.search(rf"^awa: .* thread {dead} died", process.stderr, re.MULTILINE), process.stderr


def test_a_frontier_beyond_the_servers_transactions_ends_the_worker(processes: WorkerProcesses, conn: Conn) -> None:
    processes.module("import awa\nclient = awa.Client()\n@client.task()\ndef work() -> None: ...\n")
    process = processes.start("app:client", "--threads", "2")
    wait_until(lambda: "runs default" in process.stderr, timeout=15.0)
    conn.execute(
        """INSERT INTO awa.claims (claim_id, runtime, nonce, slot, lane, queue, frontier, entry_ids, xids)
           VALUES (nextval('awa.claim_id_seq'), 0, 1, 0, 5, 'default',
                   ARRAY[ROW(5, '9000000000:9000000000:', NULL, NULL, NULL)::awa.lane_frontier], '{}', '{}')"""
    )
    assert process.wait() == 4, process.stderr
    told = [text for text in process.stderr.splitlines() if text.startswith("awa: ")]
    assert len(told) == 1
    assert told == process.stderr.splitlines()[-1:]
    assert "frontier of queue default" in told[0]
    assert "another cluster" in told[0]
    assert "Traceback" not in process.stderr
    assert process.stderr.count("gives up") == 1
