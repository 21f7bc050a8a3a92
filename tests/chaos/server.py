"""A server of a run: its own, with fsync on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psycopg

from awa.embedded import Binaries, Server

SETTINGS: dict[str, str | int] = {
    "fsync": "on",
    "max_prepared_transactions": 50,
    "checkpoint_timeout": "30s",
    "max_wal_size": "128MB",
    "wal_keep_size": "512MB",  # a standby that was away goes on where it was
    "wal_retrieve_retry_interval": "200ms",
}


def make_server(directory: Path, binaries: Binaries) -> Server:
    """A server in *directory*."""
    return Server(binaries, directory, settings=SETTINGS)


def connect(server: Server) -> psycopg.Connection[Any]:
    """A connection of the run itself, which no fault ends and which waits for no standby, nor long for who does."""
    return psycopg.connect(
        server.url(),
        autocommit=True,
        connect_timeout=5,
        application_name="chaos",
        options="-c statement_timeout=60s -c lock_timeout=1s -c synchronous_commit=local",
    )


def crash(server: Server) -> None:
    """End the server as a power failure of its processes does, and start it again."""
    server.stop("immediate")
    server.start()


def send(server: Server, pid: int, number: signal.Signals) -> bool:
    """Send a signal to one of the server's processes; False when *pid* is not its child."""
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return False
    if parent != server.status().pid:
        return False
    os.kill(pid, number)
    return True


def kill_backend(server: Server, pid: int) -> bool:
    """Kill one of the server's processes, so that it restarts all of them; False when *pid* is not its child."""
    if not send(server, pid, signal.SIGKILL):
        return False
    until = time.monotonic() + 30
    time.sleep(0.05)
    while not server.status().is_running and time.monotonic() < until:
        time.sleep(0.05)
    return True
