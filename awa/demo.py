"""The demo: real jobs, a worker that is killed in the middle, and a count of what is there afterwards.

Every ``.py`` file of Python's standard library becomes a job. Its handler reads the file and stores the line count and
the BLAKE3 digest in a table of the application, completing the job in that same transaction. Two worker processes run
the jobs; one of them gets SIGKILL while it has attempts in hand.

It writes to two schemas of its own, ``awa_demo`` (awa's tables) and ``awa_demo_app`` (the application's), and makes
them anew each time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, TYPE_CHECKING, Self

import psycopg
from blake3 import blake3
from psycopg import Connection

from awa.client import Client
from awa.config import Found, redact
from awa.embedded import find_or_start_database
from awa.errors import AwaError
from awa.job import Job
from awa.storage.connection import connect
from awa.storage.migrate import migrate
from awa.storage.pooler import is_pooled
from awa.storage.schema import Schema

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SCHEMA = Schema("awa_demo")
APPLICATION = "awa_demo_app"
MARK = "made by awa demo, which drops it at its next run"
THREADS = 4
HEARTBEAT, STALE_AFTER = 0.5, 1.5
PATIENCE = 20.0
"""Seconds without a finished job after which the demo gives up."""

_LIFELINE = "AWA_DEMO_LIFELINE"


# --- the application: what a user of awa would write


@dataclass(frozen=True, slots=True)
class SourceFile:
    """Count the lines of a file and take its digest."""

    path: str
    """Absolute."""


client = Client(schema=SCHEMA.name)


@client.task()
def measure(job: Job[SourceFile]) -> None:
    """Store the measure of one file and complete the job: both commit, or neither does."""
    found = measured(Path(job.args.path).read_bytes())
    with client.connection() as conn, conn.transaction():
        conn.execute(STORE, (job.args.path, found.lines, found.digest, job.attempt))
        job.complete(conn)


@dataclass(frozen=True, slots=True)
class Measure:
    """What is stored of a file."""

    lines: int
    """How many line feeds it has."""
    digest: bytes
    """BLAKE3, 32 bytes."""


def measured(content: bytes) -> Measure:
    """The measure of a file with that *content*."""
    return Measure(content.count(b"\n"), blake3(content).digest())


# No unique key, on purpose: a file that is stored twice shall be seen, not prevented.
TABLE = f"""
    CREATE TABLE {APPLICATION}.files (
        path      text        NOT NULL,
        lines     integer     NOT NULL,
        digest    bytea       NOT NULL,
        attempt   smallint    NOT NULL,
        stored_at timestamptz NOT NULL DEFAULT clock_timestamp()
    )
"""

STORE = f"INSERT INTO {APPLICATION}.files (path, lines, digest, attempt) VALUES (%s, %s, %s, %s)"


@client.on_worker_start
def end_with_the_demo() -> None:
    """Stop this worker when the demo has ended, however it did: then the pipe that is its stdin ends."""
    if os.environ.get(_LIFELINE):
        threading.Thread(target=_wait_for_the_end, name="demo-lifeline", daemon=True).start()


def _wait_for_the_end() -> None:
    os.read(0, 1)  # not sys.stdin: a thread that holds its lock would trouble the interpreter's exit
    os.kill(os.getpid(), signal.SIGTERM)


# --- the show


def run(database: str | None = None) -> None:
    """Run the demo and print what happens.

    Args:
        database: Where; None looks for it as everything else does.

    Raises:
        AwaError: A check failed, or the demo could not go on; the message says what was found.
    """
    show = Show()
    show.say("awa demo: every .py file of Python's standard library becomes a job.")
    found = find_or_start_database(database)
    with connect(found.conninfo, name="demo") as conn:
        if is_pooled(conn):
            raise AwaError(
                "the demo needs a session of its own, which it has not got through a transaction pooler: name the"
                " database's direct address with --database"
            )
        prepare(conn)
        show.fact("database", _name(conn, found))
        show.fact("schemas", f"{SCHEMA.name} and {APPLICATION}, made anew; nothing else is touched")
        files = find_files(Path(sysconfig.get_path("stdlib")))
        show.fact("files", f"{len(files):,} in {sysconfig.get_path('stdlib')}")

        began = time.monotonic()
        with conn.transaction():
            client.insert_many([SourceFile(str(path)) for path in files], conn=conn)
        show.fact("enqueued", f"{len(files):,} jobs in {time.monotonic() - began:.2f} s, in one transaction")

        with (
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log,
            _signals_raise(),
            Workers(found, log) as workers,
        ):
            rescued = _work(conn, show, workers, len(files))
            workers.stop()
        check_facts(show, gather_facts(conn, files), found=len(files), rescued=rescued)
        show.fact("figures", _figures(conn, len(files)))
    show.say(_what_next(found))


def find_files(directory: Path) -> list[Path]:
    """The ``.py`` files below *directory* that can be read, without installed packages, in order."""
    return sorted(
        path
        for path in directory.rglob("*.py")
        if not {"site-packages", "dist-packages"} & set(path.relative_to(directory).parts)
        and path.is_file()
        and os.access(path, os.R_OK)
    )


def _name(conn: Connection, found: Found) -> str:
    version = (conn.info.parameter_status("server_version") or "").partition(" ")[0]
    where = redact(found.conninfo) or f"dbname={conn.info.dbname} host={conn.info.host}"
    return f"PostgreSQL {version}, {'the private one' if found.source == 'embedded' else f'{found.source}: {where}'}"


DESCRIPTION = "SELECT n.oid, obj_description(n.oid, 'pg_namespace') FROM pg_namespace n WHERE n.nspname = %s"


def prepare(conn: Connection) -> None:
    """Make both schemas, after dropping those of an earlier run.

    Raises:
        AwaError: Another demo runs here, a schema of that name is somebody else's, or the role may not.
    """
    lock = conn.execute("SELECT pg_try_advisory_lock(hashtextextended('awa demo', 0))").fetchone()
    if lock is None or not lock[0]:
        raise AwaError("another `awa demo` runs in this database: wait for it to end, or name another database")
    try:
        conn.execute("SET lock_timeout = '10s'")
        for name in (SCHEMA.name, APPLICATION):
            there = conn.execute(DESCRIPTION, (name,)).fetchone()
            if there is not None and there[1] != MARK:
                raise AwaError(
                    f"this database has a schema {name} that the demo did not make, so it stays untouched:"
                    " rename it, or name another database with --database"
                )
            conn.execute(f"DROP SCHEMA IF EXISTS {name} CASCADE")
            conn.execute(f"CREATE SCHEMA {name}")
            conn.execute(f"COMMENT ON SCHEMA {name} IS '{MARK}'")
    except psycopg.errors.InsufficientPrivilege as error:
        raise AwaError(
            f"{conn.info.user} may not make schemas in this database ({error.diag.message_primary}):"
            " grant CREATE on it, or name another database with --database"
        ) from error
    conn.execute(TABLE)
    migrate(conn, SCHEMA)


# --- two workers, one of which dies


class Workers:
    """The two worker processes; whatever happens, none is left behind.

    Args:
        log: Gets what they write to stderr.
    """

    def __init__(self, found: Found, log: IO[str]) -> None:
        self._found = found
        self._log = log
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        environment = dict(os.environ) | {_LIFELINE: "1"}
        if self._found.conninfo:
            environment["AWA_DATABASE_URL"] = self._found.conninfo
        options = {
            "queue": "default",
            "threads": THREADS,
            "heartbeat": HEARTBEAT,
            "stale-after": STALE_AFTER,
            "log-format": "text",
            "log-level": "info",
        }
        command = [sys.executable, "-m", "awa.worker", "awa.demo:client"]
        command += [f"--{name}={value}" for name, value in options.items()]
        try:
            for _ in range(2):
                process = subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._log
                )
                self.processes.append(process)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    @property
    def victim(self) -> subprocess.Popen[bytes]:
        """The one that is killed."""
        return self.processes[0]

    def check(self) -> None:
        """Look whether everybody runs who should.

        Raises:
            AwaError: One has ended; the message quotes its log.
        """
        for process in self.processes:
            if process.poll() not in (None, -signal.SIGKILL):
                code = process.returncode
                raise AwaError(f"worker {process.pid} ended by itself, with exit code {code}{self.tail()}")

    def stop(self, timeout: float = 15.0) -> None:
        """Let those that live stop in good order.

        Raises:
            AwaError: One did not, or not in *timeout* seconds.
        """
        living = [process for process in self.processes if process.poll() is None]
        for process in living:
            process.terminate()
        for process in living:
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise AwaError(f"worker {process.pid} did not stop within {timeout:g} s{self.tail()}") from None
            if code != 0:
                raise AwaError(f"worker {process.pid} stopped with exit code {code}{self.tail()}")

    def tail(self) -> str:
        """The end of what they wrote, for a message."""
        self._log.seek(0)
        lines = self._log.read().splitlines()[-8:]
        return f"; the workers said: {' | '.join(lines)}" if lines else ""


DONE = f"SELECT count(*) FROM {APPLICATION}.files"

RESCUED = "SELECT count(*) FROM awa.attempt_ends WHERE outcome = 'rescued'"

IN_HAND = """
    SELECT count(*)
      FROM awa.runtime_instances r
      JOIN awa.claims c ON c.runtime = r.id
     CROSS JOIN LATERAL unnest(c.entry_ids) WITH ORDINALITY AS m(entry_id, idx)
     WHERE r.pid = %s
       AND NOT EXISTS (SELECT FROM awa.attempt_ends e WHERE e.slot = c.slot AND e.entry_id = m.entry_id)
       AND NOT EXISTS (SELECT FROM awa.completions x
                        WHERE x.slot = c.slot AND x.claim_id = c.claim_id AND m.idx::smallint = ANY (x.idx))
"""


def _count(conn: Connection, query: str, *params: object) -> int:
    row = conn.execute(SCHEMA.sql(query), params).fetchone()
    assert row is not None
    return int(row[0])


def _work(conn: Connection, show: Show, workers: Workers, total: int) -> int:
    """Watch the jobs until all are done; kill a worker about half-way. Returns how many attempts were rescued."""
    pids = [process.pid for process in workers.processes]
    show.fact("workers", f"processes {pids[0]} and {pids[1]}, {THREADS} threads each")
    killed_at: float | None = None
    rescued = done = 0
    is_rescue_due = False
    moved_at = time.monotonic()
    with show.progress(total) as advance:
        while done < total or is_rescue_due:
            workers.check()
            before, done = done, _count(conn, DONE)
            advance(done)
            now = time.monotonic()
            if done > before:
                moved_at = now
            elif now - moved_at > PATIENCE:
                raise AwaError(f"{done:,} of {total:,} jobs are done and nothing moves any more{workers.tail()}")
            if killed_at is None and done >= total // 2:
                in_hand = _kill(conn, workers, is_last_chance=done > total * 3 // 4)
                if in_hand is not None:
                    killed_at = now
                    is_rescue_due = in_hand > THREADS
                    show.fact("killed", f"process {workers.victim.pid} by SIGKILL at {done:,} jobs")
            elif is_rescue_due and killed_at is not None and (rescued := _count(conn, RESCUED)):
                is_rescue_due = False
                show.fact("rescued", f"{rescued} attempts that it had in hand, {now - killed_at:.1f} s later")
            time.sleep(0.02)
    return rescued


def _kill(conn: Connection, workers: Workers, *, is_last_chance: bool) -> int | None:
    """Kill the victim if it has attempts in hand that it cannot be committing just now, so that some must be rescued.

    It is frozen for the look, so that what is counted is what is killed.

    Returns:
        How many attempts were open; None when it lives on, to be tried again.
    """
    victim = workers.victim
    victim.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(victim.pid, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        raise AwaError(f"worker {victim.pid} ended by itself{workers.tail()}")
    in_hand = _count(conn, IN_HAND, victim.pid)
    if in_hand > THREADS or is_last_chance:
        victim.kill()
        victim.wait()
        return in_hand
    victim.send_signal(signal.SIGCONT)
    return None


# --- what is there afterwards


@dataclass(frozen=True, slots=True)
class Facts:
    """What the database holds after the run."""

    rows: int
    """Stored measures."""
    paths: int
    """Different files among them."""
    missing: int
    """Files without a row."""
    wrong: int
    """Rows that differ from the file, read again."""
    completed: int
    """Jobs that awa calls completed."""
    unfinished: int
    """Jobs that awa calls anything else."""


COMPLETED = """
    SELECT (SELECT count(*) FROM awa.attempt_ends e WHERE e.outcome = 'completed')
           + (SELECT coalesce(sum(cardinality(c.idx)), 0) FROM awa.completions c)
"""

UNFINISHED = """
    SELECT (SELECT count(*) FROM awa.jobs) - (SELECT count(*) FROM awa.attempt_ends)
           - (SELECT coalesce(sum(cardinality(c.idx)), 0) FROM awa.completions c)
           + (SELECT count(*) FROM awa.waiting_jobs) + (SELECT count(*) FROM awa.ended_jobs)
"""


def gather_facts(conn: Connection, files: Sequence[Path]) -> Facts:
    """Read everything that was stored, and every file again."""
    stored = conn.execute(f"SELECT path, lines, digest FROM {APPLICATION}.files").fetchall()
    now = {str(path): measured(path.read_bytes()) for path in files}
    paths = {path for path, _, _ in stored}
    return Facts(
        rows=len(stored),
        paths=len(paths),
        missing=len(now.keys() - paths),
        wrong=sum(now.get(path) != Measure(lines, digest) for path, lines, digest in stored),
        completed=_count(conn, COMPLETED),
        unfinished=_count(conn, UNFINISHED),
    )


def check_facts(show: Show, facts: Facts, *, found: int, rescued: int) -> None:
    """Print each check and its verdict.

    Raises:
        AwaError: One of them failed.
    """
    checks = [
        (facts.rows == found, f"{found:,} files found, {facts.rows:,} rows stored"),
        (facts.paths == facts.rows, f"{facts.rows - facts.paths:,} stored twice"),
        (facts.missing == 0, f"{facts.missing:,} lost"),
        (facts.wrong == 0, f"{facts.wrong:,} differ from their file, read again"),
        (
            (facts.completed, facts.unfinished) == (found, 0),
            f"{facts.completed:,} jobs completed, {facts.unfinished:,} unfinished or failed",
        ),
    ]
    for is_good, text in checks:
        show.fact("ok" if is_good else "WRONG", text)
    failed = [text for is_good, text in checks if not is_good]
    if failed:
        raise AwaError(
            f"the demo found {len(failed)} of {len(checks)} checks failed ({'; '.join(failed)}):"
            f" this is a bug in awa; the tables are in the schemas {SCHEMA.name} and {APPLICATION}"
        )
    if rescued == 0:
        show.fact("note", "the killed worker held nothing at that moment; run the demo again to see a rescue")


FIGURES = f"""
    SELECT count(*) FILTER (WHERE attempt = 1),
           extract(epoch FROM max(stored_at) FILTER (WHERE attempt = 1) - min(stored_at))::double precision,
           extract(epoch FROM max(stored_at) - min(stored_at))::double precision
      FROM {APPLICATION}.files
"""


def _figures(conn: Connection, total: int) -> str:
    row = conn.execute(FIGURES).fetchone()
    assert row is not None
    undisturbed, seconds, whole = row
    rate = undisturbed / max(seconds, 0.001)
    return f"{rate:,.0f} jobs/s, each with a transaction of its own; {total:,} in {whole:.1f} s, rescue included"


def _where_awa_is() -> str:
    """What makes ``awa`` and ``python`` mean this environment's, when the shell does not know it yet."""
    here = Path(sys.executable).parent
    if shutil.which("awa") is not None or not (here / "activate").exists():
        return ""
    return f", after `source {os.path.relpath(here / 'activate')}`"


def _what_next(found: Found) -> str:
    address = {"embedded": "$(awa db url)", "AWA_DATABASE_URL": "$AWA_DATABASE_URL", "DATABASE_URL": "$DATABASE_URL"}
    target = address.get(found.source, redact(found.conninfo))
    psql = f'psql "{target}"' if target else "psql"
    lines = [
        "",
        f"What to try next{_where_awa_is()}:",
        f"  {psql} -c 'SELECT path, lines FROM {APPLICATION}.files ORDER BY lines DESC LIMIT 5'",
        "  awa migrate                  make awa's tables for programs of your own",
        "  python -m awa.worker jobs    run your jobs; README.md has a first jobs.py",
    ]
    if found.source == "embedded":
        lines.append("  awa db stop                  end the private server; its data stays")
    return "\n".join(lines)


# --- what the user sees


class Show:
    """Prints what happens: with a progress bar on a terminal that has rich, else in plain lines."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def say(self, text: str) -> None:
        """Print a paragraph."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def fact(self, label: str, text: str) -> None:
        """Print one line of the account."""
        self.say(f"  {label:<10}{text}")

    @contextlib.contextmanager
    def progress(self, total: int) -> Iterator[Callable[[int], None]]:
        """Show how many of *total* are done, as the function that is yielded is told."""
        with contextlib.ExitStack() as stack:
            bar = _make_bar() if sys.stdout.isatty() else None
            if bar is None:
                yield self._plain_steps(total)
                return
            self._bar = stack.enter_context(bar)
            stack.callback(setattr, self, "_bar", None)
            task: TaskID = bar.add_task("running", total=total)
            yield lambda done: bar.update(task, completed=done)

    def _plain_steps(self, total: int) -> Callable[[int], None]:
        shown = 0

        def advance(done: int) -> None:
            nonlocal shown
            quarter = 4 * done // max(total, 1)
            if quarter > shown:
                shown = quarter
                self.fact("running", f"{done:,} of {total:,}")

        return advance


def _make_bar() -> Progress | None:
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        return None
    return Progress(
        TextColumn("  {task.description:<9}"), BarColumn(bar_width=40), MofNCompleteColumn(), TimeElapsedColumn()
    )


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo like Ctrl-C does, so that the workers are ended too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = [(number, signal.signal(number, interrupt)) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        yield
    finally:
        for number, handler in previous:
            signal.signal(number, handler)
