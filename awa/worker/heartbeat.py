"""Signs of life: a thread with a connection of its own, so that neither handlers nor claims delay them.

With each it looks for claims of this runtime that the process does not know, and gives them back. There are none,
unless a server gets a claim out of a proxy whose client is gone: whoever lost the connection has looked by then.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from psycopg import Connection
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from awa._core import Outcomes
from awa.errors import RuntimeGone
from awa.storage import recovery, runtimes
from awa.storage.schema import Schema
from awa.storage.trust import connect_trusted
from awa.worker.requests import LOOK_EVERY, Requests
from awa.worker.service import Service

log = logging.getLogger("awa.worker")


class Heartbeat(Service):
    """Tells every *interval* seconds that this runtime lives, and which of its claims are open.

    Between two signs of life it looks for requests to cancel what runs.

    Args:
        is_certain: Whether no claim is on its way to this process, and none was lost on it.
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
        is_certain: Callable[[], bool],
        requests: Requests,
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
        self._is_certain = is_certain
        self._requests = requests
        self._on_gone = on_gone
        self._connection: Connection | None = None
        self._due = 0.0  # when the next sign of life is
        self._gone = 0  # the last runtime that was reported
        self._runtime = 0  # whose claims these are:
        self._accounted = 0  # up to this one all are known, ...
        self._received = 0  # ... and at the next look up to this one

    def step(self) -> float:
        """Give a sign of life when one is due, and look for requests."""
        if self._connection is None:
            self._connection = connect_trusted(self._hasty, self._schema, name="heartbeat")
            self._due = 0.0
        if time.monotonic() >= self._due:
            self._beat(self._connection)
            self._due = time.monotonic() + self._interval
        self._requests.look(self._connection, self._identity())
        return max(min(self._due - time.monotonic(), LOOK_EVERY), 0.0)

    def _beat(self, connection: Connection) -> None:
        # newest first: a claim that arrives between the two reads is above the newest, or in the list
        newest = self._outcomes.newest_claim
        runtime = self._identity()
        is_known = runtimes.heartbeat(
            connection, self._schema, runtime, newest_claim=newest, open_claims=self._outcomes.open_claims()
        )
        if not is_known and runtime == self._identity() and runtime != self._gone:
            self._gone = runtime
            log.warning("runtime %d was taken for dead", runtime)
            self._on_gone(runtime)
        if is_known:
            self._give_back_unknown(connection, runtime, newest)

    def _give_back_unknown(self, connection: Connection, runtime: int, newest: int) -> None:
        """Release claims of this runtime of which the process knows nothing.

        A claim that is just arriving is not among them, by the order of three looks. A claim that the first look, at
        the database, finds had committed before. If the second finds no claim on its way, the answer to that one has
        been received, and the third, at what was received, finds it; or it was lost, and then the second says so until
        the lost connection's claims are given back. A claim that is unknown after that stays unknown: it does no harm
        to release it a moment later, under the runtime's lock.

        The looks begin at the claim that was the newest two looks ago: a transaction that has drawn an older number
        and not committed yet has a heartbeat's time to do so.
        """
        if runtime != self._runtime:
            self._runtime, self._accounted, self._received = runtime, 0, 0
        after = self._accounted
        found = recovery.list_claims(connection, self._schema, runtime, after=after)
        if not self._is_certain():
            return
        unknown = set(found) - set(self._outcomes.received_since(after))
        if unknown:
            try:
                released = recovery.release_unknown_claims(
                    connection, self._schema, runtime, newest=after, only=sorted(unknown)
                )
            except RuntimeGone:
                return  # the next sign of life tells
            if released is None:
                return
            log.warning("released %d attempts of %d claims that were answered to nobody", released, len(unknown))
        self._accounted, self._received = self._received, newest

    def close(self) -> None:
        """Drop the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
