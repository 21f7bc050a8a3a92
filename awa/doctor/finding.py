"""What one check found, and how bad that is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    name: str
    """The check."""
    level: Level
    """``ok``; ``warning``: jobs run, but not as they should, or not for long; ``error``: some do not run, or may be
    lost."""
    text: str
    """One sentence, with the values."""
    mend: str | None = None
    """The command for a shell, or the SQL, that mends it; None: nothing is to be done."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The values by name, as JSON knows them."""


def worst(findings: Iterable[Finding]) -> Level:
    """The level of the worst of them."""
    levels = {finding.level for finding in findings}
    return "error" if "error" in levels else "warning" if "warning" in levels else "ok"
