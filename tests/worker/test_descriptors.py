"""What workers declare of queues and kinds: at their start, again and again, and beside other versions of the code."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest

import awa
from awa.admin import DescriptorInfo
from awa.worker import report
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker, ended, fence
from tests.storage.test_descriptors import take_away

Conn = psycopg.Connection[Any]


@contextmanager
def version(database: str, owner: str, **settings: Any) -> Iterator[awa.Client]:
    """A client of one version of the code: its tasks, and who answers for them."""
    client = awa.Client(database, **settings)

    @client.task(queue="mail", kind="send")
    def send() -> None: ...

    @client.task(queue="reports", retry=awa.fixed(0))
    def report(fails: bool = False) -> None:
        if fails and awa.current_job().attempt == 1:
            raise ValueError

    client.queue("mail", display_name="Mail", owner=owner, tags=["prod"], max_running=3)
    client.queue("reports", owner=owner)
    client.job_kind(send, owner=owner, extra={"tier": 1})
    client.job_kind("report", description="Numbers")
    yield client
    client.close()


def of_queue(client: awa.Client, name: str = "mail") -> DescriptorInfo:
    found = client.admin.get_queue(name).descriptor
    assert found is not None
    return found


def test_a_worker_describes_what_it_serves_before_its_first_claim_and_goes_on(
    database: str, conn: Conn, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "SNAPSHOT_INTERVAL", 0.2)
    with version(database, "ada") as client:
        worker = start_worker(client, queues=["mail", "unsaid"])
        info = client.admin.get_queue("mail")
        assert info.declared == awa.Limits(max_running=3)
        mail = info.descriptor
        assert mail is not None
        assert (mail.display_name, mail.owner, mail.tags, mail.live_runtimes, mail.drift) == (
            *("Mail", "ada", ("prod",)),
            *(1, []),
        )
        assert mail.descriptor_hash == awa.descriptor_hash(display_name="Mail", owner="ada", tags=["prod"])
        described = {queue.name: queue.descriptor is not None for queue in client.admin.list_queues()}
        assert described == {"mail": True, "unsaid": False, "reports": False}  # its limits are declared all the same
        kinds = {kind.name: kind.descriptor for kind in client.admin.list_kinds()}
        assert kinds.keys() == {"send", "report"}
        assert kinds["send"] is not None and kinds["send"].extra == {"tier": 1}

        conn.execute("DELETE FROM awa.queue_descriptors")  # whatever happens to it
        again = wait_until(lambda: client.admin.get_queue("mail").descriptor)
        assert again.descriptor_hash == mail.descriptor_hash
        wait_until(lambda: of_queue(client).last_seen_at >= again.last_seen_at + timedelta(seconds=0.3))
        assert of_queue(client).updated_at == again.updated_at

        first = worker.runtime
        fence(conn, first)
        wait_until(lambda: worker.runtime != first, timeout=15)
        wait_until(lambda: of_queue(client).live_runtimes == 1)  # the new number has told, the old one is gone
        worker.stop()
        assert of_queue(client).is_stale


def test_versions_that_live_at_once_differ_and_the_one_that_started_last_is_shown(
    database: str, conn: Conn, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a machine that is busy for three of these would change the end
    monkeypatch.setattr(
        report, "SNAPSHOT_INTERVAL", 1.0
    )  # a machine that is busy for three of these would change the end
    with version(database, "old") as before, version(database, "new") as after:
        old = [start_worker(before, queues=["mail", "reports"]) for _ in range(2)]
        new = start_worker(after, queues=["mail"])
        seen = of_queue(after).last_seen_at
        wait_until(lambda: of_queue(after).last_seen_at > seen)
        mail = of_queue(before)
        assert (mail.owner, mail.live_runtimes) == ("new", 3)
        [drift] = mail.drift
        assert (drift.runtimes, drift.fields) == ([one.runtime for one in old], ["owner"])
        kind = after.admin.get_kind("send").descriptor
        assert kind is not None and (kind.owner, len(kind.drift)) == ("new", 1)
        assert (of_queue(before, "reports").owner, of_queue(before, "reports").live_runtimes) == ("old", 2)
        new.stop()
        conn.execute("UPDATE awa.queue_descriptors SET last_seen_at = now() - interval '4 s'")
        wait_until(lambda: of_queue(before).owner == "old")
        assert (of_queue(before).live_runtimes, of_queue(before).drift) == (2, [])


@pytest.mark.parametrize("how", ["revoked", "dropped"])
def test_a_worker_goes_on_without_the_catalogue(
    database: str,
    conn: Conn,
    roles: Callable[[str], str],
    start_worker: StartWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    monkeypatch.setattr(report, "SNAPSHOT_INTERVAL", 0.1)
    url = roles("worker")
    with version(url, "ada") as client:
        worker = start_worker(client, queues=["mail", "reports"], heartbeat=0.1, poll_interval=0.1)
        with caplog.at_level(logging.WARNING):
            take_away(conn, f"{conn.info.dbname}_worker", how)
            wait_until(lambda: any(" failed, again in " in record.getMessage() for record in caplog.records))
        first = client.insert({}, kind="send")
        second = client.insert({"fails": True}, kind="report", delay=0.05)
        last = client.insert({}, kind="send", after=second)
        for job in (first, second, last):
            assert ended(client, job).state == "completed"
        runtime = worker.runtime
        fence(conn, runtime)
        wait_until(lambda: worker.runtime != runtime, timeout=15)
        assert ended(client, client.insert({}, kind="send")).state == "completed"


def test_what_no_worker_declares_any_more_is_forgotten_by_the_leader(
    database: str, conn: Conn, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with version(database, "ada") as client:
        start_worker(client, queues=["mail", "reports"]).stop()
        conn.execute("UPDATE awa.queue_descriptors SET last_seen_at = now() - interval '32 d' WHERE queue = 'reports'")
        conn.execute("UPDATE awa.queue_descriptors SET last_seen_at = now() - interval '28 d' WHERE queue = 'mail'")
    other = awa.Client(database)

    @other.task()
    def nothing() -> None: ...

    worker = start_worker(other, descriptor_retention=0, heartbeat=0.1)
    chore = next(
        chore
        for service in worker._services
        for chore in getattr(service, "_chores", ())
        if chore.name == "descriptors"
    )
    assert chore.run(conn, 0.0) == 60.0
    assert conn.execute("SELECT count(*) FROM awa.queue_descriptors").fetchone() == (2,)
    worker.stop()
    start_worker(other, heartbeat=0.1)  # by default after thirty days
    left = "SELECT queue FROM awa.queue_descriptors"
    wait_until(lambda: conn.execute(left).fetchall() == [("mail",)])
    other.close()
