"""What the model keeps in mind: jobs, sessions, workers, and what stands between two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from psycopg.pq import TransactionStatus

from tests.storage.engine import Conn, Member, Outcome

ENDED = ("completed", "failed", "cancelled", "gone")
"""``gone``: completed, and its segment was emptied."""

LATER = 3600.0
"""Seconds that nobody waits for: what waits is made due by a rule."""


@dataclass(eq=False)
class ModelJob:
    """What the database should know of a job whose insert has committed."""

    id: int
    queue: str
    kind: str
    priority: int
    max_attempts: int
    state: str
    attempt: int = 1
    member: Member | None = None
    lent_to: Lender | None = None
    """An open transaction completes its attempt."""
    flush: Flush | None = None
    """Its worker has sent an outcome and has no answer."""
    is_asked: bool = False
    """Somebody asked to cancel its attempt."""
    was_rescued: bool = False
    """Its last attempt that counted ended so."""
    is_express: bool = False
    last_entry: int = 0
    """Of the attempt that ended last."""

    @property
    def is_suspect(self) -> bool:
        """It comes alone, unless it was set aside."""
        return self.was_rescued and self.is_express


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of jobs, with how often it was claimed and ended."""

    id: int
    entry_id: int
    slot: int
    queue: str
    lane: int
    xid: int
    attempt: int
    claims: int
    ends: tuple[str, ...]

    @property
    def is_unclaimed(self) -> bool:
        return not self.claims and not self.ends


@dataclass(frozen=True, slots=True)
class Found:
    """What somebody counted in a slot in which everything had ended. It may be long ago."""

    entries: int
    file: int


@dataclass(eq=False)
class Session:
    """A connection that outlives its transactions, and is replaced when it is lost."""

    conn: Conn

    @property
    def is_open(self) -> bool:
        return not self.conn.closed and self.conn.info.transaction_status != TransactionStatus.IDLE


@dataclass(eq=False)
class Producer(Session):
    """A session that inserts."""

    jobs: list[ModelJob] = field(default_factory=list)
    savepoints: list[int] = field(default_factory=list)
    slots: set[int] = field(default_factory=set)
    """Where its open transaction has written."""
    xid: int | None = None


@dataclass(eq=False)
class Lender(Session):
    """A session in which handlers complete their attempts."""

    isolation: str = ""
    snapshot_at: int | None = None
    lent: list[ModelJob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class End:
    """An outcome that a worker has for one of its attempts."""

    job: ModelJob
    member: Member
    outcome: str
    delay: float = 0.0

    @property
    def is_open(self) -> bool:
        """The attempt is, and no open transaction is ending it."""
        return self.job.state == "running" and self.job.member == self.member and self.job.lent_to is None


@dataclass(eq=False)
class Flush:
    """One flush of a worker; it is repeated under its number until it is answered."""

    number: int
    ends: list[End]
    recorded: list[End] | None = None
    """What the database has taken of it; None: it has not taken it."""

    @property
    def done(self) -> list[Member]:
        return [end.member for end in self.ends if end.outcome == "completed"]

    @property
    def others(self) -> list[Outcome]:
        return [
            Outcome(end.member, end.outcome, end.delay, {"type": "E", "text": "t"})
            for end in self.ends
            if end.outcome != "completed"
        ]


@dataclass(eq=False)
class Runtime:
    """One start of a worker, with what its process knows."""

    number: int
    kinds: tuple[str, ...] | None
    """What it knows; None: all, without naming them."""
    newest: int = 0
    """The newest claim that was answered."""
    claims: dict[int, list[Member]] = field(default_factory=dict)
    """Those that were answered."""
    unheard: list[Member] = field(default_factory=list)
    """What it claimed without an answer."""
    is_in_doubt: bool = False
    """It lost a connection, and has not looked what became of its claims."""
    pending: Flush | None = None
    """It has no answer to it."""
    last_flush: Flush | None = None
    stale: list[End] = field(default_factory=list)
    """Attempts that somebody else ended, which it does not know yet."""

    def knows(self, kind: str) -> bool:
        return self.kinds is None or kind in self.kinds


@dataclass(eq=False)
class Slow:
    """A transaction of a worker that is executed and not committed yet; it holds its locks."""

    session: Session
    runtime: Runtime
    queue: str | None
    """Whose claim lock it holds."""
    xid: int | None
    commit: Callable[[bool], None]
    """What follows when it commits; called with whether the worker gets the answer."""
    flush: Flush | None = None
    """What it records."""
    taken: frozenset[int] = frozenset()
    """Jobs that were set aside, and that it claims."""
    is_lost: bool = False
    """Its worker has lost the connection, and nobody will hear the answer."""
