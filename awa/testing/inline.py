"""Inline mode: an insert validates, stores in memory, and runs the job at once in the calling thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from awa._core import Attempt, Outcomes
from awa.client import Client
from awa.errors import AwaError, ConfigError
from awa.insert import Producer, prepare
from awa.job import JobId
from awa.lent import AsyncLent, Lent
from awa.storage.control import Controlled
from awa.storage.jobs import JobRow, Written
from awa.storage.lent import lent, lent_async
from awa.testing.book import Book
from awa.testing.commits import on_end, session_of
from awa.testing.here import Completes, Ending, handlers_of, passes_on, run_here

DEEPEST = 30
"""Most handlers that insert within each other."""

MOST = 10_000
"""Most jobs that an insert runs, those that follow included."""

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
        AwaError: Handlers insert within each other more than 30 deep, or 10,000 jobs follow one.
        ConfigError: *client* is none.
    """
    check_client(client)
    book = Book()
    desk = _Desk(client, book, raises=raises, run=run, after_commit=after_commit)
    producer = client._producer
    mine = {one.name: getattr(producer, one.name) for one in fields(producer)}
    shadows: dict[str, Any] = {
        _BOOK: book,
        "_producer": _Inline(**mine, desk=desk),
        "_own": _no_database,
        "get": book.get,
        "cancel": desk.cancel,
        "cancel_by_unique_key": desk.cancel_by_unique_key,
        "_results": book,
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


def check_client(client: object) -> None:
    """Return when *client* is one.

    Raises:
        ConfigError: It is something else.
    """
    if not isinstance(client, Client):
        raise ConfigError(
            f"client must be an awa.Client, got a {type(client).__name__}: give the client itself; that of a Flask app "
            "is queue.client, inside its context"
        )


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

    def inserted(self, rows: Sequence[JobRow], written: Sequence[Written], conn: object) -> None:
        """Run jobs that were inserted with *conn*, now or when it has committed."""
        new = [job_id for job_id, is_new in written if is_new]
        # an equal job that was given this one's args and time may be available now
        ids = [one.id for row, one in zip(rows, written, strict=True) if one.is_new or row.on_conflict == "replace"]
        if conn is not None and self._waits and (session := session_of(conn)) is not None:
            on_end(session, lambda: self.run(ids), lambda: self.book.remove(new))
        else:
            self.run(ids)

    def cancel(self, job_id: int, *, reason: str | None = None, force: bool = False) -> Controlled:
        """Cancel a job, and run what follows."""
        done = self.book.cancel(job_id, reason=reason, force=force)
        self.run(())
        return done

    def cancel_by_unique_key(self, key: bytes, *, reason: str | None = None, force: bool = False) -> Controlled:
        """Cancel the holder of a key, and run what follows."""
        done = self.book.cancel_by_unique_key(key, reason=reason, force=force)
        self.run(())
        return done

    def run(self, job_ids: Iterable[JobId]) -> None:
        """Run an attempt of each of the jobs that are available and have a handler, and of those that follow."""
        level, book = self._level, self.book
        handlers = handlers_of(self._client)
        if not self._runs or not handlers:
            return
        if level.depth == 0:
            level.raised = []  # of a run that was interrupted
        level.depth += 1
        try:
            book.promote()
            due = deque([*job_ids, *book.freed()])
            ran = 0
            while due:
                job_id = due.popleft()
                if not book.can_begin(job_id, handlers):
                    due += book.freed()  # it may have expired, and others follow that
                    continue
                ran += 1
                if level.depth > DEEPEST or ran > MOST:
                    raise self._for_ever(job_id)
                attempt = book.begin(job_id, handlers)
                if attempt is None:
                    continue  # another thread has
                ending = run_booked(book, attempt, self._client)
                if ending.is_surprise and ending.error is not None:
                    level.raised.append(ending.error)
                due += book.freed()
        finally:
            level.depth -= 1
        if level.depth == 0 and level.raised:
            raised, level.raised = level.raised, []
            if self._raises:
                raise raised[0]

    def _for_ever(self, job_id: JobId) -> AwaError:
        deep = f"insert within each other more than {DEEPEST} deep"
        many = f"have had more than {MOST:,} jobs run after one insert"
        error = AwaError(
            f"handlers {deep if self._level.depth > DEEPEST else many}, the last of kind "
            f"{self.book.get(job_id).kind!r}: to run them one after the other use inline(client, run=False) and "
            "run_all(client, limit=...)"
        )
        self._level.raised.insert(0, error)  # also when a handler swallows it
        return error


def run_booked(book: Book, attempt: Attempt, client: Client) -> Ending:
    """Run an attempt of a job in *book*, and record its outcome there.

    Raises:
        BaseException: What is neither an Exception nor SystemExit is meant for the program, such as
            KeyboardInterrupt: it goes on from here once the outcome is recorded.
    """
    ending = run_here(attempt, client, Outcomes(), Completes)
    book.settle(attempt, ending)
    if passes_on(ending.error) and ending.error is not None:
        raise ending.error
    return ending


@dataclass(frozen=True, slots=True)
class _Inline(Producer):
    """Writes into a book what a producer would write into the database."""

    desk: _Desk = field(kw_only=True)

    def insert(self, item: object, conn: Lent | None) -> Written:
        return self._write([prepare(item, self.registry, self.defaults)], conn)[0]

    def insert_many(self, items: Iterable[object], conn: Lent | None) -> list[Written]:
        return self._write(self._batch(items), conn)

    def insert_many_copy(self, items: Iterable[object], conn: Lent | None) -> int:
        return len(self._write(list(self._stream(items)), conn))

    async def insert_async(self, item: object, conn: AsyncLent | None) -> Written:
        return self._write_async([prepare(item, self.registry, self.defaults)], conn)[0]

    async def insert_many_async(self, items: Iterable[object], conn: AsyncLent | None) -> list[Written]:
        return self._write_async(self._batch(items), conn)

    async def insert_many_copy_async(self, items: Iterable[object], conn: AsyncLent | None) -> int:
        return len(self._write_async(list(self._stream(items)), conn))

    def _write(self, rows: list[JobRow], conn: Lent | None) -> list[Written]:
        if conn is not None:
            lent(conn)
        written = self.desk.book.add(rows)
        self.desk.inserted(rows, written, conn)
        return written

    def _write_async(self, rows: list[JobRow], conn: AsyncLent | None) -> list[Written]:
        if conn is not None:
            lent_async(conn)
        return self._write(rows, None)
