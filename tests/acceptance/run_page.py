"""``python run_page.py PAGE``: run the code blocks of a page of documentation, in order and in one directory.

- ``python``: run, all in one namespace. One whose first line is ``# name.py`` is written to that file, and imported
  unless a command of the page runs it.
- ``pycon``: a session whose answers must be as printed.
- ``console``: its commands (``$ ``, continued by ``> ``) run in one bash, and must print what stands below them, if
  anything does. ``...`` stands for anything in a line, or for any lines; times, and which process of which host it was,
  may differ. A command that only looks is asked again until it shows that. A worker or another server runs beside what
  follows until the page ends, and must end well.
- ``sql``: run, committed.
- ``ini``, ``json``: must be readable as such.
- ``text``: shows something; nothing is run.

A block of commands that cannot run here says so in its first line, ``# not run by the tests: `` and why.
"""

from __future__ import annotations

import configparser
import contextlib
import doctest
import importlib
import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

NOT_RUN = "# not run by the tests: "
LANGUAGES = {"python", "pycon", "console", "sql", "ini", "json", "text"}
PATIENCE = 60.0
"""Seconds for what is to be seen."""

_LOOKS = re.compile(
    r"(cat|tail|grep|curl (?!-d)|awa (job (list|show)|queue (list|show)|health|storage status|db status))\b"
)
_SERVES = re.compile(r"(\w+=\S+ )*(python -m awa\.worker|flask awa worker|flask run)\b|.*&$")
_IS_UP = re.compile(r"worker \d+ runs |Running on ")
_ASKS = "[y/N]: "
_MASKS = [
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+Z|[+-]\d\d:\d\d)"), "TIME"),
    (re.compile(r"process \d+ on \S+"), "process N on HOST"),
    (re.compile(r"database: \S+ at \S+,"), "database: ONE at HOST,"),
    (re.compile(r"by \w+@\S+"), "by USER@HOST"),
    (re.compile(r"--after \w+(\.\d+)+"), "--after CURSOR"),
    (re.compile(r"ran( +)\d+ ms"), r"ran\1N ms"),
    (re.compile(r'File "[^"]*/(\w+\.py)"'), r'File "\1"'),
    (re.compile(r"[ \t]+$", re.MULTILINE), ""),
]


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    language: str
    """The word after the fence."""
    line: int
    """Where its text begins, from 1."""
    text: str
    """What stands between the fences."""

    @property
    def file_name(self) -> str | None:
        """The name in its first line, if it is a file."""
        named = re.match(r"# (\w[\w/]*\.py)\n", self.text)
        return named[1] if named else None

    @property
    def not_run(self) -> str | None:
        """Why it is not run, if it is not."""
        first, _, _ = self.text.partition("\n")
        return first.removeprefix(NOT_RUN) if first.startswith(NOT_RUN) else None


def read_blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of *page*."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(found[1], text.count("\n", 0, found.start(2)) + 1, found[2])


def uses_private_server(page: Path) -> bool:
    """Whether commands of *page* start a server: then no other is named to them."""
    text = page.read_text(encoding="utf-8")
    return re.search(r"^awa: no database was named|^\$ .*\(awa db ", text, re.MULTILINE) is not None


def read_commands(block: Block) -> Iterator[tuple[int, str, str]]:
    """The commands of a console: the line of each, its text, what it is to print."""
    for found in re.finditer(r"^\$ (.*\n(?:> .*\n)*)((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
        line = block.line + block.text.count("\n", 0, found.start())
        yield line, found[1].replace("\n> ", "\n").strip(), found[2]


def is_as_printed(expected: str, got: str) -> bool:
    """Whether *got* is *expected*, but for what may differ."""
    for mask, instead in _MASKS:
        expected, got = mask.sub(instead, expected), mask.sub(instead, got)
    lines = (
        r"(.*\n)*?" if line == "..." else ".*?".join(re.escape(part) for part in line.split("...")) + r"\n"
        for line in expected.strip().splitlines()
    )
    return re.fullmatch("".join(lines), f"{got.strip()}\n" if got.strip() else "") is not None


@dataclass(frozen=True, slots=True)
class Server:
    """A command that runs beside what follows."""

    place: str
    """Page and line."""
    command: str
    process: int
    log: Path
    """What it prints."""
    expected: str
    """How that is to begin, if the page tells."""


class Console:
    """One bash for all commands of a page, and the servers that they started."""

    def __init__(self, *, is_private: bool) -> None:
        """
        Args:
            is_private: Whether no database is named to the commands, so that they use the private server.
        """
        self.home = Path(tempfile.mkdtemp(prefix="awa-page-"))  # the private server's sockets want a short path
        self.home.chmod(0o755)
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
        if is_private:
            env = {name: value for name, value in env.items() if name not in ("AWA_DATABASE_URL", "DATABASE_URL")}
        env |= {
            "AWA_EMBEDDED": "1",
            "CURL_HOME": str(self.home),
            "AWA_TEST_DATABASE_URL": os.environ["DATABASE_URL"],
            "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
            "AWA_STATE_DIR": str(self.home),
            "PYTHONWARNINGS": "error",
            "NO_COLOR": "1",
            "TZ": "UTC",
            "COLUMNS": "160",
        }
        self._ports = {port: _free_port() for port in ("5000", "8080")}
        env["FLASK_RUN_PORT"] = self._ports["5000"]
        (self.home / ".curlrc").write_text("silent\n")  # as it is where its output is a terminal
        self._own = (self.home / "bash.log").open("wb")  # bash itself tells there of what was killed
        self._bash = subprocess.Popen(
            ["bash", "--norc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._own, env=env
        )
        self._send("set -m; ulimit -c 0\n")  # each server in a group of its own, and SIGINT as it is by default
        self._servers: list[Server] = []
        self._wrong: list[str] = []

    def run(self, place: str, command: str, expected: str) -> None:
        """Run *command*, or have it running; what is wrong with its answer is told at the end."""
        for port, free in self._ports.items():
            command = re.sub(rf":{port}\b", f":{free}", command)
        if _SERVES.match(command):
            self._serve(place, command, expected)
            return
        give_up_at = time.monotonic() + (PATIENCE if _LOOKS.match(command) else 0)
        while not is_as_printed(expected or "...", got := self._ask(command, expected)):
            if time.monotonic() > give_up_at:
                self._wrong.append(f"{place}: {command}\nprinted\n{got}\nnot\n{expected}")
                return
            time.sleep(0.5)

    def _ask(self, command: str, expected: str) -> str:
        if _ASKS in expected:
            answer = expected.partition(_ASKS)[2].partition("\n")[0]
            command = shlex.join([sys.executable, __file__, "--answer", answer, command])
        mark = "<the end of an answer>"
        self._send(f"{{ {command}\n}} 2>&1 </dev/null; printf '%s %s\\n' $? '{mark}'\n")
        assert self._bash.stdout is not None
        lines: list[str] = []
        while not (line := self._bash.stdout.readline().decode()).endswith(f"{mark}\n"):
            if not line:
                sys.exit(f"bash ended in: {command}")
            lines.append(line)
        rest, code = re.fullmatch(rf"(.*?)(\d+) {mark}\n", line, re.DOTALL).groups()  # type: ignore[union-attr]
        if code != "0" and not expected:
            sys.exit(f"{command} ended with {code}:\n{''.join(lines)}")
        return "".join(lines) + rest

    def _serve(self, place: str, command: str, expected: str) -> None:
        command = command.removesuffix("&").strip()
        redirected = re.search(r"> *(\S+)( 2>&1)?$", command)
        log = Path(redirected[1]) if redirected else self.home / f"server-{len(self._servers)}.log"
        process = int(self._ask(f"{command}{'' if redirected else f' >{log} 2>&1'} & echo $!", "..."))
        self._servers.append(Server(place, command, process, log, expected))
        if not _waited(lambda: _IS_UP.search(_text(log)) or not _lives(process)) or not _lives(process):
            sys.exit(f"{place}: {command} does not come up:\n{_text(log)}")

    def close(self) -> None:
        """End the servers, the last first; exit with what is wrong with what anybody printed."""
        for server in reversed(self._servers):
            expected = f"{server.expected}..."
            if not _waited(partial(_is_shown, expected, server.log)):
                self._wrong.append(f"{server.place}: {server.command}\nprinted\n{_text(server.log)}\nnot\n{expected}")
            if _lives(server.process):  # else the page has ended it
                os.kill(server.process, signal.SIGTERM)
                code = self._ask(f"wait {server.process}; echo $?", "...").split()[-1]
                if code != ("143" if "flask run" in server.command else "0"):
                    self._wrong.append(f"{server.place}: {server.command}\nended with {code}:\n{_text(server.log)}")
        self._servers.clear()
        if self._wrong:
            sys.exit("\n".join(self._wrong))

    def kill(self) -> None:
        """Leave nothing behind, whatever has happened."""
        for server in self._servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process, signal.SIGKILL)
        self._bash.kill()
        self._bash.communicate()
        self._own.close()
        if any(self.home.glob("**/postmaster.pid")):
            stop = [sys.executable, "-m", "awa", "db", "stop"]
            subprocess.run(stop, env=os.environ | {"AWA_STATE_DIR": str(self.home)}, check=False, capture_output=True)
        shutil.rmtree(self.home)

    def _send(self, text: str) -> None:
        assert self._bash.stdin is not None
        self._bash.stdin.write(text.encode())
        self._bash.stdin.flush()


def _lives(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    try:
        return status.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _text(log: Path) -> str:
    return log.read_text(encoding="utf-8") if log.exists() else ""


def _is_shown(expected: str, log: Path) -> bool:
    return is_as_printed(expected, _text(log))


def _waited(condition: Callable[[], object]) -> bool:
    """Wait until *condition* is true, but not for ever; whether it is."""
    give_up_at = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.02)
    return True


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def answer(text: str, command: str) -> int:
    """Run *command* on a terminal, type *text* when it asks, print all that the terminal shows; the exit code."""
    child, terminal = pty.fork()
    if not child:
        os.execvp("bash", ["bash", "-c", command])
    shown, has_answered = b"", False
    with contextlib.suppress(OSError):  # the terminal is gone with the command
        while some := os.read(terminal, 65536):
            shown += some
            if not has_answered and shown.endswith(_ASKS.encode()):
                os.write(terminal, f"{text}\n".encode())
                has_answered = True
    print(shown.decode().replace("\r\n", "\n"), end="")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run(page: Path) -> None:
    """Run every block; the first that goes wrong raises or exits."""
    sys.path.insert(0, "")
    names: dict[str, object] = {"__name__": "__main__"}
    console: Console | None = None
    text = page.read_text(encoding="utf-8")
    try:
        for block in read_blocks(page):
            if block.not_run:
                continue
            if block.file_name:
                path = Path(block.file_name)
                path.parent.mkdir(exist_ok=True)
                path.write_text(block.text, encoding="utf-8")
                if not re.search(rf"^\$ .*python {re.escape(block.file_name)}", text, re.MULTILINE):
                    importlib.invalidate_caches()
                    importlib.import_module(".".join(path.with_suffix("").parts))
            elif block.language == "python":
                # the lines keep their numbers in tracebacks
                exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), names)
            elif block.language == "pycon":
                names = converse(page, block, names)
            elif block.language == "console":
                console = console or Console(is_private=uses_private_server(page))
                for line, command, expected in read_commands(block):
                    console.run(f"{page}:{line}", command, expected)
            elif block.language == "sql":
                query(block.text)
            elif block.language == "ini":
                configparser.RawConfigParser(strict=False).read_string(block.text)
            elif block.language == "json":
                json.loads(block.text)
        if console:
            console.close()
    finally:
        if console:
            console.kill()


def converse(page: Path, block: Block, names: dict[str, object]) -> dict[str, object]:
    """Run a session; the names that it leaves."""
    session = doctest.DocTestParser().get_doctest(block.text, names, page.name, str(page), block.line - 1)
    try:
        doctest.DebugRunner(verbose=False).run(session, clear_globs=False)
    except doctest.UnexpectedException as raised:
        raise raised.exc_info[1] from None
    except doctest.DocTestFailure as failure:
        line = block.line + failure.example.lineno
        sys.exit(f"{page}:{line}: {failure.example.source}printed {failure.got!r}, not {failure.example.want!r}")
    return session.globs


def query(text: str) -> None:
    """Run statements of SQL and commit."""
    import psycopg

    with psycopg.connect(os.environ["DATABASE_URL"]) as conn:
        conn.execute(text.encode())


if __name__ == "__main__":
    if sys.argv[1] == "--answer":
        sys.exit(answer(*sys.argv[2:]))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("this page takes too long"))
    signal.alarm(280)  # sooner than whoever called: nothing is left running
    run(Path(sys.argv[1]))
