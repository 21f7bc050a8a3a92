"""The harness's eyes: what the database wrote, what it completed, and whether every job ran exactly once.

WAL and commits are read from another database of the server, so that reading them is not counted. What has to be asked
in the measured database (progress, dead rows) is counted and taken off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict

from benchmarks.record import BenchmarkError

STALLED = 30.0
"""Seconds without a newly completed job after which waiting is given up."""

QUIET = 30.0
"""Most seconds that ended processes' backends, and their statistics, are waited for."""

WAL = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"

COMMITS = "SELECT xact_commit FROM pg_stat_database WHERE datname = %(name)s"

DEAD_ROWS = "SELECT coalesce(sum(n_dead_tup), 0)::bigint FROM pg_stat_user_tables WHERE schemaname = 'awa'"

BACKENDS = "SELECT count(*) FROM pg_stat_activity WHERE datname = %(name)s AND backend_type = 'client backend'"

COMPLETED = "SELECT coalesce(sum(cardinality(idx)), 0)::bigint FROM awa.completions"

RAN = """
    WITH done AS (
        SELECT c.entry_ids[i.idx] AS entry_id
          FROM awa.completions d
          JOIN awa.claims c USING (slot, claim_id)
         CROSS JOIN LATERAL unnest(d.idx) AS i(idx)
    )
    SELECT (SELECT count(*) FROM awa.jobs), (SELECT count(DISTINCT id) FROM awa.jobs),
           (SELECT count(*) FROM awa.waiting_jobs), (SELECT count(*) FROM awa.attempt_ends),
           (SELECT count(*) FROM done),
           (SELECT count(*) FROM awa.jobs j WHERE EXISTS (SELECT FROM done WHERE done.entry_id = j.entry_id))
"""


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals at a moment when no process used the database."""

    wal: int
    """Bytes, of the whole server."""
    commits: int
    """Of the measured database, without the harness's."""
    dead_rows: int
    """Of all tables of the schema."""

    def per_job(self, later: Counters, jobs: int) -> dict[str, float]:
        """What was written between this moment and *later* for each of *jobs*, as :class:`Result` names it."""
        return {
            "wal_bytes_per_job": round((later.wal - self.wal) / jobs, 2),
            "commits_per_job": round((later.commits - self.commits) / jobs, 5),
            "dead_rows_per_job": round((later.dead_rows - self.dead_rows) / jobs, 5),
        }


class Observer:
    """Looks at one database.

    Args:
        admin: Connection string of another database of its server.
        database: The one to look at.
        guests: How many connections to it stay open all the time, and do nothing that is counted.
    """

    def __init__(self, admin: str, database: str, *, guests: int = 0) -> None:
        self._guests = guests
        self._database = database
        self._name = {"name": conninfo_to_dict(database)["dbname"]}
        self._admin = psycopg.connect(admin, autocommit=True)
        self._inside: psycopg.Connection[Any] | None = None
        self._own_commits = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()
        self._admin.close()

    def wal(self) -> int:
        """Bytes of write-ahead log since the server's beginning."""
        return int(_one(self._admin, WAL)[0])

    def checkpoint(self) -> None:
        """Have the server write out everything now and not in the middle of the measurement."""
        self._admin.execute("CHECKPOINT")

    def ask(self, query: str) -> tuple[Any, ...]:
        """The one row that *query* gives in the measured database."""
        if self._inside is None:
            # preparing a statement would be a transaction more
            self._inside = psycopg.connect(self._database, autocommit=True, prepare_threshold=None)
            self._own_commits += 1  # a new backend looks itself up in a transaction
        self._own_commits += 1
        return _one(self._inside, query)

    def counters(self) -> Counters:
        """The totals, once all other connections are closed: a backend reports the last of its statistics as it ends.

        Raises:
            BenchmarkError: Somebody stays connected.
        """
        dead_rows = self._settled(lambda: int(self.ask(DEAD_ROWS)[0]), others=1)
        self._leave()
        commits = self._settled(lambda: int(_one(self._admin, COMMITS, self._name)[0]), others=0)
        return Counters(self.wal(), commits - self._own_commits, dead_rows)

    def wait_completed(self, jobs: int, *, check: Callable[[], None]) -> None:
        """Return once *jobs* are completed.

        Args:
            check: Called now and then; raises when the worker has died.

        Raises:
            BenchmarkError: Nothing was completed for a long time.
        """
        completed, since = -1, time.monotonic()
        while (now_completed := int(self.ask(COMPLETED)[0])) < jobs:
            check()
            if now_completed > completed:
                completed, since = now_completed, time.monotonic()
            elif time.monotonic() - since > STALLED:
                raise BenchmarkError(f"{completed} of {jobs} jobs are completed, and none for {STALLED:g} s")
            time.sleep(0.05)

    def check_every_job_ran(self, jobs: int) -> None:
        """Check that the database holds *jobs* jobs, each completed exactly once, at its first attempt.

        Raises:
            BenchmarkError: It does not.
        """
        entries, found, waiting, otherwise, completions, completed = self.ask(RAN)
        if (entries, found, waiting, otherwise, completions, completed) != (jobs, jobs, 0, 0, jobs, jobs):
            raise BenchmarkError(
                f"{jobs} jobs should have run once each, but there are {found} jobs with {entries} entries and"
                f" {waiting} waiting; {completed} entries are completed by {completions} records,"
                f" {otherwise} ended otherwise"
            )

    def _settled(self, read: Callable[[], int], *, others: int) -> int:
        """What *read* gives when besides the guests at most *others* are left, the harness's, and it stands still."""
        others += self._guests
        deadline = time.monotonic() + QUIET
        while (left := int(_one(self._admin, BACKENDS, self._name)[0])) > others:
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{left} connections to the measured database are still open after {QUIET:g} s")
            time.sleep(0.01)
        if self._admin.info.server_version >= 150000:
            return read()  # statistics are in shared memory, and were there before the backend went
        before = read()
        while True:  # a collector process gets to them within half a second
            time.sleep(0.7)
            if (now := read()) == before or time.monotonic() > deadline:
                return now
            before = now

    def _leave(self) -> None:
        if self._inside is not None:
            self._inside.close()
            self._inside = None


def _one(conn: psycopg.Connection[Any], query: str, params: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
    row: tuple[Any, ...] | None = conn.execute(query, params).fetchone()
    assert row is not None
    return row
