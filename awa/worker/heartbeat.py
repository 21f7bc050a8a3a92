"""Signs of life: a thread with a connection of its own, so that neither handlers nor claims delay them."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable

import psycopg
from psycopg import Connection
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from awa._core import Outcomes
from awa.storage import runtimes
from awa.storage.schema import Schema
from awa.storage.trust import connect_trusted
from awa.worker.known import KnownClaims
from awa.worker.requests import LOOK_EVERY, Requests
from awa.worker.service import BACKOFF_CAP, Service, first_line

log = logging.getLogger("awa.worker")


HUNG_AFTER = 60.0
"""Seconds, or two intervals if that is longer, that a sign of life may take before the thread counts as hung."""


class Heartbeat(Service):
    """Tells every *interval* seconds that this runtime lives, and which of its claims are open.

    Between two signs of life it looks for requests to cancel what runs.

    Args:
        known: Tells up to which claim this process knows all of its runtime.
        on_gone: Called with the number of this runtime when it turns out to be fenced.
    """

    def __init__(
        self,
        *,
        conninfo: str,
        schema: Schema,
        interval: float,
        identity: Callable[[], int],
        outcomes: Outcomes,
        known: KnownClaims,
        requests: Requests,
        on_gone: Callable[[int], None],
    ) -> None:
        # After an outage nobody is fenced before a leader has led for two heartbeats: by then this is heard again,
        # whether it was between two tries to connect or in the middle of one.
        super().__init__(
            "heartbeat", backoff_cap=min(interval / 2, BACKOFF_CAP), patience=max(HUNG_AFTER, 2 * interval)
        )
        self.beat_at: float | None = None
        """When the last sign of life was given, by this process's monotonic clock; None: never."""
        # a cut that nobody tells of must be noticed, and mended, before this runtime is taken for dead
        haste = {"connect_timeout": max(2, round(interval)), "tcp_user_timeout": max(1000, round(2000 * interval))}
        given = conninfo_to_dict(conninfo)
        self._hasty = make_conninfo(conninfo, **{key: value for key, value in haste.items() if key not in given})
        self._schema = schema
        self._interval = interval
        self._identity = identity
        self._outcomes = outcomes
        self._known = known
        self._requests = requests
        self._on_gone = on_gone
        self._connection: Connection | None = None
        self._due = 0.0  # when the next sign of life is
        self._gone = 0  # the last runtime that was reported

    def step(self) -> float:
        """Give a sign of life when one is due, and look for requests."""
        if self._connection is None:
            self._connection = connect_trusted(
                self._hasty, self._schema, name="heartbeat", answer_within=max(1.0, 2 * self._interval)
            )
            self._due = 0.0
        if time.monotonic() >= self._due:
            self._beat(self._connection)
            self._due = time.monotonic() + self._interval
        self._requests.look(self._connection, self._identity())
        return max(min(self._due - time.monotonic(), LOOK_EVERY), 0.0)

    def _beat(self, connection: Connection) -> None:
        runtime = self._identity()
        try:
            known = self._known.look(connection, runtime)
        except psycopg.Error as error:
            if connection.closed:
                raise
            known = self._known.number  # a sign of life is worth more than a look
            log.warning("looking for unknown claims failed: %s", first_line(error))
        # after the look: a claim that arrives in between is above what is known, or in the list
        open_claims = sorted({*self._outcomes.open_claims(), *self._known.suspects})
        is_known = runtimes.heartbeat(connection, self._schema, runtime, newest_claim=known, open_claims=open_claims)
        if is_known:
            self.beat_at = time.monotonic()
        if not is_known and runtime == self._identity() and runtime != self._gone:
            runtimes.bury(connection, self._schema, runtime, hostname=socket.gethostname(), pid=os.getpid())
            self._gone = runtime
            log.warning("runtime %d was taken for dead", runtime)
            self._on_gone(runtime)

    def close(self) -> None:
        """Drop the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
