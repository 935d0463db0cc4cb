"""Measurements, each a command. Results with machine and date are in README.md and LAB.md."""
