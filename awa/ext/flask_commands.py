"""``flask awa ...``: the commands of awa with the database and the settings of an app, and its worker."""

from __future__ import annotations

import importlib
from typing import Any

import click
from flask import Flask, current_app
from flask.cli import AppGroup, with_appcontext
from flask.logging import default_handler

from awa.cli import DiscreetCommand, report
from awa.cli.worker import run_worker, typed, worker_options
from awa.client import Client
from awa.config import load_settings, mask
from awa.ext.flask import NAME, read_config
from awa.storage.pooler import declare_as

_SHARED = ("health", "migrate", "storage")
"""Commands of ``awa`` that are here too; loaded when they are called."""


class _Group(AppGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_SHARED])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _SHARED:
            return super().get_command(ctx, cmd_name)
        command = getattr(importlib.import_module(f"awa.cli.{cmd_name}"), cmd_name)
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


def _app() -> Flask:
    app: Flask = current_app._get_current_object()  # type: ignore[attr-defined]
    return app


@click.group(NAME, cls=_Group)
@click.pass_context
@with_appcontext
def commands(ctx: click.Context) -> None:
    """The app's job queue.

    A flag goes before app.config, and that before the environment. Exit codes are those of `awa`.
    """
    said = read_config(_app().config)
    settings = load_settings(config=said.settings)
    defaults = {"schema_name": settings.schema}
    if said.database is not None:
        defaults["database"] = said.database
        declare_as(said.database, settings.pooler)
    health = defaults | ({"address": settings.health_addr} if settings.health_addr else {})
    storage = dict.fromkeys(importlib.import_module("awa.cli.storage").storage.commands, defaults)
    ctx.default_map = {"migrate": defaults, "health": health, "storage": storage}


@commands.command(cls=DiscreetCommand, with_appcontext=False)
@worker_options
def worker(database: str | None, queues: tuple[str, ...], **flags: str | bool | None) -> None:
    """Run the app's jobs until SIGTERM or SIGINT.

    With --processes, SIGHUP replaces the processes, one after the other.

    Every option is also a key of app.config, AWA_THREADS for --threads, and then an environment variable.
    """
    app, given = _app(), typed(queues, flags)

    def find() -> Client:
        app.logger.removeHandler(default_handler)  # its lines go where all logs go
        client: Client = app.extensions[NAME].client_of(app, database=database, flags=given)
        return client

    run_worker(load_settings(flags=given, config=read_config(app.config).settings), given, database, find)
