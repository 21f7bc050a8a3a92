"""Helpers for the tests of programs that use awa."""

from awa.testing.asserting import assert_inserted, assert_not_inserted, list_jobs
from awa.testing.book import Book
from awa.testing.databases import connected, database
from awa.testing.fixtures import client_fixture
from awa.testing.inline import inline
from awa.testing.running import Ran, advance, run_all, run_one

__all__ = [
    "Book",
    "Ran",
    "advance",
    "assert_inserted",
    "assert_not_inserted",
    "client_fixture",
    "connected",
    "database",
    "inline",
    "list_jobs",
    "run_all",
    "run_one",
]
