"""Goals of speed and size: measured, kept, and judged. `python -m benchmarks.goals --help`."""
