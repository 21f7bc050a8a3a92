"""Whose jobs the free threads of a process get next, when its queues have a ``min`` or a ``weight``.

``min`` threads are kept for a queue: nobody else's jobs ever run there. The others are shared: whichever queue has used
them least, in seconds of threads by its weight, is next. So the shares hold in the long run whatever the jobs of each
queue take, and a queue that has no work leaves its share to the others and saves nothing up.

    virtual time of a queue  =  seconds that its jobs have had of the shared threads
                                and will have had when those at hand have ended, by the mean   / weight

(Fair queueing, with the cost of a job guessed by the mean of its queue until it has ended.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from awa.config import QueueSpec

MEMORY = 0.2
"""How much of a queue's mean run time comes from the jobs that have ended since the last look."""

UNKNOWN = 0.001
"""Mean run time, in seconds, as long as none has ended and none runs."""

STEPS = 32
"""A batch is dealt out in about so many parts: the next one makes up for what is uneven."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a process has of one queue."""

    open: int = 0
    """Attempts that were claimed and have not ended."""
    running: Sequence[float] = ()
    """Of those that have started, the seconds since."""
    spent: float = 0.0
    """Seconds that those which have ended took, ever."""
    ended: int = 0
    """How many those were."""


@dataclass(slots=True)
class _Account:
    spec: QueueSpec
    mean: float | None = None
    spent: float = 0.0  # at the last look
    ended: int = 0  # at the last look
    open: int = 0  # at the last look, and what has come since
    shared: float = 0.0  # seconds of shared threads
    raised: float = 0.0  # virtual time in which it had no work

    def look(self, load: Load) -> None:
        spent, ended = load.spent - self.spent, load.ended - self.ended
        if ended > 0:
            mean = max(spent, 0.0) / ended
            self.mean = mean if self.mean is None else self.mean + (mean - self.mean) * MEMORY
            self.shared += max(spent, 0.0) * self.shared_part(self.open)
        self.spent, self.ended, self.open = load.spent, load.ended, load.open

    def shared_part(self, open: int) -> float:
        """How much of what *open* attempts take is of the shared threads."""
        return max(open - self.spec.min_workers, 0) / open if open else 0.0


@dataclass(slots=True)
class Shares:
    """The accounts of a process's queues. It reads no clock and claims nothing.

    Args:
        threads: How many the process has.
        queues: What they serve; the sum of ``min_workers`` is at most *threads*.
    """

    threads: int
    queues: Sequence[QueueSpec]
    _accounts: dict[str, _Account] = field(init=False)
    _now: float = field(init=False, default=0.0)  # virtual time of whoever was served last
    _guess: float = field(init=False, default=UNKNOWN)  # mean run time of a queue of which nothing is known

    def __post_init__(self) -> None:
        self._accounts = {spec.name: _Account(spec) for spec in self.queues}

    @property
    def are_even(self) -> bool:
        """No queue has a ``min`` or a ``weight``: it is enough that each is first in its turn."""
        return all(not spec.min_workers and spec.weight == 1 for spec in self.queues)

    @property
    def keep_threads(self) -> bool:
        """A queue has a ``min``: then nothing is claimed ahead, or what waits for a thread might need a kept one."""
        return any(spec.min_workers for spec in self.queues)

    def room(self, loads: Mapping[str, Load]) -> dict[str, int]:
        """How many more attempts of each queue this process may have open, were it to claim from that one alone."""
        free = self._shared_free(loads)
        found = {}
        for spec in self.queues:
            open = loads[spec.name].open
            most = max(spec.min_workers - open, 0) + free
            found[spec.name] = most if spec.max_workers is None else min(most, spec.max_workers - open)
        return found

    def _shared_free(self, loads: Mapping[str, Load]) -> int:
        if not self.keep_threads:
            return 1 << 30
        return max(self.threads - sum(max(spec.min_workers, loads[spec.name].open) for spec in self.queues), 0)

    def divide(self, limit: int, among: Collection[str], loads: Mapping[str, Load]) -> dict[str, int]:
        """Of how many attempts to claim from which queue.

        Args:
            limit: Most of all together.
            among: The queues that may have work, first to be asked first when nothing else decides.
            loads: What there is of each queue, of those that are not asked too.

        Returns:
            Queue -> how many, at least one each.
        """
        for name, account in self._accounts.items():
            account.look(loads[name])
        longest = max((self._mean(one, loads[name]) or 0.0 for name, one in self._accounts.items()), default=0.0)
        self._guess = longest = longest or UNKNOWN
        room = self.room(loads)
        given = {}
        left = limit
        for name in among:  # what is kept for a queue
            own = self._accounts[name].spec.min_workers - loads[name].open
            given[name] = max(min(own, room[name], left), 0)
            left -= given[name]
        left = min(left, self._shared_free(loads))
        virtual = {}
        for name in among:
            account = self._accounts[name]
            lag = self._now - longest * self.threads / account.spec.weight - self._virtual(account, loads[name])
            account.raised += max(lag, 0.0)  # what it could not have had is not owed to it
            virtual[name] = self._virtual(account, loads[name])
        step = max(1, left // STEPS)
        served = set()
        while left > 0:
            able = [name for name in among if given[name] < room[name]]
            if not able:
                break
            name = min(able, key=lambda one: virtual[one])
            count = min(step, left, room[name] - given[name])
            if name not in served:
                served.add(name)
                self._now = max(virtual[name], self._now) if len(served) > 1 else virtual[name]
            given[name] += count
            left -= count
            # of no length, it would get everything
            cost = max(self._mean(self._accounts[name], loads[name]) or self._guess, 1e-6)
            virtual[name] += count * cost / self._accounts[name].spec.weight
        return {name: count for name, count in given.items() if count > 0}

    def came(self, queue: str, count: int) -> None:
        """Note that a claim brought *count* attempts of *queue*; none: it has no work."""
        account = self._accounts[queue]
        account.open += count
        if not count:
            idle = self._virtual(account, Load(open=account.open, running=()))
            account.raised += max(self._now - idle, 0.0)

    @staticmethod
    def _mean(account: _Account, load: Load) -> float | None:
        """Mean run time of a queue; as long as none of its jobs has ended, it is what the first have taken so far."""
        return max(load.running, default=None) if account.mean is None else account.mean

    def _virtual(self, account: _Account, load: Load) -> float:
        mean = self._mean(account, load) or self._guess
        pending = sum(max(seconds, mean) for seconds in load.running)
        pending += max(load.open - len(load.running), 0) * mean
        used = account.shared + pending * account.shared_part(load.open)
        return used / account.spec.weight + account.raised
