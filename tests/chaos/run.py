"""One run: torment for a while, let everything end, then check."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import psycopg

import awa
from awa.embedded import Binaries
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from tests.chaos import checks, ledger, pooler
from tests.chaos.cluster import Cluster, can_fail_over, kept_cluster
from tests.chaos.crew import Crew, make_crew
from tests.chaos.faults import Faults
from tests.chaos.plan import Plan
from tests.chaos.report import Report, count_errors, count_figures
from tests.chaos.server import connect
from tests.chaos.ways import PRODUCERS

LOOK_EVERY = 5.0
"""Seconds between two looks at how much is open."""

MOST_OPEN = 2000
"""Open jobs above which producers rest, so that most jobs run in the torment and not after it."""

DRAINED = 60.0
"""Seconds without one more job ended after which the rest is taken for lost."""

DRAINED_AT_MOST = 300.0
"""Seconds after which nobody waits any longer."""

Tell = Callable[[str], None]


class TookTooLong(Exception):
    """The run was ended by its own clock."""


def run(
    binaries: Binaries,
    *,
    seed: int,
    seconds: float,
    workers: int = 4,
    failover: bool = False,
    pooled: bool = False,
    counting: int = 0,
    keep: bool = False,
    tell: Tell,
) -> Report:
    """Torment a server, its producers and its workers for *seconds*, and say what came of it.

    Args:
        binaries: The server's programs.
        failover: Have a synchronous standby, which takes over now and then.
        pooled: Have pgbouncer between the servers and some of the others.
        counting: Jobs that add one to a counter and are there from the beginning; while many of them are left,
            producers rest.
        keep: Leave servers and journals for a look.
        tell: Gets lines of progress.

    Raises:
        TookTooLong: It had not ended long after it should.
    """
    notes = []
    if failover and not can_fail_over(binaries):
        failover = False
        notes.append(f"no failover: there is no pg_basebackup in {binaries.bin_dir}")
    if pooled and pooler.find_pooler() is None:
        pooled = False
        notes.append("no pooler: pgbouncer is not installed")
    for note in notes:
        tell(note)
    with (
        bounded(seconds + DRAINED_AT_MOST + 240),
        kept_cluster(binaries, has_standby=failover, keep=keep) as (directory, cluster),
    ):
        tell(f"seed {seed}, {seconds:.0f} s on PostgreSQL {binaries.version} in {directory}")
        with connect(cluster.primary) as conn:
            migrate(conn, Schema())
            ledger.install(conn)
        if counting:
            _insert_counting(cluster.url, counting)
        plan = Plan(seed, seconds, directory, cluster.url)
        producers = {name: mode.network for name, mode in PRODUCERS.items()}
        crew = make_crew(plan, workers=workers, producers=producers, has_pooler=pooled)
        try:
            crew.keep_up(with_producers=True)
            faults = _torment(plan, crew, cluster, tell)
            _drain(crew, cluster, tell)
            crew.stop(crew.workers, 20.0)
            with connect(cluster.primary) as conn:
                crew.complaints += checks.find_leftovers(conn)
        finally:
            crew.kill()
        tell("checking")
        with connect(cluster.primary) as conn:
            ledger.load(conn, directory, faults.crashes)
            verdicts = list(checks.check(conn))
            figures = count_figures(conn, directory)
        errors = dict(count_errors(directory))
        return Report(seed, notes, dict(faults.done), figures, verdicts, crew.complaints, errors)


def _insert_counting(database: str, jobs: int) -> None:
    client = awa.Client(database)
    # marks that no producer gives
    client.insert_many_copy(awa.NewJob({"mark": -n}, kind="count") for n in range(1, jobs + 1))
    client.close()


def _torment(plan: Plan, crew: Crew, cluster: Cluster, tell: Tell) -> Faults:
    faults = Faults(crew, cluster, plan.random("faults"), plan.seconds)
    until = time.monotonic() + plan.seconds
    looks_at = time.monotonic() + LOOK_EVERY
    while (left := until - time.monotonic()) > 0:
        crew.keep_up(with_producers=True)
        time.sleep(max(0.0, min(faults.step(), left, 0.1)))
        if time.monotonic() > looks_at:
            looks_at = time.monotonic() + LOOK_EVERY
            with suppress(psycopg.Error), connect(cluster.primary) as conn:
                backlog = ledger.count_open(conn)
                plan.brake.touch() if backlog > MOST_OPEN else plan.brake.unlink(missing_ok=True)
                tell(f"{left:4.0f} s left, {backlog:,} jobs are open, {sum(faults.done.values())} faults")
    faults.end()
    crew.stop(crew.producers, 15.0)
    return faults


def _drain(crew: Crew, cluster: Cluster, tell: Tell) -> None:
    """Keep the workers up until every job has ended, as long as some still do."""
    with connect(cluster.primary) as conn:
        least = ledger.count_open(conn)
        progress = begun = time.monotonic()
        told = 0.0
        while least > 0 and time.monotonic() < min(progress + DRAINED, begun + DRAINED_AT_MOST):
            if time.monotonic() > told:
                told = time.monotonic() + 10
                tell(f"draining, {least} jobs are open")
            crew.keep_up(with_producers=False)
            time.sleep(0.5)
            # of a producer that was killed or cut off
            for (gid,) in conn.execute("SELECT gid FROM pg_prepared_xacts").fetchall():
                with suppress(psycopg.errors.UndefinedObject):
                    conn.execute(psycopg.sql.SQL("ROLLBACK PREPARED {}").format(gid))
            if (left := ledger.count_open(conn)) < least:
                least, progress = left, time.monotonic()


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Whatever hangs is interrupted after *seconds*, in the main thread."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TookTooLong(f"the run had not ended after {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
