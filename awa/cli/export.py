"""Jobs as lines for other programs: JSON, or comma-separated values, written as they are read."""

from __future__ import annotations

import csv
import io
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from awa.cli.output import as_json, echo, safe
from awa.cli.shown import job_facts
from awa.storage.jobs import JobInfo

COLUMNS = tuple(field.name for field in fields(JobInfo))
"""What an exported job has: the fields of ``awa.JobInfo``."""

Write = Callable[[str], None]
"""Takes whole lines."""

# half a character, which JSON can hold, is written as JSON does
_HOW: Any = {"encoding": "utf-8", "errors": "backslashreplace", "newline": ""}


def json_lines(jobs: Sequence[JobInfo]) -> str:
    """One JSON object a line."""
    return "".join(as_json(job_facts(job)) + "\n" for job in jobs)


def csv_lines(jobs: Sequence[JobInfo]) -> str:
    """Comma-separated values; what is no text or number is JSON, and nothing is an empty cell."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerows([_cell(value) for value in job_facts(job).values()] for job in jobs)
    return text.getvalue()


def csv_head() -> str:
    """The line of the columns' names."""
    return ",".join(COLUMNS) + "\n"


def _cell(value: Any) -> Any:
    is_plain = value is None or (isinstance(value, (str, int)) and not isinstance(value, bool))
    return value if is_plain else json.dumps(value, ensure_ascii=False)


@contextmanager
def written(output: Path | None) -> Iterator[Write]:
    """Write to a file, which is there once all of it is; None: to the standard output.

    Until then it is ``FILE.*.part`` beside it, of a name that no other export has, which is removed when something goes
    wrong, short of SIGKILL. A link stays one, a file that is replaced hands on who may read it, and what is no file, as
    a pipe or a device, is written to as it is.

    Raises:
        click.ClickException: The file cannot be written.
    """
    try:
        if output is None:
            yield lambda lines: echo(lines, nl=False)
            with suppress(AttributeError):
                sys.stdout.flush()  # a pipe that broke is told of here, not as Python ends
            return
        place = output.resolve()
        if place.exists() and not place.is_file():
            with place.open("w", **_HOW) as file:
                yield lambda lines: _write(file, lines)
            return
        part = place.with_name(f"{place.name[:50]}.{secrets.token_hex(8)}.part")  # a long name fits, too
        try:
            with part.open("x", **_HOW) as file:
                if place.exists():
                    shutil.copymode(place, part)
                yield lambda lines: _write(file, lines)
                file.flush()
                os.fsync(file.fileno())
            part.replace(place)
        except BaseException:  # Ctrl-C too
            with suppress(OSError):
                part.unlink(missing_ok=True)
            raise
    except BrokenPipeError:
        raise
    except OSError as error:
        name = "the standard output" if output is None else safe(output)
        end = "" if output is None else "; nothing was changed"
        raise click.ClickException(f"{name} cannot be written: {error.strerror or error}{end}") from error


def _write(file: io.TextIOWrapper, lines: str) -> None:
    file.write(lines)
