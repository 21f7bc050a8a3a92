"""The scenarios, one file each: what is measured, in which variants, by which function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.compare import Medians
from benchmarks.record import Plan, Result
from benchmarks.scenarios import (
    backlog,
    cloud,
    deploy,
    descriptors,
    drain,
    fleet,
    inflight,
    insert,
    inspect,
    latency,
    limits,
    producers,
    rate,
    snapshot,
    soak,
)


def _nothing(medians: Medians) -> Iterable[str]:
    return ()


@dataclass(frozen=True, slots=True)
class Scenario:
    """Something to measure."""

    run: Callable[[Plan], list[Result]]
    """Does one repetition in a fresh database, checks that every job ran, and gives a result for each rate measured."""
    variants: tuple[str, ...]
    """Each is a repetition of its own; taken in turn."""
    duration: float = 0.0
    """Seconds of measuring unless told otherwise; 0: it goes by a number of jobs."""
    repeat: int = 3
    """Repetitions unless told otherwise; 1: its variants take turns within one."""
    conclude: Callable[[Medians], Iterable[str]] = _nothing
    """What its figures say beside one another, in sentences."""
    needs_pgbench: bool = False
    """Whether its producers are pgbench."""


SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        "insert": Scenario(insert.run, insert.VARIANTS, conclude=insert.conclude),
        "drain": Scenario(drain.run, drain.VARIANTS),
        "latency": Scenario(latency.run, latency.VARIANTS, duration=20.0),
        "producers": Scenario(
            producers.run, producers.VARIANTS, duration=5.0, needs_pgbench=True, conclude=producers.conclude
        ),
        "backlog": Scenario(backlog.run, backlog.VARIANTS, duration=150.0, repeat=1, conclude=backlog.conclude),
        "inflight": Scenario(inflight.run, inflight.VARIANTS, duration=90.0, repeat=1, conclude=inflight.conclude),
        "fleet": Scenario(fleet.run, fleet.VARIANTS, conclude=fleet.conclude),
        "snapshot": Scenario(snapshot.run, snapshot.VARIANTS, repeat=5, conclude=snapshot.conclude),
        "limits": Scenario(limits.run, limits.VARIANTS, conclude=limits.conclude),
        "rate": Scenario(rate.run, rate.VARIANTS, duration=60.0, repeat=1, conclude=rate.conclude),
        "deploy": Scenario(deploy.run, deploy.VARIANTS, conclude=deploy.conclude),
        "descriptors": Scenario(descriptors.run, descriptors.VARIANTS, conclude=descriptors.conclude),
        "cloud": Scenario(cloud.run, cloud.VARIANTS, duration=10.0, conclude=cloud.conclude),
        "inspect": Scenario(inspect.run, inspect.VARIANTS, repeat=1, conclude=inspect.conclude),
        "soak": Scenario(soak.run, soak.VARIANTS, duration=600.0, repeat=1, conclude=soak.conclude),
    }
)
