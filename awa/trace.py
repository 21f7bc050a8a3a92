"""The trace that an insert belongs to, as it travels with the job: W3C Trace Context, in the job's metadata."""

from __future__ import annotations

import sys

__all__ = ["API", "trace_context"]

API = "opentelemetry.trace"
"""The module that a program has imported when it uses OpenTelemetry."""


def trace_context() -> dict[str, str]:
    """``traceparent``, and ``tracestate`` where there is one, of the span that is open in this thread; else nothing.

    Source: https://www.w3.org/TR/trace-context/
    """
    api = sys.modules.get(API)
    if api is None or not api.get_current_span().get_span_context().is_valid:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier
