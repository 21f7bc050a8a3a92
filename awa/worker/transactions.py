"""A handler's own transaction, which completes its attempt at the end: borrowed, begun, completed, committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from psycopg import Connection, IsolationLevel

from awa._core import Attempt
from awa.errors import ConfigError, StaleAttempt
from awa.lent import Driver

Complete = Callable[[Attempt, Connection[Any], object], None]
"""Completes an attempt in the transaction of a connection, with a result."""


class Transactions:
    """What ``job.transaction()`` gives to the handlers of one worker.

    Args:
        lend: Borrows a connection in autocommit mode, and sets right what the borrower changed.
    """

    def __init__(self, lend: Callable[[], AbstractContextManager[Connection[Any]]]) -> None:
        self._lend = lend
        # The connection, and the result to keep. One step each, so the interpreter's lock guards it.
        self._open: dict[Attempt, tuple[Connection[Any], object]] = {}

    @contextmanager
    def begin(
        self, attempt: Attempt, isolation_level: IsolationLevel | str | None, complete: Complete
    ) -> Iterator[Connection[Any]]:
        """See :meth:`awa.Job.transaction`."""
        level = _check_isolation_level(isolation_level)
        if attempt.is_over:
            raise stale(attempt)
        if attempt.thread != threading.get_ident():
            raise ConfigError(
                f"job.transaction() of job {attempt.id} belongs in the thread of its handler: "
                "begin it there, and give its connection to the other thread"
            )
        if attempt in self._open:
            raise ConfigError(
                f"job.transaction() of job {attempt.id} is open already, and an attempt is completed once: "
                "use its connection, with conn.transaction() for a savepoint"
            )
        with self._lend() as conn:
            conn.isolation_level = level
            try:
                with conn.transaction():
                    self._open[attempt] = conn, None
                    yield conn
                    _, result = self._open.pop(attempt)
                    complete(attempt, conn, result)
            finally:
                self._open.pop(attempt, None)

    def completes(self, attempt: Attempt, conn: Driver, result: object) -> bool:
        """Whether *conn* is in an open transaction that completes *attempt* at its end, then with *result*.

        Raises:
            ConfigError: There is one, on another connection.
        """
        opened = self._open.get(attempt)
        if opened is not None and opened[0] is not conn:
            raise ConfigError(
                f"job.transaction() of job {attempt.id} is open, and completes it at its end: "
                "complete(conn) on another connection would be the second time"
            )
        if opened is not None:
            self._open[attempt] = opened[0], result
        return opened is not None


def stale(attempt: Attempt) -> StaleAttempt:
    """Why an attempt that is over cannot be completed."""
    return StaleAttempt(
        f"the time of job {attempt.id} was up and its handler did not end, so its attempt has failed: roll back"
        if attempt.is_abandoned
        else f"the handler of job {attempt.id} has ended: complete it before the handler returns",
        job_id=attempt.id,
        entry_id=attempt.entry_id,
    )


def _check_isolation_level(value: object) -> IsolationLevel:
    if value is None:
        return IsolationLevel.READ_COMMITTED
    if isinstance(value, IsolationLevel):
        return value
    if isinstance(value, str):
        name = "_".join(value.upper().split())
        if name in IsolationLevel.__members__:
            return IsolationLevel[name]
    raise ConfigError(
        f"isolation_level is {value!r}: give 'read committed', 'repeatable read' or 'serializable', "
        "or a psycopg.IsolationLevel"
    )
