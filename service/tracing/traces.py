"""Traces: what the application knows of them, and whether there are any.

The packages that make them are an optional dependency: `otlp.py`, which imports them, is itself
imported only where an endpoint for traces is set.
"""

from typing import Protocol

from logitd.model.extras import installation
from logitd.service.settings.serve import ServeSettings
from logitd.service.tracing.attributes import Ended


class TracesError(Exception):
    """There can be no traces; the message says why, and what to do."""


class Traces(Protocol):
    """Makes the spans of requests between `open` and `close`. Belongs to the event loop."""

    def open(self) -> None:
        """Start the thread that sends."""

    def record(self, ended: Ended) -> str | None:
        """Make the spans of a request; the id of its trace, None where it is not traced. What the
        engine has not told yet is waited for, after this call."""

    def close(self) -> None:
        """Send what waits, within a bound. Blocks."""


def traces_of(settings: ServeSettings) -> Traces | None:
    """The traces that the settings ask for, if they do. Raises TracesError where the packages are
    missing."""
    if settings.otlp_endpoint is None:
        return None
    try:
        from logitd.service.tracing.otlp import OtlpTraces
    except ImportError as error:
        raise TracesError(
            "--otlp-endpoint sends traces by OpenTelemetry's SDK, and that is not installed: "
            f"{installation('otel')}"
        ) from error
    return OtlpTraces(settings.otlp_endpoint, settings.trace_ratio)
