"""Runs pytest; when up to three tests fail, runs those once more, alone.

``python -m tests.steady OPTIONS -- PATHS``. Many tests start processes and servers and stop them in the middle; on a
small machine, beside others of their kind, one in thousands now and then waits for too short a time. One that failed
among others and passes alone is told in the last lines as unsteady, which is a bug to look for, in the test or in awa;
whatever fails alone as well, and more than three, fail the run.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

MOST = 3


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
        print(f"UNSTEADY, failed among others and passed alone: {' '.join(failed.nodes)}", flush=True)
    return again.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
