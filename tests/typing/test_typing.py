"""Programs in a user's style pass ``mypy --strict``, and their mistakes are found.

A mistake is marked with ``# type: ignore[code]``; one that mypy does not find is an unused ignore, and fails.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAMS = sorted(path for path in HERE.glob("*.py") if not path.name.startswith("test_"))


@pytest.mark.slow
def test_programs_of_users_pass_and_their_mistakes_are_found(tmp_path: Path) -> None:
    checked = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"),
            *("--enable-error-code=ignore-without-code", "--config-file=", f"--cache-dir={tmp_path}"),
            *map(str, PROGRAMS),
        ],
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"no issues found in {len(PROGRAMS)} source files" in checked.stdout


def test_the_programs_have_mistakes_to_find() -> None:
    for path in PROGRAMS:
        assert path.read_text().count("# type: ignore[") >= 3, path.name
