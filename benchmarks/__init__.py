"""Measurements, each with a command. README.md and LAB.md have results, with machine and date."""
