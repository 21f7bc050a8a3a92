"""What a worker at work tells of throughput, waits and run times, and how ``awa stats`` shows it."""

from __future__ import annotations

import json
import time

import pytest
from click.testing import CliRunner, Result

import awa
from awa.cli import main
from awa.worker.maintenance import statistics
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker


def test_a_worker_gathers_what_its_handlers_did(
    client: awa.Client, database: str, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "PAUSE", 0.05)
    tried: set[int] = set()

    @client.task(queue="mail")
    def work(n: int) -> object:
        is_first = n not in tried
        tried.add(n)
        match n % 10:
            case 0 if is_first:
                return awa.RetryAfter(0.1)
            case 1 if is_first:
                return awa.Snooze(0.1)
            case 2:
                return awa.Cancel("no")
            case 3:
                raise awa.TerminalError("no")
        return None

    @client.task(queue="slow")
    def slow() -> None:
        time.sleep(0.25)

    def ask(*arguments: str, code: int = 0) -> Result:
        done = CliRunner().invoke(main, [*arguments, "--database", database, "-q"])
        assert done.exit_code == code, done.output
        return done

    assert "no attempt has ended" in ask("stats").stderr
    client.insert_many([work.bind(n) for n in range(200)])
    client.insert_many([slow.bind() for _ in range(4)])
    start_worker(client, queues=["mail", "slow"], threads=4)
    wait_until(lambda: client.admin.statistics(name="mail")[0].windows["1h"].started >= 240, timeout=15.0)
    wait_until(lambda: client.admin.statistics("kind", name="slow")[0].windows["1h"].started >= 4, timeout=15.0)
    [mail, other] = [one.windows["1h"] for one in client.admin.statistics()]
    told = (mail.started, mail.completed, mail.retried, mail.snoozed, mail.cancelled, mail.failed, mail.rescued)
    assert told == (240, 160, 20, 20, 20, 20, 0)
    assert other.completed == 4
    assert other.run_ms is not None
    assert 225 < other.run_ms.p50 <= other.run_ms.max
    assert other.run_ms.max >= 250
    assert [one.name for one in client.admin.statistics("kind")] == ["slow", "work"]

    assert [line.split()[:2] for line in ask("stats").stdout.splitlines()[1:]] == [["mail", "160"], ["slow", "4"]]
    lines = ask("stats", "--by", "kind", "work").stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["15m", "160"], ["1h", "160"], ["24h", "160"]]
    document = json.loads(ask("stats", "slow", "--window", "15m", "--json").stdout)
    [found] = document["statistics"]
    assert (document["by"], found["name"], list(found["windows"])) == ("queue", "slow", ["15m"])
    assert found["windows"]["15m"]["run_ms"]["max"] == other.run_ms.max
    shown = json.loads(ask("queue", "show", "mail", "--json").stdout)
    assert shown["statistics"]["24h"]["completed"] == 160
    assert "wait p50" in ask("queue", "show", "mail").stdout
    assert "no queue 'male' is known" in ask("stats", "male").stderr
    assert "no kind 'mail' is known" in ask("stats", "--by", "kind", "mail").stderr
    assert not ask("stats", "mail").stderr
    assert "--window" in ask("stats", "--window", "1d", code=2).stderr
