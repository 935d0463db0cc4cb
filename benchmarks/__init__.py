"""Measurements, each run by its own command. README.md and LAB.md list the results, with machine
and date.
"""
