"""Checks of workers: that some live, one leads, none is silent or ill, and that they agree."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from psycopg import Cursor
from psycopg.rows import tuple_row

from awa.doctor.finding import Finding
from awa.doctor.look import Look
from awa.storage import examine as sql
from awa.storage import snapshot
from awa.storage.descriptors import Noun, read_descriptors
from awa.storage.rows import read_anything
from awa.version import VERSION
from awa.wording import age, listed


def _place(row: Any) -> str:
    return f"runtime {row.id} (process {row.pid} on {row.hostname})"


def check_workers(look: Look) -> Iterator[Finding]:
    live = look.live
    quiet = [row for row in live if row.is_quiet]
    facts = {"live": len(live), "quiet": len(quiet), "queues": sorted(look.served)}
    if not live:
        yield Finding("workers", "warning", "no worker lives: no job runs", look.worker, facts)
    elif len(quiet) == len(live):
        text = f"all {len(live)} live workers were asked to claim nothing more"
        yield Finding("workers", "warning", text, look.awa(f"runtime resume {quiet[0].id}"), facts)
    else:
        asked = f", {len(quiet)} of them quiet" if quiet else ""
        text = f"{len(live)} live worker{'s' if len(live) > 1 else ''}{asked}, for {listed(sorted(look.served))}"
        yield Finding("workers", "ok", text, facts=facts)


LEADERLESS = 30.0
"""Seconds without a leader after which one should have been found: heartbeats of up to 15 s."""


def check_leader(look: Look) -> Iterator[Finding]:
    rows = look.rows(sql.LEADER, name="maintenance")
    row = rows[0] if rows else None
    if row is not None and row.left > 0:
        text = f"runtime {row.runtime} leads, for {age(row.held)}"
        yield Finding("leader", "ok", text, facts={"runtime": row.runtime, "held_seconds": row.held})
        return
    live = look.live
    oldest = max((one.age for one in live), default=0.0)
    seconds = None if row is None else -row.left
    since = "nobody has ever led" if seconds is None else f"nobody has led for {age(seconds)}"
    waits = "nothing that waits for a time becomes available, nothing is rescued, no segment is emptied"
    facts = {"runtime": None, "leaderless_seconds": seconds, "live": len(live)}
    least = max([LEADERLESS, *(4 * one.heartbeat for one in live)])
    if not live:
        yield Finding("leader", "warning", f"{since}, and no worker lives: {waits}", look.worker, facts)
    elif min(oldest if seconds is None else seconds, oldest) > least:
        text = f"{since}, though {len(live)} runtimes live: {waits}; their logs say why maintenance fails"
        yield Finding("leader", "error", text, f"{look.worker}  # restart {listed(map(_place, live), 2)}", facts)
    else:
        yield Finding("leader", "ok", f"{since}; the next one leads in a moment", facts=facts)


def check_runtimes(look: Look) -> Iterator[Finding]:
    silent = [row for row in look.runtimes if not row.is_live]
    for row in silent:
        facts = {"runtime": row.id, "hostname": row.hostname, "pid": row.pid, "silent_seconds": row.silent}
        if row.gone is None:
            text = (
                f"{_place(row)} has been silent for {age(row.silent)} and has not left: its jobs count as running"
                " until a leader takes them back"
            )
        elif row.gone < 60.0:
            continue  # its rescue is under way
        else:
            text = (
                f"{_place(row)} was taken for dead {age(row.gone)} ago, and not all that it had is taken back: open"
                " transactions may hold some, or nobody leads"
            )
        yield Finding("runtimes", "warning", text, f"{look.worker}  # one that leads takes them back", facts)
    if not silent:
        yield Finding("runtimes", "ok", "no runtime is silent")


def check_health(look: Look) -> Iterator[Finding]:
    is_well = True
    for row in look.live:
        told = row.health if isinstance(row.health, dict) else {}
        unhealthy, unready = (told.get(what) or [] for what in ("unhealthy", "unready"))
        if unhealthy:
            text = f"{_place(row)} says that it is unhealthy: {listed(unhealthy)}"
            facts = {"runtime": row.id, "unhealthy": unhealthy}
            yield Finding("health", "error", text, f"kill {row.pid}  # on {row.hostname}, and start it anew", facts)
        elif unready:
            text = f"{_place(row)} says that it is not ready: {listed(unready)}"
            facts = {"runtime": row.id, "unready": unready}
            yield Finding("health", "warning", text, "awa health --ready --addr HOST:PORT", facts)
        is_well = is_well and not unhealthy and not unready
    if is_well:
        yield Finding("health", "ok", "no live worker complains; `awa health` asks one by itself")


def check_versions(look: Look) -> Iterator[Finding]:
    by_version: dict[str, list[int]] = {}
    for row in look.live:
        by_version.setdefault(row.version, []).append(row.id)
    shown = "; ".join(f"{version}: runtimes {listed(ids)}" for version, ids in sorted(by_version.items()))
    facts = {"versions": by_version, "awa": VERSION}
    if len(by_version) > 1:
        text = f"workers of several versions of awa live ({shown}), as during a deployment"
        yield Finding("versions", "warning", text, "pip install --upgrade awa-queue  # then restart the others", facts)
    elif by_version and VERSION not in by_version:
        yield Finding("versions", "ok", f"all workers run awa {next(iter(by_version))}; this is {VERSION}", facts=facts)
    else:
        yield Finding("versions", "ok", f"this is awa {VERSION}, and no worker runs another one", facts=facts)


def check_drift(look: Look) -> Iterator[Finding]:
    """Reads what is described, which is a row for each queue and kind, not for each job; all of it of one moment."""
    is_well = True
    nouns: tuple[Noun, ...] = ("kind", "queue")
    with look.transaction() as conn, Cursor(conn, row_factory=tuple_row) as cursor:
        read_anything(cursor)
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")  # a worker may describe anew meanwhile
        of_one_moment = snapshot.Look(cursor, look.schema)
        described = {noun: read_descriptors(of_one_moment, noun) for noun in nouns}
    for noun, infos in described.items():
        for name, info in sorted(infos.items()):
            if not info.drift:
                continue
            is_well = False
            others = sorted(runtime for drift in info.drift for runtime in drift.runtimes)
            versions = len(info.drift) + (
                info.live_runtimes > len(others)
            )  # what is stored is a way, if it is anybody's
            who, verb = ("runtime", "differs") if len(others) == 1 else ("runtimes", "differ")
            text = (
                f"{noun} {name} is described in {versions} ways by live workers"
                if versions > 1
                else f"{noun} {name} is described otherwise by live workers than in the catalogue"
            )
            text += f": {who} {listed(others)} {verb} from what is stored"
            command = look.awa(f"{noun} show {shlex.quote(name)}")
            mend = f"{look.worker}  # restart the runtimes of old code; `{command}` shows what differs"
            yield Finding("drift", "warning", text, mend, {noun: name, "runtimes": others})
    if is_well:
        yield Finding("drift", "ok", "live workers agree on what they say of queues and kinds")
