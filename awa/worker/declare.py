"""Storing what code declares about queues, once for each start of a worker; and the catalogue, again and again.

It is done before the first claim. A queue whose claims are in the way for a second is left to a thread, so that the
start does not wait for it, and the thread tries until it has succeeded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from awa.errors import QueueBusy
from awa.limits import Limits
from awa.storage.connection import connect
from awa.storage.queue_control import declare_queue
from awa.storage.schema import Schema
from awa.worker import catalogue as catalogues
from awa.worker.catalogue import Catalogue
from awa.worker.service import Service

log = logging.getLogger("awa.worker")

AGAIN = 1.0
"""Seconds until the next try."""


class Declare(Service):
    """Stores the declarations of a client's queues, whichever of them this worker serves.

    Args:
        declared: By queue.
        catalogue: What is written of queues and kinds.
        identity: Gives the number of this runtime.
    """

    def __init__(
        self,
        conninfo: str,
        schema: Schema,
        declared: Mapping[str, Limits],
        catalogue: Catalogue,
        identity: Callable[[], int],
    ) -> None:
        super().__init__("declare")
        self._conninfo = conninfo
        self._schema = schema
        self._left = dict(declared)
        self._catalogue = catalogue
        self._identity = identity
        self._told = 0  # the runtime of which it is written down what it declares

    def step(self) -> float:
        """Store what is left, and what has to be seen in the catalogue."""
        with connect(self._conninfo, name="declare") as connection:
            for queue, limits in list(self._left.items()):
                try:
                    is_news = declare_queue(connection, self._schema, queue, limits)
                except QueueBusy as error:
                    log.warning("what is declared of queue %s is not stored yet: %s", queue, error)
                    continue
                del self._left[queue]
                if is_news:
                    log.info("queue %s is declared with %s", queue, limits)
            runtime = self._identity()
            self._catalogue.tell(connection, runtime, runtime != self._told)
            self._told = runtime
        return AGAIN if self._left else catalogues.INTERVAL
