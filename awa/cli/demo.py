"""``awa demo``: see real jobs run, a worker die, and nothing get lost."""

from __future__ import annotations

import click

from awa import demo as the_demo


@click.command()
@click.option("--database", metavar="URL", help="The database; else AWA_DATABASE_URL, DATABASE_URL or PG*.")
def demo(database: str | None) -> None:
    """Run a job for each file of Python's standard library, kill a worker in the middle, and count what is there.

    Takes some seconds. Writes only to the schemas awa_demo and awa_demo_app, which it makes anew at each run. Without
    a named database it uses the private PostgreSQL.
    """
    the_demo.run(database)
