"""A Grafana dashboard, and the provisioning files that load it."""
