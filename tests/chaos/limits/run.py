"""One run: limited queues under torment, then the drain, then the checks."""

from __future__ import annotations

import heapq
import signal
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

import psycopg

from awa.storage.check import check_storage
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from tests.chaos import checks, ledger
from tests.chaos.crew import WORKER, Crew, Member
from tests.chaos.limits import evidence
from tests.chaos.limits.operator import Operator, Sabotage
from tests.chaos.limits.sampler import Sampler
from tests.chaos.plan import Plan
from tests.chaos.report import Report, count_errors, count_figures
from tests.chaos.run import Tell, bounded

LIMITED, ORDERED = "limited", "ordered"
"""The queues: one with a limit of its own and for each of many keys; one of jobs in order, some of which share keys."""

KEYS = {LIMITED: 50, ORDERED: 20}
"""How many keys there are."""

MOST_OPEN = 600
"""Open jobs above which no more are inserted."""

DRAINED = 20.0
"""Seconds without one more job ended after which the rest is taken for stuck."""


def run(
    database: str,
    directory: Path,
    *,
    seed: int,
    seconds: float,
    workers: int = 4,
    sabotage: Sabotage | None = None,
    drained: float = DRAINED,
    tell: Tell,
) -> Report:
    """Torment workers of limited queues for *seconds*, and say what came of it.

    Args:
        database: The address of an empty database.
        directory: For journals and logs.
        sabotage: What is spoilt on purpose, which the report must then show.
        drained: Seconds without one more job ended after which nobody waits any longer.

    Raises:
        TookTooLong: It had not ended long after it should.
    """
    plan = Plan(seed, seconds, directory, database)
    tell(f"seed {seed}, {seconds:.0f} s in {directory}")
    with bounded(seconds + 300), psycopg.connect(database, autocommit=True, application_name="chaos") as conn:
        migrate(conn, Schema())
        evidence.install(conn)
        operator = Operator(database, directory, plan.random("operator"), sabotage)
        crew = _make_crew(plan, workers)
        try:
            _wait_until_up(crew)
            torment = Torment(conn, plan, crew, operator)
            with Sampler(database) as sampler:
                torment.go_on(tell)
                ran = time.monotonic() - torment.begun
                _drain(conn, crew, drained, tell)
                crew.stop(crew.workers, 20.0)
            crew.complaints += checks.find_leftovers(conn)
        finally:
            crew.kill()
            operator.close()
        tell("checking")
        ledger.load(conn, directory, [])
        verdicts = [*checks.check(conn), *evidence.check(conn), *sampler.verdicts()]
        found = check_storage(conn, Schema()).findings
        shown = [f"{finding.where or 'storage'}: {finding.text}" for finding in found]
        verdicts.append(checks.Verdict("found by `awa storage check`", len(found), shown[: checks.SHOWN]))
        figures = count_figures(conn, directory)
        figures |= {
            "samples": sampler.samples,
            "most attempts open at once": sampler.most_open,
            "jobs inserted in a second": round(torment.marks / ran),
        }
        return Report(
            seed, [], dict(operator.done + torment.done), figures, verdicts, crew.complaints, count_errors(directory)
        )


def _make_crew(plan: Plan, workers: int) -> Crew:
    crew = Crew()
    for number in range(workers):
        env = WORKER | {"CHAOS_WORKER": str(number), "AWA_QUEUES": f"{LIMITED},{ORDERED}"}
        command = ["awa.worker", "tests.chaos.limits.app:client"]
        crew.workers.append(Member(plan, f"worker-{number}", command, env, started="awa.worker: worker "))
    return crew


class Torment:
    """Inserts, and does one deed after the other, each kind at its own random times."""

    def __init__(self, conn: psycopg.Connection[object], plan: Plan, crew: Crew, operator: Operator) -> None:
        self.done: Counter[str] = Counter()
        self.marks = 0
        """How many jobs were inserted."""
        self.begun = time.monotonic()
        self._conn = conn
        self._plan = plan
        self._crew = crew
        self._operator = operator
        self._chance = plan.random("torment")
        self._numbers = count()
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._most_running = 3
        operator.limit(LIMITED, max_running=3, per_key=1)
        operator.limit(ORDERED, max_running=None, per_key=2)
        for interval, deed in (
            (0.05, self._insert),
            (0.3, operator.cancel),
            (4.0, self._change_limit),
            (3.0, self._change_limit_of_key),
            (5.0, self._pause),
            (6.0, operator.turn),
            (5.0, self._kill),
            (8.0, self._freeze),
        ):
            self._repeat(deed, interval)

    def go_on(self, tell: Tell) -> None:
        """Until the time is up; then everything is thawed, and no queue is paused."""
        until = time.monotonic() + self._plan.seconds
        tells_at = time.monotonic() + 5.0
        while (left := until - time.monotonic()) > 0:
            self._crew.keep_up(with_producers=False)
            while self._agenda[0][0] <= time.monotonic():
                _, _, deed = heapq.heappop(self._agenda)
                deed()
            if time.monotonic() > tells_at:
                tells_at += 5.0
                tell(f"{left:4.0f} s left, {self.marks:,} jobs inserted")
            time.sleep(max(0.0, min(self._agenda[0][0] - time.monotonic(), left, 0.05)))
        for member in self._crew.workers:
            member.signal(signal.SIGCONT)
        for queue in KEYS:
            self._operator.resume(queue)

    def _at(self, seconds: float, deed: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time.monotonic() + seconds, next(self._numbers), deed))

    def _repeat(self, deed: Callable[[], None], interval: float) -> None:
        def again() -> None:
            deed()
            self._repeat(deed, interval)

        self._at(self._chance.uniform(0.5, 1.5) * interval, again)

    def _insert(self) -> None:
        """A few jobs in one transaction, with marks in the order in which they must run."""
        if self.marks % 10 == 0 and ledger.count_open(self._conn) > MOST_OPEN:
            return
        rows = []
        for _ in range(10):
            self.marks += 1
            queue = self._chance.choice([LIMITED, ORDERED])
            key = f"key {self._chance.randrange(KEYS[queue])}"
            keys = (key, None) if queue == LIMITED else (self._chance.choice([None, None, "a", "b"]), key)
            rows.append((self.marks, queue, *keys))
        with self._conn.transaction(), self._conn.cursor() as cursor:
            cursor.executemany("INSERT INTO ledger.keyed VALUES (%s, %s, %s, %s)", rows)
            cursor.executemany(
                "INSERT INTO awa.jobs (queue, kind, args, concurrency_key, ordering_key)"
                " SELECT queue, 'limited', json_build_object('mark', mark), concurrency_key, ordering_key"
                "   FROM ledger.keyed WHERE mark = %s",
                [row[:1] for row in rows],
            )
            cursor.execute("SELECT awa.ring(%s)", [list(KEYS)])

    def _change_limit(self) -> None:
        self._most_running = 8 - self._most_running  # 3, 5, 3
        self._operator.limit(LIMITED, max_running=self._most_running, per_key=1)

    def _change_limit_of_key(self) -> None:
        self._operator.limit(ORDERED, max_running=None, per_key=self._chance.choice([1, 2, 3]))

    def _pause(self) -> None:
        queue = self._chance.choice(list(KEYS))
        self._operator.pause(queue)
        self._at(self._chance.uniform(0.3, 3.0), lambda: self._operator.resume(queue))

    def _someone(self) -> Member | None:
        ups = [member for member in self._crew.workers if member.is_up]
        return self._chance.choice(ups) if ups else None

    def _kill(self) -> None:
        if (member := self._someone()) is not None:
            member.signal(signal.SIGKILL)
            self.done["worker killed"] += 1

    def _freeze(self) -> None:
        """Mostly for longer than it takes to be taken for dead."""
        if (member := self._someone()) is not None:
            member.signal(signal.SIGSTOP)
            self.done["worker frozen"] += 1
            self._at(self._chance.uniform(1.0, 4.0), lambda: member.signal(signal.SIGCONT))


def _wait_until_up(crew: Crew) -> None:
    """On a busy machine a worker takes longer to start than a short run lasts."""
    crew.keep_up(with_producers=False)
    until = time.monotonic() + 60.0
    while not all(member.works for member in crew.workers) and time.monotonic() < until:
        time.sleep(0.1)


def _drain(conn: psycopg.Connection[object], crew: Crew, drained: float, tell: Tell) -> None:
    """Keep the workers up until every job has ended, as long as some still do."""
    least = ledger.count_open(conn)
    progress = time.monotonic()
    told = 0.0
    while least > 0 and time.monotonic() < progress + drained:
        if time.monotonic() > told:
            told = time.monotonic() + 10
            tell(f"draining, {least} jobs are open")
        crew.keep_up(with_producers=False)
        time.sleep(0.2)
        if (left := ledger.count_open(conn)) < least:
            least, progress = left, time.monotonic()
