"""Log lines of worker processes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from awa.worker import logs


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The root logger as it was."""
    root = logging.getLogger()
    handlers, level, psycopg_level = root.handlers[:], root.level, logging.getLogger("psycopg").level
    root.handlers = []
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = handlers, level
    logging.getLogger("psycopg").setLevel(psycopg_level)


def test_json_is_one_object_a_line_whatever_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(log_format="json", level="info")
    log = logging.getLogger("awa.job")
    log.info("plain %s", 5)
    log.warning("two\nlines, ä 😀 and \ud800 and \0")
    log.debug("not said")
    try:
        raise ValueError("in\nthe \ud800 middle")
    except ValueError:
        log.exception("failed")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["level"] for line in lines] == ["info", "warning", "error"]
    assert lines[0]["message"] == "plain 5"
    assert lines[0]["logger"] == "awa.job"
    assert lines[0]["thread"] == "MainThread"
    assert abs((datetime.now(UTC) - datetime.fromisoformat(lines[0]["at"])).total_seconds()) < 60
    assert lines[1]["message"].startswith("two\nlines, ä 😀 and ")
    assert "ValueError: in" in lines[2]["traceback"]


def test_text_has_time_level_logger_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(log_format="text", level="warning")
    logging.getLogger("awa.worker").info("not said")
    logging.getLogger("awa.worker").warning("said %d", 1)
    logging.getLogger("app").error("theirs")
    first, second = capsys.readouterr().err.splitlines()
    stamp, level, logger, message = first.split(maxsplit=3)
    assert datetime.fromisoformat(stamp).utcoffset() is not None
    assert (level, logger, message) == ("WARNING", "awa.worker:", "said 1")
    assert second.endswith("ERROR   app: theirs")
