"""Several worker processes under one: who dies is replaced, who asks is obeyed, and none is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

import awa
from awa.worker import processes as supervising
from awa.worker.processes import Place
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import WorkerProcess, WorkerProcesses, count, count_running

Conn = psycopg.Connection[Any]

APP = """
import os, signal, time
from pathlib import Path
import awa

client = awa.Client()
VERSION = 1

@client.task(kind="work")
def work(seconds: float = 0.0) -> None:
    time.sleep(seconds)

@client.task(kind="wait_for")
def wait_for(path: str) -> None:
    Path(f"begun-{awa.current_job().id}").write_text(f"{os.getpid()}")
    while not Path(path).exists():
        time.sleep(0.01)

@client.task(kind="crash")
def crash() -> None:
    os._exit(9)

@client.task(kind="version")
def version() -> None:
    Path(f"version-{awa.current_job().id}").write_text(str(VERSION))
"""

QUICK = ("--threads", "2", "--heartbeat", "0.5", "--stale-after", "2", "--poll-interval", "0.5")


@pytest.fixture
def app(processes: WorkerProcesses) -> Iterator[WorkerProcesses]:
    """Processes that can run APP; the children of supervisors are killed with them."""
    processes.module(APP)
    yield processes
    for process in processes._started:
        process.end()
        for pid in set(pids(process)):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def pids(process: WorkerProcess, what: str = "works") -> list[int]:
    """The worker processes of which the log says *what*, in order."""
    return [int(pid) for pid in re.findall(rf"worker process \d+ \(pid (\d+)\) {what}", process.stderr)]


def is_alive(pid: int) -> bool:
    """Whether it runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def working(process: WorkerProcess, number: int) -> list[int]:
    """The processes that work, once *number* have said so."""
    wait_until(lambda: len(pids(process)) >= number or process.process.poll() is not None, timeout=60)
    assert process.process.poll() is None, process.stderr
    return pids(process)


def begun(app: WorkerProcesses, job: awa.Inserted) -> int:
    """The process that runs a wait_for, once it does."""
    file = app.directory / f"begun-{job.id}"
    return int(wait_until(lambda: file.exists() and file.read_text(), timeout=30))


def test_all_of_them_work_and_all_of_them_end(app: WorkerProcesses, client: awa.Client, conn: Conn) -> None:
    """Guard: P are started, each asked to stop, and waited for."""
    process = app.start("app:client", "--processes", "3", "--threads", "1")
    found = working(process, 3)
    go_on = app.directory / "go-on"
    jobs = [client.insert({"path": str(go_on)}, kind="wait_for") for _ in range(3)]
    assert {begun(app, job) for job in jobs} == set(found)
    process.signal(signal.SIGTERM)
    wait_until(lambda: "stopping 3 worker processes" in process.stderr, timeout=20)
    go_on.touch()
    assert process.wait(40) == 0, process.stderr
    assert [client.get(job.id).state for job in jobs] == ["completed"] * 3
    assert not any(map(is_alive, found))
    assert count(conn, "SELECT count(*) FROM awa.runtime_instances WHERE ended_at IS NOT NULL") == 3
    assert process.stderr.count("ended with exit code 0") == 3
    assert "exit code 0" in process.stderr.splitlines()[-1]


@pytest.mark.slow
def test_one_that_dies_is_replaced_later_and_later(app: WorkerProcesses, client: awa.Client, conn: Conn) -> None:
    """Guard: the pauses double. Without them a job that crashes at once has a process started all the time: tried."""
    process = app.start("app:client", "--processes", "2", *QUICK)
    first = working(process, 2)
    for number in range(3):
        os.kill(pids(process)[-1], signal.SIGKILL)
        working(process, 3 + number)
        # the same place dies again: those that work are the first, and the last that said so
        assert len([pid for pid in set(pids(process)) if is_alive(pid)]) == 2
    place = re.findall(r"worker process (\d) \(pid \d+\) was killed by signal 9; again in ([\d.]+) s", process.stderr)
    assert len({number for number, _ in place}) == 1
    delays = [float(delay) for _, delay in place]
    assert [0.3 < delays[0] <= 0.5, 0.7 < delays[1] <= 1.0, 1.4 < delays[2] <= 2.0] == [True] * 3
    assert len([pid for pid in first if is_alive(pid)]) == 1
    job = client.insert({}, kind="crash", max_attempts=2)
    wait_until(lambda: client.get(job.id).state == "failed", timeout=60)
    assert "ended with exit code 9" in process.stderr
    process.signal(signal.SIGINT)
    assert process.wait(40) == 0, process.stderr
    assert not any(map(is_alive, pids(process)))


def test_the_pauses_are_capped_and_forgotten_after_a_healthy_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard: what died long ago does not count for the next time."""

    class Dead:
        ready_at: float | None = None

    place = Place(1)
    delays = [place.lost(Dead(), now=100.0) for _ in range(12)]  # type: ignore[arg-type]
    assert delays[-1] <= supervising.LONGEST_DELAY
    assert delays[-1] > supervising.LONGEST_DELAY / 2
    assert place.start_at == 100.0 + delays[-1]
    Dead.ready_at = 100.0
    assert place.lost(Dead(), now=100.0 + supervising.HEALTHY_AFTER - 1) > 10  # type: ignore[arg-type]
    assert place.lost(Dead(), now=100.0 + supervising.HEALTHY_AFTER) <= supervising.FIRST_DELAY  # type: ignore[arg-type]


def test_a_signal_to_all_of_them_at_once_counts_once(app: WorkerProcesses, client: awa.Client, conn: Conn) -> None:
    """Guard: the supervisor passes a signal on through its socket, not as another signal.

    systemd and terminals signal every process. A second SIGTERM makes a worker leave its jobs: tried, with os.kill.
    """
    process = app.start("app:client", "--processes", "2", "--threads", "1")
    found = working(process, 2)
    go_on = app.directory / "go-on"
    jobs = [client.insert({"path": str(go_on)}, kind="wait_for") for _ in range(2)]
    for job in jobs:
        begun(app, job)
    for pid in (*found, process.pid):
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: "stopping" in process.stderr, timeout=20)
    time.sleep(0.5)  # what is passed on has come
    go_on.touch()
    assert process.wait(40) == 0, process.stderr
    assert [client.get(job.id).state for job in jobs] == ["completed"] * 2


def test_a_second_signal_ends_all_at_once(app: WorkerProcesses, client: awa.Client, conn: Conn) -> None:
    """Guard: the second is passed on too, and who does not hear it is killed (one is stopped here)."""
    process = app.start("app:client", "--processes", "2", "--threads", "1", "--shutdown-timeout", "600")
    found = working(process, 2)
    jobs = [client.insert({"path": "never"}, kind="wait_for") for _ in range(2)]
    for job in jobs:
        begun(app, job)
    os.kill(found[0], signal.SIGSTOP)
    process.signal(signal.SIGTERM)
    wait_until(lambda: "stopping" in process.stderr, timeout=20)
    process.signal(signal.SIGINT)
    assert process.wait(30) == 128 + signal.SIGINT
    wait_until(lambda: not any(map(is_alive, found)), timeout=10)
    assert "will be rescued" in process.stderr  # told by the one that heard
    assert count_running(conn) == 2


def test_the_exit_code_tells_of_handlers_that_outlived_the_grace_time(
    app: WorkerProcesses, client: awa.Client, conn: Conn
) -> None:
    """Guard: the worst code of the workers is that of the supervisor."""
    process = app.start("app:client", "--processes", "2", "--threads", "1", "--shutdown-timeout", "0.3")
    working(process, 2)
    job = client.insert({"path": "never"}, kind="wait_for")
    begun(app, job)
    process.signal(signal.SIGTERM)
    assert process.wait(40) == 75
    assert f"jobs {job.id};" in process.stderr


def test_sighup_replaces_them_one_after_the_other_and_new_code_runs(
    app: WorkerProcesses, client: awa.Client, conn: Conn
) -> None:
    """Guard: a successor works before its predecessor is asked to stop, so that P work all the time.

    A predecessor that is stopped first leaves less than P at work: tried.
    """
    process = app.start("app:client", "--processes", "2", *QUICK)
    first = working(process, 2)
    go_on = app.directory / "go-on"
    held = client.insert({"path": str(go_on)}, kind="wait_for")
    begun(app, held)
    app.module(APP.replace("VERSION = 1", "VERSION = 2"))
    process.signal(signal.SIGHUP)
    fewest, most = 9, 0
    give_up_at = time.monotonic() + 60
    while "all worker processes are replaced" not in process.stderr:
        assert time.monotonic() < give_up_at, process.stderr
        if len(pids(process)) >= 3:
            go_on.touch()  # the first that is asked to stop may be the one that runs the job
        # runtimes that have said goodbye may still be ending: those that claim are counted
        open_ones = count(conn, "SELECT count(*) FROM awa.runtime_instances WHERE ended_at IS NULL")
        fewest, most = min(fewest, open_ones), max(most, open_ones)
        time.sleep(0.005)
    second = pids(process)[2:]
    assert len(second) == 2
    assert not set(first) & set(second)
    assert not any(map(is_alive, first))
    assert all(map(is_alive, second))
    assert (fewest, most) == (2, 3)
    assert client.get(held.id).state == "completed"
    assert client.get(held.id).attempt == 1
    job = client.insert({}, kind="version")
    wait_until((app.directory / f"version-{job.id}").exists, timeout=20)
    assert (app.directory / f"version-{job.id}").read_text() == "2"
    process.signal(signal.SIGTERM)
    assert process.wait(40) == 0, process.stderr


@pytest.mark.slow
def test_code_that_cannot_start_replaces_nothing(app: WorkerProcesses, client: awa.Client, conn: Conn) -> None:
    """Guard: the roll ends with the first successor that does not come up; also who dies then is tried again."""
    process = app.start("app:client", "--processes", "2", *QUICK)
    first = working(process, 2)
    app.module("raise RuntimeError('not today')")
    process.signal(signal.SIGHUP)
    wait_until(lambda: "the others are not replaced" in process.stderr, timeout=40)
    assert "not today" in process.stderr
    assert all(map(is_alive, first))
    os.kill(first[0], signal.SIGKILL)
    wait_until(lambda: len(re.findall(r"ended with exit code 1; again in", process.stderr)) >= 2, timeout=40)
    job = client.insert({}, kind="work")
    wait_until(lambda: client.get(job.id).state == "completed", timeout=20)
    app.module(APP)
    working(process, 3)
    process.signal(signal.SIGTERM)
    assert process.wait(40) == 0, process.stderr


def test_they_end_in_good_order_when_their_supervisor_is_killed(
    app: WorkerProcesses, client: awa.Client, conn: Conn
) -> None:
    """Guard: the other end of the socket closes. Without listening there they work on for ever: tried."""
    process = app.start("app:client", "--processes", "2", "--threads", "1")
    found = working(process, 2)
    go_on = app.directory / "go-on"
    jobs = [client.insert({"path": str(go_on)}, kind="wait_for") for _ in range(4)]
    wait_until(lambda: len(list(app.directory.glob("begun-*"))) == 2, timeout=20)
    process.signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: process.stderr.count("the supervisor has died") == 2, timeout=20)
    go_on.touch()
    wait_until(lambda: not any(map(is_alive, found)), timeout=40)
    assert sorted(client.get(job.id).state for job in jobs) == ["available"] * 2 + ["completed"] * 2
    assert count_running(conn) == 0


def test_they_end_when_their_supervisor_is_killed_before_they_work(app: WorkerProcesses, conn: Conn) -> None:
    """Guard: the socket is listened to before the application is imported."""
    app.module("from pathlib import Path\nimport os, time\nPath(f'import-{os.getpid()}').touch()\ntime.sleep(600)")
    process = app.start("app:client", "--processes", "2")
    wait_until(lambda: len(list(app.directory.glob("import-*"))) == 2, timeout=40)
    found = [int(path.name.partition("-")[2]) for path in app.directory.glob("import-*")]
    process.signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(map(is_alive, found)), timeout=20)


STUBBORN = """
import awa.worker.processes
from awa.worker.__main__ import main

awa.worker.processes.LEEWAY = 0.5
main()
"""


@pytest.mark.slow
def test_one_that_does_not_end_when_asked_is_killed(app: WorkerProcesses, client: awa.Client, conn: Conn) -> None:
    """Guard: LEEWAY seconds beyond the grace time. Without it a process that hangs keeps the supervisor: tried."""
    app.module(STUBBORN, name="boot")
    log = app.directory / "log"
    with log.open("wb") as stderr:
        command = ["-m", "boot", "app:client", "--processes", "2", "--shutdown-timeout", "0.2"]
        environ = os.environ | {"AWA_DATABASE_URL": str(app.database), "PYTHONPATH": str(Path(__file__).parents[2])}
        supervisor = subprocess.Popen([sys.executable, *command], cwd=app.directory, env=environ, stderr=stderr)
    try:
        wait_until(lambda: log.read_text().count(" works") == 2, timeout=40)
        found = [int(pid) for pid in re.findall(r"\(pid (\d+)\) works", log.read_text())]
        os.kill(found[0], signal.SIGSTOP)
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(30) == 128 + signal.SIGKILL
        assert "does not end: killed" in log.read_text()
        assert not any(map(is_alive, found))
    finally:
        supervisor.kill()
        supervisor.wait()


@pytest.mark.parametrize(
    ("code", "source", "env"),
    [
        (78, "import awa\nclient = awa.Client()", {}),
        (69, APP, {"AWA_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/x"}),
        (1, "raise SystemExit(0)", {}),
    ],
)
def test_what_cannot_start_is_not_tried_for_ever(
    app: WorkerProcesses, code: int, source: str, env: dict[str, str]
) -> None:
    """Guard: before any worked, the end of one is the end of all, with the code that one process would give."""
    app.module(source)
    process = app.start("app:client", "--processes", "2", **env)
    assert process.wait(60) == code, process.stderr
    assert "giving up" in process.stderr


def test_several_processes_cannot_answer_at_one_address(app: WorkerProcesses) -> None:
    """Guard: the two settings together. Each but the first would end with a port that is in use."""
    process = app.start("app:client", "--processes", "2", "--health-addr", "127.0.0.1:8123")
    assert process.wait(30) == 78
    assert "health_addr is '127.0.0.1:8123' and processes is 2" in process.stderr


def test_a_number_that_cannot_be_is_refused(app: WorkerProcesses) -> None:
    """Guard: the setting's bounds; nothing is imported or started before."""
    app.module("raise RuntimeError('imported')")
    for command, env in (
        (["--processes", "0"], {}),
        (["--processes=-1"], {}),
        (["--processes", "many"], {}),
        ([], {"AWA_PROCESSES": "0"}),
    ):
        process = app.start("app:client", *command, **env)
        assert process.wait(30) == 78
        said = process.stderr
        assert "processes is" in said
        assert "give a whole number from 1 to 1000" in said
        assert ("AWA_PROCESSES" if env else "--processes") in said
        assert len(said.splitlines()) == 1
    stray = app.start("app:client", **{supervising.VARIABLE: "soon"})
    assert stray.wait(30) == 78
    assert supervising.VARIABLE in stray.stderr


def test_json_logs_tell_which_process_and_one_process_is_no_supervisor(
    app: WorkerProcesses, client: awa.Client, conn: Conn
) -> None:
    """Guard: every line of several processes is an object of its own and names its process."""
    process = app.start("app:client", "--log-format", "json", AWA_PROCESSES="2")
    working(process, 2)
    process.signal(signal.SIGTERM)
    assert process.wait(40) == 0
    lines = [json.loads(line) for line in process.stderr.splitlines()]
    assert {line["process"] for line in lines} == {process.pid, *pids(process)}
    alone = app.start("app:client", "--processes", "1", AWA_PROCESSES="2")
    wait_until(lambda: " runs default" in alone.stderr, timeout=20)
    assert "supervising" not in alone.stderr
    alone.signal(signal.SIGTERM)
    assert alone.wait(40) == 0
