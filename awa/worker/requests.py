"""What is asked of this worker from outside: to end attempts that run, and to claim nothing more."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from psycopg import Connection

from awa._core import Crew
from awa.storage import control
from awa.storage.schema import Schema

log = logging.getLogger("awa.job")

LOOK_EVERY = 0.8
"""Seconds between looks, so that what is asked is heard within a second."""


class Requests:
    """Looks for requests; the heartbeat calls it on its own connection.

    Args:
        crew: Whose attempts these are.
        be_quiet: Told at each look whether the worker is to claim nothing.
    """

    def __init__(self, crew: Crew, schema: Schema, be_quiet: Callable[[bool], object]) -> None:
        self._crew = crew
        self._schema = schema
        self._be_quiet = be_quiet

    def look(self, conn: Connection[Any], runtime: int) -> None:
        """Pass on whether to be quiet, and tell each handler that is asked to end."""
        asked = control.read_requests(conn, self._schema, runtime)
        self._be_quiet(asked.is_quiet)
        if not asked.to_cancel:
            return
        running = {
            attempt.entry_id: attempt
            for attempt in self._crew.running
            if attempt is not None and attempt.batch.runtime == runtime
        }
        entries = set(asked.to_cancel)
        for entry_id in entries & running.keys():
            attempt = running[entry_id]
            if not attempt.is_asked_to_cancel:
                log.info("job %d %s: somebody asked to cancel it", attempt.id, attempt.handler.kind)
                attempt.is_asked_to_cancel = attempt.is_cancelled = True
        if entries - running.keys():
            # of attempts that have not started or whose end is not recorded yet, or leftovers
            control.forget_requests(conn, self._schema, runtime, entries - running.keys())
