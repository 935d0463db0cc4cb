"""Traces: chooses if traces are made, which they are if the settings name a collector. Only then is
`otlp.py` imported, because the packages that it needs are an optional dependency."""

from typing import TYPE_CHECKING

from logitd.model.extras import installation
from logitd.service.settings.serve import ServeSettings

if TYPE_CHECKING:
    from logitd.service.tracing.otlp import OtlpTraces


class TracesError(Exception):
    """Traces cannot be made. The message says why, and what to install."""


def traces_of(settings: ServeSettings) -> "OtlpTraces | None":
    """The object that makes traces; None if the settings do not name a collector. Raises
    TracesError."""
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
