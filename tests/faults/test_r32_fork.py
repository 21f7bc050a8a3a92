"""R32: processes forked from one that had used its client spoke on their parent's connections.

Now a child drops what it inherited without touching the sockets, and opens connections of its own at first use; also
with a worker running in the parent, and with multiprocessing's fork.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import pytest

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import WorkerProcesses, count, ended

Conn = psycopg.Connection[Any]

SCRIPT = """
import multiprocessing, sys
import awa

client = awa.Client(sys.argv[1])

@client.task()
def work() -> None: ...

def produce(who):
    for n in range(100):
        client.insert({"who": who}, kind="theirs", queue="q")
    client.close()

if __name__ == "__main__":
    client.insert(work.bind())
    context = multiprocessing.get_context("fork")
    with client.worker(threads=2):
        children = [context.Process(target=produce, args=[f"child {n}"]) for n in range(4)]
        for child in children:
            child.start()
        produce("parent")
        for child in children:
            child.join(30)
        jobs = [client.insert(work.bind()) for _ in range(20)]
        for _ in range(1000):
            if all(job.get().state == "completed" for job in jobs):
                break
            multiprocessing.connection.wait([], 0.01)
    client.close()
    assert [child.exitcode for child in children] == [0] * 4, children
"""


def test_four_children_and_the_parent_insert_at_once_while_a_worker_runs(
    database: str, conn: psycopg.Connection[Any]
) -> None:
    script = SCRIPT.replace("import multiprocessing, sys", "import multiprocessing, multiprocessing.connection, sys")
    done = subprocess.run(
        [sys.executable, "-c", script, database], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for who in ("parent", "child 0", "child 1", "child 2", "child 3"):
        assert count(conn, "SELECT count(*) FROM awa.jobs WHERE args ->> 'who' = %s", who) == 100
    assert count(conn, "SELECT count(*) FROM awa.attempt_ends") == 0  # as if the worker had been taken for dead
    wait_until(lambda: count(conn, "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'awa %%'") == 0)


def run(script: str, *args: object) -> str:
    """What *script* printed; it ends well and says nothing on stderr."""
    allowed = ["-W", "ignore:This process:DeprecationWarning"]  # which later Pythons say of every fork beside threads
    command = [sys.executable, "-W", "error", *allowed, "-c", script, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=45, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


LOCKED = """
import contextlib, gc, os, sys, threading
import awa

client = awa.Client(sys.argv[1])
client.insert({"who": "parent"}, kind="k")
held, forked = threading.Event(), threading.Event()

def hold():
    with client._pool._lock, client._pool._pool._lock, client._pool._pool._sched._lock:
        held.set()
        forked.wait()

thread = threading.Thread(target=hold)
with client.connection() if sys.argv[2] == "lent" else contextlib.nullcontext():
    thread.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        client.insert({"who": "child"}, kind="k")
        client.close()
        gc.collect()
        sys.exit(0)  # with everything that Python does at the end
    forked.set()
    thread.join()
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
client.insert({"who": "parent"}, kind="k")
client.close()
sys.exit(code)
"""


@pytest.mark.parametrize("connection", ["lent", "idle"])
def test_a_lock_that_another_thread_holds_at_the_fork_stops_no_child(
    database: str, conn: Conn, connection: str
) -> None:
    """Guard: a child has locks of its own, cleans nothing of its parent's pool up, and gives nothing back to it.

    Without it the child waits for ever for a thread that it does not have: tried.
    """
    run(LOCKED, database, connection)
    found = conn.execute("SELECT args ->> 'who', count(*) FROM awa.jobs GROUP BY 1 ORDER BY 1").fetchall()
    assert found == [("child", 1), ("parent", 2)]


CLOSING = """
import gc, os, sys
import awa

client = awa.Client(sys.argv[1])
with client.connection() as conn:
    with conn.transaction():
        conn.execute("CREATE TEMPORARY TABLE mine (n int)")
        before = conn.info.backend_pid
        pid = os.fork()
        if pid == 0:
            break_it = sys.argv[2]
            if break_it == "close":
                conn.close()
            else:
                try:
                    conn.execute("ROLLBACK")
                except Exception:
                    pass
                else:
                    os._exit(3)
            client.insert({}, kind="k")
            client.close()
            gc.collect()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        conn.execute("INSERT INTO mine VALUES (1)")
    assert conn.execute("SELECT pg_backend_pid(), n FROM mine").fetchall() == [(before, 1)]
client.close()
sys.exit(code)
"""


@pytest.mark.parametrize("how", ["close", "speak"])
def test_what_a_child_does_to_an_inherited_connection_does_not_reach_the_server(
    database: str, conn: Conn, how: str
) -> None:
    """Guard: the child's copies of the sockets lead nowhere.

    Without it "close" ends its parent's session in the middle of a transaction, and "speak" rolls that back: tried.
    """
    run(CLOSING, database, how)
    assert count(conn, "SELECT count(*) FROM awa.jobs") == 1


LEAVING = '''
import os, signal, sys, time
import awa

client = awa.Client(sys.argv[1])

@client.task()
def work() -> None: ...

client.insert(work.bind())
client.worker(threads=1, poll_interval=30).start()
with client.connection() as conn:
    look = """SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
               AND application_name IN ('awa worker', 'awa heartbeat', 'awa maintenance')"""
    while conn.execute(look).fetchone() != (3,):
        time.sleep(0.01)
time.sleep(0.5)  # what is connected is known as such
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
'''


def test_the_sessions_of_a_killed_process_end_though_its_child_lives(database: str, conn: Conn) -> None:
    """Guard: the child keeps no socket of its parent open.

    Without it the server goes on to hold the bell for a worker that is dead, as long as its child lives: tried.
    """
    process = subprocess.Popen([sys.executable, "-c", LEAVING, database], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        assert process.wait(30) == -signal.SIGKILL
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'awa %%'"
        wait_until(lambda: count(conn, sessions + " AND datname = current_database()") == 0, timeout=15)
        os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


INHERITED = """
import logging, os, sys, time
import awa

logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.WARNING)
client = awa.Client(sys.argv[1])

@client.task()
def work() -> int:
    assert os.getpid() == parent, "a job ran in the child"
    time.sleep(0.01)

parent = os.getpid()
jobs = client.insert_many([work.bind() for _ in range(100)])
spare = client.worker(threads=1)
pid = 0
with client.worker(threads=2) as worker:
    client.insert(work.bind()).get()
    pid = os.fork()
    if pid == 0:
        assert (worker.runtime, worker.running) == (0, [])
        try:
            worker.start()
        except awa.ConfigError as error:
            assert f"was started in process {parent}" in str(error)
        else:
            sys.exit(5)
    else:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        while client.get(jobs[-1].id).state != "completed":
            time.sleep(0.01)
        assert worker.runtime > 0
if pid == 0:
    parent = os.getpid()
    job = client.insert(work.bind(), queue="child")
    spare = client.worker(threads=1, queues=["child"])
    with spare:  # one of its own
        while client.get(job.id).state != "completed":
            time.sleep(0.01)
    client.close()
    sys.exit(0)
client.close()
sys.exit(code)
"""


def test_a_worker_does_not_run_in_a_child_which_says_so(database: str, conn: Conn) -> None:
    """Guard: stop() and start() look whose the worker is; what Python does at the end of a child stops nothing.

    Without it the child settles on its parent's connection, and says goodbye for the parent's runtime: tried.
    """
    said = run(INHERITED, database)
    assert "of which process" in said
    assert count(conn, "SELECT count(*) FROM awa.runtime_instances WHERE ended_at IS NOT NULL") == 2
    assert count(conn, "SELECT count(*) FROM awa.attempt_ends") == 0
    assert count(conn, "SELECT count(*) FROM awa.runtime_instances") == 2


FORKING = r"""
import multiprocessing, os, time
from pathlib import Path
import awa

client = awa.Client()

@client.task()
def comes_back() -> None:
    pid = os.fork()
    if pid:
        Path("code").write_text(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))

@client.task()
def terminates() -> None:
    for _ in range(20):  # the signal comes before, while, or after the child begins
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[60])
        child.start()
        child.terminate()
        child.join(15)
        code = child.exitcode
        child.kill()
        assert code == -15, code

@client.task()
def inserts() -> None:
    def insert():
        client.insert({}, kind="theirs", queue="q")
    children = [multiprocessing.get_context("fork").Process(target=insert) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(20)
    assert [child.exitcode for child in children] == [0, 0, 0]

@client.task()
def work() -> None:
    time.sleep(0.02)
    with Path("ran").open("a") as file:
        file.write(f"{awa.current_job().id} {os.getpid()}\n")
"""


def test_what_a_handler_forks_is_no_second_worker(processes: WorkerProcesses, client: awa.Client, conn: Conn) -> None:
    """Guard: after a fork nothing in the child takes up a job, and its thread's return ends it.

    Without it the child goes on as a second worker with the first one's number, and runs what the inbox held: tried.
    """
    processes.module(FORKING)
    fork = client.insert({}, kind="comes_back")
    jobs = client.insert_many([awa.NewJob({}, kind="work") for _ in range(50)])
    worker = processes.start("app:client", "--threads", "2")
    for job in (fork, *jobs):
        assert ended(client, job, timeout=30).attempt == 1
    assert (processes.directory / "code").read_text() == "1"
    assert "came back from it" in worker.stderr
    ran = [line.split() for line in (processes.directory / "ran").read_text().splitlines()]
    assert sorted(int(job) for job, _ in ran) == sorted(job.id for job in jobs)
    assert {pid for _, pid in ran} == {str(worker.pid)}


def test_what_a_handler_forks_can_be_told_to_end_and_has_connections_of_its_own(
    processes: WorkerProcesses, client: awa.Client, conn: Conn
) -> None:
    """Guard: signals in a forked child do what they did before run(), and are held back until they do.

    Without the former SIGTERM only sets a flag there that nobody looks at; without the latter one that comes at once is
    lost: tried.
    """
    processes.module(FORKING)
    processes.start("app:client", "--threads", "2")
    jobs = [client.insert({}, kind=kind, max_attempts=1) for kind in ("terminates", "inserts")]
    for job in jobs:
        info = ended(client, job, timeout=30)
        assert (info.state, info.history) == ("completed", [])
    assert count(conn, "SELECT count(*) FROM awa.jobs WHERE kind = 'theirs'") == 3


PRELOADED = """
import os
import awa

client = awa.Client()
client.insert({"pid": os.getpid()}, kind="k")

def app(environ, start_response):
    for _ in range(10):
        client.insert({"pid": os.getpid()}, kind="k")
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(os.getpid()).encode()]
"""


def test_gunicorn_with_preload(database: str, conn: Conn, tmp_path: Path) -> None:
    """Guard: as above, with the server that most forks of a used client come from."""
    pytest.importorskip("gunicorn")
    (tmp_path / "shop.py").write_text(PRELOADED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["gunicorn", "--preload", "--workers", "4", "--threads", "2", "--bind", f"127.0.0.1:{port}", "shop:app"]
    env = os.environ | {"AWA_DATABASE_URL": database, "PYTHONPATH": str(Path(__file__).parents[2])}
    log = (tmp_path / "log").open("wb")
    server = subprocess.Popen([sys.executable, "-m", *command], cwd=tmp_path, env=env, stderr=log)
    served: list[int] = []

    def ask(times: int) -> None:
        for _ in range(times):
            asking = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            asking.request("GET", "/")
            answer = asking.getresponse()
            assert answer.status == 200
            served.append(int(answer.read()))
            asking.close()

    def is_up() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(is_up, timeout=30)
        give_up_at = time.monotonic() + 30
        while len(set(served)) < 4 and time.monotonic() < give_up_at:
            threads = [threading.Thread(target=ask, args=[5]) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait()
        log.close()
    assert len(set(served)) == 4
    expected = Counter({pid: 10 * times for pid, times in Counter(served).items()}) + Counter({server.pid: 1})
    assert dict(conn.execute("SELECT (args ->> 'pid')::int, count(*) FROM awa.jobs GROUP BY 1").fetchall()) == expected
    assert "Error" not in (tmp_path / "log").read_text()
