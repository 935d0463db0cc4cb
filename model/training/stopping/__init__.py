"""When a run ends: its length, a signal, divergence."""
