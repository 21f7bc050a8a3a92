"""Draining, latency and inserts with a server as far away as in a cloud, beside the same nearby.

Far away means: 1 ms on the wire each way, by a process in between that passes everything on that much later; and 2 ms
for each flush of the WAL, by the server's own ``commit_delay`` (with ``commit_siblings`` 0 it sleeps before every one).
That is where a slow disk makes a commit wait, with the lock on the WAL held: who commits meanwhile shares the next
flush. Asynchronous commits do not wait, as they would not there.

The two take turns: every variant is a repetition of its own, with a database of its own in one server.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from benchmarks.compare import Medians
from benchmarks.record import BenchmarkError, Plan, Result
from benchmarks.scenarios import drain, insert, latency
from benchmarks.wire import longer_way

WIRE_MS = 1.0
"""Milliseconds each way."""

COMMIT_US = 2000
"""Microseconds that a flush of the WAL takes longer."""

MEASURED = {
    "drain": (drain.run, "noop"),
    "latency": (latency.run, "paced"),
    "single": (insert.run, "single"),
    "many": (insert.run, "many"),
}
"""What is measured, by which scenario and variant."""

VARIANTS = tuple(f"{what}-{where}" for what in MEASURED for where in ("near", "far"))

SHARE_OF_INSERTS = 10
"""Single inserts are a tenth of those of ``insert:single``: each takes some milliseconds."""


def run(plan: Plan) -> list[Result]:
    """One of them, near or far."""
    what, _, where = plan.variant.partition("-")
    measure, variant = MEASURED[what]
    jobs = plan.jobs // SHARE_OF_INSERTS if what == "single" else plan.jobs
    with tempfile.TemporaryDirectory(prefix="awa-wire-") as directory:
        if where == "near":
            results = measure(replace(plan, variant=variant, jobs=jobs))
        else:
            _delay_flushes(plan)
            with longer_way(plan.database, Path(directory), WIRE_MS) as database:
                results = measure(replace(plan, variant=variant, jobs=jobs, database=database))
    return [replace(result, variant=_name(what, where, result.variant)) for result in results]


def _name(what: str, where: str, variant: str) -> str:
    return f"{variant}-{where}" if variant in ("bare", "unique") else f"{what}-{where}"


def _delay_flushes(plan: Plan) -> None:
    """Have every session of the database wait before it flushes.

    Raises:
        BenchmarkError: The server would not, or the way there is not a socket's.
    """
    given = conninfo_to_dict(plan.database)
    if not str(given.get("host", "")).startswith("/"):
        raise BenchmarkError("cloud needs a server on this machine, with a socket's directory as the host")
    with psycopg.connect(plan.admin, autocommit=True) as conn:
        if conn.execute("SHOW fsync").fetchone() != ("on",):
            raise BenchmarkError("cloud needs fsync on: a server that flushes nothing does not wait for it")
        for setting in (f"commit_delay = {COMMIT_US}", "commit_siblings = 0"):
            name = sql.Identifier(str(given["dbname"]))
            conn.execute(sql.SQL("ALTER DATABASE {} SET {}").format(name, sql.SQL(setting)))


def conclude(medians: Medians) -> Iterator[str]:
    """What the distance costs."""
    for what in ("drain", "single", "many"):
        near, far = medians.get(f"{what}-near", {}), medians.get(f"{what}-far", {})
        if near.get("jobs_per_s") and far.get("jobs_per_s"):
            yield f"{what}: far away at {far['jobs_per_s'] / near['jobs_per_s']:.1%} of the rate nearby"
    near, far = medians.get("latency-near", {}), medians.get("latency-far", {})
    if near.get("p50_ms") and far.get("p50_ms"):
        more = [far[name] - near[name] for name in ("p50_ms", "p99_ms")]
        yield f"latency: {more[0]:.1f} ms more at p50, {more[1]:.1f} ms more at p99"
