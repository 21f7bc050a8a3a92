"""awa's fixtures for pytest; see ``awa.testing`` for helpers that need no pytest.

pytest loads this in every run, whether or not it uses awa: so nothing of awa is imported before a fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest


@pytest.fixture(scope="session")
def awa_schema() -> str:
    """The schema of awa's tables in ``awa_database``; override it when your clients name another."""
    return "awa"


@pytest.fixture(scope="session")
def awa_template_setup() -> Callable[[str], object] | None:
    """Override it to make your own tables: return a function that gets the address of the template, once in a run.

    It must close the connections that it opens.
    """
    return None


@pytest.fixture(scope="session")
def _awa_server() -> Iterator[None]:
    from awa.testing import databases

    yield
    databases.stop_server()


@pytest.fixture
def awa_database(
    _awa_server: None, awa_schema: str, awa_template_setup: Callable[[str], object] | None
) -> Iterator[str]:
    """The address of a new database with awa's tables, and yours, for this test alone."""
    from awa.testing import database

    with database(schema=awa_schema, setup=awa_template_setup) as url:
        yield url
