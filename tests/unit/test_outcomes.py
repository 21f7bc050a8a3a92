"""States, and the outcomes that a handler returns or raises."""

from __future__ import annotations

import copy
import math
import pickle
from datetime import timedelta
from typing import Any

import pytest

from awa.errors import AwaError, ValidationError
from awa.job import Cancel, JobState, RetryAfter, Snooze


def test_states_are_their_text_and_three_are_terminal() -> None:
    assert [str(state) for state in JobState] == [
        "scheduled", "available", "running", "retryable", "waiting_external", "completed", "failed", "cancelled",
    ]  # fmt: skip
    assert {state for state in JobState if state.is_terminal} == {"completed", "failed", "cancelled"}


@pytest.mark.parametrize("outcome", [Snooze, RetryAfter])
def test_seconds_are_a_number_or_a_timedelta(outcome: Any) -> None:
    assert outcome(90).seconds == outcome(90.0).seconds == outcome(timedelta(minutes=1.5)).seconds == 90.0
    assert (outcome(0).seconds, outcome(timedelta(days=3650)).seconds) == (0.0, 315_360_000.0)
    for wrong in (-1, math.nan, math.inf, 315_360_001, 10**400, "5", None, True, timedelta(seconds=-1)):
        with pytest.raises(ValidationError) as caught:
            outcome(wrong)
        assert caught.value.path == f"{outcome.__name__}.seconds"
        assert caught.value.value is wrong


def test_a_reason_is_text() -> None:
    assert (Cancel().reason, Cancel("gone").reason) == (None, "gone")
    with pytest.raises(ValidationError) as caught:
        Cancel(5)  # type: ignore[arg-type]
    assert caught.value.path == "Cancel.reason"


@pytest.mark.parametrize("outcome", [Snooze(5), RetryAfter(5), Cancel("gone"), Cancel()])
def test_an_outcome_is_a_value_that_can_be_raised(outcome: Exception) -> None:
    for twin in (copy.copy(outcome), pickle.loads(pickle.dumps(outcome))):
        assert twin == outcome
        assert hash(twin) == hash(outcome)
        assert vars(twin) == vars(outcome)
    assert not isinstance(outcome, AwaError)  # an ordinary ending, no error
    with pytest.raises(type(outcome)) as caught:
        raise outcome
    assert caught.value == outcome


def test_outcomes_differ_by_type_and_value() -> None:
    assert len({Snooze(5), Snooze(6), RetryAfter(5), Cancel(), Cancel("5"), Snooze(5.0)}) == 5
    assert [repr(one) for one in (Snooze(5), RetryAfter(0.5), Cancel("gone"), Cancel())] == [
        "Snooze(5.0)", "RetryAfter(0.5)", "Cancel('gone')", "Cancel(None)",
    ]  # fmt: skip
