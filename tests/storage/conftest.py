"""Connections for tests in which several sessions take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import psycopg
import pytest

from awa.admin import Admin
from awa.storage.schema import Schema


@pytest.fixture
def open_connection(database: str) -> Iterator[Callable[[], psycopg.Connection[Any]]]:
    """Opens one more connection to ``database`` at each call; they commit by themselves."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(psycopg.connect(database, autocommit=True))


@pytest.fixture
def other(open_connection: Callable[[], psycopg.Connection[Any]]) -> psycopg.Connection[Any]:
    """A second connection to ``database`` that commits by itself."""
    return open_connection()


@pytest.fixture
def third(open_connection: Callable[[], psycopg.Connection[Any]]) -> psycopg.Connection[Any]:
    """A third connection to ``database`` that commits by itself."""
    return open_connection()


@pytest.fixture
def admin(open_connection: Callable[[], psycopg.Connection[Any]]) -> Admin:
    """What ``client.admin`` is, on a connection of its own."""
    looking = open_connection()
    return Admin(Schema(), lambda: nullcontext(looking))
