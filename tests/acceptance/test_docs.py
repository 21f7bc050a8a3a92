"""The README and docs/: every code block runs, every link leads somewhere, every setting is told."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from awa.cli import main as awa_command
from awa.config import Settings
from awa.worker.__main__ import main as worker_command
from tests.acceptance import run_page
from tests.acceptance.run_page import LANGUAGES, read_blocks, uses_private_server

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


RUNNING = [
    pytest.param(page, marks=pytest.mark.slow if uses_private_server(page) else (), id=page.name)
    for page in PAGES
    if any(block.language != "text" and not block.not_run for block in read_blocks(page))
]


def environment(database: str) -> dict[str, str]:
    return os.environ | {"AWA_DATABASE_URL": database, "DATABASE_URL": database}


@pytest.mark.parametrize("page", RUNNING)
def test_every_code_block_runs(page: Path, database: str, tmp_path: Path) -> None:
    if re.search(r"^\$ curl ", page.read_text(encoding="utf-8"), re.MULTILINE) and not shutil.which("curl"):
        pytest.skip("this page calls curl")
    done = subprocess.run(
        [sys.executable, "-W", "error", run_page.__file__, page],
        cwd=tmp_path,
        env=environment(database),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_every_page_is_listed_in_the_index() -> None:
    index = re.sub(r"<!--.*?-->", "", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    listed = re.findall(r"^- \[[^]]+\]\(([\w-]+\.md)\): ", index, re.MULTILINE)
    assert sorted([*listed, "index.md"]) == [page.name for page in PAGES[1:]]


def test_few_blocks_are_not_run_and_what_they_call_exists() -> None:
    excused = [(page.name, block) for page in PAGES for block in read_blocks(page) if block.not_run is not None]
    assert len(excused) <= 8, [name for name, _ in excused]
    for name, block in excused:
        assert block.language == "console" and len(block.not_run or "") > 10, name
        for command in re.findall(r"^\$ (?:.*[;&] )?(awa .*?)(?: \||$)", block.text, re.MULTILINE):
            context, words = click.Context(awa_command, info_name="awa"), shlex.split(command)[1:]
            found: click.Command = awa_command
            while isinstance(found, click.Group):
                below = found.get_command(context, words.pop(0))
                assert below, f"{name}: {command}"
                found = below
            found.make_context(command, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_its_language(page: Path) -> None:
    assert {block.language for block in read_blocks(page)} <= LANGUAGES
    assert page.read_text().count("\n```") == 2 * len(list(read_blocks(page))), "a fence is not closed"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    shown = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", shown):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name} links to {target}"


def test_every_setting_of_a_worker_is_in_the_table_with_its_flag_and_default() -> None:
    text = (ROOT / "docs" / "workers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|(.*?)\| `(AWA_\w+)`.*? \| (.*?) \|", text, re.MULTILINE)
    fields = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert {name for name, *_ in rows} == fields.keys() - {"sources"}
    flags = {flag for option in worker_command.params for flag in (*option.opts, *option.secondary_opts)}
    for name, flag, variable, default in rows:
        assert variable == f"AWA_{name.upper()}"
        assert re.findall(r"`(--[\w-]+)`", flag)[0] in flags
        value = fields[name]
        shown = "on" if value is True else value[0].name if isinstance(value, tuple) else f"{value}".removesuffix(".0")
        assert default.strip("`") == shown, name
    told = {flag for _, cell, *_ in rows for flag in re.findall(r"`(--[\w-]+)`", cell)}
    assert told | {"--database"} == {flag for flag in flags if flag.startswith("--")}
    assert "`--database` as `AWA_DATABASE_URL`" in text
