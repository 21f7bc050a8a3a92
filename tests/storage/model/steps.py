"""What can happen, how often, and with which arguments."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

Draw = Callable[[random.Random], Any]
Method = TypeVar("Method", bound=Callable[..., None])


@dataclass(frozen=True, slots=True)
class Step:
    """A method of the machine that is a step."""

    name: str
    weight: int
    when: Callable[[Any], object]
    draws: dict[str, Draw]

    def arguments(self, seed: int) -> dict[str, Any]:
        """What it is called with; the same for the same *seed*."""
        pick = random.Random(seed)
        return {name: draw(pick) for name, draw in self.draws.items()}

    def tell(self, seed: int) -> str:
        """It, as it is called, for the report of a failure."""
        told = [f"{name}={value!r}" for name, value in self.arguments(seed).items() if name != "pick"]
        return f"{self.name}({', '.join(told)})"


STEPS: dict[str, Step] = {}
"""By name."""


def step(
    *, weight: int = 3, when: Callable[[Any], object] = lambda machine: True, **draws: Draw
) -> Callable[[Method], Method]:
    """Mark a method as a step.

    Args:
        weight: How often it is chosen, beside others.
        when: Whether it can happen, by the machine.
        draws: How to draw each of its arguments.
    """

    def mark(method: Method) -> Method:
        STEPS[method.__name__] = Step(method.__name__, weight, when, draws)
        return method

    return mark


def among(*values: Any) -> Draw:
    """One of them."""
    return lambda pick: pick.choice(values)


def PICK(pick: random.Random) -> random.Random:
    """Chooses among what there is at that moment."""
    return random.Random(pick.getrandbits(32))
