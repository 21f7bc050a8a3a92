"""The servers of a run: a primary, and a synchronous standby that takes over when the primary is lost.

The one that was lost is made anew, as the standby of the other. A standby goes through

    nothing ──> copied from the running primary ──> following ──> waited for by every commit

A commit waits only while there is somebody to wait for: the primary's ``synchronous_standby_names`` is set once the
standby streams. Asynchronous commits wait for nobody, and those of the last moments are lost with their primary.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from awa.embedded import Binaries
from tests.chaos.plan import ROOT
from tests.chaos.server import connect, make_server, send

STANDBY = "standby"
"""What a standby calls itself."""

AWAY = 20.0
"""Seconds that commits wait for a standby that does not stream before it is given up and made anew."""

Stage = Literal["nothing", "copied", "following", "waited for"]


def directories(directory: Path) -> list[Path]:
    """Of the servers of the run in *directory*."""
    return [directory / "pg-0", directory / "pg-1"]


def gateway(directory: Path) -> Path:
    """A path that leads to the primary's socket, whichever server that is, of the run in *directory*."""
    return directory / "gateway"


class Cluster:
    """The servers.

    Args:
        directory: Of the run.
        has_standby: Whether there are two.
    """

    def __init__(self, directory: Path, binaries: Binaries, *, has_standby: bool) -> None:
        first, second = (make_server(path, binaries) for path in directories(directory))
        self.primary = first
        self.other = second
        self.has_standby = has_standby
        self.stage: Stage = "nothing"
        self._directory = directory
        self._servers = [first, second] if has_standby else [first]
        self._binaries = binaries
        self._copy: subprocess.Popen[bytes] | None = None
        self._copy_log = directory / "copy.log"
        self._streamed_at = 0.0
        self._frozen: int | None = None

    def start(self) -> None:
        """Start the primary."""
        self.primary.start()
        self._point()

    @property
    def url(self) -> str:
        """The database's address, wherever the primary is."""
        if not self.has_standby:
            return self.primary.url()
        hosts = ",".join(str(server.socket_directory) for server in self._servers)
        return make_conninfo(self._servers[0].url(), host=hosts, target_session_attrs="read-write")

    def _point(self) -> None:
        new = self._directory / "gateway.new"
        new.symlink_to(self.primary.socket_directory)
        new.replace(gateway(self._directory))

    # --- the standby

    def tend(self) -> bool:
        """Bring the standby one stage further, or see that it still streams; returns whether it is new."""
        if not self.has_standby:
            return False
        match self.stage:
            case "nothing":
                self._begin_copy()
            case "copied":
                self._end_copy()
            case "following":
                return self._streams() and self._wait_for_it()
            case "waited for":
                if self._streams():
                    self._streamed_at = time.monotonic()
                elif time.monotonic() > self._streamed_at + AWAY:
                    self.dismiss()
        return False

    def _begin_copy(self) -> None:
        owner = self.primary.data.stat()
        shutil.rmtree(self.other.data, ignore_errors=True)
        self.other.directory.mkdir(exist_ok=True)
        self.other.directory.chmod(0o755 if os.geteuid() == 0 else 0o700)
        self.other.data.mkdir(mode=0o700)
        found = conninfo_to_dict(self.primary.url())
        conninfo = make_conninfo(host=found["host"], port=found["port"], user=found["user"], application_name=STANDBY)
        command: list[str | Path] = [self._binaries.bin_dir / "pg_basebackup", "-D", self.other.data, "-d", conninfo]
        command += ["--wal-method=stream", "--checkpoint=fast", "--no-sync", "--write-recovery-conf"]
        other: dict[str, Any] = {}
        if os.geteuid() == 0:
            os.chown(self.other.data, owner.st_uid, owner.st_gid)
            other = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": ()}
        with self._copy_log.open("wb") as log:
            self._copy = subprocess.Popen(
                command, cwd="/", env={"LC_ALL": "C"}, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **other
            )
        self.stage = "copied"

    def _end_copy(self) -> None:
        assert self._copy is not None
        if (code := self._copy.poll()) is None:
            return
        self._copy = None
        if code == 0:
            self.other.start()
            self.stage = "following"
            self._streamed_at = time.monotonic()
        else:  # the primary crashed meanwhile
            self.stage = "nothing"

    def _streams(self) -> bool:
        with connect(self.primary) as conn:
            found = conn.execute(
                "SELECT FROM pg_stat_replication WHERE application_name = %s AND state = 'streaming'", [STANDBY]
            ).fetchone()
        return found is not None

    def _wait_for_it(self) -> bool:
        with connect(self.primary) as conn:
            conn.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{STANDBY}'")
            conn.execute("SELECT pg_reload_conf()")
        self.stage = "waited for"
        self._streamed_at = time.monotonic()
        return True

    def dismiss(self) -> None:
        """Do without a standby from now on."""
        self.thaw_standby()
        if self._copy is not None:
            self._copy.kill()
            self._copy.wait()
            self._copy = None
        if self.stage == "waited for":
            with connect(self.primary) as conn:
                conn.execute("ALTER SYSTEM RESET synchronous_standby_names")
                conn.execute("SELECT pg_reload_conf()")
        self.other.stop("immediate")
        self.stage = "nothing"

    # --- what befalls them

    def fail_over(self, mode: Literal["fast", "immediate"], pause: float) -> tuple[float, float] | None:
        """End the primary and promote the standby.

        Args:
            mode: How the primary ends: in good order, or as in a crash.
            pause: Seconds until then, from when the standby is known to have all that was acknowledged.

        Returns:
            When it began and when the new primary was there; None: no standby has all that was acknowledged.
        """
        self.thaw_standby()
        if self.stage != "waited for" or not self._has_all():
            return None
        time.sleep(pause)
        began = time.time()
        self.primary.stop(mode)
        with psycopg.connect(self.other.url(), autocommit=True) as conn:
            assert conn.execute("SELECT pg_promote(true, 60)").fetchone() == (True,)
        ended = time.time()
        self.primary, self.other = self.other, self.primary
        self.stage = "nothing"
        self._point()
        return began, ended

    def _has_all(self) -> bool:
        """Whether every acknowledged commit is on the standby, those to come too.

        Backends wait for the standby once the checkpointer has read the setting: it has when a checkpoint was asked
        for and done after a new connection has seen the setting, for the postmaster tells all it has before it starts
        another. What was acknowledged before that has been flushed here, and is compared.
        """
        with connect(self.primary) as conn:
            if conn.execute("SHOW synchronous_standby_names").fetchone() != (STANDBY,):
                return False
            conn.execute("CHECKPOINT")
            position = conn.execute("SELECT pg_current_wal_flush_lsn()").fetchone()
            assert position is not None
            until = time.monotonic() + 5.0
            while time.monotonic() < until:
                found = conn.execute(
                    "SELECT FROM pg_stat_replication WHERE application_name = %s AND state = 'streaming'"
                    " AND sync_state = 'sync' AND flush_lsn >= %s",
                    [STANDBY, position[0]],
                ).fetchone()
                if found is not None:
                    return True
                time.sleep(0.05)
        return False

    def crash_standby(self) -> bool:
        """End the standby as in a crash and start it again: commits wait. False when none is waited for."""
        if self.stage != "waited for":
            return False
        self.thaw_standby()
        self.other.stop("immediate")
        self.other.start()
        return True

    def freeze_standby(self) -> bool:
        """Stop the process that receives for the standby: commits wait. False when none is waited for."""
        if self.stage != "waited for" or self._frozen is not None:
            return False
        with psycopg.connect(self.other.url(), autocommit=True) as conn:
            found = conn.execute("SELECT pid FROM pg_stat_wal_receiver").fetchone()
        if found is None or not send(self.other, found[0], signal.SIGSTOP):
            return False
        self._frozen = found[0]
        return True

    def thaw_standby(self) -> None:
        """Let that process go on, if it is still there."""
        if self._frozen is not None:
            send(self.other, self._frozen, signal.SIGCONT)
            self._frozen = None


def can_fail_over(binaries: Binaries) -> bool:
    """Whether a standby can be made with these programs."""
    return (binaries.bin_dir / "pg_basebackup").is_file()


@contextmanager
def kept_cluster(
    binaries: Binaries, *, has_standby: bool = False, keep: bool = False
) -> Iterator[tuple[Path, Cluster]]:
    """A new directory and the primary started in it.

    A process that outlives the run ends the servers and removes their files afterwards, the files unless *keep*.
    """
    directory = Path(tempfile.mkdtemp(prefix="awa-chaos-", dir="/tmp"))
    directory.chmod(0o755)  # for root the server runs as somebody else
    keeper = subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.keeper", str(directory), str(binaries.bin_dir), binaries.version],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C is not for it
    )
    try:
        cluster = Cluster(directory, binaries, has_standby=has_standby)
        cluster.start()
        yield directory, cluster
    finally:
        keeper.communicate(b"keep" if keep else b"", timeout=90)
