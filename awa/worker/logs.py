"""Logs on stderr, as text or as one JSON object a line."""

from __future__ import annotations

import logging
import sys
import time
from datetime import UTC, datetime

import orjson


class _Text(logging.Formatter):
    converter = staticmethod(time.gmtime)

    def __init__(self, *, shows_process: bool) -> None:
        who = "[%(process)d] " if shows_process else ""
        line = f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {who}%(name)s: %(message)s"
        super().__init__(line, "%Y-%m-%dT%H:%M:%S")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, object] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
            "thread": record.threadName,
        }
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        # a lone surrogate in a message must not cost the line
        return orjson.dumps({k: _clean(v) for k, v in said.items()}).decode()


def _clean(value: object) -> object:
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def configure(*, log_format: str, level: str, shows_process: bool = False) -> None:
    """Send every log of this process to stderr; for worker processes, not for applications that embed a worker.

    Args:
        log_format: ``text`` or ``json``.
        level: Of awa's own loggers and the root.
        shows_process: Whether a line of text tells its process too, as several write to one place.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if log_format == "json" else _Text(shows_process=shows_process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("psycopg").setLevel(logging.WARNING)
