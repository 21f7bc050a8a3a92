"""Flask apps as users write them: the shop of examples/ with its tests and commands, and the app of the page."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from awa.embedded import Server
from tests.acceptance.run_page import read_blocks
from tests.ext.test_flask import free_port
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import WorkerProcesses

ROOT = Path(__file__).parents[2]
SHOP = ROOT / "examples" / "flask_shop"


def run_tests(directory: Path, server: Server) -> str:
    """What pytest prints for the tests in *directory*, which pass."""
    command = ["-m", "pytest", "-p", "pytest_awa", "-q", "-W", "error", str(directory)]
    command += ["-c", os.devnull, "--rootdir", str(directory), "-p", "no:cacheprovider"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"AWA_TEST_DATABASE_URL": server.url("postgres"), "AWA_EMBEDDED": "0"}
    done = subprocess.run(
        [sys.executable, *command], env=env, cwd=directory, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_shops_own_tests(server: Server) -> None:
    assert re.search(r"^4 passed", run_tests(SHOP, server), re.MULTILINE)


def test_the_app_of_the_page_and_its_test(server: Server, tmp_path: Path) -> None:
    for block in read_blocks(ROOT / "docs" / "flask.md"):
        if block.file_name:
            (tmp_path / block.file_name).write_text(block.text, encoding="utf-8")
    assert re.search(r"^2 passed", run_tests(tmp_path, server), re.MULTILINE)


@pytest.fixture
def shop(tmp_path: Path, empty_database: str, processes: WorkerProcesses) -> WorkerProcesses:
    """Processes that can run the shop on a database with nothing in it."""
    processes.module((SHOP / "shop.py").read_text(), "shop")
    processes.database = None
    return processes


@pytest.mark.slow
def test_the_commands_of_its_readme(shop: WorkerProcesses, empty_database: str) -> None:
    url = empty_database.replace("postgresql://", "postgresql+psycopg://")

    def start(*command: str) -> Any:
        return shop.start("--app", "shop", *command, program="flask", SHOP_DATABASE_URL=url)

    worker = start("awa", "worker")
    assert worker.wait(30) == 4
    assert "run `flask awa migrate`" in worker.stderr
    for command in (["create-tables"], ["awa", "migrate"]):
        assert start(*command).wait(30) == 0
    worker, port = start("awa", "worker"), free_port()
    site = start("run", "--port", str(port))
    wait_until(lambda: "Running on" in site.stderr, timeout=30)
    orders = f"http://127.0.0.1:{port}/orders"
    data = urllib.parse.urlencode({"email": "ada@example.org", "item": "a lamp"}).encode()
    with urllib.request.urlopen(orders, data=data, timeout=20) as answer:
        order = json.load(answer)["order"]

    def is_thanked() -> bool:
        with urllib.request.urlopen(f"{orders}/{order}", timeout=20) as answer:
            return bool(json.load(answer)["thanked"])

    wait_until(is_thanked, timeout=20)
    sent = re.findall(r"shop: e-mail to (.*)", worker.stderr)
    assert sent == [f"ada@example.org: Thank you for your order {order}: a lamp"]
    for process in (worker, site):
        process.signal(signal.SIGINT)
    assert worker.wait(30) == 0
    site.wait(30)
