"""Jobs: putting them in, completing one inside a handler's transaction, finding one again.

Claiming and settling, which share one round trip, are in ``line``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
import psycopg
from psycopg import AsyncConnection, Connection, Cursor
from psycopg.rows import class_row

from awa._core import int2_array, text_array
from awa.errors import AwaError, JobNotFound, SchemaNotMigrated, StaleAttempt, UniqueConflict, ValidationError
from awa.job import JobId, JobState
from awa.lent import Driver
from awa.storage import drivers
from awa.storage.drivers import Array, Int2s, OwnCursor, sqlstate
from awa.storage.rows import read_anything
from awa.storage.schema import Schema

if TYPE_CHECKING:
    from awa.storage.grants import Part


KeyAt = Callable[[float], bytes]
"""The database's time in seconds since 1970 -> the key of a job that is unique for a period."""


class JobRow(NamedTuple):  # a tuple: made once per job, in half the time of a frozen dataclass
    """A validated job, ready to be written."""

    queue: str
    """Where it waits."""
    kind: str
    """Which handler runs it."""
    args: bytes
    """JSON text."""
    priority: int
    """1 to 4."""
    max_attempts: int
    """1 to 1000."""
    timeout_ms: int | None = None
    """Deadline of an attempt; None: as its kind says."""
    tags: tuple[str, ...] | None = None
    """For finding it again."""
    metadata: bytes | None = None
    """JSON text."""
    concurrency_key: str | None = None
    """What it shares with others, of which so many run at once."""
    ordering_key: str | None = None
    """What it shares with others, of which one runs after the other."""
    expires_at: datetime | None = None
    """No attempt begins after this instant."""
    run_at: datetime | None = None
    """Not before; None: at once, or after *delay*."""
    delay: float | None = None
    """Seconds from the database's now."""
    unique: bytes | KeyAt | None = None
    """The key it shares with its equals: 16 bytes, and a 17th with the states that hold it, if they are not the usual.
    Or what gives it; its producer asks that before the row is written."""
    on_conflict: str | None = None
    """``return``, ``raise`` or ``replace``, when it has a key."""
    follow_ups: bytes | None = None
    """JSON text: what to enqueue when it has ended."""
    parents: tuple[int, ...] | None = None
    """The jobs that it waits for."""
    on_parent_failure: str | None = None
    """``cancel``, which is what None means, ``run`` or ``discard``."""

    @property
    def is_plain(self) -> bool:
        """It is available at once and has no rarely used option."""
        return self[5:] == _PLAIN

    @property
    def is_bound(self) -> bool:
        """It has to do with other jobs: equal ones, those before it, or those after."""
        return self[13:] != _UNBOUND


_PLAIN = (None,) * 13
AT_ONCE = (None,) * 7
"""The end, from ``run_at`` on, of a row that is available at once and has nothing to do with other jobs."""
_NOTHING_RARE = (None,) * 8
_UNBOUND = (None,) * 5


class Written(NamedTuple):
    """What became of a row."""

    id: JobId
    """The job, or the one that has its key."""
    is_new: bool
    """Whether it was written."""


# Ring for a queue only when somebody sleeps at its bell; see awa.ring in migrations/0002_bell.sql. Written into the
# statements: as a function call it costs a fifth of the rate of single inserts.
_BELLS = """(SELECT count(pg_notify('{channel}', q)) FROM unnest(%(bells)s::text[]) q
             WHERE CASE WHEN pg_try_advisory_lock_shared(hashtextextended('awa.bell:' || q, 0))
                        THEN NOT pg_advisory_unlock_shared(hashtextextended('awa.bell:' || q, 0)) ELSE true END)"""

# The id comes out of the same expression: one column fewer to convert.
_ONE_BELL = """CASE WHEN pg_try_advisory_lock_shared(hashtextextended('awa.bell:' || queue, 0))
                   THEN CASE WHEN pg_advisory_unlock_shared(hashtextextended('awa.bell:' || queue, 0)) THEN id END
                   ELSE (SELECT id FROM pg_notify('{channel}', queue)) END"""

INSERT_ONE = """
    INSERT INTO awa.jobs (queue, lane, priority, kind, args, max_attempts)
    VALUES (%s, %s::smallint, %s::smallint, %s, %s::json, %s::smallint)
    RETURNING {id}
"""

INSERT_PLAIN = """
    INSERT INTO awa.jobs (queue, lane, priority, kind, args, max_attempts)
    SELECT i.queue, 2 * i.priority + 1, i.priority, i.kind, i.args::json, i.max_attempts
      FROM unnest(%(queues)b::text[], %(priorities)b::smallint[], %(kinds)b::text[], %(args)b::text[],
                  %(max_attempts)b::smallint[]) AS i(queue, priority, kind, args, max_attempts)
    RETURNING id, {bell}
"""

# The ids are drawn first: which table a row goes to depends on the database's clock.
INSERT_ANY = """
    WITH input AS MATERIALIZED (
        SELECT nextval('awa.entry_id_seq') AS id, t.n, t.queue, t.priority, t.kind, t.args::json AS args,
               t.max_attempts, t.timeout_ms, t.metadata::json AS metadata, t.run_at, t.concurrency_key, t.ordering_key,
               t.expires_at::timestamptz AS expires_at,
               CASE WHEN t.tags IS NOT NULL THEN ARRAY(SELECT json_array_elements_text(t.tags::json)) END AS tags,
               t.run_at IS NULL OR t.run_at <= clock_timestamp() AS is_due
          FROM (SELECT i.n, i.queue, i.priority, i.kind, i.args, i.max_attempts, i.timeout_ms, i.tags, i.metadata,
                       i.concurrency_key, i.ordering_key, i.expires_at,
                       coalesce(i.run_at::timestamptz, clock_timestamp() + i.delay * interval '1 s') AS run_at
                  FROM unnest(%(queues)b::text[], %(priorities)b::smallint[], %(kinds)b::text[], %(args)b::text[],
                              %(max_attempts)b::smallint[], %(timeouts)s::integer[], %(tags)b::text[],
                              %(metadata)b::text[], %(run_ats)b::text[], %(delays)s::double precision[],
                              %(concurrency_keys)b::text[], %(ordering_keys)b::text[], %(expires_ats)b::text[])
                       WITH ORDINALITY AS i(queue, priority, kind, args, max_attempts, timeout_ms, tags, metadata,
                                            run_at, delay, concurrency_key, ordering_key, expires_at, n)
                 ORDER BY i.n) t
    ), available AS (
        INSERT INTO awa.jobs (entry_id, id, queue, lane, priority, kind, args, max_attempts, timeout_ms, tags, metadata,
                              concurrency_key, ordering_key, expires_at)
        SELECT i.id, i.id, i.queue, 2 * i.priority + 1, i.priority, i.kind, i.args, i.max_attempts, i.timeout_ms,
               i.tags, i.metadata, i.concurrency_key, i.ordering_key, i.expires_at
          FROM input i WHERE i.is_due ORDER BY i.n
    ), scheduled AS (
        INSERT INTO awa.waiting_jobs (id, run_at, queue, priority, kind, args, max_attempts, timeout_ms, tags, metadata,
                                      concurrency_key, ordering_key, expires_at)
        SELECT i.id, i.run_at, i.queue, i.priority, i.kind, i.args, i.max_attempts, i.timeout_ms, i.tags, i.metadata,
               i.concurrency_key, i.ordering_key, i.expires_at
          FROM input i WHERE NOT i.is_due
    ), bells AS MATERIALIZED (
        SELECT array_agg(DISTINCT CASE WHEN i.is_due THEN i.queue ELSE '' END) AS queues
          FROM input i WHERE i.is_due OR i.run_at < clock_timestamp() + interval '1.5 s'
    )
    SELECT i.id, (SELECT {ring} FROM bells b) FROM input i ORDER BY i.n
"""

ENQUEUE_KEY = """
    SELECT id, is_new
      FROM awa.enqueue_v2(p_kind => %s, p_args => %s::json, p_queue => %s, p_priority => %s::integer,
                          p_max_attempts => %s::integer, p_unique_key => %s::bytea, p_on_conflict => %s,
                          p_notify => {notify})
"""

ENQUEUE_ONE = """
    SELECT id, is_new
      FROM awa.enqueue_v2(p_queue => %(queue)s, p_kind => %(kind)s, p_args => %(args)s::json,
                          p_priority => %(priority)s::integer, p_max_attempts => %(max_attempts)s::integer,
                          p_timeout_ms => %(timeout_ms)s::integer, p_tags => %(tags)s::text[],
                          p_metadata => %(metadata)s::json, p_run_at => %(run_at)s::timestamptz,
                          p_delay => %(delay)s::double precision * interval '1 s', p_unique_key => %(key)s::bytea,
                          p_unique_states => %(states)s::text[], p_on_conflict => %(on_conflict)s,
                          p_follow_ups => %(follow_ups)s::json, p_concurrency_key => %(concurrency_key)s,
                          p_ordering_key => %(ordering_key)s, p_expires_at => %(expires_at)s::timestamptz,
                          p_notify => {notify})
"""

ENQUEUE_MANY = """
    SELECT n, id, is_new, problem
      FROM awa.enqueue_many_v2(%(queues)b::text[], %(priorities)b::smallint[], %(kinds)b::text[], %(args)b::text[],
                               %(max_attempts)b::smallint[], %(timeouts)s::integer[], %(tags)b::text[],
                               %(metadata)b::text[], %(run_ats)b::text[], %(delays)s::double precision[],
                               %(keys)s::bytea[], %(on_conflict)s::text[], %(follow_ups)b::text[], %(parents)s::text[],
                               %(on_parent_failure)s::text[], %(concurrency_keys)b::text[], %(ordering_keys)b::text[],
                               %(expires_ats)b::text[], {notify})
"""

COPY = """
    COPY awa.jobs (queue, lane, priority, kind, args, max_attempts, timeout_ms, tags, metadata, concurrency_key,
                   ordering_key, expires_at)
    FROM STDIN WITH (ENCODING 'UTF8')
"""

RING = "SELECT awa.ring(%(queues)s::text[])"


@lru_cache(maxsize=64)
def _statement(schema: Schema, text: str, notify: bool) -> str:
    parts = {"{id}": "id", "{bell}": "0", "{ring}": "0", "{notify}": "false"}
    if notify:
        ring = "count(awa.ring(b.queues)) FILTER (WHERE b.queues IS NOT NULL)"
        parts = {"{id}": _ONE_BELL, "{bell}": _BELLS, "{ring}": ring, "{notify}": "true"}
    for mark, part in parts.items():
        text = text.replace(mark, part)
    return schema.sql(text.replace("{channel}", schema.channel))


REFUSED = (
    *(psycopg.errors.UndefinedTable, psycopg.errors.UndefinedFunction, psycopg.errors.InvalidSchemaName),
    psycopg.errors.InsufficientPrivilege,
)
"""What the server says when the schema is not there, or not for this role; see :func:`refusal`."""

_REFUSED = {error.sqlstate for error in REFUSED}
_DENIED = psycopg.errors.InsufficientPrivilege.sqlstate
_STANDS = psycopg.errors.UniqueViolation.sqlstate


def refusal(conn: Driver | AsyncConnection[Any], schema: Schema, part: Part, error: Any) -> AwaError:
    """What one of ``REFUSED``, or psycopg2's of the same code, means to who needs the rights of *part*."""
    if sqlstate(error) == _DENIED:
        from awa.storage.grants import denied  # as below

        return denied(conn, schema, part, error)
    from awa.storage.migrate import OLDEST_SUPPORTED  # needed here only, and a third of the time of `import awa`

    # the database of an app is one that `awa` need not find
    command = "flask awa migrate" if "awa.ext.flask" in sys.modules else "awa migrate"
    return SchemaNotMigrated(
        f"schema {schema.name} of this database has no awa tables: run `{command}` for it",
        expected=OLDEST_SUPPORTED,
        found=0,
    )


def insert_job(conn: Driver, schema: Schema, row: JobRow, *, notify: bool) -> Written:
    """Write one job in the transaction of *conn*.

    Args:
        notify: Whether to wake a worker that sleeps for the queue; it is woken when the transaction commits.

    Raises:
        UniqueConflict, JobNotFound: As for :func:`insert_jobs`.
    """
    if row.is_plain:
        queue, kind, args, priority, max_attempts = row[:5]
        # as text: the server knows the columns' types, and psycopg has one type to look up
        params: tuple[str | bytes, ...] = (
            queue,
            str(2 * priority + 1),
            str(priority),
            kind,
            args.decode(),
            str(max_attempts),
        )
        return Written(_one_row(conn, schema, INSERT_ONE, notify, params)[0], True)
    if row.unique is None or row.parents is not None:
        return insert_jobs(conn, schema, [row], notify=notify)[0]
    assert isinstance(row.unique, bytes)
    if row[5:13] == _NOTHING_RARE and row.follow_ups is None and len(row.unique) == 16:
        queue, kind, args, priority, max_attempts = row[:5]
        params = (kind, args.decode(), queue, str(priority), str(max_attempts), row.unique, _mode(row))
        job_id, is_new = _one_row(conn, schema, ENQUEUE_KEY, notify, params)
    else:
        [(job_id, is_new)] = _rows(conn, schema, _statement(schema, ENQUEUE_ONE, notify), _named(row))
    if not is_new and row.on_conflict == "raise":
        raise conflict("", row.unique, JobId(job_id))
    return Written(JobId(job_id), is_new)


def _mode(row: JobRow) -> str:
    """What the database is to do about a conflict. Not to raise, which would break the transaction: it returns."""
    return "replace" if row.on_conflict == "replace" else "return"


def _named(row: JobRow) -> dict[str, Any]:
    """The parameters of ``ENQUEUE_ONE``."""
    key = row.unique
    assert isinstance(key, bytes)
    return row._asdict() | {
        "args": row.args.decode(),
        "tags": None if row.tags is None else list(row.tags),
        "metadata": None if row.metadata is None else row.metadata.decode(),
        "key": key[:16],
        "states": None if len(key) == 16 else [state for bit, state in enumerate(JobState) if key[16] >> bit & 1],
        "on_conflict": _mode(row),
        "follow_ups": None if row.follow_ups is None else row.follow_ups.decode(),
    }


def _one_row(conn: Driver, schema: Schema, text: str, notify: bool, params: tuple[Any, ...]) -> tuple[Any, ...]:
    """The row that a producer's statement for one job gives."""
    if not isinstance(conn, Connection) or not drivers.speaks_utf8(conn):
        return _rows(conn, schema, _statement(schema, text, notify), params)[0]
    # Kept with the connection for the next insert: a new cursor, which knows no types yet, costs a tenth of an insert.
    # Taken out meanwhile, so that two threads on one connection do not read each other's results.
    kept: _Kept | None = conn.__dict__.pop(_KEPT, None)
    if kept is None or kept[0] is not schema or kept[1] is not notify or kept[2] is not text:
        kept = schema, notify, text, _statement(schema, text, notify), OwnCursor(conn)
    _, _, _, statement, cursor = kept
    try:
        cursor.execute(statement, params)
    except REFUSED as error:
        raise refusal(conn, schema, "producer", error) from error
    found = cursor.fetchone()
    assert found is not None
    conn.__dict__[_KEPT] = kept
    return found


_KEPT = "_awa_insert"

_Kept = tuple[Schema, bool, str, str, OwnCursor]


def insert_jobs(conn: Driver, schema: Schema, rows: Sequence[JobRow], *, notify: bool) -> list[Written]:
    """Write many jobs in one statement, in the transaction of *conn*; what became of them comes in the order of *rows*.

    Raises:
        UniqueConflict: A key of a row that refuses it is held; nothing is written, and the transaction stays usable.
        JobNotFound: A parent does not exist; likewise.
        ValidationError: A job that would be replaced would wait for itself; likewise.
    """
    if not rows:
        return []
    return _written(rows, _rows(conn, schema, *_batch(schema, rows, notify)))


async def insert_jobs_async(
    conn: AsyncConnection[Any], schema: Schema, rows: Sequence[JobRow], *, notify: bool
) -> list[Written]:
    """As :func:`insert_jobs`."""
    if not rows:
        return []
    return _written(rows, await _rows_async(conn, schema, *_batch(schema, rows, notify)))


def _batch(schema: Schema, rows: Sequence[JobRow], notify: bool) -> tuple[str, dict[str, Any]]:
    """The statement that writes *rows*, and its parameters."""
    params: dict[str, Any] = {
        "queues": Array(text_array([row.queue for row in rows])),
        "priorities": Int2s(int2_array([row.priority for row in rows])),
        "kinds": Array(text_array([row.kind for row in rows])),
        "args": Array(text_array([row.args for row in rows])),
        "max_attempts": Int2s(int2_array([row.max_attempts for row in rows])),
    }
    rare = [row for row in rows if row[5:] != _PLAIN]  # not by is_plain, which would be a call for each
    if not rare:
        text = INSERT_PLAIN
        params["bells"] = sorted({row.queue for row in rows})
    else:
        is_bound = any(row.is_bound for row in rare)
        text = ENQUEUE_MANY if is_bound else INSERT_ANY
        params |= {
            "timeouts": [row.timeout_ms for row in rows],
            "tags": Array(text_array([None if row.tags is None else orjson.dumps(row.tags) for row in rows])),
            "metadata": Array(text_array([row.metadata for row in rows])),
            "run_ats": Array(text_array([None if row.run_at is None else row.run_at.isoformat() for row in rows])),
            "delays": [row.delay for row in rows],
            "concurrency_keys": Array(text_array([row.concurrency_key for row in rows])),
            "ordering_keys": Array(text_array([row.ordering_key for row in rows])),
            "expires_ats": Array(
                text_array([None if row.expires_at is None else row.expires_at.isoformat() for row in rows])
            ),
        }
        if is_bound:
            params |= {
                "keys": [row.unique for row in rows],
                "on_conflict": [row.on_conflict for row in rows],
                "follow_ups": Array(text_array([row.follow_ups for row in rows])),
                "parents": [None if row.parents is None else f"{{{','.join(map(str, row.parents))}}}" for row in rows],
                "on_parent_failure": [row.on_parent_failure for row in rows],
            }
    return _statement(schema, text, notify), params


def _written(rows: Sequence[JobRow], found: list[tuple[Any, ...]]) -> list[Written]:
    """What became of *rows*, by what the statement of their batch gave."""
    if len(found[0]) == 4:  # ENQUEUE_MANY
        return enqueued(rows, found)
    return [Written(row[0], True) for row in found]


def enqueued(rows: Sequence[JobRow], found: list[tuple[Any, ...]]) -> list[Written]:
    """What ``ENQUEUE_MANY`` says about *rows*.

    Raises:
        UniqueConflict, JobNotFound, ValidationError: The batch was not written.
    """
    n, other, _, problem = found[0]
    if problem is None:
        return [Written(JobId(job_id), is_new) for _, job_id, is_new, _ in found]
    row = rows[n - 1]
    where = f"items[{n - 1}]: " if len(rows) > 1 else ""
    if problem == "no_parent":
        raise JobNotFound(
            f"{where}no job has the id {other} that it is to run after, or its history is gone: nothing was inserted",
            job_id=other,
        )
    if problem == "circle":
        raise ValidationError(
            f"{where}after would have job {other}, which has the unique key and is to be replaced, wait for itself: "
            "leave that job, and those that run after it, out of after; nothing was inserted",
            path=f"items[{n - 1}].after" if len(rows) > 1 else "after",
            value=list(row.parents or ()),
        )
    assert isinstance(row.unique, bytes)
    raise conflict(where, row.unique, None if other is None else JobId(other))


def conflict(where: str, unique: bytes, other: JobId | None) -> UniqueConflict:
    """What to raise when *other* has the key of a job; None: a job of the same batch."""
    key = unique[:16]
    who = f"job {other}" if other is not None else "another job of this batch"
    return UniqueConflict(
        f"{where}{who} has the unique key {key.hex()}, and on_conflict is 'raise': nothing was inserted",
        existing_id=other,
        key=key,
    )


def _rows(conn: Driver, schema: Schema, statement: str, params: drivers.Params) -> list[tuple[Any, ...]]:
    """What a producer's *statement* gives, sent in the transaction of *conn*.

    Each parameter has a cast in the statement: not every driver tells the server of types.
    """
    with _explaining(conn, schema):
        return drivers.rows(conn, statement, params)


async def _rows_async(
    conn: AsyncConnection[Any], schema: Schema, statement: str, params: drivers.Params
) -> list[tuple[Any, ...]]:
    with _explaining(conn, schema):
        return await drivers.rows_async(conn, statement, params)


@contextmanager
def _explaining(conn: Driver | AsyncConnection[Any], schema: Schema) -> Iterator[None]:
    """Have what the server refuses to a producer raise what it means."""
    try:
        yield
    except Exception as error:
        if sqlstate(error) in _REFUSED:
            raise refusal(conn, schema, "producer", error) from error
        raise


def copy_jobs(conn: Driver, schema: Schema, rows: Iterable[JobRow], *, notify: bool) -> int:
    """Write jobs that are available at once by COPY, in the transaction of *conn*; returns how many.

    All or nothing, on a connection in autocommit mode too; a job that is refused half-way leaves the caller's
    transaction usable.
    """
    lines = _Lines(rows)
    with _explaining(conn, schema):
        drivers.copy(conn, schema.sql(COPY), iter(lines))
        if notify and lines.queues:
            drivers.rows(conn, schema.sql(RING), {"queues": sorted(lines.queues)})
    return lines.count


async def copy_jobs_async(conn: AsyncConnection[Any], schema: Schema, rows: Iterable[JobRow], *, notify: bool) -> int:
    """As :func:`copy_jobs`."""
    lines = _Lines(rows)
    with _explaining(conn, schema):
        await drivers.copy_async(conn, schema.sql(COPY), iter(lines))
        if notify and lines.queues:
            await drivers.rows_async(conn, schema.sql(RING), {"queues": sorted(lines.queues)})
    return lines.count


class _Lines:
    """Jobs as chunks of lines for COPY."""

    def __init__(self, rows: Iterable[JobRow]) -> None:
        self._rows = rows
        self.count = 0
        """Lines so far."""
        self.queues: set[str] = set()
        """Where their jobs wait."""

    def __iter__(self) -> Iterator[bytes]:
        lines: list[bytes] = []
        for row in self._rows:
            lines.append(_copy_line(row))
            self.queues.add(row.queue)
            if len(lines) == 500:
                self.count += 500
                yield b"".join(lines)
                lines.clear()
        self.count += len(lines)
        yield b"".join(lines)


def _copy_line(row: JobRow) -> bytes:
    queue, kind, args, priority, max_attempts = row[:5]
    body = args.replace(b"\\", b"\\\\")  # JSON has no raw tab or line break
    rest = _COPY_NOTHING_RARE if row[5:13] == _NOTHING_RARE else _copy_rare(row)
    begin = _copy_text(queue.encode()), 2 * priority + 1, priority, _copy_text(kind.encode())
    return b"%b\t%d\t%d\t%b\t%b\t%d\t%b" % (*begin, body, max_attempts, rest)


_COPY_NOTHING_RARE = b"\t".join([b"\\N"] * 6) + b"\n"


def _copy_rare(row: JobRow) -> bytes:
    tags = b"\\N"
    if row.tags is not None:
        quoted = ('"' + tag.replace("\\", "\\\\").replace('"', '\\"') + '"' for tag in row.tags)
        tags = _copy_text(f"{{{','.join(quoted)}}}".encode())
    return b"\t".join(
        (
            b"\\N" if row.timeout_ms is None else b"%d" % row.timeout_ms,
            tags,
            b"\\N" if row.metadata is None else row.metadata.replace(b"\\", b"\\\\"),
            b"\\N" if row.concurrency_key is None else _copy_text(row.concurrency_key.encode()),
            b"\\N" if row.ordering_key is None else _copy_text(row.ordering_key.encode()),
            b"\\N\n" if row.expires_at is None else row.expires_at.isoformat().encode() + b"\n",
        )
    )


def _copy_text(text: bytes) -> bytes:
    return text.replace(b"\\", b"\\\\").replace(b"\t", b"\\t").replace(b"\n", b"\\n").replace(b"\r", b"\\r")


COMPLETE = """
    SELECT awa.complete_v2(%s::bigint, %s::bigint, %s::smallint, %s::integer, %s::smallint, %s::integer, %s::json,
                           %s::boolean)
"""


def complete(
    conn: Driver,
    schema: Schema,
    *,
    runtime: int,
    claim_id: int,
    slot: int,
    nonce: int,
    idx: int,
    elapsed_ms: int,
    result: bytes | None,
    notify: bool,
    job_id: int,
    entry_id: int,
) -> None:
    """Complete one attempt in the transaction of *conn*, at any isolation level.

    Args:
        result: JSON text that is kept; None: nothing is.
        notify: Whether to wake workers for what follows, when the transaction commits.

    Raises:
        StaleAttempt: The attempt ended before; the transaction cannot commit any more.
    """
    try:
        kept = None if result is None else result.decode()
        drivers.rows(conn, schema.sql(COMPLETE), (runtime, claim_id, slot, nonce, idx, elapsed_ms, kept, notify))
    except Exception as error:
        state = sqlstate(error)
        table = error.diag.table_name or "" if state == _STANDS else ""  # type: ignore[attr-defined]
        if table.startswith("attempt_ends") or state == "AWA04":
            raise StaleAttempt(
                f"the attempt of job {job_id} has ended already: it was rescued or cancelled, or it is completed; "
                "roll the transaction back",
                job_id=job_id,
                entry_id=entry_id,
            ) from error
        if state == _DENIED:
            raise refusal(conn, schema, "worker", error) from error
        raise


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job as the database knows it."""

    id: JobId
    """The job."""
    queue: str
    """Where it waits or ran."""
    kind: str
    """Which handler runs it."""
    state: JobState
    """What it is doing."""
    priority: int
    """1, which runs first, to 4."""
    attempt: int
    """Counted attempts, the current or coming one included."""
    max_attempts: int
    """How many it has."""
    args: Any
    """As JSON gives them; their text when Python cannot read it."""
    metadata: Any
    """As JSON gives it, likewise; None when there is none."""
    tags: list[str]
    """For finding it again."""
    concurrency_key: str | None
    """Of jobs with this key no more run at once than the queue's ``max_running_per_key``."""
    ordering_key: str | None
    """Of jobs with this key the next starts when the one before has ended."""
    expires_at: datetime | None
    """When it is cancelled if it has not started; None for never, and of a job that has failed or was cancelled."""
    created_at: datetime
    """When it was inserted."""
    run_at: datetime | None
    """Not before, while it waits for a time."""
    claimed_at: datetime | None
    """When a worker took it for its last attempt; None when none has, or when that was long ago."""
    ended_at: datetime | None
    """When it ended for good."""
    elapsed_ms: int | None
    """How long the handler ran in the last attempt, once that has ended."""
    runtime: int | None
    """The worker of the last attempt: one start of a process."""
    hostname: str | None
    """Where that worker runs or ran."""
    pid: int | None
    """Its process there."""
    waits_for: str | None
    """``time``; ``parent``: for other jobs; ``kind``: for a worker that knows it; ``key`` or ``order``: while others
    have its concurrency_key, or its ordering_key."""
    error: dict[str, Any] | None
    """``type``, ``text``, ``traceback`` of the last attempt that failed or was cancelled; of a completed job, why its
    follow-ups could not be inserted, else None."""
    history: list[dict[str, Any]]
    """Ended attempts that were not successful, oldest first, at most 20."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", JobState(self.state))
        found: tuple[Any, Any] = self.error, self.history  # what cannot be read comes as text
        object.__setattr__(self, "error", found[0] if isinstance(found[0], dict) else None)
        object.__setattr__(self, "history", found[1] if isinstance(found[1], list) else [])


GET = """
    SELECT id, queue, kind, state, priority, attempt, max_attempts, args, metadata, coalesce(tags, '{}') AS tags,
           concurrency_key, ordering_key, CASE WHEN isfinite(expires_at) THEN expires_at END AS expires_at,
           created_at, run_at, claimed_at, ended_at, elapsed_ms, runtime, hostname, pid, waits_for, error,
           coalesce(history, '[]') AS history
      FROM awa.find_job_v3(%(id)s::bigint)
"""


def get_job(conn: Connection[Any], schema: Schema, job_id: int) -> JobInfo:
    """Find a job by its id.

    Raises:
        JobNotFound: There is none, or its history is gone.

    Source: migrations/0011_inspect.sql.
    """
    try:
        with Cursor(conn, row_factory=class_row(JobInfo)) as cursor:
            read_anything(cursor)
            # twice: a job that is carried out of a segment which is emptied at this moment is not found at first
            found = cursor.execute(schema.sql(GET), {"id": job_id}).fetchone()
            found = found or cursor.execute(schema.sql(GET), {"id": job_id}).fetchone()
    except REFUSED as error:
        raise refusal(conn, schema, "producer", error) from error
    if found is None:
        raise not_found(job_id)
    return found


def not_found(job_id: int) -> JobNotFound:
    """What is raised of an id that no job has."""
    text = f"no job has the id {job_id}: its history is gone, or its insert is not committed; see `awa job list`"
    return JobNotFound(text, job_id=job_id)
