"""Plays examples: steps in random order, chosen by number, so that what fails can be played again and made shorter.

Hypothesis, with which this began, leads to long repetitions of a few kinds of steps; chosen by weight, much more of
what needs several steps together is reached in the same time.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable

from tests.storage.model.machine import Machine
from tests.storage.model.steps import STEPS

Played = list[tuple[str, int]]
"""Names of steps, and the numbers that their arguments come from."""


def run(make: Callable[[], Machine], *, seed: int, examples: int, steps: int, shrinks: bool = False) -> None:
    """Play examples of *steps* each; what fails has a note of how it came to that."""
    for number in range(examples):
        played: Played = []
        try:
            _explore(make(), random.Random(f"{seed}/{number}"), steps, played)
        except Exception as error:
            if shrinks:
                played = _shrink(make, played, _place(error))
            told = "\n".join(STEPS[name].tell(drawn) for name, drawn in played)
            error.add_note(f"seed {seed}, example {number}, after these steps:\n{told}")
            raise


def _explore(machine: Machine, choose: random.Random, steps: int, played: Played) -> None:
    machine.begin()
    mine = [step for name, step in sorted(STEPS.items()) if hasattr(machine, name)]
    for _ in range(steps):
        possible = [step for step in mine if step.when(machine)]
        [chosen] = choose.choices(possible, [step.weight for step in possible])
        played.append((chosen.name, choose.getrandbits(32)))
        _take(machine, *played[-1])
    machine.end_all()


def _take(machine: Machine, name: str, drawn: int) -> None:
    getattr(machine, name)(**STEPS[name].arguments(drawn))
    machine.the_database_agrees()
    machine.totals["steps"] += 1


def _shrink(make: Callable[[], Machine], played: Played, place: str) -> Played:
    """Leave out what is not needed for the same failure, in ever smaller parts."""
    size = len(played) // 2
    while size:
        start = 0
        while start < len(played):
            shorter = played[:start] + played[start + size :]
            if _fails(make(), shorter, place):
                played = shorter
            else:
                start += size
        size //= 2
    return played


def _fails(machine: Machine, played: Played, place: str) -> bool:
    try:
        machine.begin()
        for name, drawn in played:
            if STEPS[name].when(machine):
                _take(machine, name, drawn)
        machine.end_all()
    except Exception as error:
        return _place(error) == place
    return False


def _place(error: Exception) -> str:
    """Where it was raised, by the line of the model."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/tests/storage/" in frame.filename]
    return f"{type(error).__name__} {frames[-1].filename}:{frames[-1].lineno}"
