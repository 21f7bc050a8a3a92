"""Keys of limited queues beside everything that may happen at that moment: nobody is stuck, and nobody jumps ahead."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from awa.storage.check import check_storage
from awa.storage.holders import find_mismatches
from tests.storage.engine import (
    AWA,
    BUSY,
    COME_AGAIN,
    Conn,
    Member,
    Outcome,
    cancel,
    claim,
    complete,
    fall_silent,
    fence,
    insert,
    move,
    register,
    rescue,
    retry,
    settle,
    transaction,
)
from tests.storage.lives import DONE
from tests.storage.test_limits import limit, waits

Scope = Literal["key", "order"]

SCOPES: tuple[Scope, ...] = ("key", "order")


@pytest.fixture(params=SCOPES)
def scope(request: pytest.FixtureRequest, conn: Conn) -> Scope:
    """Which kind of key the jobs share; one of them may run at a time."""
    found: Scope = request.param
    if found == "key":
        limit(conn, max_running_per_key=1)
    return found


def keyed(scope: Scope) -> dict[str, Any]:
    return {scope: "a"}


def started(conn: Conn, runtime: int) -> list[Member]:
    """What a worker gets that asks until it has asked three times in vain."""
    found: list[Member] = []
    idle = 0
    while idle < 3:
        claimed = claim(conn, runtime)
        found += claimed.members
        idle = 0 if claimed.members else idle + 1
    return found


def drain(conn: Conn, runtime: int) -> list[int]:
    """The numbers of all jobs that are left, in the order in which they start."""
    order = []
    for _ in range(50):
        if not (members := started(conn, runtime)):
            break
        order += [json.loads(member.args or "")["n"] for member in members]
        settle(conn, runtime, members)
    assert waits(conn) == []
    assert find_mismatches(conn, AWA) == []
    return order


# --- an end, and a claim that sets the next one aside


@pytest.mark.parametrize("ends", ["before the claim", "after the claim", "after the next claim", "not at all"])
def test_an_end_that_is_open_while_the_next_one_is_set_aside(conn: Conn, other: Conn, scope: Scope, ends: str) -> None:
    """Guard: the key's row stays until a claim hands it over, so whichever commits first, somebody looks."""
    runtime = register(conn)
    insert(conn, 1, 2, 3, **keyed(scope))
    [first] = claim(conn, runtime, limit=1).members
    with transaction(other):
        settle(other, runtime, [first])
        if ends == "before the claim":
            other.execute("COMMIT")
        brought = claim(conn, runtime).members
        if ends == "after the claim":
            assert brought == []
            assert waits(conn) == [(scope, "a", 2), (scope, "a", 3)]
            other.execute("COMMIT")
        elif ends == "after the next claim":
            assert claim(conn, runtime).members == []
            other.execute("COMMIT")
    if ends == "not at all":
        assert started(conn, runtime) == []
        settle(conn, runtime, [first])
    settle(conn, runtime, brought)
    rest = drain(conn, runtime)
    assert rest == ([2, 3] if not brought else [3])


def test_a_claim_that_is_open_while_the_job_before_ends(conn: Conn, other: Conn, scope: Scope) -> None:
    """Guard: it has seen the key taken, and sets the next one aside when nobody will end any more."""
    runtime = register(conn)
    insert(conn, 1, 2, 3, **keyed(scope))
    [first] = claim(conn, runtime, limit=1).members
    with transaction(other):
        assert claim(other, runtime).members == []
        settle(conn, runtime, [first])
        busy = claim(conn, runtime)
        assert (busy.members, busy.flags & BUSY) == ([], BUSY)
        other.execute("COMMIT")
    assert drain(conn, runtime) == [2, 3]


def test_a_claim_that_is_rolled_back_has_handed_nothing_over(conn: Conn, other: Conn, scope: Scope) -> None:
    runtime = register(conn)
    insert(conn, 1, 2, 3, **keyed(scope))
    [first] = started(conn, runtime)
    settle(conn, runtime, [first])
    with transaction(other):
        assert claim(other, runtime).flags & COME_AGAIN, "handed over, to be met by the next claim"
        other.execute("ROLLBACK")
    assert find_mismatches(conn, AWA) == []
    assert drain(conn, runtime) == [2, 3]


def test_a_job_that_completes_itself_keeps_its_key_until_its_transaction_commits(
    conn: Conn, other: Conn, scope: Scope
) -> None:
    runtime = register(conn)
    insert(conn, 1, 2, **keyed(scope))
    [first] = started(conn, runtime)
    with transaction(other):
        complete(other, first)
        assert started(conn, runtime) == []
        other.execute("ROLLBACK")
    assert started(conn, runtime) == []
    with transaction(other):
        complete(other, first)
        assert started(conn, runtime) == []
        other.execute("COMMIT")
    assert drain(conn, runtime) == [2]


def test_a_rescue_that_is_open_gives_the_key_to_nobody_yet(conn: Conn, other: Conn, scope: Scope) -> None:
    """Guard: an ordering key stays with the job that is taken back; a concurrency key was its attempt's."""
    runtime, gone = register(conn), register(conn)
    insert(conn, 1, 2, 3, **keyed(scope))
    assert len(started(conn, gone)) == 1
    fall_silent(conn, gone)
    assert fence(conn, gone)
    assert started(conn, runtime) == []
    with transaction(other):
        assert rescue(other, gone) == (1, 1, 0)
        assert started(conn, runtime) == []
        other.execute("COMMIT")
    order = drain(conn, runtime)
    assert sorted(order) == [1, 2, 3]
    if scope == "order":
        assert order == [1, 2, 3]


# --- somebody holds the row of the one whose turn it is


@pytest.mark.parametrize("ending", ["COMMIT", "ROLLBACK"])
def test_a_cancel_of_the_next_one_that_is_open_lets_nobody_jump_ahead(
    conn: Conn, other: Conn, scope: Scope, ending: str
) -> None:
    """Guard: a waiting job that somebody else holds keeps its turn, and the key its row."""
    runtime = register(conn)
    [_, second, _] = insert(conn, 1, 2, 3, **keyed(scope))
    [first] = started(conn, runtime)
    with transaction(other):
        assert cancel(other, second) == DONE
        settle(conn, runtime, [first])
        insert(conn, 4, **keyed(scope))
        assert started(conn, runtime) == [], "not 3, nor 4, which has never waited"
        assert [n for _, _, n in waits(conn)] == [2, 3, 4]
        other.execute(ending)
    assert drain(conn, runtime) == ([3, 4] if ending == "COMMIT" else [2, 3, 4])


def test_a_cancel_of_one_that_waits_further_back_holds_nobody_up(conn: Conn, other: Conn, scope: Scope) -> None:
    runtime = register(conn)
    [_, _, third, _] = insert(conn, 1, 2, 3, 4, **keyed(scope))
    [first] = started(conn, runtime)
    with transaction(other):
        assert cancel(other, third) == DONE
        settle(conn, runtime, [first])
        [second] = started(conn, runtime)
        settle(conn, runtime, [second])
        assert started(conn, runtime) == []
        other.execute("COMMIT")
    assert drain(conn, runtime) == [4]


def test_a_hand_over_that_is_open_keeps_a_cancel_off_and_the_key_goes_on_afterwards(
    conn: Conn, other: Conn, scope: Scope
) -> None:
    """Guard: what was handed over is no longer where a cancel looked for it, and its key goes on to the next."""
    runtime = register(conn)
    [_, second, _] = insert(conn, 1, 2, 3, **keyed(scope))
    [first] = started(conn, runtime)
    settle(conn, runtime, [first])
    with transaction(other):
        assert claim(other, runtime).flags & COME_AGAIN
        assert cancel(conn, second) == ("busy", "available")
        other.execute("COMMIT")
    assert cancel(conn, second) == DONE
    assert drain(conn, runtime) == [3]


def test_the_limit_of_a_key_holds_for_those_behind_one_that_is_held(conn: Conn, other: Conn) -> None:
    """Guard: where two may run, the one that is held keeps one of the two places."""
    limit(conn, max_running_per_key=2)
    runtime = register(conn)
    ids = insert(conn, 1, 2, 3, 4, 5, key="a")
    members = started(conn, runtime)
    assert len(members) == 2
    settle(conn, runtime, members)
    with transaction(other):
        other.execute("SELECT FROM awa.waiting_jobs WHERE id = %s FOR UPDATE", (ids[2],))
        beside = started(conn, runtime)
        assert [member.id for member in beside] == [ids[3]], "3 keeps its place, 5 has none"
        settle(conn, runtime, beside)
        last = started(conn, runtime)
        assert [member.id for member in last] == [ids[4]], "as soon as there is one"
        other.execute("COMMIT")
    settle(conn, runtime, last)
    assert drain(conn, runtime) == [3]


# --- keys that change hands on the way


def patiently(conn: Conn, runtime: int) -> list[int]:
    """As drain, of jobs that are handed keys, set aside and handed others before anything starts."""
    order = []
    for _ in range(20):
        claimed = claim(conn, runtime)
        order += claimed.numbers
        settle(conn, runtime, claimed.members)
    assert waits(conn) == []
    assert find_mismatches(conn, AWA) == []
    return order


def test_one_of_an_unknown_kind_hands_its_key_on(conn: Conn) -> None:
    """Guard: a concurrency key is for those who run; nobody may ever come who knows that kind."""
    limit(conn, max_running_per_key=1)
    knows_both, knows_one = register(conn), register(conn)
    for n, kind in enumerate(["y", "x", "y"], 1):
        insert(conn, n, kind=kind, key="a")
    first = claim(conn, knows_both, kinds=["x", "y"]).members
    settle(conn, knows_both, first)
    assert claim(conn, knows_one, kinds=["y"]).flags & COME_AGAIN, "2 has the key"
    aside = claim(conn, knows_one, kinds=["y"])
    assert (aside.members, aside.flags & COME_AGAIN) == ([], COME_AGAIN), "3 is to have it"
    assert claim(conn, knows_one, kinds=["y"]).flags & COME_AGAIN
    [third] = claim(conn, knows_one, kinds=["y"]).members
    assert claim(conn, knows_both, kinds=["x", "y"]).members == []
    settle(conn, knows_one, [third])
    assert patiently(conn, knows_both) == [2]


def test_two_jobs_with_the_same_two_keys_never_wait_for_each_other(conn: Conn) -> None:
    """Guard: who finds its ordering key taken keeps no concurrency key meanwhile; its holder may wait for that one."""
    runtime = register(conn)
    for queue in ("q", "elsewhere"):
        limit(conn, queue, max_running_per_key=1)
        insert(conn, 1, queue=queue, key="a")
    [first] = claim(conn, runtime).members
    assert claim(conn, runtime, queue="elsewhere").numbers == [1]
    [moved] = insert(conn, 2, queue="elsewhere", key="a", order="o")
    claim(conn, runtime, queue="elsewhere")
    assert move(conn, moved, "q") == ("moved", "available")
    insert(conn, 3, key="a", order="o")
    claim(conn, runtime)
    assert waits(conn) == [("key", "a", 2), ("key", "a", 3)]
    settle(conn, runtime, [first])
    assert patiently(conn, runtime) == [3, 2]


def test_a_move_brings_one_that_waits_while_a_claim_removes_the_row_of_its_key(conn: Conn, other: Conn) -> None:
    """Guard: the move takes the row, and a claim looks who waits when it has it; else nobody would ever look."""
    runtime = register(conn)
    for queue in ("q", "elsewhere"):
        limit(conn, queue, max_running_per_key=1)
    insert(conn, 1, queue="elsewhere", key="a")
    claim(conn, runtime, queue="elsewhere")
    second, third = insert(conn, 2, 3, queue="elsewhere", key="a")
    claim(conn, runtime, queue="elsewhere")
    conn.execute("SELECT awa.look_at_key('q', 'key', 'a')")
    with transaction(other):
        assert move(other, second, "q")[0] == "moved"
        assert claim(conn, runtime).members == []
        other.execute("COMMIT")
    assert find_mismatches(conn, AWA) == []
    [second_member] = started(conn, runtime)
    assert second_member.id == second
    settle(conn, runtime, [second_member])
    conn.execute("SELECT awa.look_at_key('q', 'key', 'a')")
    with transaction(other):
        claim(other, runtime)
        assert move(conn, third, "q")[0] == "busy"
        other.execute("COMMIT")
    assert move(conn, third, "q")[0] == "moved"
    assert patiently(conn, runtime) == [3]


def test_a_job_that_is_replaced_in_a_long_transaction_holds_no_claim_up(conn: Conn, other: Conn) -> None:
    """Guard: that transaction leaves alone the rows which claims remove, and claims those which others hold."""
    limit(conn, max_running_per_key=1)
    runtime = register(conn)
    enqueue = (
        """SELECT awa.enqueue_v2('noop', '{"n": 1}', 'q', p_unique_key => '\\x00112233445566778899aabbccddeeff',"""
    )
    conn.execute(f"{enqueue} p_concurrency_key => 'a', p_ordering_key => 'o')")
    [first] = claim(conn, runtime).members
    settle(conn, runtime, others=[Outcome(first, "retried", 60.0)])
    insert(conn, 2)
    insert(conn, 3, key="a")
    insert(conn, 4, order="o")
    with transaction(other):
        other.execute(f"{enqueue} p_on_conflict => 'replace', p_delay => '1 h')")
        assert claim(conn, runtime).numbers == [2, 3]
        other.execute("COMMIT")
    assert [member.args for member in started(conn, runtime)] == ['{"n" : 4}']
    insert(conn, 5, key="b")
    settle(conn, runtime, claim(conn, runtime).members)
    with transaction(other):
        other.execute("SELECT FROM awa.grants WHERE key = 'b' FOR UPDATE")
        insert(conn, 6)
        assert claim(conn, runtime).numbers == [6]
        other.execute("COMMIT")


def test_one_that_is_retried_after_it_failed_holds_its_order_while_it_waits_for_a_key(conn: Conn, other: Conn) -> None:
    """Guard: the row of the attempt that failed is its own again, though no claim came across it: they look at some."""
    limit(conn, max_running_per_key=1)
    runtime = register(conn)
    [job] = insert(conn, 1, key="a", order="o")
    [failing] = claim(conn, runtime).members
    settle(conn, runtime, others=[Outcome(failing, "failed")])
    insert(conn, 2, key="a")
    with transaction(other):
        other.execute("SELECT FROM awa.grants WHERE scope = 'order' FOR KEY SHARE")  # as if there were too many
        [second] = claim(conn, runtime).members
        assert retry(conn, job)[0] == "retried"
        assert claim(conn, runtime).members == []
        other.execute("COMMIT")
    insert(conn, 3, order="o")
    assert started(conn, runtime) == []
    assert waits(conn) == [("key", "a", 1), ("order", "o", 3)]
    settle(conn, runtime, [second])
    assert patiently(conn, runtime) == [1, 3]


# --- segments


def test_keys_go_on_when_their_attempts_lie_in_other_segments(conn: Conn, scope: Scope) -> None:
    """Guard: a key's row names the slot of its attempt, and whoever waits is appended to the current one."""
    runtime = register(conn)
    insert(conn, *range(1, 8), **keyed(scope))
    order = []
    for _ in range(7):
        [member] = started(conn, runtime)
        order.append(member.id)
        conn.execute("SELECT awa.rotate_v1()")
        settle(conn, runtime, [member])
    assert order == sorted(order)
    assert started(conn, runtime) == []
    assert check_storage(conn, AWA).sums[0].running == 0
    assert find_mismatches(conn, AWA) == []
