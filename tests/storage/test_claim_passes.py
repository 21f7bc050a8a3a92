"""A claim reads what it walks over once where it can, and in several passes where something is to be looked at.

Both must come to the same: what is started, what is set aside, and how far the claim came.
``tests/storage/test_plans.py`` looks at how both walk.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from psycopg.types.json import Json

from tests.storage.engine import Conn, cancel, claim, claim_in_steps, insert, register, scalar, transaction

KNOWN = ["noop", "mail"]

LARGEST = 131_072
"""Bytes of a claim: args, kinds and details."""


def add(conn: Conn, rng: random.Random, kinds: list[str]) -> None:
    """One job as producers, retries and promotions write them; nothing of it has to be looked at."""
    priority = rng.choice([1, 2, 2, 2, 3])
    is_again = rng.random() < 0.3
    conn.execute(
        """INSERT INTO awa.jobs (queue, kind, lane, priority, attempt, max_attempts, tags, metadata, timeout_ms,
                                 follow_ups, unique_key, history, created_at, args, id)
           VALUES ('q', %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, nextval('awa.entry_id_seq'))""",
        (
            rng.choice(kinds),
            2 * priority + (not is_again),
            priority,
            2 if is_again else 1,
            rng.choice([25, 25, 25, 3]),
            rng.choice([None, None, ["a", "ü"]]),
            rng.choice([None, None, Json({"m": 1})]),
            rng.choice([None, None, 500]),
            rng.choice([None, None, None, Json([{"on": "completed"}])]),
            rng.choice([None, None, b"\1" * 16, b"\1" * 16 + b"\0"]),
            Json([{"attempt": 1, "outcome": "retried"}]) if is_again else None,
            "2026-01-01" if is_again else None,
            Json({"n": rng.randrange(1000), "text": "é" * rng.randrange(20)}),
        ),
    )


def what_a_claim_does(conn: Conn, runtime: int, limit: int) -> list[Any]:
    """All of it but its numbers; it is undone."""
    with transaction(conn):
        before = scalar(conn, "SELECT coalesce(max(claim_id), 0) FROM awa.claims")
        told = conn.execute(
            """SELECT flags, slot, priority, ids, entry_ids, attempts, max_attempts, kinds, lens, args, created_at,
                      details
                 FROM awa.claim_v2('q', %s, %s, %s)""",
            (runtime, KNOWN, limit),
        ).fetchall()
        claims = conn.execute(
            """SELECT c.slot, c.lane, c.entry_ids, c.xids, c.singles,
                      (SELECT array_agg(ROW(f.lane, f.page_to IS NULL, f.last_xid, f.last_entry)::text ORDER BY f.lane)
                         FROM unnest(c.frontier) f)
                 FROM awa.claims c WHERE c.claim_id > %s ORDER BY c.claim_id""",
            (before,),
        ).fetchall()
        aside = conn.execute("SELECT id, waits_for, wait_key, priority FROM awa.waiting_jobs ORDER BY seq").fetchall()
        ends = conn.execute(
            "SELECT entry_id, slot, outcome FROM awa.attempt_ends WHERE outcome = 'set_aside' ORDER BY entry_id"
        ).fetchall()
        return [told, claims, aside, ends]


@pytest.mark.parametrize("kinds", [["noop", "mail"], ["noop", "mail", "strange"], ["strange"]], ids="-".join)
@pytest.mark.parametrize("seed", range(6))
def test_one_pass_and_several_come_to_the_same(conn: Conn, other: Conn, seed: int, kinds: list[str]) -> None:
    rng = random.Random(seed)
    runtime = register(conn)
    for _ in range(4):  # each leaves a part of a page behind, with an open transaction in it
        with transaction(other):
            for _ in range(rng.randrange(1, 6)):
                add(other, rng, kinds)
            for _ in range(rng.randrange(1, 12)):
                add(conn, rng, kinds)
            claim(conn, runtime, kinds=KNOWN, limit=rng.randrange(1, 6))
            if rng.random() < 0.5:
                conn.execute("SELECT awa.rotate_v1()")
            for _ in range(rng.randrange(1, 6)):
                add(other, rng, kinds)
            other.execute("COMMIT")
    limits = [1, 3, 7, 200]
    once = [what_a_claim_does(conn, runtime, limit) for limit in limits]
    assert once[-1][0][:-1] or once[-1][2]  # it found something
    # where keys are held each claim looks at keys
    conn.execute("INSERT INTO awa.grants (queue, scope, key, id) VALUES ('q', 'order', 'held', 0)")
    assert [what_a_claim_does(conn, runtime, limit) for limit in limits] == once


@pytest.mark.parametrize("is_keyed", [False, True], ids=["plain", "keyed"])
def test_bodies_that_do_not_fit_together_come_in_order_one_claim_after_the_other(conn: Conn, is_keyed: bool) -> None:
    """Guard: what does not fit comes with the next claim, however uneven the bodies are, and nothing is left out."""
    if is_keyed:
        conn.execute("INSERT INTO awa.grants (queue, scope, key, id) VALUES ('q', 'order', 'held', 0)")
    rng = random.Random(7)
    sizes = [rng.choice([10, 400, 400, 3_000, 40_000, 140_000]) for _ in range(150)]
    for n, size in enumerate(sizes):
        conn.execute(
            "INSERT INTO awa.jobs (queue, kind, args) VALUES ('q', 'noop', %s)", (Json({"n": n, "text": "x" * size}),)
        )
    runtime = register(conn)
    ids = [row[0] for row in conn.execute("SELECT id FROM awa.jobs ORDER BY entry_id").fetchall()]
    found: list[int] = []
    claims = 0
    while len(found) < len(ids):
        members = claim(conn, runtime, limit=1000).members
        assert members
        assert len(members) == 1 or sum(len(member.args or "") + len("noop") for member in members) <= LARGEST
        assert all(member.args is not None for member in members) or len(members) == 1
        found += [member.id for member in members]
        claims += 1
    assert found == ids
    assert claims < len(ids) / 2


def test_a_claim_takes_about_as_many_bodies_as_fit(conn: Conn) -> None:
    """Guard: a claim whose bodies do not fit together walks again over as many as may, and not over a few."""
    conn.execute(
        """INSERT INTO awa.jobs (queue, kind, args)
           SELECT 'q', 'noop', json_build_object('n', n, 'text', repeat('x', 100 + n * 7 % 700))
             FROM generate_series(1, 1000) n"""
    )
    size = scalar(conn, "SELECT sum(octet_length(args::text) + octet_length(kind)) FROM awa.jobs")
    runtime = register(conn)
    claims = 0
    while claim(conn, runtime, limit=1000).members:
        claims += 1
    assert size / LARGEST <= claims <= 2 * size / LARGEST


def test_a_long_body_keeps_no_short_ones_back(conn: Conn) -> None:
    """Guard: a long body is not among what is said to be too much for one message."""
    conn.execute(
        """INSERT INTO awa.jobs (queue, kind, args)
           SELECT 'q', 'noop', json_build_object('text', repeat('x', CASE WHEN n < 1000 THEN 10 ELSE 250000 END))
             FROM generate_series(1, 1000) n"""
    )
    runtime = register(conn)
    assert [len(claim(conn, runtime, limit=1000).members) for _ in range(3)] == [999, 1, 0]


def test_one_that_was_cancelled_hides_nothing_and_is_not_started(conn: Conn) -> None:
    """Guard: a claim that picked entries that had ended goes through the passes that leave them out."""
    runtime = register(conn)
    ids = insert(conn, *range(10))
    cancel(conn, ids[3])
    cancel(conn, ids[9])
    assert claim_in_steps(conn, runtime, limit=4) == [0, 1, 2, 4, 5, 6, 7, 8]
