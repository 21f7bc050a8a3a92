"""The demo: what it shows, what it leaves alone, and how it ends when it is stopped."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from awa import demo
from awa.cli import main
from awa.errors import AwaError
from tests.fixtures.db import wait_until

Demo = subprocess.Popen[bytes]


@contextmanager
def started(database: str, output: int) -> Iterator[Demo]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "awa", "demo", "--database", database],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def read_until(output: int, pattern: str) -> str:
    """What the demo prints up to *pattern*, or to its end."""
    text = ""
    while not re.search(pattern, text):
        try:
            more = os.read(output, 65536)
        except OSError:  # a terminal ends so when the last process has closed it
            more = b""
        if not more:
            break
        text += more.decode()
    return text


def worker_pids(text: str) -> list[int]:
    found = re.search(r"processes (\d+) and (\d+),", text)
    assert found, text
    return [int(pid) for pid in found.groups()]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def count(conn: psycopg.Connection[Any], query: str) -> int:
    row = conn.execute(query).fetchone()
    assert row is not None
    return int(row[0])


SCHEMAS = "SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'"


@pytest.mark.slow
def test_it_loses_nothing_and_can_run_again_after_ctrl_c(database: str, conn: psycopg.Connection[Any]) -> None:
    output, end = os.pipe()
    with started(database, end) as process:
        os.close(end)
        text = read_until(output, r"running +\d")  # on a pipe it prints a line at each quarter
        process.send_signal(signal.SIGINT)
        text += read_until(output, r"\Z(?!)")
        assert process.wait(15) == 1
    os.close(output)
    assert text.rstrip().endswith("Aborted!")
    assert all(is_gone(pid) for pid in worker_pids(text))

    output, end = pty.openpty()
    with started(database, end) as process:
        os.close(end)
        text = read_until(output, r"\Z(?!)")
        assert process.wait(15) == 0, text
    os.close(output)
    files = demo.find_files(Path(sysconfig.get_path("stdlib")))
    assert len(files) > 100
    assert f"{len(files)}/{len(files)}" in text  # on a terminal it draws a bar
    assert re.search(r"killed +process \d+ by SIGKILL", text)
    rescued = re.search(r"rescued +(\d+) attempts", text)
    assert rescued, text
    assert f"{len(files):,} files found, {len(files):,} rows stored" in text
    assert all(is_gone(pid) for pid in worker_pids(text))
    assert {name for (name,) in conn.execute(SCHEMAS)} == {"public", "awa", "awa_demo", "awa_demo_app"}
    assert count(conn, "SELECT count(DISTINCT path) FROM awa_demo_app.files") == len(files)
    assert count(conn, "SELECT count(*) FROM awa_demo_app.files WHERE attempt = 2") == int(rescued[1])
    assert count(conn, "SELECT count(*) FROM awa.jobs") == 0, "the user's own awa is not touched"


@pytest.mark.slow
def test_its_workers_end_when_it_is_killed(database: str) -> None:
    output, end = os.pipe()
    with started(database, end) as process:
        os.close(end)
        pids = worker_pids(read_until(output, r"running +\d"))
        process.kill()
        wait_until(lambda: all(is_gone(pid) for pid in pids), timeout=15)
    os.close(output)


def test_a_schema_that_it_did_not_make_stays_untouched(database: str, conn: psycopg.Connection[Any]) -> None:
    conn.execute("CREATE SCHEMA awa_demo_app")
    conn.execute("CREATE TABLE awa_demo_app.files (mine text)")
    done = CliRunner().invoke(main, ["demo", "--database", database])
    assert done.exit_code == 1
    assert "schema awa_demo_app that the demo did not make" in done.stderr
    assert count(conn, "SELECT count(*) FROM awa_demo_app.files") == 0


def test_two_at_once_in_one_database_are_refused(database: str, conn: psycopg.Connection[Any]) -> None:
    conn.execute("SELECT pg_advisory_lock(hashtextextended('awa demo', 0))")
    done = CliRunner().invoke(main, ["demo", "--database", database])
    assert done.exit_code == 1
    assert "another `awa demo` runs in this database" in done.stderr


def test_a_role_that_may_not_make_schemas_is_told_so(database: str, conn: psycopg.Connection[Any]) -> None:
    role = f"demo_{conn.info.backend_pid}"
    conn.execute(f"CREATE ROLE {role} LOGIN")
    try:
        done = CliRunner().invoke(main, ["demo", "--database", database.replace("//postgres@", f"//{role}@")])
    finally:
        conn.execute(f"DROP ROLE {role}")
    assert done.exit_code == 1
    assert f"{role} may not make schemas in this database" in done.stderr


def test_what_is_lost_doubled_or_wrong_is_counted(
    conn: psycopg.Connection[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo.prepare(conn)
    files = []
    for name in ("good", "doubled", "wrong", "lost"):
        files.append(tmp_path / f"{name}.py")
        files[-1].write_text(f"{name}\n")
    with conn.transaction():
        demo.client.insert_many([demo.SourceFile(str(path)) for path in files], conn=conn)
    for path in (files[0], files[1], files[1], files[2]):
        found = demo.measured(path.read_bytes())
        conn.execute(demo.STORE, (str(path), found.lines + (path == files[2]), found.digest, 1))

    facts = demo.gather_facts(conn, files)
    assert facts == demo.Facts(rows=4, paths=3, missing=1, wrong=1, completed=0, unfinished=4)
    with pytest.raises(AwaError, match="4 of 5 checks failed"):
        demo.check_facts(demo.Show(), facts, found=4, rescued=1)
    assert capsys.readouterr().out.count("WRONG") == 4


def test_installed_packages_and_what_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "theirs.py").touch()
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "text.txt").touch()
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "module.py").touch()
    assert demo.find_files(tmp_path) == [tmp_path / "pkg" / "module.py"]
