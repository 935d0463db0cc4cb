"""Progress and end of a run: its length, a signal, divergence."""
