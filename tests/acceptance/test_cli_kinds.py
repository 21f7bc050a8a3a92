"""``awa kind``, and what ``awa queue`` shows of how code describes queues."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import click
import psycopg
import pytest
from click.testing import CliRunner, Result

import awa
from awa.cli import main
from tests.fixtures.jobs import StartWorker, ended
from tests.fixtures.terminal import at_terminal

Conn = psycopg.Connection[Any]
Run = Callable[..., Result]

COUNTED = ["available", "running", "scheduled", "retryable", "failed", "oldest", "cancelled", "completed"]

ODD = "o\x1b[31md\nd\u202e 東京"


@pytest.fixture
def run(database: str) -> Run:
    """``awa ...`` away from a terminal."""

    def invoke(*arguments: object, **environment: str) -> Result:
        env = {"AWA_DATABASE_URL": database, **environment}
        return CliRunner(env=env).invoke(main, list(map(str, arguments)))

    return invoke


def answer(done: Result) -> Any:
    """The document of a command with ``--json``."""
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def facts(done: Result) -> dict[str, str]:
    assert done.exit_code == 0, done.output
    return dict(re.findall(r"^(\w[\w ]*?)  +(.*)$", done.stdout, re.MULTILINE))


@pytest.fixture
def described(client: awa.Client, start_worker: StartWorker, conn: Conn) -> awa.Client:
    """Two workers have described a kind and a queue; one of them lives."""

    @client.task(queue="mail")
    def send() -> None: ...

    @client.task(queue="mail")
    def plain() -> None: ...

    client.queue("mail", display_name="Mail", owner="ada", tags=["eu", "prod"], docs_url="https://docs.example/mail")
    client.queue("old", owner="ada")
    client.job_kind(send, description="One message\nto one reader", extra={"tier": 1})
    start_worker(client, queues=["mail", "old"]).stop()
    runtime = start_worker(client, queues=["mail", "old"]).runtime
    conn.execute(
        'UPDATE awa.runtime_instances SET kinds = \'["plain","send"]\', queue_descriptor_hashes = %s::json,'
        " queue_descriptor_set = 'x' WHERE id = %s",
        [json.dumps({"mail": awa.descriptor_hash(owner="bob")}), runtime],
    )
    return client


def test_nothing_is_known(run: Run) -> None:
    done = run("kind", "list")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "no kind is known" in done.stderr
    assert answer(run("kind", "list", "--json")) == {"kinds": []}
    done = run("kind", "show", "send")
    assert (done.exit_code, done.stdout) == (3, "")
    assert "no kind 'send' is known" in done.stderr and "known are none" in done.stderr
    assert run("kind", "show", "x" * 201).exit_code == 2


def test_kinds_are_listed_and_shown(run: Run, described: awa.Client, roles: Callable[[str], str]) -> None:
    done = run("kind", "list", "--database", roles("reader"))
    assert done.stderr.startswith("database: ")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["kind", "runtimes", *COUNTED, "display", "name", "owner", "tags", "declared"],
        ["plain", "1", *"00000-00", *"----"],
        ["send", "1", *"00000-00", *"---", "live"],
    ]
    shown = run("kind", "show", "send")
    told = facts(shown)
    assert (told["kind"], told["handled by"], told["description"]) == ("send", "1 live runtime", "One message")
    assert "\n                  to one reader\n" in shown.stdout
    assert (told["extra"], told["declared"]) == ('{"tier":1}', "live: by 1 live runtime")
    assert facts(run("kind", "show", "plain")) == {
        "kind": "plain",
        "handled by": "1 live runtime",
        "running now": "0",
        **dict.fromkeys(set(awa.JobState) - {"running"}, "0"),
        "declared": "not described in code",
    }
    document = answer(run("kind", "show", "send", "--json"))
    assert document == answer(run("kind", "list", "--json"))["kinds"][1]
    assert (document["name"], document["live_runtimes"]) == ("send", 1)
    assert (document["oldest_at"], document["queues"]) == (None, {})
    assert document["counts"] == {state: {"value": 0, "is_exact": True} for state in awa.JobState}
    descriptor = document["descriptor"]
    assert set(descriptor) == {
        *("display_name", "description", "owner", "docs_url", "tags", "extra", "descriptor_hash"),
        *("created_at", "updated_at", "last_seen_at", "live_runtimes", "drift", "is_stale"),
    }
    assert descriptor["descriptor_hash"] == awa.descriptor_hash(
        description="One message\nto one reader", extra={"tier": 1}
    )
    assert (descriptor["is_stale"], descriptor["drift"], descriptor["extra"]) == (False, [], {"tier": 1})


@pytest.fixture
def work(client: awa.Client) -> None:
    """Jobs of two kinds in two queues, which nobody describes or handles."""

    @client.task(kind="work", queue="mail", max_attempts=1)
    def work() -> None:
        raise ValueError

    failed = client.insert(work.bind())
    with client.worker(queues="mail", threads=1):
        ended(client, failed)
    for queue, kind, delay in (
        ("mail", "work", 0.0),
        ("mail", "odd", 0.0),
        ("mail", "odd", 3600.0),
        ("other", "odd", 0.0),
    ):
        client.insert({}, kind=kind, queue=queue, delay=delay)


def table(done: Result, head: str) -> list[list[str]]:
    """The lines of the table that begins with *head*, in words; their ages, which have two, are one."""
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.split()[:2] == [head, "available"])
    rows = itertools.takewhile(bool, lines[begin + 1 :])
    return [re.sub(r"\d+ s\b", "AGE", row).split() for row in rows]


@pytest.mark.usefixtures("work")
def test_jobs_of_a_kind_are_counted_by_state_and_by_queue(run: Run) -> None:
    lines = [re.sub(r"\d+ s\b", "AGE", line).split() for line in run("kind", "list").stdout.splitlines()[1:]]
    assert [line[:10] for line in lines] == [
        ["odd", "0", *"20100", "AGE", *"00"],
        ["work", "0", *"10001", "AGE", *"00"],
    ]
    shown = run("kind", "show", "odd")
    told = facts(shown)
    assert (told["kind"], told["handled by"], told["available"], told["scheduled"]) == (
        *("odd", "0 live runtimes"),
        *("2", "1"),
    )
    assert re.fullmatch(r"\d+ s, since 20.*", told["oldest available"])
    assert table(shown, "queue") == [["mail", *"10100", "AGE", *"00"], ["other", *"10000", "AGE", *"00"]]
    document = answer(run("kind", "show", "odd", "--json"))
    assert document == answer(run("kind", "list", "--json"))["kinds"][0]
    assert document["counts"]["available"] == {"value": 2, "is_exact": True}
    assert {queue: depth["counts"]["available"]["value"] for queue, depth in document["queues"].items()} == {
        "mail": 1,
        "other": 1,
    }
    assert document["oldest_at"] == document["queues"]["mail"]["oldest_at"] < document["queues"]["other"]["oldest_at"]


@pytest.mark.usefixtures("work")
def test_jobs_of_a_queue_are_counted_by_kind(run: Run) -> None:
    expected = [["odd", *"10100", "AGE", *"00"], ["work", *"10001", "AGE", *"00"]]
    assert table(run("queue", "show", "mail"), "kind") == expected
    document = answer(run("queue", "show", "mail", "--json"))
    assert {kind: depth["counts"]["failed"]["value"] for kind, depth in document["kinds"].items()} == {
        "odd": 0,
        "work": 1,
    }
    assert "kinds" not in answer(run("queue", "list", "--json"))["queues"][0]
    assert run("kind", "show", "none").exit_code == 3


@pytest.mark.usefixtures("work")
def test_counts_of_kinds_fit_the_terminal(client: awa.Client, database: str) -> None:
    client.insert({}, kind="k" * 190, queue="q" * 190)
    for arguments, columns, lines in (
        (("kind", "list"), 80, 5),
        (("kind", "list"), 200, 5),
        (("kind", "show", "k" * 190), 80, 3),
        (("queue", "show", "q" * 190), 80, 3),
    ):
        shown = at_terminal(*arguments, database=database, columns=columns)
        told = click.unstyle(shown.text).splitlines()
        begin = next(n for n, line in enumerate(told) if "available" in line and "failed" in line)
        rows = list(itertools.takewhile(str.strip, told[begin:]))
        assert shown.code == 0 and len(rows) == lines
        assert max(map(len, rows)) == columns


def test_estimates_of_kinds_are_marked(run: Run, client: awa.Client, conn: Conn) -> None:
    kinds = ("a", "b")
    client.insert_many_copy(awa.NewJob({}, kind=kinds[n % 2], queue="big") for n in range(100_500))
    conn.execute("ANALYZE awa.jobs")
    listed = [line.split()[1:] for line in run("kind", "list").stdout.splitlines()[1:]]
    for row in (*table(run("queue", "show", "big"), "kind"), *listed):
        assert re.fullmatch(r"~\d\d,\d\d\d", row[1])
    done = run("kind", "show", "c")
    assert done.exit_code == 3
    assert "not all jobs were looked at" in done.stderr and "known are 'a', 'b'" in done.stderr


def test_queues_are_shown_with_what_drifts_and_what_nobody_declares(run: Run, described: awa.Client) -> None:
    lines = [line.split() for line in run("queue", "list").stdout.splitlines()]
    assert lines[1:] == [
        ["mail", "open", *"00000", "-", *"00", "-", "Mail", "ada", "eu,", "prod", "drift"],
        ["old", "open", *"00000", "-", *"00", "-", "-", "ada", "-", "stale"],
    ]
    told = facts(run("queue", "show", "mail"))
    assert (told["display name"], told["owner"], told["tags"]) == ("Mail", "ada", "eu, prod")
    assert (told["docs"], told["declared"]) == ("https://docs.example/mail", "drift: by 1 live runtime")
    other = awa.descriptor_hash(owner="bob")
    assert told["drift"] == f"runtime 2 with something else ({other[:12]})"
    assert facts(run("queue", "show", "old"))["declared"] == "stale: by no live runtime"
    mail, old = answer(run("queue", "list", "--json"))["queues"]
    assert mail["descriptor"]["drift"] == [{"runtimes": [2], "descriptor_hash": other, "fields": []}]
    assert (mail["descriptor"]["tags"], old["descriptor"]["is_stale"]) == (["eu", "prod"], True)


def test_nothing_that_is_declared_is_obeyed_by_a_terminal(
    run: Run, client: awa.Client, start_worker: StartWorker, database: str
) -> None:
    @client.task(kind=ODD, queue=ODD)
    def work() -> None: ...

    said: dict[str, Any] = dict.fromkeys(("display_name", "description", "owner", "docs_url"), ODD * 9)
    client.queue(ODD, **said, tags=[ODD], extra={ODD: ODD})
    client.job_kind(work, **said, tags=[ODD], extra={ODD: ODD})
    start_worker(client, queues=[awa.config.QueueSpec(ODD)])
    for arguments in (["kind", "list"], ["kind", "show", ODD], ["queue", "list"], ["queue", "show", ODD]):
        done = run(*arguments)
        assert done.exit_code == 0, done.output
        assert all(line.isprintable() for line in (*done.stdout.splitlines(), *done.stderr.splitlines()))
    for noun, columns in (("kind", 80), ("queue", 200)):
        shown = at_terminal(noun, "list", database=database, columns=columns)
        lines = click.unstyle(shown.text).splitlines()
        assert shown.code == 0 and "\x1b[31md" not in shown.text
        assert all(line.isprintable() and len(line) <= columns for line in lines)
