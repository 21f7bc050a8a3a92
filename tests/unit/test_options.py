"""Options are refused before any SQL, each with its path, its value and its limit."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from awa import options
from awa.errors import ValidationError


@pytest.mark.parametrize(
    ("check", "value", "path", "limit"),
    [
        *((options.check_priority, value, "priority", (1, 4)) for value in (0, 5, True, 2.0, "2", None, 10**5000)),
        *((options.check_max_attempts, value, "max_attempts", (1, 1000)) for value in (0, 1001, True, 1.0, "3")),
        *(
            (check, value, path, 200)
            for check, path in ((options.check_kind, "kind"), (options.check_queue, "queue"))
            for value in ("", "x" * 201, "a\0b", "\ud800", 5, None, b"x")
        ),
        (options.check_tags, ["t"] * 21, "tags", 20),
        (options.check_tags, "tag", "tags", 20),
        (options.check_tags, 5, "tags", 20),
        (options.check_tags, ["a", ""], "tags[1]", 200),
        (options.check_tags, ["x" * 201], "tags[0]", 200),
        (options.check_tags, ["a", "b\0"], "tags[1]", 200),
        (options.check_tags, [1], "tags[0]", 200),
        (options.check_run_at, datetime(2026, 1, 1), "run_at", "1970-9999"),
        (options.check_run_at, datetime(1969, 12, 31, tzinfo=UTC), "run_at", "1970-9999"),
        (options.check_run_at, datetime(1970, 1, 1, tzinfo=timezone(timedelta(hours=1))), "run_at", "1970-9999"),
        (options.check_run_at, datetime.max.replace(tzinfo=timezone(timedelta(hours=-1))), "run_at", "1970-9999"),
        (options.check_run_at, "2026-01-01", "run_at", "1970-9999"),
        (options.check_run_at, 0, "run_at", "1970-9999"),
        *(
            (options.check_delay, value, "delay", options.LONGEST_WAIT)
            for value in (-1, -0.001, math.nan, math.inf, -math.inf, True, "5", None, 10**400, -(10**400), Decimal(1))
        ),
        *(
            (options.check_timeout, value, "timeout", 2_147_483)
            for value in (timedelta(seconds=-1), timedelta(days=25), 2_147_483.001, 2**31, math.nan)
        ),
        *((options.check_job_id, value, "job_id", (1, 2**63 - 1)) for value in (0, -5, 2**63, "1", 1.0, True, None)),
        *((options.check_reason, value, "reason", 1000) for value in ("", "x" * 1001, "a\0b", "\udfff", 5, b"x")),
        *(
            (lambda value: options.check_flag(value, "force"), value, "force", (False, True))
            for value in (1, None, "no")
        ),
        *((options.check_pool_size, value, "pool_size", (1, 1000)) for value in (0, 1001, "x", 2.0)),
    ],
    ids=lambda value: "" if isinstance(value, int) else None,  # one of them has more digits than Python prints
)
def test_a_bad_option_names_itself(check: Any, value: Any, path: str, limit: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        check(value)
    assert (caught.value.path, caught.value.limit) == (path, limit)
    assert caught.value.value is value or isinstance(value, list)
    assert str(caught.value).startswith(path)
    assert len(str(caught.value)) < 700
    str(caught.value).encode()


@pytest.mark.parametrize(
    "name", ["a'; drop table x; --", 'a"b', "%s", "{0}", "$1", "q-1", "ÄÖ", "a\nb", "x" * 200, "😀"]
)
def test_names_are_plain_text(name: str) -> None:
    assert options.check_kind(name) == options.check_queue(name) == name
    assert options.check_tags([name]) == (name,)


def test_good_options_come_back_as_they_are_stored() -> None:
    assert [options.check_priority(priority) for priority in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert (options.check_max_attempts(1), options.check_max_attempts(1000)) == (1, 1000)
    assert options.check_tags(str(number) for number in range(20)) == tuple(str(number) for number in range(20))
    assert options.check_delay(timedelta(minutes=1)) == 60.0
    assert options.check_timeout(0) == 0.0
    assert options.check_timeout(timedelta(days=24)) == 2_073_600.0
    assert (options.check_job_id(1), options.check_job_id(2**63 - 1)) == (1, 2**63 - 1)
    assert (options.check_reason(None), options.check_reason("ě" * 1000)) == (None, "ě" * 1000)
    assert options.check_flag(True, "force") is True
    moment = options.check_run_at(datetime(2026, 7, 1, 12, tzinfo=timezone(timedelta(hours=2))))
    assert (moment, moment.tzinfo) == (datetime(2026, 7, 1, 10, tzinfo=UTC), UTC)
    assert options.check_run_at(datetime(1970, 1, 1, tzinfo=UTC)).year == 1970
    assert options.check_run_at(datetime.max.replace(tzinfo=UTC)).year == 9999


def test_a_timeout_is_stored_in_milliseconds_and_never_rounded_to_no_limit() -> None:
    seconds = [0.0, 5e-324, 0.0004, 0.0006, 0.001, 1.5, 2_147_483.0]
    assert [options.milliseconds(timeout) for timeout in seconds] == [0, 1, 1, 1, 1, 1500, 2_147_483_000]
    assert options.milliseconds(2_147_483.0) < 2**31
