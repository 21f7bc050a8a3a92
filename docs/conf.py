"""What Sphinx reads: ``make docs`` makes the site of these pages in build/docs. It fetches nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import contents  # noqa: E402 - it is beside this file
import generated  # noqa: E402

from awa.version import VERSION  # noqa: E402

project = "awa"
version = release = VERSION
html_title = f"awa {VERSION}"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_static"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["awa.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"footer_icons": []}
highlight_language = "text"
smartquotes = False  # two hyphens begin an option
myst_heading_anchors = 4

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_type_aliases = {"Lent": "Lent", "AsyncLent": "AsyncLent"}
python_use_unqualified_type_names = True
napoleon_use_rtype = False

# what other libraries and awa's own rooms call their types has no page here
nitpick_ignore_regex = [(r"py:.*", r"(?!awa\.[A-Z]).*")]


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    """Put into *page* what is made from the code, and into the index the contents for the sidebar."""
    for mark, make in generated.PARTS.items():
        before, marked, after = source[0].partition(f"<!-- {mark} -->")
        if marked:
            source[0] = before + make() + after
    if page == "index":
        source[0] += contents.toctrees(source[0])


def inline_diagrams(app: Sphinx, tree: nodes.document, page: str) -> None:
    """Have the drawings in the page itself, where the reader's choice of light or dark reaches them."""
    for image in list(tree.findall(nodes.image)):
        drawing = HERE / image["uri"]
        if drawing.suffix == ".svg" and app.builder.format == "html":
            text = re.sub(r"<\?xml.*?\?>\s*", "", drawing.read_text(encoding="utf-8"))
            image.replace_self(nodes.raw("", text, format="html"))


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", fill)
    app.connect("doctree-resolved", inline_diagrams)
