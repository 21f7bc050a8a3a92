"""A worker asks for requests to cancel only while handlers run."""

from __future__ import annotations

from typing import Any, cast

from psycopg import Connection

from awa._core import Crew, Outcomes
from awa.job import Outcome
from awa.storage.schema import Schema
from awa.worker.requests import Requests


def nothing(*_: object) -> None: ...


class NoConnection:
    """Fails whoever uses it."""


def test_nothing_is_asked_while_no_handler_runs() -> None:
    crew = Crew(
        3, Outcomes(), job=nothing, conclude=nothing, late=nothing, lead=nothing, chosen=Outcome, flush_after=1.0
    )
    Requests(crew, Schema()).look(cast("Connection[Any]", NoConnection()), 1)
