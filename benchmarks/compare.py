"""What a scenario's figures say beside one another: ratios, and what is hoped for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

Medians = Mapping[str, Mapping[str, float]]
"""Variant -> figure -> its median over the repetitions; figures that do not apply are left out."""


def compare(medians: Medians, variant: str, reference: str, figure: str, *, goal: str = "") -> Iterator[str]:
    """One variant's figure in percent of another's, in a sentence; none when one of them was not measured."""
    figures, others = medians.get(variant, {}), medians.get(reference, {})
    if figure in figures and others.get(figure):
        yield f"{variant}: {figure} is {figures[figure] / others[figure]:.1%} of {reference}{with_goal(goal)}"


def with_goal(goal: str) -> str:
    """The end of a sentence that says what is hoped for."""
    return f" (goal: {goal})" if goal else ""
