"""Measure awa: ``python -m benchmarks.run insert drain latency producers backlog inflight fleet snapshot limits
rate deploy descriptors cloud inspect soak``.

    insert      COPY, batches of 1,000, single inserts and beside them a bare INSERT of the same row
    drain       one worker process and a backlog of no-op jobs: first claim to last durable completion
    latency     100 single inserts a second: from before the call to the start of the handler
    producers   1, 16 and 64 connections inserting singly beside a busy worker, with and without notifications
    backlog     claims and inserts beside 0, 100 thousand, a million and ten million waiting jobs
    inflight    claims and inserts beside no and a hundred open transactions
    fleet       1, 4 and 16 worker processes on one queue: the rate, and how it is shared
    snapshot    draining alone, under an old snapshot, beside an open transaction that has written
    limits      draining a queue with each kind of limit, and with none; all of it under an old snapshot too
    rate        a queue that may start 50 jobs a second, over four processes, in windows of ten seconds
    deploy      ten workers of before and one that knows a kind more: jobs of that kind among ten times as many others
    descriptors writing 2,000 descriptions of queues, reading 500 beside a thousand runtimes
    cloud       draining, latency, inserts: 1 ms away and 2 ms slower at commit, and as it is
    inspect     lists, counts, views and single jobs beside 5 million completed, a million available, 200,000 failed
    soak        ten minutes at 70 % of the peak with a turn of the ring every ten seconds, minute by minute

``SCENARIO:VARIANT`` measures one variant: ``insert:copy``, ``producers:64-on producers:64-off``. Each repetition is a
fresh process on a fresh database; the repetitions of everything asked for are interleaved, so that a slow minute of the
machine meets all of them. A repetition in which a job did not run exactly once has no figure and ends the run.

Without ``--database`` a private server with fsync on is started for the run and removed afterwards.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

import click
import psycopg

from awa.errors import AwaError
from benchmarks.record import BenchmarkError, Plan
from benchmarks.repetition import measure
from benchmarks.report import describe, dump_line, make_line, make_table
from benchmarks.scenarios import SCENARIOS
from benchmarks.server import Place, find_pgbench, find_place

Target = tuple[str, str]
"""A scenario and one of its variants."""


def parse_targets(names: Sequence[str]) -> list[Target]:
    """The variants that the words of a command line ask for, each once.

    Raises:
        click.BadParameter: There is no such scenario or variant.
    """
    targets: dict[Target, None] = {}
    for word in names:
        name, _, variant = word.partition(":")
        if name not in SCENARIOS:
            raise click.BadParameter(f"there is no scenario {name!r}: give {', '.join(SCENARIOS)}")
        variants = SCENARIOS[name].variants
        if variant and variant not in variants:
            raise click.BadParameter(f"{name} has no variant {variant!r}: give {', '.join(variants)}")
        targets |= dict.fromkeys((name, each) for each in ([variant] if variant else variants))
    return list(targets)


def _run(
    place: Place,
    targets: Sequence[Target],
    *,
    jobs: int,
    duration: float | None,
    threads: int,
    repeat: int | None,
    facts: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    pgbench = find_pgbench(place.binaries) if any(SCENARIOS[name].needs_pgbench for name, _ in targets) else None
    repeats = {name: repeat or SCENARIOS[name].repeat for name, _ in targets}
    for repetition in range(1, max(repeats.values()) + 1):
        for name, variant in targets:
            if repetition > repeats[name]:
                continue
            scenario = SCENARIOS[name]
            seconds = scenario.duration if duration is None else duration
            with place.database() as database:
                plan = Plan(name, variant, place.admin, database, jobs, seconds, threads, pgbench)
                try:
                    results = measure(plan, timeout=180 + 10 * seconds + jobs / 500)
                except BenchmarkError as error:
                    raise BenchmarkError(f"{name}:{variant}, repetition {repetition}: {error}") from error
            for result in results:
                _say(f"{name}:{result.variant} {repetition}/{repeats[name]}: {result.jobs_per_s:,.0f} jobs/s")
                yield make_line(name, repetition, result, facts)


def _say(text: str) -> None:
    click.echo(text, err=True)


@contextmanager
def _terminated_in_order() -> Iterator[None]:
    """Have SIGTERM unwind like Ctrl-C, so that the private server and the database go too."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@click.command(help=__doc__.replace("\n    insert", "\n\b\n    insert"), context_settings={"max_content_width": 120})
@click.argument("scenarios", nargs=-1, required=True, metavar="SCENARIO[:VARIANT]...")
@click.option("--repeat", type=click.IntRange(1), help="Repetitions of each (3; see benchmarks/README.md).")
@click.option("--jobs", type=click.IntRange(100), default=200_000, show_default=True, help="Jobs, or what they go by.")
@click.option("--duration", type=click.FloatRange(0.1, 86400), help="Seconds of those that go by time (5 to 600).")
@click.option("--threads", type=click.IntRange(1), default=4, show_default=True, help="Threads of a worker process.")
@click.option("--database", metavar="URL", help="A server's, of somebody who may create databases and checkpoint.")
@click.option("--pg", type=click.Choice(["system", "embedded"]), help="Whose programs the private server runs.")
@click.option("--checksums", is_flag=True, help="Have the private server keep checksums of its pages.")
@click.option("--json", "is_json", is_flag=True, help="Print one line of JSON for each repetition, not a table.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Append the lines of JSON to this file.")
def main(
    scenarios: tuple[str, ...],
    repeat: int | None,
    jobs: int,
    duration: float | None,
    threads: int,
    database: str | None,
    pg: str | None,
    checksums: bool,
    is_json: bool,
    out: Path | None,
) -> None:
    targets = parse_targets(scenarios)
    if database is not None and pg is not None:
        raise click.UsageError("--pg chooses the programs of a private server, --database names another: give one")
    lines: list[dict[str, Any]] = []
    try:
        with ExitStack() as stack:
            stack.enter_context(_terminated_in_order())
            file: IO[str] | None = None
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(out.open("a", encoding="utf-8"))
            place = stack.enter_context(find_place(database, pg, checksums=checksums))
            facts = place.facts()
            _say(describe(facts))
            for line in _run(place, targets, jobs=jobs, duration=duration, threads=threads, repeat=repeat, facts=facts):
                lines.append(line)
                if file is not None:
                    print(dump_line(line), file=file, flush=True)
                if is_json:
                    click.echo(dump_line(line))
    except (BenchmarkError, AwaError, psycopg.Error, OSError) as error:
        raise click.ClickException(str(error).strip()) from error
    if not is_json:
        click.echo(make_table(lines))


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.run")
