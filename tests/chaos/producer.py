"""What a producer process is made of.

A *deed* is one transaction. It is noted before it begins, with the marks of the jobs that it is meant to leave and of
those that it inserts and takes back; then its fate is noted. Rolled back is what was never told to commit; unknown is
whatever was interrupted at the commit.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import psycopg
from psycopg import Connection

import awa
from tests.chaos.journal import Journal
from tests.chaos.plan import Plan

KINDS = {
    "nothing": 55.0,
    "nap": 20.0,
    "slow": 0.3,
    "flaky": 6.0,
    "changeable": 6.0,
    "effect": 8.0,
    "hasty": 3.0,
    "count": 4.0,
    "overdue": 0.5,
    "deadly": 0.06,
    "rare": 4.0,
}
"""How often a kind of job is inserted, in parts of their sum."""


class Undone(Exception):
    """Raised in a transaction to take it back."""


class Producer:
    """Does deeds, one after the other, over one lent connection and a client of its own."""

    def __init__(self, plan: Plan, name: str, *, notify: bool = True) -> None:
        self.who = f"{name}-{os.getpid()}"
        self.random: random.Random = plan.random("producer", name, os.environ["CHAOS_INCARNATION"])
        self.client = awa.Client(notify=notify)
        self.is_stopping = False
        self._plan = plan
        self._journal = Journal(plan.directory / f"producer-{self.who}.journal")
        self._deeds = count(1)
        first = (int(os.environ["CHAOS_PRODUCER"]) * 1000 + int(os.environ["CHAOS_INCARNATION"])) * 10**9
        self._marks = count(first)
        self._connection: Connection[Any] | None = None
        self._way = ""

    def connection(self) -> Connection[Any]:
        """The application's own connection, opened anew when it was lost."""
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(
                self._plan.database,
                autocommit=True,
                connect_timeout=5,
                application_name="producer",
                prepare_threshold=None,  # as somebody sets it who may be behind a pooler
            )
        return self._connection

    def marks(self, most: int) -> list[int]:
        """Numbers for 1 to *most* new jobs."""
        return [next(self._marks) for _ in range(self.random.randint(1, most))]

    def job(self, mark: int, **options: Any) -> awa.NewJob:
        """Any job."""
        chance = self.random
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        if kind == "deadly":
            options["max_attempts"] = 2
        elif kind in ("flaky", "overdue"):
            options["max_attempts"] = chance.randint(1, 5)
        if chance.random() < 0.3:
            options["priority"] = chance.randint(1, 4)
        if chance.random() < 0.2:
            options["queue"] = "bulk"
        if chance.random() < 0.05:
            options["tags"] = ["chaos"]
        pad = chance.choices([0, 100, 5_000, 100_000], [90, 8, 1.9, 0.1])[0]
        return awa.NewJob({"mark": mark, "pad": "x" * pad}, kind=kind, **options)

    def parent(self, mark: int) -> awa.NewJob:
        """A job that one of three others follows, by how it ends; see the check of follow-ups for their marks."""

        def child(number: int) -> awa.NewJob:
            delay = self.random.choice([None, self.random.uniform(0.0, 2.0)])
            return awa.NewJob({"mark": -(10 * mark + number)}, kind="child", delay=delay)

        return awa.NewJob(
            {"mark": mark},
            kind="parent",
            max_attempts=self.random.randint(1, 4),
            on_completed=child(1),
            on_failed=[child(2)],
            on_cancelled=child(3),
        )

    def jobs(self, marks: Iterable[int]) -> list[awa.NewJob]:
        return [self.job(mark) for mark in marks]

    def add_rows(self, conn: Connection[Any], marks: Iterable[int]) -> None:
        """Write the application's row beside each job."""
        conn.execute("INSERT INTO app.orders SELECT unnest(%s::bigint[])", [list(marks)])

    @contextmanager
    def deed(self, meant: list[int], undone: Iterable[int] = (), *, has_row: bool) -> Iterator[Deed]:
        """Notes a deed and its fate; an error that the server or the network caused is part of it."""
        number = next(self._deeds)
        facts = {"way": self._way, "meant": meant, "undone": list(undone), "has_row": has_row}
        self._journal.note(who=self.who, deed=number, **facts)
        deed = Deed()
        try:
            yield deed
            deed.fate = "committed"
        except Undone:
            pass
        except (psycopg.Error, awa.AwaError) as error:
            self.tell(f"{deed.fate}: {error}")
        self._journal.note(who=self.who, deed=number, fate=deed.fate)

    @contextmanager
    def lent(self, deed: Deed) -> Iterator[Connection[Any]]:
        """A transaction of the application's own, which jobs join."""
        with self.connection().transaction():
            yield self.connection()
            deed.fate = "unknown"  # from here on the commit may be under way

    def control(self, job: int, what: str, call: Callable[[], awa.Controlled]) -> None:
        """Do to *job* what an operator does, and note the answer."""

        def note(happened: str) -> None:
            self._journal.note(who=self.who, control=what, job=job, happened=happened, at=time.time())

        note("asked")
        try:
            note(call().happened)
        except (awa.JobNotFound, awa.JobBusy) as error:
            note(type(error).__name__)

    def pause(self, seconds: float) -> None:
        """Wait for up to twice as long."""
        until = time.monotonic() + self.random.uniform(0, 2 * seconds)
        while not self.is_stopping and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))

    def work(self, ways: list[tuple[Callable[[Producer], None], float]], rest: float) -> None:
        """Do deeds until told to stop."""
        signal.signal(signal.SIGTERM, self._stop)
        while not self.is_stopping:
            if self._plan.brake.exists():
                self.pause(0.5)
                continue
            way = self.random.choices([way for way, _ in ways], [weight for _, weight in ways])[0]
            self._way = way.__name__
            try:
                way(self)
            except psycopg.Error as error:  # there was no connection to begin with
                self.tell(str(error))
            self.pause(rest)

    def tell(self, text: str) -> None:
        """Write what went wrong to the log, and let some time pass."""
        print(f"{self._way}: {text}", file=sys.stderr, flush=True)
        time.sleep(0.1)

    def _stop(self, number: int, frame: object) -> None:
        self.is_stopping = True


class Deed:
    """One transaction and what became of it."""

    fate = "rolled back"
