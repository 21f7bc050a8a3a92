"""The application of the worker that is a version ahead: what the others know, and a kind more.

With a client of its own: whoever runs the tasks of the others has imported this module too.
"""

from __future__ import annotations

import time

import awa

client = awa.Client()


@client.task()
def noop(n: int = 0) -> None:
    """Do nothing, as the others do."""


@client.task()
def nap(n: int = 0, seconds: float = 0.02) -> None:
    """Wait, as the others do."""
    time.sleep(seconds)


@client.task()
def novel(n: int, seconds: float = 0.0) -> None:
    """Do nothing, or wait, which the others do not know how to do."""
    time.sleep(seconds)
