"""The order of the pages: as index.md lists them, under its headings."""

from __future__ import annotations

import re
from collections.abc import Iterator


def sections(index: str) -> Iterator[tuple[str, list[str]]]:
    """Each heading of *index*, and the names of the pages that are listed under it."""
    shown = re.sub(r"<!--.*?-->", "", index, flags=re.DOTALL)
    for part in re.split(r"^## ", shown, flags=re.MULTILINE)[1:]:
        heading, _, listed = part.partition("\n")
        yield heading, re.findall(r"^- \[[^]]+\]\(([\w-]+)\.md\)", listed, re.MULTILINE)


def toctrees(index: str) -> str:
    """What tells Sphinx that order, as MyST."""
    return "".join(
        "\n".join(["\n```{toctree}", ":hidden:", f":caption: {heading}", "", *pages, "```\n"])
        for heading, pages in sections(index)
    )
