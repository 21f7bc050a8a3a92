"""The types of what ``conn=`` takes. They are described by what they can do, so that nothing is imported for them."""

from __future__ import annotations

from typing import Any, Protocol

from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor


class SqlalchemySession(Protocol):
    """A SQLAlchemy ``Session`` or ``scoped_session``; Flask-SQLAlchemy's ``db.session`` is one."""

    def connection(self) -> Any:
        """The connection of its transaction, which it begins."""

    def begin_nested(self) -> Any:
        """Begin a savepoint."""

    def expire_all(self) -> None:
        """Forget what was read."""


class SqlalchemyConnection(Protocol):
    """A SQLAlchemy ``Connection``."""

    def get_nested_transaction(self) -> Any:
        """The savepoint that is open."""

    def exec_driver_sql(self, statement: str) -> Any:
        """Send a statement as it is."""


class DjangoConnection(Protocol):
    """``django.db.connection``, or one of ``django.db.connections``."""

    @property
    def vendor(self) -> Any:
        """Which database it leads to."""

    def ensure_connection(self) -> Any:
        """Connect."""


class Psycopg2Connection(Protocol):
    """A connection of psycopg2."""

    @property
    def info(self) -> Any:
        """What libpq knows of it."""

    @property
    def closed(self) -> Any:
        """Zero while it is open."""

    @property
    def autocommit(self) -> Any:
        """Whether each statement commits by itself."""

    def get_dsn_parameters(self) -> Any:
        """Where it leads."""


class Psycopg2Cursor(Protocol):
    """A cursor of psycopg2."""

    @property
    def connection(self) -> Any:
        """The connection it belongs to."""

    def copy_expert(self, sql: Any, file: Any) -> Any:
        """COPY."""


Lent = (
    Connection[Any]
    | Cursor[Any]
    | SqlalchemySession
    | SqlalchemyConnection
    | DjangoConnection
    | Psycopg2Connection
    | Psycopg2Cursor
)
"""What ``conn=`` takes, and ``job.complete``."""

AsyncLent = AsyncConnection[Any] | AsyncCursor[Any]
"""What ``conn=`` of the asynchronous inserts takes."""

Driver = Connection[Any] | Psycopg2Connection
"""The driver's own connection behind what was lent."""
