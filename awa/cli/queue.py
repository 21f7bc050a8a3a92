"""``awa queue``: look at queues, pause and resume them, say their limits, empty them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from awa.cli.asking import ask, asking_options, check_answerable
from awa.cli.counts import counted_columns, counted_lines, counted_row, print_depths
from awa.cli.descriptors import described_columns, described_facts, described_lines, described_row
from awa.cli.filters import WAITING
from awa.cli.output import Cell, Column, Table, echo, facts, local_time, plain, print_facts, print_json, safe, styled
from awa.cli.stats import print_statistics
from awa.cli.target import Target, refuse_address, this_user, with_target
from awa.cli.values import most, rate, rate_text
from awa.client import Client
from awa.errors import QueueNotFound
from awa.job import JobState
from awa.limits import Limits, RateLimit
from awa.options import check_queue, check_reason
from awa.storage.queue_control import QueueInfo
from awa.storage.queues import Count

LIMITS = {"max-running": "max_running", "rate-limit": "rate_limit", "max-running-per-key": "max_running_per_key"}
"""What the options say, and what it is called in Python and JSON."""

ENDED = (JobState.FAILED, JobState.CANCELLED)

_COLUMNS = (
    Column("queue", is_flexible=True),
    Column("status"),
    *counted_columns(oldest_needs_width=90),
    Column("limits", is_flexible=True, needs_width=130),
    *described_columns(),
)


@click.group()
def queue() -> None:
    """Look at queues, pause and resume them, say their limits, empty them."""


_name = click.argument("name", callback=refuse_address)
_by = click.option("--by", metavar="WHO", help="Who says so; else user@host.")


def _who(by: str | None) -> str:
    return this_user() if by is None else by


@queue.command("list", short_help="Show every queue, with its jobs by state.")
@with_target
def list_(target: Target) -> None:
    """Show every queue of which something is known: its jobs by state, whether it is paused, how code describes it.

    Up to 10,000 jobs of a queue in a state are counted, beyond that the number may be an estimate: ~1,234,567. The
    column `oldest` tells for how long the first of the available ones has been.
    """
    with target.client() as client:
        found = client.admin.list_queues()
    if target.as_json:
        print_json({"queues": [queue_facts(one) for one in found]})
    elif found:
        Table(_COLUMNS).print([_row(one) for one in found])
    else:
        echo("no queue is known: there are no jobs, and no worker has declared one", err=True)


def _row(info: QueueInfo) -> list[Cell]:
    status = styled("paused") if info.is_paused else "open"
    counted = counted_row(info.counts, info.oldest_at)
    return [info.name, status, *counted, _limits_text(info.limits), *described_row(info.descriptor)]


def _limits_text(limits: Limits) -> str:
    told = [f"{option} {_limit_text(getattr(limits, name))}" for option, name in LIMITS.items()]
    return ", ".join(text for text in told if not text.endswith(" none")) or "-"


def _limit_text(value: int | RateLimit | None) -> str:
    return "none" if value is None else rate_text(value) if isinstance(value, RateLimit) else str(value)


def queue_facts(info: QueueInfo) -> dict[str, Any]:
    """A queue in JSON: the fields of ``QueueInfo``, and what it derives; ``kinds`` only where it has been asked for."""
    derived = {"is_paused": info.is_paused, "running": info.running}
    found = facts(info) | derived | {"descriptor": described_facts(info.descriptor)}
    return found if info.kinds is not None else {name: fact for name, fact in found.items() if name != "kinds"}


def _doubt(info: QueueInfo) -> None:
    """Tell who has just said something of a queue that nobody uses, as a mistyped name is one."""
    if info.declared is None and not any(count.value for count in info.counts.values()):
        echo(f"queue {safe(info.name)} has no jobs, and no code declares it: see that its name is right", err=True)


def _doubt_name(client: Client, name: str) -> None:
    """Tell who found nothing to do in a queue that it is none; no error, for who empties twice."""
    try:
        client.admin.get_queue(name, by_kind=False)
    except QueueNotFound as error:
        echo(f"awa: {safe(error)}", err=True)


def _answer(target: Target, info: QueueInfo, text: str) -> None:
    if target.as_json:
        print_json(queue_facts(info))
    else:
        echo(text)


@queue.command(short_help="Show all that is known of a queue.")
@_name
@with_target
def show(target: Target, name: str) -> None:
    """Show all that is known of a queue, and what it has of each kind; exit code 3 when nothing is known.

    A kind with few jobs may be left out where not all jobs were looked at, which ~ tells.
    """
    with target.client() as client:
        info = client.admin.get_queue(name)
        [statistics] = client.admin.statistics("queue", name=name)
    if target.as_json:
        print_json(queue_facts(info) | {"statistics": plain(statistics.windows)})
        return
    rows = [("queue", safe(info.name)), ("status", _status_text(info)), *counted_lines(info.counts, info.oldest_at)]
    print_facts(rows + described_lines(info.descriptor))
    print_depths("kind", info.kinds or {})
    echo("")
    _print_limits(info)
    echo("")
    print_statistics(statistics)


def _status_text(info: QueueInfo) -> str:
    if not info.is_paused:
        return "open"
    by = "" if info.paused_by is None else f" by {safe(info.paused_by)}"
    why = "" if info.pause_reason is None else f": {safe(info.pause_reason)}"
    return f"paused since {local_time(info.paused_at)}{by}{why}"


def _print_limits(info: QueueInfo) -> None:
    declared = info.declared
    rows = [
        (
            option,
            "-" if declared is None else _limit_text(getattr(declared, name)),
            _limit_text(info.overrides[name]) if name in info.overrides else "-",
            _limit_text(getattr(info.limits, name)),
        )
        for option, name in LIMITS.items()
    ]
    Table([Column("limit"), Column("declared"), Column("overridden"), Column("holds")]).print(rows)
    if info.overrides_at is not None:
        by = "" if info.overrides_by is None else f" by {safe(info.overrides_by)}"
        echo(f"last overridden or cleared {local_time(info.overrides_at)}{by}")


@queue.command(short_help="Let nothing of a queue start until it is resumed.")
@_name
@click.option("--reason", metavar="TEXT", help="Why, for whoever wonders.")
@_by
@with_target
def pause(target: Target, name: str, reason: str | None, by: str | None) -> None:
    """Let nothing of the queue start, on any worker, until it is resumed. What is running goes on."""
    with target.client() as client:
        info = client.admin.pause_queue(name, by=_who(by), reason=reason)
    _answer(target, info, f"queue {safe(name)} is {_status_text(info)}")
    _doubt(info)


@queue.command(short_help="Let a queue's jobs start again.")
@_name
@with_target
def resume(target: Target, name: str) -> None:
    """Let the queue's jobs start again."""
    with target.client() as client:
        info = client.admin.resume_queue(name)
    _answer(target, info, f"queue {safe(name)} is open")


@queue.command("cancel-waiting", short_help="Cancel every job that waits or is available.")
@_name
@click.option("--reason", metavar="TEXT", help="Why, for the jobs' history.")
@asking_options
@with_target
def cancel_waiting(target: Target, name: str, reason: str | None, is_sure: bool, is_dry: bool) -> None:
    """Cancel every job of the queue that waits or is available, after telling how many there are."""
    check_queue(name)
    check_reason(reason)
    check_answerable(is_sure, is_dry)
    with target.client() as client:
        if is_dry or not is_sure:
            count = client.admin.count_waiting(name)
            if not count:
                client.admin.get_queue(name, by_kind=False)  # which raises for a name that is none
            if is_dry:
                _would(
                    target, name, {"waiting": count}, f"would cancel {_jobs(count, 'waiting')} of queue {safe(name)}"
                )
                return
            if count:
                ask(f"Cancel {_jobs(count, 'waiting')} of queue {safe(name)}?")
        cancelled = client.admin.cancel_waiting(name, reason=reason)
        if not cancelled:
            _doubt_name(client, name)
    if target.as_json:
        print_json({"queue": name, "cancelled": cancelled})
    else:
        echo(f"cancelled {_jobs(cancelled)} of queue {safe(name)}")


@queue.command(short_help="Delete what waits, has failed or was cancelled.")
@_name
@asking_options
@with_target
def purge(target: Target, name: str, is_sure: bool, is_dry: bool) -> None:
    """Delete the queue's jobs that wait and those that failed or were cancelled, after telling how many there are.

    Nothing of them is left, no history either. Running jobs stay, and completed ones until their time is over.
    """
    check_queue(name)
    check_answerable(is_sure, is_dry)
    with target.client() as client:
        if is_dry or not is_sure:
            counts = client.admin.get_queue(name, by_kind=False).counts
            waiting, ended = _sum(counts, WAITING), _sum(counts, ENDED)
            text = f"{_jobs(waiting, 'waiting')} and {_jobs(ended, 'ended')} of queue {safe(name)}"
            if is_dry:
                _would(target, name, {"waiting": waiting, "ended": ended}, f"would delete {text}")
                return
            if waiting.value or ended.value:
                ask(f"Delete {text}?")
        purged = client.admin.purge_queue(name)
        if not (purged.waiting or purged.ended):
            _doubt_name(client, name)
    if target.as_json:
        print_json({"queue": name, "waiting": purged.waiting, "ended": purged.ended})
    else:
        echo(f"deleted {_jobs(purged.waiting, 'waiting')} and {_jobs(purged.ended, 'ended')} of queue {safe(name)}")


def _sum(counts: dict[JobState, Count], states: Iterable[JobState]) -> Count:
    found = [counts[state] for state in states if state in counts]
    return Count(sum(count.value for count in found), all(count.is_exact for count in found))


def _jobs(count: int | Count, word: str = "") -> str:
    value = count if isinstance(count, int) else count.value
    many = f"{value:,}" if isinstance(count, int) else str(count)
    return f"{many} {word + ' ' if word else ''}{'job' if value == 1 else 'jobs'}"


def _would(target: Target, name: str, counts: dict[str, int | Count], text: str) -> None:
    if target.as_json:
        print_json({"queue": name, "dry_run": True, **{key: plain(count) for key, count in counts.items()}})
    else:
        echo(f"{text}; nothing was changed")


@queue.command(short_help="Show or set limits.")
@_name
@click.option("--max-running", type=most, metavar="N|none", help="Attempts at once, of all workers together.")
@click.option("--rate-limit", type=rate, metavar="RATE|none", help="Attempts in a time: 50/s, 100/min:burst=20.")
@click.option(
    "--max-running-per-key", type=most, metavar="N|none", help="Attempts at once with the same concurrency_key."
)
@click.option(
    "--clear",
    "cleared",
    type=click.Choice([*LIMITS, "all"]),
    multiple=True,
    help="Go back to what code declares; repeatable.",
)
@_by
@with_target
def limits(
    target: Target, name: str, cleared: tuple[str, ...], by: str | None, **given: int | RateLimit | None
) -> None:
    """Show a queue's limits, or override what code declares about them, at once and for all workers.

    What is not given stays as it is; none means that there is no such limit, whatever code says.
    """
    context = click.get_current_context()
    said: dict[str, Any] = {
        LIMITS[option.replace("_", "-")]: value
        for option, value in given.items()
        if context.get_parameter_source(option) is not click.core.ParameterSource.DEFAULT
    }
    if said and cleared:
        raise click.UsageError("--clear takes back what was said: give it by itself")
    if by is not None and not (said or cleared):
        raise click.UsageError("--by says who changes a limit: give one, or --clear")
    with target.client() as client:
        if said:
            info = client.admin.set_limits(name, by=_who(by), **said)
        elif cleared:
            names = LIMITS.values() if "all" in cleared else [LIMITS[option] for option in cleared]
            info = client.admin.clear_limits(name, *names, by=_who(by))
        else:
            info = client.admin.get_queue(name, by_kind=False)
    if target.as_json:
        print_json(queue_facts(info))
    else:
        _print_limits(info)
    if said:
        _doubt(info)
