"""Chaos: ``python -m tests.chaos --minutes 2 --seed 7``.

Producers of every kind insert, workers work, and all of it is killed, frozen, cut off and crashed at random. At the
end nothing may be lost, recorded twice, or written by a stale worker. Exits with 1 and the offending ids otherwise.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from types import FrameType

import click
import orjson

from awa.embedded import from_system, from_wheel
from tests.chaos.run import run


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.option("--minutes", type=click.FloatRange(0.1, 600), default=1.0, show_default=True, help="Of torment.")
@click.option("--seed", type=int, help="Of all random choices; by default one that is printed.")
@click.option("--pg", type=click.Choice(["system", "embedded"]), default="system", show_default=True)
@click.option("--workers", type=click.IntRange(1, 32), default=4, show_default=True, help="Worker processes.")
@click.option(
    "--failover/--no-failover", default=None, help="A synchronous standby takes over. [default: from 1 minute]"
)
@click.option("--pooler/--no-pooler", default=None, help="pgbouncer before some of them. [default: from 1 minute]")
@click.option(
    "--count", "counting", type=click.IntRange(0, 10**6), default=0, help="Of jobs that each add one to a counter."
)
@click.option("--keep", is_flag=True, help="Leave the stopped servers, journals and logs.")
@click.option("--json", "is_json", is_flag=True, help="Print the report as one line of JSON.")
def main(
    minutes: float,
    seed: int | None,
    pg: str,
    workers: int,
    failover: bool | None,
    pooler: bool | None,
    counting: int,
    keep: bool,
    is_json: bool,
) -> None:
    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    binaries = {"system": from_system, "embedded": from_wheel}[pg](os.environ)
    if binaries is None:
        raise click.ClickException(f"there are no PostgreSQL programs for --pg={pg}: install them, or give the other")
    report = run(
        binaries,
        seed=random.randrange(10**6) if seed is None else seed,
        seconds=minutes * 60,
        workers=workers,
        failover=minutes >= 1 if failover is None else failover,
        pooled=minutes >= 1 if pooler is None else pooler,
        counting=counting,
        keep=keep,
        tell=lambda text: click.echo(text, err=True),
    )
    click.echo(orjson.dumps(report.as_dict()) if is_json else str(report))
    sys.exit(0 if report.is_clean else 1)


if __name__ == "__main__":
    main(prog_name="python -m tests.chaos")
