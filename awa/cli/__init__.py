"""The command ``awa``: its groups are loaded when they are called, its errors are one sentence and an exit code."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import click
from click.shell_completion import CompletionItem

from awa.config import mask
from awa.errors import (
    AwaError,
    ConfigError,
    DatabaseNotFound,
    DuplicateKind,
    PermissionDenied,
    SchemaNotMigrated,
    SchemaTooNew,
    ShutdownTimeout,
    StorageNotTrusted,
    UnknownKind,
    ValidationError,
)
from awa.version import VERSION

P = ParamSpec("P")
R = TypeVar("R")

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_SCHEMA = 4
EXIT_NO_DATABASE = 69
EXIT_GRACE_OVER = 75
EXIT_CONFIG = 78

_COMMANDS = {
    "completion": "Print the script that completes commands in a shell.",
    "config": "Show every setting, its value and where that is from.",
    "db": "Start, stop and inspect the private PostgreSQL.",
    "demo": "Watch real jobs run, a worker die, and nothing get lost.",
    "doctor": "Find what is wrong with an installation, and what mends it.",
    "health": "Ask a worker, or the database, whether there is one at work.",
    "job": "Look at jobs, put one in, cancel, retry, move them.",
    "kind": "Look at kinds of jobs: how code describes them, and who handles them.",
    "migrate": "Bring a database's schema up to date.",
    "queue": "Look at queues, pause, limit, empty them.",
    "runtime": "Look at worker processes, have one claim nothing more.",
    "stats": "Show throughput, waits and run times.",
    "storage": "Check the stored jobs, mend a restored copy, see what the ring holds.",
}
"""Each is the attribute of its name in the module ``awa.cli.<name>``; the texts are here so that help imports none."""


def exit_code(error: BaseException) -> int | None:
    """Return the exit code that *error* stands for, or ``None`` when it is a bug and deserves its traceback."""
    match error:
        case SchemaNotMigrated() | SchemaTooNew() | StorageNotTrusted():
            return EXIT_SCHEMA
        case DatabaseNotFound():
            return EXIT_NO_DATABASE
        case ShutdownTimeout():
            return EXIT_GRACE_OVER
        case ConfigError() | UnknownKind() | DuplicateKind() | PermissionDenied():
            return EXIT_CONFIG
        case ValidationError():
            return EXIT_USAGE
        case AwaError():
            return EXIT_NOT_FOUND if isinstance(error, LookupError) else EXIT_FAILED
    return EXIT_NO_DATABASE if _is_unreachable(error) else None


def _is_unreachable(error: BaseException) -> bool:
    from psycopg import OperationalError

    # without a state the connection itself failed; 08: it broke, 57P: the server ends or starts, 53300: it is full
    return isinstance(error, OperationalError) and (error.sqlstate or "08").startswith(("08", "57P", "53300"))


def reporting(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate what a command calls: its errors become one sentence on stderr and their exit code."""

    @wraps(function)
    def reported(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise click.exceptions.Exit(report(error)) from error

    return reported


def report(error: Exception, command: str = "awa") -> int:
    """Write *error* as one sentence to stderr and return its exit code; a bug is raised on.

    Args:
        command: How ``awa`` is called here, in what the sentence says to run.
    """
    code = exit_code(error)
    if code is None:
        raise error
    click.echo(f"awa: {' '.join(str(error).split())}".replace("`awa ", f"`{command} "), err=True)
    return code


class DiscreetCommand(click.Command):
    """A command whose usage errors show no password of a connection string that was typed in the wrong place."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """As click does."""
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            raise click.UsageError(mask(error.format_message()), error.ctx) from None


class _Main(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command = getattr(importlib.import_module(f"awa.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands that begin so, without importing them, then the options."""
        found = [
            CompletionItem(name, help=text) for name, text in sorted(_COMMANDS.items()) if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does; who looks for a worker here is told where it is, and a name that is nearly one is told."""
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, _COMMANDS, 1)
            if name in ("worker", "work", "run"):
                ctx.fail(f"no such command {name!r}: a worker is started by `python -m awa.worker MODULE`")
            if near:
                ctx.fail(f"no such command {name!r}: did you mean `awa {near[0]}`?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return reporting(super().invoke)(ctx)
        except click.UsageError as error:
            raise click.UsageError(mask(error.format_message()), error.ctx) from None


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="awa", message="%(prog)s %(version)s")
def main() -> None:
    """A job queue on PostgreSQL for synchronous Python.

    Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 schema, 69 no database, 75 grace time over, 78 configuration.
    """
