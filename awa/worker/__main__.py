"""``python -m awa.worker MODULE[:NAME]``: load an application and run its jobs until told to stop."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from types import ModuleType

import click

from awa.cli import DiscreetCommand, report, reporting
from awa.client import Client
from awa.config import find_database, has_password, load_settings, mask
from awa.errors import AwaError, ConfigError
from awa.worker import logs
from awa.worker.processes import Link, Processes

log = logging.getLogger("awa.worker")

_CLIENTS_OWN = {"schema", "notify", "pooler", "max_args_bytes"}
"""Settings that a client has before it makes a worker."""


def find_client(target: str) -> Client:
    """The client that *target* names: ``MODULE:NAME``, or the only one of ``MODULE``.

    Raises:
        ConfigError: The module cannot be imported, or does not have just one client.
    """
    module_name, _, name = target.partition(":")
    module = _load(module_name)
    if name:
        found = getattr(module, name, None)
        if not isinstance(found, Client):
            raise ConfigError(f"{mask(target)} is {_what(found)}, not an awa.Client{_choice(module)}")
        return found
    clients = _clients(module)
    if len(set(map(id, clients.values()))) != 1:
        raise ConfigError(
            f"module {module_name} has {len(clients) or 'no'} awa.Client at its top level{_choice(module)}"
        )
    return next(iter(clients.values()))


def _load(name: str) -> ModuleType:
    if not name:
        raise ConfigError("no module is named: give MODULE or MODULE:NAME, such as app.jobs")
    # as `python -m` does for a module of the current directory
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise ConfigError(
                f"there is no module {mask(error.name)}: give the dotted name that Python imports, from this directory"
            ) from error
        raise


def _clients(module: ModuleType) -> dict[str, Client]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Client)}


def _choice(module: ModuleType) -> str:
    names = ", ".join(f"{module.__name__}:{name}" for name in _clients(module))
    return f": give one of {names}" if names else ""


def _what(value: object) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


@click.command(cls=DiscreetCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target", metavar="MODULE[:NAME]")
@click.option("--database", metavar="URL", help="PostgreSQL connection string or URL.")
@click.option("--schema", metavar="NAME", help="The schema of awa's tables.")
@click.option("--queue", "queues", metavar="NAME[:MAX]", multiple=True, help="A queue to serve; repeatable.")
@click.option("--threads", metavar="N", help="Handlers that run at once.")
@click.option("--processes", metavar="P", help="Worker processes that run side by side, each with its threads.")
@click.option("--poll-interval", metavar="SECONDS", help="Longest wait when no wake-up comes.")
@click.option("--heartbeat", metavar="SECONDS", help="Between signs of life.")
@click.option("--stale-after", metavar="SECONDS", help="Silence after which a worker is taken for dead.")
@click.option("--timeout", metavar="SECONDS", help="Most that an attempt may take; 0 for no limit.")
@click.option("--shutdown-timeout", metavar="SECONDS", help="Grace time of running handlers.")
@click.option("--completed-retention", metavar="SECONDS", help="How long completed jobs stay readable.")
@click.option("--failed-retention", metavar="SECONDS", help="How long failed and cancelled jobs stay readable.")
@click.option("--dead-retention", metavar="SECONDS", help="How long dead letters stay readable.")
@click.option("--rotate-after", metavar="SECONDS", help="When a new segment is begun; 0 leaves it to the retention.")
@click.option("--notify/--no-notify", default=None, help="Wake workers by NOTIFY, or leave it to polling.")
@click.option("--pooler", metavar="auto|on|off", help="Whether the database is behind a transaction pooler.")
@click.option("--listen-url", metavar="URL", help="The database past the pooler, to claim and be woken there.")
@click.option("--max-args-bytes", metavar="N", help="Most bytes of a job's args, and of its metadata.")
@click.option("--health-addr", metavar="HOST:PORT", help="Where to answer /healthz and /readyz; :PORT for anybody.")
@click.option("--log-format", metavar="text|json", help="How logs are written.")
@click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
@reporting
def main(target: str, database: str | None, queues: tuple[str, ...], **flags: str | bool | None) -> None:
    """Import MODULE and run the jobs of its awa.Client until SIGTERM or SIGINT.

    With --processes, SIGHUP replaces them, one after the other.

    Every option is also an environment variable, AWA_THREADS for --threads and AWA_DATABASE_URL for --database. What
    the module gives to awa.Client(...) itself goes before both.
    """
    given: dict[str, object] = {name: value for name, value in flags.items() if value is not None}
    if queues:
        given["queues"] = queues
    settings = load_settings(flags=given)
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
    # A client reads its settings when it is made, while its module is imported: so they travel as its environment.
    if database is not None and database.strip():
        find_database(database)  # what cannot be read is refused before anything is imported
        if has_password(database):
            log.warning("--database shows its password to all who list processes: give it as AWA_DATABASE_URL instead")
        os.environ["AWA_DATABASE_URL"] = database
    os.environ.update({f"AWA_{name.upper()}": str(given[name]) for name in _CLIENTS_OWN & given.keys()})
    client = find_client(target)
    typed = given.keys() | ({"database"} if database else set())
    for name in sorted(client.said & typed):
        log.warning("--%s is not used: %s says it to awa.Client itself", name.replace("_", "-"), target)
    worker = client.worker(flags=given)
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


if __name__ == "__main__":
    main(prog_name="python -m awa.worker")
