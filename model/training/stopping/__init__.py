"""How far a run is, and when it ends: its length, a signal, divergence."""
