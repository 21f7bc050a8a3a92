"""What the bell costs many producers: single inserts from 1, 16 and 64 connections while a worker runs those jobs.

Python producers would fill the machine by themselves, so pgbench sends the client's own statement, prepared, each in a
transaction of its own; the variant ``off`` is an installation without notifications. The times are those of one insert
as pgbench saw it. WAL, commits and dead rows are those of producers and worker together, warm-up included.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from awa.insert import Defaults, NewJob, prepare
from awa.registry import Registry
from awa.storage import jobs
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from benchmarks.compare import Medians, compare
from benchmarks.observer import Observer
from benchmarks.processes import WorkerProcess, clean_environment
from benchmarks.record import BenchmarkError, Plan, Result, percentiles
from benchmarks.scenarios.tasks import noop

VARIANTS = ("1-on", "1-off", "16-on", "16-off", "64-on", "64-off")

WARM_UP = 1
"""Seconds of producing before the measurement."""


def run(plan: Plan) -> list[Result]:
    """Have pgbench insert and a worker keep up; check that every job ran once the producers have stopped."""
    migrate(plan.database, Schema())
    connections, _, notify = plan.variant.partition("-")
    with tempfile.TemporaryDirectory() as directory, Observer(plan.admin, plan.database) as observer:
        script_file = Path(directory, "insert.sql")
        script_file.write_text(script(notify=notify == "on"), encoding="utf-8")
        before = observer.counters()
        with WorkerProcess(plan, {"AWA_NOTIFY": notify}) as worker:
            warm_up, _, _ = _produce(plan, script_file, int(connections), WARM_UP)
            observer.wait_completed(warm_up, check=worker.check)
            inserted, rate, times = _produce(plan, script_file, int(connections), max(round(plan.duration), 1))
            observer.wait_completed(warm_up + inserted, check=worker.check)
            worker.stop()
        costs = before.per_job(observer.counters(), warm_up + inserted)
        observer.check_every_job_ran(warm_up + inserted)
    return [Result(plan.variant, inserted, rate, **percentiles(times), **costs)]


def conclude(medians: Medians) -> Iterator[str]:
    """What the bell costs, by the number of connections."""
    for variant in VARIANTS:
        if variant.endswith("-on"):
            yield from compare(medians, variant, variant.removesuffix("-on") + "-off", "jobs_per_s")


def values() -> dict[str, object]:
    """The parameters of one insert, as ``client.insert`` sends them."""
    row = prepare(NewJob(noop.bind(0)), Registry(), Defaults())
    return {
        "queue": row.queue,
        "lane": 2 * row.priority + 1,
        "priority": row.priority,
        "kind": row.kind,
        "args": row.args.decode(),
        "max_attempts": row.max_attempts,
    }


def script(*, notify: bool) -> str:
    """The statement of ``client.insert`` for pgbench, which sends its variables as parameters.

    Raises:
        BenchmarkError: The statement has a parameter that is not known here.
    """
    statement = jobs._statement(Schema(), jobs.INSERT_ONE, notify)
    for name in values():
        statement = statement.replace("%s", f":{name}", 1)
    if "%s" in statement:
        raise BenchmarkError(f"client.insert has a parameter that benchmarks/scenarios/producers.py lacks: {statement}")
    return statement.strip() + ";\n"


def _produce(plan: Plan, script_file: Path, connections: int, seconds: int) -> tuple[int, float, list[float]]:
    """Insert for some seconds: how many jobs, how many a second without the time to connect, and each one's seconds."""
    assert plan.pgbench is not None
    with tempfile.TemporaryDirectory() as logs:
        command = [plan.pgbench, "--no-vacuum", "--protocol=prepared", f"--file={script_file}", f"--time={seconds}"]
        command += [f"--client={connections}", f"--jobs={min(connections, 2)}", "--log", f"--log-prefix={logs}/log"]
        command += [f"--define={name}={value}" for name, value in values().items()]
        address: dict[str, Any] = conninfo_to_dict(plan.database)
        password = str(address.pop("password", ""))
        done = subprocess.run(
            [*command, make_conninfo(**address)],
            env=clean_environment(**({"PGPASSWORD": password} if password else {})),  # arguments are for all to see
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds + 60,
        )
        counted = re.search(r"^number of transactions actually processed: (\d+)", done.stdout, re.MULTILINE)
        rate = re.search(r"^tps = ([\d.]+) \(without initial connection time\)", done.stdout, re.MULTILINE)
        if done.returncode != 0 or counted is None or rate is None:
            raise BenchmarkError(f"pgbench ended with exit code {done.returncode}:\n{done.stdout}\n{done.stderr}")
        lines = [line for file in Path(logs).iterdir() for line in file.read_text(encoding="ascii").splitlines()]
    times = [int(line.split()[2]) / 1e6 for line in lines]  # client, transaction, microseconds, ...
    return int(counted[1]), float(rate[1]), times
