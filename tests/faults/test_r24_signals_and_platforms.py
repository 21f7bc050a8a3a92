"""R24: a worker installed signal handlers where it must not, or needed signals that the platform lacks.

Now start and stop touch no signal and work in any thread; only run(), in the main thread, installs handlers for the
ones that exist and restores what was there.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

import awa
from tests.fixtures.jobs import ended

SCRIPT = """
import os, signal, sys, threading
for name in ("SIGALRM", "SIGQUIT", "SIGHUP", "SIGKILL", "setitimer", "alarm"):
    if hasattr(signal, name):
        delattr(signal, name)
import awa, awa.worker.__main__, awa.worker.supervisor

client = awa.Client(sys.argv[1])
done = threading.Event()

@client.task()
def work() -> None:
    done.set()

client.insert(work.bind())
worker = client.worker(threads=1)

def stop_when_done():
    done.wait(10)
    os.kill(os.getpid(), signal.SIGTERM)

before = signal.getsignal(signal.SIGTERM)
threading.Thread(target=stop_when_done).start()
worker.run()
client.close()
assert done.is_set() and signal.getsignal(signal.SIGTERM) is before
"""


def test_it_runs_without_signals_that_some_platforms_lack(database: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, database], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr


def test_two_workers_in_threads_of_a_web_server_start_and_stop(client: awa.Client) -> None:
    @client.task()
    def work() -> None: ...

    failed: list[BaseException] = []

    def serve() -> None:
        try:
            worker = client.worker(threads=2)
            worker.start()
            assert ended(client, client.insert(work.bind())).state == "completed"
            worker.stop()
            with pytest.raises(awa.ConfigError, match="start\\(\\) and stop\\(\\)"):
                client.worker().run()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert failed == []
