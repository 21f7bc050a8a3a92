"""A bad network before the servers, as a process: ``python -m tests.chaos.cutter``.

Some workers and producers connect through it. After a while something happens to every connection:

- *cut clean*: both ends at once;
- *cut deaf*: the server's next answer is dropped; the server hears of it later. Was it recorded, was it claimed?
- *cut late*: the client's next request is held back, and arrives when the client has long given it up;
- *half-open at the server*: the client is told, its request lost; the server waits for more, with all its locks;
- *half-open at the client*: the server is told, its answer lost; the client waits for it;
- *black hole*: nothing passes, and nobody is told for seconds;
- *delayed*: what comes next passes seconds later, nothing is lost.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.chaos.journal import Journal
from tests.chaos.plan import Plan

MEAN_LIFE = 6.0
"""Seconds until something happens to a connection."""

HAPPENS = {
    "cut clean": ("request",),
    "cut deaf": ("answer",),
    "cut late": ("request",),
    "half-open at the server": ("request",),
    "half-open at the client": ("answer",),
    "black hole": ("request", "answer"),
    "delayed": ("request", "answer"),
}
"""What can happen, and the next of which it happens to."""


def directory(plan: Plan, number: int) -> Path:
    """Of the socket before the server of that number."""
    return plan.directory / f"cut-{number}"


def address(plan: Plan) -> str:
    """The database's address behind the cutter."""
    hosts = [str(directory(plan, number)) for number, _ in enumerate(plan.hosts)]
    return make_conninfo(plan.database, host=",".join(hosts))


class Link:
    """One connection, and two threads that pass on what they get until it is cut.

    Args:
        until: When nothing happens any more, by the monotonic clock.
    """

    def __init__(
        self, client: socket.socket, upstream: str, chance: random.Random, journal: Journal, *, until: float
    ) -> None:
        self._client = client
        self._server = socket.socket(socket.AF_UNIX)
        self._upstream = upstream
        self._chance = chance
        self._until = until
        self._journal = journal
        self._lock = threading.Lock()
        self._passing = 2  # threads that go on; guarded by _lock
        self._is_cut = False  # guarded by _lock
        self._how, self._at = self._next()  # guarded by _lock

    def start(self) -> None:
        try:
            self._server.connect(self._upstream)
        except OSError:  # it is down
            self._client.close()
            self._server.close()
            return
        for source, target, what in (
            (self._client, self._server, "request"),
            (self._server, self._client, "answer"),
        ):
            threading.Thread(target=self._pass, args=(source, target, what), daemon=True).start()

    def _next(self) -> tuple[str, float]:
        return self._chance.choice(list(HAPPENS)), time.monotonic() + self._chance.expovariate(1 / MEAN_LIFE)

    def _pass(self, source: socket.socket, target: socket.socket, what: str) -> None:
        with suppress(OSError):  # the other thread, or an end, has closed it
            while data := source.recv(65536):
                if self._is_cut:
                    continue  # it is lost
                match self._happens(what):
                    case None:
                        target.sendall(data)
                    case "delayed":
                        time.sleep(self._chance.uniform(0.1, 4.0))
                        target.sendall(data)
                    case how:
                        self._cut(how, data)
        if not self._is_cut:
            self._end(self._client)
            self._end(self._server)
        with self._lock:
            self._passing -= 1
            is_over = self._passing == 0
        if is_over:
            self._client.close()
            self._server.close()

    def _happens(self, what: str) -> str | None:
        """What happens now to a request or an answer, if anything does."""
        with self._lock:
            how = self._how
            if self._is_cut or what not in HAPPENS[how] or not self._at < time.monotonic() < self._until:
                return None
            self._journal.note(happened=how)
            if how == "delayed":
                self._how, self._at = self._next()
            else:
                self._is_cut = True
            return how

    def _cut(self, how: str, data: bytes) -> None:
        """Part the ends; *data* was the last that came from one of them."""
        if how in ("cut deaf", "cut late", "half-open at the server"):
            self._end(self._client)
        elif how == "half-open at the client":
            self._end(self._server)
        if how != "cut clean":
            time.sleep(self._chance.uniform(0.1, 3.0) if how.startswith("cut") else self._chance.uniform(1.0, 8.0))
        if how == "cut late":
            with suppress(OSError):
                self._server.sendall(data)
            time.sleep(0.1)
        self._end(self._client)
        self._end(self._server)

    @staticmethod
    def _end(end: socket.socket) -> None:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def main(plan: Plan) -> None:
    name = f".s.PGSQL.{conninfo_to_dict(plan.database)['port']}"
    journal = Journal(plan.directory / "cutter.journal")
    until = time.monotonic() + plan.seconds
    numbers = count(1)

    def listen(path: Path, upstream: str) -> None:
        path.parent.mkdir(exist_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            while True:
                client, _ = listener.accept()
                Link(client, upstream, plan.random("cutter", next(numbers)), journal, until=until).start()

    threads = [
        threading.Thread(target=listen, args=(directory(plan, number) / name, f"{host}/{name}"))
        for number, host in enumerate(plan.hosts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(Plan.of_this_process())
