"""``--processes P``: a process that runs no jobs itself, and sees that P worker processes do.

Each is spawned from this one's own command line, not forked: it imports the application anew, and this process never
does. A pair of sockets joins it to each:

    worker -> supervisor     ``+``: it claims jobs
    supervisor -> worker     0: stop in good order; a signal's number: leave at once, as that signal would have it
    end of the stream        the other has died; a worker then stops in good order

What is asked goes through the socket and not by signals: a terminal or systemd may send a signal to every process at
once, and a worker that hears it twice would leave its jobs. A socket also ends with its process, however that dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from types import FrameType

from awa.errors import ConfigError
from awa.worker.supervisor import Worker
from awa.worker.wake import Wake

log = logging.getLogger("awa.worker")

VARIABLE = "AWA_LINK_TO_SUPERVISOR"
"""Tells a worker process the number of its socket."""

FIRST_DELAY = 0.5
"""Seconds until a worker process that died is started again: about so many at first, doubled each time, ..."""

LONGEST_DELAY = 30.0
"""... up to these."""

HEALTHY_AFTER = 60.0
"""Seconds of work after which earlier deaths are forgotten."""

START_TIMEOUT = 120.0
"""Seconds that a successor has until it claims; then the roll is given up."""

LEEWAY = 30.0
"""Seconds beyond the grace time that a worker process has to end when asked; then it is killed."""

LEAVE_TIMEOUT = 2.0
"""Seconds that worker processes have to end when told to leave at once; then they are killed."""

READY = b"+"
STOP = 0


# --- the worker process's side


class Link:
    """A worker process's end of the socket; a thread of its own listens there.

    Args:
        file: The socket's number.
    """

    def __init__(self, file: int) -> None:
        self._socket = socket.socket(fileno=file)
        self._socket.set_inheritable(False)
        self._lock = threading.Lock()
        self._worker: Worker | None = None  # guarded by _lock
        threading.Thread(target=self._listen, name="awa-link", daemon=True).start()

    @classmethod
    def inherited(cls) -> Link | None:
        """The one to the process that started this one; None when nobody supervises it.

        Raises:
            ConfigError: The variable that tells of it was set by somebody else.
        """
        said = os.environ.pop(VARIABLE, None)  # not for processes that this one starts
        if said is None:
            return None
        try:
            return cls(int(said))
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"{VARIABLE} is {said!r}: it is set for worker processes by awa itself, unset it"
            ) from error

    def serve(self, worker: Worker) -> None:
        """Pass on to *worker* what the supervisor asks from now on; until then the process ends at once instead."""
        with self._lock:
            self._worker = worker

    def tell_ready(self) -> None:
        """Tell the supervisor that this process claims jobs."""
        with contextlib.suppress(OSError):  # it has died: the thread hears of that
            self._socket.send(READY)

    def _listen(self) -> None:
        while True:
            try:
                said = self._socket.recv(1)
            except OSError:
                said = b""
            with self._lock:
                if said and said[0] != STOP:
                    if self._worker is not None:
                        self._worker.leave_now(said[0])
                    os._exit(128 + said[0])
                if self._worker is None:
                    os._exit(0)
                if not said:
                    log.warning("the supervisor has died: this worker process stops")
                self._worker.ask_to_stop()
            if not said:
                return


# --- the supervisor's side


class Child:
    """One worker process, from its start to its end.

    Args:
        number: Its place, from 1.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        try:
            # In a process group of its own, so that a terminal's hangup reaches the supervisor only.
            self._process = subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | {VARIABLE: str(theirs.fileno())},
                process_group=0,
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self.started_at = time.monotonic()
        self.ready_at: float | None = None
        """When it said that it claims jobs."""
        self.kill_at: float | None = None
        """When it is killed unless it ends before; None while it may go on."""

    def __str__(self) -> str:
        return f"worker process {self.number} (pid {self._process.pid})"

    @property
    def code(self) -> int | None:
        """Its exit code, 128 and the signal for one that died of that; None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def file(self) -> int | None:
        """What to wait for a word from it on; None when it has closed its end."""
        return None if self._socket.fileno() < 0 else self._socket.fileno()

    def hear(self) -> None:
        """Take note of what it has said."""
        try:
            said = self._socket.recv(16) if self.file is not None else None
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said == b"":
            self._socket.close()
        elif said is not None and self.ready_at is None:
            self.ready_at = time.monotonic()
            log.info("%s works", self)

    def ask_to_stop(self, seconds: float) -> None:
        """Have it stop in good order, within *seconds*."""
        if self.kill_at is None:
            self.kill_at = time.monotonic() + seconds
            self._send(STOP)

    def leave_now(self, number: int) -> None:
        """Have it end at once, as signal *number* would."""
        self.kill_at = time.monotonic() + LEAVE_TIMEOUT
        self._send(number)

    def _send(self, what: int) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._socket.send(bytes([what]))

    def kill(self) -> None:
        """End it from outside."""
        self._process.kill()

    def close(self) -> None:
        """Let go of it, when it has ended."""
        self._process.wait()
        self._socket.close()


class Place:
    """Where one of the P worker processes is, or will be again.

    Args:
        number: Which, from 1.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.child: Child | None = None
        self.start_at = 0.0
        """When to start one, while there is none."""
        self._failures = 0

    def lost(self, child: Child, now: float) -> float:
        """*child* died: settle when the next is started, and return the seconds until then."""
        if child.ready_at is not None and now - child.ready_at >= HEALTHY_AFTER:
            self._failures = 0
        self.child = None
        return self.put_off(now)

    def put_off(self, now: float) -> float:
        """Starting failed once more: settle when to try again, and return the seconds until then."""
        delay = min(FIRST_DELAY * 2.0 ** min(self._failures, 10), LONGEST_DELAY) * random.uniform(0.75, 1.0)
        self._failures += 1
        self.start_at = now + delay
        return delay


class Processes:
    """Keeps *number* worker processes running until told to stop.

    Args:
        number: How many.
        shutdown_timeout: Seconds of grace that each gives to its handlers.
    """

    def __init__(self, number: int, *, shutdown_timeout: float) -> None:
        self._places = [Place(n + 1) for n in range(number)]
        self._stop_timeout = shutdown_timeout + LEEWAY
        self._children: list[Child] = []  # all that have not ended
        self._wake = Wake()
        self._signals: list[int] = []
        self._is_asked_to_roll = False
        self._has_worked = False
        self._is_stopping = False
        self._codes: list[int] = []  # of those that ended since
        self._to_roll: deque[Place] = deque()  # the first is being rolled when there is one of:
        self._successor: Child | None = None
        self._retiring: Child | None = None

    def run(self) -> int:
        """Start them, and see to them until SIGTERM or SIGINT. In the main thread only.

        SIGHUP replaces them, one after the other. Until one has worked, the end of one is the end of all, as for a
        single worker: what cannot start should not be tried for ever.

        Returns:
            The exit code: 0 when all ended well; 75 when handlers of any outlived the grace time; else what the first
            that did not end well ended with. After a second signal 128 and its number.
        """
        handlers = {"SIGTERM": self._on_stop, "SIGINT": self._on_stop, "SIGHUP": self._on_roll}
        previous = {}
        for name, handler in handlers.items():
            if (number := getattr(signal, name, None)) is not None:
                previous[number] = signal.signal(number, handler)
        try:
            log.info("supervising %d worker processes", len(self._places))
            while not (self._is_stopping and not self._children) and len(self._signals) < 2:
                pause = self._look()
                self._wake.sleep(pause, *(child.file for child in self._children if child.file is not None))
            if len(self._signals) > 1:
                self._leave(self._signals[1])
                return 128 + self._signals[1]
            code = self._code()
            log.info("all worker processes have ended; exit code %d", code)
            return code
        finally:
            for child in self._children:
                child.kill()
                child.close()
            self._wake.close()
            for number, before in previous.items():
                signal.signal(number, before)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        self._wake.ring()

    def _on_roll(self, number: int, frame: FrameType | None) -> None:
        self._is_asked_to_roll = True
        self._wake.ring()

    def _look(self) -> float:
        """Do what is to be done now; return the seconds until there may be more."""
        if self._signals and not self._is_stopping:
            log.info("stopping %d worker processes, by signal %d", len(self._children), self._signals[0])
            self._stop()
        for child in self._children[:]:
            child.hear()
            self._has_worked |= child.ready_at is not None
            if child.code is not None:
                self._children.remove(child)
                child.close()
                self._ended(child, child.code)
        if self._is_asked_to_roll and not self._to_roll and not self._is_stopping:
            self._is_asked_to_roll = False
            log.info("replacing %d worker processes, one after the other", len(self._places))
            self._to_roll.extend(self._places)
        if not self._is_stopping:
            self._roll()
            self._start()
        return self._pause()

    def _start(self) -> None:
        now = time.monotonic()
        for place in self._places:
            if place.child is None and place.start_at <= now and not self._is_rolling(place):
                place.child = self._spawn(place)

    def _spawn(self, place: Place) -> Child | None:
        try:
            child = Child(place.number)
        except OSError as error:
            delay = place.put_off(time.monotonic())
            log.error("worker process %d cannot be started, again in %.1f s: %s", place.number, delay, error)
            return None
        log.info("%s is started", child)
        self._children.append(child)
        return child

    def _ended(self, child: Child, code: int) -> None:
        how = f"was killed by signal {code - 128}" if code > 128 else f"ended with exit code {code}"
        if child.kill_at is not None:
            log.log(logging.INFO if code == 0 else logging.ERROR, "%s %s", child, how)
            self._codes += [code] if self._is_stopping else []
            return
        if not self._has_worked:
            log.critical("%s %s before any worked: giving up", child, how)
            self._codes.append(code or 1)
            self._stop()
            return
        place = self._places[child.number - 1]
        if place.child is not child:  # a successor that did not come up; what it was to replace goes on
            log.error("%s %s", child, how)
        elif self._is_rolling(place):
            log.error("%s %s; its successor is on the way", child, how)
            place.child = None
        else:
            log.error("%s %s; again in %.1f s", child, how, place.lost(child, time.monotonic()))

    def _is_rolling(self, place: Place) -> bool:
        return self._successor is not None and self._successor.number == place.number

    def _roll(self) -> None:
        """Take the next step of replacing the processes: at any time there is one more than P at most."""
        now = time.monotonic()
        if self._retiring is not None:
            if self._retiring in self._children:
                return
            self._retiring = None
            self._rolled()
        if (successor := self._successor) is not None:
            place = self._to_roll[0]
            if successor.ready_at is not None and successor in self._children:
                self._successor, self._retiring, place.child = None, place.child, successor
                if self._retiring is None:  # it had died meanwhile
                    self._rolled()
                else:
                    self._retiring.ask_to_stop(self._stop_timeout)
            elif successor not in self._children or now > successor.started_at + START_TIMEOUT:
                self._successor = None
                self._to_roll.clear()
                log.error("%s did not come up: the others are not replaced", successor)
                successor.leave_now(getattr(signal, "SIGTERM", 15))
                if place.child is None:
                    place.put_off(now)
        while self._to_roll and self._retiring is None and self._successor is None:
            place = self._to_roll[0]
            if place.child is None:
                self._rolled()  # the next that is started there is a new one anyway
            elif (found := self._spawn(place)) is None:
                self._to_roll.clear()
                log.error("the other worker processes are not replaced")
            else:
                self._successor = found

    def _rolled(self) -> None:
        self._to_roll.popleft()
        if not self._to_roll:
            log.info("all worker processes are replaced")

    def _stop(self) -> None:
        self._is_stopping = True
        for child in self._children:
            child.ask_to_stop(self._stop_timeout)

    def _leave(self, number: int) -> None:
        log.warning("leaving at once, by a second signal; what runs in %d processes is rescued", len(self._children))
        for child in self._children:
            child.leave_now(number)
        until = time.monotonic() + LEAVE_TIMEOUT
        while any(child.code is None for child in self._children) and time.monotonic() < until:
            self._wake.sleep(0.02)

    def _pause(self) -> float:
        now = time.monotonic()
        pause = 1.0
        for child in self._children:
            if child.file is None:
                pause = min(pause, 0.02)  # it has closed its end, and is about to end
            if child.kill_at is not None:
                if now >= child.kill_at:
                    log.error("%s does not end: killed; what it ran is rescued", child)
                    child.kill()
                    child.kill_at = now + LEAVE_TIMEOUT
                pause = min(pause, child.kill_at - now)
        if not self._is_stopping:
            waiting = [place.start_at - now for place in self._places if place.child is None]
            pause = min([pause, *waiting])
        return max(pause, 0.01)

    def _code(self) -> int:
        bad = [code for code in self._codes if code]
        return 75 if 75 in bad else next(iter(bad), 0)
