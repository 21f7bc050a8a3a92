"""What operators do: looking at jobs and queues; retrying, reprioritising and moving jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from psycopg import Connection

from awa import options
from awa.errors import ValidationError
from awa.job import JobState
from awa.storage import control, listing, queues
from awa.storage.connection import repeated
from awa.storage.control import Controlled
from awa.storage.listing import JobPage, Position
from awa.storage.queues import Count
from awa.storage.schema import Schema
from awa.storage.snapshot import one_snapshot

__all__ = ["MOST_LISTED", "Admin", "Count", "JobPage"]

MOST_LISTED = 1_000
"""Most jobs of a page."""


class Admin:
    """What operators look at and do; see ``client.admin``.

    Looking reads by index, whatever is stored, and holds up neither workers nor producers.
    """

    def __init__(self, schema: Schema, connection: Callable[[], AbstractContextManager[Connection]]) -> None:
        self._schema = schema
        self._connection = connection

    def list_jobs(
        self,
        state: JobState | str | None = None,
        *,
        queue: str | None = None,
        kind: str | None = None,
        tag: str | None = None,
        ids: Iterable[int] | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> JobPage:
        """A page of the jobs in one state, newest first; or of all jobs, state by state.

        Newest is what was last inserted (``scheduled``, ``retryable``, ``waiting_external``), became available, was
        claimed (``running``, ``completed``) or ended (``failed``, ``cancelled``). While pages of a state are read no
        job is shown twice, and every one that is in the state throughout is shown. A job whose worker was told to take
        it but has not started it is ``running`` too.

        All jobs come in the order of running, available, scheduled, retryable, waiting_external, failed, cancelled,
        completed. A page is of one moment; one that changes its state between two pages may be shown in both states,
        or in neither.

        The last attempt's ``claimed_at`` is told of running and completed jobs; the history has its runtime and
        elapsed_ms for the others. :meth:`awa.Client.get` finds more.

        Args:
            state: A :class:`awa.JobState`, or its name; None: all states.
            queue, kind, tag: Only of this queue, of this kind, with this tag; None: of all.
            ids: Only these, 1 to 1000; None: all. Ids of which there is no job are passed over.
            limit: Most jobs to return, 1 to 1000. A page ends early once 10,000 jobs were looked at.
            after: ``after`` of the page before, with the same state and filters; None: the first page.

        Raises:
            ValidationError: An argument cannot be meant; nothing was sent.
        """
        states = listing.ORDER if state is None else (_check_state(state),)
        if queue is not None:
            queue = options.check_queue(queue)
        if kind is not None:
            kind = options.check_kind(kind)
        if tag is not None:
            tag = options.check_tag(tag)
        some = None if ids is None else options.check_job_ids(ids, MOST_LISTED)
        limit = options.check_limit(limit, MOST_LISTED)
        position = None if after is None else _check_after(after, None if state is None else states[0])
        with self._connection() as conn, one_snapshot(conn, self._schema) as look:
            return listing.list_jobs(
                look, states, queue=queue, kind=kind, tag=tag, ids=some, limit=limit, position=position
            )

    def queue_counts(self, queue: str | None = None) -> dict[str, dict[JobState, Count]]:
        """How many jobs each queue has in each state: ``queue_counts()["email"]["available"].value``.

        All counts are of one moment. Up to 100,000 they are exact. Beyond, most are estimates from the rows on 4,000
        random pages of a table (completed jobs: from 1,000 pages of claims), and never below 100,001: of a queue that
        fills the table mostly within 10 %, of one with a fiftieth of it within 25 %. So the work is bounded: some
        tenths of a second for each queue and state that has as many.

        Args:
            queue: Only this one; its counts are zero when it has no jobs. None: every queue that has jobs.

        Raises:
            ValidationError: *queue* can be no queue's name; nothing was sent.
        """
        if queue is not None:
            queue = options.check_queue(queue)
        with self._connection() as conn, one_snapshot(conn, self._schema) as look:
            return queues.count_jobs(look, queue)

    def retry(self, job_id: int) -> Controlled:
        """Make a job available again, as :meth:`awa.Client.retry` does."""
        job_id = options.check_job_id(job_id)
        with self._connection() as conn:
            return repeated(lambda: control.retry_job(conn, self._schema, job_id))

    def set_priority(self, job_id: int, priority: int) -> Controlled:
        """Give a job that waits or is available another priority: 1, which runs first, to 4.

        One that is available comes last there.

        Returns:
            What happened: ``reprioritised``; ``nothing`` when it had it before; ``refused`` when it is running or has
            ended. And its state.

        Raises:
            JobNotFound: There is none, or its history is gone.
            JobBusy: Somebody held it for a second; nothing was changed, try again.
            ValidationError: *job_id* or *priority* can be none; nothing was sent.
        """
        job_id, priority = options.check_job_id(job_id), options.check_priority(priority)
        with self._connection() as conn:
            return repeated(lambda: control.set_priority(conn, self._schema, job_id, priority))

    def move(self, job_id: int, queue: str) -> Controlled:
        """Move a job that waits or is available to the end of *queue*.

        Returns:
            What happened: ``moved``; ``nothing`` when it was there already; ``refused`` when it is running or has
            ended. And its state.

        Raises:
            JobNotFound: There is none, or its history is gone.
            JobBusy: Somebody held it for a second; nothing was changed, try again.
            ValidationError: *job_id* or *queue* can be none; nothing was sent.
        """
        job_id, queue = options.check_job_id(job_id), options.check_queue(queue)
        with self._connection() as conn:
            return repeated(lambda: control.move_job(conn, self._schema, job_id, queue))


def _check_state(state: object) -> JobState:
    names = ", ".join(JobState)
    if not isinstance(state, str) or state not in list(JobState):
        shown = ascii(state) if isinstance(state, str) and len(state) <= 60 else f"a {type(state).__name__}"
        raise ValidationError(f"state must be one of {names}, got {shown}", path="state", value=state, limit=names)
    return JobState(state)


def _check_after(after: object, state: JobState | None) -> Position:
    position = Position.read(after) if isinstance(after, str) else None
    if position is None or (state is not None and position.state != state):
        shown = ascii(after) if isinstance(after, str) and len(after) <= 60 else f"a {type(after).__name__}"
        raise ValidationError(
            f"after must be what a page of {state or 'all'} jobs had as its after, got {shown}: begin with None",
            path="after",
            value=after,
        )
    return position
