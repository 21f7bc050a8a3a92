"""Which jobs a command is about: ``kind:send_email state:failed``, or their ids."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from awa import options
from awa.admin import MOST_LISTED, Admin
from awa.cli.output import short
from awa.cli.values import job_id
from awa.errors import ValidationError
from awa.job import JobState
from awa.storage.jobs import JobInfo

KEYS = ("id", "kind", "queue", "state", "tag")

WAITING = (JobState.SCHEDULED, JobState.AVAILABLE, JobState.RETRYABLE, JobState.WAITING_EXTERNAL)
"""The states of jobs that wait or are available."""


@dataclass(frozen=True, slots=True)
class Filter:
    """What was said of jobs; one fits when all of it is true of it."""

    ids: tuple[int, ...] = ()
    """One of these, each once."""
    states: tuple[JobState, ...] = ()
    """In one of these."""
    queue: str | None = None
    """In this queue."""
    kind: str | None = None
    """Of this kind."""
    tag: str | None = None
    """With this tag."""

    @property
    def is_empty(self) -> bool:
        """Whether every job fits."""
        return self == Filter()

    @property
    def has_only_ids(self) -> bool:
        """Whether jobs were named one by one, and nothing else was said."""
        return bool(self.ids) and self == Filter(ids=self.ids)

    def __str__(self) -> str:
        words = [("queue", self.queue), ("kind", self.kind), ("tag", self.tag)]
        words += [("state", ",".join(self.states)), ("id", ",".join(map(str, self.ids)))]
        return " ".join(shlex.quote(f"{key}:{value}") for key, value in words if value)


def parse_filter(words: Sequence[str]) -> Filter:
    """Read words such as ``kind:send_email`` and ``state:failed,cancelled``; a number is a job's id.

    Raises:
        click.UsageError: One is none of these, or what may be said once is said twice.
    """
    ids: list[int] = []
    states: list[JobState] = []
    named: dict[str, str] = {}
    for word in words:
        key, colon, value = word.partition(":")
        if not colon and re.fullmatch(r"[0-9]+", word, re.ASCII):
            key, value = "id", word
        elif not colon or key not in KEYS:
            keyed = re.match(rf"(?:--)?({'|'.join(KEYS)})=", word)
            meant = f"; for {short(word, 40)} say {keyed[1]}:{short(word[keyed.end() :], 40)}" if keyed else ""
            if word in list(JobState):
                meant = f"; for jobs that are {word} say state:{word}"
            raise click.UsageError(
                f"{short(repr(word), 80)} is no job's id, and no filter: give a number, or KEY:VALUE; the keys are"
                f" {', '.join(KEYS)}{meant}"
            )
        match key:
            case "id":
                ids += [job_id(text) for text in value.split(",")]
            case "state":
                states += [_read_state(text) for text in value.split(",")]
            case _ if key in named:
                raise click.UsageError(f"{key} is given twice, and a filter has one: give it once")
            case _:
                named[key] = _checked(key, value)
    return Filter(tuple(dict.fromkeys(ids)), tuple(dict.fromkeys(states)), **named)


def parse_ids(words: Sequence[str]) -> tuple[int, ...]:
    """The ids that *words* name, such as ``12`` and ``id:12,13``.

    Raises:
        click.UsageError: One says something else.
    """
    texts = [text for word in words for text in word.removeprefix("id:").split(",")]
    return tuple(dict.fromkeys(map(job_id, texts)))


def _read_state(text: str) -> JobState:
    try:
        return JobState(text)
    except ValueError:
        raise click.UsageError(f"state {short(repr(text), 60)} is none: there are {', '.join(JobState)}") from None


def _checked(key: str, value: str) -> str:
    try:
        if key == "tag":
            return options.check_tag(value)
        return options.check_queue(value) if key == "queue" else options.check_kind(value)
    except ValidationError as error:
        raise click.UsageError(str(error)) from None


class Walk:
    """The jobs that fit, newest first within a state, page by page.

    Without states those of all come, in the order in which the library lists them.
    """

    def __init__(self, admin: Admin, wanted: Filter, *, limit: int | None = None, after: str | None = None) -> None:
        self._admin = admin
        self._wanted = wanted
        self._left = limit
        self._cursors = self._begin(after)
        self.after: str | None = None
        """Where a list that has reached its limit goes on; None when it is at its end."""

    def _begin(self, after: str | None) -> list[tuple[JobState | None, str | None]]:
        states: list[JobState | None] = list(self._wanted.states) or [None]
        if after is None:
            return [(state, None) for state in states]
        # where a list of several states goes on with the next one, there is no job to go on behind
        named = after.partition(".")[0]
        if self._wanted.states:
            if named not in self._wanted.states:
                raise click.UsageError(
                    f"--after {short(repr(after), 60)} is none of such a list: give what the page before printed, with"
                    " the same filter"
                )
            states = states[self._wanted.states.index(JobState(named)) :]
        first = None if after == named and self._wanted.states else after
        return [(states[0], first), *((state, None) for state in states[1:])]

    def __iter__(self) -> Iterator[list[JobInfo]]:
        for number, (state, cursor) in enumerate(self._cursors):
            while True:
                limit = MOST_LISTED if self._left is None else min(self._left, MOST_LISTED)
                page = self._admin.list_jobs(
                    state,
                    queue=self._wanted.queue,
                    kind=self._wanted.kind,
                    tag=self._wanted.tag,
                    ids=self._wanted.ids or None,
                    limit=limit,
                    after=cursor,
                )
                cursor = page.after
                if self._left is not None:
                    self._left -= len(page.jobs)
                    if self._left == 0:
                        following = self._cursors[number + 1 :]
                        self.after = cursor or (following[0][0] if following else None)
                if page.jobs:
                    yield page.jobs
                if self._left == 0:
                    return
                if cursor is None:
                    break
