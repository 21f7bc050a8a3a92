"""``python -m benchmarks.repetition``: one repetition in a process of its own; JSON goes in (its plan) and out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from types import FrameType

from benchmarks.processes import ROOT, STOPPING, clean_environment
from benchmarks.record import BenchmarkError, Plan, Result


def measure(plan: Plan, *, timeout: float) -> list[Result]:
    """Do one repetition in a fresh process.

    Args:
        timeout: Seconds after which it is ended, with all that it started.

    Raises:
        BenchmarkError: It failed; the message has its reason.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.repetition"],
        cwd=ROOT,
        env=clean_environment(),
        stdin=subprocess.PIPE,  # not an argument: an address may hold a password
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that what it started can be ended with it, and Ctrl-C is ours to pass on
    )
    try:
        said, complaint = process.communicate(json.dumps(asdict(plan)), timeout=timeout)
    except BaseException as error:
        _end(process)
        if isinstance(error, subprocess.TimeoutExpired):
            raise BenchmarkError(f"not done after {timeout:g} s") from None
        raise
    if process.returncode != 0:
        raise BenchmarkError(complaint.strip() or f"its process ended with exit code {process.returncode}")
    return [Result(**fields) for fields in json.loads(said)]


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=STOPPING)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # through every `with`, which end what was started


def main() -> int:
    """Read the plan, measure, print."""
    from benchmarks.scenarios import SCENARIOS

    signal.signal(signal.SIGTERM, _leave)
    plan = Plan(**json.load(sys.stdin))
    try:
        results = SCENARIOS[plan.scenario].run(plan)
    except BenchmarkError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps([asdict(result) for result in results]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
