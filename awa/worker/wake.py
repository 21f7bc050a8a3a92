"""Sleeping on sockets in a way that another thread, or a signal handler, can end."""

from __future__ import annotations

import contextlib
import select
import socket


class Wake:
    """A sleeper's end of a socket pair; :meth:`ring` works from anywhere, before the sleep too."""

    def __init__(self) -> None:
        self._out, self._in = socket.socketpair()
        self._out.setblocking(False)
        self._in.setblocking(False)

    def ring(self) -> None:
        """End the sleep that is going on, or the next."""
        # a full buffer has rung already; a closed one has no sleeper
        with contextlib.suppress(OSError):
            self._in.send(b"x")

    def sleep(self, seconds: float, *files: int) -> None:
        """Sleep until rung, until one of *files* can be read, or the time has passed."""
        if seconds <= 0:
            return
        poll = select.poll()  # not select(): an application may have more than 1,024 files open
        for file in (self._out.fileno(), *files):
            poll.register(file, select.POLLIN)
        poll.poll(seconds * 1000)
        with contextlib.suppress(OSError):
            while self._out.recv(4096):
                pass

    def close(self) -> None:
        """Close both ends."""
        self._in.close()
        self._out.close()
