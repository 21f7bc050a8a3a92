"""Leading: one thread at a time settles what has ended, claims what comes next, and waits when there is nothing.

Whichever worker thread holds the LEAD token runs :meth:`Claimer.lead`. Only the leader touches the claim connection.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import psycopg

from awa._core import Attempt, Crew, Flush, Handler, Outcomes
from awa.config import QueueSpec
from awa.errors import AwaError, RuntimeGone, StorageNotTrusted
from awa.storage import backends, pooler, recovery
from awa.storage.backends import Backend
from awa.storage.line import HELP, Line, Reply, Wanted, reply_timeout, statements
from awa.storage.schema import Schema
from awa.storage.trust import connect_trusted
from awa.worker.bell import FIRST_POLL, PACE, Bell
from awa.worker.closed import ClosedQueues
from awa.worker.frozen import HeldQueues
from awa.worker.service import PATIENCE, first_line
from awa.worker.shares import Load, Shares
from awa.worker.vitals import Vitals
from awa.worker.wake import Wake

log = logging.getLogger("awa.worker")

MAX_BATCH = 1000
"""Most attempts of one claim."""

WORK_AHEAD = 0.075
"""Seconds of work, by the measured run time, that a process claims ahead."""

KEPT_BACK = 3
"""Of this many attempts that wait for a thread, one is left when somebody leads again; and one for each thread."""

WORTH_CLAIMING = 2
"""A claim is for at least one in so many of what may wait for a thread, unless none does: each has its price.

Together they took a fifth of the transactions off jobs of 20 ms, and eleven processes ran a twentieth more of those
among which was a kind that ten of them did not know.
"""

FLUSH_AFTER = 0.004
"""Seconds after which an outcome is recorded even when nothing is to be claimed."""

SLOW = 0.005
"""Mean seconds of a job above which a thread that runs one counts as taken."""

PASSING = frozenset({"55P03", "40001", "40P01"})
"""SQLSTATEs of a claim or a flush that met somebody else's short lock: try again."""

FETCH_PAUSE = 5.0
"""Seconds until a job whose long args could not be fetched is claimed again."""

BUSY_DOUBLINGS = 3
"""How often the pause doubles after which a queue that others claim from is asked again, from FIRST_POLL on.

Eleven processes at one queue asked thirty times for each claim that they had, and spent a third of their work on that.
"""

HELD_PAUSE = 0.05
"""Seconds between claims from a queue that another has held for seconds."""

SURVIVES_AFTER = 1.0
"""Seconds that a job which may have killed its last process runs before this one claims anything beside it."""

STOPPING_REPLY = 10.0
"""Seconds after which a server that does not answer counts as lost by a worker that stops."""

BACKOFF_CAP = 1.0
"""Most seconds between two tries when claiming fails: so soon a worker is back when the database is."""

RETRY_PAUSE = 0.1
"""Seconds before a refused flush is sent again, such as the question about a transaction that is still open."""


class Claimer:
    """Settles and claims for one worker process.

    Args:
        identity: Gives the number of this runtime; it changes when the process was taken for dead and registers anew.
        on_gone: Called when this runtime turns out to be gone; registers anew.
        on_fatal: Called with what no waiting mends; asks the worker to stop.
    """

    def __init__(
        self,
        *,
        conninfo: str,
        schema: Schema,
        queues: Sequence[QueueSpec],
        handlers: Mapping[str, Handler],
        outcomes: Outcomes,
        threads: int,
        poll_interval: float,
        priority_aging: float,
        notify: bool,
        identity: Callable[[], int],
        on_gone: Callable[[], None],
        on_fatal: Callable[[Exception], None],
    ) -> None:
        self._conninfo = conninfo
        self._schema = schema
        self._queues = list(queues)
        self._names = frozenset(spec.name for spec in queues)
        self._handlers = handlers
        self._outcomes = outcomes
        self._threads = threads
        self._identity = identity
        self._on_gone = on_gone
        self._on_fatal = on_fatal
        self._notify = notify
        self._bell = Bell(tuple(spec.name for spec in queues), poll_interval=poll_interval, use_bells=notify)
        self._poll_interval = poll_interval
        self._priority_aging = priority_aging
        self._closed = ClosedQueues(poll_interval)
        self._bell.closed = self._closed.states
        shares = Shares(threads, tuple(queues))
        self._shares = None if shares.are_even else shares
        self._held = HeldQueues(conninfo, schema)
        self._line: Line | None = None
        self._is_in_doubt = False
        self._is_claiming = False
        self._busy_claims = 0  # in a row that found a queue taken by another claimer, and brought nothing
        self._alone: Attempt | None = None  # it may kill this process, and has not survived yet
        self._lost: Backend | None = None
        self._is_called = False
        self._pending: list[Flush] = []
        self._not_before: dict[int, float] = {}  # number of a refused flush -> when to send it again
        self._failures = 0
        self.vitals = Vitals("claimer", patience=PATIENCE)
        self._last_claim = 0.0
        self._last_full = False
        self._wake = Wake()
        self._has_given_up = False
        self._gone = 0  # the runtime that was taken for dead, as the heartbeat says
        self._untrusted: StorageNotTrusted | None = None  # why nothing may be sent any more
        self.crew: Crew
        self.is_stopping = False
        self.is_quiet = False
        """Somebody asked this process to claim nothing."""

    def poke(self) -> None:
        """Wake the leader, from any thread or signal handler."""
        self._wake.ring()

    def gone(self, runtime: int) -> None:
        """*runtime* was taken for dead: tell its handlers, and have the leader register anew at once."""
        self._cancel(runtime)
        self._gone = runtime
        self._is_called = True
        self._wake.ring()

    def be_quiet(self, is_quiet: bool) -> None:
        """Claim nothing more, and release what has not started; or claim again. Any thread may say it, again and again.

        The flag is set before anything is looked at. Whoever leads looks at it before each claim, and before and after
        what that brought is handed out; while nobody leads it is done here. So nothing that is claimed, or is about to
        be, is overlooked.
        """
        if is_quiet != self.is_quiet:
            self.is_quiet = is_quiet
            log.info("somebody asked this worker to %s", "claim nothing more" if is_quiet else "claim again")
            self._is_called = True
            self._wake.ring()
        if is_quiet and not self.is_stopping:
            self._empty()

    def lead(self) -> None:
        """Do one leader's term: returns when there is something to run, or nobody claims any more."""
        attempts: list[Attempt] = []
        while not self.is_stopping:
            try:
                attempts = self._term()
                self._failures = 0
                break
            except RuntimeGone as error:
                log.warning("%s", error)
                self._forget()
                self._try(self._on_gone)
            except StorageNotTrusted as error:
                self._distrust(error)
                self._wake.sleep(1.0)
            except Exception as error:
                self._failures += 1
                delay = min(0.05 * 2 ** min(self._failures, 7), BACKOFF_CAP) * random.uniform(0.5, 1.0)
                self.vitals.fail(error, delay)
                self._tell(error, delay)
                self._wake.sleep(delay)
        if self.is_stopping or self.is_quiet:
            for attempt in attempts:
                self._outcomes.add(attempt, "released")
            attempts = []
        if self.is_stopping:
            self._leave_bells()
            self.crew.rest()
            return
        # Many at once: somebody comes back for more while the last of them run.
        total = self.crew.unstarted + len(attempts)
        left = max(total // KEPT_BACK, self._threads) if total >= 2 * self._threads else 0
        self.crew.refill(attempts, max(len(attempts) - left, 0))
        if self.is_quiet:  # since a moment ago
            self._empty()

    def _tell(self, error: Exception, delay: float) -> None:
        if not isinstance(error, (psycopg.Error, AwaError)):
            level = logging.ERROR
        else:  # of a long outage, the beginning, and every now and then
            level = logging.WARNING if self._failures < 10 or self._failures % 30 == 0 else logging.DEBUG
        log.log(
            level,
            "claiming failed, again in %.1f s: %s: %s",
            delay,
            type(error).__name__,
            first_line(error),
            exc_info=level == logging.ERROR,
        )

    def _empty(self) -> None:
        """Release what has not started, unless somebody leads, who does it; asks nothing of the database."""
        if self.crew.unstarted > 0 and self.crew.take_lead():
            self._release()
            if self.is_stopping:
                self.crew.rest()
            else:
                self.crew.refill([], 0)  # whoever takes the token records it

    def _release(self) -> int:
        """Note what has not started as released; only by whoever leads. Returns how many those were."""
        unstarted = self.crew.drain()
        for attempt in unstarted:
            self._outcomes.add(attempt, "released")
        return len(unstarted)

    def _patience(self) -> float:
        """Seconds that the server may take to answer; asked while a thread waits for it."""
        return min(STOPPING_REPLY, reply_timeout()) if self.is_stopping else reply_timeout()

    def flush(self) -> bool:
        """Record what has been noted, without claiming; for the shutdown.

        Returns:
            Whether everything is recorded, and no claim may be open that this process does not know.
        """
        if not self.crew.take_lead():
            return False
        try:
            is_recorded = self._record()
            self._leave_bells()
        finally:
            self.crew.rest()
        return is_recorded and not (self._is_in_doubt or self._pending or self._outcomes.count)

    def relieve(self) -> None:
        """Every thread turned out to be busy for longer: release what has not started, record what has ended."""
        if not self.crew.take_lead():
            return
        try:
            if released := self._release():
                log.info("%d jobs that waited behind slow ones are released", released)
            self._record()
        finally:
            if self.is_stopping:
                self.crew.rest()
            else:
                self.crew.refill([], 0)

    @property
    def is_untrusted(self) -> bool:
        """The address leads to rows of another cluster: nothing is claimed or recorded any more."""
        return self._untrusted is not None

    @property
    def has_bells(self) -> bool:
        """Whether producers ring for this process."""
        return bool(self._bell.armed)

    @property
    def has_something_to_record(self) -> bool:
        """Whether outcomes wait to be recorded."""
        return bool(self._outcomes.count or self._pending)

    @property
    def line_pid(self) -> int | None:
        """The server's process of the connection that claims; None when there is none, or the server does not tell."""
        line = self._line
        return line.backend.pid if line is not None and line.backend is not None else None

    @property
    def is_certain(self) -> bool:
        """Whether every claim that this process has made is known to it: no answer is on its way, none was lost."""
        return not (self._is_claiming or self._is_in_doubt)

    def _record(self) -> bool:
        try:
            flushes = self._due(must_flush=True)
            self._exchange(flushes, ())
            self._call_for({queue for flush in flushes for queue in flush.queues})
        except RuntimeGone:
            self._forget()
        except StorageNotTrusted as error:
            self._distrust(error)
            return False
        except (psycopg.Error, AwaError) as error:
            log.warning("recording failed: %s", first_line(error))
            return False
        except Exception:
            log.exception("recording failed")
            return False
        return True

    def close(self) -> None:
        """Close the connection and the wake-up socket."""
        if self._line is not None:
            self._line.close()
            self._line = None
        self._wake.close()

    def _distrust(self, error: StorageNotTrusted) -> None:
        if not self._has_given_up:
            self._has_given_up = True
            self._on_fatal(error)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
        except StorageNotTrusted as error:
            self._untrusted = error
            self._distrust(error)
        except Exception as error:
            log.warning("registering anew failed: %s: %s", type(error).__name__, first_line(error))
            self._wake.sleep(0.5)

    def _term(self) -> list[Attempt]:
        bell = self._bell
        arm = False
        asked: set[str] = set()  # queues, since the last rest
        open_at = 0.0  # when to ask the open queues; those that are closed have times of their own
        while not self.is_stopping:
            if self._gone == self._identity():  # a claim would tell too, but none may be wanted
                raise RuntimeGone(f"runtime {self._gone} is gone: this process registers anew", runtime=self._gone)
            if self.is_quiet:
                self._release()
                self._leave_bells()
            if bell.is_hot and not self._last_full:
                self._wake.sleep(self._last_claim + PACE - time.monotonic())
            self._held.end_frozen()
            flushes = self._due()
            if flushes and self._closed.has_full:
                for flush in flushes:
                    self._closed.ended(flush.queues)
            asks_open = time.monotonic() >= open_at
            wanted = self._wanted(arm, asked, asks_open=asks_open)
            self.vitals.begin()
            reply = self._exchange(flushes, wanted)
            self.vitals.succeed(self._poll_interval)
            if wanted or self.is_quiet:
                self.vitals.recover()
            now = self._last_claim = time.monotonic()
            attempts = self._isolated(reply)
            if self.is_quiet:
                self._call_for({queue for flush in flushes for queue in flush.queues})
            self._leave_closed()
            bell.arrived(len(attempts), now)
            if attempts:
                self._busy_claims = 0
                self._settle_bells(len(attempts))
                return attempts
            if self.crew.unstarted > 0:
                return []  # others have work; the token waits behind it
            asked.update(want.queue for want in wanted)
            if wanted and any(
                spec.name not in asked and self._is_worth_asking(spec, now, asks_open) for spec in self._queues
            ):
                continue  # fewer free threads than queues: ask the others before resting
            asked.clear()
            if asks_open:
                arm = False
            if any(claimed.come_again for claimed in reply.claims):
                continue
            if any(claimed.is_busy for claimed in reply.claims):
                pause = FIRST_POLL * 2 ** min(self._busy_claims, BUSY_DOUBLINGS)
                self._busy_claims += 1
                self._rest((HELD_PAUSE if self._held.has_one_for_long else pause) * random.uniform(0.5, 1.5))
                continue
            self._busy_claims = 0
            if asks_open:
                wait, arm = bell.next_wait(now)
                open_at = now + wait
            if self._alone is not None:
                # asleep till then, unless it ends before
                open_at, arm = max(self._alone.started + SURVIVES_AFTER, now + FIRST_POLL), False
            if self.is_quiet:  # asleep till it may claim again, or something is to be recorded
                open_at, arm = now + self._poll_interval, False
            until = open_at
            if self._closed.states and self._alone is None and not self.is_quiet:  # else none is asked
                until = min(until, self._closed.next_at(spec.name for spec in self._queues if self._room(spec) > 0))
            if (bell.is_hot and self._outcomes.count) or (until > now and self._rest(until - now)):
                open_at = 0.0
        return []

    def _is_worth_asking(self, spec: QueueSpec, now: float, asks_open: bool) -> bool:
        states = self._closed.states
        if states and not self._closed.may_ask(spec.name, now):
            return False
        return (asks_open or spec.name in states) and self._room(spec) > 0

    def _isolated(self, reply: Reply) -> list[Attempt]:
        """The attempts to start: all that came, or only one that may kill this process, and the others are released.

        Handlers that run already are left alone. When they die with it, each will be claimed alone in its turn.
        """
        attempts = [attempt for claimed in reply.claims for attempt in claimed.attempts]
        alone = next((claimed.attempts[0] for claimed in reply.claims if claimed.is_alone and claimed.attempts), None)
        if alone is None:
            return attempts
        for attempt in [*attempts, *self.crew.drain()]:
            if attempt is not alone:
                self._outcomes.add(attempt, "released")
        self._alone = alone
        return [alone]

    def _is_unsafe(self) -> bool:
        """Whether a job runs, or is about to, that may kill this process."""
        alone = self._alone
        if alone is not None and (
            alone.is_over or (alone.started and time.monotonic() - alone.started >= SURVIVES_AFTER)
        ):
            self._alone = None
        return self._alone is not None

    def _wanted(self, arm: bool, asked: Collection[str], *, asks_open: bool) -> list[Wanted]:
        if self._is_unsafe() or self.is_quiet:
            return []
        crew = self.crew
        free = max(self._threads - crew.busy(), 1)
        ahead = free
        if crew.mean_seconds >= 0:
            ahead = max(free, int(self._threads * WORK_AHEAD / max(crew.mean_seconds, 1e-6)))
        most = min(MAX_BATCH, ahead)
        limit = most - crew.unstarted
        if limit <= 0 or (crew.unstarted and limit < most // WORTH_CLAIMING):
            return []
        if self._closed.states:
            now = time.monotonic()
            able = [spec for spec in self._queues if self._is_worth_asking(spec, now, asks_open)]
        else:
            able = [spec for spec in self._queues if asks_open and self._room(spec) > 0]
        if self._shares is not None:
            among = [spec.name for spec in able if spec.name not in asked]
            parts = self._shares.divide(limit, among, self._loads())
            chosen = [spec for spec in able if spec.name in parts]
        else:
            chosen = able[:limit]
            parts = {spec.name: min(limit // len(chosen), self._room(spec)) for spec in chosen}
        for spec in chosen:  # each is first in its turn
            self._queues.remove(spec)
            self._queues.append(spec)
        without = self._bell.armed, self._closed.states
        return [
            Wanted(spec.name, parts[spec.name], arm and not any(spec.name in bells for bells in without))
            for spec in chosen
        ]

    def _loads(self) -> dict[str, Load]:
        now = time.monotonic()
        running: dict[str, list[float]] = {}
        for attempt in self.crew.running:
            if attempt is not None:
                running.setdefault(attempt.batch.queue, []).append(now - attempt.started)
        outcomes = self._outcomes
        return {
            name: Load(outcomes.unfinished(name), running.get(name, ()), *outcomes.time_spent(name))
            for name in self._names
        }

    def _due(self, *, must_flush: bool = False) -> list[Flush]:
        """The flushes to send now; what was noted becomes one when it has waited for long enough."""
        now = time.monotonic()
        outcomes = self._outcomes
        if outcomes.count and (
            must_flush
            or self._bell.is_hot
            or now - outcomes.oldest >= FLUSH_AFTER
            or self.crew.mean_seconds > FLUSH_AFTER
            or self._closed.has_full
        ):
            self._pending += outcomes.take(self._identity())
        return [flush for flush in self._pending if now >= self._not_before.get(flush.number, 0.0)]

    def _exchange(self, flushes: Sequence[Flush], wanted: Sequence[Wanted]) -> Reply:
        """One round trip; the attempts that it claimed are open, and everything it settled is closed."""
        line = self._connected()
        runtime = self._identity()
        outcomes = self._outcomes
        if not flushes and not wanted:
            return Reply()
        now = time.monotonic()
        opened: list[Attempt] = []
        self._is_claiming = bool(wanted)
        try:
            reply = line.exchange(runtime, flushes, wanted)
            for claimed in reply.claims:
                for batch in claimed.batches:
                    outcomes.opened(batch)
                    opened += batch
            self._note_settled(reply)
            for claimed in reply.claims:
                if claimed.is_armed:
                    self._bell.took(claimed.queue, now)
            self._fetch_long(line, runtime, reply)
        except RuntimeGone:
            raise
        except BaseException:
            # Whatever it was, what the database did is unknown now; finding out begins with a new connection.
            self._lose_line()
            for attempt in opened:  # nobody else knows of them
                if not attempt.is_over:
                    outcomes.add(attempt, "released")
            raise
        finally:
            self._is_claiming = False
        self._last_full = any(
            len(claimed.attempts) >= want.limit for claimed, want in zip(reply.claims, wanted, strict=True)
        )
        self._held.saw(reply.claims)
        for claimed in reply.claims:
            self._closed.saw(claimed, now)
            if self._shares is not None and not (claimed.is_busy or claimed.error is not None):
                self._shares.came(claimed.queue, len(claimed.attempts))
        failed = [claimed for claimed in reply.claims if claimed.error is not None]
        for claimed in failed:
            claimed.is_busy = True
            if claimed.error is not None and claimed.error.sqlstate not in PASSING:
                if not any(other.attempts for other in reply.claims):
                    raise claimed.error
                log.warning("claiming from %s failed: %s", claimed.queue, first_line(claimed.error))
        return reply

    def _fetch_long(self, line: Line, runtime: int, reply: Reply) -> None:
        """Fetch the args that were too long for the claim; jobs whose args cannot be had are put off."""
        long = [attempt for claimed in reply.claims for attempt in claimed.attempts if not attempt.has_args]
        if not long:
            return
        try:
            line.fetch_args(runtime, long)
        except Exception as error:  # whatever it is: these attempts are open already, and must not be forgotten
            log.warning("fetching long args failed: %s: %s", type(error).__name__, first_line(error))
            self._lose_line()
        missing = [attempt for attempt in long if not attempt.has_args]
        for attempt in missing:  # later, so that what can never be fetched is not tried all the time
            self._outcomes.add(attempt, "snoozed", delay=FETCH_PAUSE)
        if missing:
            log.warning("%d jobs whose args did not come are put off for %.0f s", len(missing), FETCH_PAUSE)
            for claimed in reply.claims:
                claimed.attempts = [attempt for attempt in claimed.attempts if attempt.has_args]

    def _note_settled(self, reply: Reply) -> None:
        for settled in reply.settled:
            flush, error = settled.flush, settled.error
            if error is None:
                self._pending.remove(flush)
                self._not_before.pop(flush.number, None)
                self._outcomes.acknowledged(flush)
                # A doubtful end that is refused stands already: the handler's own transaction committed it.
                if settled.stale and not flush.is_doubtful:
                    log.warning(
                        "%d outcomes were refused: others had ended their attempts, or a crash of the server has"
                        " forgotten that they were claimed",
                        len(settled.stale),
                    )
                continue
            again = time.monotonic() + RETRY_PAUSE
            if flush.count > 1 and error.sqlstate not in PASSING:
                log.error("recording %d outcomes failed, each is tried by itself: %s", flush.count, first_line(error))
                self._pending.remove(flush)
                self._not_before.pop(flush.number, None)
                self._pending += self._outcomes.split(flush)
                continue
            if error.sqlstate not in PASSING:
                log.error("recording an outcome failed, it is kept: %s", first_line(error))
                again += 5.0
            self._not_before[flush.number] = again

    def _connected(self) -> Line:
        if self._untrusted is not None:
            raise self._untrusted
        if self._line is None:
            try:
                if self._is_in_doubt:
                    self._resolve_doubt()
                self._line = Line(
                    self._conninfo,
                    self._schema,
                    self._handlers,
                    priority_aging=self._priority_aging,
                    patience=self._patience,
                )
            except StorageNotTrusted as error:
                self._untrusted = error
                raise
            self._is_in_doubt = False
            self._bell.use_bells = self._notify and not self._line.is_pooled
            if self._notify and self._line.is_pooled:
                pooler.tell_once(self._poll_interval)
        return self._line

    def _resolve_doubt(self) -> None:
        """Give back what the lost connection may have claimed without an answer; only when its backend is gone."""
        with connect_trusted(
            self._conninfo, self._schema, name="recovery", answer_within=self._patience()
        ) as connection:
            released: int | None = None
            last = statements(self._schema)
            if self._lost is None or backends.end_backend(connection, self._lost, last=last):
                released = recovery.release_unknown_claims(
                    connection, self._schema, self._identity(), newest=self._outcomes.newest_claim
                )
        if released is None:
            raise psycopg.OperationalError("the lost connection's last transaction has not ended")
        if released:
            log.info("released %d attempts whose claim was answered to nobody", released)

    def _lose_line(self) -> None:
        self._bell.lost()
        self._is_in_doubt = True
        if self._line is not None:
            self._lost = self._line.backend
            self._line.close()
            self._line = None

    def _forget(self) -> None:
        """This runtime is gone: its attempts are somebody else's now."""
        self._cancel(self._identity())
        self.crew.drain()
        self._outcomes.clear()
        self._alone = None
        self._pending.clear()
        self._not_before.clear()

    def _cancel(self, runtime: int) -> None:
        for attempt in self.crew.running:
            if attempt is not None and attempt.batch.runtime == runtime:
                attempt.is_cancelled = True

    def _settle_bells(self, count: int) -> None:
        """With work at hand: give up the bells of queues that pour in, or that no thread is left to answer for."""
        bell = self._bell
        if not bell.armed or self._line is None:
            return
        mean = self.crew.mean_seconds
        is_saturated = (mean < 0 or mean > SLOW) and self.crew.busy() + count >= self._threads
        is_saturated |= self._alone is not None  # for as long as it may kill this process
        for spec in self._queues:
            needs_help = is_saturated or self._room(spec) <= 0
            is_better_left = spec.name in bell.armed and (bell.is_hot or needs_help)
            if is_better_left and not self._give_up_bell(spec.name, ask_for_help=needs_help):
                return

    def _leave_closed(self) -> None:
        """Give up the bells of queues that turned out to be closed: whoever inserts need wake nobody."""
        for queue in self._bell.armed.intersection(self._closed.states):
            self._give_up_bell(queue, ask_for_help=False)

    def _call_for(self, queues: set[str]) -> None:
        """Attempts of *queues* were recorded, and this process claims no more: have others look what may start."""
        for queue in sorted(self._closed.were_full(queues)):
            if self._line is None or not self._bell.use_bells:
                return
            try:
                self._line.ask_for_help(queue)
            except Exception as error:
                log.warning("asking others to claim from %s failed: %s", queue, first_line(error))
                self._lose_line()

    def _give_up_bell(self, queue: str, *, ask_for_help: bool) -> bool:
        """Whether it went well. If not, what is at hand is open and must be run, whatever became of the connection."""
        if self._line is None:
            return False
        try:
            self._line.give_up_bell(queue, ask_for_help=ask_for_help)
        except Exception as error:
            log.warning("giving a bell up failed: %s", first_line(error))
            self._lose_line()
            return False
        self._bell.gave_up(queue)
        return True

    def _leave_bells(self) -> None:
        """Nobody claims here any more: have others answer, though this connection stays for what is to be recorded."""
        for queue in sorted(self._bell.armed):
            if not self._give_up_bell(queue, ask_for_help=True):
                return

    def _room(self, spec: QueueSpec) -> int:
        """How many more attempts of a queue this process may have open."""
        if self._shares is not None and self._shares.keep_threads:
            return self._shares.room(self._loads())[spec.name]
        return MAX_BATCH if spec.max_workers is None else spec.max_workers - self._outcomes.unfinished(spec.name)

    def _rest(self, seconds: float) -> bool:
        """Sleep until an insert rings, a thread has finished and its outcome is due, or the time has passed.

        Returns:
            Whether something happened before the time had passed.
        """
        crew, outcomes, line = self.crew, self._outcomes, self._line
        until = min(time.monotonic() + seconds, *self._not_before.values(), math.inf)
        if line is None:
            self._wake.sleep(seconds)
            return True
        flush_after = 0.0 if self._closed.has_full else FLUSH_AFTER
        has_happened = True
        while not self.is_stopping and not self._is_called:
            if outcomes.count:
                until = min(until, outcomes.oldest + flush_after)
            crew.is_asleep = True
            if outcomes.count and outcomes.oldest + flush_after < until:
                crew.is_asleep = False
                continue  # noted between the look and the sleep
            left = until - time.monotonic()
            if left <= 0:
                has_happened = bool(outcomes.count)
                break
            if self._is_rung(line):
                break
            self._wake.sleep(left, line.fileno())
            if self._is_rung(line):
                break
        crew.is_asleep = self._is_called = False
        return has_happened

    def _is_rung(self, line: Line) -> bool:
        try:
            notified = line.notifications()
        except psycopg.OperationalError:
            self._lose_line()
            raise
        calls = {said[len(HELP) :] for said in notified if said.startswith(HELP)} & self._names
        if calls:
            for queue in calls:
                self._closed.reopen(queue)
            self._bell.asked_to_help()
            return True
        return any(said in self._bell.armed for said in notified)
