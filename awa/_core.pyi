from collections.abc import Collection

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
