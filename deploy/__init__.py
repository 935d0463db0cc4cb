"""Deployments of logitd: monitoring, balancing, clusters."""
