"""``python -m awa.worker MODULE[:NAME]``: load an application and run its jobs until told to stop."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from types import ModuleType

import click

from awa.cli import DiscreetCommand, reporting
from awa.cli.worker import CLIENTS_OWN, run_worker, typed, worker_options
from awa.client import Client
from awa.config import load_settings, mask
from awa.errors import ConfigError

log = logging.getLogger("awa.worker")


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
            _check_not_of_flask(module_name, name, found)
            raise ConfigError(f"{mask(target)} is {_what(found)}, not an awa.Client{_choice(module)}")
        return found
    clients = _clients(module)
    if not clients:
        for name, value in vars(module).items():
            _check_not_of_flask(module_name, name, value)
    if len(set(map(id, clients.values()))) != 1:
        raise ConfigError(
            f"module {module_name} has {len(clients) or 'no'} awa.Client at its top level{_choice(module)}"
        )
    return next(iter(clients.values()))


def _check_not_of_flask(module_name: str, name: str, found: object) -> None:
    ours, flask = sys.modules.get("awa.ext.flask"), sys.modules.get("flask")
    kinds = tuple(kind for kind in (getattr(ours, "Awa", None), getattr(flask, "Flask", None)) if kind is not None)
    if isinstance(found, kinds):
        raise ConfigError(
            f"{module_name}:{name} belongs to a Flask app, as {type(found).__name__}:"
            f" run `flask --app {module_name} awa worker` instead"
        )


def _load(name: str) -> ModuleType:
    if not name:
        raise ConfigError("no module is named: give MODULE or MODULE:NAME, such as app.jobs")
    dotted = name.removeprefix("./").removesuffix(".py").strip("/.").replace("/", ".")
    if "/" in name or name.startswith("."):
        raise ConfigError(f"{mask(name)} is a path: give the dotted name that Python imports, {mask(dotted)}")
    # as `python -m` does for a module of the current directory
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            hint = f", {mask(dotted)}" if name == error.name and name.endswith(".py") else ""
            raise ConfigError(
                f"there is no module {mask(error.name)}:"
                f" give the dotted name that Python imports, from this directory{hint}"
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
@worker_options
@reporting
def main(target: str, database: str | None, queues: tuple[str, ...], **flags: str | bool | None) -> None:
    """Import MODULE and run the jobs of its awa.Client until SIGTERM or SIGINT.

    With --processes, SIGHUP replaces them, one after the other.

    Every option is also an environment variable, AWA_THREADS for --threads and AWA_DATABASE_URL for --database. What
    the module gives to awa.Client(...) itself goes before both.
    """
    given = typed(queues, flags)

    def find() -> Client:
        # A client reads its settings when it is made, while its module is imported: so they travel as its environment.
        if database is not None and database.strip():
            os.environ["AWA_DATABASE_URL"] = database
        os.environ.update({f"AWA_{name.upper()}": str(given[name]) for name in CLIENTS_OWN & given.keys()})
        client = find_client(target)
        for name in sorted(client.said & (given.keys() | ({"database"} if database else set()))):
            log.warning("--%s is not used: %s says it to awa.Client itself", name.replace("_", "-"), target)
        return client

    run_worker(load_settings(flags=given), given, database, find)


if __name__ == "__main__":
    main(prog_name="python -m awa.worker")
