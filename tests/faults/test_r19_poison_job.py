"""R19: a job whose handler kills its process was started again for ever, and took its neighbours along.

Now an attempt is counted when it is claimed, the limit is kept by the database when a dead worker is rescued, and the
history says that the worker died. A job whose last attempt died with its process is claimed alone.
"""

from __future__ import annotations

import signal

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import WorkerProcesses

APP = """
import os, signal, time
import awa

client = awa.Client()

@client.task()
def poison() -> None:
    open("starts", "a").write("x")
    os.kill(os.getpid(), signal.SIGKILL)

@client.task()
def good() -> None:
    time.sleep(0.05)
"""


SETTINGS = ("--threads", "4", "--heartbeat", "0.2", "--stale-after", "0.7", "--poll-interval", "0.2")


class Supervised:
    """A worker process that is started again whenever it was killed."""

    def __init__(self, processes: WorkerProcesses) -> None:
        processes.module(APP)
        self._processes = processes
        self._process = processes.start("app:client", *SETTINGS)

    def look(self) -> None:
        if self._process.process.poll() is not None:
            assert self._process.wait() == -signal.SIGKILL, self._process.stderr
            self._process = self._processes.start("app:client", *SETTINGS)


def test_it_starts_as_often_as_it_may_and_fails_with_a_reason(client: awa.Client, processes: WorkerProcesses) -> None:
    poison = client.insert({}, kind="poison", max_attempts=3)
    good = client.insert_many([awa.NewJob({}, kind="good") for _ in range(5)])
    worker = Supervised(processes)

    def has_failed() -> bool:
        worker.look()
        return client.get(poison.id).state == "failed"

    wait_until(has_failed, timeout=90)
    assert (processes.directory / "starts").read_text() == "xxx"
    info = client.get(poison.id)
    assert info.attempt == 3
    assert [(h["type"], "its worker died" in h["text"]) for h in info.history] == [("WorkerDied", True)] * 3
    wait_until(lambda: worker.look() or all(client.get(job.id).state == "completed" for job in good), timeout=20)
    assert max(client.get(job.id).attempt for job in good) <= 2


def test_of_several_each_neighbour_loses_one_attempt_at_most(client: awa.Client, processes: WorkerProcesses) -> None:
    poison = [client.insert({}, kind="poison", max_attempts=2) for _ in range(3)]
    good = client.insert_many([awa.NewJob({}, kind="good") for _ in range(30)])
    worker = Supervised(processes)

    def have_ended() -> bool:
        worker.look()
        return all(client.get(job.id).state.is_terminal for job in (*poison, *good))

    wait_until(have_ended, timeout=90)
    assert {client.get(job.id).state for job in poison} == {"failed"}
    assert len((processes.directory / "starts").read_text()) <= 6
    assert {client.get(job.id).state for job in good} == {"completed"}
    assert max(client.get(job.id).attempt for job in good) <= 2
