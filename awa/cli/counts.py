"""How many jobs there are by state, and for how long the oldest waits: as columns, and as lines."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from awa.cli.output import Cell, Column, Table, echo, local_time
from awa.job import JobState
from awa.storage.kinds import Depth
from awa.storage.queues import Count
from awa.wording import age

_SHOWN = (JobState.AVAILABLE, JobState.RUNNING, JobState.SCHEDULED, JobState.RETRYABLE, JobState.FAILED)
_SHOWN_AFTER = (JobState.CANCELLED, JobState.COMPLETED)


def counted_columns(oldest_needs_width: int = 0) -> tuple[Column, ...]:
    """Columns for :func:`counted_row`; the last two on terminals that are wide enough."""
    return (
        *(Column(state.value, is_number=True) for state in _SHOWN),
        Column("oldest", is_number=True, needs_width=oldest_needs_width),
        *(Column(state.value, is_number=True, needs_width=100) for state in _SHOWN_AFTER),
    )


def counted_row(counts: Mapping[JobState, Count], oldest_at: datetime | None) -> list[Cell]:
    """The cells of these columns."""
    before, after = ([count_text(counts.get(state)) for state in states] for states in (_SHOWN, _SHOWN_AFTER))
    return [*before, age_text(oldest_at), *after]


def counted_lines(counts: Mapping[JobState, Count], oldest_at: datetime | None) -> list[tuple[str, str]]:
    """Names and what they are, for ``print_facts``; what runs comes first."""
    lines = [("running now", count_text(counts.get(JobState.RUNNING)))]
    lines += [(state.value, count_text(counts.get(state))) for state in JobState if state is not JobState.RUNNING]
    if oldest_at is not None:
        lines.append(("oldest available", f"{age_text(oldest_at)}, since {local_time(oldest_at)}"))
    return lines


def print_depths(what: str, depths: Mapping[str, Depth]) -> None:
    """Print a table of what each queue has of a kind, or a queue of each kind; nothing where there is nothing."""
    if depths:
        echo("")
        Table([Column(what, is_flexible=True), *counted_columns()]).print(
            [[name, *counted_row(depth.counts, depth.oldest_at)] for name, depth in depths.items()]
        )


def age_text(since: datetime | None) -> str:
    """For how long that has been, in short."""
    return "-" if since is None else age((datetime.now(UTC) - since).total_seconds())


def count_text(count: Count | None) -> str:
    """A number, with ``~`` before one that is an estimate."""
    value = 0 if count is None else count.value
    return f"{'' if count is None or count.is_exact else '~'}{value:,}"
