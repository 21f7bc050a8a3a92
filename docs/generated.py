"""What the pages of reference say of the code, made when the site is: the commands, and the public names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import NewType

import click

import awa
import awa.admin
import awa.ext.flask
import awa.testing
from awa.cli import main as awa_command
from awa.worker.__main__ import main as worker_command


def commands() -> str:
    """Every command with its options, as Markdown."""
    pages = [_command("python -m awa.worker", worker_command, 2)]
    pages += [_command(name, command, 2 + name.count(" ") - 1) for name, command in _walk("awa", awa_command)]
    return "\n".join(pages)


def _walk(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        for word in command.list_commands(context):
            below = command.get_command(context, word)
            if below is not None and not below.hidden:
                yield f"{name} {word}", below
                yield from _walk(f"{name} {word}", below)


def _command(name: str, command: click.Command, level: int) -> str:
    context = click.Context(command, info_name=name)
    lines = [f"{'#' * level} {name}", ""]
    if not isinstance(command, click.Group):
        usage = " ".join([name, *command.collect_usage_pieces(context)])
        lines += ["```text", usage, "```", ""]
    lines += [_prose(inspect.cleandoc(command.help or "")), ""]
    rows = [found for found in (each.get_help_record(context) for each in command.get_params(context)) if found]
    rows = [(flags, text) for flags, text in rows if text and "--help" not in flags]
    if rows:
        lines += ["| Option | |", "|---|---|"]
        lines += [f"| {_code(flags)} | {_cell(text)} |" for flags, text in rows]
        lines += [""]
    return "\n".join(lines)


def _prose(help_text: str) -> str:
    return "\n\n".join(map(_paragraph, help_text.split("\n\n")))


def _paragraph(text: str) -> str:
    # click's mark of what is to keep its lines
    if text.startswith("\b\n"):
        return f"```text\n{text[2:].rstrip()}\n```"
    return _escaped(" ".join(text.replace("\b", "").split()))


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", "\\|")


def _escaped(text: str) -> str:
    """*text* with what is code in Markdown left so, and all else taken literally."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_\[\]<>])", r"\\\1", part) for part in parts)


def _code(flags: str) -> str:
    return ", ".join(f"`{flag}`" for flag in flags.split(", ")).replace("|", "\\|")


# by the module that a name comes from: where a reader looks for it
_SECTIONS = {
    "Client": ["awa.client", "awa.config"],
    "Inserting": ["awa.insert", "awa.unique"],
    "In a handler": ["awa.job", "awa.registry", "awa.retry"],
    "Looking and changing": ["awa.admin", "awa.storage", "awa.limits", "awa.descriptors"],
    "Errors": ["awa.errors"],
    "Functions and types": [""],
}


def names() -> str:
    """Every public name with its docstring, as MyST around Sphinx's directives."""
    parts: dict[str, list[str]] = {heading: [] for heading in _SECTIONS}
    for name in awa.__all__:
        item = getattr(awa, name)
        if not name.startswith("_"):
            parts[_section(getattr(item, "__module__", ""))].append(_directive("awa", name, item))
    parts["Looking and changing"].insert(0, _directive("awa.admin", "Admin", awa.admin.Admin))
    parts["awa.testing"] = [_directive("awa.testing", name, getattr(awa.testing, name)) for name in awa.testing.__all__]
    parts["awa.ext.flask"] = [_directive("awa.ext.flask", "Awa", awa.ext.flask.Awa)]
    return "\n".join(
        f"## {heading}\n\n" + "\n".join(f"```{{eval-rst}}\n{each}\n```\n" for each in items)
        for heading, items in parts.items()
        if items
    )


def _section(module: str) -> str:
    return next(
        heading
        for heading, modules in _SECTIONS.items()
        if any(not each or module == each or module.startswith(f"{each}.") for each in modules)
    )


def _directive(module: str, name: str, item: object) -> str:
    if isinstance(item, type):
        if issubclass(item, BaseException):
            return f".. autoexception:: {module}.{name}\n   :show-inheritance:"
        return f".. autoclass:: {module}.{name}\n   :members:"
    is_function = callable(item) and not isinstance(item, NewType)
    return f".. autofunction:: {module}.{name}" if is_function else f".. autodata:: {module}.{name}"


PARTS: dict[str, Callable[[], str]] = {"commands": commands, "names": names}
"""What stands in a page for each part, and what makes it."""
