"""Up to which claim of its runtime this process knows all, and what to do about one that it does not.

A rescuer takes for open what the last sign of life listed, and every claim above a number that it gave. That number
must not pass a claim whose answer came to nobody. There are none, unless a server gets a claim out of a proxy whose
client is gone: whoever lost the connection has looked by then, newer claims arrive, and it would lie below them, in no
list.

And a server can forget ends that it had acknowledged: after a crash those that were committed asynchronously, after a
failover all that the standby had not received. Then it calls attempts running that this process is done with, and
that its next sign of life would call done, so that nobody rescued them ever. What it has kept is all that was recorded
up to some moment. So the last sign of life that it has kept is true, and tells which claims may have been open then.
Those of which a member is open there are suspects: signs of life list them until they are done here, and then what is
still open of them is given back.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from psycopg import Connection

from awa._core import Outcomes
from awa.errors import RuntimeGone
from awa.storage import backends, recovery, runtimes
from awa.storage.schema import Schema

log = logging.getLogger("awa.worker")

LOOKS = 10
"""How often to look for a moment at which nobody claims, when it cannot be told who does: through a pooler the process
that claims has no backend of its own."""

PAUSE = 0.01
"""Seconds between them."""


class KnownClaims:
    """Looks at the database for claims of this runtime that the process does not know, and gives them back.

    Args:
        line: The server's process of the connection that claims; None when there is none or it cannot be told.
        is_certain: Whether no claim is on its way to this process, and none was lost on it.
    """

    def __init__(
        self,
        *,
        schema: Schema,
        outcomes: Outcomes,
        line: Callable[[], int | None],
        is_certain: Callable[[], bool],
    ) -> None:
        self._schema = schema
        self._outcomes = outcomes
        self._line = line
        self._is_certain = is_certain
        self._runtime = 0  # whose claims these are:
        self._looked = 0  # up to this one all were received or given back
        self._books: recovery.Books | None = None
        self._doubted: recovery.Books | None = None  # of a server that may have forgotten what came after them
        self.number = 0  # all up to this one are known, and recorded if they are neither open here nor suspects
        self.suspects: set[int] = set()
        """Claims that the database may call open for ever: some ends of them may be forgotten."""

    def look(self, connection: Connection, runtime: int) -> int:
        """The number up to which all claims of *runtime* are known.

        It is the newest that was received, if two looks find nothing against it. Whoever claims holds the runtime's
        lock from before its number is drawn until its end is seen. So when the first look, at the lock, finds nobody
        but the connection that claims for this process, all others with a number up to the newest have ended, and the
        second look, at the claims, sees them. That connection makes one claim after the other, so what it has made up
        to the newest was received.

        Claims above the newest may be on their way. The second look finds only what had committed: if after it no
        claim is on its way and none was lost, the answers have been received. Otherwise what is above waits for the
        next look.
        """
        if runtime != self._runtime:
            self._runtime, self._looked, self.number, self._books, self._doubted = runtime, 0, 0, None, None
            self.suspects = set()
        books = recovery.read_books(connection, self._schema, runtime)
        if self._books is None or books.may_have_lost(self._books):
            self._doubted = books
            self.number = min(self.number, books.floor)
        self._books = books
        if self._doubted is not None:
            self.suspects |= self._list_suspects(connection, runtime, self._doubted)
            self._doubted = None
        if done := self.suspects - set(self._outcomes.open_claims()):
            still_open = recovery.list_open_claims(connection, self._schema, runtime, others=sorted(done))
            if self._give_back(connection, runtime, sorted(still_open)):
                self.suspects -= done
        after = self.number = self._looked
        line = self._line()
        newest = self._outcomes.newest_claim
        if not self._have_others_ended(connection, runtime, line):
            return after
        found = recovery.list_claims(connection, self._schema, runtime, after=after)
        is_certain = self._is_certain()
        unknown = set(found) - set(self._outcomes.received_since(after))
        if not self._give_back(connection, runtime, [claim for claim in unknown if is_certain or claim <= newest]):
            return after
        self.number = self._looked = max(after, newest)
        return self.number

    def _list_suspects(self, connection: Connection, runtime: int, books: recovery.Books) -> set[int]:
        """The received claims that *books* do not call done, and of which a member is open."""
        if books.newest_claim is None:  # the sign of life tells
            return set()
        newest = self._outcomes.newest_claim
        return recovery.list_open_claims(
            connection, self._schema, runtime, above=books.newest_claim, upto=newest, others=books.open_claims or ()
        )

    def _have_others_ended(self, connection: Connection, runtime: int, line: int | None) -> bool:
        for _ in range(1 if line is not None else LOOKS):
            holders = backends.list_holders(connection, self._schema, f"runtime:{runtime}")
            if not any(holder.pid != line for holder in holders):
                return True
            if line is None:
                time.sleep(PAUSE * random.uniform(0.5, 1.5))
        return False

    def leave(self, connection: Connection, runtime: int) -> bool:
        """Say that *runtime* has ended, so that nobody claims for it ever more; when nothing of it is open.

        Returns:
            False when the runtime's lock could not be had, so that the caller tries again.
        """
        with connection.transaction():
            if not recovery.try_runtime_lock(connection, self._schema, runtime):
                return False
            books = recovery.read_books(connection, self._schema, runtime)
            suspects = self._list_suspects(connection, runtime, books) - set(self._outcomes.open_claims())
            self._give_back(connection, runtime, sorted(suspects))
            after = self._looked if runtime == self._runtime else 0
            found = recovery.list_claims(connection, self._schema, runtime, after=after)
            self._give_back(connection, runtime, sorted(set(found) - set(self._outcomes.received_since(after))))
            runtimes.leave(connection, self._schema, runtime, newest_claim=self._outcomes.newest_claim)
            return True

    def _give_back(self, connection: Connection, runtime: int, unknown: list[int]) -> bool:
        """Release claims; False when that was not possible just now."""
        if not unknown:
            return True
        try:
            released = recovery.release_unknown_claims(
                connection, self._schema, runtime, newest=min(unknown) - 1, only=sorted(unknown)
            )
        except RuntimeGone:
            return False  # the sign of life tells
        if released:
            log.warning("released %d attempts of %d claims whose answer or end was lost", released, len(unknown))
        return released is not None
