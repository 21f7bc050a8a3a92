"""Results that are kept, and who waits for them.

Each docstring names the guard that the test fails without.
"""

from __future__ import annotations

import enum
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

import awa
from awa import JobFailed, JobNotFound, ResultNotKept, Snooze, ValidationError
from awa.storage import results
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count, ended, fence, in_state, rescue, terminate
from tests.fixtures.proxy import Proxy

Conn = psycopg.Connection[Any]

HELD = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted"
HOLDERS = HELD.replace("count(*)", "count(DISTINCT pid)")
LISTENERS = """
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND application_name = 'awa client' AND query <> ''
"""


class Color(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    at: datetime


AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)

KEPT: list[tuple[Any, Any, Any]] = [
    (Any, None, None),
    (Any, 0, 0),
    (Any, {"a": [1.5, "é", None, {"b": True}]}, {"a": [1.5, "é", None, {"b": True}]}),
    (int, 2**63 - 1, 2**63 - 1),
    (Color, Color.RED, "red"),
    (Point, Point(1, AT), {"x": 1, "at": AT.isoformat()}),
    (list[Point], [Point(1, AT)], [{"x": 1, "at": AT.isoformat()}]),
    (tuple[int, str], (1, "a"), [1, "a"]),
    (set[int], {3, 1}, [1, 3]),
    (Decimal, Decimal("1.10"), "1.10"),
    (date | None, date(2026, 1, 2), "2026-01-02"),
    (UUID, UUID(int=1), str(UUID(int=1))),
    (bytes, b"\0\xff", "AP8="),
    (Point | Snooze, Point(2, AT), {"x": 2, "at": AT.isoformat()}),
    ("NotThere", [1], [1]),
    (object(), "x", "x"),
    (complex, 1, 1),
]


def test_what_a_handler_returns_is_kept_by_its_declared_type(client: awa.Client, start_worker: StartWorker) -> None:
    """Guard: result_dumper; an annotation that stands for nothing storable does not count."""

    def declare(n: int, annotation: Any, value: Any) -> awa.Task[[], Any]:
        def work() -> Any:
            return value

        work.__annotations__["return"] = annotation
        return client.task(kind=f"k{n}", keep_result=True)(work)

    jobs = [client.insert(declare(n, kind, value).bind()) for n, (kind, value, _) in enumerate(KEPT)]
    start_worker(client)
    assert [job.result(timeout=20) for job in jobs] == [stored for _, _, stored in KEPT]
    # as often as one likes, and by the id alone
    assert client.result(jobs[1].id) == 0


def test_a_value_that_cannot_be_kept_fails_the_job_at_once(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    """Guard: the handler has done its work; a retry would do it again for the same value.

    Looking at a value may raise anything, which is an error of this job like another.
    """

    class Odd:
        @property
        def x(self) -> int:
            raise RuntimeError("no")

    runs: list[str] = []
    values: dict[str, Any] = {
        "object": [object()],
        "nan": {"a": float("nan")},
        "size": "x" * 300_000,
        "type": 1,
        "odd": Odd(),
    }

    def work(which: str) -> Any:
        runs.append(which)
        return values[which]

    @client.task(keep_result=True, kind="typed")
    def typed(which: str) -> Point:
        return work(which)  # type: ignore[no-any-return]

    @client.task(keep_result=True, kind="untyped")
    def untyped(which: str) -> Any:
        return work(which)

    @client.task()
    def clean_up() -> None: ...

    start_worker(client)
    found = {}
    for which in values:
        task = typed if which == "type" else untyped
        with pytest.raises(JobFailed) as caught:
            client.insert(task.bind(which), on_failed=clean_up.bind()).result(timeout=20)
        assert (caught.value.state, caught.value.error is None) == ("failed", False)
        found[which] = str(caught.value)
    assert runs == list(values)
    assert "result[0] is a object, which JSON cannot hold" in found["object"]
    assert "result.a is nan" in found["nan"]
    assert "result takes 300,002 bytes as JSON, the limit is 262,144" in found["size"]
    assert "result must be a" in found["type"]
    wait_until(lambda: count(conn, "SELECT count(*) FROM awa.jobs WHERE kind = 'clean_up'") == len(values))


def test_how_a_job_ended_before_anybody_asked(client: awa.Client, start_worker: StartWorker) -> None:
    @client.task(keep_result=True, max_attempts=1)
    def work(how: str) -> str:
        if how == "raise":
            raise ValueError("no such luck")
        if how == "cancel":
            raise awa.Cancel("not needed")
        return how

    @client.task()
    def plain() -> int:
        return 1

    start_worker(client)
    jobs = [client.insert(work.bind(how)) for how in ("raise", "cancel", "done")]
    jobs.append(client.insert(plain.bind()))
    for job in jobs:
        ended(client, job)
    failed, cancelled, done, unkept = jobs
    with pytest.raises(JobFailed, match=r"job \d+ is failed: ValueError: no such luck") as caught:
        failed.result()
    assert (caught.value.job_id, caught.value.state) == (failed.id, "failed")
    assert caught.value.error is not None
    assert "ValueError" in caught.value.error["traceback"]
    with pytest.raises(JobFailed, match="is cancelled: Cancel: not needed"):
        cancelled.result()
    assert done.result() == "done"
    with pytest.raises(ResultNotKept, match="keep_result=True") as unkept_error:
        unkept.result()
    assert unkept_error.value.job_id == unkept.id
    with pytest.raises(JobNotFound):
        client.result(10**12, timeout=10)
    for timeout in (-1, float("nan"), "1"):
        with pytest.raises(ValidationError, match="timeout"):
            done.result(timeout=timeout)  # type: ignore[arg-type]


def test_a_timeout_tells_what_the_job_is_doing(client: awa.Client, start_worker: StartWorker) -> None:
    go_on = threading.Event()

    @client.task(keep_result=True)
    def work() -> None:
        assert go_on.wait(20)

    later, first = client.insert(work.bind(), delay=600), client.insert(work.bind())
    with pytest.raises(TimeoutError, match=r"job \d+ has not ended within 0 s: it is scheduled"):
        later.result(timeout=0)
    with pytest.raises(TimeoutError, match="it is available"):
        first.result(timeout=0.05)
    start_worker(client)
    in_state(client, first, "running")
    with pytest.raises(TimeoutError, match=r"within 0.2 s: it is running"):
        first.result(timeout=0.2)
    go_on.set()
    assert first.result(timeout=20) is None
    client.cancel(later.id)
    with pytest.raises(JobFailed, match="is cancelled"):
        later.result(timeout=20)


class Waiting:
    """Threads that wait for the results of jobs."""

    def __init__(self, waits: list[Callable[[], Any]]) -> None:
        self.found: dict[int, Any] = {}
        self.threads = [threading.Thread(target=self._wait, args=(n, wait)) for n, wait in enumerate(waits)]
        for thread in self.threads:
            thread.start()

    def _wait(self, n: int, wait: Callable[[], Any]) -> None:
        try:
            self.found[n] = wait()
        except Exception as error:
            self.found[n] = type(error)

    def join(self) -> dict[int, Any]:
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()
        return self.found


def test_many_threads_wait_over_one_connection_and_are_woken(
    client: awa.Client, start_worker: StartWorker, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: the notification, and that whoever leads hands over: nobody polls within the test's time.

    The leader's own wait ends first, by its timeout, then those of others in no order; two threads wait for one job.
    """
    monkeypatch.setattr(results, "FIRST_PAUSE", 600.0)
    monkeypatch.setattr(results, "LONGEST_PAUSE", 600.0)
    gates = [threading.Event() for _ in range(20)]

    @client.task(keep_result=True)
    def work(n: int) -> int:
        assert gates[n].wait(30)
        return n

    jobs = [client.insert(work.bind(n)) for n in range(20)]
    start_worker(client, threads=20)
    wait_until(lambda: all(client.get(job.id).state == "running" for job in jobs), timeout=20)
    leader = Waiting([lambda: jobs[0].result(timeout=1)])
    wait_until(lambda: count(conn, HELD) >= 1, timeout=20)
    waiting = Waiting([lambda job=job: job.result(timeout=60) for job in [*jobs, jobs[7]]])  # type: ignore[misc]
    assert leader.join() == {0: TimeoutError}
    wait_until(lambda: len(client._results._waits) == 20 and all(w.is_locked for w in client._results._waits.values()))
    own = "objid IN (SELECT l.objid FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory'"
    own += " AND a.application_name = 'awa client')"
    assert count(conn, f"{HOLDERS} AND {own}") == 1
    assert count(conn, f"{HELD} AND {own}") >= 20
    for n in (13, 0, 19, 7):
        gates[n].set()
        wait_until(lambda n=n: n in waiting.found, timeout=20)  # type: ignore[misc]
    for gate in gates:
        gate.set()
    assert waiting.join() == {n: n for n in range(20)} | {20: 7}
    # what was held is given back with the connection
    assert client._results._line is None
    wait_until(lambda: count(conn, f"{HELD} AND {own}") == 0)


def test_an_end_that_tells_nobody_is_found_by_a_look(
    client: awa.Client, start_worker: StartWorker, conn: Conn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guard: the polls; notifications are lost here. A kind that keeps nothing is found by a search.

    The server's locks are finite, so one process takes no more than some of them, and polls for the others.
    """
    monkeypatch.setattr(results._Line, "take_notified", lambda self: [])
    monkeypatch.setattr(results, "MOST_LOCKS", 2)
    gate = threading.Event()

    @client.task(keep_result=True)
    def kept() -> int:
        assert gate.wait(30)
        return 1

    @client.task()
    def plain() -> None:
        assert gate.wait(30)

    start_worker(client)
    jobs = [client.insert(task.bind()) for task in (kept, kept, kept, plain)]
    waiting = Waiting([lambda job=job: job.result(timeout=60) for job in jobs])  # type: ignore[misc]
    wait_until(lambda: len(client._results._waits) == 4, timeout=20)
    wait_until(lambda: sum(wait.is_locked for wait in client._results._waits.values()) == 2, timeout=20)
    assert client._results._line is not None
    assert client._results._line.locks == 2
    gate.set()
    assert waiting.join() == {0: 1, 1: 1, 2: 1, 3: ResultNotKept}


def test_a_job_that_vanishes_is_not_waited_for(client: awa.Client, conn: Conn) -> None:
    """Guard: the search, which tells a job that is gone from one that runs."""
    job = client.insert({}, kind="nobody")
    waiting = Waiting([lambda: job.result(timeout=60)])
    wait_until(lambda: client._results._line is not None, timeout=20)
    conn.execute("DELETE FROM awa.jobs")
    assert waiting.join() == {0: JobNotFound}


def test_waiting_outlives_its_connection(client: awa.Client, start_worker: StartWorker, conn: Conn) -> None:
    """Guard: the leader opens another connection, and takes the locks again."""
    gate = threading.Event()

    @client.task(keep_result=True)
    def work(n: int) -> int:
        assert gate.wait(30)
        return n

    start_worker(client)
    jobs = [client.insert(work.bind(n)) for n in range(3)]
    waiting = Waiting([lambda job=job: job.result(timeout=60) for job in jobs])  # type: ignore[misc]
    wait_until(lambda: sum(wait.is_locked for wait in client._results._waits.values()) == 3, timeout=20)
    before = client._results._line
    assert terminate(conn, "client") >= 1
    wait_until(lambda: client._results._line not in (before, None), timeout=20)
    gate.set()
    assert waiting.join() == {0: 0, 1: 1, 2: 2}


def test_through_a_transaction_pooler_it_polls_and_leaves_nothing_in_sessions(
    pooled: str, database: str, start_worker: StartWorker
) -> None:
    """Guard: no LISTEN and no session lock where the next transaction may run in another backend."""
    from tests.fixtures.pooler import left_behind

    client = awa.Client(pooled)
    gate = threading.Event()

    @client.task(keep_result=True)
    def work() -> int:
        assert gate.wait(30)
        return 1

    start_worker(client)
    job = client.insert(work.bind())
    waiting = Waiting([lambda: job.result(timeout=60)])
    wait_until(lambda: client._results._line is not None, timeout=20)
    assert client._results._line is not None
    assert client._results._line.is_pooled
    gate.set()
    assert waiting.join() == {0: 1}
    assert left_behind(pooled) == []
    client.close()


FORKS = """
import os, sys, threading, time
import awa

client = awa.Client(sys.argv[1])

@client.task(keep_result=True)
def work(n: int) -> int:
    return n

waited = client.insert(work.bind(0), delay=600)
outcome = []

def wait():
    try:
        waited.result()
    except awa.JobFailed as error:
        outcome.append(error.state)

thread = threading.Thread(target=wait)
thread.start()
while client._results._line is None:
    time.sleep(0.01)
job = client.insert(work.bind(7))
pid = os.fork()
if pid == 0:
    try:
        assert job.result(timeout=30) == 7
        client.close()
    except BaseException as error:
        os.write(2, f"{error!r}".encode())
        os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
client.cancel(waited.id)
thread.join(30)
client.close()
print(outcome)
"""


def test_a_forked_child_waits_by_itself(
    client: awa.Client, start_worker: StartWorker, database: str, tmp_path: Path
) -> None:
    """Guard: the child forgets who leads in its parent, where another thread waits on."""

    @client.task(keep_result=True)
    def work(n: int) -> int:
        time.sleep(0.2)
        return n

    start_worker(client)
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    done = subprocess.run([sys.executable, script, database], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['cancelled']\n", "")


# In the handler's own transaction


def test_a_handler_completes_itself_with_a_result(
    database: str, client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    """Guard: complete_v2 stores it. Rolled back, what the handler returns counts; refused, nothing was sent."""
    refused: list[str] = []

    @client.task(keep_result=True)
    def work(how: str) -> Point | None:
        job = awa.current_job()
        with psycopg.connect(database) as own:
            if how == "odd":
                with pytest.raises(ValidationError) as caught:
                    job.complete(own, result=object())
                refused.append(caught.value.path)
            else:
                job.complete(own, result=None if how == "none" else Point(1, AT))
            if how == "rolled back":
                own.rollback()
        return Point(2, AT)

    @client.task()
    def plain() -> None:
        with psycopg.connect(database) as own:
            with pytest.raises(awa.ConfigError, match="keep_result=True") as caught:
                awa.current_job().complete(own, result=1)
            refused.append(str(caught.value))

    start_worker(client)
    one, two = ({"x": x, "at": AT.isoformat()} for x in (1, 2))
    for how, stored in (("committed", one), ("none", None), ("rolled back", two), ("odd", two)):
        assert client.insert(work.bind(how)).result(timeout=20) == stored
    with pytest.raises(ResultNotKept):
        client.insert(plain.bind()).result(timeout=20)
    assert refused[0] == "result"
    assert "'plain' keep none" in refused[1]


@pytest.mark.parametrize("what", ["answer", "request"])
def test_a_lost_acknowledgement_neither_doubles_nor_loses_what_follows(
    client: awa.Client, start_worker: StartWorker, conn: Conn, proxy: Proxy, proxied: str, what: Any
) -> None:
    """Guard: one row of attempt_ends, whoever writes it, with result and follow-up.

    ``answer``: the handler's transaction has committed, and the worker's record is refused. ``request``: it has not,
    and the worker's record has the returned value and appends the follow-up.
    """

    @client.task(keep_result=True)
    def work() -> str:
        try:
            with psycopg.connect(proxied) as own:
                awa.current_job().complete(own, result="committed")
                proxy.lose(what, b"COMMIT")
        except psycopg.OperationalError:
            pass
        return "returned"

    @client.task()
    def after() -> None: ...

    start_worker(client)
    job = client.insert(work.bind(), on_completed=after.bind())
    assert job.result(timeout=20) == ("committed" if what == "answer" else "returned")
    wait_until(lambda: count(conn, "SELECT count(*) FROM awa.jobs WHERE kind = 'after'") == 1)
    assert count(conn, "SELECT count(*) FROM awa.attempt_ends WHERE id = %s", job.id) == 1


def test_a_result_of_an_attempt_that_was_taken_over_is_refused(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    """Guard: the fence. The late value is not kept, and what follows comes from the attempt that counts."""
    go_on = threading.Event()

    @client.task(keep_result=True)
    def work() -> int:
        job = awa.current_job()
        if job.attempt == 1:
            assert go_on.wait(30)
        return job.attempt

    @client.task()
    def after() -> None: ...

    worker = start_worker(client)
    job = client.insert(work.bind(), on_completed=after.bind())
    in_state(client, job, "running")
    fence(conn, worker.runtime)
    rescue(conn, worker.runtime)
    go_on.set()
    assert job.result(timeout=20) == 2
    wait_until(lambda: count(conn, "SELECT count(*) FROM awa.jobs WHERE kind = 'after'") == 1)
