"""``awa runtime``: look at worker processes, have one claim nothing more, let it go on."""

from __future__ import annotations

import re
from typing import Any

import click

from awa.cli.output import Cell, Column, Table, echo, facts, local_time, print_facts, print_json, safe, short, styled
from awa.cli.target import Target, refuse_address, this_user, with_target
from awa.client import Client
from awa.config import QueueSpec
from awa.errors import RuntimeNotFound
from awa.storage.runtime_control import RuntimeHealth, RuntimeInfo, ServedQueue
from awa.wording import age

_COLUMNS = (
    Column("id", is_number=True),
    Column("state"),
    Column("host", is_flexible=True),
    Column("pid", is_number=True),
    Column("busy", is_number=True),
    Column("queues", is_flexible=True),
    Column("seen", is_number=True),
    Column("health", is_flexible=True),
    Column("started", needs_width=110),
    Column("version", needs_width=125),
)


@click.group()
def runtime() -> None:
    """Look at worker processes, have one claim nothing more, let it go on."""


Place = tuple[str, int]
"""Host and process."""


def _read_name(context: click.Context, parameter: click.Parameter, value: str) -> int | Place:
    refuse_address(context, parameter, value)
    host, _, number = value.rpartition(":")
    if re.fullmatch("[0-9]{1,19}", number, re.ASCII) and 1 <= int(number) < 2**63:
        if host:
            return host, int(number)
        if number == value:
            return int(number)
    raise click.BadParameter(
        f"{short(repr(value), 60)} is neither the number of a worker nor HOST:PID: `awa runtime list` shows both",
        context,
    )


_name = click.argument("name", metavar="ID|HOST:PID", callback=_read_name)


@runtime.command("list", short_help="Show every worker process.")
@click.option("--all", "shows_all", is_flag=True, help="The last hundred that have ended too.")
@with_target
def list_(target: Target, shows_all: bool) -> None:
    """Show every worker process that has not ended: what it serves, how busy it is, when it was last heard."""
    with target.client() as client:
        found = client.admin.list_runtimes(include_ended=shows_all)
    if target.as_json:
        print_json({"runtimes": [runtime_facts(one) for one in found]})
    elif found:
        Table(_COLUMNS).print([_row(one) for one in found])
    else:
        echo("no worker is known: start one with `python -m awa.worker MODULE`", err=True)


def _row(info: RuntimeInfo) -> list[Cell]:
    return [
        str(info.id),
        styled(_state(info)),
        info.hostname,
        str(info.pid),
        _busy(info),
        ", ".join(one.name for one in info.queues) or "-",
        age(info.silent_seconds),
        _health_text(info.health, "; "),
        local_time(info.started_at),
        info.version,
    ]


def _state(info: RuntimeInfo) -> str:
    words = (("leader", info.is_leader), ("quiet", info.is_quiet), ("drained", info.is_drained))
    more = [word for word, holds in words if holds]
    return info.state + (f" ({', '.join(more)})" if more else "")


def _busy(info: RuntimeInfo) -> str:
    many = "-" if info.busy is None else str(info.busy)
    return f"{many}/{'-' if info.threads is None else info.threads}"


def _health_text(health: RuntimeHealth | None, between: str) -> str:
    if health is None:
        return "-"
    return between.join(map(safe, [*health.unhealthy, *health.unready])) or "ok"


def runtime_facts(info: RuntimeInfo) -> dict[str, Any]:
    """A runtime in JSON: the fields of ``RuntimeInfo``, and what it derives."""
    return facts(info) | {"is_quiet": info.is_quiet, "is_drained": info.is_drained}


def _find(client: Client, name: int | Place) -> int:
    """The number that *name* says, or that of the one runtime there."""
    if isinstance(name, int):
        return name
    there = [one for one in client.admin.list_runtimes() if (one.hostname, one.pid) == name]
    # one that was taken for dead and has registered anew is there twice
    numbers = [one.id for one in there if one.state != "gone"] or [one.id for one in there]
    if len(numbers) == 1:
        return numbers[0]
    place = f"process {name[1]} on {safe(name[0])}"
    if numbers:
        text = f"{len(numbers)} workers run in {place}: give one of the numbers {', '.join(map(str, numbers))}"
    else:
        text = f"no worker runs as {place}: `awa runtime list` shows which there are"
    raise RuntimeNotFound(text, runtime=None)


@runtime.command(short_help="Show all that is known of a worker process.")
@_name
@with_target
def show(target: Target, name: int | Place) -> None:
    """Show all that is known of a worker process; exit code 3 when nothing is."""
    with target.client() as client:
        info = client.admin.get_runtime(_find(client, name))
    if target.as_json:
        print_json(runtime_facts(info))
    else:
        print_facts(_lines(info))


def _lines(info: RuntimeInfo) -> list[tuple[str, str]]:
    rows = [
        ("worker", str(info.id)),
        ("state", _state(info)),
        ("place", f"process {info.pid} on {safe(info.hostname)}"),
        ("version", safe(info.version)),
        ("uuid", str(info.uuid)),
        ("started", local_time(info.started_at)),
        ("last seen", f"{local_time(info.last_seen_at)}, {age(info.silent_seconds)} ago"),
        ("taken for dead", f"after {info.stale_after:g} s of silence; a sign of life every {info.heartbeat:g} s"),
    ]
    if info.ended_at is not None:
        rows.append(("ended", local_time(info.ended_at)))
    if info.is_quiet:
        rows.append(("quiet", _quiet_text(info)))
    rows += [
        ("busy", f"{_busy(info)} threads"),
        ("queues", "\n".join(map(_queue_text, info.queues)) or "-"),
        ("kinds", ", ".join(map(safe, info.kinds)) or "-"),
        ("health", _health_text(info.health, "\n")),
    ]
    if info.health is not None:
        rows.append(("loops", ", ".join(f"{safe(loop)} {safe(how)}" for loop, how in info.health.loops.items())))
    rows.append(("told", "never" if info.snapshot_at is None else local_time(info.snapshot_at)))
    return rows


def _queue_text(one: ServedQueue) -> str:
    served = QueueSpec(safe(one.name), one.max_workers, one.min_workers, one.weight)
    return f"{served}" + ("" if one.in_flight is None else f" has {one.in_flight:,} in flight")


def _quiet_text(info: RuntimeInfo) -> str:
    return f"since {local_time(info.quiet_at)}" + ("" if info.quiet_by is None else f" by {safe(info.quiet_by)}")


@runtime.command(short_help="Have a worker process claim nothing more.")
@_name
@click.option("--by", metavar="WHO", help="Who says so; else user@host.")
@with_target
def quiet(target: Target, name: int | Place, by: str | None) -> None:
    """Have a worker process claim nothing more, until it is resumed or ends; it hears it within a second.

    What it runs goes on; what it has claimed and not started is left to others.
    """
    with target.client() as client:
        info = client.admin.quiet_runtime(_find(client, name), by=this_user() if by is None else by)
    _answer(target, info, f"worker {info.id} is quiet {_quiet_text(info)}")


@runtime.command(short_help="Let a quiet worker process claim again.")
@_name
@with_target
def resume(target: Target, name: int | Place) -> None:
    """Let a worker process claim again."""
    with target.client() as client:
        info = client.admin.resume_runtime(_find(client, name))
    _answer(target, info, f"worker {info.id} may claim")


def _answer(target: Target, info: RuntimeInfo, text: str) -> None:
    if target.as_json:
        print_json(runtime_facts(info))
    else:
        echo(text)
    if info.state == "stale":
        silence = age(info.silent_seconds)
        echo(f"worker {info.id} has been silent for {silence}: it hears this only if it lives all the same", err=True)
