"""A trace goes on from the insert of a job to its handler."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import awa
from tests.fixtures.db import wait_until
from tests.fixtures.jobs import StartWorker

Span = trace.Span


@pytest.fixture
def span() -> Iterator[Span]:
    """An open span, as a request's."""
    with TracerProvider().get_tracer("tests").start_as_current_span("request") as span:
        yield span


def trace_of(metadata: dict[str, Any]) -> int:
    """The trace that *metadata* belongs to, as OpenTelemetry reads it."""
    context = TraceContextTextMapPropagator().extract(metadata)
    return trace.get_current_span(context).get_span_context().trace_id


def test_it_travels_in_the_metadata_of_every_way_in(client: awa.Client, start_worker: StartWorker, span: Span) -> None:
    """Guard: _traced in awa/insert.py, in the path of plain jobs too."""
    seen: dict[str, dict[str, Any]] = {}

    @client.task()
    def note(name: str) -> None:
        seen[name] = awa.current_job().metadata

    new = awa.NewJob(note.bind("own"), metadata={"tenant": 7}, on_completed=note.bind("follow-up"))
    client.insert(note.bind("plain"))
    client.insert(new)
    client.insert_many([note.bind("batch"), note.bind("batch 2")])
    client.insert(note.bind("another's"), metadata={"traceparent": "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"})
    client.insert_many_copy([note.bind("copy")])
    start_worker(client)
    wait_until(lambda: len(seen) == 7, timeout=10.0)
    ours = span.get_span_context().trace_id
    assert {name: trace_of(metadata) for name, metadata in seen.items()} == {
        **dict.fromkeys(("plain", "own", "follow-up", "batch", "batch 2", "copy"), ours),
        "another's": int("ab" * 16, 16),
    }
    assert seen["own"]["tenant"] == 7


def test_without_a_span_nothing_is_added(client: awa.Client) -> None:
    assert client.insert({"n": 1}, kind="k").get().metadata is None


def test_who_does_not_use_it_does_not_import_it() -> None:
    program = "import awa, sys; from awa.trace import trace_context; assert trace_context() == {};"
    program += "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    subprocess.run([sys.executable, "-c", program], check=True)
