"""What the database says of all jobs, read from its tables and not by the functions under test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tests.storage.engine import Conn
from tests.storage.model.records import Entry

CLAIMS = "SELECT claim_id, entry_ids FROM awa.claims"
COMPLETIONS = "SELECT slot, claim_id, idx FROM awa.completions"
ENDS = "SELECT slot, entry_id, outcome FROM awa.attempt_ends"
ENTRIES = "SELECT id, entry_id, slot, queue, lane, xid::text::bigint, attempt FROM awa.jobs"
WAITING = "SELECT id, CASE waits_for WHEN 'kind' THEN 'aside' ELSE 'waiting' END, attempt FROM awa.waiting_jobs"
ENDED_JOBS = "SELECT id, state, attempt FROM awa.ended_jobs"


@dataclass(frozen=True, slots=True)
class Picture:
    """The database between two steps."""

    entries: dict[int, Entry]
    """By entry id."""
    places: dict[int, list[tuple[str, int]]]
    """For each job, every place where it is, as its state and attempt there. It should be one."""


def read(conn: Conn) -> Picture:
    """Read everything, in one round trip."""
    with conn.pipeline():
        claims, completions, ends, entries, waiting, ended = (
            conn.execute(query) for query in (CLAIMS, COMPLETIONS, ENDS, ENTRIES, WAITING, ENDED_JOBS)
        )
        read = {
            entry.entry_id: entry
            for entry in _entries(claims.fetchall(), completions.fetchall(), ends.fetchall(), entries.fetchall())
        }
        rows = waiting.fetchall() + ended.fetchall()
    places: dict[int, list[tuple[str, int]]] = {}
    for id_, state, attempt in rows:
        places.setdefault(id_, []).append((state, attempt))
    for entry in read.values():
        assert entry.claims <= 1, f"claimed twice: {entry}"
        assert len(entry.ends) <= 1, f"ended twice: {entry}"
        if not entry.ends:
            places.setdefault(entry.id, []).append(("running" if entry.claims else "available", entry.attempt))
        elif entry.ends[0] in ("success", "completed"):
            places.setdefault(entry.id, []).append(("completed", entry.attempt))
    return Picture(read, places)


def _entries(
    claims: list[tuple[int, list[int]]],
    completions: list[tuple[int, int, list[int]]],
    ends: list[tuple[int, int, str]],
    entries: list[tuple[int, int, int, str, int, int, int]],
) -> Iterator[Entry]:
    members = dict(claims)
    claimed = Counter(entry_id for _, entry_ids in claims for entry_id in entry_ids)
    ended: dict[int, tuple[str, ...]] = {}
    for _, claim_id, idx in completions:
        for one in idx:
            entry_id = members[claim_id][one - 1]
            ended[entry_id] = (*ended.get(entry_id, ()), "success")
    for _, entry_id, outcome in ends:
        ended[entry_id] = (*ended.get(entry_id, ()), outcome)
    for id_, entry_id, slot, queue, lane, xid, attempt in entries:
        yield Entry(id_, entry_id, slot, queue, lane, xid, attempt, claimed.pop(entry_id, 0), ended.pop(entry_id, ()))
    assert not claimed, "claimed what is not there"
    assert not ended, "ended what is not there"
