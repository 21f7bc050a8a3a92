"""What the run of all tests does when some fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.steady import MOST

ROOT = Path(__file__).parents[2]

FIRST_TIME_ONLY = """
from pathlib import Path

def test_it():
    seen = Path(__file__ + ".seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the first time")
"""


def run(directory: Path, **files: str) -> tuple[int, str]:
    for name, text in files.items():
        directory.joinpath(f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "tests.steady", "-q", "--", "."]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout


def test_what_passes_passes(tmp_path: Path) -> None:
    code, said = run(tmp_path, good="def test_it(): pass")
    assert code == 0 and "Again" not in said


def test_one_that_passes_alone_is_told_and_passes(tmp_path: Path) -> None:
    code, said = run(tmp_path, good="def test_it(): pass", once=FIRST_TIME_ONLY)
    assert code == 0
    [told] = tmp_path.joinpath("build/unsteady.txt").read_text().splitlines()
    assert told.startswith("UNSTEADY") and told.endswith("test_once.py::test_it") and told in said


def test_one_that_fails_alone_too_fails_the_run(tmp_path: Path) -> None:
    code, said = run(tmp_path, bad="def test_it(): assert 0", once=FIRST_TIME_ONLY)
    assert code == 1 and "UNSTEADY" not in said


def test_many_are_not_tried_again(tmp_path: Path) -> None:
    code, said = run(tmp_path, **{f"once{n}": FIRST_TIME_ONLY for n in range(MOST + 1)})
    assert code == 1 and "Again" not in said


def test_what_cannot_run_fails(tmp_path: Path) -> None:
    code, said = run(tmp_path, broken="import nothing_of_that_name")
    assert code != 0 and "UNSTEADY" not in said
