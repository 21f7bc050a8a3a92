"""Steps: look a job up by its id."""

from __future__ import annotations

import random

from tests.storage.engine import state
from tests.storage.model.machine import Machine
from tests.storage.model.steps import PICK, step


class Looking(Machine):
    @step(when=lambda self: self.jobs, pick=PICK)
    def look_up(self, pick: random.Random) -> None:
        job = self.choose(pick)
        self.check_state(job)
        self.totals[f"looked up: {job.state}"] += 1

    @step(weight=1, when=lambda self: self.rolled_back, pick=PICK)
    def look_up_what_was_rolled_back(self, pick: random.Random) -> None:
        assert state(self.main, pick.choice(sorted(self.rolled_back))) is None
