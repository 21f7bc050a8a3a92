"""Inline mode: an insert validates, stores in memory, and runs the job at once in the calling thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from awa._core import Attempt, Outcomes
from awa.client import Client
from awa.errors import AwaError, ConfigError, StaleAttempt
from awa.insert import Producer, _several, prepare
from awa.job import JobId
from awa.lent import Lent
from awa.storage.lent import lent
from awa.storage.schema import Schema
from awa.testing.book import Book
from awa.testing.commits import on_end, session_of
from awa.testing.here import Ending, passes_on, run_here
from awa.worker.attempt import Attempts
from awa.worker.supervisor import make_handlers

DEEPEST = 30
"""Most handlers that insert within each other."""

_BOOK = "_awa_book"


@contextmanager
def inline(client: Client, *, run: bool = True, raises: bool = True, after_commit: bool = False) -> Iterator[Book]:
    """Have the jobs of *client* run where they are inserted, without a database, while the block lasts.

    An insert validates as ever, turns the args into the text that would be stored, and runs the job from that text, in
    the calling thread, before it returns. ``conn=`` must be a connection that may be lent, and is not touched: the job
    runs although the transaction has not been committed. What a handler inserts runs at once too.

    One insert runs one attempt. A job that waits for a time, for its next attempt or because it snoozed stays in the
    book until :func:`awa.testing.advance` and :func:`awa.testing.run_all`; one whose kind has no handler is available.
    No time limit is kept.

    ``client.get``, ``client.cancel`` and ``Inserted.get`` know the jobs of the book. Whatever else would need the
    database raises ConfigError.

    Args:
        run: False only books what is inserted; :func:`awa.testing.run_all` runs it.
        raises: Whether what a handler raises leaves the insert of the test, after it is booked as the attempt's
            failure. Not so TerminalError, which is something that a handler says to the queue. What fails in a job
            that a handler inserted is raised there too, not within that handler.
        after_commit: Whether what is inserted with a Session of SQLAlchemy runs when that has committed, and is
            forgotten when it is rolled back, savepoints included.

    Yields:
        The book, whose ``jobs`` are what was inserted.

    Raises:
        AwaError: Handlers insert within each other more than 30 deep.
    """
    book = Book()
    desk = _Desk(client, book, raises=raises, run=run, after_commit=after_commit)
    producer = client._producer
    mine = {one.name: getattr(producer, one.name) for one in fields(producer)}
    shadows: dict[str, Any] = {
        _BOOK: book,
        "_producer": _Inline(**mine, desk=desk),
        "_own": _no_database,
        "get": book.get,
        "cancel": book.cancel,
        "worker": _no_worker,
    }
    its = vars(client)  # what is found here hides the methods of the class
    before = {name: its[name] for name in shadows if name in its}
    its.update(shadows)
    try:
        yield book
    finally:
        for name in shadows:
            its.pop(name, None)
        its.update(before)


def book_of(client: Client) -> Book | None:
    """The book of *client* while it is inline."""
    found: Book | None = vars(client).get(_BOOK)
    return found


def _no_database() -> NoReturn:
    raise ConfigError(
        "inline mode has no database for this: use awa.testing.connected, or the fixture awa_database, for such a test"
    )


def _no_worker(**_: object) -> NoReturn:
    raise ConfigError("inline mode runs jobs where they are inserted: a worker needs a database, leave inline() first")


class InlineAttempts(Attempts):
    """Attempts of which no database knows."""

    def complete(self, attempt: Attempt, conn: Lent) -> None:
        """Note that the handler completes its attempt by itself; *conn* is not touched."""
        lent(conn)
        if not attempt.begin_complete():
            raise StaleAttempt(
                f"the handler of job {attempt.id} has ended: complete it before the handler returns",
                job_id=attempt.id,
                entry_id=attempt.entry_id,
            )


class _Level(threading.local):
    depth = 0

    def __init__(self) -> None:
        self.raised: list[BaseException] = []


class _Desk:
    """Runs the jobs of a book as they are inserted."""

    def __init__(self, client: Client, book: Book, *, raises: bool, run: bool, after_commit: bool) -> None:
        self._client = client
        self.book = book
        self._raises = raises
        self._runs = run
        self._waits = after_commit
        self._level = _Level()

    def inserted(self, job_ids: Sequence[JobId], conn: Lent | None) -> None:
        """Run jobs that were inserted with *conn*, now or when it has committed."""
        if conn is not None and self._waits and (session := session_of(conn)) is not None:
            on_end(session, lambda: self.run(job_ids), lambda: self.book.remove(job_ids))
        else:
            self.run(job_ids)

    def run(self, job_ids: Iterable[JobId]) -> None:
        """Run an attempt of each of the jobs that are available and have a handler."""
        level = self._level
        due = [job_id for job_id in job_ids if self.book.is_available(job_id)] if self._runs else []
        if not due or not self._client.registry.kinds:
            return
        if level.depth >= DEEPEST:
            error = AwaError(
                f"handlers insert within each other more than {DEEPEST} deep, the last a job of kind "
                f"{self.book.get(due[0]).kind!r}: to run them one after the other use inline(client, run=False) and "
                "run_all(client, limit=...)"
            )
            level.raised.insert(0, error)
            raise error
        handlers = make_handlers(self._client.registry, self._client._wrap)
        if level.depth == 0:
            level.raised = []  # of a run that was interrupted
        level.depth += 1
        try:
            for job_id in due:
                if self.book.is_available(job_id) and self.book.get(job_id).kind in handlers:
                    ending = run_booked(self.book, self.book.begin(job_id, handlers), self._client._schema)
                    if ending.is_surprise and ending.error is not None:
                        level.raised.append(ending.error)
        finally:
            level.depth -= 1
        if level.depth == 0 and level.raised:
            raised, level.raised = level.raised, []
            if self._raises:
                raise raised[0]


def run_booked(book: Book, attempt: Attempt, schema: Schema) -> Ending:
    """Run an attempt of a job in *book*, and record its outcome there."""
    ending = run_here(attempt, schema, Outcomes(), InlineAttempts)
    if attempt.was_completed and ending.error is None:
        ending.outcome = "completed"
    book.settle(attempt, ending)
    if passes_on(ending.error) and ending.error is not None:
        raise ending.error
    return ending


@dataclass(frozen=True, slots=True)
class _Inline(Producer):
    """Writes into a book what a producer would write into the database."""

    desk: _Desk = field(kw_only=True)

    def insert(self, item: object, conn: Lent | None) -> JobId:
        row = prepare(item, self.registry, self.defaults)
        self._check(conn)
        ids = self.desk.book.add([row])
        self.desk.inserted(ids, conn)
        return ids[0]

    def insert_many(self, items: Iterable[object], conn: Lent | None) -> list[JobId]:
        rows = [self._at(position, item) for position, item in enumerate(_several(items))]
        self._check(conn)
        ids = self.desk.book.add(rows)
        self.desk.inserted(ids, conn)
        return ids

    def insert_many_copy(self, items: Iterable[object], conn: Lent | None) -> int:
        rows = list(self._stream(items))
        self._check(conn)
        self.desk.inserted(self.desk.book.add(rows), conn)
        return len(rows)

    @staticmethod
    def _check(conn: Lent | None) -> None:
        if conn is not None:
            lent(conn)
