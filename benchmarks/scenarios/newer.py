"""The application of the worker that is a version ahead: what the others know, and a kind more."""

from __future__ import annotations

from benchmarks.scenarios.tasks import client

__all__ = ["client", "novel"]


@client.task()
def novel(n: int) -> None:
    """Do nothing, which the others do not know how to do."""
