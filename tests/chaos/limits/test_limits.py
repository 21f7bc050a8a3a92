"""Short runs of limits under chaos, one of them clean and two spoilt on purpose; the long ones are run by hand."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.chaos.limits import evidence
from tests.chaos.limits.evidence import bounds, overlaps
from tests.chaos.limits.operator import Operator
from tests.chaos.limits.run import run
from tests.chaos.limits.sampler import take_sample, too_many
from tests.chaos.report import Report
from tests.storage.engine import Conn, Member, claim, insert, register, settle


def broken(report: Report) -> set[str]:
    return {verdict.name for verdict in report.verdicts if verdict.count}


@pytest.mark.slow
def test_no_more_run_than_may_and_all_of_them_end_in_order(database: str, tmp_path: Path) -> None:
    report = run(database, tmp_path, seed=20, seconds=12.0, tell=print)
    assert report.is_clean, str(report)
    for fault in ("worker killed", "worker frozen", "limits changed", "paused", "cancel: cancelled"):
        assert report.faults[fault] > 0, "it was no idle run"
    assert report.figures["attempts set_aside"] > 0
    assert report.figures["samples"] > 20


@pytest.mark.slow
def test_one_more_than_may_is_seen_by_every_witness(database: str, tmp_path: Path) -> None:
    report = run(database, tmp_path, seed=21, seconds=6.0, sabotage="limits", tell=print)
    assert broken(report) >= {
        "too many of one queue, claimed",
        "too many of one queue, running, by the handlers",
        "too many of one concurrency_key, claimed",
        "too many of one concurrency_key, running, by the handlers",
        "more open than allowed, in a sample",
    }, str(report)


@pytest.mark.slow
def test_jobs_that_nobody_hands_a_key_to_are_seen(database: str, tmp_path: Path) -> None:
    report = run(database, tmp_path, seed=22, seconds=3.0, sabotage="hand-over", drained=4.0, tell=print)
    assert broken(report) >= {"never ended", "set aside at the end"}, str(report)


# --- the checks themselves


def at(second: float) -> datetime:
    return datetime.fromtimestamp(second, UTC)


def spans(*triples: tuple[float, float | None, float]) -> list[tuple[datetime, datetime | None, datetime]]:
    return [(at(begin), None if end is None else at(end), at(claimed)) for begin, end, claimed in triples]


def test_what_goes_on_at_once_is_counted_against_what_was_said_when_the_newest_was_claimed() -> None:
    bound = bounds([(at(0), 2), (at(10), 1)])
    assert bound(at(-1)) is None
    assert list(overlaps(spans((1, 5, 1), (2, 4, 2), (5, 6, 5)), bound)) == []
    assert list(overlaps(spans((1, 5, 1), (2, None, 2), (3, 4, 3)), bound)) == [(at(3), 3, 2)]
    # claimed before the limit was lowered, begun after
    assert list(overlaps(spans((1, 20, 1), (11, 12, 9)), bound)) == []
    assert list(overlaps(spans((1, 20, 1), (11, 12, 11)), bound)) == [(at(11), 2, 1)]


def test_a_sample_is_counted_against_what_was_said_when_the_newest_was_claimed(
    database: str, conn: Conn, tmp_path: Path
) -> None:
    """However often a limit has changed since the last sample."""
    evidence.install(conn)
    operator = Operator(database, tmp_path, random.Random(1), None)
    spoiler = Operator(database, tmp_path, random.Random(1), "limits")
    runtime = register(conn)
    insert(conn, *range(5), key="a")

    def claim_under(said: Operator, per_key: int, max_running: int | None = None) -> list[Member]:
        said.limit("q", max_running=max_running, per_key=per_key)
        return claim(conn, runtime).members + claim(conn, runtime).members  # the first hands keys over

    def found() -> list[str]:
        return list(too_many(take_sample(conn)))

    first, second = claim_under(operator, 2)
    assert (claim_under(operator, 1), found()) == ([], [])
    [third] = claim_under(operator, 3)
    assert (claim_under(operator, 1), found()) == ([], [])
    settle(conn, runtime, [first, second])
    assert len(claim_under(spoiler, 1)) == 1
    assert found() == ["2 are open of key 'a' in queue 'q', allowed were 1"]
    settle(conn, runtime, [third])
    assert found() == []
    assert len(claim_under(spoiler, 5, max_running=1)) == 1
    assert found() == ["2 are open of queue 'q' in queue 'q', allowed were 1"]
    operator.close()
    spoiler.close()
