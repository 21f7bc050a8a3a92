"""Journals: what a process did and was told, outside the database, so that it outlives process and server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson


class Journal:
    """A file that grows by lines of JSON, each in one write: what was noted stays when the process is killed."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, **facts: Any) -> None:
        """Append one line."""
        os.write(self._fd, orjson.dumps(facts) + b"\n")

    def close(self) -> None:
        os.close(self._fd)


def read(directory: Path, pattern: str) -> Iterator[dict[str, Any]]:
    """The lines of all journals of that name, file by file."""
    for path in sorted(directory.glob(pattern)):
        for line in path.read_bytes().split(b"\n"):
            if line:
                yield orjson.loads(line)
