"""The connections of a run, which all its examples use in turn."""

from __future__ import annotations

from contextlib import ExitStack

import psycopg
from psycopg.pq import TransactionStatus

from tests.storage.engine import Conn

EMPTY = """
    TRUNCATE awa.jobs, awa.claims, awa.completions, awa.attempt_ends, awa.waiting_jobs, awa.ended_jobs, awa.frontiers,
             awa.runtime_instances, awa.gone_runtimes, awa.leases, awa.cancel_requests,
             awa.statistics, awa.statistics_queues, awa.statistics_claims;
    SELECT setval('awa.ring_seq', 0);
    UPDATE awa.ring SET opened_at = CASE WHEN slot = 0 THEN clock_timestamp() END, sealed_at = NULL;
"""


class Sessions:
    """Opens them, empties the database between examples, and replaces those that were lost."""

    def __init__(self, stack: ExitStack, database: str) -> None:
        self._stack = stack
        self._database = database
        self._open()

    def _open(self) -> None:
        self.main = self.connect()
        """Reads and decides; never lost."""
        self.claimer = self.connect()
        """Claims and settles for all workers."""
        self.slow = [self.connect() for _ in range(2)]
        self.producers = [self.connect() for _ in range(3)]
        self.lenders = [self.connect() for _ in range(2)]

    def connect(self) -> Conn:
        """One more connection; it commits by itself."""
        return self._stack.enter_context(psycopg.connect(self._database, autocommit=True))

    def reset(self) -> None:
        """Let nothing be open, and the database be as after its migrations; numbers go on."""
        for conn in self._all():
            if conn.info.transaction_status != TransactionStatus.IDLE:
                conn.execute("ROLLBACK")
        self.main.execute(EMPTY)

    def _all(self) -> list[Conn]:
        return [self.main, self.claimer, *self.slow, *self.producers, *self.lenders]

    def replace(self, lost: Conn) -> Conn:
        """Another connection for one that is lost."""
        lost.close()
        new = self.connect()
        for conns in (self.slow, self.lenders):
            if lost in conns:
                conns[conns.index(lost)] = new
        return new

    def reopen(self) -> None:
        """All of them anew: the server has restarted."""
        for conn in self._all():
            conn.close()
        self._open()
