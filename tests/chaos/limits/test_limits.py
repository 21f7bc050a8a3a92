"""Short runs of limits under chaos, one of them clean and two spoilt on purpose; the long ones are run by hand."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.chaos.limits.evidence import bounds, overlaps
from tests.chaos.limits.run import run
from tests.chaos.limits.sampler import Ceilings
from tests.chaos.report import Report


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


def test_a_sample_may_show_what_was_open_before_a_limit_was_lowered_and_nothing_more() -> None:
    ceilings = Ceilings()

    def look(limit: int | None, count: int) -> bool:
        return bool(list(ceilings.look([("q", "queue", "", limit, count)])))

    assert [look(5, 5), look(3, 5), look(3, 4), look(3, 4), look(3, 3)] == [False] * 5
    assert look(3, 4)
    assert [look(3, 3), look(5, 5), look(None, 99)] == [False] * 3
    assert look(5, 6)
