"""Doing one thing to several jobs: named by their ids, or found by a filter, shown, and asked about."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import click
import psycopg

from awa.cli import EXIT_FAILED, EXIT_NOT_FOUND
from awa.cli.asking import ask, check_answerable
from awa.cli.filters import Filter, Walk
from awa.cli.output import echo, print_json, safe
from awa.cli.shown import JobTable
from awa.cli.target import Target
from awa.client import Client
from awa.errors import AwaError, JobBusy, JobNotFound, UniqueConflict
from awa.job import JobState
from awa.storage.control import Controlled
from awa.storage.jobs import JobInfo

SHOWN = 10
"""Jobs that are shown before the question."""

WENT_WRONG = ("refused", "busy", "conflict")


@dataclass(frozen=True, slots=True)
class Action:
    """What is done to each job."""

    name: str
    """In the question, and in JSON: ``cancel``."""
    states: tuple[JobState, ...]
    """Which jobs a filter means that names no state."""
    act: Callable[[Client, int], Controlled]
    """Does it."""
    asks_about_ids: bool = False
    """Whether it asks even when the jobs were named one by one."""
    object: str = ""
    """What else the question says: ``to queue mail``."""


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one job."""

    id: int
    happened: str
    state: str | None = None
    message: str | None = None

    def __str__(self) -> str:
        match self.happened:
            case "requested":
                more = ": it is running, and its handler is told"
            case "refused" | "nothing":
                more = f": it is {self.state}"
            case "busy" | "conflict":
                more = f": {self.message}"
            case _:
                more = ""
        return safe(f"{self.id}  {self.happened.replace('_', ' ')}{more}")


@dataclass(slots=True)
class _Found:
    """The jobs that are meant, as far as they were looked up."""

    ids: list[int] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)
    sample: list[JobInfo] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)

    def add(self, jobs: Iterable[JobInfo]) -> None:
        for job in jobs:
            self.ids.append(job.id)
            self.states[job.state] += 1
            if len(self.sample) < SHOWN:
                self.sample.append(job)


def run(target: Target, action: Action, wanted: Filter, *, takes_all: bool, is_sure: bool, is_dry: bool) -> int:
    """Do *action* to the jobs that *wanted* says, and print what became of each.

    Args:
        takes_all: Whether a filter that says nothing means every job.
        is_sure: Do not ask.
        is_dry: Show what would be done, and change nothing.

    Returns:
        The exit code: 1 when one was refused, or was held by somebody; else 3 when an id was not found.

    Raises:
        click.UsageError: The filter is empty, or there is nobody to ask.
    """
    if wanted.is_empty and not takes_all:
        raise click.UsageError("say which jobs: give ids or a filter, or --all for every job")
    if takes_all and not wanted.is_empty:
        raise click.UsageError("--all means every job: leave it out, or leave the filter out")
    asks = not is_sure and (action.asks_about_ids or not wanted.has_only_ids)
    if asks:
        check_answerable(is_sure, is_dry)
    with target.client() as client:
        if wanted.has_only_ids and not (asks or is_dry):
            found = _Found(ids=list(wanted.ids))
        else:
            found = _find(client, action, wanted)
            if is_dry or (asks and found.ids):
                _preview(target, action, found, is_dry=is_dry)
            if is_dry:
                return EXIT_NOT_FOUND if found.missing else 0
            if asks and found.ids:
                question = _said(action, len(found.ids))
                ask(f"{question[0].upper()}{question[1:]}?")
        # what a filter found has ended or been removed meanwhile, which is nobody's mistake
        return _do(target, client, action, found, may_be_gone=not wanted.has_only_ids)


def _find(client: Client, action: Action, wanted: Filter) -> _Found:
    found = _Found()
    if wanted.has_only_ids:  # each by itself: a producer may do so
        for job_id in wanted.ids:
            try:
                found.add([client.get(job_id)])
            except JobNotFound:
                found.missing.append(job_id)
        return found
    states = wanted.states or (() if wanted.ids else action.states)
    narrowed = Filter(wanted.ids, states, wanted.queue, wanted.kind, wanted.tag)
    for jobs in Walk(client.admin, narrowed):
        found.add(jobs)
    found.ids.reverse()  # oldest first: what goes to the end of a queue keeps its order
    return found


def _said(action: Action, count: int) -> str:
    many = "1 job" if count == 1 else f"{count:,} jobs"
    return f"{action.name} {many}{action.object and ' ' + action.object}"


def _preview(target: Target, action: Action, found: _Found, *, is_dry: bool) -> None:
    if is_dry and target.as_json:
        print_json(
            {
                "action": action.name,
                "dry_run": True,
                "count": len(found.ids),
                "states": dict(found.states),
                "ids": found.ids,
                "not_found": found.missing,
            }
        )
        return
    err = not is_dry
    if found.sample:
        JobTable(err=err).print(found.sample)
    if len(found.ids) > len(found.sample):
        echo(f"... and {len(found.ids) - len(found.sample):,} more", err=err)
    for job_id in found.missing:
        echo(f"{job_id}  not found", err=err)
    if is_dry:
        states = ", ".join(f"{count:,} {state}" for state, count in found.states.items())
        echo(f"would {_said(action, len(found.ids))}{states and ': ' + states}; nothing was changed")


def _do(target: Target, client: Client, action: Action, found: _Found, *, may_be_gone: bool) -> int:
    done: list[Done] = []
    failure: Exception | None = None

    def note(result: Done) -> None:
        done.append(result)
        if not target.as_json:
            echo(str(result))

    with _interruptible() as is_interrupted:
        try:
            for job_id in found.missing:
                note(Done(job_id, "not_found"))
            for job_id in found.ids:
                if is_interrupted():
                    echo("", err=True)  # the terminal has shown ^C
                    break
                note(_try(client, action, job_id, may_be_gone))
        except (AwaError, psycopg.Error) as error:  # told once it is told what was done
            failure = error
    counts = Counter(result.happened for result in done)
    left = len(found.ids) + len(found.missing) - len(done)
    if target.as_json:
        results = [
            {"id": result.id, "happened": result.happened, "state": result.state, "message": result.message}
            for result in done
        ]
        print_json({"action": action.name, "counts": dict(counts), "left": left, "results": results})
    elif not done and not left:
        echo("no job fits", err=True)
    elif len(done) > 1 or left:
        told = [f"{count:,} {word.replace('_', ' ')}" for word, count in counts.items()]
        told += [f"{left:,} left"] if left else []
        echo(", ".join(told), err=True)
    if counts["not_found"] and not target.as_json:  # there each has its message
        echo("what is not found has no history any more, or its insert is not committed: see `awa job list`", err=True)
    if failure is not None:
        raise failure
    if left or any(counts[word] for word in WENT_WRONG):
        return EXIT_FAILED
    return EXIT_NOT_FOUND if counts["not_found"] else 0


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Gives what tells whether Ctrl-C was typed, which within the block stops nothing in the middle of a job."""
    typed: list[int] = []

    def note(number: int, frame: object) -> None:
        if typed:
            raise KeyboardInterrupt
        typed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(typed)
    finally:
        signal.signal(signal.SIGINT, before)


def _try(client: Client, action: Action, job_id: int, may_be_gone: bool) -> Done:
    try:
        result = action.act(client, job_id)
    except JobNotFound as error:
        return Done(job_id, "gone" if may_be_gone else "not_found", None, str(error))
    except JobBusy as error:
        return Done(job_id, "busy", None, str(error))
    except UniqueConflict as error:
        return Done(job_id, "conflict", None, str(error))
    return Done(job_id, result.happened, result.state.value)
