"""R38: a missing argument, null and the empty text were equal in one order of inserts and different in another; a key
with a null in it was no key at all.

Now values that differ give different keys, a missing name differs from null, and no value switches uniqueness off.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import psycopg

import awa
from awa import NewJob, Unique

VALUES: list[dict[str, Any]] = [{}, {"a": None}, {"a": ""}, {"a": 1}, {"b": 1}]

BY_A = [0, 1, 2, 3, 0]
"""Which of them are equal by ``a`` alone: a name that is missing is the same whatever else is there."""


def test_the_outcome_is_the_same_in_every_order(client: awa.Client, conn: psycopg.Connection[Any]) -> None:
    """Guard: the key is made of the object of the names that are present; a join of texts, or SQL's NULL, loses some.

    All 120 orders; each under a kind of its own, which sets it apart.
    """
    for unique, equal in ((Unique(), [0, 1, 2, 3, 4]), (Unique(by_args=["a"]), BY_A)):
        items: list[NewJob] = []
        expected: list[tuple[str, int, bool]] = []
        for n, order in enumerate(permutations(range(len(VALUES)))):
            kind = f"{len(set(equal))}-{n}"
            seen: set[int] = set()
            for which in order:
                items.append(NewJob(VALUES[which], kind=kind, unique=unique))
                expected.append((kind, equal[which], equal[which] not in seen))
                seen.add(equal[which])
        found = client.insert_many(items)
        assert [one.is_new for one in found] == [is_new for _, _, is_new in expected]
        by_class: dict[tuple[str, int], set[int]] = {}
        for one, (kind, which, _) in zip(found, expected, strict=True):
            by_class.setdefault((kind, which), set()).add(one.id)
        assert all(len(ids) == 1 for ids in by_class.values())
        again = client.insert_many(items)
        assert [one.id for one in again] == [one.id for one in found] and not any(one.is_new for one in again)
    # one by one, as single inserts
    for which, value in enumerate(VALUES):
        assert client.insert(value, kind="one", unique=Unique(by_args=["a"])).is_new == (which != 4)
    assert conn.execute("SELECT count(*) FROM awa.job_uniques WHERE octet_length(key) <> 16").fetchone() == (0,)


def test_a_null_or_empty_key_from_sql_is_refused_or_no_key(conn: psycopg.Connection[Any]) -> None:
    """Guard: p_unique_key has 16 bytes or is NULL, which means: not unique; the table takes nothing else."""
    for key in (b"", b"\0", bytes(15), bytes(17)):
        with conn.transaction() as _, conn.cursor() as cursor:
            try:
                cursor.execute("SAVEPOINT s")
                cursor.execute("SELECT awa.enqueue_v1('k', p_unique_key => %s)", [key])
            except psycopg.errors.InvalidParameterValue as error:
                assert "p_unique_key has 16 bytes" in str(error)
                cursor.execute("ROLLBACK TO s")
            else:
                raise AssertionError(key)
    for _ in range(2):
        assert conn.execute("SELECT is_new FROM awa.enqueue_v1('k', p_unique_key => NULL)").fetchone() == (True,)
    assert conn.execute("SELECT is_new FROM awa.enqueue_v1('k', p_unique_key => %s)", [bytes(16)]).fetchone() == (True,)
    assert conn.execute("SELECT is_new FROM awa.enqueue_v1('k', p_unique_key => %s)", [bytes(16)]).fetchone() == (
        False,
    )
