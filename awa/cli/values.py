"""What is typed on a command line and is more than text: durations, instants, rates, JSON."""

from __future__ import annotations

import json
import math
import re
from datetime import datetime
from typing import Any

import click

from awa.cli.output import short
from awa.limits import RateLimit

_UNITS = {
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("d", "day", "days"), 86_400.0),
}
_NUMBER = r"[0-9]+(?:\.[0-9]+)?"


class Duration(click.ParamType):
    """Seconds, or a number with a unit: ``90``, ``90s``, ``15min``, ``2h``, ``1d``."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """As click calls it."""
        if not isinstance(value, str):
            return float(value)
        found = re.fullmatch(rf"({_NUMBER})\s*([a-z]*)", value.strip())
        if found is None or (found[2] and found[2] not in _UNITS):
            self.fail(f"{short(repr(value), 40)} is no time: give seconds, or a number with s, min, h or d", param, ctx)
        return float(found[1]) * _UNITS.get(found[2], 1.0)


class Instant(click.ParamType):
    """A time as ISO 8601 writes it, with its zone: ``2026-12-24T18:00:00+01:00``, or with ``Z``."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """As click calls it."""
        if isinstance(value, datetime):
            return value
        try:
            at = datetime.fromisoformat(value.strip())
        except ValueError:
            self.fail(f"{short(repr(value), 40)} is no time: give one like 2026-12-24T18:00:00+01:00", param, ctx)
        if at.utcoffset() is None:
            self.fail(f"{short(value, 40)} says no time zone: add +01:00, or Z for UTC", param, ctx)
        return at


class JsonObject(click.ParamType):
    """A JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """As click calls it."""
        if isinstance(value, dict):
            return value
        try:
            found = json.loads(value, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            self.fail(f"that is no JSON: {short(error, 100)}", param, ctx)
        if not isinstance(found, dict):
            self.fail(f'give a JSON object such as \'{{"name": "Ada"}}\', not {short(value, 40)}', param, ctx)
        return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not in JSON")


class Most(click.ParamType):
    """A number that may not be exceeded, or ``none`` for no limit, which becomes None."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """As click calls it."""
        if value == "none":
            return None
        if not re.fullmatch(r"[0-9]{1,9}", str(value), re.ASCII):
            self.fail(f"{short(repr(value), 40)} is no number: give one from 1 on, or none", param, ctx)
        return int(value)


class Rate(click.ParamType):
    """A rate such as ``50/s``, ``100/min:burst=20``, ``10/30s``; or ``none`` for no limit, which becomes None."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> RateLimit | None:
        """As click calls it."""
        if value == "none":
            return None
        found = re.fullmatch(rf"({_NUMBER})/({_NUMBER})?([a-z]+)(?::burst=([0-9]{{1,9}}))?", str(value), re.ASCII)
        if found is None or found[3] not in _UNITS:
            self.fail(
                f"{short(repr(value), 40)} is no rate: give one such as 50/s, 100/min:burst=20 or 10/30s, or none",
                param,
                ctx,
            )
        per = float(found[2] or 1) * _UNITS[found[3]]
        return RateLimit(float(found[1]), per=per, burst=None if found[4] is None else int(found[4]))


def rate_text(rate: RateLimit) -> str:
    """*rate* as :class:`Rate` reads it."""
    unit, size = next(((unit, size) for unit, size in _SHOWN if rate.per % size == 0), ("s", 1.0))
    many = "" if rate.per == size else f"{rate.per / size:.15g}"
    burst = "" if rate.burst == math.ceil(rate.count) else f":burst={rate.burst}"
    return f"{rate.count:.15g}/{many}{unit}{burst}"


_SHOWN = (("d", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
