"""The typed face of the core is the module's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_the_stub_describes_the_module() -> None:
    pytest.importorskip("mypy")
    root = Path(__file__).parent.parent.parent
    checked = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "awa._core"], cwd=root, capture_output=True, text=True, timeout=300
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
