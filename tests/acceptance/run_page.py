"""``python run_page.py PAGE``: run the code blocks of a page of documentation, in order and in one namespace.

A ``python`` block is run; one whose first line is ``# name.py`` is written to that file and imported. A ``pycon`` block
is a session whose answers must be as printed.
"""

from __future__ import annotations

import doctest
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a page."""

    language: str
    """The word after the fence."""
    line: int
    """Where its text begins, from 1."""
    text: str
    """What stands between the fences."""

    @property
    def file_name(self) -> str | None:
        """The name in its first line, if it is a file."""
        named = re.match(r"# (\w+\.py)\n", self.text)
        return named[1] if named else None


def read_blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of *page*."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Block(found[1], text.count("\n", 0, found.start(2)) + 1, found[2])


def run(page: Path) -> None:
    """Run every block; the first that goes wrong raises."""
    sys.path.insert(0, "")
    names: dict[str, object] = {"__name__": "__main__"}
    for block in read_blocks(page):
        if block.file_name:
            Path(block.file_name).write_text(block.text, encoding="utf-8")
            importlib.import_module(block.file_name.removesuffix(".py"))
        elif block.language == "python":
            # the lines keep their numbers in tracebacks
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), names)
        elif block.language == "pycon":
            session = doctest.DocTestParser().get_doctest(block.text, names, page.name, str(page), block.line - 1)
            runner = doctest.DebugRunner(verbose=False)
            try:
                runner.run(session, clear_globs=False)
            except doctest.UnexpectedException as raised:
                raise raised.exc_info[1] from None
            except doctest.DocTestFailure as failure:
                line = block.line + failure.example.lineno
                sys.exit(
                    f"{page}:{line}: {failure.example.source}printed {failure.got!r}, not {failure.example.want!r}"
                )
            names = session.globs


if __name__ == "__main__":
    run(Path(sys.argv[1]))
