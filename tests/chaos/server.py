"""The server of a run: its own, with fsync on, ended and removed by a process that outlives the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg

from awa.embedded import Binaries, Server
from tests.chaos.plan import ROOT

SETTINGS: dict[str, str | int] = {
    "fsync": "on",
    "max_prepared_transactions": 50,
    "checkpoint_timeout": "30s",
    "max_wal_size": "128MB",
}


def make_server(directory: Path, binaries: Binaries) -> Server:
    """The server in *directory*."""
    return Server(binaries, directory / "pg", settings=SETTINGS)


@contextmanager
def kept_server(binaries: Binaries, *, keep: bool = False) -> Iterator[tuple[Path, Server]]:
    """A new directory and the server started in it; both are gone afterwards, the files unless *keep*."""
    directory = Path(tempfile.mkdtemp(prefix="awa-chaos-", dir="/tmp"))
    directory.chmod(0o755)  # for root the server runs as somebody else
    keeper = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.keeper", str(directory), str(binaries.bin_dir), binaries.version],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C is not for it
    )
    try:
        server = make_server(directory, binaries)
        server.start()
        yield directory, server
    finally:
        keeper.communicate(b"keep" if keep else b"", timeout=90)


def connect(server: Server) -> psycopg.Connection[Any]:
    """A connection of the run itself, which no fault ends."""
    return psycopg.connect(
        server.url(),
        autocommit=True,
        connect_timeout=5,
        application_name="chaos",
        options="-c statement_timeout=60s -c lock_timeout=10s",
    )


def crash(server: Server) -> None:
    """End the server as a power failure of its processes does, and start it again."""
    server.stop("immediate")
    server.start()


def kill_backend(server: Server, pid: int) -> bool:
    """Kill one of the server's processes, so that it restarts all of them; False when *pid* is not its child."""
    postmaster = server.status().pid
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return False
    if parent != postmaster:
        return False
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 30
    time.sleep(0.05)
    while not server.status().is_running and time.monotonic() < until:
        time.sleep(0.05)
    return True
