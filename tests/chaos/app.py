"""The application whose workers are tormented: ``python -m awa.worker tests.chaos.app:client``.

What a handler does is decided by the seed, its job's mark and its entry, so it differs between attempts.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from psycopg import IsolationLevel

import awa
from awa import Cancel, RetryAfter, Snooze, StaleAttempt
from tests.chaos.journal import Journal
from tests.chaos.plan import Plan

PLAN = Plan.of_this_process()
NUMBER = os.environ["CHAOS_WORKER"]

client = awa.Client()

_journal = Journal(PLAN.directory / f"worker-{NUMBER}-{os.getpid()}.journal")
_numbers = count(1)
_AGAIN = awa.fixed(0.2, jitter=0.5)


@contextmanager
def running(mark: int) -> Iterator[tuple[awa.Job[Any], random.Random]]:
    """Notes the begin and the end of a handler; gives its job and its random choices."""
    job = awa.current_job()
    number = next(_numbers)
    _journal.note(run="begun", number=number, job=job.id, entry=job.entry_id, mark=mark, at=time.time())
    try:
        yield job, PLAN.random(mark, job.entry_id)
    except StaleAttempt:
        _journal.note(run="stale", number=number)
        raise
    finally:
        _journal.note(run="ended", number=number, at=time.time())


@client.task(kind="nothing", retry=_AGAIN)
def nothing(mark: int, pad: str = "") -> None:
    with running(mark):
        pass


@client.task(kind="nap", retry=_AGAIN)
def nap(mark: int, pad: str = "") -> None:
    with running(mark) as (_, chance):
        time.sleep(chance.uniform(0.001, 0.03))


@client.task(kind="slow", retry=_AGAIN)
def slow(mark: int, pad: str = "") -> None:
    with running(mark) as (_, chance):
        time.sleep(chance.uniform(2.0, 4.0))


@client.task(kind="flaky", retry=_AGAIN)
def flaky(mark: int, pad: str = "") -> None:
    with running(mark) as (job, chance):
        if chance.random() < 0.5:
            raise ValueError(f"attempt {job.attempt} of job {job.id} was to fail")


@client.task(kind="changeable", retry=_AGAIN)
def changeable(mark: int, pad: str = "") -> awa.Outcome | None:
    with running(mark) as (_, chance):
        later = chance.choice([0.0, chance.uniform(0.0, 1.0)])
        return chance.choice([None, Snooze(later), RetryAfter(later), Cancel("was to be cancelled")])


@client.task(kind="overdue", timeout=0.5, retry=_AGAIN)
def overdue(mark: int, pad: str = "") -> None:
    """Often takes longer than it may; sometimes in a call that nothing interrupts."""
    with running(mark) as (_, chance):
        until = time.monotonic() + chance.uniform(0.1, 3.0)
        step = chance.choice([0.01, 5.0])
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, step))


@client.task(kind="effect", retry=_AGAIN)
def effect(mark: int, pad: str = "") -> None:
    _have_effect(mark)


@client.task(kind="hasty", timeout=0.5, retry=_AGAIN)
def hasty(mark: int, pad: str = "") -> None:
    """Likewise, but its time may be up meanwhile."""
    _have_effect(mark)


def _have_effect(mark: int) -> None:
    """Complete inside a transaction: its row must be there exactly once if the job is completed, else not."""
    with running(mark) as (job, chance):
        with client.connection() as conn:
            conn.isolation_level = chance.choice([None, *IsolationLevel])
            try:
                with conn.transaction():
                    conn.execute("INSERT INTO app.effects VALUES (%s, %s)", [mark, job.entry_id])
                    _sometimes_sleep(chance)
                    job.complete(conn)
                    _sometimes_sleep(chance)
                    if chance.random() < 0.05:
                        raise ValueError("was to fail after complete, before the commit")
                _journal.note(run="committed", mark=mark, entry=job.entry_id)
            finally:
                if not conn.closed:
                    conn.isolation_level = None
        if chance.random() < 0.05:
            raise ValueError("was to fail after the commit")


@client.task(kind="count", retry=_AGAIN)
def add_one(mark: int, pad: str = "") -> None:
    """Add one to a counter that others wait for: it counts exactly the completed jobs."""
    with running(mark) as (job, chance):
        with job.transaction(chance.choice([None, None, "repeatable read", "serializable"])) as conn:
            conn.execute("SET LOCAL lock_timeout = '3s'")  # who holds it may be frozen
            conn.execute("UPDATE app.counters SET total = total + 1 WHERE n = %s", [mark % 8])
            if chance.random() < 0.1:
                time.sleep(chance.uniform(0.0, 0.05))
            if chance.random() < 0.05:
                raise ValueError("was to fail before the commit")
        if chance.random() < 0.05:
            raise ValueError("was to fail after the commit")


def _sometimes_sleep(chance: random.Random) -> None:
    if chance.random() < 0.1:
        time.sleep(chance.uniform(0.0, 2.0))


@client.task(kind="parent", retry=_AGAIN, keep_result=True)
def parent(mark: int, pad: str = "") -> dict[str, int]:
    """Ends in every way, and keeps which entry it was when it completes; one job follows it, by how it ended."""
    with running(mark) as (job, chance):
        kept = {"mark": mark, "entry": job.entry_id}
        match chance.choice(["return", "complete", "raise", "snooze", "cancel", "fail"]):
            case "complete":
                with client.connection() as conn, conn.transaction():
                    _sometimes_sleep(chance)
                    job.complete(conn, result=kept)
                    _sometimes_sleep(chance)
                    if chance.random() < 0.1:
                        raise ValueError("was to fail after complete, before the commit")
            case "raise":
                raise ValueError("was to fail")
            case "snooze":
                raise Snooze(chance.uniform(0.0, 1.0))
            case "cancel":
                raise Cancel("was to be cancelled")
            case "fail":
                raise awa.TerminalError("was to fail for good")
        return kept


@client.task(kind="child", retry=_AGAIN)
def child(mark: int) -> None:
    with running(mark):
        pass


@client.task(kind="deadly", retry=_AGAIN)
def deadly(mark: int, pad: str = "") -> None:
    with running(mark):
        os.kill(os.getpid(), signal.SIGKILL)


if NUMBER == "0":  # a kind that the others set aside

    @client.task(kind="rare", retry=_AGAIN)
    def rare(mark: int, pad: str = "") -> None:
        with running(mark) as (_, chance):
            time.sleep(chance.uniform(0.0, 0.01))
