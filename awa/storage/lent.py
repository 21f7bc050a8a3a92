"""From what somebody lent as ``conn=`` to the driver's connection that is in its transaction.

Nothing is imported for it: who lends a Session has imported SQLAlchemy. Its own rules are kept: a transaction begins as
it begins there, what is broken there is refused as it refuses, and it learns of connections that were lost.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor

from awa.errors import ConfigError
from awa.lent import AsyncLent, Driver, Lent

POSTGRESQL = "postgresql"
"""As SQLAlchemy and Django call it."""


def lent(conn: Lent) -> AbstractContextManager[Driver]:
    """A block in which statements go into the transaction of *conn*, through the driver's connection that it gives.

    Raises:
        ConfigError: *conn* cannot be lent; nothing was sent.
    """
    if isinstance(conn, Connection):
        return nullcontext(conn)
    if isinstance(conn, Cursor):
        return nullcontext(conn.connection)
    return _of_others(conn)


def _of_others(conn: Any) -> AbstractContextManager[Driver]:
    if isinstance(conn, _loaded("psycopg2.extensions", "connection")):
        return nullcontext(_driver(conn, conn))
    if isinstance(conn, _loaded("psycopg2.extensions", "cursor")):
        return nullcontext(_driver(conn.connection, conn))
    if isinstance(conn, _loaded("sqlalchemy.orm", "Session", "scoped_session")):
        return _of_session(conn)
    if isinstance(conn, _loaded("sqlalchemy.engine", "Connection")):
        return _of_sqlalchemy(conn)
    if isinstance(conn, _loaded("sqlalchemy.pool", "PoolProxiedConnection")):
        return nullcontext(_driver(conn.driver_connection, conn))
    if isinstance(conn, _loaded("django.db.backends.base.base", "BaseDatabaseWrapper")):
        return _of_django(conn)
    if isinstance(conn, _loaded("django.utils.connection", "ConnectionProxy")) and hasattr(conn, "vendor"):
        return _of_django(conn)  # without it: the proxy of a cache
    if isinstance(conn, (AsyncConnection, AsyncCursor)):
        raise ConfigError(f"conn is a {_name(conn)}: use the insert methods that end in _async, or lend a Connection")
    raise _refused(conn)


def lent_async(conn: AsyncLent) -> AsyncConnection[Any]:
    """The connection behind *conn*.

    Raises:
        ConfigError: It is something else.
    """
    if isinstance(conn, AsyncConnection):
        return conn
    if isinstance(conn, AsyncCursor):
        return conn.connection
    raise ConfigError(
        f"conn is a {_name(conn)}: the asynchronous methods take a psycopg.AsyncConnection or AsyncCursor; "
        "with any other use the insert method without _async"
    )


def _loaded(module: str, *names: str) -> tuple[Any, ...]:
    """Classes of *module*, none while nobody has imported it."""
    found = sys.modules.get(module)
    return tuple(getattr(found, name) for name in names if hasattr(found, name))


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _driver(driver: Any, conn: object) -> Driver:
    """*driver*, when it is one through which statements can be sent; it came from *conn*."""
    is_psycopg2 = isinstance(driver, _loaded("psycopg2.extensions", "connection"))
    if not is_psycopg2 and not isinstance(driver, Connection):
        raise ConfigError(
            f"conn is a {_name(conn)} over a {_name(driver)}: awa sends through the drivers psycopg and psycopg2"
        )
    if is_psycopg2 and driver.async_:
        raise ConfigError("conn is an asynchronous connection of psycopg2: lend one that was made without async_=True")
    found: Driver = driver
    return found


# --- SQLAlchemy


@contextmanager
def _of_session(session: Any) -> Iterator[Driver]:
    _check_dialect(session, session.get_bind().dialect)
    with _of_sqlalchemy(session.connection()) as driver:  # which begins, or refuses, as a query of the session would
        yield driver


@contextmanager
def _of_sqlalchemy(conn: Any) -> Iterator[Driver]:
    _check_dialect(conn, conn.dialect)
    _begin(conn)
    driver = _driver(conn.connection.driver_connection, conn)
    try:
        yield driver
    except BaseException as error:
        if driver.closed:
            conn.invalidate(error)  # as SQLAlchemy does whenever a statement finds its connection lost
        raise


def _check_dialect(conn: object, dialect: Any) -> None:
    if dialect.name != POSTGRESQL:
        raise ConfigError(f"conn is a {_name(conn)} to {dialect.name}: lend one to awa's PostgreSQL database")


def _begin(conn: Any) -> None:
    """Begin the transaction of a SQLAlchemy connection that has none: else its commit() would do nothing."""
    transaction, savepoint = conn.get_transaction(), conn.get_nested_transaction()
    if transaction is None:
        if not hasattr(conn, "commit"):
            raise ConfigError(
                "conn is a connection of SQLAlchemy before 2.0 outside of a transaction: lend it within one, "
                "`with engine.begin() as conn:`, or a Session"
            )
        conn.begin()  # sends nothing
        return
    block = getattr(conn, "_trans_context_manager", None)  # the innermost `with conn.begin...()`
    if not all(one is None or one.is_active for one in (transaction, savepoint, block)):
        conn.exec_driver_sql("SELECT 1")  # raises what SQLAlchemy has to say; sends nothing


# --- Django


@contextmanager
def _of_django(wrapper: Any) -> Iterator[Driver]:
    if wrapper.vendor != POSTGRESQL:
        raise ConfigError(
            f"conn is Django's connection {wrapper.alias!r} to {wrapper.vendor}: "
            'lend one that leads to awa\'s PostgreSQL database, django.db.connections["..."]'
        )
    wrapper.cursor().close()  # connects, and looks whether it may be used at all
    wrapper.validate_no_broken_transaction()
    driver = _driver(wrapper.connection, wrapper)
    with wrapper.wrap_database_errors:  # Django's own exceptions; and it notes that the connection may be lost
        yield driver


# --- what cannot be lent

_MISTAKES = (
    ("sqlalchemy.engine", "Engine", "lend a connection of it, `with engine.begin() as conn:`, or a Session"),
    ("sqlalchemy.orm", "sessionmaker", "lend the Session that it makes, `with maker.begin() as session:`"),
    ("sqlalchemy.pool", "Pool", "lend a connection of it, or a Session"),
    *(
        ("sqlalchemy.ext.asyncio", name, "lend a psycopg.AsyncConnection to an insert method that ends in _async")
        for name in ("AsyncSession", "async_scoped_session", "AsyncConnection", "AsyncEngine")
    ),
    ("flask_sqlalchemy", "SQLAlchemy", "lend its session: conn=db.session"),
    (
        *("awa.ext.flask", "Awa"),
        "lend db.session, or another; a helper of awa.testing takes queue.client, inside the app's context",
    ),
    (
        "awa.client",
        "Client",
        "lend a psycopg connection of it, `with client.connection() as conn, conn.transaction():`",
    ),
    ("psycopg_pool", "ConnectionPool", "lend a connection of it, `with pool.connection() as conn:`"),
    ("psycopg_pool", "AsyncConnectionPool", "lend a connection of it, `async with pool.connection() as conn:`"),
    ("psycopg2.pool", "AbstractConnectionPool", "lend a connection of it, pool.getconn()"),
    (
        *("django.utils.connection", "BaseConnectionHandler"),
        'lend one of its connections, django.db.connection or connections["default"]',
    ),
)


def _refused(conn: object) -> ConfigError:
    for module, name, advice in _MISTAKES:
        if isinstance(conn, _loaded(module, name)):
            return ConfigError(f"conn is a {_name(conn)}: {advice}")
    return ConfigError(
        f"conn is a {_name(conn)}: lend a connection or cursor of psycopg or psycopg2, a Session or Connection of "
        "SQLAlchemy, or django.db.connection"
    )
