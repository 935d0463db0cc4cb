"""Measurements, each a command; results with machine and date stand in README.md beside them."""
