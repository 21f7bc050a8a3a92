"""Traps of a server that crashes: a claim commits asynchronously, so a crash may forget it, and nothing else.

Each docstring names the guard and what was seen without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from awa.embedded import Binaries, Server
from awa.storage import recovery, runtimes
from awa.storage.migrate import migrate
from tests.fixtures.db import short_directory
from tests.storage.engine import (
    AWA,
    Conn,
    Member,
    Outcome,
    claim,
    complete,
    fall_silent,
    fence,
    insert,
    register,
    rescue,
    scalar,
    settle,
    state,
    transaction,
)

pytestmark = pytest.mark.slow  # a server of its own, which crashes

every_isolation = pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])


@pytest.fixture(scope="module")
def crashing(binaries: Binaries) -> Iterator[Server]:
    """A server whose asynchronous commits stay in memory for long; syncing is on, as everywhere but in tests."""
    settings = {"wal_writer_delay": "10s", "autovacuum": "off"}
    with short_directory() as directory:
        server = Server(binaries, directory / "pg", settings=settings)
        try:
            server.start()
            yield server
        finally:
            server.stop("immediate")


@contextmanager
def connected(server: Server) -> Iterator[Conn]:
    with psycopg.connect(server.url(), autocommit=True) as conn:
        yield conn


def new_schema(conn: Conn) -> None:
    conn.execute("DROP SCHEMA IF EXISTS awa CASCADE")
    migrate(conn, AWA)


def crash(server: Server) -> None:
    server.stop("immediate")
    server.start()


@pytest.fixture
def forgotten(crashing: Server) -> Member:
    """An attempt whose claim a crash has forgotten, with the number that it drew."""
    for _ in range(5):
        with connected(crashing) as conn:
            new_schema(conn)  # with an unused sequence: later it is logged 32 numbers ahead, which stay unused
            runtime = register(conn)
            insert(conn, 1)
            [member] = claim(conn, runtime).members
        crash(crashing)
        with connected(crashing) as conn:
            if scalar(conn, "SELECT count(*) FROM awa.claims") == 0:
                return member
    raise AssertionError("five claims in a row have survived a crash")


def test_a_claim_that_a_crash_forgets_is_made_again_and_its_worker_is_refused(
    crashing: Server, forgotten: Member
) -> None:
    """Guard: the nonce, compared by settle; the number of a claim that was forgotten is handed out again.

    Without it the old attempt's outcome is recorded for the new one, which still runs: tried.
    """
    with connected(crashing) as conn:
        assert state(conn, forgotten.id) == "available"
        [again] = claim(conn, forgotten.runtime).members
        assert (again.runtime, again.claim_id, again.idx, again.entry_id) == (
            forgotten.runtime,
            forgotten.claim_id,
            forgotten.idx,
            forgotten.entry_id,
        )
        assert settle(conn, forgotten.runtime, [forgotten]) == [forgotten.place]
        for outcome in ("failed", "retried", "released", "completed"):
            assert settle(conn, forgotten.runtime, others=[Outcome(forgotten, outcome)]) == [forgotten.place]
        assert state(conn, again.id) == "running"
        assert settle(conn, again.runtime, [again]) == []
        assert state(conn, again.id) == "completed"
        assert settle(conn, forgotten.runtime, [forgotten]) == [forgotten.place]
        assert scalar(conn, "SELECT count(*) FROM awa.completions") == 1
        assert scalar(conn, "SELECT count(*) FROM awa.attempt_ends") == 0


def test_another_worker_that_draws_the_number_is_not_mixed_up_with_the_first(
    crashing: Server, forgotten: Member
) -> None:
    """Guard: the runtime, compared beside the nonce."""
    with connected(crashing) as conn:
        [again] = claim(conn, register(conn)).members
        assert (again.claim_id, again.entry_id) == (forgotten.claim_id, forgotten.entry_id)
        assert settle(conn, forgotten.runtime, [forgotten]) == [forgotten.place]
        assert settle(conn, again.runtime, [forgotten]) == [forgotten.place]
        assert settle(conn, again.runtime, [again]) == []


@pytest.mark.parametrize("ends", ["released", "rescued"])
def test_numbers_that_a_crash_forgot_are_not_drawn_again_by_whoever_knows_them(
    crashing: Server, forgotten: Member, ends: str
) -> None:
    """Guard: after a lost connection a worker passes over the numbers it has received, before it claims again.

    Without it the next claim has a number that counts as known, so what it took is neither released by its own worker,
    when that claim is answered to nobody, nor rescued, when the worker dies before it lists it: tried.
    """
    runtime, newest = forgotten.runtime, forgotten.claim_id
    with connected(crashing) as conn:
        assert recovery.release_unknown_claims(conn, AWA, runtime, newest=newest) == 0
        assert runtimes.heartbeat(conn, AWA, runtime, newest_claim=newest, open_claims=[])
        [again] = claim(conn, runtime).members
        if ends == "released":
            assert recovery.release_unknown_claims(conn, AWA, runtime, newest=newest) == 1
        else:
            fall_silent(conn, runtime)
            assert fence(conn, runtime)
            assert rescue(conn, runtime) == (1, 1, 0)
        assert again.claim_id > newest
        assert state(conn, again.id) == "available"


@every_isolation
def test_a_completion_of_a_claim_that_a_crash_forgot_is_refused(
    crashing: Server, forgotten: Member, isolation: str
) -> None:
    """Guard: the nonce, compared by complete_v1 too; the entry is the same, so its unique key lets the first one in.

    Without it the old attempt ends the new one, whose own effects are refused then: tried.
    """
    with connected(crashing) as conn:
        with transaction(conn, isolation), pytest.raises(psycopg.Error) as caught:  # before anybody claims it again
            complete(conn, forgotten)
        assert caught.value.sqlstate == "AWA04"
        [again] = claim(conn, forgotten.runtime).members
        with transaction(conn, isolation), pytest.raises(psycopg.Error) as caught:
            complete(conn, forgotten)
        assert caught.value.sqlstate == "AWA04"
        with transaction(conn, isolation):
            complete(conn, again)
            conn.execute("COMMIT")
        assert state(conn, again.id) == "completed"


@pytest.mark.parametrize("flushes", ["its own settle", "an insert elsewhere"])
def test_what_was_flushed_later_implies_all_that_was_before(crashing: Server, flushes: str) -> None:
    """A record that is on disk has everything before it beside it: an outcome never survives without its claim."""
    with connected(crashing) as conn, connected(crashing) as other:
        new_schema(conn)
        runtime = register(conn)
        first, second = insert(conn, 1, 2)
        claim(conn, runtime, limit=1)
        [member] = claim(conn, runtime, limit=1).members
        if flushes == "its own settle":
            assert settle(conn, runtime, [member]) == []
        else:
            insert(other, 3, queue="elsewhere")
    crash(crashing)
    with connected(crashing) as conn:
        assert scalar(conn, "SELECT count(*) FROM awa.claims") == 2
        assert state(conn, first) == "running"
        assert state(conn, second) == ("completed" if flushes == "its own settle" else "running")
        assert claim(conn, runtime).members == []
        if flushes != "its own settle":
            assert settle(conn, runtime, [member]) == []
