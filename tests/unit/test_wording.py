"""What is long, said shortly."""

from __future__ import annotations

import pytest

from awa.wording import age, listed


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-3.0, "0 s"), (0.9, "0 s"), (119.9, "119 s"), (120, "2 min"), (7199, "119 min"), (7200, "2 h"), (432_000, "5 d")],
)
def test_an_age_is_in_the_largest_unit_of_which_there_are_two(seconds: float, shown: str) -> None:
    assert age(seconds) == shown


def test_a_list_tells_how_many_it_leaves_out() -> None:
    assert (listed([]), listed([1, 2], 2), listed("abc", 2)) == ("", "1, 2", "a, b and 1 more")
    assert listed(range(1010)).endswith("8, 9 and 1,000 more")
