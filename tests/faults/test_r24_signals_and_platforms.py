"""R24: a worker installed signal handlers where it must not, or needed signals that the platform lacks.

Now start and stop touch no signal and work in any thread; only run(), in the main thread, installs handlers for the
ones that exist and restores what was there.
"""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


def test_a_worker_lives_across_the_requests_of_a_web_server(client: awa.Client) -> None:
    """Guard: start() and stop() touch no signal and belong to no thread: each request has one of its own here."""

    @client.task()
    def work() -> None: ...

    worker = client.worker(threads=1, shutdown_timeout=10)
    actions = {
        "/start": worker.start,
        "/work": lambda: ended(client, client.insert(work.bind()), timeout=20),
        "/stop": worker.stop,
    }

    class Site(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            actions[self.path]()
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            for path in ("/start", "/work", "/stop"):
                asking = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
                asking.request("GET", path)
                assert asking.getresponse().status == 204
                asking.close()
        finally:
            server.shutdown()
            serving.join()
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
    assert not [thread for thread in threading.enumerate() if thread.name == "awa-1"]


def test_run_puts_back_what_it_found_even_if_it_cannot_start(
    client: awa.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: the handlers are put back in every case; what Python did not set counts as the default.

    Without the latter the end of run() raises TypeError: tried.
    """
    found = dict.fromkeys((signal.SIGTERM, signal.SIGINT))
    set_to: list[tuple[int, object]] = []

    def record(number: int, handler: object) -> object:
        set_to.append((number, handler))
        if handler is None:
            raise TypeError("signal handler must be signal.SIG_IGN, signal.SIG_DFL, or a callable object")
        return found.get(signal.Signals(number))

    monkeypatch.setattr(signal, "signal", record)  # as if an embedding program had set them
    with pytest.raises(awa.ConfigError, match="no task is declared"):
        client.worker().run()
    monkeypatch.undo()
    assert [number for number, _ in set_to[:2]] == [number for number, _ in reversed(set_to[2:])]
    assert [handler for _, handler in set_to[2:]] == [signal.SIG_DFL] * 2
