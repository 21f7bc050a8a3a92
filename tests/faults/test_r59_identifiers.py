"""R59: names with quotes, percent signs or braces broke statements, or became part of them.

Now every value is a parameter and every identifier composed, and one rule refuses what no name can be.
"""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

import awa
from awa.config import QueueSpec
from tests.fixtures.jobs import StartWorker, count, ended

NAMES = [
    "a'; drop table x; --",
    'a"b',
    "%s",
    "%(queue)s",
    "{0}",
    "{bell}",
    "$1",
    "q-1",
    "ÄÖ",
    "a\nb\tc",
    "\\",
    "x" * 200,
]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_plain_data_on_every_path(
    client: awa.Client, start_worker: StartWorker, conn: psycopg.Connection[Any], name: str
) -> None:
    seen: list[Any] = []
    conn.execute("CREATE TABLE x (n int)")

    @client.task(kind=name, queue=name)
    def work(value: str) -> None:
        job = awa.current_job()
        seen.append((job.kind, job.queue, job.tags, job.metadata, value))

    start_worker(client, queues=[QueueSpec(name)], poll_interval=30)
    item = awa.NewJob(work.bind(name), tags=[name], metadata={name: name})
    jobs = [client.insert(item), *client.insert_many([item, work.bind(name)])]
    client.insert_many_copy([item])
    with psycopg.connect(conn.info.dsn) as lent:
        jobs.append(client.insert(item, conn=lent))
    for job in jobs:
        info = ended(client, job, timeout=5)
        assert (info.state, info.kind, info.queue) == ("completed", name, name)
    tagged = (name, name, (name,), {name: name}, name)
    assert seen.count(tagged) + seen.count((name, name, (), {}, name)) == len(seen)
    assert count(conn, "SELECT count(*) FROM x") == 0


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 201, "\ud800"])
def test_what_no_name_can_be_is_refused_before_any_sql(name: str) -> None:
    nowhere = awa.Client("host=/nonexistent dbname=x")
    for option in ("kind", "queue"):
        with pytest.raises(awa.ValidationError) as caught:
            nowhere.insert({}, **({"kind": "k"} | {option: name}))  # type: ignore[arg-type]
        assert caught.value.path == option
    for schema in ("a'b", 'a"b', "a$b", "a%b", "pg_x", "", "x" * 64, "a;b"):
        with pytest.raises(awa.ConfigError):
            awa.Client("dbname=x", schema=schema)
