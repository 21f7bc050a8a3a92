"""Chore: take the attempts of silent runtimes back."""

from __future__ import annotations

import logging

from psycopg import Connection

from awa.storage import runtimes
from awa.storage.schema import Schema

log = logging.getLogger("awa.maintenance")

BATCH = 200


class Rescue:
    """Fences runtimes that have been silent for too long and ends their open attempts.

    After an outage everybody looks dead. So nobody is fenced before this runtime has led for two heartbeats without a
    gap: time enough for the living to be heard.
    """

    name = "rescue"

    def __init__(self, schema: Schema, *, heartbeat: float, stale_after: float) -> None:
        self._schema = schema
        self._heartbeat = heartbeat
        self._stale_after = stale_after

    def run(self, conn: Connection, held_seconds: float) -> float:
        """Look at every silent runtime once."""
        for silent in runtimes.list_silent(conn, self._schema, stale_after=self._stale_after):
            if not silent.is_gone:
                if held_seconds < 2 * self._heartbeat:
                    continue
                if not runtimes.fence(conn, self._schema, silent.runtime, stale_after=self._stale_after):
                    continue
                log.warning(
                    "runtime %d (host %s, process %d) was silent for %.0f s and is taken for dead",
                    silent.runtime,
                    silent.hostname,
                    silent.pid,
                    silent.silent_seconds,
                )
            self._take_back(conn, silent.runtime)
        return min(self._heartbeat / 2, 1.0)

    def _take_back(self, conn: Connection, runtime: int) -> None:
        ended = blocked = 0
        while True:
            done = runtimes.rescue(conn, self._schema, runtime, limit=BATCH, skip=blocked)
            ended += done.ended
            blocked += done.blocked
            if done.ended == 0 and done.tried <= done.blocked:
                break
        if ended:
            log.warning("took back %d attempts of runtime %d", ended, runtime)
        if blocked == 0:
            runtimes.finish(conn, self._schema, runtime)
