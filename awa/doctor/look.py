"""What the checks share: a connection that may not be asked for long, and what several of them want to know."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from psycopg import Connection

from awa.storage import examine as sql
from awa.storage.examine import COUNTED, LISTED, Probe
from awa.storage.queues import COUNT_AVAILABLE
from awa.storage.schema import Schema


class Look(Probe):
    """What the checks share."""

    def __init__(
        self,
        conn: Connection[Any],
        schema: Schema,
        *,
        seconds: float,
        total: float,
        long: float,
        listen_url: str,
    ) -> None:
        super().__init__(conn, schema, seconds=seconds, total=total)
        self.long = long
        self.listen_url = listen_url

    def awa(self, command: str) -> str:
        """A command of ``awa`` for this schema."""
        return self.schema.command(command)

    @property
    def worker(self) -> str:
        """What starts a worker for it."""
        return f"python -m awa.worker MODULE{self.schema.option}"

    @cached_property
    def server(self) -> Any:
        return self.row(sql.SERVER)

    @cached_property
    def runtimes(self) -> list[Any]:
        """Those that have not ended."""
        return self.rows(sql.RUNTIMES)

    @property
    def live(self) -> list[Any]:
        return [one for one in self.runtimes if one.is_live]

    @property
    def served(self) -> set[str]:
        """Queues of which a live runtime claims."""
        return {queue for one in self.live if not one.is_quiet for queue in one.queues}

    @cached_property
    def paused(self) -> list[Any]:
        return self.rows(sql.PAUSED)

    def backlog(self, queues: Iterable[str]) -> dict[str, int]:
        """How many available jobs each of *queues* has, up to one more than are counted; without those that have none.

        It ends when a hundred were found. What is set aside for a kind has a check of its own.
        """
        names, found = list(queues), dict[str, int]()
        while names and len(found) < LISTED:
            rows = self.rows(COUNT_AVAILABLE, queues=names[:LISTED], limit=COUNTED + 1)
            found |= {row[0]: row[2] for row in rows if row[2]}
            names = names[LISTED:]
        return found


def count_text(count: int) -> str:
    """How many jobs there are, when no more than :data:`COUNTED` and one were counted."""
    return f"{COUNTED:,} jobs or more" if count > COUNTED else f"{count:,} job{'s' if count > 1 else ''}"


def end_backend(pid: int) -> str:
    """What ends a session."""
    return f"SELECT pg_terminate_backend({pid});"
