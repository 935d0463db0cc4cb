"""Metrics: the series that the server exports to Prometheus."""
