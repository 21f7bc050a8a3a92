"""Databases for tests, and the fixtures for pytest: as a user's project has them, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import connect

import awa
from awa.embedded import Binaries, Server
from awa.testing import connected, databases, run_all
from tests.acceptance.run_page import read_blocks
from tests.fixtures.db import wait_until

ROOT = Path(__file__).parents[2]

APP = """
    import awa

    client = awa.Client("host=/nonexistent/socket dbname=production")


    @client.task()
    def send_welcome(address: str) -> None:
        print(f"mail to {address}")


    def sign_up(address: str) -> None:
        client.insert(send_welcome.bind(address))
"""

CONFTEST = """
    from app import client
    from awa.testing import client_fixture
    queue = client_fixture(client)
"""

Run = Callable[..., str]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project."""
    write(tmp_path, "app.py", APP)
    write(tmp_path, "conftest.py", CONFTEST)
    write(tmp_path, "pytest.ini", "[pytest]\naddopts = -p pytest_awa -p no:cacheprovider\nfilterwarnings = error\n")
    return tmp_path


def write(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(textwrap.dedent(text), encoding="utf-8")


@pytest.fixture
def run(project: Path, binaries: Binaries) -> Iterator[Run]:
    """Run a program in the project, with a private server unless it is told of another; it gives what was printed."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "AWA_PG_BIN": str(binaries.bin_dir), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*command: str, code: int = 0, **more: str) -> str:
        ran = subprocess.run(
            [sys.executable, *command], cwd=project, env=env | more, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == code, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    before = private_servers()
    yield run
    assert private_servers() <= before, "a private server was left behind"


def private_servers() -> set[Path]:
    me = os.getuid()
    return {path for place in databases.PLACES for path in Path(place).glob(f"awa-test-{me}-*")}


def test_a_project_with_three_lines(project: Path, run: Run, server: Server) -> None:
    """Guards the way that the README shows: each test has the client on a database of its own, and no other is used.

    And the message about a client whose schema is another: it says which fixture to override.
    """
    other = """
    other = client_fixture(awa.Client(schema="jobs"))
    """
    write(project, "conftest.py", "    import awa" + CONFTEST + other)
    write(
        project,
        "test_app.py",
        """
        import pytest
        from app import send_welcome, sign_up
        from awa.testing import assert_inserted, assert_not_inserted, run_all


        @pytest.mark.parametrize("address", ["ada@example.org", "bob@example.org"])
        def test_sign_up(queue, awa_database, capsys, address):
            sign_up(address)
            [job] = assert_inserted(queue, send_welcome, count=1)
            assert job.args == {"address": address}
            run_all(queue)
            assert capsys.readouterr().out == f"mail to {address}\\n"
            assert "awa_test_" in awa_database


        def test_failing(queue):
            sign_up("eve@example.org")
            assert_not_inserted(queue, send_welcome)


        def test_without(capsys):
            import app, awa
            with pytest.raises(awa.DatabaseNotFound, match="nonexistent"):
                app.sign_up("x")


        def test_other(other): ...
        """,
    )
    said = run("-m", "pytest", "-q", code=1, AWA_TEST_DATABASE_URL=server.url("postgres"))
    assert "1 failed, 3 passed, 1 error" in said
    assert "override the fixture awa_schema" in said
    assert 'E         1 send_welcome {"address":"eve@example.org"} available' in said
    with psycopg.connect(server.url("postgres")) as conn:
        left = conn.execute("SELECT datname FROM pg_database WHERE datname LIKE 'awa_test%'").fetchall()
    assert left == []


def test_the_tests_in_the_documentation_pass(project: Path, run: Run, server: Server) -> None:
    """Guards what a new user types first; the pages' other blocks are run elsewhere."""
    (project / "conftest.py").unlink()
    (project / "app.py").unlink()
    for name, page in (("first", "README.md"), ("second", "docs/testing.md")):
        (project / name).mkdir()
        for block in read_blocks(ROOT / page):
            if block.file_name:
                write(project / name, block.file_name, block.text)
    said = run("-m", "pytest", "-q", AWA_TEST_DATABASE_URL=server.url("postgres"))
    assert "3 passed" in said


def test_the_plugin_costs_nothing_unused() -> None:
    """Guards every pytest run of a user in whose environment awa merely is."""
    program = (
        "import sys, pytest; import pytest_awa; print([n for n in sys.modules if n.startswith(('awa', 'psycopg'))])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.strip() == "[]"
    named = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\npytest_awa = "pytest_awa"' in named


@pytest.mark.slow
def test_each_worker_of_xdist_has_a_server(project: Path, run: Run) -> None:
    """Guards private servers beside each other, the tables of the user's own, another schema, and their removal."""
    write(project, "app.py", APP.replace('dbname=production"', 'dbname=production", schema="my jobs"'))
    write(
        project,
        "conftest.py",
        CONFTEST
        + """
    import psycopg
    import pytest

    @pytest.fixture(scope="session")
    def awa_schema():
        return "my jobs"

    @pytest.fixture(scope="session")
    def awa_template_setup():
        def create_tables(url):
            with psycopg.connect(url) as conn:
                conn.execute("CREATE TABLE users (address text)")
        return create_tables

    @pytest.fixture
    def conn(awa_database):
        with psycopg.connect(awa_database) as conn:
            yield conn
    """,
    )
    write(
        project,
        "test_app.py",
        """
        import os, pathlib, pytest
        from app import send_welcome
        from awa.testing import assert_inserted, run_all

        @pytest.mark.parametrize("n", range(4))
        def test_rollback(queue, conn, n):
            conn.execute("INSERT INTO users VALUES ('x')")
            queue.insert(send_welcome.bind("x"), conn=conn)
            assert_inserted(conn, send_welcome, schema="my jobs", count=1)
            assert run_all(queue) == []
            conn.commit()
            assert len(run_all(queue)) == 1
            pathlib.Path(f"{os.environ['PYTEST_XDIST_WORKER']}-{conn.info.host.replace('/', '_')}").touch()
        """,
    )
    said = run("-m", "pytest", "-q", "-n", "2")
    assert "4 passed" in said
    assert len(list(project.glob("gw*"))) == 2


UNITTEST = """
    import unittest
    import awa.testing
    from app import client, send_welcome, sign_up


    class SignUp(unittest.TestCase):
        def setUp(self):
            url = self.enterContext(awa.testing.database())
            self.enterContext(awa.testing.connected(client, url))

        def test_mail(self):
            sign_up("ada@example.org")
            awa.testing.assert_inserted(client, send_welcome)
            self.assertEqual([ran.state for ran in awa.testing.run_all(client)], ["completed"])

        def test_nothing(self):
            awa.testing.assert_not_inserted(client, send_welcome)

    if __name__ == "__main__":
        unittest.main()
"""


def test_unittest_needs_no_pytest(project: Path, run: Run) -> None:
    """Guards the helpers as plain context managers, the end of the server with the interpreter, no import of pytest."""
    write(project, "test_app.py", UNITTEST + "\n    import sys; assert 'pytest' not in sys.modules\n")
    assert "Ran 2 tests" in run("-W", "error", "-X", "dev", "test_app.py")


@pytest.mark.slow
def test_the_server_of_a_killed_run_is_ended_by_the_next(project: Path, run: Run, binaries: Binaries) -> None:
    """Guards against servers that add up when runs are killed; one whose process lives is left alone."""
    write(
        project,
        "killed.py",
        """
        import os, sys, time, awa.testing
        with awa.testing.database() as url:
            print(url, os.getpid(), flush=True)
            time.sleep(60)
        """,
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "AWA_PG_BIN": str(binaries.bin_dir)}
    started = []
    try:
        urls = []
        for _ in range(2):
            process = subprocess.Popen(
                [sys.executable, "killed.py"], cwd=project, env=env, stdout=subprocess.PIPE, text=True
            )
            started.append(process)
            assert process.stdout is not None
            urls.append(process.stdout.readline().split()[0])
        started[0].send_signal(signal.SIGKILL)
        started[0].wait()
        psycopg.connect(urls[0]).close()  # it runs on
        write(project, "test_app.py", UNITTEST)
        run("test_app.py")
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(urls[0])
        psycopg.connect(urls[1]).close()
    finally:
        for process in started:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)


def test_a_client_comes_back_from_its_test(database: str, client: awa.Client) -> None:
    """Guards the binding: the client's own database and connections are as they were, whatever the block did."""
    app = awa.Client("host=/nonexistent/socket dbname=production")

    @app.task()
    def work() -> None: ...

    with pytest.raises(KeyError), connected(app, database) as same:
        assert same is app
        app.insert(work.bind())
        assert [ran.state for ran in run_all(app)] == ["completed"]
        raise KeyError
    with pytest.raises(awa.DatabaseNotFound, match="nonexistent"):
        app.insert(work.bind())
    for wrong in ("", "mysql://x", 5):
        with pytest.raises(awa.ConfigError), connected(app, wrong):  # type: ignore[arg-type]
            pass
    with pytest.raises(awa.ConfigError, match=r"awa\.Client"), connected("client", database):  # type: ignore[arg-type]
        pass


def test_a_server_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    """Guards the words, that a server named later is used, and that no template is left whose setup went wrong."""
    monkeypatch.setenv(databases.VARIABLE, "host=/nonexistent/socket")
    with pytest.raises(awa.DatabaseNotFound, match="server for tests"), databases.database():
        pass
    monkeypatch.setenv(databases.VARIABLE, server.url("postgres"))
    with pytest.raises(ZeroDivisionError), databases.database(setup=lambda url: 1 / 0):
        pass
    opened: list[psycopg.Connection[Any]] = []
    with pytest.raises(awa.ConfigError, match="open"), databases.database(setup=lambda u: opened.append(connect(u))):
        pass
    opened[0].close()
    with databases.database() as one, databases.database() as two:
        assert one != two
        with psycopg.connect(one) as conn:
            conn.execute("CREATE TABLE mine ()")
        with psycopg.connect(two) as conn, pytest.raises(psycopg.errors.UndefinedTable):
            conn.execute("TABLE mine")
    databases.stop_server()
    with psycopg.connect(server.url("postgres")) as conn:
        pattern = f"awa_test_{os.getpid()}%"
        wait_until(lambda: conn.execute("SELECT FROM pg_database WHERE datname LIKE %s", [pattern]).rowcount == 0)


@pytest.mark.slow
def test_a_forked_child_leaves_the_server_to_its_parent(project: Path, run: Run) -> None:
    """Guards a test that forks: the child's end stops nothing, and it can have databases of its own."""
    write(
        project,
        "forks.py",
        """
        import os, sys, psycopg, awa.testing
        with awa.testing.database() as url:
            child = os.fork()
            if not child:
                with awa.testing.database() as other:
                    os.environ["OTHER"] = other
                    assert psycopg.connect(other).info.host != psycopg.connect(url).info.host
                sys.exit(0)  # not os._exit: what is registered for the end runs
            assert os.waitpid(child, 0)[1] == 0
            with psycopg.connect(url) as conn:
                print(conn.execute("SELECT 'alive'").fetchone())
        """,
    )
    assert "('alive',)" in run("forks.py")
