"""Chore: take the attempts of silent runtimes back."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from time import monotonic

from psycopg import Connection

from awa.storage import runtimes
from awa.storage.runtimes import Silent
from awa.storage.schema import Schema
from awa.worker.frozen import FrozenHolders

log = logging.getLogger("awa.maintenance")

BATCH = 200

BUDGET = 0.05
"""Seconds after which a run leaves the rest to the next, which comes at once but lets other chores in between."""


@dataclass(slots=True)
class Sweep:
    """One walk through the open attempts of a silent runtime, oldest first."""

    silent: Silent
    """Whose."""
    is_fenced: bool
    """Its writes are refused."""
    limit: int
    """How many attempts to try at once."""
    ended: int = 0
    """Attempts taken back."""
    left: int = 0
    """Attempts passed over, which could not be taken back now."""


class Rescue:
    """Fences runtimes that have been silent for too long and ends their open attempts.

    After an outage everybody looks dead. So nobody is fenced before this runtime has led for two heartbeats without a
    gap: time enough for the living to be heard.

    An attempt may be impossible to take back: an open transaction completes it, or its entry is lost. It is passed
    over, and tried again in the next round with one attempt at a time, since each may wait for a lock.
    """

    name = "rescue"
    hears_bell = False

    def __init__(self, schema: Schema, *, heartbeat: float, stale_after: float) -> None:
        self._schema = schema
        self._heartbeat = heartbeat
        self._stale_after = stale_after
        self._frozen = FrozenHolders(schema)
        self._round: deque[Sweep] = deque()
        self._stuck: set[int] = set()
        """Runtimes whose last sweep left attempts."""

    def run(self, conn: Connection, held_seconds: float) -> float:
        """Look at every silent runtime once, in as many runs as it takes."""
        until = monotonic() + BUDGET
        if not self._round:
            found = runtimes.list_silent(conn, self._schema, stale_after=self._stale_after)
            self._stuck &= {silent.runtime for silent in found}
            self._round.extend(
                Sweep(silent, silent.is_gone, 1 if silent.runtime in self._stuck else BATCH) for silent in found
            )
        while self._round and monotonic() < until:
            sweep = self._round.popleft()  # for good, if it raises: the others get their turn
            if (sweep.is_fenced or self._fence(conn, sweep, held_seconds)) and self._take_back(conn, sweep):
                self._round.appendleft(sweep)
        return 0.0 if self._round else min(self._heartbeat / 2, 1.0)

    def _fence(self, conn: Connection, sweep: Sweep, held_seconds: float) -> bool:
        silent = sweep.silent
        if held_seconds >= 2 * self._heartbeat:
            sweep.is_fenced = runtimes.fence(conn, self._schema, silent.runtime, stale_after=self._stale_after)
            if not sweep.is_fenced:
                # one of its own transactions is in progress: for ever, when its client is frozen
                self._frozen.end(conn, f"runtime:{silent.runtime}")
        if sweep.is_fenced:
            log.warning(
                "runtime %d (host %s, process %d) was silent for %.0f s and is taken for dead",
                silent.runtime,
                silent.hostname,
                silent.pid,
                silent.silent_seconds,
            )
        return sweep.is_fenced

    def _take_back(self, conn: Connection, sweep: Sweep) -> bool:
        """Take one batch back; whether there may be more."""
        runtime = sweep.silent.runtime
        done = runtimes.rescue(conn, self._schema, runtime, limit=sweep.limit, skip=sweep.left)
        if done.blocked and not done.tried:
            self._frozen.end(conn, f"runtime:{runtime}")
        has_more = done.tried == sweep.limit
        sweep.limit = 1 if done.blocked else BATCH
        sweep.ended += done.ended
        sweep.left += max(done.tried - done.ended, done.blocked)  # one is blocked, none tried: all of them are
        if has_more:
            return True
        if sweep.ended:
            log.warning("took back %d attempts of runtime %d", sweep.ended, runtime)
        if sweep.left == 0:
            runtimes.finish(conn, self._schema, runtime)
        elif runtime not in self._stuck:
            log.warning("%d attempts of runtime %d cannot be taken back now; still trying", sweep.left, runtime)
            self._stuck.add(runtime)
        return False
