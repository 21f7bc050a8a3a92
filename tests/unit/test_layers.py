"""Imports point down: a room knows the rooms below it, and none above or beside it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "awa"

LAYERS = [
    {"errors", "_core", "version", "lent"},  # lent: the types of what conn= takes
    {
        *("job", "args", "unique", "retry", "cron", "descriptors", "registry", "config", "metrics"),
        *("options", "limits"),  # what all of them refuse alike
        *("failure", "trace", "wording"),  # what a failed attempt leaves; how messages say what is long
    },
    {"storage"},
    {"insert", "doctor"},
    {"admin", "worker", "embedded", "health"},
    {"client"},
    {"web"},
    {"cli", "ext", "testing", "demo"},
]
LEVELS = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
FAMILIES = (0, 1)
"""Within these, rooms may know each other, without cycles."""
COMMANDS = {("cli", "demo"), ("ext", "cli"), ("ext", "testing")}
"""The command line calls what it is the command of; a framework's commands are ours, and so is its mode for tests."""

MODULES = sorted(path for pattern in ("*.py", "*.pyx") for path in PACKAGE.rglob(pattern) if path.name != "__init__.py")
MODULES += sorted(path for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)


def room_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    name = first.removesuffix(".pyx").removesuffix(".py")
    return "cli" if path.name == "__main__.py" else name  # a program, whichever room it is the program of


def imported_names(path: Path) -> Iterator[str]:
    """The dotted name of everything that *path* imports; a name out of a module counts as ``module.name``."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".pyx":
        for found in re.finditer(r"^\s*from\s+([\w.]+)\s+c?import\s+(\w+)|^\s*c?import\s+([\w.]+)", text, re.MULTILINE):
            yield found[3] or f"{found[1]}.{found[2]}"
        return
    for node in ast.walk(ast.parse(text, path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full, from awa..."
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_known_to(path: Path) -> set[str]:
    names = [name.split(".") for name in imported_names(path)]
    return {parts[1] if len(parts) > 1 else "the public names" for parts in names if parts[0] == "awa"}


def test_the_package_is_where_this_test_looks() -> None:
    assert {"errors", "config", "storage", "cli"} <= {room_of(path) for path in MODULES}
    assert "errors" in rooms_known_to(PACKAGE / "config.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    assert room in LEVELS, f"{room} has no place yet: give it one in LAYERS"
    level = LEVELS[room]
    for other in rooms_known_to(path) - {room}:
        assert other in LEVELS, f"{room} imports {other}, which is no room"
        is_beside = LEVELS[other] == level and (level in FAMILIES or (room, other) in COMMANDS)
        assert LEVELS[other] < level or is_beside, f"{room} (line {level}) imports {other} (line {LEVELS[other]})"


def test_the_families_have_no_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        room = room_of(path)
        if LEVELS.get(room) in FAMILIES:
            graph[room] = {other for other in rooms_known_to(path) - {room} if LEVELS[other] == LEVELS[room]}
    TopologicalSorter(graph).prepare()  # raises CycleError, which shows the cycle
    assert graph["errors"] == set()
    assert graph.get("job", set()) == set()
