"""``/healthz`` and ``/readyz``: whether the loops of a worker process run, and whether it can work.

    /healthz   200 unless a loop is dead or hung, or the worker gives up: a new start would be better
    /readyz    200 when, besides, the database answers, claims succeed, the storage is trusted, and nobody stops it

So a database that is away makes a worker unready and leaves it healthy: starting it anew would not help. The answers
have no secrets and no texts of errors; whoever reaches the port may read them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from awa.config import split_address
from awa.errors import ConfigError
from awa.version import VERSION
from awa.worker.vitals import Health

log = logging.getLogger("awa.worker")

MOST_REQUESTS = 8
"""Requests that are answered at once; whoever comes while there are as many is turned away."""

REQUEST_TIMEOUT = 5.0
"""Seconds after which a request is cut off, whatever it does."""


class _Handler(BaseHTTPRequestHandler):
    server: HealthServer
    server_version = f"awa/{VERSION}"
    sys_version = ""
    timeout = REQUEST_TIMEOUT

    def do_GET(self) -> None:
        found = self.server.look().answer(self.path.partition("?")[0])
        status, body = found or (404, b'{"status": "no such page", "pages": ["/healthz", "/readyz"]}\n')
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("health: %s", format % args)


class HealthServer(ThreadingHTTPServer):
    """Answers probes in threads of its own, from :meth:`start` to :meth:`stop`.

    Args:
        address: ``HOST:PORT`` or ``:PORT``; port 0 lets the system choose, and the log says which.
        look: Gives the health to answer with; called for each request.

    Raises:
        ConfigError: Nobody can listen there.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: str, look: Callable[[], Health]) -> None:
        self.look = look
        self._open: dict[socket.socket, float] = {}  # guarded by _lock; when each request came
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        host, port = split_address(address)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, UnicodeError) as error:
            advice = "give another address"
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                advice = "another process listens there; give each worker process a port of its own"
            elif isinstance(error, OSError) and error.errno == errno.EACCES:
                advice = "this user may not; give a port above 1023"
            said = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"health_addr is {address!r}, and listening there failed ({said}): {advice}") from error

    def server_bind(self) -> None:
        """As socketserver does: without looking up this host's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def start(self) -> None:
        """Begin to answer."""
        self._thread = threading.Thread(target=self.serve_forever, args=(0.25,), name="awa-health", daemon=True)
        self._thread.start()
        log.info("health: /healthz and /readyz at %s port %d", self.server_name, self.server_port)

    def stop(self) -> None:
        """End it and free the address; before :meth:`start` too."""
        if self._thread is not None:
            self.shutdown()
        self.server_close()

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next client; with a pause when there is none to be had, for want of open files."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.1)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Turn away whoever comes while enough others are served."""
        with self._lock:
            if len(self._open) >= MOST_REQUESTS:
                return False
            self._open[request] = time.monotonic()
        return True

    def service_actions(self) -> None:
        """Cut off requests that take too long, however they trickle."""
        with self._lock:
            for request, began in self._open.items():
                if time.monotonic() - began > REQUEST_TIMEOUT:
                    with contextlib.suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close what was answered."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A prober that left, or sent nonsense, is no error of ours."""
        log.debug("health: a request failed", exc_info=True)
