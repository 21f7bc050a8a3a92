"""``awa kind``, and what ``awa queue`` shows of how code describes queues."""

from __future__ import annotations

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
from tests.fixtures.jobs import StartWorker
from tests.fixtures.terminal import at_terminal

Conn = psycopg.Connection[Any]
Run = Callable[..., Result]

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
        ["kind", "runtimes", "display", "name", "owner", "tags", "declared"],
        ["plain", *"1----"],
        ["send", "1", *"---", "live"],
    ]
    shown = run("kind", "show", "send")
    told = facts(shown)
    assert (told["kind"], told["handled by"], told["description"]) == ("send", "1 live runtime", "One message")
    assert "\n             to one reader\n" in shown.stdout
    assert (told["extra"], told["declared"]) == ('{"tier":1}', "live: by 1 live runtime")
    assert facts(run("kind", "show", "plain")) == {
        "kind": "plain",
        "handled by": "1 live runtime",
        "declared": "not described in code",
    }
    document = answer(run("kind", "show", "send", "--json"))
    assert document == answer(run("kind", "list", "--json"))["kinds"][1]
    assert (document["name"], document["live_runtimes"]) == ("send", 1)
    descriptor = document["descriptor"]
    assert set(descriptor) == {
        *("display_name", "description", "owner", "docs_url", "tags", "extra", "descriptor_hash"),
        *("created_at", "updated_at", "last_seen_at", "live_runtimes", "drift", "is_stale"),
    }
    assert descriptor["descriptor_hash"] == awa.descriptor_hash(
        description="One message\nto one reader", extra={"tier": 1}
    )
    assert (descriptor["is_stale"], descriptor["drift"], descriptor["extra"]) == (False, [], {"tier": 1})


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
