"""Ends the server and removes its files when the run ends, however that ends.

It outlives the run by the time that takes: a pipe from the run, its standard input, tells it. ``keep`` on the pipe
leaves the files.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from awa.embedded import Binaries
from tests.chaos.server import make_server


def main(directory: Path, bin_dir: Path, version: str) -> None:
    said = sys.stdin.read()  # up to the end of the run
    make_server(directory, Binaries(bin_dir, version, "the run")).stop("fast" if said == "keep" else "immediate")
    if said != "keep":
        shutil.rmtree(directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
