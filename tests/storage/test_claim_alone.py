"""A job whose last attempt was rescued is claimed alone: it may have killed its worker."""

from __future__ import annotations

from tests.storage.engine import (
    ALONE,
    Conn,
    Outcome,
    claim,
    fall_silent,
    fence,
    insert,
    register,
    rescue,
    scalar,
    settle,
)


def die(conn: Conn, runtime: int) -> None:
    fall_silent(conn, runtime)
    assert fence(conn, runtime)
    rescue(conn, runtime)


def test_rescued_jobs_come_one_by_one_and_the_others_together(conn: Conn) -> None:
    insert(conn, 1, 2, 3)
    victim = register(conn)
    claim(conn, victim)
    die(conn, victim)
    insert(conn, 4, 5)
    insert(conn, 6, priority=1)
    runtime = register(conn)
    first = claim(conn, runtime)
    assert (first.numbers, first.flags & ALONE) == ([6], 0)  # before the first of them
    for n in (1, 2, 3):
        claimed = claim(conn, runtime)
        assert (claimed.numbers, claimed.flags & ALONE) == ([n], ALONE)
        assert claimed.members[0].attempt == 2
    rest = claim(conn, runtime)
    assert (rest.numbers, rest.flags & ALONE) == ([4, 5], 0)


def test_one_that_survived_comes_with_the_others_again(conn: Conn) -> None:
    insert(conn, 1, 2)
    victim = register(conn)
    claim(conn, victim)
    die(conn, victim)
    runtime = register(conn)
    one = claim(conn, runtime).members
    settle(conn, runtime, (), [Outcome(one[0], "retried", error={"type": "E", "text": "t"})])
    two = claim(conn, runtime).members
    settle(conn, runtime, (), [Outcome(two[0], "released")])  # it did not start: it may still be the one
    again = claim(conn, runtime)
    assert (again.numbers, again.flags & ALONE) == ([2], ALONE)
    assert (claim(conn, runtime).numbers, scalar(conn, "SELECT count(*) FROM awa.jobs")) == ([1], 6)


def test_one_of_an_unknown_kind_is_set_aside_and_hides_nothing(conn: Conn) -> None:
    insert(conn, 1, kind="x")
    insert(conn, 2, kind="y")
    insert(conn, 3, kind="x")
    victim = register(conn)
    claim(conn, victim)
    die(conn, victim)
    runtime = register(conn)
    assert claim(conn, runtime, kinds=["y"]).numbers == [2]
    found = claim(conn, runtime, kinds=["y"])
    assert (found.numbers, found.flags & ALONE) == ([], 0)
    assert sorted(claim(conn, runtime, kinds=["x"]).numbers) == [1, 3]
