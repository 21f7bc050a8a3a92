"""How messages say what is long: ages, and lists of names."""

from __future__ import annotations

from collections.abc import Iterable


def age(seconds: float) -> str:
    """*seconds* in the largest unit of which there are two, or in seconds: ``119 s``, ``2 min``, ``3 h``, ``5 d``."""
    whole = max(int(seconds), 0)
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if whole >= 2 * size:
            return f"{whole // size} {unit}"
    return f"{whole} s"


def listed(names: Iterable[object], most: int = 10) -> str:
    """The first of *names*, and how many more there are: ``a, b and 3 more``; empty when there are none."""
    every = [str(name) for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most:,} more" if len(every) > most else "")
