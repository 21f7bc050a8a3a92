"""The buffers of outcomes, while threads add to them and another takes from them."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from awa._core import Crew, Handler, Outcomes
from tests.fixtures.batches import RUNTIME, make_batch, successes
from tests.fixtures.db import wait_until

THREADS, ROUNDS, SIZE = 3, 20, 200


class Garbage:
    """What only a collection frees; its end lets the workers run meanwhile, and leaves more of it behind."""

    is_wanted = True
    is_slow = False

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        if Garbage.is_slow:
            time.sleep(0.0001)
        if Garbage.is_wanted:
            Garbage()


@pytest.fixture
def collecting() -> Iterator[None]:
    """A collection at every allocation, with a finalizer in each."""
    before = gc.get_threshold()
    Garbage.is_wanted = True
    gc.set_threshold(1, 1, 1)
    Garbage()
    yield
    Garbage.is_wanted = False
    gc.set_threshold(*before)
    gc.collect()


def test_successes_are_taken_once_whatever_the_collector_does_meanwhile(collecting: None) -> None:
    outcomes = Outcomes()
    crew = Crew(
        THREADS,
        outcomes,
        job=lambda attempt, args: None,
        conclude=lambda *ending: None,
        late=lambda *ending: None,
        lead=lambda: crew.rest(),
        chosen=Exception,
        flush_after=1e9,
    )
    # jobs that end one by one, so that some do in the midst of a take
    handler = Handler("work", lambda: time.sleep(0.00005), lambda text: {}, is_typed=False)
    threads = [threading.Thread(target=crew.work, args=(index,), daemon=True) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    taken: Counter[tuple[int, int]] = Counter()

    def take() -> None:
        # a list is made of one that was freed, without asking the collector, as long as there are any
        kept: list[list[int]] = [[] for _ in range(100)]
        Garbage.is_slow = True
        flushes = outcomes.take(RUNTIME)
        Garbage.is_slow = False
        kept.clear()
        for flush in flushes:
            taken.update(successes(flush))
            outcomes.acknowledged(flush)

    give_up_at = time.monotonic() + 30
    for claim_id in range(1, ROUNDS + 1):
        attempts = make_batch(claim_id, SIZE, handler)
        outcomes.opened(attempts)
        crew.refill(attempts, SIZE)
        while crew.finished < claim_id * SIZE:
            assert time.monotonic() < give_up_at
            take()
    crew.dismiss()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    take()
    assert taken == Counter((claim, idx) for claim in range(1, ROUNDS + 1) for idx in range(1, SIZE + 1))
    assert outcomes.open_claims() == []
    wait_until(lambda: outcomes.count == 0)
