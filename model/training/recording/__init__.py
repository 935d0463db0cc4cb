"""Work between steps: evaluations, checkpoints and samples, and their order."""
