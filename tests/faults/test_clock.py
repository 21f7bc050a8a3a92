"""Hosts whose clocks are ten minutes off, ahead or behind: the processes see such a clock, whomever they ask.

Every stored time comes from the database's clock and is compared with it there; in the processes only the monotonic
clock counts. The process that is off leads: promotion, rescue, deadlines, retention and the ring are its to do.

test_r21_clock_skew.py moves Python's own clocks; here libc's move, which the C core, libpq and all others read too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, WorkerProcesses, count, ended

Conn = psycopg.Connection[Any]

# Only what tells the time of day. libfaketime moves deadlines as well, and then breaks time.sleep().
SKEWED = """
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec *at)
{
    const char *skew = getenv("CLOCK_SKEW");
    long failed = syscall(SYS_clock_gettime, clock, at);
    if (!failed && skew && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        at->tv_sec += atol(skew);
    return (int) failed;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone)
{
    struct timespec now;
    (void) zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library that moves the clock of the process which it is preloaded into by CLOCK_SKEW seconds."""
    if not sys.platform.startswith("linux"):
        pytest.skip("LD_PRELOAD is Linux's")
    source, built = tmp_path / "skewed.c", tmp_path / "skewed.so"
    source.write_text(SKEWED)
    try:
        command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", built, source]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("there is no C compiler to build the library with that moves the clock")
    return built


APP = """
import pathlib, time
import awa

client = awa.Client()

@client.task()
def work() -> None: ...

@client.task(max_attempts=1)
def fail() -> None:
    raise ValueError("no")

@client.task(retry=awa.fixed(0.5))
def again() -> None:
    if awa.current_job().attempt == 1:
        raise ValueError("once")

@client.task(max_attempts=1)
def sleep(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.02)

@client.on_worker_start
def produce() -> None:
    client.insert(work.bind(), tags=["now"])
    client.insert(work.bind(), delay=0.6, tags=["soon"])
    client.insert(again.bind(), tags=["again"])
    client.insert(sleep.bind(1.0), timeout=20, tags=["in time"])
    client.insert(sleep.bind(30.0), timeout=1, tags=["late"])
    client.insert(fail.bind(), tags=["fail"])
    client.insert(work.bind(), delay=300, tags=["later"])
    pathlib.Path("clock").write_text(str(time.time()))
"""

SETTINGS = ("--heartbeat", "0.5", "--stale-after", "4", "--poll-interval", "0.2", "--failed-retention", "3")

LEADS = """
    SELECT count(*) FROM awa.leases l JOIN awa.runtime_instances r ON r.id = l.runtime
     WHERE l.expires_at > clock_timestamp() AND r.pid = %s
"""


@pytest.mark.parametrize("skew", [600, -600])
def test_a_leader_with_a_wrong_clock_does_everything_on_time(
    client: awa.Client, start_worker: StartWorker, processes: WorkerProcesses, conn: Conn, library: Path, skew: int
) -> None:
    """Guard: clock_timestamp() in every statement that stores or compares a time. With the process's own clock in place
    of any of them something here comes ten minutes early, or not at all within these seconds."""
    processes.module(APP)
    env = {"LD_PRELOAD": str(library), "CLOCK_SKEW": str(skew)}
    process = processes.start("app:client", *SETTINGS, **env)
    wait_until(lambda: count(conn, LEADS, process.pid) == 1, timeout=30)
    begun = time.monotonic()
    clock = float((processes.directory / "clock").read_text())
    assert abs(clock + (time.monotonic() - begun) - skew - time.time()) < 30, "the process's clock is off"

    @client.task(kind="other", queue="other")
    def other() -> None: ...

    start_worker(client, queues=["other"], heartbeat=0.5, stale_after=4)
    jobs: dict[str, int] = {}
    for table in ("jobs", "waiting_jobs", "ended_jobs"):
        jobs |= dict(conn.execute(f"SELECT tags[1], id FROM awa.{table}").fetchall())
    assert jobs.keys() >= {"now", "again", "in time", "late", "later"}

    # a failed job stays for its three seconds, by the database's clock, and then goes
    wait_until(lambda: count(conn, "SELECT count(*) FROM awa.attempt_ends WHERE outcome = 'failed'") > 0, timeout=20)
    age = "SELECT extract(epoch FROM clock_timestamp() - ended_at)::float FROM awa.ended_jobs WHERE tags = '{fail}'"
    seen = 0.0

    def is_gone() -> bool:
        nonlocal seen
        found = conn.execute(age).fetchone()
        seen = seen if found is None else found[0]
        return found is None

    wait_until(is_gone, timeout=30)
    assert 2.0 < seen < 25

    states = {tag: ended(client, awa.Inserted(jobs[tag]), timeout=20) for tag in ("now", "again", "in time")}
    assert {info.state for info in states.values()} == {"completed"}
    assert {tag: info.attempt for tag, info in states.items()} == {"now": 1, "again": 2, "in time": 1}
    # its time was up after a second, neither at once nor never; by now its three seconds are over, too
    wait_until(lambda: count(conn, "SELECT count(*) FROM awa.ended_jobs") == 0, timeout=30)
    late = "SELECT extract(epoch FROM ended_at - (SELECT min(claimed_at) FROM awa.claims))::float FROM awa.attempt_ends"
    [(after,)] = conn.execute(f"{late} WHERE id = %s", [jobs["late"]]).fetchall()
    assert 0.9 < after < 15
    assert client.get(jobs["later"]).state == "scheduled"
    row = conn.execute(
        "SELECT extract(epoch FROM run_at - created_at)::float FROM awa.waiting_jobs WHERE tags = '{later}'"
    ).fetchone()
    assert row is not None and 299 < row[0] < 330
    # times that are stored are the database's
    stored = """
        SELECT max(abs(extract(epoch FROM at - clock_timestamp())))::float FROM (
               SELECT available_at AS at FROM awa.jobs UNION ALL SELECT claimed_at FROM awa.claims
                UNION ALL SELECT completed_at FROM awa.completions UNION ALL SELECT ended_at FROM awa.attempt_ends
                UNION ALL SELECT last_seen_at FROM awa.runtime_instances) t
    """
    [(furthest,)] = conn.execute(stored).fetchall()
    assert furthest < 120
    # both have been heard for longer than the limit, and nobody was taken for dead
    wait_until(lambda: time.monotonic() - begun > 5.0, timeout=10)
    assert count(conn, "SELECT count(*) FROM awa.gone_runtimes") == 0
    assert ended(client, client.insert(other.bind())).state == "completed"
    assert count(conn, LEADS, process.pid) == 1
    # and the clock that is off rescues who is really silent, in time
    dead = conn.execute(
        "INSERT INTO awa.runtime_instances (uuid, hostname, pid, version, heartbeat_ms, last_seen_at)"
        " VALUES (gen_random_uuid(), 'h', 1, '0', 500, clock_timestamp() - interval '3 s') RETURNING id"
    ).fetchone()
    assert dead is not None
    fenced = "SELECT extract(epoch FROM g.gone_at - r.last_seen_at)::float FROM awa.gone_runtimes g JOIN"
    fenced += " awa.runtime_instances r ON r.id = g.runtime WHERE r.id = %s"
    found = wait_until(lambda: conn.execute(fenced, dead).fetchone(), timeout=20)
    assert 4.0 <= found[0] < 20
    assert process.process.poll() is None
