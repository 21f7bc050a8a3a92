"""When a Session of SQLAlchemy has committed: what waits for that, and is dropped at a rollback.

transaction ends    committed                                  rolled back, or closed
a savepoint         what waits goes over to the one around it  dropped
the outermost       called                                     dropped
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Ending = Callable[[], object]

_NAME = "awa_waiting"


def session_of(conn: object) -> Any | None:
    """The Session that *conn* is, or stands for now; None when it is something else."""
    orm = sys.modules.get("sqlalchemy.orm")
    if orm is None:
        return None
    if isinstance(conn, orm.scoped_session):
        conn = conn()
    return conn if isinstance(conn, orm.Session) else None


def on_end(session: Any, committed: Ending, rolled_back: Ending) -> None:
    """Call one of the two when the transaction of *session* has ended; it is begun if there is none.

    What *committed* raises leaves ``session.commit()``, which has been done by then.
    """
    waiting: _Waiting | None = session.info.get(_NAME)
    if waiting is None:
        waiting = session.info[_NAME] = _Waiting(session)
    if not session.in_transaction():
        session.begin()  # as any statement would
    waiting.add(session, committed, rolled_back)


class _Waiting:
    """What waits for the transactions of one session."""

    def __init__(self, session: Any) -> None:
        from sqlalchemy import event

        self._of: dict[Any, list[tuple[Ending, Ending]]] = {}
        self._committed: set[Any] = set()
        event.listen(session, "after_commit", self._on_commit)
        event.listen(session, "after_transaction_end", self._on_end)

    def add(self, session: Any, committed: Ending, rolled_back: Ending) -> None:
        self._of.setdefault(_innermost(session), []).append((committed, rolled_back))

    def _on_commit(self, session: Any) -> None:
        self._committed.add(_innermost(session))

    def _on_end(self, session: Any, transaction: Any) -> None:
        waiting = self._of.pop(transaction, [])
        is_committed = transaction in self._committed
        self._committed.discard(transaction)
        if is_committed and transaction.nested:
            self._of.setdefault(transaction.parent, []).extend(waiting)
            return
        raised: list[BaseException] = []
        for committed, rolled_back in waiting:
            try:
                (committed if is_committed else rolled_back)()
            except Exception as error:
                raised.append(error)
        if raised:
            raise raised[0]


def _innermost(session: Any) -> Any:
    return session.get_nested_transaction() or session.get_transaction()
