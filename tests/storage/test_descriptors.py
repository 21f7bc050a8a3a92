"""The catalogue: who writes which rows, who declares what now, and that nothing else needs it.

Each docstring names the guard of the catalogue that the test fails without.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

from awa import KindNotFound, QueueNotFound
from awa.admin import Admin
from awa.descriptors import Descriptor
from awa.storage import descriptors, queues, runtimes
from awa.storage.descriptors import Drift
from awa.storage.snapshot import one_snapshot
from awa.worker.maintenance import descriptors as maintenance
from tests.storage.engine import (
    AWA,
    Background,
    Conn,
    Outcome,
    claim,
    expire,
    fall_silent,
    fence,
    insert,
    promote,
    register,
    rescue,
    scalar,
    settle,
    state,
    transaction,
    wait_for_lock,
)

OLD, NEW = Descriptor(owner="old"), Descriptor(owner="new", extra={"tier": 1}, tags=('a "b" \\', "{c,d}"))


def declare(conn: Conn, one: Descriptor, *names: str, start: bool = False, interval: float = 10.0) -> None:
    """What a worker does at its start, and on a tick."""
    both = dict.fromkeys(names or ("q",), one)
    descriptors.sync(conn, AWA, queues=both, kinds=both, interval=interval, is_start=start)


def tell(conn: Conn, runtime: int, one: Descriptor | None = None, **more: Descriptor) -> None:
    hashes = {name: each.hash for name, each in (({} if one is None else {"q": one}) | more).items()}
    descriptors.tell(conn, AWA, runtime, queues=hashes, kinds=hashes)


def age(conn: Conn, seconds: float) -> None:
    """Make what is there look as if it was seen so much earlier."""
    for table in (*descriptors.TABLES.values(), "awa.descriptor_versions"):
        conn.execute(f"UPDATE {table} SET last_seen_at = last_seen_at - {seconds} * interval '1 s'")


def rows(conn: Conn, *columns: str) -> list[tuple[Any, ...]]:
    """Of the queues; those of kinds are the same."""
    found = [
        conn.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY 1").fetchall()
        for table in descriptors.TABLES.values()
    ]
    assert len(found[0]) == len(found[1])
    return found[0]


def written(conn: Conn) -> list[tuple[Any, ...]]:
    """Which version of which row there is, as the server tells."""
    return rows(conn, "xmin::text", "ctid::text", "xmax::text")


# --- writing


def test_what_is_declared_is_stored_as_it_is(conn: Conn) -> None:
    declare(conn, NEW, start=True)
    declare(conn, Descriptor(), "bare", start=True)
    columns = ("display_name", "owner", "tags", "extra", "descriptor_hash", "sync_interval_ms")
    assert rows(conn, "owner", *columns)[0][1:] == (None, "new", list(NEW.tags), {"tier": 1}, NEW.hash, 10_000)
    bare = conn.execute(f"SELECT {', '.join(columns)} FROM awa.job_kind_descriptors WHERE kind = 'bare'").fetchone()
    assert bare == (None, None, [], {}, Descriptor().hash, 10_000)
    versions = dict(conn.execute("SELECT descriptor_hash, fields FROM awa.descriptor_versions").fetchall())
    assert versions == {one.hash: json.loads(one.text) for one in (NEW, Descriptor())}


def test_a_row_is_written_when_it_says_something_else_or_was_not_seen_for_half_an_interval(conn: Conn) -> None:
    """Guard: what needs nothing never meets the conflict, which would lock, and so write, each of the rows."""
    declare(conn, OLD, "q", "r", start=True)
    age(conn, 4)
    before, [(updated, seen), *_] = written(conn), rows(conn, "updated_at", "last_seen_at")
    declare(conn, OLD, "q", "r")
    declare(conn, OLD, "q", "r", start=True)
    assert written(conn) == before
    age(conn, 2)
    declare(conn, OLD, "q", "r")
    assert written(conn) != before
    [(again, seen_again), *_] = rows(conn, "updated_at", "last_seen_at")
    assert again == updated and seen_again > seen  # it says what it said
    declare(conn, NEW, "q", "r", start=True)
    [(changed, created), *_] = rows(conn, "updated_at", "created_at")
    assert changed > updated and created < updated + timedelta(seconds=1)


def test_who_started_last_is_in_the_catalogue_and_two_versions_take_no_turns(conn: Conn) -> None:
    """Guard: a tick writes over another version only when nobody has refreshed that for three intervals."""

    def stored() -> str:
        return str(rows(conn, "owner")[0][0])

    declare(conn, OLD, start=True)
    declare(conn, NEW, start=True)
    for _ in range(3):  # both live
        age(conn, 10)
        declare(conn, OLD)
        assert stored() == "new"
        declare(conn, NEW)
    declare(conn, OLD, start=True)  # an old one is started again
    declare(conn, NEW)
    assert stored() == "old"
    age(conn, 29)
    declare(conn, NEW)
    assert stored() == "old"
    age(conn, 2)  # the old ones have ended
    declare(conn, NEW)
    assert stored() == "new"


def test_many_are_written_chunk_by_chunk(conn: Conn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "CHUNK", 3)
    many = {f"q{n:02}": Descriptor(owner=str(n)) for n in reversed(range(10))}
    descriptors.sync(conn, AWA, queues=many, kinds=many, interval=10, is_start=True)
    assert rows(conn, "owner") == [(str(n),) for n in range(10)]
    assert scalar(conn, "SELECT count(*) FROM awa.descriptor_versions") == 10


@pytest.mark.parametrize("joins", [("nestloop", "nestloop"), ("nestloop", "hashjoin")], ids=" ".join)
@pytest.mark.parametrize("are_new", [True, False], ids=["new rows", "old rows"])
def test_starters_that_declare_the_same_in_opposite_order_wait_for_each_other_and_go_on(
    conn: Conn, other: Conn, third: Conn, monkeypatch: pytest.MonkeyPatch, are_new: bool, joins: tuple[str, str]
) -> None:
    """Guard: rows are written in key order. Else one has a and waits for z, the other one z and waits for a."""
    monkeypatch.setattr(descriptors, "repeated", lambda call: call())  # a deadlock would be tried again
    for session, join in zip((conn, other), joins, strict=True):  # one keeps the order of names, one that of rows
        for each in {"nestloop", "hashjoin", "mergejoin"} - {join}:
            session.execute(f"SET enable_{each} = off")
    names = ["a", "m", "z", "ž"]
    if not are_new:
        declare(third, Descriptor(), *reversed(names), start=True)
    with transaction(third):
        third.execute(
            "INSERT INTO awa.queue_descriptors AS d (queue, descriptor_hash) VALUES ('m', 'x')"
            " ON CONFLICT (queue) DO UPDATE SET owner = 'x'"
        )
        first = Background(lambda: declare(conn, OLD, *names, start=True))
        wait_for_lock(third, conn)  # it has a, and not z
        second = Background(lambda: declare(other, NEW, *reversed(names), start=True))
        wait_for_lock(third, other)
        third.execute("COMMIT")
        first.result()
        second.result()
    assert rows(conn, "owner") == [("new",)] * 4


def test_a_tick_that_waited_behind_a_start_leaves_what_that_has_written(conn: Conn, other: Conn) -> None:
    """Guard: what is due is looked at again under the row's lock."""
    declare(conn, Descriptor(), start=True)
    age(conn, 60)  # nobody has been seen for long
    with transaction(other):
        descriptors.sync(other, AWA, queues={"q": NEW}, kinds={}, interval=10, is_start=True)
        tick = Background(lambda: declare(conn, OLD))
        wait_for_lock(other, conn)
        other.execute("COMMIT")
        tick.result()
    assert rows(conn, "owner")[0] == ("new",)


def test_a_tick_waits_for_nobody_who_writes_what_it_only_marks_as_seen(conn: Conn, other: Conn) -> None:
    """Guard: SKIP LOCKED; and what it has found is written by no other way, so neither it nor the other is lost."""
    declare(conn, OLD, "a", "q", start=True)
    age(conn, 60)
    conn.execute("SET lock_timeout = '5 s'")
    with transaction(other):
        descriptors.sync(other, AWA, queues={"q": NEW}, kinds={}, interval=10, is_start=True)
        descriptors.sync(conn, AWA, queues={"a": OLD, "q": OLD}, kinds={}, interval=10, is_start=False)
        other.execute("COMMIT")
    found = conn.execute("SELECT queue, owner, last_seen_at > now() - interval '30 s' FROM awa.queue_descriptors")
    assert sorted(found.fetchall()) == [("a", "old", True), ("q", "new", True)]


def test_what_a_tick_writes_over_an_old_version_has_what_its_hash_stands_for(conn: Conn) -> None:
    """Guard: a tick writes versions before rows: those of its start may be gone."""
    declare(conn, OLD, start=True)
    age(conn, 60)
    conn.execute("TRUNCATE awa.descriptor_versions")
    declare(conn, NEW)
    assert rows(conn, "owner", "tags", "extra")[0] == ("new", list(NEW.tags), {"tier": 1})


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_every_letter_arrives_whatever_the_encoding_of_the_connection(conn: Conn, encoding: str) -> None:
    """Guard: arrays in UTF-8 are made for connections that speak it, and no name is taken from what comes back."""
    conn.execute(f"SET client_encoding = '{encoding}'")
    declare(conn, Descriptor(owner="Zoë", tags=("ü",)), "größe", start=True)
    conn.execute("SET client_encoding = 'UTF8'")
    assert rows(conn, "owner", "tags") == [("Zoë", ["ü"])]
    assert scalar(conn, "SELECT queue FROM awa.queue_descriptors") == "größe"


# --- reading


def test_who_lives_and_declares_it_is_told(conn: Conn, admin: Admin) -> None:
    declare(conn, NEW, start=True)
    numbers = [register(conn) for _ in range(7)]
    one, same, silent, patient, gone, over, before = numbers
    for runtime in numbers[:-1]:  # one of before tells nothing
        tell(conn, runtime, NEW)
    conn.execute("UPDATE awa.runtime_instances SET ended_at = now() WHERE id = %s", [over])
    conn.execute("UPDATE awa.runtime_instances SET last_seen_at = now() - interval '40 s' WHERE id = ANY (%s)",
                 [[silent, patient]])  # fmt: skip
    conn.execute("UPDATE awa.runtime_instances SET stale_after_ms = 60000 WHERE id = %s", [patient])
    conn.execute("INSERT INTO awa.gone_runtimes (runtime) VALUES (%s)", [gone])
    for info in (admin.get_queue("q").descriptor, admin.get_kind("q").descriptor):
        assert info is not None
        assert (info.owner, info.extra, info.tags, info.descriptor_hash) == ("new", {"tier": 1}, NEW.tags, NEW.hash)
        assert (info.live_runtimes, info.drift, info.is_stale) == (3, [], False)
        assert info.created_at == info.updated_at <= info.last_seen_at
    conn.execute("UPDATE awa.runtime_instances SET ended_at = now() WHERE id = ANY (%s)", [[one, same, patient]])
    info = admin.get_queue("q").descriptor
    assert info is not None and (info.live_runtimes, info.is_stale) == (0, True)
    assert before


def test_drift_is_told_with_the_runtimes_and_the_fields(conn: Conn, admin: Admin) -> None:
    declare(conn, OLD, start=True)
    another = Descriptor(owner="new", description="more", extra={"n": 1})
    spelt = Descriptor(owner="old", extra={"n": 1e16})
    for one in (another, spelt, NEW):
        declare(conn, one, start=True)
    mine = [register(conn) for _ in range(6)]
    for runtime, one in zip(mine, (NEW, another, OLD, another, Descriptor(owner="unknown"), NEW), strict=True):
        tell(conn, runtime, one, r=OLD)
    info = admin.get_queue("q").descriptor
    assert info is not None and (info.owner, info.live_runtimes, info.is_stale) == ("new", 6, False)
    assert sorted(info.drift, key=lambda drift: drift.runtimes) == [
        Drift([mine[1], mine[3]], another.hash, ["description", "tags", "extra"]),
        Drift([mine[2]], OLD.hash, ["owner", "tags", "extra"]),
        Drift([mine[4]], Descriptor(owner="unknown").hash, []),  # it was never stored what that is
    ]
    # a number that jsonb stores alike, and JSON does not
    declare(conn, Descriptor(owner="old", extra={"n": 10**16}), start=True)
    tell(conn, mine[0], spelt)
    [drift] = [one for one in admin.get_queue("q").descriptor.drift if one.runtimes == mine[:1]]  # type: ignore[union-attr]
    assert drift.fields == ["extra"]


def test_equal_sets_are_read_once(conn: Conn, admin: Admin) -> None:
    """Guard: runtimes are grouped by the hash of what they declare; the JSON of one of them is touched."""
    declare(conn, NEW, *(f"q{n}" for n in range(50)), start=True)
    many = {f"q{n}": NEW for n in range(50)}
    for runtime in [register(conn) for _ in range(20)]:
        tell(conn, runtime, **many)
    declare(conn, OLD, "q7", start=True)
    conn.execute("UPDATE awa.runtime_instances SET queue_descriptor_hashes = '{}' WHERE id > 1")  # none of these
    found = {info.name: info.descriptor for info in admin.list_queues()}
    assert {info.live_runtimes for info in found.values() if info is not None} == {20}
    assert [name for name, info in found.items() if info is not None and info.drift] == ["q7"]
    plan = "\n".join(
        line for (line,) in conn.execute("EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) " + descriptors.SETS["queue"])
    )
    assert "r (actual rows=1" in plan.replace("1.00", "1")
    # many that have ended are not looked at, whatever the planner thinks of the table
    conn.execute(
        "INSERT INTO awa.runtime_instances (uuid, hostname, pid, version, heartbeat_ms, ended_at, queue_descriptor_set)"
        " SELECT gen_random_uuid(), 'h', 1, '', 0, now(), n::text FROM generate_series(1, 3000) n"
    )
    for analyze in ("", "ANALYZE awa.runtime_instances"):
        if analyze:
            conn.execute(analyze)  # type: ignore[call-overload]
        with one_snapshot(conn, AWA) as look:
            plan = "\n".join(line for (line,) in look.rows("EXPLAIN " + descriptors.SETS["queue"]))
        assert "Seq Scan on runtime_instances" not in plan


def test_what_is_declared_is_listed_without_jobs_and_what_is_not_known_is_not_found(conn: Conn, admin: Admin) -> None:
    declare(conn, NEW, "idle", start=True)
    assert [(info.name, info.descriptor is not None) for info in admin.list_queues()] == [("idle", True)]
    assert all(not count.value for count in admin.get_queue("idle").counts.values())
    insert(conn, 1, queue="busy")
    assert [(info.name, info.descriptor is not None) for info in admin.list_queues()] == [
        ("busy", False),
        ("idle", True),
    ]
    with pytest.raises(QueueNotFound, match="known are 'busy', 'idle'"):
        admin.get_queue("nobody")

    runtime, dead = register(conn), register(conn)
    kinds = "UPDATE awa.runtime_instances SET kinds = %s::json WHERE id = %s"
    conn.execute(kinds, ['["idle", "plain"]', runtime])
    conn.execute(kinds, ['["old"]', dead])
    fall_silent(conn, dead)
    found = [(kind.name, kind.live_runtimes, kind.descriptor is not None) for kind in admin.list_kinds()]
    assert found == [("idle", 1, True), ("noop", 0, False), ("plain", 1, False)]
    assert (admin.get_kind("plain").descriptor, admin.get_kind("plain").live_runtimes) == (None, 1)
    with pytest.raises(KindNotFound, match=r"no kind 'old' is known: .* known are 'idle', 'noop', 'plain'") as caught:
        admin.get_kind("old")
    assert caught.value.kind == "old"


# --- forgetting


def test_what_nobody_has_seen_for_long_is_forgotten(conn: Conn) -> None:
    declare(conn, OLD, "gone", start=True)
    declare(conn, NEW, "q", start=True)
    runtime = register(conn)
    tell(conn, runtime, q=OLD)  # an old version that lives

    def forget(after: float, **now: datetime) -> tuple[list[Any], list[Any]]:
        descriptors.forget(conn, AWA, after=after, limit=100, **now)
        versions = conn.execute("SELECT fields->>'owner' FROM awa.descriptor_versions ORDER BY 1").fetchall()
        return [row[0] for row in rows(conn, "owner")], [row[0] for row in versions]

    age(conn, 20)
    assert forget(5) == (["new", "old"], ["new", "old"])  # three ticks at least
    age(conn, 3600)
    declare(conn, NEW, "q")
    assert forget(7200) == (["new", "old"], ["new", "old"])
    assert forget(3600) == (["new"], ["new", "old"])  # the other one's version is seen for two hours
    age(conn, 3600)
    declare(conn, NEW, "q")
    assert forget(3600) == (["new"], ["new", "old"])  # it is declared
    fall_silent(conn, runtime)
    assert forget(3600) == (["new"], ["new"])
    assert forget(3600, now=datetime.now(UTC) + timedelta(hours=3)) == ([], [])


def test_a_leader_waits_for_nobody_who_locks_the_catalogue(conn: Conn, other: Conn) -> None:
    """Rescue and promotion go over the same connection."""
    declare(conn, OLD)
    age(conn, 3600)
    conn.execute("SET statement_timeout = '10s'")
    chore = maintenance.Descriptors(AWA, retention=1.0)
    for table in ("queue_descriptors", "descriptor_versions"):
        with transaction(other):
            other.execute(f"LOCK TABLE awa.{table} IN ACCESS EXCLUSIVE MODE")
            assert chore.run(conn, 0.0) == maintenance.PAUSE
    assert len(rows(conn, "descriptor_hash")) == 1
    chore.run(conn, 0.0)
    assert rows(conn, "descriptor_hash") == []


def test_a_version_that_a_start_relies_on_is_seen_anew(conn: Conn) -> None:
    """Guard: else it could be forgotten between the start, which finds it, and the runtime's telling of it."""
    declare(conn, OLD, start=True)
    declare(conn, NEW, start=True)
    age(conn, 3 * 3600)
    declare(conn, OLD, start=True)
    conn.execute("DELETE FROM awa.queue_descriptors")
    conn.execute("DELETE FROM awa.job_kind_descriptors")
    descriptors.forget(conn, AWA, after=1, limit=100)
    assert conn.execute("SELECT descriptor_hash FROM awa.descriptor_versions").fetchall() == [(OLD.hash,)]


# --- what goes on without it

CATALOGUE = ("queue_descriptors", "job_kind_descriptors", "descriptor_versions")
HASHES = ("queue_descriptor_hashes", "job_kind_descriptor_hashes", "queue_descriptor_set", "job_kind_descriptor_set")


def take_away(conn: Conn, role: str, how: str) -> None:
    """The rights on tables and columns from the role, and perhaps the tables from everybody."""
    if how == "dropped":
        conn.execute(f"DROP TABLE {', '.join(f'awa.{table}' for table in CATALOGUE)} CASCADE")
    columns = [
        name
        for (name,) in conn.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = 'awa.runtime_instances'::regclass AND attnum > 0"
        )
        if name not in HASHES
    ]
    some = sql.SQL(", ").join(map(sql.Identifier, columns))
    for table in ("runtime_instances", *(CATALOGUE if how == "revoked" else ())):
        conn.execute(sql.SQL("REVOKE ALL ON awa.{} FROM {}").format(sql.Identifier(table), sql.Identifier(role)))
    conn.execute(
        sql.SQL("GRANT SELECT ({0}), INSERT ({0}), UPDATE ({0}) ON awa.runtime_instances TO {1}").format(
            some, sql.Identifier(role)
        )
    )


@pytest.mark.parametrize("how", ["revoked", "dropped"])
def test_jobs_never_need_the_catalogue(conn: Conn, roles: Callable[[str], str], how: str) -> None:
    """Guard: no statement on a job's way reads or writes these tables and columns."""
    url = roles("worker")
    with psycopg.connect(url, autocommit=True) as worker:
        take_away(conn, worker.info.user, how)
        with pytest.raises(psycopg.Error):
            worker.execute("SELECT FROM awa.queue_descriptors")
        with pytest.raises(psycopg.Error):
            worker.execute("SELECT queue_descriptor_set FROM awa.runtime_instances")

        runtime = runtimes.register(
            worker, AWA, uuid=uuid.uuid4(), hostname="h", pid=1, version="", queues="[]", heartbeat=5.0,
            stale_after=30.0, timeout=1.0, kind_timeouts="{}", snapshot_interval=10.0, threads=1, kinds="[]",
        )  # fmt: skip
        ids = insert(worker, *range(6))
        members = claim(worker, runtime, limit=5).members
        assert [member.id for member in members] == ids[:5]
        outcomes = [Outcome(members[1], "retried", 60.0), Outcome(members[2], "released")]
        assert settle(worker, runtime, members[:1], outcomes) == []
        worker.execute("UPDATE awa.waiting_jobs SET run_at = now()")
        assert promote(worker) == 1
        open_claims = [members[0].claim_id]
        assert runtimes.heartbeat(worker, AWA, runtime, newest_claim=members[0].claim_id, open_claims=open_claims)
        assert [seen.runtime for seen in runtimes.list_seen(worker, AWA)] == [runtime]
        assert runtimes.list_with_limits(worker, AWA) == [runtime]
        assert expire(worker, runtime, behind=-2.0, limit=1) == (1, 0)
        assert runtimes.hold_lease(worker, AWA, "maintenance", runtime, seconds=5).held_seconds is not None
        with one_snapshot(worker, AWA) as look:
            assert queues.count_jobs(look, "q")["q"]["running"].value == 1
        fall_silent(worker, runtime)
        assert [silent.runtime for silent in runtimes.list_silent(worker, AWA, stale_after=30.0)] == [runtime]
        assert fence(worker, runtime)
        assert rescue(worker, runtime) == (1, 1, 0)
        runtimes.finish(worker, AWA, runtime)
        another = register(worker)
        while members := claim(worker, another).members:
            assert settle(worker, another, members) == []
        states = [state(worker, job) for job in ids]
        assert sorted(set(states)) == ["completed", "retryable"] and states.count("retryable") == 1  # which expired
        runtimes.leave(worker, AWA, another, newest_claim=2**40)
