"""Running an attempt in the calling thread, by the parts of a worker that run it in one of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, cast

from psycopg import Connection

from awa._core import Attempt, Crew, Handler, Outcomes
from awa.client import Client
from awa.errors import TerminalError
from awa.job import Outcome
from awa.lent import Lent
from awa.storage.lent import lent
from awa.worker.attempt import Attempts, check_joins
from awa.worker.supervisor import make_handlers
from awa.worker.transactions import stale


@dataclass(slots=True)
class Ending:
    """What an attempt came to."""

    outcome: str = "completed"
    """completed, retried, snoozed, cancelled or failed."""
    delay: float = 0.0
    """Seconds until the next attempt, of one that is retried or snoozed."""
    elapsed_ms: int = 0
    """How long the handler ran."""
    told: bytes | str | None = None
    """What is stored with it, as JSON: the error, or the result that is kept."""
    error: BaseException | None = None
    """What the handler raised, if that was not an outcome."""
    chosen: Outcome | None = None
    """The outcome that the handler returned or raised."""

    @property
    def is_surprise(self) -> bool:
        """Whether the attempt failed by what its handler did not mean to say to the queue."""
        return (
            self.error is not None
            and self.outcome in ("retried", "failed")
            and not isinstance(self.error, TerminalError)
        )


class _Noted:
    """Stands before the outcomes that are to be recorded, and keeps the one that comes by."""

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self.ending = Ending()

    def add(
        self,
        attempt: Attempt,
        outcome: str,
        *,
        delay: float = 0.0,
        elapsed_ms: int = 0,
        error: bytes | str | None = None,
        **more: Any,
    ) -> None:
        self.ending.outcome, self.ending.delay, self.ending.told = outcome, delay, error
        self._outcomes.add(attempt, outcome, delay=delay, elapsed_ms=elapsed_ms, error=error, **more)


class Completes(Attempts):
    """Attempts whose completion by their handlers is believed, since there is no database to ask.

    They are completed unless the handler raises after it.
    """

    kept: bytes | None = None
    """The result that was given, as JSON."""

    def complete(self, attempt: Attempt, conn: Lent, result: object = None) -> None:
        """Note that the handler completes its attempt; *conn* is not touched."""
        dump = attempt.handler.dump_result
        if dump is None and result is not None:
            super().complete(attempt, conn, result)  # refuses it
        lent(conn)
        if isinstance(conn, Connection) and self._transactions.completes(attempt, conn, result):
            return
        if isinstance(conn, Connection):
            check_joins(conn)
        if not attempt.begin_complete():
            raise stale(attempt)
        self.kept = None if dump is None else dump(result)


def handlers_of(client: Client) -> dict[str, Handler]:
    """What a worker of *client* calls for each kind; empty when no task is declared."""
    if not client.registry.kinds:
        return {}
    return make_handlers(client.registry, client._defaults.max_args_bytes, client._wrap)


def run_here(attempt: Attempt, client: Client, outcomes: Outcomes, attempts: type[Attempts] = Attempts) -> Ending:
    """Call the handler of *attempt* in this thread; its outcome is noted in *outcomes*, as a worker notes it."""
    noted = _Noted(outcomes)
    ending = noted.ending
    made = attempts(client._schema, cast(Outcomes, noted), client.connection, notify=client._notify)

    def conclude(attempt: Attempt, result: object, error: BaseException | None, elapsed_ms: int) -> None:
        left = result if error is None else error
        ending.chosen = left if isinstance(left, Outcome) else None
        ending.error = error if ending.chosen is None else None
        try:
            made.conclude(attempt, result, error, elapsed_ms)
        except BaseException:
            ending.outcome, ending.delay = "retried", 60.0  # as the crew says then
            raise

    crew = Crew(
        1,
        outcomes,
        job=made.job,
        conclude=conclude,
        late=made.late,
        lead=lambda: None,
        chosen=Outcome,
        flush_after=3600.0,
    )
    began = time.monotonic()
    crew.run_here(attempt)
    if isinstance(made, Completes) and attempt.was_completed and ending.error is None:
        ending.outcome, ending.told = "completed", made.kept
    ending.elapsed_ms = int((time.monotonic() - began) * 1000)
    return ending


def passes_on(error: BaseException | None) -> bool:
    """Whether *error* was meant for the program and not for the job."""
    return error is not None and not isinstance(error, (Exception, SystemExit, GeneratorExit))
