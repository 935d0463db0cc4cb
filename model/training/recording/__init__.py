"""What happens between steps: evaluations, checkpoints and samples, and their order."""
