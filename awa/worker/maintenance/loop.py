"""The maintenance thread: does the leader's chores while its runtime holds the lease.

Each chore is isolated: one that fails is logged and tried again later, and delays no other. Between rounds the thread
sleeps on its connection's socket, so that a job which is due soon can wake it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import psycopg
from psycopg import Connection

from awa.storage.pool import connect
from awa.storage.schema import Schema
from awa.storage.waiting import take_leader_bell
from awa.worker.leader import Leadership
from awa.worker.service import Service
from awa.worker.wake import Wake

log = logging.getLogger("awa.maintenance")

LONGEST_SLEEP = 1.0
"""Seconds: a job that is inserted further ahead of its time than this needs to wake nobody."""


class Chore(Protocol):
    """One thing that the leader does again and again."""

    name: str

    def run(self, conn: Connection, held_seconds: float) -> float:
        """Do one round, under 50 ms; return the seconds until the next.

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
        self._has_bell = False
        self._wake = Wake()

    def wake(self) -> None:
        """Do the next round now."""
        super().wake()
        self._wake.ring()

    def step(self) -> float:
        """Renew the lease; when leading, do the chores that are due."""
        if self._connection is None:
            self._connection = connect(self._conninfo, name="maintenance")
            self._connection.execute(f"LISTEN {self._schema.channel}")
            self._has_bell = False
        if not self._leadership.renew(self._connection):
            self._due.clear()
            self._drop_bell()
            return self._leadership.seconds_to_renewal
        if not self._has_bell:
            # While this connection holds it, inserts of jobs that are due soon notify.
            self._has_bell = take_leader_bell(self._connection, self._schema)
        sleep = min(LONGEST_SLEEP, self._leadership.seconds_to_renewal)
        for chore in self._chores:
            now = time.monotonic()
            if self._due.get(chore.name, 0.0) <= now:
                try:
                    again = chore.run(self._connection, self._leadership.held_seconds or 0.0)
                except psycopg.OperationalError:
                    if self._connection.closed:
                        raise
                    log.exception("maintenance: %s failed", chore.name)
                    again = 1.0
                except Exception:
                    log.exception("maintenance: %s failed", chore.name)
                    again = 1.0
                self._due[chore.name] = now + again
            sleep = min(sleep, max(self._due[chore.name] - time.monotonic(), 0.0))
        return sleep

    def wait(self, seconds: float) -> None:
        """Sleep until woken, notified that something is due soon, or the time has passed."""
        connection = self._connection
        if connection is None:
            super().wait(seconds)
            return
        until = time.monotonic() + seconds
        while not self._event.is_set() and (left := until - time.monotonic()) > 0:
            self._wake.sleep(left, connection.pgconn.socket)
            connection.pgconn.consume_input()
            while (notification := connection.pgconn.notifies()) is not None:
                if notification.extra == b"":
                    self._due.clear()
                    self._event.set()
        self._event.clear()

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

    def _drop_bell(self) -> None:
        if self._has_bell and self._connection is not None:
            self._connection.execute(self._schema.sql("SELECT pg_advisory_unlock(hashtextextended('awa.bell:', 0))"))
            self._has_bell = False
