"""Traces: a span for each request, sent to an OpenTelemetry collector; an optional dependency."""
