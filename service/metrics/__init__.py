"""Metrics: what the service tells Prometheus."""
