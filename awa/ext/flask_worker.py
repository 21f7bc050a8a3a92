"""``flask awa worker``: the jobs of an app are run by this process."""

from __future__ import annotations

import click
from flask import Flask, current_app
from flask.logging import default_handler

from awa.cli import DiscreetCommand
from awa.cli.worker import run_worker, typed, worker_options
from awa.client import Client
from awa.config import config_key, load_settings
from awa.errors import ConfigError
from awa.ext.flask import NAME, read_config


@click.command(cls=DiscreetCommand)
@worker_options
def worker(database: str | None, queues: tuple[str, ...], **flags: str | bool | None) -> None:
    """Run the app's jobs until SIGTERM or SIGINT.

    With --processes, SIGHUP replaces the processes, one after the other.

    Every option is also a key of app.config, AWA_THREADS for --threads, and then an environment variable.
    """
    app: Flask = current_app._get_current_object()  # type: ignore[attr-defined]
    said, given = read_config(app.config), typed(queues, flags)
    if said.is_eager:
        raise ConfigError(f"{config_key('eager')} is on, so jobs run where they are inserted: turn it off for a worker")

    def find() -> Client:
        app.logger.removeHandler(default_handler)  # its lines go where all logs go
        client: Client = app.extensions[NAME].renewed(app, database=database, flags=given)
        return client

    run_worker(load_settings(flags=given, config=said.settings), given, database, find)
