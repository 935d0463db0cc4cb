"""Metrics: the series that Prometheus scrapes."""
