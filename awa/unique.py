"""The key that equal jobs share."""

from __future__ import annotations

import sys
from collections.abc import Collection

import orjson

from awa import _core
from awa.args import codec_for

__all__ = ["unique_key"]


def unique_key(
    kind: str,
    args: object,
    *,
    queue: str | None = None,
    by_args: bool | Collection[str] = True,
    by_queue: bool = False,
    bucket: int | None = None,
) -> bytes:
    """The 16 bytes under which an equal job is found, as every client of the queue computes them.

    Args:
        kind: The job's kind.
        args: The args: a dict, or a value of the type that a handler declares.
        queue: Where the job waits; needed with *by_queue*.
        by_args: True for all args, False for none, or top-level names: the object of those that are present, so that
            a missing name differs from null.
        by_queue: Whether equal jobs in different queues differ.
        bucket: Number of the period, ``floor(epoch / period)``; None without a period.

    Raises:
        ValidationError: The kind, queue, bucket or args are no values of a job.
        ConfigError: *by_queue* without a queue, or *by_args* that is neither a bool nor names.
    """
    if not isinstance(args, dict):
        args = orjson.loads(codec_for(type(args)).dump(args, sys.maxsize))
    return _core.unique_key(kind, args, queue=queue, by_args=by_args, by_queue=by_queue, bucket=bucket)
