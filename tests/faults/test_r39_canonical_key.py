"""R39: equal mappings built in another order gave two jobs, and different ones whose parts ran together gave one.

Now a key is a hash of canonical text: the same in every process, and any difference is one.
"""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations
from typing import Any

import psycopg

import awa
from awa import NewJob, Unique

DEEP = {"c": [{"z": 1, "a": {"y": 2, "b": [1, {"q": None, "p": 0.5}]}}], "ž": "é", "a": {"2": True, "10": False}}

PROCESS = """
import os, sys
import awa

def built_anew(value, order):
    if isinstance(value, dict):
        names = {name for name in value}  # in the order of their hashes, another in each process
        return {name: built_anew(value[name], order) for name in (names if order else reversed(list(names)))}
    return [built_anew(one, order) for one in value] if isinstance(value, list) else value

client = awa.Client(os.environ["DATABASE"])
deep = eval(sys.argv[1])
for order in (0, 1):
    job = client.insert(built_anew(deep, order), kind="k", unique=awa.Unique())
    print(job.id, job.is_new, hash("a") % 1000)
"""


def test_equal_content_is_one_job_in_two_processes_with_other_hash_seeds(
    database: str, conn: psycopg.Connection[Any]
) -> None:
    """Guard: canonical JSON sorts the names at every depth; the hash is BLAKE3, not Python's."""
    lines: list[list[str]] = []
    for seed in ("1", "4711"):
        ran = subprocess.run(
            [sys.executable, "-c", PROCESS, repr(DEEP)],
            env={"DATABASE": database, "PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        lines += [line.split() for line in ran.stdout.splitlines()]
    assert len({line[0] for line in lines}) == 1
    assert [line[1] for line in lines] == ["True", "False", "False", "False"]
    assert len({line[2] for line in lines}) == 2  # their hashes did differ
    assert conn.execute("SELECT key FROM awa.job_uniques").fetchall() == [(awa.unique_key("k", DEEP),)]


def test_any_difference_gives_two_jobs(client: awa.Client) -> None:
    """Guard: parts are set apart by a zero byte, and text is not normalised."""

    def deep(change: Any) -> dict[str, Any]:
        return {"c": [{"z": 1, "a": {"y": 2, "b": [1, {"q": change, "p": 0.5}]}}]}

    args: list[dict[str, Any]] = [
        deep(value) for value in (None, 0, 0.0, -0.0, False, "", "0", [], {}, [0], 10**15, 1e15)
    ]
    composed, decomposed = "\u00e9", "e\u0301"
    args += [{"n": composed}, {"n": decomposed}, {composed: 1}, {decomposed: 1}]
    args += [{"a": "b"}, {"ab": ""}, {"a": ["b", "c"]}, {"a": ["bc"]}]
    args += [{"1": 1}, {"1": "1"}, {"l": [1, 2]}, {"l": [2, 1]}, {"l": [[1], 2]}]
    found = client.insert_many([NewJob(one, kind="k", unique=Unique()) for one in args])
    same = [(a, b) for a, b in combinations(range(len(args)), 2) if found[a].id == found[b].id]
    assert same == [] and all(one.is_new for one in found)
    # kinds and queues whose plain joins agree
    pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ("a\N{SNOWMAN}", "b"), ("a", "\N{SNOWMAN}b")]
    by_queue = Unique(by_queue=True, by_args=False)
    found = client.insert_many([NewJob({}, kind=kind, queue=queue or "q", unique=by_queue) for kind, queue in pairs])
    assert all(one.is_new for one in found)
    # and what does not matter does not
    assert not client.insert({}, kind="a", queue="bc", priority=1, tags=["t"], unique=by_queue).is_new
    assert client.insert({}, kind="a", queue="bc", unique=Unique(by_args=False)).is_new
    assert not client.insert({"x": 1}, kind="a", queue="other", unique=Unique(by_args=False)).is_new
