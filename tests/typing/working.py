"""Handlers and workers as users write them; checked, never run."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, assert_never, assert_type

import psycopg

import awa

client = awa.Client()


@dataclass(frozen=True)
class Deposit:
    account: int
    amount: int


@client.task()
def deposit(job: awa.Job[Deposit]) -> None:
    with client.connection() as conn, conn.transaction():
        assert_type(conn, psycopg.Connection[tuple[Any, ...]])
        conn.execute("UPDATE accounts SET amount = amount + %s", [job.args.amount])
        assert_type(job.complete(conn), None)
    job.complete()  # type: ignore[call-arg]
    job.complete("postgresql://localhost/app")  # type: ignore[arg-type]


@client.task()
def withdraw(job: awa.Job[Deposit]) -> None:
    with job.transaction("serializable") as conn:
        assert_type(conn, psycopg.Connection[Any])
    with job.transaction(psycopg.IsolationLevel.REPEATABLE_READ):
        pass
    job.transaction(2)  # type: ignore[arg-type]


@client.task()
def untyped(job: awa.Job[dict[str, Any]]) -> awa.Outcome | None:
    assert_type(job.args["anything"], Any)
    assert_type(job.tags, tuple[str, ...])
    assert_type(awa.current_job(), awa.Job[Any])
    return awa.RetryAfter(5.0) if job.attempt < 3 else None


awa.Snooze("5 s")  # type: ignore[arg-type]
awa.Cancel(reason=7)  # type: ignore[arg-type]

with client.worker(queues=["email:4", "default"], threads=2, heartbeat=timedelta(seconds=1)) as worker:
    assert_type(worker.running, list[int])

worker = client.worker(queues="email")
assert_type(worker.start(), None)
assert_type(worker.stop(timeout=5), None)
worker.stop("5 s")  # type: ignore[arg-type]
client.worker(thread=2)  # type: ignore[call-arg]
client.worker(["email"], 2)  # type: ignore[call-arg]


def in_words(state: awa.JobState) -> str:
    """Every state there is."""
    match state:
        case awa.JobState.SCHEDULED | awa.JobState.RETRYABLE | awa.JobState.WAITING_EXTERNAL:
            return "waits"
        case awa.JobState.AVAILABLE | awa.JobState.RUNNING:
            return "goes on"
        case awa.JobState.COMPLETED | awa.JobState.FAILED | awa.JobState.CANCELLED:
            return "is over"
        case _:
            assert_never(state)


assert_type(awa.unique_key("send_email", {"to": "ada"}), bytes)
assert_type(awa.canonical_json([1, 2.5]), bytes)
assert_type(awa.derive_kind(Deposit), str)
assert_type(awa.descriptor_hash(display_name="Mail", tags=("a",)), str)
