"""What inspection refuses before it looks for a database."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

import awa
from awa import ValidationError
from awa.job import JobState
from awa.storage.listing import SOURCES, Position
from awa.storage.queues import Count


@pytest.fixture
def nowhere() -> awa.Client:
    """A client whose database does not exist: whatever reaches it fails otherwise."""
    return awa.Client("host=/nonexistent/socket dbname=nowhere")


@pytest.mark.parametrize(
    ("arguments", "path", "named"),
    [
        ({"state": "done"}, "state", ["scheduled, available, running", "'done'"]),
        ({"state": 5}, "state", ["one of", "a int"]),
        ({"state": "x" * 1000}, "state", ["one of", "a str"]),
        ({"queue": ""}, "queue", ["empty"]),
        ({"queue": 5}, "queue", ["got 5"]),
        ({"kind": "a\0"}, "kind", ["NUL"]),
        ({"kind": "k" * 201}, "kind", ["201", "200"]),
        ({"tag": ""}, "tag", ["empty"]),
        ({"tag": ["a"]}, "tag", ["a list"]),
        ({"ids": 7}, "ids", ["list of job ids", "got 7"]),
        ({"ids": "7"}, "ids", ["list of job ids", "got '7'"]),
        ({"limit": 0}, "limit", ["from 1 to 1000", "got 0"]),
        ({"limit": 1001}, "limit", ["from 1 to 1000", "got 1001", "next page"]),
        ({"limit": True}, "limit", ["got True"]),
        ({"limit": "10"}, "limit", ["got '10'"]),
        ({"after": 7}, "after", ["a int", "begin with None"]),
        ({"after": ""}, "after", ["''", "begin with None"]),
        ({"after": "running.0.1.2"}, "after", ["available", "'running.0.1.2'"]),
        ({"after": "available.2.1.2"}, "after", ["'available.2.1.2'"]),
        ({"after": "available.0.1"}, "after", ["'available.0.1'"]),
        ({"after": "available.0.-1.2"}, "after", ["'available.0.-1.2'"]),
        ({"after": "available.0.1.9223372036854775808"}, "after", ["9223372036854775808"]),
        ({"after": "available.0.\u0661.2"}, "after", ["available"]),
        ({"after": "available.0.1.2\n"}, "after", ["available"]),
    ],
)
def test_a_list_that_cannot_be_meant_is_refused(
    nowhere: awa.Client, arguments: dict[str, Any], path: str, named: list[str]
) -> None:
    with pytest.raises(ValidationError) as caught:
        nowhere.admin.list_jobs(**{"state": "available"} | arguments)
    assert caught.value.path == path
    assert caught.value.value == arguments[path]
    assert str(caught.value).startswith(path)
    assert all(part in str(caught.value) for part in named)


@pytest.mark.parametrize(
    ("ids", "path", "value", "named"),
    [
        ([], "ids", 0, ["no ids", "leave it out"]),
        (range(1, 1002), "ids", 1001, ["more than 1,000", "some of them"]),
        ([1, 0], "ids[1]", 0, ["from 1 to"]),
        ([1, True], "ids[1]", True, ["got True"]),
        (["1"], "ids[0]", "1", ["got '1'"]),
    ],
)
def test_ids_that_cannot_be_meant_are_refused(
    nowhere: awa.Client, ids: Any, path: str, value: object, named: list[str]
) -> None:
    with pytest.raises(ValidationError) as caught:
        nowhere.admin.list_jobs(ids=ids)
    assert (caught.value.path, caught.value.value) == (path, value)
    assert all(part in str(caught.value) for part in named)


@pytest.mark.parametrize("after", ["done.0.1.2", "running.1.1.2", ""])
def test_a_list_of_all_states_goes_on_after_one_of_its_pages(nowhere: awa.Client, after: str) -> None:
    with pytest.raises(ValidationError, match="after must be what a page of all jobs had"):
        nowhere.admin.list_jobs(after=after)


@pytest.mark.parametrize("queue", ["", 5, "a\0", "q" * 201])
def test_counts_of_what_is_no_queue_are_refused(nowhere: awa.Client, queue: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        nowhere.admin.queue_counts(queue)
    assert caught.value.path == "queue"


@pytest.mark.parametrize(
    ("job_id", "queue", "path"), [(0, "q", "job_id"), ("1", "q", "job_id"), (1, "", "queue"), (1, "q" * 201, "queue")]
)
def test_a_move_that_cannot_be_meant_is_refused(nowhere: awa.Client, job_id: Any, queue: Any, path: str) -> None:
    with pytest.raises(ValidationError) as caught:
        nowhere.admin.move(job_id, queue)
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("job_id", "priority", "path"), [(0, 1, "job_id"), ("1", 1, "job_id"), (1, 0, "priority"), (1, 5, "priority")]
)
def test_a_priority_that_cannot_be_meant_is_refused(nowhere: awa.Client, job_id: Any, priority: Any, path: str) -> None:
    with pytest.raises(ValidationError) as caught:
        nowhere.admin.set_priority(job_id, priority)
    assert caught.value.path == path


@pytest.mark.parametrize("job_id", [0, -1, "1", None, True])
def test_a_retry_that_cannot_be_meant_is_refused(nowhere: awa.Client, job_id: Any) -> None:
    for retry in (nowhere.retry, nowhere.admin.retry):
        with pytest.raises(ValidationError) as caught:
            retry(job_id)
        assert caught.value.path == "job_id"


@pytest.mark.parametrize("state", JobState)
def test_a_position_is_read_as_it_was_written(state: JobState) -> None:
    for source in range(len(SOURCES[state])):
        for key in [(0, 0), (1, 2), (2**63 - 1, 2**63 - 1)]:
            position = Position(state, source, key)
            assert Position.read(position.cursor()) == position


def test_a_count_says_whether_it_is_a_guess() -> None:
    assert str(Count(1234, True)) == "1,234"
    assert str(Count(123456, False)) == "about 123,456"


@pytest.mark.parametrize(
    ("method", "arguments", "path", "named"),
    [
        ("statistics", {"by": "job"}, "by", ["queue or kind", "'job'"]),
        ("statistics", {"by": ["queue"]}, "by", ["queue or kind", "a list"]),
        ("statistics", {"name": ""}, "name", ["empty"]),
        ("statistics_history", {"name": 5}, "name", ["got 5"]),
        ("statistics_history", {"step": "day"}, "step", ["minute or hour", "'day'"]),
        ("statistics_history", {"since": datetime(2026, 1, 1)}, "since", ["naive", "time zone"]),
        ("statistics_history", {"since": 7}, "since", ["datetime"]),
    ],
)
def test_statistics_that_cannot_be_meant_are_refused(
    nowhere: awa.Client, method: str, arguments: dict[str, Any], path: str, named: list[str]
) -> None:
    with pytest.raises(ValidationError) as caught:
        getattr(nowhere.admin, method)(**{"by": "queue", "name": "q"} | arguments)
    assert caught.value.path == path
    assert all(part in str(caught.value) for part in (path, *named))
