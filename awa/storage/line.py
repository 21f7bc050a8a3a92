"""The connection on which a worker settles, claims and listens.

It speaks libpq's protocol through psycopg's own wrapper of it: one pipelined round trip carries the settling of what
has ended and the claims of what comes next, each a transaction of its own, in binary both ways. Arrays are written and
read by ``awa._core``.
"""

from __future__ import annotations

import select
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import psycopg
from psycopg.pq import ConnStatus, DiagnosticField, ExecStatus, Format

from awa._core import Attempt, Flush, Handler, decode_batch, int2_array, text_array
from awa.errors import RuntimeGone, StorageNotTrusted
from awa.storage.connection import read_only
from awa.storage.pooler import MISSING_STATEMENT, SET_READ_COMMITTED, declare, is_pooled
from awa.storage.schema import Schema
from awa.storage.trust import connect_trusted, rebase_command

SETTLE = """
    SELECT claim_id, idx
      FROM awa.settle_v1($1::bigint, $2::bigint, $3::bigint[], $4::smallint[], $5::integer[], $6::integer[],
                         $7::integer[], $8::smallint[], $9::integer[], $10::bigint[], $11::smallint[], $12::integer[],
                         $13::smallint[], $14::text[], $15::double precision[], $16::integer[], $17::text[])
"""

CLAIM = """
    SELECT flags, claim_id, slot, nonce, priority, ids, entry_ids, attempts, max_attempts, kinds, lens, args,
           created_at, details
      FROM awa.claim_v2($1::text, $2::bigint, $3::text[], $4::integer, $5::boolean, $6::double precision)
"""

FETCH_ARGS = """
    SELECT idx, convert_to(args, 'UTF8') FROM awa.fetch_args_v1($1::bigint, $2::bigint, $3::smallint, $4::smallint[])
"""

UNLOCK_BELL = "SELECT pg_advisory_unlock(hashtextextended('awa.bell:' || $1::text, 0))"

# Sent whether or not somebody holds the bell: whoever serves the queue and has a free thread comes and takes it.
ASK_FOR_HELP = "SELECT pg_notify(awa.channel(), $1::text)"

STATEMENTS = {b"settle": SETTLE, b"claim": CLAIM, b"fetch": FETCH_ARGS, b"unlock": UNLOCK_BELL, b"help": ASK_FOR_HELP}


def statements(schema: Schema) -> list[str]:
    """All that a line ever sends, once it is open."""
    return [schema.sql(text) for text in STATEMENTS.values()]


HELP = "\x01"
"""Begins a notification that asks for help; the queue follows."""

ARMED, BUSY, COME_AGAIN, ALONE, PAUSED, FULL = 1, 2, 4, 8, 16, 32

REPLY_TIMEOUT = 60.0
"""Seconds after which a server that does not answer counts as lost."""


def reply_timeout() -> float:
    """The same, for a line that nobody waits for."""
    return REPLY_TIMEOUT


@dataclass(frozen=True, slots=True)
class Wanted:
    """One claim to make."""

    queue: str
    """Of which queue."""
    limit: int
    """Most attempts to start."""
    arm: bool = False
    """Whether to take the queue's bell first."""


@dataclass(slots=True)
class Claimed:
    """What one claim brought."""

    queue: str
    """Of which queue."""
    attempts: list[Attempt] = field(default_factory=list)
    """First to run first."""
    batches: list[list[Attempt]] = field(default_factory=list)
    """The same, one list per claim row."""
    is_armed: bool = False
    """The queue's bell was taken."""
    is_busy: bool = False
    """Another claimer held the queue, so fewer may have come than there are."""
    come_again: bool = False
    """Nothing was started, yet the queue is not empty."""
    is_alone: bool = False
    """It brought one job, whose last attempt died with its process: run nothing beside it until it has survived."""
    is_paused: bool = False
    """The queue is paused; its bell was not taken."""
    is_full: bool = False
    """The queue's limits let nothing start now; its bell was not taken."""
    ask_after: float | None = None
    """Seconds after which its rate allows a start; None when nobody knows."""
    error: psycopg.Error | None = None
    """Why it failed; nothing was claimed then."""


@dataclass(slots=True)
class Settled:
    """What became of one flush."""

    flush: Flush
    """Which."""
    stale: list[tuple[int, int]] = field(default_factory=list)
    """Members (claim id, position) whose outcome was refused: they had ended before, or a crash of the server has
    forgotten their claim."""
    error: psycopg.Error | None = None
    """Why nothing of it was recorded; None when all but what is stale is, now or by an earlier sending of it."""


@dataclass(slots=True)
class Reply:
    """What one exchange brought."""

    settled: list[Settled] = field(default_factory=list)
    """One per flush, in the order of the flushes."""
    claims: list[Claimed] = field(default_factory=list)
    """One per claim that was asked for, in that order."""


class Line:
    """A worker's claim connection.

    Args:
        handlers: Kind -> handler; the claims name these kinds.
        priority_aging: Seconds of waiting that count like a level of priority; 0 for none.
        patience: Gives the seconds after which a server that does not answer counts as lost; asked while waiting.

    Raises:
        DatabaseNotFound: No server lets us in that can be written to.
        StorageNotTrusted: The rows belong to another cluster; see :mod:`awa.storage.trust`.
    """

    def __init__(
        self,
        conninfo: str,
        schema: Schema,
        handlers: Mapping[str, Handler],
        *,
        priority_aging: float = 60.0,
        patience: Callable[[], float] = reply_timeout,
    ) -> None:
        self._handlers = {kind.encode(): handler for kind, handler in handlers.items()}
        self._kinds = text_array(sorted(handlers))
        self._aging = struct.pack(">d", priority_aging)
        self._schema = schema
        self._conninfo = conninfo
        self._patience = patience
        self._connection = connect_trusted(conninfo, schema, name="worker", answer_within=patience())
        try:
            self.is_pooled = is_pooled(self._connection)
            """It leads through a transaction pooler: it hears no notification and holds no bell."""
            self.backend = self._connection.backend
            """The server's process, which may outlive the connection; None when there is none of its own."""
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        self._pg = self._connection.pgconn
        self._texts = {name: self._schema.sql(text).encode() for name, text in STATEMENTS.items()}
        if not self.is_pooled:
            self._connection.execute(f"LISTEN {self._schema.channel}")
        self._pg.nonblocking = 1
        self._pg.enter_pipeline_mode()
        self._poll = select.poll()
        self._poll.register(self._pg.socket, select.POLLIN)
        self._notified: list[str] = []
        if not self.is_pooled:
            for name, text in self._texts.items():
                self._pg.send_prepare(b"awa_" + name, text)
                self._pg.pipeline_sync()
            self._flush_out()
            for _ in self._texts:
                self._receive()

    def close(self) -> None:
        """Close the connection; its bells and locks go with it."""
        self._connection.close()

    def exchange(self, runtime: int, flushes: Sequence[Flush], wanted: Sequence[Wanted]) -> Reply:
        """Settle *flushes* and make the claims *wanted*, in one round trip, each in a transaction of its own.

        Raises:
            psycopg.OperationalError: The connection is lost, or no answer came in time; what became of the flushes and
                the claims is unknown.
            RuntimeGone: Somebody fenced this runtime.
            StorageNotTrusted: The rows come from another cluster.
            DatabaseNotFound: The server refuses to write; what it did before it began to is unknown.
        """
        number = struct.pack(">q", runtime)
        for flush in flushes:
            self._send(b"settle", [number, struct.pack(">q", flush.number), *flush.arrays])
        for want in wanted:
            limit, arm = struct.pack(">i", want.limit), struct.pack(">?", want.arm)
            self._send(b"claim", [want.queue.encode(), number, self._kinds, limit, arm, self._aging])
        self._flush_out()
        reply = Reply()
        for flush in flushes:
            settled = Settled(flush)
            reply.settled.append(settled)
            try:
                settled.stale = [(_int(row[0]), _int(row[1])) for row in self._receive()]
            except psycopg.errors.UniqueViolation as error:
                # the same flush was recorded before, and its acknowledgement lost
                if not (error.diag.table_name or "").startswith("completions"):
                    settled.error = error
            except psycopg.Error as error:
                if error.sqlstate is None:  # not the server's answer: what comes next may belong to anything
                    raise
                settled.error = error
        for want in wanted:
            claimed = Claimed(want.queue)
            reply.claims.append(claimed)
            try:
                rows = self._receive()
            except psycopg.Error as error:
                if error.sqlstate is None:
                    raise
                claimed.error = error
                continue
            for row in rows:
                flags = _int(row[0])
                if row[1] is None:
                    claimed.is_armed = bool(flags & ARMED)
                    claimed.is_busy = bool(flags & BUSY)
                    claimed.come_again = bool(flags & COME_AGAIN)
                    claimed.is_alone = bool(flags & ALONE)
                    claimed.is_paused = bool(flags & PAUSED)
                    claimed.is_full = bool(flags & FULL)
                    claimed.ask_after = None if row[3] is None else _int(row[3]) / 1000
                    continue
                batch = decode_batch(row, runtime, want.queue, self._handlers)
                claimed.batches.append(batch)
                claimed.attempts += batch
        for want, claimed in zip(wanted, reply.claims, strict=True):
            if want.arm and claimed.error is not None:
                # the bell outlives the transaction, and nobody would know that it is held
                self._ask(b"unlock", [want.queue.encode()])
        for lost in (*(settled.error for settled in reply.settled), *(claimed.error for claimed in reply.claims)):
            if isinstance(lost, psycopg.errors.ReadOnlySqlTransaction):
                raise read_only(self._connection) from lost
            if lost is not None and lost.sqlstate == "AWA01":
                raise RuntimeGone(
                    f"runtime {runtime} was silent for too long and its attempts were rescued", runtime=runtime
                ) from lost
            if lost is not None and lost.sqlstate == "AWA03":
                raise StorageNotTrusted(
                    f"{lost.diag.message_primary}: its rows come from another cluster, by a restore or by "
                    f"replication: stop every worker here and run `{rebase_command(self._schema)}`",
                    expected="a frontier of this server's transactions",
                    found="one beyond them",
                ) from lost
        return reply

    def fetch_args(self, runtime: int, attempts: Sequence[Attempt]) -> None:
        """Fetch the args that the claim left out because they are long; one that is not found stays without."""
        by_claim: dict[tuple[int, int], list[Attempt]] = {}
        for attempt in attempts:
            by_claim.setdefault((attempt.batch.claim_id, attempt.batch.slot), []).append(attempt)
        for (claim_id, slot), members in by_claim.items():
            found = {
                _int(row[0]): row[1]
                for row in self._ask(
                    b"fetch",
                    [
                        struct.pack(">q", runtime),
                        struct.pack(">q", claim_id),
                        struct.pack(">h", slot),
                        int2_array([attempt.idx for attempt in members]),
                    ],
                )
            }
            for attempt in members:
                body = found.get(attempt.idx)
                if body is not None:
                    attempt.put_args(body)

    def give_up_bell(self, queue: str, *, ask_for_help: bool) -> None:
        """Let somebody else answer for *queue*, and ask for it when this process cannot."""
        self._ask(b"unlock", [queue.encode()])
        if ask_for_help:
            self.ask_for_help(queue)

    def ask_for_help(self, queue: str) -> None:
        """Have whoever serves *queue* and has a thread free claim from it now."""
        self._ask(b"help", [HELP.encode() + queue.encode()])

    def notifications(self) -> list[str]:
        """The queues that were rung for since the last call, or HELP and a queue; does not wait."""
        self._pg.consume_input()
        self._collect()
        found, self._notified = self._notified, []
        return found

    def fileno(self) -> int:
        """The socket, for select."""
        return self._pg.socket

    def _ask(self, name: bytes, params: list[bytes | None]) -> list[list[bytes | None]]:
        self._send(name, params)
        self._flush_out()
        return self._receive()

    def _send(self, name: bytes, params: Sequence[bytes | None]) -> None:
        formats = [Format.BINARY] * len(params)
        if self.is_pooled:
            # up to the Sync they are one transaction, and one that fails leaves nothing open
            self._pg.send_query_params(SET_READ_COMMITTED.encode(), None)
            self._pg.send_query_params(self._texts[name], params, param_formats=formats, result_format=Format.BINARY)
        else:
            self._pg.send_query_prepared(b"awa_" + name, params, param_formats=formats, result_format=Format.BINARY)
        # A Sync behind every statement: without it they would be one transaction.
        self._pg.pipeline_sync()

    def _flush_out(self) -> None:
        began = time.monotonic()
        while self._pg.flush():
            if time.monotonic() - began > (patience := self._patience()):
                raise psycopg.OperationalError(f"the server has taken nothing for {patience:.0f} seconds")
            self._poll.modify(self._pg.socket, select.POLLIN | select.POLLOUT)
            self._poll.poll(1000)
            self._poll.modify(self._pg.socket, select.POLLIN)
            self._pg.consume_input()

    def _receive(self) -> list[list[bytes | None]]:
        """The rows of the next statement, up to its Sync."""
        rows: list[list[bytes | None]] = []
        error: psycopg.Error | None = None
        while True:
            result = self._next_result()
            if result is None:
                continue
            match result.status:
                case ExecStatus.PIPELINE_SYNC:
                    break
                case ExecStatus.TUPLES_OK:
                    columns = range(result.nfields)
                    rows += [[result.get_value(row, column) for column in columns] for row in range(result.ntuples)]
                case ExecStatus.FATAL_ERROR:
                    error = psycopg.errors.error_from_result(result)
                    if result.error_field(DiagnosticField.SQLSTATE) is None or self._pg.status != ConnStatus.OK:
                        raise psycopg.OperationalError(str(error)) from error
                    if error.sqlstate in MISSING_STATEMENT and not self.is_pooled:
                        declare(self._conninfo, is_pooler=True)
                        self.backend = None
                        raise psycopg.OperationalError(f"a transaction pooler is in between: {error}") from error
                case _:
                    pass
        self._collect()
        if error is not None:
            raise error
        return rows

    def _next_result(self) -> psycopg.pq.abc.PGresult | None:
        began = time.monotonic()
        while self._pg.is_busy():
            left = began + (patience := self._patience()) - time.monotonic()
            if left <= 0:
                raise psycopg.OperationalError(f"the server has not answered for {patience:.0f} seconds")
            if self._poll.poll(min(left, 1.0) * 1000):
                self._pg.consume_input()
        result = self._pg.get_result()
        if result is None and self._pg.status != ConnStatus.OK:
            raise psycopg.OperationalError("the connection is lost")
        return result

    def _collect(self) -> None:
        while (notification := self._pg.notifies()) is not None:
            self._notified.append(notification.extra.decode())


def _int(data: bytes | None) -> int:
    return int.from_bytes(data or b"", "big", signed=True)
