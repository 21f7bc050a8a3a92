"""Steps: transactions of workers that take long, and answers that are lost.

A claim or a flush is executed in one step and ends in a later one: its locks are held, what it has written is not to be
seen. It ends with an answer; or commits, and the answer is lost; or its backend is ended before it commits.
"""

from __future__ import annotations

import random

import psycopg

from awa.storage import backends
from tests.storage.engine import Conn, settle
from tests.storage.model.records import Flush, Runtime, Session, Slow
from tests.storage.model.steps import PICK, among, step
from tests.storage.model.working import Working


class Doubting(Working):
    def _idle(self) -> Session | None:
        used = [slow.session.conn for slow in self.slow]
        return next((Session(conn) for conn in self.sessions.slow if conn not in used), None)

    @step(
        weight=4,
        when=lambda self: self._idle() is not None,
        n=among(0, 1, 2),
        q=among(0, 1),
        limit=among(1, 3, 50),
    )
    def begin_claim(self, n: int, q: int, limit: int) -> None:
        runtime, queue, session = self.runtimes[n], self.queues[q], self._idle()
        assert session is not None
        if runtime.is_in_doubt or self.is_busy(runtime):
            return
        session.conn.execute("BEGIN")
        seen = self.claim_through(session.conn, runtime, queue, limit)
        if seen is None:
            session.conn.execute("ROLLBACK")
            return
        self.slow.append(Slow(session, runtime, queue, self._xid(session.conn), seen.note, taken=seen.taken))

    @step(
        weight=4,
        when=lambda self: self._idle() is not None,
        pick=PICK,
        most=among(1, 3, 50),
    )
    def begin_flush(self, pick: random.Random, most: int) -> None:
        session = self._idle()
        able = [runtime for runtime in self.runtimes if self.known(runtime) and not runtime.pending]
        if session is None or not able:
            return
        runtime = pick.choice(able)
        flush = self.make_flush(runtime, pick, most)
        session.conn.execute("BEGIN")
        taken = self.send(session.conn, runtime, flush)
        runtime.pending = flush
        for end in flush.ends:
            end.job.flush = flush if end.is_open else end.job.flush

        def note(is_answered: bool) -> None:
            self.note_taken(runtime, flush, taken)
            if is_answered:
                self.note_answered(runtime, flush)

        self.slow.append(Slow(session, runtime, None, self._xid(session.conn), note, flush))

    def _xid(self, conn: Conn) -> int | None:
        found = conn.execute("SELECT pg_current_xact_id_if_assigned()::text::bigint").fetchone()
        assert found is not None
        if found[0] is not None:
            self.began[found[0]] = self.step
        return None if found[0] is None else int(found[0])

    @step(
        weight=6,
        when=lambda self: self.slow,
        pick=PICK,
        how=among("answered", "answered", "lost on its way", "answer lost", "backend ended"),
    )
    def end_slow(self, pick: random.Random, how: str) -> None:
        slow = pick.choice(self.slow)
        if how == "lost on its way":  # the worker knows it before the server does
            slow.is_lost = slow.runtime.is_in_doubt = True
        else:
            self.finish(slow, how)

    def finish(self, slow: Slow, how: str) -> None:
        self.slow.remove(slow)
        if slow.is_lost and how == "answered":
            how = "answer lost"
        what = "flush" if slow.flush else "claim"
        self.totals[f"{what}: {how}"] += 1
        if how == "backend ended":
            backend = backends.backend_of(slow.session.conn)
            assert backend is not None
            assert backends.end_backend(self.main, backend)
        else:
            slow.session.conn.execute("COMMIT")
            slow.commit(how == "answered")
            if slow.xid is not None:
                self.committed[slow.xid] = self.step
        if how != "answered":
            self.replace(slow.session)
            slow.runtime.is_in_doubt = True

    @step(when=lambda self: any(runtime.pending for runtime in self.runtimes), pick=PICK)
    def repeat_a_flush(self, pick: random.Random) -> None:
        runtime = pick.choice([runtime for runtime in self.runtimes if runtime.pending])
        assert runtime.pending is not None
        self.repeat(runtime, runtime.pending)

    def repeat(self, runtime: Runtime, flush: Flush) -> None:
        """A worker repeats a flush under its number until it knows what became of it."""
        if any(slow.flush is flush for slow in self.slow):
            if not any(end.is_open for end in flush.ends):
                return
            try:
                settle(self.claimer, runtime.number, flush.done, flush.others, flush=flush.number)
            except psycopg.errors.LockNotAvailable:
                self.totals["flushes that wait for themselves"] += 1
                return
            raise AssertionError("it is not known yet whether the first one commits")
        if flush.recorded is not None:
            self.send_again(runtime, flush)
        else:
            self.note_taken(runtime, flush, self.send(self.claimer, runtime, flush))
        self.note_answered(runtime, flush)

    @step(when=lambda self: any(runtime.is_in_doubt for runtime in self.runtimes), pick=PICK)
    def look_what_became_of_it(self, pick: random.Random) -> None:
        self.release_unheard(pick.choice([runtime for runtime in self.runtimes if runtime.is_in_doubt]))

    def end_what_is_open(self) -> None:
        for producer in self.producers:
            if producer.is_open:
                self.end_insert(producer, commits=True)
        for lender in self.lenders:
            if lender.is_open:
                self.end_lent(lender, commits=True)
        for slow in [*self.slow]:
            self.finish(slow, "answered")
        self.the_database_agrees()
        for runtime in self.runtimes:
            if runtime.is_in_doubt:
                assert self.release_unheard(runtime)
            if runtime.pending:
                self.repeat(runtime, runtime.pending)
