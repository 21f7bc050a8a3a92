"""The maintenance thread: does the leader's chores while its runtime holds the lease.

Each chore is isolated: one that fails is logged and tried again later, and delays no other. Between rounds the thread
sleeps on its connection's socket, so that a job which is due soon can wake it. It listens only while it leads; on the
same channel every insert rings for its queue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from psycopg import Connection, Notify
from psycopg.errors import ReadOnlySqlTransaction

from awa.storage.schema import Schema
from awa.storage.trust import connect_trusted
from awa.storage.waiting import take_leader_bell
from awa.worker.leader import Leadership
from awa.worker.service import Service
from awa.worker.wake import Wake

log = logging.getLogger("awa.maintenance")

RETRY_AFTER = 1.0
"""Seconds between two tries of a chore that fails."""


class Chore(Protocol):
    """One thing that the leader does again and again."""

    name: str
    """Shown in logs."""
    hears_bell: bool
    """A job that is due soon calls for it."""

    def run(self, conn: Connection, held_seconds: float) -> float:
        """Do about 50 ms of work at most; return the seconds until there is more to do.

        Args:
            held_seconds: For how long this runtime has led without a gap.
        """


class Maintenance(Service):
    """Runs *chores*, each when its time has come."""

    def __init__(
        self,
        *,
        conninfo: str,
        schema: Schema,
        heartbeat: float,
        identity: Callable[[], int],
        chores: list[Chore],
    ) -> None:
        super().__init__("maintenance")
        self._conninfo = conninfo
        self._schema = schema
        self._leadership = Leadership(schema, heartbeat=heartbeat, identity=identity)
        self._chores = chores
        self._due: dict[str, float] = {}
        self._connection: Connection | None = None
        self._is_leading = False
        self._has_bell = False
        self._is_rung = False
        self._wake = Wake()

    def wake(self) -> None:
        """Do the next round now."""
        super().wake()
        self._wake.ring()

    def step(self) -> float:
        """Renew the lease; when leading, do the chores that are due."""
        if self._connection is None:
            self._connection = connect_trusted(self._conninfo, self._schema, name="maintenance")
            # A handler, since psycopg keeps for ever what arrives with an answer and nobody handles.
            self._connection.add_notify_handler(self._hear)
            self._is_leading = self._has_bell = self._is_rung = False
        connection = self._connection
        if not self._leadership.renew(connection):
            self._due.clear()
            if self._is_leading:
                # the simplest way to hear nothing more and to leave the bell to the next
                self._is_leading = False
                self.close()
            return self._leadership.seconds_to_renewal
        self._is_leading = True
        if not self._has_bell:
            self._has_bell = take_leader_bell(connection, self._schema)
            self._is_rung = True  # for what was inserted before
        is_rung, self._is_rung = self._is_rung, False
        sleep = self._leadership.seconds_to_renewal
        for chore in self._chores:
            if self.is_stopping:
                break
            if not self._leadership.is_valid:  # another may lead by now; and rescue relies on how long this one has
                self._is_rung |= is_rung
                return 0.0
            if (is_rung and chore.hears_bell) or self._due.get(chore.name, 0.0) <= time.monotonic():
                try:
                    again = chore.run(connection, self._leadership.held_seconds or 0.0)
                except Exception as error:
                    if connection.closed or isinstance(error, ReadOnlySqlTransaction):  # no chore can do anything here
                        raise
                    log.exception("maintenance: %s failed", chore.name)
                    again = RETRY_AFTER
                self._due[chore.name] = time.monotonic() + again
            sleep = min(sleep, max(self._due[chore.name] - time.monotonic(), 0.0))
        return sleep

    def wait(self, seconds: float) -> None:
        """Sleep until woken, rung for, or the time has passed."""
        connection = self._connection
        if connection is None:
            super().wait(seconds)
            return
        until = time.monotonic() + seconds
        self._listen(connection)  # what came behind the last answer is in no socket any more
        while not self._event.is_set() and not self._is_rung and (left := until - time.monotonic()) > 0:
            self._wake.sleep(left, connection.pgconn.socket)
            connection.pgconn.consume_input()
            self._listen(connection)
        self._event.clear()

    def _listen(self, connection: Connection) -> None:
        while (notification := connection.pgconn.notifies()) is not None:
            if notification.extra == b"":
                self._is_rung = True

    def _hear(self, notification: Notify) -> None:
        """Called by psycopg, in this thread, for what arrives while a statement runs."""
        if notification.payload == "":
            self._is_rung = True

    def stop(self, timeout: float) -> bool:
        """Give the lease up and end."""
        has_ended = super().stop(timeout)
        if has_ended:
            self._wake.close()
        return has_ended

    def close(self) -> None:
        """Give the lease up and drop the connection."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        try:
            if not connection.closed:
                self._leadership.drop(connection)
        finally:
            connection.close()
