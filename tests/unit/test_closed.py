"""When queues that let nothing start are asked again."""

from __future__ import annotations

import logging
import math

import psycopg
import pytest

from awa.storage.line import Claimed
from awa.worker.bell import Bell
from awa.worker.closed import FIRST_PAUSE, ClosedQueues


def full(queue: str = "q", ask_after: float | None = None) -> Claimed:
    return Claimed(queue, is_full=True, ask_after=ask_after)


def test_an_open_queue_may_always_be_asked() -> None:
    closed = ClosedQueues(1.0)
    closed.saw(Claimed("q"), 5.0)
    assert (closed.may_ask("q", 5.0), closed.next_at(["q"]), closed.has_full) == (True, math.inf, False)


def test_a_full_queue_is_asked_more_and_more_slowly_up_to_the_poll_interval() -> None:
    closed, now, pauses = ClosedQueues(1.0), 100.0, []
    for _ in range(40):
        closed.saw(full(), now)
        assert not closed.may_ask("q", now)
        pauses.append(closed.next_at(["q"]) - now)
        now = closed.next_at(["q"])
        assert closed.may_ask("q", now)
    assert pauses[0] == pytest.approx(FIRST_PAUSE)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(1.0)
    assert now - 100 < 40


def test_a_full_queue_is_asked_at_once_when_an_attempt_of_it_has_ended_here() -> None:
    closed = ClosedQueues(1.0)
    for _ in range(30):
        closed.saw(full(), 100.0)
    closed.ended({"other"})
    assert not closed.may_ask("q", 100.0)
    closed.ended({"q", "other"})
    assert closed.may_ask("q", 100.0)
    closed.saw(full(), 100.0)
    assert closed.next_at(["q"]) == pytest.approx(100.0 + FIRST_PAUSE)


def test_the_rate_says_when_to_ask_and_no_end_of_an_attempt_changes_that() -> None:
    closed = ClosedQueues(1.0)
    closed.saw(full(ask_after=0.25), 100.0)
    assert closed.next_at(["q"]) == 100.25
    assert not closed.has_full
    closed.ended({"q"})
    assert not closed.may_ask("q", 100.2)
    closed.saw(full(ask_after=0.0), 100.25)
    assert closed.next_at(["q"]) == pytest.approx(100.25 + FIRST_PAUSE)
    closed.saw(full(ask_after=3600.0), 101.0)  # its limits may change, and the call that says so be lost
    assert closed.next_at(["q"]) == 102.0


def test_a_paused_queue_is_asked_once_a_poll_interval_or_when_somebody_calls(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "awa.worker")
    closed = ClosedQueues(2.0)
    for now in (100.0, 102.0, 104.0):
        closed.saw(Claimed("q", is_paused=True), now)
        assert closed.next_at(["q"]) == now + 2.0
    closed.reopen("q")
    assert closed.may_ask("q", 104.0)
    closed.saw(Claimed("q", is_paused=True), 104.0)
    assert [record.message for record in caplog.records] == [
        "queue q is paused: nothing of it starts until it is resumed"
    ]
    caplog.clear()
    closed.saw(full(), 106.0)
    closed.saw(Claimed("q"), 106.0)
    assert [record.message for record in caplog.records] == ["queue q is not paused any more"]
    assert closed.may_ask("q", 106.0)


def test_a_claim_that_did_not_come_so_far_says_nothing() -> None:
    closed = ClosedQueues(1.0)
    closed.saw(full(), 100.0)
    closed.saw(Claimed("q", is_busy=True), 100.0)
    closed.saw(Claimed("q", error=psycopg.OperationalError("lost")), 100.0)
    assert not closed.may_ask("q", 100.0)


def test_each_queue_has_a_time_of_its_own() -> None:
    closed = ClosedQueues(1.0)
    closed.saw(full("a", 0.5), 100.0)
    closed.saw(Claimed("b", is_paused=True), 100.0)
    assert closed.next_at(["a", "b", "c"]) == 100.5
    assert closed.next_at(["b", "c"]) == 101.0
    assert [closed.may_ask(queue, 100.7) for queue in "abc"] == [True, False, True]


def test_others_are_called_for_queues_that_were_full_once() -> None:
    closed = ClosedQueues(1.0)
    closed.saw(full("a"), 100.0)
    closed.saw(Claimed("a"), 100.0)
    closed.saw(full("rationed", 0.5), 100.0)
    assert closed.were_full({"a", "b", "rationed"}) == {"a"}


def test_an_armed_worker_is_armed_without_the_bells_of_closed_queues() -> None:
    bell, closed = Bell(("a", "b"), poll_interval=10.0, use_bells=True), ClosedQueues(10.0)
    bell.closed = closed.states
    bell.took("a", 100.0)
    assert bell.next_wait(104.0) == (0.0, True)
    closed.saw(Claimed("b", is_paused=True), 104.0)
    assert bell.is_armed
    assert bell.next_wait(104.0) == (1.0, False)
    closed.reopen("b")
    assert not bell.is_armed
