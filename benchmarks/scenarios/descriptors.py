"""The catalogue: writing 2,000 descriptions, and reading 500 that a thousand runtimes declare.

``write`` are the statements of a worker that describes 2,000 queues: ``write-tick`` when every row was last seen half
an interval ago and is written, ``write-idle`` when none has to be, ``write-start`` into empty tables, and
``write-change`` when every one says something else. ``read`` is what ``client.admin.list_queues`` reads of it, beside
1,000 live runtimes: ``read-same`` when all of them declare the same, ``read-drift`` when half of them differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import psycopg

from awa.descriptors import Descriptor
from awa.storage import descriptors
from awa.storage.connection import connect
from awa.storage.migrate import migrate
from awa.storage.schema import Schema
from awa.storage.snapshot import one_snapshot
from benchmarks.compare import Medians, with_goal
from benchmarks.record import BenchmarkError, Plan, Result, percentiles

WRITE, READ = "write", "read"

VARIANTS = (WRITE, READ)

DESCRIBED = {WRITE: 2_000, READ: 500}

RUNTIMES = 1_000

TIMES = 40
"""Calls of each that are timed."""

REGISTER = """
    INSERT INTO awa.runtime_instances (uuid, hostname, pid, version, heartbeat_ms, last_seen_at)
    SELECT gen_random_uuid(), 'host', 1, '0', 5000, now() + interval '1 h' FROM generate_series(1, %s)
"""


def run(plan: Plan) -> list[Result]:
    """Time each of them; check that what is stored and told is right."""
    schema = Schema()
    migrate(plan.database, schema)
    with connect(plan.database, name="benchmark") as conn:
        return list((_write if plan.variant == WRITE else _read)(conn, schema))


def describe(count: int, version: int) -> dict[str, Descriptor]:
    """So many queues as one version of a program describes them, in some 300 bytes each."""
    return {
        f"queue-{n:05}": Descriptor(
            display_name=f"Queue number {n}",
            description=f"What comes in here, who waits for it and what to do when it does not move, as of {version}",
            owner="team@example.com",
            docs_url=f"https://docs.example.com/queues/{n}",
            tags=("prod", "mail"),
            extra={"team": "growth", "tier": n % 3},
        )
        for n in range(count)
    }


def _write(conn: psycopg.Connection, schema: Schema) -> Iterator[Result]:
    count = DESCRIBED[WRITE]
    versions = [describe(count, version) for version in range(2)]
    turn = 0

    def sync(*, is_start: bool = False) -> None:
        queues = versions[turn % 2]
        descriptors.sync(conn, schema, queues=queues, kinds={}, interval=10.0, is_start=is_start)

    def change() -> None:
        nonlocal turn
        turn += 1

    def start() -> None:
        sync(is_start=True)

    def empty() -> None:
        conn.execute("TRUNCATE awa.queue_descriptors, awa.descriptor_versions")

    def age() -> None:
        conn.execute("VACUUM awa.queue_descriptors")
        conn.execute("UPDATE awa.queue_descriptors SET last_seen_at = now() - interval '6 s'")

    yield _timed("write-start", count, start, before=empty)
    yield _timed("write-change", count, start, before=change)
    yield _timed("write-tick", count, sync, before=age)
    yield _timed("write-idle", count, sync)
    found = conn.execute("SELECT queue, descriptor_hash FROM awa.queue_descriptors").fetchall()
    if dict(found) != {name: one.hash for name, one in versions[turn % 2].items()}:
        raise BenchmarkError(f"{len(found)} descriptions are stored, not the {count} that were written last")


def _read(conn: psycopg.Connection, schema: Schema) -> Iterator[Result]:
    count = DESCRIBED[READ]
    old, new = describe(count, 0), describe(count, 1)
    for queues in (old, new):
        descriptors.sync(conn, schema, queues=queues, kinds={}, interval=10.0, is_start=True)
    conn.execute(REGISTER, [RUNTIMES])
    for name, others in (("same", new), ("drift", old)):
        for runtime in range(1, RUNTIMES + 1):
            queues = others if runtime % 2 else new
            told = {queue: one.hash for queue, one in queues.items()}
            descriptors.tell(conn, schema, runtime, queues=told, kinds={})

        def read() -> dict[str, descriptors.DescriptorInfo]:
            with one_snapshot(conn, schema) as look:
                return descriptors.read_descriptors(look, "queue")

        yield _timed(f"read-{name}", count, read)
        drifting = {len(drift.runtimes) for info in read().values() for drift in info.drift}
        live = {info.live_runtimes for info in read().values()}
        if live != {RUNTIMES} or drifting != ({RUNTIMES // 2} if name == "drift" else set()):
            raise BenchmarkError(f"{name}: {RUNTIMES} runtimes should live, but it told {live}, and {drifting} differ")


def _timed(
    variant: str, count: int, call: Callable[[], object], *, before: Callable[[], object] = lambda: None
) -> Result:
    times = []
    for _ in range(TIMES):
        before()
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return Result(variant, count, count * TIMES / sum(times), **percentiles(times))


def conclude(medians: Medians) -> Iterator[str]:
    """The medians beside what is hoped for."""
    for variant, goal in (("write-tick", 24), ("read-same", 50), ("read-drift", 50)):
        if "p50_ms" in medians.get(variant, {}):
            yield f"{variant}: p50 is {medians[variant]['p50_ms']:.1f} ms{with_goal(f'under {goal} ms')}"
