"""One worker process: starts its threads, stops them in order, owns its signals.

Shutdown, in this order: no new claims; what has not started is released; handlers get the grace time; what they came to
is recorded; the heartbeat stops last, so that nobody takes this runtime for dead meanwhile.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Self

import psycopg

from awa._core import Attempt, Crew, Handler, Outcomes
from awa.config import Settings
from awa.errors import AwaError, ConfigError, DeadlineExceeded, ShutdownTimeout
from awa.job import Outcome
from awa.registry import Registry
from awa.storage.migrate import check_schema
from awa.storage.pool import connect
from awa.storage.schema import Schema
from awa.storage.trust import check_origin, check_same_server
from awa.worker.attempt import Attempts
from awa.worker.claimer import Claimer
from awa.worker.heartbeat import Heartbeat
from awa.worker.identity import Identity
from awa.worker.known import KnownClaims
from awa.worker.maintenance.deadlines import Deadlines
from awa.worker.maintenance.loop import Maintenance
from awa.worker.maintenance.promote import Promote
from awa.worker.maintenance.rescue import Rescue
from awa.worker.maintenance.retention import Retention
from awa.worker.maintenance.ring import Ring
from awa.worker.maintenance.summarize import Summarize
from awa.worker.requests import Requests
from awa.worker.service import Service, first_line
from awa.worker.watch import Watch

log = logging.getLogger("awa.worker")

Hook = Callable[[], object]

LEAVE_TIMEOUT = 2.0
"""Seconds to wait for a claim of this runtime that is still under way when everything else has ended."""

FLUSH_OUT_OF_TURN = 0.02
"""Seconds that an outcome may wait while other jobs wait for a thread; with nothing to do it is recorded sooner."""


def make_handlers(registry: Registry) -> dict[str, Handler]:
    """One handler per kind, aliases included.

    Raises:
        ConfigError: There is no task.
    """
    handlers = {}
    for kind in registry.kinds:
        task = registry.get(kind)
        handlers[kind] = Handler(kind, task.func, task.codec.load, is_typed=task.is_typed, options=task.options)
    if not handlers:
        raise ConfigError("no task is declared: decorate a function with @client.task() in the module that is loaded")
    return handlers


class Worker:
    """Runs jobs in threads of this process, between :meth:`start` and :meth:`stop`, or as a context manager.

    Args:
        find_conninfo: Gives the database, when the worker starts.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        settings: Settings,
        find_conninfo: Callable[[], str],
        version: str,
        on_start: Sequence[Hook] = (),
        on_stop: Sequence[Hook] = (),
    ) -> None:
        self._registry = registry
        self._settings = settings
        self._find_conninfo = find_conninfo
        self._version = version
        self._on_start = on_start
        self._on_stop = on_stop
        self._threads: list[threading.Thread] = []  # guarded by _replace_lock, where one that ended would look dead
        self._replace_lock = threading.Lock()
        self._services: list[Service] = []
        self._stop_lock = threading.Lock()
        self._is_started = False
        self._is_stopping = False  # guarded by _stop_lock
        self._left_running: list[int] = []  # written before _has_stopped is set
        self._stopper = 0  # guarded by _stop_lock
        self._has_stopped = threading.Event()
        self._asked = threading.Event()
        self._fatal: Exception | None = None
        self._signals = 0
        self._conninfo = ""
        self._schema = Schema(settings.schema)
        self._outcomes = Outcomes()
        self._identity: Identity
        self._claimer: Claimer
        self._crew: Crew

    @property
    def runtime(self) -> int:
        """The number of this worker in ``awa.runtime_instances``; 0 before it has started."""
        return self._identity() if self._is_started else 0

    @property
    def running(self) -> list[int]:
        """The jobs whose handlers run now."""
        return [attempt.id for attempt in self._crew.running if attempt is not None] if self._is_started else []

    def start(self) -> None:
        """Run the start hooks, register, and begin to claim; returns at once.

        Raises:
            ConfigError: No task is declared, or the worker was started before.
            DatabaseNotFound: No server answers.
            SchemaNotMigrated, SchemaTooNew: The schema and this program do not fit.
            StorageNotTrusted: The schema's rows belong to another cluster, and claims would miss jobs.
        """
        if self._is_started:
            raise ConfigError("this worker was started before: make a new one")
        settings = self._settings
        handlers = make_handlers(self._registry)
        self._conninfo = self._find_conninfo()
        with connect(self._conninfo, name="start") as connection:
            check_schema(connection, self._schema)
            check_origin(connection, self._schema)
            if settings.listen_url:
                check_same_server(connection, settings.listen_url)
        for hook in self._on_start:  # before anything exists that would have to be undone
            hook()
        self._identity = Identity(self._conninfo, self._schema, settings, self._version, handlers)
        self._identity.register()
        self._build(handlers)
        for service in self._services:
            service.start()
        for index in range(settings.threads):
            thread = threading.Thread(target=self._crew.work, args=(index,), name=f"awa-{index + 1}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._crew.start()
        self._is_started = True
        log.info(
            "worker %d runs %s with %d threads, kinds %s",
            self._identity(),
            ", ".join(str(spec) for spec in settings.queues),
            settings.threads,
            ", ".join(sorted(handlers)),
        )

    def _build(self, handlers: Mapping[str, Handler]) -> None:
        settings, conninfo, schema, identity = self._settings, self._conninfo, self._schema, self._identity
        attempts = Attempts(schema, self._outcomes)
        listening = settings.listen_url or conninfo
        claimer = Claimer(
            conninfo=listening,
            schema=schema,
            queues=settings.queues,
            handlers=handlers,
            outcomes=self._outcomes,
            threads=settings.threads,
            poll_interval=settings.poll_interval,
            notify=settings.notify,
            identity=identity,
            on_gone=identity.register,
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
        self._services = [
            Heartbeat(
                conninfo=conninfo,
                schema=schema,
                interval=settings.heartbeat,
                identity=identity,
                outcomes=self._outcomes,
                known=self._known,
                requests=Requests(self._crew, schema),
                on_gone=claimer.gone,
            ),
            Maintenance(
                conninfo=listening,
                schema=schema,
                heartbeat=settings.heartbeat,
                identity=identity,
                chores=[
                    Promote(schema),
                    Rescue(schema, heartbeat=settings.heartbeat, stale_after=settings.stale_after),
                    Deadlines(schema, heartbeat=settings.heartbeat, stale_after=settings.stale_after),
                    Ring(schema, retention=settings.completed_retention, rotate_after=settings.rotate_after),
                    Retention(schema, failed=settings.failed_retention, dead=settings.dead_retention),
                    Summarize(schema),
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
        ]

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

    def stop(self, timeout: float | None = None) -> None:
        """Stop in good order. Safe from any thread but a handler's, and twice: the second call waits for the first.

        Args:
            timeout: Seconds that running handlers get; None: the setting ``shutdown_timeout``.

        Raises:
            ShutdownTimeout: Handlers outlived it. Their attempts are rescued once this process is gone.
            ConfigError: A handler calls this; it would wait for itself.
        """
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
            if self._claimer.has_something_to_record:
                self._claimer.flush()
            alive[0].join(0.02)
            released += self._release()  # a claim that was under way
        released += self._release()
        left = self.running
        is_recorded = self._record(max(until - time.monotonic(), 2.0))
        for service in reversed(self._services):  # the heartbeat last
            service.stop(5.0)
        # One that does not say goodbye is rescued: whatever is open, or may be, is taken back.
        if is_recorded and not left and not self._outcomes.open_claims():
            self._leave()
        for hook in self._on_stop:
            try:
                hook()
            except Exception:
                log.exception("a stop hook failed")
        self._claimer.close()
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
            with connect(self._conninfo, name="leave") as connection:
                until = time.monotonic() + LEAVE_TIMEOUT
                while not self._known.leave(connection, self._identity()):
                    if time.monotonic() > until:
                        log.warning("could not say goodbye: something still claims for runtime %d", self._identity())
                        return
                    time.sleep(0.02)
        except (psycopg.Error, AwaError) as error:
            log.warning("could not say goodbye: %s", first_line(error))

    def run(self) -> None:
        """Start, wait for SIGTERM or SIGINT, stop. In the main thread only.

        A second signal leaves the process at once, with the exit code that shells give for it.

        Raises:
            ShutdownTimeout: Handlers outlived the grace time.
            StorageNotTrusted: The queue's rows come from another cluster.
            AwaError: A thread of the worker died.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("run() owns the process's signals, so it needs the main thread: use start() and stop()")
        previous = {
            number: signal.signal(number, self._on_signal)
            for number in (getattr(signal, name, None) for name in ("SIGTERM", "SIGINT"))
            if number is not None
        }
        try:
            self.start()
            while not self._asked.wait(1.0):  # a signal that another thread got runs its handler here, on waking
                self._look_for_the_dead()
            try:
                self.stop()
            except ShutdownTimeout:
                if self._fatal is None:
                    raise
            if self._fatal is not None:
                raise self._fatal
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _look_for_the_dead(self) -> None:
        """A thread that died takes the worker along: half a worker would look alive."""
        with self._replace_lock:
            names = [thread.name for thread in self._threads if not thread.is_alive()]
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
            os._exit(128 + number)
        self._asked.set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
