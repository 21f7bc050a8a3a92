"""Worker processes: started, watched, ended by their own id, and never left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.record import BenchmarkError, Plan

ROOT = Path(__file__).parents[1]
"""Where ``benchmarks`` can be imported from."""

STOPPING = 30.0
"""Seconds that a process gets to end in good order."""


def clean_environment(**settings: str) -> dict[str, str]:
    """This process's environment without settings of awa but *settings*: every run measures the same ones."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("AWA_") and key != "DATABASE_URL"}
    return kept | settings


class WorkerProcess:
    """``python -m awa.worker`` over the tasks of the benchmarks, between entering and :meth:`stop`."""

    def __init__(
        self,
        plan: Plan,
        settings: Mapping[str, str] | None = None,
        *,
        application: str = "benchmarks.scenarios.tasks:client",
    ) -> None:
        self._command = [sys.executable, "-m", "awa.worker", application]
        self._command += ["--threads", str(plan.threads), "--log-level", "warning", "--shutdown-timeout", "5"]
        self._environment = clean_environment(AWA_DATABASE_URL=plan.database, **(settings or {}))
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command, cwd=ROOT, env=self._environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def check(self) -> None:
        """Raise BenchmarkError when the worker has ended by itself."""
        if (code := self._process.poll()) is not None:
            raise BenchmarkError(f"the worker ended with exit code {code}:\n{self._said()}")

    def rss_mb(self) -> float | None:
        """Megabytes of memory that are the worker's own, not the system's or a file's; None where nobody tells."""
        try:
            status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        return round(int(found[1]) / 1024, 1) if found else None

    def stop(self) -> None:
        """End the worker in good order.

        Raises:
            BenchmarkError: It had ended before, does not end, or reports a failure.
        """
        self.check()
        self._process.terminate()
        try:
            code = self._process.wait(STOPPING)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"the worker has not ended after {STOPPING:g} s:\n{self._said()}") from None
        if code != 0 or self._said():
            raise BenchmarkError(f"the worker ended with exit code {code} and said:\n{self._said()}")

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-4000:].strip()
