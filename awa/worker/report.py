"""Telling the database what code declares, and how this runtime is: the tick of a worker, every ten seconds.

    start    the declared limits of queues are stored, before the first claim; a queue whose claims are in the way for a
             second is left to the thread, so that the start does not wait for it
    tick     what is left of that, a snapshot (what runs, what is held, how the loops are), and what else is to be told;
             sooner for a new number and for an order to be quiet, and every second until such a worker has nothing left

It has a thread and a connection of its own. A tick that fails is tried again with growing pauses, one that hangs is
given up with its connection, and neither is in anybody's way: nothing that claims, records or gives signs of life waits
for this thread, or reads what it writes. The snapshot and the sign of life change the same row. Each is one statement
that commits by itself, whatever becomes of its client; and the snapshot's commit waits for neither disk nor standby. So
the sign of life waits for it some microseconds, and has waited as long if it comes first.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import orjson
from psycopg import Connection

from awa.errors import QueueBusy
from awa.limits import Limits
from awa.storage import runtimes
from awa.storage.connection import ANSWER_WITHIN, OwnConnection
from awa.storage.queue_control import declare_queue
from awa.storage.schema import Schema
from awa.storage.trust import connect_trusted
from awa.worker.service import Service, first_line
from awa.worker.vitals import Health

log = logging.getLogger("awa.worker")

SNAPSHOT_INTERVAL = 10.0
"""Seconds between ticks, at most."""

JITTER = 0.1
"""A part of that by which a tick may come sooner: a fleet that was started at once does not stay in step."""

FIRST_AFTER = 1.0
"""Seconds from the start to the first tick, by when the loops have begun."""

DRAINING_INTERVAL = 1.0
"""Seconds between ticks of a quiet worker that still holds attempts: somebody waits for it to have none."""

AGAIN = 1.0
"""Seconds until what was in the way of claims is tried again."""

START_WITHIN = 5.0
"""Seconds that a statement of a teller may take at the start, which does not wait for what can be told later."""

STOP_WITHIN = 1.0
"""Seconds that a stop waits for a tick that is under way, of which nothing is needed any more."""

Teller = Callable[[Connection, int, bool], object]
"""Called as ``tell(connection, runtime, is_new)``: at the start, on each tick, and with ``is_new`` until all of them
have succeeded for this number of the runtime; a process that was taken for dead has a new one."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A runtime at one moment."""

    busy: int
    """Handlers that run."""
    in_flight: Mapping[str, int]
    """Queue -> attempts that it holds, running or not started."""
    health: Health
    """How its loops are."""

    @property
    def is_draining(self) -> bool:
        """It claims nothing more, and has not ended all that it holds."""
        return self.health.is_quiet and (self.busy > 0 or any(self.in_flight.values()))


class Report(Service):
    """Tells the database about this worker.

    Args:
        identity: Gives the number of this runtime.
        declared: Limits by queue, whichever of them this worker serves.
        snapshot: Tells how the worker is.
        tellers: What else is told.
    """

    def __init__(
        self,
        conninfo: str,
        schema: Schema,
        *,
        identity: Callable[[], int],
        declared: Mapping[str, Limits],
        snapshot: Callable[[], Snapshot],
        tellers: Sequence[Teller] = (),
    ) -> None:
        super().__init__("report", backoff_cap=SNAPSHOT_INTERVAL)
        self._conninfo = conninfo
        self._schema = schema
        self._identity = identity
        self._left = dict(declared)
        self._snapshot = snapshot
        self._tellers = tellers
        self._connection: OwnConnection | None = None
        self._told = 0  # the runtime of which all has been told
        self._due = 0.0  # when the next tick is
        self._is_hurried = False

    def hurry(self) -> None:
        """Tick now; from any thread."""
        self._is_hurried = True
        self.wake()

    def begin(self) -> None:
        """What comes before the first claim, so that no limit of a new queue is missed; once, before :meth:`start`.

        Raises:
            DatabaseNotFound: The database does not answer. Of what else is told a failure is logged, and tried again.
            StorageNotTrusted: The schema's rows belong to another cluster.
        """
        try:
            self._declare(self._connected())
        except BaseException:
            self.close()
            raise
        connection = self._connected()
        connection.answer_within = START_WITHIN
        try:
            self._tell(connection)
        except Exception as error:
            log.warning("not all could be told of this worker: %s: %s", type(error).__name__, first_line(error))
        connection.answer_within = ANSWER_WITHIN
        self._due = time.monotonic() + FIRST_AFTER

    def step(self) -> float:
        """Declare what is left; tick, when it is time to."""
        connection = self._connected()
        self._declare(connection)
        if self._is_hurried or time.monotonic() >= self._due:
            self._due, self._is_hurried = 0.0, False  # before the look: who hurries it after that is heard
            self._due = time.monotonic() + self._tick(connection)
        left = max(self._due - time.monotonic(), 0.0)
        return min(left, AGAIN) if self._left else left

    def _tick(self, connection: Connection) -> float:
        runtime, now = self._identity(), self._snapshot()
        runtimes.write_snapshot(
            connection,
            self._schema,
            runtime,
            busy=now.busy,
            in_flight=orjson.dumps(dict(now.in_flight)).decode(),
            health=orjson.dumps(now.health.summary()).decode(),
        )
        self._tell(connection)
        return DRAINING_INTERVAL if now.is_draining else SNAPSHOT_INTERVAL * random.uniform(1 - JITTER, 1.0)

    def _declare(self, connection: Connection) -> None:
        for queue, limits in list(self._left.items()):
            try:
                is_news = declare_queue(connection, self._schema, queue, limits)
            except QueueBusy as error:
                log.warning("what is declared of queue %s is not stored yet: %s", queue, error)
                continue
            del self._left[queue]
            if is_news:
                log.info("queue %s is declared with %s", queue, limits)

    def _tell(self, connection: Connection) -> None:
        runtime = self._identity()
        for tell in self._tellers:
            tell(connection, runtime, runtime != self._told)
        self._told = runtime

    def _connected(self) -> OwnConnection:
        if self._connection is None or self._connection.closed:
            self._connection = connect_trusted(self._conninfo, self._schema, name="report")
        return self._connection

    def stop(self, timeout: float) -> bool:
        """End; a tick that hangs is left to itself."""
        return super().stop(min(timeout, STOP_WITHIN))

    def close(self) -> None:
        """Drop the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
