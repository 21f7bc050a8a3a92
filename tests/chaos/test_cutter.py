"""The chaos run's bad network: who gets what, and who is told first, for each thing that can happen."""

from __future__ import annotations

import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cutter import HAPPENS, Link
from tests.chaos.journal import Journal, read
from tests.fixtures.db import short_directory

PAUSE = 1.0


class Chance(random.Random):
    """What happens is given, and happens at once."""

    def __init__(self, how: str) -> None:
        super().__init__(0)
        self._how = how

    def choice(self, seq: Any) -> Any:
        return self._how

    def expovariate(self, lambd: float = 1.0) -> float:
        return 0.0

    def uniform(self, a: float, b: float) -> float:
        return PAUSE


class End:
    """One end of a connection: what it got, and when it was told that the connection is no more."""

    def __init__(self, sock: socket.socket, *, answer: bytes = b"") -> None:
        self.got = b""
        self.told_at = 0.0
        self._socket = sock
        self._answer = answer
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        with self._socket:
            while data := self._socket.recv(100):
                self.got += data
                if self._answer:
                    self._socket.sendall(self._answer)
            self.told_at = time.monotonic()


# how: what the server gets, what the client gets, who is told first
EXPECTED: dict[str, tuple[bytes, bytes, str]] = {
    "cut clean": (b"", b"", "both"),
    "cut deaf": (b"request", b"", "client"),
    "cut late": (b"request", b"", "client"),
    "half-open at the server": (b"", b"", "client"),
    "half-open at the client": (b"request", b"", "server"),
    "black hole": (b"", b"", "both"),
    "delayed": (b"request", b"answer", "nobody"),
}


@pytest.mark.parametrize("how", HAPPENS)
def test_what_happens_to_a_connection(how: str, tmp_path: Path) -> None:
    """Guard: each way of :data:`HAPPENS` loses what it says, and leaves the end it says in the dark."""
    with short_directory() as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "server"))
        listener.listen()
        ours, client = socket.socketpair()
        journal = Journal(tmp_path / "cutter.journal")
        began = time.monotonic()
        Link(client, str(directory / "server"), Chance(how), journal, until=began + 2 * PAUSE).start()
        upstream, _ = listener.accept()
        ends = {"client": End(ours), "server": End(upstream, answer=b"answer")}
        ours.sendall(b"request")
        if how == "delayed":
            time.sleep(3 * PAUSE)  # there, and back
            ours.shutdown(socket.SHUT_RDWR)
        for end in ends.values():
            end.thread.join(20)
        got_by_server, got_by_client, first = EXPECTED[how]
        assert (ends["server"].got, ends["client"].got) == (got_by_server, got_by_client)
        told = {name: end.told_at - began for name, end in ends.items()}
        if first in ends:
            assert told[first] + PAUSE / 2 < max(told.values()), told
        elif first == "both":
            assert abs(told["client"] - told["server"]) < PAUSE / 2, told
        if how == "black hole":
            assert min(told.values()) >= PAUSE, told
        assert {line["happened"] for line in read(tmp_path, "cutter.journal")} == {how}


def test_every_way_is_expected() -> None:
    assert set(EXPECTED) == set(HAPPENS)
