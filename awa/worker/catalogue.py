"""What one worker declares of the queues that it serves and the kinds that it handles, and that it goes on doing so."""

from __future__ import annotations

from collections.abc import Collection

from psycopg import Connection

from awa.errors import ConfigError
from awa.registry import Registry
from awa.storage import descriptors
from awa.storage.schema import Schema
from awa.wording import listed
from awa.worker import report


class Catalogue:
    """Writes it, round by round.

    Args:
        served: The queues of this worker.
        elsewhere: Queues that its tasks name. What is declared of those that it does not serve is left to others.

    Raises:
        ConfigError: A queue is declared, or a kind described, with which this worker has nothing to do.
    """

    def __init__(
        self, registry: Registry, schema: Schema, *, served: Collection[str], elsewhere: Collection[str]
    ) -> None:
        self._schema = schema
        self._kinds = registry.kind_descriptors
        declared = registry.queue_descriptors
        if unhandled := sorted(self._kinds.keys() - set(registry.kinds)):
            raise ConfigError(
                f"kind {unhandled[0]!a} is described, but no task handles it; there are tasks for"
                f" {listed(map(ascii, registry.kinds))}: have its task in the module that is loaded, describe one of"
                f" these, or take client.job_kind({unhandled[0]!a}) out"
            )
        if unserved := sorted(declared.keys() - {*served, *elsewhere}):
            raise ConfigError(
                f"queue {unserved[0]!a} is declared, but this worker serves {listed(map(ascii, served))}, and no task"
                f" names it: serve it (--queue, queues=[...]), let a task say queue={unserved[0]!a}, or take"
                f" client.queue({unserved[0]!a}) out"
            )
        self._queues = {name: declared[name] for name in declared.keys() & set(served)}
        self._has_started = False

    def tell(self, connection: Connection, runtime: int, is_new: bool) -> None:
        """See to it that what is declared stands in the catalogue.

        Args:
            is_new: *runtime* is a number that has not told yet what it declares.
        """
        descriptors.sync(
            connection,
            self._schema,
            queues=self._queues,
            kinds=self._kinds,
            interval=report.SNAPSHOT_INTERVAL,
            is_start=not self._has_started,
        )
        self._has_started = True
        if is_new:
            told = [{name: one.hash for name, one in each.items()} for each in (self._queues, self._kinds)]
            descriptors.tell(connection, self._schema, runtime, queues=told[0], kinds=told[1])
