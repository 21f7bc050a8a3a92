"""Fixtures that are made for a client, for those who test with pytest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from awa.client import Client
from awa.errors import ConfigError
from awa.testing.databases import connected
from awa.testing.inline import check_client

if TYPE_CHECKING:
    from collections.abc import Callable


def client_fixture(client: Client) -> Callable[..., Any]:
    """A pytest fixture: *client*, connected to a new database for each test that asks for it.

    Name it in a ``conftest.py``: ``queue = client_fixture(client)``; tests ask for ``queue``. The database is that of
    the fixture ``awa_database``, to which your own code can be connected too.

    Raises:
        ConfigError: *client* is none; or, in a test, its schema is not that of ``awa_database``.
    """
    import pytest

    check_client(client)

    @pytest.fixture
    def connected_client(awa_database: str, awa_schema: str) -> Iterator[Client]:
        if client._schema.name != awa_schema:
            raise ConfigError(
                f"the client's schema is {client._schema.name!r} and that of awa_database {awa_schema!r}: override the "
                "fixture awa_schema (scope='session') in your conftest.py to return the client's"
            )
        with connected(client, awa_database):
            yield client

    return connected_client
