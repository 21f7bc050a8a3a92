"""Signs of life: a thread with a connection of its own, so that neither handlers nor claims delay them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from psycopg import Connection
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from awa._core import Outcomes
from awa.storage import runtimes
from awa.storage.pool import connect
from awa.storage.schema import Schema
from awa.worker.service import Service

log = logging.getLogger("awa.worker")


class Heartbeat(Service):
    """Tells every *interval* seconds that this runtime lives, and which of its claims are open.

    Args:
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
        on_gone: Callable[[int], None],
    ) -> None:
        super().__init__("heartbeat")
        # a cut that nobody tells of must be noticed, and mended, before this runtime is taken for dead
        haste = {"connect_timeout": max(2, round(2 * interval)), "tcp_user_timeout": max(1000, round(2000 * interval))}
        given = conninfo_to_dict(conninfo)
        self._hasty = make_conninfo(conninfo, **{key: value for key, value in haste.items() if key not in given})
        self._schema = schema
        self._interval = interval
        self._identity = identity
        self._outcomes = outcomes
        self._on_gone = on_gone
        self._connection: Connection | None = None
        self._gone = 0  # the last runtime that was reported

    def step(self) -> float:
        """Give one sign of life."""
        if self._connection is None:
            self._connection = connect(self._hasty, name="heartbeat")
        # newest first: a claim that arrives between the two reads is above the newest, or in the list
        newest = self._outcomes.newest_claim
        runtime = self._identity()
        is_known = runtimes.heartbeat(
            self._connection, self._schema, runtime, newest_claim=newest, open_claims=self._outcomes.open_claims()
        )
        if not is_known and runtime == self._identity() and runtime != self._gone:
            self._gone = runtime
            log.warning("runtime %d was taken for dead", runtime)
            self._on_gone(runtime)
        return self._interval

    def close(self) -> None:
        """Drop the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
