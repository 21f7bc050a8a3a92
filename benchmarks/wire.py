"""A wire of some length to a server on this machine: ``python -m benchmarks.wire SOCKET DIRECTORY MILLISECONDS``.

Listens in DIRECTORY under the name of SOCKET and passes on what comes, in both directions, each piece that much later
than it came. In a process of its own, so that what is measured does not share an interpreter with it. It ends when its
standard input does, with whoever started it.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from benchmarks.processes import ROOT

_Later = SimpleQueue[tuple[float, bytes]]


def _read(source: socket.socket, later: _Later, delay: float) -> None:
    """Note when each piece is due; an empty one ends it."""
    data = b"more"
    while data:
        try:
            data = source.recv(65536)
        except OSError:
            data = b""
        later.put((time.monotonic() + delay, data))


def _write(target: socket.socket, later: _Later) -> None:
    """Send each piece when it is due. Nobody waits for this, so many are on their way at once."""
    with suppress(OSError):
        while True:
            due, data = later.get()
            if (early := due - time.monotonic()) > 0:
                time.sleep(early)
            if not data:
                target.shutdown(socket.SHUT_WR)
                return
            target.sendall(data)


def _connect(client: socket.socket, upstream: str, delay: float) -> None:
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(upstream)
    except OSError:
        client.close()
        return
    threads = []
    for source, target in ((client, server), (server, client)):
        later: _Later = SimpleQueue()
        threads.append(threading.Thread(target=_read, args=(source, later, delay), daemon=True))
        threads.append(threading.Thread(target=_write, args=(target, later), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    server.close()


def _listen(listener: socket.socket, upstream: str, delay: float) -> None:
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_connect, args=(client, upstream, delay), daemon=True).start()


def main(upstream: str, directory: str, milliseconds: str) -> None:
    """Listen until standard input ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{directory}/{Path(upstream).name}")
    listener.listen(100)
    threading.Thread(target=_listen, args=(listener, upstream, float(milliseconds) / 1000), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


@contextmanager
def longer_way(database: str, directory: Path, milliseconds: float) -> Iterator[str]:
    """The address of *database* over a wire that takes *milliseconds* each way.

    Args:
        database: An address with a socket's directory as its host.
        directory: For the wire's own socket; its path must be short.
    """
    target = conninfo_to_dict(database)
    upstream = f"{target['host']}/.s.PGSQL.{target.get('port', 5432)}"
    command = [sys.executable, "-m", "benchmarks.wire", upstream, str(directory), str(milliseconds)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as wire:
        try:
            assert wire.stdout is not None
            if wire.stdout.readline() != b"ready\n":
                raise OSError("the wire did not come up")
            yield make_conninfo(database, host=str(directory))
        finally:
            wire.kill()


if __name__ == "__main__":
    main(*sys.argv[1:])
