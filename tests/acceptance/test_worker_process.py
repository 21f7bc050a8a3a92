"""Worker processes, some of them killed, as an application runs them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import WorkerProcess, WorkerProcesses, count

Conn = psycopg.Connection[Any]

LEDGER = "CREATE TABLE ledger (job bigint, attempt int, pid int, at timestamptz DEFAULT clock_timestamp(), what text)"

APP = """
import os, signal, time
from pathlib import Path
import awa

client = awa.Client()

def note(what):
    job = awa.current_job()
    with client.connection() as conn:
        conn.execute("INSERT INTO ledger (job, attempt, pid, what) VALUES (%s, %s, %s, %s)",
                     [job.id, job.attempt, os.getpid(), what])

@client.task()
def work(seconds: float = 0.0) -> None:
    note("begin")
    time.sleep(seconds)
    note("end")

@client.task(max_attempts=3)
def poison() -> None:
    note("begin")
    os.kill(os.getpid(), signal.SIGKILL)

@client.task()
def wait_for(path: str) -> None:
    note("begin")
    while not Path(path).exists():
        time.sleep(0.01)
    note("end")

@client.task()
def fast() -> None: ...
"""

QUICK = ("--heartbeat", "0.5", "--stale-after", "1.5", "--poll-interval", "0.5")


@pytest.fixture
def app(processes: WorkerProcesses, conn: Conn) -> WorkerProcesses:
    """Processes that can run APP, which writes into the table ledger."""
    conn.execute(LEDGER)
    processes.module(APP)
    return processes


def started(process: WorkerProcess, number: int = 1) -> WorkerProcess:
    wait_until(lambda: process.stderr.count(" runs ") >= number or process.process.poll() is not None, timeout=15)
    assert process.process.poll() is None, process.stderr
    return process


def states(client: awa.Client, jobs: list[awa.Inserted]) -> set[str]:
    return {str(client.get(job.id).state) for job in jobs}


def begun(conn: Conn, pid: int) -> int:
    return count(conn, "SELECT count(*) FROM ledger WHERE pid = %s", pid)


def test_a_killed_workers_jobs_run_again_and_all_end_exactly_once(
    app: WorkerProcesses, client: awa.Client, conn: Conn
) -> None:
    first = started(app.start("app:client", "--threads", "4", *QUICK))
    second = started(app.start("app:client", "--threads", "4", *QUICK))
    jobs = client.insert_many([awa.NewJob({"seconds": 0.02}, kind="work") for _ in range(200)])
    wait_until(lambda: begun(conn, first.pid) >= 20 and begun(conn, second.pid) >= 20)
    first.signal(signal.SIGKILL)
    first.wait()
    wait_until(lambda: states(client, jobs) == {"completed"}, timeout=30)
    second.signal(signal.SIGTERM)
    assert second.wait() == 0
    # each has one end that counts, by the database's books
    ends = """
        SELECT id, count(*) FROM (
            SELECT j.id FROM awa.jobs j JOIN awa.claims c ON c.slot = j.slot AND j.entry_id = ANY (c.entry_ids)
              JOIN awa.completions x ON x.slot = c.slot AND x.claim_id = c.claim_id
               AND array_position(c.entry_ids, j.entry_id) = ANY (x.idx)
            UNION ALL
            SELECT id FROM awa.attempt_ends WHERE outcome IN ('completed', 'failed', 'cancelled')) e
        GROUP BY id
    """
    assert dict(conn.execute(ends).fetchall()) == {job.id: 1 for job in jobs}
    rescued = [row[0] for row in conn.execute("SELECT id FROM awa.attempt_ends WHERE outcome = 'rescued'").fetchall()]
    assert 1 <= len(rescued) <= 100
    for job_id in rescued:
        info = client.get(job_id)
        assert info.attempt == 2
        assert "its worker died" in info.history[0]["text"]
        assert str(first.pid) in info.history[0]["text"]
    # what ran twice is what was rescued, and never at the same time
    twice = "SELECT job FROM ledger WHERE what = 'begin' GROUP BY job HAVING count(*) > 1"
    assert {row[0] for row in conn.execute(twice).fetchall()} <= set(rescued)
    assert count(conn, "SELECT count(DISTINCT job) FROM ledger WHERE what = 'end'") == 200
    died = conn.execute("SELECT max(at) FROM ledger WHERE pid = %s", [first.pid]).fetchone()
    assert died is not None
    again = conn.execute("SELECT min(at) FROM ledger WHERE attempt = 2").fetchone()
    assert again is not None
    assert again[0] > died[0]


RESCUE = [
    pytest.param(0.5, 1.5, 3.0, id="quick"),
    pytest.param(5.0, 30.0, 40.0, id="default", marks=pytest.mark.slow),
]


@pytest.mark.timing
@pytest.mark.parametrize(("heartbeat", "stale_after", "within"), RESCUE)
def test_the_jobs_of_a_killed_worker_run_again_within(
    app: WorkerProcesses,
    client: awa.Client,
    conn: Conn,
    tmp_path: Path,
    heartbeat: float,
    stale_after: float,
    within: float,
) -> None:
    """Guard: a leader fences what was silent for `stale_after`, of which two heartbeats under its own lease.

    The killed one leads, which is the worse case: the other must have taken the lease over first. Both are in the time.
    """
    settings = ("--threads", "2", "--heartbeat", str(heartbeat), "--stale-after", str(stale_after))
    first = started(app.start("app:client", *settings))
    wait_until(lambda: "leads maintenance" in first.stderr, timeout=30)
    jobs = client.insert_many([awa.NewJob({"path": str(tmp_path / "go-on")}, kind="wait_for") for _ in range(2)])
    wait_until(lambda: begun(conn, first.pid) == 2, timeout=20)
    started(app.start("app:client", *settings))
    first.signal(signal.SIGKILL)
    killed = conn.execute("SELECT clock_timestamp()").fetchone()
    assert killed is not None
    (tmp_path / "go-on").touch()
    wait_until(lambda: states(client, jobs) == {"completed"}, timeout=within + 60)
    again = "SELECT extract(epoch FROM max(at) - %s)::float8 FROM ledger WHERE attempt = 2 AND what = 'begin'"
    row = conn.execute(again, [killed[0]]).fetchone()
    assert row is not None
    print(f"heartbeat {heartbeat:g} s, stale after {stale_after:g} s: ran again {row[0]:.2f} s after the kill")
    assert {client.get(job.id).attempt for job in jobs} == {2}
    assert row[0] < within


def test_a_job_that_kills_its_process_fails_after_its_attempts_and_the_others_complete(
    app: WorkerProcesses, client: awa.Client, conn: Conn
) -> None:
    others = client.insert_many([awa.NewJob({"seconds": 0.05}, kind="work") for _ in range(20)])
    poison = client.insert({}, kind="poison", max_attempts=3)
    more = client.insert_many([awa.NewJob({"seconds": 0.05}, kind="work") for _ in range(20)])
    deaths = 0
    process = app.start("app:client", "--threads", "4", *QUICK)

    def is_over() -> bool:
        nonlocal deaths, process
        if process.process.poll() is not None:
            assert process.wait() == -signal.SIGKILL, process.stderr
            deaths += 1
            process = app.start("app:client", "--threads", "4", *QUICK)
        return client.get(poison.id).state == "failed" and states(client, others + more) == {"completed"}

    wait_until(is_over, timeout=45)
    assert deaths == 3
    info = client.get(poison.id)
    assert (info.state, info.attempt) == ("failed", 3)
    assert [h["type"] for h in info.history] == ["WorkerDied"] * 3
    assert all("its worker died" in h["text"] for h in info.history)
    assert count(conn, "SELECT count(*) FROM ledger WHERE job = %s", poison.id) == 3
    assert max(client.get(job.id).attempt for job in others + more) <= 4
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_sigterm_lets_handlers_end_releases_the_rest_and_exits_0(
    app: WorkerProcesses, client: awa.Client, conn: Conn, tmp_path: Path
) -> None:
    go_on = tmp_path / "go-on"
    process = started(app.start("app:client", "--threads", "2"))
    running = client.insert_many([awa.NewJob({"path": str(go_on)}, kind="wait_for") for _ in range(2)])
    wait_until(lambda: begun(conn, process.pid) == 2)
    waiting = client.insert_many([awa.NewJob({}, kind="work") for _ in range(5)])
    process.signal(signal.SIGTERM)
    go_on.touch()
    assert process.wait() == 0, process.stderr
    assert states(client, running) == {"completed"}
    assert states(client, waiting) <= {"available", "completed"}
    assert all(client.get(job.id).attempt == 1 for job in waiting)
    assert count(conn, "SELECT count(*) FROM awa.runtime_instances WHERE ended_at IS NULL") == 0
    assert "has stopped" in process.stderr


GAP = (
    APP
    + """
from awa.storage.line import Line
from awa.worker.claimer import Claimer

# a hook between the commit of a claim and the start of its handlers
exchange = Line.exchange
def pausing(self, *args):
    reply = exchange(self, *args)
    if any(claim.attempts for claim in reply.claims):
        Path("claimed").touch()
        while not Path("go-on").exists():
            time.sleep(0.01)
    return reply
Line.exchange = pausing

poke = Claimer.poke
def telling(self):
    if self.is_stopping:
        Path("stopping").touch()
    poke(self)
Claimer.poke = telling
"""
)


def test_sigterm_between_claim_and_start_releases_without_costing_an_attempt(
    app: WorkerProcesses, client: awa.Client, conn: Conn
) -> None:
    app.module(GAP)
    jobs = client.insert_many([awa.NewJob({}, kind="work") for _ in range(3)])
    process = app.start("app:client", "--threads", "4")
    wait_until((app.directory / "claimed").exists, timeout=15)
    assert states(client, jobs) == {"running"}
    process.signal(signal.SIGTERM)
    wait_until((app.directory / "stopping").exists)
    (app.directory / "go-on").touch()
    assert process.wait() == 0, process.stderr
    assert states(client, jobs) == {"available"}
    assert all(client.get(job.id).attempt == 1 and not client.get(job.id).history for job in jobs)
    assert count(conn, "SELECT count(*) FROM ledger") == 0
    app.module(APP)
    app.start("app:client")
    wait_until(lambda: states(client, jobs) == {"completed"}, timeout=10)


def test_a_second_sigterm_leaves_at_once(app: WorkerProcesses, client: awa.Client, conn: Conn, tmp_path: Path) -> None:
    process = started(app.start("app:client", "--threads", "1", "--shutdown-timeout", "60"))
    client.insert({"path": str(tmp_path / "never")}, kind="wait_for")
    wait_until(lambda: begun(conn, process.pid) == 1)
    process.signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.process.wait(0.3)
    process.signal(signal.SIGTERM)
    assert process.wait(5) == 128 + signal.SIGTERM


def test_when_the_grace_time_is_over_it_exits_75_and_the_job_is_rescued(
    app: WorkerProcesses, client: awa.Client, conn: Conn, tmp_path: Path
) -> None:
    go_on = tmp_path / "go-on"
    process = started(app.start("app:client", "--threads", "1", "--shutdown-timeout", "0.2", *QUICK))
    job = client.insert({"path": str(go_on)}, kind="wait_for")
    wait_until(lambda: begun(conn, process.pid) == 1)
    process.signal(signal.SIGTERM)
    assert process.wait() == 75
    assert str(job.id) in process.stderr.splitlines()[-1]
    go_on.touch()
    started(app.start("app:client", *QUICK))
    wait_until(lambda: client.get(job.id).state == "completed", timeout=20)
    assert client.get(job.id).attempt == 2


def test_sigint_stops_it_too(app: WorkerProcesses) -> None:
    process = started(app.start("app:client"))
    process.signal(signal.SIGINT)
    assert process.wait() == 0


def test_json_logs_are_one_object_a_line(app: WorkerProcesses, client: awa.Client, conn: Conn) -> None:
    app.module(
        APP
        + """
@client.task(max_attempts=1)
def fail() -> None:
    raise ValueError("two\\nlines \\ud800 ä")
"""
    )
    process = started(app.start("app:client", "--log-format", "json", "--log-level", "debug"))
    job = client.insert({}, kind="fail", max_attempts=1)
    wait_until(lambda: client.get(job.id).state == "failed")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    lines = [json.loads(line) for line in process.stderr.splitlines()]
    assert any("two\nlines" in line["message"] for line in lines)
    assert {line["logger"] for line in lines} >= {"awa.worker", "awa.job"}
    assert all({"at", "level", "logger", "message", "process", "thread"} <= line.keys() for line in lines)
    assert {line["process"] for line in lines} == {process.pid}


def test_a_lone_client_is_found_and_flags_and_environment_say_the_settings(
    app: WorkerProcesses, client: awa.Client, conn: Conn
) -> None:
    process = started(
        app.start("app", "--queue", "a:b:2", "--queue", "c", "--threads", "3", AWA_THREADS="9", AWA_HEARTBEAT="2.5")
    )
    row = conn.execute("SELECT pid, queues, heartbeat_ms, version FROM awa.runtime_instances").fetchone()
    assert row == (
        process.pid,
        [
            {"name": "a:b", "max_workers": 2, "min_workers": 0, "weight": 1},
            {"name": "c", "max_workers": None, "min_workers": 0, "weight": 1},
        ],
        2500,
        awa.__version__,
    )
    threads = [path.read_text().strip() for path in Path(f"/proc/{process.pid}/task").glob("*/comm")]
    assert len(threads) >= 6  # three, heartbeat, maintenance, main
    job = client.insert({}, kind="fast", queue="a:b")
    wait_until(lambda: client.get(job.id).state == "completed")


def exits(processes: WorkerProcesses, code: int, *command: str, **env: str) -> str:
    """The one sentence with which a worker refuses to start."""
    process = processes.start(*command, **env)
    assert process.wait() == code, process.stderr
    lines = process.stderr.strip().splitlines()
    assert "Traceback" not in process.stderr
    assert len(lines) == 1
    assert lines[0].startswith("awa: ")
    return lines[0]


def test_configuration_that_cannot_work_exits_78(app: WorkerProcesses) -> None:
    assert "no module nowhere" in exits(app, 78, "nowhere")
    assert "./jobs/mail.py is a path: give the dotted name that Python imports, jobs.mail" in exits(
        app, 78, "./jobs/mail.py"
    )
    assert "no module app.py: give the dotted name that Python imports, from this directory, app" in exits(
        app, 78, "app.py"
    )
    exits(app, 78, "app.nowhere:client")
    assert "app:client" in exits(app, 78, "app:other")
    assert "app:client" in exits(app, 78, "app:work")
    app.module("x = 1", "empty")
    assert "no awa.Client" in exits(app, 78, "empty")
    app.module("import awa\na = awa.Client()\nb = awa.Client()", "several")
    said = exits(app, 78, "several")
    assert "several:a" in said and "several:b" in said
    app.module("import awa\nclient = awa.Client()", "taskless")
    assert "@client.task()" in exits(app, 78, "taskless")
    assert "threads" in exits(app, 78, "app", "--threads", "none")
    assert "AWA_THREADS" in exits(app, 78, "app", AWA_THREADS="0")
    assert "three heartbeats" in exits(app, 78, "app", "--heartbeat", "10", "--stale-after", "20")
    assert "log_level" in exits(app, 78, "app", "--log-level", "loud")
    assert "DATABASE" in exits(app, 78, "app", AWA_DATABASE_URL="mysql://u:secret@h/x")
    assert "PostgreSQL" in exits(app, 78, "nonsense", "--database", "mysql://u:secret@h/x")
    assert "--schema" in exits(app, 78, "nonsense", "--schema", "pg_x")
    assert "--max-args-bytes" in exits(app, 78, "nonsense", "--max-args-bytes", "none")


def test_the_clients_settings_have_flags_too(
    app: WorkerProcesses, database: str, client: awa.Client, conn: Conn, empty_database: str
) -> None:
    flags = ("--database", database, "--schema", "awa", "--no-notify", "--max-args-bytes", "100")
    app.module(
        """
        import awa
        client = awa.Client()

        @client.task()
        def work() -> None:
            try:
                client.insert({"long": "x" * 100}, kind="other")
            except awa.ValidationError as error:
                client.insert({"limit": error.limit}, kind="other")
        """,
        "plain",
    )
    process = started(app.start("plain", *flags, AWA_DATABASE_URL=empty_database, AWA_SCHEMA="elsewhere"))
    client.insert({}, kind="work")
    wait_until(lambda: count(conn, "SELECT count(*) FROM awa.jobs WHERE kind = 'other'") == 1, timeout=10)
    assert conn.execute("SELECT args::text FROM awa.jobs WHERE kind = 'other'").fetchone() == ('{"limit":100}',)
    assert "is not used" not in process.stderr
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_what_the_module_says_goes_before_a_flag_and_the_worker_tells(
    app: WorkerProcesses, database: str, empty_database: str
) -> None:
    app.module(f"import awa\nclient = awa.Client({database!r}, schema='awa')\n@client.task()\ndef work(): ...", "sure")
    process = started(app.start("sure", "--database", empty_database, "--schema", "elsewhere"))
    assert "--database is not used" in process.stderr
    assert "--schema is not used" in process.stderr
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_usage_exits_2_and_help_0(app: WorkerProcesses) -> None:
    for command in (["app", "--nonsense"], ["app", "more"], ["--threads", "2"]):
        process = app.start(*command)
        assert process.wait() == 2
        assert "Usage: python -m awa.worker" in process.stderr
    answer = subprocess.run(
        [sys.executable, "-m", "awa.worker", "--help"], capture_output=True, text=True, check=True, timeout=20
    )
    assert "MODULE[:NAME]" in answer.stdout


def test_a_database_that_is_not_there_exits_69(app: WorkerProcesses) -> None:
    said = exits(app, 69, "app", AWA_DATABASE_URL="postgresql://nobody:secret@127.0.0.1:1/x")
    assert "127.0.0.1" in said
    assert "secret" not in said
    exits(app, 69, "app", AWA_DATABASE_URL=f"host={app.directory} dbname=x")


def test_a_database_without_the_schema_exits_4_and_names_the_command(app: WorkerProcesses, empty_database: str) -> None:
    assert "awa migrate" in exits(app, 4, "app", AWA_DATABASE_URL=empty_database)
    assert "awa migrate" in exits(app, 4, "app", AWA_SCHEMA="elsewhere")


def test_a_module_that_raises_shows_its_traceback(app: WorkerProcesses) -> None:
    app.module("def f():\n    raise KeyError('mine')\nf()", "broken")
    process = app.start("broken")
    assert process.wait() == 1
    assert "KeyError: 'mine'" in process.stderr
    app.module("import nothing_of_the_sort", "importing")
    process = app.start("importing")
    assert process.wait() == 1
    assert "nothing_of_the_sort" in process.stderr
