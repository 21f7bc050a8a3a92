"""Settings: their defaults, where each value came from, and what is refused.

Every setting can be given as an argument, as a command's flag, in an application's own configuration, or as the
environment variable ``AWA_<SETTING>``; the first of these that is given wins, then the default. Durations are seconds.

The database is looked for in the same spirit, see :func:`find_database`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from awa.errors import ConfigError, ValidationError
from awa.options import LONGEST_TIMEOUT, MAX_NAME, check_queue

SCHEMA_BYTES = 63
"""Most bytes of a schema's name: what PostgreSQL keeps of an identifier."""

MOST_WEIGHT = 1000
"""Largest weight of a queue in a worker."""

LONGEST_RETENTION = 3650 * 86_400.0
"""Most seconds that ended jobs are kept: ten years."""


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """A queue that a worker serves."""

    name: str
    """The queue's name."""
    max_workers: int | None = None
    """Most threads of one process that may run its jobs at once; ``None`` for all of them."""
    min_workers: int = 0
    """Threads of each process that are kept for its jobs: no other queue's ever run there."""
    weight: int = 1
    """Its share of the threads that no queue keeps, beside those of the other queues that have work."""

    def __str__(self) -> str:
        if not self.min_workers and self.weight == 1:
            return self.name if self.max_workers is None else f"{self.name}:{self.max_workers}"
        options = {"min": self.min_workers or None, "weight": self.weight, "max": self.max_workers}
        return f"{self.name}:" + ",".join(f"{name}={number}" for name, number in options.items() if number is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one program runs with. Make one with :func:`load_settings`, which validates."""

    threads: int = 10
    """Handlers that run at once in a process."""
    processes: int = 1
    """Worker processes that ``python -m awa.worker`` runs side by side."""
    queues: tuple[QueueSpec, ...] = (QueueSpec("default"),)
    """The queues that a worker serves."""
    poll_interval: float = 1.0
    """Longest wait for work in seconds when no wake-up comes."""
    priority_aging: float = 60.0
    """Seconds of waiting that count like one level of priority; 0: priority alone decides."""
    heartbeat: float = 5.0
    """Seconds between a worker's signs of life."""
    stale_after: float = 30.0
    """Seconds of silence after which a worker's attempts are rescued; at least three heartbeats."""
    timeout: float = 300.0
    """Seconds an attempt may take when neither its kind nor its job says; 0 for no limit."""
    shutdown_timeout: float = 30.0
    """Seconds that running handlers get when a worker is told to stop."""
    completed_retention: float = 86_400.0
    """Seconds that completed jobs stay readable."""
    failed_retention: float = 3 * 86_400.0
    """Seconds that failed and cancelled jobs stay readable."""
    dead_retention: float = 30 * 86_400.0
    """Seconds that dead letters stay readable."""
    descriptor_retention: float = 30 * 86_400.0
    """Seconds that the description of a queue or a kind stays once no worker declares it; 0 for ever."""
    rotate_after: float = 0.0
    """Seconds after which a new segment is begun; 0 for a sixth of ``completed_retention``, at least a minute."""
    notify: bool = True
    """Whether inserts wake an idle worker; off for users of two-phase commit."""
    pooler: str = "auto"
    """Whether the database's address is a transaction pooler's: ``on``, ``off``, or ``auto`` to look."""
    listen_url: str = field(default="", repr=False)
    """The database's address past the pooler, where workers claim and are woken; empty: they use the other one."""
    max_args_bytes: int = 256 * 1024
    """Most bytes of a job's args, and of its metadata."""
    schema: str = "awa"
    """The schema that holds awa's tables."""
    health_addr: str = ""
    """Where a worker answers ``/healthz`` and ``/readyz``: ``HOST:PORT``, ``:PORT``; empty for nowhere."""
    log_format: str = "text"
    """``text`` or ``json``."""
    log_level: str = "info"
    """``debug``, ``info``, ``warning`` or ``error``."""
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    """Where each value came from: ``argument``, a flag such as ``--threads``, ``app.config['AWA_THREADS']``, a variable
    such as ``AWA_THREADS``, or ``default``."""


class _Refused(Exception):
    """A parser's verdict; its text says what would be accepted."""


def _whole_number(least: int, most: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value.strip()):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise _Refused(f"a whole number from {least} to {most}")
        return value

    return parse


def _seconds(least: float, most: float) -> Callable[[object], float]:
    def parse(value: object) -> float:
        try:
            if isinstance(value, timedelta):
                number = value.total_seconds()
            elif isinstance(value, int | float | str) and not isinstance(value, bool):
                number = float(value)
            else:
                number = math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not least <= number <= most:  # false for NaN
            raise _Refused(f"seconds as a number from {least:g} to {most:.10g}")
        return number

    return parse


def _switch(value: object) -> bool:
    if isinstance(value, bool):
        return value
    match value.strip().lower() if isinstance(value, str) else value:
        case "on" | "true" | "yes" | "1":
            return True
        case "off" | "false" | "no" | "0":
            return False
    raise _Refused("on or off")


def _one_of(*choices: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        text = value.strip().lower() if isinstance(value, str) else ""
        if text not in choices:
            raise _Refused("one of " + ", ".join(choices))
        return text

    return parse


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Refused("a connection string or a URL")
    return value.strip()


def _schema(value: object) -> str:
    accepted = f"a name of 1 to {SCHEMA_BYTES} bytes from letters, digits, _, - and spaces that does not begin with pg_"
    if not isinstance(value, str) or value.startswith("pg_") or not value.strip(" "):
        raise _Refused(accepted)
    if not all(char.isalpha() or char in "0123456789_- " for char in value):
        raise _Refused(accepted)
    if len(value.encode()) > SCHEMA_BYTES:
        raise _Refused(accepted)
    return value


def _address(value: object) -> str:
    text = value.strip() if isinstance(value, str) else None
    if text == "":
        return ""
    found = re.fullmatch(r"(?:\[[0-9A-Fa-f:.]+\]|[\w.-]*):([0-9]{1,5})", text or "")
    if found is None or int(found[1]) > 65_535:
        raise _Refused("HOST:PORT or :PORT, with an IPv6 address in brackets; or nothing")
    return found[0]


def split_address(address: str) -> tuple[str, int]:
    """Host, empty for every interface, and port of a ``health_addr``."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


_QUEUES = "queues as NAME, NAME:MAX, or NAME:min=N,weight=N,max=N with one or more of the three"


def _queue_spec(value: object) -> QueueSpec:
    if isinstance(value, QueueSpec):
        spec = value
    elif isinstance(value, str):
        spec = _read_queue_spec(value)
    else:
        raise _Refused(_QUEUES)
    try:
        name = check_queue(spec.name)
    except ValidationError:
        raise _Refused(f"queue names of 1 to {MAX_NAME} characters without NUL and lone surrogates") from None
    most, least, weight = spec.max_workers, spec.min_workers, spec.weight
    if most is not None and (type(most) is not int or most < 1):
        raise _Refused("as max a whole number of threads from 1 on, as in NAME:1")
    if type(least) is not int or least < 0 or (most is not None and least > most):
        raise _Refused("as min a whole number of threads, no more than max, as in NAME:min=1,max=2")
    if type(weight) is not int or not 1 <= weight <= MOST_WEIGHT:
        raise _Refused(f"as weight a whole number from 1 to {MOST_WEIGHT}, as in NAME:weight=3")
    return QueueSpec(name, most, least, weight)


def _read_queue_spec(text: str) -> QueueSpec:
    if found := re.fullmatch(r"(.*):([0-9]{1,9})", text, re.DOTALL):
        return QueueSpec(found[1], int(found[2]))
    tail = _options_of(text)
    if tail is None:
        return QueueSpec(text)
    options: dict[str, int] = {}
    for part in tail.split(","):
        one = re.fullmatch(r"[ \t]*(min|weight|max)[ \t]*=[ \t]*([0-9]{1,9})[ \t]*", part)
        if one is None or one[1] in options:
            raise _Refused(f"{_QUEUES}, each once and as a whole number")
        options[one[1]] = int(one[2])
    name = text[: -len(tail) - 1]
    return QueueSpec(name, options.get("max"), options.get("min", 0), options.get("weight", 1))


def _options_of(text: str) -> str | None:
    """What stands behind the last colon, if it begins like an option."""
    _, colon, tail = text.rpartition(":")
    return tail if colon and re.match(r"[ \t]*\w+[ \t]*=", tail) else None


def _split_queues(text: str) -> list[str]:
    """The queues of a text with commas: what looks like an option belongs to the queue before it, if that has some."""
    found: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        looks_like_one = re.fullmatch(r"(\w+)[ \t]*=[^:]*", part)
        if looks_like_one and found and _options_of(found[-1]) is not None:
            found[-1] += f",{part}"
        elif looks_like_one and looks_like_one[1] in ("min", "weight", "max"):
            raise _Refused(f"{_QUEUES}: a colon stands between a name and its options")
        elif part:
            found.append(part)
    return found


def _queue_specs(value: object) -> tuple[QueueSpec, ...]:
    if isinstance(value, str):
        value = _split_queues(value)
    if isinstance(value, QueueSpec) or not isinstance(value, Iterable):
        raise _Refused(f"a list of {_QUEUES}")
    specs = tuple(_queue_spec(item) for item in value)
    if not specs:
        raise _Refused("at least one queue")
    if len({spec.name for spec in specs}) < len(specs):
        raise _Refused("each queue once")
    return specs


def _check_pool(threads: int, queues: tuple[QueueSpec, ...], sources: Mapping[str, str]) -> None:
    kept = sum(spec.min_workers for spec in queues)
    shown = ", ".join(str(spec) for spec in queues)
    said = f"threads is {threads} (from {sources['threads']}) and queues is {shown} (from {sources['queues']})"
    if kept > threads:
        raise ConfigError(f"{said}: their min is {kept} together: give as many threads, or a smaller min")
    left_out = [spec.name for spec in queues if not spec.min_workers]
    if left_out and kept == threads:
        raise ConfigError(
            f"{said}: every thread is kept for a queue with min, and none is left for {', '.join(left_out)}:"
            " give more threads, or a smaller min"
        )


def _aging(value: object) -> float:
    seconds = _seconds(0, 86_400)(value)
    if 0 < seconds < 1:
        raise _Refused("seconds as a number from 1 to 86400, or 0 for no aging")
    return seconds


_PARSERS: Mapping[str, Callable[[object], Any]] = {
    "threads": _whole_number(1, 1000),
    "processes": _whole_number(1, 1000),
    "queues": _queue_specs,
    "poll_interval": _seconds(0.01, 3600),
    "priority_aging": _aging,
    "heartbeat": _seconds(0.05, 3600),
    "stale_after": _seconds(0.15, 86400),
    "timeout": _seconds(0, LONGEST_TIMEOUT),
    "shutdown_timeout": _seconds(0, 86400),
    "completed_retention": _seconds(0, LONGEST_RETENTION),
    "failed_retention": _seconds(0, LONGEST_RETENTION),
    "dead_retention": _seconds(0, LONGEST_RETENTION),
    "descriptor_retention": _seconds(0, LONGEST_RETENTION),
    "rotate_after": _seconds(0, LONGEST_RETENTION),
    "notify": _switch,
    "pooler": _one_of("auto", "on", "off"),
    "listen_url": _text,
    "max_args_bytes": _whole_number(1, 64 * 1024 * 1024),
    "schema": _schema,
    "health_addr": _address,
    "log_format": _one_of("text", "json"),
    "log_level": _one_of("debug", "info", "warning", "error"),
}


def _parse(name: str, value: object, source: str) -> Any:
    if name == "listen_url" and isinstance(value, str) and value.strip():
        return _check_conninfo(value.strip(), source)  # which repeats no password
    try:
        return _PARSERS[name](value)
    except _Refused as refused:
        raise ConfigError(f"{name} is {mask(repr(value))} (from {source}): give {refused}") from None


def _flag(name: str) -> str:
    return "--queue" if name == "queues" else "--" + name.replace("_", "-")


def load_settings(
    arguments: Mapping[str, object] | None = None,
    *,
    flags: Mapping[str, object] | None = None,
    config: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Settle every setting: argument, flag, the application's configuration, environment, default.

    Args:
        arguments: What code says, by the names of :class:`Settings`; ``None`` as a value means not given. Queues are
            a list of ``NAME``, ``NAME:MAX`` (the last colon before digits counts) or ``NAME:min=N,weight=N,max=N`` with
            any of the three (the last colon before them), or one text of them with commas; durations are seconds or
            ``timedelta``.
        flags: What the command line says, likewise.
        config: What the application's own configuration says, likewise.
        environ: The environment, ``os.environ`` when not given. ``AWA_<SETTING>`` set to nothing counts as not set.

    Returns:
        The settings, with the origin of each in ``sources``.

    Raises:
        ConfigError: A name is unknown, or a value is refused; the message names setting, value, source and what is
            accepted.
    """
    environ = os.environ if environ is None else environ
    given: list[tuple[str, object, str]] = []  # weakest first
    given += [(name, environ[key], key) for name in _PARSERS if environ.get(key := f"AWA_{name.upper()}", "").strip()]
    given += [(name, value, config_key(name)) for name, value in (config or {}).items()]
    given += [(name, value, _flag(name)) for name, value in (flags or {}).items()]
    given += [(name, value, "argument") for name, value in (arguments or {}).items()]

    values: dict[str, Any] = {}
    sources = dict.fromkeys(_PARSERS, "default")
    for name, value, source in given:
        if name not in _PARSERS:
            raise ConfigError(
                f"there is no setting {mask(repr(name))} (from {source}): the settings are {', '.join(_PARSERS)}"
            )
        if value is not None:
            values[name] = _parse(name, value, source)
            sources[name] = source

    settings = Settings(**values, sources=MappingProxyType(sources))
    if settings.stale_after < 3 * settings.heartbeat * (1 - 1e-9):  # 0.6 is less than 3 * 0.2 in binary
        raise ConfigError(
            f"stale_after is {settings.stale_after:g} s (from {sources['stale_after']}) and heartbeat is"
            f" {settings.heartbeat:g} s (from {sources['heartbeat']}): give a stale_after of at least three heartbeats,"
            f" {3 * settings.heartbeat:g} s, so that one late heartbeat does not end a healthy worker"
        )
    _check_pool(settings.threads, settings.queues, sources)
    return settings


def config_key(name: str) -> str:
    """Where an application's configuration says the setting *name*, as errors show it."""
    return f"app.config['AWA_{name.upper()}']"


def check_schema(name: str, *, source: str = "argument") -> str:
    """Give back *name* when it can be the schema of an installation.

    Raises:
        ConfigError: It is empty, over 63 bytes, reserved, or has a character that is no letter, digit, ``_``, ``-``
            or space.
    """
    return str(_parse("schema", name, source))


def is_on(value: object, source: str) -> bool:
    """Whether *value* says on, from *source*: a bool, or text such as ``on`` or ``0``.

    Raises:
        ConfigError: It says neither on nor off.
    """
    try:
        return _switch(value)
    except _Refused as refused:
        raise ConfigError(f"{source} is {mask(repr(value))}: give {refused}") from None


# --- the database


@dataclass(frozen=True, slots=True)
class Found:
    """A database to connect to."""

    conninfo: str
    """A libpq connection string; empty when libpq's own ``PG*`` variables say everything."""
    source: str
    """Where it was found: ``argument``, a variable's name, or ``embedded``."""

    def __repr__(self) -> str:
        return f"Found({redact(self.conninfo)!r}, source={self.source!r})"


_PG_VARIABLES = ("PGSERVICE", "PGHOST", "PGHOSTADDR", "PGPORT", "PGUSER", "PGDATABASE")


def find_database(
    argument: str | None = None, environ: Mapping[str, str] | None = None, *, source: str = "argument"
) -> Found | None:
    """Look for the database: *argument*, ``AWA_DATABASE_URL``, ``DATABASE_URL``, then libpq's ``PG*`` variables.

    A URL that names a driver for another library, ``postgresql+psycopg2://``, is read without it.

    Args:
        source: What errors call the *argument*.

    Returns:
        What was found first, or ``None``: then the embedded server is next, if :func:`embedded_allowed`.

    Raises:
        ConfigError: The one found is no PostgreSQL connection string.
    """
    environ = os.environ if environ is None else environ
    candidates = [(source, argument), *((key, environ.get(key)) for key in ("AWA_DATABASE_URL", "DATABASE_URL"))]
    for name, conninfo in candidates:
        if conninfo is not None and conninfo.strip():
            return Found(_check_conninfo(conninfo.strip(), name), name)
    variables = [key for key in _PG_VARIABLES if environ.get(key)]
    return Found("", ", ".join(variables)) if variables else None


def _check_conninfo(conninfo: str, source: str) -> str:
    conninfo = re.sub(r"\Apostgres(?:ql)?\+\w+://", "postgresql://", conninfo)
    fields = _conninfo_fields(conninfo)
    # A URL is cut at its first @ or /, so that the rest of a password with one of them would pass for a host, a port or
    # a database, which errors show.
    nested = str((fields or {}).get("dbname", ""))
    if "://" in nested or "=" in nested:  # libpq would look into it in some places, and errors show it
        raise ConfigError(f"the database from {source} has a connection string as its dbname: give that string itself")
    url = re.match("postgres(?:ql)?://([^/?]*)([^?]*)", conninfo)
    ports = str((fields or {}).get("port", "")).split(",")
    if (url and (url[1].count("@") > 1 or "@" in url[2])) or not all(not port or port.isdecimal() for port in ports):
        raise ConfigError(
            f"the database from {source} has an @ where none can be, or a port that is no number:"
            " write %40 for an @ and %2F for a / in a user, a password or a name"
        )
    if fields is None:
        scheme = re.match(r"\w+(?=[+\w]*:)", conninfo)
        what = f" (it begins with {scheme[0]}:)" if scheme and not scheme[0].startswith("postgres") else ""
        is_for_others = source == "DATABASE_URL" or "SQLALCHEMY" in source
        advice = ", or set AWA_DATABASE_URL, which comes first" if is_for_others else ""
        raise ConfigError(
            f"the database from {source} is no PostgreSQL connection string{what}:"
            f" give one like postgresql://user@host/name{advice}"
        )
    return conninfo


def _conninfo_fields(conninfo: str) -> dict[str, Any] | None:
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    if "\0" in conninfo:  # libpq would read no further
        return None
    try:
        return dict(conninfo_to_dict(conninfo))
    except (ProgrammingError, UnicodeError):
        return None


def redact(conninfo: str) -> str:
    """Return *conninfo* as ``key=value`` text that is safe to print: passwords become ``***``."""
    from psycopg.conninfo import make_conninfo

    parts = _conninfo_fields(conninfo)
    if parts is None:
        return "(a connection string that cannot be read)"
    return make_conninfo("", **{key: "***" if "password" in key else value for key, value in parts.items()})


def has_password(conninfo: str) -> bool:
    """Whether *conninfo* says a password."""
    return any("password" in key for key in _conninfo_fields(conninfo) or ())


def mask(text: str) -> str:
    """*text* without what may be the password of a database's address that was given where none belongs."""
    return re.sub(r"(://|password\s*=).*", r"\1***", text, flags=re.DOTALL | re.IGNORECASE)


def embedded_allowed(environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether a private server may be started when no database was named.

    ``AWA_EMBEDDED`` decides when it is set. Without it the answer is yes, but no under CI or Kubernetes, where a
    forgotten setting should be an error and not an empty database.

    Raises:
        ConfigError: ``AWA_EMBEDDED`` is neither on nor off.
    """
    environ = os.environ if environ is None else environ
    decided = environ.get("AWA_EMBEDDED", "").strip()
    if decided:
        return is_on(decided, "AWA_EMBEDDED")
    is_ci = environ.get("CI", "").strip().lower() not in ("", "0", "false", "no", "off")
    return not is_ci and not environ.get("KUBERNETES_SERVICE_HOST")
