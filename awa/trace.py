"""The trace that an insert belongs to, as it travels with the job: W3C Trace Context, in the job's metadata."""

from __future__ import annotations

import sys

__all__ = ["is_active", "trace_context"]

_API = "opentelemetry.trace"


def is_active() -> bool:
    """Whether this process uses OpenTelemetry; a program that does has imported it."""
    return _API in sys.modules


def trace_context() -> dict[str, str]:
    """``traceparent``, and ``tracestate`` where there is one, of the span that is open in this thread; else nothing.

    Source: https://www.w3.org/TR/trace-context/
    """
    if not is_active() or not sys.modules[_API].get_current_span().get_span_context().is_valid:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier
