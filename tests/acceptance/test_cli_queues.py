"""``awa queue``: what it shows and changes, what it asks, and how it ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

import click
import psycopg
import pytest
from click.testing import CliRunner, Result

import awa
from awa.cli import main
from awa.cli.target import this_user
from awa.storage.queue_control import declare_queue
from awa.storage.schema import Schema
from tests.fixtures.jobs import ended
from tests.fixtures.terminal import at_terminal

Conn = psycopg.Connection[Any]
Run = Callable[..., Result]

ODD = "o\x1b[31md\nd\u202e 東京"


@pytest.fixture
def run(database: str) -> Run:
    """``awa queue ...`` away from a terminal."""

    def invoke(*arguments: object, **environment: str) -> Result:
        env = {"AWA_DATABASE_URL": database, **environment}
        return CliRunner(env=env).invoke(main, ["queue", *map(str, arguments)])

    return invoke


def answer(done: Result, code: int = 0) -> Any:
    """The document of a command with ``--json``."""
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


@pytest.fixture
def mail(client: awa.Client) -> list[awa.Inserted]:
    """A queue with a failed, an available and a scheduled job, beside one with another."""

    @client.task(kind="work", queue="mail", max_attempts=1)
    def work() -> None:
        raise ValueError

    failed = client.insert(work.bind())
    with client.worker(queues="mail", threads=1):
        ended(client, failed)
    waits = client.insert({}, kind="k", queue="mail")
    later = client.insert({}, kind="k", queue="mail", delay=3600)
    client.insert({}, kind="k", queue="other")
    return [failed, waits, later]


def test_nothing_is_known(run: Run) -> None:
    done = run("list")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "no queue is known" in done.stderr
    assert answer(run("list", "--json")) == {"queues": []}


def test_a_list_has_a_line_for_each_queue(run: Run, mail: list[awa.Inserted]) -> None:
    run("pause", "empty")
    lines = [line.split() for line in run("list").stdout.splitlines()]
    states = ["available", "running", "scheduled", "retryable", "failed", "oldest", "cancelled", "completed"]
    described = ["display", "name", "owner", "tags", "declared"]
    assert lines[0] == ["queue", "status", *states, "limits", *described]
    assert lines[1] == ["empty", "paused", *"00000", "-", *"00", *"-----"]
    ages = [line.pop(7) for line in lines[2:]]
    assert all(re.fullmatch(r"\d+", age) for age in ages)
    assert lines[2:] == [
        ["mail", "open", *"10101", "s", *"00", *"-----"],
        ["other", "open", *"10000", "s", *"00", *"-----"],
    ]
    found = answer(run("list", "--json"))["queues"]
    assert [(queue["name"], queue["is_paused"]) for queue in found] == [
        ("empty", True),
        ("mail", False),
        ("other", False),
    ]
    assert found[1]["counts"]["failed"] == {"value": 1, "is_exact": True}


def test_show(run: Run, mail: list[awa.Inserted]) -> None:
    done = run("show", "mail")
    facts = dict(re.findall(r"^(\w[\w ]*?)  +(.*)$", done.stdout, re.MULTILINE))
    assert (facts["queue"], facts["status"], facts["scheduled"], facts["failed"]) == ("mail", "open", "1", "1")
    assert set(answer(run("show", "mail", "--json"))) == {
        *("name", "is_paused", "paused_at", "paused_by", "pause_reason", "running", "counts", "limits", "declared"),
        *("declared_at", "overrides", "overrides_by", "overrides_at", "oldest_at", "descriptor"),
        *("kinds", "statistics"),
    }
    assert re.fullmatch(r"\d+ s, since 20.*", facts["oldest available"])


@pytest.mark.parametrize("command", ["show", "resume", "limits"])
def test_an_unknown_queue_is_exit_code_three(run: Run, mail: list[awa.Inserted], command: str) -> None:
    done = run(command, "nobody")
    assert (done.exit_code, done.stdout) == (3, "")
    assert "no queue 'nobody' is known" in done.stderr and "'mail', 'other'" in done.stderr


def test_a_queue_that_nobody_uses_is_doubted(run: Run, mail: list[awa.Inserted]) -> None:
    """A mistyped name: what is said of it holds, for a queue that is yet to come, and changes nothing else."""
    for command in (["pause", "mial"], ["limits", "mial", "--max-running", "1"]):
        done = run(*command)
        assert (done.exit_code, "see that its name is right" in done.stderr) == (0, True)
        assert "see that its name is right" not in run(command[0], "mail", *command[2:]).stderr
    for what in ("purge", "cancel-waiting"):
        done = run(what, "mali", "--yes")
        assert (done.exit_code, "no queue 'mali' is known" in done.stderr) == (0, True)
        assert run(what, "mali", "--dry-run").exit_code == 3
        assert "no queue" not in run(what, "mial", "--yes").stderr


def test_pause_says_who_and_why_until_it_is_resumed(run: Run, client: awa.Client, mail: list[awa.Inserted]) -> None:
    done = run("pause", "mail", "--reason", "provider is down")
    assert done.exit_code == 0
    assert re.fullmatch(
        rf"queue mail is paused since [-\d]+ [:\d]+[+-]\d\d:\d\d by {re.escape(this_user())}: provider is down\n",
        done.stdout,
    )
    info = client.admin.get_queue("mail")
    assert (info.is_paused, info.paused_by, info.pause_reason) == (True, this_user(), "provider is down")
    assert "@" in this_user()

    found = answer(run("pause", "mail", "--by", "ada", "--json"))
    assert (found["paused_by"], found["pause_reason"]) == ("ada", None)
    assert datetime.fromisoformat(found["paused_at"]) == info.paused_at
    assert run("resume", "mail").stdout == "queue mail is open\n"
    assert not client.admin.get_queue("mail").is_paused
    assert answer(run("resume", "mail", "--json"))["is_paused"] is False  # it was open already


def test_a_reader_looks_and_changes_nothing(
    run: Run, mail: list[awa.Inserted], roles: Callable[[str], str], client: awa.Client
) -> None:
    reader = ["--database", roles("reader")]
    assert [queue["name"] for queue in answer(run("list", "--json", *reader))["queues"]] == ["mail", "other"]
    for command in (["show", "mail"], ["limits", "mail"], ["purge", "mail", "--dry-run"]):
        assert run(*command, *reader).exit_code == 0
    before = client.admin.list_queues()
    for command in (
        ["pause", "mail"],
        ["resume", "mail"],
        ["limits", "mail", "--max-running", "1"],
        *(["purge", "mail", "--yes"], ["cancel-waiting", "mail", "--yes"]),
    ):
        done = run(*command, *reader)
        assert done.exit_code == 78 and "lacks a right" in done.stderr, done.output
    assert client.admin.list_queues() == before


# --- limits


def test_limits_are_declared_overridden_and_cleared(run: Run, conn: Conn, client: awa.Client) -> None:
    declared = awa.Limits(max_running=20, rate_limit=awa.RateLimit(50))
    declare_queue(conn, Schema(), "mail", declared)

    def rows(done: Result) -> dict[str, list[str]]:
        assert done.exit_code == 0, done.output
        head, *lines = (line.split() for line in done.stdout.splitlines() if not line.startswith("last "))
        assert head == ["limit", "declared", "overridden", "holds"]
        return {name: rest for name, *rest in lines}

    assert rows(run("limits", "mail")) == {
        "max-running": ["20", "-", "20"],
        "rate-limit": ["50/s", "-", "50/s"],
        "max-running-per-key": ["none", "-", "none"],
    }
    set_now = run(
        "limits", "mail", "--max-running", "none", "--rate-limit", "100/min:burst=20", "--max-running-per-key", "1"
    )
    assert rows(set_now) == {
        "max-running": ["20", "none", "none"],
        "rate-limit": ["50/s", "100/min:burst=20", "100/min:burst=20"],
        "max-running-per-key": ["none", "1", "1"],
    }
    assert f" by {this_user()}\n" in set_now.stdout
    assert client.admin.get_queue("mail").limits == awa.Limits(None, awa.RateLimit(100, per=60, burst=20), 1)

    found = answer(run("limits", "mail", "--max-running", "3", "--by", "ada", "--json"))
    assert found["overrides"] == {
        "max_running": 3,
        "rate_limit": {"count": 100.0, "per": 60.0, "burst": 20},
        "max_running_per_key": 1,
    }
    assert (found["overrides_by"], found["declared"]["max_running"]) == ("ada", 20)
    assert found["limits"]["rate_limit"] == {"count": 100.0, "per": 60.0, "burst": 20}

    assert rows(run("limits", "mail", "--clear", "rate-limit", "--clear", "max-running-per-key")) == {
        "max-running": ["20", "3", "3"],
        "rate-limit": ["50/s", "-", "50/s"],
        "max-running-per-key": ["none", "-", "none"],
    }
    run("limits", "mail", "--clear", "all")
    assert client.admin.get_queue("mail").limits == declared
    assert "max-running 20, rate-limit 50/s" in run("list").stdout


@pytest.mark.parametrize("value", ["0", "99999999999", "-1", "many"])
def test_a_limit_that_cannot_be_is_refused(run: Run, value: str) -> None:
    done = run("limits", "mail", "--max-running", value)
    assert done.exit_code == 2
    assert run("show", "mail").exit_code == 3  # nothing was said of it


# --- emptying


def test_cancel_waiting(run: Run, mail: list[awa.Inserted], client: awa.Client) -> None:
    dry = run("cancel-waiting", "mail", "--dry-run")
    assert dry.stdout == "would cancel 2 waiting jobs of queue mail; nothing was changed\n"
    assert answer(run("cancel-waiting", "mail", "--dry-run", "--json")) == {
        "queue": "mail",
        "dry_run": True,
        "waiting": 2,
    }
    assert [job.get().state for job in mail] == ["failed", "available", "scheduled"]
    done = run("cancel-waiting", "mail", "--yes", "--reason", "wrong template")
    assert (done.exit_code, done.stdout) == (0, "cancelled 2 jobs of queue mail\n")
    assert [job.get().state for job in mail] == ["failed", "cancelled", "cancelled"]
    assert mail[1].get().history[-1]["text"] == "wrong template"
    assert answer(run("cancel-waiting", "mail", "--yes", "--json")) == {"queue": "mail", "cancelled": 0}
    assert client.admin.get_queue("other").counts[awa.JobState.AVAILABLE].value == 1


def test_purge(run: Run, mail: list[awa.Inserted], client: awa.Client) -> None:
    dry = run("purge", "mail", "--dry-run")
    assert dry.stdout == "would delete 2 waiting jobs and 1 ended job of queue mail; nothing was changed\n"
    assert answer(run("purge", "mail", "--dry-run", "--json"))["ended"] == {"value": 1, "is_exact": True}
    assert [job.get().state for job in mail] == ["failed", "available", "scheduled"]
    assert answer(run("purge", "mail", "--yes", "--json")) == {"queue": "mail", "waiting": 2, "ended": 1}
    for job in mail:
        with pytest.raises(awa.JobNotFound):
            job.get()
    assert run("purge", "mail", "--yes").stdout == "deleted 0 waiting jobs and 0 ended jobs of queue mail\n"
    assert client.admin.get_queue("other").counts[awa.JobState.AVAILABLE].value == 1


@pytest.mark.parametrize(
    ("command", "question", "after"),
    [
        ("cancel-waiting", "Cancel 2 waiting jobs of queue mail?", "cancelled 2 jobs of queue mail"),
        ("purge", "Delete 2 waiting jobs and 1 ended job of queue mail?", "deleted 2 waiting jobs and 1 ended job"),
    ],
)
def test_the_question_is_answered(
    mail: list[awa.Inserted], database: str, command: str, question: str, after: str
) -> None:
    for word in ("n\n", "\x03"):
        shown = at_terminal("queue", command, "mail", database=database, answer=word)
        assert shown.code == 1 and question in shown.text
        assert "Traceback" not in shown.text and "Aborted" not in shown.text
        assert [job.get().state for job in mail] == ["failed", "available", "scheduled"]
    shown = at_terminal("queue", command, "mail", database=database, answer="y\n")
    assert shown.code == 0 and after in shown.text
    again = at_terminal("queue", "cancel-waiting", "mail", database=database)  # nothing to ask about
    assert again.code == 0 and "cancelled 0 jobs of queue mail" in again.text


# --- what it looks like


def test_nothing_that_is_stored_is_obeyed_by_a_terminal(run: Run, client: awa.Client, database: str) -> None:
    client.insert({}, kind="k", queue=ODD)
    commands = (
        ["pause", ODD, "--by", ODD, "--reason", ODD],
        *(["show", ODD], ["list"], ["limits", ODD, "--max-running", "1", "--by", ODD], ["purge", ODD, "--dry-run"]),
        ["show", f"{ODD}?"],
    )
    for arguments in commands:
        done = run(*arguments)
        assert done.exit_code == (3 if arguments[1:] == [f"{ODD}?"] else 0), done.output
        assert all(line.isprintable() for line in (*done.stdout.splitlines(), *done.stderr.splitlines()))
    shown = at_terminal("queue", "list", database=database)
    assert click.unstyle(shown.text).replace("\n", "").isprintable() and "\x1b[31m" not in shown.text


@pytest.mark.parametrize("columns", [80, 250])
def test_rows_fit_the_terminal(client: awa.Client, database: str, columns: int) -> None:
    client.insert({}, kind="k", queue="q" * 190)
    client.admin.pause_queue("q" * 190)
    client.admin.set_limits("q" * 190, max_running=100_000, rate_limit=awa.RateLimit(12345, per=7, burst=1234))
    shown = at_terminal("queue", "list", database=database, columns=columns)
    lines = click.unstyle(shown.text).splitlines()
    assert shown.code == 0 and len(lines) == 4
    assert max(map(len, lines)) == columns
    assert ("max-running 100000, rate-limit 12345/7s:burst=1234" in lines[-1]) is (columns == 250)


def test_an_estimate_is_marked(run: Run, client: awa.Client, conn: Conn) -> None:
    client.insert_many_copy(awa.NewJob({}, kind="k", queue="big") for _ in range(100_500))
    conn.execute("ANALYZE awa.jobs")
    listed = run("list").stdout.splitlines()[1].split()
    assert re.fullmatch(r"~\d\d\d,\d\d\d", listed[2])
    assert re.search(r"^available +~\d\d\d,\d\d\d$", run("show", "big").stdout, re.MULTILINE)
    assert answer(run("cancel-waiting", "big", "--dry-run", "--json"))["waiting"] == 100_500  # this one is counted
