"""R19: a job whose handler kills its process was started again for ever, and took its neighbours along.

Now an attempt is counted when it is claimed, the limit is kept by the database when a dead worker is rescued, and the
history says that the worker died.
"""

from __future__ import annotations

import signal

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import WorkerProcesses

APP = """
import os, signal
import awa

client = awa.Client()

@client.task()
def poison() -> None:
    open("starts", "a").write("x")
    os.kill(os.getpid(), signal.SIGKILL)

@client.task()
def good() -> None: ...
"""


def test_it_starts_as_often_as_it_may_and_fails_with_a_reason(client: awa.Client, processes: WorkerProcesses) -> None:
    processes.module(APP)
    settings = ("--threads", "2", "--heartbeat", "0.2", "--stale-after", "0.7", "--poll-interval", "0.2")
    poison = client.insert({}, kind="poison", max_attempts=2)
    good = client.insert_many([awa.NewJob({}, kind="good") for _ in range(5)])
    process = processes.start("app:client", *settings)

    def has_failed() -> bool:
        nonlocal process
        if process.process.poll() is not None:
            assert process.wait() == -signal.SIGKILL, process.stderr
            process = processes.start("app:client", *settings)
        return client.get(poison.id).state == "failed"

    wait_until(has_failed, timeout=30)
    assert (processes.directory / "starts").read_text() == "xx"
    info = client.get(poison.id)
    assert info.attempt == 2
    assert [(h["type"], "its worker died" in h["text"]) for h in info.history] == [("WorkerDied", True)] * 2
    wait_until(lambda: all(client.get(job.id).state == "completed" for job in good))
    assert max(client.get(job.id).attempt for job in good) <= 3
