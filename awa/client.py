"""The client: what an application holds. It declares tasks, inserts jobs, and makes workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Unpack

from psycopg import Connection

from awa import options
from awa.config import Settings, find_database, load_settings
from awa.descriptors import FIELDS, Descriptor
from awa.errors import ConfigError, JobFailed, ResultNotKept
from awa.insert import Defaults, Inserted, Options, Parents, Producer, override
from awa.job import JobId, JobState, as_seconds
from awa.lent import AsyncLent, Lent
from awa.limits import Limits, RateLimit
from awa.registry import KeyOption, Registry, Task, TaskOptions, check_hook
from awa.retry import RetryPolicy
from awa.storage import control, jobs
from awa.storage.connection import repeated
from awa.storage.control import Controlled
from awa.storage.jobs import JobInfo
from awa.storage.pool import Pool
from awa.storage.pooler import declare_as
from awa.storage.results import Results
from awa.storage.schema import Schema
from awa.unique import Unique, check_key
from awa.version import VERSION

if TYPE_CHECKING:
    from awa.admin import Admin
    from awa.worker.supervisor import Worker

P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H", bound=Callable[[], object])

_OPTIONS = tuple(Options.__annotations__)  # in the order in which insert lists them
_NO_OPTIONS = (None,) * len(_OPTIONS)


class Client:
    """Opens nothing until it is used; then it finds its database, see :func:`awa.config.find_database`.

    Args:
        database: A libpq connection string or URL; None: AWA_DATABASE_URL, DATABASE_URL, PG*, or the private server.
        schema: The schema that holds awa's tables; None: AWA_SCHEMA, or ``awa``.
        queue: Where jobs wait when neither the insert nor the task says.
        priority: 1, which runs first, to 4.
        max_attempts: 1 to 1000.
        notify: Whether inserts wake an idle worker; None: AWA_NOTIFY, or on. Off for users of two-phase commit.
        pooler: ``on`` or ``off``: whether the database's address is a transaction pooler's; None: AWA_POOLER, or
            ``auto``, which looks.
        max_args_bytes: Most bytes of a job's args, and of its metadata; None: AWA_MAX_ARGS_BYTES, or 256 KiB.
        pool_size: Most connections that inserts share, and most that :meth:`connection` and ``job.transaction()`` lend
            at once beside them, 1 to 1000.
        tasks_of: Another client: whatever is declared for either of the two is declared for both.

    Raises:
        ConfigError: A setting cannot work.
    """

    def __init__(
        self,
        database: str | None = None,
        *,
        schema: str | None = None,
        queue: str = "default",
        priority: int = 2,
        max_attempts: int = 25,
        notify: bool | None = None,
        pooler: str | None = None,
        max_args_bytes: int | None = None,
        pool_size: int = 10,
        tasks_of: Client | None = None,
    ) -> None:
        if database is not None and not isinstance(database, str):
            raise ConfigError(
                f"database must be a libpq connection string or URL, or None to look for it, got {database!r}"
            )
        if tasks_of is not None and not isinstance(tasks_of, Client):
            raise ConfigError(f"tasks_of must be an awa.Client, got {tasks_of!r}")
        self._database = database
        self._arguments = {"schema": schema, "notify": notify, "pooler": pooler, "max_args_bytes": max_args_bytes}
        settings = self._settings()
        self._schema = Schema(settings.schema)
        self._notify = settings.notify
        self._pooler = settings.pooler
        self._defaults = Defaults(
            queue=options.declared(options.check_queue, queue),
            priority=options.declared(options.check_priority, priority),
            max_attempts=options.declared(options.check_max_attempts, max_attempts),
            max_args_bytes=settings.max_args_bytes,
        )
        self._pool = Pool(self._conninfo, size=options.declared(options.check_pool_size, pool_size))
        # Of its own: borrowers keep theirs, and what they insert or look at meanwhile must not wait for each other.
        self._lending = Pool(self._conninfo, size=pool_size, kept=0)
        self._listening = Pool(self._conninfo, size=1, kept=0)
        self._results = Results(self._schema, self._own, self._listening.own)
        self._on_start: list[Callable[[], object]] = [] if tasks_of is None else tasks_of._on_start
        self._on_stop: list[Callable[[], object]] = [] if tasks_of is None else tasks_of._on_stop
        self.registry: Registry = Registry() if tasks_of is None else tasks_of.registry
        """The tasks that were declared."""
        self._producer = Producer(self.registry, self._defaults, self._schema, self._notify, self._own)

    @property
    def said(self) -> frozenset[str]:
        """The settings, and ``database``, that code gave to this client; neither flags nor environment change them."""
        said = {name for name, value in self._arguments.items() if value is not None}
        return frozenset(said if self._database is None else said | {"database"})

    # --- declaring --------------------------------------------------------------------------------------------------

    def task(
        self,
        bare: None = None,
        /,
        *,
        kind: str | None = None,
        aliases: Iterable[str] = (),
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        timeout: float | timedelta | None = None,
        retry: RetryPolicy | None = None,
        retry_on: type[BaseException] | Sequence[type[BaseException]] | None = None,
        fail_on: type[BaseException] | Sequence[type[BaseException]] | None = None,
        unique: Unique | None = None,
        keep_result: bool = False,
        concurrency_key: KeyOption | None = None,
        ordering_key: KeyOption | None = None,
    ) -> Callable[[Callable[P, R]], Task[P, R]]:
        """Declare the function below as the handler of a kind of jobs. It stays callable as itself.

        A function with one parameter annotated ``awa.Job[SendEmail]`` gets the job; any other function gets the args
        as its parameters, and reaches its job with ``awa.current_job()``.

        Args:
            kind: Name of its jobs; else derived from the type of the args, or the function's name.
            aliases: Older kinds that it handles too.
            queue, priority, max_attempts: For its jobs, unless an insert says otherwise.
            timeout: Seconds that an attempt may take, at most 24 days; 0 for no limit.
            retry: Attempt number -> seconds until the next; see ``awa.exponential``, ``awa.linear``, ``awa.fixed``.
            retry_on: When given, only these exceptions are retried.
            fail_on: These exceptions fail the job at once.
            unique: What makes its jobs equal, of which there is one at most; an insert may say otherwise.
            keep_result: Keep what the handler returns, for :meth:`result`; a value that is no JSON, or longer than
                ``max_args_bytes``, fails the job.
            concurrency_key: What its jobs share, of which a queue runs ``max_running_per_key`` at once: text, or a
                function that gives it, or None, from a job's args; an insert may say otherwise. The function gets the
                args as the handler's type; of a plain function, those that it names.
            ordering_key: Likewise what its jobs share, of which a queue runs one after the other.

        Raises:
            ConfigError: The function cannot be a handler, or an option cannot work.
            DuplicateKind: Another function handles the kind.
        """
        if bare is not None:
            raise ConfigError("task takes its options by name: write @client.task() with parentheses")
        said = TaskOptions.declare(
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            timeout=timeout,
            retry=retry,
            retry_on=retry_on,
            fail_on=fail_on,
            unique=unique,
            keep_result=keep_result,
            concurrency_key=concurrency_key,
            ordering_key=ordering_key,
        )

        def declare(func: Callable[P, R]) -> Task[P, R]:
            task = Task(func, kind=kind, aliases=aliases, options=said)
            self.registry.add(task)
            return task

        return declare

    def queue(
        self,
        name: str,
        *,
        max_running: int | None = None,
        rate_limit: RateLimit | None = None,
        max_running_per_key: int | None = None,
        display_name: str | None = None,
        description: str | None = None,
        owner: str | None = None,
        docs_url: str | None = None,
        tags: Iterable[str] = (),
        extra: Any = None,
    ) -> None:
        """Declare a queue: its limits, which hold for all workers together, and what operators are shown of it.

        A worker stores the declarations as it starts, so the worker that starts last decides. What an operator sets
        (``client.admin.set_limits``) goes before the limits. Without limits: the queue has none. To declare it again
        before a worker starts replaces all of it. A worker does not start when it neither serves a declared queue nor
        has a task that names it.

        Args:
            name: The queue.
            max_running: Most attempts of it that are open at once.
            rate_limit: How many of its attempts may start in a time.
            max_running_per_key: Most attempts at once of jobs with the same ``concurrency_key``.
            display_name: What people call it, up to 200 characters.
            description: What it is for, up to 2,000 characters.
            owner: Who answers for it, up to 200 characters.
            docs_url: Where more is written, up to 2,048 characters.
            tags: Up to 20, of up to 200 characters each.
            extra: Whatever else there is to say: any JSON value, up to 64 KiB.

        Raises:
            ConfigError: One of them cannot work.
        """
        said = {"max_running": max_running, "rate_limit": rate_limit, "max_running_per_key": max_running_per_key}
        descriptor = _descriptor(display_name, description, owner, docs_url, tags, extra)
        limits = options.declared(lambda given: Limits(**given), said)
        self.registry.add_queue(options.declared(options.check_queue, name), limits, descriptor)

    def job_kind(
        self,
        kind: str | type | Task[..., Any],
        *,
        display_name: str | None = None,
        description: str | None = None,
        owner: str | None = None,
        docs_url: str | None = None,
        tags: Iterable[str] = (),
        extra: Any = None,
    ) -> None:
        """Describe a kind of jobs to operators. To do it again before a worker starts replaces all of it.

        A worker stores it as it starts, and does not start when no task handles the kind.

        Args:
            kind: Its name, its task, or the type of its args.
            display_name, description, owner, docs_url, tags, extra: As for :meth:`queue`.

        Raises:
            ConfigError: One of them cannot be stored, or *kind* can be none.
        """
        self.registry.describe_kind(kind, _descriptor(display_name, description, owner, docs_url, tags, extra))

    def on_worker_start(self, hook: H) -> H:
        """Have every worker call *hook* before its first claim; what it raises keeps the worker from starting.

        Raises:
            ConfigError: It is no function.
        """
        self._on_start.append(check_hook(hook, "on_worker_start"))
        return hook

    def on_worker_stop(self, hook: H) -> H:
        """Have every worker call *hook* after its last job; what it raises is logged.

        Raises:
            ConfigError: It is no function.
        """
        self._on_stop.append(check_hook(hook, "on_worker_stop"))
        return hook

    # --- inserting --------------------------------------------------------------------------------------------------

    def insert(
        self,
        args: Any,
        *,
        kind: str | None = None,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        timeout: float | timedelta | None = None,
        run_at: datetime | None = None,
        delay: float | timedelta | None = None,
        tags: Iterable[str] | None = None,
        metadata: dict[str, Any] | None = None,
        concurrency_key: str | None = None,
        ordering_key: str | None = None,
        expires_at: datetime | None = None,
        unique: Unique | Literal[False] | None = None,
        after: Parents | None = None,
        after_failed: str | None = None,
        on_completed: Any = None,
        on_failed: Any = None,
        on_cancelled: Any = None,
        conn: Lent | None = None,
    ) -> Inserted:
        """Write one job.

        Args:
            args: An instance of a task's args type, ``task.bind(...)``, a NewJob, or a mapping together with *kind*.
            kind, ..., on_cancelled: Options of the job, each as :class:`awa.NewJob` describes it.
            conn: Whose transaction the job joins: a connection or cursor of psycopg or psycopg2, a Session or
                Connection of SQLAlchemy, or Django's connection. It is never committed or rolled back here. None
                writes and commits at once.

        Raises:
            ValidationError: Args or an option cannot be stored; nothing was sent.
            ConfigError: Nothing says which kind it is, or *conn* cannot be lent.
            UniqueConflict: An equal job exists, and *unique* says to raise; the transaction of *conn* stays usable.
            JobNotFound: There is no such job as *after* names, or its history is gone; nothing was inserted.
        """
        given = (
            kind, queue, priority, max_attempts, timeout, run_at, delay, tags, metadata,
            concurrency_key, ordering_key, expires_at, unique,
            after, after_failed, on_completed, on_failed, on_cancelled,
        )  # fmt: skip
        item = args if given == _NO_OPTIONS else override(args, dict(zip(_OPTIONS, given, strict=True)))
        job_id, is_new = self._producer.insert(item, conn)
        return Inserted(job_id, is_new, self)

    def insert_many(self, items: Iterable[Any], *, conn: Lent | None = None) -> list[Inserted]:
        """Write a batch in one statement, all or nothing; the results come in the order of *items*.

        Args:
            items: Args, or NewJob where options are needed.
            conn: As for :meth:`insert`.

        Raises:
            ValidationError: An item cannot be stored, and ``.path`` says which; or *items* are not several.
            ConfigError: Nothing says which kind one is.
            UniqueConflict: An equal job exists, and an item says to raise; the transaction of *conn* stays usable.
            JobNotFound: An item runs after a job that does not exist; nothing was inserted.
        """
        return [Inserted(job_id, is_new, self) for job_id, is_new in self._producer.insert_many(items, conn)]

    def insert_many_copy(self, items: Iterable[Any], *, conn: Lent | None = None) -> int:
        """Write many jobs by COPY, all or nothing; returns how many. The fastest way in, and it takes an iterator.

        The jobs are available at once and have nothing to do with others: ``run_at``, ``delay``, ``unique``, ``after``
        and follow-ups are refused. An item that is refused leaves the transaction of *conn* as it was before the call.

        Raises:
            ValidationError: As for :meth:`insert_many`.
            ConfigError: As for :meth:`insert_many`.
        """
        return self._producer.insert_many_copy(items, conn)

    async def insert_async(self, args: Any, *, conn: AsyncLent | None = None, **given: Unpack[Options]) -> Inserted:
        """Write one job from asynchronous code.

        Args:
            args: As for :meth:`insert`.
            conn: A ``psycopg.AsyncConnection`` or its cursor, whose transaction the job joins. None writes and commits
                at once, in a thread; cancelled meanwhile, the job may have been written or not.
            given: The options of :meth:`insert`.

        Raises:
            ValidationError: As for :meth:`insert`.
            ConfigError: As for :meth:`insert`; or *conn* is no asynchronous connection of psycopg's.
        """
        item = override(args, given) if given else args
        job_id, is_new = await self._producer.insert_async(item, conn)
        return Inserted(job_id, is_new, self)

    async def insert_many_async(self, items: Iterable[Any], *, conn: AsyncLent | None = None) -> list[Inserted]:
        """Write a batch in one statement, as :meth:`insert_many` does, from asynchronous code.

        Args:
            items: As for :meth:`insert_many`.
            conn: As for :meth:`insert_async`.

        Raises:
            ValidationError: As for :meth:`insert_many`.
            ConfigError: As for :meth:`insert_async`.
        """
        written = await self._producer.insert_many_async(items, conn)
        return [Inserted(job_id, is_new, self) for job_id, is_new in written]

    async def insert_many_copy_async(self, items: Iterable[Any], *, conn: AsyncLent | None = None) -> int:
        """Write many jobs by COPY, as :meth:`insert_many_copy` does, from asynchronous code.

        Args:
            items: An iterable that does not wait. It is walked through in the loop's thread, without *conn* in another.
            conn: As for :meth:`insert_async`.

        Raises:
            ValidationError: As for :meth:`insert_many`.
            ConfigError: As for :meth:`insert_async`.
        """
        return await self._producer.insert_many_copy_async(items, conn)

    # --- looking ----------------------------------------------------------------------------------------------------

    def get(self, job_id: int) -> JobInfo:
        """The job as the database knows it.

        Raises:
            JobNotFound: There is none, or its history is gone.
            ValidationError: *job_id* can be no job's id.
        """
        job_id = options.check_job_id(job_id)
        with self._own() as conn:
            return jobs.get_job(conn, self._schema, JobId(job_id))

    def result(self, job_id: int, timeout: float | timedelta | None = None) -> Any:
        """What the job's handler returned, as JSON gives it, once the job has ended.

        Its task says ``keep_result=True``. Any number of threads wait over one connection of their own. The transaction
        of the insert must have committed.

        Args:
            timeout: Most seconds to wait; None: as long as it takes.

        Raises:
            JobFailed: The job failed or was cancelled.
            ResultNotKept: It completed, and its task keeps no results.
            TimeoutError: It has not ended within *timeout* seconds.
            JobNotFound: There is no such job, or its history is gone.
            ValidationError: *job_id* can be no job's id, or *timeout* no time.
        """
        job_id = options.check_job_id(job_id)
        ended = self._results.wait(job_id, None if timeout is None else as_seconds(timeout, "timeout"))
        if ended.state != JobState.COMPLETED:
            error = ended.error if isinstance(ended.error, dict) else None
            why = "" if error is None else f": {error.get('type')}: {error.get('text')}"
            raise JobFailed(f"job {job_id} is {ended.state}{why}", job_id=job_id, state=ended.state, error=error)
        if not ended.is_kept:
            raise ResultNotKept(
                f"job {job_id} completed and nothing of it was kept: declare its task with keep_result=True for the "
                "workers that run it",
                job_id=job_id,
            )
        return ended.result

    @property
    def admin(self) -> Admin:
        """For operators: looking at jobs and queues; acting on a job; pausing, limiting and clearing a queue."""
        from awa.admin import Admin

        return Admin(self._schema, self._own)

    # --- controlling ------------------------------------------------------------------------------------------------

    def cancel(self, job_id: int, *, reason: str | None = None, force: bool = False) -> Controlled:
        """Cancel a job: at once when it is not running, else by telling its handler, or by *force*.

        The handler's ``job.cancelled`` becomes true within a second. Whatever the attempt then comes to, except a
        success, cancels the job without a retry. *force* ends the attempt in the database at once: the handler is told
        too, and what it comes to is refused.

        Args:
            reason: Why, for whoever looks at the job later; at most 1,000 characters.
            force: End a running attempt at once.

        Returns:
            What happened: ``cancelled``, ``requested``, or ``nothing`` when the job had ended; and its state now.

        Raises:
            JobNotFound: There is none, or its history is gone.
            JobBusy: Somebody held the job for a second; nothing was changed, try again.
            ValidationError: *job_id* can be no job's id, *reason* cannot be stored, or *force* is no bool.
        """
        job_id, reason = options.check_job_id(job_id), options.check_reason(reason)
        force = options.check_flag(force, "force")
        with self._own() as conn:
            return repeated(lambda: control.cancel_job(conn, self._schema, job_id, reason=reason, force=force))

    def cancel_by_unique_key(self, key: bytes, *, reason: str | None = None, force: bool = False) -> Controlled:
        """Cancel the job that holds a unique key, as :meth:`cancel` does.

        Args:
            key: 16 bytes, as :func:`awa.unique_key` gives them.

        Raises:
            JobNotFound: No job holds it.
            JobBusy: As for :meth:`cancel`.
            ValidationError: *key* is no key, *reason* cannot be stored, or *force* is no bool.
        """
        key, reason = check_key(key), options.check_reason(reason)
        force = options.check_flag(force, "force")
        with self._own() as conn:
            return repeated(lambda: control.cancel_holder(conn, self._schema, key, reason=reason, force=force))

    def retry(self, job_id: int) -> Controlled:
        """Make a job available, with all its attempts before it, that has failed, was cancelled or waits for its time.

        It keeps its id and its history, and comes last in its queue. An ended job takes its unique key again, and does
        not expire any more. Follow-ups are inserted again when it ends again; jobs that were cancelled because of it
        stay cancelled.

        Returns:
            What happened: ``retried``; ``nothing`` when it is available already, or set aside until it can run;
            ``refused`` when it is running, has completed, or waits for something else than a time. And its state now.

        Raises:
            UniqueConflict: Another job holds its unique key, ``.existing_id``; nothing was changed.
            JobNotFound: There is none, or its history is gone.
            JobBusy: Somebody held the job, or its key, for a second; nothing was changed, try again.
            ValidationError: *job_id* can be no job's id.
        """
        job_id = options.check_job_id(job_id)
        with self._own() as conn:
            return repeated(lambda: control.retry_job(conn, self._schema, job_id))

    # --- working ----------------------------------------------------------------------------------------------------

    def worker(
        self,
        *,
        queues: Iterable[str] | str | None = None,
        threads: int | None = None,
        poll_interval: float | timedelta | None = None,
        priority_aging: float | timedelta | None = None,
        heartbeat: float | timedelta | None = None,
        stale_after: float | timedelta | None = None,
        timeout: float | timedelta | None = None,
        shutdown_timeout: float | timedelta | None = None,
        completed_retention: float | timedelta | None = None,
        failed_retention: float | timedelta | None = None,
        dead_retention: float | timedelta | None = None,
        descriptor_retention: float | timedelta | None = None,
        rotate_after: float | timedelta | None = None,
        listen_url: str | None = None,
        health_addr: str | None = None,
        flags: dict[str, object] | None = None,
    ) -> Worker:
        """A worker for the tasks declared so far; a context manager, or call its ``start`` and ``stop``.

        Args:
            queues: ``NAME``, ``NAME:MAX``, or ``NAME:min=N,weight=N,max=N`` with any of the three; None: AWA_QUEUES, or
                ``default``.
            threads: Handlers that run at once; None: AWA_THREADS, or 10.
            poll_interval, ..., rotate_after: Seconds, each as :class:`awa.Settings` describes it.
            listen_url: The database's address past a transaction pooler; None: AWA_LISTEN_URL, or none.
            health_addr: Where it answers ``/healthz`` and ``/readyz``, ``HOST:PORT`` or ``:PORT``; None:
                AWA_HEALTH_ADDR, or nowhere.
            flags: Settings that came from a command line; an argument here goes before them.

        Raises:
            ConfigError: A setting cannot work.
        """
        from awa.worker.supervisor import Worker

        arguments = self._arguments | {
            "queues": queues,
            "threads": threads,
            "poll_interval": poll_interval,
            "priority_aging": priority_aging,
            "heartbeat": heartbeat,
            "stale_after": stale_after,
            "timeout": timeout,
            "shutdown_timeout": shutdown_timeout,
            "completed_retention": completed_retention,
            "failed_retention": failed_retention,
            "dead_retention": dead_retention,
            "descriptor_retention": descriptor_retention,
            "rotate_after": rotate_after,
            "listen_url": listen_url,
            "health_addr": health_addr,
        }
        return Worker(
            registry=self.registry,
            settings=self._settings(arguments, flags),
            find_conninfo=self._conninfo,
            version=VERSION,
            lend=self.connection,
            on_start=tuple(self._on_start),
            on_stop=tuple(self._on_stop),
            queue=self._defaults.queue,
            wrap=self._wrap,
        )

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Borrow a pooled connection in autocommit mode, for handlers; use ``with conn.transaction():`` on it."""
        with self._lending.connection() as conn:
            yield conn

    def close(self) -> None:
        """Close the pooled connections. The client opens them again when it is used again."""
        self._pool.close()
        self._lending.close()
        self._listening.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _settings(self, arguments: dict[str, Any] | None = None, flags: dict[str, object] | None = None) -> Settings:
        given = self._arguments if arguments is None else arguments
        return load_settings({k: v for k, v in given.items() if v is not None}, flags=flags)

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """What a worker calls for *function*, a handler or a hook; a client of a framework has more to do here."""
        return function

    def _conninfo(self) -> str:
        found = find_database(self._database)
        if found is not None:
            declare_as(found.conninfo, self._pooler)
            return found.conninfo
        # the private server's code is loaded only when it is needed, and works on fewer platforms
        from awa.embedded import find_or_start_database

        return find_or_start_database(self._database).conninfo

    @contextmanager
    def _own(self) -> Iterator[Connection]:
        """A pooled connection for the library's own statements."""
        with self._pool.own() as conn:
            yield conn


def _descriptor(
    display_name: str | None,
    description: str | None,
    owner: str | None,
    docs_url: str | None,
    tags: Iterable[str],
    extra: Any,
) -> Descriptor:
    given = (display_name, description, owner, docs_url, tags, extra)
    return options.declared(lambda said: Descriptor(**said), dict(zip(FIELDS, given, strict=True)))
