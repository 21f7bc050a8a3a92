"""Who this process is in the database: one runtime, registered anew when it was taken for dead."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Mapping

import orjson

from awa._core import Handler
from awa.config import Settings
from awa.storage import runtimes
from awa.storage.connection import repeated
from awa.storage.schema import Schema
from awa.storage.trust import connect_trusted
from awa.worker.report import SNAPSHOT_INTERVAL


class Identity:
    """The number of this runtime."""

    def __init__(
        self, conninfo: str, schema: Schema, settings: Settings, version: str, handlers: Mapping[str, Handler]
    ) -> None:
        self._conninfo = conninfo
        self._schema = schema
        self._settings = settings
        self._version = version
        limits = {kind: None if one.options is None else one.options.timeout for kind, one in handlers.items()}
        self._kinds = sorted(handlers)
        self._kind_timeouts = {kind: round(limit * 1000) for kind, limit in limits.items() if limit is not None}
        self._lock = threading.Lock()
        self._number = 0  # guarded by _lock; read without it

    def __call__(self) -> int:
        """The number; 0 before the first registration."""
        return self._number

    def register(self) -> None:
        """Write a new row for this process and go by its number from now on; one that was quiet stays quiet.

        Raises:
            StorageNotTrusted: The schema's rows belong to another cluster.
        """
        queues = [
            {
                "name": spec.name,
                "max_workers": spec.max_workers,
                "min_workers": spec.min_workers,
                "weight": spec.weight,
            }
            for spec in self._settings.queues
        ]
        with self._lock, connect_trusted(self._conninfo, self._schema, name="registration") as connection:
            self._number = repeated(
                lambda: runtimes.register(
                    connection,
                    self._schema,
                    uuid=uuid.uuid4(),
                    hostname=socket.gethostname(),
                    pid=os.getpid(),
                    version=self._version,
                    queues=orjson.dumps(queues).decode(),
                    heartbeat=self._settings.heartbeat,
                    stale_after=self._settings.stale_after,
                    timeout=self._settings.timeout,
                    kind_timeouts=orjson.dumps(self._kind_timeouts).decode(),
                    snapshot_interval=SNAPSHOT_INTERVAL,
                    threads=self._settings.threads,
                    kinds=orjson.dumps(self._kinds).decode(),
                    before=self._number,
                )
            )
