"""Traces: enables tracing if the settings name a collector. Only then is `otlp.py` imported,
because it needs an optional dependency."""

from typing import TYPE_CHECKING

from logitd.model.extras import installation
from logitd.service.settings.serve import ServeSettings

if TYPE_CHECKING:
    from logitd.service.tracing.otlp import OtlpTraces


class TracesError(Exception):
    """Raised if tracing cannot be enabled. The message says why, and what to install."""


def traces_of(settings: ServeSettings) -> "OtlpTraces | None":
    """The tracer; None if the settings name no collector. Raises TracesError."""
    if settings.otlp_endpoint is None:
        return None
    try:
        from logitd.service.tracing.otlp import OtlpTraces
    except ImportError as error:
        raise TracesError(
            "--otlp-endpoint needs OpenTelemetry's SDK, which is not installed: "
            f"{installation('otel')}"
        ) from error
    return OtlpTraces(settings.otlp_endpoint, settings.trace_ratio)
