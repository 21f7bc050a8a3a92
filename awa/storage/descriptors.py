"""The catalogue: how code describes queues and kinds, who declares it now, and where those disagree.

Workers write it at their start and on a tick of their own; operators read it. Nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from typing import Any, Literal

import orjson
from psycopg import Connection

from awa._core import canonical_json, text_array
from awa.descriptors import FIELDS, Descriptor, hash_of_set
from awa.storage.connection import repeated
from awa.storage.drivers import Array, OwnCursor, speaks_utf8
from awa.storage.pooler import read_committed
from awa.storage.schema import Schema
from awa.storage.snapshot import Look

CHUNK = 5_000
"""Most rows of a statement."""

Noun = Literal["queue", "kind"]

TABLES: Mapping[Noun, str] = {"queue": "awa.queue_descriptors", "kind": "awa.job_kind_descriptors"}
PREFIXES: Mapping[Noun, str] = {"queue": "queue_descriptor", "kind": "job_kind_descriptor"}
"""Of the columns of a runtime: ``_hashes``, what it declares, and ``_set``, the hash of that."""

# --- writing

# A name and the hash of what is declared of it say whether a row is due, so that is all that most ticks send.
_GIVEN = "unnest(%(names)b::text[], %(hashes)b::text[]) WITH ORDINALITY g(name, hash, n)"

# Who has just started goes before what is there; on its ticks a runtime writes over another version only once nobody
# has refreshed that for three intervals, or two versions that live at once would take turns for ever.
_YIELDS = """(%(is_start)b::boolean
              OR {row}.last_seen_at < now() - 3 * {row}.sync_interval_ms * interval '1 ms')"""

_WAS_SEEN_LONG_AGO = "{row}.last_seen_at < now() - %(interval_ms)b::integer / 2 * interval '1 ms'"

# A row that says the same and was last seen half an interval ago is marked as seen; one that somebody holds is being
# written anyway. Rows that need nothing are not locked, which would write each of them. Told are the places
# of the names that need more: those that are not there, and those that say something else and yield.
_SEE = f"""
    WITH seen AS (
        UPDATE {{table}} d
           SET last_seen_at = now(), sync_interval_ms = %(interval_ms)b::integer
          FROM (SELECT o.ctid
                  FROM {_GIVEN}
                  JOIN {{table}} o ON o.{{noun}} = g.name
                 WHERE o.descriptor_hash = g.hash AND {_WAS_SEEN_LONG_AGO.format(row="o")}
                 ORDER BY o.{{noun}}
                   FOR NO KEY UPDATE OF o SKIP LOCKED) s
         WHERE d.ctid = s.ctid)
    SELECT g.n
      FROM {_GIVEN}
      LEFT JOIN {{table}} o ON o.{{noun}} = g.name
     WHERE o.{{noun}} IS NULL OR o.descriptor_hash <> g.hash AND {_YIELDS.format(row="o")}
"""

SEE: Mapping[Noun, str] = {noun: _SEE.format(table=TABLES[noun], noun=noun) for noun in TABLES}

# What was found due is looked at again under the row's lock: somebody may have written it meanwhile. In key order: two
# starters that took overlapping names in opposite order would deadlock, and a hash join gives them in any order.
_WRITE = f"""
    INSERT INTO {{table}} AS d
           ({{noun}}, display_name, description, owner, docs_url, tags, extra, descriptor_hash, sync_interval_ms,
            created_at, updated_at, last_seen_at)
    SELECT g.name, v.fields->>'display_name', v.fields->>'description', v.fields->>'owner', v.fields->>'docs_url',
           ARRAY(SELECT jsonb_array_elements_text(v.fields->'tags')), v.fields->'extra', g.hash,
           %(interval_ms)b::integer, now(), now(), now()
      FROM {_GIVEN}
      JOIN awa.descriptor_versions v ON v.descriptor_hash = g.hash
     ORDER BY g.name COLLATE "C"
        ON CONFLICT ({{noun}}) DO UPDATE
       SET display_name = excluded.display_name, description = excluded.description, owner = excluded.owner,
           docs_url = excluded.docs_url, tags = excluded.tags, extra = excluded.extra,
           descriptor_hash = excluded.descriptor_hash, sync_interval_ms = excluded.sync_interval_ms,
           updated_at = excluded.updated_at, last_seen_at = excluded.last_seen_at
     WHERE d.descriptor_hash <> excluded.descriptor_hash AND {_YIELDS.format(row="d")}
"""

WRITE: Mapping[Noun, str] = {noun: _WRITE.format(table=TABLES[noun], noun=noun) for noun in TABLES}

# Those that are there are not read again. A start has an hour at least in which forget() leaves its versions: by then
# its runtime has told of them.
WRITE_VERSIONS = """
    INSERT INTO awa.descriptor_versions AS v (descriptor_hash, fields)
    SELECT g.hash, g.fields::jsonb
      FROM unnest(%(hashes)b::text[], %(fields)b::text[]) g(hash, fields)
      LEFT JOIN awa.descriptor_versions o ON o.descriptor_hash = g.hash
     WHERE o.descriptor_hash IS NULL OR o.last_seen_at < now() - interval '1 h'
     ORDER BY g.hash COLLATE "C"
        ON CONFLICT (descriptor_hash) DO UPDATE SET last_seen_at = now()
"""


def sync(
    conn: Connection[Any],
    schema: Schema,
    *,
    queues: Mapping[str, Descriptor],
    kinds: Mapping[str, Descriptor],
    interval: float,
    is_start: bool,
) -> None:
    """Write into the catalogue what a worker declares, as far as it is not there or was not seen for a while.

    Each statement is a transaction of its own.

    Args:
        conn: In autocommit mode, with no transaction open.
        interval: Seconds between two calls.
        is_start: The worker starts: what it declares goes before what others have declared.
    """
    if is_start:
        _write_versions(conn, schema, (*queues.values(), *kinds.values()))
    how = {"interval_ms": round(interval * 1000), "is_start": is_start}
    both: dict[Noun, Mapping[str, Descriptor]] = {"queue": queues, "kind": kinds}
    for noun, declared in both.items():
        for names in _chunks(declared):
            due = [names[n - 1] for (n,) in _execute(conn, schema, SEE[noun], how | _given(conn, names, declared))]
            if not due:
                continue
            if not is_start:
                _write_versions(conn, schema, [declared[name] for name in due])
            _execute(conn, schema, WRITE[noun], how | _given(conn, due, declared))


def _write_versions(conn: Connection[Any], schema: Schema, declared: Iterable[Descriptor]) -> None:
    """Write what hashes stand for, which is before any row has them: whoever reads a hash can tell its fields."""
    fields = {one.hash: one.text for one in declared}
    for hashes in _chunks(fields):
        given = {"hashes": _texts(conn, hashes), "fields": _texts(conn, [fields[one] for one in hashes])}
        _execute(conn, schema, WRITE_VERSIONS, given)


def _given(conn: Connection[Any], names: list[str], declared: Mapping[str, Descriptor]) -> dict[str, Any]:
    return {"names": _texts(conn, names), "hashes": _texts(conn, [declared[name].hash for name in names])}


def _texts(conn: Connection[Any], values: list[str]) -> Array | list[str]:
    return Array(text_array(values)) if speaks_utf8(conn) else values


def _chunks(names: Iterable[str]) -> Iterable[list[str]]:
    every = list(names)
    return (every[start : start + CHUNK] for start in range(0, len(every), CHUNK))


def _execute(conn: Connection[Any], schema: Schema, query: str, params: dict[str, Any]) -> list[tuple[Any, ...]]:
    def send() -> list[tuple[Any, ...]]:
        with OwnCursor(conn) as cursor:
            read_committed(cursor, schema.sql(query), params)
            return cursor.fetchall() if cursor.description else []

    return repeated(send)


TELL = """
    UPDATE awa.runtime_instances
       SET queue_descriptor_hashes = %(queues)b::text::json, queue_descriptor_set = %(queue_set)b,
           job_kind_descriptor_hashes = %(kinds)b::text::json, job_kind_descriptor_set = %(kind_set)b
     WHERE id = %(runtime)b
"""


def tell(
    conn: Connection[Any], schema: Schema, runtime: int, *, queues: Mapping[str, str], kinds: Mapping[str, str]
) -> None:
    """Write down what a runtime declares, once for each registration: name -> hash, of queues and of kinds."""
    params = {
        "runtime": runtime,
        "queues": orjson.dumps(queues, option=orjson.OPT_SORT_KEYS).decode(),
        "queue_set": hash_of_set(queues),
        "kinds": orjson.dumps(kinds, option=orjson.OPT_SORT_KEYS).decode(),
        "kind_set": hash_of_set(kinds),
    }
    _execute(conn, schema, TELL, params)


# --- reading


@dataclass(frozen=True, slots=True)
class Drift:
    """Live runtimes that declare something else than the catalogue says."""

    runtimes: list[int]
    """Their numbers, sorted."""
    descriptor_hash: str
    """Of what they declare."""
    fields: list[str]
    """On which fields they differ; none: what they declare is not known any more."""


@dataclass(frozen=True, slots=True)
class DescriptorInfo:
    """How a queue or a kind is described, and who declares it."""

    display_name: str | None
    """What people call it."""
    description: str | None
    """What it is for."""
    owner: str | None
    """Who answers for it."""
    docs_url: str | None
    """Where more is written; any text, not only an address."""
    tags: tuple[str, ...]
    """Words for it."""
    extra: Any
    """Whatever else was declared, as JSON."""
    descriptor_hash: str
    """As ``awa.descriptor_hash`` gives it."""
    created_at: datetime
    """When it was described first."""
    updated_at: datetime
    """When what is declared changed last."""
    last_seen_at: datetime
    """When a worker has declared it last, to about half a tick."""
    live_runtimes: int
    """How many live runtimes declare something of it."""
    drift: list[Drift]
    """Those of them that declare something else than this."""

    @property
    def is_stale(self) -> bool:
        """Whether no live runtime declares it."""
        return self.live_runtimes == 0


# A thousand runtimes that declare the same are told by its hash: the JSON of one of them is read.
_SETS = """
    SELECT s.runtimes, r.{prefix}_hashes::text
      FROM (SELECT i.{prefix}_set, array_agg(i.id ORDER BY i.id) AS runtimes
              FROM awa.live_runtimes i
             WHERE i.{prefix}_set IS NOT NULL
             GROUP BY i.{prefix}_set) s
      JOIN awa.runtime_instances r ON r.id = s.runtimes[1]
"""

SETS: Mapping[Noun, str] = {noun: _SETS.format(prefix=PREFIXES[noun]) for noun in TABLES}

_ROWS = """
    SELECT d.{noun}, d.display_name, d.description, d.owner, d.docs_url, d.tags, d.extra, d.descriptor_hash,
           d.created_at, d.updated_at, d.last_seen_at
      FROM {table} d
     WHERE %(name)s::text IS NULL OR d.{noun} = %(name)s
"""

HASH = 7
"""Where a row has its hash."""

ROWS: Mapping[Noun, str] = {noun: _ROWS.format(table=TABLES[noun], noun=noun) for noun in TABLES}

VERSIONS = (
    "SELECT v.descriptor_hash, v.fields FROM awa.descriptor_versions v WHERE v.descriptor_hash = ANY (%(hashes)s)"
)


def read_descriptors(look: Look, noun: Noun, name: str | None = None) -> dict[str, DescriptorInfo]:
    """The catalogue of queues or of kinds by name; or what it has of one, which may be nothing."""
    rows = {row[0]: row for row in look.rows(ROWS[noun], name=name)}
    live = dict.fromkeys(rows, 0)
    others: dict[str, dict[str, list[list[int]]]] = {}  # name -> hash that the row does not have -> runtimes by set
    for runtimes, text in look.rows(SETS[noun]) if rows else ():
        hashes: dict[str, str] = orjson.loads(text)
        for one in rows.keys() & hashes.keys():
            live[one] += len(runtimes)
            if hashes[one] != rows[one][HASH]:
                others.setdefault(one, {}).setdefault(hashes[one], []).append(runtimes)
    unlike = list({told for by_hash in others.values() for told in by_hash})
    versions = dict(look.rows(VERSIONS, hashes=unlike)) if unlike else {}
    return {one: _info(row, live[one], others.get(one, {}), versions) for one, row in rows.items()}


def _info(
    row: tuple[Any, ...], live_runtimes: int, others: Mapping[str, list[list[int]]], versions: Mapping[str, Any]
) -> DescriptorInfo:
    here = dict(zip(FIELDS, row[1:HASH], strict=True))
    return DescriptorInfo(
        **here | {"tags": tuple(here["tags"])},
        descriptor_hash=row[HASH],
        created_at=row[HASH + 1],
        updated_at=row[HASH + 2],
        last_seen_at=row[HASH + 3],
        live_runtimes=live_runtimes,
        drift=[
            Drift(_together(runtimes), other, _differing(here, versions.get(other)))
            for other, runtimes in sorted(others.items())
        ],
    )


def _together(sets: list[list[int]]) -> list[int]:
    """All numbers of sets that are sorted, sorted; nearly always there is one, of as many as a fleet has workers."""
    return list(sets[0]) if len(sets) == 1 else sorted(chain(*sets))


def _differing(here: Mapping[str, Any], there: Mapping[str, Any] | None) -> list[str]:
    if there is None:
        return []
    found = [name for name in FIELDS if name != "extra" and here[name] != there.get(name)]
    # as JSON: to Python 1 is 1.0, and True; and jsonb has one number for 1e16 and 10000000000000000
    if not found or canonical_json(here["extra"]) != canonical_json(there.get("extra")):
        found.append("extra")
    return found


# --- forgetting

_FORGET = """
    DELETE FROM {table} d
     WHERE d.{noun} = ANY (ARRAY(
           SELECT o.{noun}
             FROM {table} o
            WHERE o.last_seen_at < coalesce(%(now)s, now())
                                   - greatest(%(after)s * interval '1 s', 3 * o.sync_interval_ms * interval '1 ms')
            ORDER BY o.{noun}
            LIMIT %(limit)s
              FOR UPDATE))
"""

FORGET: Mapping[Noun, str] = {noun: _FORGET.format(table=TABLES[noun], noun=noun) for noun in TABLES}

# One that a row has is kept, and one that a live runtime declares.
FORGET_VERSIONS = f"""
    WITH declared AS MATERIALIZED (
        SELECT e.value AS descriptor_hash
          FROM ({SETS["queue"]} UNION ALL {SETS["kind"]}) s(runtimes, hashes)
         CROSS JOIN LATERAL json_each_text(s.hashes::json) e
    )
    DELETE FROM awa.descriptor_versions d
     WHERE d.descriptor_hash = ANY (ARRAY(
           SELECT o.descriptor_hash
             FROM awa.descriptor_versions o
            WHERE o.last_seen_at < coalesce(%(now)s, now()) - greatest(%(after)s * interval '1 s', interval '2 h')
              AND NOT EXISTS (SELECT FROM awa.queue_descriptors q WHERE q.descriptor_hash = o.descriptor_hash)
              AND NOT EXISTS (SELECT FROM awa.job_kind_descriptors k WHERE k.descriptor_hash = o.descriptor_hash)
              AND NOT EXISTS (SELECT FROM declared l WHERE l.descriptor_hash = o.descriptor_hash)
            ORDER BY o.descriptor_hash
            LIMIT %(limit)s
              FOR UPDATE OF o))
"""

IMPATIENT = "SELECT set_config('lock_timeout', '200ms', true)"
"""Who has a table to himself, as a VACUUM FULL, is not waited for: what else the leader does would wait too."""


def forget(conn: Connection[Any], schema: Schema, *, after: float, limit: int, now: datetime | None = None) -> int:
    """Delete up to *limit* rows of each table that no worker has seen for so long; returns how many.

    Args:
        after: Seconds; a row stays for three ticks at least, and what a hash stands for two hours.
        now: What to take for now; None: the database's clock.

    Raises:
        psycopg.errors.LockNotAvailable: Somebody has one of the tables, or rows, to himself; nothing was deleted.
    """
    params = {"after": after, "limit": limit, "now": now}
    with conn.pipeline():  # one transaction, on its way as a whole: who freezes leaves none open
        conn.execute(IMPATIENT)
        deleted = [conn.execute(schema.sql(query), params) for query in (*FORGET.values(), FORGET_VERSIONS)]
    return sum(cursor.rowcount for cursor in deleted)
