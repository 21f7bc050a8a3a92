"""Helpers for the tests of programs that use awa."""

from awa.testing.book import Book
from awa.testing.inline import inline

__all__ = ["Book", "inline"]
