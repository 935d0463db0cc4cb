"""One training step: forward, loss and their compilation; validation; operation counts."""
