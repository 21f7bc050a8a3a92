"""A script that spreads work over threads, and loses none of it when it is stopped in the middle.

It inserts a job for each Python file of a directory, runs them, and prints the longest lines. What is not done when the
script is stopped is still there when it is started again.

    python examples/plain_script.py [DIRECTORY]
"""

import sys
import time
from pathlib import Path

import awa

client = awa.Client(queue="example-lines")
longest: list[tuple[int, str]] = []


@client.task(retry_on=[OSError])
def measure_lines(path: str) -> None:
    """Find the longest line of one file."""
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    longest.append((max(map(len, lines), default=0), path))


def main(directory: Path) -> None:
    """Measure every Python file of *directory*."""
    files = sorted(directory.glob("*.py"))
    jobs = client.insert_many(measure_lines.bind(str(path)) for path in files)
    print(f"{len(jobs)} jobs inserted")
    with client.worker(queues=["example-lines"], threads=4):
        while not all(job.get().state.is_terminal for job in jobs):
            time.sleep(0.05)
    for length, path in sorted(longest, reverse=True)[:3]:
        print(f"{length:5} characters in a line of {Path(path).name}")
    client.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
