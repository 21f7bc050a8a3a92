"""Declaring tasks as users do; checked, never run."""

from dataclasses import dataclass
from datetime import timedelta
from typing import assert_type

import awa

client = awa.Client(queue="email", priority=1, notify=False)


@dataclass(frozen=True)
class SendEmail:
    to: str
    subject: str


@client.task(queue="email", max_attempts=5, timeout=timedelta(minutes=1), retry=awa.exponential(2.0, cap=3600))
def send(job: awa.Job[SendEmail]) -> None:
    assert_type(job.args, SendEmail)
    assert_type(job.args.subject, str)
    assert_type(job.id, awa.JobId)
    assert_type(job.entry_id, awa.EntryId)
    assert_type(job.attempt, int)
    assert_type(job.cancelled, bool)
    print(job.args.body)  # type: ignore[attr-defined]
    job.attempt = 1  # type: ignore[misc]


@client.task(retry=lambda attempt: 2.0 * attempt, retry_on=[OSError, ValueError], fail_on=KeyError)
def resize(path: str, width: int = 800) -> float:
    return width / len(path)


@client.task(concurrency_key="c", ordering_key=lambda path: f"o {path}")
def shrink(path: str) -> None: ...


def account_of(mail: SendEmail) -> str | None:
    return mail.to


@client.task(kind="resend", concurrency_key=account_of, ordering_key=None)
def resend(job: awa.Job[SendEmail]) -> None: ...


@client.task(kind="wrong", ordering_key=7)  # type: ignore[arg-type]
def wrong(path: str) -> None: ...


@client.task(kind="count", aliases=["count_words"])
def count(text: str) -> awa.Snooze | awa.Cancel | int:
    match text:
        case "":
            return awa.Cancel("nothing to count")
        case "later":
            return awa.Snooze(timedelta(seconds=5))
    if awa.current_job().attempt > 3:
        raise awa.TerminalError("given up")
    return len(text)


# a task is still its function
assert_type(resize("a.png"), float)
assert_type(resize("a.png", width=100), float)
resize(7)  # type: ignore[arg-type]
resize()  # type: ignore[call-arg]

# bind has the function's signature
assert_type(resize.bind("a.png"), awa.BoundArgs)
assert_type(resize.bind(path="a.png", width=100), awa.BoundArgs)
resize.bind("a.png", height=100)  # type: ignore[call-arg]
resize.bind(width=100)  # type: ignore[call-arg]
resize.bind("a.png", "wide")  # type: ignore[arg-type]


@client.task  # type: ignore[arg-type]
def without_parentheses() -> None: ...


@client.task(priority="high")  # type: ignore[arg-type]
def urgent() -> None: ...


@client.task(queues=["email"])  # type: ignore[call-arg]
def misspelt() -> None: ...


@client.task(retry=3)  # type: ignore[arg-type]
def thrice() -> None: ...


@client.task(retry_on="OSError")  # type: ignore[arg-type]
def named() -> None: ...


client.queue("email", max_running=5, display_name="Mail", tags=["prod"], extra={"tier": 1})
client.job_kind("send_email", description="One at a time", owner="ada")
client.job_kind(resize, docs_url="https://docs.example.com")
client.job_kind(SendEmail, tags=("a", "b"))
client.job_kind(5)  # type: ignore[arg-type]
client.queue("email", owner=5)  # type: ignore[arg-type]


@client.on_worker_start
def start() -> None: ...


@client.on_worker_stop
def stop() -> None: ...


assert_type(start(), None)


@client.on_worker_start  # type: ignore[type-var]
def hook_with_parameter(name: str) -> None: ...
