"""Ends the server and removes its files when the run ends, however it ends: ``python -m tests.chaos.keeper DIR PG``.

It outlives the run by the time that takes: a pipe from the run, its standard input, tells it. ``keep`` on the pipe
leaves the files.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.chaos.server import make_server


def main(directory: Path, pg: str) -> None:
    said = sys.stdin.read()  # up to the end of the run
    make_server(directory, pg).stop("fast" if said == "keep" else "immediate")
    if said != "keep":
        shutil.rmtree(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
