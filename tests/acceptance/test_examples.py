"""The programs in examples/ run as they are."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def run(name: str, database: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / name],
        env=os.environ | {"AWA_DATABASE_URL": database},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_plain_script(database: str) -> None:
    first, *lines = run("plain_script.py", database)
    assert first == f"{len(EXAMPLES)} jobs inserted"
    assert len(lines) == 3
    lengths = [int(line.split()[0]) for line in lines]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == max(
        len(line) for name in EXAMPLES for line in (ROOT / "examples" / name).read_text().splitlines()
    )


def test_an_order_and_its_job_share_a_transaction(database: str) -> None:
    lines = run("transactional_enqueue.py", database)
    with psycopg.connect(database) as conn:
        orders: dict[str, int] = dict(conn.execute("SELECT customer, id FROM example_orders").fetchall())
    assert orders.keys() == {"Ada", "Eve"}
    assert lines[0] == "Bob cannot pay: no order, no e-mail"
    assert sorted(lines[1:]) == [f"to {name}: thank you for order {orders[name]}" for name in ("Ada", "Eve")]


def test_a_counter_is_exact_though_handlers_fail(database: str) -> None:
    (line,) = run("exactly_once_counter.py", database)
    # a third of them fails once before the commit
    assert line == "300 jobs, 400 attempts, counted 300"


def test_every_example_is_listed_and_can_run_again(database: str) -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]", (ROOT / "examples" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == EXAMPLES
    for _ in range(2):
        run("transactional_enqueue.py", database)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_without_tables_says_what_to_run(name: str, empty_database: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name],
        env=os.environ | {"AWA_DATABASE_URL": empty_database},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert "awa migrate" in done.stderr.splitlines()[-1]
