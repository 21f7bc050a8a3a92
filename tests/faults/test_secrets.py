"""Passwords: a connection string that a log, an error, a traceback, a process list or an answer shows.

The server asks for the password here. All of it is odd characters but a word that no encoding changes, so that word is
looked for, in everything that anybody can read.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import traceback
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from click.testing import CliRunner
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import awa
from awa.cli import main
from awa.config import find_database, load_settings, mask
from awa.embedded import Server
from awa.errors import ConfigError, DatabaseNotFound
from awa.storage.connection import connect
from awa.storage.migrate import migrate
from awa.storage.pool import Pool
from awa.storage.schema import Schema
from awa.worker import logs
from tests.faults.test_health import free_port
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import WorkerProcess, WorkerProcesses, ended, in_state, worker_processes

WORD = "Tr0ub4dor"
PASSWORD = f"@/:?#[%25]&=+ '\"\\$é{WORD}|;,<>{{}}~^` -x"


def assert_discreet(*texts: object) -> None:
    for text in texts:
        shown = str(text)
        assert WORD not in shown, f"...{shown[max(shown.index(WORD) - 200, 0) : shown.index(WORD)]}(the password)..."


def as_url(server: Server, password: str) -> str:
    parts = conninfo_to_dict(server.url())
    host = quote(str(parts["host"]), safe="")
    return f"postgresql://app:{quote(password, safe='')}@{host}:{parts['port']}/{parts['dbname']}?connect_timeout=10"


def as_keys(server: Server, password: str) -> str:
    return make_conninfo(server.url(), user="app", password=password)


def as_query(server: Server, password: str) -> str:
    parts = conninfo_to_dict(server.url())
    query = (
        f"host={quote(str(parts['host']), safe='')}&port={parts['port']}&user=app&password={quote(password, safe='')}"
    )
    return f"postgres+psycopg://@/{parts['dbname']}?{query}"


Form = Callable[[Server, str], str]
FORMS = pytest.mark.parametrize("form", [as_url, as_keys, as_query])


@pytest.fixture(scope="module")
def guarded(binaries: Any) -> Iterator[Server]:
    """A server that lets ``app`` in by its password only."""
    from tests.fixtures.db import short_directory

    with short_directory() as directory:
        server = Server(binaries, directory / "pg", settings={"fsync": "off"})
        try:
            server.start()
            with psycopg.connect(server.url(), autocommit=True) as conn:
                statement = "CREATE ROLE app LOGIN CREATEROLE PASSWORD {}"
                conn.execute(sql.SQL(statement).format(sql.Literal(PASSWORD)))
                conn.execute(sql.SQL("GRANT CREATE ON DATABASE {} TO app").format(sql.Identifier(conn.info.dbname)))
                row = conn.execute("SHOW hba_file").fetchone()
                assert row is not None
                hba = Path(row[0])
                hba.write_text("local all app scram-sha-256\n" + hba.read_text())
                conn.execute("SELECT pg_reload_conf()")

            def asks() -> bool:
                try:
                    psycopg.connect(make_conninfo(server.url(), user="app", password="wrong")).close()
                except psycopg.OperationalError:
                    return True
                return False

            wait_until(asks, timeout=20)
            migrate(as_keys(server, PASSWORD), Schema())
            yield server
        finally:
            server.stop("immediate")


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[WorkerProcesses]:
    with worker_processes(tmp_path, None) as found:
        found.module("import awa\nclient = awa.Client()\n@client.task()\ndef work() -> None: ...\n")
        yield found


@pytest.fixture
def heard() -> Iterator[Callable[[], str]]:
    """Everything that every logger says, with tracebacks, as text and as JSON."""
    streams = io.StringIO()
    handlers = []
    for log_format in (logs._Text(shows_process=False), logs._Json()):
        handler = logging.StreamHandler(streams)
        handler.setFormatter(log_format)
        handlers.append(handler)
    root = logging.getLogger()
    before = root.level
    root.setLevel(logging.DEBUG)
    for handler in handlers:
        root.addHandler(handler)
    yield streams.getvalue
    for handler in handlers:
        root.removeHandler(handler)
    root.setLevel(before)


def listed(process: WorkerProcess) -> str:
    """How anybody sees the process in a list."""
    return Path(f"/proc/{process.pid}/cmdline").read_text() + Path(f"/proc/{process.pid}/comm").read_text()


def command(*arguments: str, **environment: str) -> Any:
    names = ("AWA_SCHEMA", "AWA_DATABASE_URL", "DATABASE_URL", "AWA_HEALTH_ADDR")
    return CliRunner(env={**dict.fromkeys(names), **environment}).invoke(main, list(arguments))


# --- all is well


@FORMS
def test_a_worker_that_works_shows_it_nowhere(guarded: Server, processes: WorkerProcesses, form: Form) -> None:
    address = form(guarded, PASSWORD)
    port = free_port()
    process = processes.start(
        *("app:client", "--log-level", "debug", "--log-format", "json", "--health-addr", f"127.0.0.1:{port}"),
        AWA_DATABASE_URL=address,
    )
    client = awa.Client(address)
    job = client.insert({}, kind="work")
    in_state(client, job, "completed", timeout=30)
    with psycopg.connect(guarded.url()) as conn:
        activity = conn.execute("SELECT application_name, query, pid FROM pg_stat_activity").fetchall()
    assert any(name == "awa heartbeat" for name, *_ in activity)
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/readyz")
    answer = connection.getresponse().read()
    connection.close()
    assert answer.startswith(b"{")
    assert_discreet(listed(process), activity, answer, process.stderr)
    for arguments in (
        ["storage", "status"],
        ["storage", "status", "--json"],
        ["storage", "check"],
        ["migrate", "--status"],
        ["health"],
    ):
        found = command(*arguments, AWA_DATABASE_URL=address)
        assert found.exit_code == 0, mask(found.output)
        assert_discreet(found.output)
    process.process.terminate()
    assert process.wait(30) == 0
    assert_discreet(process.stderr)
    client.close()


@FORMS
def test_no_object_shows_it(guarded: Server, form: Form, heard: Callable[[], str]) -> None:
    address = form(guarded, PASSWORD)
    client = awa.Client(address)
    client.task(kind="work")(lambda_like)
    found = find_database(address)
    assert found is not None
    pool = Pool(lambda: found.conninfo)
    with client.worker(threads=1) as worker, pool.connection() as conn:
        job = client.insert({}, kind="work")
        ended(client, job, timeout=30)
        things = [client, found, worker, pool, conn, client.admin, client.registry, load_settings({}), pool._pool]
        things += [
            worker._settings,
            worker._claimer,
            worker._identity,
            *worker._services,
            conn.info,
            client.get(job.id),
        ]
        for thing in things:
            assert_discreet(repr(thing), thing)
    pool.close()
    client.close()
    assert_discreet(heard())


def lambda_like() -> None: ...


# --- the server says no


def everything(error: BaseException) -> str:
    """The error as logs print it, with all that led to it, and the values that errors carry."""
    said = ["".join(traceback.format_exception(error))]
    link: BaseException | None = error
    while link is not None:
        said += [repr(link), str(link), repr(link.args), repr(getattr(link, "__notes__", ""))]
        link = link.__cause__ or link.__context__
    return "\n".join(said)


@FORMS
def test_a_refused_connection_says_who_and_where_and_not_with_what(
    guarded: Server, form: Form, heard: Callable[[], str], processes: WorkerProcesses
) -> None:
    address = form(guarded, PASSWORD + "!")
    client = awa.Client(address)
    client.task(kind="work")(lambda_like)
    found = find_database(address)
    assert found is not None
    pool = Pool(lambda: found.conninfo)
    calls: list[Callable[[], object]] = [
        lambda: client.insert({}, kind="work"),
        lambda: client.get(1),
        lambda: client.worker(threads=1).start(),
        lambda: connect(found.conninfo, name="x"),
        lambda: pool.connection().__enter__(),
    ]
    for call in calls:
        with pytest.raises(DatabaseNotFound, match="user app") as caught:
            call()
        assert_discreet(everything(caught.value))
    for arguments in (["storage", "status"], ["migrate"], ["migrate", "--status"], ["health"], ["demo"]):
        refused = command(*arguments, AWA_DATABASE_URL=address)
        assert refused.exit_code in (2, 69), mask(refused.output)
        assert_discreet(refused.output, everything(refused.exception) if refused.exception else "")
        given = command(*arguments, "--database", address)
        assert_discreet(given.output)
    process = processes.start("app:client", "--log-level", "debug", AWA_DATABASE_URL=address)
    assert process.wait(30) == 69
    assert "user app" in process.stderr
    assert_discreet(process.stderr, heard())


@pytest.mark.slow
def test_a_worker_whose_password_is_changed_under_it_does_not_tell_the_old_one(
    guarded: Server, heard: Callable[[], str]
) -> None:
    """Every loop, and the pool in its threads, fails to connect and logs that, at every level."""
    client = awa.Client(as_url(guarded, PASSWORD))
    client.task(kind="work")(lambda_like)
    with psycopg.connect(guarded.url(), autocommit=True) as boss:

        def change(password: str) -> None:
            boss.execute(sql.SQL("ALTER ROLE app PASSWORD {}").format(sql.Literal(password)))

        with client.worker(threads=1, heartbeat=0.2, stale_after=30):
            client.insert({}, kind="work")
            change("another")
            try:
                ends = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'"
                boss.execute(ends)
                for name in ("heartbeat", "maintenance", "claiming"):
                    wait_until(lambda name=name: f"{name} failed, again" in heard(), timeout=30)  # type: ignore[misc]
                with pytest.raises((DatabaseNotFound, psycopg.OperationalError)) as caught:
                    client.insert({}, kind="work")
                assert_discreet(everything(caught.value))
            finally:
                change(PASSWORD)

            def works() -> bool:
                with contextlib.suppress(DatabaseNotFound, psycopg.OperationalError):  # connections that were ended
                    return ended(client, client.insert({}, kind="work"), timeout=30).state == "completed"
                return False

            wait_until(works, timeout=30)
    client.close()
    assert "password authentication failed" in heard()
    assert_discreet(heard())


# --- what was typed wrongly

ODD = [
    f"postgresql://app:x@{WORD}@host/db",
    f"postgresql://app:x/{WORD}@host/db",
    f"postgresql://app:12/{WORD}@host/db",
    f"postgresql://app:{WORD}%zz@host/db",
    f"postgresql://app:{WORD}%00@host/db",
    f"postgresql://app:pw@host/db?password={WORD}%zz",
    f"postgresql://app:pw@host/db?pass={WORD}",
    f"mysql://app:{WORD}@host/db",
    f"postgresql+psycopg2://app:{WORD}@host:port/db",
    f"host=x password=my {WORD} pass",
    f"host=x password='{WORD}",
    f"host=x port={WORD}",
    f"host=x dbname=postgresql://app:{WORD}@host/db",
    f"host=x dbname='password={WORD}'",
    f"app:{WORD}@host/db",
    f"host=x password={WORD}\0",
]


@pytest.mark.parametrize("typed", ODD, ids=lambda typed: re.sub(WORD, "...", typed.replace("\0", "NUL")))
def test_a_connection_string_that_cannot_be_read_is_not_shown(typed: str, heard: Callable[[], str]) -> None:
    for call in (
        lambda: find_database(typed),
        lambda: find_database(environ={"DATABASE_URL": typed}),
        lambda: awa.Client(typed).insert({}, kind="k"),
    ):
        with pytest.raises((ConfigError, DatabaseNotFound)) as caught:
            call()
        assert_discreet(everything(caught.value))
    if "\0" not in typed:
        for arguments in (["storage", "status"], ["migrate"], ["health"]):
            given = command(*arguments, AWA_DATABASE_URL=typed)
            assert given.exit_code in (2, 78), given.output
            assert_discreet(given.output)
    assert_discreet(heard())


@pytest.mark.parametrize("address", [f"postgresql://app:{WORD}@host/db", f"host=x password = '{WORD}'"])
def test_a_connection_string_in_the_wrong_place_is_not_shown(address: str, processes: WorkerProcesses) -> None:
    for name in ("threads", "schema", "heartbeat", "log_level", "health_addr", "notify"):
        for source in ({"arguments": {name: address}}, {"environ": {f"AWA_{name.upper()}": address}}):
            with pytest.raises(ConfigError, match=rf"^{name} is") as caught:
                load_settings(**{"environ": {}} | source)  # type: ignore[arg-type]
            assert_discreet(everything(caught.value))
    for arguments in (
        ["migrate", address],
        ["storage", "status", address],
        ["storage", address],
        [address],
        ["migrate", f"--databse={address}"],
        ["migrate", "--schema", address],
        ["migrate", "--from", address],
        ["health", "--addr", address],
        ["migrate", "--grants", address],
    ):
        wrong = command(*arguments)
        assert wrong.exit_code != 0, arguments
        assert_discreet(wrong.output)
    for arguments in ([address], ["app:client", address], ["app:client", "--threads", address]):
        process = processes.start(*arguments)
        assert process.wait(30) != 0
        assert_discreet(process.stderr)


def test_a_password_on_the_command_line_is_warned_of(guarded: Server, processes: WorkerProcesses) -> None:
    """Who lists processes sees it there, whatever the program does; so the log says it, without showing it."""
    for address, warns in ((as_url(guarded, PASSWORD), True), (guarded.url(), False)):
        process = processes.start("app:client", "--database", address, "--log-level", "debug")
        wait_until(lambda process=process: "runs default" in process.stderr, timeout=30)  # type: ignore[misc]
        process.process.terminate()
        assert process.wait(30) == 0
        assert ("--database shows its password" in process.stderr) is warns
        assert_discreet(process.stderr)
