"""One worker's claims, one at a time and each timed alone, on its real connection and through the real core.

A worker settles and claims in one round trip and runs handlers meanwhile; here the three follow one another, so that
the time of a claim is that of the claim: sent, run, received and decoded.
"""

from __future__ import annotations

import math
import time
from itertools import repeat
from types import TracebackType
from typing import Self

import psycopg

import awa
from awa._core import Crew, Flush, Outcomes
from awa.config import Settings
from awa.job import Outcome
from awa.storage.line import Claimed, Line, Wanted
from awa.storage.schema import Schema
from awa.version import VERSION
from awa.worker.identity import Identity
from awa.worker.supervisor import make_handlers
from benchmarks.record import BenchmarkError, Result, percentiles
from benchmarks.scenarios.tasks import client as tasks
from benchmarks.scenarios.tasks import noop

BATCH = 100
"""Attempts of one claim."""

SINGLES = 2
"""Single inserts, each timed, before a claim; the rest of the batch comes by one ``insert_many``."""

WARM_UP = 20
"""Steps before the first that counts: server and driver have their plans after ten."""

CHUNK = 10_000
"""Jobs of one transaction of a backlog."""

CLAIMED = """
    WITH done AS MATERIALIZED (
        SELECT c.entry_ids[i.idx] AS entry_id
          FROM awa.claims c
          JOIN awa.completions d USING (slot, claim_id)
         CROSS JOIN LATERAL unnest(d.idx) AS i(idx)
         WHERE c.queue = %(queue)s
    ), oldest AS MATERIALIZED (
        SELECT entry_id FROM awa.jobs WHERE queue = %(queue)s ORDER BY xid, entry_id LIMIT %(claimed)s
    )
    SELECT (SELECT count(*) FROM awa.jobs WHERE queue = %(queue)s),
           (SELECT count(*) FROM awa.claims c, unnest(c.entry_ids) WHERE c.queue = %(queue)s),
           (SELECT count(*) FROM done),
           (SELECT count(*) FROM oldest WHERE entry_id IN (SELECT entry_id FROM done))
"""


class Claiming:
    """Inserts a batch, claims a batch, completes it: what waits in the queue stays as many as it was.

    Entering connects and warms up, which adds a batch of jobs to the queue and takes one out at each of its steps.

    Args:
        database: Connection string of a migrated database.
        queue: Where it inserts and claims.
    """

    def __init__(self, database: str, queue: str) -> None:
        self._database = database
        self._queue = queue
        self._handlers = make_handlers(tasks.registry)
        self._outcomes = Outcomes()
        self._crew = Crew(
            1,
            self._outcomes,
            job=_none,
            conclude=_none,
            late=_none,
            lead=self._rest,
            chosen=Outcome,
            flush_after=math.inf,
        )
        self._steps = 0  # warm-up included; each inserted, claimed and completed BATCH jobs
        self._loaded = 0
        self.claims: list[float] = []
        """Seconds that each claim took that counts."""
        self.inserts: list[float] = []
        """Seconds that each single insert took that counts."""

    def __enter__(self) -> Self:
        self._client = awa.Client(self._database)
        self._lent = psycopg.connect(self._database, autocommit=True)
        identity = Identity(self._database, Schema(), Settings(), VERSION, self._handlers)
        identity.register()
        self._runtime = identity()
        self._line = Line(self._database, Schema(), self._handlers)
        self.warm_up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._line.close()
        self._lent.close()
        self._client.close()

    def warm_up(self) -> None:
        """Make some steps that do not count."""
        for _ in range(WARM_UP):
            self.step(is_counted=False)

    def load(self, jobs: int) -> None:
        """Have so many more jobs wait."""
        job = awa.NewJob(noop.bind(0), queue=self._queue)
        for first in range(0, jobs, CHUNK):
            self._client.insert_many_copy(repeat(job, min(CHUNK, jobs - first)), conn=self._lent)
        self._loaded += jobs

    def check(self) -> None:
        """Check that each step claimed the oldest jobs and completed each once, and that all others are still there.

        Raises:
            BenchmarkError: It did not.
        """
        claimed = self._steps * BATCH
        found = self._lent.execute(CLAIMED, {"queue": self._queue, "claimed": claimed}).fetchone()
        if found != (self._loaded + claimed, claimed, claimed, claimed):
            raise BenchmarkError(
                f"of {self._loaded + claimed} jobs in queue {self._queue} the {claimed} oldest should have been claimed"
                f" and completed, once each, but (jobs, claimed, completed, completed of the oldest) are {found}"
            )

    def results(self, name: str) -> list[Result]:
        """What was measured, as ``claim-`` and ``insert-`` and *name*; the rates are those within the calls."""
        found = []
        for what, times, jobs in (("claim", self.claims, BATCH), ("insert", self.inserts, 1)):
            count = jobs * len(times)
            found.append(Result(f"{what}-{name}", count, count / sum(times), **percentiles(times)))
        return found

    def step(self, *, is_counted: bool = True) -> None:
        """Insert a batch, claim one, run and complete it.

        Args:
            is_counted: Whether its times are kept.

        Raises:
            BenchmarkError: The claim brought another number, or an outcome was refused.
        """
        first = self._steps * BATCH
        inserts = []
        for n in range(first, first + SINGLES):
            started = time.perf_counter()
            self._client.insert(noop.bind(n), queue=self._queue, conn=self._lent)
            inserts.append(time.perf_counter() - started)
        self._client.insert_many(
            (awa.NewJob(noop.bind(n), queue=self._queue) for n in range(first + SINGLES, first + BATCH)),
            conn=self._lent,
        )
        started = time.perf_counter()
        reply = self._line.exchange(self._runtime, (), [Wanted(self._queue, BATCH)])
        took = time.perf_counter() - started
        if is_counted:
            self.claims.append(took)
            self.inserts += inserts
        self._run(reply.claims[0])
        self._steps += 1

    def _run(self, claimed: Claimed) -> None:
        if len(claimed.attempts) != BATCH:
            raise BenchmarkError(
                f"a claim of {BATCH} jobs from queue {self._queue} brought {len(claimed.attempts)}"
                f"{': another claimer held it' if claimed.is_busy else ''}"
            ) from claimed.error
        for batch in claimed.batches:
            self._outcomes.opened(batch)
        self._crew.refill(claimed.attempts, BATCH)
        self._crew.dismiss()
        self._crew.work(0)
        flushes: list[Flush] = self._outcomes.take(self._runtime)
        for settled in self._line.exchange(self._runtime, flushes, ()).settled:
            if settled.error is not None or settled.stale:
                raise BenchmarkError(f"an outcome in queue {self._queue} was refused") from settled.error
            self._outcomes.acknowledged(settled.flush)

    def _rest(self) -> None:
        self._crew.rest()


def _none(*what: object) -> None:
    raise AssertionError("a no-op job has no outcome but its success")
