"""An attempt whose time is up is told so, in its own thread and in no other; one that does not end is ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

import awa
from awa.embedded import Server
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from awa.worker import watch
from awa.worker.maintenance.deadlines import Deadlines
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, WorkerProcesses, count, count_running, ended, in_state
from tests.storage import engine

Conn = psycopg.Connection[Any]

OPEN_TRANSACTIONS = """
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND state LIKE 'idle in transaction%'
"""

OPEN_RUNTIMES = "SELECT count(*) FROM awa.runtime_instances WHERE ended_at IS NULL"


def test_a_handler_whose_time_is_up_is_interrupted_and_retried(database: str) -> None:
    client = awa.Client(database)
    caught: list[tuple[int, bool]] = []

    @client.task(timeout=0.3, retry=awa.fixed(0.01))
    def endless() -> None:
        job = awa.current_job()
        if job.attempt > 1:
            return
        try:
            while True:
                time.sleep(0.01)
        except awa.DeadlineExceeded:
            caught.append((job.attempt, job.cancelled))
            raise

    with client.worker(threads=2):
        inserted = client.insert(endless.bind())
        wait_until(lambda: inserted.get().state is awa.JobState.COMPLETED, timeout=20)
    found = inserted.get()
    client.close()
    assert caught == [(1, True)]
    assert found.attempt == 2
    assert found.history[0]["type"] == "awa.errors.DeadlineExceeded"


def test_what_the_job_says_goes_before_what_its_kind_says(database: str) -> None:
    client = awa.Client(database)
    interrupted = threading.Event()

    @client.task(timeout=0)
    def waits(seconds: float) -> None:
        until = time.monotonic() + seconds
        try:
            while time.monotonic() < until:
                time.sleep(0.01)
        except awa.DeadlineExceeded:
            interrupted.set()
            raise awa.TerminalError("too late") from None

    with client.worker(threads=2, timeout=0.2):
        unlimited = client.insert(waits.bind(1.0))
        limited = client.insert(waits.bind(60.0), timeout=0.2)
        wait_until(lambda: limited.get().state is awa.JobState.FAILED, timeout=20)
        wait_until(lambda: unlimited.get().state.is_terminal, timeout=20)
    assert unlimited.get().state is awa.JobState.COMPLETED  # timeout=0 of its kind beats the worker's 0.2
    assert interrupted.is_set()
    client.close()


def test_a_deadline_never_hits_the_next_job_of_the_thread(database: str) -> None:
    """Handlers that end just when their time is up: the order to raise is taken back with the attempt."""
    client = awa.Client(database)
    ended: list[int] = []

    @client.task(timeout=0.25, max_attempts=1)
    def ends_about_then(n: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass

    @client.task(timeout=0)
    def follows(n: int) -> None:
        for _ in range(2000):
            pass
        ended.append(n)

    with client.worker(threads=1):
        jobs = []
        for n in range(12):
            client.insert(ends_about_then.bind(n, 0.25 + (n % 5) * 0.05))
            jobs.append(client.insert(follows.bind(n)))
        wait_until(lambda: all(job.get().state.is_terminal for job in jobs), timeout=60)
    states = {job.get().state for job in jobs}
    client.close()
    assert states == {awa.JobState.COMPLETED}
    assert sorted(ended) == list(range(12))


# Handlers that do not end


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LEAST_GRACE", 0.2)


class Call:
    """A call into C that does not return until it is let go."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self._out, self._in = os.pipe()
        self._is_open = True

    def __call__(self) -> None:
        self.begun += 1
        try:
            os.read(self._out, 1)
        finally:
            self.ended += 1

    def let_go(self) -> None:
        if self._is_open:
            self._is_open = False
            os.close(self._in)

    def close(self) -> None:
        self.let_go()
        wait_until(lambda: self.ended == self.begun)
        os.close(self._out)


@pytest.fixture
def call() -> Iterator[Call]:
    call = Call()
    yield call
    call.close()


Deaf = Callable[..., awa.Task[[], None]]


@pytest.fixture
def deaf(client: awa.Client, call: Call) -> Deaf:
    """Declares a task whose handlers do not hear that their time is up."""

    def declare(client: awa.Client = client, **options: Any) -> awa.Task[[], None]:
        @client.task(**{"timeout": 0.3, "retry": awa.fixed(3600)} | options)
        def deaf() -> None:
            call()

        return deaf

    return declare


@pytest.fixture
def work(client: awa.Client) -> awa.Task[[], None]:
    """A job that does nothing."""

    @client.task()
    def work() -> None: ...

    return work


def test_an_attempt_whose_handler_is_stuck_in_a_call_is_ended_and_its_thread_replaced(
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    deaf: Deaf,
    call: Call,
    work: Any,
    short_grace: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = client.insert(deaf().bind())
    worker = start_worker(client, threads=1)
    info = in_state(client, job, "retryable")
    assert (info.attempt, len(info.history)) == (2, 1)
    assert info.history[0]["outcome"] == "retried"
    assert info.history[0]["type"] == "awa.errors.DeadlineExceeded"
    assert "its time of 0.3 s was up" in info.history[0]["text"]
    assert "os.read(self._out, 1)" in info.history[0]["traceback"].splitlines()[-2]  # where it is stuck
    assert "threading" not in info.history[0]["traceback"]
    assert info.history[0]["elapsed_ms"] >= 500
    assert ended(client, client.insert(work.bind())).state == "completed"  # by the one thread there is
    assert worker.running == []
    with caplog.at_level(logging.WARNING):
        call.let_go()
        wait_until(lambda: "had been ended when its time was up" in caplog.text)
    wait_until(lambda: count_running(conn) == 0)
    assert client.get(job.id).history == info.history
    assert ended(client, client.insert(work.bind())).state == "completed"
    wait_until(lambda: not any("abandoned" in thread.name for thread in threading.enumerate()))


def test_a_worker_of_two_threads_survives_three_handlers_that_never_end(
    client: awa.Client, start_worker: StartWorker, conn: Conn, deaf: Deaf, work: Any, short_grace: None
) -> None:
    task = deaf()
    stuck = [client.insert(task.bind()) for _ in range(3)]
    worker = start_worker(client, threads=2)
    good = client.insert_many([work.bind() for _ in range(50)])
    for job in stuck:
        in_state(client, job, "retryable")
    assert all(ended(client, job).state == "completed" for job in good)
    assert count_running(conn) == 0
    assert worker.running == []
    until = time.monotonic() + 10
    worker.stop()  # waits for none of them
    assert time.monotonic() < until
    assert count(conn, OPEN_RUNTIMES) == 0


def test_a_handler_that_catches_it_and_goes_on_is_ended_all_the_same(
    client: awa.Client, start_worker: StartWorker, conn: Conn, short_grace: None
) -> None:
    go_on = threading.Event()
    caught: list[int] = []

    @client.task(timeout=0.3, max_attempts=1)
    def stubborn() -> str:
        while not go_on.is_set():
            try:
                while not go_on.wait(0.01):
                    pass
            except awa.DeadlineExceeded:
                caught.append(1)
        return "done after all"

    job = client.insert(stubborn.bind())
    worker = start_worker(client, threads=1)
    info = in_state(client, job, "failed")
    assert caught == [1]  # told once
    assert [entry["type"] for entry in info.history] == ["awa.errors.DeadlineExceeded"]
    go_on.set()
    wait_until(lambda: not worker._crew.abandoned)
    worker.stop()
    assert client.get(job.id) == info


def test_the_policies_of_the_task_decide_what_becomes_of_it(
    client: awa.Client, start_worker: StartWorker, deaf: Deaf, call: Call, short_grace: None
) -> None:
    asked: list[tuple[int, str]] = []

    def policy(attempt: int) -> float:
        asked.append((attempt, threading.current_thread().name))
        return 0.0

    job = client.insert(deaf(retry=policy, max_attempts=2).bind())
    start_worker(client, threads=1)
    info = in_state(client, job, "failed")
    assert [entry["outcome"] for entry in info.history] == ["retried", "failed"]
    assert asked == [(1, "awa-1")]  # on a worker's thread, where such code runs
    assert call.begun == 2


def test_a_retry_on_list_without_deadlines_fails_it(
    client: awa.Client, start_worker: StartWorker, deaf: Deaf, short_grace: None
) -> None:
    job = client.insert(deaf(retry_on=[ConnectionError]).bind())
    start_worker(client, threads=1)
    assert in_state(client, job, "failed").attempt == 1


def test_complete_is_refused_when_the_attempt_was_ended(
    client: awa.Client, start_worker: StartWorker, conn: Conn, database: str, call: Call, short_grace: None
) -> None:
    raised: list[BaseException] = []
    conn.execute("CREATE TABLE effects (n int)")

    @client.task(timeout=0.3, retry=awa.fixed(3600))
    def late() -> None:
        job = awa.current_job()
        with psycopg.connect(database) as mine:
            mine.execute("INSERT INTO effects VALUES (1)")
            with contextlib.suppress(awa.DeadlineExceeded):
                call()
            try:
                job.complete(mine)
            except awa.StaleAttempt as error:
                raised.append(error)
                raise

    job = client.insert(late.bind())
    start_worker(client, threads=1)
    info = in_state(client, job, "retryable")
    call.let_go()
    wait_until(lambda: raised)
    assert "its attempt has failed" in str(raised[0])
    wait_until(
        lambda: conn.execute("SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in%'").fetchone() == (0,)
    )
    assert conn.execute("SELECT count(*) FROM effects").fetchone() == (0,)
    assert client.get(job.id) == info


@pytest.mark.parametrize("commits", [True, False])
def test_an_attempt_that_hangs_after_complete_is_what_its_transaction_becomes(
    client: awa.Client,
    start_worker: StartWorker,
    database: str,
    call: Call,
    work: Any,
    short_grace: None,
    commits: bool,
) -> None:
    """Whether it completed cannot be known before; the worker asks again and again, and records the rest meanwhile."""

    @client.task(timeout=0.3, retry=awa.fixed(3600))
    def hangs() -> None:
        job = awa.current_job()
        with psycopg.connect(database) as mine:
            job.complete(mine)
            with contextlib.suppress(awa.DeadlineExceeded):
                call()
            if not commits:
                mine.rollback()

    job = client.insert(hangs.bind())
    worker = start_worker(client, threads=1)
    wait_until(lambda: worker._crew.abandoned)
    assert ended(client, client.insert(work.bind())).state == "completed"
    assert client.get(job.id).state == "running"
    call.let_go()
    assert in_state(client, job, "completed" if commits else "retryable").attempt == (1 if commits else 2)
    wait_until(lambda: not worker._outcomes.open_claims())


def test_a_deadline_while_the_database_is_away_is_recorded_when_it_is_back(
    own_server: Server, start_worker: StartWorker, deaf: Deaf, call: Call, short_grace: None
) -> None:
    database = own_server.url("awa")
    migrate(database, Schema())
    client = awa.Client(database)
    job = client.insert(deaf(client).bind())
    worker = start_worker(client, threads=1)
    wait_until(lambda: call.begun)
    client.close()  # its connections; it opens new ones
    own_server.stop("fast")
    wait_until(lambda: worker._crew.abandoned)
    own_server.start()
    info = in_state(client, job, "retryable", timeout=20)
    assert [entry["type"] for entry in info.history] == ["awa.errors.DeadlineExceeded"]
    worker.stop()
    client.close()


APP = """
import ctypes
import awa
from awa.worker import watch

watch.LEAST_GRACE = 0.2
watch.LEAST_ABANDONED = {most}
client = awa.Client()
pause = ctypes.CDLL(None).pause

@client.task(timeout=0.3, retry=awa.fixed(3600))
def stuck() -> None:
    pause()

@client.task()
def work() -> None: ...
"""


def test_a_process_with_too_many_such_threads_gives_up_and_says_why(
    client: awa.Client, processes: WorkerProcesses
) -> None:
    processes.module(APP.format(most=1))
    jobs = [client.insert({}, kind="stuck") for _ in range(3)]
    process = processes.start("app:client", "--threads", "1", "--shutdown-timeout", "0.5")
    assert process.wait() == 1
    assert "1 handlers whose time was up have not ended" in process.stderr
    assert "start this worker anew" in process.stderr.splitlines()[-1]
    states = sorted(client.get(job.id).state for job in jobs)
    assert states == ["available", "retryable", "running"]  # the last of them is rescued


def test_a_process_leaves_in_good_order_though_a_handler_never_ends(
    client: awa.Client, processes: WorkerProcesses, conn: Conn
) -> None:
    processes.module(APP.format(most=10))
    job = client.insert({}, kind="stuck")
    process = processes.start("app:client", "--threads", "1", "--heartbeat", "0.5", "--stale-after", "30")
    in_state(client, job, "retryable")
    assert ended(client, client.insert({}, kind="work")).state == "completed"
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.stderr
    assert "0 still running, 1 threads abandoned" in process.stderr
    assert count(conn, OPEN_RUNTIMES) == 0


# The second line


def test_what_a_worker_does_not_end_the_leader_ends(
    client: awa.Client,
    start_worker: StartWorker,
    conn: Conn,
    work: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(watch.Watch, "step", lambda self: 1.0)  # it looks at nothing
    go_on = threading.Event()

    @client.task(timeout=0.3, retry=awa.fixed(0.01))
    def endless() -> None:
        if awa.current_job().attempt == 1:
            assert go_on.wait(30)

    @client.task(timeout=0)
    def unlimited() -> None:
        assert go_on.wait(30)

    patient = client.insert(unlimited.bind())
    job = client.insert(endless.bind())
    start_worker(client, threads=3, heartbeat=0.1, stale_after=0.5, timeout=300)
    info = in_state(client, job, "retryable")
    assert [(entry["outcome"], entry["type"]) for entry in info.history] == [("retried", "awa.errors.DeadlineExceeded")]
    assert "did not end it within 0.5 s more" in info.history[0]["text"]
    with caplog.at_level(logging.WARNING):
        go_on.set()
        wait_until(lambda: "1 outcomes were refused" in caplog.text)
    assert client.get(job.id).history == info.history
    info = ended(client, job)  # after the default backoff: the leader knows no other
    assert (info.state, info.attempt) == ("completed", 2)
    assert ended(client, patient).attempt == 1
    wait_until(lambda: count_running(conn) == 0)


def test_the_limits_of_a_worker_are_known_to_the_leader(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    @client.task(timeout=1.5, aliases=["was_quick"])
    def quick() -> None: ...

    @client.task(timeout=0)
    def endless() -> None: ...

    @client.task()
    def usual() -> None: ...

    start_worker(client, timeout=60)
    assert conn.execute("SELECT timeout_ms, kind_timeouts FROM awa.runtime_instances").fetchall() == [
        (60_000, {"quick": 1500, "was_quick": 1500, "endless": 0})
    ]


def test_nothing_is_ended_from_outside_before_the_leader_has_led_for_long(conn: Conn) -> None:
    """After an outage the living have outcomes to record that waited for the database, not for them."""
    runtime = engine.register(conn)
    conn.execute("UPDATE awa.runtime_instances SET timeout_ms = 1000")
    [job] = engine.insert(conn, 1)
    engine.claim(conn, runtime)
    conn.execute("UPDATE awa.claims SET claimed_at = claimed_at - interval '1 h'")
    chore = Deadlines(Schema(), heartbeat=5.0, stale_after=30.0)
    assert chore.run(conn, 12.0) == 18.0
    assert engine.state(conn, job) == "running"
    assert chore.run(conn, 30.0) == 5.0
    assert engine.state(conn, job) == "retryable"


def test_attempts_that_cannot_be_ended_now_hold_nobody_up(conn: Conn, database: str) -> None:
    """Runtimes and attempts behind them get their turn in the same round, and the round has an end."""
    runtimes = [engine.register(conn) for _ in range(3)]
    conn.execute("UPDATE awa.runtime_instances SET timeout_ms = 1000")
    jobs, members = [], []
    for runtime in runtimes:
        jobs += engine.insert(conn, *range(4))
        members += engine.claim(conn, runtime).members
    conn.execute("UPDATE awa.claims SET claimed_at = claimed_at - interval '1 h'")
    chore = Deadlines(Schema(), heartbeat=5.0, stale_after=30.0)
    blocked = [members[0], members[2], members[5]]
    with psycopg.connect(database) as mine:
        for member in blocked:
            engine.complete(mine, member)
        for _ in range(20):
            if chore.run(conn, 60.0) > 0:
                break
        else:
            raise AssertionError("the round has no end")
        states = {job: engine.state(conn, job) for job in jobs}
        assert [job for job in jobs if states[job] == "running"] == [member.id for member in blocked]
        mine.rollback()
    while chore.run(conn, 60.0) == 0:
        pass
    assert {engine.state(conn, job) for job in jobs} == {"retryable"}
