"""A client that was used before the process forked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg

from tests.fixtures.jobs import count

SCRIPT = """
import os, sys, threading
import awa

client = awa.Client(sys.argv[1], pool_size=4)
client.insert({"who": "parent"}, kind="k")
stop = threading.Event()
failed = []

def insert_on():
    # the parent goes on while children appear
    while not stop.is_set():
        try:
            client.insert({"who": "on"}, kind="k")
        except BaseException as error:
            failed.append(error)

threads = [threading.Thread(target=insert_on) for _ in range(2)]
for thread in threads:
    thread.start()
children = []
for n in range(4):
    pid = os.fork()
    if pid == 0:
        try:
            for _ in range(100):
                client.insert({"who": f"child {n}"}, kind="k")
            client.close()
        except BaseException as error:
            os.write(2, f"{error!r}".encode())
            os._exit(1)
        os._exit(0)
    children.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
stop.set()
for thread in threads:
    thread.join()
for _ in range(100):
    client.insert({"who": "parent"}, kind="k")
client.close()
print(codes, failed)
sys.exit(codes != [0] * 4 or bool(failed))
"""


def test_parent_and_children_insert_side_by_side(database: str, conn: psycopg.Connection[Any], tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script, database], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for who, expected in [("parent", 101), *((f"child {n}", 100) for n in range(4))]:
        assert count(conn, "SELECT count(*) FROM awa.jobs WHERE args ->> 'who' = %s", who) == expected
    assert count(conn, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'awa client'") == 0
