"""The start / wake / step / stop base that every background thread of a worker shares."""

from __future__ import annotations

import contextlib
import logging
import random
import threading

from awa.worker.vitals import Vitals

log = logging.getLogger("awa.worker")

BACKOFF_CAP = 2.0
"""Most seconds between two tries of a step that keeps failing."""

PATIENCE = 120.0
"""Seconds that a round may take before its thread counts as hung; more than a connection needs to be given up."""


def first_line(error: BaseException) -> str:
    """What an error says, without the context that PostgreSQL adds below."""
    try:
        text = str(error)
    except Exception:
        text = "an error that cannot be printed"
    return next(iter(text.strip().splitlines()), "")


class Service:
    """A thread that does one round after the other.

    Subclasses give ``step() -> float``: do one round, return the seconds until the next; and may give ``close()``,
    which runs in the thread when it ends and after each failed round, to drop a connection that may be broken.

    No ``Exception`` ends the thread, wherever it is raised. What is no ``Exception`` does, and is logged.

    Args:
        name: Shown in stack dumps and logs.
        backoff_cap: Most seconds between two tries of a step that keeps failing.
        patience: Seconds that a round may take before the thread counts as hung.
    """

    def __init__(self, name: str, *, backoff_cap: float = BACKOFF_CAP, patience: float = PATIENCE) -> None:
        self.name = name
        self.vitals = Vitals(name, patience=patience)
        self._backoff_cap = backoff_cap
        self.is_stopping = False
        self._event = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; once."""
        self._thread = threading.Thread(target=self._run, name=f"awa-{self.name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Do the next round now."""
        self._event.set()

    def stop(self, timeout: float) -> bool:
        """Ask the thread to end and wait up to *timeout* seconds; whether it has ended. Safe before start and twice."""
        self.is_stopping = True
        self.wake()
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def step(self) -> float:
        """Do one round; return the seconds until the next."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what the thread holds."""

    def wait(self, seconds: float) -> None:
        """Sleep until :meth:`wake`, :meth:`stop`, or the time has passed."""
        self._event.wait(seconds)
        self._event.clear()

    def _run(self) -> None:
        try:
            while not self.is_stopping:
                try:
                    self.vitals.begin()
                    delay = self.step()
                    self.vitals.succeed(delay)
                    if delay > 0 and not self.is_stopping:
                        self.wait(delay)
                    self.vitals.recover()
                except Exception as error:
                    self._back_off(error)
            self._close_quietly()
        except BaseException:
            # nothing will do its work any more: is_alive says so, and this says why
            log.critical("%s has ended", self.name, exc_info=True)
            with contextlib.suppress(BaseException):  # it may be what has raised
                self.close()

    def _back_off(self, error: Exception) -> None:
        failures = self.vitals.failures + 1
        delay = min(0.1 * 2 ** min(failures, 10), self._backoff_cap) * random.uniform(0.5, 1.0)
        # of a long outage, the beginning, and every now and then
        is_told = failures < 10 or failures % 30 == 0
        log.log(
            (logging.WARNING if failures < 5 else logging.ERROR) if is_told else logging.DEBUG,
            "%s failed, again in %.1f s: %s: %s",
            self.name,
            delay,
            type(error).__name__,
            first_line(error),
            exc_info=log.isEnabledFor(logging.DEBUG),
        )
        self._close_quietly()
        self.vitals.fail(error, delay)
        if not self.is_stopping:
            self._event.wait(delay)
            self._event.clear()

    def _close_quietly(self) -> None:
        try:
            self.close()
        except Exception as error:
            log.debug("%s could not close: %s", self.name, first_line(error))
