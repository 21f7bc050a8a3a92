"""``awa job``: look at jobs, write them out, put one in, and change those that are there."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from awa.cli import EXIT_NOT_FOUND, bulk
from awa.cli.asking import asking_options
from awa.cli.export import csv_head, csv_lines, json_lines, written
from awa.cli.filters import KEYS, WAITING, Walk, parse_filter, parse_ids
from awa.cli.output import as_json, echo, print_json, safe
from awa.cli.shown import JobTable, job_facts, print_job
from awa.cli.target import Target, refuse_address, with_target
from awa.cli.values import duration, instant, job_id, json_object
from awa.cli.values import priority as read_priority
from awa.client import Client
from awa.errors import JobNotFound, PermissionDenied, ValidationError
from awa.job import JobState
from awa.options import AFTER_FAILED, check_queue, check_reason
from awa.storage.jobs import JobInfo, not_found

LISTED = 20
"""Jobs that a list shows when nobody says how many."""


@click.group()
def job() -> None:
    """Look at jobs, put one in, cancel, retry, move them.

    Jobs are named by their ids, or by a FILTER: words such as kind:send_email, queue:email, tag:eu, state:failed or
    state:failed,cancelled, id:12,13. A job fits when all of them are true of it.
    """


class _Filtered(click.Command):
    """A command that takes a filter, and says so to who types it as options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            key = error.option_name.lstrip("-")
            if key not in KEYS:
                raise
            raise click.UsageError(
                f"no such option {error.option_name}: a filter is a word, such as {_EXAMPLES[key]}", ctx
            ) from None


_EXAMPLES = {"id": "id:12", "kind": "kind:send_email", "queue": "queue:email", "state": "state:failed", "tag": "tag:eu"}


def _words(name: str, *, is_required: bool = False) -> Callable[..., Any]:
    return click.argument("words", metavar=name, nargs=-1, required=is_required, callback=refuse_address)


@job.command("list", cls=_Filtered)
@_words("[FILTER]...")
@click.option("--limit", type=click.IntRange(min=1), default=LISTED, show_default=True, help="Most jobs to show.")
@click.option("--all", "shows_all", is_flag=True, help="Show all of them, however many there are.")
@click.option("--after", metavar="CURSOR", help="Go on where a page ended, as it said.")
@with_target
@click.pass_context
def list_(
    context: click.Context, target: Target, words: tuple[str, ...], limit: int, shows_all: bool, after: str | None
) -> None:
    """Show the jobs that fit, newest first within a state.

    The column `when` has the time that matters: due for what waits for a time, taken for a running job, ended for one
    that has ended, else inserted.
    """
    is_said = context.get_parameter_source("limit") is click.core.ParameterSource.COMMANDLINE
    if shows_all and is_said:
        raise click.UsageError("--limit and --all exclude each other")
    wanted = parse_filter(words)
    with target.client() as client:
        walk = Walk(client.admin, wanted, limit=None if shows_all else limit, after=after)
        if target.as_json:
            _list_json(walk)
        else:
            _list_table(walk)
    if walk.after is not None and not target.as_json:
        echo(f"there is more: add --after {walk.after}", err=True)


def _list_json(walk: Walk) -> None:
    # written page by page: there may be millions
    echo('{"jobs": [', nl=False)
    comma = ""
    for jobs in walk:
        echo(comma + ", ".join(as_json(job_facts(one)) for one in jobs), nl=False)
        comma = ", "
    echo(f'], "after": {as_json(walk.after)}}}')


def _list_table(walk: Walk) -> None:
    table, is_empty = JobTable(), True
    for jobs in walk:
        table.print(jobs)
        is_empty = False
    if is_empty:
        echo("no job fits", err=True)


@job.command(short_help="Show all that is known of jobs.")
@_words("ID...", is_required=True)
@with_target
@click.pass_context
def show(context: click.Context, target: Target, words: tuple[str, ...]) -> None:
    """Show all that is known of jobs: their attempts, and the jobs around them; exit code 3 when one is not found.

    Who may not read the tables, as a producer, is shown less.
    """
    ids, missing = parse_ids(words), []
    found: list[JobInfo] = []
    with target.client() as client:
        for id_ in ids:
            try:
                found.append(_details(client, id_))
            except JobNotFound:
                missing.append(id_)
    if target.as_json:
        print_json({"jobs": [job_facts(one) for one in found], "not_found": missing})
    else:
        for number, one in enumerate(found):
            if number:
                echo("")
            print_job(one)
    for id_ in missing:
        echo(f"awa: {not_found(id_)}", err=True)
    context.exit(EXIT_NOT_FOUND if missing else 0)


def _details(client: Client, job_id: int) -> JobInfo:
    try:
        return client.admin.job_details(job_id)
    except PermissionDenied:
        return client.get(job_id)


def _check_output(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    if value is not None and not value.name:
        raise click.BadParameter("give the name of a file, or leave it out for the standard output", context)
    return value


@job.command(cls=_Filtered, short_help="Write jobs to a file, as JSON or CSV.")
@_words("[FILTER]...")
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv"]),
    default="jsonl",
    show_default=True,
    help="A JSON object a line, or comma-separated values.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_check_output,
    metavar="FILE",
    help="Where to; FILE is replaced once all of it is written.",
)
@with_target
def export(target: Target, words: tuple[str, ...], form: str, output: Path | None) -> None:
    """Write all jobs that fit, with their args and histories, newest first within a state.

    They are read page by page, and however many there are it takes no more memory. A job that changes its state
    meanwhile may be there twice, or not at all; name the states in which nothing moves to be sure.
    """
    wanted = parse_filter(words)
    lines = json_lines if form == "jsonl" else csv_lines
    count = 0
    with target.client() as client, written(output) as write:
        if form == "csv":
            write(csv_head())
        for jobs in Walk(client.admin, wanted):
            write(lines(jobs))
            count += len(jobs)
    if target.as_json and output is not None:
        print_json({"jobs": count, "output": str(output)})
    else:
        echo(f"wrote {count:,} {'job' if count == 1 else 'jobs'}", err=True)


@job.command()
@click.argument("kind", callback=refuse_address)
@click.argument("args", metavar="[ARGS|-]", default="{}")
@click.option("--app", metavar="MODULE[:NAME]", help="Insert as this application: its tasks check args, say options.")
@click.option("--queue", metavar="NAME", help="Where it waits.")
@click.option("--priority", type=read_priority, metavar="1-4", help="1 runs first.")
@click.option("--max-attempts", type=int, metavar="N", help="1 to 1000.")
@click.option("--timeout", type=duration, metavar="TIME", help="What an attempt may take: 90, 15min, 2h; 0: no limit.")
@click.option("--run-at", type=instant, metavar="TIME", help="Not before: 2026-12-24T18:00:00+01:00.")
@click.option("--delay", type=duration, metavar="TIME", help="Not before so long from now.")
@click.option("--expires-at", type=instant, metavar="TIME", help="Not to be started after this; cancelled instead.")
@click.option("--tag", "tags", multiple=True, metavar="TAG", help="For finding it again; repeatable.")
@click.option("--metadata", type=json_object, metavar="JSON", help="An object that travels along.")
@click.option("--concurrency-key", metavar="KEY", help="Of those with the same, only so many run at once.")
@click.option("--ordering-key", metavar="KEY", help="Those with the same run one after the other.")
@click.option("--after", type=job_id, multiple=True, metavar="ID", help="Run after this job has completed; repeatable.")
@click.option("--after-failed", type=click.Choice(AFTER_FAILED), help="What becomes of it when one of these has not.")
@with_target
def insert(
    target: Target,
    kind: str,
    args: str,
    app: str | None,
    tags: tuple[str, ...],
    after: tuple[int, ...],
    **given: int | float | str | datetime | dict[str, Any] | None,
) -> None:
    """Put in a job of KIND and print its id.

    ARGS is a JSON object, {} when left out; - reads it from the standard input. Without --app nobody looks whether a
    worker knows the kind and whether the args fit it.
    """
    text = sys.stdin.read() if args == "-" else args
    values = json_object(text)
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    options |= {name: value for name, value in (("tags", tags), ("after", after)) if value}
    with target.client() if app is None else target.client_of(app) as client:
        if app is not None:
            values = _checked_args(client, kind, values)
        inserted = client.insert(values, kind=kind, **options)
    if target.as_json:
        print_json({"id": inserted.id, "is_new": inserted.is_new})
    elif inserted.is_new:
        echo(f"inserted job {inserted.id}")
    else:
        echo(f"job {inserted.id} is there already, and is equal: nothing was inserted")


def _checked_args(client: Client, kind: str, values: dict[str, Any]) -> Any:
    task = client.registry.find(kind)
    if task is None:
        known = ", ".join(map(safe, client.registry.kinds)) or "none"
        raise click.UsageError(f"the application has no task of kind {safe(kind)}: it has {known}")
    if not task.is_typed:
        return values  # the insert checks them
    try:
        return task.codec.load(json.dumps(values))
    except ValidationError as error:
        # what a worker says of args that are stored already goes on with whose code is old
        said = str(error).partition(": this worker's code")[0]
        raise click.UsageError(f"the args do not fit the task {safe(kind)}: {safe(said)}") from None


def _ids_or_filter(verb: str) -> Callable[..., Any]:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        every = click.option("--all", "takes_all", is_flag=True, help=f"{verb} every job that this can be done to.")
        decorated: Callable[..., Any] = _words("[ID|FILTER]...")(every(asking_options(with_target(command))))
        return decorated

    return decorate


def _run(target: Target, action: bulk.Action, words: tuple[str, ...], **flags: bool) -> None:
    code = bulk.run(target, action, parse_filter(words), **flags)
    click.get_current_context().exit(code)


@job.command(cls=_Filtered, short_help="Cancel jobs, or have running ones told to stop.")
@click.option("--force", is_flag=True, help="End running attempts at once, instead of telling their handlers.")
@click.option("--reason", metavar="TEXT", help="Why, for the jobs' history.")
@_ids_or_filter("Cancel")
def cancel(target: Target, words: tuple[str, ...], force: bool, reason: str | None, **flags: bool) -> None:
    """Cancel jobs: at once when they are not running, else by telling their handlers.

    A filter that names no state means all that have not ended. Asks first; without a terminal it needs --yes.
    """
    check_reason(reason)
    states = (*WAITING, JobState.RUNNING)
    action = bulk.Action("cancel", states, lambda client, id: client.cancel(id, reason=reason, force=force), True)
    _run(target, action, words, **flags)


@job.command(cls=_Filtered, short_help="Run jobs again, from their first attempt on.")
@_ids_or_filter("Retry")
def retry(target: Target, words: tuple[str, ...], **flags: bool) -> None:
    """Run jobs again, from their first attempt on: failed and cancelled ones, and now those that wait for a time.

    A filter that names no state means the failed ones. Over a filter it asks first.
    """
    action = bulk.Action("retry", (JobState.FAILED,), lambda client, id: client.retry(id))
    _run(target, action, words, **flags)


@job.command(cls=_Filtered, short_help="Move jobs to the end of another queue.")
@click.argument("queue", callback=refuse_address)
@_ids_or_filter("Move")
def move(target: Target, queue: str, words: tuple[str, ...], **flags: bool) -> None:
    """Move jobs that wait or are available to the end of QUEUE.

    Over a filter it asks first, and moves the oldest first.
    """
    check_queue(queue)
    action = bulk.Action(
        "move", WAITING, lambda client, id: client.admin.move(id, queue), object=f"to queue {safe(queue)}"
    )
    _run(target, action, words, **flags)


@job.command(cls=_Filtered, short_help="Give jobs another priority.")
@click.argument("priority", type=read_priority, metavar="PRIORITY")
@_ids_or_filter("Reprioritise")
def priority(target: Target, priority: int, words: tuple[str, ...], **flags: bool) -> None:
    """Give jobs that wait or are available the PRIORITY 1, which runs first, to 4.

    Over a filter it asks first.
    """
    action = bulk.Action(
        "reprioritise",
        WAITING,
        lambda client, id: client.admin.set_priority(id, priority),
        object=f"to priority {priority}",
    )
    _run(target, action, words, **flags)
