"""Traces: what makes them, if the settings name a collector.

`otlp.py` is imported only then, because its packages are an optional dependency.
"""

from typing import TYPE_CHECKING

from logitd.model.extras import installation
from logitd.service.settings.serve import ServeSettings

if TYPE_CHECKING:
    from logitd.service.tracing.otlp import OtlpTraces


class TracesError(Exception):
    """Traces are impossible; the message says why, and what to do."""


def traces_of(settings: ServeSettings) -> "OtlpTraces | None":
    """The traces of the settings; None if they name no collector. Raises TracesError if the
    packages are missing."""
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
