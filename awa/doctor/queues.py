"""Checks of queues: that what can run does, in time, and that unique keys do not pile up."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator

from awa.doctor.finding import Finding
from awa.doctor.look import Look, count_text
from awa.storage import examine as sql
from awa.storage.examine import COUNTED, LISTED
from awa.storage.queues import LIST_QUEUES
from awa.wording import age


def check_paused(look: Look) -> Iterator[Finding]:
    backlog = look.backlog(row.queue for row in look.paused)
    for row in look.paused:
        if row.queue in backlog:
            by = f" by {row.by}" if row.by else ""
            why = f" ({row.reason})" if row.reason else ""
            jobs = count_text(backlog[row.queue])
            text = f"queue {row.queue} was paused {age(row.seconds)} ago{by}{why}, and has {jobs} available"
            mend = look.awa(f"queue resume {shlex.quote(row.queue)}")
            facts = {"queue": row.queue, "paused_by": row.by, "reason": row.reason, "available": backlog[row.queue]}
            yield Finding("paused", "warning", text, mend, facts)
    if not backlog:
        idle = f"; {len(look.paused)} are, and have no job available" if look.paused else ""
        yield Finding("paused", "ok", f"no queue is paused that has jobs{idle}")


def check_unserved(look: Look) -> Iterator[Finding]:
    known = {row.queue for row in look.rows(LIST_QUEUES)}
    passed = look.served | {row.queue for row in look.paused}
    backlog = look.backlog(sorted(known - passed))
    for queue, count in backlog.items():
        text = f"queue {queue} has {count_text(count)} available, and no live worker serves it"
        mend = f"{look.worker} --queue {shlex.quote(queue)}"
        yield Finding("unserved", "error", text, mend, {"queue": queue, "available": count})
    if not backlog:
        yield Finding("unserved", "ok", "every queue with available jobs is served or paused")


def check_kinds(look: Look) -> Iterator[Finding]:
    is_well = True
    for row in look.rows(sql.SET_ASIDE, listed=LISTED, limit=COUNTED + 1):
        if row.is_handled:
            continue
        is_well = False
        who = (
            "no worker of it is known to handle that kind; some do not tell which kinds they handle"
            if row.is_unknown
            else "no live worker of it handles that kind"
        )
        text = (
            f"{count_text(row.jobs)} of kind {row.kind} wait{'s' if row.jobs == 1 else ''} in queue {row.queue}: {who}"
        )
        mend = f"{look.worker} --queue {shlex.quote(row.queue)}  # of code that has a task of kind {row.kind}; or "
        mend += (
            "`" + look.awa(f"job cancel {shlex.quote('kind:' + row.kind)} {shlex.quote('queue:' + row.queue)}") + "`"
        )
        facts = {"queue": row.queue, "kind": row.kind, "jobs": row.jobs}
        yield Finding("kinds", "warning" if row.is_unknown else "error", text, mend, facts)
    if is_well:
        yield Finding("kinds", "ok", "no job waits for a worker that knows its kind")


OVERDUE = 60.0
"""Seconds by which a job may be late that waits for its time."""


def check_overdue(look: Look) -> Iterator[Finding]:
    row = look.row(sql.OVERDUE, seconds=OVERDUE, limit=COUNTED + 1)
    if row.jobs:
        text = f"{count_text(row.jobs)} that waited for a time are not available yet, up to {age(row.seconds)} after it"
        mend = f"{look.worker}  # one that leads makes them available"
        yield Finding("overdue", "error", text, mend, {"jobs": row.jobs, "seconds": row.seconds})
    else:
        yield Finding("overdue", "ok", "no job is late that waits for its time")


MANY_KEYS = 10_000_000
"""Unique keys that a database may hold."""

FEW_KEYS = 100
"""So few loose ones say nothing."""


def check_unique(look: Look) -> Iterator[Finding]:
    rows = look.row(sql.KEYS).rows
    seen = look.row(sql.LOOSE_KEYS, start=os.urandom(16) if rows > 10_000 else b"")
    facts = {"keys": rows, "seen": seen.keys, "loose": seen.loose}
    if seen.loose > FEW_KEYS and seen.loose > seen.keys / 2:
        text = (
            f"{seen.loose} of {seen.keys} unique keys that were looked at are of jobs that have gone on or are gone:"
            " the leader removes those that nobody holds, and is far behind, or there is none"
        )
        yield Finding("unique", "warning", text, f"{look.worker}  # one that leads removes them", facts)
    elif rows > MANY_KEYS:
        text = (
            f"about {rows:,} unique keys are held: completed jobs hold theirs as long as they are kept; a shorter"
            " completed_retention, or awa.Unique(states=...) without completed, frees them"
        )
        yield Finding("unique", "warning", text, f"{look.worker} --completed-retention 3600", facts)
    else:
        yield Finding("unique", "ok", f"about {max(rows, seen.keys):,} unique keys are held", facts=facts)
