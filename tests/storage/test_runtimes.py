"""Runtimes as the database knows them: which live, what they tell, the order to be quiet, how long they are kept."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

import awa
from awa import RuntimeNotFound, RuntimeTooOld, ValidationError
from awa.storage import runtimes
from awa.storage.runtime_control import MOST_ENDED, ServedQueue
from awa.worker.maintenance.retention import Retention
from tests.fixtures.db import wait_until
from tests.storage.engine import AWA, Conn, claim, insert, scalar

OF_BEFORE = """
    INSERT INTO awa.runtime_instances (uuid, hostname, pid, version, heartbeat_ms)
    VALUES (gen_random_uuid(), 'old', 1, '0', 5000)
    RETURNING id
"""


@pytest.fixture
def other(database: str) -> Iterator[Conn]:
    with psycopg.connect(database, autocommit=True) as conn:
        yield conn


def register(conn: Conn, **told: Any) -> int:
    """A new runtime's number."""
    usual: dict[str, Any] = {
        "uuid": uuid.uuid4(),
        "hostname": "web-1",
        "pid": 4711,
        "version": "1.2",
        "queues": '[{"name": "q", "max_workers": 3, "min_workers": 1, "weight": 2}]',
        "heartbeat": 5.0,
        "stale_after": 20.0,
        "timeout": 300.0,
        "kind_timeouts": "{}",
        "snapshot_interval": 10.0,
        "threads": 4,
        "kinds": '["a", "b"]',
    }
    return runtimes.register(conn, AWA, **usual | told)


def silent_for(conn: Conn, runtime: int, seconds: float) -> None:
    conn.execute(
        "UPDATE awa.runtime_instances SET last_seen_at = clock_timestamp() - %s * interval '1 s' WHERE id = %s",
        [seconds, runtime],
    )


def fence(conn: Conn, runtime: int) -> None:
    conn.execute("INSERT INTO awa.gone_runtimes (runtime) VALUES (%s)", [runtime])


def live(conn: Conn) -> list[int]:
    return [number for (number,) in conn.execute("SELECT id FROM awa.live_runtimes ORDER BY id").fetchall()]


def test_which_live_and_what_becomes_of_the_others(conn: Conn, client: awa.Client) -> None:
    """Guard: each says after which silence it is dead; one of before says nothing, and has thirty seconds."""
    fine, late, gone, ended = (register(conn) for _ in range(4))
    silent_for(conn, fine, 15)
    silent_for(conn, late, 25)
    old = scalar(conn, OF_BEFORE)
    silent_for(conn, old, 25)
    older = scalar(conn, OF_BEFORE)
    silent_for(conn, older, 35)
    fence(conn, gone)
    runtimes.leave(conn, AWA, ended, newest_claim=0)
    assert live(conn) == [fine, old]

    def states(**options: bool) -> dict[int, str]:
        return {one.id: one.state for one in client.admin.list_runtimes(**options)}

    present = {fine: "live", late: "stale", gone: "gone", old: "live", older: "stale"}
    assert states() == present
    assert states(include_ended=True) == present | {ended: "ended"}
    runtimes.finish(conn, AWA, gone)
    assert gone not in states()
    assert states(include_ended=True)[gone] == "gone", "nobody sees any more that it was taken for dead"
    assert live(conn) == [fine, old]


def test_what_a_runtime_tells(conn: Conn, client: awa.Client) -> None:
    number = register(conn, heartbeat=2.5)
    told = client.admin.get_runtime(number)
    assert (told.hostname, told.pid, told.version, told.heartbeat, told.stale_after) == ("web-1", 4711, "1.2", 2.5, 20)
    assert (told.threads, told.kinds, told.queues) == (4, ["a", "b"], [ServedQueue("q", 3, 1, 2)])
    assert (told.busy, told.health, told.snapshot_at, told.is_leader, told.is_quiet) == (None, None, None, False, False)
    runtimes.hold_lease(conn, AWA, "maintenance", number, seconds=60)
    health = '{"unhealthy": [], "unready": ["claims do not succeed"], "loops": {"watch": "ok"}}'
    runtimes.write_snapshot(conn, AWA, number, busy=2, in_flight='{"q": 5}', health=health)
    told = client.admin.get_runtime(number)
    assert told.is_leader and told.snapshot_at is not None and told.busy == 2 and told.health is not None
    assert told.queues == [ServedQueue("q", 3, 1, 2, in_flight=5)]
    assert (told.health.unready, told.health.loops) == (["claims do not succeed"], {"watch": "ok"})


def test_what_others_wrote_there_hides_no_runtime(conn: Conn, client: awa.Client) -> None:
    """Guard: a worker in another language may leave anything in these columns."""
    number = register(conn)
    for odd in ("null", "7", "{}", "[]", '[1, {"name": null}, {"weight": null}]', '"\\u0000"', '{"loops": 1}'):
        conn.execute(
            "UPDATE awa.runtime_instances SET queues = %(odd)s, kinds = %(odd)s, in_flight = %(odd)s, health = %(odd)s",
            {"odd": odd},
        )
        [told] = client.admin.list_runtimes()
        assert (told.id, told.queues) == (number, [])
        assert client.admin.list_queues() == []
        client.admin.list_kinds()
        assert not [finding for finding in client.admin.doctor() if "could not be looked at" in finding.text]


def test_a_snapshot_waits_for_no_disk_and_leaves_the_session_as_it_was(conn: Conn) -> None:
    """Guard: the sign of life waits for this commit, since both change one row."""
    number = register(conn)
    with conn.transaction():
        runtimes.write_snapshot(conn, AWA, number, busy=0, in_flight="{}", health="{}")
        assert scalar(conn, "SHOW synchronous_commit") == "off"
    assert scalar(conn, "SHOW synchronous_commit") == "on"


def test_a_list_of_the_ended_is_of_the_last_hundred(conn: Conn, client: awa.Client) -> None:
    conn.execute(
        "INSERT INTO awa.runtime_instances (uuid, hostname, pid, version, heartbeat_ms, ended_at)"
        " SELECT gen_random_uuid(), 'h', n, '1', 5000, now() FROM generate_series(1, %s) n",
        [MOST_ENDED + 5],
    )
    number = register(conn)
    found = client.admin.list_runtimes(include_ended=True)
    assert [one.pid for one in found] == [*range(6, MOST_ENDED + 6), 4711]
    assert [one.id for one in client.admin.list_runtimes()] == [number]


def test_an_unknown_number_is_told_and_what_can_be_none_is_refused_before_any_sql(
    conn: Conn, client: awa.Client
) -> None:
    for call in (client.admin.get_runtime, client.admin.quiet_runtime, client.admin.resume_runtime):
        with pytest.raises(RuntimeNotFound, match=r"no runtime 99 is known.*awa runtime list") as caught:
            call(99)
        assert caught.value.runtime == 99
    nowhere = awa.Client("host=/nowhere").admin
    for call in (nowhere.get_runtime, nowhere.quiet_runtime, nowhere.resume_runtime):
        for odd in (0, -1, 2**63, "7", True, None):
            with pytest.raises(ValidationError, match="runtime_id must be"):
                call(odd)  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="by is empty"):
        nowhere.quiet_runtime(1, by="")
    with pytest.raises(ValidationError, match="include_ended must be True or False"):
        nowhere.list_runtimes(include_ended=1)  # type: ignore[arg-type]


# Being quiet


def test_an_order_to_be_quiet_stands_until_it_is_taken_back(conn: Conn, client: awa.Client) -> None:
    number, beside = register(conn), register(conn)
    first = client.admin.quiet_runtime(number, by="ada")
    assert first.is_quiet and first.quiet_by == "ada"
    again = client.admin.quiet_runtime(number)
    assert (again.quiet_at, again.quiet_by) == (first.quiet_at, None)
    assert runtimes.heartbeat(conn, AWA, number, newest_claim=0, open_claims=[])
    silent_for(conn, number, 100)
    assert client.admin.get_runtime(number).quiet_at == first.quiet_at, "a silent one may be back"
    assert not client.admin.get_runtime(beside).is_quiet
    for _ in range(2):
        after = client.admin.resume_runtime(number)
        assert (after.quiet_at, after.quiet_by) == (None, None)


def test_whoever_has_ended_is_told_nothing(conn: Conn, client: awa.Client) -> None:
    ended, gone = register(conn), register(conn)
    runtimes.leave(conn, AWA, ended, newest_claim=0)
    fence(conn, gone)
    for call in (client.admin.quiet_runtime, client.admin.resume_runtime):
        with pytest.raises(RuntimeNotFound, match=f"runtime {ended} has ended"):
            call(ended)
        with pytest.raises(RuntimeNotFound, match=f"runtime {gone} was taken for dead.*awa runtime list"):
            call(gone)
    assert scalar(conn, "SELECT count(*) FROM awa.runtime_instances WHERE quiet_at IS NOT NULL") == 0


def test_one_that_would_not_hear_it_is_not_told_to_be_quiet(conn: Conn, client: awa.Client) -> None:
    old = scalar(conn, OF_BEFORE)
    with pytest.raises(RuntimeTooOld, match=rf"runtime {old} is of awa 0, .* end process 1 on old, or pause") as caught:
        client.admin.quiet_runtime(old)
    assert (caught.value.runtime, caught.value.version) == (old, "0")
    assert not client.admin.get_runtime(old).is_quiet
    assert not client.admin.resume_runtime(old).is_quiet
    fence(conn, old)
    with pytest.raises(RuntimeNotFound, match="was taken for dead"):
        client.admin.quiet_runtime(old)


def test_who_registers_anew_stays_quiet(conn: Conn, client: awa.Client) -> None:
    number = register(conn)
    order = client.admin.quiet_runtime(number, by="ada")
    fence(conn, number)
    anew = client.admin.get_runtime(register(conn, before=number))
    assert (anew.quiet_at, anew.quiet_by) == (order.quiet_at, "ada")
    assert not client.admin.get_runtime(register(conn)).is_quiet
    assert not client.admin.get_runtime(register(conn, before=10**6)).is_quiet, "a server may have lost the row"


def test_an_order_that_meets_a_fence_is_either_carried_on_or_refused(
    conn: Conn, other: Conn, client: awa.Client
) -> None:
    """Guard: the look behind the order. Its statement began before the fence, and stands in a row that is over."""
    number = register(conn)
    said: list[Exception] = []

    def order() -> None:
        try:
            client.admin.quiet_runtime(number)
        except RuntimeNotFound as error:
            said.append(error)

    thread = threading.Thread(target=order)
    with conn.transaction():
        conn.execute("SELECT FROM awa.runtime_instances WHERE id = %s FOR UPDATE", [number])
        thread.start()
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%quiet_at%%'"
        wait_until(lambda: scalar(other, waiting) == 1)
        fence(other, number)
    thread.join(10)
    assert len(said) == 1 and "taken for dead" in str(said[0])


# Keeping


def test_who_ended_long_ago_is_deleted_once_no_claim_tells_of_it(conn: Conn, client: awa.Client) -> None:
    """Guard: a claim tells where its attempts ran; and a fence is for ever."""
    lives = register(conn)
    ended = [register(conn) for _ in range(4)]
    insert(conn, 1)
    claim(conn, ended[1])
    recent = register(conn)
    for number in (*ended, recent):
        fence(conn, number)
    for number in ended:
        conn.execute("UPDATE awa.runtime_instances SET ended_at = now() - interval '2 h' WHERE id = %s", [number])
    runtimes.finish(conn, AWA, recent)

    # two at a time, and one that stays holds nobody up
    after = runtimes.delete_ended(conn, AWA, kept=3600, limit=2)
    assert after == ended[1]
    assert [one.id for one in client.admin.list_runtimes(include_ended=True)] == [lives, *ended[1:], recent]
    after = runtimes.delete_ended(conn, AWA, kept=3600, limit=2, after=after)
    assert after == ended[3]
    assert runtimes.delete_ended(conn, AWA, kept=3600, limit=2, after=after) == 0
    assert [one.id for one in client.admin.list_runtimes(include_ended=True)] == [lives, ended[1], recent]
    assert scalar(conn, "SELECT count(*) FROM awa.gone_runtimes") == 5

    # a laptop that slept for a day
    assert not runtimes.heartbeat(conn, AWA, ended[0], newest_claim=0, open_claims=[])
    runtimes.bury(conn, AWA, ended[0], hostname="web-1", pid=4711)
    assert client.admin.get_runtime(ended[0]).state == "gone"
    with pytest.raises(psycopg.Error) as caught:
        claim(conn, ended[0])
    assert caught.value.sqlstate == "AWA01"


def test_the_leader_keeps_who_ended_for_as_long_as_jobs_may_tell_of_it(conn: Conn) -> None:
    number = register(conn)
    runtimes.leave(conn, AWA, number, newest_claim=0)
    conn.execute("UPDATE awa.runtime_instances SET ended_at = now() - interval '2 h'")
    for completed, failed, left in ((10_000.0, 60.0, 1), (60.0, 10_000.0, 1), (60.0, 60.0, 0)):
        Retention(AWA, completed=completed, failed=failed, dead=60.0).run(conn, 0.0)
        assert scalar(conn, "SELECT count(*) FROM awa.runtime_instances") == left
