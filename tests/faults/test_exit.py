"""A program ends while its worker runs, or its connections are open: it hung, showed a traceback, or left jobs running.

Now a process that ends stops its worker first, as stop() does; nothing that the library holds keeps it from ending.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import psycopg
import pytest

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, WorkerProcesses, count, count_running

Conn = psycopg.Connection[Any]

BEFORE = """
import os, sys, threading, time
import awa

client = awa.Client(sys.argv[1])
begun = threading.Event()

@client.task()
def work(seconds: float = 0.0) -> None:
    begun.set()
    time.sleep(seconds)

@client.task()
def leave() -> None:
    os._exit(7)

"""


def run(script: str, database: str, *, code: int = 0) -> tuple[str, float]:
    """What *script* said on stderr, and how many seconds it took; it ends with *code*."""
    begun = time.monotonic()
    command = [sys.executable, "-W", "error", "-c", BEFORE + script, database]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr, time.monotonic() - begun


@pytest.mark.parametrize("last", ["client.close()", "", "sys.exit(3)"])
def test_a_producer_that_closes_nothing_ends_at_once(database: str, conn: Conn, last: str) -> None:
    """Guard: nothing of a pool that is left open keeps the interpreter; its threads are daemons."""
    said, seconds = run(f"client.insert(work.bind())\n{last}", database, code=3 if "exit" in last else 0)
    assert said == ""
    assert seconds < 30  # ended by itself, not by the time-out above
    assert count(conn, "SELECT count(*) FROM awa.jobs") == 1


ENDINGS = {
    "the script ends": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "an exception": ("raise SystemExit('so be it')", 1),
    "a with block": ("with client.worker(threads=1):\n    sys.exit(4)", 4),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_what_runs_when_a_program_ends_is_recorded_and_the_rest_released(
    database: str, client: awa.Client, conn: Conn, how: str
) -> None:
    """Guard: a worker that was started stops when the interpreter ends.

    Without it the threads end wherever they are, the jobs stay running, and are rescued after `stale_after`: tried.
    """
    last, code = ENDINGS[how]
    script = f"""
jobs = client.insert_many([work.bind(0.3) for _ in range(10)])
worker = client.worker(threads=2)
worker.start()
assert begun.wait(20)
{last}
"""
    run(script, database, code=code)
    assert count_running(conn) == 0
    states = [str(client.get(id).state) for (id,) in conn.execute("SELECT DISTINCT id FROM awa.jobs").fetchall()]
    assert set(states) == {"completed", "available"}
    assert len(states) == 10
    assert count(conn, "SELECT count(*) FROM awa.runtime_instances WHERE ended_at IS NULL") == 0
    assert count(conn, "SELECT count(*) FROM awa.jobs WHERE attempt > 1") == 0


def test_handlers_that_outlast_the_grace_time_do_not_keep_a_program_and_are_rescued(
    database: str, client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    """Guard: the stop at the end is bounded by `shutdown_timeout`, and its threads are daemons.

    Without the latter the process waits for its handler, for 300 s here: tried.
    """
    script = """
client.insert(work.bind(300))
client.worker(threads=1, shutdown_timeout=0.3, heartbeat=0.3, stale_after=1).start()
assert begun.wait(20)
"""
    said, _ = run(script, database)
    (job,) = [id for (id,) in conn.execute("SELECT id FROM awa.jobs").fetchall()]
    assert f"handlers outlived the grace time: jobs {job}" in said
    assert client.get(job).state == "running"

    @client.task()
    def work(seconds: float) -> None: ...

    start_worker(client, threads=1, heartbeat=0.3, stale_after=1)
    wait_until(lambda: client.get(job).state == "completed", timeout=30)
    assert client.get(job).attempt == 2


def test_a_job_that_ends_its_process_is_an_attempt_of_a_worker_that_died(
    database: str, client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    """Guard: the rescue; os._exit() in a handler runs nothing of ours."""
    script = """
client.insert(leave.bind(), max_attempts=1)
client.worker(threads=1, heartbeat=0.3, stale_after=1).start()
time.sleep(60)
"""
    run(script, database, code=7)
    (job,) = [id for (id,) in conn.execute("SELECT id FROM awa.jobs").fetchall()]

    @client.task()
    def leave() -> None: ...

    start_worker(client, threads=1, heartbeat=0.3, stale_after=1)
    wait_until(lambda: client.get(job).state == "failed", timeout=30)
    assert client.get(job).history[0]["type"] == "WorkerDied"


def test_a_worker_that_was_stopped_or_never_started_does_nothing_at_the_end(database: str, conn: Conn) -> None:
    """Guard: stop() takes back what start() left to be done at the end."""
    script = """
import atexit
never = client.worker()
worker = client.worker(threads=1)
worker.start()
worker.stop()
atexit.register(print, "first of all", file=sys.stderr)
worker.stop = worker._stop = None
"""
    assert run(script, database)[0] == "first of all\n"


STUBBORN = """
import concurrent.futures, threading, time
import awa

client = awa.Client()

@client.task()
def waits() -> None:
    # Python joins such threads when it ends
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(time.sleep, 600).result()
"""


def test_a_worker_process_leaves_after_the_grace_time_though_its_handlers_have_threads_of_their_own(
    processes: WorkerProcesses, client: awa.Client, conn: Conn
) -> None:
    """Guard: after the grace time the process ends without Python's joining of threads.

    Without it SIGTERM is answered when the last such thread ends, here after ten minutes: tried.
    """
    processes.module(STUBBORN)
    job = client.insert({}, kind="waits")
    process = processes.start("app:client", "--threads", "1", "--shutdown-timeout", "0.3")
    wait_until(lambda: client.get(job.id).state == "running", timeout=20)
    time.sleep(0.3)  # it has begun
    process.process.terminate()
    assert process.wait(30) == 75
    told = [line for line in process.stderr.splitlines() if line.startswith("awa: ")]
    assert len(told) == 1
    assert f"jobs {job.id};" in told[0]


def test_a_program_that_ends_while_another_thread_inserts(database: str, client: awa.Client, conn: Conn) -> None:
    """Guard: what is under way in daemon threads of the application ends with it, whatever it waits for."""
    script = """
def insert_on():
    while True:
        client.insert(work.bind())
        begun.set()

for _ in range(3):
    threading.Thread(target=insert_on, daemon=True).start()
assert begun.wait(20)
with client.worker(threads=2):
    pass
"""
    run(script, database)
    assert count_running(conn) == 0
