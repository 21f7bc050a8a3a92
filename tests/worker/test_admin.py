"""Looking at the jobs of a real worker, by public names."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import pytest

import awa
from awa import JobState
from tests.fixtures.jobs import StartWorker, ended, in_state


def numbers(client: awa.Client, state: str, **filters: Any) -> list[int]:
    """The ``n`` of the jobs in a list."""
    return [job.args["n"] for job in client.admin.list_jobs(state, **filters).jobs]


def values(client: awa.Client, queue: str) -> dict[str, int]:
    """The counts of a queue that are not zero, all of them exact."""
    counts = client.admin.queue_counts(queue)[queue]
    assert all(count.is_exact for count in counts.values())
    return {state.value: count.value for state, count in counts.items() if count.value}


def test_an_operator_sees_what_runs_where_and_what_became_of_it(client: awa.Client, start_worker: StartWorker) -> None:
    go_on = threading.Event()

    @client.task(queue="mail", max_attempts=1)
    def send(n: int) -> None:
        if n == 1:
            raise ConnectionError("nobody there")
        if n == 2:
            assert go_on.wait(10)

    @client.task(queue="mail")
    def other(n: int) -> None: ...

    failing, running = client.insert_many([send.bind(1), send.bind(2)])
    client.insert(send.bind(3), delay=600)
    start_worker(client, queues=["mail"], threads=2)
    ended(client, failing)
    shown = in_state(client, running, "running")
    assert numbers(client, "running") == [2]
    assert numbers(client, JobState.FAILED, queue="mail") == [1]
    assert numbers(client, "scheduled", kind="send") == [3]
    assert numbers(client, "scheduled", kind="other") == []
    assert values(client, "mail") == {"running": 1, "failed": 1, "scheduled": 1}
    [listed] = client.admin.list_jobs("running").jobs
    assert (listed.hostname, listed.pid) == (shown.hostname, shown.pid) == (socket.gethostname(), os.getpid())
    assert listed.claimed_at == shown.claimed_at is not None
    assert listed.runtime == shown.runtime
    [failed] = client.admin.list_jobs("failed").jobs
    assert failed.error is not None and failed.error["text"] == "nobody there"
    assert "ConnectionError" in failed.error["traceback"]
    go_on.set()
    done = ended(client, running)
    assert done.claimed_at == shown.claimed_at and done.elapsed_ms is not None
    assert client.admin.list_jobs("completed").jobs == [done]
    assert values(client, "mail") == {"completed": 1, "failed": 1, "scheduled": 1}


def test_every_job_stays_in_sight_while_a_worker_runs(client: awa.Client, start_worker: StartWorker) -> None:
    """Jobs retry, snooze and complete meanwhile; each look finds every one, in one state."""

    snoozed: set[int] = set()

    @client.task(retry=lambda attempt: 0.0)
    def restless(n: int) -> awa.Snooze | None:
        if awa.current_job().attempt < 3:
            raise ConnectionError("again")
        if n in snoozed:
            return None
        snoozed.add(n)
        return awa.Snooze(0.01)

    inserted = client.insert_many([restless.bind(n) for n in range(300)])
    start_worker(client, threads=4)
    completed = 0
    while completed < 300:
        counts = client.admin.queue_counts("default")["default"]
        assert sum(count.value for count in counts.values()) == 300, counts
        completed = counts[JobState.COMPLETED].value
        for job in inserted[::60]:
            assert client.get(job.id).attempt <= 3


def test_pages_go_on_where_the_last_one_ended(client: awa.Client) -> None:
    @client.task()
    def work(n: int) -> None: ...

    client.insert_many([work.bind(n) for n in range(250)])
    seen: list[int] = []
    after: str | None = None
    while True:
        page = client.admin.list_jobs("available", after=after)
        seen += [job.args["n"] for job in page.jobs]
        after = page.after
        if after is None:
            break
        assert len(page.jobs) == 100
    assert seen == list(range(249, -1, -1))
    with pytest.raises(awa.ValidationError, match="after must be what a page of failed jobs"):
        client.admin.list_jobs("failed", after="available.0.1.1")


def test_a_job_is_moved_to_a_queue_that_somebody_serves(client: awa.Client, start_worker: StartWorker) -> None:
    @client.task()
    def work(n: int) -> None: ...

    start_worker(client, queues=["good"])
    job = client.insert(work.bind(1), queue="typo")
    moved = client.admin.move(job.id, "good")
    assert (moved.id, moved.happened, moved.state) == (job.id, "moved", "available")
    assert ended(client, job).queue == "good"
    assert client.admin.move(job.id, "typo").happened == "refused"
    assert values(client, "good") == {"completed": 1}
    assert values(client, "typo") == {}
    with pytest.raises(awa.JobNotFound):
        client.admin.move(job.id + 1000, "good")


def test_an_operator_retries_a_job_that_has_failed(client: awa.Client, start_worker: StartWorker) -> None:
    """By public names: all attempts again, its key again, and whoever waits for its result waits on."""
    may = threading.Event()

    @client.task(max_attempts=2, retry=awa.fixed(0), unique=awa.Unique(by_args=["n"]), keep_result=True)
    def work(n: int) -> int:
        if not may.is_set():
            raise ConnectionError("nobody there")
        return n * awa.current_job().attempt

    start_worker(client)
    job = client.insert(work.bind(7))
    failed = ended(client, job)
    assert (failed.state, failed.attempt, len(failed.history)) == ("failed", 2, 2)
    with pytest.raises(awa.JobFailed):
        job.result(timeout=10)
    may.set()
    back = client.retry(job.id)
    assert (back.id, back.happened, back.state) == (job.id, "retried", "available")
    assert job.result(timeout=10) == 7
    assert client.insert(work.bind(7)).id == job.id
    assert client.admin.retry(job.id).happened == "refused"
    with pytest.raises(awa.JobNotFound):
        client.retry(job.id + 1000)


def test_a_retry_says_who_has_the_key(client: awa.Client) -> None:
    @client.task(unique=awa.Unique())
    def work(n: int) -> None: ...

    first = client.insert(work.bind(1))
    client.cancel(first.id)
    second = client.insert(work.bind(1))
    for retry in (client.retry, client.admin.retry):
        with pytest.raises(awa.UniqueConflict) as caught:
            retry(first.id)
        assert (caught.value.existing_id, caught.value.key) == (second.id, awa.unique_key("work", {"n": 1}))
    assert first.get().state == "cancelled"


def test_an_operator_lets_a_job_go_first(client: awa.Client, start_worker: StartWorker) -> None:
    order: list[int] = []

    @client.task()
    def work(n: int) -> None:
        order.append(n)

    jobs = client.insert_many([work.bind(n) for n in range(3)])
    first = client.admin.set_priority(jobs[2].id, 1)
    assert (first.happened, first.state) == ("reprioritised", "available")
    assert numbers(client, "available", ids=[job.id for job in jobs[1:]]) == [2, 1]
    start_worker(client, threads=1)
    for job in jobs:
        ended(client, job)
    assert order == [2, 0, 1]
    assert client.admin.set_priority(jobs[2].id, 2).happened == "refused"
