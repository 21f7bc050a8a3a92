"""What commands that run a worker have in common: their options, and the way from those to a worker that has ended."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from awa.cli import report
from awa.client import Client
from awa.config import Settings, find_database, has_password
from awa.errors import AwaError, ConfigError
from awa.worker import logs
from awa.worker.processes import Link, Processes

log = logging.getLogger("awa.worker")

C = TypeVar("C", bound=Callable[..., Any])

CLIENTS_OWN = {"schema", "notify", "pooler", "max_args_bytes"}
"""Settings that a client has before it makes a worker."""

_OPTIONS = (
    click.option("--database", metavar="URL", help="PostgreSQL connection string or URL."),
    click.option("--schema", metavar="NAME", help="The schema of awa's tables."),
    click.option(
        "--queue",
        "queues",
        metavar="NAME[:MAX]",
        multiple=True,
        help="A queue to serve, or NAME:min=N,weight=N,max=N; repeatable.",
    ),
    click.option("--threads", metavar="N", help="Handlers that run at once."),
    click.option("--processes", metavar="P", help="Worker processes that run side by side, each with its threads."),
    click.option("--poll-interval", metavar="SECONDS", help="Longest wait when no wake-up comes."),
    click.option(
        "--priority-aging", metavar="SECONDS", help="Waiting that counts like one level of priority; 0: none."
    ),
    click.option("--heartbeat", metavar="SECONDS", help="Between signs of life."),
    click.option("--stale-after", metavar="SECONDS", help="Silence after which a worker is taken for dead."),
    click.option("--timeout", metavar="SECONDS", help="Most that an attempt may take; 0 for no limit."),
    click.option("--shutdown-timeout", metavar="SECONDS", help="Grace time of running handlers."),
    click.option("--completed-retention", metavar="SECONDS", help="How long completed jobs stay readable."),
    click.option("--failed-retention", metavar="SECONDS", help="How long failed and cancelled jobs stay readable."),
    click.option("--dead-retention", metavar="SECONDS", help="How long dead letters stay readable."),
    click.option(
        "--descriptor-retention", metavar="SECONDS", help="How long what nobody declares stays described; 0: for ever."
    ),
    click.option(
        "--rotate-after", metavar="SECONDS", help="When a new segment is begun; 0 leaves it to the retention."
    ),
    click.option("--notify/--no-notify", default=None, help="Wake workers by NOTIFY, or leave it to polling."),
    click.option("--pooler", metavar="auto|on|off", help="Whether the database is behind a transaction pooler."),
    click.option("--listen-url", metavar="URL", help="The database past the pooler, to claim and be woken there."),
    click.option("--max-args-bytes", metavar="N", help="Most bytes of a job's args, and of its metadata."),
    click.option("--health-addr", metavar="HOST:PORT", help="Where to answer /healthz and /readyz; :PORT for anybody."),
    click.option("--log-format", metavar="text|json", help="How logs are written."),
    click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error."),
)


def worker_options(command: C) -> C:
    """Give *command* the options of a worker: it is called with ``database``, ``queues``, and a flag for each other."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def typed(queues: tuple[str, ...], flags: Mapping[str, str | bool | None]) -> dict[str, object]:
    """The settings that were typed, by their names."""
    given: dict[str, object] = {name: value for name, value in flags.items() if value is not None}
    return given | ({"queues": queues} if queues else {})


def run_worker(
    settings: Settings, given: dict[str, object], database: str | None, find_client: Callable[[], Client]
) -> None:
    """Run a worker, or supervise several processes with one each, until told to stop; may end this process itself.

    Args:
        settings: What holds.
        given: What of it was typed.
        database: The one that was typed, which *find_client* has to see to.
        find_client: Gives the client, where its worker runs.

    Raises:
        ConfigError: The settings cannot work together.
        AwaError: The worker raised it.
    """
    link = Link.inherited()
    is_one_of_several = link is not None or settings.processes > 1
    logs.configure(log_format=settings.log_format, level=settings.log_level, shows_process=is_one_of_several)
    if settings.processes > 1 and settings.health_addr:
        raise ConfigError(
            f"health_addr is {settings.health_addr!r} and processes is {settings.processes}: they cannot all listen"
            " there. Leave one of the two out; `awa health` without an address asks the database about every worker"
        )
    if settings.processes > 1 and link is None:
        sys.exit(Processes(settings.processes, shutdown_timeout=settings.shutdown_timeout).run())
    if database is not None and database.strip():
        find_database(database)  # what cannot be read is refused before anything is imported
        if has_password(database):
            log.warning("--database shows its password to all who list processes: give it as AWA_DATABASE_URL instead")
    worker = find_client().worker(flags=given)
    if link is not None:
        link.serve(worker)
    code = 0
    try:
        worker.run(on_started=None if link is None else link.tell_ready)
    except AwaError as error:
        if not worker.has_stragglers:
            raise
        code = report(error)
    if worker.has_stragglers:
        # What these wait for, such as threads of their own that Python would join, must not keep this process.
        logging.shutdown()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
