"""Helpers for the tests of programs that use awa."""

from awa.testing.asserting import assert_inserted, assert_not_inserted, list_jobs
from awa.testing.book import Book
from awa.testing.inline import inline
from awa.testing.running import Ran, advance, run_all, run_one

__all__ = [
    "Book",
    "Ran",
    "advance",
    "assert_inserted",
    "assert_not_inserted",
    "inline",
    "list_jobs",
    "run_all",
    "run_one",
]
