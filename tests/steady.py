"""Runs pytest; when up to three tests fail, runs those once more, alone.

``python -m tests.steady OPTIONS -- PATHS``. Many tests start processes and servers and stop them in the middle; on a
small machine, beside others of their kind, one in thousands now and then waits for too short a time. One that failed
among others and passes alone is told as unsteady, here and in the file :data:`TOLD`, which ``make`` shows last: it is a
bug to look for, in the test or in awa. Whatever fails alone as well, and more than three, fail the run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MOST = 3
"""Failed tests that are run again."""

TOLD = Path("build/unsteady.txt")
"""Where they are told, a line for each run of all tests that had any."""


class Failed:
    """A plugin that notes which tests failed, in whichever process."""

    def __init__(self) -> None:
        self.nodes: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.nodes:
            self.nodes.append(report.nodeid)


def main(arguments: list[str]) -> int:
    options, paths = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        options, paths = arguments[:at], arguments[at + 1 :]
    failed = Failed()
    code = pytest.main([*options, *paths], plugins=[failed])
    if code != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed.nodes) <= MOST:
        return code
    print(f"\nAgain, alone: {' '.join(failed.nodes)}", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", *options, "-n", "0", *failed.nodes], check=False)
    if again.returncode == 0:
        told = f"UNSTEADY, failed among others and passed alone: {' '.join(failed.nodes)}\n"
        TOLD.parent.mkdir(exist_ok=True)
        with TOLD.open("a") as file:
            file.write(told)
        print(told, end="", flush=True)
    return again.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
