"""``flask awa ...``: the commands of awa with the database and the settings of an app.

Every app imports this, so that what a command needs is imported when it is called.
"""

from __future__ import annotations

import importlib
from typing import Any

import click
from flask import current_app
from flask.cli import AppGroup, with_appcontext

from awa.cli import report
from awa.config import load_settings, mask
from awa.ext.flask import NAME, read_config
from awa.storage.pooler import declare_as

_COMMANDS = {
    "doctor": "awa.cli.doctor",
    "health": "awa.cli.health",
    "migrate": "awa.cli.migrate",
    "storage": "awa.cli.storage",
    "worker": "awa.ext.flask_worker",
}
"""Each is the attribute of its name in its module."""


class _Group(AppGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_COMMANDS})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        command = getattr(importlib.import_module(_COMMANDS[cmd_name]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise click.UsageError(mask(error.format_message()), error.ctx) from None
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            raise click.exceptions.Exit(report(error, "flask awa")) from error


@click.group(NAME, cls=_Group)
@click.pass_context
@with_appcontext
def commands(ctx: click.Context) -> None:
    """The app's job queue.

    A flag goes before app.config, and that before the environment. Exit codes are those of `awa`.
    """
    said = read_config(current_app.config)
    settings = load_settings(config=said.settings)
    defaults = {"schema_name": settings.schema}
    if said.database is not None:
        defaults["database"] = said.database
        declare_as(said.database, settings.pooler)
    health = defaults | ({"address": settings.health_addr} if settings.health_addr else {})
    storage = dict.fromkeys(importlib.import_module("awa.cli.storage").storage.commands, defaults)
    doctor = defaults | ({"listen_url": settings.listen_url} if settings.listen_url else {})
    ctx.default_map = {"doctor": doctor, "migrate": defaults, "health": health, "storage": storage}
