"""Tracing: a span for each request, sent to an OpenTelemetry collector. OpenTelemetry's packages
are an optional dependency."""
