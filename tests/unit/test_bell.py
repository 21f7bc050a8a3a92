"""When an idle worker waits and whether it asks to be woken: the policy, by a clock of the test's own."""

from __future__ import annotations

from itertools import pairwise

from awa.worker.bell import FIRST_POLL, HOT_RATE, PACE, Bell


def make_bell(*queues: str, poll_interval: float = 1.0, use_bells: bool = True) -> Bell:
    return Bell(queues or ("q",), poll_interval=poll_interval, use_bells=use_bells)


def test_an_idle_worker_tries_the_bell_at_once() -> None:
    bell = make_bell()
    assert bell.next_wait(100.0) == (0.0, True)


def test_while_another_holds_it_tries_go_apart_up_to_the_poll_interval() -> None:
    bell = make_bell(poll_interval=1.0)
    now, tries = 100.0, []
    for _ in range(100):
        wait, arm = bell.next_wait(now)
        if wait == 0.0:
            assert arm
            tries.append(now)
        now += wait
    gaps = [later - earlier for earlier, later in pairwise(tries)]
    assert gaps[0] <= 2 * FIRST_POLL
    assert all(earlier <= later + 1e-9 for earlier, later in pairwise(gaps))
    assert gaps[-1] <= 1.0 + 1e-9
    assert gaps[-1] > 0.5


def test_armed_it_polls_after_a_quarter_of_the_time_since() -> None:
    bell = make_bell(poll_interval=10.0)
    bell.took("q", 100.0)
    assert bell.is_armed
    assert bell.next_wait(100.0) == (FIRST_POLL, False)
    assert bell.next_wait(104.0) == (1.0, False)
    assert bell.next_wait(1000.0) == (10.0, False)


def test_a_transaction_of_any_length_is_found_within_a_third_of_its_time() -> None:
    for open_for in (0.01, 0.5, 3.0, 20.0):
        bell = make_bell(poll_interval=1000.0)
        bell.took("q", 0.0)
        now = 0.0
        while now < open_for:
            now += bell.next_wait(now)[0]
        assert now - open_for <= open_for / 3 + FIRST_POLL


def test_it_is_armed_only_with_the_bells_of_all_its_queues() -> None:
    bell = make_bell("a", "b")
    bell.took("a", 100.0)
    assert (bell.is_armed, bell.armed) == (False, {"a"})
    assert bell.next_wait(100.0) == (0.0, True)
    bell.took("b", 100.0)
    assert bell.is_armed


def test_a_lost_connection_takes_the_bells_along_and_they_are_tried_at_once() -> None:
    bell = make_bell()
    for _ in range(50):
        bell.next_wait(100.0)
    bell.took("q", 100.0)
    bell.lost()
    assert (bell.is_armed, bell.armed) == (False, set())
    assert bell.next_wait(100.0) == (0.0, True)


def test_without_bells_it_only_polls_more_and_more_slowly_until_something_arrives() -> None:
    bell = make_bell(poll_interval=0.5, use_bells=False)
    waits = []
    for _ in range(60):
        wait, arm = bell.next_wait(100.0)
        assert not arm
        waits.append(wait)
    assert waits[0] == FIRST_POLL
    assert waits == sorted(waits)
    assert waits[-1] == 0.5
    bell.arrived(1, 100.0)
    assert bell.next_wait(100.0)[0] == FIRST_POLL


def arrive(bell: Bell, rate: float, seconds: float, start: float) -> float:
    """Let jobs arrive one by one at *rate* for *seconds*; returns the time."""
    for n in range(int(rate * seconds)):
        bell.arrived(1, start + n / rate)
    return start + seconds


def test_it_is_hot_by_the_rate_of_arrivals_whatever_the_size_of_batches() -> None:
    single, batched = make_bell(), make_bell()
    arrive(single, 2 * HOT_RATE, 0.3, 10.0)
    assert single.is_hot
    for n in range(30):
        batched.arrived(50, 10.0 + n * 0.01)  # 5,000 a second
    assert batched.is_hot
    assert single.next_wait(11.0) == (PACE, False)
    slow = make_bell()
    arrive(slow, HOT_RATE / 2.5, 0.5, 10.0)
    assert not slow.is_hot


def test_it_cools_down_at_half_the_rate_and_when_nothing_comes() -> None:
    bell = make_bell()
    now = arrive(bell, 2 * HOT_RATE, 0.3, 10.0)
    now = arrive(bell, 0.75 * HOT_RATE, 0.3, now)
    assert bell.is_hot  # not yet below half
    now = arrive(bell, 0.3 * HOT_RATE, 0.3, now)
    assert not bell.is_hot
    now = arrive(bell, 2 * HOT_RATE, 0.3, now)
    assert bell.is_hot
    bell.arrived(0, now + 0.2)
    assert not bell.is_hot
