"""Prepared transactions: producers that are open without a session, and many of them."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from awa.embedded import Binaries, Server
from awa.storage.migrate import migrate
from tests.fixtures.db import short_directory
from tests.storage.engine import AWA, Conn, claim, claim_in_steps, complete, insert, register, scalar, settle, state

pytestmark = pytest.mark.slow  # a server of its own, since prepared transactions are off by default


@pytest.fixture(scope="module")
def two_phase_server(binaries: Binaries) -> Iterator[Server]:
    with short_directory() as directory:
        server = Server(binaries, directory / "pg", settings={"fsync": "off", "max_prepared_transactions": 200})
        try:
            server.start()
            yield server
        finally:
            server.stop("immediate")


@pytest.fixture
def conn(two_phase_server: Server) -> Iterator[Conn]:
    url = two_phase_server.url("postgres")
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("DROP SCHEMA IF EXISTS awa CASCADE")
        migrate(conn, AWA)
        yield conn
        for (gid,) in conn.execute("SELECT gid FROM pg_prepared_xacts").fetchall():
            conn.execute(f"ROLLBACK PREPARED '{gid}'")


def prepare(conn: Conn, gid: str, *numbers: int) -> None:
    conn.execute("BEGIN")
    insert(conn, *numbers)
    conn.execute(f"PREPARE TRANSACTION '{gid}'")


def test_jobs_of_a_prepared_transaction_come_after_its_commit(conn: Conn) -> None:
    """Guard: the page's snapshots list prepared transactions as running; without the list they are lost: tried."""
    runtime = register(conn)
    prepare(conn, "kept", 1, 2)
    prepare(conn, "dropped", 3)
    insert(conn, 4)
    assert claim(conn, runtime).numbers == [4]
    insert(conn, 5)
    assert claim(conn, runtime).numbers == [5]
    conn.execute("COMMIT PREPARED 'kept'")
    conn.execute("ROLLBACK PREPARED 'dropped'")
    insert(conn, 6)
    assert claim(conn, runtime).numbers == [1, 2, 6]
    assert claim(conn, runtime).numbers == []


def test_an_attempt_completes_in_a_prepared_transaction(conn: Conn) -> None:
    """A completion holds no session's lock, so it can be prepared."""
    runtime = register(conn)
    [job] = insert(conn, 1)
    [member] = claim(conn, runtime).members
    conn.execute("BEGIN")
    complete(conn, member)
    conn.execute("PREPARE TRANSACTION 'completion'")
    assert state(conn, job) == "running"
    conn.execute("COMMIT PREPARED 'completion'")
    assert state(conn, job) == "completed"
    assert settle(conn, runtime, [member]) == [member.place]


def test_the_jobs_of_150_open_writers_all_come_once(conn: Conn) -> None:
    """Guard: late transactions come in a later page, whether or not they cut the one before.

    Without the list of open transactions, or without the ranges of late ones, the 150 jobs are lost: both tried.
    """
    runtime = register(conn)
    for n in range(150):
        prepare(conn, f"g{n}", n)
        insert(conn, 1000 + n)
    assert claim_in_steps(conn, runtime, limit=40) == list(range(1000, 1150))
    # an idle poll now has a cheap page behind it, whose end lists all of them
    assert scalar(conn, "SELECT count(*) FROM pg_prepared_xacts") == 150
    assert claim(conn, runtime).numbers == []
    # they commit in an order of their own, while others go on and claims come in between
    order = [n * 7 % 150 for n in range(150)]
    found = []
    for at, n in enumerate(order):
        conn.execute(f"COMMIT PREPARED 'g{n}'")
        if at % 10 == 9:
            insert(conn, 2000 + at)
            found += claim(conn, runtime, limit=7).numbers
    found += claim_in_steps(conn, runtime, limit=7)
    assert sorted(found) == [*range(150), *range(2009, 2150, 10)]
