"""A dashboard for Grafana, and what Grafana has to be told to show it."""
