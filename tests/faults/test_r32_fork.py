"""R32: processes forked from one that had used its client spoke on their parent's connections.

Now a child drops what it inherited without touching the sockets, and opens connections of its own at first use; also
with a worker running in the parent, and with multiprocessing's fork.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import psycopg

from tests.fixtures.db import wait_until
from tests.fixtures.jobs import count

SCRIPT = """
import multiprocessing, sys
import awa

client = awa.Client(sys.argv[1])

@client.task()
def work() -> None: ...

def produce(who):
    for n in range(100):
        client.insert({"who": who}, kind="theirs", queue="q")
    client.close()

if __name__ == "__main__":
    client.insert(work.bind())
    context = multiprocessing.get_context("fork")
    with client.worker(threads=2):
        children = [context.Process(target=produce, args=[f"child {n}"]) for n in range(4)]
        for child in children:
            child.start()
        produce("parent")
        for child in children:
            child.join(30)
        jobs = [client.insert(work.bind()) for _ in range(20)]
        for _ in range(1000):
            if all(job.get().state == "completed" for job in jobs):
                break
            multiprocessing.connection.wait([], 0.01)
    client.close()
    assert [child.exitcode for child in children] == [0] * 4, children
"""


def test_four_children_and_the_parent_insert_at_once_while_a_worker_runs(
    database: str, conn: psycopg.Connection[Any]
) -> None:
    script = SCRIPT.replace("import multiprocessing, sys", "import multiprocessing, multiprocessing.connection, sys")
    done = subprocess.run(
        [sys.executable, "-c", script, database], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    for who in ("parent", "child 0", "child 1", "child 2", "child 3"):
        assert count(conn, "SELECT count(*) FROM awa.jobs WHERE args ->> 'who' = %s", who) == 100
    assert count(conn, "SELECT count(*) FROM awa.gone_runtimes") == 0
    wait_until(lambda: count(conn, "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'awa %%'") == 0)
