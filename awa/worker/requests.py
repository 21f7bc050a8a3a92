"""Requests to cancel running attempts: telling the handlers that somebody asked."""

from __future__ import annotations

import logging
from typing import Any

from psycopg import Connection

from awa._core import Crew
from awa.storage import control
from awa.storage.schema import Schema

log = logging.getLogger("awa.job")

LOOK_EVERY = 0.8
"""Seconds between looks, so that a handler hears within a second."""


class Requests:
    """Looks for requests to the attempts that *crew* runs; the heartbeat calls it on its own connection."""

    def __init__(self, crew: Crew, schema: Schema) -> None:
        self._crew = crew
        self._schema = schema

    def look(self, conn: Connection[Any], runtime: int) -> None:
        """Tell each handler that is asked to end; asks the database only while handlers run."""
        running = {
            attempt.entry_id: attempt
            for attempt in self._crew.running
            if attempt is not None and attempt.batch.runtime == runtime
        }
        if not running:
            return
        asked = control.list_requests(conn, self._schema, runtime)
        for entry_id in asked & running.keys():
            attempt = running[entry_id]
            if not attempt.is_asked_to_cancel:
                log.info("job %d %s: somebody asked to cancel it", attempt.id, attempt.handler.kind)
                attempt.is_asked_to_cancel = attempt.is_cancelled = True
        if asked - running.keys():
            # of attempts that have not started or whose end is not recorded yet, or leftovers
            control.forget_requests(conn, self._schema, runtime, asked - running.keys())
