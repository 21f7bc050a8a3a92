"""How the threads of a process are shared: a simulation, with a clock of its own, of queues that claim and run."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from awa.config import QueueSpec
from awa.worker.shares import Load, Shares


@dataclass
class Process:
    """Threads that run jobs from one inbox, in the order in which they were claimed."""

    threads: int
    queues: list[QueueSpec]
    takes: Mapping[str, float]
    """Seconds of a job, by queue."""
    ahead: int = 0
    """Attempts claimed beyond the free threads."""
    seed: int = 0
    waiting: dict[str, float] = field(default_factory=dict)
    """Jobs that wait in the database; endless where nothing is said."""
    used: dict[str, float] = field(default_factory=dict)
    """Seconds of threads."""
    now: float = 0.0

    def __post_init__(self) -> None:
        self.shares = Shares(self.threads, self.queues)
        self.names = [spec.name for spec in self.queues]
        self.inbox: deque[str] = deque()
        self.running: list[tuple[float, float, str]] = []  # end, start, queue
        self.opened = dict.fromkeys(self.names, 0)
        self.spent = dict.fromkeys(self.names, 0.0)
        self.ended = dict.fromkeys(self.names, 0)
        self.used = dict.fromkeys(self.names, 0.0)
        self.most: dict[str, int] = dict.fromkeys(self.names, 0)
        self.random = random.Random(self.seed)
        self.idle_threads = 0.0

    def open(self, name: str) -> int:
        return self.opened[name]

    def loads(self) -> dict[str, Load]:
        return {
            name: Load(
                self.open(name),
                [self.now - start for _, start, one in self.running if one == name],
                self.spent[name],
                self.ended[name],
            )
            for name in self.names
        }

    def claim(self) -> None:
        """As a leader does: until the threads have something, or every queue was asked."""
        asked: set[str] = set()
        if len(self.inbox) > self.ahead // 2:  # somebody comes back for more while the rest of the batch runs
            return
        while True:
            limit = self.threads - len(self.running) + self.ahead - len(self.inbox)
            among = [name for name in self.names if name not in asked]
            if limit <= 0 or not among:
                return
            loads = self.loads()
            wanted = self.shares.divide(limit, among, loads)
            assert sum(wanted.values()) <= limit
            if not wanted:
                return
            for name, count in wanted.items():
                assert count >= 1
                got = int(min(count, self.waiting.get(name, count)))
                if name in self.waiting:
                    self.waiting[name] -= got
                self.shares.came(name, got)
                self.inbox.extend([name] * got)
                self.opened[name] += got
                if got < count:
                    asked.add(name)
            mixed = list(self.inbox)
            self.random.shuffle(mixed)
            self.inbox = deque(mixed)
            self.begin()

    def begin(self) -> None:
        while self.inbox and len(self.running) < self.threads:
            name = self.inbox.popleft()
            length = self.takes[name] * self.random.uniform(0.5, 1.5)
            heapq.heappush(self.running, (self.now + length, self.now, name))
        for spec in self.queues:
            self.most[spec.name] = max(self.most[spec.name], self.open(spec.name))
            assert spec.max_workers is None or self.open(spec.name) <= spec.max_workers

    def run(self, until: float) -> None:
        while self.now < until:
            self.claim()
            if not self.running:
                return
            end, start, name = heapq.heappop(self.running)
            self.idle_threads += (end - self.now) * (self.threads - len(self.running) - 1)
            self.now = end
            self.spent[name] += end - start
            self.used[name] += end - start
            self.ended[name] += 1
            self.opened[name] -= 1
            self.begin()

    def part(self, name: str) -> float:
        return self.used[name] / sum(self.used.values())


@pytest.mark.parametrize("threads", [1, 10])
@pytest.mark.parametrize("weights", [(3, 1), (5, 2, 1)])
@pytest.mark.parametrize("unlike", [1.0, 8.0, 0.125])
@pytest.mark.parametrize("ahead", [0, 40])
def test_busy_queues_have_threads_by_their_weights(
    threads: int, weights: tuple[int, ...], unlike: float, ahead: int
) -> None:
    queues = [QueueSpec(f"q{n}", weight=weight) for n, weight in enumerate(weights)]
    takes = {spec.name: 0.01 * (unlike if n == 0 else 1.0) for n, spec in enumerate(queues)}
    process = Process(threads, queues, takes, ahead=ahead)
    process.run(200 * max(takes.values()) * (threads + 3) / threads)
    for spec in queues:
        due = spec.weight / sum(weights)
        assert process.part(spec.name) == pytest.approx(due, rel=0.1), process.used
    assert process.idle_threads < 1e-6


def test_what_no_queue_keeps_is_shared_by_weight() -> None:
    queues = [QueueSpec("a", min_workers=2, weight=3), QueueSpec("b", min_workers=1), QueueSpec("c", weight=3)]
    process = Process(10, queues, {"a": 1.0, "b": 0.2, "c": 0.05})
    process.run(150)
    # seven threads by 3 : 1 : 3
    for name, due in (("a", 2 + 3), ("b", 1 + 1), ("c", 3)):
        assert process.part(name) == pytest.approx(due / 10, rel=0.1), process.used


def test_kept_threads_are_free_whatever_the_others_have() -> None:
    queues = [QueueSpec("a", min_workers=2), QueueSpec("b"), QueueSpec("c", 3)]
    process = Process(6, queues, {"a": 1.0, "b": 1.0, "c": 1.0}, ahead=30, waiting={"a": 0})
    process.run(20)
    assert process.most["b"] + process.most["c"] >= 4
    assert len(process.running) == 3  # of four: one has just ended
    process.waiting["a"] = 2
    process.claim()
    assert process.open("a") == 2
    assert len(process.running) == 6


def test_a_queue_alone_has_all_threads_up_to_its_max() -> None:
    queues = [QueueSpec("a", weight=9), QueueSpec("b", weight=1), QueueSpec("c", 4, weight=5)]
    process = Process(10, queues, {"a": 1.0, "b": 1.0, "c": 1.0}, waiting={"a": 0, "c": 0})
    process.run(20)
    assert process.most["b"] == 10
    process = Process(10, queues, {"a": 1.0, "b": 1.0, "c": 1.0}, waiting={"a": 0, "b": 0})
    process.run(20)
    assert process.most["c"] == 4


@pytest.mark.parametrize("threads", [1, 10])
def test_a_queue_that_had_no_work_has_saved_nothing_up(threads: int) -> None:
    queues = [QueueSpec("a"), QueueSpec("b")]
    process = Process(threads, queues, {"a": 1.0, "b": 1.0}, waiting={"a": 0})
    process.run(300)
    del process.waiting["a"]
    before = process.used["b"]
    process.run(400)
    assert (process.used["b"] - before) / (100 * threads) == pytest.approx(0.5, rel=0.15)


@settings(max_examples=60, deadline=None)
@given(
    threads=st.integers(1, 12),
    specs=st.lists(
        st.tuples(st.one_of(st.none(), st.integers(1, 12)), st.integers(0, 4), st.integers(1, 1000)),
        min_size=1,
        max_size=5,
    ),
    lengths=st.lists(st.sampled_from([0.0, 0.001, 0.1, 5.0]), min_size=5, max_size=5),
    waiting=st.lists(st.sampled_from([0, 1, 7, 100, 10_000]), min_size=5, max_size=5),
    ahead=st.integers(0, 50),
    seed=st.integers(0, 2**32),
)
def test_no_more_than_threads_and_max_and_never_a_kept_one(
    threads: int,
    specs: list[tuple[int | None, int, int]],
    lengths: list[float],
    waiting: list[int],
    ahead: int,
    seed: int,
) -> None:
    queues = []
    left = threads
    for n, (most, least, weight) in enumerate(specs):
        least = min(least, left, most or least)
        left -= least
        queues.append(QueueSpec(f"q{n}", most, least, weight))
    names = [spec.name for spec in queues]
    process = Process(
        threads,
        queues,
        dict(zip(names, lengths, strict=False)),
        ahead=ahead,
        seed=seed,
        waiting=dict(zip(names, map(float, waiting), strict=False)),
    )
    for _ in range(60):
        process.claim()
        opens = {spec.name: process.open(spec.name) for spec in queues}
        if process.shares.keep_threads:
            assert sum(max(spec.min_workers, opens[spec.name]) for spec in queues) <= threads
        for spec in queues:  # nobody waits while there is a thread for it
            most = threads if spec.max_workers is None else spec.max_workers
            if process.waiting[spec.name] and opens[spec.name] < most and not process.inbox:
                kept = sum(max(spec.min_workers, opens[spec.name]) for spec in queues)
                assert len(process.running) == threads or (process.shares.keep_threads and kept >= threads)
        for _ in range(process.random.randint(1, 3)):
            if process.running:
                end, start, name = heapq.heappop(process.running)
                process.now = max(process.now, end)
                process.spent[name] += end - start
                process.ended[name] += 1
                process.opened[name] -= 1
                process.begin()
