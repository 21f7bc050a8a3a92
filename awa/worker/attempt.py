"""What a handler sees of its own attempt, and what becomes of the attempt when the handler has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from psycopg import Connection, IsolationLevel

from awa._core import Attempt, Outcomes
from awa.errors import ConfigError, ValidationError
from awa.failure import Failure, describe, told
from awa.job import Cancel, Job, Outcome, RetryAfter, Snooze
from awa.lent import Driver, Lent
from awa.registry import TaskOptions
from awa.retry import delay_after, verdict
from awa.storage import jobs
from awa.storage.drivers import commits_at_once
from awa.storage.lent import lent
from awa.storage.schema import Schema
from awa.worker.transactions import Transactions, stale

log = logging.getLogger("awa.job")


def check_joins(conn: Driver) -> None:
    """Refuse a connection on which ``complete`` would be a transaction of its own.

    Raises:
        ConfigError: It is in autocommit mode, with no transaction open.
    """
    if commits_at_once(conn):
        raise ConfigError(
            "complete was lent a connection in autocommit mode with no transaction open, so the job would be completed "
            "apart from what its handler writes: call it inside `with conn.transaction():`, or use "
            "`with job.transaction() as conn:`"
        )


class Attempts:
    """Makes jobs of attempts, and notes their outcomes.

    Args:
        outcomes: Where they are noted.
        lend: Borrows a connection for a handler's own transaction.
        notify: Whether a handler's own transaction may wake idle workers for the follow-ups of its job.
    """

    def __init__(
        self,
        schema: Schema,
        outcomes: Outcomes,
        lend: Callable[[], AbstractContextManager[Connection[Any]]],
        *,
        notify: bool,
    ) -> None:
        self._schema = schema
        self._outcomes = outcomes
        self._transactions = Transactions(lend)
        self._notify = notify
        self._given: set[Attempt] = set()
        """Those that have completed themselves with a result, until they are concluded. Guarded by the interpreter."""

    def job(self, attempt: Attempt, args: Any) -> Job[Any]:
        """What the handler gets."""
        return Job(attempt, args, self)

    def complete(self, attempt: Attempt, conn: Lent, result: object = None) -> None:
        """Complete *attempt* in the transaction of *conn*; see :meth:`awa.Job.complete`."""
        dump = attempt.handler.dump_result
        if dump is None and result is not None:
            raise ConfigError(
                f"complete has a result, but jobs of kind {attempt.handler.kind!r} keep none: declare their task with "
                "keep_result=True, or leave the result out"
            )
        try:
            kept = None if dump is None else dump(result)
        except ValidationError as error:
            if result is not None:
                raise
            raise ValidationError(
                f"{error}: jobs of kind {attempt.handler.kind!r} keep a result; give it to "
                "job.complete(conn, result=...), what the handler returns comes too late",
                path=error.path,
                value=error.value,
                limit=error.limit,
            ) from None
        with lent(conn) as driver:
            if self._transactions.completes(attempt, driver, result):
                return
            check_joins(driver)
            # Once it has begun, the database is asked what happened, whatever this call returns.
            if not attempt.begin_complete():
                raise stale(attempt)
            batch = attempt.batch
            jobs.complete(
                driver,
                self._schema,
                runtime=batch.runtime,
                claim_id=batch.claim_id,
                slot=batch.slot,
                nonce=batch.nonce,
                idx=attempt.idx,
                elapsed_ms=int((time.monotonic() - attempt.started) * 1000),
                result=kept,
                notify=self._notify,
                job_id=attempt.id,
                entry_id=attempt.entry_id,
            )
            if result is not None:
                self._given.add(attempt)

    def transaction(
        self, attempt: Attempt, isolation_level: IsolationLevel | str | None
    ) -> AbstractContextManager[Connection[Any]]:
        """A transaction that completes *attempt* at its end; see :meth:`awa.Job.transaction`."""
        return self._transactions.begin(attempt, isolation_level, self.complete)

    def conclude(self, attempt: Attempt, result: object, error: BaseException | None, elapsed_ms: int) -> None:
        """Note everything but a plain success."""
        is_given = attempt in self._given
        self._given.discard(attempt)
        ending = result if error is None else error
        # type(): an object may lie about its __class__
        chosen = ending if issubclass(type(ending), Outcome) else None
        if attempt.is_asked_to_cancel and (chosen is not None or error is not None):
            self._cancelled(attempt, ending, elapsed_ms)
        elif isinstance(chosen, Snooze):
            self._add(attempt, "snoozed", elapsed_ms, delay=chosen.seconds)
            self._after_complete(attempt, f"Snooze({chosen.seconds:g})")
        elif isinstance(chosen, Cancel):
            reason = told("Cancel", chosen.reason or "cancelled by its handler")
            self._add(attempt, "cancelled", elapsed_ms, reason)
            if not self._after_complete(attempt, f"Cancel: {reason.text}"):
                self._log(logging.INFO, attempt, "cancelled: %s", reason.text)
        elif isinstance(chosen, RetryAfter):
            asked = told("RetryAfter", f"its handler asked to run again after {chosen.seconds:g} s")
            self._add(attempt, "retried", elapsed_ms, asked, delay=chosen.seconds)
            self._after_complete(attempt, f"RetryAfter({chosen.seconds:g})")
        elif error is None:
            self._completed(attempt, result, elapsed_ms, is_given)
        else:
            self._failed(attempt, error, elapsed_ms)

    def late(self, attempt: Attempt, result: object, error: BaseException | None, elapsed_ms: int) -> None:
        """Tell how the handler of an abandoned attempt ended; the attempt has its outcome."""
        self._given.discard(attempt)
        ending = "returned" if error is None else f"raised {describe(error).type}"
        text = "its handler %s after %.1f s; its attempt had been ended when its time was up"
        self._log(logging.WARNING, attempt, text, ending, elapsed_ms / 1000)

    def _cancelled(self, attempt: Attempt, ending: object, elapsed_ms: int) -> None:
        """Somebody asked to cancel the attempt, and it did not succeed."""
        reason: Failure | None = None
        if isinstance(ending, Cancel):
            reason = told("Cancel", ending.reason or "cancelled by its handler")
        elif isinstance(ending, BaseException) and not isinstance(ending, Outcome):
            reason = describe(ending)
        self._add(attempt, "cancelled", elapsed_ms, reason)  # the database knows who asked why
        shown = type(ending).__name__ if reason is None else f"{reason.type}: {reason.text}"
        if not self._after_complete(attempt, shown):
            self._log(logging.INFO, attempt, "cancelled as somebody asked; it ended with %s", shown)

    def _completed(self, attempt: Attempt, result: object, elapsed_ms: int, is_given: bool) -> None:
        dump = attempt.handler.dump_result
        try:
            kept = None if dump is None else dump(result)
        except Exception as odd:  # whatever looking at the value raises
            failure = describe(odd)
            self._add(attempt, "failed", elapsed_ms, failure)  # for good: what it did is done, and would come out again
            if not self._after_complete(attempt, f"a result that cannot be kept: {failure.text}"):
                self._log(logging.ERROR, attempt, "failed, its result cannot be kept: %s", failure.text)
            return
        self._outcomes.add(attempt, "completed", elapsed_ms=elapsed_ms, error=kept)
        if attempt.was_completed and result is not None and not is_given:
            text = "what it returned is kept only if its transaction was rolled back: say complete(conn, result=...)"
            self._log(logging.WARNING, attempt, text)

    def _failed(self, attempt: Attempt, error: BaseException, elapsed_ms: int) -> None:
        options = attempt.handler.options or TaskOptions()
        failure = describe(error)
        raised = f"{failure.type}: {failure.text}"
        number, most = attempt.attempt, attempt.max_attempts
        decided = verdict(error, attempt=number, max_attempts=most, retry_on=options.retry_on, fail_on=options.fail_on)
        if decided == "fail":
            self._add(attempt, "failed", elapsed_ms, failure)
            if not self._after_complete(attempt, raised):
                self._log(logging.ERROR, attempt, "failed at attempt %d/%d: %s", number, most, raised)
            return
        delay = delay_after(options.retry, number)
        if delay.complaint is not None:
            self._log(logging.WARNING, attempt, "%s", delay.complaint)
        self._add(attempt, "retried", elapsed_ms, failure, delay=delay.seconds)
        if not self._after_complete(attempt, raised):
            text = "attempt %d/%d raised %s; again in %.1f s"
            self._log(logging.WARNING, attempt, text, number, most, raised, delay.seconds)

    def _add(
        self, attempt: Attempt, outcome: str, elapsed_ms: int, failure: Failure | None = None, *, delay: float = 0.0
    ) -> None:
        # What is retried at its last attempt the database fails instead.
        error = None if failure is None else failure.as_json()
        self._outcomes.add(attempt, outcome, delay=delay, elapsed_ms=elapsed_ms, error=error)

    def _after_complete(self, attempt: Attempt, ending: str) -> bool:
        """Whether the attempt called complete(); then its *ending* is only told."""
        if attempt.was_completed:
            text = "ended with %s after complete(); this counts only if its transaction was rolled back"
            self._log(logging.WARNING, attempt, text, ending)
        return attempt.was_completed

    def _log(self, level: int, attempt: Attempt, text: str, *values: object) -> None:
        log.log(level, f"job %d %s: {text}", attempt.id, attempt.handler.kind, *values)
