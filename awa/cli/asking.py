"""Before something is changed that cannot be undone: asking, or refusing where there is nobody to ask."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from awa.cli import EXIT_FAILED
from awa.cli.output import echo

C = TypeVar("C", bound=Callable[..., Any])


def asking_options(command: C) -> C:
    """Give *command* ``--yes`` and ``--dry-run``, as ``is_sure`` and ``is_dry``."""
    for option in (
        click.option("--dry-run", "is_dry", is_flag=True, help="Show what would be done, and change nothing."),
        click.option("--yes", "is_sure", is_flag=True, help="Do not ask."),
    ):
        command = option(command)
    return command


def check_answerable(is_sure: bool, is_dry: bool) -> None:
    """Return when nobody need be asked, or somebody can be.

    Raises:
        click.UsageError: There is no terminal to ask at.
    """
    if not (is_sure or is_dry) and not (sys.stdin is not None and sys.stdin.isatty()):
        raise click.UsageError(
            "this changes things and there is no terminal to ask at: add --yes to do it, or --dry-run to see what it"
            " would do"
        )


def ask(question: str) -> None:
    """Ask on stderr, and return when the answer is yes.

    Raises:
        click.exceptions.Exit: It is not, or there is none.
    """
    try:
        is_wanted = click.confirm(question, err=True)
    except click.Abort:  # Ctrl-C, or the end of the input
        echo("", err=True)
        raise click.exceptions.Exit(EXIT_FAILED) from None
    if not is_wanted:
        echo("nothing was changed", err=True)
        raise click.exceptions.Exit(EXIT_FAILED)
