"""Ends the servers and removes their files when the run ends, however that ends.

It outlives the run by the time that takes: a pipe from the run, its standard input, tells it. ``keep`` on the pipe
leaves the files.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from awa.embedded import Binaries
from tests.chaos.cluster import directories
from tests.chaos.server import make_server


def main(directory: Path, bin_dir: Path, version: str) -> None:
    said = sys.stdin.read()  # up to the end of the run
    for server in (make_server(path, Binaries(bin_dir, version, "the run")) for path in directories(directory)):
        server.stop("fast" if said == "keep" else "immediate")
    if said != "keep":
        shutil.rmtree(directory, onerror=lambda *_: None)  # a copy that lost its server may still be ending
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
