"""Faults that were planted in an installation: ``awa doctor`` names each with a command, and the command mends it."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg.conninfo import make_conninfo

import awa
from awa.cli import main
from awa.doctor import CHECKS, MOST, Finding, examine, section_of, worst
from awa.embedded import Binaries, Server
from awa.storage.descriptors import Drift
from awa.storage.examine import COUNTED
from awa.storage.keys import sweep_keys
from awa.storage.migrate import load_migrations, migrate
from awa.storage.schema import Schema
from tests.fixtures.db import short_directory, wait_until
from tests.fixtures.jobs import StartWorker, ended
from tests.fixtures.pooler import left_behind

Conn = psycopg.Connection[Any]
AWA = Schema()
QUICK = {"heartbeat": 0.05, "stale_after": 0.15, "poll_interval": 0.05}


def problems(conn: Conn, *names: str, **options: Any) -> list[Finding]:
    """What is not well, of the checks of these names."""
    return [one for one in examine(conn, AWA, **options) if one.level != "ok" and one.name in names]


def problem(conn: Conn, name: str, part: str = "", **options: Any) -> Finding:
    """The one problem of a name whose text has *part*."""
    [found] = [one for one in problems(conn, name, **options) if part in one.text]
    return found


def mend(finding: Finding) -> str:
    """What mends it, without the remark behind it."""
    assert finding.mend is not None, finding
    return finding.mend.partition("  #")[0].partition("  --")[0]


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner(env={"AWA_DATABASE_URL": "", **environment}).invoke(main, list(arguments))


def run_mend(finding: Finding, database: str) -> None:
    program, *arguments = shlex.split(mend(finding))
    assert program == "awa"
    done = run(*arguments, AWA_DATABASE_URL=database)
    assert done.exit_code == 0, done.output


def test_settings_and_old_rows(conn: Conn, database: str) -> None:
    name = conn.info.dbname
    conn.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    conn.execute(f"ALTER ROLE postgres IN DATABASE {name} SET statement_timeout = '2s'")
    conn.execute("ALTER TABLE awa.waiting_jobs SET (autovacuum_enabled = off)")
    conn.execute("ALTER TABLE awa.jobs_3 RESET (autovacuum_enabled)")
    conn.execute(
        "INSERT INTO awa.job_uniques (key, id) SELECT uuid_send(gen_random_uuid()), 1 FROM generate_series(1, 11000)"
    )
    conn.execute("DELETE FROM awa.job_uniques")
    conn.execute("SELECT pg_stat_force_next_flush()")
    planted = {
        "durability": f"synchronous_commit is off for database {name}",
        "timeouts": f"statement_timeout is 2s for role postgres in database {name}",
        "tracking": "track_activities is off",
        "autovacuum": "turned off for awa.waiting_jobs",
        "partitions": "autovacuum may come to awa.jobs_3",
        "dead_rows": "awa.job_uniques has about 11,000 dead rows",
    }
    with closing(psycopg.connect(database)) as long, psycopg.connect(database, autocommit=True) as fresh:
        long.execute("SELECT count(*) FROM awa.jobs")
        conn.execute(f"ALTER DATABASE {name} SET track_activities = off")
        time.sleep(0.06)
        planted["transactions"] = f"process {long.info.backend_pid} of role postgres"
        found = [problem(fresh, check, part, long=0.05) for check, part in planted.items()]
        for finding in found:
            conn.execute(mend(finding))
        with pytest.raises(psycopg.OperationalError):
            long.execute("SELECT 1")
    with psycopg.connect(database, autocommit=True) as fresh:
        wait_until(lambda: fresh.execute("SELECT pg_stat_force_next_flush()") and not problems(fresh, "dead_rows"))
        left = problems(fresh, *planted)
    # the server of the tests itself does not sync
    assert {one.facts["setting"] for one in left} == {"fsync", "full_page_writes"}


def test_a_check_that_may_not_look_or_takes_too_long_is_told(conn: Conn, database: str) -> None:
    with psycopg.connect(database) as other:
        other.execute("LOCK TABLE awa.leases IN ACCESS EXCLUSIVE MODE")
        found = {one.name: one for one in examine(conn, AWA, check_seconds=0.2)}
    assert "could not be looked at within 0.2 s" in found["leader"].text and found["leader"].level == "warning"
    assert found["overdue"].level == "ok" and "pg_blocking_pids" in mend(found["leader"])
    assert {check.name for check in CHECKS} == found.keys()
    late = examine(conn, AWA, total_seconds=0.0)
    assert {one.name for one in late if one.level == "warning"} == found.keys() - {"pooler"}  # which asks nothing
    assert conn.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_clocks_sequences_and_keys(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() - 630)
        assert "the database's clock is 10 min ahead of this machine's" in problem(conn, "clock").text
    conn.execute("SELECT setval('awa.entry_id_seq', 9000000000000000000)")
    low = problem(conn, "sequences")
    assert low.level == "error"
    conn.execute(mend(low).replace("N", "1"))
    conn.execute(
        "INSERT INTO awa.job_uniques (key, id) SELECT uuid_send(gen_random_uuid()), -g FROM generate_series(1, 300) g"
    )
    assert "300 of 300 unique keys" in problem(conn, "unique").text
    sweep_keys(conn, AWA, after=b"", limit=1000, seconds=5.0)
    assert not problems(conn, "clock", "sequences", "unique")


def drift_of(client: awa.Client, queue: str) -> list[Drift]:
    info = client.admin.get_queue(queue).descriptor
    assert info is not None
    return info.drift


RUNTIME = """
    INSERT INTO awa.runtime_instances (uuid, hostname, pid, version, queues, heartbeat_ms, started_at, last_seen_at,
                                       health, queue_descriptor_hashes, queue_descriptor_set)
    VALUES (gen_random_uuid(), 'db.example', 7, %(version)s, '[{"name": "mail"}]', 5000, now() - interval '1 h',
            clock_timestamp() - %(silent)s * interval '1 s', %(health)s::json,
            json_build_object('mail', %(hash)s::text), %(hash)s)
    RETURNING id
"""


def plant_runtime(
    conn: Conn, *, silent: float = 0.0, version: str = "0.1.0", health: str = "{}", hash_: str = "a"
) -> int:
    row = conn.execute(RUNTIME, {"silent": silent, "version": version, "health": health, "hash": hash_}).fetchone()
    assert row is not None
    return int(row[0])


def test_workers(conn: Conn, database: str, client: awa.Client, start_worker: StartWorker) -> None:
    assert problem(conn, "workers").level == "warning"
    assert "nobody has ever led, and no worker lives" in problem(conn, "leader").text
    first = plant_runtime(conn)
    second = plant_runtime(
        conn, version="0.0.9", hash_="b", health='{"unhealthy": ["heartbeat is hung"], "unready": []}'
    )
    silent = plant_runtime(conn, silent=3600)
    conn.execute("INSERT INTO awa.queue_descriptors (queue, descriptor_hash) VALUES ('mail', 'a')")
    conn.execute(
        "INSERT INTO awa.leases (name, runtime, expires_at) VALUES ('maintenance', %s, now() - interval '5 min')",
        [first],
    )
    waits = client.insert({}, kind="work", delay=3600)
    conn.execute("UPDATE awa.waiting_jobs SET run_at = now() - interval '4 min' WHERE id = %s", [waits.id])

    leaderless = problem(conn, "leader")
    assert leaderless.level == "error" and "nobody has led for 5 min, though 2 runtimes live" in leaderless.text
    assert f"runtime {silent} (process 7 on db.example) has been silent for 60 min" in problem(conn, "runtimes").text
    assert problem(conn, "health").facts == {"runtime": second, "unhealthy": ["heartbeat is hung"]}
    assert f"0.0.9: runtimes {second}" in problem(conn, "versions").text
    drift = problem(conn, "drift")
    assert f"queue mail is described in 2 ways by live workers: runtime {second} differs" in drift.text
    assert drift.facts == {"queue": "mail", "runtimes": [second]}
    assert drift.facts["runtimes"] == [one for each in drift_of(client, "mail") for one in each.runtimes]
    conn.execute("UPDATE awa.queue_descriptors SET descriptor_hash = 'c'")
    assert f"in 2 ways by live workers: runtimes {first}, {second} differ from" in problem(conn, "drift").text
    conn.execute('UPDATE awa.runtime_instances SET queue_descriptor_hashes = \'{"mail": "b"}\'')
    conn.execute("UPDATE awa.runtime_instances SET queue_descriptor_set = 'b'")
    assert "mail is described otherwise by live workers than in the catalogue" in problem(conn, "drift").text
    assert problem(conn, "overdue").level == "error"
    assert not problems(conn, "workers")

    @client.task(kind="work")
    def work() -> None: ...

    # what each of them says to do: start a worker
    conn.execute("UPDATE awa.runtime_instances SET ended_at = now() WHERE id = ANY (%s)", [[first, second]])
    start_worker(client, **QUICK)
    assert ended(client, waits).state == "completed"
    told = ("workers", "leader", "runtimes", "health", "versions", "drift", "overdue")
    wait_until(lambda: not problems(conn, *told))
    assert {one.name for one in examine(conn, AWA) if one.level == "ok"} >= set(told)


def test_queues(conn: Conn, database: str, client: awa.Client, start_worker: StartWorker) -> None:
    other = awa.Client(database)

    @other.task(kind="known")
    def known() -> None: ...

    @client.task(kind="odd kind", aliases=["known"])
    def odd() -> None: ...

    start_worker(other, queues=["default", "my mail"], **QUICK)
    client.admin.pause_queue("my mail", by="ada", reason="provider is down")
    client.insert_many([awa.NewJob({}, kind="known", queue="my mail")] * 3)
    lonely = client.insert({}, kind="known", queue="lonely")
    strange = client.insert({}, kind="odd kind")
    wait_until(lambda: client.get(strange.id).waits_for == "kind")

    paused, unserved, kinds = (problem(conn, name) for name in ("paused", "unserved", "kinds"))
    assert "queue my mail was paused" in paused.text and "by ada (provider is down), and has 3 jobs" in paused.text
    assert unserved.level == "error" and unserved.facts == {"queue": "lonely", "available": 1}
    assert mend(unserved) == "python -m awa.worker MODULE --queue lonely"
    assert "1 job of kind odd kind waits in queue default" in kinds.text

    many = [awa.NewJob({}, kind="known", queue=f"left {number:02}") for number in range(MOST + 5)]
    client.insert_many(many)
    short = problems(conn, "unserved")
    assert len(short) == MOST + 1 and short[-1].level == "error" and short[-1].text == "and 6 more of the kind"
    for job in many:
        client.admin.purge_queue(str(job.queue))
    client.insert_many([awa.NewJob({}, kind="known", queue="left") for _ in range(COUNTED + 100)])
    much = problem(conn, "unserved", "queue left")
    assert "1,000 jobs or more" in much.text and much.facts["available"] == COUNTED + 1  # no more are looked at
    client.admin.purge_queue("left")

    run_mend(paused, database)
    start_worker(client, queues=["default", "lonely"], **QUICK)
    assert ended(client, lonely).state == ended(client, strange).state == "completed"
    wait_until(lambda: not problems(conn, "paused", "unserved", "kinds"))
    other.close()


def test_a_ring_without_an_empty_slot(conn: Conn, database: str, client: awa.Client, start_worker: StartWorker) -> None:
    @client.task(kind="work", queue="mail")
    def work() -> None: ...

    client.admin.pause_queue("mail")
    for _ in range(8):
        client.insert(work.bind())
        conn.execute("SELECT awa.rotate_v1()")
    full = problem(conn, "ring")
    assert full.text.startswith("0 of 8 slots are empty; slot 7 is current")
    assert "slot 0, was sealed" in full.text and "kept by 1 job available in queue mail" in full.text
    with closing(psycopg.connect(database)) as holder:
        holder.execute("SELECT FROM awa.jobs_0")
        time.sleep(1.1)  # shorter ones are not told
        held = problem(conn, "ring")
        assert f"process {holder.info.backend_pid}" in held.text
        conn.execute(mend(held))
    run_mend(full, database)
    start_worker(client, queues=["mail"], completed_retention=0, rotate_after=1, **QUICK)
    wait_until(lambda: not problems(conn, "ring"), timeout=20)


def test_an_old_a_missing_and_a_new_schema(empty_database: str) -> None:
    def told(*arguments: str) -> tuple[int, dict[str, Any]]:
        done = run("doctor", "--json", *arguments, AWA_DATABASE_URL=empty_database)
        assert "Traceback" not in done.output
        document = json.loads(done.stdout)
        return done.exit_code, {one["name"]: one for one in document["findings"]}

    code, missing = told()
    assert (
        code == 2
        and missing["schema"]["mend"] == "awa migrate"
        and "there is no schema awa" in missing["schema"]["text"]
    )
    assert {"notify", "transactions", "server"} <= missing.keys() and "ring" not in missing
    with psycopg.connect(empty_database, autocommit=True) as conn:
        migrate(conn, AWA, migrations=load_migrations()[:25])
        code, old = told("--problems")
        assert (
            code == 2
            and "is at version 25" in old["schema"]["text"]
            and "this awa does not work" in old["schema"]["text"]
        )
        assert "could not be looked at" in old["drift"]["text"]
        run_mend(problem(conn, "schema"), empty_database)
        assert not problems(conn, "schema")
        conn.execute("INSERT INTO awa.schema_migrations (version, name, checksum) VALUES (999, 'later', '')")
        assert "this awa is too old" in problem(conn, "schema").text


def test_rights(conn: Conn, database: str, roles: Callable[[str], str]) -> None:
    for part in ("worker", "reader", "producer"):
        address = roles(part)
        with psycopg.connect(address, autocommit=True) as theirs:
            found = {one.name: one for one in examine(theirs, AWA)}
            assert found["grants"].level == "ok" and found["grants"].facts["part"] == part, found["grants"]
            assert found["server"].level == found["notify"].level == "ok"
            if part != "producer":
                assert "not_permitted" not in found and {check.name for check in CHECKS} == found.keys()
                assert "GRANT pg_read_all_stats" in str(found["transactions"].mend)
                continue
            refused = found["not_permitted"]
            assert {"ring", "leader", "paused"} <= set(refused.facts["checks"]) and refused.level == "warning"
            conn.execute(f"REVOKE INSERT (kind) ON awa.jobs FROM {theirs.info.user}")
            assert "lacks INSERT (kind) on table jobs" in problem(theirs, "grants").text
    worker = make_conninfo(database, user=f"{conn.info.dbname}_worker")
    with psycopg.connect(worker, autocommit=True) as theirs:
        conn.execute(f"REVOKE DELETE ON awa.waiting_jobs FROM {theirs.info.user}")
        lost = problem(theirs, "grants")
        assert lost.level == "error" and "lacks DELETE on table waiting_jobs" in lost.text
        script = run(*shlex.split(mend(lost).partition(" | ")[0])[1:]).stdout
        conn.execute("".join(line for line in script.splitlines(True) if line[0] != "\\"))
        assert not problems(theirs, "grants")


def test_a_pooler(database: str, pooled: str) -> None:
    done = run("doctor", "--json", AWA_DATABASE_URL=pooled)
    assert left_behind(pooled) == []
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["pooler"]["level"] == "warning" and "not tried" in found["notify"]["text"]
    [variable, value] = found["pooler"]["mend"].removeprefix("export ").split("=")
    assert value.startswith("postgresql://")
    done = run("doctor", "--json", **{"AWA_DATABASE_URL": pooled, variable: database})
    found = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert found["pooler"]["level"] == "ok" and "was heard after" in found["notify"]["text"]


@pytest.fixture
def careless(binaries: Binaries) -> Iterator[Server]:
    """A server that loses data, never vacuums, and has prepared transactions."""
    settings: dict[str, str | int] = {
        "fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "autovacuum": "off",
        "max_prepared_transactions": 5, "idle_in_transaction_session_timeout": "30s",
    }  # fmt: skip
    with short_directory() as directory:
        server = Server(binaries, directory / "pg", settings=settings)
        try:
            server.start()
            yield server
        finally:
            server.stop("immediate")


def test_a_careless_server_until_all_is_well(careless: Server, start_worker: StartWorker) -> None:
    database = careless.url()
    assert run("migrate", AWA_DATABASE_URL=database).exit_code == 0
    client = awa.Client(database)

    @client.task()
    def work() -> None: ...

    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("BEGIN; INSERT INTO awa.jobs (kind) VALUES ('work'); PREPARE TRANSACTION 'trans''fer'")
        time.sleep(0.02)
        found = problems(conn, "durability", "timeouts", "autovacuum", "prepared", long=0.01)
        settings = {
            "fsync",
            "synchronous_commit",
            "full_page_writes",
            "autovacuum",
            "idle_in_transaction_session_timeout",
        }
        assert {one.facts.get("setting") for one in found} == settings | {None} and len(found) == 6
        assert 'transaction "trans\'fer" of role' in next(one.text for one in found if one.name == "prepared")
        for finding in found:
            for statement in mend(finding).split("; "):
                conn.execute(statement)
        worker = start_worker(client, **QUICK)
        wait_until(lambda: worst(examine(conn, AWA, long=5.0)) == "ok")
        done = run("doctor", AWA_DATABASE_URL=database)
        assert done.exit_code == 0 and "0 errors, 0 warnings" in done.stdout, done.output
        assert "database: " in done.stderr
        assert worst(client.admin.doctor()) == "ok"
        conn.execute("ALTER TABLE awa.jobs_2 RESET (toast.autovacuum_enabled)")
        done = run("doctor", "--problems", "-q", AWA_DATABASE_URL=database)
        assert done.exit_code == 1 and done.stderr == ""
        assert done.stdout.splitlines()[0] == "schema" and "0 errors, 1 warning," in done.stdout
    worker.stop()
    client.close()
    careless.stop("immediate")
    assert run("doctor", AWA_DATABASE_URL=database).exit_code == 69


def test_every_check_is_in_the_table_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert told == [*(check.name for check in CHECKS), "not_permitted"]
    assert {section_of(name) for name in told} <= set(re.findall(r"^## What it looks at: (.+)$", page, re.MULTILINE))
