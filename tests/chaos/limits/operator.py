"""Somebody who changes limits, pauses, resumes and cancels meanwhile, and writes down what was said."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, LiteralString

import psycopg
from psycopg import Connection

from tests.chaos.journal import Journal

Sabotage = Literal["limits", "hand-over"]
"""``limits``: in the database each is one more than was said. ``hand-over``: keys that are free again go to nobody."""

CLAIM_LOCK = "SELECT pg_try_advisory_xact_lock(hashtextextended('awa.queue:' || %s, 0))"


class _Busy(Exception):
    """Somebody held what is to be written for longer than an operator waits, as who empties a segment does."""


class Operator:
    """Has a connection of its own, and notes what it was told in a journal."""

    def __init__(self, database: str, directory: Path, chance: random.Random, sabotage: Sabotage | None) -> None:
        self.done: Counter[str] = Counter()
        self._conn: Connection[Any] = psycopg.connect(database, autocommit=True, application_name="chaos")
        self._journal = Journal(directory / "producer-operator.journal")
        self._chance = chance
        self._more = int(sabotage == "limits")
        if sabotage == "hand-over":
            self._stop_handing_over()

    def close(self) -> None:
        self._conn.close()
        self._journal.close()

    def limit(self, queue: str, *, max_running: int | None, per_key: int) -> None:
        """Say what holds from now on, in the database and to the checks."""
        overrides = {
            "max_running": None if max_running is None else max_running + self._more,
            "max_running_per_key": per_key + self._more,
        }

        def say() -> None:
            self._call("SELECT awa.limit_queue_v1(%s, %s, 'chaos')", [queue, json.dumps(overrides)])
            self._conn.execute(
                "INSERT INTO ledger.limits (queue, max_running, max_running_per_key) VALUES (%s, %s, %s)",
                [queue, max_running, per_key],
            )

        self._as_claimer(queue, say)
        self.done["limits changed"] += 1

    def pause(self, queue: str) -> None:
        """Let nothing of the queue start from now on."""

        def say() -> None:
            self._call("SELECT happened FROM awa.pause_queue_v1(%s, 'chaos')", [queue])
            self._conn.execute("INSERT INTO ledger.pauses (queue, is_paused) VALUES (%s, true)", [queue])

        self._as_claimer(queue, say)
        self.done["paused"] += 1

    def resume(self, queue: str) -> None:
        """Let it go on."""

        def say() -> None:
            self._conn.execute("INSERT INTO ledger.pauses (queue, is_paused) VALUES (%s, false)", [queue])
            self._call("SELECT awa.resume_queue_v1(%s)", [queue])

        self._as_claimer(queue, say)
        self.done["resumed"] += 1

    def cancel(self) -> None:
        """Cancel one of the jobs that have not ended, whatever they do."""
        found = self._conn.execute(
            "SELECT id FROM (SELECT id FROM awa.waiting_jobs UNION ALL SELECT id FROM awa.jobs) t"
            " ORDER BY id DESC LIMIT 400"
        ).fetchall()
        if not found:
            return
        job = self._chance.choice(found)[0]
        row = self._conn.execute("SELECT happened FROM awa.cancel_v1(%s, 'chaos', false)", [job]).fetchone()
        happened = "gone" if row is None else row[0]
        self._journal.note(control="cancel", job=job, happened=happened, at=time.time())
        self.done[f"cancel: {happened}"] += 1

    def turn(self) -> None:
        """Turn the ring, so that keys outlive segments."""
        self._conn.execute("SELECT awa.rotate_v1()")
        self.done["ring turned"] += 1

    def _as_claimer(self, queue: str, say: Callable[[], None]) -> None:
        """Say something in a transaction that holds the queue's claim lock, which is only ever tried."""
        until = time.monotonic() + 10.0
        while time.monotonic() < until:
            with suppress(_Busy), self._conn.transaction():
                row = self._conn.execute(CLAIM_LOCK, [queue]).fetchone()
                if row is not None and row[0]:
                    say()
                    return
            time.sleep(0.005)
        raise TimeoutError(f"queue {queue!r} was busy for 10 s")

    def _call(self, query: LiteralString, params: list[str]) -> None:
        try:
            row = self._conn.execute(query, params).fetchone()
        except psycopg.errors.LockNotAvailable as error:
            raise _Busy from error
        assert row is not None
        if row[0] == "busy":
            raise _Busy

    def _stop_handing_over(self) -> None:
        row = self._conn.execute(
            "SELECT pg_get_functiondef(p.oid), p.prosrc FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace"
            " WHERE n.nspname = 'awa' AND p.proname = 'hand_over'"
        ).fetchone()
        assert row is not None, "there is no awa.hand_over to take away"
        definition, body = row
        result = self._conn.execute(
            "SELECT prorettype::regtype::text, proretset FROM pg_proc WHERE proname = 'hand_over'"
        ).fetchone()
        assert result is not None
        answer = "RETURN;" if result[0] == "void" or result[1] else "RETURN NULL;"
        self._conn.execute(definition.replace(body, f" BEGIN {answer} END "))
