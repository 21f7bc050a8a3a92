"""Limits under chaos: ``python -m tests.chaos.limits --seconds 120 --seed 7``.

Workers of limited queues are killed and frozen, limits change, queues are paused, jobs are cancelled. At no moment may
more run than a limit allows, and at the end every job has ended, in order where it has an ordering key. Exits with 1
and what was wrong otherwise. With --sabotage it must be wrong: then it exits with 0 when the checks see that.
"""

from __future__ import annotations

import os
import random
import sys

import click
import orjson

from awa.embedded import from_system, from_wheel
from tests.chaos.cluster import kept_cluster
from tests.chaos.limits.run import run


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.option("--seconds", type=click.FloatRange(2, 36000), default=60.0, show_default=True, help="Of torment.")
@click.option("--seed", type=int, help="Of all random choices; by default one that is printed.")
@click.option("--pg", type=click.Choice(["system", "embedded"]), default="system", show_default=True)
@click.option("--workers", type=click.IntRange(1, 32), default=4, show_default=True, help="Worker processes.")
@click.option("--sabotage", type=click.Choice(["limits", "hand-over"]), help="Spoil this, and see whether it is found.")
@click.option("--keep", is_flag=True, help="Leave the stopped server, journals and logs.")
@click.option("--json", "is_json", is_flag=True, help="Print the report as one line of JSON.")
def main(
    seconds: float, seed: int | None, pg: str, workers: int, sabotage: str | None, keep: bool, is_json: bool
) -> None:
    binaries = {"system": from_system, "embedded": from_wheel}[pg](os.environ)
    if binaries is None:
        raise click.ClickException(f"there are no PostgreSQL programs for --pg={pg}: install them, or give the other")
    with kept_cluster(binaries, keep=keep) as (directory, cluster):
        report = run(
            cluster.url,
            directory,
            seed=random.randrange(10**6) if seed is None else seed,
            seconds=seconds,
            workers=workers,
            sabotage=sabotage,  # type: ignore[arg-type]
            tell=lambda text: click.echo(text, err=True),
        )
    click.echo(orjson.dumps(report.as_dict()) if is_json else str(report))
    sys.exit(0 if report.is_clean == (sabotage is None) else 1)


if __name__ == "__main__":
    main(prog_name="python -m tests.chaos.limits")
