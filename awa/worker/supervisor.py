"""One worker process: starts its threads, stops them in order, owns its signals.

Shutdown, in this order: no new claims; what has not started is released; handlers get the grace time; what they came to
is recorded; the heartbeat stops last, so that nobody takes this runtime for dead meanwhile.

A fork has none of these threads. In the child the worker is over: nothing of it may claim, record, or take a signal.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import psycopg

from awa._core import Attempt, Crew, Handler, Outcomes
from awa.config import Settings
from awa.errors import AwaError, ConfigError, DeadlineExceeded, ShutdownTimeout
from awa.job import Outcome
from awa.registry import Registry, TaskOptions
from awa.storage.connection import connect
from awa.storage.grants import check_worker, explaining
from awa.storage.migrate import check_schema
from awa.storage.schema import Schema
from awa.storage.trust import check_origin, check_same_server
from awa.worker.attempt import Attempts
from awa.worker.catalogue import Catalogue
from awa.worker.claimer import Claimer
from awa.worker.heartbeat import Heartbeat
from awa.worker.identity import Identity
from awa.worker.known import KnownClaims
from awa.worker.maintenance.deadlines import Deadlines
from awa.worker.maintenance.dependents import Dependents
from awa.worker.maintenance.descriptors import Descriptors
from awa.worker.maintenance.expire import Expire
from awa.worker.maintenance.keys import Keys
from awa.worker.maintenance.loop import Maintenance
from awa.worker.maintenance.promote import Promote
from awa.worker.maintenance.rescue import Rescue
from awa.worker.maintenance.retention import Retention
from awa.worker.maintenance.ring import Ring
from awa.worker.maintenance.statistics import Statistics
from awa.worker.maintenance.summarize import Summarize
from awa.worker.report import Report, Snapshot
from awa.worker.requests import Requests
from awa.worker.service import Service, first_line
from awa.worker.vitals import Health
from awa.worker.watch import Watch

if TYPE_CHECKING:
    from awa.worker.health import HealthServer

log = logging.getLogger("awa.worker")

Hook = Callable[[], object]

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Handler or hook -> what is called in its place."""

LEAVE_TIMEOUT = 2.0
"""Seconds to wait for a claim of this runtime that is still under way when everything else has ended."""

FLUSH_OUT_OF_TURN = 0.02
"""Seconds that an outcome may wait while other jobs wait for a thread; with nothing to do it is recorded sooner."""


def make_handlers(
    registry: Registry, max_result_bytes: int = 256 * 1024, wrap: Wrap = lambda function: function
) -> dict[str, Handler]:
    """One handler per kind, aliases included.

    Args:
        max_result_bytes: Most bytes of a result that is kept.
        wrap: Applied to each function once, here and not for every job.

    Raises:
        ConfigError: There is no task.
    """
    handlers = {}
    for kind in registry.kinds:
        task = registry.get(kind)
        dump = _limited(task.dump_result, max_result_bytes)
        handlers[kind] = Handler(
            kind, wrap(task.func), task.codec.load, is_typed=task.is_typed, dump_result=dump, options=task.options
        )
    if not handlers:
        raise ConfigError("no task is declared: decorate a function with @client.task() in the module that is loaded")
    return handlers


def _limited(dump: Callable[[Any, int], bytes] | None, most: int) -> Callable[[object], bytes] | None:
    return None if dump is None else lambda value: dump(value, most)


class Worker:
    """Runs jobs in threads of this process, between :meth:`start` and :meth:`stop`, or as a context manager.

    Args:
        find_conninfo: Gives the database, when the worker starts.
        lend: Borrows a connection for a handler's own transaction.
        queue: Where jobs of a task wait that does not say it.
        wrap: Gives what is called for a handler or a hook.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        settings: Settings,
        find_conninfo: Callable[[], str],
        version: str,
        lend: Callable[[], contextlib.AbstractContextManager[psycopg.Connection[Any]]],
        on_start: Sequence[Hook] = (),
        on_stop: Sequence[Hook] = (),
        queue: str | None = None,
        wrap: Wrap = lambda function: function,
    ) -> None:
        self._wrap = wrap
        self._registry = registry
        self._queue = queue
        self._settings = settings
        self._find_conninfo = find_conninfo
        self._version = version
        self._lend = lend
        self._on_start = on_start
        self._on_stop = on_stop
        self._threads: list[threading.Thread] = []  # guarded by _replace_lock, where one that ended would look dead
        self._replace_lock = threading.Lock()
        self._services: list[Service] = []
        self._stop_lock = threading.Lock()
        self._is_started = False
        self._pid = os.getpid()  # where it was started
        self._is_stopping = False  # guarded by _stop_lock
        self._left_running: list[int] = []  # written before _has_stopped is set
        self._is_recorded = True  # written before _has_stopped is set
        self._stopper = 0  # guarded by _stop_lock
        self._has_stopped = threading.Event()
        self._asked = threading.Event()
        self._fatal: Exception | None = None
        self._signals = 0
        self._previous: dict[int, Any] = {}  # signal -> what run() found there
        self._conninfo = ""
        self._schema = Schema(settings.schema)
        self._outcomes = Outcomes()
        self._identity: Identity
        self._claimer: Claimer
        self._crew: Crew
        self._heartbeat: Heartbeat
        self._report: Report
        self._health: HealthServer | None = None

    @property
    def runtime(self) -> int:
        """The number of this worker in ``awa.runtime_instances``; 0 before it has started, and in a forked child."""
        return self._identity() if self._is_started and not self._is_inherited else 0

    @property
    def running(self) -> list[int]:
        """The jobs whose handlers run now, in this process."""
        if not self._is_started or self._is_inherited:
            return []
        return [attempt.id for attempt in self._crew.running if attempt is not None]

    @property
    def has_stragglers(self) -> bool:
        """Whether handlers have outlived the stop, or the time of their attempt: their threads cannot be ended."""
        return bool(self._left_running) or (self._is_started and bool(self._crew.abandoned))

    @property
    def _is_inherited(self) -> bool:
        """Whether it was started in a process of which this one is a fork."""
        return self._is_started and self._pid != os.getpid()

    def start(self) -> None:
        """Run the start hooks, register, and begin to claim; returns at once.

        A process that ends while its worker runs stops it first, as :meth:`stop` does.

        Raises:
            ConfigError: No task is declared, a queue or a kind is that this worker has nothing to do with, the worker
                was started before, here or in the process that forked, or nobody can listen at ``health_addr``.
            DatabaseNotFound: No server answers.
            PermissionDenied: The database role lacks a right.
            SchemaNotMigrated, SchemaTooNew: The schema and this program do not fit.
            StorageNotTrusted: The schema's rows belong to another cluster, and claims would miss jobs.
        """
        if self._is_inherited:
            raise ConfigError(
                f"this worker was started in process {self._pid}, of which this one is a fork, and runs there:"
                " make a new one here with client.worker()"
            )
        if self._is_started:
            raise ConfigError("this worker was started before: make a new one")
        self._pid = os.getpid()
        handlers = make_handlers(self._registry, self._settings.max_args_bytes, self._wrap)
        catalogue = Catalogue(
            self._registry,
            self._schema,
            served=[spec.name for spec in self._settings.queues],
            elsewhere=self._named_queues(handlers),
        )
        if self._settings.health_addr:
            from awa.worker.health import HealthServer  # http.server costs as much as all the rest

            self._health = HealthServer(self._settings.health_addr, self.health)
            self._health.start()
        try:
            self._start(handlers, catalogue)
        except BaseException:
            self._close_health()
            raise

    def _named_queues(self, handlers: Mapping[str, Handler]) -> set[str]:
        """The queues that tasks name, or have because they name none."""
        options = (one.options or TaskOptions() for one in handlers.values())
        return {queue for queue in (one.queue or self._queue for one in options) if queue is not None}

    def _start(self, handlers: Mapping[str, Handler], catalogue: Catalogue) -> None:
        settings = self._settings
        self._conninfo = self._find_conninfo()
        with connect(self._conninfo, name="start") as connection, explaining(connection, self._schema, "worker"):
            check_schema(connection, self._schema)
            check_worker(connection, self._schema)
            check_origin(connection, self._schema)
            if settings.listen_url:
                check_same_server(connection, settings.listen_url)
        for hook in self._on_start:  # before anything exists that would have to be undone
            self._wrap(hook)()
        self._identity = Identity(self._conninfo, self._schema, settings, self._version, handlers)
        self._identity.register()
        self._report = Report(
            self._conninfo,
            self._schema,
            identity=self._identity,
            declared=self._registry.queues,
            snapshot=self._snapshot,
            tellers=[catalogue.tell],
        )
        self._report.begin()
        self._build(handlers)
        for service in self._services:
            service.start()
        for index in range(settings.threads):
            thread = threading.Thread(target=self._work, args=(index,), name=f"awa-{index + 1}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._is_started = True
        _started.add(self)
        atexit.register(self._at_exit)
        self._crew.start()
        log.info(
            "worker %d runs %s with %d threads, kinds %s",
            self._identity(),
            ", ".join(str(spec) for spec in settings.queues),
            settings.threads,
            ", ".join(sorted(handlers)),
        )
        elsewhere = self._named_queues(handlers) - {spec.name for spec in settings.queues}
        if elsewhere:
            log.info(
                "worker %d leaves to others the queues of some of its tasks: %s; to serve them too, name them (queues)",
                self._identity(),
                ", ".join(sorted(elsewhere)),
            )

    def _build(self, handlers: Mapping[str, Handler]) -> None:
        settings, conninfo, schema, identity = self._settings, self._conninfo, self._schema, self._identity
        attempts = Attempts(schema, self._outcomes, self._lend, notify=settings.notify)
        listening = settings.listen_url or conninfo
        dependents = Dependents(schema)
        claimer = Claimer(
            conninfo=listening,
            schema=schema,
            queues=settings.queues,
            handlers=handlers,
            outcomes=self._outcomes,
            threads=settings.threads,
            poll_interval=settings.poll_interval,
            priority_aging=settings.priority_aging,
            notify=settings.notify,
            identity=identity,
            on_gone=self._register_anew,
            on_fatal=self._give_up,
        )
        self._claimer = claimer
        self._crew = claimer.crew = Crew(
            settings.threads,
            self._outcomes,
            job=attempts.job,
            conclude=attempts.conclude,
            late=attempts.late,
            lead=claimer.lead,
            chosen=Outcome,
            flush_after=FLUSH_OUT_OF_TURN,
        )
        self._crew.poke = claimer.poke
        self._known = KnownClaims(
            schema=schema,
            outcomes=self._outcomes,
            line=lambda: claimer.line_pid,
            is_certain=lambda: claimer.is_certain,
        )
        self._heartbeat = Heartbeat(
            conninfo=conninfo,
            schema=schema,
            interval=settings.heartbeat,
            identity=identity,
            outcomes=self._outcomes,
            known=self._known,
            requests=Requests(self._crew, schema, self._be_quiet),
            on_gone=claimer.gone,
        )
        self._services = [
            self._heartbeat,
            Maintenance(
                conninfo=listening,
                schema=schema,
                heartbeat=settings.heartbeat,
                identity=identity,
                chores=[
                    Promote(schema),
                    Expire(schema),
                    dependents,
                    Rescue(schema, heartbeat=settings.heartbeat, stale_after=settings.stale_after),
                    Deadlines(schema, heartbeat=settings.heartbeat, stale_after=settings.stale_after),
                    Ring(
                        schema,
                        retention=settings.completed_retention,
                        rotate_after=settings.rotate_after,
                        examine=dependents.examine,
                    ),
                    Retention(
                        schema,
                        completed=settings.completed_retention,
                        failed=settings.failed_retention,
                        dead=settings.dead_retention,
                    ),
                    Descriptors(schema, retention=settings.descriptor_retention),
                    Summarize(schema),
                    Keys(schema),
                    Statistics(schema),
                ],
            ),
            Watch(
                self._crew,
                timeout=settings.timeout,
                is_loaded=lambda: self._crew.unstarted > 0 or claimer.has_something_to_record,
                relieve=claimer.relieve,
                replace=self._replace,
                on_fatal=self._give_up,
            ),
            self._report,
        ]

    def _register_anew(self) -> None:
        self._identity.register()
        self._report.hurry()  # what is told of the number that is gone is told of the new one

    def _be_quiet(self, is_quiet: bool) -> None:
        is_news = is_quiet != self._claimer.is_quiet
        self._claimer.be_quiet(is_quiet)
        if is_news:
            self._report.hurry()

    def _snapshot(self) -> Snapshot:
        health = self.health()  # before the counts: what is held when it is quiet is all that it will ever run
        in_flight = {spec.name: self._outcomes.unfinished(spec.name) for spec in self._settings.queues}
        return Snapshot(busy=self._crew.busy(), in_flight=in_flight, health=health)

    def _work(self, index: int) -> None:
        self._crew.work(index)
        self._end_fork()

    def _replace(self, attempt: Attempt, error: DeadlineExceeded) -> None:
        """End *attempt*, whose handler does not end, with *error*, and have another thread in the place of its own."""
        # The new thread does all of it: when none can be started nothing has happened, and the retry policy, which is
        # the user's code, runs where such code runs.
        threading.Thread(target=self._take_over, args=(attempt, error), name="awa-new", daemon=True).start()

    def _take_over(self, attempt: Attempt, error: DeadlineExceeded) -> None:
        with self._replace_lock:
            index = self._crew.abandon(attempt)
            if index is None:
                return  # it has ended after all
            stuck, self._threads[index] = self._threads[index], threading.current_thread()
        self._threads[index].name, stuck.name = stuck.name, f"{stuck.name}-abandoned"
        log.error(
            "job %d %s does not end: its thread is abandoned and replaced; this process has %d such threads now",
            attempt.id,
            attempt.handler.kind,
            len(self._crew.abandoned),
        )
        self._crew.take_over(index, attempt, error)
        self._end_fork()

    def stop(self, timeout: float | None = None) -> None:
        """Stop in good order. Safe from any thread but a handler's, and twice: the second call waits for the first.

        Args:
            timeout: Seconds that running handlers get; None: the setting ``shutdown_timeout``.

        In a process forked from the worker's there is nothing to stop: it only says so in the log.

        Raises:
            ShutdownTimeout: Handlers outlived it. Their attempts are rescued once this process is gone.
            ConfigError: A handler calls this; it would wait for itself.
        """
        if self._is_inherited:
            log.warning(
                "this worker runs in process %d, of which process %d is a fork: not stopped", self._pid, os.getpid()
            )
            return
        if threading.current_thread() in self._threads:
            raise ConfigError("stop() was called by a handler, for which it waits: tell another thread to call it")
        with self._stop_lock:
            is_first = self._is_started and not self._is_stopping
            self._is_stopping = self._is_started
            if is_first:
                self._stopper = threading.get_ident()
        if is_first:
            try:
                self._stop(self._settings.shutdown_timeout if timeout is None else timeout)
            finally:
                self._has_stopped.set()
                _started.discard(self)
                atexit.unregister(self._at_exit)
        elif self._is_started and self._stopper != threading.get_ident():  # not from a stop hook
            self._has_stopped.wait()
        if self._left_running:
            shown = ", ".join(map(str, self._left_running[:20]))
            raise ShutdownTimeout(
                f"{len(self._left_running)} handlers outlived the grace time: jobs {shown}; they will be rescued",
                job_ids=self._left_running,
            )

    def _stop(self, grace: float) -> None:
        self._asked.set()
        until = time.monotonic() + grace
        self._claimer.is_stopping = True
        self._claimer.poke()
        released = self._release()
        while (alive := [thread for thread in self._threads if thread.is_alive()]) and time.monotonic() < until:
            if self._claimer.has_something_to_record or self._claimer.has_bells:
                self._claimer.flush()
            alive[0].join(0.02)
            released += self._release()  # a claim that was under way
        released += self._release()
        left = self.running
        is_recorded = self._is_recorded = self._record(max(until - time.monotonic(), 2.0))
        for service in reversed(self._services):  # the heartbeat last
            service.stop(5.0)
        # One that does not say goodbye is rescued: whatever is open, or may be, is taken back.
        if is_recorded and not left and not self._outcomes.open_claims():
            self._leave()
        for hook in self._on_stop:
            try:
                self._wrap(hook)()
            except Exception:
                log.exception("a stop hook failed")
        self._claimer.close()
        self._close_health()
        log.info(
            "worker %d has stopped; %d jobs released, %d still running, %d threads abandoned",
            self._identity(),
            released,
            len(left),
            len(self._crew.abandoned),
        )
        self._left_running = left

    def _release(self) -> int:
        unstarted = self._crew.drain()
        for attempt in unstarted:
            self._outcomes.add(attempt, "released")
        self._crew.dismiss()  # after the drain, which takes dismissals along
        return len(unstarted)

    def _record(self, seconds: float) -> bool:
        """Keep trying to record what is noted; whether everything is."""
        until = time.monotonic() + seconds
        while not self._claimer.flush():
            if time.monotonic() > until or self._claimer.is_untrusted:
                log.error("not everything could be recorded; what is open will be rescued and run again")
                return False
            time.sleep(0.05)
        return True

    def _leave(self) -> None:
        try:
            with connect(self._conninfo, name="leave", answer_within=2 * LEAVE_TIMEOUT) as connection:
                until = time.monotonic() + LEAVE_TIMEOUT
                while not self._known.leave(connection, self._identity()):
                    if time.monotonic() > until:
                        log.warning("could not say goodbye: something still claims for runtime %d", self._identity())
                        return
                    time.sleep(0.02)
        except (psycopg.Error, AwaError) as error:
            log.warning("could not say goodbye: %s", first_line(error))

    def _at_exit(self) -> None:
        """The interpreter is about to end, and with it, at whatever point they are, the threads of this worker."""
        if self._is_inherited:
            return
        try:
            self.stop()
        except ShutdownTimeout as error:
            log.error("%s", error)
        except KeyboardInterrupt:
            log.error("interrupted: this process ends at once, and what runs will be rescued")

    def run(self, *, on_started: Callable[[], object] | None = None) -> None:
        """Start, wait for SIGTERM or SIGINT, stop. In the main thread only.

        A second signal leaves the process at once, with the exit code that shells give for it.

        Args:
            on_started: Called when the worker claims.

        Raises:
            ShutdownTimeout: Handlers outlived the grace time, or the database was away until it was over.
            StorageNotTrusted: The queue's rows come from another cluster.
            AwaError: A thread of the worker died.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("run() owns the process's signals, so it needs the main thread: use start() and stop()")
        global _owner
        try:
            _owner = self
            for name in ("SIGTERM", "SIGINT"):
                if (number := getattr(signal, name, None)) is not None:
                    self._previous[number] = signal.signal(number, self._on_signal)
            self.start()
            if on_started is not None:
                on_started()
            while not self._asked.wait(1.0):  # a signal that another thread got runs its handler here, on waking
                self._look_for_the_dead()
            try:
                self.stop()
            except ShutdownTimeout:
                if self._fatal is None:
                    raise
            if self._fatal is not None:
                raise self._fatal
            if not self._is_recorded:
                raise ShutdownTimeout(
                    "the database was away until the grace time was over: not everything could be recorded; what is "
                    "open will be rescued and run again",
                    job_ids=(),
                )
        finally:
            self._give_signals_back()
            _owner = None

    def ask_to_stop(self) -> None:
        """Have :meth:`run` stop, from any thread, as the first signal does."""
        self._asked.set()

    def _give_signals_back(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            # None: it was not Python that had set it, and Python cannot set it again
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _after_fork(self) -> None:
        """In a forked child: whichever of the threads forked, it takes up nothing more, and never leads."""
        self._crew.take_lead()
        self._crew.drain()
        self._crew.dismiss()

    def _end_fork(self) -> None:
        if self._is_inherited:
            text = (
                f"process {os.getpid()}, forked by a handler, came back from it: it ends here, since the worker runs in"
            )
            _tell(f"{text} process {self._pid}; end such a process with os._exit()")
            os._exit(1)

    def health(self) -> Health:
        """How this worker is; from any thread, at any time."""
        health = Health(self.runtime)
        if self._fatal is not None:
            health.unhealthy.append("the worker gives up")
        if not self._is_started:
            health.unready.append("the worker has not started")
            return health
        crew, claimer, settings = self._crew, self._claimer, self._settings
        health.is_quiet = claimer.is_quiet
        busy, alive = crew.busy(), settings.threads - len(self._dead_threads())
        health.threads = {"wanted": settings.threads, "alive": alive, "busy": busy, "abandoned": len(crew.abandoned)}
        if self._is_stopping:
            health.unready.append("the worker stops")
        elif alive < settings.threads:
            health.unhealthy.append(f"{settings.threads - alive} worker threads are dead")
        # with every thread in a handler nobody leads; a thread that is free does
        health.note(claimer.vitals.pulse(is_needed=busy < settings.threads and not self._is_stopping))
        for service in self._services:
            health.note(service.vitals.pulse(is_alive=service.is_alive, is_stopping=service.is_stopping))
        beat_at, patience = self._heartbeat.beat_at, 2 * settings.heartbeat
        if self._heartbeat.vitals.failures or beat_at is None or time.monotonic() - beat_at > patience:
            health.unready.append(f"the database took no sign of life within {patience:g} s")
        if claimer.vitals.failures or claimer.vitals.pulse().state == "starting":
            health.unready.append("claims do not succeed")
        if claimer.is_untrusted:
            health.unready.append("the storage is not trusted")
        return health

    def _close_health(self) -> None:
        server, self._health = self._health, None
        if server is not None:
            server.stop()

    def _dead_threads(self) -> list[str]:
        with self._replace_lock:
            return [thread.name for thread in self._threads if not thread.is_alive()]

    def _look_for_the_dead(self) -> None:
        """A thread that died takes the worker along: half a worker would look alive."""
        names = self._dead_threads()
        names += [service.name for service in self._services if not service.is_alive]
        if names and not self._is_stopping:
            self._give_up(AwaError(f"the worker's thread {names[0]} died; see the log above"))

    def _give_up(self, error: Exception) -> None:
        """Ask :meth:`run` to stop and raise *error*."""
        log.critical("this worker gives up: %s", error)
        self._fatal = self._fatal or error
        self._asked.set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            self.leave_now(number)
        self._asked.set()

    def leave_now(self, number: int) -> NoReturn:
        """End this process as signal *number* would; what runs is rescued by another."""
        left = self.running
        shown = f"jobs {', '.join(map(str, left[:20]))} will be rescued" if left else "no job was running"
        _tell(f"leaving at once, as signal {number} asked again; {shown}")
        os._exit(128 + number)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _tell(text: str) -> None:
    """Write a line to stderr where logs cannot be used: who was interrupted, or forked, may be in the middle of one."""
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], 0)[1]:  # whoever reads it may read no more
            os.write(2, f"awa: {text}\n".encode())


# --- forks

_started: weakref.WeakSet[Worker] = weakref.WeakSet()
"""Workers that a fork would inherit."""

_owner: Worker | None = None
"""The one whose ``run()`` has the signals of this process."""


_masks = threading.local()


def _before_fork() -> None:
    """Hold the signals of ``run()`` back from this thread, and so from the child until it can be ended by them.

    One that reached the child before would run the handler that it has of its parent, or none at all: Python forgets
    signals that are pending in a new child.
    """
    if _owner is not None:
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _owner._previous)


def _after_fork_in_parent() -> None:
    before = _masks.__dict__.pop("before", None)
    if before is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _after_fork_in_child() -> None:
    """Signals do what they did before ``run()``, or nobody could end a child of a handler; and no worker goes on."""
    if _owner is not None:
        _owner._give_signals_back()
    for worker in list(_started):
        worker._after_fork()
    _after_fork_in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
