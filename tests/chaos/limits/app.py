"""The application whose workers are tormented: ``python -m awa.worker tests.chaos.limits.app:client``.

Its jobs take a moment, fail, snooze, or complete themselves; which, the seed, the mark and the entry decide.
"""

from __future__ import annotations

import time

import awa
from awa import Snooze
from tests.chaos.app import client, running

__all__ = ["client"]


@client.task(kind="limited", retry=awa.fixed(0.1, jitter=0.5))
def limited(mark: int) -> awa.Outcome | None:
    with running(mark) as (job, chance):
        time.sleep(chance.uniform(0.001, 0.03))
        match chance.choices(["return", "raise", "snooze", "complete", "fail"], [70, 10, 10, 8, 2])[0]:
            case "raise":
                raise ValueError("was to fail")
            case "snooze":
                return Snooze(chance.uniform(0.0, 0.5))
            case "complete":
                with job.transaction():
                    time.sleep(chance.uniform(0.0, 0.05))
            case "fail":
                raise awa.TerminalError("was to fail for good")
        return None
