"""What a handler sees of its own attempt, and what becomes of the attempt when the handler has ended."""

from __future__ import annotations

import logging
import time
from typing import Any

from psycopg import Connection, Cursor

from awa import _core
from awa._core import Attempt, Outcomes
from awa.errors import StaleAttempt
from awa.failure import describe, told
from awa.insert import lent
from awa.job import Cancel, Job, Outcome, RetryAfter, Snooze
from awa.registry import TaskOptions
from awa.retry import delay_after, verdict
from awa.storage import jobs
from awa.storage.schema import Schema

log = logging.getLogger("awa.job")


class Attempts:
    """Makes jobs of attempts, and notes their outcomes.

    Args:
        outcomes: Where they are noted.
    """

    def __init__(self, schema: Schema, outcomes: Outcomes) -> None:
        self._schema = schema
        self._outcomes = outcomes

    def job(self, attempt: Attempt, args: Any) -> Job[Any]:
        """What the handler gets."""
        return Job(attempt, args, self)

    def complete(self, attempt: Attempt, conn: Connection[Any] | Cursor[Any]) -> None:
        """Complete *attempt* in the transaction of *conn*; see :meth:`awa.Job.complete`."""
        if attempt.is_over:
            raise StaleAttempt(
                f"the handler of job {attempt.id} has ended: complete it before the handler returns",
                job_id=attempt.id,
                entry_id=attempt.entry_id,
            )
        batch = attempt.batch
        # From now on the database is asked what happened, whatever this call returns.
        attempt.was_completed = True
        jobs.complete(
            lent(conn),
            self._schema,
            runtime=batch.runtime,
            claim_id=batch.claim_id,
            slot=batch.slot,
            nonce=batch.nonce,
            idx=attempt.idx,
            elapsed_ms=int((time.monotonic() - attempt.started) * 1000),
            job_id=attempt.id,
            entry_id=attempt.entry_id,
        )

    def conclude(self, attempt: Attempt, result: object, error: BaseException | None, elapsed_ms: int) -> None:
        """Note everything but a plain success."""
        add = self._outcomes.add
        ending = result if error is None else error
        # type(): an object may lie about its __class__
        chosen = ending if issubclass(type(ending), Outcome) else None
        if isinstance(chosen, Snooze):
            add(attempt, "snoozed", delay=chosen.seconds, elapsed_ms=elapsed_ms)
        elif isinstance(chosen, Cancel):
            reason = told("Cancel", chosen.reason or "cancelled by its handler")
            add(attempt, "cancelled", elapsed_ms=elapsed_ms, error=reason.as_json())
            log.info("job %d %s: cancelled: %s", attempt.id, attempt.handler.kind, reason.text)
        elif isinstance(chosen, RetryAfter):
            asked = told("RetryAfter", f"its handler asked to run again after {chosen.seconds:g} s")
            self._retry(attempt, chosen.seconds, elapsed_ms, asked.as_json())
        elif error is None:
            add(attempt, "completed", elapsed_ms=elapsed_ms)
        else:
            self._failed(attempt, error, elapsed_ms)

    def _failed(self, attempt: Attempt, error: BaseException, elapsed_ms: int) -> None:
        options = attempt.handler.options or TaskOptions()
        failure = describe(error)
        number = attempt.attempt
        if attempt.was_completed:
            log.warning(
                "job %d %s: raised %s after complete(): %s; this counts only if its transaction was rolled back",
                attempt.id,
                attempt.handler.kind,
                failure.type,
                failure.text,
            )
        decided = verdict(
            error,
            attempt=number,
            max_attempts=attempt.max_attempts,
            retry_on=options.retry_on,
            fail_on=options.fail_on,
        )
        if decided == "fail":
            self._outcomes.add(attempt, "failed", elapsed_ms=elapsed_ms, error=failure.as_json())
            if attempt.was_completed:
                return
            log.error(
                "job %d %s: failed at attempt %d/%d: %s: %s",
                attempt.id,
                attempt.handler.kind,
                number,
                attempt.max_attempts,
                failure.type,
                failure.text,
            )
            return
        delay = delay_after(options.retry, number)
        if delay.complaint is not None:
            log.warning("job %d %s: %s", attempt.id, attempt.handler.kind, delay.complaint)
        self._retry(attempt, delay.seconds, elapsed_ms, failure.as_json())
        if attempt.was_completed:
            return
        log.warning(
            "job %d %s: attempt %d/%d raised %s: %s; again in %.1f s",
            attempt.id,
            attempt.handler.kind,
            number,
            attempt.max_attempts,
            failure.type,
            failure.text,
            delay.seconds,
        )

    def _retry(self, attempt: Attempt, seconds: float, elapsed_ms: int, error: bytes) -> None:
        # The database fails the job instead when this was its last attempt.
        self._outcomes.add(attempt, "retried", delay=seconds, elapsed_ms=elapsed_ms, error=error)


def current_job() -> Job[Any]:
    """The job that the calling handler runs; its ``args`` are the arguments by name.

    For handlers that take their args as parameters.

    Raises:
        LookupError: This thread runs no job.
    """
    job: Job[Any] | None = _core.current_job()
    if job is None:
        raise LookupError("no job runs in this thread: current_job() works inside a handler, in the handler's thread")
    return job
