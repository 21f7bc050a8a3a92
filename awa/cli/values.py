"""What is typed on a command line and is more than text: durations, instants, rates, JSON."""

from __future__ import annotations

import json
import math
import re
from datetime import datetime
from typing import Any

import click

from awa import options
from awa.cli.output import short
from awa.errors import ValidationError
from awa.limits import RateLimit

_UNITS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
}
_SHOWN = (("d", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"


def duration(text: str) -> float:
    """Seconds, from ``90``, ``90s``, ``15min``, ``2h`` or ``1d``.

    Raises:
        click.BadParameter: It is none of these; likewise below.
    """
    found = re.fullmatch(rf"({_NUMBER})\s*([a-z]*)", text.strip(), re.ASCII)
    if found is None or (found[2] and found[2] not in _UNITS):
        raise click.BadParameter(f"{_shown(text)} is no time: give seconds, or a number with s, min, h or d")
    return float(found[1]) * _UNITS.get(found[2], 1.0)


def instant(text: str) -> datetime:
    """A time as ISO 8601 writes it, with its zone: ``2026-12-24T18:00:00+01:00``, or with ``Z``."""
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        raise click.BadParameter(f"{_shown(text)} is no time: give one like 2026-12-24T18:00:00+01:00") from None
    if at.utcoffset() is None:
        raise click.BadParameter(f"{_shown(text)} says no time zone: add +01:00, or Z for UTC")
    return at


def job_id(text: str) -> int:
    """The id of a job."""
    try:
        return options.check_job_id(int(text) if re.fullmatch("[0-9]{1,19}", text, re.ASCII) else text)
    except ValidationError:
        raise click.BadParameter(
            f"{_shown(text)} is no job's id: give a number from 1 to {2**63 - 1}, `awa job list` shows which there are"
        ) from None


def priority(text: str) -> int:
    """A priority."""
    try:
        return options.check_priority(int(text) if re.fullmatch("-?[0-9]{1,19}", text, re.ASCII) else text)
    except ValidationError:
        raise click.BadParameter(f"{_shown(text)} is no priority: give 1, which runs first, to 4") from None


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        found = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"that is no JSON: {short(error, 100)}") from None
    if not isinstance(found, dict):
        raise click.BadParameter(f'give a JSON object such as \'{{"name": "Ada"}}\', not {short(text, 40)}')
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not in JSON")


def most(text: str) -> int | None:
    """A number that may not be exceeded, or ``none`` for no limit, which becomes None."""
    if text == "none":
        return None
    if not re.fullmatch(r"[0-9]{1,10}", text, re.ASCII):
        raise click.BadParameter(f"{_shown(text)} is no whole number from 1 on: give one, or none for no limit")
    if int(text) == 0:
        raise click.BadParameter("0 would start none: pause the queue for that, or give none for no limit")
    return int(text)


def rate(text: str) -> RateLimit | None:
    """A rate such as ``50/s``, ``100/min:burst=20``, ``10/30s``; or ``none`` for no limit, which becomes None."""
    if text == "none":
        return None
    found = re.fullmatch(rf"({_NUMBER})/({_NUMBER})?([a-z]+)(?::burst=([0-9]{{1,9}}))?", text, re.ASCII)
    if found is None or found[3] not in _UNITS:
        raise click.BadParameter(
            f"{_shown(text)} is no rate: give one such as 50/s, 100/min:burst=20 or 10/30s, or none"
        )
    per = float(found[2] or 1) * _UNITS[found[3]]
    try:
        return RateLimit(float(found[1]), per=per, burst=None if found[4] is None else int(found[4]))
    except ValidationError as error:
        raise click.BadParameter(str(error)) from None


def _shown(text: str) -> str:
    return short(repr(text), 40)


def rate_text(limit: RateLimit) -> str:
    """*limit* as :func:`rate` reads it."""
    unit, size = next(((unit, size) for unit, size in _SHOWN if limit.per % size == 0), ("s", 1.0))
    many = "" if limit.per == size else f"{limit.per / size:.15g}"
    burst = "" if limit.burst == math.ceil(limit.count) else f":burst={limit.burst}"
    return f"{limit.count:.15g}/{many}{unit}{burst}"
