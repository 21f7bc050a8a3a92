"""Processes that froze while the server held a lock for them: their backends are ended, so that others go on.

A backend whose client reads no more waits for it once the socket's buffer is full, with the locks of its transaction.
One claim fits the buffer; the second of a round trip, or one by a program in another language, may not. A stopped
process, a paused container or a sleeping laptop then holds a queue's claim lock, which nobody waits for and nobody else
gets; and its own runtime's lock, so that it cannot be fenced and its attempts cannot be taken back.

Any worker ends such a backend, not only the leader, which may be the frozen one. When the process wakes it finds its
connection lost, and asks the database what became of its claims, as after any lost connection.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import psycopg
from psycopg import Connection

from awa.errors import AwaError
from awa.storage import backends
from awa.storage.backends import Holder
from awa.storage.connection import connect
from awa.storage.line import Claimed
from awa.storage.schema import Schema
from awa.worker.service import first_line

log = logging.getLogger("awa.worker")

HELD_FOR = 2.0
"""Seconds for which a queue is found held without a break before its holder is looked at, and for which a holder must
have waited for its client to count as frozen. A claim that goes well takes some milliseconds."""


class FrozenHolders:
    """Ends the backends of frozen clients that hold a lock; complains once of each that it may not end."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._hidden: dict[str, int] = {}  # lock -> who held it at the last look, when nothing could be seen of it
        self._refused: set[int] = set()

    def end(self, conn: Connection, lock: str) -> None:
        """End those that hold *lock*, ``queue:NAME`` or ``runtime:NUMBER``."""
        hidden = self._hidden.pop(lock, None)
        for holder in backends.list_holders(conn, self._schema, lock):
            if holder.pid in self._refused:
                continue
            if holder.backend is None:  # another role's: claims that follow each other look like one that stands
                self._hidden[lock] = holder.pid
                if holder.pid == hidden:
                    self._complain(holder, lock)
            elif (holder.client_wait or 0.0) >= HELD_FOR:
                try:
                    backends.end_holder(conn, self._schema, holder.backend, lock)
                except psycopg.errors.InsufficientPrivilege:
                    self._complain(holder, lock)
                    continue
                text = "backend %d, which held the lock of %s, had waited %.1f s for a client that is frozen: ended it"
                log.warning(text, holder.pid, lock, holder.client_wait)

    def _complain(self, holder: Holder, lock: str) -> None:
        self._refused.add(holder.pid)
        text = "backend %d of role %s holds the lock of %s, and this role may not end it: if its client is frozen, run "
        text += "SELECT pg_terminate_backend(%d) as a role that may"
        log.warning(text, holder.pid, holder.role, lock, holder.pid)


class HeldQueues:
    """Watches, for one claimer, which queues somebody else holds all the time."""

    def __init__(self, conninfo: str, schema: Schema) -> None:
        self._conninfo = conninfo
        self._holders = FrozenHolders(schema)
        self._since: dict[str, float] = {}
        self._look_at: dict[str, float] = {}

    def saw(self, claims: Sequence[Claimed]) -> None:
        """Take note of what the claims of one exchange found."""
        for claimed in claims:
            if not claimed.is_busy or claimed.error is not None:
                self._since.pop(claimed.queue, None)
                self._look_at.pop(claimed.queue, None)
            elif claimed.queue not in self._since:
                now = time.monotonic()
                self._since[claimed.queue], self._look_at[claimed.queue] = now, now + HELD_FOR

    @property
    def has_one_for_long(self) -> bool:
        """Whether a queue has been held for so long that trying it at once is of no use."""
        if not self._since:
            return False
        return time.monotonic() - min(self._since.values()) > HELD_FOR

    def end_frozen(self) -> None:
        """Look who holds the queues that have been held for long, every now and then, and end who is frozen.

        To be called with no claimed attempt at hand: it may take a while.
        """
        now = time.monotonic()
        for queue in [queue for queue, at in self._look_at.items() if at <= now]:
            self._look_at[queue] = now + HELD_FOR
            try:
                with connect(self._conninfo, name="recovery") as connection:
                    self._holders.end(connection, f"queue:{queue}")
            except (psycopg.Error, AwaError) as error:
                log.warning("queue %s is held, and looking by whom failed: %s", queue, first_line(error))
