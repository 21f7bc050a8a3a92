"""R44: values that JSON does not know came back as something else, and keys that are not text were merged.

Now a declared type is restored exactly, and anything else is refused at insert with its path; inline as well.
"""

from __future__ import annotations

import enum
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

import awa
from awa import ValidationError
from awa.testing import inline
from tests.fixtures.jobs import StartWorker, ended


class Size(enum.Enum):
    BIG = 1
    SMALL = "s"


@dataclass(frozen=True)
class Inner:
    at: datetime
    ids: tuple[UUID, ...]


@dataclass
class Rich:
    at: datetime
    day: date
    key: UUID
    price: Decimal
    data: bytes
    numbers: set[int]
    pair: tuple[int, str]
    size: Size
    inner: Inner
    maybe: Inner | None
    by_name: dict[str, Decimal]


RICH = Rich(
    at=datetime(2024, 10, 27, 2, 30, 0, 1, timezone(timedelta(hours=2, minutes=30))),
    day=date(1, 1, 1),
    key=UUID("12345678-1234-5678-1234-567812345678"),
    price=Decimal("1.10"),
    data=b"\0\xff",
    numbers={3, 1, 2},
    pair=(1, "1"),
    size=Size.SMALL,
    inner=Inner(datetime(9999, 12, 31, tzinfo=UTC), (UUID(int=0), UUID(int=1))),
    maybe=None,
    by_name={"a": Decimal("1E+5"), "": Decimal("-0.00")},
)


@pytest.mark.parametrize("is_inline", [False, True], ids=["worker", "inline"])
def test_declared_types_come_back_with_value_and_type(
    client: awa.Client, start_worker: StartWorker, is_inline: bool
) -> None:
    seen: list[Any] = []

    @client.task()
    def handle(job: awa.Job[Rich]) -> None:
        seen.append(job.args)

    @client.task()
    def plain(at: datetime, price: Decimal, data: bytes, size: Size = Size.BIG) -> None:
        seen.append((at, price, data, size))

    if is_inline:
        with inline(client) as book:
            client.insert_many([RICH, plain.bind(RICH.at, RICH.price, RICH.data)])
        assert [job.state for job in book.jobs] == ["completed", "completed"]
        assert seen[0] is not RICH
    else:
        start_worker(client)
        assert ended(client, client.insert(RICH)).state == "completed"
        assert ended(client, client.insert(plain.bind(RICH.at, RICH.price, RICH.data))).state == "completed"
    got = seen[0]
    assert got == RICH
    assert (got.at.utcoffset(), str(got.price), type(got.numbers), type(got.pair)) == (
        RICH.at.utcoffset(),
        "1.10",
        set,
        tuple,
    )
    assert [str(value) for value in got.by_name.values()] == ["1E+5", "-0.00"]
    assert seen[1] == (RICH.at, RICH.price, RICH.data, Size.BIG)


@pytest.mark.parametrize(
    "value",
    [
        datetime(2024, 1, 1, tzinfo=UTC), datetime(2024, 1, 1), date(2024, 1, 1), UUID(int=1), Decimal(1), b"x", {1},
        Size.BIG, Inner(datetime(2024, 1, 1, tzinfo=UTC), ()), object(), 1j, range(3),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_without_a_declared_type_they_are_refused_with_type_and_path(client: awa.Client, value: object) -> None:
    for where in (nullcontext(), inline(client)):
        with where, pytest.raises(ValidationError, match=type(value).__name__) as caught:
            client.insert({"a": [{"b": value}]}, kind="k")
        assert caught.value.path == "args.a[0].b"


@pytest.mark.parametrize("keys", [{1: 1}, {True: 1}, {None: 1}, {1.5: 1}, {1: "a", "1": "b"}, {(1,): 1}])
def test_keys_that_are_no_text_are_refused_not_merged(client: awa.Client, keys: dict[Any, Any]) -> None:
    for where in (nullcontext(), inline(client)):
        with where, pytest.raises(ValidationError) as caught:
            client.insert({"a": keys}, kind="k")
        assert caught.value.path.startswith("args.a")


def test_a_naive_datetime_is_refused_even_where_a_datetime_is_declared(client: awa.Client) -> None:
    @client.task()
    def work(at: datetime) -> None: ...

    for where in (nullcontext(), inline(client)):
        with where, pytest.raises(ValidationError) as caught:
            client.insert(work.bind(datetime(2024, 1, 1)))
        assert caught.value.path == "args.at"
