"""The check of the ring: whether its segments are emptied in time, and what keeps the oldest."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from awa.doctor.finding import Finding
from awa.doctor.look import Look, count_text, end_backend
from awa.storage import examine as sql
from awa.storage.examine import COUNTED
from awa.storage.ring import Segment, list_queues, list_segments
from awa.storage.status import RUNNING, TRANSACTIONS
from awa.storage.trust import rebase_command
from awa.wording import age


def check_ring(look: Look) -> Iterator[Finding]:
    with look.transaction() as conn:
        segments = list_segments(conn, look.schema)
    current = next((one for one in segments if one.is_current), None)
    if current is None or len(segments) < 8:
        text = f"no slot of the ring is current, or slots are missing ({len(segments)} of 8): nothing can be inserted"
        yield Finding("ring", "error", text, rebase_command(look.schema), {"slots": len(segments)})
        return
    sealed = sorted(
        (one for one in segments if not one.is_current and not one.is_empty), key=lambda one: -one.sealed_for
    )
    empty = 7 - len(sealed)
    facts: dict[str, Any] = {
        "empty": empty,
        "current": current.slot,
        "size_bytes": sum(one.size_bytes for one in segments),
        "oldest": sealed[0].slot if sealed else None,
    }
    open_for = age(current.open_for.total_seconds())
    text = f"{empty} of 8 slots are empty; slot {current.slot} is current, for {open_for}"
    if not sealed:
        yield Finding("ring", "ok", text, facts=facts)
        return
    oldest = sealed[0]
    pin, mend = _pin_of(look, oldest)
    text += f"; the oldest, slot {oldest.slot}, was sealed {age(oldest.sealed_for.total_seconds())} ago and is kept by "
    text += pin or "the retention of completed jobs, or until the leader comes to it"
    # without a pin it may be full for a moment, until the retention is over
    turns = [one.sealed_at - one.opened_at for one in sealed if one.sealed_at and one.opened_at]
    is_overdue = bool(pin) or current.open_for > max(turns, default=current.open_for)
    if empty == 0 and is_overdue:
        text += "; nothing breaks, the current segment grows"
        yield Finding("ring", "warning", text, mend or look.awa("storage status"), facts | {"pin": pin})
    else:
        yield Finding("ring", "ok", text, facts=facts | {"pin": pin})


def _pin_of(look: Look, segment: Segment) -> tuple[str, str | None]:
    """What keeps a sealed segment, and what lets it go; empty: nothing that can be seen."""
    slot = segment.slot
    for row in look.rows(TRANSACTIONS):
        if row[0] == slot:
            return f"a transaction of {age(row[2])}, process {row[1]}", end_backend(int(row[1]))
    for row in look.rows(RUNNING):
        if row[0] == slot:
            return f"{count_text(row[2])} running at runtime {row[1]}", look.awa("job list state:running")
    with look.transaction() as conn:
        queues = list_queues(conn, look.schema, slot)
    for row in look.rows(sql.available_in_slot(slot), queues=queues[:COUNTED], limit=COUNTED + 1):
        if row[2]:
            return f"{count_text(row[2])} available in queue {row[0]}", _have_run(look, row[0])
    return "", None


def _have_run(look: Look, queue: str) -> str:
    """What gets the jobs of a queue to run."""
    if any(one.queue == queue for one in look.paused):
        return look.awa(f"queue resume {shlex.quote(queue)}")
    return f"{look.worker} --queue {shlex.quote(queue)}" if queue not in look.served else look.awa("storage status")
