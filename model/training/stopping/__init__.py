"""The end of a run: by its length, a signal, or divergence."""
