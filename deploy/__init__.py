"""Deployment of logitd: monitoring, load balancing, clusters."""
