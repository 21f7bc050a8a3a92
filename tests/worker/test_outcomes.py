"""What becomes of a job, by what its handler does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

import awa
from awa import Cancel, RetryAfter, Snooze, TerminalError
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, count_running, ended, in_state, make_due

Conn = psycopg.Connection[Any]


def seconds_to(info: awa.JobInfo) -> float:
    assert info.run_at is not None
    return (info.run_at - datetime.now(UTC)).total_seconds()


@pytest.mark.parametrize("value", [None, 0, False, "text", {"a": 1}, object(), ValueError("returned"), Snooze])
def test_whatever_a_handler_returns_the_job_is_completed(
    client: awa.Client, start_worker: StartWorker, value: object
) -> None:
    @client.task()
    def work() -> object:
        return value

    start_worker(client)
    info = ended(client, client.insert(work.bind()))
    assert (info.state, info.attempt, info.history) == ("completed", 1, [])
    assert info.ended_at is not None


def test_a_returned_value_that_lies_about_its_class_completes_the_job(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    class Proxy:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            raise RuntimeError("outside of a request")

    @client.task()
    def work(lies: bool) -> object:
        return Proxy() if lies else None

    start_worker(client, threads=1)
    lying = client.insert(work.bind(True))
    assert ended(client, lying).state == "completed"
    assert ended(client, client.insert(work.bind(False))).state == "completed"
    assert count_running(conn) == 0


def test_a_raising_handler_is_retried_with_backoff_until_its_attempts_are_used_up(
    client: awa.Client, start_worker: StartWorker, conn: Conn
) -> None:
    seen: list[int] = []

    @client.task(max_attempts=3)
    def work() -> None:
        seen.append(awa.current_job().attempt)
        raise ValueError(f"no {len(seen)}")

    start_worker(client)
    job = client.insert(work.bind())
    for attempt in (1, 2):
        info = in_state(client, job, "retryable")
        assert (info.attempt, info.waits_for) == (attempt + 1, "time")
        assert 0.5 * 2**attempt < seconds_to(info) <= 1.25 * 2**attempt
        make_due(conn, job.id)
        wait_until(lambda attempt=attempt: len(seen) > attempt)
    info = ended(client, job)
    assert (info.state, info.attempt, seen) == ("failed", 3, [1, 2, 3])
    assert [(h["attempt"], h["outcome"], h["type"], h["text"]) for h in info.history] == [
        (1, "retried", "ValueError", "no 1"),
        (2, "retried", "ValueError", "no 2"),
        (3, "failed", "ValueError", "no 3"),
    ]
    assert all("in work" in h["traceback"] and "awa" not in h["traceback"] for h in info.history)
    assert all(h["elapsed_ms"] >= 0 and datetime.fromisoformat(h["ended_at"]).tzinfo for h in info.history)


def test_the_history_keeps_the_last_twenty_attempts_and_three_tracebacks(
    client: awa.Client, start_worker: StartWorker
) -> None:
    @client.task(max_attempts=23, retry=awa.fixed(0))
    def work() -> None:
        raise ValueError("again")

    start_worker(client)
    info = ended(client, client.insert(work.bind()), timeout=20)
    assert [h["attempt"] for h in info.history] == list(range(4, 24))
    assert [h["attempt"] for h in info.history if h.get("traceback")] == [21, 22, 23]


@pytest.mark.parametrize("how", ["returned", "raised"])
def test_retry_after_counts_waits_as_long_as_it_says_and_exhausts(
    client: awa.Client, start_worker: StartWorker, conn: Conn, how: str
) -> None:
    @client.task(max_attempts=2, retry=awa.fixed(5000))
    def work() -> object:
        if how == "raised":
            raise RetryAfter(600)
        return RetryAfter(timedelta(minutes=10))

    start_worker(client)
    job = client.insert(work.bind())
    info = in_state(client, job, "retryable")
    assert info.attempt == 2
    assert 590 < seconds_to(info) <= 600
    assert info.history[0]["type"] == "RetryAfter"
    make_due(conn, job.id)
    info = ended(client, job)
    assert (info.state, info.attempt, len(info.history)) == ("failed", 2, 2)


def test_retry_after_zero_runs_again_at_once(client: awa.Client, start_worker: StartWorker) -> None:
    @client.task()
    def work() -> object:
        return RetryAfter(0) if awa.current_job().attempt == 1 else None

    start_worker(client, poll_interval=30)
    info = ended(client, client.insert(work.bind()), timeout=5)
    assert (info.state, info.attempt) == ("completed", 2)


@pytest.mark.parametrize("how", ["returned", "raised"])
def test_a_snooze_is_not_counted_however_often(
    client: awa.Client, start_worker: StartWorker, conn: Conn, how: str
) -> None:
    runs: list[int] = []

    @client.task(max_attempts=2)
    def work() -> object:
        runs.append(awa.current_job().attempt)
        if len(runs) == 31:
            raise ValueError("after many")
        outcome = Snooze(0 if len(runs) < 31 else 300)
        if how == "raised":
            raise outcome
        return outcome

    start_worker(client)
    job = client.insert(work.bind())
    info = in_state(client, job, "retryable")
    assert (runs, info.attempt) == ([1] * 31, 2)
    assert 1.0 < seconds_to(info) <= 2.5
    make_due(conn, job.id)
    info = in_state(client, job, "scheduled")
    assert (info.attempt, runs[-1]) == (2, 2)
    assert 290 < seconds_to(info) <= 300
    assert [h["outcome"] for h in info.history] == ["retried"]


@pytest.mark.parametrize("how", ["returned", "raised"])
@pytest.mark.parametrize(
    ("reason", "shown"),
    [(None, "cancelled by its handler"), ("not needed", "not needed"), ("a\0b\ud800c", None), ("x" * 100_000, None)],
    ids=["none", "text", "unstorable", "long"],
)
def test_cancel_ends_the_job_without_a_failure(
    client: awa.Client, start_worker: StartWorker, how: str, reason: str | None, shown: str | None
) -> None:
    @client.task()
    def work() -> object:
        if how == "raised":
            raise Cancel(reason)
        return Cancel(reason)

    start_worker(client)
    job = client.insert(work.bind())
    info = in_state(client, job, "cancelled", "retryable")
    assert (info.state, info.attempt) == ("cancelled", 1)
    text = info.history[-1]["text"]
    assert (info.history[-1]["outcome"], info.history[-1]["type"]) == ("cancelled", "Cancel")
    assert text == shown if shown else len(text) <= 10_000 and "\0" not in text


def test_a_terminal_error_fails_at_once(client: awa.Client, start_worker: StartWorker) -> None:
    class Hopeless(TerminalError):
        pass

    @client.task()
    def work() -> None:
        raise Hopeless("never")

    start_worker(client)
    info = ended(client, client.insert(work.bind()))
    assert (info.state, info.attempt, info.history[0]["outcome"]) == ("failed", 1, "failed")
    assert info.history[0]["type"].endswith("Hopeless")


class Unruly(BaseException):
    pass


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Unruly("x")])
def test_a_base_exception_is_a_failed_attempt_and_the_threads_live_on(
    client: awa.Client, start_worker: StartWorker, conn: Conn, error: BaseException
) -> None:
    @client.task()
    def work(fails: bool) -> None:
        if fails:
            raise error

    start_worker(client, threads=2)
    threads = {t.name for t in threading.enumerate()}
    jobs = [client.insert(work.bind(True)) for _ in range(5)]
    for job in jobs:
        info = in_state(client, job, "retryable")
        assert (info.attempt, info.history[0]["outcome"]) == (2, "retried")
        assert info.history[0]["type"].split(".")[-1] == type(error).__name__
    good = [client.insert(work.bind(False)) for _ in range(5)]
    assert all(ended(client, job).state == "completed" for job in good)
    assert {t.name for t in threading.enumerate()} >= threads
    assert count_running(conn) == 0


def test_retry_on_and_fail_on_decide_by_the_exception(client: awa.Client, start_worker: StartWorker) -> None:
    raised: dict[str, Exception] = {
        "listed": ConnectionError("a"),
        "subclass": ConnectionResetError("b"),
        "other": ValueError("c"),
        "never": PermissionError("d"),
    }

    @client.task(retry_on=OSError, fail_on=[PermissionError])
    def work(which: str) -> None:
        raise raised[which]

    start_worker(client)
    jobs = {which: client.insert(work.bind(which)) for which in raised}
    states = {which: in_state(client, job, "retryable", "failed").state for which, job in jobs.items()}
    assert states == {"listed": "retryable", "subclass": "retryable", "other": "failed", "never": "failed"}


@pytest.mark.parametrize(
    ("policy", "least", "most"),
    [
        (awa.exponential(10, 3), 9, 12.6),
        (awa.linear(100), 99, 126),
        (awa.fixed(77), 76, 77.1),
        (lambda attempt: 1000 + attempt, 1000, 1001.1),
        (lambda attempt: timedelta(hours=1), 3599, 3600.1),
        (lambda attempt: 10**400, 86_399, 86_400.1),
        (lambda attempt: -5, 1, 2.6),
        (lambda attempt: float("nan"), 1, 2.6),
        (lambda attempt: float("inf"), 1, 2.6),
        (lambda attempt: None, 1, 2.6),
        (lambda attempt: "soon", 1, 2.6),
        (lambda attempt: 1 / 0, 1, 2.6),
    ],
)
def test_the_kinds_policy_says_when_and_a_misbehaving_one_is_replaced(
    client: awa.Client,
    start_worker: StartWorker,
    caplog: pytest.LogCaptureFixture,
    policy: Any,
    least: float,
    most: float,
) -> None:
    @client.task(retry=policy)
    def work() -> None:
        raise ValueError("again")

    start_worker(client)
    info = in_state(client, client.insert(work.bind()), "retryable")
    assert least - 1 < seconds_to(info) <= most
    assert ("the default backoff is used instead" in caplog.text) == (most == 2.6)


def test_a_policy_that_raises_a_base_exception_costs_no_thread(client: awa.Client, start_worker: StartWorker) -> None:
    def policy(attempt: int) -> float:
        raise SystemExit("policy")

    @client.task(retry=policy)
    def work(fails: bool) -> None:
        if fails:
            raise ValueError("again")

    start_worker(client, threads=1)
    assert in_state(client, client.insert(work.bind(True)), "retryable").attempt == 2
    assert ended(client, client.insert(work.bind(False))).state == "completed"


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Ending(Exception):
    def __str__(self) -> str:
        raise SystemExit("from str")


class Lying(Exception):
    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise SystemExit("from class")


class Broken(Snooze):
    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    "make",
    [Mute, Ending, Lying, Broken, lambda: ValueError("nul \0 and \ud800"), lambda: ValueError("x" * 1_000_000)],
    ids=["str-raises", "str-exits", "class-exits", "half-made-outcome", "unstorable", "long"],
)
def test_an_exception_that_cannot_be_told_is_still_a_failed_attempt(
    client: awa.Client, start_worker: StartWorker, conn: Conn, make: Callable[[], Exception]
) -> None:
    @client.task()
    def work(fails: bool) -> None:
        if fails:
            raise make()

    start_worker(client, threads=1)
    info = in_state(client, client.insert(work.bind(True)), "retryable")
    assert (info.attempt, info.history[0]["outcome"]) == (2, "retried")
    assert len(info.history[0]["text"]) <= 4_000
    assert not set("\0\ud800") & set(info.history[0]["text"] + (info.history[0]["traceback"] or ""))
    # as jsonb too, which refuses what json lets pass
    assert conn.execute("SELECT history::text::jsonb IS NOT NULL FROM awa.waiting_jobs").fetchall() == [(True,)]
    assert ended(client, client.insert(work.bind(False))).state == "completed"


def test_causes_are_in_the_traceback(client: awa.Client, start_worker: StartWorker) -> None:
    @client.task(max_attempts=1)
    def work() -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    start_worker(client)
    traceback = ended(client, client.insert(work.bind())).history[0]["traceback"]
    assert "KeyError: 'inner'" in traceback
    assert "direct cause" in traceback
    assert traceback.rstrip().endswith("ValueError: outer")
