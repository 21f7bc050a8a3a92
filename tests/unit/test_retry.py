"""When a failed attempt is tried again, whatever the policy does."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from awa.errors import ConfigError, TerminalError
from awa.retry import (
    MAX_DELAY,
    Backoff,
    check_exception_types,
    check_policy,
    delay_after,
    exponential,
    fixed,
    linear,
    verdict,
)


def no_jitter() -> float:
    return 0.0


def full_jitter() -> float:
    return 1.0


def test_the_default_doubles_with_a_quarter_of_jitter_up_to_a_day() -> None:
    assert [delay_after(None, attempt, random=no_jitter).seconds for attempt in (1, 2, 3, 16)] == [2, 4, 8, 65536]
    assert delay_after(None, 3, random=full_jitter).seconds == 10
    for attempt in (17, 100, 2000, 10**9):
        assert delay_after(None, attempt, random=full_jitter).seconds == 86_400.0
    assert 4.0 <= delay_after(None, 2).seconds <= 5.0


def test_policies_by_shape() -> None:
    def first_four(policy: Backoff) -> list[float]:
        return [delay_after(policy, attempt, random=no_jitter).seconds for attempt in (1, 2, 3, 4)]

    assert first_four(exponential(1, 3, cap=20)) == [1, 3, 9, 20]
    assert first_four(linear(10)) == [10, 20, 30, 40]
    assert first_four(linear(timedelta(minutes=1), step=5)) == [60, 65, 70, 75]
    assert first_four(fixed(timedelta(seconds=30))) == [30, 30, 30, 30]
    assert delay_after(fixed(30), 1, random=full_jitter).seconds == 30
    assert delay_after(exponential(5, 5, jitter=0.1), 1, random=full_jitter).seconds == 5.5
    assert delay_after(exponential(5, 5, cap=100), 100, random=full_jitter).seconds == 100
    assert delay_after(exponential(0), 2000, random=no_jitter).seconds == 0


def raising(error: BaseException) -> Callable[[int], float]:
    def policy(attempt: int) -> float:
        raise error

    return policy


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __float__(self) -> float:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "policy",
    [
        *(lambda attempt, answer=answer: answer for answer in (
            -1, -0.5, math.nan, math.inf, -math.inf, None, "5", True, Hostile(), Hostile, [], 5j, -(10**5000),
            timedelta(seconds=-1),
        )),
        *(raising(error) for error in (ValueError("x"), OverflowError(), KeyboardInterrupt(), SystemExit(3))),
        lambda: 5,
        lambda attempt: 2.0**5000,
    ],
)  # fmt: skip
def test_a_bad_policy_falls_back_to_the_default_and_says_so(policy: Any) -> None:
    delay = delay_after(policy, 3, random=no_jitter)
    assert delay.seconds == 8
    assert delay.complaint is not None
    assert "attempt 3" in delay.complaint


def test_a_large_answer_is_cut_without_a_complaint() -> None:
    for policy in (lambda attempt: 2**attempt, lambda attempt: timedelta.max, lambda attempt: 1e300):
        delay = delay_after(policy, 2000)
        assert (delay.seconds, delay.complaint) == (MAX_DELAY, None)
    assert delay_after(lambda attempt: attempt * timedelta(seconds=2), 4).seconds == 8


@given(
    st.builds(
        Backoff,
        base=st.floats(0, MAX_DELAY),
        factor=st.floats(1, 1e6),
        step=st.floats(0, MAX_DELAY),
        cap=st.floats(0, MAX_DELAY),
        jitter=st.floats(0, 1),
    ),
    st.integers(1, 10**6),
    st.floats(0, 1, exclude_max=True),
)
def test_any_backoff_stays_within_its_cap(policy: Backoff, attempt: int, share: float) -> None:
    seconds = delay_after(policy, attempt, random=lambda: share).seconds
    assert 0 <= seconds <= policy.cap


@pytest.mark.parametrize(
    "make",
    [
        lambda: exponential(-1),
        lambda: exponential(math.nan),
        lambda: exponential(1, 0.5),
        lambda: exponential(1, math.inf),
        lambda: exponential(1, cap=86_401),
        lambda: exponential(1, jitter=2),
        lambda: exponential("1"),  # type: ignore[arg-type]
        lambda: linear(1, step=-1),
        lambda: fixed(timedelta(days=2)),
        lambda: fixed(True),
        lambda: check_policy(5),
        lambda: check_policy(ValueError),
        lambda: check_exception_types("ValueError", "retry_on"),
        lambda: check_exception_types((ValueError, int), "retry_on"),
        lambda: check_exception_types((ValueError("x"),), "retry_on"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()


def test_exception_types_may_be_one_or_several() -> None:
    assert check_exception_types(OSError, "retry_on") == (OSError,)
    assert check_exception_types([OSError, KeyboardInterrupt], "retry_on") == (OSError, KeyboardInterrupt)


class Liar(ValueError):
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("asked for my class")


@pytest.mark.parametrize(
    ("exc", "rules", "expected"),
    [
        (ValueError(), {}, "retry"),
        (SystemExit(), {}, "retry"),
        (KeyboardInterrupt(), {}, "retry"),
        (TerminalError(), {}, "fail"),
        (TerminalError(), {"retry_on": (Exception,)}, "fail"),
        (ValueError(), {"fail_on": (ValueError,)}, "fail"),
        (UnicodeError(), {"fail_on": (ValueError,)}, "fail"),
        (OSError(), {"fail_on": (ValueError,)}, "retry"),
        (OSError(), {"retry_on": (OSError,)}, "retry"),
        (TimeoutError(), {"retry_on": (OSError,)}, "retry"),
        (ValueError(), {"retry_on": (OSError,)}, "fail"),
        (KeyboardInterrupt(), {"retry_on": (Exception,)}, "fail"),
        (TimeoutError(), {"retry_on": (OSError,), "fail_on": (TimeoutError,)}, "fail"),
        (OSError(), {"retry_on": (OSError,), "fail_on": (TimeoutError,)}, "retry"),
        (ValueError(), {"retry_on": ()}, "fail"),
        (ValueError(), {"fail_on": ()}, "retry"),
        (Liar(), {"fail_on": (ValueError,)}, "fail"),
        (Liar(), {"fail_on": (OSError,)}, "retry"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(value),
)
def test_rules_by_exception(exc: BaseException, rules: dict[str, Any], expected: str) -> None:
    assert verdict(exc, attempt=1, max_attempts=25, **rules) == expected
    assert verdict(exc, attempt=25, max_attempts=25, **rules) == "fail"


def test_attempt_numbers_have_no_end() -> None:
    assert delay_after(linear(1), sys.maxsize, random=no_jitter).seconds == MAX_DELAY
