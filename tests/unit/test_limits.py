"""Limits of queues: what can be declared or set, and how it is stored."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

import awa
from awa import ConfigError, Limits, RateLimit, ValidationError
from awa.limits import limits_from_json, limits_to_json


@pytest.fixture
def nowhere() -> awa.Client:
    """A client whose database does not exist: whatever reaches it fails otherwise."""
    return awa.Client("host=/nonexistent/socket dbname=nowhere")


@pytest.mark.parametrize(
    ("limit", "count", "per", "burst", "rate"),
    [
        (RateLimit(50), 50.0, 1.0, 50, 50.0),
        (RateLimit(0.5), 0.5, 1.0, 1, 0.5),
        (RateLimit(90, per=60), 90.0, 60.0, 90, 1.5),
        (RateLimit(1, per=timedelta(minutes=1), burst=3), 1.0, 60.0, 3, 1 / 60),  # type: ignore[arg-type]
        (RateLimit(2.1, per=86_400), 2.1, 86_400.0, 3, 2.1 / 86_400),
        (RateLimit(1_000_000), 1e6, 1.0, 1_000_000, 1e6),
    ],
)
def test_a_rate_limit_is_so_many_in_so_long(
    limit: RateLimit, count: float, per: float, burst: int, rate: float
) -> None:
    assert (limit.count, limit.per, limit.burst, limit.rate) == (count, per, burst, rate)


@pytest.mark.parametrize(
    ("arguments", "path", "named"),
    [
        ({"count": 0}, "count", "above 0, up to 1,000,000, got 0: to start no attempts pause the queue"),
        ({"count": -1}, "count", "got -1"),
        ({"count": 1_000_001}, "count", "got 1000001"),
        ({"count": 10**400}, "count", "many digits"),
        ({"count": math.nan}, "count", "got nan"),
        ({"count": math.inf}, "count", "got inf"),
        ({"count": True}, "count", "got True"),
        ({"count": "5"}, "count", "got '5'"),
        ({"count": None}, "count", "got None"),
        ({"count": 1, "per": 0}, "per", "above 0 seconds"),
        ({"count": 1, "per": -1}, "per", "from 0 to 86,400"),
        ({"count": 1, "per": 86_401}, "per", "from 0 to 86,400"),
        ({"count": 1, "per": math.nan}, "per", "nan"),
        ({"count": 1, "per": "s"}, "per", "got str"),
        ({"count": 1, "burst": 0}, "burst", "from 1 to 1000000"),
        ({"count": 1, "burst": 1_000_001}, "burst", "got 1000001"),
        ({"count": 1, "burst": 1.5}, "burst", "got 1.5"),
        ({"count": 1, "burst": True}, "burst", "got True"),
        ({"count": 2, "per": 0.000001}, "count", "2e+06 attempts a second"),
        ({"count": 0.01, "per": 86_400}, "count", "1.16e-07 attempts a second"),
    ],
)
def test_a_rate_limit_that_cannot_be_meant_is_refused(arguments: dict[str, Any], path: str, named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        RateLimit(**arguments)
    assert caught.value.path == path
    assert str(caught.value).startswith(path)
    assert named in str(caught.value)


BAD_LIMITS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"max_running": 0},
        "max_running",
        "from 1 to 2147483647 (to start none pause the queue; None is no limit), got 0",
    ),
    ({"max_running": 2**31}, "max_running", "got 2147483648"),
    ({"max_running": True}, "max_running", "got True"),
    ({"max_running": 2.0}, "max_running", "got 2.0"),
    ({"max_running_per_key": "1"}, "max_running_per_key", "got '1'"),
    ({"rate_limit": 50}, "rate_limit", "awa.RateLimit(50, per=1.0), got 50"),
]


@pytest.mark.parametrize(("arguments", "path", "named"), BAD_LIMITS)
def test_limits_that_cannot_be_meant_are_refused(
    nowhere: awa.Client, arguments: dict[str, Any], path: str, named: str
) -> None:
    for call in (lambda: Limits(**arguments), lambda: nowhere.admin.set_limits("q", **arguments)):
        with pytest.raises(ValidationError) as caught:
            call()
        assert caught.value.path == path
        assert named in str(caught.value)
    with pytest.raises(ConfigError, match=path):
        nowhere.queue("q", **arguments)
    assert nowhere.registry.queues == {}


@pytest.mark.parametrize("name", ["", 5, None, "a\0", "q" * 201])
def test_what_is_no_queue_is_refused(nowhere: awa.Client, name: Any) -> None:
    admin = nowhere.admin
    calls = (
        admin.get_queue, admin.pause_queue, admin.resume_queue, admin.count_waiting, admin.cancel_waiting,
        admin.purge_queue, admin.clear_limits, lambda name: admin.set_limits(name, max_running=1),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(ValidationError) as caught:
            call(name)
        assert caught.value.path == "name"
    with pytest.raises(ConfigError, match="queue"):
        nowhere.queue(name)


def test_what_an_operator_cannot_say_is_refused(nowhere: awa.Client) -> None:
    admin = nowhere.admin
    for call, path in (
        (lambda: admin.pause_queue("q", by=""), "by"),
        (lambda: admin.pause_queue("q", by="x" * 201), "by"),
        (lambda: admin.pause_queue("q", reason="x" * 1001), "reason"),
        (lambda: admin.cancel_waiting("q", reason=""), "reason"),
        (lambda: admin.set_limits("q"), "limits"),
        (lambda: admin.set_limits("q", by=7, max_running=1), "by"),  # type: ignore[arg-type]
        (lambda: admin.clear_limits("q", "max_runing"), "names[0]"),
    ):
        with pytest.raises(ValidationError) as caught:
            call()
        assert caught.value.path == path


def test_limits_are_read_as_they_were_stored() -> None:
    limits = Limits(3, RateLimit(0.1, per=7, burst=2), 1)
    assert Limits(**limits_from_json(limits.to_json())) == limits  # type: ignore[arg-type]
    assert Limits().to_json() == {}
    said = {"max_running": None, "rate_limit": RateLimit(5)}
    assert limits_from_json(limits_to_json(said)) == said
    newer = {"max_running": 2, "rate_limit": {"count": 5, "jitter": 1}, "max_waiting": 7}
    assert limits_from_json(newer) == {"max_running": 2, "rate_limit": RateLimit(5)}
