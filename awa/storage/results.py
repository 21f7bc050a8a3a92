"""What became of jobs, for who waits for them: any number of threads of a process, over one connection.

One of the waiting threads leads: it holds the connection, looks, and tells the others. When its own job has ended it
hands over to another. A job is looked at

- once before anything else, by the thread itself: most of what is asked for has ended;
- once the leader holds the job's lock, shared, which whoever ends the job finds taken, and notifies;
- then after growing pauses, up to a second. An end that was on its way while the lock was taken tells nobody, and
  neither does one that is recorded together with others, of a kind that keeps no results.

These looks are a few index look-ups. What they do not find may have ended so: that is looked into at a higher price,
not more often than its cost allows.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import Connection, Cursor, Notify
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from awa.errors import DatabaseNotFound, JobNotFound
from awa.storage.jobs import REFUSED, not_found, refusal
from awa.storage.pooler import is_pooled
from awa.storage.rows import load_json
from awa.storage.schema import Schema

FIRST_PAUSE, LONGEST_PAUSE = 0.01, 1.0
"""Seconds between two looks at a job: the first, and the most."""

FIRST_SEARCH = 0.05
"""Seconds from the first look to the first search for a job that no index look-up finds."""

SEARCH_SHARE = 0.05
"""Most of the time that searches take."""

MOST_LOCKS = 256
"""Jobs of one process whose ends are notified; the server's table of locks is finite. Others are polled."""

OUTAGE = 30.0
"""Seconds without a database after which who leads gives up."""

LOOK = "SELECT id, state, result::text, error::text FROM awa.outcome_v1(%(ids)s::bigint[])"

SEARCH = "SELECT state, error::text FROM awa.find_job_v2(%(id)s::bigint)"

LOCK = "SELECT pg_advisory_lock_shared(hashtextextended('awa.result:' || id, 0)) FROM unnest(%(ids)s::bigint[]) id"

UNLOCK = "SELECT pg_advisory_unlock_shared(hashtextextended('awa.result:' || id, 0)) FROM unnest(%(ids)s::bigint[]) id"

LISTEN = "SELECT awa.result_channel()"

FINAL = frozenset({"completed", "failed", "cancelled"})

Lend = Callable[[], AbstractContextManager[Connection[Any]]]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended."""

    state: str
    """completed, failed or cancelled."""
    is_kept: bool = False
    """Whether it has a result."""
    result: Any = None
    """As JSON gives it."""
    error: Any = None
    """type, text and traceback, of a job that did not complete."""


@dataclass(slots=True, eq=False)
class _Wait:
    """One job that somebody waits for. Guarded by the lock of ``Results``, and changed by the leader."""

    job_id: int
    state: str
    """As it was seen last."""
    told: threading.Condition
    """Notified when it has ended, or its thread is to lead."""
    users: int = 0
    ended: Ended | JobNotFound | None = None
    is_locked: bool = False
    due: float = 0.0
    pause: float = 0.0
    search_due: float = field(default_factory=lambda: time.monotonic() + FIRST_SEARCH)
    search_pause: float = FIRST_SEARCH


class Results:
    """Waits for the results of jobs, in one process; a forked child begins with nothing.

    Args:
        look: Lends a connection for a moment.
        listen: Lends the one that is kept while somebody waits.
    """

    def __init__(self, schema: Schema, look: Lend, listen: Lend) -> None:
        self._schema = schema
        self._look = look
        self._listen = listen
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._waits: dict[int, _Wait] = {}  # guarded by _lock
        self._left: list[int] = []  # jobs whose locks are to be given back; guarded by _lock
        self._has_leader = False  # guarded by _lock
        # the leader's:
        self._line: _Line | None = None
        self._may_search_at = 0.0

    def wait(self, job_id: int, timeout: float | None) -> Ended:
        """How a job ended, once it has.

        Raises:
            JobNotFound: There is no such job, or its history is gone.
            TimeoutError: It has not ended within *timeout* seconds.
            DatabaseNotFound: There was no database for 30 s.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        with self._look() as conn:
            found = look(conn, self._schema, job_id)
        if isinstance(found, Ended):
            return found
        wait = self._enter(job_id, found)
        try:
            while wait.ended is None and time.monotonic() < until:
                if self._is_to_lead(wait, until):
                    self._lead(wait, until)
        finally:
            self._leave(wait)
        if isinstance(wait.ended, JobNotFound):
            raise JobNotFound(str(wait.ended), job_id=job_id)
        if wait.ended is None:
            hint = ", and no worker has taken it: does one serve its queue?" if wait.state == "available" else ""
            raise TimeoutError(f"job {job_id} has not ended within {timeout:g} s: it is {wait.state}{hint}")
        return wait.ended

    def _enter(self, job_id: int, state: str) -> _Wait:
        with self._lock:
            wait = self._waits.get(job_id)
            if wait is None:
                wait = self._waits[job_id] = _Wait(job_id, state, threading.Condition(self._lock))
                if self._line is not None:
                    self._line.wake()
            wait.users += 1
            return wait

    def _is_to_lead(self, wait: _Wait, until: float) -> bool:
        """Wait until the job has ended, or nobody leads: then this thread does."""
        with self._lock:
            while wait.ended is None and self._has_leader:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                wait.told.wait(min(left, threading.TIMEOUT_MAX))
            if wait.ended is not None:
                return False
            self._has_leader = True
            return True

    def _leave(self, wait: _Wait) -> None:
        with self._lock:
            wait.users -= 1
            if wait.users == 0:
                if self._waits.get(wait.job_id) is wait:
                    del self._waits[wait.job_id]
                if wait.is_locked:
                    self._left.append(wait.job_id)
            if self._has_leader:
                return
            if self._waits:
                self._call_leader()
                return
            line, self._line, self._left = self._line, None, []
        if line is not None:
            line.close()

    def _call_leader(self) -> None:
        """Have somebody lead; the lock is held."""
        for wait in self._waits.values():
            if wait.ended is None:
                wait.told.notify()
                return

    # --- the leader

    def _lead(self, mine: _Wait, until: float) -> None:
        lost_at: float | None = None
        pause = 0.05
        try:
            while mine.ended is None and time.monotonic() < until:
                try:
                    if self._line is None:
                        self._line = _Line(self._schema, self._listen)
                    self._round(self._line)
                    lost_at = None
                    pause = 0.05
                    if mine.ended is None:
                        self._rest(self._line, until)
                except REFUSED as error:
                    assert self._line is not None
                    raise refusal(self._line.conn, self._schema, "producer", error) from error
                except (psycopg.OperationalError, DatabaseNotFound):
                    self._lose_line()
                    lost_at = lost_at or time.monotonic()
                    if time.monotonic() - lost_at > OUTAGE:
                        raise
                    time.sleep(max(min(pause, until - time.monotonic()), 0.0))
                    pause = min(pause * 2, 1.0)
        except BaseException:
            self._lose_line()
            raise
        finally:
            with self._lock:
                self._has_leader = False
                if mine.users > 1:
                    mine.told.notify_all()
                self._call_leader()

    def _lose_line(self) -> None:
        line = self._line
        with self._lock:
            self._line = None
            self._left = []
            for wait in self._waits.values():
                wait.is_locked = False
        if line is not None:
            line.close()

    def _round(self, line: _Line) -> None:
        """Take the locks that are wanted, give back those that are not, and look at what is due."""
        now = time.monotonic()
        with self._lock:
            left, self._left = self._left, []
            waits = [wait for wait in self._waits.values() if wait.ended is None]
            for job_id in line.take_notified():
                if (told := self._waits.get(job_id)) is not None:
                    told.due = now
        if left:
            line.execute(UNLOCK, {"ids": left})
            line.locks -= len(left)
        if not line.is_pooled:
            new = [wait for wait in waits if not wait.is_locked][: max(MOST_LOCKS - line.locks, 0)]
            if new:
                line.execute(LOCK, {"ids": [wait.job_id for wait in new]})
                line.locks += len(new)
                for wait in new:
                    wait.is_locked = True
                    wait.due = now
        due = [wait for wait in waits if wait.due <= now]
        if not due:
            return
        rows = line.execute(LOOK, {"ids": [wait.job_id for wait in due]})
        found = {job_id: _read(*rest) for job_id, *rest in rows}
        for wait in due:
            self._note(wait, found.get(wait.job_id))
        self._search(line, [wait for wait in due if wait.job_id not in found])

    def _search(self, line: _Line, missing: Iterable[_Wait]) -> None:
        began = time.monotonic()
        if began < self._may_search_at:
            return
        for wait in sorted(missing, key=lambda wait: wait.search_due):
            if wait.search_due > began or time.monotonic() - began > 0.05:
                break
            wait.search_pause = min(wait.search_pause * 2, LONGEST_PAUSE)
            wait.search_due = time.monotonic() + wait.search_pause
            found: Ended | JobNotFound | str
            try:
                found = look(line.conn, self._schema, wait.job_id)
            except JobNotFound as error:
                found = error
            if isinstance(found, str):
                wait.state = found
            else:
                self._note(wait, found)
        ended = time.monotonic()
        self._may_search_at = ended + (ended - began) * (1 / SEARCH_SHARE - 1)

    def _note(self, wait: _Wait, found: Ended | JobNotFound | str | None) -> None:
        with self._lock:
            if isinstance(found, (Ended, JobNotFound)):
                wait.ended = found
                if self._waits.get(wait.job_id) is wait:
                    del self._waits[wait.job_id]  # who asks from now on looks for himself
                wait.told.notify_all()
                return
            wait.state = found or wait.state
            wait.pause = min(max(wait.pause * 2, FIRST_PAUSE), LONGEST_PAUSE)
            wait.due = time.monotonic() + wait.pause

    def _rest(self, line: _Line, until: float) -> None:
        """Sleep until something is due, somebody comes, or the server says something."""
        with self._lock:
            due = min((wait.due for wait in self._waits.values()), default=0.0)  # of who came just now, 0
        line.sleep(min(due, until) - time.monotonic())


class _Line:
    """The connection that is kept while somebody waits."""

    def __init__(self, schema: Schema, lend: Lend) -> None:
        self._schema = schema
        self._stack = ExitStack()
        self._notified: list[int] = []
        self.locks = 0
        """How many it holds."""
        try:
            self.conn = self._stack.enter_context(lend())
            self._awake, self._waking = (self._stack.enter_context(end) for end in socket.socketpair())
            self._awake.setblocking(False)
            self._waking.setblocking(False)
            self.is_pooled = is_pooled(self.conn)
            """Whether nothing can be listened to, and no lock held."""
            self._stack.callback(self._restore)
            self.conn.add_notify_handler(self._note)
            if not self.is_pooled:
                [(channel,)] = self.execute(LISTEN, {})
                self.conn.execute(f"LISTEN {channel}")
            self._poll = select.poll()
            self._poll.register(self.conn.pgconn.socket, select.POLLIN)
            self._poll.register(self._awake, select.POLLIN)
        except BaseException:
            self._stack.close()
            raise

    def execute(self, statement: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
        with Cursor(self.conn, row_factory=tuple_row) as cursor:
            return cursor.execute(self._schema.sql(statement), params).fetchall()

    def take_notified(self) -> list[int]:
        """The jobs that were told of since the last call."""
        found, self._notified = self._notified, []
        return found

    def wake(self) -> None:
        """End the leader's sleep; from any thread."""
        with suppress(OSError):  # full: it is awake
            self._waking.send(b"\0")

    def sleep(self, seconds: float) -> None:
        """Until the server tells of a job or somebody wakes us, at most *seconds*."""
        self._collect()  # what was read together with the last answer does not wake a poll
        if seconds > 0 and not self._notified:
            self._poll.poll(seconds * 1000)
        with suppress(BlockingIOError):
            self._awake.recv(1000)
        self.conn.pgconn.consume_input()
        self._collect()

    def close(self) -> None:
        """Give the connection back as it was."""
        self._stack.close()

    def _collect(self) -> None:
        while (notification := self.conn.pgconn.notifies()) is not None:
            self._noted(notification.extra)

    def _note(self, notification: Notify) -> None:
        self._noted(notification.payload.encode())

    def _noted(self, payload: bytes) -> None:
        with suppress(ValueError):  # somebody else's
            self._notified.append(int(payload))

    def _restore(self) -> None:
        try:
            self.conn.remove_notify_handler(self._note)
            if self.is_pooled:
                return
            if self.conn.info.transaction_status != TransactionStatus.IDLE:
                self.conn.close()
                return
            self.conn.execute("UNLISTEN *")
            self.conn.execute("SELECT pg_advisory_unlock_all()")
        except psycopg.Error:
            self.conn.close()


def look(conn: Connection[Any], schema: Schema, job_id: int) -> Ended | str:
    """How a job ended, or the state that it is in.

    Raises:
        JobNotFound: There is no such job, or its history is gone.
    """
    try:
        with Cursor(conn, row_factory=tuple_row) as cursor:
            for _ in range(2):  # it may be completed or carried out of a segment between the look and the search
                row = cursor.execute(schema.sql(LOOK), {"ids": [job_id]}).fetchone()
                if row is not None:
                    return _read(*row[1:])
                row = cursor.execute(schema.sql(SEARCH), {"id": job_id}).fetchone()
                if row is not None and row[0] not in FINAL:
                    return str(row[0])
                if row is not None:
                    # its own end may have come since the first look; a second one tells whether a result is kept
                    kept = cursor.execute(schema.sql(LOOK), {"ids": [job_id]}).fetchone()
                    return _read(row[0], None, row[1]) if kept is None else _read(*kept[1:])
    except REFUSED as error:
        raise refusal(conn, schema, "producer", error) from error
    raise not_found(job_id)


def _read(state: str, result: str | None, error: str | None) -> Ended | str:
    if state not in FINAL:
        return state
    return Ended(
        state,
        result is not None,
        None if result is None else load_json(result),
        None if error is None else load_json(error),
    )


# --- forks

_all: weakref.WeakSet[Results] = weakref.WeakSet()


def _begin_anew() -> None:
    for results in list(_all):
        results._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
