"""A bad network before the server, as a process: ``python -m tests.chaos.cutter``. Some workers connect through it.

Every connection is cut after a while, in one of three ways:

- *clean*: both ends at once;
- *deaf*: the server's next answer is dropped; the server hears of it later. Was it recorded, was it claimed?
- *late*: the client's next request is held back, and arrives when the client has long given it up.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.chaos.journal import Journal
from tests.chaos.plan import Plan

MEAN_LIFE = 6.0
"""Seconds that a connection lives."""


def directory(plan: Plan) -> Path:
    """Of the socket."""
    return plan.directory / "cut"


def address(plan: Plan) -> str:
    """The database's address behind the cutter."""
    return make_conninfo(plan.database, host=str(directory(plan)))


class Link:
    """One connection, and two threads that pass on what they get until it is cut.

    Args:
        until: When cutting ends, by the monotonic clock.
    """

    def __init__(
        self, client: socket.socket, upstream: str, chance: random.Random, journal: Journal, *, until: float
    ) -> None:
        self._client = client
        self._server = socket.socket(socket.AF_UNIX)
        self._upstream = upstream
        self._how = chance.choice(["clean", "deaf", "late"])
        self._cut_at = time.monotonic() + chance.expovariate(1 / MEAN_LIFE)
        self._until = until
        self._pause = chance.uniform(0.1, 3.0)
        self._journal = journal
        self._is_cut = False

    def start(self) -> None:
        try:
            self._server.connect(self._upstream)
        except OSError:  # it is down
            self._client.close()
            return
        for work in (self._requests, self._answers):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()

    def _guarded(self, work: Callable[[], None]) -> None:
        with suppress(OSError):  # the other thread, or an end, has closed it
            work()
        if not self._is_cut:
            self._end(self._client)
            self._end(self._server)

    def _requests(self) -> None:
        while data := self._client.recv(65536):
            if self._cuts("clean"):
                self._end(self._server)
            elif self._cuts("late"):
                time.sleep(self._pause)
                with suppress(OSError):
                    self._server.sendall(data)
                time.sleep(0.1)
                self._end(self._server)
            else:
                self._server.sendall(data)

    def _answers(self) -> None:
        while data := self._server.recv(65536):
            if self._cuts("deaf"):
                time.sleep(self._pause)
                self._end(self._server)
            elif not self._is_cut:
                self._client.sendall(data)

    def _cuts(self, how: str) -> bool:
        """Whether to cut now; then the client has lost its connection, and the caller sees to the server's end."""
        if how != self._how or self._is_cut or not self._cut_at < time.monotonic() < self._until:
            return False
        self._is_cut = True
        self._end(self._client)
        self._journal.note(cut=how)
        return True

    @staticmethod
    def _end(end: socket.socket) -> None:
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def main(plan: Plan) -> None:
    target = conninfo_to_dict(plan.database)
    name = f".s.PGSQL.{target['port']}"
    path = directory(plan) / name
    path.parent.mkdir(exist_ok=True)
    journal = Journal(plan.directory / "cutter.journal")
    until = time.monotonic() + plan.seconds
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        for number in count(1):
            client, _ = listener.accept()
            Link(client, f"{target['host']}/{name}", plan.random("cutter", number), journal, until=until).start()


if __name__ == "__main__":
    main(Plan.of_this_process())
