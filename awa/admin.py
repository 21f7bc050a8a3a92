"""What operators do: looking at jobs, queues and workers, acting on jobs, holding queues and workers back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeVar

from psycopg import Connection

from awa import options
from awa.config import load_settings
from awa.errors import ValidationError
from awa.job import JobState
from awa.limits import LIMITS, RateLimit, check_limit_of
from awa.storage import control, details, kinds, listing, queue_control, queues, runtime_control, statistics
from awa.storage.connection import repeated
from awa.storage.control import Controlled
from awa.storage.descriptors import DescriptorInfo, Drift
from awa.storage.details import AttemptInfo, JobDetails, RelatedJob
from awa.storage.kinds import Depth, KindInfo
from awa.storage.listing import JobPage, Position
from awa.storage.queue_control import Purged, QueueInfo
from awa.storage.queues import Count
from awa.storage.runtime_control import RuntimeInfo
from awa.storage.schema import Schema
from awa.storage.snapshot import one_snapshot
from awa.storage.statistics import STEPS, SUBJECTS, Percentiles, Statistics, Step, Subject, Window

if TYPE_CHECKING:
    from awa.doctor import Finding

__all__ = [
    "MOST_LISTED",
    "UNSAID",
    "Admin",
    "AttemptInfo",
    "Count",
    "Depth",
    "DescriptorInfo",
    "Drift",
    "JobDetails",
    "JobPage",
    "KindInfo",
    "Percentiles",
    "Purged",
    "QueueInfo",
    "RelatedJob",
    "RuntimeInfo",
    "Statistics",
    "Unsaid",
    "Window",
]

C = TypeVar("C", bound=str)

MOST_LISTED = 1_000
"""Most jobs of a page."""


class Unsaid(Enum):
    """The argument that was not given, where None means something."""

    UNSAID = "unsaid"

    def __repr__(self) -> str:
        return "UNSAID"


UNSAID: Final = Unsaid.UNSAID
"""Leave it as it is."""


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
            limit: Most jobs to return, 1 to 1000. A page ends early once 2,000 jobs were looked at.
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

    def job_details(self, job_id: int) -> JobDetails:
        """All that is known of a job: what :meth:`awa.Client.get` tells, its attempts, and the jobs around it.

        All of one moment. For one who may read the tables; :meth:`awa.Client.get` needs no such right.

        Raises:
            JobNotFound: There is none, or its history is gone.
            ValidationError: *job_id* can be none; nothing was sent.
        """
        job_id = options.check_job_id(job_id)
        with self._connection() as conn, one_snapshot(conn, self._schema) as look:
            return details.job_details(look, job_id)

    def queue_counts(self, queue: str | None = None) -> dict[str, dict[JobState, Count]]:
        """How many jobs each queue has in each state: ``queue_counts()["email"]["available"].value``.

        All counts are of one moment. Up to 10,000 they are exact, and those of small tables always; completed jobs are
        counted up to 1,000 claims of their queue, each of which took up to a thousand jobs. Beyond, they are estimates
        from 500 pages that lie evenly in a table, which is mostly right within 5 % for a queue that has a tenth of it
        and within 20 % for one with a hundredth. So the work is bounded: some hundredths of a second for all together.

        Args:
            queue: Only this one; its counts are zero when it has no jobs. None: every queue that has jobs.

        Raises:
            ValidationError: *queue* can be no queue's name; nothing was sent.
        """
        if queue is not None:
            queue = options.check_queue(queue)
        with self._connection() as conn, one_snapshot(conn, self._schema) as look:
            return queues.count_jobs(look, queue)

    def kind_counts(self, kind: str | None = None, *, queue: str | None = None) -> dict[str, dict[JobState, Count]]:
        """How many jobs each kind has in each state: ``kind_counts()["send_email"]["available"].value``.

        Counted as :meth:`queue_counts` does, with two differences. No index knows kinds, so an estimate, from 100
        pages, may miss a kind that is rare: where not all jobs of a queue in a state were looked at, no kind's count of
        that state is exact, and about 0 says that no job was met. And completed jobs are counted one by one where the
        queue has up to 10,000 entries, which are its jobs and their earlier attempts; running ones where no more than
        10,000 run in the queues that are asked for.

        Args:
            kind: Only this one; its counts are zero when no job of it was met. None: every kind of which one was.
            queue: Only what this queue has; None: what all have together.

        Raises:
            ValidationError: *kind* can be no kind, or *queue* no queue's name; nothing was sent.
        """
        if kind is not None:
            kind = options.check_kind(kind)
        if queue is not None:
            queue = options.check_queue(queue)
        with self._connection() as conn, one_snapshot(conn, self._schema) as look:
            found, unsure = kinds.count_jobs(look, kind=kind, queue=queue)
        names = found if kind is None else [kind]
        return {name: kinds.summed(found.get(name, {}).values(), unsure) for name in names}

    # --- queues -----------------------------------------------------------------------------------------------------

    def list_queues(self) -> list[QueueInfo]:
        """Every queue that has jobs, of which something was said, that code declares, or that a worker serves; by name.

        All of one moment; counted as :meth:`queue_counts` does.
        """
        with self._connection() as conn, one_snapshot(conn, self._schema) as look:
            return queue_control.list_queues(look)

    def get_queue(self, name: str, *, by_kind: bool = True) -> QueueInfo:
        """One queue: its counts, its limits and where they come from, whether it is paused, how code describes it.

        Args:
            by_kind: Whether to count what it has of each kind, as :meth:`kind_counts` does; that reads as much again.

        Raises:
            QueueNotFound: It has no jobs, nothing was said of it, and no worker serves it.
            ValidationError: *name* can be no queue's name; nothing was sent.
        """
        name = options.check_queue(name, "name")
        with self._connection() as conn, one_snapshot(conn, self._schema) as look:
            return queue_control.get_queue(look, name, by_kind=by_kind)

    def pause_queue(self, name: str, *, by: str | None = None, reason: str | None = None) -> QueueInfo:
        """Have no job of a queue start, at any worker, until it is resumed. It need not have jobs yet.

        Jobs go on being inserted, and running ones end. Once this returns no claim is open that began before it: what
        does not run by then does not start. Pausing again keeps the time and writes *by* and *reason* anew.

        Args:
            by: Who says so, up to 200 characters.
            reason: Why, up to 1,000 characters.

        Raises:
            QueueBusy: It is paused, but a claim that began before has been open for ten seconds. Or somebody else held
                what is said of the queue for two, and nothing was changed; the message tells.
            ValidationError: An argument cannot be stored; nothing was sent.
        """
        name, by, reason = options.check_queue(name, "name"), options.check_by(by), options.check_reason(reason)
        with self._connection() as conn:
            queue_control.pause_queue(conn, self._schema, name, by=by, reason=reason)
        return self.get_queue(name, by_kind=False)

    def resume_queue(self, name: str) -> QueueInfo:
        """Let a queue go on, and wake its workers; nothing happens when it is not paused.

        Raises:
            QueueNotFound: Nothing is known of it.
            QueueBusy: Somebody else held what is said of it for two seconds; nothing was changed.
            ValidationError: *name* can be no queue's name; nothing was sent.
        """
        name = options.check_queue(name, "name")
        with self._connection() as conn:
            queue_control.resume_queue(conn, self._schema, name)
        return self.get_queue(name, by_kind=False)

    def set_limits(
        self,
        name: str,
        *,
        by: str | None = None,
        max_running: int | Unsaid | None = UNSAID,
        rate_limit: RateLimit | Unsaid | None = UNSAID,
        max_running_per_key: int | Unsaid | None = UNSAID,
    ) -> QueueInfo:
        """Set limits of a queue, whatever code declares, from the next claim on; what runs already runs on.

        A limit that is not given stays as it is; None says that there is none.

        Args:
            by: Who says so, up to 200 characters.
            max_running: Most attempts of the queue that are open at once, of all workers.
            rate_limit: How many of its attempts may start in a time.
            max_running_per_key: Most attempts at once of jobs with the same ``concurrency_key``.

        Raises:
            QueueBusy: Claims, or another who says something of the queue, were in the way for a second; nothing was
                changed, try again.
            ValidationError: None is given, or one cannot be meant; nothing was sent.
        """
        name, by = options.check_queue(name, "name"), options.check_by(by)
        given = {"max_running": max_running, "rate_limit": rate_limit, "max_running_per_key": max_running_per_key}
        said: dict[str, int | RateLimit | None] = {
            limit: None if value is None else check_limit_of(limit, value)
            for limit, value in given.items()
            if value is not UNSAID
        }
        if not said:
            text = f"limits are not given: say at least one of {', '.join(LIMITS)}, None for no such limit"
            raise ValidationError(text, path="limits", limit=LIMITS)
        with self._connection() as conn:
            repeated(lambda: queue_control.limit_queue(conn, self._schema, name, said, by=by))
        return self.get_queue(name, by_kind=False)

    def clear_limits(self, name: str, *names: str, by: str | None = None) -> QueueInfo:
        """Take back what :meth:`set_limits` has set: what code declares holds again.

        Args:
            names: Of these limits only; none: of all.
            by: Who says so, up to 200 characters.

        Raises:
            QueueNotFound: Nothing is known of the queue.
            QueueBusy: Claims, or another who says something of the queue, were in the way for a second; nothing was
                changed, try again.
            ValidationError: An argument cannot be meant; nothing was sent.
        """
        name, by = options.check_queue(name, "name"), options.check_by(by)
        for position, limit in enumerate(names):
            if limit not in LIMITS:
                text = f"names[{position}] must be one of {', '.join(LIMITS)}, got {_shown(limit)}"
                raise ValidationError(text, path=f"names[{position}]", value=limit, limit=LIMITS)
        with self._connection() as conn:
            repeated(lambda: queue_control.limit_queue(conn, self._schema, name, {}, cleared=names or LIMITS, by=by))
        return self.get_queue(name, by_kind=False)

    def count_waiting(self, name: str) -> int:
        """How many jobs of a queue :meth:`cancel_waiting` would cancel now: all that are neither running nor ended.

        Counted one by one, which takes a second or two for a million.

        Raises:
            ValidationError: *name* can be no queue's name; nothing was sent.
        """
        name = options.check_queue(name, "name")
        with self._connection() as conn, one_snapshot(conn, self._schema) as look:
            return queue_control.count_waiting(look, name)

    def cancel_waiting(self, name: str, *, reason: str | None = None) -> int:
        """Cancel every job of a queue that is neither running nor ended; returns how many.

        In steps of up to 500 jobs, each a transaction, with all that follows (follow-ups, unique keys). Jobs that are
        inserted meanwhile stay, and so do running ones. Workers go on beside it, unless the queue is paused.

        Args:
            reason: Why, for the jobs' histories, up to 1,000 characters.

        Raises:
            QueueBusy: Some jobs, or the queue, were held by others for five seconds; ``.done`` jobs were cancelled.
            ValidationError: An argument cannot be meant; nothing was sent.
        """
        name, reason = options.check_queue(name, "name"), options.check_reason(reason)
        with self._connection() as conn:
            return queue_control.cancel_waiting(conn, self._schema, name, reason=reason)

    def purge_queue(self, name: str) -> Purged:
        """Delete every job of a queue that is neither running nor completed, with its history; returns how many.

        In steps of up to 500 jobs, each a transaction. Nothing runs because of it; who waits for the result of one gets
        :class:`awa.JobNotFound`, and jobs that run after one treat it as failed. Jobs that are inserted meanwhile stay.
        Completed jobs stay until their retention is over.

        Raises:
            QueueBusy: Some jobs, or the queue, were held by others for five seconds; ``.done`` jobs were deleted.
            ValidationError: *name* can be no queue's name; nothing was sent.
        """
        name = options.check_queue(name, "name")
        with self._connection() as conn:
            return queue_control.purge_queue(conn, self._schema, name)

    # --- kinds ------------------------------------------------------------------------------------------------------

    def list_kinds(self) -> list[KindInfo]:
        """Every kind that has jobs or has had attempts today, that code describes, or that a live worker handles.

        By name, all of one moment, counted as :meth:`kind_counts` does. A kind that is rare among very many jobs may be
        missing, if nothing else tells of it: neither code, nor a worker, nor an attempt in the last 24 hours.
        """
        with self._connection() as conn, one_snapshot(conn, self._schema) as look:
            return kinds.list_kinds(look)

    def get_kind(self, name: str) -> KindInfo:
        """One kind: its jobs by state and by queue, how code describes it, and how many workers handle it.

        Raises:
            KindNotFound: It is none that :meth:`list_kinds` would have.
            ValidationError: *name* can be no kind; nothing was sent.
        """
        name = options.check_kind(name, "name")
        with self._connection() as conn, one_snapshot(conn, self._schema) as look:
            return kinds.get_kind(look, name)

    # --- statistics -------------------------------------------------------------------------------------------------

    def statistics(self, by: Subject = "queue", *, name: str | None = None) -> list[Statistics]:
        """How many attempts ended how, and how long they waited and ran, in the last 15 minutes, hour and 24 hours.

        A leading worker gathers that every few seconds; ``until`` of a window tells how far it has come. What was
        never claimed, as a job that is cancelled while it waits, is not in it.

        Args:
            by: For each ``queue``, or for each ``kind``; in the order of their names.
            name: Only of this one, which may have had no attempts; None: of all that had some.

        Raises:
            ValidationError: An argument cannot be meant; nothing was sent.
        """
        by = _check_choice(by, SUBJECTS, "by")
        if name is not None:
            name = options.check_queue(name, "name")
        with self._connection() as conn, one_snapshot(conn, self._schema) as look:
            return statistics.read_windows(look, by, name)

    def statistics_history(
        self, by: Subject, name: str, *, step: Step = "hour", since: datetime | None = None
    ) -> list[Window]:
        """The same step by step, oldest first, as a chart wants it: also the steps without attempts, and the present.

        Args:
            by: Whether *name* is a ``queue`` or a ``kind``.
            step: ``minute``, which is kept for three hours, or ``hour``, kept for 30 days; as UTC has them.
            since: From the step with this time on; None: all that is kept.

        Raises:
            ValidationError: An argument cannot be meant; nothing was sent.
        """
        by, step = _check_choice(by, SUBJECTS, "by"), _check_choice(step, STEPS, "step")
        name = options.check_queue(name, "name")
        since = None if since is None else options.check_run_at(since, "since")
        with self._connection() as conn, one_snapshot(conn, self._schema) as look:
            return statistics.read_history(look, by, name, step=step, since=since)

    # --- jobs -------------------------------------------------------------------------------------------------------

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

    # --- the installation -------------------------------------------------------------------------------------------

    def doctor(self, *, listen_url: str | None = None) -> list[Finding]:
        """What is wrong with the installation, each with what mends it, and what is well; see docs/doctor.md.

        It takes some tenths of a second, twenty at most, and holds up nobody. The notification that it sends itself
        goes over a second connection.

        Args:
            listen_url: The database's address past a pooler, where workers listen; None: AWA_LISTEN_URL.

        Raises:
            ConfigError: *listen_url* is no database's address.
            psycopg.OperationalError: The database is away.
        """
        from awa.doctor import examine  # with all that it looks at, which few programs need

        address = load_settings({"listen_url": listen_url, "schema": self._schema.name}).listen_url
        with self._connection() as conn:
            return examine(conn, self._schema, listen_url=address)

    # --- runtimes ---------------------------------------------------------------------------------------------------

    def list_runtimes(self, *, include_ended: bool = False) -> list[RuntimeInfo]:
        """Every worker process that has not ended, by number: one that lives, is silent, or is being taken back.

        What it says of ``busy``, ``in_flight`` and ``health`` it told at ``snapshot_at``, within the last ten seconds.

        Args:
            include_ended: The last hundred that have ended too.

        Raises:
            ValidationError: *include_ended* is no bool; nothing was sent.
        """
        include_ended = options.check_flag(include_ended, "include_ended")
        with self._connection() as conn:
            return runtime_control.list_runtimes(conn, self._schema, include_ended=include_ended)

    def get_runtime(self, runtime_id: int) -> RuntimeInfo:
        """One worker process.

        Raises:
            RuntimeNotFound: None has that number, or it ended longer ago than jobs are kept.
            ValidationError: *runtime_id* can be no number; nothing was sent.
        """
        runtime_id = options.check_runtime(runtime_id)
        with self._connection() as conn:
            return runtime_control.get_runtime(conn, self._schema, runtime_id)

    def quiet_runtime(self, runtime_id: int, *, by: str | None = None) -> RuntimeInfo:
        """Have a worker process claim nothing more until it is resumed, or ends. It need not be alive just now.

        Returns when the order stands; the worker hears it within a second. What runs there ends as it would; what it
        has claimed and not started is released, so that others take it at once. It goes on to lead and to give signs of
        life, and ``is_drained`` says when nothing runs any more. Asking again keeps the time and writes *by* anew.

        Args:
            by: Who says so, up to 200 characters.

        Raises:
            RuntimeNotFound: None has that number, or it has ended or was taken for dead.
            RuntimeTooOld: Its awa does not hear such an order; nothing was changed.
            ValidationError: An argument cannot be meant; nothing was sent.
        """
        runtime_id, by = options.check_runtime(runtime_id), options.check_by(by)
        with self._connection() as conn:
            return runtime_control.order_quiet(conn, self._schema, runtime_id, is_quiet=True, by=by)

    def resume_runtime(self, runtime_id: int) -> RuntimeInfo:
        """Let a worker process claim again; it hears it within a second. Nothing happens when it is not quiet.

        Raises:
            RuntimeNotFound: None has that number, or it has ended or was taken for dead.
            ValidationError: *runtime_id* can be no number; nothing was sent.
        """
        runtime_id = options.check_runtime(runtime_id)
        with self._connection() as conn:
            return runtime_control.order_quiet(conn, self._schema, runtime_id, is_quiet=False)


def _check_state(state: object) -> JobState:
    names = ", ".join(JobState)
    if not isinstance(state, str) or state not in list(JobState):
        raise ValidationError(
            f"state must be one of {names}, got {_shown(state)}", path="state", value=state, limit=names
        )
    return JobState(state)


def _check_choice(value: C, choices: tuple[C, ...], path: str) -> C:
    if not isinstance(value, str) or value not in choices:
        raise ValidationError(
            f"{path} must be {' or '.join(choices)}, got {_shown(value)}", path=path, value=value, limit=choices
        )
    return value


def _check_after(after: object, state: JobState | None) -> Position:
    position = Position.read(after) if isinstance(after, str) else None
    if position is None or (state is not None and position.state != state):
        raise ValidationError(
            f"after must be what a page of {state or 'all'} jobs had as its after, got {_shown(after)}:"
            " begin with None",
            path="after",
            value=after,
        )
    return position


def _shown(value: object) -> str:
    return ascii(value) if isinstance(value, str) and len(value) <= 60 else f"a {type(value).__name__}"
