"""Connections of the library's own: how they are opened, how long they wait, and what a fork leaves of them.

A forked child never speaks on what it inherited. Its copies of the sockets are replaced by ``/dev/null``: nothing that
it does to a connection, not even closing it, reaches the server, and when its parent ends, the server sees that.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg import Connection
from psycopg.pq import Conninfo
from psycopg.rows import TupleRow

from awa.errors import DatabaseNotFound
from awa.storage import backends
from awa.storage.backends import Backend
from awa.storage.pooler import is_pooled, settle_in

T = TypeVar("T")

# What the network does not tell: a server that vanished is noticed within about half a minute.
_DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}


ANSWER_WITHIN = 60.0
"""Seconds that a statement of the library's own may take. A peer that acknowledges what it gets and never answers (a
frozen proxy or server) looks alive to the network."""

TRIES = 8
"""How often a statement of the library's own is sent that met a deadlock or a serialization failure."""


class OwnConnection(Connection[TupleRow]):
    """A connection that does not wait for ever."""

    answer_within: float | None = None
    """Seconds that the server may take to answer; then the connection counts as lost. None: as long as it takes."""
    is_deaf = False
    """It was given up so."""
    backend: Backend | None = None
    """The server's process; None behind a pooler, where there is none of its own."""

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **options: Any) -> T:
        """What psycopg does whenever it waits for the server."""
        if self.answer_within is None:
            return super().wait(gen, *args, **options)
        return super().wait(self._bounded(gen, self.answer_within), *args, **options)

    def _bounded(self, gen: Generator[Any, Any, T], seconds: float) -> Generator[Any, Any, T]:
        until = time.monotonic() + seconds
        try:
            state = next(gen)
            while True:
                ready = yield state  # nothing is ready: asked again ten times a second
                if not ready and time.monotonic() > until:
                    gen.close()
                    self.is_deaf = True
                    _given_up.add(self)
                    self.pgconn.finish()
                    raise psycopg.OperationalError(
                        f"the server has not answered for {seconds:g} s: the connection is given up, and what became "
                        "of the statement is unknown"
                    )
                state = gen.send(ready)
        except StopIteration as end:
            answer: T = end.value
            return answer


class GivenUp:
    """The server's processes of connections that were given up.

    Each may wait on for what it waited for, a lock perhaps or a synchronous standby, and does not notice that nobody
    is there any more. So the next connection ends it; otherwise they would add up, one for every try.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._backends: list[tuple[_Server, Backend]] = []  # guarded by _lock

    def add(self, connection: OwnConnection) -> None:
        """Note that *connection* is given up, which is still open here."""
        if connection.backend is not None:
            with self._lock:
                self._backends = [*self._backends[-100:], (_server_of(connection), connection.backend)]

    def forget(self) -> None:
        """In a forked child: they are the parent's to end."""
        self._lock = threading.Lock()
        self._backends = []

    def end(self, connection: OwnConnection) -> None:
        """End those of the server of *connection*."""
        if not self._backends:
            return
        here = _server_of(connection)
        with self._lock:
            found = [backend for server, backend in self._backends if server == here]
            self._backends = [(server, backend) for server, backend in self._backends if server != here]
        for backend in found:
            with suppress(psycopg.errors.InsufficientPrivilege):  # a role that has become another one
                asked = {"pid": backend.pid, "started_at": backend.started_at, "last": None}
            connection.execute(backends.END, asked)


_Server = tuple[str, int, str]


def _server_of(connection: Connection[Any]) -> _Server:
    return connection.info.host, connection.info.port, connection.info.user


_given_up = GivenUp()


def begin(connection: OwnConnection, conninfo: str) -> None:
    """What every connection of the library's own begins with."""
    _open.add(connection)
    settle_in(connection, conninfo)
    _given_up.end(connection)
    backend = backends.backend_of(connection)
    # behind a pooler the process that answered just now is somebody else's in a moment, and not to be ended
    if backend is not None and not is_pooled(connection) and backend.pid == connection.info.backend_pid:
        connection.backend = backend


@contextmanager
def patiently(conn: Connection[Any]) -> Iterator[None]:
    """A block in which statements may take as long as they take: they read everything, or rewrite it."""
    if not isinstance(conn, OwnConnection):
        yield
        return
    before, conn.answer_within = conn.answer_within, None
    try:
        yield
    finally:
        conn.answer_within = before


def connect(
    conninfo: str, *, name: str, answer_within: float | None = ANSWER_WITHIN, writes: bool = True
) -> OwnConnection:
    """A connection of the library's own: autocommit, READ COMMITTED; see :mod:`awa.storage.pooler` for the latter.

    Args:
        name: What it is for, as ``pg_stat_activity`` shows it after ``awa``, unless the user has a name of his own.
        answer_within: Seconds that a statement may take; None: as long as it takes.
        writes: Whether a server that refuses to write is refused.

    Raises:
        DatabaseNotFound: The server does not answer, does not let us in, or is read-only; the cause is psycopg's error.
    """
    try:
        connection = OwnConnection.connect(conninfo, autocommit=True, **with_defaults(conninfo, name))
    except psycopg.OperationalError as error:
        said = " ".join(str(error).split())
        raise DatabaseNotFound(f"no connection to the database{_where(conninfo)}: {said}: {_advice(said)}") from error
    connection.answer_within = answer_within
    try:
        if writes and is_read_only(connection):
            raise read_only(connection)
        begin(connection, conninfo)
    except psycopg.errors.QueryCanceled as error:
        connection.close()
        raise DatabaseNotFound(
            f"the server{_where(conninfo)} cancelled the first statement ({error.diag.message_primary}): the"
            " statement_timeout of this role, of the database or of PGOPTIONS is too short, or the server is too busy"
        ) from error
    except BaseException:
        connection.close()
        raise
    return connection


def with_defaults(conninfo: str, name: str) -> dict[str, Any]:
    """Our defaults, as far as neither *conninfo* nor libpq's environment says something else."""
    said = psycopg.conninfo.conninfo_to_dict(conninfo)
    defaults = {option.keyword.decode(): option.val for option in Conninfo.get_defaults() if option.val is not None}
    ours: dict[str, Any] = {**_DEFAULTS, "fallback_application_name": f"awa {name}"}
    ours = {key: value for key, value in ours.items() if key not in said and key not in defaults}
    # libpq has a default of its own here, which takes whichever host answers first
    is_said = "target_session_attrs" in said or os.environ.get("PGTARGETSESSIONATTRS")
    if has_several_hosts(conninfo) and not is_said:
        ours["target_session_attrs"] = "read-write"
    return ours


def has_several_hosts(conninfo: str) -> bool:
    said = psycopg.conninfo.conninfo_to_dict(conninfo)
    hosts = [said.get(key) or os.environ.get(f"PG{key.upper()}") for key in ("host", "hostaddr")]
    return any("," in str(host) for host in hosts if host)


def is_read_only(conn: Connection[Any]) -> bool:
    """Whether the server has told that it refuses to write here: it tells at the beginning, and of every change."""
    return "on" in (
        conn.info.parameter_status("in_hot_standby"),
        conn.info.parameter_status("default_transaction_read_only"),
    )


def read_only(conn: Connection[Any]) -> DatabaseNotFound:
    """What to say when the server of *conn* refuses to write."""
    why = "is a standby" if conn.info.parameter_status("in_hot_standby") == "on" else "refuses to write"
    return DatabaseNotFound(
        f"the server{_where(conn.info.dsn)} {why} (it is read-only): name the primary, or all hosts with a comma "
        "between them and whichever can be written to is found; or see its default_transaction_read_only"
    )


def repeated(call: Callable[[], T]) -> T:
    """What *call* gives; it is made again when it met a deadlock or a serialization failure, which undid all of it.

    Args:
        call: Runs statements of the library's own in a transaction of their own, and uses nothing up.
    """
    for attempt in range(1, TRIES):
        try:
            return call()
        except (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected):
            time.sleep(random.uniform(0.0, 0.01 * 2**attempt))
    return call()


def _where(conninfo: str) -> str:
    shown = psycopg.conninfo.conninfo_to_dict(conninfo)
    parts = [f"{key} {shown[key]}" for key in ("dbname", "host", "hostaddr", "port", "user", "service") if key in shown]
    return f" ({', '.join(parts)})" if parts else ""


def _advice(said: str) -> str:
    """The next step after what libpq said; the server's own sentences come in its language, then it is the last."""
    for words, advice in _ADVICE:
        if words in said:
            return advice
    return "see that the server runs there and lets this user in"


_ADVICE = (
    ("session is read-only", "none of the hosts can be written to: promote one, or see default_transaction_read_only"),
    ("is in hot standby mode", "name the primary too, or promote this server"),
    ("on that socket", "start the server; `awa db start` starts awa's private one"),
    ("starting up", "try again in a moment"),
    ("not yet accepting connections", "try again in a moment"),
    ("shutting down", "start the server again"),
    ("too many clients", "raise max_connections of the server, or lower threads and pool_size"),
    ("remaining connection slots", "raise max_connections of the server, or lower threads and pool_size"),
    ("no pg_hba.conf entry", "let the server's pg_hba.conf admit this user from here"),
    (
        "unsupported startup parameter",
        "leave it out, or name it in ignore_startup_parameters of pgbouncer",
    ),
    ("password", "check the user and the password; it can also be in PGPASSWORD or ~/.pgpass"),
    ('role "', "check the user, or create it with createuser"),
    ('database "', "check the database's name, or create it with createdb"),
    ("could not translate host name", "check the host's name"),
    ("Name or service not known", "check the host's name"),
)


# --- forks

_open: weakref.WeakSet[OwnConnection] = weakref.WeakSet()
"""Connections that a fork would inherit."""


def _drop_inherited() -> None:
    """In a forked child, before it runs anything else."""
    null = os.open(os.devnull, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    for connection in list(_open):
        if not connection.closed:
            os.dup2(null, connection.pgconn.socket, inheritable=False)
    os.close(null)
    _open.clear()
    _given_up.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_drop_inherited)
