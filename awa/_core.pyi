from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any, Final, Self, final

# --- values: what may be stored as JSON

def path_step(key: object) -> str: ...
def check_json(value: object, path: str, max_depth: int = 64) -> None: ...
def dump_json(value: object, path: str, max_bytes: int) -> bytes: ...

# --- canonical: one text per value, for keys and hashes

def float_text(value: float) -> str: ...
def canonical_json(value: object) -> bytes: ...
def unique_key(
    kind: str,
    args: object,
    *,
    queue: str | None = None,
    by_args: bool | Collection[str] = True,
    by_queue: bool = False,
    bucket: int | None = None,
) -> bytes: ...

# --- names: the kind of a class or a function

def derive_kind(class_or_name: object) -> str: ...

# --- attempts: claimed batches, their members, and what became of them

@final
class Handler:
    kind: Final[str]
    function: Final[Callable[..., object]]
    load: Final[Callable[[bytes], Any]]
    is_typed: Final[bool]
    options: Final[Any]
    def __new__(
        cls,
        kind: str,
        function: Callable[..., object],
        load: Callable[[bytes], Any],
        *,
        is_typed: bool,
        options: object = None,
    ) -> Self: ...

@final
class Batch:
    claim_id: Final[int]
    runtime: Final[int]
    slot: Final[int]
    nonce: Final[int]
    priority: Final[int]
    queue: Final[str]
    size: Final[int]
    @property
    def open(self) -> int: ...
    @property
    def unfinished(self) -> int: ...

@final
class Attempt:
    batch: Final[Batch]
    handler: Final[Handler]
    idx: Final[int]
    @property
    def started(self) -> float: ...
    @property
    def is_expired(self) -> bool: ...
    is_cancelled: bool
    was_completed: bool
    is_over: bool
    @property
    def id(self) -> int: ...
    @property
    def entry_id(self) -> int: ...
    @property
    def attempt(self) -> int: ...
    @property
    def max_attempts(self) -> int: ...
    @property
    def created_at(self) -> datetime: ...
    @property
    def details(self) -> dict[str, Any]: ...
    @property
    def has_args(self) -> bool: ...
    def put_args(self, body: bytes) -> None: ...
    def args_text(self) -> bytes: ...
    def expire(self, exception: type[BaseException]) -> bool: ...

def decode_batch(
    row: list[bytes | None], runtime: int, queue: str, handlers: dict[bytes, Handler]
) -> list[Attempt]: ...
def int2_array(values: list[int]) -> bytes: ...
def text_array(values: list[str] | list[str | None] | list[bytes] | list[bytes | None]) -> bytes: ...

@final
class Flush:
    number: Final[int]
    runtime: Final[int]
    count: Final[int]
    is_doubtful: Final[bool]
    arrays: Final[tuple[bytes, ...]]

@final
class Outcomes:
    @property
    def count(self) -> int: ...
    @property
    def oldest(self) -> float: ...
    @property
    def newest_claim(self) -> int: ...
    def clear(self) -> None: ...
    def opened(self, attempts: list[Attempt]) -> None: ...
    def open_claims(self) -> list[int]: ...
    def unfinished(self, queue: str) -> int: ...
    def add(
        self,
        attempt: Attempt,
        outcome: str,
        *,
        delay: float = 0.0,
        elapsed_ms: int = 0,
        error: bytes | str | None = None,
    ) -> None: ...
    def take(self, runtime: int) -> list[Flush]: ...
    def split(self, flush: Flush) -> list[Flush]: ...
    def acknowledged(self, flush: Flush) -> None: ...

# --- the loop that calls handlers

def current_job() -> Any: ...

@final
class Crew:
    running: Final[list[Attempt | None]]
    outcomes: Final[Outcomes]
    @property
    def is_leading(self) -> bool: ...
    @property
    def mean_seconds(self) -> float: ...
    @property
    def finished(self) -> int: ...
    is_asleep: bool
    poke: Callable[[], object]
    def __new__(
        cls,
        size: int,
        outcomes: Outcomes,
        *,
        job: Callable[[Attempt, Any], object],
        conclude: Callable[[Attempt, object, BaseException | None, int], object],
        lead: Callable[[], object],
        chosen: type[BaseException],
        flush_after: float,
    ) -> Self: ...
    @property
    def unstarted(self) -> int: ...
    def busy(self) -> int: ...
    def start(self) -> None: ...
    def refill(self, attempts: list[Attempt], token_after: int) -> None: ...
    def rest(self) -> None: ...
    def take_lead(self) -> bool: ...
    def drain(self) -> list[Attempt]: ...
    def dismiss(self) -> None: ...
    def work(self, index: int) -> None: ...
