"""Databases for tests: cloned from a migrated template, on a server that is started when the first is wanted.

The server is the one that ``AWA_TEST_DATABASE_URL`` names, or a private one of this process. The process that started
a private one holds its lock, stops it at the end and removes its directory. When that process was killed, the next one
that starts a server does so.

    /tmp/awa-test-UID-XXXXXXXX/     or in /dev/shm, where there is plenty of it
        owner.lock                  held by the process whose server this is
        pg/                         see awa.embedded.Server
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from awa.client import Client
from awa.config import check_schema, find_database
from awa.embedded import Server, find_binaries
from awa.errors import AwaError, ConfigError, DatabaseNotFound
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from awa.testing.inline import check_client

VARIABLE = "AWA_TEST_DATABASE_URL"

SETTINGS: dict[str, str | int] = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "max_prepared_transactions": 10,
}
"""Of the private server: what is in it need not outlive it."""

PLACES = ("/dev/shm", "/tmp")
"""Where private servers are."""

ROOMY = 4 << 30
"""Bytes that the first of them must have free to be used."""

Setup = Callable[[str], object]
"""Gets the address of a new database that has awa's tables, and makes the application's own."""


@contextmanager
def database(*, schema: str = "awa", setup: Setup | None = None) -> Iterator[str]:
    """The address of a new database with awa's tables, for as long as the block lasts.

    It is the clone of a template, which is made once for each *schema* and *setup* of this process.

    Args:
        schema: The schema of awa's tables.
        setup: Called once with the template's address, to make tables and rows of the application's own in it. It must
            close the connections that it opens.

    Raises:
        ConfigError: ``AWA_TEST_DATABASE_URL`` is no address, *schema* no name, or *setup* leaves a connection open.
        DatabaseNotFound: No server answers there; or there are no PostgreSQL programs to start one.
    """
    server = _server()
    with server.clone(server.template(schema, setup)) as url:
        yield url


@contextmanager
def connected(client: Client, url: str) -> Iterator[Client]:
    """Have *client* use the database at *url* while the block lasts, wherever its own is.

    Its connections are closed at the beginning and at the end.
    """
    check_client(client)
    if not isinstance(url, str) or find_database(url, {}) is None:
        raise ConfigError(f"connected takes the address of a database, got {type(url).__name__}")
    before = client._database
    client.close()
    client._database = url
    try:
        yield client
    finally:
        client.close()
        client._database = before


# --- the server

_USERS = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend'"


class _Databases:
    """Makes and drops databases on one server; their names are unlike any other process's."""

    def __init__(self, url: Callable[[str | None], str]) -> None:
        self._url = url
        self._prefix = f"awa_test_{os.getpid()}_{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._templates: dict[tuple[str, Setup | None], str] = {}  # guarded by _lock

    def template(self, schema: str, setup: Setup | None) -> str:
        """The name of the database to clone; made when it is not there yet."""
        check_schema(schema)
        with self._lock:
            found = self._templates.get((schema, setup))
            if found is None:
                found = self._create("template0")
                try:
                    with psycopg.connect(self._url(found), autocommit=True) as conn:
                        migrate(conn, Schema(schema))
                    if setup is not None:
                        setup(self._url(found))
                        self._check_unused(found)
                except BaseException:
                    self._drop(found)
                    raise
                self._templates[schema, setup] = found
            return found

    def _check_unused(self, name: str) -> None:
        """A database that somebody uses cannot be cloned; the server would try for five seconds, each time."""
        until = time.monotonic() + 2.0  # backends end a moment after their connections
        with psycopg.connect(self._url(None), autocommit=True) as conn:
            while conn.execute(_USERS, [name]).fetchone() != (0,):
                if time.monotonic() > until:
                    raise ConfigError(
                        "setup has left connections to its database open: close all of them, those of pools too "
                        "(engine.dispose()), or no test gets a copy"
                    )
                time.sleep(0.01)

    @contextmanager
    def clone(self, template: str) -> Iterator[str]:
        name, pid = self._create(template), os.getpid()
        try:
            yield self._url(name)
        finally:
            if pid == os.getpid():  # a forked child leaves the block too
                self._drop(name)

    def drop_templates(self) -> None:
        with self._lock:
            for name in self._templates.values():
                with suppress(psycopg.Error):
                    self._drop(name)
            self._templates.clear()

    def _create(self, template: str) -> str:
        name = f"{self._prefix}_{next(self._numbers)}"
        try:
            self._execute("CREATE DATABASE {name} TEMPLATE {template}", name=name, template=template)
        except psycopg.errors.InsufficientPrivilege as error:
            raise DatabaseNotFound(f"the role of {VARIABLE} may create no database: ALTER ROLE ... CREATEDB") from error
        return name

    def _drop(self, name: str) -> None:
        self._execute("DROP DATABASE IF EXISTS {name} WITH (FORCE)", name=name)

    def _execute(self, statement: str, **names: str) -> None:
        try:
            with psycopg.connect(self._url(None), autocommit=True, connect_timeout=10) as conn:
                quoted = {key: sql.Identifier(name) for key, name in names.items()}
                conn.execute(sql.SQL(statement).format(**quoted))
        except psycopg.OperationalError as error:
            if error.sqlstate is not None:
                raise
            raise DatabaseNotFound(f"the server for tests does not answer: {error}") from error


_starting = threading.Lock()
_found: tuple[int, str | None, _Databases] | None = None  # guarded by _starting
_private: _Private | None = None  # guarded by _starting


def _server() -> _Databases:
    """The server of this process; a forked child has one of its own."""
    global _found, _private
    named = os.environ.get(VARIABLE, "").strip() or None
    with _starting:
        if _found is not None and _found[:2] == (os.getpid(), named):
            return _found[2]
        if named is not None:
            address = find_database(named, {})
            assert address is not None
            base = address.conninfo
            databases = _Databases(lambda name: base if name is None else _with_name(base, name))
        else:
            if _private is None or _private.pid != os.getpid():
                _private = _Private()
            own = _private.server
            databases = _Databases(lambda name: own.url("postgres" if name is None else name))
        _found = os.getpid(), named, databases
        return databases


def _with_name(address: str, name: str) -> str:
    """The address of another database of the same server, as a URL if that is one: other libraries read only those."""
    if "://" in address and "dbname=" not in address:
        return re.sub(r"\A(\w+://[^/?]*)[^?]*", rf"\1/{name}", address)
    return make_conninfo(address, dbname=name)


def stop_server() -> None:
    """Drop the templates, and stop the private server if this process has one; the next database starts it again."""
    global _found, _private
    with _starting:
        found, private = _found, _private
        if found is not None and found[0] == os.getpid():
            _found = None
            if private is None:
                found[2].drop_templates()
        if private is not None and private.pid == os.getpid():
            _private = None
            private.stop()


class _Private:
    """A server of this process's own, in a temporary directory."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        _remove_abandoned()
        lock = None
        while lock is None:  # else another took it for abandoned
            self._directory = Path(tempfile.mkdtemp(prefix=f"awa-test-{os.getuid()}-", dir=_choose_place()))
            lock = _lock(self._directory)
        self._lock: int | None = lock
        self._directory.chmod(0o755)
        self.server = Server(find_binaries(), self._directory / "pg", settings=SETTINGS)
        atexit.register(self._at_exit)
        try:
            self.server.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and remove what it leaves."""
        atexit.unregister(self._at_exit)
        _remove(self.server, self._directory)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _at_exit(self) -> None:
        if self.pid == os.getpid():
            with suppress(AwaError, OSError):
                self.stop()


def _lock(directory: Path) -> int | None:
    """An open file that holds the directory's lock; None when another process does."""
    lock = os.open(directory / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _choose_place() -> str:
    """Memory where there is plenty of it: to clone a database is to write 400 files.

    Not TMPDIR, which may be too long for a socket, or closed to the user that the server of root runs as.
    """
    memory = PLACES[0]
    with suppress(OSError):
        mounted = os.statvfs(memory)
        is_roomy = mounted.f_bavail * mounted.f_frsize >= ROOMY
        if is_roomy and os.access(memory, os.W_OK | os.X_OK) and not mounted.f_flag & os.ST_NOEXEC:
            return memory
    return PLACES[1]


def _remove_abandoned() -> None:
    """End the servers, and remove the directories, of processes of this user that were killed."""
    me = os.getuid()
    for directory in [path for place in PLACES for path in Path(place).glob(f"awa-test-{me}-*")]:
        with suppress(OSError, AwaError):
            found = directory.lstat()
            is_mine = stat.S_ISDIR(found.st_mode) and found.st_uid == me
            if not is_mine or not (directory / "owner.lock").exists():  # without: it is being made just now
                continue
            lock = _lock(directory)
            if lock is not None:
                try:
                    _remove(Server(find_binaries(), directory / "pg"), directory)
                finally:
                    os.close(lock)


def _remove(server: Server, directory: Path) -> None:
    try:
        server.stop("immediate", timeout=10.0)
    finally:
        sockets = server.socket_directory
        shutil.rmtree(directory, ignore_errors=True)
        if directory not in sockets.parents:
            shutil.rmtree(sockets, ignore_errors=True)
