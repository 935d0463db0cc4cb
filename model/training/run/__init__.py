"""The run directory: state, metrics, card, plot, samples and summary."""
